"""The kernel log of a host that does not exist: the lines its faults would leave, for the real reader.

Which lines there are, and when, follows from the scenario alone, so that any process reads the same log.
"""

from collections.abc import Callable, Iterator

from gpufleet.event import Event
from gpufleet_agent.drivers import cards
from gpufleet_agent.drivers.kmsg import KernelLog
from gpufleet_agent.drivers.simulated_storage import log_lines
from gpufleet_agent.drivers.timeline import NodePhase, Timeline
from gpufleet_agent.kernel_log import Now, Record, State
from gpufleet_agent.probe import mono_us, wall_us
from gpufleet_agent.scenario import Fault, Scenario

DRIVER_LINE = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build"

_TEXTS = {
    13: "pid=48211, name=python3, Graphics Exception: ESR 0x504730=0xc0e0009",
    31: "pid=48211, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2"
    " faulted @ 0x7f31_5c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "pid=48211, name=python3, Ch 00000008",
    48: "pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error detected"
    " physical address 0x1c6f0e40 partition 3, subpartition 1",
    63: "pid='<unknown>', name=<unknown>, Row Remapper: New row (0x00000001c6f0e400) marked for remapping,"
    " reset gpu to activate.",
    74: "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 4"
    "(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    94: "pid=48211, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
    95: "pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    119: "pid=48211, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP!"
    " Expected function 76 (GSP_RM_CONTROL) (0x20802068 0x4).",
}
"""What the driver writes behind a number when a scenario does not say."""


def script(scenario: Scenario, node: str, host: Timeline[NodePhase]) -> tuple[tuple[float, str], ...]:
    """Every line of one host, as (seconds since the scenario's start, text), oldest first."""
    lines: list[tuple[float, str]] = []
    model = scenario.model(node)
    for before, phase in zip(host.phases, host.phases[1:], strict=False):
        if phase.epoch != before.epoch and not phase.gone:
            lines.append((phase.start, DRIVER_LINE))
    for fault in scenario.faults(node):
        lines += log_lines(fault)
    for slot in range(scenario.gpu_count(node)):
        faults = scenario.faults(node, slot)
        for fault in faults:
            earlier = [one for one in faults if one.kind == "board_swap"]
            swapped = sum(when <= fault.at for one in earlier for when in (one.at, one.end))
            board = cards.board(scenario.fleet.seed, node, slot, swapped, model)
            lines += [(fault.at, text) for text in _said(fault, board.pci)]
    return tuple(sorted(lines, key=lambda line: line[0]))


def _said(fault: Fault, pci: str) -> list[str]:
    """What the driver writes when a fault begins."""
    if fault.kind == "card_lost" and fault.param("bus") != "ok":
        # the number, and the same in words, as recent drivers have it
        return [_xid(pci, 79, ""), f"NVRM: GPU {pci}: GPU has fallen off the bus."]
    if fault.kind == "xid":
        return [_xid(pci, int(fault.number("code")), str(fault.param("text")))]
    return []


def _xid(pci: str, code: int, text: str) -> str:
    said = text or _TEXTS.get(code, "pid='<unknown>', name=<unknown>, simulated")
    return f"NVRM: Xid (PCI:{pci.rpartition('.')[0]}): {code}, {said}"


class _Script:
    """The lines of the running boot that were written by now, after the state's position."""

    at_end = True

    def __init__(self, lines: Callable[[], list[tuple[float, str]]], state: State) -> None:
        self._lines = lines
        self._state = state

    def records(self) -> Iterator[Record | None]:
        for number, (up_s, text) in enumerate(self._lines()):
            if number > self._state.seq:
                self._state.seq = number
                yield Record(number, int(up_s * 1e6), text)

    def take_lost(self) -> int:
        return 0

    def take_moved(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


class SimulatedLog:
    """The production reader over a script.

    Args:
        lines: See `script`.
        host: Boots of the host.
        now: Seconds since the scenario's start.
        boot_id: Of the running boot.
        uuid_of: UUID of the card at an address.
    """

    def __init__(
        self,
        lines: tuple[tuple[float, str], ...],
        host: Timeline[NodePhase],
        now: Callable[[], float],
        boot_id: Callable[[], str],
        uuid_of: Callable[[str], str],
    ) -> None:
        self._lines = lines
        self._host = host
        self._now = now
        self._boot_id = boot_id
        self._read_boot = ""
        self._log = KernelLog(uuid_of=uuid_of, clock=self._clock, boot_id=boot_id, source=self._open)

    def read(self, cursor: str) -> tuple[list[Event], str]:
        """Events after `cursor`, and the next one; see `KernelLog.read`."""
        boot = self._boot_id()
        if boot != self._read_boot:  # unlike a real process, this one outlives its host's boots
            self._log.close()
            self._read_boot = boot
        events, cursor = self._log.read(cursor)
        return list(events), cursor

    def _open(self, state: State) -> _Script:
        return _Script(self._written, state)

    def _written(self) -> list[tuple[float, str]]:
        now = self._now()
        booted = self._host.at(now).booted_at
        return [(at - booted, text) for at, text in self._lines if booted <= at <= now]

    def _clock(self) -> Now:
        now = self._now()
        return Now(wall_us(), mono_us(), int((now - self._host.at(now).booted_at) * 1e6))
