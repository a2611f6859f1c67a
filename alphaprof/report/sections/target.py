"""What the target alone says, and what divergences from it promise: is a domain predictable, where is acceptance certain?

By domain: the target's entropy and margin, how close in KL a draft has to come, and what is certain of any draft that does.
By draft: where its divergence made acceptance certain, and what was accepted without that. By
tenths of the positions: acceptance where the target is certain, and where it is not (docs/research/theory.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfOneText, Row, Table, table_by_columns, table_of, text_name, text_names
from alphaprof.report.build import RunReport
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import GREEDY, BoundRule, parse_rule, rules_of
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import (
    Array,
    Interval,
    by_cluster,
    distinct,
    mean_interval,
    pooled_share,
    quantile_interval,
    ratio,
    share_interval,
)
from alphaprof.stats.grouping import grouped
from alphaprof.theory.certificates import SLACK, beta_bound, budget, margin_thresholds, strict_thresholds
from alphaprof.totals.count import READ, Columns, Shape, TotalsRequest, columns_of
from alphaprof.totals.documents import TextGroup, over_domains
from alphaprof.totals.log_sample import MARGIN, LogPart, gathered, shards
from alphaprof.totals.replay import RoundCounts, Rounds, Trace, replay, run_lengths

TARGET = ("target_top_prob", "target_second_prob", "target_margin", "target_entropy")
QUANTILES = (0.1, 0.5, 0.9)
STILL_CERTAIN = (0.5, 0.9, 0.99)
EPSILONS = (0.01, 0.03, 0.1, 0.3)  # nats
CLOSE = 0.1  # nats: the KL of a draft that is close to its target, by which a text is called predictable
WIDTHS = (1, 2, 4, 8)  # of one level of a tree
DIVERGENCES = ("kl_target_draft", "kl_draft_target")
LOSSLESS = "lossless sampling"  # what is tallied beside the rules
SHARES = {"certified", "accepted", "beta", "sharp"}  # of what is tallied: shares of the judged positions
MOSTLY, HARDLY = 0.6, 0.4  # share of positions that are certain for such a draft, from which on, and below which
TITLE = "what the target alone says: is a domain predictable, and where is acceptance certain"
EMPTY = "it needs the position log"
READS_LOG = True


@dataclass(frozen=True)
class Budget:
    """One rule: the KL(p||q) below which half, 90% and 99% of the positions stay certain; infinite: never rejected."""

    rule: str
    half: Interval  # nats, at which half of the positions are certain
    ninety: Interval  # 90% of them
    ninety_nine: Interval  # 99% of them


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
class Predictability(OfOneText):
    """What the target alone says about a domain. Quantiles: the tenth, the median, the ninetieth percentile."""

    units: int  # independent documents
    positions: int
    entropy: tuple[Interval, ...]  # of the target, in nats
    margin: tuple[Interval, ...]  # of the target's two largest probabilities
    top_prob: Interval  # mean; the ceiling of one_hot for any draft, if this text was sampled
    budgets: tuple[Budget, ...]  # by rule: how close in KL a draft would have to come
    runs: tuple[CertainRun, ...]  # by rule and KL: runs of certain tokens


@dataclass(frozen=True)
class Certificate(OfOneText):
    """One domain, draft and rule: where the divergence of the draft made acceptance certain (docs/research/theory.md)."""

    draft: str
    rule: str
    documents: int
    positions: int  # judged: with a proposal of a distribution (a tree: on the target's own greedy text)
    certified: Interval  # share of them whose KL(p||q) is below the threshold
    accepted: Interval  # share that the rule accepts
    accepted_not_certified: Interval  # share that was accepted without having to be
    contradicted: int  # certified and yet rejected: never, unless something is wrong
    mean_divergence: float  # mean KL(p||q), nats; infinite if q gives 0 to what p can emit
    rejected_at_most: float  # largest share that any draft with this mean divergence can have rejected


@dataclass(frozen=True)
class LosslessBounds(OfOneText):
    """Lossless sampling: beta, and lower bounds of it from the smaller KL of each position (but for `from_mean`)."""

    draft: str
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
class Decile:
    """One tenth of all positions of a draft, by the target's margin p1 - p2, under one rule."""

    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    place: int  # 1 for the smallest margins; there are fewer than ten if margins tie
    low: float | None  # margins of at least this; None: unbounded
    high: float | None  # and of less than this
    positions: int  # with a proposal
    accepted: Interval | None  # share of them that the rule accepts
    certified: Interval | None  # share of those with a certificate that is certain to be accepted; None: there is none


@dataclass(frozen=True)
class Coverage:
    """How often a draft's `width` most probable tokens, one level of a tree, hold the token that the target chose."""

    draft: str
    width: int
    covered: Interval  # share of positions; of a head, of first drafts
    certified: Interval | None  # share whose KL(p||q) makes it certain; None: the log has no threshold of tree:width
    by_margin: Interval  # the same by the target's margin alone


@dataclass(frozen=True)
class Target:
    """What the target's margins and entropy allow."""

    texts: tuple[Predictability, ...]  # by domain and kind of text; empty without a position log
    certificates: Certificates | None  # None: the log holds no thresholds
    tenths: tuple[Decile, ...]  # acceptance by tenths of the positions
    coverage: tuple[Coverage, ...]  # by draft and width, over all text that the target chose


def compute(report: RunReport) -> Target:
    """Return what the position log says of the target; nothing without a log, or without a complete shard."""
    part, confidence = report.part, report.confidence
    if not part.run.has_log or not part.run.shards:
        return Target((), None, (), ())
    rules = rules_of([*report.asked.deciding, *report.others])
    return Target(
        texts=predictability(part, confidence),
        certificates=certificates(part, confidence),
        tenths=deciles(part, rules, confidence),
        coverage=tuple(coverage(part, confidence)),
    )


def certain_runs(thresholds: Array, lengths: Array, epsilon: float, gamma: int) -> tuple[Array, Array, Rounds]:
    """Return what is certain of any draft whose divergences are at most `epsilon`, from thresholds [positions]: sums over
    positions of whether it is accepted and of the run from there, [documents], and the rounds of nothing else.
    """
    stop = np.cumsum(lengths).astype(np.int64)
    shape = Shape(np.arange(len(stop)), stop - lengths, stop, np.array([]), np.array([]))
    certain = thresholds > epsilon
    run = run_lengths(certain, shape.start, shape.stop)
    trace = Trace(run, np.full(len(run), gamma), shape.start, shape.stop)
    return shape.sums(certain), shape.sums(run), replay(trace, gamma)


def predictability(part: LogPart, confidence: float) -> tuple[Predictability, ...]:
    """Return what the target says of each domain and kind of text. The log of every draft holds the same columns of it; the
    threshold of strict follows from the two largest probabilities, so that every log has it.
    """
    run, gamma = part.run, max(part.run.gammas)
    logged = {rule: f"threshold_{rule}" for rule in run.log_rules.certified}
    read = shards(run, next(iter(run.manifest.drafts)), [*TARGET, *logged.values()])
    log = gathered(columns | {"lengths": shape.stop - shape.start} for columns, shape in read)
    lengths = log.pop("lengths")
    own = {} if "strict" in logged else {"strict": strict_thresholds(*(log[name] for name in TARGET[:2]))}
    thresholds, texts = own | {rule: log[name] for rule, name in logged.items()}, list[Predictability]()
    for text in part.documents.groups:
        mine = np.isin(np.arange(len(lengths)), text.rows)
        rows = np.repeat(mine, lengths)
        target, known = ({name: values[rows] for name, values in each.items()} for each in (log, thresholds))
        texts.append(_of_text(text, target, known, lengths[mine], gamma, confidence))
    return tuple(texts)


def _of_text(
    text: TextGroup, target: Columns, thresholds: Columns, lengths: Array, gamma: int, confidence: float
) -> Predictability:
    """Return what the target's columns, and thresholds by id of the rule, say at the positions of a text."""

    def at(values: Array, probabilities: Sequence[float]) -> tuple[Interval, ...]:
        return tuple(quantile_interval(values, lengths, text.cluster, p, confidence) for p in probabilities)

    # At the divergence that a tenth of the thresholds does not exceed, 90% of the positions are still certain.
    rests = [1 - share for share in STILL_CERTAIN]
    tops = np.add.reduceat(target["target_top_prob"].astype(np.float64), np.cumsum(lengths) - lengths)
    return Predictability(
        **text.named,
        units=distinct(text.cluster),
        positions=int(lengths.sum()),
        entropy=at(target["target_entropy"], QUANTILES),
        margin=tuple(replace(margin, high=min(1.0, margin.high)) for margin in at(target["target_margin"], QUANTILES)),
        top_prob=share_interval(ratio(*by_cluster(text.cluster, tops, lengths)), confidence),
        budgets=tuple(Budget(rule, *at(values, rests)) for rule, values in thresholds.items()),
        runs=tuple(
            _certain_run(text, rule, values, lengths, epsilon, gamma, confidence)
            for rule, values in thresholds.items()
            for epsilon in EPSILONS
        ),
    )


def _certain_run(
    text: TextGroup, rule: str, thresholds: Array, lengths: Array, epsilon: float, gamma: int, confidence: float
) -> CertainRun:
    *sums, rounds = certain_runs(thresholds, lengths, epsilon, gamma)
    longest = (float(lengths.max()) + 1) / 2  # the mean run of a text that is certain throughout
    shares, runs = (ratio(*by_cluster(text.cluster, each, lengths)) for each in sums)
    mean, tokens = mean_interval(runs, confidence), None
    # A lossy rule may accept another token than the text's, and what follows then was not measured.
    if text.policy == GREEDY and not parse_rule(rule).rule.lossy:
        counted = RoundCounts.of(rounds, text.cluster)
        tokens = tokens_interval(speedup([counted], [1.0], free_draft(gamma)), gamma, confidence)
    share = share_interval(shares, confidence)
    return CertainRun(rule, epsilon, share, replace(mean, high=min(longest, mean.high)), gamma, tokens)


def certified_positions(rule: BoundRule, columns: Columns, shape: Shape) -> tuple[Array, Array]:
    """Return which positions have a certificate, where a draft proposes from a distribution, and at which acceptance is
    certain; both [positions]. What a tree accepts is known where the target's top token was emitted, on greedy text.
    """
    judged = (columns["proposed"] > 0) & ~np.isnan(columns["kl_target_draft"])
    if rule.rule.by_token:
        judged &= (columns["token"] == columns["target_top"]) & shape.each(shape.policy == GREEDY)
    return judged, judged & (np.maximum(columns["kl_target_draft"], 0) + SLACK < columns[f"threshold_{rule.id}"])


def tallies(run: Run, draft: str) -> dict[str, Columns]:
    """Return sums [documents] over positions, by id of each rule that the log holds thresholds of: the number of those that
    are `judged`, of those of them that are `certified`, `accepted` and both, and their `divergence`; and by `thresholds`
    those of the judged positions, in corpus order. By LOSSLESS, of positions with a divergence (`judged`): `beta` = sum
    min(p, q), the best bound of it that the divergence gives (`sharp`), and the `divergence`, the smaller one of KL(p||q)
    and KL(q||p).
    """
    rules = rules_of(list(run.log_rules.certified))

    def of_shard(columns: Columns, shape: Shape) -> dict[tuple[str, str], Array]:
        forward, backward = (np.maximum(columns[name], 0) for name in DIVERGENCES)
        known, smaller = ~np.isnan(columns["overlap"]), np.minimum(forward, backward)
        values = {"judged": known, "beta": columns["overlap"], "sharp": beta_bound(smaller), "divergence": smaller}
        found = {(LOSSLESS, name): _sums(each, known, shape) for name, each in values.items()}
        for rule in rules:
            judged, certified = certified_positions(rule, columns, shape)
            # A certificate is about the target's top token of the scoring pass, whatever rounding made the text's token.
            accepted = judged & (rule.accept(columns | {"greedy": np.zeros(len(judged), dtype=bool)}) > 0)
            masks = {"judged": judged, "certified": certified, "accepted": accepted, "both": certified & accepted}
            found |= {(rule.id, name): shape.sums(mask) for name, mask in masks.items()}
            found[rule.id, "divergence"] = _sums(forward, judged, shape)
            found[rule.id, "thresholds"] = columns[f"threshold_{rule.id}"][judged]
        return found

    names = [*READ, *DIVERGENCES, *(f"threshold_{rule.id}" for rule in rules)]
    tallied: dict[str, Columns] = {}
    for (rule, name), values in gathered(itertools.starmap(of_shard, shards(run, draft, names))).items():
        tallied.setdefault(rule, {})[name] = values
    return tallied


def inexact_share(run: Run) -> float:
    """Share of positions where the threshold of some rule is only a lower bound."""
    draft, name = next(iter(run.manifest.drafts)), "thresholds_exact"
    return float(1 - gathered(columns for columns, _ in shards(run, draft, [name]))[name].mean())


def _sums(values: Array, chosen: Array, shape: Shape) -> Array:
    """Return sum [documents] of chosen values, infinite ones included."""
    chosen_values = np.where(chosen, values, 0.0)
    finite = np.isfinite(chosen_values)
    return np.where(shape.sums(~finite) > 0, np.inf, shape.sums(np.where(finite, chosen_values, 0.0)))


def certificates(part: LogPart, confidence: float) -> Certificates | None:
    """Return what the log of a run says; None if it holds no thresholds."""
    run, found, bounds = part.run, list[Certificate](), list[LosslessBounds]()
    if not run.log_rules.certified:
        return None
    for draft in run.manifest.drafts:
        tallied = tallies(run, draft)
        if not tallied[LOSSLESS]["judged"].any():  # no distribution, hence no divergence
            continue
        for (rule, tally), text in itertools.product(tallied.items(), part.documents.groups):
            judged = tally["judged"]
            if not (positions := int(judged[text.rows].sum())):
                continue
            about = {**text.named, "draft": draft, "documents": text.documents(judged), "positions": positions}
            about |= {name: text.share(tally[name], judged, confidence) for name in tally.keys() & SHARES}
            mean = about["mean_divergence"] = float(tally["divergence"][text.rows].sum() / positions)
            if rule == LOSSLESS:
                bounds.append(LosslessBounds(**about, from_mean=float(beta_bound(np.array(mean)))))
                continue
            mine = np.repeat(np.isin(np.arange(len(judged)), text.rows), judged.astype(np.int64))
            about["accepted_not_certified"] = text.share(tally["accepted"] - tally["both"], judged, confidence)
            about["contradicted"] = int((tally["certified"] - tally["both"])[text.rows].sum())
            found.append(Certificate(**about, rule=rule, rejected_at_most=budget(tally["thresholds"][mine], mean)))
    unknown = tuple(rule for rule in run.rules if rule not in run.log_rules.certified)
    return Certificates(tuple(found), tuple(bounds), inexact_share(run), unknown)


def decile_counts(run: Run, draft: str, rules: Sequence[BoundRule], edges: Array) -> dict[str, Array]:
    """Count a draft's positions by id of the rule, [documents, bins, 4]: those with a proposal, the sum of beta_t over them,
    those that have a certificate, and those of them that are certified. `edges`: see `log_sample.decile_edges`.
    """
    thresholds = [rule for rule in rules if rule.id in run.log_rules.certified]
    names = [*columns_of(TotalsRequest([rule.id for rule in rules], ()), run.manifest.drafts[draft]), MARGIN]
    names += ["kl_target_draft", *(f"threshold_{rule.id}" for rule in thresholds)] if thresholds else []

    def of_shard(columns: Columns, shape: Shape) -> dict[str, Array]:
        columns["greedy"], proposed = shape.each(shape.policy == GREEDY), columns["proposed"] > 0
        nowhere, documents, size = np.zeros(len(proposed), dtype=bool), len(shape.document), len(edges) + 1
        cell = shape.each(np.arange(documents)) * size + np.searchsorted(edges, columns[MARGIN], side="right")
        found = {}
        for rule in rules:
            certified = certified_positions(rule, columns, shape) if rule in thresholds else (nowhere, nowhere)
            each = (proposed, np.where(proposed, rule.accept(columns), 0.0), *certified)
            counts = [np.bincount(cell, values, documents * size) for values in each]
            found[rule.id] = np.stack(counts, axis=-1).reshape(documents, size, 4)
        return found

    return gathered(itertools.starmap(of_shard, shards(run, draft, names)))


def deciles(part: LogPart, rules: Sequence[BoundRule], confidence: float) -> tuple[Decile, ...]:
    """Build the tenths of all positions of every draft under some rules."""
    ends = list(itertools.pairwise([None, *map(float, part.edges), None]))
    return tuple(
        Decile(
            draft=draft,
            rule=rule,
            continuation=text.continuation,
            sampling=text.sampling,
            on_policy=text.on_policy,
            place=place,
            low=low,
            high=high,
            positions=int(proposed[text.rows].sum()),
            accepted=text.share(accepted, proposed, confidence),
            certified=text.share(certified, judged, confidence),
        )
        for draft in part.run.manifest.drafts
        for rule, counts in decile_counts(part.run, draft, rules, part.edges).items()
        for text in over_domains(part.documents.groups)
        for place, (low, high) in enumerate(ends, 1)
        for proposed, accepted, judged, certified in [counts[:, place - 1].T]
    )


def coverage(part: LogPart, confidence: float) -> Iterator[Coverage]:
    """Yield what one level of each width holds, of every draft with a distribution, on text that the target chose."""
    run, groups = part.run, [text.rows for text in part.documents.groups if text.on_policy]
    if not groups:
        return
    own = np.sort(np.concatenate(groups))
    cluster = part.documents.units.codes[own]
    logged = {width: f"threshold_tree_{width}" for width in WIDTHS if f"tree_{width}" in run.log_rules.certified}
    names = ["draft_rank_of_token", "kl_target_draft", *TARGET[:3], *logged.values()]

    def of_shard(columns: Columns, shape: Shape) -> dict[int, Array]:
        rank, divergence = columns["draft_rank_of_token"], np.maximum(columns["kl_target_draft"], 0) + SLACK
        exact = {width: columns[name] for width, name in logged.items()}
        exact[1] = strict_thresholds(columns["target_top_prob"], columns["target_second_prob"])
        found = {}
        for width in WIDTHS:
            by_margin = divergence < margin_thresholds(columns["target_margin"], width)
            sure = divergence < exact[width] if width in exact else np.zeros(len(rank), dtype=bool)
            each = np.ones(len(rank)), (rank >= 1) & (rank <= width), sure, by_margin
            found[width] = np.stack([shape.sums(values) for values in each], 1)
        return found

    for draft in (name for name, facts in run.manifest.drafts.items() if facts.has_distribution):
        for width, counts in gathered(itertools.starmap(of_shard, shards(run, draft, names))).items():
            positions, *kept = counts[own].T
            covered, certain, margin = (pooled_share(cluster, each, positions, confidence) for each in kept)
            if covered is not None and margin is not None:
                yield Coverage(draft, width, covered, certain if width in logged or width == 1 else None, margin)


def draw(report: RunReport) -> Iterator[Block]:
    """Yield a sentence a domain, then the target alone, certificates, acceptance by tenths of the positions, and what the
    draft's top tokens hold.
    """
    target: Target = report.section("target")
    yield from map(_in_a_sentence, target.texts, text_names(target.texts, target.texts))
    if target.texts:
        yield ""
        yield from _target_alone(target.texts)
        yield ""
    known = target.certificates.certificates if target.certificates else ()
    cut = {draft for draft, facts in report.run.draft_models.items() if facts.reduced_vocabulary}
    uncertified = cut - {item.draft for item in known if item.certified.value > 0}  # no rule is certain of them anywhere
    if target.certificates is not None:
        yield from _certificate_blocks(target.certificates, cut, uncertified)
    certain = {(item.draft, item.rule) for item in known if item.draft not in uncertified}
    decisive = {(result.draft, result.rule) for result in report.results if result.verdict is not None}
    for draft in report.run.drafts:
        mine = [item for item in target.tenths if item.draft == draft]
        both = [item for item in mine if (draft, item.rule) in certain]
        yield from _tenth_tables(f"draft {draft}: certified of accepted", both, _certified)
        rest = [item for item in mine if (draft, item.rule) in decisive - certain]
        yield from _tenth_tables(f"draft {draft}: accepted", rest, lambda item: fmt.share_with_interval(item.accepted))
    yield from _coverage_tables(report, target.coverage)


def _in_a_sentence(text: Predictability, name: str) -> str:
    """Say whether a text is predictable, by the share of positions at which any close draft surely keeps the target's
    token.
    """
    run = next(run for run in text.runs if (run.rule, run.epsilon) == ("strict", CLOSE))
    said = (
        "predictable" if run.certain.low >= MOSTLY else "hardly predictable" if run.certain.high < HARDLY else "in between"
    )
    said += f": any draft within KL {CLOSE:g} keeps the target's top token at {fmt.percent(run.certain.value)} of positions"
    if run.tokens_per_round is not None:
        said += f", {fmt.number(run.tokens_per_round.value)} tokens per round or more at gamma {run.gamma}"
    return f"{name}: {said}"


def _target_alone(texts: Sequence[Predictability]) -> Iterator[Block]:
    """Yield entropy and margin by text, then KL budgets and what is certain of any draft."""
    columns: dict[str, Callable[[Predictability], str]] = {
        "docs": lambda item: str(item.units),
        "entropy,\nnats": lambda item: _spread_cell(item.entropy),
        "margin": lambda item: _spread_cell(item.margin),
        "mean top\nprobability": lambda item: fmt.share_with_interval(item.top_prob),
    }
    title = "the target alone: how predictable it is (median, and 10th to 90th percentile)"
    yield from table_of(title, texts, columns)
    names = text_names(texts, texts)
    budgets = [
        {
            f"{budget.rule}\n{share}": fmt.interval(value, digits=3)
            for budget in item.budgets
            for share, value in (("50%", budget.half), ("90%", budget.ninety), ("99%", budget.ninety_nine))
        }
        for item in texts
    ]
    title = "KL budget, nats: the largest KL of a draft at which this share of positions is certain"
    yield table_by_columns(title, list(zip(names, budgets, strict=True)))
    runs = [{f"KL <= {run.epsilon:g}": _certain_cell(run) for run in item.runs if run.rule == "strict"} for item in texts]
    title = f"rule strict, gamma {texts[0].runs[0].gamma}: what is certain for any draft with at most this KL(p||q)"
    yield table_by_columns(title, list(zip(names, runs, strict=True)))
    yield "for any such draft: share of certain positions, mean run of certain tokens, and least tokens per round."


def _certain_cell(run: CertainRun) -> str:
    """Return what is certain under a rule, for any draft with a bounded divergence."""
    lines = [fmt.share_with_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "\n".join(lines + ([f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


def _spread_cell(values: Sequence[Interval]) -> str:
    """Return a median with its interval, and how far the values spread."""
    low, middle, high = values
    return f"{fmt.interval(middle)}\n{fmt.number(low.value)} to {fmt.number(high.value)}"


def _certificate_blocks(found: Certificates, cut: Set[str], uncertified: Set[str]) -> Iterator[Block]:
    """Yield what thresholds say about each draft. `cut`: drafts with a reduced vocabulary; `uncertified`: those of them that
    no rule is certain of at any position.
    """
    for draft in dict.fromkeys(item.draft for item in found.certificates):
        mine = [item for item in found.certificates if item.draft == draft]
        bounds = [item for item in found.lossless if item.draft == draft]
        endless = draft in cut and all(math.isinf(item.mean_divergence) for item in mine)
        if endless:
            each = (f"{text_name(item, bounds, not item.on_policy)} {fmt.share(1 - item.beta.value)}" for item in bounds)
            yield (
                f"draft {draft} cannot propose some tokens that the target can emit: KL(p||q) is infinite at such positions "
                f"and on average. Mean total variation, 1 - overlap: {', '.join(each)}"
            )
            yield ""
        if draft not in uncertified:
            yield from _certified_positions(draft, mine, averaged=not endless)
        columns: dict[str, Callable[[LosslessBounds], str]] = {
            "beta": lambda item: fmt.share_with_interval(item.beta),
            "bound": lambda item: fmt.share_with_interval(item.sharp),
        }
        if not (endless and all(math.isinf(item.mean_divergence) for item in bounds)):
            columns["mean of the\nsmaller KL"] = lambda item: fmt.number(item.mean_divergence)
            columns["bound from\nthe mean"] = lambda item: fmt.share(item.from_mean)
        title = f"draft {draft}: lossless acceptance, and its bound from the smaller KL at each position"
        note = "  for text that was not sampled: beta at temperature 1; lossless sampling would not write this text"
        yield from table_of(title, bounds, columns, below=[note] if any(item.sampling is None for item in bounds) else [])
    if found.inexact:
        part = fmt.percent(found.inexact)
        yield f"At {part} of positions a rule accepts more tokens than logged: its threshold is a lower bound."
    if found.unknown:
        yield f"No certificate is known for {', '.join(found.unknown)}, so no draft has a threshold."


def _certified_positions(draft: str, mine: Sequence[Certificate], averaged: bool) -> Iterator[Block]:
    """Yield what is certain of a draft. `averaged`: whether its divergence has a mean."""
    texts = grouped(((item.domain, item.continuation, str(item.sampling), item.on_policy), item) for item in mine)
    names = text_names([same[0] for same in texts.values()], mine)
    certified, rejected = (
        [(name, {item.rule: cell(item) for item in same}) for name, same in zip(names, texts.values(), strict=True)]
        for cell in (_certified, lambda item: f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}")
    )
    yield table_by_columns(f"draft {draft}: certified of accepted, by domain", certified, draft=draft)
    if averaged:
        yield table_by_columns(f"draft {draft}: share rejected, and its limit at this mean KL(p||q)", rejected, draft=draft)
    certain = sum(round(item.certified.value * item.positions) for item in mine)
    wrong = [item for item in mine if item.contradicted]
    count = fmt.count(sum(item.contradicted for item in wrong))
    yield f"  certified but rejected: {count} of {fmt.count(certain)} certified positions, all rules together"
    if wrong:
        where = ", ".join(f"{fmt.short(item.domain)} ({item.rule})" for item in wrong)
        please = "  do not trust the logged divergences there; please report this as a bug, with the profile"
        yield from (f"  this should be impossible: {where}", please)
    yield ""


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _tenth_tables(what: str, items: Sequence[Decile], cell: Callable[[Decile], str]) -> Iterator[Table]:
    """Yield acceptance by tenths of the target's margin, a table for each kind of text, which titles name if there are
    several. A tenth is named by where it begins: the next one begins where it ends.
    """
    kinds: dict[str, dict[int, tuple[str, dict[str, str]]]] = {}
    for item in items:
        kind = fmt.text_kind(item.continuation, item.sampling) + ("" if item.on_policy else ", off-policy")
        edge = item.high if item.low is None else item.low
        margin = "all" if edge is None else f"{'below' if item.low is None else 'from'} {fmt.share(edge)}"
        kinds.setdefault(kind, {}).setdefault(item.place, (margin, {}))[1][item.rule] = cell(item)
    for kind, rows in kinds.items():
        title = f"{what}, by tenths of the target's margin{f' ({kind})' if len(kinds) > 1 else ''}"
        yield table_by_columns(title, list(rows.values()), named="margin", draft=items[0].draft)


def _coverage_tables(report: RunReport, found: Sequence[Coverage]) -> Iterator[Table]:
    """Yield what one level of a tree holds, by draft and width."""
    for draft in dict.fromkeys(item.draft for item in found):
        first = ", first drafts of rounds" if report.run.draft_models[draft].by_depth else ""
        rows: list[Row] = [
            (
                str(item.width),
                {
                    "covered": fmt.share_with_interval(item.covered),
                    "certain": fmt.share_with_interval(item.certified),
                    "certain by margin": fmt.share_with_interval(item.by_margin),
                },
            )
            for item in found
            if item.draft == draft
        ]
        title = f"draft {draft}: share of positions whose token is among the draft's top tokens{first}"
        yield table_by_columns(title, rows, named="top", draft=draft)
