"""Speedup by sequences decoded at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Table, text_names
from alphaprof.report.build import RunReport
from alphaprof.report.wording import best_at, charged, judged

TITLE = "speedup by sequences decoded at a time"
EMPTY = "it needs step times of several concurrencies: set costs.concurrency, or give a table of your engine's"


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the best speedup at every concurrency, and up to which of them the draft pays."""
    traffic = report.traffic
    if traffic.load:
        each = ", ".join(f"{item.concurrency}: {best_at(item)}" for item in traffic.load)
        last = _pays(traffic.pays_up_to, [item.concurrency for item in traffic.load])
        limit = {"none": "none of these", "all": "all of these"}.get(last, f"up to {last}")
        yield f"the whole traffic, draft {report.answer.draft}, by sequences decoded at a time (best gamma): {each}"
        yield f"by the lower bound {traffic.min_speedup:g}x is reached at {limit}"
        if report.times is not None:
            yield charged(report.times)
        yield ""
    for title, results in judged(report):
        shown = [result for result in results if result.load]
        known = list(dict.fromkeys(item.concurrency for result in shown for item in result.load))
        rows = []
        for name, result in zip(text_names(shown, results), shown, strict=True):
            cells: dict[str, str] = dict.fromkeys(map(str, known), fmt.NOTHING)
            cells |= {str(item.concurrency): best_at(item) for item in result.load}
            rows.append((name, cells | {"pays up to": _pays(result.pays_up_to, known)}))
        if rows:
            columns = (*map(str, known), "pays up to")
            what = "speedup (gamma) as judged, by sequences decoded at a time"
            yield Table(f"{title}: {what}", columns, rows, draft=shown[0].draft)


def _pays(last: int | None, known: Sequence[int]) -> str:
    """Up to which concurrency it pays; if that is the largest that there are times for, no limit was seen."""
    if last is None:
        return "none"
    return "all" if last == known[-1] else str(last)
