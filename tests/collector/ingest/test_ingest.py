"""Whole streams against a collector in this process: what is acknowledged is stored, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from gpufleet.metric import Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.commit import Batch, Commits, Outcome
from gpufleet_collector.config import IngestConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.collector.ingest.conftest import Kit

    from gpufleet_collector.commit import Item


def test_rows_events_ledger_and_ack_come_together(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    assert agent.welcome is not None
    assert agent.welcome.node == "gpu-a01"
    event = pb.Event(ts_us=kit.now_us(), mono_us=5, kind="xid", code="79", count=2, detail='{"pci":"x"}')
    for number in range(1, 6):
        agent.send(number, kit.body(kit.gpu_rows(count=3), events=[event]))
    agent.wait(1, 2, 3, 4, 5)
    assert running.one("SELECT count(*) FROM live.gpu") == 15
    assert running.query("SELECT kind, code, count, entity, detail->>'pci' FROM live.event LIMIT 1") == [
        ("xid", "79", 2, "node:", "x")
    ]
    assert running.query("SELECT number, lane, rows FROM live.ledger ORDER BY 1") == [
        (number, "live", 3) for number in range(1, 6)
    ]
    state = running.state.nodes()["gpu-a01"]
    assert state.connected
    assert state.agent_version == "1.2.3"
    assert state.received_at is not None
    seen = running.state.last_seen("GPU-1")
    assert seen is not None
    assert seen.node == "gpu-a01"


def test_received_at_is_unique_per_batch_of_a_node(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    for number in range(1, 51):
        agent.send(number, kit.body(kit.gpu_rows()))
    agent.wait(*range(1, 51))
    assert running.one("SELECT count(DISTINCT received_at) FROM live.ledger") == 50
    joined = "SELECT count(*) FROM live.gpu JOIN live.ledger USING (node, received_at)"
    assert running.one(joined) == 50


def test_half_closed_stream_is_acknowledged_to_its_end(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    for number in range(1, 101):
        agent.send(number, kit.body(kit.gpu_rows()))
    agent.finish()
    assert sorted(agent.acked) == list(range(1, 101))
    assert agent.error is None


def test_G05_resend_after_crash(kit: Kit) -> None:
    running = kit.start()
    bodies = {number: kit.body(kit.gpu_rows(energy=number)) for number in range(1, 6)}
    old = kit.agent(running.address).hello()
    for number in (1, 2, 3):
        old.send(number, bodies[number])
    old.wait(1, 2, 3)  # the agent is told of 1 and 2 only, say
    new = kit.agent(running.address).hello()
    assert old.code() is grpc.StatusCode.ABORTED
    for number in (3, 4, 5):
        new.send(number, bodies[number])
    new.wait(3, 4, 5)
    assert running.query("SELECT energy_j, count(*) FROM live.gpu GROUP BY 1 ORDER BY 1") == [
        (float(number), 1) for number in range(1, 6)
    ]
    assert running.one("SELECT count(*) FROM live.ledger") == 5
    assert running.one("SELECT count(*) FROM live.event") == 0


def test_G05_collector_restart_knows_what_it_stored(kit: Kit) -> None:
    first = kit.start()
    bodies = {number: kit.body(kit.gpu_rows(energy=number)) for number in range(1, 6)}
    agent = kit.agent(first.address).hello()
    for number in (1, 2, 3):
        agent.send(number, bodies[number])
    agent.wait(1, 2, 3)
    first.stop()
    first.store.close()
    second = kit.start()
    again = kit.agent(second.address).hello()
    for number in (5, 3, 4, 5, 2):
        again.send(number, bodies[number])
    again.wait(2, 3, 4, 5)
    assert second.query("SELECT energy_j, count(*) FROM live.gpu GROUP BY 1 ORDER BY 1") == [
        (float(number), 1) for number in range(1, 6)
    ]


def test_a_known_number_with_other_content_is_an_event_and_not_stored(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    agent.send(1, kit.body(kit.gpu_rows(energy=1)))
    agent.wait(1)
    agent.send(1, kit.body(kit.gpu_rows(energy=2)))
    agent.send(2, kit.body(kit.gpu_rows(energy=3)))
    agent.wait(2)
    assert agent.acked.count(1) == 2
    assert running.query("SELECT energy_j FROM live.gpu ORDER BY 1") == [(1.0,), (3.0,)]
    assert running.query("SELECT kind, code, node FROM live.event") == [("batch_conflict", "1", "gpu-a01")]


def test_a_new_spool_of_the_same_node_begins_at_one_again(kit: Kit) -> None:
    running = kit.start()
    for spool in ("spool-1", "spool-2"):
        agent = kit.agent(running.address).hello(spool_id=spool)
        agent.send(1, kit.body(kit.gpu_rows()))
        agent.wait(1)
    assert running.one("SELECT count(*) FROM live.gpu") == 2
    assert running.one("SELECT count(*) FROM live.event") == 0


def test_both_lanes_are_stored_and_acknowledged(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    for number in range(1, 21):
        lane = pb.LANE_BACKFILL if number % 2 else pb.LANE_LIVE
        agent.send(number, kit.body(kit.gpu_rows()), lane)
    agent.wait(*range(1, 21))
    assert running.query("SELECT lane, count(*) FROM live.ledger GROUP BY 1 ORDER BY 1") == [
        ("backfill", 10),
        ("live", 10),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wire_version": 0}, "wire version 0"),
        ({"wire_version": 99}, "upgrade the collector"),
        ({"node": ""}, "node name"),
        ({"node": "a b"}, "node name"),
        ({"node": "x" * 254}, "node name"),
        ({"node": "../../etc"}, "node name"),
        ({"machine_id": "a'; DROP TABLE x"}, "machine_id"),
        ({"boot_id": "b" * 65}, "boot_id"),
        ({"spool_id": ""}, "spool_id"),
    ],
)
def test_a_hello_that_will_not_do_is_told_why(kit: Kit, changes: dict[str, object], words: str) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello(**changes)
    assert agent.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in agent.details()
    assert running.one("SELECT count(*) FROM live.node") == 0


def test_the_first_message_must_be_a_hello_and_there_is_one(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address)
    agent.send(1, b"")
    assert agent.code() is grpc.StatusCode.INVALID_ARGUMENT
    agent = kit.agent(running.address).hello()
    agent.request(pb.StreamRequest(hello=kit.hello()))
    assert agent.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_G02_size(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    uuids = [f"GPU-{number}" for number in range(8)]
    count = 25_000
    big = kit.rows(
        "gpu",
        [
            kit.column("gpu_uuid", Type.STRING, [uuids[row % 8] for row in range(count)]),
            kit.column("util_pct", Type.F64, [float(row % 100) for row in range(count)]),
            kit.column("energy_j", Type.F64, [float(row) for row in range(count)]),
        ],
        [kit.now_us()] * count,
    )
    content = kit.body(big)
    assert 600_000 < len(content) < 1 << 20
    agent.send(1, content)
    agent.wait(1)
    assert running.one("SELECT count(*) FROM live.gpu") == count
    agent.send(2, b"\0" * 5_242_880)
    assert agent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    over = kit.agent(running.address).hello()
    over.send(2, b"\0" * ((1 << 20) + 8192))
    assert over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    again = kit.agent(running.address).hello()
    again.send(3, kit.body(kit.gpu_rows()))
    again.wait(3)


def test_the_largest_numbers_are_numbers_like_others(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    for number in (1, 2**64 - 1, 2**63):
        agent.send(number, kit.body(kit.gpu_rows()))
    agent.wait(1, 2**64 - 1, 2**63)
    assert running.one("SELECT count(*) FROM live.gpu") == 3
    assert running.one("SELECT max(number) FROM live.ledger") == 2**64 - 1


def test_G05_a_conflict_with_what_an_earlier_run_stored_stops_nobody(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    first = kit.start()
    agent = kit.agent(first.address).hello()
    agent.send(1, kit.body(kit.gpu_rows(energy=1)))
    agent.wait(1)
    first.stop()
    first.store.close()
    second = kit.start(ingest=IngestConfig(linger_ms=200))
    again = kit.agent(second.address).hello()
    other = kit.agent(second.address).hello(node="gpu-a02", machine_id="b" * 32, spool_id="t")
    caplog.clear()
    again.send(1, kit.body(kit.gpu_rows(energy=2)))
    again.send(2, kit.body(kit.gpu_rows(energy=3)))
    other.send(1, kit.body(kit.gpu_rows(energy=4)))
    again.wait(1, 2)
    other.wait(1)
    assert second.query("SELECT energy_j FROM live.gpu ORDER BY 1") == [(1.0,), (3.0,), (4.0,)]
    assert second.query("SELECT kind, code, node FROM live.event") == [("batch_conflict", "1", "gpu-a01")]
    assert "tried alone" not in caplog.text, "a known number costs nobody else a commit of his own"


def test_an_error_that_nobody_foresaw_ends_streams_and_not_the_committer(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    real = Commits.commit
    broken = [True]

    def commit(self: Commits, items: Sequence[Item]) -> Outcome:
        if broken[0] and any(isinstance(item, Batch) for item in items):
            raise ZeroDivisionError("surprise")
        return real(self, items)

    monkeypatch.setattr(Commits, "commit", commit)
    agent.send(1, kit.body(kit.gpu_rows(energy=1)))
    kit.until(lambda: agent.ended)
    assert agent.acked == []
    kit.until(lambda: "surprise" in running.state.not_ready)
    broken[0] = False
    again = kit.agent(running.address).hello()
    again.send(1, kit.body(kit.gpu_rows(energy=1)))
    again.wait(1)
    kit.until(lambda: not running.state.not_ready)
    assert running.query("SELECT energy_j FROM live.gpu") == [(1.0,)]
