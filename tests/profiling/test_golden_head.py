"""A trained EAGLE-3 head on stories15M, through a profile: its rounds are those that another decoder recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from alphaprof.profiling.heads import draft
from alphaprof.run.reader import Run
from tests.loops import each
from tests.profiling.golden import greedy_run, models_of, profile_of, recorded, require_decoded, rounds, vllm_rounds
from tests.tiny import edited

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden" / "eagle3_stories15m"
GAMMAS = (1, 2, 3, 5)
TEXTS = json.loads((GOLDEN / "rounds.json").read_text())["texts"]
REQUESTS = json.loads((GOLDEN.parent / "vllm" / "rounds-eagle3-stories15m.json").read_text())["requests"]
SHARES = [pytest.param(8, id="an eighth"), pytest.param(1, id="all", marks=pytest.mark.slow)]  # of the recorded texts
SIZE = len(TEXTS[0]["text"])
Recorded = tuple[Run, list[dict[str, Any]]]


def profiled(folder: Path, target: Path, prompts: list[list[int]], tokens: int = SIZE, **draft: Any) -> Run:
    """A run of the head on some prompts."""
    head = {"kind": "eagle3", "model": str(GOLDEN)} | draft
    return greedy_run(folder, target, {"head": head}, prompts, tokens, GAMMAS)


@pytest.fixture(scope="module", params=SHARES)
def golden(request: pytest.FixtureRequest, stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The recorded prompts, whose continuations the target writes anew; what was recorded."""
    texts = TEXTS[:: request.param]
    return profiled(tmp_path_factory.mktemp("golden"), stories15m, [text["prompt"] for text in texts]), texts


@each("gamma", GAMMAS)
def test_every_round_is_the_recorded_one(golden: Recorded, gamma: int) -> None:
    run, texts = golden
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in texts]
    expected = [recorded(text, gamma) for text in texts]
    assert rounds(run, gamma) == expected
    assert sum(map(len, expected)) > 40 * len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("golden", [1], indirect=True, ids=["all"])
@pytest.mark.usefixtures("one_thread")
def test_real_decoding_has_the_recorded_rounds(golden: Recorded, stories15m: Path) -> None:
    """With caches of its own, on the target's states of verified tokens."""
    run, texts = golden
    require_decoded(run, texts[::2], GAMMAS)


@pytest.fixture(scope="module", params=SHARES)
def served(request: pytest.FixtureRequest, stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The prompts of a real vLLM that drafted with the head, whose continuations the target writes anew; its requests."""
    requests = REQUESTS[:: request.param]
    prompts = [item["prompt_ids"] for item in requests]
    return profiled(tmp_path_factory.mktemp("served"), stories15m, prompts, 120, check_wiring=False), requests


@each("gamma", [1, 3, 5])
def test_every_round_is_that_of_a_real_vllm(served: Recorded, gamma: int) -> None:
    run, requests = served
    texts = [request["continuation_ids"] for request in requests]
    assert run.continuations(0)["continuation_ids"].to_pylist() == texts
    expected = [
        list(vllm_rounds(request["per_step_accepted"][str(gamma)], len(request["continuation_ids"]))) for request in requests
    ]
    assert rounds(run, gamma) == expected
    assert sum(map(len, expected)) > 70 * len(requests)


def test_what_sglang_would_feed_it_is_another_reading_and_said_so(
    stories15m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes its ids 1, 3, 5 for outputs of layers: what others write as 2, 4, 6. The manifest has what both get, and
    the head is hashed once.
    """
    hashed = []
    by_files = draft.fingerprint_by_files
    monkeypatch.setattr(draft, "fingerprint_by_files", lambda *parts: hashed.append(parts) or by_files(*parts))
    head = shutil.copytree(GOLDEN, tmp_path / "head")
    edited(head / "config.json", eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    run = profiled(tmp_path, stories15m, [text["prompt"] for text in TEXTS[::4]], model=str(head))
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
    drafts = {kind: {"kind": kind, "model": str(GOLDEN.parent / f"{kind}_stories15m")} for kind in FINGERPRINTS}
    _, heads = models_of(profile_of(tmp_path, stories15m, drafts, [[1, 2, 3]], 8, [7]))
    assert {head.name: head.fingerprint for head in heads} == FINGERPRINTS
