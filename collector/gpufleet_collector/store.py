"""The one DuckDB file: opened here, written here, read through cursors from here.

Everything is written inside `transaction()`, one at a time, so that rows, events and the ledger commit
together and only one place ever alters a table. Reads take a fresh cursor with `reader()`.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import duckdb

from gpufleet.metric import Type

log = logging.getLogger(__name__)

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
"""Set last, for good: SQL of people runs in this process. The store's own file, its log and its spill
folder stay open; search_path stays settable; NumPy columns come in by `register`, not as variables."""


class StoreLocked(Exception):
    """Another process holds the file; the text says which and what to do."""


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

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection) -> None:
        self.path = path
        self.schema_version = 0
        """Counts changes of tables: rules and views bind columns and are made again when it moved."""
        self._connection = connection
        self._lock = threading.RLock()
        self.tables: dict[str, dict[str, Type]] = {}
        """Probe tables and their columns (without HEAD)."""

    @classmethod
    def open(cls, path: Path | None) -> "Store":
        """Open or create the store at `path`; None = in memory, for tests and replay.

        Raises:
            StoreLocked: Another process has it open.
        """
        config: dict[str, str | bool | int | float | list[str]] = {
            "storage_compatibility_version": "v1.5.0"  # both majors read it
        }
        try:
            connection = duckdb.connect(str(path) if path else ":memory:", config=config)
        except duckdb.IOException as error:
            if "lock" in str(error).lower():
                raise StoreLocked(f"{path}: {' '.join(str(error).split())}") from error
            raise
        connection.execute("SET GLOBAL timezone = 'UTC'")
        store = cls(path or Path(":memory:"), connection)
        with store.transaction() as write:
            for script in _scripts("schema"):
                write.execute(script)
            store.tables = _probe_tables(write)
        for setting in _SEALED:
            connection.execute(f"SET GLOBAL {setting}")
        return store

    @contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The writing connection inside BEGIN ... COMMIT; rolled back when the block raises."""
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def reader(self, search_path: str = PEOPLE) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor of its own, for reading; unqualified names resolve through `search_path`."""
        cursor = self._connection.cursor()
        try:
            cursor.execute(f"SET search_path = '{search_path}'")
            yield cursor
        finally:
            cursor.close()

    def ensure_probe(self, write: duckdb.DuckDBPyConnection, probe: str, columns: Sequence[Column]) -> None:
        """Make the probe's table, or add the columns it lacks. Call inside `transaction()`."""
        known = self.tables.get(probe)
        if known is None:
            head = ", ".join(f"{name} {kind} NOT NULL" for name, kind in HEAD.items())
            body = "".join(f', "{column.name}" {SQL_TYPES[column.type]}' for column in columns)
            write.execute(f'CREATE TABLE live."{probe}" ({head}{body})')
            added = list(columns)
        else:
            added = [column for column in columns if column.name not in known]
            for column in added:
                write.execute(
                    f'ALTER TABLE live."{probe}" ADD COLUMN "{column.name}" {SQL_TYPES[column.type]}'
                )
        if not added and known is not None:
            return
        table = self.tables.setdefault(probe, {})
        for column in added:
            write.execute(
                "INSERT INTO live.metric VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, now()::TIMESTAMP)",
                [
                    probe, column.name, column.type.name.lower(), column.unit, column.kind, column.low,
                    column.high, column.help, column.rollup, len(table),
                ],
            )  # fmt: skip
            table[column.name] = column.type
        self.schema_version += 1

    def close(self) -> None:
        """Checkpoint and close the file."""
        with self._lock:
            self._connection.close()


def _scripts(folder: str) -> list[str]:
    here = resources.files("gpufleet_collector") / "sql" / folder
    return [
        item.read_text()
        for item in sorted(here.iterdir(), key=lambda item: item.name)
        if item.name.endswith(".sql")
    ]


def _probe_tables(read: duckdb.DuckDBPyConnection) -> dict[str, dict[str, Type]]:
    tables: dict[str, dict[str, Type]] = {}
    rows = read.execute("SELECT probe, name, type FROM live.metric ORDER BY probe, position").fetchall()
    for probe, name, kind in rows:
        tables.setdefault(probe, {})[name] = Type[kind.upper()]
    return tables
