"""Workers of data loaders, found in /proc by the names they give themselves; probe `loader`.

Nobody has to opt in: PyTorch names its workers. They are summed up per parent, the process that trains. The
sums go on when workers end and new ones start with the next pass over the data. No driver is asked. Workers
that are threads are looked for in processes of which probe `job` said that they hold a card.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files

NAMES = frozenset({"pt_data_worker", "pt_multiprocess", "pt_thread_data_"})
"""What PyTorch calls a worker, by release and kind; the kernel keeps 15 letters."""

PIN_NAME = "pt_data_pin"
"""PyTorch's thread that copies batches to pinned memory: it prepares nothing, so it is no worker."""

MOST_PARENTS = 256
MOST_WORKERS = 8192
MOST_THREADS = 512
"""Of a process; the newest are looked at, for loaders start after what came with the libraries."""

MOST_READ = 4096
"""Threads that are looked at anew in one scan, of all processes."""

_LOOK_ANEW = 4
"""A process that was no worker is looked at again at every fourth scan: it may have taken another name."""

_LOOK_ANEW_THREADS = 16
"""The same for threads, of which there are hundreds: a worker takes its name when it starts."""

_FORK_SERVER = b"multiprocessing.forkserver"
_TOLD = Null(Reason.NOT_SUPPORTED, "proc")
_NO_CARD = Null(Reason.NOT_SUPPORTED, "no_card")
_STATES = {"R": "running", "D": "disk", "S": "sleeping", "I": "sleeping"}
_SUMS = (
    "worker_cpu_s_total",
    "worker_runqueue_s_total",
    "worker_read_bytes_total",
    "worker_read_chars_total",
)
_FROM_HOOK = (
    "role", "rank", "local_rank", "world", "lib", "fetches_total", "wait_s_total", "busy_s_total",
    "startup_s_total", "pause_s_total", "starved_total", "wait_max_s", "wait_hist", "ready", "prefetch",
    "messages_lost_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says of a process.

    Attributes:
        name: Its name, as it set it.
        state: One letter.
        parent: Its parent's pid.
        ticks: CPU time of all its threads, clock ticks.
        start: When it started, clock ticks since boot.
    """

    name: str
    state: str
    parent: int
    ticks: int
    start: int


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process, or a thread, and its directory in /proc."""

    home: str
    stat: Stat
    thread: bool = False


@dataclass(slots=True)
class _Holder:
    """A process that holds a card, or held it: when it started, its threads by what they are.

    Attributes:
        workers: Those that bear a worker's name.
        others: Those that bear neither that nor `PIN_NAME`.
        pins: States of those that bear `PIN_NAME`.
    """

    start: int
    workers: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    pins: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Parent:
    """A process that has, or had, workers."""

    pid: int
    start: int
    uid: Cell
    seen: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    nulls: dict[str, Null] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    threads: int = 0


def names(given: Collection[str]) -> frozenset[str]:
    """Names as the kernel shows them: 15 bytes."""
    return frozenset(name.encode()[:15].decode(errors="replace") for name in given)


class Workers:
    """The reader; keeps what it has counted between two looks.

    Args:
        root: Where /proc is.
        names: What workers call themselves.
    """

    def __init__(self, root: Path = Path("/"), names: Collection[str] = NAMES) -> None:
        self.names = frozenset(names)
        self._proc = f"{root}/proc".replace("//", "/")
        self._holders: dict[int, _Holder] = {}
        self._scans = 0
        self._read = 0
        self._others: set[int] = set()
        self._parents: dict[int, _Parent] = {}
        self._servers: dict[tuple[int, int], bool] = {}
        self._hertz = os.sysconf("SC_CLK_TCK")

    def rows(self) -> Iterator[Row]:
        """One row per process that has workers, or had some and lives."""
        workers = self._scan()
        found: dict[int, dict[int, _Worker]] = {}
        for pid, stat in workers.items():
            # what a worker forks bears its name
            consumer = self._consumer(stat.parent) if stat.parent not in workers else 0
            if consumer:
                found.setdefault(consumer, {})[pid] = _Worker(f"{self._proc}/{pid}", stat)
        for pid, holder in self._holding().items():
            if threads := self._threads(pid, holder):
                found.setdefault(pid, {}).update(threads)
        for gone in self._renew(found):
            yield self._row(gone, "closed")
        for pid, parent in self._parents.items():
            self._add(parent, found.get(pid, {}))
            yield self._row(parent, "live")

    def holds_card(self, pid: int, start: int) -> None:
        """A process holds a card: its threads are looked at from now on, for as long as it lives."""
        known = self._holders.get(pid)
        if (known is None or known.start != start) and len(self._holders) < MOST_PARENTS:
            self._holders[pid] = _Holder(start)

    def _holding(self) -> dict[int, _Holder]:
        """Who holds a card; each scan begins with another one, for all of them may be too many."""
        self._read = 0
        pids = sorted(self._holders)
        first = self._scans % len(pids) if pids else 0
        return {pid: self._holders[pid] for pid in (*pids[first:], *pids[:first])}

    def _threads(self, pid: int, holder: _Holder) -> dict[int, _Worker]:
        """Threads of a process that bear a worker's name, but for its first, which is the process."""
        tasks = f"{self._proc}/{pid}/task"
        holder.pins = []
        stat = self._stat(pid)
        if stat is None or stat.start != holder.start:
            del self._holders[pid]
            return {}
        try:
            listed = [int(name) for name in os.listdir(tasks)]
        except (OSError, ValueError):
            return {}
        known = holder.workers & {*listed}
        tids = {*sorted(listed)[-MOST_THREADS:]} - {pid} - known
        holder.others &= tids
        found: dict[int, _Worker] = {}
        for tid in (*known, *tids):
            if tid not in known:
                due = tid not in holder.others or (tid + self._scans) % _LOOK_ANEW_THREADS == 0
                if not due or self._read >= MOST_READ:
                    continue
                self._read += 1
                name = (_head(f"{tasks}/{tid}/comm") or b"").decode(errors="replace").rstrip("\n")
                if name not in self.names and name != PIN_NAME:
                    holder.others.add(tid)
                    continue
                holder.others.discard(tid)
            text = _head(f"{tasks}/{tid}/stat")
            stat = None if text is None else parse_stat(text)
            if stat is None or stat.state in "ZX":
                continue
            if stat.name in self.names:
                found[tid] = _Worker(f"{tasks}/{tid}", stat, thread=True)
            elif stat.name == PIN_NAME:
                holder.pins.append(stat.state)
        holder.workers = {*found}
        return found

    def _renew(self, found: Mapping[int, object]) -> list[_Parent]:
        """Take in the new parents; those that are gone."""
        gone: list[_Parent] = []
        for pid in {**self._parents, **found}:
            now = self._stat(pid)
            known = self._parents.get(pid)
            if known is not None and (now is None or now.start != known.start):
                del self._parents[pid]
                known.states, known.threads = {}, 0
                gone.append(known)
            if pid in found and pid not in self._parents and now and len(self._parents) < MOST_PARENTS:
                self._parents[pid] = _Parent(pid, now.start, self._uid(pid))
        return gone

    def _scan(self) -> dict[int, Stat]:
        """Every process that bears a worker's name."""
        try:
            pids = {int(name) for name in os.listdir(self._proc) if re.fullmatch("[0-9]{1,10}", name)}
        except OSError:
            return {}
        self._scans += 1
        self._others &= pids
        found: dict[int, Stat] = {}
        for pid in sorted(pids):
            if pid in self._others and (pid + self._scans) % _LOOK_ANEW:
                continue
            stat = self._stat(pid)
            if stat is None:
                continue
            if stat.name not in self.names:
                self._others.add(pid)
            elif stat.state not in "ZX" and len(found) < MOST_WORKERS:
                self._others.discard(pid)
                found[pid] = stat
        return found

    def _consumer(self, pid: int) -> int:
        """Who the batches are for: a fork server stands between the process that trains and its workers."""
        stat = self._stat(pid)
        if stat is None:
            return 0
        if stat.state == "D":
            return pid  # its command line may have to be waited for
        key = (pid, stat.start)
        if key not in self._servers:
            if len(self._servers) >= 4 * MOST_PARENTS:
                self._servers.clear()
            self._servers[key] = _FORK_SERVER in (_head(f"{self._proc}/{pid}/cmdline") or b"")
        return stat.parent if self._servers[key] else pid

    def _add(self, parent: _Parent, workers: dict[int, _Worker]) -> None:
        """Count what the workers did since they were last seen."""
        parent.states = {}
        parent.threads = sum(worker.thread for worker in workers.values())
        seen: dict[tuple[int, int], dict[str, float]] = {}
        for pid, worker in workers.items():
            stat = worker.stat
            state = _STATES.get(stat.state, "")
            parent.states[state] = parent.states.get(state, 0) + 1
            now = {"worker_cpu_s_total": stat.ticks / self._hertz}
            for name, cell in _more(Path(worker.home)).items():
                if not isinstance(cell, Null):
                    now[name] = float(cell)
                elif os.path.isdir(worker.home):
                    parent.nulls[name] = cell
            before = parent.seen.get((pid, stat.start), {})
            for name, value in now.items():
                parent.sums[name] += max(0.0, value - before.get(name, 0.0))
            seen[pid, stat.start] = before | now
        parent.seen = seen

    def _row(self, parent: _Parent, state: str) -> Row:
        sums: dict[str, Cell] = {}
        for name, value in parent.sums.items():
            whole = name.startswith("worker_read")
            sums[name] = parent.nulls.get(name, int(value) if whole else value)
        holder = self._holders.get(parent.pid)
        return {
            **dict.fromkeys(_FROM_HOOK, _TOLD),
            "source": "proc",
            "pid": parent.pid,
            "pid_start": parent.start,
            "loader": "",
            "uid": parent.uid,
            "state": state,
            "workers": sum(parent.states.values()),
            "worker_threads": parent.threads if holder else _NO_CARD,
            "pin_threads": len(holder.pins) if holder else _NO_CARD,
            "pin_threads_running": holder.pins.count("R") if holder else _NO_CARD,
            **{f"workers_{word}": parent.states.get(word, 0) for word in ("running", "disk", "sleeping")},
            **sums,
        }

    def _stat(self, pid: int) -> Stat | None:
        text = _head(f"{self._proc}/{pid}/stat")
        return None if text is None else parse_stat(text)

    def _uid(self, pid: int) -> Cell:
        text = files.read(Path(self._proc) / str(pid) / "status")
        return files.parsed(text, lambda text: _value(text, "Uid"))


def _more(home: Path) -> dict[str, Cell]:
    io = files.read(home / "io")
    return {
        "worker_runqueue_s_total": files.parsed(
            files.read(home / "schedstat"), lambda text: files.count(text.split()[1]) / 1e9
        ),
        "worker_read_bytes_total": files.parsed(io, lambda text: _value(text, "read_bytes")),
        "worker_read_chars_total": files.parsed(io, lambda text: _value(text, "rchar")),
    }


def parse_stat(text: bytes) -> Stat | None:
    """The fields of /proc/PID/stat; None when it is nothing of the kind. A name may hold anything."""
    begin, end = text.find(b"("), text.rfind(b")")
    words = text[end + 2 :].split()
    if begin < 0 or end < begin or len(words) < 20:
        return None
    try:
        name = text[begin + 1 : end].decode(errors="replace")
        state, numbers = words[0].decode(), [files.count(words[at].decode()) for at in (1, 11, 12, 19)]
    except ValueError:
        return None
    return Stat(name, state, numbers[0], numbers[1] + numbers[2], numbers[3])


def _value(text: str, name: str) -> int:
    """The first number behind `name:`."""
    found = re.search(rf"^{name}:\s+(\d{{1,19}})\b", text, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1])


def _head(path: str) -> bytes | None:
    """The first 4 KiB of a file; None when it cannot be read. Quick, for there are thousands of them."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
