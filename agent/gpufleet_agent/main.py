"""`fleet-agent`: the commands. What each needs is imported when it runs, so that the quick ones are quick."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet import __version__
from gpufleet.config import ConfigError, naming

if TYPE_CHECKING:
    from gpufleet.metric import Value
    from gpufleet_agent.bench import Settings
    from gpufleet_agent.config import AgentConfig
    from gpufleet_agent.guard import HostSettings

DEFAULT_CONFIG = "/etc/gpufleet/agent.toml"


class _Refused(click.ClickException):
    """One line on stderr, exit status 1."""

    def show(self, file: object = None) -> None:
        print(f"fleet-agent: {self.format_message()}", file=sys.stderr)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure a GPU host and stream what was measured to the collector."""


_config_option = click.option(
    "--config",
    "config_path",
    default=None,
    type=click.Path(path_type=Path),
    help=f"Configuration file; default {DEFAULT_CONFIG} where it exists.",
)


@main.command()
@_config_option
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severe line to log.",
)
def run(config_path: Path | None, log_level: str) -> None:
    """Run the agent until it is told to stop (what the service does)."""
    from gpufleet import log as logs

    logs.setup(log_level)
    try:
        _serve(_load(config_path), _named(config_path))
    except ConfigError as error:
        raise _Refused(str(error)) from error


@main.command()
@_config_option
def check(config_path: Path | None) -> None:
    """Check the configuration and the files it names, and end."""
    try:
        config = _load(config_path)
        with naming(_named(config_path)):
            _check_files(config)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    print(f"ok: node {config.node_name}, collector {config.collector}, driver {config.driver}")


@main.command()
@_config_option
@click.option("-o", "--output", default="table", type=click.Choice(["table", "json"]), help="How to print.")
def scan(config_path: Path | None, output: str) -> None:
    """Look at this host once and print what is there; no collector is needed."""
    from gpufleet_agent.guard import HostSettings
    from gpufleet_agent.scan import document, look, table

    try:
        settings, deadline_s = HostSettings(), 3.0
        if config_path is not None:
            config = _load(config_path)
            settings, deadline_s = _host_settings(config), config.sampler.deadline_s
    except ConfigError as error:
        raise _Refused(str(error)) from error
    seen = look(settings, deadline_s)
    print(json.dumps(document(seen), indent=2) if output == "json" else table(seen))
    if seen.hung is not None or seen.inventory is None:
        sys.exit(1)


@main.command()
@click.argument("name", required=False)
@_config_option
@click.option("-o", "--output", default="table", type=click.Choice(["table", "json"]), help="How to print.")
@click.option("--list", "listed", is_flag=True, help="Say which benches there are, and which an agent runs.")
@click.option("--quick", is_flag=True, help="For a scheduler's hook: a few benches on cards that are free.")
@click.option(
    "--deadline", default="20s", show_default=True, help="With --quick, end by then: seconds, or 20s, 2m."
)
@click.option(
    "--floor", "floors", multiple=True, metavar="BENCH=VALUE",
    help="With --quick, exit 1 when a card is below; may be given for each bench.",
)  # fmt: skip
def bench(
    name: str | None,
    config_path: Path | None,
    output: str,
    listed: bool,
    quick: bool,
    deadline: str,
    floors: tuple[str, ...],
) -> None:
    """Run the micro-benchmark NAME on this host now, also when the host is busy.

    With --quick, without NAME: for a prolog or epilog. Exit status 0: all cards were measured; 1: one is
    below its floor, failed or hung; 2: wrong usage; 3: one could not be judged (busy, no driver, no time).
    """
    from gpufleet_agent.bench import Yielding, run_bench
    from gpufleet_agent.benches import BENCHES, METRICS
    from gpufleet_agent.gate import Stop

    if quick:
        sys.exit(_quick(name, config_path, output, deadline, floors))
    if listed:
        _list_benches(config_path)
        return
    if name not in BENCHES:
        raise click.UsageError(f"no bench {name!r}: there is {', '.join(BENCHES)}")
    try:
        settings = _bench_settings(_load(config_path), name, force=True)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    stop = Stop()
    Yielding(stop)
    sweep = run_bench(settings, stop=stop)
    rows = [dict(zip((m.name for m in METRICS), cells, strict=True)) for cells in sweep.rows]
    _print_benches(rows, output)
    if sweep.error:
        raise _Refused(f"bench {name}: {sweep.error}")
    if not rows:
        print("nothing to run it on: no driver shows a card here (fleet-agent scan)", file=sys.stderr)
    sys.exit(0 if all(row["status"] == "ok" for row in rows) else 1)


def _quick(
    name: str | None, config_path: Path | None, output: str, deadline: str, floors: tuple[str, ...]
) -> int:
    """The exit status of `bench --quick`."""
    from gpufleet_agent import hook
    from gpufleet_agent.control import seconds

    least: dict[str, float] = {}
    for floor in floors:
        of, _, text = floor.partition("=")
        try:
            least[of] = float(text)
        except ValueError:
            raise click.UsageError(f"--floor {floor!r}: give BENCH=VALUE, e.g. h2d=40") from None
        if of not in hook.BENCHES or not 0 < least[of] < float("inf"):
            raise click.UsageError(f"--floor {floor!r}: there is {', '.join(hook.BENCHES)}")
    deadline_s = seconds(deadline)
    if deadline_s is None:
        raise click.UsageError(f"--deadline {deadline!r}: give 1s or more, e.g. 20s")
    if name is not None:
        raise click.UsageError("--quick runs benches of its own choice: leave out NAME")
    try:
        config = _load(config_path)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    outcome = hook.quick(lambda of: _bench_settings(config, of, wait_s=hook.LOCK_S), least, deadline_s)
    _print_benches(outcome.rows, output)
    if outcome.ended or not outcome.rows:
        print(f"fleet-agent: {outcome.ended or 'nothing to run it on'}", file=sys.stderr)
    return outcome.status


def _bench_settings(
    config: "AgentConfig", name: str, *, force: bool = False, wait_s: float = 0.0
) -> "Settings":
    from gpufleet_agent.bench import Settings

    return Settings(
        bench=name,
        host=_host_settings(config),
        state_dir=_writable(config.state_dir) or "/var/tmp",
        lock=_lock_path(config),
        rules=config.gate,
        command=config.tool(name).command,
        deadline_s=config.tool(name).deadline_s,
        force=force,
        wait_s=wait_s,
    )


def _print_benches(rows: list[dict[str, "Value | None"]], output: str) -> None:
    if output == "json":
        print(json.dumps({"api_version": "fleet/v1", "kind": "Bench", "items": rows}, indent=2), flush=True)
        return
    for row in rows:
        value, spread = row["value"], row["spread"]
        shown = (
            f"{value:.2f} {row['unit']}" if isinstance(value, float) else f"{row['status']}: {row['reason']}"
        )
        if row.get("below"):
            shown += f"  below {row['floor']:g}"
        extra = f"  ±{100 * spread:.1f} % of {row['repeats']}" if isinstance(spread, float) else ""
        extra += f"  {row['link'] or row['peer']}" if row["peer"] else ""
        how = f"  ({row['convention']})" if row["status"] == "ok" else ""
        print(f"{row['entity']:<46}{row['bench']:<16}{shown}{extra}{how}", flush=True)


def _list_benches(config_path: Path | None) -> None:
    """Every bench: on what it runs, whether an agent of this configuration runs it, what it measures."""
    from gpufleet_agent.benches import BENCHES

    try:
        config = _load(config_path)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    for name, bench in BENCHES.items():
        settings = config.bench(name)
        often = f"every {settings.every_s / 3600:g} h" if settings.enabled else "off"
        what = (sys.modules[f"gpufleet_agent.benches.{name}"].__doc__ or "").split(". ")[0].split("\n")[0]
        print(f"{name:<16}{bench.ON:<6}{often:<12}{what}")


@main.command(hidden=True)
def bench_unit() -> None:
    """What gpufleet-bench@.service runs: the bench that the agent hands over on standard input."""
    from gpufleet_agent.bench import main_of_unit

    main_of_unit()


@main.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--collector", default="127.0.0.1:7443", show_default=True, help="HOST:PORT of the collector.")
@click.option("--insecure", is_flag=True, help="Send in plain text to a collector on another machine.")
@click.option("--state-dir", default=None, type=click.Path(path_type=Path), help="Keep the spools here.")
@click.option(
    "--bench-every", default=60.0, show_default=True, type=click.FloatRange(min=0),
    help="Seconds between two benches of a host; 0 = none.",
)  # fmt: skip
@click.option("--inventory-csv", default=None, type=click.Path(path_type=Path), help="Write it and end.")
@click.option("--baseline-csv", default=None, type=click.Path(path_type=Path), help="Write it and end.")
def simulate(
    scenario: Path,
    collector: str,
    insecure: bool,
    state_dir: Path | None,
    bench_every: float,
    inventory_csv: Path | None,
    baseline_csv: Path | None,
) -> None:
    """Be all hosts of SCENARIO in one process."""
    from gpufleet import log as logs
    from gpufleet_agent import scenario as scenarios

    logs.setup()
    try:
        played = scenarios.load(scenario)
        for path, text in ((inventory_csv, played.inventory_csv), (baseline_csv, played.baseline_csv)):
            if path is not None:
                path.write_text(text())
    except ConfigError as error:
        raise _Refused(str(error)) from error
    except OSError as error:
        raise _Refused(f"{error.filename}: cannot write: {error.strerror}") from error
    if inventory_csv is not None or baseline_csv is not None:
        return
    try:
        asyncio.run(_simulate(scenario, collector, insecure, state_dir, bench_every))
    except ConfigError as error:
        raise _Refused(str(error)) from error


@main.command()
@_config_option
@click.option(
    "--for", "for_text", default="30m", show_default=True, help="How long: seconds, or 90s, 30m, 2h."
)
def release(config_path: Path | None, for_text: str) -> None:
    """Have the running agent let go of the driver, so that it can be upgraded or a card be reset."""
    from gpufleet_agent.control import seconds

    for_s = seconds(for_text)
    if for_s is None:
        raise click.UsageError(f"--for {for_text!r}: give 1s to 24h, e.g. 30m")
    _ask(config_path, f"release {for_s:g}")
    print(f"released for {for_s:g} s; `fleet-agent resume` takes it back sooner")


@main.command()
@_config_option
def resume(config_path: Path | None) -> None:
    """Have the running agent take the driver back."""
    _ask(config_path, "resume")
    print("resumed")


def _ask(config_path: Path | None, request: str) -> None:
    from gpufleet_agent.control import NAME, ControlError, ask

    try:
        answer = ask(Path(_load(config_path).runtime_dir) / NAME, request)
    except (ConfigError, ControlError) as error:
        raise _Refused(str(error)) from error
    if not answer.get("ok"):
        raise _Refused(str(answer.get("error")))


@main.command()
def version() -> None:
    """Print the version."""
    print(f"fleet-agent {__version__}")


def _load(path: Path | None) -> "AgentConfig":
    """The file given, else the default one where it exists, else the defaults.

    Raises:
        ConfigError: The file cannot be used.
    """
    from gpufleet import config
    from gpufleet_agent.config import AgentConfig

    file = _file(path)
    return AgentConfig() if file is None else config.load(file, AgentConfig)


def _file(path: Path | None) -> Path | None:
    default = Path(DEFAULT_CONFIG)
    return path or (default if default.exists() else None)


def _named(path: Path | None) -> str:
    """What an error calls the configuration."""
    return str(_file(path) or "default configuration")


def _check_files(config: "AgentConfig") -> None:
    """Credentials and scenario, before anything starts.

    Raises:
        ConfigError: One cannot be used.
    """
    from gpufleet.tls import channel_credentials, check_plain

    if config.tls.on:
        channel_credentials(config.tls)
    else:
        check_plain(config.collector, config.insecure, "collector")
    if config.driver == "simulated":
        from gpufleet_agent import scenario

        if config.node_in_scenario not in scenario.load(Path(config.simulated.scenario)).node_names():
            raise ConfigError(
                f"simulated.node: no node {config.node_in_scenario!r} in {config.simulated.scenario}"
            )


def _host_settings(config: "AgentConfig") -> "HostSettings":
    from gpufleet_agent.guard import HostSettings, SimulatedNode
    from gpufleet_agent.probe import mono_us, wall_us

    simulated = None
    if config.driver == "simulated":
        simulated = SimulatedNode(
            scenario=config.simulated.scenario,
            node=config.node_in_scenario,
            started_us=wall_us(),
            started_mono_us=mono_us(),
        )
    return HostSettings(
        driver=config.driver,
        root=config.root,
        simulated=simulated,
        labels=config.labels,
        worker_names=config.loader.worker_names,
    )


def _writable(folder: str) -> str:
    """`folder` if it can be made and written, else empty."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return folder if os.access(folder, os.W_OK | os.X_OK) else ""


def _lock_path(config: "AgentConfig") -> str:
    """The bench lock: one per host; beside the state where this user has no runtime directory."""
    folder = _writable(config.runtime_dir) or _writable(config.state_dir) or "/var/tmp"
    return str(Path(folder) / "bench.lock")


def _serve(config: "AgentConfig", where: str) -> None:
    """Check everything, open the spool, and be the supervisor.

    Args:
        config: What to run.
        where: What errors call it.

    Raises:
        ConfigError: Something named in the configuration cannot be used.
    """
    from gpufleet.notify import Notifier
    from gpufleet_agent.identity import identify
    from gpufleet_agent.spool import Clock, Spool, SpoolError
    from gpufleet_agent.supervisor import Supervisor

    notifier = Notifier()
    with naming(where):
        _check_files(config)
    if not _writable(config.state_dir):
        raise ConfigError(
            f"{where}: state_dir: {config.state_dir} cannot be written by uid {os.geteuid()}: "
            "make it theirs or set state_dir"
        )
    identity = identify(config)
    try:
        spool = Spool.open(
            Path(config.state_dir) / "spool.db",
            max_bytes=config.spool.max_mb << 20,
            max_age_s=config.spool.max_age_h * 3600,
            clock=Clock(identity.boot_id),
        )
    except SpoolError as error:
        raise ConfigError(f"{where}: state_dir: {error}") from error

    async def serve() -> None:
        await Supervisor(
            config, _host_settings(config), identity, spool, notifier, bench_lock=_lock_path(config)
        ).run()

    asyncio.run(serve())


async def _simulate(
    scenario: Path, collector: str, insecure: bool, state_dir: Path | None, bench_every: float
) -> None:
    """Play until told to stop.

    Raises:
        ConfigError: The scenario or the address cannot be used.
    """
    from gpufleet_agent import simulate as play

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="gpufleet-") as scratch:
        await play.run(
            scenario,
            collector,
            state_dir=state_dir or Path(scratch),
            stop=stop,
            insecure=insecure,
            bench_every_s=bench_every,
        )


if __name__ == "__main__":
    main()
