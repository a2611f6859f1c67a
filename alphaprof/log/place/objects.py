"""A part of a bucket as the place of a run: of S3 or what speaks like it, of Google Cloud Storage, or of Azure."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from alphaprof.errors import AlphaprofError, DiskFull, ExtraMissing, OptionInvalid, RunUnreadable
from alphaprof.log.place.protocol import Content, require_inside
from alphaprof.version import install_line

ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?")
PATIENCE = timedelta(seconds=90)  # how long a store that fails is asked again, with growing pauses
ATTEMPTS = 8  # the same for what pyarrow reads: half a minute
SILENCE = timedelta(minutes=5)  # the longest that one request may take, its content included
WRITER = "attempt"  # metadata of what `put_new` wrote: whose it is
ASKING: set[int] = set()  # processes that have asked an object store; after a fork the child would wait for ever
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


@dataclass(frozen=True)
class ObjectPlace:
    """A part of a bucket: of S3 or what speaks like it, of Google Cloud Storage, or of Azure (a container).

    obstore writes, lists and removes, an object by one request; pyarrow reads parts of files. Both take
    region, endpoint and keys from the environment. Raises `ExtraMissing`, and `OptionInvalid` where that holds nonsense.
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
            require_inside(self, name)
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
