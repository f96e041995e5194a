"""Views for people, and the questions of docs/sql.md, asked about a small story."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector import views
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.store import PEOPLE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

DOC = (Path(__file__).parents[3] / "docs" / "sql.md").read_text()
FIVE = ["bench_history", "fleet_now", "gpu_history", "incident_timeline", "missing_now"]


@pytest.fixture
def rules() -> tuple[str, ...]:
    return ("gpu_missing",)


@pytest.fixture
def story(fleet: "Fleet", judge: Judge) -> "Fleet":
    """A card is lost for two minutes; a new driver makes copies slower."""
    card = fleet.add("gpu-001").cards[3]
    fleet.add("gpu-002")
    fleet.baseline("gpu-001", card.entity, "h2d/1/copied_once/ab12/pcie5x16", 50.0)
    for driver, value in (("580", 50.0), ("580", 50.2), ("590", 45.0)):
        fleet.at += timedelta(seconds=10)
        fleet.bench(card.entity, "gpu-001", value, driver=driver)
    fleet.run(30, judge, every=10)
    card.state = "lost"
    fleet.run(120, judge, every=10)
    card.state = "ok"
    fleet.run(30, judge, every=10)
    return fleet


def ask(store: Store, query: str) -> list[dict[str, object]]:
    with store.reader(PEOPLE) as read:
        result = read.execute(query)
        names = [column[0] for column in result.description or []]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def test_the_five_questions(story: "Fleet") -> None:
    questions = re.findall(r"```sql\n(.*?)```", DOC, re.DOTALL)
    assert len(questions) == 5
    order, before, seen, cost, driver = (ask(story.store, query) for query in questions)
    words = [row["what"] for row in order]
    assert (words[0], words[-1]) == ("opened", "resolved")
    assert before
    assert before[0]["util_pct"] == 95.0
    assert [(row["node"], row["verdict"], row["code"]) for row in seen] == [
        ("gpu-001", "crit", "lost_at_run_time")
    ]
    assert [(row["rule"], row["episodes"], row["cleared_by"]) for row in cost] == [
        ("gpu_missing", 1, ["clean evidence"])
    ]
    assert cost[0]["hours"] == 0.04
    assert [(row["driver"], row["median_ratio"]) for row in driver] == [("580", 1.002), ("590", 0.9)]


def test_every_table_is_a_view_for_people(store: Store, judge: Judge) -> None:
    with store.reader(PEOPLE) as read:
        tables = {
            row[0]
            for row in read.execute(
                "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'live'"
            ).fetchall()
        }
        shown = {
            row[0]
            for row in read.execute(
                "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main'"
            ).fetchall()
        }
        assert tables | set(FIVE) <= shown
        for name in sorted(tables | set(FIVE)):
            read.execute(f"SELECT * FROM {name} LIMIT 1").fetchall()


def test_views_have_help_and_are_in_the_doc() -> None:
    assert sorted(views.helps()) == sorted([*FIVE, "data_stalls", "jobs_now"])
    for name, text in views.helps().items():
        assert len(text) > 20
        assert f"| `{name}` |" in DOC


def test_missing_now_names_serial_place_and_incident(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    card.listed = card.on_bus = False
    fleet.run(10, judge)
    [row] = ask(fleet.store, "select * from missing_now")
    assert (row["node"], row["code"], row["gpu_uuid"], row["serial"], row["pci"], row["incident"]) == (
        "gpu-001", "gone_from_bus", card.uuid, card.serial, card.pci, "INC-1"
    )  # fmt: skip


def test_fleet_now_is_about_now(fleet: "Fleet", judge: Judge) -> None:
    fleet.at = datetime.now(UTC).replace(tzinfo=None, microsecond=0) - timedelta(hours=2)
    fleet.add("gpu-001", gpus=2)
    fleet.run(10)
    rows = ask(fleet.store, "select state, gpu_index from fleet_now order by gpu_index")
    assert rows == [{"state": "unknown", "gpu_index": 0}, {"state": "unknown", "gpu_index": 1}], "of long ago"


def test_views_without_their_probe_come_with_it() -> None:
    bare = Store.open(None)
    Judge(bare, JudgeSettings())
    status = views.create(bare)
    assert {name for name, error in status.items() if error} == {"bench_history", "data_stalls", "gpu_history"}
    assert ask(bare, "select * from fleet_now") == []
    bare.close()
