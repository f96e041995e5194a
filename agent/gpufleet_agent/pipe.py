"""What the agent's children hand up their pipe, and what the supervisor tells them: framed msgpack.

A frame is a length, a kind and a payload. The children write with blocking writes, so a slow reader slows
the child down and nothing piles up on either side.
"""

import os
import select
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec

from gpufleet.event import Event
from gpufleet_agent.drivers import Item
from gpufleet_agent.probe import Sweep

_HEAD = struct.Struct("<Ic")
_MOST = 16 << 20


class Inventory(msgspec.Struct, array_like=True, frozen=True):
    """What the host is made of, read once.

    Attributes:
        ts_us: Wall clock, microseconds since the epoch, UTC.
        complete: False while a driver did not answer: what is absent may still exist.
        items: Everything there is.
    """

    ts_us: int
    complete: bool
    items: list[Item]


class KernelNews(msgspec.Struct, array_like=True, frozen=True):
    """What the kernel log brought.

    Attributes:
        events: Oldest first.
        cursor: Where to read on once these are stored; opaque.
    """

    events: list[Event]
    cursor: str


class Listening(msgspec.Struct, array_like=True, frozen=True):
    """Where a bench waits for its peer.

    Attributes:
        address: IP:PORT.
    """

    address: str


class Skip(msgspec.Struct, frozen=True):
    """A card that is not touched, usually because a call to it does not return; pci "" = the whole driver.

    Attributes:
        pci: Its address.
        uuid: Its identity, where known, so that its row still names it.
        index: The driver's number when it was last read.
        why: `hung`, or `released` when people asked for the driver to be left alone.
    """

    pci: str
    uuid: str = ""
    index: int = -1
    why: str = "hung"


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the supervisor tells the running sampler; one JSON line each.

    Attributes:
        inventory: Read the inventory again.
        probe: Run this probe every `every_s` seconds from now on.
        every_s: See `probe`.
    """

    inventory: bool = False
    probe: str = ""
    every_s: float = 0.0


Message = Sweep | Inventory | Event | KernelNews | Listening
_KINDS: dict[type, bytes] = {
    Sweep: b"S",
    Inventory: b"I",
    Event: b"E",
    KernelNews: b"K",
    Listening: b"L",
}
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(of) for of, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


class PipeError(Exception):
    """What came up the pipe is no frame of ours."""


def send(fd: int, message: Message) -> None:
    """Write one message; blocks until the reader took it.

    Raises:
        BrokenPipeError: Nobody reads any more.
    """
    payload = _ENCODER.encode(message)
    data = memoryview(_HEAD.pack(len(payload), _KINDS[type(message)]) + payload)
    while data:
        data = data[os.write(fd, data) :]


class Frames:
    """Puts messages together from what the pipe gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes.

        Raises:
            PipeError: A frame is too large, of no known kind, or not what its kind says.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._buffer)
            if size > _MOST or kind not in _DECODERS:
                raise PipeError(f"frame of kind {kind!r} and {size} bytes")
            if len(self._buffer) < _HEAD.size + size:
                return
            payload = bytes(self._buffer[_HEAD.size : _HEAD.size + size])
            del self._buffer[: _HEAD.size + size]
            try:
                yield _DECODERS[kind].decode(payload)
            except msgspec.DecodeError as error:
                raise PipeError(f"frame of kind {kind!r}: {error}") from error


def claim_stdout() -> int:
    """A descriptor of the pipe to the supervisor. What a library prints goes to the log from here on."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def end_with_parent(commands: int, last: Callable[[], None] = lambda: None) -> None:
    """End this process when the other end of `commands` closes, whatever the main thread is doing.

    `last` is done before, in another thread.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(commands, 0)  # hang-up alone; data is for the main loop
        poll.poll()
        try:
            last()
        finally:
            os._exit(0)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
