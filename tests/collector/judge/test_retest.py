"""Suspects are measured again: soon, seldom enough, over restarts, and never more than they prove."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector import baselines
from gpufleet_collector.bench_runs import BenchRuns
from gpufleet_collector.judge import Judge
from gpufleet_collector.people import NotNow
from gpufleet_collector.retest import Retests

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Card, Fleet

RULE, HOST = "bandwidth_regression", "bandwidth_regression_host"
KEY = "h2d/1/copied_once/ab12/pcie5x16"
GOOD, SLOW = 55.0, 49.0


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE, HOST)


@dataclass
class Asked:
    said: "asyncio.Queue[str | pb.DirectiveResult]" = field(default_factory=asyncio.Queue)


@dataclass
class Agents:
    """Every agent of the fleet: measures what it is asked for, unless the card is busy."""

    fleet: "Fleet"
    slow: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    mute: bool = False
    value: float = SLOW

    def connected(self, node: str) -> bool:
        return node not in self.away

    @contextmanager
    def ask(self, node: str, directive: pb.Directive) -> Iterator[Asked]:
        wanted = directive.run_bench
        self.asked.append((node, wanted.entity))
        asked = Asked()
        yield_rows = [card for card in self.fleet.nodes[node].cards if wanted.entity in ("", card.entity)]
        for card in yield_rows if not self.mute else []:
            busy = card.entity in self.busy
            value = None if busy else self.value if card.entity in self.slow else GOOD
            self.fleet.bench(card.entity, node, value, "skipped" if busy else "ok", lease=wanted.lease)
        if not self.mute:
            asked.said.put_nowait(pb.DirectiveResult(id=directive.id, outcome=pb.OUTCOME_DONE, rows=1))
        yield asked


def started(fleet: "Fleet", nodes: int, gpus: int = 8) -> list["Card"]:
    cards = [card for n in range(nodes) for card in fleet.add(f"gpu-{n:03}", gpus=gpus).cards]
    for card in cards:
        fleet.baseline(card.node, card.entity, KEY, GOOD, "frozen", spread=0.002)
    return cards


def measure(fleet: "Fleet", judge: Judge, cards: list["Card"], slow: set[str], value: float = SLOW) -> None:
    """A round by schedule."""
    for card in cards:
        fleet.bench(card.entity, card.node, value if card.entity in slow else GOOD)
    judge.run_pass(fleet.at)


async def ends(runs: BenchRuns) -> None:
    """Until nothing that was asked for is under way."""
    while runs._running:
        await asyncio.sleep(0.001)


def over(
    fleet: "Fleet", agents: Agents, minutes: float, each: Callable[[Retests, BenchRuns], Awaitable[None]]
) -> None:
    """Look for suspects every minute, for so long."""

    async def work() -> None:
        runs = BenchRuns(agents)
        retests = Retests(fleet.store, runs, 20, lambda: fleet.at)
        until = fleet.at + timedelta(minutes=minutes)
        while fleet.at < until:
            fleet.at += timedelta(minutes=1)
            await each(retests, runs)

    asyncio.run(work())


def test_what_is_measured_seldom_is_sure_within_an_hour_all_the_same(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    bad = {cards[3].entity}
    measure(fleet, judge, cards, bad)
    began = fleet.at
    assert [row[2] for row in fleet.findings(RULE)] == ["pending"]
    agents = Agents(fleet, slow=bad)
    fired_after: list[float] = []

    async def each(retests: Retests, runs: BenchRuns) -> None:
        if not fired_after and await retests.look():
            await ends(runs)
            judge.run_pass(fleet.at)
        if not fired_after and [row[2] for row in fleet.findings(RULE)] == ["firing"]:
            fired_after.append((fleet.at - began).total_seconds())

    over(fleet, agents, 70, each)
    assert fired_after, "not found"
    assert 65 * 60 <= fired_after[0] <= 68 * 60, "a run after five minutes, and one an hour later"
    assert len(agents.asked) == 2, "what fires is not measured again"
    assert {entity for _, entity in agents.asked} == bad
    rows = fleet.sql("select actor, verb, target from audit order by logged_at")
    assert rows == [("collector", "bench retest", f"gpu-000 {cards[3].entity} h2d")] * 2


@dataclass
class Disturbed(Agents):
    """Cards are slow for a while, whatever is wrong with them or not."""

    minutes: float = 0.0

    def __post_init__(self) -> None:
        self.until = self.fleet.at + timedelta(minutes=self.minutes)
        self.victims = self.slow

    @contextmanager
    def ask(self, node: str, directive: pb.Directive) -> Iterator[Asked]:
        self.slow = self.now
        with super().ask(node, directive) as asked:
            yield asked

    @property
    def now(self) -> set[str]:
        return self.victims if self.fleet.at < self.until else set()


def disturb(
    fleet: "Fleet", judge: Judge, cards: list["Card"], victims: set[str], minutes: float, value: float = SLOW
) -> dict[str, float]:
    """Rounds by the hour and re-tests between them; minutes until each thing fired."""
    began = fleet.at
    agents = Disturbed(fleet, slow=set(victims), minutes=minutes, value=value)
    fired: dict[str, float] = {}
    measure(fleet, judge, cards, agents.now, value)

    async def each(retests: Retests, runs: BenchRuns) -> None:
        passed = (fleet.at - began).total_seconds() / 60
        asked = await retests.look()
        await ends(runs)
        if passed % 60 == 0:
            measure(fleet, judge, cards, agents.now, value)
        elif asked:
            judge.run_pass(fleet.at)
        for row in fleet.findings(RULE) + fleet.findings(HOST):
            if row[2] == "firing":
                fired.setdefault(str(row[1]), passed)

    over(fleet, agents, 125, each)
    return fired | {"asked": len(agents.asked)}


def test_an_hour_of_interference_on_a_card_is_not_three_of_four(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    found = disturb(fleet, judge, cards, {cards[3].entity}, minutes=55)
    assert found == {"asked": 1}, "one re-test met the same interference; the next round was good"


def test_a_slow_card_is_sure_with_the_next_round(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    found = disturb(fleet, judge, cards, {cards[3].entity}, minutes=1000)
    assert found == {cards[3].entity: 60, "asked": 1}, "two rounds and what was measured between them"


def test_an_hour_of_interference_on_a_whole_host_is_nobodys(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 2)
    victims = {card.entity for card in cards if card.node == "gpu-000"}
    assert disturb(fleet, judge, cards, victims, minutes=55) == {"asked": 0}


@pytest.mark.parametrize("hit", [2, 3])
def test_interference_that_some_cards_of_a_host_feel_is_not_measured_again(
    fleet: "Fleet", judge: Judge, hit: int
) -> None:
    cards = started(fleet, 1)
    victims = {card.entity for card in cards[:hit]}
    assert disturb(fleet, judge, cards, victims, minutes=115) == {"asked": 0}


def test_a_card_without_a_past_is_below_its_floor_only_an_hour_later_too(
    fleet: "Fleet", judge: Judge
) -> None:
    cards = started(fleet, 1)
    with fleet.store.transaction() as write:
        write.execute("DELETE FROM live.baseline")
    assert disturb(fleet, judge, cards, {cards[3].entity}, minutes=55, value=40.0) == {"asked": 0}


def test_a_card_that_people_work_on_is_left_alone(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.maintenance (id, nodes, reason, actor, claimed, set_at, from_at, until) "
            "SELECT 1, ['gpu-000'], 'riser', 'ana', false, $at, $at, $at + INTERVAL 20 MINUTE",
            {"at": fleet.at},
        )
    measure(fleet, judge, cards, {cards[3].entity})
    agents = Agents(fleet, slow={cards[3].entity})
    asked_at: list[float] = []
    began = fleet.at

    async def each(retests: Retests, runs: BenchRuns) -> None:
        if await retests.look():
            asked_at.append((fleet.at - began).total_seconds() / 60)
        await ends(runs)

    over(fleet, agents, 22, each)
    assert asked_at[:1] == [20.0], "not before they are done"


def test_a_card_that_is_well_again_is_let_go(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    measure(fleet, judge, cards, {cards[3].entity})
    agents = Agents(fleet)

    async def each(retests: Retests, runs: BenchRuns) -> None:
        if await retests.look():
            await ends(runs)
            judge.run_pass(fleet.at)

    over(fleet, agents, 40, each)
    assert fleet.findings(RULE) == []
    assert 1 <= len(agents.asked) <= 4


def test_all_cards_of_a_host_at_once_are_the_hosts_and_not_measured_again(
    fleet: "Fleet", judge: Judge
) -> None:
    cards = started(fleet, 2)
    bad = {card.entity for card in cards if card.node == "gpu-000"}
    measure(fleet, judge, cards, {cards[0].entity, cards[1].entity})
    assert [row[2] for row in fleet.findings(RULE)] == ["pending"] * 2
    fleet.at += timedelta(minutes=1)
    measure(fleet, judge, cards, bad)
    assert [row[2] for row in fleet.findings(HOST)] == ["pending"]
    agents = Agents(fleet, slow=bad)

    async def each(retests: Retests, runs: BenchRuns) -> None:
        assert await retests.look() == []

    over(fleet, agents, 30, each)
    assert agents.asked == []


@pytest.mark.usefixtures("judge")
def test_many_suspects_do_not_flood(fleet: "Fleet") -> None:
    cards = [fleet.add(f"gpu-{n:03}", gpus=1).cards[0] for n in range(24)] + fleet.add(
        "gpu-big", gpus=3
    ).cards
    with fleet.store.transaction() as write:
        for number, card in enumerate(cards):
            bench = ("h2d", "d2h", "hbm")[card.index] if card.node == "gpu-big" else "h2d"
            write.execute(
                "INSERT INTO live.finding (id, rule, node, entity, state, verdict, code, reason, detail, "
                "evidence, began_at, last_evidence_at, updated_at) VALUES "
                "(?, 'bandwidth_regression', ?, ?, 'pending', 'warn', 'slower', '', ?, '[]', ?, ?, ?)",
                [number, card.node, card.entity, f'{{"bench": "{bench}"}}', fleet.at, fleet.at, fleet.at],
            )
    agents = Agents(fleet, mute=True)  # nobody answers: each host stays busy with its one
    seen: list[tuple[float, int]] = []

    async def each(retests: Retests, runs: BenchRuns) -> None:
        asked = await retests.look()
        await asyncio.sleep(0)
        assert len({one.node for one in asked}) == len(asked), "one at a time per host"
        seen.append(((fleet.at - began).total_seconds(), len(asked)))

    began = fleet.at
    over(fleet, agents, 12, each)
    for at, _ in seen:
        assert sum(count for when, count in seen if at - 60 < when <= at) <= 20
    assert sum(count for _, count in seen) == 25, "each host was asked once, and is still at it"


def test_a_restarted_collector_goes_on_where_it_was(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    bad = {cards[3].entity}
    measure(fleet, judge, cards, bad)
    agents = Agents(fleet, slow=bad, busy=bad)
    asked_at: list[float] = []
    began = fleet.at

    async def restarted() -> None:
        runs = BenchRuns(agents)
        before = len(agents.asked)
        await Retests(fleet.store, runs, 20, lambda: fleet.at).look()
        await ends(runs)
        if len(agents.asked) > before:
            asked_at.append((fleet.at - began).total_seconds() / 60)

    for _ in range(85):
        fleet.at += timedelta(minutes=2)
        asyncio.run(restarted())
    gaps = [later - earlier for earlier, later in zip([0.0, *asked_at], asked_at, strict=False)]
    assert len(gaps) == 5, "5, 10, 20, 40, 60 minutes, and up to one more"
    for gap, least in zip(gaps, (5, 10, 20, 40, 60), strict=True):
        assert least <= gap <= least + 3


def test_an_agent_that_is_away_uses_up_nothing(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 1)
    measure(fleet, judge, cards, {cards[3].entity})
    agents = Agents(fleet, away={"gpu-000"})

    async def each(retests: Retests, runs: BenchRuns) -> None:
        assert await retests.look() == []

    over(fleet, agents, 10, each)
    assert fleet.sql("select count(*) from audit") == [(0,)]


def test_runs_that_are_asked_for_one_after_the_other_are_one_evidence(fleet: "Fleet", judge: Judge) -> None:
    card = started(fleet, 1, gpus=1)[0]
    measure(fleet, judge, [card], {card.entity})
    for _ in range(4):
        fleet.at += timedelta(minutes=2)
        fleet.bench(card.entity, card.node, SLOW, lease="run-1")
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings(RULE)] == ["pending"]
    for _ in range(2):
        fleet.at += timedelta(minutes=5)
        fleet.bench(card.entity, card.node, SLOW, lease="retest-1")
        judge.run_pass(fleet.at)
    assert [row[2] for row in fleet.findings(RULE)] == ["firing"]


def test_rounds_that_are_asked_for_are_none_of_the_hosts(fleet: "Fleet", judge: Judge) -> None:
    cards = started(fleet, 2)
    bad = {card.entity for card in cards if card.node == "gpu-000"}
    for _ in range(3):
        fleet.at += timedelta(minutes=10)
        for card in cards:
            if card.node == "gpu-000":
                fleet.bench(card.entity, card.node, SLOW, lease="run-1")
            else:
                fleet.bench(card.entity, card.node, GOOD)
        judge.run_pass(fleet.at)
    assert fleet.findings(HOST) == []
    fleet.at += timedelta(minutes=10)
    measure(fleet, judge, cards, bad)
    assert [row[2] for row in fleet.findings(HOST)] == ["pending"]


def test_what_is_asked_for_is_never_learned_from(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-000", gpus=1).cards[0]
    for number in range(60):
        fleet.at += timedelta(minutes=1)
        fleet.bench(card.entity, card.node, SLOW if number % 2 else GOOD, lease="run-1" if number % 2 else "")
    baselines.learn(fleet.store, fleet.at)
    assert fleet.sql("select value, n from baseline") == [(GOOD, 30)]


def test_one_at_a_time_per_node_and_few_a_minute(fleet: "Fleet") -> None:
    started(fleet, 40, gpus=1)
    agents, now = Agents(fleet, mute=True), [0.0]

    async def work() -> None:
        runs = BenchRuns(agents, lambda: now[0])
        first = runs.reserve("gpu-000", "ana")
        with pytest.raises(NotNow, match="asked for by ana"):
            runs.reserve("gpu-000", "ben")
        runs.release(first)
        for n in range(29):
            runs.reserve(f"gpu-{n:03}", "ana")
        with pytest.raises(NotNow, match="30 runs"):
            runs.reserve("gpu-035", "ana")
        runs.reserve("gpu-036", "the collector", person=False)
        now[0] = 61.0
        runs.reserve("gpu-035", "ana")

    asyncio.run(work())
