"""Inventories become rows with the time they held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.v1 import ingest_pb2 as pb

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Kit

OPEN = "SELECT entity, serial, gpu_index FROM live.inventory WHERE valid_to IS NULL ORDER BY 1"


def inventory(ts_us: int, *cards: str, complete: bool = True, **more: str) -> pb.Inventory:
    items = [pb.Item(entity="node:", attributes={"kernel": "6.1", **more})]
    items += [
        pb.Item(entity=f"gpu:{card}", attributes={"uuid": card, "serial": f"s-{card}", "index": str(number)})
        for number, card in enumerate(cards)
    ]
    return pb.Inventory(ts_us=ts_us, items=items, complete=complete)


def test_inventory_changes_are_dated_rows(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address)
    hello = kit.hello()
    at = kit.now_us()
    hello.inventory.CopyFrom(inventory(at, "GPU-1", "GPU-2"))
    agent.request(pb.StreamRequest(hello=hello))
    agent.until(lambda: agent.welcome is not None)
    assert running.query(OPEN) == [
        ("gpu:GPU-1", "s-GPU-1", 0),
        ("gpu:GPU-2", "s-GPU-2", 1),
        ("node:", None, None),
    ]
    assert running.one("SELECT attributes->>'complete' FROM live.inventory WHERE entity = 'node:'") == "true"
    sent = [
        inventory(at, "GPU-1", "GPU-2"),  # nothing changed
        inventory(at + 1000, "GPU-2", complete=False),  # a driver did not answer: GPU-1 may still be there
        inventory(at + 2000, "GPU-2", "GPU-3"),
        inventory(at - 5000, "GPU-1", "GPU-2"),  # left behind by an outage: older than what is known
    ]
    for number, made in enumerate(sent, 1):
        agent.send(number, kit.body(inventory=made))
        agent.wait(number)
    assert running.query(OPEN) == [
        ("gpu:GPU-2", "s-GPU-2", 0),
        ("gpu:GPU-3", "s-GPU-3", 1),
        ("node:", None, None),
    ]
    assert running.query(
        f"SELECT epoch_us(valid_from) - {at}, epoch_us(valid_to) - {at} FROM live.inventory "
        "WHERE entity = 'gpu:GPU-1'"
    ) == [(0, 2000)]
    assert running.one("SELECT count(*) FROM live.inventory WHERE valid_to < valid_from") == 0


def test_several_inventories_in_one_commit_and_over_a_restart(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    at = kit.now_us()
    for number in range(1, 20):
        agent.send(number, kit.body(inventory=inventory(at + number, "GPU-1", kernel=str(number))))
    agent.wait(*range(1, 20))
    per_entity = "SELECT entity, count(*) FROM live.inventory WHERE valid_to IS NULL GROUP BY 1 ORDER BY 1"
    assert running.query(per_entity) == [("gpu:GPU-1", 1), ("node:", 1)]
    assert running.one("SELECT count(*) FROM live.inventory WHERE entity = 'node:'") == 19
    running.stop()
    again = kit.start(store=running.store)
    agent = kit.agent(again.address).hello()
    agent.send(20, kit.body(inventory=inventory(at + 30, "GPU-1", kernel="19")))
    agent.wait(20)
    assert again.one("SELECT count(*) FROM live.inventory WHERE entity = 'node:'") == 19


def test_inventory_follows_a_rename(kit: Kit) -> None:
    running = kit.start()
    first = kit.agent(running.address).hello()
    first.send(1, kit.body(inventory=inventory(kit.now_us(), "GPU-1")))
    first.wait(1)
    second = kit.agent(running.address).hello(node="gpu-z99")
    second.send(2, kit.body(inventory=inventory(kit.now_us(), "GPU-2")))
    second.wait(2)
    assert running.query("SELECT node, entity, valid_to IS NULL FROM live.inventory ORDER BY 2") == [
        ("gpu-z99", "gpu:GPU-1", False),
        ("gpu-z99", "gpu:GPU-2", True),
        ("gpu-z99", "node:", True),
    ]


def test_hostile_inventories_are_cut(kit: Kit) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    items = [pb.Item(entity=f"gpu:{number}") for number in range(5000)]
    items[0] = pb.Item(entity="no kind")
    items[1] = pb.Item(entity="gpu:long", attributes={"serial": "x" * 5000})
    items[2] = pb.Item(entity="gpu:many", attributes={str(number): "" for number in range(300)})
    items[3] = pb.Item(entity="gpu:odd", attributes={"index": "²", "uuid": "a\0b", "k\0": "'\"\\u0000\ud7ff"})
    agent.send(1, kit.body(inventory=pb.Inventory(ts_us=2**62, items=items, complete=True)))
    agent.wait(1)
    assert running.one("SELECT count(*) FROM live.inventory") == 4096 - 3
    assert running.query("SELECT reason, cells FROM live.quarantine ORDER BY 1") == [
        ("bad_attribute", 1),
        ("bad_entity", 1),
        ("too_many_attributes", 1),
        ("too_many_items", 904),
    ]
    assert running.query("SELECT gpu_index, uuid FROM live.inventory WHERE entity = 'gpu:odd'") == [
        (None, "a\ufffdb")
    ]
    assert running.one("SELECT abs(epoch_us(max(valid_from)) - epoch_us(now())) < 60e6 FROM live.inventory")
