"""`fleet demo`: a collector, a simulated fleet and scripted faults on this machine, by the real code."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet_cli import errors, render
from gpufleet_cli.client import Client, Json
from gpufleet_cli.errors import FleetError
from gpufleet_cli.settings import Settings, options, settings_of
from gpufleet_cli.show import echo, emit
from gpufleet_cli.verbs import status

if TYPE_CHECKING:
    from gpufleet_cli.demo.check import Fault, Outcome
    from gpufleet_cli.demo.stage import Stage

LOOK_S = 1.0
REDRAW_S = 2.0
REPRINT_S = 15.0
"""Between two screens on a pipe."""


@click.command(short_help="Play a simulated fleet with scripted faults.")
@click.option("--check", is_flag=True, help="Wait until each scripted fault is flagged; exit 0 or 1.")
@click.option(
    "--disable-rule",
    "disabled",
    multiple=True,
    metavar="RULE",
    help="Leave a rule out; may be given more than once.",
)
@click.option("--seconds", type=click.FloatRange(min=1), default=None, help="End after this many seconds.")
@click.option(
    "--scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
    help="Another scenario than the one that comes with this command.",
)  # fmt: skip
@options
@click.pass_context
def demo(
    context: click.Context,
    check: bool,
    disabled: tuple[str, ...],
    seconds: float | None,
    scenario: Path | None,
) -> None:
    """Play a fleet with faults: starts a collector and simulated hosts here, shows the screen, cleans up.

    Needs no GPU. With --check it waits for every fault of the scenario that says which rule must find it,
    prints the delays, and fails on a late or missed one and on any finding that nobody scripted.
    """
    from gpufleet_cli.demo import stage

    settings = settings_of(context)
    with stage.Stage(scenario or stage.shipped("scenario.toml"), disabled) as here:
        delivered = here.delivery_list()  # first: it also finds what is wrong with the scenario
        reached = here.start_collector(settings)
        try:
            code = _run(here, reached, delivered, check, seconds)
        except FleetError:
            here.check_children(wait_s=1.0)  # when the collector died, say that and not that it is silent
            raise
    context.exit(code)


def _run(
    here: "Stage", settings: Settings, delivered: tuple[bytes, bytes], check: bool, seconds: float | None
) -> int:
    from gpufleet_cli.demo.check import check_rules

    inventory, baselines = delivered
    with Client(settings) as client:
        check_rules(here.scenario, client)
        if len(inventory.splitlines()) > 1:  # a fleet without cards has nothing to deliver
            _accept(client, inventory, baselines)
        here.start_fleet()
        return _check(here, client, inventory, seconds) if check else _play(here, client, seconds)


def _accept(client: Client, inventory: bytes, baselines: bytes) -> None:
    from gpufleet.v1 import fleet_pb2

    request = fleet_pb2.ImportInventoryRequest(
        csv=inventory, baseline_csv=baselines, author="fleet demo", reason="the demo's delivery list"
    )
    client.one(client.stub.ImportInventory, request)


def _play(here: "Stage", client: Client, seconds: float | None) -> int:
    """Show the status screen until Ctrl-C or the time is over."""
    on_terminal = sys.stdout.isatty() and client.settings.screen
    began = time.monotonic()
    try:
        while seconds is None or time.monotonic() - began < seconds:
            here.check_children()
            document = status.fetch(client)
            passed = time.monotonic() - began
            if on_terminal:
                echo("\x1b[H\x1b[2J", newline=False)
            if client.settings.screen:
                echo(render.plain_if_needed(_frame(document, client.settings, passed)))
            else:
                emit(document, status.screen, client.settings)
            sys.stdout.flush()
            left = float("inf") if seconds is None else max(0.0, seconds - passed)
            time.sleep(min(REDRAW_S if on_terminal else REPRINT_S, left))
    except KeyboardInterrupt:
        if client.settings.screen:
            echo("\ndemo ended; nothing is left of it")
        return errors.OK if seconds is None else errors.INTERRUPTED
    return errors.OK


def _frame(document: Json, settings: Settings, passed: float) -> str:
    head = f"fleet demo, {passed:.0f} s; Ctrl-C ends it"
    other = f"in another shell: export GPUFLEET_SERVER={settings.server}"
    return f"{head}; {other}\n\n{status.screen(document, settings)}\n"


def _check(here: "Stage", client: Client, inventory: bytes, seconds: float | None) -> int:
    from gpufleet_cli.demo.check import Check, expected

    settings = client.settings
    faults = expected(here.scenario, inventory)
    if settings.screen:
        faulty = render.plural(len(faults), "scripted fault")
        echo(f"fleet demo --check: {faulty}, collector at {settings.server}")
    looking = Check(client, faults, seconds)
    told: set[str] = set()
    going = True
    while going:
        time.sleep(LOOK_S)
        here.check_children()
        going = looking.look()
        if settings.screen:
            _tell(looking.outcome.faults, told)
            sys.stdout.flush()
    outcome = looking.outcome
    if settings.screen:
        echo(render.plain_if_needed("\n".join(_summary(outcome))))
    else:
        emit(_document(outcome), lambda *_: "", settings)
    return errors.OK if outcome.passed else errors.INTERNAL


def _tell(faults: Sequence["Fault"], told: set[str]) -> None:
    """One line when a fault is found."""
    for fault in faults:
        key = f"{fault.place} {fault.kind} {fault.rule}"
        if fault.delay_s is not None and key not in told:
            told.add(key)
            echo(f"  {fault.rule} on {fault.place} ({fault.kind}) after {fault.delay_s:.1f} s")


def _summary(outcome: "Outcome") -> list[str]:
    columns = [
        render.Column("FAULT"), render.Column("ON"), render.Column("RULE"), render.Column("AT", right=True),
        render.Column("DELAY", right=True), render.Column("LIMIT", right=True), render.Column("RESULT"),
    ]  # fmt: skip
    rows = [
        [
            fault.kind, fault.place, fault.rule, f"{fault.at:g} s",
            "-" if fault.delay_s is None else f"{fault.delay_s:.1f} s", f"{fault.within_s:g} s",
            fault.verdict,
        ]
        for fault in outcome.faults
    ]  # fmt: skip
    found = sum(1 for fault in outcome.faults if fault.verdict == "found")
    lines = ["", *render.table(columns, rows, 1000)]
    for page in outcome.false_pages:
        place = render.entity_place(page["node"], page["entity"])
        lines.append(f"false page: {page['rule']} on {place}: {page['reason']}")
    word = "passed" if outcome.passed else "FAILED"
    pages = render.plural(len(outcome.false_pages), "false page")
    lines += [
        "",
        f"{word}: {found} of {len(outcome.faults)} found in time, {pages}",
    ]
    return lines


def _document(outcome: "Outcome") -> Json:
    items: list[Mapping[str, object]] = [
        {
            "node": fault.node, "entity": fault.entity, "place": fault.place, "kind": fault.kind,
            "at": fault.at, "rule": fault.rule, "within_s": fault.within_s,
            "delay_s": None if fault.delay_s is None else round(fault.delay_s, 3), "result": fault.verdict,
        }
        for fault in outcome.faults
    ]  # fmt: skip
    return {
        "api_version": "fleet/v1",
        "kind": "DemoCheck",
        "generated_at": datetime.now(UTC).replace(tzinfo=None).isoformat() + "Z",
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 1),
        "false_pages": list(outcome.false_pages),
        "items": items,
    }
