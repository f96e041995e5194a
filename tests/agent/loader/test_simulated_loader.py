"""Simulated training that waits for data: the hook, /proc and the cards say the same."""

from collections.abc import Callable, Mapping

import pytest

from gpufleet.metric import Reason, Row
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import loader
from gpufleet_agent.scenario import Scenario, parse

Share = Callable[[Row], float]


class Clock:
    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fleet(params: str, gpu: str = "3", load: str = "", node: str = "gpu-001") -> Scenario:
    return parse(
        f"[fleet]\nnodes = 3\ngpus = 8\n[[load]]\n{load}\n[[fault]]\nnode = '{node}'\ngpu = {gpu}\n"
        f"kind = 'data_starved'\nat = 60\nuntil = 360\nparams = {{ {params} }}\n".encode()
    )


def rows(host: SimulatedHost, source: str) -> Mapping[int, Row]:
    return {int(str(row["pid"])): row for row in loader.read(host) if row["source"] == source}


def number(row: Row, name: str) -> float:
    return float(str(row[name]))


def share_between(host: SimulatedHost, clock: Clock, start: float, end: float) -> dict[int, float]:
    """Per process, the part of its time that it waited, as a rule computes it from two rows."""
    clock.t = start
    before = rows(host, "hook")
    clock.t = end
    found = {}
    for pid, row in rows(host, "hook").items():
        wait = number(row, "wait_s_total") - number(before[pid], "wait_s_total")
        busy = number(row, "busy_s_total") - number(before[pid], "busy_s_total")
        assert wait + busy == pytest.approx(end - start)
        found[pid - 40_000] = wait / (wait + busy)
    return found


def power(host: SimulatedHost, card: int) -> float:
    return number(host.gpus()[card].read("gpu"), "power_w")


def util(host: SimulatedHost, card: int) -> float:
    return number(host.gpus()[card].read("gpu"), "util_pct")


@pytest.mark.parametrize("wanted", [0.0, 0.05, 0.1, 0.3, 0.5])
def test_the_share_is_recovered_and_taken_from_the_card(clock: Clock, wanted: float) -> None:
    host = fleet(f"share = {wanted}").host("gpu-001", clock, 0)
    found = share_between(host, clock, 100, 160)
    assert abs(found[3] - wanted) < 0.02
    assert util(host, 3) == pytest.approx(95 * (1 - wanted), abs=4)
    assert all(abs(share_between(host, clock, *span)[3]) < 0.02 for span in ((0, 60), (360, 420)))


def test_the_ranks_that_wait_for_a_slow_one_look_busy_and_draw_less(clock: Clock) -> None:
    played = fleet("share = 0.4", load="node = 'gpu-[001-002]'")
    hosts = {name: played.host(name, clock, 0) for name in played.node_names()}
    clock.t = 30
    before = {name: power(host, 0) for name, host in hosts.items()}
    clock.t = 200
    found = share_between(hosts["gpu-001"], clock, 140, 200)
    assert {rank for rank, part in found.items() if part >= 0.1} == {3}, "seven peers are not blamed"
    assert max(share_between(hosts["gpu-002"], clock, 140, 200).values()) < 0.1
    for name in ("gpu-001", "gpu-002"):
        assert util(hosts[name], 0) > 85
        assert power(hosts[name], 0) < 0.85 * before[name]
    assert power(hosts["gpu-003"], 0) > 0.95 * before["gpu-003"], "another job"
    assert power(hosts["gpu-001"], 3) < power(hosts["gpu-001"], 0)


def test_a_job_over_hosts_has_ranks_over_hosts(clock: Clock) -> None:
    played = fleet("share = 0.4", load="node = 'gpu-[001-002]'")
    ranks = {
        name: [
            (row["rank"], row["local_rank"], row["world"])
            for row in rows(played.host(name, clock, 0), "hook").values()
        ]
        for name in played.node_names()
    }
    assert ranks["gpu-001"] == [(slot, slot, 16) for slot in range(8)]
    assert ranks["gpu-002"] == [(8 + slot, slot, 16) for slot in range(8)]
    assert {world for _, _, world in ranks["gpu-003"]} == {8}


@pytest.mark.parametrize(
    ("cause", "running", "disk", "sleeping", "cpu"),
    [
        ("storage", 1, 5, 2, (0.05, 0.3)),
        ("nfs_hung", 0, 8, 0, (0.0, 0.01)),
        ("cpu", 8, 0, 0, (0.8, 1.0)),
        ("remote", 0, 0, 8, (0.0, 0.1)),
    ],
)
def test_each_cause_shows_in_the_workers(
    clock: Clock, cause: str, running: int, disk: int, sleeping: int, cpu: tuple[float, float]
) -> None:
    host = fleet(f"cause = '{cause}'").host("gpu-001", clock, 0)
    clock.t = 100
    before = rows(host, "proc")[40_003]
    clock.t = 200
    row = rows(host, "proc")[40_003]
    assert (row["workers"], row["workers_running"], row["workers_disk"], row["workers_sleeping"]) == (
        8, running, disk, sleeping,
    )  # fmt: skip
    used = (number(row, "worker_cpu_s_total") - number(before, "worker_cpu_s_total")) / 100 / 8
    assert cpu[0] <= used <= cpu[1]
    other = rows(host, "proc")[40_004]
    assert (other["workers_running"], other["workers_disk"]) == (1, 0)


def test_without_workers_and_without_the_hook(clock: Clock) -> None:
    clock.t = 100
    alone = fleet("cause = 'no_workers'").host("gpu-001", clock, 0)
    assert rows(alone, "hook")[40_003]["workers"] == 0
    assert 40_003 not in rows(alone, "proc")
    silent = fleet("hook = 'no'", gpu="'*'").host("gpu-001", clock, 0)
    assert rows(silent, "hook") == {}
    assert len(rows(silent, "proc")) == 8


def test_idle_cards_and_lost_ones_load_nothing(clock: Clock) -> None:
    idle = parse(b"[fleet]\nnodes = 1\ngpus = 8\n[[load]]\nkind = 'idle'\n").host("gpu-001", clock, 0)
    assert list(loader.read(idle)) == []
    served = parse(b"[fleet]\nnodes = 1\ngpus = 8\n[[load]]\nkind = 'inference'\n").host("gpu-001", clock, 0)
    assert list(loader.read(served)) == []
    lost = parse(
        b"[fleet]\nnodes = 1\ngpus = 2\n[[load]]\n"
        b"[[fault]]\nat = 5\nnode = '*'\ngpu = 0\nkind = 'card_lost'\n"
    ).host("gpu-001", clock, 0)
    clock.t = 6
    assert set(rows(lost, "hook")) == {40_001}


def test_a_new_run_is_another_process_whose_counters_begin_anew(clock: Clock) -> None:
    host = parse(
        b"[fleet]\nnodes = 1\ngpus = 1\n[[load]]\n[[load]]\nat = 100\nuntil = 200\nkind = 'idle'\n"
    ).host("gpu-001", clock, 0)
    clock.t = 90
    first = rows(host, "hook")[40_000]
    clock.t = 150
    assert rows(host, "hook") == {}
    clock.t = 210
    then = rows(host, "hook")[40_000]
    assert first["pid_start"] != then["pid_start"]
    assert number(then, "fetches_total") < number(first, "fetches_total")


def test_counters_never_fall_and_every_cell_is_plausible(clock: Clock) -> None:
    host = fleet("share = 0.3", gpu="'*'").host("gpu-001", clock, 0)
    totals = [metric.name for metric in loader.METRICS if metric.name.endswith("_total")]
    before: dict[tuple[object, ...], list[float | None]] = {}
    for clock.t in (0.0, 30.0, 59.9, 60.0, 61.0, 359.9, 360.0, 900.0):
        sweep = run_probe("loader", loader, host, pytest.fail)
        assert {reason for reasons in sweep.reasons for reason in reasons} == {Reason.NOT_SUPPORTED}
        names = [metric.name for metric in loader.METRICS]
        for cells in sweep.rows:
            row = dict(zip(names, cells, strict=True))
            key = (row["source"], row["pid"])
            now = [None if row[name] is None else float(str(row[name])) for name in totals]
            for one, other in zip(before.get(key, now), now, strict=True):
                assert one is None or (other is not None and one <= other)
            before[key] = now
