import asyncio
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from gpufleet.metric import Type
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc as pb_grpc
from gpufleet_collector.config import CollectorConfig, DiskConfig, IngestConfig
from gpufleet_collector.main import Collector
from gpufleet_collector.store import Store

Cell = float | int | bool | str | None

_PACK = {Type.F64: "d", Type.I64: "q", Type.U64: "Q", Type.BOOL: "?"}

NODE_PROBES = (
    pb.Probe(
        name="gpu",
        interval_s=5,
        metrics=[
            pb.Metric(name="gpu_uuid", type=pb.TYPE_STRING, kind=pb.KIND_KEY),
            pb.Metric(name="util_pct", type=pb.TYPE_F64, unit="%", kind=pb.KIND_GAUGE, min=0, max=100),
            pb.Metric(name="mem_used_bytes", type=pb.TYPE_U64, unit="bytes", kind=pb.KIND_GAUGE),
            pb.Metric(name="gpu_index", type=pb.TYPE_I64, kind=pb.KIND_KEY),
            pb.Metric(name="state", type=pb.TYPE_STRING, kind=pb.KIND_STATE),
            pb.Metric(name="present", type=pb.TYPE_BOOL, kind=pb.KIND_STATE),
            pb.Metric(name="energy_j", type=pb.TYPE_F64, kind=pb.KIND_COUNTER),
        ],
    ),
)


def now_us() -> int:
    return time.time_ns() // 1000


def mono_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def column(name: str, kind: Type, cells: Sequence[Cell], reason: int = pb.REASON_NOT_SUPPORTED) -> pb.Column:
    """One packed column; None is NULL."""
    out = pb.Column(name=name, type=pb.Type.ValueType(kind))
    if kind is Type.STRING:
        words = list(dict.fromkeys(cell for cell in cells if isinstance(cell, str)))
        out.dictionary.extend(words)
        places = [words.index(cell) if isinstance(cell, str) else 0 for cell in cells]
        out.values = struct.pack(f"<{len(cells)}I", *places)
    else:
        out.values = struct.pack(
            f"<{len(cells)}{_PACK[kind]}", *[0 if cell is None else cell for cell in cells]
        )
    if any(cell is None for cell in cells):
        bits = bytearray((len(cells) + 7) // 8)
        for row, cell in enumerate(cells):
            if cell is not None:
                bits[row // 8] |= 1 << row % 8
        out.validity = bytes(bits)
        out.reasons = bytes([reason]) * sum(cell is None for cell in cells)
    return out


def rows(probe: str, columns: Sequence[pb.Column], ts: Sequence[int]) -> pb.Rows:
    return pb.Rows(probe=probe, count=len(ts), ts_us=struct.pack(f"<{len(ts)}q", *ts), columns=columns)


def gpu_rows(uuid: str = "GPU-1", count: int = 1, energy: float = 1.0) -> pb.Rows:
    at = now_us()
    return rows(
        "gpu",
        [
            column("gpu_uuid", Type.STRING, [uuid] * count),
            column("util_pct", Type.F64, [50.0] * count),
            column("energy_j", Type.F64, [energy] * count),
        ],
        [at + number for number in range(count)],
    )


def body(*entries: pb.Rows, boot_id: str = "", at_us: int | None = None, **more: object) -> bytes:
    made = pb.Body(
        boot_id=boot_id,
        sealed_at_us=now_us() if at_us is None else at_us,
        sealed_mono_us=mono_us(),
        rows=entries,
    )
    events = more.get("events")
    if isinstance(events, list):
        made.events.extend(events)
    inventory = more.get("inventory")
    if isinstance(inventory, pb.Inventory):
        made.inventory.CopyFrom(inventory)
    return made.SerializeToString()


def batch(number: int, content: bytes, lane: pb.Lane.ValueType = pb.LANE_LIVE) -> pb.Batch:
    return pb.Batch(lane=lane, number=number, body=content, sent_at_us=now_us(), sent_mono_us=mono_us())


def hello(
    node: str = "gpu-a01",
    machine_id: str = "aaaa",
    boot_id: str = "boot-1",
    spool_id: str = "spool-1",
    probes: Sequence[pb.Probe] = NODE_PROBES,
    **more: object,
) -> pb.Hello:
    made = pb.Hello(
        wire_version=1,
        node=node,
        machine_id=machine_id,
        boot_id=boot_id,
        agent_version="1.2.3",
        spool_id=spool_id,
        sent_at_us=now_us(),
        sent_mono_us=mono_us(),
        probes=probes,
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


class Agent:
    """The agent's end of one stream, blocking; everything waits at most 20 s."""

    def __init__(
        self, address: str, channel: grpc.Channel | None = None, options: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.channel = channel or grpc.insecure_channel(address, options=list(options))
        self.acked: list[int] = []
        self.directives: list[pb.Directive] = []
        self.error: grpc.RpcError | None = None
        self.welcome: pb.Welcome | None = None
        self._out: queue.Queue[pb.StreamRequest | None] = queue.Queue()
        self._changed = threading.Condition()
        self._ended = False
        self._call = pb_grpc.IngestServiceStub(self.channel).Stream(iter(self._out.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    kind = response.WhichOneof("kind")
                    if kind == "ack":
                        self.acked += response.ack.numbers
                    elif kind == "welcome":
                        self.welcome = response.welcome
                    else:
                        self.directives.append(response.directive)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def until(self, what: Callable[[], bool], seconds: float = 90) -> None:
        with self._changed:
            if not self._changed.wait_for(what, seconds):
                raise AssertionError(f"not within {seconds} s; acked {self.acked[-5:]}, error {self.error}")

    def hello(self, **changes: object) -> "Agent":
        self._out.put(pb.StreamRequest(hello=hello(**changes)))  # type: ignore[arg-type]
        self.until(lambda: self.welcome is not None or self._ended)
        return self

    def send(self, number: int, content: bytes, lane: pb.Lane.ValueType = pb.LANE_LIVE) -> None:
        self._out.put(pb.StreamRequest(batch=batch(number, content, lane)))

    def request(self, request: pb.StreamRequest) -> None:
        self._out.put(request)

    def wait(self, *numbers: int) -> None:
        self.until(lambda: set(numbers) <= set(self.acked) or self._ended)
        assert set(numbers) <= set(self.acked), self.error

    @property
    def ended(self) -> bool:
        return self._ended

    def code(self) -> grpc.StatusCode:
        """How the stream ended."""
        self.until(lambda: self._ended)
        found = self.error
        assert isinstance(found, grpc.Call)
        code = found.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    def details(self) -> str:
        found = self.error
        assert isinstance(found, grpc.Call)
        return str(found.details())

    def finish(self) -> None:
        """Send no more, wait for the end."""
        self._out.put(None)
        self.until(lambda: self._ended)

    def close(self) -> None:
        self._out.put(None)
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._reader.join(90)
        self.channel.close()


class Running:
    """A collector in this process, with its own event loop in a thread."""

    def __init__(
        self, config: CollectorConfig, store: Store, credentials: grpc.ServerCredentials | None
    ) -> None:
        self.config = config
        self.store = store
        self._credentials = credentials
        self._started: Future[Collector] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self.collector = self._started.result(20)
        self.state = self.collector.state
        self.address = f"127.0.0.1:{self.collector.port}"

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            collector = Collector(self.config, self.store, self._credentials)
            run = asyncio.create_task(collector.run())
            started = asyncio.create_task(collector.started.wait())
            await asyncio.wait([run, started], return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                run.result()
            self._started.set_result(collector)
            await run
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.collector.stop)
        self._thread.join(90)
        assert not self._thread.is_alive()

    def query(self, sql: str) -> list[tuple[object, ...]]:
        with self.store.reader() as read:
            return read.execute(sql).fetchall()

    def one(self, sql: str) -> object:
        return self.query(sql)[0][0]


@dataclass
class Process:
    """A collector of its own process."""

    data: Path
    args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[str] = field(init=False)
    lines: list[str] = field(default_factory=list)
    address: str = ""

    def __post_init__(self) -> None:
        argv = [sys.executable, "-m", "gpufleet_collector.main", "serve", "--data", str(self.data)]
        if "--listen" not in self.args:
            argv += ["--listen", "127.0.0.1:0"]
        self.popen = subprocess.Popen(
            [*argv, *self.args], stderr=subprocess.PIPE, text=True, env={**os.environ, **self.env}
        )
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)
            if " listens on " in line:
                self.address = line.split(" listens on ")[1].split(",")[0]
                threading.Thread(target=self._drain, daemon=True).start()
                break

    def _drain(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(self.popen.stderr)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(90)

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(90)


@dataclass
class Kit:
    """What the tests of this folder share; they cannot import each other."""

    tmp: Path
    started: list[Running] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    column: Callable[..., pb.Column] = column
    rows: Callable[..., pb.Rows] = rows
    gpu_rows: Callable[..., pb.Rows] = gpu_rows
    body: Callable[..., bytes] = body
    batch: Callable[..., pb.Batch] = batch
    hello: Callable[..., pb.Hello] = hello
    now_us: Callable[[], int] = now_us
    mono_us: Callable[[], int] = mono_us

    def start(
        self,
        store: Store | None = None,
        ingest: IngestConfig | None = None,
        disk: DiskConfig | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> Running:
        config = CollectorConfig(
            listen="127.0.0.1:0",
            data_dir=str(self.tmp),
            ingest=ingest or IngestConfig(linger_ms=5),
            disk=disk or DiskConfig(floor_mib=1),
        )
        running = Running(config, store or Store.open(self.tmp / "fleet.duckdb"), credentials)
        self.started.append(running)
        return running

    def process(self, *args: str, data: Path | None = None, **env: str) -> Process:
        process = Process(data or self.tmp, args, env)
        self.processes.append(process)
        return process

    def agent(self, address: str, channel: grpc.Channel | None = None) -> Agent:
        agent = Agent(address, channel)
        self.agents.append(agent)
        return agent

    @staticmethod
    def until(what: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.01)

    @staticmethod
    def free_port() -> int:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            return int(taken.getsockname()[1])


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path)
    yield kit
    for agent in kit.agents:
        agent.close()
    for running in kit.started:
        running.stop()
        running.store.close()
    for process in kit.processes:
        if process.popen.poll() is None:
            process.kill()
        if process.popen.stderr is not None:
            process.popen.stderr.close()
