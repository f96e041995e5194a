"""Does a mount answer, and how full is it? Asked by a disposable program, never by the agent itself.

statfs of a mount whose server is gone does not return, and nothing can make it. So each question is a process
of its own that nobody waits for longer than a moment; one that is stuck is left alone, and no other is sent
to that mount until it ends. The mark in its arguments lets a sampler that starts anew find it again.
"""

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

MARK = "gpufleet-canary"

_PLACES = ("/usr/bin/stat", "/bin/stat")
_FORMAT = "%S %b %f %a %c %d"
_ENVIRONMENT = {"LC_ALL": "C"}
_FIGURES = re.compile(rf"{MARK} \S+((?: \d{{1,20}}){{6}})\s*")
_MARKED = re.compile(rf"{MARK} (\d{{1,10}}) ")
_ERRORS = {os.strerror(number): word for number, word in errno.errorcode.items()}
_NO_PERMISSION = ("EACCES", "EPERM")
_LATER = Null(Reason.NOT_READ, "next_time")
_NO_PROGRAM = Null(Reason.NOT_SUPPORTED, "no_stat")


@dataclass(frozen=True, slots=True)
class Key:
    """One mount: the kernel's number of it, and where it is."""

    id: int
    path: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What the file system says: bytes, and inodes."""

    size: int
    free: int
    avail: int
    inodes: int
    inodes_free: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one mount now.

    Attributes:
        state: ok, pending (asked just now), hung, failed; or why it was not asked.
        code: errno word of a failure; empty otherwise.
        seconds: How long the slowest answer since the last look took; None = there was none.
        hung_s: For how long it has not answered; in the first answer after that: for how long it did not.
        usage: None unless it answered in this look.
    """

    state: Cell
    code: str = ""
    seconds: float | None = None
    hung_s: float = 0.0
    usage: Usage | None = None


class Canaries(Protocol):
    """Whoever asks the mounts."""

    def ask(self, keys: Sequence[Key]) -> Mapping[Key, Answer]:
        """What each of them says; one that is not in the answer was not asked."""


class NoCanaries:
    """Asks nobody: for a tree of files that is not this machine's own."""

    def ask(self, keys: Sequence[Key]) -> Mapping[Key, Answer]:
        """Nothing."""
        return {}


@dataclass(slots=True)
class _Canary:
    """One process under way; None, and `answer_fd` = -1, when an earlier sampler started it."""

    process: subprocess.Popen[bytes] | None
    pidfd: int
    answer_fd: int
    began: float
    began_wall: float
    killed: bool = False


@dataclass(slots=True)
class _Result:
    seconds: float
    state: str
    code: str
    usage: Usage | None


class StatCanaries:
    """Runs coreutils' (or busybox') `stat -f`, which costs a tenth of a Python process.

    Args:
        program: What to run; () = there is none.
        wait_s: How long one look may take in all.
        deadline_s: A mount that does not answer for longer is hung.
        kill_after_s: Then SIGKILL is sent, once: what dies of it is replaced, for its answer may never come.
        most: Processes at a time, stuck ones too.
        per_look: Mounts asked in one look; the others have their turn in the next.
        proc: Where an earlier sampler's canaries are looked for.
    """

    def __init__(
        self,
        program: Sequence[str] | None = None,
        *,
        wait_s: float = 0.15,
        deadline_s: float = 2.0,
        kill_after_s: float = 60.0,
        most: int = 32,
        per_look: int = 16,
        proc: Path = Path("/proc"),
    ) -> None:
        self._program = _found() if program is None else tuple(program)
        self._wait_s = wait_s
        self._deadline_s = deadline_s
        self._kill_after_s = kill_after_s
        self._most = most
        self._per_look = per_look
        self._running: dict[Key, _Canary] = {}
        self._silent: dict[Key, float] = {}
        self._turns: dict[Key, int] = {}
        self._looks = 0
        self._proc = proc

    def ask(self, keys: Sequence[Key]) -> Mapping[Key, Answer]:
        """Ask those that are not being asked; gather what comes within `wait_s`."""
        if not self._program:
            return dict.fromkeys(keys, Answer(_NO_PROGRAM))
        if not self._looks:
            self._find_again()
        self._looks += 1
        results: dict[Key, list[_Result]] = {}
        hung: dict[Key, float] = {}
        self._gather(results, hung, 0.0)
        self._forget(keys)
        failed: dict[Key, Null] = {}
        for key in self._next(keys):
            try:
                self._running[key] = self._start(key)
            except OSError as error:
                failed[key] = files.why(error)
        until = time.monotonic() + self._wait_s
        while self._running:
            # nobody waits for those that are past the deadline
            newest = max(one.began for one in self._running.values())
            left_s = min(until, newest + self._deadline_s) - time.monotonic()
            if left_s <= 0:
                break
            self._gather(results, hung, left_s)
        return {key: self._answer(key, results.get(key, []), hung, failed) for key in keys}

    def _answer(
        self, key: Key, results: list[_Result], hung: Mapping[Key, float], failed: Mapping[Key, Null]
    ) -> Answer:
        seconds = max((one.seconds for one in results), default=None)
        last = results[-1] if results else None
        recovered_s = hung.get(key, 0.0)
        since = self._silent.get(key)
        silent_s = 0.0 if since is None else time.monotonic() - since
        if since is not None and silent_s > self._deadline_s:
            return Answer("hung", "", seconds, silent_s)
        if last is not None:
            return Answer(last.state, last.code, seconds, recovered_s, last.usage)
        return Answer("pending" if key in self._running else failed.get(key, _LATER))

    def _next(self, keys: Sequence[Key]) -> list[Key]:
        """Whose turn it is: those that waited longest."""
        room = min(self._per_look, self._most - len(self._running))
        waiting = sorted(
            (self._turns.get(key, 0), at) for at, key in enumerate(keys) if key not in self._running
        )
        chosen = [keys[at] for _, at in waiting[: max(0, room)]]
        self._turns.update(dict.fromkeys(chosen, self._looks))
        return chosen

    def _forget(self, keys: Sequence[Key]) -> None:
        """What is no longer mounted is no longer silent; its canary is still looked after."""
        here = frozenset(keys)
        for known in (self._silent, self._turns):
            for key in [key for key in known if key not in here]:
                del known[key]
        for key in here & self._running.keys():  # mountinfo could not be read for once
            self._silent.setdefault(key, self._running[key].began)

    def _start(self, key: Key) -> _Canary:
        answer_fd = os.memfd_create(MARK)
        arguments = [*self._program, "-f", "-c", f"{MARK} {key.id} {_FORMAT}", "--", key.path]
        began, began_wall = time.monotonic(), time.time()
        try:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=answer_fd, stderr=answer_fd, env=_ENVIRONMENT
            )
            pidfd = os.pidfd_open(process.pid)
        except (OSError, ValueError) as error:
            os.close(answer_fd)
            raise error if isinstance(error, OSError) else OSError(errno.EINVAL, "path") from error
        self._silent.setdefault(key, began)
        return _Canary(process, pidfd, answer_fd, began, began_wall)

    def _gather(self, results: dict[Key, list[_Result]], hung: dict[Key, float], timeout_s: float) -> None:
        """Take in what has ended, after waiting for the first at most `timeout_s`."""
        ended = select.poll()
        for one in self._running.values():
            ended.register(one.pidfd, select.POLLIN)
        ready = {fd for fd, _ in ended.poll(timeout_s * 1000)} if self._running else set()
        now = time.monotonic()
        for key, one in list(self._running.items()):
            if one.pidfd in ready:
                del self._running[key]
                result = _end(one, now)
                since = self._silent.get(key)
                if result is None or since is None:
                    if not one.killed and one.process is not None:
                        self._silent.pop(key, None)  # someone else killed it: that says nothing of the mount
                    continue
                del self._silent[key]
                results.setdefault(key, []).append(result)
                silent_s = one.began + result.seconds - since
                if silent_s > self._deadline_s:
                    hung[key] = silent_s
            elif now - one.began > self._kill_after_s and not one.killed:
                one.killed = True
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)

    def _find_again(self) -> None:
        """Canaries that an earlier sampler left stuck: they still count."""
        name = os.path.basename(self._program[0])[:15]
        for home in files.listed(self._proc):
            if not home.name.isdecimal() or files.read(home / "comm") != f"{name}\n":
                continue
            with contextlib.suppress(OSError, ValueError):
                if home.stat().st_uid == os.geteuid():
                    self._take_over(home)

    def _take_over(self, home: Path) -> None:
        pidfd = os.pidfd_open(int(home.name))  # before its name is read: the number may be another's by then
        arguments = files.read(home / "cmdline")
        words = [] if isinstance(arguments, Null) else arguments.split("\0")
        marked = _MARKED.match(words[-4]) if len(words) > 4 else None
        ticks = files.parsed(files.read(home / "stat"), lambda text: text.rpartition(")")[2].split()[19])
        key = Key(int(marked[1]), words[-2]) if marked else None
        if key is None or key in self._running or not isinstance(ticks, str) or not ticks.isdecimal():
            os.close(pidfd)
            return
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_s = max(0.0, boot - int(ticks) / os.sysconf("SC_CLK_TCK"))
        began = time.monotonic() - age_s
        self._running[key] = _Canary(None, pidfd, -1, began, time.time() - age_s)
        self._silent[key] = began


def _end(canary: _Canary, now: float) -> _Result | None:
    """What a process that ended said; None when it was killed, or said it to an earlier sampler."""
    os.close(canary.pidfd)
    if canary.process is None:
        return None
    try:
        status = canary.process.wait()
        text = os.pread(canary.answer_fd, 4096, 0).decode(errors="replace")
        # when it ended is not known once it is gone, but when it wrote is
        wrote_s = os.fstat(canary.answer_fd).st_mtime - canary.began_wall
    except OSError:
        return None
    finally:
        os.close(canary.answer_fd)
    if status < 0:
        return None
    seconds = now - canary.began
    if seconds > 0.5 and 0.0 < wrote_s < seconds:
        seconds = wrote_s
    found = _FIGURES.fullmatch(text)
    if status == 0 and found:
        block, blocks, free, avail, inodes, inodes_free = map(int, found[1].split())
        usage = Usage(block * blocks, block * free, block * avail, inodes, inodes_free)
        return _Result(seconds, "ok", "", usage)
    return _Result(seconds, "failed", _ERRORS.get(text.strip().rpartition(": ")[2], "unparsable"), None)


def _found() -> tuple[str, ...]:
    return next(((place,) for place in _PLACES if os.access(place, os.X_OK)), ())
