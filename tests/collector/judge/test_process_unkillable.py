"""Rule process_unkillable: a process that waits in the kernel for minutes, killed in vain or not."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

RULE = "process_unkillable"
NOBODY: "tuple[Cell, ...]" = (0, 0.0, "", 0, 0.0)
HIDDEN: "tuple[Cell, ...]" = (None, None, None, None, None)


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.fixture
def say(fleet: "Fleet") -> "Callable[..., None]":
    """What nodes say half a minute later: stuck, seconds, name, unkillable, seconds."""

    def one(said: "dict[str, tuple[Cell, ...]]", judge: Judge | None = None) -> None:
        fleet.at += timedelta(seconds=30)
        for name, cells in said.items():
            with fleet.store.transaction() as write:
                write.execute(
                    "INSERT INTO live.host (ts, received_at, node, boot_id, uptime_s, processes_stuck, "
                    "stuck_s, stuck_comm, processes_unkillable, unkillable_s) "
                    "VALUES (?, ?, ?, 'boot-1', 1e6, ?, ?, ?, ?, ?)",
                    [fleet.at, fleet.at, name, *cells],
                )
        if judge:
            judge.run_pass(fleet.at)

    return one


Say = Callable[..., None]


def add(fleet: "Fleet", *names: str) -> None:
    """Nodes whose rows the test writes itself."""
    for name in names:
        fleet.add(name, gpus=0).up = False


@pytest.mark.drill("process_unkillable", "fires")
def test_stuck_warns_killed_in_vain_is_critical_and_a_reboot_ends_it(
    fleet: "Fleet", judge: Judge, say: Say
) -> None:
    add(fleet, "cpu-001")
    say({"cpu-001": (1, 599.0, "rsync", 0, 0.0)}, judge)
    assert fleet.findings() == []
    say({"cpu-001": (1, 600.0, "rsync", 0, 0.0)}, judge)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    say({"cpu-001": (1, 600.0, "rsync", 0, 0.0)}, judge)
    assert fleet.findings() == [("cpu-001", "node:", "firing", "warn", "stuck")]
    for _ in range(2):
        say({"cpu-001": (2, 900.0, "rsync", 1, 300.0)}, judge)
    assert fleet.findings() == [("cpu-001", "node:", "firing", "crit", "unkillable")]
    assert "only a reboot" in fleet.find(RULE)[3]
    for _ in range(4):
        say({"cpu-001": NOBODY}, judge)
    assert fleet.findings() == []


@pytest.mark.drill("process_unkillable", "near_miss", "not_judged")
def test_near_misses_and_what_cannot_be_seen(fleet: "Fleet", judge: Judge, say: Say) -> None:
    said = {
        "nobody": NOBODY,
        "a-while": (3, 240.0, "tar", 3, 299.0),
        "hidden": HIDDEN,
        "container": HIDDEN,
        "broken": HIDDEN,
        "seen-one": (1, 700.0, "python3", None, None),
    }
    add(fleet, *said, "silent")
    rows = [("hidden", "no_permission"), ("container", "not_supported"), ("broken", "failed")]
    with fleet.store.transaction() as write:
        write.executemany(
            "INSERT INTO live.capability (node, entity, probe, metric, reason, code, since) "
            "VALUES (?, 'node:', 'host', 'processes_stuck', ?, '', TIMESTAMP '2026-02-01')",
            rows,
        )
    say(said)
    assert {name: fleet.find(RULE, node=name)[:2] for name in (*said, "silent")} == {
        "nobody": ("ok", "none"),
        "a-while": ("ok", "none"),
        "hidden": ("unknown", "hidden"),
        "container": ("n/a", "not_supported"),
        "broken": ("unknown", "unreadable"),
        "seen-one": ("warn", "stuck"),
        "silent": ("unknown", "no_samples"),
    }


def test_what_is_not_read_any_more_clears_nothing(fleet: "Fleet", judge: Judge, say: Say) -> None:
    add(fleet, "cpu-001")
    for _ in range(2):
        say({"cpu-001": (1, 500.0, "rsync", 1, 400.0)}, judge)
    before = fleet.findings()
    assert [row[4] for row in before] == ["unkillable"]
    for _ in range(6):
        say({"cpu-001": (1, 530.0, "rsync", None, None)}, judge)
    assert fleet.find(RULE)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
