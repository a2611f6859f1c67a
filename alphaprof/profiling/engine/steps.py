"""Step times of vLLM, of engines that are processes of their own and live no longer than they are timed.

- `plain` decodes without speculation, as the server does today: all costs are in units of its steps. On a CPU with room for
  two engines it stays, and takes a step before and after every other round: whatever slows the machine down falls on both.
  Whichever takes its turn runs for a while before its steps count, as in a server, which never rests. Without that room
  `plain` runs first and again at the end, half of its rounds each time (docs/decisions/048).
- `forced` verifies tokens of our choosing, proposed at no cost, with the engine's own rejection, scheduling and bookkeeping.
- For each draft one engine with its most and one with its fewest speculative tokens. What a round takes there beyond a
  verification of as many tokens is drafting, with what a round costs besides.
- `path`, where engines with drafts schedule or run the model in another way than `plain`: plain decoding in that way.

What `forced` takes without any proposal beyond `plain` is a cost of speculation that comes once a round: it is a part of
drafting here, and none of verification. Rounds are kept as they are taken, and those of several starts of a command belong
together: each is divided by the plain decoding of its own start (docs/decisions/107).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from alphaprof.config.engines import VLLM, vllm_speculation
from alphaprof.costs.steps import PATH, TARGET
from alphaprof.costs.timing import GO_ROUNDS, LEAST_ROUNDS, autocorrelation, largest_error, round_mixes
from alphaprof.profiling.engine.client import VllmEngine, no_method
from alphaprof.profiling.engine.texts import model_arguments
from alphaprof.profiling.engine.vllm_worker import WARM_S
from alphaprof.profiling.models.memory import free_memory
from alphaprof.profiling.timing.latency import (
    KEY,
    MOST_PREFILLS,
    BudgetSpent,
    Timed,
    cells_of,
    how_sure,
    orders,
    prompt_lengths,
    table_row,
)
from alphaprof.profiling.timing.steppers import NotTimed
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.schema import ENGINE_COLUMNS, LATENCY_COLUMNS, arrow_schema
from alphaprof.stats.estimate import Array

if TYPE_CHECKING:
    from alphaprof.config.options import MeasuredCosts, VllmOptions
    from alphaprof.config.profile import ProfileOptions

Name = tuple[str, int]  # of a draft, and its speculative tokens
PLAIN, FORCED = ("plain", 0), ("forced", 0)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # variable of vLLM
Kind = tuple[str, str, int]  # of a step: model, step and tokens, as in the latency table
Row = dict[str, Any]  # of `ENGINE_COLUMNS`
Cell = tuple[int, int]  # sequences, and tokens of context
READING = 10  # turns of plain steps, in whose time prompts are read
STEPS = 3  # of one kind in a turn, whose mean counts
FIRST_ROUNDS = 3  # of the first engine, which tell how long all take
LONGEST_S = 300  # that an unset budget allows, unless the fewest rounds take longer
PER_TOKEN = 0.1  # of a decode step, what verifying a token more takes at first sight, and a third of what drafting it does
LEAST_CONTEXT = 8
LEAST = 1e-4  # of a difference between two times, in decode steps


class Job(NamedTuple):
    """A kind of step of an engine, and what takes it once, in ms."""

    step: str
    tokens: int
    run: Callable[[], float]


def time_engines(
    options: ProfileOptions,
    engine: VllmOptions,
    target: ModelFacts,
    drafts: Mapping[str, DraftFacts],
    costs: MeasuredCosts,
    say: Callable[[str], None],
    tick: Callable[[float], None],
    known: Sequence[Row] = (),
    keep: Callable[[pa.Table], None] = lambda _: None,
    decoded: Sequence[int] = (),
    drawn: Mapping[str, str] | None = None,
    use: Callable[[Name, VllmEngine, VllmEngine | None], None] | None = None,
) -> Timed:
    """Time the steps of rounds of up to the largest γ of the profile, in one engine after another.

    `known`: rows of earlier starts; those that lack rounds are timed, or all if none does. `keep` takes all rows after each
    engine. `decoded`: gammas of which each has an engine, for `use`, which is called with every engine while it runs, and
    with the plain one that waits beside it; `drawn`: vLLM's settings of drafts that are drawn from q. `tick` is called with
    the share of all time that has passed since. Raises `EngineFailed`, and `NotTimed`.
    """
    gamma = max(options.gammas)
    forced = {"method": "custom_class", "model": "vllm_worker.Forced", "num_speculative_tokens": gamma}
    speculations: dict[Name, dict[str, Any] | None] = {PLAIN: None, FORCED: forced}
    for draft, facts in drafts.items():
        more = dict(drawn or {}) if facts.has_distribution else {}
        fewest = {min(decoded, default=1)} if facts.has_steps else set()
        for each in reversed(facts.lengths(sorted({*fewest, *decoded, gamma}))):
            speculations[draft, each] = speculation(options, draft, facts, each) | more
    timing = EngineTimes(drafts, costs, gamma, options.decision.concurrency, known, say, tick, keep)
    model = model_arguments(options, engine, target)

    @contextlib.contextmanager
    def started(name: Name) -> Iterator[VllmEngine]:
        words = f"{name[0]} of {name[1]} tokens" if name[0] in drafts else name[0]
        say(f"starting vLLM: {words}")
        args, env = timing.paths.get(name, ({}, {}))
        own = engine.model_copy(update={"args": engine.args | args, "env": engine.env | env})
        with contextlib.closing(VllmEngine(own, model, speculations.get(name))) as running:
            begun = time.monotonic()
            running.start()
            timing.start_s = time.monotonic() - begun
            yield running

    def timed(name: Name, running: VllmEngine, beside: VllmEngine | None = None) -> None:
        timing.time(name, running, beside)
        if use is not None:
            use(name, running, beside)

    free = free_memory()
    with started(PLAIN) as plain:
        left = free_memory()
        beside = plain if plain.facts.get("cpu") and left > 2 * (free - left) else None
        timing.plan([name for name in speculations if name != PLAIN], plain, beside is not None, use is not None)
        timed(PLAIN, plain)
        if beside is None:
            plain.close()
        for name in timing.following():
            if beside is not None:
                beside.pause()
            with started(name) as running:
                timed(name, running, beside)
        if beside is not None and use is not None:
            beside.pause(False)
            use(PLAIN, beside, None)
    if beside is None:
        with started(PLAIN) as plain:
            timed(PLAIN, plain)
    return timing.timed()


class EngineTimes:
    """Takes rounds of engines by a plan, keeps them, and works step times out of them. `start_s`: what the last engine took
    to start; `paths`: by name, what vLLM is started with to decode plainly as engines with drafts do.
    """

    def __init__(
        self,
        drafts: Mapping[str, DraftFacts],
        costs: MeasuredCosts,
        gamma: int,
        first: int | None = None,
        known: Sequence[Row] = (),
        say: Callable[[str], None] = lambda _: None,
        tick: Callable[[float], None] = lambda _: None,
        keep: Callable[[pa.Table], None] = lambda _: None,
    ) -> None:
        self._drafts, self._costs, self._gamma = drafts, costs, gamma
        self._say, self._tick, self._keep = say, tick, keep
        self._rows = [dict(row) for row in known]
        self._start = 1 + max((row["start"] for row in known), default=-1)
        self._cells = cells_of(costs, first)
        self._asked: list[Cell] = list(self._cells)  # that this start times
        self._verified = list(range(1, gamma + 2))  # tokens of the verifications that are timed
        self._names: list[Name] = []
        self._context = 0  # of the engine without drafts
        self._call_s = dict.fromkeys(self._cells, 0.0)  # what a turn of plain steps takes
        self._rounds, self._beside, self._closes = costs.repeats, False, True
        self._shares, self._pace = dict[Name, float](), 1.0  # seconds of each engine; what rounds take, by first sight
        self._begun, self._ticked, self.start_s = time.monotonic(), 0.0, 0.0
        self.paths: dict[Name, tuple[dict[str, Any], dict[str, str]]] = {}  # arguments and environment
        self._waits, self._waited_s = dict[VllmEngine, float | None](), 0.0
        self._proposed = list[float]()
        self._readers, self._seeds = set[str](), iter(range(10**9))  # engines that have read prompts

    # What is timed.

    def plan(self, names: Sequence[Name], plain: VllmEngine, beside: bool, all_names: bool) -> None:
        """Choose by the first rounds of `plain` what the budget has time for, and say it. `names`: the other engines;
        `beside`: plain decoding is timed with each of them; `all_names`: none of them may be left out.
        """
        self._context, self._beside, self._closes = int(plain.facts["context"]), beside, not beside
        for cell in self._cells:
            job = self._jobs(PLAIN, cell, self._asking(plain, None))[0]
            for _ in range(FIRST_ROUNDS):  # the first reads prompts besides
                begun = time.monotonic()
                job.run()
                self._call_s[cell] = time.monotonic() - begun
        lacking = {
            (name, cell) for name in names for cell in self._cells if name[0] in self._drafts and self._lacks(name, cell)
        }
        if lacking and not all_names:
            self._asked = [cell for cell in self._asked if any(cell == each for _, each in lacking)]
            names = [name for name in names if name == FORCED or any(name == each for each, _ in lacking)]
        self._names, cells, out = list(names), self._asked, list[str]()
        budget = self._costs.budget
        if budget is not None and self._seconds(GO_ROUNDS) > budget:
            if self._gamma > 2:
                self._verified = [1, 2, self._gamma + 1]
                out.append(
                    f"verifications of {', '.join(map(str, range(3, self._gamma + 1)))} tokens (read between the others)"
                )
            largest = {name[0]: max(n for d, n in names if d == name[0]) for name in names}
            if not all_names and self._seconds(GO_ROUNDS) > budget:
                self._names = [name for name in names if name[1] == largest[name[0]]]
                out += [f"{draft} of {n} tokens" for draft, n in names if n < largest[draft]]
            while len(cells) > 1 and self._seconds(GO_ROUNDS) > budget:
                out.append(self._cells[cells.pop()])
            while not all_names and len(self._names) > 2 and self._seconds(GO_ROUNDS) > budget:
                out.append(self._names.pop()[0])
        whole = self._seconds(1)
        given = budget if budget is not None else max(LONGEST_S, self._seconds(GO_ROUNDS))
        self._rounds = int(np.clip(2 * given / whole - 1, GO_ROUNDS, self._costs.repeats))  # 1 of them warms up
        self._shares = {name: given * self._seconds(1, [name]) / whole for name in [*self._names, PLAIN]}
        starts = (len(self._names) + (not beside)) * self.start_s
        words = f"timing takes about {_duration(starts + self._seconds(self._rounds))}"
        words += f": {_duration(starts)} to start {len(self._names) + (not beside)} engines, {self._rounds} rounds of each"
        self._say(words if not out else f"{words}; costs.budget ({budget:g} s) has no time for {', '.join(out)}")

    def _seconds(self, rounds: int, names: Sequence[Name] | None = None) -> float:
        """Return the seconds that `rounds` rounds of the engines `names` take, by the first rounds of plain decoding. None:
        all engines of the plan.
        """
        turns, rests = 0.0, 0
        for name in [*self._names, PLAIN] if names is None else names:
            each = 1 + 4 * PER_TOKEN * name[1] * (name[0] in self._drafts)
            if name == FORCED:
                each = sum(1 + PER_TOKEN * (tokens - 1) for tokens in self._verified)
            turns += (0 if self._beside else 3) if name == PLAIN else each + 2 * self._beside
            rests += 2 * self._beside * (name != PLAIN)  # of this engine and of the plain one
        return (1 + rounds) * sum(turns * self._call_s[cell] + rests * WARM_S for cell in self._asked) + 1e-9

    def following(self) -> Iterator[Name]:
        """Yield the engines that come after the first one, with plain decoding on each path that they turn out to take."""
        for name in tuple(self._names):
            self._names.remove(name)
            yield name
            path = self._path(name[0])
            settings = {"async_scheduling": path[0]}, {RUNNER: str(path[1] - 1)}
            if name != FORCED and path != self._path(PLAIN[0]) and settings not in self.paths.values():
                self.paths[key := (PATH, len(self.paths))] = settings
                yield key

    def _path(self, engine: str) -> tuple[bool, int]:
        """Return whether an engine schedules asynchronously, and by which version of vLLM's runner."""
        row = next(row for row in reversed(self._rows) if row["engine"] == engine)
        return row["asynchronous"], row["runner"]

    def _lacks(self, name: Name, cell: Cell) -> bool:
        """Return whether no earlier start has enough rounds of an engine."""
        place = (*name, cell[0], self._held(cell[1]))
        return not any(
            (row["engine"], row["gamma"], row["batch"], row["context"]) == place
            and len(row["rounds_ms"]) >= LEAST_ROUNDS
            and len(_plain(row, self._rows)) >= LEAST_ROUNDS
            for row in self._rows
        )

    # Rounds of an engine.

    def time(self, name: Name, engine: VllmEngine, beside: VllmEngine | None = None) -> None:
        """Time the steps of an engine that runs, with plain decoding by `beside` before and after each round. `PLAIN` comes
        first. Raises `EngineFailed`, and `NotTimed` if vLLM's context has no room.
        """
        if (context := int(engine.facts["context"])) < self._context:
            rooms = f"{context} tokens with {name[0]}, and for {self._context} without"
            raise NotTimed(f"vLLM has room for {rooms}: set max_model_len in vllm.args")
        facts = {"asynchronous": bool(engine.facts.get("async_scheduling")), "runner": engine.facts.get("runner", 1)}
        about = {"start": self._start, "engine": name[0], "gamma": name[1], **facts}
        ask, plain = self._asking(engine, beside), self._asking(beside, engine) if beside is not None else None
        done, begun, turns = len(self._rows), time.monotonic(), 2 if name == PLAIN and not self._beside else 1
        self._closes &= name != PLAIN or PLAIN[0] not in self._readers
        expected, whole_s = 0.0, sum(self._call_s[cell] for cell in self._asked) + 1e-9
        self._waited_s, self._until = 0.0, begun + self._pace * self._seconds(self._rounds, [name])
        for cell in self._asked:
            if not (jobs := self._jobs(name, cell, ask)):
                continue
            around = self._jobs(PLAIN, cell, plain) if plain is not None else []
            most = FIRST_ROUNDS if name == PLAIN and self._beside else -(-self._costs.repeats // turns)
            seconds = self._shares.get(name, 0.0) * self._call_s[cell] / whole_s / turns
            times = self._taken([*around, *jobs, *around], most, GO_ROUNDS // turns, seconds)
            expected += self._seconds(len(times), [name]) * self._call_s[cell] / whole_s / turns
            mine, both = times[:, len(around) : len(around) + len(jobs)], times[:, [0, -1]].mean(1) if around else None
            if name == PLAIN:  # three times in a round, of which the median is surer than one
                jobs, mine = jobs[:1], np.median(mine, axis=1, keepdims=True)
            for job, column in zip(jobs, mine.T, strict=True):
                found = self._proposed[-len(column) :] if job.step == "lookup" else None
                place = {"step": job.step, "tokens": job.tokens, "batch": cell[0], "context": self._held(cell[1])}
                self._rows.append(about | place | {"rounds_ms": column, "plain_ms": both, "proposed": found})
        reading = name == PLAIN or (name[0] in self._drafts and self._drafts[name[0]].has_steps)
        if reading and name[0] not in {*self._readers, *dict(self._names)}:  # a draft's last engine is enough
            self._readers.add(name[0])
            for length in prompt_lengths([min(asked, self._context - 2) for asked in self._costs.context]):
                job = Job("prefill", length, partial(_read, ask, length, self._seeds))
                ms = self._taken([job], MOST_PREFILLS, 1, READING * self._call_s[self._asked[0]])[:, 0]
                place = {"step": "prefill", "tokens": length, "batch": 1, "context": 0}
                self._rows.append(about | place | {"rounds_ms": ms, "plain_ms": None, "proposed": None})
        spent = max(time.monotonic() - begun, 1e-9)
        self._pace, waiting = spent / expected if expected else self._pace, self._waited_s / spent
        for row in self._rows[done:]:
            row["waiting"] = None if math.isnan(waiting) else min(waiting, 1.0)
        self._keep(self.kept())

    def kept(self) -> pa.Table:
        """Return all rounds of this start and those before it."""
        return pa.Table.from_pylist(self._rows, schema=arrow_schema(ENGINE_COLUMNS))

    def _asking(self, engine: VllmEngine, other: VllmEngine | None) -> Callable[..., dict[str, float]]:
        """Return how an engine is asked, while the `other` one is stopped."""

        def ask(do: str, **command: Any) -> dict[str, float]:
            if other is not None:
                other.pause()
                engine.pause(False)
            answer: dict[str, Any] = engine.ask(do, **command)
            before, now = self._waits.get(engine, engine.facts["waited_s"]), answer["waited_s"]
            self._waited_s += math.nan if None in (before, now) else now - before  # None: not known
            self._waits[engine] = now
            return answer

        return ask

    def _taken(self, jobs: Sequence[Job], most: int, least: int, seconds: float) -> Array:
        """Return times in ms, [rounds, jobs], of as many rounds as some seconds have time for, after one to warm up."""
        times, begun = list[Array](), time.monotonic()
        for turn, order in enumerate(orders([[job] for job in jobs])):
            if len(times) >= most or (len(times) >= least and time.monotonic() - begun > seconds):
                break
            ms = np.empty(len(jobs))
            for place, job in order:
                ms[place] = job.run()
                self._progress()
            times += [ms] * (turn > 0)
        return np.array(times).reshape(len(times), len(jobs))

    def _progress(self) -> None:
        """Say which share of all time has passed: what is left is the rest of this engine's, and all of the others'."""
        now = time.monotonic()
        ahead = [*self._names, *([PLAIN] * self._closes)]
        left = max(self._until - now, 0.0) + len(ahead) * self.start_s + self._pace * self._seconds(self._rounds, ahead)
        share = max((now - self._begun) / max(now - self._begun + left, 1e-9), self._ticked)
        self._tick(share - self._ticked)
        self._ticked = share

    def _held(self, context: int) -> int:
        """Return the tokens that sequences hold for a context that was asked for."""
        known = min(context, self._context - 4 * (self._gamma + 1))
        if known < LEAST_CONTEXT:
            raise NotTimed(f"vLLM's context of {self._context} tokens is too short for rounds of {self._gamma} drafts")
        return known

    def _jobs(self, name: Name, cell: Cell, ask: Callable[..., dict[str, float]]) -> list[Job]:
        """Return the kinds of steps of an engine in one of its rounds."""
        batch, context = cell[0], self._held(cell[1])

        def step(kind: str, tokens: int, proposed: int | None) -> Job:
            """A step that verifies what was `proposed`; None: what prompt lookup finds."""

            def run() -> float:
                found = ask("steps", batch=batch, context=context, proposed=proposed, count=STEPS)
                self._proposed += [found["proposed"]] * (proposed is None)
                return found["ms"]

            return Job(kind, tokens, run)

        if name[0] in (PLAIN[0], PATH):
            return [step("decode", 1, 0)] * (3 if name == PLAIN and not self._beside else 1)
        if name == FORCED:
            return [step("verify", tokens, tokens - 1) for tokens in self._verified]
        if self._drafts[name[0]].has_steps:
            return [step("draft", name[1], name[1])]
        return [step("lookup", 1, None)] if name[1] == self._gamma else []

    # What follows from them.

    def timed(self) -> Timed:
        """Return the latency table of all rounds. Raises `BudgetSpent` if there are not enough."""
        rows, late = dict[tuple[Any, ...], dict[str, Any]](), list[str]()
        for (batch, asked), place in self._cells.items():
            context = self._held(asked)
            here = [row for row in self._rows if (row["batch"], row["context"]) == (batch, context)]
            steps = pooled(here, self._drafts, self._gamma)
            without = [draft for draft in self._drafts if not any(model == draft for model, _, _ in steps)]
            if without:
                late.append(f"{place}: no time for {', '.join(without)}")
            if len(without) == len(self._drafts) > 0 or not steps:
                continue
            decode, rounds = steps[TARGET, "decode", 1], min(map(len, steps.values()))
            times = np.column_stack([each[:rounds] for each in steps.values()])
            r = autocorrelation(zip((kind for _, kind, _ in steps), times.T, strict=True))
            mixes = round_mixes(list(steps), self._gamma)
            self._say(f"{place}: {rounds} rounds, costs {how_sure(largest_error(times, mixes, r))}")
            for kind, each in steps.items():
                ms = float(np.median(decode) * np.median(each / decode[: len(each)]))
                row = table_row((*kind, batch, context), ms, each, r)
                rows[tuple(row[name] for name in KEY)] = row  # vLLM may have room for one of several contexts: the last
        self._tick(1 - self._ticked)
        if not rows:
            raise BudgetSpent("; ".join(late))
        ordered = sorted(rows.values(), key=lambda row: int(row["batch"]))
        table = pa.Table.from_pylist([*ordered, *prompts_read(self._rows)], schema=arrow_schema(LATENCY_COLUMNS))
        spent = [(row["waiting"], float(np.sum(row["rounds_ms"]))) for row in self._rows]
        waits = [(waiting * ms, ms) for waiting, ms in spent if waiting is not None]
        waiting = sum(each for each, _ in waits) / sum(ms for _, ms in waits) if waits else None
        return Timed(table, (), tuple(late), waiting, engines=self.kept())


def _read(ask: Callable[..., dict[str, float]], length: int, seeds: Iterator[int]) -> float:
    return ask("prefill", length=length, seed=next(seeds))["ms"]


def _plain(row: Row, rows: Iterable[Row]) -> Array:
    """Return what plain decoding took in the rounds of a row: by its side, or both turns of its start, woven together."""
    if row["plain_ms"] is not None:
        return np.asarray(row["plain_ms"])
    place = (PLAIN[0], "decode", row["start"], row["batch"], row["context"])
    names = ("engine", "step", "start", "batch", "context")
    turns = [each["rounds_ms"] for each in rows if tuple(each[name] for name in names) == place]
    if len(turns) < 2:
        return np.empty(0)
    rounds = min(map(len, turns))
    return np.column_stack([turn[:rounds] for turn in turns[:2]]).ravel()


def pooled(rows: Sequence[Row], drafts: Mapping[str, DraftFacts], gamma: int) -> dict[Kind, Array]:
    """Return the times of the steps of rounds in ms, [rounds] each, the target's decode step first, by the rows of one batch
    size and context. Round i of every step belongs to round i of the decode step; a draft may have fewer.

    Times are divided by plain decoding of their own rounds, or of their own start, and multiplied by that of `forced`.
    """
    found, decodes = defaultdict[Kind, list[Array]](list), list[Array]()
    for start in dict.fromkeys(row["start"] for row in rows):
        ratios, proposed = defaultdict[str, dict[Kind, Array]](dict), dict[str, Array]()
        mine = [row for row in rows if row["start"] == start and row["engine"] != PLAIN[0]]
        for row in mine:
            plain, ms = _plain(row, rows), np.asarray(row["rounds_ms"])
            rounds = min(len(plain), len(ms))
            engine = row["engine"] if row["engine"] != PATH else f"{PATH}{row['gamma']}"
            ratios[engine][row["engine"], row["step"], row["tokens"]] = ms[:rounds] / plain[:rounds]
            if row["proposed"] is not None:
                proposed[engine] = np.asarray(row["proposed"])
        for draft in ("", *drafts):
            known = ratios[FORCED[0]] | ratios.get(draft, {})
            rounds = min(map(len, known.values()), default=0)
            if rounds < LEAST_ROUNDS or (draft and draft not in ratios):
                continue
            if not draft:
                decodes.append(next(_plain(row, rows)[:rounds] for row in mine if row["engine"] == FORCED[0]))
            known = {(PLAIN[0], "decode", 1): np.ones(rounds)} | {kind: each[:rounds] for kind, each in known.items()}
            searched = {draft: proposed[draft][:rounds]} if draft in proposed else {}
            steps = steps_of_rounds(known, searched, {draft: drafts[draft]} if draft else {}, gamma)
            for row in mine:
                if draft and row["engine"] == PATH and _alike(row, draft, mine):
                    steps[draft, PATH, 1] = ratios[f"{PATH}{row['gamma']}"][PATH, "decode", 1]
            for kind, each in steps.items():
                if (kind[0] == TARGET) != bool(draft):
                    found[kind].append(each)
    decode = np.concatenate([*decodes, np.empty(0)])
    pool = {kind: np.concatenate(each)[: len(decode)] for kind, each in found.items()}
    return {kind: each * decode[: len(each)] for kind, each in pool.items()}


def _alike(row: Row, draft: str, rows: Iterable[Row]) -> bool:
    """Return whether an engine took the path of a draft's."""
    return any(
        (each["asynchronous"], each["runner"]) == (row["asynchronous"], row["runner"])
        for each in rows
        if each["engine"] == draft
    )


def prompts_read(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the rows of prefills: of a draft, what its engine takes longer than the plain one of its start."""
    read = {
        (row["engine"], row["tokens"], row["start"]): np.asarray(row["rounds_ms"])
        for row in rows
        if row["step"] == "prefill"
    }
    latest = {(name, length): (ms, read[PLAIN[0], length, start]) for (name, length, start), ms in read.items()}
    for (name, length), (ms, plain) in latest.items():
        rounds = min(len(ms), len(plain))
        more = ms if name == PLAIN[0] else np.maximum(ms[:rounds] - plain[:rounds], 0.0)
        yield table_row((TARGET if name == PLAIN[0] else name, "prefill", length, 1, 0), float(np.median(more)), more, 0.0)


def steps_of_rounds(
    known: Mapping[Kind, Array], proposed: Mapping[str, Array], drafts: Mapping[str, DraftFacts], gamma: int
) -> dict[Kind, Array]:
    """Return the times of the steps of rounds, the target's decode step first, by those of engines' steps: [rounds] in ms.
    Verifications that were not timed lie between their neighbors.

    `proposed` [rounds]: how many tokens a sequence's prompt lookup found in its steps. Of a draft that runs a model, a token
    more takes a `draft` step longer, and what is left of a round is `bookkeeping`.
    """
    plain = known[PLAIN[0], "decode", 1]
    timed = {tokens: ms for (name, _, tokens), ms in known.items() if name == FORCED[0]}
    rows = zip(*(timed[tokens] for tokens in sorted(timed)), strict=True)
    forced = np.array([np.interp(range(1, gamma + 2), sorted(timed), row) for row in rows])
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
        step = np.full(len(plain), np.clip(np.median(step), LEAST, max(np.median(drafting[last]) / last, LEAST)))
        found |= {(draft, "draft", 1): step, (draft, "draft", 2): step}
        found[draft, "bookkeeping", 1] = drafting[last] - last * step
    return {kind: np.maximum(ms, LEAST) for kind, ms in found.items()}


def speculation(options: ProfileOptions, name: str, facts: DraftFacts, gamma: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for a draft of a profile. Raises `EngineFailed` if vLLM has no method for it."""
    if (method := facts.method_in(VLLM)) is None:
        raise no_method(name, facts.kind)
    own = options.drafts[name].own_model
    return vllm_speculation(method, facts.settings, gamma, own.model if own else None, own.revision if own else None)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
