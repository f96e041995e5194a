"""`fleet bench`: who is measured, run one now, how a card did over time, beside whom, against what."""

import json
from collections import Counter
from collections.abc import Sequence

import click

from gpufleet_cli import errors, person, render, show
from gpufleet_cli.client import Client, Json
from gpufleet_cli.errors import FleetError
from gpufleet_cli.render import Column, clock
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.times import SPAN
from gpufleet_cli.verbs.limits import number
from gpufleet_cli.verbs.node import limit_of

RUN_S = 1200.0
"""A run of several benches, each behind one that runs already, takes no longer."""

MAX_SHOWN = 200
"""Rows of a history on the screen; `-o json` has them all."""

ACCEPT = "accept"
EXIT = {"good": errors.OK, "bad": errors.BAD}


@click.group(invoke_without_command=True, short_help="Micro-benchmarks: run, history, compare, baselines.")
@options
@click.pass_context
def bench(context: click.Context) -> None:
    """Micro-benchmarks of the cards. Without a word: who was measured when, what it took, and the suspects.

    A card that one run shows slow is a suspect: it is measured again after five minutes, and after an hour
    where that was slow too. S/H and S TOTAL are seconds that benches kept a card in the last hour, at most,
    and all cards since the agent started.
    """
    if context.invoked_subcommand is None:

        def fetch(client: Client) -> Json:
            from gpufleet.v1 import fleet_pb2

            return client.document(client.stub.ListBenches, fleet_pb2.ListBenchesRequest())

        show.show(context, fetch, _overview, lambda _: errors.OK)


@bench.command()
@click.argument("node")
@click.argument("benches", metavar="[BENCH]...", nargs=-1)
@click.option("--gpu", default="", metavar="N", help="One card: its index, UUID, serial or PCI address.")
@click.option("--peer", default="", metavar="NODE", help="Of bench tcp: the node that NODE sends to.")
@options
@click.pass_context
def run(context: click.Context, node: str, benches: tuple[str, ...], gpu: str, peer: str) -> None:
    """Have the agent of NODE run benches now and judge the results; without BENCH `h2d` and `clock`.

    `tcp --peer NODE2` sends a TCP stream from NODE to NODE2; both need `[benches.tcp] listen` in agent.toml.

    It goes through the agent's gate and budget like any other run. Ctrl-C leaves it running; `fleet bench
    history NODE` shows its result.

    Exit code 0: every result is as good as its baseline or floor. 1: one is below, failed or hung. 12: one
    was not measured (a card is busy), or there is nothing to compare it with.
    """
    from gpufleet.v1 import fleet_pb2

    settings = settings_of(context)
    if settings.watch:
        raise click.UsageError("a run is not watched: leave -w out")
    request = fleet_pb2.RunBenchRequest(
        node=node, benches=benches, gpu=gpu, peer=peer, author=person.author()
    )
    parts: list[bytes] = []
    asked = False
    with Client(settings) as client:
        try:
            for reply in client.stream(client.stub.RunBench, request, RUN_S):
                if reply.progress:
                    asked = True
                    click.echo(render.plain_if_needed(f"{node}: {reply.progress}"), err=True)
                parts.append(reply.json)
        except KeyboardInterrupt:
            if asked:
                click.echo(f"\nthe run goes on: fleet bench history {node}", err=True)
            raise
    document = json.loads(b"".join(parts) or b"null")
    if not isinstance(document, dict):
        raise FleetError("bad_reply", "the collector's reply is no document", "", errors.INTERNAL)
    show.emit(document, _run, settings)
    context.exit(EXIT.get(str(document.get("verdict")), errors.NO_DATA))


@bench.command()
@click.argument("subject", metavar="NODE|GPU")
@click.argument("name", metavar="[BENCH]", required=False, default="")
@click.option("--since", type=SPAN, default="7d", show_default=True, help="How far back.")
@options
@click.pass_context
def history(context: click.Context, subject: str, name: str, since: float) -> None:
    """Every run on a node or card, newest first, beside its baseline; also those that gave no value, and why.

    A `*` marks the first result under another driver or firmware.
    """

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.GetBenchHistoryRequest(subject=subject, bench=name, since_s=since)
        return client.document(client.stub.GetBenchHistory, request, 30.0)

    show.show(context, fetch, _history, lambda _: errors.OK)


@bench.command()
@click.argument("subject", metavar="NODE|MODEL")
@click.option(
    "--by", type=click.Choice(["percent", "z"]), default="percent", show_default=True,
    help="Worst first by loss, or by loss in units of the series' own scatter.",
)  # fmt: skip
@options
@click.pass_context
def compare(context: click.Context, subject: str, by: str) -> None:
    """Newest results of all that NODE has beside their own baselines, its others and the fleet's peers.

    Of a MODEL, its cards. Peers are the same model, bench, version, parameters and link on other hosts, five
    at least; of what is no card, the same bench, of a stream that to the same node.
    """

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        request = fleet_pb2.CompareBenchRequest(subject=subject, by=by)
        return client.document(client.stub.CompareBench, request, 30.0)

    show.show(context, fetch, _compare, lambda _: errors.OK)


@bench.command(
    short_help="What is normal; `accept` makes what is seen now normal.",
    epilog="""
\b
Examples:
  fleet bench baseline gpu-001
  fleet bench baseline accept gpu-001/3 h2d --reason "x8 riser by design"
""",
)
@click.argument("words", metavar="[accept] [NODE|GPU] [BENCH]", nargs=-1)
@click.option("--reason", default="", help="Why; kept with the baseline and in the audit.")
@click.option("--force", is_flag=True, help="Accept also while a finding says that it is slower than it was.")
@options
@click.pass_context
def baseline(context: click.Context, words: tuple[str, ...], reason: str, force: bool) -> None:
    """What is normal for each series: learning, frozen or accepted, of how many runs, since when, by whom.

    `accept` takes the last 48 hours as normal. It is refused while a finding about the speed is open.
    """
    accepting = words[:1] == (ACCEPT,)
    names = words[1:] if accepting else words
    if len(names) > (2 if accepting else 1):
        raise click.UsageError("give a node or card" + (", and a bench" if accepting else ""))
    if accepting and (not names or not reason):
        raise click.UsageError("accept needs a node or card, and --reason")
    if not accepting and (reason or force):
        raise click.UsageError("--reason and --force belong to accept")

    def fetch(client: Client) -> Json:
        from gpufleet.v1 import fleet_pb2

        if not accepting:
            request = fleet_pb2.ListBaselinesRequest(subject=names[0] if names else "")
            return client.document(client.stub.ListBaselines, request)
        accept = fleet_pb2.AcceptBaselinesRequest(
            subject=names[0], bench=names[1] if len(names) > 1 else "", reason=reason, force=force,
            author=person.author(),
        )  # fmt: skip
        return client.document(client.stub.AcceptBaselines, accept)

    if accepting:
        show.once(context, fetch, _baselines)
    else:
        show.show(context, fetch, _baselines, lambda _: errors.OK)


# ---- screens ----


def _overview(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    columns = [
        Column("NODE"), Column("MEASURED", right=True), Column("NEWEST", right=True),
        Column("OLDEST", right=True), Column("S/H", right=True), Column("S TOTAL", right=True),
        Column("LAST RUN", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("node")),
            f"{render.count(item, 'measured')}/{render.count(item, 'cards')}",
            render.age(item.get("age_s")),
            render.age(item.get("oldest_age_s")),
            render.number(item.get("gpu_s_last_hour"), 1),
            render.number(item.get("gpu_s_total"), 0),
            _last(item),
        ]
        for item in render.items(document, "items")
    ]
    lines = render.table(columns, rows, limit) if rows else ["no nodes yet"]
    suspects = render.items(document, "suspects")
    if not suspects:
        return "\n".join([*lines, "", "no suspects"])
    columns = [
        Column("SUSPECT"), Column("STATE"), Column("BAD RUNS", right=True), Column("AGAIN IN", right=True),
        Column("WHY", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("place")),
            str(item.get("state")),
            render.number(item.get("bad_runs")),
            _again(item),
            str(item.get("reason")),
        ]
        for item in suspects
    ]
    return "\n".join([*lines, "", *render.table(columns, rows, limit)])


def _last(item: render.Json) -> str:
    stale = render.count(item, "stale")
    parts = [str(item.get("last_status") or "never")]
    if item.get("last_reason"):
        parts[0] += f": {item['last_reason']}"
    if stale:
        parts.append(f"{render.plural(stale, 'card')} not measured for long")
    return "; ".join(parts)


def _again(item: render.Json) -> str:
    seconds = item.get("retest_in_s")
    if not isinstance(seconds, int | float):
        return "-"
    return "now" if seconds < 1 else render.age(seconds)


def _run(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    columns = [
        Column("ON"), Column("BENCH"), Column("VALUE", right=True), Column("BASELINE", right=True),
        Column("OF IT", right=True), Column("FLOOR", right=True), Column("VERDICT"), Column("WHY", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("place")),
            str(item.get("bench")),
            _value(item.get("value"), item.get("unit")),
            number4(item.get("baseline")),
            percent(item.get("ratio")),
            number4(item.get("floor")),
            _verdict(item, settings),
            _why(item),
        ]
        for item in render.items(document, "items")
    ]
    lines = render.table(columns, rows, limit) if rows else ["nothing was measured"]
    return "\n".join([*lines, "", f"{document.get('node')}: {document.get('verdict')}"])


def _verdict(item: render.Json, settings: Settings) -> str:
    word = str(item.get("verdict"))
    return render.paint(word, _PAINT.get(word, ""), settings.colored)


_PAINT = {"good": "ok", "bad": "critical", "unknown": "unknown"}
_CODES = {
    "as_before": "as before",
    "slower": "slower than it was",
    "below_floor": "no well card is so slow",
    "above_floor": "above the floor; no baseline yet",
    "learning": "no baseline yet, nothing to compare with",
    "newer_run": "another run came after it",
}


def _why(item: render.Json) -> str:
    code = str(item.get("code"))
    text = _CODES.get(code, code)
    if code == "as_before" and item.get("baseline_state") == "learning":
        text += f" ({render.number(item.get('baseline_n'))} runs)"
    return f"{text}: {item['reason']}" if item.get("reason") else text


def _history(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    items = render.items(document, "items")
    columns = [
        Column("TIME (UTC)"), Column("ON"), Column("BENCH"), Column("VALUE", right=True),
        Column("OF BASELINE", right=True), Column("OUTCOME", fold=True),
    ]  # fmt: skip
    rows = [
        [
            clock(item.get("ts")),
            str(item.get("place")),
            _bench(item),
            _value(item.get("value"), item.get("unit")) + ("*" if item.get("epoch_changed") else ""),
            percent(item.get("ratio")),
            _outcome(item),
        ]
        for item in items[:MAX_SHOWN]
    ]
    if not rows:
        return f"no bench ran on {document.get('entity') or document.get('node')} in this time"
    lines = render.table(columns, rows, limit)
    lines += [
        f"* {item.get('bench')} on {item.get('place')}: now {item.get('epoch')}"
        for item in items[:MAX_SHOWN]
        if item.get("epoch_changed")
    ]
    if len(items) > MAX_SHOWN:
        lines.append(f"{MAX_SHOWN} of {len(items)} runs shown: -o json has them all")
    return "\n".join(lines)


def _bench(item: render.Json) -> str:
    """Its name, and the other end where there is one: the node that a stream goes to, or a card's address."""
    name, link = str(item.get("bench")), str(item.get("link") or "")
    kind, _, ends = link.partition(":")
    to = ends if kind == "tcp" else ends.rpartition(">")[2]
    return f"{name} > {to}" if to else name


def _series(items: Sequence[render.Json]) -> list[str]:
    """The name of each one's series; with what was counted, where one place has several of a name."""
    names = [_bench(item) for item in items]
    times = Counter((item.get("place"), name) for item, name in zip(items, names, strict=True))
    return [
        name if times[item.get("place"), name] == 1 else f"{name} {item.get('convention')}"
        for item, name in zip(items, names, strict=True)
    ]


def _outcome(item: render.Json) -> str:
    parts = [str(item.get("status"))]
    if item.get("reason"):
        parts[0] += f": {item['reason']}"
    if item.get("lease"):
        parts.append("re-test" if str(item["lease"]).startswith("retest-") else "asked for")
    return ", ".join(parts)


def _compare(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    columns = [
        Column("ON"), Column("BENCH"), Column("VALUE", right=True), Column("OWN", right=True),
        Column("HOST", right=True), Column("PEERS", right=True), Column("WORST Z", right=True),
        Column("AGE", right=True), Column("NOTE", fold=True),
    ]  # fmt: skip
    items = render.items(document, "items")
    rows = [
        [
            str(item.get("place")),
            name,
            _value(item.get("value"), item.get("unit")),
            change(item.get("own_ratio")),
            change(item.get("siblings_ratio")),
            change(item.get("peers_ratio")),
            _signed(item.get("worst_z")),
            render.age(item.get("age_s")),
            _note(item),
        ]
        for item, name in zip(items, _series(items), strict=True)
    ]
    if not rows:
        return f"nothing of {document.get('subject')} was measured lately"
    return "\n".join(render.table(columns, rows, limit))


def _note(item: render.Json) -> str:
    if item.get("host_down"):
        return "its host's cards fell together"
    if item.get("down"):
        return "slower than it was"
    return "" if item.get("baseline") is not None else "no baseline yet"


def _baselines(document: Json, settings: Settings) -> str:
    limit = limit_of(settings)
    columns = [
        Column("ON"), Column("BENCH"), Column("VALUE", right=True), Column("SCATTER", right=True),
        Column("STATE"), Column("SINCE"), Column("BY"), Column("LINK, EPOCH, REASON", fold=True),
    ]  # fmt: skip
    rows = [
        [
            str(item.get("place")),
            str(item.get("bench")),
            _value(item.get("value"), item.get("unit")),
            percent(item.get("spread"), 2),
            _state(item),
            clock(item.get("set_at"))[:10],
            str(item.get("set_by")),
            _epoch(item),
        ]
        for item in render.items(document, "items")
    ]
    return "\n".join(render.table(columns, rows, limit)) if rows else "no baselines yet"


def _state(item: render.Json) -> str:
    if item.get("state") == "learning":
        return f"learning {render.number(item.get('n'))}/{render.number(item.get('needed'))}"
    return f"{item.get('state')} {render.number(item.get('n'))}"


def _epoch(item: render.Json) -> str:
    link = str(item.get("series") or "").rpartition("/")[2]
    epoch = ", ".join(word for word in (link, str(item.get("epoch") or "")) if word) or "-"
    if item.get("outdated"):
        epoch += f" (now {item.get('newest_epoch')})"
    return f"{epoch}: {item['reason']}" if item.get("reason") else epoch


def _value(value: object, unit: object) -> str:
    return f"{number4(value)} {unit}" if isinstance(value, int | float) else "-"


def number4(value: object) -> str:
    """Four digits; `-` when it is not known."""
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else number(value)


def percent(value: object, digits: int = 1) -> str:
    """`98.2 %` of a part; `-` when it is not known."""
    return f"{100 * value:.{digits}f} %" if isinstance(value, int | float) else "-"


def change(ratio: object) -> str:
    """`-1.8 %` of a ratio to something; `-` when it is not known."""
    return f"{100 * (ratio - 1):+.1f} %" if isinstance(ratio, int | float) else "-"


def _signed(value: object) -> str:
    return f"{value:+.1f}" if isinstance(value, int | float) else "-"
