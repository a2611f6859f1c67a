"""The simulation that holds intervals and verdicts against known truth: it simulates what it says, and it can fail."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats.estimate import Interval
from tests.conftest import ROOT
from tests.synthetic import expected_rounds

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "research" / "interval_coverage.py"))
GLOBALS = SCRIPT["main"].__globals__  # what the script's functions look names up in
SETTINGS = list(SCRIPT["SETTINGS"])
MEMBERS, SAMPLES, GATES, CHOICES = 40, 250, 20, 20
Array = np.ndarray[Any, Any]
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


def test_texts_differ_in_length() -> None:
    size = SCRIPT["lengths"]()
    assert len(size) == SCRIPT["LEVELS"]
    assert (size.min(), size.max()) == (19, 512)
    assert (np.diff(size) >= 0).all()


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


def test_documents_have_the_acceptance_of_their_setting() -> None:
    rng, size = np.random.default_rng(4), np.repeat(SCRIPT["lengths"](), 1000)
    error = 4 * 0.15 / math.sqrt(len(size))
    alike, different, _, easier = (SCRIPT["SETTINGS"][name][0](rng, size) for name in SETTINGS)
    assert set(alike) == {0.65}
    assert abs(different.mean() - 0.65) < error + 0.005  # cut at 0.98, which takes more from above
    assert abs(different.std() - 0.15) < error + 0.005
    assert abs(np.corrcoef(different, size)[0, 1]) < 4 / math.sqrt(len(size))
    assert easier[-1000:].mean() - easier[:1000].mean() > 0.3


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
def test_every_document_is_drawn_as_often_and_drafts_share_lengths(populations: dict[str, Any], name: str) -> None:
    """So a sample's expectation is the truth, for each of the drafts, which are drawn apart from each other."""
    population, rng = populations[name], np.random.default_rng(5)
    documents = len(population.positions)
    rows = population.draw_drafts(rng, 4000)
    assert rows.shape == (SCRIPT["DRAFTS"], 4000)
    assert (population.positions[rows] == population.positions[rows[0]]).all()
    assert 0 < (rows[0] == rows[1]).mean() < 4 / MEMBERS
    for drawn in (rows.ravel(), population.draw(rng, 80_000)):
        hits = np.bincount(drawn, minlength=documents)
        assert len(hits) == documents
        by_length = hits.reshape(SCRIPT["LEVELS"], MEMBERS).sum(1)
        assert abs(by_length / 80_000 - 1 / SCRIPT["LEVELS"]).max() < 5 * math.sqrt(0.02 / 4000)
        assert hits.min() > 0
    sample = population.sample(np.array([7, 7, 9]))
    assert len(set(sample.cluster.tolist())) == 3
    assert sample.tokens[0] == sample.tokens[1]


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


def test_the_gate_is_wrong_as_rarely_as_it_says_and_asking_again_is_not(populations: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    lines = [line for name in SETTINGS for line in SCRIPT["gate"](name, populations[name], GATES, rng)]
    gates, again = lines[::2], lines[1::2]
    assert all(line.met for line in gates)
    assert {line.met for line in again} == {None}
    samples = GATES * len(SETTINGS)
    assert (np.mean([line.rates for line in gates], axis=0) <= 0.05 + noise(samples)).all()
    assert np.mean([sum(line.rates) for line in again]) > 0.1 + noise(samples) * math.sqrt(2)


def test_the_best_of_many_is_tested_on_what_did_not_choose_it(populations: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    lines = [line for name in SETTINGS for line in SCRIPT["best_of_many"](name, populations[name], CHOICES, rng)]
    halves, naive = lines[::2], lines[1::2]
    assert all(line.met for line in halves)
    samples = CHOICES * len(halves)
    assert np.mean([line.rates for line in halves]) <= 0.05 + noise(samples)
    assert np.mean([line.rates for line in naive]) > 1 / 3


def test_few_repetitions_are_granted_their_noise_and_many_are_not() -> None:
    assert SCRIPT["grant"](2000) == 0
    assert SCRIPT["grant"](500) == pytest.approx(noise(500))


def test_intervals_of_observed_traffic_hold_the_truth_and_known_shares_do_not() -> None:
    """Two domains of 2.5x and 0.73x, a mixture of 64 documents and fixed counts of 32: one ratio against known shares."""
    lines = {
        tuple(line.text.split()[3:-1]): line for line in SCRIPT["whole_traffic"]("2.5x and 0.73x", MEMBERS, 400, _rng(9))
    }
    for sampling in (("mixture",), ("fixed", "counts")):
        for way in (("one", "ratio"), ("tested", "half")):
            line = lines[*sampling, "64", *way]
            held, _, _, go, no_go = line.rates
            assert line.met
            assert held >= 0.93 - noise(400)
            assert max(go, no_go) <= 0.065 + noise(400)
        assert lines[*sampling, "64", "shares", "as", "known"].rates[0] < 0.75


def test_bad_documents_that_were_not_seen_make_no_go() -> None:
    """A tenth of the documents accept nothing, the others everything: 16 documents hold none of them in 18 % of samples."""
    lines = list(SCRIPT["bad_documents"]("1 and 0", MEMBERS, 250, _rng(10)))
    promised = [line for line in lines if line.met is not None]
    assert [line.text.split()[-2] for line in promised] == ["10%", "25%"]
    for line in promised:
        assert line.met
        assert max(line.rates[2:]) <= 0.05 + noise(250)  # 16, 32 and 64 documents
        assert line.rates[0] == 0  # four decide nothing


def test_intervals_at_ordinary_spread_are_hardly_wider_than_t() -> None:
    for line in SCRIPT["widths"]("different", MEMBERS, 60, _rng(11)):
        two_sided_32, one_sided_32, *more = line.rates
        assert max(two_sided_32, one_sided_32) <= 1.1
        assert min(line.rates) >= 1
        assert max(more) <= 1.06


@pytest.mark.parametrize("name", SCRIPT["GAINS"])
def test_intervals_of_gains_hold_the_truth(name: str) -> None:
    """Of two drafts on the same documents; and the floor never makes them hold it less often, or narrower."""
    lines = list(SCRIPT["gains"](name, 20, 30, _rng(12)))
    assert len(lines) == len(SCRIPT["MIXES"]) * len(SCRIPT["GAIN_SIZES"])
    assert all(line.met for line in lines)
    for line in lines:
        held, above, below, without, width, bare_width = line.rates
        assert held + above + below == pytest.approx(1)
        assert held >= without - 1e-9
        assert width >= bare_width


def test_two_drafts_of_a_gain_have_the_correlation_that_they_say() -> None:
    """Of long documents, whose accepted shares are nearly their probabilities."""
    one, two = SCRIPT["correlated"]((0.6, 0.5), 100, _rng(13))
    assert (one.positions == two.positions).all()
    long = one.positions > 300
    shares = [traffic.accepted[long] / traffic.positions[long] for traffic in (one, two)]
    noise = [(share * (1 - share) / one.positions[long]).mean() for share in shares]
    spread = math.sqrt(math.prod(share.var() - less for share, less in zip(shares, noise, strict=True)))
    assert np.cov(*shares)[0, 1] / spread == pytest.approx(SCRIPT["CORRELATION"], abs=0.08)


def same_half(pools: Any, order: Any) -> Any:
    """A split whose documents both choose and test."""
    tested = SCRIPT["held_out"]({domain: pool.units.lots for domain, pool in pools.items()})
    return tested, tested


def test_routes_between_domains_that_are_alike_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the documents that did not choose them; on those that did they seem to."""
    lines = list(SCRIPT["routes"]("both pay", MEMBERS, 80, _rng(14)))
    assert all(line.met for line in lines)
    assert max(line.rates[-1] for line in lines) <= 0.05
    monkeypatch.setattr("alphaprof.report.route.halves", same_half)
    fooled = list(SCRIPT["routes"]("both pay", MEMBERS, 80, _rng(14)))
    assert not any(line.met for line in fooled)
    assert all(seeming.rates[1] > max(0.001, honest.rates[1]) for seeming, honest in zip(fooled, lines, strict=True))


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def true_ms() -> Array:
    return np.asarray(SCRIPT["TRUE_MS"])


@pytest.mark.parametrize("kind", SCRIPT["NOISES"])
def test_noise_of_step_times_leaves_their_ratios_as_they_are(kind: str) -> None:
    """In the median over many rounds; and it is noise of the kind that it says."""
    rounds, steps = 20_000, len(true_ms())
    logs = np.log(SCRIPT["timed"](kind, np.random.default_rng(9), rounds, 0.02) / true_ms())
    ratios = logs[:, 1:] - logs[:, :1]
    # Of 20,000 rounds, 0.02 sqrt(2) each; 2.31 times the variance where neighbours are alike.
    assert abs(np.median(ratios, axis=0)).max() < 5 * 1.2533 * 0.02 * math.sqrt(2 * 2.31 / rounds)

    def lag(values: Array) -> float:
        return float(np.corrcoef(values[1:], values[:-1])[0, 1])

    assert (lag(ratios[:, 0]) > 0.45) == (kind == "steps go on")
    assert (lag(logs.mean(1)) > 0.4) == (kind in ("machine goes on", "drift", "steps go on"))
    # Those of decoding, a median of three, hardly ever are outliers.
    assert abs((logs[:, 1:] > 0.5).mean() - 0.05 * (kind == "outliers")) < 0.002 or kind == "drift"
    assert steps == len(SCRIPT["STEPS"])


def test_a_drifting_machine_rises_by_half_over_its_rounds() -> None:
    """Two rounds forwards and two backwards, as steps are run there."""
    slow = SCRIPT["drifting"](10, 10)
    assert slow[0, 0] == 1
    forwards = np.diff(slow, axis=1) > 0
    assert (forwards == np.array([1, 1, 0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)[:, None]).all()
    assert slow.max() == pytest.approx(1.5, abs=0.5 / 10 / len(true_ms()) + 1e-12)


def test_intervals_of_step_times_hold_the_truth() -> None:
    """In every noise, after every number of rounds, and under the rule that stops for certainty."""
    lines = [line for kind in SCRIPT["NOISES"] for line in SCRIPT["timings"](kind, MEMBERS, 25, _rng(10))]
    assert len(lines) == len(SCRIPT["NOISES"]) * (len(SCRIPT["ROUNDS"]) + len(SCRIPT["SPREADS"]))
    assert all(line.met for line in lines)
    for line in lines:
        assert sum(line.rates) == pytest.approx(1)
    assert np.mean([line.rates[0] for line in lines]) >= 0.95 - noise(25 * len(lines))


def test_a_stop_is_the_first_round_that_is_sure() -> None:
    ms = SCRIPT["timed"]("log-normal", np.random.default_rng(11), 100, 0.02)
    mixes = SCRIPT["round_mixes"](SCRIPT["STEPS"], SCRIPT["GAMMA"])
    rounds = len(SCRIPT["stopped"](ms, mixes))
    kinds = [step for _, step, _ in SCRIPT["STEPS"]]
    r = [SCRIPT["autocorrelation"](zip(kinds, ms[:count].T, strict=True)) for count in range(6, rounds + 1)]
    errors = [SCRIPT["largest_error"](ms[:count], mixes, each) for count, each in enumerate(r, start=6)]
    assert 6 < rounds < 100
    assert errors[-1] < 0.02
    assert all(error >= 0.02 for error in errors[:-1])


NONE = [f"--{part}=0" for part in SCRIPT["PARTS"] if part not in ("intervals", "gates", "choices")]
SMALL = ["--intervals", "60", "--gates", "4", "--choices", "4", *NONE, "--members", "10"]


def test_what_it_prints_names_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"](SMALL) == 0
    text = capsys.readouterr().out
    assert re.findall(r"[\d,]+ samples a line", text) == [f"{count} samples a line" for count in (60, 4, 4)]
    for name in SETTINGS:
        assert len(re.findall(rf"^{name} ", text, re.MULTILINE)) == 6 + 2 + 4
    assert text.count("   met\n") == len(SETTINGS) * (3 + 1 + 2)
    assert text.endswith("\n0 not met\n")


def too_narrow(function: Any) -> Any:
    """An interval of half the width."""

    def narrowed(*arguments: Any) -> Any:
        found = function(*arguments)
        low, high = ((found.value + end) / 2 for end in (found.low, found.high))
        return Interval(found.value, low, high)

    return narrowed


def certain(function: Any) -> Any:
    """Bounds that meet in the middle."""
    return lambda *arguments: (math.sqrt(math.prod(function(*arguments))),) * 2


def easily_convinced(function: Any) -> Any:
    """A verdict at a confidence of 30 %."""
    return lambda *arguments, **options: function(*arguments[:-1], 0.3, **options)


def generous(function: Any) -> Any:
    """A verdict at a threshold that is 5 % too low."""
    return lambda found, threshold, *arguments, **options: function(found, 0.95 * threshold, *arguments, **options)


def surer(function: Any) -> Any:
    """A speedup that claims to be three times as sure as it is."""

    def claimed(*arguments: Any) -> Any:
        found = function(*arguments)
        error = found.sampling_error / 3
        return dataclasses.replace(found, sampling_error=error, skewness=0.0, unseen_slower=0.0, unseen_faster=0.0)

    return claimed


@pytest.mark.parametrize(
    ("name", "wrong", "part", "expected"),
    [
        ("pooled_share", too_narrow, "intervals", 1),
        ("tokens_interval", too_narrow, "intervals", 1),
        ("speedup_interval", too_narrow, "intervals", 1),
        ("decide_sequentially", easily_convinced, "gates", 1),
        ("decide", generous, "choices", 1),
        ("timing_bounds", certain, "step_times", 6),
        ("known", surer, "gains", 9),
    ],
)
def test_what_is_wrong_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, part: str, expected: int
) -> None:
    """In one setting, and no other part, to be quick."""
    title, header, _, measured = SCRIPT["PARTS"][part]
    setting = {"step_times": "log-normal", "gains": "other draft"}.get(part, "different")
    monkeypatch.setitem(GLOBALS, "PARTS", {part: (title, header, [setting], measured)})
    monkeypatch.setitem(GLOBALS, name, wrong(GLOBALS[name]))
    samples = "120" if part != "step_times" else "10"
    assert SCRIPT["main"]([f"--{part}", samples, "--members", "10"]) == 1
    assert capsys.readouterr().out.endswith(f"\n{expected} not met\n")


def test_help_prints_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        SCRIPT["main"](["--help"])
    assert "95 % intervals" in capsys.readouterr().out
