import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gpufleet.metric import Kind, Metric, Type, Unit
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc as pb_grpc
from gpufleet_agent import encode
from gpufleet_agent.probe import Sweep
from gpufleet_agent.push import Push, PushSettings
from gpufleet_agent.spool import Clock, Spool

METRICS = (
    Metric("gpu_uuid", Type.STRING, Unit.TEXT, Kind.KEY, "Identity."),
    Metric("power_w", Type.F64, Unit.WATT, Kind.GAUGE, "Power.", 0, 3000),
    Metric("offset_s", Type.I64, Unit.SECOND, Kind.GAUGE, "Signed."),
    Metric("mem_used_bytes", Type.U64, Unit.BYTE, Kind.GAUGE, "Memory."),
    Metric("present", Type.BOOL, Unit.ONE, Kind.STATE, "There."),
)


class FakeCollector(pb_grpc.IngestServiceServicer):
    """A collector with a ledger and no store: it does what a test tells it to."""

    def __init__(self) -> None:
        self.ledger: dict[tuple[str, str, int], bytes] = {}
        self.received: list[pb.Batch] = []
        self.sizes: list[int] = []
        self.hellos: list[pb.Hello] = []
        self.results: list[pb.DirectiveResult] = []
        self.stored: Counter[int] = Counter()
        self.conflicts = 0
        self.streams = 0
        self.open_streams = 0
        self.live_credit = 64
        self.backfill_credit = 8
        self.commit: Callable[[pb.Batch], bool] = lambda batch: True
        self.ack: Callable[[pb.Batch], bool] = lambda batch: True
        self.refuse: grpc.StatusCode | None = None
        self.max_body = 0
        self.directives: list[pb.Directive] = []
        self.say: Callable[[pb.Directive], Awaitable[None]]
        self.end = asyncio.Event()
        self.crash = asyncio.Event()

    async def Stream(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> None:
        self.streams += 1
        self.open_streams += 1
        try:
            await self._stream(request_iterator, context)
        finally:
            self.open_streams -= 1

    async def _stream(
        self,
        requests: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> None:
        if self.refuse is not None:
            await context.abort(self.refuse, "no")
        hello = (await anext(requests)).hello
        self.hellos.append(hello)
        welcome = pb.Welcome(
            wire_version=1,
            node=hello.node,
            live_credit=self.live_credit,
            backfill_credit=self.backfill_credit,
        )
        await context.write(pb.StreamResponse(welcome=welcome))
        for directive in self.directives:
            await context.write(pb.StreamResponse(directive=directive))
        self.say = lambda directive: context.write(pb.StreamResponse(directive=directive))
        reader = asyncio.ensure_future(self._serve(hello, requests, context))
        ends = [asyncio.ensure_future(event.wait()) for event in (self.end, self.crash)]
        done, _ = await asyncio.wait([reader, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in (reader, *ends):
            task.cancel()
        await asyncio.gather(reader, *ends, return_exceptions=True)
        if ends[1] in done:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "crashed")
        if reader in done and not reader.cancelled() and reader.exception() is None and reader.result():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")

    async def _serve(
        self,
        hello: pb.Hello,
        requests: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> bool:
        async for request in requests:
            if request.HasField("directive_result"):
                self.results.append(request.directive_result)
                continue
            batch = request.batch
            self.sizes.append(request.ByteSize())
            if self.max_body and len(batch.body) > self.max_body:
                return True
            self.received.append(batch)
            if self.commit(batch):
                self.store(hello, batch)
                if self.ack(batch):
                    await context.write(
                        pb.StreamResponse(ack=pb.Ack(lane=batch.lane, numbers=[batch.number]))
                    )
        return False

    def store(self, hello: pb.Hello, batch: pb.Batch) -> None:
        key = (hello.node, hello.spool_id, batch.number)
        if key not in self.ledger:
            self.ledger[key] = batch.body
            self.stored[batch.number] += 1
        elif self.ledger[key] != batch.body:
            self.conflicts += 1

    def rows(self) -> int:
        return sum(rows.count for body in self.ledger.values() for rows in pb.Body.FromString(body).rows)

    @asynccontextmanager
    async def serve(
        self,
        address: str = "127.0.0.1:0",
        options: tuple[tuple[str, int], ...] = (),
        credentials: grpc.ServerCredentials | None = None,
    ) -> AsyncIterator[str]:
        server = grpc.aio.server(options=(*options, ("grpc.so_reuseport", 0)))
        pb_grpc.add_IngestServiceServicer_to_server(self, server)
        port = (
            server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        )
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


@dataclass
class TestClock:
    __test__ = False
    boot_id: str = "boot-1"
    wall: int = 1_800_000_000_000_000
    mono: int = 5_000_000_000

    def clock(self) -> Clock:
        return Clock(self.boot_id, lambda: self.wall, lambda: self.mono)

    def pass_s(self, seconds: float) -> None:
        self.wall += int(seconds * 1e6)
        self.mono += int(seconds * 1e6)


@dataclass
class Agent:
    """A Push on a Spool, as the supervisor has them."""

    path: Path
    settings: PushSettings
    clock: Clock = field(default_factory=lambda: Clock("boot-1"))
    node: str = "gpu-a01"
    spool: Spool = field(init=False)
    push: Push = field(init=False)
    directives: list[pb.Directive] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spool = Spool.open(self.path, max_bytes=256 << 20, max_age_s=86400, clock=self.clock)
        self.push = Push(self.settings, self.spool, self.hello, self.on_directive)

    def hello(self) -> pb.Hello:
        return encode.hello(
            node=self.node,
            machine_id="m1",
            boot_id=self.clock.boot_id,
            spool_id=self.spool.spool_id,
            probes=encode.probe_descriptors({"gpu": (5.0, METRICS)}),
            items=[],
            complete=True,
            read_at_us=0,
            spool_batches=self.spool.pending(),
            wall_us=self.clock.wall_us(),
            mono_us=self.clock.mono_us(),
        )

    async def on_directive(self, directive: pb.Directive) -> pb.DirectiveResult:
        self.directives.append(directive)
        if directive.HasField("run_bench"):
            raise RuntimeError("no such bench")
        return pb.DirectiveResult(id=directive.id, outcome=pb.OUTCOME_DONE, rows=7)

    def put(self, rows: int = 1, *, event: bool = False) -> list[int]:
        numbers = [self.spool.put(body, event=event) for body in bodies(rows)]
        self.push.notify()
        return numbers


def sweep(rows: int, probe: str = "gpu") -> Sweep:
    cells: list[list[float | int | bool | str | None]] = [
        [f"GPU-{row % 8}", row * 0.5, -row, row, row % 2 == 0] for row in range(rows)
    ]
    return Sweep(probe, 1_800_000_000_000_000, 5_000_000_000, 0.01, "", cells, [b""] * rows)


def bodies(rows: int) -> list[bytes]:
    builder = encode.BodyBuilder("boot-1")
    builder.add_sweep(METRICS, sweep(rows))
    return builder.seal(1_800_000_000_000_000, 5_000_000_000)


def decode_column(column: pb.Column, count: int) -> tuple[list[object], list[int]]:
    """Cells (None = NULL) and the reasons of the NULLs: what a collector would read."""
    code = {pb.TYPE_F64: "d", pb.TYPE_I64: "q", pb.TYPE_U64: "Q", pb.TYPE_BOOL: "?", pb.TYPE_STRING: "I"}
    values: list[object] = list(struct.unpack(f"<{count}{code[column.type]}", column.values))
    valid = [not column.validity or bool(column.validity[row // 8] >> (row % 8) & 1) for row in range(count)]
    if column.validity:
        assert len(column.validity) == (count + 7) // 8
    assert len(column.reasons) == valid.count(False)
    for row in range(count):
        if not valid[row]:
            assert values[row] == 0
            values[row] = None
        elif column.type == pb.TYPE_STRING:
            place = values[row]
            assert isinstance(place, int)
            values[row] = column.dictionary[place]
    return values, list(column.reasons)


async def _until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _pushing(agent: Agent) -> AsyncIterator[Agent]:
    task = asyncio.ensure_future(agent.push.run())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        agent.spool.close()


@dataclass(frozen=True)
class Kit:
    """What the tests of this folder share; they cannot import each other."""

    tmp: Path
    metrics: tuple[Metric, ...] = METRICS
    collector: Callable[[], FakeCollector] = FakeCollector
    pushing: Callable[[Agent], AbstractAsyncContextManager[Agent]] = _pushing
    until: Callable[..., Awaitable[None]] = _until
    sweep: Callable[..., Sweep] = sweep
    bodies: Callable[[int], list[bytes]] = bodies
    decode: Callable[[pb.Column, int], tuple[list[object], list[int]]] = decode_column
    test_clock: Callable[[], TestClock] = TestClock

    def settings(self, address: str, **changes: Any) -> PushSettings:
        quick = PushSettings(collector=address, backoff_min_s=0.02, backoff_max_s=0.1, live_s=0.5)
        return replace(quick, **changes)

    def agent(self, settings: PushSettings, name: str = "spool.db", **changes: Any) -> Agent:
        return Agent(self.tmp / name, settings, **changes)

    @staticmethod
    def free_port() -> int:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            return int(taken.getsockname()[1])

    @staticmethod
    def run(work: Coroutine[object, object, None]) -> None:
        asyncio.run(work)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    random.seed(7)
    return Kit(tmp_path)
