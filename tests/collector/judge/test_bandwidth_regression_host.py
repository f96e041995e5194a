"""Rule bandwidth_regression_host: what half of a host's cards show at once is the host's."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, RuleOverride
from gpufleet_collector.rules import Need, load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet, Node

RULE = "bandwidth_regression_host"
KEY = "h2d/1/copied_once/ab12/pcie5x16"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, "bandwidth_regression")


def add(fleet: "Fleet", name: str, gpus: int = 8) -> "Node":
    node = fleet.add(name, gpus=gpus)
    for card in node.cards:
        fleet.baseline(card.node, card.entity, KEY, 55.0, "frozen", spread=0.002)
    return node


def round_of(fleet: "Fleet", node: "Node", slow: int, value: float = 49.0) -> None:
    """Every card runs once, a minute apart; the first `slow` ones are slow."""
    for number, card in enumerate(node.cards):
        fleet.at += timedelta(minutes=1)
        fleet.bench(card.entity, card.node, value if number < slow else 55.0)
    fleet.at += timedelta(minutes=60 - len(node.cards))


def quick(fleet: "Fleet", judge: Judge) -> Judge:
    """The same judge with three rounds in the place of sixteen."""
    settings = JudgeSettings(rule={RULE: RuleOverride(for_="3 of 4")})
    return Judge(fleet.store, settings, rules=[rule for rule in load_rules() if rule.name in judge.policies])


@pytest.mark.drill("bandwidth_regression_host", "fires")
def test_slow_rounds_of_all_cards_are_one_finding(fleet: "Fleet", judge: Judge) -> None:
    assert judge.policies[RULE].need == Need(16, 20), "longer than a neighbour's backup"
    impatient = quick(fleet, judge)
    node = add(fleet, "gpu-001")
    for number in range(3):
        round_of(fleet, node, 8)
        impatient.run_pass(fleet.at)
        fired = [row for row in fleet.findings() if row[2] == "firing"]
        assert bool(fired) == (number == 2), f"round {number + 1}"
    assert fired == [("gpu-001", "node:", "firing", "warn", "host_slower")]
    assert len(fleet.incidents()) == 1
    for _ in range(3):
        round_of(fleet, node, 0)
        impatient.run_pass(fleet.at)
    assert fleet.findings() == []


@pytest.mark.parametrize(
    ("gpus", "slow", "verdict"),
    [
        (8, 4, "warn"),
        pytest.param(8, 3, "ok", marks=pytest.mark.drill("bandwidth_regression_host", "near_miss")),
        (8, 0, "ok"),
        (2, 2, "warn"),
        (2, 1, "ok"),
    ],
)
def test_half_of_the_cards_and_at_least_two(
    fleet: "Fleet", judge: Judge, gpus: int, slow: int, verdict: str
) -> None:
    node = add(fleet, "gpu-001", gpus)
    round_of(fleet, node, slow)
    assert fleet.find(RULE)[0] == verdict
    blamed = fleet.find("bandwidth_regression", node.cards[0].entity)[:2]
    good = ("ok", "as_before") if slow == 0 else ("warn", "slower")
    assert blamed == (("n/a", "host_slower") if verdict == "warn" else good)


def test_a_round_counts_once_however_often_it_is_seen(fleet: "Fleet", judge: Judge) -> None:
    node = add(fleet, "gpu-001")
    round_of(fleet, node, 8)
    first = fleet.find(RULE)[2]
    for card in node.cards[1:]:
        fleet.bench(card.entity, card.node, 49.0)
    assert fleet.find(RULE)[2] == first, "the first card has not run again"


@pytest.mark.drill("bandwidth_regression_host", "not_judged")
def test_without_baselines_or_with_one_card_it_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    one = add(fleet, "gpu-001", gpus=1)
    round_of(fleet, one, 1)
    new = fleet.add("gpu-002")
    for card in new.cards:
        fleet.bench(card.entity, card.node, 49.0)
    assert {fleet.find(RULE, node=name)[:2] for name in fleet.nodes} == {("n/a", "no_round")}
