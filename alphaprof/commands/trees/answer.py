"""What trees give: the value that `alphaprof trees` answers with, and its text (rich)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Interval
from alphaprof.theory.trees import NodePath

OPTIMAL = "optimal"
LEVELS = ("nodes by depth",)
NUMBERS = ("tokens/round", "chain of that depth")
IID = ("iid ranks",)


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
    """Rounds with one tree on some documents; None where there are none. `marginal[d-1]`: share of the rounds with a
    proposal that accepted at least d drafts. `more_than_chain`: tokens per round beyond those of the chain as deep, paired.
    """

    tree: str  # name of the tree
    rounds: int
    tokens_per_round: Interval | None  # over all rounds
    iid_tokens_per_round: float | None  # if ranks were independent, with the shares that these documents have
    iid_error: float | None  # by what share that is too high
    marginal: tuple[float | None, ...]
    more_than_chain: Interval | None  # None: of a chain


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

    def terminal(self, console: Console) -> None:
        """Prints the gain of a tree over its chain, shares of ranks, then tokens per round of every tree, also by domain."""
        for line in _answer(self):
            console.print(line, highlight=False)
        console.print()
        console.print(plain(f"alphaprof {self.alphaprof}   run {self.run}   draft {self.draft}"))
        tested, chosen = fmt.count(self.tested_on), fmt.count(self.chosen_on)
        documents = f"no tree is chosen, so all {tested} documents test"
        if self.held_out:
            documents = f"{chosen} documents choose the trees, the other {tested} test them: all rounds are theirs"
        console.print(f"static draft trees, rounds replayed from ranks; {documents}\n", highlight=False)
        _ranks(self, console)
        if any(row.tokens_per_round for row in self.traffic):
            _traffic_table(self, console)
        for text in self.texts:
            if text.trees:
                _text_table(self, text, console)
        _own_table(self, console)
        for note in _notes(self):
            console.print(Text("note: ", "yellow").append_text(plain(note)))
        for definition in _definitions(self):
            console.print(definition, style="dim", highlight=False)


def _answer(report: TreesReport) -> Iterator[Text]:
    """Yields the gain of one tree over its chain, on which documents, that time is not in it, and what each tree gains.

    The tree must not be the one that gains most on the documents that test, or its interval would be that of the best of
    several. It is the headline's; without one the first, which no number picked.
    """
    rows = [(tree, row, row.more_than_chain) for tree, row in zip(report.trees, report.traffic, strict=True)]
    known = [(tree, row, more) for tree, row, more in rows if more is not None]
    where = "the whole traffic"
    if not known and (text := next((text for text in report.texts if text.trees), None)):
        where = _name(report, text)
        pairs = zip(report.trees, text.trees, strict=True)
        known = [(tree, row, row.more_than_chain) for tree, row in pairs if row.more_than_chain is not None]
    if not known:
        yield Text("NO TREE COULD BE TESTED: the notes below say why", "bold")
        return
    tree, row, more = next((each for each in known if each[0].name == report.headline), known[0])
    gain = "accepts more than" if more.low > 0 else "accepts less than" if more.high < 0 else "is not told apart from"
    values = f"{fmt.difference(more, 2)} tokens per round"
    headline = plain(f"tree {fmt.short(tree.name)} {gain} its chain")
    headline.stylize("bold")
    yield headline.append_text(plain(f": {values}, {fmt.interval(row.tokens_per_round)} in all"))
    documents = f"{fmt.count(report.tested_on)} documents{' that chose no tree' if report.held_out else ''}"
    yield plain(f"on {where}, {documents}, {fmt.level(report.confidence)} intervals; a round verifies {tree.nodes} nodes")
    yield Text("time is not modelled: verifying a tree was not timed, so there is no speedup and no verdict")
    yield Text(
        "next: it is faster where a round costs fewer decode steps than that; --format json has the paths for an engine"
    )
    if len(known) > 1:
        gains = ", ".join(f"{fmt.short(tree.name)} {each.value:+.2f}" for tree, _, each in known)
        yield plain(f"every tree beyond the chain as deep: {gains}")


def _notes(report: TreesReport) -> Iterator[str]:
    """What is missing, and why."""
    for text in report.texts:
        if text.reason:
            yield f"{_name(report, text)}: {text.reason}"
    if any(text.trees for text in report.texts) and not any(row.tokens_per_round for row in report.traffic):
        yield "the whole traffic has no tokens per round: some domain has no rounds on tested documents: profile more of it"
    if report.held_out and not any(tree.kind == OPTIMAL for tree in report.trees):
        yield "no tree was chosen: there is no document of the target's own text to choose it on"
    if not report.complete:
        yield f"{report.run} is an interrupted run: its first documents only; finish it with alphaprof profile --resume"


def _ranks(report: TreesReport, console: Console) -> None:
    """Shares of positions by rank."""
    if not report.texts:
        return
    silent = any(text.silent.value > 0 for text in report.texts)
    deepest = len(report.texts[0].ranks)
    names = [*map(str, range(1, deepest + 1)), f"beyond {deepest}", *(["no proposal"] if silent else [])]
    title = "share of positions by the rank of the target's token in the draft's distribution, all documents"
    title += ", first drafts of rounds" if report.by_depth else ""
    table = named_table("domain", "docs", *names)
    for text in report.texts:
        shares = [*text.ranks, text.beyond, text.silent][: len(names)]
        cells = map(fmt.share_with_interval, shares)
        table.add_row(plain(_name(report, text)), fmt.documents(text.documents, text.clusters), *cells)
    show(table, title, console)


def _traffic_table(report: TreesReport, console: Console) -> None:
    """Every tree on the whole traffic, with its shape."""
    table = named_table("tree", "nodes", "depth", *LEVELS, *_numbers(report), left=LEVELS, wrapped=LEVELS)
    for tree, _, numbers in _rows(report, report.traffic):
        table.add_row(plain(fmt.short(tree.name)), *_shape_cells(tree), *numbers)
    origin = "observed shares of tokens" if report.weights_observed else "shares of tokens from the profile"
    show(table, "whole traffic: tokens per round", console)
    shares = ", ".join(f"{fmt.short(domain)} {fmt.percent(weight)}" for domain, weight in report.weights.items())
    console.print(Padding(plain(f"weights ({origin}): {shares}"), (0, 0, 1, 2)))


def _text_table(report: TreesReport, text: TextTrees, console: Console) -> None:
    """Every tree on one domain and kind of text."""
    depths = ("accepted by depth",)
    table = named_table("tree", *_numbers(report), *depths, left=depths, wrapped=depths)
    for tree, tokens, numbers in _rows(report, text.trees):
        table.add_row(
            plain(fmt.short(tree.name)), *numbers, Text(" ".join(fmt.share(share, 2) for share in tokens.marginal))
        )
    documents = fmt.documents(text.tested_documents, text.tested_clusters)
    show(table, f"{_name(report, text)}: tokens per round on {documents} documents", console)


def _numbers(report: TreesReport) -> tuple[str, ...]:
    """The numbers of a tree: without what independent ranks promise, where ranks depend on the level."""
    return NUMBERS if report.by_depth else (*NUMBERS, *IID)


def _rows(report: TreesReport, rows: Sequence[TreeTokens]) -> Iterator[tuple[StaticTree, TreeTokens, list[Text]]]:
    """Yields each tree but chains with its numbers: tokens per round, measured, of the chain as deep, and as promised."""
    pairs = list(zip(report.trees, rows, strict=True))
    chains = {tree.depth: tokens.tokens_per_round for tree, tokens in pairs if tree.kind == "chain"}
    for tree, tokens in pairs:
        if tree.kind != "chain":
            promised = fmt.number(tokens.iid_tokens_per_round)
            if tokens.iid_error is not None:
                promised += f" ({fmt.signed_percent(tokens.iid_error)})"
            cells = [fmt.interval(tokens.tokens_per_round), fmt.interval(chains.get(tree.depth)), promised]
            yield tree, tokens, list(map(Text, cells[: len(_numbers(report))]))


def _shape_cells(tree: StaticTree) -> tuple[str, str, str]:
    return str(tree.nodes), str(tree.depth), " ".join(map(str, tree.levels))


def _own_table(report: TreesReport, console: Console) -> None:
    """What a tree of its own would give each text; nothing to tell where there is one text alone."""
    texts = [(text, text.own) for text in report.texts if text.own is not None]
    if len(texts) < 2:
        return
    common = [tree.name for tree in report.trees if tree.kind == OPTIMAL][-1]
    columns = ("docs", "nodes", "depth", *LEVELS, "tokens/round", f"more than {common}")
    table = named_table("domain", *columns, wrapped=LEVELS)
    for text, own in texts:
        more = "the same tree" if own.same else fmt.difference(own.difference, 2)
        cells = [fmt.interval(own.tokens.tokens_per_round), more]
        documents = fmt.documents(text.tested_documents, text.tested_clusters)
        table.add_row(plain(_name(report, text)), documents, *_shape_cells(own.tree), *map(Text, cells))
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
        "A tree is faster on an engine where a round costs fewer decode steps than tokens/round. It costs depth c + "
        "T(nodes + 1)/T(1), c = T_draft/T(1) being a draft step of as many branches as a level has."
    )
    if report.by_depth:
        yield (
            "first ranks: trees are chosen as if every level had the ranks of first drafts. A head's depend on the level, "
            "so another tree may be better. Rounds are replayed level by level."
        )
    else:
        yield (
            "iid ranks: tokens/round if ranks were independent from position to position, the model that trees are chosen "
            "by; by how much that is too high."
        )
    yield "accepted by depth: share of the rounds with a proposal that accepted at least 1, 2, ... drafts."
