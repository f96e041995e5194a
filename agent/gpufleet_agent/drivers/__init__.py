"""The host interface: what a driver offers to probes and benches.

Probes and benches know these shapes and nothing else. A reading is per card, so that one card's trouble
is one card's; "not supported" is a reading (`Null`), not an exception.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpufleet.event import Event
from gpufleet.metric import Null, Row, Value


class DriverError(Exception):
    """Trouble that is not a reading. `code` is a short word for machines."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.code = code


class Lost(DriverError):
    """This card no longer answers: fallen off the bus, or its handle is dead."""


class Hung(DriverError):
    """This card's driver call did not return within its deadline."""


class DriverGone(DriverError):
    """Cards are on the bus but no driver answers for any.

    Codes: `driver_not_loaded`, `no_library`, `driver_mismatch`, `no_permission`, `driver_failed`, `starting`.
    """


class Progress(Protocol):
    """Where a driver writes what it is about to do, so that a hang can be named from outside."""

    def enter(self, card: str, call: str) -> None:
        """About to call `call` for `card` (a PCI address; "" = no single card)."""

    def leave(self) -> None:
        """The call returned."""


class NoProgress:
    """Progress for a process that nobody watches."""

    def enter(self, card: str, call: str) -> None:
        """Nothing to write."""

    def leave(self) -> None:
        """Nothing to write."""


@dataclass(slots=True)
class Ring:
    """1 Hz values of one card between two reads of the `gpu` probe."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Keep the numeric cells of `row`; at most 600 per metric (ten minutes at 1 Hz)."""
        for name, cell in row.items():
            if isinstance(cell, int | float):
                kept = self.values.setdefault(name, [])
                kept.append(float(cell))
                del kept[:-600]

    def drain(self) -> dict[str, Value]:
        """Mean under the bare name, `_min` and `_p10` beside it, of what was added since the last drain."""
        row: dict[str, Value] = {}
        for name, values in self.values.items():
            if values:
                ordered = sorted(values)
                row[name] = sum(ordered) / len(ordered)
                row[f"{name}_min"] = ordered[0]
                row[f"{name}_p10"] = ordered[int(0.1 * (len(ordered) - 1))]
        self.values = {}
        return row


@dataclass(frozen=True, slots=True)
class Item:
    """One thing of the inventory: an entity (`node:`, `gpu:<UUID>`) and its attributes as text."""

    entity: str
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Process:
    """An entry of a driver's list of processes that hold a card.

    Attributes:
        pid: As the driver says it.
        pci: The card.
        mem_used_bytes: What it holds there; None = unknown.
        suspect: Why the entry cannot be as it says: `no_such_pid`, `memory`; empty when it can. The card is
            in use all the same.
    """

    pid: int
    pci: str
    mem_used_bytes: int | None
    suspect: str = ""


Check = Callable[[], None]
"""What a bench calls at least every tenth of a second; it raises when somebody else's turn has come."""


def go_on() -> None:
    """The check of a run that nobody interrupts."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench measured, or why it could not.

    Attributes:
        status: ok, preempted, contaminated, skipped, hung, failed or unsupported.
        value: In `unit`; None unless ok.
        reason: One line when not ok.
        samples: The repeats that `value` is the median of.
        seconds: Time the run took.
        gpu_seconds: Time the card was kept from others.
        convention: Where it was not measured by the bench's usual one: another series.
        link: What lies between the two cards of a pair: nvlink or pcie.
    """

    status: str
    value: float | None
    unit: str
    reason: str = ""
    samples: tuple[float, ...] = ()
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    convention: str = ""
    link: str = ""


class Gpu(Protocol):
    """One card, located by PCI address and identified by UUID. Kept across reads within one epoch."""

    @property
    def pci(self) -> str:
        """`dddd:bb:dd.f`, lower case."""

    @property
    def uuid(self) -> str:
        """`GPU-...`; known from the first successful read on, also when the card is lost later."""

    @property
    def index(self) -> int:
        """The driver's number today. An attribute, never an identity."""

    @property
    def ring(self) -> Ring:
        """1 Hz values since the last read of the `gpu` probe."""

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes: uuid, serial, pci, model, index, vbios, part_number, limits, ...

        Raises:
            Lost, Hung: This card does not answer.
        """

    def read(self, group: str) -> Row:
        """The metrics of one group: "ring" (util_pct, sm_clock_mhz, power_w) or a probe's name.

        Raises:
            Lost, Hung: This card does not answer.
        """

    def links(self) -> Sequence[Row] | Null:
        """One row per link to other cards (NVLink), in order of their numbers: columns of probe "nvlink".

        Empty where the card has none; a Null where nothing can be said of them now.

        Raises:
            Lost, Hung: This card does not answer.
        """


def link_between(mine: Sequence[Row] | Null, theirs: Sequence[Row] | Null, peer: str) -> str:
    """What a card's copies to the card at `peer` go over: nvlink or pcie.

    Args:
        mine: Its links, as `Gpu.links` has them.
        theirs: Those of the other.
        peer: PCI address of the other.
    """
    ends = [[] if isinstance(one, Null) else list(one) for one in (mine, theirs)]
    direct = any(row.get("remote_pci") == peer for row in ends[0])
    switched = all(any(row.get("remote_kind") == "switch" for row in rows) for rows in ends)
    return "nvlink" if direct or switched else "pcie"


class Host(Protocol):
    """The machine an agent runs on."""

    @property
    def epoch(self) -> int:
        """Counts the driver's (re-)initialisations; cumulative counters start anew with it."""

    @property
    def boot_id(self) -> str:
        """Of the running boot."""

    def node(self) -> Item:
        """The host itself: entity `node:`; hostname, machine_id, boot_id, kernel, driver, cpu, memory, ...

        `driver` says in words what there is, e.g. "amdgpu 6.7.0" or "NVIDIA driver not loaded".
        """

    def read(self, group: str) -> Row:
        """Host-wide metrics of one group, e.g. "host"."""

    def rows(self, group: str) -> Iterable[Row]:
        """Things of the host of which there are several, one row each: "port", "edac", "disk", "mount", ...

        A group is the name of its probe; one that this driver does not know has no rows.
        """

    def gpus(self) -> Sequence[Gpu]:
        """Every card the driver knows, lost ones too; empty on a host without cards.

        Raises:
            DriverGone: Cards are on the bus but no driver answers.
        """

    def pci_devices(self) -> Iterable[Row]:
        """GPUs, NVSwitches and HCAs on the bus by sysfs, independent of any driver."""

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`, and the next cursor; "" = from now on."""

    def processes(self) -> Sequence[Process]:
        """Processes that hold a card."""

    def process(self, pid: int) -> Row:
        """Who a process belongs to: the columns of probe `job` that are not about a card."""

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """Run a bench that only this driver can (h2d, ...); `unsupported` where it cannot.

        What `check` raises ends it, and everything it took of the card is given back.
        """
