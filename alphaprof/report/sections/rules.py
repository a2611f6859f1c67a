"""Acceptance under other rules than those of the verdict, and by span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Table, table_by_columns, table_of
from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport
from alphaprof.report.inputs import draft_pools
from alphaprof.report.wording import MARKS, alpha_name, by_text, how_drafted

TITLE = "acceptance under other rules, and by span"
EMPTY = "the run has only the verdict's rules: add one with report --rules additive:0.2 (see alphaprof rules)"
AT_ONCE = 8  # pools in memory


def compute(report: RunReport) -> tuple[Result, ...]:
    """Return the results under the other rules, read and worked out rule by rule in the memory of one."""
    pools, found = draft_pools(report.inputs, report.others, spans=True), list[Result]()
    while some := list(islice(pools, AT_ONCE)):
        found += report.results_of(some)
    return tuple(found)


def draw(report: RunReport) -> Iterator[Block]:
    """Yield alpha of the rules that the verdict does not concern, a column a rule, then alpha by span."""
    every = [*report.results, *report.section("rules")]
    for draft in report.run.drafts:
        mine = [result for result in every if result.draft == draft and result.verdict is None]
        if not mine:
            continue
        rows = [
            (name, {item.rule: fmt.share_with_interval(item.alpha).marked(_mark(item)).stacked for item in same})
            for name, same in by_text(mine).items()
        ]
        marks = {_mark(result) for result in mine}
        title = f"draft {draft}: {alpha_name(report.run, draft)} under other rules"
        below = [f"  {words}" for sign, words in MARKS.items() if sign in marks]
        below += [f"  {words}" for words in how_drafted(report, mine)]
        yield table_by_columns(title, rows, below=below, draft=draft)
    for draft in report.run.drafts:
        yield from _span_table(report, draft, every)


def _mark(result: Result) -> str:
    """Return the mark of an alpha, as wide if there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "


def _span_table(report: RunReport, draft: str, results: Sequence[Result]) -> Iterator[Table]:
    """Yield alpha in spans of each name and their share of the positions, if the profile tells them apart."""
    shown = [result for result in results if result.draft == draft and result.spans]
    names = list(dict.fromkeys(name for result in shown for name in result.spans))
    columns: dict[str, Callable[[Result], str]] = {"rule": lambda item: item.rule + _mark(item)}
    columns |= {name: partial(_alpha_of_span, name=name) for name in names}
    columns |= {f"share of\n{name}": partial(_share_of_span, name=name) for name in names}
    title = f"draft {draft}: {alpha_name(report.run, draft)} by span"
    yield from table_of(title, shown, columns, among=(), left=("rule",))


def _alpha_of_span(result: Result, name: str) -> str:
    return fmt.share_with_interval(result.spans[name].alpha) if name in result.spans else ""


def _share_of_span(result: Result, name: str) -> str:
    return fmt.percent(result.spans[name].positions / result.positions) if name in result.spans else ""
