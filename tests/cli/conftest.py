"""A collector in this process: a small store, a clock that stands still, the real gRPC service."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb
import grpc
import pytest
from click.testing import CliRunner, Result

from gpufleet.metric import Type
from gpufleet.v1 import fleet_pb2_grpc
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_cli.main import fleet
from gpufleet_collector import rules
from gpufleet_collector.bench_runs import BenchRuns
from gpufleet_collector.documents import Health
from gpufleet_collector.findings import Policy
from gpufleet_collector.limits import JudgeSettings, compile_limits
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.standard import STANDARD
from gpufleet_collector.store import LIVE, Column, Store

NOW = datetime(2026, 11, 30, 12, 0, 0)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


MODEL = "NVIDIA H100 80GB HBM3"


def card(node: str, index: int) -> tuple[str, str, str, str]:
    """UUID, serial, PCI address, slot."""
    return gpu_uuid(node, index), f"16{index:03}{node[-3:]}", f"0000:{0x1B + index:02x}:00.0", f"{index + 1}"


def gpu_uuid(node: str, index: int) -> str:
    return f"GPU-{node.encode().hex()[-12:]:0>12}-{index:04}"


Say = Callable[[str, pb.Directive], Iterable[str | pb.DirectiveResult]]


@dataclass
class Asked:
    """What an agent says about a directive."""

    said: "asyncio.Queue[str | pb.DirectiveResult]" = field(default_factory=asyncio.Queue)


class Agents:
    """Agents that answer what a test says."""

    def __init__(self) -> None:
        self.say: dict[str, Say] = {}
        self.asked: list[tuple[str, pb.RunBench]] = []

    def connected(self, node: str) -> bool:
        return node in self.say

    @contextmanager
    def ask(self, node: str, directive: pb.Directive) -> Iterator[Asked | None]:
        self.asked.append((node, directive.run_bench))
        asked = Asked()
        for word in self.say[node](node, directive):
            asked.said.put_nowait(word)
        yield asked


@dataclass
class Seed:
    """Fills a store as agents and judge would."""

    store: Store
    incidents: int = 0
    findings: int = 0
    agents: "Agents" = field(default_factory=lambda: Agents())
    health: Health = field(default_factory=lambda: Health(True, "", 0.4, False, ""))

    def node(
        self,
        name: str,
        gpus: int = 8,
        expected: int | None = None,
        seen_s: float | None = 2.0,
        state: str = "accepted",
        lost: Sequence[int] = (),
    ) -> None:
        """A node with cards, seen `seen_s` ago (None = never), and its expectation ("" = none)."""
        with self.store.transaction() as write:
            if seen_s is not None:
                self._hello(write, name, seen_s)
            for index in range(gpus if seen_s is not None else 0):
                write.execute(
                    "INSERT INTO live.inventory "
                    f"VALUES (?, ?, 'gpu', ?, ?, ?, '{MODEL}', ?, ?, '{{}}', ?, NULL)",
                    [name, f"gpu:{gpu_uuid(name, index)}", *card(name, index), index, ago(86400)],
                )
                self._sample(write, name, index, seen_s or 0.0, index in lost)
            count = gpus if expected is None else expected
            for index in range(count if state else 0):
                uuid, serial, pci, slot = card(name, index)
                write.execute(
                    f"INSERT INTO live.expected VALUES (?, ?, ?, ?, '{MODEL}', ?, ?, 'ops', ?, '')",
                    [name, uuid, serial, pci, slot, state, ago(86400)],
                )
            if state and not count:
                write.execute(
                    "INSERT INTO live.expected VALUES (?, NULL, NULL, NULL, NULL, NULL, ?, 'ops', ?, '')",
                    [name, state, ago(86400)],
                )

    def _hello(self, write: duckdb.DuckDBPyConnection, name: str, seen_s: float) -> None:
        write.execute(
            "INSERT INTO live.node VALUES (?, ?, ?, 'boot-1', 'spool-1', '0.1.0', '', ?, ?)",
            [name, name, f"machine-{name}", ago(86400), ago(3600)],
        )
        write.execute(
            "INSERT INTO live.ledger VALUES (?, 'spool-1', 1, 'd', 'boot-1', ?, 0, 'live', 8)",
            [name, ago(seen_s)],
        )
        write.execute(
            "INSERT INTO live.inventory (node, entity, kind, attributes, valid_from) "
            """VALUES (?, 'node:', 'node', '{"driver": "580.65", "kernel": "6.8.0"}', ?)""",
            [name, ago(86400)],
        )
        write.execute("INSERT INTO live.probe VALUES (?, 'gpu', 5.0)", [name])

    def _sample(
        self, write: duckdb.DuckDBPyConnection, name: str, index: int, seen_s: float, lost: bool
    ) -> None:
        values: list[object] = [None] * 6 if lost else [97.0, 1755.0 + index, 612.5, 58.0 + index, 5, 16]
        write.execute(
            "INSERT INTO live.gpu (ts, received_at, node, boot_id, gpu_uuid, gpu_index, pci, state, "
            "util_pct, sm_clock_mhz, power_w, temperature_c, pcie_gen, pcie_width) "
            "VALUES (?, ?, ?, 'boot-1', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                ago(seen_s), ago(seen_s), name, gpu_uuid(name, index), index, f"0000:{0x1b + index:02x}:00.0",
                "lost" if lost else "ok", *values,
            ],
        )  # fmt: skip

    def finding(
        self,
        rule: str,
        node: str,
        entity: str,
        verdict: str,
        code: str,
        reason: str,
        age: float = 60.0,
        incident: str = "",
        state: str = "firing",
    ) -> int:
        """A finding and, with a title, its incident; returns the incident's number."""
        self.findings += 1
        number = None
        with self.store.transaction() as write:
            if incident:
                self.incidents += 1
                number = self.incidents
                write.execute(
                    "INSERT INTO live.incident VALUES (?, ?, ?, ?, 'open', ?, ?, ?, ?, NULL, NULL, 0)",
                    [number, rule, node, entity, verdict, incident, ago(age), ago(5)],
                )
                write.execute(
                    "INSERT INTO live.incident_log VALUES (?, ?, 'opened', ?, ?)",
                    [number, ago(age), self.findings, f"{rule} fired: {reason}"],
                )
            write.execute(
                "INSERT INTO live.finding (id, rule, node, entity, state, verdict, code, observed, expected, "
                "unit, reason, detail, evidence, began_at, fired_at, recovering_at, resolved_at, cause, "
                "last_evidence_at, updated_at, incident) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 1103, 1755, 'MHz', ?, '{}', ?, ?, ?, "
                "NULL, NULL, NULL, ?, ?, ?)",
                [
                    self.findings, rule, node, entity, state, verdict, code, reason,
                    json.dumps([[ago(at).isoformat(), verdict, code] for at in (5, age)]),
                    ago(age), ago(age), ago(5), ago(5), number or self.incidents or None,
                ],
            )  # fmt: skip
        return number or self.incidents

    def looks(self, node: str, rows: int, seen_s: float = 5.0) -> None:
        """The agent of `node` looked for processes and found so many."""
        self._tables()
        with self.store.transaction() as write:
            write.execute("INSERT INTO live.probe VALUES (?, 'job', 30.0)", [node])
            write.execute(
                "INSERT INTO live.agent (ts, received_at, node, boot_id, probe, ok, rows) "
                "VALUES (?, ?, ?, 'boot-1', 'job', true, ?)",
                [ago(seen_s), ago(seen_s), node, rows],
            )

    def job(
        self,
        node: str,
        job_id: str | None,
        cards: Iterable[int],
        first_rank: int = 0,
        kind: str | None = "slurm",
        seen_s: float = 5.0,
    ) -> None:
        """A process of the job on each of these cards, in the newest look."""
        found = list(cards)
        self.looks(node, len(found), seen_s)
        slurm = kind == "slurm"
        with self.store.transaction() as write:
            for at, index in enumerate(found):
                row: dict[str, object] = {
                    "ts": ago(seen_s), "received_at": ago(seen_s), "node": node, "boot_id": "boot-1",
                    "gpu_uuid": gpu_uuid(node, index), "gpu_index": index, "pid": 51200 + index,
                    "job_id": job_id, "job_kind": kind, "job_step": "0" if slurm else None,
                    "user": "ana" if job_id else None, "uid": 2001 if job_id else None,
                    "rank": first_rank + at if slurm else None, "world": 16 if slurm else None,
                    "command": "python3" if job_id else None, "container": "", "mem_used_bytes": 68 << 30,
                }  # fmt: skip
                marks = ", ".join("?" for _ in row)
                write.execute(f"INSERT INTO live.job ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    def _tables(self) -> None:
        if "job" in self.store.tables:
            return
        with self.store.transaction() as write:
            for table in ("job", "agent"):
                kinds = STANDARD[table]
                columns = [
                    Column(name, kind, "", "gauge", "", None, None, "") for name, kind in kinds.items()
                ]
                self.store.ensure_probe(write, table, columns)
        rules.install(self.store, ())

    def bench(
        self, node: str, index: int | None, value: float | None, age: float = 60.0, **more: object
    ) -> None:
        """A run of `h2d` on a card, or of what `more` says on the host."""
        self._bench_table()
        row: dict[str, object] = {
            "ts": ago(age), "received_at": ago(age), "node": node, "boot_id": "boot-1",
            "entity": "node:" if index is None else self.entity(node, index), "peer": "", "bench": "h2d",
            "version": "1", "convention": "copied_once", "params_hash": "ab12",
            "value": value, "unit": "GB/s",
            "status": "ok" if value is not None else "skipped", "reason": "", "repeats": 5, "spread": 0.001,
            "seconds": 0.4, "gpu_seconds": 0.3, "lease": "", "driver": "580.65", "link": "pcie5x16",
        } | more  # fmt: skip
        marks = ", ".join("?" for _ in row)
        with self.store.transaction() as write:
            write.execute(f"INSERT INTO live.bench ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    def baseline(self, node: str, index: int, value: float, state: str = "frozen", **more: object) -> None:
        """What is normal for `h2d` of a card."""
        row: dict[str, object] = {
            "node": node, "entity": self.entity(node, index), "key": "h2d/1/copied_once/ab12/pcie5x16",
            "value": value, "spread": 0.002, "n": 48, "epoch": "580.65", "state": state,
            "set_by": "collector", "set_at": ago(86400), "reason": "learned from ok runs",
        } | more  # fmt: skip
        marks = ", ".join("?" for _ in row)
        with self.store.transaction() as write:
            write.execute(
                f"INSERT INTO live.baseline ({', '.join(row)}) VALUES ({marks})", list(row.values())
            )

    def _bench_table(self) -> None:
        if "bench" in self.store.tables:
            return
        with self.store.transaction() as write:
            columns = [
                Column(name, kind, "", "gauge", "", None, None, "")
                for name, kind in STANDARD["bench"].items()
            ]
            self.store.ensure_probe(write, "bench", columns)
        rules.install(self.store, ())

    def limits(self) -> None:
        """The rules' limits, as the judge writes them."""
        made = rules.load_rules()
        with self.store.reader(LIVE) as read:
            nodes = [str(row[0]) for row in read.execute("SELECT node FROM live.node").fetchall()]
        with self.store.transaction() as write:
            pairs = [(node, model) for node in nodes for model in (MODEL, "")]
            compile_limits(write, made, JudgeSettings(), pairs)

    def entity(self, node: str, index: int) -> str:
        return f"gpu:{gpu_uuid(node, index)}"

    def rule(self, name: str, title: str) -> None:
        with self.store.transaction() as write:
            write.execute(
                "INSERT INTO live.rule VALUES (?, ?, 'gpu', ?, 60, '3 of 4', 300, false, true, 'ok', '', ?, "
                "0.01, 62, 0, 2, 0, 0)",
                [name, title, name, ago(10)],
            )


def new_seed() -> Seed:
    store = Store.open(None)
    kinds = {
        "gpu_uuid": Type.STRING, "gpu_index": Type.I64, "pci": Type.STRING, "state": Type.STRING,
        "util_pct": Type.F64, "sm_clock_mhz": Type.F64, "power_w": Type.F64, "temperature_c": Type.F64,
        "pcie_gen": Type.U64, "pcie_width": Type.U64,
    }  # fmt: skip
    with store.transaction() as write:
        store.ensure_probe(
            write,
            "gpu",
            [Column(name, kind, "", "gauge", "", None, None, "") for name, kind in kinds.items()],
        )
    rules.install(store, ())
    seed = Seed(store)
    for name, title in (
        ("gpu_missing", "GPU missing"),
        ("gpu_downclocked", "Card runs below its clock under load"),
        ("agent_silent", "Agent silent"),
    ):
        seed.rule(name, title)
    return seed


@pytest.fixture
def seed() -> Iterator[Seed]:
    made = new_seed()
    yield made
    made.store.close()


class Served:
    """A collector that answers on `address`."""

    def __init__(self, seed: Seed) -> None:
        self.seed = seed
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(90)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server()
        policies = {rule.name: Policy.of(rule, JudgeSettings()) for rule in rules.load_rules()}
        servicer = FleetServicer(
            self.seed.store, policies, lambda: self.seed.health, lambda: NOW, runs=BenchRuns(self.seed.agents)
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(90)


@pytest.fixture
def served(seed: Seed) -> Iterator[Served]:
    made = Served(seed)
    yield made
    made.close()


Run = Callable[..., Result]


@pytest.fixture
def run(served: Served, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("status", "-o", "json")`: the command line against the collector, folded at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GPUFLEET_SERVER", served.address)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def invoke(*words: str, **more: str) -> Result:
        return CliRunner().invoke(fleet, list(words), prog_name="fleet", **more)  # type: ignore[arg-type]

    return invoke
