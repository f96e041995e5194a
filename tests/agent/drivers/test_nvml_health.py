"""Probe gpu_health through NVML's functions: what is read how, and what is not made up."""

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol

import pytest

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import Lost
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.drivers.nvml_errors import CODES, Means, known
from gpufleet_agent.drivers.nvml_health import COLUMNS
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import gpu as gpu_probe
from gpufleet_agent.probes import gpu_health as probe

NAMES = [metric.name for metric in probe.METRICS]
ABSENT = Null(Reason.NOT_SUPPORTED, "NVML 3")
ECC_FIELDS = (*range(1, 29),)
HEALTHY = {
    **dict.fromkeys(ECC_FIELDS, 0), 1: 1, 2: 1, 3: 11, 4: 2, 5: 33, 6: 4, 11: 10, 12: 2, 22: 30, 23: 3,
    29: 0, 30: 0, 31: 0, 94: 7, 95: 1, 142: 1, 143: 2, 144: 0, 145: 0, 301: 0, 302: 1, 169: 5,
    **{number: number for number in range(173, 183)}, 187: 200_000, 188: 700_000, 189: 700_000, 192: 650_000,
    193: -8, 194: -2, 195: 0, 196: 0, 230: 0,
}  # fmt: skip


class Clock(Protocol):
    t: float

    def __call__(self) -> float: ...


class Nvml(Protocol):
    slots: list[int]
    fail: dict[str | tuple[str, int], int | Exception]
    says: dict[str | tuple[str, int], object]
    fields: dict[int | tuple[int, int], object]
    calls: Counter[str]

    def field(self, number: int, value: float, kind: int = 3, code: int = 0) -> object: ...


class Pointer(Protocol):
    contents: object


class Tree(Protocol):
    def write(self, name: str, content: str | bytes) -> object: ...


@pytest.fixture(autouse=True)
def healthy(nvml: Nvml) -> None:
    for number, value in HEALTHY.items():
        nvml.fields[number] = nvml.field(number, value, kind=5 if value < 0 else 3)


def rows(host: NvmlHost) -> list[dict[str, object]]:
    run = run_probe("gpu_health", probe, host, pytest.fail)
    assert run.error == ""
    return [dict(zip(NAMES, row, strict=True)) for row in run.rows]


def cells(host: NvmlHost, index: int = 0) -> dict[str, Cell]:
    return dict(host.gpus()[index].read("gpu_health"))


def test_every_column_is_read(host: NvmlHost) -> None:
    keys = {"gpu_uuid", "gpu_index", "pci", "state", "driver_epoch"}
    assert set(COLUMNS) | {"driver_version", "library_version"} | keys == set(NAMES)
    assert set(cells(host)) | keys == set(NAMES)


def test_a_healthy_hopper(host: NvmlHost, nvml: Nvml) -> None:
    def sram(_: object, status: Pointer) -> None:
        for name, value in (
            ("volatileCor", 1), ("volatileUncParity", 2), ("volatileUncSecDed", 3), ("aggregateCor", 4),
            ("aggregateUncParity", 5), ("aggregateUncSecDed", 6), ("bThresholdExceeded", 1),
        ):  # fmt: skip
            setattr(status.contents, name, value)

    def fabric(_: object, info: Pointer) -> None:
        for name, value in (("state", 3), ("status", 0), ("healthMask", 0x51AA), ("healthSummary", 1)):
            setattr(info.contents, name, value)

    nvml.says |= {"nvmlDeviceGetSramEccErrorStatus": sram, "nvmlDeviceGetGpuFabricInfoV": fabric}
    row = cells(host)
    assert {name: row[name] for name in NAMES if name.startswith("ecc_sram")} == {
        "ecc_sram_corrected_total": 1,
        "ecc_sram_uncorrectable_total": 5,
        "ecc_sram_corrected_lifetime_total": 4,
        "ecc_sram_uncorrectable_lifetime_total": 11,
        "ecc_sram_threshold_exceeded": True,
    }
    expected = {
        "recovery_action": "none", "ecc_enabled": True, "ecc_pending": True, "ecc_corrected_total": 11,
        "ecc_uncorrectable_total": 2, "ecc_corrected_lifetime_total": 33,
        "ecc_uncorrectable_lifetime_total": 4, "ecc_dram_corrected_total": 10,
        "ecc_dram_uncorrectable_lifetime_total": 3,
        "remapped_rows_corrected_total": 1, "remapped_rows_uncorrectable_total": 2, "remap_pending": False,
        "remap_failed": False, "remapped_rows_uncorrectable_inactive": 1, "remap_banks_max": 2560,
        "remap_banks_none": 0, "retired_pages_pending": False, "pcie_replay_total": 7,
        "pcie_replay_rollover_total": 1, "pcie_recovery_total": 5, "pcie_correctable_total": 173,
        "pcie_lcrc_total": 182, "power_limit_min_w": 200.0, "power_limit_max_w": 700.0,
        "power_limit_default_w": 700.0, "power_limit_requested_w": 650.0, "shutdown_margin_c": -8,
        "slowdown_margin_c": -2, "gpu_max_margin_c": 0, "persistence_enabled": True, "mig_enabled": False,
        "mig_pending": False, "compute_mode": "default", "fabric_state": "completed", "fabric_status": 0,
        "fabric_health": "healthy", "fabric_health_bits": 0x51AA, "processes": 0,
        "memory_unrepairable": False, "channel_repair_pending": False,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["slowdown_temperature_c"] == Null(Reason.NOT_SUPPORTED)


def test_a_sweep_of_a_known_card_is_a_dozen_calls(host: NvmlHost, nvml: Nvml) -> None:
    for number in (7, 8, 9, 10, 13, 14, 15, 16, 17, 18, 19, 20, 21, 24, 25, 26, 27, 28, 29, 30, 31):
        nvml.fields[number] = nvml.field(number, 0, code=3)
    nvml.fail |= {"nvmlDeviceGetRetiredPages_v2": 3, "nvmlDeviceGetRetiredPages": 3}
    nvml.fail |= {"nvmlDeviceGetRetiredPagesPendingStatus": 3}
    rows(host)
    before = nvml.calls.total()
    rows(host)
    assert (nvml.calls.total() - before) / 4 <= 12


def test_an_older_driver_is_asked_by_its_own_functions(host: NvmlHost, nvml: Nvml) -> None:
    for number in HEALTHY:
        nvml.fields[number] = nvml.field(number, 0, code=3)
    nvml.fail |= {"nvmlDeviceGetSramEccErrorStatus": 13, "nvmlDeviceGetComputeRunningProcesses_v3": 13}
    nvml.fail |= {"nvmlDeviceGetRetiredPages_v2": 13, "nvmlDeviceGetGpuFabricInfoV": 13}
    nvml.says |= {
        "nvmlDeviceGetTotalEccErrors": lambda _, kind, life: 10 * kind + life,
        "nvmlDeviceGetMemoryErrorCounter": lambda _, kind, life, where: 100 * where + 10 * kind + life,
        "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
        "nvmlDeviceGetRetiredPages": lambda _, cause: [1] * (cause + 1),
        "nvmlDeviceGetRetiredPagesPendingStatus": 1,
        "nvmlDeviceGetComputeRunningProcesses_v2": [SimpleNamespace(pid=1, usedGpuMemory=1)],
        "nvmlDeviceGetArchitecture": 7,
    }
    row = cells(host)
    expected = {
        "ecc_enabled": True, "ecc_corrected_total": 0, "ecc_uncorrectable_lifetime_total": 11,
        "ecc_dram_uncorrectable_total": 210, "ecc_sram_corrected_lifetime_total": 701,
        "remapped_rows_uncorrectable_total": 2, "remap_pending": True, "remap_failed": False,
        "retired_pages_corrected_total": 1, "retired_pages_uncorrectable_total": 2,
        "retired_pages_pending": True, "power_limit_min_w": 200.0, "power_limit_default_w": 700.0,
        "power_limit_requested_w": 700.0, "pcie_replay_total": 3, "slowdown_temperature_c": 95,
        "shutdown_temperature_c": 95, "processes": 1,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["recovery_action"] == ABSENT
    assert row["fabric_state"] == Null(Reason.NOT_SUPPORTED, "NVML 13")


@pytest.mark.parametrize(
    ("action", "old", "word"),
    [
        (0, None, "none"), (1, None, "gpu_reset"), (4, None, "drain_and_reset"), (7, None, "system_reboot"),
        (12, None, "unknown_12"), (None, (1, 0), "gpu_reset"), (None, (1, 1), "drain_and_reset"),
        (None, (0, 0), "none"), (None, None, None),
    ],
)  # fmt: skip
def test_the_recovery_action_in_words(
    host: NvmlHost, nvml: Nvml, action: int | None, old: tuple[int, int] | None, word: str | None
) -> None:
    nvml.fields[230] = nvml.field(230, action or 0, code=3 if action is None else 0)
    for number, value in zip((226, 227), old or (0, 0), strict=True):
        nvml.fields[number] = nvml.field(number, value, code=0 if old else 3)
    assert rows(host)[0]["recovery_action"] == word


@pytest.mark.parametrize(
    ("architecture", "degrees", "margins"), [(7, 95, None), (9, None, -2), (11, None, -2)]
)
def test_thresholds_by_generation(
    host: NvmlHost, nvml: Nvml, architecture: int, degrees: int | None, margins: int | None
) -> None:
    nvml.says["nvmlDeviceGetArchitecture"] = architecture
    row = rows(host)[0]
    assert (row["slowdown_temperature_c"], row["slowdown_margin_c"]) == (degrees, margins)


def test_a_flag_is_0_or_1(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fields[145] = nvml.field(145, 2)
    nvml.fields[144] = nvml.field(144, 0xFFFFFFFF)
    row = cells(host)
    assert row["remap_failed"] == Null(Reason.IMPLAUSIBLE, "2")
    assert row["remap_pending"] == Null(Reason.IMPLAUSIBLE, "blank")


def test_what_is_for_root_alone_says_so_and_the_counters_are_read(
    host: NvmlHost, nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.fail["nvmlDeviceGetSramEccErrorStatus"] = 4
    nvml.says["nvmlDeviceGetMemoryErrorCounter"] = 5
    for _ in range(3):
        row = cells(host)
    assert row["ecc_sram_threshold_exceeded"] == Null(Reason.NO_PERMISSION, "NVML 4")
    assert row["ecc_sram_uncorrectable_total"] == 5
    assert len(caplog.records) == 1


def test_the_older_fabric_structure(host: NvmlHost, nvml: Nvml) -> None:
    def old(_: object, info: Pointer) -> None:
        if hasattr(info.contents, "healthSummary"):
            error = RuntimeError("version")
            error.value = 25  # type: ignore[attr-defined]
            raise error
        setattr(info.contents, "state", 2)  # noqa: B010

    nvml.says["nvmlDeviceGetGpuFabricInfoV"] = old
    row = cells(host)
    assert (row["fabric_state"], row["fabric_health"]) == ("in_progress", Null(Reason.NOT_SUPPORTED))


def test_one_batch_that_an_old_driver_refuses_is_halved_until_it_answers(host: NvmlHost, nvml: Nvml) -> None:
    def batch(_: object, numbers: list[int]) -> object:
        if any(number > 225 for number in numbers):
            error = RuntimeError("argument")
            error.value = 2  # type: ignore[attr-defined]
            raise error
        return type(nvml.array([]))([nvml.fields[number] for number in numbers])  # type: ignore[attr-defined]

    nvml.says["nvmlDeviceGetFieldValues"] = batch
    row = cells(host)
    assert (row["ecc_corrected_total"], row["pcie_lcrc_total"]) == (11, 182)
    assert row["recovery_action"] == Null(Reason.NOT_SUPPORTED, "NVML 2")
    before = nvml.calls["nvmlDeviceGetFieldValues"]
    cells(host)
    assert nvml.calls["nvmlDeviceGetFieldValues"] == before + 1


def test_what_a_card_lacks_is_asked_again_after_a_day_and_after_a_reload(
    tree: Tree, host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    nvml.fail["nvmlDeviceGetRowRemapperHistogram"] = 3
    nvml.fields[230] = nvml.field(230, 0, code=3)
    for clock.t in (0, 60, 86_000):
        row = cells(host)
        assert row["remap_banks_max"] == row["recovery_action"] == ABSENT
    assert nvml.calls["nvmlDeviceGetRowRemapperHistogram"] == 1
    nvml.fail.clear()
    nvml.fields[230] = nvml.field(230, 1)
    clock.t = 86_401
    row = cells(host)
    assert (row["remap_banks_max"], row["recovery_action"]) == (2560, "gpu_reset")
    nvml.fail["nvmlDeviceGetRowRemapperHistogram"] = 3
    assert cells(host)["remap_banks_max"] == ABSENT
    nvml.fail.clear()
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module  575.1.2  Tue\n")
    clock.t += 10
    assert cells(host)["remap_banks_max"] == 2560
    assert host.epoch == 2


@pytest.mark.parametrize("code", [10, 19, 20, 21, 27, 29, 999])
def test_what_passes_is_not_remembered(host: NvmlHost, nvml: Nvml, code: int) -> None:
    nvml.fail["nvmlDeviceGetPersistenceMode"] = code
    nvml.fields[230] = nvml.field(230, 0, code=code)
    row = cells(host)
    reason = Reason.NOT_READ if code in (21, 27) else Reason.FAILED
    assert row["persistence_enabled"] == row["recovery_action"] == Null(reason, f"NVML {code}")
    nvml.fail.clear()
    nvml.fields[230] = nvml.field(230, 2)
    row = cells(host)
    assert (row["persistence_enabled"], row["recovery_action"]) == (True, "node_reboot")


def test_a_field_that_says_lost_is_a_lost_card(host: NvmlHost, nvml: Nvml) -> None:
    nvml.fields[94, 2] = nvml.field(94, 0, code=15)
    nvml.fail["nvmlDeviceGetHandleByPciBusId", 2] = 15
    found = rows(host)
    assert [row["state"] for row in found] == ["ok", "ok", "lost", "ok"]
    assert {found[2][name] for name in COLUMNS} == {None}


def test_every_code_of_the_library_is_in_the_table() -> None:
    assert set(CODES) == {*range(1, 31), 999}
    no_sensor = {code for code, one in CODES.items() if one.means is Means.NO_SENSOR}
    assert no_sensor == {3, 13, 22, 24, 25, 26, 30}
    assert {code for code, one in CODES.items() if one.reason is Reason.NOT_SUPPORTED} == no_sensor
    assert {code for code, one in CODES.items() if one.restart} == {1, 9, 18}
    assert {code for code, one in CODES.items() if one.lost} == {6, 8, 11, 15, 16, 999}
    assert known(31415).reason is Reason.FAILED


# ---- drills ----


def test_A07_mig_on_is_no_utilisation_and_no_sentinel_passes(
    host: NvmlHost, nvml: Nvml, clock: Clock
) -> None:
    nvml.says["nvmlDeviceGetUtilizationRates", 0] = SimpleNamespace(gpu=0, memory=0)
    gpu_probe.tick(host)
    assert host.gpus()[0].read("gpu")["mem_util_pct"] == 0
    nvml.says["nvmlDeviceGetMigMode", 0] = [1, 1]
    nvml.fail["nvmlDeviceGetRowRemapperHistogram", 0] = 3
    split = Null(Reason.NOT_SUPPORTED, "MIG")
    host.gpus()[0].ring.drain()
    row = host.gpus()[0].read("gpu")
    assert row["util_pct"] == row["util_pct_p10"] == row["mem_util_pct"] == split
    assert cells(host)["mig_enabled"] is True
    assert cells(host)["remap_banks_max"] == ABSENT
    # back to one card: what a split card lacked is asked for again
    nvml.says["nvmlDeviceGetMigMode", 0] = [0, 0]
    nvml.fail.clear()
    assert host.gpus()[0].read("gpu")["mem_util_pct"] == 0
    assert cells(host)["remap_banks_max"] == 2560
    for blank in (9223372036854775794, 140737488355328.0, 18446744073709551615, 4294967295):
        nvml.says["nvmlDeviceGetUtilizationRates", 0] = SimpleNamespace(gpu=blank, memory=blank)
        host.gpus()[0].ring.drain()
        row = host.gpus()[0].read("gpu")
        assert row["util_pct"] == row["mem_util_pct"] == Null(Reason.IMPLAUSIBLE, "blank")


def test_A13_ecc_that_is_not_there_is_not_ecc_that_cannot_be_read(
    host: NvmlHost, nvml: Nvml, make_nvml: Callable[[int], Nvml]
) -> None:
    counters = (3, 4, 5, 6)

    def say(slot: int, code: int) -> None:
        for number in counters:
            nvml.fields[number, slot] = nvml.field(number, 0, code=code)
        nvml.fail["nvmlDeviceGetTotalEccErrors", slot] = code

    say(0, 3)
    nvml.fields[1, 0] = nvml.field(1, 0, code=3)
    nvml.fail["nvmlDeviceGetEccMode", 0] = 3
    say(1, 3)
    nvml.fields[1, 1] = nvml.field(1, 0)
    say(2, 999)
    say(3, 10)
    assert cells(host, 0)["ecc_uncorrectable_total"] == cells(host, 0)["ecc_enabled"] == ABSENT
    assert cells(host, 1)["ecc_uncorrectable_total"] == ABSENT
    assert cells(host, 1)["ecc_enabled"] is False
    assert cells(host, 2)["ecc_uncorrectable_total"] == Null(Reason.FAILED, "NVML 999")
    assert cells(host, 3)["ecc_uncorrectable_total"] == Null(Reason.FAILED, "NVML 10")
    say(3, 15)
    nvml.fail["nvmlDeviceGetHandleByPciBusId", 3] = 15
    with pytest.raises(Lost):
        cells(host, 3)


def test_A16_persistence_off_is_a_state_and_nothing_more(host: NvmlHost, nvml: Nvml) -> None:
    seen = []
    for mode in (0, 0, 1):
        nvml.says["nvmlDeviceGetPersistenceMode"] = mode
        found = rows(host)
        seen.append({row["persistence_enabled"] for row in found})
        assert {row["state"] for row in found} == {"ok"}
    assert seen == [{False}, {False}, {True}]
    assert nvml.calls["nvmlInit"] == 1  # the library is not initialised per sweep


def test_the_row_travels_as_it_is(host: NvmlHost) -> None:
    assert json.dumps(rows(host))
