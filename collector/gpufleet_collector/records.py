"""Rows of the collector's own tables, as they are collected during a commit and written at its end."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
import numpy as np

from gpufleet_collector.capability import Change
from gpufleet_collector.decode import MAX_FAULTS, Fault
from gpufleet_collector.frame import Frame


@dataclass(slots=True)
class EventRow:
    """One row of `event`; the defaults are those of the collector's own events."""

    ts_us: int
    received_us: int
    node: str
    boot_id: str
    kind: str
    entity: str = "node:"
    code: str = ""
    count: int = 1
    message: str = ""
    detail: str | None = None
    mono_us: int | None = None


@dataclass(slots=True)
class LedgerRow:
    """One row of `ledger`: a batch that is being stored."""

    node: str
    spool_id: str
    number: int
    digest: str
    boot_id: str
    offset_us: int
    received_us: int
    lane: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Something of one batch (number 0: of a hello) that is not stored as data."""

    received_us: int
    node: str
    spool_id: str
    number: int
    fault: Fault


def write_events(write: duckdb.DuckDBPyConnection, events: Sequence[EventRow]) -> None:
    """Append to `event`."""
    if not events:
        return
    frame = Frame()
    frame.times("ts", np.array([event.ts_us for event in events], np.int64))
    frame.times("received_at", np.array([event.received_us for event in events], np.int64))
    frame.texts("node", [event.node for event in events])
    frame.texts("boot_id", [event.boot_id for event in events])
    frame.numbers(
        "mono_s",
        np.array([(event.mono_us or 0) / 1e6 for event in events], np.float64),
        np.array([event.mono_us is not None for event in events], np.bool_),
    )
    frame.texts("entity", [event.entity for event in events])
    frame.texts("kind", [event.kind for event in events])
    frame.texts("code", [event.code for event in events])
    frame.numbers("count", np.array([event.count for event in events], np.int64))
    frame.texts("message", [event.message for event in events])
    frame.json("detail", [event.detail for event in events])
    frame.insert(write, "live.event")


def write_intervals(write: duckdb.DuckDBPyConnection, intervals: Mapping[tuple[str, str], float]) -> None:
    """Append to `probe`: (node, probe) -> seconds."""
    if not intervals:
        return
    frame = Frame()
    frame.texts("node", [node for node, _ in intervals])
    frame.texts("probe", [probe for _, probe in intervals])
    frame.numbers("interval_s", np.array(list(intervals.values()), np.float64))
    frame.insert(write, "live.probe")


def write_ledger(write: duckdb.DuckDBPyConnection, rows: Sequence[LedgerRow]) -> None:
    """Append to `ledger`."""
    if not rows:
        return
    frame = Frame()
    frame.texts("node", [row.node for row in rows])
    frame.texts("spool_id", [row.spool_id for row in rows])
    frame.numbers("number", np.array([row.number for row in rows], np.uint64))
    frame.texts("digest", [row.digest for row in rows])
    frame.texts("boot_id", [row.boot_id for row in rows])
    frame.times("received_at", np.array([row.received_us for row in rows], np.int64))
    frame.numbers("offset_s", np.array([row.offset_us / 1e6 for row in rows], np.float64))
    frame.texts("lane", [_LANES.get(row.lane, "live") for row in rows])
    frame.numbers("rows", np.array([row.rows for row in rows], np.int64))
    frame.insert(write, "live.ledger")


_LANES = {1: "live", 2: "backfill"}


def write_faults(write: duckdb.DuckDBPyConnection, faults: Sequence[FaultRow]) -> None:
    """Append to `quarantine`: one row per kind of fault of a batch; what is too much is summed up in one."""
    rows = _capped(_merged(faults))
    if not rows:
        return
    frame = Frame()
    frame.times("received_at", np.array([row.received_us for row in rows], np.int64))
    frame.texts("node", [row.node for row in rows])
    frame.texts("spool_id", [row.spool_id for row in rows])
    frame.numbers("number", np.array([row.number for row in rows], np.uint64))
    frame.texts("probe", [row.fault.probe for row in rows])
    frame.texts("metric", [row.fault.metric for row in rows])
    frame.texts("reason", [row.fault.reason for row in rows])
    frame.numbers("cells", np.array([row.fault.cells for row in rows], np.int64))
    frame.texts("sample", [row.fault.sample[:200] for row in rows])
    frame.insert(write, "live.quarantine")


def _merged(faults: Sequence[FaultRow]) -> list[FaultRow]:
    merged: dict[tuple[str, str, int, str, str, str], FaultRow] = {}
    for row in faults:
        fault = row.fault
        key = (row.node, row.spool_id, row.number, fault.probe, fault.metric, fault.reason)
        if key in merged:
            fault = replace(merged[key].fault, cells=merged[key].fault.cells + fault.cells)
        merged[key] = replace(row, fault=fault)
    return list(merged.values())


def _capped(faults: Sequence[FaultRow]) -> list[FaultRow]:
    count: dict[tuple[str, str, int], int] = defaultdict(int)
    left: dict[tuple[str, str, int], FaultRow] = {}
    rows: list[FaultRow] = []
    for row in faults:
        key = (row.node, row.spool_id, row.number)
        count[key] += 1
        if count[key] <= MAX_FAULTS:
            rows.append(row)
        else:
            cells = row.fault.cells + (left[key].fault.cells if key in left else 0)
            left[key] = FaultRow(row.received_us, *key, Fault("", "", "more", cells))
    return rows + list(left.values())


def write_changes(write: duckdb.DuckDBPyConnection, changes: Sequence[tuple[int, Change]]) -> None:
    """Append to `capability`; each change with its time."""
    if not changes:
        return
    frame = Frame()
    frame.texts("node", [change.node for _, change in changes])
    frame.texts("entity", [change.entity for _, change in changes])
    frame.texts("probe", [change.probe for _, change in changes])
    frame.texts("metric", [change.metric for _, change in changes])
    frame.texts("reason", [change.reason for _, change in changes])
    frame.texts("code", [change.code for _, change in changes])
    frame.times("since", np.array([at for at, _ in changes], np.int64))
    frame.insert(write, "live.capability")
