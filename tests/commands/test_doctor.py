"""`alphaprof doctor`: what it says of a machine, where things are missing, and that it tells no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest

from alphaprof import version as installed
from alphaprof.commands import doctor
from tests.conftest import ROOT, Runner


def test_the_text_has_what_a_bug_report_needs(console_script: Runner) -> None:
    code, output, errors = console_script("doctor")
    assert (code, errors) == (0, "")
    parts = (f"alphaprof {installed.__version__}", "python ", "torch==", "numpy==", "cpu, ", "threads of torch", "extra ")
    assert [part for part in parts if part not in output] == []


def test_without_torch_everything_else_is_told(tmp_path: Path) -> None:
    """torch is there, and broken: the finding is the answer, not a traceback."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch for you')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "alphaprof", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    labels = {line[: doctor.LABEL].strip() for line in result.stdout.splitlines()} - {""}
    assert labels == {"alphaprof", "python", "packages", "problem", "extra"}
    assert "torch cannot be used: no torch for you" in result.stdout


def test_the_json_has_the_same(console_script: Runner) -> None:
    code, output, _ = console_script("doctor", "--format", "json")
    answer = json.loads(output)
    assert (code, answer["format"], answer["alphaprof"], answer["problem"]) == (
        0,
        "alphaprof-doctor",
        installed.__version__,
        None,
    )
    assert answer["packages"]["torch"] == version("torch")
    assert list(answer["extras"]) == list(installed.EXTRAS)


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
        ("html", ["matplotlib>=3.9"]),
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
    assert {str(each) for each in installed.requirements("html")} == {"jinja2>=3.1", "matplotlib>=3.9"}


def test_every_extra_for_users_is_known() -> None:
    assert all(installed.requirements(extra) for extra in installed.EXTRAS)
    assert set(metadata("alphaprof").get_all("Provides-Extra", [])) == {*installed.EXTRAS, "test", "dev"}
