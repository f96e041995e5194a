"""Configuration of the collector: /etc/gpufleet/collector.toml, every key with its default.

packaging/collector.toml shows the same keys, commented; a test holds both together.
"""

import msgspec

from gpufleet.config import ConfigError
from gpufleet.tls import Tls
from gpufleet_collector.limits import JudgeSettings


class IngestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[ingest]`.

    Attributes:
        linger_ms: Longest wait for other agents' batches before a commit.
        queue_mib: Batches waiting to be committed, per lane; above it streams are not read.
        group_mib: Batches of one commit.
        live_credit: Batches an agent may have unacknowledged.
        backfill_credit: The same, of what an outage left behind.
    """

    linger_ms: float = 50.0
    queue_mib: int = 64
    group_mib: int = 16
    live_credit: int = 32
    backfill_credit: int = 4


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[retention]`.

    Attributes:
        hot_hours: Age at which samples leave the hot tables.
        history_days: The same for bench, event, finding, inventory and whatever else is read over long spans.
        every_minutes: How often the old is looked for.
    """

    hot_hours: float = 48.0
    history_days: float = 90.0
    every_minutes: float = 60.0


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[disk]`: reading from agents stops when less than the smaller of both is free; they keep their spools.

    Attributes:
        floor_mib: Free space, MiB.
        floor_pct: Free space, percent of the file system.
        check_s: How often it is looked at.
    """

    floor_mib: float = 1024.0
    floor_pct: float = 5.0
    check_s: float = 1.0


class BenchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[benches]`.

    Attributes:
        retests_per_minute: Suspects of the whole fleet that are measured again; 0 = none, so that a slow card
            is known after three runs of its own schedule.
    """

    retests_per_minute: int = 20


class CollectorConfig(JudgeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; `[judge]`, `[rule]`, `[limit]`, `[model]` and `[node]` are those of `JudgeSettings`.

    Attributes:
        listen: Address of agents and of `fleet`; port 0 = any.
        data_dir: Where the store is.
        insecure: Allow plain text beyond this machine.
        log_level: debug, info, warning or error.
    """

    listen: str = "127.0.0.1:7443"
    data_dir: str = "/var/lib/gpufleet"
    insecure: bool = False
    log_level: str = "info"
    tls: Tls = Tls()
    ingest: IngestConfig = IngestConfig()
    retention: RetentionConfig = RetentionConfig()
    disk: DiskConfig = DiskConfig()
    benches: BenchesConfig = BenchesConfig()


_POSITIVE = (
    "ingest.queue_mib",
    "ingest.group_mib",
    "ingest.live_credit",
    "ingest.backfill_credit",
    "retention.hot_hours",
    "retention.every_minutes",
    "disk.check_s",
)


def check(config: CollectorConfig, where: str) -> None:
    """What the types cannot say.

    Raises:
        ConfigError: A value makes no sense.
    """
    for key in _POSITIVE:
        section, _, name = key.partition(".")
        if not getattr(getattr(config, section), name) > 0:
            raise ConfigError(f"{where}: key {key}: must be greater than 0")
    if not 0 <= config.ingest.linger_ms <= 10_000:
        raise ConfigError(f"{where}: key ingest.linger_ms: must be 0 to 10000")
    if config.retention.history_days < 90:
        raise ConfigError(
            f"{where}: key retention.history_days: must be at least 90: rules look back that far"
        )
    if not 0 <= config.benches.retests_per_minute <= 1000:
        raise ConfigError(f"{where}: key benches.retests_per_minute: must be 0 to 1000")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{where}: key log_level: must be debug, info, warning or error")
    host, _, port = config.listen.rpartition(":")
    if not config.listen.startswith("unix:") and not (host and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{where}: key listen: {config.listen!r} is not HOST:PORT")
