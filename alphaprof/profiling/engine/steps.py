"""Step times of vLLM: engines with and without speculation live side by side and take turns, so that drift cancels.

- `plain` decodes without speculation.
- `forced` verifies tokens of our choosing, proposed at no cost, with the engine's own rejection, scheduling and bookkeeping.
- For each draft one engine with its fewest and one with its most speculative tokens. What a round takes there beyond a
  verification of as many tokens is drafting, with what a round costs besides.

What `forced` takes without any proposal beyond `plain` is a cost of speculation that comes once a round: it is a part of
drafting here, and none of verification.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaprof.costs.steps import TARGET
from alphaprof.errors import EngineFailed
from alphaprof.profiling.engine.client import VllmEngine
from alphaprof.profiling.engine.texts import model_arguments
from alphaprof.profiling.timing.latency import Array, prompt_lengths
from alphaprof.profiling.timing.steppers import NotTimed, TimedStep
from alphaprof.run.manifest import DraftFacts, ModelFacts

if TYPE_CHECKING:
    from alphaprof.config.options import EngineOptions
    from alphaprof.config.profile import ProfileOptions

PLAIN, FORCED = ("plain", 0), ("forced", 0)
Name = tuple[str, int]  # of a draft, and its speculative tokens
MODE = "vllm"
STEPS = 3  # of one kind in a turn, whose median counts
LEAST_CONTEXT = 8
LEAST_MS = 1e-3  # of a difference between two times


class EngineSteps:
    """The steps of vLLM's engines as `profiling.timing.latency` times them: a `Timeable`."""

    def __init__(self, engines: Mapping[Name, VllmEngine], drafts: Mapping[str, DraftFacts], gamma: int) -> None:
        self.engines, self.drafts, self.gamma = engines, drafts, gamma
        self._seeds = iter(range(10**9))
        self._waited: dict[Name, float] = {}

    @property
    def _context(self) -> int:
        return min(int(engine.facts["context"]) for engine in self.engines.values())

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        options: ProfileOptions,
        engine: EngineOptions,
        target: ModelFacts,
        drafts: Mapping[str, DraftFacts],
        gamma: int,
        say: Callable[[str], None],
        decoded: Sequence[int] = (),
        drawn: Mapping[str, str] | None = None,
    ) -> Iterator[EngineSteps]:
        """Start the engines for rounds of up to `gamma` drafts, and end them with the block; `decoded`: gammas that shall
        decode too; `drawn`: vLLM's settings of drafts that are drawn from q. Raises `EngineFailed`.
        """
        forced = {"method": "custom_class", "model": "vllm_worker.Forced", "num_speculative_tokens": gamma}
        speculations: dict[Name, dict[str, Any] | None] = {PLAIN: None, FORCED: forced}
        for draft, facts in drafts.items():
            more = dict(drawn or {}) if facts.has_distribution else {}
            fewest = {min(decoded, default=1)} if facts.has_steps else set()
            for each in facts.lengths(sorted({*fewest, *decoded, gamma})):
                speculations[draft, each] = speculation(options, draft, facts, each) | more
        model, engines = model_arguments(options, engine, target), dict[Name, VllmEngine]()
        with contextlib.ExitStack() as stack:
            for place, (name, asked) in enumerate(speculations.items(), 1):
                words = f"{name[0]} of {name[1]} tokens" if name[1] else name[0]
                say(f"starting vLLM {place} of {len(speculations)} ({words})")
                engines[name] = stack.enter_context(contextlib.closing(VllmEngine(engine, model, asked, len(speculations))))
                engines[name].start()
            yield cls(engines, drafts, gamma)

    def cell(self, batch: int, context: int) -> list[list[TimedStep]]:
        """As of `Timeable`: steps of the engines, of which `derived` makes those of rounds. Raises `NotTimed` if vLLM's own
        context has no room.
        """
        known = min(context, self._context - 4 * (self.gamma + 1))
        if known < LEAST_CONTEXT:
            raise NotTimed(f"vLLM's context of {self._context} tokens is too short for rounds of {self.gamma} drafts")

        def step(engine: Name, kind: str, tokens: int, proposed: int) -> list[TimedStep]:
            run = partial(self._step, engine, batch, known, proposed)
            return [TimedStep(engine[0], kind, tokens, batch, known, MODE, run)]

        blocks = [step(PLAIN, "decode", 1, 0)]
        blocks += [step(FORCED, "verify", tokens, tokens - 1) for tokens in range(1, self.gamma + 2)]
        for draft, gamma in self.engines:
            if draft in self.drafts and self.drafts[draft].has_steps:
                blocks.append(step((draft, gamma), "draft", gamma, gamma))
            elif draft in self.drafts and gamma == self.gamma:
                run = partial(self._search, (draft, gamma), batch, known)
                blocks.append([TimedStep(draft, "lookup", 1, batch, known, MODE, run)])
        return blocks

    def derived(self, jobs: Sequence[TimedStep], times: Array) -> tuple[list[TimedStep], Array]:
        """As of `Timeable`: what the target and each draft take in a round. Of a draft, a token more takes a `draft` step
        longer, and what is left of a round is `bookkeeping`.
        """
        known = {(job.model, job.step, job.tokens): column for job, column in zip(jobs, times.T, strict=True)}
        plain, overhead = known[PLAIN[0], "decode", 1], known[FORCED[0], "verify", 1] - known[PLAIN[0], "decode", 1]
        verified = {tokens: known[FORCED[0], "verify", tokens] - overhead for tokens in range(2, self.gamma + 2)}
        found = {(TARGET, "decode", 1): plain} | {(TARGET, "verify", tokens): ms for tokens, ms in verified.items()}
        for draft, facts in self.drafts.items():
            if not facts.has_steps:
                found[draft, "lookup", 1] = known[draft, "lookup", 1] - plain
                continue
            gammas = [tokens for model, _, tokens in known if model == draft]
            first, last = min(gammas), max(gammas)
            drafting = {gamma: known[draft, "draft", gamma] - verified[gamma + 1] for gamma in (first, last)}
            step = (drafting[last] - drafting[first]) / (last - first) if last > first else drafting[last] / last
            step = np.full(len(times), np.clip(np.median(step), LEAST_MS, max(np.median(drafting[last]) / last, LEAST_MS)))
            found |= {(draft, "draft", 1): step, (draft, "draft", 2): step}
            found[draft, "bookkeeping", 1] = drafting[last] - last * step
        here = jobs[0]
        rows = [dataclasses.replace(here, model=model, step=kind, tokens=tokens) for model, kind, tokens in found]
        return rows, np.maximum(np.column_stack(list(found.values())), LEAST_MS)

    def prefills(self, contexts: Sequence[int]) -> Iterator[TimedStep]:
        """As of `Timeable`: of a draft, what its engine takes longer than the plain one."""
        for length in prompt_lengths([min(context, self._context - 2) for context in contexts]):
            yield TimedStep("target", "prefill", length, 1, 0, MODE, partial(self._prefill, PLAIN, length))
            for name, facts in self.drafts.items():
                if facts.has_steps:
                    engine = next(each for each in self.engines if each[0] == name)
                    yield TimedStep(name, "prefill", length, 1, 0, MODE, partial(self._more, engine, length))

    def waited_s(self) -> float:
        """As of `Timeable`, of all engines since they were started: one works at a time, so that this is a thread's time."""
        return sum(self._waited.values()) if self._waited else 0.0

    def _ask(self, name: Name, do: str, **command: Any) -> dict[str, float]:
        answer: dict[str, Any] = self.engines[name].ask(do, **command)
        started, now = self.engines[name].facts["waited_s"], answer["waited_s"]  # None: not known
        self._waited[name] = math.nan if now is None or started is None else now - started
        return answer

    def _step(self, name: Name, batch: int, context: int, proposed: int) -> float:
        """Return seconds of a step that verifies what was `proposed`."""
        return self._ask(name, "steps", batch=batch, context=context, proposed=proposed, count=STEPS)["ms"] / 1e3

    def _search(self, name: Name, batch: int, context: int) -> float:
        """Return seconds of a step that searches and verifies nothing: one that verifies what was found, less its
        verification.
        """
        found = self._ask(name, "steps", batch=batch, context=context, proposed=None, count=STEPS)
        counts = sorted({0, math.floor(found["proposed"]), math.ceil(found["proposed"])})
        forced = [self._step(FORCED, batch, context, count) for count in counts]
        return found["ms"] / 1e3 - float(np.interp(found["proposed"], counts, forced)) + forced[0]

    def _prefill(self, name: Name, length: int) -> float:
        return self._ask(name, "prefill", length=length, seed=next(self._seeds))["ms"] / 1e3

    def _more(self, name: Name, length: int) -> float:
        return max(self._prefill(name, length) - self._prefill(PLAIN, length), 0.0)


def speculation(options: ProfileOptions, name: str, facts: DraftFacts, gamma: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for a draft of a profile. Raises `EngineFailed` if vLLM has no method for it."""
    if facts.engine_method is None:
        hint = "leave this draft out, or take its step times elsewhere (docs/costs.md)"
        raise EngineFailed(f"vLLM has no method for draft {name} of kind {facts.kind}", hint)
    own = options.drafts[name].own_model
    return facts.vllm_speculation(gamma, own.model if own else None, own.revision if own else None)
