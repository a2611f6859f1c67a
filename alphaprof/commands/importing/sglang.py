"""Requests as SGLang answers them, in the form that vLLM's metrics have, so that one set of checks serves both.

Names and meanings are those of SGLang 0.5.23: `TokenizerManager._calculate_spec_decoding_metrics` fills `meta_info` from
counts of `_resolve_spec_v2_tokens`, and `SpecTokensDetails` of OpenAI's endpoints repeats them. Three things differ from
vLLM:

- The histogram (pull request 18332) counts rounds by accepted drafts without the bonus token, and ends at the largest
  count that occurred.
- `spec_num_proposed_drafts` is not counted but worked out, rounds times `speculative_num_draft_tokens` - 1. Of a chain
  these are its drafts. Of a tree they are its nodes, and if the number of steps adapts itself they mean nothing.
- A request that ended before its first round has no such fields at all.

Names changed twice (0.5.11, 0.5.12: pull requests 23530 and 24081); the older ones are read as well.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from alphaprof.commands.importing.lines import Count, Fields, LeftOut, Line, error_in, failure, group, unwrapped
from alphaprof.commands.importing.vllm import MOST_DRAFTED, EngineRequest, counted_request, prompt_of
from alphaprof.run.manifest import CHAIN, Drafting
from alphaprof.servers.files import format_of

ROUNDS, DETAILS = "spec_verify_ct", "spec_tokens_details"
CORRECT = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")  # the newest first, as below
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
CAPPED = ("spec_cap_length", "spec_cap_lens_histogram", "spec_block_accept_length")  # rounds that verified fewer drafts


class Counts(BaseModel):
    """Counts of one request, the newest name of each first."""

    rounds: Count = Field(alias=ROUNDS)
    correct: Count = Field(validation_alias=AliasChoices(*CORRECT))
    proposed: Count | None = Field(
        None, validation_alias=AliasChoices("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    )
    histogram: list[Count] = Field(
        max_length=MOST_DRAFTED + 1,
        validation_alias=AliasChoices(*HISTOGRAMS),
    )
    retractions: Count = Field(0, validation_alias=AliasChoices("num_retractions", "total_retractions"))


def answers_of(line: Line) -> list[Line]:
    """Return the answers in a line: one, a list of them, what a batch file or a proxy wrapped in `response` and `body`, or
    the choices of one answer if each has its own `meta_info`. What the line says of its prompt stands with each.
    """
    body, error = unwrapped(line.fields, lambda fields: bool({"meta_info", "choices", "sglext"} & fields.keys()))
    listed = body if isinstance(body, list) else _choices(body)
    request = group(line.fields, "request")
    prompt = prompt_of(line.fields) or request.get("text") or prompt_of(request)
    about = {"prompt": prompt, "custom_id": line.fields.get("custom_id")}
    if len(listed) > 1 and isinstance(body, list) and isinstance(about["prompt"], list):
        about["prompt"] = None  # a list of prompts does not say which is whose
    failed = {"error": error} if error else {}
    return [line.inside(about | (answer if isinstance(answer, dict) else {}) | failed) for answer in listed]


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer itself, or its choices if these hold more than it does."""
    choices = body.get("choices")
    whole = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if "meta_info" not in body and any(group(choice, "meta_info") for choice in whole):
        rest = {name: value for name, value in body.items() if name not in ("choices", "usage", "sglext")}
        return [rest | choice for choice in whole]
    first = whole[0] if whole else {}
    return [{"prompt_token_ids": first.get("prompt_token_ids"), "finish_reason": first.get("finish_reason")} | body]


def request_of(answer: Line, gamma: int | None, drafting: Drafting) -> EngineRequest:
    """Return the request of an answer. `gamma`: drafts of a round (None: what the counts of a chain say); if it did not
    draft a chain of one length, the most that a round can accept, which must be given.

    Raises `LeftOut`, and `DataUnreadable` for an answer that contradicts itself or lacks what it needs.
    """
    fields, info, usage = answer.fields, group(answer.fields, "meta_info"), group(answer.fields, "usage")
    if error := error_in(fields):
        raise failure(error)
    reason = info.get("finish_reason") or fields.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason
    if reason == "abort":
        raise LeftOut("the request was aborted", "send it again: its text is incomplete", unmeasured=True)
    sizes = info or usage or fields
    found = _counts_in(answer, fields, info, sizes.get("completion_tokens"))
    if not found.keys() & {*HISTOGRAMS, *CORRECT} and (old := format_of(json.dumps(fields))) is not None:
        raise answer.other(old)
    counts, capped = answer.read(Counts, found), any(found.get(name) for name in CAPPED)
    most = gamma if drafting != CHAIN and gamma is not None else _drafts(answer, counts, capped)
    ids = fields.get("prompt_token_ids") or group(fields, "sglext").get("input_ids")
    about = {
        "completion_tokens": sizes.get("completion_tokens"),
        "prompt_tokens": sizes.get("prompt_tokens") or (len(ids) if isinstance(ids, list) else None),
        "prompt_token_ids": ids,
        "prompt": fields.get("prompt"),
        "name": fields.get("custom_id") or info.get("id") or fields.get("id"),
        "request_id": info.get("id") or fields.get("id"),
        "model": fields.get("model") or None,
        "finish_reason": reason,
    }
    metrics = {
        "acceptance_histogram": counts.histogram + [0] * (most + 1 - len(counts.histogram)),
        "num_spec_steps": counts.rounds,
        "num_accepted_draft_tokens": counts.correct,
        "num_draft_tokens": counts.rounds * most,
    }
    request = counted_request(answer, about, metrics, most if gamma is None else gamma)
    # Every round drafts: tokens that the rounds do not account for are those of the prefills after retractions.
    if request.rounds.plain > counts.retractions:
        raise LeftOut(
            "more tokens than the rounds explain",
            "log meta_info with num_retractions; if it is there already, alphaprof cannot read these counts",
        )
    rounds = dataclasses.replace(request.rounds, plain=0, prefilled=1 + request.rounds.plain)
    return dataclasses.replace(request, rounds=rounds)


def _counts_in(answer: Line, fields: Fields, info: Fields, written: Any) -> Fields:
    """Return where the counts of rounds stand. Raises `LeftOut` if there are none, and `DataUnreadable` for other files."""
    if isinstance(group(fields, "sglext").get(DETAILS), list):
        raise LeftOut("several choices (n > 1) in one answer", "ask with n = 1, or with return_meta_info: true")
    for place in (info, group(group(fields, "sglext"), DETAILS)):
        if place.get(ROUNDS):
            return place
    kind = format_of(json.dumps(fields))
    if kind is not None and kind.engine != "sglang":
        raise answer.other(kind)
    if written in (0, 1):
        raise LeftOut("no round: prefill wrote the whole text", "send requests with longer answers", unmeasured=True)
    ask = "use the native /generate, or set return_spec_tokens_details (or return_meta_info): true"
    raise LeftOut(f"no {ROUNDS} in meta_info or sglext.{DETAILS}", f"start SGLang with --speculative-algorithm, and {ask}")


def _drafts(answer: Line, counts: Counts, capped: bool) -> int:
    """Return the drafts of each round of a chain. Raises `DataUnreadable`."""
    if counts.proposed is None:
        raise answer.refuse("spec_num_proposed_drafts is missing", "give the answer unchanged, as SGLang wrote it")
    gamma, rest = divmod(counts.proposed, counts.rounds)
    if capped or rest or not len(counts.histogram) - 1 <= gamma <= MOST_DRAFTED:
        problem = f"{counts.rounds} rounds proposed {counts.proposed} drafts and accepted up to {len(counts.histogram) - 1}"
        problem += ", and verified fewer than they proposed (spec_cap_length)" if capped else ""
        raise answer.refuse(problem, "if rounds draft a tree or a varying number of tokens, use --drafting tree or adaptive")
    return gamma
