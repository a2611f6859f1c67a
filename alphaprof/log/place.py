"""Where the files of a run lie: a local folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from alphaprof.errors import DiskFull
from alphaprof.log.files import reading, synced, writing

TEMPORARY = ".tmp"
ACCESS = "check that disk or mount, and give read access to it"


class Place(Protocol):
    """Where the files of a run lie. Names are relative POSIX paths below it."""

    shown: str  # how messages name it
    filesystem: pafs.FileSystem  # whose root it is, for readers of columns

    def put(self, name: str, content: bytes | pa.Buffer) -> None:
        """Write a whole file, which replaces another; it is on the disk when this returns."""

    def put_new(self, name: str, content: bytes | pa.Buffer) -> bool:
        """Write a whole file unless there is one of that name; whether it did."""

    def read(self, name: str) -> bytes:
        """The content of a file. Raises `FileNotFoundError`."""

    def open(self, name: str) -> pa.NativeFile:
        """A file for reading at random."""

    def names(self, prefix: str) -> dict[str, int]:
        """Every file below a folder by its name, with its size in bytes; none where the folder is missing."""

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def exists(self) -> bool:
        """Whether the place is there."""

    def make(self) -> None:
        """Make it where it is missing."""

    def discard(self) -> None:
        """Remove it as far as it is empty."""

    def require_writable(self) -> None:
        """Raise `DiskFull` where it cannot be made or written: known before any work."""

    def remove_temporary(self) -> None:
        """Remove what killed processes left of half-written files."""


class LocalPlace:
    """A folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)
        self.filesystem = pafs.SubTreeFileSystem(str(path), pafs.LocalFileSystem())

    def put(self, name: str, content: bytes | pa.Buffer) -> None:
        """Write a whole file."""
        path = self._folder(name)
        with writing(path):
            self._placed(path, content, Path.replace)

    def put_new(self, name: str, content: bytes | pa.Buffer) -> bool:
        """Write a whole file unless there is one."""
        path = self._folder(name)
        with writing(path):
            try:
                self._placed(path, content, os.link)
            except FileExistsError:
                return False
        return True

    def _placed(self, path: Path, content: bytes | pa.Buffer, place: Callable[[Path, Path], object]) -> None:
        """Write a file beside a path, and have it take its place; again where a process that cleans up has taken it away."""
        for last in (False, False, True):
            try:
                temporary = self._temporary(path, content)
                try:
                    place(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
                synced(path.parent)
                return
            except FileNotFoundError:
                if last or not path.parent.is_dir():
                    raise

    def _temporary(self, path: Path, content: bytes | pa.Buffer) -> Path:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        try:
            temporary.write_bytes(content)
            synced(temporary)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return temporary

    def _folder(self, name: str) -> Path:
        self.require_there()
        path = self.path / name
        with writing(path):
            for folder in reversed(path.relative_to(self.path).parents):
                (self.path / folder).mkdir(exist_ok=True)
        return path

    def require_there(self) -> None:
        """Raise `DiskFull` where the folder is gone."""
        if not self.path.is_dir():
            raise DiskFull(
                f"{self.path} was deleted or renamed while it was written",
                "shards are complete where it is now: a profile goes on there with --resume, or begins again",
            )

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            with reading(self.path / name, ACCESS):
                raise

    def open(self, name: str) -> pa.NativeFile:
        """A file for reading at random."""
        return self.filesystem.open_input_file(name)

    def names(self, prefix: str) -> dict[str, int]:
        """Every file below a folder."""
        found = {}
        with reading(self.path / prefix, ACCESS):
            for folder, _, files in os.walk(self.path / prefix, onerror=_unless_missing):
                for file in files:
                    path = Path(folder, file)
                    if not file.startswith("."):
                        with contextlib.suppress(FileNotFoundError):
                            found[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return found

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        with reading(self.path / name, ACCESS):
            return (self.path / name).exists()

    def remove(self, name: str) -> None:
        """Remove a file."""
        with writing(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def exists(self) -> bool:
        """Whether the folder is there."""
        return self.path.exists()

    def make(self) -> None:
        """Make it."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def discard(self) -> None:
        """Remove empty folders."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def require_writable(self) -> None:
        """Raise `DiskFull` where it cannot be made or written."""
        with writing(self.path):
            parent = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is not a directory" if not parent.is_dir() else "is not writable"
            raise DiskFull(
                f"cannot write {self.path}: {parent} {reason}", "choose another --out, or correct its permissions"
            )

    def remove_temporary(self) -> None:
        """Remove half-written files."""
        for path in self.path.rglob(f".*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                path.unlink()


def _unless_missing(error: OSError) -> None:
    """Raise the error of a listing, unless there is nothing to list."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def place_of(where: str | Path) -> Place:
    """The place that a path names."""
    return LocalPlace(Path(where))
