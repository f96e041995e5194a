"""Benches on two cards: which pairs, whose card it is, and whose time it takes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.benches.test_gate import Card, World

from gpufleet.metric import Value
from gpufleet_agent import bench
from gpufleet_agent.bench_runner import _outcomes, _peers_s
from gpufleet_agent.benches import METRICS
from gpufleet_agent.drivers import BenchResult, Check, Item, Process, go_on
from gpufleet_agent.gate import Gate, Rules
from gpufleet_agent.guard import GuardedHost, HostSettings
from gpufleet_agent.measure import ends, path
from gpufleet_agent.probe import Sweep
from gpufleet_agent.rota import RETRY_S, Rota

NAMES = [metric.name for metric in METRICS]


@given(st.integers(1, 16), st.integers(0, 10**6))
def test_so_many_turns_as_there_are_other_cards_show_every_pair_both_ways(count: int, turn: int) -> None:
    cards: Any = [Card(number) for number in range(count)]
    Random(count).shuffle(cards)
    shown: list[tuple[int, int]] = []
    for later in range(max(1, count - 1)):
        pairs = [(card.index, peer.index) for card, peer in ends("pair", cards, "", turn + later) if peer]
        assert len({sends for sends, _ in pairs}) == len({sent_to for _, sent_to in pairs}) == len(pairs)
        assert len(pairs) in (0, count)
        shown += pairs
    assert sorted(shown) == [(one, other) for one in range(count) for other in range(count) if one != other]


def test_a_card_that_is_asked_for_sends_to_all_others() -> None:
    cards: Any = [Card(number) for number in range(3)]
    found = ends("pair", cards, f"gpu:{cards[1].uuid}", 5)
    assert [(card.index, peer.index) for card, peer in found if peer] == [(1, 0), (1, 2)]
    assert ends("pair", cards[:1]) == [(cards[0], None)]
    assert ends("gpu", cards, f"gpu:{cards[1].uuid}") == [(cards[1], None)]


def test_the_link_of_a_pair_says_what_it_is_and_where() -> None:
    assert path("nvlink", "0000:1b:00.0", "0000:43:00.0") == "nvlink:1b:00>43:00"
    assert path("pcie", "0001:00:00.0", "0002:00:00.1") == "pcie:0001:00:00>0002:00:00.1"


@dataclass
class Machine:
    """Three cards of a driver whose copies take half a second each, and somebody who may come meanwhile."""

    world: World = field(default_factory=World)
    cards: list[Card] = field(default_factory=lambda: [Card(number) for number in (1, 2, 3)])
    begins: Callable[[str], None] = lambda pci: None
    ends: Callable[[str], None] = lambda pci: None

    def gpus(self) -> list[Card]:
        return self.cards

    def node(self) -> Item:
        return Item("node:", {})

    def processes(self) -> list[Process]:
        return []

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        self.begins(str(params["peer"]))
        began = self.world.now
        while self.world.now < began + 0.5:
            self.world.sleep(0.05)
            check()
        self.ends(str(params["peer"]))
        took = self.world.now - began
        return BenchResult("ok", 300.0, "GB/s", "", (300.0,), took, took, link="nvlink")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    host: Any = made
    monkeypatch.setattr(bench, "open_guarded", lambda settings, progress, skip: GuardedHost(host, skip))
    monkeypatch.setattr(bench, "Gate", partial(Gate, clock=made.world.clock, sleep=made.world.sleep))
    return made


def run(folder: Path, **more: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """The rows of a run, by sender and receiver."""
    given: dict[str, Any] = {"rules": Rules(mem_mib=1 << 20), **more}
    settings = bench.Settings(
        bench="p2p", host=HostSettings(driver="nvml"), state_dir="", lock=str(folder / "lock"), **given
    )
    rows = [dict(zip(NAMES, cells, strict=True)) for cells in bench.run_bench(settings).rows]
    return {(int(str(row["entity"])[-1]), int(str(row["peer"])[-1])): row for row in rows}


def test_both_cards_of_a_pair_have_to_be_free(machine: Machine, tmp_path: Path) -> None:
    machine.cards[1].state.update(pids="900")
    rows = run(tmp_path)
    assert len(rows) == 3
    for pair, row in rows.items():
        assert row["status"] == ("skipped" if 2 in pair else "ok")
        if 2 in pair:
            assert "in use by process 900" in row["reason"]
    (row,) = [row for row in rows.values() if row["status"] == "ok"]
    assert row["link"].startswith("nvlink:0")


def test_a_job_that_comes_to_the_card_that_is_sent_to_ends_the_run(machine: Machine, tmp_path: Path) -> None:
    by_pci = {card.pci: card for card in machine.cards}
    machine.begins = lambda pci: by_pci[pci].state.update(pids="900")
    rows = run(tmp_path)
    first = next(iter(rows.values()))
    assert (first["status"], first["value"]) == ("preempted", None)
    assert first["reason"] == "a job came: process 900"
    assert "ok" not in {row["status"] for row in rows.values()}


def test_a_job_on_the_card_that_was_sent_to_right_afterwards_takes_the_value(
    machine: Machine, tmp_path: Path
) -> None:
    by_pci = {card.pci: card for card in machine.cards}
    machine.ends = lambda pci: by_pci[pci].state.update(mem_used_bytes=2 << 40)
    first = next(iter(run(tmp_path).values()))
    assert (first["status"], first["value"]) == ("contaminated", None)


def test_a_card_alone_on_its_host_cannot_be_measured(machine: Machine, tmp_path: Path) -> None:
    del machine.cards[1:]
    settings = bench.Settings(
        bench="p2p", host=HostSettings(driver="nvml"), state_dir="", lock=str(tmp_path / "lock")
    )
    (cells,) = bench.run_bench(settings).rows
    row = dict(zip(NAMES, cells, strict=True))
    assert (row["status"], row["reason"]) == ("unsupported", "no other card on this host")
    assert (row["peer"], row["gpu_seconds"]) == ("", 0.0)


def test_the_budget_is_that_of_both_cards(machine: Machine, tmp_path: Path) -> None:
    left = {f"gpu:{card.uuid}": 3.4 for card in machine.cards}
    rows = run(tmp_path, left_s=left)
    assert [row["status"] for row in rows.values()] == ["ok", "skipped", "skipped"]
    assert [row["reason"].startswith("budget: 2.9 of 10 s") for row in rows.values()] == [False, True, True]
    one = f"gpu:{machine.cards[2].uuid}"
    rows = run(tmp_path, left_s={one: 1.0})
    assert {pair: row["status"] for pair, row in rows.items()} == {
        pair: "skipped" if 3 in pair else "ok" for pair in rows
    }


def test_eight_cards_stay_within_their_hour(machine: Machine, tmp_path: Path) -> None:
    """56 pairs: a run takes of each card what two copies take, and the hour's budget holds."""
    machine.cards[:] = [Card(number) for number in range(1, 9)]
    rota = Rota({"p2p": 60.0}, 10.0, machine.world.clock, Random(1))
    spent: list[tuple[float, str, float]] = []
    while machine.world.now < 2 * 3600:
        machine.world.sleep(rota.tick_s)
        if not rota.next():
            continue
        settings = bench.Settings(
            bench="p2p", host=HostSettings(driver="nvml"), state_dir="", lock=str(tmp_path / "lock"),
            rules=Rules(mem_mib=1 << 20), left_s=rota.left_s(), fresh=rota.fresh("p2p"),
        )  # fmt: skip
        sweep = bench.run_bench(settings)
        peers_s = _peers_s(sweep)
        for entity, seconds in [*((name, s) for name, (_, s) in _outcomes(sweep).items()), *peers_s.items()]:
            spent.append((machine.world.now, entity, seconds))
        rota.gone("p2p", _outcomes(sweep), peers_s)
    assert sum(seconds for _, _, seconds in spent) > 8 * 10
    for card in machine.cards:
        own = [(at, seconds) for at, entity, seconds in spent if entity == f"gpu:{card.uuid}"]
        for at, _ in own:
            assert sum(s for when, s in own if at - 3600 < when <= at) <= 10.0 + 1e-9


def sweep_of(*rows: tuple[str, str, str, str, float]) -> Any:
    """A sweep with (entity, peer, status, reason, card time) in each row."""
    names = ("entity", "peer", "status", "reason", "gpu_seconds")
    empty = dict.fromkeys(NAMES)
    cells = [list((empty | dict(zip(names, row, strict=True))).values()) for row in rows]
    return Sweep("bench", 0, 0, 0.0, "", cells, [])


def test_what_a_run_took_of_each_card_and_that_a_result_was_wrong() -> None:
    sweep = sweep_of(
        ("gpu:1", "gpu:2", "failed", "corrupt: other bits", 0.5), ("gpu:1", "gpu:3", "ok", "", 0.25),
        ("gpu:2", "", "failed", "the driver said no", 1.0),
    )  # fmt: skip
    assert _outcomes(sweep) == {"gpu:1": ("corrupt", 0.75), "gpu:2": ("failed", 1.0)}
    assert _peers_s(sweep) == {"gpu:2": 0.5, "gpu:3": 0.25}


def test_a_wrong_result_is_tried_again_soon_and_then_in_its_turn() -> None:
    world = World()
    rota = Rota({"gemm": 86400.0}, math.inf, world.clock, Random(1))
    rota.gone("gemm", {"gpu:1": ("corrupt", 1.0)})
    world.sleep(RETRY_S * 1.2)
    assert rota.next() == "gemm"
    rota.gone("gemm", {"gpu:1": ("corrupt", 1.0)})
    world.sleep(3600.0)
    assert rota.next() == ""
    world.sleep(86400.0 * 1.2)
    assert rota.next() == "gemm"
    rota.gone("gemm", {"gpu:1": ("ok", 1.0)})
    world.sleep(3600.0)
    assert rota.next() == ""
