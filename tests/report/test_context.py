"""Acceptance by length of context: a planted decay is found, other domains are none, and ranges add up to all rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from alphaprof.report.build import build_report
from alphaprof.report.sections.context import ContextTokens, edges_of
from alphaprof.totals.replay import Trace, listed_rounds, replay, run_lengths
from tests.reporting import as_terminal
from tests.synthetic import Domain, Recipe, rewritten, stored_totals, write_run

Array = np.ndarray[Any, Any]
GAMMA = 4


def tokens_of(chances: list[Array], prompts: list[int], rng: np.random.Generator) -> ContextTokens:
    """Texts whose every token is what the draft proposed with these chances, [documents][positions]."""
    sizes = np.array([len(chance) for chance in chances])
    stop = np.cumsum(sizes)
    start = stop - sizes
    kept = rng.random(stop[-1]) < np.concatenate(chances)
    run = run_lengths(kept, start, stop)
    trace = Trace(run, np.full(len(kept), 256), start, stop)
    found = listed_rounds(trace, GAMMA)
    row, place = np.repeat(np.arange(len(sizes)), sizes), np.arange(len(kept))
    begun, left = place - start[row], stop[row] - place
    at = begun > 0
    columns = {"unit": row, "document": row, "context": np.array(prompts)[row] + begun, "begun": begun, "left": left}
    columns |= {"proposed": np.ones(len(kept)), "kept": kept}
    rounds = np.repeat(np.stack([found.drafted, found.accepted, found.emitted]), found.emitted, axis=1)
    tokens = ContextTokens(**{name: values[at] for name, values in columns.items()}, rounds={GAMMA: rounds}, stops="")
    counted = replay(trace, GAMMA)
    whole = tokens.counts(GAMMA, np.arange(at.sum()))
    for name in ("rounds", "tokens", "drafted", "accepted"):  # of any texts
        assert getattr(whole, name) == pytest.approx(getattr(counted, name))
    return tokens


def test_ranges_add_up_to_all_rounds() -> None:
    rng = np.random.default_rng(1)
    tokens = tokens_of([rng.random(200) for _ in range(30)], list(rng.integers(10, 900, 30)), rng)
    edges = [0, 300, 700]
    parts = [
        tokens.counts(GAMMA, np.flatnonzero((tokens.context >= low) & (tokens.context < high)))
        for low, high in zip(edges, [*edges[1:], 10**9], strict=True)
    ]
    whole = tokens.counts(GAMMA, np.arange(len(tokens.context)))
    for name in ("rounds", "tokens", "drafted", "accepted"):
        assert sum(getattr(part, name).sum(0) for part in parts) == pytest.approx(getattr(whole, name).sum(0))


def mixed(rng: np.random.Generator, decay: float) -> ContextTokens:
    """An easy domain of short texts and a hard one of long ones; acceptance falls by `decay` with each doubling."""
    chances, prompts = [], []
    for number in range(40):
        size, prompt, base = (150, 60, 0.8) if number % 2 else (400, 800, 0.5)
        own = base + rng.normal(0, 0.1)
        context = np.log2((prompt + np.arange(size)) / prompt)
        chances.append(np.clip(own - decay * context, 0.05, 0.95))
        prompts.append(prompt)
    return tokens_of(chances, prompts, rng)


@pytest.mark.parametrize("decay", [0.15, -0.15])
def test_a_planted_decay_is_found(decay: float) -> None:
    found = [mixed(np.random.default_rng(seed), decay).drift(GAMMA, 0.95) for seed in range(10)]
    assert all(drift is not None and (drift.low > 0 if decay > 0 else drift.high < 0) for drift in found)
    assert all(drift.low < drift.value < drift.high for drift in found)


def test_another_mix_of_domains_is_no_decay() -> None:
    """Long texts are harder, and no text gets harder as it grows: in at most 5 % of all samples a decay is seen."""
    found = [mixed(np.random.default_rng(seed), 0.0).drift(GAMMA, 0.95) for seed in range(200)]
    decays = np.mean([drift is not None and drift.low > 0 for drift in found])
    grows = np.mean([drift is not None and drift.high < 0 for drift in found])
    assert decays <= 0.05  # 2.5 % are expected
    assert grows <= 0.07


@pytest.mark.parametrize(
    ("sizes", "chance"), [([16] * 30, 0.5), ([16] * 30 + [200], 0.5), ([200] * 30, 1.0), ([200] * 30, 0.0)]
)
def test_nothing_is_said_of_texts_that_are_too_short_or_all_alike(sizes: list[int], chance: float) -> None:
    """With 16 tokens one is far enough from both ends; one long text says nothing of others; and what never varies may
    decay by no more than rounding does.
    """
    tokens = tokens_of([np.full(size, chance) for size in sizes], [8] * len(sizes), np.random.default_rng(0))
    assert tokens.drift(GAMMA, 0.95) is None


def test_ranges_begin_at_powers_of_two_and_hold_enough_documents() -> None:
    unit = np.repeat(np.arange(30), 4)
    context = np.tile([70, 130, 300, 600], 30)
    context[4 * 25 :: 4] = 5  # the first context of five documents
    assert edges_of(context, unit) == [0, 128, 256, 512]
    assert edges_of(np.full(120, 100), unit) == [0]


LONG = Domain(documents=40, alpha=0.85, spread=0.02, shortest=200, longest=260)


def decaying(frame: pd.DataFrame) -> None:
    """Drafts that are right in the first half of a text alone."""
    late = (frame["position"] > 100) & (np.arange(len(frame)) % 3 > 0)
    frame.loc[late, "draft_top"] = (frame.loc[late, "token"] + 1) % 1000


def test_a_report_says_that_acceptance_decays_and_where_it_stops_to_pay(tmp_path: Path) -> None:
    recipe = Recipe(domains={"code": LONG}, gammas=(1, 4), draft_ms=6.0, timing_error=0.001)
    plain = write_run(tmp_path / "plain", recipe)
    report = build_report(rewritten(write_run(tmp_path / "run", recipe), "small", decaying))
    (axis,) = report.section("context")
    assert axis.decays
    assert axis.pays_below is not None
    assert 64 <= axis.pays_below.low <= axis.pays_below.value <= axis.pays_below.high
    assert [item.low for item in axis.ranges] == sorted(item.low for item in axis.ranges)
    speeds = [item.speedup.value for item in axis.ranges if item.speedup is not None]
    assert speeds[0] > 1 > speeds[-1]
    assert axis.ranges[-1].best[0].gamma == 0
    assert "acceptance decays" in as_terminal(report, 100, "context")
    totals = stored_totals(plain, "small")
    other = build_report(plain)
    (same,) = other.section("context")
    assert not same.decays
    assert "acceptance decays" not in as_terminal(other, 100, "context")
    assert sum(item.tokens for item in same.ranges) == totals["tokens"].sum()
