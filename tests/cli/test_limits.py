"""`fleet limits`, `fleet coverage` and `fleet replay` at the prompt: the real service, a real judge."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from gpufleet.metric import Type
from gpufleet.v1 import fleet_pb2_grpc
from gpufleet_cli.main import fleet
from gpufleet_collector.documents import Health
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.rules import Rule, parse_rule
from gpufleet_collector.store import Column, Store

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"

HOT = """/*
title = "Card is hot"
scope = "gpu"
every = "10s"
for = "2 of 3"
clear_after = "20s"
runbook = "hot"
[limits]
hot_c = { value = 80, source = "made up" }
*/
create or replace macro find_hot(as_of) as table
select g.node, 'gpu:' || g.gpu_uuid as entity,
       case when g.temperature_c is null then 'unknown' when g.temperature_c > l.hot_c then 'warn'
            else 'ok' end as verdict,
       if(g.temperature_c is null, 'unreadable', 'read') as code,
       g.temperature_c as observed, l.hot_c as expected, 'C' as unit, g.ts as evidence_at,
       if(g.temperature_c is null, 'the temperature cannot be read', 'temperature') as reason, '{}' as detail
from (select node, gpu_uuid, max(ts) as ts, arg_max_null(temperature_c, ts) as temperature_c from gpu
      where ts > as_of - interval 1 minute and ts <= as_of group by node, gpu_uuid) g
join limits_hot l on l.node = g.node and l.model = ''
"""
COLD = HOT.replace("hot", "cold").replace("from gpu", "from gpu join nothing_yet using (node)")


def made_rules() -> list[Rule]:
    return [parse_rule("cold", COLD), parse_rule("hot", HOT)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Two nodes, a card each, ten minutes: one gets hot, the other cannot be read at the end."""
    store = Store.open(tmp_path / "fleet.duckdb")
    now = datetime.now(UTC).replace(tzinfo=None, microsecond=0)
    end = now - timedelta(seconds=now.second % 10)
    begin = end - timedelta(minutes=10)
    with store.transaction() as write:
        kinds = {"gpu_uuid": Type.STRING, "temperature_c": Type.F64}
        store.ensure_probe(
            write,
            "gpu",
            [Column(name, kind, "", "gauge", "", None, None, "") for name, kind in kinds.items()],
        )
        for node in ("gpu-001", "gpu-002"):
            write.execute(
                f"INSERT INTO live.node VALUES ('{node}', '{node}', '{node}', 'b', 's', '1', '', ?, ?)",
                [begin - timedelta(hours=1), end],
            )
            write.execute(f"INSERT INTO live.probe VALUES ('{node}', 'gpu', 10)")
        for n in range(60):
            at = begin + timedelta(seconds=10 * (n + 1))
            for node, value in (
                ("gpu-001", 85.0 if 20 <= n < 30 else 60.0 + n % 7),
                ("gpu-002", None if n > 50 else 58.0),
            ):
                write.execute(
                    "INSERT INTO live.gpu (ts, received_at, node, boot_id, gpu_uuid, temperature_c) "
                    "VALUES (?, ?, ?, 'b', ?, ?)",
                    [at, at, node, f"GPU-{node}", value],
                )
    settings = JudgeSettings(limit={"hot": {"hot_c": Limit(value=82, source="ann, 2026-03")}})
    judge = Judge(store, settings, rules=made_rules())
    for n in range(8, 40):
        judge.run_pass(begin + timedelta(seconds=10 * (n + 1)))
    ready, stopping = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    port = 0

    async def serve() -> None:
        nonlocal port
        server = grpc.aio.server()
        servicer = FleetServicer(
            store,
            judge.policies,
            lambda: Health(True, "", 0.1, False, ""),
            lambda: end,
            settings,
            made_rules(),
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await stopping.wait()
        await server.stop(0)

    def work() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(90)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GPUFLEET_SERVER", f"127.0.0.1:{port}")
    yield lambda *words: CliRunner().invoke(fleet, list(words), prog_name="fleet")
    loop.call_soon_threadsafe(stopping.set)
    thread.join(90)
    store.close()


def golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_limits_show_layer_and_source(run: Run) -> None:
    result = run("limits", "hot")
    assert result.exit_code == 0
    golden("limits", result.output)
    document = json.loads(run("limits", "hot", "--node", "gpu-002", "-o", "json").output)
    (item,) = document["items"]
    assert (item["value"], item["default"], item["layer"], item["source"]) == (82, 80, "site", "ann, 2026-03")
    assert run("limits", "hott").exit_code == 5
    assert run("limits", "--node", "gpu-009").exit_code == 5
    assert run("limits", "a", "b").exit_code == 2


def test_suggest_fits_what_well_entities_show(run: Run) -> None:
    document = json.loads(run("limits", "suggest", "hot", "--since", "1h", "-o", "json").output)
    (item,) = document["items"]
    assert (item["name"], item["compares"], item["bad_is"], item["value"]) == (
        "hot_c",
        "observed",
        "high",
        82,
    )
    assert item["healthy"]["p50"] <= 62
    assert 66 <= item["suggested"] < 70
    assert item["entities_over_now"] == item["entities_over_suggested"] == 1, "the one that got hot"
    assert (
        item["caution"] == f"made of only 10 min of history, 2 entities, {item['healthy']['samples']} samples"
    )
    shown = run("limits", "suggest", "hot", "--since", "1h").output
    assert "SUGGESTED" in shown
    assert item["caution"] in " ".join(shown.split())
    assert run("limits", "suggest").exit_code == 2
    assert json.loads(run("limits", "suggest", "cold", "-o", "json").output)["note"].startswith(
        "it cannot run"
    )


def test_coverage_says_what_is_not_judged_and_why(run: Run) -> None:
    result = run("coverage")
    assert result.exit_code == 0
    golden("coverage", result.output)
    document = json.loads(run("coverage", "-o", "json").output)
    assert (
        document["fleet"] | {"nodes": 2, "nodes_judged": 1, "rules": 2, "rules_running": 1}
        == document["fleet"]
    )
    result = run("coverage", "gpu-002")
    golden("coverage_node", result.output)
    assert run("coverage", "gpu-009").exit_code == 5
    assert run("coverage", "--exit-code").exit_code == 12


def test_replay_prints_an_estimate_and_then_what_it_would_have_raised(run: Run, tmp_path: Path) -> None:
    result = run("replay", "--rule", "hot", "--since", "2h")
    assert result.exit_code == 0, result.output
    # the second rule of a pace runs half an interval after the first, as in the live judge
    assert "replaying hot: 59 passes, 10 s apart" in result.stderr
    assert "1 finding in the replay, 1 really raised: 1 the same, 0 new, 0 not raised again" in result.stdout
    file = tmp_path / "hotter.sql"
    file.write_text(HOT)
    result = run("replay", "--rule", str(file), "--since", "2h", "--limit", "hot_c=90", "-o", "json")
    assert json.loads(result.stdout)["totals"] == {
        "replayed": 0, "raised": 1, "both": 0, "replay_only": 0, "raised_only": 1,
    }  # fmt: skip
    file.write_text(HOT.replace("from gpu", "from '/etc/passwd'"))
    result = run("replay", "--rule", str(file), "--since", "2h")
    assert result.exit_code == 2
    assert result.stderr.startswith("fleet: rule hot: '/etc/passwd': files cannot be read")


@pytest.mark.parametrize(
    "words",
    [
        ("--rule", "hot"), ("--rule", "hot", "--since", "soon"), ("--rule", "none.sql", "--since", "1h"),
        ("--rule", "hot", "--since", "1h", "--limit", "hot_c"), ("--rule", "hot", "--since", "1h", "-w"),
        ("--rule", "hot", "--since", "1h", "--limit", "hot=1"), ("--rule", "hott", "--since", "1h"),
    ],
)  # fmt: skip
def test_replay_refuses_what_makes_no_sense_in_one_way(run: Run, words: tuple[str, ...]) -> None:
    result = run("replay", *words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_explain_gives_numbers_limit_who_set_it_peers_and_evidence(run: Run) -> None:
    screen = run("explain", "node", "gpu-001").output
    assert "ann, 2026-03" in screen
    assert "site" in screen
    assert "measured on the fleet: 1 from 63 to 63, median 63 C; this node: 1 from 63 to 63" in " ".join(
        screen.split()
    )
    document = json.loads(run("explain", "hot", "-o", "json").output)
    (item,) = document["items"]
    assert [one["among"] for one in item["peers"]] == ["fleet"]
    assert [one["verdict"] for one in item["verdicts"]] == ["unknown"]
