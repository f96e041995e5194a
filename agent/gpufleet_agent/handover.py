"""Handing a run over to a process of another unit, with other limits: its settings and its descriptors.

systemd listens on a socket and starts the unit once per connection, which is its standard input. On the wire:
the length of the settings, with which the descriptors come; the settings; and back one byte when the run has
come to its end. Whoever closes the connection ends the other side.
"""

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

NAME = "bench.sock"
"""In the runtime directory."""

_LENGTH = struct.Struct("!I")
_MOST = 1 << 20
_PATIENCE_S = 5.0
_FEWEST, _MANY = 2, 3


def connect(path: str) -> socket.socket | None:
    """A connection to the unit; None when there is no such unit."""
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def give(connection: socket.socket, settings: bytes, descriptors: Sequence[int]) -> bool:
    """Hand over and wait for the end; whether the run came to it."""
    with connection:
        try:
            socket.send_fds(connection, [_LENGTH.pack(len(settings))], list(descriptors))
            connection.sendall(settings)
            connection.settimeout(None)
            return connection.recv(1) != b""
        except OSError:
            return False


def take(descriptor: int) -> tuple[socket.socket, bytes, list[int]]:
    """What is handed over on a connection, which is moved to another descriptor.

    Raises:
        ValueError: Something else.
        OSError: It is no connection, or nothing came.
    """
    connection = socket.socket(fileno=os.dup(descriptor))
    passed: list[int] = []
    try:
        connection.settimeout(_PATIENCE_S)
        head, passed, _, _ = socket.recv_fds(connection, _LENGTH.size, _MANY)
        return connection, _settings(connection, head, len(passed)), passed
    except (OSError, ValueError):
        connection.close()
        for one in passed:
            os.close(one)
        raise


def _settings(connection: socket.socket, head: bytes, descriptors: int) -> bytes:
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    if not _FEWEST <= descriptors <= _MANY or not 0 < length <= _MOST:
        raise ValueError("no run was handed over")
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ValueError("a run was handed over in part")
        data += piece
    return data


def done(connection: socket.socket) -> None:
    """Say that the run came to its end."""
    with suppress(OSError):
        connection.sendall(b"\0")
    connection.close()
