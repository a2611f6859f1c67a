"""Checks alphaprof on a GPU: that its results are right there, how fast it is, and what memory it takes.

    python scripts/gpu_check.py                                    # every part, at most 360 seconds
    python scripts/gpu_check.py --parts columns,cost --seconds 120
    python scripts/gpu_check.py --device cpu --tiny                # every part on tiny shapes, without a GPU

No network and no model is needed: models of named shapes are made on the device with random weights. Lines are printed as
they come, and OUT/gpu_check.json and OUT/gpu_check.txt hold all of them at any time. Parts run in the order of the list
below, the most important first. A part that fails does not end the run; a part whose packages are missing says what it
could not check. Exit status: 0, or 1 where a check failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from scripts.gpu.setting import Line, Setting

WIDTH = 150  # of a line of the page
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "pyarrow", "pydantic", "datasets")
# A part is a function Setting -> Iterator[Line], named "module in scripts/gpu:function"; the value says what it checks.
PARTS = {
    "correctness:columns": "columns of the kernels against float64 on the CPU",
    "correctness:profile": "a small profile against the same on the CPU, float32",
    "correctness:rounds": "speculative decoding in 16 bits against its replay",
    "correctness:resume": "a profile that is killed and resumed",
    "heads:depths": "a draft head's depths in one pass against its steps, one by one",
    "heads:training": "steps of training a head: time, memory, and a loss that falls",
    "heads:cost": "scoring with a draft head against bare passes, and what its steps cost",
    "memory:halving": "batches are halved when memory runs out",
    "memory:waiting": "the scoring loop does not wait for the device",
    "speed:scoring": "scoring against bare forward passes",
    "speed:kernels": "statistics kernels against the memory's bandwidth",
    "speed:compiled": "statistics kernels against the same in torch, compiled",
    "generation:generation": "texts of a decode loop with a recorded step against those of generate",
    "speed:run": "positions a second, end to end",
}


@dataclass
class Record:
    """Everything that was seen so far; `write` leaves it in a folder as JSON and as a page of text."""

    folder: Path
    machine: dict[str, Any]
    begun: float = field(default_factory=time.monotonic)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: str, line: Line) -> None:
        """Keep, print and write one line."""
        row = {"part": part, "at_s": round(time.monotonic() - self.begun, 1), **asdict(line)}
        self.lines.append(row)
        print(text_of(row), flush=True)
        self.write()

    def write(self) -> None:
        """Both files, anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"machine": self.machine, "lines": self.lines}
        (self.folder / "gpu_check.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
        head = [f"{name}: {value}" for name, value in self.machine.items()]
        (self.folder / "gpu_check.txt").write_text("\n".join([*head, "", *map(text_of, self.lines)]) + "\n")

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(row["ok"] is False for row in self.lines)


def text_of(row: dict[str, Any]) -> str:
    """One line of the page: when, whether it is right (blank: a figure, nothing to be right), part and what was seen."""
    mark = {True: "ok", False: "FAILED", None: ""}[row["ok"]]
    head = f"{row['at_s']:6.1f} s  {mark:6}  {row['part'].split(':')[1]:10}  "
    return textwrap.fill(row["text"], WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def run_all(parts: Sequence[str], setting: Setting, record: Record) -> None:
    """Run some parts, one after another, until the GPU does not recover from an error: all others would fail as well."""
    from scripts.gpu.setting import Line

    for place, name in enumerate(parts):
        if setting.left() <= 0:
            record.add(name, Line(f"not begun, the time is over: {PARTS[name]}"))
            continue
        run(name, setting, record)
        try:
            setting.clean()
        except RuntimeError as error:  # of an address that no kernel may read, say
            others = ",".join(other.split(":")[1] for other in parts[place + 1 :])
            reason = str(error).splitlines()[0][:200]
            record.add(name, Line(f"the GPU answers no more ({reason}); in a new process: --parts {others}", ok=False))
            return


def run(name: str, setting: Setting, record: Record) -> None:
    """Run one part up to its end or the end of the time, and keep what it says and how it fails."""
    from scripts.gpu.setting import Line

    module, function = name.split(":")
    try:
        part: Callable[[Setting], Iterator[Line]] = getattr(import_module(f"scripts.gpu.{module}"), function)
        for line in part(setting):
            record.add(name, line)
            if setting.left() <= 0:
                record.add(name, Line("cut short: the time is over"))
                return
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("alphaprof", "scripts", "tests"):
            raise
        record.add(name, Line(f"not checked, the package {missing} is missing: {PARTS[name]}", {"missing": missing}))
    except Exception as error:  # whatever goes wrong, the other parts are still to be seen
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        record.add(name, Line(f"broke off with {reason[:300]}", {"traceback": traceback.format_exc()}, ok=False))


def machine(device: Any) -> dict[str, Any]:
    """The device and the packages, in words."""
    import torch

    facts: dict[str, Any] = {"python": platform.python_version(), "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "missing"
    return facts


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; parts by their names without the group, or a whole group."""
    listed = "\n".join(f"  {name.split(':')[1]:11} {name.split(':')[0]:12} {what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="", help="names of parts or groups, with commas between; default: all")
    parser.add_argument("--seconds", type=float, default=360, help="after which no more is begun (default 360)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: says whether the parts run, not how fast")
    parser.add_argument("--model", type=Path, help="a folder with a small real model, for the parts that can use one")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu_check"), help="folder of the two files (default build/gpu_check)"
    )
    result = parser.parse_args(given)
    wanted = [word.strip() for word in result.parts.split(",") if word.strip()]
    known = {word for name in PARTS for word in name.split(":")}
    if unknown := [word for word in wanted if word not in known]:
        parser.error(f"no part or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    result.parts = [name for name in PARTS if not wanted or set(name.split(":")) & set(wanted)]
    return result


def main() -> None:
    """Run the parts that were asked for."""
    given = arguments()
    faulthandler.dump_traceback_later(given.seconds + 60, exit=True)  # says where a part hangs, while both files are whole
    if given.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when something imports triton
    import torch

    from scripts.gpu.setting import Setting

    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here\nhint: --device cpu --tiny runs every part on tiny shapes")
    facts = machine(device)
    if given.tiny or device.type != "cuda":
        facts["times and bandwidths"] = "mean nothing: tiny shapes, or no GPU"
    record = Record(given.out, facts)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(device, given.tiny, time.monotonic() + given.seconds, Path(folder), given.model)
        run_all(given.parts, setting, record)
    record.write()
    print(f"{given.out / 'gpu_check.txt'} and gpu_check.json hold all of it")
    sys.exit(int(record.failed))


if __name__ == "__main__":
    main()
