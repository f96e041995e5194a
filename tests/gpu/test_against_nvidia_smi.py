"""What the driver reads of a real card beside what nvidia-smi says of it, field by field.

The comparison itself is tested on a made page in nvidia-smi's format, so that it is known to find a
difference before it meets a card.
"""

import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import nvml_gpm
from gpufleet_agent.drivers.nvml import NvmlHost

NOTHING = (
    "N/A",
    "Not Supported",
    "Unknown",
    "Unknown Error",
    "Insufficient Permissions",
    "Requested functionality has been deprecated",
)
PAGE = Path(__file__).parent / "nvidia-smi.xml"
MIB = 1 << 20


@dataclass(frozen=True)
class Said:
    """Where nvidia-smi says what one column says.

    Attributes:
        column: Ours.
        path: In the card's element.
        read: Makes our unit of the text.
        relative: Tolerated difference as a part of the value: the two are read one after the other.
        absolute: Tolerated difference.
    """

    column: str
    path: str
    read: Callable[[str], float | bool | str]
    relative: float = 0.0
    absolute: float = 0.0


def quantity(text: str) -> float:
    """`690.50 W` -> 690.5."""
    found = re.match(r"-?\d+(?:\.\d+)?", text)
    if found is None:
        raise ValueError(text)
    return float(found[0])


def mebibytes(text: str) -> float:
    return quantity(text) * MIB


def microseconds(text: str) -> float:
    return quantity(text) / 1e6


def switch(text: str) -> bool:
    return {"Enabled": True, "Disabled": False, "Yes": True, "No": False}[text]


def pstate(text: str) -> float:
    return float(text.removeprefix("P"))


def power(names: str) -> str:
    """Of the card itself: newer pages also have the power of its memory and of the module that it sits on."""
    return "|".join(f"{part}/{name}" for name in names.split("|") for part in _POWER)


_POWER = ("gpu_power_readings", "power_readings")


def action(text: str) -> str:
    """`Reset` and `Reboot` are short for what they are done to."""
    return {"reset": "gpu_reset", "reboot": "node_reboot"}.get(words(text), words(text))


def words(text: str) -> str:
    """`Exclusive_Process`, `Drain and Reset` -> our words."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower())


GPU = (
    Said("util_pct", "utilization/gpu_util", quantity, absolute=100),
    # nvidia-smi is a client like any other: an idle card may speed up for it
    Said("sm_clock_mhz", "clocks/sm_clock", quantity, absolute=2500),
    Said("power_w", power("average_power_draw|power_draw|instant_power_draw"), quantity, 0.5, 60),
    Said("power_limit_w", power("current_power_limit|enforced_power_limit"), quantity, 0.001),
    Said("mem_clock_mhz", "clocks/mem_clock", quantity, absolute=15000),
    Said("fan_pct", "fan_speed", quantity, absolute=20),
    Said("mem_total_bytes", "fb_memory_usage/total", mebibytes, absolute=MIB),
    Said("mem_used_bytes", "fb_memory_usage/used", mebibytes, 0.02, 64 * MIB),
    Said("temperature_c", "temperature/gpu_temp", quantity, absolute=4),
    Said("temperature_margin_c", "temperature/gpu_temp_tlimit", quantity, absolute=4),
    Said("mem_temperature_c", "temperature/memory_temp", quantity, absolute=4),
    Said("pstate", "performance_state", pstate, absolute=15),
    Said("pcie_gen", "pci/pci_gpu_link_info/pcie_gen/current_link_gen", quantity, absolute=5),
    Said("pcie_gen_max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen", quantity),
    Said("pcie_width", "pci/pci_gpu_link_info/link_widths/current_link_width", quantity),
    Said("pcie_width_max", "pci/pci_gpu_link_info/link_widths/max_link_width", quantity),
    Said("power_cap_s_total", "*/clocks_event_reasons_counters_sw_power_cap", microseconds, 0.001, 5),
    Said("hw_thermal_s_total", "*/clocks_event_reasons_counters_hw_therm_slowdown", microseconds, 0.001, 5),
    Said("sw_thermal_s_total", "*/clocks_event_reasons_counters_sw_therm_slowdown", microseconds, 0.001, 5),
    Said("sync_boost_s_total", "*/clocks_event_reasons_counters_sync_boost", microseconds, 0.001, 5),
    Said("hw_brake_s_total", "*/clocks_event_reasons_counters_hw_power_brake", microseconds, 0.001, 5),
)
HEALTH = (
    Said("recovery_action", "gpu_recovery_action", action),
    Said("ecc_enabled", "ecc_mode/current_ecc", switch),
    Said("ecc_pending", "ecc_mode/pending_ecc", switch),
    Said("ecc_sram_corrected_total", "ecc_errors/volatile/sram_correctable", quantity),
    Said("ecc_dram_corrected_total", "ecc_errors/volatile/dram_correctable", quantity, absolute=5),
    Said("ecc_dram_uncorrectable_total", "ecc_errors/volatile/dram_uncorrectable", quantity),
    Said("ecc_sram_corrected_lifetime_total", "ecc_errors/aggregate/sram_correctable", quantity),
    Said("ecc_dram_corrected_lifetime_total", "ecc_errors/aggregate/dram_correctable", quantity, absolute=5),
    Said("ecc_dram_uncorrectable_lifetime_total", "ecc_errors/aggregate/dram_uncorrectable", quantity),
    Said("ecc_sram_threshold_exceeded", "ecc_errors/aggregate/sram_threshold_exceeded", switch),
    Said("remapped_rows_corrected_total", "remapped_rows/remapped_row_corr", quantity),
    Said("remapped_rows_uncorrectable_total", "remapped_rows/remapped_row_unc", quantity),
    Said("remap_pending", "remapped_rows/remapped_row_pending", switch),
    Said("remap_failed", "remapped_rows/remapped_row_failure", switch),
    Said("remap_banks_max", "remapped_rows/row_remapper_histogram/row_remapper_histogram_max", quantity),
    Said("remap_banks_none", "remapped_rows/row_remapper_histogram/row_remapper_histogram_none", quantity),
    Said("pcie_replay_total", "pci/replay_counter", quantity, absolute=5),
    Said("pcie_replay_rollover_total", "pci/replay_rollover_counter", quantity, absolute=5),
    Said("power_limit_requested_w", power("requested_power_limit|power_limit"), quantity, 0.001),
    Said("power_limit_default_w", power("default_power_limit"), quantity, 0.001),
    Said("power_limit_min_w", power("min_power_limit"), quantity, 0.001),
    Said("power_limit_max_w", power("max_power_limit"), quantity, 0.001),
    Said("slowdown_temperature_c", "temperature/gpu_temp_slow_threshold", quantity),
    Said("shutdown_temperature_c", "temperature/gpu_temp_max_threshold", quantity),
    Said("slowdown_margin_c", "temperature/gpu_temp_slow_tlimit_threshold", quantity),
    Said("shutdown_margin_c", "temperature/gpu_temp_max_tlimit_threshold", quantity),
    Said("gpu_max_margin_c", "temperature/gpu_temp_max_gpu_tlimit_threshold", quantity),
    Said("mem_max_margin_c", "temperature/gpu_temp_max_mem_tlimit_threshold", quantity),
    Said("sm_clock_app_mhz", "applications_clocks/graphics_clock", quantity),
    Said("mem_clock_app_mhz", "applications_clocks/mem_clock", quantity),
    Said("fabric_state", "fabric/state", words),
    Said("fabric_health", "fabric/health/summary", words),
    Said("memory_unrepairable", "ecc_errors/unrepairable_memory", switch),
    Said("channel_repair_pending", "ecc_errors/channel_repair_pending", switch),
    Said("tpc_repair_pending", "ecc_errors/tpc_repair_pending", switch),
    Said("retired_pages_uncorrectable_total", "retired_pages/double_bit_retirement/retired_count", quantity),
    Said("retired_pages_pending", "retired_pages/pending_retirement|retired_pages/pending_blacklist", switch),
    Said("persistence_enabled", "persistence_mode", switch),
    Said("mig_enabled", "mig_mode/current_mig", switch),
    Said("mig_pending", "mig_mode/pending_mig", switch),
    Said("compute_mode", "compute_mode", words),
)
IDENTITY = {
    "uuid": "uuid",
    "model": "product_name",
    "serial": "serial",
    "part_number": "board_part_number",
    "vbios": "vbios_version",
    "inforom": "inforom_version/img_version",
    "gsp_firmware": "gsp_firmware_version",
    "minor": "minor_number",
    "architecture": "product_architecture",
}


def text_at(card: ElementTree.Element, paths: str) -> str | None:
    """What nvidia-smi says under the first of several paths; None where it says that there is nothing."""
    for path in paths.split("|"):
        for found in card.findall(path):
            text = (found.text or "").strip()
            if text and text.strip("[]") not in NOTHING:
                return text
    return None


def shows(card: ElementTree.Element, paths: str) -> bool:
    """Whether this page has such an element at all, be it N/A: which ones it has depends on nvidia-smi."""
    return any(card.find(path) is not None for path in paths.split("|"))


def differences(card: ElementTree.Element, row: Mapping[str, Cell], columns: tuple[Said, ...]) -> list[str]:
    """Where the two do not agree, in words; what this nvidia-smi does not show is not compared."""
    wrong: list[str] = []
    for said in columns:
        if not shows(card, said.path):
            continue
        text, cell = text_at(card, said.path), row[said.column]
        if text is None:
            if not isinstance(cell, Null):
                wrong.append(f"{said.column}: {cell!r}, but nvidia-smi has nothing")
            continue
        theirs = said.read(text)
        if isinstance(cell, Null):
            if cell.reason is not Reason.NO_PERMISSION:
                wrong.append(f"{said.column}: {cell.reason.name} {cell.code}, but nvidia-smi says {text}")
        elif isinstance(theirs, bool | str) or isinstance(cell, bool | str):
            if theirs != cell:
                wrong.append(f"{said.column}: {cell!r}, but nvidia-smi says {text}")
        elif abs(cell - theirs) > said.absolute + said.relative * max(abs(cell), abs(theirs)) + 1e-6:
            wrong.append(f"{said.column}: {cell!r}, but nvidia-smi says {text}")
    return wrong


def unlike(card: ElementTree.Element, identity: Mapping[str, str]) -> list[str]:
    """Where the two do not agree on who the card is."""
    wrong: list[str] = []
    for name, path in IDENTITY.items():
        ours, theirs = identity.get(name), text_at(card, path)
        if name == "architecture" and theirs:  # it adds a family name: "Ada Lovelace"
            theirs = theirs.split()[0]
        if ours != theirs:
            wrong.append(f"{name}: {ours!r}, but nvidia-smi says {theirs!r}")
    return wrong


def pci(card: ElementTree.Element) -> str:
    """`00000000:1B:00.0` -> `0000:1b:00.0`."""
    domain, _, rest = card.attrib["id"].lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


# ---- the comparison, without a card ----


def pages() -> list[ElementTree.Element]:
    return ElementTree.parse(PAGE).getroot().findall("gpu")


def agreeing(card: ElementTree.Element) -> dict[str, Cell]:
    """A row that says what the made page says of a card."""
    row: dict[str, Cell] = {}
    for said in (*GPU, *HEALTH):
        text = text_at(card, said.path)
        row[said.column] = Null(Reason.NOT_SUPPORTED) if text is None else said.read(text)
    return row


def test_the_made_page_is_read_in_our_units() -> None:
    row = agreeing(pages()[0])
    expected = {
        "util_pct": 100, "sm_clock_mhz": 1755, "power_w": 690.5, "power_limit_w": 700, "pstate": 0,
        "mem_total_bytes": 81559 * MIB, "temperature_c": 64, "temperature_margin_c": 23, "pcie_gen": 5,
        "pcie_width": 16, "power_cap_s_total": 7015.25, "recovery_action": "none", "ecc_enabled": True,
        "remap_failed": False, "remap_banks_max": 2560, "pcie_replay_total": 3, "power_limit_min_w": 200,
        "slowdown_margin_c": -2, "slowdown_temperature_c": Null(Reason.NOT_SUPPORTED),
        "compute_mode": "default", "mig_enabled": False, "ecc_sram_threshold_exceeded": False,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_an_older_card_is_read_in_our_units() -> None:
    row = agreeing(pages()[2])
    expected = {
        "power_w": 33.51, "power_limit_w": 70, "slowdown_temperature_c": 93, "shutdown_temperature_c": 96,
        "recovery_action": "gpu_reset", "retired_pages_uncorrectable_total": 1, "retired_pages_pending": True,
        "sm_clock_app_mhz": Null(Reason.NOT_SUPPORTED), "pstate": 8,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_a_row_that_agrees_has_no_differences_and_each_one_that_does_not_has_one() -> None:
    compared: set[str] = set()
    for card in pages():
        row = agreeing(card)
        assert differences(card, row, (*GPU, *HEALTH)) == []
        for said in (one for one in (*GPU, *HEALTH) if shows(card, one.path)):
            compared.add(said.column)
            cell = row[said.column]
            # a value where there is none, nothing where there is one, and another value
            others: list[Cell] = [1.0] if isinstance(cell, Null) else [Null(Reason.FAILED, "x")]
            if isinstance(cell, bool):
                others.append(not cell)
            elif isinstance(cell, str):
                others.append(cell + "x")
            elif isinstance(cell, int | float):
                others.append(cell * (1 + 4 * said.relative) + 2 * said.absolute + 1)
            for other in others:
                found = differences(card, row | {said.column: other}, (*GPU, *HEALTH))
                assert len(found) == 1, said.column
                assert found[0].startswith(f"{said.column}: ")
    assert compared == {said.column for said in (*GPU, *HEALTH)}  # no path leads nowhere
    hidden = agreeing(pages()[0]) | {"ecc_sram_threshold_exceeded": Null(Reason.NO_PERMISSION, "NVML 4")}
    assert differences(pages()[0], hidden, HEALTH) == []  # nvidia-smi ran as root, we did not


def test_a_card_without_sensors_has_none_in_either(tmp_path: Path) -> None:
    card = pages()[1]
    nothing = {said.column: Null(Reason.NOT_SUPPORTED) for said in (*GPU, *HEALTH)}
    found = differences(card, nothing, (*GPU, *HEALTH))
    assert [one.partition(":")[0] for one in found] == ["temperature_c", "persistence_enabled"]
    assert pci(card) == "0000:43:00.0"


def test_who_the_card_is() -> None:
    card = pages()[0]
    same = {
        "uuid": "GPU-00000000-0000-4000-8000-000000000001", "model": "NVIDIA H100 80GB HBM3",
        "serial": "1650522000001", "part_number": "692-2G520-0200-000", "vbios": "96.00.89.00.01",
        "inforom": "G520.0200.00.05", "gsp_firmware": "570.133.20", "minor": "0", "architecture": "Hopper",
    }  # fmt: skip
    assert unlike(card, same) == []
    assert unlike(card, same | {"serial": "1"}) == ["serial: '1', but nvidia-smi says '1650522000001'"]


# ---- with a card ----


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
def test_what_we_read_is_what_nvidia_smi_says() -> None:
    host = NvmlHost()
    rows: dict[str, tuple[Mapping[str, Cell], Mapping[str, Cell], Mapping[str, str]]] = {}
    for gpu in host.gpus():
        rows[gpu.pci] = (gpu.read("gpu"), gpu.read("gpu_health"), gpu.identity())
    page = subprocess.run(["nvidia-smi", "-q", "-x"], check=True, capture_output=True, timeout=120).stdout
    cards = {pci(card): card for card in ElementTree.fromstring(page).findall("gpu")}
    assert set(rows) == set(cards)
    wrong: list[str] = []
    for address, card in cards.items():
        gpu_row, health_row, identity = rows[address]
        found = (
            differences(card, gpu_row, GPU) + differences(card, health_row, HEALTH) + unlike(card, identity)
        )
        wrong += [f"{address} {one}" for one in found]
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
def test_the_parts_of_a_card_are_read_between_two_sweeps_or_not_at_all() -> None:
    host = NvmlHost()
    for gpu in host.gpus():
        before = [gpu.read("gpu")[name] for name in nvml_gpm.COLUMNS]
        time.sleep(0.3)
        after = [gpu.read("gpu")[name] for name in nvml_gpm.COLUMNS]
        if any(isinstance(cell, Null) and cell.reason is Reason.NOT_SUPPORTED for cell in before):
            continue
        assert before == [Null(Reason.NOT_READ, "first")] * len(before)
        assert all(isinstance(cell, float) and 0 <= cell <= 100 for cell in after), after


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
def test_counters_do_not_fall_between_two_sweeps() -> None:
    host = NvmlHost()
    names = ("energy_j_total", "power_cap_s_total", "hw_thermal_s_total", "hw_brake_s_total")
    first = {gpu.uuid: gpu.read("gpu") for gpu in host.gpus()}
    time.sleep(2)
    for gpu in host.gpus():
        now = gpu.read("gpu")
        for name in names:
            before, after = first[gpu.uuid][name], now[name]
            if isinstance(before, int | float) and isinstance(after, int | float):
                assert before <= after, name
