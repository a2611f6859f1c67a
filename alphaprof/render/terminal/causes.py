"""The terminal's section on why drafts are rejected (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding

from alphaprof.render.tables import WIDE, domain_name, named_table, plain, show
from alphaprof.render.wording import reached
from alphaprof.report import format as fmt
from alphaprof.report.model_causes import Attribution, Cause


def causes_section(items: Sequence[Attribution], console: Console) -> None:
    """Print what one draft loses under a rule: a row a domain, a column a cause, and the remedy that could bring most."""
    if not items:
        return
    names = _in_order(items)
    title = f"draft {items[0].draft}, rule {items[0].rule}: what is lost, by cause"
    losses = {"lost": [fmt.percent(item.lost.value) for item in items]}
    for name in names:
        shares = [next((cause.share.value for cause in item.causes if cause.name == name), None) for item in items]
        losses[name.replace(" ", "\n", 1)] = ["" if share is None else fmt.percent(share) for share in shares]
    gains = {"most to gain": [item.best or fmt.NOTHING for item in items]}
    gains |= {"now": [reached(item.tokens_per_round, item.speedup) for item in items]}
    gains |= {
        "with it": [reached(best.tokens_per_round, best.speedup) if (best := _best(item)) else fmt.NOTHING for item in items]
    }
    gains |= {"nothing\nlost": [reached(None, item.perfect_speedup) for item in items]}
    if console.width >= WIDE:
        _columns(items, losses | gains, f"{title}, and what mending it could bring", console)
    else:
        _columns(items, losses, title, console)
        _columns(items, gains, f"draft {items[0].draft}, rule {items[0].rule}: what mending a cause could bring", console)
    remedies = {item.best: best.remedy for item in items if (best := _best(item))}
    for name in names:
        if name in remedies:
            console.print(Padding(plain(f"{name}: {remedies[name]}"), (0, 0, 0, 2)))
    console.print()


def _columns(items: Sequence[Attribution], columns: Mapping[str, Sequence[str]], title: str, console: Console) -> None:
    """A row a domain under named columns."""
    table = named_table()
    for name in columns:
        table.add_column(name, justify="left" if name == "most to gain" else "right", no_wrap=True)
    for item, cells in zip(items, zip(*columns.values(), strict=True), strict=True):
        table.add_row(domain_name(item, items), *cells)
    show(table, title, console)


def causes_notes(items: Sequence[Attribution]) -> list[str]:
    """How to read it; nothing where nothing was attributed."""
    if not items:
        return []
    lines = [
        "lost: share of positions whose token was not an accepted draft. Each has one cause: the first one, from left to "
        "right, that applies.",
        "with it: speedup (t: tokens/round) with nothing lost to that cause, at the same gamma and cost of a round: at most "
        "that; below 1x its remedy alone does not make the draft pay. Trees and prompt lookup held the token for a fact; "
        "the other remedies count as always right.",
    ]
    if unknown := list(dict.fromkeys(name for item in items for name in item.unknown)):
        lines.append(f"not known of this run: {', '.join(unknown)}.")
    return lines


def _in_order(items: Sequence[Attribution]) -> list[str]:
    """The causes that occur, in the order in which they are looked for."""
    found: list[str] = []
    for item in items:
        at = 0
        for cause in item.causes:
            if cause.name in found:
                at = found.index(cause.name) + 1
            else:
                found.insert(at, cause.name)
                at += 1
    return found


def _best(item: Attribution) -> Cause | None:
    return next((cause for cause in item.causes if cause.name == item.best), None)
