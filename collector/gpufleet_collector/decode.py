"""Bodies of batches become checked NumPy columns, joined over all batches of a commit.

What a correct agent would not send is taken out here and told as a `Fault`: a whole batch (not a Body), the
rows of one probe (keys or lengths wrong), one column (wrong type, unknown), or single rows (a cell out of
range). The rest of the batch is stored. Nothing here touches the store.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from gpufleet.metric import Kind, Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import MAX_STRING_BYTES
from gpufleet_collector.frame import Array, Ints, Mask, Number, Words
from gpufleet_collector.store import HEAD, Column

NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
MAX_COLUMNS = 512
"""Of one probe of one agent."""

MAX_HELLO_PROBES = 64
MAX_ROWS_ENTRIES = 256
"""Entries `rows` of one Body; an agent sends one or two per probe."""

MAX_TEXT_BYTES = 4 << 20
"""All texts of one entry, written out: 1 MiB on the wire must not become gigabytes."""

MAX_FAULTS = 32
"""Kept per batch; the rest is summed up in one."""

OLDEST_US = 8 * 86_400_000_000
NEWEST_US = 300_000_000
"""A row further back or ahead of its receipt, clock corrected, has no time that can be believed."""

_WIDTH = {Type.F64: 8, Type.I64: 8, Type.U64: 8, Type.BOOL: 1, Type.STRING: 4}
_DTYPE = {Type.F64: "<f8", Type.I64: "<i8", Type.U64: "<u8", Type.BOOL: "u1", Type.STRING: "<u4"}
_TYPES = frozenset(int(kind) for kind in Type)
_KINDS = {int(kind): kind.name.lower() for kind in Kind}
_LARGEST_INT = 2**63 - 1
_MAX_LAYOUTS = 64
_MAX_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class Fault:
    """Something of a batch that is not stored as data.

    Attributes:
        probe: Where; empty = the batch itself.
        metric: Empty = whole rows.
        reason: A short word.
        cells: How many cells or rows.
        sample: What it looked like.
    """

    probe: str
    metric: str
    reason: str
    cells: int
    sample: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which of the columns of one entry are stored, and what is wrong with the others. Equal only to itself.

    Attributes:
        take: Positions of the stored columns within the entry.
        columns: What they are.
        width: Bytes per value of each column that was sent; 0 = not stored.
        texts: Positions of the stored text columns within the entry.
        faults: (metric, reason) of those not stored.
        fatal: Why no row of the entry can be stored; empty = they can.
    """

    take: tuple[int, ...]
    columns: tuple[Column, ...]
    width: tuple[int, ...]
    texts: tuple[int, ...]
    faults: tuple[tuple[str, str], ...]
    fatal: str
    _sizes: dict[int, list[int]] = field(default_factory=dict)

    def sizes(self, count: int) -> list[int]:
        """Bytes of each column that was sent, for `count` rows."""
        found = self._sizes.get(count)
        if found is None:
            if len(self._sizes) >= _MAX_LAYOUTS:
                self._sizes.clear()
            found = self._sizes[count] = [width * count for width in self.width]
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """What an entry holds besides times and values."""

    layout: Layout
    count: int
    validity: list[bytes] | None
    reasons: list[bytes] | None
    dictionaries: list[list[str]]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where times and values stand in serialised entries; `known` by the bytes around them."""

    spans: list[slice]
    gaps: list[slice]
    known: dict[bytes, _Known]


class Shape:
    """One probe as one agent described it in its hello.

    Entries of an agent look alike down to the byte, but for times and values. What stood around those is
    remembered with what it meant; an entry with the same bytes there is cut up without reading its columns.
    """

    def __init__(self, probe: str, columns: Sequence[Column], refused: Mapping[str, str]) -> None:
        self.probe = probe
        self.columns = {column.name: column for column in columns if column.name not in refused}
        self.refused = dict(refused)
        self.keys = tuple(column.name for column in columns if column.kind == "key")
        self._layouts: dict[tuple[str | int, ...], Layout] = {}
        self._cuts: dict[int, list[_Cut]] = {}
        self._remembered = 0
        self._lacks: tuple[int, tuple[str, ...]] = (-1, ())

    def lacks(self, table: Collection[str]) -> tuple[str, ...]:
        """Columns of the probe's table that this agent did not describe; a table only grows."""
        size, names = self._lacks
        if size != len(table):
            names = tuple(name for name in table if name not in self.columns and name not in self.refused)
            self._lacks = len(table), names
        return names

    def layout(self, names: list[str], types: list[int]) -> Layout:
        """How to read an entry with these columns; remembered, since an agent's entries look alike."""
        key: tuple[str | int, ...] = (*names, *types)
        found = self._layouts.get(key)
        if found is None:
            found = self._make(names, types)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = found
        return found

    def recall(self, raw: bytes) -> tuple[_Known, list[bytes]] | None:
        """What this entry means and its (times, values, ...), if one like it was seen before."""
        for cut in self._cuts.get(len(raw), ()):
            known = cut.known.get(b"".join([raw[gap] for gap in cut.gaps]))
            if known is not None:
                return known, [raw[span] for span in cut.spans]
        return None

    def remember(self, raw: bytes, known: _Known) -> None:
        """Recall entries like this one; every column of it is stored."""
        spans = list(_spans(raw))
        if len(spans) != len(known.layout.columns) + 1:
            return
        if self._remembered >= _MAX_REMEMBERED:
            self._cuts, self._remembered = {}, 0
        edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), len(raw)]
        gaps = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        cuts = self._cuts.setdefault(len(raw), [])
        cut = next((cut for cut in cuts if cut.spans == spans), None)
        if cut is None:
            cut = _Cut(spans, gaps, {})
            cuts.append(cut)
        cut.known[b"".join([raw[gap] for gap in gaps])] = known
        self._remembered += 1

    def _make(self, names: list[str], types: list[int]) -> Layout:
        take, columns, width, faults, fatal = [], [], [], [], ""
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        for position, (name, kind) in enumerate(zip(names, types, strict=True)):
            column = self.columns.get(name)
            reason = self.refused.get(name, "")
            if name in twice:
                reason = "duplicate_column"
            elif column is None and not reason:
                reason = "unknown_column"
            elif column is not None and kind != column.type:
                reason = "wrong_type"
            if reason or column is None:
                faults.append((name[:63], reason))
                width.append(0)
                if name in self.keys:
                    fatal = reason
                continue
            take.append(position)
            columns.append(column)
            width.append(_WIDTH[column.type])
        return Layout(
            tuple(take),
            tuple(columns),
            tuple(width),
            _texts(take, columns),
            tuple(faults[:MAX_FAULTS]),
            fatal,
        )


def _texts(take: Iterable[int], columns: Iterable[Column]) -> tuple[int, ...]:
    return tuple(
        position for position, column in zip(take, columns, strict=True) if column.type is Type.STRING
    )


def read_probes(probes: Iterable[pb.Probe]) -> tuple[dict[str, tuple[float, list[Column]]], list[Fault]]:
    """Descriptors of a hello: probe -> (interval in seconds, columns), and what was wrong with the others."""
    found: dict[str, tuple[float, list[Column]]] = {}
    faults: list[Fault] = []
    for probe in probes:
        if not NAME.fullmatch(probe.name):
            faults.append(Fault(probe.name[:63], "", "bad_probe_name", 1))
        elif probe.name in found:
            faults.append(Fault(probe.name, "", "duplicate_probe", 1))
        elif len(found) >= MAX_HELLO_PROBES:
            faults.append(Fault(probe.name, "", "too_many_probes", 1))
        else:
            interval = probe.interval_s if 0 <= probe.interval_s < 1e9 else 0.0
            found[probe.name] = (interval, _columns(probe, faults))
    return found, faults


def _columns(probe: pb.Probe, faults: list[Fault]) -> list[Column]:
    columns: dict[str, Column] = {}
    for metric in probe.metrics:
        reason = ""
        if not NAME.fullmatch(metric.name) or metric.name in HEAD:
            reason = "bad_column_name"
        elif metric.name in columns:
            reason = "duplicate_column"
        elif metric.type not in _TYPES:
            reason = "unknown_type"
        elif len(columns) >= MAX_COLUMNS:
            reason = "too_many_columns"
        if reason:
            faults.append(Fault(probe.name, metric.name[:63], reason, 1))
            continue
        kind = _KINDS.get(metric.kind, "gauge")
        columns[metric.name] = Column(
            metric.name,
            Type(metric.type),
            metric.unit[:32],
            kind,
            metric.help[:1000],
            _limit(metric, "min"),
            _limit(metric, "max"),
            metric.rollup[:32],
        )
    return list(columns.values())


def _limit(metric: pb.Metric, which: str) -> float | None:
    if not metric.HasField("min" if which == "min" else "max"):
        return None
    value = metric.min if which == "min" else metric.max
    return value if math.isfinite(value) else None


@dataclass(slots=True)
class Entry:
    """Rows of one probe of one batch: lengths are right, values not looked at yet."""

    batch: int
    count: int
    ts: bytes
    values: list[bytes]
    validity: list[bytes] | None
    reasons: list[bytes] | None
    dictionaries: list[list[str]]


@dataclass(slots=True)
class Opened:
    """One body, opened."""

    boot_id: str = ""
    sealed_at_us: int = 0
    sealed_mono_us: int = 0
    entries: list[tuple[Shape, Layout, Entry]] = field(default_factory=list)
    events: Sequence[pb.Event] = ()
    inventory: pb.Inventory | None = None
    faults: list[Fault] = field(default_factory=list)


def open_body(body: bytes, batch: int, shapes: Mapping[str, Shape]) -> Opened:
    """Parse one body and check every length in it. Never raises on what it holds.

    Args:
        body: `Batch.body`.
        batch: Its place in the commit, carried into the entries.
        shapes: The agent's probes.
    """
    opened = Opened()
    try:
        message = pb.Body.FromString(body)
    except DecodeError:
        opened.faults.append(Fault("", "", "not_a_body", 1, f"{len(body)} bytes"))
        return opened
    opened.boot_id = message.boot_id[:128]
    opened.sealed_at_us = message.sealed_at_us
    opened.sealed_mono_us = message.sealed_mono_us
    opened.events = message.events
    if message.HasField("inventory"):
        opened.inventory = message.inventory
    for number, rows in enumerate(message.rows):
        if number >= MAX_ROWS_ENTRIES:
            opened.faults.append(Fault("", "", "too_many_entries", len(message.rows) - number))
            break
        _open_rows(rows, batch, shapes, opened)
    return opened


def _open_rows(rows: pb.Rows, batch: int, shapes: Mapping[str, Shape], opened: Opened) -> None:
    name, count, ts = rows.probe, rows.count, rows.ts_us
    if count == 0 and not ts:
        return
    shape = shapes.get(name)
    if shape is None:
        opened.faults.append(Fault(name[:63], "", "unknown_probe", _believable(rows)))
        return
    if len(ts) != 8 * count:
        opened.faults.append(
            Fault(name, "", "bad_length", _believable(rows), f"{count} rows, {len(ts)} bytes of ts")
        )
        return
    raw = rows.SerializeToString()
    found = shape.recall(raw)
    if found is not None:
        known, cells = found
        entry = Entry(batch, count, cells[0], cells[1:], known.validity, known.reasons, known.dictionaries)
        opened.entries.append((shape, known.layout, entry))
        return
    columns = rows.columns
    layout = shape.layout([column.name for column in columns], [column.type for column in columns])
    if layout.fatal:
        opened.faults.append(Fault(name, "", layout.fatal, count, layout.faults[0][0]))
        return
    values = [column.values for column in columns]
    validity: list[bytes] | None = [column.validity for column in columns]
    if not any(validity or ()):
        validity = None
    reasons = [column.reasons for column in columns] if validity else None
    if layout.faults or list(map(len, values)) != layout.sizes(count):
        layout, broken = _without_broken(shape, layout, values, count)
        opened.faults += [Fault(name, metric, reason, count) for metric, reason in (*layout.faults, *broken)]
        if layout.fatal:
            opened.faults.append(Fault(name, "", layout.fatal, count))
            return
    if validity:
        layout, wrong = _check_validity(shape, layout, validity, count)
        opened.faults += [Fault(name, metric, "bad_length", count) for metric in wrong]
        if layout.fatal:
            opened.faults.append(Fault(name, "", layout.fatal, count))
            return
    dictionaries = [list(columns[position].dictionary) for position in layout.texts]
    if not _texts_fit(dictionaries, count):
        opened.faults.append(Fault(name, "", "too_much_text", count))
        return
    if len(layout.take) != len(columns):
        values = [values[position] for position in layout.take]
        validity = [validity[position] for position in layout.take] if validity else None
        reasons = [reasons[position] for position in layout.take] if reasons else None
    elif not layout.faults:
        shape.remember(raw, _Known(layout, count, validity, reasons, dictionaries))
    entry = Entry(batch, count, ts, values, validity, reasons, dictionaries)
    opened.entries.append((shape, layout, entry))


def _believable(rows: pb.Rows) -> int:
    """How many rows an entry says it has, at most what its bytes could hold, at least one."""
    longest = max((len(column.values) for column in rows.columns), default=0)
    return max(1, min(rows.count, max(len(rows.ts_us) // 8, longest)))


def _spans(raw: bytes) -> Iterator[slice]:
    """Where `ts_us` and the `values` of each column stand in a serialised `Rows`."""
    for field_number, start, stop in _fields(raw, 0, len(raw)):
        if field_number == pb.Rows.TS_US_FIELD_NUMBER:
            yield slice(start, stop)
        elif field_number == pb.Rows.COLUMNS_FIELD_NUMBER:
            for inner, first, last in _fields(raw, start, stop):
                if inner == pb.Column.VALUES_FIELD_NUMBER:
                    yield slice(first, last)


def _fields(raw: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of each length-delimited field of a message that is known to parse."""
    while at < stop:
        tag, at = _varint(raw, at)
        if tag & 7 == 2:
            length, at = _varint(raw, at)
            yield tag >> 3, at, at + length
            at += length
        elif tag & 7 == 0:
            _, at = _varint(raw, at)
        elif tag & 7 == 1:
            at += 8
        elif tag & 7 == 5:
            at += 4
        else:
            return  # a group: nothing of ours


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        shift += 7
        at += 1
        if raw[at - 1] < 0x80:
            return value, at


def _without_broken(
    shape: Shape, layout: Layout, values: list[bytes], count: int
) -> tuple[Layout, list[tuple[str, str]]]:
    """The layout less the columns whose values have a wrong length."""
    wrong = {
        column.name
        for position, column in zip(layout.take, layout.columns, strict=True)
        if len(values[position]) != layout.width[position] * count
    }
    return _less(shape, layout, wrong), [(name, "bad_length") for name in sorted(wrong)]


def _check_validity(
    shape: Shape, layout: Layout, validity: list[bytes], count: int
) -> tuple[Layout, list[str]]:
    size = (count + 7) // 8
    wrong = {
        column.name
        for position, column in zip(layout.take, layout.columns, strict=True)
        if validity[position] and len(validity[position]) != size
    }
    return (_less(shape, layout, wrong), sorted(wrong)) if wrong else (layout, [])


def _less(shape: Shape, layout: Layout, wrong: set[str]) -> Layout:
    if not wrong:
        return layout
    kept = [
        (position, column)
        for position, column in zip(layout.take, layout.columns, strict=True)
        if column.name not in wrong
    ]
    return Layout(
        tuple(position for position, _ in kept),
        tuple(column for _, column in kept),
        layout.width,
        tuple(position for position, column in kept if column.type is Type.STRING),
        layout.faults,
        "bad_length" if wrong & set(shape.keys) else layout.fatal,
    )


def _texts_fit(dictionaries: list[list[str]], count: int) -> bool:
    """Whether the texts of an entry stay bounded when every cell takes the longest of its dictionary."""
    longest = sum(max(map(len, words), default=0) for words in dictionaries)
    return longest * count <= MAX_TEXT_BYTES


@dataclass(slots=True)
class Joined:
    """Entries of one probe and layout, as columns.

    Attributes:
        columns: (column, values, validity); values of a string column are numbers of the word list.
        ts: Corrected time of each row, microseconds.
        batch: For each row the place of its batch in the commit.
        faults: (batch, fault).
    """

    columns: list[tuple[Column, Array, Mask | None]]
    ts: Ints
    batch: npt.NDArray[np.intp]
    faults: list[tuple[int, Fault]]


@dataclass(frozen=True, slots=True)
class When:
    """Times of one batch: what to add to its rows' clock, and when it came, microseconds."""

    offset_us: int
    received_us: int


def join(
    shape: Shape, layout: Layout, entries: Sequence[Entry], when: Sequence[When], words: Words
) -> Joined:
    """Put the entries of many batches end to end, check every value, and drop the rows that cannot be stored.

    Args:
        shape: The probe.
        layout: Of all of `entries`.
        entries: At least one.
        when: Per entry.
        words: Word list of the INSERT; texts are added to it.
    """
    counts = np.array([entry.count for entry in entries], np.int64)
    checker = _Checker(shape.probe, entries, counts)
    ts = checker.times(when)
    columns: list[tuple[Column, Array, Mask | None]] = []
    text = 0
    has_nulls = any(entry.validity is not None for entry in entries)
    for index, column in enumerate(layout.columns):
        raw: Number = np.frombuffer(b"".join([entry.values[index] for entry in entries]), _DTYPE[column.type])
        values: Array
        valid = _valid(entries, index, counts) if has_nulls else None
        if column.type is Type.STRING:
            values = checker.strings(
                column, raw, valid, [entry.dictionaries[text] for entry in entries], words
            )
            text += 1
            valid = None
        else:
            values = checker.numbers(column, raw, valid)
        columns.append((column, values, valid))
    batch = np.repeat(np.array([entry.batch for entry in entries], np.intp), counts)
    if checker.bad is not None:
        keep = ~checker.bad
        ts, batch = ts[keep], batch[keep]
        columns = [
            (column, values[keep], valid[keep] if valid is not None else None)
            for column, values, valid in columns
        ]
    return Joined(columns, ts, batch, checker.faults)


def _valid(entries: Sequence[Entry], index: int, counts: Ints) -> Mask | None:
    """Validity of one column over all entries; None = no NULLs."""
    parts: list[bytes] = []
    some = False
    for entry in entries:
        bits = entry.validity[index] if entry.validity is not None else b""
        some = some or bool(bits)
        parts.append(bits or b"\xff" * ((entry.count + 7) // 8))
    if not some:
        return None
    expanded = np.unpackbits(np.frombuffer(b"".join(parts), np.uint8), bitorder="little").view(np.bool_)
    if (counts % 8 == 0).all():
        return None if expanded.all() else expanded
    padded = (counts + 7) // 8 * 8
    inside = np.arange(expanded.size) - np.repeat(np.cumsum(padded) - padded, padded) < np.repeat(
        counts, padded
    )
    expanded = expanded[inside]
    return None if expanded.all() else expanded


class _Checker:
    """Finds rows with a cell that cannot be stored, and says so per batch."""

    def __init__(self, probe: str, entries: Sequence[Entry], counts: Ints) -> None:
        self.bad: Mask | None = None
        self.faults: list[tuple[int, Fault]] = []
        self._probe = probe
        self._entries = entries
        self._counts = counts
        self._ends = np.cumsum(counts)

    def _mark(self, metric: str, reason: str, bad: Mask, values: Array) -> None:
        """Drop the rows where `bad`; one fault per batch."""
        self.bad = bad if self.bad is None else self.bad | bad
        rows = np.flatnonzero(bad)
        owner = np.searchsorted(self._ends, rows, side="right")
        places, first, cells = np.unique(owner, return_index=True, return_counts=True)
        for place, start, count in zip(places.tolist(), first.tolist(), cells.tolist(), strict=True):
            sample = str(values[rows[start]].item())
            fault = Fault(self._probe, metric, reason, count, sample)
            self.faults.append((self._entries[place].batch, fault))

    def times(self, when: Sequence[When]) -> Ints:
        """Row times on the collector's clock."""
        ts = np.frombuffer(b"".join([entry.ts for entry in self._entries]), "<i8").astype(
            np.int64, copy=False
        )
        offsets = [min(max(item.offset_us, -(2**62)), 2**62) for item in when]
        limit = 2**61  # 73,000 years: sums below cannot overflow
        wild = (ts > limit) | (ts < -limit) if ts.max() > limit or ts.min() < -limit else None
        raw = ts
        if any(offsets):
            ts = np.where(wild, 0, ts) if wild is not None else ts
            ts = ts + np.repeat(np.array(offsets, np.int64), self._counts)
        received = [item.received_us for item in when]
        if ts.min() < max(received) - OLDEST_US or ts.max() > min(received) + NEWEST_US:
            arrived = np.repeat(np.array(received, np.int64), self._counts)
            bad = (ts < arrived - OLDEST_US) | (ts > arrived + NEWEST_US)
            if wild is not None:
                bad |= wild
            if bad.any():
                self._mark("ts", "time", bad, raw)
        return ts

    def numbers(self, column: Column, values: Number, valid: Mask | None) -> Array:
        """The cells of a numeric or truth column, unchanged."""
        if column.type is Type.BOOL:
            low, high = 0.0, 1.0
        else:
            low, high = _range(column)
        seen = values if valid is None else values[valid]
        if seen.size and not (low <= seen.min() and seen.max() <= high):
            with np.errstate(invalid="ignore"):
                bad = ~((values >= low) & (values <= high))
            if valid is not None:
                bad &= valid
            if bad.any():
                self._mark(column.name, "out_of_range", bad, values)
        return values.astype(np.bool_) if column.type is Type.BOOL else values

    def strings(
        self,
        column: Column,
        index: Array,
        valid: Mask | None,
        dictionaries: Sequence[list[str]],
        words: Words,
    ) -> Array:
        """Numbers of the word list instead of numbers of each entry's dictionary."""
        table: list[int] = []
        starts: list[int] = []
        too_long = False
        for dictionary in dictionaries:
            starts.append(len(table))
            for word in dictionary:
                if len(word) * 4 > MAX_STRING_BYTES and len(word.encode()) > MAX_STRING_BYTES:
                    too_long = True
                    table.append(_TOO_LONG)
                else:
                    table.append(words.code(word))
            table.append(0)
        lookup = np.array(table, np.int64)
        sizes = np.repeat(np.array([len(words) for words in dictionaries], np.int64), self._counts)
        at = index.astype(np.int64)
        outside = at >= sizes
        if valid is not None:
            outside &= valid
            at = np.where(valid, at, sizes)  # one past the dictionary stands NULL
        if outside.any():
            self._mark(column.name, "bad_index", outside, index)
            at = np.where(outside, sizes, at)
        codes = lookup[at + np.repeat(np.array(starts, np.int64), self._counts)]
        if too_long:
            bad = codes == _TOO_LONG
            if bad.any():
                self._mark(column.name, "too_long", bad, index)
                codes = np.where(bad, 0, codes)
        return codes.astype(np.uint32)


_TOO_LONG = -1


def _range(column: Column) -> tuple[float, float]:
    """Smallest and largest value that is stored, as numbers that compare exactly with the column's."""
    if column.type is Type.F64:
        low = column.low if column.low is not None else -1.7e308
        high = column.high if column.high is not None else 1.7e308
        return low, high
    floor = 0 if column.type is Type.U64 else -_LARGEST_INT
    least = floor if column.low is None else max(floor, math.ceil(column.low))
    most = _LARGEST_INT if column.high is None else min(_LARGEST_INT, math.floor(column.high))
    return least, most
