"""Rule ecc_corrected: corrected memory errors that keep coming."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "ecc_corrected"
TOTAL = "ecc_corrected_total"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.drill("ecc_corrected", "fires")
def test_errors_by_the_minute_warn_and_clear(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    fleet.run(60, judge, every=60)
    for minute in range(1, 5):
        card.health[TOTAL] = 60 * minute
        fleet.run(60, judge, every=60)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "many")]
    fleet.at += timedelta(hours=1)
    fleet.run(240, judge, every=60)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    assert fleet.findings() == []


@pytest.mark.drill("ecc_corrected", "near_miss")
def test_one_burst_is_one_sample(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    fleet.run(60, judge, every=60)
    card.health[TOTAL] = 5000
    fleet.run(300, judge, every=60)
    assert fleet.find(RULE, card.entity)[:2] == ("warn", "many")
    assert [row[2] for row in fleet.findings()] == ["pending"]


def test_resets_old_counts_and_few_errors_are_none(fleet: "Fleet", judge: Judge) -> None:
    old, fell, anew, few = fleet.add("gpu-001", gpus=4, health=True).cards
    for card in (old, fell, anew):
        card.health[TOTAL] = 5000
    fleet.run(60)
    fell.health[TOTAL] = 0
    anew.health[TOTAL], anew.epoch = 9000, 2
    few.health[TOTAL] = 99
    fleet.run(120)
    assert [fleet.find(RULE, card.entity)[:2] for card in (old, fell, anew, few)] == [
        ("ok", "none"),
        ("ok", "none"),
        ("ok", "none"),
        ("ok", "few"),
    ]


@pytest.mark.drill("ecc_corrected", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    old = fleet.add("gpu-001", gpus=1).cards[0]
    cards = fleet.add("gpu-002", gpus=3, health=True).cards
    cards[0].health[TOTAL] = cards[1].health[TOTAL] = None
    fleet.why_null(cards[0], "gpu_health", TOTAL)
    cards[2].state = "lost"
    fleet.run(60)
    assert [fleet.find(RULE, card.entity)[:2] for card in (old, *cards)] == [
        ("n/a", "no_probe"),
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "lost"),
    ]
