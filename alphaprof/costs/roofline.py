"""Step times of hardware that is not at hand, from the bytes that a step moves and the FLOPs that it computes.

    T = bytes / (bandwidth * memory efficiency) + FLOPs / (peak * compute efficiency)

The sum, not the larger one: measured times of verification rise smoothly from one regime to the other, as a sum does; the
maximum would leave verification free until the regimes meet. What is not in it: kernel launches, sampling, writing the
cache, activations, scheduling. Ratios such as T(5) / T(1) depend on the two efficiencies by their ratio only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.shapes import ModelShape

LEAST_RATIO, MOST_RATIO = 1e-3, 1e3  # of the two efficiencies
NO_TIME = 1e-6  # inverse of an efficiency that stands for a term without any part in the measured times


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


@dataclass(frozen=True)
class Efficiency:
    """The shares of bandwidth and of peak that real kernels reach, in (0, 1]; and, with tensor parallelism, the latency of
    the all-reduces of one layer in ms (0: the devices exchange for nothing).
    """

    memory: float = 1.0
    compute: float = 1.0
    all_reduce_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.memory <= 1 and 0 < self.compute <= 1 and self.all_reduce_ms >= 0):
            raise ValueError(f"efficiencies are shares in (0, 1], not {self.memory:.3g} and {self.compute:.3g}")


@dataclass(frozen=True)
class Load:
    """A step: `tokens` of each of `batch` sequences, with `context` tokens in the cache of each."""

    tokens: int = 1
    batch: int = 1
    context: int = 0


def experts_touched(shape: ModelShape, tokens: int) -> float:
    """Experts of a layer that a step over so many tokens is expected to read: E (1 - (1 - k / E)^tokens).

    For tokens that choose k of E experts evenly and independently; real routing is less even and touches fewer.
    """
    return shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens) if shape.experts else 0.0


def bytes_moved(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """Bytes that each of `tp` devices reads in a step: the weights that are used, and the KV cache.

    Devices beyond the number of KV heads hold copies of them, so that the cache is divided by kv_heads at most.
    """
    touched = experts_touched(shape, load.tokens * load.batch) * shape.expert_parameters
    weights = (shape.shared_parameters - shape.looked_up + touched) * shape.weight_bytes
    cache = load.batch * load.context * shape.kv_bytes_per_token
    return weights / tp + cache / min(tp, shape.kv_heads)


def flops(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """FLOPs that each of `tp` devices computes in a step: 2 a parameter and token, and attention to the context."""
    matrices = 2 * (shape.active_parameters - shape.looked_up)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * load.context
    return load.tokens * load.batch * (matrices + attention) / tp


def step_ms(
    shape: ModelShape,
    accelerator: Accelerator,
    efficiency: Efficiency,
    tokens: int = 1,
    batch: int = 1,
    context: int = 0,
    tp: int = 1,
) -> float:
    """Time in ms of a step over `tokens` tokens of each of `batch` sequences, on `tp` devices in tensor parallelism."""
    load = Load(tokens, batch, context)
    moving = bytes_moved(shape, load, tp) / (accelerator.bandwidth * efficiency.memory)
    computing = flops(shape, load, tp) / (accelerator.peak * efficiency.compute)
    exchanging = shape.layers * efficiency.all_reduce_ms if tp > 1 else 0.0
    return 1000 * (moving + computing) + exchanging


def fit_times(shape: ModelShape, accelerator: Accelerator, measured: Sequence[tuple[Load, float]]) -> Efficiency:
    """The efficiencies at which steps take the measured times in ms, on one device: exactly for two of them, by least
    squares of relative errors for more. Raises `ValueError` where they are faster than the device, or do not tell both.
    """
    rows = np.array([_ideal_ms(shape, accelerator, load) for load, _ in measured])
    times = np.array([ms for _, ms in measured])
    if len(measured) < 2:
        raise ValueError("two efficiencies need two step times")
    from scipy.optimize import nnls  # here, because it takes as long to load as a report does without

    slowness, _ = nnls(rows / times[:, None], np.ones(len(times)))
    if slowness.min() < NO_TIME:
        raise ValueError("these step times do not tell bandwidth from compute: take batches that lie further apart")
    return Efficiency(*(float(1 / slow) for slow in slowness))


def fit_ratios(
    shape: ModelShape, accelerator: Accelerator, measured: Sequence[tuple[Load, float]], memory: float = 0.8
) -> Efficiency:
    """Efficiencies at which T(tokens) / T(1) takes the measured values, by least squares of their logarithms.

    Ratios tell only how the two efficiencies relate; `memory` is taken as given, and matters where times in ms do. Raises
    `ValueError` where no ratio of efficiencies comes close, for that is a question of another shape or device.
    """
    pairs = [
        (_ideal_ms(shape, accelerator, load), _ideal_ms(shape, accelerator, Load(1, load.batch, load.context)))
        for load, _ in measured
    ]

    def misfit(log_weight: float) -> float:
        weight = math.exp(log_weight)  # of computing: memory efficiency / compute efficiency
        found = [(many[0] + weight * many[1]) / (one[0] + weight * one[1]) for many, one in pairs]
        return sum(math.log(value / ratio) ** 2 for value, (_, ratio) in zip(found, measured, strict=True))

    weight = math.exp(_least(misfit))
    if not measured or not 2 * LEAST_RATIO < weight < MOST_RATIO / 2:
        raise ValueError("these ratios do not tell how bandwidth and compute relate: take a larger batch")
    return Efficiency(memory, memory / weight)


def _least(function: Callable[[float], float]) -> float:
    from scipy.optimize import minimize_scalar  # here likewise

    found = minimize_scalar(function, bounds=(math.log(LEAST_RATIO), math.log(MOST_RATIO)), method="bounded")
    return float(found.x)


def _ideal_ms(shape: ModelShape, accelerator: Accelerator, load: Load) -> tuple[float, float]:
    """The two terms in ms at full bandwidth and at peak."""
    moving, computing = bytes_moved(shape, load) / accelerator.bandwidth, flops(shape, load) / accelerator.peak
    return 1000 * moving, 1000 * computing


@dataclass(frozen=True)
class DraftMemory:
    """What a draft takes of the memory that the target leaves for its KV cache, on all devices together.

    `pool_bytes`: memory less the target's weights; `weight_share` of it that the draft's weights take; `context_tokens`
    that fit into the cache without the draft, and `context_tokens_left` with its weights and its own cache beside.
    """

    pool_bytes: float
    weight_bytes: float
    kv_bytes_per_token: float
    weight_share: float
    context_tokens: float
    context_tokens_left: float

    @property
    def lost_share(self) -> float:
        """Share of the context tokens that the draft costs: concurrency that is lost when memory is the limit."""
        return 1 - self.context_tokens_left / self.context_tokens


def draft_memory(
    target: ModelShape, draft: ModelShape, accelerator: Accelerator, tp: int = 1, shares_weights: bool = False
) -> DraftMemory:
    """What the draft takes on `tp` devices that hold the target. Raises `ValueError` where the target alone does not fit.

    `shares_weights`: the draft is a part of the target and brings a cache only. Every byte is counted as usable; engines
    keep some back for activations (vLLM by default a tenth). Devices beyond the number of KV heads hold copies of them.
    """
    pool = tp * accelerator.memory - target.total_weight_bytes
    if pool <= 0:
        raise ValueError(
            f"the target's weights ({target.total_weight_bytes:.3g} bytes) do not fit on {tp} {accelerator.name}"
        )
    weights = 0.0 if shares_weights else draft.total_weight_bytes
    own, each = (shape.kv_bytes_per_token * tp / min(tp, shape.kv_heads) for shape in (target, draft))
    left = max(0.0, pool - weights) / (own + each)
    return DraftMemory(pool, weights, each, weights / pool, pool / own, left)
