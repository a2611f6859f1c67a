"""Prompts in an object store are read as those of a local file, and what is wrong is said in two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from alphaprof.config.paths import resolve
from alphaprof.config.profile import SourceOptions
from alphaprof.errors import AlphaprofError, DataUnreadable
from alphaprof.profiling.models.hub import require_data
from alphaprof.profiling.texts.rows import rows
from alphaprof.run.storage import storage_of
from tests.run.test_storage import Gate, gate, on_servers, server

__all__ = ["gate", "server"]  # fixtures
FRAME = pd.DataFrame({"prompt": ["007", "NA", "two\nlines", "größer"], "n": [1, 2, 3, 4]})


def said(error: AlphaprofError) -> str:
    """What is printed, which is two lines without a secret."""
    text = f"{error.message}\n{error.hint}"
    assert text.count("\n") == 1
    assert not re.search(r"AKID|sesame|Signature=|127\.0\.0\.1", text)
    return text


def source(path: str, **options: object) -> SourceOptions:
    return SourceOptions.model_validate({"domain": "code", "path": path, "prompt": "{prompt}"} | options)


def written(folder: Path, suffix: str) -> Path:
    """A file of a format."""
    path = folder / f"prompts{suffix}"
    if suffix == ".csv":
        FRAME.to_csv(path, index=False)
    elif suffix == ".parquet":
        FRAME.to_parquet(path)
    else:
        FRAME.to_json(path, orient="records", lines=True)
    return path


def put(path: Path) -> str:
    """The address of a copy."""
    storage_of("s3://bucket/data").put(path.name, path.read_bytes())
    return f"s3://bucket/data/{path.name}"


def refused(path: str, kind: type[AlphaprofError] = DataUnreadable) -> str:
    """What is said of a source before anything heavy begins, which is what is said where it is read."""
    texts = []
    for read in (lambda: require_data(path), lambda: list(rows(source(path)))):
        with pytest.raises(kind) as caught:
            read()
        texts.append(said(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


@on_servers
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_are_those_of_the_local_file(gate: Gate, tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, suffix)
    address = put(path)
    require_data(address)
    for options in ({}, {"shuffle_seed": 1}):
        assert list(rows(source(address, **options))) == list(rows(source(str(path), **options)))


def test_an_address_is_no_path_of_the_profile(tmp_path: Path) -> None:
    for address in ("s3://bucket/prompts.jsonl", "gs://bucket/prompts.csv", "abfs://container/a/b.parquet"):
        assert resolve(address, tmp_path) == address
    assert resolve("prompts.jsonl", tmp_path) == str(tmp_path / "prompts.jsonl")


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    for address in ("s3://KEY:SECRET@bucket/a.jsonl", "s3://bucket/a.jsonl?X-Signature=SECRET"):
        assert "SECRET" not in refused(address, AlphaprofError).replace("AWS_SECRET_ACCESS_KEY", "")


@on_servers
def test_what_is_not_there_is_said(gate: Gate) -> None:
    assert "s3://bucket/data/none.jsonl does not exist\ncheck the names" in refused("s3://bucket/data/none.jsonl")
    assert "the bucket elsewhere does not exist (NO_SUCH_BUCKET)\ncreate it, or check the name" in refused(
        "s3://elsewhere/prompts.jsonl"
    )
    assert "s3://bucket/data has no known format\ngive a file that ends with .jsonl" in refused("s3://bucket/data")
    assert "is not the address of a file\nuse only letters" in refused("s3://bucket/my prompts.jsonl")


@on_servers
def test_what_is_in_the_file_is_said_as_of_a_local_one(gate: Gate, tmp_path: Path) -> None:
    bad, blank = tmp_path / "bad.jsonl", tmp_path / "blank.jsonl"
    bad.write_bytes('{"prompt": "one"}\n'.encode("utf-16"))
    blank.write_text("\n")
    texts = []
    for each in (put(bad), str(bad)):
        with pytest.raises(DataUnreadable, match="UTF-16") as caught:
            list(rows(source(each)))
        texts.append(said(caught.value).replace(each, "FILE"))
    assert texts[0] == texts[1]
    assert [list(rows(source(each))) for each in (put(blank), str(blank))] == [[], []]
