"""Copying from a card's memory into that of another card of the host, per pair and direction. GB/s.

A byte copied counts once. The link of a result is what lies between the two and where they sit, e.g.
`nvlink:1b:00>43:00`, so that each pair is a series of its own and has its twins in other hosts. In one run
each card sends to one other card; the runs of some hours come round to all.
"""

from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place, on_card

EVERY = 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "pair"
COST_S = 3.0
CONVENTION = "copied_once"
PARAMS: Mapping[str, Value] = {"bytes": 64 << 20, "copies": 16, "repeats": 5}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver of the card that sends."""
    if at.peer is None:
        return BenchResult("unsupported", None, "GB/s", "no other card on this host"), CONVENTION
    return on_card("p2p", at, params, CONVENTION)
