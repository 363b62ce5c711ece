"""What the system says about processor and cores. No torch; `root` is where /proc and /sys lie."""

from __future__ import annotations

import os
from pathlib import Path

INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "sve2", "bf16", "i8mm",
)
"""Flags of the kernel that a form of an operator may care about, for x86 and ARM."""


def processor(root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """(name, instruction sets among INSTRUCTION_SETS); both empty where the system does not say."""
    name, flags = "", set[str]()
    for line in read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Hardware", "uarch") and not name:
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    return name, tuple(each for each in INSTRUCTION_SETS if each in flags)


def num_cores() -> int:
    """Cores of the machine."""
    return os.cpu_count() or 1


def num_allowed() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cores()


def core_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the tightest control group grants; None: no limit, or the system does not say."""
    found = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        below = Path(path.lstrip("/"))
        if not controllers:
            found += [_second_kind(root / "sys/fs/cgroup" / part) for part in (below, *below.parents)]
        elif "cpu" in controllers.split(","):
            found += [_first_kind(root / "sys/fs/cgroup/cpu" / part) for part in (below, *below.parents)]
    return min((each for each in found if each is not None), default=None)


def _second_kind(group: Path) -> float | None:
    words = read(group / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() and int(words[1]) else None


def _first_kind(group: Path) -> float | None:
    quota, period = read(group / "cpu.cfs_quota_us").strip(), read(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def read(file: Path) -> str:
    """The text of a small file, empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
