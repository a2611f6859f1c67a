"""Requests of an engine as the tables of a run: documents, and totals at the one gamma that was served.

Nothing here estimates. What metrics per request do not tell (`log.schema.UNKNOWN_TO_ENGINES`) is null: after a rejection an
engine never tests the drafts that follow, so alpha, an average over all positions, does not follow from what it counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from alphaprof.commands.importing.vllm import EngineRequest
from alphaprof.log.manifest import (
    CHAIN,
    LOG_PROMPTS,
    NO_PROMPT,
    PROMPTS_KNOWN_BY,
    DraftFacts,
    Imported,
    ModelFacts,
)
from alphaprof.log.notes import note
from alphaprof.log.schema import DEPTH_COUNTS, DOCUMENT_COLUMNS, arrow_schema, depth_names, imported_totals_columns

ONE_BY_ONE = "token"  # drafts are verified one after the other


def documents_table(requests: Sequence[EngineRequest], imported: Imported, digest: str) -> pa.Table:
    """Rows of documents; what they do not name is null. Without anything to know prompts by, each is one of its own:
    a line of the files that have this `digest`.
    """
    known_by = imported.prompts_known_by
    rows = []
    for number, request in enumerate(requests):
        line = f"{digest} {request.source} {request.line.number}"
        row = {
            "document": number,
            "domain": request.domain,
            "cluster": request.cluster,
            "source": request.source,
            "source_row": request.line.number - 1,  # rows count from 0
            "prompt_hash": request.names[known_by] if known_by else hashlib.sha256(line.encode()).hexdigest(),
            "prompt_tokens": request.prompt_tokens,
            "continuation_tokens": request.completion_tokens,
            "finish": request.finish,
            "continuation": "given",
            "on_policy": True,
        }
        rows.append(row | (imported.sampling or {}))
    return pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS))


def totals_table(requests: Sequence[EngineRequest], imported: Imported) -> pa.Table:
    """Rows of the totals; what they do not name is null. A round without a draft is one that the tokens ask for and the
    metrics do not count. What rounds drafted and accepted at each depth is known of chains only.
    """
    gamma = imported.gamma
    rows = []
    for number, request in enumerate(requests):
        rounds, written = request.rounds, request.completion_tokens
        row = {
            "document": number,
            "rule": imported.rule,
            "positions": written,
            "tokens": float(written - rounds.prefilled),
            f"rounds_{gamma}": float(rounds.steps + rounds.plain),
            f"control_{gamma}": 0.0,
        }
        if imported.drafting == CHAIN:
            row[f"drafted_{gamma}"] = float(sum(rounds.drafted))
            for name in DEPTH_COUNTS:
                row |= zip(depth_names(name, gamma), map(float, getattr(rounds, name)), strict=True)
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=arrow_schema(imported_totals_columns([gamma])))


def served_model(name: str) -> ModelFacts:
    """What is known of a model that another engine ran: what it is called."""
    digest = hashlib.sha256(f"served {name}".encode()).hexdigest()
    return ModelFacts(
        reference=name,
        kind="served",
        architecture="a served model",
        fingerprint=digest,
        dtype="dtype unknown",
        device="unknown",
        parameters=None,
        context=None,
        vocabulary=None,
        eos=(),
        noise=None,
    )


def served_draft(name: str, verification: str = ONE_BY_ONE) -> DraftFacts:
    """The same of a draft. No metrics tell how an engine drafted: it counts as a model, and nothing of q is known. Its
    settings say where the engine verifies several drafts at a time, by `verification` other than ONE_BY_ONE.
    """
    settings: dict[str, int | float | str] = {} if verification == ONE_BY_ONE else {"verification": verification}
    return DraftFacts(**vars(served_model(name)), has_distribution=False, has_steps=True, settings=settings)


def notes(requests: Sequence[EngineRequest], imported: Imported) -> Iterator[dict[str, str]]:
    """What a reader of the report has to know."""
    yield note("imported")
    yield from _about_drafting(requests, imported)
    known_by = imported.prompts_known_by
    if known_by in NO_PROMPT:
        lacking = sum(PROMPTS_KNOWN_BY[0] not in request.names for request in requests)
        yield note(
            "prompts_unknown",
            known_by=known_by or "nothing",
            lacking=lacking,
            requests=len(requests),
            pairs="requests of the same id only" if known_by else "none of them",
            remedy=LOG_PROMPTS,
        )
    if plain := sum(request.rounds.plain > 0 for request in requests):
        yield note("plain_steps", rounds=imported.plain_steps, plain=plain, requests=len(requests))
    if idle := imported.without_steps:
        yield note("no_steps", idle=idle, requests=len(requests))


def _about_drafting(requests: Sequence[EngineRequest], imported: Imported) -> Iterator[dict[str, str]]:
    gamma = imported.gamma
    if imported.drafting != CHAIN:
        yield note("rounds_only", drafting=imported.drafting, gamma=gamma)
        return
    deepest = max(sum(map(bool, request.rounds.accepted)) for request in requests)  # counts never rise with depth
    if 0 < deepest < gamma:
        yield note("never_full", deepest=deepest, gamma=gamma)
