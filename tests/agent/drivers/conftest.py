from collections.abc import Callable
from pathlib import Path

import pytest

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

    def nvidia(self, address: str, uuid: str) -> None:
        """A card as the kernel module knows it."""
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 30\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
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
    "etc/machine-id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
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
