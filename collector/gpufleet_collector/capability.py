"""Why values are NULL: reasons travel with every batch, table `capability` gets a row when one changes."""

from collections.abc import Iterator
from dataclasses import dataclass

import duckdb
import numpy as np

from gpufleet.metric import Reason, Type
from gpufleet_collector.decode import Entry, Layout, Shape

_WORDS = {int(reason): reason.name.lower() for reason in Reason}
_UNSAID = "failed"
_NEVER = Reason.NOT_SUPPORTED.name.lower()
_LOGS = frozenset({"agent", "bench", "job", "loader"})
"""Tables in which a NULL is part of what the row says, or that are about processes, which come and go."""

NOT_SENT = "not_sent"
"""Code where the agent's version does not know the metric at all; its reason is `not_supported`."""

MAX_KNOWN = 16_384
"""NULLs remembered per node and probe; an agent that has more than that is making them up."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row of `capability`."""

    node: str
    entity: str
    probe: str
    metric: str
    reason: str
    code: str = ""


class Capabilities:
    """The last reason told for every value that is NULL."""

    def __init__(self) -> None:
        self._nulls: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
        self._looks: dict[tuple[str, str], tuple[object, ...]] = {}

    def load(self, read: duckdb.DuckDBPyConnection) -> None:
        """Start from the table."""
        rows = read.execute(
            "SELECT node, probe, metric, entity, arg_max(reason, since) AS reason FROM live.capability "
            "GROUP BY ALL HAVING reason != 'ok'"
        ).fetchall()
        self._nulls, self._looks = {}, {}
        for node, probe, metric, entity, reason in rows:
            self._nulls.setdefault((node, probe), {})[metric, entity] = reason

    def rename(self, before: str, node: str) -> None:
        """A node goes by another name."""
        for key in [key for key in self._nulls if key[0] == before]:
            self._nulls[node, key[1]] = self._nulls.pop(key)
        self._looks = {key: look for key, look in self._looks.items() if key[0] != before}

    def changes(
        self, node: str, shape: Shape, layout: Layout, entry: Entry, lacks: tuple[str, ...] = ()
    ) -> list[Change]:
        """What is told anew by these rows; of several rows about one thing the last counts.

        `lacks` are columns of the table that other agents describe and this one does not.
        The usual batch looks exactly like the one before it and costs a comparison of bytes.
        """
        if shape.probe in _LOGS:
            return []
        where = (node, shape.probe)
        nulls = self._nulls.get(where)
        if entry.validity is None and not nulls and not lacks:
            self._looks.pop(where, None)
            return []
        look = (layout, entry.count, entry.validity, entry.reasons, lacks, *_keys(layout, entry))
        if self._looks.get(where) == look:
            return []
        nulls = self._nulls.setdefault(where, {})
        last = {entity: row for row, entity in enumerate(_entities(layout, entry))}
        found: list[Change] = []
        for index, column in enumerate(layout.columns):
            if column.kind == "key":
                continue
            reasons = _reasons(entry, index)
            for entity, row in last.items():
                reason = reasons[row] if reasons else "ok"
                if nulls.get((column.name, entity), "ok") == reason:
                    continue
                if reason == "ok":
                    del nulls[column.name, entity]
                elif len(nulls) >= MAX_KNOWN:
                    continue
                else:
                    nulls[column.name, entity] = reason
                found.append(Change(node, entity, shape.probe, column.name, reason))
        for metric in lacks:
            for entity in last:
                if nulls.get((metric, entity)) != _NEVER and len(nulls) < MAX_KNOWN:
                    nulls[metric, entity] = _NEVER
                    found.append(Change(node, entity, shape.probe, metric, _NEVER, NOT_SENT))
        self._looks[where] = look
        return found


def _reasons(entry: Entry, index: int) -> list[str] | None:
    """Reason of each row's cell, "ok" where there is a value; None = there always is."""
    bits = entry.validity[index] if entry.validity is not None else b""
    if not bits:
        return None
    told = iter(entry.reasons[index] if entry.reasons is not None else b"")
    valid = np.unpackbits(np.frombuffer(bits, np.uint8), count=entry.count, bitorder="little").tolist()
    return ["ok" if has else _WORDS.get(next(told, 0), _UNSAID) for has in valid]


def _keys(layout: Layout, entry: Entry) -> Iterator[object]:
    """What decides which entities the rows are about."""
    text = 0
    for index, column in enumerate(layout.columns):
        if column.type is Type.STRING:
            if column.kind == "key":
                yield entry.values[index]
                yield entry.dictionaries[text]
            text += 1
        elif column.kind == "key" and column.name in _NUMBERS:
            yield entry.values[index]


def _entities(layout: Layout, entry: Entry) -> Iterator[str]:
    """`kind:id` of each row, from the first text key that is not NULL."""
    columns: list[tuple[str, list[str]]] = []
    numbers: dict[str, list[int]] = {}
    text = 0
    for index, column in enumerate(layout.columns):
        if column.type is Type.STRING:
            if column.kind == "key":
                columns.append((column.name, _texts(entry, index, text)))
            text += 1
        elif column.kind == "key" and column.type is Type.U64:
            numbers[column.name] = np.frombuffer(entry.values[index], "<u8").tolist()
    for row in range(entry.count):
        for name, texts in columns:
            if not texts[row]:
                continue
            kind, number = _NUMBERED.get(name, ("", ""))
            if number in numbers:
                yield f"{kind}:{texts[row]}/{numbers[number][row]}"
            else:
                yield texts[row] if name == "entity" else f"{_KINDS.get(name, name)}:{texts[row]}"
            break
        else:
            yield "node:"


_KINDS = {"gpu_uuid": "gpu"}
_NUMBERED = {"device": ("port", "port")}
"""Text key -> the kind of entity it is together with a number, and the key that holds the number."""
_NUMBERS = frozenset(number for _, number in _NUMBERED.values())


def _texts(entry: Entry, index: int, text: int) -> list[str]:
    words = entry.dictionaries[text]
    places = np.frombuffer(entry.values[index], "<u4").tolist()
    valid = entry.validity[index] if entry.validity is not None else b""
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little").tolist() if valid else None
    return [
        words[place] if place < len(words) and (bits is None or bits[row]) else ""
        for row, place in enumerate(places)
    ]
