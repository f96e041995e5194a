"""`fleet job`: who runs where now; one job with its ranks, cards and findings."""

from collections.abc import Sequence

import click

from gpufleet import hostlist
from gpufleet_cli import render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options
from gpufleet_cli.verbs.node import finding_lines, limit_of, short_uuid


@click.command(short_help="Who runs where; one job with its cards.")
@click.argument("job_id", metavar="[ID]", required=False, default="")
@options
@click.pass_context
def job(context: click.Context, job_id: str) -> None:
    """Every job that holds a card now, or one: a Slurm number, the UID of a pod, a unit or session."""

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.GetJob, fleet_pb2.GetJobRequest(job=job_id))

    show.show(context, fetch, _one if job_id else _all, _exit_code)


def _exit_code(document: Json) -> int:
    return show.worst([item.get("state") for item in render.items(document, "items")])


def _all(document: Json, settings: Settings) -> str:
    columns = [
        Column("JOB"), Column("STATE"), Column("KIND"), Column("USER"), Column("CARDS", right=True),
        Column("AGE", right=True), Column("NODES", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("job_id") or "not seen"),
            render.state(item.get("state"), settings.colored),
            str(item.get("kind") or "-"),
            str(item.get("user") or "-"),
            render.number(item.get("cards")),
            render.age(item.get("age_s")),
            _nodes(item) + _troubled(item),
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit_of(settings))) if rows else "no job holds a card"


def _troubled(item: render.Json) -> str:
    """Where the findings are: on the job itself, on cards that it holds, on nodes that it runs on."""
    found = item.get("trouble_in")
    words = [_TROUBLED.get(str(word), str(word)) for word in found] if isinstance(found, list) else []
    return f", findings on {' and '.join(words)}" if words else ""


_TROUBLED = {"job": "the job", "card": "its cards", "node": "its nodes"}


def _nodes(item: render.Json) -> str:
    names = item.get("nodes")
    return hostlist.fold(str(name) for name in names) if isinstance(names, list) else ""


def _one(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    lines: list[str] = []
    for found in render.items(document, "items"):
        if lines:
            lines.append("")
        lines.extend(_head(found, settings, limit))
        lines.extend(_findings(found, settings, limit))
        lines.extend(_cards(found, settings, limit))
    return "\n".join(lines)


def _head(found: render.Json, settings: Settings, limit: int) -> Sequence[str]:
    cards, nodes = render.count(found, "cards"), found.get("nodes")
    parts = [
        f"job {found.get('job_id')}",
        render.state(found.get("state"), settings.colored),
        str(found.get("kind")),
        f"user {found.get('user') or 'unknown'}",
        f"{render.plural(cards, 'card')} on {_nodes(found) if isinstance(nodes, list) else '-'}",
    ]
    if found.get("world") is not None:
        parts.append(f"{render.number(found.get('world'))} ranks")
    parts.append(f"data {render.age(found.get('age_s'))} old")
    return render.wrap_line("   ".join(parts), limit, "  ")


def _findings(found: render.Json, settings: Settings, limit: int) -> Sequence[str]:
    """The job's own findings, then those of what it runs on, which are no fault of the job."""
    own: list[render.Json] = []
    others: list[render.Json] = []
    for finding in render.items(found, "findings"):
        (own if str(finding.get("entity")).startswith("job:") else others).append(finding)
    lines = finding_lines({"findings": own}, settings, limit) if own or not others else []
    if others:
        lines += ["", "on the cards and nodes that it holds:"]
        lines += finding_lines({"findings": others}, settings, limit)[1:]
    return lines


def _cards(found: render.Json, settings: Settings, limit: int) -> Sequence[str]:
    columns = [
        Column("RANK", right=True), Column("CARD"), Column("PID", right=True), Column("STEP"),
        Column("MEMORY", right=True), Column("PROGRAM"), Column("UUID"),
    ]  # fmt: skip
    rows = [
        [
            render.number(card.get("rank")),
            f"{card.get('node')}/{render.number(card.get('gpu_index'))}",
            render.number(card.get("pid")),
            str(card.get("step") or "-"),
            _memory(card.get("mem_used_bytes")),
            str(card.get("command") or "-"),
            short_uuid(card.get("gpu_uuid") or "-", settings),
        ]
        for card in render.items(found, "gpus")
    ]
    return ["", *render.table(columns, rows, limit)]


def _memory(amount: object) -> str:
    """`74.2 GiB`, the rest of what `render.measured` says is the name."""
    if not isinstance(amount, int | float):
        return "-"
    return render.measured("_bytes", amount).strip()
