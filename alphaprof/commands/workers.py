"""`alphaprof profile --workers N`: N processes on one machine, each with a part of the work and, if there is one, a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO

from alphaprof.commands.runs import RunStatus
from alphaprof.errors import AlphaprofError, WorkerFailed
from alphaprof.log.manifest import MANIFEST
from alphaprof.log.place import Place
from alphaprof.log.run import Run

AGAIN = 3  # times that a worker which was killed is started again
LOOK = 0.2  # seconds between two looks
SAY = 15.0  # seconds between two lines of progress
LAST = 12  # lines of what a worker said that an error repeats
VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def work_together(arguments: Sequence[str], count: int, place: Place, say: Callable[[str], None]) -> None:
    """Run `alphaprof profile` with these arguments in `count` processes, until all of them are done. One that is killed is
    started again; where one fails, the others go on, unless the run has not begun. Raises `WorkerFailed`, with the exit code
    of the first one that failed.
    """
    gpus, failed = visible_gpus(), dict[int, int]()
    workers = [_Worker(number, _command(arguments, number, count), _environment(number, gpus)) for number in range(count)]
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
            if failed and not place.has(MANIFEST):
                break  # the others would wait for it
            if workers[0].process is None and time.monotonic() - said >= SAY:
                said = time.monotonic()
                say(progress_line(place))
            time.sleep(LOOK)
        if failed:
            named = ", ".join(f"{number} (exit code {code})" for number, code in failed.items())
            raise WorkerFailed(
                f"of {count} workers failed: {named}; what they said stands above",
                "what is measured is kept: mend the cause, then the same command with --resume",
                next(iter(failed.values())),
            )


def _has_ended_well(worker: _Worker, code: int, say: Callable[[str], None]) -> bool:
    """Whether a worker that ended is done, or is started again since it was killed; says what it said where it failed."""
    if code < 0 and worker.again > 0:
        worker.again -= 1
        say(f"worker {worker.number} was ended by {signal.Signals(-code).name}, and is started again")
        worker.start()
    elif code != 0:
        say("\n".join(filter(None, (f"worker {worker.number} failed with exit code {code}", worker.words))))
        return False
    return True


def progress_line(place: Place) -> str:
    """How far the run in a place is, whoever measured it: said after the end of the process that speaks."""
    try:
        status = RunStatus.of(Run.open(place))
    except AlphaprofError as error:
        return f"how far the run is cannot be read now: {error.message}"
    done = f"profiling: {status.committed} of {status.shards} shards"
    return done if status.complete else f"{done}, {status.speed}"


def visible_gpus() -> list[str]:
    """The GPUs that processes may use, as CUDA names them."""
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


def _command(arguments: Sequence[str], number: int, count: int) -> list[str]:
    return [sys.executable, "-m", "alphaprof", "profile", *arguments, "--part", f"{number}/{count}"]


def _environment(number: int, gpus: Sequence[str]) -> dict[str, str]:
    return dict(os.environ) | ({VISIBLE: gpus[number % len(gpus)]} if gpus else {})


@contextlib.contextmanager
def _ending(workers: Sequence[_Worker]) -> Iterator[None]:
    """Ends what still runs when the block ends with an error; each writes first what it has measured."""
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
