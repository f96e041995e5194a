"""What benches find on a simulated card: a function of the scenario and the time."""

import math
from statistics import median

from gpufleet_agent.drivers import BenchResult, cards
from gpufleet_agent.drivers.timeline import CardPhase, noise

UNITS = {"h2d": "GB/s", "d2h": "GB/s", "hbm": "GB/s", "clock": "MHz", "fma": "TFLOPS"}
"""The benches that are simulated, and the units of their results."""

_REPEAT_SPREAD = 0.002
_SPREAD = {"h2d": cards.H2D_SPREAD, "d2h": cards.H2D_SPREAD, "hbm": 0.003, "clock": 0.001, "fma": 0.003}
_GB_PER_S_PER_MHZ = {True: 1.05, False: 0.075}
"""What cards with and without stacked memory copy per MHz of its clock, about."""

_LANES = 16384
_SECONDS = 0.12


def run(name: str, model: cards.Model, phase: CardPhase, t: float, repeats: int) -> BenchResult:
    """A result with the noise of a real one; the seed is that of the card, the noise of copies is h2d's."""
    card, salt = phase.board.key, 2 * list(UNITS).index(name)
    value = _true(name, model, phase)
    value *= 1 + _SPREAD[name] * _bell(card ^ 0x42 ^ salt << 8, int(t * 1000))
    samples = tuple(
        value * (1 + _REPEAT_SPREAD * _bell(card ^ 0x43 ^ salt << 8, int(t * 1000) + repeat))
        for repeat in range(min(100, max(1, repeats)))
    )
    seconds = _SECONDS * len(samples)
    return BenchResult("ok", median(samples), UNITS[name], "", samples, seconds, seconds)


def _true(name: str, model: cards.Model, phase: CardPhase) -> float:
    """Without noise."""
    if name in ("h2d", "d2h"):
        copied = cards.h2d_gb_per_s(model, phase.board, phase.gen, phase.width)
        return copied * (phase.h2d if name == "h2d" else 1.0)
    if name == "hbm":
        return model.mem_clock_max_mhz * _GB_PER_S_PER_MHZ[model.hbm]
    clock = min(phase.clock, phase.clock_cut) if phase.util and phase.duty else phase.clock
    if not phase.util:
        clock = float(model.sm_clock_busy_mhz)
    return clock if name == "clock" else 2 * _LANES * clock / 1e6


def _bell(key: int, count: int) -> float:
    """About normal with variance 1, never beyond 3.5: the sum of four even numbers."""
    bits = noise(key, count)
    total = sum((bits >> shift & 0xFFFF) / 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 2) * math.sqrt(3)
