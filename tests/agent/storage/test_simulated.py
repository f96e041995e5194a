"""Disks and mounts of a simulated host: well, and under each fault."""

import math

import pytest

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.scenario import Scenario, parse

SCENARIO = """
[fleet]
nodes = "a"
gpus = 0
[[fault]]
node = "a"
kind = "{kind}"
at = 100
until = 400
expect = {{ rule = "r", within_s = 60 }}
"""


class Clock:
    t = 0.0

    def __call__(self) -> float:
        return self.t


def play(text: str) -> tuple[Scenario, SimulatedHost, Clock]:
    clock = Clock()
    scenario = parse(text.encode())
    return scenario, scenario.host("a", clock, 0), clock


def rows(host: SimulatedHost, group: str) -> dict[str, Row]:
    return {str(row[group]): row for row in host.rows(group)}


def test_a_mount_hangs_and_recovers_and_the_kernel_says_so() -> None:
    scenario, host, clock = play(SCENARIO.format(kind="mount_hung"))
    assert [one.entity for one in scenario.faults_expected()] == ["mount:/data"]
    _, cursor = host.kernel_log("")
    told = []
    for clock.t in (90.0, 101.0, 130.0, 390.0, 410.0, 440.0):
        mounts = rows(host, "mount")
        assert mounts["/"]["canary_state"] == mounts["/scratch"]["canary_state"] == "ok"
        told.append((mounts["/data"]["canary_state"], mounts["/data"]["hung_s"]))
        size = mounts["/data"]["size_bytes"]
        assert isinstance(size, int) == (told[-1][0] == "ok")
        if told[-1][0] == "hung":
            assert size == Null(Reason.FAILED, "hung")
    assert told == [
        ("ok", 0.0),
        ("pending", 0.0),
        ("hung", 30.0),
        ("hung", 290.0),
        ("ok", 300.0),
        ("ok", 0.0),
    ]
    events, _ = host.kernel_log(cursor)
    assert [event.code for event in events if event.kind == "nfs"] == ["not_responding", "ok"]


def test_a_disk_gets_slow_and_its_counters_never_fall() -> None:
    scenario, host, clock = play(SCENARIO.format(kind="disk_slow"))
    assert [one.entity for one in scenario.faults_expected()] == ["disk:nvme1n1"]
    awaits = []
    before = rows(host, "disk")["nvme1n1"]
    for clock.t in (30.0, 60.0, 120.0, 180.0, 380.0, 500.0, 530.0):
        now = rows(host, "disk")["nvme1n1"]
        grown = {}
        for name, cell in now.items():
            if name.endswith("_total"):
                assert isinstance(cell, int | float)
                earlier = before[name]
                assert isinstance(earlier, int | float)
                assert cell >= earlier
                grown[name] = cell - earlier
        awaits.append(1000 * grown["read_s_total"] / grown["read_ops_total"])
        before = now
    assert awaits == pytest.approx([0.2, 0.2, 133.5, 400.2, 400.2, 66.9, 0.2], rel=0.02)


def test_a_file_system_is_full_or_read_only() -> None:
    scenario, host, clock = play(SCENARIO.format(kind="disk_full"))
    assert [one.entity for one in scenario.faults_expected()] == ["mount:/scratch"]
    clock.t = 200.0
    row = rows(host, "mount")["/scratch"]
    assert isinstance(row["avail_bytes"], int)
    assert isinstance(row["size_bytes"], int)
    assert math.isclose(row["avail_bytes"] / row["size_bytes"], 0.001, rel_tol=0.01)
    _, host, clock = play(SCENARIO.format(kind="mount_read_only"))
    for clock.t, read_only in ((50.0, False), (200.0, True), (450.0, False)):
        row = rows(host, "mount")["/scratch"]
        assert (row["read_only"], row["was_writable"]) == (read_only, True)


def test_a_reboot_begins_the_counters_anew() -> None:
    text = SCENARIO.format(kind="disk_slow") + '[[fault]]\nnode = "a"\nkind = "reboot"\nat = 450\n'
    _, host, clock = play(text)
    clock.t = 440.0
    before = rows(host, "disk")["nvme1n1"]["read_ops_total"]
    clock.t = 600.0
    assert rows(host, "disk")["nvme1n1"]["read_ops_total"] == 95 * 90 < before  # type: ignore[operator]
    assert rows(host, "disk")["nvme1n1"]["read_s_total"] == pytest.approx(95 * 90 * 0.0002)


def test_items_are_stable() -> None:
    _, host, clock = play(SCENARIO.format(kind="mount_read_only"))
    first = [list(host.rows(f"{kind}_item")) for kind in ("disk", "mount")]
    clock.t = 300.0
    assert [list(host.rows(f"{kind}_item")) for kind in ("disk", "mount")] == first
    assert all(isinstance(text, str) for items in first for item in items for text in item.values())


def test_a_disk_that_is_slow_logs_media_errors_and_the_other_does_not() -> None:
    _, host, clock = play(SCENARIO.format(kind="disk_slow"))
    found = []
    for clock.t in (0.0, 300.0, 1300.0):
        disks = rows(host, "disk")
        found.append((disks["nvme1n1"]["smart_media_errors_total"], disks["nvme1n1"]["smart_age_s"]))
        assert disks["nvme0n1"]["smart_media_errors_total"] == 0
    errors = [errors for errors, _ in found]
    assert errors[0] == 0
    assert errors[-1] == 5
    assert errors == sorted(errors)  # type: ignore[type-var]
    assert all(isinstance(age, float) and 0 <= age < 600 for _, age in found)
