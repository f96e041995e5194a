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
from collections.abc import Callable
from statistics import median

import msgspec

from gpufleet import log as logs
from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent import pipe
from gpufleet_agent.benches import BENCHES, METRICS
from gpufleet_agent.budget import ANY
from gpufleet_agent.drivers import BenchResult, DriverError, DriverGone, Gpu
from gpufleet_agent.gate import Gate, Lock, Preempted, Rules, Stop, TooLong, host_load
from gpufleet_agent.guard import GuardedHost, HostSettings, open_guarded
from gpufleet_agent.measure import Bench, Place, params_hash
from gpufleet_agent.probe import Sweep, check_row, mono_us, wall_us
from gpufleet_agent.progress import SharedProgress

log = logging.getLogger(__name__)

TOLD = "told to stop"

_YIELD_S = 0.7
"""A run that has not ended so long after SIGTERM is inside a driver call: its process ends all the same."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All the process is told at its start, as JSON.

    Attributes:
        bench: Its name.
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


def run_bench(settings: Settings, progress: SharedProgress | None = None, stop: Stop | None = None) -> Sweep:
    """Run one bench on everything it is meant for. Never raises: what goes wrong is a row that says so."""
    sweep = Sweep("bench", wall_us(), mono_us(), 0.0, "", [], [])
    began = time.perf_counter()
    bench = BENCHES[settings.bench]
    try:
        lock = Lock.take(settings.lock, settings.wait_s)
        try:
            rows = _run_on_all(settings, bench, progress, lock, stop or Stop())
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
        cells, reasons = check_row(METRICS, row)
        sweep.rows.append(cells)
        sweep.reasons.append(reasons)
    sweep.seconds = time.perf_counter() - began
    return sweep


def _run_on_all(
    settings: Settings, bench: Bench, progress: SharedProgress | None, lock: Lock | None, stop: Stop
) -> list[dict[str, Cell]]:
    host = open_guarded(settings.host, progress, settings.skip)
    gate = Gate(host, settings.rules, lock, stop, asked=settings.force, allowance_s=bench.COST_S or math.inf)
    if bench.ON == "host":
        return _run_on_host(settings, bench, host, gate)
    cards = [gpu for gpu in host.gpus() if settings.entity in ("", f"gpu:{gpu.uuid}")]
    cards = [gpu for gpu in cards if f"gpu:{gpu.uuid}" not in settings.fresh]
    if settings.host.driver == "simulated":
        # a simulated card has no job that could suffer, and a demonstration is there to show its bench
        shut = dict.fromkeys((gpu.pci for gpu in cards), gate.locked_out())
    else:
        shut = gate.before(cards)
    rows = []
    for gpu in cards:
        entity = f"gpu:{gpu.uuid}"
        why = shut.get(gpu.pci, "") or _spent(settings, bench, entity)
        rows.append(_run_on_card(settings, bench, Place(host, gpu, settings.state_dir), gate, why))
    return rows


def _run_on_host(settings: Settings, bench: Bench, host: GuardedHost, gate: Gate) -> list[dict[str, Cell]]:
    """Of the host itself: what a job on any of its cards would disturb, and what would disturb the job."""
    if settings.entity not in ("", "node:") or "node:" in settings.fresh:
        return []
    try:
        cards = [] if settings.host.driver == "simulated" else list(host.gpus())
    except DriverGone as error:
        if error.code in ("hung", "released", "starting", "no_permission"):
            why = f"no card can be seen: {error.code}"
            return [measure(settings, bench, Place(None, None, ""), "node:", why)]
        cards = []  # nobody can use them
    shut = gate.before(cards)
    why = gate.locked_out() or ("" if settings.force else host_load(settings.rules))
    why = why or next((f"card {pci}: {text}" for pci, text in shut.items()), "") or gate.enter(cards)
    place = Place(None, None, settings.state_dir, gate.check)
    row = measure(settings, bench, place, "node:", why)
    return [_checked(row, lambda: gate.after(cards))]


def _run_on_card(settings: Settings, bench: Bench, place: Place, gate: Gate, why: str) -> dict[str, Cell]:
    gpu, host = place.gpu, place.host
    assert gpu is not None
    assert isinstance(host, GuardedHost)
    watched = [] if settings.host.driver == "simulated" else [gpu]
    why = why or gate.enter(watched)
    row = measure(settings, bench, Place(host, gpu, place.state_dir, gate.check), f"gpu:{gpu.uuid}", why)
    if row["status"] != "skipped":
        row |= after(host, gpu)
    return _checked(row, lambda: gate.after(watched))


def _checked(row: dict[str, Cell], disturbed: Callable[[], str]) -> dict[str, Cell]:
    """The row, without its value when the run may have been disturbed."""
    why = disturbed() if row["status"] == "ok" else ""
    if not why:
        return row
    nothing = Null(Reason.NOT_READ, "contaminated")
    return row | {"status": "contaminated", "reason": why, "value": nothing, "spread": Null(Reason.NOT_READ)}


def _spent(settings: Settings, bench: Bench, entity: str) -> str:
    left = settings.left_s.get(entity, settings.left_s.get(ANY, settings.rules.gpu_s_per_hour))
    if settings.force or left >= bench.COST_S:
        return ""
    most = settings.rules.gpu_s_per_hour
    return f"budget: {left:.1f} of {most:g} s per hour are left, and it may take {bench.COST_S:g}"


def measure(settings: Settings, bench: Bench, place: Place, entity: str, why_not: str) -> dict[str, Cell]:
    """The row of one run on one entity; `why_not` says why it was not run."""
    if why_not:
        return _row(settings, bench, entity, _not_run("skipped", why_not))
    began = time.perf_counter()
    try:
        result, convention = bench.run(place, bench.PARAMS)
    except (DriverError, Preempted, TooLong) as error:
        seconds = time.perf_counter() - began
        kept = seconds if bench.ON == "gpu" else 0.0
        status, why = "preempted" if isinstance(error, Preempted) else "failed", str(error)
        if isinstance(error, DriverError):
            status, why = "hung" if error.code == "hung" else "failed", f"{error.code}: {error}"
        return _row(settings, bench, entity, BenchResult(status, None, "", why, (), seconds, kept))
    return _row(settings, bench, entity, result) | {"convention": convention}


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
        "params_hash": params_hash(bench.PARAMS),
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
        os._exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the bench that argv[1] describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    stop = Stop()
    Yielding(stop)
    pipe.end_with_parent(0)
    out = pipe.claim_stdout()
    progress = SharedProgress(settings.progress_fd) if settings.progress_fd >= 0 else None
    pipe.send(out, run_bench(settings, progress, stop))


if __name__ == "__main__":
    main()
