"""Network ports in /sys: RDMA devices (InfiniBand, RoCE) and the Ethernet cards beside them; probe `port`.

Every file is read on its own: one that holds text, is empty or answers EINVAL is one NULL. What only differs
when hardware or names change (addresses, firmware, interfaces) is looked up again once a minute; states and
counters each time. A port is known by GUID or PCI address: its name is what the kernel called it this time.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import affinity, files

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 60.0
"""How long addresses, firmware and interfaces are taken as they were."""

FORGET_S = 3600.0
"""How long a port counts as in use, and its best rate as its own, after it was last seen so."""

REFUSED_S = 600.0
"""How long a counter that the device refuses is left alone: some note each try in the kernel log."""

MOST_PORTS = 256

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec(?: \((\d{1,3})X(?: ([A-Z0-9]{2,8}))?\))?")
_GID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}")
_GUID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){3}")
_REPRESENTOR = re.compile(r"(?:c\d+)?pf\d+(?:vf|sf)\d+|pf\d+hpf")
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_PHYSICAL = ("", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery",
             "Phy Test")  # fmt: skip
_LAYERS = ("InfiniBand", "Ethernet", "Unspecified")
_ETHER = "1"
_UP = 1

_8, _16, _32 = 0xFF, 0xFFFF, 0xFFFF_FFFF
COUNTERS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "symbol_errors_total": ("symbol_error", (_16, _32)),
    "link_error_recovery_total": ("link_error_recovery", (_8, _16, _32)),
    "link_downed_total": ("link_downed", (_8, _16, _32)),
    "rcv_errors_total": ("port_rcv_errors", (_16, _32)),
    "rcv_remote_physical_errors_total": ("port_rcv_remote_physical_errors", (_16, _32)),
    "xmit_discards_total": ("port_xmit_discards", (_16, _32)),
    "local_link_integrity_errors_total": ("local_link_integrity_errors", (15, _16, _32)),
    "excessive_buffer_overrun_errors_total": ("excessive_buffer_overrun_errors", (15, _16, _32)),
    "vl15_dropped_total": ("VL15_dropped", (_16, _32)),
    "xmit_wait_total": ("port_xmit_wait", (_32,)),
}
"""Column -> file in `counters`, and the values at which it stops counting and says nothing any more."""

HARDWARE: Mapping[str, str] = {
    "out_of_sequence_total": "out_of_sequence",
    "packet_seq_err_total": "packet_seq_err",
    "local_ack_timeout_err_total": "local_ack_timeout_err",
    "rnr_nak_retry_err_total": "rnr_nak_retry_err",
    "cnp_sent_total": "np_cnp_sent",
    "cnp_handled_total": "rp_cnp_handled",
    "ecn_marked_packets_total": "np_ecn_marked_roce_packets",
    "rx_icrc_encapsulated_total": "rx_icrc_encapsulated",
    "roce_adp_retrans_total": "roce_adp_retrans",
    "roce_slow_restart_total": "roce_slow_restart",
}
"""Column -> file in `hw_counters`."""

INTERFACE: Mapping[str, str] = {
    "rx_errors_total": "rx_errors",
    "tx_errors_total": "tx_errors",
    "rx_dropped_total": "rx_dropped",
    "tx_dropped_total": "tx_dropped",
    "rx_crc_errors_total": "rx_crc_errors",
}
"""Column -> file in `statistics` of the interface."""

_WORD = 4
"""Bytes that InfiniBand's data counters count as one, whatever the number of lanes."""

NO_RDMA = Null(Reason.NOT_SUPPORTED, "no_rdma")
NO_INTERFACE = Null(Reason.NOT_SUPPORTED, "no_interface")
NOT_ETHERNET = Null(Reason.NOT_SUPPORTED, "not_ethernet")
NOT_ACTIVE = Null(Reason.NOT_READ, "not_active")
_EMPTY = Null(Reason.FAILED, "empty")
_FULL = Null(Reason.IMPLAUSIBLE, "saturated")
_NOT_SAID = Null(Reason.NOT_SUPPORTED, "not_said")


@dataclass(frozen=True, slots=True)
class _Data:
    """Where a port counts what it moves: files, bytes per count, values at which the counters stop."""

    rx: str
    tx: str
    unit: int
    full: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Port:
    """Where one port is read, and what seldom changes about it."""

    folder: str
    """Of the RDMA port; empty for an Ethernet card without RDMA."""
    interface: str
    """Folder of its network interface; empty when it has none."""
    ethernet: bool
    data: _Data
    fixed: Mapping[str, Cell]


@dataclass(slots=True)
class _Shown:
    """What a port was at its best."""

    active_at: float
    rate: float = 0.0
    rate_at: float = 0.0


@dataclass(slots=True)
class _Look:
    """What was there, and when."""

    at: float = float("-inf")
    there: list[str] = field(default_factory=list)
    ports: list[_Port] = field(default_factory=list)


class Ports:
    """The ports of one host.

    Args:
        root: Where /sys is.
        cards: Addresses of the host's GPUs.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        root: Path,
        cards: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rdma = str(root / "sys/class/infiniband")
        self._net = str(root / "sys/class/net")
        self._pci = str(root / "sys/bus/pci/devices")
        self._cards = cards
        self._clock = clock
        self._last = _Look()
        self._shown: dict[str, _Shown] = {}
        self._refused: dict[str, tuple[float, Null]] = {}
        self._warned: set[str] = set()
        self._bus: list[str] = []
        self._paths: dict[str, str] = {}

    def rows(self) -> list[Row]:
        """The columns of probe `port`, and `numa_node`, `board` and `gpu_affinity` for the inventory."""
        now = self._clock()
        devices, interfaces = _names(self._rdma), _names(self._net)
        there = [_target(f"{self._rdma}/{name}") for name in devices]
        there += [_target(f"{self._net}/{name}") for name in interfaces]
        if there != self._last.there or now - self._last.at >= LOOK_AGAIN_S:
            if there != self._last.there:
                self._refused.clear()
            self._last = _Look(now, there, self._find(devices, interfaces))
        rows = [self._row(port, now) for port in self._last.ports]
        return [row for row in rows if row is not None]

    # ---- what there is

    def _find(self, devices: list[str], interfaces: list[str]) -> list[_Port]:
        self._see_bus()
        found: list[_Port] = []
        taken: set[str] = set()
        for device in devices:
            home = f"{self._rdma}/{device}"
            if not _is_hardware(home) or _is_share(f"{home}/device"):
                continue
            numbers = [name for name in _names(f"{home}/ports") if re.fullmatch("[1-9][0-9]{0,2}", name)]
            for number in numbers:
                port, names = self._rdma_port(device, int(number), len(numbers) == 1)
                taken.update(names)
                found.append(port)
        for interface in interfaces:
            home = f"{self._net}/{interface}"
            if interface not in taken and _is_ethernet_card(home):
                found.append(self._ethernet_port(interface))
        return found[:MOST_PORTS]

    def _rdma_port(self, device: str, number: int, only: bool) -> tuple[_Port, set[str]]:
        home = f"{self._rdma}/{device}"
        folder = f"{home}/ports/{number}"
        layer = files.plain(files.brief(f"{folder}/link_layer"))
        names = _interfaces(f"{home}/device/net", number, only)
        bound = files.plain(files.brief(f"{folder}/gid_attrs/ndevs/0"))
        interface = bound or next(iter(names), "")
        fixed: dict[str, Cell] = {
            "device": _text(device),
            "port": number,
            "link_layer": layer if layer in _LAYERS else files.UNPARSABLE if layer else _NOT_SAID,
            "guid": _guid(home, folder, layer),
            "netdev": _text(interface) if interface else NO_INTERFACE,
            "firmware": files.plain(files.brief(f"{home}/fw_ver")) or _NOT_SAID,
            "board": files.plain(files.brief(f"{home}/board_id")) or _NOT_SAID,
            **self._place(f"{home}/device"),
        }
        where = f"{self._net}/{interface}" if interface and "/" not in interface and interface != ".." else ""
        return _Port(folder, where, layer == "Ethernet", _data(folder), fixed), {*names, bound} - {""}

    def _ethernet_port(self, interface: str) -> _Port:
        home = f"{self._net}/{interface}"
        number = files.parsed(files.brief(f"{home}/dev_port"), lambda text: files.count(text.strip()))
        fixed: dict[str, Cell] = {
            "device": _text(interface),
            "port": min(number, 254) + 1 if isinstance(number, int) else 1,
            "link_layer": "Ethernet",
            "guid": NO_RDMA,
            "netdev": _text(interface),
            "firmware": _NOT_SAID,
            "board": _NOT_SAID,
            **self._place(f"{home}/device"),
        }
        counts = _Data(f"{home}/statistics/rx_bytes", f"{home}/statistics/tx_bytes", 1)
        return _Port("", home, True, counts, fixed)

    def _place(self, device: str) -> dict[str, Cell]:
        """Where on the bus a device sits, and which cards are near."""
        path = os.path.realpath(device)
        addresses = [part for part in path.split("/") if _ADDRESS.fullmatch(part)]
        home = path.partition(addresses[-1])[0] + addresses[-1] if addresses else path
        node = files.parsed(files.brief(f"{home}/numa_node"), lambda text: int(text.strip()))
        known = isinstance(node, int) and 0 <= node <= 4096
        near = affinity.order(home, node if known and isinstance(node, int) else None, self._paths)
        return {
            "pci": addresses[-1] if addresses else _NOT_SAID,
            "numa_node": node if known else _NOT_SAID,
            "gpu_affinity": ",".join(f"{card}={how}" for card, how in near) if addresses else "",
        }

    def _see_bus(self) -> None:
        """Where the cards are; asked again when something on the bus came or went."""
        bus = _names(self._pci)
        if bus == self._bus:
            return
        self._bus = bus
        self._paths = {card: os.path.realpath(f"{self._pci}/{card}") for card in self._cards()}

    # ---- one reading

    def _row(self, port: _Port, now: float) -> Row | None:
        """One port now; None when it went away meanwhile."""
        row = dict(port.fixed)
        row |= self._interface(port) if port.interface else dict.fromkeys(_OF_INTERFACE, NO_INTERFACE)
        if port.folder:
            row |= _rdma_state(port.folder) | self._counters(port, now)
        else:
            row |= _ethernet_state(port, row) | dict.fromkeys((*COUNTERS, *HARDWARE), NO_RDMA)
        state = row["state"]
        if isinstance(state, Null) and not os.path.isdir(port.folder or port.interface):
            self._last.at = float("-inf")
            return None
        if port.folder and state != "ACTIVE":
            why = state if isinstance(state, Null) else NOT_ACTIVE
            row |= dict.fromkeys(("rate_gbps", "lanes", "signalling"), why)
        return row | self._best(row, now)

    def _interface(self, port: _Port) -> dict[str, Cell]:
        home = port.interface
        flags = files.parsed(files.brief(f"{home}/flags"), lambda text: int(text.strip(), 16) & 0xFFFF_FFFF)
        up: Cell = bool(flags & _UP) if isinstance(flags, int) else flags
        carrier: Cell = Null(Reason.NOT_READ, "interface_down")
        if up is not False:
            carrier = files.parsed(files.brief(f"{home}/carrier"), lambda text: bool(_BIT[text.strip()]))
        row: dict[str, Cell] = {
            "interface_up": up,
            "carrier": carrier,
            "carrier_changes_total": _number(files.brief(f"{home}/carrier_changes")),
            "mtu_bytes": _number(files.brief(f"{home}/mtu")),
        }
        if not port.ethernet:  # what IPoIB drops says nothing about the port
            return row | dict.fromkeys(INTERFACE, NOT_ETHERNET)
        for column, name in INTERFACE.items():
            row[column] = _number(files.brief(f"{home}/statistics/{name}"))
        return row

    def _counters(self, port: _Port, now: float) -> dict[str, Cell]:
        row: dict[str, Cell] = {}
        for column, path in (("rx_bytes_total", port.data.rx), ("tx_bytes_total", port.data.tx)):
            value = self._counter(path, port.data.full, now)
            row[column] = value * port.data.unit if isinstance(value, int) else value
        for column, (name, full) in COUNTERS.items():
            row[column] = self._counter(f"{port.folder}/counters/{name}", full, now)
        for column, name in HARDWARE.items():
            row[column] = self._counter(f"{port.folder}/hw_counters/{name}", (_32,), now)
        self._warn(str(port.fixed["device"]), row)
        return row

    def _counter(self, path: str, full: tuple[int, ...], now: float) -> Cell:
        until, why = self._refused.get(path, (now, _EMPTY))
        if until > now:
            return why
        text = files.brief(path)
        if isinstance(text, Null):
            if text.code == "EINVAL":
                text = Null(Reason.NOT_SUPPORTED, text.code)
                self._refused[path] = (now + REFUSED_S, text)
            return text
        return _number(text, full)

    def _warn(self, device: str, row: Row) -> None:
        """Say once per device what it does not give, unless it is just not there."""
        if device in self._warned:
            return
        odd = {
            name: cell.code
            for name, cell in row.items()
            if isinstance(cell, Null) and cell.code not in ("ENOENT", "ENODEV")
        }
        if odd:
            self._warned.add(device)
            name, code = next(iter(odd.items()))
            log.warning("port %s: %d counters cannot be read, e.g. %s: %s", device, len(odd), name, code)

    def _best(self, row: Row, now: float) -> dict[str, Cell]:
        """Whether it is in use and how fast at best: of this run of the agent, until unseen for an hour."""
        known = [cell for cell in (row["guid"], row["pci"], row["device"]) if isinstance(cell, str)]
        name = f"{known[0]}/{row['port']}"  # what it is called may be another's name tomorrow
        shown, rate = self._shown.get(name), row["rate_gbps"]
        if row["state"] == "ACTIVE":
            shown = shown or _Shown(now)
            shown.active_at = now
            if isinstance(rate, float) and (rate >= shown.rate or now - shown.rate_at > FORGET_S):
                shown.rate, shown.rate_at = rate, now
            self._shown[name] = shown
        elif shown is not None and now - shown.active_at > FORGET_S:
            shown = None
            del self._shown[name]
        return {
            "in_use": shown is not None,
            "rate_best_gbps": shown.rate if shown is not None and shown.rate else NOT_ACTIVE,
        }


_OF_INTERFACE = ("interface_up", "carrier", "carrier_changes_total", "mtu_bytes", *INTERFACE)
_BIT = {"0": 0, "1": 1}


def _rdma_state(folder: str) -> dict[str, Cell]:
    rate = files.brief(f"{folder}/rate")
    return {
        "state": files.parsed(files.brief(f"{folder}/state"), lambda text: _named(text.upper(), _STATES)),
        "phys_state": files.parsed(files.brief(f"{folder}/phys_state"), lambda text: _named(text, _PHYSICAL)),
        "lid": files.parsed(files.brief(f"{folder}/lid"), lambda text: int(text.strip(), 0)),
        "sm_lid": files.parsed(files.brief(f"{folder}/sm_lid"), lambda text: int(text.strip(), 0)),
        "rate_gbps": files.parsed(rate, lambda text: files.number(_rate(text)[1])),
        "lanes": files.parsed(rate, lambda text: int(_rate(text)[2]) if _rate(text)[2] else _NOT_SAID),
        "signalling": files.parsed(rate, lambda text: _rate(text)[3] or _NOT_SAID),
    }


def _ethernet_state(port: _Port, row: Row) -> dict[str, Cell]:
    carrier, up = row["carrier"], row["interface_up"]
    state: Cell = carrier if isinstance(carrier, Null) else "ACTIVE" if carrier else "DOWN"
    return {
        "state": "DOWN" if up is False else state,
        "phys_state": NO_RDMA,
        "lid": NO_RDMA,
        "sm_lid": NO_RDMA,
        "rate_gbps": files.parsed(files.brief(f"{port.interface}/speed"), _speed)
        if state == "ACTIVE"
        else NOT_ACTIVE,
        "lanes": NO_RDMA,
        "signalling": NO_RDMA,
        "rx_bytes_total": _number(files.brief(port.data.rx)),
        "tx_bytes_total": _number(files.brief(port.data.tx)),
    }


def _speed(text: str) -> Cell:
    """Mb/s; -1, or that as unsigned, where the card does not know."""
    mbps = int(text.strip())
    return mbps / 1000 if 0 < mbps < 100_000_000 else Null(Reason.NOT_SUPPORTED, "unknown")


@lru_cache(maxsize=64)
def _rate(text: str) -> re.Match[str]:
    """`400 Gb/sec (4X NDR)`: rate, lanes, signalling.

    Raises:
        ValueError: It is nothing of the kind.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return found


def _named(text: str, words: tuple[str, ...]) -> str:
    """`4: ACTIVE` or `ACTIVE` -> ACTIVE.

    Raises:
        ValueError: It is none of `words`.
    """
    number, colon, word = text.strip().partition(":")
    word = word.strip() if colon else number
    if not word or word not in words:
        raise ValueError(text)
    return word


def _number(text: str | Null, full: tuple[int, ...] = ()) -> Cell:
    if isinstance(text, Null):
        return text
    word = text.strip()
    if not word:
        return _EMPTY
    if word.startswith("N/A"):
        return Null(Reason.NOT_SUPPORTED, files.plain(word)[:32])
    if not word.isascii() or not word.isdigit() or len(word) > 20:
        return files.UNPARSABLE
    return _FULL if int(word) in full else int(word)


def _data(folder: str) -> _Data:
    """The widest counters there are: 64 bits, the usual ones, or those of devices that count bytes (EFA)."""
    extended, usual, own = f"{folder}/counters_ext", f"{folder}/counters", f"{folder}/hw_counters"
    if os.path.exists(f"{extended}/port_rcv_data_64"):
        return _Data(f"{extended}/port_rcv_data_64", f"{extended}/port_xmit_data_64", _WORD)
    if not os.path.exists(f"{usual}/port_rcv_data") and os.path.exists(f"{own}/rx_bytes"):
        return _Data(f"{own}/rx_bytes", f"{own}/tx_bytes", 1)
    return _Data(f"{usual}/port_rcv_data", f"{usual}/port_xmit_data", _WORD, (_32,))


def _guid(home: str, folder: str, layer: str) -> Cell:
    """Of the port as ibstat shows it; the device's own where an Ethernet port has addresses in its place."""
    gid = files.plain(files.brief(f"{folder}/gids/0")).lower()
    if layer == "InfiniBand" and _GID.fullmatch(gid) and set(gid[20:]) - set("0:"):
        return gid[20:]
    guid = files.plain(files.brief(f"{home}/node_guid")).lower()
    return guid if _GUID.fullmatch(guid) and set(guid) - set("0:") else _NOT_SAID


def _interfaces(folder: str, number: int, only: bool) -> list[str]:
    """Interfaces of a port: two ports may share one device. Of functions handed to guests, none."""
    found: list[str] = []
    for name in _names(folder):
        place = files.parsed(files.brief(f"{folder}/{name}/dev_port"), lambda text: files.count(text.strip()))
        if _is_representor(f"{folder}/{name}"):
            continue
        if only or not isinstance(place, int) or place + 1 == number:
            found.append(name)
    return found


def _is_hardware(home: str) -> bool:
    """False for RDMA made by software on another interface."""
    return "/devices/virtual/" not in os.path.realpath(home) and not os.path.exists(f"{home}/parent")


def _is_share(device: str) -> bool:
    """A virtual or sub-function: a share of a device that is here already."""
    return os.path.exists(f"{device}/physfn") or ".sf." in os.path.basename(os.path.realpath(device))


def _is_representor(home: str) -> bool:
    """The host's end of a function that was handed to a guest."""
    return bool(_REPRESENTOR.fullmatch(files.plain(files.brief(f"{home}/phys_port_name"))))


def _is_ethernet_card(home: str) -> bool:
    """A card or its virtual counterpart; not radio, not USB (a board's own console is on it), no share."""
    device = f"{home}/device"
    return (
        os.path.exists(device)
        and files.plain(files.brief(f"{home}/type")) == _ETHER
        and not os.path.exists(f"{home}/wireless")
        and not os.path.exists(f"{home}/phy80211")
        and os.path.basename(os.path.realpath(f"{device}/subsystem")) != "usb"
        and not _is_share(device)
        and not _is_representor(home)
    )


def _names(folder: str) -> list[str]:
    """What is in a folder, 2 before 10."""
    try:
        return sorted(os.listdir(folder), key=_natural)
    except OSError:
        return []


def _target(path: str) -> str:
    """Where a link of a class points; the path itself when it is none."""
    try:
        return f"{path} {os.readlink(path)}"
    except OSError:
        return path


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"([0-9]{1,18})", name)
    return [(1, int(part), "") if place % 2 else (0, 0, part) for place, part in enumerate(parts)]


def _text(name: str) -> str:
    """A name of the kernel as text that can travel."""
    return name.encode(errors="surrogateescape").decode(errors="replace")[:64]
