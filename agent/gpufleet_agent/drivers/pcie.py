"""PCI Express by /sys: the path of a device to its root, each link on it, the errors counted at both ends.

Reads what the kernel keeps in memory, and the link registers of ports that are awake; wakes no device and
raises for no file. drivers/sysfs.py makes the columns of probe `pci` of it.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
LINK = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
PATH = ("path_gen", "path_gen_max", "path_width", "path_width_max", "slowest", "narrowest")
NO_ANSWER = Null(Reason.FAILED, "all_ones")
ASLEEP = Null(Reason.NOT_READ, "suspended")

_ABSENT = Null(Reason.NOT_SUPPORTED, "ENOENT")
_NO_PORT = Null(Reason.NOT_SUPPORTED, "no_port")
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_RUNTIME = ("active", "suspended", "suspending", "resuming", "error", "unsupported")
_GONE_WIDTH = "63"
_ONES = b"\xff\xff\xff\xff"
_SEVERITIES = {"corrected": "correctable", "nonfatal": "nonfatal", "fatal": "fatal"}
_TOTALS = ("TOTAL_ERR_COR", "TOTAL_ERR_NONFATAL", "TOTAL_ERR_FATAL")
_EXTENDED = 0x100
_MOST_CAPABILITIES = 64
_ACS = 0x000D
_REDIRECTS = 0b01100
"""ACS P2P request redirect and completion redirect: traffic between two devices goes by way of the root."""

End = Mapping[str, Cell]
"""One end's view of a link: the columns of `LINK`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One link of a path, by what both of its ends say; its name is the address at its lower end."""

    address: str
    gen: Cell
    gen_max: Cell
    width: Cell
    width_max: Cell

    def __str__(self) -> str:
        """`0000:1b:00.0 5x8/5x16`: what it runs at, and what both ends can do."""
        gen, gen_max, width, width_max = (
            "?" if isinstance(cell, Null) else str(cell)
            for cell in (self.gen, self.gen_max, self.width, self.width_max)
        )
        return f"{self.address} {gen}x{width}/{gen_max}x{width_max}"


class Pcie:
    """Readers of one folder of devices, /sys/bus/pci/devices."""

    def __init__(self, devices: Path) -> None:
        self._devices = devices

    def runtime_status(self, address: str) -> Cell:
        """Whether the device is powered: active, suspended, ..."""
        return files.word(self._devices / address / "power/runtime_status", _RUNTIME)

    def present(self, address: str) -> Cell:
        """False when the device is listed but reads all ones: it no longer answers."""
        device = self._devices / address
        width = files.read(device / "current_link_width")
        if not isinstance(width, Null) and width.strip() == _GONE_WIDTH:
            return False
        head = _at(device / "config", 0)
        if isinstance(head, Null):
            return head
        return head != _ONES if len(head) == 4 else files.UNPARSABLE

    def link(self, address: str) -> dict[str, Cell]:
        """What the device's own end says of its link."""
        device = self._devices / address
        return {
            "pcie_gen": files.parsed(files.read(device / "current_link_speed"), _generation),
            "pcie_gen_max": files.parsed(files.read(device / "max_link_speed"), _generation),
            "pcie_width": files.parsed(files.read(device / "current_link_width"), _lanes),
            "pcie_width_max": files.parsed(files.read(device / "max_link_width"), _lanes),
        }

    def ports(self, address: str) -> tuple[str, ...]:
        """The ports above a device, root first; none for one that sits at a root."""
        try:
            names = os.readlink(self._devices / address).split("/")[:-1]
        except OSError:
            return ()
        first = len(names)
        while first and ADDRESS.fullmatch(names[first - 1]):
            first -= 1
        return tuple(names[first:])

    def path(self, address: str, own: End, ports: Sequence[str], known: dict[str, End]) -> dict[str, Cell]:
        """The links from the device to its root: each one, the slowest and the narrowest.

        Args:
            address: The device.
            own: What its own end says.
            ports: Those above it, root first.
            known: What was read of ports in this sweep, for many devices share them; grows.
        """
        # from the device up, every other hop is inside a switch and no link
        chain = [address, *reversed(ports)]
        segments: list[Segment] = []
        for place in range(0, len(chain), 2):
            below = own if place == 0 else self._port(chain[place], known)
            above = self._port(chain[place + 1], known) if place + 1 < len(chain) else {}
            segments.append(segment(chain[place], below, above))
        gen, slowest = _weakest([(one.address, one.gen, one.gen_max) for one in segments])
        width, narrowest = _weakest([(one.address, one.width, one.width_max) for one in segments])
        told = [one for one in reversed(segments) if one != Segment(one.address, *[_ABSENT] * 4)]
        return {
            "path_links": ", ".join(map(str, told)),
            "path_gen": gen,
            "path_gen_max": _least(one.gen_max for one in segments),
            "path_width": width,
            "path_width_max": _least(one.width_max for one in segments),
            "slowest": slowest,
            "narrowest": narrowest,
        }

    def _port(self, address: str, known: dict[str, End]) -> End:
        if address not in known:
            asleep = self.runtime_status(address) == "suspended"
            known[address] = dict.fromkeys(LINK, ASLEEP) if asleep else self.link(address)
        return known[address]

    def errors(self, address: str) -> dict[str, Cell]:
        """What the kernel counted at one end of a link (AER), and of which kinds; asks no device."""
        found: dict[str, Cell] = {}
        named: list[str] = []
        for severity, word in _SEVERITIES.items():
            text = files.read(self._devices / address / f"aer_dev_{word}")
            found[f"aer_{severity}_total"], counts = (text, ()) if isinstance(text, Null) else _counts(text)
            named += [f"{severity} {count}" for count in counts]
        unread = found["aer_corrected_total"]
        found["aer_errors"] = unread if isinstance(unread, Null) and not named else ", ".join(named[:24])
        return found

    def port_errors(self, ports: Sequence[str]) -> dict[str, Cell]:
        """The same for the port above a device, which often is the one that counts."""
        found = self.errors(ports[-1]) if ports else dict.fromkeys(_ERRORS, _NO_PORT)
        return {f"port_{name}": cell for name, cell in found.items()}

    def redirected(self, address: str) -> bool | None:
        """Whether a port sends traffic between two devices by way of the root (ACS); None = not to be seen.

        Past its first 64 bytes only root may read a device's configuration space.
        """
        if self.runtime_status(address) == "suspended":
            return None
        config = self._devices / address / "config"
        place = _EXTENDED
        for _ in range(_MOST_CAPABILITIES):
            head = _at(config, place)
            if isinstance(head, Null) or len(head) < 4 or head == _ONES:
                return None
            word = int.from_bytes(head, "little")
            if word & 0xFFFF == _ACS:
                body = _at(config, place + 4)
                if isinstance(body, Null) or len(body) < 4:
                    return None
                return bool(int.from_bytes(body[2:], "little") & _REDIRECTS)
            place = word >> 20
            if place < _EXTENDED:
                return False
        return None

    def acs(self, addresses: Iterable[str]) -> str:
        """`on` when a port above one of these devices redirects, `off` when none does, else empty."""
        ports = sorted({port for address in addresses for port in self.ports(address)})
        found = [self.redirected(port) for port in ports]
        if True in found:
            return "on"
        return "off" if found and None not in found else ""

    def iommu(self, root: Path, addresses: Iterable[str]) -> str:
        """`off`, `on/passthrough`, `on/translated`, or `on`; empty where /sys does not tell.

        By the groups of these devices, which may differ from what the kernel was started with. What a virtual
        machine holds has a domain of its own and does not count.
        """
        if not (root / "sys/class").is_dir():
            return ""
        if not files.listed(root / "sys/class/iommu"):
            return "off"
        types: set[str] = set()
        for address in addresses:
            home = self._devices / address
            if files.link(home / "driver") != "vfio-pci":
                types.add(files.plain(files.read(home / "iommu_group/type")))
        if any(word.startswith("DMA") for word in types):
            return "on/translated"
        if "identity" in types:
            return "on/passthrough"
        words = files.plain(files.read(root / "proc/cmdline")).split()
        for word in reversed(words):
            if word in ("iommu=pt", "iommu.passthrough=1"):
                return "on/passthrough"
            if word in ("iommu=nopt", "iommu.passthrough=0"):
                return "on/translated"
        return "on"


class Best:
    """The most that each device's link has shown since the agent started.

    For the inventory, where a link that comes and goes shall make no new row: the collector learns from it
    what to expect. Another kind of device at the same address starts anew.
    """

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Cell, dict[str, int]]] = {}

    def after(self, row: Mapping[str, Cell]) -> dict[str, int]:
        """The best of a device, this row of probe `pci` included; without what it never showed."""
        address, device = str(row["pci"]), row["device_id"]
        known = self._shown.get(address)
        if known is None or (known[0] != device and not isinstance(device, Null)):
            known = self._shown[address] = (device, {})
        for name, column in _BEST.items():
            cell = row[column]
            if not isinstance(cell, Null):
                known[1][name] = max(int(cell), known[1].get(name, 0))
        return dict(known[1])


_BEST = {
    "pcie_gen_max_seen": "pcie_gen_max",
    "pcie_width_max_seen": "pcie_width_max",
    "pcie_gen_best": "pcie_gen",
    "pcie_width_best": "pcie_width",
    "path_gen_best": "path_gen",
    "path_width_best": "path_width",
    "path_gen_possible": "path_gen_max",
    "path_width_possible": "path_width_max",
}
_ERRORS = (*(f"aer_{severity}_total" for severity in _SEVERITIES), "aer_errors")


def segment(address: str, below: End, above: End) -> Segment:
    """A link by its two ends: they run at the same, and can do what the weaker one can."""

    def now(name: str) -> Cell:
        cell, other = below[name], above.get(name, _ABSENT)
        return other if isinstance(cell, Null) and not isinstance(other, Null) else cell

    def most(name: str, running: Cell) -> Cell:
        cell = _least((below[name], above.get(name, _ABSENT)))
        # a port of a virtual machine may claim to do less than goes through it
        return cell if isinstance(cell, Null) or isinstance(running, Null) else max(int(cell), int(running))

    gen, width = now("pcie_gen"), now("pcie_width")
    return Segment(address, gen, most("pcie_gen_max", gen), width, most("pcie_width_max", width))


def _least(cells: Iterable[Cell]) -> Cell:
    """The smallest that is known; the first Null where none is."""
    held = list(cells)
    known = [int(cell) for cell in held if not isinstance(cell, Null)]
    return min(known) if known else held[0]


def _weakest(segments: Sequence[tuple[str, Cell, Cell]]) -> tuple[Cell, Cell]:
    """The smallest value of (address, now, possible), and where.

    Of equals the one that could do more, then the one next to the device. Unknown while any link of the path
    is, e.g. because it trains anew; what has nothing to say is left out.
    """
    known: list[tuple[int, bool, str]] = []
    for address, now, most in segments:
        if not isinstance(now, Null):
            known.append((int(now), isinstance(most, Null) or int(most) <= int(now), address))
        elif now.reason is not Reason.NOT_SUPPORTED:
            return now, now
    if not known:
        return segments[0][1], segments[0][1]
    value, _, address = min(known, key=lambda one: one[:2])
    return value, address


def _generation(text: str) -> Cell:
    """`32.0 GT/s PCIe` -> 5."""
    if text.strip().startswith("Unknown"):
        return Null(Reason.FAILED, "Unknown")
    return _GENERATIONS[float(text.split()[0])]


def _lanes(text: str) -> Cell:
    lanes = files.count(text.strip())
    return lanes if lanes in (1, 2, 4, 8, 12, 16, 32) else Null(Reason.FAILED, text.strip()[:8])


@lru_cache(maxsize=64)
def _counts(text: str) -> tuple[Cell, tuple[str, ...]]:
    """The line TOTAL_ERR_... of an error file, and the kinds that were counted at all.

    Nearly all such files of a host are the same: nothing but noughts.
    """
    counts = re.findall(r"^([A-Za-z]\w{1,31}) ([0-9]{1,19})$", text, re.MULTILINE | re.ASCII)
    totals = [int(count) for name, count in counts if name in _TOTALS]
    kinds = [f"{name} {int(count)}" for name, count in counts if name not in _TOTALS and int(count)]
    return totals[0] if totals else files.UNPARSABLE, tuple(kinds)


def _at(path: Path, place: int) -> bytes | Null:
    """Four bytes of a configuration space; fewer where it ends."""
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), 4, place)
    except OSError as error:
        return files.why(error)
