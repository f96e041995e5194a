"""Rule disk_slow: requests that take long although little is moved."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "disk_slow"
KB = 1000


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


class Disk:
    """A disk: operations per second of each direction, their size, how long each takes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.iops, self.size, self.await_s = 20.0, 64 * KB, 0.001
        self.busy = 0.05
        self.more: dict[str, object] = {}
        self.ops = self.bytes = 0
        self.took_s = self.busy_s = 0.0

    def row(self) -> dict[str, object]:
        ops = int(30 * self.iops)
        self.ops += ops
        self.bytes += ops * self.size
        self.took_s += ops * self.await_s
        self.busy_s += 30 * self.busy
        return {
            "disk": self.name, "read_ops_total": self.ops, "write_ops_total": self.ops, "state": "live",
            "read_bytes_total": self.bytes, "write_bytes_total": self.bytes, "read_s_total": self.took_s,
            "write_s_total": self.took_s, "busy_s_total": self.busy_s, "in_flight": 0,
            "rotational": False, **self.more,
        }  # fmt: skip


class Disks:
    def __init__(self, fleet: "Fleet", store: Store) -> None:
        self.disks: dict[str, Disk] = {}
        self.node = fleet.add("gpu-001", gpus=0)
        self._store = store
        fleet.each_tick = self._tick

    def add(self, name: str, **more: object) -> Disk:
        disk = self.disks[name] = Disk(name)
        disk.more |= more
        return disk

    def _tick(self, fleet: "Fleet") -> None:
        if fleet.at.second % 30 or not self.node.up:
            return
        for disk in self.disks.values():
            row = {"ts": fleet.at, "received_at": fleet.at, "node": "gpu-001", "boot_id": self.node.boot_id}
            row |= disk.row()
            marks = ", ".join("?" for _ in row)
            with self._store.transaction() as write:
                write.execute(
                    f"INSERT INTO live.disk ({', '.join(row)}) VALUES ({marks})", list(row.values())
                )


@pytest.fixture
def disks(fleet: "Fleet", store: Store) -> Disks:
    return Disks(fleet, store)


@pytest.mark.drill("disk_slow", "fires")
def test_a_slow_disk_fires_and_clears(fleet: "Fleet", judge: Judge, disks: Disks) -> None:
    slow = disks.add("nvme1n1")
    disks.add("nvme0n1")
    fleet.run(60, judge, every=30)
    slow.await_s = 0.4
    fleet.run(60, judge, every=30)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    fleet.run(30, judge, every=30)
    assert fleet.findings() == [("gpu-001", "disk:nvme1n1", "firing", "warn", "slow")]
    reason = fleet.find(RULE, "disk:nvme1n1")[3]
    assert reason.startswith(
        "400 ms per request at 40 requests and 2.6 MB per second, at most 100 expected; "
    )
    slow.await_s = 0.001
    fleet.run(300, judge, every=30)
    assert fleet.findings() == []


@pytest.mark.drill("disk_slow", "not_judged")
def test_verdicts(fleet: "Fleet", judge: Judge, disks: Disks) -> None:
    loaded = disks.add("nvme0n1")
    loaded.iops, loaded.size, loaded.await_s = 300, 1000 * KB, 0.5
    many = disks.add("nvme1n1")
    many.iops, many.size, many.await_s = 5000, 4 * KB, 0.2
    disks.add("sda", rotational=True).await_s = 0.2
    disks.add("sdb", rotational=True).await_s = 0.5
    disks.add("sdc", rotational=None).await_s = 0.2  # not known: judged as the slower kind
    idle = disks.add("sdd")
    idle.iops, idle.await_s = 0.4, 3.0
    nearly = disks.add("sde")
    nearly.await_s = 0.099
    stalled = disks.add("sdf", in_flight=7)
    stalled.iops, stalled.busy = 0, 1.0
    disks.add("sdg", state="offline").iops = 0
    disks.add("sdh", read_ops_total=None)
    fleet.run(60)
    found = {name: fleet.find(RULE, f"disk:{name}")[:2] for name in disks.disks}
    assert found == {
        "nvme0n1": ("ok", "loaded"),
        "nvme1n1": ("ok", "loaded"),
        "sda": ("ok", "quick"),
        "sdb": ("warn", "slow"),
        "sdc": ("ok", "quick"),
        "sdd": ("n/a", "idle"),
        "sde": ("ok", "quick"),
        "sdf": ("crit", "stalled"),
        "sdg": ("crit", "dead"),
        "sdh": ("unknown", "unreadable"),
    }


@pytest.mark.drill("disk_slow", "near_miss")
def test_resets_and_reboots_are_no_fault(fleet: "Fleet", judge: Judge, disks: Disks) -> None:
    disk = disks.add("nvme0n1")
    fleet.run(30)
    assert fleet.find(RULE, "disk:nvme0n1")[:2] == ("n/a", "one_sample")
    fleet.run(60)
    disk.ops, disk.took_s = 0, 500.0  # another disk in its place
    fleet.run(30)
    assert fleet.find(RULE, "disk:nvme0n1")[:2] == ("n/a", "counters_reset")
    disks.node.boot_id, disk.took_s = "boot-2", 9000.0
    fleet.run(30)
    assert fleet.find(RULE, "disk:nvme0n1")[:2] == ("n/a", "counters_reset")
    fleet.run(30)
    assert fleet.find(RULE, "disk:nvme0n1")[:2] == ("ok", "quick")


def test_silence_clears_nothing_and_a_removed_disk_is_gone(
    fleet: "Fleet", judge: Judge, disks: Disks
) -> None:
    disks.add("sda", state="offline")
    disks.add("sdb")
    fleet.run(60, judge, every=30)
    assert fleet.findings() == [("gpu-001", "disk:sda", "firing", "crit", "dead")]
    disks.node.up = False
    fleet.run(360, judge, every=120)
    assert fleet.find(RULE, "disk:sda")[:2] == ("unknown", "no_samples")
    disks.node.up = True
    del disks.disks["sda"]
    fleet.run(30, judge, every=30)
    assert fleet.findings() == []


def test_what_the_disk_says_of_itself_is_context_and_changes_no_verdict(
    fleet: "Fleet", judge: Judge, disks: Disks
) -> None:
    disks.add("nvme0n1", smart_media_errors_total=3, smart_warning_bits=1, smart_spare_pct=4.0)
    disks.add("nvme1n1", smart_media_errors_total=3, smart_warning_bits=None).await_s = 0.4
    disks.add("nvme2n1", smart_media_errors_total=0, smart_warning_bits=0).await_s = 0.4
    disks.add("nvme3n1", smart_media_errors_total=2**63 - 1, smart_warning_bits=127).await_s = 0.4
    fleet.run(60)
    assert fleet.find(RULE, "disk:nvme0n1")[:2] == ("ok", "quick")
    endings = [fleet.find(RULE, f"disk:nvme{n}n1")[3].partition("; its own log has ")[2] for n in (1, 2, 3)]
    assert endings == ["3 media errors and warnings 0", "", f"{2**63 - 1} media errors and warnings 127"]


def test_a_state_that_is_not_read_does_not_raise_the_dead(fleet: "Fleet", judge: Judge, disks: Disks) -> None:
    disk = disks.add("sda", state="offline")
    fleet.run(60, judge, every=20)
    before = fleet.findings()
    assert [row[4] for row in before] == ["dead"]
    disk.more["state"] = None
    fleet.run(360, judge, every=20)
    assert fleet.find(RULE, "disk:sda")[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
