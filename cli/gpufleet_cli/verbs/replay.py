"""`fleet replay`: what a rule would have raised, before it is released or its limit is changed."""

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import click

from gpufleet_cli import errors, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.render import Column
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.times import MOMENT, SPAN
from gpufleet_cli.verbs.node import limit_of

MAX_FILE_BYTES = 100_000
MAX_SECONDS = 3600.0
MAX_SHOWN = 50
"""Findings and entities on the screen; `-o json` has them all."""

_COMPARED = {"both": "raised too", "replay_only": "NEW", "raised_only": "NOT AGAIN"}


@click.command(
    short_help="What a rule would have raised over stored history.",
    epilog="""
\b
Examples:
  fleet replay --rule temperature_margin --since 2d
  fleet replay --rule temperature_margin --limit margin_c=5 --since 2d
  fleet replay --rule ./my_rule.sql --since 30d -o json
""",
)
@click.option(
    "--rule", required=True, metavar="NAME|FILE", help="A rule of the collector, or a file that ends in .sql."
)
@click.option("--since", type=MOMENT, required=True, metavar="TIME", help="From when: 2h, 30d, or a date.")
@click.option("--until", type=MOMENT, default=None, metavar="TIME", help="Up to when.  [default: now]")
@click.option(
    "--step", type=SPAN, default=None, metavar="TIME",
    help="Between two passes.  [default: the rule's own, or what the time allows]",
)  # fmt: skip
@click.option(
    "--limit", "over", multiple=True, metavar="NAME=VALUE",
    help="Another limit, on every node; may be given more than once.",
)  # fmt: skip
@click.option("--as-known", is_flag=True, help="Only rows that had been received by the time of each pass.")
@click.option(
    "--max-seconds", type=click.FloatRange(min=1, max=MAX_SECONDS), default=600.0, show_default=True,
    help="How long it may take.",
)  # fmt: skip
@options
@click.pass_context
def replay(
    context: click.Context,
    rule: str,
    since: datetime,
    until: datetime | None,
    step: float | None,
    over: tuple[str, ...],
    as_known: bool,
    max_seconds: float,
) -> None:
    """Judge stored history with a rule, also an unreleased one: what it would have raised, and what was.

    The same code and hysteresis as in the live judge, in a process of its own; nothing is changed. An
    estimate comes first, on stderr. Ctrl-C ends it.
    """
    from gpufleet.v1 import fleet_pb2

    settings = settings_of(context)
    if settings.watch:
        raise click.UsageError("a replay is not watched: leave -w out")
    name, text = _rule(rule)
    request = fleet_pb2.ReplayRequest(
        rule=name, text=text, since_us=_us(since), until_us=_us(until) if until else 0, step_s=step or 0.0,
        as_known=as_known, limits=_limits(over), timeout_s=max_seconds,
    )  # fmt: skip
    with Client(settings) as client:
        parts: list[bytes] = []
        on_terminal = sys.stderr.isatty() and settings.screen
        for reply in client.stream(client.stub.Replay, request, max_seconds + settings.timeout):
            if reply.estimate:
                click.echo(_estimate(json.loads(reply.estimate)), err=True)
            elif reply.progress and on_terminal:
                click.echo(f"\r{reply.progress:4.0%}\r", nl=False, err=True)
            parts.append(reply.json)
    document = json.loads(b"".join(parts))
    show.emit(document, _screen, settings)
    context.exit(errors.OK)


def _rule(given: str) -> tuple[str, str]:
    """A name, or a file's name and text."""
    if not given.endswith(".sql") and "/" not in given:
        return given, ""
    path = Path(given)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise click.UsageError(f"{given}: {error.strerror or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise click.UsageError(f"{given}: a rule has at most {MAX_FILE_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise click.UsageError(f"{given}: is not UTF-8 text") from None
    if not text.strip():
        raise click.UsageError(f"{given}: is empty")
    return path.name.removesuffix(".sql"), text


def _limits(given: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise click.UsageError(f"--limit {one!r:.60} is not NAME=VALUE")
    return found


def _us(at: datetime) -> int:
    return (at - datetime(1970, 1, 1)) // timedelta(microseconds=1)


def _estimate(document: Json) -> str:
    return (
        f"replaying {document.get('rule')}: {document.get('passes')} passes, "
        f"{_number(document.get('step_s'))} s apart, {document.get('rows')} rows, "
        f"about {_number(document.get('estimated_s'))} s"
    )


def _screen(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    lines = render.wrap_line("   ".join(_head(document)), limit, "  ")
    lines.append(_totals(document))
    findings = render.items(document, "items")
    columns = [
        Column("FROM"), Column("TO"), Column("VERDICT"), Column("ON"), Column("CODE"), Column("COMPARED"),
        Column("REASON", fold=True),
    ]  # fmt: skip
    rows = [
        [
            _time(item.get("fired_at")),
            _time(item.get("resolved_at")) if item.get("resolved_at") else "open",
            render.state(item.get("verdict"), settings.colored),
            str(item.get("place") or item.get("entity")),
            str(item.get("code")),
            _COMPARED.get(str(item.get("compared")), ""),
            str(item.get("reason") or ""),
        ]
        for item in findings[:MAX_SHOWN]
    ]
    if rows:
        lines += ["", *render.table(columns, rows, limit)]
    entities = render.items(document, "entities")
    if len(findings) > len(entities):
        columns = [Column("ENTITY"), Column("REPLAYED", right=True), Column("RAISED", right=True)]
        rows = [
            [str(one.get("place")), render.number(one.get("replayed")), render.number(one.get("raised"))]
            for one in entities[:MAX_SHOWN]
        ]
        lines += ["", *render.table(columns, rows, limit)]
    if len(findings) > MAX_SHOWN:
        lines += ["", f"{MAX_SHOWN} of {len(findings)} findings shown: -o json has them all"]
    notes = document.get("notes")
    if isinstance(notes, list) and notes:
        lines.append("")
        lines += [line for note in notes for line in render.wrap_line(f"note: {note}", limit, "  ")]
    return "\n".join(lines)


def _head(document: Json) -> list[str]:
    limits = document.get("limits")
    parts = [
        f"{document.get('rule')}{' (file)' if document.get('from_file') else ''}",
        f"{_time(document.get('since'))} to {_time(document.get('until'))}"
        f"{', as known then' if document.get('as_known') else ''}",
        f"fires after {document.get('for')}",
        f"{document.get('passes')} passes, {_number(document.get('step_s'))} s apart, "
        f"took {_number(document.get('took_s'))} s",
    ]
    if isinstance(limits, dict) and limits:
        parts.append("with " + ", ".join(f"{name} = {_number(value)}" for name, value in limits.items()))
    return parts


def _totals(document: Json) -> str:
    def count(key: str) -> int:
        return render.count(document, "totals", key)

    text = f"{render.plural(count('replayed'), 'finding')} in the replay"
    if not document.get("known_rule"):
        return f"{text}; no rule of that name judges here, so there is nothing to compare with"
    return (
        f"{text}, {count('raised')} really raised: {count('both')} the same, {count('replay_only')} new, "
        f"{count('raised_only')} not raised again"
    )


def _time(text: object) -> str:
    return str(text)[:19].replace("T", " ") if text else "-"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"
