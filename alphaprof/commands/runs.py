"""`alphaprof runs`: how far a run is that one or several processes work on, and its end."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from alphaprof.log.manifest import Commit
from alphaprof.log.run import Run
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt

SILENT = 3.0  # times its slowest shard, after which a worker is taken to have stopped


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
    shards: int  # as prompts were staged; of a run that stopped early, those that it needed
    committed: int  # shards that are measured
    documents: int
    measured: int  # documents of committed shards
    lacking: tuple[int, ...]  # shards that nobody has committed
    documents_per_second: float | None  # of the workers that go on; None: none does, as far as commits tell
    seconds_left: float | None  # at that speed
    workers: tuple[WorkerStatus, ...]  # in the order in which they came

    @classmethod
    def of(cls, run: Run, now: datetime.datetime | None = None) -> RunStatus:
        """The status of a run at a time (default: now)."""
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
            return "no process has committed a shard lately"
        left = datetime.timedelta(seconds=round(self.seconds_left))
        return f"{self.documents_per_second:.2f} documents/s, about {left} left"

    def terminal(self, console: Console) -> None:
        """Prints how much is done, when the rest will be, and by whom."""
        state = "complete" if self.complete else "running"
        done = f"{fmt.count(self.measured)} of {fmt.many(self.documents, 'document')}"
        console.print(plain(f"{self.run}: {state}, {done}, {self.committed} of {fmt.many(self.shards, 'shard')}"))
        if not self.complete and self.documents_per_second is None:
            console.print("no process commits shards now: alphaprof profile with --resume goes on", highlight=False)
        elif self.seconds_left is not None:
            console.print(self.speed, highlight=False)
        if self.lacking and len(self.lacking) <= 20:
            console.print(f"shards that are missing: {', '.join(map(str, self.lacking))}", highlight=False)
        if not self.workers:
            return
        table = named_table("worker", "host", "process", "device", "shards", "documents", "documents/s", "last shard (UTC)")
        for worker in self.workers:
            rate = fmt.number(worker.documents / worker.seconds if worker.seconds else None)
            cells = (worker.host, str(worker.process), worker.device, str(worker.shards), fmt.count(worker.documents), rate)
            table.add_row(*map(plain, (worker.worker, *cells, (worker.last or "none yet").replace("+00:00", ""))))
        show(table, "workers", console)


def _workers(run: Run, commits: dict[int, Commit]) -> Iterator[WorkerStatus]:
    """Yields those who have registered, in the order in which they came."""
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
    """Yields documents per second of each worker that has committed a shard lately."""
    for worker in workers:
        mine = [commit for commit in commits.values() if commit.worker == worker.worker]
        if mine and worker.seconds > 0:
            silent = (now - max(datetime.datetime.fromisoformat(commit.at) for commit in mine)).total_seconds()
            if silent <= max(60.0, SILENT * max(commit.seconds for commit in mine)):
                yield worker.documents / worker.seconds
