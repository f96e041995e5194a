"""Which bench is next.

The stalest goes first: the one that is overdue by the largest part of its own interval. What was skipped or
preempted is due again after a while, so that a short idle moment of a busy card is found, and so is a wrong
result, once, so that it is known for sure; where nothing at all could be measured, nothing else is tried for
as long. Every time is spread by a fifth: a fleet that was started at once does not measure at once.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpufleet_agent.budget import ANY, Budget

RETRY_S = 300.0
"""A card that was busy is tried again after this, or after the bench's own interval if that is shorter."""

FIRST_S = 60.0
"""Benches wait this long after the start, or their own interval if that is shorter."""

_SPREAD = 0.2
_NOT_MEASURED = ("skipped", "preempted", "contaminated")


@dataclass(slots=True)
class _Bench:
    every_s: float
    due: float
    entities: dict[str, float] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)


class Rota:
    """The benches of one host.

    Args:
        every_s: Interval of each bench.
        gpu_s_per_hour: Most time per hour that they may keep a card for themselves.
        clock: Monotonic seconds.
        dice: For spreading.
        budget: What may still be taken of the cards' time; None = a new one.
    """

    def __init__(
        self,
        every_s: Mapping[str, float],
        gpu_s_per_hour: float,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._clock = clock
        self._dice = dice or random.Random()
        self._budget = budget or Budget(gpu_s_per_hour, clock=clock)
        self._total_s = 0.0
        self._rest_until = -math.inf
        now = clock()
        self._benches = {
            name: _Bench(every, now + min(every, FIRST_S) * self._dice.uniform(1.0, 1.5))
            for name, every in every_s.items()
        }

    @property
    def tick_s(self) -> float:
        """How often to ask for the next one."""
        return min([15.0, *(bench.every_s / 2 for bench in self._benches.values())])

    @property
    def gpu_s_total(self) -> float:
        """Time that benches kept cards for themselves, of all cards."""
        return self._total_s

    def next(self) -> str:
        """The stalest bench that is due; empty when none is."""
        now = self._clock()
        if now < self._rest_until:
            return ""
        overdue = {name: (now - bench.due) / bench.every_s for name, bench in self._benches.items()}
        name = max(overdue, key=overdue.__getitem__, default="")
        return name if name and overdue[name] >= 0 else ""

    def fresh(self, name: str) -> list[str]:
        """Entities that need no run of it now."""
        bench, now = self._benches.get(name), self._clock()
        # those that would be due within a few minutes go along
        soon = now + min(RETRY_S, bench.every_s / 4) if bench else now
        return [entity for entity, due in bench.entities.items() if due > soon] if bench else []

    def left_s(self) -> dict[str, float]:
        """Card time that entities may still have in this hour, as `Budget.left_s`."""
        return self._budget.left_s()

    def begin(self, cost_s: float, entity: str = ANY) -> None:
        """A run begins that may keep a card so long; `ANY` = every card."""
        self._budget.book(entity, cost_s)

    def gone(
        self,
        name: str,
        outcomes: Mapping[str, tuple[str, float]],
        peers_s: Mapping[str, float] | None = None,
        *,
        asked: bool = False,
        unknown_s: float | None = None,
    ) -> None:
        """A run ended.

        Args:
            name: Of the bench.
            outcomes: Status and card time of each entity; the status of a wrong result is `corrupt`.
            peers_s: Card time of each entity as the other end of a pair.
            asked: It was not for the interval: what it could not measure is not tried again for that.
            unknown_s: It did not end by itself: nobody knows what it took of which cards in so many seconds.
        """
        now = self._clock()
        taken: dict[str, float] = {}
        for entity, gpu_s in (
            *((entity, gpu_s) for entity, (_, gpu_s) in outcomes.items()),
            *(peers_s or {}).items(),
        ):
            taken[entity] = taken.get(entity, 0.0) + gpu_s
        self._total_s += sum(taken.values())
        if unknown_s is None:
            self._budget.settle(taken)
        else:
            self._budget.settle(None, unknown_s)
        bench = self._benches.get(name)
        if bench is None:
            return
        for entity, (status, _) in outcomes.items():
            missed = status in _NOT_MEASURED
            again = status == "corrupt" and entity not in bench.corrupt
            if again:
                bench.corrupt.add(entity)
            elif not missed:
                bench.corrupt.discard(entity)
            if not (missed and asked):
                wait = min(RETRY_S, bench.every_s) if missed or again else bench.every_s
                bench.entities[entity] = now + self._spread(wait)
        if not asked:
            present = {entity: bench.entities[entity] for entity in outcomes}
            later = {entity: due for entity, due in bench.entities.items() if due > now}
            bench.entities = later | present
            if outcomes and all(status == "skipped" for status, _ in outcomes.values()):
                # to look takes a process: a host that is busy for days must not feel it
                self._rest_until = now + self._spread(min(RETRY_S, bench.every_s))
            bench.due = min(bench.entities.values(), default=now + self._spread(bench.every_s))

    def _spread(self, wait_s: float) -> float:
        return wait_s * self._dice.uniform(1 - _SPREAD, 1 + _SPREAD)
