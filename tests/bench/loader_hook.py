"""What the data-loader hook costs a training process, and what its messages cost the agent.

Per batch: a loop over a watched loader against the same loop bare, rounds, medians. Per second: ten batches
and a second's share of the message that is sent every few. Both are the thread's own CPU time, for what
others run on the same cores is not the hook's. Sending to an agent that is stopped, whose queue is full: by
the clock, p99. Cold: a message every 20 ms. The agent: a message from the kernel to its place.
"""

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gpufleet_loader
from gpufleet_agent.loader import Loaders

ROUNDS, BATCHES = 30, 20_000

READER = """
import socket, sys
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
one.bind(sys.argv[1])
print("ready", flush=True)
while True:
    one.recv(2048)
"""


def measure() -> dict[str, float]:
    """Microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loader.sock"
        os.environ["GPUFLEET_LOADER_SOCK"] = str(path)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            batch_us = _batch_us()
            warm = statistics.median(_send_us(2000, time.thread_time_ns))
            cold = statistics.median(_send_us(100, time.thread_time_ns, apart_s=0.02))
            os.kill(reader.pid, signal.SIGSTOP)
            stopped = _send_us(4000, time.perf_counter_ns)
        finally:
            reader.kill()
            reader.communicate()
        return {
            "batch_us": batch_us,
            "second_us": 10 * batch_us + warm * 1e9 / gpufleet_loader.EVERY_NS,
            "send_us": warm,
            "send_cold_us": cold,
            "stopped_p99_us": statistics.quantiles(stopped, n=100)[98],
            "take_us": _take_us(Path(folder)),
        }


def _batch_us() -> float:
    """The watched loop less the bare one, per batch."""
    batches = [0] * BATCHES

    def seconds(loader: object) -> float:
        assert hasattr(loader, "__iter__")
        began = time.thread_time()
        for _ in loader:
            pass
        return time.thread_time() - began

    bare, watched = [], []
    for _ in range(ROUNDS):
        bare.append(seconds(iter(batches)))
        watched.append(seconds(gpufleet_loader.watch(batches, name="bench")))
    return (statistics.median(watched) - statistics.median(bare)) / BATCHES * 1e6


def _send_us(times: int, clock: Callable[[], int], apart_s: float = 0.0) -> list[float]:
    """What a message takes on the fetch path."""
    counts = gpufleet_loader._counts("bench", None)
    found = []
    for _ in range(times):
        time.sleep(apart_s)
        began = clock()
        counts.send(0)
        found.append((clock() - began) / 1e3)
    return found


def _take_us(folder: Path) -> float:
    """From recvmsg to the row's place, without the kernel's wake-up."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    now = [0.0]
    loaders = Loaders(folder / "none.sock", clock=lambda: now[0])
    counts = gpufleet_loader._counts("bench", None)
    found = []
    for _ in range(2000):
        now[0] += 1.0
        counts.seq += 1
        ends[0].send(counts.message())
        began = time.perf_counter_ns()
        data, ancillary, flags, _ = ends[1].recvmsg(1025, socket.CMSG_SPACE(12))
        loaders._take(data, ancillary, flags)
        found.append((time.perf_counter_ns() - began) / 1e3)
    for end in ends:
        end.close()
    return statistics.median(found)


if __name__ == "__main__":
    sys.stdout.write(f"{measure()}\n")
