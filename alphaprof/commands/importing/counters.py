"""Counters on vLLM's /metrics page: what rose between two readings, its traffic, and its acceptance if it speculates."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from alphaprof.errors import ColumnMissing, DataEmpty, DataUnreadable, cut, shown
from alphaprof.render.blocks import Block, Small, Table
from alphaprof.report import format as fmt
from alphaprof.version import __version__

if TYPE_CHECKING:
    from alphaprof.profiling.run.shard import Progress

SPECULATION = "vllm:spec_decode_num_"
DRAFTS, DRAFTED, ACCEPTED, POSITION = (
    f"{SPECULATION}{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
# Histograms of which sum and count are read.
STEPS, GAP, FIRST = "vllm:iteration_tokens", "vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"
PROMPT, WRITTEN, WAITED = "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_queue_time_seconds"
TOKENS = "vllm:generation_tokens"
PREFIXES = (SPECULATION, STEPS, GAP, FIRST, PROMPT, WRITTEN, WAITED, TOKENS)
EVERY_S = 5  # between two readings of a server
Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a counter, or of the time at which it was created
Page = Mapping[Key, float]
SAVE = "curl -s SERVER/metrics"
SHARES = ("marginal", "conditional")  # columns of the table by depth
NO_REQUESTS = "no interval: no requests"


def read_page(content: bytes, where: str) -> Page:
    """Return the counters of a page. Raises `DataUnreadable`, and `ColumnMissing` if it has none of vLLM's."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(content.decode()))
    except (ValueError, IndexError) as error:  # the parser has no errors of its own
        problem = f"{where} is not a metrics page: {shown(str(error))}"
        raise DataUnreadable(problem, f"save the page in Prometheus' text format, as UTF-8: {SAVE}") from None
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(PREFIXES)]
    kept = [sample for sample in samples if not sample.name.endswith("_bucket")]
    if not kept:
        problem = f"{where} has no counter of vLLM, such as {GAP}_count"
        raise ColumnMissing(problem, f"save the page of a vLLM server that keeps its statistics: {SAVE}")
    names = ((sample.name.removesuffix("_total").replace("_total_", "_"), sample) for sample in kept)
    return {(name, tuple(sorted(sample.labels.items()))): sample.value for name, sample in names}


def read_saved(path: Path) -> Page:
    """Return the counters of a saved page. Raises as `read_page` does."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataUnreadable(f"cannot read {cut(str(path))}: {error.strerror}", f"save the page: {SAVE}") from None
    return read_page(content, cut(str(path)))


def _rises(first: Page, second: Page) -> Counter[Key]:
    """How far counters rose between two pages. Raises `DataUnreadable` unless these are of one server that went on."""
    rises: Counter[Key] = Counter()
    for key in [*first, *second]:
        old, new = first.get(key), second.get(key)
        created = key[0].endswith("_created")
        if old is None or new is None or not new >= old or (created and new != old):
            labels = ", ".join(f"{label} {shown(value)}" for label, value in key[1][:3])
            problem = f"{key[0]} of {labels} is {old} first and {new} then: not two pages of one server that went on"
            hint = "was the server restarted in between, or are the files in the wrong order? save both pages again"
            raise DataUnreadable(problem, hint)
        if not created:
            rises[key] = new - old  # type: ignore[assignment]  # seconds are no whole number
    return rises


@dataclass(frozen=True)
class ServerTraffic:
    """What a server did between two readings. A mean is None if nothing happened of which it could be one."""

    seconds: float | None  # between the readings; None: of saved pages it is not known
    requests: int  # that ended
    prompt_tokens: float | None  # of a request, on average
    written_tokens: float | None  # by a request, on average
    steps: int  # of the engines
    sequences: float | None  # that got a token in a step, on average
    step_ms: float | None  # from one output of a sequence to the next, on average
    slowest_ms: tuple[float, float] | None  # the lowest and highest `step_ms` of windows; None: one window
    tokens_per_step: float | None  # of a sequence
    first_token_ms: float | None  # from a request's arrival
    queue_ms: float | None  # of which it waited


@dataclass(frozen=True)
class CountedRounds:
    """Acceptance in the rounds of all requests together. `marginal[d-1]`: share of rounds whose first d drafts were all
    accepted; `conditional[d-1]`: share accepted of the drafts at depth d whose predecessors were, None where some rounds
    drafted fewer tokens than others, so that it is not known how many had a draft there, and where no round accepted the
    draft before.
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
    """What a server's counters say between two readings, over all its requests. There is no interval and no verdict: how
    much requests differ is not in a sum over them.
    """

    format: ClassVar[str] = "alphaprof-counters"
    version: ClassVar[str] = "2.0"

    alphaprof: str
    target: str | None  # the model_name of the counters
    engines: int  # whose counters were added up
    traffic: ServerTraffic | None  # None: the pages hold speculation alone
    speculation: CountedRounds | None  # None: the server does not speculate
    reason: str  # why there is neither an interval nor a verdict

    def blocks(self) -> Iterator[Block]:
        """Yield acceptance, the traffic, and what to do with them."""
        of = f", {fmt.many(self.engines, 'engine')}" if self.engines > 1 else ""
        if self.speculation is not None:
            yield from _speculation_blocks(self.speculation, self.reason)
        yield f"target {self.target or 'unknown'}{of}" + ("" if self.speculation else ", without speculation")
        if self.traffic is not None:
            yield from _traffic_lines(self.traffic, self.speculation is not None)
        yield Small("For intervals, domains and a verdict import logged requests: alphaprof import vllm (docs/import.md).")


def _speculation_blocks(found: CountedRounds, reason: str) -> Iterator[Block]:
    length = f"acceptance length {fmt.number(found.acceptance_length, 3)} tokens per round with a draft"
    yield f"{length}, at gamma {found.gamma}"
    yield reason
    yield ""
    rate = f"{fmt.count(found.accepted)} of {fmt.count(found.drafted)} drafted tokens accepted"
    yield f"{fmt.many(found.drafts, 'round')} with a draft, {rate}"
    share = f"accepted/drafted {fmt.share(found.accepted_per_drafted)}"
    yield f"{share}: what engines call acceptance rate; it depends on gamma, and is not alpha"
    yield ""
    shares = zip(map(fmt.share, found.marginal), map(fmt.share, found.conditional), strict=True)
    rows = [(str(depth), dict(zip(SHARES, each, strict=True))) for depth, each in enumerate(shares, 1)]
    yield Table("by depth", SHARES, rows, "depth")
    full = found.drafted == found.gamma * found.drafts
    cause = "no round accepted the draft before" if full else "some rounds drafted fewer tokens"
    short = f" conditional: n/a where {cause}." if None in found.conditional else ""
    yield Small(f"marginal: first d drafts all accepted. conditional: draft d accepted, those before it were.{short}")
    yield ""


def _traffic_lines(traffic: ServerTraffic, speculates: bool) -> Iterator[str]:
    during = f" in {traffic.seconds:.0f} s" if traffic.seconds is not None else ""
    tokens = f"{fmt.number(traffic.prompt_tokens, 0)} prompt and {fmt.number(traffic.written_tokens, 0)} written tokens each"
    yield f"{fmt.many(traffic.requests, 'request')} ended{during}: {tokens}"
    between = traffic.slowest_ms
    windows = f" ({between[0]:.1f} to {between[1]:.1f} in parts of the time)" if between else ""
    step = f"{'a round with speculation' if speculates else 'a decode step'} takes {fmt.number(traffic.step_ms, 1)} ms"
    yield f"{fmt.number(traffic.sequences, 2)} sequences in a step; {step}{windows}"
    each = f"{fmt.number(traffic.tokens_per_step)} tokens per sequence and step"
    waits = f"{fmt.number(traffic.first_token_ms, 0)} ms, {fmt.number(traffic.queue_ms, 0)} of them in the queue"
    yield f"{each}; first token after {waits}"
    yield "not in these counters: what verification costs, and what a draft that is not loaded would get accepted"
    if traffic.sequences and traffic.prompt_tokens is not None and traffic.written_tokens is not None:
        context = traffic.prompt_tokens + traffic.written_tokens / 2
        load, places = max(1, round(traffic.sequences)), ("decision.concurrency", "costs.concurrency")
        asked = " ".join(f"--set {place}={load}" for place in places)
        yield f"next: profile this traffic with {asked} --set costs.context={max(8, round(context))}"


def watch(url: str, seconds: float, progress: Progress) -> Counters:
    """Return what a server does for some seconds. Raises `EngineFailed`, and as `counters_of` does."""
    from alphaprof.profiling.engine.client import metrics_page

    pages, began, moments = list[Page](), time.monotonic(), list[float]()
    progress.start(f"reading {url}", math.ceil(seconds), "s")
    while True:
        pages.append(read_page(metrics_page(url), url))
        moments.append(time.monotonic())
        left = began + seconds - moments[-1]
        if left <= 0:
            return counters_of(pages, moments[-1] - moments[0])
        time.sleep(min(EVERY_S, left))
        progress.advance(min(EVERY_S, left))


def counters_of(pages: Sequence[Page], seconds: float | None = None) -> Counters:
    """Return what happened from the first to the last of some pages, `seconds` apart. Raises `DataUnreadable` for pages that
    contradict each other, and `DataEmpty`.
    """
    rises = _rises(pages[0], pages[-1])
    models = sorted({dict(labels).get("model_name", "") for _, labels in rises})
    if len(models) > 1:
        raise DataUnreadable(f"the pages count {fmt.many(len(models), 'model')}", "save the pages of a server of one model")
    sums: Counter[tuple[str, str | None]] = Counter()  # over engines, by name and position
    for (name, labels), rise in rises.items():
        sums[name, dict(labels).get("position")] += rise
    windows = [_step_ms(_rises(*each)) for each in pairwise(pages)]
    plain = {name: rise for (name, place), rise in sums.items() if place is None}
    traffic = _traffic(plain, windows, seconds) if f"{STEPS}_count" in plain else None
    speculation = _speculation(sums) if (DRAFTS, None) in sums else None
    if speculation is None and (traffic is None or not traffic.steps):
        hint = "read a page, send requests, and read another when they are done"
        raise DataEmpty("nothing was decoded between the readings", hint)
    return Counters(
        alphaprof=__version__,
        target=models[0] or None,
        engines=len({dict(labels).get("engine") for _, labels in rises}),
        traffic=traffic,
        speculation=speculation,
        reason=NO_REQUESTS,
    )


def _step_ms(rises: Mapping[Key, float]) -> float | None:
    total, steps = (sum(rise for (name, _), rise in rises.items() if name == f"{GAP}_{end}") for end in ("sum", "count"))
    return 1e3 * total / steps if steps else None


def _traffic(sums: Mapping[str, float], windows: Sequence[float | None], seconds: float | None) -> ServerTraffic:
    def mean(name: str, scale: float = 1.0) -> float | None:
        total, found = sums.get(f"{name}_sum", 0.0), sums.get(f"{name}_count", 0.0)
        return scale * total / found if found else None

    steps, gaps, firsts = (sums.get(f"{name}_count", 0.0) for name in (STEPS, GAP, FIRST))
    known = [each for each in windows if each is not None]
    return ServerTraffic(
        seconds=seconds,
        requests=int(sums.get(f"{WRITTEN}_count", 0.0)),
        prompt_tokens=mean(PROMPT),
        written_tokens=mean(WRITTEN),
        steps=int(steps),
        sequences=(gaps + firsts) / steps if steps else None,
        step_ms=mean(GAP, 1e3),
        slowest_ms=(min(known), max(known)) if len(known) > 1 else None,
        tokens_per_step=(sums.get(TOKENS, 0.0) - firsts) / gaps if gaps else None,
        first_token_ms=mean(FIRST, 1e3),
        queue_ms=mean(WAITED, 1e3),
    )


def _speculation(sums: Mapping[tuple[str, str | None], float]) -> CountedRounds | None:
    """Acceptance; None without a draft. Raises `DataUnreadable` for counts that contradict each other."""
    drafts, drafted, accepted = (int(sums[name, None]) for name in (DRAFTS, DRAFTED, ACCEPTED))
    gamma = sum(name == POSITION for name, _ in sums)
    by_position = [int(sums[POSITION, str(position)]) for position in range(gamma)]
    ordered = all(later <= earlier for earlier, later in pairwise((drafts, *by_position)))
    if not ordered or sum(by_position) != accepted or not accepted <= drafted <= gamma * drafts:
        problem = f"since the first page {drafts} rounds drafted {drafted} tokens and accepted {accepted}, by position "
        problem += f"{by_position[:8]}, which contradict each other"
        raise DataUnreadable(problem, "read both pages while no request is running")
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
