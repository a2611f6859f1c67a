"""Tokens per round and speedup at every gamma, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Figure, Row, Table, table_by_columns, text_names
from alphaprof.report.answer import GammaResult, Result
from alphaprof.report.build import Failed, RunReport
from alphaprof.report.wording import FEW, FEW_MARK, MARKS, timed

TITLE = "tokens per round and speedup at every gamma"
EMPTY = "no text has rounds"
OTHERS = "  *: the best gamma, as it was judged; others: times what all documents gain or lose by it"


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


def _traffic_by_gamma(report: RunReport) -> Iterator[Block]:
    """Yield the whole traffic at every gamma, a row a draft, and the gammas that are as good as the chosen one."""
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
    below = [OTHERS] if timed(report) else []
    if len(alike := report.traffic.alike) > 1:
        below.append(f"  {report.answer.draft}, gamma {alike[0]} to {alike[-1]}: no clear difference")
    yield table_by_columns(f"the whole traffic: {what} by gamma", rows, named="draft", below=below)


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
    below = [OTHERS] if known else []
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
    rows, few = list[Row](), False
    for name, result in zip(text_names(shown, results), shown, strict=True):
        last, cells = max(result.gammas, key=lambda item: item.gamma), {}
        for depth, (one, first, reached) in enumerate(zip(last.conditional, last.marginal, last.reached, strict=True), 1):
            of_few = one is not None and (reached or 0) < FEW
            cells[str(depth)] = f"{fmt.share(one)}{FEW_MARK if of_few else ''} / {fmt.share(first)}"
            few |= of_few
        rows.append((name, cells))
    gamma = max(item.gamma for item in shown[0].gammas)
    what = f"at gamma {gamma}, shares by depth d: reached drafts kept / rounds that kept the first d"
    yield table_by_columns(f"{title}, {what}", rows, below=[f"  {MARKS[FEW_MARK]}"] if few else [], draft=shown[0].draft)
