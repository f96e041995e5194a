"""The agent's periodic work beside sampling: benches, inventory, housekeeping. And the eye on the clock.

APScheduler runs by the wall clock: a clock stepped back would stop it for the length of the step. So each
job's next run is also kept on the monotonic clock, and when `ClockWatch` sees a step every job is set anew
from that. Sampling does not depend on any of this.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from gpufleet_agent.probe import mono_us, wall_us

log = logging.getLogger(__name__)

STEP_S = 0.9
"""A wall clock that moves by more than this against the monotonic one between two looks was stepped.
Slewing moves it by milliseconds."""


class ClockWatch:
    """Sees steps of the wall clock. Look about twice per second."""

    def __init__(self, wall: Callable[[], int] = wall_us, mono: Callable[[], int] = mono_us) -> None:
        self._wall = wall
        self._mono = mono
        self._offset = self._now()

    def step_s(self) -> float:
        """By how much the wall clock was stepped since the last look; 0 = it was not."""
        offset = self._now()
        step, self._offset = (offset - self._offset) / 1e6, offset
        return step if abs(step) > STEP_S else 0.0

    def _now(self) -> int:
        """Wall minus monotonic clock; read again when something came between the two readings."""
        offset = 0
        for _ in range(3):
            before = self._mono()
            wall = self._wall()
            after = self._mono()
            offset = wall - (before + after) // 2
            if after - before < 50_000:
                break
        return offset


class _Every(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Runs again an interval after now: a list of missed runs is never made, however many there were."""

    def __init__(self, every_s: float) -> None:
        self._interval = timedelta(seconds=every_s)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """Always in the future."""
        return now + self._interval


@dataclass(slots=True)
class _Job:
    every_s: float
    jitter_s: float
    due: float
    runs: int = 0


class Schedule:
    """Named jobs, each at its interval, never two runs of one at once, missed runs never made up for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        quiet = logging.getLogger(f"{__name__}.apscheduler")
        quiet.setLevel(logging.ERROR)  # a run that is skipped because the last one still goes on is no news
        self._scheduler = AsyncIOScheduler(
            timezone=UTC,
            logger=quiet,
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._jobs: dict[str, _Job] = {}

    def start(self) -> None:
        """Begin; inside a running event loop."""
        self._scheduler.start()

    def stop(self) -> None:
        """Run nothing any more; what runs is left to its end."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def add(
        self,
        name: str,
        every_s: float,
        run: Callable[[], Awaitable[None]],
        *,
        first_s: float,
        jitter_s: float,
    ) -> None:
        """Run `run` every `every_s` seconds, give or take `jitter_s`, for the first time after `first_s`."""
        job = self._jobs[name] = _Job(every_s, jitter_s, self._clock() + first_s)

        async def guarded() -> None:
            now = self._clock()
            early = now < job.due - _EARLY_S
            if not early:
                job.runs += 1
                job.due = now + job.every_s + random.uniform(-job.jitter_s, job.jitter_s)
            self._set_next(name, job)
            if early:  # the wall clock was stepped, and nobody has noticed yet
                return
            try:
                await run()
            except Exception:
                log.exception("job %s failed", name)

        self._scheduler.add_job(
            guarded, _Every(every_s), id=name, replace_existing=True, next_run_time=self._wall(job.due)
        )

    def remove(self, name: str) -> None:
        """Do not run it again."""
        if self._jobs.pop(name, None) is not None:
            self._scheduler.remove_job(name)

    def runs(self, name: str) -> int:
        """How often a job ran."""
        return self._jobs[name].runs

    def clock_stepped(self) -> None:
        """The wall clock was stepped: set every job's next run from the monotonic clock."""
        for name, job in self._jobs.items():
            self._set_next(name, job)

    def _set_next(self, name: str, job: _Job) -> None:
        if self._jobs.get(name) is job:
            self._scheduler.modify_job(name, next_run_time=self._wall(job.due))

    def _wall(self, due: float) -> datetime:
        return wall_now() + timedelta(seconds=max(0.0, due - self._clock()))


_EARLY_S = 0.05


def wall_now() -> datetime:
    """What the scheduler takes for the time."""
    return datetime.now(UTC)
