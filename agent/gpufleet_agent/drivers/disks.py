"""Disks by /proc/diskstats and /sys/block. Only NVMe controllers that answer are asked themselves (`nvme`).

Shown are whole disks, software RAID arrays (md) and multipath devices. Not shown: partitions, LVM and
encryption over a disk that is a row already, the hidden paths of a multipath NVMe disk, loop, RAM and CD.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files, nvme

MOST_ROWS = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9!._-]{0,31}")
_NOT_DISKS = re.compile(r"(?:loop|ram|zram|sr|fd|nbd|mtdblock|nvme\d+c\d+n)\d+")
_CONTROLLER = re.compile(r"nvme\d{1,4}")
_ADDRESS = re.compile(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/)")
_NO_FIELD = Null(Reason.NOT_SUPPORTED, "kernel")
_NOT_ASKED = Null(Reason.NOT_READ, "not_live")
_NO_PROGRESS = Null(Reason.NOT_READ, "no_progress")
_NO_SENSOR = Null(Reason.NOT_SUPPORTED, "no_sensor")
_NOT_NVME = Null(Reason.NOT_SUPPORTED, "not_nvme")
_NOT_RAID = Null(Reason.NOT_SUPPORTED, "not_raid")
_SECTOR = 512
_OPS = (0, 4)
_IN_FLIGHT = 8
_WRAP_MS = 1 << 32

_FIELDS: tuple[tuple[str, int, float], ...] = (
    ("read_ops_total", 0, 1),
    ("read_bytes_total", 2, _SECTOR),
    ("read_s_total", 3, 0.001),
    ("write_ops_total", 4, 1),
    ("write_bytes_total", 6, _SECTOR),
    ("write_s_total", 7, 0.001),
    ("in_flight", 8, 1),
    ("busy_s_total", 9, 0.001),
    ("queue_s_total", 10, 0.001),
    ("discard_ops_total", 11, 1),
    ("discard_s_total", 14, 0.001),
    ("flush_ops_total", 15, 1),
    ("flush_s_total", 16, 0.001),
)
"""Column, its place behind the name in /proc/diskstats, and what one of it is."""


class Disks:
    """Reader of probe `disk`; remembers how often the kernel's 32-bit milliseconds wrapped.

    Args:
        root: Where /proc, /sys and /dev are.
        logs: Who asks NVMe controllers for their health logs.
    """

    def __init__(self, root: Path, logs: nvme.HealthLogs | None = None) -> None:
        self._logs = logs or nvme.HealthLogs(root)
        self._block = root / "sys/block"
        self._stats = root / "proc/diskstats"
        self._last: dict[str, dict[int, int]] = {}
        self._wraps: dict[str, dict[int, int]] = {}
        self._asked: set[str] = set()

    def rows(self) -> Iterable[Row]:
        """One row per disk."""
        counted = _counts(files.read(self._stats))
        homes = self._disks()
        for kept in (self._last, self._wraps):
            for name in kept.keys() - {home.name for home in homes}:
                del kept[name]
        self._asked.clear()
        rows = [self._row(home, counted.get(home.name)) for home in homes]
        self._logs.keep(self._asked)
        return rows

    def items(self) -> Iterable[Row]:
        """What the disks are, for the inventory."""
        return [{"disk": shown(home.name), **identity(home)} for home in self._disks()]

    def _disks(self) -> list[Path]:
        return [home for home in files.listed(self._block) if _is_disk(home)][:MOST_ROWS]

    def _row(self, home: Path, counts: list[int] | None) -> Row:
        before = self._last.get(home.name, {})
        row: dict[str, Cell] = {
            "disk": shown(home.name),
            "size_bytes": _size(home),
            "rotational": files.parsed(files.read(home / "queue/rotational"), _flag),
            "state": _state(home),
            "degraded": files.parsed(files.read(home / "md/degraded"), lambda text: files.count(text.strip()))
            if files.exists(home / "md")
            else _NOT_RAID,
        }
        if counts is None:
            # the device is there and its line is not: removed between two reads
            row |= dict.fromkeys((name for name, _, _ in _FIELDS), Null(Reason.FAILED, "no_line"))
        else:
            row |= self._counters(home.name, counts)
        moved = sum(counts[at] for at in _OPS) > sum(before.get(at, 0) for at in _OPS) if counts else False
        stuck = not counts or (counts[_IN_FLIGHT] > 0 and not moved)
        row["temperature_c"] = _NO_PROGRESS if stuck else _temperature(home, row["state"])
        return row | self._health(home, stuck)

    def _health(self, home: Path, stuck: bool) -> dict[str, Cell]:
        """By the log of a controller that leads to the disk; of one that lives, if there is any."""
        controllers = _controllers(home)
        living = [one for one in controllers if files.plain(files.read(one / "state")) == "live"]
        name = next((Path(files.real(one)).name for one in living or controllers), "")
        if not _CONTROLLER.fullmatch(name):
            return dict.fromkeys(nvme.COLUMNS, _NOT_NVME)
        self._asked.add(name)
        return self._logs.read(name, _NO_PROGRESS if stuck else None if living else _NOT_ASKED)

    def _counters(self, name: str, counts: list[int]) -> dict[str, Cell]:
        before, wraps = self._last.get(name, {}), self._wraps.setdefault(name, {})
        row: dict[str, Cell] = {}
        anew = any(counts[at] < before.get(at, 0) for at in (0, 2, 4, 6))
        if anew:
            wraps.clear()
        for column, at, unit in _FIELDS:
            if at >= len(counts):
                row[column] = _NO_FIELD
                continue
            value = counts[at]
            if unit == 0.001:
                if not anew and value < before.get(at, 0) and before[at] > _WRAP_MS // 2 > value:
                    wraps[at] = wraps.get(at, 0) + 1
                row[column] = (value + wraps.get(at, 0) * _WRAP_MS) / 1000
            else:
                row[column] = value * int(unit)
        self._last[name] = dict(enumerate(counts))
        return row


def shown(name: str) -> str:
    """Name of the device in /dev: the kernel writes `cciss!c0d0` for `cciss/c0d0`."""
    return name.replace("!", "/")


def identity(home: Path) -> dict[str, str]:
    """Model, serial, firmware, size, kind and place of a disk, as far as they can be read."""
    device = home / "device"
    size = _size(home)
    address = next((files.plain(files.read(one / "address")) for one in _controllers(home)), "")
    found = {
        "model": _first(device / "model", device / "name"),
        "vendor": _first(device / "vendor"),
        "serial": _first(device / "serial", home / "serial") or _page_80(device / "vpd_pg80"),
        "firmware": _first(device / "firmware_rev", device / "rev"),
        "wwid": _first(home / "wwid", device / "wwid"),
        "transport": _first(device / "transport"),
        "raid_level": _first(home / "md/level"),
        "size_bytes": "" if isinstance(size, Null) else str(size),
        "rotational": _first(home / "queue/rotational"),
        "pci": (_ADDRESS.findall(f"/{address}/") or _ADDRESS.findall(f"{files.real(device)}/") or [""])[-1],
    }
    if found["vendor"].startswith("0x"):  # of virtio and MMC: a number that says nothing to people
        found["vendor"] = ""
    return {name: text for name, text in found.items() if text}


def _is_disk(home: Path) -> bool:
    if not _NAME.fullmatch(home.name) or _NOT_DISKS.fullmatch(home.name):
        return False
    if files.plain(files.read(home / "hidden")) == "1":
        return False
    if files.exists(home / "md"):
        return _size(home) != 0
    if files.exists(home / "dm"):
        return files.plain(files.read(home / "dm/uuid")).startswith("mpath-")
    # a card reader or drive bay without anything in it is a disk of no size
    return files.exists(home / "device") and _size(home) != 0


def _counts(text: str | Null) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in "" if isinstance(text, Null) else text.split("\n"):
        words = line.split()
        # 11 columns behind the name, 15 with discards (Linux 4.18), 17 with flushes (5.5)
        if len(words) >= 14 and all(re.fullmatch(r"[0-9]{1,19}", word) for word in words[3:20]):
            found[words[2].replace("/", "!")] = [int(word) for word in words[3:20]]
    return found


def _size(home: Path) -> Cell:
    return files.parsed(files.read(home / "size"), lambda text: files.count(text.strip()) * _SECTOR)


def _flag(text: str) -> Cell:
    return {"0": False, "1": True}[text.strip()]


def _state(home: Path) -> Cell:
    """What its driver says: live, resetting, dead (NVMe); running, offline (SCSI); clean, active (RAID)."""
    if files.exists(home / "md"):
        return _word(files.read(home / "md/array_state"))
    states = [_word(files.read(controller / "state")) for controller in _controllers(home)]
    if not states:
        return _word(files.read(home / "device/state"))
    return "live" if "live" in states else states[0]


def _word(text: str | Null) -> Cell:
    return files.parsed(text, lambda text: re.findall(r"^[a-z][a-z_ -]{1,31}$", text.strip())[0])


def _controllers(home: Path) -> list[Path]:
    """Of an NVMe disk: its one, or all that lead to it (multipath)."""
    if not home.name.startswith("nvme"):
        return []
    device = home / "device"
    several = [path for path in files.listed(device) if _CONTROLLER.fullmatch(path.name)]
    return several or [device]


def _temperature(home: Path, state: Cell) -> Cell:
    """Composite temperature of an NVMe disk. Only asked of one that answers: the kernel asks the disk."""
    if state != "live":
        return _NO_SENSOR if not home.name.startswith("nvme") else _NOT_ASKED
    for controller in _controllers(home):
        if files.plain(files.read(controller / "state")) != "live":
            continue
        for folder in (controller, controller / "hwmon"):
            for sensor in files.listed(folder):
                if re.fullmatch(r"hwmon\d{1,4}", sensor.name):
                    return files.parsed(files.read(sensor / "temp1_input"), _millidegrees)
    return _NO_SENSOR


def _millidegrees(text: str) -> Cell:
    return int(text.strip()) / 1000


def _first(*places: Path) -> str:
    return next((text for place in places if (text := files.plain(files.read(place))[:128])), "")


def _page_80(place: Path) -> str:
    """Serial number of a SCSI disk: four bytes, then text."""
    text = files.read(place)
    return "" if isinstance(text, Null) else files.plain(text[4:])[:128]
