"""One request as vLLM logs its speculative decoding: its fields, what must hold between them, and the rounds they tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.commands.importing.lines import AGREE, MERGE, LeftOut, Line
from alphaprof.errors import ColumnMissing, cut, shown

Array = np.ndarray[Any, Any]
BY_LENGTH, BY_STEP = "acceptance_histogram_by_draft_length", ("per_step_accepted", "per_step_drafted")
METRICS = ("speculative_decoding", "spec_decode_metrics")
MOST_DRAFTED = 64  # tokens in one round
ENDED = {"stop": "eos", "tool_calls": "eos", "function_call": "eos", "length": "length"}
ACCEPTED = ("num_accepted_draft_tokens", "num_accepted_tokens")  # vLLM's name first
DERIVED = ("mean_acceptance_length", "draft_acceptance_rate")  # they follow from the others
COUNTS = ("acceptance_histogram", "num_spec_steps", "num_draft_tokens", "num_spec_tokens")
STREAMED = ("chat.completion.chunk", "text_completion")  # chunks of /v1/completions are called as its answers are
QUOTED = 160  # characters of an engine's error that a message repeats
READ = frozenset((*COUNTS, *ACCEPTED, BY_LENGTH, *BY_STEP, *DERIVED))


def _joint(metrics: Line, histogram: Array, drafted: int) -> Array:
    """Rounds by drafted and by accepted tokens, [gamma + 1, gamma + 1]. Raises `LeftOut` where the metrics do not tell."""
    given = [rounds for rounds in (_by_length(metrics, histogram), _by_step(metrics, histogram)) if rounds is not None]
    size = len(histogram)
    for rounds in given:
        total, kept = int((np.arange(size)[:, None] * rounds).sum()), rounds.sum(0)
        if total != drafted or not np.array_equal(kept, histogram) or not np.array_equal(rounds, given[0]):
            problem = f"num_draft_tokens is {drafted} and the histogram {histogram.tolist()}; by round they are {total} and "
            raise metrics.refuse(f"{problem}{kept.tolist()}", AGREE)
    if given:
        return given[0]
    joint = np.zeros((size, size), dtype=np.int64)
    if drafted == histogram.sum() * (size - 1):  # every round drafted gamma tokens
        joint[-1] = histogram
    elif drafted == (np.arange(size) * histogram).sum():  # none drafted more than it accepted
        joint[np.arange(size), np.arange(size)] = histogram
    elif size == 2:
        joint[1] = drafted - histogram[1], histogram[1]
        joint[0, 0] = histogram.sum() - drafted
    else:
        lacking = [name for name in BY_STEP if metrics.fields.get(name) is None]
        partner = f"; {lacking[0]} is missing" if len(lacking) == 1 else ""
        raise LeftOut(
            f"{int(histogram.sum())} rounds drafted {drafted} tokens, and not which of them fewer than {size - 1}{partner}",
            "start vLLM with --per-request-spec-decode-metrics detailed: summary is too little for drafts of several "
            "lengths, as prompt lookup makes them",
            kind="drafts of several lengths, in metrics that are not detailed",
        )
    return joint


def _by_length(metrics: Line, histogram: Array) -> Array | None:
    """Returns the rounds from a histogram of accepted tokens for each number of drafted ones; None without them."""
    size, rows = len(histogram), metrics.group(BY_LENGTH)
    if rows is None:
        return None
    joint, lengths = np.zeros((size, size), dtype=np.int64), {str(length): length for length in range(size)}
    for key, row in rows.fields.items():
        counts = rows.wholes(f"{BY_LENGTH}[{shown(key)}]", row)
        if key not in lengths or len(counts) != lengths[key] + 1:
            problem = f"{BY_LENGTH} has {len(counts)} entries for the length {shown(key)}"
            raise metrics.refuse(problem, f"lengths are 0 to {size - 1}, each with one entry more")
        joint[lengths[key], : len(counts)] = counts
    return joint


def _by_step(metrics: Line, histogram: Array) -> Array | None:
    """Returns the rounds from what each accepted and drafted; None unless the request has both lists."""
    lists = {name: metrics.wholes(name, metrics.fields[name]) for name in BY_STEP if metrics.fields.get(name) is not None}
    if len(lists) < 2:
        _require_half(metrics, histogram, lists)
        return None
    accepted, drafted = (lists[name] for name in BY_STEP)
    if len(accepted) != len(drafted) or any(not a <= d < len(histogram) for a, d in zip(accepted, drafted, strict=True)):
        problem = f"{BY_STEP[0]} ({len(accepted)}) and {BY_STEP[1]} ({len(drafted)}) do not fit each other"
        raise metrics.refuse(problem, f"one entry a round: accepted, of drafted ones, of at most {len(histogram) - 1}")
    joint = np.zeros((len(histogram), len(histogram)), dtype=np.int64)
    np.add.at(joint, (np.array(drafted, dtype=int), np.array(accepted, dtype=int)), 1)
    return joint


def _require_half(metrics: Line, histogram: Array, lists: Mapping[str, list[int]]) -> None:
    """Raise `DataUnreadable` where one list alone contradicts the other counts."""
    for name, counts in lists.items():
        agree = max(counts, default=0) < len(histogram)  # before counting: a log may hold any number
        if name == BY_STEP[0]:
            other = f"acceptance_histogram {histogram.tolist()}"
            rounds = np.array(counts, dtype=int)
            agree = agree and np.array_equal(np.bincount(rounds, minlength=len(histogram)), histogram)
        else:
            drafted = metrics.required("num_draft_tokens")
            other = f"{histogram.sum()} rounds drafted {drafted} tokens"
            agree = agree and (len(counts), sum(counts)) == (histogram.sum(), drafted)
        if not agree:
            raise metrics.refuse(f"{name} and {other} differ", AGREE)


@dataclass(frozen=True)
class EngineRounds:
    """Rounds of one request at the served gamma. `steps` that proposed something or were counted as such, `plain` ones that
    follow from the tokens; by depth d = 1..gamma the rounds that `drafted` at least d tokens, that `tested` the d-th, and
    that `accepted` the first d; `beyond`: tokens of the last round after the end of the text; `prefilled`: tokens that
    prefills wrote, which are those of no round.
    """

    gamma: int
    steps: int
    plain: int
    beyond: int
    drafted: tuple[int, ...]
    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    prefilled: int = 1


@dataclass(frozen=True)
class EngineRequest:
    """One request. `names`: what the prompt is known by, by kind, in hex; `unread`: fields of the metrics without a use.
    Only the caller knows its `source` (the number of a file), domain and cluster.
    """

    line: Line
    model: str | None
    request_id: str | None
    names: dict[str, str]
    prompt_tokens: int
    completion_tokens: int
    finish: str
    rounds: EngineRounds
    unread: tuple[str, ...]
    source: int = 0
    domain: str = ""
    cluster: str | None = None


def request_of(line: Line, gamma: int | None) -> EngineRequest:
    """The request of a line; `gamma`: what it must have been served with (None: what it says).

    Raises `LeftOut`, and `DataUnreadable` or `ColumnMissing` for a line that contradicts itself or lacks what it needs.
    """
    body = _body(line)
    choices = body.fields.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        several = "several choices (n > 1, or several prompts) in one answer"
        raise LeftOut(f"{several}, for which vLLM counts no rounds", "ask with n = 1 and one prompt a request", kind=several)
    first = body.inside(choices[0]) if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    _require_answer(body, first)
    usage = body.group("usage") or body
    written = usage.required("completion_tokens")
    if written == 0:
        raise LeftOut("no token was written", "ask for one at least: max_tokens", settled=True)
    metrics = _metrics(body)
    names = _names(line, body, first)
    prompt = usage.count("prompt_tokens")
    if prompt is None and "token ids" in names:
        prompt = len(_ids(body, first) or ())
    if not prompt:
        raise ColumnMissing(f"{body.where}: prompt_tokens is missing, or 0", "it belongs in usage, beside completion_tokens")
    reason = (first or body).fields.get("finish_reason")
    return EngineRequest(
        line=line.inside({}),  # a log may be larger than the memory
        model=body.text("model") or None,
        request_id=body.text("id") or body.text("request_id"),
        names=names,
        prompt_tokens=prompt,
        completion_tokens=written,
        finish=ENDED.get(reason, "unknown") if isinstance(reason, str) else "unknown",
        rounds=_rounds(metrics, written, gamma),
        unread=tuple(name for name in metrics.fields if name not in READ),
    )


def _body(line: Line) -> Line:
    """Returns the line, or what a batch file or a proxy wrapped in its `response` and `body`, unless it has metrics itself.

    Raises `LeftOut` for an answer that is an error, and `DataUnreadable` where metrics stand beside one.
    """
    body, failed = line, bool(line.fields.get("error"))
    for name in ("response", "body"):
        if _holds_metrics(body.fields) or name not in body.fields:
            break
        inner = body.fields[name]
        failed = failed or (inner is None and name == "response")
        if not isinstance(inner, dict):
            break
        body = body.inside(inner)
        status = body.count("status_code") or 0
        failed = failed or bool(inner.get("error")) or status >= 400
    if failed or body.fields.get("object") == "error":
        if _holds_metrics(body.fields):
            problem = "an answer has both an error and metrics"
            raise line.refuse(problem, "was it answered? take the error out of the line, or the line out of the file")
        text = _error_text(line.fields) or _error_text(body.fields)
        hint = f"change the requests, and send them again: it said {cut(repr(text), QUOTED)}" if text else "see its own log"
        raise LeftOut("the engine answered with an error", hint, settled=True)
    return body


def _error_text(fields: Mapping[str, Any]) -> str | None:
    """What an engine said of an error: `error` is its text or an object with a `message`. None where it said nothing."""
    error = fields if fields.get("object") == "error" else fields.get("error")
    text = error.get("message") if isinstance(error, Mapping) else error
    return text if isinstance(text, str) and text else None


def _require_answer(body: Line, first: Line | None) -> None:
    """Raise `LeftOut` for an answer of a kind that has no metrics, and `DataUnreadable` for a part of an answer."""
    kind = body.fields.get("object")
    if _holds_metrics(body.fields):
        return
    if kind == "response":
        reason = "an answer of /v1/responses, where vLLM sends no metrics"
        raise LeftOut(reason, "send the requests to /v1/chat/completions or /v1/completions")
    if kind not in STREAMED or first is None:
        return
    if first.fields.get("finish_reason") is None:
        raise body.refuse("a chunk from within a stream", MERGE)
    if body.fields.get("usage") is None:
        raise LeftOut(
            "a stream without usage, and so without metrics",
            "ask with stream_options: {include_usage: true}, which adds a chunk with both after this one; "
            "docs/import.md has a client that logs it",
        )


def _holds_metrics(fields: Mapping[str, Any]) -> bool:
    places = [place for place in (fields.get("metrics"), fields) if isinstance(place, Mapping)]
    return any(isinstance(place.get(name), dict) for place in places for name in METRICS)


def _metrics(body: Line) -> Line:
    for place in (body.group("metrics"), body):
        for name in METRICS:
            if place is not None and (metrics := place.group(name)) is not None:
                return metrics
    raise LeftOut(
        "no metrics.speculative_decoding",
        "start vLLM with --per-request-spec-decode-metrics detailed, and ask with n = 1 and one prompt a request",
    )


def _ids(body: Line, first: Line | None) -> list[int] | None:
    for place in (body, first):
        if place is not None and place.fields.get("prompt_token_ids") is not None:
            return place.wholes("prompt_token_ids", place.fields["prompt_token_ids"])
    return None


def _names(line: Line, body: Line, first: Line | None) -> dict[str, str]:
    """What tells this prompt from others, by kind."""
    names = {}
    if ids := _ids(body, first):
        names["token ids"] = hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()
    asked = [place.fields.get("request") for place in (line, body)]
    inner = [place.get("body") for place in asked if isinstance(place, dict)]
    for place in (line.fields, body.fields, *asked, *inner):
        prompt = place.get("prompt", place.get("messages")) if isinstance(place, Mapping) else None
        if isinstance(prompt, (str, list)) and prompt:
            try:
                names["text"] = _hashed("text", prompt)
            except RecursionError:
                raise line.refuse("the prompt is nested too deeply", "prompts are text, or lists of messages") from None
            break
    name = line.text("custom_id") or body.text("id") or line.text("id") or body.text("request_id")
    if name:
        names["request id"] = _hashed("id", name)
    return names


def _hashed(kind: str, value: Any) -> str:
    return hashlib.sha256(json.dumps([kind, value], sort_keys=True).encode()).hexdigest()


def _rounds(metrics: Line, written: int, wanted: int | None) -> EngineRounds:
    histogram = _histogram(metrics, wanted)
    gamma = len(histogram) - 1
    steps, accepted = int(histogram.sum()), int((np.arange(gamma + 1) * histogram).sum())
    if (count := metrics.required("num_spec_steps")) != steps:
        raise metrics.refuse(f"num_spec_steps is {count}, and the histogram adds up to {steps}", AGREE)
    if (count := metrics.required(*ACCEPTED)) != accepted:
        raise metrics.refuse(f"{ACCEPTED[0]} is {count}, and the histogram says {accepted}", AGREE)
    drafted = metrics.required("num_draft_tokens")
    if not accepted <= drafted <= steps * gamma:
        raise metrics.refuse(
            f"num_draft_tokens is {drafted}, and {steps} rounds of up to {gamma} that accepted {accepted} draft "
            f"{accepted} to {steps * gamma}",
            AGREE,
        )
    after = written - 1  # the prefill writes the first token
    beyond = max(0, steps + accepted - after)
    if beyond > int(np.flatnonzero(histogram).max(initial=0)):  # a round keeps one token at least
        raise LeftOut(
            f"completion_tokens is {written}, and {steps} rounds that accepted {accepted} tokens write {steps + accepted} "
            "after the first",
            "only the last round may reach beyond the end of a text: see docs/import.md",
            kind="more rounds than their tokens allow",
        )
    joint = _joint(metrics, histogram, drafted)
    depth = range(1, gamma + 1)
    return EngineRounds(
        gamma=gamma,
        steps=steps,
        plain=max(0, after - steps - accepted),
        beyond=beyond,
        drafted=tuple(int(joint[d:].sum()) for d in depth),
        tested=tuple(int(joint[d:, d - 1 :].sum()) for d in depth),
        accepted=tuple(int(histogram[d:].sum()) for d in depth),
    )


def _histogram(metrics: Line, wanted: int | None) -> Array:
    """Rounds by accepted drafts, [gamma + 1]."""
    if "acceptance_histogram" not in metrics.fields:
        raise metrics.missing("acceptance_histogram")
    counts = metrics.wholes("acceptance_histogram", metrics.fields["acceptance_histogram"])
    if not 2 <= len(counts) <= MOST_DRAFTED + 1:
        raise metrics.refuse(
            f"acceptance_histogram has {len(counts)} entries", f"it has one for 0 to gamma drafts, 2 to {MOST_DRAFTED + 1}"
        )
    gamma = metrics.count("num_spec_tokens")
    for name, value in (("num_spec_tokens", gamma), ("--gamma", wanted)):
        if value is not None and value != len(counts) - 1:
            problem = f"{name} is {value}, and acceptance_histogram counts 0 to {len(counts) - 1} drafts"
            raise metrics.refuse(problem, "import requests of one number of speculative tokens at a time")
    return np.array(counts, dtype=np.int64)
