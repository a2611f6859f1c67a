"""Trained parallel drafters on stories15M, through a profile: their rounds are those of other decoders and of a vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from alphaprof.commands.export.engines import export
from alphaprof.config.options import PardDraft
from alphaprof.errors import ModelUnloadable, OptionInvalid
from alphaprof.profiling.heads.p_eagle import PEagle
from alphaprof.profiling.heads.pard import ARCHITECTURES, Pard, load_pard
from alphaprof.run.reader import Run, RunDraft
from tests.loops import each
from tests.profiling.golden import GOLDEN, greedy_run, recorded, require_decoded, rounds, vllm_rounds
from tests.tiny import edited

pytestmark = pytest.mark.demo_model
GAMMAS = (1, 2, 3, 5, 7)
KINDS = {"p_eagle": PEagle, "pard": Pard}
TEXTS = {kind: json.loads((GOLDEN / f"{kind}_stories15m" / "rounds.json").read_text())["texts"] for kind in KINDS}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def profiled(kind: str, folder: Path, target: Path, prompts: list[list[int]], tokens: int, **draft: Any) -> Run:
    head = {"kind": kind, "model": str(GOLDEN / f"{kind}_stories15m")} | draft
    return greedy_run(folder, target, {"head": head}, prompts, tokens, GAMMAS, "lossless")


@pytest.fixture(scope="module")
def runs(stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("parallel")
    prompts = {kind: [text["prompt"] for text in texts] for kind, texts in TEXTS.items()}
    return {kind: profiled(kind, folder / kind, stories15m, prompts[kind], 70) for kind in KINDS}


@of_each_kind
@each("gamma", GAMMAS)
def test_every_round_is_the_recorded_one(runs: dict[str, Run], kind: str, gamma: int) -> None:
    assert runs[kind].continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in TEXTS[kind]]
    assert rounds(runs[kind], gamma) == [recorded(text, gamma) for text in TEXTS[kind]]


@pytest.mark.parametrize(("kind", "method"), [("p_eagle", "eagle3"), ("pard", "draft_model")])
def test_the_manifest_says_how_its_files_were_read_and_what_else_was_tried(
    runs: dict[str, Run], kind: str, method: str
) -> None:
    facts = runs[kind].manifest.drafts["head"]
    assert facts.reading["mask token"] == "0"
    assert facts.in_one_step
    own, *others = facts.trials
    assert "mask token 2" in {trial.changed for trial in others}
    assert ("states of the target one layer later" in {trial.changed for trial in others}) == (kind == "p_eagle")
    assert own.changed == ""
    assert all(trial.ahead < 0 for trial in others if trial.depth == 1)
    config = json.loads(export(RunDraft(runs[kind], "head"), "vllm-config", gamma=5).text)
    assert (config["method"], config["parallel_drafting"], config["num_speculative_tokens"]) == (method, True, 5)
    for to in ("sglang-args", "llamacpp-args"):
        with pytest.raises(OptionInvalid, match="has no method"):
            export(RunDraft(runs[kind], "head"), to, gamma=5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@of_each_kind
def test_real_decoding_has_the_recorded_rounds(runs: dict[str, Run], kind: str) -> None:
    require_decoded(runs[kind], TEXTS[kind], (1, 3, 7))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("p_eagle", 900), ("pard", 950)])
def test_every_round_is_that_of_a_real_vllm(kind: str, most: int, stories15m: Path, tmp_path: Path) -> None:
    name = f"rounds-{kind.replace('_', '-')}-stories15m.json"
    requests = json.loads((GOLDEN / "vllm" / name).read_text())["requests"][::2]
    prompts = [request["prompt_ids"] for request in requests]
    run = profiled(kind, tmp_path, stories15m, prompts, len(requests[0]["continuation_ids"]), check_wiring=False)
    assert run.continuations(0)["continuation_ids"].to_pylist() == [request["continuation_ids"] for request in requests]
    expected = [list(vllm_rounds(request["per_step_accepted"], len(request["continuation_ids"]))) for request in requests]
    assert rounds(run, 5) == expected
    assert sum(map(len, expected)) > most


@each("architecture", ARCHITECTURES)
def test_a_pard_model_of_each_architecture_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Its rows by depth, beside whole passes over the text so far and mask tokens."""
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = getattr(transformers, architecture)(config(vocab_size=60, num_key_value_heads=2, **sizes)).eval()
    for name, weight in theirs.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if name.endswith("bias") else 0.2)
    theirs.save_pretrained(tmp_path)
    edited(tmp_path / "config.json", pard_token=59)
    options = SimpleNamespace(gammas=[3])
    target: Any = SimpleNamespace(vocabulary=60, dtype_name="float32", device=torch.device("cpu"), eos=(2,), reference="it")
    draft = load_pard("head", PardDraft(kind="pard", model=str(tmp_path)), options, target, None)  # type: ignore[arg-type]
    assert draft.context == theirs.config.max_position_embeddings - 1
    ids = torch.randint(0, 58, (1, 12))
    with torch.inference_mode():
        found = list(draft.network.states(ids, torch.zeros(1, 12, 1), 3, 0))
        for base in range(11):
            rows = torch.cat([ids[:, : base + 2], torch.full((1, 2), 59)], 1)
            expected = theirs(rows).logits[0, base + 1 :]
            logits = torch.stack([draft.network.logits(states[0, base], depth) for depth, states in enumerate(found, 1)])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_what_is_not_of_the_kind_is_refused_by_name(stories15m: Path, tmp_path: Path) -> None:
    prompt = [TEXTS["pard"][0]["prompt"]]
    eagle3 = {"model": str(GOLDEN / "eagle3_stories15m")}
    for number, (kind, changes, words) in enumerate(
        [
            ("p_eagle", eagle3, "are those of EAGLE-3"),
            ("pard", eagle3, "are those of EAGLE-3"),
            ("pard", {"model": str(stories15m)}, "has no valid mask token"),
        ]
    ):
        with pytest.raises(ModelUnloadable, match=words):
            profiled(kind, tmp_path / str(number), stories15m, prompt, 4, **changes)
