"""Readings -> bytes -> readings: nothing is changed, nothing is lost, no message is too large."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.event import Event
from gpufleet.metric import Kind, Metric, Reason, Type, Unit, Value
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.wire import MAX_MESSAGE_BYTES, MAX_STRING_BYTES
from gpufleet_agent import encode
from gpufleet_agent.drivers import Item
from gpufleet_agent.encode import BodyBuilder, cut, split
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu

if TYPE_CHECKING:
    from tests.agent.transport.conftest import Kit

quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
WALL, MONO = 1_800_000_000_000_000, 5_000_000_000

_text = st.text(st.characters(codec="utf-8"), max_size=40)
_values: dict[Type, st.SearchStrategy[Value]] = {
    Type.F64: st.floats(allow_nan=False, allow_infinity=False),
    Type.I64: st.integers(-(2**63), 2**63 - 1),
    Type.U64: st.integers(0, 2**63 - 1),
    Type.BOOL: st.booleans(),
    Type.STRING: _text,
}
_reasons = st.sampled_from([int(reason) for reason in Reason])


def metric(name: str, kind: Type) -> Metric:
    return Metric(name, kind, Unit.ONE, Kind.GAUGE, "help")


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[tuple[Metric, ...], list[Sweep]]:
    metrics = tuple(
        metric(f"m{at}", draw(st.sampled_from(list(Type)))) for at in range(draw(st.integers(1, 6)))
    )
    made = []
    for number in range(draw(st.integers(0, 4))):
        rows: list[list[Value | None]] = []
        reasons = []
        for _ in range(draw(st.integers(0, 12))):
            row = [draw(st.none() | _values[one.type]) for one in metrics]
            rows.append(row)
            reasons.append(bytes(draw(_reasons) for cell in row if cell is None))
        made.append(Sweep("gpu", WALL - number * 1000, MONO - number * 1000, 0.1, "", rows, reasons))
    return metrics, made


def build(metrics: tuple[Metric, ...], made: list[Sweep]) -> list[bytes]:
    builder = BodyBuilder("boot-1")
    for one in made:
        builder.add_sweep(metrics, one)
    sealed = builder.seal(WALL, MONO)
    assert builder.empty
    return sealed


def read(kit: Kit, sealed: list[bytes]) -> list[tuple[int, list[object], list[int]]]:
    """Every row: time, cells, reasons of its NULLs in column order."""
    found = []
    for body in map(pb.Body.FromString, sealed):
        for rows in body.rows:
            ts = [int.from_bytes(rows.ts_us[at * 8 : at * 8 + 8], "little") for at in range(rows.count)]
            columns = [kit.decode(column, rows.count) for column in rows.columns]
            why = [iter(reasons) for _, reasons in columns]
            for at in range(rows.count):
                cells = [cells[at] for cells, _ in columns]
                found.append((ts[at], cells, [next(why[c]) for c, cell in enumerate(cells) if cell is None]))
    return found


def expected(made: list[Sweep]) -> list[tuple[int, list[object], list[int]]]:
    return [
        (one.ts_us, list(row), list(why))
        for one in made
        for row, why in zip(one.rows, one.reasons, strict=True)
    ]


@quick
@given(sweeps())
def test_round_trip(kit: Kit, drawn: tuple[tuple[Metric, ...], list[Sweep]]) -> None:
    metrics, made = drawn
    sealed = build(metrics, made)
    assert read(kit, sealed) == expected(made)
    for body in map(pb.Body.FromString, sealed):
        assert (body.boot_id, body.sealed_at_us, body.sealed_mono_us) == ("boot-1", WALL, MONO)
        assert len(body.rows) == 1, "several sweeps of one probe are one Rows"
        assert [column.name for column in body.rows[0].columns] == [one.name for one in metrics]


@quick
@given(sweeps())
def test_split_loses_and_doubles_nothing(kit: Kit, drawn: tuple[tuple[Metric, ...], list[Sweep]]) -> None:
    metrics, made = drawn
    pieces = build(metrics, made)
    while any(len(split(piece)) > 1 for piece in pieces):
        pieces = [half for piece in pieces for half in split(piece)]
    assert all(sum(rows.count for rows in pb.Body.FromString(piece).rows) == 1 for piece in pieces)
    assert read(kit, pieces) == expected(made)


def test_split_takes_events_and_inventory_along() -> None:
    builder = BodyBuilder("b")
    for number in range(5):
        builder.add_event(Event("xid", "node:", WALL, MONO, code=str(number)))
    items = [Item(f"gpu:{number}", {"uuid": str(number)}) for number in range(5)]
    builder.set_inventory(items, True, WALL)
    (body,) = builder.seal(WALL, MONO)
    pieces = [body]
    for _ in range(6):
        pieces = [half for piece in pieces for half in split(piece)]
    parsed = [pb.Body.FromString(piece) for piece in pieces]
    assert [event.code for one in parsed for event in one.events] == list("01234")
    assert [item.entity for one in parsed for item in one.inventory.items] == [f"gpu:{n}" for n in range(5)]
    assert not any(one.inventory.complete for one in parsed)


def test_an_empty_but_complete_inventory_survives_a_split() -> None:
    builder = BodyBuilder("b")
    builder.add_event(Event("xid", "node:", WALL, MONO))
    builder.set_inventory([], True, WALL)
    (body,) = builder.seal(WALL, MONO)
    last = pb.Body.FromString(split(body)[1])
    assert last.HasField("inventory")
    assert last.inventory.complete


@pytest.mark.parametrize("wrong", ["text", 1.5, -1, 2**70, None])
def test_a_cell_of_a_wrong_type_is_null_and_costs_no_other_cell(kit: Kit, wrong: Value | None) -> None:
    metrics = (metric("a", Type.U64), metric("b", Type.STRING), metric("c", Type.BOOL))
    rows: list[list[Value | None]] = [[wrong, "x", True], [7, None, False], [8, "y", None]]
    made = Sweep("gpu", WALL, MONO, 0.1, "", rows, [b"", b"\x01", b"\x02"])
    found = read(kit, build(metrics, [made]))
    reason = Reason.NOT_READ if wrong is None else Reason.IMPLAUSIBLE
    assert found == [
        (WALL, [None, "x", True], [reason]),
        (WALL, [7, None, False], [Reason.NOT_SUPPORTED]),
        (WALL, [8, "y", None], [Reason.NO_PERMISSION]),
    ]


def test_rows_of_a_wrong_width_and_missing_reasons(kit: Kit) -> None:
    metrics = (metric("a", Type.U64), metric("b", Type.F64))
    made = Sweep("gpu", WALL, MONO, 0.1, "", [[1], [2, 2.5, "more"], [None, None]], [b"\xff"])
    assert read(kit, build(metrics, [made])) == [
        (WALL, [1, None], [Reason.NOT_READ]),
        (WALL, [2, 2.5], []),
        (WALL, [None, None], [Reason.NOT_READ, Reason.NOT_READ]),
    ]


def test_other_metrics_under_one_name_do_not_mix(kit: Kit) -> None:
    builder = BodyBuilder("b")
    builder.add_sweep((metric("a", Type.U64),), Sweep("gpu", WALL, MONO, 0, "", [[1]], [b""]))
    builder.add_sweep((metric("b", Type.F64),), Sweep("gpu", WALL, MONO, 0, "", [[2.5]], [b""]))
    assert [row[1] for row in read(kit, builder.seal(WALL, MONO))] == [[1], [2.5]]


@quick
@given(st.text(max_size=6000), st.integers(4, MAX_STRING_BYTES))
def test_cut_is_a_prefix_on_a_character_boundary(text: str, limit: int) -> None:
    got = cut(text, limit)
    clean = text.encode("utf-8", "replace").decode()
    assert clean.startswith(got)
    assert len(got.encode()) <= limit
    if len(clean.encode()) > limit:
        assert len(got.encode()) > limit - 4


def test_strings_are_cut_everywhere() -> None:
    long = "ä" * 5000
    builder = BodyBuilder("b")
    builder.add_sweep((metric("s", Type.STRING),), Sweep("gpu", WALL, MONO, 0, "", [[long]], [b""]))
    builder.add_event(Event("xid", long, WALL, MONO, long, long, json.dumps({"a": long}), 0))
    builder.set_inventory([Item("gpu:1", {"serial": long})], True, WALL)
    (body,) = map(pb.Body.FromString, builder.seal(WALL, MONO))
    event = body.events[0]
    texts = [
        *body.rows[0].columns[0].dictionary,
        event.entity,
        event.code,
        event.message,
        event.detail,
        body.inventory.items[0].attributes["serial"],
    ]
    assert all(len(text.encode()) <= MAX_STRING_BYTES for text in texts)
    assert json.loads(event.detail) == {"cut_bytes": 30009}, "a cut detail must stay JSON"
    assert event.count == 1


def test_G02_no_body_is_too_large_whatever_is_in_it(kit: Kit) -> None:
    metrics = tuple(metric(f"s{at}", Type.STRING) for at in range(40))
    rows: list[list[Value | None]] = [[f"{row}-{at}-" + "x" * 2000 for at in range(40)] for row in range(60)]
    made = Sweep("wide", WALL, MONO, 0, "", rows, [b""] * 60)
    sealed = build(metrics, [made, kit.sweep(3)])
    assert len(sealed) > 3
    for body in sealed:
        message = pb.StreamRequest(
            batch=pb.Batch(lane=pb.LANE_LIVE, number=2**63, body=body, sent_at_us=2**62, sent_mono_us=2**62)
        )
        assert message.ByteSize() <= MAX_MESSAGE_BYTES
    assert sum(rows.count for body in sealed for rows in pb.Body.FromString(body).rows) == 63


def test_G02_one_row_too_large_is_reported_not_lost_silently() -> None:
    metrics = tuple(metric(f"s{at}", Type.STRING) for at in range(400))
    small: list[Value | None] = ["x"] * 400
    large: list[Value | None] = [f"{at}" + "x" * 4000 for at in range(400)]
    made = Sweep("wide", WALL, MONO, 0, "", [small, large, small], [b""] * 3)
    bodies = [pb.Body.FromString(body) for body in build(metrics, [made])]
    assert sum(rows.count for body in bodies for rows in body.rows) == 2
    (event,) = [event for body in bodies for event in body.events]
    assert event.kind == "batch_parked"
    assert json.loads(event.detail)["probe"] == "wide"
    assert json.loads(event.detail)["size"] > MAX_MESSAGE_BYTES


def test_a_huge_inventory_goes_in_parts_and_none_denies_the_others() -> None:
    items = [Item(f"gpu:{n}", {"serial": "s" * 3000}) for n in range(1000)]
    builder = BodyBuilder("b")
    builder.set_inventory(items, True, WALL)
    bodies = [pb.Body.FromString(body) for body in builder.seal(WALL, MONO)]
    assert [item.entity for body in bodies for item in body.inventory.items] == [i.entity for i in items]
    assert len(bodies) > 2
    assert not any(body.inventory.complete for body in bodies)
    hello = encode.hello(
        node="n",
        machine_id="",
        boot_id="b",
        spool_id="s",
        probes=encode.probe_descriptors({"gpu": (5.0, gpu.METRICS)}),
        items=items,
        complete=True,
        read_at_us=WALL,
        spool_batches=0,
        wall_us=WALL,
        mono_us=MONO,
    )
    assert hello.ByteSize() <= MAX_MESSAGE_BYTES
    assert len(hello.inventory.items) > 100
    assert not hello.inventory.complete


def test_T01_rows_of_before_a_clock_step_are_put_on_the_clock_of_the_sealing(kit: Kit) -> None:
    """The collector corrects a body by one offset: a row from before the step would be moved by its size."""
    for step_s in (-30, 30, 315_360_000):
        builder = BodyBuilder("b")
        metrics = (metric("a", Type.U64),)
        builder.add_sweep(metrics, Sweep("gpu", WALL, MONO, 0, "", [[1]], [b""]))
        after = WALL + step_s * 1_000_000
        builder.add_sweep(metrics, Sweep("gpu", after + 5_000_000, MONO + 5_000_000, 0, "", [[2]], [b""]))
        found = read(kit, builder.seal(after + 6_000_000, MONO + 6_000_000))
        assert [ts for ts, _, _ in found] == [after, after + 5_000_000]


def test_descriptors_say_what_the_columns_mean() -> None:
    (probe,) = encode.probe_descriptors({"gpu": (5.0, gpu.METRICS)})
    assert (probe.name, probe.interval_s) == ("gpu", 5.0)
    assert [one.name for one in probe.metrics] == [one.name for one in gpu.METRICS]
    by_name = {one.name: one for one in probe.metrics}
    assert not by_name["gpu_uuid"].HasField("min")
    assert (by_name["util_pct"].min, by_name["util_pct"].max) == (0, 100)
    assert by_name["energy_j_total"].kind == pb.KIND_COUNTER


def test_sampled_values_keep_every_bit(kit: Kit) -> None:
    made = Sweep("gpu", WALL, MONO, 0, "", [[0.1], [-0.0], [5e-324]], [b""] * 3)
    found = [row[1][0] for row in read(kit, build((metric("f", Type.F64),), [made]))]
    assert found == [0.1, 0.0, 5e-324]
    assert isinstance(found[1], float)
    assert math.copysign(1, found[1]) == -1
