"""A part of a bucket as the storage of a run: of S3 or what speaks like it, of Google Cloud Storage, or of Azure."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
from pyarrow import fs

from alphaprof.errors import AlphaprofError, DiskFull, ExtraMissing, OptionInvalid, RunUnreadable
from alphaprof.log.storage.protocol import Content, require_inside
from alphaprof.version import install_line

PATIENCE = timedelta(seconds=90)  # how long a store that fails is asked again, with growing pauses
SILENCE = timedelta(minutes=5)  # the longest that one request may take, its content included
CONFLICTS = 8  # how often `put_new` asks again when the store names a conflict and the object does not exist
WRITER = "attempt"  # metadata of what `put_new` wrote: whose it is
ASKING: set[int] = set()  # processes that have asked an object store; after a fork the child would wait for ever
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
WHERE = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "the bucket's name", "az": "AZURE_STORAGE_ACCOUNT_NAME"}
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
OTHER_REGION = ("AuthorizationHeaderMalformed", "incorrectly configured region")
NO_ACCESS = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AccessDenied"),
    *("code: 401", "code: 403"),
    *("/latest/api/token", "/latest/meta-data/"),  # of a machine of Amazon's that lends credentials
)
FAILED = ("code: 5", "error sending request")
# What the text of an error may hold, why it failed, and what to do: the first that fits. Errors of obstore have few classes,
# and those of listings have one.
CAUSES = (
    (NO_BUCKET, "the bucket {bucket} does not exist", "create it, or check the name, {where}"),
    (OTHER_REGION, "the bucket is in another region", "set AWS_REGION to that region"),
    (NO_ACCESS, "access is denied", "check {keys}, and that they can list, read, write and delete there"),
    (
        FAILED,
        "the store failed or cannot be reached, and retries did not help",
        "check the network and {where}; resume a profile with --resume",
    ),
    (("",), "the store refused it", "check {where} and the store's log; resume a profile with --resume"),
)


@dataclass(frozen=True)
class ObjectStorage:
    """A part of a bucket: of S3 or what speaks like it, of Google Cloud Storage, or of Azure (a container).

    obstore takes region, endpoint and keys from the environment. Raises `ExtraMissing`, and `OptionInvalid` if that holds
    nonsense.
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
        """Nothing: an object store has no folders."""

    def remove_temporary(self) -> None:
        """Nothing: an object is there whole or not at all."""

    def require_there(self) -> None:
        """Nothing: an object store has no folders."""

    def require_writable(self) -> None:
        """Raise `DiskFull` if nothing can be written."""
        name = f".probe-{secrets.token_hex(8)}"
        self.put(name, b"")
        self.remove(name)

    @property
    def filesystem(self) -> fs.FileSystem:
        """Of the part of the bucket."""
        return fs.PyFileSystem(_Files(self))

    def put(self, name: str, content: Content) -> None:
        """Write an object by one request. Raises `DiskFull`."""
        with self._asking(name, DiskFull):
            self._store.put(name, _view(content), use_multipart=False)

    def put_new(self, name: str, content: Content) -> bool:
        """Write an object unless the name exists. Raises `DiskFull`: whether it was written is not known then.

        A store that has written it may answer 503, and refuse it when it is asked again: metadata tell whose it is.
        """
        from obstore.exceptions import AlreadyExistsError

        writer = secrets.token_hex(16)
        with self._asking(name, DiskFull):
            for _ in range(CONFLICTS):
                try:
                    self._store.put(name, _view(content), mode="create", attributes={WRITER: writer})
                except AlreadyExistsError:
                    try:
                        return bool(self._store.get(name).attributes.get(WRITER) == writer)
                    except FileNotFoundError:  # 409: another request was busy with that name, and may have failed
                        continue
                return True
        raise DiskFull(f"cannot write {self.shown}/{name}: it keeps changing", "stop other writers there")

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raises `FileNotFoundError`, and `RunUnreadable`."""
        with self._asking(name, RunUnreadable):
            return bytes(self._store.get(name).bytes())

    def open(self, name: str) -> pa.NativeFile:
        """Return an object to read any part of, each by a request. Raises `FileNotFoundError` and `RunUnreadable`, as reads
        do.
        """
        with self._asking(name, RunUnreadable):
            size = self._store.head(name)["size"]
        return pa.PythonFile(_Object(self, name, size), mode="r")

    def names(self, prefix: str) -> dict[str, int]:
        """Return sizes of the objects below a folder. Raises `RunUnreadable`."""
        folder = prefix.removesuffix("/")
        with self._asking(folder, RunUnreadable):
            found = [item for items in self._store.list(folder or None) for item in items]
        return dict(sorted((item["path"], item["size"]) for item in found if not _hidden(item["path"])))

    def has(self, name: str) -> bool:
        """Return whether there is an object of that name. Raises `RunUnreadable`."""
        try:
            with self._asking(name, RunUnreadable):
                self._store.head(name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove an object. Raises `DiskFull`."""
        with self._asking(name, DiskFull), contextlib.suppress(FileNotFoundError):
            self._store.delete(name)

    def range_of(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` up to `end`. Raises `FileNotFoundError`, and `RunUnreadable`."""
        with self._asking(name, RunUnreadable):
            return bytes(self._store.get_range(name, start=start, end=end))

    @contextlib.contextmanager
    def _asking(self, name: str, kind: type[AlphaprofError]) -> Iterator[None]:
        """Raise an error of a kind, or `FileNotFoundError` for a missing object that is to be read."""
        from obstore.exceptions import BaseError

        ASKING.add(os.getpid())
        if len(ASKING) > 1:
            raise RuntimeError("obstore does not survive a fork: spawn processes instead")
        if name:
            require_inside(self, name)
        try:
            yield
        except (BaseError, OSError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError):
                if kind is RunUnreadable and not any(sign in text for sign in NO_BUCKET):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.shown}/{name}") from None
                text = NO_BUCKET[0]  # an object is written wherever there is a bucket
            verb = f"cannot write {self.shown}" if kind is DiskFull else f"{self.shown} cannot be read"
            reason, hint = self._why(text)
            raise kind(f"{verb}: {reason}", hint) from None

    def _why(self, text: str) -> tuple[str, str]:
        """Return what a store says against it, and what to do. Nothing of its text is repeated: it may hold keys."""
        sign, reason, hint = next((sign, reason, hint) for signs, reason, hint in CAUSES for sign in signs if sign in text)
        code = f" ({sign})" if sign.isalpha() else ""
        names = {"bucket": self.bucket, "where": WHERE[self.scheme], "keys": KEYS[self.scheme]}
        return f"{reason.format(**names)}{code}", hint.format(**names)


class _Object:
    """An object as a file of Python's, of which every read is a request: readers of Parquet ask for the ranges they need."""

    def __init__(self, storage: ObjectStorage, name: str, size: int) -> None:
        self.closed = False
        self._storage, self._name, self._size, self._at = storage, name, size, 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, as many as there are."""
        start, self._at = self._at, min(self._at + size, self._size)
        return self._storage.range_of(self._name, start, self._at) if start < self._at else b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, which is returned."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def close(self) -> None:
        """Nothing is open between two reads."""
        self.closed = True


class _Files(fs.FSSpecHandler):  # type: ignore[misc]
    """A run's objects as a filesystem of pyarrow's, whose readers of columns open files, and ask for nothing else."""

    def get_type_name(self) -> str:
        """Return how pyarrow's messages name it."""
        return "object store"

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Return an object to read any part of."""
        return self.fs.open(path)


def _view(content: Content) -> memoryview:
    """Return what obstore takes: unsigned bytes, which Arrow's buffers do not say they are."""
    return memoryview(content).cast("B")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _store(scheme: str, bucket: str, prefix: str) -> Any:
    """Return what obstore makes of the environment; it looks for nothing yet."""
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    if scheme == "s3":
        _require_sound_variables()
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": {"timeout": SILENCE, "allow_http": True},  # an endpoint that says http:// means it
        "retry_config": {"max_retries": 1000, "retry_timeout": PATIENCE},
    }
    try:
        return {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme](bucket, **options)
    except (BaseError, OSError, ValueError):
        raise OptionInvalid(
            f"the environment does not say how to reach {scheme}://{bucket}", f"set all of {KEYS[scheme]}, or none"
        ) from None


def _require_sound_variables() -> None:
    """Raise `OptionInvalid` for variables at which obstore would panic."""
    for name, value in os.environ.items():
        if name.startswith("AWS_") and not (value.isascii() and value.isprintable()):
            raise OptionInvalid(f"{name} holds a non-ASCII or control character", "set it again in plain ASCII")
        if value and name in ENDPOINTS and not value.startswith(("http://", "https://")):
            raise OptionInvalid(f"{name} is not an HTTP(S) URL", "set it to http(s)://HOST:PORT, or unset it")
