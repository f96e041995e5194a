"""The process that runs one bench and ends: `python -m gpufleet_agent.bench SETTINGS`.

One bench at a time per host: the process holds a lock file while it runs. Its results go up its standard
output as one sweep of table `bench`.
"""

import errno
import fcntl
import logging
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

import msgspec

from gpufleet import log as logs
from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent import pipe
from gpufleet_agent.benches import BENCHES, METRICS
from gpufleet_agent.drivers import BenchResult, DriverError, Gpu
from gpufleet_agent.guard import GuardedHost, HostSettings, open_guarded
from gpufleet_agent.measure import Bench, Place, params_hash
from gpufleet_agent.probe import Sweep, check_row, mono_us, wall_us
from gpufleet_agent.progress import SharedProgress

log = logging.getLogger(__name__)

BUSY_LOAD = 0.5
"""Host benches are skipped above this load per core: they would disturb, and measure the disturbance."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All the process is told at its start, as JSON.

    Attributes:
        bench: Its name.
        host: How to open the host.
        state_dir: Where a bench may keep a file.
        lock: Path of the lock file.
        entity: The one entity to run on; empty = all.
        lease: Of the collector; empty when scheduled.
        skip: Cards not to touch.
        force: Run also on a busy host: a person asked for it.
        progress_fd: Descriptor of the shared memory; -1 = nobody watches.
    """

    bench: str
    host: HostSettings
    state_dir: str
    lock: str
    entity: str = ""
    lease: str = ""
    skip: list[pipe.Skip] = []
    force: bool = False
    progress_fd: int = -1


def run_bench(settings: Settings, progress: SharedProgress | None = None) -> Sweep:
    """Run one bench on everything it is meant for. Never raises: what goes wrong is a row that says so."""
    sweep = Sweep("bench", wall_us(), mono_us(), 0.0, "", [], [])
    began = time.perf_counter()
    bench = BENCHES[settings.bench]
    try:
        held = _take_lock(settings.lock)
        try:
            rows = _run_on_all(settings, bench, progress, held is None)
        finally:
            if held is not None:
                os.close(held)
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
    settings: Settings, bench: Bench, progress: SharedProgress | None, locked_out: bool
) -> list[dict[str, Cell]]:
    if bench.ON == "host":
        if settings.entity not in ("", "node:"):
            return []
        why = "another bench runs" if locked_out else _too_busy(settings)
        return [measure(settings, bench, Place(None, None, settings.state_dir), "node:", why)]
    host = open_guarded(settings.host, progress, settings.skip)
    rows = []
    for gpu in host.gpus():
        entity = f"gpu:{gpu.uuid}"
        if settings.entity in ("", entity):
            why = "another bench runs" if locked_out else _card_busy(settings, gpu)
            place = Place(host, gpu, settings.state_dir)
            rows.append(measure(settings, bench, place, entity, why) | after(host, gpu))
    return rows


def measure(settings: Settings, bench: Bench, place: Place, entity: str, why_not: str) -> dict[str, Cell]:
    """The row of one run on one entity; `why_not` says why it was not run."""
    if why_not:
        return _row(settings, bench, entity, _not_run("skipped", why_not))
    try:
        result, convention = bench.run(place, bench.PARAMS)
    except DriverError as error:
        status = "hung" if error.code == "hung" else "failed"
        return _row(settings, bench, entity, _not_run(status, f"{error.code}: {error}"))
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
    gen, width = read.get("pcie_gen"), read.get("pcie_width")
    if isinstance(gen, int) and isinstance(width, int):
        row["link"] = f"pcie{gen}x{width}"
    return row


def _too_busy(settings: Settings) -> str:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if settings.force or load <= BUSY_LOAD * cores:
        return ""
    return f"host is busy: load {load:.1f} on {cores} cores"


def _card_busy(settings: Settings, gpu: Gpu) -> str:
    # A simulated card has no job that could suffer, and its bench is what a demonstration is there to show.
    if settings.force or settings.host.driver == "simulated":
        return ""
    try:
        util = gpu.read("ring").get("util_pct")
    except DriverError:
        return ""  # the bench itself will say what is wrong
    return f"card is busy: {util:g} %" if isinstance(util, int | float) and util > 0 else ""


def _take_lock(path: str) -> int | None:
    """A descriptor that holds the lock; None when another bench has it.

    Raises:
        OSError: The lock file cannot be opened.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # to be read is enough for a lock, and a person's run must not shut the agent out of it
    lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return lock


def main() -> None:
    """Run the bench that argv[1] describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    pipe.end_with_parent(0)
    out = pipe.claim_stdout()
    progress = SharedProgress(settings.progress_fd) if settings.progress_fd >= 0 else None
    pipe.send(out, run_bench(settings, progress))


if __name__ == "__main__":
    main()
