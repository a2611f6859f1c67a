"""Quantised models: loaded where transformers loads them, with what ran named; else refused in two lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.config.load import changed_question
from alphaprof.config.options import ModelOptions, TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.files import files_of
from alphaprof.profiling.models.kinds import layer_skip
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.profiling.models.quantised import stored_bytes
from alphaprof.report.asked import Asked
from alphaprof.run.manifest import Quantisation
from alphaprof.run.reader import Run
from tests.tiny import edited, llama, tokenizer

pytestmark = pytest.mark.models
BLOCK, PROJECTIONS = 16, 4 * 7
IDS = torch.tensor([[5, 1, 4, 1, 3, 2]])


class RowsOf8Bits(nn.Module):
    """A linear layer with weights in int8 and a scale for each row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(outputs, 1))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ (self.weight * self.scale).T


@register_quantization_config("rows8")
class Rows8Config(QuantizationConfigMixin):
    def __init__(self, bits: int = 8, needs: str | None = None, **_: Any) -> None:
        self.quant_method, self.bits, self.needs = "rows8", bits, needs


@register_quantizer("rows8")
class Rows8Quantizer(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def validate_environment(self, **_: Any) -> None:
        if self.quantization_config.needs:
            raise ImportError(f"rows8 needs {self.quantization_config.needs}")

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                with torch.device("meta"):
                    model.set_submodule(name, RowsOf8Bits(module.in_features, module.out_features))


def saved(
    folder: Path, quantisation: object, pack: Any = lambda name, weight: {name: weight}
) -> tuple[Path, dict[str, Any]]:
    """A tiny Llama whose projections are packed, and the weights that they stand for."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    edited(folder / "config.json", quantization_config=quantisation)
    weights, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if "_proj" in name]:
        packed = pack(name, weights.pop(name))
        weights |= packed
        first, *scale = packed.values()
        repeats = [a // b for a, b in zip(first.shape, scale[0].shape, strict=True)] if scale else [1, 1]
        repeated = torch.kron(scale[0] if scale else torch.ones(1, 1), torch.ones(repeats))
        meant[name] = first.float() * repeated
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, weights | meant


def fp8(folder: Path) -> tuple[Path, dict[str, Any]]:
    """In blocks, as DeepSeek-V3 and Qwen3 are published."""

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        return {name: packed, f"{name}_scale_inv": scale}

    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return saved(folder, how, pack)


def rows8(folder: Path, **more: Any) -> tuple[Path, dict[str, Any]]:
    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {name: (weight / scale).round().to(torch.int8), name.replace("weight", "scale"): scale}

    return saved(folder, {"quant_method": "rows8", "bits": 8, **more}, pack)


def load(folder: Path, dtype: str = "float32") -> Model:
    return load_model("target", TargetOptions(model=str(folder), dtype=dtype, device="cpu"), dtype)


def logits(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        return network(IDS).logits


def plain(weights: dict[str, Any]) -> Any:
    network = llama()
    network.load_state_dict({name: weight for name, weight in weights.items() if "scale" not in name})
    return network


def test_layers_that_compute_with_quantised_weights_are_counted_by_class(tmp_path: Path) -> None:
    folder, weights = rows8(tmp_path)
    model = load(folder)
    assert torch.allclose(logits(model.network), logits(plain(weights)), atol=1e-4)
    facts, like = model.facts(), plain(weights)
    assert facts.quantised == Quantisation("rows8", 8, {"RowsOf8Bits": PROJECTIONS})
    assert facts.precision == "float32, weights rows8 8-bit (28 RowsOf8Bits)"
    assert not facts.is_exact
    assert (facts.dtype, facts.noise) == ("float32", 2e-4)
    assert facts.parameters == sum(weight.numel() for weight in like.parameters())
    in_8_bits = [weight for name, weight in like.named_parameters() if "_proj" in name]
    scales = sum(weight.shape[0] for weight in in_8_bits)
    stored = 4 * facts.parameters - 3 * sum(weight.numel() for weight in in_8_bits) + 4 * scales
    assert facts.shape is not None
    assert facts.shape["weight_bytes"] == pytest.approx(stored / facts.parameters)
    assert facts.shape["kv_bytes"] == 4
    skipping = layer_skip("skip", model, [1, 2])
    assert skipping.facts().precision == "float32, weights rows8 8-bit (14 RowsOf8Bits)"


def test_where_no_kernel_runs_the_weights_are_those_that_the_file_stands_for(tmp_path: Path) -> None:
    folder, weights = fp8(tmp_path)
    model = load(folder)
    assert torch.equal(logits(model.network), logits(plain(weights)))
    facts = model.facts()
    assert facts.quantised == Quantisation("fp8", None, {})
    assert facts.precision == "float32, weights fp8 (dequantized, no kernel ran)"
    assert facts.is_exact
    assert facts.shape is not None
    assert facts.shape["weight_bytes"] == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dequantised_model_has_one_dtype(dtype: str, tmp_path: Path) -> None:
    """transformers leaves what was not quantised in the dtype of the file, and a pass over both fails."""
    folder, weights = fp8(tmp_path)
    model = load(folder, dtype)
    assert {weight.dtype for weight in model.network.parameters()} == {getattr(torch, dtype)}
    assert torch.allclose(logits(model.network).float(), logits(plain(weights)), atol=0.3)
    assert model.facts().dtype == dtype
    assert not model.facts().is_exact


def test_bytes_of_wrapped_weights_are_those_of_what_they_wrap() -> None:
    """A weight with several names is counted once."""
    network = llama(tie_word_embeddings=True)
    before, weight = stored_bytes(network), network.model.layers[0].mlp.up_proj.weight
    network.model.layers[0].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight.detach(), weight.detach().clone()))
    assert stored_bytes(network) == before + weight.nbytes
    assert before == sum(each.nbytes for each in network.parameters())


REFUSED: list[tuple[Any, str, str]] = [
    ({"quant_method": "rows8", "needs": "a package"}, "rows8 needs a package", "quantized: install what transform"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "in its config: 'modelopt'", "give the unquantized checkpoint"),
    ({"bits": 4, "group_size": 64}, "in its config: {'bits': 4", "give the unquantized checkpoint"),  # as MLX writes it
]


@pytest.mark.parametrize(("how", "problem", "hint"), REFUSED)
def test_what_transformers_cannot_load_is_refused(how: Any, problem: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnloadable) as caught:
        load(saved(tmp_path, how)[0])
    assert problem in caught.value.message
    assert hint in caught.value.hint


def test_a_quantization_in_the_file_of_modelopt_is_that_of_the_model(tmp_path: Path) -> None:
    """Unless config.json declares one itself, or the file is about the KV cache alone."""
    folder = saved(tmp_path, None)[0]
    beside = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    assert load(folder).quantised is None
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside | {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelUnloadable, match="does not support the quantization in its config: 'modelopt'"):
        load(folder)
    with pytest.raises(ModelUnloadable, match="quantized heads cannot be measured"):
        files_of("head", ModelOptions(model=str(folder)))
    (tmp_path / "own").mkdir()
    own = rows8(tmp_path / "own")[0]
    (own / "hf_quant_config.json").write_text((folder / "hf_quant_config.json").read_text())
    assert load(own).facts().quantised == Quantisation("rows8", 8, {"RowsOf8Bits": PROJECTIONS})


def test_a_run_names_the_kernels_wherever_it_names_the_dtype(tmp_path: Path) -> None:
    target, draft, run = rows8(tmp_path / "target")[0], fp8(tmp_path / "draft")[0], tmp_path / "run"
    (tmp_path / "data.jsonl").write_text('{"text": "aloud"}\n{"text": "be it"}\n')
    tree = {
        "target": {"model": str(target), "dtype": "float32"},
        "drafts": {"small": {"kind": "model", "model": str(draft)}},
        "data": [{"domain": "all", "path": "data.jsonl", "prompt": "{text}"}],
        "continuation": {"kind": "greedy", "max_new_tokens": 12},
        "gammas": [1, 2],
        "costs": {"source": "none"},
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    answer = CliRunner().invoke(app, ["profile", str(tmp_path / "profile.yaml"), "--out", str(run)])
    assert answer.exit_code == 0, answer.output
    manifest = Run.open(run).manifest
    assert manifest.target.quantised == Quantisation("rows8", 8, {"RowsOf8Bits": PROJECTIONS})
    assert manifest.drafts["small"].quantised == Quantisation("fp8", None, {})
    named = "float32, weights rows8 8-bit (28 RowsOf8Bits)"
    found = json.loads(CliRunner().invoke(app, ["report", str(run), "--format", "json"]).stdout)["run"]
    assert found["dtype"] == named
    assert (found["target_model"]["dtype"], found["target_model"]["quantised"]["method"]) == ("float32", "rows8")
    for served, stands_in in (("rows8", False), ("float32", True), ("fp8", True)):
        config = changed_question(manifest.config, [f"decision.served_dtype={served}"])
        assert (
            bool(Asked.of(Run.open(run), dataclasses.replace(manifest, config=config).profile).question.stand_in)
            == stands_in
        )
