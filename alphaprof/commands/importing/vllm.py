"""One request as vLLM logs its speculative decoding: its fields, what must hold between them, and the rounds they tell."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import AliasChoices, BaseModel, Field

from alphaprof.commands.importing.lines import MERGE, Count, Fields, LeftOut, Line, Name, failure, group, unwrapped
from alphaprof.run.manifest import CHAIN, Drafting
from alphaprof.servers.files import format_of
from alphaprof.stats.estimate import Array

METRICS = ("speculative_decoding", "spec_decode_metrics")
MOST_DRAFTED = 64  # tokens in one round
ENDED = {"stop": "eos", "tool_calls": "eos", "function_call": "eos", "length": "length"}
STREAMED = ("chat.completion.chunk", "text_completion")  # chunks of /v1/completions are called as its answers are


class Metrics(BaseModel):
    """Counts of one request. `acceptance_histogram`: rounds by the number of accepted drafts, 0 to gamma; the same for each
    number of drafted tokens (newer versions), or what each round accepted and drafted (`detailed`).
    """

    acceptance_histogram: list[Count] = Field(min_length=2, max_length=MOST_DRAFTED + 1)
    num_spec_steps: Count
    num_accepted_draft_tokens: Count = Field(
        validation_alias=AliasChoices("num_accepted_draft_tokens", "num_accepted_tokens")
    )
    num_draft_tokens: Count
    num_spec_tokens: Count | None = None
    per_step_accepted: list[Count] | None = None
    per_step_drafted: list[Count] | None = None
    acceptance_histogram_by_draft_length: dict[int, list[Count]] | None = None

    def by_round(self) -> list[tuple[int, int, int]] | None:
        """Drafted and accepted tokens, and how many such rounds there were; None if the metrics are a summary."""
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            pairs = zip(self.per_step_drafted, self.per_step_accepted, strict=False)
            return [(drafted, accepted, 1) for drafted, accepted in pairs]
        if (rows := self.acceptance_histogram_by_draft_length) is not None:
            return [(drafted, accepted, count) for drafted, row in rows.items() for accepted, count in enumerate(row)]
        return None


class Answered(BaseModel):
    """What an answer says beside its metrics, wherever it stands. `name`: what tells its prompt from others, if neither
    token ids nor the text do.
    """

    completion_tokens: Count
    prompt_tokens: Count = Field(gt=0)
    prompt_token_ids: list[Count] = []
    prompt: Any = None
    name: Name | None = None
    request_id: Name | None = None
    model: Name | None = None
    finish_reason: Any = None

    def names(self) -> dict[str, str]:
        """Return what the prompt is known by, by kind, in hex."""
        names = {}
        if self.prompt_token_ids:
            names["token ids"] = hashlib.sha256(np.array(self.prompt_token_ids, dtype="<i4").tobytes()).hexdigest()
        for kind, of, value in (("text", "text", self.prompt), ("request id", "id", self.name)):
            if isinstance(value, str | list) and value:
                names[kind] = hashlib.sha256(json.dumps([of, value], sort_keys=True).encode()).hexdigest()
        return names


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
    """One request. `names`: what the prompt is known by, by kind, in hex. Only the caller knows its `source` (the number of
    a file), domain and cluster.
    """

    line: Line
    model: str | None
    request_id: str | None
    names: dict[str, str]
    prompt_tokens: int
    completion_tokens: int
    finish: str
    rounds: EngineRounds
    source: int = 0
    domain: str = ""
    cluster: str | None = None


def answers_of(line: Line) -> list[Line]:
    """Return the answers in a line: the line itself."""
    return [line]


def request_of(line: Line, gamma: int | None, drafting: Drafting = CHAIN) -> EngineRequest:
    """Return the request of a line; `gamma`: what it must have been served with (None: what it says); `drafting`: always a
    chain.

    Raises `LeftOut`, and `DataUnreadable` for a line that contradicts itself or lacks what it needs.
    """
    found, error = unwrapped(line.fields, lambda fields: bool(_metrics(fields)))
    if error:
        raise failure(error)
    if isinstance(found, list):
        raise line.refuse("this line is a list", "write one response per line")
    body: Fields = found if isinstance(found, dict) else {}
    choices = body["choices"] if isinstance(body.get("choices"), list) else []
    first: Fields = choices[0] if choices and isinstance(choices[0], dict) else {}
    usage = group(body, "usage") or body
    if usage.get("completion_tokens") == 0:
        raise LeftOut("no token was written", "ask for at least one token: max_tokens", unmeasured=True)
    if not (metrics := _metrics(body)) or len(choices) > 1:
        raise _without_metrics(line, body, first, len(choices))
    ids = body.get("prompt_token_ids") or first.get("prompt_token_ids")
    prompt_tokens = usage.get("prompt_tokens")
    fields = {
        "completion_tokens": usage.get("completion_tokens"),
        "prompt_tokens": len(ids) if prompt_tokens is None and isinstance(ids, list) else prompt_tokens,
        "prompt_token_ids": ids,
        "prompt": prompt_of(line.fields, body, group(line.fields, "request"), group(group(line.fields, "request"), "body")),
        "name": line.fields.get("custom_id") or body.get("id") or line.fields.get("id") or body.get("request_id"),
        "request_id": body.get("id") or body.get("request_id"),
        "model": body.get("model") or None,
        "finish_reason": (first or body).get("finish_reason"),
    }
    return counted_request(line, fields, metrics, gamma)


def prompt_of(*places: Fields) -> Any:
    """Return the prompt or the messages in the first of some places that has them."""
    return next((value for place in places for name in ("prompt", "messages") if (value := place.get(name))), None)


def counted_request(line: Line, fields: Fields, metrics: Fields, gamma: int | None) -> EngineRequest:
    """Return the request of an answer's `fields` (see `Answered`) and `metrics` (see `Metrics`). Raises `LeftOut` and
    `DataUnreadable`.
    """
    answer, counts = line.read(Answered, fields), line.read(Metrics, metrics)
    reason = answer.finish_reason
    return EngineRequest(
        line=line.inside({}),  # a log may be larger than the memory
        model=answer.model,
        request_id=answer.request_id,
        names=answer.names(),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        finish=ENDED.get(reason, "unknown") if isinstance(reason, str) else "unknown",
        rounds=_engine_rounds(line, counts, answer.completion_tokens, gamma),
    )


def _metrics(fields: Fields) -> Fields:
    """Return the metrics that an answer holds; empty if there are none."""
    places = (group(fields, "metrics"), fields)
    return next((metrics for place in places for name in METRICS if (metrics := group(place, name))), {})


def _without_metrics(line: Line, body: Fields, first: Fields, choices: int) -> Exception:
    """Return why an answer has no metrics, and how to get them."""
    kind = body.get("object")
    if choices > 1:
        several = "several choices (n > 1, or several prompts) in one answer, for which vLLM counts no rounds"
        return LeftOut(several, "use n = 1 and one prompt per request")
    if kind == "response":
        reason = "an answer of /v1/responses, which has no vLLM metrics"
        return LeftOut(reason, "send the requests to /v1/chat/completions or /v1/completions")
    if kind in STREAMED and first and first.get("finish_reason") is None:
        return line.refuse("a chunk from the middle of a stream", MERGE)
    if kind in STREAMED and first and body.get("usage") is None:
        hint = "set stream_options: {include_usage: true}, which adds usage and metrics at the end"
        return LeftOut("a stream without usage, and so without metrics", hint)
    if (other := format_of(json.dumps(line.fields))) is not None:
        return line.other(other)
    hint = "start vLLM with --per-request-spec-decode-metrics detailed, and use n = 1 and one prompt per request"
    return LeftOut("no metrics.speculative_decoding", hint)


def _engine_rounds(line: Line, metrics: Metrics, written: int, wanted: int | None) -> EngineRounds:
    histogram = np.array(metrics.acceptance_histogram)
    gamma = len(histogram) - 1
    for name, value in (("num_spec_tokens", metrics.num_spec_tokens), ("--gamma", wanted)):
        if value is not None and value != gamma:
            raise line.refuse(
                f"{name} is {value}, but the histogram counts 0 to {gamma} accepted drafts",
                "import only requests with the same number of speculative tokens",
            )
    steps, accepted = int(histogram.sum()), int((np.arange(gamma + 1) * histogram).sum())
    counted = (metrics.num_spec_steps, metrics.num_accepted_draft_tokens)
    if counted != (steps, accepted) or not accepted <= metrics.num_draft_tokens <= steps * gamma:
        problem = f"{counted[0]} rounds accepted {counted[1]} of {metrics.num_draft_tokens} drafted tokens, but their "
        problem += f"histogram has {steps} rounds of up to {gamma}, and {accepted} accepted"
        raise line.refuse(problem, "the counts of a request must agree with each other")
    after = written - 1  # the prefill writes the first token
    beyond = max(0, steps + accepted - after)
    if beyond > int(np.flatnonzero(histogram).max(initial=0)):  # a round keeps one token at least
        raise LeftOut(
            "more rounds than the text allows", "only the last round may reach beyond the end of a text: see docs/import.md"
        )
    joint = _joint(line, metrics, histogram)
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


def _joint(line: Line, metrics: Metrics, histogram: Array) -> Array:
    """Return rounds by drafted and by accepted tokens, [gamma + 1, gamma + 1]. Raises `LeftOut` if the metrics do not
    tell.
    """
    size, drafted = len(histogram), metrics.num_draft_tokens
    lengths, joint = np.arange(size), np.zeros((size, size), dtype=np.int64)
    if (rounds := metrics.by_round()) is not None:
        for tried, kept, count in rounds:
            if kept <= tried < size:
                joint[tried, kept] += count
        if joint.sum(0).tolist() != histogram.tolist() or (lengths @ joint).sum() != drafted:
            problem = f"round by round, {int((lengths @ joint).sum())} tokens were drafted and rounds accepted "
            problem += f"{joint.sum(0).tolist()}, but num_draft_tokens is {drafted} and the histogram {histogram.tolist()}"
            raise line.refuse(problem, "the counts of a request must agree with each other")
    elif drafted == histogram.sum() * (size - 1):  # every round drafted gamma tokens
        joint[-1] = histogram
    elif drafted == (lengths * histogram).sum():  # none drafted more than it accepted
        joint[lengths, lengths] = histogram
    elif size == 2:
        joint[1] = drafted - histogram[1], histogram[1]
        joint[0, 0] = histogram.sum() - drafted
    else:
        raise LeftOut(
            "draft lengths vary, and the metrics are not detailed",
            "start vLLM with --per-request-spec-decode-metrics detailed: summary is not enough for prompt lookup",
        )
    return joint
