"""The values of a report: the answer for the whole traffic, for each domain and for each draft, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alphaprof.render.blocks import OfOneText
from alphaprof.report.loads import AtLoad
from alphaprof.report.verdict import VerdictName
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.stats.estimate import Interval


@dataclass(frozen=True)
class Answer:
    """Whether a draft pays on the whole traffic or in one domain, and with how many speculative tokens. If draft or γ were
    chosen, each half of the documents is tested as the other half chose.
    """

    domain: str | None  # None: the whole traffic
    verdict: VerdictName | None  # None: the verdict concerns another rule
    reason: str
    remedy: str  # what would settle it; empty if it is settled, or the reason says so
    draft: str | None  # None: nothing could be chosen
    rule: str
    gamma: int | None  # of the largest speedup; None: no step times, or too little to choose by
    speedup: Interval | None  # with the one-sided bounds that decide; None: there are no step times
    tokens_per_round: Interval | None  # over all documents; needs no step times
    acceptance: Interval | None  # as alpha; of an imported run the share of rounds whose first draft was kept
    documents: int
    units: int  # independent ones: documents, those of one cluster or with equal prompts as one
    held_out: int  # units that the bounds rest on: all that were tested by what others chose; 0: there are no bounds
    documents_needed: (
        int | None
    )  # independent ones of a new run that settles it with a chance of 80%; None: it is, or none has


@dataclass(frozen=True)
class GammaResult:
    """One speculation length: rounds, and what they say about tokens and time.

    `marginal[d-1]`: share of rounds with a proposal whose first d drafts were all accepted; `conditional[d-1]`: share
    accepted of the drafts at depth d that were reached. Counts are expectations if the estimator is `expected`, and None
    if an engine drafted trees, or a number of tokens that adapts itself.
    """

    gamma: int
    rounds: float
    tokens_per_round: Interval | None  # tokens emitted per round, over all rounds: what time depends on
    acceptance_length: float | None  # 1 + accepted / rounds that had a proposal: what engines' metrics show
    accepted_per_drafted: float | None  # the acceptance rate of engines: depends on gamma, is not alpha
    iid_tokens_per_round: float | None  # by the textbook formula; None: of heads, or a position has no proposal
    iid_error: float | None  # by what share that is too high
    break_even_length: float | None  # tokens per round from which decoding is faster: the mean cost of a round
    full_round_cost: float | None  # of gamma drafts: gamma c + v, a search; of a head first(1) + (gamma - 1) c + v
    draft_cost: float | None  # c = T_draft / T(1)
    verify_cost: float | None  # v = T(gamma + 1) / T(1)
    speedup: (
        Interval | None
    )  # of decoding: without the draft / with it; the chosen gamma as judged, others times their gain on all documents
    request_speedup: Interval | None  # of whole requests, the same: with the prefill of target and draft
    of_documents: DocumentSpeedups | None  # speedups of single documents
    reached: tuple[float | None, ...]  # drafts at depth d that were reached: what `conditional` is a share of
    marginal: tuple[float | None, ...]  # share of rounds with a proposal whose first d drafts were all accepted
    conditional: tuple[float | None, ...]  # share accepted of the drafts at depth d that were reached


@dataclass(frozen=True)
class DocumentSpeedups:
    """Speedups of single documents: tenth percentile, median, ninetieth percentile, and the share that gets slower."""

    p10: float  # tenth percentile
    p50: float  # median
    p90: float  # ninetieth percentile
    slower: float  # share of documents that the draft slows down


@dataclass(frozen=True)
class Result(Answer, OfOneText):
    """One kind of text of a domain, with one draft under one rule: its γ alone was chosen.

    `estimator`: exact (rounds are facts of the log), expected (rounds are exact expectations given the texts), one-step
    (acceptance alone, position by position along the text).
    """

    domain: str
    draft: str
    lossy: bool
    estimator: str
    positions: int
    alpha: Interval | None  # acceptance over positions with a proposal, as if a round began at each; None: imported
    coverage: float | None  # share of positions with a proposal
    mismatches: float | None  # share of greedy tokens that are not the scoring pass's top token
    clear_mismatches: float | None  # those of them that are no near-ties
    near_ties: float | None  # share of positions whose two top logits lie within the dtype's noise; None: processed logits
    impossible: float | None  # share of sampled tokens to which the scoring pass gives probability 0
    self_check: Interval | None  # mean of a_t minus mean of beta_t, 0 on average on-policy; interval at 99.9%
    burstiness: Interval | None  # lag-1 autocorrelation of acceptance; None: nothing varies, or a lossy rule
    gammas: tuple[GammaResult, ...]  # empty if rounds are not defined (off-policy text, lossy rules)
    chosen: bool  # gamma was chosen on these documents: each half is tested as the other one chose

    @property
    def own(self) -> bool:
        """Whether the target wrote the text: mismatches and impossible tokens are only counted on that."""
        return self.mismatches is not None or self.impossible is not None


@dataclass(frozen=True)
class AtGamma:
    """The whole traffic with one draft and γ: of the chosen γ as judged, else of all documents."""

    gamma: int
    tokens_per_round: float  # of all documents
    speedup: Interval | None  # with the one-sided bounds that decide; None: there are no step times


@dataclass(frozen=True)
class DraftAnswer:
    """One draft by itself on the whole traffic."""

    answer: Answer
    by_gamma: tuple[AtGamma, ...]  # every γ that it has rounds of


@dataclass(frozen=True)
class DomainAnswer:
    """What to use for one domain by itself."""

    share: float  # of output tokens
    answer: Answer  # with the best of the drafts, if one could be chosen
    adjusted: VerdictName  # its verdict if those of all domains are to be right together (Holm); alone each may be wrong
    next_best: Answer | None  # with the best of the other drafts; None: there is none
    ahead: Interval | None  # how many times as fast as the next best it is, paired; each half as the other one chose

    @property
    def alone(self) -> bool:
        """Whether its verdict does not hold for all domains together."""
        return self.answer.verdict != self.adjusted

    @property
    def level(self) -> bool:
        """Whether the next best has a speedup that is not clearly another."""
        known = self.next_best is not None and self.next_best.speedup is not None
        return known and self.ahead is not None and self.ahead.low <= 1 <= self.ahead.high


@dataclass(frozen=True)
class OnFor:
    """The domains on which alone the draft of the verdict is surely faster than everywhere, the others being decoded without
    a draft. Intervals over all documents, with the one-sided bounds that decide.
    """

    domains: tuple[str, ...]  # on which the draft is used, in the order of the weights
    speedup: Interval  # of the whole traffic, against decoding without a draft
    gain: Interval  # how many times as fast as with the draft in all domains, paired; its lower bound is above 1


@dataclass(frozen=True)
class Traffic:
    """What belongs to the answer for the whole traffic alone."""

    min_speedup: float  # what the decision asks for
    weights: dict[str, float]  # shares of output tokens by domain
    weights_observed: bool  # the documents', not the decision's
    chosen: bool  # draft or gamma were chosen on these documents: each half is tested as the other one chose
    disagreement: str  # what each half chose, in words, if its own number decides beside the cross-fitted one; else empty
    alike: tuple[int, ...]  # gammas next to the chosen one, it included, without a clear difference in speedup
    break_even_length: float | None  # tokens per round from which decoding is faster
    length_correlation: float | None  # rank correlation of length and time per token; None: none is shown (p >= .01)
    served_dtype: str | None  # that the target is served in, if another one was measured: then nothing is decided
    load: tuple[AtLoad, ...]  # of the chosen draft, by concurrency at the traffic's own context
    pays_up_to: int | None  # the last concurrency whose lower bound reaches decision.min_speedup; None: not the first
    only: OnFor | None  # domains to which the draft is better confined; None: no such domains are surely known
    slow: tuple[str, ...]  # drafts that are NO-GO in every domain


@dataclass(frozen=True)
class Conditions:
    """What the answers hold for, beside the step times."""

    concurrency: int  # sequences decoded at a time
    p_min: float  # top probability below which a draft stops; 0: it never does
    changes: tuple[str, ...]  # of the run's own question and step times, as --set takes them


@dataclass(frozen=True)
class RunFacts:
    """What was run."""

    path: str
    complete: bool
    documents: int
    positions: int
    log_documents: int | None  # documents that the sections made from the position log rest on; null: no log here
    target: str
    drafts: tuple[str, ...]
    dtype: str
    texts: tuple[str, ...]  # kinds of text that were measured, with their sampling settings
    created: str
    cut: float | None  # share of the texts that the target wrote which ended at max_new_tokens
    mean_length: float | None  # tokens of a text, on average
    longest: int | None  # tokens that a text could have: the largest max_new_tokens, or the longest text if none is known
    mean_context: float | None  # tokens in the cache while these documents decode, on average over positions
    skipped: dict[str, int]
    truncated: dict[str, int]
    imported: str | None  # the engine from whose metrics the run was imported: no alpha, coverage, near-ties, other gammas
    target_model: ModelFacts  # what identifies the target
    draft_models: dict[str, DraftFacts]  # what identifies the drafts, by name
    environment: dict[str, Any]  # versions and hardware that it was run with
    profile: dict[str, Any]  # every option, as it was run


@dataclass(frozen=True)
class Note:
    """Something to know: cause and remedy."""

    code: str  # name of the note, which does not change
    message: str  # what is so, and why it matters
    remedy: str  # what to do about it
