"""T02: an agent whose clock is wrong is neither stale for ever nor fresh for ever."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.clock import KEEP_US, WINDOW_US, Clocks, Receipt

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Kit

MINUTE_US = 60_000_000


@pytest.mark.parametrize(
    ("name", "shift_us"),
    [
        ("behind", -20 * MINUTE_US),
        ("ahead", 6 * 60 * MINUTE_US),
        ("epoch", -56 * 365 * 24 * 60 * MINUTE_US),
        ("far_ahead", 30 * 365 * 24 * 60 * MINUTE_US),
    ],
)
def test_T02_a_wrong_clock_is_corrected_told_and_recoverable(kit: Kit, name: str, shift_us: int) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello(node=name)
    true_us = kit.now_us()
    entry = kit.gpu_rows(count=1)
    entry.ts_us = (true_us + shift_us).to_bytes(8, "little", signed=True)
    event = pb.Event(ts_us=true_us + shift_us, kind="xid", code="79")
    for number in (1, 2):
        agent.send(number, kit.body(entry, at_us=kit.now_us() + shift_us, events=[event]))
    agent.wait(1, 2)
    found = running.query(
        "SELECT epoch_us(g.ts), g.ts - to_microseconds((l.offset_s * 1e6)::BIGINT), l.offset_s "
        "FROM live.gpu g JOIN live.ledger l USING (node, received_at)"
    )
    assert len(found) == 2
    for corrected, raw, offset_s in found:
        assert isinstance(corrected, int)
        assert isinstance(offset_s, float)
        assert abs(corrected - true_us) < 500_000
        assert abs(offset_s + shift_us / 1e6) < 0.5
        assert isinstance(raw, datetime)
        assert abs((raw - datetime(1970, 1, 1)).total_seconds() - (true_us + shift_us) / 1e6) < 0.01
    assert running.one("SELECT count(*) FROM live.event WHERE kind = 'clock_skew'") == 1
    assert running.one(
        "SELECT abs(epoch_us(ts) - epoch_us(received_at)) < 1000000 FROM live.event WHERE kind = 'xid'"
    )
    assert running.one("SELECT count(*) FROM live.quarantine") == 0
    state = running.state.nodes()[name]
    assert abs(state.offset_s + shift_us / 1e6) < 0.5
    assert state.received_at is not None
    assert abs((state.received_at - datetime(1970, 1, 1)).total_seconds() - true_us / 1e6) < 20


def test_T02_a_clock_within_two_seconds_is_left_alone(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    entry = kit.gpu_rows()
    ts = kit.now_us() - 1_500_000
    entry.ts_us = ts.to_bytes(8, "little", signed=True)
    agent.send(1, kit.body(entry, at_us=kit.now_us() - 1_500_000))
    agent.wait(1)
    assert running.query("SELECT epoch_us(ts), (SELECT offset_s FROM live.ledger) FROM live.gpu") == [
        (ts, 0.0)
    ]
    assert running.one("SELECT count(*) FROM live.event") == 0


def test_T02_rows_of_an_earlier_boot_get_its_last_offset_or_quarantine(kit: Kit) -> None:
    running = kit.start()
    shift = -20 * MINUTE_US
    agent = kit.agent(running.address).hello(boot_id="old")
    entry = kit.gpu_rows()
    entry.ts_us = (kit.now_us() + shift).to_bytes(8, "little", signed=True)
    agent.send(1, kit.body(entry, boot_id="old", at_us=kit.now_us() + shift))
    agent.wait(1)
    agent.close()
    rebooted = kit.agent(running.address).hello(boot_id="new")
    rebooted.send(2, kit.body(entry, boot_id="old", at_us=kit.now_us() + shift))
    lost = kit.gpu_rows()
    lost.ts_us = (120_000_000).to_bytes(8, "little")
    rebooted.send(3, kit.body(lost, boot_id="never-heard-of", at_us=120_000_000))
    rebooted.wait(2, 3)
    assert running.query("SELECT boot_id, count(*) FROM live.gpu GROUP BY 1") == [("old", 2)]
    assert (
        running.one("SELECT count(*) FROM live.gpu WHERE abs(epoch_us(received_at) - epoch_us(ts)) < 10e6")
        == 2
    )
    assert running.query("SELECT number, metric, reason FROM live.quarantine") == [(3, "ts", "time")]


def test_T02_single_rows_of_absurd_time_are_put_aside(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    entry = kit.gpu_rows(count=5)
    now = kit.now_us()
    times = [now, now - 9 * 24 * 60 * MINUTE_US, now + 6 * MINUTE_US, -(2**63), 2**63 - 1]
    entry.ts_us = b"".join(ts.to_bytes(8, "little", signed=True) for ts in times)
    agent.send(1, kit.body(entry))
    agent.wait(1)
    assert running.query("SELECT epoch_us(ts) FROM live.gpu") == [(now,)]
    assert running.query("SELECT probe, metric, reason, cells FROM live.quarantine") == [
        ("gpu", "ts", "time", 4)
    ]


@pytest.mark.parametrize("mono", [0, -(2**63), 2**63 - 1])
def test_T02_absurd_monotonic_clocks_harm_nobody_else(kit: Kit, mono: int) -> None:
    running = kit.start()
    odd = kit.agent(running.address).hello(node="odd", sent_mono_us=mono)
    body = pb.Body(sealed_at_us=kit.now_us(), sealed_mono_us=mono, rows=[kit.gpu_rows("GPU-odd")])
    made = pb.Batch(lane=pb.LANE_LIVE, number=1, body=body.SerializeToString(), sent_mono_us=mono)
    odd.request(pb.StreamRequest(batch=made))
    odd.wait(1)
    good = kit.agent(running.address).hello(node="good", machine_id="bbbb")
    good.send(1, kit.body(kit.gpu_rows("GPU-good")))
    good.wait(1)
    assert running.one("SELECT count(*) FROM live.gpu WHERE node = 'good'") == 1
    assert not odd.ended


def receipt(us: int, step_us: int = 0) -> Receipt:
    return Receipt(1_700_000_000_000_000 + us + step_us, 5_000_000_000 + us)


def test_T02_the_event_comes_when_the_clock_leaves_returns_or_moves() -> None:
    clocks = Clocks()
    told = [clocks.news("n", offset) for offset in (0, 1_000_000, 3_000_000, 4_000_000, 6_000_000, 0, 0)]
    assert told == [False, False, True, False, True, True, False]


@given(
    delays=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=30),
    skew=st.integers(-(10**12), 10**12),
    boot_mono=st.integers(0, 10**13),
)
def test_T02_delays_never_look_like_a_clock_that_is_behind_by_more_than_the_fastest_message(
    delays: list[int], skew: int, boot_mono: int
) -> None:
    clocks = Clocks()
    offset = 0
    for second, delay in enumerate(delays):
        sent = second * 1_000_000 + 1
        came = receipt(sent + delay)
        clocks.seen("n", "b", boot_mono + sent, came)
        wall = came.wall_us - delay + skew
        offset = clocks.offset_us("n", "b", wall, boot_mono + sent, came)
    true = min(delays) - skew
    assert offset == (true if abs(true) > KEEP_US else 0)


def test_T02_one_message_with_an_impossible_clock_is_not_believed() -> None:
    clocks = Clocks()
    for second in range(1, 5):
        clocks.seen("n", "b", second * 1_000_000, receipt(second * 1_000_000))
    for odd in (3600_000_000, 7_200_000_000, 2**60, -5, 2**50, 2**50):
        clocks.seen("n", "b", 5_000_000, receipt(5_000_000))
        clocks.seen("n", "b", odd, receipt(5_000_000))
        assert clocks.offset_us("n", "b", receipt(5_000_000).wall_us, 5_000_000, receipt(5_000_000)) == 0
    for second in (6, 7):  # the collector had been slow from the start: two messages agree
        clocks.seen("n", "b", (second + 60) * 1_000_000, receipt(second * 1_000_000))
    assert clocks.offset_us("n", "b", receipt(7_000_000).wall_us, 67_000_000, receipt(7_000_000)) == 0


def test_T02_the_collectors_own_clock_may_be_stepped() -> None:
    clocks = Clocks()
    clocks.seen("n", "b", 1_000_000, receipt(1_000_000))
    stepped = receipt(2_000_000, step_us=3600_000_000)
    clocks.seen("n", "b", 2_000_000, stepped)
    assert clocks.offset_us("n", "b", receipt(2_000_000).wall_us, 2_000_000, stepped) == 3600_000_000


def test_T02_a_fast_message_is_forgotten_after_the_window() -> None:
    clocks = Clocks()
    clocks.seen("n", "b", 3_000_000, receipt(0))  # its clock drifts: 3 s gained since
    later = receipt(WINDOW_US + 1)
    clocks.seen("n", "b", WINDOW_US + 1, later)
    assert clocks.offset_us("n", "b", later.wall_us, WINDOW_US + 1, later) == 0
