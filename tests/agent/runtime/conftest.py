import contextlib
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent.benches import BENCHES

_CODE = {pb.TYPE_F64: "d", pb.TYPE_I64: "q", pb.TYPE_U64: "Q", pb.TYPE_BOOL: "?", pb.TYPE_STRING: "I"}

Row = dict[str, object]


def rows_of(body: pb.Body, probe: str) -> list[Row]:
    """What a collector would read of one probe; `ts_us` beside the columns, None = NULL."""
    found: list[Row] = []
    for rows in (rows for rows in body.rows if rows.probe == probe):
        table: list[Row] = [{"ts_us": ts} for ts in struct.unpack(f"<{rows.count}q", rows.ts_us)]
        for column in rows.columns:
            cells = struct.unpack(f"<{rows.count}{_CODE[column.type]}", column.values)
            for at, cell in enumerate(cells):
                valid = not column.validity or column.validity[at // 8] >> (at % 8) & 1
                text = column.type == pb.TYPE_STRING
                table[at][column.name] = (column.dictionary[cell] if text else cell) if valid else None
        found += table
    return found


@dataclass
class Spooled:
    """What lies in a spool file, read while the agent may still write it."""

    path: Path

    def bodies(self) -> list[pb.Body]:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
                found = db.execute("select body from batch order by number").fetchall()
        except sqlite3.OperationalError:  # the agent is just making it
            return []
        return [pb.Body.FromString(body) for (body,) in found]

    def events(self, kind: str = "") -> list[pb.Event]:
        return [event for body in self.bodies() for event in body.events if kind in ("", event.kind)]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events()]

    def rows(self, probe: str) -> list[Row]:
        return [row for body in self.bodies() for row in rows_of(body, probe)]

    def meta(self, key: str, value: str) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.execute("insert or replace into meta values (?, ?)", (key, value))
            db.commit()


@dataclass
class Systemd:
    """The other end of sd_notify."""

    path: Path
    heard: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)

    def listen(self) -> list[tuple[float, str]]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard.append((time.monotonic(), self._socket.recv(4096).decode()))
        return self.heard

    def count(self, text: str) -> int:
        return sum(text in line for _, line in self.listen())

    def close(self) -> None:
        self._socket.close()


@dataclass
class Running:
    """A real `fleet-agent run`."""

    process: subprocess.Popen[bytes]
    started: float
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self) -> psutil.Process:
        """Its one child, waited for: a sampler that just ended is started again in a moment."""
        found: list[psutil.Process] = []

        def one() -> bool:
            found[:] = self.children()
            return len(found) == 1

        wait_for(one)
        return found[0]

    def end(self, timeout_s: float = 90.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def errors(self) -> str:
        return self.log.read_text()


def wait_for(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Until it holds; a time limit against hanging, not a measurement."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@dataclass
class Kit:
    """What the tests of this folder share; they cannot import each other."""

    tmp: Path
    running: list[Running] = field(default_factory=list)
    systemds: list[Systemd] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.tmp / "state"

    @property
    def spool(self) -> Spooled:
        return Spooled(self.state / "spool.db")

    def scenario(self, faults: str = "", gpus: int = 8) -> Path:
        path = self.tmp / "scenario.toml"
        path.write_text(f'[fleet]\nnodes = "gpu-a01"\ngpus = {gpus}\nmodel = "H100"\n{faults}')
        return path

    def hang(
        self, gpu: int = 5, at: float = 0.0, until: float | None = None, call: str = "temperature"
    ) -> str:
        end = "" if until is None else f"until = {until}\n"
        return (
            f'[[fault]]\nnode = "gpu-a01"\ngpu = {gpu}\nkind = "driver_hang"\nat = {at}\n{end}'
            f'params = {{ call = "{call}" }}\n'
        )

    def config(
        self, top: str = "", tables: str = "", faults: str | None = "", gpus: int = 8, every_s: float = 0.5
    ) -> Path:
        """An agent.toml with short intervals; simulated cards unless `faults` is None."""
        simulated = ""
        if faults is not None:
            top += '\ndriver = "simulated"\n'
            simulated = f'[simulated]\nscenario = "{self.scenario(faults, gpus)}"\nnode = "gpu-a01"\n'
        benches = "".join(f"[benches.{name}]\nenabled = false\n" for name in BENCHES)
        path = self.tmp / "agent.toml"
        path.write_text(
            f'state_dir = "{self.state}"\nruntime_dir = "{self.tmp / "run"}"\n'
            f'collector = "127.0.0.1:1"\n{top}\n{simulated}'
            f"[push]\nseal_s = 0.2\n{benches}"
            f"[probes.gpu]\nevery_s = {every_s}\n[probes.host]\nevery_s = {every_s}\n"
            f"[probes.pci]\nevery_s = {2 * every_s}\n" + (tables or self.sampler(faults or ""))
        )
        return path

    def sampler(self, faults: str) -> str:
        """Short deadlines where a hang is scripted; else none that a slow machine could miss."""
        call_s = 0.6 if "driver_hang" in faults else 10.0
        init_s = 0.6 if 'call = "init"' in faults or 'call = "list"' in faults else 10.0
        deadlines = f"deadline_s = {call_s}\ninit_deadline_s = {init_s}\n"
        return f"[sampler]\n{deadlines}retry_s = 1.0\nretry_max_s = 4.0\n"

    def start(self, config: Path, **env: str) -> Running:
        log = self.tmp / f"log-{len(self.running)}"
        began = time.monotonic()
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpufleet_agent.main", "run", "--config", str(config)],
                stderr=errors,
                env={**os.environ, **env},
            )
        self.running.append(Running(process, began, log))
        return self.running[-1]

    def systemd(self) -> Systemd:
        self.systemds.append(Systemd(self.tmp / f"notify-{len(self.systemds)}"))
        return self.systemds[-1]

    wait_for = staticmethod(wait_for)

    def close(self) -> None:
        for one in self.running:
            children = one.children()
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait(90)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        for systemd in self.systemds:
            systemd.close()

    def tracebacks(self) -> list[str]:
        """What no agent may print, whatever its host does: a sampler that ends by itself prints one."""
        return [log for log in (one.errors() for one in self.running) if "Traceback" in log]


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.close()
    assert made.tracebacks() == []
