"""`fleet incidents`: many nodes as one line, and the whole story of one."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpufleet_collector.store import Store

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"


def rack(seed: Any, size: int = 40) -> None:
    """Rack r12 has fallen silent after its driver was changed; INC-2 was merged into INC-1."""
    store: Store = seed.store
    names = [f"gpu-{number:03}" for number in range(1, size + 1)]
    for name in names:
        seed.node(name, gpus=0, seen_s=210)
    for name in names:
        title = "Agent silent: nothing received for 210 s" if name in names[:2] else ""
        words = ("agent_silent", name, "node:", "crit", "silent", "nothing received for 210 s")
        seed.finding(*words, age=120, incident=title)
    with store.transaction() as write:
        write.execute(
            "UPDATE live.incident SET node = '', entity = 'domain:rack=r12', "
            f"title = 'rack r12: {size} of {size} nodes: Agent silent' WHERE number = 1"
        )
        write.execute(
            "UPDATE live.incident SET state = 'resolved', resolved_at = opened_at + INTERVAL 5 SECOND, "
            "cause = 'merged into INC-1' WHERE number = 2"
        )
        write.execute("UPDATE live.finding SET incident = 1")
        write.execute("DELETE FROM live.incident_log")
        write.execute(
            "INSERT INTO live.incident_log SELECT 1, (SELECT opened_at FROM live.incident WHERE number = 1) "
            "+ to_microseconds(id), 'finding_fired', id, 'Agent silent: ' || reason FROM live.finding"
        )
        write.execute(
            "INSERT INTO live.incident_log SELECT 1, opened_at + INTERVAL 1 MILLISECOND, 'grouped', NULL, "
            "title FROM live.incident WHERE number = 1"
        )
        write.execute(
            "UPDATE live.inventory SET valid_to = ? WHERE entity = 'node:'", [seed_time(seed, 3000)]
        )
        write.execute(
            "INSERT INTO live.inventory (node, entity, kind, attributes, valid_from) SELECT node, 'node:', "
            """'node', '{"driver": "580.95", "kernel": "6.8.0"}', ? FROM live.node""",
            [seed_time(seed, 3000)],
        )


def seed_time(seed: Any, seconds: float) -> object:
    with seed.store.reader() as read:
        (at,) = read.execute("SELECT max(updated_at) FROM live.incident").fetchone()
    return at - timedelta(seconds=seconds)


SCREENS = {
    "rack_status": ("status",),
    "rack_incidents": ("incidents", "list", "--all"),
    "rack_incident": ("incidents", "show", "1"),
    "rack_merged": ("incidents", "show", "2"),
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(seed: Any, run: Run, name: str) -> None:
    rack(seed)
    output = run(*SCREENS[name]).output
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(output, encoding="utf-8")
    assert output == path.read_text(encoding="utf-8")
    assert all(len(line) <= 80 for line in output.splitlines())


def test_wide_shows_each_finding(seed: Any, run: Run) -> None:
    rack(seed)
    output = run("incidents", "show", "1", "-o", "wide").output
    assert output.count("agent_silent  ") == 40


def test_the_document_names_domain_and_nodes(seed: Any, run: Run) -> None:
    rack(seed, size=6)
    [item] = json.loads(run("incidents", "-o", "json").output)["items"]
    assert item["domain"] == {"kind": "rack", "name": "r12"}
    assert item["hostlist"] == "gpu-[001-006]"
    assert item["merged_into"] is None
    assert json.loads(run("incidents", "show", "2", "-o", "json").output)["items"][0]["merged_into"] == 1
