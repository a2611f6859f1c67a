"""Digests of every column of four tiny float32 runs (greedy, sampled, lookup, a head): record them before the run's code is
changed, and compare after. They hold on one machine alone, whose kernels round in one way, so no test compares them.

    python scripts/column_digests.py scripts/column_digests.json --record
    python scripts/column_digests.py scripts/column_digests.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent.parent))
TABLES = ("prompts", "texts", "continuations", "positions", "documents", "totals")
SAME = {"texts": "continuations"}  # other names of a table
ORDER = ("rule", "document", "position", "span")


def digests_of(out: Path) -> dict[str, str]:
    """Return a digest by table, draft and column of a run; files of shards are one table, sorted by ORDER. Totals of spans
    are a table of their own.
    """
    tables: dict[str, list[pa.Table]] = {}
    for path in sorted(out.rglob("*.parquet")):
        name = path.relative_to(out).as_posix()
        folder = name.partition("/")[0].partition(".")[0]
        if folder in TABLES:
            draft = next((part.partition(".")[0] for part in name.split("/") if part.startswith("draft=")), "")
            table = pq.ParquetFile(path).read()
            if folder == "totals":
                spans, table = (table.filter(chosen(table["span"])) for chosen in (pc.is_valid, pc.is_null))
                tables.setdefault(f"spans {draft}", []).append(spans)
            tables.setdefault(f"{SAME.get(folder, folder)} {draft}".strip(), []).append(table)
    found = {}
    for name, parts in sorted(tables.items()):
        table = pa.concat_tables(parts, promote_options="permissive")
        keys = [(column, "ascending") for column in ORDER if column in table.column_names]
        plain = {key: table[key].cast(pa.string()) if key in ("rule", "span") else table[key] for key, _ in keys}
        order = pc.sort_indices(pa.table(plain), sort_keys=keys)
        for column in table.column_names:
            values = repr(table[column].take(order).to_pylist())
            found[f"{name} {column}"] = hashlib.sha256(values.encode()).hexdigest()[:16]
    return found


def runs(folder: Path) -> dict[str, Path]:
    """Profile the four runs below a folder, and return where each lies."""
    from tests.reference import LOGGED_RULES
    from tests.runs import mixed_file, profile_file, run_of_prompts, run_profile, train_head
    from tests.tiny import save_models

    tiny = folder / "models"
    save_models(tiny)
    for name in ("greedy", "sampled", "lookup"):
        (folder / name).mkdir()
    files = {
        "greedy": profile_file(folder / "greedy", tiny, costs={"source": "none"}, execution={"threads": 1}),
        "sampled": mixed_file(folder / "sampled", tiny, rules=[*LOGGED_RULES, "tree_2"]),
    }
    found = {name: run_profile(path, folder / name / "run") for name, path in files.items()}
    found["lookup"] = run_of_prompts(folder / "lookup", tiny)
    found["head"] = train_head(found["lookup"], folder / "head")
    return {name: Path(run.path) for name, run in found.items()}


def main() -> None:
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--record", action="store_true", help="write the file; without it, compare with the file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: digests_of(path) for name, path in runs(Path(folder)).items()}
    if asked.record:
        asked.file.write_text(json.dumps(found, indent=1) + "\n")
    before: dict[str, dict[str, str]] = json.loads(asked.file.read_text())
    odd = 0
    for run, columns in before.items():
        gone = sorted(columns.keys() - found[run].keys())
        new = sorted(found[run].keys() - columns.keys())
        other = sorted(name for name in columns.keys() & found[run].keys() if columns[name] != found[run][name])
        odd += len(other)
        print(f"{run}: {len(columns)} columns, {len(other)} differ {other}, gone {gone}, new {new}")
    sys.exit(bool(odd))


if __name__ == "__main__":
    main()
