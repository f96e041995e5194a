"""The host as the sampler uses it: leaves out the cards that are skipped, and spares those that are lost.

A card whose driver call did not return is not touched again until the supervisor says so; it answers `Hung`
without being asked. A lost card is asked again only now and then: each try may cost seconds in the driver.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpufleet.event import Event
from gpufleet.metric import Row, Value
from gpufleet_agent.drivers import BenchResult, DriverGone, Gpu, Host, Hung, Item, Link, Lost, Process, Ring
from gpufleet_agent.pipe import Skip

class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Which simulated host to be.

    Attributes:
        scenario: Path of the scenario file.
        node: Its name there.
        started_us: Wall clock at the scenario's start, microseconds since the epoch.
        started_mono_us: CLOCK_BOOTTIME at the same instant: every child, also one started again, is at one time.
    """

    scenario: str
    node: str
    started_us: int
    started_mono_us: int


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a child opens the host.

    Attributes:
        driver: auto, nvml, none or simulated.
        root: Where /proc, /sys and /dev are looked for.
        simulated: For driver = "simulated".
    """

    driver: str = "auto"
    root: str = "/"
    simulated: Simulated | None = None


LOST_RETRY_S = 30.0
"""How often a lost card is asked whether it is back."""


class SkippedGpu:
    """Stands for a card that is not touched. Its uuid and index are those it had when last read."""

    def __init__(self, skip: Skip) -> None:
        self.pci = skip.pci
        self.uuid = skip.uuid
        self.index = skip.index
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


class GuardedGpu:
    """A card that, once lost, is asked again only every `LOST_RETRY_S`."""

    def __init__(self, gpu: Gpu, clock: Callable[[], float]) -> None:
        self.gpu = gpu
        self._clock = clock
        self._lost: Lost | None = None
        self._ask_again = 0.0

    @property
    def pci(self) -> str:
        """`dddd:bb:dd.f`."""
        return self.gpu.pci

    @property
    def uuid(self) -> str:
        """`GPU-...`."""
        return self.gpu.uuid

    @property
    def index(self) -> int:
        """The driver's number today."""
        return self.gpu.index

    @property
    def ring(self) -> Ring:
        """1 Hz values since the last read of the `gpu` probe."""
        return self.gpu.ring

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes.

        Raises:
            Lost, Hung: This card does not answer.
        """
        self._spare()
        try:
            return self.gpu.identity()
        except Lost as lost:
            self._remember(lost)
            raise

    def read(self, group: str) -> Row:
        """The metrics of one group.

        Raises:
            Lost, Hung: This card does not answer.
        """
        self._spare()
        try:
            return self.gpu.read(group)
        except Lost as lost:
            self._remember(lost)
            raise

    def _spare(self) -> None:
        if self._lost is not None:
            if self._clock() < self._ask_again:
                raise Lost(self._lost.code, str(self._lost))
            self._lost = None

    def _remember(self, lost: Lost) -> None:
        self._lost = Lost(lost.code, str(lost))
        self._ask_again = self._clock() + LOST_RETRY_S


class GuardedHost:
    """A host without the cards that are skipped.

    Args:
        host: The real one.
        skip: Cards not to touch; one with pci "" = no card at all.
        only: The one card to show; None = all.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        host: Host,
        skip: Iterable[Skip] = (),
        only: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._skip = {one.pci: one for one in skip}
        self._only = only
        self._clock = clock
        self._guarded: dict[str, GuardedGpu] = {}

    def unskip(self, pci: str) -> None:
        """The card may be touched again."""
        self._skip.pop(pci, None)

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
        """The host itself."""
        return self._host.node()

    def read(self, group: str) -> Row:
        """Host-wide metrics of one group."""
        return self._host.read(group)

    def gpus(self) -> Sequence[Gpu]:
        """The cards; a skipped one is in the list but answers `Hung`.

        Raises:
            DriverGone: No driver answers, or it hung as a whole (code `hung`).
        """
        if "" in self._skip:
            raise DriverGone("hung", "the driver did not return from a call for no single card")
        cards = [
            SkippedGpu(self._skip[gpu.pci]) if gpu.pci in self._skip else self._guard(gpu)
            for gpu in self._host.gpus()
            if self._only is None or gpu.pci == self._only
        ]
        return cards

    def _guard(self, gpu: Gpu) -> GuardedGpu:
        guarded = self._guarded.get(gpu.pci)
        if guarded is None or guarded.gpu is not gpu:
            guarded = self._guarded[gpu.pci] = GuardedGpu(gpu, self._clock)
        return guarded

    def links(self, gpu: Gpu) -> Sequence[Link]:
        """The card's NVLinks; none of one that is skipped."""
        return self._host.links(gpu.gpu) if isinstance(gpu, GuardedGpu) else ()

    def pci_devices(self) -> Iterable[Row]:
        """The bus, by sysfs."""
        return self._host.pci_devices()

    def ports(self) -> Iterable[Row]:
        """InfiniBand and Ethernet ports."""
        return self._host.ports()

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`."""
        return self._host.kernel_log(cursor)

    def processes(self) -> Sequence[Process]:
        """Processes that hold a card; a driver that is skipped is not asked."""
        return () if self._skip else self._host.processes()

    def run_bench(self, name: str, params: Mapping[str, Value]) -> BenchResult:
        """A bench that only this driver can run."""
        return self._host.run_bench(name, params)


def open_guarded(
    settings: HostSettings,
    progress: Progress | None,
    skip: list[pipe.Skip] | None = None,
    only: str | None = None,
) -> GuardedHost:
    """Open the host; the driver is left out when it is skipped as a whole."""
    skip = skip or []
    driver = settings.driver
    if any(one.pci == "" for one in skip) and driver != "simulated":
        driver = "none"
    return GuardedHost(open_host(driver, Path(settings.root), progress, _simulated(settings, progress)), skip, only)
