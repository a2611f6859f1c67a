"""The terminal's sections on certificates and on predictability (rich). They compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console

from alphaprof.report import format as fmt
from alphaprof.report.format import short
from alphaprof.report.model import Certificate, Certificates, Decile, Interval, LosslessBounds, Predictability
from alphaprof.report.tables import NAME_WIDTH, named_table, plain, show

CELL = 18  # columns that a cell of a rule takes
Row = TypeVar("Row", Certificate, Decile)


def certificates_section(found: Certificates, console: Console) -> None:
    """Print what thresholds say about each draft."""
    for draft in dict.fromkeys(item.draft for item in found.certificates):
        mine = [item for item in found.certificates if item.draft == draft]
        name = partial(_domain, several=_several(mine))
        _matrix(f"draft {draft}: certified of accepted, by domain", mine, name, _certified, console)
        _tenths(draft, [item for item in found.deciles if item.draft == draft], console)
        _matrix(f"draft {draft}: share rejected, and at most at this mean KL(p||q)", mine, name, _budget, console)
        certain = sum(round(item.certified.value * item.positions) for item in mine)
        wrong = sum(item.contradicted for item in mine)
        held = f"{fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
        console.print(f"  certified and yet rejected: {held}\n", highlight=False)
        _lossless(draft, [item for item in found.lossless if item.draft == draft], console)
    lines = [
        "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain beforehand.",
        "What is accepted beyond that was right without having to be. Position by position: threshold_RULE in the log.",
    ]
    if found.inexact:
        part = fmt.percent(found.inexact)
        lines.append(f"At {part} of the positions some rule accepts more tokens than were looked at: a lower bound there.")
    for line in lines:
        console.print(line, style="dim", highlight=False)
    console.print()


def _tenths(draft: str, items: Sequence[Decile], console: Console) -> None:
    """By tenths of the target's margin, then of its entropy."""
    kinds = list(dict.fromkeys(map(_kind, items)))
    for axis in dict.fromkeys(item.axis for item in items):
        for kind in kinds:
            same = [item for item in items if (item.axis, _kind(item)) == (axis, kind)]
            title = f"draft {draft}: certified of accepted, by tenths of the target's {axis}"
            title += ", nats" if axis == "entropy" else ""
            title += f" ({kind} text)" if len(kinds) > 1 else ""
            _matrix(title, same, _range, _certified, console, named=axis)


def _lossless(draft: str, found: Sequence[LosslessBounds], console: Console) -> None:
    """Beta and its bounds, by domain."""
    if not found:
        return
    table = named_table()
    for name in ("beta", "sharp bound", "Pinsker", "Bretagnolle-Huber", "mean KL", "bound from the mean"):
        table.add_column(name, justify="right")
    several = _several(found)
    for item in found:
        cells = (item.beta, item.sharp, item.pinsker, item.bretagnolle_huber)
        mean = (fmt.number(item.mean_divergence), fmt.share(item.from_mean))
        table.add_row(plain(_domain(item, several)), *map(fmt.share_interval, cells), *mean)
    show(table, f"draft {draft}: lossless acceptance, and what the smaller KL of each position promises of it", console)
    console.print()


def _matrix(
    title: str,
    items: Sequence[Row],
    name: Callable[[Row], str],
    cell: Callable[[Row], str],
    console: Console,
    named: str = "domain",
) -> None:
    """A row a name, a column a rule, in as many tables as it takes."""
    rules = list(dict.fromkeys(item.rule for item in items))
    side_by_side = max(1, (console.width - NAME_WIDTH) // CELL)
    for start in range(0, len(rules), side_by_side):
        part = rules[start : start + side_by_side]
        table = named_table(named)
        for rule in part:
            table.add_column(rule, justify="right", no_wrap=True)
        rows: dict[str, dict[str, str]] = {}
        for item in items:
            rows.setdefault(name(item), {})[item.rule] = cell(item)
        for label, cells in rows.items():
            table.add_row(plain(label), *(cells.get(rule, "") for rule in part))
        show(table, title, console)
    console.print()


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _budget(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _range(item: Decile) -> str:
    if item.low is None:
        return f"below {fmt.number(item.high, 3)}"
    return f"from {fmt.number(item.low, 3)}"


def predictability_section(found: Sequence[Predictability], console: Console) -> None:
    """Print what the target alone says."""
    several = _several(found)
    table = named_table()
    names = ("docs", "entropy, nats", "margin", "mean top probability", "prompt lookup: alpha", "coverage", "tokens/round")
    for name in names:
        table.add_column(name, justify="right")
    for item in found:
        free = item.free[0] if item.free else None
        cells = [str(item.documents), _spread(item.entropy), _spread(item.margin), fmt.share_interval(item.top_prob)]
        cells += [fmt.share_interval(free.alpha), fmt.share(free.coverage)] if free else [fmt.NOTHING] * 2
        cells += [fmt.interval(free.tokens_per_round) if free else fmt.NOTHING]
        table.add_row(plain(_domain(item, several)), *cells)
    show(table, "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile", console)
    console.print()
    _budgets(found, several, console)
    _runs(found, several, console)
    for line in (
        "certain of any draft: share of positions, mean run of certain tokens from a position on, least tokens per round.",
        "mean top probability: where the text was sampled, no draft that proposes one token can be accepted more often.",
        "KL budget: a draft whose KL(p||q) stays below the first number is certainly right at half of the positions, below",
        "the second at 90 %, below the third at 99 %. It takes no draft to know: it is what a draft would have to reach.",
    ):
        console.print(line, style="dim", highlight=False)
    console.print()


def _budgets(found: Sequence[Predictability], several: bool, console: Console) -> None:
    rules = [budget.rule for budget in found[0].budgets]
    side_by_side = max(1, (console.width - NAME_WIDTH) // (CELL + 4))
    for start in range(0, len(rules), side_by_side):
        table = named_table()
        part = slice(start, start + side_by_side)
        for rule in rules[part]:
            table.add_column(rule, justify="right", no_wrap=True)
        for item in found:
            cells = [
                "\n".join(fmt.interval(value, digits=3) for value in (each.half, each.ninety, each.ninety_nine))
                for each in item.budgets[part]
            ]
            table.add_row(plain(_domain(item, several)), *cells)
        show(table, "KL budget, nats: where half, 90 % and 99 % of the positions are still certain", console)
    console.print()


def _runs(found: Sequence[Predictability], several: bool, console: Console) -> None:
    """What is certain under strict, for any draft with a bounded divergence."""
    rule, gamma = found[0].runs[0].rule, found[0].runs[0].gamma
    table = named_table()
    for run in found[0].runs:
        if run.rule == rule:
            table.add_column(f"KL <= {run.epsilon:g}", justify="right", no_wrap=True)
    for item in found:
        cells = []
        for run in (run for run in item.runs if run.rule == rule):
            lines = [fmt.share_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
            lines += [f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []
            cells.append("\n".join(lines))
        table.add_row(plain(_domain(item, several)), *cells)
    show(table, f"rule {rule}, gamma {gamma}: what is certain of any draft whose KL(p||q) is nowhere larger", console)
    console.print()


def _spread(values: Sequence[Interval]) -> str:
    """A median with its interval, and how far the values spread."""
    low, middle, high = values
    return f"{fmt.interval(middle)}\n{fmt.number(low.value)} to {fmt.number(high.value)}"


def _several(items: Sequence[Certificate] | Sequence[LosslessBounds] | Sequence[Predictability]) -> bool:
    """Whether a domain has several kinds of text."""
    kinds: dict[str, set[str]] = {}
    for item in items:
        kinds.setdefault(item.domain, set()).add(_kind(item))
    return any(len(found) > 1 for found in kinds.values())


def _kind(item: Certificate | Decile | LosslessBounds | Predictability) -> str:
    return fmt.text_kind(item.continuation, item.sampling)


def _domain(item: Certificate | LosslessBounds | Predictability, several: bool) -> str:
    return f"{short(item.domain)} ({_kind(item)})" if several else short(item.domain)
