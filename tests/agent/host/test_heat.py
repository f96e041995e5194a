"""Thermal zones, hwmon and fans: what is a temperature, what is a fan, and whose sensors are left alone."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.host_heat import Heat

if TYPE_CHECKING:
    from tests.agent.host.conftest import Clock

Write = Callable[[str, str], Path]
NONE = Null(Reason.NOT_SUPPORTED, "no_sensor")
ZONE = "sys/class/thermal/thermal_zone0"
CHIP = "sys/class/hwmon/hwmon0"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("61000\n", 61.0),
        ("-5000\n", -5.0),
        ("500", 0.5),
        ("0\n", Null(Reason.IMPLAUSIBLE, "0")),
        ("-274000\n", Null(Reason.IMPLAUSIBLE, "-274000")),
        ("-128000", Null(Reason.IMPLAUSIBLE, "-128000")),
        ("127000", Null(Reason.IMPLAUSIBLE, "127000")),
        ("255000", Null(Reason.IMPLAUSIBLE, "255000")),
        ("nan", Null(Reason.FAILED, "unparsable")),
        ("", Null(Reason.FAILED, "unparsable")),
        ("61 degrees", Null(Reason.FAILED, "unparsable")),
    ],
)
def test_temperatures(write: Write, tmp_path: Path, clock: "Clock", text: str, cell: Cell) -> None:
    write(f"{ZONE}/temp", text)
    write(f"{ZONE}/type", "acpitz\n")
    row = Heat(tmp_path, clock).read()
    assert row["zone_temperature_c"] == cell
    assert row["hottest_zone"] == (cell if isinstance(cell, Null) else "acpitz")
    assert row["zones_unreadable"] == isinstance(cell, Null)


def test_the_hottest_is_named_and_a_bad_one_hides_no_other(
    write: Write, tmp_path: Path, clock: "Clock"
) -> None:
    for zone, (kind, text) in enumerate([("a", "40000"), ("b", "999000"), ("c", "71000"), ("d", "")]):
        write(f"sys/class/thermal/thermal_zone{zone}/temp", text)
        write(f"sys/class/thermal/thermal_zone{zone}/type", kind)
    row = Heat(tmp_path, clock).read()
    assert (row["zone_temperature_c"], row["hottest_zone"], row["zones_unreadable"]) == (71.0, "c", 2)


def test_a_host_without_sensors(tmp_path: Path, clock: "Clock") -> None:
    assert set(Heat(tmp_path, clock).read().values()) == {NONE}


def test_sensors_of_cards_disks_and_adapters_are_left_alone(
    write: Write, tmp_path: Path, clock: "Clock", refuse: Callable[[Path, int], None]
) -> None:
    for number, name in enumerate(["amdgpu", "nvme", "mlx5", "drivetemp", "iwlwifi_1", "nouveau"]):
        home = f"sys/class/hwmon/hwmon{number}"
        write(f"{home}/name", name)
        write(f"{home}/temp1_label", "inlet")
        refuse(write(f"{home}/temp1_input", "99000"), errno.EIO)
        refuse(write(f"{home}/fan1_input", "10"), errno.EIO)
    row = Heat(tmp_path, clock).read()
    assert (row["inlet_temperature_c"], row["fans"]) == (NONE, NONE)


def test_processors_as_a_whole_and_air_that_comes_in(write: Write, tmp_path: Path, clock: "Clock") -> None:
    for number, (name, temps) in enumerate(
        [
            ("coretemp", {1: "61000", 2: "88000"}),
            ("k10temp", {1: "64250"}),
            ("board", {1: "70000", 2: "24500"}),
        ]
    ):
        home = f"sys/class/hwmon/hwmon{number}"
        write(f"{home}/name", name)
        for place, text in temps.items():
            write(f"{home}/temp{place}_input", text)
    write("sys/class/hwmon/hwmon2/temp2_label", "System Inlet\n")
    row = Heat(tmp_path, clock).read()
    assert (row["cpu_temperature_c"], row["inlet_temperature_c"]) == (64.25, 24.5)


def test_a_connector_without_a_fan_is_no_broken_fan(write: Write, tmp_path: Path, clock: "Clock") -> None:
    write(f"{CHIP}/name", "nct6798")
    one, two = write(f"{CHIP}/fan1_input", "1200\n"), write(f"{CHIP}/fan2_input", "0\n")
    write(f"{CHIP}/fan2_alarm", "1\n")
    alarm = write(f"{CHIP}/fan1_alarm", "0\n")
    heat = Heat(tmp_path, clock)

    def fans() -> tuple[Cell, ...]:
        row = heat.read()
        return row["fans"], row["fans_failed"], row["fan_rpm_min"]

    assert fans() == (1, 0, 1200)
    one.write_text("0\n")
    assert fans() == (1, 0, 0), "one that stops when it is cool is not broken either"
    alarm.write_text("1\n")
    assert fans() == (1, 1, 0)
    two.write_text("900\n")
    assert fans() == (2, 2, 900)


def test_a_board_whose_fans_never_turned(
    write: Write, tmp_path: Path, clock: "Clock", refuse: Callable[[Path, int], None]
) -> None:
    write(f"{CHIP}/name", "it8688")
    fan = write(f"{CHIP}/fan1_input", "0\n")
    row = Heat(tmp_path, clock).read()
    assert (row["fans"], row["fans_failed"], row["fan_rpm_min"]) == (0, NONE, NONE)
    refuse(fan, errno.EIO)
    failed = Null(Reason.FAILED, "EIO")
    row = Heat(tmp_path, clock).read()
    assert (row["fans"], row["fans_failed"], row["fan_rpm_min"]) == (failed, failed, failed)


@pytest.mark.parametrize("text", ["-5", "9999999", "fast", ""])
def test_speeds_that_are_none(write: Write, tmp_path: Path, clock: "Clock", text: str) -> None:
    write(f"{CHIP}/name", "board")
    write(f"{CHIP}/fan1_input", text)
    assert isinstance(Heat(tmp_path, clock).read()["fan_rpm_min"], Null)


def test_new_sensors_are_found_after_a_while(write: Write, tmp_path: Path, clock: "Clock") -> None:
    heat = Heat(tmp_path, clock)
    assert heat.read()["zone_temperature_c"] == NONE
    write(f"{ZONE}/temp", "50000")
    assert heat.read()["zone_temperature_c"] == NONE
    clock.t += 600
    assert heat.read()["zone_temperature_c"] == 50.0
