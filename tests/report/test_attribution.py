"""Why drafts are rejected: worked out by hand, and counted again row by row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.sections.causes import BY_CHANCE, CAUSES, Attribution
from alphaprof.run.reader import Run
from alphaprof.totals.lookup import first_proposals
from tests.loops import each
from tests.reporting import as_terminal, log_of, only, reported
from tests.synthetic import EOS, NO_LIMIT, Domain, Recipe, altered, replaced, rewritten, write_run

NOISE = 0.125
MARKER = 5  # a special token that ends no text
GREEDY = Recipe(
    domains={"code": Domain(documents=6, coverage=0.8), "chat": Domain(documents=5, alpha=0.4, bursts=0.5)},
    lookups=("ngram",),
    shard_documents=4,
)
SAMPLED = Recipe(
    domains={name: Domain(documents=5, alpha=alpha, temperature=0.8, continuation="sampled", coverage=coverage)
             for name, alpha, coverage in (("code", 0.8, 1.0), ("chat", 0.4, 0.9))},
    rules=("one_hot", "lossless"),
)  # fmt: skip


def with_special(run: Run) -> Run:
    """The run with a special token beside EOS."""
    target = dataclasses.replace(run.manifest.target, special=(EOS, MARKER))
    altered(run, target=target)
    return run


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy text in which some tokens are special and some tied."""
    run = write_run(tmp_path_factory.mktemp("greedy") / "run", GREEDY)

    def marked(rows: pd.DataFrame) -> None:
        rows.loc[rows["position"] % 11 == 4, ["token", "target_top"]] = MARKER

    def change(rows: pd.DataFrame) -> None:
        marked(rows)
        tied, top = rows["position"] % 7 == 3, rows["target_top_prob"]
        for name in ("target_second_prob", "target_token_prob", "target_prob_of_draft_top"):
            rows[name] = rows[name].mask(tied & rows[name].notna(), top)
        rows.loc[rows["position"] % 3 == 1, "draft_rank_of_token"] += 7

    return with_special(rewritten(rewritten(run, "small", change), "ngram", marked))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Sampled text, without a draft that looks up."""
    return with_special(write_run(tmp_path_factory.mktemp("sampled") / "run", SAMPLED))


def of(report: RunReport, domain: str, draft: str = "small", rule: str = "strict") -> Attribution:
    (found,) = [item for item in report.section("causes") if (item.domain, item.draft, item.rule) == (domain, draft, rule)]
    return found


def shares(item: Attribution) -> dict[str, float]:
    return {cause.name: cause.share.value for cause in item.causes}


# By hand: one text, and the cause of every position that is lost.
LOST = {
    1: "no proposal",
    2: "numerical tie",
    3: "special tokens",
    4: "prompt lookup",
    5: "rank 2 to 4",
    6: "target uncertain",
}
LOST |= {7: "draft"}


def by_hand(path: Path, **decision: Any) -> Run:
    """Twelve tokens: the first right, seven lost to one cause each, four right."""
    recipe = Recipe(
        domains={"d": Domain(documents=1, shortest=12, longest=12)},
        gammas=(1, 2),
        decision={"draft": "small", "gamma": 2} | decision,
        latency=not decision,
    )
    run = with_special(write_run(path / "run", recipe))
    table = run.continuations(0)  # whose fifth token stands after the fourth in the prompt already
    ids = {
        "prompt_ids": [11, 12, 13, 14, 15, MARKER, 104, 16],
        "continuation_ids": [*range(100, 103), MARKER, *range(104, 112)],
    }
    for name, tokens in ids.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pa.array([tokens], table.schema.field(name).type))
    run = replaced(run, {}, {0: table})

    def causes(rows: pd.DataFrame) -> None:
        rows["token"] = rows["target_top"] = np.arange(100, 112)
        rows.loc[3, ["token", "target_top"]] = MARKER
        rows["draft_top"] = np.where(np.isin(np.arange(12), list(LOST)), 99, rows["token"])
        rows[["target_top_prob", "target_token_prob"]] = 0.9
        rows["target_second_prob"], rows["target_prob_of_draft_top"] = 0.01, 0.001
        rows["draft_rank_of_token"] = np.where(np.isin(np.arange(12), list(LOST)), 9, 1)
        rows.loc[2, ["target_top_prob", "target_token_prob", "target_second_prob", "target_prob_of_draft_top"]] = 0.5
        rows.loc[5, "draft_rank_of_token"] = 4
        rows.loc[6, ["target_top_prob", "target_token_prob", "target_second_prob"]] = 0.4, 0.4, 0.3
        rows["proposed"] = np.where(np.arange(12) == 1, 0, NO_LIMIT)
        rows.loc[1, ["draft_top", "target_prob_of_draft_top", "draft_rank_of_token"]] = None

    return rewritten(run, "small", causes)


def test_each_cause_has_a_case_that_goes_to_it(tmp_path: Path) -> None:
    item = of(build_report(by_hand(tmp_path)), "d")
    assert shares(item) == pytest.approx(dict.fromkeys(LOST.values(), 1 / 12))
    assert item.lost.value == pytest.approx(7 / 12)
    assert [cause.name for cause in item.causes] == [name for name in CAUSES if name in LOST.values()]


@pytest.mark.parametrize("context", [8, 12, 100])
def test_what_lies_beyond_the_drafts_context_is_told_apart(context: int, tmp_path: Path) -> None:
    """Eight tokens of prompt: to propose at position t a draft has to read t more, less the token itself."""
    run = by_hand(tmp_path)

    def change(rows: pd.DataFrame) -> None:
        rows["proposed"] = np.where(rows["position"].isin([1, 6, 11]), 0, NO_LIMIT)
        rows.loc[rows["proposed"] == 0, ["draft_top", "target_prob_of_draft_top", "draft_rank_of_token"]] = None

    run = rewritten(run, "small", change)
    facts = dataclasses.replace(run.manifest.drafts["small"], context=context)
    altered(run, drafts=run.manifest.drafts | {"small": facts})
    found = shares(of(build_report(run), "d"))
    beyond = sum(8 + position - 1 >= context for position in (1, 6, 11))
    assert found.get("beyond context", 0) == pytest.approx(beyond / 12)
    assert found.get("no proposal", 0) == pytest.approx((3 - beyond) / 12)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_causes_add_up_to_what_alpha_leaves(kind: str, request: pytest.FixtureRequest) -> None:
    report = build_report(request.getfixturevalue(kind))
    rules = {item.rule for item in report.section("causes")}
    assert rules == ({"strict"} if kind == "greedy" else {"one_hot", "lossless"})
    for item in report.section("causes"):
        result = only(report, item.domain, item.draft, item.rule)
        assert item.lost.value == pytest.approx(1 - result.alpha.value * result.coverage, abs=1e-12)
        assert sum(shares(item).values()) == pytest.approx(item.lost.value, abs=1e-12)
        assert all(cause.share.low <= cause.share.value <= cause.share.high for cause in item.causes)
        for cause in item.causes:
            assert (cause.remedy == BY_CHANCE) == (kind == "sampled" and cause.name == "target uncertain"), cause


@each("longest", [1, 2, 3, 5])
@each("ids", [2, 4, 30])
def test_lookup_by_sorting_proposes_what_lookup_by_index_does(ids: int, longest: int) -> None:
    rng = np.random.default_rng(ids)
    texts = [rng.integers(0, ids, length) for length in (1, 2, 40, 90)]
    start = np.cumsum([0, *map(len, texts[:-1])])
    found = np.split(first_proposals(np.concatenate(texts), start, longest), start[1:])
    draft = PromptLookup("ngram", longest, (1,), ids, "float32")
    for text, proposed in zip(texts, found, strict=True):
        assert proposed[0] == -1
        assert proposed[1:].tolist() == draft.columns(text, 1)["draft_top"].tolist()
    assert first_proposals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("domain", "decision"),
    [
        (Domain(on_policy=False, continuation="given"), {}),
        (Domain(), {"rule": "additive_0p1"}),
        (Domain(), {"rule": "one_hot"}),
        (Domain(temperature=1.0, continuation="sampled"), {"rule": "strict"}),
    ],
)
def test_without_rounds_causes_still_add_up(domain: Domain, decision: dict[str, str], tmp_path: Path) -> None:
    rules = ("strict", "one_hot", "additive_0p1")
    report = reported(tmp_path, Recipe(domains={"d": domain}, rules=rules, decision=decision, lookups=("ngram",)))
    wanted = decision.get("rule", "strict")
    for draft in ("small", "ngram"):
        item, result = of(report, "d", draft, wanted), only(report, "d", draft, wanted)
        assert item.lost.value == pytest.approx(1 - result.alpha.value * result.coverage)
        assert sum(shares(item).values()) == pytest.approx(item.lost.value)


def test_by_lot_what_was_right_is_lost_to_the_target_and_ties_are_no_noise(tmp_path: Path) -> None:
    """One_hot on greedy text keeps a draft with probability p(d): 0.5 at the tie, 0.001 elsewhere."""
    item = of(build_report(by_hand(tmp_path, rule="one_hot")), "d", rule="one_hot")
    one = 0.999 / 12
    uncertain = 6 * one + 0.5 / 12  # five that were right, the one where the target is undecided, and the tie
    expected = dict.fromkeys(("special tokens", "prompt lookup", "rank 2 to 4", "draft"), one)
    expected |= {"no proposal": 1 / 12, "target uncertain": uncertain}
    assert shares(item) == pytest.approx(expected, rel=1e-4)


def test_the_ceiling_of_one_hot_is_the_mean_top_probability(sampled: Run) -> None:
    report, rows = build_report(sampled), log_of(sampled)
    for domain, part in rows.groupby("domain", observed=True):
        item = of(report, str(domain), rule="one_hot")
        assert item.ceiling == pytest.approx(part["target_top_prob"].mean())
        assert of(report, str(domain), rule="lossless").ceiling is None
        assert 1 - item.lost.value <= item.ceiling


def test_the_section_shows_shares_and_the_remedy_of_each_domains_largest_cause(greedy: Run) -> None:
    report = build_report(greedy)
    text, items = as_terminal(report, 250, "causes"), [of(report, domain) for domain in ("code", "chat")]
    (heading,) = [line for line in text.splitlines() if line.startswith("draft small, rule strict")]
    assert heading == "draft small, rule strict: share of positions lost, by cause"
    for item in items:
        for share in (item.lost, *(cause.share for cause in item.causes)):
            assert f"{share.value:.3f} [{share.low:.2f}, {share.high:.2f}]" in text
    largest = {max(item.causes, key=lambda cause: cause.share.value).name for item in items}
    for cause in (cause for item in items for cause in item.causes):
        assert (f"most to {cause.name}; what would help: {cause.remedy}" in text) == (cause.name in largest)
