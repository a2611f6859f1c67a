"""A seeded twentieth of the campaign of hostile cases, and that the campaign notices what it is there to find."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from alphaprof.errors import DataEmpty
from scripts import campaign

pytestmark = pytest.mark.slow
SEED = 17
COUNTS = {name: max(5, count // 20) for name, (_, count) in campaign.PARTS.items()}


def require_target(name: str, **options: bool) -> None:
    outcomes = dict(enumerate(campaign.run_cases(name, SEED, range(COUNTS[name]), **options)))
    failures = [f"{number}: {end.kind}: {end.detail}" for number, end in outcomes.items() if end.kind in campaign.FAILURES]
    assert not campaign.missed(name, Counter(end.kind for end in outcomes.values())), "\n".join(failures)
    assert len({outcome.kind for outcome in outcomes.values()}) > (name != "kills")  # the cases reach what they aim at


@pytest.mark.parametrize("name", ["files", "disk", "forged"])
def test_a_hostile_case_ends_in_the_same_answer_or_in_two_lines(name: str) -> None:
    require_target(name, **({} if name == "forged" else {"models": False}))


@pytest.mark.models
@pytest.mark.loopback
def test_nothing_secret_is_kept_or_printed() -> None:
    require_target("secrets")


@pytest.mark.models
def test_what_was_killed_ends_with_the_same_rows() -> None:
    require_target("kills")


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
    "another number": (prints(BEFORE.replace("0.5", "0.51")), "silently different"),
    "another verdict": (prints(BEFORE.replace("GO", "NO-GO"), code=10), "silently different"),
    "another number with a warning": (prints(BEFORE.replace("0.5", "1").replace("[]", '["damaged"]')), "warned"),
    "an error of ours": (fails(DataEmpty("no rows", "add some")), "refused"),
    "two lines": (prints("", "error: no rows\nhint: add some\n", 3), "refused"),
    "a line without an end": (prints("", f"error: {'a' * 5000}\nhint: add some\n", 3), "long message"),
    "an error of another library": (fails(OSError(5, "Input/output error")), "traceback"),
    "half a character": (prints("\ud800"), "traceback"),
    "no end": (lambda: time.sleep(30), "hang"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_command_is_what_a_user_would_call_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, kind = ENDS[end]
    monkeypatch.setattr(campaign, "LIMIT_S", 0.2 if kind == "hang" else 60)
    before = campaign.outcome_of(prints(BEFORE))
    assert campaign.judged("report", before, campaign.outcome_of(command)).kind == kind
