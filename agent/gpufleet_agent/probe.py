"""What a probe is, and the one place that runs it: time it, check it, keep its trouble to itself."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from gpufleet.metric import Metric, Null, Reason, Row, Value
from gpufleet_agent.drivers import DriverError, Host


class Probe(Protocol):
    """A module with these three names.

    `tick(host)`, every `TICK` seconds, is optional. When it returns something else than the time before, the
    probe runs at once.
    """

    @property
    def EVERY(self) -> float:
        """Default interval, seconds."""

    @property
    def METRICS(self) -> tuple[Metric, ...]:
        """Its columns, keys first."""

    def read(self, host: Host, /) -> Iterable[Row]:
        """One row per entity."""


class Sweep(msgspec.Struct, array_like=True):
    """One run of one probe, as the sampler hands it to the supervisor.

    Attributes:
        probe: Its name.
        ts_us: Wall clock at the start, microseconds since the epoch, UTC.
        mono_us: CLOCK_BOOTTIME at the start, microseconds.
        seconds: How long it took.
        error: Empty when ok, else a short word; the rows read before it are kept.
        rows: Cells in the order of the probe's METRICS; None = NULL.
        reasons: Per row, one `Reason` per None, in order.
    """

    probe: str
    ts_us: int
    mono_us: int
    seconds: float
    error: str
    rows: list[list[Value | None]]
    reasons: list[bytes]


def wall_us() -> int:
    """The wall clock, microseconds since the epoch, UTC."""
    return time.time_ns() // 1000


def mono_us() -> int:
    """The clock that nobody sets, microseconds since boot, suspend included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def run_probe(name: str, probe: Probe, host: Host, log: Callable[[str], None]) -> Sweep:
    """Read `probe` once. Whatever it raises becomes `error`; it never raises itself."""
    sweep = Sweep(name, wall_us(), mono_us(), 0.0, "", [], [])
    started = time.perf_counter()
    try:
        for row in probe.read(host):
            cells, reasons = check_row(probe.METRICS, row)
            sweep.rows.append(cells)
            sweep.reasons.append(reasons)
    except DriverError as error:
        sweep.error = error.code
    except Exception as error:
        sweep.error = "failed"
        log(f"probe {name}: {type(error).__name__}: {error}")
    sweep.seconds = time.perf_counter() - started
    return sweep


def check_row(metrics: tuple[Metric, ...], row: Row) -> tuple[list[Value | None], bytes]:
    """The row's cells in order, checked; and one reason byte per NULL."""
    cells: list[Value | None] = []
    reasons = bytearray()
    for metric in metrics:
        cell = metric.check(row[metric.name]) if metric.name in row else _NOT_READ
        if isinstance(cell, Null):
            cells.append(None)
            reasons.append(cell.reason)
        else:
            cells.append(cell)
    return cells, bytes(reasons)


_NOT_READ = Null(Reason.NOT_READ)
