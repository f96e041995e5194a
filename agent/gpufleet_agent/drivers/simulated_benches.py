"""What benches find on a simulated card: a function of the scenario and the time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from gpufleet.metric import Row
from gpufleet_agent.drivers import BenchResult, cards, link_between
from gpufleet_agent.drivers.timeline import CardPhase, noise

UNITS = {"h2d": "GB/s", "d2h": "GB/s", "hbm": "GB/s", "clock": "MHz", "fma": "TFLOPS", "p2p": "GB/s",
         "gemm": "TFLOPS"}  # fmt: skip
"""The benches that are simulated, and the units of their results."""

_REPEAT_SPREAD = 0.002
_SPREAD = {"h2d": cards.H2D_SPREAD, "d2h": cards.H2D_SPREAD, "hbm": 0.003, "clock": 0.001, "fma": 0.003,
           "p2p": 0.002, "gemm": 0.004}  # fmt: skip
_GB_PER_S_PER_MHZ = {True: 1.05, False: 0.075}
"""What cards with and without stacked memory copy per MHz of its clock, about."""

_LANES = {"fma": 16384, "gemm": 163840}
_OF_WIRE = {"nvlink": 0.83, "pcie": 0.8}
"""What a copy between two cards gets of the links it goes over, or of a copy from the host."""

_SECONDS = 0.12


def run(name: str, model: cards.Model, phase: CardPhase, t: float, repeats: int) -> BenchResult:
    """A result with the noise of a real one; the seed is that of the card, the noise of copies is h2d's."""
    if (
        name in ("fma", "gemm")
        and noise(phase.board.key ^ 0x44, int(t * 1000)) % 10000 < 1e4 * phase.corrupts
    ):
        why = "corrupt: the same work gave other bits in 2 of 264 blocks, on processors 17"
        return BenchResult("failed", None, UNITS[name], why, (), _SECONDS, _SECONDS)
    return _noisy(name, _true(name, model, phase), phase, t, repeats)


def pair(
    model: cards.Model,
    ends: Sequence[CardPhase],
    links: tuple[Sequence[Row], Sequence[Row]],
    t: float,
    repeats: int,
) -> BenchResult:
    """A copy from the first card to the second, over what lies between the two.

    Args:
        model: Of both.
        ends: What holds for them.
        links: Their NVLinks.
        t: Now.
        repeats: So many samples.
    """
    kind = link_between(*links, ends[1].board.pci)
    if kind == "nvlink":
        wires = min(sum(_speed(row) for row in rows) for rows in links)
    else:
        wires = min(cards.h2d_gb_per_s(model, end.board, end.gen, end.width) for end in ends)
    return replace(_noisy("p2p", _OF_WIRE[kind] * wires, ends[0], t, repeats), link=kind)


def _speed(link: Row) -> float:
    speed = link.get("speed_gb_per_s")
    return float(speed) if isinstance(speed, int | float) else 0.0


def _noisy(name: str, value: float, phase: CardPhase, t: float, repeats: int) -> BenchResult:
    card, salt = phase.board.key, 2 * list(UNITS).index(name)
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
    return clock if name == "clock" else 2 * _LANES[name] * clock / 1e6


def _bell(key: int, count: int) -> float:
    """About normal with variance 1, never beyond 3.5: the sum of four even numbers."""
    bits = noise(key, count)
    total = sum((bits >> shift & 0xFFFF) / 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 2) * math.sqrt(3)
