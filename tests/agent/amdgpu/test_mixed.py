"""Which driver a host gets, and one host with cards of two makers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet_agent.drivers import DriverError, DriverGone, Host
from gpufleet_agent.drivers.amdgpu import AmdHost
from gpufleet_agent.drivers.composite import CompositeHost
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.drivers.open import open_host
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu
from gpufleet_agent.scenario import parse

Tree = Callable[[str], Path]
SCENARIO = b"""
[fleet]
nodes = 1
gpus = 2
"""


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without NVIDIA's library."""
    monkeypatch.setattr("gpufleet_agent.drivers.open._library_loads", lambda: False)


def nvidia_on_bus(root: Path) -> None:
    path = root / "sys/bus/pci/devices/0000:21:00.0"
    for name, text in {"vendor": "0x10de", "class": "0x030200", "max_link_speed": "32.0 GT/s PCIe"}.items():
        (path / name).write_text(text + "\n")


def test_the_driver_of_a_host(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "sys/devices").mkdir(parents=True)
    assert type(open_host("auto", tmp_path)) is SysfsHost
    assert type(open_host("auto", tree("amd-mi300x"))) is AmdHost
    mixed = tree("amd-mi210")
    nvidia_on_bus(mixed)
    assert type(open_host("auto", mixed)) is CompositeHost
    assert type(open_host("amdgpu", mixed)) is AmdHost
    assert type(open_host("nvml", mixed)) is NvmlHost
    assert type(open_host("none", mixed)) is SysfsHost
    with pytest.raises(ValueError, match="amdgpu"):
        open_host("rocm", mixed)


def test_graphics_of_a_processor_make_no_amd_host(tree: Tree) -> None:
    root = tree("amd-rx7900")
    (root / "sys/bus/pci/devices/0000:03:00.0").unlink()
    assert type(open_host("auto", root)) is SysfsHost


def test_cards_that_wait_for_the_driver_make_an_amd_host(tree: Tree) -> None:
    root = tree("amd-mi210")
    for pci in ("0000:63:00.0", "0000:c3:00.0"):
        (root / "sys/bus/pci/drivers/amdgpu" / pci).unlink()
        ((root / "sys/bus/pci/devices" / pci).resolve() / "driver").unlink()
    host = open_host("auto", root)
    with pytest.raises(DriverGone):
        host.gpus()


@pytest.fixture
def nvidia() -> SimulatedHost:
    scenario = parse(SCENARIO)
    return scenario.host(scenario.node_names()[0], lambda: 100.0, 1_700_000_000_000_000)


def test_both_makers_in_one_sweep(tree: Tree, nvidia: SimulatedHost, sweep: Callable[[Host], Sweep]) -> None:
    amd = AmdHost(tree("amd-mi210"))
    host = CompositeHost((nvidia, amd))
    found = sweep(host)
    names = [metric.name for metric in gpu.METRICS]
    cards = [dict(zip(names, row, strict=True)) for row in found.rows]
    assert [card["state"] for card in cards] == ["ok"] * 4
    assert [card["gpu_uuid"] for card in cards] == [card.uuid for card in (*nvidia.gpus(), *amd.gpus())]
    assert {card["driver_epoch"] for card in cards} == {nvidia.epoch + 1}
    item = host.node().attributes
    assert item["hostname"] == nvidia.node().attributes["hostname"]
    assert item["driver"] == f"{nvidia.node().attributes['driver']}, amdgpu 6.7.0"
    assert item["driver_version"] == f"{nvidia.node().attributes['driver_version']}, 6.7.0"
    assert host.gpus()[3].links() == ()
    assert list(host.processes()) == list(nvidia.processes())
    assert host.read("host") == nvidia.read("host")
    assert list(host.pci_devices()) == list(nvidia.pci_devices())


def test_a_bench_runs_by_the_driver_of_its_card(tree: Tree, nvidia: SimulatedHost) -> None:
    amd = AmdHost(tree("amd-mi210"))
    host = CompositeHost((amd, nvidia))
    assert host.run_bench("h2d", {"pci": nvidia.gpus()[0].pci}).status == "ok"
    assert host.run_bench("h2d", {"gpu_uuid": amd.gpus()[0].uuid}).status == "unsupported"
    assert host.run_bench("no_such", {}).status == "unsupported"


def test_one_driver_gone_leaves_the_cards_of_the_other(
    tree: Tree, sweep: Callable[[Host], Sweep], tmp_path: Path
) -> None:
    root = tree("amd-mi210")
    nvidia_on_bus(root)
    host = open_host("auto", root)
    found = sweep(host)
    assert (found.error, len(found.rows)) == ("", 2)
    assert "NVIDIA driver not loaded" in host.node().attributes["driver"]
    for pci in ("0000:63:00.0", "0000:c3:00.0"):
        (root / "sys/bus/pci/drivers/amdgpu" / pci).unlink()
    fresh = open_host("auto", root)
    with pytest.raises(DriverGone):
        fresh.gpus()


def test_what_is_not_there_is_not_said_of_the_driver(tree: Tree) -> None:
    root = tree("amd-mi210")
    host = CompositeHost((SysfsHost(root), AmdHost(root)))
    assert host.node().attributes["driver"] == "amdgpu 6.7.0"
    assert len(host.gpus()) == 2


def test_a_root_without_a_bus_is_no_amd_host(tmp_path: Path) -> None:
    assert type(open_host("auto", tmp_path)) is SysfsHost


def test_trouble_of_one_driver_is_not_the_others(tree: Tree, tmp_path: Path) -> None:
    amd = AmdHost(tree("amd-mi210"))
    assert len(CompositeHost((AmdHost(tmp_path), amd)).gpus()) == 2
    with pytest.raises(DriverError):
        CompositeHost((AmdHost(tmp_path), SysfsHost(tmp_path))).gpus()
