"""A seeded fleet in simulated time: what its hourly benches would say, and what is really wrong with it.

Everything is drawn from one seed. Values are logarithms of the part of the card's typical value that is
reached, one per host, card and hour. What the gate keeps out has no value; what it lets through is in them.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
Small = NDArray[np.int8]
CARDS = 8
LEARN_HOURS = 52
"""Until then baselines are learned; nothing is planted, but interference is."""

BASE_RATE = 0.5
"""Faults per 1,000 GPU-days in a real fleet."""

OVERSAMPLED = 20
"""Faults are planted so many times as often as they happen, and weighted back."""

SIZES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30)
FAULT_HOURS = 60
"""How long one lasts."""


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of card: its full name, typical h2d, link, scatter between runs."""

    name: str
    typical: float
    link: str
    sigma: float


MODELS = (
    Model("NVIDIA H100 80GB HBM3", 54.8, "pcie5x16", 0.005),
    Model("NVIDIA H200", 55.4, "pcie5x16", 0.003),
    Model("NVIDIA A100-SXM4-80GB", 25.9, "pcie4x16", 0.010),
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the simulated sites are like; printed with the result.

    Attributes:
        interference: Part of the runs that meet a neighbour, single ones and bursts each.
        leak: Part of the interference that the gate lets through; bursts leak or not as a whole.
        burst_hours: Mean length of host-wide interference.
        low, high: What interference costs.
        diurnal: Amplitude of the day's rhythm that all cards share.
        between: Scatter between cards.
        missing: Runs that never come.
        reboot_days: Mean time between planned reboots of a host, each one or two rounds long.
        skewed: Part of the hosts whose clock is off by up to 90 s.
        busy: Part of the runs that the gate skips because a job works.
    """

    interference: float = 0.01
    leak: float = 0.10
    burst_hours: float = 3.0
    low: float = 0.05
    high: float = 0.40
    diurnal: float = 0.005
    between: float = 0.02
    missing: float = 0.02
    reboot_days: float = 30.0
    skewed: float = 0.05
    busy: float = 0.10


@dataclass(frozen=True, slots=True)
class Fault:
    """Something really wrong. `kind`: step, ramp, flicker (a card), host (all its cards)."""

    kind: str
    host: int
    card: int
    size: float
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """A driver that moves every card of a model, rolled out over a day; a person accepts it in the end."""

    model: int
    begin: int
    change: float
    accepted: int


@dataclass(slots=True)
class World:
    """One fleet's benches and its truth."""

    seed: int
    hosts: int
    hours: int
    assumed: Assumed
    model: NDArray[np.int64]
    """Of each host."""
    value: Numbers
    """hosts x cards x hours; NaN = no value."""
    status: Small
    """0 no row at all, 1 ok, 2 skipped, 3 contaminated."""
    newer: Flags
    """hosts x hours: whether the newer driver is in."""
    offset_s: Numbers
    """hosts: what the clock is off."""
    faults: list[Fault] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    leaked: list[tuple[int, int]] = field(default_factory=list)
    """Bursts that the gate missed: host, first hour."""
    oversampled: float = OVERSAMPLED

    @property
    def gpu_days(self) -> float:
        """Judged: after the baselines were learned."""
        return self.hosts * CARDS * (self.hours - LEARN_HOURS) / 24


def make(
    seed: int, hosts: int, hours: int, oversampled: float = OVERSAMPLED, assumed: Assumed | None = None
) -> World:
    """Draw one fleet."""
    given = assumed or Assumed()
    rng = np.random.default_rng(seed)
    model = rng.choice(len(MODELS), hosts, p=(0.5, 0.2, 0.3))
    sigma = np.array([one.sigma for one in MODELS])[model]
    shape = (hosts, CARDS, hours)
    loss = rng.normal(0, 1, shape) * sigma[:, None, None]
    loss += rng.normal(0, given.between, (hosts, CARDS, 1))
    loss += given.diurnal * np.sin(2 * np.pi * np.arange(hours) / 24)
    world = World(
        seed, hosts, hours, given, model, loss, np.ones(shape, np.int8), np.zeros((hosts, hours), bool),
        np.where(rng.random(hosts) < given.skewed, rng.uniform(-90, 90, hosts), 0.0),
        oversampled=oversampled,
    )  # fmt: skip
    _steps(world, rng)
    _faults(world, rng)
    _interference(world, rng)
    _gaps(world, rng)
    world.value[world.status != 1] = np.nan
    return world


def _steps(world: World, rng: np.random.Generator) -> None:
    """-6 % for one model in the second quarter, -2 % for another in the third."""
    span = world.hours - LEARN_HOURS
    for model, share, change in ((2, 0.25, -0.06), (0, 0.6, -0.02)):
        begin = LEARN_HOURS + int(span * share)
        world.steps.append(Step(model, begin, change, begin + 72))
        for host in np.flatnonzero(world.model == model):
            since = begin + int(rng.integers(0, 24))
            world.value[host, :, since:] += np.log1p(change)
            world.newer[host, since:] = True


def _faults(world: World, rng: np.random.Generator) -> None:
    """Over-sampled, and one on a host at most, so that what fires has one explanation."""
    wanted = rng.poisson(world.gpu_days * BASE_RATE * world.oversampled / 1000)
    taken: set[int] = set()
    for number in range(wanted):
        host = int(rng.integers(world.hosts))
        begin = int(rng.integers(LEARN_HOURS, max(world.hours - FAULT_HOURS, LEARN_HOURS + 1)))
        if host in taken:
            continue
        taken.add(host)
        size = SIZES[number % len(SIZES)]
        kind = ("step", "step", "step", "step", "ramp", "flicker", "step", "host")[number // len(SIZES) % 8]
        end = min(begin + FAULT_HOURS, world.hours)
        card = int(rng.integers(CARDS))
        hours = np.arange(end - begin)
        course = {
            "step": np.ones(end - begin),
            "host": np.ones(end - begin),
            "ramp": np.minimum(1, hours / 24),
            "flicker": (hours % 12 < 6).astype(float),
        }[kind]
        cards = slice(None) if kind == "host" else slice(card, card + 1)
        world.value[host, cards, begin:end] += np.log1p(-size * course)
        world.faults.append(Fault(kind, host, -1 if kind == "host" else card, size, begin, end))


def _interference(world: World, rng: np.random.Generator) -> None:
    given = world.assumed
    shape = world.value.shape
    hit = rng.random(shape) < given.interference
    leaks = rng.random(shape) < given.leak
    world.value[hit & leaks] += np.log1p(-rng.uniform(given.low, given.high, int((hit & leaks).sum())))
    world.status[hit & ~leaks] = 3
    starts = np.argwhere(rng.random((world.hosts, world.hours)) < given.interference / given.burst_hours)
    for host, begin in starts:
        end = min(int(begin) + int(rng.geometric(1 / given.burst_hours)), world.hours)
        if rng.random() < given.leak:
            world.leaked.append((int(host), int(begin)))
            level = rng.uniform(given.low, given.high)
            each = level * rng.uniform(0.5, 1.5, (CARDS, end - int(begin)))
            world.value[host, :, begin:end] += np.log1p(-each)
        else:
            world.status[host, :, begin:end] = 3


def _gaps(world: World, rng: np.random.Generator) -> None:
    given = world.assumed
    shape = world.status.shape
    day = np.arange(world.hours) % 24
    load = given.busy * (1 + np.sin(2 * np.pi * (day - 9) / 24))
    world.status[rng.random(shape) < load] = 2
    world.status[rng.random(shape) < given.missing] = 0
    for host, hour in np.argwhere(rng.random((world.hosts, world.hours)) < 1 / (24 * given.reboot_days)):
        world.status[host, :, hour : hour + int(rng.integers(1, 3))] = 0
