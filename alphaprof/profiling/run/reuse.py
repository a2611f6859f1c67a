"""The documents of an earlier run with their continuations, so that other drafts are measured on the same text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.config.profile import ProfileOptions
from alphaprof.errors import RunMismatch
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.run.resume import differing, profile_of
from alphaprof.profiling.texts.corpus import Document


class Reused:
    """Stands in for a `Corpus`: the same documents in the same order, each with the continuation that the run stored."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.skipped = Counter(run.manifest.skipped)
        self.truncated = Counter(run.manifest.truncated)

    @classmethod
    def open(cls, path: Path, options: ProfileOptions) -> Reused:
        """The documents of the complete run in `path`. Raises `RunUnreadable`, and `RunMismatch` where `options` ask for
        other data or continuations than the run holds.
        """
        run = Run.open(path)
        if run.manifest.status != "complete":
            raise RunMismatch(f"{path} is not complete", "finish it with alphaprof profile --resume first")
        order = run.manifest.sequential
        if order is not None and run.manifest.documents < order["available"]:
            raise RunMismatch(
                f"{path} stopped when it was decided: its documents are as many as its results asked for",
                "reuse continuations of a run that measured all of its documents",
            )
        before, now = profile_of(run), options.model_dump(mode="json")
        changed = [key for key in ("data", "continuation") if now[key] != before[key]]
        if changed:
            raise RunMismatch(
                f"{path} was made from another profile ({', '.join(changed)} differ)",
                "reuse continuations with the data and continuation of the run that made them",
            )
        return cls(run)

    def require_same_target(self, now: Manifest) -> None:
        """Raise `RunMismatch` unless the run was made with this target, dtype and tokenizer."""
        before = self.run.manifest
        if differing(before.target, now.target) or before.tokenizer != now.tokenizer:
            raise RunMismatch(
                f"{self.run.path} was made with another target, dtype or tokenizer",
                "profile without --reuse-continuations: another target writes other text",
            )

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for shard in self.run.shards:
            for row in self.run.continuations(shard.index).to_pylist():
                yield Document(
                    document=row["document"],
                    domain=row["domain"],
                    cluster=row["cluster"],
                    source=row["source"],
                    source_row=row["source_row"],
                    prompt=np.array(row["prompt_ids"], dtype=np.int32),
                    given=np.array(row["continuation_ids"], dtype=np.int32),
                    cut=row["finish"] == "length",
                    max_new_tokens=row["max_new_tokens"],
                    kind=row["continuation"],
                    on_policy=row["on_policy"],
                    processing=_processing(row),
                    seed=row["seed"],
                )


def _processing(row: dict[str, Any]) -> Processing | None:
    """How the tokens of a stored document were drawn."""
    return None if row["temperature"] is None else Processing(**{name: row[name] for name in vars(PLAIN)})
