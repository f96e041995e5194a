"""`fleet node`: one host with its cards, or every host a line each."""

import click

from gpufleet import hostlist
from gpufleet_cli import render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options


@click.command(short_help="One node, or every node.")
@click.argument("name", required=False, default="")
@options
@click.pass_context
def node(context: click.Context, name: str) -> None:
    """One node with its cards, findings and last values; without NAME every node."""

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.GetNode, fleet_pb2.GetNodeRequest(node=name))

    show.show(context, fetch, _one if name else _all, _exit_code)


def _exit_code(document: Json) -> int:
    return show.worst([item.get("state") for item in render.items(document, "items")])


def _all(document: Json, settings: Settings) -> str:
    columns = [
        Column("NODE"), Column("STATE"), Column("GPUS", right=True), Column("DATA AGE", right=True),
        Column("EXPECTATION"), Column("WHY", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("node")),
            render.state(item.get("state"), settings.colored),
            f"{render.count(item, 'gpus', 'ok')}/{render.count(item, 'gpus', 'expected')}",
            render.age(item.get("age_s")),
            str(item.get("expectation") or "none"),
            why(item),
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit_of(settings))) if rows else "no nodes yet"


def why(item: render.Json) -> str:
    """What is wrong with a node: its own worst finding, else the worst one of its cards."""
    if item.get("reason"):
        return str(item["reason"])
    rule, index = render.get(item, "worst_card", "rule"), render.get(item, "worst_card", "gpu_index")
    if rule:
        others = render.count(item, "worst_card", "cards") - 1
        on = f"{rule} on card {render.number(index)}" if index is not None else f"{rule} on a card"
        return f"{on}, +{render.plural(others, 'card')}" if others else on
    missing = render.count(item, "gpus", "no_data")
    if item.get("state") == "unknown":
        return f"no fresh data of {render.plural(missing, 'card')}" if missing else "no fresh data"
    return ""


def limit_of(settings: Settings) -> int:
    """Columns to fold to: `wide` never folds."""
    return 1_000_000 if settings.output == "wide" else render.width()


def _one(document: Json, settings: Settings) -> str:
    found = render.items(document, "items")[0]
    limit = limit_of(settings)
    lines = [
        *_head(found, settings, limit),
        *job_lines(found, limit),
        *finding_lines(found, settings, limit),
        *_cards(found, settings, limit),
    ]
    lines.extend(_values(found, limit))
    return "\n".join(lines)


def _head(found: render.Json, settings: Settings, limit: int) -> list[str]:
    gpus = render.get(found, "counts")
    parts = [
        f"{found.get('node')}",
        render.state(found.get("state"), settings.colored),
        f"{render.count(gpus, 'ok')} of {render.count(gpus, 'expected')} expected GPUs ok",
        f"data {render.age(found.get('age_s'))} old",
    ]
    lines = render.wrap_line("   ".join(parts), limit, "  ")
    flags = found.get("flags")
    facts = [f"flags: {', '.join(map(str, flags))}"] if isinstance(flags, list) and flags else []
    facts += [f"expectation: {found.get('expectation') or 'none, so no presence verdict'}"]
    if found.get("agent_version"):
        facts.append(f"agent {found['agent_version']}")
    offset = found.get("clock_offset_s")
    if isinstance(offset, int | float) and offset:
        facts.append(f"its clock is corrected by {offset:+.1f} s")
    for key in ("model", "driver", "kernel"):
        if render.get(found, "facts", key):
            facts.append(f"{key} {render.get(found, 'facts', key)}")
    return [*lines, *render.wrap_line("   ".join(facts), limit, "  ")]


MOST_JOBS = 6
"""Jobs that are named in a line; of more it says how many."""


def jobs_of(found: render.Json) -> str | None:
    """`41778 (slurm, ana, 8 cards)`, of each job of an incident, node or card; None = not known."""
    if found.get("jobs") is None:
        return None
    named = [_job(job) for job in render.items(found, "jobs")]
    more = len(named) - MOST_JOBS
    return ", ".join(named[:MOST_JOBS]) + (f" and {more} more" if more > 0 else "")


def _job(job: render.Json) -> str:
    nodes = job.get("nodes")
    names = hostlist.fold(str(name) for name in nodes) if isinstance(nodes, list) and len(nodes) > 1 else ""
    parts = [
        str(job.get("kind") or "process not seen"),
        *([str(job["user"])] if job.get("user") else []),
        render.plural(render.count(job, "cards"), "card") + (f" on {names}" if names else ""),
    ]
    return f"{job.get('job_id') or '?'} ({', '.join(parts)})"


def job_lines(found: render.Json, limit: int) -> list[str]:
    """Who works there now; no line where that is not known."""
    named = jobs_of(found)
    return [] if named is None else render.wrap_line(f"jobs: {named or 'none'}", limit, "  ")


def finding_lines(found: render.Json, settings: Settings, limit: int) -> list[str]:
    """The findings that are open on a node or card."""
    findings = render.items(found, "findings")
    if not findings:
        return ["", "no open findings"]
    columns = [
        Column("FINDING"), Column("STATE"), Column("AGE", right=True), Column("ON"), Column("INCIDENT"),
        Column("REASON", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(finding.get("rule")),
            f"{render.state(finding.get('verdict'), settings.colored)} {finding.get('state')}",
            render.age(finding.get("age_s")),
            str(finding.get("place") or finding.get("entity")),
            str(finding.get("incident_id") or "-"),
            str(finding.get("reason") or ""),
        ]
        for finding in findings
    ]
    return ["", *render.table(columns, rows, limit)]


UUID_LETTERS = 12
"""Of a UUID where there is no room for all: enough for every command that takes a card."""


def short_uuid(uuid: object, settings: Settings) -> str:
    """A UUID, or its beginning on a screen that is narrower than the table would be."""
    name = str(uuid)
    narrow = limit_of(settings) < 120 and name.upper().startswith("GPU-")
    return name[:UUID_LETTERS] if narrow else name


CARD_COLUMNS = (
    Column("GPU", right=True), Column("STATE"), Column("UTIL %", right=True), Column("SM MHZ", right=True),
    Column("POWER W", right=True), Column("TEMP C", right=True), Column("PCIE"), Column("AGE", right=True),
    Column("UUID"),
)  # fmt: skip


def _cards(found: render.Json, settings: Settings, limit: int) -> list[str]:
    cards = render.items(found, "gpus")
    if not cards:
        return ["", "no GPUs expected or seen"]
    return ["", *render.table(CARD_COLUMNS, [card_row(card, settings) for card in cards], limit)]


def card_row(card: render.Json, settings: Settings) -> list[str]:
    """One line of the card table: values that are not there are `-`, and each line has its age."""
    values = card.get("values")
    gen, lanes = render.get(values, "pcie_gen"), render.get(values, "pcie_width")
    return [
        render.number(card.get("gpu_index")),
        render.state(card.get("state"), settings.colored),
        render.number(render.get(values, "util_pct")),
        render.number(render.get(values, "sm_clock_mhz")),
        render.number(render.get(values, "power_w")),
        render.number(render.get(values, "temperature_c")),
        f"{render.number(gen)}x{render.number(lanes)}" if gen is not None else "-",
        render.age(card.get("age_s")),
        short_uuid(card.get("gpu_uuid") or card.get("serial") or card.get("pci") or "", settings),
    ]


_FACTS = {
    "host": ("uptime_s", "load1", "cpus", "processes_blocked", "mem_available_bytes", "swap_used_bytes"),
    "agent": ("pss_bytes", "spool_batches", "spool_bytes", "spool_oldest_s"),
}
"""What people look for in a probe that has many columns; of other probes every value is shown."""


def _values(found: render.Json, limit: int) -> list[str]:
    """Last row of the probes with one row per host, each with its age; sums since boot are left to json."""
    lines: list[str] = []
    last = found.get("last")
    if not isinstance(last, dict):
        return lines
    for probe, row in last.items():
        values = {
            name: value
            for name, value in row.get("values", {}).items()
            if value not in (None, "") and (name == "uptime_s" or not name.endswith("_total"))
        }
        names = [name for name in _FACTS.get(probe, tuple(values)) if name in values]
        if names:
            facts = ", ".join(render.measured(name, values[name]) for name in names)
            text = f"{probe}, {render.age(row.get('age_s'))} old: {facts}"
            lines.extend(render.wrap_line(text, limit, "  "))
    return ["", *lines] if lines else []
