"""`alphaprof doctor`: what it says of a machine, where things are missing, and that it tells no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import jsonschema
import pytest

from alphaprof import version as installed
from alphaprof.commands.doctor import build
from alphaprof.render.json import json_schema
from tests.conftest import ROOT, Runner

LABELS = ("alphaprof", "python", "packages", "speed", "extra")


def doctor(folder: Path, without: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """What a new process prints, by label; packages are missing where an import of them fails and nothing finds them."""
    for name in without:
        package = folder / "missing" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"raise ImportError('no {name} for you')")
    paths = os.pathsep.join([str(folder / "missing"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alphaprof", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    found: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        label, text = line[: build.LABEL].strip(), line[build.LABEL :]
        found.setdefault(label or list(found)[-1], []).append(text)
    return found


def test_the_text_has_what_a_bug_report_needs(tmp_path: Path) -> None:
    lines = doctor(tmp_path)
    assert tuple(lines) == LABELS
    assert lines["alphaprof"] == [installed.__version__]
    assert "torch " in lines["packages"][0]
    parts = ("cpu (1 thread): float32 ", "bfloat16 ", "float16 ", "GFLOP/s", "dtype auto keeps")
    assert [part for part in parts if part not in lines["speed"][0]] == []


def test_without_torch_everything_else_is_told(tmp_path: Path) -> None:
    """torch is there, and broken: the finding is the answer, not a traceback."""
    lines = doctor(tmp_path, without=("torch",))
    assert tuple(lines) == LABELS
    assert lines["speed"] == ["torch cannot be used: no torch for you"]


def test_the_json_keeps_to_its_schema(console_script: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = console_script("doctor", "--format", "json")
    assert code == 0
    answer = json.loads(output)
    jsonschema.validate(answer, json.loads(json_schema("doctor")))
    assert set(answer["devices"][0]["gflops"]) == {"float32", "bfloat16", "float16"}
    assert min(answer["devices"][0]["gflops"].values()) > 0
    assert answer["extras"][0]["extra"] == "profile"


INSTALLED = {"datasets": "4.3.0", "torch": "2.11.0+cpu", "transformers": "5.17.2", "gguf": "0.18.0", "jinja2": "3.10"}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(installed, "version_of", version)


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ("profile", []),
        ("gguf", ["transformers<6,>=5.17,>=5.23", "accelerate>=1.10", "gguf>=0.19"]),
        ("html", ["plotly>=6"]),
        ("multi-device", ["accelerate>=1.10"]),
    ],
)
def test_an_extra_lacks_what_is_absent_or_too_old(extra: str, missing: list[str], packages: None) -> None:
    assert [str(each) for each in installed.missing(extra)] == missing
    named = missing or installed.requirements(extra)
    assert installed.install_line(extra) == "pip install " + " ".join(f"'{each}'" for each in named)


def test_a_checkout_that_is_not_installed_has_the_same_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pyproject.toml says them; the metadata of an installed package do otherwise."""

    def absent(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    before = {extra: set(installed.requirements(extra)) for extra in installed.EXTRAS}
    monkeypatch.setattr(installed, "requires", absent)
    assert {extra: set(installed.requirements(extra)) for extra in installed.EXTRAS} == before
    assert {str(each) for each in installed.requirements("html")} == {"jinja2>=3.1", "plotly>=6"}


def test_every_extra_for_users_is_known() -> None:
    assert all(installed.requirements(extra) for extra in installed.EXTRAS)
    assert set(metadata("alphaprof").get_all("Provides-Extra", [])) == {*installed.EXTRAS, "test", "dev"}
