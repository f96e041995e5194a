"""A07: values that cannot be are NULL, and how many there were is kept."""

import json

import pytest

from gpufleet.metric import Cell, Metric
from gpufleet_agent.probe import Sweep, check_row
from gpufleet_agent.probes import PROBES
from gpufleet_agent.rejected import FOLD_US, Rejected

UUID = "GPU-00000000-0000-4000-8000-000000000006"


def sweep(probe: str, at_us: int, *rows: dict[str, Cell]) -> tuple[tuple[Metric, ...], Sweep]:
    metrics = tuple(PROBES[probe].METRICS)
    checked = [check_row(metrics, row) for row in rows]
    return metrics, Sweep(probe, 1, at_us, 0.1, "", [row for row, _ in checked], [why for _, why in checked])


def told(
    rejected: Rejected, at_us: int, *rows: dict[str, Cell], probe: str = "gpu"
) -> list[tuple[str, str, int]]:
    events = rejected.see(*sweep(probe, at_us, *rows))
    return [(event.entity, event.code, event.count) for event in events]


def card(**cells: Cell) -> dict[str, Cell]:
    return {"gpu_uuid": UUID, "gpu_index": 0, "pci": "0000:1b:00.0", "state": "ok", **cells}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("util_pct", 9223372036854775794),
        ("mem_util_pct", 140737488355328.0),
        ("mem_used_bytes", 18446744073709551615),
        ("temperature_c", 4294967295),
        ("power_w", float("nan")),
        ("pcie_gen", -1),
    ],
)
def test_A07_a_blank_is_told_once_and_counted_from_then_on(column: str, value: Cell) -> None:
    rejected = Rejected()
    key = (f"gpu:{UUID}", f"gpu.{column}")
    assert told(rejected, 0, card(**{column: value})) == [(*key, 1)]
    for second in range(5, 3600, 5):
        assert told(rejected, second * 1_000_000, card(**{column: value})) == []
    assert told(rejected, FOLD_US, card(**{column: value})) == [(*key, 720)]
    assert told(rejected, FOLD_US + 5_000_000, card(**{column: 1})) == []
    assert told(rejected, 2 * FOLD_US, card(**{column: 1})) == []  # nothing new to tell


def test_A07_what_was_not_told_when_it_stopped_is_told_in_the_end() -> None:
    rejected = Rejected()
    told(rejected, 0, card(pstate=99))
    told(rejected, 5_000_000, card(pstate=99))
    assert told(rejected, FOLD_US, card(pstate=0)) == [(f"gpu:{UUID}", "gpu.pstate", 1)]


def test_what_a_card_does_not_have_or_does_not_answer_is_no_lie() -> None:
    metrics, empty = sweep("gpu", 0, card())
    assert Rejected().see(metrics, empty) == []


def test_each_card_column_and_probe_counts_apart() -> None:
    rejected = Rejected()
    other = card(pstate=99, temperature_c=1e9) | {"gpu_uuid": "GPU-other"}
    assert told(rejected, 0, card(pstate=99), other) == [
        (f"gpu:{UUID}", "gpu.pstate", 1),
        ("gpu:GPU-other", "gpu.temperature_c", 1),
        ("gpu:GPU-other", "gpu.pstate", 1),
    ]
    assert told(rejected, 1, {"load1": -5.0}, probe="host") == [("node:", "host.load1", 1)]
    assert told(rejected, 2, {"pci": "0000:2a:00.0", "pcie_width": 999}, probe="pci") == [
        ("pci:0000:2a:00.0", "pci.pcie_width", 1)
    ]


def test_a_host_that_lies_about_everything_costs_a_bounded_memory() -> None:
    rejected = Rejected()
    for number in range(10_000):
        told(rejected, number, card(pstate=99) | {"gpu_uuid": f"GPU-{number}"})
    assert len(rejected._counts) <= 4096
    (event,) = rejected.see(*sweep("gpu", 2 * FOLD_US, card(pstate=99) | {"gpu_uuid": "GPU-1"}))[:1]
    assert json.loads(event.detail) == {"probe": "gpu", "metric": "pstate"}
