"""`loader.sock`: training processes tell here how long they wait for data; the supervisor's side of the hook.

Anybody on the host may write to it, so nothing in a message is believed that matters: who sends is what the
kernel says, numbers are bounded, names are plain, and whoever sends too much is not read. A thread takes the
messages in, for the kernel queues eleven of them; every interval of probe `loader` the state becomes rows.
"""

import array
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers.workers import parse_stat

log = logging.getLogger(__name__)

NAME = "loader.sock"
MOST_BYTES = 1024
MOST_LOADERS_PER_PROCESS = 64
MOST_LOADERS = 2048
MOST_PROCESSES = 256
MOST_PROCESSES_PER_USER = 128
"""Nobody can take all the places."""

STALE_S = 60.0
RATE, BURST = 100.0, 400.0
"""Messages per second of one user, and how many at once."""

MOST_USERS = 256
REST_S = 0.05
"""The thread rests this long after a message it refused: refusing must not cost more than reading does."""

_CREDENTIALS = struct.Struct("3i")
_ANCILLARY = socket.CMSG_SPACE(_CREDENTIALS.size)
_NOT_TOLD = Null(Reason.NOT_SUPPORTED, "hook")
_NOT_READ = (
    "workers_running", "workers_disk", "workers_sleeping", "worker_cpu_s_total", "worker_runqueue_s_total",
    "worker_read_bytes_total", "worker_read_chars_total", "worker_threads", "pin_threads",
    "pin_threads_running",
)  # fmt: skip

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
_Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.-]{0,64}\Z")]


class Message(msgspec.Struct, frozen=True, gc=False):
    """One datagram of version 1; what it has beyond this is ignored."""

    v: Literal[1]
    pid_start: _Count
    seq: _Count
    name: _Name
    n: _Count
    wait_ns: _Count
    busy_ns: _Count
    startup_ns: _Count
    pause_ns: _Count
    max_ns: _Count
    hist: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=16, max_length=16)]
    role: _Word = ""
    rank: _Small | None = None
    local_rank: _Small | None = None
    world: _Small | None = None
    starved_n: _Count | None = None
    workers: _Small | None = None
    prefetch: _Small | None = None
    ready: _Small | None = None
    lib: _Word = ""


_DECODER = msgspec.json.Decoder(Message)
_TOTALS = ("n", "wait_ns", "busy_ns", "startup_ns", "pause_ns", "starved_n")


@dataclass(slots=True)
class _Loader:
    """One loader of one process.

    Attributes:
        last: Its latest message.
        heard: When that came, monotonic seconds.
        before: What earlier lives of the counters had come to; they began anew with the same process.
        lost: Messages that are missing in the sequence.
    """

    last: Message
    heard: float
    before: dict[str, int] = field(default_factory=dict)
    hist: list[int] = field(default_factory=lambda: [0] * 16)
    lost: int = 0

    def take(self, message: Message, now: float) -> None:
        """The next message."""
        last = self.last
        if message == last:
            return
        if message.seq <= last.seq or any(_total(message, name) < _total(last, name) for name in _TOTALS):
            self.before = {name: self.total(name) for name in _TOTALS}
            self.hist = self.hist_now()
        else:
            self.lost += message.seq - last.seq - 1
        self.last = message
        self.heard = now

    def total(self, name: str) -> int:
        """A counter over all its lives."""
        return self.before.get(name, 0) + _total(self.last, name)

    def hist_now(self) -> list[int]:
        """The counts by duration, over all lives."""
        return [one + other for one, other in zip(self.hist, self.last.hist, strict=True)]


@dataclass(slots=True)
class _Process:
    """A process that told something.

    Attributes:
        told_start: Its start as it says itself; another one under this pid says another.
        start: The same by the kernel, where it can be read.
    """

    uid: int
    told_start: int
    start: int
    loaders: dict[str, _Loader] = field(default_factory=dict)


@dataclass(slots=True)
class _Bucket:
    """How many messages a user may still send."""

    left: float
    at: float

    def take(self, now: float) -> bool:
        self.left = min(BURST, self.left + (now - self.at) * RATE)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Loaders:
    """What training processes told.

    Args:
        path: Where the socket is made.
        proc: The kernel's view of processes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, path: Path, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Messages that were not taken, by reason."""
        self._path = path
        self._proc = proc
        self._clock = clock
        self._lock = threading.Lock()
        self._processes: dict[int, _Process] = {}
        self._ended: list[tuple[int, _Process]] = []
        self._buckets: dict[int, _Bucket] = {}
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # ---- the socket

    def open(self) -> bool:
        """Listen; where that cannot be, the agent goes on without. Whether it listens."""
        try:
            if _lives(self._path):
                log.warning("%s: another agent listens there: data loaders report to it", self._path)
                return False
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            listening.bind(str(self._path))
            self._path.chmod(0o666)
        except OSError as error:
            log.warning("%s: cannot listen, so data loaders cannot report: %s", self._path, error)
            return False
        if not self._path.parent.stat().st_mode & 0o001:
            log.warning("%s: other users cannot reach it: give its directory mode 0755", self._path)
        self._socket = listening
        self._thread = threading.Thread(target=self._drain, name="loaders", daemon=True)
        self._thread.start()
        return True

    def close(self) -> None:
        """Listen no more."""
        if self._socket is None or self._thread is None:
            return
        listening, self._socket = self._socket, None
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        listening.close()

    def _drain(self) -> None:
        listening = self._socket
        while listening is not None and self._socket is not None:
            try:
                # no room behind the credentials: the kernel drops descriptors that somebody sends along
                data, ancillary, flags, _ = listening.recvmsg(MOST_BYTES + 1, _ANCILLARY)
            except OSError as error:
                data, ancillary, flags = b"", [], 0
                if self._socket is not None:
                    log.warning("%s: %s", self._path, error)
                    time.sleep(1.0)
            if self._socket is None:
                return
            if not self._take(data, ancillary, flags):
                time.sleep(REST_S)

    def _take(self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int) -> bool:
        """One datagram; False when it was refused. Nothing in it may end the thread."""
        try:
            pid, uid = _sender(ancillary)
            if flags & socket.MSG_TRUNC:
                data = b""
            why = self.take(pid, uid, data)
        except Exception as error:
            why = type(error).__name__
            pid = uid = -1
        if why:
            if not self.refused[why]:
                log.warning("%s: message of process %d, user %d refused: %s (said once)", NAME, pid, uid, why)
            self.refused[why] += 1
        return not why

    # ---- messages

    def take(self, pid: int, uid: int, data: bytes) -> str:
        """A message, its sender by the kernel's word; why it was refused, empty when it was not."""
        now = self._clock()
        if pid <= 0:
            return "no_sender"
        if not self._may(uid, now):
            return "rate"
        if not data or len(data) > MOST_BYTES:
            return "size"
        try:
            message = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "malformed"
        with self._lock:
            process = self._process(pid, uid, message.pid_start)
            if process is None:
                return "processes"
            loader = process.loaders.get(message.name)
            if loader is not None:
                loader.take(message, now)
                return ""
            known = sum(len(one.loaders) for one in self._processes.values())
            if len(process.loaders) >= MOST_LOADERS_PER_PROCESS or known >= MOST_LOADERS:
                return "loaders"
            process.loaders[message.name] = _Loader(message, now)
        return ""

    def _may(self, uid: int, now: float) -> bool:
        bucket = self._buckets.get(uid)
        if bucket is None:
            if len(self._buckets) >= MOST_USERS:
                self._buckets = {
                    uid: one for uid, one in self._buckets.items() if now - one.at < BURST / RATE
                }
            if len(self._buckets) >= MOST_USERS:
                return False
            bucket = self._buckets[uid] = _Bucket(BURST, now)
        return bucket.take(now)

    def _process(self, pid: int, uid: int, told_start: int) -> _Process | None:
        """The process behind a pid; None when there are too many."""
        known = self._processes.get(pid)
        if known is not None and (known.uid, known.told_start) == (uid, told_start):
            return known
        start = self._start(pid)
        if known is not None and known.uid == uid and start == known.start and start:
            known.told_start = told_start
            return known
        if known is not None:
            self._ended.append((pid, self._processes.pop(pid)))
        of_user = sum(one.uid == uid for one in self._processes.values())
        if len(self._processes) >= MOST_PROCESSES or of_user >= MOST_PROCESSES_PER_USER:
            return None
        self._processes[pid] = _Process(uid, told_start, start or told_start)
        return self._processes[pid]

    # ---- rows

    def rows(self) -> list[Row]:
        """One row per loader; one more, marked closed, for those whose process is gone."""
        now = self._clock()
        with self._lock:
            for pid, process in list(self._processes.items()):
                if not self._lives(pid, process.start):
                    self._ended.append((pid, self._processes.pop(pid)))
            ended, self._ended = self._ended, []
            found = [
                _row(pid, process, loader, "closed")
                for pid, process in ended
                for loader in process.loaders.values()
            ]
            for pid, process in self._processes.items():
                for loader in process.loaders.values():
                    state = "live" if now - loader.heard <= STALE_S else "stale"
                    found.append(_row(pid, process, loader, state))
        return found

    def _start(self, pid: int) -> int:
        """When a process started, clock ticks since boot; 0 = there is none that can be seen."""
        try:
            stat = parse_stat((self._proc / str(pid) / "stat").read_bytes())
        except OSError:
            return 0
        return 0 if stat is None or stat.state in "ZX" else stat.start

    def _lives(self, pid: int, start: int) -> bool:
        now = self._start(pid)
        if now:
            return now == start
        if (self._proc / str(pid)).exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # somebody else's, and hidden from us
        return True


def _row(pid: int, process: _Process, loader: _Loader, state: str) -> Row:
    last = loader.last
    cells: dict[str, Cell | None] = {
        "rank": last.rank,
        "local_rank": last.local_rank,
        "world": last.world,
        "starved_total": None if last.starved_n is None else loader.total("starved_n"),
        "ready": last.ready,
        "prefetch": last.prefetch,
        "workers": last.workers,
        "role": last.role,
        "lib": last.lib,
    }
    return {
        **dict.fromkeys(_NOT_READ, _NOT_TOLD),
        **{name: _NOT_TOLD if cell is None else cell for name, cell in cells.items()},
        "source": "hook",
        "pid": pid,
        "pid_start": process.start,
        "loader": last.name,
        "uid": process.uid,
        "state": state,
        "fetches_total": loader.total("n"),
        "wait_s_total": loader.total("wait_ns") / 1e9,
        "busy_s_total": loader.total("busy_ns") / 1e9,
        "startup_s_total": loader.total("startup_ns") / 1e9,
        "pause_s_total": loader.total("pause_ns") / 1e9,
        "wait_max_s": last.max_ns / 1e9,
        "wait_hist": ",".join(map(str, loader.hist_now())),
        "messages_lost_total": loader.lost,
    }


def _total(message: Message, name: str) -> int:
    value = getattr(message, name)
    return value if isinstance(value, int) else 0


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Pid and uid of the sender, by the kernel; 0 when it does not say."""
    pid = uid = 0
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
        elif kind == socket.SCM_RIGHTS:
            descriptors = array.array("i", data[: len(data) - len(data) % 4])
            for descriptor in descriptors:
                os.close(descriptor)
    return pid, uid & 0xFFFFFFFF


def _lives(path: Path) -> bool:
    """Whether somebody reads from the socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
