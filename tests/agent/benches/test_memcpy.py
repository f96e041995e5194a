"""Memory bandwidth of NUMA nodes: which processors and how much memory it takes, on made machines."""

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpufleet.metric import Value
from gpufleet_agent import allowance
from gpufleet_agent.benches import memcpy
from gpufleet_agent.gate import Preempted
from gpufleet_agent.measure import Part, Place

SMALL: Mapping[str, Value] = {"bytes": 4 << 20, "caches": 0, "repeats": 3, "best_of": 2}


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def machine(root: Path, nodes: Mapping[int, str], caches: Mapping[int, tuple[str, str]]) -> Path:
    """Two threads per core, neighbours: cpu 0 and 1 are one."""
    files = {f"node/node{node}/cpulist": cpus for node, cpus in nodes.items()}
    for cpu, (size, shared) in caches.items():
        base = f"cpu/cpu{cpu}"
        files |= {
            f"{base}/topology/thread_siblings_list": f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}",
            f"{base}/cache/index0/level": "1", f"{base}/cache/index0/size": "48K",
            f"{base}/cache/index0/shared_cpu_list": str(cpu),
            f"{base}/cache/index3/level": "3", f"{base}/cache/index3/size": size,
            f"{base}/cache/index3/shared_cpu_list": shared,
        }  # fmt: skip
    return plant(root, files)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Node 0: cpus 0-3 with two caches, node 1: cpus 4-7 with one; node 2 is memory alone."""
    caches = {cpu: ("32M", "0-1" if cpu < 2 else "2-3") if cpu < 4 else ("96M", "4-7") for cpu in range(8)}
    root = machine(tmp_path, {0: "0-3", 1: "4-7", 2: ""}, caches)
    monkeypatch.setattr(memcpy, "SYSTEM", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None)
    return root


def free_of_limits(monkeypatch: pytest.MonkeyPatch, cpus: float = math.inf, memory: float = 1e12) -> None:
    monkeypatch.setattr(allowance, "cpus", lambda: cpus)
    monkeypatch.setattr(allowance, "memory_bytes", lambda: memory)


def run(params: Mapping[str, Value] = SMALL, check: Any = lambda: None) -> list[Part]:
    return memcpy.run(Place(None, None, "", check), params)


def test_one_thread_per_core_of_each_node_that_has_processors(two_nodes: Path) -> None:
    assert memcpy._nodes() == {0: [0, 2], 1: [4, 6]}
    assert [memcpy._cache_bytes(cpus) >> 20 for cpus in memcpy._nodes().values()] == [64, 96]


def test_a_result_per_node_says_where_it_could_not_be_placed(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_of_limits(monkeypatch)
    monkeypatch.setattr(memcpy._Team, "share", lambda team, node: 1.0 if node == 0 else 0.5)
    parts = run()
    assert [(part.entity, part.result.status, part.convention) for part in parts] == [
        ("numa:0", "ok", "read_plus_write_2_threads"),
        ("numa:1", "ok", "read_plus_write_2_threads_anywhere"),
    ]
    assert all(part.result.value and len(part.result.samples) == 3 for part in parts)


def test_where_processors_cannot_be_chosen_the_host_is_measured_as_one(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_of_limits(monkeypatch)

    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    (part,) = run()
    assert (part.entity, part.result.status) == ("node:", "ok")
    assert part.convention == "read_plus_write_4_threads_anywhere"


@pytest.mark.parametrize(
    ("cpus", "convention"),
    [(0.5, "1_threads_in_0.5_cpus"), (1.5, "1_threads"), (2.0, "2_threads"), (64.0, "2_threads")],
)
def test_a_limit_on_processors_is_another_series(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch, cpus: float, convention: str
) -> None:
    free_of_limits(monkeypatch, cpus=cpus)
    monkeypatch.setattr(memcpy._Team, "share", lambda team, node: 1.0)
    assert {part.convention for part in run()} == {f"read_plus_write_{convention}"}


def test_it_takes_the_memory_that_it_may_or_none(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_of_limits(monkeypatch, memory=(4 * 64 << 20) - 1)
    for part in run({**SMALL, "caches": 4}):
        assert (part.result.status, part.result.value) == ("skipped", None)
    assert "it takes 256 MiB, and may have 256" in run({**SMALL, "caches": 4})[0].result.reason


def test_a_machine_without_topology_is_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy, "SYSTEM", tmp_path)
    assert list(memcpy._nodes()) == [0]
    assert memcpy._cache_bytes(memcpy._nodes()[0]) == 0
    for text in ("", "x", "0-", "3-x", "-1", "0-99999999999x"):
        plant(tmp_path, {"node/node0/cpulist": text})
        assert list(memcpy._nodes()) == [0]


def test_a_run_that_must_make_way_ends_and_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free_of_limits(monkeypatch)
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise Preempted("a job came")

    with pytest.raises(Preempted):
        run({**SMALL, "bytes": 64 << 20, "repeats": 1000}, check)
    assert not [thread for thread in threading.enumerate() if thread.name == "memcpy"]


def test_no_thread_to_be_had_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    free_of_limits(monkeypatch)

    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert {(part.result.status, part.result.reason) for part in run()} == {
        ("failed", "can't start new thread")
    }


CGROUPS = {
    "proc/self/cgroup": "0::/system.slice/gpufleet-agent.service",
    "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 800000 kB",
    "sys/fs/cgroup/system.slice/gpufleet-agent.service/cpu.max": "50000 100000",
    "sys/fs/cgroup/system.slice/gpufleet-agent.service/memory.max": str(640 << 20),
    "sys/fs/cgroup/system.slice/gpufleet-agent.service/memory.high": str(512 << 20),
    "sys/fs/cgroup/system.slice/gpufleet-agent.service/memory.current": str(100 << 20),
    "sys/fs/cgroup/system.slice/cpu.max": "max 100000",
    "sys/fs/cgroup/system.slice/memory.max": "max",
}


def test_the_allowance_is_the_least_of_all_groups(tmp_path: Path) -> None:
    assert (allowance.cpus(tmp_path), allowance.memory_bytes(tmp_path)) == (math.inf, math.inf)
    plant(tmp_path, CGROUPS)
    assert allowance.cpus(tmp_path) == 0.5
    assert allowance.memory_bytes(tmp_path) == 0.25 * 800000 * 1024
    plant(tmp_path, {"proc/meminfo": "MemAvailable: 8000000 kB"})
    assert allowance.memory_bytes(tmp_path) == 0.75 * (412 << 20)
    plant(
        tmp_path,
        {"sys/fs/cgroup/system.slice/cpu.max": "20000 100000", "proc/meminfo": "MemAvailable: 1000 kB"},
    )
    assert (allowance.cpus(tmp_path), allowance.memory_bytes(tmp_path)) == (0.2, 256000)
    for name in CGROUPS:
        plant(tmp_path, {name: "nonsense \0 9"})
        assert allowance.cpus(tmp_path) > 0
        assert allowance.memory_bytes(tmp_path) >= 0
