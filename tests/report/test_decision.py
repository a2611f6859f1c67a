"""Verdicts: bounds against the threshold, halves of documents, and how often a verdict is wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from alphaprof.costs import timing as costs_timing
from alphaprof.costs.rounds import StepTime, StepTimes, Timing, free_draft
from alphaprof.costs.speedup import Mix, Speedup, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import step_times
from alphaprof.report.verdict import (
    Choice,
    CrossFit,
    Decision,
    Question,
    chance_of_settling,
    decide,
    documents_needed,
    held_out,
    judge,
    pooled_speedup,
)
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts
from tests.loops import each

CONFIDENCE = 0.95


def found(value: float, error: float = 0.1, documents: int = 10, timing: float = 0.0) -> Speedup:
    """A speedup of one domain."""
    return Speedup(value, error, timing, documents - 1, documents)


AGREED = Choice(("small", 4), (("small", 4), ("small", 4)))
TORN = Choice(("small", 4), (("small", 4), ("ngram", 8)))


def decided(one: Speedup | None, min_speedup: float, documents: int = 0) -> Decision:
    """The verdict on a draft and gamma that nothing chose."""
    return decide(CrossFit([], one), min_speedup, CONFIDENCE, documents)


def factor(one: Speedup) -> float:
    """What bounds lie away from the value, from Student's t as scipy has it."""
    documents = float(stats.t.ppf(CONFIDENCE, one.freedom)) * one.sampling_error
    return math.exp(math.hypot(documents, float(stats.norm.ppf(CONFIDENCE)) * one.timing_error))


@pytest.mark.parametrize(
    ("end", "threshold", "verdict"),
    [(-1, 0.99, "GO"), (-1, 1.01, "UNDECIDED"), (1, 0.99, "UNDECIDED"), (1, 1.01, "NO-GO")],
)
def test_the_lower_bound_decides_on_go_and_the_upper_one_on_no_go(end: int, threshold: float, verdict: str) -> None:
    """On either side of each bound."""
    one = found(1.5, timing=0.02)
    assert decided(one, threshold * 1.5 * factor(one) ** end).verdict == verdict


def test_a_lower_bound_at_the_threshold_is_go_and_an_upper_bound_there_is_not_no_go() -> None:
    low, high = found(1.5).bounds(1 - CONFIDENCE)
    assert decided(found(1.5), low).verdict == "GO"
    assert decided(found(1.5), high).verdict == "UNDECIDED"


@pytest.mark.parametrize("one", [None, Speedup(3.0, math.inf, 0.0, 0, 1), Speedup(0.3, math.inf, 0.01, 0, 5)])
def test_what_is_unknown_is_undecided(one: Speedup | None) -> None:
    decision = decided(one, 1.1)
    assert (decision.verdict, decision.low, decision.high) == ("UNDECIDED", 0.0, math.inf)
    assert decision.documents_needed is None
    assert decision.reason.endswith("profile 5 or more")


@pytest.mark.parametrize(("threshold", "verdict"), [(0.8, "GO"), (0.81, "UNDECIDED"), (4.0, "UNDECIDED"), (4.01, "NO-GO")])
@pytest.mark.parametrize("documents", [1, 2, 4])
def test_few_documents_decide_only_what_step_times_decide(documents: int, threshold: float, verdict: str) -> None:
    """However much they agree."""
    one = Speedup(3.0, 1e-6 if documents > 1 else math.inf, 0.0, documents - 1, documents, least=0.8, most=4.0)
    decision = decided(one, threshold)
    assert (decision.verdict, decision.low, decision.high) == (verdict, 0.8, 4.0)
    assert ("at any acceptance" in decision.reason) == (verdict != "UNDECIDED")
    enough = dataclasses.replace(one, sampling_error=1e-6, freedom=4, documents=5)
    assert decided(enough, 2.9).verdict == "GO"


@pytest.mark.parametrize(("above", "says"), [(True, "bound 1.100 reaches 1.1"), (False, "bounds 1.09997 and")])
def test_a_bound_is_never_rounded_across_the_threshold(above: bool, says: str) -> None:
    """A lower bound of 1.09996667 is undecided and must not read as 1.100."""
    shift = 1e-4 / 3 if above else -1e-4 / 3
    one = found((1.1 + shift) * factor(found(1.0)))
    decision = decided(one, 1.1)
    assert decision.verdict == ("GO" if above else "UNDECIDED")
    assert says in decision.reason


@each("value", [1.6, 1.55, 1.45, 1.3])
@each("documents", [5, 30])
@each("timing", [(0.0, math.inf), (0.005, math.inf), (0.005, 5)])
def test_documents_needed_is_the_smallest_number_that_settles(
    value: float, documents: int, timing: tuple[float, float]
) -> None:
    """Against every smaller number, one by one."""
    one = dataclasses.replace(found(value, 0.2, documents, timing[0]), timing_freedom=timing[1])
    needed = documents_needed(one, 1.5, CONFIDENCE)
    if needed is None:
        assert chance_of_settling(one, 10**6, 1.5, CONFIDENCE) < 0.8
    else:
        assert chance_of_settling(one, needed, 1.5, CONFIDENCE) >= 0.8
        assert not any(chance_of_settling(one, fewer, 1.5, CONFIDENCE) >= 0.8 for fewer in range(documents, needed))


@pytest.mark.parametrize(("own", "of"), [(None, ""), (found(3.0), " (each half of the rounds counts by itself)")])
def test_step_times_without_bounds_leave_it_undecided_and_say_so(own: Speedup | None, of: str) -> None:
    """Both halves need three rounds where they choose differently."""
    decision = decide(CrossFit([], found(3.0, timing=math.inf), TORN if own else None, own), 1.1, CONFIDENCE)
    assert (decision.verdict, decision.low, decision.high) == ("UNDECIDED", 0, math.inf)
    assert decision.reason == f"step times of fewer than 3 rounds have no bounds{of}"
    assert decision.remedy.startswith("time more rounds")


def test_a_reason_begins_with_the_remedy_for_the_step_times_that_it_rests_on() -> None:
    """Step times off by 50%, and documents that agree."""
    unsure = StepTimes({tokens: StepTime(1.0, 0.5) for tokens in (1, 2)}, StepTime(0.0, 0.0))
    timing = Timing({"draft 0": unsure}, "by a roofline", {}, surer="use other times")
    alike = {"draft 0": {"code": pool(documents(np.random.default_rng(0), 30, TRUTH, 0.1))}}
    decision = judge(alike, timing, ALONE, QUESTION, [1])[1]
    assert decision.verdict == "UNDECIDED"
    assert decision.reason.startswith("use other times (more documents alone would not settle it); by a roofline: speedup")


def test_a_choice_needs_no_more_documents_than_a_fixed_draft() -> None:
    """All documents test, so the numbers are those of all documents."""
    fixed, chosen = (decide(CrossFit([], found(1.6), choice), 1.5, CONFIDENCE) for choice in (None, AGREED))
    assert dataclasses.replace(chosen, tested=fixed.tested) == fixed
    assert chosen.remedy.startswith(
        f"a new run of {chosen.documents_needed} independent documents would settle it with a chance of 80%"
    )
    assert "on 10 independent documents" in chosen.reason


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(("mean", "own"), [(found(1.6), found(1.52)), (found(1.53), found(1.6))])
def test_where_halves_disagree_both_numbers_have_to_clear_the_threshold(mean: Speedup, own: Speedup, close: bool) -> None:
    """The lower bound is the lesser of two, the upper one the greater, and so many documents settle both."""
    torn = CrossFit([], mean, TORN, own, close)
    decision = decide(torn, 1.5, CONFIDENCE)
    each = [mean.bounds(1 - CONFIDENCE), own.bounds(1 - CONFIDENCE)]
    assert (decision.low, decision.high) == (min(low for low, _ in each), max(high for _, high in each))
    assert decision.speedup == (mean if close else own)
    needed = [documents_needed(one, 1.5, CONFIDENCE) for one in (mean, own)]
    assert decision.documents_needed == max(needed) > min(needed)
    says = "one half of the documents prefers small with 4 speculative tokens, the other ngram with 8"
    assert decision.disagreement == says
    assert decision.reason.endswith(f"; {says}")
    for threshold, verdict in ((0.999 * decision.low, "GO"), (1.001 * decision.low, "UNDECIDED")):
        assert decide(torn, threshold, CONFIDENCE).verdict == verdict
    for threshold, verdict in ((0.999 * decision.high, "UNDECIDED"), (1.001 * decision.high, "NO-GO")):
        assert decide(torn, threshold, CONFIDENCE).verdict == verdict


def test_no_number_of_documents_settles_numbers_on_both_sides_of_the_threshold() -> None:
    """Each by itself would be settled by few more; together they contradict each other however many there are."""
    apart = decide(CrossFit([], found(1.7), TORN, found(1.3)), 1.5, CONFIDENCE)
    assert apart.verdict == "UNDECIDED"
    assert all(documents_needed(found(value), 1.5, CONFIDENCE) is not None for value in (1.7, 1.3))
    assert apart.documents_needed is None
    assert apart.remedy == "profile more documents: the halves of these do not choose alike"


def test_no_number_of_documents_settles_what_is_unsettled_for_either_number() -> None:
    """The named pair's own number is at the threshold: no size clears it with 80 %."""
    torn = decide(CrossFit([], found(1.6), TORN, found(1.5, timing=0.02)), 1.5, CONFIDENCE)
    assert decided(found(1.6), 1.5).documents_needed is not None
    assert torn.documents_needed is None


@each(("value", "size"), [(1.5, 400), (1.8, 60), (1.95, 100), (1.95, 400)])
def test_a_new_run_does_not_draw_the_error_of_a_table_or_roofline_again(value: float, size: int) -> None:
    """A roofline's 14 %: new runs with the same error settle as often as is said. What times of a new run would make of it
    is another number: 25 instead of 0 % if the speedup is at the threshold.
    """
    pilot = dataclasses.replace(found(value, 0.05, 32, 0.1357), redrawn=False)
    rng, one = np.random.default_rng(8), pilot.at(size)
    off = math.hypot(pilot.sampling_error, one.sampling_error) * rng.standard_t(pilot.freedom, 4000)
    runs = [dataclasses.replace(one, value=value * math.exp(each)) for each in off]
    settled = np.mean([decided(run, 1.5).verdict != "UNDECIDED" for run in runs])
    chance = chance_of_settling(pilot, size, 1.5, CONFIDENCE)
    assert chance == pytest.approx(settled, abs=3 * math.sqrt(0.25 / 4000))
    assert abs(chance_of_settling(dataclasses.replace(pilot, redrawn=True), size, 1.5, CONFIDENCE) - chance) > 0.05


def documents(rng: np.random.Generator, size: int, value: float, spread: float) -> RoundCounts:
    """Documents whose true speedup with a free draft is `value`: rounds of 100 tokens spread around 100 / value."""
    rounds = 100 / value * rng.gamma(1 / spread**2, spread**2, size)
    nothing = np.zeros(size)
    return RoundCounts(np.full(size, 100.0), rounds, rounds[:, None], nothing[:, None], nothing, np.arange(size).astype(str))


def sampled(rng: np.random.Generator, size: int, value: float, spread: float, luck: float) -> RoundCounts:
    """The same on drawn texts: their luck adds to the rounds of each, and the control variate knows most of it."""
    plain, known = documents(rng, size, value, spread), luck * rng.normal(size=size)
    rounds = plain.rounds + known + 0.1 * luck * rng.normal(size=size)
    return dataclasses.replace(plain, rounds=rounds, drafted=rounds[:, None], control=-3 * known)


def pool(counts: RoundCounts) -> DocumentTotals:
    """Documents as a pool of one domain with gamma 1."""
    columns = {
        "tokens": counts.tokens,
        "rounds_1": counts.rounds,
        "drafted_depths_1": counts.drafted,
        "accepted_depths_1": counts.accepted,
        "control_1": counts.control,
    }
    return DocumentTotals(columns, Units.named(counts.cluster.tolist()), "greedy", "greedy", None)


DRAFTS, SIZE, REPEATS, TRUTH = 20, 40, 400, 1.5
QUESTION = Question(rule="strict", draft="auto", gamma="auto", min_speedup=TRUTH, confidence=CONFIDENCE, weights=None)
TIMES: Mapping[str, StepTimes] = {f"draft {index}": free_draft(1) for index in range(DRAFTS)}
ALONE = Mix.of({"code": 1.0})
TIMING = Timing(TIMES, "by these step times", {})


def test_cross_fitting_is_not_fooled() -> None:
    """The best of 20 drafts that are exactly at the threshold is GO as rarely as one of them would be: nominally 5 %."""
    rng, verdicts = np.random.default_rng(3), []
    for _ in range(REPEATS):
        sample = {name: {"code": pool(documents(rng, SIZE, TRUTH, 0.3))} for name in TIMES}
        verdicts.append(judge(sample, TIMING, ALONE, QUESTION, [1])[1].verdict)
    three_sigma = 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    assert verdicts.count("GO") / REPEATS <= 0.05 + three_sigma


def test_verdicts_at_the_threshold_are_wrong_as_rarely_as_they_say() -> None:
    """One draft and gamma, 25 documents, a speedup exactly at the threshold: GO and NO-GO nominally 5 % each."""
    rng = np.random.default_rng(11)
    samples = [speedup([documents(rng, 25, TRUTH, 0.3)], [1.0], free_draft(1)) for _ in range(1000)]
    verdicts = [decided(sample, TRUTH).verdict for sample in samples]
    for wrong in ("GO", "NO-GO"):
        assert abs(verdicts.count(wrong) / 1000 - 0.05) <= 3 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("size", [12, 25])
def test_verdicts_with_a_control_variate_are_wrong_as_rarely_as_they_say(size: int) -> None:
    """Drawn texts at the threshold: at most 5 % GO and NO-GO each, though the slope is fitted to the same documents. These
    hardly differ, so that their bounds are those of documents that were not seen.
    """
    rng = np.random.default_rng(12)
    samples = [speedup([sampled(rng, size, TRUTH, 0.03, 10.0)], [1.0], free_draft(1)) for _ in range(2000)]
    verdicts = [decided(sample, TRUTH).verdict for sample in samples]
    for wrong in ("GO", "NO-GO"):
        assert verdicts.count(wrong) / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_a_fixed_draft_and_gamma_are_tested_on_all_documents() -> None:
    rng = np.random.default_rng(0)
    only = {"draft 0": {"code": pool(documents(rng, SIZE, 2.0, 0.3))}}
    option, decision = judge(only, TIMING, ALONE, QUESTION, [1])
    assert option == ("draft 0", 1)
    assert decision.speedup == pooled_speedup(only, ("draft 0", 1), TIMES, ALONE)
    assert decision.tested.choice is None
    assert decision.disagreement == ""


Candidates = dict[str, dict[str, DocumentTotals]]


def second_half(candidates: Candidates) -> dict[str, np.ndarray[Any, Any]]:
    """Which documents of each domain are in the second half."""
    return held_out({domain: each.units.lots for domain, each in next(iter(candidates.values())).items()})


def test_a_chosen_draft_is_tested_on_all_documents_if_the_halves_agree() -> None:
    rng = np.random.default_rng(0)
    two = {name: {"code": pool(documents(rng, SIZE, value, 0.3))} for name, value in (("draft 0", 1.2), ("draft 1", 1.9))}
    option, decision = judge(two, TIMING, ALONE, QUESTION, [1])
    assert option == ("draft 1", 1)
    assert decision.tested.choice == Choice(option, (option, option))
    texts = two["draft 1"]["code"]
    assert decision.speedup.value == pytest.approx(texts["tokens"].sum() / texts["rounds_1"].sum())
    whole = pooled_speedup(two, option, TIMES, ALONE)
    assert dataclasses.astuple(decision.speedup) == pytest.approx(dataclasses.astuple(whole))
    assert decision.tested.own is None
    assert decision.disagreement == ""
    assert "40 independent documents" in decision.reason


Shares = Mapping[str, Mapping[int, tuple[float, float]]]


def alone_in_halves(texts: Mapping[str, tuple[tuple[float, float], Shares]]) -> Candidates:
    """80 documents a domain under some drafts. `texts`: by domain, the tokens of a document of either half; by draft and
    half, rounds by tokens: their mean and w, where one document in four is 3 w above it, and the others w below.
    """
    units = Units.named(f"{domain} {number}" for domain in texts for number in range(80))
    places = {domain: np.arange(80) + 80 * place for place, domain in enumerate(texts)}
    second = held_out({domain: units.take(each).lots for domain, each in places.items()})
    found: Candidates = {}
    for domain, (tokens, shares) in texts.items():
        size = np.where(second[domain], tokens[1], tokens[0])
        for draft, by_half in shares.items():
            rounds = np.empty(80)
            for half, (mean, wide) in by_half.items():
                rows = np.flatnonzero(second[domain] == bool(half))
                rounds[rows] = size[rows] * (mean + wide * np.where(np.arange(40) % 4 == 0, 3, -1))
            nothing = np.zeros(80)
            counts = RoundCounts(size, rounds, rounds[:, None], nothing[:, None], nothing, nothing.astype(str))
            found.setdefault(draft, {})[domain] = dataclasses.replace(pool(counts), units=units.take(places[domain]))
    return found


def spent_on(candidates: Candidates, draft: str, domain: str, half: int) -> float:
    """Rounds of a draft on one half of a domain's documents: what they take if drafts cost nothing."""
    rows = second_half(candidates)[domain] == bool(half)
    return float(candidates[draft][domain]["rounds_1"][rows].sum())


def by_halves(first: float, second: float) -> Timing:
    """Times of two halves of the timing rounds in which a round of one draft costs so many decode steps; in all rounds, as
    many as in the first half.
    """
    one, other = (
        StepTimes({1: StepTime(10.0, 0.0), 2: StepTime(10 * cost - 1, 0.0)}, StepTime(1.0, 0.0), half=half)
        for half, cost in enumerate((first, second))
    )
    halves = tuple(dict.fromkeys(TIMES, each) for each in (one, other))
    return Timing(halves[0], "by these step times", {}, halves)


@pytest.mark.parametrize(("timing", "costs"), [(TIMING, (1.0, 1.0)), (by_halves(1.05, 1.1), (1.05, 1.1))])
def test_a_chosen_draft_is_tested_with_each_half_as_the_other_half_chose(timing: Timing, costs: tuple[float, float]) -> None:
    """The first half is faster with draft 0, the second with draft 1: no rounds of documents are in the value with the draft
    that they chose, nor with the times that chose it.
    """
    shares = {"draft 0": {0: (0.6, 0.01), 1: (0.7, 0.02)}, "draft 1": {0: (0.7, 0.02), 1: (0.65, 0.01)}}
    torn = alone_in_halves({"code": ((100.0, 100.0), shares)})
    option, decision = judge(torn, timing, ALONE, QUESTION, [1])
    rounds = {(draft, half): spent_on(torn, draft, "code", half) for draft in shares for half in (0, 1)}
    assert option == ("draft 0", 1)
    assert decision.tested.choice == Choice(option, (option, ("draft 1", 1)))
    assert decision.tested.rows[1]["code"].tolist() == second_half(torn)["code"].tolist()
    crossed = costs[0] * rounds["draft 1", 0] + costs[1] * rounds["draft 0", 1]
    assert decision.tested.speedup.value == pytest.approx(8000 / crossed)
    assert decision.tested.speedup.documents == 80
    named = costs[0] * (rounds["draft 0", 0] + rounds["draft 0", 1])  # by all timing rounds, as if it was asked for by name
    assert decision.tested.own.value == decision.tested.named.value == pytest.approx(8000 / named)


# Long texts of x are in the first half, those of y in the second. A half weighs both domains alike, so the first prefers
# draft 0, for its short texts of y, and the second draft 1, for its short ones of x. All long texts are faster with the
# draft of the other half: 1.62x so, and 1.29x with either draft alone.
MIRRORED = {
    "x": ((380.0, 20.0), {"draft 0": {0: (0.95, 0.01), 1: (0.95, 0.01)}, "draft 1": {0: (0.6, 0.01), 1: (0.52, 0.01)}}),
    "y": ((20.0, 380.0), {"draft 0": {0: (0.52, 0.01), 1: (0.6, 0.01)}, "draft 1": {0: (0.95, 0.01), 1: (0.95, 0.01)}}),
}
# Each half prefers, for little, a draft that does nothing for one of its documents in four; on the other half it is steady.
UNSTEADY = {
    "x": ((100.0, 100.0), {"draft 0": {0: (0.655, 0.12), 1: (0.66, 0.0)}, "draft 1": {0: (0.66, 0.0), 1: (0.656, 0.12)}}),
}


@pytest.mark.parametrize(
    ("texts", "threshold", "close"), [(MIRRORED, 1.5, False), (UNSTEADY, 1.48, True)], ids=["worth", "spread"]
)
def test_a_mean_over_two_choices_never_carries_a_go_for_one(texts: Any, threshold: float, close: bool) -> None:
    """The lower bound of the cross-fitted speedup reaches the threshold, but that of the named pair's own does not."""
    torn = alone_in_halves(texts)
    mix = Mix.of(dict.fromkeys(texts, 1 / len(texts)))
    question = QUESTION.model_copy(update={"min_speedup": threshold})
    option, decision = judge(torn, TIMING, mix, question, [1])
    tested = decision.tested
    assert tested.choice.halves == (("draft 0", 1), ("draft 1", 1))

    def by_hand(first: str, second: str) -> float:
        times = []
        for domain in texts:
            spent = spent_on(torn, first, domain, 0) + spent_on(torn, second, domain, 1)
            times.append(spent / torn["draft 0"][domain]["tokens"].sum())
        return 1 / float(np.mean(times))

    assert tested.speedup.value == pytest.approx(by_hand("draft 1", "draft 0"))
    assert tested.own.value == pytest.approx(by_hand(option[0], option[0]))
    assert tested.close == close
    assert tested.speedup.bounds(1 - CONFIDENCE)[0] >= threshold > tested.own.bounds(1 - CONFIDENCE)[0]
    assert decision.verdict != "GO"
    assert decision.low == tested.own.bounds(1 - CONFIDENCE)[0]
    says = "one half of the documents prefers draft 0 with 1 speculative tokens, the other draft 1 with 1"
    assert decision.disagreement == says
    assert decision.reason.endswith(says)


def test_what_both_halves_prefer_is_not_tested_if_all_documents_prefer_another() -> None:
    """Long texts of x are in the first half, those of y in the second. Each half weighs its short texts as much as its long
    ones and prefers draft 0, which does nothing for long ones: all documents prefer draft 1. Both numbers decide.
    """
    each = {1.0: {"draft 0": 1.0, "draft 1": 0.8}, 0.55: {"draft 0": 0.55, "draft 1": 0.8}}
    texts = {
        domain: ((380.0, 20.0)[::order], {draft: {0: (one, 0.0), 1: (other, 0.0)} for draft, (one, other) in shares.items()})
        for domain, order in (("x", 1), ("y", -1))
        for shares in [{draft: (each[1.0][draft], each[0.55][draft])[::order] for draft in each[1.0]}]
    }
    torn = alone_in_halves(texts)
    option, decision = judge(torn, TIMING, Mix.of({"x": 0.5, "y": 0.5}), QUESTION, [1])
    assert option == ("draft 1", 1)
    assert decision.tested.choice.halves == (("draft 0", 1),) * 2
    assert decision.tested.speedup.value == pytest.approx(400 / (380 * 1.0 + 20 * 0.55))
    assert decision.speedup.value == decision.tested.own.value == pytest.approx(1 / 0.8)
    assert decision.low < 1.03 < decision.high
    says = "each half of the documents prefers draft 0 with 1 speculative tokens, both together draft 1 with 1"
    assert decision.disagreement == says


STEP_MS = {("target", "decode", 1): 10.0, ("target", "verify", 2): 11.0}
DEAR = {**STEP_MS, **{(name, "draft", 1): 20.0 for name in TIMES}}


def noisy_timing(
    rng: np.random.Generator, rounds: int, steps: Mapping[tuple[str, str, int], float], spread: float
) -> Timing:
    """Step times of these drafts from rounds with independent noise, as a run has them."""
    ms = np.array(list(steps.values())) * np.exp(spread * rng.standard_normal((rounds, len(steps))))
    rows = [
        StepRow(*step, 1, 0, time, rounds=tuple(each)) for step, time, each in zip(steps, step_times(ms), ms.T, strict=True)
    ]
    whole = StepTable(rows)

    def times(table: StepTable) -> dict[str, StepTimes]:
        known = {name: table.times(name, 1, 1, 0) for name, step, _ in steps if step == "draft"}
        return {name: each for name, each in known.items() if each is not None}

    first, second = whole.halves
    return Timing(times(whole), "by these step times", {}, (times(first), times(second)))


def test_step_times_that_chose_do_not_test() -> None:
    """20 drafts, all at the threshold, and noise of .15 in 8 rounds: what is shown is the truth, and GO as rare as it
    says. By all rounds, the lucky one looks 5 % faster than it is.
    """
    rng = np.random.default_rng(5)
    texts = documents(rng, 400, TRUTH, 0.1)
    same = {name: {"code": pool(texts)} for name in TIMES}
    exact = noisy_timing(rng, 8, DEAR, 0.0)
    truth = pooled_speedup(same, ("draft 0", 1), exact.times, ALONE).value
    question = QUESTION.model_copy(update={"min_speedup": truth})
    split, together = [], []
    for _ in range(200):
        timing = noisy_timing(rng, 8, DEAR, 0.15)
        split.append(judge(same, timing, ALONE, question, [1])[1])
        together.append(judge(same, dataclasses.replace(timing, halves=None), ALONE, question, [1])[1])
    shown, fooled = (np.mean([math.log(each.speedup.value / truth) for each in found]) for found in (split, together))
    assert abs(shown) < 0.02
    assert fooled > 0.05
    assert [each.verdict for each in split].count("GO") / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


ONE = {"draft 0": {"code": pool(documents(np.random.default_rng(0), 200, 3.0, 0.3))}}
CHEAP = {**STEP_MS, ("draft 0", "draft", 1): 1.0}


@pytest.mark.parametrize(("rounds", "verdict"), [(2, "UNDECIDED"), (5, "UNDECIDED"), (6, "GO")])
def test_a_choice_takes_step_times_of_three_rounds_in_each_half(rounds: int, verdict: str) -> None:
    """Of 5 rounds one half has 2, which have no bounds: the value is shown, and nothing decided, NO-GO neither."""
    steps = {**STEP_MS, **{(name, "draft", 1): 1.0 for name in ("draft 0", "draft 1")}}
    timing = noisy_timing(np.random.default_rng(1), rounds, steps, 0.001)
    two = dict.fromkeys(("draft 0", "draft 1"), ONE["draft 0"])
    for threshold in (QUESTION.min_speedup, 9.0):
        asked = QUESTION.model_copy(update={"min_speedup": threshold})
        decision = judge(two, timing, ALONE, asked, [1])[1]
        assert decision.verdict == (verdict if threshold < 9 or verdict == "UNDECIDED" else "NO-GO")
        assert decision.speedup is not None
        assert ("step times of fewer than 3 rounds have no bounds (each half" in decision.reason) == (rounds < 6)
        assert (decision.bounds is None) == (rounds < 6)


@pytest.mark.parametrize(("rounds", "verdict"), [(3, "UNDECIDED"), (5, "UNDECIDED"), (6, "GO"), (20, "GO")])
def test_go_takes_step_times_of_six_rounds(rounds: int, verdict: str) -> None:
    """However clear it is; a NO-GO takes three."""
    timing = noisy_timing(np.random.default_rng(1), rounds, CHEAP, 0.001)
    decision = judge(ONE, timing, ALONE, QUESTION, [1])[1]
    assert decision.verdict == verdict
    assert ("of at least 6 rounds, but there are" in decision.reason) == (verdict == "UNDECIDED")
    assert decision.reason.startswith(timing.surer) == (verdict == "UNDECIDED")
    never = QUESTION.model_copy(update={"min_speedup": 9.0})
    assert judge(ONE, timing, ALONE, never, [1])[1].verdict == "NO-GO"


def test_verification_cheaper_than_decoding_does_not_make_a_go() -> None:
    """T(2) = 0.5 T(1) is noise: the value is shown, and the lower bound is that of T(2) = T(1)."""
    rng, free = np.random.default_rng(1), {**CHEAP, ("target", "verify", 2): 5.0}
    timing = noisy_timing(rng, 20, free, 0.001)
    least = noisy_timing(rng, 20, {**CHEAP, ("target", "verify", 2): 10.0}, 0.0)
    many = {"draft 0": {"code": pool(documents(np.random.default_rng(0), 2000, 3.0, 0.3))}}
    found, bound = (pooled_speedup(many, ("draft 0", 1), each.times, ALONE) for each in (timing, least))
    assert found.value > 1.5 * bound.value
    assert found.bounds(0.05)[0] == pytest.approx(bound.bounds(0.05)[0], rel=0.01)
    asked = QUESTION.model_copy(update={"min_speedup": 1.1 * bound.value})
    assert judge(many, timing, ALONE, asked, [1])[1].verdict == "UNDECIDED"


def test_a_busy_machine_makes_no_go_of_what_its_waiting_could_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time without a processor: 1.5 times what was asked is not enough, three times is."""
    monkeypatch.setattr(costs_timing, "BUSY", 0.1)
    timing = noisy_timing(np.random.default_rng(1), 20, CHEAP, 0.001)

    def waiting(time: StepTime) -> StepTime:
        return dataclasses.replace(time, waiting=0.5)

    times = {
        name: StepTimes({n: waiting(t) for n, t in each.target.items()}, each.draft) for name, each in timing.times.items()
    }
    value = pooled_speedup(ONE, ("draft 0", 1), times, ALONE).value
    for share, verdict in ((1 / 1.5, "UNDECIDED"), (1 / 3, "GO")):
        asked = QUESTION.model_copy(update={"min_speedup": share * value})
        assert judge(ONE, Timing(times, "by these", {}), ALONE, asked, [1])[1].verdict == verdict
        assert judge(ONE, timing, ALONE, asked, [1])[1].verdict == "GO"
