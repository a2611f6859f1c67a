"""Chooses trees by ranks and replays them, and the user's and chains, on the documents that test."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from alphaprof.commands.trees.answer import OPTIMAL, OwnTree, StaticTree, TextTrees, TreesReport, TreeTokens
from alphaprof.costs.speedup import Mix, free_draft, spent_and_base
from alphaprof.errors import OptionInvalid, cut
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.report.decision import held_out
from alphaprof.report.speeds import tokens_interval
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, present, ratio, share_interval
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.theory.trees import Mask, RankCounts, Tree, expected_tokens, optimal_tree, rank_counts, replayed
from alphaprof.totals.documents import Documents, TextGroup, observed_weights, strata_of
from alphaprof.totals.replay import RoundCounts
from alphaprof.version import __version__

SHOWN = 8  # ranks whose shares are shown
CHOICE = 64  # largest rank of a chosen tree
NODES = (4, 8, 16, 32, 64)
LARGEST = 1024  # rank in a user's tree, beyond what any engine drafts
ONE = Mix(("text",), (1.0,))  # one kind of text alone


@dataclass(frozen=True)
class Replay:
    """A tree on some documents: `rows` of the documents table, ascending, and the rounds on each; `accepted` [documents,
    depth]: rounds that accepted at least d = 1, ..., depth drafts. `by_depth`: ranks depend on the level, as a head's do, so
    that those of first drafts promise nothing of others.
    """

    shape: StaticTree
    rows: Array
    rounds: RoundCounts
    accepted: Array
    by_depth: bool

    def counts(self, rows: Array) -> RoundCounts:
        """Rounds of some of its documents."""
        return self.rounds.rows(np.searchsorted(self.rows, rows))


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
    """The documents of complete shards, ranks 1 to `width`; `chooses`: one half chooses trees. Raises as `rank_counts`."""
    table = run.documents()
    documents = Documents.of(table)
    own = np.zeros(len(table), dtype=bool)
    for text in documents.groups:
        own[text.rows] = text.on_policy
    tested = own.copy()
    if chooses:  # no cluster lies in both halves
        rows = {f"{text.domain} {text.continuation} {text.sampling}": text.rows for text in documents.groups if text.policy}
        for name, mask in held_out({name: documents.units.take(part).lots for name, part in rows.items()}).items():
            tested[rows[name]] = mask
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


def read_trees(paths: Sequence[Path], top: int) -> dict[str, Tree]:
    """The user's trees in JSON files, by the names of these, or by whole paths where names are the same. `top`: how they
    call the draft's top token, 0 or 1. Raises `OptionInvalid`.
    """
    names = [path.name for path in dict.fromkeys(paths)]
    return {str(path) if names.count(path.name) > 1 else path.name: _read_tree(path, top) for path in paths}


def _read_tree(path: Path, top: int) -> Tree:
    name, tree, problem = cut(str(path)), Tree(()), f"it lacks the draft's top token, or has ranks beyond {LARGEST}"
    try:
        tree = Tree.from_paths(json.loads(path.read_text(encoding="utf-8")), top)
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "correct the path after --tree") from None
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    if (1,) not in tree.paths or tree.width > LARGEST:
        paths = f"[[{top}], [{top + 1}], [{top}, {top}]]"
        hint = f"write all nodes but the root as lists of ranks from {top}: {paths}; --top {1 - top} changes that"
        raise OptionInvalid(f"{name} is not a tree: {problem}", hint)
    return tree


def build_trees(
    side: RunDraft, nodes: Collection[int] = NODES, depth: int | None = None, given: Mapping[str, Tree] | None = None
) -> TreesReport:
    """What trees give one draft of a run. Raises `OptionInvalid` for a draft without ranks, and `RunUnreadable`.

    `nodes`: sizes of the trees that are chosen (0: none); `depth`: most levels of those, by default the largest gamma of the
    run; `given`: the user's trees by name.
    """
    manifest, given, sizes = side.run.manifest, given or {}, sorted(set(nodes) - {0})
    confidence = manifest.config["decision"]["confidence"]
    depth = _most_levels(side, depth or max(side.run.gammas), given)
    width = max([SHOWN, min(CHOICE, max(sizes, default=0)), *(tree.width for tree in given.values())])
    sample = tree_sample(side.run, side.draft, width, bool(sizes))
    by_depth = manifest.drafts[side.draft].by_depth
    shapes = _shapes(sample, sizes, depth, given, "first ranks" if by_depth else "optimal")
    halves = (sample.tested, sample.choosing) if sizes else (sample.tested,)
    every = _replays(side, sample, [(shape, half) for half in halves for shape in shapes])  # the log is read once
    common, choosing = every[: len(shapes)], every[len(shapes) :]
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
        by_depth=by_depth,
        held_out=bool(sizes),
        chosen_on=int(sample.choosing.sum()),
        tested_on=int(sample.tested.sum()),
        weights=sample.weights,
        weights_observed=sample.weights_observed,
        trees=shapes,
        headline=_headline(choosing, sample),
        traffic=tuple(_tokens(replay, rows, mix, shares, confidence, _chain(replay, common)) for replay in common),
        texts=tuple(
            _text(text, sample, common, _own(own.get(index), largest, sample, confidence), confidence)
            for index, text in enumerate(sample.texts)
        ),
    )


def _most_levels(side: RunDraft, depth: int, given: Mapping[str, Tree]) -> int:
    """The most levels of a tree: `depth`, or fewer where the draft was measured for fewer. Raises `OptionInvalid` for a tree
    that is `given` with more.
    """
    known = side.run.manifest.drafts[side.draft].depths
    if known is None:
        return depth
    if deep := [name for name, tree in given.items() if tree.depth > known]:
        raise OptionInvalid(
            f"{', '.join(deep)} has more levels than the {known} that {side.label} was measured for",
            "give a tree of fewer levels, or profile with more depths of the draft",
        )
    return min(depth, known)


def _shapes(
    sample: TreeSample, sizes: Sequence[int], depth: int, given: Mapping[str, Tree], chosen: str
) -> tuple[StaticTree, ...]:
    """The trees for all traffic: `chosen` ones by size, the user's, and a chain for every depth that these have."""
    shares, shapes = sample.pooled(sample.choosing), list[StaticTree]()
    if shares is not None:
        shapes += [_shape(f"{chosen} {size}", OPTIMAL, optimal_tree(shares[:CHOICE], size, depth)) for size in sizes]
    shapes += [_shape(name, "file", tree) for name, tree in given.items()]
    depths = sorted({shape.depth for shape in shapes} - {0})
    return (*shapes, *(_shape(f"chain {levels}", "chain", Tree.chain(levels)) for levels in depths))


def _headline(choosing: Sequence[Replay], sample: TreeSample) -> str | None:
    """The name of the tree with the largest gain over its chain in the traffic from the documents that choose. Domains
    without such documents do not count, and the first of several equal trees is taken.
    """
    rows = {domain: sample.domain(domain, sample.choosing) for domain, weight in sample.weights.items() if weight > 0}
    counted = {domain: sample.weights[domain] for domain, part in rows.items() if len(part)}
    mix = Mix(tuple(counted), None) if sample.weights_observed else Mix.of(counted)

    def tokens(replay: Replay) -> float | None:
        return mix.value([(replay.counts(rows[domain]), free_draft(replay.shape.depth)) for domain in counted])

    gains: dict[str, float] = {}
    for replay in choosing if counted else ():
        chain = _chain(replay, choosing)
        own, other = tokens(replay), None if chain is None else tokens(chain)
        if own is not None and other is not None:
            gains[replay.shape.name] = own - other
    return max(gains, key=gains.__getitem__, default=None)


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
    by_depth = side.run.manifest.drafts[side.draft].by_depth
    return [
        Replay(shape, np.flatnonzero(mask), RoundCounts.of(rounds, sample.cluster[mask]), rounds.accepted, by_depth)
        for (shape, mask), rounds in zip(trees, every, strict=True)
    ]


def _chain(replay: Replay, common: Sequence[Replay]) -> Replay | None:
    """The chain as deep as a tree; None for a chain."""
    chains = (each for each in common if each.shape.kind == "chain" and each.shape.depth == replay.shape.depth)
    return None if replay.shape.kind == "chain" else next(chains, None)


def _more(replay: Replay, other: Replay, rows: Sequence[Array], mix: Mix, confidence: float) -> Interval:
    """Tokens per round of a tree beyond those of another one, paired, on `rows` of each domain of a mix."""
    parts = [np.concatenate(rows)] if mix.weights is None else rows
    first, second = (
        [spent_and_base(each.counts(part), free_draft(each.shape.depth)) for part in parts] for each in (other, replay)
    )
    units, weights = [present(replay.counts(part).cluster) for part in parts], mix.weights or (1.0,)
    return weighted_inverse_difference(first, second, units, weights, confidence, replay.shape.depth)[2]


def _tokens(
    replay: Replay,
    rows: Sequence[Array],
    mix: Mix,
    shares: Array | None,
    confidence: float,
    chain: Replay | None = None,
) -> TreeTokens:
    """Rounds with one tree on `rows` of each domain of a mix; `shares`: b_r [width] of all of them."""
    shape, counts = replay.shape, [replay.counts(part) for part in rows]
    rounds = int(sum(part.rounds.sum() for part in counts))
    free = mix.speedup(counts, free_draft(shape.depth))
    if free is None or shares is None:
        return TreeTokens(shape.name, rounds, None, None, None, (None,) * shape.depth, None)
    promised = None if replay.by_depth else expected_tokens(Tree(shape.paths), shares)
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
        iid_error=promised / free.value - 1 if promised is not None else None,
        marginal=tuple(float(count / ready) if ready else None for count in accepted),
        more_than_chain=None if chain is None else _more(replay, chain, rows, mix, confidence),
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
        trees=tuple(_tokens(replay, [tested], ONE, shares, confidence, _chain(replay, common)) for replay in common)
        if len(tested)
        else (),
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
    return OwnTree(own.shape, tokens, same, _more(own, common, [own.rows], ONE, confidence))
