"""The wheel: built from the tree, installed into an empty environment without torch, and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import ROOT
from tests.synthetic import Recipe, write_run

HEAVY = ("torch", "transformers", "datasets")
pytestmark = pytest.mark.slow  # half a minute; tests of the package data, of reports without torch and of hints are quick
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")


def built(folder: Path) -> Path:
    """The wheel of a copy of the tree: building leaves files behind."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "alphaprof", tree / "alphaprof", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *OFFLINE]
    subprocess.run([*pip, "--wheel-dir", folder, tree], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def needed(names: Iterable[str]) -> set[str]:
    """These packages and what they need themselves, as far as it is installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            lines = requires(name) or []
        except ModuleNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line]
    return found


def linked(folder: Path, names: Iterable[str]) -> Path:
    """A folder with links to what these packages have installed here, and to nothing else."""
    folder.mkdir()
    for name in needed(names):
        installed = distribution(name)
        for first in {path.parts[0] for path in installed.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            link, place = folder / first, Path(str(installed.locate_file(first)))
            if place.exists() and not link.exists():
                link.symlink_to(place)
    return folder


class Environment:
    """A virtual environment with a wheel and nothing else, and how its `alphaprof` is called."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python, self.wheel = folder / "bin" / "python", wheel
        (self.packages,) = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", *OFFLINE]
        subprocess.run([*pip, f"{wheel}[profile,html]"], check=True)  # as docs/getting-started.md has it

    def add(self, folder: Path) -> None:
        (self.packages / f"{folder.name}.pth").write_text(f"{folder}\n")

    def run(self, *words: str | Path, code: int = 0, **variables: str) -> tuple[str, str]:
        """Standard output and standard error of a command, from another directory than the tree's."""
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [str(self.python.parent / "alphaprof"), *map(str, words)]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=clean | variables, cwd=self.packages.parent
        )
        assert result.returncode == code, (words, result.stdout, result.stderr)
        return result.stdout, result.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment with what alphaprof needs to report, and not with what its extras need."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = Environment(folder / "environment", built(folder))
    base = [line for line in requires("alphaprof") or [] if "extra ==" not in line]
    environment.add(linked(folder / "base", [re.match(r"[\w.-]+", line)[0] for line in base]))
    return environment


def test_the_wheel_holds_every_file_of_the_package(environment: Environment) -> None:
    """Schemas and templates among them: what is no Python is named in pyproject.toml, and easily forgotten."""
    files = [path for path in (ROOT / "alphaprof").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 150
    (name,) = re.findall(r"alphaprof-\S+?\.whl", (ROOT / "docs" / "getting-started.md").read_text())
    assert environment.wheel.name == name
    assert [path for path in files if not (environment.packages / path.relative_to(ROOT)).is_file()] == []


def test_the_wheel_reports_without_torch(environment: Environment, tmp_path: Path) -> None:
    write_run(tmp_path / "run", Recipe(drafts={"small": 0.0}))
    for name in HEAVY:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        assert subprocess.run([environment.python, "-c", code], check=False).returncode == 0
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    assert "small" in environment.run("report", tmp_path / "run", **cache)[0]
    report = json.loads(environment.run("report", tmp_path / "run", "--format", "json", **cache)[0])
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(report, json.loads(environment.run("schema", "report")[0]))
    assert list((tmp_path / "loops").rglob("*.nbi"))  # loops were compiled and kept


def test_the_wheel_says_which_packages_an_extra_lacks_and_works_with_them(environment: Environment, tmp_path: Path) -> None:
    """No package index has alphaprof: the line must work without one, so it names what the extra needs."""
    write_run(tmp_path / "run", Recipe(drafts={"small": 0.0}))
    page = ("report", tmp_path / "run", "--out", tmp_path / "report.html", "--out", tmp_path / "figure.svg")
    assert environment.run(*page, code=2)[1].splitlines()[1] == "hint: pip install 'jinja2>=3.1' 'matplotlib>=3.9'"
    lines = environment.run("doctor", HF_HUB_OFFLINE="1")[0].splitlines()
    assert "extra     html: missing: pip install 'jinja2>=3.1' 'matplotlib>=3.9'" in lines
    assert "problem   torch is not installed: models cannot run here, but reports can" in lines
    environment.add(linked(tmp_path / "html", ["jinja2", "matplotlib"]))
    environment.run(*page)
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    assert "extra     html: complete" in environment.run("doctor", HF_HUB_OFFLINE="1")[0].splitlines()


@pytest.mark.models
def test_the_wheel_profiles_and_reports_away_from_a_checkout(environment: Environment, tmp_path: Path) -> None:
    """As docs/getting-started.md has it, in an empty folder: init, a pilot, and its report as text, page and figure."""
    tiny.save_models(tmp_path)
    (tmp_path / "logged.jsonl").write_text("".join(json.dumps({"prompt": f"number {n} of a few"}) + "\n" for n in range(4)))
    environment.add(linked(tmp_path / "models", [*HEAVY, "jinja2", "matplotlib"]))
    profile, run = tmp_path / "my.yaml", tmp_path / "runs" / "my"
    said, _ = environment.run(
        *("init", tmp_path / "target", "--draft", tmp_path / "draft", "--data", tmp_path / "logged.jsonl", "--out", profile)
    )
    assert "number 0 of a few" in said
    short = ("--set", "continuation.max_new_tokens=8", "--set", "costs.budget=1", "--set", "target.dtype=float32")
    environment.run("profile", profile, "--out", run, "--limit", "2", *short)
    environment.run("report", run, "--out", tmp_path / "report.html", "--out", tmp_path / "verdict.svg")
    answer = json.loads(environment.run("report", run, "--format", "json")[0])["answer"]
    assert (answer["verdict"], answer["documents"]) == ("UNDECIDED", 2)
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "<svg" in (tmp_path / "verdict.svg").read_text()
