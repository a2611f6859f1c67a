"""Acceptance under other rules than those of the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, table_by_columns
from alphaprof.report.answer import Result
from alphaprof.report.asked import draft_pools
from alphaprof.report.build import RunReport
from alphaprof.report.wording import MARKS, alpha_name, by_text, how_drafted

TITLE = "acceptance under other rules"
EMPTY = "the run has only the verdict's rules: add one with report --rules additive:0.2 (see alphaprof rules)"
AT_ONCE = 8  # pools in memory


def compute(report: RunReport) -> tuple[Result, ...]:
    """Return the results under the other rules, read and worked out rule by rule in the memory of one."""
    pools, found = draft_pools(report.asked, report.others), list[Result]()
    while some := list(islice(pools, AT_ONCE)):
        found += report.results_of(some)
    return tuple(found)


def draw(report: RunReport) -> Iterator[Block]:
    """Yield alpha of the rules that the verdict does not concern, a column a rule."""
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


def _mark(result: Result) -> str:
    """Return the mark of an alpha, as wide if there is none."""
    return fmt.mark(result.on_policy, result.lossy) or " "
