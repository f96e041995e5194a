"""Benches of a host without cards: only the site's command, the lock and the load show a job."""

import errno
import fcntl
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.agent.benches.processes import alive

from gpufleet_agent import lease
from gpufleet_agent.bench import Settings, run_bench
from gpufleet_agent.benches import METRICS, disk_read
from gpufleet_agent.gate import Preempted, Rules
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.measure import Place
from gpufleet_agent.pipe import Frames, Skip
from gpufleet_agent.probe import Sweep

NAMES = [metric.name for metric in METRICS]
HOST_BENCHES = ("memcpy", "disk_read", "tcp_loopback", "fio")
FIO = Path(__file__).parents[2] / "fixtures" / "bench_tools" / "fio-3-good.out"


@dataclass
class Cardless:
    """A host without cards or a driver, and bench processes on it."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def lock(self) -> Path:
        return self.folder / "bench.lock"

    def there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def script(self, text: str) -> list[str]:
        """A command that runs in our folder."""
        return ["sh", "-c", f"cd {shlex.quote(str(self.folder))}\n{text}"]

    def settings(self, bench: str, asks: str = "", tool: str = "", **more: Any) -> Settings:
        rules = Rules(load=100.0, command=self.script(asks) if asks else [], command_s=60.0)
        return Settings(
            bench=bench, host=HostSettings(driver="none"), state_dir=str(self.folder), lock=str(self.lock),
            rules=rules, command=self.script(tool) if tool else [], deadline_s=300.0, **more,
        )  # fmt: skip

    def start(self, settings: Settings) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gpufleet_agent.bench", msgspec.json.encode(settings).decode()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        return process

    def rows(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        assert process.stdout is not None
        frames, found = Frames(), []
        while data := os.read(process.stdout.fileno(), 1 << 16):
            found += list(frames.feed(data))
        process.wait(90)
        sweeps = [one for one in found if isinstance(one, Sweep)]
        return [dict(zip(NAMES, row, strict=True)) for sweep in sweeps for row in sweep.rows]

    def run(self, settings: Settings) -> tuple[str, float | None, str]:
        (row,) = self.rows(self.start(settings))
        return row["status"], row["value"], row["reason"]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(90)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Cardless]:
    made = Cardless(tmp_path)
    yield made
    made.close()


def until(holds: Callable[[], object], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("bench", HOST_BENCHES)
def test_a_host_that_its_site_calls_busy_is_left_alone(host: Cardless, bench: str) -> None:
    tool = "touch ran" if bench == "fio" else ""
    status, value, reason = host.run(host.settings(bench, "touch asked; exit 3", tool))
    assert (status, value, reason) == ("skipped", None, "gate command sh: exit status 3")
    assert host.there("asked")
    assert sorted(path.name for path in host.folder.iterdir()) == ["asked", "bench.lock"]


def test_so_is_one_that_is_to_measure_with_another(host: Cardless) -> None:
    order = lease.Order(peer="gpu-a02", token=b"t" * 32, bytes=1 << 20, seconds=1.0, own="127.0.0.1")
    opened: list[str] = []
    sweep = run_bench(host.settings("tcp", "exit 3"), leased=lease.Tcp(order, opened.append))
    (row,) = [dict(zip(NAMES, cells, strict=True)) for cells in sweep.rows]
    assert (row["status"], row["reason"]) == ("skipped", "gate command sh: exit status 3")
    assert (row["peer"], opened) == ("gpu-a02", [])


def test_a_site_that_calls_it_free_before_and_after_is_asked_twice(host: Cardless) -> None:
    status, value, _ = host.run(host.settings("fio", "echo >>asked", f"cat {FIO}"))
    assert (status, value is None) == ("ok", False)
    assert (host.folder / "asked").read_text() == "\n\n"


@pytest.mark.parametrize("bench", ["disk_read", "fio"])
def test_a_job_that_came_meanwhile_leaves_no_value(host: Cardless, bench: str) -> None:
    came = "[ ! -e asked ] && touch asked"
    tool = f"cat {FIO}" if bench == "fio" else ""
    status, value, reason = host.run(host.settings(bench, came, tool))
    assert (status, value) == ("contaminated", None)
    assert reason == "afterwards: gate command sh: exit status 1"


def test_a_person_is_not_told_to_wait_by_it(host: Cardless) -> None:
    assert host.run(host.settings("fio", "touch asked; exit 3", f"cat {FIO}", force=True))[0] == "ok"
    assert not host.there("asked")


@pytest.mark.parametrize("bench", HOST_BENCHES)
def test_one_that_a_scheduler_has_is_left_alone(host: Cardless, bench: str) -> None:
    with host.lock.open("w") as prolog:
        fcntl.flock(prolog, fcntl.LOCK_EX)
        found = host.run(host.settings(bench, "touch asked"))
    assert found == ("skipped", None, "another bench runs, or a scheduler holds the lock")
    assert not host.there("asked"), "who does not have the lock has nothing to ask"


def test_a_scheduler_that_wants_it_gets_it_while_a_bench_runs(host: Cardless) -> None:
    running = host.start(host.settings("fio", "true", f"touch ready; sleep 1000; cat {FIO}"))
    until(lambda: host.there("ready"))
    other = host.run(host.settings("memcpy", "true"))
    assert other == ("skipped", None, "another bench runs, or a scheduler holds the lock")
    assert running.poll() is None
    assert subprocess.run(["flock", str(host.lock), "true"], timeout=90, check=False).returncode == 0
    (row,) = host.rows(running)
    assert (row["status"], row["value"], row["reason"]) == ("preempted", None, "the lock is wanted")


@pytest.mark.parametrize("bench", HOST_BENCHES)
def test_one_whose_driver_is_released_is_left_alone(host: Cardless, bench: str) -> None:
    settings = host.settings(bench, "touch asked", skip=[Skip("", why="released")])
    assert host.run(settings) == ("skipped", None, "no card can be seen: released")


@pytest.mark.parametrize("how", ["SIGTERM", "its parent ends", "SIGKILL"])
def test_a_site_that_does_not_answer_is_not_left_behind(host: Cardless, how: str) -> None:
    # a script's own children are out of reach for a process that is killed: then its first one alone
    script = "echo $$ >pids; touch ready; exec sleep 1000"
    if how == "SIGTERM":
        script = "echo $$ >pids; sleep 1000 & echo $! >>pids; touch ready; wait"
    process = host.start(host.settings("memcpy", script))
    until(lambda: host.there("ready"))
    pids = [int(line) for line in (host.folder / "pids").read_text().split()]
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
        (row,) = host.rows(process)
        assert (row["status"], row["value"], row["reason"]) == ("skipped", None, "told to stop")
    elif how == "SIGKILL":
        process.kill()
    else:
        assert process.stdin is not None
        process.stdin.close()
    process.wait(90)
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("how", ["a folder", "no way there", "a pipe", "text", "unreadable"])
def test_a_lock_that_is_not_one_says_nothing_about_the_host(host: Cardless, how: str) -> None:
    settings = host.settings("fio", "", f"cat {FIO}")
    if how == "a folder":
        host.lock.mkdir()
    elif how == "no way there":
        (host.folder / "file").write_text("")
        settings = msgspec.structs.replace(settings, lock=str(host.folder / "file/bench.lock"))
    elif how == "a pipe":
        os.mkfifo(host.lock)
    else:
        host.lock.write_bytes(b"\0\xff 4711 garbage\n" * 100)
    if how == "unreadable":
        os.chmod(host.lock, 0o100)
    status, value, reason = host.run(settings)
    if how in ("a folder", "no way there"):
        why = "Is a directory" if how == "a folder" else "File exists"
        assert (status, value, reason) == (
            "skipped",
            None,
            f"the lock {settings.lock} cannot be taken: {why}",
        )
    else:
        assert (status, value is None) == ("ok", False), reason


@pytest.mark.usefixtures("bound_by_modes")
def test_a_lock_that_may_not_be_opened_says_nothing_about_the_host(host: Cardless) -> None:
    host.lock.touch()
    host.lock.chmod(0)
    (row,) = [dict(zip(NAMES, cells, strict=True)) for cells in run_bench(host.settings("fio")).rows]
    why = f"the lock {host.lock} cannot be taken: Permission denied"
    assert (row["status"], row["value"], row["reason"]) == ("skipped", None, why)


@pytest.mark.parametrize("anew", [False, True])
def test_a_bench_whose_lock_is_taken_away_ends(host: Cardless, anew: bool) -> None:
    running = host.start(host.settings("fio", "", f"touch ready; sleep 1000; cat {FIO}"))
    until(lambda: host.there("ready"))
    host.lock.unlink()
    if anew:
        host.lock.touch()
    (row,) = host.rows(running)
    assert (row["status"], row["value"], row["reason"]) == ("preempted", None, "the lock is wanted")


def test_who_waited_for_a_lock_that_was_made_anew_takes_the_new_one(host: Cardless) -> None:
    with host.lock.open("w") as old:
        fcntl.flock(old, fcntl.LOCK_EX)
        waits = host.start(host.settings("fio", "", f"cat {FIO}", wait_s=60.0))
        until(lambda: f":{os.fstat(old.fileno()).st_ino} " in _waited_for())
        host.lock.unlink()
        with host.lock.open("w") as new:
            fcntl.flock(new, fcntl.LOCK_EX)
            fcntl.flock(old, fcntl.LOCK_UN)
            until(lambda: f":{os.fstat(new.fileno()).st_ino} " in _waited_for())
            assert waits.poll() is None
    (row,) = host.rows(waits)
    assert row["status"] == "ok"


def _waited_for() -> str:
    return "\n".join(line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


def test_a_file_that_cannot_be_written_whole_is_not_left_on_the_disk(host: Cardless) -> None:
    size = int(disk_read.PARAMS["bytes"])
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, was[1]))
    try:
        result, _ = disk_read.run(Place(None, None, str(host.folder)), disk_read.PARAMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert (result.status, result.value) == ("failed", None)
    assert "File too large" in result.reason
    assert list(host.folder.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_is_not_a_slow_one(
    host: Cardless, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)  # where the room is only looked for when it is written
    result, _ = disk_read.run(Place(None, None, str(host.folder)), disk_read.PARAMS)
    assert (result.status, result.value) == ("skipped", None)
    assert os.strerror(code) in result.reason
    assert list(host.folder.iterdir()) == []


def test_a_run_that_makes_way_while_it_writes_its_file_leaves_none(host: Cardless) -> None:
    looks = iter(range(1000))

    def check() -> None:
        if next(looks) > 3:
            raise Preempted("a job came")

    with pytest.raises(Preempted):
        disk_read.run(Place(None, None, str(host.folder), check), disk_read.PARAMS)
    assert list(host.folder.iterdir()) == []


@pytest.mark.parametrize("stage", ["asks", "measures", "writes"])
def test_what_a_killed_bench_leaves_keeps_nobody_out(host: Cardless, stage: str) -> None:
    waits = "touch ready; sleep 1000"
    if stage == "writes":
        killed = host.start(host.settings("disk_read"))
        until(lambda: host.there("bench-read.new") or host.there("bench-read.dat"))
    else:
        killed = host.start(host.settings("fio", *((waits, "") if stage == "asks" else ("", waits))))
        until(lambda: host.there("ready"))
    killed.kill()
    assert host.rows(killed) == []
    status, value, reason = host.run(host.settings("disk_read"))
    assert (status, value is None) == ("ok", False), reason
    assert not host.there("bench-read.new")
