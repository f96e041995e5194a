"""One cause, one incident: the chain, re-opening, numbers, severity, shadow."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, RuleOverride
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet


NAMES = ("agent_silent", "gpu_missing", "gpu_downclocked", "clock_skew")
RULES = [rule for rule in load_rules() if rule.name in NAMES]


@pytest.fixture
def rules() -> tuple[str, ...]:
    return NAMES


def brake(card: "Card") -> None:
    card.brake_s += 1.0


def test_a_missing_card_explains_what_happens_to_it_later(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    card, other = node.cards[:2]
    card.listed = card.on_bus = False
    fleet.run(10, judge)
    fleet.each_tick = lambda fleet: brake(other)
    fleet.run(10, judge)
    assert [row[1:4] for row in fleet.incidents()] == [
        ("gpu_missing", "gpu-001", card.entity),
        ("gpu_downclocked", "gpu-001", other.entity),
    ], "two cards with two causes are two incidents"


def test_a_cause_that_shows_later_takes_over(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=4).cards[0]
    fleet.each_tick = lambda fleet: brake(card)
    fleet.run(20, judge)
    assert [row[1] for row in fleet.incidents()] == ["gpu_downclocked"]
    fleet.each_tick = lambda fleet: None
    card.state = "lost"
    fleet.run(10, judge)
    assert fleet.incidents() == [(1, "gpu_missing", "gpu-001", card.entity, "open", "crit")]
    assert fleet.sql("SELECT DISTINCT incident FROM finding") == [(1,)]


def test_a_silent_node_takes_over_what_has_just_begun(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    node.cards[0].state = "lost"
    fleet.run(20, judge)
    fleet.at += timedelta(seconds=25)
    node.cards[1].state = "lost"
    fleet.run(10, judge)
    node.up = False
    fleet.run(100, judge, every=20)
    assert [row[1:5] for row in fleet.incidents()] == [("agent_silent", "gpu-001", "node:", "open")]
    assert {row[2] for row in fleet.findings("gpu_missing")} == {"firing"}, "gone silent keeps firing"


@pytest.mark.slow
def test_a_cause_that_ends_leaves_the_incident_to_what_remains(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    card = node.cards[0]
    card.state = "lost"
    fleet.run(20, judge)
    node.up = False
    fleet.run(100, judge, every=20)
    assert [row[1] for row in fleet.incidents()] == ["agent_silent"]
    node.up = True
    fleet.run(120, judge, every=5)
    assert fleet.incidents() == [(1, "gpu_missing", "gpu-001", card.entity, "open", "crit")]
    assert fleet.sql("SELECT count(*) FROM incident_log WHERE what = 'cause_changed'") == [(1,)]
    assert "Card missing" in str(fleet.sql("SELECT title FROM incident")[0][0])


@pytest.mark.slow
def test_an_old_trouble_is_not_swallowed(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    node.cards[0].state = "lost"
    fleet.run(10, judge)
    fleet.run(630, judge, every=30)
    node.up = False
    fleet.run(100, judge, every=20)
    assert [row[1] for row in fleet.incidents()] == ["gpu_missing", "agent_silent"]


def test_node_findings_are_causes_of_their_own(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    node.offset_s, node.driver_error = 60.0, "driver_not_loaded"
    fleet.run(30, judge)
    assert sorted(str(row[1]) for row in fleet.incidents()) == ["clock_skew", "gpu_missing"]


def test_same_cause_within_30_minutes_is_the_same_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2).cards[0]

    def lose_and_find() -> None:
        card.state = "lost"
        fleet.run(10, judge)
        card.state = "ok"
        fleet.run(10, judge)

    lose_and_find()
    assert fleet.incidents()[0][4] == "resolved"
    fleet.at += timedelta(minutes=29)
    lose_and_find()
    assert fleet.sql("SELECT number, state, reopened FROM incident") == [(1, "resolved", 1)]
    fleet.at += timedelta(minutes=31)
    lose_and_find()
    assert fleet.sql("SELECT number, state, reopened FROM incident ORDER BY 1") == [
        (1, "resolved", 1),
        (2, "resolved", 0),
    ]
    words = [
        row[0]
        for row in fleet.sql("SELECT what FROM incident_log WHERE number = 1 ORDER BY logged_at, rowid")
    ]
    once = ["finding_fired", "finding_resolved", "resolved"]
    assert [word for word in words if word != "finding_recovering"] == ["opened", *once, "reopened", *once]


@pytest.mark.slow
def test_numbers_survive_restarts(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=4).cards
    for number, card in enumerate(cards, 1):
        running = Judge(fleet.store, JudgeSettings(), rules=RULES)
        card.state = "lost"
        fleet.run(10, running)
        card.state = "ok"
        fleet.run(10, running)
        fleet.at += timedelta(minutes=40)
        assert [row[0] for row in fleet.incidents()] == list(range(1, number + 1))


def test_restart_in_the_middle_of_an_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2).cards[0]
    card.state = "lost"
    fleet.run(10, judge)
    before = fleet.sql("SELECT number, opened_at, severity, title FROM incident")
    started = fleet.sql("SELECT id, began_at, fired_at FROM finding")
    again = Judge(fleet.store, JudgeSettings(), rules=RULES)
    fleet.run(20, again)
    assert fleet.sql("SELECT number, opened_at, severity, title FROM incident") == before
    assert fleet.sql("SELECT id, began_at, fired_at FROM finding") == started
    card.state = "ok"
    fleet.run(10, Judge(fleet.store, JudgeSettings(), rules=RULES))
    [(state, cause, resolved_at)] = fleet.sql("SELECT state, cause, resolved_at FROM incident")
    assert (state, cause) == ("resolved", "clean evidence")
    assert resolved_at is not None


def test_a_store_that_was_opened_again_or_begun_anew(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "fleet.duckdb")
    judge = Judge(store, JudgeSettings(), rules=RULES)
    at = datetime(2026, 3, 1, 12, 0, 0)

    def expect(node: str) -> None:
        with store.transaction() as write:
            write.execute(
                "INSERT INTO live.expected "
                "VALUES (?, 'GPU-a', '1', NULL, NULL, NULL, 'accepted', 'ann', ?, '')",
                [node, at - timedelta(hours=1)],
            )

    expect("gpu-001")
    judge.run_pass(at)
    store.reopen()
    judge.run_pass(at + timedelta(seconds=5))
    with store.reader() as read:
        assert read.execute("SELECT node, state FROM live.finding").fetchall() == [("gpu-001", "firing")]
    with store.transaction() as write:
        for table in ("finding", "incident", "incident_log", "judge_state", "expected"):
            write.execute(f"DELETE FROM live.{table}")  # what a new file looks like
    store.reopen()
    expect("gpu-002")
    for second in (10, 15):
        judge.run_pass(at + timedelta(seconds=second))
    with store.reader() as read:
        assert read.execute("SELECT node, number FROM live.incident").fetchall() == [("gpu-002", 1)]
    store.close()


@pytest.mark.slow
def test_worse_raises_the_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[0]
    fleet.baseline("gpu-001", card.entity, "sm_clock_busy_mhz", 1950.0)
    quick = Judge(
        fleet.store,
        JudgeSettings(rule={"gpu_downclocked": RuleOverride(for_="2 of 2")}),
        rules=RULES,
    )
    card.clock = 1750.0
    fleet.run(200, quick, every=20)
    assert fleet.incidents()[0][1:] == ("gpu_downclocked", "gpu-001", card.entity, "open", "warn")
    card.clock = 1000.0
    fleet.run(200, quick, every=20)
    assert fleet.incidents()[0][5] == "crit"
    assert ("finding_worse",) in fleet.sql("SELECT what FROM incident_log")


def test_shadow_opens_no_incident_and_changes_no_state(fleet: "Fleet", store: Store) -> None:
    judge = Judge(store, JudgeSettings(rule={"gpu_missing": RuleOverride(shadow=True)}), rules=RULES)
    card = fleet.add("gpu-001", gpus=2).cards[0]
    fleet.run(10, judge)
    card.on_bus = card.listed = False
    fleet.run(10, judge)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    assert fleet.incidents() == []
    rows = fleet.sql(f"SELECT state FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')")
    assert rows == [("ok",)], "its last sample is still fresh"


def test_a_rule_that_is_switched_off_ends_its_findings(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2).cards[0].state = "lost"
    fleet.run(10, judge)
    off = Judge(fleet.store, JudgeSettings(rule={"gpu_missing": RuleOverride(enabled=False)}), rules=RULES)
    fleet.run(5, off)
    assert fleet.sql("SELECT state, cause FROM finding") == [("resolved", "the rule no longer runs")]
    assert fleet.sql("SELECT status FROM rule WHERE rule = 'gpu_missing'") == [("disabled",)]


def test_counters_add_up_to_the_expected_inventory(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001")
    lost = fleet.add("gpu-002")
    lost.cards[0].state = "lost"
    silent = fleet.add("gpu-003")
    fleet.add("gpu-004", hello=False).up = False
    fleet.add("cpu-001", gpus=0)
    slow = fleet.add("gpu-005")
    fleet.each_tick = lambda fleet: brake(slow.cards[1])
    fleet.run(60, judge, every=10)
    silent.up = False
    fleet.run(100, judge, every=20)
    [counts] = fleet.sql(
        "SELECT sum(gpus_expected), sum(gpus_ok), sum(gpus_degraded), sum(gpus_critical), sum(gpus_no_data) "
        f"FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')"
    )
    assert counts == (40, 22, 1, 1, 16)
    states = fleet.sql(f"SELECT node, state FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes') ORDER BY node")
    assert states == [
        ("cpu-001", "ok"),
        ("gpu-001", "ok"),
        ("gpu-002", "critical"),
        ("gpu-003", "unknown"),
        ("gpu-004", "unknown"),
        ("gpu-005", "degraded"),
    ]
