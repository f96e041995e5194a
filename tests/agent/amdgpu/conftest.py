import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpufleet.metric import Row
from gpufleet_agent.drivers import Host
from gpufleet_agent.probe import Sweep, run_probe
from gpufleet_agent.probes import gpu

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"


def _metrics(layout: int, content: int, size: int, fields: list[str]) -> bytes:
    """A gpu_metrics table: what the firmware does not fill reads all ones."""
    table = bytearray(b"\xff" * size)
    struct.pack_into("<HBB", table, 0, size, layout, content)
    for field in fields:
        place, _, value = field.partition("=")
        struct.pack_into("<Q", table, int(place), int(value))
    return bytes(table)


def grow(text: str, root: Path) -> Path:
    """Make the files of a tree.txt below `root`.

    `[folder]`, then a line per file: `name = text` (\\n = a further line), `name -> path from the root`,
    `name hex bytes` or `name metrics revision content size place=value ...` (a gpu_metrics table).
    """
    folder = root
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            folder = root / line.strip("[]")
            folder.mkdir(parents=True, exist_ok=True)
            continue
        name, kind, rest = (line + " ").split(" ", 2)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        words = rest.split()
        if kind == "->":
            path.symlink_to(os.path.relpath(root / rest.strip(), path.parent))
        elif kind == "hex":
            path.write_bytes(bytes.fromhex(rest))
        elif kind == "metrics":
            path.write_bytes(_metrics(int(words[0]), int(words[1]), int(words[2]), words[3:]))
        elif kind == "=":
            path.write_text(rest.strip().replace("\\n", "\n") + "\n")
        else:
            raise ValueError(line)
    return root


@pytest.fixture
def tree() -> Iterator[Callable[[str], Path]]:
    """The root of a host of tests/fixtures/hosts; in memory, as sysfs is, where that can be had."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield lambda name: grow((HOSTS / name / "tree.txt").read_text(), Path(folder) / name)


@pytest.fixture
def sweep() -> Callable[[Host], Sweep]:
    """A sweep of probe `gpu`, checked as the agent checks it, after `ticks` 1 Hz values."""

    def run(host: Host, ticks: int = 1) -> Sweep:
        said: list[str] = []
        for _ in range(ticks):
            gpu.tick(host)
        found = run_probe("gpu", gpu, host, said.append)
        assert said == []
        return found

    return run


@pytest.fixture
def rows(sweep: Callable[[Host], Sweep]) -> Callable[[Host], list[Row]]:
    """Its rows, without what is NULL."""

    def run(host: Host) -> list[Row]:
        found = sweep(host)
        assert found.error == ""
        names = [metric.name for metric in gpu.METRICS]
        return [
            {name: cell for name, cell in zip(names, row, strict=True) if cell is not None}
            for row in found.rows
        ]

    return run
