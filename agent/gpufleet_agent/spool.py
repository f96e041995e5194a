"""What is not acknowledged yet, on disk: one SQLite file between sealing and `push`.

A batch has a number from the moment it is put, and keeps it until the collector says that it is stored.
Numbers are never used twice under one spool id, also not after a power cut that took the last writes with it.

Nothing here raises once the spool is open: a disk that fails or is full costs old samples, then memory
(bounded), never the agent.
"""

import fcntl
import logging
import os
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from gpufleet_agent import probe

log = logging.getLogger(__name__)

RESERVE = 100_000
"""Numbers set aside durably at a time; after an unclean end counting goes on behind them."""

ROW_OVERHEAD_BYTES = 512
"""What a batch costs on disk beside its body, generously."""

MEMORY_BYTES = 16 << 20
"""Bodies held in memory while the disk takes none."""

SPARE_PAGES = 1024
"""Free pages kept in the file: they are what a full disk cannot take away."""

EVENT_AGE_FACTOR = 7
"""Batches with events are kept this many times longer than samples; space permitting."""

_SCHEMA = 1
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_NO_SPOOL = {*_BROKEN, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH}
_CHECK_BYTES = 32 << 20


class SpoolError(Exception):
    """The spool cannot be opened; the text says where and why."""


class SpoolHeld(SpoolError):
    """Another agent has this spool open; `pid` is its process (0 = it did not say)."""

    def __init__(self, pid: int, path: Path) -> None:
        super().__init__(f"{path}: another agent has this spool open (pid {pid}): stop it first")
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Clock:
    """The agent's clocks. Ages are counted by `mono_us`, which nobody steps.

    Attributes:
        boot_id: Of the running boot; `mono_us` starts anew with it.
        wall_us: Wall clock, microseconds since the epoch.
        mono_us: Boot-time clock, microseconds.
    """

    boot_id: str
    wall_us: Callable[[], int] = probe.wall_us
    mono_us: Callable[[], int] = probe.mono_us


class Stored(NamedTuple):
    """A batch in the spool. `put_us` is its time on the spool's own clock (`Spool.now_us`)."""

    number: int
    event: bool
    put_us: int
    body: bytes


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """How full the spool is.

    Attributes:
        batches: Not yet acknowledged.
        bytes: Of their bodies.
        oldest_s: Time the host was up since the oldest was put; 0 when empty.
        dropped_total: Dropped unsent since the spool was made.
    """

    batches: int
    bytes: int
    oldest_s: float
    dropped_total: int


class Spool:
    """One open spool file. Use `Spool.open`; not for more than one thread."""

    def __init__(self, path: Path, max_bytes: int, max_age_s: float, clock: Clock, lock: int) -> None:
        self.spool_id = ""
        """Random, made with the file; another one means another series of numbers."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_us = int(max_age_s * 1e6)
        self.clock = clock
        self._lock = lock
        self._db = sqlite3.connect(":memory:")  # until the file is open
        self._next = 1
        self._reserved = 0
        self._count = 0
        self._bytes = 0
        self._dropped = 0
        self._told = 0
        self._base_us = 0
        self._held: dict[int, Stored] = {}
        self._notes: dict[str, str] = {}
        self._gone: set[int] = set()
        self._aside: list[Path] = []
        self._failing = ""
        self._full = False

    @classmethod
    def open(cls, path: Path, *, max_bytes: int, max_age_s: float, clock: Clock) -> Self:
        """Open the spool at `path`, or make it; what cannot be read is moved aside (`take_moved_aside`).

        Raises:
            SpoolHeld: Another agent has it open.
            SpoolError: The place cannot be written.
        """
        lock = _take_lock(path)
        spool = cls(path, max_bytes, max_age_s, clock, lock)
        try:
            spool._start()
        except BaseException:
            spool._db.close()
            os.close(lock)
            raise
        return spool

    # ---- what push and the supervisor use

    def put(self, body: bytes, *, event: bool) -> int:
        """Keep `body` until it is deleted; its number, counting from 1. With `event` it is synced on return.

        When the spool is full the oldest samples make room (`trim` tells how many).
        """
        return self.put_all([body], event=event)[0]

    def put_all(
        self, bodies: Sequence[bytes], *, event: bool, notes: Mapping[str, str] | None = None
    ) -> list[int]:
        """Like `put`, for several at once, and texts of `get_meta` with them: all are kept, or none."""
        if self._next > self._reserved - RESERVE // 2:
            self._try(self._reserve)
        self._notes |= notes or {}
        numbers = self._keep(bodies, event, self.now_us())
        self._make_room()
        return numbers

    def oldest_first(
        self,
        after: int = 0,
        limit: int = 16,
        *,
        event: bool | None = None,
        since_us: int | None = None,
        before_us: int | None = None,
    ) -> list[Stored]:
        """At most `limit` batches with numbers above `after`, ascending.

        Args:
            after: The last number already seen.
            limit: How many at most.
            event: Only those with (without) events.
            since_us: Only those put at or after this time on the spool's clock.
            before_us: Only those put before it.
        """
        where, values = ["number > ?"], [after]
        for clause, value in (
            ("event = ?", event),
            ("put_us >= ?", since_us),
            ("put_us < ?", before_us),
        ):
            if value is not None:
                where.append(clause)
                values.append(int(value))
        found = self._read(
            f"where {' and '.join(where)} order by number limit ?", (*values, limit + len(self._gone))
        )
        found += [
            item
            for item in self._held.values()
            if item.number > after
            and (event is None or item.event == event)
            and (since_us is None or item.put_us >= since_us)
            and (before_us is None or item.put_us < before_us)
        ]
        return sorted(found)[:limit]

    def get(self, number: int) -> Stored | None:
        """The batch of that number, or None."""
        if number in self._held:
            return self._held[number]
        found = self._read("where number = ?", (number,))
        return found[0] if found else None

    def delete(self, numbers: Iterable[int]) -> None:
        """Forget these: the collector has them. Unknown numbers are ignored."""
        self._forget(numbers)
        self._try(lambda: None)

    def replace(self, number: int, bodies: Sequence[bytes]) -> list[int]:
        """Put `bodies` in the place of a batch that was too large, in one step; their numbers.

        They count as old as the one they replace.
        """
        old = self.get(number)
        if old is None:
            return []
        self._forget([number])
        return self._keep(bodies, old.event, old.put_us)

    def park(self, number: int) -> None:
        """Put a batch aside that can never be sent. The last 16 such are kept for people to look at."""
        item = self.get(number)
        if item is None:
            return
        self._forget([number])

        def write() -> None:
            self._db.execute("insert or replace into parked values (?, ?)", (number, item.body))
            self._db.execute(
                "delete from parked where number not in"
                " (select number from parked order by number desc limit 16)"
            )

        self._try(write)

    def pending(self) -> int:
        """Batches not yet acknowledged."""
        return self._count

    def first_since(self, put_us: int) -> int:
        """The smallest number of a batch put at or after `put_us`, else the next one to be given out."""
        numbers = [item.number for item in self._held.values() if item.put_us >= put_us]
        try:
            (first,) = self._db.execute(
                "select min(number) from batch where put_us >= ?", (put_us,)
            ).fetchone()
            numbers += [first] if first is not None else []
        except sqlite3.Error as error:
            self._failed(error)
        return min(numbers, default=self._next)

    def now_us(self) -> int:
        """The spool's clock: time the host was up while it held something, over reboots. Never stepped."""
        return self._base_us + max(0, self.clock.mono_us())

    def stats(self) -> SpoolStats:
        """How full it is."""
        times = [item.put_us for item in self._held.values()]
        try:
            (oldest,) = self._db.execute("select min(put_us) from batch").fetchone()
            times += [oldest] if oldest is not None else []
        except sqlite3.Error as error:
            self._failed(error)
        age_us = max(0, self.now_us() - min(times)) if times and self._count else 0
        return SpoolStats(self._count, self._bytes, age_us / 1e6, self._dropped)

    def trim(self) -> int:
        """Drop what is too old, give space back; how many batches were dropped since the last call.

        Housekeeping: call it every few seconds. The answer makes the event `spool_drop`.
        """
        if self._held or self._gone or self._notes:
            self._store([], durable=True)
        self._expire()
        self._make_room()
        dropped = self._dropped - self._told
        if dropped:
            self._told = self._dropped
            self.set_meta("told", str(self._told))
        self._try(self._shrink)
        return dropped

    def take_moved_aside(self) -> list[Path]:
        """Files that could not be read and were kept under another name; each is told once."""
        moved, self._aside = self._aside, []
        return moved

    def get_meta(self, key: str) -> str | None:
        """A text kept beside the batches."""
        if key in self._notes:
            return self._notes[key]
        try:
            row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        return str(row[0]) if row else None

    def set_meta(self, key: str, value: str) -> None:
        """Keep a text beside the batches, durably enough for a killed process."""
        self._try(lambda: self._put_meta(key, value))

    def close(self) -> None:
        """Close cleanly: the next start goes on counting where this one ended."""
        if self._lock < 0:
            return
        if self._held or self._gone or self._notes:
            self._store([], durable=True)
        if not self._held:
            self.set_meta("next", str(self._next))
        self._db.close()
        os.close(self._lock)
        self._lock = -1

    # ---- writing

    def _number(self, body: bytes, event: bool, put_us: int) -> Stored:
        """A batch with the next number; counted as ours from here on."""
        item = Stored(self._next, event, put_us, body)
        self._next += 1
        self._count += 1
        self._bytes += len(body)
        return item

    def _keep(self, bodies: Sequence[bytes], event: bool, put_us: int) -> list[int]:
        """Number and write; what the disk does not take stays in memory."""
        spool_id = self.spool_id
        items = [self._number(body, event, put_us) for body in bodies]
        if not self._store(items, durable=event):
            if self.spool_id != spool_id:  # the file was found broken just now, and a new one begun
                items = [self._number(body, event, self.now_us()) for body in bodies]
                if self._store(items, durable=event):
                    return [item.number for item in items]
            for item in items:
                self._hold(item)
        return [item.number for item in items]

    def _store(self, items: list[Stored], *, durable: bool) -> bool:
        """Write `items` and what memory still holds; on a full disk the oldest samples give their place."""
        held = list(self._held.values())

        def write() -> None:
            self._db.executemany(
                "insert or ignore into batch values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [self._row(item) for item in (*held, *items)],
            )
            for key, value in self._notes.items():
                self._put_meta(key, value)

        def tried() -> bool:
            return self._try(write, durable=durable or any(item.event for item in held))

        done = tried() or (self._full and self._free(held + items) and tried())
        if done:
            self._notes.clear()
            for item in held:
                self._held.pop(item.number, None)
        return done

    def _row(self, item: Stored) -> tuple[int | str | bytes, ...]:
        return (
            item.number,
            int(item.event),
            item.put_us,
            self.clock.boot_id,
            self.clock.mono_us(),
            self.clock.wall_us(),
            len(item.body),
            zlib.crc32(item.body),
            item.body,
        )

    def _forget(self, numbers: Iterable[int]) -> None:
        """Stop counting these; rows of the file go at the next sweep."""
        wanted = set(numbers) - self._gone
        for number in wanted & self._held.keys():
            self._count -= 1
            self._bytes -= len(self._held.pop(number).body)
        for number in sorted(wanted):
            try:
                row = self._db.execute("select bytes from batch where number = ?", (number,)).fetchone()
            except sqlite3.Error as error:
                self._failed(error)
                return
            if row:
                self._gone.add(number)
                self._count -= 1
                self._bytes -= int(row[0])

    def _hold(self, item: Stored) -> None:
        """Keep a batch in memory until the disk takes it; beyond the bound the oldest samples go."""
        self._held[item.number] = item
        while sum(len(held.body) for held in self._held.values()) > MEMORY_BYTES:
            oldest = min(self._held.values(), key=lambda held: (held.event, held.number))
            self._forget([oldest.number])
            self._dropped += 1

    def _free(self, items: list[Stored]) -> bool:
        """The disk is full: make room inside the file, by old samples if need be."""
        try:
            self._db.execute("pragma wal_checkpoint(restart)").fetchall()
        except sqlite3.Error:
            return False
        return self._drop_oldest(sum(len(item.body) + ROW_OVERHEAD_BYTES for item in items) * 2, (0,))

    def _make_room(self) -> None:
        excess = self._bytes + self._count * ROW_OVERHEAD_BYTES - self._max_bytes
        if excess > 0:
            self._drop_oldest(excess, (0, 1))

    def _drop_oldest(self, room: int, events: tuple[int, ...]) -> bool:
        """Drop batches worth `room` bytes: oldest first, samples before events."""
        victims = []
        try:
            for event in events:
                for number, size in self._db.execute(
                    "select number, bytes from batch where event = ? order by number", (event,)
                ):
                    if room <= 0:
                        break
                    if number not in self._gone:
                        victims.append(int(number))
                        room -= int(size) + ROW_OVERHEAD_BYTES
        except sqlite3.Error as error:
            self._failed(error)
            return False
        return self._drop(victims)

    def _expire(self) -> None:
        """Drop samples past their age; events later: an outage must not eat the Xid that it began with."""
        victims = []
        try:
            for event, factor in ((0, 1), (1, EVENT_AGE_FACTOR)):
                oldest_us = self.now_us() - self._max_age_us * factor
                for number, put_us in self._db.execute(
                    "select number, put_us from batch where event = ? order by number", (event,)
                ):
                    if put_us >= oldest_us:
                        break
                    if number not in self._gone:
                        victims.append(int(number))
        except sqlite3.Error as error:
            self._failed(error)
            return
        self._drop(victims)

    def _drop(self, victims: list[int]) -> bool:
        if not victims:
            return False
        before = self._count
        self._forget(victims)
        self._dropped += before - self._count

        return self._try(lambda: self._put_meta("dropped", str(self._dropped)))

    def _shrink(self) -> None:
        free = int(self._db.execute("pragma freelist_count").fetchone()[0])
        if free > SPARE_PAGES:
            self._db.execute(f"pragma incremental_vacuum({min(free - SPARE_PAGES, 2048)})").fetchall()

    def _reserve(self) -> None:
        self._put_meta("reserved", str(self._next + RESERVE))
        self._reserved = self._next + RESERVE

    def _put_meta(self, key: str, value: str) -> None:
        self._db.execute("insert or replace into meta values (?, ?)", (key, value))

    def _try(self, write: Callable[[], object], *, durable: bool = False) -> bool:
        """Run `write` and the deletions still due as one transaction; False when the disk did not take it."""
        try:
            if durable:
                self._db.execute("pragma synchronous = full")
            self._db.execute("begin immediate")
            self._db.executemany("delete from batch where number = ?", [(number,) for number in self._gone])
            write()
            self._db.execute("commit")
        except sqlite3.Error as error:
            self._failed(error)
            return False
        finally:
            if durable:
                self._db.execute("pragma synchronous = normal")
        self._gone.clear()
        self._full = False
        if self._failing:
            log.info("spool %s: the disk takes writes again", self._path)
            self._failing = ""
        return True

    def _failed(self, error: sqlite3.Error) -> None:
        """The file refused something: note it; a broken file is moved aside and a new one begun."""
        if self._db.in_transaction:
            self._db.rollback()
        self._full = _code(error) == sqlite3.SQLITE_FULL
        if _code(error) in _BROKEN:
            self._begin_anew(error)
        elif str(error) != self._failing:
            self._failing = str(error)
            log.warning("spool %s: %s: keeping up to %d bytes in memory", self._path, error, MEMORY_BYTES)

    # ---- reading

    def _read(self, where: str, values: tuple[int, ...]) -> list[Stored]:
        """Batches of the file; one whose content changed on disk is dropped and counted."""
        try:
            rows = self._db.execute(f"select number, event, put_us, crc, body from batch {where}", values)
            found, damaged = [], []
            for number, event, put_us, crc, body in rows:
                if number in self._gone:
                    continue
                if isinstance(body, bytes) and isinstance(put_us, int) and zlib.crc32(body) == crc:
                    found.append(Stored(number, bool(event), put_us, body))
                else:
                    damaged.append(number)
        except sqlite3.Error as error:
            self._failed(error)
            return []
        if damaged:
            log.warning("spool %s: %d batches are damaged and dropped", self._path, len(damaged))
            self._drop(damaged)
        return found

    # ---- opening

    def _start(self) -> None:
        try:
            self._load()
        except (sqlite3.Error, _BadFileError) as error:
            code = _code(error)
            if code in _NO_SPOOL:
                self._begin_anew(error)
            elif code == sqlite3.SQLITE_FULL:
                self._in_memory(error)
            else:
                raise SpoolError(f"{self._path}: cannot open the spool: {error}") from error

    def _load(self) -> None:
        """Open the file, check it, and take up counting behind every number it may have given out."""
        self._db.close()
        self._db = _connect(str(self._path))
        _check(self._db, self._path)
        meta = dict(self._db.execute("select key, value from meta").fetchall())
        count, size, last = self._db.execute(
            "select count(*), coalesce(sum(bytes), 0), coalesce(max(number), 0) from batch"
        ).fetchone()
        try:
            given = int(meta["next"]) - 1 if "next" in meta else int(meta.get("reserved", 0))
            self._dropped, self._told = int(meta.get("dropped", 0)), int(meta.get("told", 0))
            self._count, self._bytes = int(count), int(size)
            self.spool_id = str(meta.get("spool_id", uuid.uuid4().hex))
        except ValueError as error:
            raise _BadFileError(str(error)) from error
        self._next = max(given, int(last)) + 1
        self._take_up_clock()
        self._db.execute("pragma synchronous = full")
        self._db.execute("begin immediate")
        self._put_meta("spool_id", self.spool_id)
        self._db.execute("delete from meta where key = 'next'")
        self._reserve()
        self._db.execute("commit")
        self._db.execute("pragma synchronous = normal")

    def _take_up_clock(self) -> None:
        """Go on with the spool's clock where the newest batch left it."""
        newest = self._db.execute(
            "select put_us, boot_id, mono_us from batch order by number desc limit 1"
        ).fetchone()
        self._base_us = 0
        if newest:
            put_us, boot_id, mono_us = newest
            if not (isinstance(put_us, int) and isinstance(mono_us, int)):
                raise _BadFileError("times are no numbers")
            self._base_us = put_us - mono_us if boot_id == self.clock.boot_id else put_us

    def _begin_anew(self, error: Exception) -> None:
        """Keep the broken file under another name and start a new spool with a new id."""
        self._db.close()
        held = list(self._held.values())
        try:
            aside = _move_aside(self._path)
            self._aside.append(aside)
            log.error("spool %s: cannot be read (%s): kept as %s, a new one begun", self._path, error, aside)
            self._load()
        except (OSError, sqlite3.Error, _BadFileError) as again:
            self._in_memory(again)
        self._held, self._gone = {}, set()
        for item in held:
            self._hold(self._number(item.body, item.event, self.now_us()))

    def _in_memory(self, error: Exception) -> None:
        """The disk takes no file at all: go on without one until the next start."""
        log.error("spool %s: %s: batches are kept in memory only", self._path, error)
        self._db.close()
        self._db = _connect(":memory:")
        self._max_bytes = min(self._max_bytes, MEMORY_BYTES)
        self.spool_id = uuid.uuid4().hex
        self._next, self._count, self._bytes, self._base_us = 1, 0, 0, 0
        self._try(self._reserve)


class _BadFileError(Exception):
    """The file is SQLite but not a spool, or not whole."""


def _code(error: Exception) -> int:
    """SQLite's primary result code; what is no spool counts as corrupt."""
    if isinstance(error, _BadFileError):
        return sqlite3.SQLITE_CORRUPT
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
    return sqlite3.SQLITE_CORRUPT if code == sqlite3.SQLITE_IOERR_SHORT_READ else code & 0xFF


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    try:
        db.execute("pragma auto_vacuum = incremental")
        db.execute("pragma journal_mode = wal").fetchall()
        db.execute("pragma synchronous = normal")
        db.execute("pragma cache_size = -512")  # KiB; batches are read once
        db.execute(f"pragma journal_size_limit = {8 << 20}").fetchall()
        version = db.execute("pragma user_version").fetchone()[0]
        if version == 0:
            db.executescript(_DDL)
        elif version != _SCHEMA:
            raise _BadFileError(f"version {version}, not {_SCHEMA}")
    except BaseException:
        db.close()
        raise
    return db


_DDL = f"""
begin;
create table batch (
    number integer primary key, event integer not null, put_us integer not null, boot_id text not null,
    mono_us integer not null, wall_us integer not null, bytes integer not null, crc integer not null,
    body blob not null
);
create index batch_order on batch (event, number, bytes, put_us);
create table parked (number integer primary key, body blob not null);
create table meta (key text primary key, value text not null);
pragma user_version = {_SCHEMA};
commit;
"""


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Whether the file is whole. A long one is not read through: READY must not wait for 512 MB."""
    db.execute("pragma wal_checkpoint(truncate)").fetchall()
    pages, size = (db.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "page_size"))
    on_disk = path.stat().st_size
    if on_disk < pages * size:
        raise _BadFileError(f"{on_disk} bytes, {pages * size} expected")
    if on_disk <= _CHECK_BYTES:
        found = db.execute("pragma quick_check(1)").fetchone()[0]
        if found != "ok":
            raise _BadFileError(str(found))


def _move_aside(path: Path) -> Path:
    """Rename the file and its companions to the first free `*.corrupt-<n>`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(aside.with_name(aside.name + suffix))
    return aside


def _take_lock(path: Path) -> int:
    """Hold `path`.lock while this process lives; the spool file itself is made if it is missing."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpoolError(f"{path}: cannot write the spool here: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        text = os.read(lock, 20).strip()
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise SpoolHeld(int(text) if text.isdigit() else 0, path) from error
        raise SpoolError(f"{lock_path}: cannot lock: {error.strerror}") from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, only the number is missing
    return lock
