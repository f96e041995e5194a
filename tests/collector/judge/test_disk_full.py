"""Rule disk_full: room for everybody and inodes, by percentage and by what is left."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "disk_full"
GB = 10**9
TB = 1000 * GB


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


class Mounts:
    """Mounts of every node that is up, once per tick of 30 s."""

    def __init__(self, fleet: "Fleet", store: Store) -> None:
        self.here: dict[tuple[str, str], dict[str, object]] = {}
        self._store = store
        fleet.each_tick = self._tick

    def add(
        self, node: str, path: str, size: int | None, avail: int | None, **more: object
    ) -> dict[str, object]:
        row: dict[str, object] = {
            "node": node, "mount": path, "fstype": "xfs", "source": "/dev/nvme1n1", "network": False,
            "read_only": False, "size_bytes": size, "avail_bytes": avail, "free_bytes": avail,
            "inodes": 1000, "inodes_free": 900, "canary_state": "ok", **more,
        }  # fmt: skip
        self.here[node, path] = row
        return row

    def _tick(self, fleet: "Fleet") -> None:
        if fleet.at.second % 30:
            return
        head = {"ts": fleet.at, "received_at": fleet.at, "boot_id": "boot-1"}
        rows = [head | row for row in self.here.values() if fleet.nodes[str(row["node"])].up]
        with self._store.transaction() as write:
            for row in rows:
                marks = ", ".join("?" for _ in row)
                write.execute(
                    f"INSERT INTO live.mount ({', '.join(row)}) VALUES ({marks})", list(row.values())
                )


@pytest.fixture
def mounts(fleet: "Fleet", store: Store) -> Mounts:
    fleet.add("gpu-001", gpus=0)
    return Mounts(fleet, store)


@pytest.mark.drill("disk_full", "fires")
def test_a_full_disk_fires_and_clears(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    scratch = mounts.add("gpu-001", "/scratch", 7 * TB, 5 * GB)
    mounts.add("gpu-001", "/", 900 * GB, 500 * GB)
    fleet.run(90, judge, every=30)
    assert fleet.findings() == [("gpu-001", "mount:/scratch", "firing", "crit", "full")]
    assert fleet.find(RULE, "mount:/scratch")[3] == "99.9 % in use, 5.0 GB left"
    scratch |= {"avail_bytes": 3 * TB, "free_bytes": 3 * TB}
    fleet.run(150, judge, every=30)
    assert fleet.findings() == []


VERDICTS: tuple[tuple[int | None, int | None, dict[str, object], str, str], ...] = (
    (30 * TB, 2 * TB, {}, "ok", "room"),  # 93 %, and two terabytes left
    (30 * TB, 100 * GB, {}, "warn", "filling"),
    (1 * TB, 89 * GB, {}, "warn", "filling"),
    (1 * TB, 101 * GB, {}, "ok", "room"),
    (100 * GB, 2 * GB, {}, "crit", "full"),
    (4 * GB, GB // 3, {}, "crit", "full"),  # 92 %, but below the floor
    (GB, GB // 14, {}, "warn", "filling"),  # 93 % of a /boot, which the floor is not for
    (GB, GB // 50, {}, "crit", "full"),  # and where the next kernel does not fit
    (GB // 2, GB // 4, {}, "ok", "room"),  # a small one is always below the floor
    (100 * GB, 0, {"free_bytes": 5 * GB}, "crit", "full"),  # the rest is root's
    (1 * TB, 900 * GB, {"inodes_free": 20}, "crit", "no_inodes"),
    (1 * TB, 900 * GB, {"inodes_free": 95}, "warn", "few_inodes"),
    (1 * TB, 900 * GB, {"inodes": None, "inodes_free": None}, "ok", "room"),
    (1 * TB, 0, {"read_only": True}, "n/a", "read_only"),
    (None, None, {"inodes": None, "canary_state": "hung"}, "unknown", "no_answer"),
    (None, None, {"inodes": None, "canary_state": None}, "unknown", "not_known"),
)


@pytest.mark.drill("disk_full", "near_miss", "not_judged")
def test_verdicts(fleet: "Fleet", mounts: Mounts, judge: Judge) -> None:
    for at, (size, avail, more, _, _) in enumerate(VERDICTS):
        mounts.add("gpu-001", f"/{at}", size, avail, **more)
    fleet.run(30)
    found = [fleet.find(RULE, f"mount:/{at}")[:2] for at in range(len(VERDICTS))]
    assert found == [(verdict, code) for _, _, _, verdict, code in VERDICTS]


def test_shared_memory_fires_when_it_is_full_and_is_each_hosts_own(
    fleet: "Fleet", judge: Judge, mounts: Mounts
) -> None:
    fleet.add("gpu-002", gpus=0)
    fleet.add("gpu-003", gpus=0)
    tmpfs: dict[str, object] = {"fstype": "tmpfs", "source": "tmpfs"}
    mounts.add("gpu-001", "/dev/shm", 540 * GB, 10 * GB, **tmpfs)
    mounts.add("gpu-002", "/dev/shm", 540 * GB, 60 * GB, **tmpfs)  # 89 %
    mounts.add("gpu-003", "/dev/shm", None, None, **tmpfs, inodes=None, canary_state="failed")
    fleet.run(90, judge, every=30)
    assert fleet.findings() == [("gpu-001", "mount:/dev/shm", "firing", "crit", "full")]
    assert fleet.find(RULE, "mount:/dev/shm", "gpu-002")[:2] == ("ok", "room")
    assert fleet.find(RULE, "mount:/dev/shm", "gpu-003")[:2] == ("unknown", "no_answer")


def test_a_share_is_judged_once_and_warns(fleet: "Fleet", judge: Judge, mounts: Mounts) -> None:
    for node in ("gpu-002", "gpu-003"):
        fleet.add(node, gpus=0)
    for node in ("gpu-001", "gpu-002", "gpu-003"):
        mounts.add(node, "/data", 1000 * TB, GB, network=True, source="filer:/data")
    fleet.run(90, judge, every=30)
    assert fleet.findings() == [("gpu-001", "mount:/data", "firing", "warn", "full")]
    assert fleet.find(RULE, "mount:/data", "gpu-002")[:2] == ("n/a", "judged_elsewhere")


def test_silence_and_a_hang_clear_nothing_but_an_unmount_does(
    fleet: "Fleet", judge: Judge, mounts: Mounts
) -> None:
    full = mounts.add("gpu-001", "/scratch", 100 * GB, GB)
    mounts.add("gpu-001", "/", 900 * GB, 500 * GB)
    fleet.run(60, judge, every=30)
    full |= {"size_bytes": None, "avail_bytes": None, "inodes": None, "canary_state": "hung"}
    fleet.run(240, judge, every=60)
    assert fleet.find(RULE, "mount:/scratch")[:2] == ("unknown", "no_answer")
    assert [row[2] for row in fleet.findings()] == ["firing"]
    fleet.nodes["gpu-001"].up = False
    fleet.run(420, judge, every=140)
    assert fleet.find(RULE, "mount:/scratch")[:2] == ("unknown", "no_samples")
    assert [row[2] for row in fleet.findings()] == ["firing"]
    fleet.nodes["gpu-001"].up = True
    del mounts.here["gpu-001", "/scratch"]
    fleet.run(30, judge, every=30)
    assert fleet.findings() == []


@pytest.mark.parametrize(
    ("fstype", "source", "judged"),
    [
        ("fuse.mergerfs", "disk1:disk2", ["gpu-001", "gpu-002"]),
        ("virtiofs", "scratch", ["gpu-001", "gpu-002"]),
        ("9p", "hostshare", ["gpu-001", "gpu-002"]),
        ("lustre", "10.0.0.1@o2ib:/fs", ["gpu-001"]),
    ],
)
def test_what_only_bears_the_same_name_on_two_hosts_is_judged_on_both(
    fleet: "Fleet", judge: Judge, mounts: Mounts, fstype: str, source: str, judged: list[str]
) -> None:
    fleet.add("gpu-002", gpus=0)
    for node in ("gpu-001", "gpu-002"):
        mounts.add(node, "/scratch", TB, GB, fstype=fstype, source=source, network=True)
    fleet.run(90, judge, every=30)
    assert [row[0] for row in fleet.findings()] == judged


@pytest.mark.parametrize("gone", ["inodes_free", "avail_bytes"])
def test_what_is_not_read_any_more_clears_nothing(
    fleet: "Fleet", judge: Judge, mounts: Mounts, gone: str
) -> None:
    row = mounts.add("gpu-001", "/scratch", 7 * TB, 5 * TB)
    row[gone] = 0
    fleet.run(90, judge, every=30)
    before = fleet.findings()
    assert [one[2] for one in before] == ["firing"]
    row[gone] = None
    fleet.run(540, judge, every=30)
    assert fleet.find(RULE, "mount:/scratch")[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
