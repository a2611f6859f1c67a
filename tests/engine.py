"""The profile whose answers from a real vLLM are recorded, and asked for again in tests."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
OPTIONS = ("--engine", "vllm", "--documents", "6", "--gamma", "1", "--gamma", "3", "--repeats", "2")


def written_profile(folder: Path, python: str, model: str) -> Path:
    """Write the profile: greedy stories by vLLM, prompt lookup and a trained head."""
    tree = {
        "target": {"model": model, "dtype": "float32", "device": "cpu"},
        "drafts": {
            "ngram": {"kind": "prompt_lookup"},
            "head": {
                "kind": "eagle3",
                "model": str(ROOT / "tests" / "golden" / "eagle3_stories15m"),
                "check_wiring": False,
            },
        },
        "data": [
            {"domain": "stories", "path": str(ROOT / "profiles" / "prompts" / "stories-new.jsonl"), "prompt": "{prompt}"}
        ],
        "continuation": {"kind": "greedy", "max_new_tokens": 48, "writer": "vllm"},
        "rules": ["strict"],
        "gammas": [1, 3],
        "vllm": {"python": python, "args": {"enforce_eager": True, "max_num_seqs": 8}, "concurrency": 4},
        "costs": {"source": "vllm", "repeats": 8, "budget": 20},
    }
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def fake_python(folder: Path) -> Path:
    """Write a program that answers as the recorded vLLM did, where a profile names the python of an environment."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {ROOT / "tests" / "fake_vllm.py"} "$@"\n')
    path.chmod(0o755)
    return path
