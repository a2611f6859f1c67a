"""Chats as an engine renders them: what vLLM does to a request before its chat template, and the template.

Taken from vLLM 0.32 (`renderers/chat_utils.py`, `renderers/hf.py`, `entrypoints/openai/chat_completion/protocol.py`), and
recorded of it in tests/golden/chat. More lenient than vLLM: arguments that are an object already, content of strings alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ColumnMissing, ProfileInvalid, shown
from alphaprof.profiling.models.hub import first_line
from alphaprof.profiling.texts.cells import BadRow, LeftOut
from alphaprof.profiling.texts.requests import BILLING, CHAT, NOT_TEXT, ROLES, Turn, set_variables, tools_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
ROOM = 1 << 28  # bytes of memory that a chat template may take: it came with a model, and can ask for any amount
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers, which marks what a model wrote


def text_of(content: Any) -> str:
    """Return the content of a turn as one text, by lines. Raises `BadRow`, and `LeftOut` for parts that are not text."""
    return "\n".join(filter(None, (part["text"] for part in _parts(content))))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    variables: Mapping[str, Any],
    tools: Any = None,
    begin: bool = True,
    begun: bool = False,
) -> str:
    """Return what a tokenizer's chat template writes for a chat. `variables`: the template's own; `tools`: functions that
    may be called, or their JSON text; `begin`: an answer is begun after the chat; `begun`: the last turn goes on.

    Raises `BadRow` for turns that are none, roles that the template does not know, and what it refuses, and `LeftOut` for
    content that is not text.
    """
    known = variables.get("tools") if tools is None else tools_of(tools)
    template = template_of(tokenizer, known)
    for role in {turn["role"] for turn in turns} - set(ROLES.values()):
        if not re.search(f"[\"']{re.escape(role)}[\"']", template):
            raise BadRow(
                f"has a turn of the role {shown(role)}, which the chat template does not know",
                f"use {', '.join(dict.fromkeys(ROLES.values()))}, or a role that the chat template names",
                ColumnMissing,
            )
    reads_parts = _reads_parts(template)
    chat = [_turn(turn, reads_parts) for turn in turns]
    if not any(word in template for word in ("'developer'", '"developer"')):
        chat = _developer_as_system(chat)
    given = set_variables(variables)
    if isinstance(date := given.get("date_string"), str) and "strftime_now" in template:
        template = f"{{% macro strftime_now(_) %}}{{{{ {json.dumps(date)} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"
    try:
        with _within(ROOM):
            text = tokenizer.apply_chat_template(
                chat,
                tools=known,
                chat_template=template,
                add_generation_prompt=begin and not begun,
                continue_final_message=begun,
                tokenize=False,
                **given,
            )
    except MemoryError as error:
        raise BadRow(
            f"makes the chat template take more than {ROOM >> 20} MiB", "use the template of the model's maker"
        ) from error
    except Exception as error:  # templates raise jinja's errors and those of whatever they call
        raise BadRow(
            f"is refused by the chat template: {first_line(error)[:200]}", "check the roles of the chat, and chat_options"
        ) from error
    return str(text)


@contextlib.contextmanager
def _within(memory: int) -> Iterator[None]:
    """Limit what the block may allocate to `memory` bytes more than the process holds; beyond that Python raises
    `MemoryError`. Only on Linux, which says what the process holds.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        least = min(each for each in (taken + memory, *limits) if each != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (least, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Any) -> str:
    """Return the chat template that a tokenizer has for a chat with these tools. Raises `ProfileInvalid`."""
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:  # it has several, and none by default
        raise ProfileInvalid(
            f"no chat template can be chosen: {first_line(error)[:200]}", "use prompts without chat"
        ) from error


def writes_the_date(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> bool:
    """Return whether prompts change from day to day: the chat template writes today's date."""
    if tokenizer.chat_template is None or "date_string" in variables or "strftime_now" not in template_of(tokenizer, None):
        return False
    turns, days = [{"role": "user", "content": "a"}], ("01 Feb 2003", "12 Nov 2010")
    try:
        one, other = (render_chat(tokenizer, turns, {**variables, "date_string": day}) for day in days)
    except BadRow:
        return False  # its rows will say so
    return one != other


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return a content as parts of text."""
    if content is None or isinstance(content, str):
        return [] if content is None else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRow("holds a turn whose content is not text", CHAT, ColumnMissing)
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        key = TEXTS.get(str(part.get("type") or "text")) if isinstance(part, Mapping) else None
        if key is None or not isinstance(part.get(key), str):
            raise LeftOut(NOT_TEXT)
        others = {name: value for name, value in part.items() if name not in ("type", key) and value is not None}
        parts.append({"type": "text", "text": part[key], **others})
    return parts


def _turn(turn: Turn, reads_parts: bool) -> Turn:
    """Return a turn with the keys that vLLM hands on. `reads_parts`: the template reads contents as lists of parts."""
    role, parts = turn["role"], _parts(turn.get("content"))
    if role == "system":
        billed = [part for part in parts if part["text"].startswith(BILLING)]
        for part in billed:
            part["text"] = part["text"].partition("\n")[2]
        parts = [part for part in parts if part["text"] or part not in billed]
    joined = "\n".join(part["text"] for part in parts if reads_parts or part["text"])
    found: Turn = {"role": role, "content": parts if reads_parts and role != "tool" else joined}
    if role == "assistant":
        found |= {"tool_calls": turn["tool_calls"]} if turn.get("tool_calls") else {}
        reasoning = turn["reasoning"] if turn.get("reasoning") is not None else turn.get("reasoning_content")
        if reasoning is not None:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    names = {"tool": "tool_call_id", "developer": "tools"}
    found |= {name: turn[name] for name in ("name", names.get(role)) if name in turn and turn[name] is not None}
    return found


def _developer_as_system(turns: Sequence[Turn]) -> list[Turn]:
    """Return a chat for a template that knows no developer: what the developer says is the system's, whose turns are one."""
    if not any(turn["role"] == "developer" for turn in turns):
        return list(turns)
    said = [turn["content"] for turn in turns if turn["role"] in ("developer", "system")]
    content = said[0]
    if len(said) > 1:
        content = "\n\n".join(filter(None, map(text_of, said)))
        content = content if isinstance(said[0], str) else [{"type": "text", "text": content}]
    return [{"role": "system", "content": content}, *(turn for turn in turns if turn["role"] not in ("developer", "system"))]


@lru_cache(maxsize=32)
def needs_system_first(template: str) -> bool:
    """Return whether a chat template refuses a system turn after others: vLLM then joins Anthropic's into the first."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    turns = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        sandbox.from_string(template).render(messages=turns, add_generation_prompt=False)
    except Exception:  # templates raise jinja's errors and those of whatever they call
        return True
    return False


@lru_cache(maxsize=32)
def _reads_parts(template: str) -> bool:
    """Return whether a template goes through the parts of a content: it then gets parts, of a text as well."""
    from jinja2 import Environment, TemplateError, nodes

    try:
        plain = GENERATION.sub("", template)
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)  # noqa: S701 (not rendered)
    except (TemplateError, RecursionError):
        return False

    def is_content(node: Any) -> bool:
        while isinstance(node, nodes.Filter | nodes.Test):
            node = node.node
        named = isinstance(node, nodes.Getattr) and node.attr == "content"
        by_key = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return named or by_key or (isinstance(node, nodes.Name) and node.name == "content")

    return any(is_content(loop.iter) for loop in parsed.find_all(nodes.For))
