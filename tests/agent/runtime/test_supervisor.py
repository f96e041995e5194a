import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpufleet.config import load
from gpufleet.notify import Notifier
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent.config import AgentConfig
from gpufleet_agent.guard import HostSettings, SimulatedNode
from gpufleet_agent.identity import identify
from gpufleet_agent.probe import mono_us, wall_us
from gpufleet_agent.probes import PROBES
from gpufleet_agent.schedule import ClockWatch
from gpufleet_agent.spool import Clock, Spool
from gpufleet_agent.supervisor import Patience, Supervisor


def made(kit: Any, notifier: Notifier | None = None, faults: str = "", **changes: Any) -> Supervisor:
    """A supervisor of this process, with a real sampler."""
    config = load(kit.config(faults=faults), AgentConfig)
    kit.state.mkdir(exist_ok=True)
    identity = identify(config)
    spool = Spool.open(
        kit.state / "spool.db", max_bytes=1 << 26, max_age_s=3600, clock=Clock(identity.boot_id)
    )
    node = SimulatedNode(
        scenario=config.simulated.scenario, node="gpu-a01", started_us=wall_us(), started_mono_us=mono_us()
    )
    return Supervisor(
        config,
        HostSettings(driver="simulated", simulated=node),
        identity,
        spool,
        notifier or Notifier(),
        bench_lock=str(kit.tmp / "bench.lock"),
        **{"patience": Patience(stop_s=0.0, restart_s=0.05), **changes},
    )


def play(make: Callable[[], Supervisor], work: Callable[[Supervisor], Any]) -> None:
    async def run() -> None:
        supervisor = make()
        task = asyncio.create_task(supervisor.run())
        try:
            await work(supervisor)
        finally:
            supervisor.stop()
            await task

    asyncio.run(run())


async def until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("step_s", [-30, 30, 315_360_000])
def test_T01_a_step_is_one_event_and_no_gap_and_no_burst(kit: Any, step_s: int) -> None:
    offset = 0
    watch = ClockWatch(lambda: wall_us() + offset, mono_us)

    async def work(supervisor: Supervisor) -> None:
        nonlocal offset
        await until(lambda: len(kit.spool.rows("gpu")) >= 3 * 8)
        offset = step_s * 1_000_000
        await until(lambda: kit.spool.events("clock_step"))
        seen = len(kit.spool.rows("gpu"))
        await until(lambda: len(kit.spool.rows("gpu")) >= seen + 4 * 8)

    play(lambda: made(kit, clock=watch), work)
    (event,) = kit.spool.events("clock_step")
    assert f"{step_s:+.1f} s" in event.message
    stamps = sorted({row["ts_us"] for row in kit.spool.rows("gpu")})
    gaps = [after - before for before, after in itertools.pairwise(stamps)]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(500_000, rel=0.3)
    assert max(gaps) < 2 * 500_000 + 2_000_000  # room for a busy machine
    # no burst: a sweep that is late may be close to the next, but never three together
    assert all(third - first > 400_000 for first, third in zip(stamps, stamps[2:], strict=False))


class Blocked:
    """Stands for a sender that waits for something that never comes."""

    def __init__(self) -> None:
        self.connected = True
        self.state = "connected"
        self.reconnects_total = 0
        self.last_progress_mono = 0.0

    def notify(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self, timeout_s: float) -> bool:
        return False


def watched(kit: Any, patch: pytest.MonkeyPatch) -> tuple[Any, Notifier]:
    systemd = kit.systemd()
    patch.setenv("NOTIFY_SOCKET", str(systemd.path))
    patch.setenv("WATCHDOG_USEC", "500000")
    return systemd, Notifier()


def test_W01_a_stuck_sender_ends_the_pings(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd, notifier = watched(kit, monkeypatch)
    counts: list[int] = []

    async def work(supervisor: Supervisor) -> None:
        supervisor.push = Blocked()  # type: ignore[assignment]
        await until(lambda: systemd.count("WATCHDOG=1") >= 3)
        await asyncio.sleep(2.5)
        counts.append(systemd.count("WATCHDOG=1"))
        assert not supervisor.healthy()
        await asyncio.sleep(1.0)
        counts.append(systemd.count("WATCHDOG=1"))
        assert kit.spool.rows("gpu")  # all else goes on: the samples are kept

    patience = Patience(sender_s=1.0, stop_s=0.0)

    def make() -> Supervisor:
        supervisor = made(kit, notifier, patience=patience)
        supervisor.push = Blocked()  # type: ignore[assignment]
        return supervisor

    play(make, work)
    assert counts[0] == counts[1]


def test_W01_a_stuck_supervisor_ends_the_pings(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd, notifier = watched(kit, monkeypatch)

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: systemd.count("WATCHDOG=1") >= 3)
        before = systemd.count("WATCHDOG=1")
        time.sleep(1.5)  # a duty that blocks the whole loop
        assert systemd.count("WATCHDOG=1") == before
        await until(lambda: systemd.count("WATCHDOG=1") >= before + 3)

    play(lambda: made(kit, notifier), work)


def test_W01_a_duty_that_fails_at_each_round_ends_the_pings_and_not_the_agent(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    systemd, notifier = watched(kit, monkeypatch)
    counts: list[int] = []

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: systemd.count("WATCHDOG=1") >= 3)

        def broken() -> None:
            raise OSError("the disk is gone")

        supervisor._duties["status"] = broken
        await asyncio.sleep(2.0)
        counts.append(systemd.count("WATCHDOG=1"))
        await asyncio.sleep(1.0)
        counts.append(systemd.count("WATCHDOG=1"))
        await until(lambda: supervisor.errors_total > 5)

    play(lambda: made(kit, notifier, patience=Patience(duty_s=0.5, stop_s=0.0)), work)
    assert counts[0] == counts[1]
    assert caplog.text.count("status failed") == 1  # once per kind


def test_W01_a_collector_that_is_away_or_pauses_is_no_reason(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, notifier = watched(kit, monkeypatch)

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: kit.spool.rows("gpu"))
        await until(supervisor.healthy)
        blocked = Blocked()
        blocked.state = "paused: disk_floor"
        supervisor.push = blocked  # type: ignore[assignment]
        await asyncio.sleep(1.0)
        assert supervisor.healthy()

    play(lambda: made(kit, notifier, patience=Patience(sender_s=0.5, stop_s=0.0)), work)


def test_a_message_that_makes_no_sense_is_counted_and_survived(kit: Any) -> None:
    async def work(supervisor: Supervisor) -> None:
        await until(lambda: kit.spool.rows("gpu"))
        supervisor._take(object())  # type: ignore[arg-type]
        assert supervisor.errors_total == 1
        seen = len(kit.spool.rows("gpu"))
        await until(lambda: len(kit.spool.rows("gpu")) > seen)

    play(lambda: made(kit), work)


def test_the_hello_describes_every_table_and_brings_the_inventory(kit: Any) -> None:
    async def work(supervisor: Supervisor) -> None:
        assert not supervisor._hello().inventory.complete  # nothing was read yet
        await until(lambda: kit.spool.rows("gpu"))
        await until(lambda: supervisor._hello().inventory.complete)
        hello = supervisor._hello()
        assert {probe.name for probe in hello.probes} == {*PROBES, "agent", "bench"}
        assert {probe.name: probe.interval_s for probe in hello.probes}["gpu"] == 0.5
        assert hello.node == "gpu-a01"
        assert len(hello.machine_id) == 32

    play(lambda: made(kit), work)


def directive(**kind: Any) -> pb.Directive:
    return pb.Directive(id="d1", **kind)


def test_directives_are_a_closed_set(kit: Any, tmp_path: Path) -> None:
    async def work(supervisor: Supervisor) -> None:
        await until(lambda: kit.spool.rows("gpu"))
        obey = supervisor.directives.obey
        done = await obey(directive(set_interval=pb.SetInterval(probe="host", interval_s=5.0)))
        assert (done.id, done.outcome) == ("d1", pb.OUTCOME_DONE)
        assert done.message.endswith("until the agent is restarted")
        assert supervisor.isolation.intervals()["host"] == 5.0
        for probe, every in (("host", 0.001), ("host", float("nan")), ("host", 1e9), ("bogus", 5.0)):
            result = await obey(directive(set_interval=pb.SetInterval(probe=probe, interval_s=every)))
            assert result.outcome == pb.OUTCOME_REFUSED
        for other in (
            directive(renew_certificate=pb.RenewCertificate()),
            directive(),
        ):
            assert (await obey(other)).outcome == pb.OUTCOME_UNSUPPORTED
        for for_s in (0.01, -5.0, float("nan"), 1e9):
            result = await obey(directive(pause_driver=pb.PauseDriver(for_s=for_s)))
            assert result.outcome == pb.OUTCOME_REFUSED
        assert (await obey(directive(pause_driver=pb.PauseDriver()))).outcome == pb.OUTCOME_DONE
        assert 1700 < supervisor.episodes.released_for_s <= 1800
        asked = pb.RunBench(bench="h2d", lease="lease-6", deadline_s=30)
        assert (await obey(directive(run_bench=asked))).outcome == pb.OUTCOME_REFUSED
        assert (await obey(directive(resume_driver=pb.ResumeDriver()))).outcome == pb.OUTCOME_DONE
        assert not supervisor.episodes.released
        refused = await obey(directive(run_bench=pb.RunBench(bench="nvbandwidth", lease="lease-6")))
        assert refused.outcome == pb.OUTCOME_REFUSED
        assert "not enabled in agent.toml" in refused.message
        wanted = pb.RunBench(bench="h2d", lease="lease-7", deadline_s=30)
        result = await obey(directive(run_bench=wanted))
        assert (result.outcome, result.message) == (pb.OUTCOME_DONE, "8 ok")
        assert (await obey(directive(run_bench=pb.RunBench(bench="rm -rf /")))).outcome == pb.OUTCOME_REFUSED
        nowhere = pb.RunBench(bench="h2d", entity="gpu:GPU-other")
        assert (await obey(directive(run_bench=nowhere))).outcome == pb.OUTCOME_REFUSED

    async def anew(supervisor: Supervisor) -> None:
        assert supervisor.isolation.intervals()["host"] == supervisor.config.probe("host").every_s == 0.5

    play(lambda: made(kit), work)
    play(lambda: made(kit), anew)
    rows = kit.spool.rows("bench")
    assert [row["reason"] for row in rows if row["lease"] == "lease-6"] == ["the driver is released"]
    rows = [row for row in rows if row["lease"] != "lease-6"]
    assert len(rows) == 8
    assert {row["lease"] for row in rows} == {"lease-7"}
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["unit"] for row in rows} == {"GB/s"}
    assert all(
        row["value"] > 1 and row["temperature_c"] > 0 and row["link"].startswith("pcie") for row in rows
    )


def xid_faults(count: int, every_s: float) -> str:
    """An Xid every so often, on a card of its own number."""
    return "".join(
        f'[[fault]]\nnode = "gpu-a01"\nkind = "xid"\nat = {at * every_s}\ngpu = {at % 8}\n'
        f"params = {{ code = {1000 + at} }}\n"
        for at in range(count)
    )


def held() -> int:
    """Descriptors that belong to children: pipes, progress words, process handles. gRPC's are its own."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            found += link.startswith(("pipe:", "/memfd:")) or "pidfd" in link
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killing_the_sampler_a_hundred_times_costs_no_row_and_no_event_and_leaks_nothing(kit: Any) -> None:
    chance = random.Random(7)
    seen: set[tuple[object, object]] = set()

    def rows() -> list[tuple[object, object]]:
        return [(row["ts_us"], row["pci"]) for row in kit.spool.rows("gpu")]

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: rows())
        files = held()
        for kill in range(100):
            await until(lambda: supervisor.isolation.pids)
            (pid,) = supervisor.isolation.pids
            await asyncio.sleep(chance.uniform(0.0, 0.9))
            os.kill(pid, signal.SIGKILL)
            supervisor.isolation._ends = 0  # the back-off is another test
            await until(lambda pid=pid: supervisor.isolation.pids not in ([], [pid]))  # type: ignore[misc]
            if kill % 20 == 0:
                seen.update(rows())
        await until(lambda: len(rows()) > len(seen) + 8)
        await until(lambda: len(kit.spool.events("xid")) >= 30)
        await until(lambda: len(psutil.Process().children(recursive=True)) == 1)
        await until(lambda: held() <= files)

    play(lambda: made(kit, faults=xid_faults(30, 1.0)), work)
    final = rows()
    assert seen <= set(final)
    assert len(final) == len(set(final))
    codes = [event.code for event in kit.spool.events("xid")]
    assert sorted(codes) == sorted(str(1000 + at) for at in range(30))
    told = kit.spool.events("sampler_restarted") + kit.spool.events("driver_crashed")
    assert len(told) == 100
