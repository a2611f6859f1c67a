"""What a run tells the user on stderr while it works: progress with rate and time left, and warnings."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

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
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = self._unit = ""
        self._done = 0.0
        self._positions = 0
        self._total: int | None = None
        self._begun = self._logged = 0.0

    def __enter__(self) -> ConsoleProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._bar.disable:  # before rich 14.3, stopping a bar that was never shown writes an empty line
            self._bar.stop()

    def say(self, message: str) -> None:
        """A line about what happens now."""
        self.console.print(message, markup=False)

    def warn(self, code: str, message: str, remedy: str) -> None:
        """A warning with its remedy."""
        self.console.print(f"warning: {message} ({code})\n  {remedy}", markup=False)

    def start(self, label: str, total: int | None, unit: str) -> None:
        """A new stage."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._label, self._unit, self._total = label, unit, total
        self._done, self._positions = 0.0, 0
        self._begun = self._logged = time.monotonic()
        self._task = self._bar.add_task(label, total=total, rate="", done="")
        if not self.console.is_terminal:
            self.say(f"{label}: {total if total is not None else 'all'} {unit}")

    def advance(self, steps: float, positions: int = 0) -> None:
        """Part of the stage is done."""
        self._done += steps
        self._positions += positions
        if self._task is not None:
            self._bar.update(self._task, advance=steps, rate=self._rate(), done=self._count())
        if not self.console.is_terminal and time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            self.say(f"{self._label}: {self._count()}{self._rate()}{self._left()}")

    def _count(self) -> str:
        of = f" of {self._total}" if self._total is not None else ""
        return f"{self._done:.0f}{of} {self._unit}"

    def _rate(self) -> str:
        elapsed = max(time.monotonic() - self._begun, 1e-9)
        return f", {self._positions / elapsed:.0f} positions/s" if self._positions else ""

    def _left(self) -> str:
        if not self._done or self._total is None:
            return ""
        left = (time.monotonic() - self._begun) / self._done * max(0, self._total - self._done)
        return f", about {left:.0f} s left"
