"""Copying memory on the host, one thread: what a slow or badly placed memory shows. GB/s.

A byte copied counts once. The buffers are larger than a core's share of the last cache.
"""

import mmap
import time
from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place

EVERY = 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "host"
CONVENTION = "copied_once"
COST_S = 0.0
PARAMS: Mapping[str, Value] = {"bytes": 64 << 20, "repeats": 7, "best_of": 3}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Per repeat the best of a few copies; the value is the repeats' median."""
    size, best_of = int(params["bytes"]), int(params["best_of"])
    began = time.perf_counter()
    with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
        for page in range(0, size, mmap.PAGESIZE):
            source[page] = 1  # a page never written is the kernel's one page of zeros, and no memory
        with memoryview(source) as reads, memoryview(target) as writes:
            writes[:] = reads
            samples = tuple(
                size / 1e9 / min(_copy(at, writes, reads) for _ in range(best_of))
                for _ in range(int(params["repeats"]))
            )
    middle = sorted(samples)[len(samples) // 2]
    return BenchResult("ok", middle, "GB/s", "", samples, time.perf_counter() - began), CONVENTION


def _copy(at: Place, writes: memoryview, reads: memoryview) -> float:
    at.check()
    began = time.perf_counter()
    writes[:] = reads
    return time.perf_counter() - began
