"""What `fleet incidents show` says besides the findings: what changed, what was tried, how often before."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from gpufleet import catalogue
from gpufleet_collector import documents, ladder, rules, story, views
from gpufleet_collector.ladder import Tried
from gpufleet_collector.store import LIVE, PEOPLE, Store

NOW = datetime(2026, 3, 10, 12, 0, 0)


def ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


class Desk:
    """A store in which incidents, inventory and events are written by hand."""

    def __init__(self, store: Store) -> None:
        self.store, self.last = store, 0

    def holds(
        self, node: str, entity: str, since: datetime, serial: str = "", pci: str = "", **attributes: str
    ) -> None:
        with self.store.transaction() as write:
            write.execute(
                "UPDATE live.inventory SET valid_to = ? WHERE node = ? AND entity = ? AND valid_to IS NULL",
                [since, node, entity],
            )
            write.execute(
                "INSERT INTO live.inventory VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, NULL, ?, ?, NULL)",
                [
                    node, entity, entity.partition(":")[0], entity.removeprefix("gpu:"), serial or None,
                    pci or None, json.dumps(attributes), since,
                ],
            )  # fmt: skip

    def event(self, node: str, kind: str, at: datetime) -> None:
        with self.store.transaction() as write:
            write.execute(
                "INSERT INTO live.event VALUES (?, ?, ?, 'b', 0, 'node:', ?, '', 1, '', '{}')",
                [at, at, node, kind],
            )

    def incident(
        self, node: str, entity: str, at: datetime, rule: str = "gpu_missing", hit: tuple[str, ...] = ()
    ) -> int:
        self.last += 1
        with self.store.transaction() as write:
            write.execute(
                "INSERT INTO live.incident BY NAME SELECT ? AS number, ? AS cause_rule, ? AS node, "
                "? AS entity, 'open' AS state, 'crit' AS severity, 'T' AS title, ?::TIMESTAMP AS opened_at, "
                "?::TIMESTAMP AS updated_at, 0 AS reopened",
                [self.last, rule, node, entity, at, at],
            )
            for one in hit or (node,):
                write.execute(
                    "INSERT INTO live.finding BY NAME SELECT nextval('live.finding_id') AS id, ? AS rule, "
                    "? AS node, ? AS entity, 'firing' AS state, 'crit' AS verdict, 'lost' AS code, "
                    "'gone' AS reason, '{}' AS detail, '[]' AS evidence, ?::TIMESTAMP AS began_at, "
                    "?::TIMESTAMP AS last_evidence_at, ?::TIMESTAMP AS updated_at, ? AS incident",
                    [rule, one, "node:" if hit else entity, at, at, at, self.last],
                )
        return self.last

    def show(self, number: int) -> dict[str, object]:
        with self.store.reader(LIVE) as read:
            items = documents.one_incident(read, NOW, number)["items"]
        assert isinstance(items, list)
        found: dict[str, object] = items[0]
        return found


@pytest.fixture
def desk() -> Iterator[Desk]:
    store = Store.open(None)
    rules.install(store, ())
    yield Desk(store)
    store.close()


A, B = "gpu:GPU-a", "gpu:GPU-b"


def test_what_changed_in_the_day_before(desk: Desk) -> None:
    for number in range(1, 4):
        node = f"gpu-00{number}"
        desk.holds(node, "node:", ago(900), driver_version="570", kernel="6.8", boot_id="1")
        desk.holds(node, "node:", ago(3), driver_version="580", kernel="6.8", boot_id="2")
    desk.holds("gpu-001", A, ago(900), "111", "0000:1b:00.0", vbios="96.00")
    desk.holds("gpu-001", B, ago(2), "222", "0000:1b:00.0", vbios="96.00")
    number = desk.incident("", "domain:driver=580", ago(1), "agent_silent", ("gpu-001", "gpu-002", "gpu-003"))
    found = desk.show(number)
    assert found["changed"] == [
        {"what": "card swapped 0000:1b:00.0", "before": "111", "after": "222", "nodes": "gpu-001",
         "at": "2026-03-10T10:00:00Z"},
        {"what": "node driver_version", "before": "570", "after": "580", "nodes": "gpu-[001-003]",
         "at": "2026-03-10T09:00:00Z"},
    ]  # fmt: skip
    assert found["domain"] == {"kind": "driver", "name": "580"}
    assert (found["place"], found["hostlist"]) == ("driver 580", "gpu-[001-003]")
    assert found["action"] == "look at what these nodes share: driver 580"


def test_a_step_of_a_whole_model_shows_what_changed_on_its_nodes(desk: Desk) -> None:
    for node in ("gpu-001", "gpu-002"):
        desk.holds(node, "node:", ago(900), driver_version="570")
        desk.holds(node, "node:", ago(3), driver_version="580")
        desk.holds(node, f"gpu:GPU-{node}", ago(900), "1", "0000:1b:00.0")
    with desk.store.transaction() as write:
        write.execute("UPDATE live.inventory SET model = 'H100' WHERE kind = 'gpu'")
    found = desk.show(desk.incident("", "domain:model=H100", ago(1), "gpu_downclocked"))
    assert [(one["before"], one["after"], one["nodes"]) for one in found["changed"]] == [  # type: ignore[attr-defined]
        ("570", "580", "gpu-[001-002]")
    ]


def test_what_changed_later_or_long_ago_is_not_why(desk: Desk) -> None:
    desk.holds("gpu-001", "node:", ago(900), kernel="6.5")
    desk.holds("gpu-001", "node:", ago(100), kernel="6.6")
    number = desk.incident("gpu-001", "node:", ago(2), "agent_silent")
    desk.holds("gpu-001", "node:", ago(1), kernel="6.8")
    assert desk.show(number)["changed"] == []


def test_a_card_is_followed_by_serial_across_hosts(desk: Desk) -> None:
    desk.holds("gpu-001", A, ago(900), "111", "0000:1b:00.0")
    first = desk.incident("gpu-001", A, ago(200))
    desk.event("gpu-001", "reboot", ago(199))
    desk.holds("gpu-007", A, ago(150), "111", "0000:43:00.0")
    second = desk.incident("gpu-007", A, ago(100))
    desk.event("gpu-007", "reboot", ago(99))
    found = desk.show(desk.incident("gpu-007", A, ago(1)))
    assert found["repeats"] == {
        "serial": "111", "incidents": [f"INC-{first}", f"INC-{second}"], "nodes": ["gpu-001", "gpu-007"],
        "rules": ["gpu_missing"], "offender": True,
    }  # fmt: skip
    assert [(one["step"], one["count"]) for one in found["tried"]] == [("reboot", 1), ("reseat", 1)]  # type: ignore[attr-defined]
    assert found["action"] == "replace the card"
    assert desk.show(first)["repeats"] is None


def test_the_view_of_repeat_offenders(desk: Desk) -> None:
    views.create(desk.store)
    now = datetime.now()
    desk.holds("gpu-001", A, now - timedelta(days=90), "111", "0000:1b:00.0")
    desk.holds("gpu-001", B, now - timedelta(days=90), "222", "0000:43:00.0")
    for day in (9, 5, 1):
        desk.incident("gpu-001", A, now - timedelta(days=day))
    desk.incident("gpu-001", B, now - timedelta(days=1))
    with desk.store.reader(PEOPLE) as read:
        rows = read.execute("SELECT serial, incidents_14d, moves_30d, nodes FROM repeat_offenders").fetchall()
    assert rows == [("111", 3, 0, ["gpu-001"])]


@pytest.mark.parametrize(
    ("rule", "code", "asked", "done", "said"),
    [
        ("gpu_missing", "lost_at_run_time", "", [], "reboot the node"),
        ("gpu_missing", "gone_from_bus", "accept", ["reboot"], "see who exchanged the card"),
        ("gpu_missing", "driver_not_loaded", "", [], "load the driver"),
        ("remap_failed", "remap_pending", "", [], "reset the card"),
        ("remap_failed", "remap_pending", "", ["reset"], "reboot the node"),
        ("recovery_action", "node_reboot", "node_reboot", [], "reboot the node"),
        ("xid", "xid", "node_reboot", ["reboot"], "reseat the card"),
        ("xid", "xid", "reboot", [], "reboot the node"),
        ("xid", "sxid", "reboot", [], "reboot the node"),
        ("xid", "xid", "reset_gpu", [], "reset the card"),
        ("xid", "xid", "drain_rma", [], "replace the card"),
        ("xid", "xid", "restart_app", [], "restart the job"),
        ("xid", "xid", "restart_app", ["reboot"], "reseat the card"),
        ("xid", "xid", "contact", [], "note it"),
        ("remap_failed", "remap_failed", "drain_rma", [], "replace the card"),
        ("retired_pages", "full", "drain_rma", [], "replace the card"),
        ("xid", "xid", "", ["reboot", "reseat"], "replace the card"),
        ("xid", "xid", "", ["reboot", "reseat", "reset"], "replace the card"),
        ("gpu_downclocked", "power_brake", "", [], "power: look at supplies"),
        ("power_limit", "below_peers", "", [], "see who set it"),
        ("power_limit", "held_lower", "", [], "the board or its host holds it down"),
        ("power_limit", "held_lower", "", ["reseat"], "replace the card"),
        ("software_drift", "differs", "", ["reboot"], "give it what its peers have"),
        ("bench_stale", "not_run", "", [], "drain it for an hour"),
        ("rule_failed", "failed", "", [], "read the error"),
        ("bandwidth_regression_host", "slower", "", [], "see what changed on the host"),
    ],
)
def test_the_ladder(rule: str, code: str, asked: str, done: list[str], said: str) -> None:
    step = ladder.next_step(rule, code, asked, "", [Tried(word, 1, NOW) for word in done])
    assert step is not None
    assert step.startswith(said)


def test_agents_that_come_back_with_backfill_prove_it(desk: Desk) -> None:
    number = desk.incident("(collector)", "agent:", ago(1), "agent_silent")
    assert desk.show(number)["proof"] is None
    with desk.store.transaction() as write:
        write.execute("UPDATE live.finding SET code = 'many_silent'")
    with desk.store.transaction() as write:
        for node, lane in (("gpu-001", "backfill"), ("gpu-002", "backfill"), ("gpu-003", "live")):
            row = [node, ago(0.5), lane]
            write.execute("INSERT INTO live.ledger VALUES (?, 's', 1, 'd', 'b', ?, 0, ?, 8)", row)
    found = desk.show(number)
    assert str(found["proof"]).startswith("2 agents sent what they had kept")
    assert (found["place"], found["hostlist"]) == ("collector", None)


def test_every_rule_has_a_ladder_and_one_of_tomorrow_its_runbook() -> None:
    assert ladder.next_step("of_tomorrow", "", "", "", []) is None
    assert ladder.STEPS.keys() == {rule.name for rule in rules.load_rules()}


@pytest.mark.parametrize(
    ("cause", "into"), [("merged into INC-7", 7), ("clean evidence", None), (None, None)]
)
def test_merged(cause: str | None, into: int | None) -> None:
    assert story.merged_into(cause) == into


def test_every_action_of_the_catalogue_leads_somewhere() -> None:
    """An error that wants a reboot must not be answered with a reset, nor a program's with either."""
    steps = {action: ladder.next_step("xid", "xid", action, "", []) for action in catalogue.ACTIONS}
    assert len(set(steps.values())) == len(steps), steps
