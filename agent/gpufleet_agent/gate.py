"""The gate of the benches: who may run now. Looked through before a run, while it lasts, and after it.

A run must never slow somebody's job, and a number measured beside a job must never pass for the card's. So
what cannot be seen is not free, a job that appears ends the run, and a run after which the card is not as
quiet as before gives no value.
"""

import errno
import fcntl
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec

from gpufleet.metric import Cell, Null, Row
from gpufleet_agent.drivers import DriverError, Gpu, Host
from gpufleet_agent.leash import leashed

LOOK_S = 0.1
"""How often a run looks whether a job came."""

_READS, _APART_S = 3, 1.0
_ASK_S = 0.05
_SETTLE_S, _SETTLED_S = 3.0, 0.25
"""A card's utilisation is an average of up to a second: it shows our own run for as long."""

_OWN_BYTES = 3 << 30
"""More than a bench and its context take of a card."""

_IDLE_W, _IDLE_SHARE = 40.0, 0.35
"""A card that draws more than this, and more than this part of its limit, works for somebody."""

_MIB = 1 << 20
_LOCKED_OUT = "another bench runs, or a scheduler holds the lock"


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gate]`: when a bench may run.

    Attributes:
        mem_mib: A card with more of its memory in use is somebody's.
        load: Host benches are skipped above this load per core: they would measure the disturbance.
        command: Run before each bench, without a shell; exit status 0 = the host is free. Empty = not asked.
        command_s: One that takes longer has not said that it is.
        gpu_s_per_hour: Most time per hour that benches keep a card for themselves.
    """

    mem_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 600
    load: Annotated[float, msgspec.Meta(gt=0, le=100)] = 0.5
    command: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    command_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 5.0
    gpu_s_per_hour: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


DEFAULT = Rules()


class Preempted(Exception):
    """Somebody else's turn: the run ends now and has no value."""


class TooLong(Exception):
    """The run took longer than it may keep a card."""


class Stop:
    """Whether the run was told to end. Set from a signal, read by the run."""

    def __init__(self) -> None:
        self.reason = ""

    def check(self) -> None:
        """Go on, or not.

        Raises:
            Preempted: Not.
        """
        if self.reason:
            raise Preempted(self.reason)


class Lock:
    """The lock that everything shares that wants this host's cards for itself. Held while it lives.

    A scheduler's prolog takes the same lock (`flock`); that it waits for it is seen, and ends the run.
    """

    def __init__(self, descriptor: int, table: Path = Path("/proc/locks"), path: str = "") -> None:
        self._descriptor = descriptor
        self._table = table
        self._path = path
        self._inode = str(os.fstat(descriptor).st_ino)

    @classmethod
    def take(cls, path: str, wait_s: float = 0.0) -> Self | None:
        """Take it; None when somebody else has it.

        To wait for it makes an agent's bench give way; that is for the main thread alone.

        Raises:
            OSError: The lock file cannot be opened.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            # to be read is enough for a lock, and a person's run must not shut the agent out of it
            lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            with suppress(OSError):  # whatever umask its maker had: others must be able to take it too
                os.fchmod(lock, 0o644)
            try:
                _flock(lock, wait_s)
            except OSError as error:
                os.close(lock)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return None
                raise
            if _is_at(lock, path):
                return cls(lock, path=path)
            os.close(lock)  # somebody made the file anew: whoever comes next takes that one
        return None

    def wanted(self) -> bool:
        """Whether somebody waits for it, or it is none any more: its file was removed or made anew."""
        if self._path and not _is_at(self._descriptor, self._path):
            return True
        try:
            text = self._table.read_text()
        except OSError:
            return False
        # `7: -> FLOCK  ADVISORY  WRITE 4711 fe:01:131 0 EOF`
        lines = (line.split() for line in text.splitlines())
        return any(
            len(words) > 6 and words[1:3] == ["->", "FLOCK"] and words[6].rpartition(":")[2] == self._inode
            for words in lines
        )

    def release(self) -> None:
        """Give it back; once."""
        os.close(self._descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _flock(lock: int, wait_s: float) -> None:
    """Lock it, or raise BlockingIOError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait_s <= 0:
            raise
    else:
        return

    def too_long(number: int, frame: object) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, wait_s)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look at a card saw; None = that cannot be seen.

    Attributes:
        pids: Processes that hold it, without our own.
        mem_used_bytes: Of its memory.
        util_pct: Of its processors, and of its memory's time, the larger one.
        power_w: What it draws.
        power_limit_w: What it may draw.
        split: Whether MIG splits it.
        exclusive: Its compute mode where that lets one process in at most; else empty.
    """

    pids: frozenset[int] | None = None
    mem_used_bytes: float | None = None
    util_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    split: bool = False
    exclusive: str = ""

    def why_not(self, mem_bytes: float, locked: bool, load: bool = True) -> str:
        """Why the card is not free; empty when it is.

        Args:
            mem_bytes: So much of its memory may be in use.
            locked: Whether we have the host's lock.
            load: Whether what it does counts too, or only who and what is on it.
        """
        if self.split:
            return "MIG is on"
        if self.exclusive:
            return f"compute mode {self.exclusive}: a bench would keep a job out"
        if self.pids:
            return f"in use by {_named(self.pids)}"
        if self.mem_used_bytes is not None and self.mem_used_bytes > mem_bytes:
            return f"{self.mem_used_bytes / _MIB:.0f} MiB of its memory are in use"
        if load and self.util_pct is not None and self.util_pct > 0:
            return f"card is busy: {self.util_pct:g} %"
        if load and self._draws():
            return f"card is busy: it draws {self.power_w:.0f} W"
        seen = (self.mem_used_bytes is not None, self.util_pct is not None)
        if self.pids is None and not (all(seen) and locked):
            return "who uses it cannot be seen"
        if not any(seen):
            return "neither its load nor its memory can be read"
        return ""

    def _draws(self) -> bool:
        if self.power_w is None or self.power_limit_w is None:
            return False
        return self.power_w > max(_IDLE_W, _IDLE_SHARE * self.power_limit_w)


class Gate:
    """The gate of one run on some cards of a host.

    Args:
        host: Where they are.
        rules: What is free.
        lock: Ours; None = somebody else has it.
        no_lock: Why it could not be taken, where nobody else has it.
        stop: Whether the run was told to end.
        asked: A person asked for this run: only the lock and a signal end it.
        allowance_s: So long may one run keep a card.
        clock: Monotonic seconds.
        sleep: Waits.
    """

    def __init__(
        self,
        host: Host,
        rules: Rules,
        lock: Lock | None,
        stop: Stop,
        *,
        asked: bool = False,
        no_lock: str = "",
        allowance_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host = host
        self._rules = rules
        self._lock = lock
        self._stop = stop
        self._asked = asked
        self._no_lock = no_lock
        self._allowance_s = allowance_s
        self._clock = clock
        self._sleep = sleep
        self._watched: tuple[Gpu, ...] = ()
        self._before: dict[str, float | None] = {}
        self._began = self._looked = clock()

    def before(self, cards: Sequence[Gpu]) -> dict[str, str]:
        """Why each card, by address, may not be used; no entry = it may. Takes two seconds."""
        shut = self._shut()
        return {card.pci: shut for card in cards} if shut else self._busy(cards)

    def before_host(self, cards: Sequence[Gpu], load: str) -> str:
        """Why a bench of the host may not run; empty = it may. Takes two seconds where there are cards.

        `load` says why the host itself is too busy.
        """
        why = self._shut() or load
        return why or next((f"card {pci}: {text}" for pci, text in self._busy(cards).items()), "")

    def _busy(self, cards: Sequence[Gpu]) -> dict[str, str]:
        found: dict[str, str] = {}
        if self._asked:
            return found
        for read in range(_READS):
            for _ in range(int(_APART_S / LOOK_S) if read and len(found) < len(cards) else 0):
                self._sleep(LOOK_S)
                if self._interrupted():
                    return {card.pci: self._interrupted() for card in cards}
            for card in cards:
                why = "" if card.pci in found else self._why_not(card)
                if why:
                    found[card.pci] = why
        return found

    def locked_out(self) -> str:
        """Why nothing at all may run; empty = something may."""
        return self._no_lock or _LOCKED_OUT if self._lock is None else self._interrupted()

    def enter(self, cards: Sequence[Gpu]) -> str:
        """A run on these cards begins now, unless this says why not. From here on `check` watches them."""
        self._watched = tuple(cards)
        self._before = {}
        self._began = self._looked = self._clock()
        why = self._interrupted()
        for card in () if self._asked else cards:
            why = why or self._why_not(card)
        return why

    def check(self) -> None:
        """To be called by a run at least every tenth of a second: whether it may go on.

        Raises:
            Preempted: It may not.
            TooLong: It has had its time.
            DriverError: A card does not answer any more.
        """
        now = self._clock()
        if now - self._began > self._allowance_s:
            raise TooLong(f"it took longer than its {self._allowance_s:g} s")
        self._stop.check()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        why = self._interrupted() or self._came()
        if why:
            raise Preempted(why)

    def after(self, cards: Iterable[Gpu]) -> str:
        """Whether a run may have been disturbed without notice: what it measured is then no value."""
        if self._asked:
            return ""
        for card in cards:
            until = self._clock() + _SETTLE_S
            why = self._why_not(card)
            # our own load is in the averages for a while; our memory and our process went with our context
            while why and not self._why_not(card, load=False) and self._clock() < until:
                self._sleep(_SETTLED_S)
                why = self._interrupted() or self._why_not(card)
            if why:
                return f"afterwards: {why}"
        return ""

    def after_host(self, cards: Iterable[Gpu]) -> str:
        """As `after`, of a bench of the host: what a job does beside the cards, the site alone can say."""
        why = self.after(cards) or self._site_says()
        return f"afterwards: {why}" if why and not why.startswith("afterwards: ") else why

    def _shut(self) -> str:
        return self.locked_out() or self._site_says()

    def _site_says(self) -> str:
        return "" if self._asked else ask(self._rules.command, self._rules.command_s, self._stop)

    def _interrupted(self) -> str:
        if self._stop.reason:
            return self._stop.reason
        return "the lock is wanted" if self._lock is not None and self._lock.wanted() else ""

    def _came(self) -> str:
        for card in () if self._asked else self._watched:
            pids = self._pids(card)
            if pids:
                return f"a job came: {_named(pids)}"
            if pids is None:
                used, had = _number(card.read("gpu"), "mem_used_bytes"), self._before.get(card.pci)
                if used is not None and had is not None and used > had + _OWN_BYTES:
                    return f"a job came: {used / _MIB:.0f} MiB of the card's memory are in use"
        return ""

    def _why_not(self, card: Gpu, load: bool = True) -> str:
        try:
            sight = self.look(card)
        except DriverError as error:
            return f"it cannot be looked at: {error.code}"
        self._before[card.pci] = sight.mem_used_bytes
        return sight.why_not(self._rules.mem_mib * _MIB, self._lock is not None, load)

    def look(self, card: Gpu) -> Sight:
        """Look at a card once.

        Raises:
            DriverError: It does not answer.
        """
        row = {**card.read("gpu"), **card.read("ring")}
        utils = [_number(row, name) for name in ("util_pct", "mem_util_pct")]
        known = [util for util in utils if util is not None]
        split = isinstance(row.get("util_pct"), Null) and _code(row.get("util_pct")) == "MIG"
        tenants = card.read("gate")
        mode = tenants.get("compute_mode")
        return Sight(
            pids=self._pids(card, tenants),
            mem_used_bytes=_number(row, "mem_used_bytes"),
            util_pct=max(known) if utils[0] is not None else None,
            power_w=_number(row, "power_w"),
            power_limit_w=_number(row, "power_limit_w"),
            split=split,
            exclusive=mode if isinstance(mode, str) and mode != "default" else "",
        )

    def _pids(self, card: Gpu, tenants: Row | None = None) -> frozenset[int] | None:
        """Processes on the card but our own; None = they cannot be seen."""
        row = card.read("gate") if tenants is None else tenants
        if "pids" not in row:  # a driver whose host alone can list them
            found = frozenset(one.pid for one in self._host.processes() if one.pci == card.pci)
        else:
            text = row["pids"]
            if not isinstance(text, str):
                return None
            found = frozenset(int(word) for word in text.split())
        return frozenset(pid for pid in found if not _ours(pid))


def _ours(pid: int) -> bool:
    """Whether a process is this one, or one that it started: a tool, and what the tool started."""
    for _ in range(64):
        if pid == os.getpid():
            return True
        try:
            # `4711 (any name) S 1 ...`
            words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            pid = int(words[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def ask(command: Sequence[str], within_s: float, stop: Stop | None = None) -> str:
    """Why a site's own command does not say that the host is free; empty when it does, or there is none.

    It is ended when `stop` says so: a run that must make way leaves nothing behind.
    """
    if not command:
        return ""
    named = f"gate command {command[0]:.80}"
    program = shutil.which(command[0])
    if program is None:
        return f"{named}: {os.strerror(errno.EACCES if os.path.exists(command[0]) else errno.ENOENT)}"
    try:
        asked = subprocess.Popen(
            leashed(os.path.abspath(program), *command[1:]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{named}: {error.strerror}"
    until = time.monotonic() + within_s
    while time.monotonic() < until and not (stop and stop.reason):
        with suppress(subprocess.TimeoutExpired):
            status = asked.wait(_ASK_S)
            return "" if status == 0 else f"{named}: exit status {status}"
    with suppress(OSError):  # its children too: it may be a script
        os.killpg(asked.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        asked.wait(_ASK_S)
    return stop.reason if stop and stop.reason else f"{named}: no answer within {within_s:g} s"


def host_load(rules: Rules) -> str:
    """Why a bench of the host itself would be disturbed; empty when it would not."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return "" if load <= rules.load * cores else f"host is busy: load {load:.1f} on {cores} cores"


def _named(pids: frozenset[int]) -> str:
    first = min(pids)
    return f"process {first}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")


def _number(row: Row, name: str) -> float | None:
    cell = row.get(name)
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def _code(cell: Cell | None) -> str:
    return cell.code if isinstance(cell, Null) else ""
