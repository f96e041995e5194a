"""Rule clock_unsynchronised: what the kernel says of its own clock."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit, Scope
from gpufleet_collector.rules import load_rules

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet, Node

RULE = "clock_unsynchronised"
COLUMNS = ("clock_synchronised", "clock_offset_s", "clock_error_max_s")
RIGHT: "tuple[Cell, ...]" = (True, 1e-5, 0.02)


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.fixture
def minute(fleet: "Fleet") -> "Callable[..., None]":
    """One more minute, and what the nodes said in it; two passes, for else the judge was away."""

    def one(said: "dict[str, tuple[Cell, ...]]", judge: Judge | None = None, count: int = 1) -> None:
        for _ in range(count):
            fleet.at += timedelta(seconds=30)
            if judge:
                judge.run_pass(fleet.at)
            fleet.at += timedelta(seconds=30)
            for name, cells in said.items():
                with fleet.store.transaction() as write:
                    write.execute(
                        "INSERT INTO live.host (ts, received_at, node, boot_id, uptime_s, "
                        "clock_synchronised, clock_offset_s, clock_error_max_s) "
                        "VALUES (?, ?, ?, 'boot-1', 1e6, ?, ?, ?)",
                        [fleet.at, fleet.at, name, *cells],
                    )
            if judge:
                judge.run_pass(fleet.at)

    return one


Minute = Callable[..., None]


def quiet(fleet: "Fleet", name: str) -> "Node":
    """A node whose rows the test writes itself."""
    node = fleet.add(name, gpus=0)
    node.up = False
    return node


@pytest.mark.drill("clock_unsynchronised", "fires")
def test_minutes_without_correction_warn_and_minutes_with_it_clear(
    fleet: "Fleet", judge: Judge, minute: Minute
) -> None:
    quiet(fleet, "cpu-001")
    minute({"cpu-001": RIGHT}, judge)
    minute({"cpu-001": (False, 0.0, 16.0)}, judge, 3)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    minute({"cpu-001": (False, 0.0, 16.0)}, judge)
    assert fleet.findings() == [("cpu-001", "node:", "firing", "warn", "unsynchronised")]
    minute({"cpu-001": RIGHT}, judge, 4)
    assert fleet.findings() == []


@pytest.mark.drill("clock_unsynchronised", "near_miss", "not_judged")
def test_each_kind_and_its_near_miss(fleet: "Fleet", judge: Judge, minute: Minute) -> None:
    said: dict[str, tuple[Cell, ...]] = {
        "right": RIGHT,
        "behind": (True, -0.51, 0.02),
        "nearly": (True, 0.5, 4.0),
        "long-ago": (True, 0.0, 4.1),
        "by-systemd": (True, None, None),
        "systemd-no": (False, None, None),
        "hidden": (None, None, None),
        "none": (None, None, None),
    }
    for name in (*said, "silent"):
        quiet(fleet, name)
    rows = [("hidden", "no_permission"), ("none", "not_supported")]
    with fleet.store.transaction() as write:
        write.executemany(
            "INSERT INTO live.capability (node, entity, probe, metric, reason, code, since) "
            "VALUES (?, 'node:', 'host', 'clock_synchronised', ?, '', TIMESTAMP '2026-02-01')",
            rows,
        )
    minute(said)
    assert {name: fleet.find(RULE, node=name)[:2] for name in (*said, "silent")} == {
        "right": ("ok", "synchronised"),
        "behind": ("warn", "offset"),
        "nearly": ("ok", "synchronised"),
        "long-ago": ("warn", "uncertain"),
        "by-systemd": ("ok", "synchronised"),
        "systemd-no": ("warn", "unsynchronised"),
        "hidden": ("unknown", "unreadable"),
        "none": ("n/a", "not_supported"),
        "silent": ("unknown", "no_samples"),
    }
    fleet.at += timedelta(minutes=2)
    assert fleet.find(RULE, node="right")[:2] == ("unknown", "no_samples")


def test_one_bad_minute_is_none(fleet: "Fleet", judge: Judge, minute: Minute) -> None:
    quiet(fleet, "cpu-001")
    minute({"cpu-001": RIGHT}, judge)
    minute({"cpu-001": (False, 0.0, 16.0)}, judge)
    minute({"cpu-001": RIGHT}, judge, 5)
    assert fleet.findings() == []


def test_where_nothing_has_to_keep_the_clock(fleet: "Fleet", minute: Minute) -> None:
    settings = JudgeSettings(node={"guest": Scope(limit={RULE: {"kept": Limit(value=0)}})})
    fleet.judge = Judge(fleet.store, settings, rules=[rule for rule in load_rules() if rule.name == RULE])
    for name in ("guest", "host"):
        quiet(fleet, name)
    minute({"guest": (False, 0.0, 16.0), "host": (False, 0.0, 16.0)}, fleet.judge)
    assert fleet.find(RULE, node="guest")[:2] == ("n/a", "by_design")
    assert fleet.find(RULE, node="host")[:2] == ("warn", "unsynchronised")


@pytest.mark.parametrize(
    ("bad", "blind"), [((True, 0.7, 0.02), (True, None, 0.02)), ((True, 0.0, 9.0), (True, 0.0, None))]
)
def test_what_is_not_read_any_more_clears_nothing(
    fleet: "Fleet", judge: Judge, minute: Minute, bad: "tuple[Cell, ...]", blind: "tuple[Cell, ...]"
) -> None:
    quiet(fleet, "cpu-001")
    minute({"cpu-001": RIGHT}, judge)
    minute({"cpu-001": bad}, judge, 5)
    before = fleet.findings()
    assert [row[2] for row in before] == ["firing"]
    minute({"cpu-001": blind}, judge, 6)
    assert fleet.find(RULE, "node:")[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
