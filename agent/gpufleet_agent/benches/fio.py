"""Reading from a disk with several requests at once, by `fio`. GB/s.

Where `disk_read` reads in order with one request, this finds what a disk gives to a data loader. Its usual
file is in the state directory and kept; a site names the file system that it cares about in its own command.
(axboe/fio, versions 2 and 3)
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent import tool
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Part, Place

EVERY = 24 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu"] = "host"
CONVENTION = "read"
COST_S = 0.0
DEADLINE_S = 60.0
COMMAND = (
    "fio", "--output-format=json", "--name=gpufleet", "--filename={state_dir}/bench-fio.dat", "--rw=randread",
    "--bs=1M", "--size=256M", "--direct=1", "--ioengine=psync", "--thread", "--numjobs=4", "--group_reporting",
    "--runtime=5", "--time_based",
)  # fmt: skip
PARAMS: Mapping[str, Value] = {"command": " ".join(COMMAND)}

_MOST = 1000.0
_ROOM = 1 << 30
_WAYS = ("read", "write")


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Run it once; one result, or one per direction."""
    if not at.command:
        try:
            free = os.statvfs(at.state_dir)
        except OSError as error:
            return [tool.row("failed", "GB/s", f"{at.state_dir}: {error.strerror}", CONVENTION)]
        if free.f_bavail * free.f_frsize < _ROOM:
            why = f"less than {_ROOM >> 20} MiB free in {at.state_dir}"
            return [tool.row("skipped", "GB/s", why, CONVENTION)]
    command = [argument.replace("{state_dir}", at.state_dir) for argument in at.command or COMMAND]
    return tool.measured(at, command, ("GB/s", CONVENTION), lambda ran: parse(ran.out))


def parse(text: str) -> list[Part]:
    """What the tool printed with --output-format=json.

    Raises:
        BadTool: It cannot be read.
    """
    said = tool.document(text, "fio version")
    version = tool.word(said.get("fio version"))
    jobs = [tool.obj(job) for job in tool.array(said.get("jobs"))]
    if not jobs:
        raise tool.BadTool("its output has no job in it")
    for job in jobs:
        if job.get("error") not in (0, None):
            why = f"job {tool.one_line(str(job.get('jobname')), 40)}: error {tool.one_line(str(job['error']), 20)}"
            return [tool.row("failed", "GB/s", why, CONVENTION, version)]
    parts = []
    for way in _WAYS:
        sides = [tool.obj(job.get(way)) for job in jobs]
        moved = [tool.number(side.get("io_bytes"), 1e17) is not None for side in sides]
        if any(moved):
            speeds = [_speed(side, version) for side, some in zip(sides, moved, strict=True) if some]
            known = [speed for speed in speeds if speed is not None]
            if len(known) < len(speeds) or not sum(known) <= _MOST:
                raise tool.BadTool(f"its output has no bandwidth of {way} in it")
            value = sum(known)
            parts.append(Part("node:", BenchResult("ok", value, "GB/s", "", (value,)), way, version))
    if not parts:
        raise tool.BadTool("nothing was read or written")
    return parts


def _speed(side: Mapping[str, object], version: str) -> float | None:
    """GB/s of one direction of a job; it must agree with the bytes and the time beside it."""
    old = re.match(r"fio-[12]\.", version) is not None  # its io_bytes are KiB
    unit = 1024 if old else 1
    speed = tool.number(side.get("bw_bytes"), 1e15)
    if speed is None:
        kib = tool.number(side.get("bw"), 1e12)
        speed = kib * 1024 if kib is not None else None
    moved, took_ms = tool.number(side.get("io_bytes"), 1e17), tool.number(side.get("runtime"), 1e9)
    if speed is None or moved is None or took_ms is None:
        return None
    expected = moved * unit / took_ms * 1e3
    return speed / 1e9 if abs(speed - expected) <= 0.2 * expected else None
