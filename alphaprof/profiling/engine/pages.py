"""Metrics pages of vLLM, SGLang and llama.cpp: their counters under one name each, and the times that users feel."""

from __future__ import annotations

import gzip
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from alphaprof.errors import ColumnMissing, DataUnreadable, OptionInvalid, cut
from alphaprof.profiling.engine.server import SAVE, fetched, samples_of, saved_page

# What pages call what: vLLM's engines V1 and V0, llama.cpp, SGLang; Ray has names of its own for vLLM's.
SERIES = re.compile(r"(?:ray_)?(vllm|sglang|llamacpp)[:_](\w+?)(?:_total)?(_created)?$")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
NAMES = {
    "spec_decode_num_drafts": "rounds",
    "spec_verify_calls": "rounds",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
    "spec_decode_num_accepted_tokens_per_pos": "position",
    "spec_decode_num_emitted_tokens": "emitted",
    "spec_num_steps": "steps",
    "generation_tokens": "written",
    "tokens_predicted": "written",
    "tokens_predicted_seconds": "gap_sum",
    "request_prompt_tokens_sum": "prompt",
    "prompt_tokens_histogram_sum": "prompt",
    "request_prompt_tokens_count": "requests",
    "num_requests": "requests",
    **{f"inter_token_latency_seconds_{end}": f"gap_{end}" for end in ("sum", "bucket")},
    **{f"time_to_first_token_seconds_{end}": f"first_{end}" for end in ("count", "bucket")},
}
GAP = "ms between tokens"
Labels = tuple[tuple[str, str], ...]
Page = dict[tuple[str, str, Labels], float]  # by engine, name (a value of NAMES) and labels


def read(places: Sequence[str]) -> Page:
    """Return the counters of one page, or how far they rose to the second of two; what fell was reset, and counts from 0, as
    what the first lacks does. Raises `DataUnreadable`, `ColumnMissing` and `EngineFailed`.
    """
    if len(places) > 2:
        raise OptionInvalid(f"expected an address, or 1 or 2 pages, got {len(places)}", "give those before and after")
    pages = []
    for place in places:
        content = fetched(place, "/metrics") if place.startswith("http") else saved_page(Path(place))
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        if content.lstrip()[:1] in (b"{", b"["):
            hint = "import it first (alphaprof import vllm REQUESTS.jsonl --rule strict --out RUN), and give that RUN"
            raise DataUnreadable(f"{cut(place)} holds JSON, not a metrics page", hint)
        found: Page = {}
        for sample in samples_of(content, cut(place)):
            if (named := SERIES.match(sample.name)) and (name := NAMES.get(named[2])):
                found[named[1], f"{name} created" if named[3] else name, tuple(sorted(sample.labels.items()))] = sample.value
        if not found:
            raise ColumnMissing(f"{cut(place)} has no counter of vLLM, SGLang or llama.cpp", f"save its page: {SAVE}")
        pages.append(found)
    first, second = pages if len(pages) > 1 else ({}, pages[0])

    def source(labels: Labels) -> Labels:
        return tuple(label for label in labels if label[0] not in ("position", "le"))

    reset = {  # also if it has counted more since than before
        source(key[2])
        for key, value in first.items()
        if second.get(key, value) < value or (key[1].endswith(" created") and second.get(key) != value)
    }
    kept = {key: 0.0 if key[1] == "steps" or source(key[2]) in reset else value for key, value in first.items()}
    return {key: value - kept.get(key, 0.0) for key, value in second.items() if not key[1].endswith(" created")}


def engine_of(page: Page) -> str:
    """Return the name of the engine of a page."""
    return ENGINES[min(engine for engine, _, _ in page)]


def model_of(labels: Labels) -> str:
    """Return the model that a counter belongs to; empty if it does not say."""
    return dict(labels).get("model_name", "")


def sums_of(page: Page, model: str | None = None) -> defaultdict[str, float]:
    """Return the counters of one model (None: of all) over engines, by name, and by position or bound behind it: "position
    0", "gap_bucket 0.1". `steps` is a setting, and the largest.
    """
    sums = defaultdict[str, float](float)
    for (_, name, labels), value in page.items():
        if model in (None, model_of(labels)):
            about = dict(labels)
            full = " ".join(filter(None, (name, about.get("position"), about.get("le"))))
            sums[full] = max(sums[full], value) if name == "steps" else sums[full] + value
    return sums


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
