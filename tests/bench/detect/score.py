"""What was found, what was not, and what was said without reason."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tests.bench.detect.benches import RULES, Fired, Judged
from tests.bench.detect.world import LEARN_HOURS, Fault, World

TAIL_HOURS = 24
"""What fires this soon after a fault ended is still about it."""

CARD, HOST, FLEET = RULES


@dataclass(frozen=True, slots=True)
class Found:
    """One fault and what became of it: samples until it fired, None = never."""

    fault: Fault
    samples: int | None
    code: str


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one or more worlds.

    Attributes:
        false: Events without a fault; several cards of one host within three hours are one.
        fleet_events: Fired findings about the whole fleet.
        fleet_steps: Driver steps large enough to be one.
    """

    gpu_days: float
    oversampled: float
    found: Sequence[Found]
    false: Sequence[Fired]
    fleet_events: int
    fleet_steps: int
    bursts: int
    early: Sequence[Fired]
    """What fired without a fault while baselines were learned: as its days, it is in no rate."""

    def per_thousand(self, rule: str = "") -> tuple[int, float, float]:
        """False events, their rate per 1,000 GPU-days, its one-sided 95 % bound."""
        count = sum(1 for one in self.false if rule in ("", one.rule))
        return count, count / self.gpu_days * 1000, poisson_bound(count) / self.gpu_days * 1000

    def quality(self, smallest: float) -> tuple[float, float, float]:
        """Precision, recall and F1 at the base rate, over faults of at least this size."""
        faults = [one for one in self.found if one.fault.size >= smallest]
        hits = sum(1 for one in faults if one.samples is not None)
        recall = hits / len(faults) if faults else 1.0
        weighted = sum(1 for one in self.found if one.samples is not None) / self.oversampled
        precision = weighted / (weighted + len(self.false)) if weighted else 0.0
        both = precision + recall
        return precision, recall, 2 * precision * recall / both if both else 0.0


def score(world: World, judged: Judged, hours: int | None = None) -> Score:
    """Hold what fired against what was planted; `hours` = how far it was played, None = to its end."""
    until = hours or world.hours
    used: set[Fired] = set()
    found = [_found(world, fault, judged.fired, used) for fault in world.faults if fault.begin + 12 <= until]
    rest = [one for one in judged.fired if one not in used and one.rule != FLEET]
    fleet = [one for one in judged.fired if one.rule == FLEET]
    large = [step for step in world.steps if step.change <= -0.03]
    told = [one for one in fleet if any(s.begin <= one.hour < s.accepted + 2 for s in large)]
    events = _events(rest) + [one for one in fleet if one not in told]
    false = [one for one in events if one.hour >= LEARN_HOURS]
    gpu_days = world.gpu_days * (until - LEARN_HOURS) / (world.hours - LEARN_HOURS)
    bursts = sum(1 for _, begin in world.leaked if LEARN_HOURS <= begin < until)
    return Score(
        gpu_days,
        world.oversampled,
        found,
        false,
        len(fleet),
        sum(1 for step in large if step.begin + 24 <= until),
        bursts,
        [one for one in events if one.hour < LEARN_HOURS],
    )


def together(scores: Iterable[Score]) -> Score:
    """One score of many fleets."""
    every = list(scores)
    return Score(
        sum(one.gpu_days for one in every),
        every[0].oversampled,
        [found for one in every for found in one.found],
        [false for one in every for false in one.false],
        sum(one.fleet_events for one in every),
        sum(one.fleet_steps for one in every),
        sum(one.bursts for one in every),
        [early for one in every for early in one.early],
    )


def poisson_bound(count: int) -> float:
    """The largest mean under which so few events still have a chance of 5 %."""
    low, high = 0.0, 10.0 + 3 * count
    for _ in range(60):
        mean = (low + high) / 2
        chance = sum(math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(count + 1))
        low, high = (mean, high) if chance > 0.05 else (low, mean)
    return high


def quantile(samples: Sequence[int | None], part: float) -> float:
    """Of delays; what was never found counts as infinite."""
    ordered = sorted(math.inf if one is None else one for one in samples)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def _found(world: World, fault: Fault, fired: Sequence[Fired], used: set[Fired]) -> Found:
    mine = [
        one
        for one in fired
        if one.rule != FLEET and one.host == fault.host and fault.begin <= one.hour < fault.end + TAIL_HOURS
        and (one.card in (fault.card, -1) if fault.kind != "host" else True)
    ]  # fmt: skip
    if fault.kind != "host":
        mine = [one for one in mine if one.rule == CARD]
    used.update(mine)
    right = [
        one for one in mine if one.rule == (HOST if fault.kind == "host" else CARD) and one.hour < fault.end
    ]
    if not right:
        return Found(fault, None, "")
    first = min(right, key=lambda one: one.hour)
    card = max(fault.card, 0)
    ok = world.status[fault.host, card, fault.begin : first.hour + 1] == 1
    return Found(fault, int(np.count_nonzero(ok)), first.code)


def _events(fired: Sequence[Fired]) -> list[Fired]:
    """One event per host and three hours, however many cards."""
    events: list[Fired] = []
    for one in sorted(fired, key=lambda one: one.hour):
        if not any(e.host == one.host and one.hour - e.hour <= 3 for e in events):
            events.append(one)
    return events
