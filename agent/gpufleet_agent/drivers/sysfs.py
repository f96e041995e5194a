"""What the kernel says of the bus in /proc and /sys, and the host that is read by files alone.

Needs no driver of a card, so it still answers when that driver hangs or is gone. Nothing here raises for a
file that is missing, truncated or full of bytes: the cell is a Null that says why.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from gpufleet.event import Event
from gpufleet.metric import Cell, Null, Reason, Row, Value
from gpufleet_agent.drivers import (
    BenchResult,
    Check,
    DriverError,
    DriverGone,
    Gpu,
    Item,
    NoProgress,
    Process,
    Progress,
    files,
    go_on,
)
from gpufleet_agent.drivers.canary import NoCanaries, StatCanaries
from gpufleet_agent.drivers.disks import Disks
from gpufleet_agent.drivers.edac import Edac
from gpufleet_agent.drivers.host import Machine
from gpufleet_agent.drivers.jobs import Jobs
from gpufleet_agent.drivers.kmsg import KernelLog
from gpufleet_agent.drivers.mounts import Mounts
from gpufleet_agent.drivers.pcie import ADDRESS, ASLEEP, LINK, NO_ANSWER, PATH, Best, End, Pcie
from gpufleet_agent.drivers.ports import Ports
from gpufleet_agent.drivers.workers import Workers

NVIDIA = "10de"

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_GPU_CLASSES = {NVIDIA: ("0300", "0302", "0380"), "1002": ("0300", "0302", "0380", "1200")}
_LIBRARY_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/nvidia",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/opengl-driver/lib",
)


class Sysfs:
    """Readers below one root, which tests set to a captured tree.

    One file here is not the kernel's own: what NVIDIA's module tells of a card calls into that driver, so it
    may hang, and wakes a card that sleeps. It is announced, read once per load of the module, and never for a
    card in `skip` or one that sleeps.

    Args:
        root: Where /proc and /sys are.
        progress: Where that read is announced.
        skip: Addresses of cards that must not be touched.
        ask_driver: False = that file is not read for any card.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        progress: Progress | None = None,
        skip: Collection[str] = (),
        ask_driver: bool = True,
    ) -> None:
        self._root = root
        self._pci = root / "sys/bus/pci/devices"
        self._pcie = Pcie(self._pci)
        self._best = Best()
        self._nvidia = root / "proc/driver/nvidia"
        self._progress: Progress = progress or NoProgress()
        self._skip = frozenset(skip)
        self._ask_driver = ask_driver
        self._told: dict[str, tuple[int, str]] = {}
        self._known: dict[str, tuple[int, tuple[str, str]]] = {}

    def pci_devices(self) -> list[Row]:
        """GPUs, NVSwitches and HCAs, in order of their addresses; the columns of probe `pci`, and `Best`.

        Raises:
            DriverError: The bus cannot be listed, so nothing can be said about what is on it.
        """
        rows: list[Row] = []
        known: dict[str, End] = {}
        for name in self._addresses():
            device = self._pci / name
            vendor, pci_class = self._numbers(name)
            kind = self._kind(device, vendor, pci_class)
            if kind:
                rows.append(self._device(device, kind, vendor, known))
        return rows

    def nvidia_cards(self) -> tuple[str, ...]:
        """Addresses of NVIDIA cards on the bus, but for those handed to virtual machines."""
        found: list[str] = []
        for name in self._addresses():
            device = self._pci / name
            vendor, pci_class = self._numbers(name)
            is_card = vendor == NVIDIA and self._kind(device, vendor, pci_class) == "gpu"
            if is_card and files.link(device / "driver") not in ("vfio-pci", "pci-stub"):
                found.append(name)
        return tuple(found)

    def devices_of(self, vendor: str) -> list[str]:
        """Addresses of a vendor's devices; asks no driver of anything.

        Raises:
            DriverError: The bus cannot be listed.
        """
        return [name for name in self._addresses() if self._numbers(name)[0] == vendor]

    def kind(self, address: str) -> str:
        """`gpu`, `nvswitch` or `hca`; empty for a device that is none of them."""
        return self._kind(self._pci / address, *self._numbers(address))

    def of_kind(self, kind: str) -> list[str]:
        """Addresses of the devices of a kind; none when the bus cannot be listed. Asks no driver."""
        try:
            return [address for address in self._addresses() if self.kind(address) == kind]
        except DriverError:
            return []

    def present(self, address: str) -> Cell:
        """False when the device is listed but no longer answers. Do not ask it of one that is suspended."""
        return self._pcie.present(address)

    def link(self, address: str) -> dict[str, Cell]:
        """`pcie_gen`, `pcie_gen_max`, `pcie_width`, `pcie_width_max` of the device's own link."""
        return self._pcie.link(address)

    def knows_card(self, address: str) -> bool:
        """Whether the NVIDIA kernel module took the card."""
        return files.exists(self._nvidia / "gpus" / address)

    def answers(self, address: str) -> bool:
        """False only when the bus no longer lists the device, or it reads all ones."""
        device = self._pci / address
        if not files.exists(device):
            return not files.exists(self._pci)
        return self._pcie.present(address) is not False

    def excluded(self, address: str) -> Cell:
        """Whether the NVIDIA kernel module was told to leave the card alone."""
        text = self._information(address)
        if isinstance(text, Null):
            return text
        found = re.search(r"^GPU Excluded:\s*(Yes|No)\b", text, re.MULTILINE)
        return found[1] == "Yes" if found else Null(Reason.NOT_SUPPORTED, "not_said")

    def gpu_uuid(self, address: str) -> Cell:
        """UUID of a card by the NVIDIA kernel module."""
        text = self._information(address)
        if isinstance(text, Null):
            return text
        found = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
        if found is None:
            return files.UNPARSABLE
        if _UUID.fullmatch(found[1]):
            return found[1]
        # question marks until something initialises the card
        return Null(Reason.NOT_READ, "not_initialised") if "?" in found[1] else files.UNPARSABLE

    def _information(self, address: str) -> str | Null:
        """What the NVIDIA kernel module tells of a card; asked once, when it can tell who the card is."""
        home = self._nvidia / "gpus" / address
        known = self._told.get(address)
        here = files.inode(home)
        if known is not None and here and known[0] == here:
            return known[1]
        if not here:
            return files.read(home / "information")
        if not self._ask_driver or address in self._skip:
            return Null(Reason.NOT_READ, "left_alone")
        if self.runtime_status(address) == "suspended":
            return ASLEEP
        self._progress.enter(address, "proc_information")
        try:
            text = files.read(home / "information")
        finally:
            self._progress.leave()
        if not isinstance(text, Null) and _UUID.search(text):
            self._told[address] = (here, text)
        return text

    def module(self) -> tuple[str, int, int]:
        """Changes whenever another NVIDIA kernel module is loaded, also one of the same version."""
        version = self._nvidia / "version"
        return self.driver_version(), files.inode(version), files.inode(self._root / "sys/module/nvidia")

    def library_version(self) -> str:
        """Of the NVIDIA library that a process started now would load; empty when it is not found."""
        mapped = files.read(self._root / "proc/self/maps")
        places = [] if isinstance(mapped, Null) else re.findall(r"(/\S*)/libnvidia-ml\.so\.\d", mapped)
        for place in (*places[:1], *_LIBRARY_PLACES):
            target = files.link(self._root / place.lstrip("/") / "libnvidia-ml.so.1")
            found = re.search(r"\.so\.(\d{1,5}(?:\.\d{1,5}){1,3})$", str(target))
            if found:
                return found[1]
        return ""

    def has_process(self, pid: int) -> bool:
        """Whether a process of that number runs."""
        return files.exists(self._root / "proc" / str(pid))

    def driver_version(self) -> str:
        """Of the loaded NVIDIA kernel module; empty when none is."""
        text = files.read(self._nvidia / "version")
        if isinstance(text, Null):
            return ""
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d{1,5}(?:\.\d{1,5}){1,3})\s", text + " ")
        return found[1] if found else ""

    def runtime_status(self, address: str) -> Cell:
        """Whether the device is powered: active, suspended, ..."""
        return self._pcie.runtime_status(address)

    def routes(self) -> dict[str, str]:
        """`iommu` and `acs`: whether devices of the bus reach memory, and one another, without a detour."""
        try:
            kinds = {name: self.kind(name) for name in self._addresses()}
        except DriverError:
            kinds = {}
        found = {
            "iommu": self._pcie.iommu(self._root, [name for name, kind in kinds.items() if kind]),
            "acs": self._pcie.acs(name for name, kind in kinds.items() if kind == "gpu"),
        }
        return {name: text for name, text in found.items() if text}

    def _addresses(self) -> list[str]:
        try:
            names = os.listdir(self._pci)
        except FileNotFoundError as error:
            # a machine may have no PCI bus; one that shows no devices at all has no /sys: no answer
            if (self._root / "sys/devices").is_dir():
                return []
            raise DriverError("no_sysfs", f"{self._pci}: {error.strerror}") from error
        except OSError as error:
            raise DriverError(files.errno_word(error), f"{self._pci}: {error.strerror}") from error
        return sorted(name for name in names if ADDRESS.fullmatch(name))

    def _numbers(self, name: str) -> tuple[str, str]:
        """Vendor and class of a device; read once, for a bus has hundreds of devices that concern nobody."""
        home = files.inode(self._pci / name)
        known = self._known.get(name)
        if known is not None and known[0] == home:
            return known[1]
        texts = (files.read(self._pci / name / file) for file in ("vendor", "class"))
        vendor, pci_class = map(files.hexadecimal, texts)
        if home and vendor and pci_class:
            self._known[name] = (home, (vendor, pci_class))
        return vendor, pci_class

    def _kind(self, device: Path, vendor: str, pci_class: str) -> str:
        group = pci_class[:4]
        if group in _GPU_CLASSES.get(vendor, ()):
            kind = "gpu"
        elif vendor == NVIDIA and group == "0680":
            kind = "nvswitch"
        elif group == "0207" or (
            group == "0200" and (vendor == "15b3" or files.exists(device / "infiniband"))
        ):
            kind = "hca"
        else:
            return ""
        # a virtual function is a share of a device that is here already
        return "" if files.exists(device / "physfn") or self._in_processor(device, vendor, group) else kind

    def _in_processor(self, device: Path, vendor: str, group: str) -> bool:
        """Whether this is the graphics part of an AMD processor, which is no card of a fleet.

        The processor's own devices, of AMD's other vendor number, are further functions of the same slot; and
        only for these does amdgpu have a north bridge voltage.
        """
        if vendor != "1002" or not group.startswith("03"):
            return False
        slot = device.name.rpartition(".")[0]
        functions = (self._pci / f"{slot}.{number}" for number in range(8))
        if any(files.hexadecimal(files.read(function / "vendor")) == "1022" for function in functions):
            return True
        return any(files.exists(hwmon / "in1_input") for hwmon in files.listed(device / "hwmon"))

    def _device(self, device: Path, kind: str, vendor: str, known: dict[str, End]) -> Row:
        address = device.name
        status = self.runtime_status(address)
        present: Cell = ASLEEP if status == "suspended" else self._pcie.present(address)
        unread = ASLEEP if status == "suspended" else NO_ANSWER if present is False else None
        link: End = dict.fromkeys(LINK, unread) if unread else self._pcie.link(address)
        ports = self._pcie.ports(address)
        path = self._pcie.path(address, link, ports, known)
        module_knows = kind == "gpu" and vendor == NVIDIA
        row: dict[str, Cell] = {
            "pci": address,
            "device_kind": kind,
            "vendor_id": vendor,
            "device_id": files.hexadecimal(files.read(device / "device")) or files.UNPARSABLE,
            "present": present,
            "bound_driver": files.link(device / "driver"),
            "gpu_uuid": self.gpu_uuid(address) if module_knows else Null(Reason.NOT_SUPPORTED),
            "excluded": self.excluded(address) if module_knows else Null(Reason.NOT_SUPPORTED),
            **link,
            "numa_node": files.parsed(files.read(device / "numa_node"), _numa),
            "parent": ports[-1] if ports else "",
            "runtime_status": status,
            "path": "/".join(ports),
            **path,
            **(dict.fromkeys(PATH, unread) if unread else {}),
            **self._pcie.errors(address),
            **self._pcie.port_errors(ports),
        }
        return row | self._best.after(row)


class SysfsHost:
    """A host whose cards nobody asks: it has none, or their driver's library is not there."""

    def __init__(self, root: Path = Path("/"), ask_driver: bool = True) -> None:
        self.sysfs = Sysfs(root, ask_driver=ask_driver)
        self.machine = Machine(root)
        self.jobs = Jobs(root)
        self.log = KernelLog(root, uuid_of=self.remembered)
        self.workers = Workers(root)
        self.epoch = 1
        ports = Ports(root, lambda: self.sysfs.of_kind("gpu"))
        memory = Edac(root, time.monotonic)
        disks = Disks(root)
        # only this machine's own mounts can be asked
        mounts = Mounts(root, StatCanaries() if root == Path("/") else NoCanaries())
        self._groups: Mapping[str, Callable[[], Iterable[Row]]] = {
            "port": ports.rows,
            "edac": memory.rows,
            "dimm_item": memory.items,
            "disk": disks.rows,
            "disk_item": disks.items,
            "mount": mounts.rows,
            "mount_item": mounts.items,
            "loader": self.workers.rows,
        }

    @property
    def boot_id(self) -> str:
        """Of the running boot."""
        return self.machine.boot_id()

    def node(self) -> Item:
        """The host itself; `driver` says in words what there is."""
        return Item("node:", self.machine.attributes() | self.sysfs.routes() | driver_words(self.sysfs))

    def read(self, group: str) -> Row:
        """Host-wide metrics of "host"; nothing for a group that is not known."""
        return self.machine.read() if group == "host" else {}

    def rows(self, group: str) -> Iterable[Row]:
        """Things of the host of one group, one row each; none of a group that is not known."""
        return self._groups[group]() if group in self._groups else ()

    def gpus(self) -> Sequence[Gpu]:
        """None.

        Raises:
            DriverGone: NVIDIA cards are on the bus.
        """
        if self.sysfs.nvidia_cards():
            raise DriverGone("no_library", "NVIDIA cards are on the bus, but nothing to ask them with")
        return ()

    def pci_devices(self) -> Iterable[Row]:
        """GPUs, NVSwitches and HCAs on the bus."""
        return self.sysfs.pci_devices()

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`, and the next cursor."""
        return self.log.read(cursor)

    def remembered(self, pci: str) -> str:
        """UUID of the card at an address, from memory alone; empty when it was never read."""
        return ""

    def processes(self) -> Sequence[Process]:
        """None."""
        return ()

    def process(self, pid: int) -> Row:
        """Who it belongs to, by /proc."""
        about = self.jobs.process(pid)
        if isinstance(start := about["pid_start"], int):
            self.workers.holds_card(pid, start)
        return about

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """There is no card to run on."""
        return BenchResult("unsupported", None, "", f"{name} needs a card")


def driver_words(sysfs: Sysfs) -> dict[str, str]:
    """`driver`, and `driver_version` where one is loaded."""
    version = sysfs.driver_version()
    if version:
        return {"driver": f"NVIDIA {version}", "driver_version": version}
    try:
        cards = sysfs.nvidia_cards()
    except DriverError:
        cards = ()
    return {"driver": "NVIDIA driver not loaded" if cards else "no NVIDIA driver"}


def _numa(text: str) -> Cell:
    if text.strip() == "-1":
        return Null(Reason.NOT_SUPPORTED, "-1")
    return files.count(text.strip())
