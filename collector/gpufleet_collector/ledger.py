"""Which batches are in: number ranges in memory, beside the table that a restart reads them from.

A number is looked up inside the transaction that stores its rows and becomes known only when that committed.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import duckdb

_RECENT = 256
"""Digests kept per spool: agents send again what is not acknowledged, no more than their credit."""


class Ranges:
    """A set of whole numbers as sorted, disjoint, closed ranges."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number <= self._ends[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add every number from `start` to `end`, both included."""
        low = bisect_right(self._starts, start)
        if low and self._ends[low - 1] >= start - 1:
            low -= 1
            start = self._starts[low]
        high = low
        while high < len(self._starts) and self._starts[high] <= end + 1:
            end = max(end, self._ends[high])
            high += 1
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]


@dataclass(slots=True)
class _Spool:
    ranges: Ranges
    digests: OrderedDict[int, str]


class Ledger:
    """Numbers of all spools that are in the store."""

    def __init__(self) -> None:
        self._spools: dict[tuple[str, str], _Spool] = {}

    def load(self, read: duckdb.DuckDBPyConnection) -> None:
        """Start from the table."""
        self._spools = {}
        whole = read.execute(
            "SELECT node, spool_id, min(number), max(number), count(DISTINCT number) FROM live.ledger "
            "GROUP BY ALL"
        ).fetchall()
        for node, spool, low, high, count in whole:
            ranges = Ranges([(low, high)] if high - low + 1 == count else _islands(read, node, spool))
            self._spools[node, spool] = _Spool(ranges, OrderedDict())

    def known(self, node: str, spool_id: str, number: int) -> bool:
        """Whether this batch is in the store."""
        spool = self._spools.get((node, spool_id))
        return spool is not None and number in spool.ranges

    def digest(self, read: duckdb.DuckDBPyConnection, node: str, spool_id: str, number: int) -> str | None:
        """Digest of a known batch; None when its ledger row has expired."""
        spool = self._spools.get((node, spool_id))
        if spool is not None and number in spool.digests:
            return spool.digests[number]
        # to the end: an unfinished result on the writing connection refuses the rows that come next
        found = read.execute(
            "SELECT digest FROM live.ledger WHERE node = ? AND spool_id = ? AND number = ?",
            [node, spool_id, number],
        ).fetchall()
        digest: str | None = found[0][0] if found else None
        if digest is not None:
            self._remember(node, spool_id, number, digest)
        return digest

    def add(self, node: str, spool_id: str, number: int, digest: str) -> None:
        """The batch is in the store for good."""
        self._remember(node, spool_id, number, digest)
        self._spools[node, spool_id].ranges.add(number, number)

    def rename(self, before: str, node: str, spool_id: str) -> None:
        """Numbers of a spool follow its machine to another name."""
        spool = self._spools.pop((before, spool_id), None)
        if spool is not None:
            self._spools[node, spool_id] = spool

    def _remember(self, node: str, spool_id: str, number: int, digest: str) -> None:
        spool = self._spools.get((node, spool_id))
        if spool is None:
            spool = self._spools[node, spool_id] = _Spool(Ranges(), OrderedDict())
        spool.digests[number] = digest
        while len(spool.digests) > _RECENT:
            spool.digests.popitem(last=False)


def _islands(read: duckdb.DuckDBPyConnection, node: str, spool_id: str) -> list[tuple[int, int]]:
    found = read.execute(
        "SELECT min(number), max(number) FROM ("
        "SELECT number, number::HUGEINT - row_number() OVER (ORDER BY number) AS island FROM ("
        "SELECT DISTINCT number FROM live.ledger WHERE node = ? AND spool_id = ?)) "
        "GROUP BY island ORDER BY 1",
        [node, spool_id],
    ).fetchall()
    return [(low, high) for low, high in found]
