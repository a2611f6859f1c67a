"""Files of other tools: `diagnose` shows the sums in them, and no message names the command that failed on the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphaprof.commands.first_look import first_look
from alphaprof.commands.importing.lines import kind_of
from alphaprof.errors import AlphaprofError, DataEmpty
from alphaprof.servers.files import FORMATS, PAGE
from tests.loops import each

BENCH = {
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 300,
    "spec_decode_accepted_tokens": 140,
    "spec_decode_per_position_acceptance_rates": [0.7, 0.45, 0.25],
}
ITERATION = {"numDraftTokens": 30, "numAcceptedTokens": 14, "numRequestsWithDraftTokens": 10, "acceptanceLength": 2.4}
SERIES = [
    {"metric": {"__name__": f"vllm:spec_decode_num_{name}_total", "model_name": "m"}, "value": [1, str(count)]}
    for name, count in (("drafts", 100), ("draft_tokens", 300), ("accepted_tokens", 140))
]
SERIES += [
    {
        "metric": {
            "__name__": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "model_name": "m",
            "position": str(place),
        },
        "values": [[0, "0"], [1, str(count)]],
    }
    for place, count in enumerate((70, 45, 25))
]
TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     10
---------------Speculative Decoding---------------
Acceptance rate (%):                     46.67
Acceptance length:                       2.40
Drafts:                                  100
Draft tokens:                            300
Accepted tokens:                         140
"""
VLLM = "SpecDecoding metrics: Mean acceptance length: 2.40, Accepted: 140 tokens, Drafted: 300 tokens, "
VLLM += "Per-position acceptance rate: 0.700, 0.450, 0.250, Avg Draft acceptance rate: 46.7%\n"
STATS = {"total_draft_tokens_count": 300, "accepted_draft_tokens_count": 140}
# A file of every kind, and the rounds, drafted and accepted tokens in it; None: it has no sums.
FILES: dict[str, tuple[str, tuple[int | None, int, int] | None]] = {
    "the log of a vLLM server": (VLLM, (100, 300, 140)),
    "the log of a vLLM server (engine V0)": (
        "Number of speculative tokens: 3, Number of accepted tokens: 140, Number of draft tokens: 300, "
        "Number of emitted tokens: 240",
        (100, 300, 140),
    ),
    "a result of vllm bench serve": (json.dumps(BENCH), (100, 300, 140)),
    "what vllm bench serve prints": (TABLE, (100, 300, 140)),
    "an answer of vLLM": (json.dumps({"metrics": {"acceptance_histogram": [1]}}), None),
    "the log of a llama.cpp server": (
        "draft acceptance rate = 0.46667 (  140 accepted /   300 generated)",
        (None, 300, 140),
    ),
    "an answer with timings of llama.cpp": (
        json.dumps({"timings": {"draft_n": 300, "draft_n_accepted": 140, "predicted_n": 240}}),
        (100, 300, 140),
    ),
    "an answer of SGLang": (json.dumps({"meta_info": {"spec_accept_histogram": [1]}}), None),
    "an answer of an older SGLang, or its server's log": (
        json.dumps({"meta_info": {"spec_verify_ct": 100, "completion_tokens": 241}}),
        (100, 0, 140),
    ),
    "the log of an SGLang server, whose lines are averages": ("Decode batch, accept len: 2.45, accept rate: 0.61", None),
    "what an SGLang server says of itself": (json.dumps({"internal_states": [{"avg_spec_accept_length": 2.45}]}), None),
    "a result of SGLang's bench_serving": (json.dumps({"backend": "sglang", "accept_length": 2.4}), None),
    "a performance record of TensorRT-LLM": (
        json.dumps({"total_draft_tokens": 300, "total_accepted_draft_tokens": 140}),
        (None, 300, 140),
    ),
    "iterations of TensorRT-LLM": (
        json.dumps([{"iter": number, "specDecodingStats": ITERATION} for number in range(10)]),
        (100, 300, 140),
    ),
    "an answer with counts of predicted tokens, as of tabbyAPI": (
        json.dumps({"accepted_prediction_tokens": 140, "rejected_prediction_tokens": 160, "completion_tokens": 241}),
        (100, 300, 140),
    ),
    "an answer of LM Studio": (json.dumps({"usage": {"completion_tokens": 241}, "stats": STATS}, indent=1), (100, 300, 140)),
    "an answer of Prometheus' own API": (
        json.dumps({"status": "success", "data": {"resultType": "vector", "result": SERIES}}),
        (100, 300, 140),
    ),
    "a report of guidellm": (json.dumps({"metadata": {"guidellm_version": "1"}}), None),
    "an export of aiperf": (json.dumps({"output_sequence_length": {"avg": 3}}), None),
    "an acceptance table of speculators": ("num_drafts,num_draft_tokens,num_accepted_tokens\n1,2,3\n", None),
    "a metrics page": ("lmdeploy:spec_decode_num_drafts 3\n", None),
}


def said_by(command: str, path: Path) -> Any:
    """What a command makes of a file, or its error."""
    try:
        return first_look([str(path)]) if command == "diagnose" else kind_of([str(path)], None)
    except AlphaprofError as error:
        return error


def test_there_is_a_file_of_every_kind() -> None:
    assert set(FILES) == {each.about for each in (*FORMATS, PAGE)}


@pytest.mark.parametrize("about", FILES)
def test_a_file_is_recognized_by_both_commands_and_sent_to_none_that_failed(tmp_path: Path, about: str) -> None:
    text, sums = FILES[about]
    path = tmp_path / "file.jsonl"
    for content in (text.encode(), text.encode("utf-16")):  # as PowerShell writes what a program prints
        path.write_bytes(content)
        looked, kind = said_by("diagnose", path), said_by("import", path)
        if sums is None:
            assert isinstance(looked, AlphaprofError)
            assert looked.exit_code == 3
            assert about in looked.message or "LMDeploy" in looked.message
            assert f"alphaprof diagnose {path}" not in looked.hint
        else:
            found = looked.speculation
            assert (found.drafts, found.drafted or 0, found.accepted) == sums
        if isinstance(kind, str):  # it is imported, as its hint says
            assert kind in ("vllm", "sglang")
        else:
            assert (kind.exit_code, f"this is {about}" in kind.message) == (3, True)
            assert (f"alphaprof diagnose {path}" in kind.hint) == (sums is not None or about == PAGE.about)
            assert f"alphaprof import {path}" not in kind.hint


@each("engine", ["vllm", "sglang", "llamacpp"])
def test_a_server_without_speculation_is_said_to_be_that(tmp_path: Path, engine: str) -> None:
    name = "tokens_predicted_total" if engine == "llamacpp" else "generation_tokens_total"
    (tmp_path / "page.txt").write_text(f'{engine}:{name}{{model_name="m"}} 1000.0\n')
    with pytest.raises(DataEmpty, match=r"does not speculate: .* has 1,000 generated tokens"):
        first_look([str(tmp_path / "page.txt")])
