"""Prompt lookup: the proposals of transformers at every position of a text, and those of both of vLLM's runners."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from alphaprof.config.load import validate
from alphaprof.costs.rounds import NOTHING, StepTime, StepTimes, time_spent
from alphaprof.profiling.decoding.drafters import LookupDrafter
from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.kinds import PromptLookup, load_draft
from alphaprof.run.schema import PROPOSED_LIMIT
from alphaprof.totals.lookup import matches
from alphaprof.totals.replay import RoundCounts, Trace, listed_rounds, replay
from tests.generators import proposal, until_eos
from tests.loops import each

FAR = 10_000  # a max_length that no text reaches


def draft(max_ngram: int, eos: tuple[int, ...] = ()) -> PromptLookup:
    return PromptLookup("ngram", max_ngram, eos, 260, "float32")


def candidates(text: list[int], end: int, max_ngram: int, eos: tuple[int, ...], count: int) -> list[int]:
    """What transformers proposes behind the first `end` tokens."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(eos) if eos else None,
        num_output_tokens=count,
        max_matching_ngram_size=max_ngram,
        max_length=FAR,
    )
    found, logits = generator.get_candidates(torch.tensor([text[:end]]))
    assert logits is None
    return found[0, end:].tolist()


def matched(proposal: list[int], text: list[int]) -> int:
    """Tokens of a proposal that a text begins with."""
    agreeing = [ours == theirs for ours, theirs in zip(proposal, text, strict=False)]
    return agreeing.index(False) if False in agreeing else len(agreeing)


def assert_proposes(text: list[int], place: int, end: int, found: Arrays, expected: list[int]) -> None:
    """One position against the whole proposal that is expected there."""
    assert (int(found["draft_top"][place]), int(found["proposed"][place]), int(found["accepted_run"][place])) == (
        expected[0] if expected else -1,
        len(expected),
        matched(expected, text[end:]),
    )


@st.composite
def repetitive(draw: st.DrawFn) -> tuple[list[int], int]:
    """A text over a small alphabet, with the length of its prompt; EOS is among its tokens at times."""
    alphabet = draw(st.integers(1, 5))
    text = draw(st.lists(st.integers(0, alphabet - 1), min_size=2, max_size=40))
    return text, draw(st.integers(1, len(text) - 1))


@given(repetitive(), st.integers(1, 4), st.sampled_from([(), (0,), (1, 2)]), st.integers(1, 10))
@example(([1, 2, 3, 1, 2, 4, 1, 2, 3], 2), 3, (), 2)
def test_every_proposal_is_that_of_transformers_whatever_the_number_of_tokens(
    given_text: tuple[list[int], int], max_ngram: int, eos: tuple[int, ...], count: int
) -> None:
    """Without EOS ids the whole one, as vLLM proposes; with them its tokens before an EOS."""
    text, prompt = given_text
    found = draft(max_ngram, eos).columns(np.array(text, dtype=np.int32), prompt)
    assert {len(column) for column in found.values()} == {len(text) - prompt}
    for place, end in enumerate(range(prompt, len(text))):
        whole = candidates(text, end, max_ngram, (), PROPOSED_LIMIT)
        assert_proposes(text, place, end, found, whole)
        assert whole == proposal(text[:end], max_ngram)
        expected = whole[: until_eos(whole, eos)]
        assert min(found["accepted_run"][place], len(expected)) == matched(expected, text[end:])
        assert candidates(text, end, max_ngram, eos, count) == expected[:count]


BY_HAND = [
    # text, prompt, max_ngram, eos: first, proposed, accepted
    ([5, 6, 7, 5, 6, 7, 8], 4, 3, (), [[6, 7, 5], [3, 3, 3], [2, 1, 0]]),
    ([1, 2, 3, 9, 2, 4, 9, 2], 7, 2, (), [[2], [3], [1]]),  # 4 9 never stood before, 9 did
    ([1, 2, 3, 9, 2, 4, 9, 2], 7, 1, (), [[2], [3], [1]]),
    ([1, 2, 0, 1, 2, 4], 5, 2, (0,), [[0], [3], [0]]),  # what followed is an EOS
    ([1, 2, 3, 0, 1, 2, 3, 4], 6, 2, (0,), [[3, 0], [4, 4], [1, 0]]),
    ([1, 2, 3, 0, 1, 2, 3, 0], 6, 2, (0,), [[3, 0], [4, 4], [2, 1]]),  # and the text ends with one
    ([4, 5, 6, 7], 1, 3, (), [[-1, -1, -1], [0, 0, 0], [0, 0, 0]]),
    ([4, 4, 4, 4, 4], 1, 3, (), [[-1, 4, 4, 4], [0, 1, 1, 1], [0, 1, 1, 1]]),
    ([8, 1, 8, 2, 8, 3], 5, 1, (), [[1], [4], [0]]),  # the first place from the left, not the last
]


@each(("text", "prompt", "max_ngram", "eos", "expected"), BY_HAND)
def test_proposals_by_hand(text: list[int], prompt: int, max_ngram: int, eos: Any, expected: list[list[int]]) -> None:
    found = draft(max_ngram, eos).columns(np.array(text), prompt)
    assert [column.tolist() for column in found.values()] == expected


def test_a_proposal_has_at_most_so_many_tokens_as_the_log_holds() -> None:
    period = list(range(300))
    text = period * 3
    found = draft(2).columns(np.array(text), 301)
    assert int(found["draft_top"][0]) == text[301]
    assert found["proposed"].max() == found["accepted_run"].max() == PROPOSED_LIMIT
    for end in (301, 400, 700):
        assert_proposes(text, end - 301, end, found, candidates(text, end, 2, (), PROPOSED_LIMIT))


RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "vllm" / "ngram-0.32.0.json").read_text())["cases"]


@each("case", RECORDED, ids=lambda case: f"{case['min_ngram']}-{case['max_ngram']} of {len(set(case['tokens']))}")
@each("runner", ["v1", "v2"])
def test_drafts_of_both_runners_are_those_that_vllm_computed(runner: str, case: dict[str, Any]) -> None:
    """At every place of a text, as the log has it and as decoding drafts it."""
    tokens, gamma, padded = case["tokens"], case["gamma"], runner == "v2"
    lookup = PromptLookup("ngram", case["max_ngram"], (), 50_000, "float32", case["min_ngram"], padded)
    columns = lookup.columns(np.array(tokens, dtype=np.int32), 1)
    decoder = LookupDrafter(lookup, torch.device("cpu"))
    differ = 0
    for place, drafts in enumerate(case[runner]):
        end = place + 1
        assert decoder.propose(tokens[:end], gamma).ids.tolist() == drafts
        assert int(columns["draft_top"][place]) == (drafts[0] if drafts else -1)
        assert min(gamma, int(columns["proposed"][place])) == len(drafts) == (gamma if padded else len(drafts))
        assert min(gamma, int(columns["accepted_run"][place])) == matched(drafts, tokens[end:])
        differ += drafts != case["v1"][place]
    assert bool(differ) == padded


@given(repetitive(), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_a_text_that_grows_is_looked_up_as_all_texts_at_once(
    given_text: tuple[list[int], int], shortest: int, more: int, rightmost: bool
) -> None:
    """Beside other texts, in which nothing is looked up."""
    text, _ = given_text
    lookup = PromptLookup("ngram", shortest + more, (), 260, "float32", shortest, rightmost)
    tokens, start = np.array(text * 3, dtype=np.int64), np.arange(3) * len(text)
    places, lengths = matches(tokens, start, shortest + more, shortest, rightmost)
    index = lookup.index
    grown = [index.add(text, end) for end in range(1, len(text))]
    for number in range(3):
        mine = slice(number * len(text) + 1, (number + 1) * len(text))
        assert [None if place < 0 else place - number * len(text) for place in places[mine].tolist()] == grown
        assert ((lengths[mine] >= shortest) == (places[mine] >= 0)).all()


def test_padded_rounds_draft_gamma_tokens_and_cost_their_verification() -> None:
    """Also where nothing matches: what an engine verifies there is the last token, again and again."""
    text = [5, 6, 7, 8, 9, 9, 9, 9, 1]
    lookup = PromptLookup("ngram", 3, (), 260, "float32", 2, padded=True)
    found = lookup.columns(np.array(text), 2)
    assert found["draft_top"].tolist() == [6, 7, 8, 9, 9, 9, 9]  # the filler stands in for a match
    assert found["accepted_run"].tolist() == [0, 0, 0, 3, 2, 1, 0]
    whole = np.array([0]), np.array([7])
    trace = Trace(found["accepted_run"], found["proposed"], *whole)
    rounds = listed_rounds(trace, 3)
    assert (rounds.at.tolist(), rounds.drafted.tolist(), rounds.accepted.tolist()) == ([1, 2, 3], [3, 3, 3], [0, 0, 3])
    times = StepTimes({n: StepTime(float(n), 0.0) for n in range(1, 5)}, NOTHING)
    counts = RoundCounts.of(replay(trace, 3), whole[0])
    assert time_spent(counts, times).tolist() == [3 * 4.0]


VLLM = {"python": "/env/bin/python"}


@each(
    ("changes", "device", "padded"),
    [
        ({"costs": {"source": "measured"}}, "cpu", True),  # whatever the source of step times
        ({"costs": {"source": "none"}}, "cpu", True),
        ({"costs": {"source": "roofline", "accelerator": "h200"}}, "cpu", True),
        ({"vllm": VLLM, "costs": {"source": "vllm"}}, "cuda", True),
        ({"vllm": VLLM, "costs": {"source": "vllm"}}, "cpu", False),  # its CPU build has the V1 runner
        ({"vllm": VLLM, "costs": {"source": "none"}}, "cpu", False),
        ({"vllm": {"url": "http://there:8000"}}, "cpu", True),
        ({"match": "rightmost"}, "cpu", True),
        ({"match": "leftmost", "costs": {"source": "none"}}, "cpu", False),
    ],
)
def test_prompt_lookup_is_that_of_the_engine_that_a_profile_names(changes: Any, device: str, padded: bool) -> None:
    drafts = {"ngram": {"kind": "prompt_lookup", "min_ngram": 2, "match": changes.pop("match", None)}}
    data = [{"domain": "a", "path": "a.jsonl", "prompt": "{a}"}]
    options = validate({"target": "t", "drafts": drafts, "data": data} | changes, "the profile")
    target: Any = SimpleNamespace(eos=(), vocabulary=9, dtype_name="float32", device=torch.device(device))
    found = load_draft("ngram", options.drafts["ngram"], options, target, Any)  # type: ignore[arg-type]
    assert isinstance(found, PromptLookup)
    assert (found.min_ngram, found.max_ngram, found.padded) == (2, 3, padded)
    assert found.facts().settings == {"min_ngram": 2, "max_ngram": 3, "match": "rightmost" if padded else "leftmost"}


def test_drafts_of_runs_so_far_are_the_same_drafts() -> None:
    """Leftmost, from one token on; any other way is another draft."""
    known = hashlib.sha256(b"prompt_lookup 3 through eos").hexdigest()
    ways = [(1, False), (2, False), (1, True), (2, True)]
    found = [PromptLookup("n", 3, (), 9, "float32", low, padded).facts().fingerprint for low, padded in ways]
    assert found[0] == known
    assert len(set(found)) == 4
