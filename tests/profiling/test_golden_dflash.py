"""A trained DFlash drafter on stories15M, through a profile: its rounds are those of z-lab's generator and of a vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import alphaprof
from alphaprof.commands.export.engines import export
from alphaprof.config.options import ModelOptions
from alphaprof.errors import ModelUnloadable, OptionInvalid, ProfileInvalid
from alphaprof.profiling.heads.dflash import DFlash
from alphaprof.profiling.models.load import load_model
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, RunDraft
from tests.loops import each
from tests.profiling.golden import GOLDEN, greedy_run, recorded, require_decoded, rounds, vllm_rounds

pytestmark = pytest.mark.demo_model
DRAFTER = GOLDEN / "dflash_stories15m"
TEXTS = json.loads((DRAFTER / "rounds.json").read_text())["texts"]
REQUESTS = json.loads((GOLDEN / "vllm" / "rounds-dflash-stories15m.json").read_text())["requests"][::2]


def profiled(folder: Path, target: Path, prompts: list[list[int]], *gammas: int, tokens: int = 70, **draft: Any) -> Run:
    """A run with a drafter for each block, of which the first is tried in other readings; one alone is called head."""
    names = ["head"] if len(gammas) == 1 else [f"head{gamma}" for gamma in gammas]
    options = {"kind": "dflash", "model": str(DRAFTER)}
    blocks = ({"gamma": gamma, "check_wiring": gamma == gammas[0]} for gamma in gammas)
    drafts = {name: options | block | draft for name, block in zip(names, blocks, strict=True)}
    return greedy_run(folder, target, drafts, prompts, tokens, gammas)


PROMPTS = [text["prompt"] for text in TEXTS]


@pytest.fixture(scope="module")
def run(stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return profiled(tmp_path_factory.mktemp("dflash"), stories15m, PROMPTS, 7)


def test_every_round_is_the_recorded_one(run: Run) -> None:
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in TEXTS]
    assert rounds(run, 7) == [recorded(text, 7) for text in TEXTS]


@pytest.mark.slow
def test_every_round_of_z_labs_own_generator_is_replayed(stories15m: Path, tmp_path: Path) -> None:
    texts = json.loads((DRAFTER / "rounds-zlab.json").read_text())["texts"]
    lengths, prompts = (1, 3, 5, 7, 10, 15), [text["prompt"] for text in texts]
    run = profiled(tmp_path, stories15m, prompts, *lengths, check_wiring=False)
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in texts]
    for gamma in lengths:
        assert rounds(run, gamma, f"head{gamma}") == [text["rounds"][str(gamma)] for text in texts]
    assert sum(len(each) for text in texts for each in text["rounds"].values()) == 1342


def test_blocks_of_one_run_have_rounds_of_their_own_length_alone(stories15m: Path, tmp_path: Path) -> None:
    """What it proposes depends on how many rows there are."""
    lengths = (1, 3, 5, 10)
    other = profiled(tmp_path, stories15m, PROMPTS, *lengths, check_wiring=False)
    for gamma in lengths:
        assert rounds(other, gamma, f"head{gamma}") == [recorded(text, gamma) for text in TEXTS]
    report = build_report(other)
    assert {result.draft: [item.gamma for item in result.gammas] for result in report.results} == {
        f"head{gamma}": [gamma] for gamma in lengths
    }
    totals = alphaprof.open(other.path).totals()
    known = totals.groupby("draft", observed=True)[[f"rounds_{gamma}" for gamma in lengths]].count()
    assert known.to_numpy().tolist() == (np.eye(4, dtype=int)[[0, 3, 1, 2]] * len(TEXTS)).tolist()  # head1, head10, head3
    best = {item.answer.draft: item.answer.gamma for item in report.drafts}
    assert best == {f"head{gamma}": gamma for gamma in lengths}


def test_the_manifest_says_how_its_files_were_read_and_what_else_was_tried(run: Run) -> None:
    facts = run.manifest.drafts["head"]
    assert facts.reading["target states"] == "after 2, 3, 5 layers"
    assert facts.reading["block"].startswith("8 rows")
    own, *others = facts.trials
    assert {trial.changed for trial in others} == {
        "states of the target one layer later",
        "states of the target one layer earlier",
        "no rows seen that come later",
        "mask token 2",
    }
    # Ids 0 and 2 have all but the same embedding in this target.
    assert all(trial.ahead < 0 or (trial.changed, trial.ahead) == ("mask token 2", 0) for trial in others)
    assert own.ahead == 0
    config = json.loads(export(RunDraft(run, "head"), "vllm-config", gamma=7).text)
    assert (config["method"], config["num_speculative_tokens"]) == ("dflash", 7)
    words = export(RunDraft(run, "head"), "sglang-args", gamma=7).text
    assert words.startswith("--speculative-algorithm DFLASH --speculative-draft-model-path ")
    assert words.endswith("--speculative-num-draft-tokens 8\n")  # the rows of a block


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_real_decoding_has_the_recorded_rounds(run: Run) -> None:
    require_decoded(run, TEXTS, [7])


def first_norm_everywhere(context: Callable[..., Any]) -> Callable[..., Any]:
    """What vLLM 0.32 does on a CPU: its kernel takes the key norm of the first layer for the context of every layer, where
    the kernel of GPUs selects that of each (models/qwen3_dflash.py, _normalize_context_k).
    """

    def changed(self: Any, *arguments: Any) -> Any:
        norms = [block.self_attn.k_norm for block in self.blocks]
        for block in self.blocks:
            block.self_attn.k_norm = norms[0]
        try:
            return context(self, *arguments)
        finally:
            for block, norm in zip(self.blocks, norms, strict=True):
                block.self_attn.k_norm = norm

    return changed


@pytest.mark.slow
@each("gamma", (3, 7))
def test_every_round_is_that_of_a_real_vllm_but_for_its_norm_on_cpus(
    gamma: int, stories15m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, size = [request["prompt_ids"] for request in REQUESTS], len(REQUESTS[0]["continuation_ids"])
    own = profiled(tmp_path / f"own-{gamma}", stories15m, prompts, gamma, tokens=size, check_wiring=False)
    with monkeypatch.context() as patch:
        patch.setattr(DFlash, "context", first_norm_everywhere(DFlash.context))
        theirs = profiled(tmp_path / f"theirs-{gamma}", stories15m, prompts, gamma, tokens=size, check_wiring=False)
    assert own.continuations(0)["continuation_ids"].to_pylist() == [request["continuation_ids"] for request in REQUESTS]
    expected = [list(vllm_rounds(request["per_step_accepted"][str(gamma)], size)) for request in REQUESTS]
    assert sum(map(len, expected)) > 750
    assert rounds(theirs, gamma) == expected
    assert rounds(own, gamma) != expected


def test_other_lengths_than_the_blocks_and_other_files_are_refused(stories15m: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnloadable, match="drafts 7 tokens a round, but gammas is \\[5\\]"):
        profiled(tmp_path / "length", stories15m, PROMPTS[:1], 5, gamma=None)
    with pytest.raises(ModelUnloadable, match="each γ is a pass of its own, but depths is 7") as refused:
        profiled(tmp_path / "depths", stories15m, PROMPTS[:1], 7, gamma=None, depths=7)
    assert "gamma: K" in str(refused.value.hint)
    with pytest.raises(ProfileInvalid, match="gamma and depths exclude each other"):
        profiled(tmp_path / "both", stories15m, PROMPTS[:1], 7, depths=7)
    with pytest.raises(ProfileInvalid, match=r"drafts\.head\.gamma 5 is not among gammas"):
        profiled(tmp_path / "missing", stories15m, PROMPTS[:1], 7, gamma=5)
    with pytest.raises(ProfileInvalid, match=r"unknown key drafts\.head\.block") as refused:
        profiled(tmp_path / "block", stories15m, PROMPTS[:1], 7, block=8)
    assert "gamma: K" in str(refused.value.hint)
    with pytest.raises(ModelUnloadable, match="its tensors are those of EAGLE-3"):
        profiled(tmp_path / "kind", stories15m, PROMPTS[:1], 5, model=str(GOLDEN / "eagle3_stories15m"))


RELATIVES: dict[str, dict[str, Any]] = {  # changes of its config.json, by words of the refusal
    "its config.json is that of DSpark": {"architectures": ["DSparkDraftModel"]},
    "no valid conv_kernel_size, conv_group_size, selector_rank": {"architectures": ["DFlash2DraftModel"]},
    "with attention sinks": {"dflash_config": {"attention_sink_bias": True}},
    "with attention_value_scale": {"attention_value_scale": 0.612},
    "dflash_config has projector, which is unsupported": {"dflash_config": {"projector": True}},
    "use_swa, but no swa_window_size": {"dflash_config": {"use_swa": True}},
    "after 2, 3, 5 of 8 layers, but the target has 6": {"num_target_layers": 8},
}


def changed(folder: Path, changes: dict[str, Any], drafter: Path = DRAFTER) -> str:
    """A drafter in a new folder, with another config.json."""
    config = json.loads((drafter / "config.json").read_text())
    config |= {key: config[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(drafter / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@each("words", RELATIVES)
def test_its_relatives_are_refused_by_name_with_what_can_be_done(words: str, stories15m: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnloadable, match=words) as refused:
        profiled(tmp_path / "out", stories15m, PROMPTS[:1], 7, model=changed(tmp_path / str(len(words)), RELATIVES[words]))
    assert any(word in str(refused.value.hint) for word in ("import", "target", "complete checkpoint", "kind: dspark"))


def test_rows_that_propose_the_token_behind_them_are_one_less(run: Run, stories15m: Path, tmp_path: Path) -> None:
    model = changed(tmp_path / "anchored", {"sample_from_anchor": True})
    other = profiled(tmp_path / "out", stories15m, PROMPTS, 7, model=model)
    assert other.manifest.drafts["head"].trials[0].acceptance < run.manifest.drafts["head"].trials[0].acceptance - 0.1
    assert rounds(other, 7) != rounds(run, 7)


def by_speculators(folder: Path, **own: torch.Tensor) -> str:
    """The drafter as the converter of speculators 0.9.0 writes it, with more tensors of its own."""
    config = json.loads((DRAFTER / "config.json").read_text())
    names = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "torch_dtype")
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 3, 5],
        "block_size": 8,
        "draft_vocab_size": len(own.get("lm_head.weight", range(32000))),
        "mask_token_id": 0,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "elsewhere/stories"}},
        "transformer_layer_config": {key: value for key, value in config.items() if key not in names},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    save_file(load_file(DRAFTER / "model.safetensors") | own, folder / "model.safetensors")
    return str(folder)


def test_files_of_speculators_have_the_recorded_rounds(stories15m: Path, tmp_path: Path) -> None:
    run = profiled(
        tmp_path / "out", stories15m, PROMPTS, 7, model=by_speculators(tmp_path / "spec"), gamma=None, check_wiring=False
    )
    assert run.manifest.drafts["head"].reading["layout"] == "speculators"
    assert rounds(run, 7) == [recorded(text, 7) for text in TEXTS]
    with pytest.raises(OptionInvalid, match="SGLang does not take this draft of kind dflash"):
        export(RunDraft(run, "head"), "sglang-args", gamma=7)


def test_a_vocabulary_of_its_own_is_part_of_the_targets(run: Run, stories15m: Path, tmp_path: Path) -> None:
    """Its embedding and LM head are those of its files, and it proposes the likeliest of its own tokens."""
    weights = load_model("target", ModelOptions(model=str(stories15m)), "float32").network.get_input_embeddings().weight
    ids = torch.arange(3, 32000, 2)
    own = {"embed_tokens.weight": weights, "lm_head.weight": weights[ids], "d2t": ids - torch.arange(len(ids))}
    part = profiled(
        tmp_path / "out", stories15m, PROMPTS, 7, model=by_speculators(tmp_path / "spec", **own), check_wiring=False
    )
    facts, tops = part.manifest.drafts["head"], [each.positions("head", 0)["draft_top"].to_numpy() for each in (part, run)]
    assert (facts.reading["embedding"], facts.reading["LM head"], facts.vocabulary) == ("its own", "its own", len(ids))
    odd = (tops[1] % 2 == 1) & (tops[1] >= 3)
    assert 0.2 < odd.mean() < 0.8
    assert (tops[0][odd] == tops[1][odd]).all()
    assert set(tops[0] % 2) == {1}
