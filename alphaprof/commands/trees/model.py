"""The `TreesReport` value: everything that its renderings show. Unknown is None."""

from __future__ import annotations

from dataclasses import dataclass

from alphaprof.stats.estimate import Interval
from alphaprof.theory.trees import Path


@dataclass(frozen=True)
class StaticTree:
    """A tree. `kind`: optimal (chosen here), file (the user's), chain (no branches: what the others are held against)."""

    name: str  # what the other tables call it
    kind: str
    nodes: int  # without the root
    depth: int  # levels without the root
    levels: tuple[int, ...]  # nodes at depth 1, 2, ...
    paths: tuple[Path, ...]  # ranks from 1, shallow nodes first


@dataclass(frozen=True)
class TreeTokens:
    """Rounds with one tree on some documents; None where there are none. `marginal[d-1]`: share of the rounds with a
    proposal that accepted at least d drafts.
    """

    tree: str  # name of the tree
    rounds: int
    tokens_per_round: Interval | None  # over all rounds
    iid_tokens_per_round: float | None  # if ranks were independent, with the shares that these documents have
    iid_error: float | None  # by what share that is too high
    marginal: tuple[float | None, ...]


@dataclass(frozen=True)
class OwnTree:
    """The tree of the largest size that was chosen for one text alone, on the same half. `difference`: its tokens per round
    less those of the tree of that size for all traffic, paired; None where that is the `same` tree.
    """

    tree: StaticTree  # the tree itself
    tokens: TreeTokens  # rounds with it
    same: bool  # it is the tree for all traffic
    difference: Interval | None


@dataclass(frozen=True)
class TextTrees:
    """One domain and kind of text. Rank shares are of all its documents, the rest of those that are tested."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None  # settings that p and q were processed with; None: the plain softmax
    on_policy: bool  # the target chose this text, greedily or by lot
    documents: int
    clusters: int  # independent units among them
    positions: int
    ranks: tuple[Interval, ...]  # share of positions whose token has rank 1, 2, ... in the draft's distribution
    beyond: Interval  # share with a larger rank
    silent: Interval  # share without a proposal
    tested_documents: int  # that rounds are counted on
    tested_clusters: int  # independent units among those
    trees: tuple[TreeTokens, ...]  # empty where there are no rounds
    own: OwnTree | None  # None: no tree was chosen
    reason: str  # why there are no rounds; empty where there are


@dataclass(frozen=True)
class TreesReport:
    """Static draft trees for one draft of a run. `held_out`: trees were chosen on one half of the documents, and all rounds
    are those of the other half.
    """

    alphaprof: str
    run: str
    draft: str
    complete: bool
    confidence: float
    held_out: bool
    chosen_on: int  # documents
    tested_on: int  # documents
    weights: dict[str, float]  # shares of output tokens by domain
    weights_observed: bool
    note: str  # what else to know; may be empty
    trees: tuple[StaticTree, ...]  # all trees with their paths
    traffic: tuple[TreeTokens, ...]  # domains by their weights
    texts: tuple[TextTrees, ...]
