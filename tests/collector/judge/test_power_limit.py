"""Rule power_limit: the enforced power limit against what most cards of the model have."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "power_limit"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.drill("power_limit", "fires")
def test_a_card_below_its_peers_fires_and_clears(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=16, health=True).cards
    cards[2].said["power_limit_w"] = cards[2].health["power_limit_requested_w"] = 500.0
    cards[4].said["power_limit_w"] = 350.0
    cards[5].said["power_limit_w"] = 690.0
    fleet.run(60, judge, every=30)
    assert {row[2] for row in fleet.findings()} == {"pending"}
    fleet.run(60, judge, every=30)
    assert fleet.findings() == [
        ("gpu-001", cards[2].entity, "firing", "warn", "below_peers"),
        ("gpu-001", cards[4].entity, "firing", "warn", "held_lower"),
    ]
    for card in cards:
        card.said.clear()
        card.health.clear()
    fleet.run(240, judge, every=30)
    assert fleet.findings() == []


@pytest.mark.drill("power_limit", "near_miss")
def test_what_people_set_for_all_is_normal(fleet: "Fleet", judge: Judge) -> None:
    for card in fleet.add("gpu-001", health=True).cards:
        card.said["power_limit_w"] = card.health["power_limit_requested_w"] = 500.0
    fleet.run(30)
    assert {fleet.find(RULE, card.entity)[:2] for card in fleet.nodes["gpu-001"].cards} == {
        ("ok", "as_expected")
    }


def test_without_a_custom_it_is_nobodys_fault(fleet: "Fleet", judge: Judge) -> None:
    pair = fleet.add("gpu-001", gpus=2, health=True).cards
    for card in pair:
        card.said["power_limit_w"] = card.health["power_limit_requested_w"] = 450.0
    fleet.run(30)
    assert fleet.find(RULE, pair[0].entity)[:2] == ("n/a", "no_custom")
    pair[0].said["power_limit_w"] = 300.0
    pair[1].said["power_limit_w"] = 700.0
    fleet.run(30)
    assert [fleet.find(RULE, card.entity)[:2] for card in pair] == [
        ("warn", "held_lower"),
        ("ok", "as_expected"),
    ]


@pytest.mark.drill("power_limit", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=4).cards
    cards[0].said["power_limit_w"] = cards[1].said["power_limit_w"] = None
    fleet.why_null(cards[0], "gpu", "power_limit_w")
    cards[2].state = "hung"
    fleet.run(30)
    assert [fleet.find(RULE, card.entity)[:2] for card in cards] == [
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "hung"),
        ("n/a", "no_expectation"),
    ]
    fleet.nodes["gpu-001"].up = False
    fleet.run(150)
    assert fleet.find(RULE, cards[3].entity)[:2] == ("unknown", "no_samples")


def test_what_is_declared_wins(fleet: "Fleet", store: Store) -> None:
    one = [rule for rule in load_rules() if rule.name == RULE]
    limits = JudgeSettings(limit={RULE: {"limit_w": Limit(value=650, source="site")}})
    fleet.judge = Judge(store, limits, rules=one)
    cards = fleet.add("gpu-001", gpus=8, health=True).cards
    for card in cards[1:]:
        card.said["power_limit_w"] = card.health["power_limit_requested_w"] = 500.0
    fleet.run(30)
    assert [fleet.find(RULE, card.entity)[:2] for card in cards[:2]] == [
        ("ok", "as_expected"),
        ("warn", "below_declared"),
    ]


def test_without_what_was_asked_for_held_lower_is_not_refuted(fleet: "Fleet", judge: Judge) -> None:
    held = fleet.add("gpu-001", gpus=2, health=True).cards[0]
    held.said["power_limit_w"] = 600.0
    held.health["power_limit_default_w"] = 500.0
    fleet.run(120, judge, every=30)
    before = fleet.findings()
    assert [row[1:] for row in before] == [(held.entity, "firing", "warn", "held_lower")]
    held.health["power_limit_requested_w"] = None
    fleet.run(480, judge, every=30)
    assert fleet.find(RULE, held.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before


def test_peers_that_fall_silent_refute_nothing(fleet: "Fleet", judge: Judge) -> None:
    peers = fleet.add("gpu-001", health=True)
    low = fleet.add("gpu-002", gpus=1, health=True).cards[0]
    low.said["power_limit_w"] = 400.0
    low.health |= {"power_limit_default_w": 400.0, "power_limit_requested_w": 400.0}
    fleet.run(120, judge, every=30)
    before = fleet.findings()
    assert [row[1:] for row in before] == [(low.entity, "firing", "warn", "below_peers")]
    peers.up = False
    fleet.run(300, judge, every=30)
    assert fleet.find(RULE, low.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
