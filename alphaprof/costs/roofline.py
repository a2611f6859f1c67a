"""Step times of hardware that is not at hand, from a model's shape: the bytes that a step moves and the FLOPs that it
computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.config.hardware import Accelerator, Efficiency
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


def bytes_moved(shape: ModelShape, load: Load, tp: int = 1, expert_reuse: float = 1.0) -> float:
    """Return bytes that each of `tp` devices reads in a step: the weights that are used, and the KV cache.

    Devices beyond the number of KV heads hold copies of them, so that the cache is divided by kv_heads at most.
    """
    weights = shape.read_bytes(experts_touched(shape, load.tokens**expert_reuse * load.batch))
    cache = load.batch * shape.cache_bytes(load.context)
    return weights / tp + cache / min(tp, shape.kv_heads)


def flops(shape: ModelShape, load: Load, tp: int = 1) -> float:
    """FLOPs that each of `tp` devices computes in a step: 2 a parameter and token, and attention to the context."""
    matrices = 2 * (shape.active_parameters - shape.looked_up - shape.last_parameters)
    return (
        load.tokens * load.batch * (matrices + shape.attention_flops(load.context)) + 2 * load.batch * shape.last_parameters
    ) / tp


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
    moving = bytes_moved(shape, load, tp, efficiency.expert_reuse) / (accelerator.bandwidth * efficiency.memory)
    computing = flops(shape, load, tp) / (accelerator.peak * efficiency.compute)
    exchanging = shape.layers * efficiency.all_reduce_ms if tp > 1 else 0.0
    return 1000 * (moving + computing) + exchanging


def draft_memory(
    target: ModelShape, draft: ModelShape, memory: float, tp: int = 1, shares_weights: bool = False
) -> tuple[float, float] | None:
    """Return what a draft takes of the memory that the target leaves for its KV cache, on `tp` devices of `memory` bytes
    each: the share that its weights take, and the share of the tokens of context that are lost to its weights and its own
    cache, which is lost concurrency when memory is the limit. None if the target alone does not fit.

    `shares_weights`: the draft is a part of the target and brings a cache only. Every byte is counted as usable; engines
    keep some back for activations (vLLM by default a tenth). Devices beyond the number of KV heads hold copies of them.
    """
    pool = tp * memory - target.total_weight_bytes
    if pool <= 0:
        return None
    weights = 0.0 if shares_weights else draft.total_weight_bytes
    own, each = (shape.kv_bytes_per_token * tp / min(tp, shape.kv_heads) for shape in (target, draft))
    return weights / pool, 1 - max(0.0, pool - weights) / (own + each) / (pool / own)
