"""`fleet job`, and the jobs that incidents, nodes and cards name."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"


class Seed(Protocol):
    def node(self, name: str, **more: object) -> None: ...

    def finding(self, *words: str, age: float = ..., incident: str = ...) -> int: ...

    def entity(self, node: str, index: int) -> str: ...

    def rule(self, name: str, title: str) -> None: ...

    def looks(self, node: str, rows: int, seen_s: float = ...) -> None: ...

    def job(self, node: str, job_id: str | None, cards: Iterable[int], **more: object) -> None: ...


POD = "3f1d2c4b-0a9e-4f7c-8b21-5d6e7f809a1b"


@pytest.fixture
def busy(seed: Seed) -> Seed:
    """A job over two nodes that waits for data, a pod, and a process that cannot be seen."""
    for name in ("gpu-001", "gpu-002", "gpu-003"):
        seed.node(name)
    seed.job("gpu-001", "41778", range(8))
    seed.job("gpu-002", "41778", range(8), first_rank=8)
    seed.job("gpu-003", POD, [0, 1], kind="kubernetes")
    seed.job("gpu-003", None, [5], kind=None)
    seed.rule("data_starved", "Training waits for data")
    seed.finding(
        "data_starved", "", "job:41778", "crit", "storage",
        "train waits for data 27 % of the time on 16 of 16 ranks, 2 of 2 nodes: storage is slow (NFS answers "
        "in 41 ms); the job or its storage, not the nodes",
        age=300, incident="Training waits for data: storage",
    )  # fmt: skip
    seed.finding("gpu_missing", "gpu-001", seed.entity("gpu-001", 3), "crit", "lost_at_run_time",
                 "no longer answers", age=60, incident="GPU missing")  # fmt: skip
    return seed


SCREENS = {
    "job": ("job",),
    "job_one": ("job", "41778"),
    "job_status": ("status",),
    "job_incident": ("incidents", "show", "1"),
    "job_missing": ("incidents", "show", "2"),
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(busy: Seed, run: Run, name: str) -> None:
    output = run(*SCREENS[name]).output
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(output, encoding="utf-8")
    assert output == path.read_text(encoding="utf-8")
    assert all(len(line) <= 80 for line in output.splitlines())


def items(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["items"]
    assert isinstance(found, list)
    return found


def test_a_card_names_who_works_on_it_now_and_who_did_when_it_failed(busy: Seed, run: Run) -> None:
    whole = {"job_id": "41778", "kind": "slurm", "user": "ana"}
    assert items(run("gpu", "gpu-001/3", "-o", "json"))[0]["jobs"] == [
        {**whole, "nodes": ["gpu-001"], "cards": 1}
    ]
    assert items(run("incidents", "show", "2", "-o", "json"))[0]["jobs"] == [
        {**whole, "nodes": ["gpu-001"], "cards": 1}
    ]
    assert items(run("incidents", "show", "1", "-o", "json"))[0]["jobs"] == [
        {**whole, "nodes": ["gpu-001", "gpu-002"], "cards": 16}
    ]


def test_a_node_shows_its_jobs_and_what_they_suffer(busy: Seed, run: Run) -> None:
    first = items(run("node", "gpu-002", "-o", "json"))[0]
    assert [finding["rule"] for finding in first["findings"]] == ["data_starved"]  # type: ignore[attr-defined]
    assert first["state"] == "ok"
    third = items(run("node", "gpu-003", "-o", "json"))[0]
    assert [(job["job_id"], job["cards"]) for job in third["jobs"]] == [(POD, 2), (None, 1)]  # type: ignore[attr-defined]
    assert "jobs: 41778 (slurm, ana, 8 cards)" in run("node", "gpu-002").output


def test_where_no_agent_tells_nothing_is_made_up(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", lost=[3])
    seed.finding("gpu_missing", "gpu-001", seed.entity("gpu-001", 3), "crit", "lost", "gone", incident="Gone")
    assert items(run("incidents", "-o", "json"))[0]["jobs"] is None
    assert items(run("node", "gpu-001", "-o", "json"))[0]["jobs"] is None
    assert "jobs" not in run("incidents", "show", "1").output
    assert "jobs" not in run("gpu", "gpu-001/3").output
    assert run("job").output == "no job holds a card\n"


def test_who_looked_and_found_nobody_says_so(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", lost=[3])
    seed.job("gpu-001", "41778", [3], seen_s=65)
    seed.looks("gpu-001", 0, seen_s=5)
    seed.finding(
        "gpu_missing", "gpu-001", seed.entity("gpu-001", 3), "crit", "lost", "gone", age=40, incident="Gone"
    )
    assert items(run("job", "-o", "json")) == []
    assert "jobs: none" in run("node", "gpu-001").output
    hurt = items(run("incidents", "-o", "json"))[0]["jobs"]
    assert [job["job_id"] for job in hurt] == ["41778"]  # type: ignore[attr-defined]


def test_a_trouble_of_days_names_the_jobs_of_its_beginning_and_of_now(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", lost=[3])
    day = 86400.0
    for job_id, seen_s in (("1", 3 * day + 600), ("2", 3 * day - 60), ("3", day), ("4", 65), ("5", 5)):
        seed.job("gpu-001", job_id, [3], seen_s=seen_s)
    seed.finding(
        "gpu_missing", "gpu-001", seed.entity("gpu-001", 3), "crit", "lost", "gone", age=3 * day, incident="G"
    )
    hurt = items(run("incidents", "-o", "json"))[0]["jobs"]
    assert [job["job_id"] for job in hurt] == ["2", "4", "5"]  # type: ignore[attr-defined]


def test_jobs_of_a_silent_node_are_not_known_to_run(seed: Seed, run: Run) -> None:
    seed.node("gpu-001", seen_s=500.0)
    seed.job("gpu-001", "41778", [3], seen_s=500)
    assert items(run("job", "-o", "json")) == []


def test_a_job_is_as_well_as_what_it_runs_on(seed: Seed, run: Run) -> None:
    for name in ("gpu-001", "gpu-002"):
        seed.node(name)
    seed.job("gpu-001", "1", [0, 1])
    seed.job("gpu-001", "2", [2, 3])
    seed.job("gpu-002", "3", [0])
    seed.finding(
        "gpu_downclocked", "gpu-001", seed.entity("gpu-001", 2), "crit", "slow", "slow", incident="S"
    )
    seed.finding("disk_full", "gpu-001", "mount:/scratch", "warn", "full", "full", incident="Full")
    seed.finding("gpu_missing", "gpu-002", seed.entity("gpu-002", 7), "crit", "lost", "gone", incident="Gone")
    seed.finding("data_starved", "gpu-001", "job:9", "crit", "storage", "of a job that is over", incident="D")
    found = {item["job_id"]: item for item in items(run("job", "-o", "json"))}
    assert {name: (item["state"], item["trouble_in"]) for name, item in found.items()} == {
        "1": ("degraded", ["node"]),
        "2": ("critical", ["node", "card"]),
        "3": ("ok", []),
    }
    (job,) = items(run("job", "2", "-o", "json"))
    assert job["reason"] == "slow"
    assert [one["rule"] for one in job["findings"]] == ["gpu_downclocked", "disk_full"]  # type: ignore[attr-defined]
    screen = run("job", "2").output
    assert "on the cards and nodes that it holds:" in screen
    assert "no open findings" not in screen
    assert "no open findings" in run("job", "3").output
    assert run("job", "2", "--exit-code").exit_code == 11


def test_exit_codes(busy: Seed, run: Run) -> None:
    assert run("job", "41778", "--exit-code").exit_code == 11
    assert run("job", POD, "--exit-code").exit_code == 0
    missing = run("job", "4711")
    assert (missing.exit_code, "no job '4711' holds a card now" in missing.output) == (5, True)
