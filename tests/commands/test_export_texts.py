"""`alphaprof export --to texts`: files are read as their readers read them; errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from alphaprof.commands.export.texts import FILES, TRAINERS, export_texts
from alphaprof.errors import DataEmpty, OptionInvalid, RunExists, RunUnreadable
from alphaprof.run.reader import Run
from alphaprof.run.split import PARTS, TRAIN, split, texts_of
from tests.conftest import Runner
from tests.synthetic import VOCABULARY, Domain, Recipe, interrupted, replaced, write_run

# Three sessions of several documents each, documents that stand alone, and equal prompts, which are one unit.
SESSIONS = [f"session {number % 5}" if number < 15 else None for number in range(24)]
RECIPE = Recipe(
    domains={
        "chat": Domain(documents=24, clusters=SESSIONS),
        "code": Domain(documents=16, prompts=[f"prompt {number // 2}" for number in range(16)]),
    },
)
Rows = dict[str, list[dict[str, Any]]]


def with_prompts(run: Run) -> Run:
    """The run with a prompt of its own for each `prompt_hash`: those of a synthetic run are all the same tokens."""
    texts = {}
    for shard in run.shards:
        table = run.continuations(shard.index)
        seeds = [int(digest[:8], 16) for digest in table["prompt_hash"].to_pylist()]
        ids = [np.random.default_rng(seed).integers(3, VOCABULARY, 8).tolist() for seed in seeds]
        place = table.schema.get_field_index("prompt_ids")
        field = table.schema.field(place)
        texts[shard.index] = table.set_column(place, field, pa.array(ids, field.type))
    return replaced(run, {}, texts)


def texts_run(path: Path, recipe: Recipe) -> Run:
    return with_prompts(write_run(path, recipe))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return texts_run(tmp_path_factory.mktemp("texts") / "run", RECIPE)


@pytest.fixture
def alphaprof(console_script: Runner) -> Runner:
    """`alphaprof export`."""
    return partial(console_script, "export")


def speculators(folder: Path) -> list[dict[str, Any]]:
    """speculators' `load_raw_dataset` of a folder: all .json and .jsonl files below it as one; then `_append_row`, which
    takes rows of equal lengths and drops those without a token to learn.
    """
    files = sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl")])
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"])
    return [row for row in rows if sum(row["loss_mask"])]


def specforge(file: Path) -> list[dict[str, Any]]:
    """SpecForge's `_prompt_from_record`: both fields are flat lists of integers, of equal lengths, masks of 0 and 1."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        assert {type(value) for name in ("input_ids", "loss_mask") for value in row[name]} == {int}
        assert set(row["loss_mask"]) <= {0, 1}
        assert len(row["input_ids"]) == len(row["loss_mask"]) > 0
    return [row for row in rows if sum(row["loss_mask"]) >= 1]


def written(run: Run, out: Path) -> Rows:
    export_texts(str(run.path), out)
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES.values())
    return {part: specforge(out / name) for part, name in FILES.items()}


def test_parts_are_those_of_train_and_hold_every_document_once(run: Run, tmp_path: Path) -> None:
    rows, parts, texts = written(run, tmp_path / "out"), split(texts_of(run)), texts_of(run)
    expected = {part: {text.document for text in parts.of(texts, part)} for part in PARTS}
    assert {part: {row["document"] for row in rows[part]} for part in PARTS} == expected
    assert sum(map(len, rows.values())) == run.manifest.documents
    assert all(len(rows[part]) for part in PARTS)


def test_token_ids_are_those_of_the_run_and_only_the_continuation_is_learnt(run: Run, tmp_path: Path) -> None:
    by_document = {row["document"]: row for rows in written(run, tmp_path / "out").values() for row in rows}
    for shard in run.shards:
        for document in run.continuations(shard.index).to_pylist():
            row = by_document[document["document"]]
            assert row["input_ids"] == document["prompt_ids"] + document["continuation_ids"]
            learnt = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
            assert learnt == document["continuation_ids"]
            assert sum(row["loss_mask"][: len(document["prompt_ids"])]) == 0


def test_a_reader_that_is_given_the_folder_learns_from_train_alone(run: Run, tmp_path: Path) -> None:
    rows = written(run, tmp_path / "out")
    assert [row["document"] for row in speculators(tmp_path / "out")] == [row["document"] for row in rows[TRAIN]]


def test_the_next_command_names_the_model_and_a_length_that_cuts_nothing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a folder; rm -rf"
    rows = written(run, out)
    longest = max(len(row["input_ids"]) for part in rows.values() for row in part)
    artefact = export_texts(str(run.path), tmp_path / "next; ls")
    command, _ = [note for note in artefact.notes if note.startswith("next: ")]
    assert f"--seq-length {longest} " in command
    assert f"--model {run.manifest.target.reference} " in command
    assert f"--data '{tmp_path}/next; ls/train.jsonl' " in command


def test_texts_that_train_leaves_out_are_left_out_and_counted(tmp_path: Path) -> None:
    domains = {"wiki": Domain(documents=6, on_policy=False, continuation="text"), "chat": Domain(documents=9)}
    mixed = texts_run(tmp_path / "run", Recipe(domains=domains | {"short": Domain(documents=3, shortest=2, longest=3)}))
    warnings = export_texts(str(mixed.path), tmp_path / "out").warnings
    rows = [row["document"] for name in FILES.values() for row in specforge(tmp_path / "out" / name)]
    documents = mixed.documents().to_pandas().set_index("document")
    assert sorted(rows) == sorted(documents.index[documents["domain"] == "chat"])
    assert warnings == ("9 documents of 18 left out: too short, or not the target's own text",)


def test_a_run_of_given_texts_alone_is_exported_with_a_word(tmp_path: Path) -> None:
    given = texts_run(tmp_path / "run", Recipe(domains={"wiki": Domain(documents=9, on_policy=False, continuation="given")}))
    artefact = export_texts(str(given.path), tmp_path / "out")
    assert sum(len(specforge(tmp_path / "out" / name)) for name in FILES.values()) == 9
    assert [warning.split(",")[0] for warning in artefact.warnings] == ["all texts were given"]


def test_what_a_data_set_calls_its_domains_reaches_no_terminal(tmp_path: Path, alphaprof: Runner) -> None:
    hostile = "chat\x1b[2J\nwarning: all is well\u202e"
    run = texts_run(tmp_path / "run", Recipe(domains={hostile: Domain(documents=2), "code": Domain(documents=5)}))
    code, output, errors = alphaprof(str(run.path), "--to", "texts", "--out", str(tmp_path / "out"))
    assert code == 0
    assert all(char.isprintable() or char == "\n" for char in output + errors)
    assert not [line for line in errors.splitlines() if line.startswith("warning: all is well")]


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    begun = interrupted(run, tmp_path / "begun", shards=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    cases: list[tuple[type[Exception], Path, Path | None, bool]] = [
        (OptionInvalid, run.path, None, False),
        (OptionInvalid, run.path, tmp_path / "out", True),
        (RunExists, run.path, tmp_path / "mine", False),
        (RunExists, run.path, run.path, False),
        (RunUnreadable, tmp_path / "none", tmp_path / "out", False),
        (DataEmpty, begun.path, tmp_path / "out", False),
    ]
    before = sorted(tmp_path.rglob("*"))
    for error, where, out, narrowed in cases:
        with pytest.raises(error):
            export_texts(str(where), out, narrowed=narrowed)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_page_names_the_files_and_the_trainers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text().split("## Texts for trainers of heads")[1]
    assert [name for name in FILES.values() if f"data/{name}: " not in page] == []
    lines = [command.format(model="MODEL", train="data/train.jsonl", longest=2048) for command in TRAINERS]
    assert [line for line in lines if line.replace(" DATA", " prepared").replace("MY", "my") not in page] == []
