"""Why drafts are rejected, and what it would bring to mend each cause.

Each position that is lost has one cause, and rounds are replayed without the losses of a cause. A position without a
proposal loses all; any other loses 1 - a_t, the probability that its token was not an accepted draft (1 - beta_t if the
rule's own decoding would not emit the text, and for lossy rules). The whole of it goes to the first of CAUSES that applies
to the token that the draft should have proposed: the emitted one, or the target's top token if acceptance does not depend
on the emitted one. What costs least to mend comes first, so that the last holds what nothing but a better draft mends.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.speedup import StepTimes, Timing, free_draft, spent_and_base
from alphaprof.log.manifest import DraftFacts, ModelFacts, Trained
from alphaprof.log.run import Run
from alphaprof.log.schema import PROPOSED_LIMIT, deeper_names
from alphaprof.report.format import count, many
from alphaprof.report.model import Result
from alphaprof.rules import GREEDY, SAMPLED, BoundRule
from alphaprof.stats.estimate import Interval, pooled_share
from alphaprof.theory.certificates import strict_thresholds
from alphaprof.totals.count import (
    SHAPED,
    Shape,
    TotalsRequest,
    by_chance,
    chances_by_depth,
    columns_of,
    proposed_in,
    rounds_of,
    some_documents,
    tested_chances,
    trace_of,
)
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import LogPart, columns_at
from alphaprof.totals.lookup import first_proposals, joined_texts
from alphaprof.totals.replay import Flavour, RoundCounts, Rounds, Trace, run_lengths, runs_by_depth

Array = np.ndarray[Any, Any]
WIDTH = 4  # of the tree that a cause speaks of
UNSURE = 0.1  # nats: if a smaller KL(p||q) allows a rejection, even good drafts are not safe
NO_PROPOSAL, BEYOND, TIE, VOCABULARY, SPECIAL, LOOKUP, RANK, UNCERTAIN, DRAFT = CAUSES = (
    "no proposal",
    "beyond context",
    "numerical tie",
    "draft vocabulary",
    "special tokens",
    "prompt lookup",
    f"rank 2 to {WIDTH}",
    "target uncertain",
    "draft",
)
SILENT = 2  # causes, the first ones, whose positions have no proposal
REMEDIES = {
    NO_PROPOSAL: "a draft with the target's vocabulary, which proposes there",
    BEYOND: "a draft with a longer context",
    TIE: "no draft helps: the target itself may choose either token; profile in the served dtype",
    VOCABULARY: "the draft cannot propose this token: rebuild its draft vocabulary's mapping (d2t) on this traffic, or "
    "train a head on it (alphaprof train)",
    SPECIAL: "a draft that knows the target's chat template and where texts end",
    LOOKUP: "prompt lookup beside this draft",
    RANK: f"a tree that holds the draft's {WIDTH} most probable tokens; its rounds cost more than these",
    UNCERTAIN: "no draft helps: the target itself is undecided there",
    DRAFT: "another draft, or a head trained on this traffic (alphaprof train; alphaprof curve says what it reaches "
    "now and with more data)",
}
WITHOUT_MODEL = {  # of drafts that run none, and so can but copy
    NO_PROPOSAL: "a draft model if the text so far holds nothing to copy",
    SPECIAL: "none: a copying draft never proposes the end of a text, and copies other markers from earlier text",
    DRAFT: "a draft model: this text does not continue like the copied one",
}
BY_CHANCE = "no draft helps: the target samples a token other than its top token"


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
class ResultOnText:
    """A result, and the documents that its losses come from."""

    result: Result
    rule: BoundRule
    text: TextGroup


def attribution(
    part: LogPart, judged: Sequence[ResultOnText], request: TotalsRequest, timing: Timing, confidence: float
) -> tuple[Attribution, ...]:
    """Attribute what is lost under the rules that verdicts concern, and under chains that keep the text if it is theirs.
    Returns nothing without a position log. `judged`: results in the order of their drafts and rules.
    """
    if not part.run.has_log or not part.run.shards:
        return ()
    groups: dict[tuple[str, str], list[ResultOnText]] = {}
    for item in judged:
        if item.result.draft not in part.run.manifest.drafts:
            continue  # a hybrid loses what its parts lose
        if item.result.verdict is not None or (item.result.on_policy and item.rule.rule.chained):
            groups.setdefault((item.result.draft, item.rule.id), []).append(item)
    drafts = part.run.manifest.drafts
    return tuple(
        _attribution(item, lost, drafts[draft], timing.times.get(draft) if item.rule.rule.timed else None, confidence)
        for ((draft, _), items), lost in zip(groups.items(), _all_losses(part, groups.values(), request), strict=True)
        for item in items
    )


def _attribution(
    item: ResultOnText, losses: Losses, draft: DraftFacts, times: StepTimes | None, confidence: float
) -> Attribution:
    result, cluster, rows = item.result, item.text.cluster, item.text.rows
    gamma = result.best_gamma if result.gammas else None
    split, positions = _scaled_losses(losses.split[rows], losses.lost[rows], item.rule), losses.positions[rows]

    def speeds(rounds: Rounds) -> tuple[float | None, float | None]:
        return _speeds(_counts(rounds, rows, cluster, gamma, losses.stop), times) if gamma else (None, None)

    causes = []
    *by_cause, unchanged, perfect = losses.rounds
    for name, lost, recovered in zip(CAUSES, split.T, by_cause, strict=True):
        share = pooled_share(cluster, lost, positions, confidence)
        if share is not None and share.value > 0:
            causes.append(Cause(name, share, *speeds(recovered), _remedy_of(name, draft, item)))
    tokens, faster = speeds(unchanged)
    gains = {
        cause.name: (cause.speedup or cause.tokens_per_round or 0.0) - (faster or tokens or 0.0)
        for cause in causes
        if cause.name not in (TIE, UNCERTAIN) and (cause.name != SPECIAL or draft.has_steps)  # the others have no remedy
    }
    best = max(gains, key=lambda name: gains[name], default=None)
    return Attribution(
        domain=result.domain,
        draft=result.draft,
        rule=result.rule,
        continuation=result.continuation,
        sampling=result.sampling,
        on_policy=result.on_policy,
        documents=len(rows),
        positions=int(positions.sum()),
        lost=pooled_share(cluster, losses.lost[rows], positions, confidence) or Interval(1.0, 0.0, 1.0),
        ceiling=float(losses.top[rows].sum() / positions.sum()) if item.rule.rule.at_most_top else None,
        gamma=gamma,
        tokens_per_round=tokens,
        speedup=faster,
        causes=tuple(causes),
        perfect_speedup=speeds(perfect)[1],
        best=best if best is not None and gains[best] > 0 else None,
    )


def _scaled_losses(split: Array, lost: Array, rule: BoundRule) -> Array:
    """Return what is lost by cause [documents, causes], adding up to what alpha says is lost.

    Positions without a proposal are facts. Of the others alpha counts the probability of a rejection before the token is
    known, and causes are those of the tokens that came: all are scaled alike, by a factor that is 1 on average over texts
    (and always 1 if acceptance is a fact).
    """
    happened, expected = split[:, SILENT:].sum(), max(0.0, float(lost.sum() - split[:, :SILENT].sum()))
    result = np.array(split, dtype=np.float64)
    if happened > 0:
        result[:, SILENT:] *= expected / happened
    elif expected > 0:  # no token of these texts was rejected, and some could have been
        result[:, CAUSES.index(DRAFT if rule.rule.drawn else UNCERTAIN)] += lost - split[:, :SILENT].sum(1)
    return result


def _counts(rounds: Rounds, rows: Array, cluster: Array, gamma: int, stop: Flavour | None) -> RoundCounts:
    """Return the rounds of some documents at their gamma."""
    chosen = (values[rows] for values in vars(rounds).values())
    narrow = Rounds(*(values if values.ndim == 1 else values[:, :gamma] for values in chosen))
    return RoundCounts.of(narrow, cluster, stop)


def _speeds(counts: RoundCounts, times: StepTimes | None) -> tuple[float | None, float | None]:
    """Return tokens per round and speedup of some documents, the points that results have; None without tokens."""

    def point(steps: StepTimes) -> float:
        spent, base = spent_and_base(counts, steps)
        return float(1 / (spent[base > 0].sum() / base[base > 0].sum()))

    if counts.tokens.sum() == 0:
        return None, None
    gamma = counts.drafted.shape[1]
    return point(free_draft(gamma)), (point(times) if times is not None and times.covers(gamma) else None)


def _remedy_of(name: str, draft: DraftFacts, item: ResultOnText) -> str:
    if name == UNCERTAIN and item.result.on_policy and item.text.policy == SAMPLED:
        return BY_CHANCE
    if draft.trained is not None and name in (DRAFT, VOCABULARY):
        return _more_text(draft.trained)
    return REMEDIES[name] if draft.has_steps else WITHOUT_MODEL.get(name, REMEDIES[name])


def _more_text(trained: Trained) -> str:
    """Return the remedy for what a head of one's own lacks, with the forecast of its learning curve."""
    forecast = "alphaprof train --curve, then alphaprof curve"
    if trained.curve is not None:
        forecast = shlex.join(["alphaprof", "curve", trained.curve])
    size = f"the {many(trained.units, 'unit')} ({count(trained.tokens)} tokens) so far"
    return f"train this head on more text than {size}; to forecast the gain: {forecast}"


@dataclass(frozen=True)
class Losses:
    """What a draft loses under a rule, summed per document of the run.

    `lost` [documents]: positions less what the rule accepts, as alpha counts it; `split` [documents, causes]: what
    happened to the emitted tokens, by cause: the same on average over texts; `top` [documents]: the target's largest
    probabilities. `rounds` [documents] at each document's gamma: with the losses of each cause recovered, as things are, and
    with nothing lost at all; depth counts as wide as the largest gamma, nothing counted if it is 0. `stop`: as of
    `RoundCounts.of`.
    """

    positions: Array
    lost: Array
    split: Array
    top: Array
    rounds: tuple[Rounds, ...]
    stop: Flavour | None


def _all_losses(part: LogPart, jobs: Collection[Sequence[ResultOnText]], request: TotalsRequest) -> list[Losses]:
    """Return what is lost under each of some drafts and rules, in one pass over the log; [jobs]. The texts of a domain are
    replayed at its best gamma.
    """
    gammas = [np.zeros(len(part.documents.numbers), dtype=np.int64) for _ in jobs]
    for items, gamma in zip(jobs, gammas, strict=True):
        for item in items:
            gamma[item.text.rows] = (item.result.best_gamma or 0) if item.result.gammas else 0
    parts: list[list[Losses]] = [[] for _ in jobs]
    at = 0
    for shard in part.run.shards:
        texts = ShardTexts.of(part.run, shard.index)
        rows = slice(at, at + len(texts.shape.document))
        for (item, *_), gamma, shards in zip(jobs, gammas, parts, strict=True):
            sizes = gamma[rows], int(gamma.max(initial=1))
            shards.append(_losses(part.run, item.result.draft, item.rule, texts, sizes, request))
        at = rows.stop
    return [_joined(shards) for shards in parts]


@dataclass(frozen=True)
class ShardTexts:
    """One shard's documents: `reach` [positions]: tokens that a draft has to read to propose there; `looked_up` [positions]:
    what prompt lookup with its default settings proposes first.
    """

    index: int
    shape: Shape
    reach: Array
    looked_up: Array

    @classmethod
    def of(cls, run: Run, index: int) -> ShardTexts:
        """Read the texts of a complete shard."""
        table = run.continuations(index, [*SHAPED, "prompt_tokens", "prompt_ids"])
        emitted = columns_at(run, next(iter(run.manifest.drafts)), index, ["token"])["token"]  # rules read it too
        shape = Shape.of(table)
        prompts, lengths = table["prompt_tokens"].to_numpy(), shape.stop - shape.start
        tokens, start, continued = joined_texts(table["prompt_ids"].combine_chunks(), prompts, emitted, lengths)
        reach = np.arange(lengths.sum()) + shape.each(prompts - shape.start) - 1
        return cls(index, shape, reach, first_proposals(tokens, start)[continued])


def _losses(
    run: Run, draft: str, rule: BoundRule, texts: ShardTexts, sizes: tuple[Array, int], request: TotalsRequest
) -> Losses:
    """Return the losses of one shard. `sizes`: gamma [documents of the shard], and the widest of the run."""
    shape, target, facts = texts.shape, run.manifest.target, run.manifest.drafts[draft]
    request = dataclasses.replace(request, rules=[rule.id])
    names = dict.fromkeys([*columns_of(request, facts), *deeper_names("agrees", facts.depths)])
    names |= {"in_draft_vocabulary": None} if facts.reduced_vocabulary else {}
    columns = columns_at(run, draft, texts.index, list(names))  # nulls become -1, NaN or False
    columns["proposed"] = proposed_in(request.flavour, columns)
    columns["accepted_run"] = np.maximum(columns["accepted_run"], 0)
    columns["greedy"] = shape.each(shape.policy == GREEDY)
    ready = columns["proposed"] > 0
    beta = np.where(ready, rule.accept(columns), 0.0).astype(np.float64)
    own = shape.each(np.isin(shape.policy, rule.rule.policies)) & (not rule.rule.lossy)
    emitted = rule.emitted(columns)
    kept, accept = beta if emitted is None else np.where(ready, emitted, 0.0), beta
    mass = np.maximum(0.0, 1.0 - np.where(own, kept, beta))
    cause = _causes(rule, columns, texts, own, target, facts)
    of_cause = [cause == number for number in range(len(CAUSES))]
    kept, accept = tested_chances(rule, columns, (kept, accept))
    if facts.by_depth:
        kept, accept = chances_by_depth(rule, facts, columns, (kept, accept))
    trace = trace_of(columns, shape, kept, (target, facts), request.p_min)
    replay = LossReplay(trace, shape, kept, accept if by_chance(rule, facts) else None, *sizes, request, rule.rule.blocks)
    unchanged = replay.rounds(np.zeros(len(mass), dtype=bool))
    perfect = dataclasses.replace(replay, accept=None).rounds(np.ones(len(mass), dtype=bool))
    changed = [mine & (mass > 0) for mine in of_cause]
    return Losses(
        positions=(shape.stop - shape.start).astype(np.float64),
        lost=shape.sums(1.0 - beta),
        split=np.stack([shape.sums(np.where(mine, mass, 0.0)) for mine in of_cause], axis=1),
        top=shape.sums(columns["target_top_prob"]),
        rounds=(*(replay.rounds(each) if each.any() else unchanged for each in changed), unchanged, perfect),
        stop=request.stop(facts),
    )


def _joined(parts: Sequence[Losses]) -> Losses:
    """Return the losses of several shards as one; there is a shard at least."""
    sums = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("positions", "lost", "split", "top")}
    together = zip(*(part.rounds for part in parts), strict=True)
    columns = (zip(*(vars(rounds).values() for rounds in several), strict=True) for several in together)
    return Losses(**sums, rounds=tuple(Rounds(*map(np.concatenate, each)) for each in columns), stop=parts[0].stop)


def _causes(
    rule: BoundRule, columns: dict[str, Array], texts: ShardTexts, own: Array, target: ModelFacts, draft: DraftFacts
) -> Array:
    """Return the cause [positions] that a loss at each position has, as its number in CAUSES.

    `own` [positions]: the rule's own decoding would emit the text, and acceptance depends on the emitted token.
    """
    shape, token, guess = texts.shape, columns["token"], columns["draft_top"]
    wanted = np.where(own, token, columns["target_top"])
    wanted_prob = np.where(own, columns["target_token_prob"], columns["target_top_prob"])
    wrong = guess != wanted
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.log(columns["target_top_prob"])
        gap = np.maximum(top - np.log(columns["target_prob_of_draft_top"]), top - np.log(wanted_prob))
    ordered = GREEDY in rule.rule.policies  # the target takes its top token; a tie of drawn tokens is not numerical noise
    rank = columns["draft_rank_of_token"]
    silent = columns["proposed"] == 0
    where = {
        BEYOND: silent & (draft.context is not None) & (texts.reach >= (draft.context or 0)),
        NO_PROPOSAL: silent,
        TIE: wrong & shape.each(shape.plain) & ordered & (gap <= target.measured_noise * (1 + 1e-3)),
        VOCABULARY: (wrong | own) & (token == wanted) & ~columns.get("in_draft_vocabulary", np.ones(len(token), dtype=bool)),
        SPECIAL: (wrong | own) & np.isin(wanted, (*target.eos, *(target.special or ()))),
        LOOKUP: (wrong | own) & draft.has_steps & (texts.looked_up == wanted),
        RANK: (wrong | own) & (token == wanted) & (rank >= 2) & (rank <= WIDTH),
        UNCERTAIN: _uncertain(rule, columns, shape, own, wrong),
    }
    numbers = [CAUSES.index(name) for name in where]
    return np.asarray(np.select(list(where.values()), numbers, default=CAUSES.index(DRAFT)))


def _uncertain(rule: BoundRule, columns: dict[str, Array], shape: Shape, own: Array, wrong: Array) -> Array:
    """Return where no draft could count on the token that was wanted, [positions]."""
    if rule.rule.drawn:
        return np.zeros(len(own), dtype=bool)
    close = strict_thresholds(columns["target_top_prob"], columns["target_second_prob"]) < UNSURE
    drawn = own & shape.each(shape.policy == SAMPLED)
    # Not wrong and yet lost: the rule draws what it keeps, for any proposal.
    return np.asarray(np.where(drawn, columns["token"] != columns["target_top"], close | ~wrong))


@dataclass(frozen=True)
class LossReplay:
    """What rounds of one shard are replayed from: its trace, a_t (`kept`) and beta_t (`accept`), both [positions], of a head
    [positions, depths], and `gamma` [documents], 0 if no rounds are wanted; depths are counted up to `widest`. `accept`:
    None if rounds are facts. `blocks`: see `expected_replays`.
    """

    trace: Trace
    shape: Shape
    kept: Array
    accept: Array | None
    gamma: Array
    widest: int
    request: TotalsRequest
    blocks: bool

    def rounds(self, changed: Array) -> Rounds:
        """Replay the rounds with the drafts of changed positions accepted.

        Expectations keep a control variate: a_t - beta_t of the text at all positions, the changed ones too, since those are
        chosen by the token that came, and over a choice like that its mean is not 0.
        """
        rounds = Rounds.none(len(self.gamma), self.widest)
        kept = np.where(changed if self.kept.ndim == 1 else changed[:, None], 1.0, self.kept)
        chances = None if self.accept is None else (kept, self.accept + (kept - self.kept))
        for gamma in np.unique(self.gamma[self.gamma > 0]).tolist():
            chosen = self.gamma == gamma
            trace = some_documents(self._granted(changed, gamma), chosen)
            counted = rounds_of(trace, chances, dataclasses.replace(self.request, gammas=(gamma,)), self.blocks)[gamma]
            for name, values in vars(counted).items():
                place = (chosen,) if values.ndim == 1 else (chosen, slice(gamma))
                getattr(rounds, name)[place] = values
        return rounds

    def _granted(self, changed: Array, gamma: int) -> Trace:
        """Return the trace with the drafts of changed positions accepted, and proposed if there were none."""
        trace, shape = self.trace, self.shape
        place = np.arange(len(changed))
        stop = shape.each(trace.stop)
        after = place + trace.proposed  # a draft that fell silent there
        beyond = np.minimum(after, len(changed) - 1)
        open_ended = (after < stop) & changed[beyond] & (trace.proposed[beyond] == 0)
        if trace.looked_up:  # its proposals end for other reasons
            open_ended &= trace.proposed == 0
        proposed = np.where(open_ended & (trace.proposed < PROPOSED_LIMIT), PROPOSED_LIMIT, trace.proposed)
        if self.kept.ndim > 1:
            run = runs_by_depth((self.kept == 1) | changed[:, None], proposed, shape.start, shape.stop)
            return dataclasses.replace(trace, run=run, proposed=proposed)
        if not trace.looked_up:
            run = run_lengths(changed | (self.kept == 1), shape.start, shape.stop)
            return dataclasses.replace(trace, run=run, proposed=proposed)
        # A round that fails at a changed position goes on as one that starts after it would.
        last = len(changed) - 1
        run, begin, going = trace.run.copy(), place, np.ones(len(changed), dtype=bool)
        for _ in range(gamma):
            end = begin + trace.run[begin]
            going = going & (trace.run[begin] < proposed[begin]) & (end < stop) & changed[np.minimum(end, last)]
            if not going.any():
                break
            begin = np.where(going, np.minimum(end + 1, last), begin)
            inside = end + 1 < stop
            run = np.where(going, run + 1 + np.where(inside, trace.run[begin], 0), run)
            going &= inside
        return dataclasses.replace(trace, run=run, proposed=proposed)
