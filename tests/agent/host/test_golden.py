"""Four kinds of hosts, written from the documented formats: each column of each, as we read it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpufleet.metric import Metric, Null, Row
from gpufleet_agent.drivers.edac import Edac
from gpufleet_agent.drivers.host import Machine
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probes import edac, host

HOSTS = ("hgx-h100", "cloud-vm", "workstation", "grace")
GOLDEN = Path(__file__).parents[2] / "fixtures" / "hosts"


def still() -> float:
    return 0.0


def shown(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[dict[str, object]]:
    """Cells as the golden files have them: NULL with its reason as text."""
    found: list[dict[str, object]] = []
    for row in rows:
        cells = {metric.name: metric.check(row[metric.name]) for metric in metrics}
        found.append(
            {
                name: f"NULL {cell.reason.name.lower()} {cell.code}".rstrip()
                if isinstance(cell, Null)
                else cell
                for name, cell in cells.items()
            }
        )
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_readings_are_as_written_down(tree: Callable[[str], Path], name: str) -> None:
    root = tree(name)
    readings = {
        "host": shown([Machine(root, still).read()], host.METRICS),
        "edac": shown(Edac(root, still).rows(), edac.METRICS),
    }
    for probe, found in readings.items():
        assert found == json.loads((GOLDEN / name / "golden" / f"{probe}.json").read_text()), probe


def test_what_the_node_is(tree: Callable[[str], Path]) -> None:
    wanted = {
        "hgx-h100": {
            "cpu_model": "Intel(R) Xeon(R) Platinum 8480C", "cpus": "40", "cpu_governor": "performance",
            "cpu_frequency_driver": "intel_pstate", "cpu_idle_driver": "intel_idle",
            "cpu_idle_deepest": "C1E",
            "cpu_idle_latency_us": "2", "intel_idle_max_cstate": "9", "pcie_aspm_policy": "performance",
            "transparent_hugepages": "madvise", "numa_balancing": "0", "clocksource": "tsc",
        },
        "cloud-vm": {"cpu_model": "AMD EPYC 7R13 Processor", "clocksource": "kvm-clock"},
        "workstation": {"cpu_governor": "performance+schedutil", "cpu_idle_latency_us": "350"},
        "grace": {"cpu_model": "Arm Neoverse V2", "cpu_frequency_driver": "cppc_cpufreq"},
    }  # fmt: skip
    for name, attributes in wanted.items():
        found = SysfsHost(tree(name)).node().attributes
        assert {key: found.get(key) for key in attributes} == attributes
        assert all(found.values())
    assert "cpu_idle_deepest" not in SysfsHost(tree("cloud-vm") / "nothing").node().attributes


def test_what_the_modules_are(tree: Callable[[str], Path]) -> None:
    items = {str(item["dimm"]): item for item in SysfsHost(tree("hgx-h100")).rows("dimm_item")}
    assert len(items) == 12
    assert items["mc2/dimm1"] == {
        "dimm": "mc2/dimm1",
        "label": "CPU_SrcID#1_MC#0_Chan#1_DIMM#0",
        "location": "channel 1 slot 0",
        "mem_type": "Registered-DDR5",
        "size_bytes": 64 << 30,
    }
    assert list(SysfsHost(tree("cloud-vm")).rows("dimm_item")) == []
