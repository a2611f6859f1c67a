"""What a speedup becomes in service: by sequences decoded at a time, of whole requests and of single documents."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import wording
from alphaprof.render.blocks import Block, Table, table_of, text_names
from alphaprof.render.sections.drafts import judged, of_best
from alphaprof.report import format as fmt
from alphaprof.report.build import Report


def load(report: Report) -> Iterator[Block]:
    """Yields the best speedup at every concurrency, and up to which of them the draft pays."""
    traffic = report.traffic
    if traffic.load:
        each = ", ".join(f"{item.concurrency}: {wording.best_at(item)}" for item in traffic.load)
        last = wording.pays(traffic.pays_up_to, [item.concurrency for item in traffic.load])
        limit = {"none": "none of these", "all": "all of these"}.get(last, f"up to {last}")
        yield f"the whole traffic, draft {traffic.draft}, by sequences decoded at a time (best gamma): {each}"
        yield f"{traffic.min_speedup:g}x is reached at {limit}"
        yield ""
    for title, results in judged(report):
        shown = [result for result in results if result.load]
        known = list(dict.fromkeys(item.concurrency for result in shown for item in result.load))
        rows = []
        for name, result in zip(text_names(shown, results), shown, strict=True):
            cells = dict.fromkeys(map(str, known), fmt.NOTHING)
            cells |= {str(item.concurrency): wording.best_at(item) for item in result.load}
            rows.append((name, cells | {"pays up to": wording.pays(result.pays_up_to, known)}))
        if rows:
            columns = (*map(str, known), "pays up to")
            what = "best speedup (gamma) of all documents, by sequences decoded at a time"
            yield Table(f"{title}: {what}", columns, rows, draft=shown[0].draft)


def requests(report: Report) -> Iterator[Block]:
    """Yields what requests and single documents see of a speedup, at the gamma of section drafts."""
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
        shown = [result for result in results if (best := wording.at_best(result)) and best.of_documents]
        cells = {name: of_best(cell) for name, cell in columns.items()}
        yield from table_of(f"{title}: requests and single documents", shown, cells, among=results)
