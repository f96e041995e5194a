"""`fleet maintenance`: when people work on nodes. What begins there meanwhile is recorded, but is no news."""

import click

from gpufleet_cli import errors, person, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.handover import by
from gpufleet_cli.render import Column, clock
from gpufleet_cli.settings import Settings, options
from gpufleet_cli.verbs.node import limit_of


@click.group(invoke_without_command=True, short_help="Maintenance windows of nodes.")
@options
@click.pass_context
def maintenance(context: click.Context) -> None:
    """Maintenance windows: what begins in one is judged and recorded, but is no news. Without a word: `list`.

    States stay what they are, and what began before the window stays news. What fires after it is news again.
    """
    if context.invoked_subcommand is None:
        _list(context)


@maintenance.command("list")
@options
@click.pass_context
def list_windows(context: click.Context) -> None:
    """Windows that run or will."""
    _list(context)


def _list(context: click.Context) -> None:
    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.ListMaintenance, fleet_pb2.ListMaintenanceRequest())

    show.show(context, fetch, _screen, _ok)


@maintenance.command()
@click.argument("nodes", nargs=-1, required=True)
@click.option("--for", "for_", metavar="TIME", required=True, help="How long: 90m, 2h, 1d12h; at most 30d.")
@click.option(
    "--from", "from_", metavar="TIME", default="", help="When, UTC: 2026-12-01T08:00 (default: now)."
)
@click.option("--reason", required=True, help="Why; kept with the window.")
@options
@click.pass_context
def start(context: click.Context, nodes: tuple[str, ...], for_: str, from_: str, reason: str) -> None:
    """Open a window on NODES, now or later; hostlists work: gpu-[001-016]."""
    names = [name for word in nodes for name in person.expand(word)]
    for_s = person.seconds(for_)
    from_us = person.moment(from_) if from_ else 0

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.StartMaintenanceRequest(
            nodes=names, from_us=from_us, for_s=for_s, reason=reason, author=person.author()
        )
        return client.document(client.stub.StartMaintenance, request)

    show.once(context, fetch, _screen)


@maintenance.command()
@click.argument("windows", metavar="NUMBER...", nargs=-1, required=True)
@options
@click.pass_context
def end(context: click.Context, windows: tuple[str, ...]) -> None:
    """End windows before their time, or call coming ones off."""
    ids = [person.whole_number(word, "maintenance window") for word in windows]

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.EndMaintenanceRequest(ids=ids, author=person.author())
        return client.document(client.stub.EndMaintenance, request)

    show.once(context, fetch, _screen)


def _ok(_: Json) -> int:
    return errors.OK


def _screen(document: Json, settings: Settings) -> str:
    columns = [
        Column("WINDOW", right=True), Column("STATE"), Column("FROM (UTC)"), Column("UNTIL (UTC)"),
        Column("BY"), Column("NODES, REASON", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("maintenance")),
            str(item.get("state")),
            clock(item.get("from_at")),
            clock(item.get("ended_at") or item.get("until")),
            by(item),
            f"{item.get('names')}: {item.get('reason')}",
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit_of(settings))) if rows else "no maintenance windows"
