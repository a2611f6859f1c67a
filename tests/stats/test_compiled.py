"""Compiled loops are kept where that is allowed, and another process compiles them in which nothing of the user's runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from alphaprof.stats import compiled
from alphaprof.stats.compiled import compile_elsewhere


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for loops that nobody has written to, as if this process had not asked for one yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    compiled.loops_folder.cache_clear()
    yield tmp_path / "cache"
    compiled.loops_folder.cache_clear()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `loops_of_a_test`, to be written, which the other process finds by PYTHONPATH as it is here."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "loops_of_a_test.py"


def marks(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("loops_of_a_test-*")]


def test_nothing_of_the_working_directory_is_imported(
    cache: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a data folder; the package is found all the same, and its loops are compiled once."""
    module.write_text(
        "import numba, alphaprof.stats.compiled\nfrom pathlib import Path\n"
        f"def compile_all(): (Path({str(tmp_path)!r}) / 'compiled').open('a').write(numba.__version__ + ' ')"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numba.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path / "data")
    said: list[str] = []
    for _ in range(2):
        compile_elsewhere("loops_of_a_test", str(module), said.append)
    assert said == ["compiling loops for this processor, about ten seconds, once per machine"]
    assert not (tmp_path / "executed").exists()
    assert (tmp_path / "compiled").read_text() == numba.__version__ + " "
    assert len(marks(cache)) == 1


def test_a_process_that_fails_leaves_no_mark(cache: Path, module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of its own, or because it takes too long: the next run tries again."""
    module.write_text("def compile_all(): raise ValueError")
    compile_elsewhere("loops_of_a_test", str(module))
    assert (cache / "alphaprof").is_dir()
    assert marks(cache) == []
    module.write_text("import time\ndef compile_all(): time.sleep(60)")
    monkeypatch.setattr(compiled, "PATIENCE", 0.5)
    compile_elsewhere("loops_of_a_test", str(module))
    assert marks(cache) == []


@pytest.mark.parametrize("lack", ["home", "place"])
def test_without_a_place_every_process_compiles(
    cache: Path, module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: str
) -> None:
    """And writes nothing, least of all beside the code."""

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    if lack == "home":
        monkeypatch.setattr(Path, "expanduser", homeless)
    else:
        cache.write_text("a file")
    monkeypatch.setattr(subprocess, "run", refused)
    module.write_text("def compile_all(): ...")
    said: list[str] = []
    compile_elsewhere("loops_of_a_test", str(module), said.append)
    assert len(said) == 1
    assert said[0].endswith("the result cannot be cached, so every run recompiles")
    module.write_text("def double(number):\n    return number * 2\n")
    names: dict[str, Any] = {}
    exec(compile(module.read_text(), str(module), "exec"), names)  # noqa: S102  (our own lines)
    assert compiled.compiled(names["double"])(3) == 6
    assert list(module.parent.iterdir()) == [module]
