"""The process under test: reads cards through the real binding and whatever library the loader finds.

Arguments: the root of /proc and /sys, and the file of the progress word. One JSON command per line comes in,
one JSON answer goes out.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import pynvml

from gpufleet.metric import Cell, Null
from gpufleet_agent.drivers import DriverError
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES


class Word:
    """A progress that outlives its process: a file, written before each call."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)

    def enter(self, card: str, call: str) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(f"{card} {call}".encode())

    def leave(self) -> None:
        self._file.truncate(0)


def plain(cell: Cell) -> object:
    return [cell.reason.name, cell.code] if isinstance(cell, Null) else cell


def answer(host: NvmlHost, do: str, index: int, group: str) -> object:
    if do == "node":
        return dict(host.node().attributes)
    if do == "probe":
        sweep = run_probe(group, PROBES[group], host, lambda text: None)
        names = [metric.name for metric in PROBES[group].METRICS]
        return [sweep.error, [dict(zip(names, row, strict=True)) for row in sweep.rows]]
    if do == "processes":
        return [[one.pid, one.pci, one.mem_used_bytes, one.suspect] for one in host.processes()]
    gpu = host.gpus()[index]
    if do == "links":
        links = gpu.links()
        if isinstance(links, Null):
            return plain(links)
        return [{name: plain(cell) for name, cell in row.items()} for row in links]
    if do == "identity":
        return dict(gpu.identity())
    return {name: plain(cell) for name, cell in gpu.read(group).items()}


def main() -> None:
    root, word = map(Path, sys.argv[1:])
    inject = os.environ.get("FAKE_INJECT")
    if inject:
        pynvml.nvmlLib = ctypes.CDLL(inject)
    host = NvmlHost(root, Word(word))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            said = answer(host, command["do"], command.get("index", 0), command.get("group", "gpu"))
        except DriverError as error:
            said = {"error": [type(error).__name__, error.code, str(error)]}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
