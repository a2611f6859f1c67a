"""What shows early is said before torch is imported, and what the tokenizer shows before weights are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alphaprof.config.model_files import context_of
from alphaprof.config.starter import write_profile
from alphaprof.profiling import profile as profiling
from tests.commands.test_import import failure, invoke
from tests.loops import each
from tests.runs import profile_file
from tests.synthetic import write_run

# Commands one after another in one process; of each its exit code, stderr, and what it imported.
COMMANDS = """
import contextlib, io, json, sys
from alphaprof.cli.app import main
found = []
for command in json.loads(sys.argv[1]):
    sys.argv, said = ["alphaprof", *command], io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue(), sorted({"torch", "transformers", "datasets", "pyarrow"} & set(sys.modules))])
print(json.dumps(found))
"""
VLLM = ("--set", "costs={source: vllm}", "--set", "drafts={small: {kind: model, model: NAME}}")
# By case: more arguments than `profile PROFILE`, and what is said.
EARLY = {
    "existing run": (("--out", "run"), 6, "already holds a run"),  # before anything else has loaded pyarrow
    "data": (("--out", "new", "--set", "data.0.path=none.jsonl"), 3, "none.jsonl does not exist"),
    "data in a dry run": (("--dry-run", "--set", "data.0.path=none.jsonl"), 3, "none.jsonl does not exist"),
    "out": (("--out", "full"), 6, "exists and is not empty"),
    "out in a dry run": (("--out", "full", "--dry-run"), 6, "exists and is not empty"),
    "model": (("--out", "new", "--set", "target.model=./none"), 4, "does not exist"),
    "model in a dry run": (("--dry-run", "--set", "target.model=./none"), 4, "does not exist"),
    "run of another profile": (("--out", "run", "--resume"), 6, "was made with another profile"),
    "reused run": (("--out", "new", "--reuse-continuations", "full"), 6, "full"),
    "reused run of other data": (("--out", "new", "--reuse-continuations", "run"), 6, "was made with another profile"),
    "part": (("--out", "new", "--part", "3/2"), 2, "invalid --part"),
    "table": (("--out", "new", "--set", "costs={source: table, path: none.csv}"), 2, "none.csv"),
    "kind": (("--dry-run", *VLLM[:2], "--set", "vllm.python=/bin/false"), 4, "no method for draft skip of kind layer_skip"),
    "python": (("--dry-run", *VLLM, "--set", "vllm.python=/bin/false"), 4, "has no vLLM"),
    "server": (
        ("--dry-run", "--set", "continuation.writer=vllm", "--set", "vllm.url=http://127.0.0.1:9"),
        4,
        "http://127.0.0.1:9 does not answer",
    ),
    "workers": (("--out", "new", "--set", "execution.workers=2"), 2, "RAY_ADDRESS=ray://here:1 is not a node"),
}


@pytest.fixture(scope="module")
def said(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit code, stderr and heavy imports of each command."""
    folder = tmp_path_factory.mktemp("early")
    profile_file(folder, tiny)
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    write_run(folder / "run")
    commands = [
        ["profile", "profile.yaml", *(word.replace("NAME", str(tiny / "draft")) for word in words)]
        for words, _, _ in EARLY.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=folder,
        env={"PATH": "", "RAY_ADDRESS": "ray://here:1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(zip(EARLY, json.loads(done.stdout), strict=True))


@each("case", EARLY)
def test_what_shows_early_is_said_before_torch_is_imported(case: str, said: dict[str, Any]) -> None:
    code, words, loaded = said[case]
    heavy = [name for name in loaded if name != "pyarrow" or case == "existing run"]
    assert (code, EARLY[case][2] in words, words.count("\n"), heavy) == (EARLY[case][1], True, 2, []), words


@pytest.mark.parametrize("dry", [True, False])
def test_prompts_that_do_not_fit_are_found_before_weights_are_loaded(
    dry: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run writes few new tokens, but looks for documents that have all of them."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(profiling, "load_model", too_late)
    path = profile_file(tmp_path, tiny, continuation={"kind": "greedy", "max_new_tokens": 512})
    code, text = failure(invoke("profile", path, *(["--dry-run"] if dry else ["--out", str(tmp_path / "run")])))
    assert (code, "longer than the target's context of 512 tokens" in text) == (3, True), text


@pytest.mark.parametrize(
    ("config", "context", "tokens"),
    [
        ({"max_position_embeddings": 256}, 256, 128),
        ({"max_position_embeddings": 4096}, 4096, 256),
        ({"n_positions": 300}, 300, 150),
        ({"max_position_embeddings": 1024, "text_config": {"max_position_embeddings": 64}}, 64, 32),
        ({}, None, 256),
        ({"max_position_embeddings": True}, None, 256),
    ],
)
def test_a_first_profile_leaves_half_of_the_context_for_prompts(
    config: dict[str, Any], context: int | None, tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert context_of(tmp_path / "model") == context
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    source = {"path": str(tmp_path / "a.jsonl"), "prompt": "{prompt}"}
    write_profile(str(tmp_path / "model"), [], {"a": source}, tmp_path / "profile.yaml")
    assert f"max_new_tokens: {tokens}}}" in (tmp_path / "profile.yaml").read_text()


def test_the_context_of_a_gguf_file_is_in_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\x14\x00\x00\x00\x00\x00\x00\x00llama.context_length\x04\x00\x00\x00\x00\x20\x00\x00rest")
    assert context_of(path) == 8192
    path.write_bytes(b"GGUF")
    assert context_of(path) is None
