"""Rule ecc_uncorrectable: uncorrectable memory errors, by growth, until a reset."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "ecc_uncorrectable"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


TOTAL = "ecc_uncorrectable_total"


@pytest.mark.drill("ecc_uncorrectable", "fires")
def test_growth_is_critical_and_stays_until_a_reset(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    card.health[TOTAL] = 2
    fleet.run(60, judge, every=20)
    grown_at = fleet.at
    assert fleet.find(RULE, card.entity)[:3] == ("crit", "uncorrectable", grown_at)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "crit", "uncorrectable")]
    fleet.run(180, judge, every=30)
    assert fleet.sql("SELECT json_array_length(evidence) FROM finding") == [(1,)], "it grew once"
    fleet.at += timedelta(hours=3)  # long out of sight
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:3] == ("crit", "uncorrectable", grown_at)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    card.health[TOTAL] = 0
    fleet.run(60, judge, every=20)
    assert fleet.findings() == []


@pytest.mark.parametrize("evidence", ["reboot", "driver"])
def test_reboot_or_reload_ends_it(fleet: "Fleet", judge: Judge, evidence: str) -> None:
    node = fleet.add("gpu-001", gpus=1, health=True)
    card = node.cards[0]
    fleet.run(60, judge, every=20)
    card.health[TOTAL] = 2
    fleet.run(60, judge, every=20)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    if evidence == "reboot":
        node.boot_id = "boot-2"
    else:
        card.epoch += 1
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none"), "even where the count was kept"
    assert fleet.findings() == []


def test_an_agent_restart_is_no_reset(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.epoch = 3
    fleet.run(60, judge, every=20)
    card.health[TOTAL] = 2
    fleet.run(60, judge, every=20)
    card.epoch = 1
    fleet.run(60, judge, every=20)
    assert [row[2] for row in fleet.findings()] == ["firing"]


def test_resets_and_old_counts_are_no_errors(fleet: "Fleet", judge: Judge) -> None:
    old, fell, anew = fleet.add("gpu-001", gpus=3, health=True).cards
    for card in (old, fell, anew):
        card.health[TOTAL] = 5
    fleet.run(60, judge, every=20)
    fell.health[TOTAL] = 0
    anew.health[TOTAL], anew.epoch = 9, 2
    fleet.run(120, judge, every=20)
    assert {fleet.find(RULE, card.entity)[:2] for card in (old, fell, anew)} == {("ok", "none")}
    fell.health[TOTAL] = 1
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, fell.entity)[:2] == ("crit", "uncorrectable")
    assert " 1 uncorrectable" in f" {fleet.find(RULE, fell.entity)[3]}"


def test_more_growth_is_more_evidence(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    fleet.run(60, judge, every=20)
    for total in (1, 4, 6):
        card.health[TOTAL] = total
        fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[2] == fleet.at
    assert fleet.sql("SELECT observed, count(*) OVER () FROM finding") == [(6.0, 1)]


def test_too_many_on_chip_errors(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health["ecc_sram_threshold_exceeded"] = True
    fleet.run(60, judge, every=20)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "crit", "sram_threshold")]


@pytest.mark.drill("ecc_uncorrectable", "near_miss", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    old = fleet.add("gpu-001", gpus=1).cards[0]
    cards = fleet.add("gpu-002", gpus=4, health=True).cards
    cards[0].health[TOTAL] = cards[1].health[TOTAL] = None
    fleet.why_null(cards[0], "gpu_health", TOTAL)
    fleet.why_null(cards[1], "gpu_health", TOTAL, reason="failed")
    cards[2].state = "hung"
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, old.entity)[:2] == ("n/a", "no_probe")
    assert [fleet.find(RULE, card.entity)[:2] for card in cards] == [
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "hung"),
        ("ok", "none"),
    ]
    fleet.nodes["gpu-002"].up = False
    fleet.run(200)
    assert fleet.find(RULE, cards[3].entity)[:2] == ("unknown", "no_samples")


def test_one_sample_that_forgot_the_errors_pages_nobody(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    for total in (37, 37, 0, 37, 37):
        card.health[TOTAL] = total
        fleet.run(60, judge, every=60)
    assert fleet.findings() == []
    card.health[TOTAL] = 38
    fleet.run(60, judge, every=60)
    assert [row[2:] for row in fleet.findings()] == [("firing", "crit", "uncorrectable")]


def test_a_threshold_that_cannot_be_read_any_more_clears_nothing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health["ecc_sram_threshold_exceeded"] = True
    fleet.run(60, judge, every=20)
    before = fleet.findings()
    assert before
    card.health["ecc_sram_threshold_exceeded"] = None
    fleet.why_null(card, "gpu_health", "ecc_sram_threshold_exceeded", reason="failed")
    fleet.run(240, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "unreadable")
    assert fleet.findings() == before


def test_a_threshold_that_is_no_longer_sent_clears_nothing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health["ecc_sram_threshold_exceeded"] = True
    fleet.run(60, judge, every=20)
    before = fleet.findings()
    card.health["ecc_sram_threshold_exceeded"] = None
    fleet.run(120, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before != []


def test_errors_outlast_a_threshold_that_was_passed_meanwhile(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    fleet.run(60, judge, every=20)
    card.health[TOTAL] = 2
    fleet.run(60, judge, every=20)
    card.health["ecc_sram_threshold_exceeded"] = True
    fleet.run(60, judge, every=20)
    assert [row[4] for row in fleet.findings()] == ["sram_threshold"]
    fleet.at += timedelta(hours=2)
    card.health["ecc_sram_threshold_exceeded"] = False
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "uncorrectable"), "the card was not reset"
