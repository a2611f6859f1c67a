"""What more data would bring: the forecast with its backtest, the verdict in words, and what it would cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alphaprof.commands.curve.collect import CurveHeads
from alphaprof.commands.curve.model import CurveBacktest, CurveCost, CurvePoint, ForecastRow, Reached
from alphaprof.costs.speedup import LARGEST
from alphaprof.log.manifest import DecisionAsked
from alphaprof.log.split import TEST
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Array, Interval
from alphaprof.stats.learning import (
    FACTORS,
    FEWEST_SIZES,
    LearningCurve,
    Measured,
    Scenarios,
    as_tokens,
    backtest,
    first_size,
    fits,
    scenarios,
    tokens_floor,
)

TOP_TOKEN = ("strict", "one_hot")  # rules that keep a draft only where it is the token that the target drew
NOTABLE = 0.02  # share of tokens outside the vocabulary, and of speed that another gamma adds, that are worth a word
STALLED = "heads of one size differ by more than the last step in size brought"
BySize = Sequence[tuple[int, Sequence[Measured]]]


@dataclass(frozen=True)
class Outlook:
    """What is said about more data, by the names of the report's fields."""

    floor: float | None
    outcome: str
    verdict: str
    instead: tuple[str, ...]
    backtest: CurveBacktest | None
    reason: str
    forecast: tuple[ForecastRow, ...]
    notes: tuple[str, ...]


def outlook_of(
    heads: CurveHeads,
    measured: tuple[BySize, BySize],
    points: Sequence[CurvePoint],
    parts: Sequence[tuple[Array, float]],
    timing: float,
    gamma: int,
    decision: DecisionAsked,
) -> Outlook:
    """The forecast of tokens per round and of alpha, where there is one. `measured`: miss rates of both, by size; `parts`:
    test rows of the traffic with their weights; `timing`: how far step times may be off, on the log scale.
    """
    confidence, least = decision.confidence, decision.min_speedup
    floor = _vocabulary_floor(heads, parts)
    share = max(floor or 0.0, uncertainty(heads, parts))
    reason = _why_none(heads, measured[0])
    notes = [] if floor is not None else ["draft vocabularies differ or are not known, so that no floor is assumed"]
    if reason:
        return _without(points, floor, reason, least, None, notes)
    curve = LearningCurve.of(measured[0], min(tokens_floor(share, gamma), measured[0][-1][1][0].miss))
    firsts = LearningCurve.of(measured[1], min(share, measured[1][-1][1][0].miss))
    tested = backtest(curve, confidence)
    predicted, seen = as_tokens(tested.predicted, gamma), tuple(point.label for point in points[:-1])
    now = as_tokens(Scenarios(0.0, tested.measured, tested.measured, tested.measured), gamma).value
    shown = CurveBacktest(seen, predicted, now, now / predicted.value - 1, tested.inside)
    if not tested.inside:
        reason = "the largest size fell outside what the smaller ones predict"
    elif curve.last_gain <= curve.spread:
        reason = STALLED
    elif not fits(curve):
        reason = "no curve 1 - alpha = e + A N^-b fits the measured sizes"
    if reason:
        return _without(points, floor, reason, least, shown, notes)
    cost = _cost_of_a_round(points[-1])
    rows = tuple(_rows(curve, firsts, gamma, (cost, timing), least, confidence))

    def reaches(name: Reached) -> float | None:
        """From how many units on some or all scenarios reach the least speedup."""
        if cost is None:
            return None
        side = "low" if name == "every" else "high"
        return first_size(
            curve, lambda band: getattr(_speed(as_tokens(band, gamma), cost, timing), side) >= least, confidence
        )

    outcome, verdict = _words(rows, (reaches("every"), reaches("some")), least, curve.sizes[-1])
    instead = () if rows[0].reached == "every" else tuple(_instead(points, floor, least))
    return Outlook(floor, outcome, verdict, instead, shown, "", rows, tuple(notes))


def _why_none(heads: CurveHeads, measured: BySize) -> str:
    """What stands against any forecast; empty where nothing does."""
    if len(measured) < FEWEST_SIZES:
        sizes = "there is one size only" if len(measured) == 1 else f"there are {len(measured)} sizes"
        return f"{sizes}, and a forecast that can be tested takes {FEWEST_SIZES}"
    if heads.why_not_nested:
        return f"sizes are not nested: {heads.why_not_nested}"
    if max(len(same) for _, same in measured) < 2:
        return "no size has two heads, so that nothing says how much training itself varies"
    try:
        LearningCurve.of(measured, 0.0)
    except ValueError:
        return "there are too few independent test units to know the noise"
    return ""


def _vocabulary_floor(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> float | None:
    """The share of the traffic's tokens that no head of the curve can propose; None where these share no one vocabulary."""
    records = [head.record for head in heads.every]
    if any(record is None or record.floor is None for record in records):
        return None
    if len({record.vocabulary.digest for record in records if record}) > 1:
        return None
    return records[-1].floor if _unweighted(heads, parts) and records[-1] is not None else 0.0


def uncertainty(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> float:
    """The share of test tokens that no draft can foresee, since the target draws them: of sampled text, under rules that
    keep one token alone. 0 where domains are weighted: it is known of all of them together.
    """
    run, test = heads.run, heads.part == TEST
    drawn = test & heads.documents["temperature"].is_valid().to_numpy() & np.isin(heads.rule, TOP_TOKEN)
    if not drawn.any() or not _unweighted(heads, parts):
        return 0.0
    numbers, missed = set(heads.documents["document"].to_numpy()[drawn].tolist()), 0.0
    for shard in run.shards:
        top = run.positions(heads.largest.draft, shard.index, ["document", "target_top_prob"])
        for document, probability in zip(*(top[name].to_pylist() for name in top.column_names), strict=True):
            missed += (1 - probability) * (document in numbers)
    return float(missed / heads.largest.totals["positions"][test].sum())


def _unweighted(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> bool:
    """Whether the traffic is all test documents together."""
    return len(parts[0][0]) == int((heads.part == TEST).sum())


def _cost_of_a_round(point: CurvePoint) -> float | None:
    """What a round costs in decode steps, as predicted for the largest size; None without step times."""
    if point.speedup is None or point.tokens_per_round is None:
        return None
    return point.tokens_per_round.value / point.speedup.value


def _rows(
    curve: LearningCurve,
    firsts: LearningCurve,
    gamma: int,
    costs: tuple[float | None, float],
    least: float,
    confidence: float,
) -> Iterator[ForecastRow]:
    """Yields what the measured largest size and its multiples would reach. `costs`: of a round, and how far step times may
    be off.
    """
    cost, timing = costs
    for factor in (1, *FACTORS):
        size = factor * float(curve.sizes[-1])
        tokens, first = as_tokens(scenarios(curve, size, confidence), gamma), scenarios(firsts, size, confidence)
        alpha = Interval(1 - first.value, 1 - first.high, 1 - first.low)
        speed = _speed(tokens, cost, timing) if cost else None
        reached: Reached | None = None
        if speed is not None:
            reached = "every" if speed.low >= least else "some" if speed.high >= least else "none"
        yield ForecastRow(factor, round(size), tokens, alpha, speed, reached)


def _speed(tokens: Interval, cost: float, timing: float) -> Interval:
    """The speedup of scenarios: distances by tokens per round and by step times add up as squares, on the log scale."""
    value = tokens.value / cost
    below, above = (math.hypot(math.log(far), timing) for far in (tokens.value / tokens.low, tokens.high / tokens.value))
    return Interval(value, value * math.exp(-below), value * math.exp(above) if above < LARGEST else math.inf)


def _words(
    rows: Sequence[ForecastRow], sizes: tuple[float | None, float | None], least: float, largest: float
) -> tuple[str, str]:
    """The outcome in a few words, and the verdict. `sizes`: units from which on every and some scenarios reach `least`."""
    every, some = sizes
    goal, most = f"{least:g}x", f"{FACTORS[-1]} times the data"
    if rows[0].reached is None:
        band = rows[-1].tokens_per_round
        gain = f"{fmt.number(band.low)} to {fmt.number(band.high)} tokens per round with {most}"
        return f"FORECAST: {gain}", "step times say whether that pays; there are none"
    if rows[0].reached == "every":
        return (
            f"REACHED: {goal} in every scenario with the data there is",
            "serve the largest head; more data is not needed for it",
        )
    if every is not None:
        units = f"about {_rough(every)} training units ({every / largest:.1f} times)"
        return f"MORE DATA: {units} reach {goal} in every scenario", f"collect {units}, and train again"
    if some is not None:
        units = (
            f"about {_rough(some)} training units ({some / largest:.1f} times)" if some > largest else "the data there is"
        )
        maybe = f"{goal} in some scenarios from {units} on, in every scenario with no amount up to {most}"
        return (
            f"OPEN: {maybe}",
            "collect twice the data and look again: a band narrows with every size, or do what helps more",
        )
    return f"NOT BY DATA: {goal} in no scenario up to {most}", "do not collect for this"


def _rough(units: float) -> str:
    """A number of units, rounded up to two digits: the forecast is no surer."""
    step = 10 ** max(len(str(int(units))) - 2, 0)
    return fmt.count(math.ceil(units / step) * step)


def _without(
    points: Sequence[CurvePoint],
    floor: float | None,
    reason: str,
    least: float,
    tested: CurveBacktest | None,
    notes: Sequence[str],
) -> Outlook:
    """The same where there is no forecast: what was measured stands."""
    speed, goal, instead = points[-1].speedup, f"{least:g}x", tuple(_instead(points, floor, least))
    if speed is None:
        verdict = "the measured curve alone tells, without step times in tokens per round"
    elif speed.low >= least:
        verdict, instead = f"the largest size reaches {goal} as it was measured", ()
    elif speed.high < least:
        verdict = f"the largest size does not reach {goal} as it was measured"
    else:
        verdict = f"the largest size is not told apart from {goal}: test on more units"
    if reason == STALLED:
        verdict += "; more data was not seen to help"
    return Outlook(floor, f"NO FORECAST: {reason}", verdict, instead, tested, reason, (), tuple(notes))


def _instead(points: Sequence[CurvePoint], floor: float | None, least: float) -> Iterator[str]:
    """Yields what would help beside data, as far as it was measured."""
    last = points[-1]
    fast = [domain for domain in last.domains if domain.speedup is not None and domain.speedup.low >= least]
    if fast and len(last.domains) > 1:
        yield f"other traffic: {', '.join(fmt.short(domain.domain) for domain in fast[:3])} alone reaches {least:g}x"
    if floor is not None and floor >= NOTABLE:
        yield f"the vocabulary: {fmt.percent(floor)} of test tokens lie outside it, beyond any head (--draft-vocab)"


def costs_of(heads: CurveHeads) -> tuple[CurveCost, ...]:
    """What 2 and 4 times the data would take, from the record of the largest size; nothing without one."""
    record = heads.largest.record
    if record is None or not record.size.documents:
        return ()
    parts = sum(map(len, (record.units.train, record.units.stop, record.units.test)))
    tokens = record.size.tokens * parts / max(len(record.units.train), 1)
    seconds = record.seconds
    return tuple(
        CurveCost(
            factor=factor,
            prompts=round((factor - 1) * parts),
            tokens=round((factor - 1) * tokens),
            seconds=factor * (seconds.features + seconds.training + seconds.testing),
            device=record.device,
        )
        for factor in FACTORS
    )
