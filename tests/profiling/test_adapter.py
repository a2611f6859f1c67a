"""LoRA adapters in the weights of a target: against their product by hand, and what is refused before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaprof.config.load import load_profile
from alphaprof.config.options import TargetOptions
from alphaprof.errors import EngineFailed, ModelUnloadable
from alphaprof.profiling.engine.client import check_engine
from alphaprof.profiling.models.hashes import weight_files
from alphaprof.profiling.models.hub import require_model
from alphaprof.profiling.models.load import load_model
from tests.runs import profile_file

# peft asks models of transformers for a property that has a new name.
WARNS = "ignore:.is_gradient_checkpointing"
RANK, ALPHA, MODULES = 4, 6, ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of rank 4 for the tiny target, in the files that peft writes."""
    folder, tensors = tmp_path_factory.mktemp("adapter"), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(tiny / "target" / "model.safetensors").items():
        if any(module in name for module in MODULES):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*MODULES]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "base", "bias": "none"}))
    return folder


def options(tiny: Path, adapter: Path | None) -> TargetOptions:
    return TargetOptions(model=str(tiny / "target"), adapter=None if adapter is None else str(adapter))


@pytest.mark.models
@pytest.mark.filterwarnings(WARNS)
def test_an_adapter_is_added_to_the_weights_and_its_files_tell_it_from_its_base(tiny: Path, adapter: Path) -> None:
    """W + alpha / r B A, by hand."""
    pytest.importorskip("peft")
    base, tuned = (load_model("target", options(tiny, each), "float32") for each in (None, adapter))
    weights, changed = load_file(adapter / "adapter_model.safetensors"), 0
    merged = dict(tuned.network.state_dict())
    for name, weight in base.network.state_dict().items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{stem}.lora_A.weight" in weights:
            expected = weight + ALPHA / RANK * weights[f"{stem}.lora_B.weight"] @ weights[f"{stem}.lora_A.weight"]
            changed += 1
        torch.testing.assert_close(merged[name], expected)
    assert (changed, merged.keys()) == (3 * 4, base.network.state_dict().keys())
    assert type(tuned.network) is type(base.network)
    assert tuned.facts().reference == f"{tiny / 'target'} + {adapter}"
    assert tuned.parameters == base.parameters
    assert tuned.digest.startswith("files-")
    assert tuned.digest != base.digest
    assert tuned.digest == load_model("target", options(tiny, adapter), "float32").digest


def test_the_files_of_an_adapter_are_those_of_both(tiny: Path, adapter: Path) -> None:
    own = ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.name for path in weight_files(options(tiny, adapter))] == ["model.safetensors", *own]
    gguf = TargetOptions(model="/models/x.gguf", adapter=str(adapter))
    assert [path.name for path in weight_files(gguf)] == ["x.gguf", *own]


@pytest.mark.models
@pytest.mark.filterwarnings(WARNS)
def test_an_adapter_of_another_model_is_refused(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    """peft warns of weights that it did not find, and would merge nothing in their place."""
    pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    weights = load_file(adapter / "adapter_model.safetensors")
    cases = {"missing adapter keys": lambda name: name.replace("layers.0", "layers.50"), "cannot load": str}
    for reason, renamed in cases.items():
        tensors = {renamed(name): value for name, value in weights.items()}
        if renamed is str:
            tensors = {name: torch.cat([value, value], 0 if "lora_B" in name else 1) for name, value in tensors.items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelUnloadable, match=reason) as caught:
            load_model("target", options(tiny, tmp_path), "float32")
        assert caught.value.hint.startswith(f"is it an adapter of {tiny / 'target'}?")


def test_an_adapter_of_a_quantized_model_is_refused_before_weights_are_loaded(
    tiny: Path, adapter: Path, tmp_path: Path
) -> None:
    """The folder has no weights that could be loaded."""
    config = json.loads((tiny / "target" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnloadable, match="cannot be merged into the quantized weights"):
        load_model("target", TargetOptions(model=str(tmp_path), adapter=str(adapter)), "float32")


def test_what_cannot_be_merged_is_refused_early(
    tiny: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelUnloadable, match=r"adapter of target: .*nothing does not exist"):
        require_model(options(tiny, tmp_path / "nothing"), "target")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_text("")
    with pytest.raises(ModelUnloadable, match=r"lacks .* or adapter_model.safetensors") as caught:
        require_model(options(tiny, tmp_path), "target")
    assert "pickles are never read" in caught.value.hint
    monkeypatch.setattr("alphaprof.profiling.models.hub.find_spec", lambda _: None)
    with pytest.raises(ModelUnloadable, match="the adapter of target needs peft") as caught:
        require_model(options(tiny, adapter), "target")
    assert caught.value.hint.startswith("pip install")


def test_vllm_is_not_started_without_the_adapter_or_from_a_gguf_file(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    for target, words in (
        ({"model": str(tiny / "target"), "adapter": str(adapter)}, "without their adapters"),
        ({"model": "./model.gguf"}, "cannot load the target from a GGUF file"),
    ):
        profile = load_profile(profile_file(tmp_path, tiny, vllm={"python": "python"}, target=target))
        assert profile.vllm is not None
        with pytest.raises(EngineFailed, match=words):
            check_engine(profile, profile.vllm, writes=True)


def test_paths_of_adapters_start_at_the_profile(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "tuned").symlink_to(adapter)
    drafts = {"base": {"kind": "model", "model": str(tiny / "draft"), "adapter": "./tuned"}}
    profile = load_profile(
        profile_file(tmp_path, tiny, drafts=drafts, target={"model": str(tiny / "target"), "adapter": "./tuned"})
    )
    own = profile.drafts["base"].own_model
    assert own is not None
    assert [profile.target.adapter, own.adapter] == [str(tmp_path / "tuned")] * 2


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"])
def test_an_adapter_that_adds_tokens_is_named_before_weights_are_loaded(
    tiny: Path, adapter: Path, tmp_path: Path, kind: str
) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes((adapter / name).read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "num_virtual_tokens": 4}))
    with pytest.raises(ModelUnloadable, match="cannot be merged into weights") as caught:
        require_model(options(tiny, tmp_path), "target")
    assert kind.lower().replace("_", " ") in caught.value.message
