from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.scenario import Scenario, load, parse


class Clock:
    """Seconds since the scenario's start, set by the test."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scenarios() -> Path:
    return Path(__file__).parents[2] / "fixtures" / "scenarios"


@pytest.fixture
def everything(scenarios: Path) -> Scenario:
    return load(scenarios / "everything.toml")


@pytest.fixture
def play(clock: Clock) -> Callable[..., SimulatedHost]:
    """One host of a scenario text; its clock is the `clock` fixture."""

    def host(text: str, node: str = "gpu-001") -> SimulatedHost:
        return parse(text.encode()).host(node, clock, 1_700_000_000_000_000)

    return host
