from collections.abc import Callable

import pytest

from gpufleet.metric import Row
from gpufleet_agent.drivers import Host
from gpufleet_agent.probe import Sweep, run_probe
from gpufleet_agent.probes import gpu


@pytest.fixture
def sweep() -> Callable[[Host], Sweep]:
    """A sweep of probe `gpu`, checked as the agent checks it, after `ticks` 1 Hz values."""

    def run(host: Host, ticks: int = 1) -> Sweep:
        said: list[str] = []
        for _ in range(ticks):
            gpu.tick(host)
        found = run_probe("gpu", gpu, host, said.append)
        assert said == []
        return found

    return run


@pytest.fixture
def rows(sweep: Callable[[Host], Sweep]) -> Callable[[Host], list[Row]]:
    """Its rows, without what is NULL."""

    def run(host: Host) -> list[Row]:
        found = sweep(host)
        assert found.error == ""
        names = [metric.name for metric in gpu.METRICS]
        return [
            {name: cell for name, cell in zip(names, row, strict=True) if cell is not None}
            for row in found.rows
        ]

    return run
