"""Runs imported from an engine's metrics: rounds as the engine counted them, and nothing that it does not tell."""

from __future__ import annotations

import copy
import dataclasses
import http.server
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import alphaprof
from alphaprof.cli.app import app
from alphaprof.commands.importing.lines import LONGEST_LINE, LeftOut, Line
from alphaprof.commands.importing.vllm import request_of
from alphaprof.errors import AlphaprofError, NoPositionLog
from alphaprof.log.schema import UNKNOWN_TO_ENGINES, depth_names
from alphaprof.log.store import Run
from alphaprof.render.json import json_schema
from alphaprof.report.build import build_report
from tests.reporting import HOSTILE, as_json, as_terminal, codes, only, runs_of
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
    result = invoke("import", "vllm", path, *(options or STRICT), "--out", folder / name)
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
    assert (item.gamma, item.rounds, item.tokens_per_round.value) == (3, rounds, pytest.approx((written - 1) / rounds))  # type: ignore[union-attr]
    assert item.acceptance_length == METRICS["mean_acceptance_length"]
    assert item.accepted_per_drafted == METRICS["draft_acceptance_rate"]
    assert item.marginal == pytest.approx((4 / 43, 3 / 43, 3 / 43))
    assert item.conditional == pytest.approx((4 / 43, 3 / 4, 1.0))


def test_metrics_that_users_of_vllm_published_are_read() -> None:
    """The metrics of an answer of 200 tokens (syv-ai/qwen38-27b-rtx3090, issue 66), and what `detailed` adds to others."""
    answer = counted([0] * 2 + [1] * 3 + [2] * 2 + [3] * 2 + [4] * 4 + [6] + [7] * 19, [7] * 33, 7)
    assert (answer["num_accepted_draft_tokens"], answer["num_draft_tokens"]) == (168, 231)
    found = read(response(**answer) | {"usage": {"prompt_tokens": 9, "completion_tokens": 200}})
    assert (found.steps, found.plain, found.beyond) == (33, 0, 2)
    assert found.accepted == (31, 28, 26, 24, 20, 20, 19)
    steps = [7, 5, 5, 4, 1, 7, 7, 7, 7, 7, 7, 3]
    detailed = counted(steps, [7] * 12, 7, detailed=True)
    assert (detailed["acceptance_histogram"], detailed["num_accepted_draft_tokens"]) == ([0, 1, 0, 1, 1, 2, 0, 7], 67)
    assert read(response(**detailed) | {"usage": {"prompt_tokens": 9, "completion_tokens": 80}}).tested == (
        12,
        12,
        11,
        11,
        10,
        9,
        7,
    )


SHORTENED = counted([1, 0, 2, 0], [2, 1, 2, 0], 2)  # drafts of 2, 1, 2 and no tokens
BY_STEP = {"per_step_accepted": [1, 0, 2, 0], "per_step_drafted": [2, 1, 2, 0]}
BY_LENGTH = {"acceptance_histogram_by_draft_length": {"0": [1], "1": [1, 0], "2": [0, 1, 1]}}


@pytest.mark.parametrize("more", [BY_STEP, BY_LENGTH, BY_STEP | BY_LENGTH], ids=["by step", "by length", "both"])
def test_shorter_drafts_are_counted_where_the_metrics_tell_them_apart(more: dict[str, Any]) -> None:
    found = read(response(**SHORTENED, **more) | {"usage": {"prompt_tokens": 5, "completion_tokens": 8}})
    assert (found.drafted, found.tested, found.accepted) == ((3, 2), (3, 2), (2, 1))


@given(
    st.integers(1, 5).flatmap(lambda g: st.lists(st.tuples(st.integers(0, g), st.integers(0, g)), min_size=1, max_size=9))
)
def test_depths_are_those_of_the_rounds_one_by_one(pairs: list[tuple[int, int]]) -> None:
    rounds = [(min(pair), max(pair)) for pair in pairs]
    gamma = max(max(drafted for _, drafted in rounds), 1)
    accepted, drafted = zip(*rounds, strict=True)
    written = 1 + len(rounds) + sum(accepted)
    row = response(**counted(accepted, drafted, gamma, detailed=True)) | {"usage": {"completion_tokens": written}}
    found = read(row, gamma)
    depths = range(1, gamma + 1)
    assert found.accepted == tuple(sum(kept >= d for kept, _ in rounds) for d in depths)
    assert found.drafted == tuple(sum(tried >= d for _, tried in rounds) for d in depths)
    assert found.tested == tuple(sum(tried >= d and kept >= d - 1 for kept, tried in rounds) for d in depths)
    del (
        row["metrics"]["speculative_decoding"]["per_step_accepted"],
        row["metrics"]["speculative_decoding"]["per_step_drafted"],
    )
    try:
        assert read(row) == found  # where the summary is enough, it says the same
    except LeftOut:
        assert len(set(drafted)) > 1 or drafted[0] < gamma


WRAPPINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a batch file's": lambda row: {
        "id": "b",
        "custom_id": "c",
        "response": {"status_code": 200, "body": row},
        "error": None,
    },
    "a proxy's": lambda row: {"request": {"prompt": "Hi"}, "response": row},
    "flat": lambda row: {
        "prompt_token_ids": row["prompt_token_ids"],
        "completion_tokens": 54,
        "spec_decode_metrics": row["metrics"]["speculative_decoding"],
    },
    "with an empty error": lambda row: row | {"error": ""},
    "with an empty error inside": lambda row: {"response": row | {"error": {}}, "error": {}},
    "with its text": lambda row: row | {"response": "Once upon a time"},
    "with another object": lambda row: row | {"response": {"text": "Once", "error": "none"}},
    "with half by step": lambda row: (
        row | {"metrics": {"speculative_decoding": METRICS | {"per_step_accepted": [3] * 3 + [1] + [0] * 39}}}
    ),
    "with the other half": lambda row: row | {"metrics": {"speculative_decoding": METRICS | {"per_step_drafted": [3] * 43}}},
    "a stream's last": lambda row: row | {"object": "chat.completion.chunk", "choices": []},
    "another name": lambda row: (
        row
        | {"metrics": {"speculative_decoding": {**METRICS, "num_accepted_tokens": 10, "num_accepted_draft_tokens": None}}}
    ),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
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
    "two prompts": "several prompts) in one answer, for which vLLM counts no rounds | ask with n = 1 and one prompt",
    "two choices": "several choices (n > 1, or several prompts) in one answer, for which vLLM counts no rounds | ask with n",
    "responses": "an answer of /v1/responses, where vLLM sends no metrics | send the requests to /v1/chat/completions",
    "stream without usage": "a stream without usage, and so without metrics | ask with stream_options: {include_usage: tr",
    "min_p": "answered with an error (1) | change the requests, and send them again: it said 'The min_p and logit_bias ",
    "too long": "answered with an error (1) | change the requests, and send them again: it said 'max_tokens=5000 cannot ",
}


def test_each_recorded_answer_has_its_expected_outcome() -> None:
    assert sorted(ANSWERS) == sorted((*SINGLE, *UNCOUNTED))


@pytest.mark.parametrize("name", SINGLE)
def test_a_recorded_answer_is_read_as_the_engine_counted_it(name: str, tmp_path: Path) -> None:
    known_by, (prompt, written, finish), (steps, plain), drafted, accepted = SINGLE[name]
    metrics = ANSWERS[name]["metrics"]["speculative_decoding"]
    run = imported(tmp_path, [ANSWERS[name]])
    assert run.manifest.imported is not None
    assert (run.manifest.imported.prompts_known_by, run.manifest.target.reference) == (known_by, "TARGET")
    (document,) = run.documents().to_pylist()
    assert [document[key] for key in ("prompt_tokens", "continuation_tokens", "finish")] == [prompt, written, finish]
    rounds = read(ANSWERS[name])
    assert (rounds.steps, rounds.plain, rounds.beyond) == (metrics["num_spec_steps"], plain, 0) == (steps, plain, 0)
    assert (rounds.drafted, rounds.accepted) == (drafted, accepted)
    assert (sum(drafted), sum(accepted)) == (metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"])


@pytest.mark.parametrize(("name", "words"), UNCOUNTED.items(), ids=UNCOUNTED)
def test_a_recorded_answer_without_metrics_says_why_and_what_to_do(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [ANSWERS[name]])
    assert found.value.exit_code == 3
    assert words in f"{found.value.message} | {found.value.hint}"
    run = imported(tmp_path, [response(), ANSWERS[name]], *STRICT, "--leave-out", name="others")
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


def test_a_summary_of_prompt_lookup_is_refused_with_the_option_that_tells_more(tmp_path: Path) -> None:
    rows = recorded(RECORDED[0])
    for row in rows:
        metrics_of(row).update(per_step_accepted=None, per_step_drafted=None)
    short = [row for row in rows if metrics_of(row)["num_draft_tokens"] < 3 * metrics_of(row)["num_spec_steps"]]
    assert len(short) == 2
    with pytest.raises(AlphaprofError, match="and not which of them fewer than 3") as found:
        imported(tmp_path, rows)
    assert "--per-request-spec-decode-metrics detailed" in found.value.hint
    run = imported(tmp_path, rows, *STRICT, "--leave-out")
    assert run.manifest.skipped == {"drafts of several lengths, in metrics that are not detailed": 2}


def chunk(content: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of a chat that vLLM streams, as its source writes it."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "chatcmpl-9", "object": "chat.completion.chunk", "model": "TARGET", "choices": [choice]} | fields


def test_the_first_and_the_last_chunk_of_a_stream_are_one_line() -> None:
    first, last = chunk(prompt_token_ids=[5, 6, 7]), ANSWERS["stream"]
    request = request_of(Line(Path("log.jsonl"), 1, first | last), None)
    assert request.rounds == read(last)
    assert {"token ids", "request id"} == set(request.names)


USED = {"usage": {"prompt_tokens": 3, "completion_tokens": 0}}
PARTS = {
    "the first": chunk(prompt_token_ids=[5, 6, 7]),
    "one with its usage so far": chunk("One", **USED),
    "one of /v1/completions": {"object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": None}]},
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("options", [STRICT, (*STRICT, "--leave-out")], ids=["all", "leave out"])
def test_chunks_of_a_stream_one_by_one_are_refused(part: dict[str, Any], options: tuple[str, ...], tmp_path: Path) -> None:
    """Also where requests may be left out: each chunk would count as one."""
    with pytest.raises(AlphaprofError, match="line 1: a chunk from within a stream") as found:
        imported(tmp_path, [part, chunk(finish="length"), ANSWERS["stream"]], *options)
    assert "one line for each request, its chunks merged" in found.value.hint


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does, by what the prompt asks for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = body.get("messages") or [{"content": body["prompt"]}]
        assert (body["return_token_ids"], body["stream_options"]) == (True, {"include_usage": True})
        kind, answer = message["content"], ANSWERS["stream"]
        if kind == "hung up":
            return None
        if kind in ("400", "500"):
            return self.reply(int(kind), "application/json", json.dumps(ANSWERS["min_p"]))
        if kind == "one piece":
            return self.reply(200, "application/json", json.dumps(response()))
        chunks = [chunk(prompt_token_ids=[5, 6, 7]), chunk("One"), chunk(" two", "length"), answer]
        parts = {"no usage": [*chunks[:2], ANSWERS["stream without usage"]], "cut": chunks[:2]}
        choice = {"index": 0, "text": "One", "prompt_token_ids": [8, 9], "finish_reason": "length"}
        parts["text"] = [{"object": "text_completion", "choices": [choice]}, answer | {"object": "text_completion"}]
        parts["error within"] = [*chunks[:2], {"error": {"message": "out of memory", "code": 500}}]
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts.get(kind, chunks))
        return self.reply(200, "text/event-stream; charset=utf-8", text + ("data: [DONE]\n\n" if kind != "cut" else ""))

    def reply(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def engine() -> Iterator[str]:
    """The address of a server that answers as vLLM does."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.loopback
def test_the_documented_client_writes_lines_that_can_be_imported(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs failed requests apart and goes on; of a stream without usage, the import says what it lacks."""
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    (client,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "urllib" in code]
    kinds = ["stream", "400", "no usage", "500", "one piece", "cut", "error within", "hung up", "again"]
    rows: list[dict[str, Any]] = [{"domain": kind, "messages": [{"role": "user", "content": kind}]} for kind in kinds]
    rows.append({"domain": "text", "prompt": "text"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    assert "http://localhost:8000" in client
    exec(compile(client.replace("http://localhost:8000", engine), "import.md", "exec"), {})  # noqa: S102  (our own page)
    logs = {
        name: [json.loads(line) for line in Path(name).read_text().splitlines()]
        for name in ("requests.jsonl", "failed.jsonl")
    }
    assert [row["domain"] for row in logs["requests.jsonl"]] == ["stream", "no usage", "one piece", "again", "text"]
    failed = {row["domain"]: (row.get("status"), str(row["error"])) for row in logs["failed.jsonl"]}
    assert [(kind, status) for kind, (status, _) in failed.items()] == [
        ("400", 400),
        ("500", 500),
        ("cut", None),
        ("error within", None),
        ("hung up", None),
    ]
    words = {"400": "min_p", "500": "min_p", "cut": "the stream broke off", "error within": "out of memory"}
    words["hung up"] = "RemoteDisconnected"
    assert [kind for kind, word in words.items() if word not in failed[kind][1]] == []
    code, text = failure(invoke("import", "vllm", "requests.jsonl", *STRICT, "--out", "all"))
    assert (code, "line 2: a stream without usage, and so without metrics" in text) == (3, True)
    lines = [row | {"id": str(number)} for number, row in enumerate(logs["requests.jsonl"])]
    run = imported(tmp_path, lines, *STRICT, "--leave-out", "--domain-key", "domain", "--target", "T", name="rest")
    assert run.manifest.skipped == {"a stream without usage, and so without metrics": 1}
    documents = run.documents().to_pandas()
    assert documents["finish"].tolist() == ["length"] * 4
    assert documents["prompt_tokens"].tolist() == [40, 5, 40, 40]
    ids = {row["domain"]: row.get("prompt_token_ids") for row in logs["requests.jsonl"]}
    assert (ids["stream"], ids["text"]) == ([5, 6, 7], [8, 9])
    assert run.manifest.imported is not None
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
        row = response(int(number), **counted(accepted, drafted, gamma)) | {"domain": domains[number]}  # type: ignore[call-overload]
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
        assert dataclasses.astuple(item.tokens_per_round) == pytest.approx(dataclasses.astuple(other.tokens_per_round))  # type: ignore[arg-type]
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
    assert run.manifest.imported is not None
    assert run.manifest.imported.beyond_the_end > 0
    assert dataclasses.astuple(item.tokens_per_round) == pytest.approx(dataclasses.astuple(other.tokens_per_round))  # type: ignore[arg-type]
    assert item.rounds == other.rounds
    assert item.acceptance_length > other.acceptance_length  # type: ignore[operator]


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
    for result in content["results"]:
        unknown = ("alpha", "coverage", "mismatches", "near_ties", "impossible", "self_check")
        assert {name: result[name] for name in unknown} == dict.fromkeys(unknown)
        assert [item["gamma"] for item in result["gammas"]] == [3]
        assert [item["speedup"] for item in result["gammas"]] == [None]
        assert [item["iid_tokens_per_round"] for item in result["gammas"]] == [None]
    assert content["run"]["imported"] == "vLLM"
    assert {"imported", "no_step_times"} <= codes(report)
    totals = alphaprof.open(run.path).totals()
    assert totals[list(UNKNOWN_TO_ENGINES)].isna().all(axis=None)
    assert "alpha and coverage are not known" in " ".join(as_terminal(report).split())


def test_what_is_printed_as_json_fits_its_published_schema(pair: tuple[Run, Run]) -> None:
    good, bad = (run.path for run in pair)
    calls = {
        "report": ("report", good),
        "check": ("check", bad, "--baseline", good, "--margin", "1"),
        "compare": ("compare", good, bad),
    }
    for name, call in calls.items():
        content = json.loads(invoke(*call, "--format", "json").stdout)
        jsonschema.Draft202012Validator(json.loads(json_schema(name))).validate(content)


def test_step_times_of_a_table_turn_rounds_into_a_speedup(pair: tuple[Run, Run], tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    table.write_text("model,tokens,ms\ntarget,1,10\ntarget,2,10\ntarget,4,11\neagle,1,1\n")
    result = invoke(
        *("report", pair[0].path, "--set", "costs.source=table", "--set", f"costs.path={table}", "--format", "json")
    )
    content = json.loads(result.stdout)
    code = next(item for item in content["results"] if item["domain"] == "code")
    (item,) = code["gammas"]
    assert item["break_even_length"] == pytest.approx((3 * 1 + 11) / 10)
    assert item["speedup"]["value"] == pytest.approx(item["tokens_per_round"]["value"] / 1.4)
    assert (code["verdict"], content["traffic"]["draft"]) == ("GO", "eagle")


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
        assert all(invoke("report", run.path, "--format", output).stdout for output in ("terminal", "json", "md", "html"))


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
    assert (result.exception.exit_code, content["outcome"], content["gamma"], content["paired"]) == (10, "fail", 3, 42)  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    for item in content["items"]:
        whole = item["domain"] == "whole traffic"
        sums = [spent(run) for run in (good, bad)]
        sides = [
            tuple(map(np.concatenate, zip(*each.values(), strict=True))) if whole else each[item["domain"]] for each in sums
        ]
        before, after = (tokens.sum() / rounds.sum() for tokens, rounds in sides)
        assert (item["measure"], item["outcome"]) == ("tokens_per_round_difference", "fail")
        assert item["value"] == pytest.approx(after - before)
        count = len(sides[0][0])
        draws = rng.integers(0, count, (2000, count))  # documents drawn again: an independent look at the spread
        redrawn = [tokens[draws].sum(1) / rounds[draws].sum(1) for tokens, rounds in sides]
        spread = float((redrawn[1] - redrawn[0]).std())
        assert 1.2 * spread < item["value"] - item["low"] < 3.5 * spread
    again = json.loads(invoke("check", good.path, "--baseline", bad.path, "--format", "json").stdout)
    assert again["outcome"] == "pass"
    assert "tokens_per_round_difference" in invoke("check", good.path, "--baseline", bad.path).stdout


def test_two_served_drafts_are_compared_by_their_rounds(pair: tuple[Run, Run]) -> None:
    content = json.loads(invoke("compare", pair[0].path, pair[1].path, "--format", "json").stdout)
    reports = [build_report(run) for run in pair]
    assert (content["documents"], content["same_text"]) == (42, None)
    for item in content["differences"]:
        (found,) = item["tokens_per_round"]
        values = [only(report, item["domain"], "eagle").gammas[0].tokens_per_round.value for report in reports]  # type: ignore[union-attr]
        assert [found["first"], found["second"]] == pytest.approx(values)
        assert found["difference"]["value"] == pytest.approx(values[1] - values[0])
        assert (item["first"], item["second_coverage"], item["difference"]) == (None, None, None)
    assert "alpha\n" not in invoke("compare", pair[0].path, pair[1].path).stdout


def test_a_run_predicts_what_an_engine_is_seen_to_do(simulated: Run, tmp_path: Path) -> None:
    """By domain, at the gamma and rule that were served: an engine that does what the log says differs by nothing."""
    engine = imported(tmp_path, as_requests(simulated, "small", 3), *STRICT, "--domain-key", "domain", "--draft", "eagle")
    content = json.loads(invoke("compare", f"{simulated.path}:small", engine.path, "--format", "json").stdout)
    report = build_report(simulated)
    assert (content["paired"], content["confirms"], content["documents"], content["same_text"]) == (False, True, 0, None)
    assert content["unpaired"][0] == content["unpaired"][1]
    assert {item["domain"] for item in content["differences"]} == {item.domain for item in report.results}
    for item in content["differences"]:
        (found,) = item["tokens_per_round"]
        expected = only(report, item["domain"], "small", "strict").gammas[2].tokens_per_round
        assert expected is not None
        assert (found["gamma"], found["first"]) == (3, pytest.approx(expected.value))
        assert found["difference"]["value"] == pytest.approx(0, abs=1e-9)
        half = math.hypot(expected.high - expected.value, expected.value - expected.low)
        assert found["difference"]["high"] == pytest.approx(half)
    text = invoke("compare", f"{simulated.path}:small", engine.path).stdout
    assert "two samples of each domain, not paired" in text
    assert re.match(r"no difference told apart in \w+: [+-]0.00 \[-\d.\d\d, \+\d.\d\d\] tokens per round at gamma 3\n", text)
    assert "alpha" not in text.replace("alphaprof", "")
    back = json.loads(invoke("compare", engine.path, f"{simulated.path}:small", "--format", "json").stdout)
    assert back == content  # the run predicts, whatever the order


def same_prompts(folder: Path, documents: int, alpha: float = 0.7) -> Run:
    """A run whose prompts are the token ids of the requests that `as_requests` makes of it."""
    prompts = [np.array([number, 7], "<i4").tobytes().decode() for number in range(documents)]
    domain = Domain(documents=documents, alpha=alpha, prompts=prompts)
    run = write_run(folder, Recipe(domains={"code": domain}, drafts={"small": 0.0, "large": 0.2}, seed=4))
    return rewritten(run, "small", end_wrong)


def shown(*call: Any) -> Any:
    return json.loads(invoke("compare", *call, "--format", "json").stdout)


def test_a_run_and_an_engine_are_paired_where_prompts_are_known_by_token_ids(tmp_path: Path) -> None:
    """Documents that both have cancel out of the difference, in any order; what few share is not worth it."""
    run = same_prompts(tmp_path / "profiled", 24)
    requests = as_requests(run, "small", 3)[::-1]
    engine = imported(tmp_path, requests[:20], *STRICT, "--domain-key", "domain", name="engine")
    content = shown(f"{run.path}:small", engine.path)
    assert (content["paired"], content["documents"], content["unpaired"]) == (True, 20, [4, 0])
    (item,) = content["differences"]
    (found,) = item["tokens_per_round"]
    assert (item["documents"], found["difference"]["value"]) == (20, 0)
    assert found["first_by_position"] == pytest.approx(found["second_by_position"])
    assert content["agreement"] == "by the 95% interval of tokens per round the engine agrees with the prediction: code"
    few = imported(tmp_path, [*requests[:2], *(response(number) for number in range(100, 112))], *STRICT, "--domain", "code")
    assert shown(f"{run.path}:small", few.path)["paired"] is False


def test_positions_of_an_engine_are_those_of_its_requests(tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 12)
    requests = as_requests(run, "small", 3)
    engine = imported(tmp_path, requests, *STRICT, "--domain-key", "domain")
    (found,) = shown(f"{run.path}:small", engine.path)["differences"][0]["tokens_per_round"]
    rounds = [row["metrics"]["speculative_decoding"]["acceptance_histogram"] for row in requests]
    by_length = np.array(rounds).sum(0)
    expected = by_length[::-1].cumsum()[::-1] / by_length.sum()
    assert found["second_by_position"] == pytest.approx(expected[1:])
    text = invoke("compare", engine.path, f"{run.path}:small").stdout
    assert " ".join(f"{share:.3f}" for share in expected[1:]) in text


def test_an_engine_that_accepts_another_number_does_not_agree(tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 24)
    engine = imported(tmp_path, as_requests(run, "large", 3), *STRICT, "--domain-key", "domain", "--draft", "eagle")
    content = shown(f"{run.path}:small", engine.path)
    assert content["agreement"].endswith("the engine emits more than predicted: code")
    difference = content["overall"][0]["tokens_per_round"][0]["difference"]
    found = f"{difference['value']:+.2f} [{difference['low']:+.2f}, {difference['high']:+.2f}] tokens per round at gamma 3"
    assert "do not show which draft was served" in content["notes"][0]
    text = invoke("compare", f"{run.path}:small", engine.path).stdout
    assert content["agreement"] in text
    assert text.startswith(f"the engine accepts more than predicted: {found}\n")
    named = imported(
        tmp_path, as_requests(run, "large", 3), *STRICT, "--domain-key", "domain", "--draft", "large", name="large"
    )
    code, text = failure(invoke("compare", f"{run.path}:small", named.path))
    assert (code, "is of draft large" in text, f"compare {run.path}:large" in text) == (12, True, True)
    assert shown(f"{run.path}:large", named.path)["notes"] == []


def test_a_draft_that_no_engine_has_is_said(tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 4)
    drafts = {name: dataclasses.replace(facts, engine_method=None) for name, facts in run.manifest.drafts.items()}
    run.write_manifest(dataclasses.replace(run.manifest, drafts=drafts))
    engine = imported(
        tmp_path, as_requests(run, "small", 3), *STRICT, "--domain-key", "domain", "--draft", "small", name="it"
    )
    assert "no engine is known to draft as" in shown(f"{run.path}:small", engine.path)["notes"][0]


@pytest.mark.parametrize("option", [("--gamma", "2"), ("--rules", "one_hot"), ("--rules", "strict", "--rules", "one_hot")])
def test_another_gamma_or_rule_than_an_engine_served_is_refused(option: tuple[str, ...], tmp_path: Path) -> None:
    run = same_prompts(tmp_path / "profiled", 4)
    engine = imported(tmp_path, as_requests(run, "small", 3), *STRICT, "--domain-key", "domain", name="engine")
    for sides in ((f"{run.path}:small", engine.path), (engine.path, f"{run.path}:small")):
        code, text = failure(invoke("compare", *sides, *option))
        assert (code, "was served with" in text, f"leave out {option[0]}" in text) == (2, True, True)
    assert invoke("compare", f"{run.path}:small", engine.path, "--gamma", "3", "--rules", "strict").exit_code == 0


def test_a_run_without_the_served_gamma_or_domain_predicts_nothing(simulated: Run, tmp_path: Path) -> None:
    odd = imported(tmp_path, as_requests(simulated, "small", 7), *STRICT, "--domain-key", "domain", name="odd")
    code, text = failure(invoke("compare", f"{simulated.path}:small", odd.path))
    assert (code, "with 7 speculative tokens" in text) == (12, True)
    other = imported(tmp_path, as_requests(simulated, "small", 3), *STRICT, "--domain", "elsewhere", name="other")
    code, text = failure(invoke("compare", f"{simulated.path}:small", other.path))
    assert (code, "elsewhere (greedy)" in text, "--domain names" in text) == (12, True, True)


def test_runs_verified_token_by_token_and_by_block_are_not_comparable(simulated: Run, tmp_path: Path) -> None:
    lossless = ("--rule", "lossless", "--temperature", "1")
    sides = [imported(tmp_path, [response()], *lossless, "--verification", how, name=how) for how in ("token", "block")]
    code, text = failure(invoke("compare", *(side.path for side in sides)))
    assert (code, "verification token" in text, "verification block" in text) == (12, True, True)
    assert failure(invoke("check", sides[0].path, "--baseline", sides[1].path))[0] == 12
    code, text = failure(
        invoke("import", "vllm", tmp_path / "x", "--out", tmp_path / "y", *STRICT, "--verification", "block")
    )
    assert (code, "--rule lossless" in text) == (2, True)


REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "trees": (("trees", "GOOD"), 6, "no position log"),
    "another rule": (("report", "GOOD", "--rules", "additive:0.2"), 6, "rounds of strict at gamma 3"),
    "another flavour": (("report", "GOOD", "--replay", "llamacpp"), 6, "no position log"),
    "another rule of the decision": (("report", "GOOD", "--set", "decision.rule=one_hot"), 6, "no position log"),
    "another gamma": (("report", "GOOD", "--set", "decision.gamma=2"), 2, "not among gammas"),
    "a roofline": (
        ("report", "GOOD", "--set", "costs.source=roofline", "--set", "costs.accelerator=h100-sxm"),
        2,
        "give step times instead",
    ),
    "alpha": (("check", "GOOD", "--min-alpha", "0.5"), 2, "do not give alpha"),
    "speedup": (("check", "GOOD", "--min-speedup", "1.1"), 2, "no step times for eagle"),
    "a gamma that was not served": (("check", "GOOD", "--gamma", "2", "--min-acceptance-length", "1"), 2, "no gamma 2"),
    "a profiled baseline": (("check", "GOOD", "--baseline", "PROFILED"), 12, "was profiled"),
}


@pytest.mark.parametrize(("call", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_more_than_rounds_is_refused(
    call: tuple[str, ...], code: int, words: str, pair: tuple[Run, Run], simulated: Run
) -> None:
    places = {"GOOD": pair[0].path, "BAD": pair[1].path, "PROFILED": f"{simulated.path}:small"}
    found, text = failure(invoke(*(places.get(word, word) for word in call)))
    assert found == code
    assert words in text


def test_exports_say_that_an_engine_counted_the_rounds(pair: tuple[Run, Run]) -> None:
    content = json.loads(invoke("export", pair[0].path, "--to", "nvidia").stdout)
    conditions = content["measurement_conditions"]
    assert (conditions["measurement"], conditions["draft"]) == ("rounds counted by vLLM for each request", "eagle")
    result = invoke("export", pair[0].path, "--to", "vllm-synthetic", "--domain", "code")
    (item,) = only(build_report(pair[0]), "code", "eagle").gammas
    assert json.loads(result.stdout)["synthetic_acceptance_rates"] == pytest.approx(item.marginal, abs=1e-6)
    assert "of the draft that was served" in result.stderr


def test_the_page_of_an_imported_run_says_what_is_not_known(pair: tuple[Run, Run]) -> None:
    page = invoke("report", pair[0].path, "--format", "html").stdout
    assert "imported from per-request metrics of vLLM" in page
    assert "bfloat16" not in page.split("</script>")[-1]
    assert "Acceptance by domain" not in page
    assert "nan" not in page.lower().replace("finance", "").split("<script")[0]


def test_the_position_log_of_an_imported_run_is_refused_in_python(pair: tuple[Run, Run]) -> None:
    with pytest.raises(NoPositionLog, match="no position log"):
        alphaprof.open(pair[0].path).positions()
    assert len(alphaprof.open(pair[0].path).documents()) == 42


def test_runs_served_with_different_gammas_are_not_comparable(pair: tuple[Run, Run], simulated: Run, tmp_path: Path) -> None:
    other = imported(tmp_path, as_requests(simulated, "small", 2), *STRICT, "--domain-key", "domain", "--draft", "eagle")
    code, text = failure(invoke("compare", pair[0].path, other.path))
    assert (code, "gamma 3" in text, "with gamma 2" in text) == (12, True, True)
    assert failure(invoke("check", pair[0].path, "--baseline", other.path))[0] == 12


def test_runs_that_kept_drafts_by_different_rules_are_not_comparable(tmp_path: Path) -> None:
    sides = [
        imported(tmp_path, [response()], "--rule", rule, "--temperature", "1", name=rule) for rule in ("one_hot", "lossless")
    ]
    code, text = failure(invoke("compare", *(side.path for side in sides)))
    assert (code, "rule one_hot" in text, "rule lossless" in text) == (12, True, True)


UNPAIRED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], str]] = {
    "other kinds": (
        {},
        {"prompt_token_ids": None, "prompt": "Hi"},
        (),
        "prompts known by token ids, and TWO with prompts known by text | log prompt",
    ),
    "streams": (
        {},
        {"prompt_token_ids": None},
        (),
        "by request id | log prompt_token_ids with every request (return_token_ids: true",
    ),
    "request ids": (
        {"prompt_token_ids": None},
        {"prompt_token_ids": None, "id": "another"},
        (),
        "known by request id | log prompt_token_ids with every request",
    ),
    "nothing": (
        {"prompt_token_ids": None, "id": None},
        {"prompt_token_ids": None, "id": None, "created": 2},
        (),
        "known by nothing | log prompt_token_ids with every request",
    ),
    "prompts": ({}, {"prompt_token_ids": [8]}, (), "have no prompt in common | log answers to the same prompts"),
    "domains": ({}, {}, ("--domain", "code"), "share 1 prompts, but no kind of text"),
    "targets": (
        {},
        {"model": "other"},
        (),
        "different targets, served/target and other (fingerprint differ) | compare drafts of one target",
    ),
}


@pytest.mark.parametrize("command", ["compare", "check"])
@pytest.mark.parametrize(("one", "two", "options", "words"), UNPAIRED.values(), ids=UNPAIRED)
def test_imported_runs_without_a_common_prompt_say_what_to_log(
    one: dict[str, Any], two: dict[str, Any], options: tuple[str, ...], words: str, command: str, tmp_path: Path
) -> None:
    first = imported(tmp_path, [response() | one], name="one").path
    second = imported(tmp_path, [response() | two], *STRICT, *options, name="two").path
    call = (first, second) if command == "compare" else (second, "--baseline", first)
    code, text = failure(invoke(command, *call))
    assert code == 12
    assert words in text.replace(str(first), "ONE").replace(str(second), "TWO")


def test_ids_of_the_caller_pair_requests(tmp_path: Path) -> None:
    """The engine's own are new in each answer, and `custom_id` is what a batch file asked with."""
    rows = [response(number) | {"prompt_token_ids": None, "custom_id": f"prompt {number}"} for number in range(3)]
    sides = [imported(tmp_path, rows, name=name).path for name in ("one", "two")]
    assert json.loads(invoke("compare", *sides, "--format", "json").stdout)["documents"] == 3


def test_answers_of_one_token_cannot_be_held_against_a_baseline(tmp_path: Path) -> None:
    short = response(**counted([], [], 3)) | {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    sides = [imported(tmp_path, [row], name=name).path for name, row in {"short": short, "long": response()}.items()]
    code, text = failure(invoke("check", sides[0], "--baseline", sides[1]))
    assert (code, "is longer than one token" in text) == (12, True)


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


BROKEN: dict[str, tuple[Any, str]] = {
    "steps": (changed(num_spec_steps=44), "num_spec_steps is 44, and the histogram adds up to 43"),
    "accepted": (changed(num_accepted_draft_tokens=11), "num_accepted_draft_tokens is 11, and the histogram says 10"),
    "too many drafts": (changed(num_draft_tokens=130), "num_draft_tokens is 130, and 43 rounds of up to 3 that accepted 10"),
    "too few drafts": (changed(num_draft_tokens=9), "10 to 129"),
    "gamma": (changed(num_spec_tokens=4), "num_spec_tokens is 4, and acceptance_histogram counts 0 to 3 drafts"),
    "no histogram": (changed(acceptance_histogram=None), "acceptance_histogram is missing"),
    "no steps": (changed(num_spec_steps=None), "num_spec_steps is missing"),
    "no drafts": (changed(num_draft_tokens=None), "num_draft_tokens is missing"),
    "no accepted": (changed(num_accepted_draft_tokens=None), "num_accepted_draft_tokens is missing"),
    "no list": (changed(acceptance_histogram={"0": 39}), "no list"),
    "one entry": (changed(acceptance_histogram=[43]), "has 1 entries"),
    "many entries": (changed(acceptance_histogram=[0] * 66), "has 66 entries"),
    "negative": (changed(acceptance_histogram=[40, -1, 0, 3]), "acceptance_histogram[1] is -1, no whole number"),
    "float": (changed(num_draft_tokens=129.0), "num_draft_tokens is 129.0, no whole number"),
    "true": (changed(num_spec_steps=True), "num_spec_steps is True"),
    "text": (changed(num_spec_steps="43"), "num_spec_steps is '43'"),
    "huge": (changed(num_spec_steps=2**31), "no whole number from 0 to 2147483647"),
    "too short": (used(prompt_tokens=5, completion_tokens=40), "completion_tokens is 40, and 43 rounds"),
    "too far beyond": (used(prompt_tokens=5, completion_tokens=50), "write 53 after the first"),
    "no tokens": (used(prompt_tokens=5), "completion_tokens is missing"),
    "no prompt": (used(prompt_tokens=0, completion_tokens=54), "prompt_tokens is missing, or 0"),
    "half by step": (
        changed(per_step_accepted=[0] * 39 + [1] + [3] * 3, num_draft_tokens=128),
        "drafted 128 tokens, and not which of them fewer than 3; per_step_drafted is missing",
    ),
    "other half": (changed(per_step_accepted=[0] * 43), "per_step_accepted and acceptance_histogram [39, 1, 0, 3] differ"),
    "half accepted more": (
        changed(per_step_accepted=[0] * 39 + [1] + [4] * 3),
        "per_step_accepted and acceptance_histogram",
    ),
    "half drafted": (changed(per_step_drafted=[3] * 42 + [2]), "per_step_drafted and 43 rounds drafted 129 tokens differ"),
    "an error beside metrics": (response() | {"error": "cut off"}, "an answer has both an error and metrics"),
    "a status beside metrics": (
        {"response": {"status_code": 500, "body": response()}},
        "an answer has both an error and metrics",
    ),
    "other steps": (changed(per_step_accepted=[0], per_step_drafted=[3]), "by round they are 3"),
    "uneven steps": (changed(per_step_accepted=[0, 0], per_step_drafted=[3]), "do not fit each other"),
    "accepted more": (changed(per_step_accepted=[2] * 43, per_step_drafted=[1] * 43), "do not fit each other"),
    "no length": (changed(acceptance_histogram_by_draft_length={"4": [0] * 5}), "for the length '4'"),
    "other row": (changed(acceptance_histogram_by_draft_length={"2": [0] * 4}), "has 4 entries for the length '2'"),
    "two stories": (
        response(
            **counted([0, 1], [2, 1], 2, detailed=True),
            acceptance_histogram_by_draft_length={"1": [1, 0], "2": [0, 1, 0]},
        ),
        "by round they are 3 and [1, 1, 0]",
    ),
    "uneven drafts": (changed(num_draft_tokens=128), "drafted 128 tokens, and not which of them fewer than 3"),
    "no metrics": (response() | {"metrics": None}, "no metrics.speculative_decoding"),
    "several choices": (response() | {"choices": [{}, {}]}, "several choices"),
    "metrics of another kind": (response() | {"metrics": [1]}, "metrics is a list, no object"),
    "no object": ([1, 2], "is not a JSON object"),
    "no model": (response() | {"model": ""}, "there is no model"),
    "half a character": (response() | {"model": "\ud800"}, "half a character"),
    "no name": (response() | {"id": {"a": 1}}, "no name"),
    "token ids": (response() | {"prompt_token_ids": [-1]}, "prompt_token_ids[0] is -1"),
    "a nested name": (response() | {"model": {"a": [[]]}}, "model is an object, no name"),
}


@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_a_line_that_cannot_be_meant_is_refused_with_its_number(row: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n")
    code, text = failure(invoke("import", "vllm", path, *STRICT, "--out", tmp_path / "run"))
    assert (code, f"{path}, line 2: " in text) == (3, True)
    assert words in text
    assert not (tmp_path / "run").exists()


UNREADABLE = {
    "not JSON": (b"{", "Expecting property name"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    "many digits": (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"a": "\xff"}', "codec"),
    "an event": (b"data: " + json.dumps(RESPONSE).encode(), "an event of a stream, not an answer | write one line for each"),
    "twice": (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    "long": (b" " * (LONGEST_LINE + 1), "longer than 64 MiB"),
}


@pytest.mark.parametrize(("line", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_line_that_is_no_json_object_is_refused_with_its_number(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(response()).encode() + b"\n" + line)
    code, text = failure(invoke("import", "vllm", path, *STRICT, "--out", tmp_path / "run"))
    assert (code, "line 2: " in text) == (3, True)
    assert words in text


OPTIONS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no temperature": (("--rule", "one_hot"), 2, "add --temperature"),
    "temperature 0": (("--rule", "lossless", "--temperature", "0"), 2, "at temperature 0 the rule is strict"),
    "greedy sampling": ((*STRICT, "--temperature", "0.7"), 2, "name the engine's rule"),
    "gamma": ((*STRICT, "--gamma", "4"), 3, "--gamma is 4, and acceptance_histogram counts 0 to 3"),
    "draft": ((*STRICT, "--draft", "../up"), 2, "--draft '../up' is not a valid name"),
    "domains": ((*STRICT, "--domain", "a", "--domain", "b"), 2, "2 domains for 1 files"),
    "both": ((*STRICT, "--domain", "a", "--domain-key", "b"), 2, "use one of them"),
    "domain key": ((*STRICT, "--domain-key", "kind"), 3, "there is no 'kind'"),
    "cluster key": ((*STRICT, "--cluster-key", "metrics"), 3, "no name"),
    "set": ((*STRICT, "--set", "target.dtype=float32"), 2, "decision.* and costs.* only"),
    "weights": ((*STRICT, "--set", "decision.weights={code: 1.0}"), 2, "every domain"),
    "rule": ((*STRICT, "--set", "decision.rule=lossless"), 2, "the engine kept drafts by strict"),
    "rule of sampled text": (
        ("--rule", "lossless", "--temperature", "1", "--set", "decision.rule=auto"),
        2,
        "the engine kept drafts by lossless",
    ),
    "greedy top p": ((*STRICT, "--top-p", "0.5"), 2, "strict is greedy decoding"),
    "greedy top k": ((*STRICT, "--top-k", "5"), 2, "--rule one_hot or lossless, with --temperature"),
    "a roofline": ((*STRICT, "--set", "costs.source=roofline"), 2, "| give step times of your engine"),
    "no path": ((*STRICT, "--set", "costs.source=table"), 2, "| name it as well: --set costs.path=VALUE"),
    "top p": (("--rule", "one_hot", "--temperature", "1", "--top-p", "0"), 2, "| name another --top-p"),
    "confidence": ((*STRICT, "--set", "decision.confidence=2"), 2, "| write another value: --set decision.confidence=VALUE"),
    "unknown": ((*STRICT, "--set", "decision.confidnce=0.9"), 2, "| did you mean confidence?"),
}


@pytest.mark.parametrize(("options", "code", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_do_not_fit_the_log_are_refused(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AlphaprofError) as found:
        imported(tmp_path, [response()], *options)
    assert found.value.exit_code == code
    assert words in f"{found.value.message} | {found.value.hint}"


def test_min_p_is_no_option(tmp_path: Path) -> None:
    """vLLM refuses to speculate with it."""
    result = invoke(
        "import", "vllm", "x.jsonl", "--rule", "one_hot", "--temperature", "1", "--min-p", "0.1", "--out", tmp_path
    )
    assert (result.exit_code, "No such option: --min-p" in result.output) == (2, True)


@pytest.mark.parametrize("option", ["--rule", "--out"])
def test_rule_and_directory_must_be_named(option: str, tmp_path: Path) -> None:
    given_options = {"--rule": "strict", "--out": str(tmp_path / "run")}
    del given_options[option]
    assert invoke("import", "vllm", "x.jsonl", *(word for pair in given_options.items() for word in pair)).exit_code == 2


def test_requests_of_one_engine_are_refused_where_they_do_not_belong_together(tmp_path: Path) -> None:
    pairs = {
        "line 1 has 'served/target'": response(2) | {"model": "other"},
        "speculative tokens, and": response(2, **counted([1], [1], 1)),
        "is in .* as well": response(1),
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
    assert (item.rounds, item.tokens_per_round.value) == (43 + 9, pytest.approx((53 + 9) / (43 + 9)))  # type: ignore[union-attr]
    assert item.acceptance_length == METRICS["mean_acceptance_length"]
    assert run.manifest.skipped == {
        "the engine answered with an error": 4,
        "no token was written": 1,
        "no metrics.speculative_decoding": 1,
        "drafts of several lengths, in metrics that are not detailed": 1,
        "more rounds than their tokens allow": 1,
    }
    notes = {warning.code: warning.message for warning in report.notes}
    assert notes["no_steps"].startswith("1 of 2 requests have no round with a draft")
    assert notes["plain_steps"].startswith("9 rounds without a draft, in 1 of 2 requests")
    assert "skipped" in notes


def test_a_file_without_any_request_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(AlphaprofError, match="no line at all"):
        imported(tmp_path, [])
    with pytest.raises(AlphaprofError, match=r"no metrics.speculative_decoding \(1\)") as found:
        imported(tmp_path, [response() | {"metrics": None}], *STRICT, "--leave-out", name="other")
    assert "--per-request-spec-decode-metrics detailed" in found.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "no room"},
        {"object": "error", "message": "no room", "code": 400},
        {"custom_id": "c", "response": {"status_code": 400, "body": {"error": {"message": "no room"}}}, "error": None},
        {"status": 400, "error": "no room", "messages": [{"role": "user", "content": "Hi"}]},
    ],
)
def test_errors_alone_say_what_the_engine_said(answer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AlphaprofError, match=r"no request to import: the engine answered with an error \(1\)") as found:
        imported(tmp_path, [answer])
    assert found.value.hint == "change the requests, and send them again: it said 'no room'"


def test_a_field_that_means_nothing_here_is_said(tmp_path: Path) -> None:
    report = build_report(imported(tmp_path, [changed(novel=1)]))
    assert next(note.message for note in report.notes if note.code == "unread_fields").endswith("'novel' (1)")


@pytest.mark.parametrize(
    ("fields", "known_by"),
    [
        ({}, "token ids"),
        ({"prompt_token_ids": None, "messages": [{"role": "user", "content": "Hi"}]}, "text"),
        ({"prompt_token_ids": None}, "request id"),
        ({"prompt_token_ids": None, "id": None}, None),
    ],
)
def test_prompts_are_known_by_the_best_that_all_requests_have(
    fields: dict[str, Any], known_by: str | None, tmp_path: Path
) -> None:
    run = imported(tmp_path, [response(1) | fields, response(2) | {"prompt": "Ho"}])
    assert run.manifest.imported is not None
    assert run.manifest.imported.prompts_known_by == known_by
    notes = {note["code"]: f"{note['message']}; {note['remedy']}" for note in run.manifest.warnings}
    assert ("prompts_unknown" in notes) == (known_by in (None, "request id"))
    if "prompts_unknown" in notes:
        assert (
            f"(1 of 2 requests hold no prompt_token_ids, first {tmp_path / 'run.jsonl'}, line 1)" in notes["prompts_unknown"]
        )
        assert f"pair {'requests of the same id only' if known_by else 'none of them'}" in notes["prompts_unknown"]
        assert "log prompt_token_ids with every request" in notes["prompts_unknown"]
    assert len(set(run.documents()["prompt_hash"].to_pylist())) == 2


def test_equal_prompts_and_clusters_are_one_unit(tmp_path: Path) -> None:
    rows = [response(number) | {"talk": talk} for number, talk in enumerate([None, "a", "a", None])]
    rows[3]["prompt_token_ids"] = rows[0]["prompt_token_ids"]
    (result,) = build_report(imported(tmp_path, rows, *STRICT, "--cluster-key", "talk")).results
    assert (result.documents, result.clusters) == (4, 2)


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
    result = invoke("import", "vllm", *paths, *STRICT, "--domain", "code", "--domain", "chat", "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert [result.domain for result in build_report(Run.open(tmp_path / "run")).results] == ["code", "chat"]


def test_a_file_counts_once(tmp_path: Path) -> None:
    code, text = failure(invoke("import", "vllm", "a.jsonl", "a.jsonl", *STRICT, "--out", tmp_path / "run"))
    assert (code, "a.jsonl is named twice" in text) == (2, True)


def test_an_import_overwrites_nothing(tmp_path: Path) -> None:
    run = imported(tmp_path, [response()])
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(AlphaprofError, match="holds a run already"):
        imported(tmp_path, [response(2)])
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", [*(name for name in HOSTILE if name != "empty"), "nul"])
def test_names_from_the_log_mean_nothing_but_themselves(name: str, tmp_path: Path) -> None:
    text = HOSTILE.get(name, "nul\0")
    rows = [response(number) | {"domain": text, "model": text, "id": f"{text}{number}"} for number in range(3)]
    run = imported(tmp_path, rows, *STRICT, "--domain-key", "domain", "--cluster-key", "id")
    outputs = [invoke("report", run.path, "--format", output).stdout for output in ("terminal", "json", "md")]
    outputs += [
        invoke("check", run.path, "--min-acceptance-length", "1", "--format", output).stdout
        for output in ("terminal", "json", "md", "junit")
    ]
    assert not any("<script>" in text for text in (outputs[2], *outputs[-2:]))
    for text in outputs:
        assert text
        assert all(char.isprintable() or char == "\n" for char in text)
    code, text = failure(
        invoke("import", "vllm", tmp_path / "run.jsonl", *STRICT, "--domain-key", "x", "--out", tmp_path / "y")
    )
    assert code == 3
    assert len(text) < 1000 + len(str(tmp_path))
