"""Whether vLLM accepts what `alphaprof export --to vllm-config` writes: run it with the Python of vLLM's environment.

    python scripts/check_vllm_config.py MODEL FILE...

Each file goes through the argument parser of `vllm serve`, the creation of the engine's configuration and the lookup by
batch size that its scheduler builds; nothing is loaded. Then vLLM must refuse the file with one thing wrong at a time, so
that its checks are known to be at work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm import __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

SCHEDULE = "num_speculative_tokens_per_batch_size"
SEQUENCES = 64  # in a batch, at most


def accepted(model: str, text: str) -> str:
    """What vLLM makes of a configuration, in words. Raises what vLLM raises."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = ["--model", model, "--max-num-seqs", str(SEQUENCES), "--enforce-eager", "--speculative-config", text]
    engine = EngineArgs.from_cli_args(parser.parse_args(options)).create_engine_config()
    found = engine.speculative_config
    words = [f"{found.method}, {found.num_speculative_tokens} tokens, {found.draft_sample_method}"]
    words.append(found.rejection_sample_method)
    if schedule := getattr(found, SCHEDULE):
        by_size = build_dynamic_sd_schedule_lookup(schedule, SEQUENCES, found.num_speculative_tokens)
        words.append("by batch size " + " ".join(map(str, by_size[1:])))
    return ", ".join(words)


def spoilt(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what is wrong, and the configuration with it."""
    yield "an unknown key", config | {"gamma": 3}
    yield "an unknown method", config | {"method": "layer_skip"}
    yield "no tokens", config | {"num_speculative_tokens": 0}
    yield "an unknown sample method", config | {"draft_sample_method": "lossless"}
    yield "an unknown rejection method", config | {"rejection_sample_method": "strict"}
    yield "a schedule that begins at 2", config | {SCHEDULE: [[2, 4, 1]]}
    yield "ranges that overlap", config | {SCHEDULE: [[1, 4, 1], [4, 8, 0]]}
    yield "a gamma below 0", config | {SCHEDULE: [[1, 4, -1]]}


def main(model: str, files: list[str]) -> int:
    """Print a line for each check; the number of those that failed."""
    failed = 0
    for file in files:
        text = Path(file).read_text()
        print(f"{file}: vLLM {__version__} accepts it: {accepted(model, text)}")
        for wrong, config in spoilt(json.loads(text)):
            try:
                print(f"FAILED: {file} with {wrong} is accepted as well: {accepted(model, json.dumps(config))}")
                failed += 1
            except (ValueError, SystemExit) as error:
                reason = str(error).strip().splitlines()
                print(f"  with {wrong} it is refused: {type(error).__name__}: {' '.join(reason)[:100]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
