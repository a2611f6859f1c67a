"""Loops compiled for this machine at their first call (numba), and kept on disk for the next process.

Importing this module takes half a second, so that only modules of such loops do, and those are imported where they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be taken in any order, which vector units need; NaN and infinity stay what they are, and a quotient as well.
REORDERED = {"reassoc", "contract", "nsz"}


def compiled(function: Function) -> Function:
    """A loop in float64 or integers, whose results are those of Python. Threads may run it at the same time."""
    return _compile(function, fastmath=False)


def vectorised(function: Function) -> Function:
    """A loop over float32 whose sums may be taken in any order. Threads may run it at the same time."""
    return _compile(function, fastmath=REORDERED)


def inlined(function: Function) -> Function:
    """A formula for the inside of `vectorised` loops."""
    found: Function = numba.njit(inline="always", fastmath=REORDERED)(function)
    return found


def _compile(function: Function, fastmath: Any) -> Function:
    found: Function
    make = functools.partial(numba.njit, nogil=True, error_model="numpy", fastmath=fastmath)
    try:
        found = make(cache=True)(function)
    except RuntimeError:  # nowhere to write: compiled again in every process
        found = make()(function)
    return found
