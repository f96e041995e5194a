"""docs/cli.md is what --help says, and docs/json.md names every field that is sent."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import click
import pytest
from click.testing import CliRunner, Result

from gpufleet_cli.main import fleet

DOCS = Path(__file__).parents[2] / "docs"
Run = Callable[..., Result]


class Seed(Protocol):
    def node(self, name: str, **more: object) -> None: ...

    def finding(self, *words: str, incident: str = ...) -> int: ...

    def entity(self, node: str, index: int) -> str: ...

    def job(self, node: str, job_id: str, cards: Iterable[int]) -> None: ...

    def bench(self, node: str, index: int, value: float | None, **more: object) -> None: ...

    def baseline(self, node: str, index: int, value: float) -> None: ...

    def limits(self) -> None: ...


def commands(
    command: click.Command, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from commands(command.commands[name], (*words, name))


def reference() -> str:
    """Every command's help; the options that all share are shown once."""
    parts = []
    shared = {option for option in help_of(()).splitlines() if option.startswith("  -")}
    for words, _ in commands(fleet, ()):
        text = help_of(words)
        if words:
            text = without(text, shared)
        parts.append(f"## fleet {' '.join(words)}".rstrip() + f"\n\n```\n{text.strip()}\n```\n")
    return "\n".join(parts)


def help_of(words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        fleet, [*words, "--help"], prog_name="fleet", env={"COLUMNS": "80"}, terminal_width=80
    )
    assert result.exit_code == 0
    return result.output


def without(text: str, shared: set[str]) -> str:
    kept, skipping = [], False
    for line in text.splitlines():
        if line.startswith("  -"):
            skipping = line in shared
        elif not line.startswith("      "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept).replace("Options:\n\n", "")


def test_the_reference_is_what_help_says() -> None:
    path = DOCS / "cli.md"
    text = path.read_text(encoding="utf-8")
    head, marker, _ = text.partition(
        "<!-- generated: GPUFLEET_GOLDEN=update pytest tests/cli/test_docs.py -->\n"
    )
    assert marker
    fresh = head + marker + "\n" + reference()
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(fresh, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == fresh


def names(value: object) -> Iterator[str]:
    """Keys of a document; what a rule, a probe or a baseline names is its own."""
    if isinstance(value, list):
        for item in value:
            yield from names(item)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield key
            if key not in (
                "detail",
                "facts",
                "values",
                "last",
                "baselines",
                "last_run",
                "last_verdicts",
                "observed",
                "healthy",
                "for_code",
                "last_verdicts",
            ):
                yield from names(child)


VERBS = [
    ("status",), ("node",), ("node", "gpu-001"), ("gpu", "gpu-001/3"), ("incidents",),
    ("job",), ("job", "41778"), ("incidents", "show", "1"), ("inventory",), ("inventory", "diff"),
    ("incidents", "ack", "1"), ("incidents", "report"), ("maintenance",),
    ("incidents", "silence", "rule=gpu_missing", "--for", "1h", "--reason", "x"),
    ("coverage",), ("coverage", "gpu-001"), ("limits",), ("limits", "suggest", "gpu_missing"),
    ("bench",), ("bench", "history", "gpu-001"), ("bench", "compare", "gpu-001"), ("bench", "baseline"),
    ("explain", "INC-1"), ("explain", "xid", "79"), ("sql", "select 1 as node"), ("version",),
]  # fmt: skip


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_field_is_in_the_page(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    seed.node("gpu-001", lost=[3])
    seed.job("gpu-001", "41778", range(8))
    seed.bench("gpu-001", 0, 55.0)
    seed.baseline("gpu-001", 0, 55.0)
    seed.limits()
    seed.finding(
        "gpu_missing",
        "gpu-001",
        seed.entity("gpu-001", 3),
        "crit",
        "lost_at_run_time",
        "gone",
        incident="GPU missing",
    )
    document = json.loads(run(*words, "-o", "json").output)
    page = set(re.findall(r"[A-Za-z_]+", (DOCS / "json.md").read_text(encoding="utf-8")))
    assert document["kind"] in page
    assert {name for name in names(document) if name not in page} == set()
