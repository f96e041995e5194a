"""Rule recovery_action: what the driver wants done with a card."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "recovery_action"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.parametrize(
    ("action", "verdict", "code"),
    [
        ("gpu_reset", "crit", "gpu_reset"),
        ("node_reboot", "crit", "node_reboot"),
        ("bus_reset", "crit", "bus_reset"),
        ("system_reboot", "crit", "system_reboot"),
        ("drain_p2p", "warn", "drain_p2p"),
        ("drain_and_reset", "warn", "drain_and_reset"),
        ("recover_imex", "warn", "recover_imex"),
        ("something_new", "warn", "other"),
    ],
)
@pytest.mark.drill("recovery_action", "fires")
def test_what_the_driver_wants(fleet: "Fleet", judge: Judge, action: str, verdict: str, code: str) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    card.health["recovery_action"] = action
    fleet.run(60, judge, every=20)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", verdict, code)]
    card.health["recovery_action"] = "none"
    fleet.run(60, judge, every=20)
    assert fleet.findings() == []


def test_a_stale_wish_is_unknown_and_keeps_firing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=1, health=True)
    node.cards[0].health["recovery_action"] = "gpu_reset"
    fleet.run(60, judge, every=20)
    node.up = False
    fleet.run(240, judge, every=60)
    assert fleet.find(RULE, node.cards[0].entity)[:2] == ("unknown", "no_samples")
    assert [row[2] for row in fleet.findings()] == ["firing"]
    fleet.at += timedelta(minutes=20)
    assert fleet.find(RULE, node.cards[0].entity)[:2] == ("unknown", "no_samples")


@pytest.mark.drill("recovery_action", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    old = fleet.add("gpu-001", gpus=1).cards[0]
    cards = fleet.add("gpu-002", gpus=3, health=True).cards
    cards[0].health["recovery_action"] = cards[1].health["recovery_action"] = None
    cards[2].state = "hung"
    fleet.why_null(cards[0], "gpu_health", "recovery_action")
    fleet.why_null(cards[1], "gpu_health", "recovery_action", reason="failed")
    fleet.run(60, judge, every=20)
    assert fleet.find(RULE, old.entity)[:2] == ("n/a", "no_probe")
    assert [fleet.find(RULE, card.entity)[:2] for card in cards] == [
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "hung"),
    ]
    assert fleet.findings() == []


@pytest.mark.drill("recovery_action", "near_miss")
def test_a_wish_that_was_withdrawn_before_anybody_looked_is_none(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    card.health["recovery_action"] = "gpu_reset"
    fleet.run(60)
    card.health["recovery_action"] = "none"
    fleet.run(60)
    fleet.run(60, judge, every=30)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    assert fleet.findings() == []
