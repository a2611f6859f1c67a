"""Every failure that a user can cause: one class per situation, with an exit code and the next step.

`cli.main` is the one place that prints them, as two lines on stderr. Everything that is not an `AlphaprofError` is a
bug and keeps its traceback.
"""

from __future__ import annotations


class AlphaprofError(Exception):
    """Base of all failures with a remedy. `message` says what is wrong, `hint` what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ProfileInvalid(AlphaprofError):
    """The profile file, or an option that overrides it, cannot be used as it is written."""

    exit_code = 2


class OptionInvalid(AlphaprofError):
    """An option or argument of a command names something that does not exist."""

    exit_code = 2


class CostsUnreadable(AlphaprofError):
    """The file of step times that a profile names cannot be used as it is written."""

    exit_code = 2


class RuleNotDecodable(AlphaprofError, ValueError):
    """There is no speculative decoding here by this rule, or not of text that is chosen like this."""

    exit_code = 2


class ExtraMissing(AlphaprofError):
    """A command needs packages that the plain installation leaves out."""

    exit_code = 2


class DataUnreadable(AlphaprofError):
    """A data source is missing, malformed or unreachable."""

    exit_code = 3


class ColumnMissing(AlphaprofError):
    """The profile names a column that the data does not have, or that holds something else."""

    exit_code = 3


class DataEmpty(AlphaprofError):
    """A data source yields no document that can be profiled."""

    exit_code = 3


class ModelUnloadable(AlphaprofError):
    """A model or tokenizer is missing, unsupported or unreachable."""

    exit_code = 4


class VocabularyMismatch(AlphaprofError):
    """Target and draft give different meanings to the same token id."""

    exit_code = 4


class StepsNotTimed(AlphaprofError):
    """The steps of a model cannot be timed."""

    exit_code = 4


class LogitsNotFinite(AlphaprofError):
    """A model produced NaN or infinite logits."""

    exit_code = 4


class OutOfMemory(AlphaprofError):
    """A single document does not fit into memory."""

    exit_code = 5


class DiskFull(AlphaprofError):
    """The run directory cannot be written."""

    exit_code = 5


class RunExists(AlphaprofError):
    """The output directory holds something that a new run would overwrite."""

    exit_code = 6


class RunUnreadable(AlphaprofError):
    """A directory is not a run, or a run of another version, or is damaged."""

    exit_code = 6


class NoPositionLog(AlphaprofError):
    """A run was imported from an engine's metrics, and what is asked needs every position."""

    exit_code = 6


class RunMismatch(AlphaprofError):
    """A run cannot be continued or reused, because profile, models or data are not those that made it."""

    exit_code = 6


class CheckFailed(AlphaprofError):
    """A check found a quantity below its threshold; the check has been printed."""

    exit_code = 10


class CheckUndecided(AlphaprofError):
    """A check, or a comparison with the clock, could not tell, and is asked to fail then; it has been printed."""

    exit_code = 11


class NotComparable(AlphaprofError):
    """Two runs have too little in common for a difference between them to mean anything."""

    exit_code = 12


class OutsideTolerance(AlphaprofError):
    """What was predicted is too far from what a clock says; the comparison has been printed."""

    exit_code = 13
