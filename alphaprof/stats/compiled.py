"""Loops compiled for this machine at their first call (numba), and kept on disk for the next process.

Importing this module takes half a second, so that only modules of such loops do, and those are imported where they run. What
is kept is made anew when this file or that of a loop changes, not when another file changes that it imports: loops that call
each other stand in one file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return a loop whose results are those of its lines in Python, to the bit, whichever process compiled it: no sum is
    taken in another order, which vector units would need, and no product is fused. Threads may run it at the same time.
    """
    make = functools.partial(numba.njit, nogil=True, error_model="numpy")
    folder, before = loops_folder(), numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(folder or before)  # numba asks for it while it wraps a function
        return cast(Function, make(cache=folder is not None)(function))
    except RuntimeError:  # numba caches only what comes from a file: compiled again in every process
        return cast(Function, make()(function))
    finally:
        numba.config.CACHE_DIR = before


def compiling(function: Any) -> str | None:
    """Return what the first call of a loop takes, in words; None: an earlier process kept what it compiled."""
    folder, code = loops_folder(), function.py_func.__code__
    if folder is None:
        return "compiling loops for this processor, about ten seconds; the result cannot be cached, so every run recompiles"
    if any(folder.rglob(f"{Path(code.co_filename).stem}.{code.co_name}-{code.co_firstlineno}.*")):
        return None
    return "compiling loops for this processor, about ten seconds, once per machine"


def inlined(function: Function) -> Function:
    """Return a formula for the inside of `compiled` loops."""
    return cast(Function, numba.njit(inline="always")(function))


@functools.cache
def loops_folder() -> Path | None:
    """Where loops are kept: under NUMBA_CACHE_DIR or the user's cache, in a folder named after what this file says; None
    where that cannot be written.
    """
    base = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "alphaprof" / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


@intrinsic  # type: ignore[untyped-decorator]
def float_of(_: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return types.float32(types.int32), lambda _context, builder, _signature, given: builder.bitcast(given[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return types.int32(types.float32), lambda _context, builder, _signature, given: builder.bitcast(given[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def value_of(_: Any, logit: Any) -> Any:
    """Return a logit as float32: itself, or the bfloat16 with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        if logit == types.float32:
            return given[0]
        bits = builder.shl(builder.zext(given[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(logit), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to what the array `like` holds."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(types.CPointer(like.dtype)))

    return types.CPointer(like.dtype)(address, like), generate


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def matrix_row(place: Any, i: int, like: Any) -> Any:
    """Row i of a matrix whose address, bytes between rows and length of a row are `place` [3], of the dtype of `like`."""
    return carray(_pointer(place[0] + i * place[1], like), place[2])
