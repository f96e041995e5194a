"""One stream of bytes over TCP, to be timed: both ends.

The receiver takes one connection, and only from who says its token; nothing is read beyond the agreed bytes
and time. On the wire: the token, then any bytes; at the sender's end of file the receiver answers with the
number of bytes that it got, eight of them in network order.
"""

import errno
import hmac
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpufleet_agent.drivers import Check, go_on

TOKEN_BYTES = 32
BLOCK_BYTES = 1 << 20

_T = TypeVar("_T")
_LOOK_S = 0.05
_CONNECT_S = 5.0
_COUNT = struct.Struct("!Q")


class Refused(Exception):
    """There is no result, and why."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a stream may be.

    Attributes:
        bytes: At most so many, the token apart.
        seconds: It is over after so long, from the call on, waiting for the other end included.
    """

    bytes: int = 256 << 20
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Stream:
    """What was moved.

    Attributes:
        bytes: Moved, as both ends count.
        seconds: From the first byte to the last one's arrival.
    """

    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second; a byte counts once."""
        return self.bytes / 1e9 / self.seconds


def serve(
    listener: socket.socket, token: bytes, limit: Limit, check: Check = go_on, wait_s: float | None = None
) -> Stream:
    """Take one connection and all that it sends. Whoever comes second finds `listener` closed.

    Args:
        listener: Bound and listening.
        token: `TOKEN_BYTES` bytes, a secret of this one stream.
        limit: What it may be.
        check: Called at least every tenth of a second; what it raises ends the stream.
        wait_s: So long to wait for the connection, from which then the limit counts; None = within the limit.

    Raises:
        Refused: Nobody came in time, or who came had no token, sent too much, or was too slow.
        OSError: The network.
    """
    _must_be_token(token)
    now = time.monotonic()
    listener.settimeout(_LOOK_S)
    if wait_s is None:
        until = now + limit.seconds
        connection, _ = _patiently(listener.accept, until=until, check=check)
    else:
        late = f"nobody came within {wait_s:g} s"
        connection, _ = _patiently(listener.accept, until=now + wait_s, check=check, late=late)
        until = time.monotonic() + limit.seconds
    with connection:
        listener.close()
        connection.settimeout(_LOOK_S)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        said = b""
        while len(said) < TOKEN_BYTES:
            data = _patiently(connection.recv, TOKEN_BYTES - len(said), until=until, check=check)
            if not data:
                break
            said += data
        if not hmac.compare_digest(said, token):
            raise Refused("who connected does not have the token")
        began = ended = time.perf_counter()
        got = 0
        while True:
            count = _patiently(connection.recv_into, buffer, until=until, check=check)
            if not count:
                break
            if not got:
                began = time.perf_counter()
            got += count
            ended = time.perf_counter()
            if got > limit.bytes:
                raise Refused(f"more than {limit.bytes} bytes came")
        _patiently(connection.send, _COUNT.pack(got), until=until, check=check)
    return Stream(got, max(ended - began, 1e-9))


def send(
    address: tuple[str, int],
    token: bytes,
    limit: Limit,
    check: Check = go_on,
    for_s: float = math.inf,
    source: str = "",
) -> Stream:
    """Connect, and send all bytes of the limit, or what can be sent in a time.

    Args:
        address: Of the receiver, an IP address and a port; names are not looked up.
        token: Its token.
        limit: What to send, and by when it must have arrived.
        check: Called at least every tenth of a second; what it raises ends the stream.
        for_s: No more is sent after this, but the first bytes; what was sent by then counts.
        source: Address of this host to send from; empty = as the routes say.

    Raises:
        Refused: It did not arrive in time, or not all of it.
        OSError: The network.
    """
    _must_be_token(token)
    until = time.monotonic() + limit.seconds
    block = memoryview(bytes(range(256)) * (BLOCK_BYTES // 256))
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        if source:
            connection.bind((source, 0))
        _connect(connection, address, min(until, time.monotonic() + _CONNECT_S), check)
        connection.settimeout(_LOOK_S)
        connection.sendall(token)  # into the empty buffer of a new connection
        began = time.perf_counter()
        left = limit.bytes
        while left and (left == limit.bytes or time.perf_counter() - began < for_s):
            left -= _patiently(connection.send, block[: min(left, BLOCK_BYTES)], until=until, check=check)
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while len(said) < _COUNT.size:
            data = _patiently(connection.recv, _COUNT.size - len(said), until=until, check=check)
            if not data:
                raise Refused("the receiver ended without a word")
            said += data
        seconds = time.perf_counter() - began
    sent, got = limit.bytes - left, _COUNT.unpack(said)[0]
    if got != sent:
        raise Refused(f"{got} of {sent} bytes arrived")
    return Stream(got, max(seconds, 1e-9))


def _connect(connection: socket.socket, address: tuple[str, int], until: float, check: Check) -> None:
    connection.setblocking(False)
    code = connection.connect_ex(address)
    while code == errno.EINPROGRESS:
        check()
        if time.monotonic() > until:
            code = errno.ETIMEDOUT
        elif select.select((), (connection,), (), _LOOK_S)[1]:
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _patiently(
    call: Callable[..., _T],
    *given: object,
    until: float,
    check: Check,
    late: str = "it was not done by its deadline",
) -> _T:
    """What a call on a socket gives, tried until a time."""
    while True:
        check()
        if time.monotonic() > until:
            raise Refused(late)
        try:
            return call(*given)
        except TimeoutError:
            continue


def _must_be_token(token: bytes) -> None:
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes: it has {TOKEN_BYTES}")
