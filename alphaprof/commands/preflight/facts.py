"""What a dry run finds before the work begins: facts of models, data and numerics, and what the run will roughly take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alphaprof.log.manifest import DraftFacts, ModelFacts


@dataclass(frozen=True)
class Refusal:
    """An error that would stop the run."""

    check: str  # name of the check that it belongs to
    subject: str  # model, source or directory that it is about
    kind: str  # name of the error's class in alphaprof.errors
    message: str  # what is wrong
    hint: str  # what to do next
    exit_code: int  # that the run would end with


@dataclass(frozen=True)
class Special:
    """A special token that two tokenizers name differently."""

    name: str  # bos, eos, unk or pad
    target: str | None  # the target's; None: it has none
    draft: str | None  # the draft's; None: it has none


@dataclass(frozen=True)
class ModelSeen:
    """The target or a draft that was loaded."""

    name: str  # target, or the draft's name in the profile
    facts: ModelFacts | DraftFacts  # as a run's manifest has them
    tokens: int | None  # one more than the largest id of its own tokenizer; None: it has none of its own
    shared: int | None = None  # ids that its own tokenizer and the target's both have
    special: tuple[Special, ...] = ()  # special tokens that are not the target's
    beyond: int = 0  # documents seen that are longer than its context with all of their new tokens
    silent: int = 0  # those of them whose prompt alone fills it

    @property
    def logits(self) -> int:
        """Number of logits: known of every model that was loaded."""
        return self.facts.vocabulary or 0


@dataclass(frozen=True)
class Bos:
    """The token that begins texts."""

    token: str | None  # None: there is none
    added: bool  # whether the tokenizer adds it to plain text
    in_template: bool | None  # whether the chat template writes it; None: no template, or one that wants more than one turn


@dataclass(frozen=True)
class SourceSeen:
    """The first documents of one source. Token counts are over the documents that were seen."""

    source: int  # its place in the profile's data, from 0
    path: str  # last part of its path or hub id
    domains: tuple[str, ...]  # that its documents belong to
    prompts: str  # where prompts come from: messages, chat, prompt, prompt_ids or text
    generated: bool  # whether the target writes the continuations
    documents: int  # that were seen
    planned: int | None  # documents that the run will take; None: only reading all would tell
    shortest_prompt: int  # tokens
    median_prompt: int  # tokens
    longest_prompt: int  # tokens
    prompt_tokens: int  # sum over prompts
    new_tokens: int  # sum of what continuations may have at most
    longest: int  # tokens of the longest document with its continuation
    skipped: dict[str, int]  # rows left out among the first, by reason
    truncated: dict[str, int]  # texts or prompts that were cut, by reason
    double_bos: int  # documents that begin with BOS twice
    without_bos: int  # documents that begin with none, where plain text would have it, but for the following
    lost_bos: int = 0  # documents whose BOS went with the beginning of a prompt that was cut


@dataclass(frozen=True)
class SelfDraft:
    """The target as its own draft on greedy text."""

    layer_skip: bool  # it was run through layer skip without a dropped layer, as drafts of the profile are
    positions: int
    agreeing: int  # positions where both scored the same top token
    accepted: int  # positions where that is the token which was generated
    near_ties: int  # positions where it is not, and the two are no further apart than the noise of the dtype


@dataclass(frozen=True)
class NoiseFloor:
    """The target on the same texts alone, and padded in one batch."""

    documents: int  # in the batch
    positions: int
    flips: int  # positions whose top token is another one
    near_ties: int  # positions whose two top logits are no further apart than `noise`
    noise: float  # logit difference below which this dtype cannot be trusted to order two tokens
    logit_difference: float  # largest of one logit
    probability_difference: float  # largest of one probability


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a run in small."""

    documents: int  # that it was tried on
    positions: int  # that were scored, of all of them together
    prompts: float | None  # tokens read a second; None: the target writes no continuation
    generated: float | None  # tokens generated a second; None: none are, or the target's steps cannot be timed
    batch: int  # documents that the run will generate at a time
    scored: float  # tokens a second through target and drafts together
    timing_s: float | None  # seconds that timing the steps will take; None: nothing is timed
    untimed: str | None  # why there will be no step times; None: there will be
    budget_s: float | None = None  # seconds that timing the steps may take; None: nothing is timed


@dataclass(frozen=True)
class Storage:
    """Size of the position log."""

    position_bytes: float  # of a position, over all drafts
    shard_bytes: float  # of a shard's files beside that
    columns: int  # of the log
    free: int | None  # bytes free where the run will be written; None: no place was named


@dataclass(frozen=True)
class Memory:
    """Bytes of the target's device."""

    weights: int  # of target and drafts
    trial: int | None  # the most that the run in small took beside them; None: a CPU, where nothing counts it
    free: int | None  # beside the weights; None: not known


@dataclass(frozen=True)
class RunEstimate:
    """What the run will roughly take."""

    documents: int | None  # None: not known, like what follows from it
    positions: int | None  # at most
    seconds: float | None  # None: also where it is not known how fast the target generates
    disk: int | None  # bytes
    document_seconds: float | None  # mean over the documents seen
    document_bytes: float  # mean over the documents seen


@dataclass(frozen=True)
class PreflightFacts:
    """All that a dry run finds, of the drafts and sources that were not refused. What comes after a refusal can be missing:
    None; so is what the run takes where no draft could be loaded.
    """

    target: ModelSeen  # the target
    drafts: tuple[ModelSeen, ...]  # drafts that could be loaded
    dtype: str | None  # what auto chose for the target, and why; None: the profile names it
    scored_ids: int  # ids that carry probability when models are compared
    template: bool  # whether the target has a chat template
    bos: Bos  # the token that begins texts
    sources: tuple[SourceSeen, ...]  # sources that could be read
    repeated: int  # documents whose prompt occurs before among those seen
    warnings: tuple[dict[str, str], ...]  # what the run itself would warn of: code, message, remedy
    self_draft: SelfDraft | None  # the target as its own draft
    noise: NoiseFloor | None  # alone against in a batch; None also where there is but one document
    speed: Speed | None  # of a run in small
    storage: Storage | None  # of the position log
    memory: Memory  # what models take
    estimate: RunEstimate | None  # what the run will take
    refusals: tuple[Refusal, ...]  # what would stop the run


def estimated(sources: Sequence[SourceSeen], speed: Speed, storage: Storage, shard_documents: int) -> RunEstimate | None:
    """What profiling the planned documents takes at the measured speed and size; None where no document was seen.

    Documents of a source are taken to be like its first ones, and continuations to run to their last token: a text that
    ends earlier costs less.
    """
    sources = [source for source in sources if source.documents]
    if not sources:
        return None
    seen = sum(source.documents for source in sources)
    seconds = [_seconds(source, speed) for source in sources]  # of all documents seen of a source, like the sizes
    sizes = [each.new_tokens * storage.position_bytes + 4 * (each.prompt_tokens + each.new_tokens) for each in sources]
    each_s, each_bytes = _known(sum(seconds) / seen), sum(sizes) / seen + storage.shard_bytes / shard_documents
    planned = [source.planned for source in sources if source.planned is not None]
    if len(planned) < len(sources):
        return RunEstimate(None, None, None, None, each_s, each_bytes)
    shares = [count / source.documents for count, source in zip(planned, sources, strict=True)]
    shards = math.ceil(sum(planned) / shard_documents)
    timing_s = min(speed.timing_s or 0.0, math.inf if speed.budget_s is None else speed.budget_s)
    return RunEstimate(
        documents=sum(planned),
        positions=round(sum(share * source.new_tokens for share, source in zip(shares, sources, strict=True))),
        seconds=_known(sum(share * each for share, each in zip(shares, seconds, strict=True)) + timing_s),
        disk=round(sum(share * size for share, size in zip(shares, sizes, strict=True)) + shards * storage.shard_bytes),
        document_seconds=each_s,
        document_bytes=each_bytes,
    )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds


def _seconds(source: SourceSeen, speed: Speed) -> float:
    """What generating and scoring the documents seen of a source takes; nan where it is not known how fast text comes."""
    scoring = (source.prompt_tokens + source.new_tokens) / speed.scored
    if not source.generated:
        return scoring
    return scoring + source.prompt_tokens / (speed.prompts or math.nan) + source.new_tokens / (speed.generated or math.nan)
