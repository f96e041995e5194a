"""Copying from host memory to a card, per card. GB/s. Shows a link that is narrow, slow or sends again.

The memory is pinned, and on the card's own NUMA node where the system lets us choose; else the convention
says so. A byte copied counts once.
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
CONVENTION = "copied_once"
PARAMS: Mapping[str, Value] = {"bytes": 64 << 20, "copies": 16, "repeats": 5}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    return on_card("h2d", at, params, CONVENTION)
