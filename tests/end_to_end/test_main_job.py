"""The main job, end to end: sampled, committed, flagged, shown; also over a kill of the collector."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Fleet

NODES = ("gpu-001", "gpu-002", "gpu-003")
SCENARIO = Path(__file__).parents[1] / "fixtures/scenarios/end-to-end.toml"


def open_incidents(fleet: "Fleet") -> dict[tuple[object, object], dict[str, object]]:
    return {(item["cause_rule"], item["place"]): item for item in fleet.items("incidents")}


def counts(fleet: "Fleet") -> dict[str, int]:
    found = fleet.document("status")["gpus"]
    assert isinstance(found, dict)
    parts = sum(found[state] for state in ("ok", "degraded", "critical", "no_data"))
    assert parts == found["expected"], found
    return found


def twice(fleet: "Fleet") -> list[dict[str, object]]:
    """Rows that are in the store more than once."""
    return fleet.sql(
        "select 'gpu' as what, node, gpu_uuid as entity, ts, count(*) as n from gpu group by all"
        " having n > 1 union all"
        " select 'agent', node, probe, ts, count(*) from agent group by all having count(*) > 1"
    )


@pytest.mark.slow
def test_three_agents_one_collector_one_scenario(fleet: "Fleet") -> None:
    lists = [str(fleet.folder / "cards.csv"), str(fleet.folder / "baselines.csv")]
    fleet.command("gpufleet_agent.main", "simulate", str(SCENARIO), "--inventory-csv", lists[0])
    fleet.command("gpufleet_agent.main", "simulate", str(SCENARIO), "--baseline-csv", lists[1])
    for node in NODES:  # before there is a collector: what they sample meanwhile must not be lost
        fleet.start_agent(node)
    fleet.start_collector()
    fleet.wait("the collector answers", lambda: fleet.fleet("version", check=False).returncode == 0)
    fleet.fleet("inventory", "import", lists[0], "--baselines", lists[1])
    fleet.wait("12 cards expected", lambda: counts(fleet)["expected"] == 12)

    lost, slow = ("gpu_missing", "gpu-001/1"), ("gpu_downclocked", "gpu-002/0")
    fleet.wait("lost and slow card flagged", lambda: {lost, slow} <= set(open_incidents(fleet)))
    assert set(open_incidents(fleet)) == {lost, slow}
    fleet.wait("10 ok, 2 critical", lambda: (counts(fleet)["ok"], counts(fleet)["critical"]) == (10, 2))
    events = fleet.sql("select node, entity from event where kind = 'gpu_lost'")
    assert [event["node"] for event in events] == ["gpu-001"]
    first = fleet.sql("select node, min(ts) as ts from gpu group by node order by node")
    assert [row["node"] for row in first] == list(NODES)

    # restarting the collector in mid-incident keeps the incident, its start time and its history
    before = open_incidents(fleet)
    story = fleet.items("incidents", "show", str(before[lost]["number"]))
    assert fleet.kill("collector") == -signal.SIGKILL
    fleet.start_collector()
    fleet.wait("the collector answers again", lambda: set(open_incidents(fleet)) >= {lost, slow})
    after = open_incidents(fleet)
    for key in (lost, slow):
        for column in ("number", "opened_at"):
            assert after[key][column] == before[key][column]
    again = fleet.items("incidents", "show", str(before[lost]["number"]))
    logs = (story[0]["log"], again[0]["log"])
    assert isinstance(logs[0], list)
    assert isinstance(logs[1], list)
    assert logs[1][: len(logs[0])] == logs[0]

    # an agent that dies without a word is flagged, and cleared when it is back
    silent = ("agent_silent", "gpu-003")
    fleet.kill("gpu-003")
    fleet.wait("silent agent flagged", lambda: silent in open_incidents(fleet))
    assert set(open_incidents(fleet)) == {lost, slow, silent}
    fleet.wait("its cards have no data", lambda: counts(fleet)["no_data"] == 4)
    assert (counts(fleet)["ok"], counts(fleet)["critical"]) == (6, 2)
    fleet.start_agent("gpu-003")
    fleet.wait("silent agent cleared", lambda: set(open_incidents(fleet)) == {lost, slow})

    # nothing lost, nothing doubled, over a late collector, a killed one and a killed agent
    assert twice(fleet) == []
    gaps = fleet.sql(
        "select node, max(epoch(gap)) as gap_s from"
        " (select node, ts - lag(ts) over (partition by node order by ts) as gap"
        " from agent where probe = 'gpu' and node <> 'gpu-003') group by node order by node"
    )
    for row in gaps:
        assert isinstance(row["gap_s"], float)
        assert row["gap_s"] < 8.0, gaps  # a busy machine samples late; what was sampled is counted below
    assert fleet.sql("select count(*) as n from quarantine") == [{"n": 0}]

    rows = fleet.sql("select node, gpu_index, sm_clock_mhz, power_w from gpu order by ts desc limit 5")
    assert len(rows) == 5
    assert fleet.fleet("--exit-code", "status", check=False).returncode == 11
    for node in NODES:
        assert fleet.kill(node, signal.SIGTERM) == 0
    assert fleet.kill("collector", signal.SIGTERM) == 0
    store = next((fleet.folder / "collector").glob("*.duckdb"))
    with duckdb.connect(str(store), read_only=True) as read:
        numbers = read.execute(
            "select node, count(*), max(number) - min(number) + 1 from live.ledger"
            " where node <> 'gpu-003' group by node, spool_id"  # one that was killed goes on far ahead
        ).fetchall()
    assert [node for node, _, _ in sorted(numbers)] == ["gpu-001", "gpu-002"]
    assert all(taken == given for _, taken, given in numbers), numbers


def test_S01_a_second_process_is_told_what_to_do(fleet: "Fleet") -> None:
    fleet.start_collector()
    fleet.wait("the collector answers", lambda: fleet.fleet("version", check=False).returncode == 0)
    store = next((fleet.folder / "collector").glob("*.duckdb"))
    with pytest.raises(duckdb.IOException, match="lock"):
        duckdb.connect(str(store), read_only=True)
    command = ("gpufleet_collector.main", "serve", "--config", "collector.toml", "--listen", "127.0.0.1:0")
    second = fleet.command(*command, check=False)
    assert second.returncode != 0
    assert len(second.stderr.strip().splitlines()) == 1
    assert str(fleet.running["collector"].pid) in second.stderr
    assert "fleet sql" in second.stderr
    taken = fleet.command(*command[:4], "--data", str(fleet.folder / "other"), check=False)
    assert taken.returncode != 0
    assert len(taken.stderr.strip().splitlines()) == 1
    assert str(fleet.port) in taken.stderr
    assert json.loads(fleet.fleet("-o", "json", "sql", "select 1 as one").stdout)["items"] == [{"one": 1}]
