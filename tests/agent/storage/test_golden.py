"""What probes disk and mount read on the four hosts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.metric import Null
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"
NAMES = ("hgx-h100", "cloud-vm", "workstation", "grace")


def read(root: Path, probe: str) -> list[dict[str, object]]:
    """Rows with their cells; a NULL is the word for its reason."""
    sweep = run_probe(probe, PROBES[probe], SysfsHost(root), pytest.fail)
    assert sweep.error == ""
    found: list[dict[str, object]] = []
    for row in SysfsHost(root).rows(probe):
        cells = {metric.name: metric.check(row[metric.name]) for metric in PROBES[probe].METRICS}
        found.append(
            {
                name: f"NULL {cell.reason.name.lower()} {cell.code}" if isinstance(cell, Null) else cell
                for name, cell in cells.items()
            }
        )
    return found


@pytest.mark.parametrize("probe", ["disk", "mount"])
@pytest.mark.parametrize("name", NAMES)
def test_golden(tree: Callable[[str], Path], name: str, probe: str) -> None:
    golden = json.loads((HOSTS / name / "golden" / f"{probe}.json").read_text())
    assert read(tree(name), probe) == golden


def test_inventory_items_of_disks_and_mounts(tree: Callable[[str], Path]) -> None:
    host = SysfsHost(tree("hgx-h100"))
    assert list(host.rows("disk_item")) == [
        {
            "disk": "nvme0n1",
            "model": "SAMSUNG MZ1L2960HCJR-00A07",
            "serial": "S6WFNA0T501234",
            "firmware": "GDC7502Q",
            "wwid": "eui.36573950501234560025384100000001",
            "transport": "pcie",
            "size_bytes": "960197124096",
            "rotational": "0",
            "pci": "0000:81:00.0",
        },
        {
            "disk": "nvme1n1",
            "model": "SAMSUNG MZWLO7T6HBLA-00A07",
            "serial": "S7YTNE0X900042",
            "firmware": "OPPA4B5Q",
            "size_bytes": "7681501126656",
            "rotational": "0",
            "pci": "0000:82:00.0",
        },
    ]
    mounts = {str(row["mount"]): row for row in host.rows("mount_item")}
    assert "/home/ann" not in mounts, "an automounter takes it away again"
    assert mounts["/data"] == {
        "mount": "/data",
        "fstype": "nfs4",
        "source": "filer-01:/export/data",
        "writable": "1",
    }
    assert mounts["/models"]["writable"] == "0"
    serials = {row["disk"]: row.get("serial") for row in SysfsHost(tree("workstation")).rows("disk_item")}
    assert serials["sda"] == "S5NGNF0R234567"
