"""Stands in for the python of an environment with vLLM: answers as a real one did (`golden/vllm/engine-0.32.0.json`).

`FAKE_VLLM_VERSION`: the version that it says; `FAKE_VLLM_DIES`: it ends, with these words on stderr, at its first command;
`FAKE_VLLM_SHIFTS`: every token that it writes is another one.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

RECORDED = Path(__file__).parent / "golden" / "vllm" / "engine-0.32.0.json"


def main() -> None:
    """Answer the version, or commands."""
    if sys.argv[1] == "-c":
        print(os.environ.get("FAKE_VLLM_VERSION", "0.32.0"))  # noqa: T201
        return
    recorded, asked, turns = json.loads(RECORDED.read_text()), json.loads(sys.argv[2])["engine"], Counter[str]()
    speculation = asked.get("speculative_config") or {}
    print(json.dumps(recorded["facts"]), flush=True)  # noqa: T201
    for line in sys.stdin:
        command = json.loads(line)
        if words := os.environ.get("FAKE_VLLM_DIES"):
            sys.exit(words)
        do = command.pop("do")
        command.pop("seed", None)
        gamma = 1 if do == "prefill" and speculation else speculation.get("num_speculative_tokens")
        alone = command.get("concurrency") == 1  # each was recorded by itself
        told = []
        for given in [command | {"prompts": [prompt]} for prompt in command["prompts"]] if alone else [command]:
            key = json.dumps([speculation.get("method"), gamma, do, given], sort_keys=True)
            answers = recorded["answers"][key]
            told.append(answers[turns[key] % len(answers)])
            turns[key] += 1
        answer = [each | {"place": place} for place, (each,) in enumerate(told)] if alone else told[0]
        if do == "write" and os.environ.get("FAKE_VLLM_SHIFTS"):
            answer = [each | {"ids": [(token + 7) % 32_000 for token in each["ids"]]} for each in answer]
        for each in [*answer, None] if do == "write" else [answer]:
            print(json.dumps(each), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
