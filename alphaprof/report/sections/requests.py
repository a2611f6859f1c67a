"""Whole requests with their prefill, and single documents."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, table_of
from alphaprof.report.build import RunReport
from alphaprof.report.wording import at_best, judged, of_best

TITLE = "whole requests with their prefill, and single documents"
EMPTY = "it needs step times, and a chosen gamma (see --show drafts)"


def draw(report: RunReport) -> Iterator[Block]:
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
    if report.times is not None and report.times.beyond_prefill:
        share = fmt.percent(report.times.beyond_prefill)
        yield f"{share} of the prompts are longer than the longest timed prefill, so their time is extrapolated"
