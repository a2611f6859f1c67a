"""Replay: rounds worked out by hand, against plain loops, and against every way that speculative sampling can go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.totals import count, replay_loops
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.replay import (
    Rounds,
    Trace,
    listed_rounds,
    replay,
    replays,
    run_lengths,
)
from tests.generators import before_eos, by_llama_cpp
from tests.loops import each

Array = np.ndarray[Any, Any]
READY = 256  # `proposed` of a draft that is always ready


def trace(agrees: list[int], proposed: list[int] | None = None) -> Trace:
    """One document."""
    size = len(agrees)
    start, stop = np.array([0]), np.array([size])
    ready = np.array(proposed if proposed is not None else [READY] * size)
    return Trace(run_lengths(np.array(agrees), start, stop), ready, start, stop)


def corpus(agrees: Array, proposed: Array, lengths: list[int]) -> Trace:
    """Several documents, one after the other."""
    stop = np.cumsum(lengths)
    start = stop - np.array(lengths)
    return Trace(run_lengths(agrees, start, stop), proposed, start, stop)


def rounds(one: Trace, gamma: int) -> list[tuple[int, int]]:
    """The rounds of one document as (drafted, accepted)."""
    found = listed_rounds(one, gamma)
    return list(zip(found.drafted.tolist(), found.accepted.tolist(), strict=True))


def simulate(agrees: list[int], proposed: list[int], gamma: int) -> list[tuple[int, int, int, int]]:
    """Rounds as (drafted, accepted, emitted, tested), token by token: the plain loop that an engine runs."""
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


def test_rounds_by_hand() -> None:
    # Prefill emits token 0; 1 1 0 are two accepted drafts and a correction; 1 1 1 | 1: three drafts and a bonus.
    one = trace([0, 1, 1, 0, 1, 1, 1, 1, 0])
    assert rounds(one, 3) == [(3, 2), (3, 3), (3, 0)]
    counted = replay(one, 3)
    assert counted.rounds.tolist() == [3]
    assert counted.tokens.tolist() == [8]
    assert counted.drafted.tolist() == [[3, 3, 3]]
    assert counted.tested.tolist() == [[3, 2, 2]]
    assert counted.accepted.tolist() == [[2, 2, 1]]


@given(documents, st.integers(1, 6))
def test_documents_side_by_side_equal_the_plain_loop(given_documents: list[list[tuple[bool, int]]], gamma: int) -> None:
    agrees, proposed = (np.array(column) for column in zip(*itertools.chain(*given_documents), strict=True))
    counted = replay(corpus(agrees, proposed, [len(document) for document in given_documents]), gamma)
    for index, document in enumerate(given_documents):
        expected = simulate([agrees for agrees, _ in document], [proposed for _, proposed in document], gamma)
        assert counted.rounds[index] == len(expected)
        assert counted.tokens[index] == sum(emitted for _, _, emitted, _ in expected) == len(document) - 1
        for depth in range(1, gamma + 1):
            assert counted.drafted[index, depth - 1] == sum(drafted >= depth for drafted, _, _, _ in expected)
            assert counted.accepted[index, depth - 1] == sum(accepted >= depth for _, accepted, _, _ in expected)
            assert counted.tested[index, depth - 1] == sum(tested >= depth for _, _, _, tested in expected)


def test_parts_by_hand() -> None:
    """Twelve tokens: the prefill's, then rounds of 3, 1, 4 and 3 tokens; "a" ends within the first, "b" within the third."""
    one = trace([0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    assert rounds(one, 3) == [(3, 2), (3, 0), (3, 3), (3, 3)]
    row = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    found = listed_rounds(one, 3).parts(row, 3, 3)
    assert found.tokens.tolist() == [1, 4, 6]
    assert found.rounds == pytest.approx([1 / 3, 2 / 3 + 1 + 1 / 4, 3 / 4 + 1], abs=1e-15)
    assert found.drafted == pytest.approx(np.repeat(found.rounds, 3).reshape(3, 3), abs=1e-15)
    assert found.accepted[:, 0] == pytest.approx([1 / 3, 2 / 3 + 1 / 4, 3 / 4 + 1], abs=1e-15)
    assert found.accepted[:, 2] == pytest.approx([0, 1 / 4, 3 / 4 + 1], abs=1e-15)
    assert found.tested[:, 1] == pytest.approx([1 / 3, 2 / 3 + 1 / 4, 3 / 4 + 1], abs=1e-15)


@st.composite
def chances_of_texts(draw: st.DrawFn) -> tuple[Trace, tuple[Array, Array], int, bool]:
    """Several texts with what a_t or ratios are, at every depth or by depth, and where a draft is unsure; gamma, blocks."""
    lengths, gamma = draw(st.lists(st.integers(1, 25), min_size=1, max_size=4)), draw(st.integers(1, 6))
    size, blocks = sum(lengths), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept = rng.random((size, gamma) if draw(st.booleans()) else size) * (3 if blocks else 1)
    kept = np.where(rng.random(kept.shape) < 0.2, 0.0, kept)
    many = corpus(np.zeros(size), rng.integers(0, gamma + 2, size), lengths)
    many = dataclasses.replace(many, unsure=rng.random(size) < 0.2 if draw(st.booleans()) else None)
    return many, (kept, np.zeros_like(kept)), gamma, blocks


@given(chances_of_texts(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_parts_of_texts_add_up_to_them(case: tuple[Trace, tuple[Array, Array], int, bool], parts: int, chooses: Any) -> None:
    """Whatever the texts and their borders: to what the program over states expects, or to the facts of the replay."""
    many, chances, gamma, blocks = case
    row = np.repeat(np.arange(len(many.start)), many.stop - many.start) * parts
    row += np.array([chooses.randrange(parts) for _ in row])
    facts = dataclasses.replace(many, run=run_lengths(row % 2 == 0, many.start, many.stop))
    for found, whole in (
        (listed_rounds(many, gamma, chances, blocks), replays(many, [gamma], chances, blocks)[gamma]),
        (listed_rounds(facts, gamma), replay(facts, gamma)),
    ):
        counted = found.parts(row, parts * len(many.start), gamma)
        for name in ("rounds", "tokens", "drafted", "tested", "accepted"):
            sums = np.add.reduceat(getattr(counted, name), np.arange(0, parts * len(many.start), parts))
            np.testing.assert_allclose(sums, getattr(whole, name), rtol=0, atol=1e-12, err_msg=name)


def test_a_document_of_one_token() -> None:
    counted = replay(trace([1]), 3)
    assert counted.rounds.tolist() == [0]
    assert counted.drafted.sum() == 0


@dataclass(frozen=True)
class Models:
    """A target and a draft: next-token distributions [vocabulary] by history, which may be anything.

    `eos` ends a text; no text is longer than `limit`. `context`: tokens after which the draft has nothing to propose.
    `deeper`: what the draft says at depths 2, 3 and so on of a round, where that is not `q`. `p_min`: the top probability
    below which a round's draft ends before that token.
    """

    p: dict[tuple[int, ...], Array]
    q: dict[tuple[int, ...], Array]
    limit: int
    eos: int | None
    context: int
    deeper: tuple[dict[tuple[int, ...], Array], ...] = ()
    p_min: float = 0.0

    def drafts(self, history: tuple[int, ...], most: int, drafted: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Every draft of a round."""
        unsure = len(drafted) < most and self.draft(history + drafted, len(drafted) + 1).max() < self.p_min
        if len(drafted) == most or unsure:
            yield drafted
            return
        for token in range(len(self.p[history])):
            yield from self.drafts(history, most, (*drafted, token))

    def draft(self, history: tuple[int, ...], depth: int) -> Array:
        """The draft's distribution of the draft `depth`, from 1, of a round."""
        return (self.q, *self.deeper)[depth - 1 if self.deeper else 0][history]

    def proposed(self, place: int) -> int:
        """Tokens that a round starting there would propose at most."""
        return max(0, min(READY, self.context - place))

    def ended(self, text: tuple[int, ...]) -> bool:
        return len(text) == self.limit or (self.eos is not None and self.eos in text)


def random_models(
    seed: int, vocabulary: int, limit: int, gamma: int, eos: int | None = None, context: int = READY
) -> Models:
    """Tables for every history that a round can draft in, also beyond the end of the text; zeros here and there."""
    rng = np.random.default_rng(seed)
    tables: tuple[dict[tuple[int, ...], Array], ...] = ({}, {})
    for size in range(limit + gamma + 1):
        for history in itertools.product(range(vocabulary), repeat=size):
            for table in tables:
                weights = rng.dirichlet(np.full(vocabulary, 0.7)) * (rng.random(vocabulary) < 0.9)
                weights = weights if weights.sum() > 0 else np.ones(vocabulary)
                table[history] = weights / weights.sum()
    return Models(*tables, limit, eos, context)


Way = tuple[float, tuple[int, ...], int, int]


def one_round(models: Models, history: tuple[int, ...], most: int) -> Iterator[Way]:
    """Every way that a round can go, as (probability, emitted tokens, accepted drafts, drafts): every tuple of drafts, every
    place of the first rejection, every token drawn from the residual distribution or as a bonus.
    """
    for tokens in models.drafts(history, most):
        chance = math.prod(float(models.draft(history + tokens[:i], i + 1)[token]) for i, token in enumerate(tokens))
        for accepted, token in enumerate(tokens):
            p, q = models.p[history + tokens[:accepted]], models.draft(history + tokens[:accepted], accepted + 1)
            keep = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
            residual = np.maximum(p - q, 0.0)
            for other in np.flatnonzero(residual) if keep < 1 else ():
                own = chance * (1 - keep) * residual[other] / residual.sum()
                yield float(own), (*tokens[:accepted], int(other)), accepted, len(tokens)
            chance *= keep
        for bonus, share in enumerate(models.p[history + tokens]):
            yield chance * float(share), (*tokens, bonus), len(tokens), len(tokens)


def one_block(models: Models, history: tuple[int, ...], most: int) -> Iterator[Way]:
    """Every way that a round can go whose drafts are verified together (Sun et al. 2024, algorithm 2)."""
    for tokens in models.drafts(history, most):
        drafts = len(tokens)
        laws = [(models.p[history + tokens[:i]], models.draft(history + tokens[:i], i + 1)) for i in range(drafts)]
        drawn = math.prod(float(q[token]) for (_, q), token in zip(laws, tokens, strict=True))
        if drawn == 0:
            continue
        weights = [1.0]
        for (p, q), token in zip(laws, tokens, strict=True):
            weights.append(min(1.0, weights[-1] * float(p[token] / q[token])))
        left = [np.maximum(weight * p - q, 0.0) for weight, (p, q) in zip(weights, laws, strict=False)]
        # The chance to stop at i, unless a longer beginning is kept: that of the whole block is its weight.
        chances = [1.0]
        for i in range(1, drafts):
            mass = left[i].sum() + 1 - weights[i]
            chances.append(float(left[i].sum() / mass) if mass > 0 else 1.0)
        chances.append(weights[-1] if drafts else 1.0)
        longer = 1.0
        for accepted in range(drafts, -1, -1):
            share = drawn * longer * (chances[accepted] if accepted else 1.0)
            longer *= 1 - chances[accepted]
            law = models.p[history + tokens] if accepted == drafts else left[accepted] / max(left[accepted].sum(), 1e-300)
            for other in np.flatnonzero(law) if share > 0 else ():
                yield share * float(law[other]), (*tokens[:accepted], int(other)), accepted, drafts


Outcome = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]  # a text, and (drafted, tested, accepted) of its rounds


def process(models: Models, gamma: int, blocks: bool = False) -> dict[Outcome, float]:
    """The joint law of text and rounds under speculative sampling, by enumeration of every way that it can go."""

    @functools.cache
    def after(history: tuple[int, ...]) -> dict[Outcome, float]:
        if models.ended(history):
            return {(history, ()): 1.0}
        most = min(gamma, models.proposed(len(history)))
        law: Counter[Outcome] = Counter()
        for chance, emitted, accepted, drafts in (one_block if blocks else one_round)(models, history, most):
            text = cut(models, history + emitted)
            inside = len(text) - len(history)
            tested = min(drafts, accepted + 1, inside)
            counted = min(accepted, inside)
            for (whole, rounds), share in after(text).items() if chance > 0 else ():
                law[whole, ((drafts, tested, counted), *rounds)] += chance * share
        return law

    law: Counter[Outcome] = Counter()
    for first, share in enumerate(models.p[()]):  # the prefill emits the first token
        for outcome, chance in after((first,)).items() if share > 0 else ():
            law[outcome] += float(share) * chance
    return law


def cut(models: Models, text: tuple[int, ...]) -> tuple[int, ...]:
    """A text up to its end."""
    return next((text[:size] for size in range(len(text) + 1) if models.ended(text[:size])), text)


def texts(models: Models) -> dict[tuple[int, ...], float]:
    """Every text that the target can write by itself, and how probable it is."""
    found, unfinished = {}, {(): 1.0}
    while unfinished:
        grown = {
            (*text, token): chance * float(share)
            for text, chance in unfinished.items()
            for token, share in enumerate(models.p[text])
            if share > 0
        }
        found |= {text: chance for text, chance in grown.items() if models.ended(text)}
        unfinished = {text: chance for text, chance in grown.items() if not models.ended(text)}
    return found


def logged(models: Models, written: list[tuple[int, ...]], blocks: bool = False) -> tuple[Trace, Array, Array]:
    """What profiling would log of some texts: a trace, a_t (of blocks the ratio) and beta_t."""
    places = [(text, place) for text in written for place in range(len(text))]
    proposed = np.array([models.proposed(place) for _, place in places])
    kept, accept = np.zeros(len(places)), np.zeros(len(places))
    for index, (text, place) in enumerate(places):
        p, q = models.p[text[:place]], models.q[text[:place]]
        kept[index] = min(math.inf if blocks else 1.0, q[text[place]] / p[text[place]])
        accept[index] = np.minimum(p, q).sum()
    lengths = [len(text) for text in written]
    many = corpus(np.zeros(len(places)), proposed, lengths)
    if models.p_min:
        many = dataclasses.replace(many, unsure=np.array([models.q[text[:at]].max() < models.p_min for text, at in places]))
    return many, np.where(proposed > 0, kept, 0.0), np.where(proposed > 0, accept, 0.0)


def conditional_counts(law: dict[Outcome, float], written: list[tuple[int, ...]], gamma: int) -> Rounds:
    """Expected counts given each text, from the joint law."""
    found, chance, index = Rounds.none(len(written), gamma), Counter[tuple[int, ...]](), {}
    for (text, _), share in law.items():
        chance[text] += share
    index = {text: row for row, text in enumerate(written)}
    depth = np.arange(1, gamma + 1)
    for (text, rounds), share in law.items():
        row, weight = index[text], share / chance[text]
        found.rounds[row] += weight * len(rounds)
        for name, column in (("drafted", 0), ("tested", 1), ("accepted", 2)):
            getattr(found, name)[row] += weight * sum(depth <= one[column] for one in rounds)
    return found


SETTINGS = [  # vocabulary, limit, gamma, eos, context
    *((vocabulary, limit, gamma, None, READY) for vocabulary, limit in ((2, 6), (3, 5)) for gamma in (1, 2, 3)),
    *((2, 6, gamma, None, context) for gamma in (2, 3) for context in (0, 2, 4)),
    *((3, 4, gamma, 0, READY) for gamma in (1, 2, 3)),
    (2, 6, 3, 1, 4),
]


@pytest.fixture(scope="module", params=range(len(SETTINGS)), ids=lambda index: str(SETTINGS[index]))
def tiny_models(request: pytest.FixtureRequest) -> tuple[Models, int]:
    """Random language models, and gamma."""
    vocabulary, limit, gamma, eos, context = SETTINGS[request.param]
    return random_models(request.param, vocabulary, limit, gamma, eos, context), gamma


in_blocks = each("blocks", [False, True])


@in_blocks
def test_speculative_sampling_writes_the_targets_texts(blocks: bool, tiny_models: tuple[Models, int]) -> None:
    """The law of the text is the target's own: the enumeration is of the right process."""
    models, gamma = tiny_models
    law: Counter[tuple[int, ...]] = Counter()
    for (text, _), chance in process(models, gamma, blocks).items():
        law[text] += chance
    assert law == pytest.approx(texts(models), abs=1e-12)


@in_blocks
def test_expected_counts_are_those_of_every_way_it_can_go(blocks: bool, tiny_models: tuple[Models, int]) -> None:
    """Given each text: rounds, and drafted, tested and accepted tokens by depth."""
    models, gamma = tiny_models
    written = list(texts(models))
    one, *chances = logged(models, written, blocks)
    found = replays(one, [gamma], tuple(chances), blocks)[gamma]
    enumerated = conditional_counts(process(models, gamma, blocks), written, gamma)
    for name in ("rounds", "drafted", "tested", "accepted"):
        assert getattr(found, name) == pytest.approx(getattr(enumerated, name), abs=1e-12), name
    assert found.tokens.tolist() == [len(text) - 1 for text in written]


@each("before", [-1e300, 1e300, math.nan])
@in_blocks
def test_what_memory_held_before_changes_no_count(blocks: bool, before: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_loops, "np", SimpleNamespace(empty=lambda size: np.full(size, before), zeros=np.zeros))
    monkeypatch.setattr(replay_loops, "count_rounds", replay_loops.count_rounds.py_func)  # type: ignore[attr-defined]
    kept = np.array([0.5, 1.5, 0.25, 0.75, 2.0]) if blocks else np.array([0.5, 0.9, 0.25, 0.75, 0.1])
    text = trace([0] * 5)
    found = replays(text, [3], (kept, kept), blocks)[3]
    monkeypatch.undo()
    usual = replays(text, [3], (kept, kept), blocks)[3]
    for name in ("rounds", "drafted", "tested", "accepted"):
        np.testing.assert_array_equal(getattr(found, name), getattr(usual, name))
    assert 1 <= found.rounds[0] <= 4


@in_blocks
@pytest.mark.parametrize("p_min", [0.55, 0.75])
def test_a_draft_that_stops_when_unsure_is_known_but_for_what_it_drafts_after_a_wrong_one(
    p_min: float, blocks: bool, tiny_models: tuple[Models, int]
) -> None:
    """Given each text: rounds, tested and accepted tokens; drafted ones lie between the tested ones and the logged ones."""
    models, gamma = tiny_models
    models = dataclasses.replace(models, p_min=p_min)
    written = list(texts(models))
    one, *chances = logged(models, written, blocks)
    found = replays(one, [gamma], tuple(chances), blocks)[gamma]
    law = process(models, gamma, blocks)
    enumerated = conditional_counts(law, written, gamma)
    for name in ("rounds", "tested", "accepted"):
        assert getattr(found, name) == pytest.approx(getattr(enumerated, name), abs=1e-12), name
    assert (found.tested - 1e-12 <= enumerated.drafted).all()
    assert (enumerated.drafted <= found.drafted + 1e-12).all()
    assert replay(dataclasses.replace(one, unsure=np.ones(len(one.run), dtype=bool)), gamma).drafted.sum() == 0


@in_blocks
def test_control_is_zero_on_average_over_texts(blocks: bool, tiny_models: tuple[Models, int]) -> None:
    """But not on each of them; given a text it is the tested positions' a_t less beta_t."""
    models, gamma = tiny_models
    chances = texts(models)
    one, *probabilities = logged(models, list(chances), blocks)
    control = replays(one, [gamma], tuple(probabilities), blocks)[gamma].control
    assert float(np.array(list(chances.values())) @ control) == pytest.approx(0, abs=1e-12)
    if models.context > 1:
        assert np.abs(control).max() > 0.1


def test_blocks_by_hand() -> None:
    """gamma 2, ratios 2 and 1/4: the first draft is kept, the second with min(1, 2, 2/4), where it is 1/4 by itself."""
    one, chances = trace([0, 0, 0, 0]), (np.array([0.0, 2.0, 0.25, 1.0]), np.zeros(4))
    assert replays(one, [2], chances, blocks=True)[2].accepted[0].tolist() == [1.5, 0.5]
    assert replays(one, [2], (np.minimum(chances[0], 1), chances[1]))[2].accepted[0].tolist() == [1.75, 0.25]


def test_control_by_hand() -> None:
    """gamma 1, four tokens: the second is tested, the third where the second was rejected, the fourth where the third was
    accepted or not tested... : P(tested) = 1, 1 - a_1, 1 - (1 - a_1) a_2.
    """
    kept, accept = np.array([0.3, 0.5, 0.25, 1.0]), np.array([0.9, 0.6, 0.5, 0.25])
    found = replays(trace([0, 0, 0, 0]), [1], (kept, accept))[1]
    assert found.tested.tolist() == [[1 + 0.5 + (1 - 0.5 * 0.25)]]
    assert found.control == pytest.approx([1 * -0.1 + 0.5 * -0.25 + 0.875 * 0.75])
    assert found.accepted == pytest.approx(np.array([[0.5 + 0.5 * 0.25 + 0.875]]))
    assert found.rounds == pytest.approx([1 + 0.5 + 0.875])


def test_rounds_of_prompt_lookup_by_hand() -> None:
    offered = trace([0] * 6, proposed=[0, 5, 4, 3, 3, 3])
    assert rounds(dataclasses.replace(offered, run=np.array([0, 2, 1, 0, 2, 0])), 3) == [(3, 2), (3, 2)]


# Rounds that a real vLLM ran; golden/vllm/README.md says how they were recorded.
def recorded(name: str, way: str) -> Iterator[tuple[dict[str, Any], dict[str, list[int]], list[int], PromptLookup]]:
    """Requests of a file, each with what vLLM counted when it decoded them in a way, the text, and prompt lookup for it."""
    content = json.loads((Path(__file__).parents[1] / "golden" / "vllm" / name).read_text())
    low, high = map(int, lengths.groups()) if (lengths := re.search(r"(\d)-(\d)", way)) else (1, 3)
    lookup = PromptLookup("ngram", high, tuple(content["eos"]), 50_000, "float32", low)
    for request in content["requests"]:
        if counted := request["vllm"].get(way):
            yield request, counted, request["continuation_ids"][: counted["tokens"]], lookup


def looked_up(prompt: list[int], text: list[int], lookup: PromptLookup) -> Trace:
    """One document of prompt lookup."""
    found = lookup.columns(np.array(prompt + text), len(prompt))
    return dataclasses.replace(trace([0] * len(text), found["proposed"].tolist()), run=found["accepted_run"])


def with_a_proposal(one: Trace, gamma: int) -> tuple[list[int], list[int], list[int]]:
    """Of one document's rounds that drafted something, as vLLM lists them: drafted, accepted, and the tokens left."""
    found = listed_rounds(one, gamma)
    chosen = found.drafted > 0
    return found.drafted[chosen].tolist(), found.accepted[chosen].tolist(), (one.stop[0] - found.at[chosen]).tolist()


@pytest.mark.parametrize(
    ("way", "requests", "rounds", "accepted"),
    [
        ("draft_model 1", 8, 402, 233),
        ("draft_model 3", 30, 2187, 2351),
        ("draft_model 5", 8, 276, 361),
        ("ngram 3", 30, 1874, 853),
        ("ngram 5", 8, 248, 67),
        ("ngram 2-4, 3", 12, 255, 188),
        ("ngram 3-3, 5", 12, 110, 114),
    ],
)
def test_rounds_that_vllm_ran_are_replayed_one_by_one(way: str, requests: int, rounds: int, accepted: int) -> None:
    """All 108 pairs of a request and a way to decode it. vLLM counts drafts that it accepted after the end as well."""
    totals = np.zeros(3, dtype=int)
    for request, counted, text, lookup in recorded("rounds-stories15m.json", way):
        by_model = trace([int(top == token) for top, token in zip(request["draft_top"], text, strict=False)])
        one = looked_up(request["prompt_ids"], text, lookup) if way.startswith("ngram") else by_model
        drafted, kept, left = with_a_proposal(one, int(way[-1]))
        assert drafted == counted["drafted"]
        assert kept == np.minimum(counted["accepted"], left).tolist()
        totals += 1, len(kept), sum(kept)
    assert totals.tolist() == [requests, rounds, accepted]


def test_prompt_lookup_in_chats_drafts_what_vllm_did_and_less_before_an_eos() -> None:
    """Each prompt has ends of turns, which are EOS ids: three of ten chats come out otherwise where proposals end there."""
    otherwise = 0
    for request, counted, text, lookup in recorded("rounds-smollm2-chat.json", "ngram 3"):
        one, ends = looked_up(request["prompt_ids"], text, lookup), before_eos(request["prompt_ids"], text, 3, lookup.eos)
        drafted, kept, left = with_a_proposal(one, 3)
        assert drafted == counted["drafted"]
        assert kept == np.minimum(counted["accepted"], left).tolist()
        shorter = dataclasses.replace(one, proposed=np.minimum(one.proposed, ends))
        otherwise += with_a_proposal(shorter, 3)[0] != counted["drafted"]
    assert otherwise == 3


def test_drafts_that_llamacpp_stopped_are_those_of_the_log_and_of_its_room() -> None:
    """Its server at six pairs of n_max and p_min. Five requests part at a near-tie, by at most two tokens. A replay accepts
    as many tokens, and drafts more near the end of a text alone.
    """
    golden = json.loads((Path(__file__).parents[1] / "golden" / "llamacpp" / "p_min.json").read_text())
    apart = []
    for number, gamma, p_min, drafted, accepted in golden["runs"]:
        text = golden["texts"][number]
        agrees, unsure = [int(sign) for sign in text["agrees"]], np.array(text["top"]) < p_min
        least, most, kept = by_llama_cpp(agrees, unsure.tolist(), gamma, len(agrees))
        apart += [abs(kept - accepted)] if kept != accepted else []
        assert least <= drafted <= most
        found = replay(dataclasses.replace(trace(agrees), unsure=unsure), gamma)
        assert 0 <= found.accepted.sum() - kept <= 1
        assert 0 <= found.drafted.sum() - most <= gamma * (gamma + 1) / 2
    assert len(golden["runs"]) == 120
    assert len(apart) <= 5
    assert max(apart) <= 2


def steps_of_a_hybrid(trace: Trace, stepped: Array, gamma: int) -> list[int]:
    """Draft steps of one document, rounds with any, and what their first steps read beyond one token, by head and model."""
    found = count._step_columns(trace, stepped, TotalsRequest(["strict"], [gamma]), np.array([True]))
    return [int(found[f"{name}_{gamma}"][0]) for name in ("steps", "started", "read_by_head", "read_by_model")]


def test_what_the_first_steps_of_a_hybrid_read_by_hand() -> None:
    """Six rounds: lookup emits 3; the draft 2, one of them drafted; the draft 3, all drafts accepted; lookup 1; the draft 3,
    all accepted; lookup 1. Its first steps read 1 + 3 tokens; 1 (a head: 2); 2 + 1 (a head: 3 + 1).
    """
    one = trace([0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0])
    assert rounds(one, 2) == [(2, 2), (2, 1), (2, 2), (2, 0), (2, 2), (2, 0)]
    stepped = np.zeros(14, dtype=bool)
    stepped[[4, 6, 10]] = True
    assert steps_of_a_hybrid(one, stepped, 2) == [6, 3, 3 + 1 + 3, 3 + 0 + 2]
    assert steps_of_a_hybrid(one, np.zeros(14, dtype=bool), 2) == [0, 0, 0, 0]
