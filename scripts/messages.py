"""Every text that a user can see, one per line with its place: errors, hints, notes, help, captions, lines of reports.

Literals of three words or more in the product, docstrings of commands among them, other docstrings apart; {...} stands for a
value. Read the list aloud before a release.

    .venv/bin/python scripts/messages.py [FOLDER of alphaprof]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path(__file__).parent.parent / "alphaprof"
WORDS = re.compile(r"[A-Za-z]{2,}[^A-Za-z]+[A-Za-z]+[^A-Za-z]+[A-Za-z]{2,}")


def text_of(node: ast.AST) -> str | None:
    """Return a literal as it reads, with {...} for values; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    return None


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every message of a file."""
    tree = ast.parse(file.read_text())
    apart = set()  # docstrings, and parts of f-strings
    for node in ast.walk(tree):
        command = "cli" in file.parts and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and not command:
            apart |= {node.body[0].value} if node.body and isinstance(node.body[0], ast.Expr) else set()
        if isinstance(node, ast.JoinedStr):
            apart |= {inner for inner in ast.walk(node) if inner is not node and isinstance(inner, ast.Constant)}
    for node in ast.walk(tree):
        text = None if node in apart else text_of(node)
        if text and WORDS.search(text):
            yield node.lineno, " ".join(text.split())  # type: ignore[attr-defined]


for path in sorted((PRODUCT / "".join(sys.argv[1:2])).rglob("*.py")):
    for line, found in sorted(texts(path)):
        print(f"{path.relative_to(PRODUCT)}:{line}: {found}")
