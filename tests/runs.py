"""Runs on the tiny models: their profile, what is profiled, and a progress that nobody watches."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.profiling import profile as profiling
from alphaprof.profiling.training import TrainingOptions, train
from alphaprof.run.reader import Run
from tests.reference import LOGGED_RULES

NEW_TOKENS = 24


class Silent:
    """A progress that remembers warnings and lines."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, code: str, message: str, remedy: str) -> None:
        self.warnings.append(code)

    def start(self, label: str, total: int | None, unit: str) -> None: ...

    def advance(self, steps: float, positions: int = 0) -> None: ...

    def relabel(self, label: str) -> None: ...


def openings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file of data is opened from now on, and each dataset that `datasets` reads."""
    import datasets

    found: Counter[str] = Counter()
    builder, os_file, opening = datasets.load_dataset_builder, pa.OSFile, Path.open

    def counted(path: Any, *rest: Any, original: Any, **more: Any) -> Any:
        found[str(path)] += 1
        return original(path, *rest, **more)

    monkeypatch.setattr(pa, "OSFile", partial(counted, original=os_file))
    monkeypatch.setattr(Path, "open", lambda self, *rest, **more: counted(self, *rest, original=opening, **more))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda **given: counted(original=builder, **given))
    return found


def write_data(folder: Path) -> None:
    """Two domains of different lengths, and logged responses as text and as ids."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more", "of", "it"]
    generator = np.random.default_rng(0)
    for domain, count in (("long", 9), ("short", 6)):
        rows = []
        for index in range(count):
            size = int(generator.integers(2, 12)) if domain == "long" else 1
            text = f"{index} " + " ".join(generator.choice(words, size))
            ids = generator.integers(0, 250, 5 + index).tolist()
            rows.append({"text": text, "response": text[::-1], "ids": [*ids, 256], "conversation": index // 2})
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def profile_file(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A profile over the tiny models; changes replace top-level keys."""
    write_data(folder)
    tree = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "drafts": {
            "close": {"kind": "model", "model": str(tiny / "draft")},
            "skip": {"kind": "layer_skip", "drop_layers": [2]},
            "wide": {"kind": "model", "model": str(tiny / "wide")},
            "brief": {"kind": "model", "model": str(tiny / "short")},
        },
        "data": [
            {"domain": "long", "path": "long.jsonl", "prompt": "{text}", "chat": True},
            {"domain": "short", "path": "short.jsonl", "prompt": "{text}", "cluster": "conversation"},
        ],
        "continuation": {"kind": "greedy", "max_new_tokens": NEW_TOKENS},
        "gammas": [1, 2, 4],
        "costs": {"context": 16, "repeats": 3},
        "batch_tokens": 160,
        "shard_documents": 4,
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


MIXED: dict[str, Any] = {
    "drafts": {
        "close": {"kind": "model", "model": "TINY/draft"},
        "ngram": {"kind": "prompt_lookup", "max_ngram": 2, "match": "leftmost"},
    },
    "data": [
        {"domain": "greedy", "path": "long.jsonl", "prompt": "{text}", "chat": True, "limit": 4},
        {
            "domain": "drawn",
            "path": "long.jsonl",
            "prompt": "{text} {text}",
            "continuation": {"kind": "sampled", "temperature": 1.2, "top_p": 0.9, "seed": 3, "max_new_tokens": 20},
        },
        {
            "domain": "drawn",
            "path": "short.jsonl",
            "prompt": "{text}",
            "continuation": {"kind": "sampled", "top_k": 40, "max_new_tokens": 15},
        },
        {
            "domain": "logged",
            "path": "short.jsonl",
            "prompt": "{text}",
            "continuation": {"kind": "given", "column": "response", "temperature": 0.8},
        },
        {"domain": "plain", "path": "long.jsonl", "prompt": "{text}", "continuation": {"kind": "text", "prompt_tokens": 9}},
    ],
    "thinking": {"begin": "o", "end": "e"},
    "rules": [*LOGGED_RULES, "tree_2"],
    "draft_processing": "same",  # so that q, too, gives tokens no probability
    "certificates": True,
    "costs": {"source": "none"},
    "execution": {"threads": 1},
}


def mixed_file(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A profile with greedy, sampled, given and plain texts, a model and prompt lookup as drafts, and thinking markers."""
    drafts = json.loads(json.dumps(MIXED["drafts"]).replace("TINY", str(tiny)))
    return profile_file(folder, tiny, **MIXED | {"drafts": drafts} | changes)


def run_profile(path: Path, out: Path, resume: bool = False, *overrides: str) -> Run:
    return profiling.profile(load_profile(path, list(overrides)), out, Silent(), resume)


def log_of(run: Run, draft: str) -> pd.DataFrame:
    """The positions of one draft."""
    return pd.read_parquet(run.path / "positions", filters=[("draft", "==", draft)]).reset_index(drop=True)


def tables(out: Path) -> dict[str, Any]:
    """Every table of a complete run but the latency, by its path."""
    paths = sorted(path for path in out.rglob("*.parquet") if path.name != "latency.parquet")
    return {str(path.relative_to(out)): pq.ParquetFile(path).read() for path in paths}


def require_same_tables(out: Path, expected: Run) -> None:
    """A complete run with the rows of another, and nothing else in its folder."""
    one, other = tables(out), tables(Path(expected.path))
    assert one.keys() == other.keys()
    for name, table in one.items():  # what differs is printed: once in many runs under load rows were not equal
        odd = [column for column in table.column_names if not table[column].equals(other[name][column])]
        assert not odd, (name, {column: (table[column].to_pylist(), other[name][column].to_pylist()) for column in odd[:3]})
    found = Run.open(out)
    found.verify()
    assert found.manifest.status == "complete"
    for part in ("staged", "shards", "skipped", "truncated"):
        assert getattr(found.manifest, part) == getattr(expected.manifest, part)
    records = {name for name in found.storage.names("") if name.startswith("records/")}
    assert set(found.storage.names("")) - set(found.manifest.files) - records == {"manifest.json"}
    assert not (out / ".writer").exists()


def interrupted(path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends after its second shard."""
    with monkeypatch.context() as patch:
        original = profiling.score_shard

        def limited(loaded: Any, drafts: Any, shard: Any, *rest: Any) -> Any:
            if shard.index == 2:
                raise KeyboardInterrupt
            return original(loaded, drafts, shard, *rest)

        patch.setattr(profiling, "score_shard", limited)
        with pytest.raises(KeyboardInterrupt):
            run_profile(path, out)


# Texts that heads are trained on.

WORDS = ("the", "a", "red", "old", "bird", "fish", "tree", "ran", "sang", "saw", "under", "home", "again", "slowly", "but")
TRAINING = TrainingOptions(steps=12, batch_tokens=60, learning_rate=5e-3)


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(count)]


def run_of_prompts(folder: Path, tiny: Path, documents: int = 30, **changes: Any) -> Run:
    """A run of some prompts, with prompt lookup. `changes`: of the profile."""
    rows = [{"prompt": each} for each in prompts(documents)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "drafts": {"ngram": {"kind": "prompt_lookup"}},
        "data": [{"domain": "words", "path": "prompts.jsonl", "prompt": "{prompt}"}],
        "continuation": {"kind": "greedy", "max_new_tokens": 20},
        "gammas": [1, 2, 3],
        "rules": ["strict", "one_hot", "lossless"],
        "costs": {"source": "none"},
        "execution": {"threads": 1},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree | changes))
    return run_profile(folder / "profile.yaml", folder / "run")


def train_head(run: Run, out: Path) -> Run:
    """Train a head on a run of prompts; the run that tested it."""
    return train(load_profile(Path(run.path).parent / "profile.yaml", []), str(run.path), out, TRAINING, Silent())
