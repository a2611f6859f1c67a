"""Fingerprints by files: the hub's own hash where its cache has it, else each file read once, and what they tell apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.file_download import _create_symlink

from alphaprof.config.model_files import ModelFiles
from alphaprof.config.options import TargetOptions
from alphaprof.profiling.models import hashes
from alphaprof.profiling.models.hashes import hub_sha256, sha256_of, weight_files
from alphaprof.profiling.models.kinds import DraftModel, layer_skip
from alphaprof.profiling.models.load import Model, load_model
from alphaprof.report.pairing import surely_one
from alphaprof.run.manifest import FILES, PARTIAL, Quantisation
from tests.tiny import edited, llama

CONTENT = b"weights" * 100
SHA = hashlib.sha256(CONTENT).hexdigest()
OTHER = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "alphaprof" / "hashes.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read to be hashed."""
    found: list[Path] = []
    monkeypatch.setattr(hashes, "SETTLED", 0.0)  # nobody writes a file again here within the resolution of its time
    monkeypatch.setattr(hashes, "_hashed", lambda file, how=hashes._hashed: found.append(file) or how(file))
    return found


def old(path: Path, content: bytes = CONTENT) -> Path:
    """A file that was written an hour ago."""
    path.write_bytes(content)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def snapshot(hub: Path, name: str, etag: str, shared: bool = False) -> Path:
    """A file as huggingface_hub lays it into its cache; `shared`: blobs are shared between repositories."""
    repository = hub / "models--owner--name"
    blob, pointer = repository / "blobs" / etag, repository / "snapshots" / ("a" * 40) / name
    for folder in (blob.parent, pointer.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if shared:
        stored = hub / "blobs" / "ff" / ("f" * 64)  # as huggingface_hub 2 does (utils/_shared_blobs.py)
        stored.parent.mkdir(parents=True)
        stored.write_bytes(CONTENT)
        _create_symlink(str(stored), str(blob))
    else:
        blob.write_bytes(CONTENT)
    _create_symlink(str(blob), str(pointer))
    return pointer


@pytest.mark.parametrize("shared", [False, True])
def test_the_name_of_a_blob_is_its_hash_and_nothing_is_read(tmp_path: Path, read: list[Path], shared: bool) -> None:
    """Not that of the file a shared blob is a link to, which Xet names by a hash of its own."""
    pointer = snapshot(tmp_path / "hub", "model.safetensors", OTHER, shared)
    assert pointer.resolve().name == ("f" * 64 if shared else OTHER)
    assert sha256_of([pointer]) == [OTHER]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(pointer)  # as some lay out a model of their own
    (tmp_path / "moved").symlink_to(tmp_path / "hub")
    moved = tmp_path / "moved" / pointer.relative_to(tmp_path / "hub")
    assert sha256_of([tmp_path / "linked" / "model.safetensors", moved]) == [OTHER, OTHER]
    assert read == []


def test_other_files_are_hashed(tmp_path: Path, read: list[Path]) -> None:
    """Those that git stores have 40 digits; a link or a name alone says nothing."""
    git = snapshot(tmp_path / "hub", "small.safetensors", "b" * 40)
    named = old(tmp_path / OTHER)
    link = tmp_path / "link.safetensors"
    link.symlink_to(named)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert hub_sha256(loop) is None
    assert sha256_of([git, named, link]) == [SHA] * 3
    assert len(read) == 3


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    files = [old(tmp_path / name, name.encode()) for name in "abc"]
    expected = [hashlib.sha256(name.encode()).hexdigest() for name in "abc"]
    assert sha256_of(files) == sha256_of(files[::-1])[::-1] == expected
    assert sorted(read) == files
    read.clear()
    os.utime(files[0], (1, 1))
    old(files[1], b"x")
    assert sha256_of(files) == [expected[0], hashlib.sha256(b"x").hexdigest(), expected[2]]
    assert sorted(read) == files[:2]
    files[2].unlink()
    old(tmp_path / "d")
    sha256_of([tmp_path / "d"])
    assert {Path(entry[0]).name for entry in json.loads(cache.read_bytes())} == {"a", "b", "d"}  # what is gone is forgotten


def test_other_content_with_the_same_size_and_time_is_read(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    """Images and archives give all files one time; a file put in place of another one has an inode of its own."""
    path = old(tmp_path / "model.safetensors", b"weights 1")
    before = path.stat()
    assert sha256_of([path]) == [hashlib.sha256(b"weights 1").hexdigest()]
    path.write_bytes(b"weights 2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert sha256_of([path]) == [hashlib.sha256(b"weights 2").hexdigest()]
    assert hashes._key(path)[3] == path.stat().st_ino
    assert len(read) == 2


def test_a_file_that_was_just_written_is_not_kept(tmp_path: Path, cache: Path) -> None:
    """It may be written again within the resolution of its time."""
    path = tmp_path / "new"
    path.write_bytes(CONTENT)
    assert sha256_of([path]) == [SHA]
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[[1]]", b'{"a": 1}', b"[1]", b"\xff", b"null"])
def test_a_damaged_record_of_hashes_is_written_anew(tmp_path: Path, cache: Path, read: list[Path], content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    path = old(tmp_path / "a")
    assert sha256_of([path]) == sha256_of([path]) == [SHA]
    assert len(read) == 1
    assert os.listdir(cache.parent) == ["hashes.json"]


def no_home(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("XDG_CACHE_HOME")
    patch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home directory")))


def a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("in the way")


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "cache").mkdir()
    patch.setattr(hashes.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))


def full(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hashes.json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))


@pytest.mark.parametrize("broken", [no_home, a_file, read_only, full])
def test_nothing_fails_where_hashes_cannot_be_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    broken(tmp_path, monkeypatch)
    assert sha256_of([old(tmp_path / "a")]) == [SHA]
    assert not cache.parent.is_dir() or os.listdir(cache.parent) == []


def test_writers_of_several_processes_leave_a_whole_record(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    files = [old(tmp_path / f"{index}", str(index).encode()) for index in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda file: sha256_of([file])[0], files))
    assert found == [hashlib.sha256(str(index).encode()).hexdigest() for index in range(40)]
    kept = {entry[0]: entry[-1] for entry in json.loads(cache.read_bytes())}  # of most: one may lose what another kept
    assert kept.items() <= {str(file): digest for file, digest in zip(files, found, strict=True)}.items()
    assert os.listdir(cache.parent) == ["hashes.json"]


def saved(folder: Path, **how: Any) -> Path:
    """The files of a tiny model."""
    llama().save_pretrained(folder, **how)
    return folder


def loaded(folder: Path, dtype: str = "float32") -> Model:
    return load_model("target", TargetOptions(model=str(folder)), dtype)


@pytest.mark.models
def test_a_fingerprint_tells_files_settings_dtype_and_layers_apart(tmp_path: Path) -> None:
    first = loaded(saved(tmp_path / "a"))
    edited(saved(tmp_path / "c") / "config.json", rms_norm_eps=1e-3)
    assert first.digest.startswith(FILES)
    assert first.digest == loaded(saved(tmp_path / "b")).digest  # wherever they lie
    others = {
        "dtype": loaded(tmp_path / "a", "bfloat16").digest,
        "settings": loaded(tmp_path / "c").digest,
        "shards": loaded(saved(tmp_path / "d", max_shard_size="20KB")).digest,
        "skip 0": layer_skip("skip", first, [0]).digest,
        "skip 1": layer_skip("skip", first, [1]).digest,
        "skip nothing": layer_skip("skip", first, []).digest,
        "quantised": dataclasses.replace(first, quantised=Quantisation("gptq", 4, {})).digest,
    }
    changed = bytearray((tmp_path / "b" / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(changed))
    others["weights"] = loaded(tmp_path / "b").digest
    assert len({first.digest, *others.values()}) == len(others) + 1
    edited(tmp_path / "a" / "config.json", transformers_version="0", torch_dtype="bfloat16")
    assert loaded(tmp_path / "a").digest == first.digest


def test_files_are_those_that_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that config.json names, be it an index, before the single one, and this before an index; an adapter beside
    them is loaded as well. None where they are not here.
    """
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts", max_shard_size="20KB")
    options = {folder: TargetOptions(model=str(folder)) for folder in (whole, parts)}
    assert weight_files(options[whole]) == (whole / "model.safetensors",)
    assert len(weight_files(options[parts])) > 1
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert weight_files(options[whole]) == (whole / "model.safetensors",)
    assert weight_files(TargetOptions(model="/models/x.gguf")) == (Path("/models/x.gguf"),)
    edited(whole / "config.json", transformers_weights="other.safetensors")
    assert weight_files(options[whole]) == ()
    (whole / "other.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    assert weight_files(options[whole]) == (whole / "other.safetensors",)
    (whole / "own.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    edited(whole / "config.json", transformers_weights="own.safetensors.index.json")
    assert weight_files(options[whole]) == (whole / "other.safetensors",)
    (parts / "adapter_config.json").write_text("{}")
    assert weight_files(options[parts])[-1] == parts / "adapter_config.json"
    monkeypatch.setattr(hashes, "files_in", lambda _: ModelFiles.of(parts))
    assert weight_files(TargetOptions(model="owner/adapter")) == ()


def test_a_model_whose_files_are_not_known_is_not_surely_the_same() -> None:
    first, other = (DraftModel("target", llama(layers=layers), "model", "t").facts() for layers in (1, 2))
    assert first.fingerprint.startswith(PARTIAL)
    assert first.fingerprint != other.fingerprint  # by its settings
    assert not surely_one(first, first)
