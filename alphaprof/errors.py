"""Every failure that a user can cause: one class per situation, with an exit code and the next step.

`cli.main` is the one place that prints them, as two lines on stderr. Everything that is not an `AlphaprofError` is a
bug and keeps its traceback.
"""

from __future__ import annotations

# Characters that a message repeats of what was given: of a value that it quotes, of a word without spaces (a path, a key, a
# number of 5,000 digits), and of a text that nothing else bounds.
VALUE, WORD, TEXT = 60, 200, 600


def shown(value: object) -> str:
    """The beginning of a value as Python writes it, for messages; an object or a list by its kind."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= VALUE else f"{text[:VALUE]}..."


def cut(text: str, most: int = WORD) -> str:
    """Cuts the middle out of a text that is longer than `most` characters."""
    half = (most - len(" ... ")) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


class AlphaprofError(Exception):
    """Base of all failures with a remedy: what is wrong, and what to do next, each cut to 600 characters."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        cls.exit_code = cls.exit_code if exit_code is None else exit_code

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(cut(message, TEXT))
        self.message, self.hint = cut(message, TEXT), cut(hint, TEXT)


class ProfileInvalid(AlphaprofError, exit_code=2):
    """The profile file, or an option that overrides it, cannot be used as it is written."""


class OptionInvalid(AlphaprofError, exit_code=2):
    """An option or argument of a command names something that does not exist."""


class CostsUnreadable(AlphaprofError, exit_code=2):
    """The file of step times that a profile names cannot be used as it is written."""


class RuleNotDecodable(AlphaprofError, ValueError, exit_code=2):
    """There is no speculative decoding here by this rule, or not of text that is chosen like this."""


class ExtraMissing(AlphaprofError, exit_code=2):
    """A command needs packages that the plain installation leaves out."""


class DataUnreadable(AlphaprofError, exit_code=3):
    """A data source is missing, malformed or unreachable."""


class ColumnMissing(AlphaprofError, exit_code=3):
    """The profile names a column that the data does not have, or that holds something else."""


class DataEmpty(AlphaprofError, exit_code=3):
    """A data source yields no document that can be profiled."""


class PartsOverlap(AlphaprofError, exit_code=3):
    """A head would be tested on texts that it was trained on."""


class ModelUnloadable(AlphaprofError, exit_code=4):
    """A model or tokenizer is missing, unsupported or unreachable."""


class VocabularyMismatch(AlphaprofError, exit_code=4):
    """Target and draft give different meanings to the same token id."""


class StepsNotTimed(AlphaprofError, exit_code=4):
    """The steps of a model cannot be timed."""


class EngineFailed(AlphaprofError, exit_code=4):
    """The vLLM that a profile names cannot be started or reached, or fails."""


class LogitsNotFinite(AlphaprofError, exit_code=4):
    """A model produced NaN or infinite logits."""


class OutOfMemory(AlphaprofError, exit_code=5):
    """A single document does not fit into memory."""


class DiskFull(AlphaprofError, exit_code=5):
    """The run directory or an answer cannot be written, or a disk fails while something is read."""


class RunExists(AlphaprofError, exit_code=6):
    """The output directory holds something that a new run would overwrite."""


class RunUnreadable(AlphaprofError, exit_code=6):
    """A directory is not a run, or a run of another version, or is damaged."""


class RunDamaged(RunUnreadable):
    """A file of a run is missing, or is not what was written; a file that cannot be read now may be whole."""


class HeadRecordUnreadable(AlphaprofError, exit_code=6):
    """What a trained head says of itself, or of how it did on test documents, is missing, damaged or of another version."""


class NoPositionLog(AlphaprofError, exit_code=6):
    """A run was imported from an engine's metrics, and what is asked needs every position."""


class WorkerFailed(AlphaprofError, exit_code=6):
    """One of several processes that share the work of a run has failed, where it has said so with its own exit code."""

    def __init__(self, message: str, hint: str, exit_code: int = 6) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class RunMismatch(AlphaprofError, exit_code=6):
    """A run cannot be continued or reused, because profile, models or data are not those that made it."""


class CheckFailed(AlphaprofError, exit_code=10):
    """A check found a quantity below its threshold; the check has been printed."""


class CheckUndecided(AlphaprofError, exit_code=11):
    """A check, or a comparison with the clock, could not tell, and is asked to fail then; it has been printed."""


class NotComparable(AlphaprofError, exit_code=12):
    """Two runs have too little in common for a difference between them to mean anything."""


class OutsideTolerance(AlphaprofError, exit_code=13):
    """What was predicted is too far from what a clock says; the comparison has been printed."""
