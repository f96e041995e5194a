"""How the agent's children open the host: without the cards that are skipped.

A card whose driver call did not return is not touched again until the supervisor says so; it answers `Hung`
without being asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from gpufleet.event import Event
from gpufleet.metric import Null, Row, Value
from gpufleet_agent.drivers import (
    BenchResult,
    Check,
    DriverGone,
    Gpu,
    Host,
    Hung,
    Item,
    Process,
    Progress,
    Ring,
    go_on,
)
from gpufleet_agent.drivers.open import Simulated, open_host
from gpufleet_agent.labels import attributes
from gpufleet_agent.pipe import Skip


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """Which simulated host to be; see `drivers.open.Simulated`.

    Attributes:
        scenario: Path of the scenario file.
        node: Its name there.
        started_us: Wall clock at the scenario's start, microseconds since the epoch.
        started_mono_us: CLOCK_BOOTTIME at the same instant, so that all children are at one time.
    """

    scenario: str
    node: str
    started_us: int
    started_mono_us: int


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a child opens the host.

    Attributes:
        driver: auto, nvml, amdgpu, none or simulated.
        root: Where /proc and /sys are.
        simulated: For driver = "simulated".
        labels: Where the host is and whose it is, for the inventory.
        worker_names: What workers of data loaders call themselves here, besides those that are known.
    """

    driver: str = "auto"
    root: str = "/"
    simulated: SimulatedNode | None = None
    labels: dict[str, str] = {}
    worker_names: list[str] = []


class SkippedGpu:
    """Stands for a card that is not touched. Where the driver's list does not name it, it is as last read."""

    def __init__(self, gpu: Gpu, skip: Skip) -> None:
        self.pci = gpu.pci
        self.uuid = skip.uuid or gpu.uuid
        self.index = skip.index if skip.index >= 0 else gpu.index
        self.ring = Ring()

    def identity(self) -> Mapping[str, str]:
        """Not read.

        Raises:
            Hung: Always.
        """
        raise Hung("hung", f"{self.pci} is left alone")

    def read(self, group: str) -> Row:
        """Not read.

        Raises:
            Hung: Always.
        """
        raise Hung("hung", f"{self.pci} is left alone")

    def links(self) -> Sequence[Row] | Null:
        """Not read.

        Raises:
            Hung: Always.
        """
        raise Hung("hung", f"{self.pci} is left alone")


class GuardedHost:
    """A host without the cards that are skipped.

    Args:
        host: The real one.
        skip: Cards not to touch; one with pci "" = no card at all.
        only: The one card to show; None = all.
        labels: Of the host.
    """

    def __init__(
        self,
        host: Host,
        skip: Iterable[Skip] = (),
        only: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._host = host
        self._labels = attributes(labels or {})
        self._skip = {one.pci: one for one in skip}
        self._only = only

    @property
    def whole(self) -> bool:
        """Whether nothing is skipped."""
        return not self._skip

    @property
    def epoch(self) -> int:
        """Counts the driver's initialisations."""
        return self._host.epoch

    @property
    def boot_id(self) -> str:
        """Of the running boot."""
        return self._host.boot_id

    def node(self) -> Item:
        """The host itself, with its labels."""
        found = self._host.node()
        return Item(found.entity, {**found.attributes, **self._labels})

    def read(self, group: str) -> Row:
        """Host-wide metrics of one group."""
        return self._host.read(group)

    def rows(self, group: str) -> Iterable[Row]:
        """Things of the host of one group, one row each."""
        return self._host.rows(group)

    def gpus(self) -> Sequence[Gpu]:
        """The cards; a skipped one is in the list but answers `Hung`.

        Raises:
            DriverGone: No driver answers, or it is left alone as a whole (code `hung` or `released`).
        """
        if "" in self._skip:
            why = self._skip[""].why
            text = "a call of the driver for no single card did not return"
            raise DriverGone(why, text if why == "hung" else "left alone for maintenance")
        return [
            SkippedGpu(gpu, self._skip[gpu.pci]) if gpu.pci in self._skip else gpu
            for gpu in self._host.gpus()
            if self._only is None or gpu.pci == self._only
        ]

    def pci_devices(self) -> Iterable[Row]:
        """The bus, by sysfs."""
        return self._host.pci_devices()

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`."""
        return self._host.kernel_log(cursor)

    def processes(self) -> Sequence[Process]:
        """Processes that hold a card; a driver that is skipped as a whole is not asked."""
        return () if "" in self._skip else self._host.processes()

    def process(self, pid: int) -> Row:
        """Who it belongs to; no driver is asked."""
        return self._host.process(pid)

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """A bench that only this driver can run; never on a card that is skipped."""
        for pci in (params.get("pci"), params.get("peer")):
            if pci in self._skip:
                return BenchResult("skipped", None, "", f"{pci} is left alone")
        return self._host.run_bench(name, params, check)


def open_guarded(
    settings: HostSettings,
    progress: Progress | None = None,
    skip: Sequence[Skip] = (),
    only: str | None = None,
    aside: Progress | None = None,
) -> GuardedHost:
    """Open the host; a driver that is skipped as a whole is not even loaded.

    With `aside`, a driver that is slow to initialise does so beside the probes, and announces it there.

    Raises:
        ConfigError: The scenario cannot be used.
    """
    driver = settings.driver
    if driver != "simulated" and any(one.pci == "" for one in skip):
        driver = "none"
    simulated = None
    if settings.simulated is not None:
        node = settings.simulated
        simulated = Simulated(Path(node.scenario), node.node, node.started_us, node.started_mono_us)
    addresses = [one.pci for one in skip if one.pci]
    host = open_host(
        driver, Path(settings.root), progress, simulated, addresses, aside, settings.worker_names
    )
    return GuardedHost(host, skip, only, settings.labels)
