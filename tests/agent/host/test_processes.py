"""Processes stuck in the kernel: who counts, since when, and who is not seen at all."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers.host_processes import COLUMNS, WALK_S, Processes

if TYPE_CHECKING:
    from tests.agent.host.conftest import Clock

Write = Callable[[str, str], Path]
Refuse = Callable[[Path, int], None]

NOBODY = {
    "processes_zombie": 0, "processes_stuck": 0, "stuck_s": 0.0, "stuck_comm": "", "processes_unkillable": 0,
    "unkillable_s": 0.0,
}  # fmt: skip
KERNEL = 0x00200000


@pytest.fixture
def process(write: Write) -> Callable[..., Path]:
    """A process as /proc shows it."""

    def one(
        pid: int, state: str = "D", comm: str = "python3", flags: int = 0, ran: int = 7, start: int = 500,
        pending: int = 0, cgroup: str = "0::/", threads: int = 1, home: str = "",
    ) -> Path:  # fmt: skip
        home = home or f"proc/{pid}"
        stat = f"{pid} ({comm}) {state} 1 1 1 0 -1 {flags} 0 0 0 0 {ran} 1 0 0 20 0 {threads} 0 {start} 0 0\n"
        write(f"{home}/status", f"Name:\t{comm}\nSigPnd:\t{0:016x}\nShdPnd:\t{pending:016x}\n")
        write(f"{home}/cgroup", cgroup + "\n")
        return write(f"{home}/stat", stat)

    one(1, "S", "systemd")
    one(2, "S", "kthreadd", flags=KERNEL)
    return one


@pytest.fixture
def walk(tmp_path: Path, clock: "Clock") -> Callable[[], Row]:
    """The next walk, a minute later."""
    processes = Processes(tmp_path, clock)

    def one() -> Row:
        clock.t += WALK_S
        return processes.read()

    return one


Process = Callable[..., Path]
Walk = Callable[[], Row]


def test_one_that_stays_is_stuck_from_the_second_walk_on(process: Process, walk: Walk) -> None:
    process(4242, comm="pt_data_worker")
    assert walk() == NOBODY
    for minute in (1, 2, 3):
        assert walk() == NOBODY | {
            "processes_stuck": 1, "stuck_s": 60.0 * minute, "stuck_comm": "pt_data_worker"
        }  # fmt: skip
    process(4242, "S")
    assert walk() == NOBODY


@pytest.mark.parametrize(
    "later", [{"ran": 8}, {"start": 501}, {"state": "R"}, {"state": "S"}, {"state": "Z"}, {"state": "T"}]
)
def test_one_that_ran_meanwhile_or_is_another_is_not_stuck(
    process: Process, walk: Walk, later: dict[str, int | str]
) -> None:
    process(4242)
    walk()
    process(4242, **later)
    assert walk()["processes_stuck"] == 0


def test_it_is_the_longest_that_is_named_and_a_kill_in_vain_is_told_apart(
    process: Process, walk: Walk
) -> None:
    process(300, comm="rsync")
    walk()
    process(200, comm="cuda-evt", pending=1 << 8)
    walk()
    row = walk()
    assert row == NOBODY | {
        "processes_stuck": 2, "stuck_s": 120.0, "stuck_comm": "rsync",
        "processes_unkillable": 1, "unkillable_s": 60.0,
    }  # fmt: skip
    process(200, comm="cuda-evt", pending=1 << 14)  # SIGTERM may be caught: it is no proof
    assert walk()["processes_unkillable"] == 0


def test_the_kernels_own_threads_do_not_count(process: Process, walk: Walk) -> None:
    process(77, comm="kworker/u80:3", flags=0x04208060 | KERNEL)
    process(78, "Z", flags=KERNEL)
    for _ in range(3):
        assert walk() == NOBODY


@pytest.mark.parametrize("comm", ["sh) Z (x", "a b c", "((()", ") D 1 2 3", ")"])
def test_names_are_chosen_by_people(process: Process, walk: Walk, comm: str) -> None:
    process(10, "S", comm)
    process(11, "D", comm)
    walk()
    row = walk()
    assert (row["processes_zombie"], row["processes_stuck"], row["stuck_comm"]) == (0, 1, comm[:15])


def test_zombies_are_counted(process: Process, walk: Walk) -> None:
    for pid in range(10, 15):
        process(pid, "Z")
    assert walk()["processes_zombie"] == 5


def test_a_dead_process_whose_thread_is_stuck_is_no_mere_zombie(process: Process, walk: Walk) -> None:
    """As a killed job looks whose driver call does not return."""
    process(500, "Z", "python3", threads=3)
    process(500, "Z", home="proc/500/task/500")
    process(501, "S", home="proc/500/task/501")
    process(502, "D", "cuda-evt", pending=1 << 8, home="proc/500/task/502")
    process(600, "Z", "left early", threads=2)  # its first thread has ended, the others work
    process(601, "S", home="proc/600/task/601")
    assert walk() == NOBODY | {"processes_zombie": 1}
    assert walk() == NOBODY | {
        "processes_zombie": 1, "processes_stuck": 1, "stuck_s": 60.0, "stuck_comm": "python3",
        "processes_unkillable": 1, "unkillable_s": 60.0,
    }  # fmt: skip


def test_a_job_that_somebody_put_on_ice_is_not_stuck(process: Process, walk: Walk, write: Write) -> None:
    process(10, cgroup="9:memory:/slurm/job_7\n4:freezer:/slurm/job_7")
    state = write("sys/fs/cgroup/freezer/slurm/job_7/freezer.state", "FROZEN\n")
    walk()
    assert walk()["processes_stuck"] == 0
    state.write_text("THAWED\n")
    assert walk()["processes_stuck"] == 1


def test_a_walk_is_a_minute_old_at_most_and_not_done_more_often(
    tmp_path: Path, process: Process, clock: "Clock"
) -> None:
    processes = Processes(tmp_path, clock)
    assert processes.read()["processes_zombie"] == 0
    process(10, "Z")
    clock.t += WALK_S - 1
    assert processes.read()["processes_zombie"] == 0
    clock.t += 1
    assert processes.read()["processes_zombie"] == 1


def test_processes_end_while_we_walk(process: Process, walk: Walk, refuse: Refuse) -> None:
    refuse(process(10), errno.ESRCH)
    refuse(process(11), errno.ENOENT)
    shutil.rmtree(process(12).parent)
    assert walk() == NOBODY


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_T06_where_proc_hides_others_having_found_none_says_nothing(
    process: Process, walk: Walk, refuse: Refuse, number: int
) -> None:
    refuse(process(10), number)
    process(11, "S")
    null = Null(Reason.NO_PERMISSION, errno.errorcode[number])
    assert walk() == dict.fromkeys(COLUMNS, null)
    process(12)  # what is seen to be stuck is stuck all the same
    walk()
    row = walk()
    assert (row["processes_stuck"], row["processes_zombie"]) == (1, null)


def test_T06_where_others_are_not_even_listed_the_first_process_is_missing(
    process: Process, walk: Walk, tmp_path: Path
) -> None:
    process(11, "S")
    shutil.rmtree(tmp_path / "proc/1")
    assert walk() == dict.fromkeys(COLUMNS, Null(Reason.NO_PERMISSION, "hidepid"))


def test_T06_a_container_sees_its_own_processes_only(process: Process, walk: Walk, tmp_path: Path) -> None:
    """It sees no thread of the kernel."""
    process(7, "Z")
    shutil.rmtree(tmp_path / "proc/2")
    null = Null(Reason.NOT_SUPPORTED, "pid_namespace")
    assert walk() == dict.fromkeys(COLUMNS, null)
    process(8, comm="tar")
    walk()
    row = walk()
    assert (row["processes_stuck"], row["stuck_comm"], row["processes_zombie"]) == (1, "tar", null)
    process(2, "S", "bash")
    process(8, "S")
    assert walk() == dict.fromkeys(COLUMNS, null)


@pytest.mark.parametrize("text", ["", "garbage", "10 (x)", "10 (x) D 1 1", "10 (x) D " + "x " * 40])
def test_a_stat_that_is_none_is_passed_over(process: Process, walk: Walk, text: str) -> None:
    process(10).write_text(text)
    walk()
    assert walk() == NOBODY


def test_no_proc_at_all(tmp_path: Path, clock: "Clock") -> None:
    null = Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert Processes(tmp_path, clock).read() == dict.fromkeys(COLUMNS, null)
