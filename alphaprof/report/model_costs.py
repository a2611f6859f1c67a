"""The parts of the `Report` value that time enters: step times, memory, concurrency, single documents. See `model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaprof.report.model import Interval


@dataclass(frozen=True)
class DocumentSpeedups:
    """Speedups of single documents: tenth percentile, median, ninetieth percentile, and the share that gets slower."""

    p10: float  # tenth percentile
    p50: float  # median
    p90: float  # ninetieth percentile
    slower: float  # share of documents that the draft slows down


@dataclass(frozen=True)
class AtConcurrency:
    """Speedups with so many sequences decoded at a time, by gamma; `best_gamma` has the largest."""

    concurrency: int  # sequences decoded at a time
    gammas: tuple[int, ...]  # of the speedups, in their order
    speedups: tuple[Interval | None, ...]  # of decoding
    request_speedups: tuple[Interval | None, ...]  # empty for the whole traffic
    best_gamma: int | None  # of the largest speedup


@dataclass(frozen=True)
class Memory:
    """What a draft takes of the memory that the target leaves for its KV cache."""

    draft: str
    weight_bytes: float  # 0 for layers of the target
    kv_bytes_per_token: float  # of its cache
    kv_share: float  # of the bytes that a token of context takes in both caches
    pool_share: float | None  # of the target's pool that the draft's weights take; None: the memory is not known
    lost_share: float | None  # of the tokens of context that the pool holds, with the draft's weights and cache beside


@dataclass(frozen=True)
class Cost:
    """Where step times come from, and what they are at `concurrency` and `context`; `concurrencies`: all that there are."""

    source: str  # measured, table or roofline
    engine: str
    device: str
    dtype: str
    concurrency: int  # sequences decoded at a time
    concurrencies: tuple[int, ...]
    context: float  # the documents' mean, or the nearest that there is a time for
    contexts: tuple[int, ...]  # those that times were taken at
    mode: str | None  # eager, cuda_graph; None: not known
    threads: int | None  # of torch, where the device is a CPU
    overhead_ms: float | None  # added to every target step of a table or roofline
    target_ms: dict[int, float]  # by number of tokens
    draft_ms: dict[str, float]  # by draft with a model
    draft_after_full_ms: dict[str, float]  # its step over two tokens, after a round accepted in full
    lookup_ms: dict[str, float]  # by prompt lookup draft, once a round
    bookkeeping_ms: dict[str, float]  # once a round that drafts
    memory: tuple[Memory, ...]  # one a draft
    beyond_prefill: float | None  # share of prompts longer than any whose prefill was timed; None: no prefill was
