"""Requests as their servers read them: bodies of APIs as the turns, tools and template variables of a chat.

OpenAI Responses and Anthropic Messages are converted as vLLM 0.32 converts them (`entrypoints/openai/responses/utils.py`,
`entrypoints/anthropic/serving.py`), recorded in tests/golden/chat; Gemini's contents, OpenTelemetry's GenAI messages and
Harmony's channels by the mapping in docs/data.md. Turns that stand in a row are read with what stands beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alphaprof.config.profile import SourceOptions
from alphaprof.errors import ColumnMissing, cut, shown
from alphaprof.profiling.texts.cells import BadRow, LeftOut, Row, cell_and_beside, cell_if_any, decoded, named, render

Turn = dict[str, Any]
LISTS = ("messages", "input", "contents", "gen_ai.input.messages")  # keys of bodies under which the turns stand
SYSTEM = {  # keys of what speaks before the turns, by what the turns are
    "chat": (),
    "anthropic": ("system",),
    "responses": ("instructions",),
    "harmony": (),
    "parts": ("systemInstruction", "system_instruction", "gen_ai.system_instructions"),
}
TOOLS = ("tools", "gen_ai.tool.definitions")
VARIABLES = ("chat_template_kwargs", "documents", "reasoning_effort", "reasoning", "thinking", "output_config")
FLAGS = ("continue_final_message", "add_generation_prompt")
OF_RESPONSES = ("model", "instructions", "max_output_tokens", "previous_response_id")  # beside `input`, of the Responses API
SPOKEN = tuple(key for keys in SYSTEM.values() for key in keys)
BESIDE = (*LISTS, *SPOKEN, *TOOLS, *VARIABLES, *FLAGS, *OF_RESPONSES)  # all that is read
TEXTUAL = re.compile(  # names of what a server may put into a prompt
    r"(\w+[._])?(system|instructions?|context|documents?|tools|functions|prefix|prefill|developer|persona|history|knowledge)"
    r"(_?(prompts?|messages?|texts?|content|instructions?|turns?))?",
    re.IGNORECASE,
)
ROLES = {
    **{role: role for role in ("system", "developer", "tool")},
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bing", "ai"), "assistant"),
    "observation": "tool",
}
SAID = ("content", "tool_calls", "reasoning", "reasoning_content")  # keys of a turn that are read
ABOUT = {"role", "name", "id", "tool_call_id", "type", "status", "model", "timestamp", "created_at", "metadata", "call_id"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEMS = ("reasoning", "function_call", "custom_tool_call", "item_reference", *OUTPUTS)  # of the Responses API
BLOCKS = ("tool_use", "tool_result", "redacted_thinking")  # of Anthropic's contents
PAYLOAD = {"type": "string", "description": "The freeform text payload for this tool."}  # as vLLM shows a custom tool
BILLING = "x-anthropic-billing-header"  # begins a line that changes with every request, which vLLM drops
OWN = ("tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template", "messages")
CHAT = "give a list of {role, content}, or of {from, value}, or a whole request"
NOT_TEXT = "with content that is not text"


@dataclass(frozen=True)
class Chat:
    """A chat up to the answer that ends it, and what else makes its prompt. `begun`: the last turn is an answer that the
    client has begun; `closed`: the client asks that no answer is begun; `special`: the tokenizer adds special tokens, as
    vLLM has it do for /v1/responses, also where the template wrote them; `unused`: keys whose text is not in the prompt.
    """

    turns: list[Turn]
    answer: list[Turn] = field(default_factory=list)
    tools: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    begun: bool = False
    closed: bool = False
    special: bool = False
    unused: tuple[str, ...] = ()


def roots_of(source: SourceOptions, answers: str | None = None) -> list[str]:
    """Return the columns that rows of a source are read for. `answers`: that of logged responses."""
    names = (*source.columns, answers or "", *(BESIDE if source.messages is not None else ()))
    return sorted({root for name in names for root in (name, name.partition(".")[0])})


def chat_of(source: SourceOptions, row: Row, system_first: bool = False) -> Chat:
    """Return the chat of a row, with the variables of the source and its own. `system_first`: see `chat_of_request`."""
    system = render(source.system, row, optional=True) if source.system is not None else ""
    first = [{"role": "system", "content": system}] if system.strip() else []
    if source.messages is None:
        return Chat([*first, {"role": "user", "content": render(str(source.prompt), row)}], variables=source.chat_options)
    value, beside = cell_and_beside(row, source.messages)
    name = source.messages.rpartition(".")[2] if source.messages.rpartition(".")[2] in beside else source.messages
    chat = named(source.messages, lambda value: chat_of_request(value, name, beside, system_first, not first), value)
    own = decoded(cell_if_any(row, source.chat_template_kwargs))
    if not isinstance(own, Mapping | None):
        raise BadRow(f"{source.chat_template_kwargs} holds no object", "write {name: value}", ColumnMissing)
    return replace(
        chat,
        turns=[*first, *chat.turns],
        tools=chat.tools if source.tools is None else cell_if_any(row, source.tools),
        variables={**source.chat_options, **set_variables({**chat.variables, **(own or {})})},
        unused=tuple(key for key in chat.unused if key not in {name.rpartition(".")[2] for name in source.columns}),
    )


def chat_of_request(
    value: Any, name: str, beside: Mapping[str, Any], system_first: bool = False, with_system: bool = True
) -> Chat:
    """Return the chat of a request's body, or of turns that stand under `name` with `beside`: in a body, or in a row.
    `system_first`: the chat template refuses system turns within a chat, so that vLLM joins Anthropic's into the first;
    `with_system`: whether what stands beside the turns may speak first.

    Raises `BadRow` for what holds no turns, or a turn that would not be read, and `LeftOut` for images and the like.
    """
    found = decoded(value)
    if isinstance(found, Mapping) and (inside := next((key for key in LISTS if key in found), None)):
        found, name, beside = decoded(found[inside]), inside, found
    if isinstance(found, str) and name in ("input", "contents"):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise BadRow("holds no chat messages", CHAT, ColumnMissing)
    found = [_spoken(item) for item in found]
    form = _form(found, name, beside)
    key = next((key for key in SYSTEM[form] if with_system and beside.get(key)), "")
    system, turns = _joined(beside.get(key)), [_readable(turn, form) for turn in CONVERTERS[form](found)]
    inside_turns = [turn for turn in turns if turn["role"] == "system"] if form == "anthropic" else []
    if inside_turns and system_first:
        system = "".join([system, *(_joined(turn.get("content")) for turn in inside_turns)])
        turns = [turn for turn in turns if turn["role"] != "system"]
    first = {"role": "system", "content": system}
    turns = [first, *turns] if system and turns[:1] != [first] else turns
    end, last = len(turns), found[-1] if found else {}
    asked = beside.get("continue_final_message") is True or last.get("prefix") is True
    begun = bool(end) and turns[-1]["role"] == "assistant" and (asked or last.get("status") in ("in_progress", "incomplete"))
    while end and not begun and turns[end - 1]["role"] == "assistant":
        end -= 1
    tools = next((beside[key] for key in TOOLS if _of_objects(beside.get(key))), None)
    known = {name, *([key] if system else []), *(TOOLS if tools else ())}
    return Chat(
        turns=[{key: value for key, value in turn.items() if key != "thinking"} for turn in turns[:end]],  # as vLLM does
        answer=turns[end:],
        tools=tools,
        variables=_variables(beside),
        begun=begun,
        closed=beside.get("add_generation_prompt") is False and end == len(turns),
        special=form == "responses",
        unused=tuple(dict.fromkeys(_unused(beside, known, turns[:end]))),
    )


def _form(turns: Sequence[Turn], name: str, beside: Mapping[str, Any]) -> str:
    """Return in which form turns are written: a key of CONVERTERS."""
    if name == "contents" or any("parts" in turn for turn in turns):
        return "parts"
    if any(turn.get("type") in ITEMS for turn in turns) or (
        name == "input" and any(beside.get(key) is not None for key in OF_RESPONSES)
    ):
        return "responses"
    contents = [turn.get("content") for turn in turns]
    blocks = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    if any(part.get("type") in BLOCKS or "signature" in part for part in blocks) or beside.get("system"):
        return "anthropic"
    return "harmony" if any(turn.get("channel") for turn in turns) else "chat"


def _spoken(turn: Mapping[str, Any]) -> Turn:
    """Return a turn with the name that its role has here. Raises `BadRow` for a speaker that is none."""
    found = dict(turn)
    if "role" not in found and isinstance(found.get("from"), str):
        found |= {"role": found.pop("from")} | ({"content": found.pop("value")} if "value" in found else {})
        if found["role"].strip().lower() not in ROLES:
            raise BadRow(f"holds a turn from {shown(found['role'])}", f"name who speaks: {', '.join(ROLES)}", ColumnMissing)
    role = found.get("role")
    return found | {"role": ROLES.get(role.strip().lower(), role)} if isinstance(role, str) else found


def _readable(turn: Turn, form: str) -> Turn:
    """Return the turn, with its calls as vLLM hands them on. Raises `BadRow` if nobody speaks, or says something under keys
    that are not read.
    """
    if not isinstance(turn.get("role"), str) or not turn["role"]:
        raise BadRow("holds no chat messages", CHAT, ColumnMissing)
    if all(turn.get(key) is None for key in SAID):
        unread = [key for key, value in turn.items() if key not in ABOUT and _says(value)]
        if unread:
            keys = cut(", ".join(unread), 80)
            raise BadRow(
                f"holds a turn of {shown(turn['role'])} that has no content, but {keys}",
                "write {role, content}, or {from, value}, or name the texts with prompt",
                ColumnMissing,
            )
    return turn | ({"tool_calls": _calls(turn["tool_calls"], form)} if turn.get("tool_calls") else {})


def _says(value: Any) -> bool:
    return bool(value) and isinstance(value, str | list | Mapping)


def _object(value: Any) -> Mapping[str, Any]:
    """Return a value that must be an object. Raises `BadRow`."""
    if not isinstance(value, Mapping):
        raise BadRow(f"holds a turn with {shown(value)} in place of an object", CHAT, ColumnMissing)
    return value


def _of_objects(value: Any) -> bool:
    """Return whether a value is a list of objects, or its JSON text."""
    found = decoded(value)
    return isinstance(found, list) and bool(found) and all(isinstance(each, Mapping) for each in found)


def _joined(value: Any) -> str:
    """Return the text of a content: a text, or parts or blocks of text, without those that vLLM drops."""
    found = decoded(value)
    parts = found.get("parts", [found]) if isinstance(found, Mapping) else found
    texts = []
    for part in parts if isinstance(parts, list) else ():
        part = part if isinstance(part, Mapping) else {"text": part}
        text = part.get("text", part.get("content"))
        texts += [text] if isinstance(text, str) and not text.startswith(BILLING) else []
    whole = value if isinstance(value, str) and not texts else "".join(texts)
    return "" if whole.startswith(BILLING) else whole


def _add(turns: list[Turn], key: str, value: Any) -> None:
    """Add to the assistant's turn that ends a chat, or begin one if that has such a thing already; calls are together."""
    last = turns[-1] if turns and turns[-1].get("role") == "assistant" else None
    if last is not None and last.get(key) is None:
        last[key] = value
    elif last is not None and key == "tool_calls":
        last[key] = _with(last, value)
    else:
        turns.append({"role": "assistant", key: value})


def _with(turn: Turn, calls: list[Any]) -> list[Any]:
    """Return the calls of a turn with some more."""
    before = decoded(turn.get("tool_calls"))
    return [*(before if isinstance(before, list) else []), *calls]


def _called(name: Any, arguments: Any, identity: Any = None) -> list[dict[str, Any]]:
    """Return one call of a tool, its arguments as an object."""
    arguments = decoded(arguments)
    arguments = arguments if isinstance(arguments, Mapping) else {}
    return [{"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}]


def _calls(calls: Any, form: str) -> list[dict[str, Any]]:
    """Return the calls of a turn, with keys in the order in which vLLM hands them on. Raises `BadRow`."""
    found, called = decoded(calls), []
    for call in found if isinstance(found, list) else [found]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRow("holds a tool call without a function", 'write {"function": {"name", "arguments"}}', ColumnMissing)
        (one,) = _called(function.get("name"), function.get("arguments"), call.get("id"))
        one["function"] = dict(sorted(one["function"].items(), reverse=form == "responses"))
        called.append(one)
    return called


def as_sent(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns as a request holds them: arguments of calls as JSON text."""
    sent = []
    for turn in turns:
        calls = [{**call, "function": {**call["function"]}} for call in turn.get("tool_calls") or ()]
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        sent.append({**turn, **({"tool_calls": calls} if calls else {})})
    return sent


def _from_responses(items: Sequence[Turn]) -> list[Turn]:
    """Return the turns of items of OpenAI's Responses API, as vLLM's construct_chat_messages_with_tool_call does."""
    turns: list[Turn] = []
    for item in items:
        kind, content = item.get("type"), item.get("content")
        if kind in ("function_call", "custom_tool_call"):
            name = f"{item['namespace']}__{item.get('name')}" if item.get("namespace") else item.get("name")
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input") or ""}
            _add(turns, "tool_calls", _called(name, arguments, item.get("call_id")))
        elif kind in OUTPUTS:
            turns.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "reasoning":
            if item.get("encrypted_content"):
                raise BadRow("holds reasoning that is encrypted", "log it as text, or leave it out as your server does")
            parts = content or item.get("summary")
            _add(turns, "reasoning", _joined(parts[:1]) if isinstance(parts, list) else "")
        elif "role" not in item:
            raise BadRow(
                f"holds an item of type {shown(kind)}",
                "leave it out if your server does: vLLM refuses such a request",
                ColumnMissing,
            )
        elif item["role"] == "assistant" and content:
            first = content[0] if isinstance(content, list) else content  # vLLM reads no further
            _add(turns, "content", first.get("text", first.get("refusal")) if isinstance(first, Mapping) else first)
        else:
            turns.append(item)
    return turns


def _from_anthropic(messages: Sequence[Turn]) -> list[Turn]:
    """Return the turns of Anthropic's messages, as vLLM's AnthropicServingMessages does."""
    turns: list[Turn] = []
    for message in messages:
        content, role, parts = message.get("content"), message.get("role"), list[Any]()
        if role == "system":
            text = _joined(content)
            turns += [message | {"content": text}] if text else []
            continue
        if not isinstance(content, list):
            turns.append(message)
            continue
        turn = {key: value for key, value in message.items() if key != "content"}
        for block in content:
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            elif kind == "thinking":
                turn["reasoning"] = f"{turn.get('reasoning') or ''}{block.get('thinking') or ''}"
            elif kind == "tool_use":
                turn["tool_calls"] = _with(turn, _called(block.get("name"), block.get("input"), block.get("id")))
            elif kind == "tool_result" and role == "user":
                result = block.get("content") or ""
                turns.append({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")})
            elif kind == "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            elif kind != "redacted_thinking":
                parts.append(block)
        alone = len(parts) == 1 and isinstance(parts[0], Mapping) and parts[0].get("type") == "text"
        turn |= {"content": parts[0]["text"] if alone else parts} if parts else {}
        turns += [turn] if parts or role != "user" else []
    return turns


def _from_parts(contents: Sequence[Turn]) -> list[Turn]:
    """Return the turns of Gemini's contents, and of OpenTelemetry's GenAI messages. Raises `LeftOut` for images and code."""
    turns: list[Turn] = []
    for content in contents:
        if not isinstance(content.get("parts"), list):
            turns.append(content)
            continue
        turn: Turn = {"role": content.get("role") or "user"}
        texts: list[str] = []
        for part in content["parts"]:
            part = part if isinstance(part, Mapping) else {"text": part}
            kind = part.get("type")
            call = part.get("functionCall") or part.get("function_call") or (part if kind == "tool_call" else None)
            result = part.get("functionResponse") or part.get("function_response")
            result = part if kind == "tool_call_response" else result
            text = part.get("content") if kind in ("text", "reasoning") else part.get("text")
            if call is not None:
                call = _object(call)
                calls = _called(call.get("name"), call.get("args", call.get("arguments")), call.get("id"))
                turn["tool_calls"] = _with(turn, calls)
            elif result is not None:
                result = _object(result)
                said = result.get("response", result.get("result"))
                said = next(iter(said.values())) if isinstance(said, Mapping) and len(said) == 1 else said
                said = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
                turns.append({"role": "tool", "content": said, "name": result.get("name"), "tool_call_id": result.get("id")})
            elif not isinstance(text, str):
                raise LeftOut(NOT_TEXT)
            elif part.get("thought") is True or kind == "reasoning":
                turn["reasoning"] = turn.get("reasoning", "") + text
            else:
                texts.append(text)
                spoken = [{"type": "text", "text": each} for each in texts]
                turn["content"] = "".join(texts) if kind is None else spoken  # Gemini's have no kind
        turns += [turn] if len(turn) > 1 else []
    return turns


def _from_harmony(messages: Sequence[Turn]) -> list[Turn]:
    """Return the turns of Harmony's messages: analysis is reasoning, and what has a recipient is a call."""
    turns: list[Turn] = []
    for message in messages:
        text, recipient = _joined(message.get("content")), str(message.get("recipient") or "")
        if message.get("role") != "assistant":
            name = str(message.get("name") or "").removeprefix("functions.")
            turns.append(message | ({"name": name} if name else {}))
        elif recipient:
            _add(turns, "tool_calls", _called(recipient.removeprefix("functions."), text))
        elif message.get("channel") == "analysis":
            turns.append({"role": "assistant", "reasoning": text})
        else:
            _add(turns, "content", text)
    return turns


CONVERTERS: dict[str, Callable[[Sequence[Turn]], list[Turn]]] = {
    "chat": list,
    "harmony": _from_harmony,
    "anthropic": _from_anthropic,
    "responses": _from_responses,
    "parts": _from_parts,
}


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return tools of any of the APIs with the keys that vLLM hands on; None if there are none. Raises `BadRow`."""
    tools = decoded(value)
    if not isinstance(tools, list):
        raise BadRow("holds no tools", 'give a list of {"type": "function", "function": {...}}', ColumnMissing)
    found = []
    for outer, function in ((tool, function) for tool in tools for function in _functions(tool)):
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow("holds a tool without a name", 'give {"function": {"name": ...}} for each tool', ColumnMissing)
        parameters = function.get("parameters", function.get("parametersJsonSchema"))
        if isinstance(schema := function.get("input_schema"), Mapping):
            parameters = {**schema, **({} if "type" in schema else {"type": "object"})}
        late = {"defer_loading": outer.get("defer_loading")} if "function" in outer else {}
        late = {name: value for name, value in late.items() if value is not None}
        more = late | {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
        told = {"name": function["name"], "description": function.get("description"), "parameters": parameters}
        found.append({"type": "function", "function": told | more, **late})
    return found or None


def _functions(tool: Any) -> list[Any]:
    """Return the functions of a tool; none of one that a server runs itself."""
    if not isinstance(tool, Mapping):
        return [tool]
    declared = tool.get("functionDeclarations", tool.get("function_declarations"))
    if isinstance(declared, list):
        return [_lower(each) for each in declared]
    kind, name = tool.get("type"), tool.get("name")
    if kind == "namespace":
        inner = [_object(each) for each in tool["tools"]] if isinstance(tool.get("tools"), list) else []
        return [{**each, "name": f"{name}__{each.get('name')}"} for each in inner]
    if kind == "custom" and isinstance(name, str):
        shape = {"type": "object", "properties": {"input": PAYLOAD}, "required": ["input"], "additionalProperties": False}
        return [{"name": name, "description": tool.get("description"), "parameters": shape}]
    builtin = isinstance(kind, str) and kind != "function" and "function" not in tool and "input_schema" not in tool
    return [] if builtin else [tool.get("function", tool)]


def _lower(schema: Any) -> Any:
    """Return Gemini's schema with types as JSON Schema writes them."""
    if isinstance(schema, list):
        return [_lower(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: each.lower() if key == "type" and isinstance(each, str) else _lower(each) for key, each in schema.items()}


def _variables(beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets, by its own names or those of its API."""
    groups = {name: decoded(beside.get(name)) for name in VARIABLES}
    objects = {name: group for name, group in groups.items() if isinstance(group, Mapping)}
    effort = objects.get("reasoning", {}).get("effort") or objects.get("output_config", {}).get("effort")
    effort = effort or beside.get("reasoning_effort")
    effort = "none" if objects.get("thinking", {}).get("type") == "disabled" else effort
    found = dict(objects.get("chat_template_kwargs", {}))
    found |= {"documents": groups["documents"]} if _of_objects(groups["documents"]) else {}
    return {"enable_thinking": effort != "none", **found, "reasoning_effort": effort} if isinstance(effort, str) else found


def _unused(beside: Mapping[str, Any], known: set[str], turns: Sequence[Turn]) -> Iterator[str]:
    """Yield the keys beside turns whose names say that a server may put their text into the prompt, which was not done; and
    those of turns.
    """
    used = known | ({"documents"} if _of_objects(beside.get("documents")) else set())
    said = [str(turn.get("content")) for turn in turns]
    for key, value in beside.items():
        told = isinstance(value, str) and any(value.strip() in text for text in said)
        if key not in used and TEXTUAL.fullmatch(key) and _says(value) and not told:
            yield key
    yield from (f"{key} of turns" for turn in turns for key in ("thinking", "function_call", "text") if turn.get(key))


def set_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template that are set, and that a request may set."""
    return {name: value for name, value in variables.items() if value not in (None, "auto") and name not in OWN}
