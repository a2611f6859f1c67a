"""Time the steps that rounds are made of on this machine, with a KV cache, over batch sizes and contexts."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.steps import TARGET
from alphaprof.costs.timing import (
    GO_ROUNDS,
    LEAST_ROUNDS,
    ORDERED_ROUNDS,
    SURE,
    autocorrelation,
    largest_error,
    reach,
    round_mixes,
    step_times,
)
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.load import Model, is_out_of_memory
from alphaprof.profiling.timing.steppers import (
    NotTimed,
    TimedStep,
    fitted,
    one_thread,
    prefills,
    prompt_steps,
    round_steps,
    stepper,
)
from alphaprof.run.schema import LATENCY_COLUMNS, arrow_schema
from alphaprof.run.split import Ids
from alphaprof.stats.estimate import Array

WARM_UP, LEAST_WARM_UP = 3, 1
SHORT_PROMPT = 16  # tokens of the shortest prompt whose prefill is timed
MOST_PREFILLS = 5  # a prefill takes as long as many steps, and matters less
FIRST_SHARE = 0.8  # of the budget: for the batch size and context that the verdict asks about
PREFILL_SHARE = 0.1  # of the budget: kept for prefills, which come last
SCHEDSTAT = Path("/proc/thread-self/schedstat")
NORMAL = 1.96  # standard errors in half a 95% interval, for readers of one number
KEY = ("model", "step", "tokens", "batch", "context")  # what one row of the table is about
Job = TypeVar("Job")


class BudgetSpent(NotTimed):
    """There was no time for what should be timed; the message says how long it takes."""


@dataclass(frozen=True)
class Timed:
    """The latency table, and what it lacks, in words: what did not fit into memory, and what the budget had no time for.

    `waiting`: the share of the rounds' time in which the thread that runs the steps was ready to run and had no processor;
    None: not known. `computed`: the times are of the thread's own clock, in which it did not wait. `engines`: all
    rounds of engines.
    """

    table: pa.Table
    left_out: tuple[str, ...]
    late: tuple[str, ...]
    waiting: float | None
    computed: bool = False
    engines: pa.Table | None = None


@dataclass
class Subjects:
    """Models that are timed here, all of them eagerly, with the real token ids that fill caches. Raises `NotTimed` for a
    model without a cache that can be cut back.
    """

    target: Model
    drafts: Sequence[Draft]
    text: Ids
    gamma: int

    def cell(self, batch: int, context: int) -> list[list[TimedStep]]:
        """Return the steps at one batch size and context in blocks that each run without a break, the target's decode step
        first. Raises `NotTimed`.
        """
        longest = self.gamma + 1
        target = stepper(self.target, fitted(self.text, self.target, context, longest), batch, longest)
        blocks = [[target.timed(TARGET, "verify" if tokens > 1 else "decode", tokens)] for tokens in range(1, longest + 1)]
        blocks[-1].append(target.bookkeeping(TARGET))
        for draft in self.drafts:
            blocks += round_steps(draft, self.text, batch, target.context, longest)
        return blocks

    def prefills(self, contexts: Sequence[int]) -> Iterator[TimedStep]:
        """Yield what reading prompts of such lengths takes, one at a time: a server reads prompts as they come."""
        lengths = prompt_lengths(contexts)
        yield from prefills(TARGET, self.target, self.text, lengths)
        for draft in self.drafts:
            yield from prompt_steps(draft, self.text, lengths)

    def waited_s(self) -> float:
        """Return the seconds for which the thread that runs the steps has been ready without a processor, by the nanoseconds
        on a run queue that Linux counts (its sched-stats documentation); nan: not known.
        """
        with contextlib.suppress(OSError):
            ran, waited, _ = map(int, SCHEDSTAT.read_text().split())
            if ran:  # else the kernel does not count
                return waited / 1e9
        return math.nan


def cells_of(costs: MeasuredCosts, first: int | None) -> dict[tuple[int, int], str]:
    """Return the batch sizes and contexts in the order in which they are timed, `first` and then the smallest batch size
    first, each in words.
    """
    batches = sorted(costs.concurrency, key=lambda batch: (batch != first, batch))
    return {
        (batch, context): f"{'1 sequence' if batch == 1 else f'{batch} sequences'} of {context} tokens"
        for batch, context in itertools.product(batches, costs.context)
    }


def share_of_waiting(waited_s: float, wall_s: float) -> float | None:
    """Return `waiting` as of `Timed`."""
    known = wall_s > 0 and not math.isnan(waited_s)
    return min(waited_s / wall_s, 1.0) if known else None  # the two are of different clocks


def prompt_lengths(contexts: Sequence[int]) -> list[int]:
    """Return the lengths in tokens of prompts whose prefill is timed."""
    return sorted({min(SHORT_PROMPT, *contexts), *contexts})


@torch.inference_mode()
def measure(
    subjects: Subjects,
    costs: MeasuredCosts,
    tick: Callable[[float], None],
    say: Callable[[str], None] = lambda _: None,
    first: int | None = None,
) -> Timed:
    """Time target steps over 1..gamma+1 tokens, steps of every draft (of a model over one and two tokens, of a head over
    1..gamma+1 and later ones over one), searches and bookkeeping for every batch size and context, and prefills.

    The steps of one batch size and context take turns in rounds, so that a disturbance of the machine falls on all of them
    alike; their caches are freed before the next. The text is repeated or cut to each context (and to what a model's own
    context allows). No step begins after `costs.budget` seconds: what has no `LEAST_ROUNDS` rounds by then is left out. The
    batch size `first` is timed first, then the smallest, and prefills last. `tick` is called after every step with the share
    of all work that is done since, `say` with how sure the times are. What does not fit into memory beyond batch 1 is left
    out. Raises `NotTimed` for what cannot be timed, and if nothing was timed within the budget.
    """
    clock = TimeBudget(costs, tick, subjects.waited_s)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    left_out, late = [], []
    for (batch, context), words in cells_of(costs, first).items():
        try:
            clock.require_time()
            timed = _timed_steps(subjects, subjects.cell(batch, context), clock, words, say)
        except BudgetSpent as error:
            late.append(f"{words}: {error}")
            continue
        except RuntimeError as error:
            if batch == 1 or not is_out_of_memory(error):
                raise
            left_out.append(f"{words} do not fit into memory")
            continue
        finally:
            clock.end_part()
        # A model whose own context is short is timed at the same length for several contexts: the last one counts.
        rows |= {tuple(row[name] for name in KEY): row for row in timed}
    if not rows:
        raise BudgetSpent("; ".join([*left_out, *late])) if late else NotTimed("; ".join(left_out))
    jobs = list(subjects.prefills(costs.context))  # no part of a round: each by its own median
    times = clock.rounds([[job] for job in jobs], 0, 1, MOST_PREFILLS)
    clock.end_part()
    prefills = [table_row(job.key, float(np.median(ms)), ms, 0.0) for job, ms in zip(jobs, times.T, strict=True) if len(ms)]
    if not prefills:
        late.append(f"reading prompts: {clock.spent}")
    ordered = sorted(rows.values(), key=lambda row: int(row["batch"]))
    table = pa.Table.from_pylist([*ordered, *prefills], schema=arrow_schema(LATENCY_COLUMNS))
    computed = subjects.target.device.type == "cpu" and one_thread()
    return Timed(table, tuple(left_out), tuple(late), share_of_waiting(clock.waited_s, clock.wall_s), computed=computed)


class TimeBudget:
    """Divides `costs.budget` among batch sizes and contexts, most of it to the first, which decides, and what is left among
    prefills: what one part does not need goes to the next. `wall_s`, `waited_s`: what rounds have taken, and what of it was
    waiting for a processor.
    """

    def __init__(self, costs: MeasuredCosts, tick: Callable[[float], None], waited_s: Callable[[], float]) -> None:
        self.costs, self._read_waited_s = costs, waited_s
        self._tick, self._ticked = tick, 0.0
        self._parts = self._left = len(costs.concurrency) * len(costs.context) + 1
        self._end = time.monotonic() + costs.seconds
        self.wall_s = self.waited_s = 0.0

    @property
    def spent(self) -> BudgetSpent:
        """The error of what there was no time for."""
        return BudgetSpent(f"costs.budget ({self.costs.seconds:g} s) was spent")

    def require_time(self) -> None:
        """Raise `BudgetSpent` if no step may begin any more."""
        if time.monotonic() >= self._until:
            raise self.spent

    @property
    def _until(self) -> float:
        """When the last step may begin: a part of the budget is kept for prefills, the last part."""
        return self._end - (PREFILL_SHARE * self.costs.seconds if self._left > 1 else 0.0)

    def rounds(
        self,
        blocks: Sequence[Sequence[TimedStep]],
        warm_up: int,
        least: int,
        most: int,
        sure: Callable[[Array], bool] = lambda _: False,
    ) -> Array:
        """Return times in ms [rounds, steps] of whole rounds after some to warm up, of which slow rounds get only one: until
        they are `sure`, this part's share of the budget is spent and there are `least`, or there are `most`. No step begins
        after the budget, so there may be fewer.
        """
        begun, waited = time.monotonic(), self._read_waited_s()
        part = FIRST_SHARE if self._left == self._parts > 2 else 1 / max(self._left - 1, 1)
        share = max(0.0, self._until - begun) * part
        times: list[Array] = []
        for turn, order in enumerate(orders(blocks)):
            enough = len(times) >= least and (time.monotonic() - begun >= share or sure(np.array(times)))
            if enough or len(times) >= most:
                break
            ms = self._round(order, begun, share)
            if ms is None:
                break
            if turn == 0 and (WARM_UP + ORDERED_ROUNDS) * (time.monotonic() - begun) > share:
                warm_up = min(warm_up, LEAST_WARM_UP)
            if turn >= warm_up:
                times.append(ms)
        self.wall_s += time.monotonic() - begun
        self.waited_s += self._read_waited_s() - waited
        return np.array(times).reshape(len(times), sum(map(len, blocks)))

    def _round(self, order: Sequence[tuple[int, TimedStep]], begun: float, share: float) -> Array | None:
        """Return times in ms [steps] of one round; None if the budget ended before its last step."""
        ms = np.empty(len(order))
        for index, job in order:
            if time.monotonic() >= self._until:
                return None
            ms[index] = 1e3 * job.run()
            self._advance((time.monotonic() - begun) / share if share > 0 else 1.0)
        return ms

    def end_part(self) -> None:
        """Go on to the next batch size and context, or to prefills."""
        self._left -= 1
        self._advance(0.0)

    def _advance(self, share: float) -> None:
        done = (self._parts - self._left + min(share, 1.0)) / self._parts
        self._tick(done - self._ticked)
        self._ticked = done


def orders(blocks: Sequence[Sequence[Job]]) -> Iterator[list[tuple[int, Job]]]:
    """Yield the numbered steps in the order of each round: two rounds forwards and two backwards, so that slow growth
    favors no step, neither in all rounds nor in every second one. Steps of one block keep their order.
    """
    indices = itertools.count()
    numbered = [[(next(indices), job) for job in block] for block in blocks]
    for order in itertools.cycle((numbered, numbered, numbered[::-1], numbered[::-1])):
        yield list(itertools.chain.from_iterable(order))


def _timed_steps(
    subjects: Subjects, blocks: Sequence[Sequence[TimedStep]], clock: TimeBudget, words: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return rows of one batch size and context, in `words`. Raises `BudgetSpent` for fewer rounds than a bound needs."""
    jobs = list(itertools.chain.from_iterable(blocks))
    mixes = round_mixes([(job.model, job.step, job.tokens) for job in jobs], subjects.gamma)
    costs, begun = clock.costs, time.monotonic()
    turns, decode = _with_decode_thrice(blocks)

    def each_once(times: Array) -> Array:
        return np.column_stack([np.median(times[:, decode], axis=1), np.delete(times, decode, axis=1)])

    def correlated(times: Array) -> float:
        return autocorrelation(zip((job.step for job in jobs), times.T, strict=True))

    def sure(times: Array) -> bool:
        times = each_once(times)
        return len(times) >= ORDERED_ROUNDS and largest_error(times, mixes, correlated(times)) < SURE

    measured = clock.rounds(turns, WARM_UP, GO_ROUNDS, costs.repeats, sure)
    if len(measured) < LEAST_ROUNDS:
        raise clock.spent
    times = each_once(measured)
    r = correlated(times)
    why = "" if sure(measured) else " (repeats reached)" if len(times) >= costs.repeats else " (budget spent)"
    rounds = f"{words}: {len(times)} rounds in {time.monotonic() - begun:.0f} s"
    say(f"{rounds}, costs {how_sure(largest_error(times, mixes, r))}{why}")
    return [table_row(job.key, ms, each, r) for job, ms, each in zip(jobs, step_times(times), times.T, strict=True)]


def how_sure(error: float) -> str:
    """Return in words how large the error of what rounds cost is, a share."""
    return f"known to {100 * error:.{0 if error >= 0.1 else 1}f}%" if error < 1 else "not known"


def _with_decode_thrice(blocks: Sequence[Sequence[TimedStep]]) -> tuple[list[Sequence[TimedStep]], list[int]]:
    """Return the blocks of a round with the decode step, which is the first, in the middle and at the end as well, and the
    indices of its three times. All costs are in units of it: its median of three is surer than one, and belongs to the whole
    round.
    """
    first, *others = blocks
    middle = len(others) // 2
    turns = [first, *others[:middle], first, *others[middle:], first]
    return turns, [0, 1 + sum(map(len, others[:middle])), 2 + sum(map(len, others))]


def table_row(key: tuple[str, str, int, int, int], ms: float, rounds: Array, r: float) -> dict[str, Any]:
    """Return the row of a step (`KEY`) that takes `ms`, by its times [rounds] with an autocorrelation `r`."""
    p10, p90 = np.percentile(rounds, [10, 90])
    error = reach(rounds / ms - 1, r) / NORMAL if ms > 0 else 0.0
    return {
        **dict(zip(KEY, key, strict=True)),
        "median_ms": ms,
        "p10_ms": p10,
        "p90_ms": p90,
        "relative_error": error if math.isfinite(error) else 0.0,  # not known, of prefills alone: a report uses none of them
        "repeats": len(rounds),
        "rounds_ms": rounds,
    }
