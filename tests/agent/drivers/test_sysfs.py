"""Readers of /proc and /sys on made trees, sound ones and mutilated ones."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers import DriverError, DriverGone
from gpufleet_agent.drivers.sysfs import Sysfs, SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import host as host_probe
from gpufleet_agent.probes import pci as pci_probe

UUID = "GPU-00000000-0000-4000-8000-00000000000a"
ASLEEP = Null(Reason.NOT_READ, "suspended")
ONES = b"\xff" * 64


class Tree(Protocol):
    root: Path

    def write(self, name: str, content: str | bytes) -> Path: ...
    def pci(self, address: str, **values: str | bytes) -> str: ...
    def nvidia(self, address: str, uuid: str) -> None: ...
    def host(self) -> None: ...


def rows(tree: Tree) -> dict[str, Row]:
    return {str(row["pci"]): row for row in Sysfs(tree.root).pci_devices()}


def test_a_card_on_the_bus(tree: Tree) -> None:
    tree.pci("0000:1b:00.0")
    tree.nvidia("0000:1b:00.0", UUID)
    row = rows(tree)["0000:1b:00.0"]
    expected = {
        "pci": "0000:1b:00.0",
        "device_kind": "gpu",
        "vendor_id": "10de",
        "device_id": "2330",
        "present": True,
        "bound_driver": "nvidia",
        "gpu_uuid": UUID,
        "excluded": False,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "numa_node": 1,
        "parent": "0000:1a:01.0",
        "runtime_status": "active",
        "path": "0000:1a:01.0",
        "path_links": "0000:1b:00.0 5x16/5x16",
        "path_gen": 5,
        "path_gen_max": 5,
        "path_width": 16,
        "path_width_max": 16,
        "slowest": "0000:1b:00.0",
        "narrowest": "0000:1b:00.0",
    }
    assert {name: row[name] for name in expected} == expected
    sweep = run_probe("pci", pci_probe, SysfsHost(tree.root), pytest.fail)
    assert sweep.error == ""
    absent = [name.name for name, cell in zip(pci_probe.METRICS, sweep.rows[0], strict=True) if cell is None]
    assert absent == [name for name in row if "aer_" in name], "this kernel counts no errors"
    assert sweep.reasons == [bytes([Reason.NOT_SUPPORTED]) * len(absent)]


@pytest.mark.parametrize(
    ("vendor", "pci_class", "kind"),
    [
        ("10de", "030200", "gpu"),
        ("10de", "030000", "gpu"),
        ("10de", "038000", "gpu"),
        ("1002", "038000", "gpu"),
        ("1002", "120000", "gpu"),
        ("10de", "068000", "nvswitch"),
        ("15b3", "020700", "hca"),
        ("15b3", "020000", "hca"),
        ("8086", "020700", "hca"),
        ("8086", "020000", None),
        ("10de", "040300", None),
        ("8086", "030000", None),
        ("8086", "068000", None),
        ("1af4", "ffff00", None),
    ],
)
def test_what_is_what(tree: Tree, vendor: str, pci_class: str, kind: str | None) -> None:
    tree.pci("0000:41:00.0", vendor=vendor, pci_class=pci_class)
    found = rows(tree)
    assert (found["0000:41:00.0"]["device_kind"] if found else None) == kind


def test_ethernet_with_rdma_is_an_hca_and_a_virtual_function_is_no_device(tree: Tree) -> None:
    home = tree.pci("0000:41:00.0", vendor="14e4", pci_class="020000")
    tree.write(f"{home}/infiniband/bnxt_re0/node_guid", "1")
    virtual = tree.pci("0000:41:00.1", vendor="15b3", pci_class="020700")
    (tree.root / virtual / "physfn").symlink_to("../0000:41:00.0")
    assert list(rows(tree)) == ["0000:41:00.0"]


@pytest.mark.parametrize(
    ("values", "present", "width"),
    [
        ({"config": ONES}, False, Null(Reason.FAILED, "all_ones")),
        ({"width": "63", "speed": "Unknown"}, False, Null(Reason.FAILED, "all_ones")),
        ({"speed": "Unknown"}, True, 16),
        ({"config": b""}, Null(Reason.FAILED, "unparsable"), 16),
        ({"width": "0"}, True, Null(Reason.FAILED, "0")),
        ({"width": "8"}, True, 8),
        ({"status": "suspended", "config": ONES}, ASLEEP, ASLEEP),
    ],
)  # fmt: skip
def test_a_card_that_reads_all_ones_has_left(
    tree: Tree, values: dict[str, str | bytes], present: object, width: object
) -> None:
    tree.pci("0000:1b:00.0", **values)
    row = rows(tree)["0000:1b:00.0"]
    assert row["present"] == present
    assert row["pcie_width"] == width


@pytest.mark.parametrize(
    ("speed", "gen"),
    [
        ("2.5 GT/s PCIe", 1),
        ("5.0 GT/s PCIe", 2),
        ("8 GT/s", 3),
        ("16.0 GT/s PCIe", 4),
        ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6),
        ("Unknown", Null(Reason.FAILED, "Unknown")),
        ("Unknown speed", Null(Reason.FAILED, "Unknown")),
        ("7.0 GT/s", Null(Reason.FAILED, "unparsable")),
        ("nan", Null(Reason.FAILED, "unparsable")),
        ("", Null(Reason.FAILED, "unparsable")),
    ],
)
def test_speeds(tree: Tree, speed: str, gen: object) -> None:
    tree.pci("0000:1b:00.0", speed=speed)
    assert rows(tree)["0000:1b:00.0"]["pcie_gen"] == gen


def test_what_the_bus_does_not_say(tree: Tree) -> None:
    home = tree.pci("0000:00:05.0", parent="", driver="")
    tree.write(f"{home}/numa_node", "-1\n")
    (tree.root / home / "max_link_width").unlink()
    tree.nvidia("0000:00:05.0", "GPU-????????-????-????-????-????????????")
    row = rows(tree)["0000:00:05.0"]
    assert (row["parent"], row["bound_driver"]) == ("", "")
    assert row["numa_node"] == Null(Reason.NOT_SUPPORTED, "-1")
    assert row["pcie_width_max"] == Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert row["gpu_uuid"] == Null(Reason.NOT_READ, "not_initialised")


def test_other_vendors_have_no_nvidia_uuid(tree: Tree) -> None:
    tree.pci("0000:1b:00.0", vendor="1002", pci_class="038000")
    assert rows(tree)["0000:1b:00.0"]["gpu_uuid"] == Null(Reason.NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, Reason.NOT_SUPPORTED),
        (errno.ENODEV, Reason.NOT_SUPPORTED),
        (errno.EOPNOTSUPP, Reason.NOT_SUPPORTED),
        (errno.EACCES, Reason.NO_PERMISSION),
        (errno.EPERM, Reason.NO_PERMISSION),
        (errno.EINVAL, Reason.FAILED),
        (errno.ENODATA, Reason.FAILED),
        (errno.ENXIO, Reason.FAILED),
        (errno.EIO, Reason.FAILED),
    ],
)
def test_an_errno_is_a_reason_and_its_name_the_code(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason
) -> None:
    tree.pci("0000:1b:00.0")

    def refuse(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    null = Null(reason, errno.errorcode[number])
    assert Sysfs(tree.root).runtime_status("0000:1b:00.0") == null


def test_this_very_machine_can_be_read() -> None:
    host = SysfsHost()
    for name, probe in {"host": host_probe, "pci": pci_probe}.items():
        assert run_probe(name, probe, host, pytest.fail).error == ""
    found = host.read("host")
    assert found["cpus"] == os.cpu_count()
    assert host.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_node(tree: Tree) -> None:
    item = SysfsHost(tree.root).node()
    assert item.entity == "node:"
    assert item.attributes == {
        "hostname": "gpu-a01",
        "machine_id": "5b0e6d1f27a94c83b6d2e4f8091a3c57",
        "boot_id": "1d9051fe-4ab7-464d-96ab-144fcdc4c138",
        "kernel": "6.8.0-60-generic",
        "architecture": os.uname().machine,
        "os": "Debian GNU/Linux 12 (bookworm)",
        "vendor": "Supermicro",
        "cpu_model": "AMD EPYC 9554 64-Core Processor",
        "cpus": "2",
        "mem_total_bytes": "1024000",
        "iommu": "off",
        "driver": "no NVIDIA driver",
    }


@pytest.mark.parametrize("machine", ["", "uninitialized\n", "0" * 32, "3d12", "x" * 32])
def test_a_machine_id_that_is_none_is_left_out(tree: Tree, machine: str) -> None:
    tree.write("etc/machine-id", machine)
    assert "machine_id" not in SysfsHost(tree.root).node().attributes


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Tue Mar 11\nGCC version: gcc 12\n",
            "NVIDIA 570.133.20",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build\n",
            "NVIDIA 595.45.04",
        ),
        ("nonsense", "NVIDIA driver not loaded"),
    ],
)
def test_the_driver_in_words(tree: Tree, version: str, words: str) -> None:
    tree.pci("0000:1b:00.0")
    tree.write("proc/driver/nvidia/version", version)
    assert SysfsHost(tree.root).node().attributes["driver"] == words


def test_a_host_without_cards_is_not_a_host_whose_cards_nobody_can_ask(tree: Tree) -> None:
    host = SysfsHost(tree.root)
    tree.pci("0000:05:00.0", vendor="1002", pci_class="030000")
    tree.pci("0000:1b:00.0", driver="vfio-pci")  # a virtual machine's, not ours
    assert host.gpus() == ()
    tree.pci("0000:1c:00.0", driver="nouveau")
    with pytest.raises(DriverGone) as caught:
        host.gpus()
    assert caught.value.code == "no_library"


def test_no_bus_is_empty_but_no_sysfs_says_nothing(tree: Tree) -> None:
    assert Sysfs(tree.root).pci_devices() == []
    shutil.rmtree(tree.root / "sys")
    with pytest.raises(DriverError) as caught:
        Sysfs(tree.root).pci_devices()
    assert caught.value.code == "no_sysfs"
    tree.write("sys/bus/pci/devices", "a file")
    with pytest.raises(DriverError) as caught:
        Sysfs(tree.root).pci_devices()
    assert caught.value.code == "ENOTDIR"


def test_foreign_names_and_loops_on_the_bus(tree: Tree) -> None:
    tree.pci("0000:1b:00.0")
    bus = tree.root / "sys/bus/pci/devices"
    (bus / "loop").symlink_to("loop")
    (bus / "0000:99:00.0").symlink_to("0000:99:00.0")
    (bus / "0000:98:00.0").symlink_to("nowhere")
    (bus / "0000:97:00.0").mkdir()
    assert list(rows(tree)) == ["0000:1b:00.0"]
    driver = tree.root / "sys/devices/pci0000:00/0000:1a:01.0/0000:1b:00.0/driver"
    driver.unlink()
    driver.write_text("no link")
    assert rows(tree)["0000:1b:00.0"]["bound_driver"] == Null(Reason.FAILED, "EINVAL")


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), junk=st.binary(max_size=80))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutilated_tree_raises(tree: Tree, seed: int, junk: bytes) -> None:
    chance = random.Random(seed)
    if not (tree.root / "sys/bus").exists():
        for number in range(4):
            tree.pci(f"0000:{number + 16:02x}:00.0")
            tree.nvidia(f"0000:{number + 16:02x}:00.0", UUID)
        shutil.copytree(tree.root / "proc", tree.root / "kept/proc", symlinks=True)
        shutil.copytree(tree.root / "sys", tree.root / "kept/sys", symlinks=True)
    for name in ("proc", "sys"):
        shutil.rmtree(tree.root / name)
        shutil.copytree(tree.root / "kept" / name, tree.root / name, symlinks=True)
    files = sorted(
        path for name in ("proc", "sys") for path in (tree.root / name).rglob("*") if path.is_file()
    )
    for path in chance.sample(files, 12):
        content = path.read_bytes()
        how = chance.randrange(5)
        path.unlink()
        if how == 0:
            path.write_bytes(content[: chance.randrange(len(content) + 1)])
        elif how == 1:
            path.write_bytes(junk)
        elif how == 2:
            path.mkdir()
        elif how == 3:
            path.write_bytes(content.replace(b"1", junk))
    host = SysfsHost(tree.root)
    for name, probe in {"pci": pci_probe, "host": host_probe}.items():
        sweep = run_probe(name, probe, host, pytest.fail)
        assert sweep.error == ""
    assert host.node().entity == "node:"
    assert "\n" not in "".join(host.node().attributes.values())
