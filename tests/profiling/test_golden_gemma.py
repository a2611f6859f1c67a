"""A trained assistant of Gemma 4 on a tiny target, through a profile: whole drafts and rounds are those of a plain decoder,
which in turn drafts as a vLLM did.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from alphaprof.config.heads import GEMMA
from alphaprof.config.options import GemmaDraft, ModelOptions
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads import gemma
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.gemma import LEAST
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.profiling.models.private import RELEASE
from alphaprof.profiling.scoring.statistics import ABSENT
from alphaprof.profiling.timing.steppers import HeadStepper, read
from alphaprof.rules import parse_rule
from alphaprof.run.reader import Run
from tests.loops import each
from tests.profiling.golden import drafted, greedy_run, models_of, recorded, require_drafted, rounds

pytestmark = [pytest.mark.models, pytest.mark.skipif(RELEASE < LEAST, reason="transformers builds no assistants")]
GOLDEN = Path(__file__).parent.parent / "golden" / "gemma4_assistant"
TEXTS = json.loads((GOLDEN / "rounds.json").read_text())["texts"]
GAMMAS = (2, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded target, whose texts go on behind its EOS, with a tokenizer whose words stand for nothing."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "model.safetensors").symlink_to(GOLDEN / "target" / "model.safetensors")
    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    prompts = [text["prompt"] for text in TEXTS]
    return assisted(tmp_path_factory.mktemp("run"), target, GOLDEN / "assistant", prompts, 40, GAMMAS)


def assisted(
    folder: Path,
    target: Path,
    assistant: Path,
    prompts: Sequence[list[int]] = ([3, 4],),
    tokens: int = 4,
    gammas: Sequence[int] = (2,),
) -> Run:
    head = {"kind": "gemma4_assistant", "model": str(assistant)}
    return greedy_run(folder, target, {"head": head}, prompts, tokens, gammas)


@pytest.fixture(scope="module")
def loaded(run: Run) -> tuple[Model, HeadDraft]:
    target, (draft,) = models_of(run.manifest.profile)
    return target, draft


@each("gamma", GAMMAS)
def test_one_pass_has_the_recorded_rounds_and_all_of_their_drafts(gamma: int, run: Run, loaded: Any) -> None:
    assert run.continuations(0)["continuation_ids"].to_pylist() == [text["text"] for text in TEXTS]
    target, draft = loaded
    assert [drafted(target, draft.network, text, gamma) for text in TEXTS] == [text["drafts"][str(gamma)] for text in TEXTS]
    assert rounds(run, gamma) == [recorded(text, gamma) for text in TEXTS]


@pytest.mark.usefixtures("one_thread")
@each("gamma", GAMMAS)
def test_real_decoding_has_the_recorded_rounds_and_all_of_their_drafts(gamma: int, loaded: Any) -> None:
    engine = Speculation(*loaded, parse_rule("strict"), gamma)
    for text in TEXTS:
        require_drafted(engine, text, gamma)


def window(more: int) -> Callable[[Any], Any]:
    def changed(network: Any) -> Any:
        for layer in network.blocks[:3]:
            layer.self_attn.sliding_window += more
        return network

    return changed


WRONG: dict[str, tuple[Callable[[Any], Any], int]] = {
    # How it would be read, and how many of the 87 whole drafts stay at γ 4
    "the place of the next token": (lambda network: network.changed(later=1), 65),
    "a window one wider": (window(1), 64),
    "a window one narrower": (window(-1), 69),
}


@each("words", WRONG)
def test_a_wrong_reading_changes_as_many_drafts_as_an_independent_program_says(words: str, run: Run) -> None:
    change, kept = WRONG[words]
    target, (draft,) = models_of(run.manifest.profile)
    network = change(draft.network)
    assert sum(sum(map(list.__eq__, drafted(target, network, text, 4), text["drafts"]["4"])) for text in TEXTS) == kept


def test_the_manifest_says_how_it_is_read_and_what_else_was_tried(run: Run) -> None:
    facts = run.manifest.drafts["head"]
    assert facts.reading["target states"].endswith("layer 4 (sliding_attention), layer 5 (full_attention)")
    own, other = facts.trials
    assert (own.engines, other.changed) == (("vLLM", "SGLang"), "the place of the next token")
    assert other.acceptance < own.acceptance


@torch.inference_mode()
def test_a_step_is_timed_over_a_filled_cache(loaded: Any) -> None:
    """Of texts that grow alike; what it computes is what one pass has, however often it runs."""
    (target, draft), text = loaded, TEXTS[0]
    ids, features = read(target, draft.network, np.array([*text["prompt"], *text["text"]], dtype=np.int32))
    steps = HeadStepper(draft.network, ids, features, 2, 3)
    for tokens in (3, 1, 2):
        assert min(steps.first(tokens), steps.later()) > 0
        state, token = steps.extended(steps.cache(), tokens)
        (whole,) = next(draft.network.states(ids[None], torch.cat([features, features[-1:]])[None], 1, 0))
        torch.testing.assert_close(state, whole[[steps.context + tokens - 1] * 2], atol=1e-4, rtol=1e-4)
        assert token[0] == token[1]


TINY = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "attention_k_eq_v": True}
TINY |= {"vocab_size_per_layer_input": 128, "num_global_key_value_heads": 1}


def made(folder: Path, config: dict[str, Any], seed: int) -> Any:
    """A random model in a folder."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval().requires_grad_(False)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, mean=float(parameter.dim() == 1))
    if getattr(network, "masked_embedding", None) is not None:
        network.masked_embedding.token_ordering.copy_(torch.randperm(128))
    network.save_pretrained(folder)
    return network


@torch.inference_mode()
def test_logits_are_those_of_transformers_on_targets_that_share_keys_and_with_ordered_embeddings(tmp_path: Path) -> None:
    """As E2B and E4B have it. In texts shorter than the window both read the same keys."""
    configs = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in ("target", "assistant")}
    ordered = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
    text = configs["assistant"]["text_config"] | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    whole = made(tmp_path / "target", configs["target"] | TINY, 0)
    theirs = made(tmp_path / "assistant", configs["assistant"] | ordered | {"text_config": text}, 1)
    target = load_model("target", ModelOptions(model=str(tmp_path / "target")), "float32")
    options, asked = SimpleNamespace(gammas=[2]), {"kind": "gemma4_assistant", "model": str(tmp_path / "assistant")}
    network: Any = gemma.load_assistant("a", GemmaDraft.model_validate(asked), options, target, None).network  # type: ignore[arg-type]
    ids, features = read(target, network, np.arange(5, 13, dtype=np.int32))
    output = whole(ids[None, :-1], output_hidden_states=True, return_shared_kv_states=True)
    own = list(network.states(ids[None, :-1], features[None], 2, 0))
    for base in range(5):
        keys = {kind: tuple(each[:, :, : base + 1] for each in pair) for kind, pair in output.shared_kv_states.items()}
        state = output.hidden_states[-1][:, base : base + 1]
        for depth in (1, 2):
            embedded = whole.get_input_embeddings()(ids[None, base + depth : base + depth + 1])
            place = torch.tensor([[base]])
            found = theirs(inputs_embeds=torch.cat([embedded, state], -1), position_ids=place, shared_kv_states=keys)
            state = found.last_hidden_state
            logits = network.logits(own[depth - 1][0, base : base + 1], depth)
            assert int((logits > ABSENT).sum()) == 3 * 128 // 16
            torch.testing.assert_close(logits[logits > ABSENT], found.logits[0][logits > ABSENT], atol=1e-4, rtol=1e-4)
    several = own[0][0].repeat(20, 1)  # so many rows that all logits are computed
    torch.testing.assert_close(network.logits(several, 1)[:7], network.logits(own[0][0], 1), atol=1e-4, rtol=1e-4)
    rows = 16 + 3 * 128 // 16
    matrices = {name: each.numel() for name, each in network.named_parameters() if each.dim() > 1}
    used = sum(matrices.values()) - matrices["embed_tokens.weight"] - 16 * 32 + rows * 32
    shape = ModelShape.from_config(whole.config.to_dict())
    assert network.shape() == ModelShape.of_head(theirs.config.to_dict(), shape, GEMMA, 4.0)
    assert (network.shape().parameters, network.shape().last_parameters) == (used, rows * 32)


FEWER = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {  # changes of the assistant's config, by words of the refusal
    "needs state width 96": ("", {"backbone_hidden_size": 96}),
    "hold tensors that its config does not use": ("text_config", FEWER),
    "reads keys of 64 numbers a head in layers of sliding_attention": ("text_config", {"head_dim": 64}),
    "hidden_size_per_layer_input must be 0": ("text_config", {"hidden_size_per_layer_input": 4}),
}


@each("words", REFUSED)
def test_files_that_do_not_fit_are_refused(words: str, target: Path, tmp_path: Path) -> None:
    place, changes = REFUSED[words]
    config = json.loads((GOLDEN / "assistant" / "config.json").read_text())
    (config[place] if place else config).update(changes)
    (folder := tmp_path / str(len(words))).mkdir()
    (folder / "model.safetensors").symlink_to(GOLDEN / "assistant" / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnloadable, match=words):
        assisted(tmp_path / "out", target, folder)


def test_an_older_transformers_is_named_with_the_version_that_is_needed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma, "RELEASE", (5, 23))
    with pytest.raises(ModelUnloadable, match=r"transformers 5\.23 cannot build an assistant") as refused:
        assisted(tmp_path / "out", target, GOLDEN / "assistant")
    assert "transformers>=5.24" in str(refused.value.hint)
