"""A dry run: what it finds of models, prompts and data, what stops it, and that it writes nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from alphaprof.commands import dry_run
from alphaprof.commands.dry_run import DryRun, Finding
from alphaprof.config.load import load_profile
from alphaprof.errors import DiskFull
from tests.conftest import Runner
from tests.runs import NEW_TOKENS, Silent, profile_file
from tests.tiny import llama, tokenizer

FINE = "; the run can start. Nothing was written."
ROOFLINE = {"source": "roofline", "accelerator": "h100-sxm"}
BOS = 257  # <pad> of the tiny tokenizers, here the token that begins texts


def found(answer: DryRun, name: str, subject: str | None = None) -> list[Finding]:
    return [finding for finding in answer.checks if finding.name == name and subject in (None, finding.subject)]


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> DryRun:
    """A dry run of a profile with drafts of every kind; one prompt of `short` comes twice."""
    folder = tmp_path_factory.mktemp("looked")
    path = profile_file(folder, tiny)
    rows = (folder / "short.jsonl").read_text().splitlines()
    (folder / "short.jsonl").write_text("\n".join([rows[0], *rows]) + "\n")
    before = snapshot(folder)
    answer = dry_run.dry_run(load_profile(path, ["data.0.limit=4", "data.0.chat=false"]), str(folder / "run"), Silent())
    assert snapshot(folder) == before
    return answer


@pytest.mark.models
def test_a_dry_run_sees_padding_contexts_raw_prompts_and_repeated_ones(looked: DryRun) -> None:
    (wide,) = found(looked, "vocabulary", "wide")
    assert wide.cause == "320 logits, the last 60 of them padding, left out"
    assert [each.level for each in found(looked, "context", "close")] == ["ok"]
    (brief,) = found(looked, "context", "brief")
    assert (brief.level, brief.cause.split(";")[0]) == ("note", "24 tokens")
    assert found(looked, "chat template", "run")[0].level == "note"
    assert "1 of 11 prompts seen are repeats" in found(looked, "data", "run")[-1].cause
    assert looked.conclusion.endswith(FINE)


@pytest.mark.models
def test_a_tokenizer_with_more_tokens_than_the_target_has_embeddings_is_told_once(tiny: Path, tmp_path: Path) -> None:
    larger = tokenizer()
    larger.add_tokens(["<tool>", "<call>"])
    larger.save_pretrained(shutil.copytree(tiny / "target", tmp_path / "target"))
    changes = [f"target.model={tmp_path / 'target'}", "drafts={ngram: {kind: prompt_lookup}}"]
    answer = dry_run.dry_run(load_profile(profile_file(tmp_path, tiny), changes), None, Silent())
    (told,) = [each for each in found(answer, "vocabulary") if each.level == "note"]
    assert "has ids up to 261, but the target has embeddings for 260 ids only" in told.cause
    assert "resized" in str(told.remedy)


@pytest.mark.models
def test_what_a_run_takes_goes_by_all_documents_and_their_new_tokens(looked: DryRun) -> None:
    assert f"for 11 documents (at most {11 * NEW_TOKENS} positions)" in found(looked, "time")[0].cause
    (disk,) = found(looked, "disk")
    assert disk.level == "ok"
    size, unit = re.findall(r"about ([\d.]+) (bytes|kB)", disk.cause)[0]
    assert 50 < float(size) * {"bytes": 1, "kB": 1e3}[unit] / (11 * NEW_TOKENS) < 2000  # bytes of a position in tiny shards
    assert "are free" in disk.cause
    assert found(looked, "memory")[0].cause.startswith("the trial used ")
    assert "steps can be timed" in found(looked, "costs", "run")[0].cause


def test_an_unknown_number_of_documents_and_a_full_disk_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(latency=lambda: None)
    plan: Any = SimpleNamespace(
        options=SimpleNamespace(costs=SimpleNamespace(source="none")),
        run=run,
        target=SimpleNamespace(device=torch.device("cpu")),
    )
    stream = list(dry_run._need_checks(plan, None, None))
    assert (stream[0].level, stream[0].remedy) == ("note", "give the source a limit, or use --limit")
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    needs = (4, 40, 1.0, 10**7)
    disk = next(each for each in dry_run._need_checks(plan, needs, str(tmp_path / "a" / "b")) if each.name == "disk")
    assert (disk.level, disk.cause) == ("problem", "at most about 10 MB; 1 MB are free")
    answer = DryRun.of((disk,))
    assert answer.conclusion.startswith("1 problem and 0 notes; the run would fail: disk. ")
    with pytest.raises(DiskFull, match="1 MB are free") as error:
        answer.require_runnable()
    assert error.value.exit_code == 5


@pytest.mark.parametrize(
    ("begins", "words", "level"),
    [(0, "0 of 3 prompts begin with BOS", "note"), (1, "3 of 3", "ok"), (2, "3 of them twice", "problem")],
)
def test_bos_is_found_missing_or_twice(begins: int, words: str, level: str) -> None:
    fast = tokenizer()
    fast.bos_token = "<pad>"
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", BOS)])
    plan: Any = SimpleNamespace(tokenizer=fast, options=SimpleNamespace(data=[]))
    seen: Any = [SimpleNamespace(prompt=np.array([BOS] * begins + [5, 6]))] * 3
    (finding,) = [each for each in dry_run._prompt_checks(plan, seen) if each.name == "bos"]
    assert finding.level == level
    assert words in finding.cause


@pytest.fixture
def ordinary(tiny: Path, tmp_path: Path) -> Path:
    """A profile whose target is a copy that a test may change."""
    shutil.copytree(tiny / "target", tmp_path / "target")
    drafts = {"skip": {"kind": "layer_skip", "drop_layers": [2]}}
    return profile_file(
        tmp_path, tiny, target={"model": "./target", "dtype": "float32"}, drafts=drafts, costs=ROOFLINE, gammas=[1, 2]
    )


@pytest.mark.models
def test_a_dry_run_prints_its_checks_and_ends_in_0(ordinary: Path, console_script: Runner) -> None:
    before = snapshot(ordinary.parent)
    code, text, _ = console_script("profile", ordinary, "--dry-run", "--limit", 2)
    assert code == 0
    assert text.count("in 2 documents seen") == 2
    first, _, *lines = text.splitlines()
    assert first == f"0 problems and 1 note{FINE}"
    assert [line.split(" ")[0] for line in lines] == ["note", "", "", *["ok"] * (len(lines) - 5), "", "all"]
    code, text, _ = console_script("profile", ordinary, "--dry-run", "--format", "json", "--out", ordinary.parent / "run")
    assert (code, json.loads(text)["format"]) == (0, "alphaprof-preflight")
    assert snapshot(ordinary.parent) == before


@pytest.mark.models
def test_a_dry_run_without_enough_disk_prints_its_checks_and_ends_in_5(
    ordinary: Path, console_script: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    code, text, errors = console_script("profile", ordinary, "--dry-run", "--limit", 2, "--out", ordinary.parent / "run")
    assert (code, "the run would fail: disk. Nothing was written." in text) == (5, True)
    assert errors.splitlines()[-2].startswith("error: the run would fail: disk: at most about ")


@pytest.mark.models
def test_what_would_stop_the_run_stops_the_dry_run(ordinary: Path, console_script: Runner) -> None:
    broken = llama()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    broken.save_pretrained(ordinary.parent / "target")
    code, text, errors = console_script("profile", ordinary, "--dry-run")
    assert (code, text) == (4, "")
    assert "the logits of target hold NaN or infinity" in errors
    taken = ordinary.parent / "target"
    code, _, errors = console_script("profile", ordinary, "--dry-run", "--out", taken)
    assert code == 6
    assert f"{taken} exists and is not empty" in errors
