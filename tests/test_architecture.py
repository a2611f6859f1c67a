"""The structure that the project promises: who may import what, and what loads early."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest

from tests.loops import each

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "alphaprof").rglob("*.py"))

# In a command's room models run in the file named for it, and nowhere else.
IN_ROOMS = ("commands/*/measure.py",)
# One home per library: folders that may import it.
HOMES = {
    "torch": ("profiling/*", *IN_ROOMS, "commands/doctor.py", "commands/dry_run.py"),
    "transformers": ("profiling/*", *IN_ROOMS),
    "datasets": ("profiling/texts/*",),
    "huggingface_hub": ("profiling/models/*",),
    "typer": ("cli/*",),
    "rich": ("render/*", "report/formats/*", "commands/*", "cli/*"),
    "peft": ("profiling/models/*",),
    "matplotlib": ("report/formats/figures.py",),
    "jinja2": ("render/html/*", "profiling/texts/chat.py"),
    "yaml": ("config/*",),
    "pydantic": ("config/*", "run/manifest.py", "commands/importing/*", "commands/schema.py", "costs/engine_table.py"),
    "scipy": ("stats/*", "costs/*", "theory/*"),
    "numba": ("stats/*",),
    "llvmlite": ("stats/*",),
    "triton": ("profiling/scoring/*",),
    "packaging": ("version.py",),
    "prometheus_client": ("servers/pages.py",),
    "urllib3": ("servers/client.py",),
    "ray": ("profiling/on_ray.py",),
}
# Imports point one way: a room may use those before it, but for those that it lives APART from.
ORDER = (
    *("version", "errors", "stats", "rules", "config", "run", "totals", "costs", "theory", "render", "report"),
    *("servers", "profiling", "commands", "api", "cli", "__main__"),
)
APART = {"render": {"config"}, "profiling": {"report", "render"}}

# Within profiling too: what loads and reads, what measures it, the run that does so, and what uses the models of a run.
PROFILING = ("models", "texts", "scoring", "heads", "timing", "engine", "checks", "shard", "profile", "decoding", "training")
# Rooms, each a module or a folder: they import the road, never another room, but for the command that starts what is one.
ROOMS = ("commands/*", "profiling/training", "profiling/on_ray")
STARTED = {("commands/profile", "profiling/on_ray")}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def place(path: Path) -> str:
    return path.relative_to(ROOT / "alphaprof").as_posix()


def room(path: Path) -> str:
    """The folder of a module, or its own name at the top."""
    return path.relative_to(ROOT / "alphaprof").with_suffix("").parts[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path): path for path in MODULES}


def uses(path: Path) -> Iterator[str]:
    """Modules of the product that a module imports, as `from a import b` names them: a.b where that is a module, else a."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in NAMES:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from {name if name in NAMES else str(node.module) for name in full}


@each("path", MODULES, ids=place)
def test_every_library_has_one_home(path: Path) -> None:
    strays = [
        name
        for name in imports(path)
        if (homes := HOMES.get(name.split(".")[0])) and not any(fnmatch(place(path), home) for home in homes)
    ]
    assert strays == []


@each("path", [path for path in MODULES if path.name != "__init__.py"], ids=place)
def test_imports_point_one_way(path: Path) -> None:
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("alphaprof.")}
    allowed = set(ORDER[: ORDER.index(room(path)) + 1]) - APART.get(room(path), set())
    assert rooms <= allowed


@each("path", [path for path in MODULES if len(Path(place(path)).parts) == 3 and room(path) == "profiling"], ids=place)
def test_imports_within_profiling_point_one_way(path: Path) -> None:
    folders = {name.split(".")[2] for name in uses(path) if name.startswith("alphaprof.profiling.")}
    assert folders <= set(PROFILING[: PROFILING.index(Path(place(path)).parts[1]) + 1])


def own_room(name: str) -> str | None:
    """The room that a module of this dotted name belongs to; None: it belongs to none."""
    parts = name.split(".")[1:]
    ancestors = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((found for found in ancestors if any(fnmatch(found, room) for room in ROOMS)), None)


def test_rooms_import_no_other_room() -> None:
    pairs = [(name, used) for name, path in NAMES.items() if own_room(name) for used in uses(path) if own_room(used)]
    rooms = [(own_room(name), own_room(used)) for name, used in pairs]
    assert [(one, other) for one, other in rooms if one != other and (one, other) not in STARTED] == []


def test_no_import_leads_back() -> None:
    """Imports for types alone count too: a circle of them is a knot for the reader."""
    left = {name: {used for used in uses(path) if used != name} for name, path in NAMES.items()}
    while leaves := [name for name, used in left.items() if not used & left.keys()]:
        for name in leaves:
            del left[name]
    assert left == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["schema"],
        ["import", "--help"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from alphaprof.cli.app import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_tests_and_product_do_not_know_the_workplace() -> None:
    words = [left + right for left, right in (("../sha", "red"), ("/wo", "rk/"), ("pypi", ".org"))]
    files = [path for folder in ("alphaprof", "tests", "scripts", "profiles", "docs") for path in (ROOT / folder).rglob("*")]
    texts = {
        path: path.read_text()
        for path in [*files, ROOT / "README.md"]
        if path.suffix in (".py", ".md", ".sh", ".yaml", ".jsonl")
    }
    assert {str(path) for path, text in texts.items() if any(word in text for word in words)} == set()


def kinds_asked(tree: ast.AST, kinds: set[str], classes: set[str]) -> Iterator[str]:
    """Questions after the kind of a draft: the name of one as a string, a comparison of `.kind` with one or of a draft's
    `.kind` with anything, `isinstance` of a class of drafts. "model" is a word of its own, and counts beside `.kind` alone.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in kinds - {"model"}:
            yield ast.unparse(node)
        if isinstance(node, ast.Compare | ast.Match):
            parts = list(ast.walk(node if isinstance(node, ast.Compare) else node.subject))
            whose = [ast.unparse(part.value) for part in parts if isinstance(part, ast.Attribute) and part.attr == "kind"]
            words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & {*kinds, "served"}
            if whose and (words or any(name in whose[0] for name in ("draft", "facts", "twin", "model"))):
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield from [ast.unparse(node) for part in ast.walk(node.args[1]) if getattr(part, "id", "") in classes]


def test_nobody_asks_a_draft_for_its_kind() -> None:
    """Outside the folders where kinds are defined: a new kind would have to be added to each such place."""
    from alphaprof.config.options import DRAFTS

    kinds = {kind for draft in DRAFTS for kind in get_args(draft.model_fields["kind"].annotation)}
    classes = {draft.__name__ for draft in DRAFTS} | {"DraftModel", "PromptLookup", "HeadDraft", "Model"}
    asked = ("x.kind == 'model'", "facts.kind != OTHER", "f('layer_skip')", "isinstance(d, (int, PromptLookup))")
    assert [question for question in asked if not any(kinds_asked(ast.parse(question), kinds, classes))] == []
    homes = ("profiling/models/", "profiling/heads/", "profiling/training.py", "config/")  # what is trained is of one kind
    others = [path for path in MODULES if not place(path).startswith(homes)]
    found = {place(path): list(kinds_asked(ast.parse(path.read_text()), kinds, classes)) for path in others}
    assert {path: asked for path, asked in found.items() if asked} == {}
