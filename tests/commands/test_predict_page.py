"""The page about predict is true: every number on it is what the library computes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.costs.roofline import Efficiency, ModelShape, step_ms
from alphaprof.stats import formulas
from alphaprof.stats.formulas import RoundCost, alpha_of_rate, speedup, tokens_per_round
from tests.costs.test_roofline import H100, LLAMA
from tests.loops import each

TEXT = (Path(__file__).parents[2] / "docs" / "research" / "predict.md").read_text()
SIGNS = {"\N{GREEK SMALL LETTER ALPHA}": "alpha", "\N{GREEK SMALL LETTER GAMMA}": "gamma", "\N{MINUS SIGN}": "-"}
RHO = {"\N{GREEK SMALL LETTER RHO}": "rho"}
PAGE = " ".join(TEXT.split()).translate(str.maketrans(SIGNS | RHO))  # line breaks do not matter, nor does the spelling
GENERIC, CUSTOM = 0.35, 0.75  # the two drafts of the claims
LONG = range(1, 65)


def x(value: Any) -> str:
    return f"{float(value):.2f}x"


def best(alpha: float, cost: RoundCost, burstiness: float = 0.0) -> tuple[int, float]:
    """The best gamma and its speedup."""
    return max(((gamma, float(speedup(alpha, gamma, cost, burstiness))) for gamma in LONG), key=lambda item: item[1])


def dearest(gamma: int, burstiness: float = 0.0) -> float:
    """The cost of a draft at which the custom one gives 2.8x; below 0 where none is cheap enough."""
    return (float(tokens_per_round(CUSTOM, gamma, burstiness)) / 2.8 - 1) / gamma


def of_acceptance() -> Iterator[str]:
    rate = float(formulas.accepted_per_drafted(tokens_per_round(0.8, 4), 4))
    yield f"At alpha 0.8 and gamma 4 an engine shows {rate:.3f}; put into the formula for alpha, that promises"
    yield f"{tokens_per_round(rate, 4):.2f} tokens per round instead of {tokens_per_round(0.8, 4):.2f}"
    alone, bursty = (f"{alpha_of_rate(0.53, 4, burstiness):.3f}" for burstiness in (0, 0.3))
    yield f"0.53 --at-gamma 4` is alpha {alone} where acceptance is independent, and {bursty} at a burstiness of 0.3"
    emitted = [f"{tokens_per_round(0.8, 4, burstiness):.2f}" for burstiness in (0, 0.6, -0.2)]
    yield "alpha 0.8 and gamma 4 give {} tokens with rho = 0, {} with rho = 0.6 and {} with rho = -0.2".format(*emitted)
    yield f"at alpha 0.8 it is at least {formulas.least_burstiness(0.8):.2f}"
    yield f"alpha 0.75 and gamma 7, where a round emits {tokens_per_round(0.75, 7):.2f} tokens"
    assert tokens_per_round(0.65, 5) < 3.1
    yield f"alpha 0.65 and gamma 5, where it emits {tokens_per_round(0.65, 5):.2f} and"


def of_the_claims() -> Iterator[str]:
    pair = {c: [x(speedup(alpha, 7, RoundCost(c))) for alpha in (GENERIC, CUSTOM)] for c in (0.0408, 0.04, 0.041)}
    yield "gamma = 7, c = 0.0408 and v = 1, and acceptance independent, the speedups are {} and {}".format(*pair[0.0408])
    assert pair[0.0408] == ["1.20x", "2.80x"]
    yield "c = 0.040 they are {} and {}, with c = 0.041 {} and {}".format(*pair[0.04], *pair[0.041])
    six = [x(speedup(alpha, 6, RoundCost(0.0396))) for alpha in (CUSTOM, GENERIC)]
    yield "gamma = 6 needs c = 0.0396 for {}, which makes the other {}".format(*six)
    yield f"a round of 3 drafts emits {tokens_per_round(CUSTOM, 3):.2f} tokens, so gamma ≤ 3 cannot give 2.8x"
    assert all(dearest(gamma) < 0 for gamma in (1, 2, 3))
    assert max(LONG, key=dearest) == 7
    gammas = (4, 5, 6, 7, 8, 10, 12)
    yield f"| gamma | {' | '.join(map(str, gammas))} |"
    yield f"| tokens/round at alpha 0.75 | {' | '.join(f'{tokens_per_round(CUSTOM, gamma):.2f}' for gamma in gammas)} |"
    yield f"| c at which that is 2.8x | {' | '.join(f'{dearest(gamma):.3f}' for gamma in gammas)} |"
    tuned = best(GENERIC, RoundCost(0.04))
    yield f"at c = 0.04 and alpha 0.35, gamma = {tuned[0]} gives {x(tuned[1])}"
    assert best(GENERIC, RoundCost(0.125)) == (1, pytest.approx(1.2))
    same = best(CUSTOM, RoundCost(0.125))
    yield f"a draft of c = 0.125 (gamma = 1), and with such a cost alpha 0.75 gives at most {x(same[1])} (gamma = {same[0]})"


def of_bursts() -> Iterator[str]:
    cost = RoundCost(0.04)
    for burstiness in (0, 0.3, 0.6):
        cells = [
            f"{tokens_per_round(alpha, 7, burstiness):.2f}, {x(speedup(alpha, 7, cost, burstiness))}"
            for alpha in (GENERIC, CUSTOM)
        ]
        needed = formulas.alpha_for(2.8 * cost.of_round(7), 7, burstiness)
        cheapest = max(dearest(gamma, burstiness) for gamma in LONG)
        yield f"| {burstiness} | {' | '.join(cells)} | {needed:.3f} | {cheapest:.3f} |"
    yield f"it takes alpha {needed:.3f}, or c = {cheapest:.3f} and longer rounds"
    assert max(LONG, key=lambda gamma: dearest(gamma, 0.6)) > 7


def of_batches() -> Iterator[str]:
    shape = ModelShape.from_config(LLAMA)
    fitted = Efficiency(memory=0.8, compute=0.8 / 1.2203)  # fitted to published ratios: docs/research/log.md
    for batch in (1, 8, 32, 64, 256):
        decode, verify = (step_ms(shape, H100, fitted, tokens, batch, 1024) for tokens in (1, 8))
        cost = RoundCost(0.04, verify_slope=(verify / decode - 1) / 7)
        gamma, most = best(CUSTOM, cost)
        fixed = f"{cost.verification(7):.2f} | {x(speedup(CUSTOM, 7, cost))}"
        yield f"| {batch} | {cost.verify_slope:.4f} | {fixed} | {gamma}, {x(most)} |"
    yield f"Efficiency(memory={fitted.memory}, compute={fitted.compute:.2f})"


PARTS = (of_acceptance, of_the_claims, of_bursts, of_batches)


@each("part", PARTS)
def test_worked_numbers_are_what_the_library_computes(part: Callable[[], Iterator[str]]) -> None:
    assert [text for text in part() if text not in PAGE] == []


def test_no_worked_number_is_left_unchecked() -> None:
    checked = " ".join(text for part in PARTS for text in part())
    prose = re.sub(r"arXiv:\S+|```.*?```", "", TEXT, flags=re.DOTALL)
    numbers = re.findall(r"\d+\.\d{2,}x?", prose.split("## What comes out")[1])
    assert len(numbers) > 70
    assert [number for number in numbers if number not in checked] == []


def test_the_example_is_what_the_command_prints() -> None:
    command, shown = re.findall(r"```(?:sh|text)\n(.*?)\n```", TEXT, re.DOTALL)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0
    printed = [line.rstrip() for line in result.output.splitlines()]
    assert printed == shown.splitlines()  # to the last line


def test_every_option_of_the_page_exists_and_every_option_is_on_the_page() -> None:
    shown = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"--[a-z-]+", shown)) - {"--help"}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]*", TEXT)) == options
