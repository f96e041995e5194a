"""Data loaders of a simulated host: every card that trains has a process that fetches batches.

Rows of both sources as a real host has them, a function of scenario and time alone. They are coupled to the
card's own timeline: what a fault `data_starved` takes from utilisation and power, the process waited for.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers.timeline import CardPhase, NodePhase, Timeline, load_at
from gpufleet_agent.probes.loader import METRICS
from gpufleet_agent.scenario import Fault, Load, Scenario, matches, select

FIRST_PID = 40_000
"""The process of the card in slot n has this number plus n."""

_UID = 1000
_BEFORE_S = 3600.0
_STEP_S = 0.5
_HEALTHY_SHARE = 0.0006
_STARTUP_S = 4.2
_WORKERS, _PREFETCH = 8, 2
_HERTZ = 100
_STARVED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class _Work:
    """What the workers of a process do: how many run, hang on storage, sleep; and their use per second."""

    running: int
    disk: int
    sleeping: int
    cpu: float
    runqueue: float
    read_bytes: float


_HEALTHY = _Work(1, 0, 7, 1.4, 0.02, 6e7)
_WORK: Mapping[str, _Work] = {
    "storage": _Work(1, 5, 2, 0.9, 0.01, 4e7),
    "nfs_hung": _Work(0, 8, 0, 0.01, 0.0, 0.0),
    "cpu": _Work(8, 0, 0, 7.2, 2.4, 5e7),
    "remote": _Work(0, 0, 8, 0.3, 0.01, 0.0),
    "no_workers": _Work(0, 0, 0, 0.0, 0.0, 0.0),
}


@dataclass(slots=True)
class _Sums:
    """Cumulative counts of one process."""

    fetches: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    starved: float = 0.0
    longest_s: float = 0.0
    cpu_s: float = 0.0
    runqueue_s: float = 0.0
    read_bytes: float = 0.0


class SimulatedLoaders:
    """The loaders of one host.

    Args:
        scenario: What the fleet goes through.
        node: The host's name there.
        host: Its boots.
        cards: The lives of its cards, by slot.
    """

    def __init__(
        self,
        scenario: Scenario,
        node: str,
        host: Timeline[NodePhase],
        cards: Sequence[Timeline[CardPhase]],
    ) -> None:
        self._scenario = scenario
        self._node = node
        self._host = host
        self._cards = cards
        self._ranks: dict[tuple[int, float], tuple[int, int]] = {}

    def rows(self, t: float) -> Iterator[Row]:
        """What the hook told and what /proc shows at `t`, card by card."""
        for slot, card in enumerate(self._cards):
            stretch = list(self._stretch(card, t))
            if not stretch:
                continue
            begun = stretch[0][0]
            keys: dict[str, Cell] = {"pid": FIRST_PID + slot, "pid_start": self._ticks(begun, t), "uid": _UID}
            keys["state"] = "live"
            faults = [fault for fault in self._scenario.faults(self._node, slot) if _starves(fault)]
            sums, hist = self._sum(stretch, faults)
            cause = _cause(faults, t)
            if all(fault.param("hook") == "yes" or fault.end <= begun for fault in faults):
                yield self._hook(keys, slot, begun, cause, stretch[-1][2], sums, hist)
            if cause != "no_workers":
                yield _proc(keys, _WORK.get(cause, _HEALTHY), sums)

    def pid_start(self, slot: int, t: float) -> int | None:
        """When the process that trains on a card began, clock ticks since boot; None = none does."""
        stretch = self._stretch(self._cards[slot], t)
        return self._ticks(stretch[0][0], t) if stretch else None

    def _ticks(self, begun: float, t: float) -> int:
        return max(1, round((begun - self._host.at(t).booted_at) * _HERTZ))

    def _stretch(self, card: Timeline[CardPhase], t: float) -> list[tuple[float, float, CardPhase]]:
        """The phases of the process that trains at `t`, oldest first: from, to and what held."""
        ends = [later.start for _, later in pairwise(card.phases)] + [math.inf]
        found: list[tuple[float, float, CardPhase]] = []
        for phase, end in zip(card.phases, ends, strict=True):
            if phase.start > t:
                break
            if phase.kind != "train" or not phase.listed or phase.lost:
                found = []
                continue
            if found and found[-1][2].epoch != phase.epoch:
                found = []
            first = phase.start - (_BEFORE_S if phase is card.phases[0] else 0.0)
            found.append((first, min(end, t), phase))
        return found if found and found[-1][2] is card.at(t) else []

    def _sum(
        self, stretch: Sequence[tuple[float, float, CardPhase]], faults: Sequence[Fault]
    ) -> tuple[_Sums, list[int]]:
        """What a process has counted over its life."""
        sums, hist = _Sums(), [0.0] * 16
        for start, end, phase in stretch:
            passed = max(0.0, end - start)
            share = max(phase.starved, _HEALTHY_SHARE)
            step = _STEP_S / (1 - max(share, phase.slowed))
            fetches = passed / step
            sums.fetches += fetches
            sums.wait_s += passed * share
            sums.busy_s += passed * (1 - share)
            sums.starved += fetches * (min(1.0, 3 * share) if share > _STARVED_SHARE else 0.0)
            sums.longest_s = max(sums.longest_s, 3 * step * share if passed else 0.0)
            hist[_bucket(step * share)] += fetches
            work = _WORK.get(_cause(faults, start), _HEALTHY)
            sums.cpu_s += passed * work.cpu
            sums.runqueue_s += passed * work.runqueue
            sums.read_bytes += passed * work.read_bytes
        return sums, [int(count) for count in hist]

    def _hook(
        self,
        keys: Mapping[str, Cell],
        slot: int,
        begun: float,
        cause: str,
        phase: CardPhase,
        sums: _Sums,
        hist: Sequence[int],
    ) -> Row:
        rank, world = self._rank(slot, begun)
        return _whole("hook") | {
            "source": "hook",
            "loader": "train",
            **keys,
            "role": "train",
            "rank": rank,
            "local_rank": slot,
            "world": world,
            "lib": "torch-2.9.1",
            "fetches_total": int(sums.fetches),
            "wait_s_total": sums.wait_s,
            "busy_s_total": sums.busy_s,
            "startup_s_total": _STARTUP_S,
            "pause_s_total": 0.0,
            "starved_total": int(sums.starved),
            "wait_max_s": sums.longest_s,
            "wait_hist": ",".join(map(str, hist)),
            "ready": 0 if phase.starved > _STARVED_SHARE else _WORKERS * _PREFETCH - 1,
            "prefetch": _PREFETCH,
            "workers": 0 if cause == "no_workers" else _WORKERS,
            "messages_lost_total": 0,
        }

    def _rank(self, slot: int, t: float) -> tuple[int, int]:
        """Rank and number of ranks: a `[[load]]` is one job over its cards, else each host has its own."""
        load = load_at(self._scenario.loads(self._node, slot), max(0.0, t))
        if load not in self._scenario.load:
            return slot, len(self._cards)
        if (slot, t) not in self._ranks:
            self._ranks[slot, t] = _place(self._scenario, load, self._node, slot)
        return self._ranks[slot, t]


def _place(scenario: Scenario, load: Load, node: str, slot: int) -> tuple[int, int]:
    rank = world = 0
    for name in scenario.node_names():
        if matches(load.node, name):
            slots = select(load.gpu, scenario.gpu_count(name))
            if name == node:
                rank = world + slots.index(slot)
            world += len(slots)
    return rank, world


def _proc(keys: Mapping[str, Cell], work: _Work, sums: _Sums) -> Row:
    return _whole("proc") | {
        "source": "proc",
        "loader": "",
        **keys,
        "workers": _WORKERS,
        "worker_threads": 0,
        "pin_threads": 1,
        "pin_threads_running": 0,
        "workers_running": work.running,
        "workers_disk": work.disk,
        "workers_sleeping": work.sleeping,
        "worker_cpu_s_total": sums.cpu_s,
        "worker_runqueue_s_total": sums.runqueue_s,
        "worker_read_bytes_total": int(sums.read_bytes),
        "worker_read_chars_total": int(sums.read_bytes * 1.2 + sums.fetches * 4e6),
    }


def _whole(source: str) -> dict[str, Cell]:
    """Every column, as what this source does not tell."""
    return dict.fromkeys((metric.name for metric in METRICS), Null(Reason.NOT_SUPPORTED, source))


def _starves(fault: Fault) -> bool:
    return fault.kind == "data_starved"


def _cause(faults: Sequence[Fault], t: float) -> str:
    """Of the fault that starves the card at `t`; empty when none does."""
    return next((str(fault.param("cause")) for fault in reversed(faults) if fault.active(t)), "")


def _bucket(wait_s: float) -> int:
    """Which of the 16 counts a wait belongs to."""
    return min(15, int(wait_s * 1e6 / 16).bit_length())
