"""What three kinds of hosts read, whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers import Gpu, Host, Process
from gpufleet_agent.drivers.amdgpu import AmdHost
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu, gpu_health

Tree = Callable[[str], Path]
Rows = Callable[[Host], list[Row]]


def _ring(util: float, clock: float, power: float) -> dict[str, float]:
    values = {"util_pct": util, "sm_clock_mhz": clock, "power_w": power}
    return {f"{name}{part}": value for name, value in values.items() for part in ("", "_min", "_p10")}


def test_mi210(tree: Tree, rows: Rows) -> None:
    idle, busy = rows(AmdHost(tree("amd-mi210")))
    assert idle == {
        "gpu_uuid": "GPU-5e6a3b1c90d24f17",
        "gpu_index": 0,
        "pci": "0000:63:00.0",
        "state": "ok",
        **_ring(0.0, 500.0, 41.0),
        "power_limit_w": 300.0,
        "mem_util_pct": 0.0,
        "mem_clock_mhz": 400.0,
        "mem_used_bytes": 11530240,
        "mem_total_bytes": 68702699520,
        "temperature_c": 40.0,
        "temperature_margin_c": 70.0,
        "mem_temperature_c": 44.0,
        "clock_reasons": 0,
        "pcie_gen": 4,
        "pcie_gen_max": 4,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "driver_epoch": 1,
    }
    assert busy == {
        **idle,
        "gpu_uuid": "GPU-a8c1f0d2734b9e65",
        "gpu_index": 1,
        "pci": "0000:c3:00.0",
        **_ring(97.0, 1674.0, 286.0),
        "mem_util_pct": 41.0,
        "mem_clock_mhz": 1600.0,
        "mem_used_bytes": 61203283968,
        "temperature_c": 78.0,
        "temperature_margin_c": 32.0,
        "mem_temperature_c": 71.0,
        "clock_reasons": 4,
    }


def test_eight_mi300x_one_of_them_partitioned(tree: Tree, rows: Rows) -> None:
    found = rows(AmdHost(tree("amd-mi300x")))
    assert [row["pci"] for row in found] == [
        f"0000:{bus}:00.0" for bus in ["05", "26", "46", "65", "85", "a6", "c6", "e5"]
    ]
    for index, row in enumerate(found):
        assert row == {
            "gpu_uuid": f"GPU-{0x9A31C07D22E45B10 + index * 0x1F3:016x}",
            "gpu_index": index,
            "pci": row["pci"],
            "state": "ok",
            **_ring(100.0 - index, 2060.0 + index, 700.0 + index),
            "power_limit_w": 750.0,
            "mem_util_pct": 60.0 + index,
            "mem_clock_mhz": 1300.0,
            "mem_used_bytes": 180_000_000_000 + index * 1048576,
            "mem_total_bytes": 206141652992,
            "temperature_c": 70.0 + index,
            "temperature_margin_c": 30.0 - index,
            "mem_temperature_c": 60.0 + index,
            "energy_j_total": 1000.0 + index,
            "pcie_gen": 5,
            "pcie_gen_max": 5,
            "pcie_width": 16,
            "pcie_width_max": 16,
            "driver_epoch": 1,
        }


def test_rx7900_without_the_graphics_of_the_processor(tree: Tree, rows: Rows) -> None:
    host = AmdHost(tree("amd-rx7900"))
    assert rows(host) == [
        {
            "gpu_uuid": "GPU-7d3fe2b9c5a01844",
            "gpu_index": 0,
            "pci": "0000:03:00.0",
            "state": "ok",
            **_ring(99.0, 2371.0, 354.0),
            "power_limit_w": 355.0,
            "mem_util_pct": 55.0,
            "mem_clock_mhz": 1249.0,
            "mem_used_bytes": 20401094656,
            "mem_total_bytes": 25753026560,
            "temperature_c": 108.0,
            "temperature_margin_c": 2.0,
            "mem_temperature_c": 88.0,
            "clock_reasons": 4 | 32,
            # of the slot: the link inside the card's own switch says 16.0 GT/s for ever
            "pcie_gen": 3,
            "pcie_gen_max": 3,
            "pcie_width": 16,
            "pcie_width_max": 16,
            "driver_epoch": 1,
        }
    ]
    assert [row["pci"] for row in host.pci_devices()] == ["0000:03:00.0"]


def test_what_amd_has_no_word_for_is_not_supported(tree: Tree, sweep: Callable[[Host], Sweep]) -> None:
    found = sweep(AmdHost(tree("amd-mi210")))
    empty = [metric.name for metric, cell in zip(gpu.METRICS, found.rows[0], strict=True) if cell is None]
    unread = ["pcie_tx_bytes_total", "pcie_rx_bytes_total"]
    assert empty == [
        "pstate",
        "power_cap_s_total",
        "sync_boost_s_total",
        "sw_thermal_s_total",
        "hw_thermal_s_total",
        "hw_brake_s_total",
        "energy_j_total",
        *unread,
        "sm_active_pct",
        "sm_occupancy_pct",
        "tensor_active_pct",
        "mem_active_pct",
        "fan_pct",
    ]
    reasons = dict(zip(empty, found.reasons[0], strict=True))
    assert {name for name, reason in reasons.items() if reason == Reason.NOT_READ} == {*unread, "fan_pct"}
    assert set(reasons.values()) == {Reason.NOT_READ, Reason.NOT_SUPPORTED}


def test_every_metric_of_probe_gpu_gets_a_cell_with_a_reason(tree: Tree) -> None:
    keys = {"gpu_uuid", "gpu_index", "pci", "state", "driver_epoch"}
    card = AmdHost(tree("amd-mi300x")).gpus()[0]
    assert {metric.name for metric in gpu.METRICS} - keys == card.read("gpu").keys()
    assert card.read("clocks") == {}


def test_ring_feeds_the_row(tree: Tree, sweep: Callable[..., Sweep]) -> None:
    root = tree("amd-mi210")
    host = AmdHost(root)
    busy = root / "sys/bus/pci/devices/0000:c3:00.0/gpu_busy_percent"
    for percent in (10, 20, 90):
        busy.write_text(f"{percent}\n")
        gpu.tick(host)
    names = [metric.name for metric in gpu.METRICS]
    row = dict(zip(names, sweep(host, ticks=0).rows[1], strict=True))
    assert (row["util_pct"], row["util_pct_min"], row["util_pct_p10"]) == (40.0, 10.0, 10.0)


def test_identity(tree: Tree) -> None:
    first = AmdHost(tree("amd-mi210")).gpus()[0].identity()
    assert first == {
        "uuid": "GPU-5e6a3b1c90d24f17",
        "serial": "692210000123",
        "pci": "0000:63:00.0",
        "model": "AMD Instinct MI210",
        "index": "0",
        "minor": "1",
        "part_number": "102-D67302-00",
        "vbios": "113-D673XT-059",
        "device_id": "740f",
        "mem_total_bytes": "68702699520",
        "driver": "amdgpu 6.7.0",
        "sm_clock_max_mhz": "1700",
        "mem_clock_max_mhz": "1600",
        "power_limit_default_w": "300",
        "power_limit_requested_w": "300",
        "pcie_gen_max": "4",
        "pcie_width_max": "16",
    }
    partitioned = AmdHost(tree("amd-mi300x")).gpus()[5].identity()
    assert (partitioned["compute_partition"], partitioned["memory_partition"]) == ("CPX", "NPS4")
    assert (partitioned["slot"], partitioned["minor"]) == ("5", "6")
    desktop = AmdHost(tree("amd-rx7900")).gpus()[0].identity()
    assert desktop["model"] == "AMD Radeon RX 7900 XTX"
    assert "serial" not in desktop


@pytest.mark.parametrize(
    ("device", "revision", "model"),
    [
        ("0x744c", "0xcc", "AMD Radeon RX 7900 XT"),
        ("0x744c", "0x00", "AMD 744c"),
        ("0x73bf", "0xc1", "AMD 73bf"),
        ("0x740f", "0x02", "AMD Instinct MI210"),
        ("junk", "0x02", None),
    ],
)
def test_model_of_a_board_without_a_name(tree: Tree, device: str, revision: str, model: str | None) -> None:
    root = tree("amd-mi210")
    card = root / "sys/bus/pci/devices/0000:63:00.0"
    (card / "product_name").write_text("\n")
    (card / "device").write_text(device)
    (card / "revision").write_text(revision)
    assert AmdHost(root).gpus()[0].identity().get("model") == model


def test_node_names_the_driver(tree: Tree) -> None:
    item = AmdHost(tree("amd-mi210")).node()
    assert (item.attributes["driver"], item.attributes["driver_version"]) == ("amdgpu 6.7.0", "6.7.0")
    assert item.attributes["hostname"] == "mi210-01"
    desktop = AmdHost(tree("amd-rx7900")).node().attributes
    assert desktop["driver"] == "amdgpu of the kernel"
    assert "driver_version" not in desktop


def test_memory_errors_are_summed_without_those_of_links(tree: Tree) -> None:
    idle, busy = AmdHost(tree("amd-mi210")).gpus()
    assert memory_errors(idle) == (3, 0)
    assert memory_errors(busy) == (14, 1)
    deferred = AmdHost(tree("amd-mi300x")).gpus()[7]
    assert memory_errors(deferred) == (7, 0)
    desktop = AmdHost(tree("amd-rx7900")).gpus()[0]
    assert memory_errors(desktop) == (Null(Reason.NOT_SUPPORTED, "ENOENT"),) * 2


def memory_errors(card: Gpu) -> tuple[object, object]:
    row = card.read("gpu_health")
    return row["ecc_corrected_total"], row["ecc_uncorrectable_total"]


def test_every_metric_of_probe_gpu_health_gets_a_cell_with_a_reason(tree: Tree) -> None:
    keys = {"gpu_uuid", "gpu_index", "pci", "state", "driver_epoch"}
    row = AmdHost(tree("amd-mi210")).gpus()[0].read("gpu_health")
    assert row.keys() == {metric.name for metric in gpu_health.METRICS} - keys
    assert {name for name, cell in row.items() if not isinstance(cell, Null)} == {
        "ecc_corrected_total",
        "ecc_uncorrectable_total",
    }
    assert row["remap_failed"] == row["recovery_action"] == Null(Reason.NOT_SUPPORTED)
    assert row["driver_version"] == Null(Reason.NOT_READ), "amdgpu may have one; it is not read here"


def test_processes_hold_cards_not_partitions(tree: Tree) -> None:
    assert AmdHost(tree("amd-mi300x")).processes() == [
        Process(41001, "0000:05:00.0", 179000000000),
        Process(41002, "0000:a6:00.0", 3221225472),
    ]
    assert AmdHost(tree("amd-mi210")).processes() == []


def test_it_has_no_links_and_no_bench(tree: Tree) -> None:
    host = AmdHost(tree("amd-mi210"))
    assert host.gpus()[0].links() == ()
    assert host.run_bench("h2d", {}).status == "unsupported"
