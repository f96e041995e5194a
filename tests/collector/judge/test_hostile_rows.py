"""What one agent says may spoil its own verdicts, never a pass: nobody else would be judged."""

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet


@pytest.fixture
def rules() -> tuple[str, ...]:
    return ("mount_hung", "nvlink_down", "data_starved")


def insert(fleet: "Fleet", store: Store, table: str, node: str, **said: object) -> None:
    row = {"ts": fleet.at, "received_at": fleet.at, "boot_id": "boot-1", "node": node, **said}
    marks = ", ".join("?" for _ in row)
    with store.transaction() as write:
        write.execute(f"INSERT INTO live.{table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def hung(fleet: "Fleet", store: Store, node: str, **said: object) -> None:
    mount = {
        "mount": "/data", "fstype": "nfs4", "source": "filer:/data", "read_only": False, "was_writable": True,
        "canary_state": "hung", "canary_code": "", "hung_s": 90.0,
    }  # fmt: skip
    insert(fleet, store, "mount", node, **mount | said)


def test_a_verdict_without_words_still_counts_and_stops_no_other(
    fleet: "Fleet", judge: Judge, store: Store
) -> None:
    for node in ("gpu-001", "gpu-002", "gpu-003"):
        fleet.add(node, gpus=0)
    hung(fleet, store, "gpu-001", hung_s=None, source=None)
    hung(fleet, store, "gpu-002")
    hung(fleet, store, "gpu-003", mount=None)
    fleet.run(5, judge)
    assert fleet.findings() == [
        ("gpu-001", "mount:/data", "firing", "warn", "hung"),
        ("gpu-002", "mount:/data", "firing", "crit", "hung"),
    ]


def links_down(fleet: "Fleet", store: Store, **said: object) -> str:
    """A card of gpu-001 with 16 of 18 links; the rule gives a node time to train after its boot."""
    card = fleet.add("gpu-001", gpus=1).cards[0]
    with store.transaction() as write:
        write.execute("INSERT INTO live.probe (node, probe, interval_s) VALUES ('gpu-001', 'nvlink', 30)")
        write.execute(
            "UPDATE live.inventory SET attributes = ? WHERE entity = ?",
            [json.dumps({"nvlinks_active": "18"}), card.entity],
        )
    row = {"gpu_uuid": card.uuid, "state": "ok", "links": 18, "links_active": 16, "links_up": 2**16 - 1}
    insert(fleet, store, "nvlink", "gpu-001", **row | said)
    return card.entity


@pytest.mark.parametrize("uptime_s", [1.7e308, 1e15, 9e11, -1e15, None])
def test_an_impossible_uptime_stops_no_pass(
    fleet: "Fleet", judge: Judge, store: Store, uptime_s: float | None
) -> None:
    entity = links_down(fleet, store)
    fleet.run(5)
    with store.transaction() as write:
        write.execute("UPDATE live.host SET uptime_s = ?", [uptime_s])
    judge.run_pass(fleet.at)
    assert fleet.findings("nvlink_down") == [("gpu-001", entity, "pending", "warn", "some_down")]


def test_a_card_with_billions_of_links_stops_no_rule(fleet: "Fleet", judge: Judge, store: Store) -> None:
    entity = links_down(fleet, store, links=2**62, links_up=2**63 - 1)
    fleet.run(5, judge)
    assert fleet.findings("nvlink_down") == [("gpu-001", entity, "pending", "warn", "some_down")]


def test_counts_of_nfs_near_the_end_of_their_type_stop_no_rule(
    fleet: "Fleet", judge: Judge, store: Store
) -> None:
    fleet.add("gpu-001", gpus=1)
    fleet.at = fleet.at.replace(second=30)
    for _ in range(2):
        fleet.at += timedelta(seconds=15)
        hung(
            fleet,
            store,
            "gpu-001",
            **dict.fromkeys(
                ("nfs_read_ops_total", "nfs_getattr_ops_total", "nfs_lookup_ops_total"), 2**63 - 1
            ),
        )
        insert(
            fleet, store, "job", "gpu-001", job_id="7", job_kind="slurm", pid=1, pid_start=1, gpu_uuid="GPU-1"
        )
    fleet.at += timedelta(seconds=20)
    fleet.run(5, judge)
    assert [row[0] for row in fleet.sql("SELECT status FROM rule WHERE rule = 'data_starved'")] == ["ok"]
