"""The thread that writes: in order, never far behind, and an error in it ends the run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from alphaprof.profiling.run.shard import WAITING, BackgroundWriter

PATIENCE = 30  # seconds, after which a test fails rather than hangs


class Killed(BaseException):
    """What no handler of ordinary errors sees."""


def failing() -> None:
    raise Killed


def test_work_is_done_in_order_and_before_the_block_ends() -> None:
    """A hundred pieces, handed over faster than they may be done, are done in the order in which they came."""
    done: list[int] = []
    with BackgroundWriter() as writer:
        for number in range(100):
            writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(100))


def test_no_more_than_one_piece_waits_while_one_is_done() -> None:
    """The next `put` waits for the thread: what is measured ahead stays bounded."""
    gate, put = threading.Event(), []
    with BackgroundWriter() as writer:

        def feed() -> None:
            for number in range(6):
                writer.put(lambda: gate.wait(PATIENCE))  # type: ignore[arg-type, return-value]
                put.append(number)

        feeder = threading.Thread(target=feed)
        feeder.start()
        feeder.join(0.3)
        assert len(put) <= 1 + WAITING
        gate.set()
        feeder.join(PATIENCE)
    assert put == list(range(6))


def fed(*work: Any, then: Any) -> None:
    """Hand over pieces of work all at once, and then do something."""
    with BackgroundWriter() as writer:
        for piece in work:
            writer._queue.put(piece)  # `put` would see the error of an earlier one
        then(writer)


def settle(writer: BackgroundWriter) -> None:
    writer._queue.join()


def interrupt(writer: BackgroundWriter) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ask", ["check", "put", "nothing"])
def test_an_error_is_raised_by_the_next_call_and_nothing_behind_it_is_done(ask: str) -> None:
    """By every call and by the end of the block, with the error's own type, even one that is no `Exception`."""
    done: list[int] = []
    reached: list[str] = []

    def then(writer: BackgroundWriter) -> None:
        settle(writer)
        if ask != "nothing":
            getattr(writer, ask)(*([lambda: done.append(2)] if ask == "put" else []))
            reached.append("no error was raised")

    with pytest.raises(Killed):
        fed(failing, lambda: done.append(1), then=then)
    assert (done, reached) == ([], [])


def test_an_error_of_the_block_is_not_hidden_and_what_was_handed_over_is_done() -> None:
    """Ctrl-C: measured shards are written, and the interruption goes on its way, whatever the writer met."""
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fed(lambda: done.append(1), then=interrupt)
    assert done == [1]
    with pytest.raises(KeyboardInterrupt):
        fed(failing, then=interrupt)
