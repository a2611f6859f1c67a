"""Compiled loops are kept where that is allowed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from alphaprof.stats import compiled


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for loops that nobody has written to, as if this process had not asked for one yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    compiled.loops_folder.cache_clear()
    yield tmp_path / "cache"
    compiled.loops_folder.cache_clear()


def test_whether_loops_were_kept_is_known_before_they_are_compiled(cache: Path, tmp_path: Path) -> None:
    """Of the loop that is asked for, as its file is now."""
    (tmp_path / "loops_of_a_test.py").write_text(
        "from alphaprof.stats.compiled import compiled\n@compiled\ndef double(number):\n    return number * 2\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        double = importlib.import_module("loops_of_a_test").double
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("loops_of_a_test", None)
    assert compiled.compiling(double) == "compiling loops for this processor, about ten seconds, once per machine"
    assert double(3) == 6
    assert compiled.compiling(double) is None


@pytest.mark.parametrize("lack", ["home", "place"])
def test_without_a_place_every_process_compiles(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: str
) -> None:
    """And writes nothing, least of all beside the code."""

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    if lack == "home":
        monkeypatch.setattr(Path, "expanduser", homeless)
    else:
        cache.write_text("a file")
    module = tmp_path / "code" / "loops_of_a_test.py"
    module.parent.mkdir()
    module.write_text("def double(number):\n    return number * 2\n")
    names: dict[str, Any] = {}
    exec(compile(module.read_text(), str(module), "exec"), names)  # noqa: S102  (our own lines)
    double = compiled.compiled(names["double"])
    assert str(compiled.compiling(double)).endswith("the result cannot be cached, so every run recompiles")
    assert double(3) == 6
    assert list(module.parent.iterdir()) == [module]
