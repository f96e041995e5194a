"""Rule gpu_missing: drills B03, B05 and their relatives."""

from typing import TYPE_CHECKING

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet


def test_all_present_is_ok(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(30, judge)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")
    assert fleet.find("gpu_missing")[:2] == ("ok", "driver_loaded")
    assert fleet.findings() == []
