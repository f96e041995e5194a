"""What one run of each probe takes: eight simulated cards, the bus and the host of this machine."""

import statistics
import time
from pathlib import Path

from gpufleet_agent.drivers import Host
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES
from gpufleet_agent.sampler import CARD_PROBES
from gpufleet_agent.scenario import parse

SCENARIO = b'[fleet]\nnodes = 1\ngpus = 8\nmodel = "H100"\nseed = 1\n'


def measure(repeats: int = 200) -> dict[str, float]:
    """Median milliseconds of a run, by probe."""
    began = time.monotonic()
    played = parse(SCENARIO, "bench")
    cards: Host = played.host(
        played.node_names()[0], clock=lambda: time.monotonic() - began, started_us=time.time_ns() // 1000
    )
    machine: Host = SysfsHost(Path("/"))
    found: dict[str, float] = {}
    for name, probe in PROBES.items():
        host = cards if name in CARD_PROBES else machine
        times = []
        for _ in range(repeats):
            sweep = run_probe(name, probe, host, print)
            times.append(sweep.seconds * 1e3)
        found[f"{name}_ms"] = statistics.median(times)
    return found


if __name__ == "__main__":
    print(measure())
