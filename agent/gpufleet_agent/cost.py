"""What the agent costs: CPU time and memory of its standing processes, for its own row in table `agent`."""

from collections.abc import Iterable

import psutil


class Cost:
    """Adds up the CPU time of processes that come and go."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._running: dict[int, float] = {}

    def read(self, pids: Iterable[int]) -> tuple[float, int | None]:
        """(CPU seconds since the first was started, bytes of memory by proportional share or None)."""
        seen: dict[int, float] = {}
        pss: int | None = 0
        for pid in pids:
            try:
                process = psutil.Process(pid)
                times = process.cpu_times()
                seen[pid] = times.user + times.system
                pss = None if pss is None else pss + process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:
                pss = None
        self._ended_s += sum(spent for pid, spent in self._running.items() if pid not in seen)
        self._running = seen
        return self._ended_s + sum(seen.values()), pss
