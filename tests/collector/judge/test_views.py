"""Views for people, and the questions of docs/sql.md, asked about a small story."""

import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector import people, views
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.store import PEOPLE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

DOC = (Path(__file__).parents[3] / "docs" / "sql.md").read_text()
VIEWS = sorted(views.helps().keys() - {"data_stalls"})
"""Those that need no rule but these tests': that one needs data_starved."""


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


def test_the_questions_of_the_doc(story: "Fleet") -> None:
    people.act(story.store, [1], "noted", "riser", 0, people.Who("ann", True), story.at)
    questions = re.findall(r"```sql\n(.*?)```", DOC, re.DOTALL)
    order, before, seen, cost, driver, done = (ask(story.store, query) for query in questions)
    words = [row["what"] for row in order]
    assert (words[0], words[-2], words[-1]) == ("opened", "resolved", "noted")
    assert [(row["actor"], row["verb"], row["claimed"]) for row in done] == [
        ("ann", "incidents note", "true")
    ]
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
        assert tables | set(VIEWS) <= shown
        for name in sorted(tables | set(VIEWS)):
            read.execute(f"SELECT * FROM {name} LIMIT 1").fetchall()


def test_views_have_help_and_are_in_the_doc() -> None:
    for name, text in views.helps().items():
        assert len(text) > 20
        assert re.search(rf"^\| (`\w+`, )*`{name}`(, `\w+`)* \|", DOC, re.MULTILINE), name


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
    assert {name for name, error in status.items() if error} == {
        "bench_history", "data_stalls", "gpu_history",
    }  # fmt: skip
    assert ask(bare, "select * from fleet_now") == []
    bare.close()


def _plain(row: tuple[object, ...]) -> list[str]:
    """A row of a catalogue: the engine spells numbers, types and EXCLUDE anew when it reads them back."""
    told = []
    for cell in row:
        text = str(cell).lower().replace("timestamp_us", "timestamp")
        text = re.sub(r"exclude \((.*?)\)", lambda found: str(sorted(found[1].split(", "))), text)
        text = re.sub(r"cast\((\d+)\.0 as double\)", r"\1", text)
        told.append(re.sub(r"\b1e(\d+)", lambda found: "1" + "0" * int(found[1]), text))
    return told


def test_the_store_that_tests_are_given_is_what_a_judge_makes(
    store: Store, new_fleet: Callable[[Path | None], "Fleet"]
) -> None:
    queries = [
        "SELECT schema_name, table_name, sql FROM duckdb_tables()",
        "SELECT schema_name, view_name, sql FROM duckdb_views() WHERE NOT internal",
        "SELECT schema_name, function_name, parameters, macro_definition FROM duckdb_functions() "
        "WHERE NOT internal",
        "SELECT schema_name, sequence_name, start_value, last_value FROM duckdb_sequences()",
        "SELECT schema_name, table_name, constraint_type, constraint_text FROM duckdb_constraints()",
        "SELECT schema_name, table_name, index_name, sql FROM duckdb_indexes()",
        "SELECT * EXCLUDE first_seen FROM live.metric",
    ]
    with closing(new_fleet(None).store) as fresh:
        Judge(fresh, JudgeSettings())
        for query in queries:
            rows = []
            for one in (store, fresh):
                with one.reader() as read:
                    rows.append([_plain(row) for row in read.execute(f"{query} ORDER BY ALL").fetchall()])
            assert rows[0] == rows[1], query
    assert (store.tables, store.reserved) == (fresh.tables, fresh.reserved)
