"""Step times wherever they come from (this machine, an engine's own, a roofline) as rows of one kind, and what lies between.

Between measured batches, contexts and numbers of tokens, times are interpolated linearly. They are never extrapolated: what
lies outside has no time, and a reason. Only a context outside the measured ones takes the time of the nearest, and says so.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from alphaprof.costs.rounds import NOTHING, StepTime, StepTimes
from alphaprof.costs.timing import autocorrelation, step_times
from alphaprof.stats.estimate import Array
from alphaprof.stats.grouping import grouped

TARGET, PATH = "target", "path"


@dataclass(frozen=True)
class StepRow:
    """One kind of step: time in ms with the relative standard error of its median (0: not known).

    `model`: target, or the draft's name; `step`: prefill, decode, verify, draft, draft_first (of a draft whose first
    step of a round is one of its own), lookup or bookkeeping; `tokens`: new tokens per sequence (prefill: the prompt's,
    lookup and bookkeeping, which happen once a round: 1); `context`: tokens in the KV cache before the step; `rounds`: times
    in ms of interleaved rounds, round i together with all other steps of this batch and context (empty: not known);
    `autocorrelation` of those rounds (None: `StepTable` works it out); `waiting`: the share of their time in which the steps
    waited for a CPU; `shared_error`: a relative standard error that all steps that have one, such as computed ones, share;
    `redrawn`: whether a new run times the step again, so that its error is another one then.
    """

    model: str
    step: str
    tokens: int
    batch: int
    context: int
    ms: float
    relative_error: float = 0.0
    rounds: tuple[float, ...] = ()
    autocorrelation: float | None = None
    waiting: float = 0.0
    shared_error: float = 0.0
    redrawn: bool = False


class Unmeasured(Exception):
    """There is no time for this: the reason, in words."""


_Cells = Mapping[int, Mapping[int, Sequence[StepRow]]]  # batch -> tokens -> rows by ascending context


class StepTable:
    """Rows of step times, one for each step, and the times between them."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self.rows = _with_autocorrelation(tuple(dict.fromkeys(rows)))
        self._cells: dict[tuple[str, str], dict[int, dict[int, list[StepRow]]]] = {}
        for row in sorted(self.rows, key=lambda row: (row.batch, row.tokens, row.context)):
            step = "decode" if row.step == "verify" else row.step  # one kind of step over 1 and over several tokens
            cells = self._cells.setdefault((row.model, step), {})
            cells.setdefault(row.batch, {}).setdefault(row.tokens, []).append(row)

    @cached_property
    def halves(self) -> tuple[StepTable, StepTable]:
        """The times of two halves of the rounds: what the one chooses, the other tests. Times that hold no rounds are in
        both.

        The Thue-Morse sequence divides the rounds: the parity of the number of ones in a round's index. What comes back
        every second or fourth round falls on both halves alike, and so does a drift. A half keeps the autocorrelation of
        all rounds: its own are too few to tell.
        """
        decode = {(row.batch, row.context): row.rounds for row in self.rows if row.step == "decode"}
        first, second = (
            StepTable(_half(row, decode.get((row.batch, row.context), ()), half) for row in self.rows) for half in (0, 1)
        )
        return first, second

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes for which the target has a decode step, ascending."""
        return tuple(batch for batch, cell in self._of(TARGET, "decode").items() if 1 in cell)

    def contexts(self, batch: int) -> tuple[int, ...]:
        """Contexts at which the target's decode step was measured with this batch size, ascending."""
        return tuple(row.context for row in self._of(TARGET, "decode").get(batch, {}).get(1, ()))

    def times(self, draft: str, gammas_max: int, batch: int, context: float) -> StepTimes:
        """Return times of rounds with up to `gammas_max` drafts, or of as many as there are times for
        (`StepTimes.covers`). Raises `Unmeasured` if there are none for a round of one draft.
        """
        steps, first, searches = (self._of(draft, step) for step in ("draft", "draft_first", "lookup"))
        if not steps and not searches:
            raise Unmeasured(f"no step time for draft {draft}")
        target, name = self._of(TARGET, "decode"), f"draft {draft}"
        after_full = not first and any(2 in cell for cell in steps.values())
        # A first step over one token that was not timed by itself is as long as a later one.
        first = {near: {**steps.get(near, {}), **cell} for near, cell in first.items()}
        verified, first_over = dict[int, StepTime](), dict[int, StepTime]()
        for n in range(1, gammas_max + 2):
            try:
                time = _time(target, TARGET, n, batch, context)
                own = _time(first, f"the first step of {name}", n, batch, context) if first else None
            except Unmeasured:
                if n <= 2:
                    raise
                break
            verified[n] = time
            if own is not None:
                first_over[n] = own
        owners = ((TARGET, f"the {TARGET}"), (draft, name))
        kept = [(self._of(model, "bookkeeping"), f"bookkeeping of {words}") for model, words in owners]
        return StepTimes(
            target=verified,
            draft=_time(steps, name, 1, batch, context) if steps else NOTHING,
            lookup=_time(searches, f"lookup of {name}", 1, batch, context) if searches else NOTHING,
            draft_after_full=_time(steps, name, 2, batch, context) if after_full else None,
            bookkeeping=_summed_times([(1.0, _time(cells, what, 1, batch, context)) for cells, what in kept if cells]),
            draft_first=first_over,
            batch=batch,
        )

    def reaches(self, model: str, step: str, tokens: int, batch: int) -> bool:
        """Return whether there is a time for a step over `tokens` tokens at a batch size."""
        cells = self._of(model, "decode" if step == "verify" else step)
        usable = [near for near, cell in cells.items() if _neighbors(sorted(cell), tokens)]
        return bool(_neighbors(usable, batch))

    def path_overhead(self, draft: str, batch: int, context: float) -> float | None:
        """Return by what share plain decoding is slower on the path of a draft; None: it is the same, or it is not known."""
        steps, target = self._of(draft, PATH), self._of(TARGET, "decode")
        if not steps:
            return None
        return _time(steps, PATH, 1, batch, context).ms / _time(target, TARGET, 1, batch, context).ms - 1

    def prefill_ms(self, model: str, prompt_tokens: Array) -> tuple[Array, float] | None:
        """Prefill time of prompts at batch 1, in ms, and the share of them beyond the longest that was measured.

        Linear between measured lengths; the shortest one's time below; along the last segment beyond, which never falls
        (with one length only, the time grows with the length). None if no prefill into an empty cache was measured.
        """
        cell = self._of(model, "prefill").get(1, {})
        rows = [row for each in cell.values() for row in each if row.context == 0]
        if not rows:
            return None
        tokens, times = np.array([row.tokens for row in rows]), np.array([row.ms for row in rows])
        rise = (times[-1] - times[-2]) / (tokens[-1] - tokens[-2]) if len(rows) > 1 else times[-1] / tokens[-1]
        beyond = np.maximum(np.asarray(prompt_tokens) - tokens[-1], 0)
        ms = np.interp(prompt_tokens, tokens, times) + max(rise, 0.0) * beyond
        return ms, float((beyond > 0).mean()) if beyond.size else 0.0

    def _of(self, model: str, step: str) -> Mapping[int, Mapping[int, list[StepRow]]]:
        return self._cells.get((model, step), {})


def with_path(rows: Sequence[StepRow], drafts: Sequence[str], overhead: float) -> Sequence[StepRow]:
    """Return rows with what the path of some drafts costs once a round, a share of a decode step, beside the search, if any,
    and plain decoding there.
    """
    found = {(row.model, row.step, row.tokens, row.batch, row.context): row for row in rows}
    for row, draft in itertools.product([row for row in rows if row.step == "decode" and overhead], drafts):
        scaled = [each * overhead for each in (row.ms, *row.rounds)]
        once = found.get(place := (draft, "lookup", 1, row.batch, row.context))
        own = (once.ms, *once.rounds) if once else [0.0] * len(scaled)
        ms, *rounds = map(sum, zip(scaled, own, strict=False))
        found[place] = replace(row, model=draft, step="lookup", ms=ms, rounds=tuple(rounds))
        alone = tuple(each * (1 + overhead) for each in row.rounds)
        found[draft, PATH, *place[2:]] = replace(row, model=draft, step=PATH, ms=row.ms * (1 + overhead), rounds=alone)
    return tuple(found.values())


def _neighbors(known: Sequence[int], wanted: float) -> list[tuple[int, float]]:
    """Return the known numbers around the wanted one with their weights: one that is equal, or two; none outside of them."""
    if not known or not known[0] <= wanted <= known[-1]:
        return []
    place = bisect_left(known, wanted)
    if known[place] == wanted:
        return [(known[place], 1.0)]
    low, high = known[place - 1], known[place]
    share = (wanted - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def _with_autocorrelation(rows: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
    """Return the rows with the autocorrelation of the rounds of their batch and context, where it is not known yet."""
    if all(row.autocorrelation is not None or not row.rounds for row in rows):
        return rows
    timed = (row for row in rows if row.rounds and row.step != "prefill")
    turns = grouped(((row.batch, row.context), (row.step, row.rounds)) for row in timed)
    known = {place: autocorrelation(steps) for place, steps in turns.items()}
    return tuple(replace(row, autocorrelation=known.get((row.batch, row.context), 0.0)) for row in rows)


def _half(row: StepRow, decode: Sequence[float], half: int) -> StepRow:
    """Return a step by the rounds of one half. `decode`: the decode step in the same rounds; without it the time is the
    step's own median.
    """
    rounds = np.array(row.rounds)
    mine = [place for place in range(len(rounds)) if place.bit_count() % 2 == half]
    if row.step == "prefill" or not row.ms or not mine:
        return row
    turns = np.column_stack([decode if len(decode) == len(rounds) else rounds, rounds])
    ms = row.ms * float(step_times(turns[mine])[1] / step_times(turns)[1])
    return replace(row, ms=ms, rounds=tuple(row.rounds[place] for place in mine))


def _time(cells: _Cells, what: str, tokens: int, batch: int, context: float) -> StepTime:
    """Return a time between the nearest batch sizes at which `tokens` lie between measured ones; at a context outside, that
    of the nearest end. Raises `Unmeasured`.
    """
    usable = [near for near, cell in cells.items() if _neighbors(sorted(cell), tokens)]
    parts: list[tuple[float, StepTime]] = []
    for near, weight in _neighbors(usable, batch):
        for count, share in _neighbors(sorted(cells[near]), tokens):
            rows = {row.context: row for row in cells[near][count]}
            contexts = list(rows)
            for place, part in _neighbors(contexts, min(max(context, contexts[0]), contexts[-1])):
                row = rows[place]
                own, shared = (row.ms, row.relative_error, row.rounds), (row.waiting, row.shared_error, row.redrawn)
                parts.append((weight * share * part, StepTime(*own, row.autocorrelation or 0.0, *shared)))
    if not parts:
        timed = "; ".join(f"batch {near}, tokens {min(cell)}-{max(cell)}" for near, cell in cells.items()) or "none"
        raise Unmeasured(f"no step time for {what} at batch {batch}, tokens {tokens} (timed: {timed})")
    return parts[0][1] if len(parts) == 1 else _summed_times(parts)


def _summed_times(parts: Sequence[tuple[float, StepTime]]) -> StepTime:
    """Return the weighted sum of times: round by round, up to the shortest of them; errors of their own are independent, of
    a shared one the largest counts.
    """
    ms = sum(weight * time.ms for weight, time in parts)
    error = math.sqrt(sum((weight * time.ms * time.relative_error) ** 2 for weight, time in parts))
    rounds = zip(*([weight * each for each in time.rounds] for weight, time in parts), strict=False)
    waiting = max((time.waiting for _, time in parts), default=0.0)
    r = max((time.autocorrelation for _, time in parts), default=0.0)
    shared = max((time.shared_error for weight, time in parts if weight * time.ms > 0), default=0.0)
    redrawn = any(time.redrawn for _, time in parts)
    return StepTime(ms, error / ms if ms > 0 else 0.0, tuple(map(sum, rounds)), r, waiting, shared, redrawn)
