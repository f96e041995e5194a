"""The command `fleet`. Its verbs are listed below, each one file in `verbs/`. The first call loads gRPC."""

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from gpufleet import __version__
from gpufleet_cli import errors
from gpufleet_cli.errors import FleetError
from gpufleet_cli.settings import options
from gpufleet_cli.verbs import (
    bench,
    coverage,
    demo,
    explain,
    gpu,
    incidents,
    inventory,
    job,
    limits,
    maintenance,
    node,
    replay,
    sql,
    status,
    version,
)

EXIT_CODES = """
\b
Exit codes:
  0 answered   1 internal error   2 usage   3 collector unreachable
  4 not allowed   5 not found   6 refused, or over a limit   130 Ctrl-C
  with --exit-code: 10 degraded, 11 critical, 12 no data (11 before 12 before 10)
"""


class Fleet(click.Group):
    """The group of verbs; turns every error into text or JSON and the right exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> NoReturn:
        """Run and exit."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(
                words, prog_name, complete_var, False, windows_expand_args=windows_expand_args, **extra
            )
        except FleetError as error:
            _complain(words, error.code, error.message, error.hint)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("", err=True)
            sys.exit(errors.INTERRUPTED)
        except click.ClickException as error:
            if _wants_json(words):
                _complain(words, "usage", error.format_message(), "see fleet --help")
            else:
                error.show()
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else errors.OK)


def _wants_json(words: Sequence[str]) -> bool:
    """Whether the command line asks for JSON; looked up in the words, since they may not have been parsed."""
    for at, word in enumerate(words):
        if word in ("-ojson", "-ojsonl", "--output=json", "--output=jsonl"):
            return True
        if word in ("-o", "--output") and words[at + 1 : at + 2] in (["json"], ["jsonl"]):
            return True
    return False


def _complain(words: Sequence[str], code: str, message: str, hint: str) -> None:
    if _wants_json(words):
        click.echo(
            json.dumps({"error": {"code": code, "message": message, "hint": hint}}, ensure_ascii=False)
        )
        return
    click.echo(f"fleet: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)


@click.group(cls=Fleet, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="fleet %(version)s")
@options
def fleet() -> None:
    """Health of a GPU fleet: what is wrong, where, since when, and what to do."""


fleet.add_command(status.status)
fleet.add_command(node.node)
fleet.add_command(gpu.gpu)
fleet.add_command(job.job)
fleet.add_command(incidents.incidents)
fleet.add_command(bench.bench)
fleet.add_command(maintenance.maintenance)
fleet.add_command(inventory.inventory)
fleet.add_command(sql.sql)
fleet.add_command(explain.explain)
fleet.add_command(coverage.coverage)
fleet.add_command(limits.limits)
fleet.add_command(replay.replay)
fleet.add_command(demo.demo)
fleet.add_command(version.version)


def main() -> NoReturn:
    """Entry point of the command `fleet`."""
    fleet.main(prog_name="fleet")


if __name__ == "__main__":
    main()
