"""Whatever stands in a file: the card keeps its other readings, its neighbour all, and nothing is made up."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers.amdgpu import AmdGpu, AmdHost
from gpufleet_agent.probes import gpu

CARD, NEIGHBOUR = "0000:63:00.0", "0000:c3:00.0"
GROUPS = ("ring", "gpu", "gpu_health")
CHECKS = {metric.name: metric for metric in gpu.METRICS}
RING = ("util_pct", "sm_clock_mhz", "power_w")
LABELLED = {"temperature_c", "temperature_margin_c", "mem_temperature_c", "sm_clock_mhz", "mem_clock_mhz"}
ERRORS = {"ecc_corrected_total", "ecc_uncorrectable_total"}
READS: dict[str, set[str]] = {
    "gpu_busy_percent": {"util_pct"},
    "mem_busy_percent": {"mem_util_pct"},
    "mem_info_vram_total": {"mem_total_bytes"},
    "mem_info_vram_used": {"mem_used_bytes"},
    "gpu_metrics": {"clock_reasons", "energy_j_total"},
    "current_link_speed": {"pcie_gen"},
    "max_link_speed": {"pcie_gen_max"},
    "current_link_width": {"pcie_width"},
    "max_link_width": {"pcie_width_max"},
    "umc_err_count": ERRORS,
    "gfx_err_count": ERRORS,
    "sdma_err_count": ERRORS,
    "temp1_label": LABELLED,
    "temp1_input": set(),
    "temp2_label": LABELLED,
    "temp2_input": {"temperature_c", "temperature_margin_c"},
    "temp2_crit": {"temperature_margin_c"},
    "temp3_label": LABELLED,
    "temp3_input": {"mem_temperature_c"},
    "freq1_label": LABELLED,
    "freq1_input": {"sm_clock_mhz"},
    "freq2_input": {"mem_clock_mhz"},
    "power1_average": {"power_w"},
    "power1_cap": {"power_limit_w"},
    "pp_dpm_sclk": set(),
    "unique_id": set(),
    "serial_number": set(),
    "product_name": set(),
    "vbios_version": set(),
    "revision": set(),
    "numa_node": set(),
}  # fmt: skip
"""File of a card -> the metrics that depend on it."""

CONTENT = st.one_of(
    st.none(),
    st.binary(max_size=80),
    st.text(max_size=40).map(str.encode),
    st.integers(-(2**70), 2**70).map(lambda number: f"{number}\n".encode()),
    st.sampled_from([b"", b"\n", b"0x", b"N/A\n", b"nan\n", b"inf\n", b"1e9\n", b"Unknown\n", b"0\0\0"]),
    st.sampled_from([b"\xff" * 4096, b"7" * 5000]),
)
"""None: the file is not there."""


def _all(card: AmdGpu) -> dict[str, Row]:
    return {group: card.read(group) for group in GROUPS}


def _may_be_sent(name: str, cell: Cell) -> bool:
    """Whether the cell is a Null, or a value of the metric's type."""
    if isinstance(cell, Null):
        return True
    if name not in CHECKS:
        return isinstance(cell, int) and 0 <= cell < 2**63
    checked = CHECKS[name].check(cell)
    return checked == cell or (isinstance(checked, Null) and checked.reason is Reason.IMPLAUSIBLE)


@pytest.fixture
def found(tree: Callable[[str], Path]) -> dict[str, Path]:
    """The files of the card that are changed, by name."""
    device = (tree("amd-mi210") / "sys/bus/pci/devices" / CARD).resolve()
    paths = {path.name: path for path in device.rglob("*") if path.is_file() and path.name in READS}
    assert paths.keys() == READS.keys()
    return paths


@pytest.fixture
def unchanged(found: dict[str, Path]) -> tuple[dict[str, Row], dict[str, Row]]:
    """What the card and its neighbour read before."""
    card, neighbour = AmdHost(found["unique_id"].parents[5])._list()
    return _all(card), _all(neighbour)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(READS)), CONTENT, min_size=1, max_size=4))
def test_changed_files_change_their_own_cells_only(
    found: dict[str, Path], unchanged: tuple[dict[str, Row], dict[str, Row]], changes: dict[str, bytes | None]
) -> None:
    root = found["unique_id"].parents[5]
    kept = {name: found[name].read_bytes() for name in changes}
    before, beside = unchanged
    try:
        for name, content in changes.items():
            if content is None:
                found[name].unlink()
            else:
                found[name].write_bytes(content)
        card, neighbour = AmdHost(root)._list()
        after = _all(card)
        assert (card.pci, neighbour.pci, neighbour.uuid) == (CARD, NEIGHBOUR, "GPU-a8c1f0d2734b9e65")
        assert all(isinstance(text, str) and text.isprintable() for text in card.identity().values())
        assert _all(neighbour) == beside
    finally:
        for name, content in kept.items():
            found[name].write_bytes(content)
    touched = set().union(*(READS[name] for name in changes))
    touched |= {f"{name}{part}" for name in RING if name in touched for part in ("_min", "_p10")}
    for group in GROUPS:
        assert after[group].keys() == before[group].keys()
        for name, cell in after[group].items():
            assert name in touched or cell == before[group][name]
            assert _may_be_sent(name, cell)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200) | st.integers(0, 2**64).map(lambda number: f"{number:x}".encode()),
)
def test_any_identity_file_gives_one_stable_name_or_none(found: dict[str, Path], content: bytes) -> None:
    root = found["unique_id"].parents[5]
    found["unique_id"].write_bytes(content)
    first, again = (AmdHost(root).gpus()[0].uuid for _ in range(2))
    assert first == again
    assert first == "" or (first.startswith("GPU-") and first.isascii() and first.isprintable())


def test_a_folder_where_a_file_should_be(found: dict[str, Path]) -> None:
    root = found["unique_id"].parents[5]
    for path in found.values():
        path.unlink()
        path.mkdir()
    card = AmdHost(root)._list()[0]
    assert card.uuid == ""
    for group in GROUPS:
        assert all(isinstance(cell, Null) for cell in card.read(group).values())
