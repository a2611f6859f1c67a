"""What stands against a verdict on the whole traffic: text without rounds, and text that is not what it is said to be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from alphaprof.render.format import percent
from alphaprof.report.build import build_report
from alphaprof.stats.estimate import ratio
from tests.reporting import log_of, only, recounted, reported, rows_of
from tests.synthetic import Domain, Recipe, write_run

FAST = Domain(documents=16, alpha=0.9)
STORY = Domain(documents=16, alpha=0.9, continuation="sampled", temperature=0.8)
CORPUS = Domain(documents=60, alpha=0.05, on_policy=False, continuation="text")


def test_a_domain_is_judged_by_all_of_its_text_or_not_at_all(tmp_path: Path) -> None:
    """Its weight counts the plain text as well, which no rule has rounds on."""
    report = reported(tmp_path, Recipe(domains={"code": FAST, "chat": FAST}, sources=[("code", CORPUS)]))
    assert report.answer.verdict == "UNDECIDED"
    assert "(code)" in report.answer.reason
    assert report.answer.speedup is None


@pytest.mark.parametrize("continuation", ["sampled", "given"])
def test_text_that_was_not_drawn_from_the_target_gets_no_verdict(tmp_path: Path, continuation: str) -> None:
    false = dataclasses.replace(STORY, documents=30, uniform=True, continuation=continuation)
    recipe = Recipe(domains={"false": false}, rules=("one_hot", "lossless"))
    report = reported(tmp_path, recipe)
    result = only(report, "false", rule="one_hot")
    assert result.verdict == report.answer.verdict == "UNDECIDED"
    assert "was not sampled from these distributions" in result.reason
    assert "was not sampled from these distributions" in report.answer.reason
    honest = reported(tmp_path / "honest", dataclasses.replace(recipe, domains={"story": STORY}))
    assert "not drawn" not in only(honest, "story", rule="one_hot").reason


def test_counts_of_expected_rounds_agree_with_tokens_per_round(tmp_path: Path) -> None:
    """The control variate mends all of them, or one report would hold two estimates."""
    report = reported(tmp_path, Recipe(domains={"story": STORY}, rules=("lossless",)))
    result = only(report, "story", rule="lossless")
    assert result.estimator == "expected"
    for item in result.gammas:
        assert item.acceptance_length >= item.tokens_per_round.value - 1e-9  # texts end within a round
        assert item.acceptance_length - 1 == pytest.approx(sum(item.marginal))
        assert all(0 <= value <= 1 for value in (*item.marginal, *item.conditional))


TWO = Recipe(
    domains={"fast": Domain(documents=24, alpha=0.95, spread=0.02), "slow": Domain(documents=24, alpha=0.05, spread=0.02)},
    decision={"draft": "small", "gamma": 4},
)


def test_the_interval_of_observed_traffic_is_that_of_one_ratio(tmp_path: Path) -> None:
    """Rounds of all documents counted anew from the log: their time over their tokens, with the spread of each document."""
    run = write_run(tmp_path / "run", dataclasses.replace(TWO, timing_error=0.0))
    positions = log_of(run)
    documents = [
        recounted(rows, 4) for domain in TWO.domains for _, rows in rows_of(positions, domain, "small").groupby("document")
    ]
    tokens = np.array([one["tokens"] for one in documents])
    cost = {0: 1.0, **{m: (10 + 0.5 * m + m) / 10 for m in range(1, 5)}}
    time = np.array([one["rounds"] * cost[4] for one in documents])
    found = ratio(time, tokens)
    speedup = build_report(run).answer.speedup
    assert speedup.value == pytest.approx(1 / found.value, rel=0.02)  # rounds at the end of a text draft fewer tokens
    t = float(stats.t.ppf(0.95, found.freedom))
    assert math.log(speedup.high / speedup.low) == pytest.approx(2 * t * found.stderr / found.value, rel=0.1)


def test_a_domain_of_one_document_is_part_of_observed_traffic(tmp_path: Path) -> None:
    """And with weights, of which it would be a known share, one document leaves it unknown."""
    rare = dataclasses.replace(TWO, domains={"fast": Domain(documents=30, alpha=0.95), "rare": Domain(documents=1)})
    assert reported(tmp_path / "observed", rare).answer.verdict == "GO"
    weighted = dataclasses.replace(rare, decision={**TWO.decision, "weights": {"fast": 0.9, "rare": 0.1}})
    answer = reported(tmp_path / "given", weighted).answer
    assert answer.verdict == "UNDECIDED"
    assert "weights need at least two independent documents longer than one token in every domain" in answer.reason


LENGTHS = {
    "easy": Domain(documents=20, alpha=0.9, shortest=20, longest=30),
    "hard": Domain(documents=20, alpha=0.3, shortest=300, longest=400),
}


@pytest.mark.parametrize(
    ("domains", "says"),
    [
        ({"code": Domain(documents=30)}, None),
        (LENGTHS, "the speedup may be too high if longer ones are missing here"),
        ({**LENGTHS, "easy": dataclasses.replace(LENGTHS["easy"], alpha=0.1)}, "too low if longer ones are missing here"),
    ],
    ids=["alike", "long is slower", "long is faster"],
)
def test_a_long_tail_of_lengths_is_pointed_out_with_its_direction(
    tmp_path: Path, domains: dict[str, Domain], says: str | None
) -> None:
    report = reported(tmp_path, Recipe(domains=domains, gammas=(3,), decision={"draft": "small", "gamma": 3}))
    notes = [note.message for note in report.notes if note.code == "long_tail"]
    assert [says in note for note in notes if says] == ([True] if says else [])
    assert bool(notes) == bool(says)


@pytest.mark.parametrize(("short", "fires"), [(29, True), (89, True), (119, False)])
def test_long_documents_that_a_sample_may_miss_are_pointed_out(tmp_path: Path, short: int, fires: bool) -> None:
    """One of 500 tokens among some of 40. A bound takes 1 - 0.05^(1 / n) of traffic to be of a kind that n documents
    miss: as long as that one, these would be 500 times that share for every mean length.
    With 120 documents that is 12.3 to 43.8, below a quarter of all.
    """
    domains = {
        "short": Domain(documents=short, shortest=40, longest=40),
        "long": Domain(shortest=500, longest=500, documents=1),
    }
    report = reported(tmp_path, Recipe(domains=domains, gammas=(3,), decision={"draft": "small", "gamma": 3}))
    mean, rest = (40 * short + 500) / (short + 1), (1 - 0.05 ** (1 / (short + 1))) * 500
    assert (rest / (rest + mean) > 0.25) == fires
    found = [note.message for note in report.notes if note.code == "long_tail"]
    says = f"a few documents of 500 tokens that {short + 1} miss could be {percent(rest / (rest + mean))} of all tokens"
    assert [message.startswith(says) for message in found] == ([True] if fires else [])
    assert (report.run.longest, report.run.mean_length) == (500, pytest.approx(mean))


@pytest.mark.slow
def test_verdicts_of_all_domains_together_are_those_of_holm(tmp_path: Path) -> None:
    """A GO that is wrong with 5 % by itself; of seven, any is: those stay that hold at 5 % / 7, then 5 % / those left."""
    alphas = dict(zip("abcdefg", (0.9, 0.55, 0.5, 0.475, 0.47, 0.465, 0.3), strict=True))
    domains = {name: Domain(documents=64, alpha=alpha) for name, alpha in alphas.items()}
    recipe = Recipe(domains=domains, decision={"draft": "small", "gamma": 2, "min_speedup": 1.3})
    run = write_run(tmp_path / "run", recipe)

    def alone(error: float) -> dict[str, str]:
        decision = run.manifest.config["decision"] | {"confidence": 1 - error}
        report = build_report(run, config=run.manifest.config | {"decision": decision})
        return {item.answer.domain: item.answer.verdict for item in report.domains}

    expected = dict.fromkeys(alphas, "UNDECIDED")
    for verdict in ("GO", "NO-GO"):
        left = set(alphas)
        while held := {name for name in left if alone(0.05 / len(left))[name] == verdict}:
            expected |= dict.fromkeys(held, verdict)
            left -= held
    plain = alone(0.05)
    assert {item.answer.domain: item.adjusted for item in build_report(run).domains} == expected
    assert {plain["a"], plain["g"]} == {expected["a"], expected["g"]} == {"GO", "NO-GO"}
    assert expected != plain
