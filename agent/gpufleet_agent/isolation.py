"""Keeps a sampler running whatever the drivers do: the supervisor's side of the isolation.

A driver call past its deadline costs its process and nothing else: the child is abandoned, never waited
for, and a new one leaves out what hung. Each hang makes the next child do less (card, then driver, then
probe), so this ends. What is left out is tried again, at growing intervals, by a child of its own: another
hang then costs the running sampler nothing. So
is a lost card that the bus still shows. At most one process per card is ever stuck.
"""

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpufleet.event import Event
from gpufleet_agent.child import Child, module_command
from gpufleet_agent.config import Sampling, backoff
from gpufleet_agent.episodes import Episodes, Hang, happened, skip_of
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.pipe import Command, Message
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu
from gpufleet_agent.progress import INIT_CALL, Doing
from gpufleet_agent.sampler import CARD_PROBES, KERNEL_LOG, Settings

log = logging.getLogger(__name__)

STEADY_S = 60.0
"""A sampler that ran this long ends the growth of the restart back-off."""

KERNEL_LOG_S = 2.0
"""How often the kernel log is looked at: reading it takes microseconds when there is nothing new."""

SILENT_S = 60.0
"""A sampler that rests for so long, and for three intervals of its busiest probe, was stopped or is stuck."""

KILL_AFTER_S = 1.0
"""An abandoned child ends by itself when it can; after this long it is killed, if the kernel lets it be."""

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
_PCI, _STATE = (
    next(at for at, metric in enumerate(gpu.METRICS) if metric.name == name) for name in ("pci", "state")
)


@dataclass(slots=True)
class Watched:
    """A child and what was last seen of it.

    Attributes:
        child: The process.
        seen: What it was doing at the last look. Only what is seen twice can be overdue: after a pause of the
            whole machine every call looks late.
        aside: The call beside its loop at the last look.
        silent: When it last sent something, at the last look that found it silent for too long.
        planned: It was told to end.
        sweeps: What a trial read.
    """

    child: Child
    seen: Doing | None = None
    aside: Doing | None = None
    silent: float = 0.0
    planned: bool = False
    sweeps: list[Sweep] = field(default_factory=list)


class Isolation:
    """The sampler, its successors, its orphans and its trials. `check` is called a few times per second.

    Args:
        host: How children open the host.
        probes: Probe -> seconds between two runs.
        limits: Deadline and retry times.
        episodes: What is hung.
        deliver: Takes what the sampler read.
        report: Takes events.
        command: The sampler program.
        restart_s: First wait before a sampler that ended is started again, after once at once; doubles up to
            a minute.
        cursor: Says where the kernel log is to be read from; None = it is not read.
    """

    def __init__(
        self,
        host: HostSettings,
        probes: Mapping[str, float],
        limits: Sampling,
        episodes: Episodes,
        deliver: Callable[[Message], None],
        report: Callable[[Event], None],
        command: Sequence[str] = module_command("gpufleet_agent.sampler"),
        restart_s: float = 1.0,
        cursor: Callable[[], str] | None = None,
    ) -> None:
        self.restarts_total = 0
        self._host = host
        self._probes = dict(probes)
        self._limits = limits
        self._episodes = episodes
        self._deliver = deliver
        self._report = report
        self._command = command
        self._restart_s = restart_s
        self._sampler: Watched | None = None
        self._trial: tuple[Hang, Watched] | None = None
        self._orphans: dict[str, tuple[Child, float]] = {}
        self._ends = 0
        self._start_at = 0.0
        self._blocked_by: str | None = None
        self._cursor = cursor
        self._released = episodes.released
        self._mismatches = 0
        self._renew_at = 0.0
        self._crashed: dict[tuple[str, str], float] = {}

    @property
    def pids(self) -> list[int]:
        """The standing processes."""
        return [self._sampler.child.pid] if self._sampler and self._sampler.child.code is None else []

    @property
    def stuck(self) -> list[int]:
        """Abandoned processes that have not ended."""
        return [child.pid for child, _ in self._orphans.values()]

    def check(self) -> None:
        """Look after everything once; takes no time worth naming."""
        now = time.monotonic()
        self._look_after_orphans(now)
        if self._released and not self._episodes.released:
            self._take_back("time_over")
        if self._sampler is None:
            if now >= self._start_at and self._blocked_by not in self._orphans:
                self._start()
        elif self._sampler.child.code is not None:
            self._ended(self._sampler, now)
        elif self._sampler.child.broken:
            self._drop_broken(self._sampler, now)
        else:
            doing = self._overdue(self._sampler, now)
            if doing is not None:
                self._hung(self._sampler.child, *doing, now)
            elif self._silent(self._sampler, now):
                self._sampler.child.broken = "it fell silent"
            elif now - self._sampler.child.started > STEADY_S:
                self._ends = 0
        self._look_after_trial(now)

    async def release(self, for_s: float, timeout_s: float = 10.0) -> list[int]:
        """Let go of the driver for `for_s` seconds; processes that hold it still, stuck in a call."""
        again = self._episodes.released
        self._episodes.release(for_s)
        self._released = True
        children = [child for child, _ in self._orphans.values()]
        if not again:
            text = f"the driver is left alone for {for_s:g} s: it was asked for"
            self._report(happened("driver_released", "node:", text, "asked", {"for_s": for_s}))
            if self._trial is not None:
                (hang, trial), self._trial = self._trial, None
                self._episodes.postpone(hang.what)
                self._abandon(hang.what, trial.child)
                children.append(trial.child)
            if self._sampler is not None:
                self._renew(self._sampler)
                children.append(self._sampler.child)
        until = time.monotonic() + timeout_s
        for child in children:
            await child.wait(max(0.1, until - time.monotonic()))
        return [child.pid for child in children if child.code is None]

    def resume(self) -> bool:
        """Take the driver back; False when it was not released."""
        if not self._episodes.released:
            return False
        self._take_back("asked")
        return True

    def _take_back(self, code: str) -> None:
        self._episodes.release(0.0)
        self._released = False
        self._report(happened("driver_resumed", "node:", "the driver is asked again", code))
        if self._sampler is not None:
            self._renew(self._sampler)

    def tell(self, command: Command) -> bool:
        """Pass a command to the sampler."""
        return self._sampler is not None and self._sampler.child.tell(command)

    def set_interval(self, probe: str, every_s: float) -> bool:
        """Run `probe` every `every_s` seconds from now on; False when it does not run at all."""
        if probe not in self._probes:
            return False
        self._probes[probe] = every_s
        self.tell(Command(probe=probe, every_s=every_s))
        return True

    def intervals(self) -> dict[str, float]:
        """Probe -> seconds between two runs."""
        return dict(self._probes)

    async def stop(self, timeout_s: float = 1.0) -> None:
        """End every child that can be ended."""
        children = [child for child, _ in self._orphans.values()]
        children += [one.child for one in (self._sampler, self._trial[1] if self._trial else None) if one]
        await asyncio.gather(*[_end(child, timeout_s) for child in children])

    # ---- the sampler

    def _start(self) -> None:
        without = _whats(self._episodes.skips())
        skips = self._episodes.skip_list()
        probes = {name: every for name, every in self._probes.items() if f"probe {name}" not in without}
        log_s = KERNEL_LOG_S if self._cursor is not None and KERNEL_LOG not in without else 0.0
        self._episodes.new_process()
        try:
            child = Child.start(
                self._command,
                lambda memory: Settings(
                    host=self._host,
                    probes=probes,
                    skip=skips,
                    progress_fd=memory,
                    kernel_log_s=log_s,
                ),
                self._hear,
                self._cursor().encode() if self._cursor is not None and log_s else b"",
            )
        except OSError as error:
            self._ends += 1
            self._start_at = time.monotonic() + backoff(self._ends - 1, self._restart_s, 60.0)
            log.warning("cannot start the sampler: %s", error)
            return
        self._sampler = Watched(child)

    def _hear(self, message: Message) -> None:
        """Look at the driver's state on the way up."""
        self._deliver(message)
        if isinstance(message, Sweep) and message.probe == "gpu":
            if message.error == "driver_mismatch":
                self._mismatched()
            elif not message.error:
                self._mismatches = 0
                event = self._episodes.end_mismatch()
                if event is not None:
                    self._report(event)

    def _mismatched(self) -> None:
        """The child's library does not fit the driver: only a new process loads what is there now.

        The first time that may be all it takes. Then it is told, and tried at growing intervals.
        """
        if self._sampler is None or self._sampler.planned:
            return
        now = time.monotonic()
        if self._mismatches:
            event = self._episodes.begin_mismatch()
            if event is not None:
                self._report(event)
            if not self._renew_at:
                wait_s = backoff(self._mismatches - 1, self._limits.retry_s, self._limits.retry_max_s)
                self._renew_at = now + wait_s
            if now < self._renew_at:
                return
        self._mismatches += 1
        self._renew_at = 0.0
        self._renew(self._sampler)

    def _renew(self, watched: Watched) -> None:
        """Have a new sampler in the place of this one, which ends by itself."""
        watched.planned = True
        watched.child.leave()

    def _ended(self, watched: Watched, now: float) -> None:
        """The sampler ended: say why, and start it again after a while."""
        self._sampler = None
        child = watched.child
        if watched.planned:
            child.progress.close()
            self._start()
            return
        code = child.code or 0
        call = child.progress.call()
        self.restarts_total += 1
        if code < 0 and call is not None:
            self._crash(call, -code, now)
        else:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            self._report(
                happened(
                    "sampler_restarted",
                    "node:",
                    f"the sampler ended with {how}{f': {child.broken}' if child.broken else ''}",
                    f"signal_{-code}" if code < 0 else f"exit_{code}",
                    {"seconds": round(now - child.started, 1)},
                )
            )
        child.progress.close()
        # what ran steadily is started again at once: the others' gap is this start and nothing else
        wait_s = backoff(self._ends - 1, self._restart_s, 60.0) if self._ends else 0.0
        self._start_at = now + wait_s
        self._ends += 1

    def _crash(self, call: Doing, number: int, now: float) -> None:
        """The sampler died in a driver call; what kills it twice in an hour is left alone like what hangs."""
        key = (call.card, call.call)
        again = now - self._crashed.get(key, -3600.0) < 3600.0
        if number in _CRASHES:
            self._crashed[key] = now
            if again:
                what = "" if self._episodes.is_hung(call.card) else call.card
                event = self._episodes.begin_crash(what, call.card, call.call, number)
                if event is not None:
                    self._report(event)
                    return
        subject = f"{call.call}{f' of {call.card}' if call.card else ''}"
        self._report(
            happened(
                "driver_crashed",
                self._episodes.entity(call.card),
                f"the sampler died of signal {number} in {subject}",
                call.call,
                {"pci": call.card, "call": call.call, "signal": number},
            )
        )

    def _drop_broken(self, watched: Watched, now: float) -> None:
        """What it sends makes no sense (another version on disk?): end it, the rest is `_ended`."""
        if now - watched.child.started > KILL_AFTER_S:
            watched.child.kill()
        watched.child.leave()

    def _hung(self, child: Child, call: Doing, phase: str, now: float) -> None:
        """A call of the sampler is past its deadline: tell, abandon, go on without what hung."""
        what = self._narrower(call.card, phase)
        known = self._episodes.is_hung(what)
        event = self._episodes.begin_hang(what, call.card, call.call, now - call.since)
        if event is not None:
            self._report(event)
        self._sampler = None
        self.restarts_total += 1
        self._abandon(what, child)
        if known:  # nothing is left to leave out: wait, and for this one to be gone
            self._blocked_by = what
            self._start_at = now + backoff(self._ends, self._limits.retry_s, self._limits.retry_max_s)
            self._ends += 1
        else:
            self._start()

    def _narrower(self, card: str, phase: str) -> str:
        """What the next child must leave out so that it does less than this one did."""
        probe = phase.removeprefix("probe ") if phase.startswith("probe ") else ""
        if probe and probe not in CARD_PROBES:
            return phase
        for what in (card, ""):
            if not self._episodes.is_hung(what):
                return what
        return f"probe {probe or 'gpu'}"

    def _overdue(self, watched: Watched, now: float) -> tuple[Doing, str] | None:
        """The call or phase of a child that is past its deadline, seen so twice; and the phase around it."""
        progress = watched.child.progress
        aside, watched.aside = watched.aside, progress.aside()
        if aside is not None and aside == watched.aside and now - aside.since > self._limits.init_deadline_s:
            return aside, ""
        phase = progress.phase()
        doing = progress.call()
        patience = self._limits.deadline_s
        if doing is not None and doing.call == INIT_CALL:
            patience = max(patience, self._limits.init_deadline_s)
        if doing is None:
            # not in a call that a driver announced: it may just be a slow machine
            doing, patience = phase, max(10 * patience, 30.0)
        before, watched.seen = watched.seen, doing
        if doing is None or now - doing.since <= patience:
            return None
        twice = before is not None and before.number == doing.number
        return (doing, phase.call if phase else "") if twice else None

    def _silent(self, watched: Watched, now: float) -> bool:
        """Whether a child that says it rests should have sent something long ago, seen so at two looks."""
        heard, before = watched.child.heard, watched.silent
        resting = watched.child.progress.phase() is None
        most_s = max(SILENT_S, 3 * min(self._probes.values(), default=math.inf))
        watched.silent = heard if resting and now - heard > most_s else 0.0
        return watched.silent == before != 0.0

    # ---- orphans

    def _abandon(self, what: str, child: Child) -> None:
        child.abandon()
        child.progress.close()
        self._orphans[what] = (child, time.monotonic() + KILL_AFTER_S)
        self._episodes.set_orphan(what, child.pid)

    def _look_after_orphans(self, now: float) -> None:
        for what, (child, kill_at) in list(self._orphans.items()):
            if child.code is not None:
                del self._orphans[what]
                self._episodes.set_orphan(what, 0)
            elif now >= kill_at:
                child.kill()

    # ---- trials

    def _look_after_trial(self, now: float) -> None:
        if self._trial is None:
            if self._episodes.released:
                return
            due = [
                hang
                for hang in (*self._episodes.due(), *self._episodes.lost_due())
                if hang.what not in self._orphans
            ]
            if due:
                self._try(due[0])
            return
        hang, watched = self._trial
        if watched.child.code is not None:
            self._trial = None
            watched.child.progress.close()
            self._judge(hang, watched)
        elif watched.child.broken or self._overdue(watched, now) is not None:
            self._trial = None
            self._episodes.postpone(hang.what)
            self._abandon(hang.what, watched.child)

    def _try(self, hang: Hang) -> None:
        """Touch what hung, or look for what is lost, once, in a process of its own."""
        others = [other for other in self._episodes.skips() if other.what != hang.what]
        on_cards = not hang.what.startswith("probe ")
        # all that asks a card: one that answers the first probe may still hang in the next
        cards = {"gpu": 1.0} | {name: 1.0 for name in self._probes if name in CARD_PROBES}
        probes = cards if on_cards else {hang.what.removeprefix("probe "): 1.0}
        sweeps: list[Sweep] = []
        try:
            child = Child.start(
                self._command,
                lambda memory: Settings(
                    host=self._host,
                    probes={} if hang.what == KERNEL_LOG else probes,
                    skip=[skip_of(other) for other in others if not other.what.startswith("probe ")],
                    progress_fd=memory,
                    once=True,
                    kernel_log_s=KERNEL_LOG_S if hang.what == KERNEL_LOG else 0.0,
                    only=hang.what if on_cards and hang.what else None,
                ),
                lambda message: sweeps.append(message) if isinstance(message, Sweep) else None,
            )
        except OSError as error:
            log.warning("cannot start a trial of %s: %s", hang.what or "the driver", error)
            self._episodes.postpone(hang.what)
            return
        self._trial = (hang, Watched(child, sweeps=sweeps))

    def _judge(self, hang: Hang, trial: Watched) -> None:
        """The trial ended: go on with what answers, leave the rest alone for longer."""
        # lost is an answer of what hung, but none of what is lost
        enough = ("ok", "lost") if self._episodes.is_hung(hang.what) else ("ok",)
        if trial.child.code != 0 or not _answers(hang.what, trial.sweeps, enough):
            self._episodes.postpone(hang.what)
            return
        event = self._episodes.end_hang(hang.what)
        if event is not None:
            self._report(event)
        if self._sampler is not None:
            # it leaves out what answers again, or has it for lost: a new one does not
            self._renew(self._sampler)


async def _end(child: Child, timeout_s: float) -> None:
    """Ask a child to end, then make it, then leave it."""
    child.leave()
    if not await child.wait(timeout_s):
        child.kill()
        await child.wait(timeout_s)
        child.abandon()


def _whats(skips: Sequence[Hang]) -> set[str]:
    return {hang.what for hang in skips}


def _answers(what: str, sweeps: Sequence[Sweep], enough: Sequence[str]) -> bool:
    """Whether a trial's sweep shows `what` in a state that is good enough."""
    if what == KERNEL_LOG:
        return True  # it came to its end
    if what.startswith("probe "):
        return bool(sweeps)
    cards = [sweep for sweep in sweeps if sweep.probe == "gpu"]
    if not what:
        return any(sweep.error != "hung" for sweep in cards)
    return any(row[_PCI] == what and row[_STATE] in enough for sweep in cards for row in sweep.rows)
