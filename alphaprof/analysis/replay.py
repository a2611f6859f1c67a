"""Rounds of speculative decoding from a position log: every round for every gamma from one teacher-forced pass.

`replay`: where acceptance is a fact of the log. Under strict greedy decoding a round that starts at position t accepts
min(gamma, run of agreements from t) drafts and emits one more token, and the next round starts after them. So the log fixes
every round (proof by induction over the round: as long as proposals matched, the draft's own context equals the text; after
a mismatch nothing of the draft is used). The same holds for a draft's top token on sampled text.

`expected_replay`: where it is a matter of chance. Given the whole text, the accept events of lossless sampling are
independent with probabilities a_t = min(1, q(x_t)/p(x_t)), so a dynamic program over the number of drafts accepted so
far in the round gives the expectation of every count. It must propagate a_t: the acceptance beta_t = sum min(p, q) is an
average over tokens that were not emitted as well, and the emitted one ties neighbouring positions together.

Two flavours. `engine`: the prefill emits the first token; a round drafts as many tokens as the draft proposes, up to gamma,
and nothing is capped at the end. `hf` follows Hugging Face's assisted generation: the first round starts at the first
token; a round drafts min(gamma, tokens left - 1) (prompt lookup: only none where one token is left); the draft stops after
its own EOS; a matched EOS counts as the target's own token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Flavour = Literal["engine", "hf"]
Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Trace:
    """The positions of several documents, and what a draft proposes there.

    `run` [positions]: drafts that a round starting there would get accepted, if it drafted without end; `proposed`
    [positions]: tokens that it would propose at most; `start`, `stop` [documents]: where each document begins and ends;
    `limit` [documents]: its max_new_tokens; `draft_ends` [positions]: the draft's proposal is EOS; `looked_up`: the draft is
    prompt lookup. The last three matter to `hf` only.
    """

    run: Array
    proposed: Array
    start: Ints
    stop: Ints
    limit: Ints
    draft_ends: Array
    looked_up: bool = False

    def caps(self, at: Ints, documents: Ints, gamma: int, flavour: Flavour) -> Ints:
        """Tokens that rounds starting at some positions of some documents draft at most, before the draft's own EOS."""
        drafted = np.minimum(gamma, self.proposed[at])
        if flavour == "hf":
            left = self.limit[documents] - (at - self.start[documents])
            drafted = np.where(left == 1, 0, drafted) if self.looked_up else np.minimum(drafted, left - 1)
        return np.asarray(drafted)


@dataclass(frozen=True)
class Rounds:
    """Counts per document for one gamma; expectations where acceptance is a matter of chance.

    `rounds`, `tokens` (emitted by rounds) [documents]; for depth d = 1..gamma, [documents, gamma]: `drafted` rounds that
    drafted at least d tokens, `tested` rounds whose draft at depth d was reached before the document ended, `accepted`
    rounds whose first d drafts were all accepted. `control` [documents]: sum of P(tested_t) (a_t - beta_t), whose mean over
    texts is 0: what it is off by tells by how much the counts are (0 where acceptance is a fact).
    """

    rounds: Array
    tokens: Array
    drafted: Array
    tested: Array
    accepted: Array
    control: Array

    @classmethod
    def none(cls, documents: int, gamma: int) -> Rounds:
        """Nothing counted yet."""
        single, depths = (documents,), (documents, gamma)
        return cls(*(np.zeros(shape) for shape in (single, single, depths, depths, depths, single)))


def run_lengths(agrees: Array, start: Ints, stop: Ints) -> Ints:
    """For each position the number of agreements from it on, up to its document's end; [positions].

    Documents follow each other without gaps.
    """
    total = len(agrees)
    miss = np.where(agrees.astype(bool), total, np.arange(total))
    next_miss = np.minimum.accumulate(miss[::-1])[::-1]
    end = np.repeat(stop, stop - start)
    return np.asarray(np.minimum(next_miss, end) - np.arange(total), dtype=np.int64)


@dataclass(frozen=True)
class Step:
    """One round of each document that is not finished: its index, where the round starts, and what it drafted, accepted
    and emitted; all [unfinished documents].
    """

    document: Ints
    at: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints


def walk(trace: Trace, gamma: int, flavour: Flavour = "engine") -> Iterator[Step]:
    """The rounds of all documents for one gamma, side by side: the n-th step holds the n-th round of each."""
    next_end = _next_draft_end(trace) if flavour == "hf" else None
    place = _first(trace, flavour)
    active = np.flatnonzero(place < trace.stop)
    while len(active):
        at, stop = place[active], trace.stop[active]
        drafted = trace.caps(at, active, gamma, flavour)
        if next_end is not None:
            ends = np.where(next_end[at] - at <= trace.run[at], next_end[at] - at + 1, gamma)
            drafted = np.minimum(drafted, ends)
        matched = np.minimum(trace.run[at], drafted)
        emitted = np.minimum(matched + 1, stop - at)
        yield Step(active, at, drafted, emitted - 1 if flavour == "hf" else matched, emitted)
        place[active] = at + emitted
        active = active[place[active] < stop]


def replay(trace: Trace, gamma: int, flavour: Flavour = "engine") -> Rounds:
    """All rounds of all documents for one gamma, counted per document."""
    found = Rounds.none(len(trace.start), gamma)
    depth = np.arange(1, gamma + 1)
    for step in walk(trace, gamma, flavour):
        found.rounds[step.document] += 1
        found.tokens[step.document] += step.emitted
        found.drafted[step.document] += depth <= step.drafted[:, None]
        inside = trace.stop[step.document] - step.at  # what would have come after the end is neither right nor wrong
        found.tested[step.document] += depth <= np.minimum(np.minimum(step.drafted, step.accepted + 1), inside)[:, None]
        found.accepted[step.document] += depth <= step.accepted[:, None]
    return found


def expected_replay(trace: Trace, kept: Array, accept: Array, gamma: int, flavour: Flavour = "engine") -> Rounds:
    """Expected counts of all rounds given the texts, for one gamma.

    `kept` [positions] is a_t, the probability that the emitted token was an accepted draft if one was tested there;
    `accept` [positions] is beta_t, read by the control variate alone. `trace.run` and `trace.draft_ends` are not read: a
    draft that is drawn by lot may end early anywhere, so in the `hf` flavour `drafted` counts what it would draft otherwise.
    """
    found = Rounds.none(len(trace.start), gamma)
    place = _first(trace, flavour)
    # state[:, i]: probability that i drafts of the current round were accepted; caps[:, i]: what the round drafts that
    # started i positions ago.
    state, caps = np.zeros((len(place), gamma + 1)), np.zeros((len(place), gamma + 1), dtype=np.int64)
    state[:, 0] = 1.0
    depth = np.arange(1, gamma + 1)
    active = np.flatnonzero(place < trace.stop)
    while len(active):
        at, now = place[active], state[active]
        caps[active, 1:] = caps[active, :-1]
        caps[active, 0] = trace.caps(at, active, gamma, flavour)
        tested = np.where(np.arange(gamma + 1) < caps[active], now, 0.0)  # a draft is tested where the round has one left
        passed = tested[:, :-1] * kept[at, None]
        counted = passed if flavour == "engine" else np.where((at + 1 < trace.stop[active])[:, None], passed, 0.0)
        found.rounds[active] += now[:, 0]
        found.tokens[active] += 1
        found.drafted[active] += np.where(depth <= caps[active, :1], now[:, :1], 0.0)
        found.tested[active] += tested[:, :-1]
        found.accepted[active] += counted
        found.control[active] += tested.sum(1) * (kept[at] - accept[at])
        state[active, 1:] = passed
        state[active, 0] = now.sum(1) - passed.sum(1)
        place[active] += 1
        active = active[place[active] < trace.stop[active]]
    return found


def _first(trace: Trace, flavour: Flavour) -> Ints:
    """Where the first round of each document starts."""
    return np.asarray(trace.start + (1 if flavour == "engine" else 0))


def _next_draft_end(trace: Trace) -> Ints:
    """For each position the first one from it on where the draft proposes EOS; [positions].

    It counts up to the draft's first wrong proposal. Beyond that the draft is on a path of its own that the log does not
    hold: whether it ended there is unknown, and `drafted` of such a round may be too large. Rounds and accepted tokens do
    not depend on it.
    """
    total = len(trace.run)
    far = np.where(trace.draft_ends, np.arange(total), 2 * total + 256)
    return np.asarray(np.minimum.accumulate(far[::-1])[::-1], dtype=np.int64)
