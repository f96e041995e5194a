"""Runs benches for the supervisor: one child at a time, with a deadline, results delivered like samples."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpufleet.metric import Value
from gpufleet_agent import lease as leases
from gpufleet_agent.bench import TOLD, Settings
from gpufleet_agent.bench_links import Links
from gpufleet_agent.benches import BENCHES, METRICS, TOOLS
from gpufleet_agent.budget import ANY
from gpufleet_agent.child import Child, module_command
from gpufleet_agent.gate import DEFAULT, Rules
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.measure import Bench, params_hash
from gpufleet_agent.pipe import Listening, Message, Skip
from gpufleet_agent.probe import Sweep, check_row, mono_us, wall_us
from gpufleet_agent.rota import Rota

log = logging.getLogger(__name__)

DEADLINE_S = 120.0
"""A bench takes seconds; one that takes this long is stuck."""

TELL_SKIP_S = 3000.0
"""That a bench was skipped on something is told about once per hour, however often it was tried."""

LEAVE_S = 1.0
"""So long a child may take to end by itself."""

_STATUS, _REASON, _BENCH, _ENTITY, _PEER, _VERSION, _CONVENTION, _GPU_S, _LINK = (
    next(at for at, metric in enumerate(METRICS) if metric.name == name)
    for name in (
        "status",
        "reason",
        "bench",
        "entity",
        "peer",
        "version",
        "convention",
        "gpu_seconds",
        "link",
    )
)


class BenchRunner:
    """At most one bench child at a time.

    Args:
        host: How the child opens the host.
        state_dir: Where a bench may keep a file.
        lock: Path of the host's bench lock.
        skips: Cards not to touch now.
        deliver: Takes the results.
        told: `unsupported` results that were reported before, one per line.
        remember: Keeps that text over restarts.
        command: The bench program.
        rules: What is free.
        rota: Which bench is next; it is told how each run went.
        tools: Command and deadline of the benches that run a tool, those that are enabled.
        unit: Socket of the unit that benches run in; empty = they run beside the agent.
        links: The best link of each card.
    """

    def __init__(
        self,
        host: HostSettings,
        state_dir: str,
        lock: str,
        skips: Callable[[], list[Skip]],
        deliver: Callable[[Sweep], None],
        told: str,
        remember: Callable[[str], None],
        command: Sequence[str] = module_command("gpufleet_agent.bench"),
        rules: Rules = DEFAULT,
        rota: Rota | None = None,
        tools: Mapping[str, tuple[Sequence[str], float]] | None = None,
        unit: str = "",
        links: Links | None = None,
    ) -> None:
        self._host = host
        self._state_dir = state_dir
        self._lock = lock
        self._skips = skips
        self._deliver = deliver
        self._told = set(told.splitlines())
        self._remember = remember
        self._command = command
        self._rules = rules
        self._rota = rota or Rota({}, rules.gpu_s_per_hour)
        self._tools = tools or {}
        self._unit = unit
        self._links = links or Links()
        self._skips_told: dict[str, float] = {}
        self._stopped = False
        self._one_at_a_time = asyncio.Lock()
        self._child: Child | None = None

    def allowed(self, bench: str) -> bool:
        """Whether it may run: one that runs a tool of the host must be enabled."""
        return bench not in TOOLS or bench in self._tools

    @property
    def running(self) -> bool:
        """Whether a bench runs now."""
        return self._one_at_a_time.locked()

    async def run(
        self,
        bench: str,
        entity: str = "",
        lease: str = "",
        deadline_s: float = math.inf,
        began: Callable[[], None] = lambda: None,
        order: leases.Order | None = None,
        listening: Callable[[str], None] = lambda address: None,
    ) -> Sweep:
        """Run a bench now, or after the one that runs; what it found is delivered, and returned.

        The result of a stream between two hosts is the sender's alone to deliver.

        Args:
            bench: Its name.
            entity: The one entity to run on; empty = all.
            lease: Of the collector; empty when scheduled.
            deadline_s: A run that takes longer is ended.
            began: Called when its turn has come.
            order: Of `leases.NAME`.
            listening: Told where the receiver of that listens.
        """
        async with self._one_at_a_time:
            self._stopped = False
            began()
            module = leases.Tcp(order) if order else BENCHES[bench]
            self._book(module, entity)
            most_s = DEADLINE_S + self._tools.get(bench, ((), 0.0))[1]
            sweep, whole = await self._run(
                bench, module, entity, lease, min(max(1.0, deadline_s), most_s), order, listening
            )
            unknown_s = None if whole else sweep.seconds
            asked = bool(entity or lease)
            self._rota.gone(bench, _outcomes(sweep), _peers_s(sweep), asked=asked, unknown_s=unknown_s)
        for row in sweep.rows:
            if row[_LINK]:
                row[_LINK] = self._links.best(str(row[_ENTITY]), str(row[_LINK]))
        if order is not None and not order.to:
            return sweep
        news = self._without_known(sweep, lease)
        if news.rows or news.error:
            self._deliver(news)
        return sweep

    def _book(self, bench: Bench, entity: str) -> None:
        """Book what the run may take, in case that the agent does not live to see its end."""
        if bench.ON != "pair":
            self._rota.begin(bench.COST_S, entity)
        elif entity:  # it sends to all others
            self._rota.begin(self._rules.gpu_s_per_hour, ANY)
        else:  # each card sends and receives
            self._rota.begin(2 * bench.COST_S, ANY)

    def stop(self) -> None:
        """End a bench that runs."""
        self._stopped = True
        if self._child is not None:
            self._child.leave()
            asyncio.get_running_loop().call_later(LEAVE_S, self._child.kill)

    async def _run(
        self,
        bench: str,
        module: Bench,
        entity: str,
        lease: str,
        deadline_s: float,
        order: leases.Order | None,
        listening: Callable[[str], None],
    ) -> tuple[Sweep, bool]:
        """What it found, and whether that says what it took of the cards."""
        skips = self._skips()
        if module.ON != "host" and any(skip.pci == "" for skip in skips):
            why = "the driver is released" if any(s.why == "released" for s in skips) else "the driver hangs"
            return self._own(bench, module, entity, lease, "skipped", why, 0.0), True
        got: list[Sweep] = []

        def take(message: Message) -> None:
            if isinstance(message, Sweep):
                got.append(message)
            elif isinstance(message, Listening):
                listening(message.address)

        began = time.monotonic()
        try:
            child = Child.start(
                self._command,
                lambda memory: Settings(
                    bench=bench,
                    host=self._host,
                    state_dir=self._state_dir,
                    lock=self._lock,
                    entity=entity,
                    fresh=[] if entity or lease else self._rota.fresh(bench),
                    left_s=self._rota.left_s(),
                    rules=self._rules,
                    lease=lease,
                    skip=skips,
                    progress_fd=memory,
                    unit=self._unit,
                    command=list(self._tools.get(bench, ((), 0.0))[0]),
                    deadline_s=self._tools.get(bench, ((), 0.0))[1],
                ),
                take,
                msgspec.json.encode(order) if order else b"",
            )
        except OSError as error:
            return self._own(bench, module, entity, lease, "failed", f"cannot start: {error}", 0.0), True
        self._child = child
        try:
            ended = await child.wait(deadline_s)
            seconds = time.monotonic() - began
            if got:
                return got[0], True
            status, why = "failed", f"ended with {child.code}: no result"
            if self._stopped:
                status, why = "preempted", TOLD
            elif not ended:
                call = child.progress.call()
                where = f" in {call.call}{f' of {call.card}' if call.card else ''}" if call else ""
                status, why = "hung", f"no result after {seconds:.0f} s{where}"
            return self._own(bench, module, entity, lease, status, why, seconds), False
        finally:
            self._child = None
            child.abandon()
            try:
                await child.wait(LEAVE_S)  # it ends by itself, and a tool that it runs with it
            finally:
                child.kill()
            await child.wait(1.0)  # a moment, so that it is gone when it can go; one stuck in a driver stays
            child.progress.close()

    def _own(
        self, bench: str, module: Bench, entity: str, lease: str, status: str, reason: str, seconds: float
    ) -> Sweep:
        """A row about a run that gave none itself."""
        cells, reasons = check_row(
            METRICS,
            {
                "entity": entity or "node:",
                "peer": "",
                "bench": bench,
                "version": module.VERSION,
                "convention": module.CONVENTION,
                "params_hash": params_hash(module.PARAMS, self._tools.get(bench, ((), 0.0))[0]),
                "status": status,
                "reason": reason,
                "seconds": seconds,
                "lease": lease,
                "gpu_seconds": seconds if entity.startswith("gpu:") else 0.0,
                **(module.pair if isinstance(module, leases.Tcp) else {}),
            },
        )
        return Sweep("bench", wall_us(), mono_us(), seconds, "", [cells], [reasons])

    def _without_known(self, sweep: Sweep, lease: str) -> Sweep:
        """The sweep without what was said before.

        `unsupported` is told once, and that something was skipped about once per hour, unless someone asked.
        """
        kept = []
        for row, reasons in zip(sweep.rows, sweep.reasons, strict=True):
            key = _key(row)
            if row[_STATUS] == "skipped" and not lease and not self._skip_is_news(key):
                continue
            if row[_STATUS] != "unsupported":
                self._forget(key)
            elif key in self._told and not lease:
                continue
            else:
                self._told.add(key)
                self._remember("\n".join(sorted(self._told)))
            kept.append((row, reasons))
        return Sweep(
            sweep.probe, sweep.ts_us, sweep.mono_us, sweep.seconds, sweep.error,
            [row for row, _ in kept], [reasons for _, reasons in kept],
        )  # fmt: skip

    def _skip_is_news(self, key: str) -> bool:
        now = time.monotonic()
        if now < self._skips_told.get(key, now):
            return False
        self._skips_told[key] = now + TELL_SKIP_S
        return True

    def _forget(self, key: str) -> None:
        if key in self._told:
            self._told.discard(key)
            self._remember("\n".join(sorted(self._told)))


def _key(row: Sequence[Value | None]) -> str:
    return " ".join(str(row[at]) for at in (_BENCH, _VERSION, _ENTITY, _PEER, _CONVENTION) if row[at])


def _outcomes(sweep: Sweep) -> dict[str, tuple[str, float]]:
    """Status and card time of each entity; it was measured when one of its results was.

    A wrong result is `corrupt` here, and outweighs the others.
    """
    found: dict[str, tuple[str, float]] = {}
    for row in sweep.rows:
        entity, status = str(row[_ENTITY]), str(row[_STATUS])
        before, seconds = found.get(entity, ("", 0.0))
        if str(row[_REASON]).startswith("corrupt: "):
            status = "corrupt"
        elif before in ("ok", "corrupt"):
            status = before
        found[entity] = status, seconds + float(row[_GPU_S] or 0.0)
    return found


def _peers_s(sweep: Sweep) -> dict[str, float]:
    """Card time of each entity that was the other end of another one's runs."""
    found: dict[str, float] = {}
    for row in sweep.rows:
        if row[_PEER]:
            found[str(row[_PEER])] = found.get(str(row[_PEER]), 0.0) + float(row[_GPU_S] or 0.0)
    return found


def outcome(sweep: Sweep) -> tuple[str, str]:
    """Status and reason of a run that gives one row."""
    for row in sweep.rows:
        return str(row[_STATUS]), str(row[_REASON])
    return "failed", sweep.error or "no result"


def statuses(sweep: Sweep) -> dict[str, int]:
    """How many rows of each status a run gave."""
    found: dict[str, int] = {}
    for row in sweep.rows:
        status = str(row[_STATUS])
        found[status] = found.get(status, 0) + 1
    return found
