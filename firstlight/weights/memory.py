"""How much memory this process may still take: the machine's word and that of every control group above us. No torch."""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """The smallest of MemAvailable and what each control group leaves; None where the system does not say.

    Note: pages of files that are only cached count as available, as the kernel gives them back when asked.
    """
    found = [_machine(root), *_groups(root)]
    return min((each for each in found if each is not None), default=None)


def _machine(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[int | None]:
    """One number per group that has a limit, from ours up to the top."""
    found: list[int | None] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
        else:
            continue
        below = Path(path.lstrip("/"))
        for part in (below, *below.parents):  # inside a container only the top exists, whatever the path says
            found.append(_left(top / part, *names))
    return found


def _left(group: Path, limit_file: str, usage_file: str, cached: tuple[str, str]) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    counts = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    reclaimable = sum(int(counts.get(name, 0)) for name in cached)
    return max(0, int(limit) - max(0, int(usage) - reclaimable))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
