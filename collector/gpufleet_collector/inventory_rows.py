"""What hosts are made of, as agents say it: what changed becomes dated rows of table `inventory`.

What should be there is another matter: see inventory.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import duckdb
import msgspec
import numpy as np

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import MAX_STRING_BYTES
from gpufleet_collector.decode import Fault
from gpufleet_collector.frame import Frame

MAX_ITEMS = 4096
MAX_ATTRIBUTES = 256
_MAX_ENTITY = 512
_MAX_KEY = 128


@dataclass(slots=True)
class _Row:
    node: str
    entity: str
    attributes: dict[str, str]
    text: str
    from_us: int
    to_us: int | None = None


@dataclass(slots=True)
class Changes:
    """What one commit writes to `inventory`."""

    rows: list[_Row] = field(default_factory=list)
    closed: list[tuple[str, str, int]] = field(default_factory=list)
    _last: dict[tuple[str, str], _Row] = field(default_factory=dict)

    def begin(self, row: _Row) -> None:
        """This holds from now on."""
        self.rows.append(row)
        self._last[row.node, row.entity] = row

    def end(self, node: str, entity: str, at_us: int) -> None:
        """What held does no longer."""
        pending = self._last.pop((node, entity), None)
        if pending is not None:
            pending.to_us = at_us
        else:
            self.closed.append((node, entity, at_us))

    def rename(self, before: str, node: str) -> None:
        """A node goes by another name."""
        for row in self.rows:
            if row.node == before:
                row.node = node
        self.closed = [
            (node if name == before else name, entity, at_us) for name, entity, at_us in self.closed
        ]
        self._last = {(row.node, row.entity): row for row in self._last.values()}

    def write(self, write: duckdb.DuckDBPyConnection) -> None:
        """End what no longer holds, then append; inside `Store.transaction()`."""
        groups: dict[tuple[str, int], list[str]] = {}
        for node, entity, at_us in self.closed:
            groups.setdefault((node, at_us), []).append(entity)
        for (node, at_us), entities in groups.items():
            write.execute(
                "UPDATE live.inventory SET valid_to = make_timestamp(?) WHERE node = ? AND valid_to IS NULL "
                "AND entity IN (SELECT unnest(?::VARCHAR[]))",
                [at_us, node, entities],
            )
        if not self.rows:
            return
        frame = Frame()
        frame.texts("node", [row.node for row in self.rows])
        frame.texts("entity", [row.entity for row in self.rows])
        frame.texts("kind", [row.entity.partition(":")[0] for row in self.rows])
        for name in ("uuid", "serial", "pci", "model", "slot"):
            frame.texts(name, [row.attributes.get(name) for row in self.rows])
        index = [row.attributes.get("index", "") for row in self.rows]
        known = np.array([text.isascii() and text.isdigit() and len(text) < 9 for text in index], np.bool_)
        numbers = [int(text) if ok else 0 for text, ok in zip(index, known.tolist(), strict=True)]
        frame.numbers("gpu_index", np.array(numbers, np.int32), known)
        frame.json("attributes", [row.text for row in self.rows])
        frame.times("valid_from", np.array([row.from_us for row in self.rows], np.int64))
        frame.times(
            "valid_to",
            np.array([row.to_us or 0 for row in self.rows], np.int64),
            np.array([row.to_us is not None for row in self.rows], np.bool_),
        )
        frame.insert(write, "live.inventory")


class Inventories:
    """What holds now, by node and entity; mirrors the open rows of `inventory`."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, str]] = {}
        self._newest: dict[str, int] = {}

    def load(self, read: duckdb.DuckDBPyConnection) -> None:
        """Start from the table."""
        self._open, self._newest = {}, {}
        rows = read.execute(
            "SELECT node, entity, attributes::VARCHAR FROM live.inventory WHERE valid_to IS NULL"
        ).fetchall()
        for node, entity, text in rows:
            self._open.setdefault(node, {})[entity] = text
        rows = read.execute(
            "SELECT node, epoch_us(max(greatest(valid_from, valid_to))) FROM live.inventory GROUP BY node"
        ).fetchall()
        self._newest = dict(rows)

    def rename(self, before: str, node: str) -> None:
        """A node goes by another name."""
        if before in self._open:
            self._open[node] = self._open.pop(before)
        if before in self._newest:
            self._newest[node] = self._newest.pop(before)

    def take(self, node: str, sent: pb.Inventory, at_us: int, changes: Changes) -> list[Fault]:
        """Add what differs from what holds to `changes`; returns what cannot be stored.

        What an outage left behind may be older than what is known: the present is not overwritten by it.
        """
        if at_us < self._newest.get(node, at_us):
            return []
        faults: list[Fault] = []
        items: dict[str, dict[str, str]] = {}
        for number, item in enumerate(sent.items):
            if number >= MAX_ITEMS:
                faults.append(Fault("inventory", "", "too_many_items", len(sent.items) - number))
                break
            reason = _wrong(item)
            if reason:
                faults.append(Fault("inventory", "", reason, 1, item.entity[:200]))
                continue
            items[item.entity] = {_text(name): _text(value) for name, value in item.attributes.items()}
        if "node:" in items:
            items["node:"]["complete"] = "true" if sent.complete else "false"
        self._compare(node, items, sent.complete and not faults, at_us, changes)
        return faults

    def _compare(
        self, node: str, items: Mapping[str, dict[str, str]], complete: bool, at_us: int, changes: Changes
    ) -> None:
        held = self._open.setdefault(node, {})
        for entity in [entity for entity in held if complete and entity not in items]:
            changes.end(node, entity, at_us)
            del held[entity]
        for entity, attributes in items.items():
            text = msgspec.json.encode(attributes, order="sorted").decode()
            if held.get(entity) == text:
                continue
            if entity in held:
                changes.end(node, entity, at_us)
            held[entity] = text
            changes.begin(_Row(node, entity, attributes, text, at_us))
        self._newest[node] = at_us


def _text(text: str) -> str:
    return text.replace("\0", "\ufffd")  # the engine refuses a NUL in a text


def _wrong(item: pb.Item) -> str:
    if not item.entity or len(item.entity) > _MAX_ENTITY or ":" not in item.entity:
        return "bad_entity"
    if len(item.attributes) > MAX_ATTRIBUTES:
        return "too_many_attributes"
    for key, value in item.attributes.items():
        if not key or len(key) > _MAX_KEY or len(value.encode()) > MAX_STRING_BYTES:
            return "bad_attribute"
    return ""
