"""What two hosts measure under a collector's lease: bench `tcp`, one TCP stream. GB/s; a byte counts once.

The receiver listens on the address that its site names, for one connection, for at most half a minute; the
sender goes to where the receiver said it listens, from the address that its own site names. Who connects must
have the lease's token. It comes with the collector's directive and reaches the process that measures through
the note in shared memory: never an argument, a log line or a row.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from gpufleet.metric import Cell, Value
from gpufleet_agent import allowance, progress, tcp
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place

NAME = "tcp"

MOST_BYTES = 2 << 30
MOST_S = 5.0
MOST_WAIT_S = 30.0
"""Directives that ask for more are refused."""

_SLACK_S = 10.0
"""For connecting, and for what is on its way when the sender ends."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a stream.

    Attributes:
        peer: The other node's name.
        token: `tcp.TOKEN_BYTES` bytes that both ends know, and nobody else.
        bytes: At most so many.
        seconds: Sent for so long at most.
        own: Address of this host to listen on, or to send from.
        port: To listen on; 0 = the kernel chooses.
        wait_s: Nobody who comes later is let in.
        to: Where to send, IP:PORT; empty = this is the receiver.
    """

    peer: str
    token: bytes
    bytes: int
    seconds: float
    own: str
    port: int = 0
    wait_s: float = MOST_WAIT_S
    to: str = ""

    def __repr__(self) -> str:
        return f"Order({self.peer}, token not shown)"


class Tcp:
    """The bench, at one of its ends.

    Args:
        order: Which, and what.
        listening: Told where the receiver listens.
    """

    EVERY = 3600.0
    VERSION = "1"
    ON: Literal["host", "gpu", "pair"] = "host"
    CONVENTION = "one_stream"
    COST_S = 0.0

    def __init__(self, order: Order, listening: Callable[[str], None] = lambda address: None) -> None:
        self._order = order
        self._listening = listening

    @property
    def PARAMS(self) -> Mapping[str, Value]:
        """As `measure.Bench`."""
        return {"bytes": self._order.bytes, "seconds": self._order.seconds}

    @property
    def pair(self) -> dict[str, Cell]:
        """What makes a row one of this pair, which is a series of its own."""
        return {"peer": self._order.peer, "link": f"{NAME}:{self._order.peer}"}

    def run(self, at: Place, params: Mapping[str, Value], /) -> tuple[BenchResult, str]:
        """Receive or send once."""
        began = time.perf_counter()
        quota = allowance.cpus()
        convention = self.CONVENTION if quota >= 1 else f"{self.CONVENTION}_in_{quota:g}_cpus"
        try:
            value = (self._send(at) if self._order.to else self._receive(at)).gb_per_s
        except tcp.Refused as error:
            return BenchResult("failed", None, "GB/s", str(error)), convention
        except OSError as error:
            return BenchResult("failed", None, "GB/s", error.strerror or type(error).__name__), convention
        seconds = time.perf_counter() - began
        return BenchResult("ok", value, "GB/s", "", (value,), seconds), convention

    def _receive(self, at: Place) -> tcp.Stream:
        order = self._order
        family = socket.AF_INET6 if ":" in order.own else socket.AF_INET
        limit = tcp.Limit(order.bytes, order.seconds + _SLACK_S)
        with socket.create_server((order.own, order.port), family=family, backlog=1) as listener:
            self._listening(written(*listener.getsockname()[:2]))
            return tcp.serve(listener, order.token, limit, at.check, order.wait_s)

    def _send(self, at: Place) -> tcp.Stream:
        order = self._order
        limit = tcp.Limit(order.bytes, order.seconds + _SLACK_S)
        return tcp.send(endpoint(order.to), order.token, limit, at.check, order.seconds, order.own)


def take(descriptor: int) -> Order:
    """The order that was left in the shared memory, which does not keep it.

    Raises:
        OSError: It cannot be read.
        ValueError: There is none.
    """
    note = progress.read_note(descriptor)
    os.ftruncate(descriptor, progress.SIZE)
    return msgspec.json.decode(note, type=Order)


def plain_address(text: str) -> str:
    """How an address is written that one host has; empty = it is none, but a name, a group or a wildcard."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    none = (
        address.is_unspecified or address.is_multicast or address == ipaddress.ip_address("255.255.255.255")
    )
    return "" if none or "%" in text else str(address)


def endpoint(text: str) -> tuple[str, int]:
    """Address and port of IP:PORT or [IP]:PORT.

    Raises:
        ValueError: It is something else.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") == (":" in host) and port.isascii() and port.isdecimal() and len(port) <= 5:
        address = plain_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        if address and 0 < int(port) < 65536:
            return address, int(port)
    raise ValueError("not IP:PORT")


def written(address: str, port: int) -> str:
    """What `endpoint` reads."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_local(address: str) -> bool:
    """Whether an address is this host's for itself: what listens there trusts who can reach it."""
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
