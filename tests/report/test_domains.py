"""Domains: what is best and next best in each, and on which of them alone the draft of the verdict is faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.rounds import StepTime, StepTimes, Timing, without_draft
from alphaprof.costs.speedup import Mix
from alphaprof.report.answer import OnFor
from alphaprof.report.asked import Asked, draft_pools
from alphaprof.report.judge import on_for
from alphaprof.report.speeds import deciding_interval
from alphaprof.report.verdict import CrossFit, Question, held_out
from alphaprof.run.reader import Run
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from tests.loops import each
from tests.reporting import asked, reported
from tests.synthetic import Domain, Recipe, stored_totals, write_run

# The draft model is right in code, and hardly ever in notes; prompt lookup finds as much everywhere.
DOMAINS = {
    "code": Domain(documents=40, alpha=0.95, spread=0.03),
    "chat": Domain(documents=48, alpha=0.3, spread=0.05),
    "notes": Domain(documents=24, alpha=0.03, spread=0.02),
}
MIXED = Recipe(domains=DOMAINS, lookups=("ngram",), gammas=(1, 4), decision={"min_speedup": 1.05})
# One draft model that costs half a step: code gains by it, and notes get slower.
DEAR = Recipe(domains={name: DOMAINS[name] for name in ("notes", "code")}, gammas=(1, 4), draft_ms=5.0)
SHARES = {"code": 0.75, "notes": 0.25}


class Anew:
    """A run read again: tokens and times of its documents by draft and γ, from the stored totals and the recipe's times."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        documents = run.documents().to_pandas().set_index("document")
        self.domain, self.spent = documents["domain"].astype(str).to_numpy(), {}
        for draft in run.manifest.drafts:
            totals = stored_totals(run, draft)
            totals = totals[totals["rule"] == "strict"].set_index("document").loc[documents.index]
            self.tokens = totals["tokens"].to_numpy(dtype=float)
            for gamma in run.gammas:
                drafted = np.array(totals[f"drafted_depths_{gamma}"].tolist()).sum(1)
                step = recipe.extra_ms + (recipe.draft_ms if draft in recipe.drafts else 0.0)
                once = 10 + (0.0 if draft in recipe.drafts else recipe.lookup_ms)
                self.spent[draft, gamma] = (totals[f"rounds_{gamma}"].to_numpy() * once + drafted * step) / 10

    def time(self, option: tuple[str, int] | None, rows: Any) -> float:
        """The time of some documents in units of that without a draft (None)."""
        return float(self.spent[option][rows].sum() / self.tokens[rows].sum()) if option else 1.0


def pools_of(run: Run) -> tuple[dict[str, dict[str, DocumentTotals]], Asked]:
    inputs = Asked.of(run, run.manifest.profile)
    pools: dict[str, dict[str, DocumentTotals]] = {}
    for item in draft_pools(inputs, inputs.deciding):
        pools.setdefault(item.draft, {})[item.domain] = item.pool
    return pools, inputs


def test_the_best_and_the_next_best_by_hand(tmp_path: Path) -> None:
    """Of each domain: what is fastest on all documents, and then of the other draft; both by what each half does as the
    other half chose.
    """
    run = write_run(tmp_path / "run", MIXED)
    report, anew, (pools, inputs) = asked(run), Anew(run, MIXED), pools_of(run)
    assert [item.share for item in report.domains] == sorted((item.share for item in report.domains), reverse=True)
    for item in report.domains:
        second = held_out({item.answer.domain: pools["small"][item.answer.domain].units.lots})[item.answer.domain]
        rows = np.flatnonzero(anew.domain == item.answer.domain)
        halves = (rows[~second], rows[second])

        def fastest(options: list[tuple[str, int]], places: Any) -> tuple[str, int]:
            return min(options, key=lambda option: anew.time(option, places))  # noqa: B023

        every = list(anew.spent)
        best = fastest(every, rows)
        others = [option for option in every if option[0] != best[0]]
        next_best, ways = fastest(others, rows), []
        assert item.next_best is not None
        assert [(one.draft, one.gamma) for one in (item.answer, item.next_best)] == [best, next_best]
        for one, options in ((item.answer, every), (item.next_best, others)):
            crossed = [fastest(options, half) for half in halves[::-1]]
            spent = sum(anew.spent[option][half].sum() for option, half in zip(crossed, halves, strict=True))
            assert one.speedup.value == pytest.approx(anew.tokens[rows].sum() / spent)
            sides = zip(crossed, (~second, second), strict=True)
            parts = [
                (pools[draft][item.answer.domain].counts(gamma).rows(mask), inputs.timing.times[draft])
                for (draft, gamma), mask in sides
            ]
            ways.insert(0, [parts])
        assert item.ahead.value == pytest.approx(item.answer.speedup.value / item.next_best.speedup.value)
        assert item.ahead == deciding_interval(Mix((item.answer.domain,), (1.0,)).gain(*ways), 0.95)


@pytest.mark.parametrize("weights", [None, SHARES], ids=["as observed", "given weights"])
def test_a_domain_that_gets_slower_is_named_by_what_leaving_it_out_gains(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    """Over all documents: values added up anew, bounds that decide by the mix of both ways."""
    run = write_run(tmp_path / "run", DEAR)
    report, anew, (pools, inputs) = asked(run, weights=weights), Anew(run, DEAR), pools_of(run)
    only, option = report.traffic.only, (report.answer.draft, report.answer.gamma)
    assert only.domains == ("code",)
    rows = {domain: anew.domain == domain for domain in DEAR.domains}
    shares = weights or {domain: anew.tokens[mask].sum() / anew.tokens.sum() for domain, mask in rows.items()}
    everywhere, confined = (
        sum(shares[domain] * anew.time(used if domain == "notes" else option, mask) for domain, mask in rows.items())
        for used in (option, None)
    )
    assert only.speedup.value == pytest.approx(1 / confined)
    assert only.gain.value == pytest.approx(everywhere / confined)
    domains, times = list(weights or report.traffic.weights), inputs.timing.times[report.answer.draft]
    first = [(pools[report.answer.draft][domain].counts(report.answer.gamma), times) for domain in domains]
    second = [one if domain == "code" else without_draft(*one) for domain, one in zip(domains, first, strict=True)]
    mix = Mix.of(weights) if weights else Mix(tuple(domains), None, inputs.strata)
    for found, one in ((only.speedup, mix.routed(second)), (only.gain, mix.gain(first, second))):
        low, high = one.bounds(1 - 0.95)  # halves of the timing rounds are a little less sure than all of them
        assert (found.value, found.low, found.high) == pytest.approx((one.value, low, high), rel=1e-3)
    assert only.gain.low > 1


def test_a_domain_without_weight_is_not_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", MIXED)
    weights = {"code": 0.5, "chat": 0.0, "notes": 0.5}
    assert asked(run, draft="small", gamma=4, weights=weights).traffic.only.domains == ("code",)


def test_where_every_domain_gains_or_there_is_one_nothing_is_named(tmp_path: Path) -> None:
    assert reported(tmp_path / "one", dataclasses.replace(DEAR, domains={"notes": DOMAINS["notes"]})).traffic.only is None
    both = {"a": DOMAINS["code"], "b": DOMAINS["code"]}
    assert reported(tmp_path / "both", dataclasses.replace(DEAR, domains=both)).traffic.only is None
    neither = {"a": DOMAINS["notes"], "b": DOMAINS["notes"]}
    assert reported(tmp_path / "neither", dataclasses.replace(DEAR, domains=neither)).traffic.only is None


def test_what_keeps_a_verdict_from_go_keeps_domains_from_being_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", DEAR)
    assert asked(run).traffic.only is not None
    assert asked(run, served_dtype="fp8").traffic.only is None


# A round of one draft takes one and a half decode steps: a document of 100 tokens breaks even with 100 / 1.5 rounds.
TIMES = StepTimes({1: StepTime(10.0, 0.0), 2: StepTime(12.0, 0.0)}, StepTime(3.0, 0.0))
TIMING = Timing({"small": TIMES}, "by these step times", {})
PAIR, TOKENS = ("small", 1), 100.0
QUESTION = Question(rule="strict", draft="auto", gamma="auto", min_speedup=1.1, confidence=0.95, weights=None)
WEIGHTS = [None, {"a": 0.5, "b": 0.5}]


def pool(domain: str, rounds: Any) -> DocumentTotals:
    """Documents of 100 tokens that take these rounds of one draft each."""
    columns = {
        "tokens": np.full(len(rounds), TOKENS),
        "rounds_1": rounds,
        "drafted_depths_1": rounds[:, None],
        "accepted_depths_1": TOKENS - rounds[:, None],
        "control_1": np.zeros(len(rounds)),
    }
    units = Units.named([f"{domain}{place}" for place in range(len(rounds))])
    return DocumentTotals(columns, units, "greedy", "greedy", None)


def named(speedups: Mapping[str, Any], weights: Mapping[str, float] | None, timing: Timing = TIMING) -> OnFor | None:
    """The domains that are named, from the speedups of their documents."""
    pools = {domain: pool(domain, TOKENS / 1.5 / np.array(values)) for domain, values in speedups.items()}
    mix = Mix.of(weights) if weights else Mix(tuple(speedups), None, None)
    tested = CrossFit.of({"small": pools}, timing, mix, [PAIR], chooses=False, tail=0.05)
    return on_for({"small": pools}, PAIR, timing, mix, QUESTION, tested)


def drawn(rng: np.random.Generator, size: int, value: float) -> Any:
    """Speedups of documents that are together worth `value`: their times differ by 15%."""
    return value / (1 + 0.15 * rng.standard_normal(size))


@each("weights", WEIGHTS)
@each(("value", "at_most"), [(1.0, 0.05), (1.3, 0.0), (0.8, 0.0)])
def test_equal_domains_are_hardly_ever_told_apart(weights: Mapping[str, float] | None, value: float, at_most: float) -> None:
    """200 runs of twice 30 documents. What is worst is that both break even: nothing is gained by leaving out either."""
    rng = np.random.default_rng(39)
    runs = [named({domain: drawn(rng, 30, value) for domain in "ab"}, weights) for _ in range(200)]
    assert sum(found is not None for found in runs) <= at_most * len(runs)


@each("weights", WEIGHTS)
def test_a_domain_that_is_clearly_slower_is_nearly_always_left_out(weights: Mapping[str, float] | None) -> None:
    rng = np.random.default_rng(40)
    runs = [named({"a": drawn(rng, 30, 1.4), "b": drawn(rng, 30, 0.8)}, weights) for _ in range(200)]
    found = [one for one in runs if one is not None]
    assert len(found) >= 0.95 * len(runs)
    assert {one.domains for one in found} == {("a",)}
    speedup, gain = 1 / (0.5 / 1.4 + 0.5), (0.5 / 1.4 + 0.5 / 0.8) / (0.5 / 1.4 + 0.5)
    for truth, bounds in ((speedup, [one.speedup for one in found]), (gain, [one.gain for one in found])):
        wrong = [sum(one.low > truth for one in bounds), sum(one.high < truth for one in bounds)]
        assert max(wrong) <= (0.05 + 3 * math.sqrt(0.05 * 0.95 / len(runs))) * len(runs)


def test_halves_that_leave_out_different_domains_name_none() -> None:
    """Of documents, and of timing rounds; however sure all of them together are."""
    slow, fast = np.full(30, 0.7), np.full(30, 1.4)
    assert named({"a": fast, "b": slow}, None).domains == ("a",)
    second = held_out({domain: pool(domain, slow).units.lots for domain in "ab"})["b"]
    assert named({"a": fast, "b": np.where(second, 1.02, slow)}, None) is None
    dear, cheap = (dataclasses.replace(TIMES, draft=StepTime(ms, 0.0)) for ms in (3.0, 0.0))
    for first, second in ((dear, cheap), (cheap, dear)):
        split = dataclasses.replace(TIMING, halves=({"small": first}, {"small": second}))
        assert named({"a": fast, "b": np.full(30, 0.9)}, None, split) is None


@each(("rounds", "told"), [(5, False), (6, True)])
def test_step_times_of_too_few_rounds_name_none(rounds: int, told: bool) -> None:
    """As many as GO takes."""

    def timed(time: StepTime) -> StepTime:
        return dataclasses.replace(time, rounds=(time.ms,) * rounds)

    times = StepTimes({n: timed(time) for n, time in TIMES.target.items()}, timed(TIMES.draft))
    found = named({"a": np.full(30, 1.4), "b": np.full(30, 0.7)}, None, dataclasses.replace(TIMING, times={"small": times}))
    assert (found is not None) == told
