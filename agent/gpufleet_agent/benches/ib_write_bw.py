"""RDMA writes to another host's port, by `ib_write_bw` of perftest. GB/s; a byte counts once.

It takes a peer, so there is no usual command: configure the client's, with device and peer. The server on the
other host has no authentication; who runs it, for how long and on which network is the site's to say.
(linux-rdma/perftest)
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
CONVENTION = "copied_once"
COST_S = 0.0
DEADLINE_S = 30.0
COMMAND: tuple[str, ...] = ()
PARAMS: Mapping[str, Value] = {"command": " ".join(COMMAND)}

_MOST = 400.0
_GB_PER_S = {"Gb/sec": 1 / 8, "MiB/sec": (1 << 20) / 1e9, "MB/sec": (1 << 20) / 1e9}
"""What it calls MB are 2^20 bytes, in all versions."""
_HEAD = re.compile(r"^\s*#bytes\s+#iterations\s+BW peak\[([\w/]+)\]\s+BW average\[([\w/]+)\](.*)$")
_ROW = re.compile(r"^\s*([0-9]{1,15})\s+([0-9]+)((?:\s+\S+)+)\s*$")
_DEVICE = re.compile(r"\bDevice\s*:\s*([A-Za-z0-9_.-]+)")
_VERSION = re.compile(r"\b(\d+(?:\.\d+)+)")


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Run it once; one result, of the port where it names its device."""
    if not at.command:
        why = "no peer: set benches.ib_write_bw.command to a client's command"
        return [tool.row("unsupported", "GB/s", why, CONVENTION)]
    version = _version(at)
    return tool.measured(at, at.command, ("GB/s", CONVENTION), lambda ran: parse(ran.out, version, _port(at)))


def parse(text: str, version: str, port: str = "1") -> list[Part]:
    """What the tool printed.

    Args:
        text: Its standard output.
        version: Of the tool.
        port: Of its device.

    Raises:
        BadTool: It cannot be read.
    """
    lines = text.splitlines()
    heads = [(at, found) for at, line in enumerate(lines) if (found := _HEAD.match(line))]
    if len(heads) != 1:
        raise tool.BadTool(f"its output has {len(heads)} results, one is expected")
    at, head = heads[0]
    unit = _GB_PER_S.get(head[2])
    if unit is None or head[1] != head[2]:
        raise tool.BadTool(f"it measured in {tool.one_line(head[2], 40)}, which is not known")
    end = next((n for n in range(at + 1, len(lines)) if lines[n].startswith("-----")), None)
    if end is None:
        raise tool.BadTool("its output is not whole")
    columns = 2 + len(re.findall(r"\[[^\]]*\]", head[3]))
    measured: dict[int, float | None] = {}
    for line in lines[at + 1 : end]:
        row = _ROW.match(line)
        if row is None:
            continue
        cells = row[3].split()
        if len(cells) != columns or int(row[1]) in measured:
            raise tool.BadTool(f"a line of its table is garbled: {tool.one_line(line, 80)}")
        measured[int(row[1])] = tool.number(cells[1], _MOST / unit)
    value = measured[max(measured)] if measured else None
    if value is None:
        raise tool.BadTool("its output has no bandwidth in it")
    devices = set(_DEVICE.findall(text))
    entity = f"port:{devices.pop()}/{port}" if len(devices) == 1 else "node:"
    result = BenchResult("ok", value * unit, "GB/s", "", (value * unit,))
    return [Part(entity, result, f"{CONVENTION}_{max(measured)}_bytes", version)]


def _version(at: Place) -> str:
    """Of the tool; empty where it is behind another program."""
    if os.path.basename(at.command[0]) != "ib_write_bw":
        return ""
    try:
        ran = tool.run([at.command[0], "--version"], min(5.0, at.deadline_s), at.check)
    except (tool.NoTool, tool.BadTool):
        return ""
    found = _VERSION.search(ran.out)
    return found[1] if found else ""


def _port(at: Place) -> str:
    """The port that the command asks for."""
    command = list(at.command)
    for name in ("-i", "--ib-port"):
        if name in command[:-1]:
            return tool.word(command[command.index(name) + 1])
    return "1"
