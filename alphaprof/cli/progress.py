"""What a run tells the user on stderr while it works: progress with rate and time left, and warnings."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from alphaprof.errors import without_secrets
from alphaprof.render.terminal import plain

LOG_EVERY_S = 15.0


class ConsoleProgress:
    """Progress on stderr: a bar on a terminal, a line every 15 seconds elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._unit, self._positions, self._logged = "", 0, 0.0

    def __enter__(self) -> ConsoleProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._bar.disable:  # before rich 14.3, stopping a bar that was never shown writes an empty line
            self._bar.stop()

    def say(self, message: str) -> None:
        """A line about what happens now; it may name what is in the data: a domain, a file."""
        self.console.print(Text("\n").join(plain(line) for line in without_secrets(message).split("\n")))

    def warn(self, code: str, message: str, remedy: str) -> None:
        """A warning with its remedy."""
        self.say(f"warning: {message} ({code})\n  {remedy}")

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Start a stage."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(label, total=total, done="")
        self._unit, self._positions, self._logged = unit, 0, time.monotonic()
        if not self.console.is_terminal:
            self.say(f"{label}: {total if total is not None else 'all'} {unit}")

    def relabel(self, label: str) -> None:
        """Call the stage otherwise."""
        for task in self._bar.tasks:
            self._bar.update(task.id, description=label)

    def advance(self, steps: float, positions: int = 0) -> None:
        """Advance the stage."""
        self._positions += positions
        for task in self._bar.tasks:  # one: the stage
            self._bar.advance(task.id, steps)
            elapsed = max(task.elapsed or 0.0, 1e-9)
            of = f" of {task.total:.0f}" if task.total is not None else ""
            rate = f", {self._positions / elapsed:.0f} positions/s" if self._positions else ""
            done = f"{task.completed:.0f}{of} {self._unit}{rate}"
            self._bar.update(task.id, done=done)
            if not self.console.is_terminal and time.monotonic() - self._logged >= LOG_EVERY_S:
                self._logged, left = time.monotonic(), ""
                if task.completed and task.total is not None:
                    left = f", about {elapsed / task.completed * max(0, task.total - task.completed):.0f} s left"
                self.say(f"{task.description}: {done}{left}")
