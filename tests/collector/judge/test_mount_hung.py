"""Rule mount_hung: mounts that do not answer, answer with an error, or became read-only."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "mount_hung"
DATA = "mount:/data"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


class Mounts:
    """/ and /data of one node, a row each every 30 s; `data` says how /data differs from a well one."""

    def __init__(self, fleet: "Fleet", store: Store) -> None:
        self.data: dict[str, object] = {}
        self.node = fleet.add("gpu-001", gpus=0)
        self.hung_at: datetime | None = None
        self._recovered_s = 0.0
        self._store = store
        fleet.each_tick = self._tick

    def recover(self, at: datetime) -> None:
        assert self.hung_at is not None
        self._recovered_s = (at - self.hung_at).total_seconds()
        self.hung_at = None

    def _tick(self, fleet: "Fleet") -> None:
        if fleet.at.second % 30 or not self.node.up:
            return
        hung: dict[str, object] = {"hung_s": self._recovered_s}
        self._recovered_s = 0.0
        if self.hung_at is not None:
            hung = {"canary_state": "hung", "hung_s": (fleet.at - self.hung_at).total_seconds()}
        self._put(fleet, "/", {"fstype": "ext4", "source": "/dev/nvme0n1p2", "network": False})
        self._put(fleet, "/data", hung | self.data)

    def _put(self, fleet: "Fleet", path: str, more: dict[str, object]) -> None:
        row: dict[str, object] = {
            "ts": fleet.at, "received_at": fleet.at, "boot_id": self.node.boot_id, "node": "gpu-001",
            "mount": path,
            "fstype": "nfs4", "source": "filer-01:/export/data", "network": True, "nfs_address": "10.0.0.9",
            "read_only": False, "was_writable": True, "canary_state": "ok", "canary_code": "", "hung_s": 0.0,
            **more,
        }  # fmt: skip
        marks = ", ".join("?" for _ in row)
        with self._store.transaction() as write:
            write.execute(f"INSERT INTO live.mount ({', '.join(row)}) VALUES ({marks})", list(row.values()))


@pytest.fixture
def mounts(fleet: "Fleet", store: Store) -> Mounts:
    return Mounts(fleet, store)


@pytest.mark.drill("mount_hung", "fires")
def test_T08_only_the_hung_mount_fires_and_clears_with_its_duration(
    fleet: "Fleet", judge: Judge, mounts: Mounts
) -> None:
    fleet.run(30, judge, every=30)
    mounts.hung_at = fleet.at + timedelta(seconds=1)
    fleet.run(30, judge, every=30)
    assert fleet.findings() == [("gpu-001", DATA, "firing", "warn", "hung")]
    fleet.run(60, judge, every=30)
    assert fleet.findings() == [("gpu-001", DATA, "firing", "crit", "hung")]
    assert fleet.find(RULE, DATA)[3].startswith(
        "mount not responding: no answer for 89 s (nfs4, filer-01:/export/data)"
    )
    mounts.recover(fleet.at + timedelta(seconds=11))
    fleet.run(30, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("ok", "answers")
    assert fleet.find(RULE, DATA)[3] == "answers again after 100 s"
    assert fleet.findings() == []
    assert [row[3:5] for row in fleet.incidents()] == [(DATA, "resolved")]


@pytest.mark.parametrize("said", ["filer-01", "10.0.0.9"])
def test_the_kernel_log_is_evidence_until_it_or_an_answer_refutes_it(
    fleet: "Fleet", judge: Judge, mounts: Mounts, said: str
) -> None:
    mounts.data |= {"canary_state": None, "hung_s": None}  # below an automounter: not asked
    fleet.run(30, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("n/a", "not_asked")
    fleet.event(mounts.node, "nfs", "not_responding", "node:", server="another")
    assert fleet.find(RULE, DATA)[1] == "not_asked"
    fleet.event(mounts.node, "nfs", "not_responding", "node:", server=said)
    fleet.run(90, judge, every=30)
    assert fleet.findings() == [("gpu-001", DATA, "firing", "crit", "not_responding")]
    if said == "filer-01":
        fleet.event(mounts.node, "nfs", "ok", "node:", server=said, duration_s=88.0)
        fleet.run(30, judge, every=30)
        assert fleet.find(RULE, DATA)[3] == "the server answers again after 88 s"
    else:  # the line with OK was lost, but the mount answers
        mounts.data.clear()
        fleet.run(30, judge, every=30)
    assert fleet.findings() == []


def test_both_say_so(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    mounts.hung_at = fleet.at
    fleet.event(mounts.node, "nfs", "not_responding", "node:", server="filer-01")
    fleet.run(60, judge, every=30)
    assert fleet.find(RULE, DATA)[3].endswith("; the kernel log says so since 12:00:00")
    mounts.node.boot_id = "boot-2"  # a reboot: what the kernel said before is history
    mounts.recover(fleet.at)
    fleet.run(30, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("ok", "answers")
    assert fleet.findings() == []


def test_errors(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    failed: dict[str, object] = {"canary_state": "failed", "canary_code": "ESTALE"}
    mounts.data |= failed
    fleet.run(30, judge, every=30)
    assert [row[2] for row in fleet.findings()] == ["pending"], "one error may be of the moment"
    fleet.run(30, judge, every=30)
    assert fleet.findings() == [("gpu-001", DATA, "firing", "crit", "failed")]
    assert "ESTALE" in fleet.find(RULE, DATA)[3]
    for code, verdict in (("EACCES", ("n/a", "no_permission")), ("ENOENT", ("unknown", "not_found"))):
        mounts.data |= failed | {"canary_code": code}
        fleet.run(30)
        assert fleet.find(RULE, DATA)[:2] == verdict
    mounts.data |= {"canary_state": "pending", "canary_code": ""}
    fleet.run(30)
    assert fleet.find(RULE, DATA)[1] == "not_found", "asked just now: what was known before holds"


@pytest.mark.drill("mount_hung", "near_miss")
def test_what_was_mounted_read_only_is_well(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    mounts.data |= {"read_only": True, "was_writable": False}
    fleet.run(90, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("ok", "answers")
    assert fleet.findings() == []


def test_read_only_is_a_fault_only_of_what_was_writable(
    fleet: "Fleet", judge: Judge, mounts: Mounts, store: Store
) -> None:
    mounts.data |= {"read_only": True, "was_writable": False}
    fleet.run(60, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("ok", "answers"), "mounted so"
    mounts.data["was_writable"] = True
    fleet.run(30, judge, every=30)
    assert fleet.findings() == [("gpu-001", DATA, "firing", "crit", "read_only")]
    mounts.data |= {"read_only": False}
    fleet.run(30, judge, every=30)
    assert fleet.findings() == []
    mounts.data |= {"read_only": True, "was_writable": False}  # an agent that started after it happened
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.inventory (node, entity, kind, attributes, valid_from) "
            "VALUES (?, ?, 'mount', ?, ?)",
            ["gpu-001", DATA, '{"writable": "1"}', fleet.at - timedelta(minutes=1)],
        )
    fleet.run(360)
    assert fleet.find(RULE, DATA)[1] == "read_only"


def test_another_file_system_in_the_same_place_has_its_own_past(
    fleet: "Fleet", judge: Judge, mounts: Mounts, store: Store
) -> None:
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.inventory (node, entity, kind, attributes, valid_from) "
            "VALUES (?, ?, 'mount', ?, ?)",
            [
                "gpu-001",
                DATA,
                '{"writable": "1", "source": "filer-01:/scratch"}',
                fleet.at - timedelta(days=1),
            ],
        )
    mounts.data |= {"read_only": False, "was_writable": True}
    fleet.run(60, judge, every=30)
    mounts.data |= {"read_only": True, "was_writable": False, "source": "filer-01:/images"}
    fleet.run(60, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("ok", "answers")
    mounts.data["source"] = "filer-01:/scratch"
    fleet.run(60, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("crit", "read_only")


@pytest.mark.drill("mount_hung", "not_judged")
def test_silence_is_unknown_and_clears_nothing(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    mounts.hung_at = fleet.at
    fleet.run(60, judge, every=30)
    mounts.node.up = False
    fleet.run(420, judge, every=140)
    assert fleet.find(RULE, DATA)[:2] == ("unknown", "no_samples")
    assert [row[2] for row in fleet.findings()] == ["firing"]


def test_a_soft_mount_that_nobody_asks_is_not_down_for_ever(
    fleet: "Fleet", judge: Judge, mounts: Mounts
) -> None:
    # of a request that was given up the kernel never says that the server answers again
    mounts.data |= {"canary_state": None, "canary_code": None, "hung_s": None}
    fleet.event(mounts.node, "nfs", "timed_out", "node:", server="filer-01")
    fleet.run(30, judge, every=30)
    assert [row[2:] for row in fleet.findings()] == [("firing", "warn", "not_responding")]
    fleet.run(330, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("n/a", "not_asked")


@pytest.mark.parametrize("gone", ["read_only", "canary_state"])
def test_what_is_not_read_any_more_clears_nothing(
    fleet: "Fleet", judge: Judge, mounts: Mounts, gone: str
) -> None:
    fleet.event(mounts.node, "nfs", "ok", "node:", server="filer-01")  # an old line of the kernel log
    mounts.data[gone] = {"read_only": True, "canary_state": "hung"}[gone]
    fleet.run(90, judge, every=30)
    before = fleet.findings()
    assert [row[1:3] for row in before] == [(DATA, "firing")]
    mounts.data[gone] = None
    fleet.run(420, judge, every=30)
    assert fleet.find(RULE, DATA)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
