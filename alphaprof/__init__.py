"""alphaprof: will speculative decoding pay, for which traffic and draft, and how sure is that?

README.md names the road through the code; what a command computes is in commands/.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from alphaprof.version import __version__ as __version__

if TYPE_CHECKING:
    from alphaprof.api import OpenedRun


def open(path: str | PathLike[str]) -> OpenedRun:  # noqa: A001  (alphaprof.open is how users say it)
    """Return the run in a directory, for reading in Python. Raises `alphaprof.errors.RunUnreadable`."""
    from alphaprof.api import OpenedRun

    return OpenedRun(path)
