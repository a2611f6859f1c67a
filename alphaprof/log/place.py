"""Where the files of a run lie: a local folder, or an object store. Files are written whole and are never half there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from alphaprof.errors import AlphaprofError, DiskFull, ExtraMissing, OptionInvalid, RunUnreadable, shown
from alphaprof.log.disk import WRITTEN, reading, synced, writing
from alphaprof.version import install_line

Content: TypeAlias = bytes | memoryview | pa.Buffer
SCHEMES = ("s3", "gs", "az")  # az://CONTAINER/..., in the account that the environment names
URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")  # what pathlib makes of a URI
NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[\w.=-]+(?:/[\w.=-]+)*", re.ASCII)
PREFIX = re.compile(
    r"(?!.*(?:^|/)\.\.?(?:/|$))[\w.=+@!()'-]+(?:/[\w.=+@!()'-]+)*", re.ASCII
)  # both libraries agree on these
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?")
NO_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
)  # of file systems without hard links, FAT and some FUSE
PATIENCE = timedelta(seconds=90)  # how long a store that fails is asked again, with growing pauses
ATTEMPTS = 8  # the same for what pyarrow reads: half a minute
SILENCE = timedelta(minutes=5)  # the longest that one request may take, its content included
WRITER = "attempt"  # metadata of what `put_new` wrote: whose it is
ASKING: set[int] = set()  # processes that have asked an object store; after a fork the child would wait for ever
MEND = "check that disk or mount, and give read access to it"
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
WHERE = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "the bucket's name", "az": "AZURE_STORAGE_ACCOUNT_NAME"}
# What stores and libraries call the same failure, in small letters without underscores.
UNKNOWN_KEYS = {
    *("invalidaccesskeyid", "invalidclienttokenid", "signaturedoesnotmatch", "expiredtoken", "invalidtoken"),
    *("invalidsignature", "missingauthenticationtoken", "unrecognizedclient", "authenticationfailed", "401"),
}
OTHER_REGION = {"permanentredirect", "authorizationheadermalformed", "301", "307"}
NO_BUCKET = {"nosuchbucket", "containernotfound"}
NAMED = re.compile(r"(?:<Code>|AWS Error (?!UNKNOWN\b))(?P<word>\w+)|(?:status code:|HTTP status) (?P<status>\d{3})\b")


class Place(Protocol):
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
        """Remove the run's own folder as far as it is empty."""

    def require_writable(self) -> None:
        """Raise `DiskFull` where it cannot be made or written, as far as that is known before any work."""

    def remove_temporary(self) -> None:
        """Remove what killed processes left of files that were half written."""

    def put(self, name: str, content: Content) -> None:
        """Write a file, in place of an earlier one. It is durable when this returns."""

    def put_new(self, name: str, content: Content) -> bool:
        """Write a file unless the name exists already, and say whether this call has written it."""

    def read(self, name: str) -> bytes:
        """The content of a file. Raises `FileNotFoundError`."""

    def open(self, name: str) -> pa.NativeFile:
        """A file to read any part of, as pyarrow's Parquet reader does. Raises `FileNotFoundError`."""

    def names(self, prefix: str) -> dict[str, int]:
        """The size in bytes of every file below a folder ("": the run's own), by name in order; hidden ones left out."""

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def remove(self, name: str) -> None:
        """Remove a file, where it exists."""

    def exists(self) -> bool:
        """Whether anything lies there, hidden files apart."""


def place_of(where: str | Path) -> Place:
    """Returns the place that a path or a URI names; nothing is looked for yet.

    Raises `OptionInvalid` for a URI, or a variable of the environment, that cannot be used, and `ExtraMissing`.
    """
    text = str(where)
    if isinstance(where, Path):
        text = COLLAPSED.sub(r"\1://", text, count=1)
    match = URI.fullmatch(text)
    if match is None:
        return LocalPlace(Path(where))
    scheme, rest = match[1].lower(), match[2]
    if "@" in rest.split("/")[0] or "?" in rest or "#" in rest:
        raise OptionInvalid(
            f"a {scheme}:// address is a bucket and folders in it, nothing more",
            f"credentials come from the environment alone: {KEYS.get(scheme, 'as its library says')}",
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if scheme not in SCHEMES:
        raise OptionInvalid(f"{scheme}:// is no place for a run", "give a folder, s3://BUCKET/FOLDER, or gs:// or az://")
    if not BUCKET.fullmatch(bucket) or (prefix and not PREFIX.fullmatch(prefix)):
        raise OptionInvalid(
            f"{shown(text)} is not {scheme}://BUCKET/FOLDER", "use letters, digits and _.=+-@!()' in the names of folders"
        )
    return ObjectPlace(scheme, bucket, prefix)


def require_put_if_absent(place: Place) -> None:
    """Write a hidden file twice, and raise `DiskFull` where the second took the place of the first: commits of several
    processes would not be safe there.
    """
    name = f".probe-{secrets.token_hex(8)}"
    try:
        heeded = place.put_new(name, b"first") and not place.put_new(name, b"second")
    finally:
        place.remove(name)
    if not heeded:
        raise DiskFull(
            f"{place.shown} ignores put-if-absent: two processes could commit the same shard",
            "write it by one process, or use a store that heeds If-None-Match, as Amazon S3, Google's and Azure's do",
        )


def _require_inside(place: Place, name: str) -> None:
    if not NAME.fullmatch(name):
        raise RunUnreadable(
            f"{place.shown} names a file that is none of its own: {shown(name)}", "profile again into a new place"
        )


@dataclass(frozen=True)
class LocalPlace:
    """A folder. Its own folder is made by `make` alone, so that a run that was deleted is not made again; folders in it are
    made as they are needed.

    A process that is killed leaves a hidden file, `files.WRITTEN`, beside the one that it wrote.
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
        """Remove the folder and those in it, as far as they are empty."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def require_there(self) -> None:
        """Raise `DiskFull` where the folder is gone."""
        if not os.path.isdir(self.path):
            raise DiskFull(
                f"{self.path} was deleted or renamed while it was written",
                "shards are complete where it is now: a profile goes on there with --resume, or begins again",
            )

    def require_writable(self) -> None:
        """Raise `DiskFull` where the folder, or the one that it would be made in, is none or may not be written."""
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
        """The content of a file. Raises `FileNotFoundError`, and `RunUnreadable`."""
        path = self._path(name)
        with _found(path):
            return path.read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        """A file to read any part of. Raises `FileNotFoundError`, and `RunUnreadable`."""
        path = self._path(name)
        with _found(path):
            return pa.OSFile(str(path), "rb")

    def names(self, prefix: str) -> dict[str, int]:
        """Sizes of the files below a folder, whose links to other folders are followed. Raises `RunUnreadable`."""
        prefix = prefix.removesuffix("/")
        folder = self._path(prefix) if prefix else self.path
        with reading(folder, MEND):
            return dict(sorted(_files(folder, f"{prefix}/" if prefix else "")))

    def has(self, name: str) -> bool:
        """Whether there is a file of that name. Raises `RunUnreadable`."""
        path = self._path(name)
        with reading(path, MEND):
            return os.path.exists(path)  # unlike Path.exists, also where a name is too long

    def remove(self, name: str) -> None:
        """Remove a file. Raises `DiskFull`."""
        path = self._path(name)
        with writing(path):
            path.unlink(missing_ok=True)

    def exists(self) -> bool:
        """Whether the folder holds anything that is not hidden, or is a file. Raises `RunUnreadable`."""
        with reading(self.path, MEND):
            try:
                return any(not name.startswith(".") for name in os.listdir(self.path))
            except FileNotFoundError:
                return False
            except NotADirectoryError:
                return True

    def _path(self, name: str) -> Path:
        _require_inside(self, name)
        return self.path / name

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Raise `DiskFull` where a file cannot be written; another one where the run is gone."""
        with writing(path):
            try:
                yield
            except FileNotFoundError:
                self.require_there()
                raise

    def _placed(self, path: Path, content: Content, place: Callable[[Path, Path], object]) -> object:
        """What `place` makes of a hidden file with the content and of its path; once more where the hidden file was removed
        meanwhile: whoever finishes a run removes those of others.
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
        """A hidden file with the content, on the disk. Its number is random: processes of several machines write here."""
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
    """Raise `RunUnreadable` where a file cannot be read, but let it be missing."""
    missing = False
    with reading(path, MEND):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            missing = True
    if missing:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _same(temporary: Path, path: Path) -> bool:
    """Whether a name is of this very file: NFS may repeat a link whose answer was lost, and then refuse it."""
    try:
        return os.path.samefile(temporary, path)
    except FileNotFoundError:  # removed meanwhile
        return False


def _exclusive(path: Path, content: Content) -> bool:
    """Write a file that this call alone could make; nothing of it is left where it cannot be written."""
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
    """Names and sizes below a folder; what is removed meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}{entry.name}", entry.stat().st_size


@dataclass(frozen=True)
class ObjectPlace:
    """A part of a bucket: of S3 or what speaks like it, of Google Cloud Storage, or of Azure (a container).

    obstore writes, lists and removes, an object by one request; pyarrow reads parts of files. Both are told the same
    region, endpoint and keys, from the environment. Raises `ExtraMissing`, and `OptionInvalid` where that holds nonsense.
    """

    scheme: str
    bucket: str
    prefix: str
    _store: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if find_spec("obstore") is None:
            raise ExtraMissing(f"{self.shown} needs the package obstore", install_line("remote"))
        object.__setattr__(self, "_store", _store(self.scheme, self.bucket, self.prefix))

    @property
    def shown(self) -> str:
        """The URI."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def make(self) -> bool:
        """Nothing: an object store has no folders."""
        return False

    def discard(self) -> None:
        """Nothing, likewise."""

    def remove_temporary(self) -> None:
        """Nothing: an object is there whole or not at all."""

    def require_writable(self) -> None:
        """Raise `DiskFull` where nothing can be written."""
        name = f".probe-{secrets.token_hex(8)}"
        self.put(name, b"")
        self.remove(name)

    @property
    def filesystem(self) -> Any:
        """Of the part of the bucket."""
        from pyarrow import fs

        return fs.SubTreeFileSystem("/".join(filter(None, (self.bucket, self.prefix))), self._reader)

    def put(self, name: str, content: Content) -> None:
        """Write an object by one request. Raises `DiskFull`."""
        import obstore

        with self._asking(name, DiskFull):
            obstore.put(self._store, name, _view(content), use_multipart=False)

    def put_new(self, name: str, content: Content) -> bool:
        """Write an object unless the name exists. Raises `DiskFull`: whether it was written is not known then.

        A store that has written it may answer 503, and refuse it when it is asked again: metadata tell whose it is.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        writer = secrets.token_hex(16)
        with self._asking(name, DiskFull):
            for _ in range(ATTEMPTS):
                try:
                    obstore.put(self._store, name, _view(content), mode="create", attributes={WRITER: writer})
                except AlreadyExistsError:
                    try:
                        return bool(obstore.get(self._store, name).attributes.get(WRITER) == writer)
                    except FileNotFoundError:  # 409: another request was busy with that name, and may have failed
                        continue
                return True
        raise DiskFull(f"cannot write {self.shown}/{name}: it comes and goes", "see what else writes there")

    def read(self, name: str) -> bytes:
        """The content of an object. Raises `FileNotFoundError`, and `RunUnreadable`."""
        import obstore

        with self._asking(name, RunUnreadable):
            return bytes(obstore.get(self._store, name).bytes())

    def open(self, name: str) -> pa.NativeFile:
        """An object to read any part of, each by a request. Raises `FileNotFoundError`, and `RunUnreadable`.

        What fails later is an `OSError` of pyarrow's.
        """
        with self._asking(name, RunUnreadable):
            return self._reader.open_input_file("/".join(filter(None, (self.bucket, self.prefix, name))))

    def names(self, prefix: str) -> dict[str, int]:
        """Sizes of the objects below a folder. Raises `RunUnreadable`."""
        import obstore

        folder = prefix.removesuffix("/")
        with self._asking(folder, RunUnreadable):
            found = [item for items in obstore.list(self._store, folder or None) for item in items]
        return dict(sorted((item["path"], item["size"]) for item in found if not _hidden(item["path"])))

    def has(self, name: str) -> bool:
        """Whether there is an object of that name. Raises `RunUnreadable`."""
        import obstore

        with self._asking(name, RunUnreadable):
            try:
                obstore.head(self._store, name)
            except FileNotFoundError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove an object. Raises `DiskFull`."""
        import obstore

        with self._asking(name, DiskFull, missing=True):
            obstore.delete(self._store, name)

    def exists(self) -> bool:
        """Whether there is any object that is not hidden. Raises `RunUnreadable`, also for a bucket that does not exist."""
        import obstore

        with self._asking("", RunUnreadable):
            return any(not _hidden(item["path"]) for items in obstore.list(self._store) for item in items)

    @cached_property
    def _reader(self) -> Any:
        """Of pyarrow; made when something is opened."""
        from pyarrow import fs

        seconds = PATIENCE.total_seconds()
        if self.scheme == "gs":
            return fs.GcsFileSystem(retry_time_limit=PATIENCE)
        if self.scheme == "az":
            name, key = (_variable(f"AZURE_STORAGE_ACCOUNT_{each}") for each in ("NAME", "KEY"))
            return fs.AzureFileSystem(account_name=name, account_key=key)
        options = {"region": _region(), "connect_timeout": 10, "request_timeout": seconds}
        if endpoint := _endpoint():
            scheme, _, host = endpoint.partition("://")
            options |= {"scheme": scheme, "endpoint_override": host}
        if key := _variable("AWS_ACCESS_KEY_ID"):
            secret, token = _variable("AWS_SECRET_ACCESS_KEY"), _variable("AWS_SESSION_TOKEN")
            options |= {"access_key": key, "secret_key": secret, "session_token": token}
        return fs.S3FileSystem(**options, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))

    @contextlib.contextmanager
    def _asking(self, name: str, kind: type[AlphaprofError], missing: bool = False) -> Iterator[None]:
        """Raise an error of a kind, or `FileNotFoundError` for a missing object that is to be read. `missing`: it may be."""
        from obstore.exceptions import BaseError

        ASKING.add(os.getpid())
        if len(ASKING) > 1:
            raise RuntimeError("obstore does not survive a fork: start processes by spawn")
        if name:
            _require_inside(self, name)
        try:
            yield
        except (BaseError, OSError) as error:
            words = _words(error)
            if isinstance(error, FileNotFoundError) and not words & NO_BUCKET and (missing or kind is RunUnreadable):
                if missing:
                    return
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.shown}/{name}") from None
            reason, hint = self._why(error, words)
            verb = f"cannot write {self.shown}" if kind is DiskFull else f"{self.shown} cannot be read"
            raise kind(f"{verb}: {reason}", hint) from None

    def _why(self, error: Exception, words: set[str]) -> tuple[str, str]:
        """What a store says against it, and what to do. Nothing of its text is repeated: it may hold keys."""
        again = "a profile goes on with --resume"
        code = "".join(f" ({word})" for word in sorted(_codes(error), key=str.isdigit)[:1])  # its own word, or the status
        credentials = f"check {KEYS[self.scheme]}, and that they may list, read, write and delete there"
        if words & NO_BUCKET or isinstance(error, FileNotFoundError):
            return f"there is no bucket {self.bucket}", f"create it, or check the name, {WHERE[self.scheme]}"
        if words & OTHER_REGION:
            return f"the bucket is in another region than {_region()}{code}", "set AWS_REGION to the bucket's"
        if words & UNKNOWN_KEYS:
            return f"the store does not know these credentials{code}", credentials
        if "403" in words or "accessdenied" in words:
            return f"access is denied{code}", credentials
        if "credentials" in words:
            return "there are no credentials", f"set {KEYS[self.scheme]}"
        if words & {"500", "502", "503", "504", "slowdown", "serviceunavailable", "internalfailure"}:
            return f"the store failed, and asking again did not help{code}", f"wait, or let fewer processes write; {again}"
        if "unreachable" in words:
            return "the store cannot be reached", f"check the network, and {WHERE[self.scheme]}; {again}"
        return (
            f"the store refused it: {type(error).__name__}{code}",
            f"check {WHERE[self.scheme]}, and the store's log; {again}",
        )


def _view(content: Content) -> memoryview:
    """What obstore takes: unsigned bytes, which Arrow's buffers do not say they are."""
    return memoryview(content).cast("B")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _codes(error: Exception) -> list[str]:
    """What an error of either library names: the store's own word for it, and the status of HTTP."""
    return [found["word"] or found["status"] for found in NAMED.finditer(str(error).partition("\nDebug source")[0])]


def _words(error: Exception) -> set[str]:
    text = str(error)
    words = {code.lower().replace("_", "") for code in _codes(error)}
    if "HTTP error: " in text or "networkconnection" in words:
        words.add("unreachable")
    if "/latest/api/token" in text or "/latest/meta-data/" in text:  # asked of a machine of Amazon's that lends some
        words.add("credentials")
    return words


def _store(scheme: str, bucket: str, prefix: str) -> Any:
    """What obstore makes of the environment; it looks for nothing yet."""
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    endpoint = _endpoint() if scheme == "s3" else None
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": {
            "timeout": SILENCE,
            "connect_timeout": timedelta(seconds=10),
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
        },
        "retry_config": {
            "max_retries": 1000,
            "retry_timeout": PATIENCE,
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
        },
    }
    if scheme == "s3":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            _variable(name)
        options |= {"region": _region(), "conditional_put": "etag"} | ({"endpoint": endpoint} if endpoint else {})
    try:
        return {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme](bucket, **options)
    except (BaseError, OSError, ValueError):
        raise OptionInvalid(
            f"the environment does not say how to reach {scheme}://{bucket}", f"check {KEYS[scheme]}, all or none"
        ) from None


def _region() -> str:
    name = next((name for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if _variable(name)), None)
    value = str(_variable(name)) if name else "us-east-1"
    if not re.fullmatch("[A-Za-z0-9-]+", value):
        raise OptionInvalid(f"{name} is not a region", "set it to the bucket's, us-east-1 for example")
    return value


def _endpoint() -> str | None:
    """The address of a store other than Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    name = next((name for name in names if _variable(name)), None)
    if name is None:
        return None
    value = str(_variable(name)).rstrip("/")
    if not ENDPOINT.fullmatch(value):
        raise OptionInvalid(f"{name} is not the address of a store", "set it to http(s)://HOST:PORT, or unset it")
    return value


def _variable(name: str) -> str | None:
    """A variable of the environment. obstore would panic at one with a space or a line break."""
    value = os.environ.get(name)
    if value and not re.fullmatch("[!-~]+", value):
        raise OptionInvalid(
            f"{name} holds a character that does not belong there", "set it again, without line breaks and spaces"
        )
    return value or None
