"""Readings become bytes: sweeps, events and inventory -> serialised `gpufleet.v1.Body`s for the spool.

Columns are packed by the standard library alone; the agent carries no NumPy. No body is too large for one
message, and `split` cuts one that a collector still found too large.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpufleet import WIRE_VERSION, __version__
from gpufleet.event import Event
from gpufleet.metric import Metric, Null, Reason, Type, Value
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import MAX_MESSAGE_BYTES, MAX_STRING_BYTES
from gpufleet_agent.drivers import Item
from gpufleet_agent.probe import Sweep, check_row

MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 1024
"""What a Body may weigh so that the message around it stays within `MAX_MESSAGE_BYTES`."""

STEP_US = 1_000_000
"""Rows whose clocks differ by more from those of the sealing were read before the wall clock was stepped."""

_WIDTH = {Type.F64: 8, Type.I64: 8, Type.U64: 8, Type.BOOL: 1, Type.STRING: 4}
_CODE = {Type.F64: "d", Type.I64: "q", Type.U64: "Q"}
_INDEX = "I" if array("I").itemsize == 4 else "L"
_I64 = 2**63 - 1


@dataclass(slots=True)
class _Group:
    """Rows of one probe that will travel as one `Rows`."""

    probe: str
    metrics: tuple[Metric, ...]
    clocks: list[tuple[int, int]] = field(default_factory=list)
    rows: list[list[Value | None]] = field(default_factory=list)
    reasons: list[bytes] = field(default_factory=list)


class BodyBuilder:
    """Collects what was read until it is sealed; then it is empty and collects anew.

    Example:
        builder = BodyBuilder(boot_id)
        builder.add_sweep(gpu.METRICS, sweep)
        for body in builder.seal(wall_us(), mono_us()):
            spool.put(body, event=False)
    """

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._groups: dict[str, _Group] = {}
        self._closed: list[_Group] = []
        self._events: list[Event] = []
        self._inventory: pb.Inventory | None = None

    @property
    def empty(self) -> bool:
        """Whether `seal` would give nothing."""
        return not (self._groups or self._closed or self._events or self._inventory is not None)

    @property
    def has_events(self) -> bool:
        """Whether an event waits: it is sealed at once and spooled with `event=True`."""
        return bool(self._events)

    def add_sweep(self, metrics: tuple[Metric, ...], sweep: Sweep) -> None:
        """Add the rows of one probe run; `metrics` are the columns its cells stand in."""
        if not sweep.rows:
            return
        group = self._groups.get(sweep.probe)
        if group is not None and group.metrics is not metrics and group.metrics != metrics:
            self._closed.append(group)
            group = None
        if group is None:
            group = self._groups[sweep.probe] = _Group(sweep.probe, metrics)
        group.rows += sweep.rows
        group.reasons += sweep.reasons[: len(sweep.rows)]
        group.reasons += [b""] * (len(group.rows) - len(group.reasons))
        group.clocks += [(sweep.ts_us, sweep.mono_us)] * len(sweep.rows)

    def add_event(self, event: Event) -> None:
        """Add one event."""
        self._events.append(event)

    def set_inventory(self, items: Sequence[Item], complete: bool, ts_us: int) -> None:
        """Send this inventory along; a later one replaces an earlier one not yet sealed."""
        self._inventory = inventory(items, complete, ts_us)

    def seal(self, wall_us: int, mono_us: int) -> list[bytes]:
        """Everything added so far as serialised bodies, events first; both clocks are of this instant."""
        packer = _Packer(self._boot_id, wall_us, mono_us)
        for event in self._events:
            packer.add_event(event)
        if self._inventory is not None:
            packer.add_inventory(self._inventory)
        for group in [*self._closed, *self._groups.values()]:
            packer.add_group(group)
        self._groups, self._closed, self._events, self._inventory = {}, [], [], None
        return packer.finish()


class _Packer:
    """Fills bodies up to their limit and begins the next one."""

    def __init__(self, boot_id: str, wall_us: int, mono_us: int) -> None:
        self._frame = pb.Body(boot_id=cut(boot_id), sealed_at_us=wall_us, sealed_mono_us=mono_us)
        self._body = self._new()
        self._size = self._frame.ByteSize()
        self._done: list[bytes] = []

    def add_event(self, event: Event) -> None:
        message = _event(event)
        self._room(message.ByteSize())
        self._body.events.append(message)

    def add_inventory(self, whole: pb.Inventory) -> None:
        for part in _inventory_parts(whole, self._limit):
            self._room(part.ByteSize())
            self._body.inventory.CopyFrom(part)
            if part is not whole:
                self._flush()  # one inventory per body

    def add_group(self, group: _Group) -> None:
        ts_us = [self._on_seal_clock(ts, mono) for ts, mono in group.clocks]
        width = sum(_WIDTH[metric.type] for metric in group.metrics) + 8
        step = max(1, self._limit * 3 // 4 // width)
        for start in range(0, len(ts_us), step):
            self._add_rows(group, ts_us, start, min(start + step, len(ts_us)))

    def finish(self) -> list[bytes]:
        self._flush()
        return self._done

    @property
    def _limit(self) -> int:
        return MAX_BODY_BYTES - self._frame.ByteSize() - 16

    def _add_rows(self, group: _Group, ts_us: list[int], start: int, stop: int) -> None:
        rows = _rows(group, ts_us, start, stop)
        size = rows.ByteSize()
        if size <= self._limit:
            self._room(size)
            self._body.rows.append(rows)
        elif stop - start == 1:
            self.add_event(
                parked(self._frame.sealed_at_us, self._frame.sealed_mono_us, size, probe=group.probe)
            )
        else:
            middle = (start + stop) // 2
            self._add_rows(group, ts_us, start, middle)
            self._add_rows(group, ts_us, middle, stop)

    def _on_seal_clock(self, ts_us: int, mono_us: int) -> int:
        """`ts_us`, or, if the wall clock was stepped since, the same instant on the clock of the sealing.

        The collector corrects a whole body by one offset; a row of before the step would be moved by it.
        """
        now = self._frame.sealed_at_us - self._frame.sealed_mono_us
        if abs((ts_us - mono_us) - now) <= STEP_US:
            return ts_us
        return max(-_I64, min(_I64, mono_us + now))

    def _room(self, size: int) -> None:
        size += 6  # tag and length of the part
        if self._size + size > MAX_BODY_BYTES:
            self._flush()
        self._size += size

    def _flush(self) -> None:
        body = self._body
        if body.rows or body.events or body.HasField("inventory"):
            self._done.append(body.SerializeToString())
            self._body = self._new()
            self._size = self._frame.ByteSize()

    def _new(self) -> pb.Body:
        body = pb.Body()
        body.CopyFrom(self._frame)
        return body


def cut(text: str, limit: int = MAX_STRING_BYTES) -> str:
    """`text` in at most `limit` bytes of UTF-8, cut between characters; what is no text becomes "?"."""
    if len(text) * 4 <= limit and text.isascii():
        return text
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def parked(ts_us: int, mono_us: int, size: int, *, probe: str = "", number: int = 0) -> Event:
    """The event that says that `size` bytes can never be sent and were put aside."""
    detail: dict[str, str | int] = {"size": size}
    if probe:
        detail["probe"] = probe
    if number:
        detail["number"] = number
    text = f"{size} bytes of {probe or 'a batch'} are too large for one message"
    return Event("batch_parked", "node:", ts_us, mono_us, "too_large", text, json.dumps(detail))


def inventory(items: Iterable[Item], complete: bool, ts_us: int) -> pb.Inventory:
    """The wire form of an inventory."""
    return pb.Inventory(
        ts_us=ts_us,
        complete=complete,
        items=[
            pb.Item(
                entity=cut(item.entity),
                attributes={cut(key): cut(value) for key, value in item.attributes.items()},
            )
            for item in items
        ],
    )


def probe_descriptors(probes: Mapping[str, tuple[float, tuple[Metric, ...]]]) -> list[pb.Probe]:
    """What the columns of each probe mean, by name: (interval in seconds, metrics)."""
    return [
        pb.Probe(
            name=name,
            interval_s=interval_s,
            metrics=[
                pb.Metric(
                    name=metric.name,
                    type=pb.Type.ValueType(metric.type),
                    unit=metric.unit,
                    kind=pb.Kind.ValueType(metric.kind),
                    min=metric.low,
                    max=metric.high,
                    help=cut(metric.help),
                    rollup=metric.rollup,
                )
                for metric in metrics
            ],
        )
        for name, (interval_s, metrics) in probes.items()
    ]


def hello(
    *,
    node: str,
    machine_id: str,
    boot_id: str,
    spool_id: str,
    probes: Sequence[pb.Probe],
    items: Sequence[Item],
    complete: bool,
    read_at_us: int,
    spool_batches: int,
    wall_us: int,
    mono_us: int,
) -> pb.Hello:
    """Who is calling; made anew for each connection. `read_at_us` is when the inventory was read.

    An inventory that does not fit into one message is cut and marked incomplete.
    """
    message = pb.Hello(
        wire_version=WIRE_VERSION,
        node=cut(node),
        machine_id=cut(machine_id),
        boot_id=cut(boot_id),
        agent_version=__version__,
        spool_id=spool_id,
        sent_at_us=wall_us,
        sent_mono_us=mono_us,
        probes=probes,
        spool_batches=spool_batches,
    )
    room = MAX_BODY_BYTES - message.ByteSize()
    for part in _inventory_parts(inventory(items, complete, read_at_us), room)[:1]:
        message.inventory.CopyFrom(part)
    return message


def split(body: bytes) -> list[bytes]:
    """`body` as two bodies of half its rows and events each; one element if nothing is left to divide."""
    whole = pb.Body.FromString(body)
    events = len(whole.events)
    items = max(1, len(whole.inventory.items)) if whole.HasField("inventory") else 0
    total = events + items + sum(rows.count for rows in whole.rows)
    if total < 2:
        return [body]
    halves = []
    for low, high in ((0, total // 2), (total // 2, total)):
        half = pb.Body(
            boot_id=whole.boot_id, sealed_at_us=whole.sealed_at_us, sealed_mono_us=whole.sealed_mono_us
        )
        half.events.extend(whole.events[low:high])
        if span := _overlap(events, items, low, high):
            half.inventory.CopyFrom(_inventory_slice(whole.inventory, *span))
        at = events + items
        for rows in whole.rows:
            if span := _overlap(at, rows.count, low, high):
                half.rows.append(_slice(rows, *span))
            at += rows.count
        halves.append(half.SerializeToString())
    return halves


def _overlap(at: int, count: int, low: int, high: int) -> tuple[int, int] | None:
    """Which part of the `count` units that begin at `at` lies in [low, high), counted from `at`."""
    start, stop = max(at, low) - at, min(at + count, high) - at
    return (start, stop) if stop > start else None


def _inventory_parts(whole: pb.Inventory, limit: int) -> list[pb.Inventory]:
    """The inventory in parts that fit; parts of a whole are incomplete, so that none denies the others.

    An item that alone is too large is left out, which makes the rest incomplete too.
    """
    if whole.ByteSize() <= limit:
        return [whole]
    if len(whole.items) < 2:
        return []
    middle = len(whole.items) // 2
    return [
        part
        for half in (
            _inventory_slice(whole, 0, middle),
            _inventory_slice(whole, middle, len(whole.items)),
        )
        for part in _inventory_parts(half, limit)
    ]


def _inventory_slice(whole: pb.Inventory, start: int, stop: int) -> pb.Inventory:
    complete = whole.complete and start == 0 and stop >= len(whole.items)
    return pb.Inventory(ts_us=whole.ts_us, items=whole.items[start:stop], complete=complete)


def _event(event: Event) -> pb.Event:
    detail = event.detail
    if len(detail.encode("utf-8", "replace")) > MAX_STRING_BYTES:
        detail = json.dumps({"cut_bytes": len(detail.encode("utf-8", "replace"))})
    return pb.Event(
        ts_us=event.ts_us,
        mono_us=event.mono_us,
        entity=cut(event.entity),
        kind=event.kind,
        code=cut(event.code),
        count=max(1, min(event.count, 2**32 - 1)),
        message=cut(event.message),
        detail=cut(detail),
    )


def _rows(group: _Group, ts_us: list[int], start: int, stop: int) -> pb.Rows:
    rows, reasons = group.rows[start:stop], group.reasons[start:stop]
    width = len(group.metrics)
    message = pb.Rows(probe=group.probe, count=stop - start, ts_us=_packed("q", ts_us[start:stop]))
    try:
        if any(len(row) != width for row in rows):
            raise ValueError("a row has another width than its probe")
        _columns(message, group.metrics, rows, reasons)
    except (TypeError, ValueError, OverflowError):
        # Cells of a wrong type: the sampler checks each, so this is another version's sampler or a defect.
        del message.columns[:]
        checked = [_recheck(group.metrics, row, why) for row, why in zip(rows, reasons, strict=True)]
        _columns(message, group.metrics, [row for row, _ in checked], [why for _, why in checked])
    return message


def _columns(
    message: pb.Rows,
    metrics: tuple[Metric, ...],
    rows: list[list[Value | None]],
    reasons: list[bytes],
) -> None:
    nulls = _nulls(rows, reasons)
    for at, (metric, cells) in enumerate(zip(metrics, zip(*rows, strict=True), strict=True)):
        column = message.columns.add(name=metric.name, type=pb.Type.ValueType(metric.type))
        why = nulls.get(at)
        if why is not None:
            column.reasons = bytes(why)
            column.validity = _bitmap([cell is not None for cell in cells])
        _fill(column, metric.type, cells)


def _fill(column: pb.Column, kind: Type, cells: Sequence[Value | None]) -> None:
    """Write the values; a NULL cell holds 0."""
    if kind is Type.STRING:
        index: dict[str, int] = {}
        places = []
        for cell in cells:
            if cell is None:
                places.append(0)
            elif isinstance(cell, str):
                places.append(index.setdefault(cell, len(index)))
            else:
                raise TypeError("not a text")
        column.dictionary.extend([cut(text) for text in index])
        column.values = _packed(_INDEX, places)
    elif kind is Type.BOOL:
        if not all(cell is None or isinstance(cell, bool) for cell in cells):
            raise TypeError("not a bool")
        column.values = bytes([cell is True for cell in cells])
    else:
        column.values = _packed(_CODE[kind], [_number(cell) for cell in cells])


def _number(cell: Value | None) -> float:
    if isinstance(cell, str):
        raise TypeError("not a number")
    return 0 if cell is None else cell


def _nulls(rows: list[list[Value | None]], reasons: list[bytes]) -> dict[int, bytearray]:
    """Per column that has NULLs: one reason each, in row order."""
    nulls: dict[int, bytearray] = {}
    for row, why in zip(rows, reasons, strict=True):
        if None not in row:
            continue
        seen = 0
        for at, cell in enumerate(row):
            if cell is None:
                reason = why[seen] if seen < len(why) else 0
                seen += 1
                nulls.setdefault(at, bytearray()).append(
                    reason if 1 <= reason <= Reason.NOT_READ else Reason.NOT_READ
                )
    return nulls


def _recheck(
    metrics: tuple[Metric, ...], row: list[Value | None], why: bytes
) -> tuple[list[Value | None], bytes]:
    """The row with every cell checked again: what does not fit its column is NULL, with a reason."""
    reasons = iter(why)
    cells: dict[str, Value | Null] = {}
    for metric, cell in zip(metrics, row, strict=False):
        if cell is not None:
            cells[metric.name] = cell
        else:
            reason = next(reasons, 0)
            known = 1 <= reason <= Reason.NOT_READ
            cells[metric.name] = Null(Reason(reason) if known else Reason.NOT_READ)
    return check_row(metrics, cells)


def _packed(code: str, numbers: Iterable[float]) -> bytes:
    """Little-endian; a number that does not fit the type raises."""
    packed: array[float] = array(code)
    packed.extend(numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _bitmap(bits: Sequence[bool]) -> bytes:
    """Least significant bit first."""
    packed = bytearray((len(bits) + 7) // 8)
    for at, bit in enumerate(bits):
        if bit:
            packed[at >> 3] |= 1 << (at & 7)
    return bytes(packed)


def _slice(rows: pb.Rows, start: int, stop: int) -> pb.Rows:
    """Rows [start, stop) of packed columns."""
    part = pb.Rows(probe=rows.probe, count=stop - start, ts_us=rows.ts_us[start * 8 : stop * 8])
    for column in rows.columns:
        width = _WIDTH[Type(column.type)]
        piece = part.columns.add(name=column.name, type=column.type)
        piece.values = column.values[start * width : stop * width]
        if column.validity:
            bits = [bool(column.validity[at >> 3] >> (at & 7) & 1) for at in range(stop)]
            skipped, kept = bits[:start].count(False), bits[start:].count(False)
            if kept:
                piece.validity = _bitmap(bits[start:])
                piece.reasons = column.reasons[skipped : skipped + kept]
        if width == 4:
            _redo_dictionary(piece, column.dictionary)
    return part


def _redo_dictionary(piece: pb.Column, dictionary: Sequence[str]) -> None:
    """Keep only the texts that the piece uses."""
    places = array(_INDEX, piece.values)
    if sys.byteorder == "big":
        places.byteswap()
    used: dict[int, int] = {}
    for place in places:
        if place < len(dictionary):
            used.setdefault(place, len(used))
    piece.dictionary.extend([dictionary[place] for place in used])
    piece.values = _packed(_INDEX, [used.get(place, 0) for place in places])
