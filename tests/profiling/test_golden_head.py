"""A trained EAGLE-3 head on stories15M, through a profile: its rounds are those that another decoder recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads import draft
from alphaprof.profiling.models.kinds import load_drafts
from alphaprof.profiling.models.load import load_model, load_tokenizer
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from alphaprof.totals.replay import Trace, listed_rounds
from tests.loops import each
from tests.runs import Silent

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden" / "eagle3_stories15m"
GAMMAS = (1, 2, 3, 5)
TEXTS = json.loads((GOLDEN / "rounds.json").read_text())["texts"]
REQUESTS = json.loads((GOLDEN.parent / "vllm" / "rounds-eagle3-stories15m.json").read_text())["requests"]
SHARES = [pytest.param(8, id="an eighth"), pytest.param(1, id="all", marks=pytest.mark.slow)]  # of the recorded texts
SIZE = len(TEXTS[0]["text"])
Recorded = tuple[Run, list[dict[str, Any]]]


def profiled(folder: Path, target: Path, rows: list[dict[str, Any]], continuation: dict[str, Any], **changes: Any) -> Run:
    """A run of the head on some prompts. `changes`: of its options."""
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "target": {"model": str(target), "dtype": "float32"},
        "drafts": {"head": {"kind": "eagle3", "model": str(GOLDEN), **changes}},
        "data": [{"domain": "stories", "path": "prompts.jsonl", "prompt_ids": "prompt"}],
        "continuation": continuation,
        "gammas": list(GAMMAS),
        "rules": ["strict"],
        "costs": {"source": "none"},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    return profiling.profile(load_profile(folder / "profile.yaml", []), folder / "run", Silent())


@pytest.fixture(scope="module", params=SHARES)
def golden(request: pytest.FixtureRequest, stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The recorded prompts, whose continuations the target writes anew; what was recorded."""
    texts, greedy = TEXTS[:: request.param], {"kind": "greedy", "max_new_tokens": SIZE}
    rows = [{"prompt": text["prompt"]} for text in texts]
    return profiled(tmp_path_factory.mktemp("golden"), stories15m, rows, greedy), texts


def rounds(run: Run, gamma: int, draft: str = "head") -> list[list[list[int]]]:
    """Rounds of each text: where they start, and what they accept of the text."""
    table, texts = run.positions(draft, 0), run.continuations(0, ["continuation_tokens"])
    columns = {name: table[name].fill_null(0).to_numpy().astype(np.int64) for name in ("accepted_run", "proposed")}
    length = texts["continuation_tokens"].to_numpy().astype(np.int64)
    stop = np.cumsum(length)
    trace = Trace(columns["accepted_run"], columns["proposed"], stop - length, stop)
    found = listed_rounds(trace, gamma)
    at = found.at - (stop - length)[found.document]
    pairs = np.stack([at, np.minimum(found.accepted, length[found.document] - at)], 1)
    return [pairs[found.document == number].tolist() for number in range(len(length))]


def recorded(text: dict[str, Any], gamma: int) -> list[list[int]]:
    """The recorded rounds, of which the last may accept a token after the end of the text."""
    return [[at, min(accepted, SIZE - at)] for at, accepted in text["rounds"][str(gamma)]]


def test_the_target_writes_the_recorded_texts(golden: Recorded) -> None:
    run, texts = golden
    written = run.continuations(0)["continuation_ids"].to_pylist()
    assert written == [text["text"] for text in texts]


@each("gamma", GAMMAS)
def test_every_round_is_the_recorded_one(golden: Recorded, gamma: int) -> None:
    run, texts = golden
    expected = [recorded(text, gamma) for text in texts]
    assert rounds(run, gamma) == expected
    assert sum(map(len, expected)) > 40 * len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("golden", [1], indirect=True, ids=["all"])
@pytest.mark.usefixtures("one_thread")
def test_real_decoding_has_the_recorded_rounds(golden: Recorded, stories15m: Path) -> None:
    """With caches of its own, on the target's states of verified tokens."""
    run, texts = golden
    options = load_profile(run.path.parent / "profile.yaml", [])
    tokenizer, target = load_tokenizer(options.target), load_model("target", options.target, "float32")
    (head,) = load_drafts(options, target, tokenizer)
    total = 0
    for gamma in GAMMAS:
        engine = Speculation(target, head, parse_rule("strict"), gamma)
        for text in texts:
            found = engine.decode(np.array(text["prompt"], dtype=np.int32), SIZE)
            assert found.ids.tolist() == text["text"]
            assert found.accepted.tolist() == [accepted for _, accepted in recorded(text, gamma)]
            total += len(found.accepted)
    assert total > 180 * len(texts)


@pytest.fixture(scope="module", params=SHARES)
def served(request: pytest.FixtureRequest, stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The prompts of a real vLLM that drafted with the head, whose continuations the target writes anew; its requests."""
    requests = REQUESTS[:: request.param]
    rows = [{"prompt": item["prompt_ids"]} for item in requests]
    greedy = {"kind": "greedy", "max_new_tokens": 120}
    return profiled(tmp_path_factory.mktemp("served"), stories15m, rows, greedy), requests


@each("gamma", [1, 3, 5])
def test_every_round_is_that_of_a_real_vllm(served: Recorded, gamma: int) -> None:
    run, requests = served
    texts = [request["continuation_ids"] for request in requests]
    assert run.continuations(0)["continuation_ids"].to_pylist() == texts
    total = 0
    for found, request in zip(rounds(run, gamma), requests, strict=True):
        size, at, expected = len(request["continuation_ids"]), 1, []
        for accepted in request["per_step_accepted"][str(gamma)]:
            expected.append([at, min(accepted, size - at)])  # vLLM counts drafts after the end of the text, too
            at += accepted + 1
        assert found == expected
        total += len(expected)
    assert total > 70 * len(requests)


def test_what_sglang_would_feed_it_is_another_reading_and_said_so(
    stories15m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes its ids 1, 3, 5 for outputs of layers: what others write as 2, 4, 6. The manifest has what both get, and
    the head is hashed once.
    """
    hashed = []
    by_files = draft.fingerprint_by_files
    monkeypatch.setattr(draft, "fingerprint_by_files", lambda *parts: hashed.append(parts) or by_files(*parts))
    greedy = {"kind": "greedy", "max_new_tokens": SIZE}
    rows = [{"prompt": text["prompt"]} for text in TEXTS[::4]]
    head = shutil.copytree(GOLDEN, tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    (head / "config.json").write_text(json.dumps(config))
    run = profiled(tmp_path, stories15m, rows, greedy, model=str(head))
    facts = run.manifest.drafts["head"]
    assert "2, 4, 6" in facts.reading["target states"]
    assert rounds(run, 3) != [recorded(text, 3) for text in TEXTS[::4]]
    (warning,) = [warning for warning in run.manifest.warnings if warning["code"] == "wiring"]
    assert "one layer earlier" in warning["message"]
    assert "[1, 3, 5]" in warning["remedy"]
    own, *others = facts.trials
    assert own.changed == ""
    assert max(trial.acceptance for trial in others) > own.acceptance
    assert len(hashed) == 1


FINGERPRINTS = {  # runs name heads by them: files, how they are read, and dtype
    "dflash": "files-f7063a1db86239edf82be3f6f6ce708a30007f8b414e5577190db6495454aaff",
    "eagle3": "files-68420d8b8169c16cbda1b6d3c6cff18521a49b85ddcd3efa53695464698915f0",
    "p_eagle": "files-6cb775cf05b6389bbaff0ec0040e2c756bfa284c3adacbb5a17e615a40112e50",
    "pard": "files-a1eb3770f62942c7be3f0755089621185e029bbd455995a80edc9892f0583eda",
}


def test_the_fingerprint_of_a_head_stays(stories15m: Path, tmp_path: Path) -> None:
    """Whatever its layers are called here, and whoever wrote them."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": [1, 2, 3]}))
    tree = {
        "target": {"model": str(stories15m), "dtype": "float32"},
        "drafts": {kind: {"kind": kind, "model": str(GOLDEN.parent / f"{kind}_stories15m")} for kind in FINGERPRINTS},
        "data": [{"domain": "stories", "path": "prompts.jsonl", "prompt_ids": "prompt"}],
        "continuation": {"kind": "greedy", "max_new_tokens": 8},
        "gammas": [7],
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    options = load_profile(tmp_path / "profile.yaml", [])
    target = load_model("target", options.target, "float32")
    drafts: Any = load_drafts(options, target, load_tokenizer(options.target))
    assert {head.name: head.fingerprint for head in drafts} == FINGERPRINTS
