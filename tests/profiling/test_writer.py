"""The thread that writes: in order, never far behind, and an error in it ends the run."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from alphaprof.config.load import load_profile
from alphaprof.errors import DiskFull, ProfileInvalid
from alphaprof.log.files import shards_of
from alphaprof.log.place import LocalPlace
from alphaprof.log.store import Run
from alphaprof.profiling.run import pipeline
from alphaprof.profiling.run.shards import WAITING, Writer
from tests.profiling.test_pipeline import Silent, profile_file

PATIENCE = 30  # seconds, after which a test fails rather than hangs


class Killed(BaseException):
    """What no handler of ordinary errors sees."""


def failing() -> None:
    raise Killed


def test_work_is_done_in_order_and_before_the_block_ends() -> None:
    """A hundred pieces, handed over faster than they may be done, are done in the order in which they came."""
    done: list[int] = []
    with Writer() as writer:
        for number in range(100):
            writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(100))


def test_no_more_than_one_piece_waits_while_one_is_done() -> None:
    """The next `put` waits for the thread: what is measured ahead stays bounded."""
    gate, put = threading.Event(), []
    with Writer() as writer:

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


def test_the_thread_holds_on_to_nothing_that_it_has_done() -> None:
    """A shard's arrays are free as soon as they are written, not when the next shard comes."""

    class Large:
        def write(self) -> None: ...

    with Writer() as writer:
        large = Large()
        seen = weakref.ref(large)
        writer.put(large.write)
        del large
        writer.wait()
        gc.collect()
        assert seen() is None


def fed(*work: Any, then: Any) -> None:
    """Hand over pieces of work all at once, and then do something."""
    with Writer() as writer:
        for piece in work:
            writer._queue.put(piece)  # `put` would see the error of an earlier one
        then(writer)


def settle(writer: Writer) -> None:
    writer._queue.join()


def interrupt(writer: Writer) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ask", ["check", "wait", "put", "nothing"])
def test_an_error_is_raised_by_the_next_call_and_nothing_behind_it_is_done(ask: str) -> None:
    """By every call and by the end of the block, with the error's own type, even one that is no `Exception`."""
    done: list[int] = []
    reached: list[str] = []

    def then(writer: Writer) -> None:
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


def test_a_first_interruption_while_the_last_piece_is_awaited_lets_it_be_done() -> None:
    """The block has ended without an error: what was handed over is measured, and not what the user wanted to stop."""
    done, begun = [], threading.Event()

    def last() -> None:
        begun.wait(PATIENCE)
        time.sleep(0.2)
        done.append(1)

    def stop() -> None:
        begun.set()
        signal.raise_signal(signal.SIGINT)

    def once(writer: Writer) -> None:
        join, joins = writer._thread.join, iter([stop])
        writer._thread.join = lambda: next(joins, join)()  # type: ignore[method-assign]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            fed(last, then=once)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1]


def test_an_interruption_after_an_error_of_the_block_waits_for_nothing() -> None:
    """It may be the user's second."""
    gate = threading.Event()
    joined: list[int] = []

    def stop() -> None:
        joined.append(1)
        raise KeyboardInterrupt

    def twice(writer: Writer) -> None:
        writer._thread.join = stop  # type: ignore[method-assign]
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            fed(lambda: gate.wait(PATIENCE), then=twice)
    finally:
        gate.set()
    assert joined == [1]


# --- runs of tiny models ---


@pytest.mark.models
def test_a_full_disk_stops_the_run_at_the_next_batch_and_it_resumes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shard meets a full disk: the store's error ends the run, and later shards leave no file."""
    path, out = (
        profile_file(tmp_path, tiny, drafts={"close": {"kind": "model", "model": str(tiny / "draft")}}),
        tmp_path / "r",
    )
    original, measure, measured, failed = LocalPlace.put, pipeline.measure_shard, [], threading.Event()

    def full(place: LocalPlace, name: str, content: Any) -> None:
        if name.startswith("continuations/part-00001"):
            failed.set()
            raise DiskFull(f"cannot write {name}: No space left on device", "free space, then --resume")
        original(place, name, content)

    def behind(plan: Any, index: int, *rest: Any) -> Any:
        measured.append(index)
        if index == 2:
            assert failed.wait(PATIENCE)
        return measure(plan, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "put", full)
        patch.setattr(pipeline, "measure_shard", behind)
        with pytest.raises(DiskFull, match="No space left"):
            pipeline.profile(load_profile(path), out, Silent())
    assert measured == [0, 1, 2]
    found = Run.open(out)
    assert ([shard.index for shard in found.shards], found.manifest.status) == ([0], "running")
    assert {shards_of(str(file)) for file in out.glob("continuations/*")} == {(0, 0)}
    run = pipeline.profile(load_profile(path), out, Silent(), resume=True)
    assert (run.manifest.status, run.manifest.documents) == ("complete", 15)
    assert {str(file.relative_to(out)) for file in out.rglob("part-*")} == {
        name for name in run.manifest.files if "part-" in name
    }


@pytest.mark.models
def test_weights_that_miss_a_domain_are_refused_before_anything_is_measured(tiny: Path, tmp_path: Path) -> None:
    """The names in a column are known once prompts are read."""
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "teams.jsonl"
    file.write_text("".join(json.dumps({"text": team, "team": team}) + "\n" for team in "aab"))
    source = {"domain": {"column": "team"}, "path": str(file), "prompt": "{text}"}
    path = profile_file(tmp_path, tiny, data=[source], decision={"weights": {"a": 1.0}})
    with pytest.raises(ProfileInvalid, match=r"decision\.weights does not name domain 'b'"):
        pipeline.profile(load_profile(path), tmp_path / "run", Silent())
    assert not (tmp_path / "run" / "positions").exists()
