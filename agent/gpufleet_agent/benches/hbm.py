"""Copying within a card's memory, per card. GB/s: what trouble with the memory or its clock shows.

A byte copied is read and written, and counts twice.
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
CONVENTION = "read_plus_write"
PARAMS: Mapping[str, Value] = {"bytes": 512 << 20, "copies": 16, "repeats": 5}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    return on_card("hbm", at, params, CONVENTION)
