"""What a server counted, as a first look: acceptance over all its requests if it speculates, and its traffic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from alphaprof.errors import ColumnMissing, DataEmpty, DataUnreadable, OptionInvalid, cut
from alphaprof.profiling.engine.pages import (
    ADDRESS,
    APART,
    ROUNDS,
    SERVERS,
    Page,
    ServerTraffic,
    read_pages,
    require_one_server,
    rises_between,
    rounds_in,
    server_of,
    sums_of,
    traffic_of,
    value_of,
    watch,
)
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_of_rows
from alphaprof.version import __version__

if TYPE_CHECKING:
    from alphaprof.profiling.shard import Progress  # loads torch


@dataclass(frozen=True)
class CountedRounds:
    """Acceptance in the rounds of all requests; None is what is not counted. `marginal[d-1]`: share of rounds whose first d
    drafts were all accepted; `conditional[d-1]`: share accepted of the drafts at depth d whose predecessors were, None if it
    is not known how many had a draft there (some rounds drafted fewer tokens than others), or if no round accepted the draft
    before. Both are empty if acceptance is not counted by depth.
    """

    gamma: int | None  # drafted tokens of a round, at most
    drafts: int | None  # rounds that drafted something, or, with `every`, all rounds
    drafted: int | None  # tokens
    accepted: int  # tokens
    accepted_per_drafted: float | None  # the acceptance rate of engines: depends on gamma, is not alpha
    acceptance_length: float | None  # 1 + accepted / drafts
    marginal: tuple[float, ...]
    conditional: tuple[float | None, ...]
    every: bool = False
    missing: str | None = None  # the counter of rounds that the page of the server would have


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
        importer = {"vLLM": "vllm", "SGLang": "sglang"}.get(self.server)
        more = f"import logged requests: alphaprof import {importer}" if importer else "profile the draft here, and diagnose"
        yield Small(f"For intervals, domains and a verdict, {more} (docs/import.md).")


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


def counters(places: Sequence[str], seconds: float, labels: Sequence[str], progress: Progress) -> Counters:
    """Return what one or two saved pages say, or those of a server's address that is polled for some seconds; `labels`: see
    `counters_of`. Raises what `read_pages` and `counters_of` do.
    """
    if len(places) == 1 and places[0].startswith(ADDRESS):
        progress.start(f"reading {places[0]}", round(seconds), "s")
        return counters_of(*watch(places[0], seconds, progress.advance), labels=labels)
    return counters_of(read_pages(places), labels=labels)


def counters_of(pages: Sequence[Page], seconds: float | None = None, labels: Sequence[str] = ()) -> Counters:
    """Return what happened between the first and the last of some pages (of one page: since the start) at the server that
    `labels` (NAME=VALUE, several values of one name together) choose. Raises `OptionInvalid`, `DataUnreadable`,
    `ColumnMissing` and `DataEmpty`.
    """
    asked = defaultdict[str, set[str]](set)
    for label in labels:
        name, told, value = label.partition("=")
        if not told:
            raise OptionInvalid(f"--label {cut(label)} has no value", "write a label as the page does: model_name=NAME")
        asked[name].add(value)

    def chosen(page: Page) -> Page:
        return {key: each for key, each in page.items() if all(value_of(key, name) in asked[name] for name in asked)}

    pages = pages if len(pages) > 1 else [{}, *pages]
    if pages[0] and not pages[0].keys() & pages[-1].keys():
        raise DataUnreadable("the pages are not from one server run", "save two pages of the same server")
    rises, reset = rises_between(chosen(pages[0]), chosen(pages[-1]))
    rose = [key for key, rise in rises.items() if rise > 0]
    if asked and not rose:
        known = sorted(
            {f"{name}={value_of(key, name)}" for page in pages for key in page for name in (*APART, *dict(key[2]))}
        )
        raise OptionInvalid("nothing that was counted has these labels", f"the pages have {cut(', '.join(known), 300)}")
    require_one_server(rose, "the pages count", "choose one, or name several: --label {}={}", asked)
    page = {key: rise for key, rise in rises.items() if not rose or key[0] == rose[0][0]}
    traffic = traffic_of(page, [rises_between(*map(chosen, pair))[0] for pair in pairwise(pages)], seconds)
    speculation = _speculation(page)
    if speculation is None and (traffic is None or not traffic.step_ms):
        hint = "save a page, send requests, and save another when they are done"
        raise DataEmpty("nothing was decoded between the readings", hint)
    return Counters(
        alphaprof=__version__,
        server=server_of(page),
        target=next((value_of(key, "model_name") for key in rose), "") or None,
        engines=len({dict(key[2]).get("engine") for key in page}),
        traffic=traffic,
        speculation=speculation,
        reset=tuple(sorted(" ".join(value for _, value in labels) or "the server" for labels in reset)),
    )


def _speculation(page: Page) -> CountedRounds | None:
    """Acceptance; None without a draft. Raises `DataUnreadable` for counts that contradict each other, and `ColumnMissing`
    for a page with averages alone.
    """
    sums, kind = sums_of(page), min((engine for engine, _, _ in page), default="")
    if not {"rounds", "emitted", "drafted", "accepted"} & sums.keys():
        if sums.get("length"):
            problem = f"{SERVERS[kind]} averages its last steps (spec_accept_length), and has no {ROUNDS[kind]}"
            raise ColumnMissing(problem, "update SGLang, or import logged requests: alphaprof import sglang")
        return None
    every = "emitted" in sums and "rounds" not in sums
    rounds, accepted, gamma, places = rounds_in(sums, kind)
    drafted = sums.get("drafted")
    if not rounds and not drafted:
        return None
    counted, by_position = round(rounds) if rounds is not None else None, [round(count) for count in places]
    falls = counted is None or all(later <= earlier for earlier, later in pairwise((counted, *by_position)))
    placed = not places or abs(sum(places) - accepted) < 0.5
    most = gamma * rounds if gamma and rounds else math.inf  # tokens that these rounds can have drafted
    if not falls or not placed or not 0 <= accepted <= (most if drafted is None else drafted) <= most:
        words = "" if drafted is None else f"drafted {drafted:.0f} tokens and "
        problem = f"since page 1, {counted} rounds {words}accepted {accepted:.0f}, by position {by_position[:8]}"
        raise DataUnreadable(f"{problem}: these counts contradict each other", "save both pages while no request is running")
    full = drafted == (gamma or 0) * (rounds or 0.0)  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (full or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((rounds or 0.0, *places)))
    ]
    return CountedRounds(
        gamma=gamma,
        drafts=counted,
        drafted=None if drafted is None else round(drafted),
        accepted=round(accepted),
        accepted_per_drafted=accepted / drafted if drafted else None,
        acceptance_length=1 + accepted / rounds if rounds else None,
        marginal=tuple(found / rounds for found in places) if rounds else (),
        conditional=tuple(conditional),
        every=every and kind != "vllm",
        missing=ROUNDS.get(kind) if rounds is None else None,
    )
