"""Record the prompts that a real vLLM makes of chats: `tests/golden/chat/vllm.json`.

    python scripts/record_chat.py PYTHON

PYTHON is that of an environment with vLLM, such as scripts/engine_check.sh makes. `vllm launch render` is a server without a
model: its /v1/chat/completions/render answers with the prompt that /v1/chat/completions would give to the model.
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
OPTIONS = ["--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
PATIENCE = 300  # seconds until the server must answer


@contextlib.contextmanager
def serving(python: str) -> Iterator[str]:
    """Run a server for as long as the block lasts, and yield its URL."""
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


def prompt(server: str, request: dict[str, Any], template: str) -> list[int] | str:
    """Return the ids of a request's prompt, or the beginning of the reason why vLLM refuses it."""
    answer = answered(f"{server}/v1/chat/completions/render", {**request, "chat_template": template})
    if "error" not in answer:
        return list(answer["token_ids"])
    if answer["error"]["code"] != 400:  # the server's failure, no refusal
        raise RuntimeError(answer["error"]["message"])
    return " ".join(answer["error"]["message"].split())[:120]


def record(python: str) -> None:
    """Write the prompts of every conversation under every template."""
    chats = [json.loads(line) for line in (CHAT / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CHAT.glob("*.jinja"))}
    with serving(python) as server:
        facts = {"vllm": answered(f"{server}/version")["version"], "default_chat_template_kwargs": DEFAULTS}
        prompts = {
            name: {chat["name"]: prompt(server, chat["request"], template) for chat in chats}
            for name, template in templates.items()
        }
    # A line for each prompt.
    written = json.dumps({**facts, "prompts": prompts}, separators=(",", ":")) + "\n"
    for name in (*prompts, *(chat["name"] for chat in chats)):
        written = written.replace(f'"{name}":', f'\n"{name}":')
    (CHAT / "vllm.json").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    record(sys.argv[1])
