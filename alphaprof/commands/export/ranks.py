"""Ranks of a run as formats of trees read them: shares of positions, and the tree that they make the best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaprof.commands.export.model import RankAcceptance
from alphaprof.commands.export.scope import Wanted, named
from alphaprof.commands.trees.sample import Array, Sample, sample_of
from alphaprof.errors import OptionInvalid
from alphaprof.log.run_draft import Side
from alphaprof.report.format import many, number, percent
from alphaprof.rules import GREEDY
from alphaprof.theory.ranks import replayed
from alphaprof.theory.trees import Tree, expected_tokens, optimal_tree

WIDTH = 32  # ranks, as in Sequoia's own examples (`--W 32`)
NODES = 16


@dataclass(frozen=True)
class Said:
    """What an artefact assumes, and where it may not be what a reader takes it for."""

    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Share:
    """One domain: its documents (rows of the documents table, ascending), and its share of the output tokens."""

    rows: Array
    weight: float


def ranks_of(side: Side, wanted: Wanted) -> tuple[RankAcceptance, Said]:
    """Ranks, and the best tree of `nodes` nodes on `gamma` levels for them. Raises `OptionInvalid` where ranks do not say
    what a tree accepts: of a draft without ranks, under another rule than strict, on text that is not the target's greedy.
    """
    if wanted.rule not in (None, "strict"):
        raise OptionInvalid(
            f"ranks say what a tree accepts where the target decodes greedily, not under {wanted.rule}", "leave out --rule"
        )
    sample = sample_of(side.run, side.draft, WIDTH, chooses=False)
    parts, ranks = _parts(side, sample, wanted.domain), sample.ranks
    shares = np.asarray(sum(part.weight * ranks.shares(part.rows) for part in parts))
    tree = optimal_tree(shares, wanted.nodes or NODES, wanted.gamma or max(side.run.gammas))
    silent = sum(part.weight * ranks.silent[part.rows].sum() / ranks.positions[part.rows].sum() for part in parts)
    where = f"domain {named(wanted.domain)}" if wanted.domain is not None else _traffic(sample, parts)
    documents = sum(len(part.rows) for part in parts)
    promised, replay = expected_tokens(tree, shares), number(_tokens(side, tree, parts), 3)
    notes = (
        f"{side.label}, rule strict, {where}, {many(documents, 'document')}, text: greedy",
        f"{tree.nodes} nodes beside the root, depth {tree.depth}: Sequoia expects {promised:.3f} tokens a round, with ranks "
        f"taken for independent; replayed on these documents it gives {replay}",
    )
    warnings = []
    if side.run.manifest.status != "complete":
        warnings.append(f"{side.run.path} is not complete: {many(side.run.manifest.documents, 'document')} so far")
    if silent:
        warnings.append(f"{percent(float(silent))} of the positions have no proposal: they count as misses")
    return RankAcceptance(tuple(shares.tolist()), tree.paths), Said(notes, tuple(warnings))


def _parts(side: Side, sample: Sample, domain: str | None) -> list[Share]:
    """The domains that are exported. Raises `OptionInvalid` for text that the target did not choose greedily."""
    texts = [text for text in sample.texts if domain in (None, text.domain)]
    if not texts:
        known = dict.fromkeys(named(text.domain) for text in sample.texts)
        raise OptionInvalid(f"{side.run.path} has no domain {named(domain or '')}", f"it has: {', '.join(known)}")
    given = side.run.manifest.config["decision"]["weights"] or {}
    used = [text for text in texts if domain is not None or given.get(text.domain, 1.0) > 0]
    if odd := dict.fromkeys(named(text.domain) for text in used if text.policy != GREEDY):
        greedy = dict.fromkeys(named(text.domain) for text in sample.texts if named(text.domain) not in odd)
        raise OptionInvalid(
            f"{', '.join(odd)}: not the target's greedy text. Where it samples, Sequoia draws the children of a node "
            "without replacement, and ranks do not say how often it keeps one",
            f"export one domain: --domain {' or '.join(greedy)}" if greedy else "profile with continuation.kind=greedy",
        )
    weights = {text.domain: sample.weights[text.domain] if domain is None else 1.0 for text in used}
    total = sum(weights.values())
    return [Share(np.sort(sample.domain(name, sample.tested)), weight / total) for name, weight in weights.items()]


def _traffic(sample: Sample, parts: list[Share]) -> str:
    return (
        f"whole traffic ({many(len(parts), 'domain')} {'as observed' if sample.weights_observed else 'by decision.weights'})"
    )


def _tokens(side: Side, tree: Tree, parts: list[Share]) -> float | None:
    """Tokens per round of the tree on these documents, by exact replay; None where a domain has no rounds."""
    chosen = np.zeros(side.run.manifest.documents, dtype=bool)
    chosen[np.concatenate([part.rows for part in parts])] = True
    (found,) = replayed(side.run, side.draft, [(tree, chosen)])
    places = [np.searchsorted(np.flatnonzero(chosen), part.rows) for part in parts]
    tokens = [float(found.tokens[mine].sum()) for mine in places]
    if not all(tokens):
        return None
    rounds = [float(found.rounds[mine].sum()) for mine in places]
    return 1 / sum(part.weight * spent / emitted for part, spent, emitted in zip(parts, rounds, tokens, strict=True))
