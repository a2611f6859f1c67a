"""Files as people have them: every format and encoding, one bad row among good ones, and only text in a prompt."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.config.paths import data_format
from alphaprof.errors import AlphaprofError, ColumnMissing, DataUnreadable
from alphaprof.profiling.texts.cells import BadRow
from alphaprof.profiling.texts.chat import render_chat, writes_the_date
from alphaprof.profiling.texts.rows import rows
from tests.loops import each
from tests.profiling.test_corpus import corpus, ids, profile, refusal, texts, tokenizer

LINES = b'{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n'
TABLE = b"text,n\none,1\ntwo,2\n"


def zstd(content: bytes) -> bytes:
    """The content as two frames, as appended logs are."""
    half = content.index(b"\n") + 1
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


def gzipped(content: bytes) -> bytes:
    """The content as two members."""
    half = content.index(b"\n") + 1
    return gzip.compress(content[:half]) + gzip.compress(content[half:])


FILES = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "A.JSONL": LINES,
    "a.jsonl.gz": gzipped(LINES),
    "a.JSONL.GZ": gzip.compress(LINES),
    "a.jsonl.zst": zstd(LINES),
    "a.csv.gz": gzip.compress(TABLE),
    "a.tsv": TABLE.replace(b",", b"\t"),
    "excel.csv": b"\xef\xbb\xbf" + TABLE.replace(b",", b";").replace(b"\n", b"\r\n"),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "lines.json": LINES,
    "array.json": b'[\n{"text": "one", "n": NaN},\n{"text": "two"}]',
    "array.json.gz": gzip.compress(b'[{"text": "one"}, {"text": "two"}]'),
    "apart.json": b'{\n"text": "one"\n}\n{\n"text": "two"\n}\n',
    "blank.jsonl": b"\n \n" + LINES + b"\n\n",
    "a::b.jsonl": LINES,
    "50% #1 [x].jsonl": LINES,
}


@each("name", FILES)
def test_files_as_people_have_them_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = list(corpus({"path": str(tmp_path / name)}))
    assert texts(found) == ["one", "two"]
    assert [document.source_row for document in found] == [0, 1]


def test_a_directory_of_logs_is_read_file_by_file_and_one_with_splits_by_datasets(tmp_path: Path) -> None:
    for name, content in (("2.jsonl.gz", gzip.compress(LINES)), ("1.jsonl", b'{"text": {"a": 1}}\n' + LINES), (".x", b"")):
        (tmp_path / name).write_bytes(content)
    found = corpus({"path": str(tmp_path), "bad_rows": 0.2})  # one of five rows is exactly what is allowed
    assert texts(found) == ["one", "two", "one", "two"]
    assert "1.jsonl line 1 text holds an object" in found.bad_rows()[0]
    (tmp_path / "latest.jsonl").write_bytes(LINES)  # no split, whatever its name ends with
    assert len(list(corpus({"path": str(tmp_path), "bad_rows": 0.5}))) == 6
    splits = tmp_path / "splits"
    splits.mkdir()
    for name in ("train", "test"):
        (splits / f"{name}.jsonl").write_bytes(json.dumps({"text": name}).encode())
    assert texts(corpus({"path": str(splits), "split": "test"})) == ["test"]


WRAPPED = {
    '{"version": 1, "data": [{"text": "a"}]}': """'.["data"][]'""",
    '{"a": {"text": "a"}, "b": {"text": "b"}}': "'.[]'",
}


@each("content", WRAPPED)
def test_an_object_around_the_rows_is_refused_with_what_takes_them_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    error = refusal(corpus({"path": str(tmp_path / "a.json")}))
    assert isinstance(error, DataUnreadable)
    assert "is one object, not a list of rows" in error.message
    assert f"jq -c {WRAPPED[content]} a.json" in error.hint
    (tmp_path / "a.json").write_text('{"text": ["a", "b"], "n": [1, 2]}')  # by column, as pandas writes it
    assert "text holds a list, not text" in refusal(corpus({"path": str(tmp_path / "a.json")})).message


def lines_of(*rows: Any) -> bytes:
    """A file of 30 good rows among which these are."""
    good = [json.dumps({"text": f"good {number}"}).encode() for number in range(30)]
    each = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return b"\n".join([*good[:3], *each, *good[3:]]) + b"\n"


BAD: dict[str, Any] = {
    "is not JSON": b'{"text": "torn',
    "is not a JSON object": ["a"],
    "has no column 'text'": {"other": "a"},
    "text holds a list, not text": {"text": ["a"]},
    "text holds an object, not text": {"text": {"a": 1}},
    "text holds true or false, not text": {"text": True},
    "holds text that is not valid UTF-8": b'{"text": "caf\xe9"}',
    "is nested too deeply": b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "text holds a number of more than 64 bits": {"text": 2**70},
}
HALF = b'{"text": "\\ud83d half of a pair"}'


@pytest.mark.parametrize("reason", BAD)
def test_one_bad_row_is_left_out_counted_and_named_with_its_line(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(BAD[reason]))
    found = corpus({"path": str(path)})
    assert len(list(found)) == 30
    assert found.skipped == {"with a row that cannot be used": 1}
    (said,) = found.bad_rows()
    assert said.startswith(f"1 of 31 rows of {path} cannot be used: line 4 {reason}")
    assert said.isprintable()


def test_what_a_template_says_of_a_row_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{% if messages[0].content[:4] != 'good' %}{{ raise_exception(messages[0].content) }}{% endif %}a"
    (tmp_path / "rows.jsonl").write_bytes(lines_of({"text": "\x1b[2J\u202e bad"}))
    found = corpus({"path": str(tmp_path / "rows.jsonl"), "chat": True}, words=words)
    assert len(list(found)) == 30
    (said,) = found.bad_rows()
    assert r"line 4 is refused by the chat template: \x1b[2J\u202e bad" in said


def test_a_shuffle_holds_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"text": "%d", "other": "x"}\n' % number for number in range(9)) + b"[]\n")
    source = profile({"path": str(path), "shuffle_seed": 0}).data[0]
    found = list(rows(source, ["text"]))
    assert sorted(number for number, _, _ in found) == list(range(10))
    assert all(isinstance(row, BadRow) if number == 9 else set(row) == {"text"} for number, _, row in found)
    assert {where for number, where, _ in found if number == 4} == {"line 5"}


def test_an_unused_column_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(
        lines_of(b'{"text": "a", "x": "\xff"}', b'{"text": "b", "x": NaN}', {"text": "c", "x": [1]})
    )
    assert len(list(corpus({"path": str(tmp_path / "rows.jsonl")}))) == 33


def test_more_than_a_tenth_of_bad_rows_ends_the_run_unless_more_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(HALF, {"text": []}, {"x": 1}, {"x": 2}))
    error = refusal(corpus({"path": str(path)}))
    assert isinstance(error, DataUnreadable)
    assert error.message.startswith(
        f"4 of 34 rows of {path} cannot be used: line 4 holds text that is not valid UTF-8; line 5"
    )
    assert "bad_rows" in error.hint
    assert len(list(corpus({"path": str(path), "bad_rows": 0.2}))) == 30
    path.write_bytes(b'{"x": 1}\n' * 5_000)
    error = refusal(corpus({"path": str(path), "bad_rows": 1}))  # no document: never allowed
    assert isinstance(error, ColumnMissing)
    assert error.message.startswith(f"1000 of 1,000 rows of {path}".replace("1000", "1,000"))
    assert "line 1, line 2, line 3 has no column 'text'" in error.message


def test_a_path_leads_into_lists_and_json_text(tmp_path: Path) -> None:
    rows = [
        {"a": {"choices": [{"message": {"content": "x"}}]}, "turns": ["y", "z"], "cell": json.dumps({"in": [{"p": "w"}]})},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    template = "{a.choices.0.message.content}{turns.0}{turns.1}{cell.in.0.p}"
    assert texts(corpus({"path": str(tmp_path / "rows.jsonl"), "prompt": template})) == ["xyzw"]
    for column in ("turns.2", "turns.x", "cell.in.p", "a.b"):
        error = refusal(corpus({"path": str(tmp_path / "rows.jsonl"), "prompt": f"{{{column}}}"}))
        assert f"has no column '{column}'" in error.message


CHATS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "from and value": [{"from": "human", "value": "a"}],
    "JSON text": json.dumps([{"role": "user", "content": "a"}]),
    "a request": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "parts": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "strings": [{"role": "user", "content": ["a"]}],
    "an answer at the end": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "two answers at the end": [{"from": "human", "value": "a"}, *[{"from": "gpt", "value": "b"}] * 2],
}


@each("shape", CHATS)
def test_chats_of_every_shape_are_one_prompt(tmp_path: Path, shape: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"chat": CHATS[shape]}))
    assert texts(corpus({"path": str(tmp_path / "rows.jsonl"), "messages": "chat"})) == ["<user>a<model>"]


def test_tools_are_those_of_the_row_and_rows_may_have_none(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{{ messages[0].content }}{% if tools %}|{{ tools[0].function.name }}{% endif %}{{ mood }}"
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = [
        {"chat": CHATS["messages"]} | more for more in ({"tools": tools}, {"tools": json.dumps(tools)}, {}, {"tools": None})
    ]
    rows[2]["more"] = {"mood": "!"}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = {"path": str(path), "messages": "chat", "tools": "tools", "chat_template_kwargs": "more"}
    assert texts(corpus(source, words=words)) == ["a|look", "a|look", "a!", "a"]
    error = refusal(corpus(source | {"tools": "tool"}, words=words))
    assert error.message == f"no row of {path} has a column 'tool'"
    assert len(list(corpus(source | {"tools": "tool", "limit": 2}, words=words))) == 2  # it may come later


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_the_last_answer_is_measured_without_its_end(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE + BEGIN
    rows = [CHATS["an answer at the end"], CHATS["messages"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"chat": row}) for row in rows))
    found = corpus(
        {"path": str(tmp_path / "rows.jsonl"), "messages": "chat"},
        words=words,
        continuation={"kind": "given", "answer": "last"},
    )
    (document,) = found
    assert document.given is not None
    assert document.given.tolist() == ids("b")
    assert found.skipped == {"whose chat does not end with an answer": 1}


def test_a_parquet_file_is_read_by_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    """Another column may be of any type and damaged in any way; bytes are text if they are UTF-8."""
    values = ["caf\u00e9".encode(), b"caf\xe9", *[b"x"] * 20]
    pq.write_table(
        pa.table({"text": pa.array(values, pa.binary()), "other": [[{"a": 1}]] * len(values)}), tmp_path / "a.parquet"
    )
    found = corpus({"path": str(tmp_path / "a.parquet")})
    assert texts(found)[0] == "caf\u00e9"
    assert "row 2 holds text that is not valid UTF-8" in found.bad_rows()[0]


def test_a_template_with_a_date_is_found_and_a_date_string_pins_it() -> None:
    words = tokenizer()
    assert not writes_the_date(words, {})
    words.chat_template = "{{ strftime_now('%d %b %Y') }}" + words.chat_template
    assert writes_the_date(words, {})
    assert not writes_the_date(words, {"date_string": "26 Jul 2024"})
    found = render_chat(words, CHATS["messages"], {"date_string": "26 Jul 2024"})
    assert found == "26 Jul 2024<user>a<model>"
    words.chat_template = "{{ raise_exception('no') }}{{ strftime_now('%d') }}"
    assert not writes_the_date(words, {})
    words.chat_template = "{{ date_string | default('26 Jul 2024') }}"  # the same every day
    assert not writes_the_date(words, {})


SENTINEL = "SENTINEL"
TEXTS: list[Callable[[random.Random], Any]] = [
    lambda r: f"words {r.random()}",
    lambda r: "\u00fc\u65e5\U0001f600\u2028\u0085",
    lambda r: ' a\nb\tc\r\n"quoted", and; more ',
    lambda r: '{"not": "an object',
    lambda r: "[1, 2] {braces} {{x}} \x00",
    lambda r: "x" * r.randint(1, 5_000),
    lambda r: r.randint(-(10**15), 10**15),
    lambda r: r.random(),
]
OTHERS: list[Callable[[random.Random], Any]] = [
    lambda r: [SENTINEL],
    lambda r: {"a": SENTINEL},
    lambda r: [{"role": SENTINEL}],
    lambda r: {"b": {"c": [[SENTINEL], 1]}},
    lambda r: None,
    lambda r: True,
]
SOURCES: list[dict[str, Any]] = [
    {"prompt": "{p}"},
    {"prompt": "<{p}|{other}>"},
    {"messages": "p"},
    {"prompt": "{p}", "cluster": "other"},
    {"prompt_ids": "p"},
]


@pytest.mark.parametrize("seed", range(9))
def test_of_generated_rows_only_text_comes_into_prompts_and_no_text_is_changed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    for form in ("jsonl", "json", "jsonl.gz") * 8:
        rows = [{name: rng.choice(rng.choice([TEXTS, TEXTS, OTHERS]))(rng) for name in ("p", "other")} for _ in range(10)]
        text = json.dumps(rows) if form == "json" else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        content, torn = text.encode(), rng.random() < 0.2
        if torn:
            place = rng.randrange(len(content))
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        path = tmp_path / f"rows.{form}"
        path.write_bytes(gzip.compress(content) if form.endswith("gz") else content)
        for source in SOURCES:
            found = corpus({"path": str(path), "bad_rows": 1} | source)
            try:
                documents = list(found)
            except AlphaprofError:
                continue
            prompts = texts(documents)
            assert not any(SENTINEL in prompt for prompt in prompts)
            if not torn:
                assert found.read[0].rows == 10
                if source == SOURCES[0]:
                    assert prompts == [str(rows[document.source_row]["p"]) for document in documents]


def test_formats_are_known_by_suffix_in_any_case() -> None:
    assert data_format("x/A.NDJSON.GZ") == ("jsonl", "gzip")
    assert data_format("a.parquet.gz") is None
    assert data_format("owner/name") is None
