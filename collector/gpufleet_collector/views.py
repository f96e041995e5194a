"""Views for people, in schema main: one per live table, and those of `sql/views/` (first line: their help).

Made again whenever a table changed, like the rules.
"""

import logging
from importlib import resources

import duckdb

from gpufleet_collector.rules import one_line
from gpufleet_collector.store import PEOPLE, Store

log = logging.getLogger(__name__)


def create(store: Store) -> dict[str, str]:
    """Make every view; returns view -> "" or why it cannot be made yet."""
    status: dict[str, str] = {}
    with store.transaction(), store.reader(PEOPLE) as cursor:
        tables = cursor.execute(
            "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'live' ORDER BY table_name"
        ).fetchall()
        for (table,) in tables:
            cursor.execute(f'CREATE OR REPLACE VIEW main."{table}" AS SELECT * FROM live."{table}"')
            status[table] = ""
        for name, text in _files():
            try:
                cursor.execute(text)
                cursor.execute(f"DESCRIBE SELECT * FROM main.{name}").fetchall()
                status[name] = ""
            except (duckdb.CatalogException, duckdb.BinderException) as error:
                status[name] = one_line(error)
                cursor.execute(f"DROP VIEW IF EXISTS main.{name}")
    return status


def helps() -> dict[str, str]:
    """View -> its first comment line."""
    return {name: text.splitlines()[0].removeprefix("--").strip() for name, text in _files()}


def _files() -> list[tuple[str, str]]:
    here = resources.files("gpufleet_collector") / "sql" / "views"
    files = sorted(
        (item for item in here.iterdir() if item.name.endswith(".sql")), key=lambda item: item.name
    )
    return [(item.name.removesuffix(".sql"), item.read_text()) for item in files]
