"""Multiplying matrices on all of a card, out of registers alone, per card. TFLOPS; one multiply-add counts two.

By the best instruction that the card has, tensor cores where there are any; the convention says which one, of
what numbers, and the architecture. It keeps them busy under full power, but is no measure of what a library
reaches: a card is compared with itself and with its twins. Each block does the same work again and again, and
must give the same bits as all others: a card that calculates wrong without a word is found here.
"""

from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place, on_card

EVERY = 24 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu", "pair"] = "gpu"
COST_S = 3.0
CONVENTION = "multiply_add_is_two"
PARAMS: Mapping[str, Value] = {"launch_ms": 25, "repeats": 40}


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Ask the driver."""
    return on_card("gemm", at, params, CONVENTION)
