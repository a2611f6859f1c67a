"""The sections of a report below its first screen, in tables, lines and figures that every format draws.

`SECTIONS`, at the end, lists them in their order: each with what it is called, what it shows, and why it may be empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from alphaprof.costs.cost_model import MEASURED, TIMED, Cost
from alphaprof.errors import OptionInvalid, shown
from alphaprof.render import wording
from alphaprof.render.blocks import Block, Figure, Row, Table, table_by_columns, table_of, text_name, text_names
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import AtConcurrency, GammaResult, Result
from alphaprof.report.sections.attribution import CAUSES, Attribution
from alphaprof.report.sections.certificates import Certificate, LosslessBounds
from alphaprof.report.sections.context import ContextAxis, ContextRange
from alphaprof.report.sections.difficulty import SHORTEST, Decile, DocumentResult
from alphaprof.report.sections.hybrids import HybridCurve, HybridResult
from alphaprof.report.sections.predictability import Budget, CertainRun, Predictability
from alphaprof.report.sections.stopping import StopResult, StopSurface
from alphaprof.report.sections.vocabulary import VocabularyCoverage
from alphaprof.report.verdict import MIDDLE
from alphaprof.stats.estimate import Interval

ALL = "all"


def verdict(report: Report) -> Iterator[Block]:
    """Yield what was measured, the engine-free answer, then the verdict, which needs step times."""
    run, traffic = report.run, report.traffic
    yield f"target {run.target}   {run.dtype}   drafts {', '.join(run.drafts)}"
    yield f"text {'; '.join(run.texts) or 'none'}"
    yield f"{fmt.many(run.documents, 'document')}, {fmt.many(run.positions, 'position')}"
    if run.imported is not None:
        known = "rounds are known at the served gamma only; alpha and coverage are not known (n/a)"
        yield f"imported from per-request metrics of {run.imported}: {known}"
    yield ""
    if traffic.tokens_per_round is not None:
        yield from _engine_free(report)
        yield ""
    yield f"{traffic.verdict}  for the whole traffic, at least {traffic.min_speedup:g}x wanted"
    yield traffic.reason
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in traffic.weights.items())
    origin = "observed shares of tokens" if traffic.weights_observed else "shares of tokens from the profile"
    yield f"weights ({origin}): {shares}"
    yield from on_for(report)


def on_for(report: Report) -> Iterator[str]:
    """Yield the domains on which alone the draft is surely faster than everywhere, if there are such."""
    if (only := report.traffic.only) is not None:
        domains = ", ".join(fmt.short(item.domain) for item in report.domains if item.domain in only.domains)
        yield f"on for {domains} only: {fmt.interval(only.speedup, 'x')}"


def _engine_free(report: Report) -> Iterator[str]:
    """Yield what a round emits, and what it may cost."""
    traffic = report.traffic
    setting = f"draft {traffic.draft}, rule {traffic.rule}, gamma {traffic.gamma}"
    emits = fmt.interval(traffic.tokens_per_round)
    yield f"{fmt.sentence(any_engine(report))}, {setting}: a round emits {emits} tokens,"
    yield "and is faster if it costs less than that many plain decode steps."
    if traffic.break_even_length is not None:
        here = fmt.number(traffic.break_even_length)
        slow = " (below 1: plain decoding was slow when timed)" if traffic.break_even_length < 1 else ""
        yield f"By the step times (section times) it costs {here}{slow}."


def any_engine(report: Report) -> str:
    """Return where tokens per round hold: of a target in another dtype than the served one, not there."""
    served = report.traffic.served_dtype
    where = "" if served is None else f" that serves the target in {report.run.dtype}, not in {served}"
    return f"on any engine{where}"


FEW_MARK = "'"
MARKS = {
    "*": "* off-policy: the rule's own decoding would not emit this text",
    "~": "~ lossy: measured per step on the target's text; the rule's own text is not measured",
    FEW_MARK: f"{FEW_MARK} fewer than {wording.FEW} drafts",
}


def judged(report: Report) -> Iterator[tuple[str, list[Result]]]:
    """Yield the results of each draft and rule that the verdict concerns, with the title that they share."""
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft and result.verdict is not None]
        for rule in dict.fromkeys(result.rule for result in mine):
            yield f"draft {draft}, rule {rule}", [result for result in mine if result.rule == rule]


def drafts(report: Report) -> Iterator[Block]:
    """Yield the results of every draft by domain, and of drafts with a reduced vocabulary how much of a text they have."""
    yield Figure("acceptance")
    for title, results in judged(report):
        every = [result for result in report.results if result.draft == results[0].draft]
        yield _by_domain(title, results, every, wording.alpha_name(report.run, results[0].draft))
    coverage: dict[str, Callable[[VocabularyCoverage], str]] = {
        "docs": lambda item: str(item.documents),
        "can propose": lambda item: fmt.share_with_interval(item.proposable),
    }
    note = "  share of tokens in the draft's vocabulary: the ceiling for any rule that preserves the text"
    for draft in report.run.drafts:
        items = [item for item in report.vocabulary if item.draft == draft]
        yield from table_of(f"draft {draft}: coverage of its vocabulary", items, coverage, below=[note])


def of_best(cell: Callable[[GammaResult], str]) -> Callable[[Result], str]:
    """Return how a result is written by its best gamma, from how that is."""
    return lambda result: cell(best) if (best := at_best(result)) else fmt.NOTHING


def at_best(result: Result) -> GammaResult | None:
    """Return a result at its chosen gamma."""
    return next((item for item in result.gammas if item.gamma == result.best_gamma), None)


def formula(value: str, error: float | None) -> str:
    """Return what the textbook formula would have said, and by how much it is too high."""
    return value if error is None else f"{value} ({fmt.signed_percent(error)})"


def _by_domain(title: str, results: Sequence[Result], every: Sequence[Result], alpha: str) -> Table:
    """Return the results of a rule; `every` result of the draft tells which domains have several kinds of text. `alpha`:
    what it is called.
    """
    covered = all(result.coverage == 1 for result in results)
    columns: dict[str, Callable[[Result], str]] = {
        "docs": lambda item: fmt.documents(item.documents, item.clusters),
        "coverage": lambda item: fmt.share(item.coverage),
        alpha: lambda item: fmt.share_with_interval(item.alpha),
        "gamma": lambda item: str(item.best_gamma or fmt.NOTHING),
        "tokens/round": of_best(lambda best: fmt.interval(best.tokens_per_round)),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "verdict": lambda item: str(item.verdict),
        "break-even": of_best(lambda best: fmt.number(best.break_even_length)),
        "iid formula": of_best(
            lambda best: (
                fmt.NOTHING  # a formula without rounds
                if best.iid_error is None
                else formula(fmt.number(best.iid_tokens_per_round), best.iid_error)
            )
        ),
    }
    unneeded = {"coverage"} if covered else {"iid formula"}
    if alpha != "alpha":  # the formula takes acceptance for the same at every depth
        unneeded |= {"iid formula"}
    undecided: dict[str, list[str]] = {}
    needed = []
    for result in (result for result in results if result.verdict == "UNDECIDED"):
        if result.documents_needed is None:
            undecided.setdefault(result.reason, []).append(fmt.short(result.domain))
        else:
            likely = "" if result.documents_likely is None else f" ({fmt.count(result.documents_likely)})"
            needed.append(f"{fmt.short(result.domain)} {fmt.count(result.documents_needed)}{likely}")
    reasons = [f"  {', '.join(domains)}: {reason}" for reason, domains in undecided.items()]
    if needed:
        reasons.insert(0, f"  documents of a new run for a 50% (80%) chance of a verdict: {', '.join(needed)}")
    shown = {name: cell for name, cell in columns.items() if name not in unneeded}
    (table,) = table_of(f"{title}: by domain", results, shown, among=every, left=("verdict",), below=reasons)
    return table


def gammas(report: Report) -> Iterator[Block]:
    """Yield tokens per round and speedup at every gamma, and acceptance by depth if depths differ, under every rule that
    has rounds of its own.
    """
    yield Figure("gammas")
    yield from _traffic_by_gamma(report)
    yield Figure("depths")
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft]
        by_depth = report.run.draft_models[draft].by_depth or report.run.imported is not None
        decisive = [result for result in mine if result.verdict is not None]
        known = {result.gammas for result in decisive}  # rules can coincide (prompt lookup)
        others = [result for result in mine if result.verdict is None]
        new = {result.rule for result in others if result.gammas and result.gammas not in known}
        for same in (decisive, [result for result in others if result.rule in new]):
            for rule in dict.fromkeys(result.rule for result in same):
                results = [result for result in same if result.rule == rule]
                yield from _by_gamma(f"draft {draft}, rule {rule}", results)
                if by_depth:
                    yield from _depths(f"draft {draft}, rule {rule}", results)
    for surface in report.stopping:
        yield _stop_table(surface, report.conditions.p_min)
    yield from map(_hybrid_table, report.hybrids)


def _traffic_by_gamma(report: Report) -> Iterator[Block]:
    """Yield the whole traffic at every gamma, a row a draft, and the gammas that are about as fast as the chosen one."""
    rows = [
        (
            str(answer.draft),
            {
                str(item.gamma): fmt.number(item.tokens_per_round)
                if item.speedup is None
                else f"{fmt.interval(item.speedup)}{'*' if item.gamma == answer.gamma else ''}"
                for item in answer.by_gamma
            },
        )
        for answer in report.drafts
        if answer.by_gamma
    ]
    if not rows:
        return
    timed = any(item.speedup for answer in report.drafts for item in answer.by_gamma)
    what = f"speedup [{fmt.level(report.confidence)} each]" if timed else "tokens per round"
    below = ["  *: the best gamma, as it was judged; others: all documents"] if timed else []
    if len(alike := report.traffic.alike) > 1:
        below.append(f"  {report.traffic.draft}, gamma {alike[0]} to {alike[-1]}: no clear difference")
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
            "  *: the best p_min by the lower of both",
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
    return "" if fastest is None else low if low == high else f"{low} - {high}"


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
    timed = first[0].break_even_length is not None
    rows = [
        (name, {str(item.gamma): _length(item) for item in result.gammas})
        for name, result in zip(text_names(shown, results), shown, strict=True)
    ]
    costs = [
        ("full round costs", {str(item.gamma): fmt.number(item.full_round_cost) for item in first}),
        ("v = T(g+1)/T(1)", {str(item.gamma): fmt.number(item.verify_cost) for item in first}),
    ]
    what = "tokens per round / speedup" if timed else "tokens per round"
    basis = " (all documents; the best gamma as judged)" if timed else ""
    yield table_by_columns(f"{title}: {what} by gamma{basis}", rows, footer=costs if timed else (), draft=shown[0].draft)


def _length(item: GammaResult) -> str:
    tokens = fmt.number(item.tokens_per_round.value if item.tokens_per_round else None)
    return tokens if item.speedup is None else f"{tokens} / {fmt.number(item.speedup.value)}"


def _depths(title: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yield acceptance by depth at the largest gamma: of drafts that were reached, and of all rounds with a proposal."""
    shown = [result for result in results if result.gammas and None not in result.gammas[-1].reached]
    if not shown:
        return
    rows: list[Row] = []
    for name, result in zip(text_names(shown, results), shown, strict=True):
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            mark = FEW_MARK if one is not None and (reached or 0) < wording.FEW else ""
            cells[str(depth)] = f"{fmt.share(one)}{mark} / {fmt.share(first)}"
        rows.append((name, cells))
    gamma = max(item.gamma for item in shown[0].gammas)
    what = f"at gamma {gamma}, shares by depth d: reached drafts kept / rounds that kept the first d"
    few = any(FEW_MARK in cell for _, cells in rows for cell in cells.values())
    below = [f"  {MARKS[FEW_MARK]}"] if few else []
    yield table_by_columns(f"{title}, {what}", rows, below=below, draft=shown[0].draft)


def rules(report: Report) -> Iterator[Block]:
    """Yield alpha of the rules that the verdict does not concern, a column a rule, then alpha by span."""
    for draft in report.run.drafts:
        mine = [result for result in report.results if result.draft == draft and result.verdict is None]
        if not mine:
            continue
        rows = [
            (name, {item.rule: fmt.share_with_interval(item.alpha).replace(" [", f"{_mark(item)}\n[") for item in same})
            for name, same in wording.by_text(mine).items()
        ]
        marks = {_mark(result) for result in mine}
        title = f"draft {draft}: {wording.alpha_name(report.run, draft)} under other rules"
        below = [f"  {words}" for sign, words in MARKS.items() if sign in marks]
        yield table_by_columns(title, rows, below=below, draft=draft)
    for draft in report.run.drafts:
        yield from _span_table(report, draft)


def _mark(result: Result) -> str:
    """Return the mark of an alpha, as wide if there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _span_table(report: Report, draft: str) -> Iterator[Table]:
    """Yield alpha in spans of each name and their share of the positions, if the profile tells them apart."""
    shown = [result for result in report.results if result.draft == draft and result.spans]
    names = list(dict.fromkeys(name for result in shown for name in result.spans))
    columns: dict[str, Callable[[Result], str]] = {"rule": lambda item: item.rule + _mark(item)}
    columns |= {name: partial(_alpha_of_span, name=name) for name in names}
    columns |= {f"share of\n{name}": partial(_share_of_span, name=name) for name in names}
    title = f"draft {draft}: {wording.alpha_name(report.run, draft)} by span"
    yield from table_of(title, shown, columns, among=(), left=("rule",))


def _alpha_of_span(result: Result, name: str) -> str:
    return fmt.share_with_interval(result.spans[name].alpha) if name in result.spans else ""


def _share_of_span(result: Result, name: str) -> str:
    return fmt.percent(result.spans[name].positions / result.positions) if name in result.spans else ""


def causes(report: Report) -> Iterator[Block]:
    """Yield what each draft loses: a row a domain, a column a cause, and the remedy of each domain's largest cause."""
    for title, results in judged(report):
        key = (results[0].draft, results[0].rule)
        items = [item for item in report.causes if (item.draft, item.rule) == key]
        names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
        columns: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.share_with_interval(item.lost)}
        if any(item.ceiling is not None for item in items):
            columns["alpha\nat most"] = lambda item: fmt.share(item.ceiling)
        columns |= {name.replace(" ", "\n", 1): partial(_share_of, name=name) for name in names}
        largest = [max(item.causes, key=lambda cause: cause.share.value) for item in items if item.causes]
        below = list(dict.fromkeys(f"  {cause.name}: {cause.remedy}" for cause in largest))
        yield from table_of(f"{title}: share of positions lost, by cause", items, columns, below=below)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.share_with_interval(cause.share) for cause in item.causes if cause.name == name), "")


def load(report: Report) -> Iterator[Block]:
    """Yield the best speedup at every concurrency, and up to which of them the draft pays."""
    traffic = report.traffic
    if traffic.load:
        each = ", ".join(f"{item.concurrency}: {best_at(item)}" for item in traffic.load)
        last = pays(traffic.pays_up_to, [item.concurrency for item in traffic.load])
        limit = {"none": "none of these", "all": "all of these"}.get(last, f"up to {last}")
        yield f"the whole traffic, draft {traffic.draft}, by sequences decoded at a time (best gamma): {each}"
        yield f"by the lower bound {traffic.min_speedup:g}x is reached at {limit}"
        if report.times is not None:
            yield _charged(report.times)
        yield ""
    for title, results in judged(report):
        shown = [result for result in results if result.load]
        known = list(dict.fromkeys(item.concurrency for result in shown for item in result.load))
        rows = []
        for name, result in zip(text_names(shown, results), shown, strict=True):
            cells = dict.fromkeys(map(str, known), fmt.NOTHING)
            cells |= {str(item.concurrency): best_at(item) for item in result.load}
            rows.append((name, cells | {"pays up to": pays(result.pays_up_to, known)}))
        if rows:
            columns = (*map(str, known), "pays up to")
            what = "speedup (gamma) as judged, by sequences decoded at a time"
            yield Table(f"{title}: {what}", columns, rows, draft=shown[0].draft)


def best_at(item: AtConcurrency) -> str:
    """Return the best gamma's speedup, and that gamma."""
    return fmt.NOTHING if item.speedup is None else f"{fmt.interval(item.speedup, 'x')} ({item.best_gamma})"


def pays(last: int | None, known: Sequence[int]) -> str:
    """Up to which concurrency it pays; if that is the largest that there are times for, no limit was seen."""
    if last is None:
        return "none"
    return "all" if last == known[-1] else str(last)


def context(report: Report) -> Iterator[Block]:
    """Yield acceptance and speedup by length of context, and whether they fall as a text grows."""
    yield Figure("context")
    columns: dict[str, Callable[[ContextRange], str]] = {
        "docs": lambda item: str(item.documents),
        "alpha": lambda item: fmt.share_with_interval(item.alpha),
        "tokens/round": lambda item: fmt.interval(item.tokens_per_round),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "gamma by load": lambda item: ", ".join(f"{best.concurrency}: {best.gamma}" for best in item.best),
    }
    for axis in report.context:
        rows = [(_tokens_of(item), {name: cell(item) for name, cell in columns.items()}) for item in axis.ranges]
        shown = [name for name in columns if any(cells[name] not in ("", fmt.NOTHING) for _, cells in rows)]
        what = "speedup: the row's best, chosen on the same documents"
        title = f"draft {axis.draft}, gamma {axis.gamma} ({what}), by tokens of context"
        timed_at = report.times.contexts if report.times is not None else ()
        below = [f"  {line}" for line in _context_lines(axis, max(timed_at, default=None))]
        yield Table(title, shown, rows, named="context", below=below, draft=axis.draft)


def _tokens_of(item: ContextRange) -> str:
    return f"from {fmt.count(item.low)}" if item.low else f"below {fmt.count(item.high or 0)}"


def _context_lines(axis: ContextAxis, longest: int | None) -> Iterator[str]:
    """Yield what a longer context does within documents, and from where on no γ pays. `longest`: context that was timed."""
    if any(best.gamma == 0 for item in axis.ranges for best in item.best):
        yield "gamma by load: the best gamma at each number of sequences; 0: none beats plain decoding"
    if axis.drift is not None:
        low, high = (fmt.signed_percent(value) for value in (axis.drift.low, axis.drift.high))
        said = "acceptance decays" if axis.decays else "acceptance grows" if axis.drift.high < 0 else "no decay is shown"
        change = f"{fmt.signed_percent(axis.drift.value)} [{low}, {high}] rounds per token with each doubling of the context"
        yield f"within documents {said}: {change}"
    if (where := axis.pays_below) is not None:
        begins, low = fmt.count(int(where.value)), fmt.count(int(where.low))
        high = "longer than all of these" if math.isinf(where.high) else fmt.count(int(where.high))
        yield f"no gamma pays past {begins} tokens [{low}, {high}]" if where.value else "no gamma pays at any length"
    elif any(item.speedup for item in axis.ranges):
        yield "some gamma pays at every length seen"
    if longest is not None and axis.ranges[-1].context > 2 * longest:
        yield f"step times at up to {fmt.count(longest)} tokens of context stand in for longer contexts"


def requests(report: Report) -> Iterator[Block]:
    """Yield what requests and single documents see of a speedup, at the gamma of section drafts."""
    columns = {
        "gamma": lambda best: str(best.gamma),
        "speedup": lambda best: fmt.number(best.speedup and best.speedup.value, unit="x"),
        "whole requests": lambda best: fmt.number(best.request_speedup and best.request_speedup.value, unit="x"),
        "documents p10 / p50 / p90": lambda best: " / ".join(
            fmt.number(value) for value in (best.of_documents.p10, best.of_documents.p50, best.of_documents.p90)
        ),
        "slower": lambda best: fmt.percent(best.of_documents.slower),
    }
    for title, results in judged(report):
        shown = [result for result in results if (best := at_best(result)) and best.of_documents]
        cells = {name: of_best(cell) for name, cell in columns.items()}
        yield from table_of(f"{title}: requests and single documents", shown, cells, among=results)


def certificates(report: Report) -> Iterator[Block]:
    """Yield what thresholds say about each draft."""
    if report.certificates is None:
        return
    infinite, nothing = without_mean_divergence(report), wording.uncertified(report)
    for draft in dict.fromkeys(item.draft for item in report.certificates.certificates):
        if draft in infinite:
            yield f"draft {infinite[draft]}"
            yield ""
        if draft not in nothing:
            mine = [item for item in report.certificates.certificates if item.draft == draft]
            yield from _certified_positions(draft, mine, averaged=draft not in infinite)
        yield from _lossless_table(
            draft, [item for item in report.certificates.lossless if item.draft == draft], draft in infinite
        )
    if report.certificates.inexact:
        part = fmt.percent(report.certificates.inexact)
        yield f"At {part} of positions a rule accepts more tokens than logged: its threshold is a lower bound."
    if report.certificates.unknown:
        yield f"No certificate is known for {', '.join(report.certificates.unknown)}, so no draft has a threshold."


def without_mean_divergence(report: Report) -> dict[str, str]:
    """Say of drafts whose mean KL(p||q) is infinite throughout what stands in its place."""
    said: dict[str, str] = {}
    if report.certificates is None:
        return said
    for draft, facts in report.run.draft_models.items():
        mine = [item for item in report.certificates.certificates if item.draft == draft]
        if facts.reduced_vocabulary and mine and all(math.isinf(item.mean_divergence) for item in mine):
            bounds = [item for item in report.certificates.lossless if item.draft == draft]
            each = (f"{text_name(item, bounds, not item.on_policy)} {fmt.share(1 - item.beta.value)}" for item in bounds)
            said[draft] = (
                f"{draft} cannot propose some tokens that the target can emit: KL(p||q) is infinite at such positions and "
                f"on average. Mean total variation, 1 - overlap: {', '.join(each)}"
            )
    return said


def _certified_positions(draft: str, mine: Sequence[Certificate], averaged: bool) -> Iterator[Block]:
    """Yield what is certain of a draft. `averaged`: whether its divergence has a mean."""
    texts: dict[tuple[str, str, str, bool], list[Certificate]] = {}
    for item in mine:
        texts.setdefault((item.domain, item.continuation, str(item.sampling), item.on_policy), []).append(item)
    names = text_names([same[0] for same in texts.values()], mine)
    certified, rejected = (
        [(name, {item.rule: cell(item) for item in same}) for name, same in zip(names, texts.values(), strict=True)]
        for cell in (_certified, _rejected)
    )
    yield table_by_columns(f"draft {draft}: certified of accepted, by domain", certified, draft=draft)
    if averaged:
        title = f"draft {draft}: share rejected, and its limit at this mean KL(p||q)"
        yield table_by_columns(title, rejected, draft=draft)
    certain = sum(round(item.certified.value * item.positions) for item in mine)
    wrong = sum(item.contradicted for item in mine)
    yield f"  certified but rejected: {fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
    yield ""


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _rejected(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _lossless_table(draft: str, bounds: Sequence[LosslessBounds], cut: bool) -> Iterator[Table]:
    """Yield beta and its bounds, by domain; of a draft whose vocabulary is `cut` no infinite means."""
    columns: dict[str, Callable[[LosslessBounds], str]] = {
        "beta": lambda item: fmt.share_with_interval(item.beta),
        "bound": lambda item: fmt.share_with_interval(item.sharp),
        "mean of the\nsmaller KL": lambda item: fmt.number(item.mean_divergence),
        "bound from\nthe mean": lambda item: fmt.share(item.from_mean),
    }
    if cut and all(math.isinf(item.mean_divergence) for item in bounds):
        columns = dict(list(columns.items())[:2])
    title = f"draft {draft}: lossless acceptance, and its bound from the smaller KL at each position"
    note = "  for text that was not sampled: beta at temperature 1; lossless sampling would not write this text"
    yield from table_of(title, bounds, columns, below=[note] if any(item.sampling is None for item in bounds) else [])


def difficulty(report: Report) -> Iterator[Block]:
    """Yield acceptance by tenths of the target's margin, then of its entropy: of rules with certificates that say something
    what was certified of it, of the verdict's other rules the acceptance alone.
    """
    nothing = wording.uncertified(report)
    known = report.certificates.certificates if report.certificates else ()
    certain = {(item.draft, item.rule) for item in known if item.draft not in nothing}
    decisive = {(result.draft, result.rule) for result in report.results if result.verdict is not None}
    for draft in report.run.drafts:
        mine = [item for item in report.difficulty if item.draft == draft]
        both = [item for item in mine if (draft, item.rule) in certain]
        yield from _tenth_tables(f"draft {draft}: certified of accepted", both, _certified)
        rest = [item for item in mine if (draft, item.rule) in decisive - certain]
        yield from _tenth_tables(f"draft {draft}: accepted", rest, lambda item: fmt.share_with_interval(item.accepted))


def _tenth_tables(what: str, items: Sequence[Decile], cell: Callable[[Decile], str]) -> Iterator[Table]:
    """Yield a table for each axis and kind of text."""
    for axis in dict.fromkeys(item.axis for item in items):
        for kind, same in wording.by_kind([item for item in items if item.axis == axis]).items():
            rows: dict[tuple[float | None, float | None], tuple[str, dict[str, str]]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), (_range(item), {}))[1][item.rule] = cell(item)
            unit = ", nats" if axis == "entropy" else ""
            title = f"{what}, by tenths of the target's {axis}{unit}{kind}"
            yield table_by_columns(title, list(rows.values()), named=axis, draft=same[0].draft)


def _range(item: Decile) -> str:
    """Return a tenth by where it begins: the next one begins where it ends."""
    edge = item.high if item.low is None else item.low
    if edge is None:
        return "all"
    value = fmt.share(edge) if item.axis == "margin" else fmt.number(edge, 3)
    return f"{'below' if item.low is None else 'from'} {value}"


def predictability(report: Report) -> Iterator[Block]:
    """Yield entropy, margin and the free draft by text, then KL budgets and what is certain of any draft."""
    texts = report.predictability
    if not texts:
        return
    columns: dict[str, Callable[[Predictability], str]] = {
        "docs": lambda item: str(item.documents),
        "entropy,\nnats": lambda item: _spread_cell(item.entropy),
        "margin": lambda item: _spread_cell(item.margin),
        "mean top\nprobability": lambda item: fmt.share_with_interval(item.top_prob),
    }
    if any(item.free for item in texts):
        columns |= {
            "free draft:\nalpha": lambda item: fmt.share_with_interval(item.free[0].alpha if item.free else None),
            "coverage": lambda item: fmt.share(item.free[0].coverage if item.free else None),
            "tokens/round": lambda item: fmt.interval(item.free[0].tokens_per_round if item.free else None),
        }
    title = "the target alone: how predictable it is (median, and 10th to 90th percentile)"
    yield from table_of(title, texts, columns)
    names = text_names(texts, texts)
    budgets = [{budget.rule: _budget(budget) for budget in item.budgets} for item in texts]
    title = "KL budget, nats: largest KL with 50%, 90% and 99% of positions certain"
    yield table_by_columns(title, list(zip(names, budgets, strict=True)))
    runs = [{f"KL <= {run.epsilon:g}": _certain_cell(run) for run in item.runs if run.rule == "strict"} for item in texts]
    title = f"rule strict, gamma {texts[0].runs[0].gamma}: what is certain for any draft with at most this KL(p||q)"
    yield table_by_columns(title, list(zip(names, runs, strict=True)))
    yield "for any such draft: share of certain positions, mean run of certain tokens, and least tokens per round."


def _budget(item: Budget) -> str:
    return "\n".join(fmt.interval(value, digits=3) for value in (item.half, item.ninety, item.ninety_nine))


def _certain_cell(run: CertainRun) -> str:
    """Return what is certain under a rule, for any draft with a bounded divergence."""
    lines = [fmt.share_with_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "\n".join(lines + ([f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


def _spread_cell(values: Sequence[Interval]) -> str:
    """Return a median with its interval, and how far the values spread."""
    low, middle, high = values
    return f"{fmt.interval(middle)}\n{fmt.number(low.value)} to {fmt.number(high.value)}"


def times(report: Report) -> Iterator[Block]:
    """Yield where step times come from, and what they are."""
    cost, average = report.times, report.run.mean_context
    if cost is None:
        return
    yield f"step times: {', '.join(_origin(cost))}"
    if cost.contexts:
        documents = "" if average is None else f"; documents: {average:.0f} on average"
        yield f"timed at {', '.join(map(str, cost.contexts))} tokens of context{documents}"
    if cost.concurrency > 1 or cost.padded:
        yield _charged(cost)
    yield ""
    steps = {
        f"target, {fmt.many(tokens, 'token')}": (("target", "decode" if tokens == 1 else "verify", tokens), ms)
        for tokens, ms in cost.target_ms.items()
    }
    for draft, first in cost.draft_first_ms.items():
        for tokens, ms in first.items():
            steps[f"{draft}, first step, {fmt.many(tokens, 'token')} verified"] = (draft, "draft_first", tokens), ms
    for what, step, tokens, by_draft in (
        ("a step", "draft", 1, cost.draft_ms),
        ("first step after a full round", "draft", 2, cost.draft_after_full_ms),
        ("a search, once a round", "lookup", 1, cost.lookup_ms),
        ("bookkeeping, once a round", "bookkeeping", 1, cost.bookkeeping_ms),
    ):
        steps |= {f"{draft}, {what}": ((draft, step, tokens), ms) for draft, ms in by_draft.items() if ms > 0}
    spreads = {(each.model, each.step, each.tokens): each for each in cost.spread}
    rows = []
    for name, (key, ms) in steps.items():
        row = {"ms": fmt.number(ms, 3), "of T(1)": fmt.number(ms / cost.target_ms[1], 3) if 1 in cost.target_ms else ""}
        if spread := spreads.get(key):
            row |= {"mean": fmt.number(spread.mean_ms, 3), "10%": fmt.number(spread.p10_ms, 3)}
            row |= {"90%": fmt.number(spread.p90_ms, 3)}
        rows.append((name, row))
    columns = ("ms", "of T(1)", *(("mean", "10%", "90%") if spreads else ()))
    taken = f", medians of {fmt.many(cost.rounds, 'round')}" if cost.rounds else ""
    yield Table(f"step times at {cost.context:.0f} tokens of context{taken}", columns, rows, named="step")
    for item in cost.memory:
        weights = f"{item.weight_bytes / 1e9:.2f} GB of weights" if item.weight_bytes else "no weights of its own"
        cache = f"{item.kv_bytes_per_token / 1e3:.1f} kB of cache a token"
        line = f"{item.draft}: {weights}, {cache} ({fmt.percent(item.kv_share)} of target and draft together)"
        if item.lost_share is not None:
            line += f"; it cuts the context that fits in memory by {fmt.percent(item.lost_share)}"
        yield line


def _charged(cost: Cost) -> str:
    if cost.padded:
        return "verification: gamma + 1 tokens of every sequence, whatever it drafts"
    return "verification: one step for the tokens of all sequences in the batch, which draft independently"


def _origin(cost: Cost) -> Iterator[str]:
    if cost.source in TIMED:
        threads = f", {fmt.many(cost.threads, 'thread')}" if cost.threads else ""
        mode = f", {cost.mode}" if cost.mode and cost.source == MEASURED else ""
        yield f"measured with {cost.engine} on {cost.device}{threads}{mode}"
    elif cost.source == "table":
        yield f"from the table {cost.device}"
    else:
        yield f"computed by a roofline for {cost.device}, not measured: {cost.accuracy}"
    yield f"{cost.dtype}, batch {cost.concurrency}"
    if cost.overhead_ms:
        yield f"{fmt.number(cost.overhead_ms)} ms of overhead in every target step"


def wiring(report: Report) -> Iterator[Block]:
    """Yield how each head's files were read."""
    for draft, facts in report.run.draft_models.items():
        if lines := list(wording.wiring_lines(facts)):
            yield f"draft {draft}: how its files were read"
            yield from (f"  {line}" for line in lines)
            yield ""


def documents(report: Report) -> Iterator[Block]:
    """Yield the documents that each draft serves worst and best, the slowest first."""
    columns: Mapping[str, Callable[[DocumentResult], str]] = {
        "document": lambda item: str(item.document),
        "source": lambda item: str(item.source),
        "row": lambda item: str(item.source_row),
        "tokens": lambda item: fmt.count(item.tokens),
        "gamma": lambda item: str(item.gamma),
        "alpha": lambda item: fmt.share(item.alpha),
        "tokens/round": lambda item: fmt.number(item.tokens_per_round),
        "speedup": lambda item: fmt.number(item.speedup, unit="x"),
    }
    for draft, rule in dict.fromkeys((item.draft, item.rule) for item in report.documents):
        mine = [item for item in report.documents if (item.draft, item.rule) == (draft, rule)]
        rows = [(fmt.short(item.domain), {name: cell(item) for name, cell in columns.items()}) for item in mine]
        title = f"draft {draft}, rule {rule}: worst and best documents, the slowest first"
        yield Table(title, tuple(columns), rows, below=[f"  sources: {_source_files(report, mine)}"], draft=draft)


def _source_files(report: Report, documents: Sequence[DocumentResult]) -> str:
    """Name the files of the sources that documents came from."""
    paths = [str(source["path"]).rstrip("/") for source in report.run.profile.get("data", [])]
    known = {item.source for item in documents}
    return ", ".join(
        f"{number} {fmt.short(path.rsplit('/', 1)[-1])}" for number, path in enumerate(paths) if number in known
    )


def notes(report: Report) -> Iterator[Block]:
    """Yield what is to know, and what to do about it."""
    for note in report.notes:
        yield f"note: {note.message}"
        yield f"      {note.remedy}"


@cache
def glossary() -> dict[str, Any]:
    """Return the words of the glossary by key, each with its `name` and `meaning`."""
    return dict(json.loads((files("alphaprof.render.html") / "glossary.json").read_text(encoding="utf-8")))


def legend(report: Report) -> Iterator[Block]:
    """Yield the glossary, a line per word."""
    yield from (f"{word['name']}: {word['meaning']}" for word in glossary().values())


@dataclass(frozen=True)
class Section:
    """A part of a report: `blocks` yields what it shows, and no more than figures if a text has nothing to show."""

    name: str  # as in --show
    title: str
    blocks: Callable[[Report], Iterator[Block]]
    empty: str = ""  # what is said if there are no blocks

    def is_empty(self, report: Report) -> bool:
        """Return whether the section has nothing to show."""
        return all(isinstance(block, Figure) for block in self.blocks(report))

    def written(self, report: Report) -> list[Block]:
        """Return the section's blocks, or a line that says why there are none."""
        imported = report.run.imported
        why = f"the run was imported from {imported}, whose metrics hold rounds but no tokens" if imported else self.empty
        return [f"nothing to show: {why}"] if self.is_empty(report) else list(self.blocks(report))


SECTIONS = (
    Section("verdict", "does it pay on the whole traffic, and why", verdict),
    Section("drafts", "every draft by domain, at its best gamma", drafts, "no document is complete yet"),
    Section("gammas", "tokens per round and speedup at every gamma", gammas, "no text has rounds"),
    Section(
        "rules",
        "acceptance under other rules, and by span",
        rules,
        "the run has only the verdict's rules: add one with report --rules additive:0.2 (see alphaprof rules)",
    ),
    Section(
        "causes",
        "why drafted tokens are rejected, and what would help",
        causes,
        "it needs the position log (positions/), and text under a rule of the verdict",
    ),
    Section(
        "load",
        "speedup by sequences decoded at a time",
        load,
        "it needs step times of several concurrencies: set costs.concurrency, or give a table of your engine's",
    ),
    Section(
        "context",
        "acceptance and speedup by length of context",
        context,
        "it needs the position log, greedy or one_hot rounds, and two context ranges of 20 documents",
    ),
    Section(
        "requests",
        "whole requests with their prefill, and single documents",
        requests,
        "it needs step times, and a chosen gamma (see --show drafts)",
    ),
    Section(
        "certificates",
        "acceptance that divergences guarantee",
        certificates,
        "it needs a position log with thresholds (certificates: true), and a draft with a distribution",
    ),
    Section(
        "predictability",
        "what the target alone says: how predictable the texts are",
        predictability,
        "it needs the position log, and for a draft model its thresholds (certificates: true)",
    ),
    Section(
        "difficulty",
        "acceptance by the target's certainty",
        difficulty,
        "it needs the position log, and text under a rule of the verdict or one with certificates",
    ),
    Section("times", "step times, and where they come from", times, "the run has no step times (see --show notes)"),
    Section("wiring", "how the files of draft heads were read", wiring, "the run has no draft head"),
    Section(
        "documents",
        "the documents that a draft serves worst and best",
        documents,
        f"it needs a chosen gamma (see --show drafts), and documents of at least {SHORTEST} tokens",
    ),
    Section("notes", "what to know before trusting the numbers", notes, "this run has no notes"),
    Section("legend", "what the columns, words and marks mean", legend),
)
NAMES = tuple(section.name for section in SECTIONS)


def known_sections(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as they are. Raises `OptionInvalid` for one that no section has."""
    for name in names:
        if name not in (*NAMES, ALL):
            raise OptionInvalid(f"--show: a report has no section {shown(name)}", f"choose from {', '.join(NAMES)}, {ALL}")
    return tuple(names)


def chosen(names: Sequence[str], report: Report) -> list[Section]:
    """Return the sections of these names in the order of the table; of `all` those that are not empty."""
    return [section for section in SECTIONS if section.name in names or (ALL in names and not section.is_empty(report))]
