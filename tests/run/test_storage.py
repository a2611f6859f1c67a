"""Where the files of a run lie: nothing is there by half, one process writes, and what fails says so without a secret."""

from __future__ import annotations

import errno
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from alphaprof.config.paths import is_remote
from alphaprof.errors import AlphaprofError, DiskFull, OptionInvalid, RunExists, RunUnreadable
from alphaprof.run import storage
from alphaprof.run.storage import LocalStorage, Storage, address_of, reading, storage_of

PART = "positions/draft=a/part-00001.parquet"
RECORDS = "records/rows-0000.json"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    place = LocalStorage(tmp_path / "run")
    assert place.make()
    assert not place.make()
    return place


def everything(place: LocalStorage) -> list[str]:
    """Names of all files, hidden ones too."""
    return sorted(path.relative_to(place.path).as_posix() for path in place.path.rglob("*") if path.is_file())


def keeps_whole_files_by_name(place: Storage) -> None:
    assert place.names("") == {}
    place.require_writable()
    place.put(PART, pa.py_buffer(b"positions"))
    place.put("manifest.json", b"{}")
    place.put("manifest.json", memoryview(b"{...}"))
    place.put("empty", b"")
    assert place.read("manifest.json") == b"{...}"
    assert place.read("empty") == b""
    assert place.names("") == {"empty": 0, "manifest.json": 5, PART: 9}
    assert place.names("positions") == place.names("positions/") == place.names("positions/draft=a") == {PART: 9}
    assert place.names("position") == place.names("manifest.json") == place.names("totals") == {}
    place.remove(PART)
    place.remove(PART)
    assert place.has("manifest.json")
    assert not place.has(PART)
    assert list(place.names("")) == ["empty", "manifest.json"]
    with pytest.raises(FileNotFoundError, match="part-00001"):
        place.read(PART)
    for name in ("../other", "a/../../b", "/etc/passwd", "a\nb"):
        for verb in (place.read, place.remove, place.has, place.names, lambda name: place.put(name, b"")):
            with pytest.raises(RunUnreadable, match="lists an invalid file name"):
                verb(name)


def test_a_folder_keeps_whole_files_by_name(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps_whole_files_by_name(local)
    assert everything(local) == ["empty", "manifest.json"]
    with pytest.raises(FileNotFoundError):
        local.read("manifest.json/part")
    (local.path.parent / "disk").mkdir()
    (local.path.parent / "disk" / "part").touch()
    (local.path / "texts").symlink_to(local.path.parent / "disk", target_is_directory=True)
    monkeypatch.chdir(local.path)
    assert LocalStorage(Path("../run")).names("") == {"empty": 0, "manifest.json": 5, "texts/part": 0}


def test_empty_folders_are_discarded(local: LocalStorage) -> None:
    local.put(RECORDS, b"{}")
    local.discard()
    assert local.names("") == {RECORDS: 2}
    local.remove(RECORDS)
    local.discard()
    assert not local.path.exists()


def refusing(number: int) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_file_that_cannot_be_written_is_as_it_was(
    local: LocalStorage, step: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put(RECORDS, b"earlier")
    with monkeypatch.context() as patch:
        patch.setattr(*((Path, step) if step == "open" else (os, step)), refusing(number))
        with pytest.raises(DiskFull, match=os.strerror(number)) as caught:
            local.put(RECORDS, b"later")
    assert caught.value.hint
    assert everything(local) == [RECORDS]
    assert local.read(RECORDS) == b"earlier"


def test_what_cannot_be_written_is_known_before(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("file", b"")
    with pytest.raises(DiskFull, match="is not a directory"):
        LocalStorage(local.path / "file" / "run").require_writable()
    with pytest.raises(DiskFull, match=r"long|Too|name"):
        LocalStorage(local.path / ("n" * 300)).make()
    LocalStorage(local.path / "a" / "b").require_writable()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskFull, match="is not writable"):
        local.require_writable()


def test_what_cannot_be_read_says_so(local: LocalStorage) -> None:
    (local.path / "manifest.json").mkdir()
    with pytest.raises(RunUnreadable, match=r"manifest\.json cannot be read") as caught:
        local.read("manifest.json")
    assert "read access" in caught.value.hint
    with pytest.raises(KeyError), reading("a file", "hint"):
        raise KeyError("ours")


PRELUDE = "import os, sys, time; from pathlib import Path; from alphaprof.run.storage import storage_of\n"
KILLED = """
def stop(_):
    print("writing", flush=True)
    time.sleep(600)
os.fsync = stop
storage_of(Path(sys.argv[1])).put("records/rows-0000.json", b"later")
"""
OWNING = """
with storage_of(sys.argv[1]).owned():
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@contextmanager
def process(code: str, place: Storage) -> Iterator[str]:
    """A process that prints a line, and is killed at the end."""
    command = [sys.executable, "-c", PRELUDE + code, address_of(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as started:
        assert started.stdout is not None
        yield started.stdout.readline().strip()
        started.send_signal(signal.SIGKILL)


def test_a_process_killed_while_it_writes_leaves_nothing_to_see(local: LocalStorage) -> None:
    local.put(RECORDS, b"earlier")
    before = local.names("")
    with process(KILLED, local) as line:
        assert line == "writing"
    assert local.read(RECORDS) == b"earlier"
    assert local.names("") == before
    assert len(everything(local)) == 2
    (local.path / ".mine").touch()
    local.remove_temporary()
    assert everything(local) == [".mine", RECORDS]


def test_a_run_that_was_deleted_meanwhile_is_not_made_again(local: LocalStorage) -> None:
    with local.owned() as check:
        check()
        local.path.rename(local.path.with_name("elsewhere"))
        for act in (check, lambda: local.put(RECORDS, b"{}"), lambda: local.put("manifest.json", b"{}")):
            with pytest.raises(DiskFull, match="run was deleted, renamed or replaced while it was written") as caught:
                act()
            assert "--resume" in caught.value.hint
        assert not local.path.exists()
        local.make()
        with local.owned():  # of another process, at the same path
            pass


def test_a_run_that_was_put_in_the_place_of_another_one_is_not_written(local: LocalStorage) -> None:
    """Neither before a file is begun, nor where the folder is exchanged while it is written."""
    other = LocalStorage(local.path.with_name("other"))
    other.make()
    other.put(RECORDS, b"theirs")
    with local.owned() as check:
        local.put(RECORDS, b"ours")

        def exchange() -> None:
            local.path.rename(local.path.with_name("old"))
            other.path.rename(local.path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "synced", lambda _: exchange() if not (local.path.with_name("old")).exists() else None)
            with pytest.raises(DiskFull, match="renamed or replaced"):
                local.put(RECORDS, b"ours again")
        for act in (check, lambda: local.put(RECORDS, b"{}")):
            with pytest.raises(DiskFull, match="renamed or replaced"):
                act()
    assert local.read(RECORDS) == b"theirs"
    assert everything(local) == [RECORDS]


def test_a_disk_that_does_not_say_whose_folder_it_is_stops_the_writer(local: LocalStorage) -> None:
    with local.owned() as check, pytest.MonkeyPatch.context() as patch:
        refused = OSError(errno.EIO, os.strerror(errno.EIO))
        patch.setattr(storage.os, "fstat", Mock(side_effect=refused))
        with pytest.raises(DiskFull, match="Input/output error"):
            check()


def test_a_second_writer_is_refused_by_name_and_a_killed_one_forgotten(local: LocalStorage) -> None:
    with process(OWNING, local) as pid:
        for take_over in (False, True):
            with pytest.raises(
                RunExists, match=f"being written by process {pid} on '{socket.gethostname()}', which"
            ) as caught:
                local.owned(take_over).__enter__()
        assert caught.value.exit_code == 6
        assert caught.value.hint
        assert local.names("") == {}
    with local.owned() as check:
        check()
    assert everything(local) == []


def test_the_end_of_a_writer_lets_only_one_in(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes the file that another process has opened and will lock."""
    flock, opened = fcntl.flock, []

    def lock_late(descriptor: int, flags: int) -> None:
        if not opened:
            (local.path / ".writer").unlink()
        opened.append(descriptor)
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with local.owned():
        assert len(opened) == 2
        with pytest.raises(RunExists, match=f"process {os.getpid()} on"):
            local.owned().__enter__()
    assert everything(local) == []


@pytest.mark.parametrize("number", storage.NO_LOCKS)
def test_where_there_are_no_locks_none_is_needed(local: LocalStorage, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with local.owned():
        assert json.loads((local.path / ".writer").read_text())["process"] == os.getpid()
    assert everything(local) == []


def test_a_lock_that_fails_is_an_error(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(DiskFull, match=r"\.writer: Input/output error"):
        local.owned().__enter__()


def test_an_address_outlives_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """--reuse-continuations s3://... is a path for the command line, and an actor of Ray gets its text."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert address_of(storage_of(Path("s3://bucket/runs/one"))) == "s3://bucket/runs/one"
    assert address_of(storage_of("run")) == str(Path("run").absolute())
    assert is_remote("S3://bucket")
    assert not is_remote("s3:/bucket")


ADDRESSES = ("https://host/run", "s3://", "s3://b/../b", "s3://KEYNAME:sesame@b/run", "s3://b/run?key=sesame")


@pytest.mark.parametrize("address", [*ADDRESSES, Path("s3://b/run?key=sesame")])
def test_an_address_that_is_none_says_what_one_looks_like(address: str | Path) -> None:
    with pytest.raises(OptionInvalid, match=r"s3://BUCKET/FOLDER \(gs://, abfs://\)") as caught:
        storage_of(address)
    assert "sesame" not in f"{caught.value.message} {caught.value.hint}"


# Object stores: a server that is not ours, and a gate before it that counts, and fails when it is told to.


@dataclass
class Gate:
    """`asked`: method and path of every request; `sent`: bytes that were answered. `rule`: what to do with a request: None
    to ask the server; a status to answer; "reset" the connection; "stall" until the end; answer "half" or "lost" of what the
    server said; or call something first.
    """

    asked: list[str] = field(default_factory=list)
    rule: Callable[[str], Any] = lambda _: None
    body: bytes = b"<Error><Code>SlowDown</Code><Message>AKIDKEY</Message></Error>"
    ended: threading.Event = field(default_factory=threading.Event)
    sent: int = 0


def handler(gate: Gate, server: tuple[str, int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            while self.headers.get("transfer-encoding") and (size := int(self.rfile.readline(), 16)):
                content += self.rfile.read(size)
                self.rfile.readline()
            if self.headers.get("transfer-encoding"):
                self.rfile.readline()
            gate.asked.append(f"{self.command} {self.path}")
            fault = gate.rule(gate.asked[-1])
            if fault == "stall":
                gate.ended.wait(60)
            if fault in ("reset", "stall"):
                self.close_connection = True
                return
            if callable(fault):
                fault()
            if isinstance(fault, int):
                self.reply(fault, {}, gate.body)
                return
            connection = http.client.HTTPConnection(*server)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, content, headers)
            response = connection.getresponse()
            body = response.read()
            if fault == "lost":
                self.reply(503, {}, gate.body)
            else:
                self.reply(response.status, dict(response.getheaders()), body, len(body) // 2 if fault == "half" else None)
            connection.close()

        def reply(self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None) -> None:
            self.send_response(status)
            length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
            kept = {key: value for key, value in headers.items() if key.lower() not in ("content-length", "connection")}
            for key, value in {**kept, "Content-Length": length}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:sent])
                gate.sent += len(body[:sent])
            self.close_connection = sent is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

    return Handler


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    for package in ("moto", "flask_cors"):
        pytest.importorskip(package)
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield moto.get_host_and_port()
    moto.stop()


def tell(server: tuple[str, int], method: str, path: str, body: str = "") -> None:
    connection = http.client.HTTPConnection(*server)
    connection.request(method, path, body)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture
def gate(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before an empty server with one bucket, to which the environment leads."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    made = Gate()
    forward = ThreadingHTTPServer(("127.0.0.1", 0), handler(made, server))
    threading.Thread(target=forward.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    variables = {
        "ENDPOINT_URL": f"http://127.0.0.1:{forward.server_port}",
        "REGION": "us-east-1",
        "ACCESS_KEY_ID": "AKIDKEY",
        "SECRET_ACCESS_KEY": "sesame",
        "EC2_METADATA_DISABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(storage, "SILENCE", 1)
    tell(server, "POST", "/moto-api/reset")
    tell(server, "PUT", "/bucket")
    yield made
    made.ended.set()
    forward.shutdown()
    forward.server_close()


@pytest.fixture
def remote(gate: Gate) -> Storage:
    return storage_of("s3://bucket/runs/r1")


def on_servers(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cluster(pytest.mark.loopback(test))


def once(fault: Any, words: str = "") -> Callable[[str], Any]:
    """A rule for the first request that has these words."""
    left = [fault]
    return lambda asked: left.pop() if left and words in asked else None


VERBS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda place: place.put(RECORDS, b"{}"),
    "remove": lambda place: place.remove(RECORDS),
    "read": lambda place: place.read(RECORDS),
    "names": lambda place: place.names("records"),
    "has": lambda place: place.has(RECORDS),
}
GIVEN_UP = "the store failed or cannot be reached, and retries did not help"


def failing(place: Storage, verb: str) -> str:
    """What is printed, which is two lines without a secret."""
    kind = DiskFull if verb in ("put", "remove") else RunUnreadable
    with pytest.raises(AlphaprofError) as caught:
        VERBS[verb](place)
    assert type(caught.value) is kind
    assert place.shown in caught.value.message
    text = f"{caught.value.message}\n{caught.value.hint}"
    assert text.count("\n") == 1
    assert not re.search(r"AKID|sesame|Signature=|127\.0\.0\.1", text)
    return text


@on_servers
def test_an_object_store_keeps_whole_files_by_name(remote: Storage) -> None:
    remote.make()
    storage_of("s3://bucket/runs/r10").put("manifest.json", b"of another run")
    keeps_whole_files_by_name(remote)
    remote.discard()
    remote.remove_temporary()
    remote.require_there()
    assert list(remote.names("")) == ["empty", "manifest.json"]
    keeps_whole_files_by_name(storage_of("s3://bucket/a/b"))


@on_servers
def test_a_small_file_is_one_request(gate: Gate, remote: Storage) -> None:
    remote.put(PART, bytes(storage.WHOLE - 1))
    assert gate.asked == [f"PUT /bucket/runs/r1/{PART.replace('=', '%3D')}"]


@on_servers
@pytest.mark.parametrize(
    "words", ["?uploads", "partNumber=1", "partNumber=2", "partNumber=3", "POST /bucket/runs/r1/big?uploadId"]
)
def test_an_upload_that_fails_in_the_middle_leaves_what_was_there(
    gate: Gate, remote: Storage, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    place = storage_of(remote.shown)
    place.put("big", b"earlier")
    gate.rule = lambda asked: 500 if words in asked else None
    with pytest.raises(DiskFull):
        place.put("big", bytes(22_000_000))
    assert place.read("big") == b"earlier"


@on_servers
def test_a_stream_of_pyarrow_under_an_exception_is_published(remote: storage.ObjectStorage) -> None:
    """Why `put` has none."""
    stream = remote._store.open_output_stream("bucket/runs/r1/torn")
    with pytest.raises(TypeError), stream:
        stream.writelines([b"half", None])
    assert remote.read("torn") == b"half"


@on_servers
def test_an_interrupted_write_is_whole(gate: Gate, remote: Storage) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell takes it from what runs in the background
    gate.rule = once(lambda: os.kill(os.getpid(), signal.SIGINT), "PUT")
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.put(RECORDS, b"whole")
    finally:
        signal.signal(signal.SIGINT, before)
    assert remote.read(RECORDS) == b"whole"


@on_servers
@pytest.mark.parametrize("later", [b"{longer}", b""])
def test_a_file_replaced_while_it_is_read_is_read_again(gate: Gate, remote: Storage, later: bytes) -> None:
    remote.put(RECORDS, b"{...}")
    other = storage_of(remote.shown)
    gate.rule = once(lambda: other.put(RECORDS, later), "GET")
    if later:
        assert remote.read(RECORDS) == later
    else:
        gate.rule = lambda asked: (lambda: other.put(RECORDS, bytes(len(gate.asked)))) if "GET" in asked else None
        with pytest.raises(RunUnreadable, match="keeps changing"):
            remote.read(RECORDS)


@on_servers
@pytest.mark.parametrize("fault", [503, "reset", "lost", "half"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_store_that_fails_once_is_asked_again(gate: Gate, remote: Storage, verb: str, fault: Any) -> None:
    remote.put(RECORDS, b"{}")
    gate.rule = once(fault, {"put": "PUT", "remove": "DELETE", "has": "HEAD"}.get(verb, "GET"))
    VERBS[verb](remote)


@on_servers
@pytest.mark.parametrize("fault", [503, "reset", "stall"])
@pytest.mark.parametrize("verb", ["put", "read", "names"])
def test_a_store_that_stays_out_is_given_up(gate: Gate, verb: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    gate.rule = lambda _: fault
    text = failing(storage_of("s3://bucket/runs/r1"), verb)
    assert GIVEN_UP in text
    assert "--resume" in text


@on_servers
@pytest.mark.parametrize(("status", "code", "words"), [
    (403, "SignatureDoesNotMatch", "access is denied"),
    (403, "AccessDenied", "access is denied"),
    (400, "ExpiredToken", "access is denied (ExpiredToken)\ncheck AWS_ACCESS_KEY_ID"),
    (301, "PermanentRedirect", "the bucket is in another region (HTTP status 301)\nset AWS_REGION"),
    (400, "QuotaExceeded", "the store refused it\n"),
])  # fmt: skip
def test_a_refusal_is_explained_in_words_of_ours(gate: Gate, remote: Storage, status: int, code: str, words: str) -> None:
    gate.body = (
        b"<Error><Code>%s</Code><AWSAccessKeyId>AKIDKEY</AWSAccessKeyId><Message>Signature=</Message></Error>"
        % code.encode()
    )
    gate.rule = lambda _: status
    for verb in ("put", "names"):
        assert words in failing(remote, verb)
    for verb in ("remove", "read", "has"):  # the answer to HEAD has no body
        failing(remote, verb)


@on_servers
@pytest.mark.parametrize("verb", ["put", "read", "names"])
def test_a_bucket_that_does_not_exist_is_named(gate: Gate, verb: str) -> None:
    text = failing(storage_of("s3://missing/runs/r1"), verb)
    assert "the bucket missing does not exist (NO_SUCH_BUCKET)\ncreate it" in text


@pytest.mark.parametrize(("variables", "words"), [
    ({"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": ""}, "how to reach s3://"),
    ({"AWS_ENDPOINT_URL": "ftp://sesame"}, "AWS_ENDPOINT_URL is not"),
    ({"AWS_SESSION_TOKEN": "sesame\n"}, "AWS_SESSION_TOKEN holds"),
    ({"AZURE_STORAGE_ACCOUNT_NAME": "", "AZURE_STORAGE_ACCOUNT_KEY": "sesame"}, "how to reach abfs://"),
    ({"AZURE_STORAGE_ACCOUNT_NAME": "account"}, "how to reach abfs://"),
])  # fmt: skip
def test_variables_that_cannot_be_used_are_named(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionInvalid, match=words) as caught:
        storage_of("abfs://container/run" if "abfs" in words else "s3://bucket/run")
    assert "sesame" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID"])
def test_an_account_of_azure_needs_one_way_to_prove_it_and_one_of_google_none(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, "c2VzYW1l")
    assert isinstance(storage_of("abfs://container/run"), storage.ObjectStorage)
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(storage.fs, "GcsFileSystem", lambda **options: made.append(options))
    storage_of("gs://bucket/run")
    assert made == [{"retry_time_limit": storage.PATIENCE}]


@on_servers
def test_one_process_at_a_time_claims_a_run(remote: Storage) -> None:
    with remote.owned() as check:
        check()
        assert remote.names("") == {}
        with pytest.raises(RunExists, match=f"process {os.getpid()} on '{socket.gethostname()}'") as caught:
            remote.owned().__enter__()
        assert "--take-over" in caught.value.hint
        with remote.owned(take_over=True) as other:
            with pytest.raises(RunExists, match=f"taken over by process {os.getpid()}"):
                check()
            other()
        with pytest.raises(RunExists, match="taken over by another process"):
            check()
    with pytest.raises(ZeroDivisionError), remote.owned():
        raise ZeroDivisionError
    assert not remote.has(storage.WRITER)


@on_servers
def test_a_claim_is_removed_by_its_own_process_alone(remote: Storage) -> None:
    theirs = json.dumps({"host": "elsewhere", "process": 1, "nonce": "theirs"}).encode()
    with remote.owned():
        remote.put(storage.WRITER, theirs)
    assert remote.read(storage.WRITER) == theirs
    for content in (theirs, b"[", json.dumps({"host": socket.gethostname(), "process": 10**30}).encode()):
        remote.put(storage.WRITER, content)
        with pytest.raises(RunExists, match="is being written by"):
            remote.owned().__enter__()


@on_servers
def test_a_killed_writer_of_this_machine_needs_no_leave(remote: Storage) -> None:
    with process(OWNING, remote) as pid, pytest.raises(RunExists, match=f"process {pid} on"):
        remote.owned().__enter__()
    assert remote.has(storage.WRITER)
    with remote.owned() as check:
        check()


@on_servers
def test_a_forked_process_reads_and_writes(remote: Storage) -> None:
    remote.put(RECORDS, b"{}")
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        assert remote.read("child") == b"{}"
        return
    signal.alarm(60)
    try:
        remote.put("child", remote.read(RECORDS))
        os._exit(0)
    finally:
        os._exit(1)
