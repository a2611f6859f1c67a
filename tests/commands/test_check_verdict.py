"""check is the verdict of the report: its number, its weights, what keeps it from deciding, and its step times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from alphaprof.config.load import changed_question
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval, ratio, share_interval
from tests.commands.test_check import check
from tests.synthetic import Domain, Recipe, altered, stored_totals, write_run

CODE, CHAT = Domain(documents=30, alpha=0.8, spread=0.05), Domain(documents=30, alpha=0.5, spread=0.05)
BOTH = {"code": CODE, "chat": CHAT}
FIXED = {"draft": "small", "gamma": 3, "min_speedup": 1.1}
WEIGHTS = {"core": 0.9, "rare": 0.1}


def sums(run: Run, gamma: int, domain: str) -> pd.Series:
    """Totals of a domain at a gamma."""
    frame = stored_totals(run, "small").merge(run.documents().to_pandas(), on="document")
    return frame[frame["domain"].astype(str) == domain][["tokens", f"rounds_{gamma}"]].sum()


# Weights


def traffic(folder: Path, core: float, weights: Mapping[str, float] | None) -> Run:
    """A run whose rare domain has by far the most tokens; `core`: acceptance of the other."""
    domains = {
        "core": Domain(documents=30, alpha=core, spread=0.05, shortest=20, longest=30),
        "rare": Domain(documents=60, alpha=0.6, spread=0.05, shortest=150, longest=200),
    }
    return write_run(folder, Recipe(domains=domains, gammas=(3,), decision={"weights": weights}, seed=11))


@pytest.mark.parametrize(("worse", "outcome"), [(0.77, "undecided"), (0.6, "fail")])
def test_a_baseline_is_compared_by_the_weights_of_the_decision(worse: float, outcome: str, tmp_path: Path) -> None:
    """The domain that loses is nine tenths of the traffic and few of its tokens: by tokens nothing is lost."""
    sides = [traffic(tmp_path / name, core, WEIGHTS) for name, core in (("old", 0.8), ("new", worse))]
    old, new = sides
    of_tokens = ("--set", "decision.weights=null")
    weighted, pooled = (check(new, "--baseline", str(old.path), *more)[1]["items"][0] for more in ((), of_tokens))
    by_domain = [{domain: sums(run, 3, domain) for domain in WEIGHTS} for run in sides]
    before, after = (
        1 / sum(share * each[domain]["rounds_3"] / each[domain]["tokens"] for domain, share in WEIGHTS.items())
        for each in by_domain
    )
    assert weighted["value"] == pytest.approx(after / before - 1)
    before, after = (sum(each.values())["tokens"] / sum(each.values())["rounds_3"] for each in by_domain)
    assert pooled["value"] == pytest.approx(after / before - 1)
    assert {weighted["domain"], pooled["domain"]} == {"whole traffic"}
    assert (weighted["outcome"], pooled["outcome"]) == (outcome, "pass")


def test_domains_of_weight_0_decide_nothing_unless_they_are_named(tmp_path: Path) -> None:
    weights = {"code": 1.0, "chat": 0.0}
    run = write_run(tmp_path / "run", Recipe(domains=BOTH, decision=FIXED | {"weights": weights}))
    for measure, least in (("--min-alpha", "0.65"), ("--min-acceptance-length", "2.2"), ("--min-speedup", "1.5")):
        code, found, _ = check(run, measure, least)
        assert (code, [item["domain"] for item in found["items"]]) == (0, ["code"])
        assert found["unjudged"] == [{"domain": "chat", "reason": "weight 0 in decision.weights"}]
        code, found, _ = check(run, measure, least, measure, f"chat={least}")
        assert (code, found["unjudged"]) == (10, [])
        assert {item["domain"]: item["outcome"] for item in found["items"]} == {"code": "pass", "chat": "fail"}


def test_a_domain_of_weight_0_does_not_fail_against_a_baseline(tmp_path: Path) -> None:
    worse = {"code": CODE, "chat": dataclasses.replace(CHAT, alpha=0.1)}
    old, new = (
        write_run(tmp_path / name, Recipe(domains=domains, decision=FIXED))
        for name, domains in (("old", BOTH), ("new", worse))
    )
    assert check(new, "--baseline", str(old.path))[0] == 10
    code, found, _ = check(new, "--baseline", str(old.path), "--set", "decision.weights={code: 1, chat: 0}")
    assert (code, [item["domain"] for item in found["items"]]) == (0, ["code"])
    assert found["unjudged"] == [{"domain": "chat", "reason": "weight 0 in decision.weights"}]


# What keeps a report from deciding

THRESHOLDS = ("--min-alpha", "--min-acceptance-length", "--min-speedup")


def with_rounds(run: Run, rounds: int) -> Run:
    """The run with step times of so many timing rounds, which hardly differ."""
    rng, rows = np.random.default_rng(3), []
    table = run.latency()
    assert table is not None
    for row in table.to_pylist():
        times = row["median_ms"] * (1 + 1e-4 * rng.standard_normal(rounds))
        rows.append(row | {"rounds_ms": times.tolist(), "median_ms": float(np.median(times)), "repeats": rounds})
    return altered(run, pa.Table.from_pylist(rows, schema=table.schema))


def served_otherwise(folder: Path) -> Run:
    return write_run(folder, Recipe(domains=BOTH, decision=FIXED | {"served_dtype": "float16"}))


def contradicted(folder: Path) -> Run:
    story = Domain(documents=30, temperature=1.0, continuation="sampled")
    domains = {"story": story, "tale": dataclasses.replace(story, uniform=True)}
    return write_run(folder, Recipe(domains=domains, rules=("one_hot",), decision=FIXED | {"min_speedup": 0.2}))


def hardly_timed(folder: Path) -> Run:
    return with_rounds(write_run(folder, Recipe(domains=BOTH, decision=FIXED)), 5)


@pytest.mark.parametrize(
    ("made", "measures", "baseline", "why"),
    [
        (served_otherwise, THRESHOLDS, True, "stands in for the one served in float16"),
        (contradicted, THRESHOLDS, True, "was not sampled from these distributions"),
        (hardly_timed, ("--min-speedup",), False, "at least 6 rounds"),
    ],
)
def test_what_keeps_a_report_from_deciding_keeps_a_check_from_passing(
    made: Callable[[Path], Run], measures: tuple[str, ...], baseline: bool, why: str, tmp_path: Path
) -> None:
    run = made(tmp_path / "run")
    report = build_report(run)
    assert report.answer.verdict == "UNDECIDED"
    code, found, _ = check(run, "--undecided", "fail")
    assert (code, found["outcome"], found["reason"]) == (11, "undecided", report.answer.reason)
    assert why in found["reason"]
    for measure in measures:
        code, found, _ = check(run, measure, "0.01", "--undecided", "fail")
        assert (code, found["outcome"]) == (11, "undecided")
        assert why in f"{[item['note'] for item in found['items']]}"
    if baseline:
        twin = made(tmp_path / "twin")
        code, found, _ = check(run, "--baseline", str(twin.path), "--margin", "0.9", "--undecided", "fail")
        assert (code, found["items"][0]["outcome"]) == (11, "undecided")
        assert why in found["items"][0]["note"]


def test_six_timing_rounds_are_enough_and_other_measures_need_none(tmp_path: Path) -> None:
    enough = with_rounds(write_run(tmp_path / "enough", Recipe(domains=BOTH, decision=FIXED)), 6)
    assert build_report(enough).answer.verdict == "GO"
    assert check(enough)[0] == check(enough, "--min-speedup", "1.05")[0] == 0
    few = hardly_timed(tmp_path / "few")
    assert check(few, "--min-alpha", "0.3", "--undecided", "fail")[0] == 0
    assert check(few, "--min-speedup", "1.05", "--undecided", "fail")[0] == 11


def test_a_text_that_is_contradicted_leaves_the_others_their_outcomes(tmp_path: Path) -> None:
    run = contradicted(tmp_path / "run")
    for arguments in (("--min-alpha", "0.01"), ("--baseline", str(contradicted(tmp_path / "twin").path))):
        _, found, _ = check(run, *arguments)
        outcomes = {item["domain"]: item["outcome"] for item in found["items"]}
        assert (found["outcome"], outcomes["story"], outcomes["tale"]) == ("undecided", "pass", "undecided")


# --set


def engine_table(path: Path) -> tuple[str, ...]:
    """The arguments that name a table by which verification of four tokens takes as long as two decode steps."""
    rows = ["model,step,tokens,batch,context,ms", "target,decode,1,1,256,5", "small,draft,1,1,256,0.5"]
    rows += [f"target,verify,{n},1,256,{ms}" for n, ms in ((2, 5.5), (3, 8), (4, 10))]
    path.write_text("\n".join(rows))
    return ("--set", "costs.source=table", "--set", f"costs.path={path}")


@pytest.mark.parametrize("gamma", [3, "auto"])
def test_an_engines_table_of_step_times_is_what_is_checked(gamma: int | str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains=BOTH, gammas=(1, 2, 3), decision=FIXED | {"gamma": gamma}))
    table = engine_table(tmp_path / "times.csv")
    _, found, _ = check(run, *table)
    answer = build_report(run, config=changed_question(run.manifest.config, list(table[1::2]))).answer
    (item,) = found["items"]
    assert answer.speedup is not None
    assert (found["gamma"], item["value"], item["low"], item["high"]) == (answer.gamma, *vars(answer.speedup).values())
    _, found, _ = check(run, "--min-speedup", "code=1", "--gamma", "3", *table)
    totals = sums(run, 3, "code")
    (item,) = found["items"]
    assert item["value"] == pytest.approx(totals["tokens"] / (totals["rounds_3"] * (3 * 0.5 + 10) / 5))
    assert check(run, "--min-speedup", "code=1", "--gamma", "3")[1]["items"][0]["value"] > item["value"]


def test_a_table_tells_at_which_gamma_a_baseline_is_compared(tmp_path: Path) -> None:
    old, new = (
        write_run(tmp_path / name, Recipe(domains={"code": dataclasses.replace(CODE, alpha=alpha)}, gammas=(1, 2, 3)))
        for name, alpha in (("old", 0.8), ("new", 0.7))
    )
    by_own = check(new, "--baseline", str(old.path))[1]
    by_table = check(new, "--baseline", str(old.path), *engine_table(tmp_path / "times.csv"))[1]
    decided = check(new, "--baseline", str(old.path), "--set", "decision.gamma=2")[1]
    for found, gamma in ((by_own, 3), (by_table, 1), (decided, 2)):
        before, after = (sums(run, gamma, "code") for run in (old, new))
        change = after["tokens"] / after[f"rounds_{gamma}"] / (before["tokens"] / before[f"rounds_{gamma}"]) - 1
        assert (found["gamma"], found["items"][0]["value"]) == (gamma, pytest.approx(change))


# The number


def test_alpha_keeps_all_its_documents_if_only_gamma_was_chosen(tmp_path: Path) -> None:
    decision = {"draft": "small", "gamma": "auto"}
    run = write_run(tmp_path / "run", Recipe(domains=BOTH, gammas=(1, 2, 3, 4), decision=decision, seed=5))
    frame = stored_totals(run, "small").merge(run.documents().to_pandas(), on="document")
    frame = frame[frame["domain"].astype(str) == "code"]
    alpha = share_interval(ratio(frame["accepted"].to_numpy(), frame["proposals"].to_numpy(float)), 0.9)
    for more in ((), ("--min-speedup", "code=0.5"), ("--draft", "small", "--min-acceptance-length", "code=1")):
        _, found, _ = check(run, "--min-alpha", "code=0.1", *more)
        (item,) = (item for item in found["items"] if item["measure"] == "alpha")
        assert item["documents"] == 30
        assert (item["value"], item["low"]) == pytest.approx((alpha.value, alpha.low))
        if not more:  # others share the error of upper bounds
            assert item["high"] == pytest.approx(alpha.high)


AUTO: Mapping[str, Any] = {"draft": "auto", "gamma": "auto", "min_speedup": 1.3}
SPEEDUPS: Mapping[str, Recipe] = {
    "named": Recipe(domains=BOTH, decision=FIXED),
    "chosen": Recipe(domains=BOTH, decision=AUTO, drafts={"small": 0.0, "poor": -0.3}),
    "weighted": Recipe(domains=BOTH, decision=AUTO | {"weights": {"code": 0.2, "chat": 0.8}}),
    "halves disagree": Recipe(domains=BOTH, decision=AUTO, drafts=dict.fromkeys("abcd", 0.0), gammas=(1, 3), seed=5),
    "p_min": Recipe(domains=BOTH, decision=AUTO | {"p_min": "auto"}),
    "one domain": Recipe(domains={"code": CODE}, decision=AUTO, drafts=dict.fromkeys("abcd", 0.0)),
}


def test_a_threshold_asks_the_reports_own_answer_for_a_domain(tmp_path: Path) -> None:
    """As the halves of the whole traffic choose, code surely reaches 1.698, and would pass what the report leaves open."""
    decision = AUTO | {"min_speedup": 1.695}
    recipe = Recipe(domains=BOTH, decision=decision, drafts=dict.fromkeys("abcd", 0.0), gammas=(1, 3), seed=7)
    run = write_run(tmp_path / "run", recipe)
    answers = {str(each.answer.domain): each.answer for each in build_report(run).domains}
    assert answers["code"].speedup is not None
    assert answers["code"].speedup.low == pytest.approx(1.692281)
    for domain, verdict, outcome in (("code", "UNDECIDED", "undecided"), ("chat", "NO-GO", "fail")):
        (item,) = check(run, "--min-speedup", f"{domain}=1.695")[1]["items"]
        answer = answers[domain]
        assert (answer.verdict, item["outcome"]) == (verdict, outcome)
        assert answer.speedup == Interval(*(item[key] for key in ("value", "low", "high")))
        assert (item["draft"], item["gamma"]) == (answer.draft, answer.gamma)
    found = check(run, "--min-speedup", "1.695")[1]
    assert (found["draft"], found["gamma"]) == (None, None)
    assert [(item["draft"], item["gamma"]) for item in found["items"]] == [("c", 3), ("d", 1)]


@pytest.mark.parametrize("name", SPEEDUPS)
def test_the_speedup_of_the_whole_traffic_is_the_reports(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SPEEDUPS[name])
    report = build_report(run)
    answer = report.answer
    outcome = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}[str(answer.verdict)]
    thresholds = (("--min-speedup", f"{report.traffic.min_speedup}"),) if name == "one domain" else ()
    for arguments in ((), *thresholds):
        _, found, _ = check(run, *arguments)
        (item,) = found["items"]
        assert answer.speedup == Interval(*(item[key] for key in ("value", "low", "high")))
        assert (item["documents"], item["outcome"]) == (answer.held_out, outcome)
        assert (found["draft"], found["gamma"]) == (answer.draft, answer.gamma)
    assert bool(report.traffic.disagreement) == (name == "halves disagree")
