"""The clock a card's processors really run at under a light load, per card. MHz.

Cycles that the processors count, over the time that the whole card takes: one part of it that runs slower
than the rest is seen, and a clock that the driver reports wrongly too.
"""

from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place, on_card

EVERY = 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "gpu"
COST_S = 3.0
CONVENTION = "cycles_over_slowest"
PARAMS: Mapping[str, Value] = {"launch_ms": 20, "repeats": 5}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    return on_card("clock", at, params, CONVENTION)
