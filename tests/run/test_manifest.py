"""What a manifest says of the process that wrote a run, and what it refuses to be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from alphaprof.commands.check import checked
from alphaprof.errors import CostsUnreadable, OptionInvalid, RunMismatch, RunUnreadable, without_secrets
from alphaprof.report.build import build_report
from alphaprof.run.manifest import Environment, differences, digest_of, read_manifest
from alphaprof.run.reader import Run
from alphaprof.run.storage import storage_of
from tests.synthetic import Domain, Recipe, write_run


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"device": "cuda"}, ["device cuda, not cpu"]),
        ({"torch_threads": 2}, ["2 threads, not 1"]),
        ({"packages": {"torch": "2", "transformers": "5", "numba": "1"}}, ["torch 2, not 1"]),
        ({"packages": {"torch": "1", "transformers": "5", "numba": "2"}}, []),
        ({"statistics": "b"}, ["other statistics of the same logits"]),
    ],
)
def test_a_process_that_computes_otherwise_is_named_by_what_differs(changed: Any, said: list[str]) -> None:
    """numba's version is none of that: the checksum of the statistics says what its loops compute."""
    before: Environment = {
        "device": "cpu",
        "torch_threads": 1,
        "packages": {"torch": "1", "transformers": "5", "numba": "1"},
        "statistics": "a",
    }
    here = dict(before) | changed
    assert differences(before, Environment(**here)) == said  # type: ignore[typeddict-item]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return Path(write_run(tmp_path / "run", Recipe(domains={"code": Domain(2, shortest=8, longest=9)}, gammas=(1,))).path)


def forge(run: Path, **fields: Any) -> None:
    """Change fields of a manifest, and sign it again."""
    data = json.loads((run / "manifest.json").read_text()) | fields
    (run / "manifest.json").write_text(json.dumps(data | {"digest": digest_of(data)}))


@pytest.mark.parametrize(
    "fields",
    [
        {"drafts": {}},
        {"drafts": []},
        {"shards": [1]},
        {"target": None},
        {"environment": {}},
        {"warnings": [{}]},
        {"truncated": None},
        {"part": None},
        {"part": "2/1"},
        {"staged": 10**9},
        {"staged": -1},
        {"files": {"documents.parquet": ["x", 1]}},
        {"config": {}},
        {"unknown": 1},
    ],
)
def test_a_signed_manifest_is_read_with_its_types_and_bounds(small: Path, fields: dict[str, Any]) -> None:
    """A stranger can sign what no run says."""
    forge(small, **fields)
    with pytest.raises(RunUnreadable):
        Run.open(small)


def test_the_files_of_a_stranger_s_run_are_all_that_is_read(small: Path, tmp_path: Path) -> None:
    """A table or a preset elsewhere on this machine is none of its content, and a pipe no file."""
    outside = tmp_path / "outside.json"
    outside.write_text('[{"model": "SECRET"}]')
    config = json.loads((small / "manifest.json").read_text())["config"]
    forge(small, config=config | {"costs": {"source": "table", "path": str(outside)}})
    with pytest.raises(CostsUnreadable) as caught:
        build_report(Run.open(small))
    assert "SECRET" not in caught.value.message
    forge(small, config=config | {"costs": {"source": "roofline", "accelerator": "h200", "preset": str(outside)}})
    with pytest.raises(RunUnreadable, match="the run does not hold"):
        Run.open(small)
    (small / "manifest.json").unlink()
    os.mkfifo(small / "manifest.json")
    with pytest.raises(RunUnreadable, match="not a regular file"):
        read_manifest(storage_of(small))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://user:pw@host:80/v1 fails", "http://***@host:80/v1 fails"),
        ("http://user:p@w@host/", "http://***@host/"),
        ("http://token@host", "http://***@host"),
        ("http://user:a-long-passw...", "http://***"),
        ("http://user:a-long ... password@host/x", "http://***"),
        ("https://h/x?key=pw&b=pw' is", "https://h/x?***' is"),
        ("https://h/x?key=pw ... &b=pw", "https://h/x?***"),
        ("/home/me/http:/user:pw@host", "/home/me/http:/***@host"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("hf://datasets/a/b@main/x.jsonl", "hf://datasets/a/b@main/x.jsonl"),
        ("what? is it", "what? is it"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, kept: str) -> None:
    assert without_secrets(text) == kept
    assert without_secrets({"a": [text, 1]}) == {"a": [kept, 1]}
    assert without_secrets((text,)) == (kept,)


def test_a_check_of_a_run_without_rows_says_what_is_missing(small: Path) -> None:
    """Not that its text has no single rule."""
    forge(small, status="running", shards=[], files={})
    for record in (small / "records").glob("rows-*"):
        record.unlink()
    with pytest.raises(RunMismatch, match="has no measured text yet") as caught:
        checked(small, None, None, None, {"alpha": ["0.5"]}, None, 0.0)
    assert "--resume" in caught.value.hint


@pytest.mark.parametrize("address", ["s3:/bucket/run", "gs:/bucket/run"])
def test_an_address_with_one_slash_is_no_folder(address: str) -> None:
    with pytest.raises(OptionInvalid, match="unsupported address"):
        storage_of(address)
