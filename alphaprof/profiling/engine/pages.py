"""What engines counted, as they write it: metrics pages, logs of servers, answers, results of benchmarks.

A `Page` is what both kinds come down to. Counters of a metrics page grow from a server's start on, so two pages count what
happened between them; what logs and results count stands for itself. Names are those of the engines' sources (`NAMES`,
`FORMATS`).
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import json
import math
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphaprof.errors import ColumnMissing, DataUnreadable, OptionInvalid, cut, shown
from alphaprof.profiling.engine.server import fetched

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, str, Labels]  # engine (a key of SERVERS), name (a value of NAMES) and labels
Page = dict[Key, float]
SAVE = "curl -s SERVER/metrics"
FIRST_LOOK = "take a first look at its sums: alphaprof import prometheus FILE"
GZIP = b"\x1f\x8b"  # how a compressed file begins
EVERY_S = 5  # between two readings of a server
SERVERS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "trtllm": "TensorRT-LLM",
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
    **{f"{theirs}_{end}": f"{ours}_{end}" for theirs, ours in HISTOGRAMS.items() for end in ("sum", "count", "bucket")},
}
GAP = "ms between tokens"
GAUGES = ("steps", "length")
MOST = 1000  # drafts of a round; counts of more contradict each other
ADDRESS = ("http://", "https://")
IN_SOURCE = ("position", "le")  # labels within one source of counters
# Labels that tell servers apart, the kind of engine first; a federation may rename two. Engines of one server are added up.
APART = ("kind", "model_name", "job", "instance", "exported_job", "exported_instance")


@dataclass(frozen=True)
class Format:
    """A kind of file. `sign` matches a line that counts; its groups are names of pages, and `rates` (accepted at each depth,
    as shares of rounds), `rejected` and `answered` (tokens of one answer, whose first is of no round). `next`: what
    to do with a kind that is recognized and not read.
    """

    engine: str
    about: str
    sign: str
    next: str = ""


NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
NUMBERS = rf"{NUMBER}(?:, *{NUMBER})*"


def _fields(**names: str) -> str:
    """Match JSON fields, or those of a dictionary as Python prints it, in any order."""
    return "".join(f"(?=.*[\"']{name}[\"']: *(?P<{group}>{NUMBER}))" for group, name in names.items())


BENCH = _fields(rounds="spec_decode_num_drafts", drafted="spec_decode_draft_tokens", accepted="spec_decode_accepted_tokens")
LLAMA = _fields(drafted="draft_n", accepted="draft_n_accepted", emitted="predicted_n")
USAGE = _fields(accepted="accepted_prediction_tokens", rejected="rejected_prediction_tokens", answered="completion_tokens")
RUNNING = "the log of a vLLM server (engine V0)"  # whose lines count from the start of the server
NOT_READ = "take the counts where they come from: a metrics page, or logged answers (docs/import.md)"
FORMATS = (
    Format(
        "vllm",
        "the log of a vLLM server",
        r"(?>.*?SpecDecoding metrics: )(?>.*?Accepted: )(?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens"
        rf"(?:, Per-position acceptance rate: (?P<rates>{NUMBERS}))?",
    ),
    Format(
        "vllm",
        RUNNING,
        r"(?>.*?speculative tokens: )(?P<steps>\d+), (?>.*?accepted tokens: )(?P<accepted>\d+), (?>.*?draft tokens: )"
        r"(?P<drafted>\d+), (?>.*?emitted tokens: )(?P<emitted>\d+)",
    ),
    Format(
        "vllm",
        "a result of vllm bench serve",
        BENCH + rf'(?:.*"spec_decode_per_position_acceptance_rates": *\[(?P<rates>{NUMBERS})\])?',
    ),
    Format("vllm", "an answer of vLLM", '.*"acceptance_histogram"', "import it: alphaprof import vllm FILE"),
    Format(
        "llamacpp",
        "the log of a llama.cpp server",
        r"(?>.*?draft acceptance(?: rate)? = )[\d.]+ \( *(?P<accepted>\d+) accepted / *(?P<drafted>\d+) generated\)"
        rf"(?:.*acceptance rate per position = \((?P<rates>{NUMBERS})\))?",
    ),
    Format("llamacpp", "an answer with timings of llama.cpp", LLAMA + r'(?:.*"draft_rounds": *(?P<rounds>\d+))?'),
    Format(
        "sglang",
        "an answer of SGLang",
        ".*[\"']spec_(correct_drafts|accept)_histogram[\"']",
        "import it: alphaprof import sglang FILE; of a server's log, its metrics page",
    ),
    Format(
        "sglang",
        "an answer of an older SGLang, or its server's log",
        _fields(rounds="spec_verify_ct", written="completion_tokens"),
    ),
    Format(
        "sglang",
        "the log of an SGLang server, whose lines are averages",
        ".*accept len: ",
        "give its metrics page, or logged answers: alphaprof import sglang FILE",
    ),
    Format(
        "trtllm",
        "a performance record of TensorRT-LLM",
        _fields(drafted="total_draft_tokens", accepted="total_accepted_draft_tokens"),
    ),
    Format(
        "openai",
        "an answer with counts of predicted tokens, as of tabbyAPI",
        r'(?=.*"(?:accepted|rejected)_prediction_tokens": *[1-9])' + USAGE,
    ),
    Format("", "a report of guidellm", '.*"guidellm_version"', NOT_READ),
    Format("", "an export of aiperf", '.*"output_sequence_length"', NOT_READ),
    Format("", "an acceptance table of speculators", ".*num_drafts,num_draft_tokens,num_accepted_tokens", NOT_READ),
)


COUNTS = re.compile("[Aa]ccept|draft|spec_|guidellm|output_sequence")  # part of every sign, and of few lines of a log


def format_of(text: str) -> Format | None:
    """Return the kind of file that a line is of; None: none that is known."""
    return next((each for each in FORMATS if re.match(each.sign, text)), None) if COUNTS.search(text) else None


def sums_in(content: bytes, where: str) -> Page | None:
    """Return what the lines of a log, of answers or of a result add up to; None if none is of a known kind. Raises
    `DataUnreadable` for a kind that is not read.
    """
    lines: Iterable[str] = (line.decode(errors="replace") for line in io.BytesIO(content))  # a log may be large
    if content.lstrip()[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError, RecursionError):  # one text, over several lines
            whole = json.loads(content)
            lines = [json.dumps(each) for each in (whole if isinstance(whole, list) else [whole])]
    page: Page = {}
    named: Format | None = None
    for line in lines:
        if (found := format_of(line)) is None:
            continue
        if found.next:
            named = named or found
            continue
        for (name, position), count in _counted(re.match(found.sign, line)).items():
            key = (found.engine, name, (("position", str(position)),) if name == "position" else ())
            page[key] = count if found.about == RUNNING or name in GAUGES else page.get(key, 0.0) + count
    if named is not None and not page:
        raise DataUnreadable(f"{where}: this is {named.about}", named.next.replace("FILE", where))
    return page or None


def _counted(match: re.Match[str] | None) -> dict[tuple[str, int], float]:
    """Return what a line counts, by name and position. Rounds follow from the shares that are rounded to three digits, and
    are those that drafted all tokens where that agrees.
    """
    named = {name: part for name, part in match.groupdict().items() if part} if match else {}
    counts = {name: float(part) for name, part in named.items() if name != "rates"}
    if "rejected" in counts:
        counts["drafted"] = counts["accepted"] + counts.pop("rejected")
    if "answered" in counts:
        counts["emitted"] = counts.pop("answered") - 1
    if "written" in counts:
        counts["requests"] = 1.0
    rates = [float(each) for each in named["rates"].split(",")] if "rates" in named else []
    if rates:
        full = counts["drafted"] / len(rates)
        near = counts["accepted"] / sum(rates) if any(rates) else full
        alike = full.is_integer() and abs(full - near) < 1 + 0.01 * near
        counts.setdefault("rounds", full if alike else float(max(round(near), math.ceil(full))))
    shares = [rate / sum(rates) if any(rates) else 0.0 for rate in rates]
    placed = {("position", place): counts["accepted"] * share for place, share in enumerate(shares)}
    return {(name, 0): count for name, count in counts.items()} | placed


def page_of(content: bytes, where: str, alone: bool = True) -> Page:
    """Return the counters of a metrics page, or the sums of another file, which stands `alone`. Raises `DataUnreadable`,
    `OptionInvalid`, and `ColumnMissing` if nothing is counted.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        content = gzip.decompress(content) if content.startswith(GZIP) else content
        content = content.removeprefix(codecs.BOM_UTF8)
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnreadable(f"{where} is compressed, and damaged: {error}", "copy it again") from None
    if sums := sums_in(content, where):
        if not alone:
            raise OptionInvalid(f"{where} is no metrics page, and counts for itself", "give one such file, alone")
        return sums
    if content.lstrip()[:1] in (b"{", b"["):
        hint = "import it first (alphaprof import vllm REQUESTS.jsonl --rule strict --out RUN), and give that RUN"
        raise DataUnreadable(f"{where} holds JSON, not a metrics page", hint)
    found: Page = {}
    try:
        families = text_string_to_metric_families(content.decode())
        for sample in itertools.chain.from_iterable(family.samples for family in families):
            named = SERIES.match(sample.name) if math.isfinite(sample.value) else None
            if named and (name := NAMES.get(named[2])):
                float(sample.labels.get("le", 0.0))  # raises for a bound that is no number
                found[named[1], f"{name} created" if named[3] else name, tuple(sorted(sample.labels.items()))] = sample.value
    except (ValueError, IndexError) as error:  # the parser has no errors of its own
        problem = f"{where} is not a metrics page: {shown(str(error))}"
        raise DataUnreadable(problem, f"save the page in Prometheus' text format, as UTF-8: {SAVE}") from None
    if not found:
        raise ColumnMissing(f"{where} has no counter of vLLM, SGLang or llama.cpp", f"save its page: {SAVE}")
    return found


def read_pages(places: Sequence[str]) -> list[Page]:
    """Return the pages of an address or of one or two files. Raises as `page_of` does, and `EngineFailed`."""
    if len(places) > 2:
        raise OptionInvalid(f"expected an address, or 1 or 2 pages, got {len(places)}", "give those before and after")
    contents = list[bytes]()
    for place in places:
        try:
            contents.append(fetched(place, "/metrics") if place.startswith(ADDRESS) else Path(place).read_bytes())
        except OSError as error:
            raise DataUnreadable(f"cannot read {cut(place)}: {error.strerror}", f"save the page: {SAVE}") from None
    return [page_of(each, cut(place), len(places) == 1) for each, place in zip(contents, places, strict=True)]


def read(places: Sequence[str]) -> tuple[Page, set[Labels]]:
    """Return what `rises_between` does, of one page since the start. Raises as `read_pages` does."""
    return rises_between(*([{}, *read_pages(places)][-2:]))


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


def watch(url: str, seconds: float, tick: Callable[[float], None]) -> tuple[list[Page], float]:
    """Return pages of a server over some seconds, and how far apart the first and the last are; `tick`: called
    with the seconds since it was called last. Raises `EngineFailed`.
    """
    pages, began, moments = list[Page](), time.monotonic(), list[float]()
    while True:
        pages.append(page_of(fetched(url, "/metrics"), url))
        moments.append(time.monotonic())
        left = began + seconds - moments[-1]
        if left <= 0:
            return pages, moments[-1] - moments[0]
        time.sleep(min(EVERY_S, left))
        tick(min(EVERY_S, left))


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


def server_of(page: Page) -> str:
    """Return the name of the engine that wrote a page."""
    return SERVERS[min(engine for engine, _, _ in page)]


def value_of(key: Key, name: str) -> str:
    """Return the value of a label of a counter, or its `kind` of engine; empty if it does not say."""
    return key[0] if name == "kind" else dict(key[2]).get(name, "")


def require_one_server(keys: Iterable[Key], where: str, hint: str, chosen: Container[str] = ()) -> None:
    """Raise `DataUnreadable` if counters are those of several servers, by labels that are not `chosen`."""
    keys = list(keys)
    for name in APART:
        values = sorted({value_of(key, name) for key in keys})
        if len(values) > 1 and name not in chosen:
            number = f"{len(values)} {name.removesuffix('_name').replace('_', ' ')}s"
            raise DataUnreadable(f"{where} {number}: {cut(', '.join(values))}", hint.format(name, values[0]))


def sums_of(page: Page, model: str | None = None) -> defaultdict[str, float]:
    """Return the counters of one model (None: of all) over engines, by name, and by position or bound behind it: "position
    0", "gap_bucket 0.1". Of gauges the largest.
    """
    sums = defaultdict[str, float](float)
    for key, value in page.items():
        if model in (None, value_of(key, "model_name")):
            full = " ".join(filter(None, (key[1], *(value_of(key, name) for name in IN_SOURCE))))
            sums[full] = max(sums[full], value) if key[1] in GAUGES else sums[full] + value
    return sums


def rounds_in(sums: Mapping[str, float], engine: str) -> tuple[float | None, float, int | None, list[float]]:
    """Return the rounds that an engine's counters tell (None: nothing does), accepted drafts, the most that a round drafts
    (None: unknown), and the rounds that accepted the first 1, 2, ... drafts (empty: not counted by depth).
    """
    rounds, accepted, places = sums.get("rounds"), sums.get("accepted", 0.0), list[float]()
    every = rounds is None and "emitted" in sums
    if every:  # each emits one token more than it accepts
        rounds = sums["emitted"] - accepted
    if engine == "sglang":  # which counts no accepted tokens: prefill writes the first of a request
        accepted = sums.get("written", 0.0) - sums.get("requests", 0.0) - (rounds or 0.0)
    number = sum(name.startswith("position ") for name in sums)
    gamma = max(number, int(sums.get("steps", 0.0)))
    if rounds and not (number if engine == "vllm" else every):  # vLLM counts all positions; else some draft nothing
        gamma = max(gamma, math.ceil(min(sums.get("drafted", 0.0) / rounds, MOST) - 1e-9))
    if number:  # a position that never occurred may be missing
        places = [sums.get(f"position {place}", 0.0) for place in range(gamma)]
    return rounds, accepted, gamma or None, places


def times_of(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return times in ms by name, on average and at quantiles; None: a page does not tell."""
    decoded = sums.get("written", 0.0) - (sums.get("first_count") or sums.get("requests", 0.0))  # after the first tokens
    times: dict[str, float | None] = {GAP: 1e3 * sums.get("gap_sum", 0.0) / decoded if decoded > 0 else None}
    for about, name in (("ms between outputs", "gap"), ("ms to the first token", "first")):
        bounds = sorted((float(key.split()[1]), n) for key, n in sums.items() if key.startswith(f"{name}_bucket "))
        times |= {f"{about}, p{100 * share:.0f}": bucket_quantile(bounds, share) for share in (0.5, 0.99)}
    return times


def bucket_quantile(bounds: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile in ms of cumulative counts up to bounds in s, evenly spread inside a bucket; None: not known."""
    highs, counts = np.array([(0.0, 0.0), *bounds]).T
    with np.errstate(invalid="ignore"):
        seconds = float(np.interp(share * counts[-1], counts, highs))
    return 1e3 * seconds if counts[-1] and math.isfinite(seconds) else None


def traffic_of(page: Page, windows: Sequence[Page], seconds: float | None) -> ServerTraffic | None:
    """Return what a server did in `seconds`, and in the `windows` that they are made of; None if it does not count steps."""
    sums = sums_of(page)
    if "gap_count" not in sums:
        return None

    def mean(found: Mapping[str, float], name: str, scale: float = 1.0) -> float | None:
        total, count = found.get(f"{name}_sum", 0.0), found.get(f"{name}_count", 0.0)
        return scale * total / count if count else None

    steps, gaps, firsts = (sums.get(name, 0.0) for name in ("iterations", "gap_count", "first_count"))
    known = [each for each in (mean(sums_of(window), "gap", 1e3) for window in windows) if each is not None]
    return ServerTraffic(
        seconds=seconds,
        requests=int(sums.get("ended_count", sums.get("requests", 0.0))),
        prompt_tokens=sums["prompt"] / sums["requests"] if "prompt" in sums and sums["requests"] else None,
        written_tokens=mean(sums, "ended"),
        steps=int(steps) if steps else None,
        sequences=(gaps + firsts) / steps if steps else None,
        step_ms=mean(sums, "gap", 1e3),
        slowest_ms=(min(known), max(known)) if len(known) > 1 else None,
        tokens_per_step=(sums.get("written", 0.0) - firsts) / gaps if gaps else None,
        first_token_ms=mean(sums, "first", 1e3),
        queue_ms=mean(sums, "queue", 1e3),
    )
