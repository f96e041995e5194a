"""Which of several values of one option counts."""

import click
import pytest
from click.testing import CliRunner

from gpufleet_cli.settings import options, settings_of


@click.group()
@options
def group() -> None:
    pass


@group.command()
@options
@click.pass_context
def verb(context: click.Context) -> None:
    click.echo(settings_of(context).server)


@pytest.mark.parametrize(
    ("words", "server"),
    [
        (["verb"], "env:1"),
        (["--server", "a:1", "verb"], "a:1"),
        (["verb", "--server", "b:1"], "b:1"),
        (["--server", "a:1", "verb", "--server", "b:1"], "b:1"),
    ],
)
def test_what_is_typed_counts_more_than_the_environment(words: list[str], server: str) -> None:
    done = CliRunner(env={"GPUFLEET_SERVER": "env:1"}).invoke(group, words)
    assert done.output.strip() == server
