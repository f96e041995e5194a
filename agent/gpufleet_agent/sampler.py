"""The sampler, the one process that talks to drivers: `python -m gpufleet_agent.sampler SETTINGS`.

Runs every probe at its own interval on the monotonic clock and hands what it read up its standard output.
It says in shared memory what it is about to do (`progress`), takes commands from its standard input, and
ends when that closes, also in the middle of a driver call.
"""

import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from gpufleet import log as logs
from gpufleet.metric import Value
from gpufleet_agent import pipe
from gpufleet_agent.drivers import DriverError, Host, Item
from gpufleet_agent.drivers.kmsg import FROM_BOOT
from gpufleet_agent.guard import GuardedHost, HostSettings, open_guarded
from gpufleet_agent.probe import Probe, Sweep, run_probe, wall_us
from gpufleet_agent.probes import PROBES, nvlink
from gpufleet_agent.progress import SharedProgress, read_note

log = logging.getLogger(__name__)


CARD_PROBES = frozenset({"gpu", "gpu_health", "nvlink"})
"""Probes that ask the driver about cards; what hangs in them is left out card by card."""

KERNEL_LOG = "probe kernel_log"
"""Phase of the loop that reads the kernel log; named like a probe, for it is left out alone when it hangs."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All the sampler is told at its start, as JSON.

    Attributes:
        host: How to open the host.
        probes: Probe -> seconds between two runs.
        skip: Cards not to touch.
        progress_fd: Descriptor of the shared memory; -1 = nobody watches.
        once: Run each probe once and end.
        only: The one card to show to the probes.
        kernel_log_s: Seconds between two looks at the kernel log, from the position that is noted behind the
            progress word (nothing noted = this boot's beginning); 0 = it is not read.
    """

    host: HostSettings
    probes: dict[str, float]
    skip: list[pipe.Skip] = []
    progress_fd: int = -1
    once: bool = False
    only: str | None = None
    kernel_log_s: float = 0.0


@dataclass(slots=True)
class Job:
    """Something the loop does every `every_s`, on a grid that began with the loop."""

    name: str
    every_s: float
    run: Callable[[], None]
    due: float


def next_due(due: float, every_s: float, now: float) -> float:
    """The first point of the grid after `now`: what was missed is skipped, not made up for."""
    return due + (max(0, math.floor((now - due) / every_s)) + 1) * every_s


class Sampler:
    """The loop.

    Args:
        settings: What to run.
        host: What to read.
        progress: Where to say what it is doing.
        out: Descriptor of the pipe to the supervisor.
        commands: Descriptor of the supervisor's commands; -1 = none.
        clock: Monotonic seconds.
        cursor: Where the kernel log is read from.
    """

    def __init__(
        self,
        settings: Settings,
        host: GuardedHost,
        progress: SharedProgress | None,
        out: int,
        commands: int,
        clock: Callable[[], float] = time.monotonic,
        cursor: str = FROM_BOOT,
    ) -> None:
        self._host = host
        self._progress = progress
        self._out = out
        self._commands = commands
        self._clock = clock
        self._cursor = cursor
        self._unread = b""
        self._doing = ""
        self._probes = frozenset(settings.probes)
        self._inventory_wanted = True
        self._found: dict[str, tuple[str, list[str]]] = {}
        self._said: set[str] = set()
        start = clock()
        self._jobs: list[Job] = []
        if settings.kernel_log_s > 0:
            self._jobs.append(Job(KERNEL_LOG, settings.kernel_log_s, self._read_kernel_log, start))
        for name, every_s in settings.probes.items():
            probe = PROBES[name]
            tick_s = getattr(probe, "TICK", 0.0)
            job = Job(f"probe {name}", every_s, self._prober(name, probe), start)
            if tick_s:
                self._jobs.append(Job(f"tick {name}", tick_s, self._ticker(name, probe, job), start))
            self._jobs.append(job)
        # what needs no driver goes first, so that it is out before a driver call can hang
        self._jobs.sort(key=lambda job: job.name.rpartition(" ")[2] in (*CARD_PROBES, "job"))

    def once(self) -> None:
        """Run every job once."""
        for job in self._jobs:
            self._do(job.name, job.run)
        self._do("inventory", self._inventory)

    def forever(self) -> None:
        """Run until the commands end."""
        while True:
            now = self._clock()
            for job in self._jobs:
                if job.due <= now:
                    self._do(job.name, job.run)
                    job.due = next_due(job.due, job.every_s, self._clock())
            self._do("inventory", self._inventory)
            if not self._wait(min((job.due for job in self._jobs), default=now + 3600.0)):
                return

    def _do(self, phase: str, run: Callable[[], None]) -> None:
        self._begin(phase)
        try:
            run()
        finally:
            if self._progress:
                self._progress.rest()

    def _wait(self, due: float) -> bool:
        """Sleep until `due` or a command; False when there will be none any more."""
        timeout = max(0.0, due - self._clock())
        if self._commands < 0:
            time.sleep(timeout)
            return True
        ready, _, _ = select.select([self._commands], [], [], timeout)
        if not ready:
            return True
        data = os.read(self._commands, 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(line)
        return bool(data)

    def _obey(self, line: bytes) -> None:
        try:
            command = msgspec.json.decode(line, type=pipe.Command)
        except msgspec.DecodeError as error:
            log.warning("command ignored: %s", error)
            return
        if command.inventory:
            self._inventory_wanted = True
        for job in self._jobs:
            if command.every_s > 0 and job.name == f"probe {command.probe}":
                job.every_s = command.every_s
                job.due = min(job.due, self._clock() + command.every_s)

    def _ticker(self, name: str, probe: Probe, job: Job) -> Callable[[], None]:
        tick: Callable[[Host], object] = getattr(probe, "tick")  # noqa: B009  an optional part of the protocol
        seen: list[object] = []

        def run() -> None:
            try:
                found = tick(self._host)
            except DriverError:
                return  # the probe's own run reports it
            except Exception as error:
                self._complain(f"tick {name}: {type(error).__name__}: {error}")
                return
            if seen not in ([], [found]):
                job.due = self._clock()
            seen[:] = [found]

        return run

    def _prober(self, name: str, probe: Probe) -> Callable[[], None]:
        def run() -> None:
            sweep = run_probe(name, probe, self._host, self._complain)
            self._send(sweep)
            if name in IDENTIFYING:
                self._look_for_changes(name, probe, sweep)

        return run

    def _read_kernel_log(self) -> None:
        """Hand up what is new. The position moves on here; it is stored above, together with the events."""
        try:
            events, cursor = self._host.kernel_log(self._cursor)
        except Exception as error:
            self._complain(f"kernel log: {type(error).__name__}: {error}")
            return
        if events or cursor != self._cursor:
            self._cursor = cursor
            self._send(pipe.KernelNews(list(events), cursor))

    def _look_for_changes(self, name: str, probe: Probe, sweep: Sweep) -> None:
        """Want the inventory when cards, their state or the driver's epoch changed."""
        keys = [at for at, metric in enumerate(probe.METRICS) if metric.name in IDENTIFYING[name]]
        found = (sweep.error, sorted({repr([row[key] for key in keys]) for row in sweep.rows}))
        self._inventory_wanted |= name in self._found and self._found[name] != found
        self._found[name] = found

    def _inventory(self) -> None:
        """Read it at the start, on demand and after a change; behind the probes, for it asks every card."""
        if self._inventory_wanted:
            self._inventory_wanted = False
            # without bus or ports if their probe does not run: it is left out where it hangs
            bus, ports = "pci" in self._probes, "port" in self._probes
            self._send(read_inventory(self._host, self._begin, self._complain, bus=bus, ports=ports))

    def _send(self, message: pipe.Message) -> None:
        if self._progress:
            self._progress.rest()  # a slow reader is not a slow driver
        pipe.send(self._out, message)
        self._begin(self._doing)

    def _begin(self, phase: str) -> None:
        self._doing = phase
        if self._progress:
            self._progress.begin(phase)

    def _complain(self, text: str) -> None:
        if text not in self._said and len(self._said) < 1000:
            self._said.add(text)
            log.warning("%s", text)


_CARD = frozenset({"gpu_uuid", "pci", "state", "driver_epoch", "device_id", "bound_driver"})
IDENTIFYING: Mapping[str, frozenset[str]] = {
    "gpu": _CARD,
    "pci": _CARD,
    "nvlink": _CARD | {"links_most"},
    "port": frozenset({"device", "port", "guid", "pci", "netdev", "firmware", "in_use", "rate_best_gbps"}),
    "disk": frozenset({"disk"}),
}
"""Probe -> columns of which a change makes the inventory be read again."""

_BUS_ATTRIBUTES = (
    "pci", "device_kind", "vendor_id", "device_id", "bound_driver", "gpu_uuid",
    "pcie_gen_max", "pcie_width_max", "numa_node", "parent", "path",
    "path_gen_possible", "path_width_possible", "pcie_gen_best", "pcie_width_best", "path_gen_best",
    "path_width_best",
)  # fmt: skip
_PORT_ATTRIBUTES = {
    "device": "device", "port": "port", "link_layer": "link_layer", "guid": "guid", "pci": "pci",
    "netdev": "netdev", "firmware": "firmware", "board": "board", "numa_node": "numa_node",
    "gpu_affinity": "gpu_affinity", "in_use": "in_use", "rate_best_gbps": "rate_gbps_active",
}  # fmt: skip
"""Cell of a port -> its name in the inventory."""


def read_inventory(
    host: GuardedHost,
    begin: Callable[[str], None] = lambda phase: None,
    complain: Callable[[str], None] = log.warning,
    *,
    bus: bool = True,
    ports: bool = True,
) -> pipe.Inventory:
    """Everything the host is made of. Without what does not answer it is marked incomplete.

    Args:
        host: What to read.
        begin: Told what is being read, so that a hang is put down to the right thing.
        complain: Told of errors of our own.
        bus: Whether to read what is on the bus.
        ports: Whether to read the network ports.
    """
    ts_us = wall_us()
    items: list[Item] = []
    complete = host.whole and bus
    parts: list[tuple[str, Callable[[], Iterable[Item | None]]]] = [
        ("inventory", lambda: [host.node()]),
        *([("probe pci", lambda: _bus(host))] if bus else []),
        *([("probe port", lambda: _ports(host))] if ports else []),
        *(("inventory", partial(_things, host, kind)) for kind in ("dimm", "disk", "mount")),
        ("inventory", lambda: _cards(host)),
    ]
    for phase, read in parts:
        begin(phase)
        try:
            for item in read():
                if item is None:
                    complete = False
                else:
                    items.append(item)
        except DriverError:
            complete = False
        except Exception as error:
            complete = False
            complain(f"inventory: {type(error).__name__}: {error}")
    return pipe.Inventory(ts_us, complete, items)


def _bus(host: GuardedHost) -> Iterator[Item]:
    """What a link can do is told as it was last seen: a device that sleeps or left does not say."""
    for row in host.pci_devices():
        cells = {key: row.get(f"{key}_seen", row.get(key)) for key in _BUS_ATTRIBUTES}
        found = {key: str(cell) for key, cell in cells.items() if isinstance(cell, str | int)}
        yield Item(f"pci:{found.get('pci', '')}", found)


def _ports(host: GuardedHost) -> Iterator[Item]:
    """One per port: what it is, and what it was at its best."""
    for row in host.rows("port"):
        cells = {name: row.get(cell) for cell, name in _PORT_ATTRIBUTES.items()}
        found = {name: _words(cell) for name, cell in cells.items() if isinstance(cell, str | int | float)}
        yield Item(f"port:{found['device']}/{found['port']}", {k: v for k, v in found.items() if v})


def _things(host: GuardedHost, kind: str) -> Iterator[Item]:
    for row in host.rows(f"{kind}_item"):
        found = {name: str(value) for name, value in row.items() if name != kind}
        yield Item(f"{kind}:{row[kind]}", found)


def _cards(host: GuardedHost) -> Iterator[Item | None]:
    """None for a card that does not say who it is; the others go on."""
    for gpu in host.gpus():
        try:
            attributes = dict(gpu.identity()) | dict(nvlink.attributes(host, gpu))
        except DriverError:
            yield None
        else:
            yield Item(f"gpu:{gpu.uuid}", attributes)


def _words(cell: Value) -> str:
    if isinstance(cell, bool):
        return "true" if cell else ""
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def main() -> None:
    """Be the sampler that argv[1] describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the supervisor's to handle
    logs.setup()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    pipe.end_with_parent(0)
    out = pipe.claim_stdout()
    note = read_note(settings.progress_fd) if settings.progress_fd >= 0 else b""
    progress = SharedProgress(settings.progress_fd) if settings.progress_fd >= 0 else None
    if progress:
        progress.begin("open")
    # one that runs once is there to wait for the driver
    aside = progress.aside() if progress and not settings.once else None
    host = open_guarded(settings.host, progress, settings.skip, settings.only, aside)
    sampler = Sampler(settings, host, progress, out, 0, cursor=note.decode() or FROM_BOOT)
    try:
        if settings.once:
            sampler.once()
        else:
            sampler.forever()
    except BrokenPipeError:
        pass  # the supervisor left, or has given us up


if __name__ == "__main__":
    main()
