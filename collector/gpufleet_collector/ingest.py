"""The wire's end of ingest: one stream per agent; hello checked, batches queued, acknowledgements sent.

hello -> committed -> welcome; batch -> queue -> committed -> ack. Reading stops while the queue is full or
the disk is short; nothing is acknowledged that is not in the store.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace

import grpc

from gpufleet import WIRE_VERSION
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc
from gpufleet.wire import MAX_MESSAGE_BYTES
from gpufleet_collector.bench_runs import Listening
from gpufleet_collector.clock import Receipt
from gpufleet_collector.commit import Batch, Denial, Hello, Outcome, Session
from gpufleet_collector.config import IngestConfig
from gpufleet_collector.decode import read_probes
from gpufleet_collector.identity import ID, NODE, Claim, machine_id
from gpufleet_collector.intake import Committer, Intake
from gpufleet_collector.state import State
from gpufleet_collector.store import Store

log = logging.getLogger(__name__)

OLDEST_WIRE_VERSION = max(1, WIRE_VERSION - 2)
HELLO_S = 30.0
"""How long a stream may stay open without a hello."""

_SLACK = 4096
"""Of a message around a body of the largest size."""

_MOST_UNSENT = 65_536
_MOST_SAID = 32
"""Lines and result of one directive."""

_AUDIT_EVERY_S = 600.0
_SPIFFE = re.compile(r"spiffe://[^/]+/node/([^/]+)")


class Refused(Exception):
    """A hello that cannot be served; the text says why, for the agent's operator."""


class AgentStream(Session):
    """A session with its way back to the agent. Belongs to the event loop."""

    def __init__(self, claim: Claim, hello: Hello) -> None:
        super().__init__(claim, hello)
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[bool] = loop.create_future()
        """True once its hello is stored; False when it could not be."""
        self.ended = asyncio.Event()
        """A newer stream took its place, or the collector wants a new hello."""
        self.wake = asyncio.Event()
        self.directives: list[pb.Directive] = []
        self.acks: dict[int, list[int]] = {}
        self.unsent = 0
        self.uncommitted = 0
        self.half_closed = False
        self.refused = ""
        """Why this certificate may not be who it says it is."""
        self.end = (grpc.StatusCode.ABORTED, "a newer stream of this node took its place")

    def outbox(self) -> list[pb.StreamResponse]:
        """What waits to be sent; empties it."""
        out = [pb.StreamResponse(directive=directive) for directive in self.directives]
        self.directives = []
        acks, self.acks, self.unsent = self.acks, {}, 0
        for lane, numbers in acks.items():
            out.append(pb.StreamResponse(ack=pb.Ack(lane=_LANES.get(lane, pb.LANE_LIVE), numbers=numbers)))
        return out


class Ask:
    """A directive on its way to an agent, and what the agent says about it. Belongs to the event loop."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.said: asyncio.Queue[str | pb.DirectiveResult] = asyncio.Queue(_MOST_SAID)
        """Lines about how it gets on, then the result; the agent may send it over a newer stream."""

    def hear(self, what: str | pb.DirectiveResult) -> None:
        """Take in what the agent says; an agent that talks too much is not listened to."""
        with contextlib.suppress(asyncio.QueueFull):
            self.said.put_nowait(what)


_LANES: dict[int, pb.Lane.ValueType] = {1: pb.LANE_LIVE, 2: pb.LANE_BACKFILL}


class IngestServicer(ingest_pb2_grpc.IngestServiceServicer):
    """`gpufleet.v1.IngestService`. Make it inside the running event loop; then `start`."""

    def __init__(self, store: Store, state: State, config: IngestConfig) -> None:
        self._state = state
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._streams: set[AgentStream] = set()
        self._readable = asyncio.Event()
        self._readable.set()
        self._denied: dict[tuple[str, str], float] = {}
        self._directive = 0
        self._asks: dict[str, Ask] = {}
        self._intake = Intake(self._loop, config.queue_mib << 20, config.group_mib << 20)
        self.committer = Committer(
            store,
            state,
            self._intake,
            config.linger_ms / 1000,
            lambda outcome: self._post(outcome),
        )

    def start(self) -> None:
        """Begin to commit."""
        self.committer.start()

    def pause(self, reason: str) -> None:
        """Stop reading from every agent and tell them why; empty = go on."""
        if reason == self._state.paused:
            return
        log.warning("ingest: %s", f"paused: {reason}" if reason else "goes on")
        self._state.pause(reason)
        self._state.set_ready("ingest", f"ingest paused: {reason}" if reason else "")
        if reason:
            self._readable.clear()
        else:
            self._readable.set()
        for stream in self._streams:
            self._tell_paused(stream, reason)

    def connected(self, node: str) -> bool:
        """Whether an agent is there to be asked."""
        return self._stream_of(node) is not None

    @contextlib.contextmanager
    def ask(self, node: str, directive: pb.Directive) -> Iterator[Ask | None]:
        """Send a directive to the agent of `node` and listen to it; None = no agent is connected."""
        stream = self._stream_of(node)
        if stream is None:
            yield None
            return
        ask = self._asks[directive.id] = Ask(node)
        stream.directives.append(directive)
        stream.wake.set()
        try:
            yield ask
        finally:
            del self._asks[directive.id]

    def _stream_of(self, node: str) -> AgentStream | None:
        there = (one for one in self._streams if one.node == node and one.open and not one.ended.is_set())
        return next((one for one in there if one.welcomed.done() and not one.half_closed), None)

    def _hear(self, stream: AgentStream, directive: str, what: str | pb.DirectiveResult) -> None:
        """Only the agent that was asked may answer."""
        ask = self._asks.get(directive)
        if ask is not None and ask.node == stream.node:
            ask.hear(what)

    async def stop(self) -> None:
        """Read no more, commit and acknowledge what was read, end the streams."""
        self._readable.clear()
        self.committer.stop()
        await asyncio.to_thread(self.committer.join, 30)
        await asyncio.sleep(0)  # the last outcome was posted to this loop
        for stream in self._streams:
            stream.end = (grpc.StatusCode.UNAVAILABLE, "the collector stops")
            stream.ended.set()
        deadline = time.monotonic() + 2
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def Stream(  # type: ignore[override]  # the stubs know generators alone
        self,
        request_iterator: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> None:
        """One agent, from hello to the end of its stream."""
        stream = await self._greet(context)
        self._streams.add(stream)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._intake.put(stream)
            if not await stream.welcomed:
                if stream.refused:
                    await self._deny(stream.claim, context.peer(), stream.refused, stream.hello.received)
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, stream.refused[:1000])
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the hello could not be stored: try again")
            await context.write(self._welcome(stream))
            if self._state.paused:
                self._tell_paused(stream, self._state.paused)
            reader = asyncio.create_task(self._read(stream, context))
            writer = asyncio.create_task(self._write(stream, context))
            ended = asyncio.create_task(_wait(stream.ended))
            tasks = [reader, writer, ended]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not reader.cancelled() and reader.exception() is None:
                stream.half_closed = True  # it sends no more: what it sent is acknowledged before the end
                stream.wake.set()
                await asyncio.wait([writer, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                for response in stream.outbox():
                    await context.write(response)
                await context.abort(*stream.end)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            self._streams.discard(stream)
            self.committer.gone(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # last: a second cancellation ends it here

    async def _greet(
        self, context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse]
    ) -> AgentStream:
        """Read and check the hello; aborts the call when it will not do."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_S:.0f} s")
        if not isinstance(first, pb.StreamRequest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream ended before its hello")
        received = _receipt()
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        try:
            claim = check_hello(first.hello, received)
        except Refused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        names = certificate_names(context.auth_context())
        if names is not None:
            claim = replace(claim, names=frozenset(names))
        if names is not None and claim.name not in names:
            named = ", ".join(sorted(names)) or "nobody"
            text = f"node {claim.name} is not in the certificate, which names {named}"
            await self._deny(claim, context.peer(), text, received)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text[:1000])
        probes, faults = read_probes(first.hello.probes)
        inventory = first.hello.inventory if first.hello.HasField("inventory") else None
        return AgentStream(
            claim,
            Hello(
                received,
                first.hello.sent_at_us,
                first.hello.sent_mono_us,
                probes,
                faults,
                inventory,
                first.hello.spool_batches,
            ),
        )

    async def _deny(self, claim: Claim, peer: str, reason: str, received: Receipt) -> None:
        actor = ", ".join(sorted(claim.names or ()))[:500]
        now = time.monotonic()
        if now - self._denied.get((actor, claim.name), -_AUDIT_EVERY_S) < _AUDIT_EVERY_S:
            return
        if len(self._denied) > 1000:
            self._denied.clear()
        self._denied[actor, claim.name] = now
        log.warning("ingest: refused %s: %s", peer, reason)
        await self._intake.put(Denial(received.wall_us, actor, peer, claim.name, reason[:1000]))

    async def _read(
        self,
        stream: AgentStream,
        context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse],
    ) -> None:
        while True:
            request = await context.read()  # half the price of iterating
            if not isinstance(request, pb.StreamRequest):
                return  # the end of the stream
            received = _receipt()
            kind = request.WhichOneof("kind")
            if kind == "batch":
                batch = request.batch
                body = batch.body
                if len(body) > MAX_MESSAGE_BYTES + _SLACK:
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"batch {batch.number} has {len(body)} bytes: at most {MAX_MESSAGE_BYTES}",
                    )
                stream.uncommitted += 1
                await self._intake.put(
                    Batch(stream, batch.lane, batch.number, body, batch.sent_mono_us, received)
                )
            elif kind == "directive_result":
                self._hear(stream, request.directive_result.id, request.directive_result)
            elif kind == "directive_progress":
                progress = request.directive_progress
                where = Listening(progress.listening) if progress.listening else progress.text[:500]
                self._hear(stream, progress.id, where)
            elif kind == "hello":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream has one hello")
            if not self._readable.is_set():
                await self._readable.wait()
            while stream.unsent > _MOST_UNSENT:
                await asyncio.sleep(0.05)

    @staticmethod
    async def _write(
        stream: AgentStream, context: grpc.aio.ServicerContext[pb.StreamRequest, pb.StreamResponse]
    ) -> None:
        while not (stream.half_closed and stream.uncommitted == 0):
            await stream.wake.wait()
            stream.wake.clear()
            for response in stream.outbox():
                await context.write(response)

    def _welcome(self, stream: AgentStream) -> pb.StreamResponse:
        return pb.StreamResponse(
            welcome=pb.Welcome(
                wire_version=WIRE_VERSION,
                node=stream.node,
                received_at_us=stream.hello.received.wall_us,
                live_credit=self._config.live_credit,
                backfill_credit=self._config.backfill_credit,
            )
        )

    def _tell_paused(self, stream: AgentStream, reason: str) -> None:
        self._directive += 1
        stream.directives.append(
            pb.Directive(id=f"paused-{self._directive}", paused=pb.Paused(reason=reason))
        )
        stream.wake.set()

    def _post(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _deliver(self, outcome: Outcome) -> None:
        for session in outcome.welcome:
            if isinstance(session, AgentStream) and not session.welcomed.done():
                session.welcomed.set_result(True)
        for session, lanes in outcome.acks.items():
            if isinstance(session, AgentStream):
                for lane, numbers in lanes.items():
                    session.acks.setdefault(lane, []).extend(numbers)
                    session.unsent += len(numbers)
                    session.uncommitted -= len(numbers)
                session.wake.set()
        for session, reason in outcome.refused.items():
            if isinstance(session, AgentStream) and not session.welcomed.done():
                session.refused = reason
                session.welcomed.set_result(False)
        for session in outcome.replaced:
            if isinstance(session, AgentStream):
                if not session.welcomed.done():
                    session.welcomed.set_result(False)
                session.ended.set()


def check_hello(hello: pb.Hello, received: Receipt) -> Claim:
    """Who calls.

    Raises:
        Refused: It cannot be served.
    """
    if not OLDEST_WIRE_VERSION <= hello.wire_version <= WIRE_VERSION:
        newer = hello.wire_version > WIRE_VERSION
        raise Refused(
            f"wire version {hello.wire_version}: this collector speaks {OLDEST_WIRE_VERSION} to "
            f"{WIRE_VERSION}: upgrade the {'collector' if newer else 'agent'} first"
        )
    if not NODE.fullmatch(hello.node):
        raise Refused(f"node name {hello.node[:80]!r}: use 1 to 253 of A-Z a-z 0-9 . _ ~ -")
    for name, text in (
        ("machine_id", hello.machine_id),
        ("boot_id", hello.boot_id),
        ("spool_id", hello.spool_id),
    ):
        if not ID.fullmatch(text):
            raise Refused(f"{name} {text[:80]!r}: use up to 64 of A-Z a-z 0-9 . _ : -")
    if not hello.spool_id:
        raise Refused("spool_id is empty: batch numbers mean nothing without it")
    booted_us = received.wall_us - hello.sent_mono_us if 0 < hello.sent_mono_us < 2**60 else None
    return Claim(
        hello.node,
        machine_id(hello.machine_id),
        hello.boot_id,
        hello.spool_id,
        hello.agent_version[:64],
        booted_us,
    )


def certificate_names(auth: Mapping[str, Iterable[bytes]]) -> set[str] | None:
    """Node names in the caller's certificate; None = the connection is not encrypted."""
    if b"ssl" not in auth.get("transport_security_type", ()):
        return None
    names: set[str] = set()
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for raw in auth.get(key, ()):
            name = raw.decode(errors="replace")
            spiffe = _SPIFFE.fullmatch(name)
            names.add(spiffe[1] if spiffe else name)
    return names - {""}


def _receipt() -> Receipt:
    return Receipt(time.time_ns() // 1000, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
