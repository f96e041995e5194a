"""Copies between host and cards, between cards and within each, by NVIDIA's `nvbandwidth`. GB/s.

A byte counts once, also within a card. Between cards the value of a card is that of the slowest of its peers,
and the convention says how many these are. Its tests of latency, which a site's own command may ask for, are in us,
and of those of a card the slowest is the longest. (NVIDIA/nvbandwidth, versions 0.5 to 0.9)
"""

import re
from collections.abc import Mapping, Sequence
from statistics import median
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
DEADLINE_S = 180.0
COMMAND = (
    "nvbandwidth", "-j", "-t", "host_to_device_memcpy_ce", "device_to_host_memcpy_ce",
    "device_to_device_memcpy_write_ce", "device_local_copy",
)  # fmt: skip
PARAMS: Mapping[str, Value] = {"command": " ".join(COMMAND)}

_MOST = 20_000.0
_UNITS = {"GB/s": ("GB/s", 1.0, CONVENTION), "ns": ("us", 1e-3, "latency")}
"""What it measured in -> our unit, factor, what was counted."""
_UNIT = re.compile(r"\(([^()]*)\)\s*$")
_ADDRESS = re.compile(r"\(([0-9a-fA-F]{8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.0)?\)")


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Run it once; a result per test and card."""
    return tool.measured(
        at,
        at.command or COMMAND,
        ("GB/s", CONVENTION),
        lambda ran: parse(ran.out, at.cards),
        on_cards=True,
    )


def parse(text: str, cards: Mapping[str, str]) -> list[Part]:
    """What the tool printed with -j.

    Args:
        text: Its standard output.
        cards: PCI address -> entity.

    Raises:
        BadTool: It cannot be read.
    """
    said = tool.obj(tool.document(text, "nvbandwidth")["nvbandwidth"])
    version = tool.word(said.get("version")) or tool.word(said.get("git_version"))
    tests = [tool.obj(test) for test in tool.array(said.get("testcases"))]
    parts: list[Part] = []
    if said.get("error"):
        parts.append(tool.row("failed", "GB/s", str(said["error"]), CONVENTION, version))
    elif not tests:
        raise tool.BadTool("its output has no test in it")
    entities = _entities(said, cards)
    named: dict[str, list[Mapping[str, object]]] = {}
    for test in tests:
        named.setdefault(tool.word(test.get("name")), []).append(test)
    for name, entries in named.items():
        if not name:
            raise tool.BadTool("its output has a test without a name")
        # one that is waived or fails is named a second time, beside the entry of its start
        ends = [entry for entry in entries if entry.get("status") != "Running"]
        status = str(ends[0].get("status")).lower() if ends else "did not end"
        if len(ends) > 1:
            status = "ended twice"
        convention = f"{CONVENTION}:{name}"
        if status == "passed" and not said.get("error"):
            told = _UNIT.search(str(ends[0].get("bandwidth_description") or "(GB/s)"))
            unit = told[1].strip() if told else ""
            if unit in _UNITS:
                parts += _cards(name, ends[0].get("bandwidth_matrix"), entities, unit, version)
            else:
                why = f"{name}: measured in {tool.one_line(unit, 40) or 'no unit'}, which is not known"
                parts.append(tool.row("failed", "GB/s", why, convention, version))
        elif status in ("waived", "not found", "passed"):
            parts.append(tool.row("unsupported", "GB/s", f"{name}: {status}", convention, version))
        else:
            parts.append(tool.row("failed", "GB/s", f"{name}: {status}", convention, version))
    return parts


def _entities(said: Mapping[str, object], cards: Mapping[str, str]) -> list[str]:
    """The entity of each of its devices, in its order.

    Raises:
        BadTool: One cannot be told.
    """
    devices = next((tool.array(v) for key, v in said.items() if key.lower().endswith("device list")), [])
    if not devices:  # before 0.6 it did not say; the order is that of the bus, as we asked for
        return [cards[pci] for pci in sorted(cards)]
    found = []
    for device in devices:
        at = _ADDRESS.search(str(device))
        pci = f"{at[1][-4:]}:{at[2]}:{at[3]}.0".lower() if at else ""
        if pci not in cards:
            raise tool.BadTool(f"it measured a card that is not known here: {tool.one_line(str(device))}")
        found.append(cards[pci])
    return found


def _cards(name: str, matrix: object, entities: Sequence[str], measured_in: str, version: str) -> list[Part]:
    unit, factor, counted = _UNITS[measured_in]
    convention = f"{counted}:{name}"
    rows = [tool.array(line) for line in tool.array(matrix)]
    n = len(entities)
    among = name.startswith("device_to_device")
    if not n or len(rows) != (n if among else 1) or any(len(line) != n for line in rows):
        why = f"{name}: its matrix does not fit {n} cards"
        return [tool.row("failed", unit, why, convention, version)]
    parts = []
    for at, entity in enumerate(entities):
        cells = [rows[at][to] for to in range(n) if to != at] if among else [rows[0][at]]
        cells = [cell for cell in cells if str(cell).strip().upper() != "N/A"]
        values = [tool.number(cell, _MOST) for cell in cells]
        known = [value * factor for value in values if value is not None]
        if not cells:
            parts.append(tool.row("unsupported", unit, f"{name}: N/A", convention, version, entity))
        elif len(known) < len(cells):
            bad = next(cell for cell, value in zip(cells, values, strict=True) if value is None)
            why = f"{name}: {bad!r:.40} is no {'bandwidth' if factor == 1 else 'latency'}"
            parts.append(tool.row("failed", unit, why, convention, version, entity))
        else:
            slowest = f":slowest_of_{len(known)}" if among else ""
            value = (min(known) if factor == 1 else max(known)) if among else median(known)
            result = BenchResult("ok", value, unit, "", tuple(known))
            parts.append(Part(entity, result, convention + slowest, version))
    return parts
