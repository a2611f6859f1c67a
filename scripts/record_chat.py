"""Record the prompts that a real vLLM makes of chats and of bodies of other APIs: `tests/golden/chat/vllm.json`.

    python scripts/record_chat.py PYTHON

PYTHON is that of an environment with vLLM, such as scripts/engine_check.sh makes. `vllm launch render` is a server without a
model: its /v1/chat/completions/render answers with the prompt that /v1/chat/completions would give to the model, and so do
/v1/messages/render and /v1/responses/render. Each chat template has a server of its own, since what becomes of system turns
within a request to /v1/messages depends on the server's template.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

CHAT = Path(__file__).parent.parent / "tests/golden/chat"
DEFAULTS = {"date_string": "26 Jul 2024"}  # chat_template_kwargs of every request, so that no prompt holds today's date
OPTIONS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", "model"]
COMPLETIONS = "/v1/chat/completions"
PATIENCE = 300  # seconds until the server must answer


@contextlib.contextmanager
def serving(python: str, template: Path) -> Iterator[str]:
    """Run a server with a chat template for as long as the block lasts, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        "launch",
        "render",
        str(CHAT),
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--chat-template",
        str(template),
    ]
    server = subprocess.Popen(
        [*command, *OPTIONS, "--default-chat-template-kwargs", json.dumps(DEFAULTS)], stdout=sys.stderr
    )
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                answered(f"http://127.0.0.1:{port}/version")
                break
            except URLError:
                if server.poll() is not None or time.monotonic() > end:
                    sys.exit("vLLM did not start: its messages are above")
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def answered(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the server answers, its errors too."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - the server started above
    try:
        with urlopen(request) as answer:  # noqa: S310
            return dict(json.load(answer))
    except HTTPError as error:
        return dict(json.load(error))


def prompt(server: str, path: str, request: dict[str, Any]) -> list[int] | str:
    """Return the ids of a request's prompt, or the beginning of the reason why vLLM refuses it."""
    answer = answered(f"{server}{path}/render", {**request, "model": "model"})
    if "error" not in answer:
        return list(answer["token_ids"])
    if answer["error"]["code"] != 400:  # the server's failure, no refusal
        raise RuntimeError(answer["error"]["message"])
    return " ".join(answer["error"]["message"].split())[:120]


def record(python: str) -> None:
    """Write the prompts of every conversation and every body under every template."""
    chats, bodies = (
        [json.loads(line) for line in (CHAT / name).read_text(encoding="utf-8").splitlines()]
        for name in ("conversations.jsonl", "bodies.jsonl")
    )
    found: dict[str, Any] = {"vllm": None, "default_chat_template_kwargs": DEFAULTS, "prompts": {}, "bodies": {}}
    for template in sorted(CHAT.glob("*.jinja")):
        with serving(python, template) as server:
            found["vllm"] = answered(f"{server}/version")["version"]
            for kind, each in (("prompts", chats), ("bodies", bodies)):
                found[kind][template.stem] = {
                    one["name"]: prompt(server, one.get("path", COMPLETIONS), one["request"]) for one in each
                }
    # A line for each prompt.
    written = json.dumps(found, separators=(",", ":")) + "\n"
    for name in (*found["prompts"], *(one["name"] for one in chats + bodies)):
        written = written.replace(f'"{name}":', f'\n"{name}":')
    (CHAT / "vllm.json").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    record(sys.argv[1])
