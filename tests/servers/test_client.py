"""What a stranger may send: an answer of the size and in the time that is granted, or an error of two lines."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from alphaprof.errors import EngineFailed
from alphaprof.servers import client
from alphaprof.servers.client import KEY, answer_of, fetched
from tests.loops import each

OK = b"HTTP/1.1 200 OK\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nLocation: "
pytestmark = pytest.mark.loopback


@contextlib.contextmanager
def sending(*answers: Iterable[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the pieces of one answer after another, and what it was asked."""
    asked, over = list[bytes](), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for pieces in answers:
                with contextlib.suppress(OSError), listening.accept()[0] as connection:
                    asked.append(connection.recv(65536))
                    for piece in pieces:
                        connection.sendall(piece)
                        if over.is_set():
                            break

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        over.set()
        thread.join()


def slowly(start: bytes) -> Iterator[bytes]:
    """Bytes without end, one in .05 s."""
    yield start
    while True:
        time.sleep(0.05)
        yield b"#"


@each(
    ("pieces", "words"),
    [
        (lambda: slowly(OK + b"\r\n"), "does not answer /metrics within 1 seconds"),
        (lambda: slowly(OK + b"X: "), "does not answer /metrics within 1 seconds"),
        (lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(b"x" * 500)), "longer than 5,000 bytes"),
        (lambda: itertools.chain([FOUND + b"/\r\n\r\n"], itertools.repeat(b"x" * 500)), "does not answer"),
        (lambda: [OK + b"Content-Length: 9\r\n\r\nabc"], "6 more expected"),
        (lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"], "does not answer"),
        (lambda: [OK + b"X: " + b"a" * 99_000], "does not answer"),
        (lambda: [b"\x15\x03\x01\x00\x02\x02P\r\n\r\n"], "does not answer"),
        (lambda: [FOUND + b"file:///etc/hostname\r\n\r\n"], "does not answer"),
        (list, "does not answer"),
        (lambda: [b"HTTP/1.1 404 No\r\n\r\nnone"], "answers /metrics with 404: none"),
        (lambda: [OK + b"\r\n" + b"[" * 4000], "invalid JSON"),
    ],
)
def test_a_bad_answer_is_an_error(pieces: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LARGEST", 5000)
    with sending(pieces()) as (url, _), pytest.raises(EngineFailed) as error:  # type: ignore[operator]
        answer_of(url, "/metrics", seconds=1.0)
    assert words in error.value.message


def test_what_is_compressed_stays_so() -> None:
    """Who reads it counts what it becomes."""
    packed = gzip.compress(b"x" * 10_000)
    with sending([OK + b"Content-Encoding: gzip\r\n\r\n" + packed]) as (url, _):
        assert fetched(url, "/metrics") == packed


def test_the_key_goes_to_the_named_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret\n")  # as a file holds it
    with sending([OK + b"\r\nhere"]) as (there, asked):
        place = f"{there}/metrics\r\n\r\n".encode()
        with sending([FOUND + place], [FOUND + place]) as (url, first):
            assert fetched(url, "/metrics") == b"here"
            with pytest.raises(EngineFailed, match="answers /tokenize with 302"):
                fetched(url, "/tokenize", {"prompt": "a"})
    assert all(b"Authorization: Bearer secret\r\n" in question for question in first)
    assert b"secret" not in asked[0]


def test_addresses_in_a_circle_and_a_broken_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(*[[FOUND + b"/metrics\r\n\r\n"]] * 6) as (url, _), pytest.raises(EngineFailed, match="more than 5 other"):
        fetched(url, "/metrics")
    monkeypatch.setenv(KEY, "sec\nret")
    with pytest.raises(EngineFailed, match="VLLM_API_KEY has characters") as error:
        fetched("http://127.0.0.1:1", "/metrics")
    assert "sec" not in error.value.message.replace("seconds", "")
