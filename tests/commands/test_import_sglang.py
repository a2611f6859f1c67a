"""Runs imported from SGLang's answers. No SGLang runs here: the answers are written from the field names of its source
(0.5.23), and from one that a user of it published (pull request 33518).
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alphaprof
from alphaprof.commands.importing.lines import LeftOut, Line
from alphaprof.commands.importing.sglang import answers_of, sglang_request
from alphaprof.commands.importing.vllm import EngineRequest, request_of
from alphaprof.errors import AlphaprofError
from alphaprof.log.schema import depth_names
from alphaprof.log.store import Run
from alphaprof.render.json import json_schema
from alphaprof.report.build import build_report
from tests.commands.test_import import counted, failure, invoke, response
from tests.reporting import HOSTILE, codes

# A round of a chain of five drafts, 43 times; the last round went one token beyond the end.
DETAILS = {
    "spec_accept_rate": 0.2930232558139535,
    "spec_accept_length": 2.4651162790697674,
    "spec_cap_length": 0.0,
    "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215,
    "spec_verify_ct": 43,
    "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
    "spec_cap_lens_histogram": [],
}
STRICT = ("--rule", "strict", "--target", "served/target")
CHAIN = (*STRICT, "--drafting", "chain")


def answer(number: int = 1, **changes: Any) -> dict[str, Any]:
    """What the native /generate answers; a change to None takes a field of `meta_info` away."""
    info = {
        "id": f"request-{number}",
        "finish_reason": {"type": "length", "length": 106},
        "prompt_tokens": 5,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 106,
        "cached_tokens": 0,
        "e2e_latency": 1.5,
    }
    info = {name: value for name, value in (info | DETAILS | changes).items() if value is not None}
    return {"text": "Once", "output_ids": [3, 4], "meta_info": info, "prompt_token_ids": [number, 7]}


def of_rounds(accepted: Sequence[int], gamma: int, number: int = 1, **changes: Any) -> dict[str, Any]:
    """The answer to a request with these rounds of a chain, to the end of its last one."""
    histogram = [accepted.count(kept) for kept in range(max(accepted) + 1)]
    written = 1 + len(accepted) + sum(accepted)
    counts = {
        "spec_verify_ct": len(accepted),
        "spec_num_correct_drafts": sum(accepted),
        "spec_num_proposed_drafts": gamma * len(accepted),
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_length": written / len(accepted),
        "completion_tokens": written,
    }
    return answer(number, **(counts | changes))


def openai(details: bool = True) -> dict[str, Any]:
    """The same by OpenAI's endpoint: with return_spec_tokens_details, or with return_meta_info."""
    found = answer()
    choice = {"index": 0, "finish_reason": "length", "prompt_token_ids": found["prompt_token_ids"]}
    return {
        "id": "request-1",
        "object": "chat.completion",
        "model": "served/target",
        "choices": [choice if details else choice | {"meta_info": found["meta_info"]}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 106},
    } | ({"sglext": {"spec_tokens_details": DETAILS}} if details else {})


def renamed(**names: str) -> dict[str, Any]:
    """The native answer of an older version."""
    found = answer()
    for new, old in names.items():
        found["meta_info"][old] = found["meta_info"].pop(new)
    return found


SHAPES: dict[str, Any] = {
    "native": answer(),
    "a list": [answer()],
    "wrapped": {"domain": "code", "prompt": "Hi", "response": answer()},
    "a wrapped list": {"response": [answer()]},
    "a batch file's": {"custom_id": "a", "response": {"status_code": 200, "body": openai()}, "error": None},
    "OpenAI's with details": openai(),
    "OpenAI's with meta_info": openai(details=False),
    "a stream's merged chunks": openai() | {"object": "chat.completion.chunk", "choices": []},
    "0.5.11": renamed(
        spec_num_correct_drafts="spec_accepted_drafts",
        spec_num_proposed_drafts="spec_proposed_drafts",
        spec_correct_drafts_histogram="spec_accept_histogram",
    ),
    "0.5.10": renamed(
        spec_num_correct_drafts="spec_accept_token_num",
        spec_num_proposed_drafts="spec_draft_token_num",
        spec_correct_drafts_histogram="spec_accept_histogram",
        num_retractions="total_retractions",
    ),
}


def requests_in(row: Any, gamma: int | None = None, drafting: Any = "chain") -> list[EngineRequest]:
    line = Line(Path("log.jsonl"), 1, row if isinstance(row, dict) else {"response": row})
    return [sglang_request(item, gamma, drafting) for item in answers_of(line)]


def read(row: Any, gamma: int | None = None, drafting: Any = "chain") -> EngineRequest:
    (request,) = requests_in(row, gamma, drafting)
    return request


def written(folder: Path, rows: Sequence[Any], name: str = "run") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(folder: Path, rows: Sequence[Any], *options: object, name: str = "run") -> Run:
    """The run of some lines."""
    result = invoke("import", "sglang", written(folder, rows, name), *(options or CHAIN), "--out", folder / name)
    if result.exception:
        raise result.exception
    return Run.open(folder / name)


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_counts_are_found_where_answers_hold_them(row: Any) -> None:
    request = read(row)
    assert (request.rounds.gamma, request.rounds.steps, request.rounds.plain, request.rounds.beyond) == (5, 43, 0, 1)
    assert request.rounds.drafted == (43,) * 5
    assert request.rounds.accepted == (32, 18, 7, 3, 3)
    assert request.rounds.tested == (43, 32, 18, 7, 3)
    assert (request.prompt_tokens, request.completion_tokens, request.unread) == (5, 106, ())
    assert request.request_id in ("request-1", None)
    assert request.finish in ("length", "unknown")


@given(st.integers(1, 6).flatmap(lambda g: st.tuples(st.just(g), st.lists(st.integers(0, g), min_size=1, max_size=20))))
def test_rounds_are_those_that_vllm_would_have_logged(case: tuple[int, list[int]]) -> None:
    gamma, accepted = case
    mine = read(of_rounds(accepted, gamma))
    row = response(**counted(accepted, [gamma] * len(accepted), gamma))
    row |= {"usage": {"prompt_tokens": 5, "completion_tokens": 1 + len(accepted) + sum(accepted)}}
    assert mine.rounds == request_of(Line(Path("log.jsonl"), 1, row), None).rounds


def test_the_run_reports_what_the_answers_count(tmp_path: Path) -> None:
    path, out = written(tmp_path, [answer(1) | {"domain": "code"}, [answer(2), answer(3)]]), tmp_path / "run"
    result = invoke("import", "sglang", path, *CHAIN, "--out", out)
    assert result.exit_code == 0
    assert "3 requests, 318 tokens, gamma 5. Next: alphaprof report" in result.stdout
    report = build_report(Run.open(out))
    (item,) = report.results[0].gammas
    assert (report.run.imported, report.results[0].documents, item.gamma) == ("SGLang", 3, 5)
    assert (item.rounds, item.tokens_per_round.value) == (129, pytest.approx(105 / 43))  # type: ignore[union-attr]
    assert item.acceptance_length == pytest.approx(1 + 63 / 43)
    assert item.accepted_per_drafted == pytest.approx(DETAILS["spec_accept_rate"])
    assert item.marginal == pytest.approx([count / 43 for count in (32, 18, 7, 3, 3)])


def test_choices_and_answers_of_one_line_are_requests_of_their_own() -> None:
    row = openai(details=False)
    second = copy.deepcopy(row["choices"][0])
    second["meta_info"]["id"] = "request-2"
    row["choices"].append(second)
    first, other = requests_in(row)
    assert (first.request_id, other.request_id, first.model) == ("request-1", "request-2", "served/target")
    assert first.rounds == other.rounds


def test_one_prompt_beside_a_list_is_that_of_all_its_answers() -> None:
    rows = [{key: value for key, value in answer(number).items() if key != "prompt_token_ids"} for number in (1, 2)]
    texts = [request.names["text"] for request in requests_in({"request": {"text": "Hi"}, "response": rows})]
    assert texts[0] == texts[1]
    assert all("text" not in request.names for request in requests_in({"prompt": ["Hi", "Ho"], "response": rows}))


def test_the_messages_of_a_request_are_those_of_all_its_choices() -> None:
    row = openai(details=False)
    row["choices"] = [{**row["choices"][0], "prompt_token_ids": None} for _ in range(2)]
    texts = [request.names["text"] for request in requests_in({"messages": ["Hi"], "request": {"n": 2}, "response": row})]
    assert texts == [read({"messages": ["Hi"], "response": answer()}).names["text"]] * 2


@pytest.fixture(scope="module", params=["tree", "adaptive"])
def rounds_only(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Answers of a server whose rounds drafted no chain of one length, twice: the second one accepts less."""
    folder = tmp_path_factory.mktemp("trees")
    texts = {"good": [[3, 0, 2, 1], [0, 3, 3], [1, 1], [2, 0, 3]], "bad": [[1, 0, 1, 1], [0, 1, 1], [1, 1], [0, 0, 0]]}
    rows = {
        name: [of_rounds(rounds, 7, number) for number, rounds in enumerate(rounds_of)] for name, rounds_of in texts.items()
    }
    options = (*STRICT, "--drafting", request.param, "--gamma", "3")
    return imported(folder, rows["good"], *options, name="good"), imported(folder, rows["bad"], *options, name="bad")


def test_trees_and_adaptive_steps_have_tokens_per_round_alone(rounds_only: tuple[Run, Run]) -> None:
    run = rounds_only[0]
    totals = alphaprof.open(run.path).totals()
    by_depth = [column for name in ("drafted", "tested", "accepted") for column in depth_names(name, 3)]
    assert totals[[*by_depth, "drafted_3"]].isna().all(axis=None)
    report = build_report(run)
    (result,) = report.results
    (item,) = result.gammas
    tokens = sum(len(rounds) + sum(rounds) for rounds in ([3, 0, 2, 1], [0, 3, 3], [1, 1], [2, 0, 3]))
    assert item.tokens_per_round is not None
    assert (item.gamma, item.rounds, item.tokens_per_round.value) == (3, 12, pytest.approx(tokens / 12))
    assert 1 < item.tokens_per_round.low < item.tokens_per_round.high < 4
    unknown = (
        item.acceptance_length,
        item.accepted_per_drafted,
        item.speedup,
        *item.marginal,
        *item.conditional,
        *item.reached,
    )
    assert set(unknown) == {None}
    assert (result.alpha, result.verdict) == (None, "UNDECIDED")
    assert "rounds_only" in codes(report)
    assert not {"no_step_times", "never_full"} & codes(report)
    content = json.loads(invoke("report", run.path, "--format", "json").stdout)
    jsonschema.Draft202012Validator(json.loads(json_schema("report"))).validate(content)
    pages = {output: invoke("report", run.path, "--format", output).stdout for output in ("terminal", "md", "html")}
    assert all(pages.values())
    assert not any("nan" in page.lower().split("<script")[0] for page in pages.values())
    assert "At the largest γ. Solid: conditional" not in pages["html"]


def test_trees_and_adaptive_steps_are_compared_by_tokens_per_round(rounds_only: tuple[Run, Run]) -> None:
    good, bad = rounds_only
    content = json.loads(invoke("compare", good.path, bad.path, "--format", "json").stdout)
    (found,) = content["differences"][0]["tokens_per_round"]
    assert (found["first"], found["second"]) == pytest.approx((31 / 12, 19 / 12))
    result = invoke("check", bad.path, "--baseline", good.path, "--format", "json")
    assert json.loads(result.stdout)["items"][0]["value"] == pytest.approx(-1)


NEEDS_DEPTHS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "acceptance length": (("check", "RUN", "--min-acceptance-length", "1"), 2, "check --baseline"),
    "an export": (("export", "RUN", "--to", "vllm-synthetic"), 2, "needs rates by depth"),
    "a table": (
        ("report", "RUN", "--set", "costs.source=table", "--set", "costs.path=times.csv"),
        2,
        "step times cannot be used for",
    ),
}


@pytest.mark.parametrize(("call", "code", "words"), NEEDS_DEPTHS.values(), ids=NEEDS_DEPTHS)
def test_what_needs_more_than_rounds_is_refused(
    call: tuple[str, ...], code: int, words: str, rounds_only: tuple[Run, Run]
) -> None:
    found, text = failure(invoke(*(rounds_only[0].path if word == "RUN" else word for word in call)))
    assert found == code
    assert words in text


def test_a_chain_and_a_tree_are_not_comparable(rounds_only: tuple[Run, Run], tmp_path: Path) -> None:
    chain = imported(tmp_path, [of_rounds([3, 1], 3, number) for number in range(3)])
    code, text = failure(invoke("compare", chain.path, rounds_only[0].path))
    assert (code, "drafting chain" in text) == (12, True)


def test_a_chain_that_never_reaches_its_end_is_said_since_it_may_be_a_tree(tmp_path: Path) -> None:
    run = imported(tmp_path, [of_rounds([3, 0, 2], 7, number) for number in range(3)])
    assert next(note["message"] for note in run.manifest.warnings if note["code"] == "never_full").endswith("3 of 7 drafts")
    full = imported(tmp_path, [of_rounds([3, 0, 2], 3, number) for number in range(3)], name="full")
    assert "never_full" not in {note["code"] for note in full.manifest.warnings}


def changed(**changes: Any) -> dict[str, Any]:
    return answer(1, **changes)


def without_usage() -> dict[str, Any]:
    row = openai()
    del row["usage"]
    return row


BROKEN: dict[str, tuple[Any, str]] = {
    "rounds": (changed(spec_verify_ct=42, spec_num_proposed_drafts=210, spec_accept_length=None), "adds up to 43 rounds"),
    "accepted": (changed(spec_num_correct_drafts=62), "says 63 accepted drafts, and spec_num_correct_drafts is 62"),
    "mean": (
        changed(spec_accept_length=2.5),
        "spec_accept_length is 2.5, and completion_tokens / spec_verify_ct is 106 / 43",
    ),
    "no mean": (changed(spec_accept_length="2.5"), "spec_accept_length is 2.5, and"),
    "uneven drafts": (changed(spec_num_proposed_drafts=214), "each of 43 rounds drafted the same number"),
    "no drafts": (changed(spec_num_proposed_drafts=0), "spec_num_proposed_drafts is 0, and"),
    "too many drafts": (changed(spec_num_proposed_drafts=43 * 65), "--drafting tree or adaptive"),
    "longer rounds": (changed(spec_num_proposed_drafts=172), "counts rounds that accepted 5 drafts, and a round drafts 4"),
    "capped": (changed(spec_cap_length=3.5), "rounds verified fewer drafts than they proposed"),
    "no histogram": (changed(spec_correct_drafts_histogram=None), "spec_correct_drafts_histogram is missing"),
    "no list": (changed(spec_correct_drafts_histogram=43), "spec_correct_drafts_histogram is 43, no list"),
    "negative": (changed(spec_correct_drafts_histogram=[44, -1]), "spec_correct_drafts_histogram[1] is -1"),
    "no accepted": (changed(spec_num_correct_drafts=None), "spec_num_correct_drafts is missing"),
    "no proposed": (changed(spec_num_proposed_drafts=None), "spec_num_proposed_drafts is missing"),
    "fractional": (changed(spec_verify_ct=43.0), "spec_verify_ct is 43.0, no whole number"),
    "too long": (
        changed(completion_tokens=109, spec_accept_length=None),
        "a prefill, 0 retractions and 43 rounds that accepted 63 drafts write 107",
    ),
    "too short": (changed(completion_tokens=90, spec_accept_length=None), "completion_tokens is 90, and 43 rounds"),
    "no counts": (changed(spec_verify_ct=None), "no spec_verify_ct in meta_info or sglext.spec_tokens_details"),
    "no tokens": (changed(completion_tokens=None), "completion_tokens is missing"),
    "no usage": (without_usage(), "completion_tokens is missing"),
    "no prompt": (changed(prompt_tokens=None) | {"prompt_token_ids": None}, "prompt_tokens is missing, or 0"),
    "several choices": (openai() | {"sglext": {"spec_tokens_details": [DETAILS, DETAILS]}}, "several choices (n > 1)"),
    "an error beside counts": ({"response": answer(), "error": "cut off"}, "an answer has both an error and counts"),
    "an error beside details": (openai() | {"error": {"message": "cut off"}}, "an answer has both an error and counts"),
    "a list of numbers": ([1, 2], "a list of answers holds something else"),
    "a number": (3, "is not a JSON object"),
    "no object": (answer() | {"meta_info": [1]}, "meta_info is a list, no object"),
    "half a character": (changed(id="\ud800"), "half a character"),
}


@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_an_answer_that_cannot_be_meant_is_refused_with_its_line(row: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, [row])
    path.write_text("\n" + path.read_text())
    code, text = failure(invoke("import", "sglang", path, *CHAIN, "--out", tmp_path / "run"))
    assert (code, f"{path}, line 2: " in text) == (3, True)
    assert words in text
    assert len(text) < 600 + 2 * len(str(path))
    assert not (tmp_path / "run").exists()


HOSTILE_LINES = {
    "deep": b"[" * 100_000,
    "deep answers": b'[{"meta_info": ' * 20_000,
    "many digits": b'{"meta_info": {"spec_verify_ct": ' + b"9" * 5000,
    "an infinite mean": json.dumps(answer()).replace("2.4651162790697674", "1e999").encode(),
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_line_is_refused_in_two_lines(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line)
    code, text = failure(invoke("import", "sglang", path, *CHAIN, "--out", tmp_path / "run"))
    assert (code, "line 1: " in text) == (3, True)


def test_a_retracted_request_has_one_more_prefill(tmp_path: Path) -> None:
    row = changed(completion_tokens=109, spec_accept_length=None, num_retractions=2)
    assert (read(row).rounds.plain, read(row).rounds.prefilled) == (0, 3)
    with pytest.raises(LeftOut, match="1 retractions"):
        read(changed(completion_tokens=109, spec_accept_length=None, num_retractions=1))


def test_what_prefills_write_after_retractions_is_no_round(tmp_path: Path) -> None:
    """Rounds and their tokens are those of the same requests without a retraction."""
    rounds = [3, 0, 2, 1, 3]
    retracted = {"completion_tokens": 15 + 2, "spec_accept_length": None, "num_retractions": 2}
    runs = [
        imported(tmp_path, [of_rounds(rounds, 3, number, **changes) for number in range(3)], name=name)
        for name, changes in {"kept": {}, "retracted": retracted}.items()
    ]
    items = [build_report(run).results[0].gammas[0] for run in runs]
    for item in items:
        assert item.tokens_per_round is not None
        assert (item.rounds, item.tokens_per_round.value) == (15, pytest.approx(14 / 5))
    assert [run.manifest.imported.plain_steps for run in runs if run.manifest.imported] == [0, 0]
    assert "plain_steps" not in codes(build_report(runs[1]))


def test_requests_with_too_many_tokens_are_counted_under_one_reason(tmp_path: Path) -> None:
    rows = [of_rounds([3, 1], 3, number, completion_tokens=7 + more) for number, more in enumerate((0, 3, 4, 7))]
    rows = [{**row, "meta_info": {**row["meta_info"], "spec_accept_length": 0}} for row in rows]
    run = imported(tmp_path, rows, *CHAIN, "--leave-out")
    assert run.manifest.skipped == {"more tokens than its rounds write": 3}


def test_requests_without_rounds_are_left_out_and_counted(tmp_path: Path) -> None:
    none = dict.fromkeys(DETAILS)
    brief = answer(2, **none, completion_tokens=1)
    plain = answer(3, **none, completion_tokens=9)
    aborted = answer(4, **none, finish_reason={"type": "abort", "message": "cancelled"})
    failed = [{"error": {"message": "no"}}, {"custom_id": "c", "response": {"status_code": 400, "body": {}}, "error": None}]
    path = written(tmp_path, [answer(1), brief, aborted, *failed, {"object": "error", "message": "no"}, plain])
    code, text = failure(invoke("import", "sglang", path, *CHAIN, "--out", tmp_path / "run"))
    assert (code, "line 7: no spec_verify_ct" in text, "--leave-out" in text) == (3, True, True)
    run = imported(tmp_path, [answer(1), brief, aborted, *failed, plain], *CHAIN, "--leave-out")
    assert run.manifest.documents == 1
    assert run.manifest.skipped == {
        "no round: the prefill wrote all of it": 1,
        "the request was aborted": 1,
        "the engine answered with an error": 2,
        "no spec_verify_ct in meta_info or sglext.spec_tokens_details": 1,
    }


OPTIONS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "a tree's depth": ((*STRICT, "--drafting", "tree"), 2, "add --gamma N: the server's --speculative-num-steps"),
    "gamma": ((*CHAIN, "--gamma", "3"), 3, "rounds drafted 5 tokens each, and --gamma is 3"),
    "a flat tree": ((*STRICT, "--drafting", "tree", "--gamma", "4"), 3, "accepted 5 drafts, and a round drafts 4"),
    "no target": (("--rule", "strict", "--drafting", "chain"), 3, "there is no model"),
    "costs of a tree": (
        (*STRICT, "--drafting", "tree", "--gamma", "5", "--set", "costs.source=table", "--set", "costs.path=x.csv"),
        2,
        "step times cannot be used",
    ),
    "both": ((*CHAIN, "--domain", "a", "--domain-key", "b"), 2, "use one of them"),
    "domain key": ((*CHAIN, "--domain-key", "kind"), 3, "there is no 'kind'"),
    "temperature": (("--rule", "one_hot", "--drafting", "chain"), 2, "add --temperature"),
}


@pytest.mark.parametrize(("options", "code", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_do_not_fit_the_answers_are_refused(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [answer()], *options)
    assert found.value.exit_code == code
    assert words in f"{found.value.message} | {found.value.hint}"


def test_what_drafted_must_be_said() -> None:
    assert invoke("import", "sglang", "x.jsonl", *STRICT, "--out", "run").exit_code == 2


def test_answers_that_do_not_belong_together_are_refused_as_those_of_vllm(tmp_path: Path) -> None:
    pairs = {"speculative tokens, and": of_rounds([1], 2, 2), "is in .* as well": answer(1)}
    for number, (words, second) in enumerate(pairs.items()):
        with pytest.raises(AlphaprofError, match=words):
            imported(tmp_path, [answer(1), second], name=f"run{number}")


def test_sampled_answers_carry_their_settings_and_unknown_counts_are_named(tmp_path: Path) -> None:
    options = ("--rule", "one_hot", "--drafting", "chain", "--temperature", "0.7", "--target", "t", "--domain-key", "kind")
    run = imported(tmp_path, [changed(spec_novel=1) | {"kind": "code"}], *options)
    (result,) = build_report(run).results
    assert (result.domain, result.rule) == ("code", "one_hot")
    assert result.sampling == {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert next(note["message"] for note in run.manifest.warnings if note["code"] == "unread_fields").endswith("(1)")


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "empty"])
def test_names_from_answers_mean_nothing_but_themselves(name: str, tmp_path: Path) -> None:
    rows = [answer(number, id=f"{HOSTILE[name]}{number}") | {"domain": HOSTILE[name]} for number in range(2)]
    run = imported(tmp_path, rows, *CHAIN, "--domain-key", "domain")
    text = invoke("report", run.path).stdout
    assert text
    assert all(char.isprintable() or char == "\n" for char in text)


WRAPS: tuple[Callable[[Any], Any], ...] = (
    lambda value: {"response": value},
    lambda value: {"meta_info": value},
    lambda value: {"choices": value},
    lambda value: {"choices": [value]},
    lambda value: {"sglext": value},
    lambda value: {"sglext": {"spec_tokens_details": value}},
    lambda value: [value],
    lambda value: {"request": value, "response": answer()},
    lambda value: answer(finish_reason=value),
    lambda value: answer(spec_correct_drafts_histogram=value),
    lambda value: answer() | {"prompt_token_ids": value},
    lambda value: {"response": {"status_code": value, "body": answer()}},
)


@given(
    st.sampled_from(WRAPS),
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*DETAILS, "meta_info", "body"]), inner),
        max_leaves=6,
    ),
)
def test_no_answer_makes_a_traceback(wrap: Callable[[Any], Any], value: Any) -> None:
    with contextlib.suppress(AlphaprofError, LeftOut):
        requests_in(wrap(value))
