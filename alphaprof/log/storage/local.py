"""A folder as the storage of a run: files are written durably, and failures become our own errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log.storage.protocol import Content, require_inside

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of FAT and some FUSE: no hard links
MEND = "check that disk or mount, and give read access to it"
# What a file is called while it is written.
WRITTEN = re.compile(r"\.([\w.=-]+\.(parquet|json|safetensors|md|yaml)|\.beginning|\.probe-[0-9a-f]+)\.\d+\.tmp")
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space, then go on with --resume"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "correct the permissions, or choose another --out; then go on with --resume",
    ),
    errno.ENAMETOOLONG: "choose a shorter --out, and shorter names of drafts",
    errno.EFBIG: "lower shard_documents, or choose an --out on a file system that takes larger files",
}


@dataclass(frozen=True)
class LocalStorage:
    """A folder. Its own folder is made by `make` alone, so that a run that was deleted is not made again; folders in it are
    made as they are needed.

    A process that is killed leaves a hidden file, `WRITTEN`, beside the one that it wrote.
    """

    path: Path

    @property
    def shown(self) -> str:
        """The path."""
        return str(self.path)

    def make(self) -> bool:
        """Make the folder, with those above it. Raises `DiskFull`."""
        with writing(self.path):
            missing = not os.path.isdir(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            synced(self.path.parent)
        return missing

    @property
    def filesystem(self) -> Any:
        """Of the folder."""
        from pyarrow import fs

        return fs.SubTreeFileSystem(str(self.path), fs.LocalFileSystem())

    def discard(self) -> None:
        """Remove the folder and those in it if they are empty."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def require_there(self) -> None:
        """Raise `DiskFull` if the folder is gone."""
        if not os.path.isdir(self.path):
            raise DiskFull(
                f"{self.path} was deleted or renamed while it was written",
                "if it was renamed, resume a profile there with --out and --resume; otherwise start again",
            )

    def require_writable(self) -> None:
        """Raise `DiskFull` if the folder, or the one that it would be made in, is none or may not be written."""
        with writing(self.path):
            parent = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is not a directory" if not parent.is_dir() else "is not writable"
            raise DiskFull(
                f"cannot write {self.path}: {parent} {reason}", "choose another --out, or correct its permissions"
            )

    def remove_temporary(self) -> None:
        """Remove hidden files that `put` and `put_new` write; a process that is at it writes its own again."""
        for folder, _, files in os.walk(self.path):
            for name in filter(WRITTEN.fullmatch, files):
                with contextlib.suppress(OSError):
                    Path(folder, name).unlink()

    def put(self, name: str, content: Content) -> None:
        """Write a file. Raises `DiskFull`."""
        path = self._path(name)
        with self._writing(path):
            self._placed(path, content, Path.replace)
            synced(path.parent)

    def put_new(self, name: str, content: Content) -> bool:
        """Write a file unless the name exists. Raises `DiskFull`.

        Without hard links, on FAT for example, its content grows after its name is there.
        """
        path = self._path(name)

        def link(temporary: Path, path: Path) -> bool:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return _same(temporary, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                return _exclusive(path, content)
            return True

        with self._writing(path):
            written = bool(self._placed(path, content, link))
            synced(path.parent)
        return written

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `FileNotFoundError`, and `RunUnreadable`."""
        path = self._path(name)
        with _found(path):
            return path.read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        """Return a file to read any part of. Raises `FileNotFoundError`, and `RunUnreadable`."""
        path = self._path(name)
        with _found(path):
            return pa.OSFile(str(path), "rb")

    def names(self, prefix: str) -> dict[str, int]:
        """Return sizes of the files below a folder, whose links to other folders are followed. Raises `RunUnreadable`."""
        prefix = prefix.removesuffix("/")
        folder = self._path(prefix) if prefix else self.path
        with reading(folder, MEND):
            return dict(sorted(_files(folder, f"{prefix}/" if prefix else "")))

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name. Raises `RunUnreadable`."""
        path = self._path(name)
        with reading(path, MEND):
            return os.path.exists(path)  # unlike Path.exists, also if a name is too long

    def remove(self, name: str) -> None:
        """Remove a file. Raises `DiskFull`."""
        path = self._path(name)
        with writing(path):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        require_inside(self, name)
        return self.path / name

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Raise `DiskFull` if a file cannot be written; another one if the run is gone."""
        with writing(path):
            try:
                yield
            except FileNotFoundError:
                self.require_there()
                raise

    def _placed(self, path: Path, content: Content, place: Callable[[Path, Path], object]) -> object:
        """Return what `place` makes of a hidden file with the content and of its path; once more if the hidden file was
        removed meanwhile: the process that finishes a run removes those of others.
        """
        try:
            with self._beside(path, content) as temporary:
                return place(temporary, path)
        except FileNotFoundError:
            self.require_there()
        with self._beside(path, content) as temporary:
            return place(temporary, path)

    @contextlib.contextmanager
    def _beside(self, path: Path, content: Content) -> Iterator[Path]:
        """Yield a hidden file with the content, on disk. Its number is random: processes of several machines write here."""
        self._fold(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.randbits(48)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            synced(temporary)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _fold(self, folder: Path) -> None:
        """Make a folder below the run's own, with those between."""
        if folder == self.path or folder.is_dir():
            return
        self._fold(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        synced(folder.parent)


@contextlib.contextmanager
def _found(path: Path) -> Iterator[None]:
    """Raise `RunUnreadable` if a file cannot be read, but let it be missing."""
    missing = False
    with reading(path, MEND):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            missing = True
    if missing:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _same(temporary: Path, path: Path) -> bool:
    """Return whether a name is of this very file: NFS may repeat a link whose answer was lost, and then refuse it."""
    try:
        return os.path.samefile(temporary, path)
    except FileNotFoundError:  # removed meanwhile
        return False


def _exclusive(path: Path, content: Content) -> bool:
    """Write a file that this call alone could make; nothing of it is left if it cannot be written."""
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
        synced(path)
    except BaseException:
        path.unlink()
        raise
    return True


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield names and sizes below a folder; what is removed meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}{entry.name}", entry.stat().st_size


def synced(path: Path) -> None:
    """Have the system write a file or a folder to the disk, if it can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not for folders, say some file systems
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskFull`, with the step that mends its cause, if the system refuses to write a path of a run or to read it
    back.
    """
    try:
        yield
    except OSError as error:
        hint = REMEDIES.get(error.errno or 0, "check that disk or mount, then go on with --resume")
        raise DiskFull(f"cannot write {path}: {error.strerror or error}", hint) from None


@contextlib.contextmanager
def reading(path: Path | str, hint: str) -> Iterator[None]:
    """Raise `RunUnreadable`, which names the path, if it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError) as error:
        reason = next(iter(str(getattr(error, "strerror", None) or error).splitlines()), type(error).__name__)
        raise RunUnreadable(f"{path} cannot be read: {reason}", hint) from None
