"""Requests of every API as prompts, with what stands beside messages; turns that are not read; tables as JSON has them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from alphaprof.errors import AlphaprofError, ColumnMissing, DataUnreadable
from alphaprof.run.manifest import left_out_remedy
from tests.loops import each
from tests.profiling.test_corpus import corpus, refusal, texts, tokenizer
from tests.tiny import TEMPLATE

# Shows all that a template can be given.
SHOWING = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}{{ reasoning_effort }}"
)


def prompts(path: Path, *rows: dict[str, Any], template: str = SHOWING, **source: Any) -> list[str]:
    """The prompts of rows; `messages` is their column unless it is named."""
    path.write_text("\n".join(map(json.dumps, rows)))
    words = tokenizer()
    words.chat_template = template
    return texts(corpus({"path": str(path), "messages": "messages"} | source, words=words))


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as a table with the columns of all of them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])


USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
SHOWN_TOOLS = f"[look {json.dumps(SCHEMA)}]"
GEMINI = {
    "systemInstruction": {"parts": [{"text": "Be "}, {"text": "terse."}]},
    "contents": [
        {"parts": [{"text": "h"}, {"text": "i"}]},
        {
            "role": "model",
            "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "look", "args": {"city": "x"}}}],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"result": "rain"}}}]},
        {"role": "model", "parts": [{"text": "Rain."}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"a": 1, "b": 2}}}, {"text": "More?"}]},
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}}
            ]
        }
    ],
}
SPAN = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be terse."}]),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "h"}, {"type": "text", "content": "i"}]},
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "hm"},
                    {"type": "tool_call", "id": "c", "name": "look", "arguments": {"city": "x"}},
                ],
                "finish_reason": "tool_call",
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "rain"}]},
        ]
    ),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "look", "parameters": SCHEMA}]),
}


def any_value(value: Any) -> dict[str, Any]:
    """A value of JSON as the OpenTelemetry protocol writes it."""
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": any_value(inner)} for key, inner in value.items()]}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(inner) for inner in value]}}
    return {"boolValue": value} if isinstance(value, bool) else {"stringValue": value}


HARMONY = [
    {"role": "system", "content": "Be terse."},
    USER,
    {"role": "assistant", "channel": "analysis", "content": [{"type": "text", "text": "hm"}]},
    {"role": "assistant", "channel": "commentary", "recipient": "functions.look", "content": '{"city": "x"}'},
    {"role": "tool", "name": "functions.look", "content": "rain"},
    {"role": "assistant", "channel": "analysis", "content": "so"},
    {"role": "assistant", "channel": "final", "content": "Rain."},
    {"role": "user", "content": "More?"},
]
CALLED = '(hm)[look {"city": "x"}]<tool>rain'
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {  # the column to name, a row, its prompt
    "a system text beside messages": (
        "messages",
        {"system": "Be terse.", "messages": [USER]},
        "<system>Be terse.<user>hi<model>",
    ),
    "a system text in the body": (
        "body",
        {"body": {"system": "Be terse.", "messages": [USER]}},
        "<system>Be terse.<user>hi<model>",
    ),
    "a system text that is there already": (
        "messages",
        {"system": "S", "messages": [{"role": "system", "content": "S"}, USER]},
        "<system>S<user>hi<model>",
    ),
    "JSON text": ("body", {"body": json.dumps({"messages": [USER], "tools": TOOLS})}, f"{SHOWN_TOOLS}<user>hi<model>"),
    "a system text that is JSON": (
        "messages",
        {"system": '{"a": 1}', "messages": [USER]},
        '<system>{"a": 1}<user>hi<model>',
    ),
    "tools beside messages": ("messages", {"tools": TOOLS, "messages": [USER]}, f"{SHOWN_TOOLS}<user>hi<model>"),
    "effort": ("messages", {"reasoning_effort": "low", "messages": [USER]}, "<user>hi<model>low"),
    "instructions beside a text": (
        "input",
        {"instructions": "Be terse.", "input": "hi"},
        "<system>Be terse.<user>hi<model>",
    ),
    "an answer begun": (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": "Well,"}], "continue_final_message": True},
        "<user>hi<assistant>Well,",
    ),
    "an answer begun by prefix": (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": "Well,", "prefix": True}]},
        "<user>hi<assistant>Well,",
    ),
    "an answer at the end": ("messages", {"messages": [USER, {"role": "assistant", "content": "a"}]}, "<user>hi<model>"),
    "contents": (
        "contents",
        GEMINI,
        f"{SHOWN_TOOLS}<system>Be terse.<user>hi<assistant>{CALLED}<assistant>Rain."
        '<tool>{"a": 1, "b": 2}<user>More?<model>',
    ),
    "contents as a text": ("contents", {"contents": "hi", "system_instruction": "S"}, "<system>S<user>hi<model>"),
    "a span": ("gen_ai.input.messages", SPAN, f"{SHOWN_TOOLS}<system>Be terse.<user>h\ni<assistant>{CALLED}<model>"),
    "a span in attributes": (
        "attributes.gen_ai.input.messages",
        {"attributes": SPAN},
        f"{SHOWN_TOOLS}<system>Be terse.<user>h\ni<assistant>{CALLED}<model>",
    ),
    "a span in attributes of the protocol": (
        "attributes.gen_ai.input.messages",
        {"attributes": [{"key": key, "value": {"stringValue": value}} for key, value in SPAN.items()]},
        f"{SHOWN_TOOLS}<system>Be terse.<user>h\ni<assistant>{CALLED}<model>",
    ),
    "a span whose attributes are values": (
        "attributes.gen_ai.input.messages",
        {"attributes": [{"key": key, "value": any_value(json.loads(value))} for key, value in SPAN.items()]},
        f"{SHOWN_TOOLS}<system>Be terse.<user>h\ni<assistant>{CALLED}<model>",
    ),
    "channels": (
        "messages",
        {"messages": HARMONY},
        f"<system>Be terse.<user>hi<assistant>{CALLED}<assistant>(so)Rain.<user>More?<model>",
    ),
    "names of speakers": (
        "turns",
        {"turns": [{"from": name, "value": name} for name in ("USER", "ASSISTANT", " bot", "human", "Bing", "prompter")]},
        "<user>USER<assistant>ASSISTANT<assistant> bot<user>human<assistant>Bing<user>prompter<model>",
    ),
}


@each("name", BODIES)
def test_a_request_is_read_as_its_server_reads_it(tmp_path: Path, name: str) -> None:
    column, row, prompt = BODIES[name]
    assert prompts(tmp_path / "rows.jsonl", row, messages=column) == [prompt]


UNREAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"role": "prompter", "text": "hi"}], "a turn of 'user' that has no content, but text"),
    "from and text": ([{"from": "human", "text": "hi"}], "a turn of 'user' that has no content, but text"),
    "message": ([{"role": "user", "message": "hi"}], "a turn of 'user' that has no content, but message"),
    "one of two": ([{"role": "system", "content": "S"}, {"role": "user", "text": "hi"}], "has no content, but text"),
    "function_call": (
        [USER, {"role": "assistant", "content": None, "function_call": {"name": "f"}}, USER],
        "a turn of 'assistant' that has no content, but function_call",
    ),
    "a speaker": ([{"from": "critic", "value": "hi"}], "a turn from 'critic'"),
    "a role": ([{"role": "critic", "content": "hi"}], "a turn of the role 'critic', which the chat template does not know"),
    "an item": (
        [USER, {"type": "web_search_call", "id": "w"}, {"type": "reasoning", "summary": []}],
        "an item of type 'web_",
    ),
    "encrypted": ([USER, {"type": "reasoning", "encrypted_content": "x"}], "holds reasoning that is encrypted"),
}


@each("name", UNREAD)
def test_a_turn_that_would_not_be_read_is_a_bad_row_that_names_the_key(tmp_path: Path, name: str) -> None:
    turns, words = UNREAD[name]
    with pytest.raises(AlphaprofError) as caught:
        prompts(tmp_path / "rows.jsonl", {"messages": turns})
    assert isinstance(caught.value, ColumnMissing | DataUnreadable)
    assert words in caught.value.message
    if name == "a role":
        found = prompts(tmp_path / "rows.jsonl", {"messages": turns}, template=SHOWING + "{# a 'critic' may speak #}")
        assert found == ["<critic>hi<model>"]


def test_text_beside_the_messages_that_no_server_reads_is_named_and_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER], "system_prompt": "Be terse.", "functions": [{"name": "f"}], "id": "x", "context": "hi"},
        {"messages": [USER], "system_prompt": None, "functions": [], "instructions": "Be terse."},
        {"messages": [{**USER, "thinking": "t"}, USER], "prompt_id": "p", "systemPrompt": "S"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(table_of(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        found = corpus({"path": str(tmp_path / name), "messages": "messages"})
        list(found)
        named = {reason.rpartition(", in ")[2]: count for reason, count in found.truncated.items()}
        keys = ("system_prompt", "functions", "instructions", "thinking of turns", "systemPrompt")
        assert named == dict.fromkeys(keys, 1), name
        assert "system" in left_out_remedy(next(iter(found.truncated)))
        used = corpus({"path": str(tmp_path / name), "messages": "messages", "system": "{system_prompt}"})
        assert texts(used) == ["<system>Be terse.<user>hi<model>", "<user>hi<model>", "<user>hi<user>hi<model>"]


def test_a_system_prompt_of_a_row_is_a_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "hi", "instructions": "Be terse."}))
    source = {"path": str(path), "prompt": "{input}", "chat": True, "system": "{instructions} {{x}}"}
    assert texts(corpus(source)) == ["<system>Be terse. {x}<user>hi<model>"]
    assert f"no row of {path} has a column 'instruction'" in refusal(corpus(source | {"system": "{instruction}"})).message


def test_a_request_to_responses_has_the_special_tokens_that_vllm_adds(tmp_path: Path) -> None:
    """And no other: a list of messages under `input` alone says nothing of an API."""
    from tokenizers import processors

    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 257)]
    )
    path = tmp_path / "rows.jsonl"
    for row, begins in (
        ({"model": "m", "input": [USER]}, True),
        ({"input": [USER]}, False),
        ({"input": json.dumps([USER])}, False),
    ):
        path.write_text(json.dumps(row))
        (document,) = corpus({"path": str(path), "messages": "input"}, words=words)
        assert (document.prompt[0] == 257) == begins, row


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,text\na,1,b\n")
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        error = refusal(corpus({"path": str(tmp_path / name)}))
        assert error.message == f"{tmp_path / name} has two columns named 'text'"
    (tmp_path / "a.csv").write_text("text,,\na,1,2\n")  # as Excel leaves columns behind
    assert texts(corpus({"path": str(tmp_path / "a.csv")})) == ["a"]


VALUES = st.sampled_from(["a", "b c", "", "\u00fc"]) | st.none()
ARGUMENTS = st.fixed_dictionaries({}, optional={"city": st.sampled_from(["x", "y"]), "day": st.integers(0, 9)})
FUNCTIONS = st.builds(
    lambda arguments: [{"type": "function", "function": {"name": "look", "arguments": arguments}}], ARGUMENTS
)
TURNS = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, VALUES),
    st.builds(lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, VALUES, FUNCTIONS),
    st.builds(lambda text, thought: {"role": "assistant", "content": text, "reasoning": thought}, VALUES, VALUES),
    st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "c"}, VALUES),
)
PROPERTIES = st.fixed_dictionaries(
    {}, optional={name: st.just({"type": kind}) for name, kind in (("city", "string"), ("day", "integer"))}
)
DECLARED = st.builds(
    lambda properties: [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}],
    PROPERTIES,
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"messages": st.lists(TURNS, min_size=1, max_size=3)},
        optional={"tools": DECLARED, "system": VALUES, "chat_template_kwargs": st.just({"reasoning_effort": "low"})},
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_the_same_rows_give_the_same_prompts_in_every_format(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """A table fills what a row lacks with null; maps are objects."""
    lines = "\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "rows.jsonl").write_bytes(lines)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    table = table_of(rows)
    try:
        pq.write_table(table, tmp_path / "rows.parquet")
    except pa.ArrowNotImplementedError:  # no row has an argument
        reject()
    for name, new in (("rows.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table)
    words = tokenizer()
    words.chat_template = SHOWING.replace("tojson", "tojson(sort_keys=true)")  # a table has keys in one order for all rows
    found = []
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.arrow", "stream.arrow"):
        try:
            found.append(texts(corpus({"path": str(tmp_path / name), "messages": "messages", "bad_rows": 1}, words=words)))
        except AlphaprofError as error:
            found.append([type(error).__name__])
    assert all(one == found[0] for one in found)


def test_maps_are_objects(tmp_path: Path) -> None:
    call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.int64()))]))])
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    calls = [{"function": {"name": "look", "arguments": [("b", 1), ("a", 2)]}}]
    turns = [[{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]]
    pq.write_table(pa.table({"messages": pa.array(turns, pa.list_(turn))}), tmp_path / "a.parquet")
    words = tokenizer()
    words.chat_template = SHOWING
    assert texts(corpus({"path": str(tmp_path / "a.parquet"), "messages": "messages"}, words=words)) == [
        '<assistant>[look {"b": 1, "a": 2}]<tool>x<model>'
    ]


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    saved = Dataset.from_list([{"text": "one"}, {"text": "two"}])
    saved.save_to_disk(tmp_path / "one")
    DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    assert texts(corpus({"path": str(tmp_path / "one")})) == ["one", "two"]
    error = refusal(corpus({"path": str(tmp_path / "splits")}))
    assert error.hint == f"give one of them, like {tmp_path / 'splits'}/train"


KEYS = ["role", "from", "content", "value", "parts", "text", "type", "name", "channel", "recipient"]
KEYS += ["tool_calls", "tool_call_id", "reasoning", "call_id"]
BESIDE = ["system", "instructions", "systemInstruction", "tools", "reasoning", "thinking", "documents"]
BESIDE += ["chat_template_kwargs"]
SPEAKERS = ["user", "assistant", "tool", "system", "developer", "Bot"]
ODD: list[Any] = [None, True, 3, 2.5, "x", "", [], ["x"], [["x"]], {"a": 1}, [{"type": ["x"], "text": 1}], "[1", "{}", {}]
ODD += [[{"text": "t"}], [{"functionCall": "x"}], [{"functionResponse": []}], [{"type": "tool_use", "input": 3}], [None]]
ODD += [{"parts": "x"}, [{"type": "tool_result", "content": [1]}]]
ODD += ["user", "assistant", "tool", "reasoning", "function_call", "analysis"]
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
READS_PARTS = "{% for m in messages %}{% generation %}" + PARTS + "{% endgeneration %}{% endfor %}"
READS_CALLS = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools[0].function.name }}"


@pytest.mark.parametrize(("seed", "template"), list(enumerate([SHOWING, TEMPLATE, READS_PARTS, READS_CALLS])))
def test_requests_of_any_shape_are_prompts_or_bad_rows(tmp_path: Path, seed: int, template: str) -> None:
    rng = random.Random(seed)  # noqa: S311
    words = tokenizer()
    words.chat_template = template
    for name in ("messages", "input", "contents", "gen_ai.input.messages"):
        rows = []
        for _ in range(80):
            turns: Any = [{key: rng.choice(ODD) for key in KEYS if rng.random() < 0.4} for _ in range(rng.randint(0, 3))]
            for turn in turns:
                turn |= {"role": rng.choice(SPEAKERS)} if rng.random() < 0.6 else {}
            turns = turns if rng.random() < 0.9 else rng.choice(ODD)
            rows.append({name: turns} | {key: rng.choice(ODD) for key in BESIDE if rng.random() < 0.3})
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(each if rng.random() < 0.7 else {name: each}) for each in rows))
        found = corpus({"path": str(path), "messages": name, "bad_rows": 1}, words=words)
        try:
            list(found)
        except AlphaprofError:
            continue
        assert found.read[0].rows == 80
