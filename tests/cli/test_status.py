"""The 30-second screen: golden at 80 columns and 24 lines, and what its numbers must add up to."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result

from gpufleet_collector.documents import Health

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"


class Seed(Protocol):
    health: Health

    def node(self, name: str, **more: object) -> None: ...

    def finding(self, *words: str, age: float = ..., incident: str = ...) -> int: ...

    def entity(self, node: str, index: int) -> str: ...


def same(name: str, screen: str) -> None:
    """Compare with the golden file; GPUFLEET_GOLDEN=update writes it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(screen, encoding="utf-8")
    assert screen == path.read_text(encoding="utf-8")


def on_a_terminal(screen: str) -> None:
    lines = screen.rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def healthy(seed: Seed) -> None:
    for number in range(1, 9):
        seed.node(f"gpu-{number:03}")
    seed.node("login-1", gpus=0)


def three_faults(seed: Seed) -> None:
    for number in range(1, 7):
        seed.node(f"gpu-{number:03}")
    seed.node("gpu-007", lost=[3])
    seed.node("gpu-008", seen_s=300)
    seed.node("login-1", gpus=0)
    seed.finding(
        "gpu_missing", "gpu-007", seed.entity("gpu-007", 3), "crit", "lost_at_run_time",
        "no longer answers: 7 of 8 cards", incident="GPU missing", age=42,
    )  # fmt: skip
    seed.finding(
        "gpu_downclocked", "gpu-002", seed.entity("gpu-002", 5), "warn", "hw_thermal",
        "1103 of 1755 MHz over the last minute under load", incident="Card runs below its clock", age=1500,
    )  # fmt: skip
    seed.finding(
        "agent_silent", "gpu-008", "node:", "warn", "silent", "nothing heard for 300 s",
        incident="Agent silent", age=210,
    )  # fmt: skip


def many_incidents(seed: Seed) -> None:
    for number in range(1, 41):
        seed.node(f"gpu-{number:03}", lost=[0])
        seed.finding(
            "gpu_missing", f"gpu-{number:03}", seed.entity(f"gpu-{number:03}", 0), "crit", "gone_from_bus",
            "gone from the bus: 7 of 8 cards", incident="GPU missing", age=60.0 * number,
        )  # fmt: skip


def warming_up(seed: Seed) -> None:
    healthy(seed)
    seed.health = Health(True, "", None, True, "")


def paused(seed: Seed) -> None:
    healthy(seed)
    seed.health = Health(False, "disk_floor", 95.0, False, "disk_floor")


def no_data(seed: Seed) -> None:
    for number in range(1, 5):
        seed.node(f"gpu-{number:03}", seen_s=7200)
    seed.node("gpu-005", gpus=0, expected=8, seen_s=None)


def empty(_: Seed) -> None:
    return


SCENES = [healthy, three_faults, many_incidents, warming_up, paused, no_data, empty]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_golden(seed: Seed, run: Run, scene: Callable[[Seed], None]) -> None:
    scene(seed)
    result = run("status")
    assert result.exit_code == 0, result.output
    on_a_terminal(result.output)
    same(f"status_{scene.__name__}", result.output)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_counters_add_up_to_what_is_expected(seed: Seed, run: Run, scene: Callable[[Seed], None]) -> None:
    scene(seed)
    document = json.loads(run("status", "-o", "json").output)
    for what in ("gpus", "nodes"):
        counts = document[what]
        four = sum(counts[key] for key in ("ok", "degraded", "critical", "no_data"))
        assert four == counts["expected"]
    assert document["gpus"]["expected"] == sum(item["gpus"]["expected"] for item in document["items"])
    assert len(document["items"]) == document["nodes"]["expected"] + document["nodes"]["without_gpus"]


@pytest.mark.parametrize(
    ("scene", "code"),
    [(healthy, 0), (three_faults, 11), (no_data, 12), (empty, 0), (warming_up, 0), (many_incidents, 11)],
)
def test_exit_code_tells_the_state_when_asked(
    seed: Seed, run: Run, scene: Callable[[Seed], None], code: int
) -> None:
    scene(seed)
    assert run("status").exit_code == 0
    assert run("status", "--exit-code").exit_code == code
    assert run("--exit-code", "status", "-o", "json").exit_code == code


def test_degraded_alone_is_10(seed: Seed, run: Run) -> None:
    healthy(seed)
    seed.finding(
        "gpu_downclocked", "gpu-002", seed.entity("gpu-002", 5), "warn", "x", "slow", incident="Slow"
    )
    assert run("status", "--exit-code").exit_code == 10


def test_no_data_wins_over_degraded(seed: Seed, run: Run) -> None:
    no_data(seed)
    seed.finding(
        "gpu_downclocked", "gpu-002", seed.entity("gpu-002", 5), "warn", "x", "slow", incident="Slow"
    )
    assert run("status", "--exit-code").exit_code == 12


def test_wide_hides_nothing(seed: Seed, run: Run) -> None:
    many_incidents(seed)
    screen = run("status", "-o", "wide").output
    assert all(f"INC-{number} " in screen for number in range(1, 41))
    assert all(f"gpu-{number:03}" in screen for number in range(1, 41))
    assert "more: fleet incidents" not in screen


def test_the_screen_says_how_many_it_hides(seed: Seed, run: Run) -> None:
    many_incidents(seed)
    screen = run("status").output
    shown = screen.count("  INC-")
    assert f"and {40 - shown} more: fleet incidents" in screen


def test_csv_and_jsonl_have_a_row_per_node(seed: Seed, run: Run) -> None:
    three_faults(seed)
    table = run("status", "-o", "csv").output.splitlines()
    assert table[0].startswith("node,state,has_gpus,gpus_expected,gpus_ok")
    assert len(table) == 10
    lines = [json.loads(line) for line in run("status", "-o", "jsonl").output.splitlines()]
    assert [line["node"] for line in lines][:2] == ["gpu-001", "gpu-002"]


def test_words_and_glyphs_without_colour(seed: Seed, run: Run) -> None:
    three_faults(seed)
    plain = run("status").output
    assert "\x1b[" not in plain
    colored = run("status", "--color", "always").output
    assert "\x1b[31m" in colored
    import click

    assert click.unstyle(colored) == plain


def test_piped_text_is_never_cut(seed: Seed, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    three_faults(seed)
    monkeypatch.delenv("COLUMNS")
    screen = run("status").output
    assert "1103 of 1755 MHz over the last minute under load; runbook gpu_downclocked\n" in screen
    assert "…" not in screen


def test_B06_a_dead_source_is_no_data_with_its_age(seed: Seed, run: Run) -> None:
    """The last good values are ten minutes old: nothing is green and every value shows its age."""
    seed.node("gpu-001", seen_s=570)
    screen = run("status").output
    assert "✔ ok 0" in screen
    assert "newest data 9m old" in screen
    node = run("node", "gpu-001").output
    assert "? no data" in node
    assert "✔ ok" not in node
    assert all("9m" in line for line in node.splitlines() if "GPU-" in line)
    card = json.loads(run("gpu", "gpu-001/0", "-o", "json").output)["items"][0]
    assert card["state"] == "unknown"
    assert card["age_s"] == 570
    assert card["sampled_at"] == "2026-11-30T11:50:30Z"
    assert run("gpu", "gpu-001/0", "--exit-code").exit_code == 12


def test_B05_what_is_expected_is_counted_and_shown(seed: Seed, run: Run) -> None:
    """A host without cards is n/a, a host nobody expects anything of gives no verdict, both shown as such."""
    seed.node("gpu-001", gpus=8, lost=[7])
    seed.node("cpu-01", gpus=0)
    seed.node("gpu-new", gpus=7, state="")
    document = json.loads(run("status", "-o", "json").output)
    assert document["gpus"] == {"expected": 8, "ok": 7, "degraded": 0, "critical": 0, "no_data": 1}
    assert document["nodes"]["without_gpus"] == 1
    items = {item["node"]: item for item in document["items"]}
    assert items["gpu-new"]["expectation"] is None
    assert items["gpu-new"]["gpus"]["unexpected"] == 7
    assert "none, so no presence verdict" in run("node", "gpu-new").output
    inventory = json.loads(run("inventory", "list", "-o", "json").output)["items"]
    assert {item["match"] for item in inventory if item["node"] == "gpu-new"} == {None}
    assert [item["match"] for item in inventory if item["node"] == "gpu-001"] == ["same"] * 7 + ["missing"]
