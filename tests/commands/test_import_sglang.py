"""Runs imported from SGLang's answers. No SGLang runs here: the answers are written from the field names of its source
(0.5.23), and from one that a user of it published (pull request 33518).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import alphaprof
from alphaprof.commands.importing import vllm
from alphaprof.commands.importing.lines import LeftOut, Line
from alphaprof.commands.importing.sglang import answers_of, request_of
from alphaprof.commands.importing.vllm import EngineRequest
from alphaprof.errors import AlphaprofError
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from alphaprof.run.schema import depth_names
from tests.commands.test_import import counted, failure, invoke, response
from tests.commands.test_import import imported as imported_with
from tests.loops import each
from tests.reporting import codes

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
    return [request_of(item, gamma, drafting) for item in answers_of(line)]


def read(row: Any, gamma: int | None = None, drafting: Any = "chain") -> EngineRequest:
    (request,) = requests_in(row, gamma, drafting)
    return request


def written(folder: Path, rows: Sequence[Any], name: str = "run") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(folder: Path, rows: Sequence[Any], *options: object, name: str = "run") -> Run:
    """The run of some lines."""
    return imported_with(folder, rows, *(options or CHAIN), name=name)


@each("row", SHAPES.values())
def test_counts_are_found_where_answers_hold_them(row: Any) -> None:
    request = read(row)
    assert (request.rounds.gamma, request.rounds.steps, request.rounds.plain, request.rounds.beyond) == (5, 43, 0, 1)
    assert request.rounds.drafted == (43,) * 5
    assert request.rounds.accepted == (32, 18, 7, 3, 3)
    assert request.rounds.tested == (43, 32, 18, 7, 3)
    assert (request.prompt_tokens, request.completion_tokens) == (5, 106)
    assert request.request_id in ("request-1", None)
    assert request.finish in ("length", "unknown")


@given(st.integers(1, 6).flatmap(lambda g: st.tuples(st.just(g), st.lists(st.integers(0, g), min_size=1, max_size=20))))
def test_rounds_are_those_that_vllm_would_have_logged(case: tuple[int, list[int]]) -> None:
    gamma, accepted = case
    mine = read(of_rounds(accepted, gamma))
    row = response(**counted(accepted, [gamma] * len(accepted), gamma))
    row |= {"usage": {"prompt_tokens": 5, "completion_tokens": 1 + len(accepted) + sum(accepted)}}
    assert mine.rounds == vllm.request_of(Line(Path("log.jsonl"), 1, row), None).rounds


def test_the_run_reports_what_the_answers_count(tmp_path: Path) -> None:
    path, out = written(tmp_path, [answer(1) | {"domain": "code"}, [answer(2), answer(3)]]), tmp_path / "the run"
    result = invoke("import", path, *CHAIN, "--out", out)
    assert result.exit_code == 0
    assert "3 requests, 318 tokens, gamma 5. Next: alphaprof report '" in result.stdout
    report = build_report(Run.open(out))
    (item,) = report.results[0].gammas
    assert (report.run.imported, report.results[0].documents, item.gamma) == ("SGLang", 3, 5)
    assert (item.rounds, item.tokens_per_round.value) == (129, pytest.approx(105 / 43))
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
    assert (item.gamma, item.rounds, item.tokens_per_round.value) == (3, 12, pytest.approx(tokens / 12))
    assert 1 < item.tokens_per_round.low < item.tokens_per_round.high < 4
    unknown = (item.acceptance_length, item.accepted_per_drafted, item.speedup, *item.marginal, *item.conditional)
    assert set(unknown) == {None}
    assert (result.alpha, result.verdict) == (None, "UNDECIDED")
    assert "rounds_only" in codes(report)
    pages = {output: invoke("report", run.path, "--format", output).stdout for output in ("terminal", "md", "html", "json")}
    assert all(pages.values())
    assert not any("nan" in page.lower().split("<script")[0] for page in pages.values())
    assert "At the largest γ. Solid: conditional" not in pages["html"]


def test_trees_and_adaptive_steps_are_compared_by_tokens_per_round(rounds_only: tuple[Run, Run]) -> None:
    good, bad = rounds_only
    content = json.loads(invoke("compare", good.path, bad.path, "--format", "json").stdout)
    (found,) = content["differences"][0]["tokens_per_round"]
    assert (found["first"], found["second"]) == pytest.approx((31 / 12, 19 / 12))
    result = invoke("check", bad.path, "--baseline", good.path, "--format", "json")
    assert json.loads(result.stdout)["items"][0]["value"] == pytest.approx(19 / 31 - 1)


NEEDS_DEPTHS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("check", "RUN", "--min-acceptance-length", "1"), 2),
    (("export", "RUN", "--to", "rates"), 2),
    (("report", "RUN", "--set", "costs.source=table", "--set", "costs.path=times.csv"), 2),
    (("compare", "CHAIN", "RUN"), 12),
)


def test_what_needs_more_than_rounds_is_refused(rounds_only: tuple[Run, Run], tmp_path: Path) -> None:
    chain = imported(tmp_path, [of_rounds([3, 1], 3, number) for number in range(3)])
    places = {"RUN": rounds_only[0].path, "CHAIN": chain.path}
    for call, code in NEEDS_DEPTHS:
        assert failure(invoke(*(places.get(word, word) for word in call)))[0] == code


def test_a_chain_that_never_reaches_its_end_is_said_since_it_may_be_a_tree(tmp_path: Path) -> None:
    for gamma in (3, 7):
        run = imported(tmp_path, [of_rounds([3, 0, 2], gamma, number) for number in range(3)], name=f"gamma{gamma}")
        assert ("never_full" in {note["code"] for note in run.manifest.warnings}) == (gamma == 7)


def changed(**changes: Any) -> dict[str, Any]:
    return answer(1, **changes)


BROKEN: tuple[tuple[Any, str], ...] = (
    (changed(spec_verify_ct=42, spec_num_proposed_drafts=210), "their histogram has 43 rounds"),
    (changed(spec_num_proposed_drafts=214), "--drafting tree or adaptive"),
    (changed(spec_num_proposed_drafts=172), "proposed 172 drafts and accepted up to 5"),
    (changed(spec_cap_length=3.5), "verified fewer than they proposed"),
    (changed(spec_correct_drafts_histogram=None), "spec_correct_drafts_histogram is missing"),
    (changed(completion_tokens=109), "more tokens than the rounds explain"),
    (changed(completion_tokens=90), "more rounds than the text allows"),
    (changed(spec_verify_ct=None), "no spec_verify_ct in meta_info or sglext.spec_tokens_details"),
    (openai() | {"sglext": {"spec_tokens_details": [DETAILS, DETAILS]}}, "several choices (n > 1)"),
)


@each(("row", "words"), BROKEN)
def test_an_answer_that_cannot_be_meant_is_refused_with_its_line(row: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, [row])
    path.write_text("\n" + path.read_text())
    code, text = failure(invoke("import", path, *CHAIN, "--out", tmp_path / "run"))
    assert (code, f"{path}, line 2: " in text, words in text) == (3, True, True)
    assert not (tmp_path / "run").exists()


def test_a_retracted_request_has_one_more_prefill() -> None:
    row = changed(completion_tokens=109, num_retractions=2)
    assert (read(row).rounds.plain, read(row).rounds.prefilled) == (0, 3)
    with pytest.raises(LeftOut, match="more tokens"):
        read(changed(completion_tokens=109, num_retractions=1))


def test_what_prefills_write_after_retractions_is_no_round(tmp_path: Path) -> None:
    """Rounds and their tokens are those of the same requests without a retraction."""
    rounds = [3, 0, 2, 1, 3]
    retracted = {"completion_tokens": 15 + 2, "num_retractions": 2}
    runs = [
        imported(tmp_path, [of_rounds(rounds, 3, number, **changes) for number in range(3)], name=name)
        for name, changes in {"kept": {}, "retracted": retracted}.items()
    ]
    items = [build_report(run).results[0].gammas[0] for run in runs]
    for item in items:
        assert (item.rounds, item.tokens_per_round.value) == (15, pytest.approx(14 / 5))
    assert [run.manifest.imported.plain_steps for run in runs if run.manifest.imported] == [0, 0]
    assert "plain_steps" not in codes(build_report(runs[1]))


def test_requests_without_rounds_are_left_out_and_counted(tmp_path: Path) -> None:
    none = dict.fromkeys(DETAILS)
    brief = answer(2, **none, completion_tokens=1)
    plain = answer(3, **none, completion_tokens=9)
    aborted = answer(4, **none, finish_reason={"type": "abort", "message": "cancelled"})
    failed = [{"error": {"message": "no"}}, {"custom_id": "c", "response": {"status_code": 400, "body": {}}, "error": None}]
    path = written(tmp_path, [answer(1), brief, aborted, *failed, {"object": "error", "message": "no"}, plain])
    code, text = failure(invoke("import", path, *CHAIN, "--out", tmp_path / "run"))
    assert (code, "line 7: no spec_verify_ct" in text, "--leave-out" in text) == (3, True, True)
    run = imported(tmp_path, [answer(1), brief, aborted, *failed, plain], *CHAIN, "--leave-out")
    assert run.manifest.documents == 1
    assert run.manifest.skipped == {
        "no round: prefill wrote the whole text": 1,
        "the request was aborted": 1,
        "the engine answered with an error": 2,
        "no spec_verify_ct in meta_info or sglext.spec_tokens_details": 1,
    }


OPTIONS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    ((*STRICT, "--drafting", "tree"), 2, "add --gamma N: the server's --speculative-num-steps"),
    ((*CHAIN, "--gamma", "3"), 3, "--gamma is 3, but the histogram counts 0 to 5"),
    (("--rule", "strict", "--drafting", "chain"), 3, "no model is named"),
    (
        (*STRICT, "--drafting", "tree", "--gamma", "5", "--set", "costs.source=table"),
        2,
        "costs.source=table if rounds drafted chains",
    ),
)


@each(("options", "code", "words"), OPTIONS)
def test_options_that_do_not_fit_the_answers_are_refused(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [answer()], *options)
    assert (found.value.exit_code, words in f"{found.value.message} | {found.value.hint}") == (code, True)
