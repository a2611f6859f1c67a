"""What a speedup becomes in service: by sequences decoded at a time, of whole requests and of single documents."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render import wording
from alphaprof.render.sections.blocks import Block, Table, table_of, text_names
from alphaprof.render.sections.drafts import formula, judged, of_best
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import Traffic


def of_traffic(traffic: Traffic) -> Iterator[str]:
    """Yields the best speedup of the whole traffic at every concurrency, where several have step times."""
    if traffic.load:
        each = ", ".join(f"{item.concurrency}: {wording.best_at(item)}" for item in traffic.load)
        last = wording.pays(traffic.pays_up_to, [item.concurrency for item in traffic.load])
        limit = {"none": "none of these", "all": "all of these"}.get(last, f"up to {last}")
        limit = f"{traffic.min_speedup:g}x is reached at {limit}"
        yield f"by sequences decoded at a time (best gamma of all documents): {each}; {limit}"


def load(report: Report) -> Iterator[Block]:
    """Yields the best speedup at every concurrency, and up to which of them the draft pays."""
    if report.traffic.load:
        yield f"the whole traffic, draft {report.traffic.draft}"
        yield from (f"  {line}" for line in of_traffic(report.traffic))
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


def why_no_load(report: Report) -> str:
    """Why nothing is said of other concurrencies; empty where something is."""
    if any(result.load for result in report.results if result.verdict is not None):
        return ""
    if report.times is None:
        return "there are no step times (see --show notes)"
    if len(report.times.concurrencies) > 1:
        return "no text has rounds that step times apply to (see --show drafts)"
    return (
        f"there are step times of one concurrency ({report.times.concurrency}): time several with costs.concurrency, or "
        "give a table of your engine's step times"
    )


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
        "iid would have said": lambda best: formula(fmt.number(best.iid_speedup, unit="x"), best.iid_speedup_error),
    }
    for title, results in judged(report):
        shown = [result for result in results if (best := wording.at_best(result)) and best.of_documents]
        by_depth = any(report.run.draft_models[result.draft].by_depth for result in shown)
        cells = {name: of_best(cell) for name, cell in columns.items() if not (by_depth and name.startswith("iid"))}
        yield from table_of(f"{title}: requests and single documents", shown, cells, among=results)


def why_no_requests(report: Report) -> str:
    """Why nothing is said of requests; empty where something is."""
    if next(requests(report), None) is not None:
        return ""
    if report.times is None:
        return "there are no step times (see --show notes)"
    return "no gamma was chosen on any text (see --show drafts)"
