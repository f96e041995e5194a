"""Rule dimm_errors: by counts where the host counts, by its kernel log where it does not."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet, Node

RULE = "dimm_errors"
DIMM = "dimm:mc0/dimm3"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


@pytest.fixture
def sweep(fleet: "Fleet") -> "Callable[..., None]":
    """One sweep of probe edac a minute later, and a pass: place -> corrected, uncorrectable, per day."""

    def one(
        node: "Node", counts: "dict[str, tuple[Cell, ...]]", judge: Judge | None = None, error: str = ""
    ) -> None:
        fleet.at += timedelta(minutes=1)
        with fleet.store.transaction() as write:
            for dimm, cells in counts.items():
                write.execute(
                    "INSERT INTO live.edac (ts, received_at, node, boot_id, dimm, label, corrected_total, "
                    "uncorrectable_total, corrected_day, uncorrectable_day) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [fleet.at, fleet.at, node.name, node.boot_id, dimm, f"label of {dimm}", *cells],
                )
            write.execute(
                "INSERT INTO live.agent (ts, received_at, node, boot_id, probe, ok, error, rows) "
                "VALUES (?, ?, ?, ?, 'edac', ?, ?, ?)",
                [fleet.at, fleet.at, node.name, node.boot_id, not error, error, len(counts)],
            )
        if judge:
            judge.run_pass(fleet.at)

    return one


Sweep = Callable[..., None]


@pytest.fixture
def node(fleet: "Fleet") -> "Node":
    """One whose rows the test writes itself."""
    made = fleet.add("cpu-001", gpus=0)
    made.up = False
    return made


@pytest.mark.drill("dimm_errors", "fires")
def test_an_uncorrectable_error_is_critical_once_and_for_a_day(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    sweep(node, {"mc0/dimm3": (5, 4, 0, 0), "mc0": (0, 0, 0, 0)}, judge)
    assert fleet.findings() == [], "an old count is no new error"
    sweep(node, {"mc0/dimm3": (5, 5, 0, 1), "mc0": (0, 0, 0, 0)}, judge)
    seen_at = fleet.at
    assert fleet.findings() == [("cpu-001", DIMM, "firing", "crit", "uncorrectable")]
    assert "label of mc0/dimm3: 1 uncorrectable" in fleet.find(RULE, DIMM)[3]
    sweep(node, {"mc0/dimm3": (5, 5, 0, 1)}, judge)
    assert fleet.sql("SELECT json_array_length(evidence) FROM finding") == [(1,)], "it happened once"
    sweep(node, {"mc0/dimm3": (5, 5, 0, 0)}, judge)
    assert fleet.find(RULE, DIMM)[:3] == ("crit", "uncorrectable", seen_at), (
        "an agent started anew knows less"
    )
    fleet.at += timedelta(days=1)
    sweep(node, {"mc0/dimm3": (5, 5, 0, 0)}, judge)
    assert fleet.findings() == []


@pytest.mark.parametrize("how", ["reboot", "reset"])
def test_a_reboot_or_a_reset_by_hand_ends_it_without_a_burst(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep, how: str
) -> None:
    sweep(node, {"mc0/dimm3": (900, 2, 0, 1)}, judge)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    node.boot_id = "boot-2" if how == "reboot" else node.boot_id
    sweep(node, {"mc0/dimm3": (0, 0, 0, 0)}, judge)
    assert fleet.findings() == []


def test_a_place_for_which_the_kernel_no_longer_counts_is_cleared(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    sweep(node, {"mc0/dimm3": (0, 1, 0, 1), "mc0": (0, 0, 0, 0)}, judge)
    assert [row[2] for row in fleet.findings()] == ["firing"]
    sweep(node, {}, judge, error="EACCES")
    assert [row[2] for row in fleet.findings()] == ["firing"], "it did not look"
    node.boot_id = "boot-2"
    sweep(node, {}, judge)
    assert fleet.findings() == []


def test_a_place_is_never_two_rows(fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep) -> None:
    sweep(node, {"mc0/dimm3": (0, 1, 0, 1)}, judge)
    sweep(node, {})
    assert fleet.find(RULE, DIMM)[:2] == ("ok", "gone")


def test_a_sweep_that_does_not_say_how_many_rows_it_has_clears_nothing(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    counts: dict[str, tuple[Cell, ...]] = {"mc0/dimm3": (0, 1, 0, 1)}
    sweep(node, counts, judge)
    sweep(node, counts)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.agent SET rows = NULL WHERE probe = 'edac'")
    judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings()] == ["firing"]


def test_a_silent_node_keeps_its_errors(fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep) -> None:
    sweep(node, {"mc0/dimm3": (0, 1, 0, 1)}, judge)
    fleet.at += timedelta(minutes=20)
    judge.run_pass(fleet.at)
    assert fleet.find(RULE, DIMM)[:2] == ("unknown", "no_samples")
    assert [row[2] for row in fleet.findings()] == ["firing"]


def test_corrected_errors_warn_by_their_number_in_a_day(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    sweep(node, {"mc0/dimm3": (10**6, 0, 99, 0), "mc1": (0, 0, 0, 0)}, judge)
    assert fleet.find(RULE, DIMM)[:2] == ("ok", "few")
    sweep(node, {"mc0/dimm3": (10**6 + 1, 0, 100, 0), "mc1": (200, 0, 200, 0)}, judge)
    assert fleet.findings() == [
        ("cpu-001", "dimm:mc0/dimm3", "firing", "warn", "corrected"),
        ("cpu-001", "dimm:mc1", "firing", "warn", "corrected"),
    ]
    sweep(node, {"mc0/dimm3": (10**6 + 1, 0, 99, 0), "mc1": (200, 0, 10, 0)}, judge)
    assert fleet.findings() == []


@pytest.mark.drill("dimm_errors", "near_miss", "not_judged")
def test_what_cannot_be_read_and_what_is_not_there(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    by_row: tuple[Cell, ...] = (7, None, 1, None)
    sweep(node, {"mc0/csrow0/ch1": by_row, "mc0/csrow0": (None, 0, None, 0), "mc1": (None,) * 4})
    assert fleet.find(RULE, "dimm:mc0/csrow0/ch1")[:2] == ("ok", "few")
    assert fleet.find(RULE, "dimm:mc1")[:2] == ("unknown", "unreadable")
    sound = "SELECT count(*) FROM find_dimm_errors(?) WHERE entity = 'dimm:mc0/csrow0'"
    assert fleet.sql(sound, fleet.at) == [(0,)], "the sound ones are one row, that of their node"
    assert fleet.find(RULE, "node:")[:2] == ("n/a", "counted")
    sweep(node, {}, error="EACCES")
    assert fleet.find(RULE, "node:")[:2] == ("unknown", "unreadable")
    fleet.at += timedelta(minutes=10)
    assert fleet.find(RULE, "node:")[:2] == ("unknown", "no_samples")


def test_a_row_that_came_twice_is_one_module(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    sweep(node, {"mc0/dimm3": (150, 0, 150, 0)})
    with fleet.store.transaction() as write:
        write.execute("INSERT INTO live.edac SELECT * REPLACE (NULL AS corrected_day) FROM live.edac")
        write.execute("INSERT INTO live.edac SELECT * FROM live.edac")
    assert fleet.find(RULE, DIMM)[:2] == ("warn", "corrected")


def test_a_host_that_does_not_count_is_judged_by_its_kernel_log(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    sweep(node, {}, judge)
    assert fleet.find(RULE)[:2] == ("n/a", "no_counters")
    fleet.event(node, "edac", "uncorrected", "node:", boot_id="boot-0", label="OLD")
    fleet.event(node, "mce", "corrected", "node:", status="0x8c00004000010005")  # not of a memory controller
    sweep(node, {}, judge)
    assert fleet.find(RULE)[:2] == ("n/a", "no_counters")
    fleet.event(node, "edac", "corrected", "node:", count=60, label="DIMM_B1")
    fleet.event(node, "mce", "corrected", "node:", status="0x8c00004000010091")
    sweep(node, {}, judge)
    assert fleet.find(RULE)[:2] == ("ok", "few")
    fleet.event(node, "edac", "corrected", "node:", count=39, label="DIMM_A1")
    at = fleet.at
    sweep(node, {}, judge)
    assert fleet.findings() == [("cpu-001", "node:", "firing", "warn", "corrected")]
    assert fleet.find(RULE)[2] == at
    assert fleet.find(RULE)[3].endswith(
        "0 uncorrectable and 100 corrected memory errors in the kernel log within a day: DIMM_A1, DIMM_B1"
    )
    fleet.event(node, "mce", "memory_failure", "node:", result="recovered")
    sweep(node, {}, judge)
    assert [row[2:] for row in fleet.findings()] == [("firing", "crit", "uncorrectable")]
    fleet.at += timedelta(days=1)
    sweep(node, {}, judge)
    assert fleet.findings() == [], "a day later"


def test_where_errors_are_counted_the_log_does_not_count_them_again(
    fleet: "Fleet", judge: Judge, node: "Node", sweep: Sweep
) -> None:
    fleet.event(node, "edac", "uncorrected", "node:", label="DIMM_A1")
    sweep(node, {"mc0/dimm3": (0, 1, 0, 1)}, judge)
    assert fleet.findings() == [("cpu-001", DIMM, "firing", "crit", "uncorrectable")]


@pytest.mark.parametrize(
    ("bad", "blind"),
    [((5, 5, 0, 1), (5, None, 0, None)), ((105, 0, 100, 0), (None, 0, None, 0))],
)
def test_a_count_that_is_not_read_clears_nothing(
    fleet: "Fleet",
    judge: Judge,
    node: "Node",
    sweep: Sweep,
    bad: "tuple[Cell, ...]",
    blind: "tuple[Cell, ...]",
) -> None:
    sweep(node, {"mc0/dimm3": bad}, judge)
    before = fleet.findings()
    assert [row[2] for row in before] == ["firing"]
    sweep(node, {"mc0/dimm3": blind}, judge)
    assert fleet.find(RULE, DIMM)[:2] == ("unknown", "not_read")
    assert fleet.findings() == before
