"""`alphaprof predict`: the library's numbers on the command line, what they are called, and refusals in two lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from alphaprof.commands.predict import Prediction, build_prediction
from alphaprof.render.answer import answer_text
from alphaprof.stats import formulas
from alphaprof.stats.formulas import RoundCost
from tests.cli.test_cli_errors import HEAVY, run
from tests.conftest import Runner
from tests.loops import each

CLAIM = ("--alpha", "0.75", "--cost", "0.04")
DEAR = RoundCost(0.1, 1.05, 0.02, 0.03)


def printed(console_script: Runner, *arguments: object) -> str:
    """What the console script prints for a command line that works."""
    code, output, errors = console_script("predict", *arguments)
    assert (code, errors) == (0, "")
    return output


def as_json(prediction: Prediction) -> Any:
    return json.loads(answer_text(prediction, "json"), parse_constant=pytest.fail)


def rows(text: str) -> dict[int, list[str]]:
    """The cells behind each gamma in the terminal's table."""
    lines = (line.split() for line in text.splitlines() if re.match(r" +\d+ ", line))
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
    assert "best gamma 1: 0.86x, decoding is no faster" in text


def test_every_cost_and_burstiness_reach_the_formula(console_script: Runner) -> None:
    options = ("--verify", 1.05, "--verify-slope", 0.02, "--overhead", 0.03, "--burstiness", 0.3)
    found = rows(printed(console_script, "--alpha", 0.8, "--cost", 0.1, *options))[4]
    assert found[0] == f"{formulas.tokens_per_round(0.8, 4, 0.3):.2f}"
    assert found[2] == "1.56"  # 4 * 0.1 + 1.05 + 4 * 0.02 + 0.03
    assert found[-1] == f"{formulas.speedup(0.8, 4, DEAR, 0.3):.2f}x"


def test_json_holds_the_librarys_numbers(console_script: Runner) -> None:
    found = json.loads(printed(console_script, *CLAIM, "--burstiness", 0.3, "--format", "json"))
    assert found == as_json(build_prediction(0.75, 0.3, RoundCost(0.04)))
    assert (found["format"], found["schema_version"], found["best_gamma"]) == ("alphaprof-predict", "1.0", 8)
    assert (found["alpha"], found["burstiness"], found["engine_rate"]) == (0.75, 0.3, None)
    assert found["cost"] == {"draft": 0.04, "verify": 1.0, "verify_slope": 0.0, "overhead": 0.0}
    item = found["gammas"][3]
    tokens = float(formulas.tokens_per_round(0.75, 4, 0.3))
    assert item == {
        "gamma": 4,
        "tokens_per_round": tokens,
        "accepted_per_drafted": (tokens - 1) / 4,
        "verify_cost": 1.0,
        "break_even_length": 1.16,
        "break_even_alpha": formulas.break_even_alpha(4, RoundCost(0.04), 0.3),
        "speedup": tokens / 1.16,
    }


def test_the_cost_of_verification_is_that_of_its_gamma() -> None:
    costs = [item["verify_cost"] for item in as_json(build_prediction(0.5, 0, DEAR, (1, 4)))["gammas"]]
    assert costs == pytest.approx([1.07, 1.13])


def test_the_rate_of_an_engine_becomes_an_alpha(console_script: Runner) -> None:
    rate = ("--accepted-per-drafted", 0.53, "--at-gamma", 4, "--cost", 0.1)
    for burstiness, alpha in ((0, "0.762"), (0.3, "0.792")):
        text = printed(console_script, *rate, "--burstiness", burstiness)
        assert f"alpha {alpha}" in text
        assert rows(text)[4][1] == "0.530"
    found = json.loads(printed(console_script, *rate, "--format", "json"))
    assert found["engine_rate"] == {"accepted_per_drafted": 0.53, "gamma": 4}
    assert found["alpha"] == formulas.alpha_of_rate(0.53, 4)


REFUSED: tuple[tuple[list[str], str], ...] = (
    ([], "acceptance is either one alpha, or an engine's rate"),
    (["--alpha", "35"], "--alpha is 35; it must be between 0 and 1"),
    (["--alpha", "0.8", "--burstiness", "-0.5"], "at alpha 0.8 burstiness lies between -0.25"),
    (
        ["--accepted-per-drafted", "0.9", "--at-gamma", "4", "--burstiness", "-0.5"],
        "no text of burstiness -0.5 has 0.9 accepted per drafted token at gamma 4",
    ),
    (["--alpha", "0.5", "--gamma", "65"], "--gamma is 65; it must be between 1 and 64"),
    (["--alpha", "0.5", "--overhead", "-1"], "--overhead is -1; it must be 0 or above"),
)


@each(("arguments", "problem"), REFUSED)
def test_impossible_options_are_refused_in_two_lines(arguments: list[str], problem: str, console_script: Runner) -> None:
    code, output, errors = console_script("predict", "--cost", "0.1", *arguments)
    first, _hint = errors.splitlines()
    assert (code, output, problem in first) == (2, "", True)


def test_a_prediction_needs_neither_torch_nor_the_readers_of_runs(tmp_path: Path) -> None:
    without = (*HEAVY, "huggingface_hub")
    result = run(tmp_path, "predict", *CLAIM, without=without)
    assert (result.returncode, result.stderr) == (0, "")
    assert "best gamma 7" in result.stdout
