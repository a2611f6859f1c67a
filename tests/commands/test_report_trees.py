"""`alphaprof trees`: shares of ranks and rounds of trees, counted again token by token; halves, texts, files and words."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.commands.trees import NODES, TextTrees, TreesReport, TreeTokens, build_trees, read_trees
from alphaprof.errors import OptionInvalid
from alphaprof.render.answer import answer_text
from alphaprof.render import format as fmt
from alphaprof.report.build import build_report
from alphaprof.report.answer.verdict import held_out
from alphaprof.run.reader import Run, RunDraft
from alphaprof.stats.estimate import Interval
from alphaprof.theory.trees import Tree, optimal_tree
from alphaprof.totals.documents import lots_of
from tests.conftest import Runner
from tests.reporting import log_of, only
from tests.synthetic import Domain, Recipe, interrupted, rewritten, stored_totals, write_run

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
BUSHY = [(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1), (1, 1, 4)]


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
def side(run: Run) -> RunDraft:
    return RunDraft(run, "small")


@pytest.fixture(scope="module")
def found(side: RunDraft) -> TreesReport:
    return build_trees(side, given={"mine.json": Tree.from_paths(BUSHY)})


def every_document(side: RunDraft, **trees: Tree) -> TreesReport:
    """The user's trees on all documents."""
    return build_trees(side, nodes=(), given=trees)


def text_of(report: TreesReport, domain: str) -> TextTrees:
    (text,) = [text for text in report.texts if text.domain == domain]
    return text


def tokens_of(report: TreesReport, rows: Sequence[TreeTokens], name: str) -> TreeTokens:
    """The row of the tree of that name."""
    (row,) = [row for tree, row in zip(report.trees, rows, strict=True) if tree.name == name == row.tree]
    return row


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


# Numbers.


@pytest.mark.parametrize("domain", ["code", "chat", "story"])
def test_rounds_are_those_of_a_plain_loop_over_tokens(run: Run, found: TreesReport, domain: str) -> None:
    """Of every tree, on the held-out documents: rounds, tokens per round, acceptance by depth."""
    text, tested = text_of(found, domain), halves(run, ["code", "chat", "story"])[domain]
    ranks = [values for document, values in rows_by_document(run, domain).items() if document in tested]
    assert text.tested_documents == text.held_out == len(ranks) > 3
    for tree, row in zip(found.trees, text.trees, strict=True):
        rounds = [one for values in ranks for one in decoded(values, set(tree.paths))]
        accepted, emitted, ready = (np.array(column) for column in zip(*rounds, strict=True))
        assert row.rounds == len(rounds)
        assert row.tokens_per_round.value == pytest.approx(emitted.sum() / len(rounds))
        assert row.tokens_per_round.low < row.tokens_per_round.value < row.tokens_per_round.high
        assert row.tokens_per_round.low >= 1
        assert row.tokens_per_round.high <= tree.depth + 1
        shares = [float((accepted >= depth).sum() / ready.sum()) for depth in range(1, tree.depth + 1)]
        assert row.marginal == pytest.approx(shares)


@pytest.mark.parametrize("nodes", [NODES, ()])
def test_shares_of_ranks_are_those_of_the_log(run: Run, side: RunDraft, nodes: tuple[int, ...]) -> None:
    """Whatever the size of the trees asks to know of larger ranks."""
    for text in build_trees(side, nodes=nodes).texts:
        ranks = Counter(rank for values in rows_by_document(run, text.domain).values() for rank in values)
        total = sum(ranks.values())
        assert text.positions == total
        assert [share.value for share in text.ranks] == pytest.approx([ranks[rank] / total for rank in range(1, 9)])
        assert text.silent.value == pytest.approx(ranks[0] / total)
        assert text.beyond.value == pytest.approx(sum(count for rank, count in ranks.items() if rank > 8) / total)
        assert sum(share.value for share in (*text.ranks, text.beyond, text.silent)) == pytest.approx(1)
        assert all(0 <= share.low <= share.value <= share.high <= 1 for share in (*text.ranks, text.beyond, text.silent))
        assert text.ranks[0].low < text.ranks[0].value < text.ranks[0].high


def test_the_share_of_rank_one_is_alpha_where_every_position_has_a_proposal(run: Run, found: TreesReport) -> None:
    """With its interval: the same estimate over the same documents."""
    alpha = only(build_report(run), "code", "small", "strict").alpha
    share = text_of(found, "code").ranks[0]
    assert dataclasses.astuple(share) == pytest.approx(dataclasses.astuple(alpha))


@pytest.mark.parametrize("gamma", [1, 5])
@pytest.mark.parametrize(("domain", "rule"), [("chat", "strict"), ("story", "one_hot")])
def test_a_chain_has_the_rounds_of_a_report(run: Run, side: RunDraft, domain: str, rule: str, gamma: int) -> None:
    """Tokens per round with their interval, rounds and acceptance by depth, on all documents."""
    report = every_document(side, mine=Tree.chain(gamma))
    (item,) = [item for item in only(build_report(run), domain, "small", rule).gammas if item.gamma == gamma]
    for name in ("mine", f"chain {gamma}"):
        row = tokens_of(report, text_of(report, domain).trees, name)
        assert dataclasses.astuple(row.tokens_per_round) == pytest.approx(dataclasses.astuple(item.tokens_per_round))
        assert row.rounds == item.rounds
        assert row.marginal == pytest.approx(item.marginal)


@pytest.mark.parametrize("weights", [None, {"code": 0.9, "chat": 0.1}])
def test_the_whole_traffic_is_that_of_a_report(tmp_path: Path, weights: dict[str, float] | None) -> None:
    domains = {name: RECIPE.domains[name] for name in ("code", "chat")}
    decision = {"draft": "small", "gamma": 3, "weights": weights}
    run = made(tmp_path, dataclasses.replace(RECIPE, domains=domains, lookups=(), decision=decision))
    report, traffic = every_document(RunDraft(run, "small"), mine=Tree.chain(3)), build_report(run).traffic
    row = tokens_of(report, report.traffic, "mine")
    assert dataclasses.astuple(row.tokens_per_round) == pytest.approx(dataclasses.astuple(traffic.tokens_per_round))
    assert report.weights == pytest.approx(traffic.weights)
    assert report.weights_observed == (weights is None)
    parts = [tokens_of(report, text.trees, "mine") for text in report.texts]
    assert (
        min(part.marginal[0] or 0 for part in parts) < (row.marginal[0] or 0) < max(part.marginal[0] or 0 for part in parts)
    )


def test_the_model_has_the_shares_of_the_half_that_is_tested(run: Run, found: TreesReport) -> None:
    """For a chain 1 + b_1 + b_1^2; for the traffic with b_1 by the weights of domains."""
    domains, traffic = ["code", "chat", "story"], 0.0
    (chain,) = [tree for tree in found.trees if (tree.kind, tree.depth) == ("chain", 3)]
    for domain in domains:
        tested = halves(run, domains)[domain]
        ranks = [rank for document, row in rows_by_document(run, domain).items() if document in tested for rank in row]
        share = ranks.count(1) / len(ranks)
        traffic += found.weights[domain] * share
        row = tokens_of(found, text_of(found, domain).trees, chain.name)
        assert row.iid_tokens_per_round == pytest.approx(1 + share + share**2 + share**3)
        assert row.iid_error == pytest.approx(row.iid_tokens_per_round / row.tokens_per_round.value - 1)
    row = tokens_of(found, found.traffic, chain.name)
    assert row.iid_tokens_per_round == pytest.approx(1 + traffic + traffic**2 + traffic**3)


def test_the_traffic_weighs_rounds_as_time_does(tmp_path: Path) -> None:
    """Rounds of a domain in proportion to its share of output tokens, however many documents it has."""
    domains = {"code": RECIPE.domains["code"], "chat": Domain(documents=30, alpha=0.3)}
    run = made(tmp_path, Recipe(domains=domains, decision={"weights": {"code": 0.9, "chat": 0.1}}))
    report = every_document(RunDraft(run, "small"), mine=Tree.from_paths(BUSHY))
    rounds = {
        text.domain: report.weights[text.domain] * text.trees[0].rounds / (text.positions - text.documents)
        for text in report.texts  # the first token of a document is none of its rounds'
    }
    shares = {text.domain: np.array(text.trees[0].marginal, dtype=float) for text in report.texts}
    row = report.traffic[0]
    assert row.tokens_per_round.value == pytest.approx(1 / sum(rounds.values()))
    expected = sum(rounds[domain] * shares[domain] for domain in domains) / sum(rounds.values())
    assert row.marginal == pytest.approx(expected.tolist())


def test_weights_of_the_profile_count_where_they_fit_the_data(tmp_path: Path) -> None:
    """What lies on text without rounds is left aside."""
    domains = {name: RECIPE.domains[name] for name in ("code", "wiki")}
    for weights, used in (({"code": 0.5, "chat": 0.5}, False), ({"code": 0.2, "wiki": 0.8}, True)):
        run = made(tmp_path / str(used), Recipe(domains=domains, decision={"weights": weights}))
        report = every_document(RunDraft(run, "small"), mine=Tree.chain(2))
        assert (report.weights, report.weights_observed) == ({"code": 1.0}, not used)


def test_bursts_make_the_model_promise_too_much(tmp_path: Path) -> None:
    domains = {"code": Domain(documents=30, alpha=0.7, spread=0.0, bursts=0.8, shortest=150, longest=200)}
    report = every_document(RunDraft(made(tmp_path, Recipe(domains=domains)), "small"), mine=Tree.chain(4))
    assert (report.texts[0].trees[0].iid_error or 0) > 0.1


# Trees that are chosen.


def test_trees_are_chosen_on_the_other_half(run: Run, found: TreesReport) -> None:
    """The best trees for the ranks of documents that are not tested, domains by their share of tokens."""
    domains = ["code", "chat", "story"]
    tested, ranks = halves(run, domains), {domain: rows_by_document(run, domain) for domain in domains}
    tokens = {domain: sum(map(len, ranks[domain].values())) for domain in domains}
    pooled = np.zeros(64)
    for domain in domains:
        chosen = [rank for document, values in ranks[domain].items() if document not in tested[domain] for rank in values]
        counts = np.array([chosen.count(rank) for rank in range(1, 65)])
        pooled += tokens[domain] / sum(tokens.values()) * counts / len(chosen)
    assert found.held_out
    assert found.tested_on == sum(map(len, tested.values()))
    assert found.chosen_on == sum(map(len, ranks.values())) - found.tested_on
    trees = {tree.name: tree for tree in found.trees}
    for nodes in NODES:
        best = optimal_tree(pooled, nodes, 5)
        assert trees[f"optimal {nodes}"].paths == best.paths
        assert trees[f"optimal {nodes}"].levels == tuple(
            sum(len(path) == depth for path in best.paths) for depth in range(1, best.depth + 1)
        )


def test_the_headline_is_of_the_tree_that_gains_most_where_trees_are_chosen(tmp_path: Path) -> None:
    """Not where they are tested: there the best of several gains more than it will."""
    run = made(tmp_path, dataclasses.replace(RECIPE, domains={"code": RECIPE.domains["code"]}, lookups=()))
    tested = halves(run, ["code"])["code"]

    def half(frame: pd.DataFrame) -> None:
        """The draft's second token is right where trees are chosen, its fifth one where they are tested."""
        wrong = (frame["draft_rank_of_token"] > 1).fillna(False).to_numpy(dtype=bool)
        frame.loc[wrong, "draft_rank_of_token"] = np.where(frame.loc[wrong, "document"].isin(tested), 5, 2)

    side = RunDraft(rewritten(run, "small", half), "small")
    given = {"fifth": Tree.from_paths([(1,), (5,)]), "second": Tree.from_paths([(1,), (2,)])}
    report = build_trees(side, nodes=(1,), given=given)
    gains = {row.tree: row.more_than_chain for row in report.traffic if row.more_than_chain is not None}
    assert max(gains, key=lambda name: gains[name].value) == "fifth"
    assert report.headline == "second"
    other = every_document(side, **given)  # nothing is chosen: the user's first tree, which no number picked
    assert other.headline is None
    assert answer_text(other, "terminal").startswith("tree fifth accepts more than its chain: +")


@pytest.mark.parametrize("weights", [None, {"code": 0.05, "chat": 0.95}])
def test_the_headline_weighs_domains_as_the_traffic_does(tmp_path: Path, weights: dict[str, float] | None) -> None:
    domains = {"code": Domain(documents=24, alpha=0.5), "chat": Domain(documents=8, alpha=0.5)}
    run = made(tmp_path, Recipe(domains=domains, decision={"weights": weights}))
    ranks = {"code": 2, "chat": 3}

    def by_domain(frame: pd.DataFrame) -> None:
        wrong = (frame["draft_rank_of_token"] > 1).fillna(False).to_numpy(dtype=bool)
        frame.loc[wrong, "draft_rank_of_token"] = frame.loc[wrong, "domain"].astype(str).map(ranks)

    side = RunDraft(rewritten(run, "small", by_domain), "small")
    given = {f"of {name}": Tree.from_paths([(1,), (rank,)]) for name, rank in ranks.items()}
    assert build_trees(side, nodes=(1,), given=given).headline == ("of code" if weights is None else "of chat")


def test_no_cluster_lies_in_both_halves(tmp_path: Path) -> None:
    grouped = {
        name: Domain(
            documents=12, clusters=[f"talk {row % 4}" for row in range(12)], prompts=[f"p {row}" for row in range(12)]
        )
        for name in ("code", "chat")
    }
    report = build_trees(RunDraft(made(tmp_path, Recipe(domains=grouped)), "small"))
    for text in report.texts:
        assert (text.documents, text.units) == (12, 4)
        assert (text.tested_documents, text.held_out) == (6, 2)


def test_nothing_is_held_out_where_nothing_is_chosen(side: RunDraft) -> None:
    report = every_document(side, mine=Tree.from_paths(BUSHY))
    assert (report.held_out, report.chosen_on, report.tested_on) == (False, 0, 35)
    assert [(tree.name, tree.kind) for tree in report.trees] == [("mine", "file"), ("chain 3", "chain")]
    assert [text.tested_documents for text in report.texts] == [14, 11, 10, 0]


def test_there_is_a_chain_for_every_depth_and_no_tree_is_deeper_than_asked(side: RunDraft) -> None:
    report = build_trees(side, nodes=(4, 30), depth=2, given={"deep": Tree.chain(7)})
    depths = {tree.name: tree.depth for tree in report.trees}
    assert depths == {"optimal 4": 2, "optimal 30": 2, "deep": 7, "chain 2": 2, "chain 7": 7}
    assert max(tree.depth for tree in build_trees(side).trees) == 5  # the largest gamma


def test_a_gain_over_a_chain_is_paired_by_document(side: RunDraft) -> None:
    """Each domain alone has the difference that its documents have, and a tree that is a chain gains nothing."""
    report = build_trees(side, nodes=(0,), given={"line": Tree.chain(3), "fork": Tree.from_paths([[1], [2], [1, 1]], 1)})
    texts = [text for text in report.texts if text.trees]
    assert len(texts) > 1
    for text in texts:
        line, fork, *chains = text.trees
        assert dataclasses.astuple(line.more_than_chain)[0] == 0
        two = next(row for row in chains if row.tree == "chain 2")
        gain = fork.tokens_per_round.value - two.tokens_per_round.value
        assert fork.more_than_chain.value == pytest.approx(gain)
        apart = fork.tokens_per_round.high - two.tokens_per_round.low - gain
        assert fork.more_than_chain.high - gain < apart


def test_kinds_of_text_are_kept_apart(tmp_path: Path) -> None:
    sources = [("code", dataclasses.replace(STORY, temperature=temperature)) for temperature in (0.5, 1.0)]
    recipe = Recipe(domains={"code": Domain(documents=9)}, sources=sources)
    report = build_trees(RunDraft(made(tmp_path, recipe), "small"))
    temperatures = [text.sampling["temperature"] if text.sampling else None for text in report.texts]
    assert [(text.domain, text.documents) for text in report.texts] == [("code", 9), ("code", 10), ("code", 10)]
    assert temperatures == [None, 0.5, 1.0]
    assert report.weights == {"code": 1.0}
    assert report.traffic[0].rounds == sum(text.trees[0].rounds for text in report.texts)
    assert "code (sampled at 0.5)" in answer_text(report, "terminal")


# Too little, and nothing at all.


def test_one_document_is_never_sure_of_anything(tmp_path: Path) -> None:
    run = made(tmp_path, Recipe(domains={"code": Domain(documents=1)}))
    (text,) = build_trees(RunDraft(run, "small")).texts
    assert (text.trees, text.tested_documents) == ((), 0)
    assert "tested half" in text.reason
    assert all((share.low, share.high) == (0, 1) for share in text.ranks)
    report = every_document(RunDraft(run, "small"), mine=Tree.chain(3))
    for row in (report.texts[0].trees[0], report.traffic[0]):
        assert (row.tokens_per_round.low, row.tokens_per_round.high) == (1, 4)
    assert "no document of this domain is in the tested half" in answer_text(build_trees(RunDraft(run, "small")), "terminal")


def test_a_draft_that_is_always_right_is_not_known_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(alpha=1.0, spread=0.0, shortest=41, longest=41)}))
    report = every_document(RunDraft(run, "small"), mine=Tree.chain(3))
    tokens = report.texts[0].trees[0].tokens_per_round
    assert (tokens.value, tokens.high) == (4, 4)
    assert 1 < tokens.low < 3.8
    assert report.texts[0].ranks[0].low < 0.9


def test_a_draft_that_is_never_right_gets_a_tree_without_nodes(tmp_path: Path) -> None:
    """And a round of it emits one token, for certain."""
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=8)}))
    rewritten(run, "small", lambda frame: frame.__setitem__("draft_rank_of_token", np.int32(200)))
    report = build_trees(RunDraft(run, "small"), nodes=(4,))
    (tree,) = report.trees
    assert (tree.nodes, tree.depth, tree.levels, tree.paths) == (0, 0, (), ())
    assert report.traffic[0].tokens_per_round == Interval(1, 1, 1)
    assert "1.00 [1.00, 1.00]" in answer_text(report, "terminal")


def test_text_that_the_target_did_not_choose_has_ranks_and_no_rounds(found: TreesReport) -> None:
    wiki = text_of(found, "wiki")
    assert (wiki.on_policy, wiki.trees, wiki.documents) == (False, (), 5)
    assert wiki.ranks[0].value > 0.3
    assert "did not choose" in wiki.reason
    assert "wiki" not in found.weights
    assert all(text.reason == "" and text.on_policy for text in found.texts if text.domain != "wiki")
    assert "wiki (text, off-policy): the target did not choose this text" in answer_text(found, "terminal")


def test_a_run_without_a_text_of_the_target_chooses_no_tree(tmp_path: Path) -> None:
    run = made(tmp_path, Recipe(domains={"wiki": RECIPE.domains["wiki"]}))
    report = build_trees(RunDraft(run, "small"))
    assert (report.trees, report.traffic, report.weights) == ((), (), {})
    assert "no tree was chosen" in answer_text(report, "terminal")
    assert json.loads(answer_text(report, "json"))["texts"][0]["trees"] == []


def test_an_interrupted_run_is_named_and_one_without_a_shard_is_empty(tmp_path: Path, run: Run) -> None:
    part = build_trees(RunDraft(interrupted(run, tmp_path / "part", 4), "small"))
    assert not part.complete
    assert sum(text.documents for text in part.texts) == 16
    assert "was interrupted and has only its first documents" in answer_text(part, "terminal")
    empty = build_trees(RunDraft(interrupted(run, tmp_path / "empty", 0), "small"), given={"mine": Tree.chain(2)})
    assert (empty.texts, empty.tested_on) == ((), 0)
    assert [row.tokens_per_round for row in empty.traffic] == [None, None]
    assert "interrupted" in answer_text(empty, "terminal")
    assert json.loads(answer_text(empty, "json"))["traffic"][0]["tokens_per_round"] is None


def test_a_draft_without_ranks_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match=r"draft lookup of .* has no ranks") as caught:
        build_trees(RunDraft(run, "lookup"))
    assert f"{run.path}:small" in caught.value.hint
    silent = made(tmp_path, Recipe(domains={"code": Domain()}))
    rewritten(
        silent, "small", lambda frame: frame.__setitem__("draft_rank_of_token", pd.array([None] * len(frame), "Int32"))
    )
    with pytest.raises(OptionInvalid, match=r"draft small of .* has no ranks"):
        build_trees(RunDraft(silent, "small"))


# Renderings.


def test_every_number_is_shown_whole_with_its_interval(found: TreesReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = answer_text(found, "terminal")
    assert max(map(len, text.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    shown = [fmt.share_with_interval(share) for item in found.texts for share in (*item.ranks, item.beyond, item.silent)]
    shown += [
        fmt.interval(row.tokens_per_round) for rows in (found.traffic, *(item.trees for item in found.texts)) for row in rows
    ]
    assert [part for each in shown for part in each.split(" ", maxsplit=1) if part not in text] == []
    assert not {"GO", "NO-GO", "UNDECIDED"} & set(text.split())


# The command line.


@pytest.fixture
def alphaprof(console_script: Runner) -> Runner:
    """`alphaprof trees`."""
    return partial(console_script, "trees")


def test_the_command_prints_what_the_library_finds(side: RunDraft, alphaprof: Runner, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps([[rank - 1 for rank in path] for path in BUSHY]))
    expected = build_trees(side, [16, 4, 16], 3, {"mine.json": Tree.from_paths(BUSHY)})
    assert [tree.name for tree in expected.trees][:2] == ["optimal 4", "optimal 16"]
    options = ("--nodes", 4, "--nodes", 16, "--depth", 3, "--tree", mine)
    assert alphaprof(side.label, *options, "--format", "json") == (0, answer_text(expected, "json"), "")
    assert alphaprof(side.label, *options) == (0, answer_text(expected, "terminal"), "")
    assert alphaprof(side.label, *options, "--out", tmp_path / "out.txt") == (0, "", "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == answer_text(expected, "terminal", to_file=True)


def test_a_chosen_tree_comes_back_as_a_file(side: RunDraft, alphaprof: Runner, tmp_path: Path) -> None:
    """What the JSON holds configures an engine, and this command: --top 1, since its ranks count from 1."""
    content = json.loads(alphaprof(side.label, "--nodes", 16, "--format", "json")[1])
    (tmp_path / "best.json").write_text(json.dumps(content["trees"][0]["paths"]))
    options = ("--nodes", 16, "--tree", tmp_path / "best.json", "--top", 1, "--format", "json")
    again = json.loads(alphaprof(side.label, *options)[1])
    assert again["trees"][1]["paths"] == content["trees"][0]["paths"]
    assert again["traffic"][1] | {"tree": "optimal 16"} == content["traffic"][0]


FILES: dict[str, tuple[str, str]] = {
    "no JSON": ("[[0], [0,", "Expecting"),
    "no node": ("[]", "top token"),
    "no parent": ("[[0], [1, 0]]", "needs its parent (1,)"),
    "counted from 1": ("[[1], [1, 1]]", "top token"),
    "a huge rank": (f"[[0], [{10**30}]]", "ranks beyond 1024"),
}


@pytest.mark.parametrize(("content", "problem"), FILES.values(), ids=list(FILES))
def test_a_file_that_is_not_a_tree_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "tree.json").write_text(content, encoding="utf-8")
    with pytest.raises(OptionInvalid, match="is not a tree") as caught:
        read_trees([tmp_path / "tree.json"], 0)
    assert problem in caught.value.message
    assert caught.value.message.isprintable()
    assert "--top 1" in caught.value.hint


def test_a_list_that_counts_from_one_says_so(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("[[1], [2], [1, 1]]")
    assert read_trees([tmp_path / "one.json"], 1)["one.json"].paths == ((1,), (2,), (1, 1))


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "tree.json" for name in "ab"] + [tmp_path / "other.json"]
    for depth, path in enumerate(paths, 1):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([[0] * level for level in range(1, depth + 1)]))
    trees = read_trees([*paths, paths[0]], 0)
    assert {name: tree.depth for name, tree in trees.items()} == {str(paths[0]): 1, str(paths[1]): 2, "other.json": 3}


def test_trees_of_a_head_follow_its_ranks_by_depth(tmp_path: Path) -> None:
    """Rounds of a full tree are those of the rule, no formula of first drafts is shown, and more levels are refused."""
    recipe = Recipe(heads={"head": {"ranks_by_depth": True}, "bare": {}}, rules=("strict", "tree_2"), gammas=(1, 2, 3))
    run = write_run(tmp_path / "run", recipe)
    full = Tree.full(2, 3)
    report = build_trees(RunDraft(run, "head"), nodes=(0,), given={"full": full})
    totals = stored_totals(run, "head")
    mine = totals[totals["rule"] == "tree_2"]
    (traffic,) = [tokens for tokens in report.traffic if tokens.tree == "full"]
    assert traffic.rounds == mine["rounds_3"].sum()
    assert traffic.tokens_per_round is not None
    assert (traffic.iid_tokens_per_round, traffic.iid_error) == (None, None)
    chosen = build_trees(RunDraft(run, "head"), nodes=(4,))
    assert chosen.trees[0].name == "first ranks 4"
    with pytest.raises(OptionInvalid, match=r"more levels than .* was measured for") as refused:
        build_trees(RunDraft(run, "head"), nodes=(0,), given={"deep": Tree.chain(4)})
    assert "more depths" in refused.value.hint
    with pytest.raises(OptionInvalid, match="no ranks by depth") as refused:
        build_trees(RunDraft(run, "bare"))
    assert "ranks_by_depth: true" in refused.value.hint
