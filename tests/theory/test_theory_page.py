"""The page on theory is true: its worked numbers are what the library computes, and the functions that it names exist."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import entr, rel_entr

from alphaprof.costs.mixing import Drafting, mixing
from alphaprof.report.sections.target import certain_runs
from alphaprof.rules import BoundRule
from alphaprof.theory import certificates
from alphaprof.theory.certificates import ACCEPTED, SLACK, Target, certify
from alphaprof.totals.replay import run_lengths
from tests.loops import each
from tests.reference import DIVERGENCES, threshold

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "research" / "theory.md").read_text()
PAGE = " ".join(TEXT.split())  # line breaks do not matter
P = np.array([0.5, 0.3, 0.12, 0.08])  # the page's example
COIN, ONE = np.array([0.5, 0.3, 0.2]), np.array([0])
STRICT, TREE = BoundRule("strict"), BoundRule("tree", (2,))


def known(count: int = 4) -> Target:
    return Target(P[None, :count], 4, entr(P).sum(keepdims=True))


def kl(p: object, q: object) -> float:
    return float(rel_entr(np.asarray(p), np.asarray(q)).sum())


def numbers(values: object) -> str:
    """As cells of a table."""
    return " | ".join(f"{float(value):.4f}" for value in np.asarray(values))


def of_thresholds() -> Iterator[str]:
    limit = threshold(P, 1)
    yield f"p = (0.50, 0.30, 0.12, 0.08), strict, D\\* = {limit:.4f}"
    for q, top, words in (
        ((0.45, 0.35, 0.10, 0.10), "accepted", "certified"),
        ((0.50, 0.10, 0.20, 0.20), "accepted", "not certified: accepted all the same"),
        ((0.38, 0.42, 0.12, 0.08), "rejected", "rejected, so it cannot be certified"),
    ):
        shown = ", ".join(f"{value:.2f}" for value in q)
        assert (top == "accepted", words == "certified") == (np.argmax(q) == 0, kl(P, q) + SLACK < limit)
        yield f"| ({shown}) | {kl(P, q):.4f} | {top} | {words} |"
    for rules in (
        (STRICT,),
        (BoundRule("additive", (0.3,)), BoundRule("multiplicative", (0.3,)), BoundRule("trtllm", (2, 0.6))),
        (BoundRule("top_m", (3,)), BoundRule("typical", (0.09, 0.3))),
        (TREE,),
        (BoundRule("tree", (3,)),),
    ):
        names = ", ".join(f"`{rule.name}:{','.join(map(str, rule.values))}`".replace(":`", "`") for rule in rules)
        for rule in rules:
            count = ACCEPTED[rule.name](known(), **rule.arguments).count[0]
            values = [certify(rule, known(), divergence).value[0] for divergence in DIVERGENCES]
            yield f"| {names} | {count} | {numbers(values)} |"
    yield f"mean {(P[0] + P[2]) / 2:.2f}; 0.30 lies below it and joins, t = {P[:3].mean():.4f}"
    assert threshold(P, 1, 2) == pytest.approx(kl(P[:3], np.full(3, P[:3].mean())))
    assert threshold(P, 1, 2, "tv") == pytest.approx(P[0] - P[:3].mean())
    least, most = (threshold(np.array([0.969, *rest]), 1) for rest in ([0.031], [1e-9] * 2))
    yield f"p₍₁₎ = 0.969 has a threshold of at least {least:.3f} (one other token has all the rest) and at most {most:.3f}"
    sure = np.eye(1, 6)[0]
    yield f"Strict: D\\* ≤ log 2 = {threshold(sure, 1):.3f}"
    yield f"log(w + 1), so {threshold(sure, 1, 2):.3f} for 2 and {threshold(sure, 1, 4):.3f} for 4"
    few = certify(TREE, known(2))
    assert not few.exact[0]
    yield f"`tree:2` then gives {few.value[0]:.4f} instead of {threshold(P, 1, 2):.4f}"
    assert SLACK == 1e-5
    yield "max(KL(p‖q), 0) + 10⁻⁵ < D\\*"


def of_many_positions() -> Iterator[str]:
    values = np.array([0.02, 0.05, 0.1, 0.3, 0.6])
    yield f"Thresholds {', '.join(f'{value:.2f}' for value in values)} and a mean of 0.03"
    share = certificates.budget(values, 0.03)
    yield f"0.02 + 0.05 ≤ {0.03 * 5:.2f} < 0.02 + 0.05 + 0.10, so at most {share} of the positions"
    values = np.array([0.6, 0.5, 0.02, 0.4, 0.3, 0.01, 0.5, 0.6])
    runs = run_lengths(values > 0.1, ONE, np.array([8]))
    yield f"D\\* = {', '.join(map(str, values))} at eight positions and ε = 0.1: runs {', '.join(map(str, runs))}."
    rounds = certain_runs(values, np.array([8]), 0.1, 3)[2]
    assert (rounds.rounds.tolist(), rounds.tokens.tolist()) == ([3], [7])
    yield f"three rounds the other 7: at least {7 / 3:.2f} tokens a round. The median of D\\* is {np.median(values)}."


def of_lossless() -> Iterator[str]:
    divergences = np.array([0.01, 0.03, 0.1, 0.3, 1, 3])
    yield f"| KL | {' | '.join(f'{value:g}' for value in divergences)} |"
    rows = {"best": certificates.beta_bound(divergences), "Pinsker": (1 - np.sqrt(divergences / 2)).clip(0)}
    rows["Bretagnolle-Huber"] = 1 - np.sqrt(1 - np.exp(-divergences))
    for name, values in rows.items():
        yield f"| {name} | {numbers(values)} |"
    two = np.array([0.02, 0.5])
    first, second = certificates.beta_bound(two)
    mean = f"{(first + second) / 2:.4f} on average; their mean alone gives {certificates.beta_bound(two.mean()):.4f}"
    yield f"KLs of 0.02 and 0.5 give {first:.4f} and {second:.4f}, {mean}"
    by_kl, by_tv = brentq(lambda y: kl(np.array([0.2, 0.8]), np.array([y, 1 - y])) - 0.05, 0.2, 0.9), 0.2 + 0.05
    yield f"p(R) = 0.2; a KL of 0.05 allows {by_kl:.4f}, a TV of 0.05 allows {by_tv:.4f}"
    p, q = np.array([0.6, 0.4]), np.array([1.0, 0.0])
    assert kl(p, q) == math.inf
    beta = np.minimum(p, q).sum()
    yield f"p = (0.6, 0.4) and q = (1, 0) have β = {beta}, KL(p‖q) = ∞, KL(q‖p) = {kl(q, p):.3f}"
    entropy = entr(P).sum()
    yield f"H = {entropy:.3f} and"
    yield f"= {math.exp(-entropy):.3f}, and its p₍₁₎ is {P[0]}"


def of_margins() -> Iterator[str]:
    yield f"g = 0.5 gives {certificates.margin_thresholds(np.array([0.5]))[0]:.4f} for w = 1"


def of_the_matrix() -> Iterator[str]:
    rounds, ms = mixing(2, head=False)[:3, :4].astype(int), np.array([10, 12, 15, 2])
    yield f"T(1), T(2), T(3) = {', '.join(map(str, ms[:3]))} and a draft step of {ms[3]}"
    yield f"run the rows {', '.join(str(tuple(row.tolist())) for row in rounds)} of M"
    yield f"and take {', '.join(map(str, rounds @ ms))}."


def of_batches() -> Iterator[str]:
    chances, ms = np.array([0.5, 0.0, 0.5]), np.array([10, 14, 14.5])
    alone, together = (
        chances @ mixing(2, head=False, batch=batch, others=Drafting(chances))[:3, :3] @ ms for batch in (1, 2)
    )
    yield f"T = ({', '.join(f'{value:g}' for value in ms)})"
    yield f"Alone the mean verification is {alone:g}; in the batch (10 + 2 · 14 + 14.5)/4 = {together:g}."
    assert together == (10 + 2 * 14 + 14.5) / 4


PARTS = (of_thresholds, of_many_positions, of_lossless, of_margins, of_the_matrix, of_batches)


@each("part", PARTS)
def test_worked_numbers_are_what_the_library_computes(part: Callable[[], Iterator[str]]) -> None:
    assert [text for text in part() if text not in PAGE] == []


def test_no_worked_number_is_left_unchecked() -> None:
    checked = " ".join(text for part in PARTS for text in part())
    numbers_of_page = re.findall(r"\d+\.\d{3,}", re.sub(r"arXiv:\S+", "", PAGE))
    assert len(numbers_of_page) > 50
    assert [number for number in numbers_of_page if number not in checked] == []


FOLDERS = ("stats", "totals", "theory", "report", "costs")


def test_functions_named_in_the_page_exist() -> None:
    modules = {path.stem: path for path in (ROOT / "alphaprof").glob("*/*.py") if path.parent.name in FOLDERS}
    named = {(module, name) for module, name in re.findall(r"`([a-z_]+)\.([A-Za-z_]+)`", PAGE) if module in modules}
    assert len(named) > 10
    missing = [
        item
        for item in named
        if not hasattr(importlib.import_module(f"alphaprof.{modules[item[0]].parent.name}.{item[0]}"), item[1])
    ]
    assert missing == []
