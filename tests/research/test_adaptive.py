"""The study of adaptive verification against an event loop that shares nothing with it: one object a sequence, lists, the
estimator as a dense system of equations.
"""

from __future__ import annotations

import math
import runpy
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.loops import each

pytestmark = pytest.mark.slow
study = runpy.run_path(str(ROOT / "scripts" / "research" / "adaptive.py"))
FIXED, EMA, ADAPTIVE, ORACLE = range(4)
LADDER = {1: [1, 3, 5, 7], 4: [1, 3, 5, 7], 8: [0, 1, 3], 16: [0, 1, 3], 32: [0, 1]}  # of SGLang, by sequences


class Sequence:
    """One request after the other, in the place of one sequence of the batch."""

    def __init__(self, queue: Any, before: list[float]) -> None:
        self.queue, self.certain = queue, before
        self.begin()

    def begin(self) -> None:
        self.rounds = next(self.queue)
        self.at, self.remembered, self.now = 0, list(self.certain), list(self.certain)

    def take(self, verified: int) -> tuple[int, int]:
        accepted = min(self.rounds[self.at][0], verified)
        emitted = min(accepted + 1, len(self.rounds) - self.at)
        self.at, self.remembered = self.at + emitted, self.now
        if self.at == len(self.rounds):
            self.begin()
        return accepted, emitted


class Logistic:
    """A slope and biases by depth; all observations since the last refit are kept."""

    def __init__(self, slope: float, biases: list[float], learns: bool) -> None:
        self.slope, self.biases, self.learns, self.seen = slope, biases, learns, []

    def __call__(self, odds: list[float]) -> list[float]:
        return [1 / (1 + math.exp(-(self.slope * f + b))) for f, b in zip(odds, self.biases, strict=False)]

    def refit(self) -> None:
        size = len(self.biases)
        matrix, score, counts = 1e-3 * np.eye(size + 1), np.zeros(size + 1), np.zeros(size)
        for depth, f, p, y in self.seen:
            row = np.zeros(size + 1)
            row[0], row[1 + depth] = f, 1
            matrix, score = matrix + p * (1 - p) * np.outer(row, row), score + (y - p) * row
            counts[depth] += 1
        step = float(np.linalg.solve(matrix, score)[0]) * counts.sum() / (counts.sum() + 50)
        step = step if self.slope + step >= 0 else 0.0
        for depth in range(size):
            rest = (score[1 + depth] - matrix[0, 1 + depth] * step) / matrix[1 + depth, 1 + depth]
            self.biases[depth] += rest * counts[depth] / (counts[depth] + 50)
        self.slope, self.seen = self.slope + step, []


class Ladder:
    """SGLang's: an average of accepted drafts moves along the candidates."""

    def __init__(self, candidates: list[int]) -> None:
        self.steps, self.batches = candidates, 0
        self.k = 3 if 3 in candidates else candidates[len(candidates) // 2]
        self.average = self.k - 1.0

    def see(self, accepted: float) -> None:
        self.batches += 1
        if self.k:
            self.average += 0.2 * (accepted - self.average)
        if self.batches < 11 or self.batches % 5:
            return
        if self.k == 0:
            self.k = self.steps[1] if len(self.steps) > 1 else 0
            return
        lower = [s for s in self.steps if s < self.k]
        if lower and self.average <= (0.25 if lower[-1] == 0 else lower[-1] - 0.75):
            while lower and self.average <= (0.25 if lower[-1] == 0 else lower[-1] - 0.75):
                self.k = lower.pop()
            return
        for higher in [s for s in self.steps if s > self.k]:
            if self.average <= self.k - 0.5:
                return
            self.k = higher


def survivals(confidences: list[float], most: int) -> list[float]:
    return [math.prod(confidences[: depth + 1]) for depth in range(most)]


def looped(policy: int, gamma: int, texts: list[Any], batch: int, costs: Any, model: Logistic, steps: int) -> Any:
    queue = (texts[number % len(texts)] for number in iter(iter(range(10**9)).__next__, -1))
    sequences = [Sequence(queue, [1.0] * gamma) for _ in range(batch)]
    ladder, tokens, ms, drafts = Ladder(LADDER[batch]), 0, 0.0, 0
    for step in range(steps):
        room = [min(gamma, each.rounds[each.at][1]) for each in sequences]
        if policy in (FIXED, EMA):
            k = ladder.k if policy == EMA else gamma
            verified = [min(k, some) for some in room]
            spent = costs.draft[k] + costs.verify[batch + sum(verified)]
        else:
            for each in sequences:
                accepted, _, odds = each.rounds[each.at]
                each.now = model(odds) if policy == ADAPTIVE else [float(depth < accepted) for depth in range(gamma)]
            old = [each.remembered if policy == ADAPTIVE else each.now for each in sequences]
            ranked = sorted((s for own, some in zip(old, room, strict=True) for s in survivals(own, some)), reverse=True)
            value = [
                (batch + sum(ranked[:budget])) / (costs.draft[gamma] + costs.padded[batch + budget])
                for budget in range(len(ranked) + 1)
            ]
            budget = value.index(max(value))
            places = [
                (-chance, i, depth)
                for i, (each, some) in enumerate(zip(sequences, room, strict=True))
                for depth, chance in enumerate(survivals(each.now, some))
            ]
            taken = [i for _, i, _ in sorted(places)[:budget]]
            verified = [taken.count(i) for i in range(batch)]
            spent = costs.draft[gamma] + costs.padded[batch + budget]
        kept = 0
        for each, count in zip(sequences, verified, strict=True):
            odds, chances = each.rounds[each.at][2], each.now
            accepted, emitted = each.take(count)
            kept += accepted
            if policy == ADAPTIVE:
                graded = range(min(accepted + 1, count))
                model.seen += [(depth, odds[depth], chances[depth], float(depth < accepted)) for depth in graded]
            if step >= steps // 4:
                tokens, drafts = tokens + emitted, drafts + count
        ms += spent if step >= steps // 4 else 0
        ladder.see(kept / batch)
        if model.learns and step % 100 == 99:
            model.refit()
    return tokens, ms, drafts


def made(seed: int, gamma: int) -> tuple[list[Any], Any]:
    """Texts of rounds (accepted, proposed, log-odds), easy and hard ones, as lists and as arrays."""
    drawn, texts = np.random.default_rng(seed), []
    for size in drawn.integers(20, 90, 12):
        odds = drawn.normal(drawn.normal(0.5, 1), 1.5, (size, 7))
        right = drawn.random((size, 7)) < 1 / (1 + np.exp(-1.3 * odds + 0.2))
        proposed = np.where(drawn.random(size) < 0.1, drawn.integers(0, 7, size), 7)
        accepted = np.minimum(right.cumprod(1).sum(1), np.minimum(proposed, size - np.arange(size)))
        texts.append(list(zip(accepted.tolist(), proposed.tolist(), odds.tolist(), strict=True)))
    accepted, proposed, odds = (np.array([round_[n] for text in texts for round_ in text]) for n in range(3))
    stop = np.cumsum([len(text) for text in texts])
    return texts, study["Rounds"](accepted, proposed, odds, np.append(0, stop[:-1]), stop)


@each(
    ("policy", "gamma", "batch", "learns"),
    [
        (FIXED, 3, 4, False),
        (EMA, 7, 1, False),
        (EMA, 7, 16, False),
        (EMA, 7, 32, False),
        (ORACLE, 5, 16, False),
        (ADAPTIVE, 7, 1, False),
        (ADAPTIVE, 7, 16, False),
        (ADAPTIVE, 4, 32, False),
        (ADAPTIVE, 7, 8, True),
        (ADAPTIVE, 3, 32, True),
    ],
)
def test_policies_do_as_an_event_loop_says(policy: int, gamma: int, batch: int, learns: bool) -> None:
    texts, rounds = made(batch, gamma)
    costs, steps = study["Costs"].of("h20", "head", batch), 800
    start = (0.5, [-0.2] * gamma) if learns else (1.1, [0.1 - 0.2 * depth for depth in range(gamma)])
    found = study["played"](
        policy, gamma, rounds.accepted, rounds.proposed, rounds.odds, rounds.start, rounds.stop, batch,
        costs.draft, costs.verify, costs.padded, np.array(LADDER[batch]), np.array([start[0], *start[1]]), learns, steps,
    )  # fmt: skip
    expected = looped(policy, gamma, texts, batch, costs, Logistic(*start, learns), steps)
    assert found == pytest.approx(expected, rel=5e-3 if learns else 1e-9)
    assert policy == FIXED or expected[2] % batch or expected[2] != gamma * batch * (steps - steps // 4)
