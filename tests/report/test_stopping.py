"""Drafts that stop when they are unsure: the ends of their speedup, and a decision with p_min."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from alphaprof.commands.export.engines import export
from alphaprof.commands.export.rates import export_rates
from alphaprof.config.load import changed_question
from alphaprof.costs.rounds import StepTime, StepTimes
from alphaprof.costs.speedup import speedup
from alphaprof.errors import OptionInvalid
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.stopping import P_MINS, Tried
from alphaprof.report.verdict import MIDDLE
from alphaprof.run.reader import Run, RunDraft
from alphaprof.totals.replay import UNTIL_WRONG, RoundCounts, Rounds
from tests.loops import each
from tests.reporting import as_first_screen, as_terminal
from tests.synthetic import Domain, Recipe, rewritten, write_run

RECIPE = Recipe(
    domains={"code": Domain(documents=60, alpha=0.8), "chat": Domain(documents=60, alpha=0.6)},
    drafts={"small": 0.0},
    lookups=("ngram",),
    gammas=(1, 4, 8),
    draft_ms=2.5,
    timing_error=0.001,
)


def knowing(frame: pd.DataFrame) -> None:
    """A draft that mostly knows when it is wrong."""
    right = frame["token"] == frame["draft_top"]
    lots = np.random.default_rng(len(frame)).random(len(frame))
    frame["draft_top_prob"] = np.where(lots < 0.1, 0.55, np.where(right, 0.8, 0.3)).astype(np.float32)


def clueless(frame: pd.DataFrame) -> None:
    """A draft whose probabilities say nothing."""
    frame["draft_top_prob"] = np.random.default_rng(len(frame)).uniform(0.1, 1, len(frame)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rewritten(write_run(tmp_path_factory.mktemp("stopping") / "run", RECIPE), "small", knowing)


@pytest.fixture(scope="module")
def report(run: Run) -> RunReport:
    return build_report(run)


def recounted(run: Run, gamma: int, p_min: float) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Rounds, tokens, the most and the least that they drafted, and draft steps thrown away then: by a plain loop."""
    rounds = tokens = least = most = unused = shorter = 0
    for shard in run.shards:
        table = run.positions("small", shard.index).to_pandas()
        for _, text in table.groupby("document", sort=False):
            agrees = (text["token"] == text["draft_top"]).tolist()
            unsure = (text["draft_top_prob"] < p_min).tolist()
            at = 1
            while at < len(text):
                drafted = 0
                while drafted < gamma and at + drafted < len(text) and not unsure[at + drafted] and agrees[at + drafted]:
                    drafted += 1
                ended = at + drafted >= len(text)
                stopped = drafted < gamma and not ended and unsure[at + drafted]
                accepted, rounds = drafted, rounds + 1
                shortest = accepted + (not stopped and not ended and drafted < gamma)
                least, most = least + shortest, most + (accepted if stopped else gamma)
                unused, shorter = unused + stopped, shorter + (shortest < gamma)
                emitted = min(accepted + 1, len(text) - at)
                tokens, at = tokens + emitted, at + emitted
    return rounds, tokens, (most, least), (unused, shorter)


@pytest.mark.parametrize("p_min", [0.0, 0.4, 0.6])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_the_ends_are_those_of_a_plain_loop(run: Run, report: RunReport, gamma: int, p_min: float) -> None:
    tried = Tried.of(report.asked, ["small"])
    assert tried is not None
    assert {*tried.candidates} == {0.0, *P_MINS}
    by_domain, times = tried.candidates[p_min]["small"], tried.timing.times["small"]
    counts = [by_domain[domain].counts(gamma) for domain in tried.mix.domains]
    emitted, made = (sum(float(getattr(each, name).sum()) for each in counts) for name in ("tokens", "rounds"))
    rounds, tokens, *ends = recounted(run, gamma, p_min)
    assert emitted / made == pytest.approx(tokens / rounds)
    steps = report.times
    assert steps is not None
    step, verify = steps.draft_ms["small"] / steps.target_ms[1], [ms / steps.target_ms[1] for ms in steps.target_ms.values()]
    extra = (verify[-1] - verify[0]) / (len(verify) - 1)  # verification is a straight line of these step times
    slow = report.times.draft_after_full_ms.get("small", steps.draft_ms["small"]) - steps.draft_ms["small"]
    assert slow == pytest.approx(0, abs=1e-9)
    if p_min == 0:  # every round drafts gamma tokens
        ends = [(ends[0][0],) * 2, (0, 0)]
    for end, drafted, unused in zip((1, 0), *ends, strict=True):
        found = tried.mix.value([(each.ends[end], times) for each in counts])
        assert found == pytest.approx(tokens / (rounds + drafted * (step + extra) + unused * step), rel=2e-3)


def test_a_draft_that_knows_gains_and_one_that_does_not_gains_nothing(run: Run, report: RunReport, tmp_path: Path) -> None:
    known = build_report(run, config=changed_question(run.manifest.config, ["decision.p_min=auto", "decision.draft=small"]))
    assert known.conditions.p_min in (0.4, 0.5)
    plain = next(item.answer for item in report.drafts if item.answer.draft == "small")
    assert plain.speedup is not None
    assert known.answer.speedup is not None
    assert known.answer.speedup.low > plain.speedup.value
    other = rewritten(write_run(tmp_path / "run", RECIPE), "small", clueless)
    asked = changed_question(other.manifest.config, ["decision.p_min=auto", "decision.draft=small"])
    assert build_report(other, config=asked).conditions.p_min == 0


def test_auto_stops_no_draft_whose_probabilities_say_nothing(tmp_path: Path) -> None:
    """The middle of what the log allows favors p_min 0.2, by which nothing is gained: it shows 1.72x in place of 1.61x."""

    def seldom_unsure(frame: pd.DataFrame) -> None:
        frame["draft_top_prob"] = np.random.default_rng(len(frame)).beta(3, 1.5, len(frame)).astype(np.float32)

    recipe = dataclasses.replace(RECIPE, lookups=(), draft_ms=1.0)
    run = rewritten(write_run(tmp_path / "run", recipe), "small", seldom_unsure)
    chosen = build_report(run, config=changed_question(run.manifest.config, ["decision.p_min=auto"]))
    assert chosen.conditions.p_min == 0
    assert MIDDLE not in as_first_screen(chosen)


FIXED_AT_8 = ["decision.draft=small", "decision.gamma=8"]


def test_auto_judges_with_the_p_min_that_both_halves_of_the_documents_choose(run: Run) -> None:
    asked = changed_question(run.manifest.config, ["decision.p_min=auto", "decision.draft=small"])
    chosen = build_report(run, config=asked)
    assert chosen.conditions.p_min == 0.4
    assert chosen.answer.speedup is not None
    assert chosen.answer.gamma is not None
    rounds, tokens, *_ = recounted(run, chosen.answer.gamma, 0.4)
    assert chosen.answer.tokens_per_round is not None
    assert chosen.answer.tokens_per_round.value == pytest.approx(tokens / rounds)
    assert f"(p_min {chosen.conditions.p_min:g})" in as_terminal(chosen)
    assert f"with p_min every speedup is the {MIDDLE}" in as_terminal(chosen)
    assert f"x ({MIDDLE}) on" in chosen.answer.reason
    one = build_report(run, config=changed_question(asked, ["decision.gamma=4"]))
    fixed = build_report(run, config=changed_question(asked, ["decision.gamma=4", "decision.p_min=0.4"]))
    assert (one.conditions.p_min, one.traffic.chosen, fixed.traffic.chosen) == (0.4, True, False)
    assert one.answer.held_out == fixed.answer.held_out == 120  # each half tests what the other chose
    assert dataclasses.astuple(one.answer.speedup) == pytest.approx(
        dataclasses.astuple(fixed.answer.speedup)
    )  # both chose the same


def test_auto_turns_no_p_min_on_that_one_half_alone_chooses(run: Run) -> None:
    """At gamma 8 one half prefers 0.4 and the other 0.6: the verdict is that of a draft that never stops."""
    auto, never = (
        build_report(run, config=changed_question(run.manifest.config, [*FIXED_AT_8, f"decision.p_min={p_min}"]))
        for p_min in ("auto", 0)
    )
    assert (auto.conditions.p_min, auto.traffic.chosen) == (0, False)
    assert (auto.answer, auto.traffic) == (never.answer, never.traffic)


def test_what_was_drafted_after_a_wrong_draft_widens_the_interval() -> None:
    """By no more than it can be off, and as a speedup that is nowhere outside."""
    times = StepTimes({n: StepTime(10.0 + n, 0.0) for n in range(1, 6)}, StepTime(2.0, 0.0))
    rng = np.random.default_rng(0)
    tested = np.sort(rng.integers(5, 20, (40, 4)), axis=1)[:, ::-1].astype(float)
    drafted, rounds = tested + rng.integers(0, 4, (40, 4)), tested[:, 0] + 5
    replayed = Rounds(rounds, rounds * 2, np.minimum(drafted, rounds[:, None]), tested, tested / 2, np.zeros(40))
    counts = dataclasses.replace(RoundCounts.of(replayed, np.arange(40), UNTIL_WRONG), unused=None)
    assert counts.doubt is not None
    low, high = (RoundCounts.of(replayed, np.arange(40)) for _ in range(2))
    low = type(low)(low.tokens, low.rounds, tested, low.accepted, low.control, low.cluster)
    bounds = [speedup([each], [1.0], times) for each in (counts, low, high)]
    middle, fast, slow = (each for each in bounds if each is not None)
    assert slow.value < middle.value < fast.value
    assert middle.value / (1 - middle.doubt) == pytest.approx(fast.value)
    assert middle.value / (1 + middle.doubt) == pytest.approx(slow.value)
    for tail in (0.01, 0.2):
        assert middle.bounds(tail)[0] < min(slow.value, middle.value)
        assert middle.bounds(tail)[1] > fast.value


def test_engines_that_stop_get_the_p_min_and_others_are_refused(run: Run) -> None:
    asked = Run.open(run.path)
    config = changed_question(run.manifest.config, ["decision.p_min=0.4", "decision.draft=small"])
    asked.manifest = dataclasses.replace(run.manifest, config=config)
    found = export(RunDraft(asked, "small"), "llamacpp-args", gamma=4)
    assert found.text.endswith("--spec-draft-n-max 4 --spec-draft-p-min 0.4\n")
    with pytest.raises(OptionInvalid, match="vLLM does not stop drafts at a p_min"):
        export(RunDraft(asked, "small"), "vllm-config", gamma=4)
    assert any("p_min 0.4" in line for line in export_rates(RunDraft(asked, "small"), gamma=4).warnings)


HEADS = Recipe(domains={"code": Domain(documents=30)}, heads={"head": {"own_path": True}}, gammas=(1, 2, 3, 4))
AT_FOUR_TENTHS = ["decision.p_min=0.4", "decision.draft=head", "decision.gamma=4"]


def test_rounds_of_a_head_that_stop_cost_what_a_plain_loop_pays(tmp_path: Path) -> None:
    """Each drafts up to the first depth at which its own drafts are unsure, whatever the text goes on with; the step that
    says so is run and its token discarded: the first one, where nothing is drafted.
    """
    run = write_run(tmp_path / "run", HEADS)
    report = build_report(run, config=changed_question(run.manifest.config, AT_FOUR_TENTHS))
    tried = Tried.of(report.asked, ["head"])
    assert tried is not None
    first = {n: StepTime(2.0 + 0.3 * n, 0.0) for n in range(1, 6)}
    head = dataclasses.replace(tried.timing.times["head"], draft_first=first)
    ms = {n: step.ms for n, step in head.target.items()}
    spent, tokens, silent = 0.0, 0, 0
    for shard in run.shards:
        for _, text in run.positions("head", shard.index).to_pandas().groupby("document", sort=False):
            odds = [np.log(text["draft_top_prob"]) - np.log1p(-text["draft_top_prob"])]
            odds += [text[f"draft_log_odds_{depth}"].astype(float) for depth in (2, 3, 4)]
            sure = (np.stack(odds, 1) >= np.log(0.4 / 0.6)).tolist()
            at = 1
            while at < len(text):
                drafted = [*sure[at], False].index(False)
                right = min(drafted, int(text["accepted_run"].fillna(0).iloc[at]))
                steps = min(drafted + 1, 4)
                spent += ms[drafted + 1] + (steps - 1) * head.draft.ms + first[right + 1].ms
                silent, emitted = silent + (drafted == 0), min(right + 1, len(text) - at)
                tokens, at = tokens + emitted, at + emitted
    (pool,) = (tried.candidates[0.4]["head"][domain] for domain in tried.mix.domains)
    assert pool.counts(4).doubt is None
    assert silent > 40
    assert tried.mix.value([(pool.counts(4), head)]) == pytest.approx(tokens / (spent / ms[1]), rel=1e-6)
    assert MIDDLE not in as_first_screen(report)
    assert export(RunDraft(run, "head"), "llamacpp-args", gamma=4).text.endswith("--spec-draft-n-max 4\n")
    run.manifest = dataclasses.replace(run.manifest, config=changed_question(run.manifest.config, AT_FOUR_TENTHS))
    assert export(RunDraft(run, "head"), "llamacpp-args", gamma=4).text.endswith("--spec-draft-p-min 0.4\n")


@each(("own_path", "how", "why"), [
    (False, {}, "a chain of MTP modules"), (True, {"continuation": "sampled", "temperature": 1.0}, "sampled text"),
])  # fmt: skip
def test_a_head_that_read_the_texts_tokens_is_refused(own_path: bool, how: Any, why: str, tmp_path: Path) -> None:
    recipe = Recipe(domains={"a": Domain(documents=4, **how)}, heads={"head": {"own_path": own_path}})
    run = write_run(tmp_path / f"run{own_path}", recipe)
    asked = changed_question(run.manifest.config, AT_FOUR_TENTHS[:2])
    with pytest.raises(OptionInvalid, match=f"head read the text's tokens, not its own drafts .*{why}"):
        build_report(run, config=asked)
