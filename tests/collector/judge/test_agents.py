"""Rules agent_dropping, agent_restarted and node_rebooted: what is lost, and who comes back by itself."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

DROPPING, RESTARTED, REBOOTED = "agent_dropping", "agent_restarted", "node_rebooted"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (DROPPING, RESTARTED, REBOOTED)


def start(fleet: "Fleet", stopped: str = "unclean", name: str = "gpu-001") -> None:
    fleet.event(fleet.nodes[name], "agent_start", stopped, "node:", stopped=stopped)


def reboot(fleet: "Fleet", stopped: str, name: str = "gpu-001") -> None:
    node = fleet.nodes[name]
    before, node.boot_id = node.boot_id, f"boot-{int(node.boot_id[5:]) + 1}"
    node.booted_at = fleet.at
    fleet.event(node, "reboot", "", "node:", before=before, now=node.boot_id)
    start(fleet, stopped, name)


@pytest.mark.parametrize(
    ("kind", "count", "batches"),
    [
        ("spool_drop", 1, 20),
        ("spool_drop", 7, None),
        ("spool_corrupt", 1, None),
        ("batch_parked", 1, None),
        ("batch_conflict", 1, None),
        ("quarantined", 360, None),
    ],
)
@pytest.mark.drill("agent_dropping", "fires")
def test_lost_data_is_news_for_an_hour(
    fleet: "Fleet", judge: Judge, kind: str, count: int, batches: int | None
) -> None:
    node = fleet.add("gpu-001", gpus=1)
    fleet.add("gpu-002", gpus=1)
    fleet.event(node, kind, "", "node:", count=count, message="so many were dropped", batches=batches)
    fleet.run(30, judge, every=20)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "warn", kind)]
    assert "so many were dropped" in fleet.find(DROPPING, node="gpu-001")[3]
    fleet.at += timedelta(hours=1)
    fleet.run(40, judge, every=20)
    assert fleet.findings() == []


@pytest.mark.drill("agent_dropping", "near_miss", "not_judged")
@pytest.mark.drill("agent_restarted", "not_judged")
@pytest.mark.drill("node_rebooted", "not_judged")
def test_an_odd_cell_and_other_nodes_are_no_loss(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    node = fleet.add("gpu-002", gpus=1)
    node.up = False
    fleet.event(fleet.nodes["gpu-001"], "quarantined", "implausible", "node:", count=3)
    fleet.run(10)
    assert fleet.find(DROPPING, node="gpu-001")[:2] == ("ok", "none")
    for rule in (DROPPING, RESTARTED, REBOOTED):
        assert fleet.find(rule, node="gpu-002")[:2] == ("unknown", "agent_silent")
    fleet.event(node, "spool_drop", "", "node:", batches=4)
    assert fleet.find(DROPPING, node="gpu-002")[:2] == ("warn", "spool_drop"), "said before it fell silent"


@pytest.mark.parametrize(("kind", "code"), [("agent_start", "agent"), ("sampler_restarted", "sampler")])
@pytest.mark.drill("agent_restarted", "fires")
def test_a_loop_of_restarts(fleet: "Fleet", judge: Judge, kind: str, code: str) -> None:
    node = fleet.add("gpu-001", gpus=1)
    for seen in range(3):
        fleet.event(node, kind, "unclean", "node:", message="it ended with signal 11")
        fleet.run(60, judge, every=20)
        assert len(fleet.findings(RESTARTED)) == (seen == 2)
    assert fleet.find(RESTARTED)[:2] == ("warn", code)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "warn", code)]
    fleet.at += timedelta(hours=1)
    fleet.run(40, judge, every=20)
    assert fleet.findings() == []


@pytest.mark.drill("agent_restarted", "near_miss")
def test_orderly_stops_boots_and_a_few_restarts_are_no_loop(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    for _ in range(5):
        start(fleet, "clean")
        fleet.run(10)
    assert fleet.find(RESTARTED)[:2] == ("ok", "none")
    for _ in range(3):
        reboot(fleet, "unclean")
        fleet.run(10)
    assert fleet.find(RESTARTED)[:2] == ("ok", "none"), "the host restarted, not the agent"
    start(fleet)
    fleet.run(10)
    assert fleet.find(RESTARTED)[:2] == ("ok", "few")


@pytest.mark.drill("node_rebooted", "fires")
def test_a_host_that_comes_back_by_itself(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=1)
    fleet.run(20, judge, every=20)
    fleet.event(node, "lockup", "hard", "node:", message="watchdog: BUG: hard LOCKUP on cpu 3")
    fleet.at += timedelta(minutes=3)
    reboot(fleet, "unclean")
    fleet.run(30, judge, every=20)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "warn", "unexpected")]
    assert "hard LOCKUP" in fleet.find(REBOOTED)[3]
    fleet.at += timedelta(hours=4)
    fleet.run(40, judge, every=20)
    assert fleet.find(REBOOTED)[:2] == ("ok", "long_ago")
    assert fleet.findings() == []


def test_three_times_in_a_week_is_critical(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    for _ in range(3):
        reboot(fleet, "unclean")
        fleet.run(20, judge, every=20)
        fleet.at += timedelta(hours=30)
    fleet.at -= timedelta(hours=30)
    assert fleet.find(REBOOTED)[:2] == ("crit", "repeated")
    assert [row[3] for row in fleet.findings(REBOOTED)] == ["crit"]


@pytest.mark.drill("node_rebooted", "near_miss")
def test_a_planned_reboot_is_none(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    reboot(fleet, "clean")
    fleet.run(30, judge, every=20)
    assert fleet.find(REBOOTED)[:2] == ("ok", "planned")
    assert fleet.findings() == []


def test_a_boot_of_which_the_agent_does_not_tell(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=1)
    fleet.run(10)
    assert fleet.find(REBOOTED)[:2] == ("ok", "none")
    fleet.event(node, "reboot", "", "node:", before="boot-0", now="boot-1")
    fleet.run(10)
    assert fleet.find(REBOOTED)[:2] == ("unknown", "not_told")
