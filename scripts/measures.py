"""How large the project is: lines of Python, test cases, raise statements, words of documentation.

python scripts/measures.py
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines(paths: Iterable[Path]) -> int:
    """Lines of some files together."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    """Print a line for each measure."""
    product = sorted((ROOT / "alphaprof").rglob("*.py"))
    others = [path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    raises = sum(isinstance(node, ast.Raise) for path in product for node in ast.walk(ast.parse(path.read_text())))
    words = sum(len(path.read_text().split()) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "tests"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cases = re.findall(r"(\d+) tests collected", collected)
    print(f"product: {lines(product):,} lines in {len(product)} files, {raises} raise statements")
    print(f"tests and scripts: {lines(others):,} lines, {cases[-1] if cases else '?'} test cases")
    print(f"documentation: {words:,} words")


if __name__ == "__main__":
    main()
