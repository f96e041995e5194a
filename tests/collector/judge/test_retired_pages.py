"""Rule retired_pages: cards before Ampere that have put many pages aside."""

from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "retired_pages"
CORRECTED, UNCORRECTABLE = "retired_pages_corrected_total", "retired_pages_uncorrectable_total"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.mark.parametrize(
    ("corrected", "uncorrectable", "verdict", "code"),
    [(60, 3, "crit", "full"), (0, 16, "warn", "uncorrectable"), (38, 2, "warn", "many")],
)
@pytest.mark.drill("retired_pages", "fires")
def test_what_fires_and_clears_with_another_card(
    fleet: "Fleet", judge: Judge, corrected: int, uncorrectable: int, verdict: str, code: str
) -> None:
    card = fleet.add("gpu-001", gpus=2, health=True).cards[1]
    card.health |= {CORRECTED: corrected, UNCORRECTABLE: uncorrectable}
    fleet.run(120, judge, every=60)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", verdict, code)]
    card.health |= {CORRECTED: 0, UNCORRECTABLE: 0}
    fleet.run(120, judge, every=60)
    assert fleet.findings() == []


@pytest.mark.drill("retired_pages", "near_miss", "not_judged")
def test_near_misses_newer_cards_and_what_is_not_known(fleet: "Fleet", judge: Judge) -> None:
    old = fleet.add("gpu-001", gpus=1).cards[0]
    near, newer, unread, sick = fleet.add("gpu-002", gpus=4, health=True).cards
    near.health |= {CORRECTED: 24, UNCORRECTABLE: 15}
    fleet.why_null(newer, "gpu_health", CORRECTED, UNCORRECTABLE)
    sick.state = "hung"
    fleet.run(60)
    assert [fleet.find(RULE, card.entity)[:2] for card in (old, near, newer, unread, sick)] == [
        ("n/a", "no_probe"),
        ("ok", "few"),
        ("n/a", "not_supported"),
        ("unknown", "unreadable"),
        ("unknown", "hung"),
    ]
