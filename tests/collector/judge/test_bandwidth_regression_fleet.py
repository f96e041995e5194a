"""Rule bandwidth_regression_fleet: what moves every card is one event of the fleet, and no card's."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "bandwidth_regression_fleet"
MODEL = "domain:model=NVIDIA H100 80GB HBM3"
KEY = "h2d/1/copied_once/ab12/pcie5x16"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, "bandwidth_regression", "bandwidth_regression_host")


def grow(fleet: "Fleet", nodes: int, gpus: int = 8) -> None:
    for number in range(nodes):
        for card in fleet.add(f"gpu-{number:03}", gpus=gpus).cards:
            fleet.baseline(card.node, card.entity, KEY, 55.0, "frozen", spread=0.002)


def round_of(fleet: "Fleet", ratio: float, newer: int = 0, driver: str = "590") -> None:
    """Every card runs; those of the first `newer` nodes with another driver and `ratio` of their speed."""
    for number, node in enumerate(fleet.nodes.values()):
        for card in node.cards:
            new = number < newer
            fleet.bench(card.entity, card.node, 55.0 * (ratio if new else 1), driver=driver if new else "580")
    fleet.at += timedelta(hours=1)


def test_a_driver_that_costs_all_cards_six_percent_is_one_event(fleet: "Fleet", judge: Judge) -> None:
    grow(fleet, 4)
    for newer in (0, 4, 4, 4):
        round_of(fleet, 0.94, newer)
        judge.run_pass(fleet.at)
    assert fleet.findings() == [("", MODEL, "firing", "warn", "fleet_step")]
    assert len(fleet.incidents()) == 1
    _, _, _, reason = fleet.find(RULE, MODEL)
    assert "6.0 % below" in reason
    assert "since driver 590 (before: 580)" in reason
    assert {fleet.find("bandwidth_regression", f"gpu:GPU-gpu-002-{n}")[:2] for n in range(8)} == {
        ("ok", "peers_fell")
    }


def test_half_way_through_a_roll_out_no_card_is_blamed(fleet: "Fleet", judge: Judge) -> None:
    grow(fleet, 8, gpus=4)
    round_of(fleet, 0.94, newer=3)
    assert fleet.find(RULE, MODEL)[:2] == ("warn", "fleet_step")
    assert fleet.find("bandwidth_regression", "gpu:GPU-gpu-001-0")[:2] == ("ok", "peers_fell")


@pytest.mark.parametrize(("ratio", "newer"), [(0.98, 4), (1.06, 4), (0.94, 1), (0.94, 0)])
@pytest.mark.drill("bandwidth_regression_fleet", "near_miss")
def test_less_than_three_percent_or_one_node_is_no_step(
    fleet: "Fleet", judge: Judge, ratio: float, newer: int
) -> None:
    grow(fleet, 4)
    round_of(fleet, ratio, newer)
    assert fleet.find(RULE, MODEL)[:2] == ("ok", "as_before")


def test_a_card_that_lost_more_than_the_others_is_found(fleet: "Fleet", judge: Judge) -> None:
    grow(fleet, 4)
    for _ in range(3):
        round_of(fleet, 0.94, newer=4)
        fleet.bench("gpu:GPU-gpu-001-3", "gpu-001", 55.0 * 0.94 * 0.85, driver="590")
        fleet.at += timedelta(minutes=1)
        judge.run_pass(fleet.at)
    assert [row[:2] for row in fleet.findings() if row[2] == "firing"] == [
        ("", MODEL), ("gpu-001", "gpu:GPU-gpu-001-3")
    ]  # fmt: skip


@pytest.mark.drill("bandwidth_regression_fleet", "not_judged")
def test_too_few_cards_are_no_fleet(fleet: "Fleet", judge: Judge) -> None:
    grow(fleet, 2)
    round_of(fleet, 0.94, newer=2)
    assert fleet.find(RULE, MODEL)[:2] == ("n/a", "too_few")


@pytest.mark.drill("bandwidth_regression_fleet", "fires")
def test_accepting_the_new_values_clears_it(fleet: "Fleet", judge: Judge) -> None:
    grow(fleet, 4, gpus=2)
    for _ in range(3):
        round_of(fleet, 0.94, newer=4)
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.baseline SET value = 51.7, state = 'accepted'")
    for _ in range(3):
        round_of(fleet, 0.94, newer=4)
        judge.run_pass(fleet.at)
    assert fleet.findings() == []
