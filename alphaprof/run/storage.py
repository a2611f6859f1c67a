"""Where the files of a run lie: a local folder, or a folder of an object store. One process writes them, others read beside
it: a file is put whole, in place of an earlier one, so that readers see the earlier content or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import fs

from alphaprof.config.paths import SCHEMES
from alphaprof.errors import AlphaprofError, DiskFull, OptionInvalid, RunExists, RunUnreadable, require_utf8, shown

Content: TypeAlias = bytes | memoryview | pa.Buffer
NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[\w.=-]+(?:/[\w.=-]+)*", re.ASCII)
WRITER = "writer.json"  # in an object store: who writes there
Item = TypeVar("Item")
Made = TypeVar("Made")
AT_ONCE = 32  # files that are asked of an object store at the same time: each answer takes long, and little work
Check: TypeAlias = Callable[[], None]
READS = 5  # how often a file is read that is replaced meanwhile, or that the store fails to send


class Storage:
    """Where the files of a run lie. Names are relative POSIX paths below the run; those that begin with a dot, or lie in a
    folder that does, are hidden.

    Every method raises `RunUnreadable` for a name that leads out of the run and for a file that cannot be read or listed;
    those that write raise `DiskFull`.
    """

    _store: Any  # a filesystem of pyarrow's

    @property
    def shown(self) -> str:
        """How messages name it: a path, or a URI without credentials."""
        raise NotImplementedError

    def make(self) -> bool:
        """Make the run's own folder, with those above it, and say whether it was missing; an object store has no folders."""
        return False

    def discard(self) -> None:
        """Remove the empty folders of the run."""

    def require_there(self) -> None:
        """Raise `DiskFull` if the run's own folder is gone; of an object store the next write tells."""

    def remove_temporary(self) -> None:
        """Remove what killed processes left of files that they were writing. For the writer alone."""

    def require_writable(self) -> None:
        """Raise `DiskFull` if it is known before any work that the run cannot be made or written."""
        self.put(".probe", b"")
        self.remove(".probe")

    def put(self, name: str, content: Content) -> None:
        """Write a whole file, in place of an earlier one. It is durable when this returns."""
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `FileNotFoundError`.

        pyarrow asks an object store for the size of an object and then for that many bytes. An object that is replaced in
        between is read again, and so is one for which the store sent an error longer than the object: pyarrow gives up then.
        """
        with self._asking(name, RunUnreadable):
            for attempt in range(READS):
                try:
                    with self._open(name) as file:
                        content = bytes(file.read())
                except OSError as error:
                    if "INTERNAL_FAILURE" not in str(error) or attempt == READS - 1:
                        raise
                    time.sleep(attempt)
                    continue
                if len(content) == self._store.get_file_info(self._path(name)).size:
                    return content
        raise RunUnreadable(f"{self.shown}/{name} cannot be read: it keeps changing", "try again when it is written")

    def _open(self, name: str) -> pa.NativeFile:
        try:
            return self._store.open_input_file(self._path(name))
        except FileNotFoundError:
            self._require_bucket()
            raise

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[pa.NativeFile]:
        """Yield a file to read any part of. Raises `FileNotFoundError`."""
        with self._asking(name, RunUnreadable):
            file = self._open(name)
        with file:
            try:
                yield file
            except OSError as error:  # of a read in the block
                reason, hint = self._why(error, RunUnreadable)
                raise RunUnreadable(f"{self.shown}/{name} cannot be read: {reason}", hint) from None

    def names(self, prefix: str) -> dict[str, int]:
        """Return the bytes of every file below a folder ("": the run's own) by sorted name, without hidden ones and the
        claim of a writer.
        """
        folder = prefix.removesuffix("/")
        with self._asking(folder, RunUnreadable):
            try:
                chosen = fs.FileSelector(self._path(folder), recursive=True, allow_not_found=True)
                found = [info for info in self._store.get_file_info(chosen) if info.type == fs.FileType.File]
            except NotADirectoryError:
                found = []
            if not found:
                self._require_bucket()
            sizes = sorted((info.path.removeprefix(f"{self._path('')}/"), info.size) for info in found)
        return {name: size for name, size in sizes if name != WRITER and not re.search(r"(^|/)\.", name)}

    def each(self, read: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Made]:
        """Yield what `read` makes of each item, in their order; of several at once if each takes requests."""
        yield from map(read, items)

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        with self._asking(name, RunUnreadable):
            return bool(self._store.get_file_info(self._path(name)).type == fs.FileType.File)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with self._asking(name, DiskFull), contextlib.suppress(FileNotFoundError):
            self._store.delete_file(self._path(name))

    def owned(self, take_over: bool = False) -> contextlib.AbstractContextManager[Check]:
        """Make this process the one writer of a run that is made. Raises `RunExists`, which names the process that is.

        Yield what is called before each record is written: it raises `RunExists` if another process has taken over, and
        `DiskFull` if the run's folder is gone.

        `take_over` ends the claim of another process on an object store; the lock on a folder ends with its process.
        """
        raise NotImplementedError

    def _path(self, name: str) -> str:
        """Return how pyarrow names a file or a folder; the run's own for ""."""
        raise NotImplementedError

    def _require_bucket(self) -> None:
        """Raise `OSError` if the bucket does not exist: pyarrow says only that an object does not."""

    def _why(self, error: Exception, kind: type[AlphaprofError]) -> tuple[str, str]:
        """Return why something failed, and what to do."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _asking(self, name: str, kind: type[AlphaprofError]) -> Iterator[None]:
        """Raise an error of a kind, or `FileNotFoundError` for a missing file that is to be read."""
        if name:
            require_inside(self, name)
        path = f"{self.shown}/{name}".rstrip("/")
        try:
            yield
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and kind is RunUnreadable:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
            reason, hint = self._why(error, kind)
            raise kind(
                f"cannot write {path}: {reason}" if kind is DiskFull else f"{path} cannot be read: {reason}", hint
            ) from None


def require_inside(storage: Storage, name: str) -> None:
    """Raise `RunUnreadable` for a name that is none of a run's file, or leads out of it."""
    if not NAME.fullmatch(name):
        raise RunUnreadable(f"{storage.shown} lists an invalid file name: {shown(name)}", "profile again with another --out")


def _myself() -> dict[str, Any]:
    """Return what a claim says of its process; the nonce tells two claims of one process apart."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": since, "nonce": secrets.token_hex(16)}


def _claim(content: bytes) -> dict[str, Any]:
    """Return what `_myself` wrote; empty if it is damaged or only being written."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _who(claim: dict[str, Any]) -> str:
    """Return a process, for messages."""
    process, host, since = (shown(claim.get(key)) for key in ("process", "host", "since"))
    return f"process {process} on {host}, which began at {since}" if claim else "another process"


# A local folder.

TEMPORARY = re.compile(r"\.[\w.=-]+\.\d+\.tmp")  # what a file is called while it is written
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)  # some network file systems
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space, then go on with --resume"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "correct the permissions, or choose another --out; then go on with --resume",
    ),
    errno.ENAMETOOLONG: "choose a shorter --out, and shorter names of drafts",
    errno.EFBIG: "lower shard_documents, or choose an --out on a file system that takes larger files",
}


def _reason(error: Exception) -> str:
    """Return what the system or pyarrow says of an error, on one line."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else next(iter(str(error).splitlines()), type(error).__name__)


def _remedy(error: Exception) -> str:
    """Return what to do about a file that cannot be written."""
    return REMEDIES.get(getattr(error, "errno", None) or 0, "check that disk or mount, then go on with --resume")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskFull`, with the step that mends its cause, if the system refuses to write a path of a run."""
    try:
        yield
    except OSError as error:
        raise DiskFull(f"cannot write {path}: {_reason(error)}", _remedy(error)) from None


@contextlib.contextmanager
def reading(path: Path | str, hint: str) -> Iterator[None]:
    """Raise `RunUnreadable`, which names the path, if the system or pyarrow cannot read it."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RunUnreadable(f"{path} cannot be read: {_reason(error)}", hint) from None


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


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A folder. Its own folder is made by `make` alone, so that a run that was deleted is not made again; folders in it are
    made as they are needed. A process that is killed leaves a hidden file beside the one that it wrote.
    """

    path: Path
    _store: Any = field(default_factory=fs.LocalFileSystem, init=False, repr=False, compare=False)
    _mine: list[int] = field(default_factory=list, init=False, repr=False, compare=False)  # the folder that is owned, opened

    @property
    def shown(self) -> str:
        """The path."""
        return str(self.path)

    def make(self) -> bool:
        """Make the folder, with those above it. Raises `DiskFull`."""
        self.require_writable()
        with writing(self.path):
            missing = not os.path.isdir(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            synced(self.path.parent)
        return missing

    def discard(self) -> None:
        """Remove the folder and those in it if they are empty."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def require_there(self) -> None:
        """Raise `DiskFull` if the folder is gone, or is another one than that which this process owns."""
        with writing(self.path):
            there = os.path.isdir(self.path) and all(_is_at(self.path, each) for each in self._mine[-1:])
        if not there:
            raise DiskFull(
                f"{self.path} was deleted, renamed or replaced while it was written",
                "if it was renamed, resume a profile there with --out and --resume; otherwise start again",
            )

    def remove_temporary(self) -> None:
        """Remove the hidden files that `put` writes."""
        for folder, _, files in os.walk(self.path):
            for name in filter(TEMPORARY.fullmatch, files):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    def require_writable(self) -> None:
        """Raise `DiskFull` if the folder, or the one that it would be made in, is none or may not be written."""
        with writing(self.path):
            parent = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is not a directory" if not parent.is_dir() else "is not writable"
            raise DiskFull(
                f"cannot write {self.path}: {parent} {reason}", "choose another --out, or correct its permissions"
            )

    def put(self, name: str, content: Content) -> None:
        """Write a file. Raises `DiskFull`, after which the earlier content is there."""
        require_inside(self, name)
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{secrets.randbits(48)}.tmp")
        self.require_there()
        with writing(path):
            try:
                self._make_folder(path.parent)
                with temporary.open("xb") as file:
                    file.write(content)
                synced(temporary)
                self.require_there()
                os.replace(temporary, path)
                synced(path.parent)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                if isinstance(error, FileNotFoundError):
                    self.require_there()
                raise

    @contextlib.contextmanager
    def owned(self, take_over: bool = False) -> Iterator[Check]:
        """Lock the hidden file `.writer`. The system frees the lock when this process ends, in whatever way, unless one that
        it forked meanwhile lives on. A file system without locks gives none.
        """
        if not os.path.isdir(self.path):
            self.require_there()
        path = self.path / ".writer"
        with writing(path):
            descriptor = self._locked(path)
            self._mine.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            yield self.require_there
        finally:
            os.close(self._mine.pop())
            with contextlib.suppress(OSError):
                if _is_at(path, descriptor):  # not if the run was renamed, and its path belongs to another
                    path.unlink()
            os.close(descriptor)

    def _open(self, name: str) -> pa.NativeFile:
        if not stat.S_ISREG(os.stat(self._path(name)).st_mode):  # a pipe would never end
            raise OSError("it is not a regular file")
        return super()._open(name)

    def _locked(self, path: Path) -> int:
        """Return a descriptor of the file, locked and describing this process."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    owner = _who(_claim(os.pread(descriptor, 4096, 0)))
                    raise RunExists(
                        f"{self.path} is being written by {owner}", "wait until it ends, or choose another --out"
                    ) from None
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                if _is_at(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last owner has removed it between our opening and our locking it

    def _path(self, name: str) -> str:
        return os.path.join(self.path.absolute(), name) if name else str(self.path.absolute())

    def _why(self, error: Exception, kind: type[AlphaprofError]) -> tuple[str, str]:
        return _reason(error), _remedy(error) if kind is DiskFull else "check that disk or mount, and give read access to it"

    def _make_folder(self, folder: Path) -> None:
        """Make a folder below the run's own, with those between."""
        if folder == self.path or folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        synced(folder.parent)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Object stores.

ATTEMPTS = 5  # how often a request is made, with growing pauses: 8 seconds of pauses, on the average
# Seconds until an attempt is given up: without a connection, and without a byte; of a request with a body libcurl waits 6 to
# 7 seconds longer, since it averages. A store that accepts and never answers is given up within a minute.
CONNECT, SILENCE = 5, 3
PATIENCE = timedelta(seconds=20)  # the same for each call of Google's client
WHOLE = 5 * 1024**2  # bytes: S3 takes no smaller part of an upload, so pyarrow sends less than this in one request
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
WHERE = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "the bucket's name", "abfs": "AZURE_STORAGE_ACCOUNT_NAME"}
NO_BUCKET = "NO_SUCH_BUCKET"
# What the text of an error may hold, why it failed, and what to do: the first that fits.
CAUSES = (
    (rf"{NO_BUCKET}|ContainerNotFound", "the bucket {bucket} does not exist", "create it, or check the name, {where}"),
    (
        "PermanentRedirect|AuthorizationHeaderMalformed|HTTP status 301",
        "the bucket is in another region",
        "set AWS_REGION to that region",
    ),
    (
        "SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY_ID|ACCESS_DENIED|ExpiredToken|InvalidToken|HTTP status 40[13]|"
        "PERMISSION_DENIED|UNAUTHENTICATED|OAuth2|Authentication|Authorization",
        "access is denied",
        "check {keys}, and that they can list, read, write and delete there",
    ),
    (
        "NETWORK_CONNECTION|SLOW_DOWN|INTERNAL_FAILURE|UNAVAILABLE|HTTP status 5..",
        "the store failed or cannot be reached, and retries did not help",
        "check the network and {where}; resume a profile with --resume",
    ),
    ("", "the store refused it", "check {keys}, {where} and the store's log; resume a profile with --resume"),
)


@dataclass(frozen=True)
class ObjectStorage(Storage):
    """A folder of a bucket: of S3 or what speaks like it, of Google Cloud Storage, or of Azure (a container).

    Region, endpoint and keys come from the environment, at once. Raises `OptionInvalid` if that holds nonsense.
    """

    scheme: str
    bucket: str
    prefix: str
    _store: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_store", _filesystem(self.scheme))

    @property
    def shown(self) -> str:
        """The URI."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, name: str, content: Content) -> None:
        """Write an object. Raises `DiskFull`, after which its earlier content is there, or all of the new one if only the
        store's answer was lost; parts of a large one may lie where no listing shows them, until the bucket's rules end them.

        pyarrow completes an upload when its stream is closed or collected, whatever was written until then: an object that
        is torn or empty would be there after an exception. So nothing may raise between opening and closing: Ctrl-C reaches
        only the main thread, and parts are uploaded in the background, whose failures `close` raises. A record has the
        SHA-256 of every file, so that a torn one is found as damage.
        """
        with self._asking(name, DiskFull), ThreadPoolExecutor(1) as thread:
            thread.submit(self._send, self._path(name), content).result()

    def _send(self, path: str, content: Content) -> None:
        # An object of several parts is begun when it is opened: if that failed in `write`, an empty object would be left.
        store = self._store if memoryview(content).nbytes < WHOLE else _filesystem(self.scheme, allow_delayed_open=False)
        stream = store.open_output_stream(path, compression=None)
        stream.write(content)
        stream.close()

    def each(self, read: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Made]:
        """Yield what `read` makes of each item, in their order, of several at once: each takes requests."""
        if len(items) < 2:
            yield from map(read, items)
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            try:
                yield from threads.map(read, items)
            finally:
                threads.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def owned(self, take_over: bool = False) -> Iterator[Check]:
        """Claim the run with `writer.json`. This is not a lock: if two processes claim the run at the same time, or one
        claims it while the other writes a record, both may write for some milliseconds. The one that lost ends at its next
        `check`, and the files that it overwrote are damaged. A killed process leaves its claim.
        """
        claim = self._writer()
        if claim is not None and not take_over and not _ended(claim):
            raise RunExists(
                f"{self.shown} is being written by {_who(claim)}",
                "wait until it ends, or choose another --out; if it was killed, add --take-over",
            )
        own = _myself()
        self.put(WRITER, json.dumps(own).encode())

        def check() -> None:
            claim = self._writer()
            if claim is None or claim.get("nonce") != own["nonce"]:
                raise RunExists(
                    f"{self.shown} was taken over by {_who(claim or {})}", "let that process go on; this one has ended"
                )

        try:
            check()
            yield check
        finally:
            with contextlib.suppress(AlphaprofError):
                if (self._writer() or {}).get("nonce") == own["nonce"]:
                    self.remove(WRITER)

    def _writer(self) -> dict[str, Any] | None:
        """Return the claim of a writer, None if there is none."""
        try:
            return _claim(self.read(WRITER))
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self.bucket, self.prefix, name) if part)

    def _require_bucket(self) -> None:
        if self._store.get_file_info(self.bucket).type == fs.FileType.NotFound:
            raise OSError(NO_BUCKET)

    def _why(self, error: Exception, kind: type[AlphaprofError]) -> tuple[str, str]:
        """Return the first of the causes. Nothing of the store's own text is repeated: it may hold keys."""
        text = NO_BUCKET if isinstance(error, FileNotFoundError) else str(error)  # an object is written if there is a bucket
        sign, reason, hint = next((m[0], *cause) for pattern, *cause in CAUSES if (m := re.search(pattern, text)))
        names = {"bucket": self.bucket, "where": WHERE[self.scheme], "keys": KEYS[self.scheme]}
        return reason.format(**names) + (f" ({sign})" if sign else ""), hint.format(**names)


def _ended(claim: dict[str, Any]) -> bool:
    """Return whether a claim is of a process that is known to have ended. Containers that share a host's name and not its
    processes cannot be told apart: the writer in the other one finds at its next `check` that it was taken over.
    """
    process = claim.get("process")
    if claim.get("host") != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def _filesystem(scheme: str, allow_delayed_open: bool = True) -> Any:
    """Return what pyarrow makes of the environment; it looks for nothing yet. Unlike boto3, pyarrow does not
    read AWS_ENDPOINT_URL.
    """
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "AZURE_")) and not (value.isascii() and value.isprintable()):
            raise OptionInvalid(f"{name} holds a non-ASCII or control character", "set it again in plain ASCII")
    given = os.environ.get
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=PATIENCE)
    if scheme == "abfs":
        account, key, token = (given(f"AZURE_STORAGE_{name}") for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN"))
        if not account or not (key or token or given("AZURE_CLIENT_ID")):  # without any, pyarrow ends the process
            raise OptionInvalid("the environment does not say how to reach abfs://", f"set {KEYS[scheme]}")
        return fs.AzureFileSystem(account, account_key=key or None, sas_token=None if key else token or None)
    if bool(given("AWS_ACCESS_KEY_ID")) != bool(given("AWS_SECRET_ACCESS_KEY")):  # pyarrow would sign nothing
        raise OptionInvalid("the environment does not say how to reach s3://", f"set all of {KEYS[scheme]}, or none")
    endpoint = given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL") or None
    if endpoint and not re.fullmatch(r"https?://[^\s/]+/?", endpoint):
        raise OptionInvalid("AWS_ENDPOINT_URL is not an HTTP(S) URL", "set it to http(s)://HOST:PORT, or unset it")
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        connect_timeout=CONNECT,
        request_timeout=SILENCE,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        background_writes=True,
        allow_delayed_open=allow_delayed_open,
    )


# Addresses.

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")  # what pathlib makes of a URI
BUCKET, FOLDERS = r"[A-Za-z0-9][A-Za-z0-9._-]*", r"[\w.=+@!()'-]+(?:/[\w.=+@!()'-]+)*"
REMOTE = re.compile(rf"(?!.*/\.\.?(?:/|$))(?i:({'|'.join(SCHEMES)}))://({BUCKET})(?:/({FOLDERS}))?/*", re.ASCII)


def storage_of(where: str | Path) -> Storage:
    """Return the storage that a path or a URI names; nothing is looked for yet.

    Raises `OptionInvalid` for a path, a URI, or a variable of the environment, that cannot be used.
    """
    text = str(where)
    require_utf8(text)
    if isinstance(where, Path):
        text = COLLAPSED.sub(r"\1://", text, count=1)
    if URI.match(text) is None and COLLAPSED.match(text) is None:  # no folder is called s3:
        return LocalStorage(Path(where))
    match = REMOTE.fullmatch(text)
    if match is None:  # it may hold a key: nothing of it is repeated
        raise OptionInvalid(
            "unsupported address: give only a folder, or s3://BUCKET/FOLDER (gs://, abfs://)",
            "name folders with letters, digits and _.=+-@!()'; set credentials only in the environment",
        )
    return ObjectStorage(match[1].lower(), match[2], match[3] or "")


def address_of(storage: Storage) -> str:
    """Return how a process in another directory names the run's storage."""
    return str(storage.path.absolute()) if isinstance(storage, LocalStorage) else storage.shown
