"""The processes of a demo: a collector and a simulated fleet, started and ended by their process ids."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import FrameType

from gpufleet_cli import errors
from gpufleet_cli.client import Client
from gpufleet_cli.errors import FleetError
from gpufleet_cli.settings import Settings

START_S = 30.0
STOP_S = 10.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Also Ctrl-C: a shell that started us in the background had us ignore it."""
_INSTALL = "install gpufleet[all]"


class Stage:
    """A temporary folder, a free port and two child processes. Use as a context manager.

    Attributes:
        folder: Everything is here; removed at the end.
        server: host:port of the collector.
    """

    def __init__(self, scenario: Path, disabled: Sequence[str]) -> None:
        self.scenario = scenario
        self.folder = Path(tempfile.mkdtemp(prefix="gpufleet-demo-"))
        self.server = ""
        self._disabled = disabled
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._before = {number: signal.getsignal(number) for number in _ENDINGS}

    def __enter__(self) -> "Stage":
        for number in self._before:
            signal.signal(number, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        """End the children, the fleet before its collector, and remove the folder."""
        # a second Ctrl-C would leave children behind; they are ended within STOP_S each
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _name, child in reversed(self._children):
                _end(child)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, interrupt)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def start_collector(self, settings: Settings) -> Settings:
        """Start it and wait until it is ready; returns the settings that reach it.

        Raises:
            FleetError: It ended, or is not ready in time.
        """
        self.server = f"127.0.0.1:{_free_port()}"
        config = self.folder / "collector.toml"
        config.write_text(_configuration(self._disabled), encoding="utf-8")
        data = self.folder / "store"
        self._start(
            "collector", "gpufleet_collector.main", "serve", "--config", str(config), "--listen", self.server,
            "--data", str(data),
        )  # fmt: skip
        reached = replace(settings, server=self.server, ca="", cert="", key="", insecure=False)
        self._wait_until_ready(reached)
        return reached

    def _wait_until_ready(self, settings: Settings) -> None:
        from gpufleet.v1 import fleet_pb2

        deadline = time.monotonic() + START_S
        with Client(settings) as client:
            while True:
                self.check_children()
                try:
                    if client.one(client.stub.GetVersion, fleet_pb2.GetVersionRequest()).ready:
                        return
                except FleetError as error:
                    if error.exit_code != errors.UNREACHABLE:
                        raise
                if time.monotonic() > deadline:
                    raise self._broken("collector", f"is not ready after {START_S:g} s")
                time.sleep(0.1)

    def delivery_list(self) -> tuple[bytes, bytes]:
        """The fleet's inventory and baselines as CSV, as the agent's package writes them.

        Raises:
            FleetError: The scenario cannot be read.
        """
        inventory, baselines = self.folder / "inventory.csv", self.folder / "baselines.csv"
        done = subprocess.run(
            [
                sys.executable, "-m", "gpufleet_agent.main", "simulate", str(self.scenario),
                "--inventory-csv", str(inventory), "--baseline-csv", str(baselines),
            ],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            last = _last_line(done.stderr, "no message")
            if "No module named" in last:
                raise FleetError("demo", last, _INSTALL, errors.INTERNAL)
            raise FleetError("usage", last, "", errors.USAGE)
        return inventory.read_bytes(), baselines.read_bytes()

    def start_fleet(self) -> None:
        """Start the simulated hosts; the scenario's time begins."""
        self._start(
            "fleet", "gpufleet_agent.main", "simulate", str(self.scenario), "--collector", self.server,
            "--state-dir", str(self.folder / "spools"), "--bench-every", "5",
        )  # fmt: skip

    def check_children(self, wait_s: float = 0.0) -> None:
        """Complain when a child has ended, or does so within `wait_s`.

        Raises:
            FleetError: With the last line it wrote.
        """
        deadline = time.monotonic() + wait_s
        while True:
            for name, child in self._children:
                if child.poll() is not None:
                    raise self._broken(name, f"ended with status {child.returncode}")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _broken(self, name: str, what: str) -> FleetError:
        written = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        last = _last_line(written, "it wrote nothing")
        for rule in self._disabled:
            _, unknown, others = last.partition(f"[rule.{rule}]: no such rule")
            if unknown:
                text = f"--disable-rule: no rule {rule!r}{others}"
                return FleetError("usage", text, "", errors.USAGE)
        hint = _INSTALL if "No module named" in last else ""
        return FleetError("demo", f"the demo's {name} {what}: {last}", hint, errors.INTERNAL)

    def _start(self, name: str, module: str, *words: str) -> None:
        """A child in a session of its own: Ctrl-C reaches this process alone, which then ends it."""
        with (self.folder / f"{name}.log").open("wb") as written:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.DEVNULL, stdout=written, stderr=written, start_new_session=True,
                env={key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"},
            )  # fmt: skip
        self._children.append((name, child))


def _last_line(written: str, otherwise: str) -> str:
    """The last line of a program of ours, without the program's name."""
    line = (written.strip().splitlines() or [otherwise])[-1]
    return re.sub(r"^fleet-(agent|collector): ", "", line)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def shipped(name: str) -> Path:
    """A file of this package as a path."""
    return Path(str(resources.files("gpufleet_cli.demo"))) / name


def _configuration(disabled: Sequence[str]) -> str:
    """The shipped configuration; rules that are left out are disabled in it."""
    text = shipped("collector.toml").read_text(encoding="utf-8")
    for rule in disabled:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", rule):
            raise FleetError("usage", f"--disable-rule: {rule!r} is no rule name", "", errors.USAGE)
        header = f"[rule.{rule}]\n"
        text = (
            text.replace(header, header + "enabled = false\n")
            if header in text
            else text + f"\n{header}enabled = false\n"
        )
    return text
