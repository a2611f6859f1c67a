"""How much memory a process can still have."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaprof.profiling.models.memory import free_memory


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/\n", {}, 9 << 10),
        ("0::/pod/main\n", {"pod/memory.max": "max"}, 9 << 10),
        ("0::/\n", {"memory.max": "5000", "memory.current": "4000", "memory.stat": "anon 1\ninactive_file 500"}, 1500),
        (  # the pod's limit holds, although its container has none; its path is that of another namespace
            "0::/kubepods/gone\n",
            {"memory.max": "4000", "memory.current": "4100", "memory.stat": "inactive_file 0"},
            0,
        ),
        (
            "4:cpu,memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/job/memory.usage_in_bytes": "10",
                "memory/job/memory.stat": "total_inactive_file 0",
                "memory/memory.limit_in_bytes": "6000",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200",
            },
            1200,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "99000", "memory/memory.usage_in_bytes": "1"}, 9 << 10),
    ],
)
def test_free_memory_is_what_control_groups_leave(groups: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    """A container of 16 GiB on a machine of a terabyte was killed: /proc/meminfo is the machine's."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 9 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert free_memory(tmp_path) == left
