"""SQL of people, run inside the collector: DuckDB locks its file, so nobody else can.

A statement passes four gates, each of which would be enough against most mischief: it must be one SELECT
(or EXPLAIN, DESCRIBE, SHOW, SUMMARIZE); every node and function of its syntax tree must be on a list; it
runs in a READ ONLY transaction of its own; and the instance reaches no file and has its settings locked
(`Store.open`). Rows, bytes and seconds are capped.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite, isnan

import duckdb
import msgspec

from gpufleet_collector.jsontext import is_shallow
from gpufleet_collector.store import Store

MAX_ROWS = 100_000
MAX_SECONDS = 30.0
MAX_BYTES = 64 << 20
MAX_SQL_BYTES = 100_000
CHUNK_BYTES = 256 << 10
FETCH_ROWS = 1024

ALLOWED = "only one SELECT, EXPLAIN, DESCRIBE, SHOW or SUMMARIZE is allowed"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NODES = _words("""
    SELECT_NODE SET_OPERATION_NODE RECURSIVE_CTE_NODE CTE_NODE
    BASE_TABLE SUBQUERY JOIN TABLE_FUNCTION EMPTY EXPRESSION_LIST PIVOT SHOW_REF
    ORDER_MODIFIER LIMIT_MODIFIER LIMIT_PERCENT_MODIFIER DISTINCT_MODIFIER ORDER_DEFAULT ASCENDING DESCENDING
""")
"""Values of "type" of a node that is no expression. Everything else is refused: a new kind of node in a new
DuckDB (COPY_QUERY_NODE, DELETE_QUERY_NODE) is refused until it stands here."""

EXPRESSIONS = _words("""
    BETWEEN CASE CAST COLLATE COLUMN_REF COMPARISON CONJUNCTION CONSTANT DEFAULT FUNCTION LAMBDA LAMBDA_REF
    OPERATOR POSITIONAL_REFERENCE STAR SUBQUERY TYPE WINDOW
""")
"""Values of "class" of an expression."""

TABLE_FUNCTIONS = _words("""
    range generate_series unnest repeat repeat_row json_each json_tree histogram histogram_values
    duckdb_tables duckdb_columns duckdb_views duckdb_functions duckdb_schemas duckdb_types duckdb_keywords
    duckdb_constraints pragma_table_info pragma_version pragma_storage_info pg_timezone_names
""")
"""Table functions of DuckDB that read nothing but the catalogue; the store's own macros come on top."""

DENIED_FUNCTIONS = _words("""
    nextval setval currval current_setting getvariable getenv setseed write_log sleep_ms pg_sleep
    json_serialize_plan json_deserialize_sql to_aggregate_state finalize combine variant_bytes_to_variant
    query query_table
""")
"""They touch settings, sequences or the process, or take plans and states made of the caller's bytes."""

GROWING_FUNCTIONS = _words("""
    repeat lpad rpad array_resize list_resize range generate_series
""")
"""They make one value as large as a number says, outside of the engine's memory limit, and cannot be
interrupted while they do. In FROM, `range` and `generate_series` give rows and stay."""

DENIED_TABLES = _words("pg_settings duckdb_logs duckdb_databases pragma_database_list")

_FILE = re.compile(
    r"[/\\*?:]|\.(csv|tsv|json|jsonl|ndjson|parquet|duckdb|db|gz|zst|txt|xlsx|arrow|avro)$", re.I
)
_BLANK = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.S)
_EXPLAIN = re.compile(r"explain\b", re.I)
_ANALYZE = re.compile(r"analy[sz]e\b", re.I)


class Refused(Exception):
    """The statement is not one that people may run, or is not valid; the text says why."""


class TimedOut(Exception):
    """The statement passed its time limit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement gave.

    Attributes:
        columns: Their names.
        types: Their DuckDB types.
        chunks: JSON arrays of rows, each at most about `CHUNK_BYTES`.
        rows: How many rows are in them.
        truncated: Whether rows or bytes passed the cap.
    """

    columns: Sequence[str]
    types: Sequence[str]
    chunks: Sequence[bytes]
    rows: int
    truncated: bool


def run(
    store: Store, sql: str, limit: int = 0, timeout_s: float = 0.0, cancelled: threading.Event | None = None
) -> Answer:
    """Run `sql` as a person; 0 means the cap. Blocks: call it in a thread.

    Raises:
        Refused: It is not allowed or not valid, or it failed.
        TimedOut: It took longer than `timeout_s`, or `cancelled` was set.
    """
    seconds = min(timeout_s, MAX_SECONDS) if timeout_s > 0 else MAX_SECONDS
    rows = min(limit, MAX_ROWS) if limit > 0 else MAX_ROWS
    with store.reader() as cursor, watch(cursor, seconds, cancelled):
        try:
            statement = check(cursor, sql)
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            return _fetch(cursor, statement, rows)
        except duckdb.InterruptException as error:
            raise TimedOut(f"time limit of {seconds:g} s reached: narrow the time range") from error
        except duckdb.Error as error:
            raise Refused(_text(error)) from error
        except RecursionError as error:
            raise Refused("statement or value is nested too deeply") from error
        except (ValueError, OverflowError) as error:
            raise Refused(f"a value cannot be shown: {error}: cast it to VARCHAR") from error


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that passed.

    Attributes:
        sql: What is executed: rebuilt, so that it is what was checked.
        wrappable: Whether it can stand in FROM ( ... ).
    """

    sql: str
    wrappable: bool


def check(cursor: duckdb.DuckDBPyConnection, sql: str, own: frozenset[str] = frozenset()) -> Statement:
    """The statement that `sql` is, when people may run it; `own` are macros of theirs that it may use.

    Raises:
        Refused: They may not.
        duckdb.Error: It is not valid SQL.
    """
    if len(sql.encode(errors="replace")) > MAX_SQL_BYTES:
        raise Refused(f"statement is longer than {MAX_SQL_BYTES} bytes")
    if "\0" in sql:
        raise Refused("statement holds a NUL character")
    prefix, body = _split_explain(sql)
    body = _one_select(cursor, body)
    row = cursor.execute("SELECT json_serialize_sql(?::VARCHAR)", [body]).fetchone()
    tree = json.loads(row[0]) if row else {"error": True}
    if not isinstance(tree, dict) or tree.get("error") or len(tree.get("statements", ())) != 1:
        raise Refused(f"{ALLOWED}: {tree.get('error_message', 'it cannot be checked')}")
    root = tree["statements"][0]
    scalars, tables = _names(cursor)
    _Walk((scalars | own, tables | own)).visit(root)
    shows = root.get("node", {}).get("from_table", {}).get("type") == "SHOW_REF"
    return Statement(prefix + body, wrappable=not prefix and not shows)


def _split_explain(sql: str) -> tuple[str, str]:
    """`EXPLAIN [ANALYZE]` (or nothing), and what follows it."""
    at = _blank(sql, 0)
    word = _EXPLAIN.match(sql, at)
    if word is None:
        return "", sql
    at = _blank(sql, word.end())
    analyze = _ANALYZE.match(sql, at)
    if analyze is None:
        return "EXPLAIN ", sql[at:]
    return "EXPLAIN ANALYZE ", sql[analyze.end() :]


def _blank(sql: str, at: int) -> int:
    match = _BLANK.match(sql, at)
    return match.end() if match else at


def _one_select(cursor: duckdb.DuckDBPyConnection, sql: str) -> str:
    statements = cursor.extract_statements(sql)
    if not statements:
        raise Refused(f"empty statement: {ALLOWED}")
    if len(statements) > 1:
        raise Refused(f"{len(statements)} statements: {ALLOWED}")
    kind = statements[0].type
    if kind != duckdb.StatementType.SELECT:
        word = "PIVOT without IN" if kind.name == "MULTI" else kind.name
        raise Refused(f"{word} is refused: {ALLOWED}")
    return sql.rstrip().rstrip(";") if sql.rstrip().endswith(";") else sql


def _names(cursor: duckdb.DuckDBPyConnection) -> tuple[frozenset[str], frozenset[str]]:
    """Functions that may be called: in expressions, and in FROM."""
    scalars: set[str] = set()
    tables = set(TABLE_FUNCTIONS)
    rows = cursor.execute("SELECT DISTINCT function_name, function_type, internal FROM duckdb_functions()")
    for name, kind, internal in rows.fetchall():
        if kind in ("scalar", "aggregate", "macro", "window"):
            scalars.add(name.lower())
        elif kind == "table_macro" and not internal:
            tables.add(name.lower())
    return frozenset(scalars - DENIED_FUNCTIONS - GROWING_FUNCTIONS | {"unnest"}), frozenset(
        tables - DENIED_FUNCTIONS
    )


class _Walk:
    """Visits every node of a syntax tree and raises at the first that is not on a list."""

    def __init__(self, names: tuple[frozenset[str], frozenset[str]]) -> None:
        self._scalars, self._tables = names

    def visit(self, node: object) -> None:
        if isinstance(node, list):
            for child in node:
                self.visit(child)
        elif isinstance(node, dict):
            if "class" in node:
                self._expression(node)
            elif isinstance(node.get("type"), str):
                self._node(node)
            for key, child in node.items():
                if key == "function" and node.get("type") == "TABLE_FUNCTION":
                    self._table_function(child)
                else:
                    self.visit(child)

    def _node(self, node: dict[str, object]) -> None:
        kind = str(node["type"])
        if kind not in NODES and not kind.endswith("_TYPE_INFO"):
            raise Refused(f"{kind.removesuffix('_QUERY_NODE').replace('_', ' ')} is refused: {ALLOWED}")
        if kind == "BASE_TABLE":
            self._table(node)
        if kind == "SHOW_REF" and node.get("table_name"):
            self._table(node)

    def _table(self, node: dict[str, object]) -> None:
        name = str(node.get("table_name", "")).strip('"')
        if _FILE.search(name):
            raise Refused(f"{name!r}: files cannot be read: name a table or a view (see SHOW ALL TABLES)")
        if name.lower() in DENIED_TABLES:
            raise Refused(f"table {name} is refused: it shows the collector's own settings")

    def _expression(self, node: dict[str, object]) -> None:
        kind = str(node["class"])
        if kind == "PARAMETER":
            raise Refused("parameters (? or $1) cannot be given here: write the value")
        if kind not in EXPRESSIONS:
            raise Refused(f"expression {kind} is refused")
        name = str(node.get("function_name", "")).lower()
        if name and name not in self._scalars:
            if name in DENIED_FUNCTIONS:
                raise Refused(f"function {name} is refused: it reads or changes more than tables")
            if name in GROWING_FUNCTIONS:
                raise Refused(f"function {name} is refused: it makes values of any size")
            raise Refused(f"function {name} does not exist here, or may not be called")

    def _table_function(self, node: object) -> None:
        name = str(node.get("function_name", "")).lower() if isinstance(node, dict) else ""
        if name not in self._tables or not isinstance(node, dict):
            raise Refused(
                f"table function {name} is refused: there is none, or it reads files, settings or other SQL"
            )
        self.visit({key: child for key, child in node.items() if key not in ("class", "type")})


@contextmanager
def watch(
    cursor: duckdb.DuckDBPyConnection, seconds: float, cancelled: threading.Event | None
) -> Iterator[None]:
    """Interrupt `cursor` from the deadline on, again and again: one between two statements is lost."""
    done = threading.Event()

    def interrupt() -> None:
        left = seconds
        while left > 0 and not done.wait(min(left, 0.1)):
            left -= 0.1
            if cancelled is not None and cancelled.is_set():
                break
        while not done.wait(0.02):
            cursor.interrupt()

    thread = threading.Thread(target=interrupt, name="sql-deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _fetch(cursor: duckdb.DuckDBPyConnection, statement: Statement, limit: int) -> Answer:
    columns, types, sql = _describe(cursor, statement)
    cursor.execute(sql)
    if not columns:
        columns = [str(column[0]) for column in cursor.description or ()]
        types = [str(column[1]) for column in cursor.description or ()]
    convert = [_converter(kind) for kind in types]
    encoder = msgspec.json.Encoder()
    chunks: list[bytes] = []
    parts: list[bytes] = []
    size = total = rows = 0
    truncated = False
    while not truncated and (batch := cursor.fetchmany(min(FETCH_ROWS, limit + 1 - rows))):
        for row in batch:
            part = encoder.encode([to(cell) for to, cell in zip(convert, row, strict=True)])
            if rows == limit or total + len(part) > MAX_BYTES:
                truncated = True
                break
            if parts and size + len(part) > CHUNK_BYTES:
                chunks.append(b"[" + b",".join(parts) + b"]")
                parts, size = [], 0
            parts.append(part)
            rows, size, total = rows + 1, size + len(part) + 1, total + len(part)
    if parts:
        chunks.append(b"[" + b",".join(parts) + b"]")
    return Answer(columns, types, chunks, rows, truncated)


def _describe(cursor: duckdb.DuckDBPyConnection, statement: Statement) -> tuple[list[str], list[str], str]:
    """Columns, types and what to execute: times with a zone become UTC, which is what all our times are.

    (Fetching them as they are needs a package of time zones on 1.5.)
    """
    if not statement.wrappable:
        return [], [], statement.sql
    try:
        rows = cursor.execute(f"DESCRIBE {statement.sql}").fetchall()
    except duckdb.Error:
        return (
            [],
            [],
            statement.sql,
        )  # fails again when it is executed, with positions in the text people wrote
    columns, types = [str(row[0]) for row in rows], [str(row[1]) for row in rows]
    if not any(kind == "TIMESTAMP WITH TIME ZONE" for kind in types):
        return columns, types, statement.sql
    picked = ", ".join(
        f"c{n}::TIMESTAMP AS c{n}" if kind == "TIMESTAMP WITH TIME ZONE" else f"c{n}"
        for n, kind in enumerate(types)
    )
    names = ", ".join(f"c{n}" for n in range(len(types)))
    types = ["TIMESTAMP" if kind == "TIMESTAMP WITH TIME ZONE" else kind for kind in types]
    return columns, types, f"SELECT {picked} FROM (\n{statement.sql}\n) AS q({names})"


Cell = object
_PLAIN = frozenset(
    [
        "VARCHAR",
        "BOOLEAN",
        "TINYINT",
        "SMALLINT",
        "INTEGER",
        "BIGINT",
        "UTINYINT",
        "USMALLINT",
        "UINTEGER",
        "UBIGINT",
        "BIT",
        "UUID",
    ]
)


def _converter(kind: str) -> Callable[[Cell], Cell]:
    if kind == "JSON":
        return _json
    return _same if kind in _PLAIN else plain


def _same(cell: Cell) -> Cell:
    return cell


def _json(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return plain(cell)
    if not is_shallow(cell):
        return cell  # whoever reads the answer may be recursive too
    try:
        msgspec.json.decode(cell)
    except (msgspec.DecodeError, RecursionError):
        return cell
    return msgspec.Raw(cell.encode())


def plain(cell: Cell) -> Cell:
    """A DuckDB value as JSON has it: times in ISO 8601 UTC, blobs in hex, NaN and infinities as words."""
    if cell is None or isinstance(cell, bool | str):
        return cell
    if isinstance(cell, float):
        if isfinite(cell):
            return cell
        return "NaN" if isnan(cell) else ("Infinity" if cell > 0 else "-Infinity")
    if isinstance(cell, int):
        return cell if -(2**63) <= cell < 2**64 else msgspec.Raw(str(cell).encode())
    if isinstance(cell, Decimal):
        return msgspec.Raw(f"{cell:f}".encode()) if cell.is_finite() else str(cell)
    if isinstance(cell, datetime):
        return _moment(cell)
    if isinstance(cell, date | time):
        return cell.isoformat()
    if isinstance(cell, timedelta):
        return _interval(cell)
    if isinstance(cell, bytes | bytearray | memoryview):
        return bytes(cell).hex()
    if isinstance(cell, dict):
        return {str(key): plain(value) for key, value in cell.items()}
    if isinstance(cell, list | tuple):
        return [plain(value) for value in cell]
    return str(cell)


def _moment(at: datetime) -> str:
    offset = at.utcoffset()
    at = at.replace(tzinfo=None)
    if at in (datetime.max, datetime.min):
        return "infinity" if at == datetime.max else "-infinity"
    return (at - offset if offset else at).isoformat() + "Z"


def _interval(span: timedelta) -> str:
    """`2 days 03:00:00.5`, as DuckDB writes it (months count 30 days)."""
    sign = "-" if span < timedelta(0) else ""
    span = abs(span)
    hours, rest = divmod(span.seconds, 3600)
    text = f"{sign}{hours:02}:{rest // 60:02}:{rest % 60:02}"
    if span.microseconds:
        text += f".{span.microseconds:06}".rstrip("0")
    return f"{sign}{span.days} day{'s' if span.days != 1 else ''} {text}" if span.days else text


def _text(error: duckdb.Error) -> str:
    """DuckDB's message, which has the position of a syntax error; files are named as what they are here."""
    text = str(error).strip()
    if "disabled by configuration" in text:
        return "files and network are out of reach of this SQL: name a table or a view (see SHOW ALL TABLES)"
    if isinstance(error, duckdb.OutOfMemoryException):
        return "the query needs more memory than the collector may use: narrow the time range"
    return text
