"""Rule pcie_errors: errors that grow, at the device, at the port above it, or by the card's own counts."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, RuleOverride
from gpufleet_collector.rules import load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

RULE = "pcie_errors"
AER = ("aer_corrected_total", "port_aer_corrected_total")
OWN = ("pcie_replay_total", "pcie_correctable_total")


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(count):
        fleet.run(60, judge, every=30)


def say(said: "dict[str, Cell]", name: str, *, grow: int) -> None:
    said[name] = int(str(said.get(name, 0))) + grow


GROWTH = (
    ("bus", "aer_fatal_total", 1, ("crit", "fatal")),
    ("bus", "port_aer_fatal_total", 1, ("crit", "fatal")),
    ("health", "pcie_fatal_total", 1, ("crit", "fatal")),
    ("bus", "aer_nonfatal_total", 2, ("warn", "nonfatal")),
    ("bus", "port_aer_nonfatal_total", 2, ("warn", "nonfatal")),
    ("health", "pcie_nonfatal_total", 1, ("warn", "nonfatal")),
    ("bus", "aer_corrected_total", 31, ("warn", "corrected")),
    ("bus", "port_aer_corrected_total", 31, ("warn", "corrected")),
    ("health", "pcie_correctable_total", 31, ("warn", "corrected")),
    ("health", "pcie_replay_total", 32, ("warn", "replays")),
    ("bus", "aer_corrected_total", 30, ("ok", "few")),
    ("health", "pcie_replay_total", 31, ("ok", "few")),  # what NVIDIA accepts on 16 lanes of generation 5
)


def test_what_grows(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=len(GROWTH), health=True).cards
    said = [
        card.bus if where == "bus" else card.health for card, (where, *_) in zip(cards, GROWTH, strict=True)
    ]
    for one, (_, name, _, _) in zip(said, GROWTH, strict=True):
        say(one, name, grow=1_000_000)  # what there was before is no growth
    fleet.run(5)
    assert {fleet.find(RULE, card.entity)[:2] for card in cards} == {("ok", "few")}
    for one, (_, name, grow, _) in zip(said, GROWTH, strict=True):
        say(one, name, grow=grow)
    fleet.run(55)
    for card, (_, name, _, verdict) in zip(cards, GROWTH, strict=True):
        assert fleet.find(RULE, card.entity)[:2] == verdict, name


@pytest.mark.drill("pcie_errors", "fires")
def test_a_rate_fires_names_the_port_and_clears(fleet: "Fleet") -> None:
    quick = JudgeSettings(rule={RULE: RuleOverride(clear_after="1m")})
    judge = fleet.judge = Judge(
        fleet.store, quick, rules=[rule for rule in load_rules() if rule.name == RULE]
    )
    card = fleet.add("gpu-001", gpus=1).cards[0]

    def grow(fleet: "Fleet") -> None:
        say(card.bus, "port_aer_corrected_total", grow=10)
        say(card.bus, "aer_corrected_total", grow=1 if fleet.at.second == 0 else 0)
        card.bus["port_aer_errors"] = "corrected BadTLP 7"

    fleet.run(60)
    fleet.each_tick = grow
    minutes(fleet, judge, 1)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    minutes(fleet, judge, 1)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "corrected")]
    verdict, _, at, reason = fleet.find(RULE, card.entity)
    assert (verdict, at) == ("warn", fleet.at)
    assert reason == (
        "2 corrected at the device, 240 corrected at the upstream port 0000:0f:01.0 in five minutes"
    )
    fleet.each_tick = lambda fleet: None
    minutes(fleet, judge, 7)
    assert fleet.findings() == []


def test_one_fatal_error_fires_at_once(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=0)
    hca: dict[str, Cell] = {"pci": "0000:90:00.0", "device_kind": "hca"}
    node.devices.append(hca)
    minutes(fleet, judge, 1)
    hca["aer_fatal_total"] = 1
    minutes(fleet, judge, 1)
    assert fleet.findings() == [("gpu-001", "pci:0000:90:00.0", "firing", "crit", "fatal")]


@pytest.mark.drill("pcie_errors", "near_miss")
def test_resets_reboots_and_bad_samples_are_no_burst(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=5, health=True)
    reset, spike, reloaded, rebooted, dip = node.cards
    reset.bus["aer_corrected_total"] = 5000
    reloaded.health["pcie_replay_total"] = 9000
    rebooted.bus["aer_nonfatal_total"] = 3
    dip.bus["aer_fatal_total"] = 70
    minutes(fleet, judge, 1)
    reset.bus["aer_corrected_total"] = 2
    spike.bus["aer_corrected_total"] = 10**9
    dip.bus["aer_fatal_total"] = 0
    reloaded.epoch, reloaded.health["pcie_replay_total"] = 2, 9500
    fleet.run(60)
    spike.bus["aer_corrected_total"] = 0
    dip.bus["aer_fatal_total"] = 70
    minutes(fleet, judge, 1)
    for card in (reset, spike, reloaded, dip):
        assert fleet.find(RULE, card.entity)[:2] == ("ok", "few")
    node.boot_id, node.booted_at = "boot-2", fleet.at
    rebooted.bus["aer_nonfatal_total"] = 400  # counted while it booted
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, rebooted.entity)[:2] == ("ok", "few")
    assert fleet.findings() == []


def test_replays_are_measured_by_the_speed_and_width_of_the_link(fleet: "Fleet", judge: Judge) -> None:
    fast, slow = fleet.add("gpu-001", gpus=2, health=True).cards
    slow.bus |= {"pcie_gen": 3, "pcie_width": 8}
    fleet.run(5)
    for card in (fast, slow):
        card.health["pcie_replay_total"] = 5
    fleet.run(55)
    assert fleet.find(RULE, fast.entity)[:2] == ("ok", "few")
    assert fleet.find(RULE, slow.entity)[:2] == ("warn", "replays")


@pytest.mark.drill("pcie_errors", "not_judged")
def test_not_supported_unreadable_and_silent(fleet: "Fleet", judge: Judge) -> None:
    old, broken, half, own = fleet.add("gpu-001", gpus=4).cards
    other = fleet.add("gpu-002", gpus=1, health=True)
    for card in (old, broken, half):
        card.bus |= dict.fromkeys(AER)
    half.bus["port_aer_corrected_total"] = 0
    own = other.cards[0]
    own.bus |= dict.fromkeys(AER)
    fleet.run(60)
    with fleet.store.transaction() as write:
        for card in (old, own):
            write.executemany(
                "INSERT INTO live.capability VALUES (?, ?, 'pci', ?, 'not_supported', '', ?)",
                [[card.node, f"pci:{card.pci}", name, fleet.at] for name in AER],
            )
    assert fleet.find(RULE, old.entity)[:2] == ("n/a", "not_supported")
    assert fleet.find(RULE, broken.entity)[:2] == ("unknown", "unreadable")
    assert fleet.find(RULE, half.entity)[:2] == ("ok", "few")
    assert fleet.find(RULE, own.entity)[:2] == ("ok", "few"), "its own counts are enough"
    other.up = False
    fleet.at += timedelta(minutes=10)
    assert fleet.find(RULE, own.entity)[:2] == ("unknown", "no_samples")


@pytest.mark.parametrize(
    ("source", "name", "code"),
    [("health", "pcie_replay_total", "replays"), ("bus", "aer_corrected_total", "corrected")],
)
@pytest.mark.parametrize("stops", ["rows", "column"])
def test_what_is_not_read_clears_nothing(
    fleet: "Fleet", judge: Judge, source: str, name: str, code: str, stops: str
) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]
    said = card.health if source == "health" else card.bus

    def grow(fleet: "Fleet") -> None:
        say(said, name, grow=10)

    minutes(fleet, judge, 1)
    fleet.each_tick = grow
    minutes(fleet, judge, 3)
    firing = ("gpu-001", card.entity, "firing", "warn", code)
    assert fleet.findings() == [firing]
    fleet.each_tick = lambda fleet: None
    total = said[name]
    if stops == "column":
        said[name] = None
    elif source == "health":
        fleet.nodes["gpu-001"].health = False
    else:
        card.on_bus = False
    minutes(fleet, judge, 6)
    verdict, found, _, reason = fleet.find(RULE, card.entity)
    assert (verdict, found) == ("unknown", "not_read")
    probe = "gpu_health" if source == "health" else "pci"
    assert reason == f"what it was found by is not read: {probe}.{name}"
    minutes(fleet, judge, 20)
    assert fleet.findings() == [firing]
    said[name], fleet.nodes["gpu-001"].health, card.on_bus = total, True, True
    minutes(fleet, judge, 18)
    assert fleet.findings() == []


def test_a_source_that_the_card_has_no_more_holds_nothing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]

    def grow(fleet: "Fleet") -> None:
        say(card.health, "pcie_replay_total", grow=10)

    minutes(fleet, judge, 1)
    fleet.each_tick = grow
    minutes(fleet, judge, 3)
    fleet.each_tick = lambda fleet: None
    card.health["pcie_replay_total"] = None
    minutes(fleet, judge, 6)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    fleet.why_null(card, "gpu_health", "pcie_replay_total")
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "few")


def test_another_source_that_finds_too_does_not_stand_in(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1, health=True).cards[0]

    def replays(fleet: "Fleet") -> None:
        say(card.health, "pcie_replay_total", grow=10)

    def corrected(fleet: "Fleet") -> None:
        say(card.bus, "aer_corrected_total", grow=10)

    minutes(fleet, judge, 1)
    fleet.each_tick = replays
    minutes(fleet, judge, 3)
    card.health["pcie_replay_total"] = None
    fleet.each_tick = corrected
    minutes(fleet, judge, 8)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "corrected")]
    fleet.each_tick = lambda fleet: None
    minutes(fleet, judge, 8)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
