"""Step times of vLLM. One engine runs at a time and has the whole GPU, as in service; each is a process that ends.

- `plain` decodes without speculation: first of all and again at the end, half of its rounds each time, so that what has
  drifted meanwhile shows in them, and in every ratio to them (docs/decisions/048).
- `forced` verifies tokens of our choosing, proposed at no cost, with the engine's own rejection, scheduling and bookkeeping.
- For each draft one engine with its fewest and one with its most speculative tokens. What a round takes there beyond a
  verification of as many tokens is drafting, with what a round costs besides.

What `forced` takes without any proposal beyond `plain` is a cost of speculation that comes once a round: it is a part of
drafting here, and none of verification.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from alphaprof.config.engines import VLLM, vllm_speculation
from alphaprof.costs.steps import TARGET
from alphaprof.costs.timing import GO_ROUNDS, LEAST_ROUNDS, autocorrelation, largest_error, round_mixes, step_times
from alphaprof.profiling.engine.client import VllmEngine, no_method
from alphaprof.profiling.engine.texts import model_arguments
from alphaprof.profiling.timing.latency import (
    KEY,
    MOST_PREFILLS,
    WARM_UP,
    Array,
    BudgetSpent,
    TimeBudget,
    Timed,
    cells_of,
    how_sure,
    prompt_lengths,
    share_of_waiting,
    table_row,
)
from alphaprof.profiling.timing.steppers import NotTimed, TimedStep
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.schema import LATENCY_COLUMNS, arrow_schema

if TYPE_CHECKING:
    from alphaprof.config.options import MeasuredCosts, VllmOptions
    from alphaprof.config.profile import ProfileOptions

PLAIN, FORCED = ("plain", 0), ("forced", 0)
Name = tuple[str, int]  # of a draft, and its speculative tokens
Kind = tuple[str, str, int]  # of a step: model, step and tokens, as in the latency table
STEPS = 3  # of one kind in a turn, whose median counts
LEAST_CONTEXT = 8
LEAST_MS = 1e-3  # of a difference between two times


def time_engines(
    options: ProfileOptions,
    engine: VllmOptions,
    target: ModelFacts,
    drafts: Mapping[str, DraftFacts],
    costs: MeasuredCosts,
    say: Callable[[str], None],
    tick: Callable[[float], None],
    decoded: Sequence[int] = (),
    drawn: Mapping[str, str] | None = None,
    use: Callable[[Name, VllmEngine], None] | None = None,
) -> Timed:
    """Time the steps of rounds of up to the largest γ of the profile, in one engine after another.

    `decoded`: gammas of which each has an engine, for `use`, which is called with every engine while it runs; `drawn`:
    vLLM's settings of drafts that are drawn from q. Each engine has the share of `costs.budget` that its kinds of steps are
    of all. `tick` is called with the share of all timing that is done since. Raises `EngineFailed`, and `NotTimed`.
    """
    gamma = max(options.gammas)
    forced = {"method": "custom_class", "model": "vllm_worker.Forced", "num_speculative_tokens": gamma}
    speculations: dict[Name, dict[str, Any] | None] = {PLAIN: None, FORCED: forced}
    for draft, facts in drafts.items():
        more = dict(drawn or {}) if facts.has_distribution else {}
        fewest = {min(decoded, default=1)} if facts.has_steps else set()
        for each in facts.lengths(sorted({*fewest, *decoded, gamma})):
            speculations[draft, each] = speculation(options, draft, facts, each) | more
    steps = EngineSteps(drafts, costs, gamma, options.decision.concurrency)
    model, turns = model_arguments(options, engine, target), [*speculations, PLAIN]
    kinds = {name: 1.5 if name == PLAIN else gamma + 1.0 if name == FORCED else 1.0 for name in speculations}
    for place, name in enumerate(turns, 1):
        words = f"{name[0]} of {name[1]} tokens" if name[1] else name[0]
        say(f"starting vLLM {place} of {len(turns)} ({words})")
        with contextlib.closing(VllmEngine(engine, model, speculations[name])) as running:
            running.start()
            steps.time(name, running, kinds[name] / sum(kinds[each] for each in turns), tick)
            if use is not None:
                use(name, running)
    return steps.timed(say)


class EngineSteps:
    """What the steps of engines took that ran one after another, and what follows for the steps of rounds."""

    def __init__(self, drafts: Mapping[str, DraftFacts], costs: MeasuredCosts, gamma: int, first: int | None = None) -> None:
        self._drafts, self._costs, self._gamma = drafts, costs, gamma
        self._cells = cells_of(costs, first)
        self._context = 0  # of the engine without drafts
        # By batch size and context: times in ms, an array [rounds] for each turn of the engine; and what lookups proposed.
        self._rounds = {cell: defaultdict[Kind, list[Array]](list) for cell in self._cells}
        self._proposed = defaultdict[tuple[str, tuple[int, int]], list[float]](list)
        self._prefills = dict[tuple[str, int], Array]()  # by engine and tokens
        self._async = dict[str, bool]()  # by engine: whether it schedules asynchronously
        self._seeds = iter(range(10**9))
        self._wall_s = self._waited_s = 0.0

    def time(self, name: Name, engine: VllmEngine, share: float, tick: Callable[[float], None]) -> None:
        """Time the steps of an engine that runs, within a `share` of the budget; `PLAIN` comes first. `tick`: as of
        `time_engines`. Raises `EngineFailed`, and `NotTimed` if vLLM's context has no room.
        """
        self._async[name[0]] = bool(engine.facts.get("async_scheduling"))
        context, waited = int(engine.facts["context"]), [engine.facts["waited_s"]] * 2  # at first, and by now
        self._context = self._context or context
        if context < self._context:
            rooms = f"{context} tokens with {name[0]}, and for {self._context} without"
            raise NotTimed(f"vLLM has room for {rooms}: set max_model_len in vllm.args")

        def ask(do: str, **command: Any) -> dict[str, float]:
            answer: dict[str, Any] = engine.ask(do, **command)
            waited[1] = answer["waited_s"]
            return answer

        def waited_s() -> float:
            return math.nan if None in waited else waited[1] - waited[0]  # None: not known

        def ticked(part: float) -> None:
            tick(share * part)

        clock = TimeBudget(self._costs.model_copy(update={"budget": share * self._costs.budget}), ticked, waited_s)
        turns = 2 if name == PLAIN else 1
        for cell in self._cells:
            jobs = self._jobs(name, cell, ask)
            most = -(-self._costs.repeats // turns)
            times = clock.rounds([[job] for job in jobs], WARM_UP, GO_ROUNDS // turns, most)
            clock.end_part()
            if name == PLAIN:  # three times in a round, of which the median is surer than one: all costs are in units of it
                jobs, times = jobs[:1], np.median(times, axis=1, keepdims=True)
            for job, column in zip(jobs, times.T, strict=True):
                self._rounds[cell][job.model, job.step, job.tokens].append(column)
        reading = name == PLAIN or (name[0] in self._drafts and self._drafts[name[0]].has_steps)
        if not reading or any(model == name[0] for model, _ in self._prefills):
            lengths = []  # one engine of a draft is enough
        else:
            lengths = prompt_lengths([min(asked, self._context - 2) for asked in self._costs.context])
        reads = [TimedStep(name[0], "prefill", length, 1, 0, partial(self._read, ask, length)) for length in lengths]
        times = clock.rounds([[job] for job in reads], 0, 1, MOST_PREFILLS)
        clock.end_part()
        self._prefills |= {(name[0], length): column for length, column in zip(lengths, times.T, strict=True)}
        self._wall_s += clock.wall_s
        self._waited_s += clock.waited_s

    def _held(self, context: int) -> int:
        """Return the tokens that sequences hold for a context that was asked for."""
        known = min(context, self._context - 4 * (self._gamma + 1))
        if known < LEAST_CONTEXT:
            raise NotTimed(f"vLLM's context of {self._context} tokens is too short for rounds of {self._gamma} drafts")
        return known

    def _jobs(self, name: Name, cell: tuple[int, int], ask: Callable[..., dict[str, float]]) -> list[TimedStep]:
        """Return the kinds of steps of an engine in one of its rounds."""
        batch, context = cell[0], self._held(cell[1])

        def run(proposed: int | None) -> float:
            """Return seconds of a step that verifies what was `proposed`; None: what prompt lookup finds."""
            found = ask("steps", batch=batch, context=context, proposed=proposed, count=STEPS)
            if proposed is None:
                self._proposed[name[0], cell].append(found["proposed"])
            return found["ms"] / 1e3

        def step(kind: str, tokens: int, proposed: int | None) -> TimedStep:
            return TimedStep(name[0], kind, tokens, batch, context, partial(run, proposed))

        if name == PLAIN:
            return [step("decode", 1, 0)] * 3
        if name == FORCED:
            return [step("verify", tokens, tokens - 1) for tokens in range(1, self._gamma + 2)]
        if self._drafts[name[0]].has_steps:
            return [step("draft", name[1], name[1])]
        return [step("lookup", 1, None)] if name[1] == self._gamma else []

    def _read(self, ask: Callable[..., dict[str, float]], length: int) -> float:
        return ask("prefill", length=length, seed=next(self._seeds))["ms"] / 1e3

    def timed(self, say: Callable[[str], None]) -> Timed:
        """Return the latency table of all engines. Raises `BudgetSpent` if nothing was timed within the budget.

        A round of the table is made of one round of each engine. These were not at the same time: what they differ by is
        noise, which the spread of ratios within a round shows. Of `PLAIN` one half is from its first turn.
        """
        rows, late = dict[tuple[Any, ...], dict[str, Any]](), list[str]()
        for (batch, context), place in self._cells.items():
            found = self._rounds[batch, context]
            plain = found[PLAIN[0], "decode", 1]
            others = [turns[0] for kind, turns in found.items() if kind[0] != PLAIN[0]]
            rounds = min(2 * min(map(len, plain)), *map(len, others))
            if rounds < LEAST_ROUNDS:
                late.append(f"{place}: costs.budget ({self._costs.budget:g} s) was spent")
                continue
            known = {kind: turns[0][:rounds] for kind, turns in found.items()}
            known[PLAIN[0], "decode", 1] = np.concatenate([plain[0][: rounds - rounds // 2], plain[1][: rounds // 2]])
            proposed = {
                draft: np.array(counts[-len(found[draft, "lookup", 1][0]) :][:rounds])
                for (draft, cell), counts in self._proposed.items()
                if cell == (batch, context)
            }
            steps = steps_of_rounds(known, proposed, self._drafts, self._gamma)
            times = np.column_stack(list(steps.values()))
            r = autocorrelation(zip((kind for _, kind, _ in steps), times.T, strict=True))
            say(
                f"{place}: {rounds} rounds, costs {how_sure(largest_error(times, round_mixes(list(steps), self._gamma), r))}"
            )
            for kind, ms, each in zip(steps, step_times(times), times.T, strict=True):
                row = table_row((*kind, batch, self._held(context)), ms, each, r)
                rows[tuple(row[name] for name in KEY)] = row  # vLLM may have room for one of several contexts: the last
        if not rows:
            raise BudgetSpent("; ".join(late))
        prefills = list(self._prompts_read())
        if not prefills:
            late.append(f"reading prompts: costs.budget ({self._costs.budget:g} s) was spent")
        ordered = sorted(rows.values(), key=lambda row: int(row["batch"]))
        table = pa.Table.from_pylist([*ordered, *prefills], schema=arrow_schema(LATENCY_COLUMNS))
        without = tuple(draft for draft in self._drafts if self._async[PLAIN[0]] and not self._async.get(draft))
        return Timed(table, (), tuple(late), share_of_waiting(self._waited_s, self._wall_s), without)

    def _prompts_read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of prefills: of a draft, what its engine takes longer than the plain one."""
        for (name, length), column in self._prefills.items():
            plain = self._prefills[PLAIN[0], length]
            rounds = min(len(column), len(plain))
            ms = column if name == PLAIN[0] else np.maximum(column[:rounds] - plain[:rounds], 0.0)
            if len(ms):
                model = TARGET if name == PLAIN[0] else name
                yield table_row((model, "prefill", length, 1, 0), float(np.median(ms)), ms, 0.0)


def steps_of_rounds(
    known: Mapping[Kind, Array], proposed: Mapping[str, Array], drafts: Mapping[str, DraftFacts], gamma: int
) -> dict[Kind, Array]:
    """Return the times of the steps of rounds, the target's decode step first, by those of engines' steps: [rounds] in ms.

    `proposed` [rounds]: how many tokens a sequence's prompt lookup found in its steps. Of a draft that runs a model, a token
    more takes a `draft` step longer, and what is left of a round is `bookkeeping`.
    """
    plain = known[PLAIN[0], "decode", 1]
    forced = np.column_stack([known[FORCED[0], "verify", tokens] for tokens in range(1, gamma + 2)])
    overhead = forced[:, 0] - plain
    found = {(TARGET, "decode", 1): plain}
    found |= {(TARGET, "verify", tokens): forced[:, tokens - 1] - overhead for tokens in range(2, gamma + 2)}
    for draft, facts in drafts.items():
        if not facts.has_steps:  # a search costs what its step takes beyond a verification of what was found
            verified = [
                float(np.interp(count, range(gamma + 1), row)) for count, row in zip(proposed[draft], forced, strict=True)
            ]
            found[draft, "lookup", 1] = known[draft, "lookup", 1] - verified + overhead
            continue
        drafting = {
            tokens: ms - found[TARGET, "verify", tokens + 1] for (name, _, tokens), ms in known.items() if name == draft
        }
        first, last = min(drafting), max(drafting)
        step = (drafting[last] - drafting[first]) / (last - first) if last > first else drafting[last] / last
        step = np.full(len(plain), np.clip(np.median(step), LEAST_MS, max(np.median(drafting[last]) / last, LEAST_MS)))
        found |= {(draft, "draft", 1): step, (draft, "draft", 2): step}
        found[draft, "bookkeeping", 1] = drafting[last] - last * step
    return {kind: np.maximum(ms, LEAST_MS) for kind, ms in found.items()}


def speculation(options: ProfileOptions, name: str, facts: DraftFacts, gamma: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for a draft of a profile. Raises `EngineFailed` if vLLM has no method for it."""
    if (method := facts.method_in(VLLM)) is None:
        raise no_method(name, facts.kind)
    own = options.drafts[name].own_model
    return vllm_speculation(method, facts.settings, gamma, own.model if own else None, own.revision if own else None)
