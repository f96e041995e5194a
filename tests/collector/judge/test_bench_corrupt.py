"""Rule bench_corrupt: a card that gives wrong bits and says nothing."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector import ladder
from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE = "bench_corrupt"
WRONG = "corrupt: the same work gave other bits in 1 of 264 blocks, on processors 17"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def run(fleet: "Fleet", card: "Card", status: str = "ok", reason: str = "", name: str = "gemm") -> None:
    value = 600.0 if status == "ok" else None
    fleet.bench(card.entity, card.node, value, status, bench=name, unit="TFLOPS", reason=reason)


def later(fleet: "Fleet", judge: Judge, minutes: float = 5) -> None:
    fleet.at += timedelta(minutes=minutes)
    fleet.run(5, judge)


@pytest.mark.drill("bench_corrupt", "fires")
def test_one_wrong_run_is_a_warning_and_a_second_one_critical(fleet: "Fleet", judge: Judge) -> None:
    well, card = fleet.add("gpu-001", gpus=2).cards
    run(fleet, well)
    run(fleet, card)
    later(fleet, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "right")
    run(fleet, card, "failed", WRONG)
    later(fleet, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "once")]
    run(fleet, card, "failed", WRONG)
    later(fleet, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "crit", "repeated")]
    assert "on processors 17" in fleet.find(RULE, card.entity)[3]
    asked = fleet.sql("SELECT json_extract_string(detail, '$.action') FROM finding")
    assert asked == [("drain_rma",)]
    for _ in range(9):
        run(fleet, card)
        later(fleet, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "crit", "repeated")], "it comes and goes"
    for _ in range(2):
        run(fleet, card)
        later(fleet, judge, 31 * 24 * 60)
    run(fleet, card)
    later(fleet, judge)
    assert fleet.findings() == []


def test_wrong_once_is_forgotten_after_right_runs_of_the_same_bench(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    run(fleet, card, "failed", WRONG)
    for _ in range(9):
        run(fleet, card, name="h2d")
        later(fleet, judge)
    assert [row[2:] for row in fleet.findings()] == [("firing", "warn", "once")], "h2d says nothing of gemm"
    for count in range(5):
        assert fleet.find(RULE, card.entity)[:2] == ("warn", "once"), count
        run(fleet, card)
        later(fleet, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "right_since")
    assert fleet.findings() == []


def test_two_benches_that_were_wrong_once_each_are_two_runs(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    run(fleet, card, "failed", WRONG, "fma")
    later(fleet, judge)
    run(fleet, card, "failed", "corrupt: the copy is not what was copied", "hbm")
    later(fleet, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "crit", "repeated")]


def test_several_pairs_of_one_run_are_one_run(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    for _ in range(7):
        run(fleet, card, "failed", "corrupt: what arrived is not what was sent", "p2p")
    later(fleet, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "once")]


@pytest.mark.drill("bench_corrupt", "near_miss")
@pytest.mark.parametrize(
    ("status", "reason"),
    [("failed", "cuCtxCreate_v2: CUDA_ERROR_UNKNOWN"), ("failed", "it is not corrupt: only slow"),
     ("hung", "no result after 120 s"), ("skipped", "corrupt: no")],
)  # fmt: skip
def test_near_miss_other_failures_are_not_wrong_results(
    fleet: "Fleet", judge: Judge, status: str, reason: str
) -> None:
    card = fleet.add("gpu-001", gpus=1).cards[0]
    run(fleet, card)
    for _ in range(3):
        later(fleet, judge)
        run(fleet, card, status, reason)
    later(fleet, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "right")
    assert fleet.findings() == []


@pytest.mark.drill("bench_corrupt", "not_judged")
def test_without_results_it_is_not_known(fleet: "Fleet", judge: Judge) -> None:
    busy, never = fleet.add("gpu-001", gpus=2).cards
    run(fleet, busy, "skipped", "in use by process 900")
    later(fleet, judge)
    assert fleet.find(RULE, busy.entity)[:2] == ("unknown", "no_result")
    assert fleet.find(RULE, never.entity)[:2] == ("n/a", "no_bench")
    assert fleet.findings() == []


def test_the_next_step_is_to_take_it_out_of_service() -> None:
    step = ladder.next_step(RULE, "repeated", "", "", [])
    assert step is not None
    assert step.startswith("take the card out of service")
