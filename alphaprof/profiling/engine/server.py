"""vLLM as a server on an address: it writes texts; and how it was started, if it runs on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from alphaprof.errors import EngineFailed, cut, shown
from alphaprof.servers.client import answer_of, root_of

if TYPE_CHECKING:
    from alphaprof.config.options import VllmOptions

WRITTEN_S = 3600  # seconds after which a request for a text has failed
Prompt = Mapping[str, Any]  # ids, max_tokens, and settings of vLLM's SamplingParams
# Options of a server that hold secrets, with their values: the arguments of a process that is given them are public.
SECRETS = re.compile(r"(?:^|(?<=\0))--(?:api|hf)[-_](?:key|token)(?:[=\0](?!--)[^\0]*)*(?:\0|$)")
SERVES = re.compile(r"(?:vllm\0serve|vllm\.entrypoints\.\w+(?:\.\w+)*)\0")  # in a command, before the options of a server


class VllmServer:
    """A vLLM server on an address. The key of `VLLM_API_KEY`, if there is one, goes with every request."""

    def __init__(self, options: VllmOptions, url: str) -> None:
        self.url = root_of(url)
        listed = answer_of(self.url, "/v1/models").get("data")
        served = [str(each.get("id")) for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        self.model = options.model or (served[0] if len(served) == 1 else "")
        if self.model not in served:
            hint = f"set vllm.model to one of: {cut(', '.join(served))}"
            raise EngineFailed(f"{self.url} serves {len(served)} models, and vllm.model is {shown(options.model)}", hint)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens. Raises `EngineFailed`."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        found = answer_of(self.url, "/tokenize", asked).get("tokens")
        return found if isinstance(found, list) else []

    def write(self, prompts: Sequence[Prompt], concurrency: int) -> Iterator[dict[str, Any]]:
        """Yield the texts of prompts, in order: `place` and `ids`. Raises `EngineFailed`."""
        with ThreadPoolExecutor(concurrency) as threads:
            yield from threads.map(self._written, range(len(prompts)), prompts)

    def _written(self, place: int, prompt: Prompt) -> dict[str, Any]:
        asked = {"temperature": 0.0, "repetition_penalty": 1.0, **prompt, "model": self.model, "return_token_ids": True}
        answer = answer_of(self.url, "/v1/completions", asked | {"prompt": asked.pop("ids")}, WRITTEN_S)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not choice.get("token_ids"):
            said = f": {cut(str(answer['error']))}" if "error" in answer else ""
            hint = "see the server's log; vLLM 0.10.2 or later has return_token_ids"
            raise EngineFailed(f"{self.url} answers without token ids{said}", hint)
        return {"place": place, "ids": choice["token_ids"]}

    def close(self) -> None:
        """Leave the server as it is."""


def server_version(url: str) -> str:
    """Return the version of vLLM on a server. Raises `EngineFailed`."""
    return str(answer_of(url, "/version").get("version", "unknown"))


def command_of(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment of the vLLM that serves on this machine at the port of an address; empty if
    none is found, or it is another user's.
    """
    place = urlsplit(url)
    for path in Path("/proc").glob("[0-9]*/cmdline") if place.hostname in ("127.0.0.1", "localhost", "::1") else ():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            started, _, rest = SERVES.sub("\n", path.read_bytes().decode().rstrip("\0"), count=1).partition("\n")
            words = SECRETS.sub("", rest).rstrip("\0").split("\0") if rest else []
            words = words if not words or words[0].startswith("--") else ["--model", *words]
            if started and words and _options(words).get("port", "8000") == str(place.port):
                pairs = path.with_name("environ").read_bytes().decode().rstrip("\0").split("\0")
                return words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return [], {}


def arguments_of(url: str) -> dict[str, str]:
    """Return the options, without their dashes, of the vLLM that `command_of` finds; empty if it finds none."""
    return _options(command_of(url)[0])


def _options(words: Sequence[str]) -> dict[str, str]:
    joined = re.sub(r"\0(?!--)", "=", "\0".join(words)).split("\0")
    pairs = (each[2:].partition("=") for each in joined)
    return {name.replace("_", "-"): value for name, _, value in pairs if name}  # vLLM takes either spelling
