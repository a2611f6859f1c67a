"""The GPU check: all of its parts on tiny shapes without a GPU, and what it does about parts that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_check
from scripts.gpu.setting import Line, Setting
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.models
def test_every_part_runs_on_tiny_shapes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    lines = written["lines"]
    assert {line["part"] for line in lines} == set(gpu_check.PARTS)
    assert [line["text"] for line in lines if line["ok"] is False or line["text"].startswith(("not ", "cut short"))] == []
    checked = {line["part"] for line in lines if line["ok"]}
    assert checked >= {part for part in gpu_check.PARTS if part.startswith("correctness:")} | {"memory:halving"}
    page = (tmp_path / "gpu_check.txt").read_text()
    assert all(" ".join(line["text"].split()) in " ".join(page.split()) for line in lines)
    assert max(map(len, page.splitlines())) <= gpu_check.WIDTH
    assert page.count("mean nothing") == 1
    assert written["machine"]["torch"] == torch.__version__.split("+")[0] or written["machine"]["torch"] == torch.__version__


def test_a_part_that_fails_is_recorded_with_what_it_saw_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def part(_: Setting) -> Iterator[Line]:
        yield Line("the first line", ok=True)
        raise ValueError("out of order")

    monkeypatch.setattr(gpu_check, "import_module", lambda name: SimpleNamespace(columns=part))
    record = gpu_check.Record(tmp_path, {})
    setting = Setting(torch.device("cpu"), True, gpu_check.time.monotonic() + 60, tmp_path)
    gpu_check.run("correctness:columns", setting, record)
    assert [(line["ok"], line["text"]) for line in record.lines] == [
        (True, "the first line"),
        (False, "broke off with ValueError: out of order"),
    ]
    assert record.failed
    assert len(json.loads((tmp_path / "gpu_check.json").read_text())["lines"]) == 2


def test_a_gpu_that_is_lost_ends_the_run_with_the_parts_that_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def part(_: Setting) -> Iterator[Line]:
        yield Line("seen", ok=True)

    def clean(_: Setting) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Setting, "clean", clean)
    monkeypatch.setattr(gpu_check, "import_module", lambda name: SimpleNamespace(columns=part))
    record = gpu_check.Record(tmp_path, {})
    setting = Setting(torch.device("cpu"), True, gpu_check.time.monotonic() + 60, tmp_path)
    gpu_check.run_all(["correctness:columns", "speed:scoring", "memory:waiting"], setting, record)
    assert [line["ok"] for line in record.lines] == [True, False]
    assert record.lines[1]["text"].endswith("in a new process: --parts scoring,waiting")
