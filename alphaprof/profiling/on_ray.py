"""`execution.workers`: the walk of `profile` with its work in Ray actors. Values go in and tables come out: the driver
alone writes the run, and loads no model. Each step has actors of its own, whose GPUs are free when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from alphaprof.config.options import MeasuredCosts
from alphaprof.config.profile import ExecutionOptions, ProfileOptions
from alphaprof.errors import AlphaprofError, OptionInvalid, WorkerFailed
from alphaprof.profiling import profile as road
from alphaprof.profiling.checks import ADDRESS, as_measured, require_ray
from alphaprof.profiling.shard import Advance, Loaded, Progress, ShardRows, ShardTexts, score_shard, write_shard
from alphaprof.profiling.texts.corpus import Staged, documents_of
from alphaprof.run.manifest import Manifest, Shard
from alphaprof.run.reader import Run
from alphaprof.run.split import Ids
from alphaprof.run.storage import address_of, storage_of
from alphaprof.run.writer import RunWriter
from alphaprof.totals.files import write_totals

AGAIN = 3  # times that work is done again because its actor was killed
RESTARTS = 100  # times that an actor is started again in all
PATIENCE = 60.0  # seconds without an answer until that is said; then twice as long each time
STORE = 200_000_000  # bytes of a local Ray's object store: few shards are on their way at once
KEPT = "finished work is kept: fix the cause, then rerun the command with --resume"


def profile_on_ray(
    options: ProfileOptions,
    out: Path | str,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
    texts_only: bool = False,
    take_over: bool = False,
) -> Run:
    """Like `profile`, by actors of Ray: on the cluster of RAY_ADDRESS, or on this machine. Raises the errors of
    `errors.py`, those of actors among them.
    """
    require_ray()
    with road.in_memory(), RunWriter.opened(out, resume, take_over=take_over) as run:
        with _session(progress) as ray:
            driver = Driver(ray, options, run, progress)
            if not run.begun:
                driver.begin(reuse)
            elif not driver.goes_on():
                return run
            driver.write_texts()
            if texts_only:
                progress.say(road.TEXTS_WRITTEN.format(run.path))
                return run
            driver.write_times()
            driver.write_rows()
        progress.say("counting totals")
        run.finish(write_totals)
    return run


@contextlib.contextmanager
def _session(progress: Progress) -> Iterator[Any]:
    """Yield the module `ray`, connected; what it started ends with the block. Raises `OptionInvalid`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody about itself
    import ray

    address = os.environ.get(ADDRESS)
    local = {"object_store_memory": STORE, "include_dashboard": False}
    progress.say(f"connecting to Ray at {address}" if address else "starting Ray on this machine")
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **({} if address else local))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise OptionInvalid(
            f"Ray cannot be used at {address or 'this machine'}: {error}",
            f"correct {ADDRESS}, or unset it to use this machine alone" if address else "see the logs in /tmp/ray",
        ) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)  # Ray would end the process without a word
    try:
        yield ray
    finally:
        ray.shutdown()


class Beginning:
    """Stands in for a run in an actor: it has the manifest, and the prompts of a new run until the driver has them."""

    manifest: Manifest

    def __init__(self) -> None:
        self.staged = list[tuple[pa.Table, str]]()

    def stage(self, prompts: pa.Table, digest: str) -> None:
        """Take the documents of the next shard."""
        self.staged.append((prompts, digest))

    def prompts(self, index: int) -> pa.Table:
        """Return the documents of one shard."""
        return self.staged[index][0]

    def begin(self, manifest: Manifest) -> None:
        """Take the manifest."""
        self.manifest = manifest


class Told:
    """A `Progress` in an actor: what it says and warns of goes to the driver with the answer."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, ...]]()

    def say(self, message: str) -> None:
        """Keep a line."""
        self.calls.append(("say", message))

    def warn(self, code: str, message: str, remedy: str) -> None:
        """Keep a warning."""
        self.calls.append(("warn", code, message, remedy))

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Nobody watches."""

    def advance(self, steps: float, positions: int = 0) -> None:
        """Nobody watches."""

    def relabel(self, label: str) -> None:
        """Nobody watches."""


class Answer(NamedTuple):
    """What an actor made, what its progress was told, and what a run of the models that it has loaded would begin with."""

    made: Any
    told: list[tuple[str, ...]]
    described: Manifest | None


class Worker:
    """An actor: the models of a profile on some GPUs, or the engine that writes its texts. `manifest`: of a run that has
    begun, whose options are `as_measured`.
    """

    def __init__(self, options: ProfileOptions, threads: int | str, manifest: Manifest | None = None) -> None:
        road.set_threads(threads, alone=False)
        self._options, self._told, self._run = options, Told(), Beginning()
        self._described: Manifest | None = None
        if manifest is not None:
            self._run.begin(manifest)
            self._models = road.Models(options, Staged(self._run), self._told)
            self._writer, self._here = road.writers(options, manifest)

    def do(self, name: str, *given: Any) -> Answer:
        """Answer with what a method makes of what is given. An error that a user can mend tells from where it comes."""
        try:
            with road.in_memory():
                return Answer(getattr(self, name)(*given), self._told.calls, self._described)
        except AlphaprofError as error:
            error.add_note(f"reported by a Ray actor on {platform.node()}; {KEPT}")
            raise

    def begin(self, reuse: str | None) -> tuple[Manifest, int]:
        """Read and check what a run begins with: its manifest, and how many shards are `staged`."""
        road.begun(self._options, self._run, self._told, Path(reuse) if reuse else None)
        return self._run.manifest, len(self._run.staged)

    def staged(self, index: int, reuse: str | None) -> tuple[pa.Table, str]:
        """Return the documents of one shard and their digest; an actor that was started again begins anew."""
        if not self._run.staged:
            self.begin(reuse)
        return self._run.staged[index]

    def describe(self, engine: bool) -> Manifest:
        """Return what a run of the models would begin with. `engine`: as of `profile.load`."""
        return road.manifest_of(self._models.loaded(engine), engine)

    def _loaded(self) -> Loaded:
        loaded = self._models.loaded()
        self._described = self._described or road.manifest_of(loaded, engine=False)
        return loaded

    def write(self, index: int, prompts: pa.Table) -> ShardTexts:
        """Return the continuations of a shard."""
        loaded, eos = self._loaded() if self._here else None, self._run.manifest.target.eos
        return write_shard(loaded, index, list(documents_of(prompts)), self._told.advance, self._writer, eos)

    def score(self, shard: Shard, texts: pa.Table) -> ShardRows:
        """Return the position logs of a shard."""
        return score_shard(self._loaded(), self._run.manifest.drafts, shard, texts, self._told.advance)

    def time(self, text: Ids, costs: MeasuredCosts) -> road.StepTimes:
        """Return step times."""
        if costs.source != "vllm":
            self._loaded()
        return road.time_models(self._models, self._run.manifest, text, costs, self._told)

    def close(self) -> None:
        """End the engine, if it runs."""
        if self._writer is not None:
            self._writer.close()


class Driver:
    """Has actors do the steps of a run, and writes what they make."""

    def __init__(self, ray: Any, options: ProfileOptions, run: RunWriter, progress: Progress) -> None:
        self._ray, self._run, self._progress = ray, run, progress
        self._options = as_measured(options, run.manifest) if run.begun else options
        self._resources = ray.cluster_resources()
        self._gpus = gpus_of(options, self._resources)
        self._told = set[tuple[str, ...]]()

    def begin(self, reuse: Path | None) -> None:
        """Have an actor begin the run: its models are those of a node that measures."""
        self._progress.say("a Ray actor reads the prompts and checks the models")
        actor = self._started()
        texts = address_of(storage_of(reuse)) if reuse else None
        manifest, staged = self._asked(actor, "begin", texts).made
        for index in range(staged):
            self._run.stage(*self._asked(actor, "staged", index, texts).made)
        self._run.begin(manifest)
        self._options = as_measured(self._options, manifest)
        self._ray.kill(actor)

    def goes_on(self) -> bool:
        """As of `profile.goes_on`; an actor loads the models."""

        def described(engine: bool) -> Manifest:
            self._progress.say("a Ray actor loads the models")
            actor = self._started()
            found: Manifest = self._asked(actor, "describe", engine).made
            self._ray.kill(actor)
            return found

        return road.goes_on(self._options, self._run, self._progress, described)

    def write_texts(self) -> None:
        """Write the continuations that are not recorded."""
        run, lacking = self._run, self._run.lacking("texts")
        writer, here = road.writers(self._options, run.manifest)
        if here or (writer is not None and writer.options.url is None):
            self._record("texts", "write", ((index, run.prompts(index)) for index in lacking), len(lacking))
        else:  # no work for a GPU
            road.write_texts(road.Models(self._options, Staged(run), self._progress), run, self._progress)

    def write_times(self) -> None:
        """Write the step times, if there are any to measure, by one actor while no other is there."""
        costs = self._options.costs
        if not isinstance(costs, MeasuredCosts) or road.is_timed(self._run):
            return
        self._progress.start("timing steps", None, "parts")
        for times in self._answers("time", [(road.first_prompts(self._run), costs)], 1):
            road.write_times(self._run, times)

    def write_rows(self) -> None:
        """Score the texts of the shards that are not recorded."""
        run, lacking = self._run, self._run.lacking("rows")
        texts = ((run.journal["texts"][index].shard, run.continuations(index)) for index in lacking)
        self._record("rows", "score", texts, len(lacking))

    def _record(self, step: str, name: str, work: Iterable[tuple[Any, ...]], shards: int) -> None:
        def results(advance: Advance) -> Iterator[Any]:
            for made in self._answers(name, work, actors_for(self._options.execution, self._resources, self._gpus, shards)):
                advance(made.shard.documents, made.shard.positions if step == "rows" else 0)
                yield made

        if shards:
            road.record(step, results, self._run, self._progress)

    def _answers(self, name: str, work: Iterable[tuple[Any, ...]], actors: int) -> Iterator[Any]:
        """Yield what a method of new actors makes of pieces of work, in the order in which they end. Ray replaces an actor
        that is killed, and does its work again, but not for ever. Models must be those of the run, and compute as it did.
        """
        from ray.util import ActorPool

        started, left = [self._started() for _ in range(actors)], iter(work)
        pool = ActorPool(started)

        def give() -> None:
            while pool.has_free() and (given := next(left, None)) is not None:
                pool.submit(lambda actor, given: actor.do.remote(name, *given), given)

        give()
        while pool.has_next():
            answer = self._heard(pool.get_next_unordered)
            if answer.described is not None:
                road.require_same_models(self._run, answer.described, moved=False)
            give()
            yield answer.made
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.do.remote("close") for actor in started])
        for actor in started:
            self._ray.kill(actor)

    def _started(self) -> Any:
        """Return a new actor."""
        run = self._run
        manifest = run.manifest if run.begun else None
        threads = road.threads_of(run, self._options) if run.begun else self._options.execution.threads
        return remote(self._ray, Worker, self._gpus, RESTARTS).remote(self._options, threads, manifest)

    def _asked(self, actor: Any, name: str, *given: Any) -> Answer:
        answer = actor.do.remote(name, *given)
        return self._heard(lambda timeout: self._ray.get(answer, timeout=timeout))

    def _heard(self, answer: Callable[..., Answer]) -> Answer:
        """Return an answer, when it is there, and say what the actor's progress was told. Raises what a user can mend,
        `WorkerFailed` if the actor was killed, and a bug with the actor's traceback.
        """
        raised, began, patience = self._ray.exceptions, time.monotonic(), PATIENCE
        while True:
            try:
                found = answer(timeout=patience)
                break
            except TimeoutError:  # Ray's own, too
                minutes, patience = (time.monotonic() - began) / 60, 2 * patience
                what = "actors work, load models, or wait for a GPU"
                self._progress.say(f"nothing has come for {minutes:.0f} min: {what} (see ray status)")
            except raised.RayTaskError as error:
                if isinstance(error.cause, AlphaprofError):
                    raise error.cause from None
                raise
            except raised.RayError as error:
                reason = " ".join(str(error).strip().splitlines()[-1:])
                raise WorkerFailed(
                    f"a Ray actor was killed, and its work was done again in vain: {reason}",
                    f"check Ray's logs, memory first; {KEPT}",
                ) from None
        for call in found.told:
            if call not in self._told:  # several actors load the same models
                self._told.add(call)
                getattr(self._progress, call[0])(*call[1:])
        return found


def remote(ray: Any, kind: type, gpus: float, restarts: int = 0) -> Any:
    """Return a class as one of actors that each have some GPUs, and see no other (CUDA_VISIBLE_DEVICES)."""
    again = {"max_restarts": restarts, "max_task_retries": AGAIN if restarts else 0}
    return ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD", **again)(kind)


def gpus_of(options: ProfileOptions, resources: Mapping[str, float]) -> float:
    """Return how many GPUs an actor asks for: none if no model runs on one."""
    models = [options.target, *(draft.own_model for draft in options.drafts.values() if draft.own_model)]
    wanted = {model.device.partition(":")[0] for model in models}
    if "cuda" in wanted or ("auto" in wanted and resources.get("GPU", 0) > 0):
        return options.execution.gpus_per_worker
    return 0.0


def actors_for(execution: ExecutionOptions, resources: Mapping[str, float], gpus: float, shards: int) -> int:
    """Return how many actors do the work of some shards; each needs some GPUs, or where that is 0 a CPU."""
    if execution.workers == "auto":
        threads = 1 if execution.threads == "auto" else execution.threads
        slots = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / threads
        return min(max(1, int(slots)), shards)
    return min(execution.workers, shards)
