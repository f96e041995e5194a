"""Many nodes, one cause: fault domains, the collector's own trouble, and what a storm of findings costs."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_agent.guard import GuardedHost
from gpufleet_agent.scenario import parse
from gpufleet_collector import findings, rules
from gpufleet_collector.domains import Domain, Domains
from gpufleet_collector.findings import Finding, Policy
from gpufleet_collector.incidents import COLLECTOR, Incidents, rank
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.store import LIVE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

START = datetime(2026, 3, 1, 12, 0, 0)
LOADED = rules.load_rules()
POLICIES = {rule.name: Policy.of(rule, JudgeSettings()) for rule in LOADED}


@dataclass
class Desk:
    """Incidents over a store, fed with findings as the judge feeds them."""

    store: Store
    at: datetime = START
    last: int = 0
    active: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    incidents: Incidents = field(default_factory=lambda: Incidents(POLICIES))

    def host(self, *nodes: str, version: str = "", **labels: str) -> None:
        said = {f"label.{name}": value for name, value in labels.items()}
        self.item([(node, "node:", "node", said | {"driver_version": version}) for node in nodes])

    def part(self, node: str, entity: str, pci: str = "", **attributes: str) -> None:
        self.item([(node, entity, entity.partition(":")[0], attributes | ({"pci": pci} if pci else {}))])

    def item(self, items: Sequence[tuple[str, str, str, dict[str, str]]]) -> None:
        since = START - timedelta(hours=1)
        with self.store.transaction() as write:
            write.execute(
                "INSERT INTO live.inventory BY NAME SELECT unnest(?::VARCHAR[]) AS node, "
                "unnest(?::VARCHAR[]) AS entity, unnest(?::VARCHAR[]) AS kind, unnest(?::VARCHAR[]) AS pci, "
                "unnest(?::VARCHAR[])::JSON AS attributes, ?::TIMESTAMP AS valid_from",
                [
                    *([item[column] for item in items] for column in range(3)),
                    [item[3].get("pci") for item in items],
                    [json.dumps(item[3]) for item in items],
                    since,
                ],
            )

    def tell(
        self,
        *found: tuple[str, str, str],
        over: Iterable[tuple[str, str, str]] = (),
        code: str = "",
        verdict: str = "crit",
        after: float = 5.0,
        **detail: str,
    ) -> None:
        """One pass `after` seconds later: these (rule, node, entity) fire, those are over."""
        self.at += timedelta(seconds=after)
        changes: list[tuple[Finding, str]] = []
        for rule, node, entity in found:
            self.last += 1
            one = Finding(
                self.last, rule, node, entity, "firing", verdict, code, None, None, None, "so it is",
                json.dumps(detail), (), self.at, self.at, None, None, None, self.at, self.at,
            )  # fmt: skip
            self.active[one.key] = one
            changes.append((one, "fired"))
        for key in over:
            one = self.active.pop(key)
            findings.resolve(one, "clean evidence", self.at)
            changes.append((one, "resolved"))
        changes.sort(key=causes_first)
        with self.store.transaction() as write, self.store.reader(LIVE) as read:
            self.incidents.take(changes, self.at, read)
            kept = {one.id: one for one, _ in changes} | self.incidents.moved
            findings.save(write, list(kept.values()), self.at)
            self.incidents.save(write)
        self.incidents.forget(self.at)

    def restart(self) -> None:
        with self.store.reader(LIVE) as read:
            stored = findings.load(read)
            self.active = {one.key: one for one in stored}
            self.incidents = Incidents(POLICIES)
            self.incidents.load(read, stored, self.at)

    def sql(self, query: str) -> list[tuple[object, ...]]:
        with self.store.reader(LIVE) as read:
            return read.execute(query).fetchall()

    def open(self) -> list[tuple[object, ...]]:
        return self.sql(
            "SELECT number, cause_rule, node, entity FROM incident WHERE state = 'open' ORDER BY number"
        )


def causes_first(change: tuple[Finding, str]) -> tuple[bool, int, str, str, str]:
    finding, changed = change
    return (
        changed != "fired",
        rank(POLICIES[finding.rule], finding.entity),
        finding.node,
        finding.entity,
        finding.rule,
    )


@pytest.fixture
def desk() -> Iterator[Desk]:
    store = Store.open(None)
    rules.install(store, ())
    yield Desk(store)
    store.close()


def names(count: int, first: int = 1) -> list[str]:
    return [f"gpu-{number:04}" for number in range(first, first + count)]


def silent(nodes: Iterable[str]) -> list[tuple[str, str, str]]:
    return [("agent_silent", node, "node:") for node in nodes]


def card(node: str, number: int) -> str:
    return f"gpu:GPU-{node}-{number}"


def switched_fleet(desk: Desk) -> list[str]:
    """1,000 nodes in 25 racks of 40, five racks to a switch, all with one driver."""
    nodes = names(1000)
    for number in range(25):
        some = nodes[40 * number : 40 * number + 40]
        desk.host(*some, rack=f"r{number}", leaf_switch=f"leaf{number // 5}", version="580.95.05")
    return nodes


def test_200_nodes_losing_one_switch_give_one_incident(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[200:400]))
    assert desk.open() == [(1, "agent_silent", "", "domain:leaf_switch=leaf1")]
    assert desk.sql("SELECT count(*) FROM incident") == [(1,)], "nobody is told of 199 others"
    assert desk.sql("SELECT title FROM incident") == [("leaf_switch leaf1: 200 of 200 nodes: Agent silent",)]
    assert desk.sql("SELECT DISTINCT incident FROM finding") == [(1,)]


def test_a_switch_that_shows_bit_by_bit_keeps_the_oldest_number(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[203:206]))
    assert len(desk.open()) == 3
    desk.tell(*silent([*nodes[200:203], *nodes[206:395]]))
    assert desk.open() == [(1, "agent_silent", "", "domain:leaf_switch=leaf1")]
    assert desk.sql("SELECT number, state, cause FROM incident WHERE number > 1 ORDER BY 1") == [
        (2, "resolved", "merged into INC-1"),
        (3, "resolved", "merged into INC-1"),
    ]
    desk.restart()
    desk.tell(*silent(nodes[395:400]), after=3600)
    assert desk.sql("SELECT title FROM incident WHERE state = 'open'") == [
        ("leaf_switch leaf1: 200 of 200 nodes: Agent silent",)
    ]
    assert desk.sql("SELECT count(DISTINCT incident) FROM finding WHERE incident = 1") == [(1,)]


@pytest.mark.parametrize(
    ("hit", "said"),
    [
        (range(40, 80), "domain:rack=r1"),
        (range(44, 70), "domain:rack=r1"),
        (range(40, 200), "domain:leaf_switch=leaf0"),
        (range(640), "domain:driver=580.95.05"),
    ],
)
def test_the_smallest_domain_that_covers(desk: Desk, hit: range, said: str) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*(("gpu_missing", nodes[number], card(nodes[number], 3)) for number in hit))
    assert [row[3] for row in desk.open()] == [said]


@pytest.mark.parametrize(
    "hit",
    [range(4), range(0, 1000, 40), range(40, 60)],
    ids=["four nodes", "one node of each rack", "half a rack"],
)
def test_too_few_for_a_domain(desk: Desk, hit: range) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*(("gpu_missing", nodes[number], card(nodes[number], 3)) for number in hit))
    assert len(desk.open()) == len(hit)


def test_hosts_without_labels_are_the_fleet(desk: Desk) -> None:
    nodes = names(10)
    desk.host(*nodes)
    desk.tell(*silent(nodes[:6]))
    assert desk.sql("SELECT title FROM incident") == [("fleet: 6 of 10 nodes: Agent silent",)]


def test_the_agent_that_every_host_runs_is_no_fault_domain(desk: Desk) -> None:
    desk.host(*names(6))
    with desk.store.transaction() as write:
        for node in names(6):
            write.execute(
                "INSERT INTO live.node (node, claimed, machine_id, boot_id, spool_id, agent_version, "
                "conflict, first_seen, hello_at) VALUES (?, ?, ?, 'b', 's', '1.0', '', ?, ?)",
                [node, node, f"m-{node}", START, START],
            )
    desk.tell(*(("gpu_downclocked", node, card(node, 0)) for node in names(6)))
    assert desk.open() == [(1, "gpu_downclocked", "", "domain:fleet=all")]


def test_two_racks_and_a_stranger_are_three(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent([*nodes[40:80], *nodes[400:440], nodes[900]]))
    assert [row[3] for row in desk.open()] == ["domain:rack=r1", "domain:rack=r10", "node:"]


def test_different_troubles_in_one_rack_are_different(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[40:50]), *(("clock_skew", node, "node:") for node in nodes[50:80]))
    assert {row[1] for row in desk.open() if row[3] == "domain:rack=r1"} == {"clock_skew"}
    assert len(desk.open()) == 11, "ten of forty silent nodes are no rack"


def test_ports_of_a_switch_are_one_however_they_fail(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    found = [("port_down", node, "port:mlx5_0/1") for node in nodes[200:300]]
    found += [("port_flapping", node, "port:mlx5_0/1") for node in nodes[300:400]]
    desk.tell(*found, ("gpu_missing", nodes[200], card(nodes[200], 0)))
    assert {row[3] for row in desk.open()} == {"domain:leaf_switch=leaf1", card(nodes[200], 0)}


def test_agents_that_fall_silent_behind_it_explain_the_ports(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*(("port_down", node, "port:eth0/1") for node in nodes[200:400]))
    desk.tell(*silent(nodes[200:400]), after=90)
    assert desk.open() == [(1, "agent_silent", "", "domain:leaf_switch=leaf1")]


def test_a_hung_file_server_is_one_incident_with_whom_it_holds_up(desk: Desk) -> None:
    nodes = names(60)
    desk.host(*nodes, rack="r1")
    for node in nodes:
        desk.part(node, "mount:/data", source="nfs1:/export/data" if node < nodes[20] else "nfs2:/export")
    desk.tell(*(("mount_hung", node, "mount:/data") for node in nodes[:20]), code="hung")
    assert desk.open() == [(1, "mount_hung", "", "domain:server=nfs1")]
    desk.tell(*(("process_unkillable", node, "node:") for node in nodes[:20]), code="stuck", after=600)
    desk.tell(("data_starved", "", "job:41778"), code="nfs_hung", first_node=nodes[3], after=20)
    assert len(desk.open()) == 1
    desk.tell(("data_starved", "", "job:41779"), code="cpu_preparation", first_node=nodes[3])
    assert [row[3] for row in desk.open()] == ["domain:server=nfs1", "job:41779"]


def test_a_starved_job_joins_the_mount_that_is_seen_later(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(("data_starved", "", "job:41778"), code="storage", first_node=node)
    desk.tell(("mount_hung", node, "mount:/data"), code="hung", after=60)
    assert desk.open() == [(1, "mount_hung", node, "mount:/data")]


def test_a_domain_that_recovers_but_for_one_stays_one(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[40:80]))
    desk.tell(("gpu_missing", nodes[41], card(nodes[41], 2)))
    assert len(desk.open()) == 1, "the node is silent: that explains it"
    desk.tell(over=silent(nodes[40:80]), after=300)
    assert desk.open() == [(1, "gpu_missing", nodes[41], card(nodes[41], 2))]
    desk.tell(over=[("gpu_missing", nodes[41], card(nodes[41], 2))])
    assert desk.open() == []


def test_the_same_rack_again_within_30_minutes_is_the_same_incident(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[40:80]))
    desk.tell(over=silent(nodes[40:80]), after=60)
    desk.restart()
    desk.tell(*silent(nodes[40:80]), after=600)
    assert desk.sql("SELECT number, state, reopened FROM incident") == [(1, "open", 1)]
    desk.tell(over=silent(nodes[40:80]), after=60)
    desk.tell(*silent(nodes[40:80]), after=1900)
    assert [row[0] for row in desk.open()] == [2]


def test_what_ends_everywhere_at_once_keeps_its_name(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[40:80]))
    desk.tell(over=silent(nodes[40:80]), after=300)
    assert desk.sql("SELECT state, node, entity FROM incident") == [("resolved", "", "domain:rack=r1")]
    assert desk.sql("SELECT count(*) FROM incident_log WHERE what = 'cause_changed'") == [(0,)]
    desk.tell(*silent(nodes[40:80]), after=300)
    assert desk.open() == [(1, "agent_silent", "", "domain:rack=r1")]


def test_a_card_that_fails_in_another_way_after_the_trouble_came_to_rest_is_its_own(desk: Desk) -> None:
    nodes = [f"gpu-{number:03}" for number in range(8)]
    desk.host(*nodes, rack="r1")
    desk.host(*(f"gpu-{number:03}" for number in range(8, 40)), rack="r2")
    for node in nodes:
        desk.part(node, f"gpu:{node}-0")
    rule = "gpu_downclocked"
    desk.tell(*((rule, node, f"gpu:{node}-0") for node in nodes[:6]), code="power_brake")
    desk.tell((rule, nodes[6], f"gpu:{nodes[6]}-0"), code="slow", after=120)
    assert [row[3] for row in desk.open()] == ["domain:rack=r1"], (
        "while it spreads it may show in several ways"
    )
    desk.tell((rule, nodes[0], f"gpu:{nodes[0]}-1"), code="hw_thermal", after=900)
    assert [row[3] for row in desk.open()] == ["domain:rack=r1", f"gpu:{nodes[0]}-1"]
    desk.restart()
    desk.tell((rule, nodes[7], f"gpu:{nodes[7]}-0"), code="power_brake", after=300)
    assert len(desk.open()) == 2, "one that fails as the others did has followed them"
    [(count,)] = desk.sql("SELECT count(*) FROM finding WHERE incident = 1")
    assert count == 8


def test_1000_agents_losing_the_collectors_network_give_one(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[:50]))
    many = ("agent_silent", COLLECTOR, "agent:")
    desk.tell(many, code="many_silent", after=5)
    assert desk.open() == [(1, "agent_silent", COLLECTOR, "agent:")]
    desk.restart()
    desk.tell(*silent(nodes[50:60]))
    assert len(desk.open()) == 1
    desk.tell(over=[many, *silent(nodes[:60])], after=300)
    assert desk.open() == []


def test_a_rack_that_stays_away_when_the_rest_is_back_is_its_own_incident(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    many = ("agent_silent", COLLECTOR, "agent:")
    desk.tell(many, code="many_silent")
    desk.tell(*silent(nodes[40:80]), over=[many], after=300)
    assert [row[1:] for row in desk.open()] == [("agent_silent", "", "domain:rack=r1")]


def test_one_host_with_8_slow_cards_gives_one(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(*(("gpu_downclocked", node, card(node, number)) for number in range(8)))
    assert len(desk.open()) == 1


def test_one_lost_card_gives_one_not_nineteen(desk: Desk) -> None:
    node = names(1)[0]
    lost = card(node, 3)
    desk.part(node, lost, pci="0000:61:00.0")
    desk.tell(("pcie_errors", node, "pci:0000:61:00.0"), ("xid", node, lost), code="xid")
    desk.tell(*(("nvlink_errors", node, card(node, number)) for number in range(8)))
    desk.tell(("gpu_missing", node, lost), code="lost_at_run_time")
    desk.tell(*(("nvlink_down", node, card(node, number)) for number in range(8)), after=90)
    desk.tell(("pcie_width", node, "pci:0000:61:00.0"), ("process_unkillable", node, "node:"), after=600)
    assert desk.open() == [(1, "gpu_missing", node, lost)]
    assert desk.sql("SELECT count(*) FROM finding WHERE incident = 1") == [(21,)]


def test_two_lost_cards_are_one_though_one_of_them_was_heard_of_before(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(("xid", node, card(node, 3)), code="xid")
    desk.tell(*(("gpu_missing", node, card(node, number)) for number in (1, 3)))
    assert desk.open() == [(1, "gpu_missing", node, card(node, 1))]
    assert desk.sql("SELECT count(*) FROM finding WHERE incident = 1") == [(3,)]


@pytest.mark.parametrize("restarted", [False, True])
def test_cards_that_fail_together_again_are_one_incident_again(desk: Desk, restarted: bool) -> None:
    node = names(1)[0]
    slow = [("gpu_downclocked", node, card(node, number)) for number in range(8)]
    desk.tell(*slow)
    desk.tell(over=slow, after=600)
    desk.tell(*slow[:2], after=600)
    if restarted:
        desk.restart()
    desk.tell(*slow[2:])
    assert desk.open() == [(1, "gpu_downclocked", node, card(node, 0))]


def test_a_cause_that_shows_after_its_effect_came_again_takes_it_over(desk: Desk) -> None:
    node = names(1)[0]
    error = ("xid", node, card(node, 3))
    desk.tell(error, code="xid")
    desk.tell(over=[error], after=600)
    desk.tell(error, code="xid", after=600)
    desk.tell(("gpu_missing", node, card(node, 3)))
    assert desk.open() == [(1, "gpu_missing", node, card(node, 3))]


def test_what_makes_it_critical_gives_it_its_name(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(("remap_failed", node, card(node, 3)), verdict="warn")
    desk.tell(("remap_failed", node, card(node, 4)))
    assert desk.sql("SELECT entity, severity FROM incident") == [(card(node, 4), "crit")]
    desk.tell(("remap_failed", node, card(node, 5)))
    assert desk.sql("SELECT entity, severity FROM incident") == [(card(node, 4), "crit")]


def test_links_that_fall_long_after_the_card_have_another_cause(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(("gpu_missing", node, card(node, 3)))
    desk.tell(("nvlink_down", node, card(node, 5)), after=7200)
    assert len(desk.open()) == 2


def test_a_hung_driver_and_the_process_it_holds_are_one(desk: Desk) -> None:
    node = names(1)[0]
    desk.tell(("driver_hung", node, card(node, 3)), code="hung")
    desk.tell(("process_unkillable", node, "node:"), code="unkillable", after=700)
    assert desk.open() == [(1, "driver_hung", node, card(node, 3))]
    desk.tell(("process_unkillable", "gpu-0002", "node:"), code="stuck")
    assert len(desk.open()) == 2, "on another node it has its own cause"


def test_an_adapter_and_its_port_are_one_thing(desk: Desk) -> None:
    node = names(1)[0]
    desk.part(node, "port:mlx5_0/1", pci="0000:18:00.0")
    desk.tell(("pcie_width", node, "pci:0000:18:00.0"))
    desk.tell(("port_errors", node, "port:mlx5_0/1"), after=60)
    desk.tell(("pcie_width", node, "pci:0000:40:00.0"), after=600)
    assert [row[3] for row in desk.open()] == ["pci:0000:18:00.0", "pci:0000:40:00.0"]


def test_1000_nodes_with_5000_findings_are_concluded_within_a_second(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*(("gpu_missing", node, card(node, 0)) for node in nodes[::40]))
    found = silent(nodes[:400]) + [("clock_skew", node, "node:") for node in nodes[:400]]
    found += [("xid", node, card(node, number)) for node in nodes for number in range(3)]
    found += [("pcie_errors", node, "pci:0000:19:00.0") for node in nodes[:600]]
    found += [("dimm_errors", node, "dimm:mc0/dimm0") for node in nodes[:600]]
    assert len(found) == 5000
    began = time.process_time()
    desk.tell(*found)
    logging.getLogger(__name__).info("5,000 findings: %.2f s of CPU", time.process_time() - began)
    assert desk.sql("SELECT count(*) FROM finding WHERE incident IS NULL") == [(0,)]
    assert len(desk.open()) < 30


def test_what_everybody_shares_is_read_as_it_was(desk: Desk) -> None:
    desk.host("gpu-0001", "gpu-0002", rack="r1", version="580")
    desk.part("gpu-0001", "gpu:GPU-a", vbios="96.00")
    with desk.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET valid_to = ? WHERE node = 'gpu-0002'", [START + timedelta(hours=1)]
        )
    with desk.store.reader(LIVE) as read:
        now, later = (Domains.read(read, at) for at in (START, START + timedelta(hours=2)))
    assert now.nodes(Domain("rack", "r1")) == {"gpu-0001", "gpu-0002"}
    assert later.nodes(Domain("rack", "r1")) == {"gpu-0001"}
    assert now.nodes(Domain("vbios", "96.00")) == {"gpu-0001"}


@pytest.mark.parametrize("key", ["label.Rack", "label.", "label.fleet", "label.driver", "label.a b", "rack"])
def test_a_hostile_label_is_none(desk: Desk, key: str) -> None:
    desk.item([("gpu-0001", "node:", "node", {key: "x"})])
    with desk.store.reader(LIVE) as read:
        found = Domains.read(read, START)
    assert not [
        word for word in ("Rack", "", "fleet", "driver", "a b", "rack") if found.nodes(Domain(word, "x"))
    ]


@pytest.fixture
def rules_of_nodes() -> list[rules.Rule]:
    return [rule for rule in LOADED if rule.name == "agent_silent"]


def test_a_rack_that_falls_silent_as_the_judge_sees_it(
    fleet: "Fleet", rules_of_nodes: list[rules.Rule]
) -> None:
    judge = Judge(fleet.store, JudgeSettings(), rules=rules_of_nodes)
    nodes = [fleet.add(f"gpu-{number:03}", gpus=0) for number in range(20)]
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET attributes = "
            "json_object('label.rack', 'r' || (right(node, 3)::INTEGER // 6)::VARCHAR) WHERE entity = 'node:'"
        )
    fleet.run(10, judge)
    for node in nodes[6:12]:
        node.up = False
    fleet.run(100, judge, every=20)
    assert fleet.incidents() == [(1, "agent_silent", "", "domain:rack=r1", "open", "warn")]
    [(silent_nodes,)] = fleet.sql("SELECT count(*) FROM finding WHERE incident = 1 AND state = 'firing'")
    assert silent_nodes == 6
    again = Judge(fleet.store, JudgeSettings(), rules=rules_of_nodes)
    for node in nodes[6:12]:
        node.up = True
    fleet.run(30, again, every=10)
    assert [row[4] for row in fleet.incidents()] == ["resolved"]


RACKS = """
[fleet]
nodes = 24
gpus = 0
[[node]]
node = "gpu-[001-006]"
labels = { rack = "r1" }
[[node]]
node = "gpu-[007-012]"
labels = { rack = "r2" }
[[node]]
node = "*"
labels = { pool = "train" }
[[fault]]
node = "gpu-[007-012]"
kind = "agent_stopped"
at = 15
until = 150
"""


def test_a_simulated_rack_that_loses_its_agents_is_one_incident_with_its_name(
    fleet: "Fleet", rules_of_nodes: list[rules.Rule]
) -> None:
    scenario = parse(RACKS.encode())
    began = fleet.at
    hosts = {
        name: GuardedHost(scenario.host(name, lambda: (fleet.at - began).total_seconds(), 0))
        for name in scenario.node_names()
    }
    for name, host in hosts.items():
        fleet.add(name, gpus=0)
        with fleet.store.transaction() as write:
            write.execute(
                "UPDATE live.inventory SET attributes = ? WHERE node = ? AND entity = 'node:'",
                [json.dumps(dict(host.node().attributes)), name],
            )

    def play(_: "Fleet") -> None:
        for name, node in fleet.nodes.items():
            node.up = scenario.running(name, (fleet.at - began).total_seconds())

    fleet.each_tick = play
    judge = Judge(fleet.store, JudgeSettings(), rules=rules_of_nodes)
    fleet.run(130, judge, every=10)
    assert fleet.incidents() == [(1, "agent_silent", "", "domain:rack=r2", "open", "warn")]
    assert str(fleet.sql("SELECT title FROM incident")[0][0]).startswith("rack r2: 6 of 6 nodes: ")
    fleet.run(60, judge, every=10)
    assert [row[4] for row in fleet.incidents()] == ["resolved"]


# ---- a second trouble of the same kind


def ports(nodes: Iterable[str]) -> list[tuple[str, str, str]]:
    return [("port_down", node, "port:mlx5_0/1") for node in nodes]


def test_a_node_outside_a_domain_in_trouble_is_its_own_incident(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*ports(nodes[200:300]), *ports(nodes[300:400]))
    desk.tell(*ports(nodes[700:701]), after=600)
    assert [row[2:] for row in desk.open()] == [
        ("", "domain:leaf_switch=leaf1"),
        (nodes[700], "port:mlx5_0/1"),
    ]


@pytest.mark.parametrize("after", [5.0, 120.0, 900.0])
def test_two_switches_one_after_the_other_are_two(desk: Desk, after: float) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*ports(nodes[200:400]))
    desk.tell(*ports(nodes[600:800]), after=after)
    desk.restart()
    desk.tell(("clock_skew", nodes[0], "node:"))
    assert [row[3] for row in desk.open()][:2] == ["domain:leaf_switch=leaf1", "domain:leaf_switch=leaf3"]
    assert desk.sql(
        "SELECT incident, count(*) FROM finding WHERE rule = 'port_down' GROUP BY 1 ORDER BY 1"
    ) == [
        (1, 200),
        (2, 200),
    ]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("rule", ["port_down", "agent_silent"])
def test_a_trouble_in_a_domain_that_is_well_again_but_for_one_is_its_own(
    desk: Desk, rule: str, restart: bool
) -> None:
    nodes = switched_fleet(desk)
    hit = [(rule, node, "node:" if rule == "agent_silent" else "port:mlx5_0/1") for node in nodes[200:400]]
    desk.tell(*hit)
    desk.tell(over=hit[1:], after=300)
    if restart:
        desk.restart()
    desk.tell(hit[7], after=900)
    assert [row[2:] for row in desk.open()] == [("", "domain:leaf_switch=leaf1"), hit[7][1:]]
    desk.tell(*hit[8:180], after=60)
    assert [row[3] for row in desk.open()] == ["domain:leaf_switch=leaf1"], "the switch again: one incident"


def test_a_switch_that_fails_again_long_after_is_news_though_one_node_never_came_back(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*silent(nodes[200:400]))
    desk.tell(over=silent(nodes[201:400]), after=300)
    desk.tell(*silent(nodes[201:400]), after=86400)
    assert [row[0] for row in desk.open()] == [1, 2]
    assert desk.sql("SELECT DISTINCT incident FROM finding WHERE state = 'firing' ORDER BY 1") == [(1,), (2,)]


def test_a_node_follows_its_domain_while_that_is_in_trouble(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*ports(nodes[200:399]))
    desk.tell(*ports(nodes[399:400]), after=900)
    assert [row[3] for row in desk.open()] == ["domain:leaf_switch=leaf1"]


# ---- the same again, on one node


def test_two_cards_of_a_host_lost_ten_minutes_apart_are_two(desk: Desk) -> None:
    node = names(1)[0]
    first, second = (("gpu_missing", node, card(node, number)) for number in (2, 5))
    desk.tell(first, code="lost_at_run_time")
    desk.tell(second, code="lost_at_run_time", after=600)
    assert [row[3] for row in desk.open()] == [first[2], second[2]]
    desk.tell(over=[first, second])
    desk.tell(second, after=60)
    assert desk.sql("SELECT number, state, reopened FROM incident ORDER BY 1") == [
        (1, "resolved", 0),
        (2, "open", 1),
    ]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("again", [[0, 1], [1], [3, 2]])
def test_parts_that_were_one_are_that_one_when_they_fail_again(
    desk: Desk, restart: bool, again: list[int]
) -> None:
    node = names(1)[0]
    cards = [("gpu_missing", node, card(node, number)) for number in range(4)]
    desk.tell(*cards)
    desk.tell(over=cards, after=60)
    if restart:
        desk.restart()
    desk.tell(*(cards[number] for number in again), after=1200)
    assert desk.sql("SELECT number, state, reopened FROM incident") == [(1, "open", 1)]
    desk.tell(("gpu_missing", node, card(node, 7)), after=600)
    assert [row[0] for row in desk.open()] == [1, 2], "that one was no part of it"


def test_a_part_that_fails_again_half_an_hour_later_is_new(desk: Desk) -> None:
    node = names(1)[0]
    cards = [("gpu_missing", node, card(node, number)) for number in range(2)]
    desk.tell(*cards)
    desk.tell(over=cards, after=60)
    desk.tell(cards[1], after=1900)
    assert [row[0] for row in desk.open()] == [2]


def test_what_a_lost_card_had_caused_is_no_lost_card_when_it_comes_again(desk: Desk) -> None:
    node = names(1)[0]
    lost = ("gpu_missing", node, card(node, 3))
    effect = ("nvlink_down", node, card(node, 4))
    desk.tell(lost, effect)
    desk.tell(over=[effect], after=60)
    desk.tell(over=[lost])
    desk.tell(effect, after=600)
    assert [(row[0], row[1]) for row in desk.open()] == [(2, "nvlink_down")]


def test_another_card_in_the_slot_is_another_cause_and_the_same_slot_the_same(desk: Desk) -> None:
    node, slot = names(1)[0], "pci:0000:61:00.0"
    desk.part(node, card(node, 3), pci="0000:61:00.0")
    lost, narrow = ("gpu_missing", node, card(node, 3)), ("pcie_width", node, slot)
    desk.tell(lost)
    desk.tell(narrow, after=900)
    desk.tell(over=[lost])  # the slot's trouble outlives it
    desk.tell(over=[narrow])
    desk.part(node, "gpu:GPU-new", pci="0000:61:00.0")  # swapped
    desk.tell(("gpu_missing", node, "gpu:GPU-new"), after=300)
    desk.tell(narrow, after=900)
    assert [row[1:] for row in desk.open()] == [
        ("pcie_width", node, slot),
        ("gpu_missing", node, "gpu:GPU-new"),
    ]


def test_what_a_person_closed_is_the_same_when_it_fails_again_soon(desk: Desk) -> None:
    nodes = switched_fleet(desk)
    desk.tell(*ports(nodes[200:400]))
    desk.incidents.closed(1, desk.at, "closed by ann: switch replaced")
    desk.tell(*ports(nodes[200:400]), after=600)
    assert desk.sql("SELECT number, state, reopened FROM incident") == [(1, "open", 1)]
