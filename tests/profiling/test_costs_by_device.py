"""`costs.source: auto`: measured on a CPU, a roofline of the device on a GPU. GPUs are pretended: models stay on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaprof.config.engines import VLLM
from alphaprof.config.hardware import ACCELERATORS, DEVICES
from alphaprof.config.load import load_profile
from alphaprof.config.options import MeasuredCosts, RooflineCosts
from alphaprof.errors import CostsUnreadable, OptionInvalid, ProfileInvalid, RunMismatch
from alphaprof.profiling.checks import as_measured
from alphaprof.profiling.profile import with_costs
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from tests.loops import each
from tests.reporting import as_terminal, codes
from tests.runs import profile_file, run_profile
from tests.synthetic import altered

pytestmark = pytest.mark.models


def pretend(monkeypatch: pytest.MonkeyPatch, name: str | None, count: int = 1) -> None:
    """The target's device is a GPU of this name; None: a CPU."""
    device = torch.device("cpu" if name is None else "cuda")
    monkeypatch.setattr("alphaprof.profiling.profile.target_device", lambda options: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture
def profile(tiny: Path, tmp_path: Path) -> Path:
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    return profile_file(tmp_path, tiny, drafts=drafts, gammas=[1, 2], costs={"concurrency": [1, 4]})


def test_every_accelerator_has_a_device_whose_name_means_it() -> None:
    assert {*DEVICES.values()} == {*ACCELERATORS}


def test_a_gpu_has_a_roofline_which_the_run_keeps_and_says_why(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.profiling.timing.latency.measure", pytest.fail)
    pretend(monkeypatch, "NVIDIA H200")
    run = run_profile(profile, tmp_path / "run", False, "data.long.limit=2", "data.short.limit=2")
    stored = run.manifest.profile.costs
    assert stored == RooflineCosts(source="roofline", accelerator="h200", preset="sglang-h200", concurrency=[1, 4])
    report = build_report(Run.open(run.path))
    assert (report.times.source, report.times.device, report.times.concurrencies) == ("roofline", "h200", (1, 4))
    (note,) = [note for note in report.notes if note.code == "not_measured"]
    assert "transformers" in note.remedy
    assert "source: vllm" in note.remedy
    pretend(monkeypatch, None)  # a CPU goes on with the run, whose times stay those of the GPU
    run_profile(profile, tmp_path / "run", True, "data.long.limit=2", "data.short.limit=2")
    assert Run.open(run.path).manifest.profile.costs == stored
    with pytest.raises(RunMismatch, match="costs changed"):
        run_profile(profile, tmp_path / "run", True, "data.long.limit=2", "data.short.limit=2", "costs.concurrency=[1]")


def test_the_screen_says_why_and_what_measures(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3", 8)
    options, said = load_profile(profile), list[str]()
    found = with_costs(options, said.append).costs
    assert isinstance(found, RooflineCosts)
    assert (found.accelerator, found.preset) == ("h100-sxm", "vllm-0.11")  # that of an H200 is another's
    target = options.target.model_copy(update={"device_map": "auto"})
    spread = with_costs(options.model_copy(update={"target": target}), said.append)
    assert spread.costs.tp == 8
    assert [line.split(" (costs")[0] for line in said] == [
        "step times are computed for h100-sxm",
        "step times are computed for 8 x h100-sxm",
    ]
    assert all("launches every kernel by itself" in line and "{source: vllm} measures" in line for line in said)
    assert with_costs(spread, said.append) is spread
    assert len(said) == 2


def test_a_gpu_whose_figures_are_not_known_is_refused_with_what_to_write(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "NVIDIA H100 NVL")
    monkeypatch.setattr("alphaprof.profiling.profile.load", pytest.fail)
    with pytest.raises(ProfileInvalid, match="figures of NVIDIA H100 NVL are not known") as caught:
        run_profile(profile, tmp_path / "run")
    assert all(words in caught.value.hint for words in ("{source: vllm}", "accelerator: NAME", "h100-sxm", "{source: none}"))
    assert not (tmp_path / "run").exists()


def test_a_preset_of_ones_own_lies_beside_the_profile_and_is_read_before_weights(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ("costs={source: roofline, accelerator: l4, preset: mine.json}", "data.long.limit=2", "data.short.limit=2")
    preset = profile.parent / "mine.json"
    with monkeypatch.context() as patch:
        patch.setattr("alphaprof.profiling.profile.load", pytest.fail)
        with pytest.raises(OptionInvalid, match=r"mine\.json is no preset"):
            run_profile(profile, tmp_path / "run", False, *named)
    preset.write_text('{"like": "vllm-0.11", "step_ms": 1000.0, "accelerator": "l4"}')
    run = run_profile(profile, tmp_path / "run", False, *named)
    assert isinstance(run.manifest.profile.costs, RooflineCosts)
    assert json.loads(run.manifest.profile.costs.preset) == json.loads(preset.read_text())
    assert build_report(Run.open(run.path)).times.target_ms[1] > 1000


@each("source", ["measured", "none"])
def test_a_source_that_is_named_stays_on_a_gpu(source: str, profile: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, "NVIDIA H200")
        options = load_profile(profile, [f"costs.source={source}"])
        assert with_costs(options, pytest.fail) is options


def test_a_cpu_measures_with_the_options_that_stand_there(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    found = with_costs(load_profile(profile, ["costs.budget=5"]), pytest.fail).costs
    assert found == MeasuredCosts(source="measured", concurrency=[1, 4], budget=5)
    assert load_profile(profile, ["costs.source=measured"]).costs == found.model_copy(update={"budget": None})


def test_workers_and_parts_take_what_the_run_has(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA L40S")
    run = run_profile(profile, tmp_path / "run", False, "data.long.limit=1", "data.short.limit=1")
    pretend(monkeypatch, "NVIDIA A10")
    assert as_measured(load_profile(profile), run.manifest).costs == run.manifest.profile.costs
    named = load_profile(profile, ["costs.source=none"])
    assert as_measured(named, run.manifest).costs == named.costs


def test_eager_times_of_a_gpu_are_marked(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of transformers, target and drafts alike."""
    run = run_profile(profile, tmp_path / "run", False, "costs.source=measured", "costs.repeats=3", "costs.budget=5")
    assert "eager" not in codes(build_report(run))
    report = build_report(altered(run, target=dataclasses.replace(run.manifest.target, device="NVIDIA H200")))
    (note,) = [note for note in report.notes if note.code == "eager"]
    assert "launches every kernel by itself" in note.message
    assert "on NVIDIA H200, eager" in " ".join(as_terminal(report, 100, "times").split())


def unknown(folder: Path) -> Path:
    """The description of a model of an architecture whose shape is not known, without weights."""
    folder.mkdir()
    described = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


ROOFLINE: dict[str, Any] = {"source": "roofline", "accelerator": "h200"}


@each("part", ["target", "draft"])
def test_a_shape_that_is_not_known_is_found_before_weights_are_loaded(part: str, tiny: Path, tmp_path: Path) -> None:
    folder = unknown(tmp_path / part)
    drafts = {"close": {"kind": "model", "model": str(folder if part == "draft" else tiny / "draft")}}
    path = profile_file(tmp_path, tiny, drafts=drafts, costs=ROOFLINE)
    overrides = [f"target.model={folder}"] if part == "target" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alphaprof.profiling.profile.load", pytest.fail)
        with pytest.raises(CostsUnreadable) as caught:
            run_profile(path, tmp_path / "run", False, *overrides)
    assert caught.value.message == (
        f"a roofline needs the shape of {'target' if part == 'target' else 'close'}, but MambaForCausalLM has no known shape"
    )
    assert all(words in caught.value.hint for words in ("source: table", "source: vllm", "source: none"))


def test_options_say_of_vllm_what_loaded_drafts_do(greedy_run: Run) -> None:
    manifest = greedy_run.manifest
    methods = {name: facts.method_in(VLLM) is not None for name, facts in manifest.drafts.items()}
    assert {name: draft.kind in VLLM.methods for name, draft in manifest.profile.drafts.items()} == methods
    assert {*methods.values()} == {True, False}
