"""The real binding on a made library: structures, versions, missing functions, codes, hangs and crashes.

Everything else about the driver is tested on stand-ins for the binding; here it is the binding that is
tested, and our own structures with it.
"""

import ctypes
import inspect
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import pynvml
import pytest

from gpufleet_agent.drivers import nvml as nvml_module
from gpufleet_agent.drivers.nvml_errors import CODES
from gpufleet_agent.drivers.nvml_gpm import Between
from gpufleet_agent.drivers.nvml_gpm import Metric as GpmMetric
from gpufleet_agent.drivers.nvml_values import FabricV2, FabricV3, Platform, SramStatus

Row = dict[str, object]


class Process(Protocol):
    pid: int
    returncode: int | None

    def wait(self, timeout: float) -> int: ...


class Reader(Protocol):
    root: Path
    process: Process

    def say(self, *lines: str) -> None: ...
    def send(self, **command: object) -> None: ...
    def receive(self) -> object: ...
    def ask(self, do: str, index: int = 0, group: str = "gpu") -> object: ...
    def word(self) -> str: ...


Start = Callable[..., Reader]


def row(reader: Reader, group: str, index: int = 0) -> Row:
    return cast(Row, reader.ask("read", index, group))


def states(reader: Reader) -> list[object]:
    error, rows = cast(tuple[str, list[Row]], reader.ask("probe", group="gpu"))
    assert error == ""
    return [one["state"] for one in rows]


def used() -> set[str]:
    """The binding's functions that the driver names."""
    folder = Path(nvml_module.__file__).parent
    names = ("nvml.py", "nvml_card.py", "nvml_gpm.py", "nvml_health.py", "nvml_links.py")
    texts = [folder.joinpath(name).read_text() for name in names]
    return set(re.findall(r'"(nvml[A-Z]\w+)"', "".join(texts)))


def symbols(function: str) -> set[str]:
    """The library's symbols behind a function of the binding, by its source."""
    source = inspect.getsource(getattr(pynvml, function))
    found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    for inner in re.findall(r"return (nvml\w+)\(|^    (nvmlInitWithFlags)\(", source, re.MULTILINE):
        found |= symbols(next(name for name in inner if name))
    return found


def test_the_fake_has_every_function_that_the_driver_uses(libraries: dict[str, Path]) -> None:
    needed = sorted({symbol for function in used() for symbol in symbols(function)})
    assert len(needed) > 50
    # not in this process: whoever looks for the library later would find this one
    look = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
        "print([symbol for symbol in sys.argv[2:] if not hasattr(library, symbol)])"
    )
    path = str(libraries["new"] / "libnvidia-ml.so.1")
    said = subprocess.run(
        [sys.executable, "-c", look, path, *needed], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("structure", "size"),
    [
        (pynvml.c_nvmlFieldValue_t, 40), (pynvml.nvmlPciInfo_t, 68), (pynvml.c_nvmlMemory_v2_t, 40),
        (pynvml.c_nvmlProcessInfo_v2_t, 24), (SramStatus, 104), (FabricV2, 36), (FabricV3, 40),
        (Platform, 44), (GpmMetric, ctypes.sizeof(pynvml.c_nvmlGpmMetric_t)), (Between, 24 + 4 * 40),
    ],
)  # fmt: skip
def test_structures_are_as_large_as_the_library_takes_them(
    structure: type[ctypes.Structure], size: int
) -> None:
    assert ctypes.sizeof(structure) == size


def test_a_card_of_a_new_driver(reader: Start) -> None:
    new = reader("new")
    new.say("field 82 1 71 0", "field 269 3 2000000000 0", "field 271 3 1 3", "field 198 3 4096 0")
    found = row(new, "gpu", 1)
    assert {name: cell for name, cell in found.items() if not name.endswith(("_min", "_p10"))} == {
        "util_pct": 97, "sm_clock_mhz": 1755, "power_w": 690.5, "power_limit_w": 700.0, "mem_util_pct": 61,
        "mem_clock_mhz": 2619, "mem_used_bytes": 70_000_000_000, "mem_total_bytes": 85_520_809_984,
        "temperature_c": 64, "temperature_margin_c": 23, "mem_temperature_c": 71, "pstate": 0,
        "clock_reasons": 4, "energy_j_total": 5000.5, "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16,
        "pcie_width_max": 16, "power_cap_s_total": 4.0, "sync_boost_s_total": 6.0, "sw_thermal_s_total": 2.0,
        "hw_thermal_s_total": ["NOT_SUPPORTED", "NVML 3"], "hw_brake_s_total": ["NOT_SUPPORTED", "NVML 3"],
        "pcie_tx_bytes_total": ["NOT_SUPPORTED", "NVML 3"], "pcie_rx_bytes_total": 4096, "fan_pct": 30,
        **{name: ["NOT_READ", "first"] for name in ACTIVITY},
    }  # fmt: skip
    assert new.word() == ""


ACTIVITY = ("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "mem_active_pct")


def activity(reader: Reader, index: int = 0) -> list[object]:
    found = row(reader, "gpu", index)
    return [found[name] for name in ACTIVITY]


def test_what_the_parts_of_a_card_did_is_read_between_two_samples(reader: Start) -> None:
    new = reader("new")
    assert activity(new) == [["NOT_READ", "first"]] * 4
    assert activity(new, 1) == [["NOT_READ", "first"]] * 4
    time.sleep(0.15)
    # the other card took one in between: 20 and the metric's number
    assert activity(new) == [22, 23, ["NOT_SUPPORTED", "NVML 3"], 30]
    time.sleep(0.15)
    assert activity(new) == [12, 13, ["NOT_SUPPORTED", "NVML 3"], 20]
    new.say("fail nvmlGpmSampleGet@0 999")
    time.sleep(0.15)
    assert activity(new) == [["FAILED", "NVML 999"]] * 4
    new.say()
    assert activity(new) == [["NOT_READ", "first"]] * 4


def test_cards_that_are_all_lost_are_found_by_another_start_and_count_anew(reader: Start) -> None:
    new = reader("new")
    assert states(new) == ["ok", "ok"]
    new.say("fail nvmlDeviceGetClockInfo 15", "fail nvmlDeviceGetHandleByPciBusId_v2 15")
    assert states(new) == ["lost", "lost"]
    new.say("fail nvmlDeviceGetHandleByPciBusId_v2 15")  # as long as nobody initialises the library
    deadline = time.monotonic() + 9.0  # a lost card is asked for again after ten seconds
    while states(new) != ["ok", "ok"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    _, rows = cast(tuple[str, list[Row]], new.ask("probe", group="gpu"))
    assert {one["driver_epoch"] for one in rows} == {2}


def test_an_older_card_has_no_parts_to_speak_of(reader: Start) -> None:
    new = reader("new")
    new.say("number nvmlGpmQueryDeviceSupport 0")
    assert activity(new) == [["NOT_SUPPORTED", ""]] * 4
    assert activity(reader("old")) == [["NOT_SUPPORTED", "NVML 13"]] * 4


def test_who_a_card_is(reader: Start) -> None:
    new = reader("new")
    found = cast(dict[str, str], new.ask("identity", 1))
    expected = {
        "uuid": "GPU-00000000-0000-4000-8000-000000000001", "pci": "0000:11:00.0", "index": "1",
        "model": "NVIDIA H100 80GB HBM3", "serial": "1650522000001", "part_number": "692-2G520-0200-000",
        "vbios": "96.00.89.00.01", "inforom": "G520.0200.00.05", "gsp_firmware": "570.133.20", "minor": "1",
        "slot": "5", "sm_clock_max_mhz": "1980", "mem_clock_max_mhz": "2619", "sm_clock_boost_mhz": "1980",
        "pcie_gen_max": "5", "pcie_gen_card_max": "6", "mem_bus_width_bits": "5120", "architecture": "Hopper",
        "driver": "570.133.20", "cuda": "12.8", "nvml": "12.570.133.20", "device_id": "2330",
        "pdi": "fedcba9876543210", "chassis_serial": "1820324000042", "chassis_slot": "3",
        "chassis_tray": "11", "virtualization": "none", "inforom_state": "ok", "card_kind": "datacenter",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    new.say("fail nvmlDeviceValidateInforom@0 14")
    assert cast(dict[str, str], new.ask("identity", 0))["inforom_state"] == "corrupted"


def test_the_health_of_a_card(reader: Start) -> None:
    new = reader("new")
    fields = {1: 1, 2: 0, 3: 5, 11: 4, 94: 9, 144: 1, 145: 0, 230: 4, 188: 700_000}
    processes = "2 4711 1000000 9999 18446744073709551615"
    new.say(
        *(f"field {number} 3 {value} 0" for number, value in fields.items()),
        "field 194 5 -2 0",
        f"number nvmlDeviceGetComputeRunningProcesses_v3 {processes}",
    )
    found = row(new, "gpu_health")
    expected = {
        "recovery_action": "drain_and_reset", "ecc_enabled": True, "ecc_pending": False,
        "ecc_corrected_total": 5, "ecc_uncorrectable_total": 10, "ecc_uncorrectable_lifetime_total": 11,
        "ecc_dram_corrected_total": 4, "ecc_dram_uncorrectable_lifetime_total": 211,
        # counts of the structure: aggregate parity, SEC-DED, corrected, then volatile: 1 to 6
        "ecc_sram_uncorrectable_lifetime_total": 3, "ecc_sram_corrected_lifetime_total": 3,
        "ecc_sram_uncorrectable_total": 9, "ecc_sram_corrected_total": 6,
        "ecc_sram_threshold_exceeded": False,
        "remap_pending": True, "remap_failed": False, "remap_banks_max": 2560, "remap_banks_none": 0,
        "retired_pages_corrected_total": 1, "retired_pages_uncorrectable_total": 2,
        "retired_pages_pending": True, "tpc_repair_pending": True, "channel_repair_pending": False,
        "memory_unrepairable": False, "pcie_replay_total": 9, "power_limit_max_w": 700.0,
        "power_limit_requested_w": 650.0, "slowdown_margin_c": -2, "persistence_enabled": True,
        "mig_enabled": False, "compute_mode": "exclusive_process", "fabric_state": "completed",
        "fabric_health": "healthy", "fabric_health_bits": 0x51AA, "processes": 2,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert new.ask("processes") == [
        [4711, "0000:10:00.0", 1_000_000, ""], [9999, "0000:10:00.0", None, "no_such_pid"],
        [4711, "0000:11:00.0", 1_000_000, ""], [9999, "0000:11:00.0", None, "no_such_pid"],
    ]  # fmt: skip


def test_a_fabric_structure_that_is_too_new_for_the_driver(reader: Start) -> None:
    new = reader("new")
    new.say("number newest_fabric 2", "number nvmlDeviceGetGpuFabricInfoV 2")
    found = row(new, "gpu_health")
    assert found["fabric_state"] == "in_progress"
    assert found["fabric_health"] == ["NOT_SUPPORTED", ""]


@pytest.mark.parametrize("inject", [False, True])
def test_a_card_of_an_old_driver(reader: Start, inject: bool) -> None:
    old = reader("old", inject=inject)
    old.say("number nvmlDeviceGetArchitecture 7")
    found = row(old, "gpu")
    expected = {
        "temperature_c": 63, "clock_reasons": 6, "mem_used_bytes": 70_500_000_000,
        "temperature_margin_c": ["NOT_SUPPORTED", "NVML 13"], "power_cap_s_total": 4.0,
        "sw_thermal_s_total": 5.0, "hw_thermal_s_total": ["NOT_SUPPORTED", "NVML 3"],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    health = row(old, "gpu_health")
    expected = {
        "ecc_sram_uncorrectable_total": 710, "ecc_sram_threshold_exceeded": ["NOT_SUPPORTED", "NVML 13"],
        "remapped_rows_uncorrectable_total": 2, "remap_pending": True, "retired_pages_uncorrectable_total": 2,
        "power_limit_min_w": 200.0, "slowdown_temperature_c": 95, "pcie_replay_total": 3, "processes": 0,
        "recovery_action": ["NOT_SUPPORTED", "NVML 3"], "fabric_state": ["NOT_SUPPORTED", "NVML 13"],
    }  # fmt: skip
    assert {name: health[name] for name in expected} == expected


def test_every_code_is_the_reason_that_the_table_says(reader: Start) -> None:
    new = reader("new")
    for code, known in sorted(CODES.items()):
        new.say(f"fail nvmlDeviceGetTotalEnergyConsumption@{code % 2} {code}")
        if known.restart or code == 15:
            continue
        found = row(new, "gpu", code % 2)
        assert found["energy_j_total"] == [known.reason.name, f"NVML {code}"], code
        assert found["temperature_c"] == 64
        # what the card is known to lack stays; a new reader per code would cost a second each
        if known.reason.name == "NOT_SUPPORTED":
            new.say(f"number nvmlDeviceGetMigMode@{code % 2} 1")
            row(new, "gpu", code % 2)
            new.say("")
            row(new, "gpu", code % 2)
    new.say("")
    assert [row(new, "gpu", index)["energy_j_total"] for index in (0, 1)] == [5000.5, 5000.5]


def test_A10_texts_that_are_none(reader: Start) -> None:
    new = reader("new")
    new.say("bytes nvmlDeviceGetName@0 f8a1a100004e", "bytes nvmlDeviceGetSerial@0 fffefd",
            "bytes nvmlDeviceGetVbiosVersion@0 70e97468", "text nvmlDeviceGetSerial@1 N/A",
            "text nvmlDeviceGetUUID@0 nonsense", "bytes nvmlDeviceGetGspFirmwareVersion@0 ff31")  # fmt: skip
    found = cast(dict[str, str], new.ask("identity", 0))
    assert found["model"] == "\\xf8\\xa1\\xa1"
    assert found["vbios"] == "p\\xe9th"
    assert found["gsp_firmware"] == "\\xff1"
    assert not {"serial", "uuid"} & set(found)
    other = cast(dict[str, str], new.ask("identity", 1))
    assert other["model"] == "NVIDIA H100 80GB HBM3"
    assert "serial" not in other
    assert states(new) == ["ok", "ok"]


def test_A09_a_field_without_success_has_no_value(reader: Start) -> None:
    new = reader("new")
    new.say("field 82@0 1 0 3", "field 74@0 3 91234567000 0", "field 82@1 1 255 0", "field 94 3 7 21")
    error, rows = cast(tuple[str, list[Row]], new.ask("probe", group="gpu"))
    assert error == ""
    assert [one["mem_temperature_c"] for one in rows] == [None, None]
    assert rows[0]["power_cap_s_total"] == pytest.approx(91.234567)
    assert row(new, "gpu", 0)["mem_temperature_c"] == ["NOT_SUPPORTED", "NVML 3"]
    assert row(new, "gpu", 1)["mem_temperature_c"] == 255  # refused by the column's range
    assert row(new, "gpu_health")["pcie_replay_total"] == 3  # field says "no data": the function is asked


def test_B01_a_card_that_falls_leaves_the_other(reader: Start) -> None:
    new = reader("new")
    assert states(new) == ["ok", "ok"]
    new.say("fail nvmlDeviceGetPowerUsage@1 15", "fail nvmlDeviceGetHandleByPciBusId_v2@1 15",
            "fail nvmlDeviceGetEnforcedPowerLimit@1 15")  # fmt: skip
    assert states(new) == ["ok", "lost"]
    assert cast(Row, new.ask("read", 1))["error"] == [
        "Lost", "gpu_is_lost", "0000:11:00.0 does not answer: NVML 15",
    ]  # fmt: skip


def test_no_library_and_no_driver(reader: Start) -> None:
    bare = reader("")
    if any(Path("/").glob("usr/lib*/**/libnvidia-ml.so.1")):
        pytest.skip("this machine has NVIDIA's library")
    assert cast(list[object], bare.ask("probe", group="gpu"))[0] == "no_library"
    new = reader("new")
    new.say("fail nvmlInitWithFlags 9")
    assert cast(list[object], new.ask("probe", group="gpu"))[0] == "driver_not_loaded"


def test_B09_the_versions_of_a_half_upgraded_driver(reader: Start) -> None:
    new = reader("new")
    version = new.root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 2024\n")
    library = new.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.symlink_to("libnvidia-ml.so.550.144.03")
    new.say("fail nvmlInitWithFlags 18")
    error = cast(Row, new.ask("read"))["error"]
    assert cast(list[str], error)[:2] == ["DriverGone", "driver_mismatch"]
    assert "550.127.05" in cast(list[str], error)[2]
    assert "550.144.03" in cast(list[str], error)[2]
    assert cast(list[object], new.ask("probe", group="gpu"))[0] == "driver_mismatch"


def test_B07_a_call_that_does_not_return_is_named(reader: Start) -> None:
    new = reader("new")
    assert states(new) == ["ok", "ok"]
    new.say("block nvmlDeviceGetTemperatureV@1")
    new.send(do="read", index=1, group="gpu")
    until = time.monotonic() + 90
    while new.word() != "0000:11:00.0 nvmlDeviceGetTemperatureV" and time.monotonic() < until:
        time.sleep(0.02)
    assert new.word() == "0000:11:00.0 nvmlDeviceGetTemperatureV"
    new.say("")
    assert cast(Row, new.receive())["temperature_c"] == 64
    assert new.word() == ""


def test_a_crash_in_the_library_is_named(reader: Start) -> None:
    new = reader("new")
    assert states(new) == ["ok", "ok"]
    new.say("crash nvmlDeviceGetTotalEnergyConsumption@1")
    assert row(new, "gpu", 0)["temperature_c"] == 64
    new.send(do="read", index=1, group="gpu")
    assert new.process.wait(90) == -signal.SIGSEGV
    assert new.word() == "0000:11:00.0 nvmlDeviceGetTotalEnergyConsumption"
