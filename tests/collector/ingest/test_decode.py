"""What a correct agent would not send is taken out, no more: a batch, a probe's rows, a column, a row."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.metric import Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.decode import MAX_COLUMNS, Shape, open_body, read_probes
from gpufleet_collector.frame import Frame
from gpufleet_collector.store import Column, Store

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit, Running

Cell = float | int | bool | str | None
NAN, INF = math.nan, math.inf


def land(kit: Kit, *bodies: bytes) -> tuple[Running, Agent]:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    for number, content in enumerate(bodies, 1):
        agent.send(number, content)
    agent.send(1000, kit.body(kit.gpu_rows("GPU-last")))
    agent.wait(*range(1, len(bodies) + 1), 1000)
    assert not agent.ended
    assert running.one("SELECT count(*) FROM live.gpu WHERE gpu_uuid = 'GPU-last'") == 1
    return running, agent


QUARANTINE = "SELECT probe, metric, reason, cells FROM live.quarantine ORDER BY ALL"


@pytest.mark.parametrize(
    ("name", "kind", "bad"),
    [
        ("energy_j", Type.F64, NAN),
        ("energy_j", Type.F64, INF),
        ("energy_j", Type.F64, -INF),
        ("util_pct", Type.F64, 100.5),
        ("util_pct", Type.F64, -1.0),
        ("mem_used_bytes", Type.U64, 2**64 - 1),
        ("mem_used_bytes", Type.U64, 2**63),
        ("gpu_index", Type.I64, -(2**63)),
    ],
)
def test_a_bad_cell_costs_its_row_and_no_other(kit: Kit, name: str, kind: Type, bad: Cell) -> None:
    good: Cell = 1.0 if kind is Type.F64 else 1
    entry = kit.rows(
        "gpu",
        [
            kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2", "GPU-3"]),
            kit.column(name, kind, [good, bad, None]),
        ],
        [kit.now_us()] * 3,
    )
    running, _ = land(kit, kit.body(entry))
    found = running.query(f"SELECT gpu_uuid, {name} FROM live.gpu WHERE gpu_uuid != 'GPU-last' ORDER BY 1")
    assert found == [("GPU-1", good), ("GPU-3", None)]
    assert running.query(QUARANTINE) == [("gpu", name, "out_of_range", 1)]
    assert running.one("SELECT rows FROM live.ledger WHERE number = 1") == 2
    assert running.query("SELECT kind, count FROM live.event") == [("quarantined", 1)]


def test_the_largest_counters_and_smallest_numbers_survive(kit: Kit) -> None:
    entry = kit.rows(
        "gpu",
        [
            kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2"]),
            kit.column("mem_used_bytes", Type.U64, [2**63 - 1, 2**53 + 1]),
            kit.column("gpu_index", Type.I64, [-(2**63) + 1, -(2**53) - 1]),
            kit.column("energy_j", Type.F64, [1.7e308, 5e-324]),
        ],
        [kit.now_us()] * 2,
    )
    running, _ = land(kit, kit.body(entry))
    assert running.query(
        "SELECT mem_used_bytes, gpu_index, energy_j FROM live.gpu WHERE gpu_uuid < 'GPU-3'"
    ) == [
        (2**63 - 1, -(2**63) + 1, 1.7e308),
        (2**53 + 1, -(2**53) - 1, 5e-324),
    ]
    assert running.query(QUARANTINE) == []


def test_garbage_in_a_null_cell_is_still_null(kit: Kit) -> None:
    column = kit.column("util_pct", Type.F64, [1.0, None])
    column.values = struct.pack("<2d", 1.0, NAN)
    texts = kit.column("state", Type.STRING, ["ok", None])
    texts.values = struct.pack("<2I", 0, 77)
    entry = kit.rows(
        "gpu",
        [kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2"]), column, texts],
        [kit.now_us()] * 2,
    )
    running, _ = land(kit, kit.body(entry))
    assert running.query(
        "SELECT util_pct, state FROM live.gpu WHERE gpu_uuid < 'GPU-3' ORDER BY gpu_uuid"
    ) == [
        (1.0, "ok"),
        (None, None),
    ]
    assert running.query(QUARANTINE) == []


def _entry(kit: Kit, *columns: pb.Column, key: bool = True) -> pb.Rows:
    keys = [kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2"])] if key else []
    return kit.rows("gpu", [*keys, *columns], [kit.now_us()] * 2)


def test_a_column_of_the_wrong_type_is_left_out_and_the_rest_stored(kit: Kit) -> None:
    entry = _entry(
        kit,
        kit.column("util_pct", Type.I64, [1, 2]),
        kit.column("no_such", Type.F64, [1.0, 2.0]),
        kit.column("energy_j", Type.F64, [3.0, 4.0]),
    )
    running, _ = land(kit, kit.body(entry))
    assert running.query("SELECT util_pct, energy_j FROM live.gpu WHERE gpu_uuid < 'GPU-3' ORDER BY 2") == [
        (None, 3.0),
        (None, 4.0),
    ]
    assert running.query(QUARANTINE) == [
        ("gpu", "no_such", "unknown_column", 2),
        ("gpu", "util_pct", "wrong_type", 2),
    ]


def test_columns_of_wrong_length_twice_or_with_wrong_validity_are_left_out(kit: Kit) -> None:
    short = kit.column("util_pct", Type.F64, [1.0, 2.0])
    short.values = short.values[:-1]
    wide = kit.column("mem_used_bytes", Type.U64, [1, None])
    wide.validity = b"\1\0\0"
    twice = kit.column("present", Type.BOOL, [True, False])
    entry = _entry(kit, short, wide, twice, twice, kit.column("energy_j", Type.F64, [3.0, 4.0]))
    running, _ = land(kit, kit.body(entry))
    assert running.query(
        "SELECT util_pct, mem_used_bytes, present, energy_j FROM live.gpu WHERE gpu_uuid < 'GPU-3' ORDER BY 4"
    ) == [(None, None, None, 3.0), (None, None, None, 4.0)]
    reasons = {(metric, reason) for _, metric, reason, _ in running.query(QUARANTINE)}
    assert reasons == {
        ("util_pct", "bad_length"),
        ("mem_used_bytes", "bad_length"),
        ("present", "duplicate_column"),
    }


def test_rows_without_a_usable_key_are_not_stored(kit: Kit) -> None:
    broken = kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2"])
    broken.values = broken.values + b"\0"
    wrong = kit.column("gpu_uuid", Type.I64, [1, 2])
    bodies = [
        kit.body(_entry(kit, broken, kit.column("energy_j", Type.F64, [3.0, 4.0]), key=False)),
        kit.body(_entry(kit, wrong, kit.column("energy_j", Type.F64, [3.0, 4.0]), key=False)),
    ]
    running, _ = land(kit, *bodies)
    assert running.one("SELECT count(*) FROM live.gpu") == 1
    assert {reason for _, _, reason, _ in running.query(QUARANTINE)} == {"bad_length", "wrong_type"}


def test_malformed_batches_are_quarantined_and_acknowledged(kit: Kit) -> None:
    index = kit.column("state", Type.STRING, ["a", "b"])
    index.values = struct.pack("<2I", 0, 9)
    lies = kit.gpu_rows(count=2)
    lies.count = 3
    no_utf8 = kit.body(_entry(kit, kit.column("state", Type.STRING, ["abcdefgh", "b"]))).replace(
        b"abcdefgh", b"\xff\xfe" * 4
    )
    running, _ = land(
        kit,
        b"\xff" * 100,
        kit.body(kit.rows("no_such_probe", [], [kit.now_us()])),
        kit.body(lies),
        kit.body(_entry(kit, index)),
        no_utf8,
        b"",
        kit.body(kit.rows("ledger", [kit.column("rows", Type.I64, [5])], [kit.now_us()])),
        kit.body(_entry(kit, kit.column("state", Type.STRING, ["x" * 4097, "é" * 2048]))),
    )
    assert running.query("SELECT number, probe, metric, reason, cells FROM live.quarantine ORDER BY 1") == [
        (1, "", "", "not_a_body", 1),
        (2, "no_such_probe", "", "unknown_probe", 1),
        (3, "gpu", "", "bad_length", 3),
        (4, "gpu", "state", "bad_index", 1),
        (5, "", "", "not_a_body", 1),
        (7, "ledger", "", "unknown_probe", 1),
        (8, "gpu", "state", "too_long", 1),
    ]
    assert running.one("SELECT count(*) FROM live.ledger") == 9
    assert running.one("SELECT max(length(state)) FROM live.gpu") == 2048


def test_a_lie_about_a_count_is_not_counted(kit: Kit) -> None:
    short = kit.gpu_rows(count=2)
    short.count = 2**32 - 1
    nowhere = pb.Rows(probe="no_such_probe", count=2**32 - 1)
    empty = pb.Rows(probe="gpu", count=2**32 - 1)
    running, _ = land(kit, kit.body(short), kit.body(nowhere), kit.body(empty))
    assert running.query("SELECT number, reason, cells FROM live.quarantine ORDER BY 1") == [
        (1, "bad_length", 16),  # bytes of its widest column: a row has at least one
        (2, "unknown_probe", 1),
        (3, "bad_length", 1),
    ]


@pytest.mark.parametrize(
    ("lane", "number", "reason"), [(0, 7, "bad_lane"), (9, 7, "bad_lane"), (1, 0, "bad_number")]
)
def test_a_batch_without_number_or_lane_is_quarantined(kit: Kit, lane: int, number: int, reason: str) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    odd = kit.batch(number, kit.body(kit.gpu_rows()))
    odd.lane = lane  # type: ignore[assignment]
    agent.request(pb.StreamRequest(batch=odd))
    agent.wait(number)
    assert not agent.ended
    assert running.query("SELECT number, reason, cells FROM live.quarantine") == [(number, reason, 1)]
    assert running.one("SELECT count(*) FROM live.gpu") == 0


def test_one_mebibyte_of_indices_into_long_texts_does_not_become_gigabytes(kit: Kit) -> None:
    count = 60_000
    texts = kit.column("state", Type.STRING, ["x" * 4000] * count)
    running, _ = land(kit, kit.body(kit.rows("gpu", [texts], [kit.now_us()] * count)))
    assert running.query(QUARANTINE) == [("gpu", "", "too_much_text", count)]


def test_a_million_empty_entries_do_not_stop_the_collector(kit: Kit) -> None:
    content = pb.Body(rows=[pb.Rows()] * 300_000, events=[pb.Event()] * 200_000).SerializeToString()
    assert len(content) <= 1 << 20
    running, _ = land(kit, content)
    reasons = {reason for _, _, reason, _ in running.query(QUARANTINE)}
    assert {"too_many_entries", "too_many_events", "bad_kind"} <= reasons
    assert running.one("SELECT count(*) FROM live.quarantine") < 50  # type: ignore[operator]


def test_events_are_checked_one_by_one(kit: Kit) -> None:
    now = kit.now_us()
    events = [
        pb.Event(ts_us=now, kind="xid", code="79"),
        pb.Event(ts_us=now, kind="Not a kind"),
        pb.Event(ts_us=now, kind="xid", message="x" * 5000),
        pb.Event(ts_us=1, kind="xid"),
        pb.Event(ts_us=2**63 - 1, kind="xid"),
        pb.Event(ts_us=now, kind="from_a_newer_agent"),
        pb.Event(ts_us=now, kind="renamed"),
        pb.Event(ts_us=now, kind="store_replaced"),
        pb.Event(ts_us=now, kind="oom", code="1", detail="{not json", message="nul \0 inside"),
        pb.Event(ts_us=now, kind="oom", code="2", detail="[1]"),
        pb.Event(ts_us=now, kind="oom", code="3", detail='{"a":' * 2000 + "1" + "}" * 2000),
        pb.Event(ts_us=now, kind="oom", code="4", detail='{"a": "' + "[{" * 100 + '"}'),
    ]
    running, _ = land(kit, kit.body(events=events))
    assert running.query(
        "SELECT kind, code, count, message, detail FROM live.event WHERE kind != 'quarantined' ORDER BY 1, 2"
    ) == [
        ("oom", "1", 1, "nul \ufffd inside", '{"text":"{not json"}'),
        ("oom", "2", 1, "", '{"text":"[1]"}'),
        ("oom", "3", 1, "", msgspec.json.encode({"text": '{"a":' * 200}).decode()),
        ("oom", "4", 1, "", '{"a": "' + "[{" * 100 + '"}'),
        ("xid", "79", 1, "", None),
    ]
    assert running.query(QUARANTINE) == [
        ("event", "detail", "not_an_object", 2),
        ("event", "detail", "too_deep", 1),
        ("event", "kind", "bad_kind", 4),
        ("event", "message", "too_long", 1),
        ("event", "ts", "time", 2),
    ]


def test_descriptors_are_checked(kit: Kit) -> None:
    metric = pb.Metric(name="value", type=pb.TYPE_F64)
    probes = [
        pb.Probe(name="ledger", metrics=[metric]),
        pb.Probe(name="fleet_now", metrics=[metric]),
        pb.Probe(name="missing_now", metrics=[metric]),
        pb.Probe(name="limits_gpu_missing", metrics=[metric]),
        pb.Probe(name='x"; DROP TABLE live.node; --', metrics=[metric]),
        pb.Probe(name="Upper", metrics=[metric]),
        pb.Probe(
            name="odd",
            metrics=[
                metric,
                metric,
                pb.Metric(name="ts", type=pb.TYPE_F64),
                pb.Metric(name="node", type=pb.TYPE_STRING),
                pb.Metric(name="select", type=pb.TYPE_I64),
                pb.Metric(name='a"b', type=pb.TYPE_F64),
                pb.Metric(name="future", type=99),  # type: ignore[arg-type]
                pb.Metric(name="nan", type=pb.TYPE_F64, min=NAN, max=INF),
            ],
        ),
        pb.Probe(name="empty"),
    ]
    running = kit.start()
    agent = kit.agent(running.address).hello(probes=probes)
    entry = kit.rows(
        "odd",
        [
            kit.column("select", Type.I64, [1]),
            kit.column("value", Type.F64, [2.0]),
            kit.column("nan", Type.F64, [3.0]),
        ],
        [kit.now_us()],
    )
    agent.send(1, kit.body(entry, kit.rows("empty", [], [kit.now_us()])))
    agent.wait(1)
    assert running.query('SELECT "select", value, nan FROM live.odd') == [(1, 2.0, 3.0)]
    assert running.one("SELECT count(*) FROM live.empty") == 1
    assert set(running.store.tables) == {"odd", "empty"}
    assert {(probe, reason) for probe, _, reason, _ in running.query(QUARANTINE)} == {
        ("ledger", "reserved_name"),
        ("fleet_now", "reserved_name"),
        ("missing_now", "reserved_name"),
        ("limits_gpu_missing", "reserved_name"),
        ('x"; DROP TABLE live.node; --', "bad_probe_name"),
        ("Upper", "bad_probe_name"),
        ("odd", "duplicate_column"),
        ("odd", "bad_column_name"),
        ("odd", "unknown_type"),
    }


def test_too_many_columns_and_probes_are_cut() -> None:
    many = [pb.Metric(name=f"m{number}", type=pb.TYPE_F64) for number in range(MAX_COLUMNS + 10)]
    found, faults = read_probes([pb.Probe(name=f"p{number}", metrics=many) for number in range(70)])
    assert len(found) == 64
    assert all(len(columns) == MAX_COLUMNS for _, columns in found.values())
    assert sum(fault.reason == "too_many_probes" for fault in faults) == 6


def test_the_first_type_of_a_column_stays(kit: Kit) -> None:
    def probe(kind: pb.Type.ValueType) -> pb.Probe:
        return pb.Probe(
            name="p", metrics=[pb.Metric(name="a", type=kind), pb.Metric(name="b", type=pb.TYPE_F64)]
        )

    running = kit.start()
    first = kit.agent(running.address).hello(probes=[probe(pb.TYPE_I64)])
    second = kit.agent(running.address).hello(
        node="gpu-a02", machine_id="bbbb", probes=[probe(pb.TYPE_STRING)]
    )
    for agent, column in (
        (first, kit.column("a", Type.I64, [1])),
        (second, kit.column("a", Type.STRING, ["x"])),
    ):
        agent.send(1, kit.body(kit.rows("p", [column, kit.column("b", Type.F64, [2.0])], [kit.now_us()])))
        agent.wait(1)
    assert running.query("SELECT node, a, b FROM live.p ORDER BY 1") == [
        ("gpu-a01", 1, 2.0),
        ("gpu-a02", None, 2.0),
    ]
    assert ("p", "a", "type_conflict", 1) in running.query(QUARANTINE)
    assert running.store.tables["p"] == {"a": Type.I64, "b": Type.F64}


def test_columns_of_newer_and_older_agents_live_in_one_table(kit: Kit) -> None:
    running = kit.start()
    shape = [("a", 1), ("a", 1), ("c", 3)]
    for number, (extra, value) in enumerate(shape):
        metrics = [pb.Metric(name="a", type=pb.TYPE_I64), pb.Metric(name=extra, type=pb.TYPE_I64)]
        agent = kit.agent(running.address).hello(
            node=f"n{number}", machine_id=f"m{number}", probes=[pb.Probe(name="p", metrics=metrics)]
        )
        columns = [kit.column("a", Type.I64, [1])]
        if extra != "a":
            columns.append(kit.column(extra, Type.I64, [value]))
        agent.send(1, kit.body(kit.rows("p", columns, [kit.now_us()])))
        agent.wait(1)
    assert running.query("SELECT node, a, c FROM live.p ORDER BY 1") == [
        ("n0", 1, None),
        ("n1", 1, None),
        ("n2", 1, 3),
    ]


CELLS: dict[Type, st.SearchStrategy[Cell]] = {
    Type.F64: st.floats(-1e300, 1e300),
    Type.I64: st.integers(-(2**63) + 1, 2**63 - 1),
    Type.U64: st.integers(0, 2**63 - 1),
    Type.BOOL: st.booleans(),
    Type.STRING: st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
}


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, list[Cell]]]:
    """Batches of one table `p` with a column per type."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 20))
        made.append(
            {
                f"c_{kind.name.lower()}": draw(st.lists(st.none() | cells, min_size=count, max_size=count))
                for kind, cells in CELLS.items()
                if draw(st.booleans()) or kind is Type.I64
            }
        )
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=tables())
def test_what_is_sent_is_what_is_stored_for_every_type_and_null(
    kit: Kit, shared: tuple[Running, list[int]], drawn: list[dict[str, list[Cell]]]
) -> None:
    running, serial = shared
    serial[0] += 1
    probe = pb.Probe(
        name=f"p{serial[0]}",
        metrics=[pb.Metric(name=f"c_{kind.name.lower()}", type=pb.Type.ValueType(kind)) for kind in Type],
    )
    agent = kit.agent(running.address).hello(spool_id=f"s{serial[0]}", probes=[probe])
    at = kit.now_us()
    expected = []
    for number, table in enumerate(drawn, 1):
        count = len(table["c_i64"])
        columns = [kit.column(name, Type[name[2:].upper()], cells) for name, cells in table.items()]
        ts = [at + number * 1000 + row for row in range(count)]
        agent.send(number, kit.body(kit.rows(probe.name, columns, ts)))
        for row in range(count):
            expected.append(tuple(table[name][row] if name in table else None for name in NAMES))
    agent.wait(*range(1, len(drawn) + 1))
    agent.close()
    kit.agents.remove(agent)
    assert running.query(f"SELECT {', '.join(NAMES)} FROM live.{probe.name} ORDER BY ts") == expected
    assert running.query(f"SELECT * FROM live.quarantine WHERE probe = '{probe.name}'") == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=tables(),
    cuts=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.binary(max_size=3)), max_size=3),
)
def test_an_entry_that_is_recalled_means_what_it_meant_when_read(
    kit: Kit, drawn: list[dict[str, list[Cell]]], cuts: list[tuple[int, int, bytes]]
) -> None:
    columns = [Column(f"c_{kind.name.lower()}", kind, "", "gauge", "", None, None, "") for kind in Type]
    warm = {"p": Shape("p", columns, {})}
    bodies = []
    for table in drawn:
        packed = [kit.column(name, Type[name[2:].upper()], cells) for name, cells in table.items()]
        ts = [kit.now_us()] * len(table["c_i64"])
        content = kit.body(kit.rows("p", packed, ts), kit.rows("p", packed[:1], ts))
        bodies += [content, content]
        for at, length, put in cuts:
            place = at % len(content)
            content = content[:place] + put + content[place + length :]
        bodies += [content, bodies[0]]
    for content in bodies:
        recalled = open_body(content, 0, warm)
        read = open_body(content, 0, {"p": Shape("p", columns, {})})
        assert [entry for _, _, entry in recalled.entries] == [entry for _, _, entry in read.entries]
        assert [layout.columns for _, layout, _ in recalled.entries] == [
            layout.columns for _, layout, _ in read.entries
        ]
        assert recalled.faults == read.faults


NAMES = tuple(f"c_{kind.name.lower()}" for kind in Type)


@pytest.fixture
def shared(kit: Kit) -> tuple[Running, list[int]]:
    return kit.start(), [0]


def test_null_round_trip_per_type_through_a_frame() -> None:
    import numpy as np

    store = Store.open(None)
    columns = [Column(kind.name.lower(), kind, "", "gauge", "", None, None, "") for kind in Type]
    valid = np.array([True, False, True])
    frame = Frame()
    with store.transaction() as write:
        store.ensure_probe(write, "p", columns)
        frame.times("ts", np.array([1, 2, 3], np.int64))
        frame.times("received_at", np.array([1, 2, 3], np.int64))
        frame.texts("node", ["n"] * 3)
        frame.texts("boot_id", [""] * 3)
        frame.numbers("f64", np.array([1.5, 0, -0.5]), valid)
        frame.numbers("i64", np.array([-1, 0, 2**62], np.int64), valid)
        frame.numbers("u64", np.array([1, 0, 2**63 - 1], np.uint64), valid)
        frame.numbers("bool", np.array([True, False, False]), valid)
        frame.texts("string", ["", None, "\n☃'\""])
        frame.insert(write, "live.p")
    with store.reader() as read:
        found = read.execute("SELECT f64, i64, u64, bool, string, boot_id FROM live.p ORDER BY ts").fetchall()
    assert found == [
        (1.5, -1, 1, True, "", ""),
        (None, None, None, None, None, ""),
        (-0.5, 2**62, 2**63 - 1, False, "\n☃'\"", ""),
    ]
    store.close()


def test_a_port_goes_by_its_device_and_its_number(kit: Kit) -> None:
    described = pb.Probe(
        name="port",
        interval_s=10,
        metrics=[
            pb.Metric(name="device", type=pb.TYPE_STRING, kind=pb.KIND_KEY),
            pb.Metric(name="port", type=pb.TYPE_U64, kind=pb.KIND_KEY),
            pb.Metric(name="rate_gbps", type=pb.TYPE_F64, kind=pb.KIND_STATE),
        ],
    )

    def content(*numbers: int) -> bytes:
        columns = [
            kit.column("device", Type.STRING, ["mlx4_0", "mlx4_0"]),
            kit.column("port", Type.U64, numbers),
            kit.column("rate_gbps", Type.F64, [40.0, None]),
        ]
        return kit.body(kit.rows("port", columns, [kit.now_us()] * 2))

    running = kit.start()
    agent = kit.agent(running.address).hello(probes=[described])
    for number, sent in enumerate((content(1, 2), content(2, 1)), 1):
        agent.send(number, sent)
        agent.wait(number)
    assert running.query("SELECT entity, reason FROM live.capability ORDER BY since, entity") == [
        ("port:mlx4_0/2", "not_supported"),
        ("port:mlx4_0/1", "not_supported"),
        ("port:mlx4_0/2", "ok"),
    ]


def test_what_an_agent_of_an_earlier_version_cannot_send_is_not_supported(kit: Kit) -> None:
    def content(*columns: str) -> bytes:
        cells = [kit.column("gpu_uuid", Type.STRING, ["GPU-1"])]
        cells += [kit.column(name, Type.F64, [1.0]) for name in columns]
        return kit.body(kit.rows("gpu", cells, [kit.now_us()]))

    def told() -> list[tuple[object, ...]]:
        return running.query(
            "SELECT node, entity, metric, reason, code FROM live.capability ORDER BY since, node, metric"
        )

    running = kit.start()
    probe = kit.hello().probes[0]
    assert {"util_pct", "energy_j"} <= {metric.name for metric in probe.metrics}
    known = [metric for metric in probe.metrics if metric.name != "energy_j"]
    before = pb.Probe(name=probe.name, interval_s=probe.interval_s, metrics=known)
    old = kit.agent(running.address).hello(node="old", machine_id="o", spool_id="o", probes=[before])
    old.send(1, content("util_pct"))
    old.wait(1)
    assert told() == [], "no agent describes more"
    new = kit.agent(running.address).hello(node="new", machine_id="n", spool_id="n")
    new.send(1, content("util_pct", "energy_j"))
    new.wait(1)
    for number in (2, 3):
        old.send(number, content("util_pct"))
        old.wait(number)
    lacks = ("old", "gpu:GPU-1", "energy_j", "not_supported", "not_sent")
    assert [row for row in told() if row[2] == "energy_j"] == [lacks]
    assert {row[0] for row in told()} == {"old"}
    old.close()
    newer = kit.agent(running.address).hello(node="old", machine_id="o", spool_id="o")
    newer.send(4, content("util_pct", "energy_j"))
    newer.wait(4)
    assert [row for row in told() if row[2] == "energy_j"] == [lacks, (*lacks[:3], "ok", "")]


def test_reasons_of_nulls_go_to_capability_on_change(kit: Kit) -> None:
    def content(*cells: Cell, reason: int = pb.REASON_NOT_SUPPORTED) -> bytes:
        return kit.body(
            kit.rows(
                "gpu",
                [
                    kit.column("gpu_uuid", Type.STRING, ["GPU-1", "GPU-2"]),
                    kit.column("util_pct", Type.F64, cells, reason),
                ],
                [kit.now_us()] * 2,
            )
        )

    running = kit.start()
    agent = kit.agent(running.address).hello()
    sent = [
        content(1.0, None),
        content(2.0, None),
        content(3.0, None, reason=pb.REASON_FAILED),
        content(3.0, 4.0),
        content(3.0, 4.0),
        content(None, None, reason=77),
    ]
    for number, made in enumerate(sent, 1):
        agent.send(number, made)
        agent.wait(number)
    assert running.query("SELECT entity, metric, reason FROM live.capability ORDER BY since, entity") == [
        ("gpu:GPU-2", "util_pct", "not_supported"),
        ("gpu:GPU-2", "util_pct", "failed"),
        ("gpu:GPU-2", "util_pct", "ok"),
        ("gpu:GPU-1", "util_pct", "failed"),
        ("gpu:GPU-2", "util_pct", "failed"),
    ]
    running.stop()
    again = kit.start(store=running.store)
    agent = kit.agent(again.address).hello()
    agent.send(7, content(None, None, reason=77))
    agent.wait(7)
    assert again.one("SELECT count(*) FROM live.capability") == 5
