"""How fast and how flat the position log becomes totals and a report: each figure from a process of its own.

    python scripts/bench_log.py --measure totals RUN     or report; bench.py measures both on runs of several sizes

Runs are those of synthetic_log.py. `bytes`: of the log on disk, a position and draft. `totals`: positions a second,
reading, computing and writing, the loops being loaded from disk; `compile`: what the very first process spends beside that.
`memory`: largest resident set of the process. `report`: seconds until a report of stored totals is built.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

Figures = dict[str, float]


def totals_figures(path: Path) -> Figures:
    """Compute and write the totals of a run again, and say how many seconds that took (imports not counted)."""
    from alphaprof.run.writer import RunWriter
    from alphaprof.totals.files import write_totals

    with RunWriter.opened(path, resume=True) as run:
        seconds, cpu = _timed(lambda: run.finish(write_totals))
    positions = run.manifest.positions * len(run.manifest.drafts)
    return {"positions": positions, "seconds": seconds, "cpu": cpu, "memory": _memory()}


def report_figures(path: Path) -> Figures:
    """Build the report of a run whose totals are stored."""
    from alphaprof.report.build import build_report
    from alphaprof.run.reader import Run

    seconds, cpu = _timed(lambda: build_report(Run.open(path)))
    return {"seconds": seconds, "cpu": cpu, "memory": _memory()}


MEASURES = {"totals": totals_figures, "report": report_figures}


def bytes_per_position(path: Path) -> float:
    """Of the position log on disk, a position and draft."""
    from alphaprof.run.reader import Run

    manifest = Run.open(path).manifest
    size = sum(part.stat().st_size for part in (path / "positions").rglob("*.parquet"))
    return size / (manifest.positions * len(manifest.drafts))


def measured(name: str, path: Path, cache: Path | None = None) -> Figures:
    """One of `MEASURES` in a process of its own; `cache`: where it keeps compiled loops, unless in the usual place."""
    place = {} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, "--measure", name, str(path)]
    result = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=True)
    found: Figures = json.loads(result.stdout.splitlines()[-1])
    return found


def figures(path: Path, positions: int) -> Figures:
    """Write a run and measure everything on it."""
    from scripts.synthetic_log import Size, write_log

    write_log(path, Size.of(positions))
    with tempfile.TemporaryDirectory() as cache:
        first = measured("totals", path, Path(cache))
    totals = measured("totals", path)
    report = measured("report", path)
    return {
        "positions": totals["positions"],
        "bytes": bytes_per_position(path),
        "totals": totals["positions"] / totals["seconds"],
        "cpu": totals["cpu"] / totals["positions"] * 1e6,
        "memory": totals["memory"],
        "compile": first["seconds"] - totals["seconds"],
        "report": report["seconds"],
        "report memory": report["memory"],
    }


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the process."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def _memory() -> float:
    """Largest resident set so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def show(rows: Sequence[Figures]) -> str:
    """The figures of several runs as a table."""
    units = {"bytes": "B/position", "totals": "positions/s", "cpu": "us/position", "memory": "GiB", "compile": "s"}
    units |= {"report": "s", "report memory": "GiB"}
    lines = [f"{'':28}" + "".join(f"{row['positions']:>16,.0f}" for row in rows)]
    for name, unit in units.items():
        lines.append(
            f"{f'{name} ({unit})':28}" + "".join(f"{row[name]:>16,.{0 if name == 'totals' else 2}f}" for row in rows)
        )
    return "\n".join(lines)


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description="How fast and how flat the position log becomes totals and a report.")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "RUN"), required=True)
    name, run = parser.parse_args().measure
    print(json.dumps(MEASURES[name](Path(run))))


if __name__ == "__main__":
    main()
