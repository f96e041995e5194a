"""Rule nvlink_down: fewer NVLinks up than a card has shown or its site declared."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit, Scope
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet, Node

RULE = "nvlink_down"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def describe(fleet: "Fleet", node: "Node") -> None:
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.probe (node, probe, interval_s) VALUES (?, 'nvlink', 30)", [node.name]
        )


def shown(fleet: "Fleet", card: "Card", active: int) -> None:
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET attributes = ? WHERE entity = ?",
            [json.dumps({"nvlinks": "18", "nvlinks_active": str(active)}), card.entity],
        )


def sample(
    fleet: "Fleet", card: "Card", active: int | None, links: int | None = 18, *, epoch: int = 1
) -> None:
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.nvlink (ts, received_at, node, boot_id, gpu_uuid, gpu_index, pci, state, "
            "links, links_active, links_up, driver_epoch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                fleet.at, fleet.at, card.node, fleet.nodes[card.node].boot_id, card.uuid, card.index,
                card.pci, card.state, links, active, None if active is None else (1 << active) - 1, epoch,
            ],
        )  # fmt: skip


def polls(fleet: "Fleet", judge: Judge, card: "Card", active: Sequence[int | None], epoch: int = 1) -> None:
    """One sweep each 30 s, and a pass after each."""
    for count in active:
        fleet.at += timedelta(seconds=25)
        fleet.run(5)
        sample(fleet, card, count, epoch=epoch)
        judge.run_pass(fleet.at)


def one(fleet: "Fleet", expect: str | None = "accepted", best: int = 18) -> "Card":
    node = fleet.add("gpu-001", gpus=1, expect=expect)
    describe(fleet, node)
    if best >= 0:
        shown(fleet, node.cards[0], best)
    return node.cards[0]


def fired(fleet: "Fleet") -> list[str]:
    return [str(row[4]) for row in fleet.findings() if row[2] == "firing"]


@pytest.mark.parametrize(
    ("best", "active", "links", "expected"),
    [
        (0, 0, 12, ("n/a", "not_judged")),  # A100 80GB PCIe without a bridge
        (12, 12, 18, ("ok", "up")),  # H100 NVL, bridged
        (-1, None, None, ("n/a", "no_links")),  # RTX 3090: not supported
        (18, 18, 18, ("ok", "up")),
        (18, 17, 18, ("crit", "some_down")),
        (18, 0, 18, ("crit", "all_down")),
        (12, 11, 18, ("crit", "some_down")),
        (4, 18, 18, ("ok", "up")),
        (18, None, 18, ("unknown", "unreadable")),
    ],
)
def test_F01_links_are_down_by_design_or_by_fault(
    fleet: "Fleet", judge: Judge, best: int, active: int | None, links: int | None, expected: tuple[str, str]
) -> None:
    card = one(fleet, best=best)
    if links is None:
        fleet.why_null(card, "nvlink", "links_active")
    fleet.run(5)
    sample(fleet, card, active, links)
    assert fleet.find(RULE, card.entity)[:2] == expected


def test_F01_without_an_expectation_the_links_are_shown_and_not_judged(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet, expect=None)
    fleet.run(5)
    sample(fleet, card, 9)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "not_judged")
    shown(fleet, card, 0)
    polls(fleet, judge, card, [0, 0, 0, 0])  # learned with the first pass
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "not_judged")
    assert fleet.findings() == []


def test_F01_a_declared_number_counts_before_what_was_shown(store: Store, fleet: "Fleet") -> None:
    model = {"NVIDIA H100 80GB HBM3": Scope(limit={RULE: {"links": Limit(value=18)}})}
    chosen = [rule for rule in load_rules() if rule.name == RULE]
    fleet.judge = Judge(store, JudgeSettings(model=model), rules=chosen)
    card = one(fleet, best=0)
    polls(fleet, fleet.judge, card, [0, 0, 0])
    assert fired(fleet) == ["all_down"]


@pytest.mark.parametrize("counts", [[0, 9, 18, 18], [0, 0, 0, 0, 18]])
@pytest.mark.drill("nvlink_down", "near_miss")
def test_F03_links_train_after_a_boot(fleet: "Fleet", judge: Judge, counts: list[int]) -> None:
    card = one(fleet)
    fleet.nodes["gpu-001"].booted_at = fleet.at - timedelta(seconds=10)
    polls(fleet, judge, card, counts)
    assert fleet.findings() == []


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ([0, 0, 0], "all_down"),
        ([17, None, 17, 17], "some_down"),
        ([17, 18, 17, 18, 17], "some_down"),  # one link flaps
        ([None, 17, None, 17, None, 17], "some_down"),
    ],
)
def test_F03_three_sweeps_are_a_fault(
    fleet: "Fleet", judge: Judge, counts: "list[int | None]", code: str
) -> None:
    card = one(fleet)
    polls(fleet, judge, card, counts[:-1])
    assert fired(fleet) == []
    polls(fleet, judge, card, counts[-1:])
    assert fired(fleet) == [code]
    polls(fleet, judge, card, [None, None, None])
    assert fired(fleet) == [code], "what cannot be read clears nothing"
    polls(fleet, judge, card, [18] * 11)
    assert fleet.findings() == []


@pytest.mark.parametrize("counts", [[17], [17, 17], [17, 18, 18, 18, 18, 17], [None] * 5])
def test_F03_fewer_are_none(fleet: "Fleet", judge: Judge, counts: "list[int | None]") -> None:
    card = one(fleet)
    polls(fleet, judge, card, counts)
    assert fired(fleet) == []


def test_F03_links_train_after_the_driver_was_started_anew(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    polls(fleet, judge, card, [18, 18])
    polls(fleet, judge, card, [0, 0, 9, 17], epoch=2)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "training")
    assert fleet.findings() == []
    polls(fleet, judge, card, [17] * 10, epoch=2)
    assert fired(fleet) == ["some_down"]


def split(fleet: "Fleet") -> "Node":
    """A node whose card had links until MIG split it."""
    node = fleet.add("gpu-001", gpus=1, health=True)
    describe(fleet, node)
    card = node.cards[0]
    shown(fleet, card, 12)
    card.health["mig_enabled"] = True
    fleet.run(60)
    return node


@pytest.mark.drill("nvlink_down", "not_judged")
def test_a_split_card_has_no_links(fleet: "Fleet", judge: Judge) -> None:
    card = split(fleet).cards[0]
    sample(fleet, card, 0)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "mig")


def test_a_split_card_stays_split_while_its_health_is_not_read(fleet: "Fleet", judge: Judge) -> None:
    node = split(fleet)
    card = node.cards[0]
    node.health = False
    polls(fleet, judge, card, [0] * 20)
    assert fleet.findings() == []


def test_no_probe_no_samples_no_answer(fleet: "Fleet", judge: Judge) -> None:
    plain = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.run(5)
    assert fleet.find(RULE, plain.entity)[:2] == ("n/a", "no_probe")
    node = fleet.add("gpu-002", gpus=2)
    describe(fleet, node)
    lost, late = node.cards
    lost.state = "lost"
    sample(fleet, lost, None)
    sample(fleet, late, 18)
    assert fleet.find(RULE, lost.entity)[:2] == ("unknown", "lost")
    fleet.at += timedelta(seconds=100)
    assert fleet.find(RULE, late.entity)[:2] == ("unknown", "no_samples")


@pytest.mark.drill("nvlink_down", "fires")
def test_the_links_that_are_down_are_named(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    polls(fleet, judge, card, [16, 16, 16])
    (found,) = fleet.sql("SELECT detail->>'$.inactive', reason FROM finding")
    assert found == ("[16,17]", "16 links are up, 18 should be")


def test_F01_a_bridge_that_was_taken_out_is_expected_once_the_inventory_is_accepted(
    fleet: "Fleet", judge: Judge
) -> None:
    card = one(fleet)
    fleet.run(5)
    with fleet.store.transaction() as write:  # the agent was restarted: the best it has shown is 12 now
        write.execute("UPDATE live.inventory SET valid_to = ? WHERE entity = ?", [fleet.at, card.entity])
    fleet.install(card, fleet.at)
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET attributes = ? WHERE entity = ? AND valid_to IS NULL",
            [json.dumps({"nvlinks_active": "12"}), card.entity],
        )
    sample(fleet, card, 12)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "some_down")
    fleet.run(5)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.expected SET set_at = ?", [fleet.at])
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "up")
