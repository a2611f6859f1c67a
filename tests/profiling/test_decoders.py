"""Architectures that people serve, tiny and random: loaded from their files, scored, read by heads, timed and decoded; the
table in docs/heads.md says the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from alphaprof.config.options import TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.models import teacher_forced
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.identity import shape_of
from alphaprof.profiling.models.kinds import DraftModel, PromptLookup
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.profiling.models.private import RELEASE
from alphaprof.profiling.models.quantised import stored_bytes
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.continuations import Continuation, generate
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing.steppers import Stepper
from alphaprof.rules import rules_of
from tests import eagle
from tests.loops import each
from tests.profiling import modules

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
DOCS = Path(__file__).parents[2] / "docs/heads.md"
VOCABULARY = eagle.VOCABULARY  # so few tokens that lookups find something, right or wrong
YES, ROLLED = "yes", "no: recurrent states cannot be rolled back"

SIZES = modules.SIZES | {"num_hidden_layers": 4}
HEADS = SIZES | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
RECURRENT = modules.HYBRID | {"layer_types": ["linear_attention", "full_attention"] * 2}
TURNED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
IMAGES = {"image_token_index": VOCABULARY + 1}  # no text holds it
EYE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = EYE | {"image_size": 28, "patch_size": 14}
PROJECTED = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
MAMBA = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
FALCON = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}


@dataclass(frozen=True)
class Architecture:
    """A `config` class with tiny `settings`, the class that alphaprof loads it as, and whether drafts are served on it."""

    config: str
    settings: dict[str, Any]
    loaded: str
    decoded: str = YES


ARCHITECTURES = {
    "Llama": Architecture("LlamaConfig", SIZES, "LlamaForCausalLM"),
    "Qwen3": Architecture("Qwen3Config", HEADS, "Qwen3ForCausalLM"),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", HEADS | EXPERTS, "Qwen3MoeForCausalLM"),
    "Qwen3-Next": Architecture("Qwen3NextConfig", SIZES | RECURRENT, "Qwen3NextForCausalLM", ROLLED),
    "Gemma-3": Architecture(
        "Gemma3Config",
        IMAGES | {"text_config": HEADS | WINDOWS, "vision_config": PATCHES, "mm_tokens_per_image": 4},
        "Gemma3ForConditionalGeneration",
    ),
    "Gemma-4": Architecture(
        "Gemma4Config",
        {
            "text_config": HEADS
            | WINDOWS
            | {"global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4},
            "vision_config": None,
            "audio_config": None,
        },
        "Gemma4ForConditionalGeneration",
    ),
    "Llama-4": Architecture(
        "Llama4Config",
        IMAGES
        | {
            "text_config": HEADS
            | {
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "attention_chunk_size": 16,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": PATCHES | PROJECTED,
        },
        "Llama4ForCausalLM",
    ),
    "gpt-oss": Architecture(
        "GptOssConfig", HEADS | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}, "GptOssForCausalLM"
    ),
    "DeepSeek-V3": Architecture("DeepseekV3Config", SIZES | modules.DEEPSEEK, "DeepseekV3ForCausalLM"),
    "GLM-4-MoE": Architecture("Glm4MoeConfig", SIZES | modules.GLM, "Glm4MoeForCausalLM"),
    "Mistral-3": Architecture(
        "Mistral3Config",
        IMAGES
        | {
            "text_config": HEADS | {"model_type": "mistral"},
            "vision_config": PATCHES | {"model_type": "pixtral", "head_dim": 8},
        },
        "Mistral3ForConditionalGeneration",
    ),
    "Qwen3-VL": Architecture(
        "Qwen3VLConfig",
        {
            "text_config": HEADS | {"rope_parameters": TURNED},
            "vision_config": {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
        },
        "Qwen3VLForConditionalGeneration",
    ),
    "Nemotron-H": Architecture("NemotronHConfig", HEADS | MAMBA | NEMOTRON, "NemotronHForCausalLM", ROLLED),
    "Falcon-H1": Architecture("FalconH1Config", SIZES | FALCON, "FalconH1ForCausalLM", ROLLED),
}


def whole(name: str) -> Any:
    """An architecture's network as its publisher has it, parts for images included."""
    chosen = ARCHITECTURES[name]
    if not hasattr(transformers, chosen.config):
        pytest.skip(f"transformers {transformers.__version__} has no {chosen.config}")
    config = getattr(transformers, chosen.config)(**chosen.settings)
    classes = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    classes |= dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    torch.manual_seed(0)
    network = getattr(transformers, classes[config.model_type])(config).eval().requires_grad_(False)
    for key, weight in network.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.35)
        elif "norm" in key:
            weight += torch.randn_like(weight) * 0.2
    network.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return network


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Model]:
    """An architecture's name, its network, and the model that alphaprof loads from its files."""
    network = whole(request.param)
    folder = tmp_path_factory.mktemp("served")
    network.save_pretrained(folder)
    return request.param, network, load_model("target", TargetOptions(model=str(folder), device="cpu"), "float32")


def documents() -> list[Document]:
    """Prompts longer than a window, of three lengths."""
    prompts = [
        np.random.default_rng(index).integers(1, VOCABULARY, size).astype(np.int32) for index, size in enumerate((9, 20, 33))
    ]
    return [
        Document(index, "a", None, 0, index, prompt, None, False, 24, "greedy", True, None)
        for index, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def written_alone(network: Any, document: Document) -> list[int]:
    """The greedy text of a network that reads everything again for each token, without a cache."""
    ids = document.prompt.tolist()
    for _ in range(document.max_new_tokens or 0):
        ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(document.prompt) :]


def head_on(model: Model, folder: Path) -> Any:
    """An EAGLE-3 head that nobody trained, on the states after 1, 2 and 3 layers."""
    described = eagle.config(**{eagle.IDS: [1, 2, 3]})
    return eagle.loaded(eagle.written(folder, described, eagle.tensors(described)), model)


def _skip_where_the_network_itself_fails(name: str) -> None:
    if name == "Llama-4" and RELEASE == (5, 24):
        pytest.skip("transformers 5.24 asks the decoder's output of Llama 4 for those of images")


def test_text_is_written_and_scored_as_by_the_network_itself(served: tuple[str, Any, Model]) -> None:
    _skip_where_the_network_itself_fails(served[0])
    name, network, model = served
    assert type(model.network).__name__ == ARCHITECTURES[name].loaded
    assert TeacherForced(model).chunked
    written = generate(model, documents(), VOCABULARY)
    assert [text.ids.tolist() for text in written] == [written_alone(network, text.document) for text in written]
    scored = Scorer(model, [PromptLookup("lookup", 3, (), VOCABULARY, "float32")], VOCABULARY).score(written)["lookup"]
    expected = []
    for text in written:
        ids = np.concatenate([text.document.prompt, text.ids[:-1]]).astype(np.int64)
        with torch.inference_mode():
            logits = network(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[
                0, len(text.document.prompt) - 1 :
            ]
        expected.append(logits.double().softmax(-1).numpy()[np.arange(len(text.ids)), text.ids])
    assert np.allclose(scored["target_token_prob"], np.concatenate(expected), atol=2e-6)


def test_heads_read_the_hidden_states_that_the_network_puts_out(
    served: tuple[str, Any, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skip_where_the_network_itself_fails(served[0])
    _, network, model = served
    head, seen = head_on(model, tmp_path), []
    states = head.network.states

    def spy(ids: torch.Tensor, features: torch.Tensor, *given: Any) -> Any:
        seen.append((ids, features))
        return states(ids, features, *given)

    monkeypatch.setattr(head.network, "states", spy)
    texts = [Continuation(document, document.prompt[:5], "length") for document in documents()]
    columns = Scorer(model, [head], VOCABULARY).score(texts)["head"]
    (ids, features) = seen[-1]
    with torch.inference_mode():
        every = network(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert torch.allclose(features, torch.cat(every[1:4], -1), atol=1e-5)
    assert np.isfinite(columns["draft_entropy"]).all()


def test_steps_are_taken_back(served: tuple[str, Any, Model]) -> None:
    name, _, model = served
    if name == "Nemotron-H" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__} cannot crop the caches of layers without any")
    seen = list[torch.Tensor]()
    with torch.inference_mode():
        stepper = Stepper(model, np.arange(40, dtype=np.int32) % VOCABULARY)
        for tokens in (1, 5, 1, 9, 1):
            seen.append(stepper.logits(tokens)[0, 0].clone())
            stepper.take_back(tokens)
    # By sort: steps over one token bound the time of a state-space layer otherwise than longer ones (Nemotron-H, 5e-4).
    for alike in (seen[::2], seen[1::2]):
        assert all(torch.allclose(logits, alike[0], atol=1e-5) for logits in alike)


def test_decoding_with_a_draft_writes_the_same_text(served: tuple[str, Any, Model], tmp_path: Path) -> None:
    name, _, model = served
    (strict,) = rules_of(["strict"])
    plain = generate(model, documents(), VOCABULARY)
    itself = DraftModel("itself", model.network, "model", "itself")
    drafts: list[Draft] = [PromptLookup("lookup", 3, (), VOCABULARY, "float32"), itself, head_on(model, tmp_path)]
    for draft in drafts:
        ways = [(text, Speculation(model, draft, strict, 3)) for text in plain]
        if ARCHITECTURES[name].decoded == ROLLED:
            with pytest.raises(ModelUnloadable, match="cannot remove tokens from its cache") as refused:
                ways[0][1].decode(plain[0].document.prompt, 24)
            assert "recurrent states cannot be rolled back" in refused.value.hint
            continue
        decoded = [(text, way.decode(text.document.prompt, 24)) for text, way in ways]
        assert [text.ids.tolist() for text, _ in decoded] == [found.ids.tolist() for _, found in decoded]
        drafted, accepted = (
            sum(int(getattr(found, part).sum()) for _, found in decoded) for part in ("drafted", "accepted")
        )
        assert drafted
        assert (accepted == drafted) == (draft is itself)


def test_the_docs_say_the_same() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == [(name, item.loaded, item.decoded) for name, item in ARCHITECTURES.items()]


def saved(network: Any, folder: Path, without: str = "") -> TargetOptions:
    """Options for a network's files, less the weights whose names contain `without`."""
    network.save_pretrained(folder)
    if without:
        weights = load_file(folder / "model.safetensors")
        kept = {name: weight for name, weight in weights.items() if without not in name}
        assert len(kept) < len(weights)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return TargetOptions(model=str(folder), device="cpu")


@each(
    ("name", "of_images"),
    [("Gemma-3", "vision"), ("Mistral-3", "vision"), ("Mistral-3", "projector"), ("Qwen3-VL", "visual")],
)
def test_weights_for_images_may_be_missing_and_do_not_count(name: str, of_images: str, tmp_path: Path) -> None:
    network = whole(name)
    model = load_model("target", saved(network, tmp_path, of_images), "float32")
    ids = torch.arange(12)[None] % VOCABULARY
    assert torch.equal(model.network(input_ids=ids).logits, network(input_ids=ids).logits)
    text = {id(weight): weight.numel() for part in (model.decoder, network.lm_head) for weight in part.parameters()}
    tied = model.network.get_output_embeddings().weight is model.network.get_input_embeddings().weight
    assert model.parameters == sum(text.values()) - tied * network.lm_head.weight.numel()
    assert stored_bytes(model.network) == 4 * model.parameters
    torch.manual_seed(1)
    assert load_model("target", TargetOptions(model=str(tmp_path), device="cpu"), "float32").digest == model.digest


@each("name", ["Gemma-3", "Mistral-3", "Qwen3-VL"])
def test_a_text_is_never_written_by_weights_that_are_missing(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelUnloadable, match=r"lacks weights of its architecture: .*language_model\.layers\.2\.mlp\.up_proj"
    ):
        load_model("target", saved(whole(name), tmp_path, "layers.2.mlp.up_proj"), "float32")


@each(("name", "alone"), [("Mistral-3", "Mistral"), ("Qwen3-VL", "Qwen3")])
def test_the_shape_of_a_text_model_beside_images_is_that_of_the_text_model_alone(
    name: str, alone: str, tmp_path: Path
) -> None:
    model = load_model("target", saved(whole(name), tmp_path), "float32")
    tied = model.network.get_output_embeddings().weight is model.network.get_input_embeddings().weight
    config = getattr(transformers, f"{alone}Config")(**HEADS | {"tie_word_embeddings": tied})
    assert model.facts().shape == shape_of(getattr(transformers, f"{alone}ForCausalLM")(config))
    assert model.facts().shape is not None


def test_a_network_that_does_not_write_from_left_to_right_is_refused(tmp_path: Path) -> None:
    eye = {
        "hidden_size": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_embed_hidden_size": 16,
    }
    words = {"vocab_size": VOCABULARY, "hidden_size": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.Pix2StructConfig(text_config=words, vision_config=eye)
    options = saved(transformers.Pix2StructForConditionalGeneration(config), tmp_path)
    with pytest.raises(ModelUnloadable, match="is no causal language model: Pix2StructForConditionalGeneration"):
        load_model("target", options, "float32")


def test_attention_is_computed_as_the_profile_says(tmp_path: Path) -> None:
    options, ids = saved(whole("Llama"), tmp_path), torch.arange(12)[None] % VOCABULARY
    models = {
        way: load_model("target", options.model_copy(update={"attn_implementation": way}), "float32")
        for way in (None, "sdpa", "eager")
    }
    assert {way: model.attn_implementation for way, model in models.items()} == {
        None: "sdpa",
        "sdpa": "sdpa",
        "eager": "eager",
    }
    logits = {way: model.network(input_ids=ids).logits for way, model in models.items()}
    assert torch.equal(logits[None], logits["sdpa"])
    assert torch.allclose(logits["eager"], logits["sdpa"], atol=1e-5)


@each(("name", "way"), [("Llama", "spda"), ("gpt-oss", "sdpa"), ("Llama", "flash_attention_2")])
def test_another_attention_is_refused_before_weights_are_read(name: str, way: str, tmp_path: Path) -> None:
    options = saved(whole(name), tmp_path).model_copy(update={"attn_implementation": way})
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelUnloadable, match=r"(?i)attention") as refused:
        load_model("target", options, "float32")
    assert (
        refused.value.hint == f"set attn_implementation to what this model and this machine have, not {way}, or leave it out"
    )


def test_logits_of_a_network_that_is_run_whole_are_those_of_chosen_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hidden states alone do not give them; of a whole text they could fill the memory."""
    network, made = whole("Llama"), []
    monkeypatch.setattr(teacher_forced, "_reproduces", lambda *_: False)
    head = TeacherForced(DraftModel("target", network, "model", "t"))
    network.lm_head.register_forward_hook(lambda _, rows, __: made.append(rows[0].shape[-2]))
    ids, row, column = torch.randint(0, VOCABULARY, (2, 40)), torch.tensor([0, 0, 1]), torch.tensor([3, 39, 20])
    found = head.rows(ids, row, column)
    assert made == [2, 1]
    assert torch.allclose(found, network(input_ids=ids).logits[row, column], atol=1e-5)
