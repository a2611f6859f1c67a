"""A thread that writes what a run has measured, so that the device never waits for tables and disks."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Thread
from types import TracebackType

from alphaprof.errors import OutOfMemory

Work = Callable[[], None]
WAITING = 1  # pieces that may wait while one is written: what is measured must fit into memory


class Writer:
    """Does pieces of work in the order in which they come, one at a time, in a thread of its own; a context manager.

    Where one fails, what comes behind it is not done, and the next call raises the error. Work that was handed over before
    the block ended is done, even if the block ended with an error or a first Ctrl-C comes while it is awaited: it is
    measured already. Nobody else writes meanwhile. Where the block ended with another error, the writer's is a note to it.
    """

    def __init__(self) -> None:
        self._queue: Queue[Work | None] = Queue(WAITING)
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="writer", daemon=True)  # a second Ctrl-C does not wait for it

    def __enter__(self) -> Writer:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end()
        except KeyboardInterrupt:
            if error is None:  # the first one: after an error of the block it may be the second, which waits for nothing
                self._end()
            raise
        if error is None:
            self.check()
        elif self._error is not None and self._error is not error:
            error.add_note(f"what was measured before could not be written: {self._error}")

    def _end(self) -> None:
        """Have the thread end behind what was handed over; a second time does no harm."""
        self._queue.put(None)
        self._thread.join()

    def put(self, work: Work) -> None:
        """Hand over a piece of work; waits while as much as may wait does. Raises what an earlier piece raised."""
        self.check()
        self._queue.put(work)

    def wait(self) -> None:
        """Wait until all is done. Raises what a piece of it raised."""
        self._queue.join()
        self.check()

    def check(self) -> None:
        """Raise what a piece of work raised, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Whether there was another piece of work; a method, so that nothing holds on to it while the next is awaited."""
        work = self._queue.get()
        try:
            if work is not None and self._error is None:
                work()
        except MemoryError as error:  # pyarrow's, too
            self._error = OutOfMemory(
                f"no memory to write what was measured: {error}",
                "free memory and --resume, or profile anew with a lower shard_documents",
            )
        except BaseException as error:  # whatever it is ends the run, in the thread that runs it
            self._error = error
        finally:
            self._queue.task_done()
        return work is not None
