"""Accelerators, and what engines add to a roofline on them: the explicit tables of which a profile names entries."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from alphaprof.errors import OptionInvalid, shown

ELSEWHERE = 1.25**2  # the factor that holds where an engine's own does not
UNMEASURED = 0.5  # share of the peak of accelerators without one of their own


@dataclass(frozen=True)
class Accelerator:
    """What one device can do at best: `bandwidth` of its memory in bytes/s, `peak` dense FLOPs/s, `memory` in bytes; and
    what an engine's kernels were measured to reach there: `compute_share` of the peak in steps over some hundred tokens
    (None: not measured), `cache_share` of the bandwidth where they read the KV cache. `ampere`: of that generation, whose
    kernels of attention (FlashAttention 2) verify slower than they decode.
    """

    name: str
    bandwidth: float
    peak: float
    memory: float
    compute_share: float | None = None
    cache_share: float = 0.95
    ampere: bool = False


# Measured under vLLM, of an H200 under SGLang (docs/costs.md). An H100's is that of verifications in whole rounds.
_COMPUTE_SHARES = {"a100-40gb": 0.565, "a100-80gb": 0.565, "h100-sxm": 0.36, "h20": 1.0, "h200": 0.5}
_CACHE_SHARES = {"a100-40gb": 0.86}
# Of other vendors than the measured ones: their kernels are in no published cell.
_UNLIKE = ("arc-pro-b60", "arc-pro-b70", "mi300x", "mi350x", "mi355x", "r9700", "rx-7900-xtx", "strix-halo")
_AMPERE = ("a10", "a100-40gb", "a100-80gb", "rtx-3090")
# The vendors' data-sheet figures, one device each: matrix units, bfloat16 inputs, float32 sums, no sparsity.
ACCELERATORS = {
    name: Accelerator(
        name,
        terabytes * 1e12,
        teraflops * 1e12,
        gigabytes * 1e9,
        _COMPUTE_SHARES.get(name),
        _CACHE_SHARES.get(name, 0.95),
        name in _AMPERE,
    )
    for name, terabytes, teraflops, gigabytes in (
        ("a10", 0.600, 125, 24),
        ("a100-40gb", 1.555, 312, 40),  # SXM
        ("a100-80gb", 2.039, 312, 80),  # SXM
        ("arc-pro-b60", 0.456, 98, 24),  # half of its INT8 figure
        ("arc-pro-b70", 0.608, 184, 32),  # half of its INT8 figure
        ("b200", 8.0, 2250, 180),  # an eighth of a DGX B200
        ("b300", 8.0, 2250, 288),  # an eighth of an HGX B300
        ("gb10", 0.273, 125, 128),  # an eighth of its sparse FP4 figure
        ("gb200", 8.0, 2500, 186),  # of the 72 GPUs of an NVL72
        ("h100-pcie", 2.0, 756, 80),
        ("h100-sxm", 3.35, 989, 80),
        ("h20", 4.0, 148, 96),
        ("h200", 4.8, 989, 141),  # SXM
        ("l4", 0.300, 121, 24),
        ("l40s", 0.864, 362, 48),
        ("mi300x", 5.3, 1307, 192),
        ("mi350x", 8.0, 2307, 288),
        ("mi355x", 8.0, 2517, 288),
        ("r9700", 0.640, 191, 32),
        ("rtx-3090", 0.936, 71, 24),
        ("rtx-4090", 1.008, 165, 24),
        ("rtx-5060-ti", 0.448, 47, 16),
        ("rtx-5090", 1.792, 209, 32),
        ("rtx-pro-4000", 0.672, 188, 24),  # Blackwell, as those below
        ("rtx-pro-4500", 0.896, 220, 32),
        ("rtx-pro-6000", 1.792, 504, 96),
        ("rx-7900-xtx", 0.960, 123, 24),
        ("strix-halo", 0.256, 59, 128),  # 40 compute units at 2.9 GHz
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
    "NVIDIA H20": "h20",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "AMD Instinct MI350X": "mi350x",
    "AMD Instinct MI355X": "mi355x",
    "AMD Radeon 8060S": "strix-halo",
    "AMD Radeon AI PRO R9700": "r9700",
    "AMD Radeon RX 7900 XTX": "rx-7900-xtx",
    "Intel(R) Arc(TM) Pro B60 Graphics": "arc-pro-b60",
    "Intel(R) Arc(TM) Pro B70 Graphics": "arc-pro-b70",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB10": "gb10",
    "NVIDIA GB200": "gb200",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5060 Ti": "rtx-5060-ti",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX PRO 4000 Blackwell": "rtx-pro-4000",
    "NVIDIA RTX PRO 4500 Blackwell": "rtx-pro-4500",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
}


@dataclass(frozen=True)
class Efficiency:
    """The shares of bandwidth and of peak that real kernels reach, in (0, 1] (`compute` None: the accelerator's own, or
    `UNMEASURED`); with tensor parallelism the latency of the all-reduces of one layer in ms (0: the devices exchange for
    nothing); `expert_reuse`: k tokens of one sequence that are verified together touch the experts of k**expert_reuse
    independent ones (1: neighbors share no experts); and `overlap`, p of (moving^p + computing^p)^(1/p): at 1 the two take
    turns, at infinity the longer one hides the other.

    `own_cache`: the cache is read at the accelerator's own share of the bandwidth, not at `memory`. `packed_memory`,
    `packed_compute`: what kernels of weights of less than a byte reach of both. On Ampere a step over several tokens takes
    `verify_cache` times as long to read the cache, and at least `verify_context_ns` for each layer and token of context.
    """

    memory: float = 1.0
    compute: float | None = 1.0
    all_reduce_ms: float = 0.0
    expert_reuse: float = 1.0
    overlap: float = 1.0
    own_cache: bool = False
    packed_memory: float = 1.0
    packed_compute: float = 1.0
    verify_cache: float = 1.0
    verify_context_ns: float = 0.0


@dataclass(frozen=True)
class Preset:
    """What an engine adds to the roofline of its kernels, and how far off the result is.

    `layer_us`, `expert_layer_us`: each layer of a model, and each layer with experts besides; `step_ms`, `sequence_ms`: each
    step of the target, and each sequence in it; `round_ms`: each round; `draft_ms`: each draft step, of a head but its
    first. `efficiency`: that of its kernels, whose default fits published ratios.

    `factor`: 90% of published speedups lie within a factor of it of the computed ones on the engine's ground, and anywhere
    else within `ELSEWHERE`. The ground: batches and contexts up to `batch` and `context` (0: all there are), on
    `accelerator` with experts and tensor parallelism; or, where that is None, of dense models on one device, with
    `factor_unmeasured` where the accelerator has no compute share of its own.
    """

    about: str
    factor: float
    layer_us: float = 0.0
    expert_layer_us: float = 0.0
    step_ms: float = 0.0
    sequence_ms: float = 0.0
    round_ms: float = 0.0
    draft_ms: float = 0.0
    efficiency: Efficiency = Efficiency(memory=0.8, compute=0.66)
    accelerator: str | None = None
    batch: int = 0
    context: int = 0
    factor_unmeasured: float = ELSEWHERE

    def layers_ms(self, layers: int, with_experts: bool) -> float:
        """Return what a step takes longer for the layers of a model."""
        return layers * (self.layer_us + (self.expert_layer_us if with_experts else 0.0)) / 1000

    def target_ms(self, layers: int, with_experts: bool, batch: int) -> float:
        """Return what a step of the target takes longer than its kernels."""
        return self.layers_ms(layers, with_experts) + self.step_ms + batch * self.sequence_ms

    def factor_at(self, accelerator: str, batch: int, context: float, with_experts: bool = False, tp: int = 1) -> float:
        """Return the factor of a preset that has a ground for an accelerator, a batch, a context, and a kind of target."""
        beyond = batch > self.batch or context > self.context
        if self.accelerator is not None:
            return self.factor if accelerator == self.accelerator and not beyond else ELSEWHERE
        if beyond or with_experts or tp > 1 or accelerator in _UNLIKE:
            return ELSEWHERE
        return self.factor if ACCELERATORS[accelerator].compute_share else self.factor_unmeasured


# What kernels of the fitted presets have in common: they read and compute at a time, by shares of each GPU.
FITTED = Efficiency(
    memory=0.8,
    compute=None,
    expert_reuse=0.7,
    overlap=2.5,
    own_cache=True,
    packed_memory=0.82,
    packed_compute=0.85,
)
# docs/costs.md has their sources and errors.
PRESETS = {
    "none": Preset("a bare roofline: no overheads", factor=1.67),
    # Fitted to SpecForge's SpecBundle (440 published cells): the constants to 63 cells of Llama-3.1-8B and Qwen3-30B-A3B,
    # the factor to 138 cells of six other models.
    "sglang-h200": Preset(
        "SGLang 0.5.6 on H200, from published throughputs (SpecBundle)",
        factor=1.25,
        layer_us=38.8,
        expert_layer_us=28.4,
        round_ms=0.74,
        draft_ms=0.15,
        efficiency=FITTED,
        accelerator="h200",
        batch=8,
        context=4096,
    ),
    # Fitted to 59 published cells of five models on A100, H100 and H20.
    "vllm-0.11": Preset(
        "vLLM 0.11 to 0.24 in full CUDA graphs (eager or older: measure), from published rounds on A100, H100 and H20",
        factor=1.15,
        layer_us=28.0,
        step_ms=0.35,
        sequence_ms=0.026,
        round_ms=0.5,
        draft_ms=0.08,
        efficiency=replace(FITTED, memory=0.79, verify_cache=2.7, verify_context_ns=33.0),
        batch=64,
        context=8192,
        factor_unmeasured=1.20,
    ),
}


MAKE_A_PRESET = "make one of measured rounds (docs/costs.md)"


def preset_of(name: str) -> Preset:
    """Return a preset by its name, one of `PRESETS`, of a JSON file, or of a `preset_text`. Raises `OptionInvalid`."""
    if name.endswith(".json"):
        return _made(preset_text(Path(name)), name)
    if name.startswith("{"):
        return _made(name, "costs.preset")
    if name not in PRESETS:
        raise OptionInvalid(f"no overheads are known for {shown(name)}", f"choose one of {', '.join(PRESETS)}, or a file")
    return PRESETS[name]


def preset_text(path: Path) -> str:
    """Return the content of a preset's file, which a run keeps. Raises `OptionInvalid`."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OptionInvalid(f"{path} is no preset: {error}", MAKE_A_PRESET) from None
    _made(text, str(path))
    return text


def _made(text: str, where: str) -> Preset:
    """Return the preset of a JSON text (docs/costs.md), with `like`, the name of another, and the fields of `Preset` that
    differ. Raises `OptionInvalid`, which names `where` it stands.
    """
    try:
        given = json.loads(text)
        like = PRESETS[str(given.pop("like"))]
        found = replace(like, efficiency=replace(like.efficiency, **given.pop("efficiency", {})), **given)
        _check(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise OptionInvalid(f"{where} is no preset: {reason}", MAKE_A_PRESET) from None
    return found


def _check(preset: Preset) -> None:
    """Raise `ValueError` for values that no preset has."""
    if not isinstance(preset.about, str) or preset.accelerator not in (None, *ACCELERATORS):
        raise ValueError("about must be text, and accelerator null or a name of docs/costs.md")
    for name, value in (vars(preset) | vars(preset.efficiency)).items():
        if name in ("about", "accelerator", "efficiency", "own_cache") or (name, value) == ("compute", None):
            continue
        least = 1 if name in ("factor", "factor_unmeasured", "overlap", "verify_cache") else 0
        most = 1 if name in ("memory", "compute", "expert_reuse", "packed_memory", "packed_compute") else math.inf
        number = isinstance(value, int | float) and math.isfinite(value) and least <= value <= most
        if not number or (most == 1 and value == 0):
            raise ValueError(f"{name} is {shown(str(value))}")
