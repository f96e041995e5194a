"""Rule gpu_missing: drills B03, B05 and their relatives."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet


@pytest.fixture
def rules() -> tuple[str, ...]:
    return ("gpu_missing",)


def test_all_present_is_ok(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(30, judge)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")
    assert fleet.find("gpu_missing")[:2] == ("ok", "driver_loaded")
    assert fleet.findings() == []


@pytest.mark.drill("gpu_missing", "fires")
def test_lost_at_run_time_fires_within_two_sweeps(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    fleet.run(10, judge)
    card.state = "lost"
    first, second = fleet.run(10, judge)
    assert (first.fired, [finding.entity for finding in second.fired]) == ([], [card.entity])
    verdict, code, evidence_at, reason = fleet.find("gpu_missing", card.entity)
    assert (verdict, code, evidence_at) == ("crit", "lost_at_run_time", fleet.at)
    assert reason == (
        f"the driver lists it, but it no longer answers: serial {card.serial}, {card.pci}, {card.uuid}"
    )
    assert fleet.incidents() == [(1, "gpu_missing", "gpu-001", card.entity, "open", "crit")]


@pytest.mark.drill("gpu_missing", "near_miss")
def test_one_bad_sweep_is_not_missing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[3]
    fleet.run(10, judge)
    card.state = "lost"
    fleet.run(5, judge)
    assert fleet.findings() == [("gpu-001", card.entity, "pending", "warn", "lost_at_run_time")]
    for _ in range(30):  # passes are no evidence
        fleet.at += timedelta(microseconds=1)
        judge.run_pass(fleet.at)
    card.state = "ok"
    fleet.run(10, judge)
    assert fleet.findings() == []
    assert fleet.incidents() == []


@pytest.mark.parametrize("expect", ["accepted", "learned"])
def test_B05_in_the_slot_but_not_in_the_driver(fleet: "Fleet", judge: Judge, expect: str) -> None:
    card = fleet.add("gpu-a02", expect=expect).cards[5]
    card.listed = False
    fleet.run(10, judge)
    assert fleet.find("gpu_missing", card.entity)[:2] == ("crit", "refused_by_driver")
    assert [row[1] for row in fleet.findings()] == [card.entity]


def test_B05_gone_from_bus_and_driver(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-a03").cards[5]
    card.listed = card.on_bus = False
    fleet.run(10, judge)
    verdict, code, evidence_at, _ = fleet.find("gpu_missing", card.entity)
    assert (verdict, code, evidence_at) == ("crit", "gone_from_bus", fleet.at)
    assert fleet.findings("gpu_missing") == [("gpu-a03", card.entity, "firing", "crit", "gone_from_bus")]


def test_only_the_bus_shows_it(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    fleet.run(60)
    card.on_bus = False
    fleet.run(60)
    bus_sweep = fleet.at
    fleet.run(30, judge)
    assert fleet.find("gpu_missing", card.entity)[:3] == ("crit", "gone_from_bus", bus_sweep)
    assert fleet.findings()[0][2] == "pending", "one bus sweep, however many passes"
    fleet.run(30, judge)
    assert fleet.findings()[0][2] == "firing"


@pytest.mark.parametrize("error", ["driver_not_loaded", "no_library", "driver_mismatch", "driver_failed"])
def test_B05_driver_not_loaded_is_one_finding_not_eight(fleet: "Fleet", judge: Judge, error: str) -> None:
    node = fleet.add("gpu-a04")
    node.driver_error = error
    fleet.run(10, judge)
    assert fleet.findings() == [("gpu-a04", "node:", "firing", "crit", "driver_not_loaded")]
    assert {fleet.find("gpu_missing", card.entity)[:2] for card in node.cards} == {
        ("n/a", "driver_not_loaded")
    }
    assert fleet.incidents() == [(1, "gpu_missing", "gpu-a04", "node:", "open", "crit")]
    node.driver_error = ""
    fleet.run(10, judge)
    assert fleet.findings() == []


def test_a_card_gone_from_the_bus_is_seen_without_a_driver(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    node.driver_error, node.cards[0].on_bus = "driver_not_loaded", False
    fleet.run(55)
    fleet.run(15, judge)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("crit", "gone_from_bus")
    assert [row[4] for row in fleet.incidents()] == ["open"], "the driver explains what happens to its cards"


def test_driver_that_cannot_be_read_is_unknown(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    node.driver_error = "no_permission"
    fleet.run(20, judge)
    assert fleet.find("gpu_missing")[:2] == ("unknown", "driver_unreadable")
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("unknown", "driver_unreadable")
    assert fleet.findings() == []


@pytest.mark.drill("gpu_missing", "not_judged")
def test_B05_host_without_cards_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("cpu-01", gpus=0)
    fleet.run(20, judge)
    assert fleet.find("gpu_missing")[:2] == ("n/a", "no_cards")
    assert fleet.findings() == []


def test_B05_no_expectation_no_verdict(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-new", gpus=7, expect=None)
    # the bus has one more than the driver: no whole picture, nothing is learned
    fleet.each_tick = lambda fleet: None
    node.cards[6].listed = False
    fleet.run(20, judge)
    assert fleet.find("gpu_missing")[:2] == ("n/a", "no_expectation")
    assert fleet.sql("SELECT count(*) FROM expected") == [(0,)]
    assert fleet.findings() == []


def test_silent_agent_is_unknown_not_missing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(60)
    node.up = False
    fleet.run(45)
    judge.run_pass(fleet.at)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("unknown", "no_sweep")
    fleet.run(300)
    judge.run_pass(fleet.at)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("unknown", "agent_silent")
    assert fleet.findings("gpu_missing") == []


def test_hung_card_is_unknown_not_missing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[1]
    card.state = "hung"
    fleet.run(20, judge)
    assert fleet.find("gpu_missing", card.entity)[:2] == ("unknown", "hung")
    assert fleet.findings() == []


def test_rows_still_on_their_way_are_not_missing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(10, judge)
    with fleet.store.transaction() as write:
        write.execute("DELETE FROM live.gpu WHERE gpu_index = 4 AND ts = ?", [fleet.at])
    assert fleet.find("gpu_missing", node.cards[4].entity)[:3] == (
        "ok",
        "present",
        fleet.at - timedelta(seconds=5),
    )


def test_B03_indices_shift_and_the_right_card_is_missing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=4)
    fleet.run(30, judge)
    gone = node.cards[1]
    gone.listed = gone.on_bus = False
    for index, card in enumerate([node.cards[0], *node.cards[2:]]):
        card.index = index
    fleet.run(60)
    fleet.run(10, judge)
    assert fleet.findings() == [("gpu-001", gone.entity, "firing", "crit", "gone_from_bus")]
    rows = fleet.sql(
        f"SELECT gpu_uuid, gpu_index, state FROM cards_at(TIMESTAMP '{fleet.at}', '2 minutes') ORDER BY 1"
    )
    assert rows == [
        (node.cards[0].uuid, 0, "ok"),
        (gone.uuid, 1, "critical"),
        (node.cards[2].uuid, 1, "ok"),
        (node.cards[3].uuid, 2, "ok"),
    ]


def test_a_card_in_another_slot_is_present(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[0]
    card.pci = "0000:aa:00.0"
    fleet.run(20, judge)
    assert fleet.find("gpu_missing", card.entity)[:2] == ("ok", "present")
    moved = fleet.sql(
        "SELECT json_extract(detail, '$.moved')::BOOLEAN, json_extract_string(detail, '$.expected_pci') "
        f"FROM find_gpu_missing(TIMESTAMP '{fleet.at}') WHERE entity = ?",
        card.entity,
    )
    assert moved == [(True, "0000:10:00.0")]
    rows = fleet.sql(f"SELECT count(*) FROM cards_at(TIMESTAMP '{fleet.at}', '2 minutes') WHERE moved")
    assert rows == [(1,)]


def test_another_card_in_the_slot_does_not_hide_the_missing_one(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    old = node.cards[0]
    fleet.run(10, judge)
    new = type(old)("gpu-001", 0, "GPU-new", "999", old.pci)
    node.cards[0] = new
    fleet.install(new, fleet.at)
    fleet.run(60)
    fleet.run(10, judge)
    assert fleet.find("gpu_missing", old.entity)[:2] == ("crit", "gone_from_bus")
    assert [row[1] for row in fleet.findings()] == [old.entity]


def test_extra_cards_are_not_missing(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    extra = type(node.cards[0])("gpu-001", 2, "GPU-extra", "777", "0000:77:00.0")
    node.cards.append(extra)
    fleet.install(extra, fleet.at)
    fleet.run(20, judge)
    assert fleet.findings() == []
    rows = fleet.sql(f"SELECT gpus_expected, gpus_extra FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')")
    assert rows == [(2, 1)]


def expect_serial(fleet: "Fleet", node: str, serial: str, pci: str | None) -> None:
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.expected SELECT ?, NULL, ?, ?, NULL, NULL, 'accepted', 'test', max(set_at), '' "
            "FROM live.expected",
            [node, serial, pci],
        )


@pytest.mark.parametrize(
    ("pci", "code"), [(None, "gone_from_bus"), ("0000:1f:00.0", "gone_from_bus"), ("", "gone_from_bus")]
)
def test_a_card_absent_since_before_the_first_start(
    fleet: "Fleet", judge: Judge, pci: str | None, code: str
) -> None:
    """A delivery list names a serial that no agent has ever seen."""
    fleet.add("gpu-001")
    expect_serial(fleet, "gpu-001", "1650099999999", pci)
    fleet.run(20, judge)
    assert fleet.findings() == [("gpu-001", "gpu:serial/1650099999999", "firing", "crit", code)]
    rows = fleet.sql(
        f"SELECT gpus_expected, gpus_ok, gpus_critical FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')"
    )
    assert rows == [(9, 8, 1)]


def test_expected_by_serial_and_seen_is_present(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", expect=None)
    with fleet.store.transaction() as write:
        for card in node.cards:
            write.execute(
                "INSERT INTO live.expected VALUES (?, NULL, ?, NULL, NULL, NULL, 'accepted', 'test', ?, '')",
                ["gpu-001", card.serial, fleet.at],
            )
    node.cards[7].state = "lost"
    fleet.run(20, judge)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")
    assert [row[1] for row in fleet.findings()] == [node.cards[7].entity]


def test_a_serial_that_cannot_be_read_is_unknown_not_missing(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.inventory SET serial = NULL")
        write.execute("UPDATE live.expected SET uuid = NULL")
    fleet.run(20, judge)
    assert fleet.find("gpu_missing", "gpu:serial/165000000")[:2] == ("unknown", "no_serial")
    assert fleet.findings() == []


def test_one_board_serial_for_two_cards_is_delivered_once(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2, expect=None)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.inventory SET serial = '1320000000001' WHERE kind = 'gpu'")
        write.execute(
            "INSERT INTO live.expected "
            "VALUES ('gpu-001', NULL, '1320000000001', NULL, NULL, NULL, 'accepted', 'test', ?, '')",
            [fleet.at],
        )
    fleet.run(20, judge)
    assert {fleet.find("gpu_missing", card.entity)[0] for card in node.cards} == {"ok"}


def test_bus_that_shows_nothing_is_no_view(fleet: "Fleet", judge: Judge) -> None:
    """Containers and WSL: the driver reads the cards, sysfs does not have them."""
    node = fleet.add("gpu-001")
    for card in node.cards:
        card.on_bus = False
    fleet.run(120)
    fleet.run(10, judge)
    assert fleet.findings() == []
    node.cards[0].listed = False
    fleet.run(10, judge)
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("crit", "refused_by_driver")


def test_boot_grace_gives_the_driver_time(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    node.booted_at = fleet.at
    node.driver_error = "driver_not_loaded"
    fleet.run(20, judge)
    assert fleet.findings() == []
    fleet.run(95)
    fleet.run(15, judge)
    assert fleet.findings() == [("gpu-001", "node:", "firing", "crit", "driver_not_loaded")]


def test_several_cards_at_once_are_one_incident(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    fleet.run(20, judge)
    for card in node.cards[:4]:
        card.state = "lost"
    fleet.run(10, judge)
    assert len(fleet.findings()) == 4
    assert len(fleet.incidents()) == 1


def test_no_longer_expected_is_no_longer_missing(fleet: "Fleet", judge: Judge) -> None:
    from gpufleet_collector import inventory

    card = fleet.add("gpu-001").cards[3]
    card.listed = card.on_bus = False
    fleet.run(10, judge)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.inventory SET valid_to = ? WHERE uuid = ?", [fleet.at, card.uuid])
    inventory.accept(fleet.store, ["gpu-001"], "ann", "sent back", fleet.at)
    fleet.run(10, judge)
    rows = fleet.sql("SELECT state, cause FROM finding")
    assert rows == [("resolved", "no longer judged: not expected and not there")]
    assert fleet.incidents()[0][4] == "resolved"


def test_a_card_whose_state_was_not_told_is_unknown(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2).cards[0]
    fleet.run(5)
    card.said["state"] = None
    fleet.run(20, judge)
    assert fleet.find("gpu_missing", card.entity)[:2] == ("unknown", "not_told")
    assert fleet.findings() == []


def test_a_sweep_of_the_bus_whose_rows_are_not_all_here_says_nothing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001", gpus=2).cards[0]
    fleet.run(5)
    with fleet.store.transaction() as write:
        write.execute("DELETE FROM live.pci WHERE pci = ?", [card.pci])
    assert fleet.find("gpu_missing", card.entity)[:2] == ("ok", "present")


def test_a_card_that_was_exchanged_is_said_to_be(fleet: "Fleet", judge: Judge) -> None:
    """By another one (RMA), or with another host's: a reboot brings neither back."""
    first, second = fleet.add("gpu-001", gpus=2), fleet.add("gpu-002", gpus=2)
    mine, other = first.cards[0], second.cards[0]
    was = mine.entity
    fleet.run(5, judge)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.inventory SET valid_to = ? WHERE gpu_index = 0", [fleet.at])
    for one in ("uuid", "serial"):
        mine_is, other_is = getattr(mine, one), getattr(other, one)
        setattr(mine, one, other_is)
        setattr(other, one, mine_is)
    for card in (mine, other):
        fleet.install(card, fleet.at)
    first.sent = second.sent = 0
    fleet.run(10)
    verdict, _, _, reason = fleet.find("gpu_missing", was, "gpu-001")
    assert verdict == "crit"
    assert f"; in its place is serial {mine.serial}, {mine.uuid}; it is in gpu-002 now" in reason
    said = fleet.sql(
        f"SELECT json_extract_string(detail, '$.action') FROM find_gpu_missing(TIMESTAMP '{fleet.at}') "
        "WHERE verdict = 'crit'"
    )
    assert said == [("accept",), ("accept",)]
