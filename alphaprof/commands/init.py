"""`alphaprof init`: a profile file that runs, from a target, drafts and files of prompts.

The columns of prompts are found by name and shape, and asked for where neither says which they are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphaprof.config.paths import resolve
from alphaprof.config.profile import SourceOptions
from alphaprof.config.starter import write_profile
from alphaprof.errors import TEXT, DataUnreadable, OptionInvalid, cut
from alphaprof.profiling.models.hub import is_local
from alphaprof.profiling.texts.cells import BadRow, LeftOut, Row, decoded
from alphaprof.profiling.texts.chat import text_of
from alphaprof.profiling.texts.requests import Turn, chat_of
from alphaprof.profiling.texts.rows import first_row
from alphaprof.render.format import visible

CHATS = ("messages", "contents", "conversations", "conversation", "dialog", "chat", "turns", "input", "prompt")
PROMPTS = ("prompt", "question", "query", "instruction", "problem", "user_input", "text", "input")
OUTPUTS = ("response", "response_body", "output", "outputs", "completion", "answer", "chosen", "rejected")
DOMAINS = ("domain", "category")
ANOTHER = "name another column: --messages COLUMN, or --prompt '{COLUMN}'"
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
    for name in (target, *drafts):
        if is_local(path := resolve(name, Path())) and not Path(path).exists():
            raise OptionInvalid(f"{name} does not exist", "give the path of a model that is here, or a hub id")
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
    place = str(data.absolute())
    row = first_row(SourceOptions(domain=domain, path=place, prompt="x"))
    try:
        if messages:
            columns: dict[str, Any] | None = {"messages": messages} | _tools(row, messages)
        elif prompt:
            columns = {"prompt": prompt if "{" in prompt else f"{{{prompt}}}", "chat": True}
        else:
            columns = _chat(row) or _prompt(row)
        if columns is None:
            raise OptionInvalid(
                f"{data} has no column that is known to hold prompts: it has {cut(', '.join(row), TEXT // 2)}",
                "name the one that does: --messages COLUMN, or --prompt '{COLUMN}'",
            )
        chat = chat_of(SourceOptions(domain=domain, path=place, **columns), row)
    except (BadRow, LeftOut) as bad:
        raise DataUnreadable(f"the first row of {data}: {bad}", getattr(bad, "hint", ANOTHER)) from bad
    said = [f"{turn['role']}: {_said(turn)}" for turn in chat.turns]
    if not chat.turns or not said[-1].partition(": ")[2].strip():
        raise DataUnreadable(f"the first row of {data} has a prompt that says nothing", ANOTHER)
    if chat.answer:
        said.append("(cut before this answer; to measure answers: continuation {kind: given, answer: last})")
    said += [f"(not in the prompt: {key}; if your server puts it there: system: '{{{key}}}')" for key in chat.unused]
    if found := [name for name in CLUSTERS if name in row and columns.get("messages") != name]:
        columns["cluster"] = found[0]
    named = next((name for name in DOMAINS if isinstance(row.get(name), str) and row[name].strip()), None)
    lines = "\n".join(f"  {visible(line)}" for text in said for line in text.splitlines())
    source = {"path": str(data)} | columns | ({"domain": {"column": named}} if named else {})
    return source, f"first prompt of {domain}:\n{lines}"


def _said(turn: Turn) -> str:
    """Return all that a turn says: its reasoning, its text, and the functions that it calls."""
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    called = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(filter(None, (turn.get("reasoning"), text_of(turn.get("content")), *called)))


def _places(value: object, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield every cell of a row with its path, also inside objects."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if name not in OUTPUTS:
            yield path + name, inner
            if depth > 1 and isinstance(inside := decoded(inner), Mapping):
                yield from _places(inside, f"{path}{name}.", depth - 1)


def _chat(row: Row) -> dict[str, Any] | None:
    """Return the column that holds a chat: by its name and shape, or the only one of that shape. Raises `BadRow` if none
    does, but one holds turns that cannot be read.
    """
    found, bad = [], None
    for path, value in _places(row):
        turns = decoded(value)
        if not isinstance(turns, list) and not (path == "input" and "instructions" in row):
            continue
        try:
            chat = chat_of(SourceOptions(domain="x", path="x", messages=path), row)
            found += [path] if chat.turns or chat.answer else []
        except LeftOut:
            found.append(path)
        except BadRow as one:
            bad = one if any(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in turns) else bad
    last = [path.rpartition(".")[2] for path in found]
    known = next((path for name in CHATS for path, its in zip(found, last, strict=True) if its == name), None)
    chosen = known or (found[0] if len(found) == 1 else None)
    if bad is not None and not found:
        raise bad
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
