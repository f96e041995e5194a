"""`agent.toml`: every key of the agent, its default and its range. Read by `main`."""

import math
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from gpufleet.tls import Tls
from gpufleet_agent import labels, lease
from gpufleet_agent.benches import BENCHES, TOOLS
from gpufleet_agent.gate import Rules
from gpufleet_agent.probes import PROBES

Every = Annotated[float, msgspec.Meta(ge=0.1, le=30 * 86400)]
"""Seconds between two runs of something periodic."""

Deadline = Annotated[float, msgspec.Meta(ge=1, le=4 * 3600)]
"""Seconds that a tool may take."""

MOST_WORKER_NAMES = 32


class Periodic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[probes.<name>]` and `[benches.<name>]`.

    Attributes:
        enabled: Whether it runs at all.
        every_s: Seconds between two runs.
    """

    enabled: bool = True
    every_s: Every = 60.0


class Tool(Periodic, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[benches.<name>]` of a bench that runs a tool of the host.

    Attributes:
        enabled: Off by default: it may take minutes of every card.
        command: Program and arguments, run without a shell; empty = as docs/benches.md says.
        deadline_s: It is ended after this.
    """

    enabled: bool = False
    command: Annotated[list[str], msgspec.Meta(max_length=256)] = []
    deadline_s: Deadline = 60.0


class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[benches.tcp]`: streams between this node and another one, when somebody asks for one.

    Attributes:
        listen: Address of this host to receive on and to send from; empty = neither.
        port: To receive on; 0 = the kernel chooses each time.
    """

    listen: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


NOWHERE = Meeting()


class Spooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[spool]`: what waits on disk for the collector.

    Attributes:
        max_mb: Most disk it takes; above it the oldest samples go first, events last.
        max_age_h: Older batches go.
    """

    max_mb: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 512
    max_age_h: Annotated[float, msgspec.Meta(ge=0.01, le=24 * 365)] = 24.0


class Pushing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[push]`.

    Attributes:
        seal_s: Rows of this many seconds travel together; an event does not wait.
    """

    seal_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 5.0


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sampler]`: the child that talks to drivers.

    Attributes:
        deadline_s: A driver call that takes longer is hung: its child is abandoned.
        init_deadline_s: The same for the driver's initialisation, which may wake every card first.
        retry_s: How long a hung card is left alone before it is tried again; doubles at each failure.
        retry_max_s: Longest such wait.
    """

    deadline_s: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 3.0
    init_deadline_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 60.0
    retry_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = 60.0
    retry_max_s: Annotated[float, msgspec.Meta(ge=0.1, le=7 * 86400)] = 3600.0


class Loading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[loader]`: how workers of data loaders are recognised.

    Attributes:
        worker_names: What workers of this site's own loaders call themselves, besides PyTorch's.
    """

    worker_names: list[str] = []


class Simulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[simulated]`, for driver = "simulated".

    Attributes:
        scenario: Path of the scenario file.
        node: Which of its hosts this agent plays; empty = the agent's own node name.
    """

    scenario: str = ""
    node: str = ""


def _table(name: str, defaults: Mapping[str, float], *more: tuple[str, type, object]) -> type[msgspec.Struct]:
    """A struct with a `Periodic` per name, and `more`; an error names the whole key (probes.gpu.every_s)."""
    fields: list[tuple[str, type, object]] = []
    for key, every_s in defaults.items():
        own: list[tuple[str, object, object]] = [("every_s", Every, every_s)]
        tool = TOOLS.get(key)
        if tool:
            own.append(("deadline_s", Deadline, tool.DEADLINE_S))
        one = msgspec.defstruct(
            f"{name}_{key}",
            own,
            bases=(Tool if tool else Periodic,),
            frozen=True,
            kw_only=True,
            forbid_unknown_fields=True,
        )
        fields.append((key, one, one()))
    fields += more
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:

    class Probes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[probes.<name>]`: one `Periodic` per probe."""

    class Benches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[benches.<name>]`: one `Periodic` per bench, and `[benches.tcp]`."""

        tcp: Meeting = NOWHERE

else:
    Probes = _table("Probes", {name: probe.EVERY for name, probe in PROBES.items()})
    Benches = _table(
        "Benches", {name: bench.EVERY for name, bench in BENCHES.items()}, (lease.NAME, Meeting, NOWHERE)
    )


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        node: The name people type; empty = the hostname.
        collector: HOST:PORT of the collector.
        insecure: Send in plain text to a collector that is not on this machine.
        driver: auto (NVML and amdgpu where there are such cards, else sysfs alone), nvml, amdgpu, none or
            simulated.
        root: Where /proc, /sys and /dev are looked for.
        state_dir: Spool and bench file; survives a reboot.
        runtime_dir: Lock of the benches; one per host.
        labels: What the host shares with others that can fail: rack, leaf_switch, pool, ...
        tls: Certificate files for the stream to the collector.
        spool: What waits on disk.
        push: The stream.
        sampler: The child that talks to drivers.
        probes: Which probes run, and how often.
        benches: Which micro-benchmarks run, and how often.
        gate: When they may.
        loader: How workers of data loaders are recognised.
        simulated: For driver = "simulated".
    """

    node: str = ""
    collector: str = "127.0.0.1:7443"
    insecure: bool = False
    driver: Literal["auto", "nvml", "amdgpu", "none", "simulated"] = "auto"
    root: str = "/"
    state_dir: str = "/var/lib/gpufleet"
    runtime_dir: str = "/run/gpufleet"
    labels: dict[str, str] = {}
    tls: Tls = Tls()
    spool: Spooling = Spooling()
    push: Pushing = Pushing()
    sampler: Sampling = Sampling()
    probes: Probes = Probes()
    benches: Benches = Benches()
    gate: Rules = Rules()
    loader: Loading = Loading()
    simulated: Simulation = Simulation()

    def __post_init__(self) -> None:
        if self.node and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", self.node):
            raise _wrong("node", f"{self.node!r:.80} is no host name: use letters, digits, dots and dashes")
        if not self.collector.startswith("unix:"):
            host, _, port = self.collector.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise _wrong("collector", f"{self.collector!r:.80} is not HOST:PORT, e.g. 10.0.0.5:7443")
        if self.driver == "simulated" and not self.simulated.scenario:
            raise _wrong("simulated.scenario", 'not set: driver = "simulated" needs a scenario file')
        if self.sampler.retry_max_s < self.sampler.retry_s:
            raise _wrong("sampler.retry_max_s", "must not be less than sampler.retry_s")
        listen = self.benches.tcp.listen
        if listen and not lease.plain_address(listen):
            raise _wrong("benches.tcp.listen", f"{listen!r:.80} is no IP address that this one host has")
        for key in ("state_dir", "runtime_dir", "root"):
            if not getattr(self, key).startswith("/"):
                raise _wrong(key, f"{getattr(self, key)!r:.80} is not an absolute path")
        wrong = labels.first_wrong(self.labels)
        if wrong is not None:
            raise _wrong(f"labels.{wrong[0]:.80}".rstrip("."), wrong[1])
        if len(self.loader.worker_names) > MOST_WORKER_NAMES:
            many = len(self.loader.worker_names)
            raise _wrong("loader.worker_names", f"{many} names, {MOST_WORKER_NAMES} are allowed")
        for name in self.loader.worker_names:
            if not re.fullmatch(labels.PLAIN, name):
                raise _wrong(
                    "loader.worker_names", f"{name!r:.80} is no name of a worker: 1 to 64 plain letters"
                )

    @property
    def node_name(self) -> str:
        """The configured name, else the simulated host's, else the hostname."""
        simulated = self.simulated.node if self.driver == "simulated" else ""
        return self.node or simulated or socket.gethostname()

    @property
    def node_in_scenario(self) -> str:
        """Which host of the scenario this agent plays."""
        return self.simulated.node or self.node_name

    def probe(self, name: str) -> Periodic:
        """The settings of one probe."""
        return _periodic(self.probes, name)

    def bench(self, name: str) -> Periodic:
        """The settings of one bench."""
        return _periodic(self.benches, name)

    def tool(self, name: str) -> Tool:
        """The settings of one bench that runs a tool; those of others have no command."""
        found = self.bench(name)
        return found if isinstance(found, Tool) else Tool()


def _periodic(table: msgspec.Struct, name: str) -> Periodic:
    found = getattr(table, name)
    assert isinstance(found, Periodic)
    return found


def _wrong(key: str, what: str) -> ValueError:
    # msgspec hands this text on; the ending is how its own messages name a key
    return ValueError(f"{what} - at `$.{key}`")


def backoff(attempt: int, first_s: float, most_s: float) -> float:
    """How long to wait before attempt `attempt` (from 0): doubles from `first_s`, at most `most_s`."""
    return min(most_s, first_s * math.pow(2.0, min(attempt, 60)))
