"""`fleet status`: the 30-second screen. What is wrong, where, since when, and what to type next."""

from collections.abc import Sequence

import click

from gpufleet import hostlist
from gpufleet_cli import render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.handover import flags_of
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options

LINES = 24
COLUMNS = 80
"""The table fits a screen of this size; `-o wide` shows every incident and every node."""

STALE_S = 5.0
"""An answer older than this says so."""


@click.command()
@options
@click.pass_context
def status(context: click.Context) -> None:
    """The fleet on one screen: counters, open incidents, nodes.

    The four counters add up to the expected inventory. Without fresh data the state is `no data`, never ok.
    """
    show.show(context, fetch, screen, exit_code)


def fetch(client: Client) -> Json:
    """The document of `GetStatus`."""
    from gpufleet.v1 import fleet_pb2

    return client.document(client.stub.GetStatus, fleet_pb2.GetStatusRequest())


def exit_code(document: Json) -> int:
    """10, 11 or 12 by the worst card, node or incident; 0 when all is well."""
    words: list[object] = [incident.get("severity") for incident in render.items(document, "incidents")]
    for what in ("gpus", "nodes"):
        for key, word in (("critical", "critical"), ("no_data", "unknown"), ("degraded", "degraded")):
            if render.count(document, what, key):
                words.append(word)
    return show.worst(words)


def screen(document: Json, settings: Settings) -> str:
    """At most `LINES` lines at 80 columns; `wide` shows everything."""
    wide = settings.output == "wide"
    limit = render.width()
    head = [*_counters(document, settings.colored), *_collector(document, limit)]
    nodes = (
        _node_table(document, settings.colored) if wide else _node_groups(document, settings.colored, limit)
    )
    incidents = render.items(document, "incidents")
    known = _known(document)
    tail = _next(document)
    space = LINES - len(head) - len(nodes) - len(tail) - len(known) - 3
    full, shown = True, len(incidents)
    if not wide:
        full, shown = _fitting(incidents, space, min(limit, COLUMNS))
    blocks = [_incident(incident, settings.colored, limit, full) for incident in incidents[:shown]]
    lines = [*head, *_incident_lines(incidents, blocks), *known, *nodes, *tail]
    return "\n".join(lines)


_COUNTS = (("ok", "ok"), ("degraded", "degraded"), ("critical", "critical"), ("unknown", "no_data"))


def _counters(document: Json, colored: bool) -> list[str]:
    """Two lines of four numbers that add up to the expected inventory."""
    keys = ("gpus", "nodes")
    digits = [
        max(len(str(render.count(document, key, field))) for key in keys)
        for field in ("expected", *(field for _, field in _COUNTS))
    ]
    lines = []
    for title, key in zip(("GPUs ", "nodes"), keys, strict=True):
        parts = [f"{title} {render.count(document, key, 'expected'):>{digits[0]}} expected"]
        for (word, field), size in zip(_COUNTS, digits[1:], strict=True):
            amount = render.count(document, key, field)
            parts.append(render.paint(f"{render.state(word)} {amount:>{size}}", word, colored and amount > 0))
        lines.append("   ".join(parts))
    return lines


def _collector(document: Json, limit: int) -> list[str]:
    parts = []
    built, age = render.get(document, "snapshot_age_s"), render.get(document, "data_age_s")
    late = float(built) if isinstance(built, int | float) else 0.0
    if isinstance(age, int | float):
        parts.append(f"newest data {render.age(age + late)} old")
    else:
        parts.append("no data yet")
    parts.append(f"collector {render.get(document, 'collector', 'version')}")
    if late >= STALE_S:
        parts.append(f"as of {render.age(late)} ago")
    lag = render.get(document, "collector", "lag_s")
    if lag is not None:
        parts.append(f"lag {render.number(lag, 1)} s")
    bare = render.count(document, "nodes", "without_gpus")
    if bare:
        parts.append(f"+{render.plural(bare, 'node')} without GPUs")
    lines = render.wrap_line("   ".join(parts), limit, "  ")
    if render.get(document, "collector", "warming_up"):
        lines.append(
            "! warming up: the collector started a moment ago; nothing fires or clears until agents are back"
        )
    paused = render.get(document, "collector", "paused")
    if paused:
        lines.append(f"! ingest is paused: {paused}; agents keep their data in their spools")
    return [part for line in lines for part in render.wrap_line(line, limit, "  ")]


def _fitting(incidents: Sequence[render.Json], space: int, limit: int) -> tuple[bool, int]:
    """Whether all fit in full, and how many are shown; the collector sent the worst first.

    Measured at 80 columns wherever it is printed, so that a pipe carries the same incidents.
    """
    if sum(len(_incident(incident, False, limit, full=True)) for incident in incidents) <= space:
        return True, len(incidents)
    used = 0
    for shown, incident in enumerate(incidents):
        used += len(_incident(incident, False, limit, full=False))
        if used > space:
            return False, shown
    return False, len(incidents)


def _incident_lines(incidents: Sequence[render.Json], blocks: Sequence[Sequence[str]]) -> list[str]:
    if not incidents:
        return ["", "no open incidents"]
    crit = sum(1 for incident in incidents if incident.get("severity") == "crit")
    words = [f"{crit} crit"] if crit else []
    if len(incidents) > crit:
        words.append(f"{len(incidents) - crit} warn")
    lines = ["", f"INCIDENTS  {len(incidents)} open: {', '.join(words)}"]
    lines.extend(line for block in blocks for line in block)
    hidden = len(incidents) - len(blocks)
    if hidden:
        lines.append(f"  and {hidden} more: fleet incidents")
    return lines


def _known(document: render.Json) -> list[str]:
    """How many incidents people know of; they count in every number above all the same."""
    words = (("acknowledged", "acknowledged"), ("silenced", "silenced"), ("maintenance", "in maintenance"))
    counts = [(render.count(document, "known", key), word) for key, word in words]
    parts = [f"{amount} {word}" for amount, word in counts if amount]
    return [f"  known: {', '.join(parts)}"] if parts else []


def _incident(incident: render.Json, colored: bool, limit: int, full: bool) -> list[str]:
    """`INC-4 ✖ CRIT 12m  gpu-a03/3  what: which kind`; in full with the numbers and the runbook below it."""
    severity = str(incident.get("severity"))
    place = str(incident.get("place") or incident.get("node"))
    since = render.age(incident.get("age_s"))
    what, kind = str(incident.get("headline")), str(incident.get("code") or "").replace("_", " ")
    if kind and kind not in what.lower():
        what = f"{what}: {kind}"
    flags = flags_of(incident)
    known = f"  ({flags})" if flags else ""
    first = f"  {incident.get('id')!s:<7} {render.state(severity)}  {since:>4}  {place}  {what}{known}"
    lines = render.wrap_line(first, limit, " " * 9)
    if full:
        detail = "; ".join(str(part) for part in (incident.get("reason"), _extra(incident)) if part)
        lines.extend(render.wrap_line(" " * 9 + detail, limit, " " * 9) if detail else [])
    return [render.paint(line, severity, colored) if n == 0 else line for n, line in enumerate(lines)]


def _extra(incident: render.Json) -> str:
    """How many other findings hang on it, and the runbook."""
    parts = []
    others = len(render.items(incident, "findings")) - 1
    if others > 0:
        parts.append(f"+{others} finding{'s' if others > 1 else ''}")
    if incident.get("runbook"):
        parts.append(f"runbook {str(incident['runbook']).rpartition('/')[2].removesuffix('.md')}")
    return ", ".join(parts)


def _node_groups(document: Json, colored: bool, limit: int) -> list[str]:
    """One line per state, as `sinfo` does: the names are folded."""
    groups: dict[str, list[render.Json]] = {}
    bare: list[render.Json] = []
    for item in render.items(document, "items"):
        if item.get("has_gpus"):
            groups.setdefault(str(item.get("state")), []).append(item)
        else:
            bare.append(item)
    rows = []
    for word in ("critical", "unknown", "degraded", "ok"):
        if word in groups:
            names = hostlist.fold(str(item.get("node")) for item in groups[word])
            rows.append([render.state(word, colored), str(len(groups[word])), _oldest(groups[word]), names])
    if bare:
        names = hostlist.fold(str(item.get("node")) for item in bare)
        rows.append(["· without GPUs", str(len(bare)), _oldest(bare), names])
    for flag in ("maintenance", "silenced"):
        marked = [item for item in render.items(document, "items") if flag in _flags(item)]
        if marked:
            names = hostlist.fold(str(item.get("node")) for item in marked)
            rows.append([f"· {flag}", str(len(marked)), _oldest(marked), names])
    if not rows:
        return ["", "no nodes yet: start fleet-agent on a host, or fleet inventory import FILE.csv"]
    columns = [
        Column("NODES"),
        Column("#", right=True),
        Column("DATA AGE", right=True),
        Column("NAMES", fold=True),
    ]
    return ["", *render.table(columns, rows, limit)]


def _flags(item: render.Json) -> list[object]:
    found = item.get("flags")
    return found if isinstance(found, list) else []


def _oldest(nodes: Sequence[render.Json]) -> str:
    """The age of the oldest data among some nodes; a node that was never heard is older than all."""
    ages = [_age_of(item) for item in nodes]
    return render.age(max(ages, key=lambda age: float("inf") if age is None else age))


def _age_of(item: render.Json) -> float | None:
    found = item.get("age_s")
    return float(found) if isinstance(found, int | float) else None


def _node_table(document: Json, colored: bool) -> list[str]:
    """One line per node."""
    columns = [
        Column("NODE"), Column("STATE"), Column("GPUS", right=True), Column("OK", right=True),
        Column("DEGRADED", right=True), Column("CRITICAL", right=True), Column("NO DATA", right=True),
        Column("DATA AGE", right=True), Column("EXPECTATION"), Column("WHY"),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("node")),
            render.state(item.get("state"), colored),
            *(
                str(render.count(item, "gpus", key))
                for key in ("expected", "ok", "degraded", "critical", "no_data")
            ),
            render.age(item.get("age_s")),
            str(item.get("expectation") or "none"),
            str(item.get("reason") or ""),
        ]
        for item in render.items(document, "items")
    ]
    return ["", *render.table(columns, rows, render.width())] if rows else ["", "no nodes yet"]


def _next(document: Json) -> list[str]:
    """The commands a person would type now."""
    incidents = render.items(document, "incidents")
    if incidents:
        first = incidents[0]
        entity = str(first.get("entity"))
        node, job = first.get("node"), entity.removeprefix("job:")
        there = f" | fleet node {node}" if node else f" | fleet job {job}" if job != entity else ""
        there = "" if str(node).startswith("(") else there
        return ["", f"next: fleet incidents show {first.get('number')}{there}"]
    quiet = [item for item in render.items(document, "items") if item.get("state") != "ok"]
    return ["", f"next: fleet node {quiet[0].get('node')}"] if quiet else []
