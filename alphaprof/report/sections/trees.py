"""What static draft trees would give on the text that a run measured, by exact replay of ranks.

There is no verdict: verification of trees is not timed. `theory/trees.py` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from alphaprof.costs.rounds import StepTimes, free_draft
from alphaprof.costs.speedup import Mix, spent_and_base
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Row, Small, table_by_columns
from alphaprof.report.build import RunReport
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import held_out
from alphaprof.stats.estimate import Array, Interval, pooled_share, present
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.theory.certificates import SLACK, margin_thresholds, strict_thresholds
from alphaprof.theory.trees import Mask, NodePath, RankCounts, Tree, expected_tokens, optimal_tree, rank_counts, replayed
from alphaprof.totals.documents import TextGroup, observed_weights, strata_of
from alphaprof.totals.log_sample import LogPart, shards
from alphaprof.totals.replay import RoundCounts

NODES = (4, 8, 16, 32, 64)  # of the trees that are chosen
CHOICE = 64  # largest rank of a chosen tree
WIDTHS = (1, 2, 4, 8)  # of one level of a tree
ONE = Mix(("text",), (1.0,))  # one domain alone
TITLE = "what static draft trees would give"
EMPTY = "it needs the position log, and a draft with ranks (a head: ranks_by_depth: true)"
READS_LOG = True


@dataclass(frozen=True)
class Coverage:
    """How often the draft's `width` most probable tokens, one level of a tree, hold the token of the text."""

    width: int
    covered: Interval  # share of positions
    certified: Interval | None  # share whose KL(p||q) makes it certain; None: the log has no threshold of tree:width
    by_margin: Interval | None  # the same by the target's margin alone; None: the log has no divergence


@dataclass(frozen=True)
class StaticTree:
    """A static tree of draft tokens, and its rounds on the whole traffic; None where there are none."""

    nodes: int  # without the root: at most as many as were asked for
    levels: tuple[int, ...]  # nodes at depth 1, 2, ...
    paths: tuple[NodePath, ...]  # ranks from 1, shallow nodes first; lists of Medusa and EAGLE count from 0
    rounds: int
    tokens_per_round: Interval | None  # over all rounds
    iid_tokens_per_round: float | None  # if ranks were independent; None: of a head, whose ranks depend on the level
    chain: Interval | None  # tokens per round of the chain as deep
    more_than_chain: Interval | None  # tokens per round beyond those of the chain, paired
    by_domain: dict[str, Interval | None]  # tokens per round


@dataclass(frozen=True)
class DraftTrees:
    """What static trees would give one draft: chosen on one half of the documents, with the rounds of the other half."""

    draft: str
    by_depth: bool  # ranks depend on the level, as a head's do: coverage and chosen trees are those of first drafts
    chosen_on: int  # documents
    tested_on: int  # documents
    coverage: tuple[Coverage, ...]  # on text that the target chose
    trees: tuple[StaticTree, ...]


@dataclass(frozen=True)
class TreePart:
    """Some documents: the `rows` of each domain of a mix; `shares`: b_r of all of them, [width]; None without documents."""

    mix: Mix
    rows: list[Array]
    shares: Array | None


@dataclass(frozen=True)
class TreeRounds:
    """A tree on some documents: `rows` of the documents table, ascending, and the rounds on each."""

    tree: Tree
    rows: Array
    rounds: RoundCounts

    def decoded(self, rows: Sequence[Array]) -> list[tuple[RoundCounts, StepTimes]]:
        """Return rounds of some of its documents, with a draft that takes no time."""
        free = free_draft(self.tree.depth)
        return [(self.rounds.rows(np.searchsorted(self.rows, part)), free) for part in rows]

    def tokens(self, part: TreePart, confidence: float) -> Interval | None:
        """Return tokens per round on some of its documents."""
        return tokens_interval(part.mix.routed(self.decoded(part.rows)), self.tree.depth, confidence)


@dataclass(frozen=True)
class TreeSample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on. Text that the target did not choose is in neither. `weights`: shares of output tokens of
    the domains that have other text, adding up to 1; `weights_observed`: not from the profile; `strata` [units]: see
    `strata_of`.
    """

    texts: tuple[TextGroup, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    @classmethod
    def of(cls, part: LogPart, draft: str, weights: Mapping[str, float] | None) -> TreeSample:
        """From a position log with ranks. Raises as `rank_counts`. `weights`: of the decision."""
        documents, table = part.documents, part.documents.table
        own = np.zeros(len(table), dtype=bool)
        for text in documents.groups:
            own[text.rows] = text.on_policy
        tested = own.copy()
        rows = {f"{text.domain} {text.continuation} {text.sampling}": text.rows for text in documents.groups if text.policy}
        for name, mask in held_out({name: documents.units.take(rows).lots for name, rows in rows.items()}).items():
            tested[rows[name]] = mask  # no cluster lies in both halves
        observed, total = observed_weights(table.filter(pa.array(own))), 0.0
        if weights is not None and set(weights) == {text.domain for text in documents.groups}:
            total = sum(weights[domain] for domain in observed)
        return cls(
            documents.groups,
            documents.units.codes,
            rank_counts(part.run, draft, CHOICE),
            own & ~tested,
            tested,
            {domain: weights[domain] / total for domain in observed} if weights is not None and total > 0 else observed,
            total <= 0,
            strata_of(documents, part.run.manifest),
        )

    def rows_of(self, domain: str, chosen: Mask) -> Array:
        """Return the chosen documents of a domain."""
        rows = np.concatenate([text.rows for text in self.texts if text.domain == domain])
        return np.asarray(rows[chosen[rows]])

    def traffic(self, chosen: Mask, complete: bool) -> TreePart:
        """Return the chosen documents by domain, weighted; if not `complete`, domains without any of them do not count."""
        weights = {domain: weight for domain, weight in self.weights.items() if weight > 0}
        rows = {domain: self.rows_of(domain, chosen) for domain in weights}
        known = {domain: weights[domain] for domain, part in rows.items() if len(part)}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in known.items()]
        counted = weights if complete else known
        mix = Mix(tuple(counted), None, self.strata) if self.weights_observed else Mix.of(counted)
        shares = np.asarray(sum(parts) / sum(known.values())) if parts else None
        return TreePart(mix, [rows[domain] for domain in counted], shares)


def compute(report: RunReport) -> tuple[DraftTrees, ...]:
    """Return what trees give each draft whose log holds ranks."""
    run = report.part.run
    if not run.has_log or not run.shards:
        return ()
    ranked = {name: facts for name, facts in run.manifest.drafts.items() if facts.has_distribution}
    drafts = [name for name, facts in ranked.items() if facts.ranks_by_depth or not facts.by_depth]
    return tuple(_trees_of(report.part, draft, report.inputs.question.weights, report.confidence) for draft in drafts)


def _trees_of(part: LogPart, draft: str, weights: Mapping[str, float] | None, confidence: float) -> DraftTrees:
    run, facts, sample = part.run, part.run.manifest.drafts[draft], TreeSample.of(part, draft, weights)
    depth = min(max(run.gammas), facts.depths or max(run.gammas))
    choosing, testing = sample.traffic(sample.choosing, complete=False), sample.traffic(sample.tested, complete=True)
    trees = [] if choosing.shares is None else [optimal_tree(choosing.shares, size, depth) for size in NODES]
    trees = [tree for tree in dict.fromkeys(trees) if tree.nodes]
    chains = {tree.depth: Tree.chain(tree.depth) for tree in trees}
    jobs = [(tree, sample.tested) for tree in (*trees, *chains.values())]
    rows, cluster = np.flatnonzero(sample.tested), sample.cluster[sample.tested]
    tested = {
        tree: TreeRounds(tree, rows, RoundCounts.of(rounds, cluster))
        for (tree, _), rounds in zip(jobs, replayed(run, draft, jobs), strict=True)  # the log is read once
    }
    return DraftTrees(
        draft=draft,
        by_depth=facts.by_depth,
        chosen_on=int(sample.choosing.sum()),
        tested_on=int(sample.tested.sum()),
        coverage=tuple(_coverage(part, draft, sample, confidence)),
        trees=tuple(
            _static_tree(tested[tree], tested[chains[tree.depth]], sample, testing, facts.by_depth, confidence)
            for tree in trees
        ),
    )


def _coverage(part: LogPart, draft: str, sample: TreeSample, confidence: float) -> Iterator[Coverage]:
    """Yield what one level of each width holds, on text that the target chose."""
    own, ranks = sample.choosing | sample.tested, sample.ranks
    if not own.any():
        return
    logged = {width: f"threshold_tree_{width}" for width in WIDTHS if f"tree_{width}" in part.run.log_rules.certified}
    names = ["target_top_prob", "target_second_prob", "target_margin", "kl_target_draft", *logged.values()]
    sums: dict[tuple[int, bool], list[Array]] = {}
    for columns, shape in shards(part.run, draft, names):
        divergence = np.maximum(columns["kl_target_draft"], 0) + SLACK
        exact = {width: columns[name] for width, name in logged.items()}
        exact[1] = strict_thresholds(columns["target_top_prob"], columns["target_second_prob"])
        for width in WIDTHS:
            each = {True: margin_thresholds(columns["target_margin"], width)}
            each |= {False: exact[width]} if width in exact else {}
            for by_margin, threshold in each.items():
                sums.setdefault((width, by_margin), []).append(shape.sums(divergence < threshold))
    known = not part.run.manifest.drafts[draft].by_depth

    def share(counts: Array) -> Interval | None:
        return pooled_share(sample.cluster[own], counts[own], ranks.positions[own], confidence)

    for width in WIDTHS:
        covered = share(ranks.counts[:, :width].sum(1))
        exact_share, margin_share = (
            share(np.concatenate(sums[width, way])) if known and (width, way) in sums else None for way in (False, True)
        )
        if covered is not None:
            yield Coverage(width, covered, exact_share, margin_share)


def _static_tree(
    own: TreeRounds, chain: TreeRounds, sample: TreeSample, part: TreePart, by_depth: bool, confidence: float
) -> StaticTree:
    """Return a tree with its rounds, and those of the chain as deep, on the documents that test."""
    tree, decoded = own.tree, own.decoded(part.rows)
    counts = [each for each, _ in decoded]
    tokens, more = own.tokens(part, confidence), None
    if tokens is not None:
        # As observed, the documents of all domains are one sample.
        rows, weights = ([np.concatenate(part.rows)], (1.0,)) if part.mix.weights is None else (part.rows, part.mix.weights)
        first, second = ([spent_and_base(*each) for each in side.decoded(rows)] for side in (chain, own))
        units = [present(each.cluster) for each, _ in own.decoded(rows)]
        more = weighted_inverse_difference(first, second, units, weights, confidence, tree.depth)[2]
    return StaticTree(
        nodes=tree.nodes,
        levels=tuple(np.bincount([len(path) for path in tree.paths])[1:].tolist()),
        paths=tree.paths,
        rounds=int(sum(each.rounds.sum() for each in counts)),
        tokens_per_round=tokens,
        iid_tokens_per_round=expected_tokens(tree, part.shares) if part.shares is not None and not by_depth else None,
        chain=chain.tokens(part, confidence),
        more_than_chain=more,
        by_domain={
            domain: own.tokens(TreePart(ONE, [sample.rows_of(domain, sample.tested)], None), confidence)
            for domain in sample.weights
        },
    )


def draw(report: RunReport) -> Iterator[Block]:
    """Yield what a level covers, and tokens per round of every tree beside its chain."""
    found: Sequence[DraftTrees] = report.section("trees")
    for item in found:
        if not any(tree.more_than_chain for tree in item.trees):
            few = "no tree could be tested on the whole traffic; profile more documents of each domain"
            yield f"draft {item.draft}: {few}"
        rows: list[Row] = [
            (
                str(each.width),
                {
                    "covered": fmt.share_with_interval(each.covered),
                    "certain": fmt.share_with_interval(each.certified),
                    "certain by margin": fmt.share_with_interval(each.by_margin),
                },
            )
            for each in item.coverage
        ]
        first = ", first drafts of rounds" if item.by_depth else ""
        yield table_by_columns(
            f"draft {item.draft}: share of positions whose token is among the draft's top tokens{first}", rows, named="top"
        )
        if item.trees:
            rows = [(str(tree.nodes), _numbers(tree, item.by_depth)) for tree in item.trees]
            documents = f"chosen on {fmt.many(item.chosen_on, 'document')}, tested on {fmt.count(item.tested_on)} others"
            title = f"draft {item.draft}: tokens per round of the best tree by nodes; {documents}"
            yield table_by_columns(title, rows, named="nodes", left=("by depth",))
        if item.trees and len(item.trees[0].by_domain) > 1:
            rows = []
            for domain in item.trees[0].by_domain:
                tokens = {str(tree.nodes): tree.by_domain[domain] for tree in item.trees}
                rows.append((fmt.short(domain), {nodes: fmt.interval(value) for nodes, value in tokens.items()}))
            yield table_by_columns(f"draft {item.draft}: tokens per round of these trees by domain", rows)
    if found:
        yield Small(
            "A tree pays if a round costs fewer decode steps than it emits tokens. Trees were not timed: no speedup."
        )
        yield Small("iid ranks: tokens/round if ranks were independent. certain: KL(p||q) leaves no other possibility.")


def _numbers(tree: StaticTree, by_depth: bool) -> dict[str, str]:
    cells = {
        "by depth": " ".join(map(str, tree.levels)),
        "tokens/round": fmt.interval(tree.tokens_per_round),
        "more than its chain": fmt.difference(tree.more_than_chain, 2) if tree.more_than_chain else fmt.NOTHING,
    }
    if not by_depth:
        cells["iid ranks"] = fmt.number(tree.iid_tokens_per_round)
    return cells
