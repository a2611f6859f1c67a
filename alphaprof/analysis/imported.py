"""Requests of an engine as the tables of a run: documents, and totals at the one gamma that was served.

Nothing here estimates. What metrics per request do not tell (`log.schema.UNKNOWN_TO_ENGINES`) is null: after a rejection an
engine never tests the drafts that follow, so alpha, an average over all positions, does not follow from what it counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from alphaprof.analysis.engine_requests import EngineRequest
from alphaprof.log.schema import (
    DEPTH_COUNTS,
    DOCUMENT_COLUMNS,
    PAIR_COUNTS,
    UNKNOWN_TO_ENGINES,
    arrow_schema,
    imported_totals_columns,
)

KINDS = ("token ids", "text", "request id")  # what prompts are known by, the best first


@dataclass(frozen=True)
class Served:
    """How the engine served the requests. `sampling`: temperature, top_k, top_p, min_p; None: greedily."""

    rule: str
    gamma: int
    sampling: dict[str, float] | None


@dataclass(frozen=True)
class Labelled:
    """A request, with what only the caller knows: its `source` (a number of a file), domain and cluster."""

    request: EngineRequest
    source: int
    domain: str
    cluster: str | None


def identity(requests: Sequence[EngineRequest]) -> str | None:
    """What all prompts are known by: the best kind that every request has; None where there is none."""
    return next((kind for kind in KINDS if all(kind in request.names for request in requests)), None)


def documents_table(labelled: Sequence[Labelled], served: Served, known_by: str | None, digest: str) -> pa.Table:
    """Rows of documents.parquet. Without anything to know prompts by, each is one of its own: a line of the files that have
    this `digest`.
    """
    sampling: dict[str, float | None] = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    rows = [
        _document(number, item, known_by, digest) | sampling | (served.sampling or {})
        for number, item in enumerate(labelled)
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))


def _document(number: int, item: Labelled, known_by: str | None, digest: str) -> dict[str, Any]:
    request = item.request
    line = f"{digest} {item.source} {request.line.number}"
    return {
        "document": number,
        "domain": item.domain,
        "cluster": item.cluster,
        "source": item.source,
        "source_row": request.line.number - 1,  # rows count from 0
        "prompt_hash": request.names[known_by] if known_by else hashlib.sha256(line.encode()).hexdigest(),
        "prompt_tokens": request.prompt_tokens,
        "continuation_tokens": request.completion_tokens,
        "finish": request.finish,
        "continuation": "given",
        "on_policy": True,
        "max_new_tokens": None,
        "seed": None,
    }


def totals_table(labelled: Sequence[Labelled], served: Served) -> pa.Table:
    """Rows of the totals. A round without a draft is one that the tokens ask for and the metrics do not count."""
    gamma = served.gamma
    schema = arrow_schema(imported_totals_columns([gamma]))
    unknown = dict.fromkeys(
        (*UNKNOWN_TO_ENGINES, *PAIR_COUNTS, "emitted", "thinking_positions", "thinking_proposals", "thinking_accepted")
    )
    rows = []
    for number, item in enumerate(labelled):
        rounds, written = item.request.rounds, item.request.completion_tokens
        row = {"document": number, "rule": served.rule, "positions": written, "tokens": float(written - 1)} | unknown
        row |= {f"rounds_{gamma}": float(rounds.steps + rounds.plain), f"drafted_{gamma}": float(sum(rounds.drafted))}
        row |= {f"control_{gamma}": 0.0}
        rows.append(row | {f"{name}_depths_{gamma}": [float(n) for n in getattr(rounds, name)] for name in DEPTH_COUNTS})
    return pa.Table.from_pylist(rows, schema=schema)
