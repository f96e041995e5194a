"""Copying memory with every core of a NUMA node, in that node's memory: what slow or badly placed memory shows. GB/s.

A byte is read and written, and counts twice. The buffers are several times the last cache. The convention says
with how many threads it was measured, and whether that is all the time they wanted: a service with a limit gets
another series. `anywhere`: the memory could not be placed on one node.
"""

import ctypes
import math
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent import allowance
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Part, Place

EVERY = 3600.0
VERSION = "2"
ON: Literal["host", "gpu", "pair"] = "host"
CONVENTION = "read_plus_write"
COST_S = 0.0
PARAMS: Mapping[str, Value] = {"bytes": 128 << 20, "caches": 4, "repeats": 5, "best_of": 3}

SYSTEM = Path("/sys/devices/system")

_SLICE = 8 << 20
_LOOK_S = 0.02
_MOST_S = 3.0
"""A machine that is slower makes fewer repeats."""
_PLACED = 0.99
_UNIT = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Per repeat the best of a few copies; a result per NUMA node, the median of its repeats.

    Parameters: `bytes` both buffers have at least, and `caches` times the node's last caches; `repeats`,
    `best_of`.
    """
    nodes = _nodes()
    if len(nodes) > 1 and not _may_choose():
        nodes = {-1: [cpu for cpus in nodes.values() for cpu in cpus]}
    return [_measure(at, params, node, cpus, len(nodes)) for node, cpus in sorted(nodes.items())]


def _measure(at: Place, params: Mapping[str, Value], node: int, cpus: Sequence[int], nodes: int) -> Part:
    entity = f"numa:{node}" if node >= 0 else "node:"
    began = time.perf_counter()
    quota = allowance.cpus()
    threads = len(cpus) if quota >= len(cpus) else max(1, int(quota))
    convention = f"{CONVENTION}_{threads}_threads"
    if quota < threads:
        convention += f"_in_{quota:g}_cpus"
    size = max(int(params["bytes"]), int(params["caches"]) * _cache_bytes(cpus))
    free = allowance.memory_bytes()
    if size > free:
        why = f"it takes {size >> 20} MiB, and may have {free / (1 << 20):.0f}"
        return Part(entity, BenchResult("skipped", None, "GB/s", why), convention)
    pinned = node >= 0 and (nodes > 1 or _may_choose())
    team = _Team(cpus[:threads] if pinned else [None] * threads, size // 2)
    try:
        walls = team.copy(at, int(params["repeats"]), int(params["best_of"]))
        placed = nodes == 1 or (pinned and team.share(node) >= _PLACED)
    except OSError as error:
        why = error.strerror or str(error)
        return Part(entity, BenchResult("failed", None, "GB/s", why), convention)
    finally:
        team.end()
    if not placed or node < 0:
        convention += "_anywhere"
    samples = tuple(2 * team.bytes / 1e9 / min(repeat) for repeat in walls)
    result = BenchResult("ok", median(samples), "GB/s", "", samples, time.perf_counter() - began)
    return Part(entity, result, convention)


class _Team:
    """Threads that copy at the same time, each on its own core and in memory that it touched first.

    Args:
        cpus: The processor of each; None = any.
        size: Bytes that all of them copy together.
    """

    def __init__(self, cpus: Sequence[int | None], size: int) -> None:
        each = max(mmap.PAGESIZE, size // len(cpus) // mmap.PAGESIZE * mmap.PAGESIZE)
        self.bytes = each * len(cpus)
        self._cpus = cpus
        self._each = each
        self._stopped = False
        self._barrier = threading.Barrier(len(cpus), self._watch_time)
        self._began = math.inf
        self._over = False
        self._release = threading.Event()
        self._done = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._spans: list[list[tuple[float, float]]] = [[] for _ in cpus]
        self._addresses: list[int] = []
        self._threads: list[threading.Thread] = []

    def copy(self, at: Place, repeats: int, best_of: int) -> list[list[float]]:
        """Seconds that each copy took, `best_of` per repeat; fewer repeats where there is no time for more.

        Raises:
            OSError: No thread or memory is to be had.
        """
        passes = 1 + repeats * best_of  # the first is not counted
        try:
            for which in range(len(self._cpus)):
                thread = threading.Thread(target=self._work, args=(which, passes), name="memcpy", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            raise OSError(0, str(error)) from error
        left = len(self._threads)
        while left and not self._errors:
            at.check()
            left -= self._done.acquire(timeout=_LOOK_S)
        for wrong in self._errors:
            raise wrong if isinstance(wrong, OSError) else OSError(0, f"{type(wrong).__name__}: {wrong}")
        turns = list(zip(*self._spans, strict=True))[1:]
        walls = [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in turns]
        repeats = max(1, len(walls) // best_of)
        return [walls[at * best_of : (at + 1) * best_of] for at in range(repeats)]

    def share(self, node: int) -> float:
        """The part of its memory that is on a node; 0 where that is not said."""
        try:
            lines = Path("/proc/self/numa_maps").read_text().splitlines()
        except OSError:
            return 0.0
        areas = {int(line.split(maxsplit=1)[0], 16): line for line in lines}
        begins = sorted(areas)
        mine = {max(begin for begin in begins if begin <= address) for address in self._addresses}
        pages: dict[int, int] = {}
        for begin in mine:
            for where, count in re.findall(r"\bN(\d+)=(\d+)", areas[begin]):
                pages[int(where)] = pages.get(int(where), 0) + int(count)
        return pages.get(node, 0) / max(1, sum(pages.values()))

    def end(self) -> None:
        """Give threads and memory back."""
        self._stopped = True
        self._barrier.abort()
        self._release.set()
        for thread in self._threads:
            thread.join()

    def _work(self, which: int, passes: int) -> None:
        try:
            cpu, size = self._cpus[which], self._each
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
                places = []
                for memory in (source, target):
                    with suppress(OSError):
                        memory.madvise(mmap.MADV_HUGEPAGE)
                    places.append(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
                reads, writes = places
                for to, n in self._slices():  # written once: else all reads are of the kernel's page of zeros
                    ctypes.memset(reads + to, 1, n)
                    ctypes.memset(writes + to, 1, n)
                self._addresses += places
                for _ in range(passes):
                    self._barrier.wait()
                    if self._over:
                        break
                    began = time.perf_counter()
                    for to, n in self._slices():
                        ctypes.memmove(writes + to, reads + to, n)
                    self._spans[which].append((began, time.perf_counter()))
                self._done.release()
                self._release.wait()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._barrier.abort()

    def _watch_time(self) -> None:
        """Before each pass, in one thread while the others wait."""
        now = time.perf_counter()
        self._began = min(self._began, now)
        self._over = bool(self._spans[0][1:]) and now - self._began > _MOST_S

    def _slices(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each piece of a thread's memory: between two of them it can be stopped."""
        for to in range(0, self._each, _SLICE):
            if self._stopped:
                raise threading.BrokenBarrierError
            yield to, min(_SLICE, self._each - to)


def _may_choose() -> bool:
    """Whether the system lets us choose processors."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError:
        return False
    return True


def _nodes() -> dict[int, list[int]]:
    """NUMA node -> a processor of each of its cores that we may use; 0 for all where nodes are not said."""
    allowed = os.sched_getaffinity(0)
    found = {}
    for path in (SYSTEM / "node").glob("node[0-9]*"):
        cpus = _one_per_core(_listed(path / "cpulist") & allowed)
        if cpus:  # a node may be memory alone
            found[int(path.name[4:])] = cpus
    return found or {0: _one_per_core(allowed)}


def _one_per_core(cpus: Set[int]) -> list[int]:
    cores: dict[frozenset[int], int] = {}
    for cpu in sorted(cpus):
        siblings = _listed(SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(frozenset(siblings or {cpu}), cpu)
    return sorted(cores.values())


def _cache_bytes(cpus: Sequence[int]) -> int:
    """Size of the last caches of these processors together; 0 where it is not said."""
    sizes: dict[frozenset[int], int] = {}
    for cpu in cpus:
        levels: dict[int, tuple[frozenset[int], int]] = {}
        for path in (SYSTEM / f"cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            with suppress(OSError, ValueError, KeyError, IndexError):
                text = (path / "size").read_text().strip()
                size = int(text[:-1]) * _UNIT[text[-1]]
                levels[int((path / "level").read_text())] = frozenset(_listed(path / "shared_cpu_list")), size
        if levels:
            shared, size = levels[max(levels)]
            sizes[shared or frozenset({cpu})] = size
    return sum(sizes.values())


def _listed(path: Path) -> set[int]:
    """The numbers in a list as `0-3,8`; none where there is none."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            if part:
                first, _, last = part.partition("-")
                found |= set(range(int(first), int(last or first) + 1))
    return found
