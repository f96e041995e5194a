"""The budget of card time over restarts of the agent, and the link that names a card's series."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gpufleet_agent.bench_links import Links
from gpufleet_agent.budget import ANY, HOUR_S, Budget
from gpufleet_agent.rota import Rota

MOST_S, COST_S = 10.0, 3.0


@dataclass
class World:
    """A clock and a disk that outlive the agent."""

    now: float = 1000.0
    boot: str = "boot-1"
    text: str | None = None
    ran: list[tuple[float, float]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def keep(self, text: str) -> None:
        self.text = text

    def budget(self) -> Budget:
        return Budget(MOST_S, self.boot, self.text, self.keep, self.clock)

    def left(self, budget: Budget, entity: str) -> float:
        left = budget.left_s()
        return left.get(entity, left.get(ANY, MOST_S))

    def most_in_an_hour(self) -> float:
        return max(
            (sum(took for when, took in self.ran if at - HOUR_S < when <= at) for at, _ in self.ran),
            default=0.0,
        )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ends", "killed", "restart", "lost outcome"]),
            st.floats(0.5, 900),
            st.floats(0.01, COST_S),
        ),
        max_size=60,
    )
)
def test_no_hour_has_more_than_the_budget_however_often_the_agent_dies(
    steps: list[tuple[str, float, float]],
) -> None:
    world = World()
    budget = world.budget()
    for how, wait_s, took_s in steps:
        world.now += wait_s
        if how == "restart":
            budget = world.budget()
        if world.left(budget, "gpu:a") < COST_S:
            continue
        budget.book(ANY, COST_S)
        world.ran.append((world.now, took_s))
        if how == "killed":  # in the middle of the run
            budget = world.budget()
        elif how == "lost outcome":
            budget.settle(None, took_s)
        else:
            budget.settle({"gpu:a": took_s})
    assert world.most_in_an_hour() <= MOST_S + 1e-6


def test_a_loop_of_restarts_runs_no_more_benches_than_one_agent() -> None:
    world = World()
    for number in range(600):  # two hours of an agent that lives for twelve seconds
        world.now += 12.0
        every = {"h2d": 1.0}
        rota = Rota(every, MOST_S, world.clock, random.Random(number), world.budget())
        world.now += 2.0
        left = rota.left_s()
        if rota.next() and left.get("gpu:a", left.get(ANY, MOST_S)) >= COST_S:
            rota.begin(COST_S)
            world.ran.append((world.now, 2.5))
            if number % 2:
                rota.gone("h2d", {"gpu:a": ("ok", 2.5)})
    assert len(world.ran) > 4
    assert world.most_in_an_hour() <= MOST_S


def test_what_another_boot_took_counts_as_taken_now() -> None:
    world = World(now=90_000.0)
    budget = world.budget()
    budget.book("gpu:a", COST_S)
    budget.settle({"gpu:a": 9.0})
    world.now, world.boot = 5.0, "boot-2"
    assert world.left(world.budget(), "gpu:a") == 1.0
    assert world.left(world.budget(), "gpu:b") == MOST_S
    world.now += HOUR_S + 1
    assert world.left(world.budget(), "gpu:a") == MOST_S


def test_what_cannot_be_read_is_a_new_budget() -> None:
    for text in (None, "", "{", "[]", '{"spent": 3}', '{"booked": ["a"]}', "\x00"):
        assert Budget(MOST_S, "b", text).left_s() == {}


def test_a_run_that_hangs_counts_as_long_as_it_hung() -> None:
    world = World()
    rota = Rota({}, MOST_S, world.clock, random.Random(1), world.budget())
    rota.begin(COST_S)
    rota.gone("h2d", {"node:": ("hung", 0.0)}, unknown_s=120.0)
    assert rota.left_s() == {ANY: 0.0}
    rota.begin(0.0)  # of the host itself
    rota.gone("memcpy", {"node:": ("failed", 0.0)}, unknown_s=5.0)
    assert rota.left_s() == {ANY: 0.0}


def test_a_link_that_trained_down_stays_in_its_series_over_a_restart() -> None:
    kept: list[str] = []
    links = Links(None, kept.append)
    assert links.best("gpu:a", "pcie5x16") == "pcie5x16"
    assert links.best("gpu:a", "pcie5x8") == "pcie5x16"
    assert links.best("gpu:b", "pcie4x8") == "pcie4x8"
    again = Links(kept[-1], kept.append)
    assert again.best("gpu:a", "pcie1x4") == "pcie5x16"
    assert again.best("gpu:b", "pcie5x4") == "pcie5x8"
    assert again.best("gpu:b", "c2c") == "c2c"
    assert Links("nonsense").best("gpu:a", "pcie3x4") == "pcie3x4"
