"""Simulated hosts through the agent's own code, against the small real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent import simulate
from gpufleet_agent.probes import PROBES
from gpufleet_agent.spool import Clock, Spool, SpoolHeld

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.transport.conftest import FakeCollector, Kit

SCENARIO = """
[fleet]
nodes = "quiet,stops,boots,hangs,skews,loses,bare"
gpus = 2
[[node]]
node = "bare"
gpus = 0
[[fault]]
node = "stops"
kind = "agent_stopped"
at = 1.5
until = 3
[[fault]]
node = "boots"
kind = "reboot"
at = 1.5
params = { down_s = 1.0 }
[[fault]]
node = "hangs"
gpu = 1
kind = "driver_hang"
at = 1
until = 3
params = { call = "temperature" }
[[fault]]
node = "skews"
kind = "clock_skew"
at = 1.5
params = { offset_s = -120 }
[[fault]]
node = "loses"
gpu = 0
kind = "card_lost"
at = 1.5
"""
QUICK = {"gpu": 0.3, "pci": 0.5, "host": 0.5, "agent": 0.5, "tick": 0.1}


async def play(
    kit: Kit, collector: FakeCollector, seconds: float, text: str = SCENARIO, channels: int = 0
) -> None:
    path = kit.tmp / "scenario.toml"
    path.write_text(text)
    stop = asyncio.Event()
    async with collector.serve() as address:
        playing = asyncio.ensure_future(
            simulate.run(
                path,
                address,
                state_dir=kit.tmp / "state",
                stop=stop,
                seal_s=0.5,
                bench_every_s=0.7,
                every_s=QUICK,
                channels=channels,
            )
        )
        await asyncio.wait([playing], timeout=seconds)
        stop.set()
        await playing


def bodies(collector: FakeCollector, node: str) -> list[pb.Body]:
    return [
        pb.Body.FromString(body) for (name, _, _), body in sorted(collector.ledger.items()) if name == node
    ]


def events(collector: FakeCollector, node: str) -> list[pb.Event]:
    return [event for body in bodies(collector, node) for event in body.events]


def table(kit: Kit, collector: FakeCollector, node: str, probe: str) -> list[dict[str, object]]:
    """Every row of one table of one host, with its time in `ts`."""
    found = []
    for body in bodies(collector, node):
        for rows in (rows for rows in body.rows if rows.probe == probe):
            columns = {one.name: kit.decode(one, rows.count)[0] for one in rows.columns}
            for at in range(rows.count):
                ts = int.from_bytes(rows.ts_us[at * 8 : at * 8 + 8], "little")
                found.append({"ts": ts, **{name: cells[at] for name, cells in columns.items()}})
    return found


@pytest.mark.parametrize("channels", [0, 2])
def test_a_fleet_goes_through_its_faults(kit: Kit, monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    monkeypatch.setattr(simulate, "LOOK_S", 0.1)

    async def work() -> None:
        collector = kit.collector()
        await play(kit, collector, 5.0, channels=channels)
        check_quiet(kit, collector)
        check_lives(kit, collector)
        check_troubles(kit, collector)
        assert collector.conflicts == 0

    kit.run(work())


def check_quiet(kit: Kit, collector: FakeCollector) -> None:
    rows = table(kit, collector, "quiet", "gpu")
    assert len({row["gpu_uuid"] for row in rows}) == 2
    assert all(row["state"] == "ok" and row["util_pct"] is not None for row in rows)
    times = sorted({int(str(row["ts"])) for row in rows})
    assert len(rows) == 2 * len(times), "the rows of one sweep share its time"
    runs = [row for row in table(kit, collector, "quiet", "agent") if row["probe"] == "gpu"]
    assert sorted(int(str(row["ts"])) for row in runs) == times
    assert all(row["ok"] and row["rows"] == 2 for row in runs)
    own = [row for row in table(kit, collector, "quiet", "agent") if row["probe"] == "agent"]
    assert own[-1]["spool_batches"] is not None
    assert own[-1]["cpu_s_total"] is None
    benches = table(kit, collector, "quiet", "bench")
    assert {row["entity"] for row in benches} == {f"gpu:{row['gpu_uuid']}" for row in rows}
    assert {(row["bench"], row["status"], row["convention"]) for row in benches} == {
        ("h2d", "ok", "copied_once")
    }
    assert all(row["unit"] == "GB/s" and row["params_hash"] and row["version"] for row in benches)
    assert [event.kind for event in events(collector, "quiet")] == ["agent_start", "agent_stop"]
    hello = next(hello for hello in collector.hellos if hello.node == "quiet")
    assert {probe.name for probe in hello.probes} == {*PROBES, "agent", "bench"}
    assert hello.inventory.complete
    kinds = [item.entity.partition(":")[0] for item in hello.inventory.items]
    assert Counter(kinds) == {
        "node": 1, "gpu": 2, "pci": 2, "port": 3, "dimm": 16, "disk": 2, "mount": 4,
    }  # fmt: skip
    bare = [row for row in table(kit, collector, "bare", "agent") if row["probe"] == "gpu"]
    assert bare
    assert all(row["ok"] and row["rows"] == 0 for row in bare), "looked, and found none"


def check_lives(kit: Kit, collector: FakeCollector) -> None:
    stops = [event.kind for event in events(collector, "stops")]
    assert stops == ["agent_start", "agent_start", "agent_stop"], "the first life ends without goodbye"
    assert len({hello.boot_id for hello in collector.hellos if hello.node == "stops"}) == 1
    times = sorted({int(str(row["ts"])) for row in table(kit, collector, "stops", "gpu")})
    assert max(after - before for before, after in pairwise(times)) > 1_000_000
    boots = events(collector, "boots")
    assert [event.kind for event in boots] == ["agent_start", "reboot", "agent_start", "agent_stop"]
    ids = list(dict.fromkeys(hello.boot_id for hello in collector.hellos if hello.node == "boots"))
    assert len(ids) == 2
    assert json.loads(boots[1].detail) == {"before": ids[0], "now": ids[1]}
    assert len({hello.spool_id for hello in collector.hellos if hello.node == "boots"}) == 1


def check_troubles(kit: Kit, collector: FakeCollector) -> None:
    hung = [event for event in events(collector, "hangs") if not event.kind.startswith("agent_")]
    assert [(event.kind, event.code) for event in hung] == [
        ("driver_hung", "temperature"),
        ("driver_recovered", "temperature"),
    ]
    assert hung[0].entity.startswith("gpu:GPU-")
    incomplete = [body.inventory for body in bodies(collector, "hangs") if body.HasField("inventory")]
    assert [one.complete for one in incomplete] == [True, False, True]
    states = [row["state"] for row in table(kit, collector, "hangs", "gpu")]
    assert states.count("hung") >= 3
    lost = [event for event in events(collector, "loses") if not event.kind.startswith("agent_")]
    assert sorted(event.kind for event in lost) == ["gpu_lost", "xid"], "driver and kernel log tell it once"
    (gone,) = [event for event in lost if event.kind == "gpu_lost"]
    assert json.loads(gone.detail)["serial"]
    assert gone.entity.startswith("gpu:GPU-")
    (step,) = [event for event in events(collector, "skews") if event.kind == "clock_step"]
    assert json.loads(step.detail) == {"step_s": -120.0}
    offsets = [batch.sent_at_us - batch.sent_mono_us for batch in collector.received if batch.number]
    assert max(offsets) - min(offsets) == pytest.approx(120e6, abs=1e5)
    skewed = [body.sealed_at_us - body.sealed_mono_us for body in bodies(collector, "skews")]
    assert max(skewed) - min(skewed) == pytest.approx(120e6, abs=1e5)


def test_a_spool_that_another_simulation_holds_is_an_error(kit: Kit) -> None:
    async def work() -> None:
        (kit.tmp / "state").mkdir()
        held = Spool.open(kit.tmp / "state" / "one.spool", max_bytes=1 << 20, max_age_s=60, clock=Clock("b"))
        try:
            with pytest.raises(SpoolHeld):
                await play(kit, kit.collector(), 10.0, '[fleet]\nnodes = "one"\ngpus = 1\n')
        finally:
            held.close()

    kit.run(work())


def batches(path: Path) -> int:
    """How many lie in a spool that is being written."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return int(db.execute("select count(*) from batch").fetchone()[0])
    except sqlite3.OperationalError:  # not there yet
        return 0


def test_without_a_collector_everything_waits_in_the_spool(kit: Kit, tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "s.toml"
        path.write_text('[fleet]\nnodes = "one"\ngpus = 1\n')
        stop = asyncio.Event()
        playing = asyncio.ensure_future(
            simulate.run(
                path,
                f"127.0.0.1:{kit.free_port()}",
                state_dir=tmp_path / "state",
                stop=stop,
                seal_s=0.2,
                every_s=QUICK,
            )
        )
        waiting = tmp_path / "state" / "one.spool"
        await kit.until(lambda: batches(waiting) >= 4)
        stop.set()
        await playing
        spool = Spool.open(
            tmp_path / "state" / "one.spool", max_bytes=1 << 20, max_age_s=60, clock=Clock("b")
        )
        assert spool.pending() >= 4
        assert spool.get_meta("stopped") == "clean"
        spool.close()

    kit.run(work())
