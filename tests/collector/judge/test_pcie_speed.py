"""Rule pcie_speed: a link that stays slow while the card works; an idle one may be slow."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit
from gpufleet_collector.rules import load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

RULE = "pcie_speed"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def link(gen: int | None, gen_max: int | None = 5) -> "dict[str, Cell]":
    return {"pcie_gen": gen, "pcie_gen_max": gen_max}


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(2 * count):
        fleet.run(25)
        fleet.run(5, judge)


@pytest.mark.drill("pcie_speed", "fires")
def test_a_slow_link_under_load_fires_and_clears(fleet: "Fleet", judge: Judge) -> None:
    slow, slower, well = fleet.add("gpu-001", gpus=3).cards
    slow.link, slower.link, well.link = link(4), link(1), link(5)
    minutes(fleet, judge, 3)
    assert fleet.findings() == [
        ("gpu-001", slow.entity, "firing", "warn", "slow_link"),
        ("gpu-001", slower.entity, "firing", "crit", "slow_link"),
    ]
    reason = fleet.find(RULE, slow.entity)[3]
    assert reason == f"PCIe generation 4 of 5 at {slow.pci} under load (12 of 12 samples)"
    slow.util = 0.0  # keeps firing until it works again
    slower.link = link(5)
    minutes(fleet, judge, 6)
    assert [row[1:3] for row in fleet.findings()] == [(slow.entity, "firing")]


CASES: "tuple[tuple[float | None, dict[str, Cell], dict[str, Cell], tuple[str, str]], ...]" = (
    (0.0, link(1), {}, ("n/a", "idle")),
    (49.0, link(1), {}, ("n/a", "idle")),
    (95.0, link(1) | {"pstate": 8}, {}, ("n/a", "idle")),  # the mean of a card that just went to sleep
    (50.0, link(4), {}, ("warn", "slow_link")),
    (95.0, link(5, 6), {}, ("ok", "full_speed")),  # made for a faster slot; the bus says what both can do
    (95.0, link(5, 5), {"path_gen_max": 6}, ("ok", "full_speed")),
    (
        95.0,
        link(4, 5),
        {"path_gen": 4, "path_gen_max": 4},
        ("ok", "full_speed"),
    ),  # behind a slower switch
    (95.0, link(5), {"path_gen": 4, "slowest": "0000:01:00.0"}, ("warn", "slow_uplink")),
    (0.0, link(5), {"path_gen": 4, "slowest": "0000:01:00.0"}, ("n/a", "idle")),
    (95.0, link(None, None), {}, ("ok", "full_speed")),  # the bus tells instead
    (95.0, link(None, None), {"path_gen": 3}, ("crit", "slow_link")),
    (95.0, link(None, None), {"path_gen": None}, ("unknown", "unreadable")),
    (95.0, link(4, None), {"path_gen_max": None, "pcie_gen_max": None}, ("n/a", "not_told")),
    (None, link(1), {}, ("unknown", "unreadable")),
)


def test_what_is_judged(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=len(CASES)).cards
    for card, (util, said, bus, _) in zip(cards, CASES, strict=True):
        card.util, card.link, card.bus = util, said, bus
    fleet.run(75)
    for card, case in zip(cards, CASES, strict=True):
        assert fleet.find(RULE, card.entity)[:2] == case[3], case


@pytest.mark.drill("pcie_speed", "near_miss")
def test_one_slow_sample_and_short_work(fleet: "Fleet", judge: Judge) -> None:
    once, short = fleet.add("gpu-001", gpus=2).cards

    def play(fleet: "Fleet") -> None:
        once.link = link(1 if fleet.at.second == 30 else 5)
        short.util = 95.0 if fleet.at.second in (30, 35) else 0.0
        short.link = link(1)

    fleet.each_tick = play
    minutes(fleet, judge, 3)
    assert fleet.find(RULE, once.entity)[:2] == ("ok", "full_speed")
    assert fleet.find(RULE, short.entity)[:2] == ("n/a", "idle")
    assert fleet.findings() == []


@pytest.mark.parametrize("util", [0.0, 30.0])
def test_A01_an_idle_card_at_generation_1_is_not_judged_and_its_working_twin_is_well(
    fleet: "Fleet", judge: Judge, util: float
) -> None:
    idle, busy = fleet.add("gpu-001", gpus=2).cards
    idle.util, idle.link = util, link(1, 4) | {"pstate": 8}
    idle.bus = {"pcie_gen": 1, "pcie_gen_max": 4, "path_gen": 1, "path_gen_max": 4}
    busy.link = link(4, 4)
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, idle.entity)[:2] == ("n/a", "idle")
    assert fleet.find(RULE, busy.entity)[:2] == ("ok", "full_speed")
    assert fleet.findings() == []


@pytest.mark.drill("pcie_speed", "not_judged")
def test_split_unified_hung_and_silent_cards(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    split, unified, hung, well = node.cards
    for card in node.cards:
        card.link = link(1)
    split.util = None
    fleet.why_null(split, "gpu", "util_pct")
    fleet.why_null(unified, "gpu", "pcie_gen")
    hung.state = "hung"
    fleet.run(75)
    assert fleet.find(RULE, split.entity)[:2] == ("n/a", "no_load_known")
    assert fleet.find(RULE, unified.entity)[:2] == ("n/a", "not_supported")
    assert fleet.find(RULE, hung.entity)[:2] == ("unknown", "hung")
    assert fleet.find(RULE, well.entity)[1] == "slow_link"
    node.up = False
    fleet.at += timedelta(minutes=10)
    assert fleet.find(RULE, well.entity)[:2] == ("unknown", "no_samples")


def test_devices_without_a_load_are_held_against_their_best(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=0)
    for number, (kind, gen) in enumerate(
        (("hca", 4), ("nvswitch", 4), ("hca", 5), ("hca", None), ("gpu", 1))
    ):
        node.devices.append(
            {"pci": f"0000:9{number}:00.0", "device_kind": kind, "path_gen": gen, "pcie_gen": gen}
        )
    for number, best in enumerate((5, 4, 5, 5)):
        fleet.learn("gpu-001", f"0000:9{number}:00.0", path_gen_best=best)
    node.devices.append({"pci": "0000:a0:00.0", "device_kind": "hca"})
    fleet.run(60, judge, every=20)
    found = [fleet.find(RULE, f"pci:{device['pci']}")[:2] for device in node.devices]
    assert found == [
        ("warn", "slow_link"),
        ("ok", "full_speed"),
        ("ok", "full_speed"),
        ("unknown", "unreadable"),
        ("n/a", "no_load_known"),
        ("n/a", "not_learned"),
    ]


def test_what_is_declared_wins(fleet: "Fleet") -> None:
    settings = JudgeSettings(limit={RULE: {"generation": Limit(value=3)}})
    fleet.judge = Judge(fleet.store, settings, rules=[rule for rule in load_rules() if rule.name == RULE])
    forced, lost = fleet.add("gpu-001", gpus=2).cards
    forced.link, lost.link = link(3), link(2)
    forced.bus, lost.bus = {"path_gen": 3}, {"path_gen": 2}
    fleet.run(75)
    assert fleet.find(RULE, forced.entity)[:2] == ("ok", "full_speed")
    assert fleet.find(RULE, lost.entity)[:2] == ("warn", "slow_link")


@pytest.mark.parametrize("by", ["bus", "driver"])
def test_the_other_source_does_not_refute_what_is_not_read(fleet: "Fleet", judge: Judge, by: str) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    card.link, card.bus = link(5), {}
    if by == "bus":
        card.bus = {"path_gen": 4, "slowest": "0000:01:00.0"}
    else:
        card.link = link(4)
    minutes(fleet, judge, 4)
    before = fleet.findings()
    assert [row[2] for row in before] == ["firing"]
    if by == "bus":
        card.on_bus = False
    else:
        card.link = link(None)
    minutes(fleet, judge, 8)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
