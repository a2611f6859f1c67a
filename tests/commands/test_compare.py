"""Two drafts against each other: pairing, differences, intervals, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.compare.comparison import Comparison, compare
from alphaprof.config.load import changed_question
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.render.answer import answer_text
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, RunDraft, side_of
from alphaprof.stats.estimate import Interval
from alphaprof.stats.paired import FAR, differing, inverse_difference, share_difference, weighted_inverse_difference
from tests.synthetic import Domain, Recipe, interrupted, stored_totals, write_run

Array = np.ndarray[Any, Any]
DOMAINS = {"code": Domain(documents=20), "chat": Domain(documents=14, alpha=0.4)}
RECIPE = Recipe(domains=DOMAINS, drafts={"small": 0.0, "large": 0.15}, rules=("strict", "lossless", "additive_0p1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("compare") / "run", RECIPE)


@pytest.fixture(scope="module")
def found(run: Run) -> Comparison:
    return compare(RunDraft(run, "small"), RunDraft(run, "large"))


def changed(run: Run, folder: Path, **changes: object) -> Run:
    """The same run with another manifest; its files are linked."""
    folder.mkdir()
    for item in run.path.iterdir():
        if item.name != "manifest.json":
            (folder / item.name).symlink_to(item)
    (folder / "manifest.json").write_text(dataclasses.replace(run.manifest, **changes).to_json())
    return Run.open(folder)


def test_differences_are_those_of_the_position_log(run: Run, found: Comparison) -> None:
    log = pd.read_parquet(run.path / "positions")
    for item in found.differences:
        alpha = log[log["domain"] == item.domain].groupby("draft", observed=True)[f"accept_{item.rule}"].mean()
        assert item.difference.value == pytest.approx(alpha["large"] - alpha["small"], abs=1e-6)
        assert (item.first, item.second) == pytest.approx((alpha["small"], alpha["large"]), abs=1e-6)


def test_tokens_per_round_are_given_where_the_rule_has_rounds(found: Comparison) -> None:
    gammas = {item.rule: [one.gamma for one in item.tokens_per_round] for item in found.differences}
    assert gammas == {"strict": [1, 2, 3, 4], "lossless": [], "additive_0p1": []}
    for item in found.differences:
        for one in item.tokens_per_round:
            assert one.difference.value == pytest.approx(one.second - one.first)


def test_one_gamma_can_be_asked_for(run: Run) -> None:
    found = compare(RunDraft(run, "small"), RunDraft(run, "large"), ["strict"], 3)
    assert [[one.gamma for one in item.tokens_per_round] for item in found.differences] == [[3], [3]]
    with pytest.raises(OptionInvalid, match="gamma 9 was not replayed") as caught:
        compare(RunDraft(run, "small"), RunDraft(run, "large"), gamma=9)
    assert "1 or 2 or 3 or 4" in caught.value.hint


def test_tokens_per_round_differences_by_hand() -> None:
    rounds, other, tokens = np.array([5.0, 10.0]), np.array([4.0, 8.0]), np.array([10.0, 20.0])
    estimate = inverse_difference((rounds, tokens), (other, tokens), 0.95, 3)
    assert estimate.value == pytest.approx(30 / 12 - 30 / 15)
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - FAR * 3 * SHARE, 0.5 + FAR * 3 * SHARE))


def rounds_of(rng: np.random.Generator, documents: int, shift: float, easy: Array) -> tuple[Array, Array]:
    """Rounds and tokens of documents whose rounds emit 1 to 3 tokens."""
    tokens = rng.integers(30, 90, documents).astype(float)
    return np.round(tokens / np.clip(easy + shift, 1, 3)), tokens


def test_one_domain_has_the_difference_of_that_domain() -> None:
    rng = np.random.default_rng(3)
    easy = rng.uniform(1.2, 2.5, 20)
    first, second = rounds_of(rng, 20, 0, easy), rounds_of(rng, 20, 0.2, easy)
    units = [np.arange(20)]
    one, two, difference = weighted_inverse_difference([first], [second], units, [1.0], 0.95, 2)
    expected = inverse_difference(first, second, 0.95, 2)
    assert (one, two) == pytest.approx([side[1].sum() / side[0].sum() for side in (first, second)])
    assert dataclasses.astuple(difference) == pytest.approx(dataclasses.astuple(expected))


def test_shares_of_domains_weigh_rounds_per_token() -> None:
    """By hand: 0.25 of the tokens at 1/2 round a token, 0.75 at 1/4, and 1/4 and 1/4 with the other draft."""
    ones = np.array([1.0, 1.0])
    first = [(10 * ones, 20 * ones), (10 * ones, 40 * ones)]
    second = [(5 * ones, 20 * ones), (10 * ones, 40 * ones)]
    units = [np.arange(2), np.arange(2, 4)]
    one, two, difference = weighted_inverse_difference(first, second, units, [0.25, 0.75], 0.95, 7)
    assert (one, two) == pytest.approx((1 / (0.25 / 2 + 0.75 / 4), 4))
    room = 8 - one - difference.value
    assert difference.high - difference.value == pytest.approx(math.hypot(0.25, 0.75) * SHARE * min(FAR * 7, room))


def test_a_change_that_all_documents_share_has_no_error_as_a_share() -> None:
    """Every document takes a quarter more rounds: the difference varies with its length of rounds, its share does not."""
    rng = np.random.default_rng(4)
    first = rounds_of(rng, 400, 0, rng.uniform(1.0, 2.9, 400))
    sides = [first], [(1.25 * first[0], first[1])], [np.arange(400)], [1.0], 0.95, 2
    before, after, share = weighted_inverse_difference(*sides, relative=True)
    *_, absolute = weighted_inverse_difference(*sides)
    assert after / before == pytest.approx(0.8)
    floor = differing(400, 0.025) * min(FAR * 2, before - 1 + share.value)
    assert share.value - share.low == pytest.approx(floor)
    assert absolute.value - absolute.low > floor


SHARE = 1 - 0.025**0.5  # two units that agree perfectly


def test_the_largest_share_that_can_differ_is_that_of_which_n_agreeing_units_are_just_likely_enough() -> None:
    assert differing(96, 0.05) == pytest.approx(0.0307, abs=1e-4)
    assert (1 - differing(7, 0.1)) ** 7 == pytest.approx(0.1)
    assert differing(1, 0.05) == pytest.approx(0.95)


ORDERS: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "document by document": lambda left, _: np.repeat(np.arange(len(left)), left),
    "one of each in turn": lambda left, _: np.array([d for k in range(left.max()) for d in range(len(left)) if k < left[d]]),
    "at random": lambda left, rng: rng.permutation(np.repeat(np.arange(len(left)), left)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_one_position_more_that_is_lost_never_makes_a_bound_easier(order: str) -> None:
    """From identical documents on, until a twelfth of all positions is lost; the first loss is no jump."""
    documents = 32
    rng = np.random.default_rng(documents)
    counts = rng.integers(20, 60, documents)
    before = np.floor(0.65 * counts).astype(int)
    places = ORDERS[order](before, rng)[: int(counts.sum()) // 12]
    after, lows = before.copy(), []
    for place in [None, *places]:
        if place is not None:
            after[place] -= 1
        lows.append(share_difference((before, counts), (after, counts), 0.9).low)
    assert (np.diff(lows) <= 1e-12).all()
    assert lows[0] == pytest.approx(-FAR * differing(documents, 0.05))
    assert lows[1] == pytest.approx(lows[0], abs=2 / counts.sum())
    assert lows[-1] < lows[0] - 1 / 13


@given(seed=st.integers(0, 10_000), documents=st.integers(2, 40), share=st.floats(0, 1))
def test_no_other_draft_with_the_same_or_a_lower_alpha_has_an_easier_bound_than_identical_documents(
    seed: int, documents: int, share: float
) -> None:
    """Whatever was lost, and gained elsewhere."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, documents)
    before = rng.binomial(counts, 0.6)
    changed = rng.random(documents) < share
    after = np.where(changed, rng.binomial(counts, 0.6), before)
    if after.sum() > before.sum():
        before, after = after, before
    alike = share_difference((before, counts), (before, counts), 0.9)
    other = share_difference((before, counts), (after, counts), 0.9)
    assert other.low <= alike.low + 1e-12
    rounds = [counts - accepted + 1 for accepted in (before, after)]
    alike, other = (inverse_difference((rounds[0], counts), (second, counts), 0.9, 5) for second in rounds)
    assert other.value > 0 or other.low <= alike.low + 1e-12


def test_one_document_says_nothing(tmp_path: Path) -> None:
    single = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains={"code": Domain(documents=1)}))
    (strict, *_) = compare(RunDraft(single, "small"), RunDraft(single, "large")).differences
    assert (strict.difference.low, strict.difference.high) == pytest.approx((-strict.first, 1 - strict.first))


def test_documents_are_paired_by_prompt_whatever_their_order(tmp_path: Path) -> None:
    """Domains in another order number their documents otherwise; prompts that only one run has are left out and counted."""
    first = {
        name: dataclasses.replace(options, prompts=[f"{name} {row}" for row in range(20)], shortest=30, longest=30)
        for name, options in DOMAINS.items()
    }
    second = {"chat": first["chat"], "code": dataclasses.replace(first["code"], documents=15)}
    runs = [
        write_run(tmp_path / str(n), dataclasses.replace(RECIPE, domains=d, seed=n)) for n, d in enumerate((first, second))
    ]
    found = compare(RunDraft(runs[0], "small"), RunDraft(runs[1], "small"))
    assert (found.documents, found.unpaired, found.same_text) == (29, (5, 0), False)
    code = next(item for item in found.differences if (item.domain, item.rule) == ("code", "strict"))
    alphas = []
    for run in runs:
        documents = run.documents().to_pandas()
        log = pd.read_parquet(run.path / "positions", filters=[("draft", "==", "small"), ("domain", "==", "code")])
        kept = documents[(documents["domain"] == "code") & (documents["source_row"] < 15)]["document"]
        alphas.append(log[log["document"].isin(kept)]["accept_strict"].mean())
    assert (code.first, code.second) == pytest.approx(alphas, abs=1e-6)


def test_other_prompts_and_other_kinds_of_text_have_no_partner(tmp_path: Path, run: Run) -> None:
    foreign = dataclasses.replace(DOMAINS["code"], prompts=[f"other {row}" for row in range(20)])
    limited = dataclasses.replace(DOMAINS["code"], shortest=20, longest=20)
    for name, domain, problem in (("foreign", foreign, "no prompt in common"), ("limited", limited, "no kind of text")):
        other = write_run(tmp_path / name, dataclasses.replace(RECIPE, domains={"code": domain}))
        with pytest.raises(NotComparable, match=problem):
            compare(RunDraft(run, "small"), RunDraft(other, "large"))


def test_clusters_of_either_run_belong_together(tmp_path: Path) -> None:
    grouped = dataclasses.replace(DOMAINS["code"], clusters=[f"talk {row // 5}" for row in range(20)])
    runs = [
        write_run(tmp_path / str(number), dataclasses.replace(RECIPE, domains={"code": options}))
        for number, options in enumerate((DOMAINS["code"], grouped))
    ]
    for one, other in (runs, runs[::-1]):
        (strict, *_) = compare(RunDraft(one, "small"), RunDraft(other, "large")).differences
        assert (strict.documents, strict.clusters) == (20, 4)


def test_a_draft_is_not_compared_with_itself(run: Run) -> None:
    with pytest.raises(NotComparable, match="compared with itself"):
        compare(RunDraft(run, "small"), RunDraft(run, "small"))


def test_another_processing_and_other_data_are_refused(tmp_path: Path, run: Run) -> None:
    data = [run.manifest.config["data"][0] | {"path": "other.jsonl"}]
    others = {
        "other tokenizers or chat templates, and other data": changed(
            run, tmp_path / "b", tokenizer="1" * 64, config=run.manifest.config | {"data": data}
        ),
        "draft_processing": changed(run, tmp_path / "c", config=run.manifest.config | {"draft_processing": "same"}),
    }
    for reason, other in others.items():
        with pytest.raises(NotComparable, match=reason):
            compare(RunDraft(run, "small"), RunDraft(other, "small"))


def test_an_interrupted_run_is_named(tmp_path: Path, run: Run) -> None:
    part = interrupted(run, tmp_path / "part")
    result = compare(RunDraft(run, "small"), RunDraft(part, "large"))
    assert result.interrupted == (f"{part.path}:large",)
    assert "interrupted run" in answer_text(result, "terminal", to_file=True)


def test_a_draft_must_be_named_where_there_are_several(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="has 2 drafts") as caught:
        side_of(str(run.path))
    assert f"{run.path}:small" in caught.value.hint
    with pytest.raises(OptionInvalid, match="has no draft 'tiny'"):
        side_of(f"{run.path}:tiny")
    assert side_of(f"{run.path}:large").draft == "large"
    alone = write_run(tmp_path / "alone", Recipe()).path
    assert side_of(str(alone)).draft == "small"
    with pytest.raises(OptionInvalid, match="has no draft 'tiny'"):
        side_of(f"{alone}:tiny")


def test_another_attention_of_the_target_is_named(run: Run, found: Comparison, tmp_path: Path) -> None:
    config = run.manifest.config | {"target": run.manifest.config["target"] | {"attn_implementation": "eager"}}
    other = compare(RunDraft(run, "small"), RunDraft(changed(run, tmp_path / "eager", config=config), "large"))
    assert found.notes == ()
    assert other.notes == ("attn_implementation of the target is the default in the first, eager in the second",)


def test_a_hybrid_is_called_one(run: Run, tmp_path: Path) -> None:
    hybrids = {"both": {"first": "small", "then": "large", "min_match": 1}}
    drafts = run.manifest.config["drafts"] | {"small": {"kind": "prompt_lookup"}}
    config = run.manifest.config | {"drafts": drafts, "hybrids": hybrids}
    mixed = changed(run, tmp_path / "run (1) mixed", config=config)
    with pytest.raises(OptionInvalid, match="mixed:both is a hybrid of two drafts") as caught:
        side_of(f"{mixed.path}:both")
    assert f"{mixed.path}:small and {mixed.path}:large; alphaprof report '{mixed.path}' --show" in caught.value.hint


def test_the_command_prints_every_rule(run: Run) -> None:
    sides = [f"{run.path}:small", f"{run.path}:large"]
    text = CliRunner().invoke(app, ["compare", *sides, "--rules", "top_m:2"]).output
    assert re.search(r"^ code +top_m_2~", text, re.MULTILINE)
    content = json.loads(CliRunner().invoke(app, ["compare", *sides, "--format", "json"]).output)
    assert {item["rule"] for item in content["differences"]} == {"strict", "lossless", "additive_0p1"}
    assert all(item["on_policy"] == (item["rule"] != "lossless") for item in content["differences"])


def first_lines(answer: Comparison) -> str:
    """The first five lines that are not empty."""
    return " ".join([line for line in answer_text(answer, "terminal", to_file=True).splitlines() if line.strip()][:5])


def written(interval: Interval, digits: int = 2) -> str:
    return f"{interval.value:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def test_the_first_lines_say_which_draft_accepts_more_and_by_how_much(run: Run, found: Comparison) -> None:
    (overall,) = found.overall
    asked = changed_question(run.manifest.config, ["decision.draft=small"])
    assert found.gamma == build_report(run, config=asked).answer.gamma  # what the verdict prefers for the first draft
    main = next(each for each in overall.tokens_per_round if each.gamma == found.gamma)
    assert (overall.domains, overall.documents) == (("code", "chat"), 34)
    text = first_lines(found)
    assert text.startswith(f"second (large) accepts more than first (small): {written(main.difference)} tokens per round at")
    assert f"first {main.first:.2f}, second {main.second:.2f} over 2 domains" in text


def test_the_difference_over_all_domains_is_that_of_all_their_documents(run: Run, found: Comparison) -> None:
    for tokens in found.overall[0].tokens_per_round:
        rows = stored_totals(run, "small")
        rows = rows[rows["rule"] == "strict"]
        assert tokens.first == pytest.approx(rows["tokens"].sum() / rows[f"rounds_{tokens.gamma}"].sum())
        assert tokens.difference.value == pytest.approx(tokens.second - tokens.first)


def test_shares_and_gamma_of_the_decision_are_those_of_the_answer(tmp_path: Path) -> None:
    weights = {"code": 0.2, "chat": 0.8, "none": 0.0}
    domains = DOMAINS | {"none": Domain(documents=4)}
    recipe = dataclasses.replace(RECIPE, domains=domains, decision={"weights": weights, "gamma": 2})
    run = write_run(tmp_path / "run", recipe)
    found = compare(RunDraft(run, "small"), RunDraft(run, "large"))
    (overall,) = found.overall
    assert (found.gamma, overall.weights, overall.documents) == (2, {"code": 0.2, "chat": 0.8}, 34)
    by_domain = {each.domain: each.tokens_per_round[1] for each in found.differences if each.rule == "strict"}
    first = 1 / sum(share / by_domain[name].first for name, share in (("code", 0.2), ("chat", 0.8)))
    assert overall.tokens_per_round[1].first == pytest.approx(first)


@pytest.mark.parametrize(
    ("recipe", "gamma"),
    [({"latency": False}, 4), ({"decision": {"gamma": 5}, "gammas": (1, 2, 5)}, 2), ({"decision": {"p_min": "auto"}}, None)],
)
def test_the_gamma_of_the_answer_is_one_of_both(recipe: dict[str, Any], gamma: int | None, tmp_path: Path) -> None:
    """The largest without step times; of a decision that the second run does not have, what step times prefer of the
    others, whatever p_min the decision has.
    """
    first = write_run(tmp_path / "first", dataclasses.replace(RECIPE, **recipe))
    second = write_run(tmp_path / "second", RECIPE)
    found = compare(RunDraft(first, "small"), RunDraft(second, "small"))
    assert found.gamma in {each.gamma for each in found.overall[0].tokens_per_round}
    assert gamma in (None, found.gamma)


def test_what_cannot_be_told_apart_is_not_called_better(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, drafts={"one": 0.0, "two": 0.001}))
    text = first_lines(compare(RunDraft(run, "one"), RunDraft(run, "two"), ["strict"]))
    assert text.startswith("no clear difference: ")


def test_without_rounds_alpha_is_compared(tmp_path: Path) -> None:
    domains = {"wiki": Domain(documents=20, on_policy=False, continuation="text")}
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains=domains))
    found = compare(RunDraft(run, "small"), RunDraft(run, "large"), ["strict"])
    difference = found.differences[0].difference
    assert difference is not None
    assert found.overall == ()
    assert first_lines(found).startswith("no rule has rounds on this text")
    assert written(difference, 3) in answer_text(found, "terminal")


def test_texts_of_one_token_have_no_rounds_to_compare(tmp_path: Path) -> None:
    domains = {"code": DOMAINS["code"], "short": Domain(documents=6, shortest=1, longest=1)}
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains=domains))
    found = compare(RunDraft(run, "small"), RunDraft(run, "large"), ["strict"])
    assert [each.tokens_per_round == () for each in found.differences] == [False, True]
    assert found.overall[0].domains == ("code",)


def test_runs_without_a_common_gamma_are_compared_by_alpha(tmp_path: Path, run: Run) -> None:
    other = RunDraft(write_run(tmp_path / "other", dataclasses.replace(RECIPE, gammas=(5, 6))), "large")
    found = compare(RunDraft(run, "small"), other)
    assert (found.gamma, found.overall) == (None, ())
    assert "the two have no gamma in common: the table compares alpha" in answer_text(found, "terminal")
