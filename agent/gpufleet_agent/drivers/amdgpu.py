"""AMD cards through the files that the kernel's amdgpu driver keeps in sysfs; no library of the vendor.

A card is one PCI function that amdgpu took, also when it is partitioned: a partition adds a DRM node, not a
function. Reading most of these files calls into the driver, which may hang, or wake a card that sleeps: each
is announced to `Progress` first, and a sleeping card is left alone.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row, Value
from gpufleet_agent.drivers import (
    BenchResult,
    Check,
    DriverError,
    DriverGone,
    Gpu,
    Hung,
    Item,
    Lost,
    NoProgress,
    Process,
    Progress,
    Ring,
    go_on,
)
from gpufleet_agent.drivers.amdgpu_files import (
    REFUSED,
    Files,
    attribute,
    clock_reasons,
    current_level,
    energy_j,
    errors,
    highest_level,
    inode,
    link_name,
    listing,
    names_in,
    parsed,
    read_or_empty,
    shown,
)
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probes import gpu_health

AMD = "1002"

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LINKS = ("xgmi_wafl", "pcie_bif")
_ASLEEP_STATES = ("suspended", "suspending")
_LOOK_S = 30.0

_ABSENT = Null(Reason.NOT_SUPPORTED)
_ASLEEP = Null(Reason.NOT_READ, "suspended")
_RING = ("util_pct", "sm_clock_mhz", "power_w")
_NEVER = (
    "pstate", "power_cap_s_total", "sync_boost_s_total", "sw_thermal_s_total", "hw_thermal_s_total",
    "hw_brake_s_total", "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "mem_active_pct",
)  # fmt: skip
_UNREAD_GPU = ("pcie_tx_bytes_total", "pcie_rx_bytes_total", "fan_pct")  # there are files for these too
_GPU = (
    *(f"{name}{part}" for name in _RING for part in ("", "_min", "_p10")), *_NEVER, *_UNREAD_GPU,
    "power_limit_w", "mem_util_pct", "mem_clock_mhz", "mem_used_bytes", "mem_total_bytes", "temperature_c",
    "temperature_margin_c", "mem_temperature_c", "clock_reasons", "energy_j_total", "pcie_gen",
    "pcie_gen_max", "pcie_width", "pcie_width_max",
)  # fmt: skip
_HEALTH = ("ecc_corrected_total", "ecc_uncorrectable_total")
_UNREAD = (  # amdgpu has files for these that are not read here
    "power_limit_requested_w", "power_limit_default_w", "power_limit_min_w", "power_limit_max_w",
    "pcie_replay_total", "retired_pages_corrected_total", "retired_pages_uncorrectable_total",
    "retired_pages_pending", "processes", "driver_version",
)  # fmt: skip
_KEYS = ("gpu_uuid", "gpu_index", "pci", "state", "driver_epoch")
_REST: dict[str, Null] = {
    metric.name: Null(Reason.NOT_READ) if metric.name in _UNREAD else _ABSENT
    for metric in gpu_health.METRICS
    if metric.name not in (*_HEALTH, *_KEYS)
}
"""Health that is told of NVIDIA's cards only."""

_GROUPS = {"ring": _RING, "gpu": _GPU, "gpu_health": (*_HEALTH, *_REST)}

_MODELS = {
    "738c": "AMD Instinct MI100", "7408": "AMD Instinct MI250X", "740c": "AMD Instinct MI250",
    "740f": "AMD Instinct MI210", "74a0": "AMD Instinct MI300A", "74a1": "AMD Instinct MI300X",
    "74a2": "AMD Instinct MI308X", "74a5": "AMD Instinct MI325X", "74a8": "AMD Instinct MI308X HF",
    "74a9": "AMD Instinct MI300X HF", "74b5": "AMD Instinct MI300X VF", "75a0": "AMD Instinct MI350X",
    "75a3": "AMD Instinct MI355X", "7448": "AMD Radeon Pro W7900", "745e": "AMD Radeon Pro W7800",
    "744c/c8": "AMD Radeon RX 7900 XTX", "744c/cc": "AMD Radeon RX 7900 XT",
    "744c/ce": "AMD Radeon RX 7900 GRE", "7550/c0": "AMD Radeon RX 9070 XT", "7550/c3": "AMD Radeon RX 9070",
    "7551/c0": "AMD Radeon AI PRO R9700",
}  # fmt: skip
"""By PCI device, and revision where one is several products; for boards that do not name themselves."""

_NO_TEXT = ("", "n/a", "none", "unknown", "not specified")


class AmdGpu:
    """One card, as long as the driver holds it."""

    def __init__(self, host: "AmdHost", pci: str, minor: int) -> None:
        self.ring = Ring()
        self.pci = pci
        self.uuid = ""
        self.index = 0
        self.minor = minor
        self._host = host
        self._files = Files(host.devices / pci, host.progress)
        self._end, self._slot = _link_ends(host.devices / pci)

    def learn(self) -> None:
        """Read the identity, as long as it is not known. Wakes no card: the driver keeps it in memory."""
        if self.uuid or self.pci in self._host.skip:
            return
        text = self._files.text("unique_id")
        if isinstance(text, Null):
            known: str | None = "" if text.reason is Reason.NOT_SUPPORTED else None
        else:
            known = text.strip().lower()
        if known is not None and known.strip("0") == "":
            # the same number of zeroes on every card is no identity: the place is all there is
            self.uuid = f"GPU-at-{self._host.place(self.pci)}"
        elif known is not None and re.fullmatch("[0-9a-f]{16}", known) and known.strip("f"):
            self.uuid = f"GPU-{known}"

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes; what the card or the driver does not know is left out.

        Raises:
            Lost, Hung: This card does not answer.
        """
        asleep = self._answering()
        self.learn()
        files = self._files
        device = files.plain("device").lower().removeprefix("0x")
        revision = files.plain("revision").lower().removeprefix("0x")
        found = {
            "uuid": self.uuid,
            "serial": files.plain("serial_number"),
            "pci": self.pci,
            "model": files.plain("product_name") or _model(device, revision),
            "index": str(self.index),
            "minor": str(self.minor) if self.minor >= 0 else "",
            "part_number": files.plain("product_number"),
            "vbios": files.plain("vbios_version"),
            "device_id": device,
            "slot": files.plain("xgmi_physical_id"),
            "compute_partition": files.plain("current_compute_partition"),
            "memory_partition": files.plain("current_memory_partition"),
            "mem_total_bytes": attribute(files.number("mem_info_vram_total")),
            "driver": self._host.driver(),
        }
        if not asleep:
            link = self._pcie()
            found |= {
                "sm_clock_max_mhz": attribute(parsed(files.text("pp_dpm_sclk"), highest_level)),
                "mem_clock_max_mhz": attribute(parsed(files.text("pp_dpm_mclk"), highest_level)),
                "power_limit_default_w": attribute(files.sensor("power1_cap_default", 1e6)),
                "power_limit_requested_w": attribute(files.sensor("power1_cap", 1e6)),
                "pcie_gen_max": attribute(link["pcie_gen_max"]),
                "pcie_width_max": attribute(link["pcie_width_max"]),
            }
        self._still_there()
        return {name: text for name, text in found.items() if text.lower() not in _NO_TEXT}

    def links(self) -> Sequence[Row]:
        """None: those of AMD's cards are not read.

        Raises:
            Lost, Hung: This card does not answer.
        """
        self._answering()
        return ()

    def read(self, group: str) -> Row:
        """The metrics of "ring", "gpu" or "gpu_health"; nothing for a group that is not read here.

        Raises:
            Lost, Hung: This card does not answer.
        """
        names = _GROUPS.get(group)
        if names is None:
            return {}
        if self._answering():
            return dict.fromkeys(names, _ASLEEP)
        if group == "ring":
            row = self._read_ring()
        else:
            row = self._read_gpu() if group == "gpu" else _REST | self._read_health()
        self._still_there()
        if REFUSED in row.values() and self._asleep():
            # it fell asleep between two files
            row = {name: _ASLEEP if cell == REFUSED else cell for name, cell in row.items()}
        return row

    def _answering(self) -> bool:
        """Whether the card sleeps.

        Raises:
            Lost, Hung: It may not be asked, or is not there to be asked.
        """
        if self.pci in self._host.skip:
            raise Hung("hung", f"{self.pci} is left alone")
        self._still_there()
        if self._asleep():
            return True
        if self._host.sysfs.present(self.pci) is False:
            raise Lost("all_ones", f"{self.pci} is listed but reads all ones")
        return False

    def _still_there(self) -> None:
        """Without this, the files of a card that is gone would be sensors that it never had.

        Raises:
            Lost: The bus does not list the card, or amdgpu does not hold it.
        """
        driver = link_name(self._files.device / "driver")
        if driver != "amdgpu":
            if not self._files.device.is_dir():
                raise Lost("gone_from_bus", f"{self.pci} is not on the bus any more")
            raise Lost("driver_unbound", f"amdgpu does not hold {self.pci}")

    def _asleep(self) -> bool:
        return self._host.sysfs.runtime_status(self.pci) in _ASLEEP_STATES

    def _read_ring(self) -> dict[str, Cell]:
        return {
            "util_pct": self._files.number("gpu_busy_percent"),
            "sm_clock_mhz": self._clock("sclk"),
            "power_w": self._power(),
        }

    def _read_gpu(self) -> dict[str, Cell]:
        files = self._files
        row: dict[str, Cell] = {
            **dict.fromkeys(_NEVER, _ABSENT),
            **dict.fromkeys(_UNREAD_GPU, Null(Reason.NOT_READ)),
            **self._temperatures(),
            **self._pcie(),
            "power_limit_w": files.sensor("power1_cap", 1e6),
            "mem_util_pct": files.number("mem_busy_percent"),
            "mem_clock_mhz": self._clock("mclk"),
            "mem_used_bytes": files.number("mem_info_vram_used"),
            "mem_total_bytes": files.number("mem_info_vram_total"),
        }
        metrics = files.raw("gpu_metrics")
        row["clock_reasons"] = clock_reasons(metrics)
        row["energy_j_total"] = energy_j(metrics)
        if not all(self.ring.values.get(name) for name in _RING):
            # what the ring has no value of, so that the row says why
            for name, cell in self._read_ring().items():
                row |= {f"{name}{part}": cell for part in ("", "_min", "_p10")}
        return row

    def _read_health(self) -> dict[str, Cell]:
        """Errors of all memories that the driver counts; those of links are no memory errors."""
        names = listing(self._files.device / "ras")
        if isinstance(names, Null):
            return dict.fromkeys(_HEALTH, names)
        blocks = [name for name in names if name.endswith("_err_count")]
        counted = [name for name in blocks if name.removesuffix("_err_count") not in _LINKS]
        if not counted:
            return dict.fromkeys(_HEALTH, Null(Reason.NOT_SUPPORTED, "no ras"))
        corrected = uncorrectable = 0
        for name in counted:
            text = self._files.text(f"ras/{name}")
            counts = text if isinstance(text, Null) else errors(text)
            if isinstance(counts, Null):
                # a sum without one of its parts would look like a reset, and then like a burst
                return dict.fromkeys(_HEALTH, counts)
            corrected, uncorrectable = corrected + counts[0], uncorrectable + counts[1]
        return {"ecc_corrected_total": corrected, "ecc_uncorrectable_total": uncorrectable}

    def _clock(self, name: str) -> Cell:
        """The sensor; where there is none, the level that the driver chose."""
        value = self._files.channel("freq", name, "input", 1e6)
        if isinstance(value, Null) and value.reason is Reason.NOT_SUPPORTED:
            return parsed(self._files.text(f"pp_dpm_{name}"), current_level)
        return value

    def _power(self) -> Cell:
        """The average; where the card has none, the value of the moment."""
        value = self._files.sensor("power1_average", 1e6)
        if isinstance(value, Null) and value.reason is Reason.NOT_SUPPORTED:
            return self._files.sensor("power1_input", 1e6)
        return value

    def _temperatures(self) -> dict[str, Cell]:
        """The junction is what the firmware slows the card by; the margin is the distance to that limit."""
        label = "junction"
        value = self._files.channel("temp", label, "input", 1e3)
        if isinstance(value, Null) and value.reason is Reason.NOT_SUPPORTED:
            label = "edge"
            value = self._files.channel("temp", label, "input", 1e3)
        limit = self._files.channel("temp", label, "crit", 1e3)
        margin: Cell
        if isinstance(value, Null) or isinstance(limit, Null):
            margin = value if isinstance(value, Null) else limit
        else:
            # a driver that does not know the limit says 0
            margin = float(limit) - float(value) if float(limit) > 0 else _ABSENT
        return {
            "temperature_c": value,
            "temperature_margin_c": margin,
            "mem_temperature_c": self._files.channel("temp", "mem", "input", 1e3),
        }

    def _pcie(self) -> dict[str, Cell]:
        """The link in the slot, which is above the card's own switch where it has one."""
        self._host.progress.enter(self.pci, "pcie_link")
        try:
            link = dict(self._host.sysfs.link(self._end))
            slot = self._host.sysfs.link(self._slot) if self._slot else {}
        finally:
            self._host.progress.leave()
        for name in ("pcie_gen_max", "pcie_width_max"):
            card, above = link[name], slot.get(name, _ABSENT)
            if not isinstance(card, Null) and not isinstance(above, Null):
                link[name] = min(int(card), int(above))
        return link


class AmdHost(SysfsHost):
    """A host whose cards are read through the amdgpu driver's files; the rest comes from /proc and /sys too.

    Args:
        root: Where /proc and /sys are.
        progress: Where each read is announced.
        skip: Addresses of cards that must not be touched; they answer `Hung`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        progress: Progress | None = None,
        skip: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(root)
        self.progress: Progress = progress or NoProgress()
        self.skip = frozenset(skip)
        self.devices = root / "sys/bus/pci/devices"
        self.epoch = 0
        self._driver = root / "sys/bus/pci/drivers/amdgpu"
        self._module = root / "sys/module/amdgpu"
        self._kfd = root / "sys/class/kfd/kfd"
        self._clock = clock
        self._bound: dict[str, int] = {}
        self._cards: dict[str, AmdGpu] = {}
        self._gone = ""
        self._look_again = 0.0

    def node(self) -> Item:
        """The host itself; `driver` says which amdgpu is loaded."""
        version = shown(read_or_empty(self._module / "version"))
        found = self.machine.attributes() | {"driver": self.driver()}
        return Item("node:", found | {"driver_version": version} if version else found)

    def driver(self) -> str:
        """In words; the module of the kernel itself has no version of its own."""
        version = shown(read_or_empty(self._module / "version"))
        if version:
            return f"amdgpu {version}"
        return "amdgpu of the kernel" if self._driver.is_dir() else "amdgpu not loaded"

    def gpus(self) -> Sequence[Gpu]:
        """Every card that amdgpu holds or held since it was loaded, in the order of their DRM numbers.

        Raises:
            DriverGone: Cards are on the bus but amdgpu holds none.
        """
        return self._list()

    def remembered(self, pci: str) -> str:
        """UUID of the card at an address, from memory alone; empty when it was never read."""
        card = self._cards.get(pci)
        return card.uuid if card else ""

    def processes(self) -> Sequence[Process]:
        """Processes that compute on a card: those with memory of it."""
        cards = self._compute_nodes()
        used: dict[tuple[int, str], int] = {}
        for pid in names_in(self._kfd / "proc"):
            if not re.fullmatch("[0-9]{1,10}", pid):
                continue
            for name in names_in(self._kfd / "proc" / pid):
                pci = cards.get(name.removeprefix("vram_"), "") if name.startswith("vram_") else ""
                text = read_or_empty(self._kfd / "proc" / pid / name).strip() if pci else ""
                if re.fullmatch("[0-9]{1,19}", text) and int(text):
                    used[int(pid), pci] = used.get((int(pid), pci), 0) + int(text)
        return [Process(pid, pci, size) for (pid, pci), size in sorted(used.items())]

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """None: this driver reads files."""
        return BenchResult("unsupported", None, "", f"{name} cannot be run on AMD cards")

    def place(self, pci: str) -> str:
        """A name for a slot of this machine, the same after each boot."""
        found = self.machine.attributes()
        machine = found.get("machine_id") or found.get("serial") or found.get("hostname", "")
        return hashlib.blake2b(f"{machine} {pci}".encode(), digest_size=8).hexdigest()

    def held(self) -> list[str]:
        """Addresses of the cards that amdgpu holds.

        Raises:
            DriverGone: That cannot be read.
        """
        return [pci for pci in self._bindings() or () if self.sysfs.kind(pci) == "gpu"]

    def unclaimed(self) -> list[str]:
        """Addresses of AMD cards that no driver holds.

        Raises:
            DriverError: The bus cannot be listed.
        """
        return [
            pci
            for pci in self.sysfs.devices_of(AMD)
            if self.sysfs.kind(pci) == "gpu"
            and not link_name(self.devices / pci / "driver")
            # what has no PCIe link is the console of a server's board
            and (self.devices / pci / "max_link_speed").exists()
        ]

    def _list(self) -> tuple[AmdGpu, ...]:
        bound = self._bindings()
        if bound is None or not (bound or self._cards):
            # unloaded: what comes back with the driver starts anew
            self._bound, self._cards = {}, {}
            self._complain(loaded=bound is not None)
            return ()
        self._gone, self._look_again = "", 0.0
        if bound != self._bound:
            self._take(bound)
        for pci in self._cards.keys() - bound.keys():
            if link_name(self.devices / pci / "driver") not in ("", "amdgpu"):
                del self._cards[pci]  # handed to another driver, for a virtual machine as a rule
        for card in self._cards.values():
            card.learn()
        self._tell_apart()
        return tuple(sorted(self._cards.values(), key=lambda card: card.index))

    def _bindings(self) -> dict[str, int] | None:
        """Addresses the driver holds, each with a number that is another when bound anew; None: not loaded.

        Raises:
            DriverGone: That cannot be read.
        """
        try:
            names = os.listdir(self._driver)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise DriverGone("no_permission", f"{self._driver}: {error.strerror}") from error
        except OSError as error:
            raise DriverGone("driver_failed", f"{self._driver}: {error.strerror}") from error
        return {name: inode(self.devices / name / "drm") for name in names if _ADDRESS.fullmatch(name)}

    def _take(self, bound: dict[str, int]) -> None:
        """Follow what the driver holds. One bound anew is a new card: new counters, maybe a new board."""
        anew = [pci for pci in bound if pci in self._bound and bound[pci] != self._bound[pci]]
        back = [pci for pci in bound if pci in self._cards and pci not in self._bound]
        added = [pci for pci in bound if pci not in self._cards]
        if anew or back or not self._bound:
            self.epoch += 1
        for pci in (*anew, *back, *added):
            self._cards.pop(pci, None)
            if self.sysfs.kind(pci) == "gpu":
                self._cards[pci] = AmdGpu(self, pci, _drm_number(self.devices / pci / "drm"))
        self._bound = bound
        order = sorted(self._cards.values(), key=lambda card: (card.minor < 0, card.minor, card.pci))
        for index, card in enumerate(order):
            card.index = index

    def _tell_apart(self) -> None:
        """Two cards with one identity are two cards all the same."""
        uuids = [card.uuid for card in self._cards.values() if card.uuid]
        if len(set(uuids)) < len(uuids):
            for card in self._cards.values():
                if uuids.count(card.uuid) > 1:
                    card.uuid = f"{card.uuid}-{self.place(card.pci)}"

    def _complain(self, loaded: bool) -> None:
        """Raise `DriverGone` where cards are on the bus. Looks every 30 s: a bus is long."""
        if self._clock() >= self._look_again:
            self._look_again = self._clock() + _LOOK_S
            self._gone = ""
            if self.unclaimed():
                self._gone = "driver_failed" if loaded else "driver_not_loaded"
        if self._gone:
            raise DriverGone(self._gone, "AMD cards are on the bus, but amdgpu holds none of them")

    def _compute_nodes(self) -> dict[str, str]:
        """Number of a card or partition in the compute driver -> PCI address."""
        found: dict[str, str] = {}
        nodes = self._kfd / "topology/nodes"
        for name in names_in(nodes):
            number = read_or_empty(nodes / name / "gpu_id").strip()
            words = re.findall(
                r"^(\w+) ([0-9]{1,10})$", read_or_empty(nodes / name / "properties"), re.MULTILINE
            )
            places = {key: int(value) for key, value in words}
            place = places.get("location_id")
            if re.fullmatch("[1-9][0-9]{0,9}", number) and place is not None:
                bus, slot, domain = place >> 8 & 0xFF, place >> 3 & 0x1F, places.get("domain", 0)
                # the lowest three bits are the partition, not the function
                found[number] = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        return found


def on_host(root: Path) -> bool:
    """Whether amdgpu holds a card, or one waits for it."""
    host = AmdHost(root)
    try:
        return bool(host.held() or host.unclaimed())
    except DriverError:
        return False


def _link_ends(device: Path) -> tuple[str, str]:
    """The card's end of the link to its slot, and the slot's end ("" = not visible).

    Many cards carry a switch of their own, whose inner link never changes.
    """
    path = Path(os.path.realpath(device))
    above = path.parent
    while _ADDRESS.fullmatch(above.name) and read_or_empty(above / "vendor").strip().lower() == f"0x{AMD}":
        path, above = above, above.parent
    return path.name, above.name if _ADDRESS.fullmatch(above.name) else ""


def _model(device: str, revision: str) -> str:
    if not re.fullmatch("[0-9a-f]{4}", device):
        return ""
    return _MODELS.get(f"{device}/{revision}") or _MODELS.get(device) or f"AMD {device}"


def _drm_number(drm: Path) -> int:
    """Of the card's first node; -1 where it has none."""
    found = [int(name[4:]) for name in names_in(drm) if re.fullmatch("card[0-9]{1,9}", name)]
    return min(found, default=-1)
