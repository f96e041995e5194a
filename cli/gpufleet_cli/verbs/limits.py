"""`fleet limits`: which thresholds hold, who set them, and what the fleet's own data suggest."""

import click

from gpufleet_cli import errors, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options
from gpufleet_cli.times import SPAN
from gpufleet_cli.verbs.node import limit_of

SUGGEST = "suggest"


@click.command(
    short_help="Thresholds: which hold, who set them, what the data suggest.",
    epilog="""
\b
Examples:
  fleet limits temperature_margin
  fleet limits --node gpu-001
  fleet limits suggest temperature_margin --since 2d
""",
)
@click.argument("words", metavar="[suggest] [RULE]", nargs=-1)
@click.option("--node", default="", help="Only what holds on this node.")
@click.option("--since", type=SPAN, default="7d", show_default=True, help="How far `suggest` looks back.")
@options
@click.pass_context
def limits(context: click.Context, words: tuple[str, ...], node: str, since: float) -> None:
    """The limits that hold, with layer and source: of every RULE, or of one.

    `suggest RULE` shows what the rule measured on well entities and which limits would fit that. It changes
    nothing; try a limit with `fleet replay --rule RULE --limit NAME=VALUE`.
    """
    suggesting = words[:1] == (SUGGEST,)
    names = words[1:] if suggesting else words
    if len(names) > 1:
        raise click.UsageError("give one rule")
    if suggesting and not names:
        raise click.UsageError("suggest needs a rule")
    if suggesting and node:
        raise click.UsageError("suggest looks at the whole fleet: leave --node out")

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        if suggesting:
            request = fleet_pb2.SuggestLimitsRequest(rule=names[0], since_s=since)
            return client.document(client.stub.SuggestLimits, request, 30.0)
        request_list = fleet_pb2.ListLimitsRequest(rule=names[0] if names else "", node=node)
        return client.document(client.stub.ListLimits, request_list)

    show.show(context, fetch, _suggested if suggesting else _list, lambda _: errors.OK)


def _list(document: Json, settings: Settings) -> str:
    columns = [
        Column("RULE"), Column("LIMIT"), Column("VALUE", right=True), Column("LAYER"), Column("FOR"),
        Column("NODES", right=True), Column("SET BY", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("rule")), str(item.get("name")), number(item.get("value")), str(item.get("layer")),
            " ".join(str(item[key]) for key in ("node", "model") if item.get(key)) or "all",
            render.number(item.get("nodes")), str(item.get("source")),
        ]
        for item in render.items(document, "items")
    ]  # fmt: skip
    return (
        "\n".join(render.table(columns, rows, limit_of(settings)))
        if rows
        else "no limits yet: no node is known"
    )


def _suggested(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    unit = str(document.get("unit") or "")
    head = [
        f"{document.get('rule')} since {document.get('since')}",
        f"{document.get('samples')} samples of {document.get('entities')} entities "
        f"at {document.get('moments')} moments",
    ]
    lines = render.wrap_line("   ".join(head), limit, "  ")
    shares = ("min", "p001", "p01", "p50", "p99", "p999", "max")
    spreads = [["observed", *(number(render.get(document, "observed", share)) for share in shares), unit]]
    spreads += [
        [f"{item.get('name')} ({item.get('compares')})",
         *(number(render.get(item, "healthy", share)) for share in shares), ""]
        for item in render.items(document, "items")
        if item.get("compares") != "observed"
    ]  # fmt: skip
    titles = ("MIN", "P0.1", "P1", "P50", "P99", "P99.9", "MAX")
    columns = [Column("OF WELL ENTITIES"), *(Column(title, right=True) for title in titles), Column("UNIT")]
    if render.count(document, "observed", "samples"):
        lines += ["", *render.table(columns, spreads, limit, "  ")]
    rows = [
        [
            str(item.get("name")), number(item.get("value")), number(item.get("entities_over_now")),
            number(item.get("suggested")), number(item.get("entities_over_suggested")),
            str(item.get("bad_is")), str(item.get("caution") or ""),
        ]
        for item in render.items(document, "items")
    ]  # fmt: skip
    columns = [
        Column("LIMIT"), Column("NOW", right=True), Column("ENTITIES OVER", right=True),
        Column("SUGGESTED", right=True), Column("ENTITIES OVER", right=True), Column("BAD IS"),
        Column("CAUTION", fold=True),
    ]  # fmt: skip
    if rows:
        lines += ["", *render.table(columns, rows, limit, "  ")]
        lines += ["", f"  try it: fleet replay --rule {document.get('rule')} --limit NAME=VALUE"]
    if document.get("note"):
        lines += ["", *render.wrap_line(f"  {document['note']}", limit, "  ")]
    return "\n".join(lines)


def number(value: object) -> str:
    """Six digits at most; `-` when it is not known."""
    return f"{value:.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"
