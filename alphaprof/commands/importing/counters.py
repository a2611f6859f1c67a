"""What an engine's counters say of the time between two readings, as the terminal's table (rich) or as JSON."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from alphaprof.commands.importing.prometheus import read_page, rise_of
from alphaprof.render.tables import plain
from alphaprof.report import format as fmt
from alphaprof.version import __version__

FORMAT = "alphaprof-counters"
VERSION = 1
NO_REQUESTS = "no interval: no requests"


@dataclasses.dataclass(frozen=True)
class Counters:
    """Acceptance between two readings of an engine's counters, over all its requests. There is no interval and no verdict:
    how much requests differ is not in a sum over them. `marginal[d-1]`: share of rounds whose first d drafts were all
    accepted; `conditional[d-1]`: share accepted of the drafts at depth d whose predecessors were, None where some rounds
    drafted fewer tokens than others, so that it is not known how many had a draft there, and where no round accepted the
    draft before.
    """

    alphaprof: str
    target: str | None  # the model_name of the counters
    engines: int  # whose counters were added up
    gamma: int  # positions that are counted: num_speculative_tokens
    drafts: int  # rounds that drafted something
    drafted: int  # tokens
    accepted: int  # tokens
    accepted_per_drafted: float  # the acceptance rate of engines: depends on gamma, is not alpha
    acceptance_length: float  # 1 + accepted / drafts
    marginal: tuple[float, ...]
    conditional: tuple[float | None, ...]
    reason: str  # why there is neither an interval nor a verdict


def build_counters(before: Path, after: Path) -> Counters:
    """The answer from two saved pages of one server. Raises `DataUnreadable`, `ColumnMissing` and `DataEmpty`."""
    rise = rise_of(read_page(before), read_page(after))
    gamma = len(rise.by_position)
    reached = rise.drafted == gamma * rise.drafts  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (reached or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((rise.drafts, *rise.by_position)))
    ]
    return Counters(
        alphaprof=__version__,
        target=rise.model,
        engines=rise.engines,
        gamma=gamma,
        drafts=rise.drafts,
        drafted=rise.drafted,
        accepted=rise.accepted,
        accepted_per_drafted=rise.accepted / rise.drafted,
        acceptance_length=1 + rise.accepted / rise.drafts,
        marginal=tuple(count / rise.drafts for count in rise.by_position),
        conditional=tuple(conditional),
        reason=NO_REQUESTS,
    )


def counters_json(counters: Counters) -> str:
    """The answer as JSON. Unknown values are null."""
    content = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(counters)
    return json.dumps(content, indent=2, allow_nan=False)


def counters_terminal(counters: Counters, console: Console) -> None:
    """Print the numbers, acceptance by depth, and what they are not."""
    of = f", {fmt.many(counters.engines, 'engine')}" if counters.engines > 1 else ""
    console.print(plain(f"target {counters.target or 'unknown'}{of}, gamma {counters.gamma}"))
    rate = f"{fmt.count(counters.accepted)} of {fmt.count(counters.drafted)} drafted tokens accepted"
    for line in (
        f"{fmt.many(counters.drafts, 'round')} with a draft, {rate}",
        f"acceptance length (1 + accepted / rounds) {fmt.number(counters.acceptance_length, 3)}",
        f"accepted/drafted {fmt.share(counters.accepted_per_drafted)}: what engines call acceptance rate; it depends on "
        "gamma, and is not alpha\n",
    ):
        console.print(line, highlight=False)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("depth", "marginal", "conditional"):
        table.add_column(name, justify="right", no_wrap=True)
    for depth, shares in enumerate(zip(counters.marginal, counters.conditional, strict=True), 1):
        table.add_row(str(depth), *map(fmt.share, shares))
    console.print(table)
    console.print(counters.reason, highlight=False, style="bold")
    full = counters.drafted == counters.gamma * counters.drafts
    cause = "no round accepted the draft before" if full else "some rounds drafted fewer tokens"
    short = f"conditional: n/a where {cause}. " if None in counters.conditional else ""
    for line in (
        "Counters are sums over all requests: how much these differ is not in them, so there is no verdict either.",
        f"marginal: first d drafts all accepted. conditional: draft d accepted, those before it were. {short}".rstrip(),
        "For intervals, domains and a verdict import logged requests: alphaprof import vllm (docs/import.md).",
    ):
        console.print(line, style="dim", highlight=False)
