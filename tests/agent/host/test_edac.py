"""Errors of the host's memory: layouts of drivers, what grows within a day, what cannot be read."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import DriverError
from gpufleet_agent.drivers.edac import DAY_S, Day, Edac
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import edac as probe

if TYPE_CHECKING:
    from tests.agent.host.conftest import Clock

Write = Callable[[str, str], Path]
MC = "sys/devices/system/edac/mc"


def rows(host: Edac) -> dict[str, Row]:
    return {str(row["dimm"]): row for row in host.rows()}


def counts(row: Row) -> tuple[Cell, Cell]:
    return row["corrected_total"], row["uncorrectable_total"]


def test_a_row_per_module_and_one_for_errors_without_a_place(
    write: Write, tmp_path: Path, clock: "Clock"
) -> None:
    write(f"{MC}/mc0/ce_count", "8\n")
    write(f"{MC}/mc0/ce_noinfo_count", "3\n")
    write(f"{MC}/mc0/ue_noinfo_count", "0\n")
    write(f"{MC}/mc0/dimm2/dimm_ce_count", "5\n")
    write(f"{MC}/mc0/dimm2/dimm_ue_count", "1\n")
    write(f"{MC}/mc0/dimm2/dimm_label", "P1-DIMMC1\n")
    write(f"{MC}/mc0/dimm10/dimm_ce_count", "0\n")
    write(f"{MC}/mc0/dimm10/dimm_ue_count", "0\n")
    found = rows(Edac(tmp_path, clock))
    assert list(found) == ["mc0/dimm2", "mc0/dimm10", "mc0"]
    assert [counts(row) for row in found.values()] == [(5, 1), (0, 0), (3, 0)]
    assert [row["label"] for row in found.values()] == ["P1-DIMMC1", "", ""]


def test_old_drivers_count_by_chip_select_row_and_channel(
    write: Write, tmp_path: Path, clock: "Clock"
) -> None:
    row = f"{MC}/mc1/csrow0"
    for name, text in {
        "ce_count": "7", "ue_count": "2", "ch0_ce_count": "4", "ch1_ce_count": "3", "ch0_dimm_label": "A1",
        "ch1_dimm_label": "B1", "size_mb": "16384", "mem_type": "Registered-DDR3",
    }.items():  # fmt: skip
        write(f"{row}/{name}", text + "\n")
    write(f"{MC}/mc1/csrow1/ce_count", "1\n")
    write(f"{MC}/mc1/csrow1/ue_count", "0\n")
    write(f"{MC}/mc1/dimm0/dimm_label", "without counts\n")
    write(f"{MC}/mc1/ce_noinfo_count", "0\n")
    write(f"{MC}/mc1/ue_noinfo_count", "0\n")
    edac = Edac(tmp_path, clock)
    found = rows(edac)
    by_row, by_channel = Null(Reason.NOT_SUPPORTED, "by_row"), Null(Reason.NOT_SUPPORTED, "by_channel")
    assert {name: counts(row) for name, row in found.items()} == {
        "mc1/csrow0/ch0": (4, by_row),
        "mc1/csrow0/ch1": (3, by_row),
        "mc1/csrow0": (by_channel, 2),
        "mc1/csrow1": (1, 0),
        "mc1": (0, 0),
    }
    assert found["mc1/csrow0"]["label"] == "A1 B1"
    assert found["mc1/csrow0/ch0"]["corrected_day"] == 0
    assert found["mc1/csrow0/ch0"]["uncorrectable_day"] == by_row
    assert {str(item["dimm"]): item.get("size_bytes") for item in edac.items()}["mc1/csrow0/ch1"] == 16 << 30


def test_a_controller_alone_counts_everything(write: Write, tmp_path: Path, clock: "Clock") -> None:
    for name, text in {
        "ce_count": "9",
        "ce_noinfo_count": "1",
        "ue_count": "0",
        "ue_noinfo_count": "0",
    }.items():
        write(f"{MC}/mc0/{name}", text + "\n")
    assert counts(rows(Edac(tmp_path, clock))["mc0"]) == (9, 0)


@pytest.mark.parametrize("made", [None, "sys/devices/system/edac/power", MC])
def test_a_host_that_does_not_count_has_no_rows(tmp_path: Path, made: str | None) -> None:
    if made:
        (tmp_path / made).mkdir(parents=True)
    host = SysfsHost(tmp_path)
    sweep = run_probe("edac", probe, host, pytest.fail)
    assert (sweep.error, sweep.rows) == ("", [])
    assert list(host.rows("dimm_item")) == []


def test_not_being_allowed_to_look_is_not_having_found_none(
    tmp_path: Path, clock: "Clock", monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(DriverError) as caught:
        Edac(tmp_path, clock).rows()
    assert caught.value.code == "EACCES"
    assert Edac(tmp_path, clock).items() == []
    assert run_probe("edac", probe, SysfsHost(tmp_path), pytest.fail).error == "EACCES"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENODEV, errno.ENODATA])
def test_T06_one_count_that_cannot_be_read_costs_itself(
    write: Write, tmp_path: Path, clock: "Clock", refuse: Callable[[Path, int], None], number: int
) -> None:
    refuse(write(f"{MC}/mc0/dimm0/dimm_ce_count", "0\n"), number)
    write(f"{MC}/mc0/dimm0/dimm_ue_count", "0\n")
    row = rows(Edac(tmp_path, clock))["mc0/dimm0"]
    corrected = row["corrected_total"]
    assert isinstance(corrected, Null)
    assert corrected.code == errno.errorcode[number]
    assert row["corrected_day"] == corrected
    assert (row["uncorrectable_total"], row["uncorrectable_day"]) == (0, 0)


@pytest.mark.parametrize("text", ["", "-1", "many", "18446744073709551615000", "\ufffd", "1 2"])
def test_counts_that_are_none(write: Write, tmp_path: Path, clock: "Clock", text: str) -> None:
    write(f"{MC}/mc0/dimm0/dimm_ce_count", text)
    assert rows(Edac(tmp_path, clock))["mc0/dimm0"]["corrected_total"] == Null(Reason.FAILED, "unparsable")


def test_what_was_there_at_first_sight_is_no_new_error(write: Write, tmp_path: Path, clock: "Clock") -> None:
    file = write(f"{MC}/mc0/dimm0/dimm_ce_count", "4711\n")
    edac = Edac(tmp_path, clock)
    for count, grown in ((4711, 0), (4711, 0), (4715, 4), (4720, 9)):
        file.write_text(f"{count}\n")
        assert rows(edac)["mc0/dimm0"]["corrected_day"] == grown
        clock.t += 60
    clock.t += DAY_S
    assert rows(edac)["mc0/dimm0"]["corrected_day"] == 0
    file.write_text("0\n")  # a person, or the driver loaded anew
    assert rows(edac)["mc0/dimm0"]["corrected_day"] == 0
    file.write_text("2\n")
    assert rows(edac)["mc0/dimm0"]["corrected_day"] == 2


def test_a_gap_in_reading_hides_no_growth(write: Write, tmp_path: Path, clock: "Clock") -> None:
    file = write(f"{MC}/mc0/dimm0/dimm_ue_count", "0\n")
    write(f"{MC}/mc0/dimm0/dimm_ce_count", "0\n")
    edac = Edac(tmp_path, clock)
    rows(edac)
    file.write_text("garbage")
    assert isinstance(rows(edac)["mc0/dimm0"]["uncorrectable_day"], Null)
    file.write_text("1\n")
    assert rows(edac)["mc0/dimm0"]["uncorrectable_day"] == 1


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.floats(0, 2 * DAY_S)), max_size=300))
def test_a_day_never_counts_more_than_was_seen_to_grow(readings: list[tuple[int, float]]) -> None:
    day, now, last, grown = Day(), 0.0, None, 0
    for count, passed in readings:
        now += passed
        grown += 0 if last is None else max(0, count - last)
        last = count
        found = day.add(count, now)
        assert 0 <= found <= grown
    assert day.add(last or 0, now + 3 * DAY_S) == 0


def test_a_tree_without_end_is_cut(write: Write, tmp_path: Path, clock: "Clock") -> None:
    for number in range(1100):
        write(f"{MC}/mc0/dimm{number}/dimm_ce_count", "0\n")
    assert len(Edac(tmp_path, clock).rows()) == 1024
