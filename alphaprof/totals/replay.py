"""Rounds of speculative decoding from a position log: every round for every gamma from one teacher-forced pass.

`totals/count.py` makes a `Trace` of the log's columns and stores the counts as totals.

Drafts are accepted as a fact of the log, or by chance. One program counts both: a fact is a chance of 0 or 1.

A fact: under strict greedy decoding a round that starts at position t accepts min(gamma, run of agreements from t) drafts
and emits one more token, and the next round starts after them. So the log fixes every round (proof by induction over the
round: as long as proposals matched, the draft's own context equals the text; after a mismatch nothing of the draft is used).
The same holds for a draft's top token on sampled text.

A chance: given the whole text, the accept events of lossless sampling are
independent with probabilities a_t = min(1, q(x_t)/p(x_t)), so a dynamic program over where rounds begin gives the
expectation of every count. It must propagate a_t: the acceptance beta_t = sum min(p, q) is an
average over tokens that were not emitted as well, and the emitted one ties neighbouring positions together. Blocks of
drafts that are verified together follow the same program with products of q/p (docs/research/theory.md).

Rounds are those of engines: the prefill emits the first token; a round drafts as many tokens as the draft proposes, up to
gamma, and nothing is capped at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.stats.estimate import Array

Ints = np.ndarray[Any, np.dtype[np.int64]]
KNOWN, UNTIL_WRONG = "known", "until wrong"  # what rounds draft that stop at a p_min


@dataclass(frozen=True)
class Trace:
    """The positions of several documents, and what a draft proposes there.

    `run` [positions]: drafts that a round starting there would get accepted, if it drafted without end; `proposed`
    [positions]: tokens that it would propose at most; `start`, `stop` [documents]: where each document begins and ends.
    `unsure` [positions]: the draft's top probability there is below p_min, which ends a draft before that token (None: no
    p_min). Where a round's draft was wrong before, the log does not hold what ended it: `drafted` is the most that it can
    be, and `tested` the least.
    """

    run: Array
    proposed: Array
    start: Ints
    stop: Ints
    unsure: Array | None = None


@dataclass(frozen=True)
class Rounds:
    """Counts per document for one gamma; expectations where acceptance is a matter of chance.

    `rounds`, `tokens` (emitted by rounds) [documents]; for depth d = 1..gamma, [documents, gamma]: `drafted` rounds that
    drafted at least d tokens, `tested` rounds whose draft at depth d was reached before the document ended, `accepted`
    rounds whose first d drafts were all accepted. `control` [documents]: sum of P(tested_t) (a_t - beta_t), whose mean over
    texts is 0: what it is off by tells by how much the counts are (0 if acceptance is a fact).
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


@dataclass(frozen=True)
class RoundCounts:
    """Rounds of several documents at one gamma: `tokens`, `rounds` [documents], `drafted` [documents, gamma] (rounds that
    drafted at least d tokens), `accepted` [documents, gamma] (rounds whose first d drafts were all accepted), `control`
    (control variate of expected rounds, else 0) and `cluster` [documents].

    With a p_min, `drafted` is the middle of the values that the log allows, `doubt` [documents, gamma] its largest error
    (`ends`), and `unused` [documents] the number of draft steps whose token is discarded, one in each round that drafted
    fewer than gamma; without one both are None. `started` [documents]: with a p_min the rounds that draft nothing, which
    run a first step; of a hybrid those that run any of its draft `steps`, and `read_by_head` and `read_by_model` the tokens
    beyond one that their first steps read if the draft is a head or a model (`count._step_columns`); None for other drafts,
    which run one step for each token.
    """

    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    control: Array
    cluster: Array
    doubt: Array | None = None
    unused: Array | None = None
    steps: Array | None = None
    started: Array | None = None
    read_by_head: Array | None = None
    read_by_model: Array | None = None

    @classmethod
    def of(cls, replayed: Rounds, cluster: Array, stops: str = "") -> RoundCounts:
        """From replayed rounds of documents, and the cluster of each. `stops`: drafts stop at a p_min, and what they draft
        is KNOWN, or UNTIL_WRONG only; empty: they never do.
        """
        drafted, doubt, unused, started = replayed.drafted, None, None, None
        if stops == UNTIL_WRONG:
            drafted, doubt = (drafted + replayed.tested) / 2, (drafted - replayed.tested) / 2
        if stops:
            unused, started = replayed.rounds - drafted[:, -1], replayed.rounds - drafted[:, 0]
        counted = (replayed.tokens, replayed.rounds, drafted, replayed.accepted, replayed.control)
        return cls(*counted, cluster, doubt, unused, started=started)

    @property
    def ends(self) -> tuple[RoundCounts, RoundCounts]:
        """The same if rounds whose draft was wrong drafted the least that the log allows after it, and the most: they
        stopped at once, or at gamma. Every time in between is possible.
        """
        if self.doubt is None:
            return self, self
        return self._off_by(-self.doubt), self._off_by(self.doubt)

    def _off_by(self, drafted: Array) -> RoundCounts:
        unused = None if self.unused is None else self.unused - drafted[:, -1]
        return replace(self, drafted=self.drafted + drafted, doubt=None, unused=unused)

    @property
    def exactly(self) -> Array:
        """Rounds of all documents that drafted exactly m = 0..gamma tokens, [gamma + 1]."""
        at_least = np.array([self.rounds.sum(), *np.einsum("dg->g", self.drafted), 0.0])  # a quarter of the time of sum(0)
        return np.asarray(at_least[:-1] - at_least[1:])

    def rows(self, chosen: Array) -> RoundCounts:
        """Return some of the documents."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        known = {name: values for name, values in vars(self).items() if values is not None}
        return RoundCounts(**{name: values.T.take(places, axis=-1).T for name, values in known.items()})


def run_lengths(agrees: Array, start: Ints, stop: Ints) -> Ints:
    """For each position the number of agreements from it on, up to its document's end; [positions].

    Documents follow each other without gaps.
    """
    total = len(agrees)
    miss = np.where(agrees.astype(bool), total, np.arange(total))
    next_miss = np.minimum.accumulate(miss[::-1])[::-1]
    end = np.repeat(stop, stop - start)
    return np.asarray(np.minimum(next_miss, end) - np.arange(total), dtype=np.int64)


def runs_by_depth(agrees: Array, proposed: Array, start: Ints, stop: Ints) -> Ints:
    """For each position the drafts that a round starting there gets accepted, [positions]. `agrees` [positions, depths]:
    whether the token there is what a round proposes as its d-th draft, if all before it were right; `proposed` [positions]:
    how many a round starting there proposes. Documents follow each other without gaps.
    """
    places, end = np.arange(len(agrees)), np.repeat(stop, stop - start)
    going = np.ones(len(agrees), dtype=bool)
    run = np.zeros(len(agrees), dtype=np.int64)
    for depth in range(agrees.shape[1]):
        at = places + depth
        going &= (at < end) & (depth < proposed) & agrees[np.minimum(at, len(agrees) - 1), depth]
        run += going
    return run


@dataclass(frozen=True)
class RoundList:
    """Rounds one by one, [rounds]: the document of each, where it starts, and what it drafted, accepted and emitted;
    `chance`: how probable it is, 1 if rounds are facts.
    """

    document: Ints
    at: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints
    chance: Array

    def parts(self, row: Ints, rows: int, gamma: int) -> Rounds:
        """Return the counts of each part of the texts, [rows]: each of the n tokens of a round takes 1/n of it. `row`
        [positions]: the part that a token is in.
        """
        first = np.cumsum(self.emitted) - self.emitted
        each = np.repeat(np.arange(len(self.at)), self.emitted)  # the round of each token
        part = row[np.arange(len(each)) + (self.at - first)[each]]
        counts = np.stack([self.drafted, self.accepted, self.emitted])
        return by_token(counts[:, each], part, rows, gamma, self.chance[each])


def by_token(counts: Ints, row: Ints, rows: int, gamma: int, chance: Array | float = 1.0) -> Rounds:
    """Return the counts of parts of texts, [rows], where each of the n tokens of a round takes 1/n of it. `counts` [3,
    tokens]: what the round of a token drafted, accepted and emitted; `row` [tokens]: the part that the token is in.
    """
    drafted, accepted, emitted = counts
    share = chance / emitted

    def at_least(numbers: Ints) -> Array:
        exactly = np.bincount(row * (gamma + 1) + numbers, share, rows * (gamma + 1)).reshape(rows, gamma + 1)
        return np.asarray(exactly[:, ::-1].cumsum(1)[:, ::-1][:, 1:])

    whole, tokens = (np.bincount(row, np.broadcast_to(each, len(row)), rows) for each in (share, chance))
    tested = np.minimum(drafted, emitted)
    return Rounds(whole, tokens, at_least(drafted), at_least(tested), at_least(accepted), np.zeros(rows))


Chances = tuple[Array, Array]  # a_t and beta_t, [positions] or [positions, depths]


def listed_rounds(trace: Trace, gamma: int, chances: Chances | None = None, blocks: bool = False) -> RoundList:
    """Return the rounds of all documents for one gamma, document by document: with `chances` all that there may be given
    the texts. Both options as of `replays`, which has the sums.
    """
    from alphaprof.totals.replay_loops import list_rounds

    found, chance = list_rounds(_positions(trace, chances), _documents(trace), gamma, blocks)
    return RoundList(*[*found.T, chance])


def replay(trace: Trace, gamma: int) -> Rounds:
    """Return all rounds of all documents for one gamma, counted per document."""
    return replays(trace, [gamma])[gamma]


def replays(trace: Trace, gammas: Sequence[int], chances: Chances | None = None, blocks: bool = False) -> dict[int, Rounds]:
    """Return the same for several gammas: facts by `trace.run`, or with `chances`, in place of it, what is expected given
    the texts.

    `chances`: a_t, the probability that the emitted token was an accepted draft if one was tested there, and beta_t, which
    the control variate alone reads. `blocks`: the drafts of a round are verified together, and a_t is the ratio
    q(x_t) / p(x_t) that it is otherwise cut from.
    """
    from alphaprof.totals.replay_loops import count_rounds

    documents = len(trace.start)
    rounds, control = np.zeros((2, len(gammas), documents))
    depths = np.zeros((3, documents, sum(gammas)))
    count_rounds(_positions(trace, chances), _documents(trace), np.array(gammas), blocks, (rounds, depths, control))
    tokens = np.maximum(trace.stop - trace.start - 1, 0).astype(np.float64)  # the prefill emits one
    parts = enumerate(zip(gammas, np.split(depths, np.cumsum(gammas)[:-1], axis=2), strict=True))
    return {gamma: Rounds(rounds[i], tokens, part[0], part[1], part[2], control[i]) for i, (gamma, part) in parts}


def _positions(trace: Trace, chances: Chances | None) -> tuple[Ints, Ints, Ints, Array, Array]:
    """Return the positions of a trace as `replay_loops` takes them."""
    run, most = (np.ascontiguousarray(part, dtype=np.int64) for part in (trace.run, trace.proposed))
    before_end = most if trace.unsure is None else np.minimum(most, _next(trace.unsure) - np.arange(len(most)))
    values = (np.zeros((0, 1)),) * 2 if chances is None else (part if part.ndim > 1 else part[:, None] for part in chances)
    kept, accept = (np.ascontiguousarray(part, dtype=np.float64) for part in values)
    return run, most, before_end, kept, accept


def _documents(trace: Trace) -> tuple[Ints, Ints]:
    start, stop = (np.ascontiguousarray(part, dtype=np.int64) for part in (trace.start, trace.stop))
    return start, stop


def _next(where: Array) -> Ints:
    """For each position the first one from it on where something is so, or one far beyond all; [positions]. After its first
    wrong proposal a draft is on a path of its own that the log does not hold: `drafted` of such a round may be too large.
    """
    total = len(where)
    far = np.where(where, np.arange(total), 2 * total + 256)
    return np.asarray(np.minimum.accumulate(far[::-1])[::-1], dtype=np.int64)
