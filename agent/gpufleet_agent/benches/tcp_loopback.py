"""One TCP stream from this host to itself over 127.0.0.1. GB/s; a byte counts once.

It shows what the host's processors and kernel can do for a stream, without any network: where a stream between
hosts is slow and this one is not, it is the network. Unsteady on shared machines.
"""

import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from statistics import median
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent import allowance, tcp
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Place

EVERY = 3600.0
VERSION = "1"
ON: Literal["host", "gpu"] = "host"
CONVENTION = "one_stream"
COST_S = 0.0
PARAMS: Mapping[str, Value] = {"bytes": 64 << 20, "repeats": 5}

_SECONDS = 10.0
_BOTH = 2


def run(at: Place, params: Mapping[str, Value]) -> tuple[BenchResult, str]:
    """Send once per repeat; the value is the repeats' median."""
    began = time.perf_counter()
    quota = allowance.cpus()
    convention = CONVENTION if quota >= _BOTH else f"{CONVENTION}_in_{quota:g}_cpus"
    try:
        samples = tuple(_stream(at, int(params["bytes"])) for _ in range(int(params["repeats"])))
    except tcp.Refused as error:
        return BenchResult("failed", None, "GB/s", str(error)), convention
    except OSError as error:
        return BenchResult("failed", None, "GB/s", error.strerror or str(error)), convention
    seconds = time.perf_counter() - began
    return BenchResult("ok", median(samples), "GB/s", "", samples, seconds), convention


def _stream(at: Place, size: int) -> float:
    """GB/s of one stream."""
    token, limit = secrets.token_bytes(tcp.TOKEN_BYTES), tcp.Limit(size, _SECONDS)
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise tcp.Refused("the sender ended")

    def receive() -> None:
        with suppress(tcp.Refused, OSError):  # the sender misses its answer, and says so
            tcp.serve(listener, token, limit, check)

    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        thread = threading.Thread(target=receive, name="receive", daemon=True)
        thread.start()
        try:
            return tcp.send(listener.getsockname()[:2], token, limit, at.check).gb_per_s
        finally:
            ended.set()
            thread.join()
