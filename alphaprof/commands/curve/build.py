"""Counts what heads of every size reach on the test texts, and puts the answer together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alphaprof.commands.curve.answer import CurveReport
from alphaprof.commands.curve.collect import CurveHead, CurveHeads, collected, units_of
from alphaprof.commands.curve.model import CurveDomain, CurvePoint
from alphaprof.commands.curve.outlook import NOTABLE, costs_of, outlook_of
from alphaprof.config.heads import HeadsOptions
from alphaprof.config.load import changed_question
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.speedup import Mix, StepTimes, free_draft, spent_and_base
from alphaprof.errors import NotComparable
from alphaprof.log.manifest import DecisionAsked
from alphaprof.log.run import Run
from alphaprof.log.split import STOP, TEST
from alphaprof.log.training import learnt, split_words
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, influences, present, quantile
from alphaprof.stats.learning import Measured, measured_tokens
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.totals.documents import mean_context
from alphaprof.totals.replay import RoundCounts
from alphaprof.version import __version__


@dataclass(frozen=True)
class TestTraffic:
    """How the documents of a part make up the traffic. `rows` of each domain; `weights`: shares of tokens, None: as they
    are. `cluster` [all rows]: numbers of units.
    """

    __test__ = False  # no test of pytest

    rows: Mapping[str, Array]
    weights: Mapping[str, float] | None
    cluster: Array

    @property
    def mix(self) -> Mix:
        """The domains as they make up the traffic."""
        return Mix.of(self.weights) if self.weights else Mix(tuple(self.rows), None)

    @property
    def parts(self) -> list[tuple[Array, float]]:
        """Rows that are one ratio, with their weight: of every domain with one, or all of them together."""
        if self.weights is None:
            return [(np.concatenate(list(self.rows.values())), 1.0)]
        return [(self.rows[domain], weight) for domain, weight in self.weights.items() if weight > 0]

    def alone(self, domain: str) -> TestTraffic:
        """One domain as a traffic of its own."""
        return TestTraffic({domain: self.rows[domain]}, None, self.cluster)


@dataclass(frozen=True)
class CurveInputs:
    """What the answer rests on: heads, the decision of the run, step times of the largest head (None: `basis` says why), and
    documents of the test part.
    """

    heads: CurveHeads
    decision: DecisionAsked
    times: StepTimes | None
    basis: str  # what step times are
    gammas: Sequence[int]  # that every head was tested with
    traffic: TestTraffic
    gamma: int
    gamma_from: Literal["decision", "stop", "test"]

    @property
    def confidence(self) -> float:
        """Of every interval."""
        return self.decision.confidence


def build_curve(options: HeadsOptions, file: Path, changes: list[str]) -> CurveReport:
    """The answer about the heads of a list; `changes` to the decision and the costs of its run as in a report. Raises
    `ProfileInvalid`, `RunUnreadable`, `HeadRecordUnreadable`, `NotComparable` and `CostsUnreadable`.
    """
    run = Run.open(options.run)
    config = changed_question(run.manifest.config, changes) if changes else run.manifest.config
    heads = collected(options, file, run.view(dataclasses.replace(run.manifest, config=config)))
    inputs = _inputs(heads)
    before = (None, *heads.sizes[:-1])
    points = tuple(_point(inputs, label_of(same), same, one) for same, one in zip(heads.sizes, before, strict=True))
    beside = tuple(
        _point(inputs, name, [head], heads.sizes[-1], known=head.units > 0) for name, head in heads.beside.items()
    )
    parts = inputs.traffic.parts
    outlook = outlook_of(heads, _curves(inputs), points, parts, _timing(inputs), inputs.gamma, inputs.decision)
    tested = heads.part == TEST
    return CurveReport(
        alphaprof=__version__,
        run=str(run.path),
        confidence=inputs.confidence,
        min_speedup=inputs.decision.min_speedup,
        concurrency=inputs.decision.concurrency,
        gamma=inputs.gamma,
        gamma_from=inputs.gamma_from,
        times=inputs.basis,
        test_units=distinct(inputs.traffic.cluster[tested]),
        test_tokens=int(heads.largest.totals["tokens"][tested].sum()),
        points=points,
        beside=beside,
        costs=costs_of(heads),
        **vars(outlook)
        | {"instead": (*_instead(inputs, beside), *outlook.instead), "notes": (*outlook.notes, *_notes(inputs))},
    )


def _inputs(heads: CurveHeads) -> CurveInputs:
    """What was asked, with gamma chosen where the decision leaves it open."""
    decision, run = heads.run.manifest.profile.decision, heads.run
    shallow = min((*heads.every, *heads.beside.values()), key=lambda head: head.depths)
    tested = [gamma for gamma in run.gammas if gamma <= shallow.depths]
    allowed = [gamma for gamma in tested if decision.gamma in ("auto", gamma)]
    if not allowed:
        hint = "train with more --ttt depths, or ask for another: --set decision.gamma=N"
        raise NotComparable(
            f"{shallow.draft} was tested for {shallow.depths} drafts a round, fewer than are asked for", hint
        )
    (times, basis), cluster = _steps(heads), heads.largest.totals.cluster
    test = _traffic(heads, TEST, decision.weights, cluster)
    if len(allowed) == 1:
        return CurveInputs(heads, decision, times, basis, tested, test, allowed[0], "decision")
    chooses = STOP if (heads.part == STOP).any() else TEST
    traffic = _traffic(heads, chooses, decision.weights, cluster)
    gamma = max(allowed, key=lambda each: _speed(heads.sizes[-1], traffic, each, times))
    return CurveInputs(heads, decision, times, basis, tested, test, gamma, "stop" if chooses == STOP else "test")


def _steps(heads: CurveHeads) -> tuple[StepTimes | None, str]:
    """The step times of the first head of the largest size, at the concurrency of the decision, and what they are, or why
    there are none. Raises `CostsUnreadable`.
    """
    run, draft, profile = heads.run, heads.largest.draft, heads.run.manifest.profile
    book = open_costs(run, profile.costs, mean_context(run.documents()))
    if book is None:
        return None, "no step times were measured with this run, and costs name no others"
    timing = book.timing(profile.decision.concurrency)
    times = timing.times.get(draft)
    return times, book.basis if times else timing.missing.get(draft, "no step times were measured")


def _traffic(heads: CurveHeads, part: str, weights: Mapping[str, float] | None, cluster: Array) -> TestTraffic:
    """The documents of a part by domain, the largest first. Weights count where every domain that has one has documents."""
    domain, tokens = np.array(heads.documents["domain"].to_pylist()), heads.largest.totals["tokens"]
    rows = {str(name): np.flatnonzero((heads.part == part) & (domain == name)) for name in np.unique(domain)}
    rows = {
        name: rows[name] for name in sorted(rows, key=lambda name: -tokens[rows[name]].sum()) if tokens[rows[name]].sum() > 0
    }
    known = weights is not None and all(name in rows for name, weight in weights.items() if weight > 0)
    return TestTraffic(rows, weights if known else None, cluster)


def _speed(heads: Sequence[CurveHead], traffic: TestTraffic, gamma: int, times: StepTimes | None) -> float:
    """The speedup of a size, or its tokens per round without step times."""
    rows = [traffic.rows[domain] for domain in traffic.mix.domains]
    decoded = [(_counts(heads, each, gamma), times or free_draft(gamma)) for each in rows]
    return traffic.mix.value(decoded) or 0.0


def _counts(heads: Sequence[CurveHead], rows: Array, gamma: int) -> RoundCounts:
    """Rounds of some documents, the mean of some heads."""
    counts = [head.totals.counts(gamma).rows(rows) for head in heads]
    means = {name: np.mean([getattr(each, name) for each in counts], axis=0) for name in vars(counts[0])}
    return RoundCounts(**means | {"cluster": counts[0].cluster})


def label_of(heads: Sequence[CurveHead]) -> str:
    """A size in a word: its fraction of the training units where all records agree, else its units."""
    fractions = {head.record.size.fraction for head in heads if head.record}
    return fractions.pop() if len(fractions) == 1 and all(head.record for head in heads) else f"{units_of(heads)} units"


def _point(
    inputs: CurveInputs,
    label: str,
    heads: Sequence[CurveHead],
    before: Sequence[CurveHead] | None,
    known: bool = True,
) -> CurvePoint:
    """What heads of one size reach; `before`: what they are compared with."""
    traffic = inputs.traffic
    each = [_speed([head], traffic, inputs.gamma, None) for head in heads]
    return CurvePoint(
        label=label,
        units=units_of(heads) if known else None,
        tokens=_tokens_of(heads),
        heads=len(heads),
        accepted=_accepted(inputs, heads, traffic),
        spread=float(np.std(each, ddof=1)) if len(each) > 1 else None,
        domains=tuple(
            CurveDomain(domain=domain, **_reached(inputs, heads, before, traffic.alone(domain))) for domain in traffic.rows
        ),
        **_reached(inputs, heads, before, traffic),
    )


def _reached(
    inputs: CurveInputs, heads: Sequence[CurveHead], before: Sequence[CurveHead] | None, traffic: TestTraffic
) -> dict[str, Any]:
    """What heads of one size reach on a traffic, all of it or one domain."""
    counts = [_counts(heads, rows, inputs.gamma) for rows in traffic.rows.values()]
    free, times, confidence = free_draft(inputs.gamma), inputs.times, inputs.confidence
    return {
        "alpha": _alpha(heads, traffic),
        "tokens_per_round": tokens_interval(_of(traffic, counts, free), inputs.gamma, confidence),
        "speedup": speedup_interval(_of(traffic, counts, times), confidence) if times else None,
        "difference": _difference(inputs, before, heads, traffic) if before else None,
    }


def _alpha(heads: Sequence[CurveHead], traffic: TestTraffic) -> float:
    """The share of positions whose first draft is accepted."""
    sums = [
        [sum(head.totals[name][rows].sum() for head in heads) for name in ("accepted", "proposals")]
        for rows, _ in traffic.parts
    ]
    return float(sum(weight * right / max(of, 1.0) for (_, weight), (right, of) in zip(traffic.parts, sums, strict=True)))


def _accepted(inputs: CurveInputs, heads: Sequence[CurveHead], traffic: TestTraffic) -> tuple[float, ...]:
    """The share of rounds at the largest gamma that accepted at least 1, 2, ... drafts; parts count by their tokens."""
    gamma = max(inputs.gammas)
    counts = [(_counts(heads, rows, gamma), weight) for rows, weight in traffic.parts]
    counts = [(each, weight / max(each.tokens.sum(), 1.0)) for each, weight in counts]
    reached = sum(each.accepted.sum(0) * weight for each, weight in counts)
    rounds = sum(float(each.rounds.sum()) * weight for each, weight in counts)
    return tuple((np.asarray(reached) / max(rounds, 1e-12)).tolist())


def _tokens_of(heads: Sequence[CurveHead]) -> int | None:
    """Tokens that heads of one size were trained on, on average; None where one does not say."""
    known = [head.tokens for head in heads if head.tokens is not None]
    return round(sum(known) / len(known)) if len(known) == len(heads) else None


def _timing(inputs: CurveInputs) -> float:
    """How far step times alone may be off, on the log scale of the speedup of the largest size; 0 where there are none."""
    if inputs.times is None:
        return 0.0
    rows = inputs.traffic.rows.values()
    counts = [_counts(inputs.heads.sizes[-1], each, inputs.gamma) for each in rows]
    found = _of(inputs.traffic, counts, inputs.times)
    return quantile((1 + inputs.confidence) / 2, found.timing_freedom) * found.timing_error if found.timing_error else 0.0


def _of(traffic: TestTraffic, counts: Sequence[RoundCounts], times: StepTimes) -> Any:
    """The speedup of a traffic from the rounds of its domains."""
    places = list(traffic.rows)
    return traffic.mix.speedup([counts[places.index(domain)] for domain in traffic.mix.domains], times)


def _difference(
    inputs: CurveInputs, first: Sequence[CurveHead] | None, second: Sequence[CurveHead], traffic: TestTraffic
) -> Interval | None:
    """Tokens per round of the second heads less those of the first, paired by unit."""
    free, weights = free_draft(inputs.gamma), [weight for _, weight in traffic.parts]
    counts = [[_counts(heads, rows, inputs.gamma) for rows, _ in traffic.parts] for heads in (first or (), second)]
    if any(part.tokens.sum() == 0 for part in counts[1]):
        return None
    one, two = ([spent_and_base(part, free) for part in side] for side in counts)
    units = [present(part.cluster) for part in counts[1]]
    return weighted_inverse_difference(one, two, units, weights, inputs.confidence, inputs.gamma)[2]


def _curves(inputs: CurveInputs) -> tuple[list[tuple[int, list[Measured]]], list[tuple[int, list[Measured]]]]:
    """Miss rates of every head by size: of tokens per round, and of first drafts."""
    rounds, firsts = list[tuple[int, list[Measured]]](), list[tuple[int, list[Measured]]]()
    for same in inputs.heads.sizes:
        rounds.append((units_of(same), [_measured_rounds(inputs, head) for head in same]))
        firsts.append((units_of(same), [_measured_firsts(inputs, head) for head in same]))
    return rounds, firsts


def _measured_rounds(inputs: CurveInputs, head: CurveHead) -> Measured:
    """Tokens per round of a head on the traffic, as a miss rate."""
    gamma, free = inputs.gamma, free_draft(inputs.gamma)
    parts = [(_counts([head], rows, gamma), weight) for rows, weight in inputs.traffic.parts]
    share, errors = _weighted_ratio(
        inputs, [(*spent_and_base(counts, free), counts.cluster, weight) for counts, weight in parts]
    )
    return measured_tokens(1 / share, -errors / share**2, gamma)


def _measured_firsts(inputs: CurveInputs, head: CurveHead) -> Measured:
    """The share of positions whose first draft is wrong."""
    parts = list[tuple[Array, Array, Array, float]]()
    for rows, weight in inputs.traffic.parts:
        cluster, starts = inputs.traffic.cluster[rows], head.totals["proposals"][rows]
        wrong, places = by_cluster(cluster, starts - head.totals["accepted"][rows], starts)
        parts.append((wrong, places, cluster, weight))
    return Measured(*_weighted_ratio(inputs, parts))


def _weighted_ratio(inputs: CurveInputs, parts: Sequence[tuple[Array, Array, Array, float]]) -> tuple[float, Array]:
    """sum(w sum(totals) / sum(counts)), and what each unit of the test part contributes to its error. `parts`: totals and
    counts [units of the part], the cluster of its rows, and its weight.
    """
    places = np.unique(np.concatenate([rows for rows, _ in inputs.traffic.parts]))
    units = present(np.sort(inputs.traffic.cluster[places]))
    value, errors = 0.0, np.zeros(len(units))
    for totals, counts, cluster, weight in parts:
        value += weight * float(totals.sum() / counts.sum())
        if (counts > 0).sum() > 1:
            errors[np.searchsorted(units, present(cluster))] += weight * influences(totals, counts)
    return value, errors


def _instead(inputs: CurveInputs, beside: Sequence[CurvePoint]) -> Iterator[str]:
    """Yields what helps beside more data, as far as it was measured: a head trained further, another gamma."""
    for point in beside:
        if (more := point.difference) is not None and more.low > 0:
            yield f"the {point.label} head has {more.value:.2f} tokens per round more than the largest size"
    heads, times = inputs.heads, inputs.times
    if times is None:
        return
    speeds = {gamma: _speed(heads.sizes[-1], inputs.traffic, gamma, times) for gamma in inputs.gammas}
    best = max(speeds, key=speeds.__getitem__)
    if speeds[best] > (1 + NOTABLE) * speeds[inputs.gamma]:
        here = f"{speeds[inputs.gamma]:.2f}x at gamma {inputs.gamma}"
        yield f"gamma {best}: {speeds[best]:.2f}x with the largest size, and {here}"


def _notes(inputs: CurveInputs) -> Iterator[str]:
    """Yields what to know before believing the numbers."""
    heads = inputs.heads
    if inputs.gamma_from == "test":
        yield f"gamma {inputs.gamma} was chosen on the test texts themselves, so the largest size looks better than it is"
    if inputs.times is None:
        yield f"no speedup: {inputs.basis}"
    if inputs.decision.weights is not None and inputs.traffic.weights is None:
        yield "a domain of decision.weights has no test text: domains count as the test texts have them"
    every = (*heads.every, *heads.beside.values())
    if foreign := [head.draft for head in every if head.record is None or learnt(head.record) is None]:
        yield f"nothing says what {', '.join(foreign)} was trained on, or began with: the test texts may be among it"
    if len({head.record.run.digest for head in heads.every if head.record}) > 1:
        yield "heads were trained on the texts of different runs"
    if record := next((head.record for head in heads.every if head.record), None):
        yield f"texts are split {split_words(record)}"
