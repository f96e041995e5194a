"""Rule gpu_hot: a card against the cards of its host that draw the same power."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "gpu_hot"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.drill("gpu_hot", "fires")
def test_minutes_hotter_than_its_siblings_warn_and_clear(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001").cards
    cards[3].temperature = 75.0
    fleet.run(210, judge, every=30)
    assert [row[2] for row in fleet.findings()] == ["pending"], "three minutes are no finding"
    fleet.run(120, judge, every=30)
    assert fleet.findings() == [("gpu-001", cards[3].entity, "firing", "warn", "hot")]
    assert "15 degrees hotter than 7 siblings" in fleet.find(RULE, cards[3].entity)[3]
    cards[3].temperature = 61.0
    fleet.run(8 * 60, judge, every=30)
    assert fleet.findings() == []


@pytest.mark.drill("gpu_hot", "near_miss", "not_judged")
def test_near_misses_and_what_cannot_be_compared(fleet: "Fleet", judge: Judge) -> None:
    warm, works_more, idle, quiet, sick, hot = fleet.add("gpu-001", gpus=10).cards[:6]
    warm.temperature = 70.0
    works_more.temperature, works_more.said = 80.0, {"power_w": 700.0}
    idle.temperature, idle.util = 80.0, 3.0
    quiet.temperature = None
    sick.state = "hung"
    hot.temperature = 80.0
    pair = fleet.add("gpu-002", gpus=2).cards
    pair[0].temperature = 90.0
    gone = fleet.add("gpu-003", gpus=1)
    gone.up = False
    fleet.run(80)
    found = [
        fleet.find(RULE, card.entity)[:2]
        for card in (warm, works_more, idle, quiet, sick, pair[0], gone.cards[0], hot)
    ]
    assert found == [
        ("ok", "as_siblings"),
        ("n/a", "alone"),
        ("n/a", "idle"),
        ("unknown", "unreadable"),
        ("unknown", "hung"),
        ("n/a", "alone"),
        ("unknown", "no_samples"),
        ("warn", "hot"),
    ]


def test_a_place_that_is_warm_in_every_host_is_no_fault(fleet: "Fleet", judge: Judge) -> None:
    rear = [fleet.add(f"gpu-00{n}", gpus=4).cards[3] for n in range(6)]
    for card in rear:
        card.temperature = 74.0
    rear[0].temperature = 90.0
    fleet.run(80)
    assert [fleet.find(RULE, card.entity)[0] for card in rear] == ["warn"] + ["ok"] * 5
