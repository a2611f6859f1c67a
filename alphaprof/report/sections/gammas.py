"""Tokens per round and speedup at every gamma, at every p_min and min_match, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Figure, Row, Table, table_by_columns, text_names
from alphaprof.report.answer import GammaResult, Result
from alphaprof.report.build import Failed, RunReport
from alphaprof.report.inputs import ReportInputs
from alphaprof.report.stopping import StopResult, StopSurface, stop_surfaces
from alphaprof.report.traffic import Tried
from alphaprof.report.verdict import MIDDLE, decoded
from alphaprof.report.wording import FEW, FEW_MARK, MARKS, timed
from alphaprof.run.manifest import Hybrid
from alphaprof.stats.estimate import Interval
from alphaprof.totals.hybrid import with_hybrids

MOST = 8  # tokens that were found, at most
TITLE = "tokens per round and speedup at every gamma"
EMPTY = "no text has rounds"


@dataclass(frozen=True)
class HybridResult:
    """A hybrid at one γ and min_match, on the whole traffic and all documents. `slowest`: the speedup if a draft model reads
    each token that prompt lookup wrote in a draft step; None: reading was timed, or there are no step times.
    """

    min_match: int  # tokens that prompt lookup must have found
    gamma: int
    tokens_per_round: float  # over all rounds
    speedup: float | None  # None: there are no step times
    slowest: float | None


@dataclass(frozen=True)
class HybridCurve:
    """What a hybrid reaches by min_match, and beside it the faster of its parts alone."""

    draft: str
    results: tuple[HybridResult, ...]  # one for each γ and min_match
    part: str | None  # the faster of its two drafts; None: not known
    part_speedup: Interval | None  # of that draft alone, as it was judged
    own_speedup: Interval | None  # of the hybrid with its own min_match, as it was judged

    @property
    def ahead(self) -> bool:
        """Whether it looks faster than both of its parts."""
        return bool(self.own_speedup and self.part_speedup and self.own_speedup.value > self.part_speedup.value)


@dataclass(frozen=True)
class Gammas:
    """What else could be chosen than γ, on the whole traffic."""

    stopping: tuple[StopSurface, ...]  # by γ and p_min, of drafts whose probabilities the log holds
    hybrids: tuple[HybridCurve, ...]  # by min_match, of drafts that are made of two others


def compute(report: RunReport) -> Gammas:
    """Return the surfaces of drafts that can stop, and the curve of each hybrid of a run."""
    inputs, curves = report.inputs, list[HybridCurve]()
    known = {item.answer.draft: item.answer.speedup for item in report.drafts}
    for draft, facts in inputs.run.manifest.drafts.items():
        if (hybrid := facts.hybrid) is None:
            continue
        longest = int(inputs.run.manifest.drafts[hybrid.first].settings["max_ngram"])
        results = [
            result for least in range(1, min(longest, MOST) + 1) for result in _curve_at(inputs, draft, hybrid, least)
        ]
        parts = {part: speed for part in (hybrid.first, hybrid.then) if (speed := known.get(part)) is not None}
        part = max(parts, key=lambda name: parts[name].value, default=None)
        curves.append(HybridCurve(draft, tuple(results), part, parts.get(part or ""), known.get(draft)))
    return Gammas(stop_surfaces(inputs, report.whole_log), tuple(curves))


def _curve_at(inputs: ReportInputs, draft: str, hybrid: Hybrid, min_match: int) -> list[HybridResult]:
    run = with_hybrids(inputs.run, {draft: replace(hybrid, min_match=min_match)})
    tried = Tried.of(replace(inputs, run=run), [draft])
    return [_result(tried, draft, min_match, gamma) for gamma in run.gammas] if tried else []


def _result(tried: Tried, draft: str, min_match: int, gamma: int) -> HybridResult:
    """Return a hybrid at one γ. A draft model whose step over two tokens has no time is bounded: it reads no token faster
    than it drafts one.
    """
    times, slowest = tried.timing.times.get(draft), None
    if times is not None and not times.draft_first and times.draft_after_full is None and times.draft.ms:
        slow = {draft: replace(times, draft_after_full=replace(times.draft, ms=2 * times.draft.ms))}
        slowest = tried.mix.value(decoded(tried.candidates, (draft, gamma), slow, tried.mix))
    rounds = tried.rounds(draft, gamma)
    faster = tried.mix.value(rounds) if rounds else None
    return HybridResult(min_match, gamma, tried.tokens_per_round(draft, gamma), faster, slowest)


def draw(report: RunReport) -> Iterator[Block]:
    """Yield tokens per round and speedup at every gamma, what an engine's metrics show there, and acceptance by depth, under
    every rule that has rounds of its own.
    """
    yield Figure("gammas")
    yield from _traffic_by_gamma(report)
    yield Figure("depths")
    under_others = report.section("rules")
    every = [*report.results, *(() if isinstance(under_others, Failed) else under_others)]
    for draft in report.run.drafts:
        mine = [result for result in every if result.draft == draft]
        decisive = [result for result in mine if result.verdict is not None]
        known = {result.gammas for result in decisive}  # rules can coincide (prompt lookup)
        others = [result for result in mine if result.verdict is None]
        new = {result.rule for result in others if result.gammas and result.gammas not in known}
        for same in (decisive, [result for result in others if result.rule in new]):
            for rule in dict.fromkeys(result.rule for result in same):
                results = [result for result in same if result.rule == rule]
                yield from _by_gamma(f"draft {draft}, rule {rule}", results)
                yield from _as_engines_count(f"draft {draft}, rule {rule}", results)
                yield from _depths(f"draft {draft}, rule {rule}", results)
    for surface in report.section("gammas").stopping:
        yield _stop_table(surface, report.conditions.p_min)
    yield from map(_hybrid_table, report.section("gammas").hybrids)


def _traffic_by_gamma(report: RunReport) -> Iterator[Block]:
    """Yield the whole traffic at every gamma, a row a draft, and the gammas that are about as fast as the chosen one."""
    rows = [
        (
            str(item.answer.draft),
            {
                str(each.gamma): fmt.number(each.tokens_per_round)
                if each.speedup is None
                else fmt.interval(each.speedup).marked("*" if each.gamma == item.answer.gamma else "", at_end=True)
                for each in item.by_gamma
            },
        )
        for item in report.drafts
        if item.by_gamma
    ]
    if not rows:
        return
    what = f"speedup [{fmt.level(report.confidence)} each]" if timed(report) else "tokens per round"
    below = ["  *: the best gamma, as it was judged; others: all documents"] if timed(report) else []
    if len(alike := report.traffic.alike) > 1:
        below.append(f"  {report.answer.draft}, gamma {alike[0]} to {alike[-1]}: no clear difference")
    yield table_by_columns(f"the whole traffic: {what} by gamma", rows, named="draft", below=below)


def _hybrid_table(curve: HybridCurve) -> Table:
    """Return tokens per round and speedup by γ and min_match, and what the better of its drafts reaches alone."""
    below = []
    if curve.part is not None:
        ahead = "ahead of" if curve.ahead else "not ahead of"
        own, alone = fmt.interval(curve.own_speedup, "x"), fmt.interval(curve.part_speedup, "x")
        below = [f"  {own}, {ahead} {curve.part} alone, {alone}"]
    what = "tokens per round / speedup by gamma and by tokens that prompt lookup must find (min_match)"
    if any(item.slowest is not None for item in curve.results):
        below += ["  from - to: the draft reads what prompt lookup wrote in a draft step a token, or at no cost (not timed)"]
    cells = [(str(item.min_match), item, _between(item.slowest, item.speedup), "") for item in curve.results]
    return _what_if_table(f"draft {curve.draft}, whole traffic: {what}", cells, "min_match", below, curve.draft)


def _stop_table(surface: StopSurface, decided: float) -> Table:
    """Return tokens per round and the ends of the speedup by γ and p_min. `decided`: the p_min of the decision."""
    below = []
    if surface.gamma is not None:
        below = ["  from - to: if rounds drafted the most, and the least, that the log allows after a wrong token"]
    if surface.gain is not None:
        gain = fmt.interval(surface.gain, "x")
        below += [
            "  *: the best p_min above 0, by the lower of both",
            f"  {gain} as fast as gamma {surface.plain_gamma} without p_min, cross-fitted ({MIDDLE})",
        ]
        if surface.gain.low > 1 and not decided:
            below.append("  set decision.p_min: auto to judge with it (llama.cpp and Hugging Face support p_min)")
    what = "tokens per round" if surface.gamma is None else "tokens per round / speedup"
    title = f"draft {surface.draft}, whole traffic: {what} by gamma, if drafts stop below top probability p_min"
    best = (surface.p_min, surface.gamma)
    cells = [
        (f"{item.p_min:g}", item, _between(item.slowest, item.fastest), "*" if (item.p_min, item.gamma) == best else "")
        for item in surface.results
    ]
    return _what_if_table(title, cells, "p_min", below, surface.draft)


def _between(slowest: float | None, fastest: float | None) -> str:
    """Return the ends of a speedup, one number where they are the same or one is not known; empty without step times."""
    low, high = (fmt.number(end) for end in (fastest if slowest is None else slowest, fastest))
    return "" if fastest is None else low if low == high else f"{low} to {high}"


def _what_if_table(
    title: str, cells: Sequence[tuple[str, HybridResult | StopResult, str, str]], named: str, below: list[str], draft: str
) -> Table:
    """Return tokens per round and speedup, by the names of rows and γ. `cells`: name, result, its speedup, and a mark."""
    rows: dict[str, dict[str, str]] = {}
    for name, item, speedup, mark in cells:
        faster = f" / {speedup}" if speedup else ""
        rows.setdefault(name, {})[str(item.gamma)] = f"{fmt.number(item.tokens_per_round)}{faster}{mark}"
    return table_by_columns(title, list(rows.items()), named=named, below=below, draft=draft)


def _by_gamma(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yield tokens per round and speedup for every gamma."""
    shown = [result for result in results if result.gammas]
    if not shown:
        return
    first = shown[0].gammas
    known = first[0].break_even_length is not None
    rows = [
        (
            name,
            {str(item.gamma): _length(item, "*" if known and item.gamma == result.gamma else "") for item in result.gammas},
        )
        for name, result in zip(text_names(shown, results), shown, strict=True)
    ]
    costs = [
        ("full round, in decode steps", {str(item.gamma): fmt.number(item.full_round_cost) for item in first}),
        ("its verification", {str(item.gamma): fmt.number(item.verify_cost) for item in first}),
    ]
    what = "tokens per round / speedup" if known else "tokens per round"
    below = (
        ["  *: the best gamma, as it was judged, on documents that did not choose it; others: all documents"]
        if known
        else []
    )
    footer = costs if known else ()
    yield table_by_columns(f"{title}: {what} by gamma", rows, footer=footer, below=below, draft=shown[0].draft)


def _as_engines_count(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yield the two numbers that engines print: the mean acceptance length, and the share of drafted tokens accepted."""
    shown = [result for result in results if any(item.acceptance_length is not None for item in result.gammas)]
    if shown:
        rows = [
            (
                name,
                {
                    str(item.gamma): f"{fmt.number(item.acceptance_length)} / {fmt.share(item.accepted_per_drafted)}"
                    for item in result.gammas
                },
            )
            for name, result in zip(text_names(shown, results), shown, strict=True)
        ]
        what = "acceptance length / accepted per drafted token by gamma, as engines count"
        below = ["  rounds without a proposal are left out, as engines do; tokens per round count them, and time does"]
        yield table_by_columns(f"{title}: {what}", rows, below=below, draft=shown[0].draft)


def _length(item: GammaResult, mark: str) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}{mark}"


def _depths(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yield acceptance by depth at the largest gamma: of drafts that were reached, and of all rounds with a proposal."""
    shown = [result for result in results if result.gammas and None not in result.gammas[-1].reached]
    if not shown:
        return
    rows: list[Row] = []
    for name, result in zip(text_names(shown, results), shown, strict=True):
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            mark = FEW_MARK if one is not None and (reached or 0) < FEW else ""
            cells[str(depth)] = f"{fmt.share(one)}{mark} / {fmt.share(first)}"
        rows.append((name, cells))
    gamma = max(item.gamma for item in shown[0].gammas)
    what = f"at gamma {gamma}, shares by depth d: reached drafts kept / rounds that kept the first d"
    few = any(FEW_MARK in cell for _, cells in rows for cell in cells.values())
    below = [f"  {MARKS[FEW_MARK]}"] if few else []
    yield table_by_columns(f"{title}, {what}", rows, below=below, draft=shown[0].draft)
