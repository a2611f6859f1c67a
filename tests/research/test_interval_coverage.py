"""The simulation that holds intervals and verdicts against known truth: it simulates what it says, and it can fail."""

from __future__ import annotations

import math
import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats.estimate import Interval
from tests.conftest import ROOT
from tests.synthetic import expected_rounds

pytestmark = pytest.mark.slow
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "research" / "interval_coverage.py"))
GLOBALS = SCRIPT["main"].__globals__  # what the script's functions look names up in
SETTINGS = list(SCRIPT["SETTINGS"])
MEMBERS, SAMPLES = 40, 250
every_setting = pytest.mark.parametrize("name", SETTINGS)


def noise(samples: int) -> float:
    """Three standard errors of a rate of 5 %."""
    return 3 * math.sqrt(0.05 * 0.95 / samples)


@pytest.fixture(scope="module")
def populations() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {name: SCRIPT["traffic"](name, MEMBERS, rng) for name in SETTINGS}


def by_hand(agrees: list[bool], gamma: int) -> tuple[int, int]:
    """Tokens and rounds of one document, whose first token comes from the prefill."""
    place, rounds = 1, 0
    while place < len(agrees):
        rounds += 1
        accepted = 0
        while accepted < gamma and place < len(agrees) and agrees[place]:
            accepted, place = accepted + 1, place + 1
        place += 1
    return len(agrees) - 1, rounds


@every_setting
def test_documents_are_counted_as_a_round_by_round_walk_counts_them(name: str) -> None:
    found = SCRIPT["traffic"](name, 3, np.random.default_rng(2))
    rng, (alphas, burstiness) = np.random.default_rng(2), SCRIPT["SETTINGS"][name]
    size = np.repeat(SCRIPT["lengths"](), 3)
    start = np.cumsum(size) - size
    agrees = SCRIPT["agreements"](rng, np.repeat(alphas(rng, size), size), start, burstiness)
    texts = np.split(agrees, start[1:])
    expected = np.array([by_hand(text.tolist(), SCRIPT["GAMMA"]) for text in texts])
    assert found.counts.tokens.tolist() == expected[:, 0].tolist()
    assert found.counts.rounds.tolist() == expected[:, 1].tolist()
    assert (found.counts.drafted == expected[:, 1:]).all()
    assert found.accepted.tolist() == [text.sum() for text in texts]
    assert found.positions.tolist() == [len(text) for text in texts]


def test_bursts_are_as_long_as_they_say_and_end_with_the_document() -> None:
    """Lag-1 autocorrelation 0.6 within documents, none from one to the next; the same share of agreements."""
    rng, documents, size = np.random.default_rng(3), 40_000, 8
    start = np.arange(documents) * size
    drawn = SCRIPT["agreements"](rng, np.full(documents * size, 0.7), start, 0.6).reshape(documents, size)
    error = 4 / math.sqrt(documents)
    assert abs(drawn.mean() - 0.7) < error * math.sqrt(0.21)
    assert abs(np.corrcoef(drawn[:, 3], drawn[:, 4])[0, 1] - 0.6) < error
    assert abs(np.corrcoef(drawn[:, 3], drawn[:, 5])[0, 1] - 0.36) < error
    assert abs(np.corrcoef(drawn[:-1, -1], drawn[1:, 0])[0, 1]) < error
    plain = SCRIPT["agreements"](rng, np.full(documents * size, 0.7), start, 0.0).reshape(documents, size)
    assert abs(np.corrcoef(plain[:, 3], plain[:, 4])[0, 1]) < error


def test_truths_are_those_of_the_law(populations: dict[str, Any]) -> None:
    """All alike: tokens per round by recursion over the tokens left. A round of 5 drafts costs 5 x 0.05 + 1.15."""
    population = populations["alike"]
    truths = population.truths()
    tokens = SCRIPT["lengths"]() - 1
    rounds = sum(float(expected_rounds(np.array(0.65), int(left), SCRIPT["GAMMA"])) for left in tokens)
    assert truths["tokens per round"] == pytest.approx(tokens.sum() / rounds, rel=0.01)
    assert truths["alpha"] == pytest.approx(0.65, abs=4 * math.sqrt(0.65 * 0.35 / population.positions.sum()))
    assert truths["speedup"] == pytest.approx(truths["tokens per round"] / 1.4, rel=1e-12)


@every_setting
def test_intervals_hold_the_truth(populations: dict[str, Any], name: str) -> None:
    lines = SCRIPT["intervals"](name, populations[name], SAMPLES, np.random.default_rng(6))
    judged = [line for line in lines if line.met is not None]
    assert (len(lines), len(judged)) == (6, 3)
    for line in lines:
        held, above, below = line.rates
        assert held + above + below == pytest.approx(1)
        slack = 0.02 if line in judged else 0.03  # with 20 documents a little less is to be expected
        assert held >= 0.95 - slack - noise(SAMPLES), line
        if "alpha" in line.text:  # of the others documents that were not seen widen the interval
            assert held <= 0.95 + slack + noise(SAMPLES), line
    assert all(line.met for line in judged)


SMALL = {"gates": 20, "choices": 20, "traffic": 100, "bad": 100, "step_times": 25, "chosen": 40, "several": 60}


@pytest.mark.parametrize("part", SMALL)
def test_promises_are_met_in_small(part: str) -> None:
    """In the first setting of a part, with the noise of few samples granted."""
    _, _, settings, measured = SCRIPT["PARTS"][part]
    lines = list(measured(next(iter(settings)), MEMBERS, SMALL[part], _rng(7)))
    assert any(line.met for line in lines)
    assert [str(line) for line in lines if line.met is False] == []


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def too_narrow(function: Any) -> Any:
    """An interval of half the width."""

    def narrowed(*arguments: Any) -> Any:
        found = function(*arguments)
        low, high = ((found.value + end) / 2 for end in (found.low, found.high))
        return Interval(found.value, low, high)

    return narrowed


def generous(function: Any) -> Any:
    """A verdict at a threshold that is 5 % too low."""
    return lambda found, threshold, *arguments, **options: function(found, 0.95 * threshold, *arguments, **options)


def generous_judge(function: Any) -> Any:
    """The same, of what is chosen."""

    def judged(candidates: Any, timing: Any, mix: Any, question: Any, gammas: Any) -> Any:
        asked = question.model_copy(update={"min_speedup": 0.95 * question.min_speedup})
        return function(candidates, timing, mix, asked, gammas)

    return judged


@pytest.mark.parametrize(
    ("name", "wrong", "part"),
    [
        ("pooled_share", too_narrow, "intervals"),
        ("speedup_interval", too_narrow, "intervals"),
        ("decide", generous, "gates"),
        ("judge", generous_judge, "choices"),
    ],
)
def test_what_is_wrong_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, part: str
) -> None:
    """In one setting, and no other part, to be quick."""
    title, header, _, measured = SCRIPT["PARTS"][part]
    monkeypatch.setitem(GLOBALS, "PARTS", {part: (title, header, ["different"], measured)})
    monkeypatch.setitem(GLOBALS, name, wrong(GLOBALS[name]))
    assert SCRIPT["main"]([f"--{part}", "120", "--members", "10"]) == 1
    assert capsys.readouterr().out.endswith("\n1 not met\n")
