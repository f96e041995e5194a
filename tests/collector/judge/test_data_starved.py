"""Rule data_starved: how much training waits for data, why, and whether a node is to blame."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES
from gpufleet_agent.scenario import parse
from gpufleet_collector.judge import Judge
from gpufleet_collector.rules import MOUNT_COLUMNS, install, load_rules
from gpufleet_collector.store import Column, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet, Node, Row

RULE = "data_starved"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def put(store: Store, table: str, rows: Sequence["Row"]) -> None:
    """Insert rows of one shape, in one statement."""
    if rows:
        marks = ", ".join(f"({', '.join('?' for _ in rows[0])})" for _ in rows)
        cells = [cell for row in rows for cell in row.values()]
        with store.transaction() as write:
            write.execute(f"INSERT INTO live.{table} ({', '.join(rows[0])}) VALUES {marks}", cells)


@dataclass
class Training:
    """A job on every card of some nodes: what agents would send of it, second by second."""

    fleet: "Fleet"
    nodes: Sequence["Node"]
    job_id: str = "41778"
    kind: str = "slurm"
    shares: dict[int, float] = field(default_factory=dict)
    """Rank -> part of the time it waits; `share` for all others."""

    share: float = 0.0
    hook: bool = True
    state: str = "live"
    workers: int | None = 8
    work: tuple[int, int, int] = (1, 0, 7)
    """Workers that run, wait for a disk, sleep."""

    io: float = 0.002
    cpu: float = 0.004
    cgroup: bool = True
    pressure: bool = True
    governor: str | None = None
    mhz: float | None = None
    step_s: float = 0.5
    paused: bool = False
    busy_cards: bool = False
    util: float | None = 95.0
    power: float | None = 690.0
    began_s: float = 0.0
    role: str = "train"
    counts: dict[int, list[float]] = field(default_factory=dict)
    pressures: dict[str, list[float]] = field(default_factory=dict)

    def run(self, minutes: float, judge: Judge | None = None, passes: tuple[int, ...] = (30,)) -> None:
        """Let time go by, 15 s at a time; passes at these seconds of each minute."""
        together([self], minutes, judge, passes)

    def send(self) -> None:
        gpus: list[Row] = []
        jobs: list[Row] = []
        loaders: list[Row] = []
        hosts: list[Row] = []
        rank = -1
        for node in self.nodes:
            head: dict[str, Cell] = {
                "ts": self.fleet.at, "received_at": self.fleet.at, "node": node.name, "boot_id": node.boot_id,
            }  # fmt: skip
            felt = self.pressures.setdefault(node.name, [0.0, 0.0])
            felt[0] += 15 * self.io
            felt[1] += 15 * self.cpu
            here = felt if self.pressure else [None, None]
            hosts.append(head | {
                "psi_io_some_s_total": here[0], "psi_cpu_some_s_total": here[1],
                "cpu_governor": self.governor, "cpu_clock_median_mhz": self.mhz,
            })  # fmt: skip
            for slot, card in enumerate(node.cards):
                rank += 1
                who: dict[str, Cell] = {"pid": 4000 + slot, "pid_start": 77 + slot}
                share = self._wait(rank)
                idle = 0.0 if self.busy_cards else share
                gpus.append(head | {
                    "gpu_uuid": card.uuid, "gpu_index": slot, "pci": card.pci, "state": "ok",
                    "util_pct": None if self.util is None else self.util * (1 - idle),
                    "power_w": None if self.power is None else self.power * (1 - idle),
                })  # fmt: skip
                felt_here = here if self.cgroup else [None, None]
                jobs.append(head | who | {
                    "gpu_uuid": card.uuid, "gpu_index": slot, "pci": card.pci, "job_kind": self.kind,
                    "job_id": self.job_id, "user": "ana", "rank": rank,
                    "psi_io_some_s_total": felt_here[0], "psi_cpu_some_s_total": felt_here[1],
                })  # fmt: skip
                loaders += self._loaders(head | who, rank)
        put(self.fleet.store, "gpu", gpus)
        put(self.fleet.store, "host", hosts)
        put(self.fleet.store, "loader", loaders)
        if self.fleet.at.second % 30 == 0:
            put(self.fleet.store, "job", jobs)

    def _wait(self, rank: int) -> float:
        """Count 15 s of fetching; the part of it that was waiting."""
        fetches_wait_busy = self.counts.setdefault(rank, [0.0, 0.0, 0.0])
        share = self.shares.get(rank, self.share)
        if self.paused:
            return 1.0
        for at, grown in enumerate((15 / self.step_s, 15 * share, 15 * (1 - share))):
            fetches_wait_busy[at] += grown
        return share

    def _loaders(self, head: Mapping[str, "Cell"], rank: int) -> list["Row"]:
        shape: dict[str, Cell] = dict.fromkeys(
            ("loader", "role", "rank", "fetches_total", "wait_s_total", "busy_s_total", "startup_s_total",
             "pause_s_total", "workers", "workers_running", "workers_disk", "workers_sleeping")
        )  # fmt: skip
        fetches, wait_s, busy_s = self.counts[rank]
        found: list[Row] = []
        if self.hook:
            found.append({"source": "hook", "state": self.state, **head, **shape} | {
                "loader": "train", "role": self.role, "rank": rank, "fetches_total": int(fetches),
                "wait_s_total": wait_s, "busy_s_total": busy_s, "startup_s_total": self.began_s,
                "workers": self.workers,
            })  # fmt: skip
        if self.workers:
            running, disk, sleeping = self.work
            found.append({"source": "proc", "state": "live", **head, **shape} | {
                "loader": "", "workers": self.workers, "workers_running": running, "workers_disk": disk,
                "workers_sleeping": sleeping,
            })  # fmt: skip
        return found

    def now(self, entity: str = "", node: str | None = None) -> tuple[str, str, str]:
        """(verdict, code, reason) of the job, or of another entity, now."""
        job_node = "" if self.kind == "slurm" else self.nodes[0].name
        where = job_node if node is None else node
        rows = self.fleet.sql(
            f"SELECT verdict, code, reason FROM find_{RULE}(TIMESTAMP '{self.fleet.at}') "
            "WHERE entity = ? AND node = ?",
            entity or f"job:{self.job_id}",
            where,
        )
        assert len(rows) == 1, rows
        verdict, code, reason = map(str, rows[0])
        return verdict, code, reason


def together(
    jobs: Sequence[Training], minutes: float, judge: Judge | None = None, passes: tuple[int, ...] = (30,)
) -> None:
    """The same for several jobs of one fleet."""
    fleet = jobs[0].fleet
    for _ in range(round(minutes * 4)):
        fleet.at += timedelta(seconds=15)
        for job in jobs:
            job.send()
        if judge and fleet.at.second in passes:
            judge.run_pass(fleet.at)


def several(fleet: "Fleet", judge: Judge, changes: Sequence[Mapping[str, object]]) -> list[Training]:
    """A job per change, each on two nodes of its own."""
    jobs = []
    for at, change in enumerate(changes):
        nodes = [fleet.add(f"gpu-{at}{n}", gpus=2) for n in (1, 2)]
        jobs.append(Training(fleet, nodes, str(41000 + at), **change))  # type: ignore[arg-type]
    judge.compile(fleet.at)
    return jobs


@pytest.fixture
def train(fleet: "Fleet", judge: Judge) -> Training:
    """Eight ranks on two nodes."""
    nodes = [fleet.add(f"gpu-00{n}", gpus=4) for n in (1, 2)]
    judge.compile(fleet.at)
    return Training(fleet, nodes)


def test_injected_shares_are_found_again(fleet: "Fleet", judge: Judge) -> None:
    shares = (0.0, 0.05, 0.1, 0.3, 0.5)
    # the view shows the last hour
    fleet.at = datetime.now(UTC).replace(tzinfo=None, second=0, microsecond=0) - timedelta(minutes=6)
    jobs = several(fleet, judge, [{"share": share} for share in shares])
    began = fleet.at
    together(jobs, 4.5)
    for job, share in zip(jobs, shares, strict=True):
        found = fleet.sql(
            "SELECT share, scope FROM main.data_stalls WHERE job = ? AND minute > ? AND minute < ?",
            job.job_id, began, began + timedelta(minutes=4),
        )  # fmt: skip
        assert len(found) == 3
        for measured, scope in found:
            assert measured == pytest.approx(share, abs=0.02)
            assert scope == "job"


@pytest.mark.drill("data_starved", "fires")
def test_a_job_that_waits_everywhere_is_no_nodes_fault(train: Training, fleet: "Fleet", judge: Judge) -> None:
    train.run(3.5, judge)
    assert fleet.findings() == []
    train.share, train.io = 0.27, 0.3
    train.run(4, judge)
    assert fleet.findings() == [("", "job:41778", "firing", "crit", "storage")]
    assert fleet.incidents() == [(1, RULE, "", "job:41778", "open", "crit")]
    reason = train.now()[2]
    assert reason.startswith("train waits for data 27 % of the time on 8 of 8 ranks, 2 of 2 nodes: storage")
    assert "not the nodes" in reason
    assert train.now("node:", "gpu-001")[:2] == ("ok", "as_others")
    states = fleet.sql(f"SELECT DISTINCT state FROM nodes_at(TIMESTAMP '{fleet.at}', '10 minutes')")
    assert "degraded" not in {row[0] for row in states}
    train.share, train.io = 0.0, 0.0
    train.run(5, judge, passes=(0, 30))
    assert fleet.findings() == []


@pytest.mark.parametrize("slow", [{5: 0.5, 6: 0.5}, {4: 0.3, 5: 0.3, 6: 0.3, 7: 0.3}])
def test_the_culprit_rank_and_node_are_named_and_no_other(
    train: Training, fleet: "Fleet", judge: Judge, slow: dict[int, float]
) -> None:
    train.shares, train.work = slow, (1, 6, 1)
    train.run(4.5, judge)
    assert fleet.findings() == [("gpu-002", "node:", "firing", "crit", "storage")]
    reason = train.now("node:", "gpu-002")[2]
    assert f"rank {','.join(map(str, slow))} of job 41778" in reason
    assert train.now("node:", "gpu-001")[:2] == ("ok", "as_others")
    assert train.now()[:2] == ("ok", "one_node")


def test_one_rank_beside_others_that_do_not_wait_says_nothing_against_its_node(
    train: Training, fleet: "Fleet", judge: Judge
) -> None:
    """Its shard may be slow: the others read by the same disks and cores."""
    train.shares, train.work = {5: 0.5}, (1, 6, 1)
    train.run(4.5, judge)
    assert fleet.findings() == [("", "job:41778", "firing", "crit", "storage")]
    assert "gpu-002 alone, rank 5" in train.now()[2]
    assert train.now("node:", "gpu-002")[:2] == ("ok", "as_others")


def test_the_only_rank_of_a_node_speaks_for_it(fleet: "Fleet", judge: Judge) -> None:
    nodes = [fleet.add(f"gpu-00{n}", gpus=1) for n in (1, 2, 3)]
    judge.compile(fleet.at)
    train = Training(fleet, nodes, shares={1: 0.5}, work=(1, 6, 1))
    train.run(4.5, judge)
    assert fleet.findings() == [("gpu-002", "node:", "firing", "crit", "storage")]
    assert train.now()[:2] == ("ok", "one_node")


def test_a_culprit_whose_node_is_not_why_is_named_but_not_its_node(
    train: Training, fleet: "Fleet", judge: Judge
) -> None:
    train.shares, train.work = {5: 0.5}, (0, 0, 8)
    train.run(4.5, judge)
    assert fleet.findings() == [("", "job:41778", "firing", "crit", "remote_or_lock")]
    assert "gpu-002 alone, rank 5" in train.now()[2]
    assert train.now("node:", "gpu-002")[:2] == ("ok", "as_others")


def test_a_job_on_one_node_says_nothing_against_it(fleet: "Fleet", judge: Judge) -> None:
    """Its other ranks read from the same disks with the same cores, and do not wait."""
    node = fleet.add("gpu-001", gpus=8)
    judge.compile(fleet.at)
    train = Training(fleet, [node], shares={5: 0.5}, work=(1, 6, 1))
    train.run(4.5, judge)
    assert fleet.findings() == [("", "job:41778", "firing", "crit", "storage")]
    assert "1 of 8 ranks (5), 1 of 1 node: storage" in train.now()[2]
    assert train.now("node:", "gpu-001")[:2] == ("ok", "as_others")


def test_two_slow_nodes_are_no_lone_suspect(train: Training, fleet: "Fleet") -> None:
    train.shares, train.io = {0: 0.4, 7: 0.4}, 0.5
    train.run(3.5)
    verdict, code, reason = train.now()
    assert (verdict, code) == ("crit", "storage")
    assert "2 of 8 ranks (0,7), 2 of 2 nodes" in reason
    assert train.now("node:", "gpu-001")[0] == train.now("node:", "gpu-002")[0] == "ok"


@pytest.mark.drill("data_starved", "not_judged")
def test_pauses_and_starts_raise_nothing(train: Training, fleet: "Fleet", judge: Judge) -> None:
    """A checkpoint of 90 s, and the long first batch of an epoch."""
    train.run(2.5, judge)
    train.paused, train.io = True, 0.8
    train.run(1.5, judge)
    train.paused, train.io = False, 0.0
    train.began_s += 40
    train.run(3.5, judge)
    assert fleet.sql("SELECT rule FROM finding") == []


def test_a_minute_without_fetches_is_a_pause(train: Training) -> None:
    train.run(1.5)
    train.paused = True
    train.run(2)
    assert train.now()[:2] == ("n/a", "paused")


CAUSES: dict[str, dict[str, object]] = {
    "storage": {"io": 0.2},
    "cpu_preparation": {"cpu": 0.4},
    "remote_or_lock": {"work": (0, 0, 8)},
    "no_workers": {"workers": 0},
    "unexplained": {"workers": None},
}
NEAR: list[tuple[dict[str, object], str, str]] = [
    ({"share": 0.09, "io": 0.5}, "ok", "fed"),
    ({"share": 0.3, "step_s": 30.0}, "unknown", "few_fetches"),
    ({"share": 0.3, "step_s": 0.005}, "unknown", "short_waits"),
    ({"share": 0.15, "io": 0.5}, "warn", "storage"),
    ({"share": 0.3, "io": 0.5, "busy_cards": True}, "ok", "wait_hidden"),
    ({"share": 0.5, "role": "eval"}, "ok", "no_sign"),
    ({"share": 0.5, "hook": False, "pressure": False, "workers": None}, "n/a", "no_hook"),
    ({"share": 0.5, "state": "closed"}, "ok", "no_sign"),
    # kernels without PSI; and waiting for NFS metadata is no I/O pressure
    ({"share": 0.15, "pressure": False, "work": (1, 5, 2)}, "warn", "storage"),
    ({"share": 0.15, "pressure": False, "work": (8, 0, 0)}, "warn", "cpu_preparation"),
    ({"share": 0.15, "cgroup": False, "cpu": 0.5}, "warn", "cpu_preparation"),
    ({"share": 0.3, "util": None, "power": None}, "unknown", "no_gpu_evidence"),
]


def test_causes_and_near_misses(fleet: "Fleet", judge: Judge) -> None:
    cases = [({"share": 0.3, **change}, "crit", cause) for cause, change in CAUSES.items()] + NEAR
    jobs = several(fleet, judge, [change for change, _, _ in cases])
    together(jobs, 2.5)
    assert [(job.now()[:2], change) for job, (change, _, _) in zip(jobs, cases, strict=True)] == [
        ((verdict, code), change) for change, verdict, code in cases
    ]


def test_a_server_that_does_not_answer(train: Training, fleet: "Fleet") -> None:
    train.share = 0.5
    fleet.event(train.nodes[0], "nfs", "not_responding", "node:", server="filer-1")
    train.run(2.5)
    verdict, code, reason = train.now()
    assert (verdict, code) == ("crit", "nfs_hung")
    assert "NFS does not answer (filer-1)" in reason
    fleet.event(train.nodes[0], "nfs", "ok", "node:", server="filer-1")
    train.run(2)
    assert train.now()[1] == "remote_or_lock"


MOUNT = ("mount", "canary_state", "nfs_read_ops_total", "nfs_read_rtt_s_total", "nfs_retransmits_total")


MOUNTS = [
    ("hung", 0.005, 0, 0, "nfs_hung"), ("ok", 0.05, 0, 0, "storage"), ("ok", 0.005, 20, 0, "storage"),
    ("ok", 0.005, 0, 0, "remote_or_lock"), ("failed", 0.005, 0, 0, "remote_or_lock"),
    # with a past in which it took 1 ms: eight times; not thrice; thrice of little; too short a past
    ("ok", 0.008, 0, 10**7, "storage"), ("ok", 0.0029, 0, 10**7, "remote_or_lock"),
    ("ok", 0.004, 0, 10**7, "remote_or_lock"), ("ok", 0.008, 0, 50_000, "remote_or_lock"),
]  # fmt: skip


def test_mounts_tell_too_where_agents_read_them(fleet: "Fleet", judge: Judge) -> None:
    if "mount" not in fleet.store.tables:
        with fleet.store.transaction() as write:
            columns = [
                Column(name, kind, "", "gauge", "", None, None, "") for name, kind in MOUNT_COLUMNS.items()
            ]
            fleet.store.ensure_probe(write, "mount", columns)
        judge.prepare()
    jobs = several(fleet, judge, [{"share": 0.3, "work": (0, 0, 8)}] * len(MOUNTS))
    for step in range(7):
        together(jobs, 0.5)
        rows: list[Row] = []
        for job, (state, rtt_s, again, before, _) in zip(jobs, MOUNTS, strict=True):
            head: dict[str, Cell] = {"ts": fleet.at, "received_at": fleet.at, "node": job.nodes[0].name}
            ops = before + 1000 * step
            took_s = before * 0.001 + 1000 * step * rtt_s
            cells: tuple[Cell, ...] = ("/data", state, ops, took_s, again * step)
            rows.append({**head, "boot_id": "boot-1", **dict(zip(MOUNT, cells, strict=True))})
        put(fleet.store, "mount", rows)
    assert [job.now()[:2] for job in jobs] == [("crit", code) for *_, code in MOUNTS]
    assert "NFS answers in 8 ms, 8 times its own mean" in jobs[5].now()[2]
    assert "NFS answers in 50 ms)" in jobs[1].now()[2]


def test_a_governor_that_saves_power_is_named_where_the_workers_want_a_cpu(
    fleet: "Fleet", judge: Judge
) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"work": (8, 0, 0), "governor": "powersave", "mhz": 1200.0},
            "governor powersave, median clock 1200 MHz)",
        ),
        ({"work": (8, 0, 0), "governor": "ondemand"}, "governor ondemand)"),
        ({"work": (8, 0, 0), "governor": "performance", "mhz": 1200.0}, ""),
        ({"work": (8, 0, 0)}, ""),
        ({"io": 0.5, "governor": "powersave", "mhz": 1200.0}, ""),
    ]
    jobs = several(fleet, judge, [{"share": 0.3, **change} for change, _ in cases])
    together(jobs, 2.5)
    for job, (_, said) in zip(jobs, cases, strict=True):
        verdict, _, reason = job.now()
        assert verdict == "crit"
        assert said in reason
        assert ("governor" in reason) == bool(said)
    assert [job.now()[1] for job in jobs] == ["cpu_preparation"] * 4 + ["storage"]


def test_power_tells_where_utilisation_does_not(train: Training) -> None:
    """A card that MIG splits has no utilisation."""
    train.util = None
    train.run(3)
    train.share, train.io = 0.4, 0.5
    train.run(2.5)
    assert train.now()[:2] == ("crit", "storage")


def test_a_restarted_process_is_no_burst(train: Training) -> None:
    train.share = 0.05
    train.run(2)
    train.counts[0] = [0.0, 0.0, 0.0]
    train.run(0.5)
    assert train.now()[:2] == ("ok", "fed")


@pytest.mark.drill("data_starved", "near_miss")
def test_two_minutes_of_waiting_are_no_finding(train: Training, fleet: "Fleet", judge: Judge) -> None:
    train.run(2.5, judge)
    train.share, train.io = 0.5, 0.5
    train.run(1.25, judge)
    train.share = 0.0
    train.run(4, judge)
    assert [row[2] for row in fleet.findings()] in ([], ["pending"])
    assert fleet.incidents() == []


def test_without_the_hook_it_is_a_suspicion_and_never_critical(
    train: Training, fleet: "Fleet", judge: Judge
) -> None:
    train.hook = False
    train.run(2.5, judge)
    assert train.now()[:2] == ("ok", "no_sign")
    train.io, train.work = 0.9, (0, 8, 0)
    for _ in range(4):  # the cards do nothing most of the time, but a step now and then
        train.share = 0.9
        train.run(0.75, judge)
        train.share = 0.0
        train.run(0.25, judge)
    assert train.now()[:2] == ("warn", "suspect")
    assert fleet.findings() == [("", "job:41778", "firing", "warn", "suspect")]
    assert {row[0] for row in fleet.sql("SELECT verdict FROM finding")} == {"warn"}
    train.share = 0.0
    train.run(5, judge, passes=(0, 30))
    assert fleet.findings() == []


def test_swings_of_utilisation_alone_say_nothing(train: Training, fleet: "Fleet", judge: Judge) -> None:
    train.hook = False
    for _ in range(5):
        train.share = 0.9
        train.run(0.75, judge)
        train.share = 0.0
        train.run(0.25, judge)
    assert train.now()[:2] == ("ok", "no_sign")
    assert fleet.sql("SELECT rule FROM finding") == []


def test_plain_jobs_with_one_name_are_two(fleet: "Fleet", judge: Judge) -> None:
    first, second = (
        Training(fleet, [fleet.add(name, gpus=2)], "train.service", "plain") for name in ("a", "b")
    )
    judge.compile(fleet.at)
    first.share, first.io = 0.4, 0.5
    for _ in range(10):
        first.run(0.25)
        second.send()
    assert first.now()[:2] == ("crit", "storage")
    assert second.now()[:2] == ("ok", "fed")


def test_it_waits_for_the_probes(fleet: "Fleet") -> None:
    bare = Store.open(None)
    status = install(bare, [rule for rule in load_rules() if rule.name == RULE])
    bare.close()
    assert status[RULE].startswith("waits for probe")
    assert "job" in status[RULE]
    assert "loader" in status[RULE]


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_is_not_heard_of_is_over_only_if_somebody_looked(
    train: Training, fleet: "Fleet", judge: Judge, ended: bool
) -> None:
    train.share, train.io = 0.3, 0.5
    train.run(4, judge)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    fleet.at += timedelta(minutes=70)
    if ended:
        head: Row = {"ts": fleet.at, "received_at": fleet.at, "node": "gpu-001", "boot_id": "boot-1"}
        put(fleet.store, "agent", [{**head, "probe": "job", "ok": True, "rows": 0}])
    judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ([] if ended else ["firing"])
    if not ended:
        assert train.now()[:2] == ("unknown", "agent_silent")


SIMULATED = (
    ('node = "gpu-[001-002]"', 'gpu = "*"', 'cause = "storage"', ("", "job:41778", "crit", "storage")),
    ('node = "gpu-[003-004]"', 'gpu = "*"', 'share = 0.15\ncause = "cpu"',
     ("", "job:41779", "warn", "cpu_preparation")),
    ('node = "gpu-[005-006]"', 'gpu = "*"', 'cause = "remote"', ("", "job:41780", "crit", "remote_or_lock")),
    ('node = "gpu-[007-008]"', 'gpu = "*"', 'cause = "no_workers"', ("", "job:41781", "crit", "no_workers")),
    ('node = "gpu-[009-010]"', 'gpu = "*"', "share = 0.05", None),
    ('node = "gpu-[011-012]"', 'gpu = "*"', 'share = 0.4\nhook = "no"', None),
    # all ranks of one of the two hosts of the last job
    ('node = "gpu-014"', 'gpu = "*"', 'cause = "storage"', ("gpu-014", "node:", "crit", "storage")),
)  # fmt: skip


def test_a_simulated_fleet_through_its_probes(fleet: "Fleet", judge: Judge) -> None:
    loads = "".join(f'[[load]]\nnode = "gpu-[{n:03}-{n + 1:03}]"\n' for n in range(1, 15, 2))
    faults = "".join(
        f'[[fault]]\nkind = "data_starved"\nat = 30\n{node}\n{gpu}\n[fault.params]\n{params}\n'
        for node, gpu, params, _ in SIMULATED
    )
    scenario = parse(f"[fleet]\nnodes = 14\ngpus = 2\n{loads}{faults}".encode())
    t = [0.0]
    hosts = {name: SimulatedHost(scenario, name, 0, lambda: t[0]) for name in scenario.node_names()}
    for name in hosts:
        fleet.add(name, gpus=0)
    judge.compile(fleet.at)
    began = fleet.at
    for step in range(1, 20):
        t[0] = 15.0 * step
        fleet.at = began + timedelta(seconds=t[0])
        for probe in ("gpu", "host", "loader", *(("job",) if step % 2 else ())):
            rows = [row for name, host in hosts.items() for row in _sweep(probe, host, fleet.at, name)]
            put(fleet.store, probe, rows)
        if fleet.at.second == 30:
            judge.run_pass(fleet.at)
    found = sorted(found for *_, found in SIMULATED if found)
    assert fleet.findings() == [(*one[:2], "firing", *one[2:]) for one in found]


def _sweep(probe: str, host: SimulatedHost, at: datetime, node: str) -> list["Row"]:
    sweep = run_probe(probe, PROBES[probe], host, pytest.fail)
    assert not sweep.error
    names = [metric.name for metric in PROBES[probe].METRICS]
    head: dict[str, Cell] = {"ts": at, "received_at": at, "node": node, "boot_id": host.boot_id}
    return [{**head, **dict(zip(names, row, strict=True))} for row in sweep.rows]
