"""Section trees: coverage, and rounds of the best trees, counted again token by token on the half that tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.report.build import build_report
from alphaprof.report.sections.trees import NODES, DraftTrees, compute
from alphaprof.report.verdict import held_out
from alphaprof.run.reader import Run
from alphaprof.theory.certificates import margin_thresholds, strict_thresholds
from alphaprof.theory.trees import Tree, optimal_tree
from alphaprof.totals.documents import lots_of
from tests.reporting import as_terminal, log_of, reported
from tests.synthetic import Domain, Recipe, rewritten, stored_totals, write_run

STORY = Domain(documents=10, alpha=0.6, temperature=0.7, continuation="sampled")
RECIPE = Recipe(
    domains={
        "code": Domain(documents=14, alpha=0.75, bursts=0.4),
        "chat": Domain(documents=11, alpha=0.4, coverage=0.9),
        "story": STORY,
        "wiki": Domain(documents=5, on_policy=False, continuation="text"),
    },
    gammas=(1, 2, 3, 5),
    lookups=("lookup",),
)
DOMAINS = ["code", "chat", "story"]  # with text of the target


def spread(seed: int = 0) -> Callable[[pd.DataFrame], None]:
    """Gives wrong drafts a token of rank 2, 3, ... where the synthetic log knows 2 only."""
    rng = np.random.default_rng(seed)

    def change(frame: pd.DataFrame) -> None:
        ranks = frame["draft_rank_of_token"].astype("Int32")
        wrong = (ranks > 1).fillna(False).to_numpy(dtype=bool)
        ranks[wrong] = 1 + rng.geometric(0.4, int(wrong.sum()))
        frame["draft_rank_of_token"] = ranks

    return change


def made(path: Path, recipe: Recipe = RECIPE, seed: int = 0) -> Run:
    """A synthetic run whose ranks are those of a draft that is near where it is wrong."""
    return rewritten(write_run(path / "run", recipe), "small", spread(seed))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made(tmp_path_factory.mktemp("trees"))


@pytest.fixture(scope="module")
def found(run: Run) -> DraftTrees:
    return trees_of(run)


def trees_of(run: Run, draft: str = "small") -> DraftTrees:
    (item,) = [item for item in compute(build_report(run)) if item.draft == draft]
    return item


def rows_by_document(run: Run, domain: str) -> dict[int, list[int]]:
    """The ranks of every document of a domain; 0: no proposal."""
    log = log_of(run)
    mine = log[(log["draft"] == "small") & (log["domain"] == domain)]
    return {
        int(document): rows["draft_rank_of_token"].fillna(0).astype(int).tolist()
        for document, rows in mine.groupby("document")
    }


def decoded(ranks: Sequence[int], paths: set[tuple[int, ...]]) -> list[tuple[int, int, bool]]:
    """The rounds of one document, token by token: accepted, emitted, and whether anything was drafted."""
    rounds, place = [], 1  # the prefill emits the first token
    while place < len(ranks):
        start, path = place, ()
        while place < len(ranks) and (*path, ranks[place]) in paths:
            path = (*path, ranks[place])
            place += 1
        place = min(place + 1, len(ranks))  # the target's own token
        rounds.append((len(path), place - start, ranks[start] > 0))
    return rounds


def halves(run: Run, domains: Sequence[str]) -> dict[str, set[int]]:
    """The documents of each domain that are held out."""
    documents = run.documents().to_pandas()
    members = {domain: documents[documents["domain"] == domain] for domain in domains}
    masks = held_out({domain: lots_of(rows["prompt_hash"]) for domain, rows in members.items()})
    return {domain: set(rows["document"][masks[domain]]) for domain, rows in members.items()}


def ranks_of_tested(run: Run, domain: str) -> list[list[int]]:
    """The ranks of the documents of a domain that test."""
    tested = halves(run, DOMAINS)[domain]
    return [values for document, values in rows_by_document(run, domain).items() if document in tested]


@pytest.mark.parametrize("domain", DOMAINS)
def test_rounds_are_those_of_a_plain_loop_over_tokens(run: Run, found: DraftTrees, domain: str) -> None:
    """Of every tree, on the documents that test."""
    for tree in found.trees:
        rounds = [one for values in ranks_of_tested(run, domain) for one in decoded(values, set(tree.paths))]
        tokens = tree.by_domain[domain]
        assert tokens is not None
        assert tokens.value == pytest.approx(sum(emitted for _, emitted, _ in rounds) / len(rounds))
        assert 1 <= tokens.low < tokens.value < tokens.high <= len(tree.levels) + 1


def test_the_whole_traffic_is_all_of_its_rounds(run: Run, found: DraftTrees) -> None:
    """As observed: of all documents that test, and beside it the chain as deep, paired."""
    for tree in found.trees:
        of = {
            name: [
                one for domain in DOMAINS for values in ranks_of_tested(run, domain) for one in decoded(values, set(paths))
            ]
            for name, paths in (("tree", tree.paths), ("chain", Tree.chain(len(tree.levels)).paths))
        }
        tokens = {name: sum(emitted for _, emitted, _ in rounds) / len(rounds) for name, rounds in of.items()}
        assert tree.rounds == len(of["tree"])
        assert tree.tokens_per_round.value == pytest.approx(tokens["tree"])
        assert tree.chain.value == pytest.approx(tokens["chain"])
        assert tree.more_than_chain.value == pytest.approx(tokens["tree"] - tokens["chain"])
        apart = tree.tokens_per_round.high - tree.chain.low - tree.more_than_chain.value
        assert tree.more_than_chain.high - tree.more_than_chain.value < apart  # paired


def test_given_weights_weigh_rounds_as_time_does(tmp_path: Path) -> None:
    """Rounds of a domain in proportion to its share of output tokens, however many documents it has."""
    weights = {"code": 0.9, "chat": 0.1}
    domains = {"code": RECIPE.domains["code"], "chat": Domain(documents=30, alpha=0.3)}
    for tree in trees_of(made(tmp_path, Recipe(domains=domains, decision={"weights": weights}))).trees:
        rounds = {domain: weight / tree.by_domain[domain].value for domain, weight in weights.items()}
        assert tree.tokens_per_round.value == pytest.approx(1 / sum(rounds.values()))


def test_coverage_is_that_of_the_log(run: Run, found: DraftTrees) -> None:
    """On text that the target chose: ranks up to the width, and where the divergence leaves no other possibility."""
    log = log_of(run)
    mine = log[(log["draft"] == "small") & log["domain"].isin(DOMAINS)]
    ranks, divergence = mine["draft_rank_of_token"].fillna(0), mine["kl_target_draft"].clip(lower=0).to_numpy()
    for item in found.coverage:
        assert item.covered.value == pytest.approx(((ranks >= 1) & (ranks <= item.width)).mean())
        sure = divergence + 1e-5 < margin_thresholds(mine["target_margin"].to_numpy(), item.width)
        assert item.by_margin.value == pytest.approx(sure.mean())
        assert 0 < item.by_margin.value < 1
    exact = strict_thresholds(mine["target_top_prob"].to_numpy(), mine["target_second_prob"].to_numpy())
    assert found.coverage[0].certified.value == pytest.approx((divergence + 1e-5 < exact).mean())
    assert found.coverage[0].certified.value >= found.coverage[0].by_margin.value
    assert [item.certified for item in found.coverage[1:]] == [None] * 3  # no such rule was measured


def test_trees_are_chosen_on_the_other_half(run: Run, found: DraftTrees) -> None:
    """The best trees for the ranks of documents that are not tested, domains by their share of tokens."""
    tested, ranks = halves(run, DOMAINS), {domain: rows_by_document(run, domain) for domain in DOMAINS}
    tokens = {domain: sum(map(len, ranks[domain].values())) for domain in DOMAINS}
    pooled = np.zeros(64)
    for domain in DOMAINS:
        chosen = [rank for document, values in ranks[domain].items() if document not in tested[domain] for rank in values]
        counts = np.array([chosen.count(rank) for rank in range(1, 65)])
        pooled += tokens[domain] / sum(tokens.values()) * counts / len(chosen)
    assert found.tested_on == sum(map(len, tested.values()))
    assert found.chosen_on == sum(map(len, ranks.values())) - found.tested_on
    assert [tree.paths for tree in found.trees] == [optimal_tree(pooled, nodes, 5).paths for nodes in NODES]


def test_text_that_the_target_did_not_choose_has_no_rounds(tmp_path: Path) -> None:
    report = reported(tmp_path, Recipe(domains={"wiki": RECIPE.domains["wiki"]}))
    (item,) = compute(report)
    assert (item.trees, item.coverage, item.tested_on) == ((), (), 0)
    assert "no tree could be tested on the whole traffic" in as_terminal(report, 150, "trees")


def test_one_document_is_never_sure_of_anything(tmp_path: Path) -> None:
    item = trees_of(made(tmp_path, Recipe(domains={"code": Domain(documents=1)})))
    assert {tree.tokens_per_round for tree in item.trees} == {None}
    assert all((each.covered.low, each.covered.high) == (0, 1) for each in item.coverage)


def test_trees_of_a_head_follow_its_ranks_by_depth(tmp_path: Path) -> None:
    """A head without ranks by depth has no trees; of first drafts' shares no formula is shown."""
    recipe = Recipe(heads={"head": {"ranks_by_depth": True}, "bare": {}}, rules=("strict", "tree_2"), gammas=(1, 2, 3))
    run = write_run(tmp_path / "run", recipe)
    report = build_report(run)
    assert [item.draft for item in compute(report)] == ["small", "head"]
    item = trees_of(run, "head")
    assert {tree.iid_tokens_per_round for tree in item.trees} == {None}
    assert max(len(tree.levels) for tree in item.trees) == 3
    assert (item.coverage[1].certified, item.coverage[1].by_margin) == (None, None)
    full = next((tree for tree in item.trees if set(tree.paths) >= set(Tree.full(2, 3).paths)), None)
    assert full is not None  # the synthetic head's tokens have rank 1 or 2
    tested = halves(run, list(recipe.domains))
    totals = stored_totals(run, "head")
    mine = totals[(totals["rule"] == "tree_2") & totals["document"].isin(set.union(*tested.values()))]
    assert full.rounds == mine["rounds_3"].sum()
