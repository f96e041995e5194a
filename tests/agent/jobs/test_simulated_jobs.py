"""The jobs of a simulated fleet, and that a change of them is not waited for."""

import os
import threading

import pytest

from gpufleet_agent import pipe
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.guard import GuardedHost, HostSettings
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import job
from gpufleet_agent.sampler import Sampler, Settings
from gpufleet_agent.scenario import Scenario, parse

SCENARIO = """
[fleet]
nodes = 3
gpus = 4
[[load]]
node = "gpu-[001-002]"
until = 100
[[load]]
node = "gpu-003"
gpu = [0, 2]
kind = "inference"
[[load]]
node = "gpu-003"
gpu = [1, 3]
kind = "idle"
[[load]]
node = "gpu-001"
gpu = 3
at = 50
kind = "idle"
"""


@pytest.fixture
def scenario() -> Scenario:
    return parse(SCENARIO.encode())


def rows(scenario: Scenario, node: str, t: float) -> list[dict[str, object]]:
    host = SimulatedHost(scenario, node, 0, lambda: t)
    sweep = run_probe("job", job, GuardedHost(host), pytest.fail)
    assert not sweep.error
    names = [metric.name for metric in job.METRICS]
    return [dict(zip(names, row, strict=True)) for row in sweep.rows]


def test_one_load_is_one_job_over_its_hosts(scenario: Scenario) -> None:
    first, second = rows(scenario, "gpu-001", 10), rows(scenario, "gpu-002", 10)
    assert {(row["job_kind"], row["job_id"], row["user"]) for row in first + second} == {
        ("slurm", first[0]["job_id"], first[0]["user"])
    }
    assert [row["rank"] for row in first + second] == list(range(8))
    assert {row["world"] for row in first} == {8}
    assert {row["gpu_uuid"] for row in first}.isdisjoint({row["gpu_uuid"] for row in second})


def test_what_serves_is_a_pod_of_its_host(scenario: Scenario) -> None:
    found = rows(scenario, "gpu-003", 10)
    assert [row["gpu_index"] for row in found] == [0, 2]
    assert {row["job_kind"] for row in found} == {"kubernetes"}
    assert len({row["job_id"] for row in found}) == 1


def test_cards_without_a_load_work_for_a_job_of_their_host(scenario: Scenario) -> None:
    before, after = (rows(scenario, "gpu-002", t) for t in (10, 200))
    assert {row["job_id"] for row in before}.isdisjoint({row["job_id"] for row in after})
    assert {row["world"] for row in after} == {4}


def test_a_card_that_idles_has_no_process(scenario: Scenario) -> None:
    assert len(rows(scenario, "gpu-001", 60)) == 3


def test_a_change_is_told_at_once(scenario: Scenario) -> None:
    now = [40.0]
    host = GuardedHost(SimulatedHost(scenario, "gpu-001", 0, lambda: now[0]))
    outer, inner = os.pipe()
    heard, commands = os.pipe()
    settings = Settings(host=HostSettings(), probes={"job": 30.0})
    sampler = Sampler(settings, host, None, inner, heard, clock=lambda: now[0])
    counts: list[tuple[float, int]] = []

    def wait(due: float) -> bool:
        now[0] = max(now[0], min(due, now[0] + job.TICK))
        return now[0] < 95

    sampler._wait = wait  # type: ignore[method-assign]

    def send(message: pipe.Message) -> None:
        if isinstance(message, pipe.Inventory):
            return
        assert not isinstance(message, pipe.KernelNews)
        counts.append((now[0], len(message.rows)))  # type: ignore[union-attr]

    sampler._send = send  # type: ignore[method-assign]
    thread = threading.Thread(target=sampler.forever)
    thread.start()
    thread.join(90)
    for end in (outer, inner, heard, commands):
        os.close(end)
    assert counts == [(40.0, 4), (50.0, 3), (80.0, 3)]
