"""What draft trees would give: the value that `alphaprof trees` answers with, and its tables (rich)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from alphaprof.render.tables import NAME_WIDTH, fitted, named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.format import short
from alphaprof.stats.estimate import Interval
from alphaprof.theory.trees import NodePath

OPTIMAL = "optimal"
LEVELS = ("nodes by depth",)
NUMBERS = ("tokens/round", "chain of that depth", "iid ranks")
SHARE_WIDTH = 14  # columns that a share takes above its interval


@dataclass(frozen=True)
class StaticTree:
    """A tree. `kind`: optimal (chosen here), file (the user's), chain (no branches: what the others are compared with)."""

    name: str  # what the other tables call it
    kind: str
    nodes: int  # without the root
    depth: int  # levels without the root
    levels: tuple[int, ...]  # nodes at depth 1, 2, ...
    paths: tuple[NodePath, ...]  # ranks from 1, shallow nodes first


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
    on_policy: bool  # the target chose this text, greedily or by a draw
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

    format: ClassVar[str] = "alphaprof-trees"
    version: ClassVar[int] = 1

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

    def terminal(self, console: Console) -> None:
        """Prints shares of ranks, then tokens per round of every tree, for the whole traffic and by domain."""
        _header(self, console)
        _ranks(self, console)
        if any(row.tokens_per_round for row in self.traffic):
            _traffic(self, console)
        for text in self.texts:
            if text.trees:
                _text(self, text, console)
        _own(self, console)
        for note in _notes(self):
            console.print(Text("note: ", "yellow").append_text(plain(note)))
        for line in _definitions(self):
            console.print(line, style="dim", highlight=False)


def _notes(report: TreesReport) -> Iterator[str]:
    """What is missing, and why."""
    for text in report.texts:
        if text.reason:
            yield f"{_name(report, text)}: {text.reason}"
    if any(text.trees for text in report.texts) and not any(row.tokens_per_round for row in report.traffic):
        missing = [_name(report, text) for text in report.texts if text.on_policy and not text.tested_documents]
        yield (
            "the whole traffic has no tokens per round: a domain of it has no rounds on tested documents"
            + (f" ({', '.join(missing)}): profile four documents or more of it" if missing else "")
        )
    if report.held_out and not any(tree.kind == OPTIMAL for tree in report.trees):
        yield "no tree was chosen: there is no document of the target's own text to choose it on"
    if not report.complete:
        yield f"{report.run} is an interrupted run: its first documents only; finish it with alphaprof profile --resume"


def _header(report: TreesReport, console: Console) -> None:
    console.print(plain(f"alphaprof {report.alphaprof}   run {report.run}   draft {report.draft}"))
    tested, chosen = fmt.count(report.tested_on), fmt.count(report.chosen_on)
    documents = f"no tree is chosen, so all {tested} documents test"
    if report.held_out:
        documents = f"{chosen} documents choose the trees, the other {tested} test them: all rounds are theirs"
    console.print(f"static draft trees, rounds replayed from ranks; {documents}\n", highlight=False)


def _ranks(report: TreesReport, console: Console) -> None:
    """Shares of positions by rank, in as many tables as it takes."""
    if not report.texts:
        return
    silent = any(text.silent.value > 0 for text in report.texts)
    deepest = len(report.texts[0].ranks)
    names = [*map(str, range(1, deepest + 1)), f"beyond {deepest}", *(["no proposal"] if silent else [])]
    title = "share of positions by the rank of the target's token in the draft's distribution, all documents"
    most = max(1, (console.width - NAME_WIDTH - SHARE_WIDTH) // SHARE_WIDTH)
    parts = -(-len(names) // most)
    side_by_side = -(-len(names) // parts)
    for start in range(0, len(names), side_by_side):
        part = slice(start, start + side_by_side)
        table = named_table("domain", "docs", *names[part])
        for text in report.texts:
            shares = [*text.ranks, text.beyond, text.silent][: len(names)]
            cells = [fmt.share_interval(share).replace(" [", "\n[") for share in shares[part]]
            table.add_row(plain(_name(report, text)), fmt.documents(text.documents, text.clusters), *cells)
        show(table, title, console)


def _traffic(report: TreesReport, console: Console) -> None:
    """Every tree on the whole traffic, with its shape."""
    table = named_table("tree", "nodes", "depth", *LEVELS, *NUMBERS, left=LEVELS, wrapped=LEVELS)
    for tree, _, numbers in _rows(report, report.traffic, console):
        table.add_row(plain(short(tree.name)), *_shape(tree), *numbers)
    origin = "observed shares of tokens" if report.weights_observed else "shares of tokens from the profile"
    show(table, "whole traffic: tokens per round", console)
    shares = ", ".join(f"{short(domain)} {fmt.percent(weight)}" for domain, weight in report.weights.items())
    console.print(Padding(plain(f"weights ({origin}): {shares}"), (0, 0, 1, 2)))


def _text(report: TreesReport, text: TextTrees, console: Console) -> None:
    """Every tree on one domain and kind of text."""
    depths = ("accepted by depth",)
    table = named_table("tree", *NUMBERS, *depths, left=depths, wrapped=depths)
    for tree, tokens, numbers in _rows(report, text.trees, console):
        table.add_row(plain(short(tree.name)), *numbers, Text(" ".join(fmt.share(share, 2) for share in tokens.marginal)))
    documents = fmt.documents(text.tested_documents, text.tested_clusters)
    show(table, f"{_name(report, text)}: tokens per round on {documents} documents", console)


def _rows(
    report: TreesReport, rows: Sequence[TreeTokens], console: Console
) -> Iterator[tuple[StaticTree, TreeTokens, list[Text]]]:
    """Yields each tree but chains with its NUMBERS: tokens per round, measured, of the chain as deep, and as promised."""
    pairs = list(zip(report.trees, rows, strict=True))
    chains = {tree.depth: tokens.tokens_per_round for tree, tokens in pairs if tree.kind == "chain"}
    for tree, tokens in pairs:
        if tree.kind != "chain":
            promised = fmt.number(tokens.iid_tokens_per_round)
            if tokens.iid_error is not None:
                promised += f" ({fmt.signed_percent(tokens.iid_error)})"
            cells = [fmt.interval(tokens.tokens_per_round), fmt.interval(chains.get(tree.depth)), promised]
            yield tree, tokens, list(map(Text, fitted(cells, console)))


def _shape(tree: StaticTree) -> tuple[str, str, str]:
    return str(tree.nodes), str(tree.depth), " ".join(map(str, tree.levels))


def _own(report: TreesReport, console: Console) -> None:
    """What a tree of its own would give each text; nothing to tell where there is one text alone."""
    texts = [(text, text.own) for text in report.texts if text.own is not None]
    if len(texts) < 2:
        return
    common = [tree.name for tree in report.trees if tree.kind == OPTIMAL][-1]
    columns = ("docs", "nodes", "depth", *LEVELS, "tokens/round", f"more than {common}")
    table = named_table("domain", *columns, wrapped=LEVELS)
    for text, own in texts:
        more = "the same tree" if own.same else fmt.difference(own.difference, 2)
        cells = fitted([fmt.interval(own.tokens.tokens_per_round), more], console)
        documents = fmt.documents(text.tested_documents, text.tested_clusters)
        table.add_row(plain(_name(report, text)), documents, *_shape(own.tree), *map(Text, cells))
    show(table, f"a tree of its own for each domain, of the same size as {common}", console)


def _name(report: TreesReport, text: TextTrees) -> str:
    return text_name(text, report.texts, not text.on_policy)


def _definitions(report: TreesReport) -> Iterator[str]:
    yield f"Brackets: {fmt.level(report.confidence)} intervals over documents. Rank 1 is the draft's top token."
    yield (
        "tokens/round: tokens emitted per verification, the target's own included. The target chooses each token by itself, "
        "greedily or by sampling, and a round goes on along the tree while the tree holds that token."
    )
    yield (
        "A tree pays on an engine where a round costs fewer decode steps than tokens/round. It costs depth c + "
        "T(nodes + 1)/T(1), c = T_draft/T(1) being a draft step of as many branches as a level has; a chain of that depth "
        "costs depth c + T(depth + 1)/T(1). Verification of trees was not timed, so there is no speedup and no verdict."
    )
    yield (
        "iid ranks: tokens/round if ranks were independent from position to position, the model that trees are chosen by; "
        "by how much that is too high."
    )
    yield "accepted by depth: share of the rounds with a proposal that accepted at least 1, 2, ... drafts."
    yield "The paths of the trees, to configure an engine with, are in --format json."
