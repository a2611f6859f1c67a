"""Requests as SGLang answers them, in the form that vLLM's metrics have, so that one set of checks serves both.

Names and meanings are those of SGLang 0.5.23: `TokenizerManager._calculate_spec_decoding_metrics` fills `meta_info` from
counts of `_resolve_spec_v2_tokens`, and `SpecTokensDetails` of OpenAI's endpoints repeats them. Three things differ from
vLLM:

- The histogram (pull request 18332) counts rounds by accepted drafts without the bonus token, and ends at the largest
  count that occurred.
- `spec_num_proposed_drafts` is not counted but worked out, rounds times `speculative_num_draft_tokens` - 1. Of a chain
  these are its drafts. Of a tree they are its nodes, and where the number of steps adapts itself they mean nothing.
- A request that ended before its first round has no such fields at all.

Names changed twice (0.5.11, 0.5.12: pull requests 23530 and 24081); the older ones are read as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from alphaprof.commands.importing.lines import AGREE, LeftOut, Line
from alphaprof.commands.importing.vllm import MOST_DRAFTED, EngineRequest, request_of
from alphaprof.log.manifest import CHAIN, Drafting

ROUNDS = "spec_verify_ct"
CORRECT = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")  # the newest name first
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
CAPPED = ("spec_cap_length", "spec_cap_lens_histogram", "spec_block_accept_length")  # rounds that verified fewer drafts
LENGTH = "spec_accept_length"
READ = frozenset((ROUNDS, *CORRECT, *PROPOSED, *HISTOGRAM, *CAPPED, LENGTH, "spec_accept_rate"))
RETRACTIONS = ("num_retractions", "total_retractions")
DETAILS = "spec_tokens_details"
ASK = "with the native /generate, or return_spec_tokens_details (or return_meta_info): true"
PROMPT = ("prompt", "messages", "custom_id")  # what a line says of its request, beside the answer


def answers_of(line: Line) -> list[Line]:
    """The answers in a line: one, a list of them, what a batch file or a proxy wrapped in `response` and `body`, or the
    choices of one answer where each has its own `meta_info`. What the line says of its prompt stands with each.

    Raises `DataUnreadable` for a list of something else.
    """
    body: Any = dict(line.fields)
    failed: dict[str, Any] = {}
    for name in ("response", "body"):
        if isinstance(body, dict) and not {"meta_info", "choices", "sglext"} & body.keys():
            failed |= {key: body[key] for key in ("error", "status_code") if body.get(key)}
            body = body[name] if isinstance(body.get(name), (dict, list)) else body
    listed = body if isinstance(body, list) else list(_choices(body))
    if not all(isinstance(answer, dict) for answer in listed):
        raise line.refuse("a list of answers holds something else", "each answer is one object")
    about = _asked(line)
    if len(listed) > 1 and isinstance(body, list):  # a list of prompts does not say which is whose
        about = {name: value for name, value in about.items() if not isinstance(value, list)}
    return [line.inside(about | answer | failed) for answer in listed]


def _choices(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer itself, or its choices where these hold more than it does."""
    choices = body.get("choices")
    whole = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if "meta_info" not in body and any(isinstance(choice.get("meta_info"), dict) for choice in whole):
        rest = {name: value for name, value in body.items() if name not in ("choices", "usage", "sglext")}
        yield from (rest | choice for choice in whole)
    else:
        names = {"prompt_token_ids": "prompt_token_ids", "reason": "finish_reason"} if whole else {}
        yield {name: whole[0][key] for name, key in names.items() if whole[0].get(key) is not None} | body


def _asked(line: Line) -> dict[str, Any]:
    request = line.fields.get("request")
    asked = {name: line.fields[name] for name in PROMPT if line.fields.get(name) is not None}
    if isinstance(request, dict) and not {"prompt", "messages"} & set(asked):
        asked |= {"prompt": request.get("text", request.get("prompt", request.get("messages")))}
    return asked


def sglang_request(answer: Line, gamma: int | None, drafting: Drafting) -> EngineRequest:
    """The request of an answer. `gamma`: drafts of a round (None: what the counts of a chain say); where it did not draft a
    chain of one length, the most that a round can accept, which must be given.

    Raises `LeftOut`, and `DataUnreadable` or `ColumnMissing` for an answer that contradicts itself or lacks what it needs.
    """
    info = answer.group("meta_info")
    _require_answered(answer, info)
    written = (info or answer.group("usage") or answer).required("completion_tokens")
    counts = _counts(answer, info, written)
    rounds, correct = counts.required(ROUNDS), counts.required(*CORRECT)
    _require_length(counts, written, rounds)
    most = _drafts(counts, rounds, gamma) if drafting == CHAIN or gamma is None else gamma
    histogram = _histogram(counts, rounds, correct, most)
    retracted = (info.count(*RETRACTIONS) if info is not None else None) or 0
    # The prefill writes a token; after each retraction another one does.
    if written > 1 + retracted + rounds + correct:
        raise LeftOut(
            f"completion_tokens is {written}, and a prefill, {retracted} retractions and {rounds} rounds that accepted "
            f"{correct} drafts write {1 + retracted + rounds + correct}",
            "num_retractions is in meta_info only; else the counts mean something other than is known here",
            kind="more tokens than its rounds write",
        )
    request = request_of(_as_vllm(answer, info, written, histogram, rounds, correct), None)
    unread = (name for name in counts.fields if name.startswith("spec_") and name not in READ)
    # Every round drafts: tokens that the rounds do not account for are those of the prefills after retractions.
    drafted = dataclasses.replace(request.rounds, plain=0, prefilled=1 + request.rounds.plain)
    return dataclasses.replace(request, line=answer.inside({}), rounds=drafted, unread=tuple(unread))


def _require_answered(answer: Line, info: Line | None) -> None:
    """Raise `LeftOut` for an answer that is an error, or was aborted."""
    failed = answer.fields.get("error") or answer.fields.get("object") == "error"
    failed = failed or (answer.count("status_code") or 0) >= 400
    if failed and ((info is not None and info.count(ROUNDS)) or answer.fields.get("sglext")):
        problem = "an answer has both an error and counts"
        raise answer.refuse(problem, "was it answered? take the error out of the line, or the line out of the file")
    if failed:
        raise LeftOut("the engine answered with an error", "nothing was decoded", settled=True)
    if _finish(answer, info) == "abort":
        raise LeftOut("the request was aborted", "its text is not whole", settled=True)


def _finish(answer: Line, info: Line | None) -> Any:
    reason = info.fields.get("finish_reason") if info is not None else answer.fields.get("reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def _counts(answer: Line, info: Line | None, written: int) -> Line:
    """Where the counts of rounds stand. Raises `LeftOut` where there are none."""
    ext = answer.group("sglext")
    details = ext.fields.get(DETAILS) if ext is not None else None
    if isinstance(details, list):
        raise LeftOut("several choices (n > 1) in one answer", "ask with n = 1, or with return_meta_info: true")
    for place in (info, ext.group(DETAILS) if ext is not None else None):
        if place is not None and place.count(ROUNDS):
            return place
    if written <= 1:
        raise LeftOut("no round: the prefill wrote all of it", "nothing was decoded", settled=True)
    raise LeftOut(
        f"no {ROUNDS} in meta_info or sglext.{DETAILS}", f"start SGLang with --speculative-algorithm, and ask {ASK}"
    )


def _require_length(counts: Line, written: int, rounds: int) -> None:
    """Raise `DataUnreadable` where SGLang's own mean says that these rounds are another text's."""
    length = counts.fields.get(LENGTH)
    if length is None or length == 0:  # sglext writes 0 for what it does not know
        return
    number = isinstance(length, (int, float)) and not isinstance(length, bool)
    if not number or not abs(length * rounds - written) < 0.5:
        problem = f"{LENGTH} is {str(length)[:20]}, and completion_tokens / {ROUNDS} is {written} / {rounds}"
        raise counts.refuse(problem, "both must be of one request: was the answer put together from several?")


def _drafts(counts: Line, rounds: int, wanted: int | None) -> int:
    """The drafts of each round of a chain. Raises `DataUnreadable`."""
    proposed = counts.required(*PROPOSED)
    other = "where rounds draft a tree, or no fixed number of tokens: --drafting tree or adaptive"
    if any(counts.fields.get(name) for name in CAPPED):
        raise counts.refuse("rounds verified fewer drafts than they proposed (spec_cap_length)", "--drafting adaptive")
    if not rounds <= proposed <= MOST_DRAFTED * rounds or proposed % rounds:
        raise counts.refuse(f"{PROPOSED[0]} is {proposed}, and each of {rounds} rounds drafted the same number", other)
    if wanted is not None and proposed != wanted * rounds:
        raise counts.refuse(f"rounds drafted {proposed // rounds} tokens each, and --gamma is {wanted}", other)
    return proposed // rounds


def _histogram(counts: Line, rounds: int, correct: int, most: int) -> list[int]:
    """Rounds by accepted drafts, [most + 1]. Raises `DataUnreadable` and `ColumnMissing`."""
    name = next((name for name in HISTOGRAM if counts.fields.get(name) is not None), None)
    if name is None:
        raise counts.missing(HISTOGRAM[0])
    value = counts.fields[name]
    if isinstance(value, list) and len(value) > most + 1:
        raise counts.refuse(
            f"{name} counts rounds that accepted {len(value) - 1} drafts, and a round drafts {most}",
            "where the number of steps adapts itself: --drafting adaptive; of trees --gamma is the number of levels",
        )
    histogram = counts.wholes(name, value)
    if sum(histogram) != rounds:
        raise counts.refuse(f"{name} adds up to {sum(histogram)} rounds, and {ROUNDS} is {rounds}", AGREE)
    kept = sum(count * accepted for accepted, count in enumerate(histogram))
    if kept != correct:
        raise counts.refuse(f"{name} says {kept} accepted drafts, and {CORRECT[0]} is {correct}", AGREE)
    return histogram + [0] * (most + 1 - len(histogram))


def _as_vllm(answer: Line, info: Line | None, written: int, histogram: list[int], rounds: int, correct: int) -> Line:
    """The answer as vLLM would have written it."""
    usage, ext = answer.group("usage") or answer, answer.group("sglext")
    ids = answer.fields.get("prompt_token_ids")
    fields = {name: answer.fields[name] for name in (*PROMPT, "model") if name in answer.fields}
    fields |= {
        "id": (info.fields.get("id") if info is not None else None) or answer.fields.get("id"),
        "usage": {"prompt_tokens": (info or usage).count("prompt_tokens"), "completion_tokens": written},
        "prompt_token_ids": ids if ids is not None or ext is None else ext.fields.get("input_ids"),
        "choices": [{"finish_reason": _finish(answer, info)}],
        "metrics": {
            "speculative_decoding": {
                "acceptance_histogram": histogram,
                "num_spec_steps": rounds,
                "num_accepted_draft_tokens": correct,
                "num_draft_tokens": rounds * (len(histogram) - 1),
            }
        },
    }
    return answer.inside(fields)
