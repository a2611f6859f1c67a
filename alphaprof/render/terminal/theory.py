"""The terminal's sections on certificates and on predictability (rich). They compute nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from alphaprof.render.tables import NAME_WIDTH, WIDE, named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.format import short
from alphaprof.report.model import CertainRun, Certificate, Certificates, Decile, LosslessBounds, Predictability
from alphaprof.stats.estimate import Interval

EDGES, GAP = 3, 2  # columns beside a table's first one, and between any two
Row = tuple[str, Mapping[str, str]]  # its name, and its cells by column


def certificates_section(found: Certificates, console: Console) -> None:
    """Print what thresholds say about each draft."""
    for draft in dict.fromkeys(item.draft for item in found.certificates):
        mine = [item for item in found.certificates if item.draft == draft]
        names = {(item.domain, _kind(item)): _domain(item, _several(mine)) for item in mine}
        certified, rejected = (
            [
                (label, {item.rule: cell(item) for item in mine if (item.domain, _kind(item)) == key})
                for key, label in names.items()
            ]
            for cell in (_certified, _budget)
        )
        _grid(f"draft {draft}: certified of accepted, by domain", certified, console)
        _tenths(draft, [item for item in found.deciles if item.draft == draft], console)
        _grid(f"draft {draft}: share rejected, and at most at this mean KL(p||q)", rejected, console)
        certain = sum(round(item.certified.value * item.positions) for item in mine)
        wrong = sum(item.contradicted for item in mine)
        held = f"{fmt.count(wrong)} of {fmt.count(certain)} certified positions, all rules together"
        console.print(f"  certified and yet rejected: {held}\n", highlight=False)
        _lossless(draft, [item for item in found.lossless if item.draft == draft], console)
    lines = [
        "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain beforehand.",
        "What is accepted beyond that was right without having to be. Position by position: threshold_RULE in the log.",
    ]
    if not found.certificates:  # no draft has a distribution
        lines.clear()
    if found.inexact:
        part = fmt.percent(found.inexact)
        lines.append(f"At {part} of the positions some rule accepts more tokens than were looked at: a lower bound there.")
    for line in lines:
        console.print(line, style="dim", highlight=False)
    if lines:
        console.print()


def _tenths(draft: str, items: Sequence[Decile], console: Console) -> None:
    """By tenths of the target's margin, then of its entropy."""
    kinds = list(dict.fromkeys(map(_kind, items)))
    for axis in dict.fromkeys(item.axis for item in items):
        for kind in kinds:
            same = [item for item in items if (item.axis, _kind(item)) == (axis, kind)]
            title = f"draft {draft}: certified of accepted, by tenths of the target's {axis}"
            title += ", nats" if axis == "entropy" else ""
            title += f" ({kind})" if len(kinds) > 1 else ""
            rows: dict[tuple[float | None, float | None], dict[str, str]] = {}
            for item in same:
                rows.setdefault((item.low, item.high), {})[item.rule] = _certified(item)
            _grid(title, [(_range(axis, *ends), cells) for ends, cells in rows.items()], console, named=axis)


def _lossless(draft: str, found: Sequence[LosslessBounds], console: Console) -> None:
    """Beta and its bounds, by domain."""
    if not found:
        return
    table = named_table()
    for name in ("beta", "bound", "mean KL", "bound from\nthe mean"):
        table.add_column(name, justify="right", no_wrap=True)
    several = _several(found)
    for item in found:
        cells = list(map(fmt.share_interval, (item.beta, item.sharp)))
        cells += [fmt.number(item.mean_divergence), fmt.share(item.from_mean)]
        table.add_row(plain(_domain(item, several)), *_fitted(cells, console))
    show(table, f"draft {draft}: lossless acceptance, and what the smaller KL of each position promises of it", console)
    if any(item.sampling is None for item in found):
        note = "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it"
        console.print(note, style="dim", highlight=False)
    console.print()


def _grid(title: str, rows: Sequence[Row], console: Console, named: str = "domain") -> None:
    """Named rows under one column a rule or the like, in as many tables as it takes to show every cell whole."""
    widths: dict[str, int] = {}
    for _, cells in rows:
        for column, cell in cells.items():
            widths[column] = max(widths.get(column, len(column)), *map(len, cell.split("\n")))
    for part in _side_by_side(widths, console.width - NAME_WIDTH - EDGES):
        table = named_table(named)
        for column in part:
            table.add_column(column, justify="right", no_wrap=True)
        for label, cells in rows:
            table.add_row(plain(label), *(cells.get(column, "") for column in part))
        show(table, title, console)
    console.print()


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Columns in parts that fit."""
    part: list[str] = []
    left = room
    for column, width in widths.items():
        if part and width + GAP > left:
            yield part
            part, left = [], room
        part.append(column)
        left -= width + GAP
    if part:
        yield part


def _fitted(cells: Sequence[str], console: Console) -> Sequence[str]:
    """Cells with their intervals beside the values, or below them where the terminal is narrow."""
    return cells if console.width >= WIDE else [cell.replace(" [", "\n[") for cell in cells]


def _certified(item: Certificate | Decile) -> str:
    if item.certified is None or item.accepted is None:
        return fmt.NOTHING
    value = f"{fmt.share(item.certified.value)} of {fmt.share(item.accepted.value)}"
    return f"{value}\n[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]"


def _budget(item: Certificate) -> str:
    return f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}"


def _range(axis: str, low: float | None, high: float | None) -> str:
    """A tenth by where it begins: the next one begins where it ends."""

    def edge(value: float) -> str:
        return fmt.share(value) if axis == "margin" else fmt.number(value, 3)

    if low is None:
        return "all" if high is None else f"below {edge(high)}"
    return f"from {edge(low)}"


def predictability_section(found: Sequence[Predictability], console: Console) -> None:
    """Print what the target alone says."""
    several = _several(found)
    table = named_table()
    names = ["docs", "entropy,\nnats", "margin", "mean top\nprobability"]
    looked_up = any(item.free for item in found)
    names += ["prompt\nlookup: alpha", "coverage", "tokens/round"] if looked_up else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for item in found:
        cells = [str(item.documents), _spread(item.entropy), _spread(item.margin), fmt.share_interval(item.top_prob)]
        if looked_up:
            free = item.free[0] if item.free else None
            cells += [fmt.share_interval(free.alpha), fmt.share(free.coverage)] if free else [fmt.NOTHING] * 2
            cells += [fmt.interval(free.tokens_per_round) if free else fmt.NOTHING]
        table.add_row(plain(_domain(item, several)), *_fitted(cells, console))
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
    rows: list[Row] = []
    for item in found:
        values = {budget.rule: (budget.half, budget.ninety, budget.ninety_nine) for budget in item.budgets}
        cells = {rule: "\n".join(fmt.interval(value, digits=3) for value in each) for rule, each in values.items()}
        rows.append((_domain(item, several), cells))
    _grid("KL budget, nats: where half, 90 % and 99 % of the positions are still certain", rows, console)


def _runs(found: Sequence[Predictability], several: bool, console: Console) -> None:
    """What is certain under strict, for any draft with a bounded divergence."""
    rows: list[Row] = []
    for item in found:
        cells = {f"KL <= {run.epsilon:g}": _run(run) for run in item.runs if run.rule == "strict"}
        rows.append((_domain(item, several), cells))
    gamma = found[0].runs[0].gamma
    _grid(f"rule strict, gamma {gamma}: what is certain of any draft whose KL(p||q) is nowhere larger", rows, console)


def _run(run: CertainRun) -> str:
    lines = [fmt.share_interval(run.certain), f"run {fmt.interval(run.mean_run)}"]
    return "\n".join(lines + ([f">= {fmt.interval(run.tokens_per_round)}"] if run.tokens_per_round else []))


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
    return fmt.text_kind(item.continuation, item.sampling) + ("" if item.on_policy else ", off-policy")


def _domain(item: Certificate | LosslessBounds | Predictability, several: bool) -> str:
    return f"{short(item.domain)} ({_kind(item)})" if several else short(item.domain)
