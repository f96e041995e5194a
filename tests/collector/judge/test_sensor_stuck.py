"""Rule sensor_stuck: a sensor that does not move while the load does."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "sensor_stuck"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def swing(fleet: "Fleet") -> None:
    """A load of two minutes on, two off, which every sensor follows that is not stuck."""
    busy = fleet.at.minute % 4 < 2
    for node in fleet.nodes.values():
        for number, card in enumerate(node.cards):
            jitter = (fleet.at.second + number) % 7
            if card.said.get("power_w") != 321.5:
                card.said["power_w"] = (600.0 if busy else 120.0) + jitter
            if card.temperature != 55.0:
                card.temperature = (65.0 if busy else 40.0) + jitter
            if card.util != 42.5:
                card.util = (95.0 if busy else 2.0) + jitter / 2


@pytest.mark.drill("sensor_stuck", "fires")
def test_each_sensor_and_a_card_that_is_well(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=4).cards
    cards[1].temperature = 55.0
    cards[2].said["power_w"] = 321.5
    cards[3].util = 42.5
    fleet.each_tick = swing
    fleet.run(7 * 60, judge, every=60)
    assert {row[2] for row in fleet.findings()} == {"pending"}, "seven minutes are no finding"
    fleet.run(6 * 60)
    fleet.run(9 * 60, judge, every=60)
    assert fleet.findings() == [
        ("gpu-001", cards[1].entity, "firing", "warn", "temperature"),
        ("gpu-001", cards[2].entity, "firing", "warn", "power"),
        ("gpu-001", cards[3].entity, "firing", "warn", "utilisation"),
    ]
    assert fleet.find(RULE, cards[0].entity)[:2] == ("ok", "moving")
    for card in cards:
        card.said, card.temperature, card.util = {}, 60.0, 95.0
    fleet.run(13 * 60, judge, every=30)
    assert fleet.findings() == []


@pytest.mark.drill("sensor_stuck", "not_judged")
def test_idle_and_steady_cards_may_stand_still(fleet: "Fleet", judge: Judge) -> None:
    idle, steady, sick, blind = fleet.add("gpu-001", gpus=4).cards
    idle.util, idle.temperature, idle.said = 0.0, 30.0, {"power_w": 71.0}
    sick.state = "lost"
    blind.util, blind.temperature, blind.said = None, None, {"power_w": None}
    fleet.run(390)
    assert [fleet.find(RULE, card.entity)[:2] for card in (idle, steady, sick, blind)] == [
        ("n/a", "steady_load"),
        ("n/a", "steady_load"),
        ("unknown", "lost"),
        ("unknown", "unreadable"),
    ]
    fleet.nodes["gpu-001"].up = False
    fleet.run(420)
    assert fleet.find(RULE, idle.entity)[:2] == ("unknown", "no_samples")


@pytest.mark.drill("sensor_stuck", "near_miss")
def test_a_full_card_whose_power_swings_is_no_stuck_counter(fleet: "Fleet", judge: Judge) -> None:
    [card] = fleet.add("gpu-001", gpus=1).cards

    def phases(fleet: "Fleet") -> None:
        card.util = 100.0
        high = fleet.at.minute % 2
        card.said["power_w"], card.temperature = (600.0, 65.0) if high else (300.0, 50.0)

    fleet.each_tick = phases
    fleet.run(390)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "moving")
