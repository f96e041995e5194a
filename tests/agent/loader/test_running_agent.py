"""A real `fleet-agent run`: what a training process tells stands in table `loader` of its spool."""

import contextlib
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent.benches import BENCHES

TRAINS = """
import gpufleet_loader, sys, time
for batch in gpufleet_loader.watch([0.01] * 30, name="train"):
    time.sleep(batch)
print("trained", flush=True)
sys.stdin.read()
"""


def spooled(path: Path, probe: str) -> list[dict[str, str]]:
    """Texts of the rows of one probe, read while the agent may still write."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            bodies = [
                pb.Body.FromString(body) for (body,) in db.execute("select body from batch order by number")
            ]
    except sqlite3.OperationalError:
        return []
    found = []
    for rows in (rows for body in bodies for rows in body.rows if rows.probe == probe):
        table: list[dict[str, str]] = [{} for _ in range(rows.count)]
        for column in rows.columns:
            if column.name in ("pid", "fetches_total"):
                for row, value in zip(table, struct.unpack(f"<{rows.count}Q", column.values), strict=True):
                    row[column.name] = str(value)
            elif column.type == pb.TYPE_STRING:
                for row, place in zip(table, struct.unpack(f"<{rows.count}I", column.values), strict=True):
                    row[column.name] = column.dictionary[place] if column.dictionary else ""
        found += table
    return found


def until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_training_beside_an_agent(tmp_path: Path) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    (tmp_path / "agent.toml").write_text(
        f'state_dir = "{state}"\nruntime_dir = "{run}"\ncollector = "127.0.0.1:1"\ndriver = "none"\n'
        "[push]\nseal_s = 0.2\n[probes.loader]\nevery_s = 0.3\n"
        + "".join(f"[benches.{name}]\nenabled = false\n" for name in BENCHES)
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "gpufleet_agent.main", "run", "--config", str(tmp_path / "agent.toml")],
        stderr=subprocess.PIPE,
    )
    trainer = None
    try:
        until((run / "loader.sock").exists)
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINS],
            env={**os.environ, "GPUFLEET_LOADER_SOCK": str(run / "loader.sock")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

        def told(state_: str, fetches: str = "") -> bool:
            return any(
                (row["source"], row["pid"], row["loader"], row["state"])
                == ("hook", str(pid), "train", state_)
                and fetches in ("", row["fetches_total"])
                for row in spooled(state / "spool.db", "loader")
            )

        pid = trainer.pid
        until(lambda: told("live"))
        trainer.communicate()
        until(lambda: told("closed", "29"))
        # the sampler looked for workers
        until(lambda: any(row["probe"] == "loader" for row in spooled(state / "spool.db", "agent")))
        agent.send_signal(signal.SIGTERM)
        _, errors = agent.communicate(timeout=90)
        assert agent.returncode == 0
        assert b"Traceback" not in errors
        assert not (run / "loader.sock").exists()
    finally:
        for one in (agent, trainer):
            if one is not None and one.poll() is None:
                one.kill()
                one.communicate()
