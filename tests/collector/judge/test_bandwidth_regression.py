"""Rule bandwidth_regression, and the baselines it compares with."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector import baselines, inventory
from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE = "bandwidth_regression"
KEY = "h2d/1/copied_once/ab12/pcie5x16"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def accept(fleet: "Fleet", card: "Card", value: float, state: str = "accepted") -> None:
    fleet.baseline(card.node, card.entity, KEY, value, state, spread=0.002)


def bench(fleet: "Fleet", card: "Card", value: float | None, status: str = "ok") -> None:
    fleet.at += timedelta(minutes=1)
    fleet.bench(card.entity, card.node, value, status)


@pytest.mark.drill("bandwidth_regression", "fires")
def test_three_of_four_slow_runs_fire(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    bench(fleet, card, 49.0)
    for _ in range(5):
        fleet.at += timedelta(seconds=30)
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings(RULE)] == ["pending"], "one run, however many passes"
    for value in (49.1, 55.0, 49.2):
        bench(fleet, card, value)
        assert [row[2] for row in fleet.findings(RULE)] == ["pending"]
        judge.run_pass(fleet.at)
    ran_at = fleet.at
    assert fleet.findings(RULE) == [("gpu-001", card.entity, "firing", "warn", "slower")]
    verdict, code, evidence_at, reason = fleet.find(RULE, card.entity)
    assert (verdict, code, evidence_at) == ("warn", "slower", ran_at)
    assert "10.5 % below its accepted baseline of 55" in reason


@pytest.mark.parametrize("value", [55.0, 52.5, 60.0])
def test_near_its_baseline_is_ok(fleet: "Fleet", judge: Judge, value: float) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    bench(fleet, card, value)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")


def test_a_fifth_lost_is_critical(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    bench(fleet, card, 27.0)
    assert fleet.find(RULE, card.entity)[0] == "crit"


def test_more_microseconds_are_worse(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 10.0)
    for value, verdict in ((9.0, "ok"), (11.5, "warn"), (20.0, "crit")):
        fleet.at += timedelta(minutes=1)
        fleet.bench(card.entity, card.node, value, unit="us")
        assert fleet.find(RULE, card.entity)[0] == verdict


@pytest.mark.drill("bandwidth_regression", "near_miss")
def test_noise_of_the_series_is_no_regression(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    fleet.at += timedelta(minutes=1)
    fleet.bench(card.entity, card.node, 49.0, spread=0.05)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before"), "11 % with repeats 5 % apart"


def test_what_hits_all_is_not_this_card(fleet: "Fleet", judge: Judge) -> None:
    cards = [fleet.add(f"gpu-{n:03}", gpus=1).cards[0] for n in range(8)]
    for card in cards:
        accept(fleet, card, 55.0)
        fleet.bench(card.entity, card.node, 49.5)
    assert {fleet.find(RULE, card.entity)[:2] for card in cards} == {("ok", "peers_fell")}
    fleet.at += timedelta(minutes=1)
    fleet.bench(cards[0].entity, cards[0].node, 42.0)
    verdict, code, _, reason = fleet.find(RULE, cards[0].entity)
    assert (verdict, code, "peers are 10.0 % below theirs" in reason) == ("warn", "slower", True)


def test_peers_that_did_not_fall_do_not_excuse_it(fleet: "Fleet", judge: Judge) -> None:
    cards = [fleet.add(f"gpu-{n:03}", gpus=1).cards[0] for n in range(8)]
    for number, card in enumerate(cards):
        accept(fleet, card, 55.0)
        fleet.bench(card.entity, card.node, 49.0 if number == 3 else 55.1)
    assert [fleet.find(RULE, card.entity)[0] for card in cards] == ["ok"] * 3 + ["warn"] + ["ok"] * 4


def test_one_host_that_fell_as_a_whole_is_not_excused_by_itself(fleet: "Fleet", judge: Judge) -> None:
    bad = fleet.add("gpu-001", gpus=8)
    good = [card for n in range(2, 4) for card in fleet.add(f"gpu-{n:03}", gpus=8).cards]
    for card in [*bad.cards, *good]:
        accept(fleet, card, 55.0)
        fleet.bench(card.entity, card.node, 49.0 if card.node == "gpu-001" else 55.0)
    assert {fleet.find(RULE, card.entity)[:2] for card in bad.cards} == {("n/a", "host_slower")}
    fleet.at += timedelta(minutes=1)
    for card in bad.cards[:5]:
        fleet.bench(card.entity, card.node, 55.0)
    assert [fleet.find(RULE, card.entity)[0] for card in bad.cards] == ["ok"] * 5 + ["warn"] * 3


@pytest.mark.parametrize("status", ["preempted", "contaminated", "skipped", "hung", "failed", "unsupported"])
def test_runs_that_are_not_ok_are_no_evidence(fleet: "Fleet", judge: Judge, status: str) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    bench(fleet, card, 55.0)
    ran_at = fleet.at
    for _ in range(3):
        bench(fleet, card, None, status)
        judge.run_pass(fleet.at)
    assert fleet.find(RULE, card.entity)[:3] == ("ok", "as_before", ran_at)
    assert fleet.findings() == []
    fleet.at += timedelta(hours=49)
    bench(fleet, card, None, status)
    verdict, code, _, reason = fleet.find(RULE, card.entity)
    assert (verdict, code, status in reason) == ("unknown", "no_ok_run", True)


@pytest.mark.drill("bandwidth_regression", "not_judged")
def test_no_bench_and_too_few_runs_are_not_judged(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "no_bench")
    for value in (55.0, 50.0):
        bench(fleet, card, value)
        judge.run_pass(fleet.at)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "learning")


def test_other_parameters_are_another_series(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    fleet.bench(card.entity, card.node, 50.0, params_hash="other")
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "learning")


def test_the_worst_series_speaks_for_the_card(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    bench(fleet, card, 40.0)
    slow_at = fleet.at
    fleet.at += timedelta(minutes=1)
    fleet.bench(card.entity, card.node, 100.0, bench="memcpy")
    assert fleet.find(RULE, card.entity)[:3] == ("crit", "slower", slow_at)


@pytest.mark.parametrize("entity", ["node:", "numa:1", "port:mlx5_0/1"])
def test_benches_of_the_host_are_judged_too(fleet: "Fleet", judge: Judge, entity: str) -> None:
    fleet.add("cpu-01", gpus=0)
    fleet.baseline("cpu-01", entity, KEY, 55.0)
    fleet.bench(entity, "cpu-01", 30.0)
    assert fleet.find(RULE, entity, "cpu-01")[:2] == ("crit", "slower")


def test_baseline_learns_from_ok_runs_and_freezes(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    for number in range(baselines.FROZEN_AT + 3):
        bench(fleet, card, 55.0 + (number % 3 - 1) * 0.1)
        bench(fleet, card, None, "skipped")
        if number in (7, 20):
            baselines.learn(fleet.store, fleet.at)
            [(value, n, state)] = fleet.sql("SELECT value, n, state FROM baseline")
            assert (value, n, state) == (55.0, number + 1, "learning")
    baselines.learn(fleet.store, fleet.at)
    assert fleet.sql("SELECT key, n, state, epoch FROM baseline") == [(KEY, 48, "frozen", "580")]
    bench(fleet, card, 10.0)
    baselines.learn(fleet.store, fleet.at)
    assert fleet.sql("SELECT value, n FROM baseline") == [(55.0, 48)]


def test_a_degraded_state_is_never_learned(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    for _ in range(8):
        bench(fleet, card, 55.0)
        judge.run_pass(fleet.at)
    for _ in range(5):
        bench(fleet, card, 40.0)
        judge.run_pass(fleet.at)
    assert fleet.sql("SELECT value, n FROM baseline") == [(55.0, 8)]
    assert [row[2:4] for row in fleet.findings(RULE)] == [("firing", "crit")]


def history_of(fleet: "Fleet", card: "Card", values: list[float], driver: str) -> None:
    for value in values:
        fleet.at += timedelta(hours=1)
        fleet.bench(card.entity, card.node, value, driver=driver)


@pytest.mark.parametrize(
    ("value", "state", "learned"),
    [(56.0, "frozen", True), (54.0, "frozen", True), (51.7, "frozen", False), (56.0, "accepted", False)],
)
def test_a_new_driver_is_learned_anew_unless_it_is_slower(
    fleet: "Fleet", judge: Judge, value: float, state: str, learned: bool
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0, state)
    history_of(fleet, card, [value] * (baselines.FROZEN_AT - 1), "590")
    assert baselines.learn_anew(fleet.store, fleet.at) == 0, "too few runs"
    history_of(fleet, card, [value], "590")
    assert baselines.learn_anew(fleet.store, fleet.at) == int(learned)
    [(now, epoch)] = fleet.sql("SELECT value, epoch FROM baseline")
    before = fleet.sql("SELECT value, epoch, replaced_at FROM baseline_before")
    assert (now, epoch) == ((value, "590") if learned else (55.0, "580"))
    assert before == ([(55.0, "580", fleet.at)] if learned else [])
    assert baselines.learn_anew(fleet.store, fleet.at) == 0


def test_a_bench_that_runs_once_a_day_is_learned_anew_too(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0, "frozen")
    for _ in range(baselines.FROZEN_AT):
        fleet.at += timedelta(days=1)
        fleet.bench(card.entity, card.node, 55.5, driver="590")
    assert baselines.learn_anew(fleet.store, fleet.at + timedelta(hours=3)) == 0, "nothing new"
    assert baselines.learn_anew(fleet.store, fleet.at) == 1


def test_a_baseline_is_of_one_driver_and_firmware(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    history_of(fleet, card, [55.0] * 9, "580")
    baselines.learn(fleet.store, fleet.at)
    history_of(fleet, card, [51.0] * 12, "590")
    baselines.learn(fleet.store, fleet.at)
    assert fleet.sql("SELECT value, n, epoch, state FROM baseline") == [(55.0, 9, "580", "learning")]
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET attributes = json_object('vbios', '96.00'), "
            "valid_from = valid_from - INTERVAL 1 DAY WHERE kind = 'gpu'"
        )
        write.execute("DELETE FROM live.baseline")
    baselines.learn(fleet.store, fleet.at)
    assert fleet.sql("SELECT value, n, epoch FROM baseline") == [(55.0, 9, "580/96.00")]


@pytest.mark.parametrize(
    ("limits", "epoch"),
    [
        ({"default": "700", "requested": "700"}, "580"),
        ({"default": "700", "requested": "600"}, "580/600 W"),
        ({"requested": "600"}, "580"),
        ({"default": "700"}, "580"),
    ],
    ids=["as delivered", "set", "no default known", "not told"],
)
def test_a_power_limit_that_people_set_begins_an_epoch(
    fleet: "Fleet", judge: Judge, limits: dict[str, str], epoch: str
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    history_of(fleet, card, [55.0] * baselines.FROZEN_AT, "580")
    baselines.learn(fleet.store, fleet.at)
    told = {f"power_limit_{name}_w": value for name, value in limits.items()}
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET attributes = ?, valid_from = ? WHERE kind = 'gpu'",
            [json.dumps(told), fleet.at],
        )
    history_of(fleet, card, [54.0] * baselines.FROZEN_AT, "580")
    assert baselines.learn_anew(fleet.store, fleet.at) == int(epoch != "580")
    assert fleet.sql("SELECT value, epoch FROM baseline") == [(54.0 if epoch != "580" else 55.0, epoch)]


def test_accept_moves_a_frozen_baseline(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0, "frozen")
    for value in (40.0, 41.0, 42.0):
        bench(fleet, card, value)
    pinned = inventory.accept(fleet.store, ["gpu-001"], "ann", "new riser", fleet.at)
    assert pinned.baselines == 1
    assert fleet.sql("SELECT value, state, set_by, reason FROM baseline") == [
        (41.0, "accepted", "ann", "new riser")
    ]
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")


def history(fleet: "Fleet", card: "Card", values: list[float], every: timedelta = timedelta(hours=1)) -> None:
    for value in values:
        fleet.at += every
        fleet.bench(card.entity, card.node, value)


def test_a_small_loss_that_lasts_is_a_drift(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    history(fleet, card, [55.0] * 10 + [53.5] * 9)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before"), "2.7 %, not long enough"
    history(fleet, card, [53.5] * 4)
    verdict, code, evidence_at, reason = fleet.find(RULE, card.entity)
    assert (verdict, code, evidence_at) == ("warn", "drifting", fleet.at)
    assert "the last 7 runs lost 2.7 %" in reason
    judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ["firing"], "the sum is the evidence"
    history(fleet, card, [55.0] * 12)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")


@pytest.mark.parametrize(
    "values",
    [
        [55.0] * 30 + [30.0] + [55.0] * 6,
        [54.6] * 40,
        [53.5, 55.0] * 20,
        [53.5, 56.0, 55.5] * 15,
    ],
    ids=["one bad run", "less than 1.5 %", "half of the runs", "noise"],
)
def test_what_is_no_drift(fleet: "Fleet", judge: Judge, values: list[float]) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 55.0)
    history(fleet, card, values)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")


def test_a_drift_that_the_peers_share_is_theirs(fleet: "Fleet", judge: Judge) -> None:
    cards = [fleet.add(f"gpu-{n:03}", gpus=1).cards[0] for n in range(8)]
    for card in cards:
        accept(fleet, card, 55.0)
    for hour in range(30):
        fleet.at += timedelta(hours=1)
        for number, card in enumerate(cards):
            slow = number == 3 and hour >= 10
            fleet.bench(card.entity, card.node, 55.0 * (0.98 if hour >= 10 else 1) * (0.965 if slow else 1))
    codes = [fleet.find(RULE, card.entity)[1] for card in cards]
    assert codes == ["as_before"] * 3 + ["drifting"] + ["as_before"] * 4


@pytest.mark.parametrize(
    ("value", "found"),
    [(47.0, ("crit", "below_floor")), (49.0, ("n/a", "learning")), (20.0, ("crit", "below_floor"))],
)
def test_no_well_card_is_below_the_floor(
    fleet: "Fleet", judge: Judge, value: float, found: tuple[str, str]
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    for _ in range(2):
        bench(fleet, card, value)
        judge.run_pass(fleet.at)
    assert fleet.find(RULE, card.entity)[:2] == found
    assert [row[2:4] for row in fleet.findings()] == ([("firing", "crit")] if found[0] == "crit" else [])


@pytest.mark.parametrize(
    ("link", "found"),
    [("nvlink:1b:00>43:00", ("crit", "below_floor")), ("pcie:1b:00>43:00", ("n/a", "learning"))],
)
def test_a_floor_holds_for_all_pairs_of_cards_with_its_link(
    fleet: "Fleet", judge: Judge, link: str, found: tuple[str, str]
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.bench(card.entity, card.node, 300.0, bench="p2p", link=link)
    assert fleet.find(RULE, card.entity)[:2] == found


def test_each_pair_has_its_own_baseline(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    for peer, value in (("43:00", 380.0), ("52:00", 190.0)):
        for _ in range(10):
            fleet.bench(
                card.entity, card.node, value, bench="p2p", link=f"nvlink:1b:00>{peer}", convention="x"
            )
            fleet.at += timedelta(minutes=5)
        baselines.learn(fleet.store, fleet.at)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")
    fleet.bench(card.entity, card.node, 190.0, bench="p2p", link="nvlink:1b:00>43:00", convention="x")
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "slower")


@pytest.mark.parametrize("other", [{"link": "pcie4x16"}, {"bench": "d2d"}, {"convention": "both_ways"}])
def test_a_floor_holds_for_its_bench_link_and_convention(
    fleet: "Fleet", judge: Judge, other: dict[str, str]
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    fleet.bench(card.entity, card.node, 20.0, **other)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "learning")


def test_a_person_may_know_better_than_the_floor(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    accept(fleet, card, 40.0)
    bench(fleet, card, 40.0)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "as_before")


def test_a_new_card_is_held_against_its_peers(fleet: "Fleet", judge: Judge) -> None:
    cards = [fleet.add(f"gpu-{n:03}", gpus=1).cards[0] for n in range(9)]
    for number, card in enumerate(cards):
        fleet.bench(card.entity, card.node, 49.0 if number == 8 else 60.0 + 0.2 * number)
    assert fleet.find(RULE, cards[8].entity)[:2] == ("warn", "below_peers")
    assert fleet.find(RULE, cards[0].entity)[:2] == ("n/a", "learning")
    for _ in range(2):
        bench(fleet, cards[8], 49.0)
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    bench(fleet, cards[8], 49.0)
    judge.run_pass(fleet.at)
    assert [row[1:] for row in fleet.findings()] == [(cards[8].entity, "firing", "warn", "below_peers")]


CONVENTIONS = {
    "nvbandwidth": "copied_once:(host_to_device_memcpy_ce|device_to_host_memcpy_ce|"
    r"device_to_device_memcpy_write_ce:slowest_of_\d+)",
    "all_reduce_perf": r"busbw_\d+_cards_\d+_bytes(_algo_[a-z]+)?",
    "ib_write_bw": r"copied_once_\d+_bytes",
}
"""What the tools' rows say was counted; a local copy by nvbandwidth is counted once, `hbm` twice."""


def test_expected_values_are_plausible(fleet: "Fleet", judge: Judge) -> None:
    rows = fleet.sql(
        "SELECT words, bench, convention, theory, typical, floor, mem_clock_mhz, bus_bits, source "
        "FROM bench_expected()"
    )
    keys = fleet.sql("SELECT words, bench, convention, link FROM bench_expected()")
    assert len(set(keys)) == len(rows) > 20
    for words, name, convention, theory, typical, floor, clock, bits, source in rows:
        where = f"{words} {name} {convention}"
        assert isinstance(floor, float), where
        assert typical is None or (isinstance(typical, float) and floor < typical <= 2 * floor), where
        # what NCCL chooses may add up in the switches: more arrives than a link carries
        if theory is None:
            assert (name, "_algo_" in str(convention)) == ("all_reduce_perf", False), where
            assert typical is not None, where
        else:
            assert isinstance(theory, float), where
            assert 0.5 <= floor / theory <= 1.0, where
            assert typical is None or typical < theory, where
        assert re.fullmatch(CONVENTIONS.get(str(name), "copied_once|read_plus_write"), str(convention)), where
        assert source, where
        assert (name == "hbm") == (clock is not None), where
        if isinstance(clock, int) and isinstance(bits, int):
            assert theory == pytest.approx(clock * 1e6 * 2 * bits / 8 / 1e9, rel=0.01), where


def test_the_page_has_the_expected_values_of_copies_between_cards(fleet: "Fleet", judge: Judge) -> None:
    page = (Path(__file__).parents[3] / "docs/benches.md").read_text()
    told = {
        tuple(cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for line in page.splitlines()
        if "| `p2p` | `copied_once` |" in line
    }
    known = fleet.sql(
        "SELECT words, bench, convention, link, format('{:g}', typical), format('{:g}', floor), source "
        "FROM bench_expected() WHERE bench = 'p2p'"
    )
    assert told == set(known)


@pytest.mark.parametrize(
    ("convention", "value", "found"),
    [
        ("busbw_8_cards_8589934592_bytes", 250.0, ("crit", "below_floor")),
        ("busbw_8_cards_8589934592_bytes", 360.0, ("n/a", "learning")),
        ("busbw_4_cards_8589934592_bytes", 250.0, ("n/a", "learning")),
    ],
    ids=["no well host", "without NVLS", "four cards"],
)
def test_what_all_cards_of_a_host_do_together_has_a_floor(
    fleet: "Fleet", judge: Judge, convention: str, value: float, found: tuple[str, str]
) -> None:
    fleet.add("gpu-001", gpus=2)
    fleet.bench("node:", "gpu-001", value, bench="all_reduce_perf", convention=convention, link="")
    assert fleet.find(RULE, "node:", "gpu-001")[:2] == found
    fleet.add("cpu-001", gpus=0)
    fleet.bench("node:", "cpu-001", value, bench="all_reduce_perf", convention=convention, link="")
    assert fleet.find(RULE, "node:", "cpu-001")[:2] == ("n/a", "learning"), "cards of which model?"
