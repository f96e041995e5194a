"""Rules about nodes: silence (received_at alone), clocks (T02), identities (T04)."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet


@pytest.fixture
def rules() -> tuple[str, ...]:
    return ("agent_silent", "clock_skew", "identity_conflict")


def states(fleet: "Fleet") -> dict[str, str]:
    rows = fleet.sql(f"SELECT node, state FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')")
    return {str(node): str(state) for node, state in rows}


@pytest.mark.drill("agent_silent", "fires")
def test_silent_after_90_s_on_the_collectors_clock(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.add("gpu-002")
    fleet.run(60, judge)
    node.up = False
    fleet.run(90, judge)
    assert fleet.findings() == []
    fleet.run(5, judge)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "warn", "silent")]
    assert states(fleet) == {"gpu-001": "unknown", "gpu-002": "ok"}
    [(cards,)] = fleet.sql(
        f"SELECT gpus_no_data FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes') WHERE node = 'gpu-001'"
    )
    assert cards == 8
    fleet.run(525, judge, every=25)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "crit", "silent")]
    [(heard, silent)] = fleet.sql(
        f"SELECT age_s, silent FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes') WHERE node = 'gpu-001'"
    )
    assert (heard, silent) == (620.0, True), "the age is known although its rows are far back"
    node.up = True
    fleet.run(5, judge)
    assert fleet.findings() == []
    assert [row[4] for row in fleet.incidents()] == ["resolved"]


def test_silent_again_right_after_it_came_back(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(5)
    node.up = False
    fleet.run(100, judge, every=20)
    node.up = True
    fleet.run(5, judge)
    node.up = False
    fleet.run(100, judge, every=20)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    assert fleet.incidents() == [(1, "agent_silent", "gpu-001", "node:", "open", "warn")], "the same incident"
    assert fleet.sql("SELECT reopened FROM incident") == [(1,)]


def test_expected_but_never_seen(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-007", hello=False)
    node.up = False
    fleet.run(5, judge)
    assert [row[:2] + row[4:] for row in fleet.findings()] == [("gpu-007", "node:", "never_seen")]
    assert states(fleet) == {"gpu-007": "unknown"}


@pytest.mark.drill("agent_silent", "not_judged")
@pytest.mark.drill("clock_skew", "not_judged")
@pytest.mark.drill("identity_conflict", "not_judged")
def test_node_that_nobody_expects_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("guest", expect=None).up = False
    fleet.run(300)
    fleet.run(5, judge)
    assert fleet.find("agent_silent", node="guest")[:2] == ("n/a", "no_expectation")
    assert fleet.findings() == []


@pytest.mark.drill("agent_silent", "near_miss")
def test_backfill_that_arrives_is_a_sign_of_life(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(10)
    node.up = False
    fleet.run(120)
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.ledger SELECT * REPLACE (? AS received_at, 'backfill' AS lane, 999 AS number) "
            "FROM live.ledger LIMIT 1",
            [fleet.at],
        )
    judge.run_pass(fleet.at)
    assert fleet.findings() == []


def test_a_third_of_the_fleet_at_once_is_the_collector(fleet: "Fleet", judge: Judge) -> None:
    nodes = [fleet.add(f"gpu-{n:03}", gpus=1) for n in range(12)]
    fleet.run(30, judge)
    for node in nodes[:5]:
        node.up = False
    fleet.run(100, judge, every=20)
    assert fleet.findings() == [("(collector)", "agent:", "firing", "crit", "many_silent")]
    assert len(fleet.incidents()) == 1
    assert [states(fleet)[node.name] for node in nodes[:5]] == ["unknown"] * 5
    fleet.run(60, judge, every=20)
    for node in nodes[2:5]:
        node.up = True
        fleet.run(20, judge)
    assert len(fleet.findings()) == 1, "the others may still be on their way back"
    nodes[1].up = True
    fleet.run(130, judge, every=10)
    assert fleet.findings() == [("gpu-000", "node:", "firing", "warn", "silent")], (
        "one that stayed away is one"
    )
    assert [row[1:5] for row in fleet.incidents()] == [
        ("agent_silent", "(collector)", "agent:", "resolved"),
        ("agent_silent", "gpu-000", "node:", "open"),
    ]


def test_four_nodes_are_no_reason_to_suspect_the_collector(fleet: "Fleet", judge: Judge) -> None:
    nodes = [fleet.add(f"gpu-{n:03}", gpus=1) for n in range(6)]
    fleet.run(30, judge)
    for node in nodes[:4]:
        node.up = False
    fleet.run(100, judge, every=20)
    assert len(fleet.findings()) == 4


def test_a_few_of_many_are_themselves(fleet: "Fleet", judge: Judge) -> None:
    nodes = [fleet.add(f"gpu-{n:03}", gpus=1) for n in range(10)]
    fleet.run(10, judge)
    for node in nodes[:3]:
        node.up = False
    fleet.run(100, judge, every=20)
    assert [row[0] for row in fleet.findings()] == ["gpu-000", "gpu-001", "gpu-002"]


def restarted(fleet: "Fleet", judge: Judge) -> Judge:
    return Judge(
        fleet.store, JudgeSettings(), rules=[rule for rule in load_rules() if rule.name in judge.policies]
    )


def test_nothing_fires_because_the_collector_was_away(fleet: "Fleet", judge: Judge) -> None:
    nodes = [fleet.add(f"gpu-{n:03}", gpus=1) for n in range(5)]
    fleet.run(30, judge)
    for node in nodes:
        node.up = False
    fleet.run(600)
    again = restarted(fleet, judge)
    fleet.run(15, again)
    assert again.warming_up
    assert fleet.findings() == []
    for node in nodes[:4]:
        node.up = True
    fleet.run(60, again, every=20)
    assert again.warming_up, "one of the known is still away"
    assert fleet.findings() == []
    fleet.run(60, again, every=20)
    assert not again.warming_up
    assert fleet.findings() == [("gpu-004", "node:", "firing", "crit", "silent")]


def test_warm_up_ends_when_all_are_back(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001")
    fleet.run(30, judge)
    again = restarted(fleet, judge)
    fleet.run(5, again)
    assert not again.warming_up


def test_nothing_clears_because_the_collector_was_away(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    node.offset_s = -30.0
    fleet.run(30, judge)
    assert [row[2] for row in fleet.findings("clock_skew")] == ["firing"]
    node.offset_s = 0.0
    fleet.run(20, judge)
    assert [row[2] for row in fleet.findings("clock_skew")] == ["recovering"]
    fleet.at += timedelta(hours=1)
    again = restarted(fleet, judge)
    fleet.run(20, again)
    assert [row[2] for row in fleet.findings("clock_skew")] == ["recovering"], (
        "an hour away is not a minute clean"
    )
    fleet.run(50, again)
    assert fleet.findings("clock_skew") == []


@pytest.mark.drill("clock_skew", "fires")
def test_T02_agent_clocks(store: Store, fleet: "Fleet", judge: Judge) -> None:
    """Behind, ahead and dead, in 1970: the ledger's offset says skew, received_at says alive."""
    behind, ahead, epoch = (fleet.add(name, gpus=1) for name in ("behind", "ahead_dead", "epoch"))
    behind.offset_s, ahead.offset_s, epoch.offset_s = 1200.0, -21600.0, 1.77e9
    fleet.run(30, judge)
    ahead.up = False
    fleet.run(600)
    fleet.run(15, judge)
    assert fleet.find("agent_silent", node="behind")[0] == "ok"
    assert fleet.find("agent_silent", node="epoch")[0] == "ok"
    assert fleet.find("agent_silent", node="ahead_dead")[:2] == ("crit", "silent")
    assert states(fleet)["ahead_dead"] == "unknown"
    assert {row[0]: row[4] for row in fleet.findings("clock_skew")} == {
        "behind": "behind",
        "ahead_dead": "ahead",
        "epoch": "behind",
    }
    assert "1200 s behind" in fleet.find("clock_skew", node="behind")[3]
    assert fleet.find("clock_skew", node="ahead_dead")[:2] == ("unknown", "agent_silent")


@pytest.mark.parametrize("offset", [0.0, 1.9, -1.9])
def test_within_two_seconds_is_in_step(fleet: "Fleet", judge: Judge, offset: float) -> None:
    fleet.add("gpu-001", gpus=1).offset_s = offset
    fleet.run(40, judge)
    assert fleet.find("clock_skew")[:2] == ("ok", "in_step")
    assert fleet.findings() == []


@pytest.mark.drill("clock_skew", "near_miss")
def test_one_odd_batch_is_no_skew(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=1)
    fleet.run(25, judge)
    node.offset_s = 5.0
    fleet.run(10, judge)
    node.offset_s = 0.0
    fleet.run(40, judge)
    assert fleet.incidents() == []


@pytest.mark.drill("identity_conflict", "fires")
def test_T04_two_machines_one_name(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-a01", gpus=1)
    second = fleet.add("gpu-a01~bbbb", gpus=1)
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.node SET claimed = 'gpu-a01', conflict = 'gpu-a01' WHERE node = 'gpu-a01~bbbb'"
        )
    fleet.run(40, judge)
    assert fleet.findings() == [("gpu-a01~bbbb", "node:", "firing", "warn", "same_name")]
    assert fleet.find("identity_conflict", node="gpu-a01")[:2] == ("ok", "single")
    rows = fleet.sql(f"SELECT node, state FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes') ORDER BY node")
    assert rows == [("gpu-a01", "ok"), ("gpu-a01~bbbb", "degraded")]
    second.up = False
    fleet.run(130)
    assert fleet.find("identity_conflict", node="gpu-a01~bbbb")[:2] == ("unknown", "agent_silent")
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.node SET conflict = '' WHERE node = 'gpu-a01~bbbb'")
    second.up = True
    for _ in range(7):
        fleet.run(15)
        fleet.run(15, judge)
    assert fleet.findings("identity_conflict") == []


def test_two_boots_with_one_machine_id(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-a01", gpus=1)
    fleet.add("gpu-b01", gpus=1)
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.node SET conflict = 'gpu-a01', machine_id = 'machine-gpu-a01' WHERE node = 'gpu-b01'"
        )
    fleet.run(30, judge)
    assert fleet.find("identity_conflict", node="gpu-b01")[:2] == ("warn", "same_machine_id")


@pytest.mark.drill("identity_conflict", "near_miss")
def test_T04_a_rename_keeps_finding_and_incident(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-a01", gpus=1)
    node.offset_s = 60.0
    fleet.run(30, judge)
    before = fleet.sql("SELECT id, began_at, incident FROM finding")
    with fleet.store.transaction() as write:
        for table in ("node", "expected", "inventory", "probe", "finding", "incident", "ledger"):
            write.execute(f"UPDATE live.{table} SET node = 'gpu-z99'")
        write.execute("INSERT INTO live.node_alias VALUES ('gpu-a01', 'gpu-z99', ?)", [fleet.at])
    node.name = "gpu-z99"
    fleet.run(30, judge)
    assert fleet.sql("SELECT id, began_at, incident FROM finding") == before
    assert fleet.findings() == [("gpu-z99", "node:", "firing", "warn", "behind")]
    assert len(fleet.incidents()) == 1


def test_B06_values_of_a_dead_source_are_unknown(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    fleet.run(35)
    died_at = fleet.at
    node.up = False
    for later, state in ((25, "ok"), (40, "unknown"), (565, "unknown")):
        at = died_at + timedelta(seconds=later)
        rows = fleet.sql(
            "SELECT state, age_s, ts, received_at, temperature_c, flags "
            f"FROM cards_at(TIMESTAMP '{at}', '20 minutes')"
        )
        assert len(rows) == 2
        for row in rows:
            assert row[:5] == (state, float(later), died_at, died_at, 60.0)
            assert row[5] == (["stale"] if state == "unknown" else [])
    at = died_at + timedelta(seconds=565)
    rows = fleet.sql(f"SELECT state, age_s, temperature_c FROM cards_at(TIMESTAMP '{at}', '2 minutes')")
    assert rows == [("unknown", None, None)] * 2, "too old to be shown at all"


def test_B06_old_rows_that_arrive_late_are_still_old(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    fleet.run(35)
    sampled_at = fleet.at
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.gpu SET received_at = received_at + INTERVAL 80 SECOND")
    at = sampled_at + timedelta(seconds=85)
    assert fleet.sql(f"SELECT state, age_s FROM cards_at(TIMESTAMP '{at}', '10 minutes')") == [
        ("unknown", 85.0)
    ]


def test_slow_probes_stay_fresh_for_three_intervals(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    fleet.run(5)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.probe SET interval_s = 60 WHERE probe = 'gpu'")
    for later, state in ((175, "ok"), (185, "unknown")):
        at = fleet.at + timedelta(seconds=later)
        assert fleet.sql(f"SELECT state FROM cards_at(TIMESTAMP '{at}', '10 minutes')") == [(state,)]


@pytest.mark.parametrize("noted", [True, False])
def test_silent_for_long_is_still_dated(fleet: "Fleet", judge: Judge, noted: bool) -> None:
    node = fleet.add("gpu-001", gpus=1)
    fleet.run(300)
    heard_at = fleet.at
    node.up = False
    if noted:
        fleet.run(100, judge, every=20)
        assert [row[2] for row in fleet.findings()] == ["firing"]
    fleet.at = heard_at + timedelta(minutes=20)
    verdict, code, evidence_at, reason = fleet.find("agent_silent")
    assert (verdict, code, evidence_at) == ("crit", "silent", heard_at + timedelta(seconds=600))
    assert "nothing received for 1200 s" in reason


def test_an_agent_cannot_make_old_values_fresh(fleet: "Fleet", judge: Judge) -> None:
    """It says itself how often it samples; a huge interval would keep a dead card well for ever."""
    node = fleet.add("gpu-001", gpus=1)
    fleet.run(5)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.probe SET interval_s = 9e8")
    node.up = False
    state = f"SELECT state FROM cards_at(TIMESTAMP '{fleet.at + timedelta(minutes=16)}', '1 day')"
    assert fleet.sql(state) == [("unknown",)]
