#!/usr/bin/env python3
"""One table of what everything costs, and the same as one line of JSON.

    python scripts/bench.py [PROFILE] [--set KEY=VALUE]... [--limit 2] [--threads 1] [--skip PART]... [--head IDS]

`models`: scoring against bare forward passes. `others`: a run against one prompt at a time, and (`assisted`) against Hugging
Face assisted generation, one run a gamma, in tokens a second (of the first `--few` documents, where all would take long).
`log`: totals and reports of synthetic logs. How each is measured stands at the head of bench_models.py and bench_log.py. The
machine must be idle.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PARTS = ("models", "others", "assisted", "log")


def models_part(given: argparse.Namespace) -> dict[str, Any]:
    """Figures of a profile's models."""
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    import torch

    from alphaprof.cli.progress import ConsoleProgress
    from alphaprof.config.load import load_profile
    from scripts import bench_models

    torch.set_num_threads(given.threads)
    untimed = [*given.set, "costs.source=roofline", "costs.accelerator=h100-sxm"]  # step times are not what is measured here
    options = load_profile(given.profile, untimed, given.limit)
    with ConsoleProgress() as progress:
        bench = bench_models.Bench.of(options, given.repeats, progress, given.head)
        found: dict[str, Any] = {"processor": bench_models.processor(), "threads": given.threads}
        found |= {"dtype": bench.loaded.target.dtype_name, "documents": len(bench.documents)}
        if "models" not in given.skip:
            progress.say("scoring against bare forward passes")
            found["scoring"] = bench_models.scoring_figures(bench, bench.texts())
        if "others" not in given.skip:
            progress.say("a run, and what one would do without it")
            found["run"] = bench_models.run_figures(bench, progress)
            some = dataclasses.replace(bench, documents=bench.documents[: given.few])
            found["alone"] = bench_models.alone_figures(some)
            if "assisted" not in given.skip:
                found["assisted"] = bench_models.assisted_figures(some, options.gammas)
    return found | {"memory_gib": bench_models.peak_memory()}


def log_part(given: argparse.Namespace) -> list[dict[str, float]]:
    """Figures of synthetic logs."""
    from scripts import bench_log

    rows = []
    for positions in given.positions:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(bench_log.figures(Path(folder) / "run", positions))
    return rows


def lines(found: dict[str, Any]) -> list[str]:
    """The figures of models as a table."""
    rows = [(name, str(found[name])) for name in ("processor", "threads", "dtype", "documents")]
    if scoring := found.get("scoring"):
        rows += [(f"{name}, ms/position", f"{scoring[f'{name}_ms']:.3f}") for name in ("bare", "scoring")]
        middle, least, most = scoring["scoring"]
        rows.append(("scoring / bare forwards", f"{middle:.3f} ({least:.3f} to {most:.3f})"))
        if "sharing" in scoring:
            middle, least, most = scoring["sharing"]
            rows.append(("the same, sharing the first layers", f"{middle:.3f} ({least:.3f} to {most:.3f})"))
        if "own_path" in scoring:
            middle, least, most = scoring["own_path"]
            rows.append(("scoring / the same on the text's tokens", f"{middle:.3f} ({least:.3f} to {most:.3f})"))
        rows.append(("statistics in torch instead, ms/position", f"{scoring['statistics_ms']:.3f}"))
    if run := found.get("run"):
        speed = run["tokens_per_second"]
        rows.append(("a run, tokens/s", f"{speed:.1f}"))
        rows += [(f"  {name}, s", f"{value:.1f}") for name, value in run["seconds"].items()]
        for name, words in (("alone", "one prompt at a time"), ("assisted", "assisted generation, every gamma")):
            other = found.get(name, {}).get("tokens_per_second")
            if other is None:
                continue
            rows.append((f"{words}, tokens/s", f"{other:.2f}: the run is {speed / other:.1f} times as fast"))
    rows.append(("peak memory, GiB", f"{found['memory_gib']:.2f}"))
    return [f"{name:44}{value}" for name, value in rows]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", default=ROOT / "profiles" / "demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limit", type=int, default=2, help="documents of every source of the profile")
    parser.add_argument("--repeats", type=int, default=7, help="of scoring and bare passes, in turn")
    parser.add_argument("--few", type=int, help="documents of what is done without a run, which takes long; default: all")
    parser.add_argument("--head", type=int, metavar="IDS", help="measure a random EAGLE-3 head that can propose so many ids")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--positions", type=int, nargs="+", default=[1_000_000, 10_000_000], help="of synthetic logs")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if {"models", "others"} - set(given.skip):
        found["models"] = models_part(given)
        print("\n".join(lines(found["models"])))
    if "log" not in given.skip:
        from scripts import bench_log

        found["log"] = log_part(given)
        print(bench_log.show(found["log"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
