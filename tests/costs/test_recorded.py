"""Random drafts, documents and step times: every figure is what it was when times were summed up kind by kind, without a
matrix. 4,000 such cases were equal to 1e-9; tests/golden/speedups.json holds what that code said of some.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.rounds import (
    NOTHING,
    StepTime,
    StepTimes,
    cost_bounds,
    doubtful_time,
    full_round_costs,
    round_costs,
    time_by_step,
    time_spent,
    without_draft,
)
from alphaprof.costs.speedup import Decoded, Mix, Speedup, speedup, total_times
from alphaprof.totals.replay import RoundCounts
from tests.loops import each

Array = np.ndarray[Any, Any]
SEEDS = (*range(12), 18, 51)
RECORDED = Path(__file__).parent.parent / "golden" / "speedups.json"
KINDS = ("model", "head", "lookup", "hybrid", "hybrid head")


def step(rng: np.random.RandomState, ms: float, timed: str) -> StepTime:
    """A step of about `ms`. `timed`: in rounds, with an error of its own, or computed, with one that steps share."""
    ms, waiting = ms * float(np.exp(0.1 * rng.standard_normal())), float(0.3 * rng.random_sample() * (rng.randint(4) == 0))
    if timed == "rounds":
        rounds = ms * np.exp(0.05 * rng.standard_normal(rng.randint(7, 10)))
        rounds[0] *= 1 + 2 * (rng.randint(3) == 0)  # a tail
        return StepTime(ms, 0.0, tuple(rounds), 0.2 * float(rng.random_sample()), waiting, redrawn=bool(rng.randint(2)))
    own, shared = (0.02, 0.0) if timed == "alone" else (0.01 * rng.randint(2), 0.1)
    return StepTime(ms, own, waiting=waiting, shared_error=shared)


def target_of(rng: np.random.RandomState, gamma: int, timed: str) -> dict[int, StepTime]:
    steps = {n: step(rng, 10 + 0.3 * n**1.5, timed) for n in range(1, gamma + 2)}
    if timed == "computed":
        steps[1] = dataclasses.replace(steps[1], shared_error=0.0)
    return steps


def times_of(
    rng: np.random.RandomState, kind: str, target: dict[int, StepTime], gamma: int, timed: str, batch: int
) -> StepTimes:
    """Step times of a draft of some kind, without the steps that it may lack."""
    head, lookup = "head" in kind, kind == "lookup"
    draft = NOTHING if lookup else step(rng, 1.5, timed)
    found = StepTimes(
        dict(target),
        draft,
        lookup=step(rng, 0.3, timed) if lookup or "hybrid" in kind else NOTHING,
        draft_after_full=step(rng, 2.0, timed) if not head and not lookup and rng.randint(2) else None,
        bookkeeping=step(rng, 0.5, timed) if rng.randint(2) else NOTHING,
        draft_first={n: step(rng, 1.6 + 0.2 * n, timed) for n in range(1, gamma + 2)} if head else {},
        optional="hybrid" in kind,
        batch=batch,
    )
    rng.randint(6)  # which was drawn when the cases were recorded
    return found


def counts_of(rng: np.random.RandomState, kind: str, cluster: Array, gamma: int) -> RoundCounts:
    """Rounds of documents, of which some drafts stop at a p_min and some rounds are expectations."""
    documents = len(cluster)
    exactly = rng.randint(0, 12, (documents, gamma + 1)) * 1.0
    exactly[:, gamma] += 1 + 5 * rng.random_sample(documents)
    if kind in ("model", "head") and rng.randint(2):
        exactly[:, :-1] = 0.0  # every round drafts all that it may
    at_least = exactly[:, ::-1].cumsum(1)[:, ::-1]
    drafted, rounds = at_least[:, 1:], at_least[:, 0]
    accepted = np.cumprod(0.3 + 0.6 * rng.random_sample((documents, gamma)), axis=1) * drafted[:, -1:]
    control = rng.standard_normal(documents) * 2.0 * (rng.randint(3) == 0)
    counts = RoundCounts(rounds + accepted.sum(1), rounds, drafted, accepted, control, cluster)
    if kind in ("model", "head") and rng.randint(2):
        doubt = 0.2 * np.minimum(drafted, (rounds - drafted[:, -1])[:, None]) * rng.random_sample((1, gamma))
        counts = dataclasses.replace(counts, unused=rounds - drafted[:, -1], doubt=doubt)
    if "hybrid" in kind:
        started = 0.4 * rounds * rng.random_sample(documents)
        read = {"read_by_head": 1.5 * started, "read_by_model": 0.7 * started}
        counts = dataclasses.replace(counts, started=started, steps=gamma * 0.8 * started, **read)
    return counts


def said(found: Speedup | None) -> list[float]:
    """Every field of a speedup, and its bounds."""
    if found is None:
        return []
    fields = [float(getattr(found, field.name)) for field in dataclasses.fields(found)]
    return [*fields, *found.bounds(0.05), *found.possible(0.1)]


def figures(seed: int) -> dict[str, list[float]]:
    """What the code says of a random case: two drafts and two lengths, three domains."""
    rng = np.random.RandomState(seed)
    timed = ("rounds", "alone", "computed")[seed % 3]
    batch, kinds = (1, 16, 2)[rng.randint(3)], [KINDS[rng.randint(len(KINDS))] for _ in range(2)]
    gamma = int(rng.randint(2, 7)) if any("head" in kind for kind in kinds) else int(rng.randint(1, 7))
    targets = [target_of(rng, gamma, timed) for _ in range(3)]
    whole, *halves = ([times_of(rng, kind, target, gamma, timed, batch) for kind in kinds] for target in targets)
    if timed == "rounds":
        halves = [[dataclasses.replace(each, half=half) for each in side] for half, side in enumerate(halves)]
    else:
        halves = [whole, whole]
    sizes, together = rng.randint(6, 12, 3), rng.randint(2) == 0
    clusters = [
        np.sort(rng.permutation(16)[:size] // (1 + rng.randint(2))) if together else 12 * place + np.arange(size)
        for place, size in enumerate(sizes)
    ]
    domains = [[counts_of(rng, kind, cluster, gamma) for cluster in clusters] for kind in kinds]
    tokens = [counts.tokens for counts in domains[0]]  # a text is the same with both drafts
    domains[1] = [dataclasses.replace(counts, tokens=each) for counts, each in zip(domains[1], tokens, strict=True)]
    shares = tuple((weights := rng.random_sample(3) + 0.1) / weights.sum())
    strata = rng.randint(0, 3, 40) if rng.randint(2) else None
    mix = Mix(("a", "b", "c"), shares) if rng.randint(2) else Mix(("a", "b", "c"), None, strata)

    def cut(place: int, half: int) -> list[RoundCounts]:
        """The documents of a half, with its own draft."""
        return [counts.rows(counts.cluster % 2 == half) for counts in domains[place]]

    def crossed(places: tuple[int, int]) -> list[list[Decoded]]:
        sides = [mix.decoded(cut(place, half), halves[half][place]) for half, place in enumerate(places)]
        return [list(parts) for parts in zip(*sides, strict=True)]

    ways = [mix.decoded(counts, times) for counts, times in zip(domains, whole, strict=True)]
    counts, times = ways[0][0]
    steps = time_by_step(counts, times)
    off = [ways[0][0], *(without_draft(*each) for each in ways[0][1:])]
    found: dict[str, list[float]] = {
        "round_costs": round_costs(times, gamma).tolist() + round_costs(whole[0], gamma).tolist(),
        "full_round_costs": full_round_costs(whole[0], gamma).tolist(),
        "cost_bounds": [*cost_bounds(times, gamma), *cost_bounds(whole[0], gamma)],
        "c, v": [times.c(), times.v(gamma)],
        "time_spent": time_spent(counts, times).tolist(),
        "time_shares": (steps / steps.sum()).tolist(),
        "total_times": [*total_times(counts, times)],
        "doubtful_time": [doubtful_time(counts, times)],
        "ends": [
            *(mix.value([(counts.ends[end], times) for counts, times in ways[0]]) or 0.0 for end in (1, 0)),
            mix.value(ways[0]) or 0.0,
        ],
        "alone": said(speedup([domains[0][1]], [1.0], whole[0])),
        "as weighted": said(speedup(domains[0], list(shares), whole[0])),
        "mixed": said(mix.routed(ways[0])),
        "gain": said(mix.gain(*ways)),
        "on for one": said(mix.routed(off)) + said(mix.gain(ways[0], off)),
    }
    if all(counts.tokens.size for half in (0, 1) for counts in cut(0, half)):
        two, one = crossed((0, 1)), crossed((0, 0))
        found |= {"crossed": said(mix.routed(two)), "crossed alike": said(mix.routed(one))}
        found |= {"crossed gain": said(mix.gain(one, two))}
    return found


@each("seed", SEEDS)
def test_speedups_are_what_they_were(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaprof.costs.timing.BUSY", 0.1)  # which tests do without
    recorded, found = json.loads(RECORDED.read_text())[str(seed)], figures(seed)
    assert found.keys() == recorded.keys()
    for name, values in found.items():
        assert values == pytest.approx(list(map(float, recorded[name])), rel=1e-9, abs=1e-12), name


def test_the_recorded_cases_hold_what_is_rare() -> None:
    """Slow rounds, unknown numbers of drafted tokens, and documents that are cross-fitted."""
    recorded = json.loads(RECORDED.read_text()).values()
    tail = [field.name for field in dataclasses.fields(Speedup)].index("tail")
    assert any(float(each["alone"][tail]) > 0.05 for each in recorded)
    assert any(each.get("crossed gain") for each in recorded)
    assert any(float(each["doubtful_time"][0]) > 0 for each in recorded)
