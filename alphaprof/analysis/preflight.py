"""What a dry run finds before the work begins: facts of models, data and numerics, and what the run will roughly take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alphaprof.log.manifest import ModelFacts


@dataclass(frozen=True)
class Refusal:
    """An error that would stop the run: of which check and about what, the name of its class, its two lines, exit code."""

    check: str
    subject: str
    kind: str
    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True)
class Special:
    """A special token that two tokenizers name differently; None: one of them has none."""

    name: str
    target: str | None
    draft: str | None


@dataclass(frozen=True)
class ModelSeen:
    """The target or a draft that was loaded.

    `tokens`: one more than the largest id of its own tokenizer, None where it has none of its own; `shared`: ids that both
    that and the target's tokenizer have; `special`: special tokens that differ. Of the documents seen, `beyond` are longer
    than its context with all of their new tokens, and of `silent` the prompt alone fills it.
    """

    name: str
    facts: ModelFacts
    tokens: int | None
    shared: int | None = None
    special: tuple[Special, ...] = ()
    beyond: int = 0
    silent: int = 0


@dataclass(frozen=True)
class Bos:
    """The token that begins texts (None: there is none), whether the tokenizer adds it to plain text, and whether the chat
    template writes it (None: no template, or one that refuses a lone user turn).
    """

    token: str | None
    added: bool
    in_template: bool | None


@dataclass(frozen=True)
class SourceSeen:
    """The first documents of one source.

    `prompts`: messages, chat, prompt, prompt_ids or text, where prompts come from; `generated`: whether the target writes
    the continuations; `planned`: how many documents the run will take, None where only reading all would tell. Token
    counts are over the `documents` seen; `new_tokens` is their sum of what continuations may have at most. `double_bos`
    documents begin with BOS twice, `without_bos` with none.
    """

    source: int
    path: str
    domains: tuple[str, ...]
    prompts: str
    generated: bool
    documents: int
    planned: int | None
    shortest_prompt: int
    median_prompt: int
    longest_prompt: int
    prompt_tokens: int
    new_tokens: int
    longest: int
    skipped: dict[str, int]
    truncated: dict[str, int]
    double_bos: int
    without_bos: int


@dataclass(frozen=True)
class SelfDraft:
    """The target as its own draft on greedy text. Of `positions`: `agreeing`, where both scored the same top token;
    `accepted`, where that is the token which was generated; `near_ties` among those where it is not.
    """

    draft: str
    positions: int
    agreeing: int
    accepted: int
    near_ties: int


@dataclass(frozen=True)
class NoiseFloor:
    """The target on the same texts alone and padded in a batch of `documents`. Of `positions`: `flips` of the top token,
    `near_ties`, whose two top logits are no further apart than `noise`; the largest difference of a logit and of a
    probability.
    """

    documents: int
    positions: int
    flips: int
    near_ties: int
    noise: float
    logit_difference: float
    probability_difference: float


@dataclass(frozen=True)
class Speed:
    """Tokens a second that were measured on `documents` with `new_tokens` each: prompts read, tokens generated `batch`
    documents at a time, as the run will (None: the target writes no continuation, or it is not known), and tokens scored
    by target and drafts together. `timing_s`: what timing the steps will take; None: nothing to time, or `untimed` says
    why that is impossible.
    """

    documents: int
    new_tokens: int
    prompts: float | None
    generated: float | None
    batch: int
    scored: float
    timing_s: float | None
    untimed: str | None


@dataclass(frozen=True)
class Storage:
    """Size of the position log: bytes per position over all drafts, bytes of a shard's files beside them, columns, and the
    bytes that are free where the run will be written (None: no place was named).
    """

    position_bytes: float
    shard_bytes: float
    columns: int
    free: int | None


@dataclass(frozen=True)
class Memory:
    """Bytes of all weights, of the KV cache of a full batch (None: not known of the architecture), and free on the device
    once the models are there (None: not known).
    """

    weights: int
    cache: int | None
    free: int | None


@dataclass(frozen=True)
class Estimate:
    """What the run will take: `documents`, `positions` at most, `seconds` and `disk` in bytes are None where it is not known
    how many documents there are; those of one document are means over the documents seen. Seconds are None as well where
    it is not known how fast the target generates.
    """

    documents: int | None
    positions: int | None
    seconds: float | None
    disk: int | None
    document_seconds: float | None
    document_bytes: float


@dataclass(frozen=True)
class Seen:
    """All that a dry run finds. What comes after a refusal can be missing: None. `repeated`: documents whose prompt occurs
    before among those seen; `warnings`: what the run itself would warn of, as code, message and remedy.
    """

    target: ModelSeen
    drafts: tuple[ModelSeen, ...]
    scored_ids: int
    template: bool
    bos: Bos
    sources: tuple[SourceSeen, ...]
    repeated: int
    warnings: tuple[dict[str, str], ...]
    self_draft: SelfDraft | None
    noise: NoiseFloor | None
    speed: Speed | None
    storage: Storage | None
    memory: Memory
    estimate: Estimate | None
    refusals: tuple[Refusal, ...]


def estimated(sources: Sequence[SourceSeen], speed: Speed, storage: Storage, shard_documents: int) -> Estimate | None:
    """What profiling the planned documents takes at the measured speed and size; None where no document was seen.

    Documents of a source are taken to be like its first ones, and continuations to run to their last token: a text that
    ends earlier costs less.
    """
    sources = [source for source in sources if source.documents]
    if not sources:
        return None
    seen = sum(source.documents for source in sources)
    seconds = [_seconds(source, speed) for source in sources]  # of all documents seen of a source, like the sizes
    sizes = [
        source.new_tokens * storage.position_bytes + 4 * (source.prompt_tokens + source.new_tokens) for source in sources
    ]
    each_s, each_bytes = _sum(seconds, [1 / seen] * len(sources)), sum(sizes) / seen + storage.shard_bytes / shard_documents
    planned = [source.planned for source in sources if source.planned is not None]
    if len(planned) < len(sources):
        return Estimate(None, None, None, None, each_s, each_bytes)
    shares = [count / source.documents for count, source in zip(planned, sources, strict=True)]
    total = _sum(seconds, shares)
    shards = math.ceil(sum(planned) / shard_documents)
    return Estimate(
        documents=sum(planned),
        positions=round(sum(share * source.new_tokens for share, source in zip(shares, sources, strict=True))),
        seconds=None if total is None else total + (speed.timing_s or 0.0),
        disk=round(sum(share * size for share, size in zip(shares, sizes, strict=True)) + shards * storage.shard_bytes),
        document_seconds=each_s,
        document_bytes=each_bytes,
    )


def _sum(seconds: Sequence[float | None], shares: Sequence[float]) -> float | None:
    """Weighted sum; None where a part is not known."""
    known = [each for each in seconds if each is not None]
    return sum(each * share for each, share in zip(known, shares, strict=True)) if len(known) == len(seconds) else None


def _seconds(source: SourceSeen, speed: Speed) -> float | None:
    """What generating and scoring the documents seen of a source takes; None where it is not known how fast text comes."""
    scoring = (source.prompt_tokens + source.new_tokens) / speed.scored
    if not source.generated:
        return scoring
    if speed.prompts is None or speed.generated is None:
        return None
    return source.prompt_tokens / speed.prompts + source.new_tokens / speed.generated + scoring
