"""Which driver a host is read through: decided once, here, when a child starts."""

import ctypes
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpufleet.config import ConfigError
from gpufleet_agent import scenario
from gpufleet_agent.drivers import DriverError, Host, Progress, amdgpu
from gpufleet_agent.drivers.composite import CompositeHost
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.drivers.sysfs import Sysfs, SysfsHost
from gpufleet_agent.drivers.workers import names

DRIVERS = ("auto", "nvml", "amdgpu", "simulated", "none")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Which host of which scenario, and since when.

    Attributes:
        scenario: The file.
        node: The host's name there.
        started_us: Wall clock at the scenario's start, microseconds since the epoch.
        started_mono_us: CLOCK_BOOTTIME at the same instant; None = taken from the wall clock now.
        hang: "block" = a hung call really does not return; "raise" = it raises `Hung` at once.
    """

    scenario: Path
    node: str
    started_us: int
    started_mono_us: int | None = None
    hang: Literal["raise", "block"] = "block"


def open_host(
    driver: str,
    root: Path = Path("/"),
    progress: Progress | None = None,
    simulated: Simulated | None = None,
    skip: Collection[str] = (),
    aside: Progress | None = None,
    worker_names: Collection[str] = (),
) -> Host:
    """The host as `driver` sees it.

    Args:
        driver: auto, nvml, amdgpu, simulated or none. "auto" is NVML where its library loads or NVIDIA cards
            are on the bus, amdgpu where AMD cards are, both on a mixed host, else a host without cards.
        root: Where /proc and /sys are.
        progress: Where calls that may hang are announced.
        simulated: For "simulated" only.
        skip: Addresses of cards that must not be touched.
        aside: Where an initialisation is announced that may go on beside everything else; None = it may not.
        worker_names: What workers of data loaders call themselves here, besides those that are known.

    Raises:
        ConfigError: The scenario cannot be used, or has no such node.
        ValueError: No such driver, or "simulated" without a scenario.
    """
    if driver == "simulated":
        if simulated is None:
            raise ValueError("driver simulated: which scenario and which node of it?")
        return _simulated(simulated, progress)
    if driver not in DRIVERS:
        raise ValueError(f"driver {driver!r}: use one of {', '.join(DRIVERS)}")
    hosts: list[SysfsHost] = []
    if driver == "nvml" or (driver == "auto" and (_library_loads() or _cards_on_bus(root))):
        # here, because it loads the binding's megabytes
        from gpufleet_agent.drivers.nvml import NvmlHost

        hosts.append(NvmlHost(root, progress, skip=skip, aside=aside))
    if driver == "amdgpu" or (driver == "auto" and amdgpu.on_host(root)):
        hosts.append(amdgpu.AmdHost(root, progress, skip=skip))
    if not hosts:
        # "none" is also what is left when the driver as a whole hangs
        hosts.append(SysfsHost(root, ask_driver=driver == "auto"))
    hosts[0].workers.names |= names(worker_names)
    return hosts[0] if len(hosts) == 1 else CompositeHost(hosts)


def _simulated(which: Simulated, progress: Progress | None) -> SimulatedHost:
    played = scenario.load(which.scenario)
    if which.node not in played.node_names():
        raise ConfigError(f"{which.scenario}: no node {which.node!r} in it")
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    passed = time.time() - which.started_us / 1e6
    zero = boot - passed if which.started_mono_us is None else which.started_mono_us / 1e6

    def clock() -> float:
        # the wall clock may be set while the scenario runs
        return time.clock_gettime(time.CLOCK_BOOTTIME) - zero

    return SimulatedHost(played, which.node, which.started_us, clock, progress, which.hang)


def _library_loads() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _cards_on_bus(root: Path) -> bool:
    try:
        return bool(Sysfs(root).nvidia_cards())
    except DriverError:
        return False
