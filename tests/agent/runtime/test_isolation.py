import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpufleet.event import Event
from gpufleet_agent import isolation
from gpufleet_agent.child import Child
from gpufleet_agent.config import Sampling
from gpufleet_agent.episodes import Episodes
from gpufleet_agent.guard import HostSettings, SimulatedNode
from gpufleet_agent.isolation import Isolation
from gpufleet_agent.pipe import KernelNews, Message
from gpufleet_agent.probe import Sweep, mono_us, wall_us
from gpufleet_agent.probes import gpu

PROBES = {"gpu": 0.3, "host": 0.3, "pci": 0.3}
NAMES = [metric.name for metric in gpu.METRICS]

# A sampler whose driver does what a test says: the real program around another `open_host`.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from gpufleet_agent import guard, sampler
from gpufleet_agent.drivers import Lost, open as opener
from gpufleet_agent.drivers.nvml import NvmlHost

plan = {plan!r}
flag = Path({flag!r})

def open_host(driver, root, progress, simulated, skip, aside, worker_names):
    if driver == "none":
        return opener.open_host("none", root)
    if plan == "slow":
        class Library:
            def nvmlInit(self):
                while not flag.exists():
                    time.sleep(0.05)
            def nvmlDeviceGetCount(self):
                return 0
        return NvmlHost(root, progress, Library(), aside=aside)
    if plan == "init" and not flag.exists():
        progress.enter("", "nvmlInit")
        time.sleep(600)
    if plan == "silent" and not flag.exists():
        time.sleep(600)
    host = opener.open_host("simulated", root, progress, simulated, skip)
    cards = host.gpus()
    real = host.gpus
    def gpus():
        if plan == "list" and not flag.exists():
            progress.enter("", "nvmlDeviceGetCount")
            time.sleep(600)
        if plan == "segv" and cards[3].pci not in skip and not flag.exists():
            progress.enter(cards[3].pci, "nvmlDeviceGetTemperature")
            os.kill(os.getpid(), signal.SIGSEGV)
        if plan == "touch" and not flag.exists():
            progress.enter(cards[3].pci, "nvmlDeviceGetHandleByIndex")
            time.sleep(600)
        return real()
    host.gpus = gpus
    if plan == "bus":
        def pci_devices():
            progress.enter(cards[1].pci, "config")
            time.sleep(600)
        host.pci_devices = pci_devices
    if plan == "log":
        def kernel_log(cursor):
            if not flag.exists():
                progress.enter("", "kmsg")
                time.sleep(600)
            return (), cursor + "."
        host.kernel_log = kernel_log
    if plan == "lost":
        known_to_this_process = flag.exists()
        def read(group, real=cards[3].read):
            if not known_to_this_process:
                raise Lost("gpu_is_lost")
            return real(group)
        cards[3].read = read
    if plan == "health":
        def read(group, real=cards[3].read):
            if group == "gpu_health" and not flag.exists():
                progress.enter(cards[3].pci, "nvmlDeviceGetTotalEccErrors")
                time.sleep(600)
            return real(group)
        cards[3].read = read
    if plan == "exit":
        os._exit(7)
    if plan == "garbage":
        os.write(int(os.environ["OUT"]), b"this is no frame at all, but long enough to be taken for one")
        time.sleep(600)
    return host

guard.open_host = open_host
os.environ["OUT"] = str(os.dup(1))
sampler.main()
"""


class Stage:
    """An Isolation with real children, and what it reported."""

    def __init__(
        self,
        tmp: Path,
        scenario: Path,
        plan: str = "",
        retry_s: float = 0.8,
        saved: str = "",
        init_deadline_s: float = 0.5,
    ) -> None:
        self.flag = tmp / "flag"
        self.sweeps: list[tuple[float, Sweep]] = []
        self.events: list[Event] = []
        self.saved = saved
        self.cursor = "x" * 300_000  # more than an argument may be
        command: tuple[str, ...] = (sys.executable, "-P", "-m", "gpufleet_agent.sampler")
        if plan:
            program = tmp / "child.py"
            program.write_text(CHILD.format(plan=plan, flag=str(self.flag)))
            command = (sys.executable, str(program))
        self.episodes = Episodes("boot", saved, self.save, retry_s, 10.0)
        node = SimulatedNode(
            scenario=str(scenario), node="gpu-a01", started_us=wall_us(), started_mono_us=mono_us()
        )
        self.isolation = Isolation(
            HostSettings(driver="auto" if plan in ("init", "slow") else "simulated", simulated=node),
            PROBES | ({"gpu_health": 0.3} if plan == "health" else {}),
            Sampling(deadline_s=0.5, init_deadline_s=init_deadline_s, retry_s=retry_s, retry_max_s=10.0),
            self.episodes,
            self.take,
            self.events.append,
            command,
            restart_s=0.05,
            cursor=(lambda: self.cursor) if plan in ("log", "slow") else None,
        )

    def save(self, text: str) -> None:
        self.saved = text

    def take(self, message: Message) -> None:
        if isinstance(message, Sweep):
            self.sweeps.append((time.monotonic(), message))
        if isinstance(message, KernelNews):
            self.cursor = message.cursor
        if isinstance(message, Sweep) and message.probe == "pci":
            self.episodes.see_bus(message)
        if isinstance(message, Sweep) and message.probe == "gpu":
            self.events += self.episodes.see_gpus(message)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def states(self) -> list[object]:
        newest = [sweep for _, sweep in self.sweeps if sweep.probe == "gpu" and not sweep.error]
        return [row[NAMES.index("state")] for row in newest[-1].rows] if newest else []

    def count(self, probe: str) -> int:
        return sum(sweep.probe == probe for _, sweep in self.sweeps)

    async def until(self, condition: Callable[[], object], timeout_s: float = 90.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.isolation.check()
                await asyncio.sleep(0.05)

    async def for_s(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await self.until(lambda: time.monotonic() > end)

    async def more(self, probe: str, count: int = 3) -> None:
        wanted = self.count(probe) + count
        await self.until(lambda: self.count(probe) >= wanted)


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def play(stage: Stage, work: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        try:
            await work(stage)
        finally:
            await stage.isolation.stop()

    asyncio.run(run())
    assert children() == []


def test_B07_one_hung_card_costs_its_process_and_nothing_else(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(kit.hang(gpu=5, at=7.0, until=12.0)))

    async def work(stage: Stage) -> None:
        await stage.until(lambda: "driver_hung" in stage.kinds())
        await stage.until(lambda: stage.states() == ["ok"] * 5 + ["hung"] + ["ok"] * 2)
        await stage.more("host")
        assert len(stage.isolation.stuck) <= 1
        await stage.until(lambda: "driver_recovered" in stage.kinds())
        await stage.until(lambda: stage.states() == ["ok"] * 8)
        await stage.for_s(0.5)
        assert len(children()) == 1

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_recovered"]
    hung = stage.events[0]
    assert hung.entity.startswith("gpu:GPU-")
    assert '"call": "temperature"' in hung.detail
    assert '"pci": "0000:' in hung.detail


def test_B07_a_process_that_cannot_be_killed_stays_the_only_one(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, kit.scenario(kit.hang(gpu=2)), retry_s=0.3)
    kill = Child.kill
    monkeypatch.setattr(Child, "kill", lambda self: None)
    monkeypatch.setattr(
        Child, "abandon", lambda self: self._stop_hearing()
    )  # its commands stay open: it stays

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.isolation.stuck)
        stuck = list(stage.isolation.stuck)
        await stage.for_s(2.0)  # several retry intervals
        assert stage.isolation.stuck == stuck
        assert len(children()) == 2  # the stuck one and the sampler
        monkeypatch.setattr(Child, "kill", kill)
        monkeypatch.undo()
        os.kill(stuck[0], signal.SIGKILL)
        await stage.until(lambda: stage.isolation.stuck != stuck)
        await stage.for_s(2.5)  # now it is tried again, and hangs again
        assert len(stage.isolation.stuck) <= 1

    play(stage, work)
    assert stage.kinds() == ["driver_hung"]
    assert stage.states() == ["ok", "ok", "hung"] + ["ok"] * 5


def test_B07_two_hung_cards_are_two_episodes(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(kit.hang(gpu=0) + kit.hang(gpu=7)), retry_s=60.0)

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.states() == ["hung"] + ["ok"] * 6 + ["hung"])

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_hung"]
    assert len({event.detail.split('"call"')[0] for event in stage.events}) == 2


def test_an_episode_outlives_a_restart_of_the_agent(tmp_path: Path, kit: Any) -> None:
    scenario = kit.scenario(kit.hang(gpu=1))
    first = Stage(tmp_path, scenario, retry_s=60.0)

    async def until_hung(stage: Stage) -> None:
        await stage.until(lambda: "hung" in stage.states())

    play(first, until_hung)
    assert first.kinds() == ["driver_hung"]
    second = Stage(tmp_path, scenario, retry_s=60.0, saved=first.saved)
    play(second, until_hung)
    assert second.kinds() == []
    assert second.isolation.restarts_total == 0


@pytest.mark.parametrize("plan", ["init", "list"])
def test_a_hang_for_no_single_card_leaves_the_rest_going(tmp_path: Path, kit: Any, plan: str) -> None:
    stage = Stage(tmp_path, kit.scenario(), plan)

    async def work(stage: Stage) -> None:
        await stage.until(lambda: "driver_hung" in stage.kinds())
        await stage.more("host")
        await stage.more("pci")
        errors = [sweep.error for _, sweep in stage.sweeps if sweep.probe == "gpu"]
        assert set(errors) <= {"", "hung"}
        stage.flag.touch()
        await stage.until(lambda: "driver_recovered" in stage.kinds())
        await stage.until(lambda: stage.states() == ["ok"] * 8)

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_recovered"]
    assert stage.events[0].entity == "node:"
    assert '"pci": ""' in stage.events[0].detail
    assert "nvml" in stage.events[0].code


def test_a_card_that_hangs_in_the_list_of_cards_takes_the_driver_along_but_not_the_host(
    tmp_path: Path, kit: Any
) -> None:
    stage = Stage(tmp_path, kit.scenario(), "touch", retry_s=60.0)

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.kinds().count("driver_hung") == 2)
        await stage.more("host")
        await stage.more("gpu")
        assert len(children()) <= 3

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_hung"]
    assert [sweep.error for _, sweep in stage.sweeps if sweep.probe == "gpu"][-1] == "hung"


def test_initialising_the_driver_may_take_longer_than_a_call(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(), "init", init_deadline_s=3.0)

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.kinds())
        assert stage.kinds() == ["driver_hung"]
        detail = json.loads(stage.events[0].detail)
        assert detail["call"] == "nvmlInit"
        assert detail["seconds"] > 3.0  # not 0.5

    play(stage, work)


def test_a_lost_card_that_came_back_is_found_by_a_process_of_its_own(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(), "lost", retry_s=0.5)
    lost = ["ok"] * 3 + ["lost"] + ["ok"] * 4

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.states() == lost)
        (sampler,) = stage.isolation.pids
        await stage.until(lambda: len(children()) == 2)  # it is looked for
        await stage.until(lambda: len(children()) == 1)  # in vain
        await stage.more("gpu")
        assert stage.states() == lost
        assert stage.isolation.pids == [sampler]  # which cost the others nothing
        stage.flag.touch()
        await stage.until(lambda: stage.states() == ["ok"] * 8)

    play(stage, work)
    assert stage.kinds() == ["gpu_lost", "gpu_found"]
    assert stage.isolation.restarts_total == 0


@pytest.mark.parametrize("ends", [True, False])
def test_A16_bus_host_and_kernel_log_go_on_while_the_driver_is_initialised(
    tmp_path: Path, kit: Any, ends: bool
) -> None:
    stage = Stage(tmp_path, kit.scenario(), "slow", init_deadline_s=60.0 if ends else 4.0, retry_s=60.0)
    stage.cursor = ""

    def errors() -> list[str]:
        return [sweep.error for _, sweep in stage.sweeps if sweep.probe == "gpu"]

    async def work(stage: Stage) -> None:
        await stage.until(lambda: "starting" in errors())
        (pid,) = stage.isolation.pids
        await stage.more("host", 5)
        await stage.more("pci", 5)
        assert stage.cursor or not os.access("/dev/kmsg", os.R_OK)
        assert (set(errors()), stage.kinds(), stage.isolation.pids) == ({"starting"}, [], [pid])
        if ends:
            stage.flag.touch()
            await stage.until(lambda: errors()[-1] == "")
            assert (stage.kinds(), stage.isolation.pids) == ([], [pid])
        else:
            await stage.until(lambda: stage.kinds())
            await stage.more("host")

    play(stage, work)
    if not ends:
        (hung,) = stage.events
        assert (hung.kind, hung.entity, hung.code) == ("driver_hung", "node:", "nvmlInit")
        assert json.loads(hung.detail)["seconds"] > 4.0
    hosts = [at for at, sweep in stage.sweeps if sweep.probe == "host"]
    assert max(after - before for before, after in pairwise(hosts)) < 4.0


def test_B07_a_card_that_hangs_in_its_health_is_left_out_alone(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(), "health")

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.kinds() == ["driver_hung"])
        await stage.more("gpu_health")
        await stage.until(lambda: stage.states() == ["ok"] * 3 + ["hung"] + ["ok"] * 4)
        # trials hang too, although the card answers all that is asked before its health
        await stage.for_s(4.0)
        assert stage.kinds() == ["driver_hung"]
        stage.flag.touch()
        await stage.until(lambda: stage.kinds() == ["driver_hung", "driver_recovered"])
        await stage.until(lambda: stage.states() == ["ok"] * 8)

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_recovered"]


def test_a_kernel_log_that_hangs_is_left_out_and_taken_up_where_it_was(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(), "log")

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.kinds() == ["driver_hung"])
        await stage.more("gpu")
        assert stage.states() == ["ok"] * 8
        assert "." not in stage.cursor
        stage.flag.touch()
        await stage.until(lambda: stage.cursor.endswith("."))
        assert stage.cursor.startswith("x" * 300_000)

    play(stage, work)
    assert stage.kinds() == ["driver_hung", "driver_recovered"]


def test_a_hang_of_the_bus_probe_leaves_cards_and_host_going(tmp_path: Path, kit: Any) -> None:
    stage = Stage(tmp_path, kit.scenario(), "bus", retry_s=60.0)

    async def work(stage: Stage) -> None:
        await stage.more("host", 6)
        await stage.for_s(2.5)
        starts = stage.isolation.restarts_total
        await stage.for_s(1.2)
        assert stage.isolation.restarts_total == starts  # it came to rest
        await stage.more("host")

    play(stage, work)
    assert set(stage.kinds()) == {"driver_hung"}


def test_a_crash_in_a_driver_call_is_named_and_at_the_second_time_its_card_is_left_alone(
    tmp_path: Path, kit: Any
) -> None:
    stage = Stage(tmp_path, kit.scenario(), "segv")

    async def work(stage: Stage) -> None:
        await stage.until(lambda: stage.states() == ["ok"] * 3 + ["hung"] + ["ok"] * 4)
        stage.flag.touch()
        await stage.until(lambda: "driver_recovered" in stage.kinds())
        await stage.until(lambda: stage.states() == ["ok"] * 8)

    play(stage, work)
    assert stage.kinds() == ["driver_crashed", "driver_crashed", "driver_recovered"]
    assert '"signal": 11' in stage.events[0].detail
    assert stage.events[0].code == "nvmlDeviceGetTemperature"


@pytest.mark.parametrize("plan", ["exit", "garbage"])
def test_a_sampler_that_is_no_use_is_started_again_ever_more_slowly(
    tmp_path: Path, kit: Any, plan: str
) -> None:
    stage = Stage(tmp_path, kit.scenario(), plan)
    times: list[float] = []

    async def work(stage: Stage) -> None:
        seen = 0
        while len(times) < 4:
            await stage.until(lambda seen=seen: len(stage.events) > seen)  # type: ignore[misc]
            seen = len(stage.events)
            times.append(time.monotonic())

    play(stage, work)
    assert set(stage.kinds()) == {"sampler_restarted"}
    assert stage.isolation.restarts_total >= 4
    assert times[3] - times[2] > 0.08  # 0, 0.05, 0.1 between them


def test_killing_the_sampler_again_and_again_loses_nothing_that_was_sent_and_leaks_nothing(
    tmp_path: Path, kit: Any
) -> None:
    stage = Stage(tmp_path, kit.scenario())

    async def work(stage: Stage) -> None:
        await stage.more("gpu")
        files = len(os.listdir("/proc/self/fd"))
        for kill in range(20):
            stage.isolation._ends = 0  # the back-off is another test
            pid = stage.isolation.pids[0]
            os.kill(pid, signal.SIGKILL if kill % 2 else signal.SIGTERM)
            await stage.until(lambda pid=pid: stage.isolation.pids not in ([], [pid]))  # type: ignore[misc]
            await stage.for_s(0.02 * kill)
        await stage.more("gpu")
        assert stage.states() == ["ok"] * 8
        assert len(children()) == 1
        assert len(os.listdir("/proc/self/fd")) <= files

    play(stage, work)
    assert len(stage.events) == 20
    assert set(stage.kinds()) <= {"sampler_restarted", "driver_crashed"}
    stamps = [sweep.mono_us for _, sweep in stage.sweeps if sweep.probe == "gpu"]
    assert stamps == sorted(set(stamps))


def test_a_sampler_that_was_stopped_while_it_rested_is_replaced(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, kit.scenario())

    async def work(stage: Stage) -> None:
        await stage.more("gpu")
        watched = stage.isolation._sampler
        assert watched is not None
        process = psutil.Process(watched.child.pid)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED or watched.child.progress.phase() is not None:
            process.resume()
            await stage.for_s(0.05)
            process.suspend()
            await stage.for_s(0.05)
        with monkeypatch.context() as patch:
            patch.setattr(isolation, "SILENT_S", 1.0)
            await stage.until(stage.kinds)
        await stage.more("gpu")

    play(stage, work)
    assert [(event.kind, event.code) for event in stage.events] == [("sampler_restarted", "signal_9")]
    assert "it fell silent" in stage.events[0].message


def test_what_a_child_sent_before_it_died_is_heard(tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(
        "import os, signal\n"
        "from gpufleet_agent.pipe import send\n"
        "from gpufleet_agent.probe import Sweep\n"
        "for at in range(300): send(1, Sweep('host', at, at, 0.0, '', [], []))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    heard: list[Message] = []

    async def run() -> None:
        child = Child.start((sys.executable, str(program)), lambda fd: HostSettings(), heard.append)
        assert await child.wait(90)
        assert child.code == -signal.SIGKILL
        child.progress.close()

    asyncio.run(run())
    assert len(heard) == 300
