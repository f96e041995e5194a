"""The stream against a small real gRPC server: what is sent, resent, split, and how patiently."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme

from gpufleet.event import Event
from gpufleet.tls import Tls
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from gpufleet_agent.encode import BodyBuilder

if TYPE_CHECKING:
    from tests.agent.transport.conftest import Kit


def test_G05_resend_after_crash(kit: Kit) -> None:
    """Sent 1..5, committed 1..3, acked 1 and 2, crash, the old stream still open: 1..5 once each."""

    async def work() -> None:
        before = kit.collector()
        before.commit = lambda batch: batch.number <= 3
        before.ack = lambda batch: batch.number <= 2
        async with before.serve() as old:
            agent = kit.agent(kit.settings(old))
            agent.put()
            spool_id = agent.spool.spool_id
            async with kit.pushing(agent):
                for _ in range(4):
                    agent.put()
                await kit.until(lambda: len(before.received) == 5 and agent.spool.pending() == 3)
                # The agent is gone without a word (its stream object stays open at the old collector), and a
                # second life of it starts on the same spool file, against a collector with the same ledger.
                agent.spool.close()
                after = kit.collector()
                after.ledger, after.stored = dict(before.ledger), before.stored.copy()
                async with after.serve() as new:
                    again = kit.agent(kit.settings(new))
                    assert again.spool.spool_id == spool_id
                    async with kit.pushing(again):
                        assert await again.push.drain(20)
                        assert before.open_streams == 1
                assert sorted(batch.number for batch in after.received) == [3, 4, 5]
                assert after.stored == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
                assert after.conflicts == 0

    kit.run(work())


def test_collector_crash_resends_what_was_not_acknowledged(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.ack = lambda batch: batch.number <= 2
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            async with kit.pushing(agent):
                for _ in range(5):
                    agent.put()
                await kit.until(lambda: len(collector.received) == 5)
                collector.ack = lambda batch: True
                collector.crash.set()
                await kit.until(lambda: agent.push.connected is False)
                collector.crash.clear()
                assert await agent.push.drain(20)
                assert agent.push.reconnects_total >= 1
        assert collector.stored == dict.fromkeys(range(1, 6), 1)

    kit.run(work())


def test_G02_a_long_backlog_goes_in_small_messages(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        async with collector.serve() as address:  # with gRPC's default limit of 4 MiB
            agent = kit.agent(kit.settings(address))
            agent.put(400_000)
            async with kit.pushing(agent):
                assert await agent.push.drain(60)
        assert collector.rows() == 400_000
        assert sum(collector.sizes) > 4 << 20
        assert max(collector.sizes) <= MAX_MESSAGE_BYTES
        assert len(collector.hellos) == 1

    kit.run(work())


def test_G02_a_refused_size_is_halved_and_not_sent_again(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.max_body = 100_000
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            agent.put(20_000)
            agent.put(3)
            async with kit.pushing(agent):
                assert await agent.push.drain(60)
        assert collector.rows() == 20_003
        refused = [size for size in collector.sizes if size > 100_100]
        assert len(refused) <= 6, "each refusal must lower what is tried next"

    kit.run(work())


def test_G02_real_receive_limit(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        async with collector.serve(options=(("grpc.max_receive_message_length", 64_000),)) as address:
            agent = kit.agent(kit.settings(address))
            for _ in range(3):
                agent.put(5_000)
            async with kit.pushing(agent):
                assert await agent.push.drain(60)
        assert collector.rows() == 15_000

    kit.run(work())


def test_G02_one_row_too_large_is_parked_and_reported(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.max_body = 5_000
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            builder = BodyBuilder("boot-1")
            for size in (10, 4000):
                builder.add_event(Event("xid", "node:", 1, 1, message="m" * size, code="c" * size))
            for body in builder.seal(1, 1):
                agent.spool.put(body, event=True)
            agent.put(2)
            async with kit.pushing(agent):
                assert await agent.push.drain(60)
        events = [event for body in collector.ledger.values() for event in pb.Body.FromString(body).events]
        assert sorted(event.kind for event in events) == ["batch_parked", "xid"]
        assert collector.rows() == 2

    kit.run(work())


def quick(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The same options with every interval a hundredth of it; how long an answer may take stays."""
    return tuple(
        (name, value // 100 if name.endswith(("time_ms", "data_ms")) else value) for name, value in options
    )


def test_G01_a_quiet_stream_holds(kit: Kit) -> None:
    """The options of both ends, at the same ratio: no GOAWAY on a quiet stream."""

    async def work() -> None:
        collector = kit.collector()
        async with collector.serve(options=quick(SERVER_OPTIONS)) as address:
            agent = kit.agent(kit.settings(address, options=quick(CHANNEL_OPTIONS)))
            async with kit.pushing(agent):
                await kit.until(lambda: agent.push.connected)
                await asyncio.sleep(3)  # ten client pings
                assert agent.push.connected
                assert collector.streams == 1
                agent.put()
                assert await agent.push.drain(10)

    kit.run(work())


def test_G01_without_the_server_half_of_the_pair_it_would_not(kit: Kit) -> None:
    """The client really pings: a server with the default options ends the stream."""

    async def work() -> None:
        collector = kit.collector()
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, options=quick(CHANNEL_OPTIONS)))
            async with kit.pushing(agent):
                await kit.until(lambda: "oo many pings" in agent.push.state or collector.streams > 1)
            assert collector.received == []

    kit.run(work())


def test_collector_down_at_start(kit: Kit) -> None:
    async def work() -> None:
        port = kit.free_port()
        agent = kit.agent(kit.settings(f"127.0.0.1:{port}"))
        agent.put()
        async with kit.pushing(agent):
            await kit.until(lambda: "UNAVAILABLE" in agent.push.state)
            collector = kit.collector()
            async with collector.serve(f"127.0.0.1:{port}"):
                assert await agent.push.drain(20)
                assert agent.push.state == "connected"
        assert collector.stored == {1: 1}

    kit.run(work())


def test_after_an_outage_the_present_goes_first(kit: Kit) -> None:
    async def work() -> None:
        clock = kit.test_clock()
        collector = kit.collector()
        collector.backfill_credit = 2
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, live_s=10.0), clock=clock.clock())
            for number in range(1, 41):
                agent.put(event=number in (20, 30))
                clock.pass_s(5)
            async with kit.pushing(agent):
                assert await agent.push.drain(20)
        order = [(batch.lane, batch.number) for batch in collector.received]
        assert order[:2] == [(pb.LANE_LIVE, 39), (pb.LANE_LIVE, 40)]
        backfill = [number for lane, number in order[2:] if lane == pb.LANE_BACKFILL]
        assert backfill[:2] == [20, 30], "events of the backlog first"
        assert backfill[2:] == [n for n in range(1, 39) if n not in (20, 30)]
        assert collector.stored == dict.fromkeys(range(1, 41), 1)

    kit.run(work())


def test_backfill_stays_within_its_credit_and_live_overtakes_it(kit: Kit) -> None:
    async def work() -> None:
        clock = kit.test_clock()
        collector = kit.collector()
        collector.backfill_credit = 2
        collector.ack = lambda batch: batch.lane == pb.LANE_LIVE
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address), clock=clock.clock())
            for _ in range(20):
                agent.put()
            clock.pass_s(100)
            async with kit.pushing(agent):
                await kit.until(lambda: len(collector.received) == 2)
                for _ in range(5):
                    agent.put()
                await kit.until(lambda: len(collector.received) == 7)
                assert [b.number for b in collector.received[2:]] == [21, 22, 23, 24, 25]
                await kit.until(lambda: agent.spool.pending() == 20)  # the acks of the five come later

    kit.run(work())


def test_a_paused_collector_is_waited_for_and_the_present_goes_first_after(kit: Kit) -> None:
    async def work() -> None:
        clock = kit.test_clock()
        collector = kit.collector()
        collector.directives = [pb.Directive(id="p", paused=pb.Paused(reason="disk_floor"))]
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, ack_timeout_s=2.0, live_s=10.0), clock=clock.clock())
            async with kit.pushing(agent):
                await kit.until(lambda: agent.push.state == "paused: disk_floor")
                for _ in range(100):
                    agent.put()
                    clock.pass_s(5)
                await asyncio.sleep(2.5)  # longer than an ack may take
                assert collector.streams == 1
                assert collector.received == []
                collector.directives = []
                collector.end.set()
                await kit.until(lambda: collector.open_streams == 0)
                collector.end.clear()
                assert await agent.push.drain(20)
        assert {b.number for b in collector.received[:2]} == {99, 100}
        assert collector.results[0].outcome == pb.OUTCOME_DONE

    kit.run(work())


def test_S04_a_pause_that_ends_on_the_same_stream(kit: Kit) -> None:
    """What waited in the pause must not stand as "live" in front of the present."""

    async def work() -> None:
        clock = kit.test_clock()
        collector = kit.collector()
        collector.backfill_credit = 2
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, live_s=10.0, ack_timeout_s=2.0), clock=clock.clock())
            async with kit.pushing(agent):
                agent.put()
                assert await agent.push.drain(10)
                await collector.say(pb.Directive(id="p", paused=pb.Paused(reason="disk_floor")))
                await kit.until(lambda: agent.push.state == "paused: disk_floor")
                for _ in range(100):
                    agent.put()
                    clock.pass_s(5)
                await asyncio.sleep(2.5)  # longer than an ack may take
                assert len(collector.received) == 1
                await collector.say(pb.Directive(id="r", paused=pb.Paused(reason="")))
                assert await agent.push.drain(20)
                assert agent.push.state == "connected"
        assert collector.streams == 1
        order = [(batch.lane, batch.number) for batch in collector.received[1:]]
        assert order[:2] == [(pb.LANE_LIVE, 100), (pb.LANE_LIVE, 101)]
        assert order[2:] == [(pb.LANE_BACKFILL, number) for number in range(2, 100)]

    kit.run(work())


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
    ],
)
def test_refused_waits_long_and_does_not_end(kit: Kit, code: grpc.StatusCode) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.refuse = code
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, refused_s=30.0))
            agent.put()
            async with kit.pushing(agent):
                await kit.until(lambda: code.name in agent.push.state)
                await asyncio.sleep(0.3)
                assert collector.streams == 1
                assert agent.push.state.startswith("refused")

    kit.run(work())


def test_no_busy_loop_when_nobody_listens(kit: Kit) -> None:
    async def work() -> None:
        agent = kit.agent(kit.settings(f"127.0.0.1:{kit.free_port()}", backoff_min_s=0.5, backoff_max_s=30.0))
        agent.put()
        async with kit.pushing(agent):
            await kit.until(lambda: "UNAVAILABLE" in agent.push.state)
            cpu = time.process_time()
            for _ in range(100):
                agent.push.notify()
                await asyncio.sleep(0.01)
            assert time.process_time() - cpu < 0.5
            assert agent.push._failures <= 4

    kit.run(work())


def test_a_silent_collector_is_left_after_the_ack_timeout(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.ack = lambda batch: collector.streams > 1
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, ack_timeout_s=2.0))
            async with kit.pushing(agent):
                await kit.until(lambda: agent.push.connected)
                agent.put()
                assert await agent.push.drain(20)
                assert collector.streams == 2
        assert collector.stored == {1: 1}

    kit.run(work())


def test_a_collector_that_never_welcomes_is_left(kit: Kit) -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, nobody answers
            agent = kit.agent(kit.settings(f"127.0.0.1:{mute.getsockname()[1]}", welcome_timeout_s=0.3))
            async with kit.pushing(agent):
                agent.put()
                await kit.until(lambda: "no Welcome" in agent.push.state)
                assert agent.spool.pending() == 1, "what nobody took is kept"

    kit.run(work())


def test_the_end_of_a_stream_by_age_is_normal(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            async with kit.pushing(agent):
                agent.put()
                assert await agent.push.drain(10)
                collector.end.set()
                await kit.until(lambda: "ended the stream" in agent.push.state)
                collector.end.clear()
                agent.put()
                assert await agent.push.drain(10)
                assert agent.push.reconnects_total >= 1

    kit.run(work())


def test_directives_are_answered_also_the_ones_that_fail(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.directives = [
            pb.Directive(id="a", set_interval=pb.SetInterval(probe="gpu", interval_s=1)),
            pb.Directive(id="b", run_bench=pb.RunBench(bench="h2d")),
            pb.Directive(id="c", spool_credit=pb.SpoolCredit(live=3, backfill=0)),
        ]
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            async with kit.pushing(agent):
                await kit.until(lambda: len(collector.results) == 3)
        outcome = {result.id: result.outcome for result in collector.results}
        assert outcome == {"a": pb.OUTCOME_DONE, "b": pb.OUTCOME_FAILED, "c": pb.OUTCOME_DONE}
        assert {result.id: result.rows for result in collector.results} == {"a": 7, "b": 0, "c": 0}
        assert [directive.id for directive in agent.directives] == ["a", "b"]

    kit.run(work())


def test_an_ack_for_what_was_never_sent_deletes_nothing(kit: Kit) -> None:
    async def work() -> None:
        collector = kit.collector()
        collector.live_credit = 1
        collector.ack = lambda batch: False
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            for _ in range(3):
                agent.put()
            async with kit.pushing(agent):
                await kit.until(lambda: len(collector.received) == 1)
                await asyncio.sleep(0.1)
                assert len(collector.received) == 1
                assert agent.spool.pending() == 3

    kit.run(work())


def test_G05_whatever_breaks_each_batch_is_stored_once(kit: Kit) -> None:
    """Streams that end at any moment, commits without an ack: at least once from here, once in the ledger."""

    async def work() -> None:
        rng = random.Random(5)
        collector = kit.collector()
        collector.commit = lambda batch: rng.random() < 0.7
        collector.ack = lambda batch: rng.random() < 0.7
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address, ack_timeout_s=0.3))
            numbers: list[int] = []
            async with kit.pushing(agent):
                for turn in range(120):
                    numbers += agent.put(event=turn % 9 == 0)
                    await asyncio.sleep(0.005)
                    if turn % 20 == 7:
                        (collector.crash if turn % 40 == 7 else collector.end).set()
                        await kit.until(lambda: collector.open_streams == 0)
                        collector.crash.clear()
                        collector.end.clear()
                collector.commit = collector.ack = lambda batch: True
                assert await agent.push.drain(30)
        assert collector.stored == dict.fromkeys(numbers, 1)
        assert collector.conflicts == 0
        assert len(collector.received) > len(numbers), "some went twice, or this test tests nothing"

    kit.run(work())


def test_certificates_are_read_anew_for_every_connection(kit: Kit) -> None:
    async def work() -> None:
        files = Tls(ca=str(kit.tmp / "ca.pem"), cert=str(kit.tmp / "cert.pem"), key=str(kit.tmp / "key.pem"))
        port = kit.free_port()
        agent = kit.agent(kit.settings(f"localhost:{port}", tls=files))
        agent.put()
        async with kit.pushing(agent):
            await kit.until(lambda: "tls.ca: cannot read" in agent.push.state)
            for turn in range(2):  # the second one is another authority altogether
                authority = trustme.CA()
                authority.cert_pem.write_to_path(files.ca)
                mine, theirs = authority.issue_cert("gpu-a01"), authority.issue_cert("localhost")
                mine.private_key_pem.write_to_path(files.key)
                mine.cert_chain_pems[0].write_to_path(files.cert)
                credentials = grpc.ssl_server_credentials(
                    [(theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes())],
                    authority.cert_pem.bytes(),
                    require_client_auth=True,
                )
                collector = kit.collector()
                async with collector.serve(f"localhost:{port}", credentials=credentials):
                    agent.put()
                    assert await agent.push.drain(20), agent.push.state
                    assert len(collector.received) == 2 - turn

    kit.run(work())


def test_plain_text_to_another_machine_is_not_sent(kit: Kit) -> None:
    async def work() -> None:
        agent = kit.agent(kit.settings("192.0.2.1:7443"))
        async with kit.pushing(agent):
            agent.put()
            await kit.until(lambda: "not loopback" in agent.push.state)
            assert agent.spool.pending() == 1, "what may not be sent is kept"

    kit.run(work())


def test_a_spool_begun_anew_is_announced(kit: Kit) -> None:
    """Numbers start again at 1 under another id: the collector must hear of the id first."""

    async def work() -> None:
        collector = kit.collector()
        async with collector.serve() as address:
            agent = kit.agent(kit.settings(address))
            async with kit.pushing(agent):
                agent.put()
                assert await agent.push.drain(10)
                agent.spool._begin_anew(RuntimeError("broken"))
                agent.put()
                assert await agent.push.drain(10)
        assert len({hello.spool_id for hello in collector.hellos}) == 2
        assert len(collector.ledger) == 2
        assert collector.conflicts == 0

    kit.run(work())
