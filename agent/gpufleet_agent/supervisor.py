"""The agent's standing process: sampler -> spool -> collector, and the events about the agent itself.

Everything that can get stuck is elsewhere: drivers in the sampler, benches in a child, the network in a
task. What is left is a handful of short duties, run a few times per second in one place; the watchdog is
fed from there, and only while they and the sender get on.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gpufleet import __version__
from gpufleet.event import Event
from gpufleet.metric import Cell, Metric
from gpufleet.notify import Notifier
from gpufleet.tls import validity
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent import benches, encode
from gpufleet_agent.bench_links import Links
from gpufleet_agent.bench_runner import BenchRunner
from gpufleet_agent.benches import BENCHES, TOOLS
from gpufleet_agent.budget import Budget
from gpufleet_agent.child import module_command
from gpufleet_agent.config import AgentConfig
from gpufleet_agent.control import NAME as CONTROL_NAME
from gpufleet_agent.control import Answer, Control
from gpufleet_agent.cost import Cost
from gpufleet_agent.directives import Directives
from gpufleet_agent.drivers.kmsg import FROM_BOOT
from gpufleet_agent.episodes import Episodes, happened
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.handover import NAME as BENCH_NAME
from gpufleet_agent.identity import Identity
from gpufleet_agent.isolation import Isolation
from gpufleet_agent.loader import NAME as LOADER_NAME
from gpufleet_agent.loader import Loaders
from gpufleet_agent.pipe import Command, Inventory, KernelNews, Listening, Message
from gpufleet_agent.probe import Sweep, check_row, mono_us, wall_us
from gpufleet_agent.probes import PROBES, agent, loader
from gpufleet_agent.push import Push, PushSettings
from gpufleet_agent.rejected import Rejected
from gpufleet_agent.rota import Rota
from gpufleet_agent.schedule import ClockWatch, Schedule
from gpufleet_agent.spool import Spool

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Longest time between two rounds of duties."""

_KERNEL_LOG = "kernel_log"

DAY_S = 86400.0
HOUSEKEEPING_S = 30.0

METRICS: dict[str, tuple[Metric, ...]] = {
    **{name: tuple(probe.METRICS) for name, probe in PROBES.items()},
    "agent": agent.METRICS,
    "bench": benches.METRICS,
}
"""Columns of every table this agent fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the supervisor bears with its own parts before it stops feeding the watchdog.

    Attributes:
        sender_s: Something waits and the sender neither got an answer nor tried to connect.
        duty_s: A duty failed at each round.
        stop_s: What is left at the end may take this long to be sent.
        restart_s: First wait before a sampler that ended is started again.
    """

    sender_s: float = 180.0
    duty_s: float = 60.0
    stop_s: float = 3.0
    restart_s: float = 1.0


@dataclass(slots=True)
class _Next:
    """When each duty that is not done at every round is due, monotonic seconds."""

    seal: float
    own_row: float = field(default_factory=time.monotonic)
    loaders: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _KernelLog:
    """How far the kernel log was read, and whether the spool has yet to be told."""

    cursor: str
    due: bool = False


@dataclass(slots=True)
class _Sender:
    """Whether the sender gets on: its hellos and the push's progress move on, or it has nothing to send."""

    hellos: int = 0
    _mark: tuple[int, float] | None = None
    _moved: float = field(default_factory=time.monotonic)

    def stuck_s(self, progress: float, resting: bool) -> float:
        """For how long it has not."""
        now = time.monotonic()
        mark = (self.hellos, progress)
        if mark != self._mark or resting:
            self._mark, self._moved = mark, now
        return now - self._moved


@dataclass(slots=True)
class _Troubles:
    """Errors of our own that were caught: each kind is logged once, all are counted, and none ends us."""

    total: int = 0
    _failing: dict[str, float] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def caught(self, name: str, error: Exception) -> None:
        """One that came."""
        self.total += 1
        key = f"{name}: {type(error).__name__}"
        if key not in self._said:
            self._said.add(key)
            log.error("%s failed (said once): %s", name, error, exc_info=error)

    def guarded(self, name: str, duty: Callable[[], None]) -> None:
        """Run a duty."""
        try:
            duty()
        except Exception as error:
            self._failing.setdefault(name, time.monotonic())
            self.caught(name, error)
        else:
            self._failing.pop(name, None)

    def longest_s(self) -> float:
        """For how long a duty has failed at each round."""
        now = time.monotonic()
        return max((now - since for since in self._failing.values()), default=0.0)


class Supervisor:
    """One running agent. `run` returns when it was told to stop.

    Args:
        config: The checked configuration.
        host: How children open the host.
        identity: Which host this is.
        spool: Open; closed at the end.
        notifier: To systemd.
        bench_lock: Path of the lock that benches of this host share.
        clock: Sees steps of the wall clock.
        patience: See `Patience`.
        sampler: The sampler program.
        bench: The bench program.
    """

    def __init__(
        self,
        config: AgentConfig,
        host: HostSettings,
        identity: Identity,
        spool: Spool,
        notifier: Notifier,
        *,
        bench_lock: str,
        clock: ClockWatch | None = None,
        patience: Patience = Patience(),
        sampler: Sequence[str] = module_command("gpufleet_agent.sampler"),
        bench: Sequence[str] = module_command("gpufleet_agent.bench"),
    ) -> None:
        self.config = config
        self.identity = identity
        self.spool = spool
        self._notifier = notifier
        self._patience = patience
        self._clock = clock or ClockWatch()
        self._stop = asyncio.Event()
        self._troubles = _Troubles()
        self._status = ""
        # what is to be sent, and when
        self._builder = encode.BodyBuilder(identity.boot_id)
        self._kernel_log = _KernelLog(spool.get_meta(_KERNEL_LOG) or FROM_BOOT)
        self._next = _Next(seal=time.monotonic() + random.uniform(0.1, 1.0) * config.push.seal_s)
        self._seal_soon = False
        self._inventory = Inventory(0, False, [])
        self._rejected = Rejected()
        self._cost = Cost()
        # who measures
        self.episodes = self._take_up_episodes()
        self.isolation = self._sampler(host, sampler)
        self.rota = self._take_up_rota()
        self.benches = self._bench_runner(host, bench_lock, bench)
        self.loaders = Loaders(Path(config.runtime_dir) / LOADER_NAME)
        # who asks, and who is told
        self.directives = self._obedience()
        self.control = Control(
            Path(config.runtime_dir) / CONTROL_NAME,
            self._release,
            self.isolation.resume,
            self._control_status,
        )
        settings = PushSettings(collector=config.collector, tls=config.tls, insecure=config.insecure)
        self.push = Push(settings, spool, self._hello, self.directives.obey)
        self._sender = _Sender()
        # what is done when
        self.schedule = Schedule()
        self._duties: dict[str, Callable[[], None]] = {
            "clock": self._watch_clock,
            "sampler": self.isolation.check,
            "own row": self._write_own_row,
            "loaders": self._write_loaders_if_due,
            "seal": self._seal_if_due,
            "status": self._tell_status,
        }

    @property
    def errors_total(self) -> int:
        """Errors of our own that were caught."""
        return self._troubles.total

    def _sampler(self, host: HostSettings, command: Sequence[str]) -> Isolation:
        """What runs the probes that are enabled, in a child."""
        return Isolation(
            host,
            {name: self.config.probe(name).every_s for name in PROBES if self.config.probe(name).enabled},
            self.config.sampler,
            self.episodes,
            self._take,
            self.report,
            command,
            self._patience.restart_s,
            lambda: self._kernel_log.cursor,
        )

    def _take_up_rota(self) -> Rota:
        """The benches that are enabled, with what they took of the cards before the agent's restart."""
        per_hour = self.config.gate.gpu_s_per_hour
        return Rota(
            {name: one.every_s for name in BENCHES if (one := self.config.bench(name)).enabled},
            per_hour,
            budget=Budget(
                per_hour,
                self.identity.boot_id,
                self.spool.get_meta("budget"),
                lambda text: self.spool.set_meta("budget", text),
            ),
        )

    def _obedience(self) -> Directives:
        """What does as the collector says; the push, which answers, is made with it."""
        return Directives(
            self.benches,
            self.isolation,
            self._release,
            lambda name, text: self.push.tell(name, text),
            self.config.benches.tcp,
            lambda name, address: self.push.tell(name, "", address),
        )

    def _bench_runner(self, host: HostSettings, bench_lock: str, bench: Sequence[str]) -> BenchRunner:
        """What runs benches, with what it told already when the agent last ran."""
        return BenchRunner(
            host,
            self.config.state_dir,
            bench_lock,
            self.episodes.skip_list,
            self._take,
            self.spool.get_meta("unsupported") or "",
            lambda text: self.spool.set_meta("unsupported", text),
            bench,
            self.config.gate,
            self.rota,
            {
                name: (tool.command, tool.deadline_s)
                for name in TOOLS
                if (tool := self.config.tool(name)).enabled
            },
            str(Path(self.config.runtime_dir) / BENCH_NAME),
            Links(self.spool.get_meta("links"), lambda text: self.spool.set_meta("links", text)),
        )

    def _take_up_episodes(self) -> Episodes:
        """What was hung or lost when the agent last ran."""
        return Episodes(
            self.identity.boot_id,
            self.spool.get_meta("episodes"),
            lambda text: self.spool.set_meta("episodes", text),
            self.config.sampler.retry_s,
            self.config.sampler.retry_max_s,
        )

    # ---- life

    async def run(self) -> None:
        """From READY to the last batch."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._announce_start()
        self._notifier.send("READY=1")
        self._schedule_jobs()
        await self.control.open()
        if self.config.probe("loader").enabled:
            self.loaders.open()
        sender = asyncio.create_task(self._send_forever())
        self._round(loop)
        await self._stop.wait()
        self._notifier.send("STOPPING=1\nSTATUS=stopping")
        await self._end()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        self.spool.set_meta("stopped", "clean")
        self.spool.close()

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    def report(self, event: Event) -> None:
        """Send an event: it is on disk before this round is over."""
        log.info("%s %s: %s", event.kind, event.entity, event.message)
        self._builder.add_event(event)
        if not self._seal_soon:
            self._seal_soon = True
            asyncio.get_running_loop().call_soon(self._troubles.guarded, "seal", self._seal)

    def _announce_start(self) -> None:
        before = self.spool.get_meta("boot_id")
        if before and before != self.identity.boot_id:
            self.report(
                happened(
                    "reboot",
                    "node:",
                    "the host was booted since the agent last ran",
                    detail={"before": before, "now": self.identity.boot_id},
                )
            )
        stopped = self.spool.get_meta("stopped") or "first start"
        self.report(
            happened(
                "agent_start",
                "node:",
                f"agent {__version__} started",
                stopped.replace(" ", "_"),
                {"version": __version__, "stopped": stopped},
            )
        )
        self._tell_moved_aside()
        self.spool.set_meta("boot_id", self.identity.boot_id)
        self.spool.set_meta("stopped", "unclean")

    async def _end(self) -> None:
        """Stop measuring, seal what there is, and give it a short while to be sent."""
        await self.control.close()
        self.loaders.close()
        self._troubles.guarded("loaders", self._write_loaders)
        self.schedule.stop()
        self.benches.stop()
        with contextlib.suppress(OSError):
            await self.isolation.stop()
        self.report(happened("agent_stop", "node:", f"agent {__version__} was told to stop"))
        self._troubles.guarded("seal", self._seal)
        await self.push.drain(self._patience.stop_s if self.push.connected else 0.0)

    # ---- duties

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        """All duties once, then feed the watchdog, then again."""
        if self._stop.is_set():
            return
        watchdog_s = self._notifier.watchdog_s
        period = min(PERIOD_S, self.config.sampler.deadline_s / 4, watchdog_s or PERIOD_S)
        loop.call_later(period, self._round, loop)
        for name, duty in self._duties.items():
            self._troubles.guarded(name, duty)
        if watchdog_s is not None and self.healthy():
            self._notifier.send("WATCHDOG=1")

    def healthy(self) -> bool:
        """Whether our own parts get on. What drivers or the collector do is no part of it."""
        if self._troubles.longest_s() > self._patience.duty_s:
            return False
        resting = not self.spool.pending() or self.push.state.startswith("paused")
        return self._sender.stuck_s(self.push.last_progress_mono, resting) <= self._patience.sender_s

    async def _send_forever(self) -> None:
        while True:
            try:
                await self.push.run()
            except Exception as error:
                self._troubles.caught("push", error)
            await asyncio.sleep(5.0)

    def _watch_clock(self) -> None:
        step = self._clock.step_s()
        if step:
            self.schedule.clock_stepped()
            self.report(
                happened(
                    "clock_step",
                    "node:",
                    f"the wall clock was moved by {step:+.1f} s",
                    detail={"step_s": round(step, 3)},
                )
            )

    def _seal_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next.seal:
            missed = int((now - self._next.seal) / self.config.push.seal_s)
            self._next.seal += (missed + 1) * self.config.push.seal_s
            self._seal()

    def _seal(self) -> None:
        self._seal_soon = False
        if self._builder.empty and not self._kernel_log.due:
            return
        urgent = self._builder.has_events
        # in one step: an event of the kernel log without its position would come again, one lost would not
        notes = {_KERNEL_LOG: self._kernel_log.cursor} if self._kernel_log.due else {}
        self.spool.put_all(self._builder.seal(wall_us(), mono_us()), event=urgent, notes=notes)
        self._kernel_log.due = False
        self.push.notify()

    def _write_own_row(self) -> None:
        now = time.monotonic()
        if now < self._next.own_row:
            return
        self._next.own_row = now + agent.EVERY
        began = time.perf_counter()
        cpu_s, pss = self._cost.read([os.getpid(), *self.isolation.pids])
        stats = self.spool.stats()
        row: dict[str, Cell] = {
            "cpu_s_total": cpu_s,
            "sampler_restarts_total": self.isolation.restarts_total,
            "spool_batches": stats.batches,
            "spool_bytes": stats.bytes,
            "spool_oldest_s": stats.oldest_s,
            "spool_dropped_total": stats.dropped_total,
            "reconnects_total": self.push.reconnects_total,
            "bench_gpu_s_total": self.rota.gpu_s_total,
        }
        if pss is not None:
            row["pss_bytes"] = pss
        row |= self._certificate()
        self._add_run("agent", wall_us(), mono_us(), time.perf_counter() - began, "", 1, row)

    def _certificate(self) -> dict[str, Cell]:
        """How long our certificate still holds; read anew, for it may be renewed."""
        if not self.config.tls.on:
            return {}
        try:
            since, until = validity(self.config.tls.cert)
        except (OSError, ValueError):
            return {}  # the push says that it cannot be used
        now = datetime.now(UTC).replace(tzinfo=None)
        return {
            "certificate_left_s": (until - now).total_seconds(),
            "certificate_life_s": (until - since).total_seconds(),
        }

    def _write_loaders_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next.loaders:
            self._next.loaders = now + self.isolation.intervals().get("loader", loader.EVERY)
            self._write_loaders()

    def _write_loaders(self) -> None:
        """What training processes told, beside what the sampler sees of their workers."""
        checked = [check_row(loader.METRICS, row) for row in self.loaders.rows()]
        if checked:
            rows, reasons = [cells for cells, _ in checked], [why for _, why in checked]
            sweep = Sweep("loader", wall_us(), mono_us(), 0.0, "", rows, reasons)
            self._builder.add_sweep(loader.METRICS, sweep)

    def _tell_status(self) -> None:
        states = list(self.episodes.states.values())
        cards = f"{states.count('ok')}/{len(states)} GPUs" if states else "no GPUs"
        collector = "ok" if self.push.connected else self.push.state
        status = f"{cards}, spool {self.spool.pending()}, collector {collector}"
        if self.isolation.stuck:
            status += f", {len(self.isolation.stuck)} stuck"
        if status != self._status:
            self._status = status
            self._notifier.send(f"STATUS={status}")

    # ---- what comes from the children

    def _take(self, message: Message) -> None:
        """A message of the sampler or of a bench; nonsense of theirs must not end us."""
        try:
            if isinstance(message, Sweep):
                self._take_sweep(message)
            elif isinstance(message, Inventory):
                self._take_inventory(message)
            elif isinstance(message, KernelNews):
                self._take_kernel_news(message)
            elif not isinstance(message, Listening):  # that is the bench runner's
                self.report(message)
        except Exception as error:
            self._troubles.caught("message", error)

    def _take_sweep(self, sweep: Sweep) -> None:
        metrics = METRICS.get(sweep.probe)
        if metrics is None:
            return
        self._builder.add_sweep(metrics, sweep)
        for event in self._rejected.see(metrics, sweep):
            self.report(event)
        self._add_run(
            sweep.probe, sweep.ts_us, sweep.mono_us, sweep.seconds, sweep.error, len(sweep.rows), {}
        )
        if sweep.probe == "pci":
            self.episodes.see_bus(sweep)
        if sweep.probe == "gpu":
            for event in self.episodes.see_gpus(sweep):
                self.report(event)

    def _take_kernel_news(self, news: KernelNews) -> None:
        for event in news.events:
            told = self.episodes.hear(event)
            if told is not None:
                self.report(told)
        self._kernel_log = _KernelLog(news.cursor, due=True)

    def _take_inventory(self, inventory: Inventory) -> None:
        self.episodes.see_inventory(inventory)
        known = self._inventory
        self._inventory = inventory
        if (known.items, known.complete) != (inventory.items, inventory.complete):
            self._builder.set_inventory(inventory.items, inventory.complete, inventory.ts_us)

    def _add_run(
        self, probe: str, ts_us: int, at_us: int, seconds: float, error: str, rows: int, more: dict[str, Cell]
    ) -> None:
        """The row of table `agent` about one run of a probe; at the run's own time."""
        row: dict[str, Cell] = {
            "probe": probe,
            "ok": not error,
            "error": error,
            "rows": rows,
            "seconds": seconds,
            **more,
        }
        cells, reasons = check_row(agent.METRICS, row)
        self._builder.add_sweep(agent.METRICS, Sweep("agent", ts_us, at_us, 0.0, "", [cells], [reasons]))

    # ---- jobs

    def _schedule_jobs(self) -> None:
        add = self.schedule.add
        tick_s = self.rota.tick_s
        add("benches", tick_s, self._run_next_bench, first_s=tick_s, jitter_s=tick_s * 0.05)
        add("inventory", DAY_S, self._reread_inventory, first_s=DAY_S, jitter_s=DAY_S * 0.05)
        add("spool", HOUSEKEEPING_S, self._keep_spool, first_s=HOUSEKEEPING_S, jitter_s=1.0)
        self.schedule.start()

    async def _run_next_bench(self) -> None:
        name = self.rota.next()
        if name:
            await self.benches.run(name)

    async def _reread_inventory(self) -> None:
        self.isolation.tell(Command(inventory=True))

    async def _keep_spool(self) -> None:
        dropped = self.spool.trim()
        if dropped:
            self.report(
                happened(
                    "spool_drop",
                    "node:",
                    f"the spool was full or too old: {dropped} batches were dropped unsent",
                    detail={"batches": dropped},
                )
            )
        self._tell_moved_aside()

    def _tell_moved_aside(self) -> None:
        for path in self.spool.take_moved_aside():
            text = f"the spool could not be read and was kept as {path}"
            self.report(happened("spool_corrupt", "node:", text, detail={"path": str(path)}))
            self._kernel_log.due = self._kernel_log.cursor != FROM_BOOT  # the new file does not know it

    # ---- for others

    async def _release(self, for_s: float) -> list[int]:
        self.benches.stop()
        return await self.isolation.release(for_s)

    def _control_status(self) -> Answer:
        return {"released": self.episodes.released, "released_for_s": self.episodes.released_for_s}

    def _hello(self) -> pb.Hello:
        self._sender.hellos += 1
        every = self.isolation.intervals() | {"agent": agent.EVERY}
        every |= {"bench": min((self.config.bench(name).every_s for name in BENCHES), default=DAY_S)}
        return encode.hello(
            node=self.identity.node,
            machine_id=self.identity.machine_id,
            boot_id=self.identity.boot_id,
            spool_id=self.spool.spool_id,
            probes=encode.probe_descriptors({name: (s, METRICS[name]) for name, s in every.items()}),
            items=self._inventory.items,
            complete=self._inventory.complete,
            read_at_us=self._inventory.ts_us,
            spool_batches=self.spool.pending(),
            wall_us=wall_us(),
            mono_us=mono_us(),
        )
