"""The parts of the terminal's report that time enters: requests and documents, concurrency, step times, memory (rich)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from alphaprof.costs.cost_model import Cost
from alphaprof.render.tables import NAME_WIDTH, named_table, plain, show
from alphaprof.render.wording import best_at, pays, times_lines
from alphaprof.report import format as fmt
from alphaprof.report.model import GammaResult, Result

Name = Callable[[Result], Text]


def requests_section(title: str, results: Sequence[Result], name: Name, console: Console) -> None:
    """What requests and single documents see of a speedup, at the gamma of the table above."""
    rows = [(result, item) for result in results for item in result.gammas if item.gamma == result.best_gamma]
    rows = [(result, item) for result, item in rows if item.of_documents is not None]
    if not rows:
        return
    table = named_table()
    for column in ("gamma", "speedup", "whole requests", "documents p10 / p50 / p90", "slower", "iid would have said"):
        table.add_column(column, justify="right", no_wrap=True)
    for result, item in rows:
        table.add_row(name(result), *_request_cells(item))
    show(table, f"{title}: requests and single documents", console)
    console.print()


def _request_cells(item: GammaResult) -> Iterator[str]:
    yield str(item.gamma)
    yield fmt.number(item.speedup.value if item.speedup else None, unit="x")
    yield fmt.number(item.request_speedup.value if item.request_speedup else None, unit="x")
    spread = item.of_documents
    yield " / ".join(fmt.number(value) for value in (spread.p10, spread.p50, spread.p90)) if spread else fmt.NOTHING
    yield fmt.percent(spread.slower) if spread else fmt.NOTHING
    wrong = item.iid_speedup_error
    said = fmt.number(item.iid_speedup, unit="x")
    yield said if wrong is None else f"{said} ({fmt.signed_percent(wrong)})"


def concurrency_section(title: str, results: Sequence[Result], name: Name, console: Console) -> None:
    """The best speedup at every concurrency, and up to which of them the draft pays."""
    shown = [result for result in results if result.concurrencies]
    if not shown:
        return
    known = list(dict.fromkeys(item.concurrency for result in shown for item in result.concurrencies))
    side_by_side = max(1, (console.width - NAME_WIDTH - 12) // 13)
    for start in range(0, len(known), side_by_side):
        part = known[start : start + side_by_side]
        table = named_table()
        for concurrency in part:
            table.add_column(str(concurrency), justify="right", no_wrap=True)
        table.add_column("pays up to", justify="right", no_wrap=True)
        for result in shown:
            cells = {item.concurrency: best_at(item) for item in result.concurrencies}
            table.add_row(name(result), *(cells.get(item, fmt.NOTHING) for item in part), pays(result.pays_up_to, known))
        show(table, f"{title}: best speedup (gamma) of all documents, by sequences decoded at a time", console)
    console.print()


def times_section(cost: Cost, mean_context: float | None, console: Console) -> None:
    """Where step times come from, and what they are."""
    first, *rest = times_lines(cost, mean_context)
    console.print(plain(first))
    for line in rest:
        console.print(plain(f"  {line}"), highlight=False)
    console.print()
