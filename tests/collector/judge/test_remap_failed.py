"""Rule remap_failed: memory that could not be repaired, and repairs that wait."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "remap_failed"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.parametrize(
    ("health", "verdict", "code"),
    [
        ({"remap_failed": True, "remap_pending": True}, "crit", "remap_failed"),
        ({"memory_unrepairable": True}, "crit", "memory_unrepairable"),
        ({"remap_pending": True}, "warn", "pending"),
        ({"retired_pages_pending": True, "remap_failed": None}, "warn", "pending"),
        ({"channel_repair_pending": True}, "warn", "pending"),
        ({"remap_banks_none": 2}, "warn", "no_spare_rows"),
    ],
)
def test_what_the_card_says(
    fleet: "Fleet", judge: Judge, health: "dict[str, bool | int | None]", verdict: str, code: str
) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    card.health |= health
    fleet.run(60, judge, every=20)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", verdict, code)]
    card.health |= {name: 0 if name == "remap_banks_none" else False for name in health}
    fleet.run(60, judge, every=20)
    assert fleet.findings() == []


@pytest.mark.drill("remap_failed", "fires")
def test_pending_asks_for_a_reset_and_failure_for_another_card(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health["remap_pending"] = True
    fleet.run(60, judge, every=20)
    asked = "SELECT json_extract_string(detail, '$.action'), verdict FROM finding"
    assert fleet.sql(asked) == [("reset", "warn")]
    card.health["remap_failed"] = True
    fleet.run(60, judge, every=20)
    assert fleet.sql(asked) == [("drain_rma", "crit")]
    assert [row[5] for row in fleet.incidents()] == ["crit"]


@pytest.mark.drill("remap_failed", "near_miss")
def test_repaired_rows_are_no_failure(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health |= {"remapped_rows_uncorrectable_total": 3, "remap_banks_low": 1}
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")


@pytest.mark.drill("remap_failed", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    old = fleet.add("gpu-001", gpus=1).cards[0]
    cards = fleet.add("gpu-002", gpus=4, health=True).cards
    flags = ("remap_failed", "memory_unrepairable", "remap_pending", "retired_pages_pending")
    for card in cards[:2]:
        card.health |= dict.fromkeys((*flags, "remap_banks_none"))
    fleet.why_null(cards[0], "gpu_health", *flags)
    fleet.why_null(cards[1], "gpu_health", *flags[:3])
    fleet.why_null(cards[1], "gpu_health", flags[3], reason="failed")
    cards[2].state = "lost"
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, old.entity)[:2] == ("n/a", "no_probe")
    assert [fleet.find(RULE, card.entity)[:2] for card in cards] == [
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "lost"),
        ("ok", "none"),
    ]
    fleet.nodes["gpu-002"].up = False
    fleet.at += timedelta(minutes=5)
    assert fleet.find(RULE, cards[3].entity)[:2] == ("unknown", "no_samples")


@pytest.mark.parametrize("metric", ["remap_failed", "remap_pending"])
def test_an_answer_that_fails_clears_nothing(fleet: "Fleet", judge: Judge, metric: str) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health[metric] = True
    fleet.run(60, judge, every=20)
    before = fleet.findings()
    assert before
    card.health[metric] = None
    fleet.why_null(card, "gpu_health", metric, reason="failed")
    fleet.run(240, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "unreadable")
    assert fleet.findings() == before


@pytest.mark.parametrize("metric", ["remap_failed", "channel_repair_pending", "remap_banks_none"])
def test_an_answer_that_stops_clears_nothing(fleet: "Fleet", judge: Judge, metric: str) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health[metric] = True
    fleet.run(60, judge, every=20)
    before = fleet.findings()
    assert [row[2] for row in before] == ["firing"]
    card.health[metric] = None
    fleet.run(120, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
