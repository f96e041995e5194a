"""How much of the cards' time benches may still take this hour; kept over a restart of the agent.

What a run may take is booked before it begins and settled when it ends: an agent that is killed over and over
comes to no more than one that lives. Times are of the monotonic clock; those of another boot count as now.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

HOUR_S = 3600.0

ANY = ""
"""Stands for every card: what was booked for a run of which nobody knows which cards it reached."""

_MOST = 4096
"""Entries that are kept: an hour of more runs than there can be."""


class Kept(msgspec.Struct):
    """What is kept over a restart.

    Attributes:
        boot_id: Of the boot that the times are of.
        spent: Entity -> [time, seconds] of each run, oldest first.
        booked: Seconds that the run that is under way may take; of its entity.
    """

    boot_id: str = ""
    spent: dict[str, list[tuple[float, float]]] = {}
    booked: tuple[str, float] | None = None


class Budget:
    """The card time of one host's benches.

    Args:
        gpu_s_per_hour: Most time in any hour that benches may keep a card for themselves.
        boot_id: Of the running boot.
        text: What `save` was given last; anything unreadable counts as nothing.
        save: Keeps a text over restarts.
        clock: Monotonic seconds of this boot.
    """

    def __init__(
        self,
        gpu_s_per_hour: float,
        boot_id: str = "",
        text: str | None = None,
        save: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_s = gpu_s_per_hour
        self._boot_id = boot_id
        self._save = save
        self._clock = clock
        kept, now = _read(text), clock()
        same = kept.boot_id == boot_id
        self._spent = {
            entity: deque((at if same and at <= now else now, seconds) for at, seconds in runs[-_MOST:])
            for entity, runs in kept.spent.items()
        }
        self._booked: tuple[str, float] | None = None
        if kept.booked is not None:  # the agent ended in the middle of a run
            self._spend(*kept.booked)
        if kept.booked is not None or not same:
            self._keep()  # at its time of now, which the next start must not move

    def book(self, entity: str, seconds: float) -> None:
        """A run begins that may take so much of a card; `ANY` = of every card."""
        self._booked = (entity, seconds) if seconds > 0 else None
        if self._booked:
            self._keep()

    def settle(self, taken: Mapping[str, float] | None, least_s: float = 0.0) -> None:
        """The run ended.

        Args:
            taken: Seconds of each entity; None = nobody knows: what was booked counts.
            least_s: And if it is more, this.
        """
        booked, self._booked = self._booked, None
        if taken is None and booked is not None:
            self._spend(booked[0], max(booked[1], least_s))
        for entity, seconds in (taken or {}).items():
            if seconds > 0:
                self._spend(entity, seconds)
        self._keep()

    def left_s(self) -> dict[str, float]:
        """Seconds that entities may still have in this hour; `ANY` = those that are not named."""
        now = self._clock()
        for runs in self._spent.values():
            while runs and runs[0][0] <= now - HOUR_S:
                runs.popleft()
        sums = {entity: sum(seconds for _, seconds in runs) for entity, runs in self._spent.items()}
        common = sums.pop(ANY, 0.0)
        left = {entity: max(0.0, self._most_s - common - own) for entity, own in sums.items()}
        return left | ({ANY: max(0.0, self._most_s - common)} if common else {})

    def _spend(self, entity: str, seconds: float) -> None:
        self._spent.setdefault(entity, deque(maxlen=_MOST)).append((self._clock(), seconds))

    def _keep(self) -> None:
        self.left_s()  # lets go of what is older than an hour
        spent = {entity: list(runs) for entity, runs in self._spent.items() if runs}
        self._save(msgspec.json.encode(Kept(self._boot_id, spent, self._booked)).decode())


def _read(text: str | None) -> Kept:
    try:
        return msgspec.json.decode(text or "{}", type=Kept)
    except msgspec.MsgspecError:
        return Kept()
