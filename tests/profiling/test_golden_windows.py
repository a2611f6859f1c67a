"""Trained DFlash drafters with sliding windows on stories15M: whole drafts and rounds are those of a plain decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaprof.config.load import load_profile
from alphaprof.profiling.decoding.drafters import HeadDrafter
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.attention import Reach
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.kinds import load_drafts
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.timing.steppers import read
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from tests.loops import each
from tests.profiling.test_golden_dflash import profiled, recorded
from tests.profiling.test_golden_head import rounds

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = {name: GOLDEN / f"dflash_windows_{name}_stories15m" for name in ("mixed", "all")}
TEXTS = {name: json.loads((folder / "rounds.json").read_text())["texts"] for name, folder in NAMES.items()}
of_each = pytest.mark.parametrize("name", NAMES)


def asked(name: str, folder: Path, target: Path, *gammas: int, **draft: Any) -> Run:
    prompts, size = [text["prompt"] for text in TEXTS[name]], len(TEXTS[name][0]["text"])
    return profiled(folder, target, prompts, *gammas, tokens=size, **({"model": str(NAMES[name])} | draft))


@pytest.fixture(scope="module")
def runs(stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Where a layer is not causal, each γ is a draft; else one draft has all of them."""
    folder = tmp_path_factory.mktemp("windows")
    mixed = asked("mixed", folder / "mixed", stories15m, 3, 7)
    return {"mixed": mixed, "all": asked("all", folder / "all", stories15m, 7, gamma=None, depths=7)}


@pytest.fixture(scope="module")
def loaded(runs: dict[str, Run]) -> dict[str, tuple[Model, dict[int, HeadDraft]]]:
    """The target, and the drafts by how many tokens they draft."""
    found = {}
    for name, run in runs.items():
        options = load_profile(run.path.parent / "profile.yaml", [])
        target = load_model("target", options.target, "float32")
        drafts = load_drafts(options, target, load_tokenizer(options.target))
        found[name] = target, {draft.depths: draft for draft in drafts if isinstance(draft, HeadDraft)}
    return found


@torch.inference_mode()
def drafted(target: Model, network: Any, text: dict[str, Any], gamma: int) -> list[list[Any]]:
    """What one pass over a text drafts in the recorded rounds: where each starts, and all of its tokens."""
    prompt, starts = len(text["prompt"]), [start for start, _ in text["drafts"][str(gamma)]]
    ids, features = read(target, network, np.array([*text["prompt"], *text["text"]], dtype=np.int32))
    states = network.states(ids[None, :-1], features[None], gamma, 0)
    tops = torch.stack([network.logits(each[0], depth).argmax(1) for depth, each in enumerate(states, 1)], 1)
    return [[start, tops[prompt + start - 2].tolist()] for start in starts]


@of_each
@each("gamma", (3, 7))
def test_one_pass_has_the_recorded_rounds_and_all_of_their_drafts(
    name: str, gamma: int, runs: dict[str, Run], loaded: Any
) -> None:
    run, texts, (target, drafts) = runs[name], TEXTS[name], loaded[name]
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in texts]
    draft = drafts[gamma if name == "mixed" else 7]
    assert [drafted(target, draft.network, text, gamma) for text in texts] == [text["drafts"][str(gamma)] for text in texts]
    assert rounds(run, gamma, draft.name) == [recorded(text, gamma) for text in texts]
    assert draft.facts().lengths([1, 3, 7]) == ([gamma] if name == "mixed" else [1, 3, 7])


@pytest.mark.usefixtures("one_thread")
@of_each
@each("gamma", (3, 7))
def test_real_decoding_has_the_recorded_rounds_and_all_of_their_drafts(
    name: str, gamma: int, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafts = loaded[name]
    proposed: list[list[int]] = []
    propose = HeadDrafter.propose

    def spy(self: HeadDrafter, ids: list[int], most: int) -> Any:
        proposed.append((proposal := propose(self, ids, most)).ids.tolist())
        return proposal

    monkeypatch.setattr(HeadDrafter, "propose", spy)
    engine = Speculation(target, drafts[gamma if name == "mixed" else 7], parse_rule("strict"), gamma)
    for text in TEXTS[name][:2]:
        proposed.clear()
        found = engine.decode(np.array(text["prompt"], dtype=np.int32), len(text["text"]))
        assert found.accepted.tolist() == [accepted for _, accepted in recorded(text, gamma)]
        whole = [tokens for _, tokens in text["drafts"][str(gamma)]]
        assert [tokens == all_of[: len(tokens)] for tokens, all_of in zip(proposed, whole, strict=True)] == [True] * len(
            whole
        )
        assert proposed[0] == whole[0]


WRONG: dict[str, tuple[str, Callable[[tuple[Reach, ...]], tuple[Reach, ...]], int]] = {
    # Of which drafter, how each layer would see, and how many of the whole drafts of the first text stay at γ 7
    "window ignored": ("mixed", lambda reach: tuple(replace(item, window=None) for item in reach), 6),
    "window one wider": ("mixed", lambda reach: (replace(reach[0], window=17), reach[1]), 25),
    "window on the full layer too": ("mixed", lambda reach: (reach[0], replace(reach[1], window=16)), 0),
    "sliding layer not causal": ("mixed", lambda reach: (replace(reach[0], causal=False), reach[1]), 17),
    "full layer causal too": ("mixed", lambda reach: (reach[0], replace(reach[1], causal=True)), 23),
    "not causal": ("all", lambda reach: tuple(replace(item, causal=False) for item in reach), 10),
    "no window at all": ("all", lambda reach: tuple(replace(item, window=None) for item in reach), 2),
}


@each("words", WRONG)
def test_a_wrong_reading_changes_as_many_drafts_as_an_independent_program_says(words: str, loaded: Any) -> None:
    name, change, kept = WRONG[words]
    target, drafts = loaded[name]
    text, network = TEXTS[name][0], drafts[7].network
    found = drafted(target, network.changed(reach=change(network.reach)), text, 7)
    assert sum(map(list.__eq__, found, text["drafts"]["7"])) == kept
