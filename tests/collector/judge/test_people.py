"""What people do with incidents: it changes no state, survives restarts, and the judge follows a closing."""

import json
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet_collector import documents, people, report, rules
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.people import Matcher, NoSuch, NotNow, PeopleError, Who
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import LIVE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULES = {rule.name: rule for rule in load_rules()}
AT = datetime(2026, 3, 1, 12)
ANN = Who("ann", True, "", "test")
HOUR = 3600.0


@pytest.fixture(name="rules")
def judged() -> tuple[str, ...]:
    return ("gpu_missing",)


def act(fleet: "Fleet", what: str, *numbers: int, text: str = "", for_s: float = 0.0) -> list[str]:
    return people.act(fleet.store, numbers, what, text, for_s, ANN, fleet.at)


def silence(fleet: "Fleet", for_s: float = HOUR, **names: tuple[str, ...]) -> int:
    return people.add_silence(fleet.store, Matcher(**names), for_s, "RMA on its way", ANN, fleet.at)


def maintain(fleet: "Fleet", *nodes: str, after_s: float = 0.0, for_s: float = HOUR) -> int:
    begin = fleet.at + timedelta(seconds=after_s)
    return people.start_maintenance(fleet.store, nodes, begin, for_s, "new firmware", ANN, fleet.at)


def flags(fleet: "Fleet") -> dict[object, object]:
    """Flags of each open incident, as documents show them."""
    with fleet.store.reader(LIVE) as read:
        return {one["number"]: one["flags"] for one in documents.incidents(read, fleet.at, open_only=True)}


def states(fleet: "Fleet") -> dict[object, tuple[object, object]]:
    """(state, flags) of each node."""
    rows = fleet.sql(f"SELECT node, state, flags FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')")
    return {node: (state, flags) for node, state, flags in rows}


def counters(fleet: "Fleet") -> tuple[object, ...]:
    [row] = fleet.sql(
        "SELECT sum(gpus_ok), sum(gpus_degraded), sum(gpus_critical), sum(gpus_no_data) "
        f"FROM nodes_at(TIMESTAMP '{fleet.at}', '2 minutes')"
    )
    return row


def audit(fleet: "Fleet") -> list[tuple[object, ...]]:
    rows = fleet.sql("SELECT actor, verb, target, args::VARCHAR, result FROM audit ORDER BY logged_at, rowid")
    return [
        (actor, verb, target, json.loads(str(args)), result) for actor, verb, target, args, result in rows
    ]


def lose(fleet: "Fleet", judge: Judge, node: str = "gpu-001", index: int = 0) -> None:
    """A card stops answering, and that fires."""
    fleet.nodes[node].cards[index].state = "lost"
    fleet.run(10, judge)


def find(fleet: "Fleet", judge: Judge, node: str = "gpu-001", index: int = 0) -> None:
    fleet.nodes[node].cards[index].state = "ok"
    fleet.run(10, judge)


# ---- knowing changes no state


def test_what_people_know_of_still_counts(fleet: "Fleet", judge: Judge) -> None:
    for name in ("gpu-001", "gpu-002", "gpu-003"):
        fleet.add(name, gpus=2)
    maintain(fleet, "gpu-003")
    for name in ("gpu-001", "gpu-002", "gpu-003"):
        lose(fleet, judge, name)
    before = counters(fleet), [state for state, _ in states(fleet).values()]
    act(fleet, "acknowledged", 1)
    silence(fleet, nodes=("gpu-002",), rules=("gpu_missing",))
    assert flags(fleet) == {1: ["acknowledged"], 2: ["silenced"], 3: ["maintenance"]}
    assert before[0] == (3, 0, 3, 0)
    assert (counters(fleet), [state for state, _ in states(fleet).values()]) == before
    assert states(fleet) == {
        "gpu-001": ("critical", []),
        "gpu-002": ("critical", ["silenced"]),
        "gpu-003": ("critical", ["maintenance"]),
    }
    cards = f"SELECT state, flags FROM cards_at(TIMESTAMP '{fleet.at}', '2 minutes') ORDER BY node, gpu_index"
    assert [(str(state), str(flags)) for state, flags in fleet.sql(cards)] == [
        ("critical", "[]"), ("ok", "[]"), ("critical", "['silenced']"), ("ok", "[]"),
        ("critical", "['maintenance']"), ("ok", "['maintenance']"),
    ]  # fmt: skip
    with fleet.store.reader(LIVE) as read:
        listed = documents.incidents(read, fleet.at, open_only=True)
    assert [one["severity"] for one in listed] == ["crit"] * 3


def test_news_comes_first(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=3)
    lose(fleet, judge)
    fleet.at += timedelta(minutes=3)
    fleet.add("gpu-002", gpus=1)
    lose(fleet, judge, "gpu-002")
    assert list(flags(fleet)) == [2, 1], "the newest first"
    act(fleet, "acknowledged", 2)
    assert list(flags(fleet)) == [1, 2], "what nobody knows of before it"


# ---- acknowledging


def test_an_acknowledgement_survives_a_restart_and_a_repeat_but_not_the_next_incident(
    fleet: "Fleet", judge: Judge
) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    act(fleet, "acknowledged", 1, text="on it")
    again = Judge(fleet.store, JudgeSettings(), rules=[RULES["gpu_missing"]])
    fleet.run(10, again)
    assert flags(fleet) == {1: ["acknowledged"]}
    find(fleet, again)
    assert flags(fleet) == {}
    fleet.at += timedelta(minutes=5)
    lose(fleet, again)
    assert fleet.sql("SELECT number, reopened FROM incident") == [(1, 1)]
    assert flags(fleet) == {1: ["acknowledged"]}, "the same trouble again is what its owner owns"
    find(fleet, again)
    fleet.at += timedelta(minutes=31)
    lose(fleet, again)
    assert flags(fleet) == {2: []}, "a new incident is news"


def test_an_acknowledgement_is_taken_back_runs_out_or_is_taken_over(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    act(fleet, "acknowledged", 1, for_s=HOUR)
    fleet.at += timedelta(minutes=59)
    assert flags(fleet) == {1: ["acknowledged"]}
    fleet.at += timedelta(minutes=1)
    assert flags(fleet) == {1: []}, "it holds as long as was said"
    act(fleet, "acknowledged", 1)
    people.act(fleet.store, [1], "acknowledged", "mine now", 0, Who("bob", False), fleet.at)
    with fleet.store.reader(LIVE) as read:
        [one] = documents.incidents(read, fleet.at, open_only=True)
    assert one["acknowledged"] == {
        "by": "bob", "claimed": False, "at": f"{fleet.at.isoformat()}Z", "until": None, "note": "mine now",
    }  # fmt: skip
    act(fleet, "unacknowledged", 1)
    assert flags(fleet) == {1: []}
    with pytest.raises(NotNow, match="INC-1 is not acknowledged"):
        act(fleet, "unacknowledged", 1)


def test_all_incidents_or_none(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    for what, error in (("acknowledged", NoSuch), ("noted", NoSuch), ("closed", NoSuch)):
        with pytest.raises(error, match="no incident INC-7"):
            act(fleet, what, 1, 7, text="x")
    assert fleet.sql("SELECT count(*) FROM incident_act") == [(0,)]
    assert audit(fleet) == []
    find(fleet, judge)
    for what in ("acknowledged", "closed"):
        with pytest.raises(NotNow, match="INC-1 is resolved"):
            act(fleet, what, 1, text="x")
    act(fleet, "noted", 1, text="it was the riser")
    assert [row[:3] for row in audit(fleet)] == [("ann", "incidents note", "INC-1")]


# ---- closing


def xid(fleet: "Fleet", code: str = "79") -> None:
    node = fleet.nodes["gpu-001"]
    fleet.event(node, "xid", code, node.cards[0].entity, message=f"Xid {code}")


def test_a_person_closes_what_waits_for_proof_and_only_new_evidence_opens_it_again(
    fleet: "Fleet", store: Store
) -> None:
    judge = Judge(store, JudgeSettings(), rules=[RULES["xid"]])
    fleet.add("gpu-001", gpus=2)
    fleet.run(5, judge)
    xid(fleet)
    fleet.run(60, judge, every=30)
    assert [row[1] for row in fleet.incidents()] == ["xid"]
    [warning] = act(fleet, "closed", 1, text="card reset, benches pass")
    assert "xid on gpu-001 gpu:GPU-gpu-001-0 still violates" in warning
    assert "will come back" in warning
    closed = ("resolved", "closed by ann: card reset, benches pass")
    assert fleet.sql("SELECT state, cause FROM incident") == [closed]
    assert fleet.sql("SELECT state, cause FROM finding") == [closed]
    fleet.run(60, judge, every=30)
    assert fleet.sql("SELECT state, cause FROM finding") == [closed], "the event of before proves nothing new"
    again = Judge(fleet.store, JudgeSettings(), rules=[RULES["xid"]])
    fleet.run(60, again, every=30)
    assert fleet.sql("SELECT state, cause FROM finding") == [closed], "nor after a restart"
    xid(fleet)
    fleet.run(60, again, every=30)
    assert fleet.sql("SELECT number, state, reopened FROM incident") == [(1, "open", 1)]
    assert fleet.sql("SELECT state FROM finding ORDER BY id") == [("resolved",), ("firing",)]


def test_closing_what_still_violates_does_not_keep_it_away(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    act(fleet, "acknowledged", 1)
    [warning] = act(fleet, "closed", 1, text="looks fine to me")
    assert warning.startswith(
        "INC-1: gpu_missing on gpu-001 gpu:GPU-gpu-001-0 still violates, by evidence of"
    )
    assert states(fleet)["gpu-001"][0] == "unknown", (
        "without its finding the card is not ok: it does not answer"
    )
    fleet.run(15, judge)
    assert fleet.sql("SELECT number, state, reopened FROM incident") == [(1, "open", 1)]
    assert flags(fleet) == {1: []}, "who closed it does not own it any more"
    assert states(fleet)["gpu-001"][0] == "critical"


def test_closing_never_greens_a_silent_node(fleet: "Fleet", store: Store) -> None:
    judge = Judge(store, JudgeSettings(), rules=[RULES["agent_silent"]])
    node = fleet.add("gpu-001", gpus=2)
    fleet.run(10, judge)
    node.up = False
    fleet.run(100, judge, every=20)
    assert [row[1] for row in fleet.incidents()] == ["agent_silent"]
    silence(fleet, nodes=("gpu-001",))
    maintain(fleet, "gpu-001")
    act(fleet, "closed", 1, text="gone for repair")
    fleet.run(20, judge, every=20)
    assert states(fleet)["gpu-001"] == ("unknown", ["stale", "maintenance"])
    assert counters(fleet) == (0, 0, 0, 2)


def test_a_close_in_the_middle_of_a_pass_is_not_undone_by_it(
    fleet: "Fleet", judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    boots = judge._boots

    def meanwhile(*given: object) -> object:
        monkeypatch.setattr(judge, "_boots", boots)
        act(fleet, "closed", 1, text="swapped")
        return boots(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(judge, "_boots", meanwhile)
    fleet.nodes["gpu-001"].cards[0].state = "ok"
    fleet.run(5, judge)
    assert fleet.sql("SELECT state, cause FROM finding") == [("resolved", "closed by ann: swapped")]
    fleet.run(10, judge)
    assert fleet.sql("SELECT number, state, cause FROM incident") == [
        (1, "resolved", "closed by ann: swapped")
    ]


# ---- silences


def test_a_silence_by_serial_follows_the_card_to_another_host(fleet: "Fleet", store: Store) -> None:
    judge = Judge(store, JudgeSettings(), rules=[RULES["xid"]])
    first, second = fleet.add("gpu-001", gpus=1), fleet.add("gpu-002", gpus=1)
    silence(fleet, for_s=7 * 24 * HOUR, serials=(first.cards[0].serial,))
    card = first.cards.pop()
    card.node, card.pci, card.index = "gpu-002", "0000:44:00.0", 1
    second.cards.append(card)
    fleet.install(card, fleet.at)
    fleet.event(second, "xid", "79", card.entity)
    fleet.run(30, judge, every=30)
    assert [row[1:4] for row in fleet.incidents()] == [("xid", "gpu-002", card.entity)]
    assert flags(fleet) == {1: ["silenced"]}
    fleet.event(second, "xid", "79", second.cards[0].entity)
    fleet.run(30, judge, every=30)
    assert [] in flags(fleet).values(), "the other card there is not"


def test_another_trouble_on_a_silenced_card_is_news(fleet: "Fleet", store: Store) -> None:
    judge = Judge(store, JudgeSettings(), rules=[RULES["gpu_missing"], RULES["xid"]])
    card = fleet.add("gpu-001", gpus=2).cards[0]
    fleet.run(5, judge)
    xid(fleet, "48")
    fleet.run(30, judge, every=30)
    silence(fleet, rules=("xid",))
    assert flags(fleet) == {1: ["silenced"]}
    card.state = "lost"
    fleet.run(20, judge, every=10)
    assert [] in flags(fleet).values(), "the silence is of the rule, not of what else the card does"


def test_a_silence_ends_by_itself_or_by_a_person(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    silence(fleet, for_s=600, nodes=("gpu-001",))
    fleet.at += timedelta(seconds=599)
    assert flags(fleet) == {1: ["silenced"]}
    fleet.at += timedelta(seconds=1)
    assert flags(fleet) == {1: []}
    number = silence(fleet, nodes=("gpu-001",))
    assert flags(fleet) == {1: ["silenced"]}
    people.end_silences(fleet.store, [number], ANN, fleet.at)
    assert flags(fleet) == {1: []}
    with pytest.raises(NotNow, match=f"silence {number} is over since"):
        people.end_silences(fleet.store, [number], ANN, fleet.at)
    with pytest.raises(NoSuch, match="no silence 99"):
        people.end_silences(fleet.store, [99], ANN, fleet.at)
    [(ended_by, until)] = fleet.sql("SELECT ended_by, until > ended_at FROM silence WHERE id = ?", number)
    assert (ended_by, until) == ("ann", True), "what was meant stays readable"


@pytest.mark.parametrize(
    ("names", "for_s", "reason", "text"),
    [
        ({}, HOUR, "x", "needs a matcher"),
        ({"nodes": (" ",)}, HOUR, "x", "needs a matcher"),
        ({"nodes": ("gpu-001",)}, HOUR, " \n", "needs a reason"),
        ({"nodes": ("gpu-001",)}, 7 * 24 * HOUR + 1, "x", "7 days"),
        ({"nodes": ("gpu-001",)}, 0.0, "x", "7 days"),
        ({"nodes": ("gpu-001",)}, -5.0, "x", "7 days"),
        ({"nodes": ("gpu-001",)}, float("nan"), "x", "7 days"),
        ({"nodes": ("gpu-009", "gpu-010")}, HOUR, "x", r"no such node: gpu-\[009-010\]"),
        ({"rules": ("gpu_mising",)}, HOUR, "x", "no rule 'gpu_mising'"),
        ({"serials": ("7",)}, HOUR, "x", "no card has the serial '7'"),
        ({"entities": ("mlx5_0",)}, HOUR, "x", "no entity"),
        ({"entities": tuple(f"gpu:{n}" for n in range(10_001))}, HOUR, "x", "at most"),
    ],
)
def test_what_no_silence_may_be(
    matched: Store, names: dict[str, tuple[str, ...]], for_s: float, reason: str, text: str
) -> None:
    with pytest.raises(PeopleError, match=text):
        people.add_silence(matched, Matcher(**names), for_s, reason, ANN, AT, rules=KINDS)
    with matched.reader(LIVE) as read:
        assert read.execute("SELECT count(*) FROM audit").fetchone() == (0,)


NODES = ("gpu-001", "gpu-002")
KINDS = ("gpu_missing", "xid")
PARTS = ("gpu:A", "gpu:B", "port:mlx5_0/1")
SERIAL = {("gpu-001", "gpu:A"): "1650", ("gpu-002", "gpu:B"): "X7"}


@pytest.fixture(scope="module")
def matched() -> Store:
    """A store with a finding of every rule on every entity of every node."""
    store = Store.open(None)
    rules.install(store, ())
    with store.transaction() as write:
        for node in NODES:
            write.execute(
                "INSERT INTO live.expected (node, state, set_by, set_at, reason) "
                "VALUES (?, 'accepted', 'ann', ?, '')",
                [node, AT],
            )
        for (node, entity), serial in SERIAL.items():
            write.execute(
                "INSERT INTO live.inventory (node, entity, kind, serial, attributes, valid_from) "
                "VALUES (?, ?, 'gpu', ?, '{}', ?)",
                [node, entity, f" {serial.lower()} ", AT],
            )
        for number, (rule, node, entity) in enumerate(product(KINDS, NODES, PARTS), 1):
            write.execute(
                "INSERT INTO live.finding (id, rule, node, entity, state, verdict, code, reason, evidence, "
                "began_at, fired_at, last_evidence_at, updated_at, incident) "
                "VALUES ($n, $rule, $node, $entity, 'firing', 'crit', '', '', '[]', $at, $at, $at, $at, $n)",
                {"n": number, "rule": rule, "node": node, "entity": entity, "at": AT},
            )
    return store


def some(values: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(values), unique=True, max_size=2).map(tuple)


@settings(max_examples=60)
@given(some(NODES), some(KINDS), some(PARTS), some(("1650", "X7", "0")))
def test_a_silence_covers_exactly_what_its_lists_say(
    matched: Store,
    nodes: tuple[str, ...],
    kinds: tuple[str, ...],
    entities: tuple[str, ...],
    serials: tuple[str, ...],
) -> None:
    at = AT
    with matched.transaction() as write:
        write.execute("DELETE FROM live.silence")
        write.execute(
            "INSERT INTO live.silence (id, nodes, rules, entities, serials, reason, actor, claimed, from_at, "
            "until) VALUES (1, ?, ?, ?, ?, 'x', 'ann', true, ?, ?)",
            [list(nodes), list(kinds), list(entities), list(serials), at, at + timedelta(hours=1)],
        )
    expected = {
        (rule, node, entity)
        for rule, node, entity in product(KINDS, NODES, PARTS)
        if (not nodes or node in nodes)
        and (not kinds or rule in kinds)
        and (not entities or entity in entities)
        and (not serials or SERIAL.get((node, entity)) in serials)
    }
    with matched.reader(LIVE) as read:
        found = read.execute(
            "SELECT rule, s.node, s.entity FROM silenced_at(?) s JOIN finding f ON f.id = s.finding", [at]
        ).fetchall()
    assert len(found) == len(expected)
    assert set(found) == expected


# ---- maintenance


def test_what_began_before_the_window_is_still_news(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    fleet.at += timedelta(minutes=3)
    maintain(fleet, "gpu-001")
    assert flags(fleet) == {1: []}
    lose(fleet, judge, index=1)
    assert flags(fleet) == {1: [], 2: ["maintenance"]}
    assert fleet.sql("SELECT count(*) FROM finding WHERE state = 'firing'") == [(2,)], "judged and stored"


def test_a_window_that_is_over_leaves_the_trouble_to_on_call(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    number = maintain(fleet, "gpu-001", for_s=600)
    lose(fleet, judge)
    assert flags(fleet) == {1: ["maintenance"]}
    fleet.at += timedelta(minutes=10)
    assert flags(fleet) == {1: []}
    assert states(fleet)["gpu-001"][1] == ["stale"]
    with pytest.raises(NotNow, match=f"maintenance window {number} is over"):
        people.end_maintenance(fleet.store, [number], ANN, fleet.at)


def test_a_window_to_come_counts_when_it_has_come(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    number = maintain(fleet, "gpu-001", after_s=60)
    fleet.run(10, judge)
    assert states(fleet)["gpu-001"] == ("ok", [])
    fleet.run(60, judge, every=10)
    assert states(fleet)["gpu-001"] == ("ok", ["maintenance"])
    people.end_maintenance(fleet.store, [number], ANN, fleet.at)
    assert states(fleet)["gpu-001"] == ("ok", [])


@pytest.mark.parametrize(
    ("nodes", "after_s", "for_s", "reason", "text"),
    [
        ((), 0, HOUR, "x", "no node given"),
        (("gpu-009",), 0, HOUR, "x", "no such node: gpu-009"),
        (("gpu-001",), 0, HOUR, "", "needs a reason"),
        (("gpu-001",), 0, 31 * 24 * HOUR, "x", "30 days"),
        (("gpu-001",), 366 * 24 * HOUR, HOUR, "x", "within a year"),
        (("gpu-001",), -2 * HOUR, HOUR, "x", "would be over"),
    ],
)
def test_what_no_window_may_be(
    matched: Store, nodes: tuple[str, ...], after_s: float, for_s: float, reason: str, text: str
) -> None:
    begin = AT + timedelta(seconds=after_s)
    with pytest.raises(PeopleError, match=text):
        people.start_maintenance(matched, nodes, begin, for_s, reason, ANN, AT)
    with matched.reader(LIVE) as read:
        assert read.execute("SELECT count(*) FROM maintenance").fetchone() == (0,)


# ---- what is kept


def test_every_act_is_audited_with_who_claimed_it(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=2)
    lose(fleet, judge)
    act(fleet, "acknowledged", 1, text="on\x1b[31m it\n", for_s=60)
    act(fleet, "unacknowledged", 1)
    act(fleet, "noted", 1, text="riser")
    act(fleet, "closed", 1, text="swapped")
    number = silence(fleet, nodes=("gpu-001",))
    people.end_silences(fleet.store, [number], ANN, fleet.at)
    window = maintain(fleet, "gpu-001")
    people.end_maintenance(fleet.store, [window], Who("ops.example", False, "ann", "ipv4:10.0.0.1"), fleet.at)
    rows = audit(fleet)
    assert [(actor, verb, target, result) for actor, verb, target, _, result in rows] == [
        ("ann", "incidents ack", "INC-1", "ok"),
        ("ann", "incidents unack", "INC-1", "ok"),
        ("ann", "incidents note", "INC-1", "ok"),
        ("ann", "incidents close", "INC-1", "ok"),
        ("ann", "incidents silence", "node=gpu-001", "ok"),
        ("ann", "incidents silence end", str(number), "ok"),
        ("ann", "maintenance start", "gpu-001", "ok"),
        ("ops.example", "maintenance end", str(window), "ok"),
    ]
    args = [row[3] for row in rows]
    assert [one["claimed"] for one in args] == [True] * 7 + [False]  # type: ignore[index]
    assert args[0]["text"] == "on [31m it", "no control characters"  # type: ignore[index]
    assert args[-1] == {"claimed": False, "author": "ann"}
    with fleet.store.reader(LIVE) as read:
        items = documents.one_incident(read, fleet.at, 1)["items"]
    assert isinstance(items, list)
    log = [(entry["what"], entry["by"]) for entry in items[0]["log"] if entry["by"]]
    assert log == [(what, "ann") for what in ("acknowledged", "unacknowledged", "noted", "closed")]


def test_the_store_alone_tells_it_after_a_restart(tmp_path: Path) -> None:
    at = AT
    store = Store.open(tmp_path / "fleet.duckdb")
    judge = Judge(store, JudgeSettings(), rules=[RULES["agent_silent"]])
    with store.transaction() as write:
        for node in ("gpu-001", "gpu-002", "gpu-003", "gpu-004"):
            write.execute(
                "INSERT INTO live.expected VALUES (?, ?, '1', NULL, NULL, NULL, 'accepted', 'ann', ?, '')",
                [node, f"GPU-{node}", at - timedelta(hours=1)],
            )
    people.start_maintenance(
        store, ["gpu-003"], at - timedelta(hours=2), 4 * HOUR, "x", ANN, at - timedelta(hours=1)
    )
    judge.run_pass(at)
    people.act(store, [1], "acknowledged", "", 0, ANN, at)
    people.add_silence(store, Matcher(nodes=("gpu-002",)), HOUR, "x", ANN, at)
    people.act(store, [4], "closed", "not built yet", 0, ANN, at)

    def told() -> list[object]:
        with store.reader(LIVE) as read:
            items = documents.incidents(read, at, open_only=False)
        return [(one["number"], one["state"], one["flags"], one["cause"]) for one in items]

    before = told()
    assert before == [
        (3, "open", ["maintenance"], None),
        (2, "open", ["silenced"], None),
        (1, "open", ["acknowledged"], None),
        (4, "resolved", [], "closed by ann: not built yet"),
    ]
    store.close()
    store = Store.open(tmp_path / "fleet.duckdb")
    Judge(store, JudgeSettings(), rules=[RULES["agent_silent"]]).run_pass(at + timedelta(seconds=5))
    assert told() == before
    store.close()


def test_the_report_says_what_happened_and_who_did_what(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=4)
    lose(fleet, judge)
    fleet.at += timedelta(minutes=3)
    start = fleet.at
    fleet.at += timedelta(hours=1)
    lose(fleet, judge, index=1)
    act(fleet, "acknowledged", 2, text="on it")
    act(fleet, "noted", 1, text="waits for a card")
    fleet.add("gpu-002", gpus=1)
    lose(fleet, judge, "gpu-002")
    find(fleet, judge, "gpu-002")
    silence(fleet, nodes=("gpu-002",))
    with fleet.store.reader(LIVE) as read:
        told = report.handover(read, fleet.at, (fleet.at - start).total_seconds())
        with pytest.raises(PeopleError, match="a report covers"):
            report.handover(read, fleet.at, 0)
    assert told["counts"] == {
        "opened": 2, "closed": 1, "still_open": 2, "acknowledged": 1, "silenced": 0, "maintenance": 0
    }  # fmt: skip
    items = told["items"]
    assert isinstance(items, list)
    assert [(one["number"], one["opened_since"], one["closed_since"]) for one in items] == [
        (1, False, False), (2, True, False), (3, True, True),
    ]  # fmt: skip
    assert [entry["text"] for one in items for entry in one["acts"]] == ["waits for a card", "on it"]
    assert [one["matcher"] for one in told["silences"]] == ["node=gpu-002"]  # type: ignore[attr-defined]
    assert [(one["by"], one["verb"]) for one in told["done"]] == [  # type: ignore[attr-defined]
        ("ann", "incidents ack"), ("ann", "incidents note"), ("ann", "incidents silence"),
    ]  # fmt: skip
