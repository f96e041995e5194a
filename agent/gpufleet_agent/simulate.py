"""Many simulated hosts in one process: `fleet-agent simulate`, for demonstrations and load tests.

Everything behind the driver is the agent's own: probes, encoding, a spool file and a stream per host. Only
the processes are left out, so a hang is a virtual time-out; `fleet-agent run` on a simulated driver has them.
"""

import asyncio
import json
import logging
import random
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from gpufleet import __version__
from gpufleet.event import Event
from gpufleet.metric import Cell, Metric, Null, Reason, Row, Value
from gpufleet.tls import Tls, channel_credentials, check_plain
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import CHANNEL_OPTIONS
from gpufleet_agent import bench, encode, scenario
from gpufleet_agent.benches import BENCHES
from gpufleet_agent.benches import METRICS as BENCH_METRICS
from gpufleet_agent.drivers import DriverError, simulated_benches
from gpufleet_agent.drivers.kmsg import FROM_BOOT
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.encode import BodyBuilder
from gpufleet_agent.episodes import Episodes
from gpufleet_agent.guard import GuardedHost, HostSettings
from gpufleet_agent.isolation import KERNEL_LOG_S
from gpufleet_agent.measure import Place, ends
from gpufleet_agent.pipe import Inventory
from gpufleet_agent.probe import Sweep, check_row, mono_us, run_probe, wall_us
from gpufleet_agent.probes import PROBES
from gpufleet_agent.probes import agent as agent_probe
from gpufleet_agent.probes import gpu as gpu_probe
from gpufleet_agent.probes import job as job_probe
from gpufleet_agent.push import Push, PushSettings
from gpufleet_agent.sampler import IDENTIFYING, next_due, read_inventory
from gpufleet_agent.spool import Clock, Spool

log = logging.getLogger(__name__)

SPOOL_BYTES = 64 << 20
DEADLINE_S = 3.0
"""What a hung call is said to have taken: the deadline of the real sampler."""

LOOK_S = 1.0
"""How often a host looks whether its scenario stopped it or moved its clock."""

BENCH_JITTER = 0.1
DRAIN_S = 2.0

_STATE = next(at for at, metric in enumerate(gpu_probe.METRICS) if metric.name == "state")
_PCI = next(at for at, metric in enumerate(gpu_probe.METRICS) if metric.name == "pci")
_NOT_SIMULATED = Null(Reason.NOT_SUPPORTED, "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What `run` was told."""

    collector: str
    state_dir: Path
    tls: Tls
    insecure: bool
    seal_s: float
    bench_every_s: float
    every_s: Mapping[str, float]


async def run(
    scenario_path: Path,
    collector: str,
    *,
    state_dir: Path,
    stop: asyncio.Event,
    tls: Tls | None = None,
    insecure: bool = False,
    seal_s: float = 5.0,
    bench_every_s: float = 60.0,
    every_s: Mapping[str, float] | None = None,
    channels: int = 0,
) -> None:
    """Play every host of the scenario until `stop` is set; its time begins now.

    Args:
        scenario_path: The scenario file.
        collector: `host:port`.
        state_dir: Spool files, one per host; made if missing.
        stop: Set it to end the play; every host says goodbye.
        tls: Certificate files; one certificate speaks for every host.
        insecure: Plain text to another machine is wanted.
        seal_s: Rows of this many seconds travel together.
        bench_every_s: Seconds between two host-to-device benches of a host, give or take a tenth; 0 = none.
        every_s: Intervals that differ from the probes' own; "tick" is the 1 Hz ring, 0 = without it.
        channels: Connections that the streams share; 0 = one each.

    Raises:
        ConfigError: The scenario or the credentials cannot be used.
        SpoolError: A spool cannot be opened.
    """
    settings = _Settings(
        collector=collector,
        state_dir=state_dir,
        tls=tls or Tls(),
        insecure=insecure,
        seal_s=seal_s,
        bench_every_s=bench_every_s,
        every_s=every_s or {},
    )
    played = scenario.load(scenario_path)
    if not settings.tls.on:
        check_plain(settings.collector, settings.insecure, "collector")
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    _allow_files()
    shared = [_channel(settings) for _ in range(channels)]
    started_us, started = wall_us(), time.monotonic()
    nodes = [
        _Node(
            SimulatedHost(played, name, started_us, lambda: time.monotonic() - started, _LastCall()),
            name,
            settings,
            shared[at % len(shared)] if shared else None,
            random.Random(f"{played.fleet.seed} {name}"),
        )
        for at, name in enumerate(played.node_names())
    ]
    log.info("%d simulated hosts push to %s", len(nodes), settings.collector)
    tasks = [asyncio.ensure_future(node.run()) for node in nodes]
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
        for channel in shared:
            await channel.close(None)
    for task in done:
        task.result()


def _allow_files() -> None:
    """A host holds five files open; the usual 1,024 are not enough for a fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _channel(settings: _Settings) -> grpc.aio.Channel:
    """A connection for many streams. It reconnects by itself, sooner than gRPC would."""
    options = (
        *CHANNEL_OPTIONS,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 10_000),
    )
    if settings.tls.on:
        return grpc.aio.secure_channel(settings.collector, channel_credentials(settings.tls), options)
    return grpc.aio.insecure_channel(settings.collector, options)


class _LastCall:
    """Remembers the last call per card, so that a hang can be named."""

    def __init__(self) -> None:
        self.calls: dict[str, str] = {}

    def enter(self, card: str, call: str) -> None:
        """About to call."""
        self.calls[card] = call

    def leave(self) -> None:
        """Nothing to remember."""


@dataclass(slots=True)
class _Job:
    """Something done every `every_s` on a grid; `jitter` moves each point by up to that part of it."""

    every_s: float
    do: Callable[[], None]
    due: float
    jitter: float = 0.0


class _Node:
    """One host over its reboots and stops."""

    def __init__(
        self,
        host: SimulatedHost,
        name: str,
        settings: _Settings,
        channel: grpc.aio.Channel | None,
        rng: random.Random,
    ) -> None:
        self._host = host
        self._name = name
        self._settings = settings
        self._channel = channel
        self._rng = rng

    async def run(self) -> None:
        """One life after the other, as the scenario has it."""
        while True:
            if self._host.running():
                life = _Life(self._host, self._name, self._settings, self._channel, self._rng)
                await life.live()
            await asyncio.sleep(LOOK_S / 4)


class _Life:
    """One agent process of one host, from its start until its scenario takes it away without a word."""

    def __init__(
        self,
        host: SimulatedHost,
        name: str,
        settings: _Settings,
        channel: grpc.aio.Channel | None,
        rng: random.Random,
    ) -> None:
        self._host = host
        self._whole = GuardedHost(host)
        self._name = name
        self._settings = settings
        self._rng = rng
        self._boot_id = host.boot_id
        self._skew_us = round(host.clock_offset_s() * 1e6)
        clock = Clock(self._boot_id, self._wall_us, mono_us)
        self._spool = Spool.open(
            settings.state_dir / f"{name}.spool", max_bytes=SPOOL_BYTES, max_age_s=86400, clock=clock
        )
        self._body = BodyBuilder(self._boot_id)
        self._episodes = Episodes(
            self._boot_id,
            self._spool.get_meta("episodes"),
            lambda text: self._spool.set_meta("episodes", text),
        )
        self._kernel_log = self._spool.get_meta("kernel_log") or FROM_BOOT
        self._kernel_log_due = False
        self._processes = job_probe.tick(self._whole)
        self._intervals = {name: settings.every_s.get(name, probe.EVERY) for name, probe in PROBES.items()}
        self._intervals["agent"] = settings.every_s.get("agent", agent_probe.EVERY)
        self._inventory = self._read_inventory()
        self._found: dict[str, tuple[str, list[tuple[Value | None, ...]]]] = {}
        self._push = Push(
            PushSettings(collector=settings.collector, tls=settings.tls, insecure=settings.insecure),
            self._spool,
            self._hello,
            self._obey,
            channel=channel,
        )
        self._jobs = self._make_jobs()

    async def live(self) -> None:
        """Until the scenario ends it. Cancelled, it says goodbye as an agent does that is told to stop."""
        push = asyncio.ensure_future(self._push.run())
        try:
            self._begin()
            while self._host.running() and self._host.boot_id == self._boot_id:
                self._look_at_clock()
                now = time.monotonic()
                for job in self._jobs:
                    if job.due <= now:
                        job.do()
                        job.due = next_due(job.due, job.every_s, now)
                        job.due += self._rng.uniform(-job.jitter, job.jitter) * job.every_s
                due = min(job.due for job in self._jobs) - time.monotonic()
                await asyncio.sleep(max(0.0, min(due, LOOK_S)))
        except asyncio.CancelledError:
            self._event("agent_stop", f"agent {__version__} was told to stop")
            self._spool.set_meta("stopped", "clean")
            await self._push.drain(DRAIN_S)
            raise
        finally:
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            self._spool.close()

    def _make_jobs(self) -> list[_Job]:
        settings, now = self._settings, time.monotonic()
        tick_s = settings.every_s.get("tick", gpu_probe.TICK)
        jobs = [(self._intervals[name], self._prober(name)) for name in PROBES]
        jobs.append((self._intervals["agent"], self._own_row))
        jobs.append((10.0, self._keep_house))
        jobs.append((KERNEL_LOG_S, self._read_kernel_log))
        jobs.append((job_probe.TICK, self._look_at_processes))
        if tick_s:
            jobs.insert(0, (tick_s, self._tick))
        # Each host begins somewhere else within a second, so that the collector is not fed in bursts.
        made = [_Job(every_s, do, now + self._rng.uniform(0, min(1.0, every_s))) for every_s, do in jobs]
        if settings.bench_every_s:
            first = now + self._rng.uniform(0, settings.bench_every_s)
            made.append(_Job(settings.bench_every_s, self._bench, first, BENCH_JITTER))
        made.append(_Job(settings.seal_s, self._seal, now + self._rng.uniform(0, settings.seal_s)))
        return made

    # ---- what is read

    def _tick(self) -> None:
        with suppress(DriverError):  # the probe's own run reports it
            gpu_probe.tick(self._whole)

    def _look_at_processes(self) -> None:
        """The table of jobs goes at once when one came or went."""
        found = job_probe.tick(self._whole)
        if found != self._processes:
            self._processes = found
            self._prober("job")()

    def _prober(self, name: str) -> Callable[[], None]:
        probe = PROBES[name]

        def run() -> None:
            sweep = run_probe(name, probe, self._whole, lambda text: log.warning("%s: %s", self._name, text))
            self._add(probe.METRICS, sweep)
            if name == "gpu":
                self._see_gpus(sweep)
            if name in IDENTIFYING:
                self._look_at_inventory(name, probe.METRICS, sweep)

        return run

    def _read_kernel_log(self) -> None:
        events, cursor = self._whole.kernel_log(self._kernel_log)
        for event in events:
            told = self._episodes.hear(event)
            if told is not None:
                self._body.add_event(replace(told, ts_us=told.ts_us + self._skew_us))
        self._kernel_log_due |= cursor != self._kernel_log
        self._kernel_log = cursor
        if events:
            self._seal()

    def _add(self, metrics: tuple[Metric, ...], sweep: Sweep) -> None:
        """The rows, and the row in table `agent` that says that they were looked for."""
        sweep.ts_us += self._skew_us
        self._body.add_sweep(metrics, sweep)
        self._agent_row(
            sweep.ts_us,
            sweep.mono_us,
            {
                "probe": sweep.probe,
                "ok": not sweep.error,
                "error": sweep.error,
                "rows": len(sweep.rows),
                "seconds": sweep.seconds,
            },
        )

    def _agent_row(self, ts_us: int, at_mono_us: int, row: Row) -> None:
        cells, reasons = check_row(agent_probe.METRICS, row)
        self._body.add_sweep(
            agent_probe.METRICS, Sweep("agent", ts_us, at_mono_us, 0.0, "", [cells], [reasons])
        )

    def _own_row(self) -> None:
        stats = self._spool.stats()
        row: dict[str, Cell] = {
            "probe": "agent",
            "ok": True,
            "error": "",
            "rows": 1,
            "seconds": 0.0,
            "cpu_s_total": _NOT_SIMULATED,
            "pss_bytes": _NOT_SIMULATED,
            "sampler_restarts_total": _NOT_SIMULATED,
            "spool_batches": stats.batches,
            "spool_bytes": stats.bytes,
            "spool_oldest_s": stats.oldest_s,
            "spool_dropped_total": stats.dropped_total,
            "reconnects_total": self._push.reconnects_total,
        }
        self._agent_row(self._wall_us(), mono_us(), row)

    def _see_gpus(self, sweep: Sweep) -> None:
        events = self._episodes.see_gpus(sweep)
        progress = self._host.progress
        for row in sweep.rows:
            pci, state = row[_PCI], row[_STATE]
            if not isinstance(pci, str):
                continue
            if state == "hung" and isinstance(progress, _LastCall):
                event = self._episodes.begin_hang(pci, pci, progress.calls.get(pci, ""), DEADLINE_S)
            else:
                event = self._episodes.end_hang(pci)
            events += [event] if event else []
        for event in events:
            self._body.add_event(replace(event, ts_us=event.ts_us + self._skew_us))
        if events:
            self._seal()

    def _look_at_inventory(self, name: str, metrics: tuple[Metric, ...], sweep: Sweep) -> None:
        keys = [at for at, metric in enumerate(metrics) if metric.name in IDENTIFYING[name]]
        found = (sweep.error, list(dict.fromkeys(tuple(row[key] for key in keys) for row in sweep.rows)))
        if self._found.setdefault(name, found) != found:
            self._found[name] = found
            self._inventory = self._read_inventory()
            self._send_inventory()

    def _send_inventory(self) -> None:
        now = self._inventory
        self._body.set_inventory(now.items, now.complete, now.ts_us)
        self._seal()

    def _read_inventory(self) -> Inventory:
        read = read_inventory(self._whole)
        found = Inventory(read.ts_us + self._skew_us, read.complete, read.items)
        self._episodes.see_inventory(found)
        return found

    # ---- benches

    def _bench(self) -> None:
        self._run_bench("h2d", "", "")

    def _run_bench(self, name: str, entity: str, lease: str) -> dict[str, int]:
        """A bench of one card or all; how many had which status."""
        sweep = Sweep("bench", wall_us(), mono_us(), 0.0, "", [], [])
        asked = bench.Settings(bench=name, host=HostSettings(), state_dir="", lock="", lease=lease)
        statuses: dict[str, int] = {}
        try:
            of = BENCHES[name]
            for gpu, peer in ends(of.ON, self._whole.gpus(), entity, int(time.time() // of.EVERY)):
                place = Place(self._whole, gpu, "", peer=peer)
                (row,) = bench.measure(asked, of, place, f"gpu:{gpu.uuid}", "")
                row = bench.after(self._whole, gpu) | row
                cells, reasons = check_row(BENCH_METRICS, row)
                sweep.rows.append(cells)
                sweep.reasons.append(reasons)
                sweep.seconds += float(str(row["seconds"]))
                status = str(row["status"])
                statuses[status] = statuses.get(status, 0) + 1
        except DriverError as error:
            sweep.error = error.code
        self._add(BENCH_METRICS, sweep)
        return statuses

    async def _obey(self, directive: pb.Directive) -> pb.DirectiveResult:
        kind = directive.WhichOneof("kind") or "this directive"
        result = pb.DirectiveResult(
            id=directive.id, outcome=pb.OUTCOME_UNSUPPORTED, message=f"{kind} is not simulated"
        )
        if directive.HasField("run_bench"):
            wanted = directive.run_bench
            if wanted.bench not in simulated_benches.UNITS:
                result.message = f"{wanted.bench:.60} is not simulated"
                return result
            statuses = self._run_bench(wanted.bench, wanted.entity, wanted.lease or directive.id)
            self._seal()
            result.outcome = pb.OUTCOME_DONE if "ok" in statuses else pb.OUTCOME_FAILED
            result.message = ", ".join(f"{count} {status}" for status, count in statuses.items())
            result.rows = sum(statuses.values())
        return result

    # ---- what goes

    def _seal(self) -> None:
        event = self._body.has_events
        notes = {"kernel_log": self._kernel_log} if self._kernel_log_due else {}
        self._spool.put_all(self._body.seal(self._wall_us(), mono_us()), event=event, notes=notes)
        self._kernel_log_due = False
        self._push.notify()

    def _keep_house(self) -> None:
        dropped = self._spool.trim()
        if dropped:
            self._event("spool_drop", f"{dropped} batches were dropped: the spool is full", count=dropped)
        for path in self._spool.take_moved_aside():
            self._event("spool_corrupt", f"the spool could not be read and is kept as {path.name}")

    def _event(
        self,
        kind: str,
        message: str,
        code: str = "",
        detail: Mapping[str, Value | None] | None = None,
        count: int = 1,
    ) -> None:
        text = json.dumps(detail) if detail else ""
        self._body.add_event(Event(kind, "node:", self._wall_us(), mono_us(), code, message, text, count))
        self._seal()

    def _begin(self) -> None:
        """What an agent says when it starts."""
        before = self._spool.get_meta("boot_id")
        stopped = self._spool.get_meta("stopped") or "first start"
        self._spool.set_meta("boot_id", self._boot_id)
        self._spool.set_meta("stopped", "unclean")
        if before and before != self._boot_id:
            text = "the host was booted since the agent last ran"
            self._event("reboot", text, detail={"before": before, "now": self._boot_id})
        detail: dict[str, Value | None] = {"version": __version__, "stopped": stopped, "simulated": True}
        text = f"agent {__version__} started on a simulated host"
        self._event("agent_start", text, stopped.replace(" ", "_"), detail)
        self._keep_house()
        self._send_inventory()

    def _look_at_clock(self) -> None:
        """A scenario that moves the wall clock moves it like a hand: at once."""
        skew_us = round(self._host.clock_offset_s() * 1e6)
        step_us, self._skew_us = skew_us - self._skew_us, skew_us
        if step_us:
            step_s = step_us / 1e6
            self._event(
                "clock_step", f"the wall clock was moved by {step_s:+.1f} s", detail={"step_s": step_s}
            )

    def _wall_us(self) -> int:
        return wall_us() + self._skew_us

    def _hello(self) -> pb.Hello:
        probes = {name: (self._intervals[name], probe.METRICS) for name, probe in PROBES.items()}
        probes["agent"] = (self._intervals["agent"], agent_probe.METRICS)
        probes["bench"] = (self._settings.bench_every_s or BENCHES["h2d"].EVERY, BENCH_METRICS)
        now = self._inventory
        return encode.hello(
            node=self._name,
            machine_id=self._host.node().attributes["machine_id"],
            boot_id=self._boot_id,
            spool_id=self._spool.spool_id,
            probes=encode.probe_descriptors(probes),
            items=now.items,
            complete=now.complete,
            read_at_us=now.ts_us,
            spool_batches=self._spool.pending(),
            wall_us=self._wall_us(),
            mono_us=mono_us(),
        )
