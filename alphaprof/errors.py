"""Every failure that a user can cause: one class per situation, with an exit code and the next step.

`cli.main` is the one place that prints them, as two lines on stderr. Everything that is not an `AlphaprofError` is a
bug and keeps its traceback.
"""

from __future__ import annotations

import re
from typing import Any

# Limits in characters for what a message repeats: a quoted value, a word without spaces (a path, a key, a number of 5,000
# digits), and any other text.
VALUE, WORD, TEXT = 60, 200, 600


# In an address: a user with a password, and a query, which may hold a token or a signature. Either may have been cut, and of
# what was taken for a path one slash is left.
REST = r"(?: \.\.\. [^\s'\"\\]*)?"
USER = re.compile(rf"(?<=\w)(:/{{1,2}})(?:[^\s/?#'\"\\]*@|[^\s/?#'\"\\@:]+:(?!\d{{1,5}}\b)[^\s/?#'\"\\]+{REST})")
QUERY = re.compile(rf"(\w:/{{1,2}}[^\s?'\"\\]*\?)[^\s'\"\\]+{REST}")


def without_secrets(value: Any) -> Any:
    """Return text, or what holds texts, with addresses that name no user and no value of a query."""
    if isinstance(value, str):
        return QUERY.sub(r"\1***", USER.sub(lambda found: f"{found[1]}***{'@' * found[0].endswith('@')}", value))
    if isinstance(value, dict):
        return {name: without_secrets(each) for name, each in value.items()}
    return type(value)(map(without_secrets, value)) if isinstance(value, (list, tuple)) else value


def shown(value: object) -> str:
    """Return the beginning of a value's repr, for messages; "an object" or "a list" for those."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= VALUE else f"{text[:VALUE]}..."


def visible(text: str) -> str:
    """Untrusted text with its control and direction-changing characters made visible."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def cut(text: str, most: int = WORD) -> str:
    """Return the text, without its middle if it is longer than `most` characters."""
    half = (most - len(" ... ")) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def require_utf8(text: str) -> None:
    """Raise `OptionInvalid` for an argument or a path that is not UTF-8, which pyarrow, JSON and tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        escaped = cut(text.encode("utf-8", "backslashreplace").decode())
        raise OptionInvalid(f"{escaped} is not valid UTF-8", "rename this file or folder, or choose another one") from None


class AlphaprofError(Exception):
    """Base of all failures that a user can fix: `message` and `hint` (the next step), each `without_secrets`, cut to 600
    characters.
    """

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        cls.exit_code = cls.exit_code if exit_code is None else exit_code

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = (cut(without_secrets(text), TEXT) for text in (message, hint))
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[AlphaprofError], tuple[str, str], dict[str, object]]:
        """With message, hint and notes, so that an error can be raised in another process."""
        return type(self), (self.message, self.hint), vars(self)


class ProfileInvalid(AlphaprofError, exit_code=2):
    """The profile file, or an option that overrides it, is invalid."""


class OptionInvalid(AlphaprofError, exit_code=2):
    """An option or argument of a command names something that does not exist."""


class CostsUnreadable(AlphaprofError, exit_code=2):
    """The file of step times that a profile names is missing or invalid."""


class RuleNotDecodable(AlphaprofError, ValueError, exit_code=2):
    """Speculative decoding does not support this rule here, or not for this kind of text."""


class ExtraMissing(AlphaprofError, exit_code=2):
    """A command needs an optional dependency."""


class DataUnreadable(AlphaprofError, exit_code=3):
    """A data source is missing, malformed or unreachable."""


class ColumnMissing(AlphaprofError, exit_code=3):
    """The profile names a column that the data does not have, or whose values have the wrong type."""


class DataEmpty(AlphaprofError, exit_code=3):
    """A data source yields no document that can be profiled."""


class ModelUnloadable(AlphaprofError, exit_code=4):
    """A model or tokenizer is missing, unsupported or unreachable."""


class VocabularyMismatch(AlphaprofError, exit_code=4):
    """Target and draft have different vocabularies."""


class StepsNotTimed(AlphaprofError, exit_code=4):
    """The steps of a model cannot be timed."""


class EngineFailed(AlphaprofError, exit_code=4):
    """The profile's vLLM cannot be started or reached, or fails."""


class LogitsNotFinite(AlphaprofError, exit_code=4):
    """A model produced NaN or infinite logits."""


class OutOfMemory(AlphaprofError, exit_code=5):
    """A single document does not fit into memory."""


class DiskFull(AlphaprofError, exit_code=5):
    """The run directory or an output file cannot be written, or a disk fails during a read."""


class RunExists(AlphaprofError, exit_code=6):
    """The output directory contains files that a new run would overwrite."""


class RunUnreadable(AlphaprofError, exit_code=6):
    """A directory is not a run, was written by another version, or is damaged."""


class RunDamaged(RunUnreadable):
    """A file of a run is missing or does not match its checksum. A file that cannot be read now may still be intact."""


class HeadRecordUnreadable(AlphaprofError, exit_code=6):
    """A trained head's record, or its test results, are missing, damaged or of another version."""


class NoPositionLog(AlphaprofError, exit_code=6):
    """The run was imported from an engine's metrics, and the request needs a log of every position."""


class WorkerFailed(AlphaprofError, exit_code=6):
    """A worker process of a run failed; the exit code is the worker's own if it reported one."""

    def __init__(self, message: str, hint: str, exit_code: int = 6) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class RunMismatch(AlphaprofError, exit_code=6):
    """A run cannot be resumed or reused, because its profile, models or data have changed."""


class CheckFailed(AlphaprofError, exit_code=10):
    """A check failed: a quantity is below its threshold. The check has been printed."""


class CheckUndecided(AlphaprofError, exit_code=11):
    """A check, or a comparison with the clock, is undecided, and the command was asked to fail then; it has been printed."""


class NotComparable(AlphaprofError, exit_code=12):
    """Two runs have too little in common to compare."""


class OutsideTolerance(AlphaprofError, exit_code=13):
    """A prediction differs too much from the measured time; the comparison has been printed."""
