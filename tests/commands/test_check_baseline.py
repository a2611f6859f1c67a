"""The gate against a baseline: a draft that stops proposing fails, and what cannot be judged is said."""

from __future__ import annotations

import dataclasses
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.check import SAME
from alphaprof.commands.compare.target_change import deciding_bounds
from alphaprof.errors import AlphaprofError
from alphaprof.report.pairing import over_domains, paired_texts
from alphaprof.run.manifest import ModelFacts
from alphaprof.run.reader import Run, RunDraft
from tests.commands.test_import import counted, imported, response
from tests.synthetic import Domain, Recipe, altered, rewritten, stored_totals, write_run

CODE, CHAT = Domain(documents=24, alpha=0.8, spread=0.05), Domain(documents=24, alpha=0.5, spread=0.05)
WIDE = ("--margin", "1")  # no draft can lose more than all


def run_of(folder: Path, silent: tuple[str, ...] = (), **domains: Domain) -> Run:
    """A run of some domains, in which the draft proposes nothing in those that are `silent`."""

    def stop(frame: pd.DataFrame) -> None:
        frame.loc[frame["domain"].astype(str).isin(silent), "proposed"] = 0

    run = write_run(folder, Recipe(domains=domains or {"code": CODE, "chat": CHAT}, gammas=(1, 3)))
    return rewritten(run, "small", stop) if silent else run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs on the same prompts: a draft that proposes everywhere, not in chat, nowhere; and runs with other domains."""
    folder = tmp_path_factory.mktemp("baseline")
    return {
        "whole": run_of(folder / "whole"),
        "quiet": run_of(folder / "quiet", ("chat",)),
        "mute": run_of(folder / "mute", ("code", "chat")),
        "more": run_of(folder / "more", code=CODE, chat=CHAT, poetry=CHAT),
        "other": run_of(folder / "other", code=CODE, songs=CHAT),
    }


def held(new: Run, old: Run, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, JSON, and both lines of a failure."""
    result = CliRunner().invoke(app, ["check", str(new.path), "--baseline", str(old.path), *arguments, "--format", "json"])
    error = result.exception
    if not isinstance(error, AlphaprofError):
        assert error is None, error
        return result.exit_code, json.loads(result.stdout), ""
    return error.exit_code, json.loads(result.stdout) if result.stdout else None, f"{error.message} | {error.hint}"


def tokens_per_round(run: Run, gamma: int, draft: str = "small", domain: str | None = None) -> float:
    """What all documents of a run, or of one of its domains, have, from the stored totals."""
    frame = stored_totals(run, draft).merge(run.documents().to_pandas(), on="document")
    frame = frame[frame["domain"].astype(str) == domain] if domain else frame
    return float(frame["tokens"].sum() / frame[f"rounds_{gamma}"].sum())


def test_a_draft_that_stops_proposing_in_a_domain_fails_there(runs: dict[str, Run]) -> None:
    code, found, text = held(runs["quiet"], runs["whole"], *WIDE)
    items = {item["domain"]: item for item in found["items"]}
    assert (code, found["outcome"], items["code"]["outcome"], items["chat"]["outcome"]) == (10, "fail", "pass", "fail")
    assert [items["chat"][name] for name in ("low", "high", "documents")] == [None, None, 24]
    assert items["chat"]["value"] == pytest.approx(1 / tokens_per_round(runs["whole"], 3, domain="chat") - 1)
    assert "tokens_per_round_change of chat: the draft proposes nothing there, but did in the baseline" in text


def test_a_domain_of_which_the_baseline_proposes_nothing_is_said(runs: dict[str, Run]) -> None:
    code, found, _ = held(runs["whole"], runs["quiet"], *WIDE)
    assert (code, [item["domain"] for item in found["items"]]) == (0, ["code"])
    assert found["unjudged"] == [{"domain": "chat", "reason": "the baseline's draft proposes nothing there"}]
    assert found["reason"].endswith("; not judged: chat")


def test_domains_without_a_partner_are_said(runs: dict[str, Run]) -> None:
    _, found, _ = held(runs["whole"], runs["more"], *WIDE)
    assert found["unjudged"] == [{"domain": "poetry", "reason": "only the baseline has the domain"}]
    _, found, _ = held(runs["more"], runs["whole"], *WIDE)
    assert found["unjudged"] == [{"domain": "poetry", "reason": "only this run has the domain"}]


def test_junit_skips_what_was_not_judged(runs: dict[str, Run]) -> None:
    call = ["check", str(runs["other"].path), "--baseline", str(runs["whole"].path), *WIDE, "--format", "junit"]
    suite = ET.fromstring(CliRunner().invoke(app, call).stdout)  # noqa: S314  (our own)
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "0", "2")
    assert {case.get("name") for case in suite if case.find("skipped") is not None} == {"chat", "songs"}


@pytest.mark.parametrize(
    ("new", "old", "options", "problem"),
    [
        ("whole", "mute", (), "the baseline's draft proposes nothing there"),
        ("quiet", "mute", (), "nor does this one"),
        ("whole", "quiet", ("--rule", "one_hot"), "one_hot does not apply to this text (greedy)"),
    ],
)
def test_where_nothing_can_be_judged_the_reason_is_said(
    new: str, old: str, options: tuple[str, ...], problem: str, runs: dict[str, Run]
) -> None:
    code, found, text = held(runs[new], runs[old], *options)
    assert (code, found) == (12, None)
    assert problem in text


def logged(folder: Path, rounds: tuple[int, ...], plain: int) -> Run:
    """An imported run of 12 requests, each with `rounds` that kept so many of 3 drafts, and more that had none."""
    folder.mkdir()
    metrics, written = counted(rounds, [3] * len(rounds), 3), 1 + len(rounds) + sum(rounds) + plain
    usages = [{"usage": {"prompt_tokens": 2, "completion_tokens": written + number % 2}} for number in range(12)]
    return imported(folder, [response(number, **metrics) | usage for number, usage in enumerate(usages)])


def test_a_served_draft_that_proposes_more_rarely_fails(tmp_path: Path) -> None:
    """It keeps as many drafts of a proposal as before: acceptance length is the same, and tokens per round are fewer."""
    often, rarely = logged(tmp_path / "often", (3, 1) * 10, 0), logged(tmp_path / "rarely", (3, 1), 36)
    code, found, _ = held(rarely, often, "--margin", "0.1")
    (item,) = found["items"]
    assert (code, item["measure"], item["outcome"]) == (10, "tokens_per_round_change", "fail")
    # 12 requests of 60 tokens, every second with one more, in 20 rounds (21), and of 42 (43) in 38 (39).
    assert item["value"] == pytest.approx((12 * 42 + 6) / (12 * 38 + 6) / ((12 * 60 + 6) / (12 * 20 + 6)) - 1)
    assert held(often, rarely, "--margin", "0.1")[0] == 0


def test_a_served_draft_that_proposes_nothing_fails_with_one_token_a_round(tmp_path: Path) -> None:
    often, never = logged(tmp_path / "often", (3, 1), 0), logged(tmp_path / "never", (), 6)
    code, found, text = held(never, often, *WIDE)
    (item,) = found["items"]
    assert (code, item["outcome"], item["low"], item["high"]) == (10, "fail", None, None)
    assert item["value"] == pytest.approx((12 * 2 + 6) / (12 * 6 + 6) - 1)
    assert "proposes nothing there, but did in the baseline" in text
    assert held(often, never)[0] == 12


# The same draft, and another one with the same rows

STRICTLY = ("--undecided", "fail")
FEW = {"code": dataclasses.replace(CODE, documents=2), "chat": dataclasses.replace(CHAT, documents=2)}


def rerun(run: Run, folder: Path, **facts: Any) -> Run:
    """A copy, as an unbroken repetition writes it; `facts` of its draft are others."""
    shutil.copytree(run.path, folder)
    drafts = {name: dataclasses.replace(own, **facts) for name, own in run.manifest.drafts.items()}
    return altered(Run.open(folder), drafts=drafts)


def test_the_whole_traffic_is_asked_as_compare_asks_it(runs: dict[str, Run], tmp_path: Path) -> None:
    """Its bounds are those of 95% each, however many domains there are; the domains share theirs. What UNDECIDED exits with
    stands in the last line.
    """
    worse = write_run(
        tmp_path / "worse", Recipe(domains={"code": CODE, "chat": CHAT}, drafts={"small": -0.03}, gammas=(1, 3))
    )
    code, found, _ = held(worse, runs["whole"], "--gamma", "3")
    old, new = (RunDraft(run, "small") for run in (runs["whole"], worse))
    texts, _, _ = paired_texts(old, new, ["strict"])
    whole, *each = found["items"]
    assert (whole["low"], whole["high"]) == pytest.approx(deciding_bounds(*over_domains(texts, None), 3, 0.95))
    for item, text in zip(each, texts, strict=True):
        alone = deciding_bounds(*over_domains([text], None), 3, 0.95)
        assert item["low"] == pytest.approx(alone[0])
        assert item["high"] > alone[1] + 1e-6 or item["outcome"] == "fail"
    command = [
        "check",
        str(worse.path),
        "--baseline",
        str(runs["whole"].path),
        "--gamma",
        "3",
        "--margin",
        f"{-whole['value']:.4f}",
    ]
    said = CliRunner().invoke(app, command).stdout.strip().splitlines()
    assert code in (0, 10)
    assert said[0].startswith("UNDECIDED")
    assert said[-1].strip() == "UNDECIDED ends with exit code 0; --undecided fail makes it 11."


def test_the_same_draft_passes_at_two_documents_and_nothing_is_estimated(tmp_path: Path) -> None:
    run = run_of(tmp_path / "old", **FEW)
    code, found, _ = held(rerun(run, tmp_path / "new"), run, *STRICTLY)
    assert (code, found["outcome"], found["reason"]) == (0, "pass", SAME)
    assert [(item["value"], item["low"], item["high"], item["note"]) for item in found["items"]] == [
        (0, None, None, SAME)
    ] * 3


def test_another_draft_with_the_same_rows_is_judged_by_bounds(tmp_path: Path) -> None:
    """One changed weight is another fingerprint. The bound is what a share of the documents could lose, of the three tokens
    by which rounds of gamma 3 can differ.
    """
    for documents, code in ((10, 11), (96, 0)):
        run = run_of(tmp_path / f"old {documents}", code=dataclasses.replace(CODE, documents=documents))
        other = rerun(run, tmp_path / f"new {documents}", fingerprint="0" * 64)
        exit_code, found, _ = held(other, run, *STRICTLY)
        (item,) = found["items"]
        assert (exit_code, item["value"]) == (code, 0)
        assert item["low"] == pytest.approx(-0.225 * 3 * (1 - 0.05 ** (1 / documents)) / tokens_per_round(run, 3))


def test_another_dtype_or_target_is_never_the_same_draft(tmp_path: Path) -> None:
    run = run_of(tmp_path / "old", **FEW)
    assert held(rerun(run, tmp_path / "half", dtype="float16"), run, *STRICTLY)[0] == 11
    other = rerun(run, tmp_path / "new")
    target: ModelFacts = dataclasses.replace(run.manifest.target, fingerprint="2" * 64)
    altered(other, target=target)
    assert held(other, run, *STRICTLY)[0] == 11


def misses(frame: pd.DataFrame) -> None:
    """At every second accepted position of document 0 the draft proposes another token."""
    rows = frame.index[(frame["document"] == 0) & (frame["accept_strict"] == 1)][::2]
    frame.loc[rows, "draft_top"] = frame.loc[rows, "token"] + 1
    frame.loc[rows, "accept_strict"] = 0


def test_one_document_that_differs_is_judged_by_bounds(tmp_path: Path) -> None:
    """Ten documents do not show a margin of 0.03, whether none of them differs or one."""
    run = run_of(tmp_path / "old", code=dataclasses.replace(CODE, documents=10))
    other = rewritten(rerun(run, tmp_path / "new"), "small", misses)
    alike = held(rerun(run, tmp_path / "other", fingerprint="0" * 64), run, *STRICTLY)[1]["items"][0]
    code, found, _ = held(other, run, *STRICTLY)
    (item,) = found["items"]
    assert (code, item["outcome"], item["note"]) == (11, "undecided", None)
    assert item["value"] == pytest.approx(tokens_per_round(other, 3) / tokens_per_round(run, 3) - 1)
    assert item["low"] < item["value"] < 0 == alike["value"]
    assert item["low"] <= alike["low"] < -0.03


def test_a_domain_that_differs_does_not_take_the_others_along(tmp_path: Path) -> None:
    run = run_of(tmp_path / "old", **FEW)
    other = rewritten(rerun(run, tmp_path / "new"), "small", misses)
    code, found, _ = held(other, run, *STRICTLY)
    assert code == 11
    assert {item["domain"]: item["outcome"] for item in found["items"]} == {
        "whole traffic": "undecided",
        "code": "undecided",
        "chat": "pass",
    }
    alone = held(other, run, "--margin", "1")[1]
    assert (alone["outcome"], alone["reason"]) == ("pass", "the threshold is reached")


@pytest.mark.parametrize(("noise", "same"), [(1e-7, True), (1e-3, False)])
def test_probabilities_may_differ_in_their_last_bits(noise: float, same: bool, tmp_path: Path) -> None:
    """Where acceptance is a probability, another machine computes it to about seven digits."""
    domain = Domain(documents=3, temperature=1.0, continuation="sampled")
    run = write_run(tmp_path / "old", Recipe(domains={"story": domain}, rules=("lossless",), gammas=(1, 3)))

    def shaken(frame: pd.DataFrame) -> None:
        frame["draft_token_prob"] *= np.float32(1 + noise)  # what its rounds are made of

    new = rewritten(rerun(run, tmp_path / "new"), "small", shaken)
    code, found, _ = held(new, run, "--rule", "lossless", *STRICTLY)
    assert (code, found["items"][0]["note"] is not None) == ((0, True) if same else (11, False))


def test_imported_runs_with_equal_counts_are_judged_by_bounds(tmp_path: Path) -> None:
    """A served draft is known by its name, and every request may have been served by another one."""
    runs = [logged(tmp_path / name, (3, 1), 0) for name in ("old", "new")]
    code, found, _ = held(runs[1], runs[0], "--margin", "0.05", *STRICTLY)
    (item,) = found["items"]
    assert code == 11
    before = (12 * 6 + 6) / (12 * 2 + 6)  # tokens of 12 requests and their rounds, one more each in every second request
    assert item["low"] == pytest.approx(-0.225 * 3 * (1 - 0.05 ** (1 / 12)) / before)  # -0.0573
    assert held(runs[1], runs[0], "--margin", "0.06", *STRICTLY)[0] == 0


def deep_misses(frame: pd.DataFrame) -> None:
    """A head whose first drafts are the same, and whose later ones are all wrong."""
    for name in frame.columns[frame.columns.str.startswith("agrees_")]:
        frame[name] = frame[name].astype("boolean").mask(frame[name].notna(), False)
    frame["accepted_run"] = frame["accepted_run"].clip(upper=1)


def head_run(folder: Path, **recipe: Any) -> Run:
    return write_run(
        folder, Recipe(**{"domains": {"code": CODE}, "drafts": {}, "heads": {"head": {}}, "gammas": (1, 3)} | recipe)
    )


def test_a_head_that_is_worse_at_depth_2_fails_where_its_first_drafts_are_the_same(tmp_path: Path) -> None:
    old = head_run(tmp_path / "old")
    new = rewritten(rerun(old, tmp_path / "new"), "head", deep_misses)
    code, found, _ = held(new, old, "--margin", "0.1")
    (item,) = found["items"]
    assert (code, item["measure"], item["outcome"], found["gamma"]) == (10, "tokens_per_round_change", "fail", 3)
    before, after = (tokens_per_round(run, 3, "head") for run in (old, new))
    assert item["value"] == pytest.approx(after / before - 1)
    code, found, _ = held(new, old, "--gamma", "1")
    assert (code, found["gamma"], found["items"][0]["value"]) == (0, 1, 0)


def test_a_gamma_that_is_named_compares_tokens_per_round_of_any_draft(tmp_path: Path) -> None:
    old = run_of(tmp_path / "old", code=CODE)
    new = run_of(tmp_path / "new", code=dataclasses.replace(CODE, alpha=0.4))
    for gamma in (1, 3):
        code, found, _ = held(new, old, "--gamma", str(gamma), "--margin", "0.1")
        (item,) = found["items"]
        assert (code, found["gamma"], item["measure"]) == (10, gamma, "tokens_per_round_change")
        assert item["value"] == pytest.approx(tokens_per_round(new, gamma) / tokens_per_round(old, gamma) - 1)
    code, _, text = held(new, old, "--gamma", "2")
    assert (code, text) == (2, "gamma 2 was not replayed in both runs | name a shared one: 1 or 3")


def test_heads_without_a_gamma_in_common_are_not_comparable(tmp_path: Path) -> None:
    code, _, text = held(head_run(tmp_path / "new"), head_run(tmp_path / "old", gammas=(2, 4)))
    assert code == 12
    assert "no gamma in common | profile both with the same gammas" in text


def test_a_rule_without_rounds_of_a_head_is_not_judged(tmp_path: Path) -> None:
    run = head_run(tmp_path / "old")
    code, _, text = held(rerun(run, tmp_path / "new"), run, "--rule", "additive:0.3")
    assert code == 12
    assert "additive_0p3 is lossy: its rounds leave the measured text" in text


def test_a_rule_that_has_rounds_in_one_run_alone_is_not_judged(tmp_path: Path) -> None:
    """The log of a head has no ranks by depth, of which trees are made."""
    rules = ("strict", "tree_2")
    old = write_run(tmp_path / "old", Recipe(domains={"code": CODE}, drafts={"head": 0.0}, rules=rules, gammas=(1, 3)))
    code, _, text = held(head_run(tmp_path / "new", rules=rules), old, "--rule", "tree_2")
    assert "tree_2 of a head is known for first drafts only" in text, text
    assert code == 12


@pytest.mark.parametrize(("noise", "same"), [(1e-7, True), (1e-2, False)])
def test_heads_on_sampled_text_are_the_same_with_equal_expectations_by_depth(
    noise: float, same: bool, tmp_path: Path
) -> None:
    story = Domain(documents=3, temperature=1.0, continuation="sampled")
    old = head_run(tmp_path / "old", domains={"story": story}, rules=("lossless",))

    def shaken(frame: pd.DataFrame) -> None:
        frame["emitted_lossless_2"] *= np.float32(1 - noise)

    new = rewritten(rerun(old, tmp_path / "new"), "head", shaken)
    _, found, _ = held(new, old, "--rule", "lossless", "--gamma", "3")
    assert (found["items"][0]["note"] is not None) == same
