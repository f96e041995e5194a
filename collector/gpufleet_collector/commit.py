"""One transaction for many agents: rows, events, inventory, ledger and what was put into quarantine.

`Commits.commit` takes what streams brought and says what each stream may be told. Everything kept in memory
about agents (who they are, which batches are in, their clocks) mirrors a table, changes in the transaction
that changes the table, and is read again from it when that transaction fails.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import duckdb
import msgspec
import numpy as np

from gpufleet.event import COLLECTOR_KINDS, KINDS
from gpufleet.metric import Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import MAX_STRING_BYTES
from gpufleet_collector.capability import Capabilities, Change
from gpufleet_collector.clock import Clocks, Receipt
from gpufleet_collector.decode import (
    MAX_FAULTS,
    NEWEST_US,
    OLDEST_US,
    Entry,
    Fault,
    Layout,
    Opened,
    Shape,
    When,
    join,
    open_body,
)
from gpufleet_collector.frame import Frame
from gpufleet_collector.identity import Alive, Claim, Decision, Identities
from gpufleet_collector.inventory_rows import Changes, Inventories
from gpufleet_collector.jsontext import is_shallow
from gpufleet_collector.ledger import Ledger
from gpufleet_collector.records import (
    EventRow,
    FaultRow,
    LedgerRow,
    write_changes,
    write_events,
    write_faults,
    write_intervals,
    write_ledger,
)
from gpufleet_collector.state import State
from gpufleet_collector.store import Column, Store, StoreBroken

log = logging.getLogger(__name__)

MAX_EVENTS = 8192
"""Of one body."""

PAUSES_S = (0.1, 0.4, 1.0)
"""Before a commit that failed through no fault of what it holds is tried again."""

_LANES = (pb.LANE_LIVE, pb.LANE_BACKFILL)
_TOLD_EVERY_US = 600_000_000
_MAX_SHAPES = 4096
_MAX_ODD_DETAIL = 1000
_OBJECT = msgspec.json.Decoder(dict[str, object])


class Session:
    """One agent's stream as the committer sees it; `claim` and `hello` come from the stream."""

    def __init__(self, claim: Claim, hello: "Hello") -> None:
        self.claim = claim
        self.hello = hello
        self.node = ""
        """As filed; empty until its hello is in the store."""
        self.shapes: dict[str, Shape] = {}
        self.open = True
        """False once the stream has ended or a newer one took its place."""


@dataclass(slots=True)
class Hello:
    """What an agent says first.

    Attributes:
        received: When it came.
        sent_at_us: Its wall clock at sending.
        sent_mono_us: Its boot-time clock at sending.
        probes: name -> (interval, columns).
        faults: What was wrong with other descriptors.
        inventory: As sent; None = not sent.
        spool_batches: As sent.
    """

    received: Receipt
    sent_at_us: int
    sent_mono_us: int
    probes: dict[str, tuple[float, list[Column]]]
    faults: list[Fault]
    inventory: pb.Inventory | None
    spool_batches: int


@dataclass(slots=True)
class Batch:
    """One batch that came over a stream."""

    session: Session
    lane: int
    number: int
    body: bytes
    sent_mono_us: int
    received: Receipt


@dataclass(frozen=True, slots=True)
class Denial:
    """An agent that was refused: goes to `audit`."""

    at_us: int
    actor: str
    source: str
    target: str
    reason: str


Item = Session | Batch | Denial
"""A Session among the items is its hello."""


@dataclass(slots=True)
class Outcome:
    """What streams may be told once the commit is done.

    Attributes:
        welcome: Sessions whose hello is in the store; their `node` is set.
        replaced: Sessions whose place a newer stream took.
        refused: Sessions whose certificate does not allow what their hello says, and why.
        acks: session -> lane -> numbers that are in the store for good.
        rows: Rows stored.
    """

    welcome: list[Session] = field(default_factory=list)
    replaced: list[Session] = field(default_factory=list)
    refused: dict[Session, str] = field(default_factory=dict)
    acks: dict[Session, dict[int, list[int]]] = field(default_factory=dict)
    rows: int = 0

    def ack(self, batch: Batch) -> None:
        """This batch needs not be sent again."""
        self.acks.setdefault(batch.session, {}).setdefault(batch.lane, []).append(batch.number)


@dataclass(slots=True)
class _Work:
    """Everything one transaction writes, collected before it does."""

    outcome: Outcome = field(default_factory=Outcome)
    events: list[EventRow] = field(default_factory=list)
    ledger: list[LedgerRow] = field(default_factory=list)
    faults: list[FaultRow] = field(default_factory=list)
    changes: list[tuple[int, Change]] = field(default_factory=list)
    intervals: dict[tuple[str, str], float] = field(default_factory=dict)
    inventory: Changes = field(default_factory=Changes)
    entries: dict[Layout, tuple[Shape, list[Entry]]] = field(default_factory=dict)
    heard: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)
    altered: bool = False


class Commits:
    """Writes what agents send. One thread uses it."""

    def __init__(self, store: Store, state: State) -> None:
        self._store = store
        self._state = state
        self._identities = Identities()
        self._ledger = Ledger()
        self._clocks = Clocks()
        self._capabilities = Capabilities()
        self._inventories = Inventories()
        self._sessions: dict[str, Session] = {}
        self._received: dict[str, int] = {}
        self._intervals: dict[tuple[str, str], float] = {}
        self._untold: dict[str, tuple[int, int]] = {}
        self._shapes: dict[tuple[str, tuple[Column, ...], tuple[tuple[str, str], ...]], Shape] = {}
        self.load()

    def load(self) -> None:
        """Read from the store what memory mirrors.

        Raises:
            StoreBroken: The file is damaged: `Store.reopen` begins a new one.
        """
        try:
            self._load()
        except duckdb.Error as error:
            if self._store.spoiled(error):
                raise StoreBroken(self._store.broken) from error
            raise

    def _load(self) -> None:
        with self._store.reader() as read:
            self._identities.load(read)
            self._ledger.load(read)
            self._clocks.load(read)
            self._capabilities.load(read)
            self._inventories.load(read)
            rows = read.execute(
                "SELECT node, epoch_us(max(received_at)) FROM live.ledger GROUP BY node"
            ).fetchall()
            for node, received_us in rows:
                self._received[node] = max(self._received.get(node, 0), received_us)
            rows = read.execute("SELECT node, probe, interval_s FROM live.probe").fetchall()
            self._intervals = {(node, probe): interval for node, probe, interval in rows}
            self._state.load(read)

    def commit(self, items: Sequence[Item]) -> Outcome:
        """Store everything, in one transaction where possible; then memory, then the outcome.

        A batch that the engine refuses for what it holds goes to quarantine alone: the others are stored
        without it. An engine without memory, or one that lost a race, is asked again, and nothing is
        acknowledged on its word.

        Raises:
            StoreBroken: Nothing is known about any of it. `load` after `Store.reopen`, then commit again: the
                ledger knows what had been stored.
        """
        try:
            return self._patiently(items, {})
        except StoreBroken:
            raise
        except Exception:
            log.exception("commit of %d items failed; each is tried alone", len(items))
            return self._one_by_one(items)

    def _patiently(self, items: Sequence[Item], poison: Mapping[int, str]) -> Outcome:
        """Commit; again after a pause while the failure says nothing about the items.

        Raises:
            StoreBroken: It went on failing.
            Exception: The items are what is wrong.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                return self._commit(items, poison)
            except StoreBroken:
                raise
            except Exception as error:
                if not _is_circumstance(error):
                    self.load()
                    raise
                if pause_s is None:
                    self._store.give_up(error)
                    raise StoreBroken(self._store.broken) from error
                log.warning("commit of %d items failed, is tried again: %s", len(items), error)
                time.sleep(pause_s)
                self.load()
        raise AssertionError

    def _one_by_one(self, items: Sequence[Item]) -> Outcome:
        whole = Outcome()
        for item in items:
            try:
                part = self._patiently([item], {})
            except StoreBroken:
                raise
            except Exception as alone:
                if not isinstance(item, Batch):
                    log.exception("a hello could not be stored")
                    if isinstance(item, Session):
                        whole.replaced.append(item)
                    continue
                part = self._patiently([item], {id(item): f"{type(alone).__name__}: {alone}"})
            whole.welcome += part.welcome
            whole.replaced += part.replaced
            whole.refused.update(part.refused)
            whole.rows += part.rows
            for session, lanes in part.acks.items():
                for lane, numbers in lanes.items():
                    whole.acks.setdefault(session, {}).setdefault(lane, []).extend(numbers)
        return whole

    def _commit(self, items: Sequence[Item], poison: Mapping[int, str]) -> Outcome:
        work = _Work()
        with self._store.transaction() as write:
            for item in items:
                if isinstance(item, Session):
                    self._hello(write, item, work)
            self._identities.flush(write)
            write_intervals(write, work.intervals)
            self._denials(write, [item for item in items if isinstance(item, Denial)])
            batches = [item for item in items if isinstance(item, Batch)]
            when = self._open(write, batches, poison, work)
            self._rows(write, work, when)
            self._tell_faults(work)
            write_events(write, work.events)
            write_ledger(write, work.ledger)
            write_faults(write, work.faults)
            write_changes(write, work.changes)
            work.inventory.write(write)
        for row in work.ledger:
            self._ledger.add(row.node, row.spool_id, row.number, row.digest)
        for session in work.outcome.replaced:
            session.open = False
        for done in work.after:
            done()
        for node, (received_us, offset_s) in work.heard.items():
            self._state.received(node, received_us, offset_s, None)
        if work.altered:
            self._store.checkpoint()
        return work.outcome

    def alive(self, node: str) -> Alive | None:
        """Whether a filed node is here, and since when not."""
        session = self._sessions.get(node)
        received = self._received.get(node)
        if session is not None and session.open:
            return Alive(True, session.claim.boot_id, received or 0)
        return Alive(False, "", received) if received is not None else None

    def _hello(self, write: duckdb.DuckDBPyConnection, session: Session, work: _Work) -> None:
        hello, claim = session.hello, session.claim
        at_us = hello.received.wall_us
        refused = self._identities.refused(claim, self.alive)
        if refused:
            session.open = False
            work.outcome.refused[session] = refused
            return
        decision = self._identities.decide(claim, self.alive, at_us)
        self._identities.store(write, decision)
        node = decision.machine.node
        if decision.before:
            self._rename(decision, work, at_us)
        if decision.conflict:
            other = decision.machine.conflict
            log.warning("%s: is filed as %s: %s runs under that name or machine id", claim.name, node, other)
            detail = _json({"claimed": claim.name, "machine_id": claim.machine_id, "with": other})
            message = f"two machines use the name {claim.name} or one machine id: {node} and {other}"
            work.events.append(
                EventRow(
                    at_us, at_us, node, claim.boot_id, "identity_conflict", message=message, detail=detail
                )
            )
        session.node = node
        self._clocks.seen(node, claim.boot_id, hello.sent_mono_us, hello.received)
        self._describe(write, session, work)
        if hello.inventory is not None:
            offset_us = self._clocks.offset_us(
                node, claim.boot_id, hello.sent_at_us, hello.sent_mono_us, hello.received
            )
            read_us = _plausible(hello.inventory.ts_us + offset_us, at_us)
            for fault in self._inventories.take(node, hello.inventory, read_us, work.inventory):
                work.faults.append(FaultRow(at_us, node, claim.spool_id, 0, fault))
        old = self._sessions.pop(decision.before or node, None)
        if old is not None and old is not session:
            old.node = node  # what it brought and is not stored yet belongs to this machine
            work.outcome.replaced.append(old)
        self._sessions[node] = session
        self._received[node] = max(at_us, self._received.get(node, 0))
        work.outcome.welcome.append(session)
        work.after.append(
            lambda: self._state.hello(
                node, decision.before, claim.boot_id, claim.agent_version, hello.spool_batches, at_us
            )
        )

    def _rename(self, decision: Decision, work: _Work, at_us: int) -> None:
        before, machine = decision.before, decision.machine
        log.warning("%s: is called %s from now on", before, machine.node)
        self._identities.follow(before, machine.node)
        self._ledger.rename(before, machine.node, machine.spool_id)
        self._clocks.rename(before, machine.node)
        self._capabilities.rename(before, machine.node)
        self._inventories.rename(before, machine.node)
        work.inventory.rename(before, machine.node)
        for intervals in (self._intervals, work.intervals):
            for key in [key for key in intervals if key[0] == before]:
                intervals[machine.node, key[1]] = intervals.pop(key)
        detail = _json({"before": before, "after": machine.node})
        work.events.append(
            EventRow(at_us, at_us, machine.node, machine.boot_id, "renamed",
                   message=f"{before} is called {machine.node} now", detail=detail)
        )  # fmt: skip

    def _describe(self, write: duckdb.DuckDBPyConnection, session: Session, work: _Work) -> None:
        """Make the tables and columns that the agent's probes need."""
        at_us = session.hello.received.wall_us
        faults = list(session.hello.faults)
        session.shapes = {}
        for probe, (interval, columns) in session.hello.probes.items():
            refused = self._store.refused(probe, columns)
            faults += [Fault(probe, metric, reason, 1) for metric, reason in refused.items()]
            if "" in refused:
                continue
            kept = [column for column in columns if column.name not in refused]
            work.altered |= self._store.ensure_probe(write, probe, kept)
            session.shapes[probe] = self._shape(probe, columns, refused)
            known = self._intervals.get((session.node, probe))
            if known is None:
                work.intervals[session.node, probe] = interval
            elif known != interval:
                work.intervals.pop((session.node, probe), None)
                write.execute("DELETE FROM live.probe WHERE node = ? AND probe = ?", [session.node, probe])
                work.intervals[session.node, probe] = interval
            self._intervals[session.node, probe] = interval
        for fault in faults[:MAX_FAULTS]:
            work.faults.append(FaultRow(at_us, session.node, session.claim.spool_id, 0, fault))

    def _shape(self, probe: str, columns: list[Column], refused: dict[str, str]) -> Shape:
        """One object for all agents that describe a probe alike: their rows are inserted together."""
        key = (probe, tuple(columns), tuple(sorted(refused.items())))
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = Shape(probe, columns, refused)
        return shape

    @staticmethod
    def _denials(write: duckdb.DuckDBPyConnection, denials: Iterable[Denial]) -> None:
        for denial in denials:
            write.execute(
                "INSERT INTO live.audit VALUES (make_timestamp(?), ?, ?, 'hello', ?, NULL, ?)",
                [denial.at_us, denial.actor, denial.source, denial.target, f"denied: {denial.reason}"],
            )

    def _open(
        self,
        write: duckdb.DuckDBPyConnection,
        batches: Sequence[Batch],
        poison: Mapping[int, str],
        work: _Work,
    ) -> list[When]:
        """Look every batch up, open it, judge its clock. Returns the times of those in `work.ledger`."""
        when: list[When] = []
        fresh: dict[tuple[str, str, int], str] = {}
        for batch in batches:
            claim, node = batch.session.claim, batch.session.node
            key = (node, claim.spool_id, batch.number)
            digest = blake2b(batch.body, digest_size=8).hexdigest()
            self._clocks.seen(node, claim.boot_id, batch.sent_mono_us, batch.received)
            received_us = self._received[node] = max(batch.received.wall_us, self._received.get(node, 0) + 1)
            work.outcome.ack(batch)
            if key in fresh or self._ledger.known(*key):
                stored = fresh.get(key) or self._ledger.digest(write, *key)
                if stored is not None and stored != digest:
                    self._conflict(batch, received_us, stored, digest, work)
                work.heard.setdefault(node, (received_us, None))
                continue
            fresh[key] = digest
            place = len(work.ledger)
            if id(batch) in poison:
                opened = Opened(faults=[Fault("", "", "refused_by_store", 1, poison[id(batch)][:200])])
            elif batch.number == 0 or batch.lane not in _LANES:
                reason = "bad_lane" if batch.number else "bad_number"
                opened = Opened(faults=[Fault("", "", reason, 1, f"lane {batch.lane}")])
            else:
                opened = open_body(batch.body, place, batch.session.shapes)
            boot_id = opened.boot_id or claim.boot_id
            offset_us = self._clocks.offset_us(
                node, boot_id, opened.sealed_at_us, opened.sealed_mono_us, batch.received
            )
            when.append(When(offset_us, received_us))
            row = LedgerRow(
                node, claim.spool_id, batch.number, digest, boot_id, offset_us, received_us, batch.lane
            )
            work.ledger.append(row)
            running = boot_id == claim.boot_id
            work.heard[node] = (received_us, offset_us / 1e6 if running else None)
            if running and self._clocks.news(node, offset_us):
                work.events.append(_clock_skew(row))
            self._take(opened, work, row)
        return when

    def _conflict(self, batch: Batch, received_us: int, stored: str, digest: str, work: _Work) -> None:
        claim, node = batch.session.claim, batch.session.node
        work.events.append(
            EventRow(
                received_us,
                received_us,
                node,
                claim.boot_id,
                "batch_conflict",
                code=str(batch.number),
                message=f"batch {batch.number} came again with other content: not stored",
                detail=_json(
                    {"number": batch.number, "spool_id": claim.spool_id, "stored": stored, "sent": digest}
                ),
            )
        )

    def _take(self, opened: Opened, work: _Work, row: LedgerRow) -> None:
        """Sort what a body holds to what will be written."""
        for shape, layout, entry in opened.entries:
            work.entries.setdefault(layout, (shape, []))[1].append(entry)
            lacks = shape.lacks(self._store.tables.get(shape.probe, {}))
            for change in self._capabilities.changes(row.node, shape, layout, entry, lacks):
                work.changes.append((row.received_us, change))
        faults = opened.faults
        if opened.inventory is not None:
            at_us = _plausible(opened.inventory.ts_us + row.offset_us, row.received_us)
            faults += self._inventories.take(row.node, opened.inventory, at_us, work.inventory)
        for event in opened.events[:MAX_EVENTS]:
            fault = _event_fault(event, row)
            if fault is not None:
                faults.append(fault)
                continue
            detail, odd = _detail(event.detail)
            if odd:
                faults.append(Fault("event", "detail", odd, 1, event.detail[:200]))
            work.events.append(_event_row(event, row, detail))
        if len(opened.events) > MAX_EVENTS:
            faults.append(Fault("event", "", "too_many_events", len(opened.events) - MAX_EVENTS))
        for fault in faults:
            work.faults.append(FaultRow(row.received_us, row.node, row.spool_id, row.number, fault))

    def _rows(self, write: duckdb.DuckDBPyConnection, work: _Work, when: Sequence[When]) -> None:
        """Insert the rows of every probe and layout."""
        stored = np.zeros(len(work.ledger), np.int64)
        received = np.array([row.received_us for row in work.ledger], np.int64)
        for layout, (shape, entries) in work.entries.items():
            frame = Frame()
            joined = join(shape, layout, entries, [when[entry.batch] for entry in entries], frame.words)
            for place, fault in joined.faults:
                row = work.ledger[place]
                work.faults.append(FaultRow(row.received_us, row.node, row.spool_id, row.number, fault))
            if not joined.ts.size:
                continue
            nodes = np.zeros(len(work.ledger), np.uint32)
            boots = np.zeros(len(work.ledger), np.uint32)
            for entry in entries:
                row = work.ledger[entry.batch]
                nodes[entry.batch] = frame.words.code(row.node)
                boots[entry.batch] = frame.words.code(row.boot_id)
            frame.times("ts", joined.ts)
            frame.times("received_at", received[joined.batch])
            frame.codes("node", nodes[joined.batch])
            frame.codes("boot_id", boots[joined.batch])
            for column, values, valid in joined.columns:
                if column.type is Type.STRING:
                    frame.codes(column.name, values)
                else:
                    frame.numbers(column.name, values, valid)
            frame.insert(write, f'live."{shape.probe}"')
            stored += np.bincount(joined.batch, minlength=len(work.ledger))
            if shape.probe == "gpu":
                self._cards(layout, entries, work)
        for row, rows in zip(work.ledger, stored.tolist(), strict=True):
            row.rows = rows
        work.outcome.rows = int(stored.sum())

    def _cards(self, layout: Layout, entries: Sequence[Entry], work: _Work) -> None:
        texts = [column.name for column in layout.columns if column.type.name == "STRING"]
        if "gpu_uuid" not in texts:
            return
        text = texts.index("gpu_uuid")

        def seen() -> None:
            for entry in entries:
                row = work.ledger[entry.batch]
                self._state.seen(entry.dictionaries[text], row.node, row.received_us)

        work.after.append(seen)

    def _tell_faults(self, work: _Work) -> None:
        """An event when an agent begins to send what cannot be stored; then at most one per ten minutes."""
        cells: dict[str, int] = defaultdict(int)
        last: dict[str, FaultRow] = {}
        for row in work.faults:
            cells[row.node] += row.fault.cells
            last[row.node] = row
        for node, count in cells.items():
            row = last[node]
            told_us, untold = self._untold.get(node, (-_TOLD_EVERY_US, 0))
            if row.received_us - told_us < _TOLD_EVERY_US:
                self._untold[node] = (told_us, untold + count)
                continue
            self._untold[node] = (row.received_us, 0)
            session = self._sessions.get(node)
            where = ".".join(part for part in (row.fault.probe, row.fault.metric) if part) or "batch"
            work.events.append(
                EventRow(
                    row.received_us,
                    row.received_us,
                    node,
                    session.claim.boot_id if session else "",
                    "quarantined",
                    code=row.fault.reason,
                    count=untold + count,
                    message=f"{untold + count} cells or rows not stored, last {where}: {row.fault.reason}",
                )
            )

    def forget(self) -> list[Session]:
        """The store is a new one: no session's hello is in it. Returns those that must say hello again."""
        sessions = [session for session in self._sessions.values() if session.open]
        self._sessions = {}
        for session in sessions:
            session.open = False
            self._state.gone(session.node)
        return sessions

    def tell(self, kind: str, at_us: int, message: str) -> None:
        """Write an event of the collector itself."""
        with self._store.transaction() as write:
            write_events(write, [EventRow(at_us, at_us, "", "", kind, message=message)])

    def gone(self, session: Session) -> None:
        """A stream ended."""
        session.open = False
        if session.node and self._sessions.get(session.node) is session:
            self._state.gone(session.node)


_OF_CONTENT = (duckdb.DataError, duckdb.IntegrityError, duckdb.ProgrammingError, duckdb.NotSupportedError)
"""What the engine raises about a statement or a value."""

_MISUSE: type[Exception] | tuple[()] = getattr(duckdb, "ResourceInUseException", ())
"""2.0: a connection used wrongly; waiting does not cure it."""

_OF_MEMORY = ("Out of Memory", "failed to offload", "could not allocate")


def _is_circumstance(error: Exception) -> bool:
    """Whether a failure may pass with the same items: no memory, no disk, a race, an interruption."""
    if isinstance(error, MemoryError | OSError):
        return True
    if not isinstance(error, duckdb.Error) or isinstance(error, _MISUSE):
        return False
    return not isinstance(error, _OF_CONTENT) or any(words in str(error) for words in _OF_MEMORY)


def _plausible(at_us: int, received_us: int) -> int:
    """The time an agent names, or that of receipt when it cannot be believed."""
    return at_us if received_us - OLDEST_US <= at_us <= received_us + NEWEST_US else received_us


def _clock_skew(row: LedgerRow) -> EventRow:
    seconds = row.offset_us / 1e6
    side = "behind" if seconds > 0 else "ahead"
    return EventRow(
        row.received_us,
        row.received_us,
        row.node,
        row.boot_id,
        "clock_skew",
        message=f"clock is {abs(seconds):.1f} s {side}" if seconds else "clock is right again",
        detail=_json({"offset_s": seconds}),
    )


def _event_fault(event: pb.Event, row: LedgerRow) -> Fault | None:
    """Why an agent's event cannot be stored."""
    reason = metric = ""
    ts_us = event.ts_us + row.offset_us
    if event.kind not in KINDS or event.kind in COLLECTOR_KINDS:
        reason, metric = "bad_kind", "kind"
    elif not row.received_us - OLDEST_US <= ts_us <= row.received_us + NEWEST_US:
        reason, metric = "time", "ts"
    else:
        for name, text, limit in (
            ("entity", event.entity, 512),
            ("code", event.code, 256),
            ("message", event.message, MAX_STRING_BYTES),
            ("detail", event.detail, 4 * MAX_STRING_BYTES),
        ):
            if len(text) > limit or len(text.encode()) > limit:
                reason, metric = "too_long", name
    if not reason:
        return None
    return Fault("event", metric, reason, 1, f"{event.kind[:40]} {event.message[:150]}")


def _detail(text: str) -> tuple[str | None, str]:
    """(what is stored as an event's detail, what is wrong with what was sent)."""
    if not text:
        return None, ""
    if not is_shallow(text):
        reason = "too_deep"
    else:
        try:
            _OBJECT.decode(text)
        except (msgspec.DecodeError, RecursionError, ValueError):
            reason = "not_an_object"
        else:
            return text, ""
    return _json({"text": text[:_MAX_ODD_DETAIL]}), reason


def _event_row(event: pb.Event, row: LedgerRow, detail: str | None) -> EventRow:
    return EventRow(
        event.ts_us + row.offset_us,
        row.received_us,
        row.node,
        row.boot_id,
        event.kind,
        event.entity or "node:",
        event.code,
        max(event.count, 1),
        event.message,
        detail,
        event.mono_us,
    )


def _json(detail: Mapping[str, str | int | float]) -> str:
    return msgspec.json.encode(detail).decode()
