"""What the storage of a run can do: its files are written whole and are never half there."""

from __future__ import annotations

import re
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from alphaprof.errors import RunUnreadable, shown

Content: TypeAlias = bytes | memoryview | pa.Buffer
NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[\w.=-]+(?:/[\w.=-]+)*", re.ASCII)


class Storage(Protocol):
    """Where the files of a run lie. Names are relative POSIX paths below the run; those that begin with a dot, or lie in a
    folder that does, are hidden.

    Every method raises `RunUnreadable` for a name that leads out of the run, and for what cannot be read or listed; those
    that write raise `DiskFull`, after which a file is there whole or not at all.
    """

    @property
    def shown(self) -> str:
        """How messages name it: a path, or a URI without credentials."""

    def make(self) -> bool:
        """Make the run's own folder, with those above it, and say whether it was missing; an object store has none."""

    @property
    def filesystem(self) -> Any:
        """A filesystem of pyarrow's whose root is the run, for readers of columns."""

    def discard(self) -> None:
        """Remove the empty folders of the run."""

    def require_there(self) -> None:
        """Raise `DiskFull` if the run's own folder is gone; of an object store the next write tells."""

    def require_writable(self) -> None:
        """Raise `DiskFull` if it is known before any work that it cannot be made or written."""

    def remove_temporary(self) -> None:
        """Remove what killed processes left of files that were half written."""

    def put(self, name: str, content: Content) -> None:
        """Write a file, in place of an earlier one. It is durable when this returns."""

    def put_new(self, name: str, content: Content) -> bool:
        """Write a file unless the name exists already, and say whether this call has written it."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `FileNotFoundError`."""

    def open(self, name: str) -> pa.NativeFile:
        """Return a file to read any part of, as pyarrow's Parquet reader does. Raises `FileNotFoundError`."""

    def names(self, prefix: str) -> dict[str, int]:
        """Return the bytes of every file below a folder ("": the run's own), by sorted name; hidden ones are left out."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


def require_inside(storage: Storage, name: str) -> None:
    """Raise `RunUnreadable` for a name that is none of a run's file, or leads out of it."""
    if not NAME.fullmatch(name):
        raise RunUnreadable(f"{storage.shown} lists an invalid file name: {shown(name)}", "profile again with another --out")
