"""S04: the disk fills, the engine gives up, the collector does not."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpufleet.metric import Type
from gpufleet_collector.config import DiskConfig
from gpufleet_collector.retention import DiskWatch
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit, Running


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("may not mount a file system here")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def _content(kit: Kit, number: int) -> bytes:
    count = 1000
    rng = random.Random(number)
    return kit.body(
        kit.rows(
            "gpu",
            [
                kit.column("gpu_uuid", Type.STRING, [f"GPU-{row % 8}" for row in range(count)]),
                kit.column("energy_j", Type.F64, [number + rng.random() for _ in range(count)]),
                kit.column("util_pct", Type.F64, [100 * rng.random() for _ in range(count)]),
                kit.column("mem_used_bytes", Type.U64, [rng.getrandbits(63) for _ in range(count)]),
            ],
            [kit.now_us()] * count,
        )
    )


def _got_on(running: Running, agent: Agent, acked: int) -> bool:
    return len(agent.acked) >= acked or bool(running.store.broken)


def test_S04_a_full_disk_loses_and_doubles_nothing_and_heals_by_itself(kit: Kit, small_disk: Path) -> None:
    running = kit.start(
        store=Store.open(small_disk / "fleet.duckdb"), disk=DiskConfig(floor_mib=0, floor_pct=0, check_s=0.05)
    )
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (17 << 20))
    agent = kit.agent(running.address).hello()
    number = 0
    while not running.store.broken and number < 3000:
        number += 1
        agent.send(number, _content(kit, number))
        if number % 8 == 0:
            kit.until(partial(_got_on, running, agent, number - 8))
    assert number < 3000, "the disk did not fill"
    kit.until(lambda: running.state.not_ready.startswith("store: "))
    assert not agent.ended
    ballast.unlink()
    agent.wait(*range(1, number + 1))
    kit.until(lambda: running.state.not_ready == "")
    assert running.query("SELECT count(*), count(DISTINCT energy_j) FROM live.gpu") == [
        (number * 1000, number * 1000)
    ]
    assert running.query("SELECT count(*), sum(rows) FROM live.ledger") == [(number, number * 1000)]
    assert running.query("SELECT DISTINCT kind FROM live.event") == [("store_reopened",)]


def test_S04_a_commit_that_failed_after_it_was_durable_is_stored_once(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    agent.send(1, kit.body(kit.gpu_rows(energy=1)))
    agent.wait(1)
    real = running.store._connection

    class Failing:
        """Commits, then says that it could not: as the engine does when its automatic checkpoint fails."""

        def execute(self, sql: str, *args: object) -> object:
            done = real.execute(sql, *args)
            if sql == "COMMIT":
                raise duckdb.FatalException(
                    "FATAL Error: Failed to checkpoint because of error: No space left"
                )
            return done

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    running.store._connection = Failing()  # type: ignore[assignment]
    agent.send(2, kit.body(kit.gpu_rows(energy=2)))
    agent.send(3, kit.body(kit.gpu_rows(energy=3)))
    agent.wait(2, 3)
    assert running.query("SELECT energy_j, count(*) FROM live.gpu GROUP BY 1 ORDER BY 1") == [
        (1.0, 1),
        (2.0, 1),
        (3.0, 1),
    ]
    assert running.one("SELECT count(*) FROM live.ledger") == 3
    kit.until(lambda: running.query("SELECT kind FROM live.event") == [("store_reopened",)])


def test_S04_below_the_floor_reading_stops_agents_are_told_and_it_goes_on_by_itself(
    kit: Kit, small_disk: Path
) -> None:
    running = kit.start(
        store=Store.open(small_disk / "fleet.duckdb"),
        disk=DiskConfig(floor_mib=8, floor_pct=50, check_s=0.05),
    )
    agent = kit.agent(running.address).hello()
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    assert _health(running.address) == health_pb2.HealthCheckResponse.SERVING
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (16 << 20))
    agent.until(lambda: [item.paused.reason for item in agent.directives] == ["disk_floor"])
    kit.until(lambda: _health(running.address) == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert running.state.nodes()["gpu-a01"].paused == "disk_floor"
    assert "disk_floor" in running.state.not_ready
    late = kit.agent(running.address).hello(node="late", machine_id="bbbb")
    late.until(lambda: [item.paused.reason for item in late.directives] == ["disk_floor"])
    for number in range(2, 40):
        agent.send(number, kit.body(kit.gpu_rows()))
    ballast.unlink()
    agent.wait(*range(2, 40))
    assert [item.paused.reason for item in agent.directives] == ["disk_floor", ""]
    kit.until(lambda: _health(running.address) == health_pb2.HealthCheckResponse.SERVING)
    assert running.state.nodes()["gpu-a01"].paused == ""


def _health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="gpufleet.v1.IngestService"), timeout=10
        )
    return int(reply.status)


def test_S04_the_floor_is_the_smaller_of_both_and_has_a_margin(tmp_path: Path) -> None:
    told: list[str] = []
    DiskWatch(tmp_path, DiskConfig(floor_mib=1e12, floor_pct=0), told.append).look()
    DiskWatch(tmp_path, DiskConfig(floor_mib=0, floor_pct=100), told.append).look()
    assert told == []
    DiskWatch(tmp_path, DiskConfig(floor_mib=1e12, floor_pct=100), told.append).look()
    assert told == ["disk_floor"]
    DiskWatch(tmp_path / "gone", DiskConfig(floor_mib=1e12, floor_pct=100), told.append).look()
    assert told == ["disk_floor"]
