"""Real processes over real gRPC: a collector, three agents, the CLI. Every process is ended by its pid."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCENARIO = Path(__file__).parents[1] / "fixtures/scenarios/end-to-end.toml"
NODES = ("gpu-001", "gpu-002", "gpu-003")

COLLECTOR = """
listen = "127.0.0.1:{port}"
data_dir = "{folder}/collector"

[disk]
floor_mib = 16
floor_pct = 0

[judge]
every = "1s"
warm_up = "15s"

[rule.gpu_missing]
every = "1s"
boot_grace = "0s"
clear_after = "2s"

[rule.gpu_downclocked]
every = "1s"
for = "2 of 3"
boot_grace = "0s"

[rule.agent_silent]
every = "1s"
clear_after = "0s"

[limit.gpu_downclocked.window_s]
value = 10
source = "test"

[limit.gpu_downclocked.settle_s]
value = 2
source = "test"

[limit.agent_silent.warn_s]
value = 20
source = "test"
"""

AGENT = """
node = "{node}"
collector = "127.0.0.1:{port}"
driver = "simulated"
state_dir = "{folder}/{node}"
runtime_dir = "{folder}/{node}"

[push]
seal_s = 1.0

[probes.gpu]
every_s = 1.0

[probes.pci]
every_s = 2.0

[simulated]
scenario = "{scenario}"
"""


class Fleet:
    """The processes of one test and how to ask them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        (folder / "collector").mkdir()
        self._write("collector.toml", COLLECTOR.format(port=self.port, folder=folder))
        for node in NODES:
            (folder / node).mkdir()
            text = AGENT.format(node=node, port=self.port, folder=folder, scenario=SCENARIO)
            self._write(f"{node}.toml", text)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=log, cwd=self.folder
        )
        log.close()

    def start_collector(self) -> None:
        self._start("collector", "gpufleet_collector.main", "serve", "--config", "collector.toml")

    def start_agent(self, node: str) -> None:
        self._start(node, "gpufleet_agent.main", "run", "--config", f"{node}.toml")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Send `how` to one process we started and wait for it; its exit code."""
        process = self.running.pop(name)
        process.send_signal(how)
        return process.wait(timeout=90)

    def fleet(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.command("gpufleet_cli.main", *arguments, check=check)

    def command(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, "GPUFLEET_SERVER": f"127.0.0.1:{self.port}"},
            capture_output=True,
            text=True,
            check=check,
            timeout=60,
            cwd=self.folder,
        )

    def document(self, *arguments: str) -> dict[str, object]:
        done = self.fleet("-o", "json", *arguments)
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def items(self, *arguments: str) -> list[dict[str, object]]:
        found = self.document(*arguments)["items"]
        assert isinstance(found, list)
        return found

    def sql(self, query: str) -> list[dict[str, object]]:
        return self.items("sql", query)

    def wait(self, what: str, found: Callable[[], bool], seconds: float = 90) -> None:
        """Until `found()`; a collector that does not answer yet counts as not found."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found():
                    return
            except (subprocess.CalledProcessError, json.JSONDecodeError):
                pass
            time.sleep(0.3)
        logs = {path.name: path.read_text()[-1500:] for path in self.folder.glob("*.log")}
        raise AssertionError(f"not within {seconds} s: {what}\n{json.dumps(logs, indent=1)}")

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(timeout=90)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.stop()
