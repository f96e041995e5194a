"""Rule nvlink_errors: counts of links that repeat; resets, restarts and training are none."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Cell, Fleet

RULE = "nvlink_errors"
Counts = dict[str, int | float | None]


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def one(fleet: "Fleet") -> "Card":
    node = fleet.add("gpu-001", gpus=1)
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.probe (node, probe, interval_s) VALUES (?, 'nvlink', 30)", [node.name]
        )
    return node.cards[0]


def sample(fleet: "Fleet", card: "Card", counts: Counts, link: int | None = None) -> None:
    row: dict[str, Cell] = {
        "ts": fleet.at, "received_at": fleet.at, "node": card.node, "boot_id": fleet.nodes[card.node].boot_id,
        "gpu_uuid": card.uuid, "gpu_index": card.index, "pci": card.pci, "link": link, "state": card.state,
        "links_active": 18, "driver_epoch": card.epoch,
    }  # fmt: skip
    row |= counts
    with fleet.store.transaction() as write:
        write.execute(
            f"INSERT INTO live.nvlink ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
            list(row.values()),
        )


def sweeps(fleet: "Fleet", judge: Judge, card: "Card", name: str, totals: "list[int | None]") -> None:
    for total in totals:
        fleet.at += timedelta(seconds=25)
        fleet.run(5)
        sample(fleet, card, {"recoveries_total": 0, name: total})
        judge.run_pass(fleet.at)


def found(fleet: "Fleet") -> list[tuple[object, ...]]:
    return [row[3:] for row in fleet.findings() if row[2] == "firing"]


@pytest.mark.parametrize(
    "name", ["crc_errors_total", "replays_total", "recoveries_total", "ecc_errors_total"]
)
def test_counts_that_repeat_warn(fleet: "Fleet", judge: Judge, name: str) -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, name, [500, 501, 501, 502])
    assert found(fleet) == []
    sweeps(fleet, judge, card, name, [503])
    assert found(fleet) == [("warn", "errors")]


@pytest.mark.drill("nvlink_errors", "fires")
def test_which_and_how_many_and_on_which_link_and_how_it_clears(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    for total in (0, 5, 10):
        fleet.at += timedelta(seconds=25)
        fleet.run(5)
        sample(fleet, card, {"crc_errors_total": total}, link=7)
        sample(fleet, card, {"crc_errors_total": total})
    assert fleet.find(RULE, card.entity)[3] == "5 wrong checksums in 30 s on link 7"
    judge.run_pass(fleet.at)
    sweeps(fleet, judge, card, "crc_errors_total", [15, 20])
    assert found(fleet) == [("warn", "errors")]
    for _ in range(22):
        sweeps(fleet, judge, card, "crc_errors_total", [20])
    assert fleet.findings() == []


@pytest.mark.parametrize(
    "totals",
    [
        [500, 500, 501, 501, 501, 502, 502, 502],  # now and then
        [10**6, 0, 0, 10**6, 10**6, 0],  # one bad sample, a reset
        [2**32 - 1, 3, 3, 3, 3, 3],  # wrapped
        [None, 900, 900, None, 900],
        [900],
    ],
)
def test_what_is_no_burst(fleet: "Fleet", judge: Judge, totals: "list[int | None]") -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, "crc_errors_total", totals)
    assert found(fleet) == []


@pytest.mark.parametrize("change", ["driver", "boot", "training"])
def test_what_links_count_at_a_start_is_theirs(fleet: "Fleet", judge: Judge, change: str) -> None:
    card = one(fleet)
    for step in range(4):
        fleet.at += timedelta(seconds=25)
        fleet.run(5)
        if change == "driver":
            card.epoch += 1
        if change == "boot":
            fleet.nodes["gpu-001"].boot_id = f"boot-{step + 2}"
        active = 12 + 2 * step if change == "training" else 18
        sample(fleet, card, {"replays_total": 100 * step, "links_active": active})
        judge.run_pass(fleet.at)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "no_step")
    assert fleet.findings() == []


def test_a_hundred_wrong_checksums_a_second_are_critical(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, "crc_errors_total", [0, 2999])
    assert fleet.find(RULE, card.entity)[:2] == ("warn", "errors")
    sweeps(fleet, judge, card, "crc_errors_total", [5999])
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "crc_burst")


def test_a_link_that_does_not_come_back_fires_at_once(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, "recoveries_failed_total", [4, 4, 5])
    assert found(fleet) == [("crit", "recovery_failed")]


@pytest.mark.drill("nvlink_errors", "near_miss")
def test_blackwell_is_judged_by_rate_and_not_by_what_it_corrects(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    counts: Counts = {"recoveries_total": 0, "effective_errors_total": 0, "effective_ber": 1.5e-12}
    for total in (0, 1000):
        fleet.at += timedelta(seconds=25)
        fleet.run(5)
        sample(fleet, card, counts | {"effective_errors_total": total, "rx_errors_total": total})
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "none")
    fleet.at += timedelta(seconds=30)
    sample(fleet, card, counts | {"effective_ber": 2e-6})
    assert fleet.find(RULE, card.entity)[:2] == ("warn", "bit_errors")


@pytest.mark.drill("nvlink_errors", "not_judged")
def test_not_known_not_supported_not_read(fleet: "Fleet", judge: Judge) -> None:
    plain = fleet.add("gpu-002", gpus=1).cards[0]
    card = one(fleet)
    fleet.run(5)
    sample(fleet, card, {})
    assert fleet.find(RULE, plain.entity)[:2] == ("n/a", "no_probe")
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "unreadable")
    fleet.why_null(card, "nvlink", "replays_total", "recoveries_total", "crc_errors_total")
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "not_supported")
    card.state = "hung"
    fleet.run(5)
    sample(fleet, card, {})
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "hung")
    fleet.at += timedelta(seconds=100)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "no_samples")


def test_one_sweep_that_forgot_the_failures_pages_nobody(fleet: "Fleet", judge: Judge) -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, "recoveries_failed_total", [37, 37, 0, 37, 37])
    assert fleet.findings() == []
    sweeps(fleet, judge, card, "recoveries_failed_total", [38])
    assert found(fleet) == [("crit", "recovery_failed")]


@pytest.mark.parametrize("name", ["crc_errors_total", "ecc_errors_total", "recoveries_failed_total"])
def test_a_count_that_is_not_read_clears_nothing(fleet: "Fleet", judge: Judge, name: str) -> None:
    card = one(fleet)
    sweeps(fleet, judge, card, name, [500, 505, 510, 515, 520])
    before = fleet.findings()
    assert [row[2] for row in before] == ["firing"]
    sweeps(fleet, judge, card, name, [None] * 22)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
