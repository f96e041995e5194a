"""Tells the gpufleet agent on this host how long this process waits for its training data.

    loader = gpufleet_loader.watch(loader, name="train")
    for batch in loader: ...

Runs inside somebody else's training: it never raises, never blocks, starts no thread and needs nothing but
the standard library. Every five seconds a datagram with cumulative counts goes to the agent's socket, on the
way out of a fetch; a message that is lost costs nothing but resolution. Wait is host time: work that a card
does asynchronously may hide it, so the share of waiting is an upper bound of starvation.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from typing import Callable, Iterator, TypeVar, cast

__version__ = "0.1.0"
__all__ = ["fetch", "huggingface_callback", "lightning_callback", "report_wait", "watch"]

SOCKET = "/run/gpufleet/loader.sock"
MOST_BYTES = 1024
MOST_LOADERS = 64
EVERY_NS = 5000000000
"""At most one message per loader in this time: one costs as much as the counting of twenty batches."""

BACK_OFF_NS = 30000000000
"""After a message that could not be sent the next is tried this much later."""

PAUSE_NS = 60000000000
"""A longer time between two fetches is a checkpoint or an evaluation, not a step."""

BUCKETS = 16
_STARVED_NS = 100000
"""A fetch from an empty queue that took less found its batch set aside already."""

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_WORLD = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_EVALUATES = re.compile("(?i)(val|valid|validation|eval|evaluation|test|dev|predict)(?![a-z])")

_L = TypeVar("_L")

_clock = time.monotonic_ns
failures = 0
"""How often the hook failed and turned itself off for a loader."""


def watch(iterable: _L, name: str = "train", role: str | None = None) -> _L:
    """The same loader, whose fetches are timed: a DataLoader, a DALI iterator, any iterable.

    Args:
        iterable: What gives the batches. Its length, attributes and exceptions are as before.
        name: What people call it. Watching under a name again goes on counting.
        role: What it is for; only "train" is judged. By default "eval" for a name like "val" or "test".
    """
    if _disabled():
        return iterable
    try:
        counts = _counts(name, role)
        counts.see(iterable)
        kind = _SizedLoader if hasattr(type(iterable), "__len__") else _Loader
        return cast(_L, kind(iterable, counts))
    except Exception:
        _fail()
        return iterable


def fetch(name: str = "train", role: str | None = None) -> _Fetch:
    """Times one fetch: `with gpufleet_loader.fetch("train"): batch = next(it)`."""
    try:
        return _Fetch(None if _disabled() else _counts(name, role))
    except Exception:
        _fail()
        return _Fetch(None)


def report_wait(name: str, seconds: float, role: str | None = None) -> None:
    """Count one fetch that was timed elsewhere and has just ended.

    Args:
        name: As in `watch`.
        seconds: How long it took.
        role: As in `watch`.
    """
    if _disabled():
        return
    try:
        wait_ns = int(seconds * 1e9)
        if wait_ns >= 0:
            counts, now = _counts(name, role), _clock()
            counts.last = counts.add(counts.last, now - wait_ns, now)
    except Exception:
        _fail()


class _Counts:
    """What one loader has counted since the process started."""

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.pid = os.getpid()
        self.pid_start = _pid_start()
        self.seq = 0
        self.due = 0
        self.off = False
        self.last = 0
        self.fetches = 0
        self.wait_ns = 0
        self.busy_ns = 0
        self.startup_ns = 0
        self.pause_ns = 0
        self.max_ns = 0
        self.hist = [0] * BUCKETS
        self.starved: int | None = None
        self.ready: int | None = None
        self.workers: int | None = None
        self.prefetch: int | None = None
        self.lib = ""
        self.head = ""
        self.thread = 0
        self.threads = 0

    def see(self, loader: object) -> None:
        """Note what the loader says of itself."""
        self.workers = _whole(getattr(loader, "num_workers", None))
        self.prefetch = _whole(getattr(loader, "prefetch_factor", None))
        self.lib = _library(type(loader))
        self.head = ""

    def add(self, last: int, began: int, now: int) -> int:
        """Count a fetch; `last` is when the one before it ended, 0 = this is the first of a pass."""
        if last:
            wait, busy = now - began, began - last
            if busy > PAUSE_NS:
                self.pause_ns += busy
            elif busy > 0:
                self.busy_ns += busy
            self.fetches += 1
            self.wait_ns += wait
            if wait > self.max_ns:
                self.max_ns = wait
            bucket = (wait // 16000).bit_length()
            self.hist[bucket if bucket < BUCKETS else -1] += 1
        else:
            self.startup_ns += now - began
        if now >= self.due:
            self.send(now)
        return now

    def send(self, now: int) -> None:
        """Send the counts, if this is the process that made them and they fit."""
        self.due = now + EVERY_NS
        if self.off or self.pid != os.getpid():
            self.off = True  # a forked child has copies of the counts, not the loader's life
            return
        self.seq += 1
        data = self.message()
        if len(data) > MOST_BYTES or not _send(data):
            self.due = now + BACK_OFF_NS
        thread = threading.get_ident()
        if thread != self.thread:
            self.thread = thread
            self.threads += 1
            if self.threads == 2:
                text = "loader %s is read by more than one thread: its waits are not the training loop's"
                logging.getLogger(__name__).warning(text, self.name)

    def message(self) -> bytes:
        """The datagram. Half of it is made beforehand and the rest by hand: `json` takes thrice as long."""
        if not self.head:
            self.head = self.describe()
        counts = (
            self.seq, self.fetches, self.wait_ns, self.busy_ns, self.startup_ns, self.pause_ns, self.max_ns,
            "null" if self.starved is None else self.starved, "null" if self.ready is None else self.ready,
            self.hist,
        )  # fmt: skip
        return (self.head + _COUNTS % counts).encode()

    def describe(self) -> str:
        """What does not change from one message to the next."""
        fixed = {
            "v": 1,
            "pid_start": self.pid_start,
            "name": self.name,
            "role": self.role,
            "rank": _environment(_RANK),
            "local_rank": _environment(_LOCAL_RANK),
            "world": _environment(_WORLD),
            "workers": self.workers,
            "prefetch": self.prefetch,
            "lib": self.lib,
        }
        return json.dumps(fixed, separators=(",", ":"))[:-1]


_COUNTS = (
    ',"seq":%d,"n":%d,"wait_ns":%d,"busy_ns":%d,"startup_ns":%d,"pause_ns":%d,"max_ns":%d,"starved_n":%s,'
    '"ready":%s,"hist":%s}'
)


class _Loader:
    """Stands for the loader it wraps."""

    def __init__(self, wrapped: object, counts: _Counts) -> None:
        self.__dict__.update(_wrapped=wrapped, _counts=counts, _own=None)

    def __iter__(self) -> _Batches:
        counts = cast(_Counts, self.__dict__["_counts"])
        began = _clock()
        batches = iter(self.__dict__["_wrapped"])
        return _Batches(batches, counts, _clock() - began)

    def __next__(self) -> object:
        if self.__dict__["_own"] is None:
            counts = cast(_Counts, self.__dict__["_counts"])
            self.__dict__["_own"] = _Batches(self.__dict__["_wrapped"], counts, 0)
        return next(self.__dict__["_own"])

    def __getitem__(self, key: object) -> object:
        return self.__dict__["_wrapped"][key]

    def __bool__(self) -> bool:
        return bool(self.__dict__["_wrapped"])

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_wrapped"], name, value)


class _SizedLoader(_Loader):
    """One that has a length."""

    def __len__(self) -> int:
        return len(self.__dict__["_wrapped"])


class _Batches:
    """One pass over the data: times each fetch and hands on what comes of it, exceptions too."""

    __slots__ = ("_batches", "_counts", "_last", "_next", "_queue", "_started")

    def __init__(self, batches: Iterator[object], counts: _Counts, started_ns: int) -> None:
        self._batches = batches
        self._next = batches.__next__
        self._counts = counts
        self._last = 0
        self._started = started_ns
        self._queue = _queue(batches, counts)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> object:
        ready = -1 if self._queue is None else self._look()
        began = _clock()
        try:
            batch = self._next()
        except BaseException:
            self._end(began)
            raise
        now = _clock()
        try:
            counts = self._counts
            if ready >= 0:
                counts.ready = ready
                if not ready and self._last and now - began > _STARVED_NS:
                    counts.starved = (counts.starved or 0) + 1
            if self._started:
                # making the iterator starts the workers: the first batch of a pass waits for that
                began, self._started = began - self._started, 0
            self._last = counts.add(self._last, began, now)
        except Exception:
            self._give_up()
        return batch

    def __getattr__(self, name: str) -> object:
        if name in _Batches.__slots__:
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _end(self, began: int) -> None:
        """There was no batch: the step before it is over all the same."""
        if self._last and 0 < began - self._last <= PAUSE_NS:
            self._counts.busy_ns += began - self._last
        self._last = 0

    def _look(self) -> int:
        """How many batches are ready; -1 = it does not say."""
        try:
            return int(cast("Callable[[], int]", self._queue)())
        except Exception:
            self._queue = None
            return -1

    def _give_up(self) -> None:
        _fail()
        self._counts.off = True
        self._counts.due = 1 << 63


class _Fetch:
    """Times what happens inside `with`; counts nothing when that raises."""

    __slots__ = ("_began", "_counts")

    def __init__(self, counts: _Counts | None) -> None:
        self._counts = counts
        self._began = 0

    def __enter__(self) -> None:
        self._began = _clock()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        counts = self._counts
        if counts is None or kind is not None:
            return
        try:
            counts.last = counts.add(counts.last, self._began, _clock())
        except Exception:
            _fail()


def lightning_callback(name: str = "train") -> object:
    """A callback for Lightning's Trainer: the time from a batch's end to the next one's start is wait.

    What is between them and is no fetch (validation, a checkpoint) is not counted.
    """
    try:
        module = importlib.import_module("lightning.pytorch")
    except ImportError:
        module = importlib.import_module("pytorch_lightning")
    return _callback(
        module.Callback,
        name,
        began=("on_train_batch_start",),
        ended=("on_train_batch_end",),
        between=("on_validation_start", "on_validation_end", "on_save_checkpoint", "on_train_epoch_start"),
    )


def huggingface_callback(name: str = "train") -> object:
    """A callback for Hugging Face's Trainer: the time from a step's end to the next one's begin is wait.

    What is between them and is no fetch (evaluation, a checkpoint) is not counted.
    """
    return _callback(
        importlib.import_module("transformers").TrainerCallback,
        name,
        began=("on_step_begin",),
        ended=("on_step_end",),
        between=("on_evaluate", "on_save", "on_epoch_begin"),
    )


class _Steps:
    """Times fetches by the steps around them: from the end of one to the beginning of the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = 0
        self.fetched = True

    def began(self) -> None:
        """A step begins: its batch is there."""
        counts, now = _counts(self.name, None), _clock()
        if self.ended and self.fetched:
            counts.last = counts.add(counts.last, self.ended, now)
            return
        if self.ended:
            counts.busy_ns += self.ended - counts.last
            counts.pause_ns += now - self.ended
        counts.last = now

    def end(self) -> None:
        """A step ended: the next batch is fetched."""
        self.ended, self.fetched = _clock(), True

    def pause(self) -> None:
        """Something else than a fetch comes in between."""
        self.fetched = False


def _callback(
    base: type, name: str, began: tuple[str, ...], ended: tuple[str, ...], between: tuple[str, ...]
) -> object:
    """An instance of a subclass of `base` whose hooks measure."""
    steps = _Steps(name)

    def calls(method: Callable[[], None]) -> Callable[..., None]:
        def hook(*_: object, **__: object) -> None:
            try:
                if not _disabled():
                    method()
            except Exception:
                _fail()

        return hook

    hooks: dict[str, object] = {}
    for names, method in ((began, steps.began), (ended, steps.end), (between, steps.pause)):
        hooks.update(dict.fromkeys(names, calls(method)))
    return cast(object, type("GpufleetLoader", (base,), hooks)())


_known: dict[str, _Counts] = {}
_socket: socket.socket | None = None
_inode = 0
_failing = threading.Lock()


def _counts(name: str, role: str | None) -> _Counts:
    """The counts of a loader, made when they are first asked for in this process."""
    counts = _known.get(name)
    if counts is not None and counts.pid == os.getpid():
        return counts
    if counts is not None:
        _known.clear()  # inherited by a fork: they are the parent's
    usual = "eval" if _EVALUATES.match(str(name)) else "train"
    counts = _Counts(_plain(name) or "loader", _plain(role or usual))
    counts.off = len(_known) >= MOST_LOADERS
    if not counts.off:
        _known[name] = counts
    return counts


def _send(data: bytes) -> bool:
    """Hand a datagram to the agent; False when that cannot be done at once."""
    try:
        _ours().sendto(data, os.environ.get("GPUFLEET_LOADER_SOCK") or SOCKET)
    except OSError:
        return False
    return True


def _ours() -> socket.socket:
    """The socket. The program may have closed its descriptor, and that number be something of its own now."""
    global _socket, _inode
    if _socket is not None:
        try:
            if os.fstat(_socket.fileno()).st_ino == _inode:
                return _socket
        except OSError:
            pass
        _socket.detach()
        _socket = None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    _socket, _inode = made, os.fstat(made.fileno()).st_ino
    return made


def _disabled() -> bool:
    return os.environ.get("GPUFLEET_LOADER_DISABLE", "") not in ("", "0")


def _fail() -> None:
    global failures
    with _failing:
        failures += 1


def _queue(batches: object, counts: _Counts) -> Callable[[], int] | None:
    """How to ask a PyTorch iterator how many batches are ready; its attribute is private and may go."""
    try:
        ask = cast("Callable[[], int]", batches._data_queue.qsize)  # type: ignore[attr-defined]
        ask()
        counts.starved = counts.starved or 0
        return ask
    except Exception:
        return None


def _pid_start() -> int:
    """When this process started, clock ticks since boot; 0 = unknown."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read(4096).rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _library(kind: type) -> str:
    """`torch-2.9.1`: the library whose loader this is."""
    roots = [one.__module__.partition(".")[0] for one in kind.__mro__]
    root = "torch" if "torch" in roots else roots[0]
    version = getattr(sys.modules.get(root), "__version__", "")
    return _plain(f"{root}-{version}" if isinstance(version, str) and version else root)


def _plain(text: object) -> str:
    """At most 64 letters, digits, `_`, `.` and `-`."""
    return re.sub("[^A-Za-z0-9_.-]", "-", str(text))[:64]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def _environment(names: tuple[str, ...]) -> int | None:
    """The first of these variables that is a number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal() and len(text) < 9:
            return int(text)
    return None


@atexit.register
def _say_goodbye() -> None:
    """One last message each, so that the end of a run is counted."""
    for counts in list(_known.values()):
        try:
            if counts.seq:
                counts.send(_clock())
        except Exception:
            _fail()
