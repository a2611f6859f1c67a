"""From the arrays of scoring to rows of the position log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.log.schema import LogRules, arrow_schema
from alphaprof.profiling.scoring.scorer import Arrays
from alphaprof.profiling.texts.continuations import Continuation
from alphaprof.rules import rules_of


def by_document(batch: Sequence[Continuation], arrays: Arrays) -> dict[int, Arrays]:
    """The arrays of a batch cut into those of its documents, by document number."""
    stops = np.cumsum([len(item.ids) for item in batch])
    pieces = {name: np.split(values, stops[:-1]) for name, values in arrays.items()}
    return {item.document.document: {name: pieces[name][index] for name in arrays} for index, item in enumerate(batch)}


def position_table(
    continuations: Sequence[Continuation],
    scored: dict[int, Arrays],
    rules: LogRules,
    draft: str,
    thinking: Sequence[np.ndarray[Any, Any]] | None = None,
) -> pa.Table:
    """Rows of one draft's position log for documents in order; `scored` holds their arrays by document number.

    `thinking`: for each document which of its positions lie in the phase thinking; None: no phases.
    """
    lengths = [len(item.ids) for item in continuations]
    parts = [scored[item.document.document] for item in continuations]
    data: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    data["document"] = np.repeat([item.document.document for item in continuations], lengths)
    data["position"] = np.concatenate([np.arange(length) for length in lengths])
    if thinking is not None:
        data["phase"] = np.where(np.concatenate(thinking), "thinking", "answer")
    data |= _accepted(data, np.repeat([item.document.greedy for item in continuations], lengths), rules)
    columns = rules.columns
    schema = arrow_schema(columns, draft=draft, rules=list(rules.accepted))
    without_proposal = data["proposed"] == 0
    arrays = []
    for column in columns:
        if column.name == "domain":
            arrays.append(_domains(continuations, lengths))
        elif column.name not in data:
            arrays.append(pa.nulls(sum(lengths), column.type))
        else:
            mask = without_proposal if column.nullable and column.name != "phase" else None
            arrays.append(pa.array(data[column.name], mask=mask).cast(column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _accepted(data: dict[str, Any], greedy: np.ndarray[Any, Any], rules: LogRules) -> dict[str, Any]:
    """`accept_<rule>` for every rule; a draft without a distribution has NaN where rules look for one."""
    nothing = np.full(len(greedy), np.nan)
    needed = [f"{name}_{rule}" for rule in rules.emitted for name in ("accept", "emitted")]
    columns = dict.fromkeys(("overlap", "draft_token_prob", "draft_rank_of_token", *needed), nothing) | data
    columns |= {"greedy": greedy}
    return {f"accept_{rule.id}": rule.accept(columns) for rule in rules_of(list(rules.accepted))}


def _domains(continuations: Sequence[Continuation], lengths: Sequence[int]) -> pa.Array:
    names = list(dict.fromkeys(item.document.domain for item in continuations))
    codes = np.repeat([names.index(item.document.domain) for item in continuations], lengths)
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names, pa.string()))
