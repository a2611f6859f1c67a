"""`execution.engine: ray`: the driver hands out the numbers of shards to actors, which hold the models and commit what they
measure. Rows travel through the run's storage, and never through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphaprof import errors
from alphaprof.config.profile import ExecutionOptions, ProfileOptions
from alphaprof.errors import AlphaprofError, ExtraMissing, OptionInvalid, RunUnreadable, WorkerFailed
from alphaprof.log.manifest import PROFILE, commit_name
from alphaprof.log.storage import LocalStorage, Storage, address_of, storage_of
from alphaprof.log.writer import RunWriter, joined
from alphaprof.profiling.run.profile import begin, conclude, in_memory, join
from alphaprof.profiling.run.shard import Plan, Progress, measure_shard
from alphaprof.profiling.texts.corpus import documents_of
from alphaprof.version import install_line

LOOK = 1.0  # seconds between two looks at the commits; longer where a look takes long
PATIENCE = 60.0  # seconds without a commit until the cause is said; then twice as long each time
AGAIN = 3  # times that a killed actor is replaced without having measured a shard in between
STORE = 100_000_000  # bytes of a local Ray's object store: only numbers of shards pass through it
ADDRESS = "RAY_ADDRESS"
KEPT = "finished work is kept: fix the cause, then rerun the command with --resume"
Failure = dict[str, str]  # an `AlphaprofError` as plain data, since Ray would make a traceback of it


def require_ray() -> None:
    """Raise `ExtraMissing` if Ray is not installed, and `OptionInvalid` for an address that takes no driver, or where
    nobody answers.
    """
    if find_spec("ray") is None:
        raise ExtraMissing("execution.engine: ray needs ray", install_line("cluster"))
    address = os.environ.get(ADDRESS, "")
    if "://" in address:
        raise OptionInvalid(
            f"{ADDRESS}={address} is not a node's HOST:PORT, needed by a driver",
            "run it in the cluster: ray job submit --address http://HOST:8265 -- alphaprof profile ... --engine ray",
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError, UnicodeError) as error:  # Ray itself asks for minutes
            raise OptionInvalid(
                f"nothing answers at {ADDRESS}={address}: {error}",
                f"correct {ADDRESS}, or unset it to use this machine alone",
            ) from None


def profile_on_ray(
    options: ProfileOptions,
    out: Path | str,
    progress: Progress,
    resume: bool = False,
    reuse: Path | None = None,
) -> RunWriter:
    """Like `profile`, by actors of Ray: on the cluster of RAY_ADDRESS, or on this machine. Raises the errors of
    `errors.py`, those of actors among them.
    """
    require_ray()
    storage = storage_of(out)
    with joined(storage, options.model_dump(mode="json"), resume, several=True):
        with _session(storage, progress) as ray:
            _stage(ray, options, storage, progress, reuse)
            run = RunWriter.open(storage)
            going = run.manifest.status != "complete"
            if going:
                _Driver(ray, run, options.execution, progress).drive()
        if going:  # only now: actors are gone, and write nothing more
            conclude(run, progress)
    return run


@contextlib.contextmanager
def _session(storage: Storage, progress: Progress) -> Iterator[Any]:
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
        hint = f"correct {ADDRESS}, or unset it to use this machine alone" if address else "see the logs in /tmp/ray"
        raise OptionInvalid(f"Ray cannot be used at {address or 'this machine'}: {error}", hint) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)  # Ray would end the process without a word
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if address and nodes > 1 and isinstance(storage, LocalStorage):
            progress.warn(
                "local_place",
                f"{storage.shown} is a path, but the cluster has {nodes} nodes: all must mount it at this path",
                "use a folder that all nodes share, or an object store: --out s3://BUCKET/FOLDER",
            )
        yield ray
    finally:
        ray.shutdown()


def _gpus(options: ProfileOptions, resources: Mapping[str, float]) -> float:
    """Return how many GPUs an actor asks for: none if no model runs on one."""
    models = [options.target, *(draft.own_model for draft in options.drafts.values() if draft.own_model)]
    wanted = {model.device.partition(":")[0] for model in models}
    if "cuda" in wanted or ("auto" in wanted and resources.get("GPU", 0) > 0):
        return options.execution.gpus_per_worker
    return 0.0


def _stage(ray: Any, options: ProfileOptions, storage: Storage, progress: Progress, reuse: Path | None) -> None:
    """Have a process of Ray begin the run, or find what is missing of it: models and step times are those of a node that
    measures. Raises what it raises.
    """
    gpus = _gpus(options, ray.cluster_resources())
    begin = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0, max_calls=1)(_begin)  # its GPU is for others afterwards
    texts = address_of(storage_of(reuse)) if reuse else None
    ended = begin.remote(address_of(storage), options.model_dump(mode="json"), texts)
    progress.say("a Ray actor reads the prompts and times the steps")
    silence = _Silence()
    while not ray.wait([ended], timeout=LOOK)[0]:
        silence.say(progress, "the run has not begun: loading models, reading prompts, timing steps, or waiting for a GPU")
    _require_done(ray, ended, "the actor that begins the run was killed")
    for warning in RunWriter.open(storage).manifest.warnings:
        progress.warn(**warning)


def _begin(where: str, config: Mapping[str, Any], reuse: str | None) -> Failure | None:
    """Stage the run of a profile, in a process of Ray. Returns what ended it, if something did."""

    def work() -> None:
        options, texts = ProfileOptions.model_validate(config), Path(reuse) if reuse else None
        with in_memory():
            begin(options, _reached(where), Unheard(), True, texts)

    return failure_of(work)


def _require_done(ray: Any, reference: Any, who: str) -> None:
    """Raise what an actor has answered if it failed, and `WorkerFailed` if it was killed; a bug keeps its traceback."""
    try:
        failure = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).strip().splitlines()[-1:])
        raise WorkerFailed(f"{who}: {reason}", f"check Ray's logs, memory first; {KEPT}") from None
    if failure is not None:
        raise _error_of(failure)


class Measurer:
    """An actor that measures shards, built from little and the run's storage. What a user can mend is an answer to the
    driver, and no reason to start another actor.
    """

    def __init__(self, where: str, execution: Mapping[str, Any]) -> None:
        self._where, self._execution = where, execution
        self._plan: Plan | None = None

    def measure(self, shard: int | None) -> Failure | None:
        """Load models unless they are, then measure and commit a shard, if one is given. Returns what ended it, if something
        did.
        """
        return failure_of(lambda: self._measure(shard))

    def _measure(self, shard: int | None) -> None:
        with in_memory():
            if self._plan is None:
                run = RunWriter.open(_reached(self._where))
                config = run.manifest.config | {"execution": dict(self._execution)}
                self._plan = join(ProfileOptions.model_validate(config), run, Unheard())
            run = self._plan.run
            if shard is not None and not run.is_finished() and not run.storage.has(commit_name(shard)):
                documents = list(documents_of(run.prompts(shard)))
                measure_shard(self._plan, shard, documents, lambda *_: run.storage.require_there())()


class Unheard:
    """A `Progress` that nobody watches: of an actor, the commits tell."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _reached(where: str) -> Storage:
    """Return the run's storage, as an actor sees it. Raises `RunUnreadable` if it does not see what the driver has begun."""
    storage = storage_of(where)
    if not storage.has(PROFILE):
        raise RunUnreadable(
            f"there is no run in {storage.shown} on {platform.node()}, where Ray has placed an actor",
            "use a folder that all nodes share, or an object store: --out s3://BUCKET/FOLDER",
        )
    return storage


def failure_of(work: Callable[[], None]) -> Failure | None:
    """Does some work, and returns as plain data what a user can mend; a bug keeps its traceback."""
    try:
        work()
    except AlphaprofError as error:
        return {"kind": type(error).__name__, "host": platform.node(), "message": error.message, "hint": error.hint}
    return None


def _error_of(failure: Failure) -> AlphaprofError:
    error: AlphaprofError = getattr(errors, failure["kind"])(failure["message"], failure["hint"])
    error.add_note(f"reported by a Ray actor on {failure['host']}; {KEPT}")
    return error


class _Silence:
    """How long nothing has happened, and when that is to be said."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Something has happened."""
        self._since, self._patience = time.monotonic(), PATIENCE

    def say(self, progress: Progress, what: str) -> None:
        """Say so, and what it is; then not before twice as long."""
        seconds = time.monotonic() - self._since
        if seconds >= self._patience:
            self._patience *= 2
            progress.say(f"after {seconds / 60:.0f} min: {what} (see ray status)")


def actors_for(execution: ExecutionOptions, resources: Mapping[str, float], gpus: float, shards: int) -> int:
    """Return how many actors measure some shards; each needs some GPUs, or where that is 0 a CPU."""
    if execution.workers == "auto":
        threads = 1 if execution.threads == "auto" else execution.threads
        slots = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / threads
        return min(max(1, int(slots)), shards)
    return min(execution.workers, shards)


class _Driver:
    """Has actors measure what is missing of a run, and tells of it."""

    def __init__(self, ray: Any, run: RunWriter, execution: ExecutionOptions, progress: Progress) -> None:
        self._ray, self._run, self._progress = ray, run, progress
        resources = ray.cluster_resources()
        committed = run.commits()
        self._lacking = deque(index for index in range(len(run.manifest.staged)) if index not in committed)
        gpus = _gpus(ProfileOptions.model_validate(run.manifest.config), resources)
        self._actors = actors_for(execution, resources, gpus, len(self._lacking))
        self._loaded = 0
        # By what it answers: an actor, the shard that it measures (None: it loads models), and how often it was replaced.
        self._busy: dict[Any, tuple[Any, int | None, int]] = {}
        remote = ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD")(Measurer)
        self._actor = partial(remote.remote, address_of(run.storage), execution.model_dump(mode="json"))

    def drive(self) -> None:
        """Measure until all is done. Raises what an actor raises."""
        run, progress, staged, silence = self._run, self._progress, self._run.manifest.staged, _Silence()
        progress.start("profiling", sum(staged), "documents")
        there = set(range(len(staged))) - set(self._lacking)
        progress.advance(sum(staged[index] for index in there))
        for _ in range(self._actors):
            self._give(self._actor(), None, 0)
        pause = 0.0
        while self._busy and not run.is_finished():
            self._hear(pause)
            began = time.monotonic()
            commits = run.commits()
            for index in commits.keys() - there:
                progress.advance(staged[index], commits[index].shard.positions)
                silence.end()
            there |= commits.keys()
            if len(there) == len(staged):
                break
            loaded = f"{self._loaded} of {self._actors} actors have loaded their models"
            silence.say(progress, f"nothing was committed: {loaded}")
            pause = max(LOOK, 10 * (time.monotonic() - began))  # to list what is there costs little of the time

    def _give(self, actor: Any, shard: int | None, replaced: int) -> None:
        self._busy[actor.measure.remote(shard)] = actor, shard, replaced

    def _hear(self, seconds: float) -> None:
        """For some time give the next shard to each actor that has ended one, and replace those that were killed. Raises
        what an actor raises.
        """
        until = time.monotonic() + seconds
        while self._busy and (left := until - time.monotonic()) > 0:
            for answer in self._ray.wait(list(self._busy), timeout=left)[0]:
                self._take(answer)

    def _take(self, answer: Any) -> None:
        actor, shard, replaced = self._busy.pop(answer)
        try:
            _require_done(self._ray, answer, f"an actor was killed {AGAIN + 1} times in a row")
        except WorkerFailed:
            if replaced == AGAIN:
                raise
            if shard is not None:
                self._loaded -= 1
                self._lacking.appendleft(shard)
            self._give(self._actor(), None, replaced + 1)
            return
        self._loaded += shard is None
        if self._lacking:
            self._give(actor, self._lacking.popleft(), replaced if shard is None else 0)
