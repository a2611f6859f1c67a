"""Counters on vLLM's /metrics page: what rose between two readings, its traffic, and its acceptance if it speculates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from alphaprof.errors import DataEmpty, DataUnreadable, OptionInvalid
from alphaprof.profiling.engine.server import (
    SPECULATION,
    Page,
    ServerTraffic,
    read_saved,
    rises_between,
    traffic_between,
    watch,
)
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_of_rows
from alphaprof.version import __version__

if TYPE_CHECKING:
    from alphaprof.profiling.shard import Progress  # loads torch

DRAFTS, DRAFTED, ACCEPTED, POSITION = (
    f"{SPECULATION}{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)


@dataclass(frozen=True)
class CountedRounds:
    """Acceptance in the rounds of all requests. `marginal[d-1]`: share of rounds whose first d drafts were all accepted;
    `conditional[d-1]`: share accepted of the drafts at depth d whose predecessors were, None if it is not known how many
    had a draft there (some rounds drafted fewer tokens than others), or if no round accepted the draft before.
    """

    gamma: int  # positions that are counted: num_speculative_tokens
    drafts: int  # rounds that drafted something
    drafted: int  # tokens
    accepted: int  # tokens
    accepted_per_drafted: float  # the acceptance rate of engines: depends on gamma, is not alpha
    acceptance_length: float  # 1 + accepted / drafts
    marginal: tuple[float, ...]
    conditional: tuple[float | None, ...]


@dataclass(frozen=True)
class Counters:
    """What a server's counters say between two readings, over all its requests, without an interval or a verdict: how
    much requests differ is not in a sum over them.
    """

    format: ClassVar[str] = "alphaprof-counters"
    version: ClassVar[str] = "2.0"

    alphaprof: str
    target: str | None  # the model_name of the counters
    engines: int  # whose counters were added up
    traffic: ServerTraffic | None  # None: the pages hold speculation alone
    speculation: CountedRounds | None  # None: the server does not speculate

    def blocks(self) -> Iterator[Block]:
        """Yield acceptance, the traffic, and what to do with them."""
        of = f", {fmt.many(self.engines, 'engine')}" if self.engines > 1 else ""
        if self.speculation is not None:
            yield from _speculation_blocks(self.speculation)
        yield f"target {self.target or 'unknown'}{of}" + ("" if self.speculation else ", without speculation")
        if self.traffic is not None:
            yield from _traffic_lines(self.traffic, self.speculation is not None)
        yield Small("For intervals, domains and a verdict, import logged requests: alphaprof import vllm (docs/import.md).")


def _speculation_blocks(found: CountedRounds) -> Iterator[Block]:
    length = f"acceptance length {fmt.number(found.acceptance_length, 3)} tokens per round with a draft"
    yield f"{length}, at gamma {found.gamma}"
    yield "no interval: counters are sums over requests"
    rate = f"{fmt.count(found.accepted)} of {fmt.count(found.drafted)} drafted tokens accepted"
    yield f"{fmt.many(found.drafts, 'round')} with a draft, {rate}"
    share = f"accepted/drafted {fmt.share(found.accepted_per_drafted)}"
    yield f"{share}: the acceptance rate of engines; it depends on gamma and is not alpha"
    yield ""
    shares = zip(map(fmt.share, found.marginal), map(fmt.share, found.conditional), strict=True)
    rows = [(str(depth), *each) for depth, each in enumerate(shares, 1)]
    yield table_of_rows("by depth", ("depth", "marginal", "conditional"), rows)
    full = found.drafted == found.gamma * found.drafts
    cause = "no round accepted draft d - 1" if full else "some rounds drafted fewer tokens"
    short = f" conditional: n/a if {cause}." if None in found.conditional else ""
    yield Small(f"marginal: first d drafts all accepted. conditional: draft d accepted if those before it were.{short}")
    yield ""


def _traffic_lines(traffic: ServerTraffic, speculates: bool) -> Iterator[str]:
    during = f" in {traffic.seconds:.0f} s" if traffic.seconds is not None else ""
    tokens = f"{fmt.number(traffic.prompt_tokens, 0)} prompt and {fmt.number(traffic.written_tokens, 0)} written tokens each"
    yield f"{fmt.many(traffic.requests, 'request')} ended{during}: {tokens}"
    between = traffic.slowest_ms
    windows = f" ({between[0]:.1f} to {between[1]:.1f} across time windows)" if between else ""
    step = f"{'a round with speculation' if speculates else 'a decode step'} takes {fmt.number(traffic.step_ms, 1)} ms"
    yield f"{fmt.number(traffic.sequences, 2)} sequences in a step; {step}{windows}"
    each = f"{fmt.number(traffic.tokens_per_step)} tokens per sequence and step"
    waits = f"{fmt.number(traffic.first_token_ms, 0)} ms, {fmt.number(traffic.queue_ms, 0)} of them in the queue"
    yield f"{each}; first token after {waits}"
    yield "these counters do not show verification cost, or the acceptance of a draft that is not loaded"
    if traffic.sequences and traffic.prompt_tokens is not None and traffic.written_tokens is not None:
        context = traffic.prompt_tokens + traffic.written_tokens / 2
        load, places = max(1, round(traffic.sequences)), ("decision.concurrency", "costs.concurrency")
        asked = " ".join(f"--set {place}={load}" for place in places)
        yield f"next: profile this traffic with {asked} --set costs.context={max(8, round(context))}"


def counters(pages: Sequence[str], seconds: float, progress: Progress) -> Counters:
    """Return what two saved pages say, or those of a server's address that is polled for some seconds. Raises
    `OptionInvalid` for other numbers of pages, and what `counters_of` raises.
    """
    is_address = pages[0].startswith(("http://", "https://"))
    if len(pages) != (1 if is_address else 2):
        hint = "give two saved pages, or one address: http://127.0.0.1:8000"
        raise OptionInvalid(f"expected 2 pages or 1 address, got {len(pages)}", hint)
    if not is_address:
        return counters_of([read_saved(Path(page)) for page in pages])
    progress.start(f"reading {pages[0]}", round(seconds), "s")
    return counters_of(*watch(pages[0], seconds, progress.advance))


def counters_of(pages: Sequence[Page], seconds: float | None = None) -> Counters:
    """Return what happened between the first and the last of some pages. Raises `DataUnreadable` and `DataEmpty`."""
    rises, traffic = rises_between(pages[0], pages[-1]), traffic_between(pages, seconds)
    models = sorted({dict(labels).get("model_name", "") for _, labels in rises})
    if len(models) > 1:
        raise DataUnreadable(f"the pages count {fmt.many(len(models), 'model')}", "save pages of a server with one model")
    sums: Counter[tuple[str, str | None]] = Counter()  # over engines, by name and position
    for (name, labels), rise in rises.items():
        sums[name, dict(labels).get("position")] += rise
    speculation = _speculation(sums) if (DRAFTS, None) in sums else None
    if speculation is None and (traffic is None or not traffic.steps):
        hint = "save a page, send requests, and save another when they are done"
        raise DataEmpty("nothing was decoded between the readings", hint)
    return Counters(
        alphaprof=__version__,
        target=models[0] or None,
        engines=len({dict(labels).get("engine") for _, labels in rises}),
        traffic=traffic,
        speculation=speculation,
    )


def _speculation(sums: Mapping[tuple[str, str | None], float]) -> CountedRounds | None:
    """Acceptance; None without a draft. Raises `DataUnreadable` for counts that contradict each other."""
    drafts, drafted, accepted = (int(sums[name, None]) for name in (DRAFTS, DRAFTED, ACCEPTED))
    gamma = sum(name == POSITION for name, _ in sums)
    by_position = [int(sums[POSITION, str(position)]) for position in range(gamma)]
    ordered = all(later <= earlier for earlier, later in pairwise((drafts, *by_position)))
    if not ordered or sum(by_position) != accepted or not accepted <= drafted <= gamma * drafts:
        problem = f"since page 1, {drafts} rounds drafted {drafted} tokens and accepted {accepted}, by position "
        problem += f"{by_position[:8]}: these counts contradict each other"
        raise DataUnreadable(problem, "save both pages while no request is running")
    if not drafts:
        return None
    full = drafted == gamma * drafts  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (full or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((drafts, *by_position)))
    ]
    return CountedRounds(
        gamma=gamma,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        accepted_per_drafted=accepted / drafted,
        acceptance_length=1 + accepted / drafts,
        marginal=tuple(found / drafts for found in by_position),
        conditional=tuple(conditional),
    )
