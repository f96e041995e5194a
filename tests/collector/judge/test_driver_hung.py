"""Rule driver_hung: a card or the whole driver does not return; which card, which call."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE = "driver_hung"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, "gpu_missing", "agent_silent")


def hang(fleet: "Fleet", card: "Card", kind: str = "driver_hung", entity: str = "") -> None:
    card.state = "hung"
    fleet.event(fleet.nodes[card.node], kind, "nvmlDeviceGetTemperature", entity or card.entity, pci=card.pci)


@pytest.mark.drill("driver_hung", "fires")
def test_hung_card_is_named_with_its_call(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    fleet.run(10, judge)
    hang(fleet, card)
    since = fleet.at
    first, second = fleet.run(10, judge)
    assert (first.fired, [finding.rule for finding in second.fired]) == ([], [RULE])
    verdict, code, evidence_at, reason = fleet.find(RULE, card.entity)
    assert (verdict, code, evidence_at) == ("crit", "card_hung", fleet.at)
    for known in (card.uuid, card.serial, card.pci, "nvmlDeviceGetTemperature", f"{since:%H:%M:%S}"):
        assert known in reason
    assert fleet.find(RULE, fleet.nodes["gpu-001"].cards[0].entity)[:2] == ("ok", "answers")
    assert fleet.find(RULE)[:2] == ("ok", "returns")
    assert fleet.incidents() == [(1, RULE, "gpu-001", card.entity, "open", "crit")]
    card.state = "ok"
    fleet.run(10, judge)
    assert fleet.findings() == []


@pytest.mark.drill("driver_hung", "near_miss")
def test_one_hung_sweep_is_no_finding_and_passes_are_no_evidence(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    fleet.run(10, judge)
    hang(fleet, card)
    fleet.run(5, judge)
    for _ in range(30):
        fleet.at += timedelta(microseconds=1)
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    card.state = "ok"
    fleet.run(10, judge)
    assert fleet.findings() == []


def test_card_that_hung_before_it_was_read_and_one_that_kills_its_reader(
    fleet: "Fleet", judge: Judge
) -> None:
    first, second = fleet.add("gpu-001").cards[:2]
    hang(fleet, first, entity=f"pci:{first.pci}")
    hang(fleet, second, kind="driver_crashed")
    fleet.run(10, judge)
    assert "nvmlDeviceGetTemperature has not returned" in fleet.find(RULE, first.entity)[3]
    assert "nvmlDeviceGetTemperature kills its process" in fleet.find(RULE, second.entity)[3]
    assert [row[1] for row in fleet.incidents()] == [RULE], "two cards at once have one cause"


def test_a_call_of_an_earlier_boot_is_not_named(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[0]
    card.state = "hung"
    fleet.event(fleet.nodes["gpu-001"], RULE, "nvmlInit", card.entity, boot_id="boot-0", pci=card.pci)
    fleet.run(10, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "card_hung")
    assert "a driver call does not return" in fleet.find(RULE, card.entity)[3]


def test_whole_driver_hung_is_one_finding(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(10, judge)
    fleet.event(node, RULE, "nvmlInit", "node:", pci="")
    node.driver_error = "hung"
    fleet.run(10, judge)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "crit", "driver_hung")]
    assert "nvmlInit has not returned since" in fleet.find(RULE)[3]
    assert {fleet.find(RULE, card.entity)[0] for card in node.cards} == {"n/a"}


@pytest.mark.parametrize("error", ["driver_not_loaded", "no_permission"])
def test_driver_that_answers_with_an_error_does_not_hang(fleet: "Fleet", judge: Judge, error: str) -> None:
    node = fleet.add("gpu-001")
    node.driver_error = error
    fleet.run(10, judge)
    assert fleet.find(RULE)[:2] == ("ok", "returns")
    assert fleet.find(RULE, node.cards[0].entity)[:2] == ("n/a", "no_driver")
    assert fleet.findings(RULE) == []


def test_silent_agent_is_unknown_and_explains_the_hang(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    hang(fleet, node.cards[0])
    fleet.run(10, judge)
    node.up = False
    fleet.run(100, judge, every=20)
    assert fleet.find(RULE, node.cards[0].entity)[:2] == ("unknown", "agent_silent")
    assert fleet.find(RULE)[:2] == ("unknown", "agent_silent")
    assert [row[1] for row in fleet.incidents()] == ["agent_silent"]
    assert [row[2] for row in fleet.findings(RULE)] == ["firing"], "gone silent keeps firing"


def test_hang_above_missing_in_the_chain(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    card.state = "lost"
    fleet.run(20, judge)
    assert [row[1] for row in fleet.incidents()] == ["gpu_missing"]
    hang(fleet, card)
    fleet.run(10, judge)
    assert fleet.incidents() == [(1, RULE, "gpu-001", card.entity, "open", "crit")]


@pytest.mark.drill("driver_hung", "not_judged")
def test_host_without_cards_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("cpu-01", gpus=0)
    fleet.run(10, judge)
    assert fleet.find(RULE)[:2] == ("n/a", "no_cards")


def test_hung_card_is_critical_in_the_state(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    hang(fleet, card)
    fleet.run(10, judge)
    states = fleet.sql(f"SELECT entity, state FROM cards_at(TIMESTAMP '{fleet.at}', '2 minutes')")
    assert [row[0] for row in states if row[1] != "ok"] == [card.entity]
    assert (card.entity, "critical") in states
    assert fleet.sql(f"SELECT state, gpus_critical FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')") == [
        ("critical", 1)
    ]
