"""Where the files of a run lie: nothing is there by half, a name is taken once, and what fails says so without a secret."""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import AlphaprofError, DiskFull, ExtraMissing, OptionInvalid, RunUnreadable
from alphaprof.log.storage import LocalStorage, Storage, address_of, objects, require_put_if_absent, storage_of
from alphaprof.log.storage.local import WRITTEN

PART = "positions/draft=a/part-00001.1f2e3d4c.parquet"
COMMIT = "commits/00001.json"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    place = LocalStorage(tmp_path / "run")
    place.make()
    return place


def everything(place: LocalStorage) -> list[str]:
    """Names of all files, hidden ones too."""
    return sorted(path.relative_to(place.path).as_posix() for path in place.path.rglob("*") if path.is_file())


def keeps_whole_files_by_name(place: Storage) -> None:
    """Write, list, read and remove files of an empty place."""
    assert place.names("") == {}
    place.put(PART, pa.py_buffer(b"positions"))
    place.put("manifest.json", b"{}")
    place.put("manifest.json", memoryview(b"{...}"))
    place.put("empty", b"")
    assert place.read("manifest.json") == b"{...}"
    assert place.names("") == {"empty": 0, "manifest.json": 5, PART: 9}
    assert place.names("positions") == place.names("positions/") == place.names("positions/draft=a") == {PART: 9}
    assert place.names("position") == place.names("manifest.json") == place.names("totals") == {}
    place.remove(PART)
    place.remove(PART)
    assert sorted(place.names("")) == ["empty", "manifest.json"]
    for read in (place.read, place.open):
        with pytest.raises(FileNotFoundError, match="part-00001"):
            read(PART)


def test_a_folder_keeps_whole_files_by_name(local: LocalStorage) -> None:
    keeps_whole_files_by_name(local)
    local.remove("totals/draft=a/part-00000.parquet")
    assert everything(local) == ["empty", "manifest.json"]


@pytest.mark.parametrize("links", [True, False])
def test_of_threads_that_want_one_name_one_gets_it(
    local: LocalStorage, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    for number in range(20):
        start = threading.Barrier(4)
        contents = [bytes([writer]) * 100_000 for writer in range(4)]

        def write(content: bytes, name: str = f"commits/{number:05d}.json", start: threading.Barrier = start) -> bool:
            start.wait()
            return local.put_new(name, content)

        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(write, contents))
        assert sum(taken) == 1
        assert local.read(f"commits/{number:05d}.json") == contents[taken.index(True)]
    assert len(everything(local)) == 20


def refusing(number: int) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


KILLED = """
import os, sys, time
from pathlib import Path
from alphaprof.log.storage import storage_of

def stop(_):
    print("writing", flush=True)
    time.sleep(600)

os.fsync = stop
getattr(storage_of(Path(sys.argv[1])), sys.argv[2])("commits/00001.json", b"later")
"""


@pytest.mark.parametrize("verb", ["put", "put_new"])
def test_a_process_killed_while_it_writes_leaves_nothing_to_see(local: LocalStorage, verb: str) -> None:
    local.put("commits/00000.json", b"earlier")
    if verb == "put":
        local.put(COMMIT, b"earlier")
    before = local.names("")
    command = [sys.executable, "-c", KILLED, str(local.path), verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert local.names("") == before
    (left,) = set(everything(local)) - set(before)
    assert WRITTEN.fullmatch(Path(left).name)
    if verb == "put_new":
        assert local.put_new(COMMIT, b"again")


@pytest.mark.parametrize("verb", ["put", "put_new"])
def test_a_run_that_was_deleted_meanwhile_is_not_made_again(local: LocalStorage, verb: str) -> None:
    local.path.rename(local.path.with_name("elsewhere"))
    for name in (COMMIT, "manifest.json"):
        with pytest.raises(DiskFull, match="run was deleted or renamed while it was written") as caught:
            getattr(local, verb)(name, b"{}")
        assert "--resume" in caught.value.hint
    assert not local.path.exists()


def test_without_hard_links_a_name_is_still_taken_once(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    assert local.put_new(COMMIT, b"first")
    assert not local.put_new(COMMIT, b"second")
    assert local.read(COMMIT) == b"first"
    synced: list[Any] = []

    def fail_at_the_second(_: Any) -> None:
        synced.append(None)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail_at_the_second)
    with pytest.raises(DiskFull, match="No space left"):
        local.put_new("commits/00002.json", b"{}")
    assert everything(local) == [COMMIT]


def test_a_link_whose_answer_was_lost_is_known_again(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client that asks again is told that the name exists."""
    link = os.link

    def link_twice(one: Path, other: Path) -> None:
        link(one, other)
        link(one, other)

    monkeypatch.setattr(os, "link", link_twice)
    assert local.put_new(COMMIT, b"first")
    assert not local.put_new(COMMIT, b"first")


@pytest.mark.parametrize("name", ["../other", "a/../../b", "/etc/passwd", "a\nb"])
def test_a_name_never_leads_out_of_the_run(local: LocalStorage, name: str) -> None:
    (local.path.parent / "other").write_text("kept")
    verbs: list[Callable[[str], Any]] = [local.read, local.open, local.remove]
    for verb in (*verbs, lambda name: local.put(name, b""), lambda name: local.put_new(name, b"")):
        with pytest.raises(RunUnreadable, match="lists an invalid file name"):
            verb(name)
    with pytest.raises(RunUnreadable, match="lists an invalid file name"):
        local.names(name)
    assert everything(local) == []


def test_what_cannot_be_read_says_so(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    (local.path / "manifest.json").mkdir()
    for read in (local.read, local.open):
        with pytest.raises(RunUnreadable, match=r"manifest\.json"):
            read("manifest.json")
    monkeypatch.setattr(os, "scandir", refusing(errno.EACCES))
    with pytest.raises(RunUnreadable, match="cannot be read: Permission denied") as caught:
        local.names("positions")
    assert "read access" in caught.value.hint


def parquet(rows: int = 50_000) -> tuple[pa.Table, bytes]:
    rng = np.random.default_rng(0)
    table = pa.table({name: rng.random(rows) for name in "abcdefgh"})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows // 5)
    return table, sink.getvalue()


def test_an_address_in_a_store_outlives_a_path() -> None:
    """--reuse-continuations s3://... is a path for the command line, and an actor of Ray gets its text."""
    pytest.importorskip("obstore")
    assert address_of(storage_of(Path("s3://bucket/runs/one"))) == "s3://bucket/runs/one"


@pytest.mark.parametrize(
    "address",
    ["https://host/run", "s3://", "s3://bucket/../b", "s3://KEYNAME:sesame@bucket/run", "s3://bucket/run?key=sesame"],
)
def test_an_address_that_is_none_says_what_one_looks_like(address: str) -> None:
    with pytest.raises(OptionInvalid, match="s3://BUCKET/FOLDER") as caught:
        storage_of(address)
    assert "sesame" not in f"{caught.value.message} {caught.value.hint}"


def test_without_the_package_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match="s3://bucket/run needs the package obstore") as caught:
        storage_of("s3://bucket/run")
    assert caught.value.hint.startswith("pip install")


class Careless(LocalStorage):
    """A place that ignores the condition, as some servers that speak like S3 do."""

    def put_new(self, name: str, content: Any) -> bool:
        self.put(name, content)
        return True


def test_a_store_that_ignores_put_if_absent_is_caught(local: LocalStorage) -> None:
    require_put_if_absent(local)
    with pytest.raises(DiskFull, match="ignores put-if-absent"):
        require_put_if_absent(Careless(local.path))
    assert everything(local) == []


# Object stores: a server that is not ours, and a gate before it that counts, and fails when it is told to.


@dataclass
class Gate:
    """What the gate did: (method, path, status) of every request, and bytes of content that it sent on to the client.

    `faults`: what to do with requests to come, by method: a status to answer without asking the server, or "lost": ask the
    server, and answer 503. `body`: of the answers that it makes. `deaf`: leave out the condition of put-if-absent.
    `meeting`: where requests to come wait for others, so that as many of them are on their way at once.
    """

    url: str
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    sent: int = 0
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    always: int | None = None
    body: bytes = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    deaf: bool = False
    meeting: threading.Barrier | None = None


def handler(gate: Gate, server: tuple[str, int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            if gate.meeting is not None:
                gate.meeting.wait(30)
            fault = gate.always or next(iter(gate.faults.get(self.command, [])), None)
            if gate.faults.get(self.command):
                gate.faults[self.command].pop(0)
            if isinstance(fault, int):
                self.reply(fault, {}, gate.body)
                return
            connection = http.client.HTTPConnection(*server)
            headers = {
                key: value for key, value in self.headers.items() if not (gate.deaf and key.lower() == "if-none-match")
            }
            connection.request(self.command, self.path, content, headers)
            response = connection.getresponse()
            body = response.read()
            if fault == "lost":
                self.reply(503, {}, gate.body)
            else:
                self.reply(response.status, dict(response.getheaders()), body)
            connection.close()

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            gate.asked.append((self.command, self.path, status))
            gate.sent += len(body)
            self.send_response(status)
            length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
            kept = {key: value for key, value in headers.items() if key.lower() not in ("content-length", "connection")}
            for key, value in {**kept, "Content-Length": length}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

    return Handler


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    for package in ("obstore", "moto", "flask_cors"):
        pytest.importorskip(package)
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield moto.get_host_and_port()
    moto.stop()


def tell(server: tuple[str, int], method: str, path: str, body: str = "") -> bytes:
    connection = http.client.HTTPConnection(*server)
    connection.request(method, path, body)
    response = connection.getresponse()
    content = response.read()
    assert response.status == 200, content
    connection.close()
    return content


@pytest.fixture
def gate(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before an empty server with one bucket, to which the environment leads."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    made = Gate("")
    forward = ThreadingHTTPServer(("127.0.0.1", 0), handler(made, server))
    made.url = f"http://127.0.0.1:{forward.server_port}"
    threading.Thread(target=forward.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    for name, value in {
        "ENDPOINT_URL": made.url,
        "REGION": "us-east-1",
        "ACCESS_KEY_ID": "AKIDKEY",
        "SECRET_ACCESS_KEY": "sesame",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(objects, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setattr(objects, "CONFLICTS", 2)
    tell(server, "POST", "/moto-api/reset")
    tell(server, "PUT", "/bucket")
    yield made
    forward.shutdown()
    forward.server_close()


def on_servers(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cluster(pytest.mark.loopback(test))


def said(error: AlphaprofError) -> str:
    """What is printed, which is two lines without a secret."""
    text = f"{error.message}\n{error.hint}"
    assert text.count("\n") == 1
    assert not re.search(r"AKID|sesame|Signature=|127\.0\.0\.1", text)
    return text


@pytest.fixture
def remote(gate: Gate) -> Storage:
    return storage_of("s3://bucket/runs/r1")


@on_servers
def test_an_object_store_keeps_whole_files_by_name(gate: Gate, remote: Storage) -> None:
    remote.make()
    storage_of("s3://bucket/runs/r10").put("manifest.json", b"of another run")
    keeps_whole_files_by_name(remote)
    with pytest.raises(RunUnreadable, match="lists an invalid file name"):
        remote.read("../r10/manifest.json")


@on_servers
def test_a_large_file_is_one_request(gate: Gate, remote: Storage) -> None:
    """Parts of an upload that was given up would lie, and cost, where no listing shows them."""
    content = bytes(12_000_000)
    remote.put(PART, content)
    assert remote.put_new(COMMIT, content)
    assert [(method, status) for method, *_, status in gate.asked] == [("PUT", 200)] * 2
    assert remote.names("") == {COMMIT: 12_000_000, PART: 12_000_000}


@on_servers
def test_a_name_in_an_object_store_is_taken_once(gate: Gate, remote: Storage) -> None:
    assert remote.put_new(COMMIT, b"first")
    assert not remote.put_new(COMMIT, b"first")
    assert not storage_of("s3://bucket/runs/r1").put_new(COMMIT, b"second")
    assert remote.read(COMMIT) == b"first"
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda writer: remote.put_new("commits/00002.json", bytes([writer])), range(4)))
    assert sum(taken) == 1
    assert remote.read("commits/00002.json") == bytes([taken.index(True)])
    require_put_if_absent(remote)
    assert sorted(remote.names("")) == [COMMIT, "commits/00002.json"]


@on_servers
def test_a_write_whose_answer_was_lost_is_known_again(gate: Gate, remote: Storage) -> None:
    gate.faults["PUT"] = ["lost"]
    assert remote.put_new(COMMIT, b"mine")
    assert [status for method, _, status in gate.asked if method == "PUT"] == [503, 412]
    gate.faults["PUT"] = ["lost"]
    assert not remote.put_new(COMMIT, b"mine")


@on_servers
def test_a_conflict_that_left_nothing_is_asked_again(gate: Gate, remote: Storage) -> None:
    gate.faults["PUT"] = [409]
    gate.body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    assert remote.put_new(COMMIT, b"mine")
    gate.faults["PUT"] = [409] * 2
    with pytest.raises(DiskFull, match="keeps changing"):
        remote.put_new("commits/00002.json", b"mine")


@on_servers
def test_a_server_that_ignores_the_condition_is_caught(gate: Gate, remote: Storage) -> None:
    gate.deaf = True
    with pytest.raises(DiskFull, match="s3://bucket/runs/r1 ignores put-if-absent") as caught:
        require_put_if_absent(remote)
    assert "one process" in said(caught.value)
    assert remote.names("") == {}


@on_servers
def test_columns_are_fetched_and_not_the_file(gate: Gate, remote: Storage) -> None:
    table, content = parquet()
    remote.put(PART, content)
    gate.sent = 0
    with remote.open(PART) as file:
        assert pq.ParquetFile(file).read(["c"]).equals(table.select(["c"]))
    assert len(content) / 8 < gate.sent < len(content) / 6  # one column of eight, and the footer
    gate.sent = 0
    with remote.open(PART) as file:
        assert pq.ParquetFile(file).read_row_group(3, ["c"]).num_rows == 10_000
    assert len(content) / 40 < gate.sent < len(content) / 15


VERBS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda place: place.put(COMMIT, b"{}"),
    "put_new": lambda place: place.put_new(COMMIT, b"{}"),
    "remove": lambda place: place.remove(COMMIT),
    "read": lambda place: place.read(COMMIT),
    "open": lambda place: place.open(COMMIT),
    "names": lambda place: place.names("commits"),
}
KINDS = ("put", "open", "names")  # obstore raises other errors for a listing, and an answer to HEAD says nothing
GIVEN_UP = "the store failed or cannot be reached, and retries did not help"


def failing(place: Storage, verb: str) -> str:
    kind = DiskFull if verb in ("put", "put_new", "remove") else RunUnreadable
    with pytest.raises(kind) as caught:
        VERBS[verb](place)
    assert type(caught.value) is kind
    assert place.shown in caught.value.message
    return said(caught.value)


@on_servers
@pytest.mark.parametrize("verb", VERBS)
def test_a_bucket_that_does_not_exist_is_named(gate: Gate, verb: str) -> None:
    place = storage_of("s3://missing/runs/r1")
    if verb == "open":  # the answer to HEAD has no body that could tell
        with pytest.raises(FileNotFoundError):
            place.open(COMMIT)
        return
    if verb == "remove":  # what is not there is removed
        place.remove(COMMIT)
        return
    assert "the bucket missing does not exist (NoSuchBucket)\ncreate it" in failing(place, verb)


@pytest.fixture
def strict(server: tuple[str, int], gate: Gate) -> Iterator[Callable[[list[str]], tuple[str, str]]]:
    """The server checks keys and rights; yields what makes a user who may do something, and returns the user's keys."""
    import boto3

    iam = boto3.client("iam", endpoint_url=f"http://{server[0]}:{server[1]}", region_name="us-east-1")

    def user(actions: list[str]) -> tuple[str, str]:
        iam.create_user(UserName="user")
        allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
        iam.put_user_policy(UserName="user", PolicyName="policy", PolicyDocument=json.dumps(allowed))
        key = iam.create_access_key(UserName="user")["AccessKey"]
        tell(server, "POST", "/moto-api/reset-auth", "0")
        return key["AccessKeyId"], key["SecretAccessKey"]

    yield user
    tell(server, "POST", "/moto-api/reset-auth", "inf")


@on_servers
def test_a_wrong_secret_is_refused_and_a_right_one_taken(gate: Gate, strict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server works out every signature itself."""
    key, secret = strict(["s3:*"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    assert "(SignatureDoesNotMatch)" in failing(storage_of("s3://bucket/r"), "put")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    place = storage_of("s3://bucket/r")
    assert place.put_new("a=b/c", b"{}")
    assert place.open("a=b/c").read() == b"{}"
    assert place.names("") == {"a=b/c": 2}


@on_servers
def test_what_a_store_says_is_not_repeated(gate: Gate, remote: Storage) -> None:
    """S3's own answer to a wrong signature holds the key and what was signed."""
    gate.always = 403
    signed = b"<AWSAccessKeyId>AKIDKEY</AWSAccessKeyId><StringToSign>x</StringToSign>"
    gate.body = b"<Error><Code>SignatureDoesNotMatch</Code>%s</Error>" % signed
    for verb in VERBS:
        assert "StringToSign" not in failing(remote, verb)


@on_servers
@pytest.mark.parametrize("verb", VERBS)
def test_a_store_that_is_busy_is_asked_again(gate: Gate, remote: Storage, verb: str) -> None:
    remote.put(COMMIT, b"{}")
    if verb == "put_new":
        remote.remove(COMMIT)
    method = {"put": "PUT", "put_new": "PUT", "remove": "POST", "open": "HEAD"}.get(verb, "GET")
    gate.faults[method] = [503]
    VERBS[verb](remote)
    assert gate.faults[method] == []
    assert gate.asked[-1][2] == 200


@on_servers
@pytest.mark.parametrize("verb", KINDS)
def test_a_store_that_stays_busy_is_given_up(gate: Gate, remote: Storage, verb: str) -> None:
    gate.always = 503
    text = failing(remote, verb)
    assert f"{GIVEN_UP}\n" in text
    assert "--resume" in text
    assert len(gate.asked) > 1
    gate.always = None
    assert remote.names("") == {}


@on_servers
def test_without_credentials_the_variables_are_named(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(OptionInvalid, match="environment does not say how to reach s3://bucket") as caught:
        storage_of("s3://bucket/run")
    said(caught.value)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # of the machine that lends some
    assert "access is denied\ncheck AWS_ACCESS_KEY_ID" in failing(storage_of("s3://bucket/run"), "put")


@on_servers
def test_a_forked_process_is_told_to_be_spawned(gate: Gate, remote: Storage) -> None:
    """It would wait for threads that it does not have."""
    remote.put(COMMIT, b"{}")
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    signal.alarm(60)
    try:
        remote.read(COMMIT)
    except RuntimeError as error:
        os._exit("spawn processes instead" not in str(error))
    finally:
        os._exit(1)
