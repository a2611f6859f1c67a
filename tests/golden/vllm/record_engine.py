"""Record what a real vLLM answers to `alphaprof validate --engine vllm`, for tests that replay it: `engine-0.32.0.json`.

python tests/golden/vllm/record_engine.py PYTHON_WITH_VLLM /ABSOLUTE/FOLDER/OF/STORIES15M
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from alphaprof.cli.app import main
from alphaprof.profiling.engine.client import VllmEngine
from tests.engine import OPTIONS, written_profile

HERE = Path(__file__).parent
MOST = 12  # answers of one kind of step
KEPT = {"place", "ids", "rounds", "accepted", "drafted", "wall_ms", "emitted"}
recorded: dict[str, Any] = {"facts": {}, "answers": {}}


def key(engine: VllmEngine, do: str, command: dict[str, Any]) -> str:
    """What tells a command: the engine's speculation, and the command without its seed."""
    method = (engine._asked.get("speculative_config") or {}).get("method")
    gamma = (engine._asked.get("speculative_config") or {}).get("num_speculative_tokens")
    return json.dumps(
        [method, gamma, do, {name: value for name, value in command.items() if name != "seed"}], sort_keys=True
    )


class Recorder(VllmEngine):
    """An engine that keeps its answers."""

    def start(self) -> Any:
        """As of `VllmEngine`."""
        recorded["facts"] = super().start()
        return recorded["facts"]

    def ask(self, do: str, **command: Any) -> Any:
        """As of `VllmEngine`."""
        answer = super().ask(do, **command)
        kept = recorded["answers"].setdefault(key(self, do, command), [])
        if len(kept) < MOST:
            kept.append(answer)
        return answer

    def write(self, prompts: Sequence[Any], concurrency: int) -> Iterator[dict[str, Any]]:
        """As of `VllmEngine`."""
        answers = list(super().write(prompts, concurrency))
        kept = recorded["answers"].setdefault(key(self, "write", {"prompts": prompts, "concurrency": concurrency}), [])
        kept.append([{name: value for name, value in answer.items() if name in KEPT} for answer in answers])
        yield from answers


def record(python: str, model: str) -> None:
    """Run the command twice, one sequence and two at a time, and write what was answered."""
    import alphaprof.profiling.engine.steps as steps
    import alphaprof.profiling.engine.texts as texts

    steps.VllmEngine = texts.VllmEngine = Recorder  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        profile = written_profile(Path(folder), python, model)
        for concurrency in ("1", "2"):
            sys.argv = ["alphaprof", "validate", str(profile), *OPTIONS, "--concurrency", concurrency]
            with contextlib.suppress(SystemExit):
                main()
    text = json.dumps(recorded, separators=(",", ":"))
    (HERE / "engine-0.32.0.json").write_text(text + "\n")


if __name__ == "__main__":
    record(*sys.argv[1:])
