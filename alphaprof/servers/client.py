"""The one HTTP client: what a server answers, within a deadline and a size. Servers are strangers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from alphaprof.errors import TEXT, EngineFailed, cut

KEY = "VLLM_API_KEY"  # the environment variable that `vllm serve` reads as well
LARGEST = 64 << 20  # bytes of an answer, as it is sent and without compression
ANSWER_S = 30  # seconds for a whole answer
PLACES = 6  # that an answer may be sent on to, the first one included


def root_of(url: str) -> str:
    """Return the address that the paths of a server begin with."""
    return url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def answer_of(url: str, path: str, content: Mapping[str, Any] | None = None, seconds: float = ANSWER_S) -> dict[str, Any]:
    """Return what a server answers to a path, and to JSON `content` if there is any. Raises `EngineFailed`."""
    try:
        answer = json.loads(fetched(url, path, content, seconds))
    except (ValueError, RecursionError) as error:
        raise EngineFailed(f"{url} answers {path} with invalid JSON: {error}", "give the address of a vLLM server") from None
    return answer if isinstance(answer, dict) else {}


def fetched(url: str, path: str, content: Mapping[str, Any] | None = None, seconds: float = ANSWER_S) -> bytes:
    """Return what a server answers to a path, and to JSON `content` if there is any, as bytes. Raises `EngineFailed`."""
    received = Future[bytes]()

    def exchange() -> None:
        try:
            received.set_result(_answer(url, path, content, seconds))
        except BaseException as error:
            received.set_exception(error)

    # Time limits of sockets begin anew with each byte, and names are looked up without one: a thread can be left alone.
    Thread(target=exchange, daemon=True).start()
    try:
        return received.result(seconds)
    except TimeoutError:
        problem = f"{url} does not answer {path} within {seconds:.0f} seconds"
    except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:
        problem = f"{url} does not answer: {error.__cause__ or error}"
    raise EngineFailed(problem, "start the server, or correct the address")


def _answer(url: str, path: str, content: Mapping[str, Any] | None, seconds: float) -> bytes:
    """Return an answer without its deadline: `seconds` are those of a wait. The key goes to the named server alone."""
    place, body = root_of(url) + path, None if content is None else json.dumps(content)
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):  # the message about such a header would repeat it
        raise EngineFailed(f"{KEY} has characters that no key has", "set it again, without what follows the key")
    headers = {"Connection": "close", "Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    for _ in range(PLACES):
        proxy = None if proxy_bypass(urlsplit(place).hostname or "") else getproxies().get(urlsplit(place).scheme)
        answer = (urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager()).request(
            "GET" if body is None else "POST",
            place,
            body=body,
            headers=headers,
            timeout=seconds,
            retries=False,
            redirect=False,  # which would read what comes with it without a limit
            preload_content=False,
            decode_content=False,
        )
        with contextlib.closing(answer):
            next_place = answer.get_redirect_location()
            if not next_place or body is not None:
                return _body(answer, url, path)
        place = urljoin(place, next_place)
        headers.pop("Authorization", None)
    raise ValueError(f"it sends on to more than {PLACES - 1} other addresses")


def _body(answer: urllib3.BaseHTTPResponse, url: str, path: str) -> bytes:
    if not 200 <= answer.status < 300:
        said = b""
        with contextlib.suppress(OSError, urllib3.exceptions.HTTPError):  # the number says enough
            said = answer.read(TEXT)
        hint = f"set {KEY} to the server's key" if answer.status in (401, 403) else "see the server's log"
        if path == "/metrics" and answer.status in (404, 501):
            hint = "start SGLang with --enable-metrics, llama.cpp with --metrics"
        raise EngineFailed(f"{url} answers {path} with {answer.status}: {cut(said.decode(errors='replace'))}", hint)
    received = bytearray()
    while piece := answer.read(LARGEST + 1 - len(received)):
        received += piece
    if len(received) > LARGEST:
        raise ValueError(f"its answer is longer than {LARGEST:,} bytes")
    return bytes(received)
