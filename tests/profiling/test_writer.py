"""What writes a shard while the next one is worked out: in order, never far behind, and an error in it ends the run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest

from alphaprof.profiling.profile import Background

PATIENCE = 30  # seconds, after which a test fails rather than hangs


class Killed(BaseException):
    """What no handler of ordinary errors sees."""


def failing() -> None:
    raise Killed


def test_one_piece_is_done_while_the_next_is_worked_out() -> None:
    gate, done = threading.Event(), list[int]()

    def feed(background: Background) -> None:
        for number in (2, 3):
            background.put(functools.partial(done.append, number))

    with Background() as background:
        background.put(lambda: done.append(int(gate.wait(PATIENCE))))
        feeder = threading.Thread(target=feed, args=(background,))
        feeder.start()
        feeder.join(0.1)
        assert done == []
        gate.set()
        feeder.join(PATIENCE)
    assert done == [1, 2, 3]


def work(*pieces: Callable[[], object], then: Callable[[Background], object]) -> None:
    """Hand over pieces, and then do something in the block."""
    with Background() as background:
        for piece in pieces:
            background.put(piece)  # type: ignore[arg-type]
        then(background)


def settled(background: Background) -> None:
    """Wait until the last piece is done, and leave what it raised."""
    background._last.exception()


@pytest.mark.parametrize("ask", ["check", "put", "end"])
def test_an_error_is_raised_by_the_next_call_or_the_end(ask: str) -> None:
    done = list[int]()

    def then(background: Background) -> None:
        settled(background)
        if ask != "end":
            getattr(background, ask)(*([lambda: done.append(2)] if ask == "put" else []))
            done.append(1)

    with pytest.raises(Killed):
        work(failing, then=then)
    assert done == []


def test_an_error_of_the_block_is_not_hidden_and_what_was_handed_over_is_done() -> None:
    """Ctrl-C: measured shards are written, and the interruption goes on its way, whatever the writer met."""
    done = list[int]()

    def interrupt(background: Background) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(lambda: done.append(1), then=interrupt)
    assert done == [1]
    with pytest.raises(KeyboardInterrupt) as caught:
        work(failing, then=interrupt)
    assert caught.value.__notes__ == ["earlier measurements could not be written: "]
