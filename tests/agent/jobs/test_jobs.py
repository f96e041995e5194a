"""Which job a process belongs to: hosts written as text, and what users may come up with."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers import DriverError, DriverGone, Gpu, Process
from gpufleet_agent.drivers.jobs import COLUMNS, Jobs, membership
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.guard import GuardedHost
from gpufleet_agent.probe import check_row, run_probe
from gpufleet_agent.probes import job

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"
Tree = Callable[[str], Path]
PIDS = {
    "hgx-h100": {51200: 0, 51201: 1, 52300: 2, 53010: 3},
    "grace": {8801: 0, 9902: 0},
    "workstation": {4410: 0, 4555: 0},
    "cloud-vm": {712: 0},
}
"""Host -> process -> the card it holds."""


class Card:
    def __init__(self, index: int) -> None:
        self.index = index
        self.pci = f"0000:{0x1B + index:02x}:00.0"
        self.uuid = f"GPU-{index:08x}"


class Holding(SysfsHost):
    """A host without a driver's library, to which somebody says who holds its cards."""

    def __init__(self, root: Path, held: Sequence[Process], trouble: DriverError | None = None) -> None:
        super().__init__(root)
        self.held, self.trouble = held, trouble

    def processes(self) -> Sequence[Process]:
        return self.held

    def gpus(self) -> Sequence[Gpu]:
        if self.trouble:
            raise self.trouble
        return [cast(Gpu, Card(index)) for index in range(8)]


def rows(host: SysfsHost) -> list[dict[str, object]]:
    sweep = run_probe("job", job, GuardedHost(host), pytest.fail)
    assert not sweep.error
    names = [metric.name for metric in job.METRICS]
    return [dict(zip(names, row, strict=True)) for row in sweep.rows]


def held(pids: dict[int, int], memory: int | None = 1 << 30) -> list[Process]:
    return [Process(pid, Card(index).pci, memory) for pid, index in pids.items()]


@pytest.mark.parametrize("name", PIDS)
def test_golden_readings(tree: Tree, name: str) -> None:
    found = rows(Holding(tree(name), held(PIDS[name])))
    golden = HOSTS / name / "golden" / "job.json"
    assert found == json.loads(golden.read_text())


def test_no_secret_leaves_the_environment(tree: Tree) -> None:
    for name, pids in PIDS.items():
        assert "do_not_read_me" not in repr(rows(Holding(tree(name), held(pids))))


def test_why_there_is_no_value(tree: Tree) -> None:
    row = Jobs(tree("grace")).process(8801)
    assert row["psi_io_some_s_total"] == Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert row["world"] == Null(Reason.NOT_SUPPORTED, "unset")
    assert Jobs(tree("cloud-vm")).process(712)["psi_cpu_some_s_total"] == Null(
        Reason.NOT_SUPPORTED, "no_cgroup"
    )


def test_a_process_that_ended_is_a_row_that_says_so(tree: Tree) -> None:
    host = Holding(tree("hgx-h100"), held({51200: 0, 60000: 1}))
    first, second = rows(host)
    assert first["job_id"] == "41778"
    assert (second["pid"], second["gpu_index"], second["job_id"], second["pid_start"]) == (
        60000,
        1,
        None,
        None,
    )
    assert Jobs(tree("grace")).process(60000) == dict.fromkeys(COLUMNS, Null(Reason.FAILED, "no_such_pid"))


def test_suspect_entries_still_say_that_the_card_is_in_use(tree: Tree) -> None:
    pci = Card(0).pci
    entries = [Process(9999, pci, None, "no_such_pid"), Process(51200, pci, None, "memory")]
    by_pid = {row["pid"]: row for row in rows(Holding(tree("hgx-h100"), entries))}
    assert by_pid[9999]["job_id"] is None
    assert (by_pid[51200]["job_id"], by_pid[51200]["mem_used_bytes"]) == ("41778", None)


def test_instances_of_a_split_card_are_one_row(tree: Tree) -> None:
    twice = [
        Process(51200, Card(0).pci, 3),
        Process(51200, Card(0).pci, 4),
        Process(51200, Card(1).pci, None),
    ]
    found = [(row["gpu_index"], row["mem_used_bytes"]) for row in rows(Holding(tree("hgx-h100"), twice))]
    assert found == [(0, 7), (1, None)]


def test_pids_of_another_namespace_mean_nothing(tree: Tree) -> None:
    root = tree("hgx-h100")
    (root / "proc/self/ns/pid").unlink()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532999]")
    assert set(Jobs(root).process(51200).values()) == {Null(Reason.FAILED, "pid_namespace")}


def test_a_pid_that_changes_hands_while_it_is_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("hgx-h100")
    jobs = Jobs(root)
    stat = root / "proc/51200/stat"
    real = Jobs._environment

    def reused(self: Jobs, pid: int, head: object) -> object:
        told = real(self, pid, head)  # type: ignore[arg-type]
        stat.write_text(stat.read_text().replace("901233", "999999"))
        return told

    monkeypatch.setattr(Jobs, "_environment", reused)
    assert set(jobs.process(51200).values()) == {Null(Reason.FAILED, "no_such_pid")}


def test_a_reused_pid_is_another_process(tree: Tree) -> None:
    root = tree("hgx-h100")
    jobs = Jobs(root)
    before = jobs.process(51200)
    stat, environ = root / "proc/51200/stat", root / "proc/51200/environ"
    stat.write_text(stat.read_text().replace("901233", "999999"))
    environ.write_bytes(b"RANK=5\0")
    after = jobs.process(51200)
    assert (before["rank"], after["rank"]) == (0, 5)
    assert before["pid_start"] != after["pid_start"]


def test_the_environment_is_read_once_and_not_of_a_stuck_process(tree: Tree) -> None:
    root = tree("hgx-h100")
    jobs = Jobs(root)
    stat, environ = root / "proc/51200/stat", root / "proc/51200/environ"
    text = stat.read_text()
    stat.write_text(text.replace(") S ", ") D "))
    assert jobs.process(51200)["rank"] == Null(Reason.NOT_READ, "uninterruptible")
    assert jobs.process(51200)["job_id"] == "41778", "its cgroup says that much"
    stat.write_text(text)
    assert jobs.process(51200)["rank"] == 0
    environ.write_bytes(b"RANK=7\0")
    assert jobs.process(51200)["rank"] == 0


@pytest.mark.usefixtures("bound_by_modes")
def test_an_environment_of_somebody_else(tree: Tree) -> None:
    root = tree("hgx-h100")
    (root / "proc/51200/environ").chmod(0)
    row = Jobs(root).process(51200)
    assert row["rank"] == Null(Reason.NO_PERMISSION, "EACCES")
    assert row["job_id"] == "41778"


@pytest.mark.parametrize(
    ("unit", "kind", "number"),
    [
        ("0::/system.slice/slurmd.service", "slurm", "555"),
        ("0::/", "slurm", "555"),
        ("0::/user.slice/user-1000.slice/session-4.scope", "plain", "session-4.scope"),
        (f"0::/docker/{'ab' * 32}", "plain", f"container-{'ab' * 6}"),
    ],
)
def test_a_job_number_of_the_environment_counts_only_below_slurmd(
    tree: Tree, unit: str, kind: str, number: str
) -> None:
    root = tree("cloud-vm")
    (root / "proc/712/cgroup").write_text(f"{unit}\n")
    (root / "proc/712/environ").write_bytes(b"SLURM_JOB_ID=555\0SLURM_PROCID=2\0")
    row = Jobs(root).process(712)
    assert (row["job_kind"], row["job_id"]) == (kind, number)


POD = "3f1d2c4b-0a9e-4f7c-8b21-5d6e7f809a1b"
SLICE = POD.replace("-", "_")
ID = "9c1f" * 16


@pytest.mark.parametrize(
    ("path", "kind", "job_id", "step", "container"),
    [
        ("/slurm/uid_1000/job_7/step_0/task_3", "slurm", "7", "0", ""),
        ("/slurm_gpu-001/uid_1000/job_7/step_extern", "slurm", "7", "extern", ""),
        ("/slurm/uid_1000/job_7", "slurm", "7", "", ""),
        ("/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0", "slurm", "7", "batch", ""),
        ("/system.slice/gpu-001_slurmstepd.scope/job_7/step_1/slurm", "slurm", "7", "1", ""),
        (f"/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope", "kubernetes", POD, "", ID),
        (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/docker-{ID}.scope",
         "kubernetes", POD, "", ID),
        (f"/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope/x", "kubernetes", POD, "", ID),
        (f"/kubepods/burstable/pod{POD}/{ID}", "kubernetes", POD, "", ID),
        (f"/kubepods/pod{POD}", "kubernetes", POD, "", ""),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope",
         "kubernetes", POD, "", ID),
        (f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}",
         "kubernetes", POD, "", ID),
        (f"/docker/{ID}", "plain", f"container-{ID[:12]}", "", ID),
        (f"/machine.slice/libpod-{ID}.scope", "plain", f"container-{ID[:12]}", "", ID),
        ("/system.slice/train.service", "plain", "train.service", "", ""),
        ("/user.slice/user-1.slice/user@1.service/app.slice/run-r5.scope/x", "plain", "run-r5.scope", "", ""),
        ("/", "plain", "", "", ""),
        # a user's own cgroups, named like the job of somebody else
        ("/user.slice/user-1.slice/user@1.service/slurmstepd.scope/job_8/step_0", "plain", "slurmstepd.scope",
         "", ""),
        (f"/user.slice/user-1.slice/user@1.service/kubepods/pod{POD}", "plain", "user@1.service", "", ""),
        ("/system.slice/train.service/slurm/uid_1/job_8", "plain", "train.service", "", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("line", ["0::{}", "4:memory:{}", "12:pids:/\n9:devices:{}\n0::/"])
def test_spellings_of_cgroups(
    line: str, path: str, kind: str, job_id: str, step: str, container: str
) -> None:
    found = membership(line.format(path) + "\n")
    assert (found.kind, found.job, found.step, found.container) == (kind, job_id, step, container)


words = st.sampled_from(
    ["slurm", "uid_1", "job_7", "job_", "step_0", "slurmstepd.scope", "system.slice", "kubepods", "..", "",
     f"pod{POD}", ID, "user.slice", "a.service", "\x00", "\n", ":", "0::", "é" * 300, "docker"]
)  # fmt: skip


@given(st.lists(words, max_size=40).map("/".join) | st.text(max_size=500))
def test_any_cgroup_file_gives_short_plain_words(text: str) -> None:
    found = membership(text)
    assert found.kind in ("slurm", "kubernetes", "plain")
    assert len(found.job) <= 64
    assert all(letter.isprintable() for letter in found.job + found.step + found.container)


def test_hostile_paths_take_no_time() -> None:
    for path in ("kubepods" * 500, "/docker-" * 500, "/a.service" * 400, "/kubepods" + "pod" * 1300):
        assert membership(f"0::/{path}\n").kind == "plain"


@pytest.fixture
def grown(tree: Tree) -> Path:
    return tree("hgx-h100")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the tree is put right after each
@given(
    st.sampled_from(["stat", "status", "cgroup", "environ"]),
    st.binary(max_size=300) | st.just(b"\xff" * (1 << 16)),
    st.integers(0, 400),
)
def test_a_damaged_proc_gives_cells_not_errors(grown: Path, name: str, junk: bytes, at: int) -> None:
    path = grown / "proc/51200" / name
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:at] + junk)
        row: Row = Jobs(grown).process(51200)
        cells, _ = check_row(job.METRICS, row)
    finally:
        path.write_bytes(whole)
    assert set(row) == set(COLUMNS)
    assert all(len(cell) <= 64 and cell.isprintable() for cell in cells if isinstance(cell, str))


def test_files_that_are_missing(tree: Tree) -> None:
    root = tree("hgx-h100")
    for name in ("status", "cgroup", "environ"):
        (root / "proc/51200" / name).unlink()
    row = Jobs(root).process(51200)
    assert row["command"] == "python3"
    assert row["job_id"] == row["user"] == row["rank"] == Null(Reason.NOT_SUPPORTED, "ENOENT")


def test_a_driver_that_is_gone_is_no_empty_table(tree: Tree) -> None:
    host = Holding(tree("hgx-h100"), [], DriverGone("driver_not_loaded"))
    assert run_probe("job", job, GuardedHost(host), pytest.fail).error == "driver_not_loaded"


def test_own_process() -> None:
    row = Jobs().process(os.getpid())
    if row["pid_start"] != Null(Reason.FAILED, "pid_namespace"):
        assert row["uid"] == os.getuid()
        assert isinstance(row["pid_start"], int)
