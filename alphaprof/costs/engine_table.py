"""Step times that an engine was measured with: a CSV or JSON table, or those of a run.

A table has the columns of `COLUMNS`. A JSON file is a list of such rows, an object with the list under `results`, or a list
of both, so that several files can be joined into one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from alphaprof.config.options import CostOptions, TableCosts
from alphaprof.costs.steps import TARGET, StepRow
from alphaprof.costs.timing import FREE_STEPS
from alphaprof.errors import CostsUnreadable, RunUnreadable, cut, shown
from alphaprof.run.reader import Run

NGRAM = "ngram"  # what engines call drafting from what stood there before
# What a model of each kind does, its usual step first.
STEPS_OF = {
    "target": ("decode", "verify", "prefill", "bookkeeping"),
    "draft": ("draft", "prefill", "bookkeeping"),
    "head": ("draft", "draft_first", "prefill", "bookkeeping"),
    "lookup": ("lookup", "bookkeeping"),
}
MOST_TOKENS = {"decode": 1, "lookup": 1, "bookkeeping": 1}  # of a step
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]  # what the columns of step times hold
Time = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # in ms: up to eleven days


def _split(value: object) -> object:
    return value.split() if isinstance(value, str) else value


class TableRow(BaseModel):
    """A row of a table. An empty cell has the default, if any; `rounds`: numbers with spaces between, or a list."""

    model_config = ConfigDict(extra="forbid")

    model: str
    step: str = ""
    tokens: Whole = 0
    batch: Whole = Field(1, gt=0)
    context: Whole = 0
    ms: Time
    relative_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rounds: Annotated[tuple[Time, ...], BeforeValidator(_split)] = ()
    waiting: Annotated[float, Field(ge=0, le=1)] = 0.0


COLUMNS = tuple(TableRow.model_fields)


class EngineTable(NamedTuple):
    """Step times of the models of a profile, and the names of the other models in the file, whose rows are not read."""

    rows: tuple[StepRow, ...]
    others: tuple[str, ...]


def kept_table(costs: CostOptions) -> tuple[dict[str, Any], ...] | None:
    """Return the rows of a table of step times as a run keeps them; None: the costs have none. Raises `CostsUnreadable`."""
    return tuple(dict(cells) for _, cells in _rows_at(Path(costs.path))) if isinstance(costs, TableCosts) else None


def read_engine_table(
    path: Path | Sequence[Mapping[str, Any]],
    drafts: Sequence[str],
    lookups: Sequence[str],
    overhead_ms: float,
    heads: Sequence[str] = (),
) -> EngineTable:
    """Return the rows of a file, of the directory of a run that timed its steps, or that a run kept. `drafts`: names of
    drafts that run a model; `lookups`: of those that search the text; `heads`: of `drafts`, those whose first step of a
    round is one of its own. A head's draft step over several tokens is such a one.

    Rows of NGRAM are those of every one of `lookups` that has none of its own. `overhead_ms` (sampling, scheduling) is added
    to every decode and verify step of the target, never to steps of drafts. Raises `CostsUnreadable`.
    """
    kinds = {TARGET: "target"} | dict.fromkeys(drafts, "draft") | dict.fromkeys(lookups, "lookup")
    kinds |= dict.fromkeys(heads, "head") | ({NGRAM: "lookup"} if lookups else {})
    rows: dict[tuple[Any, ...], StepRow] = {}
    others: dict[str, None] = {}
    for where, cells in _rows_at(path):
        if isinstance(model := cells.get("model"), str) and model not in kinds:
            others[model] = None
            continue
        try:
            row = _step_row(TableRow.model_validate(cells), kinds)
        except ValueError as error:  # ValidationError is one
            raise CostsUnreadable(
                f"{where}: {_row_problem(error)}",
                f"use the columns {', '.join(COLUMNS)}; write numbers like 12.5, without units",
            ) from None
        other = rows.setdefault((row.model, row.step, row.tokens, row.batch, row.context), row)
        if other.ms != row.ms:
            problem = f"this step takes {row.ms:g} ms, but {other.ms:g} ms in another row"
            raise CostsUnreadable(f"{where}: {problem}", "keep one of them, or their median")
    if missing := {"decode", "verify"} - {row.step for row in rows.values() if row.model == TARGET}:
        hint = "give target steps of 1 to N tokens, N = largest gamma + 1"
        place = path if isinstance(path, Path) else "the run's table"
        raise CostsUnreadable(f"{place}: no {' or '.join(sorted(missing))} step of the target", hint)
    timed = {row.model for row in rows.values()}
    shared = [
        replace(row, model=name) for name in lookups if name not in timed for row in rows.values() if row.model == NGRAM
    ]
    return EngineTable(tuple(_slower(row, overhead_ms) for row in [*rows.values(), *shared]), tuple(others))


def _row_problem(error: ValueError) -> str:
    """Return what is wrong with a row, in a line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    name = cut(".".join(map(str, first["loc"])))
    return f"{name} is missing" if first["type"] == "missing" else f"{name} is {shown(first['input'])}: {first['msg']}"


def _slower(row: StepRow, overhead_ms: float) -> StepRow:
    """With the overhead, which is taken as exact, if this is a step that it belongs to."""
    if row.model != TARGET or row.step not in ("decode", "verify"):
        return row
    ms = row.ms + overhead_ms
    rounds = tuple(each + overhead_ms for each in row.rounds)
    return replace(row, ms=ms, relative_error=row.relative_error * row.ms / ms, rounds=rounds)


def _step_row(row: TableRow, kinds: Mapping[str, str]) -> StepRow:
    kind = kinds[row.model]
    usual = STEPS_OF[kind][0] if kind != "target" or row.tokens == 1 else "verify"
    step = row.step or usual
    if not (tokens := row.tokens or (1 if step in FREE_STEPS else 0)):
        raise ValueError("tokens is missing")
    if step not in STEPS_OF[kind] or not (2 if step == "verify" else 1) <= tokens <= MOST_TOKENS.get(step, tokens):
        steps = ", ".join(STEPS_OF[kind])
        raise ValueError(f"{row.model} has no step {shown(step)} over {tokens} tokens; steps of a {kind} are {steps}")
    if step not in FREE_STEPS and not all((row.ms, *row.rounds)):
        raise ValueError("ms is 0, but a step takes time: measure it again, or leave the row out")
    if kind == "head" and step == "draft" and tokens > 1:
        step = "draft_first"
    place = (row.model, step, tokens, row.batch, row.context)
    return StepRow(*place, row.ms, row.relative_error, row.rounds, waiting=row.waiting)


def _rows_at(path: Path | Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row of a file or a run, or that a run kept, for messages; and its cells that are not empty."""
    if not isinstance(path, Path):
        return ((f"the run's table, row {number}", cells) for number, cells in enumerate(path, 1))
    return _of_run(path) if path.is_dir() else _records(path)


def _of_run(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a run's own step times, as a table has them."""
    hint = "name a run that timed its steps, or a CSV or JSON file of step times"
    try:
        run = Run.open(path)
        latency = run.latency()
    except RunUnreadable as error:
        raise CostsUnreadable(f"{path} cannot be read: {error}", hint) from error
    if latency is None:
        raise CostsUnreadable(f"{path} has no step times", hint)
    waiting = run.manifest.environment.get("timing_waiting") or 0.0
    for number, row in enumerate(latency.to_pylist(), 1):
        cells = {name: row[name] for name in COLUMNS if name in row} | {"ms": row["median_ms"], "waiting": waiting}
        yield f"{path}, row {number}", cells | {"rounds": row["rounds_ms"] or ()}


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row, for messages, and its cells that are not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            rows = [(f"{path}, row {number}", cells) for number, cells in enumerate(_flat(json.loads(text)), 1)]
        else:
            reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, restkey="beyond the header")
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
            if len(set(names)) < len(names):
                raise ValueError(f"a column occurs twice in {', '.join(names)}")
            rows = [(f"{path}, line {reader.line_num}", cells) for cells in reader]
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise CostsUnreadable(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            "check costs.path, a CSV or JSON file of step times, in UTF-8",
        ) from error
    for where, cells in rows:
        stripped = {key: cell.strip() if isinstance(cell, str) else cell for key, cell in cells.items()}
        yield where, {key: cell for key, cell in stripped.items() if cell not in ("", None)}


def _flat(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list, or under `results`, however they are nested."""
    if isinstance(content, list):
        for each in content:
            yield from _flat(each)
    elif isinstance(content, dict) and "results" in content:
        yield from _flat(content["results"])
    else:
        yield content if isinstance(content, dict) else {"row": content}
