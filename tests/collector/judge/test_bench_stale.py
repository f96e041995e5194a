"""Rule bench_stale: a card that nobody has measured for long is not known to be well."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE = "bench_stale"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def measure(fleet: "Fleet", card: "Card", days: float, status: str = "ok", reason: str = "") -> None:
    fleet.bench(
        card.entity,
        card.node,
        50.0 if status == "ok" else None,
        status,
        ts=fleet.at - timedelta(days=days),
        reason=reason,
    )


def age(fleet: "Fleet", days: float) -> None:
    """As if the cards had been there for so long."""
    with fleet.store.transaction() as write:
        write.execute(f"UPDATE live.inventory SET valid_from = valid_from - INTERVAL {days} DAY")


@pytest.mark.drill("bench_stale", "fires", "near_miss")
def test_always_busy_and_never_tried_fire_and_a_result_clears(fleet: "Fleet", judge: Judge) -> None:
    well, busy, never = fleet.add("gpu-001", gpus=3).cards
    age(fleet, 30)
    measure(fleet, well, 6.9)
    measure(fleet, busy, 9)
    for days in range(7):
        measure(fleet, busy, days, "skipped", "busy")
    for _ in range(2):
        fleet.run(5, judge)
        fleet.at += timedelta(minutes=10)
    fleet.run(5, judge)
    assert fleet.findings() == [
        ("gpu-001", busy.entity, "firing", "warn", "no_result"),
        ("gpu-001", never.entity, "firing", "warn", "not_run"),
    ]
    assert "skipped, busy" in fleet.find(RULE, busy.entity)[3]
    assert fleet.find(RULE, well.entity)[:2] == ("ok", "measured")
    measure(fleet, busy, 0)
    measure(fleet, never, 0)
    for _ in range(2):
        fleet.at += timedelta(minutes=10)
        fleet.run(5, judge)
    assert fleet.findings() == []


@pytest.mark.drill("bench_stale", "not_judged")
def test_what_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    cannot, new, silent = (fleet.add(name, gpus=1).cards[0] for name in ("gpu-001", "gpu-002", "gpu-003"))
    fleet.run(5)
    assert fleet.find(RULE, new.entity)[:2] == ("n/a", "no_benches"), "nobody measures anything here"
    age(fleet, 30)
    measured = fleet.add("gpu-004", gpus=1).cards[0]
    measure(fleet, measured, 20)
    measure(fleet, cannot, 1, "unsupported")
    fleet.nodes["gpu-003"].up = False
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET valid_from = valid_from + INTERVAL 25 DAY WHERE node = 'gpu-002'"
        )
    fleet.run(130)
    assert fleet.find(RULE, cannot.entity)[:2] == ("n/a", "unsupported")
    assert fleet.find(RULE, new.entity)[:2] == ("n/a", "new")
    assert fleet.find(RULE, silent.entity)[:2] == ("unknown", "agent_silent")
