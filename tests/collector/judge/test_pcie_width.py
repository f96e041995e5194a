"""Rule pcie_width: a link that lost lanes, judged by what both ends can do and by what it ever showed."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit, Scope
from gpufleet_collector.rules import load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

RULE = "pcie_width"
UPLINK = "0000:01:00.0"
LOST = "narrow_link"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def best(fleet: "Fleet", pci: str, own: int = 16, way: int = 16) -> None:
    fleet.learn("gpu-001", pci, pcie_width_best=own, path_width_best=way)


def narrow(lanes: int | None) -> "dict[str, Cell]":
    return {"pcie_width": lanes, "path_width": lanes}


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(count):
        fleet.run(60, judge, every=30)


@pytest.mark.drill("pcie_width", "fires")
def test_a_link_that_lost_lanes_fires_and_clears(fleet: "Fleet", judge: Judge) -> None:
    half, quarter, well = fleet.add("gpu-001", gpus=3).cards
    for card in (half, quarter, well):
        best(fleet, card.pci)
    minutes(fleet, judge, 1)
    assert fleet.find(RULE, half.entity)[:2] == ("ok", "wide")
    half.bus, quarter.bus = narrow(8), narrow(4)
    minutes(fleet, judge, 1)
    assert {row[2] for row in fleet.findings()} == {"pending"}, "one sample is none"
    minutes(fleet, judge, 1)
    assert fleet.findings() == [
        ("gpu-001", half.entity, "firing", "warn", "narrow_link"),
        ("gpu-001", quarter.entity, "firing", "crit", "narrow_link"),
    ]
    reason = fleet.find(RULE, half.entity)[3]
    assert reason == f"8 of 16 lanes between {half.pci} and the port above it, 0000:0f:01.0"
    half.bus, quarter.bus = {}, {}
    minutes(fleet, judge, 4)
    assert fleet.findings() == []


def test_a_narrow_uplink_names_the_switch(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=1)
    card = node.cards[0]
    hca: dict[str, Cell] = {"pci": "0000:90:00.0", "device_kind": "hca"}
    node.devices.append(hca)
    for pci in (card.pci, "0000:90:00.0"):
        best(fleet, pci)
    card.bus = {"path_width": 8, "narrowest": UPLINK}
    hca |= card.bus
    minutes(fleet, judge, 2)
    assert [row[1:] for row in fleet.findings()] == [
        (card.entity, "firing", "warn", "narrow_uplink"),
        ("pci:0000:90:00.0", "firing", "warn", "narrow_uplink"),
    ]
    assert UPLINK in fleet.find(RULE, card.entity)[3]


CASES: "tuple[tuple[tuple[int, int], dict[str, Cell], str], ...]" = (
    # handed to a virtual machine
    ((8, 8), narrow(8), "narrow_as_ever"),
    # a switch with a narrow uplink
    ((16, 8), {"path_width": 8, "narrowest": UPLINK}, "narrow_as_ever"),
    ((16, 8), {"path_width": 8, "path_width_max": 8, "narrowest": UPLINK}, "wide"),
    # another board, which has no more
    ((16, 16), {"path_width": 8, "pcie_width": 8, "pcie_width_max": 8, "path_width_max": 8}, "wide"),
    # more than ever
    ((8, 8), {}, "wide"),
    # an older kernel does not say what is possible
    ((16, 16), {"pcie_width": 8, "path_width": 8, "pcie_width_max": None, "path_width_max": None}, LOST),
    # its own link, though the switch's hides it
    ((16, 8), {"pcie_width": 8, "path_width": 8, "path_width_max": 8}, LOST),
    # an older agent
    ((16, 16), {"pcie_width": 8, "path_width": None, "path_links": None}, LOST),
    # a switch trains its uplink anew
    ((16, 16), {"path_width": None}, "unreadable"),
    ((16, 16), narrow(None), "unreadable"),
    ((16, 16), narrow(None) | {"present": False}, "no_answer"),
    ((16, 16), narrow(None) | {"runtime_status": "suspended"}, "suspended"),
)


@pytest.mark.drill("pcie_width", "not_judged")
def test_by_design_and_unknown(fleet: "Fleet", judge: Judge) -> None:
    cards = fleet.add("gpu-001", gpus=len(CASES)).cards
    for card, (shown, said, _) in zip(cards, CASES, strict=True):
        best(fleet, card.pci, *shown)
        card.bus = said
    fleet.run(5)
    verdicts = {"wide": "ok", "narrow_as_ever": "ok", LOST: "warn", "suspended": "n/a"}
    for card, (_, said, code) in zip(cards, CASES, strict=True):
        assert fleet.find(RULE, card.entity)[:2] == (verdicts.get(code, "unknown"), code), said


@pytest.mark.drill("pcie_width", "near_miss")
def test_one_bad_sample_and_a_flapping_link_between_samples(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    best(fleet, card.pci)
    for lanes in (16, 4, 16, 16, 1, 16):
        card.bus = narrow(lanes)
        minutes(fleet, judge, 1)
        assert "firing" not in {row[2] for row in fleet.findings()}


def test_accepting_the_inventory_accepts_what_it_shows(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.inventory (node, entity, kind, attributes, valid_from, valid_to) VALUES "
            '(\'gpu-001\', ?, \'pci\', \'{"pcie_width_best": "16", "path_width_best": "16"}\', ?, ?)',
            [f"pci:{card.pci}", fleet.at - timedelta(days=9), fleet.at - timedelta(days=2)],
        )
    fleet.learn("gpu-001", card.pci, fleet.at - timedelta(days=2), pcie_width_best=8, path_width_best=8)
    card.bus = narrow(8)
    fleet.run(5)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "narrow_as_ever")


@pytest.fixture
def declared(fleet: "Fleet") -> Judge:
    settings = JudgeSettings(
        node={"gpu-001": Scope(limit={RULE: {"lanes": Limit(value=16)}})},
        limit={RULE: {"lanes": Limit(value=8)}},
    )
    fleet.judge = Judge(fleet.store, settings, rules=[rule for rule in load_rules() if rule.name == RULE])
    return fleet.judge


def test_what_is_declared_for_cards_wins(fleet: "Fleet", declared: Judge) -> None:
    low = fleet.add("gpu-001", gpus=1)
    low.devices.append({"pci": "0000:90:00.0", "device_kind": "nvswitch", **narrow(2)})
    high = fleet.add("gpu-002", gpus=1)
    for node in (low, high):
        node.cards[0].bus = narrow(8)
        fleet.learn(node.name, node.cards[0].pci, pcie_width_best=8, path_width_best=8)
    fleet.learn("gpu-001", "0000:90:00.0", pcie_width_best=2, path_width_best=2)
    fleet.run(5)
    assert fleet.find(RULE, low.cards[0].entity)[:2] == ("warn", "narrow_link")
    assert fleet.find(RULE, high.cards[0].entity)[1] == "narrow_as_ever"
    assert fleet.find(RULE, "pci:0000:90:00.0")[:2] == ("ok", "narrow_as_ever")


def test_whose_link_it_is(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    moved, swapped, handed, unified = node.cards
    for card in node.cards:
        best(fleet, card.pci)
    best(fleet, "0000:77:00.0", 8, 8)
    moved.bus = {"pci": "0000:77:00.0", "gpu_uuid": moved.uuid, **narrow(8)}
    swapped.bus = {"gpu_uuid": "GPU-another", **narrow(8)}
    handed.bus = narrow(8)
    unified.bus = {"pcie_width": 1, "path_width": 1}
    fleet.why_null(unified, "gpu", "pcie_width")
    fleet.run(5)
    assert fleet.find(RULE, moved.entity)[:2] == ("ok", "narrow_as_ever"), "another slot, another expectation"
    assert fleet.find(RULE, f"pci:{swapped.pci}")[:2] == ("warn", "narrow_link")
    assert fleet.find(RULE, handed.entity)[1] == "narrow_link"
    assert fleet.find(RULE, unified.entity)[:2] == ("n/a", "not_supported")


def test_where_the_bus_tells_nothing_the_driver_does(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    card.on_bus = False
    card.link = {"pcie_width": 8, "pcie_width_max": 16}
    fleet.run(10)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "not_learned")
    best(fleet, card.pci)
    assert fleet.find(RULE, card.entity)[:2] == ("warn", "narrow_link")
    fleet.nodes["gpu-001"].up = False
    fleet.at += timedelta(minutes=10)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "no_samples")


def test_the_driver_does_not_refute_what_the_bus_found(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    card.link = {"pcie_width": 16, "pcie_width_max": 16}
    best(fleet, card.pci)
    card.bus = {"path_width": 8, "narrowest": UPLINK}
    minutes(fleet, judge, 3)
    before = fleet.findings()
    assert [row[4] for row in before] == ["narrow_uplink"]
    card.on_bus = False
    minutes(fleet, judge, 10)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
