"""How long `fleet status` takes for 1,000 nodes x 8 cards: in the collector, and at the prompt.

Method: a store in memory with ten minutes of samples every 5 s (960,000 rows of table gpu), expectations for
every card and 30 open incidents. The collector builds the document in the background ("build"); "call" is a
GetStatus over loopback, answered from the last build; "prompt" is a whole `fleet status` process, start of
Python included. Medians.

Run it alone: python tests/bench/status_latency.py
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import grpc
import msgspec

from gpufleet.metric import Type
from gpufleet.v1 import fleet_pb2, fleet_pb2_grpc
from gpufleet_collector import documents, rules
from gpufleet_collector.documents import Health
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.store import LIVE, Column, Store

NODES = 1000
GPUS = 8
MINUTES = 10
INCIDENTS = 30
HEALTH = Health(True, "", 0.1, False, "")


def measure(nodes: int = NODES, repeats: int = 20) -> dict[str, float]:
    """Medians in milliseconds, and sizes."""
    now = datetime.now(UTC).replace(tzinfo=None)
    store = seeded(nodes, now)
    try:
        whole = b""

        def build() -> None:
            nonlocal whole
            with store.reader(LIVE) as read:
                whole = msgspec.json.encode(documents.status(read, now, "bench", HEALTH))

        build_ms = _median_ms(build, max(3, repeats // 4))
        server = _Server(store, now)
        try:
            call_ms = _median_ms(lambda: _call(server.address), repeats)
            words = [sys.executable, "-m", "gpufleet_cli.main", "--server", server.address, "status"]
            prompt_ms = _median_ms(lambda: _run(words), max(3, repeats // 4))
        finally:
            server.close()
        help_ms = _median_ms(lambda: _run([sys.executable, "-m", "gpufleet_cli.main", "--help"]), 5)
    finally:
        store.close()
    return {
        "nodes": nodes,
        "gpus": nodes * GPUS,
        "document_bytes": len(whole),
        "build_ms": round(build_ms, 1),
        "call_ms": round(call_ms, 1),
        "prompt_ms": round(prompt_ms, 1),
        "help_ms": round(help_ms, 1),
    }


def seeded(nodes: int, now: datetime) -> Store:
    """A store with a busy fleet."""
    store = Store.open(None)
    kinds = dict(rules.GPU_COLUMNS)
    with store.transaction() as write:
        store.ensure_probe(
            write,
            "gpu",
            [Column(name, kind, "", "gauge", "", None, None, "") for name, kind in kinds.items()],
        )
    rules.install(store, ())
    values = {Type.F64: "50.0 + g", Type.I64: "g", Type.U64: "g", Type.STRING: "''", Type.BOOL: "true"}
    columns = {name: values[kind] for name, kind in kinds.items()}
    columns |= {"gpu_uuid": _UUID, "pci": _PCI, "state": "'ok'"}
    with store.transaction() as write:
        write.execute(
            f"INSERT INTO live.gpu (ts, received_at, node, boot_id, {', '.join(columns)}) "
            f"SELECT $now - to_seconds(t * 5) AS sampled, sampled, {_NODE}, 'b', "
            f"{', '.join(columns.values())} "
            f"FROM {_ticks()}, {_cards(nodes)} ORDER BY t DESC, n, g",
            {"now": now},
        )
        for statement in _identities(nodes):
            write.execute(statement, {"at": now - timedelta(minutes=5)})
    return store


_NODE = "format('gpu-{:04}', n)"
_UUID = "format('GPU-{:04}-{}', n, g)"
_ENTITY = f"'gpu:' || {_UUID}"
_SERIAL = "format('16{:04}{}', n, g)"
_PCI = "format('0000:{:02x}:00.0', g + 27)"


def _nodes(nodes: int) -> str:
    return f"range({nodes}) a(n)"


def _cards(nodes: int) -> str:
    return f"{_nodes(nodes)}, range({GPUS}) b(g)"


def _ticks() -> str:
    return f"range(0, {MINUTES * 12}) s(t)"


def _identities(nodes: int) -> list[str]:
    """Who there is and should be, and what is wrong."""
    trouble = f"FROM range(1, {INCIDENTS + 1}) a(n), range(3, 4) b(g)"
    node, every, past = _NODE, _nodes(nodes), "$at + INTERVAL 5 MINUTE - to_seconds(t * 5)"
    return [
        f"INSERT INTO live.node SELECT {node}, {node}, {node}, 'b', 's', '1', '', $at, $at FROM {every}",
        f"INSERT INTO live.probe SELECT {node}, 'gpu', 5.0 FROM {every} WHERE $at IS NOT NULL",
        f"INSERT INTO live.ledger SELECT {node}, 's', t + 1, 'd', 'b', {past}, 0, 'live', 8 "
        f"FROM {_ticks()}, {every}",
        "INSERT INTO live.inventory (node, entity, kind, uuid, serial, pci, model, gpu_index, attributes, "
        f"valid_from) SELECT {node}, {_ENTITY}, 'gpu', {_UUID}, {_SERIAL}, {_PCI}, 'H100', g, '{{}}', $at "
        f"FROM {_cards(nodes)}",
        f"INSERT INTO live.expected SELECT {node}, {_UUID}, {_SERIAL}, {_PCI}, 'H100', NULL, 'accepted', "
        f"'ops', $at, '' FROM {_cards(nodes)}",
        f"INSERT INTO live.incident SELECT n, 'gpu_missing', {node}, {_ENTITY}, 'open', 'crit', "
        f"'Card missing', $at, $at, NULL, NULL, 0 {trouble}",
        "INSERT INTO live.finding (id, rule, node, entity, state, verdict, code, reason, evidence, began_at, "
        f"fired_at, last_evidence_at, updated_at, incident) SELECT n, 'gpu_missing', {node}, {_ENTITY}, "
        f"'firing', 'crit', 'gone_from_bus', 'gone from the bus', '[]', $at, $at, $at, $at, n {trouble}",
    ]


class _Server:
    """The fleet service on loopback, in a thread."""

    def __init__(self, store: Store, now: datetime) -> None:
        self._store, self._now = store, now
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._ready.wait(30)

    async def _serve(self) -> None:
        server = grpc.aio.server()
        servicer = FleetServicer(self._store, {}, lambda: HEALTH, lambda: self._now)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._stop = asyncio.Event()
        keeping = asyncio.create_task(servicer.keep_status_ready())
        await asyncio.sleep(2)
        self._ready.set()
        await self._stop.wait()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await server.stop(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


def _call(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        for _ in stub.GetStatus(fleet_pb2.GetStatusRequest(), timeout=30):
            pass


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _median_ms(do: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
