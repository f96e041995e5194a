"""Single-precision arithmetic on all of a card, per card. TFLOPS; one multiply-add counts two.

Each repeat must give the same bits: a card that calculates wrong without a word is found here.
"""

from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place, on_card

EVERY = 6 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "gpu"
COST_S = 3.0
CONVENTION = "fp32_fma_is_two"
PARAMS: Mapping[str, Value] = {"launch_ms": 20, "repeats": 9}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    return on_card("fma", at, params, CONVENTION)
