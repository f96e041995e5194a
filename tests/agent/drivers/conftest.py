from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.scenario import Scenario, load, parse


class Clock:
    """Seconds since the scenario's start, set by the test."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scenarios() -> Path:
    return Path(__file__).parents[2] / "fixtures" / "scenarios"


@pytest.fixture
def everything(scenarios: Path) -> Scenario:
    return load(scenarios / "everything.toml")


@pytest.fixture
def play(clock: Clock) -> Callable[..., SimulatedHost]:
    """One host of a scenario text; its clock is the `clock` fixture."""

    def host(text: str, node: str = "gpu-001") -> SimulatedHost:
        return parse(text.encode()).host(node, clock, 1_700_000_000_000_000)

    return host


class Tree:
    """A made /proc and /sys below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def pci(
        self,
        address: str,
        vendor: str = "10de",
        pci_class: str = "030200",
        device: str = "2330",
        parent: str = "0000:1a:01.0",
        driver: str = "nvidia",
        speed: str = "32.0 GT/s PCIe",
        width: str = "16",
        config: bytes = b"\xde\x10\x30\x23",
        status: str = "active",
    ) -> str:
        """A device below a port, linked from the bus as the kernel does it."""
        home = f"sys/devices/pci0000:00/{parent}/{address}" if parent else f"sys/devices/pci0000:00/{address}"
        values = {
            "vendor": f"0x{vendor}",
            "device": f"0x{device}",
            "class": f"0x{pci_class}",
            "current_link_speed": speed,
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": width,
            "max_link_width": "16",
            "numa_node": "1",
            "power/runtime_status": status,
        }
        for name, value in values.items():
            self.write(f"{home}/{name}", f"{value}\n")
        self.write(f"{home}/config", config)
        bus = self.root / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / address).symlink_to(f"../../../../{home}")
        if driver:
            (self.root / home / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return home

    def nvidia(self, address: str, uuid: str, excluded: str = "No") -> None:
        """A card as the kernel module knows it."""
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 30\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        text += f"GPU Excluded:\t {excluded}\n"
        self.write(f"proc/driver/nvidia/gpus/{address}/information", text)

    def host(self) -> None:
        """What every Linux has."""
        for name, text in _HOST.items():
            self.write(name, text)


_PRESSURE = "avg10=0.00 avg60=0.00 avg300=0.00"
_HOST = {
    "proc/stat": "cpu  100 20 30 4000 50 6 7 8 0 0\n"
    "cpu0 50 10 15 2000 25 3 4 4 0 0\ncpu1 50 10 15 2000 25 3 3 4 0 0\n"
    "intr 9 1\nctxt 123456\nbtime 1700000000\nprocesses 999\nprocs_running 2\nprocs_blocked 3\n",
    "proc/loadavg": "0.21 0.56 0.44 2/92 10580\n",
    "proc/meminfo": "MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable: 600 kB\n"
    "SwapTotal: 50 kB\nSwapFree: 20 kB\n",
    "proc/pressure/cpu": f"some {_PRESSURE} total=1500000\n",
    "proc/pressure/memory": f"some {_PRESSURE} total=5\nfull {_PRESSURE} total=2500000\n",
    "proc/pressure/io": f"some {_PRESSURE} total=3500000\nfull {_PRESSURE} total=500000\n",
    "proc/uptime": "1679.16 2985.62\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9554 64-Core Processor\n\nprocessor\t: 1\n",
    "proc/sys/kernel/hostname": "gpu-a01\n",
    "proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
    "proc/sys/kernel/random/boot_id": "1d9051fe-4ab7-464d-96ab-144fcdc4c138\n",
    "etc/machine-id": "5b0e6d1f27a94c83b6d2e4f8091a3c57\n",
    "etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "sys/class/dmi/id/sys_vendor": "Supermicro\n",
    "sys/class/dmi/id/product_name": "To Be Filled By O.E.M.\n",
    "sys/devices/system/online": "0-1\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.host()
    return made


def nvml_uuid(slot: int) -> str:
    return f"GPU-00000000-0000-4000-8000-00000000000{slot:x}"


def nvml_address(slot: int) -> str:
    return f"0000:{slot + 16:02x}:00.0"


class NvmlError(Exception):
    """Like pynvml's: a value, and no hash."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    __hash__ = None  # type: ignore[assignment]


class Array:
    """Like an array of ctypes: a length and places, but no iterator."""

    __iter__ = None

    def __init__(self, values: list[object]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> object:
        return self.values[place]


class Nvml:
    """A driver with cards; `fail[name]` or `fail[name, slot]` is the code that a call answers with."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = list(range(slots))
        self.fail: dict[str | tuple[str, int], int | Exception] = {}
        self.says: dict[str | tuple[str, int], object] = {}
        self.fields: dict[int | tuple[int, int], object] = {}
        self.missing: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.answers = dict(_ANSWERS)

    def field(self, number: int, value: float, kind: int = 3, code: int = 0) -> object:
        """One answer of a batch, in the real binding's structure."""
        made = pynvml.c_nvmlFieldValue_t()
        made.fieldId, made.valueType, made.nvmlReturn = number, kind, code
        setattr(made.value, ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind], value)
        return made

    def array(self, values: list[object]) -> object:
        return Array(values)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *args: object) -> object:
        self.calls[name] += 1
        if name == "nvmlDeviceGetMemoryInfo" and len(args) > 1:
            name = "nvmlDeviceGetMemoryInfo_v2"
        slot = self._slot(name, args)
        trouble = self.fail.get((name, slot), self.fail.get(name))
        if trouble is not None:
            raise NvmlError(trouble) if isinstance(trouble, int) else trouble
        for key in ((name, slot), name):
            if key in self.says:
                said = self.says[key]
                return said(*args) if callable(said) else said
        if name == "nvmlDeviceGetFieldValues":
            assert isinstance(args[1], list)
            usual = {one: self.field(one, 2_000_000_000) for one in args[1]}
            return Array([self.fields.get((one, slot), self.fields.get(one, usual[one])) for one in args[1]])
        return {
            "nvmlDeviceGetCount": len(self.slots),
            "nvmlDeviceGetHandleByIndex": SimpleNamespace(slot=slot),
            "nvmlDeviceGetHandleByPciBusId": SimpleNamespace(slot=slot),
            "nvmlDeviceGetPciInfo": SimpleNamespace(
                busId=f"0000{nvml_address(slot).upper()}".encode(), pciDeviceId=0x233010DE
            ),
            "nvmlDeviceGetUUID": nvml_uuid(slot),
            **self.answers,
        }.get(name)

    def _slot(self, name: str, args: tuple[object, ...]) -> int:
        if name == "nvmlDeviceGetHandleByIndex":
            assert isinstance(args[0], int)
            return self.slots[args[0]]
        if name == "nvmlDeviceGetHandleByPciBusId":
            return int(str(args[0])[5:7], 16) - 16
        return int(getattr(args[0], "slot", -1)) if args else -1


_ANSWERS: dict[str, object] = {
    "nvmlSystemGetDriverVersion": "570.133.20",
    "nvmlSystemGetCudaDriverVersion_v2": 12080,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=61),
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetFanSpeed": 30,
    "nvmlDeviceGetApplicationsClock": 1980,
    "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=0),
    "nvmlDeviceGetPowerUsage": 690_500,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=85_520_809_984, used=70_000_000_000, free=1),
    "nvmlDeviceGetMemoryInfo_v2": SimpleNamespace(total=85_520_809_984, used=70_000_000_000, free=1),
    "nvmlDeviceGetTemperatureV": 64,
    "nvmlDeviceGetTemperature": 63,
    "nvmlDeviceGetMarginTemperature": 23,
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 6,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetSerial": "1650522000001",
    "nvmlDeviceGetBoardPartNumber": "692-2G520-0200-000",
    "nvmlDeviceGetVbiosVersion": "96.00.89.00.01",
    "nvmlDeviceGetInforomImageVersion": "G520.0200.00.05",
    "nvmlDeviceGetGspFirmwareVersion": b"570.133.20\x00",
    "nvmlDeviceGetMinorNumber": 2,
    "nvmlDeviceGetModuleId": 5,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetMaxCustomerBoostClock": 1980,
    "nvmlDeviceGetMemoryBusWidth": 5120,
    "nvmlDeviceGetArchitecture": 9,
    "nvmlDeviceGetComputeRunningProcesses_v3": [],
    "nvmlSystemGetNVMLVersion": "12.570.133.20",
    "nvmlDeviceGetVirtualizationMode": 1,
    "nvmlDeviceGetInforomConfigurationChecksum": 0x12345678,
    "nvmlDeviceGetPdi": 0x0123456789ABCDEF,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetMemoryErrorCounter": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetRowRemapperHistogram": SimpleNamespace(max=2560, high=0, partial=0, low=0, none=0),
    "nvmlDeviceGetRepairStatus": [0, 0],
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": 0,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimitConstraints": [200_000, 700_000],
    "nvmlDeviceGetTemperatureThreshold": 95,
    "nvmlDeviceGetPcieReplayCounter": 3,
    "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=1, violationTime=4_000_000_000),
}


@pytest.fixture
def make_nvml() -> Callable[[int], Nvml]:
    return Nvml


@pytest.fixture
def nvml(tree: Tree) -> Nvml:
    for slot in range(4):
        tree.pci(nvml_address(slot))
        tree.nvidia(nvml_address(slot), nvml_uuid(slot))
    return Nvml()


@pytest.fixture
def host(tree: Tree, nvml: Nvml, clock: Clock) -> NvmlHost:
    return NvmlHost(tree.root, None, nvml, clock=clock)
