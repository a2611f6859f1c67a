"""`alphaprof runs status`: how far a run is that one or several processes work on. `alphaprof profile --workers N`: N
processes on one machine, each with a part of the work and, if there is one, a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, ClassVar

from alphaprof.errors import AlphaprofError, WorkerFailed
from alphaprof.log.manifest import MANIFEST, Commit
from alphaprof.log.run import Run
from alphaprof.log.storage import Storage
from alphaprof.render.blocks import Block, table_by_columns
from alphaprof.report import format as fmt

SILENT = 3.0  # times its slowest shard, after which a worker is taken to have stopped
AGAIN = 3  # times that a worker which was killed is started again
LOOK = 0.2  # seconds between two looks
SAY = 15.0  # seconds between two lines of progress
LAST = 12  # lines of what a worker said that an error repeats
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class WorkerStatus:
    """One process that works on a run, or did."""

    worker: str  # as files of the run name it
    host: str  # the machine's name
    process: int  # its number there
    device: str  # that it measures on
    since: str  # when it began, ISO 8601
    shards: int  # that it has committed
    documents: int  # in them
    seconds: float  # that measuring them took
    last: str | None  # when it committed the last one; None: none yet


@dataclass(frozen=True)
class RunStatus:
    """How far a run is."""

    format: ClassVar[str] = "alphaprof-status"
    version: ClassVar[str] = "1.0"

    run: str  # where it lies
    complete: bool
    shards: int  # as prompts were staged
    committed: int  # shards that are measured
    documents: int
    measured: int  # documents of committed shards
    lacking: tuple[int, ...]  # shards that nobody has committed
    documents_per_second: float | None  # of active workers; None: commits show none
    seconds_left: float | None  # at that speed
    workers: tuple[WorkerStatus, ...]  # in the order in which they came

    @classmethod
    def of(cls, run: Run, now: datetime.datetime | None = None) -> RunStatus:
        """Return the status of a run at a time (default: now)."""
        now = now or datetime.datetime.now(datetime.UTC)
        commits, staged = run.commits(), run.manifest.staged
        complete = run.manifest.status == "complete"
        wanted = len(run.shards) if complete else len(staged)
        lacking = tuple(index for index in range(wanted) if index not in commits) if not complete else ()
        documents = run.manifest.documents if complete else sum(staged)
        measured = sum(commit.shard.documents for commit in commits.values())
        workers = tuple(_workers(run, commits))
        rate = sum(_rates(workers, commits, now)) if not complete else 0.0
        return cls(
            run=str(run.path),
            complete=complete,
            shards=wanted,
            committed=wanted - len(lacking),
            documents=documents,
            measured=documents if complete else measured,
            lacking=lacking,
            documents_per_second=rate or None,
            seconds_left=(documents - measured) / rate if rate else None,
            workers=workers,
        )

    @property
    def speed(self) -> str:
        """How fast the processes are that go on, and when they will be done, in words."""
        if self.documents_per_second is None or self.seconds_left is None:
            return "no process has committed a shard recently"
        left = datetime.timedelta(seconds=round(self.seconds_left))
        return f"{self.documents_per_second:.2f} documents/s, about {left} left"

    def blocks(self) -> Iterator[Block]:
        """Yield how much is done, when the rest will be, and by whom."""
        state = "complete" if self.complete else "running"
        done = f"{fmt.count(self.measured)} of {fmt.many(self.documents, 'document')}"
        yield f"{self.run}: {state}, {done}, {self.committed} of {fmt.many(self.shards, 'shard')}"
        if not self.complete and self.documents_per_second is None:
            yield "no process is committing shards: resume with alphaprof profile --resume"
        elif self.seconds_left is not None:
            yield self.speed
        if self.lacking and len(self.lacking) <= 20:
            yield f"missing shards: {', '.join(map(str, self.lacking))}"
        if self.workers:
            yield table_by_columns(
                "workers", [(worker.worker, _worker_cells(worker)) for worker in self.workers], named="worker"
            )


def _worker_cells(worker: WorkerStatus) -> dict[str, str]:
    return {
        "host": worker.host,
        "process": str(worker.process),
        "device": worker.device,
        "shards": str(worker.shards),
        "documents": fmt.count(worker.documents),
        "documents/s": fmt.number(worker.documents / worker.seconds if worker.seconds else None),
        "last shard (UTC)": (worker.last or "none yet").replace("+00:00", ""),
    }


def _workers(run: Run, commits: dict[int, Commit]) -> Iterator[WorkerStatus]:
    """Yield those who have registered, in the order in which they came."""
    for name, worker in sorted(run.workers().items(), key=lambda item: item[1].since):
        mine = [commit for commit in commits.values() if commit.worker == name]
        yield WorkerStatus(
            worker=name,
            host=worker.host,
            process=worker.process,
            device=worker.device,
            since=worker.since,
            shards=len(mine),
            documents=sum(commit.shard.documents for commit in mine),
            seconds=sum(commit.seconds for commit in mine),
            last=max((commit.at for commit in mine), default=None),
        )


def _rates(workers: Sequence[WorkerStatus], commits: dict[int, Commit], now: datetime.datetime) -> Iterator[float]:
    """Yield documents per second of each worker that has committed a shard lately."""
    for worker in workers:
        mine = [commit for commit in commits.values() if commit.worker == worker.worker]
        if mine and worker.seconds > 0:
            silent = (now - max(datetime.datetime.fromisoformat(commit.at) for commit in mine)).total_seconds()
            if silent <= max(60.0, SILENT * max(commit.seconds for commit in mine)):
                yield worker.documents / worker.seconds


@dataclass
class _Worker:
    """One process; the first one speaks to the user, whose progress counts what all of them have measured. Of the others is
    kept what they say.
    """

    number: int
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None
    again: int = field(default=AGAIN)

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.close()
        self.said = None if self.number == 0 else TemporaryFile()  # noqa: SIM115 - it is read after the process ended
        self.process = subprocess.Popen(  # noqa: S603 - this program, with the user's own arguments
            self.command,
            env=dict(self.environment),
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            start_new_session=True,  # Ctrl-C reaches this process alone, which terminates each worker once, see `_ending`
        )

    def close(self) -> None:
        """Forget what it said."""
        if self.said is not None:
            self.said.close()

    @property
    def words(self) -> str:
        """The end of what it said."""
        if self.said is None:
            return ""
        self.said.seek(0)
        return "\n".join(self.said.read().decode(errors="replace").splitlines()[-LAST:])


def work_together(arguments: Sequence[str], count: int, storage: Storage, say: Callable[[str], None]) -> None:
    """Run `alphaprof profile` with these arguments in `count` processes, until all of them are done. One that is killed is
    started again; if one fails, the others go on, unless the run has not begun. Raises `WorkerFailed`, with the exit code
    of the first one that failed.
    """
    gpus, failed = visible_gpus(), dict[int, int]()
    workers = [
        _Worker(number, _worker_command(arguments, number, count), _worker_environment(number, gpus))
        for number in range(count)
    ]
    with _ending(workers):
        for worker in workers:
            worker.start()
        said = time.monotonic()
        while running := [(worker, worker.process) for worker in workers if worker.process is not None]:
            for worker, process in running:
                if (code := process.poll()) is not None:
                    worker.process = None
                    if not _has_ended_well(worker, code, say):
                        failed[worker.number] = code if code > 0 else 128 - code  # as shells say it
            if failed and not storage.has(MANIFEST):
                break  # the others would wait for it
            if workers[0].process is None and time.monotonic() - said >= SAY:
                said = time.monotonic()
                say(progress_line(storage))
            time.sleep(LOOK)
        if failed:
            named = ", ".join(f"{number} (exit code {code})" for number, code in failed.items())
            raise WorkerFailed(
                f"{len(failed)} of {count} workers failed: {named}; see their output above",
                "measured shards are kept: fix the cause, then run the same command with --resume",
                next(iter(failed.values())),
            )


def _has_ended_well(worker: _Worker, code: int, say: Callable[[str], None]) -> bool:
    """Return whether a worker that ended is done, or is started again since it was killed; says what it said if it
    failed.
    """
    if code < 0 and worker.again > 0:
        worker.again -= 1
        say(f"worker {worker.number} was ended by {signal.Signals(-code).name}; restarting it")
        worker.start()
    elif code != 0:
        say("\n".join(filter(None, (f"worker {worker.number} failed with exit code {code}", worker.words))))
        return False
    return True


def progress_line(storage: Storage) -> str:
    """Return how far a run is, in words: its shards that are measured, by any process, and the speed."""
    try:
        status = RunStatus.of(Run.open(storage))
    except AlphaprofError as error:
        return f"cannot read the run's progress now: {error.message}"
    done = f"profiling: {status.committed} of {status.shards} shards"
    return done if status.complete else f"{done}, {status.speed}"


def visible_gpus() -> list[str]:
    """Return the GPUs that processes may use, as CUDA names them."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        return [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]
    return []


def _worker_command(arguments: Sequence[str], number: int, count: int) -> list[str]:
    return [sys.executable, "-m", "alphaprof", "profile", *arguments, "--part", f"{number}/{count}"]


def _worker_environment(number: int, gpus: Sequence[str]) -> dict[str, str]:
    return dict(os.environ) | ({VISIBLE: gpus[number % len(gpus)]} if gpus else {})


@contextlib.contextmanager
def _ending(workers: Sequence[_Worker]) -> Iterator[None]:
    """End what still runs when the block ends with an error; each writes first what it has measured."""
    try:
        yield
    except BaseException:
        living = [worker.process for worker in workers if worker.process is not None]
        for process in living:
            process.terminate()
        try:
            for process in living:
                process.wait()
        except KeyboardInterrupt:  # a second one waits for nothing
            for process in living:
                process.kill()
        raise
    finally:
        for worker in workers:
            worker.close()
