"""`alphaprof doctor`: what it says of a machine, where things are missing, and that it tells no secret."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jsonschema
import pytest

from alphaprof import version as installed
from alphaprof.commands.doctor import build
from alphaprof.commands.doctor.build import build_doctor
from alphaprof.profiling.models import hub
from alphaprof.render.answer import answer_text
from alphaprof.render.json import json_schema, render_json
from alphaprof.report.format import data_size
from tests.conftest import ROOT, Runner

LABELS = ("alphaprof", "python", "packages", "cpu", "threads", "speed", "memory", "disk", "hub", "loops", "extra")


def doctor(folder: Path, without: tuple[str, ...] = (), **variables: str) -> dict[str, list[str]]:
    """What a new process prints, by label; packages are missing where an import of them fails and nothing finds them."""
    for name in without:
        package = folder / "missing" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"raise ImportError('no {name} for you')")
    paths = os.pathsep.join([str(folder / "missing"), str(ROOT)])
    ours = {name: value for name, value in os.environ.items() if name not in build.VARIABLES}  # other tests set some
    environment = ours | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, "-m", "alphaprof", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    found: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        label, text = line[: build.LABEL].strip(), line[build.LABEL :]
        found.setdefault(label or list(found)[-1], []).append(text)
    return found


def test_the_text_has_everything_that_a_bug_report_needs(tmp_path: Path) -> None:
    lines = doctor(tmp_path, OMP_NUM_THREADS="1", HF_ENDPOINT="https://me:secret@hub.example")
    assert tuple(lines) == LABELS
    assert lines["alphaprof"] == [f"{installed.__version__} in {build._without_home(str(ROOT / 'alphaprof'))}"]
    assert "torch " in lines["packages"][0]
    assert lines["threads"][0].startswith("torch computes with 1; OMP_NUM_THREADS=1")
    parts = ("cpu: float32 ", "bfloat16 ", "float16 ", "GFLOP/s", "dtype auto keeps")
    assert [part for part in parts if part not in lines["speed"][0]] == []
    assert lines["hub"] == ["not asked, since HF_HUB_OFFLINE is set: local and downloaded models only"]
    assert "secret" not in str(lines)


def test_without_torch_everything_else_is_told(tmp_path: Path) -> None:
    """torch is there, and broken: the finding is the answer, not a traceback."""
    lines = doctor(tmp_path, without=("torch",))
    assert tuple(lines) == LABELS
    assert lines["speed"] == ["torch cannot be used: no torch for you"]
    assert lines["threads"] == ["OMP_NUM_THREADS=1, HF_HUB_OFFLINE=1"]


def test_a_broken_client_of_the_hub_is_said_like_a_broken_torch(tmp_path: Path) -> None:
    lines = doctor(tmp_path, without=("torch", "huggingface_hub"))
    assert tuple(lines) == LABELS
    assert lines["hub"] == ["huggingface_hub cannot be used: no huggingface_hub for you"]
    assert len(lines["disk"]) == 1  # where it keeps models is not known


def test_folders_do_not_tell_the_users_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The home may be a link, and a folder that only begins like it is another one."""
    home = ROOT.parent
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "link" / "hf"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", f"{home}-other/loops")
    monkeypatch.setattr(hub, "cache_folder", lambda: home / "hf" / "hub")
    monkeypatch.setattr("alphaprof.stats.compiled.loops_folder", lambda: home / "hf" / "loops")
    monkeypatch.setattr(hub, "endpoint", lambda: f"file://{home}")

    def broken() -> None:
        raise ImportError(f"{home}/lib/libtorch.so: no such file")

    monkeypatch.setattr("alphaprof.commands.doctor.measure.devices", broken)
    found = build_doctor()
    assert found.location == f"~/{ROOT.name}/alphaprof"
    assert found.hub_cache == "~/hf/hub"
    assert found.torch_problem == "torch cannot be used: ~/lib/libtorch.so: no such file"
    assert found.loops.endswith(" are kept in ~/hf/loops")
    assert found.variables["HF_HOME"] == "~/hf"
    assert found.variables["NUMBA_CACHE_DIR"] == f"{home}-other/loops"
    for form in ("terminal", "json"):
        assert re.findall(rf"{home}(?!-other)|{tmp_path}", answer_text(found, form)) == []


@pytest.mark.parametrize("home", ["/", ""])
def test_a_user_without_a_home_of_their_own_sees_every_folder_whole(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where nothing of it is a name."""
    monkeypatch.setenv("HOME", home)
    assert build._without_home("/usr/lib/x and y") == "/usr/lib/x and y"


def test_a_home_that_cannot_be_written_is_said_with_what_helps(tmp_path: Path) -> None:
    """A file stands where the folder would be: nobody, root included, can make it."""
    (tmp_path / "home").write_text("")
    home = {"HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "home" / "hf")}
    lines = doctor(tmp_path, without=("torch",), XDG_CACHE_HOME="", NUMBA_CACHE_DIR="", **home)
    assert lines["loops"] == [
        "compiled anew by every process, since the cache folder cannot be written: set NUMBA_CACHE_DIR"
    ]
    assert lines["disk"][1].endswith("cannot be written: set HF_HOME to another folder")


def test_the_json_keeps_to_its_schema(console_script: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = console_script("doctor", "--format", "json")
    assert code == 0
    answer = json.loads(output)
    jsonschema.validate(answer, json.loads(json_schema("doctor")))
    assert set(answer["devices"][0]["gflops"]) == {"float32", "bfloat16", "float16"}
    assert min(answer["devices"][0]["gflops"].values()) > 0
    assert answer["extras"][0]["extra"] == "profile"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (True, "hub.example answers"),
        (False, "hub.example does not answer: local and downloaded models only"),
    ],
)
def test_the_hub_is_asked_and_shown_without_a_password(answers: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "endpoint", lambda: "https://me:secret@hub.example")
    monkeypatch.setattr(hub, "hub_answers", lambda: answers)
    assert build_doctor().hub == f"https://{said}"


def test_limits_of_a_control_group_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a container: one and a half cores' worth of time."""
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000\n", "/sys/fs/cgroup/memory.max": "2000000000\n"}
    monkeypatch.setattr(build, "_text", lambda path: files.get(str(path), ""))
    found = build_doctor()
    assert (found.cpu_limit, found.memory_limit, found.memory_free) == (1.5, 2_000_000_000, None)
    text = answer_text(found, "terminal")
    assert "; the control group allows the time of 1.5" in text
    assert f"unknown available; the control group allows {data_size(2e9)}" in text
    files["/sys/fs/cgroup/cpu.max"] = files["/sys/fs/cgroup/memory.max"] = "max 100000\n"
    unlimited = build_doctor()
    assert (unlimited.cpu_limit, unlimited.memory_limit) == (None, None)
    assert render_json(unlimited)


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
    assert installed.missing(extra) == missing
    named = missing or installed.requirements(extra)
    assert installed.install_line(extra) == "pip install " + " ".join(f"'{each}'" for each in named)


def test_a_checkout_that_is_not_installed_has_the_same_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pyproject.toml says them; the metadata of an installed package do otherwise."""
    before = {extra: installed.requirements(extra) for extra in installed.EXTRAS}

    def absent(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "requires", absent)
    installed._declared.cache_clear()
    try:
        as_sets = {extra: {frozenset(each.split(",")) for each in installed.requirements(extra)} for extra in before}
        assert {extra: {installed.package(each) for each in installed.requirements(extra)} for extra in before} == {
            extra: {installed.package(each) for each in lines} for extra, lines in before.items()
        }
        assert as_sets["html"] == {frozenset({"jinja2>=3.1"}), frozenset({"plotly>=6"})}
    finally:
        installed._declared.cache_clear()


def test_every_extra_for_users_is_known() -> None:
    assert all(installed.requirements(extra) for extra in installed.EXTRAS)
    assert set(installed._declared()) == {*installed.EXTRAS, "test", "dev"}
