"""Rule xid: what the driver wrote to the kernel log."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE = "xid"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, "gpu_missing", "ecc_uncorrectable")


def xid(fleet: "Fleet", card: "Card", code: str, severity: str, at: datetime | None = None) -> None:
    fleet.event(
        fleet.nodes[card.node], "xid", code, f"pci:{card.pci}", at=at, uuid=card.uuid,
        severity=severity, action="reset_gpu", name="SOMETHING", scope="gpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("severity", "found"),
    [
        pytest.param("info", [], marks=pytest.mark.drill("xid", "near_miss")),
        ("warning", ["warn"]),
        ("critical", ["crit"]),
        ("fault", ["crit"]),
    ],
)
def test_words_of_the_catalogue(fleet: "Fleet", judge: Judge, severity: str, found: list[str]) -> None:
    card = fleet.add("gpu-001", gpus=2).cards[1]
    fleet.run(10, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    xid(fleet, card, "48", severity)
    fleet.run(5, judge)
    assert [row[3] for row in fleet.findings()] == found
    if found:
        assert "Xid 48 SOMETHING" in fleet.find(RULE, card.entity)[3]
        assert "reset_gpu" in fleet.find(RULE, card.entity)[3]


def test_a_storm_is_one_finding_and_is_counted(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    card = node.cards[1]
    fleet.run(10, judge)
    for second in range(40):
        xid(fleet, card, "31", "warning", at=fleet.at - timedelta(seconds=40 - second))
    fleet.event(node, "xid", "31", f"pci:{card.pci}", count=500, severity="warning")  # folded by the agent
    xid(fleet, card, "31", "warning", at=fleet.at - timedelta(hours=30))  # yesterday
    fleet.run(10, judge)
    assert fleet.sql("SELECT observed, count(*) OVER (), json_array_length(evidence) FROM finding") == [
        (540.0, 1, 1)
    ]
    assert "540 times" in fleet.find(RULE, card.entity)[3]
    assert len(fleet.incidents()) == 1


@pytest.mark.drill("xid", "fires")
def test_a_warning_is_news_for_an_hour(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.run(10, judge)
    xid(fleet, card, "31", "warning")
    fleet.run(10, judge)
    assert [row[2:4] for row in fleet.findings()] == [("firing", "warn")]
    fleet.at += timedelta(hours=1)
    fleet.run(10, judge)
    assert fleet.findings() == []


def test_a_fatal_error_stays_for_days(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.run(10, judge)
    xid(fleet, card, "79", "critical")
    fleet.run(10, judge)
    fleet.at += timedelta(days=3)
    fleet.run(10, judge)
    assert [row[2:4] for row in fleet.findings()] == [("firing", "crit")]
    xid(fleet, card, "31", "warning")
    fleet.run(10, judge)
    assert "Xid 79" in fleet.find(RULE, card.entity)[3], "the worst names it, not the newest"
    assert fleet.find(RULE, card.entity)[0] == "crit"


@pytest.mark.parametrize("evidence", ["reboot", "driver", "wants_nothing", "answers_again"])
def test_evidence_ends_a_fatal_error(fleet: "Fleet", judge: Judge, evidence: str) -> None:
    node = fleet.add("gpu-001", gpus=2)
    card, other = node.cards
    fleet.run(10, judge)
    for one in (card, other):
        xid(fleet, one, "79", "critical")
    fleet.run(10, judge)
    assert [row[2] for row in fleet.findings()] == ["firing", "firing"]
    match evidence:
        case "reboot":
            node.boot_id = "boot-2"
        case "driver":
            fleet.event(node, "driver_reloaded", "", "node:")
        case "wants_nothing":
            fleet.event(node, "recovery_action", "none", f"pci:{card.pci}", severity="info", uuid=card.uuid)
        case _:
            fleet.event(node, "gpu_found", "back", card.entity)
    fleet.run(10, judge)
    left = [] if evidence in ("reboot", "driver") else [other.entity]
    assert [row[1] for row in fleet.findings()] == left


def test_a_new_card_or_another_cards_luck_ends_nothing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    card, other = node.cards
    fleet.event(node, "driver_reloaded", "", "node:")
    fleet.run(10, judge)
    xid(fleet, card, "79", "critical")
    fleet.run(10, judge)
    fleet.event(node, "gpu_found", "new", card.entity)
    fleet.event(node, "gpu_found", "back", other.entity)
    fleet.run(10, judge)
    assert [row[1:3] for row in fleet.findings()] == [(card.entity, "firing")]


def test_late_events_count_only_while_they_are_true(fleet: "Fleet", judge: Judge) -> None:
    warned, fatal, past = fleet.add("gpu-001", gpus=3).cards
    fleet.run(10, judge)
    long_ago = fleet.at - timedelta(hours=30)
    xid(fleet, warned, "31", "warning", at=long_ago)
    xid(fleet, fatal, "48", "critical", at=long_ago)
    fleet.event(
        fleet.nodes["gpu-001"], "xid", "79", f"pci:{past.pci}", at=long_ago, boot_id="boot-0",
        severity="critical", uuid=past.uuid,
    )  # fmt: skip
    fleet.run(10, judge)
    assert [row[1] for row in fleet.findings()] == [fatal.entity], "unresolved on this boot"


def test_xid_79_and_the_missing_card_are_one_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    fleet.run(10, judge)
    xid(fleet, card, "79", "critical")
    fleet.run(5, judge)
    assert [row[1] for row in fleet.incidents()] == [RULE]
    card.state = "lost"
    fleet.run(10, judge)
    assert fleet.incidents() == [(1, "gpu_missing", "gpu-001", card.entity, "open", "crit")]
    assert fleet.sql("SELECT DISTINCT incident, count(*) FROM finding GROUP BY 1") == [(1, 2)]


def test_xid_48_and_the_count_of_errors_are_one_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    fleet.run(60, judge)
    xid(fleet, card, "48", "critical")
    card.health["ecc_uncorrectable_total"] = 1
    fleet.run(60, judge)
    assert [row[1:4] for row in fleet.incidents()] == [(RULE, "gpu-001", card.entity)]
    assert len(fleet.findings()) == 2


def test_other_kinds_and_things_that_are_no_cards(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    started, unread = node.cards
    fleet.event(node, "gpu_init_failed", "power_cable", f"pci:{started.pci}", severity="critical")
    fleet.event(node, "xid_unparsed", "", f"pci:{unread.pci}", severity="warning", message="NVRM: Xid (?)")
    fleet.event(node, "sxid", "20034", "pci:0000:c1:00.0", severity="critical", action="reboot")
    fleet.event(node, "sxid", "11012", "pci:0000:c2:00.0", severity="info")
    fleet.run(10, judge)
    assert sorted(row[1:] for row in fleet.findings()) == sorted([
        (started.entity, "firing", "crit", "gpu_init_failed"),
        (unread.entity, "firing", "warn", "xid_unparsed"),
        ("pci:0000:c1:00.0", "firing", "crit", "sxid"),
    ])  # fmt: skip
    node.boot_id = "boot-2"
    fleet.event(node, "reboot", "", "node:")
    fleet.run(10, judge)
    assert fleet.findings() == []


def test_the_card_is_the_one_the_driver_names(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    card, other = node.cards
    fleet.event(node, "xid", "79", f"pci:{other.pci}", severity="critical", uuid=card.uuid)
    fleet.event(node, "xid", "79", "pci:0000:99:00.0", severity="critical", uuid="GPU-gone")
    fleet.run(10, judge)
    assert [row[1] for row in fleet.findings()] == [card.entity, "pci:0000:99:00.0"]


@pytest.mark.drill("xid", "not_judged")
def test_silent_agent_is_unknown_and_ends_nothing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    card, other = node.cards
    fleet.run(10, judge)
    xid(fleet, card, "79", "critical")
    fleet.run(10, judge)
    node.up = False
    fleet.run(120, judge, every=20)
    assert fleet.find(RULE, other.entity)[:2] == ("unknown", "agent_silent")
    assert [row[1:3] for row in fleet.findings()] == [(card.entity, "firing")]


def test_a_fatal_error_that_comes_late_raises_above_a_newer_warning(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.run(10, judge)
    xid(fleet, card, "31", "warning")
    fleet.run(10, judge)
    assert [row[2:4] for row in fleet.findings()] == [("firing", "warn")]
    xid(fleet, card, "48", "critical", at=fleet.at - timedelta(seconds=60))
    fleet.run(10, judge)
    assert [row[2:4] for row in fleet.findings()] == [("firing", "crit")]
    assert "Xid 48" in fleet.find(RULE, card.entity)[3]
