"""`fleet coverage`: what cannot be judged, where, and why."""

import click

from gpufleet_cli import errors, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options
from gpufleet_cli.verbs.node import limit_of


@click.command(short_help="What cannot be judged, where, and why.")
@click.argument("nodes", nargs=-1)
@options
@click.pass_context
def coverage(context: click.Context, nodes: tuple[str, ...]) -> None:
    """What cannot be judged now, and why: of the whole fleet, or of NODES in full.

    `unknown` is missing or unreadable data; `n/a` cannot apply there (idle, not supported, nothing expected).
    """

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.GetCoverage, fleet_pb2.GetCoverageRequest(nodes=nodes), 30.0)

    show.show(context, fetch, _nodes if nodes else _fleet, _exit_code)


def _exit_code(document: Json) -> int:
    return errors.NO_DATA if render.count(document, "fleet", "unknown") else errors.OK


def _fleet(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    lines = _summary(document, limit)
    lines.extend(_rules(document, limit))
    columns = [
        Column("NODE"),
        Column("UNKNOWN", right=True),
        Column("SEEN", right=True),
        Column("WHY", fold=True),
    ]
    rows = [
        [str(item.get("node")), render.number(item.get("unknown")), render.age(item.get("age_s")), why]
        for item in render.items(document, "items")
        if (why := _why(item))
    ]
    if rows:
        lines += ["", *render.table(columns, rows, limit)]
    return "\n".join(lines)


def _summary(document: Json, limit: int) -> list[str]:
    nodes = render.count(document, "fleet", "nodes")
    parts = [
        f"{render.plural(nodes, 'node')}: {render.count(document, 'fleet', 'nodes_judged')} judged by every "
        f"rule that can run there, {render.count(document, 'fleet', 'nodes_partly')} in part, "
        f"{render.count(document, 'fleet', 'nodes_unjudged')} by none, "
        f"{render.count(document, 'fleet', 'nodes_silent')} silent",
        f"{render.count(document, 'fleet', 'rules_running')} of "
        f"{render.plural(render.count(document, 'fleet', 'rules'), 'rule')} run",
        f"verdicts {render.count(document, 'fleet', 'judged')} judged, "
        f"{render.count(document, 'fleet', 'unknown')} unknown, {render.count(document, 'fleet', 'na')} n/a",
    ]
    bare = render.count(document, "fleet", "nodes_without_expectation")
    if bare:
        parts.append(f"{render.plural(bare, 'node')} without an expectation (fleet inventory accept NODE)")
    return render.wrap_line("   ".join(parts), limit, "  ")


def _rules(document: Json, limit: int) -> list[str]:
    """What the rules cannot judge, unknown first, and those that do not run."""
    columns = [
        Column("RULE"), Column("VERDICT"), Column("ON", right=True), Column("NODES", right=True),
        Column("WHY", fold=True),
    ]  # fmt: skip
    rows: list[tuple[int, list[str]]] = []
    for rule in render.items(document, "rules"):
        name = str(rule.get("rule"))
        for one in render.items(rule, "reasons"):
            bad = one.get("verdict") == "unknown"
            why = f"{one.get('code')}: {one.get('reason')}"
            rows.append(
                (0 if bad else 1, [name, str(one.get("verdict")), render.number(one.get("entities")),
                                   render.number(one.get("nodes")), why])
            )  # fmt: skip
    rows.sort(key=lambda row: row[0])
    lines = ["", *render.table(columns, [row for _, row in rows], limit)] if rows else []
    return lines + _stopped(document, limit)


def _stopped(document: Json, limit: int) -> list[str]:
    """Rules that do not run, those of one reason together."""
    together: dict[str, list[str]] = {}
    for rule in render.items(document, "rules"):
        if rule.get("status") != "ok":
            why = ": ".join(str(part) for part in (rule.get("status"), rule.get("problem")) if part)
            together.setdefault(why, []).append(str(rule.get("rule")))
    rows = [
        [render.plural(len(names), "rule"), f"{why}: {', '.join(names)}"] for why, names in together.items()
    ]
    columns = [Column("NOT RUNNING"), Column("WHY", fold=True)]
    return ["", *render.table(columns, rows, limit)] if rows else []


def _why(item: render.Json) -> str:
    """Why this node is not judged wholly; empty when it is."""
    parts = ["silent"] if item.get("silent") else []
    if not item.get("expectation"):
        parts.append("nothing is expected of it")
    failing = [str(one.get("probe")) for one in render.items(item, "probes_failing")]
    if failing:
        parts.append(f"probes fail: {', '.join(failing)}")
    off = [str(one.get("probe")) for one in render.items(item, "probes_off")]
    if off:
        parts.append(f"probes off: {', '.join(off)}")
    rules = list(dict.fromkeys(str(one.get("rule")) for one in render.items(item, "gaps")))
    if item.get("unknown"):
        parts.append(f"unknown to {', '.join(rules[:4])}{f' and {len(rules) - 4} more' if rules[4:] else ''}")
    return "; ".join(parts)


def _nodes(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    blocks = []
    for item in render.items(document, "items"):
        head = [
            str(item.get("node")),
            "silent" if item.get("silent") else f"seen {render.age(item.get('age_s'))} ago",
            f"expectation {item.get('expectation') or 'none'}",
            f"verdicts {render.count(item, 'judged')} judged, {render.count(item, 'unknown')} unknown, "
            f"{render.count(item, 'na')} n/a",
        ]
        lines = render.wrap_line("   ".join(head), limit, "  ")
        lines.extend(_gaps(item, limit))
        lines.extend(_probes(item, limit))
        lines.extend(_capabilities(item, limit))
        blocks.append("\n".join(lines))
    return "\n".join(["\n\n".join(blocks), *_stopped(document, limit)])


def _gaps(item: render.Json, limit: int) -> list[str]:
    columns = [Column("VERDICT"), Column("RULE"), Column("ON", right=True), Column("WHY", fold=True)]
    rows = [
        [
            str(gap.get("verdict")), str(gap.get("rule")), render.number(gap.get("entities")),
            f"{gap.get('code')}: {gap.get('reason')}",
        ]
        for gap in sorted(render.items(item, "gaps"), key=lambda gap: gap.get("verdict") != "unknown")
    ]  # fmt: skip
    return ["", *render.table(columns, rows, limit, "  ")] if rows else []


def _probes(item: render.Json, limit: int) -> list[str]:
    rows = [
        [str(one.get("probe")), "fails", str(one.get("error"))]
        for one in render.items(item, "probes_failing")
    ]
    for one in render.items(item, "probes_off"):
        rules = one.get("rules")
        names = ", ".join(str(name) for name in rules) if isinstance(rules, list) else ""
        rows.append([str(one.get("probe")), "off", f"wanted by {names}" if names else "no rule wants it"])
    columns = [Column("PROBE"), Column("STATE"), Column("WHY", fold=True)]
    return ["", *render.table(columns, rows, limit, "  ")] if rows else []


def _capabilities(item: render.Json, limit: int) -> list[str]:
    """Values that the host does not give, a line per probe and reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for one in render.items(item, "capabilities"):
        key = (str(one.get("probe")), str(one.get("reason")))
        grouped.setdefault(key, []).append(str(one.get("metric")))
    rows = [[probe, reason, ", ".join(sorted(set(metrics)))] for (probe, reason), metrics in grouped.items()]
    columns = [Column("NO VALUE FROM"), Column("BECAUSE"), Column("METRICS", fold=True)]
    return ["", *render.table(columns, rows, limit, "  ")] if rows else []
