"""Metrics pages of servers: what one counted between two readings, its rounds, and its traffic.

Counters of a page grow from a server's start on, so two pages count what happened between them. A file of counts becomes a
`Page` too (`files.py`), and stands for itself. Names are those of the engines' sources (`NAMES`).
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from alphaprof.errors import ColumnMissing, DataUnreadable, OptionInvalid, cut, shown
from alphaprof.servers.client import LARGEST, fetched
from alphaprof.servers.files import ADDRESS, GAUGES, GZIP, Key, Labels, Page, as_utf8, page_of_api, sums_in

SAVE = "curl -s SERVER/metrics"
EVERY_S = 5  # between two readings of a server
SERVERS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "trtllm": "TensorRT-LLM",
    "lmstudio": "LM Studio",
    "openai": "an OpenAI server",
}
# What pages call what: vLLM's engines V1 and V0, llama.cpp, SGLang; Ray has names of its own for vLLM's, each twice.
SERIES = re.compile(r"(?:ray_)?(vllm|sglang|llamacpp)[:_](\w+?)(?:_total)?(_created)?$")
ROUNDS = {"vllm": "vllm:spec_decode_num_drafts_total", "sglang": "sglang:spec_verify_calls_total"}
HISTOGRAMS = {
    "inter_token_latency_seconds": "gap",
    "time_to_first_token_seconds": "first",
    "request_queue_time_seconds": "queue",
    "queue_time_seconds": "queue",
    "request_generation_tokens": "ended",
    "generation_tokens_histogram": "ended",
}
NAMES = {
    "spec_decode_num_drafts": "rounds",
    "spec_verify_calls": "rounds",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "spec_decode_num_accepted_tokens_per_pos": "position",
    "spec_decode_num_emitted_tokens": "emitted",
    "spec_num_steps": "steps",
    "spec_accept_length": "length",
    "generation_tokens": "written",
    "tokens_predicted": "written",
    "tokens_predicted_seconds": "gap_sum",
    "request_prompt_tokens_sum": "prompt",
    "prompt_tokens_histogram_sum": "prompt",
    "request_prompt_tokens_count": "requests",
    "num_requests": "requests",
    "iteration_tokens_total_count": "iterations",
    "cache_config_info": "slots",
    "max_total_num_tokens": "slots",
    "kv_cache_usage_perc": "used",
    "gpu_cache_usage_perc": "used",
    "kv_cache_usage_ratio": "used",
    "token_usage": "used",
    "num_preemptions": "preempted",
    "num_retracted_requests": "preempted",
    "prefix_cache_queries": "asked",
    "gpu_prefix_cache_queries": "asked",
    "prompt_tokens": "read",
    "prefix_cache_hits": "cached",
    "gpu_prefix_cache_hits": "cached",
    "cached_tokens": "cached",
    "cache_hit_rate": "hit_rate",
    **{f"{theirs}_{end}": f"{ours}_{end}" for theirs, ours in HISTOGRAMS.items() for end in ("sum", "count", "bucket")},
}
GAP = "ms between tokens"
SLOTS = "vllm:cache_config_info"  # its labels tell the KV cache's blocks, and the tokens of each
SLACK = 1.01  # of counts that are read one after another while requests run, or from rounded shares
MOST = 1000  # drafts of a round; counts of more contradict each other
IN_SOURCE = ("position", "le")  # labels within one source of counters
# Labels that tell servers apart, the kind of engine first; a federation may rename two. Engines of one server are added up.
APART = ("kind", "model_name", "job", "instance", "exported_job", "exported_instance")


def page_of(content: bytes, where: str, alone: bool = True) -> Page:
    """Return the counters of a metrics page, or the sums of another file, which stands `alone`. Raises `DataUnreadable`,
    `OptionInvalid`, and `ColumnMissing` if nothing is counted.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        most = LARGEST if where.startswith(ADDRESS) else 16 * LARGEST
        if content.startswith(GZIP):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(most + 1)
        if len(content) > most:
            raise DataUnreadable(f"{where} holds more than {most >> 20} MiB", "give a part of it")
        content = page_of_api(as_utf8(content))
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnreadable(f"{where} is compressed, and damaged: {error}", "copy it again") from None
    if sums := sums_in(content, where):
        if not alone:
            raise OptionInvalid(f"{where} is no metrics page, and counts for itself", "give one such file, alone")
        return sums
    if content.lstrip()[:1] in (b"{", b"["):
        raise DataUnreadable(
            f"{where} holds JSON, not a metrics page",
            "import it first (alphaprof import FILE --rule strict --out RUN), and diagnose that RUN",
        )
    found: Page = {}
    try:
        families = text_string_to_metric_families(content.decode())
        for sample in itertools.chain.from_iterable(family.samples for family in families):
            value = _slots(sample.labels) if sample.name == SLOTS else sample.value
            named = SERIES.match(sample.name) if math.isfinite(value) else None
            if named and (name := NAMES.get(named[2])):
                float(sample.labels.get("le", 0.0))  # raises for a bound that is no number
                found[named[1], f"{name} created" if named[3] else name, tuple(sorted(sample.labels.items()))] = value
    except (ValueError, IndexError) as error:  # the parser has no errors of its own
        raise DataUnreadable(
            f"{where} is not a metrics page: {shown(str(error))}",
            f"save the page in Prometheus' text format, as UTF-8: {SAVE}",
        ) from None
    if all(name.endswith(" created") for _, name, _ in found):
        if b"lmdeploy:" in content:
            raise ColumnMissing(
                f"{where} is a metrics page of LMDeploy, whose counters are not read",
                "give its log, whose lines of SpecDecoding metrics are added up",
            )
        raise ColumnMissing(f"{where} has no counter of vLLM, SGLang or llama.cpp", f"save its page: {SAVE}")
    return found


def _slots(labels: Mapping[str, str]) -> float:
    """Return the tokens that vLLM's KV cache has room for, which its page tells in labels; NaN: it does not."""
    blocks, size = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    return float(blocks) * float(size) if blocks.isdecimal() and size.isdecimal() else math.nan


def read_pages(places: Sequence[str], seconds: float | None = None, tick: Callable[[float], object] = float) -> list[Page]:
    """Return the pages of one or two files, or of an address: one page, or one every few `seconds` for that long; `tick`:
    called with the seconds since it was called last. Raises as `page_of` does, and `EngineFailed`.
    """
    if len(places) > 2:
        raise OptionInvalid(f"expected an address, or 1 or 2 pages, got {len(places)}", "give those before and after")
    if seconds is not None and not (len(places) == 1 and places[0].startswith(ADDRESS)):
        raise OptionInvalid("--seconds is for a server's address", "leave it out")
    pages, began = list[Page](), time.monotonic()
    for place in places:
        try:
            content = fetched(place, "/metrics") if place.startswith(ADDRESS) else Path(place).read_bytes()
        except OSError as error:
            raise DataUnreadable(f"cannot read {cut(place)}: {error.strerror}", f"save the page: {SAVE}") from None
        pages.append(page_of(content, cut(place), len(places) == 1))
    while seconds is not None and (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(EVERY_S, left))
        tick(min(EVERY_S, left))
        pages.append(page_of(fetched(places[0], "/metrics"), places[0]))
    return pages


def source_of(labels: Labels) -> Labels:
    """Return the labels that tell one source of counters from others."""
    return tuple(label for label in labels if label[0] not in IN_SOURCE)


def rises_between(first: Page, second: Page) -> tuple[Page, set[Labels]]:
    """Return how far counters rose from one page to another, and the sources that were reset in between: what fell, or was
    created anew, counts from 0, as what the first page lacks does. Raises `DataUnreadable` for pages in the wrong order.
    """
    fell = {key for key, value in first.items() if key[1] not in GAUGES and second.get(key, value) < value}
    created = {key for key, value in first.items() if key[1].endswith(" created") and second.get(key, value) != value}
    for engine, name, labels in sorted(fell):
        key = (engine, f"{name} created", labels)
        if key in first and first[key] == second.get(key):
            problem = f"{name} of {value_of(key, 'model_name') or engine} fell, and {SERVERS[engine]} did not restart"
            raise DataUnreadable(f"{problem}: the pages are not from one server run", "check the order of the files")
    reset = {source_of(labels) for _, _, labels in fell | created}
    kept = {key: 0.0 if key[1] in GAUGES or source_of(key[2]) in reset else value for key, value in first.items()}
    return {key: value - kept.get(key, 0.0) for key, value in second.items() if not key[1].endswith(" created")}, reset


@dataclass(frozen=True)
class ServerTraffic:
    """What a server did between two readings. A mean is None if nothing happened of which it could be one, or it is not
    counted.
    """

    seconds: float | None  # between the readings; None: of saved pages it is not known
    requests: int  # that ended
    prompt_tokens: float | None  # of a request, on average
    written_tokens: float | None  # by a request, on average
    steps: int | None  # of the engines
    sequences: float | None  # that got a token in a step, on average
    step_ms: float | None  # from one output of a sequence to the next, on average
    slowest_ms: tuple[float, float] | None  # the lowest and highest `step_ms` of windows; None: one window
    tokens_per_step: float | None  # of a sequence
    first_token_ms: float | None  # from a request's arrival
    queue_ms: float | None  # of which it waited


def value_of(key: Key, name: str) -> str:
    """Return the value of a label of a counter, or its `kind` of engine; empty if it does not say."""
    return key[0] if name == "kind" else dict(key[2]).get(name, "")


@dataclass(frozen=True)
class Counted:
    """What one server counted between the first and the last of some pages."""

    server: str  # the engine that wrote them
    target: str | None  # the model_name of the counters
    engines: int  # whose counters are added up
    sums: Mapping[str, float]  # see `sums_of`
    windows: tuple[Mapping[str, float], ...]  # the same between a page and the next
    reset: tuple[str, ...]  # sources that were reset between the pages, and count from then on


def counted(pages: Sequence[Page], where: str, labels: Sequence[str] = ()) -> Counted:
    """Return what happened between the first and the last of some pages (of one page: since the start) at the server that
    `labels` (NAME=VALUE, several values of one name together) choose; `where` the pages are from, for messages. Raises
    `OptionInvalid`, and `DataUnreadable` for pages of several servers, or not of one run of a server.
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
    rose = [key for key, rise in rises.items() if rise > 0 and key[1] not in GAUGES]
    if asked and not rose:
        known = {f"{name}={value_of(key, name)}" for page in pages for key in page for name in (*APART, *dict(key[2]))}
        raise OptionInvalid(
            "nothing that was counted has these labels", f"the pages have {cut(', '.join(sorted(known)), 300)}"
        )
    for name in APART:
        values = sorted({value_of(key, name) for key in rose})
        if len(values) > 1 and name not in asked:
            number = f"{len(values)} {name.removesuffix('_name').replace('_', ' ')}s"
            raise DataUnreadable(
                f"{where} counts {number}: {cut(', '.join(values))}",
                f"choose one, or name several: --label {name}={values[0]}",
            )
    page = {key: rise for key, rise in rises.items() if not rose or key[0] == rose[0][0]}
    return Counted(
        server=SERVERS[min(engine for engine, _, _ in page)],
        target=next((value_of(key, "model_name") for key in rose), "") or None,
        engines=len({dict(key[2]).get("engine") for key in page}),
        sums=sums_of(page),
        windows=tuple(sums_of(rises_between(*map(chosen, pair))[0]) for pair in pairwise(pages)),
        reset=tuple(sorted(" ".join(value for _, value in labels) or "the server" for labels in reset)),
    )


def sums_of(page: Page) -> dict[str, float]:
    """Return the counters over engines, by name, and by position or bound behind it: "position 0", "gap_bucket 0.1". Of
    gauges the largest.
    """
    sums = defaultdict[str, float](float)
    for key, value in page.items():
        full = " ".join(filter(None, (key[1], *(value_of(key, name) for name in IN_SOURCE))))
        sums[full] = max(sums[full], value) if key[1] in GAUGES else sums[full] + value
    return dict(sums)


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


def rounds_of(found: Counted, where: str, most: int | None = None) -> CountedRounds | None:
    """Return the rounds that counters tell; None without a draft. `most`: tokens that a round drafts, if nothing tells.

    Raises `DataUnreadable` for counts that contradict each other, and `ColumnMissing` for a page with averages alone.
    """
    sums, kind = found.sums, next(kind for kind, name in SERVERS.items() if name == found.server)
    if not {"rounds", "emitted", "drafted", "accepted"} & sums.keys():
        if sums.get("length"):
            raise ColumnMissing(
                f"{where} does not count rounds: {found.server} averages its last steps, and has no {ROUNDS[kind]}",
                "update SGLang, or import logged requests: alphaprof import FILE",
            )
        return None
    rounds, accepted, drafted = sums.get("rounds"), sums.get("accepted", 0.0), sums.get("drafted")
    every = rounds is None and "emitted" in sums
    if every:  # each emits one token more than it accepts
        rounds = sums["emitted"] - accepted
    if not rounds and not drafted:
        return None
    if kind == "sglang":  # which counts no accepted tokens: prefill writes the first of a request
        accepted = sums.get("written", 0.0) - sums.get("requests", 0.0) - (rounds or 0.0)
    number = sum(name.startswith("position ") for name in sums)
    gamma = max(number, int(sums.get("steps", 0.0)))
    if rounds and not (number if kind == "vllm" else every):  # vLLM counts all positions; else some draft nothing
        gamma = max(gamma, math.ceil(min((drafted or 0.0) / rounds, MOST) - 1e-9))
    gamma = gamma or most or 0
    # A position that never occurred may be missing.
    places = [sums.get(f"position {place}", 0.0) for place in range(gamma if number else 0)]
    least = SLACK * rounds if rounds is not None else math.inf
    falls = all(later <= SLACK * earlier for earlier, later in pairwise((least, *places)))
    placed = not places or math.isclose(sum(places), accepted, rel_tol=SLACK - 1, abs_tol=0.5)
    limit = SLACK * gamma * rounds if gamma and rounds else math.inf  # tokens that these rounds can have drafted
    if not falls or not placed or not 0 <= accepted <= SLACK * (drafted or limit) or (drafted or 0) > limit:
        words = "" if drafted is None else f"drafted {drafted:.0f} tokens and "
        counts = "drafts" if rounds is None else f"{rounds:.0f} rounds"
        problem = f"{where}: {counts} {words}accepted {accepted:.0f}, by position {[round(each) for each in places[:8]]}"
        raise DataUnreadable(f"{problem}: these counts contradict each other", "save both pages while no request is running")
    full = drafted == gamma * (rounds or 0.0)  # every round drafted gamma tokens
    conditional = [
        later / earlier if earlier and (full or depth == 0) else None
        for depth, (earlier, later) in enumerate(pairwise((rounds or 0.0, *places)))
    ]
    return CountedRounds(
        gamma=gamma or None,
        drafts=round(rounds) if rounds is not None else None,
        drafted=None if drafted is None else round(drafted),
        accepted=round(accepted),
        accepted_per_drafted=accepted / drafted if drafted else None,
        acceptance_length=1 + accepted / rounds if rounds else None,
        marginal=tuple(place / rounds for place in places) if rounds else (),
        conditional=tuple(conditional),
        every=every and kind != "vllm",
        missing=ROUNDS.get(kind) if rounds is None else None,
    )


def times_of(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return times in ms by name, on average and at quantiles, and what fills the KV cache; None: a page does not tell."""
    decoded = sums.get("written", 0.0) - (sums.get("first_count") or sums.get("requests", 0.0))  # after the first tokens
    times: dict[str, float | None] = {GAP: 1e3 * sums.get("gap_sum", 0.0) / decoded if decoded > 0 else None}
    for about, name in (("ms between outputs", "gap"), ("ms to the first token", "first")):
        bounds = sorted((float(key.split()[1]), n) for key, n in sums.items() if key.startswith(f"{name}_bucket "))
        times |= {f"{about}, p{100 * share:.0f}": bucket_quantile(bounds, share) for share in (0.5, 0.99)}
    asked = sums.get("asked") or sums.get("read")
    hits = sums["cached"] / asked if asked and "cached" in sums else sums.get("hit_rate")
    firsts = sums.get("first_count") if "first_sum" in sums else None
    return times | {
        "ms to the first token, mean": 1e3 * sums["first_sum"] / firsts if firsts else None,
        "prefix-cache hits, %": None if hits is None else 100 * hits,
        "KV cache, tokens": sums.get("slots"),
        "KV cache in use now, %": 100 * sums["used"] if "used" in sums else None,
        "preemptions": sums.get("preempted"),
    }


def bucket_quantile(bounds: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile in ms of cumulative counts up to bounds in s, evenly spread inside a bucket; None: not known."""
    highs, counts = np.array([(0.0, 0.0), *bounds]).T
    with np.errstate(invalid="ignore"):
        seconds = float(np.interp(share * counts[-1], counts, highs))
    return 1e3 * seconds if counts[-1] and math.isfinite(seconds) else None


def traffic_of(counts: Counted, seconds: float | None) -> ServerTraffic | None:
    """Return what a server did in `seconds`; None if it does not count steps."""
    sums = counts.sums
    if "gap_count" not in sums:
        return None

    def mean(found: Mapping[str, float], name: str, scale: float = 1.0) -> float | None:
        total, count = found.get(f"{name}_sum", 0.0), found.get(f"{name}_count", 0.0)
        return scale * total / count if count else None

    steps, gaps, firsts = (sums.get(name, 0.0) for name in ("iterations", "gap_count", "first_count"))
    known = [each for each in (mean(window, "gap", 1e3) for window in counts.windows) if each is not None]
    return ServerTraffic(
        seconds=seconds,
        requests=int(sums.get("ended_count", sums.get("requests", 0.0))),
        prompt_tokens=sums["prompt"] / sums["requests"] if "prompt" in sums and sums.get("requests") else None,
        written_tokens=mean(sums, "ended"),
        steps=int(steps) if steps else None,
        sequences=(gaps + firsts) / steps if steps else None,
        step_ms=mean(sums, "gap", 1e3),
        slowest_ms=(min(known), max(known)) if len(known) > 1 else None,
        tokens_per_step=(sums.get("written", 0.0) - firsts) / gaps if gaps else None,
        first_token_ms=mean(sums, "first", 1e3),
        queue_ms=mean(sums, "queue", 1e3),
    )
