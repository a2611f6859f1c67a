"""Accelerators, and what engines add to a roofline on them: the explicit tables of which a profile names entries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """What one device can do at best: `bandwidth` of its memory in bytes/s, `peak` dense FLOPs/s, `memory` in bytes."""

    name: str
    bandwidth: float
    peak: float
    memory: float


# The vendors' data-sheet figures, one device each: matrix units, bfloat16 inputs, float32 sums, no sparsity.
ACCELERATORS = {
    name: Accelerator(name, terabytes * 1e12, teraflops * 1e12, gigabytes * 1e9)
    for name, terabytes, teraflops, gigabytes in (
        ("a10", 0.600, 125, 24),
        ("a100-40gb", 1.555, 312, 40),  # SXM
        ("a100-80gb", 2.039, 312, 80),  # SXM
        ("b200", 8.0, 2250, 180),  # an eighth of a DGX B200
        ("h100-pcie", 2.0, 756, 80),
        ("h100-sxm", 3.35, 989, 80),
        ("h200", 4.8, 989, 141),  # SXM
        ("l4", 0.300, 121, 24),
        ("l40s", 0.864, 362, 48),
        ("mi300x", 5.3, 1307, 192),
        ("rtx-3090", 0.936, 71, 24),
        ("rtx-4090", 1.008, 165, 24),
    )
}
# What CUDA and ROCm call them. Others of the same family (A10G, H100 NVL, RTX 4090 D, a part of a GPU) have other figures.
DEVICES = {
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
}


@dataclass(frozen=True)
class Efficiency:
    """The shares of bandwidth and of peak that real kernels reach, in (0, 1]; with tensor parallelism the latency of the
    all-reduces of one layer in ms (0: the devices exchange for nothing); `expert_reuse`: k tokens of one sequence that are
    verified together touch the experts of k**expert_reuse independent ones (1: neighbors share no experts); and `overlap`, p
    of (moving^p + computing^p)^(1/p): at 1 the two take turns, at infinity the longer one hides the other.
    """

    memory: float = 1.0
    compute: float = 1.0
    all_reduce_ms: float = 0.0
    expert_reuse: float = 1.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Engine:
    """What an engine adds to the roofline of its kernels, and how far off the result is.

    `layer_us`, `expert_layer_us`: each layer of a model, and each layer with experts besides; `round_ms`: each round;
    `draft_ms`: each draft step, of a head but its first. `efficiency`: that of its kernels, whose default fits published
    ratios. `factor`: 90% of published speedups lie within a factor of it of the computed ones, for `accelerator`, batches
    and contexts up to `batch` and `context`; anywhere else within its square. None of these bounds it where `accelerator`
    is None.
    """

    about: str
    factor: float
    layer_us: float = 0.0
    expert_layer_us: float = 0.0
    round_ms: float = 0.0
    draft_ms: float = 0.0
    efficiency: Efficiency = Efficiency(memory=0.8, compute=0.66)
    accelerator: str | None = None
    batch: int = 0
    context: int = 0

    def layers_ms(self, layers: int, with_experts: bool) -> float:
        """Return what a step takes longer for the layers of a model."""
        return layers * (self.layer_us + (self.expert_layer_us if with_experts else 0.0)) / 1000

    def factor_at(self, accelerator: str, batch: int, context: float) -> float:
        """Return the factor that holds for an accelerator, a batch and a context."""
        if self.accelerator is None:
            return self.factor
        at_home = accelerator == self.accelerator and batch <= self.batch and context <= self.context
        return self.factor if at_home else self.factor**2


# Fitted to SpecForge's SpecBundle (440 published cells; docs/costs.md): the constants to 63 cells of Llama-3.1-8B and
# Qwen3-30B-A3B, the factors to 138 cells of six other models.
ENGINES = {
    "none": Engine("a bare roofline: no overheads", factor=1.67),
    "sglang-h200": Engine(
        "SGLang 0.5.6 on H200, from published throughputs (SpecBundle)",
        factor=1.25,
        layer_us=38.8,
        expert_layer_us=28.4,
        round_ms=0.74,
        draft_ms=0.15,
        efficiency=Efficiency(memory=0.8, compute=0.66, expert_reuse=0.7, overlap=2.5),
        accelerator="h200",
        batch=8,
        context=4096,
    ),
}
