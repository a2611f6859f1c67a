"""How much memory a process can still have."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def free_memory(system: Path = Path("/")) -> int:
    """Return bytes of memory that this process can still have: what the machine has, and what each control group that holds
    it leaves, as containers and Slurm set them. `system`: the root of /proc and /sys. Pages of files that a group may drop
    count as free.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, StopIteration):
        lines = (system / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    groups = list[tuple[Path, str, str, str]]()
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                groups.append((Path("sys/fs/cgroup", path.strip("/")), "memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                groups.append((Path("sys/fs/cgroup/memory", path.strip("/")), *names))
    for group, limit, usage, dropped in groups:
        for folder in (system / group, *(system / group).parents):  # a group is held by those above it
            with contextlib.suppress(OSError, ValueError):  # a group without a limit says "max"
                held = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, max(0, held + int(stat.get(dropped, 0))))
    return free
