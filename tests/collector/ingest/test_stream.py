"""The stream itself: quiet, crowded, replaced, mistreated."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import CHANNEL_OPTIONS, KEEPALIVE_S, SERVER_OPTIONS
from gpufleet_collector import main
from gpufleet_collector.config import IngestConfig

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit, Running


def test_G01_a_quiet_stream_holds(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of options, 60 times faster, over eight pings; how long an answer may take stays."""

    def faster(options: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
        return [
            (name, value // 60 if name.endswith(("time_ms", "data_ms")) else value) for name, value in options
        ]

    monkeypatch.setattr(main, "SERVER_OPTIONS", faster(SERVER_OPTIONS))
    running = kit.start()
    # the library sends client pings no faster than this option allows, whatever keepalive_time_ms says
    quick = [*faster(CHANNEL_OPTIONS), ("grpc.http2.min_sent_ping_interval_without_data_ms", 100)]
    channel = grpc.insecure_channel(running.address, options=quick)
    agent = kit.agent(running.address, channel).hello()
    time.sleep(8 * KEEPALIVE_S / 60)
    assert not agent.ended
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    assert running.one("SELECT count(*) FROM live.event") == 0


def test_G01_the_server_allows_what_the_client_does() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    allowed = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert allowed <= client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1


def test_a_full_queue_stops_reading_and_nothing_is_lost(kit: Kit) -> None:
    running = kit.start(ingest=IngestConfig(linger_ms=0, queue_mib=1, group_mib=1))
    agents = [
        kit.agent(running.address).hello(node=f"n{n}", machine_id=f"m{n}", spool_id=f"s{n}") for n in range(4)
    ]
    count = 3000
    big = kit.body(
        kit.rows(
            "gpu",
            [
                kit.column("gpu_uuid", Type.STRING, ["GPU-1"] * count),
                kit.column("energy_j", Type.F64, [float(row) for row in range(count)]),
            ],
            [kit.now_us()] * count,
        )
    )
    with running.store.transaction():  # the committer waits outside
        for agent in agents:
            for number in range(1, 101):
                agent.send(number, big, pb.LANE_BACKFILL if number % 3 else pb.LANE_LIVE)
        time.sleep(0.5)
        queued = sum(running.collector.ingest.committer._intake._bytes)
        assert queued < 4 << 20
    for agent in agents:
        agent.wait(*range(1, 101))
    assert running.one("SELECT count(*) FROM live.gpu") == 4 * 100 * count


def test_live_goes_before_backfill(kit: Kit) -> None:
    running = kit.start(ingest=IngestConfig(linger_ms=0, group_mib=1, queue_mib=64))
    late = kit.agent(running.address).hello(node="late", machine_id="m1", spool_id="s1")
    now = kit.agent(running.address).hello(node="now", machine_id="m2", spool_id="s2")
    padding = kit.body(
        kit.rows("gpu", [kit.column("gpu_uuid", Type.STRING, ["x" * 4000, "y" * 4000])], [kit.now_us()] * 2)
    )
    with running.store.transaction():
        for number in range(1, 1001):
            late.send(number, padding, pb.LANE_BACKFILL)
        kit.until(lambda: running.collector.ingest.committer._intake._bytes[1] > 4 << 20)
        now.send(1, kit.body(kit.gpu_rows()))
        kit.until(lambda: running.collector.ingest.committer._intake._bytes[0] > 0)
    now.wait(1)
    stored = len(late.acked)
    late.wait(*range(1, 1001))
    assert stored < 800


def test_two_hundred_agents_share_commits(kit: Kit) -> None:
    running = kit.start(ingest=IngestConfig(linger_ms=50))
    agents: list[Agent] = []
    lock = threading.Lock()

    def connect(first: int) -> None:
        for number in range(first, first + 25):
            agent = kit.agent(running.address)
            agent.hello(node=f"n{number}", machine_id=f"m{number}", spool_id=f"s{number}")
            with lock:
                agents.append(agent)

    threads = [threading.Thread(target=connect, args=(first,)) for first in range(0, 200, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(agents) == 200
    for agent in agents:
        agent.send(1, kit.body(kit.gpu_rows(agent.welcome.node if agent.welcome else "")))
    for agent in agents:
        agent.wait(1)
    assert running.one("SELECT count(DISTINCT gpu_uuid) FROM live.gpu") == 200
    assert sum(state.connected for state in running.state.nodes().values()) == 200
    for agent in agents[:100]:
        agent.close()
    kit.until(lambda: sum(state.connected for state in running.state.nodes().values()) == 100)


def test_streams_that_end_and_are_cancelled_at_once_are_gone(kit: Kit) -> None:
    running = kit.start()
    for turn in range(1, 6):
        agents = [kit.agent(running.address) for _ in range(40)]
        for number, agent in enumerate(agents):
            name = str(number)
            agent.request(
                pb.StreamRequest(hello=kit.hello(node=f"n{name}", machine_id=f"m{name}", spool_id=f"s{name}"))
            )
        for agent in agents:
            agent.until(lambda agent=agent: agent.welcome is not None)  # type: ignore[misc]
            agent.send(turn, kit.body(kit.gpu_rows()))
        for agent in agents:
            agent.wait(turn)
            agent.close()  # half-closes and cancels
        kit.until(lambda: not any(state.connected for state in running.state.nodes().values()))
        assert all(agent.acked == [turn] for agent in agents)
        kit.agents.clear()


def test_stop_acknowledges_what_was_read(kit: Kit) -> None:
    running = kit.start(ingest=IngestConfig(linger_ms=300))
    agent = kit.agent(running.address).hello()
    agent.send(1, kit.body(kit.gpu_rows()))
    kit.until(lambda: running.collector.ingest.committer._intake._bytes[0] > 0)
    running.stop()
    assert agent.code() is grpc.StatusCode.UNAVAILABLE
    assert agent.acked == [1]
    assert running.one("SELECT count(*) FROM live.gpu") == 1


@pytest.fixture
def shared(kit: Kit) -> tuple[Running, list[int]]:
    return kit.start(), [0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=6
    ),
    lane=st.sampled_from([0, 1, 2, 7]),
    number=st.integers(0, 2**64 - 1),
    clock=st.integers(-(2**63), 2**63 - 1),
)
def test_mutated_bytes_hurt_nobody(
    kit: Kit,
    shared: tuple[Running, list[int]],
    cuts: list[tuple[int, int, bytes]],
    lane: int,
    number: int,
    clock: int,
) -> None:
    running, serial = shared
    serial[0] += 1
    event = pb.Event(ts_us=kit.now_us(), kind="xid", code="79", detail='{"a": 1}')
    inventory = pb.Inventory(ts_us=kit.now_us(), items=[pb.Item(entity="node:", attributes={"a": "b"})])
    entry = kit.rows(
        "gpu",
        [
            kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2", None]),
            kit.column("util_pct", Type.F64, [1.0, None, 3.0]),
            kit.column("mem_used_bytes", Type.U64, [1, 2, 3]),
            kit.column("present", Type.BOOL, [True, False, None]),
        ],
        [kit.now_us()] * 3,
    )
    content = kit.body(entry, kit.gpu_rows("GPU-3"), events=[event], inventory=inventory)
    for at, length, put in cuts:
        at %= len(content)
        content = content[:at] + put + content[at + length :]
    agent = kit.agent(running.address).hello(spool_id=f"s{serial[0]}")
    mutated = pb.Batch(number=number, body=content, sent_at_us=clock, sent_mono_us=clock)
    mutated.lane = lane  # type: ignore[assignment]
    agent.request(pb.StreamRequest(batch=mutated))
    after = number - 1 if number > 1 else number + 1  # 0 is no number
    agent.send(after, kit.body(kit.gpu_rows("GPU-after", energy=serial[0])))
    agent.wait(number, after)
    assert not agent.ended
    agent.close()
    kit.agents.remove(agent)
    assert (
        running.one(f"SELECT count(*) FROM live.gpu WHERE energy_j = {serial[0]} AND gpu_uuid = 'GPU-after'")
        == 1
    )
    assert running.one(f"SELECT count(*) FROM live.ledger WHERE spool_id = 's{serial[0]}'") == 2
    assert running.collector.ingest.committer.is_alive()
