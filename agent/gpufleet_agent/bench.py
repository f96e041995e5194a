"""The process that runs one bench and ends: `python -m gpufleet_agent.bench SETTINGS`.

One bench at a time per host: the process holds a lock file while it runs. It runs on nothing that the gate
says is somebody's, and yields within a second to a job or to SIGTERM; what it took of a card goes back first.
Its results go up its standard output as one sweep of table `bench`.
"""

import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from statistics import median

import msgspec

from gpufleet import log as logs
from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent import handover, lease, pipe
from gpufleet_agent.benches import BENCHES, METRICS, TOOLS
from gpufleet_agent.budget import ANY
from gpufleet_agent.drivers import BenchResult, DriverError, DriverGone, Gpu
from gpufleet_agent.gate import Gate, Lock, Preempted, Rules, Stop, TooLong, host_load
from gpufleet_agent.guard import GuardedHost, HostSettings, open_guarded
from gpufleet_agent.measure import Bench, Place, ends, params_hash, path
from gpufleet_agent.probe import Sweep, check_row, mono_us, wall_us
from gpufleet_agent.progress import SharedProgress
from gpufleet_agent.tool import end_at_once

log = logging.getLogger(__name__)

TOLD = "told to stop"

_YIELD_S = 0.7
"""A run that has not ended so long after SIGTERM is inside a driver call: its process ends all the same."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All the process is told at its start, as JSON.

    Attributes:
        bench: Its name; the order of `lease.NAME` is in the shared memory, for it holds a secret.
        host: How to open the host.
        state_dir: Where a bench may keep a file.
        lock: Path of the lock file.
        entity: The one entity to run on; empty = all.
        fresh: Entities that need no run now.
        left_s: Card time that entities may still have this hour, as `Budget.left_s`; without any, all of it.
        rules: What is free.
        lease: Of the collector; empty when scheduled.
        skip: Cards not to touch.
        wait_s: So long whoever has the lock may take to make way; only in a process's main thread.
        force: Run also on a busy host: a person asked for it.
        progress_fd: Descriptor of the shared memory; -1 = nobody watches.
        command: The tool that a bench is to run, with its arguments; empty = the bench's own.
        deadline_s: So long a tool may take.
        unit: Socket of the unit that benches run in; empty, or nobody there = here.
    """

    bench: str
    host: HostSettings
    state_dir: str
    lock: str
    entity: str = ""
    fresh: list[str] = []
    left_s: dict[str, float] = {}
    rules: Rules = Rules()
    lease: str = ""
    skip: list[pipe.Skip] = []
    wait_s: float = 0.0
    force: bool = False
    progress_fd: int = -1
    command: list[str] = []
    deadline_s: float = 60.0
    unit: str = ""


def run_bench(
    settings: Settings,
    progress: SharedProgress | None = None,
    stop: Stop | None = None,
    leased: lease.Tcp | None = None,
) -> Sweep:
    """Run one bench on everything it is meant for. Never raises: what goes wrong is a row that says so.

    `leased` is the bench where that is one with another host.
    """
    sweep = Sweep("bench", wall_us(), mono_us(), 0.0, "", [], [])
    began = time.perf_counter()
    bench: Bench = leased or BENCHES[settings.bench]
    try:
        lock, no_lock = None, ""
        try:
            lock = Lock.take(settings.lock, settings.wait_s)
        except OSError as error:  # says nothing about any card
            no_lock = f"the lock {settings.lock} cannot be taken: {error.strerror}"
        try:
            rows = _run_on_all(settings, bench, progress, lock, no_lock, stop or Stop())
        finally:
            if lock is not None:
                lock.release()
    except DriverError as error:
        sweep.error = error.code
        rows = []
    except Exception as error:
        log.warning("bench %s: %s: %s", settings.bench, type(error).__name__, error)
        sweep.error = "failed"
        rows = [_row(settings, bench, "node:", _not_run("failed", f"{type(error).__name__}: {error}"))]
    for row in rows:
        cells, reasons = check_row(METRICS, row | (leased.pair if leased else {}))
        sweep.rows.append(cells)
        sweep.reasons.append(reasons)
    sweep.seconds = time.perf_counter() - began
    return sweep


def _run_on_all(
    settings: Settings,
    bench: Bench,
    progress: SharedProgress | None,
    lock: Lock | None,
    no_lock: str,
    stop: Stop,
) -> list[dict[str, Cell]]:
    host = open_guarded(settings.host, progress, settings.skip)
    gate = Gate(
        host, settings.rules, lock, stop, asked=settings.force, no_lock=no_lock,
        allowance_s=bench.COST_S or math.inf,
    )  # fmt: skip
    if bench.ON == "host":
        return _run_on_host(settings, bench, host, gate)
    # by the hour, so that a fleet measures the same pairs at a time and they can be compared
    turn = int(time.time() // bench.EVERY)
    found = ends(bench.ON, host.gpus(), settings.entity, turn)
    found = [(gpu, peer) for gpu, peer in found if f"gpu:{gpu.uuid}" not in settings.fresh]
    cards = list({card.pci: card for pair in found for card in pair if card is not None}.values())
    if settings.host.driver == "simulated":
        # a simulated card has no job that could suffer, and a demonstration is there to show its bench
        shut = dict.fromkeys((gpu.pci for gpu in cards), gate.locked_out())
    else:
        shut = gate.before(cards)
    rows: list[dict[str, Cell]] = []
    left_s = dict(settings.left_s)
    for gpu, peer in found:
        place = Place(host, gpu, settings.state_dir, gate.check, peer)
        why = _shut(shut, place) or _spent(settings, bench, place, left_s)
        row = _run_on_cards(settings, bench, place, gate, why)
        for card in place.kept:
            entity = f"gpu:{card.uuid}"
            left_s[entity] = _left(left_s, entity, settings.rules.gpu_s_per_hour) - number(row["gpu_seconds"])
        rows.append(row)
    return rows


def _shut(shut: Mapping[str, str], place: Place) -> str:
    """Why the gate is shut for a run; of a pair, both cards have to be free."""
    assert place.gpu is not None
    why = shut.get(place.gpu.pci, "")
    if why or place.peer is None:
        return why
    why = shut.get(place.peer.pci, "")
    return why and f"{place.peer.pci}: {why}"


def _run_on_host(settings: Settings, bench: Bench, host: GuardedHost, gate: Gate) -> list[dict[str, Cell]]:
    """Of the host itself: what a job on any of its cards would disturb, and what would disturb the job."""
    tool = settings.bench in TOOLS
    if "node:" in settings.fresh or (settings.entity.startswith("gpu:") and not tool):
        return []
    if tool and settings.host.driver == "simulated":
        why = "a simulated host has no tools"
        return [_row(settings, bench, "node:", _not_run("unsupported", why))]
    try:
        cards = [] if settings.host.driver == "simulated" else list(host.gpus())
    except DriverGone as error:
        if error.code in ("hung", "released", "starting", "no_permission"):
            why = f"no card can be seen: {error.code}"
            return measure(settings, bench, Place(None, None, ""), "node:", why)
        cards = []  # nobody can use them
    load = "" if settings.force else host_load(settings.rules)
    why = gate.before_host(cards, load) or gate.enter(cards)
    named = {card.pci: f"gpu:{card.uuid}" for card in cards}
    place = Place(
        None,
        None,
        settings.state_dir,
        gate.check,
        cards=named,
        command=settings.command,
        deadline_s=settings.deadline_s,
    )
    rows = measure(settings, bench, place, "node:", why)
    disturbed = gate.after_host(cards) if any(row["status"] == "ok" for row in rows) else ""
    return [_checked(row, lambda: disturbed) for row in rows]


def _run_on_cards(settings: Settings, bench: Bench, place: Place, gate: Gate, why: str) -> dict[str, Cell]:
    gpu, host = place.gpu, place.host
    assert gpu is not None
    assert isinstance(host, GuardedHost)
    watched = () if settings.host.driver == "simulated" else place.kept
    why = why or gate.enter(watched)
    (row,) = measure(settings, bench, place, f"gpu:{gpu.uuid}", why)
    if row["status"] != "skipped":
        row = after(host, gpu) | row  # what lies between two cards is known already
    return _checked(row, lambda: gate.after(watched))


def _checked(row: dict[str, Cell], disturbed: Callable[[], str]) -> dict[str, Cell]:
    """The row, without its value when the run may have been disturbed."""
    why = disturbed() if row["status"] == "ok" else ""
    if not why:
        return row
    nothing = Null(Reason.NOT_READ, "contaminated")
    return row | {"status": "contaminated", "reason": why, "value": nothing, "spread": Null(Reason.NOT_READ)}


def _spent(settings: Settings, bench: Bench, place: Place, left_s: Mapping[str, float]) -> str:
    most = settings.rules.gpu_s_per_hour
    left = min(_left(left_s, f"gpu:{card.uuid}", most) for card in place.kept)
    if settings.force or left >= bench.COST_S:
        return ""
    return f"budget: {max(0.0, left):.1f} of {most:g} s per hour are left, and it may take {bench.COST_S:g}"


def _left(left_s: Mapping[str, float], entity: str, most_s: float) -> float:
    return left_s.get(entity, left_s.get(ANY, most_s))


def number(cell: Cell) -> float:
    """A number of a row, 0 for none."""
    return float(cell) if isinstance(cell, int | float) else 0.0


def measure(
    settings: Settings, bench: Bench, place: Place, entity: str, why_not: str
) -> list[dict[str, Cell]]:
    """The rows of one run: one of the entity, or those of its parts. `why_not` says why it was not run."""
    peer: dict[str, Cell] = {"peer": f"gpu:{place.peer.uuid}"} if place.peer is not None else {}
    if why_not:
        return [_row(settings, bench, entity, _not_run("skipped", why_not)) | peer]
    began = time.perf_counter()
    try:
        found = bench.run(place, bench.PARAMS)
    except (DriverError, Preempted, TooLong) as error:
        seconds = time.perf_counter() - began
        kept = 0.0 if bench.ON == "host" else seconds
        status, why = "preempted" if isinstance(error, Preempted) else "failed", str(error)
        if isinstance(error, DriverError):
            status, why = "hung" if error.code == "hung" else "failed", f"{error.code}: {error}"
        result = BenchResult(status, None, "", why, (), seconds, kept)
        return [_row(settings, bench, entity, result) | peer]
    if isinstance(found, tuple):
        result, convention = found
        row = _row(settings, bench, entity, result) | peer | {"convention": convention}
        if result.link and place.gpu is not None and place.peer is not None:
            row["link"] = path(result.link, place.gpu.pci, place.peer.pci)
        return [row]
    return [
        _row(settings, bench, part.entity, part.result)
        | {
            "convention": part.convention,
            "version": f"{bench.VERSION}-{part.version}" if part.version else bench.VERSION,
        }
        for part in found
    ]


def _row(settings: Settings, bench: Bench, entity: str, result: BenchResult) -> dict[str, Cell]:
    value = result.value
    ok = result.status == "ok" and value is not None
    spread: Cell = Null(Reason.NOT_READ)
    if ok and value and len(result.samples) > 1:
        middle = median(result.samples)
        spread = median(abs(sample - middle) for sample in result.samples) / middle if middle else spread
    return {
        "entity": entity,
        "peer": "",
        "bench": settings.bench,
        "version": bench.VERSION,
        "convention": bench.CONVENTION,
        "params_hash": params_hash(bench.PARAMS, settings.command),
        "value": value if ok and value is not None else Null(Reason.NOT_READ, result.status),
        "unit": result.unit,
        "status": result.status,
        "reason": result.reason,
        "repeats": len(result.samples),
        "spread": spread,
        "seconds": result.seconds,
        "gpu_seconds": result.gpu_seconds,
        "lease": settings.lease,
    }


def _not_run(status: str, why: str) -> BenchResult:
    return BenchResult(status, None, "", why)


def after(host: GuardedHost, gpu: Gpu) -> dict[str, Cell]:
    """The card right after the run."""
    driver = host.node().attributes.get("driver_version")
    row: dict[str, Cell] = {"driver": driver} if driver else {}
    try:
        read = {**gpu.read("gpu"), **gpu.read("ring")}
    except DriverError:
        return row
    names = ("temperature_c", "power_w", "sm_clock_mhz", "clock_reasons")
    row |= {name: read[name] for name in names if name in read}
    gen, width = (_most(read, name) for name in ("pcie_gen", "pcie_width"))
    if gen and width:
        row["link"] = f"pcie{gen}x{width}"
    return row


def _most(read: Row, name: str) -> int:
    """What card and slot can do, or do now where nobody says that; 0 = unknown.

    It names the series of results, which must not change when a link trains down or an idle card slows it.
    """
    said = (read.get(name), read.get(f"{name}_max"))
    return max((cell for cell in said if isinstance(cell, int) and not isinstance(cell, bool)), default=0)


class Yielding:
    """Ends this process within a second of SIGTERM, also when a driver call does not return."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # the number is written by the signal itself, while Python's own handler waits for the driver call
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="yield", daemon=True).start()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while True:
            poll.poll()
            if signal.SIGTERM in os.read(self._woken, 64):
                break
        self._stop.reason = TOLD
        time.sleep(_YIELD_S)
        end_at_once()
        os._exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the bench that argv[1] describes, or have its unit run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    passed = (0, 1, settings.progress_fd) if settings.progress_fd >= 0 else (0, 1)
    connection = handover.connect(settings.unit)
    if connection is None:
        _run_here(settings)
    else:
        pipe.end_with_parent(0)
        sys.exit(0 if handover.give(connection, sys.argv[1].encode(), passed) else 1)


def main_of_unit() -> None:
    """Run the bench that the connection on standard input hands over: systemd starts this for each."""
    logs.setup()
    connection, data, passed = handover.take(0)
    settings = msgspec.json.decode(data, type=Settings)
    os.dup2(passed[0], 0)
    os.dup2(passed[1], 1)
    pipe.end_with_parent(connection.fileno(), end_at_once)
    _run_here(msgspec.structs.replace(settings, progress_fd=passed[2] if len(passed) > 2 else -1))
    handover.done(connection)


def _run_here(settings: Settings) -> None:
    stop = Stop()
    Yielding(stop)
    pipe.end_with_parent(0, end_at_once)
    out = pipe.claim_stdout()
    leased = None
    if settings.bench == lease.NAME:
        order = lease.take(settings.progress_fd)
        leased = lease.Tcp(order, lambda address: pipe.send(out, pipe.Listening(address)))
    progress = SharedProgress(settings.progress_fd) if settings.progress_fd >= 0 else None
    pipe.send(out, run_bench(settings, progress, stop, leased))


if __name__ == "__main__":
    main()
