"""The agent's end of the stream: spool -> collector, acknowledged numbers are deleted.

Two lanes over one stream. What is sampled now is `live` and goes first; what an outage left is `backfill` and
goes at the collector's credit, events before samples. A batch is sent until it is acknowledged: at least once
from here, exactly once in the store.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gpufleet.config import ConfigError
from gpufleet.tls import Tls, channel_credentials, check_plain
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet.v1 import ingest_pb2_grpc as pb_grpc
from gpufleet.wire import CHANNEL_OPTIONS
from gpufleet_agent.encode import MAX_BODY_BYTES, BodyBuilder, cut, parked, split
from gpufleet_agent.spool import Spool, Stored

log = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]

PAGE = 4
"""Batches read from the spool at a time; each may weigh a MiB."""

MAX_CREDIT = 1024
"""No window is wider, whatever a collector grants."""

MAX_DIRECTIVES = 16
"""Directives worked on at once; more are refused."""

REFUSALS = 3
"""Times one undividable batch, alone on its stream, may be refused for size before it is parked."""

SMALLEST_LIMIT = 4096
"""Refusals for size never make us believe in a smaller limit than this."""

HEALTHY_S = 10.0
"""A stream that held this long, or brought an ack, ends the growth of the back-off."""

LAG_S = 30.0
"""Live batches that waited longer than this are history: they become backfill, the present goes first."""

_REFUSED = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""The collector says no, and will until a person changes something: ask again, seldom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Where to push, and how patiently.

    Attributes:
        collector: `host:port` or `unix:path`.
        tls: Certificate files, read anew for every connection.
        insecure: Plain text to another machine is wanted.
        backoff_min_s: Shortest wait before connecting again.
        backoff_max_s: Longest wait; waits are drawn at random below a bound that doubles up to it.
        refused_s: Shortest wait after a refusal that only a person can lift; drawn up to twice that.
        welcome_timeout_s: How long connecting and the Welcome may take.
        ack_timeout_s: Batches outstanding and nothing heard for this long: the stream is dead.
        live_s: What was put this long before connecting still counts as live.
        options: Of the channel.
    """

    collector: str
    tls: Tls = field(default_factory=Tls)
    insecure: bool = False
    backoff_min_s: float = 0.5
    backoff_max_s: float = 10.0
    refused_s: float = 30.0
    welcome_timeout_s: float = 20.0
    ack_timeout_s: float = 60.0
    live_s: float = 10.0
    options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS


class Push:
    """Keeps one stream to the collector and empties the spool into it, until it is cancelled.

    Attributes:
        connected: A Welcome was received and the stream stands.
        state: In words, for STATUS= and people.
        reconnects_total: Times a stream was opened after the first.
        last_progress_mono: `time.monotonic()` of the collector's last sign of life; 0 = none yet.
        node: The name the collector files this agent under; "" = not yet known.
    """

    def __init__(
        self,
        settings: PushSettings,
        spool: Spool,
        hello: Callable[[], pb.Hello],
        on_directive: Callable[[pb.Directive], Awaitable[pb.DirectiveResult]],
        *,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """Prepare; `run` connects. A `channel` given here carries every stream and is left open."""
        self.connected = False
        self.state = "not started"
        self.reconnects_total = 0
        self.last_progress_mono = 0.0
        self.node = ""
        self._settings = settings
        self._spool = spool
        self._hello = hello
        self._shared = channel
        self._wake = asyncio.Event()
        self._directives = _Directives(on_directive, self._wake)
        self._sizes = _Sizes(spool)
        self._welcomes = 0
        self._failures = 0

    def notify(self) -> None:
        """Something was put into the spool."""
        self._wake.set()

    def tell(self, directive: str, text: str, listening: str = "") -> None:
        """Say how a directive gets on, or where it listens; lost when there is no stream."""
        self._directives.tell(directive, text, listening)

    async def run(self) -> None:
        """Connect, send, and connect again; ends only by being cancelled."""
        try:
            while True:
                await asyncio.sleep(await self._connect_once())
        finally:
            self._directives.cancel()
            self._say("stopped", logging.INFO)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all that is in the spool is acknowledged; False when that took too long."""
        deadline = time.monotonic() + timeout_s
        while self._spool.pending():
            if time.monotonic() >= deadline:
                return False
            self.notify()
            await asyncio.sleep(0.02)
        return True

    async def _connect_once(self) -> float:
        """One stream from Hello to its end; how long to wait before the next."""
        began = time.monotonic()
        level, refused = logging.WARNING, False
        channel: grpc.aio.Channel | None = None
        stream: _Stream | None = None
        try:
            channel = self._shared or self._open_channel()
            stream = _Stream(
                self._settings, self._spool, self._sizes, self._directives, self._wake, self._note
            )
            await stream.run(channel, self._hello())
            why, level = "the collector ended the stream", logging.INFO
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"[:300]
            refused = error.code() in _REFUSED
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and stream is not None:
                self._sizes.refused(stream.outstanding())
        except (_Unusable, ConfigError) as error:
            why = str(error)
        except Exception as error:
            log.exception("collector %s: unexpected", self._settings.collector)
            why = f"{type(error).__name__}: {error}"
        finally:
            self.connected = False
            if channel is not None and channel is not self._shared:
                await channel.close(None)
        held = time.monotonic() - began >= HEALTHY_S
        healthy = stream is not None and (stream.acks > 0 or (stream.welcomed.is_set() and held))
        self._failures = 0 if healthy else self._failures + 1
        self._say(f"{'refused' if refused else 'disconnected'}: {why}", level)
        return self._delay(refused)

    def _delay(self, refused: bool) -> float:
        settings = self._settings
        if refused:
            return random.uniform(settings.refused_s, 2 * settings.refused_s)
        bound = min(settings.backoff_min_s * 2 ** min(self._failures + 1, 16), settings.backoff_max_s)
        return random.uniform(settings.backoff_min_s, max(settings.backoff_min_s, bound))

    def _open_channel(self) -> grpc.aio.Channel:
        """A new channel, with the certificate files as they are now."""
        settings = self._settings
        # Without a pool of its own the channel would inherit the last one's connection and its back-off.
        options = (*settings.options, ("grpc.use_local_subchannel_pool", 1))
        if settings.tls.on:
            return grpc.aio.secure_channel(settings.collector, channel_credentials(settings.tls), options)
        check_plain(settings.collector, settings.insecure, "collector")
        return grpc.aio.insecure_channel(settings.collector, options)

    def _note(self, welcome: pb.Welcome | None, paused: str) -> None:
        """What a stream reports: a Welcome, a sign of life, a pause."""
        self.last_progress_mono = time.monotonic()
        if welcome is not None:
            self._welcomes += 1
            self.reconnects_total = self._welcomes - 1
            self.connected = True
            self.node = welcome.node
        self._say(f"paused: {paused}" if paused else "connected", logging.INFO)

    def _say(self, state: str, level: int) -> None:
        """Remember the state; log it when it changed."""
        if state != self.state:
            self.state = state
            log.log(level, "collector %s: %s", self._settings.collector, state)


class _Unusable(Exception):
    """The stream is of no more use; the text says why."""


@dataclass(slots=True)
class _Lane:
    """One lane of one stream: its window, how far it has read the spool, and what is on its way."""

    credit: int = 0
    after: int = 0
    events: bool = True
    page: deque[Stored] = field(default_factory=deque)
    sent: dict[int, float] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether one more may be on its way."""
        return len(self.sent) < self.credit


class _Stream:
    """One stream: a reader, a writer and a watchdog, until the first of them ends."""

    def __init__(
        self,
        settings: PushSettings,
        spool: Spool,
        sizes: "_Sizes",
        directives: "_Directives",
        wake: asyncio.Event,
        note: Callable[[pb.Welcome | None, str], None],
    ) -> None:
        self.acks = 0
        self.welcomed = asyncio.Event()
        self._settings = settings
        self._spool = spool
        self._sizes = sizes
        self._directives = directives
        self._wake = wake
        self._note = note
        self._live = _Lane()
        self._backfill = _Lane()
        self._since_us = 0
        self._paused = ""
        self._heard = time.monotonic()

    async def run(self, channel: grpc.aio.Channel, hello: pb.Hello) -> None:
        """Until the collector ends the stream.

        Raises:
            grpc.aio.AioRpcError: It ended it with an error.
            _Unusable: It says nothing or nonsense.
        """
        call = pb_grpc.IngestServiceStub(channel).Stream(None)
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read(call), self._write(call, hello), self._watch())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in (task for task in tasks if task in done):
            if task.cancelled():
                raise _Unusable("the call was cancelled")
            task.result()

    def outstanding(self) -> list[int]:
        """Numbers sent and not acknowledged."""
        return [*self._live.sent, *self._backfill.sent]

    # ---- what comes

    async def _read(self, call: Call) -> None:
        first = await call.read()
        if isinstance(first, pb.StreamResponse):
            if not first.HasField("welcome"):
                raise _Unusable("the first answer is no Welcome")
            self._welcome(first.welcome)
            while isinstance(response := await call.read(), pb.StreamResponse):
                self._heard = time.monotonic()
                self._handle(response)

    def _welcome(self, welcome: pb.Welcome) -> None:
        self._heard = time.monotonic()
        self._set_credit(welcome.live_credit, welcome.backfill_credit)
        self._new_boundary()
        self._note(welcome, "")
        self.welcomed.set()

    def _handle(self, response: pb.StreamResponse) -> None:
        if response.HasField("ack"):
            self._acknowledge(response.ack.numbers)
        elif response.HasField("directive"):
            directive = response.directive
            if directive.HasField("paused"):
                self._paused = directive.paused.reason
                self._directives.answer(directive.id, pb.OUTCOME_DONE)
            elif directive.HasField("spool_credit"):
                self._set_credit(directive.spool_credit.live, directive.spool_credit.backfill)
                self._directives.answer(directive.id, pb.OUTCOME_DONE)
            else:
                self._directives.start(directive)
        self._note(None, self._paused)
        self._wake.set()

    def _acknowledge(self, numbers: Iterable[int]) -> None:
        """Only what was sent on this stream can be acknowledged on it."""
        known = []
        for number in numbers:
            for lane in (self._live, self._backfill):
                if lane.sent.pop(number, None) is not None:
                    known.append(number)
        self.acks += len(known)
        self._sizes.accepted(known)
        self._spool.delete(known)

    def _set_credit(self, live: int, backfill: int) -> None:
        self._live.credit = max(1, min(live, MAX_CREDIT))
        self._backfill.credit = min(backfill, MAX_CREDIT)

    # ---- what goes

    async def _write(self, call: Call, hello: pb.Hello) -> None:
        try:
            await call.write(pb.StreamRequest(hello=hello))
            await self.welcomed.wait()
            while True:
                self._wake.clear()
                if self._spool.spool_id != hello.spool_id:
                    raise _Unusable("the spool was begun anew")
                request = self._next()
                if request is None:
                    await self._wake.wait()
                else:
                    await call.write(request)
        except asyncio.InvalidStateError:
            # The call is over; the reader is about to learn how it ended.
            await asyncio.sleep(self._settings.welcome_timeout_s)
            raise _Unusable("the stream ended while writing") from None

    def _next(self) -> pb.StreamRequest | None:
        """The next request, or None: nothing to send, or not now."""
        if said := self._directives.take():
            return said
        if self._paused:
            return None
        suspects = self._sizes.suspects()
        if suspects:
            return None if self.outstanding() else self._suspect(suspects[0])
        if self._live.open and (item := self._pop(self._live, self._fill_live)):
            return self._batch(item, self._live, pb.LANE_LIVE)
        if self._backfill.open and (item := self._pop(self._backfill, self._fill_backfill)):
            return self._batch(item, self._backfill, pb.LANE_BACKFILL)
        return None

    def _suspect(self, item: Stored) -> pb.StreamRequest:
        if item.put_us >= self._since_us:
            return self._batch(item, self._live, pb.LANE_LIVE)
        return self._batch(item, self._backfill, pb.LANE_BACKFILL)

    def _batch(self, item: Stored, lane: _Lane, name: pb.Lane.ValueType) -> pb.StreamRequest:
        lane.sent[item.number] = time.monotonic()
        clock = self._spool.clock
        return pb.StreamRequest(
            batch=pb.Batch(
                lane=name,
                number=item.number,
                body=item.body,
                sent_at_us=clock.wall_us(),
                sent_mono_us=clock.mono_us(),
            )
        )

    def _pop(self, lane: _Lane, fill: Callable[[], bool]) -> Stored | None:
        """The lane's next batch that is not on its way and fits into a message."""
        while lane.page or fill():
            item = lane.page.popleft()
            if item.number not in self._live.sent and item.number not in self._backfill.sent:
                fitting = self._sizes.fitting(item)
                if fitting is not None:
                    return fitting
        return None

    def _fill_live(self) -> bool:
        found = self._spool.oldest_first(self._live.after, PAGE, since_us=self._since_us)
        if found and found[0].put_us < self._spool.now_us() - int(LAG_S * 1e6):
            self._new_boundary()
            found = self._spool.oldest_first(self._live.after, PAGE, since_us=self._since_us)
        return self._turn_page(self._live, found)

    def _fill_backfill(self) -> bool:
        lane = self._backfill
        while True:
            found = self._spool.oldest_first(lane.after, PAGE, event=lane.events, before_us=self._since_us)
            if found or not lane.events:
                return self._turn_page(lane, found)
            lane.events, lane.after = False, 0

    @staticmethod
    def _turn_page(lane: _Lane, found: list[Stored]) -> bool:
        lane.page.extend(found)
        if found:
            lane.after = found[-1].number
        return bool(found)

    def _new_boundary(self) -> None:
        """Everything but the newest few seconds is history from now on."""
        self._since_us = self._spool.now_us() - int(self._settings.live_s * 1e6)
        self._live.page.clear()
        self._live.after = self._spool.first_since(self._since_us) - 1
        self._backfill.page.clear()
        self._backfill.after, self._backfill.events = 0, True

    # ---- whether it is alive

    async def _watch(self) -> None:
        settings = self._settings
        try:
            await asyncio.wait_for(self.welcomed.wait(), settings.welcome_timeout_s)
        except TimeoutError:
            raise _Unusable(f"no Welcome within {settings.welcome_timeout_s:g} s") from None
        while True:
            await asyncio.sleep(settings.ack_timeout_s / 12)
            sent = [*self._live.sent.values(), *self._backfill.sent.values()]
            if not sent or self._paused:
                continue
            now, oldest = time.monotonic(), min(sent)
            silent_s = now - max(oldest, self._heard)
            if silent_s > settings.ack_timeout_s or now - oldest > 5 * settings.ack_timeout_s:
                raise _Unusable(
                    f"{len(sent)} batches are not acknowledged, the oldest for {now - oldest:.0f} s"
                )


class _Sizes:
    """What is known about the size of messages: refused ones are halved, and parked where they cannot be.

    A refusal ends the stream without saying which message it meant. All that were on their way are suspects
    then and go one by one, before anything else.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._limit = MAX_BODY_BYTES
        self._suspects: set[int] = set()
        self._refusals: dict[int, int] = {}

    def suspects(self) -> list[Stored]:
        """The oldest batch that may be too large, if any."""
        while self._suspects:
            number = min(self._suspects)
            item = self._spool.get(number)
            if item is not None and (fitting := self.fitting(item)) is not None:
                return [fitting]
            self._suspects.discard(number)
        return []

    def fitting(self, item: Stored) -> Stored | None:
        """The batch, or None when it was too large and is no longer in the spool under its number."""
        if len(item.body) <= self._limit:
            return item
        if self._halve(item):
            return None
        if len(item.body) > MAX_BODY_BYTES:
            self._park(item)
            return None
        return item  # one row: the limit we believe in is not worth a row until it was refused by itself

    def refused(self, sent: list[int]) -> None:
        """A message was refused for its size while these were on their way."""
        if len(sent) > 1:
            self._suspects.update(sent)
            return
        for number in sent:
            item = self._spool.get(number)
            if item is None:
                continue
            self._limit = max(SMALLEST_LIMIT, min(self._limit, len(item.body) - 1))
            if self._halve(item):
                continue
            self._suspects.add(number)
            self._refusals[number] = self._refusals.get(number, 0) + 1
            if self._refusals[number] >= REFUSALS:
                self._park(item)

    def accepted(self, numbers: Iterable[int]) -> None:
        """These were not too large."""
        self._suspects.difference_update(numbers)
        for number in numbers:
            self._refusals.pop(number, None)

    def _halve(self, item: Stored) -> bool:
        halves = _halves(item.body)
        if len(halves) < 2:
            return False
        self._suspects.discard(item.number)
        self._spool.replace(item.number, halves)
        return True

    def _park(self, item: Stored) -> None:
        clock = self._spool.clock
        event = parked(clock.wall_us(), clock.mono_us(), len(item.body), number=item.number)
        log.warning("batch %d: %s: put aside", item.number, event.message)
        self._suspects.discard(item.number)
        self._refusals.pop(item.number, None)
        self._spool.park(item.number)
        builder = BodyBuilder(clock.boot_id)
        builder.add_event(event)
        for body in builder.seal(clock.wall_us(), clock.mono_us()):
            self._spool.put(body, event=True)


def _halves(body: bytes) -> list[bytes]:
    try:
        return split(body)
    except (DecodeError, ValueError):
        return [body]  # not a Body of ours: it goes as it is or not at all


class _Directives:
    """What the collector asks for, worked on beside the stream; results outlive it."""

    def __init__(
        self,
        on_directive: Callable[[pb.Directive], Awaitable[pb.DirectiveResult]],
        wake: asyncio.Event,
    ) -> None:
        self._on_directive = on_directive
        self._wake = wake
        self._running: dict[str, asyncio.Task[None]] = {}
        self._said: deque[pb.StreamRequest] = deque(maxlen=64)

    def start(self, directive: pb.Directive) -> None:
        """Work on it; asked twice for one that runs, it goes on running once."""
        if directive.id in self._running:
            return
        if len(self._running) >= MAX_DIRECTIVES:
            self.answer(directive.id, pb.OUTCOME_REFUSED, "too many directives at once")
            return
        self._running[directive.id] = asyncio.ensure_future(self._work(directive))

    def answer(self, name: str, outcome: pb.Outcome.ValueType, message: str = "", rows: int = 0) -> None:
        """Queue a result."""
        result = pb.DirectiveResult(id=name, outcome=outcome, message=cut(message), rows=rows)
        self._said.append(pb.StreamRequest(directive_result=result))
        self._wake.set()

    def tell(self, name: str, text: str, listening: str = "") -> None:
        """Queue how it gets on, or where it listens."""
        progress = pb.DirectiveProgress(id=name, text=cut(text), listening=listening)
        self._said.append(pb.StreamRequest(directive_progress=progress))
        self._wake.set()

    def take(self) -> pb.StreamRequest | None:
        """The next thing to say."""
        return self._said.popleft() if self._said else None

    def cancel(self) -> None:
        """Nobody waits for the answers any more."""
        for task in self._running.values():
            task.cancel()

    async def _work(self, directive: pb.Directive) -> None:
        try:
            result = await self._on_directive(directive)
            self.answer(directive.id, result.outcome, result.message, result.rows)
        except Exception as error:
            log.warning("directive %s: %s: %s", directive.id, type(error).__name__, error)
            self.answer(directive.id, pb.OUTCOME_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(directive.id, None)
