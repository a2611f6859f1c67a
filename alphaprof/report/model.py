"""The `Report` value: everything that any rendering shows. Renderers compute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alphaprof.costs.cost_model import Cost
from alphaprof.log.manifest import DraftFacts, ModelFacts
from alphaprof.report.decision import VerdictName
from alphaprof.stats.estimate import Interval
from alphaprof.totals.replay import Flavour


@dataclass(frozen=True)
class GammaResult:
    """One speculation length: rounds, and what they say about tokens and time.

    `marginal[d-1]`: share of rounds with a proposal whose first d drafts were all accepted; `conditional[d-1]`: share
    accepted of the drafts at depth d that were reached. Counts are expectations where the estimator is `expected`, and None
    where an engine drafted trees, or a number of tokens that adapts itself.
    """

    gamma: int
    rounds: float
    tokens_per_round: Interval | None  # tokens emitted per round, over all rounds: what time depends on
    acceptance_length: float | None  # 1 + accepted / rounds that had a proposal: what engines' metrics show
    accepted_per_drafted: float | None  # the acceptance rate of engines: depends on gamma, is not alpha
    iid_tokens_per_round: (
        float | None
    )  # what the textbook formula makes of alpha; None where not every position has a proposal
    iid_error: float | None  # by what share that is too high
    break_even_length: float | None  # tokens per round at which the draft starts to pay: the mean cost of a round
    full_round_cost: float | None  # cost of a round that drafts gamma tokens: gamma c + v, and the search of prompt lookup
    draft_cost: float | None  # c = T_draft / T(1)
    verify_cost: float | None  # v = T(gamma + 1) / T(1)
    speedup: Interval | None  # of decoding: time without the draft / with it; over all documents
    request_speedup: Interval | None  # of whole requests: with the prefill of target and draft
    iid_speedup: float | None  # what the textbook formula would have said: iid_tokens_per_round / the cost of its rounds
    iid_speedup_error: float | None  # by what share that is too high
    of_documents: DocumentSpeedups | None  # speedups of single documents
    reached: tuple[float | None, ...]  # drafts at depth d that were reached: what `conditional` is a share of
    marginal: tuple[float | None, ...]
    conditional: tuple[float | None, ...]


@dataclass(frozen=True)
class Phase:
    """Acceptance in one part of the texts: thinking or answer."""

    positions: int
    alpha: Interval | None  # acceptance pooled over positions with a proposal


@dataclass(frozen=True)
class Result:
    """One domain, draft and rule.

    `estimator`: exact (rounds are facts of the log), expected (rounds are exact expectations given the texts), one-step
    (acceptance alone, position by position along the text).
    """

    domain: str
    draft: str
    rule: str
    lossy: bool
    estimator: str
    continuation: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    on_policy: bool  # the rule's own decoding (for a lossy rule: the target's) would emit this text
    documents: int
    clusters: int  # independent units of the intervals: documents, those of one cluster or with equal prompts as one
    positions: int
    alpha: Interval | None  # acceptance pooled over positions with a proposal; this, coverage, None: an imported run
    coverage: float | None  # share of positions with a proposal
    mismatches: float | None  # share of greedy tokens that are not the scoring pass's top token
    clear_mismatches: float | None  # those of them that are no near-ties
    near_ties: float | None  # share of positions whose two top logits lie within the dtype's noise; None: processed logits
    impossible: float | None  # share of sampled tokens to which the scoring pass gives probability 0
    self_check: Interval | None  # mean of a_t minus mean of beta_t, 0 on average on-policy; interval at 99.9 %
    burstiness: Interval | None  # lag-1 autocorrelation of acceptance; None: nothing varies, or a lossy rule
    phases: dict[str, Phase]  # empty where no markers are configured
    gammas: tuple[GammaResult, ...]  # empty where rounds are not defined (off-policy text, lossy rules)
    best_gamma: int | None  # of the largest speedup; None: no step times, or too little to choose by
    speedup: Interval | None  # at best_gamma, over the documents that the verdict rests on
    chosen: bool  # other documents than these chose best_gamma
    tested_clusters: int  # independent units among the documents that the verdict rests on
    concurrencies: tuple[AtConcurrency, ...]  # empty where step times of one concurrency are all there is
    pays_up_to: int | None  # the last of them before the best gamma makes decoding slower; None: not even the first
    verdict: VerdictName | None  # None: the verdict concerns another rule
    reason: str
    documents_needed: int | None

    @property
    def own(self) -> bool:
        """Whether the target wrote the text: mismatches and impossible tokens are only counted on that."""
        return self.mismatches is not None or self.impossible is not None


@dataclass(frozen=True)
class Certificate:
    """One domain, draft and rule: where the divergence of the draft made acceptance certain (see `docs/theory.md`)."""

    domain: str
    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int  # judged: with a proposal of a distribution (a tree: on the target's own greedy text)
    certified: Interval  # share of them whose KL(p||q) is below the threshold
    accepted: Interval  # share that the rule accepts
    accepted_not_certified: Interval  # share that was accepted without having to be
    contradicted: int  # certified and yet rejected: never, unless something is wrong
    mean_divergence: float  # mean KL(p||q), nats; infinite where q gives 0 to what p can emit
    rejected_at_most: float  # largest share that any draft with this mean divergence can have rejected


@dataclass(frozen=True)
class LosslessBounds:
    """Lossless sampling: beta, and lower bounds of it from the smaller KL of each position (but for `from_mean`)."""

    domain: str
    draft: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int
    beta: Interval  # mean of sum min(p, q)
    sharp: Interval  # the best bound that a KL allows (Fedotov, Harremoes, Topsoe)
    mean_divergence: float  # mean over positions of the smaller KL, nats
    from_mean: float  # the best bound where only the mean of that KL is known


@dataclass(frozen=True)
class Certificates:
    """What thresholds say about the drafts of a run. `inexact`: share of positions where one of them is a lower bound;
    `unknown`: rules of the run for which no threshold is known.
    """

    certificates: tuple[Certificate, ...]  # by domain, draft and rule
    lossless: tuple[LosslessBounds, ...]  # by domain and draft: what KL promises of lossless sampling
    inexact: float
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """One rule: the KL(p||q) below which half, 90 % and 99 % of the positions stay certain; infinite: never rejected."""

    rule: str
    half: Interval  # nats, at which half of the positions are certain
    ninety: Interval  # 90 % of them
    ninety_nine: Interval  # 99 % of them


@dataclass(frozen=True)
class CertainRun:
    """One rule: what is certain of any draft whose KL is at most `epsilon` everywhere."""

    rule: str
    epsilon: float  # nats
    certain: Interval  # share of positions
    mean_run: Interval  # certain tokens from a position on, on average over positions
    gamma: int
    tokens_per_round: Interval | None  # at least, at gamma; None: rounds are not defined on this text


@dataclass(frozen=True)
class FreeDraft:
    """What prompt lookup reaches in a domain under the rule that a verdict would concern."""

    draft: str
    rule: str
    coverage: float | None  # share of positions with a proposal
    alpha: Interval | None  # acceptance pooled over positions with a proposal
    gamma: int | None  # of the most tokens per round
    tokens_per_round: Interval | None  # at gamma


@dataclass(frozen=True)
class Predictability:
    """What the target alone says about a domain. Quantiles: the tenth, the median, the ninetieth percentile."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int
    entropy: tuple[Interval, ...]  # of the target, in nats
    margin: tuple[Interval, ...]  # of the target's two largest probabilities
    top_prob: Interval  # mean; the ceiling of one_hot for any draft, where this text was sampled
    budgets: tuple[Budget, ...]  # by rule: how close in KL a draft would have to come
    runs: tuple[CertainRun, ...]  # by rule and KL: runs of certain tokens
    free: tuple[FreeDraft, ...]  # what prompt lookup reaches


@dataclass(frozen=True)
class Traffic:
    """The verdict on the whole traffic: one draft, one rule, one gamma."""

    verdict: VerdictName
    reason: str
    draft: str | None
    rule: str
    gamma: int | None
    tokens_per_round: Interval | None  # over all documents; needs no step times
    break_even_length: float | None  # tokens per round at which the draft starts to pay
    speedup: Interval | None  # two-sided, over the documents that the verdict rests on
    speedup_of_all: Interval | None  # two-sided, over all documents: too high on average where some of them chose
    chosen: bool  # other documents than those that the verdict rests on chose draft or gamma
    tested: Interval | None  # value and one-sided bounds that the verdict rests on
    documents: int  # independent documents that the verdict rests on
    documents_needed: int | None
    min_speedup: float  # what the decision asks for
    weights: dict[str, float]
    weights_observed: bool
    concurrencies: tuple[AtConcurrency, ...]  # of the chosen draft
    pays_up_to: int | None  # the last of them before the best gamma makes decoding slower; None: not even the first


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
    mean_context: float | None  # tokens in the cache while these documents decode, on average over positions
    skipped: dict[str, int]
    truncated: dict[str, int]
    imported: str | None  # the engine from whose metrics the run was imported: no alpha, coverage, near-ties, other gammas
    target_model: ModelFacts  # what identifies the target
    draft_models: dict[str, DraftFacts]  # what identifies the drafts, by name
    environment: dict[str, Any]  # versions and hardware that it was run with
    profile: dict[str, Any]  # every option, as it was run


@dataclass(frozen=True)
class ReportWarning:
    """Something to know: cause and remedy."""

    code: str  # name of the warning, which does not change
    message: str  # what is so, and why it matters
    remedy: str  # what to do about it


@dataclass(frozen=True)
class Report:
    """The answer. `replay` says which flavour of rounds the numbers follow (engine, llamacpp or hf)."""

    format: ClassVar[str] = "alphaprof-report"
    version: ClassVar[int] = 1

    alphaprof: str
    confidence: float
    replay: Flavour
    run: RunFacts
    cost: Cost | None  # where step times come from; None: there are none
    traffic: Traffic  # the verdict on all domains together
    results: tuple[Result, ...]  # one for each domain, kind of text, draft and rule
    attribution: tuple[
        Attribution, ...
    ]  # why drafts are rejected, under the rules of the verdict and those that keep the text
    certificates: Certificates | None  # None: the log holds no thresholds
    difficulty: tuple[Decile, ...]  # by tenths of the positions; empty without a complete shard
    documents: tuple[DocumentResult, ...]  # worst and best under the rules of the verdict, by draft, the slowest first
    predictability: tuple[Predictability, ...]  # empty where a draft model was measured and the log holds no thresholds
    warnings: tuple[ReportWarning, ...]


@dataclass(frozen=True)
class Decile:
    """One tenth of all positions of a draft, by the target's margin or entropy, under one rule."""

    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    axis: str  # margin (p1 - p2) or entropy (nats)
    place: int  # 1 for the lowest values; there are fewer than ten where values tie
    low: float | None  # at least, less than; None: unbounded
    high: float | None  # less than this
    positions: int  # with a proposal
    accepted: Interval | None  # share of them that the rule accepts
    certified: Interval | None  # share of those with a certificate that is certain to be accepted; None: there is none


@dataclass(frozen=True)
class DocumentResult:
    """One of the documents that a draft serves worst or best, at the gamma that is best for its domain."""

    domain: str
    draft: str
    rule: str
    gamma: int
    document: int  # its number in documents.parquet
    source: int  # place in the profile's data, from 0
    source_row: int  # row there, from 0
    prompt_hash: str  # SHA-256 of the prompt's token ids
    tokens: int  # of its continuation
    alpha: float | None  # acceptance over its positions with a proposal; None: it has none
    tokens_per_round: float  # over all of its rounds
    speedup: float | None  # None: no step times


@dataclass(frozen=True)
class Cause:
    """One cause of what is lost, and what it would bring to lose nothing to it, all else as it was: at the same gamma and
    cost of a round, so that it is the most that the remedy can bring.
    """

    name: str  # see the table of causes in docs/report.md
    share: Interval  # of the positions
    tokens_per_round: float | None  # with it recovered; None: rounds are not defined
    speedup: float | None  # with it recovered; None: rounds are not defined, or there are no step times
    remedy: str  # what would remove it, or why nothing would


@dataclass(frozen=True)
class Attribution:
    """What one draft loses in a domain under a rule, split into causes that exclude each other and add up to it."""

    domain: str
    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the rule's own decoding (for a lossy rule: the target's) would emit this text
    documents: int
    positions: int
    lost: Interval  # share of all positions whose token is not an accepted draft: 1 - alpha times coverage
    ceiling: float | None  # the largest alpha of any draft that proposes one token; None: a perfect draft loses nothing
    gamma: int | None  # of the rounds that are replayed: the result's best one
    tokens_per_round: float | None  # as things are
    speedup: float | None  # as things are
    causes: tuple[Cause, ...]  # those that something is lost to, in the order in which they are looked for
    perfect_speedup: float | None  # with nothing lost at all, at this gamma and cost of a round
    best: str | None  # name of the cause whose remedy could bring most; None: none brings anything, or nothing is known


@dataclass(frozen=True)
class DocumentSpeedups:
    """Speedups of single documents: tenth percentile, median, ninetieth percentile, and the share that gets slower."""

    p10: float  # tenth percentile
    p50: float  # median
    p90: float  # ninetieth percentile
    slower: float  # share of documents that the draft slows down


@dataclass(frozen=True)
class AtConcurrency:
    """Speedups at one concurrency, the number of sequences decoded at a time, by gamma; `best_gamma` has the largest."""

    concurrency: int  # sequences decoded at a time
    gammas: tuple[int, ...]  # of the speedups, in their order
    speedups: tuple[Interval | None, ...]  # of decoding
    request_speedups: tuple[Interval | None, ...]  # empty for the whole traffic
    best_gamma: int | None  # of the largest speedup
