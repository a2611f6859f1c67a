"""The structure that the project promises: who may import what, how long things get, and that nothing heavy loads early."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "alphaprof").rglob("*.py"))

# One home per library: the only modules that may import it (a folder stands for all of its modules).
HOMES = {
    "torch": ("profiling",),
    "transformers": (
        "profiling/models.py",
        "profiling/drafts.py",
        "profiling/head.py",
        "profiling/steppers.py",
        "profiling/caches.py",
        "profiling/vocabulary.py",  # for the type of a tokenizer, like the next one
        "profiling/corpus.py",
        "profiling/templates.py",
        "profiling/pipeline.py",
        "profiling/preflight.py",
        "profiling/inspection.py",
        "profiling/shards.py",
        "profiling/phases.py",
        "profiling/continuations.py",
    ),
    "datasets": ("profiling/reading.py",),
    "huggingface_hub": ("profiling/hub.py",),
    "typer": ("cli.py", "cli_exchange.py", "cli_models.py", "cli_support.py"),
    "rich": (
        "report/tables.py",
        "report/terminal.py",
        "report/terminal_theory.py",
        "report/terminal_costs.py",
        "report/terminal_causes.py",
        "report/latency.py",
        "report/check_text.py",
        "report/comparison.py",
        "report/counters.py",
        "report/prediction.py",
        "report/preflight_text.py",
        "report/rollout_text.py",
        "report/trees_text.py",
        "report/validation.py",
        "report/render.py",
        "progress.py",
    ),
    "plotly": ("report/html/page.py",),
    "jinja2": ("report/html/page.py",),
    "yaml": ("loader.py",),
    "pydantic": ("config.py", "options.py", "loader.py"),
    "scipy": ("analysis",),
    "numba": ("compiled.py",),
    "llvmlite": ("compiled.py",),
    "triton": ("profiling/triton_kernels.py",),
}
# Imports point one way: a folder may use those named here (and the modules at the top, but for cli).
LAYERS = {
    "log": {"log"},
    "analysis": {"analysis", "log"},
    "report": {"report", "analysis", "log"},
    "profiling": {"profiling", "analysis", "log"},
}

RUNS_MODELS = (
    *("statistics", "fused", "row_loops", "processing", "extras", "head", "scoring", "record", "shards", "trial", "memory"),
    *("models", "drafts", "lookup", "corpus", "batching", "continuations", "caches", "choices", "drafting"),
    *("verification", "speculation", "decoding", "steppers", "latency"),
    *(("triton_statistics",) if importlib.util.find_spec("triton") else ()),
)


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def place(path: Path) -> str:
    return path.relative_to(ROOT / "alphaprof").as_posix()


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_every_library_has_one_home(path: Path) -> None:
    strays = [
        name
        for name in imports(path)
        if (homes := HOMES.get(name.split(".")[0])) and not any(place(path).startswith(home) for home in homes)
    ]
    assert strays == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name in LAYERS], ids=place)
def test_imports_point_one_way(path: Path) -> None:
    folders = {name.split(".")[1] for name in imports(path) if name.startswith("alphaprof.") and name.count(".") >= 2}
    tops = {name for name in imports(path) if name.startswith("alphaprof.cli") or name == "alphaprof.progress"}
    assert folders <= LAYERS[path.parent.name]
    assert tops == set()


@pytest.mark.parametrize("path", MODULES, ids=place)
def test_every_function_can_be_read_at_once(path: Path) -> None:
    """Modules and classes are as large as the thing is: caps on them made files that nobody would look for."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 50, node.name


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["--help"],
            ["profile", "--help"],
            ["report", "--help"],
            ["validate", "--help"],
            ["rollout", "--help"],
            ["schema"],
        ),
        ["import", "vllm", "--help"],
        ["import", "sglang", "--help"],
        ["import", "prometheus", "--help"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from alphaprof.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_models_run_without_the_packages_of_profiles_and_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, scoring, decoding and timing can be tried where neither pydantic nor datasets is installed. What this session
    has imported already is put aside, and comes back at the end.
    """
    for name in [name for name in sys.modules if name.split(".")[0] in ("alphaprof", "pydantic", "datasets")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pydantic", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # any import of it fails
    try:
        for name in RUNS_MODELS:
            importlib.import_module(f"alphaprof.profiling.{name}")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "alphaprof"]:
            del sys.modules[name]


def test_tests_and_product_do_not_know_the_workplace() -> None:
    words = [left + right for left, right in (("../sha", "red"), ("/wo", "rk/"), ("pypi", ".org"))]
    files = [path for folder in ("alphaprof", "tests", "scripts", "profiles", "docs") for path in (ROOT / folder).rglob("*")]
    texts = {
        path: path.read_text()
        for path in [*files, ROOT / "README.md"]
        if path.suffix in (".py", ".md", ".sh", ".yaml", ".jsonl")
    }
    assert {str(path) for path, text in texts.items() if any(word in text for word in words)} == set()
