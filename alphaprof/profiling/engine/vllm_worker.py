"""One vLLM engine in a process of its own, which runs in the user's vLLM environment and imports nothing of alphaprof.

`python vllm_worker.py SETTINGS`, a JSON object with `engine` (arguments of vLLM's EngineArgs) and `served` (words of a
server's command line, which count where `engine` is silent). Commands come on stdin and answers go to stdout, a JSON line
each; vLLM's own output goes to stderr. The engine is stepped here: every step has a time.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

FORCED = "ALPHAPROF_FORCED_DRAFTS"  # names a file whose first byte is how many tokens `Forced` proposes
JUNK = 3  # the first token id that it proposes
WARM = 3  # first steps that do not count: slower than steady ones, and the very first verifies what was proposed before
RESTED_S, WARM_S = 0.02, 0.3  # an engine that rested for longer than the one takes steps for the other that do not count
MOST_TURNS = 20  # steps for each that is timed
ZERO = {"wall_ms": 0.0, "emitted": 0}
LEAST_SLACK = 8  # tokens by which sequences whose steps are timed may leave their context, at least
SCHEDSTAT = "/proc/{}/schedstat"  # of Linux: on its second place, nanoseconds without a processor
MEMORY = 0.9  # of a GPU
OTHERWISE = ("model", "served_model_name", "speculative_config", "disable_log_stats", "per_request_spec_decode_metrics")


class Forced:
    """A drafter of vLLM (`method: custom_class`) that costs nothing: it proposes as many tokens as the caller asks for.
    Asked through a file, since with tensor parallelism it lives in other processes.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._told = _shared_byte()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return the proposals of each sequence that has a new token."""
        count = min(self._told[0], self._most)
        return [list(range(JUNK, JUNK + count)) if new else [] for new in sampled_token_ids]


def _shared_byte() -> mmap.mmap:
    with open(os.environ[FORCED], "r+b") as file:
        return mmap.mmap(file.fileno(), 1)


class SteppedEngine:
    """A vLLM engine, and the sequences that it holds while steps are timed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import EngineArgs, SamplingParams
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.metrics.loggers import StatLoggerBase

        self.sampling = SamplingParams
        last: list[Any] = []

        class Recorder(StatLoggerBase):  # type: ignore[misc]
            """Keep what vLLM says of its last step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                last[:] = [scheduler_stats, iteration_stats]

            def log_engine_initialized(self) -> None:
                pass

        self._last = last
        asked: dict[str, Any] = {"gpu_memory_utilization": MEMORY}
        asked |= {"disable_log_stats": False, "enable_logging_iteration_details": True}
        asked |= _served_arguments(settings.get("served", ())) | settings["engine"]
        self.cpu = current_platform.is_cpu()
        if self.cpu:  # as a server does, which binds its threads to cores
            asked.setdefault("distributed_executor_backend", "mp")
        self.engine = LLMEngine.from_engine_args(EngineArgs(**asked), stat_loggers=[Recorder])
        self.names = iter(range(10**9))
        self.count = _shared_byte()
        self.held: tuple[int, int] = (0, 0)  # sequences whose steps are timed, and their context
        self.waits = _waits()  # at first
        self.grown, self.slack = 0.0, 0  # tokens that they have gained since they were read, and how many they may
        self.stepped = 0.0  # when the last step ended

    def facts(self) -> dict[str, Any]:
        """Return what the engine is, and for how long it has waited for a processor so far."""
        every = self.engine.vllm_config
        config, scheduling = every.model_config, every.scheduler_config
        known = {"context": config.max_model_len, "vocabulary": config.get_vocab_size(), "waited_s": self.waited_s()}
        known |= {"cpu": self.cpu, "runner": 2 if getattr(every, "use_v2_model_runner", False) else 1}
        return known | {"async_scheduling": bool(getattr(scheduling, "async_scheduling", False))}

    def waited_s(self) -> float | None:
        """Return for how many seconds the process of this engine that waited most was ready without a processor; None: not
        known.
        """
        now = _waits()
        return max(now[place] - self.waits.get(place, 0) for place in now) / 1e9 if now else None

    def add(self, ids: Sequence[int], max_tokens: int, **sampling: Any) -> str:
        """Hand a request to the engine; its name."""
        name = str(next(self.names))
        params = self.sampling(**{"temperature": 0.0, "max_tokens": max_tokens, "detokenize": False} | sampling)
        self.engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
        return name

    def step(self) -> tuple[list[Any], dict[str, Any]]:
        """Take an engine step: its outputs, and its time in ms with what it ran: `prefilling` and `decoding` sequences,
        `tokens` that the decoding ones ran over, `emitted` ones.
        """
        self._last.clear()
        start = time.perf_counter()
        outputs = self.engine.step()
        self.stepped = time.perf_counter()
        stats, emitted = self._last or (None, None)
        ran = stats.iteration_details if stats else None
        return outputs, {
            "wall_ms": 1e3 * (self.stepped - start),
            "prefilling": ran.num_ctx_requests if ran else 0,
            "decoding": ran.num_generation_requests if ran else 0,
            "tokens": ran.num_generation_tokens if ran else 0,
            "emitted": emitted.num_generation_tokens if emitted else 0,
        }

    def write(self, prompts: Sequence[dict[str, Any]], concurrency: int) -> Iterator[dict[str, Any]]:
        """Yield the text of every prompt (`ids`, `max_tokens`, sampling settings) as it ends, at most `concurrency` at a
        time: its `place` among the prompts, `ids`, how many `rounds` wrote them after the first, and of rounds with a
        proposal the `accepted` and `drafted` tokens. Steps that decode `concurrency` sequences and read no prompt are
        shared out among these: `wall_ms`, `emitted` tokens.
        """
        self.release()
        self.count[0] = 0
        waiting, running = list(enumerate(prompts)), dict[str, dict[str, Any]]()
        concurrency = min(concurrency, len(prompts))
        while waiting or running:
            while waiting and len(running) < concurrency:
                place, prompt = waiting.pop(0)
                running[self.add(**prompt)] = {"place": place, "known": 0, "rounds": 0, **ZERO}
            outputs, taken = self.step()
            counted = not taken["prefilling"] and taken["decoding"] == concurrency
            for output in outputs:
                each = running[output.request_id]
                known, each["known"] = each["known"], len(output.outputs[0].token_ids)
                each["emitted"] += each["known"] - known if counted else 0
                each["rounds"] += 0 < known < each["known"]
            for each in running.values() if counted else ():
                each["wall_ms"] += taken["wall_ms"] / concurrency
            for output in outputs:
                if output.finished:
                    yield running.pop(output.request_id) | _answer(output)

    def steps(self, batch: int, context: int, proposed: int | None, count: int) -> dict[str, Any]:
        """Take `count` steps of `batch` sequences that hold about `context` tokens, in each of which every sequence verifies
        as many tokens as `proposed`: forced ones, or those of the engine's own drafter; None: whatever this one proposes.
        Their mean time in ms (a server pays slow ones too), the tokens `proposed` per sequence, and the seconds for which
        the engine has waited for a processor so far.
        """
        taken: list[tuple[float, float]] = []
        begun = time.perf_counter()
        rested = begun - self.stepped > RESTED_S
        while rested and time.perf_counter() - begun < WARM_S:  # a CPU's first steps take up to 25% longer
            self._step_of(batch, context, proposed)
        for turn in range(MOST_TURNS * count):
            step = self._step_of(batch, context, proposed)
            if turn >= WARM and proposed in (None, step["tokens"] / batch - 1):
                taken.append((step["wall_ms"], step["tokens"] / batch - 1))
            elif turn % (2 * WARM) == 2 * WARM - 1 and not taken:
                self.held = (0, 0)  # other sequences, of which a drafter may propose as many
            if len(taken) == count:
                ms, verified = zip(*taken, strict=True)
                return {"ms": statistics.mean(ms), "proposed": statistics.mean(verified), "waited_s": self.waited_s()}
        raise RuntimeError(f"{batch} sequences of {context} tokens with {proposed} drafts each never ran together")

    def prefill(self, length: int, seed: int) -> dict[str, Any]:
        """Take the steps that read a prompt of random tokens: their time in ms."""
        self.release()
        self.count[0] = 0
        self.add(self._random(length, random.Random(seed)), 1)  # noqa: S311
        ms = 0.0
        while self.engine.has_unfinished_requests():
            ms += self.step()[1]["wall_ms"]
        return {"ms": ms, "waited_s": self.waited_s()}

    def _random(self, length: int, rng: random.Random) -> list[int]:
        most = min(20_000, self.facts()["vocabulary"] - 1)
        return [rng.randrange(10, most) for _ in range(length)]

    def _step_of(self, batch: int, context: int, proposed: int | None) -> dict[str, Any]:
        """Return the next step that decodes `batch` sequences of about `context` tokens."""
        if self.held != (batch, context) or self.grown > 2 * self.slack:
            self._hold(batch, context)
        self.count[0] = proposed or 0
        return self._decoded()

    def _hold(self, batch: int, context: int) -> None:
        """Have the engine read `batch` sequences of random tokens, which then grow around `context`."""
        self.release()
        room, rng = self.facts()["context"] - 1 - context, random.Random(next(self.names))  # noqa: S311
        self.slack = max(1, min(max(LEAST_SLACK, context // 4), room // 3))
        for _ in range(batch):
            ids = self._random(max(context - self.slack, 1), rng)
            self.add(ids, self.facts()["context"] - len(ids), ignore_eos=True)
        self.held, self.grown = (batch, context), 0.0
        self.count[0] = 0
        self._decoded()

    def _decoded(self) -> dict[str, Any]:
        """Return the next step that decodes all of the held sequences and reads no prompt."""
        while self.engine.has_unfinished_requests():
            _, taken = self.step()
            self.grown += taken["emitted"] / self.held[0]
            if not taken["prefilling"] and taken["decoding"] == self.held[0]:
                return taken
        raise RuntimeError(f"{self.held[0]} sequences of {self.held[1]} tokens do not fit into the KV cache together")

    def release(self) -> None:
        """Take out of the engine what it holds."""
        if names := list(self.engine.output_processor.request_states):
            self.engine.abort_request(names, internal=True)
            self.engine.step()
        self.held = (0, 0)


def _served_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return what a server's command line sets of the arguments of an engine, as vLLM reads it."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    known, usual = parser.parse_known_args(list(words))[0], parser.parse_args([])
    given = {name: value for name, value in vars(known).items() if value != getattr(usual, name)}
    return {name: value for name, value in given.items() if name not in OTHERWISE}


def _waits() -> dict[str, int]:
    """Return for how many nanoseconds this thread, and the first one of each process that runs the model for it, have been
    ready to run without a processor, by place; empty if that is not known.
    """
    waits: dict[str, int] = {}
    try:
        for place in ("thread-self", *(str(child.pid) for child in multiprocessing.active_children())):
            with open(SCHEDSTAT.format(place)) as file:
                ran, waits[place], _ = map(int, file.read().split())
    except OSError:
        return {}
    return waits if ran else {}


def _answer(output: Any) -> dict[str, Any]:
    """Return a finished request: its token ids, and what its rounds accepted and drafted."""
    (text,) = output.outputs
    metrics = getattr(text, "spec_decode_metrics", None)
    rounds = metrics.to_dict() if metrics else {}
    return {
        "ids": list(text.token_ids),
        "accepted": rounds.get("per_step_accepted", []),
        "drafted": rounds.get("per_step_drafted", []),
    }


def main() -> None:
    """Serve commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    sys.modules["vllm_worker"] = sys.modules["__main__"]

    def answer(content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    worker = SteppedEngine(json.loads(sys.argv[1]))
    answer(worker.facts())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            found = getattr(worker, command.pop("do"))(**command)
            for each in found if isinstance(found, Iterator) else ():
                answer(each)
            answer(None if isinstance(found, Iterator) else found)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
