"""Computed costs of a round against published throughputs, and what an engine's overheads do to them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.config.hardware import ACCELERATORS, PRESETS, preset_of
from alphaprof.config.load import load_profile
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import accuracy, roofline_rows
from alphaprof.costs.rounds import full_round_costs
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepTable
from alphaprof.errors import OptionInvalid

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "gpu"
SGLANG = RooflineCosts(source="roofline", accelerator="h200", preset="sglang-h200")


def backtest(*options: str | Path, rows: Path = GOLDEN / "specbundle_calibration.csv") -> Any:
    """What the script prints as JSON of some rows."""
    script = ROOT / "scripts" / "research" / "gpu_backtest.py"
    command = [sys.executable, script, rows, "--configs", GOLDEN / "configs", "--format", "json", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def shapes(name: str) -> tuple[ModelShape, ModelShape]:
    """A target and its head."""
    read = (json.loads((GOLDEN / "configs" / f"{kind}{name}.json").read_text()) for kind in ("", "head-"))
    target = ModelShape.from_config(next(read))
    return target, ModelShape.of_head(next(read), target)


def test_published_speedups_of_the_calibration_are_met_and_the_fit_finds_the_preset() -> None:
    found = backtest("--fit")
    preset = PRESETS["sglang-h200"]
    own = {
        "layer_us": preset.layer_us,
        "expert_layer_us": preset.expert_layer_us,
        "round_ms": preset.round_ms,
        "draft_ms": preset.draft_ms,
    }
    assert found["fitted"] == pytest.approx(own, rel=0.1)  # fitted to 63 cells with other weights
    (whole, *_) = backtest()["errors"]
    assert whole["rows"] == 63
    assert whole["median"] <= 5
    assert whole["worst"] <= 10
    (bare, *_) = backtest("--engine", "none")["errors"]
    assert bare["worst"] > 2 * whole["worst"]


def test_the_size_of_a_head_is_that_of_its_matrices() -> None:
    _, head = shapes("llama-3.1-8b")
    attention = 8192 * 4096 + 2 * 8192 * 1024 + 4096 * 4096
    entering, logits = 3 * 4096 * 4096, 32_000 * 4096
    assert head.parameters == attention + 3 * 4096 * 14_336 + entering + logits
    assert (head.first_parameters, head.last_parameters, head.layers) == (entering, logits, 1)


def test_measured_rounds_are_met_and_regimes_stand_apart() -> None:
    """Two of three sources of docs/costs.md; the third is not in the tree."""
    found = backtest(rows=GOLDEN / "gpu_cells.csv")["errors"]
    by = {each["rows_of"]: each for each in found}
    assert (by["all"]["rows"], by["a100-80gb"]["rows"], by["h100-sxm"]["rows"]) == (51, 12, 39)
    assert {"batch 1", "batch 64", "K 1", "K 7", "0.52 bytes a weight"} < set(by)
    for name in ("all", "2.0 bytes a weight"):
        assert by[name]["median"] <= 4
        assert by[name]["p90"] <= 12
    assert by["all"]["inside_percent"] >= 90  # of the factor that is stated
    assert by["all"]["gamma_regret_mean"] < 1
    fp8, old = (each for name, each in by.items() if name.startswith("not in all: "))
    assert (fp8["rows"], old["rows"]) == (12, 6)
    assert "measure a round" in fp8["rows_of"]
    assert "measure a round" in old["rows_of"]
    assert fp8["median"] > 20 < old["median"]  # averaged into constants they would spoil all others


def test_rows_of_a_model_whose_rounds_are_cheaper_than_a_decode_step_stand_apart(tmp_path: Path) -> None:
    """One such row tells that the model's baseline did not run as its rounds did."""
    lines = (GOLDEN / "specbundle_calibration.csv").read_text().splitlines(keepends=True)
    columns = lines[0].rstrip().split(",")
    row = lines[-1].split(",")
    row[columns.index("topk")], row[columns.index("speedup")] = "1", str(float(row[columns.index("accept_length")]) / 0.9)
    (tmp_path / "rows.csv").write_text("".join([*lines[:-1], ",".join(row)]))
    every, *_, apart = backtest(rows=tmp_path / "rows.csv")["errors"]
    assert (every["rows"], apart["rows"]) == (21, 43)
    assert apart["rows_of"].startswith("not in all: rounds published as cheaper than a decode step")


@pytest.mark.parametrize(("tau", "steps", "output", "batch"), [(1.9, 3, 64, 4), (1.5, 1, 128, 32), (3.0, 5, 40, 8)])
def test_the_slowest_of_a_group_is_that_of_simulated_groups(tau: float, steps: int, output: int, batch: int) -> None:
    slowest = runpy.run_path(str(ROOT / "scripts" / "research" / "gpu_backtest.py"))["slowest"]
    kept = next(share for share in np.linspace(0, 1, 100_001) if sum(share**i for i in range(steps + 1)) >= tau)
    draws = np.random.default_rng(3)
    drafts = draws.random((3000, batch, output, steps)) < kept
    emitted = 1 + np.cumprod(drafts, axis=3).sum(3)
    rounds = 1 + (emitted.cumsum(2) < output).sum(2)
    assert slowest(tau, steps, output, batch) == pytest.approx(rounds.max(1).mean() / rounds.mean(), rel=5e-3)


def rounds_of(preset: str, name: str, places: list[tuple[int, int]]) -> Iterator[str]:
    """Rows of rounds on an L40S, by a preset, at batch sizes and numbers of drafts."""
    target, head = shapes(name)
    setting = RooflineCosts(source="roofline", accelerator="l40s", preset=preset)
    yield "gpu,target,head,batch,context,K,base_ms,round_ms"
    for batch, steps in places:
        rows = roofline_rows(target, {"head": head}, setting, steps, [batch], [1024], [], ["head"])
        times = StepTable(rows).times("head", steps, batch, 1024)
        round_ms = full_round_costs(times, steps)[-1] * times.decode.ms
        yield f"l40s,{name}.json,head-{name}.json,{batch},1024,{steps},{times.decode.ms},{round_ms}"


def test_a_preset_of_ones_own_is_fitted_to_four_rounds_and_used(tmp_path: Path) -> None:
    """The example of the page; and four rounds of another server tell those of other K, batches and models."""
    page = (ROOT / "docs" / "research" / "predict.md").read_text()
    (example,) = re.findall(r"```csv\n(gpu,target.*?)```", page, re.DOTALL)
    measured, preset, truth = tmp_path / "rounds.csv", tmp_path / "mine.json", tmp_path / "truth.json"
    measured.write_text(example)
    assert backtest("--fit", "--out", preset, rows=measured)["errors"][0]["worst"] < 2
    engine, target = preset_of(str(preset)), shapes("llama-3.1-8b")[0]
    assert (engine.accelerator, engine.batch, engine.efficiency.overlap) == ("l40s", 16, 2.5)
    setting = RooflineCosts(source="roofline", accelerator="l40s", preset=str(preset))
    assert accuracy(setting, 16, 1024, target)[0] == engine.factor < 1.25
    assert accuracy(setting, 17, 1024, target)[0] == 1.25**2

    values = {"step_ms": 1.0, "round_ms": 3.0, "draft_ms": 0.4, "efficiency": {"compute": 0.3}}
    truth.write_text(json.dumps({"like": "vllm-0.11"} | values))
    measured.write_text("\n".join(rounds_of(str(truth), "llama-3.1-8b", [(1, 1), (1, 4), (32, 1), (32, 4)])))
    backtest("--fit", "--out", preset, rows=measured)
    others = [(batch, steps) for batch in (1, 8, 32) for steps in (2, 7)]
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        measured.write_text("\n".join(rounds_of(str(truth), name, others)))
        assert backtest("--preset", preset, rows=measured)["errors"][0]["worst"] < 3
        assert backtest(rows=measured)["errors"][0]["worst"] > 10


OTHERS = ['{"like": "none", "factor": "2"}', '{"like": "none", "step_ms": -1}', '{"like": "none", "layer_us": Infinity}']
OTHERS += ['{"like": "none", "accelerator": "x"}', '{"like": "none", "efficiency": {"memory": 0}}', '{"like": []}']


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"like": "other"}', '{"like": "none", "layer_ns": 3}', *OTHERS])
def test_a_file_that_is_no_preset_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(OptionInvalid, match=r"mine\.json is no preset"):
        preset_of(str(tmp_path / "mine.json"))
    with pytest.raises(OptionInvalid, match=r"no overheads are known for 'other'"):
        preset_of("other")


def test_a_profile_whose_preset_is_gone_is_refused_before_models_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "target: {model: m}\ndrafts: {n: {kind: prompt_lookup}}\ndata: [{domain: a, path: x.jsonl, prompt: '{p}'}]\n"
        "costs: {source: roofline, accelerator: h200, preset: gone.json}\n"
    )
    with pytest.raises(OptionInvalid, match=r"gone\.json is no preset"):
        load_profile(tmp_path / "my.yaml")


SIZES = [shapes(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b")]
SIZES.append((dataclasses.replace(SIZES[0][0], weight_bytes=0.52, head_bytes=2.0, kv_bytes=1.0), SIZES[0][1]))


def cost(models: tuple[ModelShape, ModelShape], setting: RooflineCosts, gamma: int, batch: int, context: int) -> float:
    """The time in ms of a round that drafts gamma tokens."""
    target, head = models
    rows = roofline_rows(target, {"head": head}, setting, gamma, [batch], [context], [], ["head"])
    times = StepTable(rows).times("head", gamma, batch, context)
    return float(full_round_costs(times, gamma)[-1]) * times.decode.ms


@given(
    st.sampled_from(SIZES),
    st.sampled_from(sorted(ACCELERATORS)),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from((1, 4)),
    *(st.integers(1, most) for most in (10, 256, 100_000)),
)
def test_a_round_never_gets_cheaper_with_gamma_batch_or_context(
    models: tuple[ModelShape, ModelShape], accelerator: str, preset: str, tp: int, gamma: int, batch: int, context: int
) -> None:
    setting = RooflineCosts(source="roofline", accelerator=accelerator, preset=preset, tp=tp)
    least = cost(models, setting, gamma, batch, context)
    assert cost(models, setting, gamma + 1, batch, context) >= least
    assert cost(models, setting, gamma, batch + 1, context) >= least
    assert cost(models, setting, gamma, batch, context + 1) >= least


def test_without_overheads_the_times_are_those_of_the_bare_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, also for an engine whose numbers are all replaced."""
    zero = dict.fromkeys(("layer_us", "expert_layer_us", "step_ms", "sequence_ms", "round_ms", "draft_ms"), 0.0)
    efficiency = PRESETS["none"].efficiency
    monkeypatch.setitem(PRESETS, "empty", dataclasses.replace(PRESETS["vllm-0.11"], **zero, efficiency=efficiency))
    emptied = SGLANG.model_copy(update={"preset": "empty"})
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        target, head = shapes(name)
        bare, other = (
            [(row.model, row.step, row.tokens, row.batch, row.context, row.ms) for row in rows]
            for setting in (RooflineCosts(source="roofline", accelerator="h200"), emptied)
            for rows in [roofline_rows(target, {"head": head}, setting, 5, [1, 8], [0, 600], [16], ["head"])]
        )
        assert bare == other


def test_the_error_is_shared_by_all_steps_but_decoding_and_doubles_elsewhere() -> None:
    target, head = shapes("llama-3.1-8b")
    for setting, batch, context, factor in (
        (SGLANG, 8, 4096, 1.25),
        (SGLANG, 9, 4096, 1.25**2),
        (SGLANG, 8, 4097, 1.25**2),
        (SGLANG.model_copy(update={"accelerator": "l4"}), 1, 600, 1.25**2),
        (RooflineCosts(source="roofline", accelerator="h200"), 1, 600, 1.67),
    ):
        rows = roofline_rows(target, {"head": head}, setting, 2, [batch], [600], [], ["head"], context)
        errors = {row.step: row.shared_error for row in rows}
        assert errors.pop("decode") == 0
        assert list(errors.values()) == pytest.approx([math.log(factor) / 1.6448536269514722] * len(errors))


VLLM = RooflineCosts(source="roofline", accelerator="a100-80gb", preset="vllm-0.11")


@pytest.mark.parametrize(
    ("changes", "model", "batch", "context", "factor"),
    [
        ({}, "llama-3.1-8b", 64, 8192, 1.15),
        ({"accelerator": "l40s"}, "llama-3.1-8b", 64, 8192, 1.20),
        ({"tp": 2}, "llama-3.1-8b", 1, 600, 1.25**2),
        ({}, "qwen3-30b-a3b", 1, 600, 1.25**2),
        ({}, "llama-3.1-8b", 65, 600, 1.25**2),
        ({}, "llama-3.1-8b", 1, 8193, 1.25**2),
        ({"overhead_ms": 0.1}, "llama-3.1-8b", 1, 600, 1.25**2),
        ({"accelerator": "h200", "preset": "sglang-h200", "tp": 4}, "qwen3-30b-a3b", 8, 4096, 1.25),
        ({"preset": "none"}, "qwen3-30b-a3b", 999, 99_999, 1.67),
    ],
)
def test_the_error_goes_by_ground(changes: dict[str, Any], model: str, batch: int, context: int, factor: float) -> None:
    found, words = accuracy(VLLM.model_copy(update=changes), batch, context, shapes(model)[0])
    assert found == pytest.approx(factor)
    assert f"{factor:.2f}" in words


def test_a_quantized_target_is_off_its_ground() -> None:
    """Whatever says so: its config, or an option."""
    target, _ = shapes("llama-3.1-8b")
    for changes in ({"weight_bytes": 1.0}, {"kv_bytes": 1.0}, {"weight_bytes": 0.52, "head_bytes": 2.0}):
        found, words = accuracy(VLLM, 1, 600, dataclasses.replace(target, **changes))
        assert found == 1.25**2
        assert "quantized" in words
    assert accuracy(VLLM, 1, 600, dataclasses.replace(target, weight_bytes=4.0))[0] == 1.15
    mixture, h200 = shapes("qwen3-30b-a3b")[0], (SGLANG, 1, 600)
    assert accuracy(*h200, mixture)[0] == 1.25
    assert "quantized" in accuracy(*h200, dataclasses.replace(mixture, expert_bytes=0.5))[1]


@pytest.mark.parametrize(
    ("changes", "by_step", "why"),
    [
        ({"window": 128, "window_elements": 1.0}, True, "attend to all of the context, and this one does not"),
        ({"state_bytes": 1.0}, True, "attend to all of the context, and this one does not"),
        ({}, False, "heads that draft token by token"),
    ],
)
def test_a_reason_names_what_is_unlike_published_rounds(changes: dict[str, Any], by_step: bool, why: str) -> None:
    """And not numbers that nobody changed. A context within the window is read as any other."""
    wide = dataclasses.replace(shapes("llama-3.1-8b")[0], window=600, window_elements=1.0)
    assert accuracy(VLLM, 1, 600, wide)[0] == 1.15
    found, words = accuracy(VLLM, 1, 600, dataclasses.replace(shapes("llama-3.1-8b")[0], **changes), by_step=by_step)
    assert (found, why in words, "you" in words) == (1.25**2, True, False)
    assert (
        "you set weight_bytes and kv_bytes"
        in accuracy(VLLM.model_copy(update={"weight_bytes": 1.0, "kv_bytes": 1.0}), 1, 1)[1]
    )


def test_regimes_that_no_constant_describes_are_named_with_what_to_measure() -> None:
    target, _ = shapes("llama-3.1-8b")
    plain = accuracy(VLLM, 64, 600, target, 7)[1]
    assert "full CUDA graphs (eager or older: measure)" in plain
    assert plain.count("measure") == 1
    assert "(512): measure one" in accuracy(VLLM, 64, 600, target, 8)[1]
    fp8 = dataclasses.replace(target, kv_bytes=1.0)
    assert "fp8 cache with a draft on Ampere" in accuracy(VLLM, 1, 600, fp8)[1]
    assert "measure a round" in accuracy(VLLM.model_copy(update={"kv_bytes": 1.0}), 1, 600, target)[1]
    assert "Ampere" not in accuracy(VLLM.model_copy(update={"accelerator": "h100-sxm"}), 1, 600, fp8)[1]


def test_numbers_of_ones_own_and_other_drafts_are_off_as_far_as_elsewhere() -> None:
    """A setting that the preset was not fitted with, and a draft model's own steps on the preset's ground."""
    target, head = shapes("llama-3.1-8b")
    twice = 2 * math.log(1.25) / 1.6448536269514722
    for change in ({"weight_bytes": 1.0}, {"draft_weight_bytes": 1.0}, {"kv_bytes": 1.0}, {"overhead_ms": 0.1}):
        assert accuracy(SGLANG.model_copy(update={**change}), 1, 600)[0] == pytest.approx(1.25**2), change
    rows = roofline_rows(target, {"model": head}, SGLANG, 2, [1], [600], [], [], 600)
    errors = {(row.model, row.step): row.shared_error for row in rows}
    assert errors["model", "draft"] == pytest.approx(twice)
    assert errors["target", "verify"] == pytest.approx(twice / 2)
