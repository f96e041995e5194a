"""What the collector knows about its agents right now, in memory: for the status screen and for readiness.

Changed after each commit, read by other threads at any time; a restart fills it by one time-bounded query.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import duckdb

_EPOCH = datetime(1970, 1, 1)


def from_us(micros: int) -> datetime:
    """Naive UTC from microseconds since the epoch."""
    return _EPOCH + timedelta(microseconds=micros)


def now_us() -> int:
    """The collector's wall clock, microseconds since the epoch, UTC."""
    now = datetime.now(UTC).replace(tzinfo=None) - _EPOCH
    return (now.days * 86400 + now.seconds) * 1_000_000 + now.microseconds


@dataclass(frozen=True, slots=True)
class NodeState:
    """One agent.

    Attributes:
        node: As filed.
        connected: It has a stream.
        received_at: When it was last heard of, collector's clock, naive UTC; None = never.
        offset_s: What is added to its clock; 0 within tolerance.
        boot_id: Of its last hello.
        agent_version: Of its last hello.
        spool_batches: Batches it had not got rid of at its last hello; None = not connected since the start.
        paused: Why the collector does not read from it; empty = it does.
    """

    node: str
    connected: bool = False
    received_at: datetime | None = None
    offset_s: float = 0.0
    boot_id: str = ""
    agent_version: str = ""
    spool_batches: int | None = None
    paused: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Where and when a card last had a row, collector's clock, naive UTC."""

    node: str
    received_at: datetime


class State:
    """All agents and cards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeState] = {}
        self._cards: dict[str, Seen] = {}
        self._paused = ""
        self._not_ready: dict[str, str] = {"start": "starting"}

    def load(self, read: duckdb.DuckDBPyConnection, lookback: timedelta = timedelta(minutes=10)) -> None:
        """Fill from the store; what is known already stays."""
        rows = read.execute(
            "SELECT n.node, n.boot_id, n.agent_version, l.received_at, l.offset_s "
            "FROM live.node n LEFT JOIN ("
            "SELECT node, max(received_at) AS received_at, arg_max(offset_s, received_at) AS offset_s "
            "FROM live.ledger GROUP BY node) l USING (node)"
        ).fetchall()
        cards: list[tuple[str, str, datetime]] = []
        has_gpu = read.execute(
            "SELECT count(*) FROM information_schema.columns "
            "WHERE table_schema = 'live' AND table_name = 'gpu' AND column_name = 'gpu_uuid'"
        ).fetchone()
        if has_gpu and has_gpu[0]:
            cards = read.execute(
                "SELECT gpu_uuid, arg_max(node, received_at), max(received_at) FROM live.gpu "
                "WHERE gpu_uuid IS NOT NULL "
                "AND received_at > (SELECT max(received_at) FROM live.ledger) - ? GROUP BY 1",
                [lookback],
            ).fetchall()
        with self._lock:
            for node, boot_id, version, received_at, offset_s in rows:
                state = NodeState(node, False, received_at, offset_s or 0.0, boot_id, version)
                self._nodes.setdefault(node, state)
            for uuid, node, received_at in cards:
                self._cards.setdefault(uuid, Seen(node, received_at))

    def nodes(self) -> dict[str, NodeState]:
        """A copy of every agent's state, by node."""
        with self._lock:
            return dict(self._nodes)

    def node(self, node: str) -> NodeState | None:
        """One agent's state."""
        with self._lock:
            return self._nodes.get(node)

    def last_seen(self, gpu_uuid: str) -> Seen | None:
        """When this card last had a row; None = not lately."""
        with self._lock:
            return self._cards.get(gpu_uuid)

    @property
    def paused(self) -> str:
        """Why nothing is read from agents; empty = it is."""
        return self._paused

    @property
    def not_ready(self) -> str:
        """Why the collector is not ready, in one line; empty = ready."""
        with self._lock:
            return "; ".join(self._not_ready.values())

    def set_ready(self, part: str, reason: str) -> None:
        """One part of the collector works (`reason` empty) or does not."""
        with self._lock:
            if reason:
                self._not_ready[part] = reason
            else:
                self._not_ready.pop(part, None)

    def pause(self, reason: str) -> None:
        """Nothing is read any more for this reason; empty = it is again."""
        with self._lock:
            self._paused = reason
            self._nodes = {node: replace(state, paused=reason) for node, state in self._nodes.items()}

    def hello(
        self, node: str, before: str, boot_id: str, version: str, spool_batches: int, at_us: int
    ) -> None:
        """An agent has a stream under this name."""
        with self._lock:
            was = self._nodes.pop(before, None) if before else None
            offset_s = (was or self._nodes.get(node) or NodeState(node)).offset_s
            self._nodes[node] = NodeState(
                node, True, from_us(at_us), offset_s, boot_id, version, spool_batches, self._paused
            )
            if before:
                for uuid, seen in self._cards.items():
                    if seen.node == before:
                        self._cards[uuid] = Seen(node, seen.received_at)

    def gone(self, node: str) -> None:
        """Its stream ended."""
        with self._lock:
            state = self._nodes.get(node)
            if state is not None:
                self._nodes[node] = replace(state, connected=False)

    def received(self, node: str, at_us: int, offset_s: float | None, spool_batches: int | None) -> None:
        """A batch of this node is in the store; None = says nothing about it."""
        with self._lock:
            state = self._nodes.get(node)
            if state is not None:
                self._nodes[node] = replace(
                    state,
                    received_at=from_us(at_us),
                    offset_s=state.offset_s if offset_s is None else offset_s,
                    spool_batches=state.spool_batches if spool_batches is None else spool_batches,
                )

    def seen(self, uuids: Iterable[str], node: str, at_us: int) -> None:
        """These cards had a row."""
        seen = Seen(node, from_us(at_us))
        with self._lock:
            for uuid in uuids:
                self._cards[uuid] = seen
