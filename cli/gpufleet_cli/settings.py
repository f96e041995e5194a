"""What every verb obeys: where the collector is, how to print. The options stand before or after the verb."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import click

DEFAULT_SERVER = "127.0.0.1:7443"
FORMATS = ("table", "wide", "json", "jsonl", "csv", "md")
_KEY = "gpufleet."
_WEIGHT = "/weight"

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Settings:
    """The global options, as one value.

    Attributes:
        server: host:port of the collector.
        ca: Certificates that sign the collector's certificate (PEM file).
        cert: Our certificate chain (PEM file).
        key: Our private key (PEM file).
        insecure: Whether plain text to another machine is allowed.
        timeout: Seconds to wait for an answer.
        output: One of `FORMATS`.
        exit_code: Whether the exit code tells the state.
        color: auto, always or never.
        watch: Whether to ask again and again.
    """

    server: str
    ca: str
    cert: str
    key: str
    insecure: bool
    timeout: float
    output: str
    exit_code: bool
    color: str
    watch: bool
    colored: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "colored", _colored(self.color))

    @property
    def screen(self) -> bool:
        """Whether people read it: table or wide."""
        return self.output in ("table", "wide")


def _colored(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") != "0" or os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _keep(context: click.Context, param: click.Parameter, value: object) -> None:
    """Remember the value for the whole line: what was typed, else the environment, else the default."""
    name = param.name or ""
    source = context.get_parameter_source(name)
    weight = {click.core.ParameterSource.COMMANDLINE: 2, click.core.ParameterSource.ENVIRONMENT: 1}.get(
        source or click.core.ParameterSource.DEFAULT, 0
    )
    kept = context.meta.get(_KEY + name + _WEIGHT, -1)
    # the same weight again is the verb's own option, which stands nearer to what is asked
    if weight >= max(kept, 1) or kept < 0:
        context.meta[_KEY + name], context.meta[_KEY + name + _WEIGHT] = value, weight


_OPTIONS = (
    click.option(
        "--server", metavar="HOST:PORT", default=DEFAULT_SERVER, envvar="GPUFLEET_SERVER", show_default=True,
        show_envvar=True, expose_value=False, callback=_keep, help="The collector.",
    ),
    click.option(
        "--ca", metavar="FILE", default="", envvar="GPUFLEET_CA", show_envvar=True, expose_value=False,
        callback=_keep, help="Certificates that sign the collector's (PEM).",
    ),
    click.option(
        "--cert", metavar="FILE", default="", envvar="GPUFLEET_CERT", show_envvar=True, expose_value=False,
        callback=_keep, help="Your certificate (PEM).",
    ),
    click.option(
        "--key", metavar="FILE", default="", envvar="GPUFLEET_KEY", show_envvar=True, expose_value=False,
        callback=_keep, help="Your private key (PEM).",
    ),
    click.option(
        "--insecure", is_flag=True, expose_value=False, callback=_keep,
        help="Allow plain text to another machine.",
    ),
    click.option(
        "--timeout", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True, max=3600), default=5.0,
        show_default=True, expose_value=False, callback=_keep, help="How long to wait for an answer.",
    ),
    click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, expose_value=False,
        callback=_keep, help="How to print.",
    ),
    click.option(
        "--exit-code", is_flag=True, expose_value=False, callback=_keep,
        help="Exit 11 on critical, else 12 on no data, else 10 on degraded.",
    ),
    click.option(
        "--color", type=click.Choice(("auto", "always", "never")), default="auto", show_default=True,
        expose_value=False, callback=_keep, help="Colour of states.",
    ),
    click.option(
        "-w", "--watch", is_flag=True, expose_value=False, callback=_keep, help="Ask again every 2 seconds.",
    ),
)  # fmt: skip


def options(function: Function) -> Function:
    """Give a verb the global options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def settings_of(context: click.Context) -> Settings:
    """The settings of this command line."""
    meta = context.meta
    return Settings(
        server=str(meta[_KEY + "server"]),
        ca=str(meta[_KEY + "ca"]),
        cert=str(meta[_KEY + "cert"]),
        key=str(meta[_KEY + "key"]),
        insecure=bool(meta[_KEY + "insecure"]),
        timeout=float(meta[_KEY + "timeout"]),
        output=str(meta[_KEY + "output"]),
        exit_code=bool(meta[_KEY + "exit_code"]),
        color=str(meta[_KEY + "color"]),
        watch=bool(meta[_KEY + "watch"]),
    )
