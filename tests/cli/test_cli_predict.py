"""`alphaprof predict`: the library's numbers on the command line, what they are called, and refusals in two lines."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.predict import Prediction, build_prediction, read_pair
from alphaprof.config.hardware import PRESETS
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import roofline_ms
from alphaprof.costs.shapes import ModelShape
from alphaprof.render.answer import answer_text
from alphaprof.stats import formulas
from alphaprof.stats.formulas import RoundCost
from tests.cli.test_cli_errors import HEAVY, run
from tests.conftest import Runner
from tests.loops import each

CLAIM = ("--alpha", "0.75", "--cost", "0.04")
DEAR = RoundCost(0.1, 1.05, 0.03)


def printed(console_script: Runner, *arguments: object) -> str:
    """What the console script prints for a command line that works."""
    code, output, errors = console_script("predict", *arguments)
    assert (code, errors) == (0, "")
    return output


def as_json(prediction: Prediction) -> Any:
    return json.loads(answer_text(prediction, "json"), parse_constant=pytest.fail)


def rows(text: str) -> dict[int, list[str]]:
    """The cells behind each gamma in the terminal's table."""
    lines = (line.split() for line in text[text.index("by gamma\n") :].splitlines() if re.match(r" +\d+ ", line))
    return {int(cells[0]): cells[1:] for cells in lines}


def test_a_table_has_a_row_for_each_gamma_and_names_the_best(console_script: Runner) -> None:
    text = printed(console_script, *CLAIM)
    found = rows(text)
    assert list(found) == list(range(1, 9))
    assert found[1] == ["1.75", "0.750", "1.04", "0.040", "1.68x"]
    assert found[7] == ["3.60", "0.371", "1.28", "0.219", "2.81x"]
    assert "best gamma 7: 2.81x, decoding is faster" in text
    text = printed(console_script, *CLAIM, "--gamma", 3)
    assert list(rows(text)) == [3]
    assert text.startswith("gamma 3: 2.44x")
    text = printed(console_script, "--alpha", 0.9, "--cost", 1.2)  # never pays
    assert [cells[-2] for cells in rows(text).values()] == ["none"] * 8
    assert "best gamma 1: 0.86x, decoding is not faster" in text


def test_every_cost_reaches_the_formula(console_script: Runner) -> None:
    found = rows(printed(console_script, "--alpha", 0.8, "--cost", 0.1, "--verify", 1.05, "--overhead", 0.03))[4]
    assert found[0] == f"{formulas.tokens_per_round(0.8, 4):.2f}"
    assert found[2] == "1.48"  # 4 * 0.1 + 1.05 + 0.03
    assert found[-1] == f"{formulas.speedup(0.8, 4, DEAR):.2f}x"


def test_json_holds_the_librarys_numbers(console_script: Runner) -> None:
    found = json.loads(printed(console_script, *CLAIM, "--format", "json"))
    assert found == as_json(build_prediction(0.75, RoundCost(0.04)))
    assert (found["format"], found["schema_version"], found["best_gamma"]) == ("alphaprof-predict", "3.2", 7)
    assert (found["alpha"], found["coverage"], found["engine_rate"]) == (0.75, 1.0, None)
    assert found["cost"] == {"draft": 0.04, "verify": 1.0, "overhead": 0.0, "path_overhead": 0.0}
    item = found["gammas"][3]
    tokens = float(formulas.tokens_per_round(0.75, 4))
    assert item == {
        "gamma": 4,
        "tokens_per_round": tokens,
        "accepted_per_drafted": (tokens - 1) / 4,
        "verify_cost": 1.0,
        "break_even_length": 1.16,
        "break_even_alpha": formulas.break_even_alpha(4, RoundCost(0.04)),
        "speedup": tokens / 1.16,
        "low": None,
        "high": None,
    }
    assert (found["computed"], found["rates"], found["loads"]) == (None, [], [])


def test_a_draft_that_proposes_at_some_positions_only_is_given_its_coverage(console_script: Runner) -> None:
    """By hand: rounds of one draft, .7 of them with a proposal, emit .7 * 1.51 + .3 tokens and cost .7 * 1.1 + .3 steps."""
    lookup = ("--alpha", "0.51", "--coverage", "0.7", "--cost", "0", "--verify", "1.1", "--gamma", "1")
    (item,) = json.loads(printed(console_script, *lookup, "--format", "json"))["gammas"]
    assert item["tokens_per_round"] == pytest.approx(1.357)
    assert item["break_even_length"] == pytest.approx(1.07)
    assert item["speedup"] == pytest.approx(1.357 / 1.07)
    assert item["accepted_per_drafted"] == pytest.approx(0.51)  # tokens that were drafted, as engines count
    assert item["break_even_alpha"] == pytest.approx(0.1)
    text = " ".join(printed(console_script, *lookup).split())
    assert "alpha 0.510" in text
    assert "coverage 0.700: kept at 0.357 of all positions" in text
    assert "coverage" not in printed(console_script, *CLAIM)


def test_the_rate_of_an_engine_becomes_an_alpha(console_script: Runner) -> None:
    rate = ("--accepted-per-drafted", 0.53, "--at-gamma", 4, "--cost", 0.1)
    text = printed(console_script, *rate)
    assert "alpha 0.762" in text
    assert rows(text)[4][1] == "0.530"
    assert list(rows(text)) == [1, 2, 3, 4]
    found = json.loads(printed(console_script, *rate, "--format", "json"))
    assert found["engine_rate"] == {"accepted_per_drafted": 0.53, "gamma": 4}
    assert found["alpha"] == formulas.alpha_of_rate(0.53, 4)


@each(
    "acceptance",
    [
        ("--acceptance-length", 2.9, "--at-gamma", 3),
        ("--accepted-per-drafted", 0.63, "--at-gamma", 3),
        ("--rates", "0.8,0.6,0.5"),
    ],
)
def test_no_gamma_above_that_of_the_given_acceptance_is_computed(
    acceptance: tuple[object, ...], console_script: Runner
) -> None:
    text = printed(console_script, *acceptance, "--cost", 0.04)
    assert list(rows(text)) == [1, 2, 3]
    assert "best gamma 3" in text
    assert "no gamma above 3: acceptance is given up to there" in text
    assert "no gamma above" not in printed(console_script, *CLAIM)


REFUSED: tuple[tuple[list[str], str], ...] = (
    ([], "exactly one acceptance is needed: alpha, rates by depth, or an engine's rate or length"),
    (["--alpha", "0.5", "--rates", "0.5"], "exactly one acceptance is needed: alpha"),
    (["--acceptance-length", "2.8"], "exactly one acceptance is needed: alpha"),
    (["--acceptance-length", "9", "--gamma", "3"], "accepted / drafted tokens is 2.66667; it must be between 0 and 1"),
    (["--rates", "0.5,0.6"], "--rates 0.5,0.6 does not fall from 1 to 0"),
    (["--rates", "0.5,x"], "--rates 0.5,x does not fall from 1 to 0"),
    (["--rates", "0.8,0.7", "--gamma", "3"], "--gamma 3 is beyond the 2 rates given"),
    (["--acceptance-length", "2.9", "--at-gamma", "3", "--gamma", "5"], "--gamma 5 is beyond --at-gamma 3"),
    (["--acceptance-length", "2.9", "--at-gamma", "65"], "--at-gamma is 65; it must be between 1 and 64"),
    (["--acceptance-length", "1", "--at-gamma", "-1"], "--at-gamma is -1; it must be between 1 and 64"),
    (
        ["--alpha", "0.5", "--target-config", "x", "--draft-config", "y"],
        "a round's cost must be either given or computed",
    ),
    (["--alpha", "0.5", "--coverage", "1.5"], "--coverage is 1.5; it must be between 0 and 1"),
    (["--rates", "0.5", "--coverage", "0.5"], "--coverage is given without --alpha"),
    (["--alpha", "35"], "--alpha is 35; it must be between 0 and 1"),
    (["--alpha", "0.5", "--gamma", "65"], "--gamma is 65; it must be between 1 and 64"),
    (["--alpha", "0.5", "--overhead", "-1"], "--overhead is -1; it must be 0 or above"),
)


@each(("arguments", "problem"), REFUSED)
def test_impossible_options_are_refused_in_two_lines(arguments: list[str], problem: str, console_script: Runner) -> None:
    code, output, errors = console_script("predict", "--cost", "0.1", *arguments)
    first, _hint = errors.splitlines()
    assert (code, output, problem in first) == (2, "", True)


CONFIGS = Path(__file__).parents[1] / "golden" / "gpu" / "configs"
CARD = (
    *("--target-config", CONFIGS / "llama-3.1-8b.json", "--draft-config", CONFIGS / "head-llama-3.1-8b.json"),
    *("--accelerator", "h200", "--preset", "sglang-h200", "--batch", "8"),
)


def test_a_model_card_and_two_configs_give_a_speedup_with_its_interval(console_script: Runner) -> None:
    """The length is met at its gamma; the cost of the round is that of gpu-times' formula, summed here by hand."""
    length = ("--acceptance-length", "2.8", "--gamma", "3", "--tp", "4", "--context", "600")
    found = json.loads(printed(console_script, *CARD, *length, "--format", "json"))
    (item,), cost = found["gammas"], found["computed"]
    parts = cost["verify_ms"][2] + cost["draft_first_ms"][3] + 2 * cost["draft_ms"] + 0.74
    assert item["tokens_per_round"] == pytest.approx(2.8)
    assert item["break_even_length"] == pytest.approx(parts / cost["decode_ms"])
    assert item["speedup"] == pytest.approx(2.8 * cost["decode_ms"] / parts)
    assert (item["low"], item["high"]) == pytest.approx((item["speedup"] / 1.25, item["speedup"] * 1.25))
    text = printed(console_script, *CARD, *length)
    assert "speedup [90%]" in text
    assert "90% of published speedups lie within factor 1.25" in " ".join(text.split())
    poor = printed(console_script, *CARD, "--rates", "0.3,0.1")
    assert "decoding may be faster or slower if these inputs hold" in poor
    elsewhere = json.loads(printed(console_script, *CARD, *length, "--accelerator", "l4", "--format", "json"))
    assert elsewhere["gammas"][0]["high"] / elsewhere["gammas"][0]["speedup"] == pytest.approx(1.25**2)


def test_the_gamma_of_every_load_comes_first(console_script: Runner, tmp_path: Path) -> None:
    """Each load is that of a prediction of its own; neighbors share a gamma that is not surely slower."""
    rates = ("--rates", "0.5,0.2,0.1", "--accelerator", "a100-80gb")
    found = json.loads(printed(console_script, *CARD, *rates, "--format", "json"))
    loads, changes = {(each["concurrency"], each["context"]): each for each in found["loads"]}, set()
    assert {size for size, _ in loads} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {context for _, context in loads} == {1024, 4096, 16384, 65536}
    assert (128, 1024) in loads
    assert (128, 4096) not in loads  # 69 GB of caches beside 16 GB of weights
    for batch, context in ((1, 1024), (64, 1024), (8, 16384)):
        place = ("--batch", batch, "--context", context)
        alone, load = json.loads(printed(console_script, *CARD, *rates, *place, "--format", "json")), loads[batch, context]
        by_gamma = {item["gamma"]: item for item in alone["gammas"]}
        item, cost = by_gamma[load["gamma"]], alone["computed"]
        assert load["speedup"] == pytest.approx({"value": item["speedup"], "low": item["low"], "high": item["high"]})
        sure = cost["factor"] ** 0.115  # the share of the error that is each step's own
        assert max(each["speedup"] for each in by_gamma.values()) <= sure * item["speedup"]
        plain, read = 256 * cost["decode_ms"], batch * (cost["prefill_ms"] + cost["draft_prefill_ms"])
        whole = (plain + batch * cost["prefill_ms"]) / (plain / item["speedup"] + read)
        assert load["throughput"]["value"] == pytest.approx(whole)
        changes.add(load["gamma"])
    assert len(changes) > 1
    text = printed(console_script, *CARD, *rates)
    assert text.startswith("eagle3 by a roofline of a100-80gb: best gamma, speedup of decoding / of throughput")
    assert "n/a: no step times there, or its caches exceed the memory" in text
    assert f"throughput: {loads[8, 1024]['throughput']['value']:.2f}x [" in text
    large = on_files(tmp_path, TARGET | {"num_hidden_layers": 400}, EAGLE3, alpha=0.7, gamma=3)
    assert "target and caches of 1 sequence do not fit in the memory of h200: raise --tp" in printed(console_script, *large)
    assert "do not fit" not in printed(console_script, *large, "--tp", "2")
    never = printed(console_script, *CARD, "--rates", "0.02")
    assert "off: decoding is faster without the draft" in never
    assert "throughput: 0" not in never


def test_rates_by_depth(console_script: Runner) -> None:
    rates = ("--rates", "0.8,0.6,0.5")
    found = json.loads(printed(console_script, *CARD, *rates, "--format", "json"))
    assert [item["tokens_per_round"] for item in found["gammas"]] == pytest.approx([1.8, 2.4, 2.9])
    assert len(rows(printed(console_script, *CARD, *rates))) == 3


def test_configs_that_cannot_be_counted_end_in_two_lines(console_script: Runner, tmp_path: Path) -> None:
    llama = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    odd = {"hidden_size": "4096", "num_hidden_layers": -1, "vocab_size": float("inf"), "num_attention_heads": 0}
    for key, value in odd.items():
        (tmp_path / "odd").write_text(json.dumps(llama | {"head_dim": None, key: value}))
        given = ("--alpha", "0.7", "--target-config", tmp_path / "odd", "--draft-config", CONFIGS / "head-llama-3.1-8b.json")
        code, output, errors = console_script("predict", *given)
        assert (code != 0, output, "its numbers do not describe a model" in errors) == (True, "", True), key
    (tmp_path / "odd").write_text(json.dumps(llama | {"quantization_config": {"quant_method": "hqq"}}))
    code, _, errors = console_script("predict", *given)
    assert (code != 0, "quantized by hqq, whose bytes are not known: give --weight-bytes" in errors) == (True, True)
    code, text, _ = console_script("predict", *given, "--weight-bytes", "1")
    assert (code, "you set weight_bytes, so the error is" in " ".join(text.split())) == (0, True)
    code, _, errors = console_script("predict", *given, "--weight-bytes", "-1")
    assert (code, "--weight-bytes is -1" in errors) == (2, True)
    code, _, errors = console_script("predict", "--alpha", "0.7", "--target-config", given[-1], "--draft-config", given[-1])
    assert (code, "is a draft head" in errors) == (2, True)
    files = {"unknown": '{"model_type": "gpt2"}', "short": '{"model_type": "llama"}', "list": "[]"}
    problems = {
        "unknown": "cannot count the parameters of gpt2",
        "short": "it has no num_hidden_layers",
        "list": "is not a JSON object",
        "gone": "No such file",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for name, problem in problems.items():
        given = ("--alpha", "0.7", "--target-config", tmp_path / name, "--draft-config", tmp_path / name)
        code, output, errors = console_script("predict", *given)
        first, _hint = errors.splitlines()
        assert (code != 0, output, problem in first) == (True, "", True), name
    code, _, errors = console_script("predict", *CARD, "--alpha", "0.7", "--accelerator", "x")
    assert (code, "'x' is not known" in errors) == (2, True)


TARGET: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
EAGLE3 = TARGET | {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 32000}
EAGLE = TARGET | {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
LAYERS = TARGET | {"num_hidden_layers": 5}
STATES = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
DFLASH = LAYERS | {"architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": STATES}
NESTED_LAYERS = {"speculators_model_type": "dflash", "block_size": 16, "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}
NESTED_LAYERS |= {"transformer_layer_config": LAYERS}
DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": (TARGET | {"num_hidden_layers": 8}, "model"),
    "eagle3": (EAGLE3, "eagle3"),
    "eagle": (EAGLE, "eagle"),
    "mtp": (TARGET | {"num_nextn_predict_layers": 1}, "mtp"),
    "p-eagle": (EAGLE3 | {"mask_token_id": 5}, "p-eagle"),
    "specforge-p-eagle": (EAGLE3 | {"architectures": ["PEagleDraftModel"]}, "p-eagle"),
    "pard": (TARGET | {"num_hidden_layers": 8, "pard_token": 5}, "pard"),
    "z-lab": (DFLASH, "dflash"),
    "speculators": (NESTED_LAYERS, "dflash"),
    "dspark": (LAYERS | {"architectures": ["Qwen3DSparkModel"], "block_size": 16, "target_layer_ids": [1, 9]}, "dspark"),
    "dflash2": (DFLASH | {"architectures": ["DFlash2DraftModel"]}, "dflash2"),
    "gemma": (
        {"model_type": "gemma4_assistant", "backbone_hidden_size": 4096, "text_config": TARGET | {"hidden_size": 256}},
        "gemma4 assistant",
    ),
}


def on_files(folder: Path, target: Any, draft: Any, **options: Any) -> tuple[object, ...]:
    """The options that read two configs."""
    for name, config in (("target", target), ("draft", draft)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    paths = (folder / "target" / "config.json", folder / "draft" / "config.json")
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ("--target-config", paths[0], "--draft-config", paths[1], *given)


@each("name", DRAFTS)
def test_a_draft_is_what_its_config_says(name: str, console_script: Runner, tmp_path: Path) -> None:
    draft, kind = DRAFTS[name]
    given = on_files(tmp_path, TARGET | {"num_nextn_predict_layers": 1}, draft, alpha=0.7, format="json")
    found = json.loads(printed(console_script, *given))["computed"]
    assert found["draft_kind"] == kind
    assert f"{kind} of " in found["read"][1]
    assert bool(found["draft_first_ms"]) == (kind != "model")
    assert (found["draft_ms"] == 0) == (kind in ("p-eagle", "pard", "dflash", "dspark", "dflash2"))


def test_both_layouts_of_a_block_drafter_cost_the_same_pass(console_script: Runner, tmp_path: Path) -> None:
    """Over the rows that were verified and those that are drafted: five layers, what states enter by, the target's head."""
    costs = []
    for name in ("z-lab", "speculators"):
        given = on_files(tmp_path, TARGET, DRAFTS[name][0], acceptance_length=4.5, at_gamma=15, format="json")
        costs.append(json.loads(printed(console_script, *given))["computed"])
    assert costs[0] | {"read": None} == costs[1] | {"read": None}
    (found, _), shape = costs, ModelShape.from_config(TARGET)
    layer = 2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12288
    head = ModelShape.of_head(DFLASH, shape)
    assert head.parameters == 5 * layer + 5 * 4096**2 + 151936 * 4096
    assert head.stored_parameters == 5 * layer + 5 * 4096**2
    for gamma, cost in enumerate(found["costs"], 1):
        drafted = found["verify_ms"][gamma - 1] + found["round_ms"]
        assert cost * found["decode_ms"] - drafted <= found["draft_first_ms"][-1] + 1e-9
    assert 1.3 < found["costs"][-1] < 1.5  # 1.4 by published measurements
    beyond = on_files(tmp_path, TARGET, DFLASH, alpha=0.7, gamma=16)
    code, _, errors = console_script("predict", *beyond)
    assert (code, "drafts at most 15 tokens in a block" in errors) == (2, True)
    short = on_files(tmp_path, TARGET, DFLASH | {"block_size": 5}, alpha=0.7)
    assert list(rows(printed(console_script, *short))) == [1, 2, 3, 4]
    assert (
        list(rows(printed(console_script, *on_files(tmp_path, TARGET, DRAFTS["dspark"][0] | {"block_size": 5}, alpha=0.7))))[
            -1
        ]
        == 5
    )


def test_one_pass_runs_over_the_verified_and_the_drafted_rows(console_script: Runner, tmp_path: Path) -> None:
    """By hand at a batch where rows cost: n + gamma - 1 after n verified tokens, and what a model's step costs an engine."""
    given = on_files(tmp_path, TARGET, DFLASH, alpha=0.7, gamma=7, batch=64, format="json")
    found = json.loads(printed(console_script, *given))["computed"]
    setting = RooflineCosts(source="roofline", accelerator="h200", preset="sglang-h200")
    head, engine = ModelShape.of_head(DFLASH, ModelShape.from_config(TARGET)), PRESETS["sglang-h200"]
    for verified, ms in enumerate(found["draft_first_ms"], 1):
        kernels = roofline_ms(setting, head, False, verified + 6, 64, 1024)
        assert ms == pytest.approx(kernels + engine.draft_ms + engine.layers_ms(5, False))


def test_a_head_with_experts_reads_those_that_tokens_touch(console_script: Runner, tmp_path: Path) -> None:
    """As many parameters without experts cost more."""
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    for draft in (EAGLE3, DFLASH):
        mixture = ModelShape.of_head(draft | experts, ModelShape.from_config(TARGET))
        dense = ModelShape.of_head(draft, ModelShape.from_config(TARGET))
        assert mixture.parameters == dense.parameters
        assert mixture.active_parameters < dense.active_parameters
        firsts = []
        for config in (draft | experts, draft):
            given = on_files(tmp_path, TARGET, config, alpha=0.7, gamma=3, format="json")
            firsts.append(json.loads(printed(console_script, *given))["computed"]["draft_first_ms"][0])
        assert firsts[0] < firsts[1]


@each("changes", [{"hidden_size": 5120}, {"vocab_size": 128256}])
def test_a_head_of_another_target_is_refused(changes: dict[str, int], console_script: Runner, tmp_path: Path) -> None:
    given = on_files(tmp_path, TARGET, EAGLE3 | changes, alpha=0.7)
    code, output, errors = console_script("predict", *given)
    both = {"hidden_size": 4096, "vocab_size": 151936} | changes
    problem = f"a head for hidden size {both['hidden_size']} and {both['vocab_size']} ids; the target has 4096 and 151936"
    assert (code != 0, output, problem in errors) == (True, "", True)
    assert printed(console_script, *on_files(tmp_path, TARGET, EAGLE3 | {"vocab_size": 152064}, alpha=0.7))  # padded


def test_settings_of_other_types_end_in_two_lines(console_script: Runner, tmp_path: Path) -> None:
    odd = {"quantization_config": "fp8"}, {"layer_types": 3, "sliding_window": 4}, {"moe_layer_freq": [1], "num_experts": 4}
    odd += ({"hidden_size": 10**15, "num_experts": "4", "moe_intermediate_size": 8},)  # petabytes of the text
    experts = {"num_experts": 4, "moe_intermediate_size": 8}
    odd += tuple(experts | {"num_experts_per_tok": used} for used in (-1, 5, {"a": 1}))
    odd += ({"model_type": "gpt_oss", "sliding_window": "x"} | experts | {"num_experts_per_tok": 1},)
    drafts = DFLASH | {"block_size": "16"}, EAGLE3 | {"vocab_size": "x"}, EAGLE3 | {"transformer_layer_config": [1]}
    for target, draft in [(TARGET | part, EAGLE3) for part in odd] + [(TARGET, part) for part in drafts]:
        code, output, errors = console_script("predict", *on_files(tmp_path, target, draft, alpha=0.7))
        assert (code != 0, output, len(errors.splitlines())) == (True, "", 2), (target, draft)


def test_heads_that_are_not_computed_are_refused(console_script: Runner, tmp_path: Path) -> None:
    medusa = {"architectures": ["MedusaModel"], "hidden_size": 4096}
    code, _, errors = console_script("predict", *on_files(tmp_path, TARGET, medusa, alpha=0.7))
    assert (code != 0, "steps of medusa heads are not computed" in errors) == (True, True)


def test_one_alpha_of_a_head_is_said_to_hold_for_no_depth_but_the_first(console_script: Runner, tmp_path: Path) -> None:
    warning = "one alpha for all depths: heads accept less"
    assert warning in printed(console_script, *on_files(tmp_path, TARGET, EAGLE3, alpha=0.7))
    assert warning not in printed(console_script, *on_files(tmp_path, TARGET, EAGLE3, acceptance_length=2.8, at_gamma=3))
    assert warning not in printed(console_script, *on_files(tmp_path, TARGET, DRAFTS["model"][0], alpha=0.7))


def test_quantization_is_read_from_either_file(console_script: Runner, tmp_path: Path) -> None:
    """A file beside config.json fills in what that does not say; the speedup is that of the bytes by hand."""

    def computed(declared: Any = None, beside: Any = None, **options: Any) -> dict[str, Any]:
        given = on_files(tmp_path, TARGET | {"quantization_config": declared}, EAGLE3, alpha=0.7, format="json", **options)
        (tmp_path / "target" / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
        found: dict[str, Any] = json.loads(printed(console_script, *given))["computed"]
        return found

    algorithm = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    prefixed = [tmp_path / "target" / f"NAME_{name}config.json" for name in ("", "hf_quant_")]  # as people collect them
    for path, content in zip(prefixed, ({**TARGET}, {"quantization": algorithm}), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    assert "modelopt fp8" in read_pair(prefixed[0], prefixed[0]).read[0]
    files = computed(beside=algorithm), computed({"quant_method": "fp8"}), computed(beside=algorithm, context=0)
    assert files[0]["decode_ms"] == files[1]["decode_ms"]
    plain = computed()
    assert plain["factor"] < files[0]["factor"]
    assert "modelopt fp8 (weights 1 B, head 2 B)" in files[0]["read"][0]
    halved = ModelShape.from_config(TARGET).parameters - 2 * 151936 * 4096  # the layers, and not embedding and head
    saved = computed(context=0)["decode_ms"] - files[2]["decode_ms"]
    assert saved == pytest.approx(1000 * halved / (4.8e12 * PRESETS["sglang-h200"].efficiency.memory), rel=0.05)
    small = computed(beside=algorithm | {"kv_cache_quant_algo": "FP8"})
    assert small["decode_ms"] < files[0]["decode_ms"]
    assert (
        computed({"quant_method": "fp8"}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})["decode_ms"]
        == small["decode_ms"]
    )


def test_a_prediction_needs_neither_torch_nor_the_readers_of_runs(tmp_path: Path) -> None:
    without = (*HEAVY, "huggingface_hub")
    result = run(tmp_path, "predict", *CLAIM, without=without)
    assert (result.returncode, result.stderr) == (0, "")
    assert "best gamma 7" in result.stdout


TEXT = (Path(__file__).parents[2] / "docs" / "research" / "predict.md").read_text()


def test_the_example_is_what_the_command_prints() -> None:
    command, shown, *_ = re.findall(r"```(?:sh|text)\n(.*?)\n```", TEXT, re.DOTALL)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0
    printed = [line.rstrip() for line in result.output.splitlines()]
    assert printed == shown.splitlines()  # to the last line


PAGE = TEXT.partition("## A preset of your server")[0]


def test_every_option_of_the_page_exists_and_every_option_is_on_the_page() -> None:
    shown = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"--[a-z-]+", shown)) - {"--help"}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]*", re.sub(r"python scripts/.*", "", PAGE))) == options
