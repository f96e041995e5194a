"""Rule driver_mismatch: kernel module and library are of two versions."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "driver_mismatch"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, "gpu_missing")


def test_upgrade_without_a_reload_warns_while_cards_answer(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", health=True)
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE)[:2] == ("ok", "one_version")
    for card in node.cards:
        card.health["library_version"] = "580.105.08"
    fleet.run(60, judge, every=20)
    assert [row[2] for row in fleet.findings()] == ["pending"], "one sweep of eight cards is one evidence"
    fleet.run(60, judge, every=20)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "warn", "versions_differ")]
    reason = fleet.find(RULE)[3]
    assert "580.95.05" in reason
    assert "580.105.08" in reason
    assert "8 cards" in reason


@pytest.mark.drill("driver_mismatch", "fires")
def test_no_card_answers_is_critical_and_one_incident(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", health=True)
    for card in node.cards:
        card.health["library_version"] = "580.105.08"
    fleet.run(120, judge, every=20)
    assert [row[1:] for row in fleet.incidents()] == [(RULE, "gpu-001", "node:", "open", "warn")]
    node.driver_error = "driver_mismatch"
    fleet.run(10, judge)
    assert fleet.find(RULE)[:3] == ("crit", "no_card_answers", fleet.at)
    for version in ("580.95.05", "580.105.08"):
        assert version in fleet.find(RULE)[3]
    assert [row[2:] for row in fleet.findings(RULE)] == [("firing", "crit", "no_card_answers")]
    assert [row[2] for row in fleet.findings("gpu_missing")] == ["firing"]
    assert fleet.incidents() == [(1, RULE, "gpu-001", "node:", "open", "crit")]
    node.driver_error = ""
    for card in node.cards:
        card.health.clear()
    fleet.run(180, judge, every=20)
    assert fleet.findings() == []


def test_seen_for_the_first_time_when_nothing_answers(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", health=True)
    node.driver_error = "driver_mismatch"
    fleet.run(10, judge)
    assert fleet.find(RULE)[:2] == ("crit", "no_card_answers")
    assert "unknown" in fleet.find(RULE)[3]
    assert [row[1:4] for row in fleet.incidents()] == [(RULE, "gpu-001", "node:")]


def test_a_card_lost_beside_a_pending_upgrade_is_its_own_incident(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", health=True)
    for card in node.cards:
        card.health["library_version"] = "580.105.08"
    fleet.run(120, judge, every=20)
    node.cards[0].state = "lost"
    fleet.run(10, judge)
    assert [row[1] for row in fleet.incidents()] == [RULE, "gpu_missing"]


@pytest.mark.drill("driver_mismatch", "near_miss")
def test_other_errors_of_the_driver_are_no_mismatch(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", health=True)
    fleet.run(60, judge, every=20)
    node.driver_error = "driver_not_loaded"
    fleet.run(20, judge)
    assert fleet.findings(RULE) == []
    fleet.run(240, judge, every=20)
    assert fleet.find(RULE)[:2] == ("unknown", "unreadable"), "what was read four minutes ago is old"


@pytest.mark.parametrize(
    ("reason", "said"), [("not_supported", ("n/a", "not_supported")), ("failed", ("unknown", "unreadable"))]
)
def test_versions_that_are_not_there(
    fleet: "Fleet", judge: Judge, reason: str, said: tuple[str, str]
) -> None:
    node = fleet.add("gpu-001", gpus=1, health=True)
    node.cards[0].health = {"driver_version": None, "library_version": None}
    fleet.why_null(node.cards[0], "gpu_health", "library_version", reason=reason)
    fleet.run(120, judge, every=20)
    assert fleet.find(RULE)[:2] == said


@pytest.mark.drill("driver_mismatch", "not_judged")
def test_silent_old_and_without_cards(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1, health=True).up = False
    fleet.add("gpu-002", gpus=1)
    fleet.add("cpu-01", gpus=0, health=True)
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, node="gpu-001")[:2] == ("unknown", "agent_silent")
    assert fleet.find(RULE, node="gpu-002")[:2] == ("n/a", "no_probe")
    assert fleet.find(RULE, node="cpu-01")[:2] == ("n/a", "no_cards")
