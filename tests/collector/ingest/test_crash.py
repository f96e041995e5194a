"""A real collector, killed in the middle of ingest: nothing acknowledged is lost, nothing is stored twice."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import duckdb
import pytest

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit, Process

KILLS = 20
AGENTS = 3


class Sender:
    """An agent's spool: what was not acknowledged is sent again, with the same bytes."""

    def __init__(self, kit: Kit, name: str) -> None:
        self.kit = kit
        self.name = name
        self.bodies: dict[int, bytes] = {}
        self.acked: set[int] = set()
        self.made = 0
        self.agent: Agent | None = None

    def connect(self, process: Process) -> None:
        self.agent = self.kit.agent(process.address).hello(
            node=self.name, machine_id=f"m-{self.name}", spool_id=f"s-{self.name}"
        )
        for number, content in self.bodies.items():
            self.agent.send(number, content)

    def send(self) -> None:
        assert self.agent is not None
        self.made += 1
        content = self.kit.body(self.kit.gpu_rows(f"GPU-{self.name}", count=20, energy=self.made))
        self.bodies[self.made] = content
        self.agent.send(self.made, content)

    def collect(self) -> None:
        """Forget what was acknowledged."""
        assert self.agent is not None
        for number in self.agent.acked:
            self.acked.add(number)
            self.bodies.pop(number, None)

    def disconnect(self) -> None:
        assert self.agent is not None
        self.agent.close()
        self.kit.agents.remove(self.agent)
        self.collect()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_G05_twenty_kills_in_the_middle_of_ingest_lose_and_double_nothing(kit: Kit) -> None:
    rng = random.Random(5)
    senders = [Sender(kit, f"n{number}") for number in range(AGENTS)]
    kills = 0
    while kills < KILLS:
        process = kit.process()
        assert process.address, process.lines
        for sender in senders:
            sender.connect(process)
        until = time.monotonic() + rng.uniform(0.02, 0.25)
        while time.monotonic() < until:
            for sender in senders:
                sender.send()
            time.sleep(0.002)
        process.kill()
        kills += 1
        for sender in senders:
            sender.disconnect()
    process = kit.process()
    for sender in senders:
        sender.connect(process)
        assert sender.agent is not None
        sender.agent.wait(*sender.bodies)
        sender.disconnect()
    assert process.stop() == 0
    assert kills == KILLS
    read = duckdb.connect(str(kit.tmp / "fleet.duckdb"), read_only=True)
    for sender in senders:
        assert sender.made > KILLS
        assert sender.acked == set(range(1, sender.made + 1))
        rows = read.execute(
            "SELECT energy_j::BIGINT, count(*) FROM live.gpu WHERE node = ? GROUP BY 1 ORDER BY 1",
            [sender.name],
        ).fetchall()
        assert rows == [(number, 20) for number in range(1, sender.made + 1)]
        ledger = read.execute(
            "SELECT count(*), count(DISTINCT number), sum(rows) FROM live.ledger WHERE node = ?",
            [sender.name],
        ).fetchall()
        assert ledger == [(sender.made, sender.made, 20 * sender.made)]
    assert read.execute(
        "SELECT count(*) FROM live.event WHERE kind IN ('batch_conflict', 'store_replaced')"
    ).fetchall() == [(0,)]
    read.close()
