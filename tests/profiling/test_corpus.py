"""Datasets to prompts: the same documents from every format, nothing lost uncounted, and every bad row named."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from alphaprof.config.profile import ProfileOptions, SourceOptions
from alphaprof.errors import AlphaprofError, ColumnMissing, DataEmpty, DataUnreadable, ProfileInvalid
from alphaprof.log.manifest import left_out_remedy
from alphaprof.profiling.models import hub
from alphaprof.profiling.models.hub import expected_documents, read_whole, require_data
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.texts.continuations import Continuation, continuation_table, digest
from alphaprof.profiling.texts.continuations import given as as_given
from alphaprof.profiling.texts.corpus import Corpus, Document, InRandomOrder, render, render_chat
from alphaprof.profiling.texts.reading import rows
from alphaprof.profiling.texts.staged import documents_of, prompt_table
from tests.tiny import tokenizer

VOCABULARY = 260
USER, MODEL = 258, 259
WORDS = tokenizer()


def profile(*sources: dict[str, Any], **options: Any) -> ProfileOptions:
    """Options over sources; where one says nothing else, its prompt is the column `text`."""
    prompts = {"prompt", "messages", "prompt_ids"}
    data = [
        {"domain": f"domain{index}"} | ({} if prompts & set(source) else {"prompt": "{text}"}) | source
        for index, source in enumerate(sources)
    ]
    drafts = {"draft": {"kind": "layer_skip", "drop_layers": [1]}}
    return ProfileOptions.model_validate({"target": {"model": "target"}, "drafts": drafts, "data": data, **options})


def corpus(
    *sources: dict[str, Any],
    context: int | None = None,
    words: PreTrainedTokenizerFast = WORDS,
    served: dict[str, Any] | None = None,
    **options: Any,
) -> Corpus:
    """The documents of sources."""
    return Corpus(profile(*sources, **options), words, context, VOCABULARY, served or {})


def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """A file with one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def json_array(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    return str(path)


def comma_separated(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def parquet(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(f"{row['text']}\n" for row in rows), encoding="utf-8")
    return str(path)


WRITERS: dict[str, Callable[[Path, Iterable[dict[str, Any]]], str]] = {
    ".jsonl": jsonl,
    ".json": json_array,
    ".csv": comma_separated,
    ".parquet": parquet,
    ".txt": lines,
}
TYPED = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])  # formats with lists, numbers and nulls


def texts(found: Iterable[Document]) -> list[str]:
    """Prompts as text, special tokens included."""
    return [WORDS.decode(document.prompt) for document in found]


def plain(found: Iterable[Document]) -> list[dict[str, Any]]:
    """Documents as plain data that can be compared."""
    return [
        {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in dataclasses.asdict(item).items()
        }
        for item in found
    ]


def ids(text: str) -> list[int]:
    """Token ids of plain text."""
    return list(WORDS(text, add_special_tokens=False)["input_ids"])


def refusal(found: Corpus) -> AlphaprofError:
    """The failure that reading ends in."""
    with pytest.raises(AlphaprofError) as caught:
        list(found)
    return caught.value


def numbered(path: Path, count: int, label: str = "") -> str:
    """A .jsonl file with the texts `label0`, `label1`, ..."""
    return jsonl(path, ({"text": f"{label}{index}"} for index in range(count)))


ROWS = [{"text": "Hello", "kind": "a"}, {"text": "wörld {x} \u2028\U0001f600", "kind": "b"}, {"text": "007", "kind": "NA"}]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", ROWS)
    found = list(corpus({"path": path}))
    assert [document.prompt.tolist() for document in found] == [ids(row["text"]) for row in ROWS]
    assert [document.source_row for document in found] == [0, 1, 2]
    assert {document.prompt.dtype for document in found} == {np.dtype(np.int32)}


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != ".txt"])
def test_every_format_gives_the_same_values_for_other_columns(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", ROWS)
    source = {"path": path, "domain": {"column": "kind"}, "cluster": "kind"}
    found = list(corpus(source, continuation={"kind": "given", "column": "kind"}))
    assert [document.domain for document in found] == ["a", "b", "NA"]
    assert [document.cluster for document in found] == ["0:a", "0:b", "0:NA"]
    assert [WORDS.decode(document.given) for document in found] == ["a", "b", "NA"]


@pytest.mark.parametrize(
    "name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "{a}.jsonl", "a b.jsonl", ".a.jsonl", "a#1.jsonl", "a::b.jsonl"]
)
def test_a_file_is_read_alone_whatever_its_name_means_as_a_pattern(tmp_path: Path, name: str) -> None:
    for decoy in ("a1.jsonl", "ab.jsonl", "a.jsonl"):
        numbered(tmp_path / decoy, 3, "decoy")
    assert texts(corpus({"path": numbered(tmp_path / name, 2)})) == ["0", "1"]


def test_a_directory_is_a_dataset(tmp_path: Path) -> None:
    numbered(tmp_path / "part-0.jsonl", 2)
    assert texts(corpus({"path": str(tmp_path)})) == ["0", "1"]


@pytest.mark.parametrize("value", ["007", "1.10", "None", "null", "NA", "true", "2024-01-01", 'a\nb, "c"'])
def test_a_cell_of_a_csv_file_is_read_as_it_stands(tmp_path: Path, value: str) -> None:
    assert texts(corpus({"path": comma_separated(tmp_path / "rows.csv", [{"text": value}])})) == [value]


@pytest.mark.parametrize("value", ["2024-01-31", "2024-01-31T10:20:30"])
def test_dates_in_json_stay_as_they_are_written(tmp_path: Path, value: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": value}])
    (document,) = corpus({"path": path, "cluster": "text", "domain": {"column": "text"}})
    assert (texts([document]), document.domain, document.cluster) == ([value], value, f"0:{value}")


def test_sources_take_turns_until_they_are_exhausted_and_numbers_are_consecutive(tmp_path: Path) -> None:
    sources = [
        {"path": numbered(tmp_path / f"{label}.jsonl", count, label)} for label, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    found = list(corpus(*sources))
    assert texts(found) == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert [document.document for document in found] == [0, 1, 2, 3, 4, 5]
    assert [document.source for document in found] == [0, 1, 2, 0, 2, 0]
    assert [document.source_row for document in found] == [0, 0, 0, 1, 1, 2]
    assert [document.domain for document in found] == ["domain0", "domain1", "domain2", "domain0", "domain2", "domain0"]


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, ["0"]), (3, ["0", "1", "2"]), (4, ["0", "1", "2", "3"]), (9, ["0", "1", "2", "3"])]
)
def test_a_limit_counts_documents(tmp_path: Path, limit: int, expected: list[str]) -> None:
    assert texts(corpus({"path": numbered(tmp_path / "rows.jsonl", 4), "limit": limit})) == expected


def test_a_limit_counts_documents_of_each_domain_of_a_column(tmp_path: Path) -> None:
    """A file that is sorted by team has all teams, and those that are short of documents keep all of theirs."""
    teams = ["a"] * 5 + ["b"] * 5 + ["c"] * 2
    path = jsonl(tmp_path / "rows.jsonl", ({"text": str(row), "team": team} for row, team in enumerate(teams)))
    found = list(corpus({"path": path, "domain": {"column": "team"}, "limit": 3}))
    assert [document.source_row for document in found] == [0, 1, 2, 5, 6, 7, 10, 11]
    assert [document.domain for document in found] == ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    assert expected_documents(profile({"path": path, "domain": {"column": "team"}, "limit": 3})) is None


def test_a_stream_is_not_read_for_ever_for_a_domain_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of 10,000 rows in a row brought a document: that is said. One within them is taken."""
    read = 0

    def endless(_: SourceOptions) -> Iterator[tuple[int, dict[str, str]]]:
        nonlocal read
        for read in range(50_000):
            yield read, {"text": "x", "team": "b" if read == 9_000 else "a"}

    monkeypatch.setattr("alphaprof.profiling.texts.corpus.rows", endless)
    found = corpus({"path": "hub/data", "domain": {"column": "team"}, "limit": 2})
    assert [document.source_row for document in found] == [0, 1, 9_000]
    assert read == 9_000 + 10_001
    (reason,) = found.truncated
    assert "10,000 rows" in reason
    assert left_out_remedy(reason).startswith("set shuffle_seed")


BLANK = [{"text": ""}, {"text": " \n\t"}, {"text": "a"}]
BLANK_CHAT: list[dict[str, Any]] = [{"turns": [{"role": "user", "content": content}]} for content in ("", " \n", "a", None)]


@pytest.mark.parametrize("source", [{}, {"prompt": "{text}\n"}, {"chat": True, "prompt": "{text}"}])
def test_prompts_that_say_nothing_are_left_out_and_counted(tmp_path: Path, source: dict[str, Any]) -> None:
    """Whatever a chat template or a BOS would put around them."""
    found = corpus({"path": jsonl(tmp_path / "rows.jsonl", BLANK)} | source)
    assert [document.source_row for document in found] == [2]
    assert found.skipped == {"with an empty prompt or response": 2}


def test_chats_whose_last_turn_says_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*BLANK_CHAT, {"turns": []}])
    found = corpus({"path": path, "messages": "turns"})
    assert [document.source_row for document in found] == [2]
    assert found.skipped == {"with an empty prompt or response": 4}


def test_a_row_without_a_domain_is_left_out_with_the_column_to_fill(tmp_path: Path) -> None:
    rows = [{"text": "a", "team": team} for team in ("x", None, " ")]
    found = corpus({"path": jsonl(tmp_path / "rows.jsonl", rows), "domain": {"column": "team"}})
    assert len(list(found)) == 1
    assert found.skipped == {"with nothing in the column team": 2}
    empty = corpus({"path": jsonl(tmp_path / "none.jsonl", rows[2:]), "domain": {"column": "team"}})
    with pytest.raises(DataEmpty) as error:
        list(empty)
    assert error.value.hint == left_out_remedy("with nothing in the column team") == "fill this column, or drop these rows"


def test_rows_that_are_left_out_do_not_count_towards_the_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("", "a", "", "b", "c")])
    found = corpus({"path": path, "limit": 2})
    assert [(document.source_row, document.document) for document in found] == [(1, 0), (3, 1)]
    assert found.skipped == {"with an empty prompt or response": 2}


SHORT = "with a prompt shorter than min_prompt_tokens (3)"


def test_short_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    """A prompt of just as many tokens is long enough; others do not count towards the limit."""
    rows = [{"text": text} for text in ("a", "abc", "ab", "abcd", "", "abcde", "abcdef")]
    found = corpus({"path": jsonl(tmp_path / "rows.jsonl", rows), "min_prompt_tokens": 3, "limit": 3})
    documents = list(found)
    assert [(document.document, document.source_row, len(document.prompt)) for document in documents] == [
        (0, 1, 3),
        (1, 3, 4),
        (2, 5, 5),
    ]
    assert found.skipped == {SHORT: 2, "with an empty prompt or response": 1}
    assert list(map(len, (document.prompt for document in found))) == [3, 4, 5]
    assert found.skipped == {SHORT: 2, "with an empty prompt or response": 1}


def test_each_source_has_its_own_least_length(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a" * size} for size in (1, 2, 3, 4)])
    found = corpus({"path": path}, {"path": path, "min_prompt_tokens": 3})
    assert [len(document.prompt) for document in found if document.source == 0] == [1, 2, 3, 4]
    assert [len(document.prompt) for document in found if document.source == 1] == [3, 4]
    assert found.skipped == {SHORT: 2}


def test_the_chat_template_counts_towards_the_length_of_a_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    (document,) = corpus({"path": path, "chat": True})
    size = len(document.prompt)
    assert size > 1
    assert len(list(corpus({"path": path, "chat": True, "min_prompt_tokens": size}))) == 1
    with pytest.raises(DataEmpty):
        list(corpus({"path": path, "chat": True, "min_prompt_tokens": size + 1}))


def test_the_response_and_the_measured_text_do_not_count_towards_the_length_of_a_prompt(tmp_path: Path) -> None:
    """Nor does what is cut from the beginning of a prompt make it short."""
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "ab", "answer": "c" * 9}, {"text": "a" * 8, "answer": "c"}])
    found = corpus({"path": path, "min_prompt_tokens": 3, "continuation": {"kind": "given", "column": "answer"}})
    assert [document.source_row for document in found] == [1]
    plain_text = {"kind": "text", "prompt_tokens": 2}
    with pytest.raises(DataEmpty, match=r"shorter than min_prompt_tokens \(3\)"):
        list(corpus({"path": path, "min_prompt_tokens": 3, "continuation": plain_text}))
    greedy = {"kind": "greedy", "max_new_tokens": 4}
    cut = corpus({"path": path, "min_prompt_tokens": 3, "too_long": "truncate", "continuation": greedy}, context=6)
    assert [len(document.prompt) for document in cut] == [2]
    assert cut.skipped == {SHORT: 1}


def test_a_source_of_short_prompts_alone_says_so(tmp_path: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", 4)
    with pytest.raises(DataEmpty) as caught:
        list(corpus({"path": path, "min_prompt_tokens": 64}))
    assert "4 with a prompt shorter than min_prompt_tokens (64)" in str(caught.value)


def test_a_shuffle_is_repeatable_and_comes_before_the_limit(tmp_path: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", 50)
    plainly, first, again, other = (
        texts(corpus({"path": path, "limit": 20} | shuffle))
        for shuffle in ({}, {"shuffle_seed": 1}, {"shuffle_seed": 1}, {"shuffle_seed": 2})
    )
    assert first == again
    assert len({tuple(order) for order in (plainly, first, other)}) == 3
    assert set(first) - set(plainly)
    assert len(set(first)) == 20


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_shuffled_row_keeps_its_number_in_the_file(tmp_path: Path, suffix: str, limit: int | None) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"text": str(index)} for index in range(50)])
    found = list(corpus({"path": path, "shuffle_seed": 0, "shuffle_buffer": 7, "limit": limit}))
    numbers = [document.source_row for document in found]
    assert texts(found) == [str(number) for number in numbers]
    assert numbers != sorted(numbers)
    assert len(set(numbers)) == (limit or 50)


def test_a_shuffle_mixes_files_and_tells_them_apart(tmp_path: Path) -> None:
    for number in range(12):
        numbered(tmp_path / f"part-{number:02}.jsonl", 4, f"{number}/")
    found = list(corpus({"path": str(tmp_path), "shuffle_seed": 0, "shuffle_buffer": 3}))
    rows_of_files = [divmod(document.source_row, 2**32) for document in found]
    assert texts(found) == [f"{file}/{row}" for file, row in rows_of_files]
    assert len(set(rows_of_files)) == 48
    assert len({file for file, _ in rows_of_files[:12]}) > 4
    assert {file for file, _ in rows_of_files[:10]} - set(range(10))


def test_a_row_that_is_wrong_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2] if number != 3 else [-1]} for number in range(9)]
    source = {"path": jsonl(tmp_path / "rows.jsonl", rows), "prompt_ids": "ids", "shuffle_seed": 1}
    assert "rows.jsonl row 3: ids holds no token ids" in refusal(corpus(source)).message


def test_a_template_is_rendered_as_transformers_does(tmp_path: Path) -> None:
    """Without what is null in a turn: older versions of transformers hand that to the template, newer ones drop it."""
    turns = [{"role": "user", "content": "caf\u00e9 \U0001f600"}, {"role": "tool", "content": "x" * 100_000}]
    words = tokenizer()
    words.chat_template = "{{ eos_token }}{{ mood }}{{ tools | length }}" + words.chat_template + "{{ messages | tojson }}"
    options = {"mood": "calm", "tools": [{"type": "function"}]}
    found = render_chat(words, [turns[0] | {"name": None}, turns[1]], options, "here")
    assert found == words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)


def test_iterating_twice_gives_the_same_documents_and_counters(tmp_path: Path) -> None:
    rows = [{"text": text, "answer": answer} for text, answer in (("a" * 9, "b"), ("a", "bcd"), ("", "b"), ("a" * 30, "b"))]
    given_text = {"kind": "given", "column": "answer", "max_new_tokens": 2}
    path = jsonl(tmp_path / "rows.jsonl", rows)
    sources = [{"path": path, "too_long": "truncate", "continuation": given_text}, {"path": path, "shuffle_seed": 3}]
    found = corpus(*sources, context=12, continuation={"kind": "greedy", "max_new_tokens": 4})
    first = plain(found)
    counters = dict(found.skipped), dict(found.truncated)
    next(iter(found))  # abandoned, as the run does before it begins
    assert plain(found) == first
    assert (dict(found.skipped), dict(found.truncated)) == counters
    assert all(sum(counter.values()) for counter in counters)


@pytest.mark.parametrize(("value", "domain"), [("legal", "legal"), (3, "3"), (True, "True"), (1.5, "1.5")])
def test_the_domain_may_stand_in_a_column(tmp_path: Path, value: Any, domain: str) -> None:
    (document,) = corpus(
        {"path": jsonl(tmp_path / "rows.jsonl", [{"text": "a", "topic": value}]), "domain": {"column": "topic"}}
    )
    assert document.domain == domain


def test_clusters_are_told_apart_by_source(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "session": 7}, {"text": "b", "session": 7}])
    found = corpus({"path": path, "cluster": "session"}, {"path": path, "cluster": "session"}, {"path": path})
    assert [document.cluster for document in found] == ["0:7", "1:7", None, "0:7", "1:7", None]


HOSTILE = ["{0.__class__}", "{text}", "{", "}}", "%s", "{{text}}", "${x}", "{text.__init__.__globals__}"]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_with_braces_means_nothing_to_the_template(tmp_path: Path, value: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": value, "b": "B"}])
    assert texts(corpus({"path": path, "prompt": "{{{b}}} {text}{text}."})) == [f"{{B}} {value}{value}."]


@given(st.text(), st.text())
def test_a_template_inserts_values_and_literals_unchanged(literal: str, value: str) -> None:
    escaped = literal.replace("{", "{{").replace("}", "}}")
    assert render(f"{escaped}{{a}}{escaped}", {"a": value}, "row 0") == f"{literal}{value}{literal}"


@pytest.mark.parametrize("field", ["text.__class__", "text[0]", "0"])
def test_a_template_reaches_columns_and_nothing_inside_them(tmp_path: Path, field: str) -> None:
    error = refusal(corpus({"path": numbered(tmp_path / "rows.jsonl", 1), "prompt": f"{{{field}}}"}))
    assert isinstance(error, ColumnMissing)
    assert f"no column {field!r}" in error.message


def test_a_prompt_passes_through_the_chat_template_as_one_user_turn(tmp_path: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", 1, "Hello")
    (document,) = corpus({"path": path, "chat": True})
    assert document.prompt.tolist() == [USER, *ids("Hello0"), MODEL]
    assert texts(corpus({"path": path, "chat": True, "system": "Be {brief}"})) == ["<system>Be {brief}<user>Hello0<model>"]


@TYPED
def test_messages_pass_through_the_chat_template(tmp_path: Path, suffix: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}, {"role": "user", "content": "c"}]
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"turns": turns}, {"turns": turns[:1]}])
    first, second = corpus({"path": path, "messages": "turns"})
    assert first.prompt.tolist() == [USER, *ids("a"), MODEL, *ids("b"), USER, *ids("c"), MODEL]
    assert second.prompt.tolist() == [USER, *ids("a"), MODEL]


def test_a_chat_template_sees_its_options_and_only_the_keys_that_a_message_has(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = (
        "{{ mood }} {{ add_generation_prompt }}{% for turn in messages %}<{{ turn.keys() | sort | join(' ') }}>{% endfor %}"
    )
    turns = [{"role": "user", "content": None}, {"role": "user", "content": "a", "name": "b"}]
    path = parquet(tmp_path / "rows.parquet", [{"turns": turns}])
    found = corpus({"path": path, "messages": "turns", "chat_options": {"mood": "calm"}}, words=words)
    assert texts(found) == ["calm True<role><content name role>"]


def test_bos_comes_before_a_plain_prompt_and_not_before_a_chat_or_a_response(tmp_path: Path) -> None:
    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 257)]
    )
    path = numbered(tmp_path / "rows.jsonl", 1, "a")
    response = {"kind": "given", "column": "text"}
    raw, chat = corpus({"path": path}, {"path": path, "chat": True}, words=words, continuation=response)
    assert raw.prompt.tolist() == [257, *ids("a0")]
    assert chat.prompt.tolist() == [USER, *ids("a0"), MODEL]
    assert raw.given is not None
    assert raw.given.tolist() == ids("a0")


def test_a_target_without_a_chat_template_cannot_take_chats(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = None
    error = refusal(corpus({"path": numbered(tmp_path / "rows.jsonl", 1), "chat": True}, words=words))
    assert isinstance(error, ProfileInvalid)
    assert "no chat template" in error.message


def test_what_a_chat_template_refuses_is_told_with_its_row(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    error = refusal(corpus({"path": numbered(tmp_path / "rows.jsonl", 1), "chat": True}, words=words))
    assert isinstance(error, DataUnreadable)
    assert "row 0: the chat template refuses it: roles must alternate" in error.message


# Ids that no text gives: a special token, then bytes that are no UTF-8.
RAW_IDS = [256, 200, 7, 258, 199]


@TYPED
def test_given_token_ids_are_never_tokenised_again(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"prompt": RAW_IDS, "answer": RAW_IDS[::-1]}])
    source = {"path": path, "prompt_ids": "prompt", "continuation": {"kind": "given", "column": "answer"}}
    (document,) = corpus(source)
    assert document.prompt.tolist() == RAW_IDS
    assert document.given is not None
    assert document.given.tolist() == RAW_IDS[::-1]
    assert document.given.dtype == document.prompt.dtype == np.int32


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int16()), pa.list_(pa.uint64()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 5)]
)
def test_token_ids_may_have_any_integer_type(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"ids": pa.array([RAW_IDS], kind)}), tmp_path / "rows.parquet")
    (document,) = corpus({"path": str(tmp_path / "rows.parquet"), "prompt_ids": "ids"})
    assert document.prompt.tolist() == RAW_IDS


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_given_response_is_on_policy_only_if_the_profile_says_so(tmp_path: Path, on_policy: bool) -> None:
    continuation = {"kind": "given", "column": "text", "on_policy": on_policy}
    (document,) = corpus({"path": numbered(tmp_path / "rows.jsonl", 1)}, continuation=continuation)
    assert (document.kind, document.on_policy, document.cut, document.max_new_tokens) == ("given", on_policy, False, None)


def test_a_document_that_the_target_continues_has_a_limit_and_no_response(tmp_path: Path) -> None:
    (document,) = corpus(
        {"path": numbered(tmp_path / "rows.jsonl", 1)}, continuation={"kind": "greedy", "max_new_tokens": 9}
    )
    assert (document.kind, document.on_policy, document.max_new_tokens, document.given) == ("greedy", True, 9, None)


def test_a_response_is_cut_to_max_new_tokens_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "answer": answer} for answer in ("12", "123", "1234")])
    found = corpus({"path": path}, continuation={"kind": "given", "column": "answer", "max_new_tokens": 3})
    documents = list(found)
    assert [document["given"] for document in plain(documents)] == [ids("12"), ids("123"), ids("123")]
    assert [document.cut for document in documents] == [False, False, True]
    assert found.truncated == {"texts cut to max_new_tokens": 1}


# A context of 12 leaves 8 tokens to a prompt of which 4 are to be generated, or whose response has 4.
LONG = [{"text": text, "answer": "1234"} for text in ("1234567", "12345678", "123456789", "1234567890abc")]
CONTINUATIONS = [{"kind": "greedy", "max_new_tokens": 4}, {"kind": "given", "column": "answer"}]


@pytest.mark.parametrize("continuation", CONTINUATIONS, ids=["greedy", "given"])
@pytest.mark.parametrize(
    ("too_long", "kept"), [("skip", ["1234567", "12345678"]), ("truncate", ["1234567", "12345678", "23456789", "67890abc"])]
)
def test_prompts_beyond_the_context_are_left_out_or_lose_their_beginning(
    tmp_path: Path, continuation: dict[str, Any], too_long: str, kept: list[str]
) -> None:
    found = corpus(
        {"path": jsonl(tmp_path / "rows.jsonl", LONG), "too_long": too_long}, context=12, continuation=continuation
    )
    assert texts(found) == kept
    assert found.skipped == ({"longer than the target's context of 12 tokens": 2} if too_long == "skip" else {})
    assert found.truncated == ({} if too_long == "skip" else {"prompts cut to the target's context": 2})


def test_a_target_without_a_limit_takes_every_prompt(tmp_path: Path) -> None:
    found = corpus({"path": jsonl(tmp_path / "rows.jsonl", LONG)}, context=None)
    assert texts(found) == [row["text"] for row in LONG]


@pytest.mark.parametrize(("response", "kept"), [("1" * 11, 1), ("1" * 12, 0)])
def test_truncation_leaves_at_least_one_token_of_the_prompt(tmp_path: Path, response: str, kept: int) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "abc", "answer": response}, {"text": "abc", "answer": "1"}])
    found = corpus({"path": path, "too_long": "truncate"}, context=12, continuation={"kind": "given", "column": "answer"})
    assert texts(found) == ["c"] * kept + ["abc"]
    assert sum(found.skipped.values()) == 1 - kept


def test_a_document_that_is_left_out_does_not_count_as_truncated(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a" * 20, "answer": "1234"}, {"text": "a", "answer": "12"}])
    found = corpus({"path": path}, context=12, continuation={"kind": "given", "column": "answer", "max_new_tokens": 3})
    assert len(list(found)) == 1
    assert found.skipped == {"longer than the target's context of 12 tokens": 1}
    assert found.truncated == {}


COLUMNS: list[dict[str, Any]] = [
    {"prompt": "{txt}"},
    {"prompt_ids": "txt"},
    {"messages": "txt"},
    {"domain": {"column": "txt"}},
    {"cluster": "txt"},
    {"time": "txt"},
    {"continuation": {"kind": "given", "column": "txt"}},
]


@TYPED
@pytest.mark.parametrize("source", COLUMNS, ids=str)
def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path, suffix: str, source: dict[str, Any]) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"text": "a", "n": 1}])
    error = refusal(corpus({"path": path} | source))
    assert isinstance(error, ColumnMissing)
    assert (error.message, error.hint) == (f"{path} row 0 has no column 'txt'", "did you mean text?")


def test_a_missing_column_like_no_other_is_answered_with_what_there_is(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "n": 1}])
    assert refusal(corpus({"path": path, "prompt": "{question}"})).hint == "it has: text, n"


@TYPED
def test_a_row_with_an_empty_cell_is_left_out_and_counted(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"text": "a"}, {"text": None}])
    found = corpus({"path": path})
    assert [document.source_row for document in found] == [0]
    assert found.skipped == {"with nothing in the column text": 1}


def test_an_empty_cell_of_a_csv_file_is_nothing_rather_than_a_word(tmp_path: Path) -> None:
    path = comma_separated(tmp_path / "rows.csv", [{"text": "a", "n": ""}, {"text": None, "n": "nan"}])
    found = [row for _, row in rows(profile({"path": path}).data[0])]
    assert found == [{"text": "a", "n": None}, {"text": None, "n": "nan"}]


def test_a_row_without_a_column_that_others_have_is_an_empty_cell(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"other": "b"}])
    found = corpus({"path": path})
    assert len(list(found)) == 1
    assert found.skipped == {"with nothing in the column text": 1}


TEN = datetime.datetime(2024, 11, 23, 10, tzinfo=datetime.UTC)
MIDNIGHT = datetime.datetime(2024, 11, 23, tzinfo=datetime.UTC)
HALF = TEN + datetime.timedelta(seconds=0.5)
TIMES: list[tuple[object, datetime.datetime]] = [
    ("2024-11-23T10:00:00Z", TEN),
    ("2024-11-23T10:00:00", TEN),  # no zone: UTC
    ("2024-11-23 10:00:00.500000", HALF),
    ("2024-11-23T12:00:00+02:00", TEN),
    ("2024-11-22T22:00-12:00", TEN),
    ("20241123T100000Z", TEN),
    (" 2024-11-23T10:00:00Z ", TEN),
    ("2024-11-23", MIDNIGHT),
    ("20241123", MIDNIGHT),  # a date, and no second of 1970
    (int(TEN.timestamp()), TEN),
    (TEN.timestamp() + 0.5, HALF),
    (str(int(TEN.timestamp())), TEN),
    (f"{TEN.timestamp() + 0.5}", HALF),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize(("value", "expected"), TIMES, ids=str)
def test_a_column_says_when(tmp_path: Path, suffix: str, value: object, expected: datetime.datetime) -> None:
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", [{"text": "a", "asked": value}])
    (document,) = corpus({"path": path, "time": "asked"})
    assert (document.time, document.time and document.time.tzinfo) == (expected, datetime.UTC)


ARROW_TIMES = [
    pa.array([TEN], pa.timestamp("s", tz="UTC")),
    pa.array([TEN], pa.timestamp("us", tz="Europe/Berlin")),
    pa.array([TEN.replace(tzinfo=None)], pa.timestamp("ms")),
    pa.array([int(TEN.timestamp() * 1e9) + 1], pa.int64()).cast(pa.timestamp("ns", tz="UTC")),  # a nanosecond is dropped
    pa.array([MIDNIGHT.date()], pa.date32()),
]


@pytest.mark.parametrize("values", ARROW_TIMES, ids=lambda values: str(values.type))
def test_typed_columns_say_when_and_rows_hold_it(tmp_path: Path, values: pa.Array) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"], "asked": values}), path)
    (document,) = corpus({"path": str(path), "time": "asked"})
    expected = MIDNIGHT if pa.types.is_date(values.type) else TEN
    assert document.time == expected
    staged = prompt_table([document])
    assert plain(documents_of(staged)) == plain([document])
    text = Continuation(document, np.array([3, 256], dtype=np.int32), "eos")
    assert continuation_table([text])["time"].to_pylist() == [expected]


def test_sources_without_a_column_that_says_when_have_no_times(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "asked": "2024-11-23"}])
    found = list(corpus({"path": path}, {"path": path, "time": "asked"}))
    assert [document.time for document in found] == [None, MIDNIGHT]
    assert prompt_table(found)["time"].to_pylist() == [None, MIDNIGHT]


MILLISECONDS = int(TEN.timestamp() * 1000)
NO_TIMES: list[object] = [
    *("", "yesterday", "2026-13-01", "23.11.2026", "10:00:00", "\x1b[2J", "9" * 400, "-1", "1e9", "12", str(MILLISECONDS)),
    "2034112310",  # the tenth hour of a day, and no second
    *("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00", "0001-01-01T00:00:00", "1970-01-01"),
    *(None, True, -5, 0, 12, MILLISECONDS, 2034112310, 1e300, [TEN.timestamp()]),
]


@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: str(value)[:20])
def test_what_is_no_time_is_named_with_its_row_and_nothing_is_guessed(tmp_path: Path, value: object) -> None:
    """Milliseconds above all: they would lie in the year 58,000, and a counter in 1970."""
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "b", "asked": value}])
    if isinstance(value, str):  # as it stands there, whatever a reader of JSON takes it for
        path = parquet(tmp_path / "rows.parquet", [{"text": "b", "asked": value}])
    error = refusal(corpus({"path": path, "time": "asked"}))
    assert isinstance(error, ColumnMissing)
    assert error.message.startswith(f"{path} row 0: asked holds ")
    assert error.message.endswith(", which is no time of a request")
    assert "ISO 8601" in error.hint
    assert "no milliseconds" in error.hint
    assert error.message.isprintable()
    assert len(error.message) < 400


def test_a_row_without_a_cluster_stands_alone(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "chat": "x"}, {"text": "b", "chat": None}])
    assert [document.cluster for document in corpus({"path": path, "cluster": "chat"})] == ["0:x", None]


def test_messages_that_end_with_an_answer_are_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = jsonl(tmp_path / "rows.jsonl", [{"turns": turns}])
    error = refusal(corpus({"path": path, "messages": "turns"}))
    assert "end with an assistant turn" in error.message


@pytest.mark.parametrize("column", ["text", "answer"])
def test_an_empty_prompt_or_response_is_left_out_and_counted(tmp_path: Path, column: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "answer": "b"}, {"text": "a", "answer": "b"} | {column: ""}])
    found = corpus({"path": path}, continuation={"kind": "given", "column": "answer"})
    assert len(list(found)) == 1
    assert found.skipped == {"with an empty prompt or response": 1}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("content", ["", "\n\n\n", "  \n\t\r\n "], ids=["nothing", "blank lines", "white space"])
def test_a_file_without_content_is_empty(tmp_path: Path, suffix: str, content: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    else:
        path.write_text(content)
    error = refusal(corpus({"path": str(path)}))
    assert isinstance(error, DataEmpty)
    assert error.message == f"{path} is empty"


@pytest.mark.parametrize(("name", "content"), [("rows.json", "[]"), ("rows.csv", "text,answer\n")])
def test_a_file_with_no_row_yields_no_document(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    error = refusal(corpus({"path": str(tmp_path / name)}))
    assert isinstance(error, DataEmpty)
    assert "yields no document from 0 rows" in error.message


def test_a_directory_with_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert isinstance(refusal(corpus({"path": str(tmp_path)})), DataEmpty)


def test_a_source_that_yields_nothing_says_why_and_speaks_of_itself_only(tmp_path: Path) -> None:
    empty = jsonl(tmp_path / "empty.jsonl", [{"text": ""}, {"text": "a"}, {"text": ""}])
    long = jsonl(tmp_path / "long.jsonl", [{"text": "a" * 50}] * 2)
    error = refusal(
        corpus({"path": empty}, {"path": long}, context=40, continuation={"kind": "greedy", "max_new_tokens": 4})
    )
    assert isinstance(error, DataEmpty)
    reasons = "left out: 2 longer than the target's context of 40 tokens"
    assert error.message == f"{long} yields no document from 2 rows ({reasons})"


GOOD = '{"text": "a"}\n{"text": "b"}\n'
MALFORMED = {
    '{"text": "c"\n': "line 3: Expecting ',' delimiter",
    "text\n": "line 3: Expecting value",
    '["c"]\n': "line 3 is not a JSON object",
}


@pytest.mark.parametrize(("line", "reason"), MALFORMED.items())
def test_a_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + line + GOOD)
    error = refusal(corpus({"path": str(path)}))
    assert isinstance(error, DataUnreadable)
    assert error.message == f"cannot read {path}: {reason}"


def test_a_malformed_line_far_into_a_file_is_counted_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"text": "x" * 100_000}) + "\n") * 120 + "{\n" + GOOD)  # beyond one block of 10 MB
    found = iter(corpus({"path": str(path), "prompt": "a"}))
    assert next(found).document == 0
    with pytest.raises(DataUnreadable, match="line 121: "):
        list(found)


UNREADABLE = {
    "rows.json": b'{"text": ',
    "rows.csv": b"text\na\nb,c\n",
    "rows.parquet": b"PAR1 and no more",
    "rows.txt": b"w\xf6rld\n",
    "rows.jsonl": b'{"text": "w\xf6rld"}\n',
    "latin.csv": b"text\nw\xf6rld\n",
    "rows.xml": b"<text/>",
}


@pytest.mark.parametrize(("name", "content"), UNREADABLE.items())
def test_an_unreadable_file_is_named_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    listener = BufferingHandler(capacity=100)
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [listener])
    (tmp_path / name).write_bytes(content)
    error = refusal(corpus({"path": str(tmp_path / name)}))
    assert isinstance(error, DataUnreadable)
    assert str(tmp_path / name) in error.message
    assert listener.buffer == []


@pytest.mark.parametrize("name", ["none.jsonl", "none"])
def test_a_path_that_does_not_exist_is_named(tmp_path: Path, name: str) -> None:
    error = refusal(corpus({"path": str(tmp_path / name)}))
    assert isinstance(error, DataUnreadable)
    assert error.message == f"dataset {tmp_path / name} does not exist"


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = corpus({"path": numbered(tmp_path / "rows.jsonl", 1)})

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    error = refusal(found)
    assert isinstance(error, DataUnreadable)
    assert error.message == f"cannot read {tmp_path / 'rows.jsonl'}: Permission denied"


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_name_that_chains_file_systems_is_a_name_in_every_format(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a::c").mkdir()
    assert texts(corpus({"path": WRITERS[suffix](tmp_path / "a::c" / f"zip::b{suffix}", ROWS[:1])})) == ["Hello"]


def source(path: Path | str) -> SourceOptions:
    return profile({"path": str(path)}).data[0]


def test_a_format_of_datasets_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone `datasets` reads every file of that format below the working directory."""
    monkeypatch.setattr(hub, "require", lambda *_: None)  # the hub answers
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "secret.txt", [{"text": "mine"}])
    for name in ("text", "hf://datasets/text", *_PACKAGED_DATASETS_MODULES):
        with pytest.raises(DataUnreadable, match="every file below the working directory"):
            list(rows(source(name)))


def test_a_dataset_on_the_hub_is_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "require", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    numbered(tmp_path / "owner" / "name" / "rows.jsonl", 1)
    with pytest.raises(DataUnreadable, match="datasets would read the folder of that name"):
        list(rows(source("owner/name")))


def test_a_dataset_on_the_hub_has_no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "require", lambda *_: None)
    own, other = "hf://datasets/owner/name@0/rows.jsonl", numbered(tmp_path / "mine.jsonl", 1)
    for files, refused in (({"train": [own]}, False), ({"train": [own], "test": [other]}, True)):
        config = SimpleNamespace(data_files=files)
        builder = SimpleNamespace(config=config, as_streaming_dataset=lambda split: [{"text": split}])
        monkeypatch.setattr("datasets.load_dataset_builder", lambda builder=builder, **_: builder)
        if refused:
            with pytest.raises(DataUnreadable, match="names files outside of it"):
                list(rows(source("owner/name")))
        else:
            assert list(rows(source("owner/name"))) == [(0, {"text": "train"})]


CARD_FILES = {
    "above": "data_files: ../mine.jsonl",
    "above by a pattern": "data_files: ['**/../../*.jsonl']",
    "a list of splits": "data_files: [{split: train, path: [rows.jsonl, ../mine.jsonl]}]",
    "absolute": "data_files: {folder}/mine.jsonl",
    "a folder": "data_dir: ..",
}


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("named", CARD_FILES.values(), ids=list(CARD_FILES))
def test_the_card_of_a_dataset_names_files_of_its_folder_only(tmp_path: Path, named: str, card: str) -> None:
    numbered(tmp_path / "mine.jsonl", 1, "mine")
    folder = tmp_path / "data"
    folder.mkdir()
    numbered(folder / "rows.jsonl", 1)
    content = f"configs:\n- config_name: default\n  {named.replace('{folder}', str(tmp_path))}\n"
    (folder / card).write_text(content if card != "README.md" else f"---\n{content}---\n# Data\n")
    with pytest.raises(DataUnreadable, match=r"names files outside of it|No \(supported\) data files"):
        list(rows(source(folder)))


@pytest.mark.parametrize("named", ["data_files: '*.jsonl'", "data_files: {folder}/rows.jsonl", "data_dir: ."])
def test_a_card_may_name_the_files_of_its_folder(tmp_path: Path, named: str) -> None:
    """Also in the hub's cache, where they are links to files beside the snapshot."""
    repository = tmp_path / "datasets--owner--name"
    folder = repository / "snapshots" / "0"
    for place in (folder, repository / "blobs"):
        place.mkdir(parents=True)
    numbered(repository / "blobs" / "0123", 2)
    (folder / "rows.jsonl").symlink_to("../../blobs/0123")
    content = f"configs:\n- config_name: default\n  {named.replace('{folder}', str(folder))}\n"
    (folder / "README.md").write_text(f"---\n{content}---\n# Data\n")
    assert [(number, row["text"]) for number, row in rows(source(folder))] == [(0, "0"), (1, "1")]


@pytest.mark.parametrize("named", ["'*.jsonl'", "{folder}/rows.jsonl"])
def test_a_dataset_directory_may_be_reached_through_a_link(tmp_path: Path, named: str) -> None:
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "rows.jsonl", 1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "data")
    content = f"configs: [{{config_name: default, data_files: {named.replace('{folder}', str(link))}}}]"
    (link / "README.md").write_text(f"---\n{content}\n---\n")
    assert [(number, row["text"]) for number, row in rows(source(link))] == [(0, "0")]


@pytest.mark.parametrize("card", [None, "# Notes\n", "---\nlicense: mit\n---\n"])
def test_a_link_in_a_directory_without_named_files_is_the_users_own(tmp_path: Path, card: str | None) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").symlink_to(numbered(tmp_path / "mine.jsonl", 1))
    if card is not None:
        (folder / "README.md").write_text(card)
    assert [row["text"] for _, row in rows(source(folder))] == ["0"]


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataUnreadable, match="is a pipe, a socket or a device"):
        require_data(str(tmp_path / "rows.jsonl"))


def test_a_directory_without_data_is_unreadable(tmp_path: Path) -> None:
    error = refusal(corpus({"path": str(tmp_path)}))
    assert isinstance(error, DataUnreadable)
    assert error.hint == "check name, split, its README.md and the files in it"


NO_IDS: list[Any] = [5, ["a"], [1.5], [-1], [True], [[1]], [1, None], {"a": 1}, [2**31], [2**40], [2**70]]


@pytest.mark.parametrize(
    ("role", "value"), [("prompt", "[1, 2]"), *((role, value) for role in ("prompt", "answer") for value in NO_IDS)]
)
def test_values_that_are_no_token_ids_are_refused(tmp_path: Path, role: str, value: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": [1], "answer": [1]} | {role: value}])
    error = refusal(corpus({"path": path, "prompt_ids": "prompt", "continuation": {"kind": "given", "column": "answer"}}))
    assert isinstance(error, ColumnMissing)
    assert f"row 0: {role} holds no token ids" in error.message


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_a_token_id_beyond_the_vocabulary_is_named(tmp_path: Path, column: str) -> None:
    row = {"prompt": [1], "answer": [VOCABULARY - 1]} | {column: [1, VOCABULARY, 2]}
    source = {"path": jsonl(tmp_path / "rows.jsonl", [row]), "prompt_ids": "prompt"}
    error = refusal(corpus(source | {"continuation": {"kind": "given", "column": "answer"}}))
    assert isinstance(error, ColumnMissing)
    assert "the token id 260, beyond the target's vocabulary of 260" in error.message


NO_CHAT: list[Any] = [
    "text",
    {"role": "user", "content": "a"},
    ["a"],
    [{"content": "a"}],
    [{"role": None, "content": "a"}],
    [5],
]


@pytest.mark.parametrize("value", NO_CHAT, ids=str)
def test_values_that_are_no_chat_are_refused(tmp_path: Path, value: Any) -> None:
    error = refusal(corpus({"path": jsonl(tmp_path / "rows.jsonl", [{"turns": value}]), "messages": "turns"}))
    assert isinstance(error, ColumnMissing)
    assert "row 0: turns holds no chat messages" in error.message


COUNTS = [(".jsonl", 3), (".csv", 3), (".parquet", 3), (".txt", 3), (".json", None)]


@pytest.mark.parametrize(("suffix", "count"), COUNTS)
@pytest.mark.parametrize("limit", [None, 2, 9])
def test_the_number_of_documents_is_known_beforehand_where_it_is_cheap(
    tmp_path: Path, suffix: str, count: int | None, limit: int | None
) -> None:
    source = {"path": WRITERS[suffix](tmp_path / f"rows{suffix}", ROWS), "limit": limit}
    known = [number for number in (count, limit) if number is not None]
    assert expected_documents(profile(source)) == (min(known) if known else None)


def test_expected_documents_add_up_over_sources_and_are_unknown_if_one_is(tmp_path: Path) -> None:
    local = {"path": numbered(tmp_path / "rows.jsonl", 5)}
    assert expected_documents(profile(local, local | {"limit": 2})) == 7
    assert expected_documents(profile(local, {"path": "hub/dataset", "limit": 2})) == 7
    assert expected_documents(profile(local, {"path": "hub/dataset"})) is None


def test_blank_lines_are_no_expected_documents_and_a_damaged_file_has_no_known_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"\n{GOOD}\n")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    assert expected_documents(profile({"path": str(tmp_path / "rows.jsonl")})) == 2
    assert expected_documents(profile({"path": str(tmp_path / "rows.parquet")})) is None


WHOLE = [
    ("rows.json", "[]", True),
    ("rows.json", " \n [{}]", True),
    ("rows.json", "\ufeff[]", True),
    ("rows.json", GOOD, False),
    ("rows.json", "", False),
    ("rows.jsonl", "[]", False),
    ("hub/dataset", None, False),
]


@pytest.mark.parametrize(("name", "content", "expected"), WHOLE)
def test_only_a_json_array_is_read_whole(tmp_path: Path, name: str, content: str | None, expected: bool) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    path = name if content is None else str(tmp_path / name)
    assert read_whole(profile({"path": path}).data[0]) is expected


PLAIN_TEXT = {"kind": "text", "prompt_tokens": 4, "max_new_tokens": 6}


def test_plain_text_is_cut_into_a_prompt_and_what_is_measured(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("123456", "1234567890", "1234567890abc")])
    found = corpus({"path": path}, continuation=PLAIN_TEXT)
    documents = list(found)
    assert texts(documents) == ["1234"] * 3
    assert [document["given"] for document in plain(documents)] == [ids("56"), ids("567890"), ids("567890")]
    assert [document.cut for document in documents] == [False, False, True]
    assert {(document.kind, document.on_policy, document.processing, document.seed) for document in documents} == {
        ("text", False, None, None)
    }
    assert found.truncated == {"texts cut to max_new_tokens": 1}
    assert not any(document.greedy for document in documents)


def test_plain_texts_with_nothing_beyond_the_prompt_are_left_out_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("123", "1234", "12345", "")])
    found = corpus({"path": path}, continuation=PLAIN_TEXT)
    assert [document["given"] for document in plain(found)] == [ids("5")]
    assert found.skipped == {"with no text beyond prompt_tokens (4)": 2, "with an empty prompt or response": 1}


def test_plain_text_may_have_no_limit_and_respects_the_context(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "1" * 12}, {"text": "2" * 13}])
    found = corpus({"path": path}, context=12, continuation={"kind": "text", "prompt_tokens": 4, "max_new_tokens": None})
    assert [len(document.given) for document in found] == [8]
    assert found.skipped == {"longer than the target's context of 12 tokens": 1}


def test_plain_text_keeps_the_bos_in_its_prompt(tmp_path: Path) -> None:
    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 257)]
    )
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "123456"}])
    (document,) = corpus({"path": path}, words=words, continuation=PLAIN_TEXT)
    assert document.prompt.tolist() == [257, *ids("123")]
    assert document.given.tolist() == ids("456")


@pytest.mark.parametrize("source", [{"chat": True}, {"messages": "text"}], ids=str)
def test_a_plain_corpus_is_no_chat(source: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data\.0: continuation kind text measures a plain corpus"):
        profile({"path": "rows.jsonl"} | source, continuation={"kind": "text"})


SAMPLED = {"kind": "sampled", "temperature": 0.7, "top_p": 0.9, "seed": 5, "max_new_tokens": 9}
POLICIES: list[tuple[dict[str, Any], dict[str, Any], Processing | None, int | None, bool, bool]] = [
    # continuation, the model's own settings; processing, seed, on policy, greedy
    ({"kind": "greedy"}, {"temperature": 0.5}, None, None, True, True),
    (SAMPLED, {"top_k": 20}, Processing(0.7, 0, 0.9), 5, True, False),
    (SAMPLED | {"generation_config": True}, {"top_k": 20, "top_p": 0.1}, Processing(0.7, 20, 0.9), 5, True, False),
    ({"kind": "sampled"}, {"top_k": 20}, PLAIN, 0, True, False),
    ({"kind": "given", "column": "text"}, {}, None, None, False, False),
    ({"kind": "given", "column": "text", "on_policy": True}, {}, None, None, True, True),
    (
        {"kind": "given", "column": "text", "on_policy": True, "temperature": 0.8, "top_p": 0.95},
        {"top_k": 20},
        Processing(0.8, 0, 0.95),
        None,
        True,
        False,
    ),
    ({"kind": "given", "column": "text", "temperature": 1}, {}, PLAIN, None, False, False),
    ({"kind": "text", "prompt_tokens": 1}, {"temperature": 0.5}, None, None, False, False),
]


@pytest.mark.parametrize(("continuation", "served", "processing", "seed", "on_policy", "greedy"), POLICIES)
def test_a_document_knows_how_its_tokens_come_about(
    tmp_path: Path,
    continuation: dict[str, Any],
    served: dict[str, Any],
    processing: Processing | None,
    seed: int | None,
    on_policy: bool,
    greedy: bool,
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "abcdef"}])
    (document,) = corpus({"path": path}, served=served, continuation=continuation)
    assert document.kind == continuation["kind"]
    assert (document.processing, document.seed) == (processing, seed)
    assert (document.on_policy, document.greedy) == (on_policy, greedy)


def test_a_source_may_be_sampled_otherwise_than_the_profile(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "abcdef"}])
    sources = [{"path": path}, {"path": path, "continuation": {"kind": "sampled", "temperature": 1.5, "seed": 3}}]
    first, second = corpus(*sources, continuation=SAMPLED)
    assert (first.processing, first.seed, first.max_new_tokens) == (Processing(0.7, 0, 0.9), 5, 9)
    assert (second.processing, second.seed, second.max_new_tokens) == (Processing(1.5), 3, 256)


TRUNCATION = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize(("name", "value"), TRUNCATION.items())
def test_truncation_of_given_text_goes_with_a_temperature(name: str, value: float) -> None:
    given_text = {"kind": "given", "column": "a", name: value}
    with pytest.raises(ValueError, match="need temperature"):
        profile({"path": "rows.jsonl"}, continuation=given_text)
    options = profile({"path": "rows.jsonl"}, continuation=given_text | {"temperature": 1})
    assert getattr(options.continuation, name) == value


def test_a_target_that_is_served_with_temperature_zero_cannot_be_sampled_as_served(tmp_path: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", 1)
    served = {"temperature": 0.0}
    error = refusal(corpus({"path": path}, served=served, continuation={"kind": "sampled", "generation_config": True}))
    assert isinstance(error, ProfileInvalid)
    assert "temperature 0" in error.message


CHANGES: list[dict[str, Any]] = [
    {"processing": PLAIN},
    {"processing": Processing(0.7)},
    {"processing": Processing(0.7, 5)},
    {"processing": Processing(0.7, 0, 0.9)},
    {"processing": Processing(0.7, 0, 1.0, 0.1)},
    {"processing": PLAIN, "seed": 0},
    {"processing": PLAIN, "seed": 1},
    {"domain": "other"},
    {"cluster": "0:c"},
    {"time": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
    {"time": datetime.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=datetime.UTC)},
    {"document": 1},
    {"prompt": np.array([1, 2, 4], dtype=np.int32)},
    {"given": np.array([5], dtype=np.int32)},
]


def test_the_digest_of_documents_changes_with_data_and_settings() -> None:
    document = Document(0, "a", None, 0, 0, np.array([1, 2, 3], dtype=np.int32), None, False, 9, "sampled", True)
    found = [digest([dataclasses.replace(document, **change)]) for change in [{}, *CHANGES]]
    assert len(set(found)) == len(found)
    assert digest([document]) == found[0]
    assert digest([document, document]) != found[0]


def test_rows_of_documents_hold_how_they_were_sampled(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "abcdef"}])
    sources = [
        {"path": path, "continuation": SAMPLED | {"top_k": 3, "min_p": 0.1}},
        {"path": path, "continuation": {"kind": "greedy"}},
        {"path": path, "continuation": {"kind": "given", "column": "text", "temperature": 2}},
        {"path": path, "continuation": PLAIN_TEXT},
    ]
    text = np.array([3, 256], dtype=np.int32)
    found = [Continuation(item, text, "eos") if item.given is None else as_given(item, (256,)) for item in corpus(*sources)]
    table = continuation_table(found).select(
        ["continuation", "on_policy", "temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "finish"]
    )
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("sampled", True, 0.7, 3, 0.9, 0.1, 5, 9, "eos"),
        ("greedy", True, None, None, None, None, None, 256, "eos"),
        ("given", False, 2.0, 0, 1.0, 0.0, None, None, "length"),
        ("text", False, None, None, None, None, None, 6, "length"),
    ]


def drawn(path: Path, prompts: Sequence[str]) -> InRandomOrder:
    written = jsonl(path, [{"text": prompt} for prompt in prompts])
    read = corpus({"domain": "chat", "path": written, "prompt": "{text}"})
    return InRandomOrder.of(read, read.options)


def test_the_random_order_follows_from_the_prompts(tmp_path: Path) -> None:
    """Another data set of as many prompts comes in another order: no place in a file is favored. The same one does not."""
    names = [f"w{place}" for place in range(40)]
    first, again = (drawn(tmp_path / "a.jsonl", names) for _ in range(2))
    other = drawn(tmp_path / "b.jsonl", [f"{name} {name}" for name in names])
    rows = [[document.source_row for document in found] for found in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert sorted(rows[0]) == list(range(40))
    backwards = drawn(tmp_path / "d.jsonl", names[::-1])
    assert [document.source_row for document in backwards] == [39 - row for row in rows[0]]
    places = [
        [document.source_row for document in drawn(tmp_path / "c.jsonl", [f"{s} {n}" for n in names])] for s in range(60)
    ]
    first_half = np.mean([[row < 20 for row in found[:10]] for found in places])
    assert abs(first_half - 0.5) < 3 * math.sqrt(0.25 * 30 / 39 / 600)


def test_recurring_prompts_are_no_matter_for_bets(tmp_path: Path) -> None:
    """Bets would count each prompt once, and a fixed number of documents counts it as often as it comes."""
    with pytest.raises(ProfileInvalid) as error:
        drawn(tmp_path / "a.jsonl", ["hello"] * 3 + [f"w{place}" for place in range(97)])
    assert error.value.message == "--until-decided takes documents to be independent, and 2 of 100 repeat a prompt"
    drawn(tmp_path / "b.jsonl", ["hello"] * 2 + [f"w{place}" for place in range(98)])
