"""Copying from host memory to a card, per card. GB/s. Run by the driver: only it can reach the card."""

from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place

EVERY = 3600.0
VERSION = "1"
ON: Literal["host", "gpu"] = "gpu"
CONVENTION = "copied_once"
PARAMS: Mapping[str, Value] = {"repeats": 5}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    assert at.host is not None
    assert at.gpu is not None
    return at.host.run_bench("h2d", {**params, "pci": at.gpu.pci}), CONVENTION
