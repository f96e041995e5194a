"""Workers of data loaders by /proc: hosts written as text, hostile files, and real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers import workers as workers_module
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.drivers.workers import MOST_PARENTS, Workers, parse_stat
from gpufleet_agent.guard import HostSettings, open_guarded
from gpufleet_agent.probe import check_row, run_probe
from gpufleet_agent.probes import loader

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"


def words(row: Row) -> dict[str, object]:
    """A reading as a golden file has it: NULL with its reason; what only the hook tells is left out."""
    cells = {
        name: f"NULL {cell.reason.name.lower()} {cell.code}" if isinstance(cell, Null) else cell
        for name, cell in row.items()
    }
    return {name: cell for name, cell in cells.items() if cell != "NULL not_supported proc"}


@pytest.mark.parametrize("name", ["hgx-h100", "cloud-vm", "workstation", "grace"])
def test_hosts_read_as_they_should(tree: Callable[[str], Path], name: str) -> None:
    host = SysfsHost(tree(name))
    rows = list(loader.read(host))
    assert [words(row) for row in rows] == json.loads((HOSTS / name / "golden" / "loader.json").read_text())
    for row in rows:
        _, reasons = check_row(loader.METRICS, row)
        assert not {Reason.NOT_READ, Reason.IMPLAUSIBLE} & {*reasons}


class Written:
    """/proc as text."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workers = Workers(root)

    def process(
        self,
        pid: int,
        name: str = "python",
        parent: int = 1,
        start: int = 100,
        state: str = "S",
        ticks: int = 0,
    ) -> Path:
        home = self.root / "proc" / str(pid)
        home.mkdir(parents=True, exist_ok=True)
        (home / "stat").write_text(
            f"{pid} ({name}) {state} {parent} {'0 ' * 9}{ticks} 0 {'0 ' * 6}{start} 0\n"
        )
        (home / "status").write_text("Name:\tx\nUid:\t7\t7\t7\t7\n")
        return home

    def worker(self, pid: int, ticks: int, read: int = 0, start: int = 101) -> Path:
        home = self.process(pid, "pt_data_worker", 10, start, ticks=ticks)
        (home / "io").write_text(f"rchar: {read * 2}\nread_bytes: {read}\n")
        (home / "schedstat").write_text(f"0 {ticks * 1_000_000} 3\n")
        return home

    def thread(
        self,
        pid: int,
        tid: int,
        name: str = "pt_thread_data_",
        state: str = "S",
        ticks: int = 0,
        start: int = 101,
    ) -> Path:
        home = self.root / "proc" / str(pid) / "task" / str(tid)
        home.mkdir(parents=True, exist_ok=True)
        (home / "stat").write_text(f"{tid} ({name}) {state} 1 {'0 ' * 9}{ticks} 0 {'0 ' * 6}{start} 0\n")
        (home / "comm").write_text(f"{name}\n")
        (home / "io").write_text("rchar: 4\nread_bytes: 2\n")
        (home / "schedstat").write_text("0 1000000 3\n")
        return home

    def end_thread(self, pid: int, tid: int) -> None:
        home = self.root / "proc" / str(pid) / "task" / str(tid)
        for file in home.iterdir():
            file.unlink()
        home.rmdir()

    def end(self, pid: int) -> None:
        home = self.root / "proc" / str(pid)
        for file in home.iterdir():
            file.unlink()
        home.rmdir()

    def rows(self) -> list[Row]:
        return list(self.workers.rows())

    def row(self) -> Row:
        (row,) = self.rows()
        return row


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = Written(tmp_path)
    made.process(10)
    return made


def test_sums_go_on_when_workers_end_and_others_start(written: Written) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    for pid in (11, 12):
        written.worker(pid, 100, 1000)
    assert written.row()["worker_cpu_s_total"] == 200 / hertz
    written.worker(11, 150, 1500)
    assert written.row()["worker_read_bytes_total"] == 2500
    written.end(11)
    written.end(12)
    between = written.row()
    assert (between["workers"], between["worker_cpu_s_total"], between["state"]) == (0, 250 / hertz, "live")
    written.worker(11, 30, 10, start=900)  # the next pass, and a pid that comes again
    after = written.row()
    assert (after["workers"], after["workers_sleeping"]) == (1, 1)
    assert after["worker_cpu_s_total"] == 280 / hertz
    assert after["worker_read_bytes_total"] == 2510
    assert after["worker_read_chars_total"] == 5020
    assert after["worker_runqueue_s_total"] == pytest.approx(0.28)


def test_a_process_that_ends_is_closed_once_and_its_pid_is_anothers(written: Written) -> None:
    written.worker(11, 100)
    written.row()
    written.end(11)
    written.process(10, start=999)
    closed = written.row()
    assert (closed["state"], closed["pid_start"], closed["workers"]) == ("closed", 100, 0)
    assert written.rows() == []
    written.worker(11, 5)
    assert (written.row()["pid_start"], written.row()["state"]) == (999, "live")


def test_an_io_file_that_may_not_be_read_is_no_permission(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root may read everything, so the refusal is said in the file's place
    from gpufleet_agent.drivers import files

    home = written.worker(11, 100, 1000)
    plain = files.read

    def refused(path: Path) -> str | Null:
        return Null(Reason.NO_PERMISSION, "EACCES") if path == home / "io" else plain(path)

    monkeypatch.setattr(files, "read", refused)
    row = written.row()
    assert (
        row["worker_read_bytes_total"]
        == row["worker_read_chars_total"]
        == Null(Reason.NO_PERMISSION, "EACCES")
    )
    assert row["worker_cpu_s_total"] == 100 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("content", ["", "read_bytes: x\n", "read_bytes: " + "9" * 40, "\0" * 100])
def test_a_broken_io_file_is_a_failure_not_a_zero(written: Written, content: str) -> None:
    (written.worker(11, 100) / "io").write_text(content)
    cell = written.row()["worker_read_bytes_total"]
    assert isinstance(cell, Null)
    assert cell.reason is Reason.FAILED


@pytest.mark.parametrize(
    ("states", "running", "disk", "sleeping"),
    [("RRRR", 4, 0, 0), ("DDSR", 1, 2, 1), ("SSSI", 0, 0, 4), ("tTZX", 0, 0, 0), ("", 0, 0, 0)],
)
def test_states(written: Written, states: str, running: int, disk: int, sleeping: int) -> None:
    for at, state in enumerate(states):
        written.process(20 + at, "pt_data_worker", 10, 101, state)
    rows = written.rows()
    if not states:
        assert rows == []
        return
    counted = [(row["workers_running"], row["workers_disk"], row["workers_sleeping"]) for row in rows]
    assert counted in ([(running, disk, sleeping)], [])


def test_names_that_come_late_are_seen_within_a_minute(written: Written) -> None:
    written.process(11, "python", 10)
    assert written.rows() == []
    written.process(11, "pt_data_worker", 10)
    assert any(written.rows() for _ in range(4))


def test_other_names_can_be_said(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.workers = Workers(tmp_path, {"my_loader"})
    written.process(10)
    written.process(11, "my_loader", 10)
    written.process(12, "pt_data_worker", 10)
    assert written.row()["workers"] == 1


def test_the_names_of_a_site_add_to_those_that_are_known(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.process(10)
    written.process(11, "our_loader_with", 10)  # the kernel keeps 15 letters
    written.process(12, "pt_data_worker", 10)
    settings = HostSettings(
        driver="none", root=str(tmp_path), worker_names=["our_loader_with_a_long_name", "other"]
    )
    (row,) = open_guarded(settings).rows("loader")
    assert row["workers"] == 2
    (row,) = open_guarded(HostSettings(driver="none", root=str(tmp_path))).rows("loader")
    assert row["workers"] == 1


# ---- workers that are threads


def test_threads_of_a_process_that_holds_a_card_are_workers(written: Written) -> None:
    for tid, name, state in (
        (10, "pt_thread_data_", "R"),  # the process itself, whatever it is called
        (21, "pt_thread_data_", "R"),
        (22, "pt_thread_data_", "D"),
        (23, "cuda-EvtHandlr", "S"),
        (24, "pt_data_pin", "R"),
        (25, "pt_data_pin", "S"),
        (26, "pt_thread_data_", "Z"),
    ):
        written.thread(10, tid, name, state)
    assert written.rows() == [], "nobody said that it holds a card"
    written.workers.holds_card(10, 100)
    row = written.row()
    assert (row["pid"], row["workers"], row["worker_threads"]) == (10, 2, 2)
    assert (row["workers_running"], row["workers_disk"], row["workers_sleeping"]) == (1, 1, 0)
    assert (row["pin_threads"], row["pin_threads_running"]) == (2, 1)
    written.worker(31, 50)
    row = written.row()
    assert (row["workers"], row["worker_threads"]) == (3, 2)
    _, reasons = check_row(loader.METRICS, row)
    assert not {Reason.NOT_READ, Reason.IMPLAUSIBLE} & {*reasons}


def test_of_a_process_without_a_card_threads_are_not_known(written: Written) -> None:
    written.worker(11, 5)
    row = written.row()
    for name in ("worker_threads", "pin_threads", "pin_threads_running"):
        assert row[name] == Null(Reason.NOT_SUPPORTED, "no_card")
    written.workers.holds_card(10, 100)
    row = written.row()
    assert [row[name] for name in ("worker_threads", "pin_threads", "pin_threads_running")] == [0, 0, 0]


def test_sums_of_threads_go_on_and_count_nothing_twice(written: Written) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    written.workers.holds_card(10, 100)
    written.thread(10, 21, ticks=100)
    assert written.row()["worker_cpu_s_total"] == 100 / hertz
    for ticks in (120, 130):
        written.thread(10, 21, ticks=ticks)
        assert written.row()["worker_cpu_s_total"] == ticks / hertz
    written.end_thread(10, 21)
    row = written.row()
    assert (row["workers"], row["worker_threads"], row["worker_cpu_s_total"]) == (0, 0, 130 / hertz)
    written.thread(10, 22, ticks=7, start=500)
    assert written.row()["worker_cpu_s_total"] == 137 / hertz


def test_a_pid_that_is_anothers_holds_no_card(written: Written) -> None:
    written.thread(10, 21)
    written.workers.holds_card(10, 99)
    assert written.rows() == []
    written.workers.holds_card(10, 100)
    assert written.row()["worker_threads"] == 1
    written.process(10, start=999)
    closed = written.row()
    assert (closed["state"], closed["workers"]) == ("closed", 0)
    assert written.rows() == []


def test_the_newest_threads_of_very_many_are_looked_at(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "MOST_THREADS", 8)
    monkeypatch.setattr(workers_module, "MOST_READ", 12)
    for pid in (30, 40, 50):
        written.process(pid)
        written.workers.holds_card(pid, 100)
        for tid in range(20):
            written.thread(pid, pid * 1000 + tid, "pt_thread_data_" if tid in (3, 19) else "other")
    found: dict[object, object] = {}
    for _ in range(8):
        read = written.rows()
        found = {row["pid"]: row["worker_threads"] for row in read}
        assert written.workers._read <= 12
    assert found == {30: 1, 40: 1, 50: 1}, "each has its turn, and none is lost once it is known"


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, b"1 (a", b"x" * 5000])
def test_threads_that_cannot_be_read_are_none(written: Written, content: bytes) -> None:
    written.workers.holds_card(10, 100)
    (written.thread(10, 21) / "stat").write_bytes(content)
    written.thread(10, 22)
    assert written.row()["worker_threads"] == 1


def test_probe_job_says_who_holds_a_card(tree: Callable[[str], Path]) -> None:
    host = SysfsHost(tree("hgx-h100"))
    holds = [int(str(row["pid"])) for row in host.rows("loader")]
    for pid in holds:
        start = host.process(pid)["pid_start"]
        if not isinstance(start, int):
            continue
        tid = host.sysfs._root / "proc" / str(pid) / "task" / "7000000"
        tid.mkdir(parents=True)
        (tid / "comm").write_text("pt_thread_data_\n")
        (tid / "stat").write_text(f"7000000 (pt_thread_data_) D 1 {'0 ' * 9}0 0 {'0 ' * 6}{start} 0\n")
    threads = {row["pid"]: row["worker_threads"] for row in host.rows("loader")}
    assert 1 in threads.values()
    assert host.process(4_000_000)["pid_start"] == Null(Reason.FAILED, "no_such_pid")


def test_parents_are_bounded(written: Written) -> None:
    for at in range(MOST_PARENTS + 20):
        written.process(1000 + at)
        written.process(5000 + at, "pt_data_worker", 1000 + at)
    assert len(written.rows()) == MOST_PARENTS


def test_a_host_without_proc_has_no_rows(tmp_path: Path) -> None:
    assert list(Workers(tmp_path).rows()) == []


@given(st.binary(max_size=300))
def test_any_bytes_as_stat(text: bytes) -> None:
    found = parse_stat(text)
    assert found is None or found.start >= 0


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=15))
def test_any_name(name: str) -> None:
    text = f"7 ({name}) D 3 {'0 ' * 9}5 6 {'0 ' * 6}44 0\n".encode()
    found = parse_stat(text)
    assert found is not None
    assert (found.name, found.state, found.parent, found.ticks, found.start) == (name, "D", 3, 11, 44)


REAL = """
import os, sys, time
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/comm", "w") as file:
            file.write("pt_data_worker")
        os.write(1, b"up\\n")
        sys.stdin.read()
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""


REAL_THREADS = """
import sys, threading
go_on = threading.Event()
def work(name):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name)
    named.release()
    go_on.wait()
named = threading.Semaphore(0)
for name in ("pt_thread_data_", "pt_thread_data_", "pt_data_pin", "other"):
    threading.Thread(target=work, args=(name,)).start()
for _ in range(4):
    named.acquire()
print("up", flush=True)
sys.stdin.read()
go_on.set()
"""


def test_real_threads() -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", REAL_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    workers = Workers()
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "up\n"
        start = parse_stat(Path(f"/proc/{trainer.pid}/stat").read_bytes())
        assert start is not None
        workers.holds_card(trainer.pid, start.start)
        (row,) = (row for row in workers.rows() if row["pid"] == trainer.pid)
        assert (row["workers"], row["worker_threads"], row["pin_threads"]) == (2, 2, 1)
        assert (row["uid"], row["state"]) == (os.getuid(), "live")
    finally:
        trainer.communicate()
    (row,) = (row for row in workers.rows() if row["pid"] == trainer.pid)
    assert row["state"] == "closed"


def test_real_processes() -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", REAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    host: Any = SysfsHost()
    try:
        assert trainer.stdout is not None
        assert [trainer.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        deadline = time.monotonic() + 90
        while True:
            sweep = run_probe("loader", loader, host, pytest.fail)
            names = [metric.name for metric in loader.METRICS]
            rows = [dict(zip(names, cells, strict=True)) for cells in sweep.rows]
            mine = [row for row in rows if row["pid"] == trainer.pid]
            if mine and mine[0]["workers"] == 2:
                break
            assert time.monotonic() < deadline, rows
        assert sweep.error == ""
        assert (mine[0]["uid"], mine[0]["state"]) == (os.getuid(), "live")
        assert mine[0]["worker_read_chars_total"] is not None
    finally:
        trainer.communicate()
    rows = [row for row in host.rows("loader") if row["pid"] == trainer.pid]
    assert [row["state"] for row in rows] == ["closed"]
