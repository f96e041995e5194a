"""`fleet version`: ours, and the collector's."""

import click

from gpufleet import WIRE_VERSION, __version__
from gpufleet_cli import errors, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.settings import Settings, options


@click.command(short_help="Versions, and whether the collector is ready.")
@options
@click.pass_context
def version(context: click.Context) -> None:
    """Versions of this command and of the collector, and whether it is ready."""
    show.show(context, _fetch, _screen, lambda _: errors.OK)


def _fetch(client: Client) -> Json:
    from gpufleet.v1 import fleet_pb2

    reply = client.one(client.stub.GetVersion, fleet_pb2.GetVersionRequest())
    ours = {"what": "fleet", "version": __version__, "wire_version": WIRE_VERSION}
    theirs = {
        "what": "collector",
        "version": reply.version,
        "wire_version": reply.wire_version,
        "address": client.settings.server,
        "ready": reply.ready,
        "reason": reply.reason or None,
        "duckdb_version": reply.duckdb_version,
    }
    return {
        "api_version": "fleet/v1",
        "kind": "VersionList",
        "generated_at": _at(reply.now_us),
        "items": [ours, theirs],
    }


def _at(now_us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(now_us / 1e6, UTC).replace(tzinfo=None).isoformat() + "Z"


def _screen(document: Json, _: Settings) -> str:
    items = document["items"]
    assert isinstance(items, list)
    ours, theirs = items
    ready = "ready" if theirs["ready"] else f"not ready: {theirs['reason']}"
    return (
        f"fleet      {ours['version']}  wire {ours['wire_version']}\n"
        f"collector  {theirs['version']}  wire {theirs['wire_version']}  DuckDB {theirs['duckdb_version']}  "
        f"{theirs['address']}  {ready}"
    )
