"""What the files of the kernel's amdgpu driver say: how they are read, and what stands in them.

Used by drivers/amdgpu.py. Nothing here raises for a file that is missing, truncated or full of bytes: the
cell is a Null that says why.
"""

import errno
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import Progress

_CHANNEL = re.compile(r"(temp|freq)[0-9]{1,3}_label")
_LEVEL = re.compile(r"^\s*(?:[0-9]{1,3}|S):\s*([0-9]{1,6})(?:\.[0-9]+)?\s*MHz\s*(\*?)\s*$", re.IGNORECASE)
_LABELS = ("edge", "junction", "mem", "sclk", "mclk")
_PAGE = 4096
_MOST_MHZ = 100_000
_NO_SENSOR = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EOPNOTSUPP)

_UNPARSABLE = Null(Reason.FAILED, "unparsable")
REFUSED = Null(Reason.FAILED, "EPERM")
"""What the driver answers while it resets the card, and newer ones while the card sleeps. Permission is not
the matter: that is decided when the file is opened."""

_POWER_CAP, _HW_SLOWDOWN, _SW_THERMAL = 4, 8, 32
_REASONS = (
    # firmware keeps power (PPT, SPL) or current (TDC, EDC) within its budget: normal under load
    (_POWER_CAP, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22)),
    # firmware keeps a temperature (die, memory, regulators, coolant) at its limit
    (_SW_THERMAL, (32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43)),
    # a regulator or the board pulls a wire that forces the clock down
    (_HW_SLOWDOWN, (44, 45, 46, 47)),
)
"""Bits of `indep_throttle_status` by what they mean in `clock_reasons`, which has no equal of the others."""

_HEADER = struct.Struct("<HBB")
_U64 = struct.Struct("<Q")
_THROTTLE = {(1, 3): (120, 112)}
_ENERGY = {(1, 4): (288, 24), (1, 5): (360, 88), (1, 6): (1664, 16), (1, 7): (2208, 24), (1, 8): (0, 24)}
"""Revision of gpu_metrics -> its size (0 = not fixed), the place of energy. Before, it has no known unit."""

_JOULE = 2.0**-16


class Files:
    """The driver's files of one card.

    Args:
        device: The card's directory, named by its PCI address.
        progress: Where each read is announced.
    """

    def __init__(self, device: Path, progress: Progress) -> None:
        self.device = device
        self._base = str(device)
        self._pci = device.name
        self._progress = progress
        self._hwmon: Path | None = None
        self._channels: dict[str, str] = {}
        self._labelled = False

    def raw(self, name: str) -> bytes | Null:
        """The first page of a file below the card's directory: the driver gives no more in one answer."""
        self._progress.enter(self._pci, name.rpartition("/")[2])
        try:
            file = os.open(f"{self._base}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(file, _PAGE)
            except PermissionError:
                return REFUSED
            finally:
                os.close(file)
        except OSError as error:
            return _null(error)
        finally:
            self._progress.leave()

    def text(self, name: str) -> str | Null:
        """A file that holds text."""
        data = self.raw(name)
        return data if isinstance(data, Null) else data.decode(errors="replace")

    def number(self, name: str) -> Cell:
        """A file that holds one number."""
        return parsed(self.text(name), _integer)

    def plain(self, name: str) -> str:
        """A file that holds one line; empty where there is nothing to show."""
        text = self.text(name)
        return "" if isinstance(text, Null) else shown(text)

    def sensor(self, name: str, per_unit: float) -> Cell:
        """A file of the card's hwmon directory, in units."""
        hwmon = self._find_hwmon()
        if isinstance(hwmon, Null):
            return hwmon
        value = self.number(f"hwmon/{hwmon.name}/{name}")
        return value if isinstance(value, Null) else float(value) / per_unit

    def channel(self, kind: str, label: str, what: str, per_unit: float) -> Cell:
        """A sensor by its label: which number it has differs between cards."""
        hwmon = self._find_hwmon()
        if isinstance(hwmon, Null):
            return hwmon
        if not self._labelled:
            self._read_labels(hwmon)
        prefix = self._channels.get(f"{kind} {label}")
        if prefix is None:
            return Null(Reason.NOT_SUPPORTED, f"no {label}") if self._labelled else _UNPARSABLE
        return self.sensor(f"{prefix}_{what}", per_unit)

    def _find_hwmon(self) -> Path | Null:
        """The directory; its number is another one at each boot and each load of the driver."""
        if self._hwmon is not None and self._hwmon.is_dir():
            return self._hwmon
        self._hwmon, self._labelled = None, False
        listed = listing(self.device / "hwmon")
        if isinstance(listed, Null):
            return listed
        for number in listed:
            name = self.text(f"hwmon/{number}/name")
            if not isinstance(name, Null) and name.strip() == "amdgpu":
                self._hwmon = self.device / "hwmon" / number
                return self._hwmon
        return _UNPARSABLE if listed else Null(Reason.NOT_SUPPORTED, "no hwmon")

    def _read_labels(self, hwmon: Path) -> None:
        # drivers before labels have one temperature, at the edge, and two clocks
        self._channels = {"temp edge": "temp1", "freq sclk": "freq1", "freq mclk": "freq2"}
        self._labelled = True
        for name in names_in(hwmon):
            if found := _CHANNEL.fullmatch(name):
                label = self.plain(f"hwmon/{hwmon.name}/{name}")
                prefix = name.removesuffix("_label")
                unnamed = {key: value for key, value in self._channels.items() if value != prefix}
                self._channels = unnamed | {f"{found[1]} {label}": prefix}
                # one that cannot be read is read again next time
                self._labelled = self._labelled and label in _LABELS


def errors(text: str) -> tuple[int, int] | Null:
    """Corrected and uncorrectable errors of one block."""
    found = dict(re.findall(r"^(ue|ce):\s*([0-9]{1,18})\s*$", text, re.MULTILINE))
    if found.keys() == {"ue", "ce"}:
        return int(found["ce"]), int(found["ue"])
    return Null(Reason.FAILED, "inaccessible") if "inaccessible" in text else _UNPARSABLE


def clock_reasons(data: bytes | Null) -> Cell:
    """The bits of `clock_reasons` that gpu_metrics has an equal of."""
    bits = _field(data, _THROTTLE)
    if isinstance(bits, Null):
        return bits
    return sum(reason for reason, places in _REASONS if any(bits >> place & 1 for place in places))


def energy_j(data: bytes | Null) -> Cell:
    """The energy counter of gpu_metrics, where it has a unit."""
    units = _field(data, _ENERGY)
    return units if isinstance(units, Null) else units * _JOULE


def _field(data: bytes | Null, places: Mapping[tuple[int, int], tuple[int, int]]) -> int | Null:
    """A 64-bit field of gpu_metrics, where its revision has it."""
    if isinstance(data, Null):
        return data
    if len(data) < _HEADER.size:
        return _UNPARSABLE
    size, layout, content = _HEADER.unpack_from(data)
    if (layout, content) not in places:
        return Null(Reason.NOT_SUPPORTED, f"gpu_metrics v{layout}_{content}")
    wanted, place = places[layout, content]
    # what does not fit into a page is cut
    whole = len(data) == size or _PAGE - 1 <= len(data) < size
    if not whole or size < place + _U64.size or wanted not in (0, size):
        return _UNPARSABLE
    value: int = _U64.unpack_from(data, place)[0]
    return Null(Reason.NOT_SUPPORTED, "blank") if value == 2**64 - 1 else value


def _levels(text: str) -> list[tuple[int, bool]]:
    """Clock levels in MHz, and whether each is the chosen one."""
    found = [_LEVEL.match(line) for line in text.splitlines()]
    levels = [(int(level[1]), level[2] == "*") for level in found if level]
    if not levels or any(mhz > _MOST_MHZ for mhz, _ in levels):
        raise ValueError(text)
    return levels


def current_level(text: str) -> Cell:
    """The level with the star in a pp_dpm file, MHz; "S" is the clock of a deep sleep.

    Raises:
        ValueError: There are no levels in it.
    """
    chosen = {mhz for mhz, is_chosen in _levels(text) if is_chosen}
    return float(chosen.pop()) if len(chosen) == 1 else Null(Reason.FAILED, "no one level")


def highest_level(text: str) -> Cell:
    """The highest level of a pp_dpm file, MHz.

    Raises:
        ValueError: There are no levels in it.
    """
    return max(mhz for mhz, _ in _levels(text))


def _integer(text: str) -> Cell:
    if not re.fullmatch("-?[0-9]{1,19}", text.strip()):
        raise ValueError(text)
    return int(text)


def parsed(text: str | Null, parse: Callable[[str], Cell]) -> Cell:
    """The value, or why there is none."""
    if isinstance(text, Null):
        return text
    try:
        return parse(text)
    except ValueError:
        return _UNPARSABLE


def attribute(cell: Cell) -> str:
    """A value as the inventory keeps it; empty where there is none."""
    if isinstance(cell, Null):
        return ""
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def shown(text: str) -> str:
    """One line that can be shown; empty where bytes are no text."""
    line = text.strip()
    return "" if "\ufffd" in line or not line.isprintable() else line[:256]


def _null(error: OSError) -> Null:
    """Why something could not be opened or read."""
    word = errno.errorcode.get(error.errno or 0, "failed")
    if isinstance(error, PermissionError):
        return Null(Reason.NO_PERMISSION, word)
    return Null(Reason.NOT_SUPPORTED if error.errno in _NO_SENSOR else Reason.FAILED, word)


def read_or_empty(path: Path) -> str:
    """A small file that calls into no driver."""
    try:
        with path.open("rb") as file:
            return file.read(_PAGE).decode(errors="replace")
    except OSError:
        return ""


def listing(path: Path) -> list[str] | Null:
    """Names in a directory, in order."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return _null(error)


def names_in(path: Path) -> list[str]:
    """Names in a directory; none where there is nothing to list."""
    names = listing(path)
    return [] if isinstance(names, Null) else names


def link_name(path: Path) -> str:
    """Where a link points, by its last name; empty when there is none."""
    try:
        return os.path.basename(os.readlink(path).rstrip("/"))
    except OSError:
        return ""


def inode(path: Path) -> int:
    """A number that is another one when the directory was made anew; 0 where there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
