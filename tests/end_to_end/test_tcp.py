"""A stream between two nodes: a real collector, two real agents that meet on loopback, the CLI."""

import json
from typing import TYPE_CHECKING

import pytest

from gpufleet_agent.benches import BENCHES

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Fleet

MEETING = """
[benches.tcp]
listen = "127.0.0.1"
"""
QUIET = "[gate]\nload = 100.0\n" + "".join(f"[benches.{name}]\nenabled = false\n" for name in BENCHES)


def start(fleet: "Fleet") -> None:
    fleet.start_collector()
    for node in ("gpu-001", "gpu-002"):
        config = fleet.folder / f"{node}.toml"
        config.write_text(config.read_text() + QUIET + MEETING)
        fleet.start_agent(node)
    fleet.wait(
        "both agents are heard",
        lambda: len(fleet.sql("select distinct node from agent")) == 2,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_measure_what_is_between_them(fleet: "Fleet") -> None:
    start(fleet)
    done = fleet.fleet("bench", "run", "gpu-001", "tcp", "--peer", "gpu-002", "-o", "json", check=False)
    assert done.returncode == 12, f"nothing to compare with: {done.stderr}"
    [item] = json.loads(done.stdout)["items"]
    assert (item["node"], item["entity"], item["status"], item["unit"]) == ("gpu-001", "node:", "ok", "GB/s")
    assert item["value"] > 0
    assert done.stderr.splitlines() == [
        "gpu-001: gpu-002: tcp: queued", "gpu-001: gpu-002: tcp: runs",
        "gpu-001: tcp: queued", "gpu-001: tcp: runs",
    ]  # fmt: skip
    [row] = fleet.sql("select node, peer, link, status, lease from bench where bench = 'tcp'")
    lease = str(row.pop("lease"))
    assert row == {"node": "gpu-001", "peer": "gpu-002", "link": "tcp:gpu-002", "status": "ok"}
    assert lease.startswith("run-")
    [asked] = fleet.sql("select target, args::varchar as args from audit where verb = 'bench run'")
    assert asked["target"] == "gpu-001 gpu-002"
    told = json.loads(str(asked["args"]))
    assert (told.keys() <= {"benches", "leases", "claimed"}, told["leases"]) == (True, [lease])
    history = fleet.fleet("bench", "history", "gpu-001", "tcp").stdout
    assert "tcp > gpu-002" in history
    [normal] = fleet.items("bench", "baseline", "accept", "gpu-001", "tcp", "--reason", "new rack")
    assert (str(normal["key"]).rpartition("/")[2], normal["state"]) == ("tcp:gpu-002", "accepted")
    logs = "".join(path.read_text() for path in fleet.folder.glob("*.log"))
    assert "Traceback" not in logs
