"""Step times that an engine was measured with: a CSV or JSON table, or what `vllm bench iterations` writes.

A table has the columns of `COLUMNS`. A JSON file is a list of such rows, an object with the list under `results`, or a list
of both; so a file of rows and several files of vLLM can be joined into one.

vLLM: the entries are those of vllm/benchmarks/iterations.py in its two versions that were found (the time under
`latency_per_iter_ms`, or under `server_latency_per_iter_ms`): mode, context_len, input_len, batch_size. Nothing in them is
called verification. A prefill of 2 to `MOST_VERIFIED` tokens onto a context is a step over several tokens, which is what
verification is. The entries do not name their model: `model` beside them or beside `results` is ours, and without it they
are the target's. No format of a `vllm bench forward` was found, and none is read.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alphaprof.costs.steps import TARGET, StepRow
from alphaprof.costs.timing import FREE_STEPS
from alphaprof.errors import VALUE, CostsUnreadable, cut, shown

COLUMNS = ("model", "step", "tokens", "batch", "context", "ms", "relative_error", "rounds", "waiting")
VLLM_TIMES = ("server_latency_per_iter_ms", "latency_per_iter_ms")
MOST = 2**31 - 1  # of tokens, batch and context: what the columns of step times hold
LONGEST_MS = 1e9  # of one step: eleven days
MOST_VERIFIED = 64  # a longer prefill onto a context is a part of a prompt, not drafts
# What a model of each kind does, its usual step first.
STEPS_OF = {
    "target": ("decode", "verify", "prefill", "bookkeeping"),
    "draft": ("draft", "prefill", "bookkeeping"),
    "head": ("draft", "draft_first", "prefill", "bookkeeping"),
    "lookup": ("lookup", "bookkeeping"),
}


@dataclass(frozen=True)
class _Record:
    """One row as it was read, and where: file and row, for messages."""

    where: str
    cells: Mapping[str, Any]

    def refuse(self, problem: str, hint: str) -> CostsUnreadable:
        return CostsUnreadable(f"{self.where}: {problem}", hint)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises `CostsUnreadable`."""
        value = self.cells.get(key)
        if value is None or value == "":
            if default is None:
                raise self.refuse(f"{key} is missing", f"give every row a number for {key}")
            return default
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)):
                return number
        raise self.refuse(f"{key} is {shown(value)}, not a number", "write numbers with a point, without units, like 12.5")

    def whole(self, key: str, least: int, default: int | None = None) -> int:
        """A whole number up to `MOST`. Raises `CostsUnreadable`."""
        number = self.number(key, default)
        if number != int(number) or not least <= number <= MOST:
            problem = f"{key} is {number:g}, not a whole number from {least} to {MOST}"
            raise self.refuse(problem, f"correct {key} in this row")
        return int(number)

    def ms(self, key: str, step: str) -> float:
        """A time. Raises `CostsUnreadable`."""
        ms = self.number(key)
        if ms < 0 or (ms == 0 and step not in FREE_STEPS) or ms > LONGEST_MS:
            raise self.refuse(f"{key} is {ms:g}", "a step takes time: measure it again, in ms, or leave the row out")
        return ms

    def rounds(self, step: str) -> tuple[float, ...]:
        """The times in interleaved rounds, if any: numbers with spaces between, or a list. Raises `CostsUnreadable`."""
        value = self.cells.get("rounds") or ()
        each = value.split() if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        return tuple(replace(self, cells={"rounds": time}).ms("rounds", step) for time in each)


def read_engine_table(
    path: Path, drafts: Sequence[str], lookups: Sequence[str], overhead_ms: float | None, heads: Sequence[str] = ()
) -> tuple[StepRow, ...]:
    """The rows of a file. `drafts`: names of drafts that run a model; `lookups`: of those that search the text; `heads`: of
    `drafts`, those whose first step of a round is one of its own. A head's draft step over several tokens is such a one.

    `overhead_ms` (sampling, scheduling) is added to every decode and verify step of the target, never to steps of drafts;
    None: 0, but refused where the file has entries of vLLM. Raises `CostsUnreadable`.
    """
    kinds = {TARGET: "target"} | dict.fromkeys(drafts, "draft") | dict.fromkeys(lookups, "lookup")
    kinds |= dict.fromkeys(heads, "head")
    rows: dict[tuple[Any, ...], tuple[StepRow, str]] = {}
    for record in _records(path):
        if "mode" in record.cells:
            if overhead_ms is None:
                raise record.refuse(
                    "times of vLLM's bench need overhead_ms, since forward times leave out sampling and the CPU's work",
                    "set costs.overhead_ms to what a step takes besides (0: these times include it)",
                )
            row = _vllm_row(record, kinds)
        else:
            row = _row(record, kinds)
        place = (row.model, row.step, row.tokens, row.batch, row.context)
        other, where = rows.setdefault(place, (row, record.where))
        if other.ms != row.ms:
            raise record.refuse(
                f"{row.ms:g} ms for the same step that takes {other.ms:g} ms in {where.removeprefix(f'{path}, ')}",
                "remove one of them, or their median",
            )
    steps = {row.step for row, _ in rows.values() if row.model == TARGET}
    if "decode" not in steps:
        hint = "add a row: model target, tokens 1, for every batch size"
        raise CostsUnreadable(f"{path}: no decode step of the target", hint)
    if "verify" not in steps:
        hint = "measure steps of 2..N tokens of the target, N one more than the largest gamma"
        raise CostsUnreadable(f"{path}: no verify steps", hint)
    return tuple(_slower(row, overhead_ms or 0.0) for row, _ in rows.values())


def _slower(row: StepRow, overhead_ms: float) -> StepRow:
    """With the overhead, which is taken as exact, if this is a step that it belongs to."""
    if row.model != TARGET or row.step not in ("decode", "verify"):
        return row
    ms = row.ms + overhead_ms
    rounds = tuple(each + overhead_ms for each in row.rounds)
    return replace(row, ms=ms, relative_error=row.relative_error * row.ms / ms, rounds=rounds)


def _row(record: _Record, kinds: Mapping[str, str]) -> StepRow:
    if strange := [cut(str(key), VALUE) for key in record.cells if key not in COLUMNS]:
        raise record.refuse(f"unknown column {strange[0]}", f"the columns are {', '.join(COLUMNS)}")
    model = _model(record, kinds, record.cells.get("model"))
    kind = kinds[model]
    step = record.cells.get("step") or (STEPS_OF[kind][0] if kind != "target" else "")
    tokens = record.whole("tokens", 1, 1 if step in FREE_STEPS else None)
    step = step or ("decode" if tokens == 1 else "verify")
    if step not in STEPS_OF[kind]:
        raise record.refuse(f"{model} has no step {shown(step)}", f"steps of a {kind} are {', '.join(STEPS_OF[kind])}")
    if kind == "head" and step == "draft" and tokens > 1:
        step = "draft_first"
    if (tokens == 1) != (step != "verify") and step not in ("prefill", "draft", "draft_first"):
        problem = f"a {step} step over {tokens} token{'s' if tokens > 1 else ''}"
        raise record.refuse(problem, "verify has 2 or more, the others have 1")
    if (error := record.number("relative_error", 0.0)) < 0:
        hint = "give the standard error as a share of the time, or leave it out"
        raise record.refuse(f"relative_error is {error:g}", hint)
    batch, context = record.whole("batch", 1, 1), record.whole("context", 0, 0)
    if not 0 <= (waiting := record.number("waiting", 0.0)) <= 1:
        raise record.refuse(f"waiting is {waiting:g}", "give a share from 0 to 1, or leave it out")
    return StepRow(model, step, tokens, batch, context, record.ms("ms", step), error, record.rounds(step), waiting=waiting)


def _vllm_row(record: _Record, kinds: Mapping[str, str]) -> StepRow:
    model = _model(record, kinds, record.cells.get("model", TARGET))
    mode = record.cells["mode"]
    if mode not in ("prefill", "decode"):
        raise record.refuse(f"mode is {shown(mode)}", "vLLM's bench iterations writes prefill or decode")
    if kinds[model] == "lookup":
        raise record.refuse(f"{model} searches the text and runs no model", "give its time as a row with model and ms")
    time = next((key for key in VLLM_TIMES if key in record.cells), VLLM_TIMES[-1])
    context, batch = record.whole("context_len", 0), record.whole("batch_size", 1)
    tokens = 1 if mode == "decode" else record.whole("input_len", 1)
    most = 2 if kinds[model] == "draft" else MOST_VERIFIED  # a draft model catches up on one token after it drafted all
    several = {"target": "verify", "draft": "draft", "head": "draft_first"}[kinds[model]]
    one = STEPS_OF[kinds[model]][0]
    step = one if mode == "decode" else several if context > 0 and 2 <= tokens <= most else "prefill"
    return StepRow(model, step, tokens, batch, context, record.ms(time, step))


def _model(record: _Record, kinds: Mapping[str, str], name: object) -> str:
    if not isinstance(name, str) or name not in kinds:
        problem = f"unknown model {shown(name)}" if name else "model is missing"
        raise record.refuse(problem, f"the models of this profile are {cut(', '.join(kinds))}")
    return name


def _records(path: Path) -> Iterator[_Record]:
    try:
        if path.exists() and not path.is_file():
            hint = "give a regular file: reports read it again"
            raise CostsUnreadable(f"{path} cannot be read: it is not a regular file", hint)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        hint = "check costs.path, a CSV or JSON file of step times"
        raise CostsUnreadable(f"{path} cannot be read: {reason}", hint) from error
    return (_from_json if path.suffix.lower() == ".json" else _from_csv)(path, text)


def _from_csv(path: Path, text: str) -> Iterator[_Record]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, restkey="beyond the header")
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        hint = "give a CSV file, or a JSON file whose name ends in .json"
        raise CostsUnreadable(f"{path} is not CSV: {error}", hint) from error
    if twice := [name for name in names if names.count(name) > 1]:
        raise CostsUnreadable(f"{path}, line 1: column {cut(twice[0], VALUE)} occurs twice", "remove one of them")
    for line, cells in lines:
        stripped = {key: cell.strip() if isinstance(cell, str) else cell for key, cell in cells.items()}
        yield _Record(f"{path}, line {line}", stripped)


def _from_json(path: Path, text: str) -> Iterator[_Record]:
    try:
        rows = list(_flat(json.loads(text), {}))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CostsUnreadable(f"{path} is not JSON: {reason}", "give one JSON list; jq -s . joins several files") from error
    for number, cells in enumerate(rows, 1):
        record = _Record(f"{path}, row {number}", cells if isinstance(cells, dict) else {})
        if not record.cells:
            raise record.refuse("not an object", f"a row is an object with {', '.join(COLUMNS)}")
        yield record


def _flat(content: Any, shared: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of a list, or under `results`, however they are nested; a `model` beside `results` is that of its rows."""
    if isinstance(content, list):
        for each in content:
            yield from _flat(each, shared)
    elif isinstance(content, dict) and "results" in content:
        own = {"model": content["model"]} if "model" in content else {}
        yield from _flat(content["results"], {**shared, **own})
    else:
        yield {**shared, **content} if isinstance(content, dict) else content
