"""vLLM as a server on an address: it writes texts, and its /metrics page says what traffic it has."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaprof.errors import TEXT, ColumnMissing, DataUnreadable, EngineFailed, cut, shown

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from alphaprof.config.options import VllmOptions

KEY = "VLLM_API_KEY"  # the environment variable that `vllm serve` reads as well
WRITTEN_S, ANSWER_S = 3600, 30  # seconds after which a request for a text, and any other one, has failed
SPECULATION = "vllm:spec_decode_num_"
# Histograms of which sum and count are read.
STEPS, GAP, FIRST = "vllm:iteration_tokens", "vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"
PROMPT, WRITTEN, WAITED = "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_queue_time_seconds"
TOKENS = "vllm:generation_tokens"
PREFIXES = (SPECULATION, STEPS, GAP, FIRST, PROMPT, WRITTEN, WAITED, TOKENS)
EVERY_S = 5  # between two readings of a server
Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a counter, or of the time at which it was created
Page = Mapping[Key, float]
Prompt = Mapping[str, Any]  # ids, max_tokens, and settings of vLLM's SamplingParams
SAVE = "curl -s SERVER/metrics"


class VllmServer:
    """A vLLM server on an address. The key of `VLLM_API_KEY`, if there is one, goes with every request."""

    def __init__(self, options: VllmOptions, url: str) -> None:
        self.url = _root(url)
        served = [str(each["id"]) for each in answer_of(self.url, "/v1/models").get("data", ())]
        self.model = options.model or (served[0] if len(served) == 1 else "")
        if self.model not in served:
            hint = f"set vllm.model to one of: {cut(', '.join(served))}"
            raise EngineFailed(f"{self.url} serves {len(served)} models, and vllm.model is {shown(options.model)}", hint)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens. Raises `EngineFailed`."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(answer_of(self.url, "/tokenize", asked).get("tokens", ()))

    def write(self, prompts: Sequence[Prompt], concurrency: int) -> Iterator[dict[str, Any]]:
        """Yield the texts of prompts, in order: `place` and `ids`. Raises `EngineFailed`."""
        with ThreadPoolExecutor(concurrency) as threads:
            yield from threads.map(self._written, range(len(prompts)), prompts)

    def _written(self, place: int, prompt: Prompt) -> dict[str, Any]:
        asked = {"temperature": 0.0, "repetition_penalty": 1.0, **prompt, "model": self.model, "return_token_ids": True}
        answer = answer_of(self.url, "/v1/completions", asked | {"prompt": asked.pop("ids")}, WRITTEN_S)
        choice = answer["choices"][0]
        if not choice.get("token_ids"):
            hint = "use vLLM 0.10.2 or later, whose completions have return_token_ids"
            raise EngineFailed(f"{self.url} answers without token ids", hint)
        return {"place": place, "ids": choice["token_ids"]}

    def close(self) -> None:
        """Leave the server as it is."""


def server_version(url: str) -> str:
    """Return the version of vLLM on a server. Raises `EngineFailed`."""
    return str(answer_of(url, "/version").get("version", "unknown"))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def answer_of(url: str, path: str, content: Mapping[str, Any] | None = None, seconds: float = ANSWER_S) -> dict[str, Any]:
    """Return what a server answers to a path, and to JSON `content` if there is any. Raises `EngineFailed`."""
    try:
        answer = json.loads(fetched(url, path, content, seconds))
    except ValueError as error:
        problem = f"{url} answers {path} with invalid JSON: {error}"
        raise EngineFailed(problem, "give the address of a vLLM server") from None
    return answer if isinstance(answer, dict) else {}


def fetched(url: str, path: str, content: Mapping[str, Any] | None = None, seconds: float = ANSWER_S) -> bytes:
    """Return what a server answers to a path, and to JSON `content` if there is any, as bytes. Raises `EngineFailed`."""
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(_root(url) + path, body, {"Content-Type": "application/json"})  # noqa: S310
    if key := os.environ.get(KEY):
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310 - options admit http alone
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = cut(error.read(TEXT).decode(errors="replace"))
        hint = f"set {KEY} to the server's key" if error.code in (401, 403) else "see the server's log"
        raise EngineFailed(f"{url} answers {path} with {error.code}: {said}", hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineFailed(f"{url} does not answer: {reason}", "start the server, or correct the address") from None


def samples_of(content: bytes, where: str) -> list[Sample]:
    """Return the samples of a page of metrics. Raises `DataUnreadable`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return [sample for family in text_string_to_metric_families(content.decode()) for sample in family.samples]
    except (ValueError, IndexError) as error:  # the parser has no errors of its own
        problem = f"{where} is not a metrics page: {shown(str(error))}"
        raise DataUnreadable(problem, f"save the page in Prometheus' text format, as UTF-8: {SAVE}") from None


def read_page(content: bytes, where: str) -> Page:
    """Return the counters of a page. Raises `DataUnreadable`, and `ColumnMissing` if it has none of vLLM's."""
    samples = [sample for sample in samples_of(content, where) if sample.name.startswith(PREFIXES)]
    kept = [sample for sample in samples if not sample.name.endswith("_bucket")]
    if not kept:
        problem = f"{where} has no counter of vLLM, such as {GAP}_count"
        raise ColumnMissing(problem, f"save it from a vLLM that keeps statistics: {SAVE}")
    names = ((sample.name.removesuffix("_total").replace("_total_", "_"), sample) for sample in kept)
    return {(name, tuple(sorted(sample.labels.items()))): sample.value for name, sample in names}


def saved_page(path: Path) -> bytes:
    """Return a saved page. Raises `DataUnreadable`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataUnreadable(f"cannot read {cut(str(path))}: {error.strerror}", f"save the page: {SAVE}") from None


def read_saved(path: Path) -> Page:
    """Return the counters of a saved page. Raises as `read_page` does."""
    return read_page(saved_page(path), cut(str(path)))


def rises_between(first: Page, second: Page) -> Counter[Key]:
    """Return how far counters rose between two pages. Raises `DataUnreadable` unless one server went on between them."""
    rises: Counter[Key] = Counter()
    for key in [*first, *second]:
        old, new = first.get(key), second.get(key)
        created = key[0].endswith("_created")
        if old is None or new is None or not new >= old or (created and new != old):
            labels = ", ".join(f"{label} {shown(value)}" for label, value in key[1][:3])
            problem = f"{key[0]} of {labels} is {old} first, then {new}: the pages are not from one server run"
            hint = "check the order of the files; if the server restarted in between, save both pages again"
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


def watch(url: str, seconds: float, tick: Callable[[float], None]) -> tuple[list[Page], float]:
    """Return pages of a server over some seconds, and how far apart the first and the last are; `tick`: called
    with the seconds since it was called last. Raises `EngineFailed`.
    """
    pages, began, moments = list[Page](), time.monotonic(), list[float]()
    while True:
        pages.append(read_page(fetched(url, "/metrics"), url))
        moments.append(time.monotonic())
        left = began + seconds - moments[-1]
        if left <= 0:
            return pages, moments[-1] - moments[0]
        time.sleep(min(EVERY_S, left))
        tick(min(EVERY_S, left))


def traffic_between(pages: Sequence[Page], seconds: float | None) -> ServerTraffic | None:
    """Return what a server did from the first to the last of some pages, `seconds` apart; None if they do not count steps.
    Raises `DataUnreadable`.
    """
    sums: Counter[str] = Counter()  # over engines
    for (name, _), rise in rises_between(pages[0], pages[-1]).items():
        sums[name] += rise
    if f"{STEPS}_count" not in sums:
        return None
    windows = [_step_ms(rises_between(*each)) for each in pairwise(pages)]

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


def _step_ms(rises: Mapping[Key, float]) -> float | None:
    total, steps = (sum(rise for (name, _), rise in rises.items() if name == f"{GAP}_{end}") for end in ("sum", "count"))
    return 1e3 * total / steps if steps else None
