"""A bench in a unit of its own: what systemd does with gpufleet-bench.socket, done by hand."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufleet_agent import handover
from gpufleet_agent.bench_runner import BenchRunner
from gpufleet_agent.benches import METRICS
from gpufleet_agent.child import module_command
from gpufleet_agent.gate import Rules
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.probe import Sweep

NAMES = [metric.name for metric in METRICS]


class Unit:
    """Accepts, and starts a process per connection with it as standard input."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / handover.NAME
        self.started: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                command = [sys.executable, "-m", "gpufleet_agent.main", "bench-unit"]
                self.started.append(subprocess.Popen(command, stdin=connection.fileno()))

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    made = Unit(tmp_path)
    yield made
    made.end()


def runner(folder: Path, tools: dict[str, Any], unit: str) -> BenchRunner:
    return BenchRunner(
        HostSettings(driver="none"), str(folder), str(folder / "lock"), list, lambda sweep: None, "",
        lambda text: None, module_command("gpufleet_agent.bench"), Rules(load=100.0), tools=tools, unit=unit,
    )  # fmt: skip


def tool(folder: Path, script: str) -> dict[str, Any]:
    return {"fio": (["sh", "-c", script], 300.0)}


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    return [dict(zip(NAMES, cells, strict=True)) for cells in sweep.rows]


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_bench_runs_in_its_unit_and_its_rows_come_back(unit: Unit, tmp_path: Path) -> None:
    found = Path(__file__).parents[2] / "fixtures" / "bench_tools" / "fio-3-good.out"
    tools = tool(tmp_path, f"awk '/^PPid/ {{print $2}}' /proc/$$/status >{tmp_path}/parent; cat {found}")
    (row,) = rows(asyncio.run(runner(tmp_path, tools, str(unit.path)).run("fio", lease="l1")))
    assert (row["status"], row["value"]) == ("ok", 6.871947673)
    (process,) = unit.started
    assert int((tmp_path / "parent").read_text()) == process.pid
    assert process.wait(60) == 0


@pytest.mark.slow
def test_without_the_unit_it_runs_beside_the_agent(tmp_path: Path) -> None:
    found = Path(__file__).parents[2] / "fixtures" / "bench_tools" / "fio-3-good.out"
    stale = tmp_path / handover.NAME
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(stale))
    tools = tool(tmp_path, f"cat {found}")
    (row,) = rows(asyncio.run(runner(tmp_path, tools, str(stale)).run("fio", lease="l1")))
    assert (row["status"], row["value"]) == ("ok", 6.871947673)


@pytest.mark.slow
def test_a_bench_that_is_stopped_ends_in_its_unit_with_its_tool(unit: Unit, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = f"trap '' TERM; echo $$ >{mark}.new; mv {mark}.new {mark}; while :; do sleep 1000; done"

    async def work() -> Sweep:
        benches = runner(tmp_path, tool(tmp_path, script), str(unit.path))
        running = asyncio.create_task(benches.run("fio", lease="l1"))
        while not mark.exists():
            assert not running.done()
            await asyncio.sleep(0.02)
        benches.stop()
        return await running

    (row,) = rows(asyncio.run(work()))
    assert row["status"] == "preempted"
    pid = int(mark.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: unit.started[0].poll() is not None)


@pytest.mark.slow
def test_a_unit_that_dies_is_a_failed_run(unit: Unit, tmp_path: Path) -> None:
    script = "kill -KILL $PPID; exec sleep 1000"
    (row,) = rows(
        asyncio.run(runner(tmp_path, tool(tmp_path, script), str(unit.path)).run("fio", lease="l1"))
    )
    assert (row["status"], row["value"]) == ("failed", None)
    assert "no result" in row["reason"]


@pytest.mark.parametrize("said", [b"", b"\0", b"\0\0\0\5abc", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_run_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [said], [0, 1]) if said else None
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match="handed over"):
            handover.take(theirs.fileno())


def test_what_is_handed_over_arrives() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    settings = b"{}" * 100_000
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(handover.give(ours, settings, (read, write))))
    thread.start()
    with theirs:
        connection, data, passed = handover.take(theirs.fileno())
    assert data == settings
    os.write(passed[1], b"through")
    assert os.read(read, 99) == b"through"
    handover.done(connection)
    thread.join(60)
    assert got == [True]
    for descriptor in (read, write, *passed):
        os.close(descriptor)
