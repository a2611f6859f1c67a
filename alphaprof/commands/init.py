"""`alphaprof init`: a profile file that runs, from a target, drafts and files of prompts.

The columns of prompts are found by name and shape, and asked for where neither says which they are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphaprof.config.starter import write_profile
from alphaprof.errors import TEXT, DataUnreadable, OptionInvalid, cut
from alphaprof.profiling.texts.cells import BadRow, LeftOut, Row, cell, decoded, named, render
from alphaprof.profiling.texts.chat import text_of, turns_of
from alphaprof.profiling.texts.rows import first_row
from alphaprof.render.format import short, visible

CHATS = ("messages", "conversations", "conversation", "dialog", "chat", "turns", "input", "prompt")
PROMPTS = ("prompt", "question", "query", "instruction", "problem", "user_input", "text", "input")
OUTPUTS = ("response", "response_body", "output", "outputs", "completion", "answer", "chosen", "rejected")
SHOWN = 200  # characters of a turn that are shown
CLUSTERS = ("conversation_id", "conversation", "session_id", "user_id")


def init(
    target: str, drafts: Sequence[str], data: Sequence[Path], out: Path, prompt: str = "", messages: str = ""
) -> list[str]:
    """Write `out`, with a source for each file of `data`, and return what the first prompt of each says. `prompt`,
    `messages`: the template of prompts, or the column of chats; without either it is looked for. Raises
    `OptionInvalid` if `out` exists, a file is given twice, or the column of prompts is not known, and `DataUnreadable` and
    `DataEmpty` for data without a first row.
    """
    if twice := [file for place, file in enumerate(data) if file in data[:place]]:
        raise OptionInvalid(f"--data names {twice[0]} twice", "name each file once")
    found: dict[str, tuple[dict[str, Any], str]] = {}  # by domain: a file's name, numbered if another one has it too
    for file in data:
        stem = file.name.partition(".")[0] or file.name
        names = itertools.chain([stem], (f"{stem}{number}" for number in itertools.count(2)))
        domain = next(name for name in names if name not in found)
        found[domain] = _source(file, domain, prompt, messages)
    write_profile(target, drafts, {domain: source for domain, (source, _) in found.items()}, out)
    return [prompt for _, prompt in found.values()]


def _source(data: Path, domain: str, prompt: str, messages: str) -> tuple[dict[str, Any], str]:
    """Return the options of a data file, with the columns of its prompts, and what its first prompt says."""
    row = first_row(str(data.absolute()))
    columns = _chat(row) or _prompt(row)
    if messages:
        columns = {"messages": messages} | _tools(row, messages)
    elif prompt:
        columns = {"prompt": prompt if "{" in prompt else f"{{{prompt}}}", "chat": True}
    if columns is None:
        problem = f"{data} has no column that is known to hold prompts: it has {cut(', '.join(row), TEXT // 2)}"
        raise OptionInvalid(problem, "name the one that does: --messages COLUMN, or --prompt '{COLUMN}'")
    try:
        if "messages" in columns:
            turns = named(str(columns["messages"]), turns_of, cell(row, str(columns["messages"])))
            first = "\n".join(f"  {turn['role']}: {short(text_of(turn.get('content')), SHOWN)}" for turn in turns)
            if turns and turns[-1]["role"] == "assistant":
                first += "\n  (cut before this answer; to measure answers: continuation {kind: given, answer: last})"
        else:
            first = f"  {short(render(str(columns['prompt']), row), SHOWN)}"
    except (BadRow, LeftOut) as bad:
        hint = getattr(bad, "hint", "name another column: --messages COLUMN, or --prompt '{COLUMN}'")
        raise DataUnreadable(f"the first row of {data}: {bad}", hint) from bad
    if found := [name for name in CLUSTERS if name in row and columns.get("messages") != name]:
        columns["cluster"] = found[0]
    lines = "\n".join(visible(line) for line in first.splitlines())
    return {"path": str(data)} | columns, f"first prompt of {domain}:\n{lines}"


def _places(value: object, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield every cell of a row with its path, also inside objects."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if name not in OUTPUTS:
            yield path + name, inner
            if depth > 1 and isinstance(inside := decoded(inner), Mapping):
                yield from _places(inside, f"{path}{name}.", depth - 1)


def _chat(row: Row) -> dict[str, object] | None:
    """Return the column that holds a chat: by its name and shape, or the only one of that shape."""
    found = []
    for path, value in _places(row):
        with contextlib.suppress(BadRow):
            if isinstance(decoded(value), list) and turns_of(value):
                found.append(path)
    last = [path.rpartition(".")[2] for path in found]
    known = next((path for name in CHATS for path, its in zip(found, last, strict=True) if its == name), None)
    chosen = known or (found[0] if len(found) == 1 else None)
    return None if chosen is None else {"messages": chosen} | _tools(row, chosen)


def _tools(row: Row, messages: str) -> dict[str, object]:
    """Return the columns beside a chat that its template needs too."""
    beside = messages.rpartition(".")[0]
    names = {name: f"{beside}.{name}" if beside else name for name in ("tools", "chat_template_kwargs")}
    there = dict(_places(row))
    return {name: path for name, path in names.items() if decoded(there.get(path))}


def _prompt(row: Row) -> dict[str, object] | None:
    """Return the template of prompts, by the names that they have in public datasets."""
    texts = {path: value for path, value in _places(row) if isinstance(value, str)}
    if {"instruction", "input"} <= set(texts):
        return {"prompt": "{instruction}\n\n{input}", "chat": True}
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return {"prompt": "{turns.0}", "chat": True}
    known = next((path for name in PROMPTS for path in texts if path.rpartition(".")[2].lower() == name), None)
    return None if known is None else {"prompt": f"{{{known}}}", "chat": True}
