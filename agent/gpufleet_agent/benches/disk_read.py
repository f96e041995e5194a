"""Reading a file in the state directory from its disk, in order, past the page cache. GB/s.

The file is made once and kept. Where the file system has no O_DIRECT the cache is dropped for this file
first, and the convention says so: the two are different series.
"""

import errno
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place

EVERY = 6 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "host"
CONVENTION = "direct_sequential"
COST_S = 0.0
PARAMS: Mapping[str, Value] = {"bytes": 64 << 20, "block_bytes": 1 << 20, "repeats": 5}

CACHED = "fadvise_sequential"
"""The convention where O_DIRECT is not to be had."""

_ROOM = 4
"""The file is not made where this many times its size is not free."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""That there is no room says nothing about the disk's speed."""


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Read the whole file once per repeat; the value is the repeats' median."""
    size, block = int(params["bytes"]), int(params["block_bytes"])
    path = Path(at.state_dir) / "bench-read.dat"
    began = time.perf_counter()
    try:
        if not path.exists() or path.stat().st_size != size:
            free = os.statvfs(at.state_dir)
            if free.f_bavail * free.f_frsize < _ROOM * size:
                text = f"less than {_ROOM * size >> 20} MiB free in {at.state_dir}"
                return BenchResult("skipped", None, "GB/s", text), CONVENTION
            _make(at, path, size, block)
        with mmap.mmap(-1, block) as buffer:
            samples, convention = _samples(at, path, buffer, int(params["repeats"]))
    except OSError as error:
        status = "skipped" if error.errno in _FULL else "failed"
        return BenchResult(status, None, "GB/s", f"{path}: {error.strerror}"), CONVENTION
    middle = sorted(samples)[len(samples) // 2]
    return BenchResult("ok", middle, "GB/s", "", samples, time.perf_counter() - began), convention


def _samples(at: Place, path: Path, buffer: mmap.mmap, repeats: int) -> tuple[tuple[float, ...], str]:
    try:
        return tuple(_read(at, path, os.O_DIRECT, buffer) for _ in range(repeats)), CONVENTION
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    return tuple(_read(at, path, 0, buffer) for _ in range(repeats)), CACHED


def _read(at: Place, path: Path, flag: int, buffer: mmap.mmap) -> float:
    """GB/s of one pass."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    try:
        if not flag:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        began = time.perf_counter()
        done = 0
        while done < size:
            at.check()
            got = os.preadv(fd, [buffer], done)
            if not got:
                raise OSError(errno.EIO, "the file is shorter than it was")
            done += got
        return done / 1e9 / (time.perf_counter() - began)
    finally:
        os.close(fd)


def _make(at: Place, path: Path, size: int, block: int) -> None:
    """Write the file under another name first: one cut short by a full disk is neither read nor left there."""
    draft = path.with_suffix(".new")
    try:
        with draft.open("wb") as file:
            for _ in range(0, size, block):
                at.check()
                file.write(os.urandom(min(block, size)))  # nothing that a file system could squeeze
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
