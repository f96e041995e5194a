"""Rules port_down, port_rate, port_flapping and port_errors."""

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit, Scope
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

DOWN, RATE, FLAPPING, ERRORS = "port_down", "port_rate", "port_flapping", "port_errors"
EVERY = timedelta(seconds=10)


@dataclass
class Port:
    device: str
    guid: str | None = None
    pci: str | None = None
    number: int = 1
    shown: float | None = 400.0
    """Best rate in the inventory; None = it was never active."""
    cells: dict[str, "Cell"] = field(default_factory=dict)
    listed: bool = True

    @property
    def entity(self) -> str:
        return f"port:{self.device}/{self.number}"


def down(phys: "Cell" = "Polling", **cells: "Cell") -> dict[str, "Cell"]:
    return {
        "state": "DOWN",
        "phys_state": phys,
        "rate_gbps": None,
        "lanes": None,
        "signalling": None,
        **cells,
    }


WELL: dict[str, "Cell"] = {
    "link_layer": "InfiniBand", "state": "ACTIVE", "phys_state": "LinkUp", "rate_gbps": 400.0, "lanes": 4,
    "signalling": "NDR", "netdev": None, "interface_up": None, "carrier_changes_total": None,
    "link_downed_total": 0, "symbol_errors_total": 0, "link_error_recovery_total": 0, "rcv_errors_total": 0,
    "xmit_discards_total": 0, "local_link_integrity_errors_total": 0,
    "excessive_buffer_overrun_errors_total": 0, "local_ack_timeout_err_total": 0, "rx_crc_errors_total": None,
}  # fmt: skip
ROCE: dict[str, "Cell"] = {"link_layer": "Ethernet", "interface_up": True, "carrier_changes_total": 1}
PLAIN = ROCE | dict.fromkeys(
    ("phys_state", "lanes", "signalling", "link_downed_total", "symbol_errors_total", "rcv_errors_total")
)


@dataclass
class Host:
    """A node whose agent reads ports every ten seconds while it is up."""

    fleet: "Fleet"
    name: str
    ports: list[Port]
    up: bool = True
    ok: bool = True
    boot: str = "boot-1"

    def __post_init__(self) -> None:
        self.fleet.add(self.name, gpus=0)
        self.insert("probe", [{"node": self.name, "probe": "port", "interval_s": 10.0}])
        for port in self.ports:
            self.show(port)

    def show(self, port: Port, since: datetime | None = None) -> None:
        told = {"guid": port.guid, "pci": port.pci, "port": str(port.number), "device": port.device}
        if port.shown is not None:
            told |= {"in_use": "true", "rate_gbps_active": f"{port.shown:g}"}
        row: dict[str, Cell] = {
            "node": self.name, "entity": port.entity, "kind": "port", "pci": port.pci,
            "attributes": json.dumps({name: text for name, text in told.items() if text}),
            "valid_from": since or self.fleet.at - timedelta(minutes=30),
        }  # fmt: skip
        self.insert("inventory", [row])

    def hide(self, port: Port) -> None:
        ended = "UPDATE inventory SET valid_to = ? WHERE entity = ? AND valid_to IS NULL"
        with self.fleet.store.transaction() as write:
            write.execute(ended.replace("inventory", "live.inventory"), [self.fleet.at, port.entity])

    def insert(self, table: str, rows: list[dict[str, "Cell"]]) -> None:
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            with self.fleet.store.transaction() as write:
                write.executemany(
                    f"INSERT INTO live.{table} ({', '.join(rows[0])}) VALUES ({marks})",
                    [[row[name] for name in rows[0]] for row in rows],
                )

    def sweep(self) -> None:
        if not self.up:
            return
        head: dict[str, Cell] = {
            "ts": self.fleet.at, "received_at": self.fleet.at, "node": self.name, "boot_id": self.boot
        }  # fmt: skip
        rows = [
            head | {"device": p.device, "port": p.number, "guid": p.guid, "pci": p.pci} | WELL | p.cells
            for p in self.ports
            if p.listed and self.ok
        ]
        self.insert("port", rows)
        run: dict[str, Cell] = {
            "probe": "port",
            "ok": self.ok,
            "error": "" if self.ok else "failed",
            "rows": len(rows),
        }
        self.insert("agent", [head | run])
        self.insert("host", [head | {"uptime_s": 86400.0}])


def run(hosts: list[Host], seconds: float, judge: Judge | None = None, every: int = 1) -> None:
    fleet = hosts[0].fleet
    for count in range(int(seconds / 10)):
        fleet.at += EVERY
        for host in hosts:
            host.sweep()
        if judge and count % every == every - 1:
            judge.run_pass(fleet.at)


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (DOWN, RATE, FLAPPING, ERRORS)


def one(store: Store, fleet: "Fleet", rule: str, settings: JudgeSettings | None = None) -> Judge:
    chosen = [each for each in load_rules() if each.name == rule]
    fleet.judge = Judge(store, settings or JudgeSettings(), rules=chosen)
    return fleet.judge


def test_F04_ports_of_an_infiniband_host(fleet: "Fleet", judge: Judge) -> None:
    good = Port("mlx5_0", "g0", "0000:18:00.0", cells={"netdev": "ib0", "interface_up": False})
    storage = Port("mlx5_1", "g1", "0000:2a:00.0", shown=100, cells=ROCE | {"rate_gbps": 100.0})
    unused = Port("mlx5_2", "g2", "0000:2a:00.1", shown=None, cells=ROCE | down("Disabled"))
    bad = Port("mlx5_10", "g10", "0000:dc:00.0", cells=down())
    bond = Port("mlx5_bond_0", "g3", "0000:3a:00.0", shown=None, cells=ROCE | {"rate_gbps": 200.0})
    host = Host(fleet, "gpu-001", [good, storage, unused, bad, bond])
    bare = Host(fleet, "gpu-002", [])
    run([host, bare], 20)
    assert [fleet.find(DOWN, port.entity)[:2] for port in host.ports] == [
        ("ok", "active"), ("ok", "active"), ("n/a", "not_expected"), ("crit", "down"), ("ok", "active")
    ]  # fmt: skip
    assert fleet.find(DOWN, bad.entity)[3].startswith("link down (polling): 0000:dc:00.0, g10")
    assert [fleet.find(RATE, port.entity)[:2] for port in host.ports] == [
        ("ok", "full"), ("ok", "full"), ("n/a", "not_active"), ("n/a", "not_active"), ("n/a", "not_expected")
    ]  # fmt: skip
    for rule in (DOWN, RATE, FLAPPING, ERRORS):
        assert fleet.sql(f"FROM find_{rule}(TIMESTAMP '{fleet.at}') WHERE node = 'gpu-002'") == []


SAID: "list[tuple[dict[str, Cell], str, str, str]]" = [
    (down(), "crit", "down", "link down (polling)"),
    (down("Sleep"), "crit", "down", "link down (sleep)"),
    (down("LinkErrorRecovery"), "crit", "down", "link down (linkerrorrecovery)"),
    (down("Disabled"), "warn", "disabled", "switched off"),
    (down("LinkUp", state="INIT"), "crit", "init", "no subnet manager"),
    (down("LinkUp", state="ARMED"), "crit", "armed", "ARMED"),
    (down(None, state=None), "unknown", "unreadable", "cannot be read"),
    # the driver of an Ethernet port says Disabled when its cable is out
    (ROCE | down("Disabled"), "crit", "down", "link down (no carrier)"),
    (ROCE | down("Disabled", interface_up=False), "warn", "disabled", "switched off"),
    (ROCE | {"interface_up": None}, "ok", "active", "active"),
    ({"netdev": "ib0", "interface_up": False}, "ok", "active", "active"),
]


def hosts_of(fleet: "Fleet", cells: "list[dict[str, Cell]]") -> Host:
    return Host(
        fleet,
        "gpu-001",
        [Port(f"mlx5_{n}", f"g{n}", f"0000:{n + 16:x}:00.0", cells=one) for n, one in enumerate(cells)],
    )


def test_F04_what_a_port_in_use_may_say(fleet: "Fleet", judge: Judge) -> None:
    host = hosts_of(fleet, [case[0] for case in SAID])
    run([host], 10)
    for port, (cells, verdict, code, says) in zip(host.ports, SAID, strict=True):
        found = fleet.find(DOWN, port.entity)
        assert found[:2] == (verdict, code), cells
        assert says in found[3]


@pytest.mark.drill("port_down", "near_miss")
def test_a_card_without_rdma_is_a_warning(fleet: "Fleet", judge: Judge) -> None:
    port = Port("ens3", None, "0000:00:03.0", cells=PLAIN | down(None))
    run([Host(fleet, "cpu-001", [port])], 10)
    assert fleet.find(DOWN, port.entity)[:2] == ("warn", "down")


@pytest.mark.drill("port_down", "fires")
def test_down_fires_after_three_samples_and_clears(store: Store, fleet: "Fleet") -> None:
    judge = one(store, fleet, DOWN)
    port = Port("mlx5_3", "g3", "0000:5e:00.0")
    host = Host(fleet, "gpu-001", [port])
    run([host], 20, judge)
    port.cells = down()
    run([host], 20, judge)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    run([host], 10, judge)
    assert fleet.findings() == [("gpu-001", port.entity, "firing", "crit", "down")]
    port.cells = {}
    run([host], 100, judge, every=2)
    assert fleet.findings() == []


def test_one_cause_is_one_incident(store: Store, fleet: "Fleet") -> None:
    chosen = [rule for rule in load_rules() if rule.name in (DOWN, RATE)]
    fleet.judge = judge = Judge(store, JudgeSettings(), rules=chosen)
    ports = [Port(f"mlx5_{n}", f"g{n}", f"0000:1{n}:00.0") for n in range(3)]
    host = Host(fleet, "gpu-001", ports)
    run([host], 20, judge)
    ports[0].cells = ports[1].cells = down()  # their switch restarts
    run([host], 40, judge)
    assert [row[:2] for row in fleet.incidents()] == [(1, DOWN)]
    ports[0].cells, ports[1].cells = {"rate_gbps": 200.0, "lanes": 2}, {}
    run([host], 60, judge)
    assert [row[1] for row in fleet.findings()] == [ports[0].entity] * 2 + [ports[1].entity]
    assert [row[:2] for row in fleet.incidents()] == [(1, DOWN)]


def test_all_devices_are_gone_at_once(store: Store, fleet: "Fleet") -> None:
    may_leave = Scope(limit={DOWN: {"must_stay": Limit(value=0)}})
    one(store, fleet, DOWN, JudgeSettings(node={"gpu-002": may_leave}))
    other = Host(fleet, "gpu-002", [Port("mlx5_0", "g2", "0000:18:00.0")])
    host = Host(
        fleet, "gpu-001", [Port("mlx5_0", "g0", "0000:18:00.0"), Port("mlx5_1", "g1", "0000:40:00.0")]
    )
    run([host, other], 20)
    for port in (*host.ports, *other.ports):
        port.listed = False
    run([host, other], 10)
    said = [fleet.find(DOWN, port.entity, "gpu-001")[:2] for port in host.ports]
    assert said == [("crit", "gone")] * 2
    assert fleet.find(DOWN, "port:mlx5_0/1", "gpu-002")[:2] == ("n/a", "away")


def test_a_port_that_is_gone_and_one_that_was_renamed(fleet: "Fleet", judge: Judge) -> None:
    lost, renamed, swapped, moved = (
        Port(f"mlx5_{n}", f"g{n}", f"0000:{n}8:00.0") for n in range(4)
    )  # fmt: skip
    host = Host(fleet, "gpu-001", [lost, renamed, swapped, moved])
    run([host], 10)
    fleet.at += timedelta(minutes=1)
    for port in host.ports:
        host.hide(port)
    # mlx5_0 died, mlx5_1 goes by its name, mlx5_2 was replaced in its slot, mlx5_3 moved to another slot
    host.ports = [
        Port("mlx5_0", "g1", "0000:18:00.0"),
        Port("mlx5_2", "new", "0000:28:00.0", shown=None, cells=down()),
        Port("mlx5_3", "g3", "0000:78:00.0"),
    ]
    run([host], 20)  # the inventory is not in yet
    assert fleet.find(DOWN, lost.entity)[:2] == ("crit", "gone")
    assert fleet.find(DOWN, renamed.entity)[:2] == ("ok", "active")
    for port in host.ports:
        host.show(port, fleet.at)
    run([host], 10)
    found = fleet.sql(f"SELECT entity, verdict, code FROM find_{DOWN}(TIMESTAMP '{fleet.at}') ORDER BY 1")
    assert found == [
        ("port:0000:08:00.0/1", "crit", "gone"),
        ("port:mlx5_0/1", "ok", "active"),
        ("port:mlx5_2/1", "crit", "down"),
        ("port:mlx5_3/1", "ok", "active"),
    ]


@pytest.mark.drill("port_down", "not_judged")
@pytest.mark.drill("port_flapping", "not_judged")
@pytest.mark.drill("port_rate", "not_judged")
def test_nothing_was_read(fleet: "Fleet", judge: Judge) -> None:
    silent, failing, late, never = (
        Host(fleet, f"gpu-{n}", [Port("mlx5_0", "g", "0000:18:00.0")]) for n in range(4)
    )
    with fleet.store.transaction() as write:
        write.execute("DELETE FROM live.probe WHERE node = 'gpu-3' AND probe = 'port'")
    never.up = False
    run([silent, failing, late], 20)
    silent.up, failing.ok = False, False
    run([silent, failing, late], 50)
    late.ports[0].listed = False
    # the run says one row more than has arrived
    late.insert("agent", [{"ts": fleet.at, "received_at": fleet.at, "node": "gpu-2", "boot_id": "b",
                           "probe": "port", "ok": True, "error": "", "rows": 1}])  # fmt: skip
    said = {
        rule: [fleet.find(rule, "port:mlx5_0/1", host.name)[:2] for host in (silent, failing, late, never)]
        for rule in (DOWN, RATE, FLAPPING)
    }
    assert said[DOWN] == [
        ("unknown", "no_samples"), ("unknown", "unreadable"), ("ok", "active"), ("n/a", "no_probe")
    ]  # fmt: skip
    assert said[RATE][0] == said[FLAPPING][0] == ("unknown", "no_samples")
    assert said[RATE][3] == said[FLAPPING][3] == ("n/a", "no_probe")


def test_declared_ports(store: Store, fleet: "Fleet") -> None:
    limit = {DOWN: {"ports": Limit(value=2)}}
    judge = one(store, fleet, DOWN, JudgeSettings(node={"gpu-001": Scope(limit=limit)}))
    known, never = Port("mlx5_0", "g0", "0000:18:00.0"), Port("mlx5_1", "g1", "0000:40:00.0", shown=None)
    never.cells = down()
    host = Host(fleet, "gpu-001", [known, never])
    other = Host(fleet, "gpu-002", [])
    run([host, other], 10)
    judge.compile(fleet.at)
    assert fleet.find(DOWN, "node:")[:2] == ("crit", "too_few")
    assert "1 of 2" in fleet.find(DOWN, "node:")[3]
    known.cells = down()  # is judged by itself, and counts once
    never.cells = {}
    run([host, other], 10)
    assert fleet.find(DOWN, "node:")[:2] == ("ok", "enough")


def test_accepting_the_inventory_starts_anew(fleet: "Fleet", judge: Judge) -> None:
    port = Port("mlx5_0", "g0", "0000:18:00.0", cells=down())
    host = Host(fleet, "gpu-001", [port])
    run([host], 10)
    assert fleet.find(DOWN, port.entity)[:2] == ("crit", "down")
    host.hide(port)
    port.shown = None
    host.show(port, fleet.at)
    run([host], 60)
    assert fleet.find(DOWN, port.entity)[:2] == ("crit", "down")
    host.insert("expected", [{"node": "gpu-001", "state": "accepted", "set_by": "ann", "set_at": fleet.at,
                              "reason": ""}])  # fmt: skip
    run([host], 10)
    assert fleet.find(DOWN, port.entity)[:2] == ("n/a", "not_expected")


RATES: "list[tuple[dict[str, Cell], str, str, str]]" = [
    ({}, "ok", "full", "400 Gb/s"),
    ({"rate_gbps": 200.0, "lanes": 2}, "crit", "slow", "200 Gb/s (2X NDR) instead of 400 Gb/s"),
    ({"rate_gbps": 200.0, "signalling": "HDR"}, "crit", "slow", "200 Gb/s (4X HDR) instead of 400 Gb/s"),
    ({"rate_gbps": 300.0, "lanes": 3}, "warn", "slow", "300 Gb/s (3X NDR) instead of 400 Gb/s"),
    ({"rate_gbps": 800.0, "signalling": "XDR"}, "ok", "full", "800 Gb/s"),
    ({"rate_gbps": None}, "unknown", "unreadable", "cannot be read"),
    (PLAIN | {"rate_gbps": 10.0}, "crit", "slow", "10 instead of 400 Gb/s"),
    (down(), "n/a", "not_active", "not active"),
]


@pytest.mark.drill("port_rate", "near_miss")
def test_rate(fleet: "Fleet", judge: Judge) -> None:
    host = hosts_of(fleet, [case[0] for case in RATES])
    run([host], 10)
    for port, (cells, verdict, code, says) in zip(host.ports, RATES, strict=True):
        found = fleet.find(RATE, port.entity)
        assert found[:2] == (verdict, code), cells
        assert says in found[3]


@pytest.mark.drill("port_rate", "fires")
def test_a_declared_rate_and_a_slow_card(store: Store, fleet: "Fleet") -> None:
    judge = one(store, fleet, RATE, JudgeSettings(limit={RATE: {"rate_gbps": Limit(value=400)}}))
    fresh = Port("mlx5_0", "g0", "0000:18:00.0", shown=200, cells={"rate_gbps": 200.0, "signalling": "HDR"})
    eth = Port("mlx5_8", "g8", "0000:2a:00.0", shown=100, cells=ROCE | {"rate_gbps": 100.0})
    plain = Port("eno1", None, "0000:01:00.0", shown=10, cells=PLAIN | {"rate_gbps": 1.0})
    host = Host(fleet, "gpu-001", [fresh, eth, plain])
    run([host], 60, judge, every=2)
    assert fleet.findings() == [
        ("gpu-001", plain.entity, "firing", "warn", "slow"),
        ("gpu-001", fresh.entity, "firing", "crit", "slow"),
    ]


@pytest.mark.drill("port_flapping", "fires")
def test_flapping(store: Store, fleet: "Fleet") -> None:
    judge = one(store, fleet, FLAPPING)
    wild, tired, once, eth = (Port(f"mlx5_{n}", f"g{n}", f"0000:1{n}:00.0") for n in range(4))
    eth.cells = dict(ROCE)
    host = Host(fleet, "gpu-001", [wild, tired, once, eth])
    run([host], 130, judge, every=13)
    for _ in range(3):
        wild.cells["link_downed_total"] = int(str(wild.cells.get("link_downed_total", 0))) + 1
        eth.cells["carrier_changes_total"] = int(str(eth.cells["carrier_changes_total"])) + 2
        run([host], 30)
    run([host], 20, judge, every=2)
    assert [row[1:] for row in fleet.findings()] == [
        (wild.entity, "firing", "crit", "flapping"), (eth.entity, "firing", "crit", "flapping")
    ]  # fmt: skip
    once.cells["link_downed_total"] = 1
    for count in range(3):
        tired.cells["link_downed_total"] = 1 + count
        run([host], 240, judge, every=12)
    states = {row[1]: row[2:] for row in fleet.findings()}
    assert states[tired.entity] == ("firing", "warn", "went_down")
    assert states[once.entity][0] == "pending"
    assert states[wild.entity][0] == "recovering"


@pytest.mark.drill("port_errors", "near_miss", "not_judged")
@pytest.mark.drill("port_flapping", "near_miss")
def test_resets_and_reboots_are_no_flaps_and_no_errors(fleet: "Fleet", judge: Judge) -> None:
    high: dict[str, Cell] = {"link_downed_total": 7, "symbol_errors_total": 90_000}
    reset, bad_sample, booted, blind = (
        Port(f"mlx5_{n}", f"g{n}", f"0000:1{n}:00.0", cells=dict(high)) for n in range(4)
    )
    host = Host(fleet, "gpu-001", [reset, bad_sample, blind])
    other = Host(fleet, "gpu-002", [booted])
    blind.cells |= {"link_downed_total": None}
    run([host, other], 130)
    reset.cells, other.boot = {}, "boot-2"
    booted.cells = {"link_downed_total": 1, "symbol_errors_total": 4}
    bad_sample.cells = {}
    run([host, other], 10)
    bad_sample.cells, reset.cells = dict(high), {"link_downed_total": 0, "symbol_errors_total": 1}
    for _ in range(13):
        run([host, other], 10)
        if fleet.at.second % 30:
            continue
        for port in (reset, bad_sample, booted, blind):
            for rule in (FLAPPING, ERRORS):
                assert fleet.find(rule, port.entity)[0] in ("ok", "unknown"), (rule, port)


def test_flaps_of_a_port_that_counts_none(fleet: "Fleet", judge: Judge) -> None:
    port = Port("irdma0", "g0", "0000:18:00.0", cells={"link_downed_total": None})
    host = Host(fleet, "gpu-001", [port])
    run([host], 60)
    port.cells |= down()
    run([host], 10)
    port.cells = {"link_downed_total": None}
    run([host], 80)
    assert fleet.find(FLAPPING, port.entity)[:2] == ("warn", "went_down")


GROWTH = [
    ("symbol_errors_total", 1, "symbol_errors"),
    ("link_error_recovery_total", 1, "link_recoveries"),
    ("rcv_errors_total", 110, "rcv_errors"),
    ("xmit_discards_total", 1100, "xmit_discards"),
    ("local_link_integrity_errors_total", 1, "link_integrity"),
    ("excessive_buffer_overrun_errors_total", 1, "buffer_overruns"),
    ("local_ack_timeout_err_total", 11, "ack_timeouts"),
    ("rx_crc_errors_total", 11, "crc_errors"),
    ("rcv_errors_total", 90, "clean"),
    ("xmit_discards_total", 900, "clean"),
    ("local_ack_timeout_err_total", 9, "clean"),
]


def test_errors(fleet: "Fleet", judge: Judge) -> None:
    host = hosts_of(fleet, [{} for _ in GROWTH])
    for count in range(26):
        for port, (column, per_sample, _) in zip(host.ports, GROWTH, strict=True):
            port.cells[column] = count * per_sample
        run([host], 10)
    for port, (_, _, code) in zip(host.ports, GROWTH, strict=True):
        assert fleet.find(ERRORS, port.entity)[:2] == ("ok" if code == "clean" else "warn", code)


@pytest.mark.drill("port_errors", "fires")
def test_errors_fire_warn_and_clear(store: Store, fleet: "Fleet") -> None:
    judge = one(store, fleet, ERRORS)
    port, silent = Port("mlx5_0", "g0", "0000:18:00.0"), Port("irdma0", "g1", "0000:19:00.0")
    silent.cells = {name: None for name in WELL if name.endswith("_total")}
    host = Host(fleet, "gpu-001", [port, silent])
    for count in range(40):
        port.cells["symbol_errors_total"] = count * 50
        run([host], 10, judge if count % 12 == 11 else None)
    run([host], 20, judge, every=2)
    assert fleet.findings() == [("gpu-001", port.entity, "firing", "warn", "symbol_errors")]
    assert fleet.find(ERRORS, silent.entity)[:2] == ("unknown", "unreadable")
    said: dict[str, Cell] = {
        "node": "gpu-001", "entity": silent.entity, "probe": "port", "reason": "not_supported", "code": "",
        "since": fleet.at,
    }  # fmt: skip
    for metric in ("symbol_errors_total", "rcv_errors_total", "rx_crc_errors_total"):
        host.insert("capability", [said | {"metric": metric}])
    assert fleet.find(ERRORS, silent.entity)[:2] == ("n/a", "not_supported")
    run([host], 960, judge, every=3)
    assert fleet.findings() == []


def test_a_counter_that_is_not_read_clears_nothing(store: Store, fleet: "Fleet") -> None:
    judge = one(store, fleet, ERRORS)
    port = Port("mlx5_0", "g0", "0000:18:00.0")
    host = Host(fleet, "gpu-001", [port])
    for count in range(40):
        port.cells["rcv_errors_total"] = count * 500
        run([host], 10, judge if count % 3 == 2 else None)
    firing = [("gpu-001", port.entity, "firing", "warn", "rcv_errors")]
    assert fleet.findings() == firing
    port.cells["rcv_errors_total"] = None
    run([host], 960, judge, every=3)
    assert fleet.find(ERRORS, port.entity)[:2] == ("unknown", "not_read")
    assert fleet.findings() == firing
