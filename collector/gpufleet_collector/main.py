"""`fleet-collector`: from the command line to the running server; one line and exit 1 when it cannot run."""

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import duckdb
import grpc
import msgspec
from grpc_health.v1 import _async as health  # public as health.aio, which the stubs lack
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpufleet import __version__
from gpufleet.config import ConfigError, load, naming
from gpufleet.log import setup
from gpufleet.notify import Notifier
from gpufleet.tls import check_plain, server_credentials
from gpufleet.v1 import fleet_pb2_grpc, ingest_pb2_grpc
from gpufleet.wire import SERVER_OPTIONS
from gpufleet_collector import certificate
from gpufleet_collector.bench_runs import BenchRuns
from gpufleet_collector.config import CollectorConfig, check
from gpufleet_collector.documents import Health
from gpufleet_collector.ingest import IngestServicer
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import check_settings
from gpufleet_collector.query import FleetServicer, utc_now
from gpufleet_collector.retention import DiskWatch, Retention
from gpufleet_collector.retest import Retests
from gpufleet_collector.rules import load_rules
from gpufleet_collector.state import State
from gpufleet_collector.store import Store, StoreUnusable

log = logging.getLogger(__name__)

DEFAULT_CONFIG = Path("/etc/gpufleet/collector.toml")
COMMITTER_DEADLINE_S = 60.0
"""A commit that takes longer is stuck: the watchdog gets no more pings."""

_INGEST = "gpufleet.v1.IngestService"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The collector of gpufleet: stores what agents send and says what is wrong."""


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"fleet-collector {__version__} (duckdb {duckdb.__version__})")


_config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help=f"TOML file; default {DEFAULT_CONFIG}."
)
_listen_option = click.option("--listen", help="HOST:PORT instead of the file's.")
_data_option = click.option("--data", help="Directory of the store instead of the file's.")


@main.command("check")
@_config_option
@_listen_option
@_data_option
def check_command(config_path: Path | None, listen: str | None, data: str | None) -> None:
    """Read the configuration and the certificates, say what is wrong, start nothing."""
    with _one_line():
        config = read_config(config_path, listen, data)
        _credentials(config, _named(config_path, listen))
    click.echo("ok")


@main.command()
@_config_option
@_listen_option
@_data_option
@click.option("--insecure", is_flag=True, help="Allow plain text beyond this machine.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severe line to log, instead of the file's.",
)
def serve(
    config_path: Path | None, listen: str | None, data: str | None, insecure: bool, log_level: str | None
) -> None:
    """Run until SIGTERM or SIGINT."""
    with _one_line():
        config = read_config(config_path, listen, data, insecure, log_level)
        setup(config.log_level)
        credentials = _credentials(config, _named(config_path, listen))
        directory = Path(config.data_dir)
        directory.mkdir(parents=True, exist_ok=True)
        store = Store.open(directory / "fleet.duckdb")
        try:
            asyncio.run(_until_signal(config, store, credentials))
        finally:
            store.close()


async def _until_signal(
    config: CollectorConfig, store: Store, credentials: grpc.ServerCredentials | None
) -> None:
    collector = Collector(config, store, credentials)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, collector.stop)
    await collector.run()


def read_config(
    path: Path | None,
    listen: str | None = None,
    data: str | None = None,
    insecure: bool = False,
    log_level: str | None = None,
) -> CollectorConfig:
    """The file (or defaults, when none is named and the usual one is absent) with the command line over it.

    Raises:
        ConfigError: It cannot be used.
    """
    file = _file(path)
    config = CollectorConfig() if file is None else load(file, CollectorConfig)
    over = {"listen": listen, "data_dir": data, "insecure": insecure or None, "log_level": log_level}
    config = msgspec.structs.replace(
        config, **{key: value for key, value in over.items() if value is not None}
    )
    check(config, _named(path, listen))
    rules = load_rules()
    with naming(_named(path)):
        check_settings(config, rules)
    return config


def _file(path: Path | None) -> Path | None:
    return path or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)


def _named(path: Path | None, listen: str | None = None) -> str:
    """What an error calls the configuration."""
    file = _file(path)
    return f"{file or 'default configuration'}{' and --listen' if listen is not None else ''}"


class CannotListen(Exception):
    """The address is in use or not ours."""


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Trouble that a person must cure is one line and exit 1."""
    try:
        yield
    except (ConfigError, StoreUnusable, CannotListen) as error:
        click.echo(f"fleet-collector: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"fleet-collector: {error.filename}: {error.strerror}", err=True)
        sys.exit(1)


def _credentials(config: CollectorConfig, where: str) -> grpc.ServerCredentials | None:
    with naming(where):
        if config.tls.on:
            return server_credentials(config.tls)
        check_plain(config.listen, config.insecure, "listen")
    return None


class Collector:
    """The running collector: server, committer, judge, disk watch, retention, watchdog."""

    def __init__(
        self, config: CollectorConfig, store: Store, credentials: grpc.ServerCredentials | None
    ) -> None:
        self.config = config
        self.store = store
        self.state = State()
        self.judge = Judge(store, config)
        self.port = 0
        """Where it listens, once it does."""
        self.ingest: IngestServicer
        self._credentials = credentials
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self.started = asyncio.Event()
        """Set once it listens."""

    def stop(self) -> None:
        """End `run`; from the loop's thread."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`."""
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        self.ingest = ingest = IngestServicer(self.store, self.state, self.config.ingest)
        ingest_pb2_grpc.add_IngestServiceServicer_to_server(ingest, server)
        runs = BenchRuns(ingest)
        fleet = FleetServicer(self.store, self.judge.policies, self._health, settings=self.config, runs=runs)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
        readiness = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(readiness, server)
        self.port = self._bind(server)
        ingest.start()
        await server.start()
        judging_ends = threading.Event()
        judging = asyncio.create_task(asyncio.to_thread(self.judge.run_forever, judging_ends))
        self.started.set()
        self.state.set_ready("start", "")
        tasks = [
            asyncio.create_task(self._readiness(readiness)),
            asyncio.create_task(fleet.keep_status_ready()),
            asyncio.create_task(DiskWatch(self.store.path.parent, self.config.disk, ingest.pause).run()),
            asyncio.create_task(Retention(self.store, self.config.retention).run()),
            asyncio.create_task(certificate.watch(self.store, self.config.tls)),
            asyncio.create_task(
                Retests(self.store, runs, self.config.benches.retests_per_minute, utc_now).run()
            ),
        ]
        if self._notifier.watchdog_s is not None:
            tasks.append(asyncio.create_task(self._watchdog(self._notifier.watchdog_s)))
        host = self.config.listen.rpartition(":")[0]
        log.info("collector %s listens on %s:%d, store %s", __version__, host, self.port, self.store.path)
        self._notifier.send(f"READY=1\nSTATUS=listening on {host}:{self.port}")
        try:
            await self._stop.wait()
        finally:
            self._notifier.send("STOPPING=1")
            self.state.set_ready("start", "stopping")
            for task in tasks:
                task.cancel()
            judging_ends.set()
            await asyncio.gather(*tasks, judging, runs.stop(), return_exceptions=True)
            await ingest.stop()
            await server.stop(1)
            log.info("collector stopped")

    def _health(self) -> Health:
        """How the collector is, for those who ask."""
        reason = self.state.not_ready
        return Health(
            ready=not reason,
            reason=reason,
            lag_s=None,
            warming_up=self.judge.warming_up,
            paused=self.state.paused,
        )

    def _bind(self, server: grpc.aio.Server) -> int:
        address = self.config.listen
        try:
            if self._credentials is not None:
                port = server.add_secure_port(address, self._credentials)
            else:
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on {address}: in use by another process, or not an address of this machine"
            ) from error
        return port

    async def _readiness(self, servicer: health.HealthServicer) -> None:
        told: str | None = None
        while True:
            reason = self.state.not_ready
            if reason != told:
                told = reason
                serving = health_pb2.HealthCheckResponse.SERVING
                status = health_pb2.HealthCheckResponse.NOT_SERVING if reason else serving
                await servicer.set("", status)
                await servicer.set(_INGEST, status)
                self._notifier.send(f"STATUS={f'not ready: {reason}' if reason else 'ready'}")
            await asyncio.sleep(0.2)

    async def _watchdog(self, every_s: float) -> None:
        """Ping only while the committer gets on; this loop pings, so a stuck loop does not."""
        while True:
            if self.gets_on():
                self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(every_s)

    def gets_on(self) -> bool:
        """Whether the committer lives and was not stuck lately."""
        committer = self.ingest.committer
        return committer.is_alive() and time.monotonic() - committer.progress < COMMITTER_DEADLINE_S


if __name__ == "__main__":
    main()
