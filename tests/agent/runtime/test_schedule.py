import asyncio
import time
from datetime import UTC, datetime, tzinfo

import apscheduler.executors.base
import apscheduler.schedulers.base
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet_agent import schedule
from gpufleet_agent.schedule import STEP_S, ClockWatch, Schedule

STEPS = [-30.0, 30.0, 315_360_000.0, -315_360_000.0, 1.5, -1.5]


class Wall:
    """A wall clock that can be stepped, for everything that asks datetime.now() here and in APScheduler."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0.0
        wall = self

        class Stepped(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> "Stepped":
                return cls.fromtimestamp(time.time() + wall.offset_s, tz or UTC)

        for module in (apscheduler.schedulers.base, apscheduler.executors.base, schedule):
            patch.setattr(module, "datetime", Stepped)


@pytest.mark.parametrize("step_s", STEPS)
def test_T01_a_step_neither_stops_nor_bursts_a_job(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch)
    ran: list[float] = []

    async def job() -> None:
        ran.append(time.monotonic())

    async def play() -> Schedule:
        jobs = Schedule()
        jobs.add("job", 0.2, job, first_s=0.2, jitter_s=0.0)
        jobs.add("yearly", 3600.0, job, first_s=3600.0, jitter_s=0.0)
        jobs.start()
        await asyncio.sleep(0.5)
        wall.offset_s += step_s
        await asyncio.sleep(0.25)  # nobody has noticed yet
        jobs.clock_stepped()
        await asyncio.sleep(1.3)
        jobs.stop()
        return jobs

    jobs = asyncio.run(play())
    # no burst: a run that is late may be close to the next, but never three together
    assert all(third - first > 0.15 for first, third in zip(ran, ran[2:], strict=False))
    assert 4 <= len(ran) <= 11  # 2.05 s at 0.2 s, on a busy machine too
    assert jobs.runs("yearly") == 0  # an hour has not passed, whatever the wall says


@pytest.mark.parametrize("step_s", STEPS)
def test_T01_one_step_is_seen_once_with_its_size(step_s: float) -> None:
    wall, mono = 1_800_000_000_000_000, 5_000_000_000
    watch = ClockWatch(lambda: wall, lambda: mono)
    seen = []
    for second in range(10):
        if second == 5:
            wall += int(step_s * 1e6)
        wall, mono = wall + 500_000, mono + 500_000
        seen.append(watch.step_s())
    assert [step for step in seen if step] == [pytest.approx(step_s)]


@given(st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=200), st.floats(0.1, 100.0))
def test_slewing_is_no_step_however_far_it_goes(slews: list[float], every_s: float) -> None:
    wall, mono = 1_800_000_000_000_000.0, 5_000_000_000.0
    watch = ClockWatch(lambda: int(wall), lambda: int(mono))
    for slew in slews:
        mono += every_s * 1e6
        wall += every_s * 1e6 + slew * 1e6
        assert watch.step_s() == 0.0


@given(st.floats(-1e9, 1e9).filter(lambda step: abs(step) > STEP_S + 0.01), st.integers(0, 40_000))
def test_a_step_is_seen_whatever_its_size(step_s: float, reading_us: int) -> None:
    now = {"wall": 10**15, "mono": 10**9}

    def read(name: str) -> int:
        now["wall"] += reading_us // 4
        now["mono"] += reading_us // 4
        return now[name]

    watch = ClockWatch(lambda: read("wall"), lambda: read("mono"))
    now["wall"] += int(step_s * 1e6)
    assert watch.step_s() == pytest.approx(step_s, abs=0.2)
    assert watch.step_s() == 0.0


def test_a_job_that_fails_runs_again_and_one_that_is_slow_never_runs_twice_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now: list[str] = []
    most = 0
    failed = 0

    async def slow() -> None:
        nonlocal most
        now.append("slow")
        most = max(most, len(now))
        await asyncio.sleep(0.3)
        now.pop()

    async def bad() -> None:
        nonlocal failed
        failed += 1
        raise OSError("no such disk")

    async def play() -> None:
        jobs = Schedule()
        jobs.add("slow", 0.1, slow, first_s=0.0, jitter_s=0.0)
        jobs.add("bad", 0.1, bad, first_s=0.0, jitter_s=0.0)
        jobs.start()
        await asyncio.sleep(1.0)
        jobs.remove("slow")
        jobs.remove("slow")
        await asyncio.sleep(0.4)
        jobs.stop()

    asyncio.run(play())
    assert most == 1
    assert failed >= 2
    assert "job bad failed" in caplog.text


@given(st.integers(-10, 10**12), st.floats(0.1, 1e6))
def test_the_next_run_is_always_ahead(now_s: int, every_s: float) -> None:
    # so that a list of missed runs is never made, also not by a clock that was ten years behind
    now = datetime.fromtimestamp(now_s % 10**9, UTC)
    trigger = schedule._Every(every_s)
    assert trigger.get_next_fire_time(datetime.fromtimestamp(0, UTC), now) > now
