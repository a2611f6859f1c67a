"""The gamma to draft with by load: by sequences decoded at a time, and by their context. Reports work it out from rounds,
`alphaprof predict` from formulas; nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Table, table_by_columns
from alphaprof.stats.estimate import Interval

Place = tuple[int, int]  # sequences decoded at a time, and tokens in the cache of each
CONTEXTS = (1024, 4096, 16384, 65536)  # where a roofline is asked
OFF = "off"
MARK = " +"  # behind a context


@dataclass(frozen=True)
class AtLoad:
    """The gamma at one load, and what it brings there."""

    concurrency: int  # sequences decoded at a time
    context: int  # tokens in the cache of each
    gamma: int  # 0: decoding is faster without the draft
    speedup: Interval | None  # of decoding, with the bounds that decide; None: gamma is 0
    throughput: Interval | None  # of whole requests, with all prefills; None: gamma is 0, or the prefill is not known
    beyond: bool  # longer than all texts that were measured: acceptance is that of shorter ones


def pays_up_to(loads: Sequence[AtLoad], least: float) -> int | None:
    """Return the last concurrency before the first one at which the speedup's lower bound is below `least`; None: not even
    the first one reaches it.
    """
    last = None
    for item in loads:
        if item.speedup is None or item.speedup.low < least:
            return last
        last = item.concurrency
    return last


def throughput(speedup: Interval, prefill: float, more: float) -> Interval:
    """Return the speedup of whole requests from that of decoding. `prefill`: what reading all prompts of a batch takes,
    c P / (L T) with P of one prompt, L output tokens and a step T, in units of the batch's decoding without the draft;
    `more`: what the draft takes for them.
    """
    return Interval(*(0.0 if end <= 0 else (prefill + 1) / (prefill + more + 1 / end) for end in vars(speedup).values()))


def load_table(loads: Sequence[AtLoad], title: str) -> Table:
    """Return the best gamma and its speedups, a row for each concurrency, a column for each context."""
    contexts = {each.context: f"{fmt.count(each.context)}{MARK if each.beyond else ''}" for each in loads}
    rows: dict[int, dict[str, str]] = {}
    for each in loads:
        cells = rows.setdefault(each.concurrency, {contexts[key]: fmt.NOTHING for key in sorted(contexts)})
        cells[contexts[each.context]] = _cell(each)
    below = [f"  {OFF}: decoding is faster without the draft"] if any(each.speedup is None for each in loads) else []
    if any(each.beyond for each in loads):
        below.append(f"  {MARK.strip()}: longer than any text measured, whose acceptance is taken here")
    if len({(each.concurrency, each.context) for each in loads}) < len(rows) * len(contexts):
        below.append(f"  {fmt.NOTHING}: no step times there, or its caches exceed the memory")
    what = "speedup of decoding" + (" / of throughput" if any(each.throughput for each in loads) else "")
    named = [(str(size), cells) for size, cells in sorted(rows.items())]
    return table_by_columns(f"{title}: best gamma, {what}, by tokens of context", named, named="at a time", below=below)


def _cell(load: AtLoad) -> str:
    if load.speedup is None:
        return OFF
    speeds = [fmt.number(each.value, unit="x") for each in (load.speedup, load.throughput) if each is not None]
    return f"{load.gamma}: {' / '.join(speeds)}"
