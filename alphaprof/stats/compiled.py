"""Loops compiled for this machine at their first call (numba), and kept on disk for the next process.

Importing this module takes half a second, so that only modules of such loops do, and those are imported where they run. What
is kept is made anew when this file or that of a loop changes, not when another file changes that it imports: loops that call
each other stand in one file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be taken in any order, which vector units need; NaN and infinity stay what they are, and a quotient as well.
REORDERED = {"reassoc", "contract", "nsz"}
PATIENCE = 300  # seconds that another process may take to compile, which takes some ten


def compiled(function: Function) -> Function:
    """Return a loop in float64 or integers, whose results are those of Python. Threads may run it at the same time."""
    return _compile(function, fastmath=False)


def vectorised(function: Function) -> Function:
    """Return a loop over float32 whose sums may be taken in any order. Threads may run it at the same time."""
    return _compile(function, fastmath=REORDERED)


def compile_elsewhere(module: str, file: str, say: Callable[[str], None] = lambda _: None) -> None:
    """Have another process call `compile_all` of a module, once for its `file` as it is: this one loads what is kept.

    What numba runs right after compiling has loops that call each other put together otherwise than what it keeps, and sums
    of float32 in another order: rows of a run must not depend on which process compiled. Where nothing can be kept every
    process compiles, each in the same way. `say`: called before, since it takes a while.
    """
    folder = loops_folder()
    if folder is None:  # what that process compiled would be lost
        say("compiling loops for this processor, about ten seconds; the result cannot be cached, so every run recompiles")
        return
    state = (file, os.stat(file).st_mtime_ns, numba.__version__, sys.version, llvmlite.binding.get_host_cpu_name())
    done = folder / f"{module}-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"
    if done.exists():
        return
    say("compiling loops for this processor, about ten seconds, once per machine")
    code = f"import importlib; importlib.import_module({module!r}).compile_all()"
    command = [sys.executable, "-P", "-c", code]  # nothing is imported from the working directory, which may hold anything
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # this process compiles then
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=PATIENCE)  # noqa: S603  # our own words
        done.touch()


def inlined(function: Function) -> Function:
    """Return a formula for the inside of `vectorised` loops."""
    return cast(Function, numba.njit(inline="always", fastmath=REORDERED)(function))


def _compile(function: Function, fastmath: Any) -> Function:
    make = functools.partial(numba.njit, nogil=True, error_model="numpy", fastmath=fastmath)
    folder, before = loops_folder(), numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(folder or before)  # numba asks for it while it wraps a function
        return cast(Function, make(cache=folder is not None)(function))
    except RuntimeError:  # numba caches only what comes from a file: compiled again in every process
        return cast(Function, make()(function))
    finally:
        numba.config.CACHE_DIR = before


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
