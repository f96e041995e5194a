"""What the kernel says in /proc and /sys: the bus, the host's metrics, what the node is.

Needs no driver of a card, so it still answers when that driver hangs or is gone. Nothing here raises for a
file that is missing, truncated or full of bytes: the cell is a Null that says why.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from gpufleet.event import Event
from gpufleet.metric import Cell, Null, Reason, Row, Value
from gpufleet_agent.drivers import (
    BenchResult,
    DriverError,
    DriverGone,
    Gpu,
    Item,
    Link,
    NoProgress,
    Process,
    Progress,
    files,
)
from gpufleet_agent.drivers.jobs import Jobs
from gpufleet_agent.drivers.kmsg import KernelLog
from gpufleet_agent.drivers.workers import Workers

NVIDIA = "10de"

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_PRETTY = re.compile(r'^PRETTY_NAME="?([^"\n]*)', re.MULTILINE)
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_RUNTIME = ("active", "suspended", "suspending", "resuming", "error", "unsupported")
_GPU_CLASSES = {NVIDIA: ("0300", "0302", "0380"), "1002": ("0300", "0302", "0380", "1200")}
_GONE_WIDTH = "63"
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
_NO_ANSWER = Null(Reason.FAILED, "all_ones")
_ASLEEP = Null(Reason.NOT_READ, "suspended")
_PLACEHOLDERS = (
    "",
    "none",
    "not specified",
    "to be filled by o.e.m.",
    "default string",
    "system product name",
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
        self._nvidia = root / "proc/driver/nvidia"
        self._progress: Progress = progress or NoProgress()
        self._skip = frozenset(skip)
        self._ask_driver = ask_driver
        self._told: dict[str, tuple[int, str]] = {}

    def pci_devices(self) -> list[Row]:
        """GPUs, NVSwitches and HCAs, in order of their addresses; the columns of probe `pci`.

        Raises:
            DriverError: The bus cannot be listed, so nothing can be said about what is on it.
        """
        rows: list[Row] = []
        for name in self._addresses():
            device = self._pci / name
            vendor, pci_class = (
                files.hexadecimal(files.read(device / "vendor")),
                files.hexadecimal(files.read(device / "class")),
            )
            kind = self._kind(device, vendor, pci_class)
            if kind:
                rows.append(self._device(device, kind, vendor))
        return rows

    def nvidia_cards(self) -> tuple[str, ...]:
        """Addresses of NVIDIA cards on the bus, but for those handed to virtual machines."""
        found: list[str] = []
        for name in self._addresses():
            device = self._pci / name
            vendor, pci_class = (
                files.hexadecimal(files.read(device / "vendor")),
                files.hexadecimal(files.read(device / "class")),
            )
            is_card = vendor == NVIDIA and self._kind(device, vendor, pci_class) == "gpu"
            if is_card and files.link(device / "driver") not in ("vfio-pci", "pci-stub"):
                found.append(name)
        return tuple(found)

    def devices_of(self, vendor: str) -> list[str]:
        """Addresses of a vendor's devices; asks no driver of anything.

        Raises:
            DriverError: The bus cannot be listed.
        """
        return [
            name
            for name in self._addresses()
            if files.hexadecimal(files.read(self._pci / name / "vendor")) == vendor
        ]

    def kind(self, address: str) -> str:
        """`gpu`, `nvswitch` or `hca`; empty for a device that is none of them."""
        device = self._pci / address
        return self._kind(
            device,
            files.hexadecimal(files.read(device / "vendor")),
            files.hexadecimal(files.read(device / "class")),
        )

    def present(self, address: str) -> Cell:
        """False when the device is listed but no longer answers. Do not ask it of one that is suspended."""
        return _present(self._pci / address)

    def link(self, address: str) -> dict[str, Cell]:
        """`pcie_gen`, `pcie_gen_max`, `pcie_width`, `pcie_width_max` of the device's own link."""
        device = self._pci / address
        return {
            "pcie_gen": files.parsed(files.read(device / "current_link_speed"), _generation),
            "pcie_gen_max": files.parsed(files.read(device / "max_link_speed"), _generation),
            "pcie_width": files.parsed(files.read(device / "current_link_width"), _lanes),
            "pcie_width_max": files.parsed(files.read(device / "max_link_width"), _lanes),
        }

    def knows_card(self, address: str) -> bool:
        """Whether the NVIDIA kernel module took the card."""
        return files.exists(self._nvidia / "gpus" / address)

    def answers(self, address: str) -> bool:
        """False only when the bus no longer lists the device, or it reads all ones."""
        device = self._pci / address
        if not files.exists(device):
            return not files.exists(self._pci)
        return _present(device) is not False

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
            return _ASLEEP
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
        return files.word(self._pci / address / "power/runtime_status", _RUNTIME)

    def boot_id(self) -> str:
        """Of the running boot; empty when it cannot be read."""
        return files.plain(files.read(self._root / "proc/sys/kernel/random/boot_id"))

    def host(self) -> Row:
        """The columns of probe `host`."""
        proc = self._root / "proc"
        row: dict[str, Cell] = {}
        row.update(_stat(files.read(proc / "stat")))
        row.update(_loadavg(files.read(proc / "loadavg")))
        row.update(_meminfo(files.read(proc / "meminfo")))
        for name, kind in _PRESSURES:
            row[f"psi_{name}_{kind}_s_total"] = files.pressure(files.read(proc / "pressure" / name), kind)
        row["uptime_s"] = files.parsed(
            files.read(proc / "uptime"), lambda text: files.number(text.split()[0])
        )
        return row

    def attributes(self) -> dict[str, str]:
        """What the node is, as far as it can be read."""
        proc, dmi = self._root / "proc", self._root / "sys/class/dmi/id"
        machine = files.plain(files.read(self._root / "etc/machine-id"))
        memory = _meminfo(files.read(proc / "meminfo"))["mem_total_bytes"]
        cpus = _stat(files.read(proc / "stat"))["cpus"]
        found = {
            "hostname": files.plain(files.read(proc / "sys/kernel/hostname")),
            "machine_id": machine if re.fullmatch("[0-9a-f]{32}", machine) and set(machine) != {"0"} else "",
            "boot_id": self.boot_id(),
            "kernel": files.plain(files.read(proc / "sys/kernel/osrelease")),
            "architecture": os.uname().machine,
            "os": self._os(),
            "vendor": files.plain(files.read(dmi / "sys_vendor")),
            "product": files.plain(files.read(dmi / "product_name")),
            "serial": files.plain(files.read(dmi / "product_serial")),
            "cpu_model": self._cpu_model(),
            "cpus": "" if isinstance(cpus, Null) else str(cpus),
            "mem_total_bytes": "" if isinstance(memory, Null) else str(memory),
        }
        return {name: text for name, text in found.items() if text.lower() not in _PLACEHOLDERS}

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
        return sorted(name for name in names if _ADDRESS.fullmatch(name))

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

    def _device(self, device: Path, kind: str, vendor: str) -> Row:
        address = device.name
        status = self.runtime_status(address)
        asleep = status == "suspended"
        present: Cell = _ASLEEP if asleep else _present(device)
        link: Row
        if asleep or present is False:
            nothing = _ASLEEP if asleep else _NO_ANSWER
            link = dict.fromkeys(("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max"), nothing)
        else:
            link = self.link(address)
        module_knows = kind == "gpu" and vendor == NVIDIA
        return {
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
            "parent": _parent(device),
            "runtime_status": status,
        }

    def _os(self) -> str:
        for name in ("etc/os-release", "usr/lib/os-release"):
            text = files.read(self._root / name)
            found = (
                None if isinstance(text, Null) else re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
            )
            if found:
                return files.plain(found[1])
        return ""

    def _cpu_model(self) -> str:
        text = files.read(self._root / "proc/cpuinfo")
        found = None if isinstance(text, Null) else re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        return files.plain(found[1]) if found else ""


class SysfsHost:
    """A host whose cards nobody asks: it has none, or their driver's library is not there."""

    def __init__(self, root: Path = Path("/"), ask_driver: bool = True) -> None:
        self.sysfs = Sysfs(root, ask_driver=ask_driver)
        self.jobs = Jobs(root)
        self.log = KernelLog(root, uuid_of=self.remembered)
        self.epoch = 1
        self._groups: Mapping[str, Callable[[], Iterable[Row]]] = {"loader": Workers(root).rows}

    @property
    def boot_id(self) -> str:
        """Of the running boot."""
        return self.sysfs.boot_id()

    def node(self) -> Item:
        """The host itself; `driver` says in words what there is."""
        return Item("node:", self.sysfs.attributes() | driver_words(self.sysfs))

    def read(self, group: str) -> Row:
        """Host-wide metrics of "host"; nothing for a group that is not known."""
        return self.sysfs.host() if group == "host" else {}

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

    def links(self, gpu: Gpu) -> Sequence[Link]:
        """None."""
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
        return self.jobs.process(pid)

    def run_bench(self, name: str, params: Mapping[str, Value]) -> BenchResult:
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


_PRESSURES = (("cpu", "some"), ("memory", "full"), ("io", "some"), ("io", "full"))


def _generation(text: str) -> Cell:
    """`32.0 GT/s PCIe` -> 5."""
    if text.strip().startswith("Unknown"):
        return Null(Reason.FAILED, "Unknown")
    return _GENERATIONS[float(text.split()[0])]


def _lanes(text: str) -> Cell:
    lanes = files.count(text.strip())
    return lanes if lanes in (1, 2, 4, 8, 12, 16, 32) else Null(Reason.FAILED, text.strip()[:8])


def _numa(text: str) -> Cell:
    if text.strip() == "-1":
        return Null(Reason.NOT_SUPPORTED, "-1")
    return files.count(text.strip())


def _present(device: Path) -> Cell:
    """False when the device is listed but its configuration space reads all ones: it no longer answers."""
    width = files.read(device / "current_link_width")
    if not isinstance(width, Null) and width.strip() == _GONE_WIDTH:
        return False
    try:
        with (device / "config").open("rb") as file:
            head = file.read(4)
    except OSError as error:
        return files.why(error)
    return head != b"\xff\xff\xff\xff" if len(head) == 4 else files.UNPARSABLE


def _parent(device: Path) -> Cell:
    """Address of the port above; empty at a root."""
    above = os.path.basename(os.path.dirname(os.path.realpath(device)))
    return above if _ADDRESS.fullmatch(above) else ""


_STAT = (
    "cpu_busy_s_total",
    "cpu_iowait_s_total",
    "cpu_steal_s_total",
    "cpus",
    "context_switches_total",
    "processes_blocked",
)


def _stat(text: str | Null) -> dict[str, Cell]:
    if isinstance(text, Null):
        return dict.fromkeys(_STAT, text)
    lines = [line.split() for line in text.splitlines()]
    first = {words[0]: words[1:] for words in reversed(lines) if words}
    hertz = os.sysconf("SC_CLK_TCK")

    def ticks(*places: int) -> Cell:
        values = [files.count(value) for value in first["cpu"][:8]]
        return sum(values[place] for place in places) / hertz

    cpus = sum(bool(re.fullmatch(r"cpu\d+", name)) for name in first)
    return {
        # user, nice, system, irq, softirq, steal: not idle and not waiting; guests are counted in user
        "cpu_busy_s_total": files.parsed(text, lambda _: ticks(0, 1, 2, 5, 6, 7)),
        "cpu_iowait_s_total": files.parsed(text, lambda _: ticks(4)),
        "cpu_steal_s_total": files.parsed(text, lambda _: ticks(7)),
        "cpus": cpus or files.UNPARSABLE,
        "context_switches_total": files.parsed(text, lambda _: files.count(first["ctxt"][0])),
        "processes_blocked": files.parsed(text, lambda _: files.count(first["procs_blocked"][0])),
    }


def _loadavg(text: str | Null) -> dict[str, Cell]:
    return {
        "load1": files.parsed(text, lambda text: files.number(text.split()[0])),
        "load15": files.parsed(text, lambda text: files.number(text.split()[2])),
        "processes": files.parsed(text, lambda text: files.count(text.split()[3].split("/")[1])),
    }


def _meminfo(text: str | Null) -> dict[str, Cell]:
    sizes: dict[str, str] = {}
    if not isinstance(text, Null):
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))

    def size(name: str) -> int:
        return files.count(sizes[name]) * 1024

    return {
        "mem_total_bytes": files.parsed(text, lambda _: size("MemTotal")),
        "mem_available_bytes": files.parsed(text, lambda _: size("MemAvailable")),
        "swap_used_bytes": files.parsed(text, lambda _: max(0, size("SwapTotal") - size("SwapFree"))),
    }
