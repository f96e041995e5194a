"""The status is answered from what was built in the background, and never from something old."""

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from gpufleet.metric import Type
from gpufleet.v1 import fleet_pb2
from gpufleet_collector import documents, query, rules
from gpufleet_collector.documents import Health
from gpufleet_collector.query import FleetServicer
from gpufleet_collector.store import LIVE, Column, Store

NOW = datetime(2026, 11, 30, 12)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.open(None)
    rules.install(made, ())
    yield made
    made.close()


async def ask(servicer: FleetServicer) -> dict[str, object]:
    parts = [part.json async for part in servicer.GetStatus(fleet_pb2.GetStatusRequest(), None)]  # type: ignore[arg-type]
    found = json.loads(b"".join(parts))
    assert isinstance(found, dict)
    return found


def servicer_of(store: Store) -> FleetServicer:
    return FleetServicer(store, {}, lambda: Health(True, "", None, False, ""), lambda: NOW)


def add_node(store: Store, name: str) -> None:
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.node VALUES (?, ?, '', 'b', 's', '1', '', ?, ?)", [name, name, NOW, NOW]
        )


def test_without_a_snapshot_it_is_built_on_request(store: Store) -> None:
    servicer = servicer_of(store)
    add_node(store, "a")
    found = asyncio.run(ask(servicer))
    assert found["snapshot_age_s"] == 0
    assert len(list(found["items"])) == 1  # type: ignore[call-overload]


def test_a_snapshot_is_served_with_its_age_and_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "SNAPSHOT_MIN_S", 0.2)

    async def play() -> None:
        servicer = servicer_of(store)
        keeping = asyncio.create_task(servicer.keep_status_ready())
        try:
            deadline = time.monotonic() + 90
            while (await ask(servicer))["snapshot_age_s"] == 0:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            add_node(store, "late")
            while not (await ask(servicer))["items"]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(play())


def test_an_old_snapshot_is_not_served(store: Store) -> None:
    """The builder died or hangs: who asks gets a fresh answer, not the last good one."""
    servicer = servicer_of(store)
    servicer._snapshot = query._Snapshot(b'{"items":["old"]}', time.monotonic() - 60, time.monotonic() - 50)
    found = asyncio.run(ask(servicer))
    assert found["snapshot_age_s"] == 0
    assert found["items"] == []


def test_a_failing_builder_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "SNAPSHOT_MIN_S", 0.05)

    async def play() -> None:
        servicer = servicer_of(store)
        working = servicer._status
        calls = 0

        def failing(*words: object) -> dict[str, object]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("the store is being reopened")
            return working(*words)  # type: ignore[arg-type]

        monkeypatch.setattr(servicer, "_status", failing)
        keeping = asyncio.create_task(servicer.keep_status_ready())
        deadline = time.monotonic() + 90
        while servicer._snapshot is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert calls >= 2

    asyncio.run(play())


def test_of_probes_with_several_rows_none_stands_for_all(store: Store) -> None:
    """A healthy disk beside the sick one, say. An agent says of each column whether it is a key."""
    add_node(store, "a")
    shown = {
        "host": (Column("load1", Type.F64, "1", "gauge", "", None, None, "avg"), 2.0),
        "disk": (Column("disk", Type.STRING, "text", "key", "", None, None, ""), "vda"),
        "agent": (Column("probe", Type.STRING, "text", "key", "", None, None, ""), "agent"),
    }
    with store.transaction() as write:
        for probe, (column, value) in shown.items():
            store.ensure_probe(write, probe, [column])
            write.execute(f"INSERT INTO live.{probe} VALUES (?, ?, 'a', 'b', ?)", [NOW, NOW, value])
    with store.reader(LIVE) as read:
        found = json.loads(json.dumps(documents.one_node(read, NOW, "a", ("agent", "disk", "host"))))
    assert list(found["items"][0]["last"]) == ["agent", "host"]
