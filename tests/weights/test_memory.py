"""Available memory: the machine's word and both generations of control groups, from trees made for the test."""

from __future__ import annotations

import os
from pathlib import Path

from firstlight.weights.memory import available_bytes

GIB = 2**30
UNLIMITED = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(gib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {gib * 2**20} kB\n"}


def test_this_machine_says_something_sensible() -> None:
    found = available_bytes()
    assert found is not None
    assert 0 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_no_groups(tmp_path: Path) -> None:
    assert 7 * GIB == available_bytes(tree(tmp_path, meminfo(7)))


def test_second_generation_takes_the_tightest_of_all_levels(tmp_path: Path) -> None:
    root = tree(tmp_path, meminfo(64) | {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/job/memory.max": "max\n",
        "sys/fs/cgroup/slice/job/memory.current": f"{9 * GIB}\n",
        "sys/fs/cgroup/slice/memory.max": f"{10 * GIB}\n",
        "sys/fs/cgroup/slice/memory.current": f"{9 * GIB}\n",
        "sys/fs/cgroup/slice/memory.stat": f"anon {4 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n",
    })
    assert (10 - 9 + 4) * GIB == available_bytes(root)


def test_first_generation_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path names a group of the host, only the top is visible."""
    root = tree(tmp_path, meminfo(64) | {
        "proc/self/cgroup": "5:devices:/docker/abc\n4:cpu,memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    })
    assert 6 * GIB == available_bytes(root)


def test_a_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    root = tree(tmp_path, meminfo(3) | {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    })
    assert 3 * GIB == available_bytes(root)


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, meminfo(3) | {
        "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n",
    })
    assert 0 == available_bytes(root)
