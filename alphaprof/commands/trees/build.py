"""What static draft trees would give on the text that a run measured, by exact replay of ranks. No verdict: verification of
trees is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.commands.trees.answer import OPTIMAL, OwnTree, StaticTree, TextTrees, TreesReport, TreeTokens
from alphaprof.costs.speedup import Mix, free_draft, spent_and_base
from alphaprof.errors import OptionInvalid, cut
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.report.decision import held_out
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import Question
from alphaprof.stats.estimate import Interval, by_cluster, distinct, ratio, share_interval
from alphaprof.stats.paired import inverse_difference
from alphaprof.theory.trees import Mask, RankCounts, Tree, expected_tokens, optimal_tree, rank_counts, replayed
from alphaprof.totals.documents import Documents, TextGroup, observed_weights, strata_of
from alphaprof.totals.replay import RoundCounts
from alphaprof.version import __version__

MOST_NODES, MOST_LEVELS, MOST_RANK = 1024, 64, 1024  # beyond what any engine verifies at once
Array = np.ndarray[Any, Any]
SHOWN = 8  # ranks whose shares are shown
CHOICE = 64  # largest rank of a chosen tree
NODES = (4, 8, 16, 32, 64)
NOTE = "paths: ranks from 1, the draft's top token; lists of Medusa and EAGLE count from 0"
ONE = Mix(("text",), (1.0,))  # one kind of text alone


def read_trees(paths: Sequence[Path], top: int) -> dict[str, Tree]:
    """Trees by the names of their files; by whole paths where names are the same. `top`: see `read_tree`."""
    distinct = list(dict.fromkeys(paths))
    names = [path.name for path in distinct]
    return {str(path) if names.count(path.name) > 1 else path.name: read_tree(path, top) for path in distinct}


def read_tree(path: Path, top: int) -> Tree:
    """The tree in a file; `top`: how it calls the draft's top token, 0 or 1. Raises `OptionInvalid`."""
    name = cut(str(path))
    form = f"write the paths of all nodes without the root: [[{top}], [{top + 1}], [{top}, {top}]]"
    other = f"ranks count from {top} (--top {1 - top} changes that), and each path needs the path of its parent"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "correct the path after --tree") from None
    except (ValueError, RecursionError):
        raise OptionInvalid(f"{name} is not JSON", form) from None
    if not (isinstance(content, list) and content and all(map(_is_path, content))):
        raise OptionInvalid(f"{name} is not a list of paths", form)
    if len(content) > MOST_NODES or max(map(len, content)) > MOST_LEVELS or max(map(max, content)) > MOST_RANK:
        limits = f"at most {MOST_NODES} nodes, {MOST_LEVELS} levels and rank {MOST_RANK}"
        raise OptionInvalid(f"{name} holds a larger tree than any engine verifies", f"give a tree of {limits}")
    try:
        tree = Tree.from_paths(content, top)
    except ValueError as error:
        raise OptionInvalid(f"{name} is not a tree: {error}", other) from None
    if (1,) not in tree.paths:
        raise OptionInvalid(f"{name} never drafts the draft's top token", other)
    return tree


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(rank) is int for rank in value)


@dataclass(frozen=True)
class TreeSample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on; where nothing is chosen all are tested. Text that the target did not choose is in
    neither. `weights`: shares of output tokens of the domains that have other text, adding up to 1; `weights_observed`: not
    from the profile; `strata` [units]: see `strata_of`.
    """

    texts: tuple[TextGroup, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    def domain(self, name: str, chosen: Mask) -> Array:
        """The chosen documents that lie in a domain."""
        rows = np.concatenate([text.rows for text in self.texts if text.domain == name])
        return np.asarray(rows[chosen[rows]])

    def pooled(self, chosen: Mask) -> Array | None:
        """b_r of the traffic from the chosen documents, [width]: domains by their weights. None without such documents."""
        rows = {domain: self.domain(domain, chosen) for domain, weight in self.weights.items() if weight > 0}
        counted = {domain: self.weights[domain] for domain in rows if len(rows[domain])}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in counted.items()]
        return np.asarray(sum(parts) / sum(counted.values())) if parts else None


def tree_sample(run: Run, draft: str, width: int, chooses: bool) -> TreeSample:
    """The documents of complete shards, with ranks 1 to `width` counted. `chooses`: trees are to be chosen on one half.

    Raises as `rank_counts`.
    """
    table = run.documents()
    documents = Documents.of(table)
    own = np.zeros(len(table), dtype=bool)
    for text in documents.groups:
        own[text.rows] = text.on_policy
    tested = _tested(documents) if chooses else own
    observed = observed_weights(table.filter(pa.array(own)))
    weights = run.manifest.config["decision"]["weights"]
    total = 0.0
    if weights is not None and set(weights) == {text.domain for text in documents.groups}:
        total = sum(weights[domain] for domain in observed)
    return TreeSample(
        documents.groups,
        documents.units.codes,
        rank_counts(run, draft, width),
        own & ~tested,
        tested,
        {domain: weights[domain] / total for domain in observed} if total > 0 else observed,
        total <= 0,
        strata_of(documents, run.manifest),
    )


def _tested(documents: Documents) -> Mask:
    """The held-out half [documents] of the text that the target chose; no cluster lies in both halves."""
    own = {f"{text.domain} {text.continuation} {text.sampling}": text.rows for text in documents.groups if text.policy}
    tested = np.zeros(len(documents.units.codes), dtype=bool)
    for name, mask in held_out({name: documents.units.take(rows).lots for name, rows in own.items()}).items():
        tested[own[name]] = mask
    return tested


@dataclass(frozen=True)
class Replay:
    """A tree on some documents: `rows` of the documents table, ascending, and the rounds on each; `accepted` [documents,
    depth]: rounds that accepted at least d = 1, ..., depth drafts.
    """

    shape: StaticTree
    rows: Array
    rounds: RoundCounts
    accepted: Array

    def counts(self, rows: Array) -> RoundCounts:
        """Rounds of some of its documents."""
        return self.rounds.rows(np.searchsorted(self.rows, rows))


def build_trees(
    side: RunDraft, nodes: Collection[int] = NODES, depth: int | None = None, given: Mapping[str, Tree] | None = None
) -> TreesReport:
    """What trees give one draft of a run. Raises `OptionInvalid` for a draft without ranks, and `RunUnreadable`.

    `nodes`: sizes of the trees that are chosen (0: none); `depth`: most levels of those, by default the largest gamma of the
    run; `given`: the user's trees by name.
    """
    manifest, given, sizes = side.run.manifest, given or {}, sorted(set(nodes) - {0})
    confidence = Question.of(manifest.config).confidence
    depth = depth or max(side.run.gammas)
    width = max([SHOWN, min(CHOICE, max(sizes, default=0)), *(tree.width for tree in given.values())])
    sample = tree_sample(side.run, side.draft, width, bool(sizes))
    shapes = _shapes(sample, sizes, depth, given)
    common = _replays(side, sample, [(shape, sample.tested) for shape in shapes])
    largest = next((replay for replay in reversed(common) if replay.shape.kind == OPTIMAL), None)
    alone = _alone(sample, sizes[-1], depth) if largest else {}
    own = dict(zip(alone, _replays(side, sample, alone.values()), strict=True))
    weights = {domain: weight for domain, weight in sample.weights.items() if weight > 0}
    mix = Mix(tuple(weights), None, sample.strata) if sample.weights_observed else Mix.of(weights)
    rows, shares = [sample.domain(domain, sample.tested) for domain in weights], sample.pooled(sample.tested)
    return TreesReport(
        alphaprof=__version__,
        run=str(side.run.path),
        draft=side.draft,
        complete=manifest.status == "complete",
        confidence=confidence,
        held_out=bool(sizes),
        chosen_on=int(sample.choosing.sum()),
        tested_on=int(sample.tested.sum()),
        weights=sample.weights,
        weights_observed=sample.weights_observed,
        note=NOTE,
        trees=shapes,
        traffic=tuple(_tokens(replay, rows, mix, shares, confidence) for replay in common),
        texts=tuple(
            _text(text, sample, common, _own(own.get(index), largest, sample, confidence), confidence)
            for index, text in enumerate(sample.texts)
        ),
    )


def _shapes(sample: TreeSample, sizes: Sequence[int], depth: int, given: Mapping[str, Tree]) -> tuple[StaticTree, ...]:
    """The trees for all traffic: chosen ones by size, the user's, and a chain for every depth that these have."""
    shares, shapes = sample.pooled(sample.choosing), list[StaticTree]()
    if shares is not None:
        shapes += [_shape(f"optimal {size}", OPTIMAL, optimal_tree(shares[:CHOICE], size, depth)) for size in sizes]
    shapes += [_shape(name, "file", tree) for name, tree in given.items()]
    depths = sorted({shape.depth for shape in shapes} - {0})
    return (*shapes, *(_shape(f"chain {levels}", "chain", Tree.chain(levels)) for levels in depths))


def _alone(sample: TreeSample, size: int, depth: int) -> dict[int, tuple[StaticTree, Mask]]:
    """The best tree of a size for each text alone, by its index, with the documents to test it on."""
    trees = {}
    for index, text in enumerate(sample.texts):
        chosen, mask = text.rows[sample.choosing[text.rows]], np.zeros(len(sample.tested), dtype=bool)
        mask[text.rows] = sample.tested[text.rows]
        if len(chosen) and mask.any():
            tree = optimal_tree(sample.ranks.shares(chosen)[:CHOICE], size, depth)
            trees[index] = (_shape(f"own {size}", OPTIMAL, tree), mask)
    return trees


def _shape(name: str, kind: str, tree: Tree) -> StaticTree:
    levels = np.bincount([len(path) for path in tree.paths], minlength=1)[1:]
    return StaticTree(name, kind, tree.nodes, tree.depth, tuple(levels.tolist()), tree.paths)


def _replays(side: RunDraft, sample: TreeSample, trees: Collection[tuple[StaticTree, Mask]]) -> list[Replay]:
    every = replayed(side.run, side.draft, [(Tree(shape.paths), mask) for shape, mask in trees])
    return [
        Replay(shape, np.flatnonzero(mask), RoundCounts.of(rounds, sample.cluster[mask]), rounds.accepted)
        for (shape, mask), rounds in zip(trees, every, strict=True)
    ]


def _tokens(replay: Replay, rows: Sequence[Array], mix: Mix, shares: Array | None, confidence: float) -> TreeTokens:
    """Rounds with one tree on `rows` of each domain of a mix; `shares`: b_r [width] of all of them."""
    shape, counts = replay.shape, [replay.counts(part) for part in rows]
    rounds = int(sum(part.rounds.sum() for part in counts))
    free = mix.speedup(counts, free_draft(shape.depth))
    if free is None or shares is None:
        return TreeTokens(shape.name, rounds, None, None, None, (None,) * shape.depth)
    promised = expected_tokens(Tree(shape.paths), shares)
    scale = [1.0] * len(counts)
    if mix.weights is not None:
        scale = [weight / part.tokens.sum() for weight, part in zip(mix.weights, counts, strict=True)]
    ready = sum(factor * part.drafted[:, :1].sum() for factor, part in zip(scale, counts, strict=True))
    reached = [replay.accepted[np.searchsorted(replay.rows, part)].sum(0) for part in rows]
    accepted = np.asarray(sum(factor * depths for factor, depths in zip(scale, reached, strict=True)))
    return TreeTokens(
        tree=shape.name,
        rounds=rounds,
        tokens_per_round=tokens_interval(free, shape.depth, confidence),
        iid_tokens_per_round=promised,
        iid_error=promised / free.value - 1,
        marginal=tuple(float(count / ready) if ready else None for count in accepted),
    )


def _text(
    text: TextGroup, sample: TreeSample, common: Sequence[Replay], own: OwnTree | None, confidence: float
) -> TextTrees:
    ranks, tested = sample.ranks, text.rows[sample.tested[text.rows]]

    def share(positions: Array) -> Interval:
        return share_interval(ratio(*by_cluster(text.cluster, positions[text.rows], ranks.positions[text.rows])), confidence)

    reason = "" if len(tested) else "none of its documents is in the tested half: profile four or more"
    if not text.policy:
        reason = "the target did not choose this text, so no tree has rounds on it"
    shares = ranks.shares(tested) if len(tested) else None
    return TextTrees(
        domain=text.domain,
        continuation=text.continuation,
        sampling=text.sampling,
        on_policy=text.on_policy,
        documents=len(text.rows),
        clusters=distinct(text.cluster),
        positions=int(ranks.positions[text.rows].sum()),
        ranks=tuple(share(ranks.counts[:, rank]) for rank in range(SHOWN)),
        beyond=share(ranks.positions - ranks.silent - ranks.counts[:, :SHOWN].sum(1)),
        silent=share(ranks.silent),
        tested_documents=len(tested),
        tested_clusters=distinct(sample.cluster[tested]),
        trees=tuple(_tokens(replay, [tested], ONE, shares, confidence) for replay in common) if len(tested) else (),
        own=own,
        reason=reason,
    )


def _own(own: Replay | None, common: Replay | None, sample: TreeSample, confidence: float) -> OwnTree | None:
    """A text's own tree against the one of that size for all traffic, on the documents that test it."""
    if own is None or common is None:
        return None
    tokens = _tokens(own, [own.rows], ONE, sample.ranks.shares(own.rows), confidence)
    same = own.shape.paths == common.shape.paths
    if tokens.tokens_per_round is None or same:
        return OwnTree(own.shape, tokens, same, None)
    one, two = (spent_and_base(tree.counts(own.rows), free_draft(tree.shape.depth)) for tree in (common, own))
    return OwnTree(own.shape, tokens, same, inverse_difference(one, two, confidence, own.shape.depth))
