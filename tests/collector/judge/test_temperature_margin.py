"""Rule temperature_margin: a card close to the temperature at which hardware slows it down."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "temperature_margin"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(2 * count):
        fleet.run(25)
        fleet.run(5, judge)


@pytest.mark.drill("temperature_margin", "fires")
def test_minutes_close_to_the_limit_warn(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    card.margin = 1.0  # slowed down at -2
    minutes(fleet, judge, 3)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    minutes(fleet, judge, 1)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "close")]
    assert fleet.find(RULE, card.entity)[3].startswith("3 degrees left")
    card.margin = 20.0
    minutes(fleet, judge, 8)
    assert fleet.findings() == []


@pytest.mark.drill("temperature_margin", "near_miss")
def test_near_misses(fleet: "Fleet", judge: Judge) -> None:
    cool, peak, idle = fleet.add("gpu-001", gpus=3, health=True).cards
    cool.margin, idle.margin, idle.util = 1.1, 1.0, 0.0

    def peaks(fleet: "Fleet") -> None:
        peak.margin = 0.0 if fleet.at.second < 40 else 30.0

    fleet.each_tick = peaks
    minutes(fleet, judge, 5)
    assert fleet.find(RULE, cool.entity)[:2] == ("ok", "apart")
    assert fleet.find(RULE, peak.entity)[:2] == ("ok", "apart")
    assert [row[1] for row in fleet.findings()] == [idle.entity], "an idle card this hot is in trouble too"


def test_older_cards_give_a_temperature_and_its_limit(fleet: "Fleet", judge: Judge) -> None:
    hot, well = fleet.add("gpu-001", gpus=2, health=True).cards
    for card in (hot, well):
        card.health |= {"slowdown_margin_c": None, "slowdown_temperature_c": 89.0}
    hot.temperature, well.temperature = 86.0, 85.0
    minutes(fleet, judge, 4)
    assert fleet.findings() == [("gpu-001", hot.entity, "firing", "warn", "close")]
    assert fleet.find(RULE, well.entity)[:2] == ("ok", "apart")


def test_a_margin_whose_limit_is_not_told_is_measured_from_nought(fleet: "Fleet", judge: Judge) -> None:
    hot, well = fleet.add("gpu-001", gpus=2).cards
    hot.margin, well.margin = 3.0, 4.0
    minutes(fleet, judge, 4)
    assert [row[1] for row in fleet.findings()] == [hot.entity]


@pytest.mark.drill("temperature_margin", "not_judged")
def test_unknown_and_not_supported(fleet: "Fleet", judge: Judge) -> None:
    plain = fleet.add("gpu-001", gpus=1).cards[0]
    node = fleet.add("gpu-002", gpus=3, health=True)
    hung, blind, never = node.cards
    hung.state = "hung"
    blind.temperature = never.temperature = None
    fleet.why_null(never, "gpu", "temperature_c")
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, plain.entity)[:2] == ("n/a", "not_supported")
    assert fleet.find(RULE, hung.entity)[:2] == ("unknown", "hung")
    assert fleet.find(RULE, blind.entity)[:2] == ("unknown", "unreadable")
    assert fleet.find(RULE, never.entity)[:2] == ("n/a", "not_supported")
    node.up = False
    fleet.at += timedelta(minutes=5)
    assert fleet.find(RULE, never.entity)[:2] == ("unknown", "no_samples")
    assert fleet.findings() == []


def test_a_limit_that_is_not_read_any_more_is_not_nought(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2, health=True)
    card = node.cards[0]
    for each in node.cards:
        each.health["slowdown_margin_c"], each.margin = 5.0, 30.0
    card.margin = 7.0
    minutes(fleet, judge, 4)
    before = fleet.findings()
    assert [row[1:3] for row in before] == [(card.entity, "firing")]
    node.health = False
    fleet.at += timedelta(minutes=65)  # what was told of a limit is believed for an hour
    minutes(fleet, judge, 8)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.find(RULE, node.cards[1].entity)[:2] == ("ok", "apart")
    assert fleet.findings() == before
