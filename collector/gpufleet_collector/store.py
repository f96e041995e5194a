"""The one DuckDB file: opened here, written here, read through cursors from here.

Everything is written inside `transaction()`, one at a time, so that rows, events and the ledger commit
together and only one place ever alters a table. Reads take a fresh cursor with `reader()`.
"""

import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import duckdb

from gpufleet.metric import Type
from gpufleet_collector.standard import STANDARD

log = logging.getLogger(__name__)

if duckdb.__version__.startswith("1.") and find_spec("pandas") is None:
    # 1.5 looks for pandas anew with every parameter it is handed, 0.1 ms each: say once that there is none
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]

LIVE = "live,rules"
"""search_path of the judge: hot tables and rule macros."""

PEOPLE = "main,rules"
"""search_path of people: views, and the macros they and the rules are made of."""

SQL_TYPES = {
    Type.F64: "DOUBLE",
    Type.I64: "BIGINT",
    Type.U64: "UBIGINT",
    Type.BOOL: "BOOLEAN",
    Type.STRING: "VARCHAR",
}
HEAD = {"ts": "TIMESTAMP", "received_at": "TIMESTAMP", "node": "VARCHAR", "boot_id": "VARCHAR"}
"""The columns every probe table begins with."""

_SEALED = (
    "enable_external_access = false",
    "python_enable_replacements = false",
    "lock_configuration = true",
)
"""Set last, for good: SQL of people runs in this process. The store's own file, its log, its spill
folder and `Store.exchange` stay open; search_path stays settable; NumPy columns come in by `register`, not
as variables."""


MAX_TABLE_COLUMNS = 1024
"""Over all agents that ever reported to one probe table."""

MAX_PROBES = 256


class StoreUnusable(Exception):
    """The file cannot be opened and must stay as it is; the text says why, in one line."""


class StoreLocked(StoreUnusable):
    """Another process holds the file; the text says which and what to do."""


class StoreBroken(Exception):
    """The engine gave up on the file while it ran: nothing works until `Store.reopen`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a probe table, as an agent described it."""

    name: str
    type: Type
    unit: str
    kind: str
    help: str
    low: float | None
    high: float | None
    rollup: str


class Store:
    """The store of one collector. Use `Store.open`."""

    def __init__(
        self,
        path: Path | None,
        connection: duckdb.DuckDBPyConnection,
        replaced: str = "",
        exchange: Path | None = None,
    ) -> None:
        self.path = path or Path(":memory:")
        self.schema_version = 0
        """Counts changes of tables: rules and views bind columns and are made again when it moved."""
        self.broken = ""
        """Why nothing works any more, until `reopen`; empty = works."""
        self.replaced = replaced
        """Why the file found at opening was put aside, and where it is now; empty = it was not."""
        self._file = path
        self._told = ""
        self.exchange = path.resolve().parent / "exchange" if path is not None else exchange
        """The only folder that the engine may copy rows to and read them from; None = none."""
        self._spoiled = ""
        self._connection = connection
        self._lock = threading.RLock()
        self.tables: dict[str, dict[str, Type]] = {}
        """Probe tables and their columns (without HEAD)."""
        self.reserved: frozenset[str] = frozenset()
        """Tables and views of our own, which no probe may be named like."""

    @classmethod
    def open(cls, path: Path | None, exchange: Path | None = None) -> "Store":
        """Open or create the store at `path`; None = in memory, for tests and replay (rows from `exchange`).

        A damaged file is put aside with its log (both kept) and a new one is begun: `replaced` says so.

        Raises:
            StoreLocked: Another process has it open.
            StoreUnusable: It cannot be opened for a reason that a new file would not cure.
        """
        connection, replaced = _connect_or_replace(path)
        store = cls(path, connection, replaced, exchange)
        store._prepare_or_replace()
        return store

    def spoiled(self, error: BaseException) -> bool:
        """Whether an error says that the file's content is wrong; then the next `reopen` puts it aside.

        For errors met while loading what no collector can do without: damage there would be met for ever.
        """
        text = " ".join(str(error).split())
        if self._file is None or not _is_damage(text):
            return False
        self.broken = self._spoiled = text[:500]
        return True

    def reopen(self) -> None:
        """Close what is broken and open the file again; cursors of before are dead.

        Raises:
            StoreUnusable: Not yet: try again later.
        """
        with self._lock:
            with suppress(duckdb.Error):
                self._connection.close()
            if self._spoiled and self._file is not None:
                self._connection, self.replaced = _replace(self._file, self._spoiled)
            else:
                self._connection, self.replaced = _connect_or_replace(self._file)
            self.broken = self._spoiled = ""
            self._prepare_or_replace()
            self.schema_version += 1

    def _prepare_or_replace(self) -> None:
        """A block in the middle may be wrong without the engine's noticing when it opens the file."""
        try:
            self._prepare()
        except (duckdb.Error, StoreBroken) as error:
            text = " ".join(str(error).split())
            if self._file is None or not _is_damage(text):
                raise
            with suppress(duckdb.Error):
                self._connection.close()
            self._connection, self.replaced = _replace(self._file, text)
            self.broken = ""
            self._prepare()

    def _prepare(self) -> None:
        self._connection.execute("SET GLOBAL timezone = 'UTC'")
        with self.transaction() as write:
            for script in _scripts("schema"):
                write.execute(script)
            self.tables = _probe_tables(write)
            found = write.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = 'live'"
            ).fetchall()
            own = {name for (name,) in found} - self.tables.keys()
            self.reserved = frozenset(own | _names("views"))
        self.checkpoint()
        if self.exchange is not None:
            folder = str(self.exchange).replace("'", "''")
            self._connection.execute(f"SET GLOBAL allowed_directories = ['{folder}']")
        for setting in _SEALED:
            self._connection.execute(f"SET GLOBAL {setting}")

    @contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The writing connection inside BEGIN ... COMMIT; rolled back when the block raises.

        Raises:
            StoreBroken: The engine gave up. What was being committed may be in the file or not.
        """
        with self._lock:
            if self.broken:
                raise StoreBroken(self.broken)
            version = self.schema_version
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                if _gave_up(error):
                    self.give_up(error)
                    raise StoreBroken(self.broken) from error
                with suppress(duckdb.Error):
                    self._connection.execute("ROLLBACK")
                if self.schema_version != version:
                    self.tables = _probe_tables(self._connection)
                raise

    def give_up(self, error: BaseException) -> None:
        """Refuse everything until `reopen`: the engine is in a state in which nothing gets stored."""
        self.broken = " ".join(str(error).split())[:500] or type(error).__name__
        if self.broken != self._told:
            self._told = self.broken
            log.error("store: %s: must be opened again: %s", self.path, self.broken)

    def checkpoint(self) -> None:
        """Move the log into the file. After every change of tables, so that no replay has to redo one.

        Raises:
            StoreBroken: The engine gave up, e.g. on a full disk; what was committed stays committed.
        """
        with self._lock:
            if self.broken:
                raise StoreBroken(self.broken)
            try:
                self._connection.execute("CHECKPOINT")
            except duckdb.TransactionException as error:  # a reader stands in the way: the next one will do
                log.debug("store: checkpoint put off: %s", error)
            except duckdb.Error as error:
                if _gave_up(error):
                    self.give_up(error)
                    raise StoreBroken(self.broken) from error
                raise

    @contextmanager
    def reader(self, search_path: str = PEOPLE) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor of its own, for reading; unqualified names resolve through `search_path`.

        Raises:
            StoreBroken: The engine gave up: nothing can be read until it is opened again.
        """
        if self.broken:
            raise StoreBroken(self.broken)
        cursor = self._connection.cursor()
        try:
            cursor.execute(f"SET search_path = '{search_path}'")
            yield cursor
        finally:
            cursor.close()

    def refused(self, probe: str, columns: Sequence[Column]) -> dict[str, str]:
        """Which of an agent's columns cannot be stored, and why; the name "" stands for the whole probe.

        A column that rules read has its type from `STANDARD`, any other from the first agent that names it.
        """
        if probe in self.reserved or probe.startswith(_TAKEN_PREFIXES):
            return {"": "reserved_name"}
        known = self.tables.get(probe)
        if known is None:
            if len(self.tables) >= MAX_PROBES:
                return {"": "too_many_probes"}
            known = {}
        refused = {}
        room = MAX_TABLE_COLUMNS - len(known)
        standard = STANDARD.get(probe, {})
        for column in columns:
            if column.name not in known and standard.get(column.name, column.type) is not column.type:
                refused[column.name] = "type_conflict"
            elif column.name not in known:
                room -= 1
                if room < 0:
                    refused[column.name] = "too_many_columns"
            elif known[column.name] is not column.type:
                refused[column.name] = "type_conflict"
        return refused

    def ensure_probe(self, write: duckdb.DuckDBPyConnection, probe: str, columns: Sequence[Column]) -> bool:
        """Make the probe's table, or add the columns it lacks. Call inside `transaction()`.

        A column that exists keeps its type, whatever `columns` says: see `refused`.

        Returns:
            Whether a table changed.
        """
        known = self.tables.get(probe)
        added = [column for column in columns if known is None or column.name not in known]
        if known is None:
            head = ", ".join(f"{name} {kind} NOT NULL" for name, kind in HEAD.items())
            body = "".join(f', "{column.name}" {SQL_TYPES[column.type]}' for column in columns)
            write.execute(f'CREATE TABLE live."{probe}" ({head}{body})')
        else:
            for column in added:
                write.execute(
                    f'ALTER TABLE live."{probe}" ADD COLUMN "{column.name}" {SQL_TYPES[column.type]}'
                )
        if not added and known is not None:
            return False
        self.schema_version += 1
        table = self.tables.setdefault(probe, {})
        cells = [
            (
                probe, column.name, column.type.name.lower(), column.unit, column.kind, column.low,
                column.high, column.help, column.rollup, place,
            )
            for place, column in enumerate(added, len(table))
        ]  # fmt: skip
        if cells:  # a list per column: the engine reads a placeholder per cell six times slower
            write.execute(
                "INSERT INTO live.metric SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), "
                "unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::DOUBLE[]), "
                "unnest(?::DOUBLE[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::INTEGER[]), "
                "now()::TIMESTAMP",
                [list(column) for column in zip(*cells, strict=True)],
            )
        table.update((column.name, column.type) for column in added)
        return True

    def close(self) -> None:
        """Checkpoint and close the file."""
        with self._lock:
            if not self.broken:
                with suppress(StoreBroken, duckdb.Error):
                    self.checkpoint()
            with suppress(duckdb.Error):
                self._connection.close()
            self.broken = "closed"


_TAKEN_PREFIXES = ("fleet_", "limits_", "duckdb_", "pg_", "sqlite_")
"""Names of views for people and for rules, and of the engine's own tables."""

_DAMAGED = (
    "Corrupt",
    "replaying WAL",
    "not a valid DuckDB database file",
    "Could not read enough bytes",
    "Serialization Error",
    "INTERNAL Error",
)
"""Words of the engine, 1.5 and 2.0, for a file or log whose content is wrong: only these put it aside."""

_NOT_DAMAGED = ("No space left", "Out of Memory", "Cannot allocate", "Too many open files")


def _connect_or_replace(path: Path | None) -> tuple[duckdb.DuckDBPyConnection, str]:
    try:
        return _connect(path), ""
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        holder = re.search(r"\(PID (\d+)\)", text)
        if "lock" in text.lower() and ("onflicting lock" in text or "Could not set lock" in text):
            who = f"process {holder[1]}" if holder else "another process"
            raise StoreLocked(
                f"{path} is held by {who}: ask a running collector with `fleet sql`,"
                " or stop what holds it and start again"
            ) from error
        if path is None or not path.is_file() or not _is_damage(text):
            raise StoreUnusable(f"{path} cannot be opened: {text[:300]}") from error
        return _replace(path, text)


def _is_damage(text: str) -> bool:
    return any(word in text for word in _DAMAGED) and not any(word in text for word in _NOT_DAMAGED)


def _replace(path: Path, why: str) -> tuple[duckdb.DuckDBPyConnection, str]:
    """Begin a new file; nothing has the old one open."""
    aside = _put_aside(path)
    log.error("store: %s is damaged (%s): kept as %s, a new one is begun", path, why[:300], aside)
    return _connect(path), f"{why[:300]}; kept as {aside}"


_MOST_THREADS = 8
"""One core is left to the streams: an engine that takes them all makes every insert a third dearer."""

_LOG_MIB = 64
"""The log is moved into the file at this size: half the work of the engine's 16 MiB, no longer stalls."""


_MOST_MEMORY_MIB = 8192


def _memory_mib() -> int:
    """Memory of the engine, MiB: half of what this process may have, so that a query never takes the host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no group, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    bound, _ = resource.getrlimit(resource.RLIMIT_AS)
    if bound != resource.RLIM_INFINITY:
        memory = min(memory, bound)
    return max(256, min(_MOST_MEMORY_MIB, (memory >> 20) // 2))


def _connect(path: Path | None) -> duckdb.DuckDBPyConnection:
    log_mib = _LOG_MIB
    if path is not None and path.parent.is_dir():
        disk = os.statvfs(path.parent)
        log_mib = max(1, min(_LOG_MIB, (disk.f_blocks * disk.f_frsize >> 20) // 16))
    config: dict[str, str | bool | int | float | list[str]] = {
        "storage_compatibility_version": "v1.5.0",  # both majors read it
        "checkpoint_threshold": f"{log_mib}MiB",
        "threads": max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1)),
        "memory_limit": f"{_memory_mib()}MiB",
    }
    return duckdb.connect(str(path) if path else ":memory:", config=config)


def _put_aside(path: Path) -> Path:
    """Rename the file and its log, so that a person can look at them; nothing is deleted."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{count}")
    path.rename(aside)
    wal = path.with_name(path.name + ".wal")
    if wal.exists():
        wal.rename(aside.with_name(aside.name + ".wal"))
    return aside


def _gave_up(error: BaseException) -> bool:
    """Whether the engine will refuse everything from now on, or could not write."""
    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        return True
    return isinstance(error, duckdb.Error) and any(
        words in str(error) for words in ("database has been invalidated", "No space left")
    )


def _scripts(folder: str) -> list[str]:
    here = resources.files("gpufleet_collector") / "sql" / folder
    return [(here / f"{name}.sql").read_text() for name in sorted(_names(folder))]


def _names(folder: str) -> set[str]:
    here = resources.files("gpufleet_collector") / "sql" / folder
    return {item.name.removesuffix(".sql") for item in here.iterdir() if item.name.endswith(".sql")}


def _probe_tables(read: duckdb.DuckDBPyConnection) -> dict[str, dict[str, Type]]:
    tables: dict[str, dict[str, Type]] = {}
    rows = read.execute("SELECT probe, name, type FROM live.metric ORDER BY probe, position").fetchall()
    for probe, name, kind in rows:
        tables.setdefault(probe, {})[name] = Type[kind.upper()]
    return tables
