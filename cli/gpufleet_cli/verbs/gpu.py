"""`fleet gpu`: one card, however a person names it."""

import click

from gpufleet_cli import render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.settings import Settings, options
from gpufleet_cli.verbs.node import finding_lines, job_lines, limit_of


@click.command(short_help="One card, by any of its names.")
@click.argument("card", metavar="ID")
@options
@click.pass_context
def gpu(context: click.Context, card: str) -> None:
    """One card: UUID (or 8 characters of it), serial, NODE/INDEX, or NODE:PCI."""

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.GetGpu, fleet_pb2.GetGpuRequest(gpu=card))

    show.show(context, fetch, _screen, _exit_code)


def _exit_code(document: Json) -> int:
    return show.worst([item.get("state") for item in render.items(document, "items")])


def _screen(document: Json, settings: Settings) -> str:
    found = render.items(document, "items")[0]
    limit = limit_of(settings)
    parts = [
        f"{found.get('node')}/{render.number(found.get('gpu_index'))}",
        render.state(found.get("state"), settings.colored),
        str(found.get("model") or ""),
        f"data {render.age(found.get('age_s'))} old",
    ]
    lines = render.wrap_line("   ".join(part for part in parts if part), limit, "  ")
    names = [
        f"{title} {found[key]}"
        for title, key in (("uuid", "gpu_uuid"), ("serial", "serial"), ("pci", "pci"), ("slot", "slot"))
        if found.get(key)
    ]
    lines.extend(render.wrap_line("   ".join(names), limit, "  "))
    lines.extend(job_lines(found, limit))
    lines.extend(finding_lines(found, settings, limit))
    lines.extend(_pairs("values", f"last values, {render.age(found.get('age_s'))} old", found))
    lines.extend(_pairs("baselines", "baselines", found))
    return "\n".join(lines)


def _pairs(key: str, title: str, found: render.Json) -> list[str]:
    values = render.get(found, key)
    if not isinstance(values, dict):
        return []
    rows = [(name, value) for name, value in values.items() if value is not None]
    if not rows:
        return []
    size = max(len(name) for name, _ in rows)
    return ["", title, *(f"  {name:<{size}}  {render.brief(value)}" for name, value in rows)]
