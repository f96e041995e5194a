"""A small fleet written straight into the store, as agents and ingest would have, and a judge over it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pytest

from gpufleet.metric import Metric
from gpufleet_agent import benches
from gpufleet_agent.probes import PROBES as SAMPLED
from gpufleet_agent.probes import agent
from gpufleet_collector import rules as rules_module
from gpufleet_collector import store as store_module
from gpufleet_collector import views
from gpufleet_collector.judge import Judge, PassReport
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import Rule, load_rules, quoted
from gpufleet_collector.store import LIVE, Column, Store

START = datetime(2026, 3, 1, 12, 0, 0)
H100 = "NVIDIA H100 80GB HBM3"
PROBES: dict[str, tuple[Metric, ...]] = {
    **{name: probe.METRICS for name, probe in SAMPLED.items()},
    "agent": agent.METRICS,
    "bench": benches.METRICS,
}

Cell = float | int | str | bool | datetime | None
Row = Mapping[str, Cell]


def columns(metrics: Sequence[Metric]) -> list[Column]:
    return [
        Column(m.name, m.type, str(m.unit), m.kind.name.lower(), m.help, m.low, m.high, m.rollup)
        for m in metrics
    ]


def put(store: Store, table: str, rows: Sequence[Row]) -> None:
    """Insert rows of one shape."""
    put_all(store, {table: rows})


def put_all(store: Store, tables: Mapping[str, Sequence[Row]]) -> None:
    """Insert rows of several tables, each of one shape, together: half of a test's time goes here."""
    with store.transaction() as write:
        for table, rows in tables.items():
            if not rows:
                continue
            names = list(rows[0])
            into = f"INSERT INTO live.{table} ({', '.join(names)})"
            if len(rows) > 4:  # a list per column: the engine is slow to read a statement of many marks
                lists = ", ".join(["unnest(?)"] * len(names))
                write.execute(f"{into} SELECT {lists}", [[row[name] for row in rows] for name in names])
            else:
                marks = ", ".join([f"({', '.join('?' for _ in names)})"] * len(rows))
                write.execute(f"{into} VALUES {marks}", [row[name] for row in rows for name in names])


@dataclass
class Card:
    node: str
    index: int
    uuid: str
    serial: str
    pci: str
    model: str = H100
    util: float | None = 95.0
    clock: float = 1950.0
    reasons: int = 0
    brake_s: float = 0.0
    heat_s: float = 0.0
    cap_s: float = 0.0
    state: str = "ok"
    listed: bool = True
    on_bus: bool = True
    temperature: float | None = 60.0
    margin: float | None = None
    epoch: int = 1
    health: dict[str, Cell] = field(default_factory=dict)
    """What it says differently from a well card, once a minute where its node sends `gpu_health`."""
    link: dict[str, Cell] = field(default_factory=dict)
    """What the driver says of its PCIe link."""
    said: dict[str, Cell] = field(default_factory=dict)
    """What its samples say differently from a well card's."""
    bus: dict[str, Cell] = field(default_factory=dict)
    """What the bus says differently from a well card, once a minute."""

    @property
    def entity(self) -> str:
        return f"gpu:{self.uuid}"


@dataclass
class Node:
    name: str
    cards: list[Card]
    up: bool = True
    driver_error: str = ""
    offset_s: float = 0.0
    boot_id: str = "boot-1"
    booted_at: datetime = START - timedelta(days=3)
    sent: int = 0
    health: bool = False
    devices: list[dict[str, Cell]] = field(default_factory=list)
    """What else is on the bus."""


@dataclass
class Fleet:
    """Nodes that send what their fields say, every five seconds, as long as they are up."""

    store: Store
    at: datetime = START
    nodes: dict[str, Node] = field(default_factory=dict)
    each_tick: Callable[["Fleet"], None] = lambda fleet: None
    judge: Judge | None = None

    def add(
        self,
        name: str,
        gpus: int = 8,
        expect: str | None = "accepted",
        hello: bool = True,
        health: bool = False,
    ) -> Node:
        cards = [
            Card(name, n, f"GPU-{name}-{n}", f"16500{len(self.nodes):02}{n:02}", f"0000:{0x10 + n:02x}:00.0")
            for n in range(gpus)
        ]
        node = self.nodes[name] = Node(name, cards, health=health)
        since = self.at - timedelta(hours=1)
        if hello:
            self.hello(node, since)
        if expect:
            rows: list[Row] = [
                {
                    "node": name,
                    "uuid": card.uuid,
                    "serial": card.serial,
                    "pci": card.pci,
                    "model": card.model,
                    "state": expect,
                    "set_by": "test",
                    "set_at": since,
                    "reason": "",
                }
                for card in cards
            ] or [{"node": name, "state": expect, "set_by": "test", "set_at": since, "reason": ""}]
            put(self.store, "expected", rows)
        return node

    def hello(self, node: Node, since: datetime) -> None:
        put(
            self.store,
            "node",
            [
                {
                    "node": node.name,
                    "claimed": node.name,
                    "machine_id": f"machine-{node.name}",
                    "boot_id": node.boot_id,
                    "spool_id": "s",
                    "agent_version": "1.0",
                    "conflict": "",
                    "first_seen": since,
                    "hello_at": self.at,
                }
            ],
        )
        put(
            self.store,
            "probe",
            [
                {"node": node.name, "probe": probe, "interval_s": every}
                for probe, every in (("gpu", 5.0), ("pci", 60.0), *(node.health * (("gpu_health", 60.0),)))
            ],
        )
        put(
            self.store,
            "inventory",
            [{"node": node.name, "entity": "node:", "kind": "node", "attributes": "{}", "valid_from": since}],
        )
        for card in node.cards:
            self.install(card, since)

    def install(self, card: Card, since: datetime) -> None:
        put(
            self.store,
            "inventory",
            [
                {
                    "node": card.node,
                    "entity": card.entity,
                    "kind": "gpu",
                    "uuid": card.uuid,
                    "serial": card.serial,
                    "pci": card.pci,
                    "model": card.model,
                    "gpu_index": card.index,
                    "attributes": "{}",
                    "valid_from": since,
                }
            ],
        )

    def learn(self, node: str, pci: str, at: datetime | None = None, **best: int) -> None:
        """What the agent told of a device's link for the inventory."""
        since = at or self.at - timedelta(hours=1)
        row: Row = {
            "node": node, "entity": f"pci:{pci}", "kind": "pci", "pci": pci, "valid_from": since,
            "attributes": json.dumps({name: str(value) for name, value in best.items()}),
        }  # fmt: skip
        put(self.store, "inventory", [row])

    def run(self, seconds: float, judge: Judge | None = None, every: float = 5) -> list[PassReport]:
        """Let time go by; with a judge, a pass every so many seconds (ticks take 5 s)."""
        reports = []
        passed = self.at
        until = self.at + timedelta(seconds=seconds)
        while self.at < until:
            self.at += timedelta(seconds=5)
            self.each_tick(self)
            self.send()
            if judge and (self.at - passed).total_seconds() >= every:
                passed = self.at
                reports.append(judge.run_pass(self.at))
        return reports

    def send(self) -> None:
        """One tick of every node that is up."""
        gpus: list[Row] = []
        runs: list[Row] = []
        bus: list[Row] = []
        hosts: list[Row] = []
        healths: list[Row] = []
        ledger: list[Row] = []
        for node in (node for node in self.nodes.values() if node.up):
            head: dict[str, Cell] = {
                "ts": self.at,
                "received_at": self.at,
                "node": node.name,
                "boot_id": node.boot_id,
            }
            node.sent += 1
            rows = [] if node.driver_error else [card for card in node.cards if card.listed]
            gpus += [{**head, **_sample(card)} for card in rows]
            ok = not node.driver_error
            runs.append(head | {"probe": "gpu", "ok": ok, "error": node.driver_error, "rows": len(rows)})
            if (self.at - START).total_seconds() % 60 == 0 or node.sent == 1:
                here = [card for card in node.cards if card.on_bus]
                seen: list[Row] = [{"pci": card.pci, **card.bus} for card in here]
                seen += node.devices
                bus += [{**head, **_device(device)} for device in seen]
                runs.append(head | {"probe": "pci", "ok": True, "error": "", "rows": len(seen)})
                healths += [{**head, **_health(card)} for card in rows if node.health]
            hosts.append(head | {"uptime_s": (self.at - node.booted_at).total_seconds()})
            ledger.append(
                {
                    "node": node.name,
                    "spool_id": "s",
                    "number": node.sent,
                    "digest": "d",
                    "boot_id": node.boot_id,
                    "received_at": self.at,
                    "offset_s": node.offset_s,
                    "lane": "live",
                    "rows": 1,
                }
            )
        put_all(
            self.store,
            {
                "gpu": gpus,
                "agent": runs,
                "pci": bus,
                "gpu_health": healths,
                "host": hosts,
                "ledger": ledger,
            },
        )

    def bench(self, entity: str, node: str, value: float | None, status: str = "ok", **more: Cell) -> None:
        row: dict[str, Cell] = {
            "ts": self.at,
            "received_at": self.at,
            "node": node,
            "boot_id": "boot-1",
            "entity": entity,
            "peer": "",
            "bench": "h2d",
            "version": "1",
            "convention": "copied_once",
            "params_hash": "ab12",
            "value": value,
            "unit": "GB/s",
            "status": status,
            "repeats": 5,
            "spread": 0.001,
            "link": "pcie5x16",
            "driver": "580",
        }
        put(self.store, "bench", [row | more])

    def event(
        self,
        node: Node,
        kind: str,
        code: str,
        entity: str,
        at: datetime | None = None,
        count: int = 1,
        message: str = "",
        boot_id: str | None = None,
        **detail: Cell,
    ) -> None:
        row: Row = {
            "ts": at or self.at, "received_at": self.at, "node": node.name,
            "boot_id": boot_id or node.boot_id, "entity": entity, "kind": kind, "code": code, "count": count,
            "message": message, "detail": json.dumps(detail),
        }  # fmt: skip
        put(self.store, "event", [row])

    def why_null(self, card: Card, probe: str, *metrics: str, reason: str = "not_supported") -> None:
        rows: list[Row] = [
            {"node": card.node, "entity": card.entity, "probe": probe, "metric": metric, "reason": reason,
             "code": "", "since": self.at - timedelta(hours=1)}
            for metric in metrics
        ]  # fmt: skip
        put(self.store, "capability", rows)

    def baseline(
        self, node: str, entity: str, key: str, value: float, state: str = "accepted", spread: float = 0.0
    ) -> None:
        row: Row = {
            "node": node, "entity": entity, "key": key, "value": value, "spread": spread, "n": 48,
            "epoch": "580", "state": state, "set_by": "ann", "set_at": self.at, "reason": "",
        }  # fmt: skip
        put(self.store, "baseline", [row])

    def sql(self, query: str, *given: Cell) -> list[tuple[Cell, ...]]:
        with self.store.reader(LIVE) as read:
            return read.execute(query, list(given)).fetchall()

    def find(self, rule: str, entity: str = "node:", node: str = "") -> tuple[str, str, datetime | None, str]:
        """(verdict, code, evidence_at, reason) of one entity now."""
        if self.judge:
            self.judge.compile(self.at)
        rows = self.sql(
            f"SELECT verdict, code, evidence_at, reason FROM find_{rule}(TIMESTAMP '{self.at}') "
            "WHERE entity = ? AND (node = ? OR ? = '')",
            entity,
            node,
            node,
        )
        assert len(rows) == 1, rows
        verdict, code, evidence_at, reason = rows[0]
        assert evidence_at is None or isinstance(evidence_at, datetime)
        return str(verdict), str(code), evidence_at, str(reason)

    def findings(self, rule: str = "") -> list[tuple[Cell, ...]]:
        """(node, entity, state, verdict, code) of every finding that is not resolved."""
        return self.sql(
            "SELECT node, entity, state, verdict, code FROM finding WHERE state <> 'resolved' "
            "AND (rule = ? OR ? = '') ORDER BY node, entity",
            rule,
            rule,
        )

    def incidents(self) -> list[tuple[Cell, ...]]:
        """(number, cause_rule, node, entity, state, severity)."""
        return self.sql(
            "SELECT number, cause_rule, node, entity, state, severity FROM incident ORDER BY number"
        )


def _sample(card: Card) -> Row:
    key: dict[str, Cell] = {
        "gpu_uuid": card.uuid,
        "gpu_index": card.index,
        "pci": card.pci,
        "state": card.state,
        "driver_epoch": card.epoch,
    }
    values: dict[str, Cell] = {
        "util_pct": card.util,
        "sm_clock_mhz": card.clock,
        "clock_reasons": card.reasons,
        "power_w": 600.0,
        "power_limit_w": 700.0,
        "hw_brake_s_total": card.brake_s,
        "hw_thermal_s_total": card.heat_s,
        "power_cap_s_total": card.cap_s,
        "temperature_c": card.temperature,
        "temperature_margin_c": card.margin,
        "pstate": 0,
        **dict.fromkeys(("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")),
        **card.link,
        **card.said,
    }
    if card.state != "ok":
        values = dict.fromkeys(values)
    return key | values


def _device(said: Row) -> Row:
    pci = str(said["pci"])
    parent = f"{pci[:5]}{int(pci[5:7], 16) - 1:02x}:01.0"
    values: dict[str, Cell] = {
        "device_kind": "gpu",
        "present": True,
        "gpu_uuid": None,
        "runtime_status": "active",
        "parent": parent,
        "path": f"0000:00:01.0/0000:01:00.0/{parent}",
        "path_links": f"0000:01:00.0 5x16/5x16, {pci} 5x16/5x16",
        "slowest": pci,
        "narrowest": pci,
        "aer_errors": "",
        "port_aer_errors": "",
    }
    for name in ("pcie_gen", "pcie_gen_max", "path_gen", "path_gen_max"):
        values[name] = 5
    for name in ("pcie_width", "pcie_width_max", "path_width", "path_width_max"):
        values[name] = 16
    for severity in ("corrected", "nonfatal", "fatal"):
        values |= {f"aer_{severity}_total": 0, f"port_aer_{severity}_total": 0}
    return {**values, **said}


def _health(card: Card) -> Row:
    key: dict[str, Cell] = {
        "gpu_uuid": card.uuid,
        "gpu_index": card.index,
        "pci": card.pci,
        "state": card.state,
        "driver_epoch": card.epoch,
    }
    values: dict[str, Cell] = {
        "recovery_action": "none",
        "ecc_corrected_total": 0,
        "ecc_uncorrectable_total": 0,
        "ecc_sram_threshold_exceeded": False,
        "remap_failed": False,
        "remap_pending": False,
        "retired_pages_pending": None,
        "retired_pages_corrected_total": None,
        "retired_pages_uncorrectable_total": None,
        "power_limit_default_w": 700.0,
        "power_limit_requested_w": 700.0,
        "memory_unrepairable": False,
        "channel_repair_pending": None,
        "tpc_repair_pending": None,
        "remap_banks_none": 0,
        "pcie_replay_total": 0,
        "pcie_correctable_total": 0,
        "pcie_nonfatal_total": 0,
        "pcie_fatal_total": 0,
        "slowdown_margin_c": -2.0,
        "slowdown_temperature_c": None,
        "driver_version": "580.95.05",
        "library_version": "580.95.05",
    }
    values |= card.health
    if card.state != "ok":
        values = dict.fromkeys(values)
    return key | values


def opened(folder: Path | None = None) -> Store:
    """A store in memory or in a folder, with the tables of all probes."""
    store = Store.open(folder / "fleet.duckdb" if folder else None)
    with store.transaction() as write:
        for probe, metrics in PROBES.items():
            store.ensure_probe(write, probe, columns(metrics))
    return store


@dataclass(frozen=True)
class Made:
    """A store's file with the tables of all probes, and the macros and views a judge made of all rules."""

    file: Path
    rules: Sequence[Rule]
    views: Mapping[str, str]
    """What `views.create` said."""

    def open(self) -> Store:
        """A store in memory that holds what the file holds."""

        def copied(path: Path | None) -> duckdb.DuckDBPyConnection:
            connection = connect(path)
            connection.execute(f"ATTACH {quoted(str(self.file))} AS made (READ_ONLY)")
            connection.execute("COPY FROM DATABASE made TO memory")
            return connection.execute("DETACH made")

        connect = store_module._connect
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "_connect", copied)
            return Store.open(None)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    store = opened(folder)
    judge = Judge(store, JudgeSettings())
    assert not any(judge.unmade(rule.name) for rule in load_rules())
    told = views.create(store)
    store.close()
    return Made(folder / "fleet.duckdb", load_rules(), told)


@pytest.fixture
def store(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store in memory as `opened` gives it, in which a judge finds its macros and views made.

    They are made once per process and copied: most tests take less time than making them. Once a table
    changed, or for a rule of another text, the test's own judge makes them as in every other store.
    """
    store = made.open()

    def install(where: Store, rules: Sequence[Rule], extra: Sequence[str] = ()) -> dict[str, str]:
        there = where is store and where.schema_version == 0 and all(rule in made.rules for rule in rules)
        return {rule.name: "" for rule in rules} if there else real_install(where, rules, extra)

    def create(where: Store) -> dict[str, str]:
        there = where is store and where.schema_version == 0
        return dict(made.views) if there else real_create(where)

    real_install, real_create = rules_module.install, views.create
    monkeypatch.setattr("gpufleet_collector.judge.install", install)
    monkeypatch.setattr(views, "create", create)
    yield store
    store.close()


@pytest.fixture
def new_fleet() -> Callable[[Path | None], Fleet]:
    """Makes further fleets, each with a store of its own, which the test closes."""
    return lambda folder: Fleet(opened(folder))


@pytest.fixture
def fleet(store: Store) -> Fleet:
    return Fleet(store)


@pytest.fixture
def rules() -> tuple[str, ...]:
    """The rules that `judge` runs; a test file overrides it."""
    return tuple(rule.name for rule in load_rules())


@pytest.fixture
def judge(store: Store, fleet: Fleet, rules: tuple[str, ...]) -> Judge:
    chosen = [rule for rule in load_rules() if rule.name in rules]
    fleet.judge = Judge(store, JudgeSettings(), rules=chosen)
    return fleet.judge


DRILLS = ("fires", "near_miss", "not_judged")


@pytest.fixture(autouse=True)
def _drilled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold a test to its `drill(rule, what, ...)` marks by what the rule really said while it ran.

    fires: a finding of it fired. near_miss: it judged something that never fired, while nothing of it fired
    at all or, among others that did, by name. not_judged: it said unknown or n/a.
    """
    drills = [(str(mark.args[0]), mark.args[1:]) for mark in request.node.iter_markers("drill")]
    if not drills:
        yield
        return
    said: dict[str, set[str]] = {}
    asked: set[tuple[str, str, str, str]] = set()
    fired: set[tuple[str, str, str]] = set()
    run_pass, find = Judge.run_pass, Fleet.find

    def noted_pass(self: Judge, as_of: datetime) -> PassReport:
        report = run_pass(self, as_of)
        for run in report.runs:
            said.setdefault(run.rule, set()).update(run.counts)
        fired.update(finding.key for finding in report.fired)
        return report

    def noted_find(
        self: Fleet, rule: str, entity: str = "node:", node: str = ""
    ) -> tuple[str, str, datetime | None, str]:
        found = find(self, rule, entity, node)
        said.setdefault(rule, set()).add(found[0])
        asked.add((rule, node, entity, found[0]))
        return found

    monkeypatch.setattr(Judge, "run_pass", noted_pass)
    monkeypatch.setattr(Fleet, "find", noted_find)
    yield
    for rule, kinds in drills:
        hit = {(node, entity) for name, node, entity in fired if name == rule}
        judged = said.get(rule, set())
        spared = any(
            name == rule and verdict == "ok" and (node, entity) not in hit
            and (node or entity not in {one for _, one in hit})
            for name, node, entity, verdict in asked
        )  # fmt: skip
        really = {
            "fires": bool(hit),
            "near_miss": spared or (not hit and bool(judged & {"ok", "warn", "crit"})),
            "not_judged": bool(judged & {"unknown", "n/a"}),
        }
        for kind in kinds:
            assert really[kind], (
                f"no drill of {rule} that {kind}: it said {sorted(judged)} and fired on {hit}"
            )
