"""What should be there: learned, accepted, imported; and what differs."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet_collector import inventory
from gpufleet_collector.inventory import InventoryError, Pinned, import_csv, read_cards
from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

HEAD = "node,uuid,serial,pci,model\n"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return ("gpu_missing",)


def expected(fleet: "Fleet") -> list[tuple[object, ...]]:
    return list(
        fleet.sql(f"SELECT node, uuid, serial, state FROM expected_at(TIMESTAMP '{fleet.at}') ORDER BY ALL")
    )


def test_first_whole_picture_is_learned(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2, expect=None)
    fleet.add("cpu-001", gpus=0, expect=None)
    fleet.run(5, judge)
    assert expected(fleet) == [
        ("cpu-001", None, None, "learned"),
        *(("gpu-001", card.uuid, card.serial, "learned") for card in node.cards),
    ]
    node.cards[0].listed = node.cards[0].on_bus = False
    fleet.run(60)
    fleet.run(10, judge)
    assert len(expected(fleet)) == 3, "what is learned once is not learned again"
    assert [row[1] for row in fleet.findings()] == [node.cards[0].entity]


@pytest.mark.parametrize("trouble", ["lost", "hung", "driver", "bus_has_more", "incomplete", "no_sweep"])
def test_a_partial_picture_is_not_learned(fleet: "Fleet", judge: Judge, trouble: str) -> None:
    node = fleet.add("gpu-001", gpus=3, expect=None)
    card = node.cards[0]
    match trouble:
        case "lost" | "hung":
            card.state = trouble
        case "driver":
            node.driver_error = "driver_not_loaded"
        case "bus_has_more":
            card.listed = False
            with fleet.store.transaction() as write:
                write.execute("DELETE FROM live.inventory WHERE uuid = ?", [card.uuid])
        case "incomplete":
            with fleet.store.transaction() as write:
                write.execute(
                    """UPDATE live.inventory SET attributes = '{"complete": "false"}' WHERE kind = 'node'"""
                )
        case "no_sweep":
            node.up = False
    fleet.run(20, judge)
    assert expected(fleet) == []
    assert fleet.findings() == []


def test_accept_pins_what_is_there_and_is_audited(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2, expect="learned")
    fleet.add("cpu-001", gpus=0, expect=None)
    fleet.run(70)
    pinned = inventory.accept(fleet.store, ["gpu-001", "cpu-001"], "ann", "delivered", fleet.at)
    assert pinned == Pinned(2, 2, 2), "two busy clocks are pinned with the two cards"
    assert expected(fleet) == [
        ("cpu-001", None, None, "accepted"),
        *(("gpu-001", card.uuid, card.serial, "accepted") for card in node.cards),
    ]
    assert fleet.sql("SELECT entity, key, value, state FROM baseline ORDER BY entity") == [
        (card.entity, "sm_clock_busy_mhz", 1950.0, "accepted") for card in node.cards
    ]
    audit = fleet.sql("SELECT actor, verb, target, args->>'reason', result FROM audit")
    assert audit == [("ann", "inventory accept", "gpu-001,cpu-001", "delivered", "ok")]


def test_accept_of_a_stranger_changes_nothing(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2, expect=None)
    with pytest.raises(InventoryError, match="no such node: gpu-999"):
        inventory.accept(fleet.store, ["gpu-001", "gpu-999"], "ann", "", fleet.at)
    with pytest.raises(InventoryError, match="no node given"):
        inventory.accept(fleet.store, [], "ann", "", fleet.at)
    assert expected(fleet) == []


def test_import_replaces_the_node_and_brings_baselines(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1, expect="accepted")
    fleet.at += timedelta(seconds=1)
    pinned = import_csv(
        fleet.store,
        b"\xef\xbb\xbfnode, uuid, serial, pci, model\r\n"
        b"gpu-001,GPU-a,1650,00000000:1B:00.0,H100\r\n\r\ngpu-001,,1651,1c:00.0,H100\r\n",
        b"node,entity,key,value,spread,n\ngpu-001,gpu:GPU-a,h2d/1/copied_once/ab12/,55.2,0.002,48\n",
        "ann",
        "delivery 7",
        fleet.at,
    )
    assert pinned == Pinned(1, 2, 1)
    rows = fleet.sql(
        f"SELECT uuid, serial, pci, state FROM expected_at(TIMESTAMP '{fleet.at}') ORDER BY serial"
    )
    assert rows == [
        ("GPU-a", "1650", "0000:1b:00.0", "accepted"),
        (None, "1651", "0000:1c:00.0", "accepted"),
    ]
    assert fleet.sql("SELECT key, value, spread, n, state FROM baseline") == [
        ("h2d/1/copied_once/ab12/", 55.2, 0.002, 48, "accepted")
    ]
    assert fleet.sql("SELECT verb FROM audit") == [("inventory import",)]
    before = fleet.sql(f"SELECT count(*) FROM expected_at(TIMESTAMP '{fleet.at - timedelta(seconds=1)}')")
    assert before == [(1,)], "the old set is still there for replays"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1: empty"),
        (b"host,uuid\n", "line 1: header: unknown column 'host'"),
        (b"uuid,serial\n", "line 1: header: no column"),
        (HEAD.encode(), "line 2: no cards listed"),
        (HEAD.encode() + b"gpu-001,,,,\n", "line 2: needs a uuid or a serial"),
        (HEAD.encode() + b"gpu-001,,N/A,,\n", "line 2: needs a uuid or a serial"),
        (HEAD.encode() + b"gpu-001,,0,,\n", "line 2: needs a uuid or a serial"),
        (HEAD.encode() + b"gpu-001,GPU-a,1,,\ngpu-001,GPU-b\n", "line 3: 2 cells, but the header has 5"),
        (HEAD.encode() + b"gpu-001,GPU-a,1,,\ngpu-002,GPU-a,2,,\n", "line 3: GPU-a stands already in line 2"),
        (HEAD.encode() + b"gpu 1,GPU-a,1,,\n", "line 2: 'gpu 1' is not a node name"),
        (HEAD.encode() + b"gpu-001,1234,1,,\n", "line 2: '1234' is not a UUID"),
        (HEAD.encode() + b"gpu-001,GPU-a,1,1b-00,\n", "line 2: '1b-00' is not a PCI address"),
        (HEAD.encode() + b"gpu-001,GPU-a,1,,\ngpu-001,GPU-\xff,1,,\n", "line 3: not UTF-8"),
        (HEAD.encode() + b"gpu-001,GPU-a\0,1,,\n", "line 2: holds a NUL byte"),
        (HEAD.encode() + b'gpu-001,"GPU-a,1,,\n', "line 2:"),
        (HEAD.encode() + b"gpu-001,GPU-a,1,," + b"x" * 2000 + b"\n", "line 2: too long"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(
    fleet: "Fleet", judge: Judge, text: bytes, message: str
) -> None:
    with pytest.raises(InventoryError) as caught:
        import_csv(fleet.store, text, b"", "ann", "", fleet.at)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fleet.sql("SELECT count(*) FROM expected") == [(0,)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpu-001,gpu:G,k,abc,0,1", "baseline line 2: could not convert"),
        ("gpu-001,gpu:G,k,nan,0,1", "baseline line 2: value must be above 0"),
        ("gpu-001,gpu:G,k,-1,0,1", "baseline line 2: value must be above 0"),
        ("gpu-001,,k,1,0,1", "baseline line 2: node, entity and key"),
        ("gpu-001,gpu:G,k,1,0,1\ngpu-001,gpu:G,k,1,0,1", "baseline line 3: gpu-001/gpu:G/k stands already"),
    ],
)
def test_bad_baselines_import_nothing(fleet: "Fleet", judge: Judge, line: str, message: str) -> None:
    baseline = f"node,entity,key,value,spread,n\n{line}\n".encode()
    with pytest.raises(InventoryError, match=message):
        import_csv(fleet.store, HEAD.encode() + b"gpu-001,GPU-a,1,,\n", baseline, "ann", "", fleet.at)
    assert fleet.sql("SELECT (SELECT count(*) FROM expected) + (SELECT count(*) FROM baseline)") == [(0,)]


def test_uuid_or_serial_in_one_column() -> None:
    cards = read_cards(b"node,uuid|serial,pci,model\ngpu-001,GPU-abc,,\ngpu-001,1650,,\n")
    assert [(card.uuid, card.serial) for card in cards] == [("GPU-abc", None), (None, "1650")]


@given(
    st.binary(max_size=300) | st.text(max_size=200).map(lambda text: (HEAD + text).encode("utf-8", "replace"))
)
def test_any_bytes_are_cards_or_one_clear_error(text: bytes) -> None:
    try:
        cards = read_cards(text)
    except InventoryError as error:
        message = str(error)
    else:
        assert all(card.node and (card.uuid or card.serial) for card in cards)
        return
    assert message.startswith("line ")


def test_diff_names_missing_moved_replaced_extra(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    fleet.add("gpu-002", gpus=2)
    gone, moved, swapped, _ = node.cards
    at = fleet.at
    with fleet.store.transaction() as write:
        for card in (gone, moved, swapped):
            write.execute("UPDATE live.inventory SET valid_to = ? WHERE uuid = ?", [at, card.uuid])
    moved.pci = "0000:aa:00.0"
    fleet.install(moved, at)
    fleet.install(type(gone)("gpu-001", 2, "GPU-new", "9", swapped.pci), at)
    fleet.install(type(gone)("gpu-002", 9, gone.uuid, gone.serial, "0000:bb:00.0"), at)
    found = {(one.node, one.kind): one for one in inventory.diff(fleet.store, at=at + timedelta(seconds=1))}
    assert set(found) == {
        ("gpu-001", "missing"),
        ("gpu-001", "moved"),
        ("gpu-001", "replaced"),
        ("gpu-001", "extra"),
        ("gpu-002", "extra"),
    }
    assert found["gpu-001", "missing"].uuid == gone.uuid
    assert found["gpu-001", "missing"].seen_node == "gpu-002"
    assert found["gpu-001", "moved"].seen_pci == "0000:aa:00.0"
    assert found["gpu-001", "replaced"].replaced_by == "GPU-new"
    assert [one.kind for one in inventory.diff(fleet.store, "gpu-002", at + timedelta(seconds=1))] == [
        "extra"
    ]


def test_rows_sent_twice_are_one_card(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2, expect=None)
    fleet.run(5)
    with fleet.store.transaction() as write:
        for table in ("gpu", "pci"):
            write.execute(f"INSERT INTO live.{table} SELECT * FROM live.{table}")
        write.execute("UPDATE live.agent SET rows = 4 WHERE probe = 'gpu'")
    judge.run_pass(fleet.at)
    assert [row[1] for row in expected(fleet)] == [card.uuid for card in node.cards]
    cards = fleet.sql(
        f"SELECT gpu_uuid, state FROM cards_at(TIMESTAMP '{fleet.at}', '2 minutes') ORDER BY ALL"
    )
    assert cards == [(card.uuid, "ok") for card in node.cards]
    node_row = fleet.sql(
        f"SELECT gpus_ok, gpus_expected, gpus_extra FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')"
    )
    assert node_row == [(2, 2, 0)]
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")


@pytest.mark.parametrize("shape", [str.upper, str.lower, str.title])
def test_a_list_may_write_identities_in_any_case(
    fleet: "Fleet", judge: Judge, shape: Callable[[str], str]
) -> None:
    node = fleet.add("gpu-001", gpus=2, expect=None)
    fleet.at += timedelta(seconds=1)
    text = HEAD + f"gpu-001,{shape(node.cards[0].uuid)},,,\ngpu-001,,  {node.cards[1].serial} ,,\n"
    import_csv(fleet.store, text.encode(), b"", "ann", "", fleet.at)
    fleet.run(60, judge)
    assert fleet.findings() == []
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")
    assert fleet.find("gpu_missing", node.cards[1].entity)[:2] == ("ok", "present")
    assert inventory.diff(fleet.store, at=fleet.at) == []


def test_a_list_of_other_cards_is_told_in_the_audit(
    fleet: "Fleet", judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    right = fleet.add("gpu-001", gpus=1, expect=None)
    fleet.add("gpu-002", gpus=1, expect=None)
    fleet.run(10)
    text = HEAD + f"gpu-001,{right.cards[0].uuid},,,\ngpu-002,GPU-else,,,\ngpu-003,GPU-later,,,\n"
    import_csv(fleet.store, text.encode(), b"", "ann", "", fleet.at)
    told = fleet.sql("SELECT args->>'$.none_of_the_listed_cards_seen_on' FROM audit")
    assert told == [('["gpu-002"]',)], "gpu-003 is not on yet"
    assert "gpu-002" in caplog.text
