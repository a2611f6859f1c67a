"""Replay: rounds worked out by hand, against a token-by-token simulation, and against Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaprof.analysis.replay import Trace, replay, run_lengths, walk

UNLIMITED = 10_000


def trace(
    agrees: list[int], proposed: list[int] | None = None, limit: int = UNLIMITED, ends: list[int] | None = None
) -> Trace:
    """One document."""
    size = len(agrees)
    return Trace(
        agrees=np.array(agrees),
        proposed=np.array(proposed if proposed is not None else [256] * size),
        start=np.array([0]),
        stop=np.array([size]),
        limit=np.array([limit]),
        draft_ends=np.array(ends if ends is not None else [0] * size, dtype=bool),
    )


def rounds(one: Trace, gamma: int, flavour: Any = "engine") -> list[tuple[int, int]]:
    """The rounds of one document as (drafted, accepted)."""
    return [(int(step.drafted[0]), int(step.accepted[0])) for step in walk(one, gamma, flavour)]


def simulate(agrees: list[int], proposed: list[int], gamma: int) -> list[tuple[int, int, int, int]]:
    """Engine rounds as (drafted, accepted, emitted, tested), token by token: the plain loop that an engine runs."""
    found = []
    place = 1
    while place < len(agrees):
        drafted = min(gamma, proposed[place])
        accepted = emitted = tested = 0
        while place < len(agrees):
            good = accepted < drafted and agrees[place]
            tested += accepted < drafted
            place += 1
            emitted += 1
            accepted += good
            if not good:
                break
        found.append((drafted, accepted, emitted, tested))
    return found


documents = st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=30), min_size=1, max_size=6)


def test_run_lengths_by_hand() -> None:
    runs = run_lengths(np.array([1, 1, 0, 1, 1, 0, 1]), np.array([0, 4]), np.array([4, 7]))
    assert runs.tolist() == [2, 1, 0, 1, 1, 0, 1]


def test_engine_rounds_by_hand() -> None:
    # Prefill emits token 0; 1 1 0 are two accepted drafts and a correction; 1 1 1 | 1: three drafts and a bonus.
    one = trace([0, 1, 1, 0, 1, 1, 1, 1, 0])
    assert rounds(one, 3) == [(3, 2), (3, 3), (3, 0)]
    counted = replay(one, 3)
    assert counted.rounds.tolist() == [3]
    assert counted.tokens.tolist() == [8]
    assert counted.drafted.tolist() == [[3, 3, 3]]
    assert counted.tested.tolist() == [[3, 2, 2]]
    assert counted.accepted.tolist() == [[2, 2, 1]]


def test_hf_rounds_by_hand() -> None:
    # Six tokens allowed: the first round starts at the first token, and the last ones draft at most what is left minus one.
    assert rounds(trace([1, 1, 1, 0, 1, 1], limit=6), 2, "hf") == [(2, 2), (2, 0), (1, 1)]
    assert rounds(trace([0, 0, 0], limit=3), 4, "hf") == [(2, 0), (1, 0), (0, 0)]


def test_hf_stops_the_draft_after_its_own_eos_and_counts_a_matched_eos_as_the_targets() -> None:
    matched = trace([1, 1, 1], limit=20, ends=[0, 0, 1])
    assert rounds(matched, 5, "hf") == [(3, 2)]
    wrong = trace([1, 0, 1, 1], limit=20, ends=[0, 1, 0, 0])
    assert rounds(wrong, 5, "hf") == [(2, 1), (5, 1)]
    off_path = trace([0, 1, 1, 0], limit=20, ends=[0, 0, 1, 0])  # after its first wrong token the draft is elsewhere
    assert rounds(off_path, 4, "hf")[0] == (4, 0)


@given(documents, st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_documents_side_by_side_equal_the_plain_loop(given_documents: list[list[tuple[bool, int]]], gamma: int) -> None:
    lengths = np.array([len(document) for document in given_documents])
    flat = [pair for document in given_documents for pair in document]
    stop = np.cumsum(lengths)
    many = Trace(
        np.array([agrees for agrees, _ in flat]),
        np.array([proposed for _, proposed in flat]),
        stop - lengths,
        stop,
        np.full(len(lengths), UNLIMITED),
        np.zeros(len(flat), dtype=bool),
    )
    counted = replay(many, gamma)
    for index, document in enumerate(given_documents):
        expected = simulate([agrees for agrees, _ in document], [proposed for _, proposed in document], gamma)
        assert counted.rounds[index] == len(expected)
        assert counted.tokens[index] == sum(emitted for _, _, emitted, _ in expected) == len(document) - 1
        for depth in range(1, gamma + 1):
            assert counted.drafted[index, depth - 1] == sum(drafted >= depth for drafted, _, _, _ in expected)
            assert counted.accepted[index, depth - 1] == sum(accepted >= depth for _, accepted, _, _ in expected)
            assert counted.tested[index, depth - 1] == sum(tested >= depth for _, _, _, tested in expected)


@given(st.lists(st.booleans(), min_size=2, max_size=60))
@settings(max_examples=200, deadline=None)
def test_more_drafts_never_need_more_rounds(agrees: list[bool]) -> None:
    one = trace([int(item) for item in agrees])
    counts = [float(replay(one, gamma).rounds[0]) for gamma in range(1, 9)]
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_rounds_between_two_misses_are_the_ceiling_of_their_length(agrees: list[bool], gamma: int) -> None:
    # A run of ones closed by a miss, n tokens in all, takes ceil(n / (gamma + 1)) rounds: a bonus token may be the miss.
    segments, length = [], 0
    for agreed in agrees[1:]:
        length += 1
        if not agreed:
            segments.append(length)
            length = 0
    segments += [length] if length else []
    expected = sum(-(-segment // (gamma + 1)) for segment in segments)
    assert replay(trace([int(item) for item in agrees]), gamma).rounds[0] == expected


def test_always_agreeing_gives_gamma_plus_one_tokens_a_round_and_never_agreeing_one() -> None:
    full, none = replay(trace([1] * 41), 4), replay(trace([0] * 41), 4)
    assert (full.tokens / full.rounds).tolist() == [5.0]
    assert (none.tokens / none.rounds).tolist() == [1.0]


@pytest.mark.parametrize("flavour", ["engine", "hf"])
def test_a_document_of_one_token(flavour: Any) -> None:
    counted = replay(trace([1], limit=1), 3, flavour)
    assert counted.rounds.tolist() == ([0] if flavour == "engine" else [1])
    assert counted.drafted.sum() == 0


def test_markov_agreement_matches_the_closed_form() -> None:
    # theory: tokens/round = 1 + a/(1-a) * (1-r^k)/(1-rho r^k), r = a + rho (1-a), for a two-state chain of agreements.
    mean, rho, gamma, size = 0.8, 0.6, 4, 400_000
    generator = np.random.default_rng(5)
    stay, enter = mean + rho * (1 - mean), mean * (1 - rho)
    uniform = generator.random(size)
    state, chain = True, np.empty(size, dtype=bool)
    for index in range(size):
        state = uniform[index] < (stay if state else enter)
        chain[index] = state
    counted = replay(trace(chain.astype(int).tolist()), gamma)
    expected = 1 + mean / (1 - mean) * (1 - stay**gamma) / (1 - rho * stay**gamma)
    assert float((counted.tokens / counted.rounds)[0]) == pytest.approx(expected, rel=0.01)
    independent = sum(mean**depth for depth in range(gamma + 1))
    assert float((counted.tokens / counted.rounds)[0]) < independent  # burstiness: the textbook formula overestimates
