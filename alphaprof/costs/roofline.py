"""Step times of hardware that is not at hand, from a model's shape: the bytes that a step moves and the FLOPs that it
computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.config.hardware import UNMEASURED, Accelerator, Efficiency
from alphaprof.costs.shapes import ModelShape


@dataclass(frozen=True)
class Load:
    """A step: `tokens` of each of `batch` sequences, with `context` tokens in the cache of each."""

    tokens: int = 1
    batch: int = 1
    context: int = 0


def experts_touched(shape: ModelShape, tokens: float) -> float:
    """Experts of a layer that a step over `tokens` tokens is expected to read: E (1 - (1 - k / E)^tokens).

    For tokens that choose k of E experts evenly and independently; real routing is less even and touches fewer.
    """
    return shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens) if shape.experts else 0.0


def weights_moved(shape: ModelShape, load: Load, tp: int = 1, expert_reuse: float = 1.0) -> float:
    """Return bytes of weights that each of `tp` devices reads in a step: those that are used."""
    return shape.read_bytes(experts_touched(shape, load.tokens**expert_reuse * load.batch)) / tp


def cache_moved(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """Return bytes of the KV cache that each of `tp` devices reads in a step.

    Devices beyond the number of KV heads hold copies of them, so that the cache is divided by kv_heads at most.
    """
    return load.batch * shape.cache_bytes(load.context) / min(tp, shape.kv_heads)


def matrix_flops(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """Return FLOPs that each of `tp` devices computes with weights in a step: 2 a parameter and token."""
    each = shape.active_parameters - shape.looked_up - shape.last_parameters
    return 2 * load.batch * (load.tokens * each + shape.last_parameters) / tp


def attention_flops(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """Return FLOPs by which the tokens of a step attend to the context, on each of `tp` devices."""
    return load.tokens * load.batch * shape.attention_flops(load.context) / tp


def step_ms(
    shape: ModelShape,
    accelerator: Accelerator,
    efficiency: Efficiency,
    tokens: int = 1,
    batch: int = 1,
    context: int = 0,
    tp: int = 1,
) -> float:
    """Time in ms of a step over `tokens` tokens of each of `batch` sequences, on `tp` devices in tensor parallelism.

    What a kernel reads and what it computes overlap: it takes (moving^p + computing^p)^(1/p), p = `efficiency.overlap`.
    Matrix products and attention are kernels of their own.
    """
    load = Load(tokens, batch, context)
    peak = accelerator.peak * (efficiency.compute or accelerator.compute_share or UNMEASURED)
    weights, multiplying = weights_moved(shape, load, tp, efficiency.expert_reuse), matrix_flops(shape, load, tp) / peak
    if shape.weight_bytes < 1:  # but for the output head, which keeps its 16 bits and their kernel
        head = shape.output_parameters * (shape.head_bytes or shape.weight_bytes) / tp
        weights, multiplying = head + (weights - head) / efficiency.packed_memory, multiplying / efficiency.packed_compute
    share = accelerator.cache_share if efficiency.own_cache else efficiency.memory
    cache, attending = cache_moved(shape, load, tp) / share, attention_flops(shape, load, tp) / peak
    if tokens > 1 and accelerator.ampere:
        least = shape.layers * context * efficiency.verify_context_ns / 1e9
        cache = max(efficiency.verify_cache * cache, least * accelerator.bandwidth)
    seconds = _overlapped(weights / efficiency.memory / accelerator.bandwidth, multiplying, efficiency.overlap)
    seconds += _overlapped(cache / accelerator.bandwidth, attending, efficiency.overlap)
    return 1000 * seconds + (shape.layers * efficiency.all_reduce_ms if tp > 1 else 0.0)


def _overlapped(reading: float, computing: float, p: float) -> float:
    return float((reading**p + computing**p) ** (1 / p))


def cache_slots(
    target: ModelShape, draft: ModelShape, memory: float, tp: int = 1, shares_weights: bool = False
) -> tuple[float, float] | None:
    """Return how many tokens of context the KV cache has room for, on `tp` devices of `memory` bytes each: without the
    draft, and with its weights and its own cache beside. None if the target alone does not fit.

    `shares_weights`: the draft is a part of the target and brings a cache only. Every byte is counted as usable; engines
    keep some back for activations (vLLM by default a tenth). Devices beyond the number of KV heads hold copies of them.
    """
    pool = tp * memory - target.total_weight_bytes
    if pool <= 0:
        return None
    weights = 0.0 if shares_weights else draft.total_weight_bytes
    own, each = (shape.kv_bytes_per_token * tp / min(tp, shape.kv_heads) for shape in (target, draft))
    return pool / own, max(0.0, pool - weights) / (own + each)
