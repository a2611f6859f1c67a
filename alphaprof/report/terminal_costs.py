"""The parts of the terminal's report that time enters: requests and documents, concurrency, step times, memory (rich)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from alphaprof.report import format as fmt
from alphaprof.report.model import GammaResult, Result
from alphaprof.report.model_costs import AtConcurrency, Cost, Memory
from alphaprof.report.tables import NAME_WIDTH, named_table, plain, show

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
        show(table, f"{title}: best speedup (gamma) by sequences decoded at a time", console)
    console.print()


def best_at(item: AtConcurrency) -> str:
    """The best gamma's speedup, and that gamma."""
    if item.best_gamma is None:
        return fmt.NOTHING
    best = item.speedups[item.gammas.index(item.best_gamma)]
    return f"{fmt.number(best.value if best else None, unit='x')} ({item.best_gamma})"


def pays(last: int | None, known: Sequence[int]) -> str:
    """Up to which concurrency it pays; where that is the largest that there are times for, no limit was seen."""
    if last is None:
        return "none"
    return "all" if last == known[-1] else str(last)


def times_section(cost: Cost, mean_context: float | None, console: Console) -> None:
    """Where step times come from, and what they are."""
    console.print(plain(f"step times: {', '.join(_origin(cost))}"))
    console.print(plain(f"  {_context(cost, mean_context)}"), highlight=False)
    if cost.target_ms:
        verify = "  ".join(f"T({tokens}) {fmt.number(ms, 1)}" for tokens, ms in cost.target_ms.items())
        console.print(f"  target, ms: {verify}", highlight=False)
    for draft, ms in cost.draft_ms.items():
        line = f"  {draft}, ms a step: {fmt.number(ms, 1)}  (c = {fmt.number(ms / cost.target_ms[1])})"
        if (two := cost.draft_after_full_ms.get(draft)) is not None:
            line += f"; over two tokens, after a round accepted in full: {fmt.number(two, 1)}"
        console.print(line, highlight=False)
    for draft, ms in cost.lookup_ms.items():
        console.print(f"  {draft}, ms a search, once a round: {fmt.number(ms, 3)}", highlight=False)
    for draft, ms in cost.bookkeeping_ms.items():
        if ms > 0:
            console.print(f"  {draft}, ms to clear the caches, once a round: {fmt.number(ms, 2)}", highlight=False)
    for item in cost.memory:
        console.print(f"  {_memory(item)}", highlight=False)
    console.print()


def _origin(cost: Cost) -> Iterator[str]:
    if cost.source == "measured":
        threads = f", {cost.threads} threads" if cost.threads else ""
        mode = f", {cost.mode}" if cost.mode else ""
        yield f"measured with {cost.engine} on {cost.device}{threads}{mode}"
    elif cost.source == "table":
        yield f"from the table {cost.device}"
    else:
        yield f"worked out by a roofline for {cost.device}, not measured"
    yield f"{cost.dtype}, batch {cost.concurrency}"
    if cost.overhead_ms:
        yield f"{fmt.number(cost.overhead_ms)} ms of overhead in every target step"


def _context(cost: Cost, mean_context: float | None) -> str:
    taken = f"at {cost.context:.0f} tokens of context"
    if cost.contexts:
        taken += f" (timed at {', '.join(map(str, cost.contexts))}"
        taken += f"; documents: {mean_context:.0f} on average)" if mean_context is not None else ")"
    return taken


def _memory(item: Memory) -> str:
    weights = f"{item.weight_bytes / 1e9:.2f} GB of weights" if item.weight_bytes else "no weights of its own"
    text = f"{item.draft}: {weights}, {item.kv_bytes_per_token / 1e3:.1f} kB of cache a token "
    text += f"({fmt.percent(item.kv_share)} of what target and draft take)"
    if item.lost_share is not None:
        text += f"; it costs {fmt.percent(item.lost_share)} of the context that fits beside the target"
    return text
