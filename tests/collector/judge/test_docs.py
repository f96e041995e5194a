"""Whatever the pages tell people to type: every SQL runs in the sandbox, every command is one."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpufleet_cli.main import fleet as command
from gpufleet_collector import sandbox
from gpufleet_collector.judge import Judge
from gpufleet_collector.store import Store

ROOT = Path(__file__).parents[3]
PAGES = sorted((*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"))
QUOTED = re.compile(r"""fleet sql (?:-\S+ )*(?:"([^"]+)"|'([^']+)')""")


def queries() -> Iterator[tuple[str, str]]:
    """Page and SQL: blocks of it, and what commands quote, also over several lines."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(ROOT))
        for block in re.findall(r"```sql\n(.*?)```", text, re.DOTALL):
            yield name, block
        for double, single in QUOTED.findall(text):
            if not re.fullmatch(r"[.…]+", double or single):  # the way to write it
                yield name, double or single


def test_every_query_of_the_pages_runs_on_an_empty_store(store: Store, judge: Judge) -> None:
    wrong = []
    found = list(queries())
    assert len(found) > 40
    for page, sql in found:
        try:
            sandbox.run(store, sql)
        except sandbox.Refused as error:
            wrong.append(f"{page}: {error}: {' '.join(sql.split())}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_pages_exists(page: Path) -> None:
    blocks = re.findall(r"```(?:console|bash|sh|)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    shown = re.findall(r"(?:^|;|\$ )\s*fleet ([a-z].*)", "\n".join(blocks), re.MULTILINE)
    assert [line for line in shown if not _exists(line.split())] == []


def _exists(words: list[str]) -> bool:
    found = command.get_command(click.Context(command), words[0])
    if isinstance(found, click.Group) and not found.invoke_without_command and len(words) > 1:
        return words[1] in found.commands or words[1].startswith("-")
    return found is not None
