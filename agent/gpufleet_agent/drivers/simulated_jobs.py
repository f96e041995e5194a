"""The jobs of a simulated fleet: one `[[load]]` is one job, on all the hosts and cards it names.

A load that trains is a Slurm job with a rank per card, one that serves (inference) a pod per host. Cards that
no load names work for a job of their host. Pure: what a process is follows from the scenario and the time.
"""

from collections.abc import Callable
from functools import cached_property

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import cards
from gpufleet_agent.drivers.jobs import COLUMNS
from gpufleet_agent.drivers.simulated_loader import FIRST_PID
from gpufleet_agent.drivers.timeline import NodePhase
from gpufleet_agent.scenario import Load, Scenario, matches, select

_USERS = ("ana", "ben", "chen", "dana", "eli", "femi")
_FIRST_UID = 2001
_FIRST_JOB = 41_778
_TICKS = 100
_NO_PROCESS = Null(Reason.FAILED, "no_such_pid")
_NO_RANK = Null(Reason.NOT_SUPPORTED, "unset")


class SimulatedJobs:
    """Whose work the cards of one host do.

    Args:
        scenario: What the fleet goes through.
        node: The host.
        pid_start: When the process that trains on the card of a slot began, in ticks; None = none does.
    """

    def __init__(self, scenario: Scenario, node: str, pid_start: Callable[[int, float], int | None]) -> None:
        self._pid_start = pid_start
        self._scenario = scenario
        self._node = node
        self._count = scenario.gpu_count(node)
        self._places: dict[int, tuple[int, int]] = {}

    def process(
        self, pid: int, t: float, host: NodePhase, share_io: float, share_cpu: float
    ) -> dict[str, Cell]:
        """The columns of probe `job` about the process on the card in slot `pid - FIRST_PID`."""
        slot = pid - FIRST_PID
        if not 0 <= slot < self._count:
            return dict.fromkeys(COLUMNS, _NO_PROCESS)
        index, load = self._load(slot, t)
        begun = max(load.at, host.booted_at) - host.booted_at
        up = max(0.0, t - host.booted_at - begun)
        row: dict[str, Cell] = {
            "pid_start": self._pid_start(slot, t) or int(begun * _TICKS) + 3000 + slot,
            "command": "python3" if load.kind == "train" else "vllm",
            "psi_io_some_s_total": share_io * up,
            "psi_io_full_s_total": share_io / 2 * up,
            "psi_cpu_some_s_total": share_cpu * up,
            "psi_memory_full_s_total": 0.0,
        }
        return row | self._job(index, load, slot)

    def _job(self, index: int, load: Load, slot: int) -> dict[str, Cell]:
        seed = self._scenario.fleet.seed
        key = cards.number(seed, "job", index if index >= 0 else self._node)
        user = key % len(_USERS)
        row: dict[str, Cell] = {"user": _USERS[user], "uid": _FIRST_UID + user}
        if load.kind == "inference":
            pod = cards.uuid(seed, self._node, "pod", index)
            container = f"{key:016x}" * 4
            row |= {"job_kind": "kubernetes", "job_id": pod, "job_step": "", "container": container}
            return row | dict.fromkeys(("rank", "local_rank", "world"), _NO_RANK)
        number = _FIRST_JOB + index if index >= 0 else 1_000_000 + key % 60_000_000
        local, before, world = self._ranks(index, load, slot)
        return row | {
            "job_kind": "slurm", "job_id": str(number), "job_step": "0", "container": "",
            "rank": before + local, "local_rank": local, "world": world,
        }  # fmt: skip

    def _load(self, slot: int, t: float) -> tuple[int, Load]:
        """The load that holds for a card, and its place in the scenario; -1 = the usual one."""
        held = [(index, load) for index, load in self._loads[slot]
                if load.at <= t and (load.until is None or t < load.until)]  # fmt: skip
        return held[-1] if held else (-1, self._scenario.loads(self._node, slot)[0])

    @cached_property
    def _loads(self) -> list[list[tuple[int, Load]]]:
        mine = [
            (index, load) for index, load in enumerate(self._scenario.load) if matches(load.node, self._node)
        ]
        return [
            [(index, load) for index, load in mine if slot in select(load.gpu, self._count)]
            for slot in range(self._count)
        ]

    def _ranks(self, index: int, load: Load, slot: int) -> tuple[int, int, int]:
        """Local rank, ranks on the hosts before this one, ranks in all; ranks follow the hosts' order."""
        if index < 0:
            return slot, 0, self._count
        if index not in self._places:
            self._places[index] = self._place(load)
        return select(load.gpu, self._count).index(slot), *self._places[index]

    def _place(self, load: Load) -> tuple[int, int]:
        before = world = 0
        for node in self._scenario.node_names():
            if node == self._node:
                before = world
            if matches(load.node, node):
                world += len(select(load.gpu, self._scenario.gpu_count(node)))
        return before, world
