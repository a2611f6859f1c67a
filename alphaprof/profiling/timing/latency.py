"""Time the steps that rounds are made of on this machine, with a KV cache, over batch sizes and contexts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from alphaprof.costs.timing import ORDERED_ROUNDS, SURE, largest_error, reach, round_mixes, step_times
from alphaprof.log.schema import LATENCY_COLUMNS, arrow_schema
from alphaprof.profiling.models.drafts import Draft
from alphaprof.profiling.models.load import Model, is_out_of_memory
from alphaprof.profiling.texts.corpus import Ids
from alphaprof.profiling.timing.steppers import NotTimed, TimedStep, common_mode, fitted, prefills, stepper

if TYPE_CHECKING:
    from alphaprof.config.options import MeasuredCosts

WARM_UP = 3
SHORT_PROMPT = 16  # tokens of the shortest prompt whose prefill is timed
PREFILL_WARM_UP, LEAST_PREFILLS, MOST_PREFILLS = 1, 3, 5  # a prefill takes as long as many steps, and matters less
NORMAL = 1.96  # standard errors that reach as far as a 95 % interval, for readers of one number
PLACE = ("model", "step", "tokens", "batch", "context")  # what one row of the table is about
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Timed:
    """The latency table, and what could not be timed, in words."""

    table: pa.Table
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Subjects:
    """What is timed: models, the real token ids that fill caches, and the longest round."""

    target: Model
    drafts: Sequence[Draft]
    text: Ids
    gamma: int


@torch.inference_mode()
def measure(
    subjects: Subjects, costs: MeasuredCosts, tick: Callable[[float], None], say: Callable[[str], None] = lambda _: None
) -> Timed:
    """Time target steps over 1..gamma+1 tokens, steps of every draft (of a model over one and two tokens, of a head over
    1..gamma+1 and later ones over one), searches and bookkeeping for every batch size and context, and prefills.

    The steps of one batch size and context take turns in rounds, so that a disturbance of the machine falls on all of them
    alike; their caches are freed before the next. The text is repeated or cut to each context (and to what a model's own
    context allows). `tick` is called after every round with the share of all work that it was, `say` with what will take
    longer than `costs.budget` and how sure the times are. What does not fit into memory beyond batch 1 is left out. Raises
    `NotTimed` for a model without a cache that can be cut back.
    """
    mode = common_mode(_models(subjects), subjects.text, costs.mode, say)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    left_out = []
    clock = _TimeBudget(costs, tick, say)
    prefills = _timed_prefills(list(_prefills(subjects, costs.context)), clock)
    for batch, context in itertools.product(costs.concurrency, costs.context):
        place = f"{'1 sequence' if batch == 1 else f'{batch} sequences'} of {context} tokens"
        try:
            timed = _timed(_cell(subjects, batch, context, mode), subjects.gamma, clock, place)
        except RuntimeError as error:
            if batch == 1 or not is_out_of_memory(error):
                raise
            left_out.append(f"{place} do not fit into memory")
            continue
        finally:
            clock.end_part()
        # A model whose own context is short is timed at the same place for several contexts: the last one counts.
        rows |= {tuple(row[name] for name in PLACE): row for row in timed}
    if not rows:
        raise NotTimed("; ".join(left_out))
    table = pa.Table.from_pylist([*rows.values(), *prefills], schema=arrow_schema(LATENCY_COLUMNS))
    return Timed(table, tuple(left_out))


@torch.inference_mode()
def rehearsed(subjects: Subjects, costs: MeasuredCosts) -> float:
    """About how many seconds `measure` will take at most, if all cells are like its first: every step of that runs twice, as
    the first time also holds what is done once. Raises `NotTimed` for a model without a cache that can be cut back.
    """
    mode = common_mode(_models(subjects), subjects.text, costs.mode)
    turns = _turns(_cell(subjects, costs.concurrency[0], costs.context[0], mode))
    next(turns)
    steps = float(next(turns).sum()) / 1e3 * len(costs.concurrency) * len(costs.context)
    del turns  # and the caches with it
    reading = sum(job.run() for job in _prefills(subjects, costs.context[:1])) * len(costs.context)
    least = (WARM_UP + _least(costs)) * steps + (PREFILL_WARM_UP + LEAST_PREFILLS) * reading
    most = (WARM_UP + costs.repeats) * steps + (PREFILL_WARM_UP + MOST_PREFILLS) * reading
    return max(least, min(costs.budget, most))


def _least(costs: MeasuredCosts) -> int:
    """How many rounds every batch size and context gets, whatever the budget."""
    return min(ORDERED_ROUNDS, costs.repeats)


class _TimeBudget:
    """Divides `costs.budget` among prefills, batch sizes and contexts: what one part does not need goes to the next."""

    def __init__(self, costs: MeasuredCosts, tick: Callable[[float], None], say: Callable[[str], None]) -> None:
        self.costs, self.say = costs, say
        self._tick, self._ticked = tick, 0.0
        self._parts = self._left = len(costs.concurrency) * len(costs.context) + 1
        self._begun = time.monotonic()
        self._warned = False

    def rounds(
        self, turns: Iterator[Array], warm_up: int, least: int, most: int, sure: Callable[[Array], bool] = lambda _: False
    ) -> Array:
        """Times in ms [rounds, jobs] of whole rounds after some to warm up: at least `least`, then until they are `sure`,
        this part's share of the budget is spent or there are `most`.
        """
        begun = time.monotonic()
        share = max(0.0, self._begun + self.costs.budget - begun) / self._left
        times: list[Array] = []
        for turn in range(warm_up + most):
            if len(times) >= least and (time.monotonic() - begun >= share or sure(np.array(times))):
                break
            ms = next(turns)
            if turn >= warm_up:
                times.append(ms)
            elif turn == 1:  # the first one also holds what is done once
                self._warn(float(ms.sum()) / 1e3)
            in_time = (time.monotonic() - begun) / share if share > 0 else 1.0
            self._advance(max((turn + 1) / (warm_up + most), min((turn + 1) / (warm_up + least), in_time)))
        return np.array(times)

    def _warn(self, round_s: float) -> None:
        """Say once, from what a round takes here, that the rounds which every batch size and context gets take too long."""
        least = _least(self.costs)
        total = time.monotonic() - self._begun + (self._left * (WARM_UP + least) - 2) * round_s
        if total > self.costs.budget and not self._warned:
            self._warned = True
            self.say(
                f"step times will take about {total:.0f} s, more than costs.budget ({self.costs.budget:g} s): a round of "
                f"all steps takes {round_s:.1f} s, and each batch size and context has {WARM_UP} to warm up and {least} more"
            )

    def end_part(self) -> None:
        """Go on to the next batch size and context."""
        self._left -= 1
        self._advance(0.0)

    def _advance(self, share: float) -> None:
        done = (self._parts - self._left + min(share, 1.0)) / self._parts
        self._tick(done - self._ticked)
        self._ticked = done


def _turns(blocks: Sequence[Sequence[TimedStep]]) -> Iterator[Array]:
    """Yields times in ms [jobs], a round each; every second one backwards, so that slow growth favours no step."""
    places = itertools.count()
    numbered = [[(next(places), job) for job in block] for block in blocks]
    for order in itertools.cycle((numbered, numbered[::-1])):
        ms = {place: 1e3 * job.run() for place, job in itertools.chain.from_iterable(order)}
        yield np.array([ms[place] for place in sorted(ms)])


def _timed_prefills(jobs: Sequence[TimedStep], clock: _TimeBudget) -> list[dict[str, Any]]:
    """Rows of prefills, which are no part of a round: each by its own median."""
    times = clock.rounds(_turns([[job] for job in jobs]), PREFILL_WARM_UP, LEAST_PREFILLS, MOST_PREFILLS)
    clock.end_part()
    return [_row(job, float(np.median(ms)), ms) for job, ms in zip(jobs, times.T, strict=True)]


def _timed(blocks: Sequence[Sequence[TimedStep]], gamma: int, clock: _TimeBudget, place: str) -> list[dict[str, Any]]:
    """Rows of one batch size and context, `place` in words."""
    jobs = list(itertools.chain.from_iterable(blocks))
    mixes = round_mixes([(job.model, job.step, job.tokens) for job in jobs], gamma)
    costs, begun = clock.costs, time.monotonic()

    def sure(times: Array) -> bool:
        return largest_error(times, mixes) < SURE

    times = clock.rounds(_turns(blocks), WARM_UP, _least(costs), costs.repeats, sure)
    error = 100 * largest_error(times, mixes)
    known = f"known to {error:.{0 if error >= 10 else 1}f} %" if error < 100 else "not known"
    why = "" if sure(times) else " (costs.repeats reached)" if len(times) >= costs.repeats else " (costs.budget spent)"
    clock.say(
        f"{place}: {len(times)} rounds of all steps in {time.monotonic() - begun:.0f} s, by which the cost of drafting and "
        f"verifying is {known}{why}"
    )
    return [_row(job, ms, each) for job, ms, each in zip(jobs, step_times(times), times.T, strict=True)]


def _models(subjects: Subjects) -> list[Model]:
    return [subjects.target, *(model for draft in subjects.drafts for model in draft.models)]


def _cell(subjects: Subjects, batch: int, context: int, mode: str) -> list[list[TimedStep]]:
    """The steps at one batch size and context, the target's decode step first. Those of one block follow each other."""
    target, longest = subjects.target, subjects.gamma + 1
    own = stepper(target, fitted(subjects.text, target, context, longest), batch, longest, mode)
    blocks = [[own.timed("target", "verify" if tokens > 1 else "decode", tokens)] for tokens in range(1, longest + 1)]
    blocks[-1].append(own.settling("target"))
    for draft in subjects.drafts:
        blocks += draft.steps(subjects.text, batch, own.context, longest, mode)
    return blocks


def _prefills(subjects: Subjects, contexts: Sequence[int]) -> Iterator[TimedStep]:
    """Prompts of some lengths, alone: a server reads them as they come."""
    lengths = sorted({min(SHORT_PROMPT, *contexts), *contexts})
    yield from prefills("target", subjects.target, subjects.text, lengths)
    for draft in subjects.drafts:
        yield from draft.prefills(subjects.text, lengths)


def _row(job: TimedStep, ms: float, rounds: Array) -> dict[str, Any]:
    p10, p90 = np.percentile(rounds, [10, 90])
    return {
        **{name: getattr(job, name) for name in (*PLACE, "mode")},
        "median_ms": ms,
        "p10_ms": p10,
        "p90_ms": p90,
        "relative_error": reach(rounds / ms - 1) / NORMAL if ms > 0 else 0.0,
        "repeats": len(rounds),
        "rounds_ms": rounds,
    }
