"""`alphaprof trees`: what static draft trees would give on the text that a run measured, by exact replay of ranks.

There is no verdict: verification of trees is not timed. The mathematics of trees stands in `theory`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from alphaprof.costs.rounds import StepTimes, free_draft
from alphaprof.costs.speedup import Mix, spent_and_base
from alphaprof.errors import OptionInvalid, cut
from alphaprof.render.blocks import Block, Small, Table, table_of_rows, text_name
from alphaprof.report import format as fmt
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import held_out
from alphaprof.run.reader import Run, RunDraft
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, present, ratio, share_interval
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.theory.trees import Mask, NodePath, RankCounts, Tree, expected_tokens, optimal_tree, rank_counts, replayed
from alphaprof.totals.documents import Documents, TextGroup, observed_weights, strata_of
from alphaprof.totals.replay import RoundCounts
from alphaprof.version import __version__

SHOWN = 8  # ranks whose shares are shown
CHOICE = 64  # largest rank of a chosen tree
NODES = (4, 8, 16, 32, 64)
LARGEST = 1024  # rank in a user's tree, beyond what any engine drafts
ONE = Mix(("text",), (1.0,))  # one kind of text alone
OPTIMAL = "optimal"
LEVELS = ("nodes by depth",)
DEPTHS = ("accepted by depth",)
NUMBERS = ("tokens/round", "chain of that depth", "iid ranks")


@dataclass(frozen=True)
class StaticTree:
    """A tree. `kind`: optimal (chosen here; a head's by the ranks of first drafts, so that others may be better), file (the
    user's), chain (no branches: what the others are compared with).
    """

    name: str  # what the other tables call it
    kind: str
    nodes: int  # without the root
    depth: int  # levels without the root
    levels: tuple[int, ...]  # nodes at depth 1, 2, ...
    paths: tuple[NodePath, ...]  # ranks from 1, shallow nodes first


@dataclass(frozen=True)
class TreeTokens:
    """Rounds with one tree on some documents; None if there are none. `marginal[d-1]`: share of the rounds with a proposal
    that accepted at least d drafts. `more_than_chain`: tokens per round beyond those of the chain as deep, paired.
    """

    tree: str  # name of the tree
    rounds: int
    tokens_per_round: Interval | None  # over all rounds
    iid_tokens_per_round: float | None  # if ranks were independent, with the shares that these documents have
    iid_error: float | None  # by what share that is too high
    marginal: tuple[float | None, ...]
    more_than_chain: Interval | None  # None: of a chain


@dataclass(frozen=True)
class TextTrees:
    """One domain and kind of text. Rank shares are of all its documents, the rest of those that are tested."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    on_policy: bool  # the target chose this text, greedily or by a draw
    documents: int
    clusters: int  # independent units among them
    positions: int
    ranks: tuple[Interval, ...]  # share of positions whose token has rank 1, 2, ... in the draft's distribution
    beyond: Interval  # share with a larger rank
    silent: Interval  # share without a proposal
    tested_documents: int  # that rounds are counted on
    tested_clusters: int  # independent units among those
    trees: tuple[TreeTokens, ...]  # empty if there are no rounds
    reason: str  # why there are no rounds; empty if there are


@dataclass(frozen=True)
class TreesReport:
    """Static draft trees for one draft of a run. `held_out`: trees were chosen on one half of the documents, and all rounds
    are those of the other half.
    """

    format: ClassVar[str] = "alphaprof-trees"
    version: ClassVar[str] = "1.0"

    alphaprof: str
    run: str
    draft: str
    complete: bool
    confidence: float
    by_depth: bool  # ranks depend on the level, as a head's do: shares and chosen trees are those of first drafts
    held_out: bool
    chosen_on: int  # documents
    tested_on: int  # documents
    weights: dict[str, float]  # shares of output tokens by domain
    weights_observed: bool
    trees: tuple[StaticTree, ...]  # all trees with their paths; lists of Medusa and EAGLE count ranks from 0
    headline: str | None  # the tree with the largest gain over its chain on the documents that choose; None: none chose
    traffic: tuple[TreeTokens, ...]  # domains by their weights
    texts: tuple[TextTrees, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield the gain of a tree over its chain, shares of ranks, then tokens per round of every tree, also by domain."""
        yield from _gain_over_chain(self)
        yield ""
        yield f"alphaprof {self.alphaprof}   run {self.run}   draft {self.draft}"
        tested, chosen = fmt.count(self.tested_on), fmt.count(self.chosen_on)
        documents = f"no tree is chosen, so all {tested} documents are for testing"
        if self.held_out:
            documents = f"{chosen} documents choose the trees, the other {tested} test them; results are from the tests"
        yield f"static draft trees, rounds replayed from ranks; {documents}"
        yield ""
        if self.texts:
            yield _ranks_table(self)
        if any(row.tokens_per_round for row in self.traffic):
            yield _traffic_table(self)
        yield from (_text_table(self, text) for text in self.texts if text.trees)
        yield from (f"note: {missing}" for missing in _missing(self))
        yield Small(f"Brackets: {fmt.level(self.confidence)} intervals over documents. Rank 1 is the draft's top token.")
        if self.by_depth:
            yield Small(
                "first ranks: trees are chosen by the ranks of first drafts; rounds also use the ranks of later drafts."
            )
        else:
            yield Small("iid ranks: tokens/round if ranks were independent (and how far off).")
        yield Small("accepted by depth: share of the rounds with a proposal that accepted at least 1, 2, ... drafts.")


def _gain_over_chain(report: TreesReport) -> Iterator[str]:
    """Yield the gain of one tree over its chain, on which documents, and that time is not in it.

    The tree must not be the one that gains most on the documents that test, or its interval would be that of the best of
    several. It is the headline's; without one the first, which no number picked.
    """
    rows = zip(report.trees, report.traffic, strict=True)
    known = [(tree, row, row.more_than_chain) for tree, row in rows if row.more_than_chain is not None]
    if not known:
        yield "NO TREE COULD BE TESTED ON THE WHOLE TRAFFIC: see the notes below"
        return
    tree, row, more = next((each for each in known if each[0].name == report.headline), known[0])
    gain = "accepts more than" if more.low > 0 else "accepts less than" if more.high < 0 else "does not clearly differ from"
    values = f"{fmt.difference(more, 2)} tokens per round, {fmt.interval(row.tokens_per_round)} in all"
    yield f"tree {fmt.short(tree.name)} {gain} its chain: {values}; a round verifies {tree.nodes} nodes"
    yield "tree verification was not timed, so there is no speedup and no verdict"
    yield "next: the tree pays if a round costs fewer decode steps than it emits tokens; --format json lists the paths"


def _missing(report: TreesReport) -> Iterator[str]:
    """Yield what is missing, and why."""
    for text in report.texts:
        if text.reason:
            yield f"{_name_of_text(report, text)}: {text.reason}"
    if any(text.trees for text in report.texts) and not any(row.tokens_per_round for row in report.traffic):
        yield "no tokens per round for the whole traffic: a domain has no rounds on tested documents; profile more of it"
    if report.held_out and not any(tree.kind == OPTIMAL for tree in report.trees):
        yield "no tree was chosen: no document has the target's own text"
    if not report.complete:
        yield f"{report.run} was interrupted and has only its first documents: finish it with alphaprof profile --resume"


def _ranks_table(report: TreesReport) -> Table:
    silent, deepest = any(text.silent.value > 0 for text in report.texts), len(report.texts[0].ranks)
    names = ("domain", "docs", *map(str, range(1, deepest + 1)), f"beyond {deepest}", *(["no proposal"] if silent else []))
    title = "share of positions by the rank of the target's token in the draft's distribution, all documents"
    rows = []
    for text in report.texts:
        shares = (*text.ranks, text.beyond, *([text.silent] if silent else []))
        documents = fmt.documents(text.documents, text.clusters)
        rows.append((_name_of_text(report, text), documents, *map(fmt.share_with_interval, shares)))
    return table_of_rows(title + (", first drafts of rounds" if report.by_depth else ""), names, rows)


def _traffic_table(report: TreesReport) -> Table:
    """Return every tree on the whole traffic, with its shape."""
    origin = "observed shares of tokens" if report.weights_observed else "shares of tokens from the profile"
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in report.weights.items())
    rows = (
        (fmt.short(tree.name), str(tree.nodes), str(tree.depth), " ".join(map(str, tree.levels)), *numbers)
        for tree, _, numbers in _numbers(report, report.traffic)
    )
    headings, below = ("tree", "nodes", "depth", *LEVELS, *_number_headings(report)), (f"  weights ({origin}): {shares}",)
    return table_of_rows("whole traffic: tokens per round", headings, rows, left=LEVELS, wrapped=LEVELS, below=below)


def _text_table(report: TreesReport, text: TextTrees) -> Table:
    """Return every tree on one domain and kind of text."""
    rows = (
        (fmt.short(tree.name), *numbers, " ".join(fmt.share(share, 2) for share in tokens.marginal))
        for tree, tokens, numbers in _numbers(report, text.trees)
    )
    documents = fmt.documents(text.tested_documents, text.tested_clusters)
    title = f"{_name_of_text(report, text)}: tokens per round on {documents} documents"
    return table_of_rows(title, ("tree", *_number_headings(report), *DEPTHS), rows, left=DEPTHS, wrapped=DEPTHS)


def _number_headings(report: TreesReport) -> tuple[str, ...]:
    """Return the numbers of a tree: without what independent ranks promise if ranks depend on the level."""
    return NUMBERS[: 2 if report.by_depth else 3]


def _numbers(report: TreesReport, rows: Sequence[TreeTokens]) -> Iterator[tuple[StaticTree, TreeTokens, list[str]]]:
    """Yield each tree but chains with its numbers: tokens per round, measured, of the chain as deep, and as promised."""
    pairs = list(zip(report.trees, rows, strict=True))
    chains = {tree.depth: tokens.tokens_per_round for tree, tokens in pairs if tree.kind == "chain"}
    for tree, tokens in pairs:
        if tree.kind != "chain":
            off = "" if tokens.iid_error is None else f" ({fmt.signed_percent(tokens.iid_error)})"
            promised = fmt.number(tokens.iid_tokens_per_round) + off
            cells = [fmt.interval(tokens.tokens_per_round), fmt.interval(chains.get(tree.depth)), promised]
            yield tree, tokens, cells[: len(_number_headings(report))]


def _name_of_text(report: TreesReport, text: TextTrees) -> str:
    return text_name(text, report.texts, not text.on_policy)


@dataclass(frozen=True)
class TreePart:
    """Some documents: the `rows` of each domain of a mix; `shares`: b_r of all of them, [width]; None without documents."""

    mix: Mix
    rows: list[Array]
    shares: Array | None


@dataclass(frozen=True)
class Replay:
    """A tree on some documents: `rows` of the documents table, ascending, and the rounds on each; `accepted` [documents,
    depth]: rounds that accepted at least d = 1, ..., depth drafts.
    """

    shape: StaticTree
    rows: Array
    rounds: RoundCounts
    accepted: Array

    def decoded(self, rows: Sequence[Array]) -> list[tuple[RoundCounts, StepTimes]]:
        """Return rounds of some of its documents, with a draft that takes no time."""
        free = free_draft(self.shape.depth)
        return [(self.rounds.rows(np.searchsorted(self.rows, part)), free) for part in rows]

    def chain(self, common: Sequence[Replay]) -> Replay | None:
        """Return the chain as deep as the tree; None for a chain."""
        chains = (each for each in common if each.shape.kind == "chain" and each.shape.depth == self.shape.depth)
        return None if self.shape.kind == "chain" else next(chains, None)


@dataclass(frozen=True)
class TreeSample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on; if nothing is chosen all are tested. Text that the target did not choose is in neither.
    `weights`: shares of output tokens of the domains that have other text, adding up to 1; `weights_observed`: not from the
    profile; `strata` [units]: see `strata_of`.
    """

    texts: tuple[TextGroup, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    def traffic(self, chosen: Mask, complete: bool) -> TreePart:
        """Return the chosen documents by domain, weighted; if not `complete`, domains without any of them do not count."""
        weights = {domain: weight for domain, weight in self.weights.items() if weight > 0}
        every = {domain: np.concatenate([text.rows for text in self.texts if text.domain == domain]) for domain in weights}
        rows = {domain: part[chosen[part]] for domain, part in every.items()}
        known = {domain: weights[domain] for domain, part in rows.items() if len(part)}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in known.items()]
        counted = weights if complete else known
        mix = Mix(tuple(counted), None, self.strata) if self.weights_observed else Mix.of(counted)
        shares = np.asarray(sum(parts) / sum(known.values())) if parts else None
        return TreePart(mix, [rows[domain] for domain in counted], shares)


def tree_sample(run: Run, draft: str, width: int, chooses: bool) -> TreeSample:
    """Return the documents of complete shards, ranks 1 to `width`; `chooses`: one half chooses trees. Raises as
    `rank_counts`.
    """
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
    weights = run.manifest.profile.decision.weights
    total = 0.0
    if weights is not None and set(weights) == {text.domain for text in documents.groups}:
        total = sum(weights[domain] for domain in observed)
    return TreeSample(
        documents.groups,
        documents.units.codes,
        rank_counts(run, draft, width),
        own & ~tested,
        tested,
        {domain: weights[domain] / total for domain in observed} if weights is not None and total > 0 else observed,
        total <= 0,
        strata_of(documents, run.manifest),
    )


def read_trees(paths: Sequence[Path], top: int) -> dict[str, Tree]:
    """Return the user's trees in JSON files, by the names of these, or by whole paths if names are the same. `top`: how
    they call the draft's top token, 0 or 1. Raises `OptionInvalid`.
    """
    names = [path.name for path in dict.fromkeys(paths)]
    return {str(path) if names.count(path.name) > 1 else path.name: _read_tree(path, top) for path in paths}


def _read_tree(path: Path, top: int) -> Tree:
    name, tree, problem = cut(str(path)), Tree(()), f"it lacks the draft's top token, or has ranks beyond {LARGEST}"
    try:
        tree = Tree.from_paths(json.loads(path.read_text(encoding="utf-8")), top)
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "check the path given to --tree") from None
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    if (1,) not in tree.paths or tree.width > LARGEST:
        paths = f"[[{top}], [{top + 1}], [{top}, {top}]]"
        hint = f"list all nodes but the root as ranks from {top}: {paths}; use --top {1 - top} to count from {1 - top}"
        raise OptionInvalid(f"{name} is not a tree: {problem}", hint)
    return tree


def build_trees(
    side: RunDraft, nodes: Collection[int] = NODES, depth: int | None = None, given: Mapping[str, Tree] | None = None
) -> TreesReport:
    """Return what trees give one draft of a run. Raises `OptionInvalid` for a draft without ranks, and `RunUnreadable`.

    `nodes`: sizes of the trees that are chosen (0: none); `depth`: most levels of those, by default the largest gamma of the
    run; `given`: the user's trees by name.
    """
    manifest, given, sizes = side.run.manifest, given or {}, sorted(set(nodes) - {0})
    confidence = manifest.profile.decision.confidence
    depth = _most_levels(side, depth or max(side.run.gammas), given)
    width = max([SHOWN, min(CHOICE, max(sizes, default=0)), *(tree.width for tree in given.values())])
    sample = tree_sample(side.run, side.draft, width, bool(sizes))
    by_depth = manifest.drafts[side.draft].by_depth
    choosing, testing = sample.traffic(sample.choosing, complete=False), sample.traffic(sample.tested, complete=True)
    shapes, kind = list[StaticTree](), "first ranks" if by_depth else "optimal"
    if choosing.shares is not None:
        shares = choosing.shares[:CHOICE]
        shapes += [_static_tree(f"{kind} {size}", OPTIMAL, optimal_tree(shares, size, depth)) for size in sizes]
    shapes += [_static_tree(name, "file", tree) for name, tree in given.items()]
    depths = sorted({shape.depth for shape in shapes} - {0})
    shapes += [_static_tree(f"chain {levels}", "chain", Tree.chain(levels)) for levels in depths]
    halves = (sample.tested, sample.choosing) if sizes else (sample.tested,)
    every = _replays(side, sample, [(shape, half) for half in halves for shape in shapes])  # the log is read once
    common = every[: len(shapes)]
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
        trees=tuple(shapes),
        headline=_most_gaining(every[len(shapes) :], choosing),
        traffic=tuple(_tokens_by_tree(common, testing, by_depth, confidence)),
        texts=tuple(_trees_of_text(text, sample, common, by_depth, confidence) for text in sample.texts),
    )


def _most_levels(side: RunDraft, depth: int, given: Mapping[str, Tree]) -> int:
    """Return the most levels of a tree: `depth`, or fewer if the draft was measured for fewer. Raises `OptionInvalid` for
    a tree that is `given` with more.
    """
    known = side.run.manifest.drafts[side.draft].depths
    if known is None:
        return depth
    if deep := [name for name, tree in given.items() if tree.depth > known]:
        raise OptionInvalid(
            f"{', '.join(deep)} has more levels than {side.label} was measured for ({known})",
            "use a tree with fewer levels, or profile with more depths of the draft",
        )
    return min(depth, known)


def _most_gaining(replays: Sequence[Replay], part: TreePart) -> str | None:
    """Return the name of the tree with the largest gain over its chain in the traffic from the documents that choose; the
    first of several equal trees.
    """
    gains: dict[str, float] = {}
    for replay in replays if part.rows else ():
        if chain := replay.chain(replays):
            own, other = (part.mix.value(each.decoded(part.rows)) for each in (replay, chain))
            if own is not None and other is not None:
                gains[replay.shape.name] = own - other
    return max(gains, key=gains.__getitem__, default=None)


def _static_tree(name: str, kind: str, tree: Tree) -> StaticTree:
    levels = np.bincount([len(path) for path in tree.paths], minlength=1)[1:]
    return StaticTree(name, kind, tree.nodes, tree.depth, tuple(levels.tolist()), tree.paths)


def _replays(side: RunDraft, sample: TreeSample, trees: Collection[tuple[StaticTree, Mask]]) -> list[Replay]:
    every = replayed(side.run, side.draft, [(Tree(shape.paths), mask) for shape, mask in trees])
    return [
        Replay(shape, np.flatnonzero(mask), RoundCounts.of(rounds, sample.cluster[mask]), rounds.accepted)
        for (shape, mask), rounds in zip(trees, every, strict=True)
    ]


def _gain_over(replay: Replay, chain: Replay, part: TreePart, confidence: float) -> Interval:
    """Return tokens per round of a tree beyond those of its chain, paired by document."""
    rows = [np.concatenate(part.rows)] if part.mix.weights is None else part.rows
    first, second = ([spent_and_base(*decoded) for decoded in each.decoded(rows)] for each in (chain, replay))
    units, weights = [present(counts.cluster) for counts, _ in replay.decoded(rows)], part.mix.weights or (1.0,)
    return weighted_inverse_difference(first, second, units, weights, confidence, replay.shape.depth)[2]


def _tokens_by_tree(replays: Sequence[Replay], part: TreePart, by_depth: bool, confidence: float) -> Iterator[TreeTokens]:
    """Yield the rounds with each tree on some documents. `by_depth`: ranks depend on the level, as a head's do, so that
    those of first drafts promise nothing of others.
    """
    for replay in replays:
        shape, chain, decoded = replay.shape, replay.chain(replays), replay.decoded(part.rows)
        counts = [each for each, _ in decoded]
        rounds, free = int(sum(each.rounds.sum() for each in counts)), part.mix.routed(decoded)
        if free is None or part.shares is None:
            yield TreeTokens(shape.name, rounds, None, None, None, (None,) * shape.depth, None)
            continue
        promised = None if by_depth else expected_tokens(Tree(shape.paths), part.shares)
        scale = [1.0] * len(counts)
        if part.mix.weights is not None:
            scale = [weight / each.tokens.sum() for weight, each in zip(part.mix.weights, counts, strict=True)]
        ready = sum(factor * each.drafted[:, :1].sum() for factor, each in zip(scale, counts, strict=True))
        reached = [replay.accepted[np.searchsorted(replay.rows, rows)].sum(0) for rows in part.rows]
        accepted = np.asarray(sum(factor * depths for factor, depths in zip(scale, reached, strict=True)))
        yield TreeTokens(
            tree=shape.name,
            rounds=rounds,
            tokens_per_round=tokens_interval(free, shape.depth, confidence),
            iid_tokens_per_round=promised,
            iid_error=promised / free.value - 1 if promised is not None else None,
            marginal=tuple(float(count / ready) if ready else None for count in accepted),
            more_than_chain=None if chain is None else _gain_over(replay, chain, part, confidence),
        )


def _trees_of_text(
    text: TextGroup, sample: TreeSample, common: Sequence[Replay], by_depth: bool, confidence: float
) -> TextTrees:
    ranks, tested, reason = sample.ranks, text.rows[sample.tested[text.rows]], ""

    def share(positions: Array) -> Interval:
        return share_interval(ratio(*by_cluster(text.cluster, positions[text.rows], ranks.positions[text.rows])), confidence)

    if not text.policy:
        reason = "the target did not choose this text, so no tree has rounds on it"
    elif not len(tested):
        reason = "no document of this domain is in the tested half: profile at least four"
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
        trees=()
        if reason
        else tuple(_tokens_by_tree(common, TreePart(ONE, [tested], ranks.shares(tested)), by_depth, confidence)),
        reason=reason,
    )
