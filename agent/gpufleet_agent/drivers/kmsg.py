"""The kernel log as a source: /dev/kmsg by position, or the journal where that is not allowed.

Both give records of the kernel alone: text that a process writes to /dev/kmsg carries a facility other than
0 there and in the journal, and never counts. Reading never waits: /dev/kmsg is opened non-blocking, and the
journal is read by a short-lived `journalctl` whose output is collected on later calls.

The position is (boot id, sequence number) and travels, with all that is half read, in an opaque cursor. Hand
`KernelLog.read` the cursor that was stored together with its events, and no event is lost or told twice,
whichever process asks.
"""

import errno
import logging
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gpufleet.catalogue import Catalogue
from gpufleet.event import Event
from gpufleet_agent.kernel_log import Now, Reader, Record, State, next_boot, no_uuid

log = logging.getLogger(__name__)

FROM_NOW = ""
"""Cursor of a reader that wants only what comes; names of cards are learned from what is there."""

FROM_BOOT = "boot"
"""Cursor of a reader that wants all of this boot."""

MAX_RECORDS = 8192
"""Records taken per call; what is already known is skipped faster (`MAX_SKIPPED`)."""

MAX_SKIPPED = 65536
MAX_EVENTS = 256
MAX_RECORD_BYTES = 16384
MAX_TAIL_BYTES = 65536

JOURNAL_EVERY_US = 15_000_000
JOURNAL_DEADLINE_US = 60_000_000


def system_clock() -> Now:
    """The three clocks, read together. The kernel stamps its records by the one that stops in suspend."""
    return Now(
        time.time_ns() // 1000,
        time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
        time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000,
    )


class Source(Protocol):
    """Where records come from. `None` = one that is not the kernel's, or cannot be read."""

    at_end: bool
    """Whether the last `records` ended because there is nothing more, not because it must be waited for."""

    def records(self) -> Iterator[Record | None]:
        """What is there now, oldest first, without waiting."""

    def take_lost(self) -> int:
        """Records overwritten since the last asking."""

    def take_moved(self) -> bool:
        """Whether the position was found to be beyond the end since the last asking."""

    def close(self) -> None:
        """Let go of descriptors and children."""


class KernelLog:
    """Reads the kernel log of the machine under `root`. Not for use by several threads at once.

    Args:
        root: Where /dev and /proc are; another root is a captured tree (a plain file as dev/kmsg).
        words: The catalogue, with the site's changes; default: as shipped.
        uuid_of: Says from memory, without a driver call, which card is at a PCI address; "" = not known.
        journalctl: Command that reads the journal; default: `journalctl` on the machine itself, nothing
            under another root.
        clock: The three clocks.
        boot_id: Says which boot is running; default: what the kernel under `root` says.
        source: Opens what is read instead of the machine's log, from a state on.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        words: Catalogue | None = None,
        uuid_of: Callable[[str], str] = no_uuid,
        journalctl: Sequence[str] | None = None,
        clock: Callable[[], Now] = system_clock,
        boot_id: Callable[[], str] | None = None,
        source: Callable[[State], Source] | None = None,
    ) -> None:
        self._device = root / "dev/kmsg"
        self._boot_id_file = root / "proc/sys/kernel/random/boot_id"
        self._words = words
        self._uuid_of = uuid_of
        self._journalctl = ("journalctl",) if journalctl is None and root == Path("/") else journalctl or ()
        self._clock = clock
        self._boot_id = boot_id or self._boot_id_of_kernel
        self._open_source = source
        self._source: Source | None = None
        self._reader: Reader | None = None
        self._cursor: str | None = None
        self._drained_boot_us = 0

    @property
    def source(self) -> str:
        """What is read now: "kmsg", "journal" or "" (nothing can be)."""
        return {_Kmsg: "kmsg", _Journal: "journal"}.get(type(self._source), "")

    def close(self) -> None:
        """Let go of the source; the next `read` opens it again."""
        if self._source is not None:
            self._source.close()
        self._source = self._reader = self._cursor = None
        self._drained_boot_us = 0

    def read(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`, and the next cursor. Never waits, never raises.

        At most `MAX_RECORDS` records are taken; the rest comes with the next call.
        """
        now = self._clock()
        reader = self._reader
        if reader is None or cursor != self._cursor:
            self.close()
            reader = self._start(cursor)
        reader.begin(now, self._drained_boot_us)
        self._open(reader)
        if self._source is not None and self._pump(self._source, reader):
            self._drained_boot_us = now.boot_us if self.source == "kmsg" else 0  # the journal lags behind
            if reader.state.blind:
                reader.state.blind = ""
                reader.note("readable", f"the kernel log can be read ({self.source})")
        events = reader.finish()
        self._reader = reader
        self._cursor = msgspec.json.encode(reader.state).decode()
        return events, self._cursor

    def _start(self, cursor: str) -> Reader:
        """The state that `cursor` stands for, moved to the running boot."""
        boot = self._boot_id()
        damaged = False
        if cursor == FROM_BOOT:
            state = State(boot=boot)
        elif cursor == FROM_NOW:
            state = State(boot=boot, learning=True)
        else:
            try:
                state = msgspec.json.decode(cursor.encode("utf-8", "replace"), type=State)
            except msgspec.MsgspecError:
                state, damaged = State(boot=boot, learning=True), True
        if state.boot != boot:
            state = next_boot(state, boot)
        reader = Reader(state, self._words, self._uuid_of)
        if damaged:
            reader.begin(self._clock())
            reader.note("position", "the stored position in the kernel log is damaged: reading on from now")
        return reader

    def _boot_id_of_kernel(self) -> str:
        try:
            return self._boot_id_file.read_text().strip()[:64]
        except (OSError, UnicodeDecodeError):
            return ""

    def _open(self, reader: Reader) -> None:
        """Open what can be read; tell once when nothing can, and once when it can again."""
        if isinstance(self._source, _Journal) and self._source.blind:
            self._blind(reader, self._source.blind)
            return
        if self._source is None and self._open_source is not None:
            self._source = self._open_source(reader.state)
        if self._source is None:
            try:
                self._source = _Kmsg(self._device, reader.state)
            except OSError as error:
                why = f"{self._device.name}: {error.strerror or type(error).__name__}"
                if self._journalctl:
                    self._source = _Journal(self._journalctl, reader.state, self._clock)
                    log.info("%s: reading the journal instead", why)
                else:
                    self._blind(reader, why)
                    return

    def _blind(self, reader: Reader, why: str) -> None:
        if not reader.state.blind:
            reader.note("unreadable", f"the kernel log cannot be read: {why}", reason=why)
            log.warning("the kernel log cannot be read: %s", why)
        reader.state.blind = why[:200]

    def _pump(self, source: Source, reader: Reader) -> bool:
        """Feed what is there; True when the end was reached."""
        taken = skipped = 0
        try:
            for record in source.records():
                if record is None:
                    skipped += 1
                else:
                    taken += 1
                    reader.feed(record)
                if taken >= MAX_RECORDS or skipped >= MAX_SKIPPED or reader.waiting >= MAX_EVENTS:
                    return False
        except OSError as error:
            self.close()
            self._blind(reader, error.strerror or type(error).__name__)
            return False
        finally:
            if lost := source.take_lost():
                text = f"{lost} kernel records were overwritten before they could be read"
                reader.note("lost", text, lost)
        if source.take_moved():
            reader.note("position", "the kernel log ends before the stored position: reading on from its end")
        if not source.at_end:
            return False
        reader.state.learning = False
        return True


# ---------------------------------------------------------------- /dev/kmsg

_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


def unescape(text: bytes) -> str:
    """The text as the kernel had it: /dev/kmsg writes what is not printable as backslash, x, two digits."""
    if b"\\x" in text:
        text = _ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), text)
    return text.decode("utf-8", "replace")


def _number(digits: bytes) -> int:
    """The number; -1 when it is none."""
    return int(digits) if digits.isdigit() and len(digits) <= 19 else -1


class _Kmsg:
    """/dev/kmsg, from the first record after the state's position."""

    def __init__(self, path: Path, state: State) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._state = state
        self._from_journal_us = state.stamp_us if state.seq < 0 else -1
        self._expected = state.seq + 1
        self._started_at = state.seq
        self._newest = -1
        self._lost = 0
        self._moved = False
        self.at_end = False
        self._tail = b""
        self._lines: deque[bytes] = deque()

    def close(self) -> None:
        os.close(self._fd)

    def take_lost(self) -> int:
        lost, self._lost = self._lost, 0
        return lost

    def take_moved(self) -> bool:
        moved, self._moved = self._moved, False
        return moved

    def records(self) -> Iterator[Record | None]:
        self.at_end = False
        while self._lines or self._fill():
            if self._lines:
                yield self._record(self._lines.popleft())
        self.at_end = True
        if 0 <= self._newest < self._started_at:
            # Same boot, and yet the log ends before our position: it is another log. Read it from here on.
            self._started_at = self._state.seq = self._newest
            self._expected = self._newest + 1
            self._moved = True

    def _fill(self) -> bool:
        """Read once; False when there is nothing more now."""
        try:
            chunk = os.read(self._fd, MAX_RECORD_BYTES)
        except BlockingIOError:
            return False
        except (BrokenPipeError, InterruptedError):
            return True  # overwritten while we looked away: the next sequence number says how many
        except OSError as error:
            if error.errno == errno.EINVAL:  # a record larger than any the kernel writes; it is skipped
                return True
            raise
        if not chunk:
            return False
        *whole, self._tail = (self._tail + chunk).split(b"\n")
        self._tail = self._tail[-MAX_TAIL_BYTES:]
        self._lines.extend(whole)
        return True

    def _record(self, line: bytes) -> Record | None:
        head, found, text = line.partition(b";")
        if not found or line[:1] == b" ":  # ` KEY=value` lines belong to the record before
            return None
        parts = head.split(b",", 3)
        if len(parts) < 3:
            return None
        priority, seq, stamp = (_number(part) for part in parts[:3])
        if priority < 0 or seq < 0 or stamp < 0:
            return None
        self._newest = max(self._newest, seq)
        if seq < self._expected:
            return None
        self._lost += seq - self._expected
        self._expected = seq + 1
        self._state.seq = seq
        if priority >> 3 or stamp <= self._from_journal_us:
            return None
        return Record(seq, stamp, unescape(text))


# ---------------------------------------------------------------- the journal

_FIELDS = "MESSAGE,SYSLOG_FACILITY,_TRANSPORT,_BOOT_ID,_SOURCE_MONOTONIC_TIMESTAMP"


class _Journal:
    """The journal's copy of the kernel log. One `journalctl` at a time, which ends by itself.

    A follower that never ends would outlive a sampler that is killed; these do not.
    """

    def __init__(self, command: Sequence[str], state: State, clock: Callable[[], Now]) -> None:
        self._command = tuple(command)
        self._state = state
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None
        self._started_us = -JOURNAL_EVERY_US
        self._tail = b""
        self._lines: deque[bytes] = deque()
        self._got = 0
        self._after_us = -1
        self.seen = False
        self.at_end = False
        self.blind = ""

    def take_lost(self) -> int:
        return 0  # the journal does not number records

    def take_moved(self) -> bool:
        return False

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._stop(child)

    def _stop(self, child: subprocess.Popen[bytes]) -> int | None:
        """End the child; its exit status, or None when it is stuck on a dead disk and cannot be ended yet."""
        if child.stdout is not None:
            child.stdout.close()
        try:
            return child.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            child.kill()
        try:
            return child.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            self._stuck = child
            return None

    def records(self) -> Iterator[Record | None]:
        self.at_end = False
        if self._child is None and not self._begin():
            return
        while self._lines or self._fill():
            if self._lines:
                yield self._record(self._lines.popleft())

    def _begin(self) -> bool:
        """Start a `journalctl` when it is time; False when it is not, or cannot be."""
        now_us = self._clock().boot_us
        if now_us - self._started_us < JOURNAL_EVERY_US:
            return False
        if self._stuck is not None and self._stuck.poll() is None:
            return False  # never a second one beside it
        self._stuck = None
        self._started_us = now_us
        state = self._state
        # Without a cursor of the journal the stamp tells what is known, whichever source it came from.
        self._after_us = -1 if state.journal else state.stamp_us
        where = [f"--after-cursor={state.journal}"] if state.journal else []
        try:
            self._child = subprocess.Popen(
                [
                    *self._command,
                    "--no-pager",
                    "--quiet",
                    "--boot",
                    "--output=json",
                    f"--output-fields={_FIELDS}",
                    *where,
                    "_TRANSPORT=kernel",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self.blind = f"journalctl: {error.strerror or type(error).__name__}"
            return False
        if self._child.stdout is not None:
            os.set_blocking(self._child.stdout.fileno(), False)
        self._got, self._tail = 0, b""
        return True

    def _fill(self) -> bool:
        child = self._child
        if child is None or child.stdout is None:
            return False
        try:
            chunk = os.read(child.stdout.fileno(), MAX_TAIL_BYTES)
        except BlockingIOError:
            if self._clock().boot_us - self._started_us > JOURNAL_DEADLINE_US:
                log.warning("journalctl did not finish in time and was ended")
                self.close()
            return False
        if chunk:
            *whole, self._tail = (self._tail + chunk).split(b"\n")
            self._tail = self._tail[-16 * MAX_TAIL_BYTES :]
            self._lines.extend(whole)
            return True
        self._end(child)
        return False

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """The output is at its end: the child is done, or about to be."""
        self._child = None
        self.at_end = self.seen
        code = self._stop(child)
        if code != 0 and self._state.journal and not self._got:
            self._state.journal = ""  # the place is gone (vacuumed): find ours by the stamp next time
        elif not self.seen and not self._state.journal:
            # Every boot begins with kernel lines: a journal without one is a journal we may not see.
            self.blind = "the journal shows no kernel lines (no permission, or not kept)"
        if self.seen:
            self.blind = ""

    def _record(self, line: bytes) -> Record | None:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        self._got += 1
        self.seen = True
        self._state.journal = entry.cursor[:1024]
        stamp = _number(entry.stamp.encode("ascii", "replace"))
        if entry.transport != "kernel" or entry.facility != "0" or stamp < 0 or stamp <= self._after_us:
            return None
        text = entry.message
        if isinstance(text, list):
            text = bytes(byte & 0xFF for byte in text[:MAX_RECORD_BYTES]).decode("utf-8", "replace")
        return None if text is None else Record(-1, stamp, text)


class _Entry(msgspec.Struct):
    cursor: str = msgspec.field(name="__CURSOR")
    transport: str = msgspec.field(name="_TRANSPORT", default="")
    facility: str = msgspec.field(name="SYSLOG_FACILITY", default="")
    stamp: str = msgspec.field(name="_SOURCE_MONOTONIC_TIMESTAMP", default="")
    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
