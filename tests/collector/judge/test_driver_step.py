"""A new driver moves every card of a model: one fleet event, and no card is blamed."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector import baselines
from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

CLOCK, BENCH, STEP = "gpu_downclocked", "bandwidth_regression", "bandwidth_regression_fleet"
MODEL = "domain:model=NVIDIA H100 80GB HBM3"
KEY = "h2d/1/copied_once/ab12/pcie5x16"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (CLOCK, BENCH, STEP)


def grow(fleet: "Fleet", nodes: int) -> list["Card"]:
    cards = [card for n in range(nodes) for card in fleet.add(f"gpu-{n:03}", gpus=2).cards]
    for card in cards:
        fleet.baseline(card.node, card.entity, "sm_clock_busy_mhz", 1950.0)
        fleet.baseline(card.node, card.entity, KEY, 55.0)
    return cards


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(count):
        fleet.run(55)
        fleet.run(5, judge)


@pytest.mark.parametrize("part", [0.94, 0.80])
def test_clocks_of_all_are_one_fleet_event(fleet: "Fleet", judge: Judge, part: float) -> None:
    cards = grow(fleet, 6)
    for card in cards:
        card.clock, card.epoch = part * 1950, 2
    minutes(fleet, judge, 5)
    assert fleet.findings() == [("", MODEL, "firing", "warn", "fleet_step")]
    assert fleet.incidents() == [(1, CLOCK, "", MODEL, "open", "warn")]
    cards[3].clock = 0.8 * part * 1950
    minutes(fleet, judge, 4)
    assert [row[1] for row in fleet.findings()] == [MODEL, cards[3].entity], "one card fell further"
    assert [row[3] for row in fleet.incidents()] == [MODEL, cards[3].entity]


def test_it_is_over_when_they_are_as_before(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 5)
    for card in cards:
        card.clock = 1800.0
    minutes(fleet, judge, 4)
    for card in cards:
        card.clock = 1950.0
    fleet.run(480, judge, every=30)  # a judge that passes less often counts as away
    assert [row[4] for row in fleet.incidents()] == ["resolved"]


def test_what_hardware_does_to_all_is_no_step(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 6)
    for card in cards:
        card.clock, card.reasons = 1500.0, 0x40
    minutes(fleet, judge, 3)
    assert {fleet.find(CLOCK, card.entity)[:2] for card in cards} == {("crit", "hw_thermal")}
    assert MODEL not in {row[1] for row in fleet.findings()}


def test_few_nodes_are_no_fleet(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 4)
    for card in cards:
        card.clock = 1755.0
    minutes(fleet, judge, 2)
    assert {fleet.find(CLOCK, card.entity)[:2] for card in cards} == {("warn", "no_reason")}


def test_bandwidth_of_all_is_one_fleet_event(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 6)
    for _ in range(3):
        for card in cards:
            fleet.bench(card.entity, card.node, 0.94 * 55.0, driver="590")
        fleet.at += timedelta(minutes=30)
        judge.run_pass(fleet.at)
    assert fleet.findings() == [("", MODEL, "firing", "warn", "fleet_step")]
    assert [row[1:4] for row in fleet.incidents()] == [(STEP, "", MODEL)]


def test_bandwidth_that_scatters_is_none(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 6)
    for number, card in enumerate(cards):
        fleet.bench(card.entity, card.node, (0.93 if number % 3 == 0 else 1.0) * 55.0)
    assert fleet.find(STEP, MODEL)[:2] == ("ok", "as_before")


def rounds(fleet: "Fleet", values: list[tuple["Card", float, str]], count: int) -> None:
    """An hourly round of benches of these (card, GB/s, driver), `count` times."""
    for card, value, driver in values:
        fleet.bench(card.entity, card.node, value, driver=driver)
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.bench SELECT b.* REPLACE (ts + to_hours(r) AS ts, received_at + to_hours(r) AS "
            "received_at) FROM live.bench b, range(1, ?) n(r) WHERE ts = ?",
            [count, fleet.at],
        )
    fleet.at += timedelta(hours=count)


def said(fleet: "Fleet", judge: Judge, cards: list["Card"]) -> list[str]:
    """What the bench rule says of each card."""
    judge.compile(fleet.at)
    rows = fleet.sql(f"SELECT entity, code FROM find_{BENCH}(TIMESTAMP '{fleet.at}')")
    codes = {entity: str(code) for entity, code in rows}
    return [codes[card.entity] for card in cards]


def replaced(fleet: "Fleet", cards: list["Card"], value: float) -> None:
    """These baselines are those of driver 590 now."""
    with fleet.store.transaction() as write:
        baselines.put(
            write,
            [
                baselines.Baseline(
                    card.node, card.entity, KEY, value, 0.002, 48, "590", "accepted", "ann", fleet.at, "590"
                )
                for card in cards
            ],
        )


@pytest.mark.parametrize("part", [0.98, 0.94])
@pytest.mark.parametrize("moved", [3, 6, 10, 14, 16])
def test_peers_with_newer_baselines_leave_nobody_behind(
    fleet: "Fleet", judge: Judge, part: float, moved: int
) -> None:
    """Baselines follow a driver step one by one: at no time is a card the slower one for having its old."""
    cards = grow(fleet, 8)
    rounds(fleet, [(card, 55.0, "580") for card in cards], 6)
    rounds(fleet, [(card, part * 55.0, "590") for card in cards], 30)
    fleet.at -= timedelta(minutes=30)
    replaced(fleet, cards[:moved], part * 55.0)
    assert set(said(fleet, judge, cards)) <= {"as_before", "peers_fell"}


@pytest.mark.parametrize("slow", [0, 15], ids=["newer baseline", "older baseline"])
@pytest.mark.parametrize(("loss", "code"), [(0.97, "drifting"), (0.88, "slower")])
def test_the_card_that_fell_further_is_found_meanwhile(
    fleet: "Fleet", judge: Judge, slow: int, loss: float, code: str
) -> None:
    cards = grow(fleet, 8)
    rounds(fleet, [(card, 0.98 * 55.0, "590") for card in cards], 24)
    replaced(fleet, cards[:10], 0.98 * 55.0)
    rounds(
        fleet, [(card, 0.98 * 55.0 * (loss if n == slow else 1), "590") for n, card in enumerate(cards)], 14
    )
    codes = said(fleet, judge, cards)
    assert codes[slow] == code
    assert {one for number, one in enumerate(codes) if number != slow} <= {"as_before", "peers_fell"}


def test_what_a_person_moves_is_kept_too(fleet: "Fleet", judge: Judge) -> None:
    cards = grow(fleet, 1)
    replaced(fleet, cards[:1], 54.0)
    replaced(fleet, cards[:1], 53.0)
    kept = fleet.sql("SELECT entity, value, epoch FROM baseline_before ORDER BY value")
    assert kept == [(cards[0].entity, 54.0, "590"), (cards[0].entity, 55.0, "580")]
