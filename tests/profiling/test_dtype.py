"""`dtype: auto`: what is chosen for which checkpoint on which device, and that a run keeps to what was chosen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaprof.config.options import ModelOptions
from alphaprof.errors import RunMismatch
from alphaprof.profiling.models import dtype
from tests.loops import each
from tests.runs import interrupted, profile_file, run_profile

pytestmark = pytest.mark.models
CPU = torch.device("cpu")


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The speed of this CPU in 16-bit dtypes over that in float32, which a test may change."""
    ratios = {"bfloat16": 2.0, "float16": 0.2}
    monkeypatch.setattr(dtype, "cpu_ratio", ratios.__getitem__)
    return ratios


def checkpoint(folder: Path, tiny: Path, weights: torch.dtype, **config: Any) -> Path:
    """The tiny target with its weights in a dtype, and a config that says what is given."""
    shutil.copytree(tiny / "target", folder)
    tensors = {name: tensor.to(weights) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in kept.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(kept | config))
    return folder


def chosen(model: Path, device: torch.device = CPU) -> tuple[str, str | None]:
    choice = dtype.choose_dtype(ModelOptions(model=str(model)), device)
    assert choice.reason.startswith(f"{choice.chosen}: ")
    return choice.chosen, choice.stored


@each(
    ("stored", "ratio", "expected"),
    [
        ("float32", 5.0, "float32"),
        ("bfloat16", 1.2, "bfloat16"),
        ("bfloat16", 1.19, "float32"),
        ("float16", 2.0, "float16"),
        ("float64", 5.0, "float32"),
    ],
)
def test_a_checkpoint_keeps_its_dtype_where_the_cpu_is_clearly_faster_in_it(
    stored: str, ratio: float, expected: str, tiny: Path, tmp_path: Path, speed: dict[str, float]
) -> None:
    speed |= dict.fromkeys(speed, ratio)
    declared = checkpoint(tmp_path / f"{stored}-{ratio}", tiny, torch.float32, dtype=stored)
    by_weights = checkpoint(tmp_path / f"weights-{stored}-{ratio}", tiny, getattr(torch, stored))
    assert chosen(declared) == chosen(by_weights) == (expected, stored)


def test_a_sharded_checkpoint_is_asked_by_its_index(tiny: Path, tmp_path: Path, speed: dict[str, float]) -> None:
    folder = checkpoint(tmp_path / "model", tiny, torch.bfloat16)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(folder / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert chosen(folder) == ("bfloat16", "bfloat16")


def test_files_that_do_not_say_their_dtype_are_measured_in_float32(tiny: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tiny, torch.bfloat16)
    (folder / "model.safetensors").unlink()
    assert chosen(folder) == ("float32", None)


def test_weights_of_a_gguf_file_are_unpacked_to_bfloat16_where_that_is_fast(speed: dict[str, float]) -> None:
    assert chosen(Path("model.gguf")) == chosen(Path("/models/Model.GGUF")) == ("bfloat16", "bfloat16")
    speed["bfloat16"] = 0.2
    assert chosen(Path("model.gguf")) == ("float32", "bfloat16")


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_keeps_bfloat16_where_it_has_it_without_emulation(
    native: bool, expected: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    gpu = torch.device("cuda")
    assert chosen(checkpoint(tmp_path / "b", tiny, torch.bfloat16), gpu)[0] == expected
    assert chosen(checkpoint(tmp_path / "h", tiny, torch.float16), gpu)[0] == "float16"


def auto(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A profile of the tiny target in bfloat16 that leaves the dtype open."""
    folder.mkdir()
    model = checkpoint(folder / "model", tiny, torch.bfloat16, dtype="bfloat16")
    drafts = {"skip": {"kind": "layer_skip", "drop_layers": [2]}, "close": {"kind": "model", "model": str(tiny / "draft")}}
    return profile_file(folder, tiny, target={"model": str(model)}, drafts=drafts, costs={"source": "none"}, **changes)


def test_what_was_chosen_stands_in_the_manifest_and_a_departure_from_the_checkpoint_is_a_warning(
    tiny: Path, tmp_path: Path, speed: dict[str, float]
) -> None:
    speed["bfloat16"] = 0.3
    manifest = run_profile(auto(tmp_path / "place", tiny), tmp_path / "run").manifest
    assert manifest.config["target"]["dtype"] == manifest.target.dtype == "float32"
    assert {facts.dtype for facts in manifest.drafts.values()} == {"float32"}
    told = [warning["message"] for warning in manifest.warnings if warning["code"] == "other_dtype"]
    reason = (
        "the target is measured in float32: the checkpoint is in bfloat16, in which this CPU is not clearly "
        "faster (0.30 times the speed of float32)"
    )
    assert told == [reason]


def test_an_interrupted_run_goes_on_in_the_dtype_that_it_began_in(
    tiny: Path, tmp_path: Path, speed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that would choose another one. The same dtype may be named by then; another one is refused."""
    path, out = auto(tmp_path / "place", tiny), tmp_path / "run"
    interrupted(path, out, monkeypatch)
    speed["bfloat16"] = 0.3
    with pytest.raises(RunMismatch, match="another profile"):
        run_profile(path, out, True, "target.dtype=float32")
    run = run_profile(path, out, True)
    assert (run.manifest.status, run.manifest.target.dtype) == ("complete", "bfloat16")
    assert run_profile(path, out, True, "target.dtype=bfloat16").manifest.status == "complete"
