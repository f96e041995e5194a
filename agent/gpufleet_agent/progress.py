"""The progress word: which driver call the sampler is in, in shared memory, so that a hang can be named.

The sampler writes it (`SharedProgress`), the supervisor reads it (`ProgressView`); the memory is an
anonymous file whose descriptor the child inherits. A record carries a checksum: one torn by a write in
progress is no record.
"""

import mmap
import os
import struct
import time
from binascii import crc32
from dataclasses import dataclass
from typing import Protocol

_RECORD = struct.Struct("<Qd32s64s")
_CHECK = struct.Struct("<I")
_SLOT = _RECORD.size + _CHECK.size + 1
_CALL, _PHASE, _ASIDE = 0, 128, 256
SIZE = 384

INIT_CALL = "nvmlInit"
"""Takes seconds per card where the driver was not kept loaded, so it has a deadline of its own."""


class Phases(Protocol):
    """Where the sampler writes what it is doing between and around driver calls."""

    def begin(self, phase: str) -> None:
        """Doing `phase` from now on, e.g. "probe gpu"."""

    def rest(self) -> None:
        """Waiting: for the next tick, or for the reader of the pipe."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a child is in the middle of.

    Attributes:
        number: Of the record: the same number twice is the same call.
        since: time.monotonic() when it began; the clock is one for the whole machine.
        card: PCI address; "" = no single card.
        call: The driver call, or the phase of the loop.
    """

    number: int
    since: float
    card: str
    call: str


def new_memory(note: bytes = b"") -> int:
    """A descriptor of fresh shared memory for one child, with a note for it behind the progress word.

    A note may be longer than the system lets an argument be.
    """
    fd = os.memfd_create("gpufleet-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    if note:
        os.pwrite(fd, note, SIZE)
    return fd


def read_note(fd: int) -> bytes:
    """What was left there for the child."""
    return os.pread(fd, max(0, os.fstat(fd).st_size - SIZE), SIZE)


class SharedProgress:
    """The child's end. `enter` and `leave` are what drivers call; costs a microsecond or two."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._number = 0

    def enter(self, card: str, call: str) -> None:
        """About to call `call` for `card`."""
        self._write(_CALL, card, call)

    def leave(self) -> None:
        """The call returned."""
        self._memory[_CALL] = 0

    def begin(self, phase: str) -> None:
        """Doing `phase` from now on."""
        self._write(_PHASE, "", phase)

    def rest(self) -> None:
        """Waiting for the next tick or for the pipe."""
        self._memory[_PHASE] = 0

    def aside(self) -> "Aside":
        """A word of its own for the one call that may go on beside the loop."""
        return Aside(self)

    def _write(self, at: int, card: str, call: str) -> None:
        self._number += 1
        record = _RECORD.pack(self._number, time.monotonic(), _cut(card, 32), _cut(call, 64))
        self._memory[at] = 0
        self._memory[at + 1 : at + _SLOT] = record + _CHECK.pack(crc32(record))
        self._memory[at] = 1


class Aside:
    """What a thread beside the loop is in the middle of; for a driver's initialisation."""

    def __init__(self, shared: SharedProgress) -> None:
        self._shared = shared

    def enter(self, card: str, call: str) -> None:
        """About to call `call` for `card`."""
        self._shared._write(_ASIDE, card, call)

    def leave(self) -> None:
        """The call returned."""
        self._shared._memory[_ASIDE] = 0


class ProgressView:
    """The supervisor's end."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)

    def call(self) -> Doing | None:
        """The driver call the child is in; None when in none, or just moving to the next."""
        return self._read(_CALL)

    def phase(self) -> Doing | None:
        """What the loop of the child is doing; None when it waits."""
        return self._read(_PHASE)

    def aside(self) -> Doing | None:
        """The call that goes on beside the loop; None when there is none."""
        return self._read(_ASIDE)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _read(self, at: int) -> Doing | None:
        raw = self._memory[at : at + _SLOT]
        record, (check,) = raw[1 : 1 + _RECORD.size], _CHECK.unpack(raw[1 + _RECORD.size :])
        if not raw[0] or crc32(record) != check:
            return None
        number, since, card, call = _RECORD.unpack(record)
        return Doing(number, since, _text(card), _text(call))


def _cut(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
