"""How a verb answers: ask the collector, print in the chosen format, once or again, exit with a code."""

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import click

from gpufleet_cli import errors, render
from gpufleet_cli.client import Client, Json
from gpufleet_cli.settings import Settings, settings_of

WATCH_S = 2.0

Fetch = Callable[[Client], Json]
Screen = Callable[[Json, Settings], str]
ExitCode = Callable[[Json], int]


def show(context: click.Context, fetch: Fetch, screen: Screen, exit_code: ExitCode) -> None:
    """Answer a verb whose reply is a document with `items`; never returns.

    Raises:
        FleetError: The collector did not answer, or said no.
    """
    settings = settings_of(context)
    with Client(settings) as client:
        document = fetch(client)
        if settings.watch:
            _watch(client, fetch, screen, document)
        emit(document, screen, settings)
    context.exit(exit_code(document) if settings.exit_code else errors.OK)


def once(context: click.Context, fetch: Fetch, screen: Screen) -> None:
    """Do something and print what came of it; `--watch` would do it again, and is not obeyed.

    Raises:
        FleetError: The collector did not answer, or said no.
    """
    settings = settings_of(context)
    with Client(settings) as client:
        emit(fetch(client), screen, settings)


def emit(document: Json, screen: Screen, settings: Settings) -> None:
    """Print one document in the chosen format."""
    found = render.get(document, "items")
    items = found if isinstance(found, list) else []
    if settings.output == "json":
        echo(render.as_json(document))
    elif settings.output == "jsonl":
        echo(render.as_jsonl(items), newline=False)
    elif settings.output == "csv":
        columns, rows = flat(items)
        echo(render.as_csv(columns, rows), newline=False)
    elif settings.output == "md":
        columns, rows = flat(items)
        echo(render.as_markdown(columns, rows), newline=False)
    else:
        echo(render.plain_if_needed(screen(document, settings)))


def echo(text: str, newline: bool = True) -> None:
    """Print to stdout; colour codes are in `text` when they are wanted, so none is stripped."""
    click.echo(text, nl=newline, color=True)


def _watch(client: Client, fetch: Fetch, screen: Screen, document: Json) -> NoReturn:
    settings = client.settings
    documents = itertools.chain([document], iter(lambda: fetch(client), None))

    def print_next() -> None:
        found = next(documents)
        if settings.output == "json":
            echo(render.as_jsonl([found]), newline=False)
        else:
            emit(found, screen, settings)

    repeat(settings, print_next)


def repeat(settings: Settings, print_once: Callable[[], None]) -> NoReturn:
    """Redraw on a terminal, append on a pipe, every two seconds; until Ctrl-C."""
    on_terminal = sys.stdout.isatty() and settings.screen
    try:
        if on_terminal:
            echo("\x1b[?1049h", newline=False)
        while True:
            if on_terminal:
                echo("\x1b[H\x1b[2J", newline=False)
            print_once()
            sys.stdout.flush()
            time.sleep(WATCH_S)
    finally:
        if on_terminal:
            echo("\x1b[?1049l", newline=False)


def flat(items: Sequence[object]) -> tuple[list[str], list[list[object]]]:
    """Items as rows: `{"gpus": {"ok": 1}}` becomes column `gpus_ok`; lists stay JSON."""
    rows = [_flat(item) for item in items if isinstance(item, Mapping)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def _flat(item: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    row: dict[str, object] = {}
    for key, value in item.items():
        if isinstance(value, Mapping) and value and key != "detail":
            row.update(_flat(value, f"{prefix}{key}_"))
        else:
            row[prefix + key] = value
    return row


def worst(words: Sequence[object]) -> int:
    """Exit code of several states: critical before no data before degraded."""
    found = {str(word) for word in words}
    if found & {"critical", "crit"}:
        return errors.CRITICAL
    if "unknown" in found:
        return errors.NO_DATA
    return errors.DEGRADED if found & {"degraded", "warn"} else errors.OK
