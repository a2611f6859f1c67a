"""Prompts are read and tokenised once: every process measures what stands in the run."""

from __future__ import annotations

import dataclasses
import itertools

from alphaprof.profiling.models import hub
from alphaprof.profiling.run.shards import Plan, Progress
from alphaprof.profiling.texts.continuations import digest
from alphaprof.profiling.texts.staged import prompt_table
from alphaprof.totals.documents import require_weights


def stage(plan: Plan, progress: Progress) -> None:
    """Write the prompts of a run by shards. The next manifest names them, and what was left out."""
    progress.start("reading prompts", hub.expected_documents(plan.options), "documents")
    run, stream, staged, digests = plan.run, iter(plan.documents), list[int](), list[str]()
    order = run.manifest.sequential
    size = order["shard_documents"] if order else plan.options.shard_documents
    while documents := list(itertools.islice(stream, size)):
        require_weights(plan.options.decision.weights, (document.domain for document in documents))
        run.write_prompts(prompt_table(documents), len(staged))
        staged.append(len(documents))
        digests.append(digest(documents))
        progress.advance(len(documents))
    skipped, truncated = dict(plan.documents.skipped), dict(plan.documents.truncated)
    run.manifest = dataclasses.replace(
        run.manifest, staged=tuple(staged), prompts=tuple(digests), skipped=skipped, truncated=truncated
    )
