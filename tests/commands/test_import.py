"""Runs imported from an engine's metrics: rounds as the engine counted them, and nothing that it does not tell."""

from __future__ import annotations

import copy
import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import alphaprof
from alphaprof.cli.app import app
from alphaprof.commands.importing.lines import LeftOut, Line
from alphaprof.commands.importing.vllm import request_of
from alphaprof.errors import AlphaprofError
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from alphaprof.run.schema import UNKNOWN_TO_ENGINES, depth_names
from tests.loops import each
from tests.reporting import HOSTILE, as_json, codes, only, runs_of
from tests.synthetic import Domain, Recipe, rewritten, write_run

# The example of vLLM's page on per-request acceptance metrics: 43 rounds, 10 accepted drafts of 129.
METRICS = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}
RESPONSE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "served/target",
    "choices": [{"index": 0, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 54},
    "prompt_token_ids": [1, 2, 3, 4, 5],
    "metrics": {"speculative_decoding": METRICS},
}
STRICT = ("--rule", "strict")


def response(number: int = 1, **metrics: Any) -> dict[str, Any]:
    """The example as the answer to one prompt, with other metrics."""
    found = copy.deepcopy(RESPONSE) | {"id": f"chatcmpl-{number}", "prompt_token_ids": [number, 7]}
    found["metrics"]["speculative_decoding"] |= metrics
    return found


def counted(accepted: Sequence[int], drafted: Sequence[int], gamma: int, detailed: bool = False) -> dict[str, Any]:
    """Metrics of rounds, added up one by one."""
    histogram = [sum(1 for count in accepted if count == kept) for kept in range(gamma + 1)]
    found = {
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": gamma,
    }
    return found | ({"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)} if detailed else {})


def read(row: Mapping[str, Any], gamma: int | None = None) -> Any:
    return request_of(Line(Path("log.jsonl"), 1, row), gamma).rounds


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def failure(result: Any) -> tuple[int, str]:
    """The exit code and both lines of a failure that a user can cause."""
    assert isinstance(result.exception, AlphaprofError), result.exception
    return result.exception.exit_code, f"{result.exception.message} | {result.exception.hint}"


def imported(folder: Path, rows: Sequence[Any], *options: object, name: str = "run") -> Run:
    """The run of some lines."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke("import", path, *(options or STRICT), "--out", folder / name)
    if result.exception:
        raise result.exception
    return Run.open(folder / name)


@pytest.mark.parametrize(
    ("written", "rounds", "beyond"),
    [(54, 43, 0), (52, 43, 2), (60, 49, 0)],
    ids=["to the end", "the last round goes beyond the end", "six steps without drafts"],
)
def test_rounds_follow_from_the_histogram_and_the_tokens(tmp_path: Path, written: int, rounds: int, beyond: int) -> None:
    row = response()
    row["usage"]["completion_tokens"] = written
    found = read(row)
    assert (found.drafted, found.tested, found.accepted) == ((43, 43, 43), (43, 4, 3), (4, 3, 3))
    assert (found.steps + found.plain, found.beyond) == (rounds, beyond)
    run = imported(tmp_path, [row])
    (result,) = build_report(run).results
    (item,) = result.gammas
    assert (item.gamma, item.rounds, item.tokens_per_round.value) == (3, rounds, pytest.approx((written - 1) / rounds))
    assert item.acceptance_length == METRICS["mean_acceptance_length"]
    assert item.accepted_per_drafted == METRICS["draft_acceptance_rate"]
    assert item.marginal == pytest.approx((4 / 43, 3 / 43, 3 / 43))
    assert item.conditional == pytest.approx((4 / 43, 3 / 4, 1.0))


@given(
    st.integers(1, 5).flatmap(lambda g: st.lists(st.tuples(st.integers(0, g), st.integers(0, g)), min_size=1, max_size=9))
)
def test_depths_are_those_of_the_rounds_one_by_one(pairs: list[tuple[int, int]]) -> None:
    rounds = [(min(pair), max(pair)) for pair in pairs]
    gamma = max(max(drafted for _, drafted in rounds), 1)
    accepted, drafted = zip(*rounds, strict=True)
    written = 1 + len(rounds) + sum(accepted)
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": written}}
    row = response(**counted(accepted, drafted, gamma, detailed=True)) | usage
    found = read(row, gamma)
    depths = range(1, gamma + 1)
    assert found.accepted == tuple(sum(kept >= d for kept, _ in rounds) for d in depths)
    assert found.drafted == tuple(sum(tried >= d for _, tried in rounds) for d in depths)
    assert found.tested == tuple(sum(tried >= d and kept >= d - 1 for kept, tried in rounds) for d in depths)
    lengths = {
        str(tried): [sum(pair == (kept, tried) for pair in rounds) for kept in range(tried + 1)] for tried in set(drafted)
    }
    summary = counted(accepted, drafted, gamma)
    assert read(response(**summary, acceptance_histogram_by_draft_length=lengths) | usage) == found
    try:  # where the summary is enough, it says the same
        assert read(response(**summary) | usage) == found
    except LeftOut:
        assert len(set(drafted)) > 1 or drafted[0] < gamma


HALF = METRICS | {"per_step_accepted": [0] * 43}
RENAMED = {**METRICS, "num_accepted_tokens": 10, "num_accepted_draft_tokens": None}
WRAPPINGS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda row: {"id": "b", "custom_id": "c", "response": {"status_code": 200, "body": row}, "error": None},  # batch file
    lambda row: {"request": {"prompt": "Hi"}, "response": row},  # proxy
    lambda row: {  # the offline engine
        "prompt_token_ids": row["prompt_token_ids"],
        "completion_tokens": 54,
        "spec_decode_metrics": row["metrics"]["speculative_decoding"],
    },
    lambda row: {"response": row | {"error": {}}, "error": ""},
    lambda row: row | {"response": {"text": "Once", "error": "none"}},
    lambda row: row | {"metrics": {"speculative_decoding": HALF}},
    lambda row: row | {"object": "chat.completion.chunk", "choices": []},  # a stream's last
    lambda row: row | {"metrics": {"speculative_decoding": RENAMED}},
)


@each("wrap", WRAPPINGS)
def test_the_metrics_are_found_where_responses_hold_them(wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert read(wrap(response())) == read(response())


# Recorded from vLLM 0.32.0 (CPU, float32, `detailed` metrics). Its server, with SmolLM2-135M-Instruct and prompt lookup of 3
# tokens, answered single requests of every kind, and ten chats; its offline engine wrote eight texts with stories15M.
GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"
ANSWERS = json.loads((GOLDEN / "answers-0.32.0.json").read_text())
RECORDED = ("chat-ngram-g3-0.32.0.jsonl", "offline-draft-g1-0.32.0.jsonl")
SINGLE = {  # known by; prompt and text tokens, finish; rounds with and without a draft; drafted and accepted by depth
    "completions": ("token ids", (7, 8, "length"), (1, 6), (1, 1, 1), (0, 0, 0)),
    "one token": ("token ids", (40, 1, "length"), (0, 0), (0, 0, 0), (0, 0, 0)),
    "stream": ("request id", (40, 8, "unknown"), (2, 0), (2, 2, 2), (2, 2, 1)),
}
UNCOUNTED = {
    "two prompts": "for which vLLM counts no rounds | use n = 1 and one prompt",
    "two choices": "for which vLLM counts no rounds | use n = 1",
    "responses": "no vLLM metrics | send the requests to /v1/chat/completions",
    "stream without usage": "and so without metrics | set stream_options: {include_usage: tr",
    "min_p": "answered with an error (1) | change the requests and send them again; the engine said 'The min_p and",
    "too long": "answered with an error (1) | change the requests and send them again; the engine said 'max_tokens=5000",
}


@each("name", SINGLE)
def test_a_recorded_answer_is_read_as_the_engine_counted_it(name: str, tmp_path: Path) -> None:
    known_by, (prompt, written, finish), (steps, plain), drafted, accepted = SINGLE[name]
    metrics = ANSWERS[name]["metrics"]["speculative_decoding"]
    run = imported(tmp_path, [ANSWERS[name]], name=name)
    assert (run.manifest.imported.prompts_known_by, run.manifest.target.reference) == (known_by, "TARGET")
    (document,) = run.documents().to_pylist()
    assert [document[key] for key in ("prompt_tokens", "continuation_tokens", "finish")] == [prompt, written, finish]
    rounds = read(ANSWERS[name])
    assert (rounds.steps, rounds.plain, rounds.beyond) == (metrics["num_spec_steps"], plain, 0) == (steps, plain, 0)
    assert (rounds.drafted, rounds.accepted) == (drafted, accepted)
    assert (sum(drafted), sum(accepted)) == (metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"])


@each(("name", "words"), UNCOUNTED.items())
def test_a_recorded_answer_without_metrics_says_why_and_what_to_do(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [ANSWERS[name]], name=name)
    assert found.value.exit_code == 3
    assert words in f"{found.value.message} | {found.value.hint}"
    run = imported(tmp_path, [response(), ANSWERS[name]], *STRICT, "--leave-out", name=f"{name} and another")
    assert (run.manifest.documents, sum(run.manifest.skipped.values())) == (1, 1)


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a recorded request, of the server's or of the offline engine's."""
    found = row["spec_decode_metrics"] if "spec_decode_metrics" in row else row["metrics"]["speculative_decoding"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_imported_with_the_numbers_that_the_engine_gave(name: str, tmp_path: Path) -> None:
    rows = recorded(name)
    run = imported(tmp_path, rows, *STRICT, "--domain-key", "domain")
    documents, totals = run.documents().to_pandas(), alphaprof.open(run.path).totals()
    for number, row in enumerate(rows):
        metrics, usage = metrics_of(row), row.get("usage", row)
        gamma, steps = metrics["num_spec_tokens"], [metrics[f"per_step_{name}"] for name in ("accepted", "drafted")]
        depths = {name: totals.loc[number, list(depth_names(name, gamma))].tolist() for name in ("accepted", "drafted")}
        assert depths["accepted"] == [sum(count >= d for count in steps[0]) for d in range(1, gamma + 1)]
        assert depths["drafted"] == [sum(count >= d for count in steps[1]) for d in range(1, gamma + 1)]
        assert 1 + sum(depths["accepted"]) / len(steps[0]) == pytest.approx(metrics["mean_acceptance_length"])
        assert sum(depths["accepted"]) / sum(depths["drafted"]) == pytest.approx(metrics["draft_acceptance_rate"])
        assert documents.loc[number, "continuation_tokens"] == usage["completion_tokens"]
        assert documents.loc[number, "prompt_tokens"] == len(row["prompt_token_ids"])
        assert documents.loc[number, "domain"] == row["domain"]
    assert run.manifest.skipped == {}
    for result in build_report(run).results:
        mine = [metrics_of(row) for row in rows if row["domain"] == result.domain]
        accepted, steps = (sum(found[key] for found in mine) for key in ("num_accepted_draft_tokens", "num_spec_steps"))
        assert result.gammas[0].acceptance_length == pytest.approx(1 + accepted / steps)


def chunk(content: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of a chat that vLLM streams, as its source writes it."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "chatcmpl-9", "object": "chat.completion.chunk", "model": "TARGET", "choices": [choice]} | fields


def test_the_first_and_the_last_chunk_of_a_stream_are_one_line() -> None:
    first, last = chunk(prompt_token_ids=[5, 6, 7]), ANSWERS["stream"]
    request = request_of(Line(Path("log.jsonl"), 1, first | last), None)
    assert request.rounds == read(last)
    assert {"token ids", "request id"} == set(request.names)


PARTS = (
    chunk(prompt_token_ids=[5, 6, 7]),
    chunk("One", usage={"prompt_tokens": 3, "completion_tokens": 1}),
    {"object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": None}]},
)


@each("part", PARTS)
def test_chunks_of_a_stream_one_by_one_are_refused(part: dict[str, Any], tmp_path: Path) -> None:
    """Also where requests may be left out: each chunk would count as one."""
    with pytest.raises(AlphaprofError, match="line 1: a chunk from the middle of a stream") as found:
        imported(tmp_path, [part, chunk(finish="length"), ANSWERS["stream"]], *STRICT, "--leave-out")
    assert "merge the chunks of each request into one line" in found.value.hint


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does: a recorded answer, or an error where the prompt asks for one."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["return_token_ids"] is True
        failed = body["messages"][0]["content"] == "fail"
        text = json.dumps(ANSWERS["min_p" if failed else "one token"]).encode()
        self.send_response(400 if failed else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.mark.loopback
def test_the_documented_client_writes_lines_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    (client,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "urllib" in code]
    rows = [{"domain": kind, "messages": [{"role": "user", "content": kind}]} for kind in ("one", "fail", "two")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        code = client.replace("http://localhost:8000", f"http://127.0.0.1:{server.server_port}")
        assert code != client
        exec(compile(code, "import.md", "exec"), {})  # noqa: S102  (our own page)
        server.shutdown()
    lines = [json.loads(line) for line in Path("requests.jsonl").read_text().splitlines()]
    assert [row["domain"] for row in lines] == ["one", "fail", "two"]
    run = imported(tmp_path, [row | {"id": number} for number, row in enumerate(lines)], *STRICT, "--domain-key", "domain")
    assert run.manifest.skipped == {"the engine answered with an error": 1}
    assert run.documents()["prompt_tokens"].to_pylist() == [40, 40]
    assert run.manifest.imported.prompts_known_by == "token ids"


def as_requests(run: Run, draft: str, gamma: int, beyond: int = 0) -> list[dict[str, Any]]:
    """What an engine would log of the run's documents, walked round by round at one gamma. `beyond`: drafts that it accepts
    behind the end of a text, at most.
    """
    positions = pd.read_parquet(run.path / "positions").sort_values(["document", "position"])
    domains = run.documents().to_pandas().set_index("document")["domain"].astype(str)
    rows = []
    for number, text in positions[positions["draft"] == draft].groupby("document"):
        proposed = text["proposed"].tolist()
        runs = runs_of(((text["draft_top"] == text["token"]) & (text["proposed"] > 0)).tolist())
        accepted, drafted, place = [], [], 1
        while place < len(text):
            ready = min(gamma, proposed[place])
            kept = min(ready, runs[place])
            place += kept + 1
            kept += min(beyond, ready - kept) if place > len(text) else 0
            if ready:
                accepted.append(kept)
                drafted.append(ready)
        row = response(int(number), **counted(accepted, drafted, gamma)) | {"domain": domains[number]}
        rows.append(row | {"usage": {"prompt_tokens": 8, "completion_tokens": len(text)}})
    return rows


SIMULATED = Recipe(
    domains={
        "code": Domain(documents=14, alpha=0.8),
        "chat": Domain(documents=14, alpha=0.4, bursts=0.3),
        "gaps": Domain(documents=14, alpha=0.7, coverage=0.6),
    },
    seed=3,
)


def end_wrong(frame: pd.DataFrame) -> None:
    last = frame["position"] == frame.groupby("document")["position"].transform("max")
    frame.loc[last, "draft_top"] = (frame.loc[last, "token"] + 1) % 1000


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose drafts are wrong at the last token of every text: no round goes beyond an end."""
    return rewritten(write_run(tmp_path_factory.mktemp("simulated") / "run", SIMULATED), "small", end_wrong)


@pytest.mark.parametrize("gamma", [1, 3, 4])
def test_an_imported_run_reports_the_rounds_of_the_run_that_was_logged(simulated: Run, gamma: int, tmp_path: Path) -> None:
    run = imported(tmp_path, as_requests(simulated, "small", gamma), *STRICT, "--domain-key", "domain")
    report, original = build_report(run), build_report(simulated)
    for domain in SIMULATED.domains:
        mine = only(report, domain, "engine")
        its = only(original, domain)
        (item,), other = mine.gammas, next(found for found in its.gammas if found.gamma == gamma)
        assert (mine.documents, mine.positions) == (its.documents, its.positions)
        assert dataclasses.astuple(item.tokens_per_round) == pytest.approx(dataclasses.astuple(other.tokens_per_round))
        assert (item.rounds, item.acceptance_length) == pytest.approx((other.rounds, other.acceptance_length))
        assert item.marginal == pytest.approx(other.marginal)
        assert item.conditional == pytest.approx(other.conditional)
        assert item.accepted_per_drafted == pytest.approx(other.accepted_per_drafted)


@pytest.mark.parametrize("gamma", [2, 4])
def test_drafts_accepted_behind_the_end_of_a_text_are_no_tokens(gamma: int, tmp_path: Path) -> None:
    simulated = write_run(tmp_path / "simulated", Recipe(domains={"code": Domain(documents=12, alpha=0.85)}))
    run = imported(tmp_path, as_requests(simulated, "small", gamma, beyond=2), *STRICT)
    mine, its = only(build_report(run), "traffic", "engine"), only(build_report(simulated), "code")
    (item,), other = mine.gammas, next(found for found in its.gammas if found.gamma == gamma)
    assert run.manifest.imported.beyond_the_end > 0
    assert dataclasses.astuple(item.tokens_per_round) == pytest.approx(dataclasses.astuple(other.tokens_per_round))
    assert item.rounds == other.rounds
    assert item.acceptance_length > other.acceptance_length


@pytest.fixture(scope="module")
def pair(simulated: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two served drafts on the same prompts, the second accepting one draft less wherever it can."""
    folder = tmp_path_factory.mktemp("pair")
    rows = as_requests(simulated, "small", 3)
    worse = copy.deepcopy(rows)
    for row in worse:
        metrics = row["metrics"]["speculative_decoding"]
        none, one, *more = metrics["acceptance_histogram"]
        kept = [none + one, *more, 0]
        steps, accepted = sum(kept), sum(count * index for index, count in enumerate(kept))
        row["metrics"]["speculative_decoding"] |= counted([0] * steps, [3] * steps, 3)
        row["metrics"]["speculative_decoding"] |= {"acceptance_histogram": kept, "num_accepted_draft_tokens": accepted}
    options = (*STRICT, "--domain-key", "domain", "--draft", "eagle")
    return imported(folder, rows, *options, name="good"), imported(folder, worse, *options, name="bad")


def test_what_an_engine_does_not_tell_is_null_and_said(pair: tuple[Run, Run]) -> None:
    run, report = pair[0], build_report(pair[0])
    content = as_json(report)
    for result in content["sections"]["drafts"]:
        unknown = ("alpha", "coverage", "mismatches", "near_ties", "impossible", "self_check")
        assert {name: result[name] for name in unknown} == dict.fromkeys(unknown)
        assert [item["gamma"] for item in result["gammas"]] == [3]
        assert [item["speedup"] for item in result["gammas"]] == [None]
        assert [item["iid_tokens_per_round"] for item in result["gammas"]] == [None]
    assert content["run"]["imported"] == "vLLM"
    assert {"imported", "no_step_times"} <= codes(report)
    totals = alphaprof.open(run.path).totals()
    assert totals[list(UNKNOWN_TO_ENGINES)].isna().all(axis=None)


def test_step_times_of_a_table_turn_rounds_into_a_speedup(pair: tuple[Run, Run], tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    table.write_text("model,tokens,ms\ntarget,1,10\ntarget,2,10\ntarget,4,11\neagle,1,1\n")
    result = invoke(
        *("report", pair[0].path, "--set", "costs.source=table", "--set", f"costs.path={table}", "--format", "json")
    )
    content = json.loads(result.stdout)
    code = next(item for item in content["sections"]["drafts"] if item["domain"] == "code")
    (item,) = code["gammas"]
    assert item["break_even_length"] == pytest.approx((3 * 1 + 11) / 10)
    assert item["speedup"]["value"] == pytest.approx(item["tokens_per_round"]["value"] / 1.4)
    assert (code["verdict"], content["answer"]["draft"]) == ("GO", "eagle")


def test_a_request_of_one_token_has_no_speed(tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    table.write_text("model,tokens,ms\ntarget,1,10\ntarget,4,11\nengine,1,1\n")
    short = response(2, **counted([], [], 3)) | {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    times = ("--set", "costs.source=table", "--set", f"costs.path={table}")
    for name, rows in {"alone": [short], "both": [response(1), short]}.items():
        run = imported(tmp_path, rows, *STRICT, *times, name=name)
        (result,) = build_report(run).results
        assert (result.documents, result.verdict) == (len(rows), "UNDECIDED")
        assert (result.gammas[0].speedup is None) == (name == "alone")
        assert all(invoke("report", run.path, "--format", output).stdout for output in ("terminal", "html"))


def test_a_check_of_acceptance_length_counts_as_the_engine_does(pair: tuple[Run, Run]) -> None:
    documents = pair[0].documents().to_pandas()
    rows = alphaprof.open(pair[0].path).totals()[documents["domain"].astype(str) == "gaps"]
    accepted, rounds = (rows[depth_names(name, 3)].to_numpy() for name in ("accepted", "drafted"))
    expected = 1 + accepted.sum() / rounds[:, 0].sum()
    result = invoke("check", pair[0].path, "--min-acceptance-length", "gaps=1.2", "--format", "json")
    content = json.loads(result.stdout)
    assert content["items"][0]["value"] == pytest.approx(expected)
    assert (content["outcome"], content["gamma"]) == ("pass", 3)


def spent(run: Run) -> dict[str, tuple[Any, Any]]:
    """Tokens behind the first and all rounds, by domain."""
    rows = alphaprof.open(run.path).totals()
    domains = run.documents().to_pandas()["domain"].astype(str)
    parts = [rows[name].to_numpy() for name in ("tokens", "rounds_3")]
    return {domain: (parts[0][domains == domain], parts[1][domains == domain]) for domain in domains.unique()}


def test_a_baseline_of_imported_runs_is_a_check_of_tokens_per_round(pair: tuple[Run, Run]) -> None:
    good, bad = pair
    result = invoke("check", bad.path, "--baseline", good.path, "--margin", "0.1", "--format", "json")
    content = json.loads(result.stdout)
    assert (result.exception.exit_code, content["outcome"], content["gamma"], content["paired"]) == (10, "fail", 3, 42)
    rng = np.random.default_rng(0)
    for item in content["items"]:
        whole = item["domain"] == "whole traffic"
        sums = [spent(run) for run in (good, bad)]
        sides = [
            tuple(map(np.concatenate, zip(*each.values(), strict=True))) if whole else each[item["domain"]] for each in sums
        ]
        before, after = (tokens.sum() / rounds.sum() for tokens, rounds in sides)
        assert (item["measure"], item["outcome"]) == ("tokens_per_round_change", "fail")
        assert item["value"] == pytest.approx(after / before - 1)
        count = len(sides[0][0])
        draws = rng.integers(0, count, (2000, count))  # documents drawn again: an independent look at the spread
        redrawn = [tokens[draws].sum(1) / rounds[draws].sum(1) for tokens, rounds in sides]
        spread = float((redrawn[1] - redrawn[0]).std()) / before
        assert 1.2 * spread < item["value"] - item["low"] < 3.5 * spread
    again = json.loads(invoke("check", good.path, "--baseline", bad.path, "--format", "json").stdout)
    assert again["outcome"] == "pass"
    assert "tokens_per_round_change" in invoke("check", good.path, "--baseline", bad.path).stdout


def test_two_served_drafts_are_compared_by_their_rounds(pair: tuple[Run, Run]) -> None:
    content = json.loads(invoke("compare", pair[0].path, pair[1].path, "--format", "json").stdout)
    reports = [build_report(run) for run in pair]
    assert (content["documents"], content["same_text"]) == (42, None)
    for item in content["differences"]:
        (found,) = item["tokens_per_round"]
        values = [only(report, item["domain"], "eagle").gammas[0].tokens_per_round.value for report in reports]
        assert [found["first"], found["second"]] == pytest.approx(values)
        assert found["difference"]["value"] == pytest.approx(values[1] - values[0])
        assert (item["first"], item["second_coverage"], item["difference"]) == (None, None, None)
    assert "alpha\n" not in invoke("compare", pair[0].path, pair[1].path).stdout


RECOGNIZED: dict[str, tuple[Any, tuple[object, ...], int, str]] = {
    "no rule": (RESPONSE, (), 2, "requests do not tell the acceptance rule of the engine | add --rule strict"),
    "an option of texts": (RESPONSE, (*STRICT, "--pool"), 2, "--pool does not apply to requests of vLLM"),
    "trees of vLLM": (RESPONSE, (*STRICT, "--drafting", "tree"), 2, "vLLM drafts chains"),
    "two gammas": (RESPONSE, (*STRICT, "--gamma", 3, "--gamma", 4), 2, "requests have one --gamma"),
    "an option of requests": (
        {"prompt_token_ids": [1], "token_ids": [2]},
        ("--leave-out", "--format", "texts"),
        2,
        "to texts",
    ),
    "SGLang": ({"meta_info": {"spec_num_correct_drafts": 1}}, STRICT, 2, "SGLang's counts do not tell what a round drafts"),
    "no counts": ({"choices": [{}], "usage": {}}, STRICT, 3, "no metrics.speculative_decoding"),
}


@each(("row", "options", "code", "words"), RECOGNIZED.values())
def test_what_a_file_is_says_which_options_it_has(
    row: Any, options: tuple[object, ...], code: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"error": "overloaded"}) + "\n" + json.dumps(row) + "\n")
    found, text = failure(invoke("import", path, *options, "--out", tmp_path / "run"))
    assert (found, words in text) == (code, True), text


def test_a_server_is_for_diagnose_and_files_are_of_one_kind(tmp_path: Path) -> None:
    page, requests, texts = GOLDEN / "metrics-1.txt", tmp_path / "requests.jsonl", tmp_path / "texts.jsonl"
    requests.write_text(json.dumps(RESPONSE) + "\n")
    texts.write_text(json.dumps({"prompt_token_ids": [1], "token_ids": [2]}) + "\n")
    for place, code in ((page, 3), ("http://127.0.0.1:8000", 2)):
        found, text = failure(invoke("import", place, "--out", tmp_path / "run"))
        assert (found, f"alphaprof diagnose {place} shows what it counts" in text) == (code, True), text
    code, text = failure(invoke("import", requests, texts, "--out", tmp_path / "run"))
    assert (code, "requests.jsonl (vllm)" in text, "--format" in text) == (2, True, True)


def test_runs_that_were_served_otherwise_are_not_comparable(pair: tuple[Run, Run], simulated: Run, tmp_path: Path) -> None:
    """By rule, and by gamma."""

    def sampled(rule: str) -> Run:
        return imported(tmp_path, [response()], "--rule", rule, "--temperature", "1", name=rule)

    shorter = imported(tmp_path, as_requests(simulated, "small", 2), *STRICT, "--domain-key", "domain", "--draft", "eagle")
    token, block, one_hot = sampled("lossless"), sampled("block"), sampled("one_hot")
    for first, second, words in (
        (token, block, "rule block"),
        (token, one_hot, "rule one_hot"),
        (pair[0], shorter, "gamma 2"),
    ):
        code, text = failure(invoke("compare", first.path, second.path))
        assert (code, words in text) == (12, True)
        assert failure(invoke("check", first.path, "--baseline", second.path))[0] == 12


REFUSED: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("report", "GOOD", "--rules", "additive:0.2"), 6, "rounds of strict at gamma 3"),
    (("report", "GOOD", "--set", "decision.gamma=2"), 2, "not among gammas"),
    (("check", "GOOD", "--min-alpha", "0.5"), 2, "do not give alpha"),
    (("check", "GOOD", "--baseline", "PROFILED"), 12, "was profiled"),
)


@each(("call", "code", "words"), REFUSED)
def test_what_needs_more_than_rounds_is_refused(
    call: tuple[str, ...], code: int, words: str, pair: tuple[Run, Run], simulated: Run
) -> None:
    places = {"GOOD": pair[0].path, "PROFILED": f"{simulated.path}:small"}
    found, text = failure(invoke(*(places.get(word, word) for word in call)))
    assert (found, words in text) == (code, True)


def test_rates_are_exported_as_the_engine_counted_them(pair: tuple[Run, Run]) -> None:
    result = invoke("export", pair[0].path, "--to", "rates", "--domain", "code")
    (item,) = only(build_report(pair[0]), "code", "eagle").gammas
    assert json.loads(result.stdout)["gammas"][0]["marginal_full"] == pytest.approx(item.marginal, abs=1e-6)


NO_IDS = {"prompt_token_ids": None}
UNPAIRED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, NO_IDS | {"prompt": "Hi"}, "prompts keyed by token ids, and TWO with prompts keyed by text"),
    (NO_IDS, NO_IDS | {"id": "another"}, "by request id"),
    ({}, {"prompt_token_ids": [8]}, "have no prompt in common"),
)


@each(("one", "two", "words"), UNPAIRED)
def test_imported_runs_without_a_common_prompt_say_what_to_log(
    one: dict[str, Any], two: dict[str, Any], words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("unpaired")
    first = imported(folder, [response() | one], name="one").path
    second = imported(folder, [response() | two], name="two").path
    for call in (("compare", first, second), ("check", second, "--baseline", first)):
        code, text = failure(invoke(*call))
        assert code == 12
        assert words in text.replace(str(first), "ONE").replace(str(second), "TWO")


def test_ids_of_the_caller_pair_requests(tmp_path: Path) -> None:
    """The engine's own are new in each answer, and `custom_id` is what a batch file asked with."""
    rows = [response(number) | {"prompt_token_ids": None, "custom_id": f"prompt {number}"} for number in range(3)]
    sides = [imported(tmp_path, rows, name=name).path for name in ("one", "two")]
    assert json.loads(invoke("compare", *sides, "--format", "json").stdout)["documents"] == 3


def changed(**changes: Any) -> dict[str, Any]:
    """The example with other metrics; None takes a field away."""
    found = response()
    metrics = found["metrics"]["speculative_decoding"]
    for name, value in changes.items():
        metrics[name] = value
        if value is None:
            del metrics[name]
    return found


def used(**usage: Any) -> dict[str, Any]:
    """The example with another usage."""
    return response() | {"usage": usage}


AGREE = "their histogram has 43 rounds of up to 3, and 10 accepted"
BROKEN: tuple[tuple[Any, str], ...] = (
    (changed(num_spec_steps=44), AGREE),
    (changed(num_accepted_draft_tokens=11), AGREE),
    (changed(num_spec_tokens=4), "num_spec_tokens is 4, but the histogram counts 0 to 3"),
    (changed(acceptance_histogram=None), "acceptance_histogram is missing"),
    (used(prompt_tokens=5, completion_tokens=50), "more rounds than the text allows"),
    (used(prompt_tokens=5), "completion_tokens is missing"),
    (changed(per_step_accepted=[0], per_step_drafted=[3]), "round by round, 3 tokens"),
    (changed(num_draft_tokens=128), "draft lengths vary, and the metrics are not detailed"),
    (response() | {"metrics": None}, "no metrics.speculative_decoding"),
    (5, "is not a JSON object"),
)


@each(("row", "words"), BROKEN)
def test_a_line_that_cannot_be_meant_is_refused_with_its_number(row: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n")
    code, text = failure(invoke("import", path, *STRICT, "--out", tmp_path / "run"))
    assert (code, f"{path}, line 2: " in text) == (3, True)
    assert words in text
    assert not (tmp_path / "run").exists()


UNREADABLE = (
    (b"{", "Expecting property name"),
    (b'{"a": "\xff"}', "codec"),
    (json.dumps([RESPONSE]).encode(), "write one response per line"),
    (b"data: " + json.dumps(RESPONSE).encode(), "merge the chunks of each request into one line"),
)


@each(("line", "words"), UNREADABLE)
def test_a_line_that_is_no_json_object_is_refused_with_its_number(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(response()).encode() + b"\n" + line)
    code, text = failure(invoke("import", path, *STRICT, "--out", tmp_path / "run"))
    assert (code, "line 2: " in text, words in text) == (3, True, True)


OPTIONS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--rule", "one_hot"), 2, "--rule one_hot does not fit temperature 0"),
    ((*STRICT, "--temperature", "0.7"), 2, "--rule strict does not fit temperature 0.7"),
    ((*STRICT, "--gamma", "4"), 3, "--gamma is 4, but the histogram counts 0 to 3"),
    ((*STRICT, "--draft", "../up"), 2, "--draft '../up' is not a valid name"),
    ((*STRICT, "--domain", "a", "--domain", "b"), 2, "1 files (1 distinct), given with 2 --domain"),
    ((*STRICT, "--domain-key", "kind"), 3, "'kind' is missing"),
    ((*STRICT, "--domain-key", "half"), 3, "not a name"),
    ((*STRICT, "--cluster-key", "metrics"), 3, "not a name"),
    ((*STRICT, "--set", "target.dtype=float32"), 2, "the engine decided it"),
    ((*STRICT, "--set", "costs.source=table"), 2, "| add --set costs.path=..."),
    ((*STRICT, "--set", "decision.weights={code: 1.0}"), 2, "exactly the domains of the data"),
)


@each(("options", "code", "words"), OPTIONS)
def test_options_that_do_not_fit_the_log_are_refused(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [response() | {"half": "\ud800"}], *options)
    assert found.value.exit_code == code
    assert words in f"{found.value.message} | {found.value.hint}"


def test_requests_of_one_engine_are_refused_where_they_do_not_belong_together(tmp_path: Path) -> None:
    pairs = {
        "line 1 has 'served/target' with 3": response(2) | {"model": "other"},
        "'served/target' with 1 speculative tokens": response(2, **counted([1], [1], 1)),
        "is also in ": response(1),
    }
    for number, (words, second) in enumerate(pairs.items()):
        with pytest.raises(AlphaprofError, match=words) as found:
            imported(tmp_path, [response(1), second], name=f"run{number}")
        assert "line 2: " in found.value.message


def test_requests_without_rounds_are_counted_or_kept(tmp_path: Path) -> None:
    idle = response(2, **counted([], [], 3)) | {"usage": {"prompt_tokens": 5, "completion_tokens": 10}}
    failed = {"custom_id": "c", "response": {"status_code": 400, "body": {}}, "error": None}
    broken = [{"error": {"message": "no"}}, {"response": None, "error": "no"}, {"response": {"object": "error"}}]
    empty = response(3) | {"usage": {"prompt_tokens": 5, "completion_tokens": 0}}
    several, uneven = response(4) | {"metrics": None}, response(5, num_draft_tokens=128)
    beyond = response(6) | {"usage": {"prompt_tokens": 5, "completion_tokens": 40}}
    run = imported(tmp_path, [response(1), idle, failed, *broken, empty, several, uneven, beyond], *STRICT, "--leave-out")
    report = build_report(run)
    (item,) = report.results[0].gammas
    assert (item.rounds, item.tokens_per_round.value) == (43 + 9, pytest.approx((53 + 9) / (43 + 9)))
    assert item.acceptance_length == METRICS["mean_acceptance_length"]
    assert run.manifest.skipped == {
        "the engine answered with an error": 4,
        "no token was written": 1,
        "no metrics.speculative_decoding": 1,
        "draft lengths vary, and the metrics are not detailed": 1,
        "more rounds than the text allows": 1,
    }
    assert {"no_steps", "plain_steps"} <= {note["code"] for note in run.manifest.warnings}
    assert "skipped" in codes(report)


KNOWN_BY: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({}, "token ids"),
    (NO_IDS | {"messages": [{"role": "user", "content": "Hi"}]}, "text"),
    (NO_IDS, "request id"),
    (NO_IDS | {"id": None}, None),
)


@each(("fields", "known_by"), KNOWN_BY)
def test_prompts_are_known_by_the_best_that_all_requests_have(
    fields: dict[str, Any], known_by: str | None, tmp_path: Path
) -> None:
    rows = [response(1) | fields, response(2) | {"prompt": "Ho"}]
    run = imported(tmp_path, rows, name=f"by {known_by}")
    assert run.manifest.imported.prompts_known_by == known_by
    unknown = "prompts_unknown" in {note["code"] for note in run.manifest.warnings}
    assert unknown == (known_by in (None, "request id"))
    assert len(set(run.documents()["prompt_hash"].to_pylist())) == 2


def test_equal_prompts_and_clusters_are_one_unit(tmp_path: Path) -> None:
    rows = [response(number) | {"talk": talk} for number, talk in enumerate([None, "a", "a", None])]
    rows[3]["prompt_token_ids"] = rows[0]["prompt_token_ids"]
    (result,) = build_report(imported(tmp_path, rows, *STRICT, "--cluster-key", "talk")).results
    assert (result.documents, result.units) == (4, 2)


def test_prompt_hashes_are_those_of_profiled_runs(tmp_path: Path) -> None:
    import hashlib

    run = imported(tmp_path, [response() | {"prompt_token_ids": [3, 4]}])
    expected = hashlib.sha256(np.array([3, 4], dtype="<i4").tobytes()).hexdigest()
    assert run.documents()["prompt_hash"].to_pylist() == [expected]


def test_sampled_requests_carry_their_settings(tmp_path: Path) -> None:
    run = imported(tmp_path, [response()], "--rule", "one_hot", "--temperature", "0.7", "--top-p", "0.9")
    report = build_report(run)
    (result,) = report.results
    assert (result.rule, result.on_policy, result.estimator, result.self_check) == ("one_hot", True, "exact", None)
    assert result.sampling == {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    assert report.run.texts == ("given at temperature 0.7, top_p 0.9",)


def test_each_file_may_be_a_domain(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for number, path in enumerate(paths):
        path.write_text(json.dumps(response(number)))
    result = invoke("import", *paths, *STRICT, "--domain", "code", "--domain", "chat", "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert [result.domain for result in build_report(Run.open(tmp_path / "run")).results] == ["code", "chat"]


def test_an_import_overwrites_nothing(tmp_path: Path) -> None:
    run = imported(tmp_path, [response()])
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(AlphaprofError, match="already holds a run"):
        imported(tmp_path, [response(2)])
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_names_from_the_log_mean_nothing_but_themselves(tmp_path: Path) -> None:
    texts = [text for name, text in HOSTILE.items() if name != "empty"]
    rows = [response(number) | {"domain": text, "model": "".join(texts), "id": text} for number, text in enumerate(texts)]
    run = imported(tmp_path, rows, *STRICT, "--domain-key", "domain", "--cluster-key", "id")
    outputs = [invoke("report", run.path, "--format", output).stdout for output in ("terminal", "json", "md")]
    check = ("check", run.path, "--min-acceptance-length", "1", "--format")
    outputs += [invoke(*check, output).stdout for output in ("terminal", "json", "md", "junit")]
    assert not any("<script>" in text for text in (outputs[2], *outputs[-2:]))
    for text in outputs:
        assert text
        assert all(char.isprintable() or char == "\n" for char in text)
    result = invoke("import", tmp_path / "run.jsonl", *STRICT, "--domain-key", "x", "--out", tmp_path / "y")
    code, text = failure(result)
    assert (code, len(text) < 1000 + len(str(tmp_path))) == (3, True)
