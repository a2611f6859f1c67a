"""A seeded twentieth of the campaign of hostile cases, and that the campaign notices what it is there to find."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alphaprof.errors import DataEmpty
from scripts import campaign
from scripts.campaign import Outcome

SEED = 17
COUNTS = {name: count // 20 for name, (_, count) in campaign.PARTS.items()}


def require_target(name: str, **options: bool) -> None:
    outcomes = dict(enumerate(campaign.run_cases(name, SEED, range(COUNTS[name]), **options)))
    failures = [f"{number}: {end.kind}: {end.detail}" for number, end in outcomes.items() if end.kind in campaign.FAILURES]
    assert not campaign.missed(name, Counter(end.kind for end in outcomes.values())), "\n".join(failures)
    assert len({outcome.kind for outcome in outcomes.values()}) > (
        name not in ("kills", "workers")
    )  # the cases reach what they aim at


@pytest.mark.slow
@pytest.mark.parametrize("name", ["files", "disk"])
def test_a_hostile_case_ends_in_the_same_answer_or_in_two_lines(name: str) -> None:
    require_target(name, models=False)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", ["kills", "workers"])
def test_what_was_killed_ends_with_the_same_rows(name: str) -> None:
    require_target(name)


def prints(out: str, err: str = "", code: int = 0) -> Callable[[], None]:
    """A command that prints and ends."""

    def command() -> None:
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)

    return command


def fails(error: BaseException) -> Callable[[], None]:
    """A command that ends with an error."""

    def command() -> None:
        raise error

    return command


BEFORE = '{"alpha": {"value": 0.5}, "verdict": "GO", "name": "a", "notes": []}'
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "the same": (prints(BEFORE), "same answer"),
    "another name": (prints(BEFORE.replace('"a"', '"b"')), "same answer"),
    "another number": (prints(BEFORE.replace("0.5", "0.51")), "silently different"),
    "another verdict": (prints(BEFORE.replace("GO", "NO-GO"), code=10), "silently different"),
    "a number less": (prints('{"verdict": "GO", "notes": []}'), "silently different"),
    "another number with a warning": (prints(BEFORE.replace("0.5", "1").replace("[]", '["damaged"]')), "warned"),
    "another number and a word on stderr": (prints(BEFORE.replace("0.5", "1"), "made again\n"), "warned"),
    "an error of ours": (fails(DataEmpty("no rows", "add some")), "refused"),
    "two lines": (prints("", "error: no rows\nhint: add some\n", 3), "refused"),
    "one line": (prints("", "error: no rows\n", 3), "traceback"),
    "a line without an end": (prints("", f"error: {'a' * 5000}\nhint: add some\n", 3), "long message"),
    "an error of another library": (fails(OSError(5, "Input/output error")), "traceback"),
    "too deep": (fails(RecursionError("maximum recursion depth exceeded")), "traceback"),
    "half a character": (prints("\ud800"), "traceback"),
    "no end": (lambda: time.sleep(30), "hang"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_command_is_what_a_user_would_call_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, kind = ENDS[end]
    monkeypatch.setattr(campaign, "LIMIT_S", 0.2 if kind == "hang" else 60)
    before = campaign.outcome_of(prints(BEFORE))
    assert campaign.judged("report", before, campaign.outcome_of(command)).kind == kind


def test_a_failing_disk_fails_at_the_call_that_is_meant_and_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    for call, act in (
        (campaign.WRITE, lambda folder: (folder / "file").write_text("x")),
        ((os, "replace"), lambda folder: (folder / "file").touch() or (folder / "file").replace(folder / "other")),
        ((os, "mkdir"), lambda folder: (folder / str(time.monotonic_ns())).mkdir(parents=True)),
    ):
        once, later = campaign.Disk(inside, 2), campaign.Disk(inside, 2, stays=True)
        for disk, expected in ((once, [True, False, True]), (later, [True, False, False])):
            with disk.failing(*call):
                outside.mkdir(exist_ok=True)
                act(outside)
                assert [worked(act, inside) for _ in range(3)] == expected
        assert worked(act, inside)


def worked(act: Callable[[Path], object], folder: Path) -> bool:
    with contextlib.suppress(OSError):
        act(folder)
        return True
    return False


def test_failures_are_listed_with_what_repeats_them_and_decide_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def part(folder: Path) -> Iterator[campaign.Case]:
        yield lambda rng: Outcome("traceback", f"of {rng.random()}") if rng.random() < 0.3 else Outcome("refused")

    monkeypatch.setattr(campaign, "PARTS", {"kills": (part, 20)})
    assert campaign.main(["--seed", "3"]) == 1
    text = capsys.readouterr().out
    first, repeat = text.splitlines()[:2]
    bad = text.count("traceback: of")
    assert 0 < bad < 20
    assert f"refused {20 - bad}, traceback {bad}" in text
    assert text.endswith("missed: kills\n")
    assert campaign.main(repeat.split()) == 1
    assert capsys.readouterr().out.splitlines()[0] == first
    monkeypatch.setattr(campaign, "FAILURES", ())
    assert campaign.main(["--seed", "3"]) == 0


def test_of_a_thousand_changed_files_three_may_be_silent_and_of_nothing_else_any() -> None:
    assert not campaign.missed("files", Counter({"refused": 997, "silently different": 3}))
    assert campaign.missed("files", Counter({"refused": 996, "silently different": 4}))
    assert campaign.missed("files", Counter({"refused": 1999, "traceback": 1}))
    assert campaign.missed("kills", Counter({"same answer": 9999, "silently different": 1}))
