"""`fleet inventory`: what should be there, beside what is."""

from pathlib import Path

import click

from gpufleet_cli import errors, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.errors import FleetError
from gpufleet_cli.person import author, expand
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.verbs.node import limit_of, short_uuid

MAX_FILE_BYTES = 900_000
"""A request is one message, and no message is larger than 1 MiB."""


@click.group(invoke_without_command=True, short_help="What should be there, beside what is.")
@options
@click.pass_context
def inventory(context: click.Context) -> None:
    """Expected inventory: learned at the first hello, accepted by people. Without a word: `list`."""
    if context.invoked_subcommand is None:
        _show(context, "ListInventory", "")


@inventory.command("list")
@click.argument("node", required=False, default="")
@options
@click.pass_context
def list_inventory(context: click.Context, node: str) -> None:
    """Every expected card beside what is seen; with NODE only that one."""
    _show(context, "ListInventory", node)


@inventory.command()
@click.argument("node", required=False, default="")
@options
@click.pass_context
def diff(context: click.Context, node: str) -> None:
    """Only what differs: missing, unexpected, swapped."""
    _show(context, "DiffInventory", node)


def _show(context: click.Context, call: str, node: str) -> None:
    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        if call == "DiffInventory":
            return client.document(client.stub.DiffInventory, fleet_pb2.DiffInventoryRequest(node=node))
        return client.document(client.stub.ListInventory, fleet_pb2.ListInventoryRequest(node=node))

    show.show(context, fetch, _screen, _exit_code)


def _exit_code(document: Json) -> int:
    differ = [item for item in render.items(document, "items") if item.get("match") not in ("same", None)]
    return errors.CRITICAL if differ else errors.OK


def _screen(document: Json, settings: Settings) -> str:
    columns = [
        Column("NODE"), Column("GPU", right=True), Column("MATCH"), Column("EXPECTATION"), Column("SERIAL"),
        Column("PCI"), Column("UUID"), Column("MODEL, WHY", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("node")),
            render.number(item.get("gpu_index")),
            str(item.get("match") or "-"),
            str(item.get("expectation") or "none"),
            str(item.get("serial") or "-"),
            str(item.get("pci") or "-"),
            short_uuid(item.get("uuid") or "-", settings),
            "; ".join(str(part) for part in (item.get("model"), item.get("reason")) if part),
        ]
        for item in render.items(document, "items")
    ]
    if document.get("kind") == "InventoryList":
        rows += [
            [
                str(item.get("node")), "-", "same" if item.get("expectation") else "-",
                str(item.get("expectation") or "none"), "-", "-", "-",
                "no GPUs expected" if item.get("expectation") else "no GPUs seen",
            ]
            for item in render.items(document, "without_gpus")
        ]  # fmt: skip
    if not rows:
        return (
            "nothing differs"
            if document.get("kind") == "InventoryDiff"
            else "nothing is expected or seen yet"
        )
    return "\n".join(render.table(columns, rows, limit_of(settings)))


@inventory.command()
@click.argument("nodes", nargs=-1, required=True)
@click.option("--reason", default="", help="Why; written to the audit table.")
@options
@click.pass_context
def accept(context: click.Context, nodes: tuple[str, ...], reason: str) -> None:
    """Pin what is seen on NODES now as accepted; hostlists work: gpu-[001-016]."""
    settings = settings_of(context)
    names = [name for word in nodes for name in expand(word)]
    with Client(settings) as client:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.AcceptInventoryRequest(nodes=names, author=author(), reason=reason)
        reply = client.one(client.stub.AcceptInventory, request)
    _done(settings, reply.nodes, reply.gpus, reply.baselines)


@inventory.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--baselines", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV with node,entity,key,value,spread,n.",
)  # fmt: skip
@click.option("--reason", default="", help="Why; written to the audit table.")
@options
@click.pass_context
def import_file(context: click.Context, file: Path, baselines: Path | None, reason: str) -> None:
    """Pin a delivery list as accepted: a CSV with the header node,uuid,serial,pci,model.

    It replaces the list of every node it names: cards that it does not list are no longer expected there.
    Other nodes keep theirs.
    """
    settings = settings_of(context)
    with Client(settings) as client:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.ImportInventoryRequest(
            csv=_read(file),
            baseline_csv=_read(baselines) if baselines else b"",
            author=author(),
            reason=reason,
        )
        before = _expected(client) if settings.screen else {}
        reply = client.one(client.stub.ImportInventory, request)
        after = _expected(client) if before else {}
    _done(settings, reply.nodes, reply.gpus, reply.baselines)
    for line in _dropped(before, after):
        show.echo(line)


Cards = dict[str, list[tuple[object, object]]]
"""Per node the serial and UUID of each card."""


def _expected(client: Client) -> Cards:
    """What is expected now; nothing when the collector cannot say, which must not stop an import."""
    from gpufleet.v1 import fleet_pb2

    try:
        document = client.document(client.stub.ListInventory, fleet_pb2.ListInventoryRequest())
    except FleetError:
        return {}
    cards: Cards = {}
    for item in render.items(document, "items"):
        if item.get("match") not in (None, "extra"):
            cards.setdefault(str(item.get("node")), []).append((item.get("serial"), item.get("uuid")))
    return cards


def _dropped(before: Cards, after: Cards) -> list[str]:
    """`gpu-007: 1 expected, 7 no longer` for each node that lost expected cards."""
    lines = []
    for node, cards in sorted(before.items()):
        if node not in after:
            continue  # the second list did not come, or came without it: nothing is known
        names = {name for card in after[node] for name in card if name}
        gone = sum(1 for card in cards if not names & {name for name in card if name})
        if gone:
            lines.append(f"{node}: {len(after[node])} expected, {gone} no longer")
    return lines


def _read(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise FleetError("usage", f"cannot read {file}: {error.strerror}", "", errors.USAGE) from None
    if len(data) > MAX_FILE_BYTES:
        raise FleetError(
            "too_large", f"{file} has {len(data)} bytes, more than {MAX_FILE_BYTES}",
            "import it in parts: each file replaces only the nodes it names", errors.USAGE,
        )  # fmt: skip
    return data


def _done(settings: Settings, nodes: int, gpus: int, baselines: int) -> None:
    if settings.screen:
        counts = ((nodes, "node"), (gpus, "GPU"), (baselines, "baseline"))
        show.echo("accepted: " + ", ".join(render.plural(*count) for count in counts))
        return
    from datetime import UTC, datetime

    document: Json = {
        "api_version": "fleet/v1",
        "kind": "InventoryAccepted",
        "generated_at": datetime.now(UTC).replace(tzinfo=None).isoformat() + "Z",
        "items": [{"nodes": nodes, "gpus": gpus, "baselines": baselines}],
    }
    show.emit(document, lambda *_: "", settings)
