"""Processes that are stuck in the kernel, and zombies: a walk over /proc once a minute, for probe `host`.

A process is stuck when one walk after another finds it in uninterruptible sleep, without having run in
between. With a kill pending it is beyond help: only a reboot ends it, and what it holds (a card, a mount)
stays held. Such a process is often a zombie by its first thread, while another one is stuck. A thread that is
stuck in a process whose first thread is well is not seen: there are too many threads to look at.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

COLUMNS = (
    "processes_zombie", "processes_stuck", "stuck_s", "stuck_comm", "processes_unkillable", "unkillable_s",
)  # fmt: skip

WALK_S = 60.0

_RELEARN_WALKS = 30
_MOST_THREADS = 64
_KERNEL_THREAD = 0x00200000
_KILL = 1 << 8
_CONTAINER = Null(Reason.NOT_SUPPORTED, "pid_namespace")
"""Only what sees every process of the host sees the kernel's own threads."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """Of /proc/PID/stat."""

    comm: str
    state: str
    flags: int
    ran: int
    threads: int
    started: int


@dataclass(frozen=True, slots=True)
class _Asleep:
    """A process in uninterruptible sleep: since when, how it was then, and which of its threads."""

    comm: str
    since: float
    ran: int
    started: int
    thread: Path


class Processes:
    """The walk.

    Args:
        root: Where /proc is.
        clock: Monotonic seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._proc = root / "proc"
        self._clock = clock
        self._due = float("-inf")
        self._walks = 0
        self._found: Mapping[str, Cell] = {}
        self._asleep: dict[int, _Asleep] = {}
        self._kernel: set[int] = set()

    def read(self) -> Mapping[str, Cell]:
        """The columns about processes, as of the last walk."""
        now = self._clock()
        if now >= self._due:
            self._due = now + WALK_S
            self._found = self._walk(now)
        return self._found

    def _walk(self, now: float) -> Mapping[str, Cell]:
        try:
            pids = [int(name) for name in os.listdir(self._proc) if re.fullmatch("[0-9]{1,10}", name)]
        except OSError as error:
            return dict.fromkeys(COLUMNS, files.why(error))
        self._walks += 1
        if self._walks % _RELEARN_WALKS == 0:
            self._kernel.clear()  # numbers are used again
        asleep: dict[int, _Asleep] = {}
        zombies, hidden = 0, None if 1 in pids else Null(Reason.NO_PERMISSION, "hidepid")
        for pid in pids:
            if pid in self._kernel:
                continue
            home = self._proc / str(pid)
            stat = _stat(home)
            if isinstance(stat, Null):
                hidden = stat if stat.reason is Reason.NO_PERMISSION else hidden
                continue
            if stat.flags & _KERNEL_THREAD:
                self._kernel.add(pid)
            elif thread := _sleeping(home, stat):
                asleep[pid] = self._since(pid, stat, thread, now)
            elif stat.state == "Z":
                zombies += 1
        self._asleep = asleep
        return self._told(now, zombies, hidden if hidden or self._kernel else _CONTAINER)

    def _since(self, pid: int, stat: _Stat, thread: Path, now: float) -> _Asleep:
        before = self._asleep.get(pid)
        same = before is not None and (before.started, before.ran) == (stat.started, stat.ran)
        since = before.since if before is not None and same else now
        return _Asleep(stat.comm, since, stat.ran, stat.started, thread)

    def _told(self, now: float, zombies: int, hidden: Null | None) -> Mapping[str, Cell]:
        """What the walk found. Where some processes are hidden, having found none says nothing."""
        stuck = {pid: one for pid, one in self._asleep.items() if one.since < now and not self._frozen(pid)}
        doomed = [one for one in stuck.values() if _kill_pending(one.thread)]
        oldest = min(stuck.values(), key=lambda one: one.since, default=None)
        if hidden is not None and oldest is None:
            return dict.fromkeys(COLUMNS, hidden)
        return {
            "processes_zombie": zombies if hidden is None else hidden,
            "processes_stuck": len(stuck),
            "stuck_s": now - oldest.since if oldest else 0.0,
            "stuck_comm": oldest.comm if oldest else "",
            "processes_unkillable": len(doomed),
            "unkillable_s": max((now - one.since for one in doomed), default=0.0),
        }

    def _frozen(self, pid: int) -> bool:
        """Whether somebody put it on ice: a suspended job sleeps like this, and wakes when it is asked to."""
        text = files.read(self._proc / str(pid) / "cgroup")
        found = None if isinstance(text, Null) else re.search(r"^\d+:freezer:/?(\S*)$", text, re.MULTILINE)
        if found is None:
            return False
        home = self._proc.parent / "sys/fs/cgroup/freezer" / found[1]
        return files.plain(files.read(home / "freezer.state")) in ("FROZEN", "FREEZING")


def _stat(home: Path) -> _Stat | Null:
    """What a process or thread does; Null also for one that has just ended."""
    try:
        with (home / "stat").open("rb", buffering=0) as file:
            text = file.read(1024).decode(errors="replace")
    except OSError as error:
        return files.why(error)
    # the name may hold spaces, brackets and what looks like another state
    head, _, tail = text.rpartition(")")
    words = tail.split()
    try:
        return _Stat(
            files.plain(head.partition("(")[2])[:15],
            words[0],
            files.count(words[6]),
            files.count(words[11]) + files.count(words[12]),
            files.count(words[17]),
            files.count(words[19]),
        )
    except (ValueError, IndexError):
        return files.UNPARSABLE


def _sleeping(home: Path, stat: _Stat) -> Path | None:
    """The thread in uninterruptible sleep: the first, or one that keeps a dead process from ending."""
    if stat.state == "D":
        return home
    if stat.state != "Z" or stat.threads < 2:
        return None
    for thread in files.listed(home / "task")[:_MOST_THREADS]:
        of_thread = _stat(thread)
        if not isinstance(of_thread, Null) and of_thread.state == "D":
            return thread
    return None


def _kill_pending(home: Path) -> bool:
    """Whether somebody has tried to kill it, in vain."""
    text = files.read(home / "status")
    if isinstance(text, Null):
        return False
    masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]{16})$", text, re.MULTILINE)
    return any(int(mask, 16) & _KILL for mask in masks)
