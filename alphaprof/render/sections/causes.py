"""Why drafted tokens are rejected, and what removing each cause could bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from alphaprof.render import wording
from alphaprof.render.sections.blocks import Block, table_of
from alphaprof.render.sections.drafts import judged
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.sections.attribution import CAUSES, Attribution, Cause


def causes(report: Report) -> Iterator[Block]:
    """Yields what each draft loses: a row a domain, a column a cause, and the remedy that could bring most."""
    for title, results in judged(report):
        key = (results[0].draft, results[0].rule)
        items = [item for item in report.causes if (item.draft, item.rule) == key]
        names = [name for name in CAUSES if any(cause.name == name for item in items for cause in item.causes)]
        columns: dict[str, Callable[[Attribution], str]] = {"lost": lambda item: fmt.percent(item.lost.value)}
        columns |= {
            "most to gain": lambda item: item.best or fmt.NOTHING,
            "now": lambda item: wording.reached(item.tokens_per_round, item.speedup),
            "with it": lambda item: (
                wording.reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING
            ),
            "nothing\nlost": lambda item: wording.reached(None, item.perfect_speedup),
        }
        columns |= {name.replace(" ", "\n", 1): partial(_share_of, name=name) for name in names}
        remedies = {best.name: best.remedy for item in items if (best := _best(item))}
        below = [f"  {name}: {remedies[name]}" for name in names if name in remedies]
        what = "what is lost, by cause, and what removing it could bring"
        yield from table_of(f"{title}: {what}", items, columns, left=("most to gain",), below=below)


def why_no_causes(report: Report) -> str:
    """Why nothing is said of causes; empty where something is."""
    if next(causes(report), None) is not None:
        return ""
    return wording.without_log(report) or "no text has a verdict's rule to split the losses of"


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)


def _share_of(item: Attribution, name: str) -> str:
    return next((fmt.percent(cause.share.value) for cause in item.causes if cause.name == name), "")
