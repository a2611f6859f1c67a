"""`alphaprof diagnose` without a run, a first look at a server: acceptance if it speculates, load and step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from alphaprof.errors import DataEmpty, cut
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_of_rows
from alphaprof.servers.pages import CountedRounds, ServerTraffic, counted, read_pages, rounds_of, traffic_of
from alphaprof.version import __version__


@dataclass(frozen=True)
class Counters:
    """What a server's counters say between two readings, over all its requests, without an interval or a verdict: how
    much requests differ is not in a sum over them.
    """

    format: ClassVar[str] = "alphaprof-counters"
    version: ClassVar[str] = "3.0"

    alphaprof: str
    server: str  # what counted
    target: str | None  # the model_name of the counters
    engines: int  # whose counters were added up
    traffic: ServerTraffic | None  # None: the pages hold speculation alone
    speculation: CountedRounds | None  # None: the server does not speculate
    reset: tuple[str, ...] = ()  # sources that were reset between the readings, and count from then on

    def blocks(self) -> Iterator[Block]:
        """Yield acceptance, the traffic, and what to do with them."""
        of = f", {fmt.many(self.engines, 'engine')}" if self.engines > 1 else ""
        if self.speculation is not None:
            yield from _speculation_blocks(self.speculation)
        plain = "" if self.speculation else ", without speculation"
        yield f"{self.server}, target {self.target or 'unknown'}{of}{plain}"
        if self.reset:
            yield f"counters of {', '.join(self.reset)} were reset between the readings: what they counted before is missing"
        if self.traffic is not None:
            yield from _traffic_lines(self.traffic, self.speculation is not None)
        if self.speculation is not None:
            yield Small("For intervals and causes, name a run first; for domains and a verdict, import logged requests.")


def _speculation_blocks(found: CountedRounds) -> Iterator[Block]:
    kind = "round, those without a draft too" if found.every else "round with a draft"
    if found.acceptance_length is None:
        yield f"acceptance length unknown: rounds are not counted here{f' (no {found.missing})' if found.missing else ''}"
    else:
        at = "" if found.gamma is None else f", at gamma {found.gamma}"
        yield f"acceptance length {fmt.number(found.acceptance_length, 3)} tokens per {kind}{at}"
    yield "no interval: counters are sums over requests"
    of = "" if found.drafts is None else f"{fmt.many(found.drafts, 'round')}{'' if found.every else ' with a draft'}, "
    drafted = "" if found.drafted is None else f"of {fmt.count(found.drafted)} "
    yield f"{of}{fmt.count(found.accepted)} {drafted}drafted tokens accepted"
    if found.accepted_per_drafted is not None:
        share = f"accepted/drafted {fmt.share(found.accepted_per_drafted)}"
        yield f"{share}: the acceptance rate of engines; it depends on gamma and is not alpha"
    yield ""
    if not found.marginal:
        return
    shares = zip(map(fmt.share, found.marginal), map(fmt.share, found.conditional), strict=True)
    rows = [(str(depth), *each) for depth, each in enumerate(shares, 1)]
    yield table_of_rows("by depth", ("depth", "marginal", "conditional"), rows)
    full = found.drafted == (found.gamma or 0) * (found.drafts or 0)
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


def first_look(
    places: Sequence[str],
    labels: Sequence[str] = (),
    seconds: float | None = None,
    tick: Callable[[float], object] = float,
) -> Counters:
    """Return what one or two saved pages say, or an address: since the server started, or over some `seconds`; `labels`: see
    `counted`. Raises what `read_pages`, `counted` and `rounds_of` do, and `DataEmpty`.
    """
    pages, where = read_pages(places, seconds, tick), cut(places[-1])
    found = counted(pages, where, labels)
    traffic, speculation = traffic_of(found, seconds), rounds_of(found, where)
    if speculation is None and (traffic is None or not traffic.step_ms):
        if (written := found.sums.get("written")) and not {"rounds", "emitted"} & found.sums.keys():
            counts = f"{where} has {fmt.count(round(written))} generated tokens, and no spec_decode counter"
            raise DataEmpty(
                f"{found.server} does not speculate: {counts}",
                "start it with a draft; for its step times, give a page of before and one of after",
            )
        raise DataEmpty(
            "nothing was decoded between the readings", "save a page, send requests, and save another when they are done"
        )
    return Counters(__version__, found.server, found.target, found.engines, traffic, speculation, found.reset)
