"""Datasets to prompts: the same documents from every format, nothing lost uncounted, and every bad row named."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from alphaprof.config.profile import ProfileOptions, SourceOptions
from alphaprof.errors import AlphaprofError, ColumnMissing, DataEmpty, DataUnreadable
from alphaprof.profiling.models import hub
from alphaprof.profiling.models.hub import expected_documents
from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.texts.cells import render
from alphaprof.profiling.texts.chat import render_chat
from alphaprof.profiling.texts.continuations import digest
from alphaprof.profiling.texts.corpus import Corpus, Document
from alphaprof.profiling.texts.rows import rows
from alphaprof.run.manifest import left_out_remedy
from tests.loops import each
from tests.runs import openings
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


FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def written(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """A file of rows in the format that its name says."""
    rows = list(rows)
    if path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        texts = [row["text"] if path.suffix == ".txt" else json.dumps(row) for row in rows]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


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
    return written(path, ({"text": f"{label}{index}"} for index in range(count)))


ROWS = [{"text": "Hello", "kind": "a"}, {"text": "wörld {x} \u2028\U0001f600", "kind": "b"}, {"text": "007", "kind": "NA"}]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"rows{suffix}", ROWS)
    found = list(corpus({"path": path}))
    assert [document.prompt.tolist() for document in found] == [ids(row["text"]) for row in ROWS]
    assert [document.source_row for document in found] == [0, 1, 2]
    assert {document.prompt.dtype for document in found} == {np.dtype(np.int32)}
    if suffix != ".txt":
        source = {"path": path, "domain": {"column": "kind"}, "cluster": "kind"}
        found = list(corpus(source, continuation={"kind": "given", "column": "kind"}))
        assert [document.domain for document in found] == ["a", "b", "NA"]
        assert [document.cluster for document in found] == ["0:a", "0:b", "0:NA"]
        assert [WORDS.decode(document.given) for document in found] == ["a", "b", "NA"]


@each("name", ["a[1].jsonl", "a*.jsonl", "{a}.jsonl", "a b.jsonl"])
def test_a_file_is_read_alone_whatever_its_name_means_as_a_pattern(tmp_path: Path, name: str) -> None:
    for decoy in ("a1.jsonl", "ab.jsonl", "a.jsonl"):
        numbered(tmp_path / decoy, 3, "decoy")
    assert texts(corpus({"path": numbered(tmp_path / name, 2)})) == ["0", "1"]


def test_a_cell_of_a_csv_file_is_read_as_it_stands(tmp_path: Path) -> None:
    values = ["007", "1.10", "None", "null", "NA", "true", "2024-01-01", 'a\nb, "c"']
    assert texts(corpus({"path": written(tmp_path / "rows.csv", [{"text": value} for value in values])})) == values


@each("value", ["2024-01-31", "2024-01-31T10:20:30"])
def test_dates_in_json_stay_as_they_are_written(tmp_path: Path, value: str) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": value}])
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


def test_a_limit_counts_documents_of_each_domain_of_a_column(tmp_path: Path) -> None:
    """A file that is sorted by team has all teams, and those that are short of documents keep all of theirs."""
    teams = ["a"] * 5 + ["b"] * 5 + ["c"] * 2
    path = written(tmp_path / "rows.jsonl", ({"text": str(row), "team": team} for row, team in enumerate(teams)))
    found = list(corpus({"path": path, "domain": {"column": "team"}, "limit": 3}))
    assert [document.source_row for document in found] == [0, 1, 2, 5, 6, 7, 10, 11]
    assert [document.domain for document in found] == ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    assert expected_documents(profile({"path": path, "domain": {"column": "team"}, "limit": 3})) is None


def test_a_stream_is_not_read_for_ever_for_a_domain_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of 10,000 rows in a row brought a document: that is said. One within them is taken."""
    read = 0

    def endless(_: SourceOptions, __: list[str]) -> Iterator[tuple[int, str, dict[str, str]]]:
        nonlocal read
        for read in range(50_000):
            yield read, "", {"text": "x", "team": "b" if read == 9_000 else "a"}

    monkeypatch.setattr("alphaprof.profiling.texts.corpus.rows", endless)
    found = corpus({"path": "hub/data", "domain": {"column": "team"}, "limit": 2})
    assert [document.source_row for document in found] == [0, 1, 9_000]
    assert read == 9_000 + 10_001
    (reason,) = found.truncated
    assert "10,000 rows" in reason
    assert left_out_remedy(reason).startswith("set shuffle_seed")


@each("source", [{}, {"prompt": "{text}\n"}, {"chat": True, "prompt": "{text}"}, {"messages": "turns"}])
def test_prompts_that_say_nothing_are_left_out_and_counted(tmp_path: Path, source: dict[str, Any]) -> None:
    """Whatever a chat template or a BOS would put around them."""
    rows = [{"text": text, "turns": [{"role": "user", "content": text}]} for text in ("", " \n\t", "a")]
    found = corpus({"path": written(tmp_path / "rows.jsonl", rows)} | source)
    assert [document.source_row for document in found] == [2]
    assert found.skipped == {"with an empty prompt or response": 2}


def test_a_row_without_a_domain_is_left_out_with_the_column_to_fill(tmp_path: Path) -> None:
    rows = [{"text": "a", "team": team} for team in ("x", None, " ")]
    found = corpus({"path": written(tmp_path / "rows.jsonl", rows), "domain": {"column": "team"}})
    assert len(list(found)) == 1
    assert found.skipped == {"with nothing in the column team": 2}
    empty = corpus({"path": written(tmp_path / "none.jsonl", rows[2:]), "domain": {"column": "team"}})
    with pytest.raises(DataEmpty) as error:
        list(empty)
    assert error.value.hint == left_out_remedy("with nothing in the column team") == "fill this column, or drop these rows"


SHORT = "with a prompt shorter than min_prompt_tokens (3)"


def test_short_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    """A prompt of just as many tokens is long enough; others do not count towards the limit."""
    rows = [{"text": text} for text in ("a", "abc", "ab", "abcd", "", "abcde", "abcdef")]
    found = corpus({"path": written(tmp_path / "rows.jsonl", rows), "min_prompt_tokens": 3, "limit": 3})
    documents = list(found)
    assert [(document.document, document.source_row, len(document.prompt)) for document in documents] == [
        (0, 1, 3),
        (1, 3, 4),
        (2, 5, 5),
    ]
    assert found.skipped == {SHORT: 2, "with an empty prompt or response": 1}


def test_another_seed_draws_other_documents_but_not_disjoint_ones(tmp_path: Path) -> None:
    """By chance two sets of 40 out of 400 share 4; of a source that is all taken, or read up to a small buffer, more."""
    path = numbered(tmp_path / "rows.jsonl", 400)

    def shared(**options: int) -> float:
        seeds = range(20)
        drawn = [set(texts(corpus({"path": path, "shuffle_seed": seed} | options))) for seed in seeds]
        return float(np.mean([len(one & other) for one, other in itertools.pairwise(drawn)]))

    assert 3 < shared(limit=40) < 5
    assert 18 < shared(limit=40, shuffle_buffer=40) < 27  # both out of the first 80 rows
    assert shared(limit=400) == 400


def test_a_shuffle_mixes_files_and_tells_them_apart(tmp_path: Path) -> None:
    for number in range(12):
        numbered(tmp_path / f"part-{number:02}.jsonl", 4, f"{number}/")
    found = list(corpus({"path": str(tmp_path), "shuffle_seed": 0, "shuffle_buffer": 3}))
    rows_of_files = [divmod(document.source_row, 2**32) for document in found]
    assert texts(found) == [f"{file}/{row}" for file, row in rows_of_files]
    assert len(set(rows_of_files)) == 48
    assert len({file for file, _ in rows_of_files[:12]}) > 4
    assert {file for file, _ in rows_of_files[:10]} - set(range(10))


def test_a_template_is_rendered_as_transformers_does(tmp_path: Path) -> None:
    """Without what is null in a turn: older versions of transformers hand that to the template, newer ones drop it."""
    turns = [{"role": "user", "content": "caf\u00e9 \U0001f600"}, {"role": "tool", "content": "x" * 100_000}]
    words = tokenizer()
    words.chat_template = "{{ eos_token }}{{ mood }}{{ tools | length }}" + words.chat_template + "{{ messages | tojson }}"
    options = {"mood": "calm", "tools": [{"type": "function"}]}
    found = render_chat(words, [turns[0] | {"name": None}, turns[1]], options)
    assert found == words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)


def test_clusters_are_told_apart_by_file(tmp_path: Path) -> None:
    """A session of two files is two; a row that two sources read is one unit, and has a session in either."""
    rows = [{"text": "a", "session": 7}, {"text": "b", "session": None}]
    one, other = ({"path": written(tmp_path / name, rows), "cluster": "session"} for name in ("a.jsonl", "b.jsonl"))
    assert [document.cluster for document in corpus(one, other)] == ["0:7", "1:7", None, None]
    found = corpus(other, one, one)
    assert [document.cluster for document in found] == ["0:7", "1:7", "1:7", None, "1:row 1", "1:row 1"]


@given(st.text(), st.text())
def test_a_template_inserts_values_and_literals_unchanged(literal: str, value: str) -> None:
    escaped = literal.replace("{", "{{").replace("}", "}}")
    assert render(f"{escaped}{{a}}{escaped}", {"a": value}) == f"{literal}{value}{literal}"


def test_chats_of_images_are_left_out_and_counted(tmp_path: Path) -> None:
    contents = "a", [{"type": "image_url", "image_url": {"url": "x"}}]
    rows = [{"body": {"turns": [{"role": "user", "content": content}]}} for content in contents]
    found = corpus({"path": written(tmp_path / "rows.jsonl", rows), "messages": "body.turns"})
    assert [each.prompt.tolist() for each in found] == [[USER, *ids("a"), MODEL]]
    assert [("content that is not text" in reason, count) for reason, count in found.skipped.items()] == [(True, 1)]


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


@each(
    ("template", "problem"),
    [(None, "no chat template"), ("{{ raise_exception('roles') }}", "line 1 is refused by the chat template: roles")],
)
def test_a_chat_that_the_template_cannot_render_is_refused(tmp_path: Path, template: str | None, problem: str) -> None:
    words = tokenizer()
    words.chat_template = template
    assert problem in refusal(corpus({"path": numbered(tmp_path / "rows.jsonl", 1), "chat": True}, words=words)).message


# Ids that no text gives: a special token, then bytes that are no UTF-8.
RAW_IDS = [256, 200, 7, 258, 199]


@each("suffix", [".jsonl", ".parquet"])
def test_given_token_ids_are_never_tokenised_again(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"rows{suffix}", [{"prompt": RAW_IDS, "answer": RAW_IDS[::-1]}])
    source = {"path": path, "prompt_ids": "prompt", "continuation": {"kind": "given", "column": "answer"}}
    (document,) = corpus(source)
    assert document.prompt.tolist() == RAW_IDS
    assert document.given is not None
    assert document.given.tolist() == RAW_IDS[::-1]
    assert document.given.dtype == document.prompt.dtype == np.int32


@each("kind", [pa.list_(pa.int16()), pa.list_(pa.uint64()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 5)])
def test_token_ids_may_have_any_integer_type(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"ids": pa.array([RAW_IDS], kind)}), tmp_path / "rows.parquet")
    (document,) = corpus({"path": str(tmp_path / "rows.parquet"), "prompt_ids": "ids"})
    assert document.prompt.tolist() == RAW_IDS


@each("continuation", [{"kind": "greedy", "max_new_tokens": 4}, {"kind": "given", "column": "answer"}])
def test_prompts_beyond_the_context_are_left_out_or_lose_their_beginning(
    tmp_path: Path, continuation: dict[str, Any]
) -> None:
    """A context of 12 leaves 8 tokens to a prompt of which 4 are to be generated, or whose response has 4."""
    rows = [{"text": text, "answer": "1234"} for text in ("1234567", "12345678", "123456789", "1234567890abc")]
    source = {"path": written(tmp_path / "rows.jsonl", rows)}
    found = corpus(source, context=12, continuation=continuation)
    assert texts(found) == ["1234567", "12345678"]
    assert (found.skipped, found.truncated) == ({"longer than the target's context of 12 tokens": 2}, {})
    found = corpus(source | {"too_long": "truncate"}, context=12, continuation=continuation)
    assert texts(found) == ["1234567", "12345678", "23456789", "67890abc"]
    assert (found.skipped, found.truncated) == ({}, {"prompts cut to the target's context": 2})


@each(("response", "kept"), [("1" * 11, 1), ("1" * 12, 0)])
def test_truncation_leaves_at_least_one_token_of_the_prompt(tmp_path: Path, response: str, kept: int) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": "abc", "answer": response}, {"text": "abc", "answer": "1"}])
    found = corpus({"path": path, "too_long": "truncate"}, context=12, continuation={"kind": "given", "column": "answer"})
    assert texts(found) == ["c"] * kept + ["abc"]
    assert sum(found.skipped.values()) == 1 - kept


COLUMNS: list[dict[str, Any]] = [
    {"prompt": "{txt}"},
    {"prompt_ids": "txt"},
    {"messages": "txt"},
    {"domain": {"column": "txt"}},
    {"cluster": "txt"},
    {"continuation": {"kind": "given", "column": "txt"}},
]


def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": "a", "n": 1}])
    for source in COLUMNS:
        error = refusal(corpus({"path": path} | source))
        assert isinstance(error, ColumnMissing)
        assert (error.message, error.hint) == (f"{path} line 1 has no column 'txt'", "did you mean text?"), source
    assert refusal(corpus({"path": path, "prompt": "{question}"})).hint == "it has: text, n"


@each("suffix", [".jsonl", ".parquet", ".csv"])
def test_a_row_with_an_empty_cell_is_left_out_and_counted(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"rows{suffix}", [{"text": "a", "n": "nan"}, {"text": None, "n": "nan"}])
    found = corpus({"path": path})
    assert [document.source_row for document in found] == [0]
    assert found.skipped == {"with nothing in the column text": 1}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_without_rows_is_empty(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.touch()
    assert refusal(corpus({"path": str(path)})).message == f"{path} is empty"
    if suffix == ".jsonl":
        assert isinstance(refusal(corpus({"path": str(tmp_path)})), DataEmpty)  # the directory
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    else:
        path.write_text("text,answer\n" if suffix == ".csv" else "\n \t\n")
    assert isinstance(refusal(corpus({"path": str(path)})), DataEmpty)


def test_a_source_that_yields_nothing_says_why_and_speaks_of_itself_only(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.jsonl", [{"text": ""}, {"text": "a"}, {"text": ""}])
    long = written(tmp_path / "long.jsonl", [{"text": "a" * 50}] * 2)
    error = refusal(
        corpus({"path": empty}, {"path": long}, context=40, continuation={"kind": "greedy", "max_new_tokens": 4})
    )
    assert isinstance(error, DataEmpty)
    reasons = "left out: 2 longer than the target's context of 40 tokens"
    assert error.message == f"{long} yields no document from 2 rows ({reasons})"


GOOD = '{"text": "a"}\n{"text": "b"}\n'


def test_a_malformed_line_far_into_a_file_is_counted_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"text": "x" * 100_000}) + "\n") * 120 + "{\n" + GOOD)  # beyond one block of 1 MB
    found = corpus({"path": str(path), "prompt": "a"})
    assert len(list(found)) == 122
    assert found.bad_rows() == [
        f"1 of 123 rows of {path} cannot be used: line 121 is not JSON: Expecting property name enclosed in double quotes"
    ]
    assert found.skipped == {"with a row that cannot be used": 1}


LINES, TABLE = '{"text": "one", "n": 1}\n', "text,n\none,1\n"
UNREADABLE: dict[str, tuple[bytes, str]] = {  # what files hold, and words of the refusal
    "rows.json": (b'{"text": ', ""),
    "rows.csv": (b"text\na\nb,c\n", ""),
    "rows.parquet": (b"PAR1 and no more", ""),
    "rows.txt": (b"w\xf6rld\n", ""),
    "rows.jsonl": (b'{"text": "w\xf6rld"}\n', ""),
    "latin.csv": (b"text\nw\xf6rld\n", ""),
    "rows.xml": (b"<text/>", ""),
    "utf-16.jsonl": (LINES.encode("utf-16"), "is in UTF-16"),
    "utf-16.csv": (TABLE.encode("utf-16-le"), "is in UTF-16"),
    "gzip.jsonl": (gzip.compress(LINES.encode()), "is a gzip file with another suffix"),
    "sheet.csv": (b"PK\x03\x04\x14\x00", "is a zip file with another suffix"),
    "cut.jsonl.gz": (gzip.compress(LINES.encode() * 1000)[:-20], "cannot read"),
    "text.jsonl.gz": (LINES.encode(), "cannot read"),
    "deep.json": (b"[" * 200_000 + b"]" * 200_000, "cannot read"),
}


def test_an_unreadable_file_is_named_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not there, and a directory without data."""
    listener = BufferingHandler(capacity=100)
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [listener])
    for name, (content, _) in UNREADABLE.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "none").mkdir()
    for name, (_, words) in (UNREADABLE | {"none.jsonl": (b"", ""), "none": (b"", "")}).items():
        error = refusal(corpus({"path": str(tmp_path / name)}))
        assert isinstance(error, DataUnreadable)
        assert str(tmp_path / name) in error.message
        assert words in error.message
    assert listener.buffer == []


def test_a_name_that_datasets_takes_for_files_here_is_no_dataset_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format, by whose name alone it reads every file below the working directory, and a folder there."""
    monkeypatch.setattr(hub, "require", lambda *_: None)  # the hub answers
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for name in ("hf://datasets/text", "owner/name", *_PACKAGED_DATASETS_MODULES):
        with pytest.raises(DataUnreadable, match="would read the working directory"):
            list(rows(profile({"path": name}).data[0]))


# What a column holds, which source asks for it, and words of the refusal. Milliseconds would lie in the year 58,000, and a
# counter in 1970.
IDS_OF: dict[str, Any] = {"prompt_ids": "x"}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((value, IDS_OF, "holds no token ids") for value in ("[1, ", ["a"], [1.5], [-1], [True], [1, None], [2**40])),
    ([1, VOCABULARY], IDS_OF, "holds the token id 260, beyond the target's vocabulary of 260"),
    *((value, {"messages": "x"}, "holds no chat") for value in ("text", [{"content": "a"}])),
]


@each(("value", "source", "words"), REFUSED)
def test_values_that_mean_nothing_are_refused_with_their_row(
    tmp_path: Path, value: Any, source: dict[str, Any], words: str
) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": "b", "x": value}])
    error = refusal(corpus({"path": path} | source))
    assert isinstance(error, ColumnMissing)
    assert "line 1" in error.message
    assert words in error.message
    assert error.message.isprintable()
    assert len(error.message) < 400


@each(("suffix", "count"), [(".jsonl", 3), (".csv", 3), (".parquet", 3), (".txt", 3), (".json", None)])
def test_the_number_of_documents_is_known_beforehand_where_it_is_cheap(
    tmp_path: Path, suffix: str, count: int | None
) -> None:
    source = {"path": written(tmp_path / f"rows{suffix}", ROWS)}
    assert expected_documents(profile(source)) == count
    assert expected_documents(profile(source | {"limit": 2})) == 2


PLAIN_TEXT = {"kind": "text", "prompt_tokens": 4, "max_new_tokens": 6}


def test_plain_text_is_cut_into_a_prompt_and_what_is_measured(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": text} for text in ("123456", "1234567890", "1234567890abc")])
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
    path = written(tmp_path / "rows.jsonl", [{"text": text} for text in ("123", "1234", "12345", "")])
    found = corpus({"path": path}, continuation=PLAIN_TEXT)
    assert [document["given"] for document in plain(found)] == [ids("5")]
    assert found.skipped == {"with no text beyond prompt_tokens (4)": 2, "with an empty prompt or response": 1}


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


@each(("continuation", "served", "processing", "seed", "on_policy", "greedy"), POLICIES)
def test_a_document_knows_how_its_tokens_come_about(
    tmp_path: Path,
    continuation: dict[str, Any],
    served: dict[str, Any],
    processing: Processing | None,
    seed: int | None,
    on_policy: bool,
    greedy: bool,
) -> None:
    path = written(tmp_path / "rows.jsonl", [{"text": "abcdef"}])
    (document,) = corpus({"path": path}, served=served, continuation=continuation)
    assert document.kind == continuation["kind"]
    assert (document.processing, document.seed) == (processing, seed)
    assert (document.on_policy, document.greedy) == (on_policy, greedy)


CHANGES: list[dict[str, Any]] = [
    {"processing": PLAIN},
    {"processing": Processing(0.7, 5)},
    {"processing": Processing(0.7, 0, 1.0, 0.1)},
    {"processing": PLAIN, "seed": 1},
    {"domain": "other"},
    {"cluster": "0:c"},
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


LOOKS = {
    "all of it": {},
    "a limit": {"limit": 4},
    "a limit by domain": {"domain": {"column": "kind"}, "limit": 2},
    "in random order": {"shuffle_seed": 3, "shuffle_buffer": 5},
    "in random order, cut off": {"shuffle_seed": 3, "shuffle_buffer": 50, "limit": 7},
    "bad rows": {"bad_rows": 0.5, "min_prompt_tokens": 2},
    "too long": {"too_long": "truncate"},
}


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("options", LOOKS.values(), ids=LOOKS)
def test_what_was_looked_at_is_not_read_again_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int
) -> None:
    """Whatever the target turns out to be: `look` knows neither its context nor its vocabulary."""
    rows = [{"text": "ab" * (index % 7), "kind": "xyz"[index % 3]} for index in range(20)]
    rows[5] = {"no text": 1}
    paths = [written(tmp_path / f"{name}.jsonl", rows) for name in "ab"]
    sources = [{"path": path} | {"bad_rows": 0.5} | options for path in paths]
    continuation = {"kind": "greedy", "max_new_tokens": 4}
    expected = corpus(*sources, context=12, continuation=continuation)
    documents = plain(expected)
    found = openings(monkeypatch)
    first = Corpus(profile(*sources, continuation=continuation), WORDS)
    first.look(most)
    known = dataclasses.replace(first, context=12, vocabulary=VOCABULARY)
    assert plain(known) == documents
    assert [found[path] for path in paths] == [1, 1]
    assert plain(known) == documents  # once more, from the beginning
    assert [found[path] for path in paths] == [2, 2]
    assert (known.skipped, known.truncated, known.bad_rows()) == (expected.skipped, expected.truncated, expected.bad_rows())
    assert expected.skipped.total() + expected.truncated.total() > 0


def test_a_look_reads_no_further_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def rows(source: Any, roots: Any) -> Iterator[Any]:
        for index in itertools.count():
            read.append(index)
            yield index, f"row {index}", {"text": "" if index < 7 else "ab"}

    monkeypatch.setattr("alphaprof.profiling.texts.corpus.rows", rows)
    endless = corpus({"path": "hub/endless"})
    endless.look(3)
    assert len(read) == 9  # until there was a document, and one row behind it
    assert [document.source_row for document in itertools.islice(endless, 4)] == [7, 8, 9, 10]
    assert read == list(range(11))  # each row once


MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
SPEED_BENCH = [  # in the published layout; the last one's text may not be published
    {"question_id": "a", "category": "coding", "turns": ["Write f.", "Shorter."], "multiturn": True, "src_id": None},
    {"question_id": "b", "category": "math", "turns": ["1 + 1?"], "multiturn": False, "src_id": "x"},
    {"question_id": "c", "category": "coding", "turns": ["Sort."], "multiturn": False, "src_id": None},
    {"question_id": "d", "category": "rag", "turns": [MASKED], "multiturn": False, "src_id": "y"},
]


def as_given(*sources: dict[str, Any], words: PreTrainedTokenizerFast = WORDS) -> Corpus:
    """The documents of sources to which nothing is added."""
    options = profile({"path": "x"}).model_dump(include={"target", "drafts"}) | {"data": list(sources)}
    return Corpus(ProfileOptions.model_validate(options), words, None, VOCABULARY, {})


@each("suffix", [".parquet", ".jsonl"])
@each("name", ["speed-bench", "spec-bench"])
def test_a_benchmark_is_read_by_its_name(tmp_path: Path, suffix: str, name: str) -> None:
    """First turns, as chats, with its categories as domains; a text that it does not publish is left out and counted."""
    found = as_given({"benchmark": name, "path": written(tmp_path / f"test{suffix}", SPEED_BENCH)})
    documents = list(found)
    assert [document.domain for document in documents] == ["coding", "math", "coding"]
    assert texts(documents) == ["<user>Write f.<model>", "<user>1 + 1?<model>", "<user>Sort.<model>"]
    assert found.skipped == {"whose text the benchmark does not publish": 1}
    assert "prepare_data.py" in left_out_remedy(next(iter(found.skipped)))


def test_speed_bench_is_read_from_the_hub_and_spec_bench_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def published(source: SourceOptions, columns: list[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
        asked.append((source.path, source.name, source.split, columns))
        yield from ((place, "", row) for place, row in enumerate(SPEED_BENCH))

    monkeypatch.setattr("alphaprof.profiling.texts.corpus.rows", published)
    assert len(list(as_given({"benchmark": "speed-bench"}))) == 3
    assert len(list(as_given({"benchmark": "speed-bench", "name": "throughput_8k"}))) == 3
    first, second = asked
    assert first[:3] == ("nvidia/SPEED-Bench", "qualitative", "test")
    assert {"category", "turns"} <= set(first[3])
    assert second[1] == "throughput_8k"
    with pytest.raises(ValidationError, match=r"spec-bench needs path: the question\.jsonl of"):
        SourceOptions.model_validate({"benchmark": "spec-bench"})


def test_a_source_takes_the_rows_that_it_asks_for(tmp_path: Path) -> None:
    """By values of columns, whatever type they have; that none is so is an error that says it."""
    path = written(
        tmp_path / "rows.jsonl", ({"text": str(n), "n": n, "odd": n % 2 == 1, "kind": "ab"[n % 2]} for n in range(6))
    )
    assert texts(corpus({"path": path, "where": {"kind": "b"}})) == ["1", "3", "5"]
    assert texts(corpus({"path": path, "where": {"n": [0, 3, 4], "odd": False}})) == ["0", "4"]
    assert texts(corpus({"path": path, "where": {"odd": True}, "limit": 2})) == ["1", "3"]
    failure = refusal(corpus({"path": path, "where": {"kind": "c"}}))
    assert "yields no document from 6 rows (left out: 6 that data.where does not ask for)" in str(failure)
    assert failure.hint == "check the columns and values of where"
    assert "has no column 'knid'" in str(refusal(corpus({"path": path, "where": {"knid": "a"}})))


def test_thinking_on_and_off_are_two_domains_of_one_run(tmp_path: Path) -> None:
    path, words = written(tmp_path / "test.jsonl", SPEED_BENCH), tokenizer()
    words.chat_template = f"{words.chat_template}{{{{ '' if enable_thinking else '<off>' }}}}"
    source = {"benchmark": "speed-bench", "path": path, "where": {"category": "coding"}}
    on, off = ({"domain": f"thinking_{mode}", "chat_options": {"enable_thinking": mode == "on"}} for mode in ("on", "off"))
    found = list(as_given(source | on, source | off, words=words))
    assert [document.domain for document in found] == ["thinking_on", "thinking_off"] * 2
    assert texts(found[:2]) == ["<user>Write f.<model>", "<user>Write f.<model><off>"]
    # A question that is asked twice is one unit of what is sampled, whatever else each source reads.
    assert [document.cluster for document in found] == ["0:row 0", "0:row 0", "0:row 2", "0:row 2"]
    grouped = as_given(*({**source, **mode, "cluster": "question_id"} for mode in (on, off)), words=words)
    assert [document.cluster for document in grouped] == ["0:a", "0:a", "0:c", "0:c"]
    assert {document.cluster for document in as_given(source)} == {None}
