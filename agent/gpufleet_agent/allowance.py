"""How much of the machine this process may use: processors and memory, as its control groups say."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def cpus(root: Path = ROOT) -> float:
    """Processors' worth of time that its groups leave it; infinite without a limit."""
    most = math.inf
    for group in _groups(root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                most = min(most, int(quota) / int(period))
    return most


_OF_ALL, _OF_OURS = 0.25, 0.75


def memory_bytes(root: Path = ROOT) -> float:
    """Memory that a run may take: a quarter of what the machine has free, most of what its groups leave.

    Infinite where neither is said.
    """
    most = math.inf
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                most = _OF_ALL * int(line.split()[1]) * 1024
    for group in _groups(root):
        for name in ("memory.max", "memory.high"):
            with suppress(OSError, ValueError):
                limit = (group / name).read_text().strip()
                if limit != "max":
                    used = int((group / "memory.current").read_text())
                    most = min(most, _OF_OURS * max(0, int(limit) - used))
    return most


def _groups(root: Path) -> Iterator[Path]:
    """Its control group and all those around it (version 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None or ".." in path:
        return
    top = root / "sys/fs/cgroup"
    group = top / path.lstrip("/")
    while group != top and group != group.parent:
        yield group
        group = group.parent
    yield top
