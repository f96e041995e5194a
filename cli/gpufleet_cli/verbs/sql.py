"""`fleet sql`: one SELECT, run inside the collector, which alone can open its database."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import click

from gpufleet_cli import errors, render
from gpufleet_cli.client import Client
from gpufleet_cli.errors import FleetError
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.show import echo, repeat
from gpufleet_cli.verbs.node import limit_of

QUERY_S = 30.0
"""The collector's own limit; our wait is a little longer, so that its text arrives."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came back: columns, types, rows and whether the cap cut them."""

    columns: Sequence[str]
    types: Sequence[str]
    rows: Sequence[Sequence[object]]
    truncated: bool


@click.command(
    short_help="Run one read-only query in the collector.",
    epilog="""
\b
Examples:
  fleet sql "select node, gpu_index, sm_clock_mhz, power_w from gpu order by ts desc limit 5"
  fleet sql "show tables"
  fleet sql "describe gpu"
  fleet sql -o csv "select * from fleet_now" > fleet.csv
  fleet sql - < postmortem.sql
""",
)
@click.argument("query")
@click.option(
    "--limit", type=click.IntRange(min=0), default=0, help="Rows at most (default: the collector's cap)."
)
@click.option(
    "--max-seconds", type=click.FloatRange(min=0, min_open=True, max=QUERY_S), default=QUERY_S,
    show_default=True, help="How long the query may run.",
)  # fmt: skip
@options
@click.pass_context
def sql(context: click.Context, query: str, limit: int, max_seconds: float) -> None:
    """Run one read-only QUERY inside the collector; `-` reads it from stdin.

    The database file of a running collector is locked: another process can not open it, not even to read.
    All times are UTC.
    """
    settings = settings_of(context)
    if query == "-":
        query = sys.stdin.read()
    if not query.strip():
        raise click.UsageError("the query is empty")
    _hint_about_files(query)

    def show(client: Client) -> None:
        result = ask(client, query, limit, max_seconds)
        if settings.watch and settings.output == "json":
            echo(render.as_jsonl([_document(result)]), newline=False)
        else:
            _PRINT[settings.output](result, settings)
        if result.truncated:
            click.echo(f"cut after {len(result.rows)} rows: narrow the query, or raise --limit", err=True)

    with Client(settings) as client:
        if settings.watch:
            repeat(settings, lambda: show(client))
        show(client)


def _hint_about_files(query: str) -> None:
    """People who pass the path of the database meant `duckdb FILE`; say what works instead."""
    word = query.strip()
    if " " not in word and word.endswith((".duckdb", ".db")):
        raise FleetError(
            "locked",
            f"{word} is a file, not a query: a running collector holds its database alone",
            'ask the collector: fleet sql "select * from fleet_now"',
            errors.USAGE,
        )


def ask(client: Client, query: str, limit: int, max_seconds: float) -> Result:
    """Run `query` at the collector.

    Raises:
        FleetError: It did not answer, or refused the query.
    """
    from gpufleet.v1 import fleet_pb2

    request = fleet_pb2.RunSqlRequest(sql=query, limit=limit, timeout_s=max_seconds)
    columns: list[str] = []
    types: list[str] = []
    rows: list[Sequence[object]] = []
    truncated = False
    for reply in client.stream(client.stub.RunSql, request, max_seconds + client.settings.timeout):
        if reply.columns:
            columns, types = list(reply.columns), list(reply.types)
        if reply.rows_json:
            rows.extend(json.loads(reply.rows_json))
        truncated = truncated or reply.truncated
    return Result(columns, types, rows, truncated)


_NUMBERS = ("INT", "DOUBLE", "FLOAT", "DECIMAL")


def _table(result: Result, settings: Settings) -> None:
    columns = [
        render.Column(name, right=any(word in kind for word in _NUMBERS) and "[" not in kind)
        for name, kind in zip(result.columns, result.types, strict=True)
    ]
    if result.columns[:1] == ["explain_key"]:
        echo(render.plain_if_needed("\n".join(str(row[1]) for row in result.rows)))
        return
    rows = [[render.text(cell) for cell in row] for row in result.rows]
    limit = limit_of(settings)
    shown = render.table if render.fits(columns, limit) or not rows else render.records
    echo("\n".join(shown(columns, rows, limit)))


def _json(result: Result, _: Settings) -> None:
    echo(render.as_json(_document(result)))


def _document(result: Result) -> dict[str, object]:
    from datetime import UTC, datetime

    now = datetime.now(UTC).replace(tzinfo=None).isoformat() + "Z"
    return {
        "api_version": "fleet/v1",
        "kind": "SqlResult",
        "generated_at": now,
        "columns": [
            {"name": name, "type": kind} for name, kind in zip(result.columns, result.types, strict=True)
        ],
        "truncated": result.truncated,
        "items": list(_objects(result)),
    }


def _jsonl(result: Result, _: Settings) -> None:
    echo(render.as_jsonl(_objects(result)), newline=False)


def _objects(result: Result) -> Iterator[dict[str, object]]:
    """Rows as objects; of columns that share a name the later ones get a number."""
    seen: dict[str, int] = {}
    names = []
    for name in result.columns:
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return (dict(zip(names, row, strict=True)) for row in result.rows)


def _csv(result: Result, _: Settings) -> None:
    echo(render.as_csv(result.columns, result.rows), newline=False)


def _markdown(result: Result, _: Settings) -> None:
    echo(render.as_markdown(result.columns, result.rows), newline=False)


_PRINT: dict[str, Callable[[Result, Settings], None]] = {
    "table": _table,
    "wide": _table,
    "json": _json,
    "jsonl": _jsonl,
    "csv": _csv,
    "md": _markdown,
}
