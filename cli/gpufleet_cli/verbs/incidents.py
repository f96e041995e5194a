"""`fleet incidents`: what is or was wrong, one line each; `show` tells one whole story.

The other words are what people do with incidents: ack, unack, note, close, silence, report.
"""

from collections.abc import Sequence
from itertools import groupby

import click

from gpufleet import hostlist
from gpufleet_cli import errors, handover, person, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.errors import FleetError
from gpufleet_cli.handover import by, flags_of
from gpufleet_cli.render import Column, clock
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.verbs.node import jobs_of, limit_of

MOST_FINDINGS = 12
"""More are folded, those of one rule and state into one line; `-o wide` shows each."""

MOST_CHANGES = 5


@click.group(invoke_without_command=True)
@options
@click.pass_context
def incidents(context: click.Context) -> None:
    """Incidents: one cause, its findings, its timeline. Without a word: `list`."""
    if context.invoked_subcommand is None:
        _list(context, False)


@incidents.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also the resolved ones.")
@options
@click.pass_context
def list_incidents(context: click.Context, everything: bool) -> None:
    """Open incidents, worst first; those that people know of after the others."""
    _list(context, everything)


def _list(context: click.Context, everything: bool) -> None:
    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.ListIncidents, fleet_pb2.ListIncidentsRequest(all=everything))

    show.show(context, fetch, _lines, _exit_code)


def _why(item: render.Json) -> object:
    into = item.get("merged_into")
    return item.get("reason") if into is None else f"merged into INC-{into}"


def _exit_code(document: Json) -> int:
    found = render.items(document, "items")
    return show.worst([item.get("severity") for item in found if item.get("state") == "open"])


def _lines(document: Json, settings: Settings) -> str:
    columns = [
        Column("INCIDENT"), Column("SEVERITY"), Column("STATE"), Column("AGE", right=True), Column("WHERE"),
        Column("WHAT", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("id")),
            render.state(item.get("severity"), settings.colored),
            flags_of(item) or str(item.get("state")),
            render.age(item.get("age_s")),
            str(item.get("place") or item.get("node")),
            ": ".join(str(part) for part in (item.get("headline"), _why(item)) if part),
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit_of(settings))) if rows else "no open incidents"


@incidents.command("show")
@click.argument("number")
@options
@click.pass_context
def show_incident(context: click.Context, number: str) -> None:
    """One incident with its findings, evidence and timeline; NUMBER is 42 or INC-42."""
    wanted = incident_number(number)

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(client.stub.GetIncident, fleet_pb2.GetIncidentRequest(number=wanted))

    show.show(context, fetch, _story, _exit_code)


def incident_number(word: str) -> int:
    """42 of `42`, `INC-42` or `inc-42`.

    Raises:
        FleetError: It is none of them.
    """
    digits = word.upper().removeprefix("INC-")
    if digits.isascii() and digits.isdigit() and 0 < int(digits) < 2**63:
        return int(digits)
    raise FleetError(
        "usage", f"{word!r} is no incident: write 42 or INC-42", "see fleet incidents", errors.USAGE
    )


def _story(document: Json, settings: Settings) -> str:
    found = render.items(document, "items")[0]
    limit = limit_of(settings)
    first = (
        f"{found.get('id')}  {render.state(found.get('severity'), settings.colored)}  {found.get('state')}  "
        f"{found.get('headline')}"
    )
    lines = render.wrap_line(first, limit, "  ")
    for title, value in _facts(found):
        lines.extend(render.wrap_line(f"  {title:<8} {value}", limit, " " * 11))
    lines.extend(_findings(found, settings, limit))
    log = [[clock(at), what, text] for at, what, text in _folded(render.items(found, "log"))]
    if log:
        lines += [
            "",
            *render.table([Column("TIMELINE (UTC)"), Column("WHAT"), Column("TEXT", fold=True)], log, limit),
        ]
    events = [
        [
            clock(event.get("ts")),
            str(event.get("kind")),
            str(event.get("place") or event.get("entity")),
            str(event.get("message")),
        ]
        for event in render.items(found, "events")
    ]
    if events:
        head = [Column("EVENTS AROUND IT"), Column("KIND"), Column("ON"), Column("MESSAGE", fold=True)]
        lines += ["", *render.table(head, events, limit)]
    return "\n".join(lines)


def _facts(found: render.Json) -> list[tuple[str, str]]:
    """What, where, since, next: only what is known."""
    where = render.get(found, "where")
    place = str(found.get("place") or found.get("node"))
    names = [
        f"{key} {render.get(where, key)}"
        for key in ("serial", "slot", "pci", "gpu_uuid")
        if render.get(where, key)
    ]
    pairs = [
        ("what", found.get("reason")),
        ("where", "  ".join([place, *names])),
        ("since", f"{clock(found.get('opened_at'))} UTC ({render.age(found.get('age_s'))} ago)"),
        (
            "ended",
            f"{clock(found.get('resolved_at'))} UTC: {found.get('cause')}"
            if found.get("resolved_at")
            else None,
        ),
        ("known", _known(found)),
        ("jobs", jobs_of(found)),
        ("changed", "; ".join(_change(one) for one in render.items(found, "changed")[:MOST_CHANGES])),
        ("tried", ", ".join(_tried(one) for one in render.items(found, "tried"))),
        ("before", _before(found.get("repeats"))),
        ("proof", found.get("proof")),
        ("do", found.get("action")),
        ("runbook", found.get("runbook")),
    ]
    return [(title, str(value)) for title, value in pairs if value]


def _known(found: render.Json) -> str | None:
    """Who knows of it, and until when."""
    claimed, until, note = (render.get(found, "acknowledged", key) for key in ("claimed", "until", "note"))
    parts = [
        flags_of(found),
        "the name is claimed" if claimed else "",
        f"until {clock(until)} UTC" if until else "",
        str(note or ""),
    ]
    return "; ".join(part for part in parts if part) or None


def _change(one: render.Json) -> str:
    before, after = one.get("before"), one.get("after")
    if before is None or after is None:
        step = f"{after} (new)" if before is None else f"{before} (gone)"
    else:
        step = f"{before} -> {after}"
    return f"{one.get('what')} {step} on {one.get('nodes')}, {clock(one.get('at'))}"


def _tried(one: render.Json) -> str:
    return f"{one.get('step')} {one.get('count')} x (last {clock(one.get('last_at'))})"


def _before(repeats: object) -> str:
    """How often this card was in trouble in the last month, wherever it sat."""
    if not isinstance(repeats, dict):
        return ""
    numbers = repeats.get("incidents") or []
    names = ", ".join(str(one) for one in numbers[-MOST_CHANGES:])
    text = (
        f"serial {repeats.get('serial') or '?'}: {render.plural(len(numbers), 'incident')} in 30 d ({names})"
    )
    where = hostlist.fold(str(node) for node in repeats.get("nodes") or [])
    text += f" on {where}" if where else ""
    return f"{text}; REPEAT OFFENDER" if repeats.get("offender") else text


def _folded(log: Sequence[render.Json]) -> list[tuple[object, str, str]]:
    """Lines of the timeline; what many nodes of one incident say at once is one line."""
    lines: list[tuple[object, str, str]] = []
    for (at, what, head), same in groupby(log, _alike):
        entries = list(same)
        text = str(entries[0].get("text"))
        if len(entries) > 2:
            text = f"{head}: {len(entries)} findings, the first: {text.removeprefix(head).lstrip(': ')}"
            lines.append((at, what, text))
        else:
            lines += [(one.get("logged_at"), what, _said(one)) for one in entries]
    return lines


def _said(entry: render.Json) -> str:
    """What happened, and who did it where it was a person."""
    text = str(entry.get("text"))
    return f"{by(entry)}: {text}".removesuffix(": ") if entry.get("by") else text


def _alike(entry: render.Json) -> tuple[str, str, str]:
    """To the second, what, and the title before the reason."""
    head = str(entry.get("text")).partition(": ")[0] if entry.get("finding") is not None else ""
    return (clock(entry.get("logged_at")), str(entry.get("what")), head)


def _findings(found: render.Json, settings: Settings, limit: int) -> list[str]:
    rows = []
    findings = render.items(found, "findings")
    many = len(findings) > MOST_FINDINGS and settings.output != "wide"
    groups: dict[object, list[render.Json]] = {}
    for number, finding in enumerate(findings):
        same = (finding.get("rule"), finding.get("verdict"), finding.get("state"))
        groups.setdefault(same if many else number, []).append(finding)
    for group in groups.values():
        finding = group[0]
        names = {str(one.get("node")) for one in group}
        one = len(group) == 1
        rows.append(
            [
                str(finding.get("rule")),
                f"{render.state(finding.get('verdict'), settings.colored)} {finding.get('state')}",
                str(finding.get("place") or finding.get("entity")) if one else hostlist.fold(names),
                _measured(finding) if one else "-",
                ("" if one else f"{len(group)} findings, the first: ") + str(finding.get("reason") or ""),
            ]
        )
    if not rows:
        return []
    head = [
        Column("FINDING"),
        Column("STATE"),
        Column("ON"),
        Column("OBSERVED/EXPECTED"),
        Column("REASON", fold=True),
    ]
    return ["", *render.table(head, rows, limit)]


def _measured(finding: render.Json) -> str:
    observed, expected = finding.get("observed"), finding.get("expected")
    if observed is None and expected is None:
        return "-"
    unit = f" {finding['unit']}" if finding.get("unit") else ""
    return f"{_short(observed)}/{_short(expected)}{unit}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


# ---- what people do with incidents


def _numbers(words: tuple[str, ...]) -> list[int]:
    return [incident_number(word) for word in words]


def _act(
    context: click.Context, words: tuple[str, ...], act: str, text: str = "", for_s: float = 0.0
) -> None:
    numbers = _numbers(words)

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.ActOnIncidentsRequest(
            numbers=numbers, act=fleet_pb2.Act.Value(act), text=text, for_s=for_s, author=person.author()
        )
        return client.document(client.stub.ActOnIncidents, request)

    show.once(context, fetch, _after)


def _after(document: Json, settings: Settings) -> str:
    """The incidents as they are now, and what the person should know."""
    warnings = render.get(document, "warnings")
    lines = [f"! {line}" for line in warnings] if isinstance(warnings, list) else []
    folded = [part for line in lines for part in render.wrap_line(line, limit_of(settings), "  ")]
    return "\n".join([_lines(document, settings), *folded])


@incidents.command()
@click.argument("numbers", metavar="INC...", nargs=-1, required=True)
@click.option("--note", default="", help="What you are doing about it.")
@click.option("--for", "for_", metavar="TIME", default="", help="How long: 8h (default: until it ends).")
@options
@click.pass_context
def ack(context: click.Context, numbers: tuple[str, ...], note: str, for_: str) -> None:
    """Acknowledge incidents: you own them, so they are no news any more. Their states still count.

    It holds when the same trouble comes back within 30 minutes, and ends with `unack`, `close`, or its time.
    """
    _act(context, numbers, "ACT_ACKNOWLEDGE", note, person.seconds(for_) if for_ else 0.0)


@incidents.command()
@click.argument("numbers", metavar="INC...", nargs=-1, required=True)
@options
@click.pass_context
def unack(context: click.Context, numbers: tuple[str, ...]) -> None:
    """Take acknowledgements back: the incidents are news again."""
    _act(context, numbers, "ACT_UNACKNOWLEDGE")


@incidents.command()
@click.argument("number", metavar="INC")
@click.argument("text")
@options
@click.pass_context
def note(context: click.Context, number: str, text: str) -> None:
    """Add TEXT to the timeline of an incident, also of a resolved one."""
    _act(context, (number,), "ACT_NOTE", text)


@incidents.command()
@click.argument("numbers", metavar="INC...", nargs=-1, required=True)
@click.option("--reason", required=True, help="Why; kept as the cause of its end.")
@options
@click.pass_context
def close(context: click.Context, numbers: tuple[str, ...], reason: str) -> None:
    """Close incidents and their findings; what new evidence violates opens again.

    It is the only way, beside evidence, to end what is kept until it is proven mended. What still violates is
    said.
    """
    _act(context, numbers, "ACT_CLOSE", reason)


@incidents.command()
@click.argument("matcher", nargs=-1)
@click.option("--for", "for_", metavar="TIME", default="", help="How long: 90m, 4h, 7d; at most 7d.")
@click.option("--reason", default="", help="Why; kept with the silence.")
@click.option("--end", metavar="NUMBER", multiple=True, help="End this silence before its time.")
@options
@click.pass_context
def silence(
    context: click.Context, matcher: tuple[str, ...], for_: str, reason: str, end: tuple[str, ...]
) -> None:
    """Silence findings for a while; without a MATCHER list the silences in force. States still count.

    A MATCHER is node=gpu-[001-004], rule=xid,gpu_missing, entity=gpu:GPU-1b2c or serial=1650 (of a card,
    wherever it is); of several each must match. An incident is silenced when all its findings are.
    """
    if end and (matcher or for_ or reason):
        raise click.UsageError("--end takes no matcher, --for or --reason")
    if end:
        _end_silences(context, [person.whole_number(word, "silence") for word in end])
    elif matcher:
        if not for_ or not reason:
            raise click.UsageError("a silence needs --for (at most 7d) and --reason")
        _add_silence(context, person.matcher(matcher), person.seconds(for_), reason)
    elif for_ or reason:
        raise click.UsageError("a silence needs a matcher: node=, rule=, entity= or serial=")
    else:
        show.show(context, _silences, _silence_lines, lambda _: errors.OK)


def _silences(client: Client) -> Json:
    from gpufleet.v1 import fleet_pb2

    return client.document(client.stub.ListSilences, fleet_pb2.ListSilencesRequest())


def _add_silence(context: click.Context, names: dict[str, list[str]], for_s: float, reason: str) -> None:
    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.AddSilenceRequest(
            nodes=names.get("nodes"), rules=names.get("rules"), entities=names.get("entities"),
            serials=names.get("serials"), for_s=for_s, reason=reason, author=person.author(),
        )  # fmt: skip
        return client.document(client.stub.AddSilence, request)

    show.once(context, fetch, _silence_lines)


def _end_silences(context: click.Context, ids: list[int]) -> None:
    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        return client.document(
            client.stub.EndSilences, fleet_pb2.EndSilencesRequest(ids=ids, author=person.author())
        )

    show.once(context, fetch, _silence_lines)


def _silence_lines(document: Json, settings: Settings) -> str:
    columns = [
        Column("SILENCE", right=True), Column("STATE"), Column("UNTIL (UTC)"), Column("BY"),
        Column("MATCHER, REASON, WHAT IT SILENCES", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("silence")),
            str(item.get("state")),
            clock(item.get("ended_at") or item.get("until")),
            by(item),
            f"{item.get('matcher')}: {item.get('reason')}; {_silenced(item)}",
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit_of(settings))) if rows else "no silences"


def _silenced(item: render.Json) -> str:
    amount, numbers = render.count(item, "findings"), item.get("incidents")
    if not amount:
        return "nothing now"
    named = [f"INC-{number}" for number in numbers] if isinstance(numbers, list) else []
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    return render.plural(amount, "finding") + (f" of {', '.join(named[:5])}{more}" if named else "")


@incidents.command()
@click.option("--since", metavar="TIME", default="12h", show_default=True, help="How far back: 12h, 7d.")
@options
@click.pass_context
def report(context: click.Context, since: str) -> None:
    """The hand-over of a shift: open, closed, silenced, and who did what; `-o md` for a page or a chat."""
    since_s = person.seconds(since)
    settings = settings_of(context)

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.ReportIncidentsRequest(since_s=since_s)
        return client.document(client.stub.ReportIncidents, request)

    if settings.output == "md":
        with Client(settings) as client:
            show.echo(handover.markdown(fetch(client)), newline=False)
        return
    show.show(context, fetch, _report, _exit_code)


def _report(document: Json, settings: Settings) -> str:
    return handover.screen(document, limit_of(settings), settings.colored)
