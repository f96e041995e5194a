"""NVML's errors and oddities, played by a module that stands in for pynvml."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.config import ConfigError
from gpufleet.event import Event
from gpufleet.metric import Null, Reason
from gpufleet_agent.drivers import DriverError, DriverGone, Gpu, Hung, Lost, nvidia_cards
from gpufleet_agent.drivers import nvml as nvml_module
from gpufleet_agent.drivers import open as which_driver
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.drivers.open import Simulated, open_host
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import gpu as gpu_probe

SUSPENDED = Null(Reason.NOT_READ, "suspended")


class Clock(Protocol):
    t: float

    def __call__(self) -> float: ...


class Tree(Protocol):
    root: Path

    def write(self, name: str, content: str | bytes) -> object: ...
    def pci(self, address: str, **values: str | bytes) -> str: ...
    def nvidia(self, address: str, uuid: str, excluded: str = "No") -> None: ...


class Nvml(Protocol):
    """conftest.py has it."""

    slots: list[int]
    fail: dict[str | tuple[str, int], int | Exception]
    says: dict[str | tuple[str, int], object]
    fields: dict[int | tuple[int, int], object]
    missing: set[str]
    calls: Counter[str]
    answers: dict[str, object]

    def field(self, number: int, value: float, kind: int = 3, code: int = 0) -> object: ...
    def array(self, values: list[object]) -> object: ...


def uuid(slot: int) -> str:
    return f"GPU-00000000-0000-4000-8000-00000000000{slot:x}"


def address(slot: int) -> str:
    return f"0000:{slot + 16:02x}:00.0"


class Watch:
    """A progress that remembers, and checks that calls do not nest."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.depth = 0

    def enter(self, card: str, call: str) -> None:
        assert self.depth == 0
        self.depth = 1
        self.calls.append((card, call))

    def leave(self) -> None:
        self.depth = 0


def sweep(host: NvmlHost) -> list[dict[str, object]]:
    """The gpu probe's rows by metric name, NULLs as None."""
    gpu_probe.tick(host)
    run = run_probe("gpu", gpu_probe, host, pytest.fail)
    assert run.error == ""
    names = [metric.name for metric in gpu_probe.METRICS]
    return [dict(zip(names, row, strict=True)) for row in run.rows]


def states(host: NvmlHost) -> list[object]:
    return [row["state"] for row in sweep(host)]


def test_a_whole_row_in_our_units(host: NvmlHost) -> None:
    row = sweep(host)[2]
    assert row == {
        "gpu_uuid": uuid(2),
        "gpu_index": 2,
        "pci": "0000:12:00.0",
        "state": "ok",
        **dict.fromkeys(("util_pct", "util_pct_min", "util_pct_p10"), 97.0),
        **dict.fromkeys(("sm_clock_mhz", "sm_clock_mhz_min", "sm_clock_mhz_p10"), 1755.0),
        **dict.fromkeys(("power_w", "power_w_min", "power_w_p10"), 690.5),
        "power_limit_w": 700.0,
        "mem_util_pct": 61.0,
        "mem_clock_mhz": 1755.0,
        "mem_used_bytes": 70_000_000_000,
        "mem_total_bytes": 85_520_809_984,
        "temperature_c": 64.0,
        "temperature_margin_c": 23.0,
        "mem_temperature_c": None,  # 2e9 degrees are not plausible
        "pstate": 0,
        "clock_reasons": 4,
        "power_cap_s_total": 2.0,
        "sync_boost_s_total": 2.0,
        "sw_thermal_s_total": 2.0,
        "hw_thermal_s_total": 2.0,
        "hw_brake_s_total": 2.0,
        "energy_j_total": 5000.5,
        "pcie_tx_bytes_total": 2_000_000_000,
        "pcie_rx_bytes_total": 2_000_000_000,
        **dict.fromkeys(("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "mem_active_pct")),
        "fan_pct": 30.0,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "driver_epoch": 1,
    }


def test_identity(host: NvmlHost, nvml: Nvml) -> None:
    assert host.gpus()[1].identity() == {
        "uuid": uuid(1),
        "pci": "0000:11:00.0",
        "index": "1",
        "model": "NVIDIA H100 80GB HBM3",
        "serial": "1650522000001",
        "part_number": "692-2G520-0200-000",
        "vbios": "96.00.89.00.01",
        "inforom": "G520.0200.00.05",
        "gsp_firmware": "570.133.20",
        "minor": "2",
        "slot": "5",
        "sm_clock_max_mhz": "1980",
        "mem_clock_max_mhz": "1980",
        "sm_clock_boost_mhz": "1980",
        "pcie_gen_max": "5",
        "pcie_gen_card_max": "5",
        "pcie_width_max": "16",
        "mem_bus_width_bits": "5120",
        "power_limit_default_w": "700",
        "power_limit_requested_w": "700",
        "mem_total_bytes": "85520809984",
        "architecture": "Hopper",
        "driver": "570.133.20",
        "cuda": "12.8",
        "nvml": "12.570.133.20",
        "device_id": "2330",
        "card_kind": "datacenter",
        "form_factor": "sxm5",
        "virtualization": "passthrough",
        "inforom_state": "ok",
        "inforom_checksum": "305419896",
        "pdi": "0123456789abcdef",
    }
    nvml.says = {
        "nvmlDeviceGetSerial": "N/A",
        "nvmlDeviceGetVbiosVersion": b"\xff\xfe96.00",
    }
    nvml.fail = {
        "nvmlDeviceGetBoardPartNumber": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        "nvmlDeviceGetModuleId": 3,
    }
    found = host.gpus()[0].identity()
    assert not {"serial", "slot"} & set(found)
    assert found["part_number"] == "\\xff"
    assert (found["vbios"], found["architecture"]) == ("\\xff\\xfe96.00", "Hopper")
    nvml.says["nvmlDeviceGetArchitecture"] = 99
    assert host.gpus()[2].identity()["architecture"] == "newer (99)"


def test_the_node_names_its_driver(host: NvmlHost) -> None:
    assert host.node().attributes["driver"] == "NVIDIA driver not loaded"
    host.gpus()
    found = host.node().attributes
    assert (found["driver"], found["driver_version"], found["cuda"]) == (
        "NVIDIA 570.133.20",
        "570.133.20",
        "12.8",
    )


@pytest.mark.parametrize("code", [3, 13, 22, 24, 25, 26, 30])
def test_what_a_card_does_not_have_is_asked_once(host: NvmlHost, nvml: Nvml, code: int) -> None:
    nvml.fail["nvmlDeviceGetMarginTemperature"] = code
    for _ in range(3):
        row = host.gpus()[0].read("gpu")
        assert row["temperature_margin_c"] == Null(Reason.NOT_SUPPORTED, f"NVML {code}")
    assert nvml.calls["nvmlDeviceGetMarginTemperature"] == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (4, Reason.NO_PERMISSION),
        (21, Reason.NOT_READ),
        (2, Reason.FAILED),
        (16, Reason.FAILED),
        (999, Reason.FAILED),
    ],
)
def test_one_sensor_in_trouble_is_one_null_and_is_asked_again(
    host: NvmlHost, nvml: Nvml, code: int, reason: Reason
) -> None:
    nvml.fail["nvmlDeviceGetTotalEnergyConsumption", 1] = code
    assert states(host) == ["ok"] * 4
    row = host.gpus()[1].read("gpu")
    assert row["energy_j_total"] == Null(reason, f"NVML {code}")
    assert row["temperature_c"] == 64
    nvml.fail.clear()
    assert host.gpus()[1].read("gpu")["energy_j_total"] == 5000.5


def test_old_and_new_drivers(host: NvmlHost, nvml: Nvml) -> None:
    nvml.missing = {
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
    }
    nvml.fields = {number: nvml.field(number, 0, code=3) for number in (82, 269, 270, 271)}
    row = host.gpus()[0].read("gpu")
    assert (row["clock_reasons"], row["temperature_c"]) == (6, 63)
    assert row["temperature_margin_c"] == Null(Reason.NOT_SUPPORTED, "NVML 13")
    assert row["hw_thermal_s_total"] == Null(Reason.NOT_SUPPORTED, "NVML 3")
    assert row["power_cap_s_total"] == 2.0


def test_memory_falls_back_to_the_old_structure(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetMemoryInfo_v2"] = 25
    assert host.gpus()[0].read("gpu")["mem_used_bytes"] == 70_000_000_000


@pytest.mark.parametrize("blank", [0xFFFFFFFF, 2**64 - 1, 2**63 - 1, 0x7FFFFFFFFFFFFFF0, 0x7FFFFFF0])
def test_blanks_of_the_driver_are_no_values(host: NvmlHost, nvml: Nvml, blank: int) -> None:
    numbers = (
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetPerformanceState", "nvmlDeviceGetFanSpeed",
    )  # fmt: skip
    nvml.says = dict.fromkeys(numbers, blank)
    nvml.says["nvmlDeviceGetMemoryInfo_v2"] = SimpleNamespace(total=blank, used=blank)
    nvml.says["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=blank, memory=blank)
    nvml.fields = {number: nvml.field(number, blank) for number in (74, 75, 76, 82, 197, 198, 269, 270, 271)}
    row = sweep(host)[0]
    known = {
        "gpu_uuid",
        "gpu_index",
        "pci",
        "state",
        "driver_epoch",
        "pcie_gen",
        "pcie_gen_max",
        "pcie_width_max",
    }
    values = {name for name, value in row.items() if value is not None}
    # -1 degrees of margin and the blank look alike in 32 bits; a margin is believed
    assert values - {"temperature_margin_c"} == known


def test_a_negative_margin_is_a_margin(host: NvmlHost, nvml: Nvml) -> None:
    for raw, margin in ((-3, -3), (2**32 - 3, -3)):
        nvml.says["nvmlDeviceGetMarginTemperature"] = raw
        assert host.gpus()[0].read("gpu")["temperature_margin_c"] == margin


@pytest.mark.parametrize(("kind", "value"), [(0, 71.0), (1, 71), (2, 71), (3, 71), (4, 71), (5, 71), (6, 71)])
def test_fields_are_read_by_their_type(host: NvmlHost, nvml: Nvml, kind: int, value: int) -> None:
    nvml.fields = {82: nvml.field(82, value, kind)}
    assert host.gpus()[0].read("gpu")["mem_temperature_c"] == 71


def test_fields_of_a_type_nobody_knows_and_fields_that_do_not_come(host: NvmlHost, nvml: Nvml) -> None:
    odd = pynvml.c_nvmlFieldValue_t()
    odd.fieldId, odd.valueType = 82, 99
    nvml.says["nvmlDeviceGetFieldValues"] = nvml.array([odd, nvml.field(7, 1)])
    row = host.gpus()[0].read("gpu")
    assert row["mem_temperature_c"] == Null(Reason.FAILED, "type 99")
    assert row["hw_brake_s_total"] == Null(Reason.NOT_READ)
    nvml.says["nvmlDeviceGetFieldValues"] = None
    assert host.gpus()[0].read("gpu")["mem_temperature_c"] == Null(Reason.NOT_READ)


def test_a_card_split_by_mig_says_that_it_has_no_utilisation(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetUtilizationRates", 0] = 3
    gpu_probe.tick(host)
    row = host.gpus()[0].read("gpu")
    assert row["util_pct"] == Null(Reason.NOT_SUPPORTED, "NVML 3")
    assert "sm_clock_mhz" not in row  # the ring has it
    first = sweep(host)[0]
    assert (first["util_pct"], first["sm_clock_mhz"]) == (None, 1755)


def test_an_unknown_p_state_is_none(host: NvmlHost, nvml: Nvml) -> None:
    nvml.says["nvmlDeviceGetPerformanceState"] = 32
    assert host.gpus()[0].read("gpu")["pstate"] == Null(Reason.NOT_READ, "unknown")


# ---- cards that fall ----


def test_B01_one_card_lost_in_the_middle_of_a_sweep(host: NvmlHost, nvml: Nvml, clock: Clock) -> None:
    assert states(host) == ["ok"] * 4
    for name in (
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetHandleByPciBusId",
    ):
        nvml.fail[name, 3] = 15
    rows = sweep(host)
    assert [row["state"] for row in rows] == ["ok", "ok", "ok", "lost"]
    assert (rows[3]["gpu_uuid"], rows[3]["pci"], rows[3]["util_pct"]) == (uuid(3), address(3), None)
    # the lost card is asked for now and then only; its handle alone, and the others go on
    before = nvml.calls["nvmlDeviceGetHandleByPciBusId"]
    for second in range(60):
        clock.t = second
        assert states(host) == ["ok", "ok", "ok", "lost"]
    assert nvml.calls["nvmlDeviceGetHandleByPciBusId"] - before <= 6
    assert nvml.calls["nvmlInit"] == 1
    nvml.fail.clear()
    clock.t = 80
    assert states(host) == ["ok"] * 4


def test_an_unknown_error_is_suspected_loss_and_loss_when_it_stays(
    host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    host.gpus()
    nvml.fail = dict.fromkeys(
        [("nvmlDeviceGetUtilizationRates", 1), ("nvmlDeviceGetHandleByPciBusId", 1)], 999
    )
    row = host.gpus()[1].read("ring")
    # the bus still sees it; what was read before stays
    assert row["util_pct"] == row["sm_clock_mhz"] == Null(Reason.FAILED, "NVML 999")
    assert row["power_w"] == 690.5
    assert nvml.calls["nvmlDeviceGetUtilizationRates"] == 2  # once more before believing it
    assert states(host) == ["ok"] * 4
    clock.t = 2.5
    with pytest.raises(Lost) as caught:
        host.gpus()[1].read("ring")
    assert caught.value.code == "unknown_error"
    assert states(host) == ["ok", "lost", "ok", "ok"]
    nvml.fail.clear()
    clock.t = 20
    assert states(host) == ["ok"] * 4


@pytest.mark.parametrize("gone", ["all ones", "absent", "width 63"])
def test_an_unknown_error_is_loss_at_once_when_the_bus_agrees(
    tree: Tree, host: NvmlHost, nvml: Nvml, gone: str
) -> None:
    host.gpus()
    device = tree.root / f"sys/bus/pci/devices/{address(1)}"
    if gone == "absent":
        device.unlink()
    elif gone == "all ones":
        (device / "config").write_bytes(b"\xff" * 64)
    else:
        (device / "current_link_width").write_text("63\n")
    nvml.fail = {("nvmlDeviceGetUtilizationRates", 1): 999}  # the handle itself is still given out
    with pytest.raises(Lost) as caught:
        host.gpus()[1].read("ring")
    assert caught.value.code == "fallen_off_bus"
    assert states(host) == ["ok", "lost", "ok", "ok"]


@pytest.mark.parametrize("step", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("code", [15, 999, 8, 16])
def test_a_card_that_fails_at_the_start_is_kept_as_lost(
    host: NvmlHost, nvml: Nvml, clock: Clock, step: str, code: int
) -> None:
    nvml.fail[step, 2] = code
    if code == 999:
        nvml.fail["nvmlDeviceGetHandleByPciBusId", 2] = 999
        assert states(host) == ["ok"] * 4  # suspected only: the bus sees it
        clock.t = 3
    rows = sweep(host)
    assert [row["state"] for row in rows] == ["ok", "ok", "lost", "ok"]
    assert (rows[2]["gpu_uuid"], rows[2]["pci"], rows[2]["gpu_index"]) == (uuid(2), address(2), 2)


def test_a_lost_card_that_nobody_can_name_is_still_a_row(
    tree: Tree, clock: Clock, make_nvml: Callable[[int], Nvml]
) -> None:
    nvml = make_nvml(2)
    nvml.fail["nvmlDeviceGetHandleByIndex", 1] = 15
    rows = sweep(NvmlHost(tree.root, None, nvml, clock=clock))
    assert [(row["state"], row["gpu_uuid"]) for row in rows] == [("ok", uuid(0)), ("lost", None)]


def fell(slot: int, age_s: float = 1.0) -> Event:
    mono_us = int((time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * 1e6)
    return Event("gpu_lost", f"pci:{address(slot)}", 0, mono_us, "off_bus", "GPU has fallen off the bus.")


@pytest.mark.parametrize(
    ("age_s", "says", "wanted"),
    [
        (1.0, 999, "lost"),  # the bus still shows it, but the kernel says that it fell: no second try
        (3600.0, 999, "ok"),  # it fell an hour ago and was brought back since
        (1.0, 2, "ok"),  # an error that says nothing of the kind
    ],
)
def test_an_unknown_error_is_loss_at_once_when_the_kernel_log_agrees(
    host: NvmlHost, nvml: Nvml, monkeypatch: pytest.MonkeyPatch, age_s: float, says: int, wanted: str
) -> None:
    assert states(host) == ["ok"] * 4
    monkeypatch.setattr(host.log, "read", lambda cursor: ([fell(1, age_s)], cursor + "x"))
    assert host.kernel_log("")[1] == "x"
    nvml.fail = {("nvmlDeviceGetUtilizationRates", 1): says}  # the handle itself is still given out
    assert states(host) == ["ok", wanted, "ok", "ok"]
    if wanted == "lost":
        with pytest.raises(Lost) as lost:
            host.gpus()[1].read("gpu")
        assert lost.value.code == "fallen_off_bus"


def test_a_driver_whose_cards_are_all_lost_is_initialised_anew_ever_more_rarely(
    host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    assert states(host) == ["ok"] * 4
    for name in (
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUtilizationRates",
    ):
        nvml.fail[name] = 15
    times: list[float] = []
    for _ in range(300):
        seen = nvml.calls["nvmlInit"]
        assert states(host) == ["lost"] * 4
        if nvml.calls["nvmlInit"] > seen:
            times.append(clock.t)
        clock.t += 1.0
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[:6] == [2, 4, 8, 16, 32, 60]
    assert set(gaps[6:]) <= {60}
    assert nvml.calls["nvmlShutdown"] == nvml.calls["nvmlInit"] - 1
    assert host.epoch == 1  # nothing counts anew as long as nothing answers
    nvml.fail.clear()
    clock.t += 61
    assert states(host) == ["ok"] * 4
    assert host.epoch == 2
    nvml.fail["nvmlDeviceGetUtilizationRates"] = nvml.fail["nvmlDeviceGetHandleByPciBusId"] = 15
    seen = nvml.calls["nvmlInit"]
    assert states(host) == ["lost"] * 4
    clock.t += 2
    states(host)
    assert nvml.calls["nvmlInit"] == seen + 1  # the wait began anew


def test_a_driver_with_one_lost_card_is_left_as_it_is(host: NvmlHost, nvml: Nvml, clock: Clock) -> None:
    states(host)
    nvml.fail["nvmlDeviceGetUtilizationRates", 1] = nvml.fail["nvmlDeviceGetHandleByPciBusId", 1] = 15
    for _ in range(100):
        assert states(host) == ["ok", "lost", "ok", "ok"]
        clock.t += 5.0
    assert (nvml.calls["nvmlInit"], host.epoch) == (1, 1)


def test_all_cards_lost_and_a_driver_that_cannot_be_initialised(
    host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    states(host)
    nvml.fail["nvmlDeviceGetUtilizationRates"] = nvml.fail["nvmlDeviceGetHandleByPciBusId"] = 15
    assert states(host) == ["lost"] * 4
    nvml.fail["nvmlInit"] = 999
    clock.t += 3.0
    with suppress(DriverGone):
        host.gpus()
    clock.t += 2.0
    with pytest.raises(DriverGone):
        host.gpus()
    nvml.fail.clear()
    clock.t += 61.0
    assert states(host) == ["ok"] * 4
    assert host.epoch == 2


class SlowStart:
    """A library whose initialisation ends when it is let."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self.go = threading.Event()
        nvml.says["nvmlInit"] = lambda: self.go.wait(30)


def test_a_slow_start_goes_on_beside_the_sweeps(
    tree: Tree, nvml: Nvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_module, "_FIRST_WAIT_S", 0.05)
    slow, watch, aside = SlowStart(nvml), Watch(), Watch()
    host = NvmlHost(tree.root, watch, nvml, clock=clock, aside=aside)
    for _ in range(3):
        with pytest.raises(DriverGone) as gone:
            host.gpus()
        assert gone.value.code == "starting"
        assert run_probe("gpu", gpu_probe, host, pytest.fail).error == "starting"
        assert len(list(host.pci_devices())) == 4
        assert host.processes() == ()
        assert "NVIDIA" in host.node().attributes["driver"]
    assert (aside.calls, aside.depth) == ([("", "nvmlInit")], 1)
    assert ("", "nvmlInit") not in watch.calls
    slow.go.set()
    deadline = time.monotonic() + 90
    while aside.depth and time.monotonic() < deadline:
        time.sleep(0.01)
    end_of_start(host)
    assert states(host) == ["ok"] * 4
    assert (host.epoch, nvml.calls["nvmlInit"], aside.depth) == (1, 1, 0)


def end_of_start(host: NvmlHost) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(DriverGone):
            host.gpus()
            return
        time.sleep(0.01)
    pytest.fail("it is still starting")


def test_a_start_that_fails_beside_the_sweeps_is_tried_again_like_any(
    tree: Tree, nvml: Nvml, clock: Clock
) -> None:
    host = NvmlHost(tree.root, None, nvml, clock=clock, aside=Watch())
    nvml.fail["nvmlInit"] = 9
    with pytest.raises(DriverGone) as gone:
        host.gpus()
    assert gone.value.code == "driver_not_loaded"
    nvml.fail.clear()
    clock.t += 1.5
    assert states(host) == ["ok"] * 4  # a quick one is waited for


def test_a_card_that_may_not_be_asked_is_not_lost(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetHandleByIndex", 2] = 4
    assert states(host) == ["ok"] * 4
    row = host.gpus()[2].read("gpu")
    assert set(row.values()) == {Null(Reason.NO_PERMISSION, "NVML 4")}


def test_a_skipped_card_is_not_touched(tree: Tree, nvml: Nvml, clock: Clock) -> None:
    watch = Watch()
    host = NvmlHost(tree.root, watch, nvml, skip=[address(1)], clock=clock)
    rows = sweep(host)
    assert [(row["state"], row["gpu_uuid"]) for row in rows] == [
        ("ok", uuid(0)), ("hung", None), ("ok", uuid(2)), ("ok", uuid(3)),
    ]  # fmt: skip
    assert not [call for call in watch.calls if call[0] == address(1)]
    with pytest.raises(Hung):
        host.gpus()[1].identity()


def test_a_suspended_card_is_not_woken(tree: Tree, nvml: Nvml, clock: Clock) -> None:
    host = NvmlHost(tree.root, None, nvml, clock=clock)
    known = host.gpus()[0].identity()
    home = f"sys/bus/pci/devices/{address(0)}/power/runtime_status"
    tree.write(home, "suspended\n")
    before = nvml.calls.total()
    row = host.gpus()[0].read("gpu")
    assert set(row.values()) == {SUSPENDED}
    assert set(host.gpus()[0].read("ring").values()) == {SUSPENDED}
    assert set(host.gpus()[0].read("gpu_health").values()) == {SUSPENDED}
    assert host.gpus()[0].identity() == known
    tree.write(f"sys/bus/pci/devices/{address(1)}/power/runtime_status", "suspended\n")
    with pytest.raises(DriverError, match="sleeps"):
        host.gpus()[1].identity()
    assert nvml.calls.total() == before


# ---- drivers that go ----


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (9, "driver_not_loaded"),
        (12, "no_library"),
        (4, "no_permission"),
        (17, "no_permission"),
        (18, "driver_mismatch"),
        (999, "driver_failed"),
        (28, "driver_failed"),
    ],
)
def test_B05_no_driver_with_and_without_cards_on_the_bus(
    tree: Tree,
    host: NvmlHost,
    nvml: Nvml,
    clock: Clock,
    tmp_path_factory: pytest.TempPathFactory,
    code: int,
    word: str,
) -> None:
    nvml.fail["nvmlInit"] = code
    with pytest.raises(DriverGone) as caught:
        host.gpus()
    assert caught.value.code == word
    assert run_probe("gpu", gpu_probe, host, pytest.fail).error == word
    bare = tmp_path_factory.mktemp("bare")
    (bare / "sys/devices").mkdir(parents=True)
    empty = NvmlHost(bare, None, nvml, clock=clock)
    if code == 18:
        with pytest.raises(DriverGone):
            empty.gpus()
    else:
        assert empty.gpus() == ()
        assert run_probe("gpu", gpu_probe, empty, pytest.fail).error == ""


def test_the_library_is_tried_again_ever_more_rarely_until_it_answers(
    host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    nvml.fail["nvmlInit"] = 9
    tries = []
    for second in range(200):
        clock.t = second
        before = nvml.calls["nvmlInit"]
        with pytest.raises(DriverGone):
            host.gpus()
        if nvml.calls["nvmlInit"] > before:
            tries.append(second)
    assert tries == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert host.epoch == 0
    nvml.fail.clear()
    clock.t = 300
    assert states(host) == ["ok"] * 4
    assert host.epoch == 1


def test_B03_after_a_driver_reload_indices_shift_and_identities_do_not(
    tree: Tree, host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    before = [(gpu.index, gpu.uuid) for gpu in host.gpus()]
    old = host.gpus()[0]
    nvml.slots.remove(1)
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.1.2  Tue\n")
    clock.t = 31
    after = [(gpu.index, gpu.uuid, gpu.pci) for gpu in host.gpus()]
    assert before == [(slot, uuid(slot)) for slot in range(4)]
    assert after == [(index, uuid(slot), address(slot)) for index, slot in enumerate((0, 2, 3))]
    assert (host.epoch, nvml.calls["nvmlShutdown"], nvml.calls["nvmlInit"]) == (2, 1, 2)
    assert host.gpus()[0] is not old


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_driver_that_goes_under_our_feet_is_initialised_anew(
    host: NvmlHost, nvml: Nvml, clock: Clock, code: int
) -> None:
    assert states(host) == ["ok"] * 4
    nvml.fail["nvmlDeviceGetUtilizationRates", 1] = code
    with pytest.raises(DriverGone):
        gpu_probe.tick(host)
    assert run_probe("gpu", gpu_probe, host, pytest.fail).error in (
        "driver_not_loaded",
        "driver_mismatch",
        "driver_failed",
    )
    nvml.fail.clear()
    clock.t = 5
    assert states(host) == ["ok"] * 4
    assert host.epoch == 2


def test_handles_are_kept_between_sweeps(host: NvmlHost, nvml: Nvml, clock: Clock) -> None:
    for second in range(100):
        clock.t = second
        sweep(host)
    assert nvml.calls["nvmlInit"] == 1
    assert nvml.calls["nvmlDeviceGetHandleByIndex"] == 4
    assert nvml.calls["nvmlDeviceGetHandleByPciBusId"] == 0


def test_B07_every_call_is_announced_with_its_card(tree: Tree, nvml: Nvml, clock: Clock) -> None:
    watch = Watch()
    host = NvmlHost(tree.root, watch, nvml, clock=clock)
    nvml.fail["nvmlDeviceGetMarginTemperature"] = 3
    nvml.fail["nvmlDeviceGetClockInfo", 2] = 15
    nvml.fail["nvmlDeviceGetName"] = ValueError("odd")
    sweep(host)
    host.gpus()[0].identity()
    host.processes()
    assert watch.depth == 0
    assert len([call for _, call in watch.calls if call.startswith("nvml")]) == nvml.calls.total()
    hosts = {call for card, call in watch.calls if card == ""}
    assert hosts == {
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetNVMLVersion",
    }
    assert {card for card, _ in watch.calls} == {"", *(address(slot) for slot in range(4))}


def test_processes(tree: Tree, host: NvmlHost, nvml: Nvml) -> None:
    for pid in (4711, 4712):
        tree.write(f"proc/{pid}/stat", "")
    nvml.says["nvmlDeviceGetComputeRunningProcesses_v3"] = [
        SimpleNamespace(pid=4711, usedGpuMemory=1 << 30),
        SimpleNamespace(pid=4712, usedGpuMemory=None),
    ]
    nvml.fail["nvmlDeviceGetComputeRunningProcesses_v3", 1] = 15
    nvml.fail["nvmlDeviceGetComputeRunningProcesses_v3", 2] = 3
    nvml.fail["nvmlDeviceGetComputeRunningProcesses_v2", 2] = 3
    found = {(one.pid, one.pci, one.mem_used_bytes) for one in host.processes()}
    assert not any(one.suspect for one in host.processes())
    assert found == {
        (pid, address(slot), used) for slot in (0, 3) for pid, used in ((4711, 1 << 30), (4712, None))
    }


_SOURCES = (
    Path(nvml_module.__file__).parent / name for name in ("nvml.py", "nvml_card.py", "nvml_health.py")
)
_CALLS = sorted(set(re.findall(r'"(nvml[A-Z]\w+)"', "".join(path.read_text() for path in _SOURCES))))
_TROUBLE = st.one_of(
    st.integers(1, 30), st.just(999), st.sampled_from([TypeError("x"), ValueError("x"), AttributeError("x")])
)
_ODD = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.integers(-1, 2**64),
    st.just([None]),
    st.floats(),
)


@given(
    fail=st.dictionaries(st.tuples(st.sampled_from(_CALLS), st.integers(-1, 3)), _TROUBLE, max_size=6),
    says=st.dictionaries(st.sampled_from(_CALLS), _ODD, max_size=4),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_library_says_no_other_error_comes_out(
    tree: Tree,
    clock: Clock,
    make_nvml: Callable[[int], Nvml],
    fail: dict[tuple[str, int], int | Exception],
    says: dict[str, object],
) -> None:
    nvml = make_nvml(4)
    nvml.fail.update(fail)
    nvml.says.update(says)
    host = NvmlHost(tree.root, Watch(), nvml, clock=clock)
    for second in (0, 1, 2, 15, 40):
        clock.t = second
        for ask in (host.gpus, host.processes, host.node):
            try:
                ask()
            except DriverError:
                continue
        try:
            gpus = host.gpus()
        except DriverError:
            continue
        for gpu in gpus:
            for read in (
                partial(gpu.read, "ring"),
                partial(gpu.read, "gpu"),
                partial(gpu.read, "gpu_health"),
                gpu.identity,
            ):
                try:
                    read()
                except DriverError:
                    continue
        run = run_probe("gpu", gpu_probe, host, pytest.fail)
        assert run.error in (
            "",
            "driver_not_loaded",
            "no_library",
            "driver_mismatch",
            "no_permission",
            "driver_failed",
        )


# ---- which driver ----


def _is_lost(gpu: Gpu) -> bool:
    try:
        gpu.read("ring")
    except Lost:
        return True
    return False


def test_open_host(tree: Tree, scenarios: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree.root
    loads = {"libnvidia-ml.so.1": False}
    monkeypatch.setattr(which_driver, "_library_loads", lambda: loads["libnvidia-ml.so.1"])
    assert type(open_host("none", root)) is SysfsHost
    assert type(open_host("auto", root)) is SysfsHost
    assert type(open_host("nvml", root)) is NvmlHost
    loads["libnvidia-ml.so.1"] = True
    assert type(open_host("auto", root)) is NvmlHost
    loads["libnvidia-ml.so.1"] = False
    tree.pci("0000:1b:00.0")
    assert type(open_host("auto", root)) is NvmlHost
    assert type(open_host("none", root)) is SysfsHost
    which = Simulated(scenarios / "three-faults.toml", "gpu-002", time.time_ns() // 1000 - 40_000_000)
    played = open_host("simulated", root, None, which)
    assert isinstance(played, SimulatedHost)
    assert played.hang == "block"
    assert [gpu.index for gpu in played.gpus() if _is_lost(gpu)] == [5]  # 40 seconds in, by either clock
    mono = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    early = open_host("simulated", root, None, replace(which, started_mono_us=mono))
    assert not [gpu.index for gpu in early.gpus() if _is_lost(gpu)]
    with pytest.raises(ConfigError, match="no node 'gpu-9' in it"):
        open_host("simulated", root, None, replace(which, node="gpu-9"))
    with pytest.raises(ValueError, match="use one of auto, nvml, amdgpu, simulated, none"):
        open_host("cuda")
    with pytest.raises(ValueError, match="which scenario"):
        open_host("simulated")


# ---- presence ----


def test_an_excluded_card_is_on_the_bus_and_not_in_the_driver(tree: Tree, nvml: Nvml, clock: Clock) -> None:
    tree.nvidia(address(1), uuid(1), excluded="Yes")
    nvml.slots.remove(1)
    host = NvmlHost(tree.root, None, nvml, clock=clock)
    assert [(gpu.index, gpu.pci) for gpu in host.gpus()] == [
        (0, address(0)),
        (1, address(2)),
        (2, address(3)),
    ]
    assert {row["pci"]: row["excluded"] for row in host.pci_devices()} == {
        address(slot): slot == 1 for slot in range(4)
    }
    # a lost card behind the excluded one is still named rightly
    nvml.fail["nvmlDeviceGetHandleByIndex", 2] = 15
    lost = NvmlHost(tree.root, None, nvml, clock=clock).gpus()[1]
    assert (lost.pci, lost.uuid) == (address(2), uuid(2))


def test_what_the_module_tells_of_a_card_is_read_once_announced_and_not_in_its_sleep(
    tree: Tree, nvml: Nvml, clock: Clock
) -> None:
    watch = Watch()
    status = f"sys/bus/pci/devices/{address(2)}/power/runtime_status"
    tree.write(status, "suspended\n")
    host = NvmlHost(tree.root, watch, nvml, skip=[address(3)], clock=clock)
    for _ in range(3):
        found = {row["pci"]: row["gpu_uuid"] for row in host.pci_devices()}
    assert found[address(0)] == uuid(0)
    assert found[address(2)] == SUSPENDED
    assert found[address(3)] == Null(Reason.NOT_READ, "left_alone")
    assert watch.calls == [(address(0), "proc_information"), (address(1), "proc_information")]
    tree.write(status, "active\n")
    assert {row["pci"]: row["gpu_uuid"] for row in host.pci_devices()}[address(2)] == uuid(2)


def test_a_host_whose_driver_is_left_alone_does_not_ask_the_module(tree: Tree, nvml: Nvml) -> None:
    rows = list(open_host("none", tree.root).pci_devices())
    assert {str(row["gpu_uuid"]) for row in rows} == {str(Null(Reason.NOT_READ, "left_alone"))}


def test_a_swapped_board_is_another_card_in_the_same_slot(
    tree: Tree, host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    other = "GPU-00000000-0000-4000-8000-0000000000ff"
    assert host.gpus()[1].uuid == uuid(1)
    nvml.says["nvmlDeviceGetUUID", 1] = other
    nvml.says["nvmlDeviceGetSerial", 1] = "1650522000099"
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module  575.1.2  Tue\n")
    clock.t = 10
    card = host.gpus()[1]
    assert (card.uuid, card.pci) == (other, address(1))
    assert card.identity()["serial"] == "1650522000099"


def test_the_same_driver_loaded_anew_is_another_epoch(
    tree: Tree, host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    tree.write("sys/module/nvidia/version", "570.133.20\n")
    host.gpus()
    clock.t = 10
    host.gpus()
    assert host.epoch == 1
    module = tree.root / "sys/module/nvidia"
    kept = module.rename(tree.root / "sys/module/old")  # so that its number is not used again
    tree.write("sys/module/nvidia/version", "570.133.20\n")
    clock.t = 20
    host.gpus()
    assert kept.exists()
    assert (host.epoch, nvml.calls["nvmlInit"]) == (2, 2)


# ---- drills on sensors ----


def test_A01_an_idle_card_reads_generation_1_and_its_maximum_stays(host: NvmlHost, nvml: Nvml) -> None:
    nvml.says |= {
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetPerformanceState": 8,
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
    }
    row = sweep(host)[0]
    names = (
        "pcie_gen",
        "pcie_gen_max",
        "pcie_width",
        "pcie_width_max",
        "util_pct",
        "pstate",
        "clock_reasons",
    )
    assert [row[name] for name in names] == [1, 4, 16, 16, 0, 8, 1]


@pytest.mark.parametrize("bits", [0x1, 0x4, 0x68, 0x80, 0x600, 0x8000_0004])
def test_A03_reasons_are_kept_bit_by_bit_also_those_nobody_knows(
    host: NvmlHost, nvml: Nvml, bits: int
) -> None:
    nvml.says["nvmlDeviceGetCurrentClocksEventReasons"] = bits
    assert sweep(host)[0]["clock_reasons"] == bits


@pytest.mark.parametrize("memory", ["refused", "zero", "answered"])
def test_A05_unified_memory_is_not_supported_and_the_rest_is_kept(
    host: NvmlHost, nvml: Nvml, memory: str
) -> None:
    nvml.says |= {
        "nvmlDeviceGetName": "NVIDIA GB10",
        "nvmlDeviceGetMaxPcieLinkGeneration": 1,
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=12, memory=0),
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:10:00.0", pciDeviceId=0x2E1210DE),
    }
    if memory == "refused":
        nvml.fail |= {"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetMemoryInfo_v2": 3}
    if memory == "zero":
        nvml.says["nvmlDeviceGetMemoryInfo_v2"] = SimpleNamespace(total=0, used=0)
    row = sweep(host)[0]
    link = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
    assert {row[name] for name in link} == {None}
    assert (row["state"], row["util_pct"], row["temperature_c"]) == ("ok", 12, 64)
    cells = host.gpus()[0].read("gpu")
    assert cells["pcie_gen"] == Null(Reason.NOT_SUPPORTED, "unified_memory")
    if memory == "answered":
        assert row["mem_total_bytes"] == 85_520_809_984
    else:
        for name in ("mem_used_bytes", "mem_total_bytes"):
            cell = cells[name]
            assert isinstance(cell, Null)
            assert cell.reason is Reason.NOT_SUPPORTED
    assert host.gpus()[0].identity()["card_kind"] == "integrated"


def test_A05_an_unknown_card_on_the_processors_bus(host: NvmlHost, nvml: Nvml) -> None:
    nvml.says |= {
        "nvmlDeviceGetName": "NVIDIA of next year",
        "nvmlDeviceGetMaxPcieLinkGeneration": 1,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:10:00.0", pciDeviceId=0x999910DE),
    }
    nvml.fail |= {"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetMemoryInfo_v2": 3}
    row = sweep(host)[0]
    assert (row["pcie_gen_max"], row["mem_total_bytes"], row["temperature_c"]) == (None, None, 64)


@pytest.mark.parametrize(
    ("total", "used", "cells"),
    [
        (0, 0, (Null(Reason.IMPLAUSIBLE, "0"), Null(Reason.IMPLAUSIBLE, "0"))),
        (100, 101, (100, Null(Reason.IMPLAUSIBLE, "more than all"))),
        (2**64 - 1, 5, (Null(Reason.IMPLAUSIBLE, "blank"), 5)),
        (100, 100, (100, 100)),
    ],
)
def test_memory_that_cannot_be(host: NvmlHost, nvml: Nvml, total: int, used: int, cells: object) -> None:
    nvml.says["nvmlDeviceGetMemoryInfo_v2"] = SimpleNamespace(total=total, used=used)
    row = host.gpus()[0].read("gpu")
    assert (row["mem_total_bytes"], row["mem_used_bytes"]) == cells


def test_memory_that_fails_for_a_moment_is_not_read_in_another_way(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetMemoryInfo_v2"] = 20
    assert host.gpus()[0].read("gpu")["mem_used_bytes"] == Null(Reason.FAILED, "NVML 20")


def test_A09_each_field_has_its_own_code_and_255_degrees_are_none(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fields = {(82, 0): nvml.field(82, 0, 1, code=3), 74: nvml.field(74, 91_234_567)}
    assert host.gpus()[0].read("gpu")["mem_temperature_c"] == Null(Reason.NOT_SUPPORTED, "NVML 3")
    assert sweep(host)[0]["power_cap_s_total"] == pytest.approx(0.091234567)
    nvml.fields[82] = nvml.field(82, 255, 1)
    run = run_probe("gpu", gpu_probe, host, pytest.fail)
    place = [metric.name for metric in gpu_probe.METRICS].index("mem_temperature_c")
    found = [
        (row[place], reasons[sum(cell is None for cell in row[:place])])
        for row, reasons in zip(run.rows, run.reasons, strict=True)
    ]
    assert found == [(None, Reason.NOT_SUPPORTED)] + [(None, Reason.IMPLAUSIBLE)] * 3


def test_A10_garbage_for_a_name_costs_nothing_else(
    host: NvmlHost, nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    raw = bytes.fromhex("f8a1a100004e")
    nvml.fail["nvmlDeviceGetName", 0] = UnicodeDecodeError("utf-8", raw, 0, 1, "invalid start byte")
    nvml.says["nvmlDeviceGetVbiosVersion", 0] = "96\udcff.00\x07"
    for _ in range(3):
        found = host.gpus()[0].identity()
    assert (found["model"], found["vbios"]) == ("\\xf8\\xa1\\xa1", "96\\udcff.00\\x07")
    assert all(text.encode() and text.isprintable() for text in found.values())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert states(host) == ["ok"] * 4


def test_A11_serials_that_are_none_and_one_that_two_cards_share(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetSerial", 0] = 3
    nvml.says |= {("nvmlDeviceGetSerial", 1): "N/A", ("nvmlDeviceGetSerial", 2): "1320000000001"}
    nvml.says["nvmlDeviceGetSerial", 3] = "1320000000001"
    serials = [gpu.identity().get("serial") for gpu in host.gpus()]
    assert serials == [None, None, "1320000000001", "1320000000001"]
    assert len({gpu.uuid for gpu in host.gpus()}) == 4
    for placeholder in (
        "0",
        "0000000000000",
        "",
        "[N/A]",
        "Unknown",
        " ",
        "n/a",
        b"\xff\xff",
        "Not Supported",
    ):
        nvml.says["nvmlDeviceGetSerial", 1] = placeholder
        assert "serial" not in host.gpus()[1].identity()


def test_A12_a_guest_with_few_sensors_is_a_card_like_any_other(host: NvmlHost, nvml: Nvml) -> None:
    nvml.says |= {
        "nvmlDeviceGetVirtualizationMode": 2,
        "nvmlDeviceGetName": "NVIDIA A40-48Q",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:10:00.0", pciDeviceId=0x223510DE),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=2),
        "nvmlDeviceGetClockInfo": 1410,
        "nvmlDeviceGetMemoryInfo_v2": SimpleNamespace(total=2**35, used=2**31),
    }
    for name in (
        "Temperature", "TemperatureV", "MarginTemperature", "PowerUsage", "EnforcedPowerLimit", "EccMode",
        "TotalEnergyConsumption", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "CurrPcieLinkWidth",
        "MaxPcieLinkWidth", "FieldValues", "ViolationStatus", "PowerManagementDefaultLimit", "FanSpeed",
    ):  # fmt: skip
        nvml.fail[f"nvmlDeviceGet{name}"] = 3
    row = sweep(host)[0]
    kept = {"gpu_uuid", "gpu_index", "pci", "state", "driver_epoch", "mem_util_pct", "mem_clock_mhz",
            "mem_used_bytes", "mem_total_bytes", "pstate", "clock_reasons"}  # fmt: skip
    rings = {f"{name}{end}" for name in ("util_pct", "sm_clock_mhz") for end in ("", "_min", "_p10")}
    assert {name for name, value in row.items() if value is not None} == kept | rings
    assert (row["state"], row["util_pct"], row["mem_used_bytes"]) == ("ok", 37, 2**31)
    found = host.gpus()[0].identity()
    assert (found["virtualization"], found["card_kind"]) == ("vgpu", "vgpu")
    assert "power_limit_default_w" not in found  # that of the whole card is not the guest's
    run = run_probe("gpu", gpu_probe, host, pytest.fail)
    assert {reason for reasons in run.reasons for reason in reasons} == {Reason.NOT_SUPPORTED}


def test_A15_a_shuffled_process_list_is_marked_and_the_card_in_use(
    tree: Tree, host: NvmlHost, nvml: Nvml
) -> None:
    for pid in (4312, 4399):
        tree.write(f"proc/{pid}/stat", "")
    nvml.says["nvmlDeviceGetComputeRunningProcesses_v3"] = [
        SimpleNamespace(pid=4312, usedGpuMemory=6_498_025_472),
        SimpleNamespace(pid=2_147_483_648, usedGpuMemory=4399),
        SimpleNamespace(pid=0, usedGpuMemory=0),
        SimpleNamespace(pid=4399, usedGpuMemory=2**60),
    ]
    found = [one for one in host.processes() if one.pci == address(0)]
    assert [(one.pid, one.mem_used_bytes, one.suspect) for one in found] == [
        (4312, 6_498_025_472, ""),
        (2_147_483_648, None, "no_such_pid"),
        (0, None, "no_such_pid"),
        (4399, None, "memory"),
    ]
    assert host.gpus()[0].read("gpu_health")["processes"] == 4


def test_throttle_times_of_drivers_without_the_fields(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fields = {number: nvml.field(number, 0, code=3) for number in (74, 76, 269, 270, 271)}
    nvml.fields[75] = nvml.field(75, 5_000_000_000)
    row = host.gpus()[0].read("gpu")
    assert (row["sw_thermal_s_total"], row["power_cap_s_total"], row["sync_boost_s_total"]) == (5.0, 4.0, 4.0)
    assert row["hw_brake_s_total"] == row["hw_thermal_s_total"] == Null(Reason.NOT_SUPPORTED, "NVML 3")


def test_power_by_field_where_the_function_is_gone(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail["nvmlDeviceGetPowerUsage"] = 26
    nvml.fields = {185: nvml.field(185, 0, code=3), 186: nvml.field(186, 123_456)}
    assert host.gpus()[0].read("ring")["power_w"] == 123.456


def test_B09_the_library_on_disk_is_upgraded_while_the_old_one_works(
    tree: Tree, host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    said = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue\n"
    tree.write("proc/driver/nvidia/version", said)
    link = tree.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    link.parent.mkdir(parents=True)
    link.symlink_to("libnvidia-ml.so.550.127.05")

    def versions() -> set[object]:
        row = host.gpus()[0].read("gpu_health")
        return {row["driver_version"], row["library_version"]}

    assert versions() == {"550.127.05"}
    assert host.node().attributes["driver"] == "NVIDIA 570.133.20"
    link.unlink()
    link.symlink_to("libnvidia-ml.so.550.144.03")
    nvml.fail["nvmlInit"] = 18  # so would a process that starts now
    clock.t = 60
    assert states(host) == ["ok"] * 4
    assert versions() == {"550.127.05", "550.144.03"}
    driver = host.node().attributes["driver"]
    assert driver == "NVIDIA 550.127.05, library 550.144.03: reload the driver or reboot"
    # a new process, or the old one when the module goes under it
    fresh = NvmlHost(tree.root, None, nvml, clock=clock)
    with pytest.raises(DriverGone, match=r"550\.127\.05.*550\.144\.03") as caught:
        fresh.gpus()
    assert caught.value.code == "driver_mismatch"
    assert len(list(fresh.pci_devices())) == 4
    tree.write("proc/driver/nvidia/version", said.replace("127.05", "144.03"))
    clock.t = 70
    with pytest.raises(DriverGone) as again:
        host.gpus()
    assert again.value.code == "driver_mismatch"
    nvml.fail.clear()
    clock.t = 200
    assert states(host) == ["ok"] * 4


# ---- models ----


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        ("NVIDIA L4", "27b8", "datacenter"),
        ("NVIDIA L40S", "26b9", "datacenter"),
        ("NVIDIA H20", "2329", "datacenter"),
        ("NVIDIA A10", "2236", "datacenter"),
        ("NVIDIA GeForce RTX 4090", "2684", "consumer"),
        ("NVIDIA RTX 6000 Ada Generation", "26b1", "workstation"),
        ("renamed by its maker", "2330", "datacenter"),
    ],
)
def test_a_model_is_found_by_its_whole_name_or_its_device(name: str, device: str, kind: str) -> None:
    found = nvidia_cards.find(name, device)
    assert found is not None
    assert found.kind == kind
    assert nvidia_cards.find("", device) == found


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H20-3e", ""),
        ("NVIDIA L4 ", ""),
        ("L40S", ""),
        ("NVIDIA H200 NVL 2", ""),
        ("", "1db1"),
        ("", ""),
    ],
)
def test_no_model_is_found_by_a_part_of_a_name_or_a_device_that_two_share(name: str, device: str) -> None:
    assert nvidia_cards.find(name, device) is None


def test_the_catalogue_fills_in_what_the_driver_does_not_say(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fail |= {"nvmlDeviceGetMaxClockInfo": 3, "nvmlDeviceGetPowerManagementDefaultLimit": 3}
    found = host.gpus()[0].identity()
    assert (found["sm_clock_max_mhz"], found["power_limit_default_w"]) == ("1980", "700")
    assert found["from_catalogue"] == "sm_clock_max_mhz,mem_clock_max_mhz,power_limit_default_w"
