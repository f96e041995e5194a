"""Benches that somebody asked for: one at a time per node, few at once, each known by its lease.

query or retest -> here -> ingest -> the agent, which says how it gets on and sends rows of table `bench`
under the lease. What was asked goes on when whoever asked goes away. Belongs to the event loop.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.people import NoSuch, NotNow, PeopleError

log = logging.getLogger(__name__)

QUICK = ("h2d", "clock")
"""What is run when nobody says which; as `fleet-agent bench --quick`."""

MOST_BENCHES = 16
RUN_S = 90.0
"""An agent ends a run that takes longer."""

ANSWER_S = 240.0
"""An agent that has not answered by then, a run before it included, does not."""

PAIR = "tcp"
"""The bench between two nodes. Its token is made here for one run, told to both agents, and kept nowhere."""

MOST_PAIRS = 4
"""At once in the whole fleet, so that they do not measure each other."""

TOKEN_BYTES = 32
EXPIRES_S, SECONDS, BYTES = 30.0, 5.0, 2 << 30
"""Of a stream: how long its receiver waits, for how long and how much is sent at most."""

WORD_S = 3.0
"""So long its receiver is waited for when the sender has ended: most often it says why."""

PER_MINUTE = 30
"""Asked for by people, of the whole fleet."""

_NAME = re.compile(r"[a-z0-9_]{1,40}")


class Listening(str):
    """IP:PORT where the receiver of a stream says that it listens; comes among its lines for people."""

    __slots__ = ()

    @property
    def valid(self) -> bool:
        """Whether it is that: an agent connects nowhere else."""
        host, _, port = self.rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return bool(re.fullmatch(r"[0-9]{1,5}", port)) and 0 < int(port) < 65536 and len(self) < 64


class Saying(Protocol):
    """What `ingest.Ask` is to us."""

    said: asyncio.Queue[str | pb.DirectiveResult]


class Agents(Protocol):
    """Who brings directives to agents: `ingest.IngestServicer`."""

    def connected(self, node: str) -> bool:
        """Whether the agent of `node` can be asked."""

    def ask(self, node: str, directive: pb.Directive) -> AbstractContextManager[Saying | None]:
        """Send it and listen; None = no agent is connected."""


@dataclass(slots=True)
class Answer:
    """What came of one bench.

    Attributes:
        bench: Its name.
        lease: Of its rows.
        outcome: done, refused, failed, unsupported or silent.
        message: The agent's words.
        rows: How many rows the lease has or will have.
        node: Whose answer it is, where that is not the run's node.
    """

    bench: str
    lease: str
    outcome: str
    message: str
    rows: int
    node: str = ""


@dataclass(slots=True)
class Run:
    """What was asked of one node.

    Attributes:
        node: Where.
        by: Who asked.
        began: Monotonic seconds.
        answers: Of the benches that have ended.
        lines: How it gets on; None = it is over.
        paired: It is one end of a stream between two nodes.
    """

    node: str
    by: str
    began: float
    answers: list[Answer] = field(default_factory=list)
    lines: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    paired: bool = False

    async def progress(self) -> AsyncIterator[str]:
        """Each line as it comes, until it is over."""
        while (line := await self.lines.get()) is not None:
            yield line


class BenchRuns:
    """Every run that is under way.

    Args:
        agents: Who brings directives to agents.
        clock: Monotonic seconds.
        answer_s: How long to wait for an agent's answer.
    """

    def __init__(
        self,
        agents: Agents,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._agents = agents
        self._clock = clock
        self._answer_s = answer_s
        self._running: dict[str, Run] = {}
        self._asked: deque[float] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def busy(self, node: str) -> bool:
        """Whether something that was asked for runs there."""
        return node in self._running

    def connected(self, node: str) -> bool:
        """Whether the agent of `node` can be asked."""
        return self._agents.connected(node)

    def reserve(self, node: str, by: str, *, person: bool = True) -> Run:
        """A place for a run; give it to `start` or to `release`.

        Raises:
            NotNow: No agent is connected, something runs there already, or too much was asked for.
        """
        if not self._agents.connected(node):
            raise NotNow(f"no agent of {node} is connected: nobody is there to run a bench")
        now = self._clock()
        if other := self._running.get(node):
            raise NotNow(
                f"a bench runs on {node} already: asked for by {other.by} {now - other.began:.0f} s ago"
            )
        while self._asked and self._asked[0] <= now - 60:
            self._asked.popleft()
        if person and len(self._asked) >= PER_MINUTE:
            raise NotNow(f"{PER_MINUTE} runs were asked for within a minute\ntry again in a minute")
        if person:
            self._asked.append(now)
        run = self._running[node] = Run(node, by, now)
        return run

    def reserve_pair(self, node: str, peer: str, by: str) -> tuple[Run, Run]:
        """Places for both ends of a stream; give them to `start_pair`, or each to `release`.

        Raises:
            NotNow: As of `reserve`, or too many pairs measure already.
        """
        busy = sum(1 for run in self._running.values() if run.paired)
        if busy >= 2 * MOST_PAIRS:
            raise NotNow(
                f"{MOST_PAIRS} pairs of nodes measure already: more would measure each other"
                "\ntry again in a minute"
            )
        second = self.reserve(peer, by, person=False)
        try:
            first = self.reserve(node, by)
        except BaseException:
            self.release(second)
            raise
        first.paired = second.paired = True
        return first, second

    def release(self, run: Run) -> None:
        """It will not be, or is over."""
        if self._running.get(run.node) is run:
            del self._running[run.node]
        run.lines.put_nowait(None)

    def start(self, run: Run, entity: str, benches: Sequence[str], leases: Sequence[str]) -> None:
        """Have the agent run one bench after the other; it goes on whether or not anybody listens."""
        task = asyncio.create_task(self._work(run, entity, benches, leases))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start_pair(self, run: Run, peer: Run, lease: str) -> None:
        """Have the agent of `run` send to that of `peer`; it goes on whether or not anybody listens."""
        task = asyncio.create_task(self._work_pair(run, peer, lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Wait for nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, run: Run, entity: str, benches: Sequence[str], leases: Sequence[str]) -> None:
        try:
            for bench, lease in zip(benches, leases, strict=True):
                answer = await self._one(run, entity, bench, lease)
                run.answers.append(answer)
                if answer.outcome == "silent":
                    break
        except Exception:
            log.exception("bench asked for on %s", run.node)
        finally:
            self.release(run)

    async def _one(self, run: Run, entity: str, bench: str, lease: str) -> Answer:
        directive = pb.Directive(
            id=lease, run_bench=pb.RunBench(bench=bench, entity=entity, lease=lease, deadline_s=RUN_S)
        )
        with self._agents.ask(run.node, directive) as asked:
            if asked is None:
                return Answer(bench, lease, "silent", f"the agent of {run.node} is no longer connected", 0)
            run.lines.put_nowait(f"{bench}: queued")
            said = await self._heard(run, asked)
        return self._silent(bench, lease, run.node) if said is None else _answer(bench, lease, said)

    async def _heard(
        self, run: Run, asked: Saying, prefix: str = "", wait_s: float | None = None
    ) -> pb.DirectiveResult | None:
        """An agent's result, its lines before it handed on; None = there was none in time."""
        while isinstance(said := await self._next(run, asked, prefix, wait_s), Listening):
            pass
        return said

    async def _next(
        self, run: Run, asked: Saying, prefix: str = "", wait_s: float | None = None
    ) -> pb.DirectiveResult | Listening | None:
        """What an agent says next that is not for people; None = nothing in time."""
        until = self._clock() + (self._answer_s if wait_s is None else wait_s)
        while (left_s := until - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                said = await asyncio.wait_for(asked.said.get(), left_s)
                if isinstance(said, pb.DirectiveResult | Listening):
                    return said
                run.lines.put_nowait(f"{prefix}{said}")
        return None

    def _silent(self, bench: str, lease: str, node: str) -> Answer:
        text = f"the agent of {node} did not answer within {self._answer_s:.0f} s"
        return Answer(bench, lease, "silent", text, 0)

    async def _work_pair(self, run: Run, peer: Run, lease: str) -> None:
        try:
            await self._pair(run, peer, lease)
        except Exception as error:  # its name alone: a traceback might show what was sent
            log.error("bench between %s and %s: %s", run.node, peer.node, type(error).__name__)
            run.answers.append(Answer(PAIR, lease, "failed", "the collector failed", 0))
        finally:
            self.release(run)
            self.release(peer)

    async def _pair(self, run: Run, peer: Run, lease: str) -> None:
        """The receiver first; only where it says that it listens is the sender sent."""
        token = secrets.token_bytes(TOKEN_BYTES)
        receive = pb.ReceiveTcp(
            lease=lease, peer=run.node, token=token, expires_s=EXPIRES_S, bytes=BYTES, seconds=SECONDS
        )
        other = f"{peer.node}: "
        with self._agents.ask(peer.node, pb.Directive(id=f"{lease}-to", receive_tcp=receive)) as receiver:
            if receiver is None:
                return run.answers.append(_gone(lease, peer.node))
            run.lines.put_nowait(f"{other}{PAIR}: queued")
            said = await self._next(run, receiver, other)
            if said is None:
                return run.answers.append(self._silent(PAIR, lease, peer.node))
            if isinstance(said, pb.DirectiveResult):
                outcome = _OUTCOMES.get(said.outcome, "failed")
                outcome = "failed" if outcome == "done" else outcome
                return run.answers.append(Answer(PAIR, lease, outcome, said.message[:500], 0, peer.node))
            if not said.valid:
                why = "it does not say where it listens"
                return run.answers.append(Answer(PAIR, lease, "failed", why, 0, peer.node))
            send = pb.SendTcp(
                lease=lease, peer=peer.node, token=token, address=said, bytes=BYTES, seconds=SECONDS
            )
            with self._agents.ask(run.node, pb.Directive(id=lease, send_tcp=send)) as sender:
                if sender is None:
                    answer = _gone(lease, run.node)
                else:
                    run.lines.put_nowait(f"{PAIR}: queued")
                    result = await self._heard(run, sender)
                    answer = (
                        self._silent(PAIR, lease, run.node)
                        if result is None
                        else _answer(PAIR, lease, result)
                    )
            run.answers.append(answer)
            ended = await self._heard(run, receiver, other, WORD_S)
            if ended is None:  # nobody came to it: it is taken until it has closed its port
                self.release(run)
                await self._heard(run, receiver, other)
            elif ended.outcome != pb.OUTCOME_DONE:
                run.lines.put_nowait(f"{other}{PAIR}: {ended.message[:500]}")


_OUTCOMES = {
    pb.OUTCOME_DONE: "done",
    pb.OUTCOME_REFUSED: "refused",
    pb.OUTCOME_UNSUPPORTED: "unsupported",
}


def _gone(lease: str, node: str) -> Answer:
    return Answer(PAIR, lease, "silent", f"the agent of {node} is no longer connected", 0)


def _answer(bench: str, lease: str, result: pb.DirectiveResult) -> Answer:
    outcome = _OUTCOMES.get(result.outcome, "failed")
    rows = result.rows
    if not rows and re.match(
        r"\d+ [a-z]", result.message
    ):  # an agent that does not count them: "8 ok, 1 skipped"
        rows = 1
    return Answer(bench, lease, outcome, result.message[:500], rows)


def new_lease(why: str) -> str:
    """A name that no other run has; `why` is `run` or `retest`."""
    return f"{why}-{secrets.token_hex(8)}"


def check_pair(node: str, peer: str, benches: Sequence[str], gpu: str) -> None:
    """Whether a run that names another node, or needs one, is one that there can be.

    Raises:
        PeopleError: It is not.
    """
    if not peer:
        if PAIR in benches:
            raise PeopleError(f"{PAIR} is a stream to another node: give --peer NODE")
        return
    if tuple(benches) != (PAIR,):
        raise PeopleError(
            f"only {PAIR} goes to another node: fleet bench run {node[:80]} {PAIR} --peer {peer[:80]}"
        )
    if gpu:
        raise PeopleError(f"{PAIR} is a bench of the host: leave --gpu out")
    if peer == node:
        raise PeopleError(f"{node[:80]} is no peer of itself: see tcp_loopback in docs/benches.md")


def check_names(benches: Sequence[str]) -> tuple[str, ...]:
    """The benches to run, each once.

    Raises:
        PeopleError: Too many, or a name that none can have.
    """
    names = tuple(dict.fromkeys(benches)) or QUICK
    if len(names) > MOST_BENCHES:
        raise PeopleError(f"at most {MOST_BENCHES} benches at once")
    for name in names:
        if not _NAME.fullmatch(name):
            raise NoSuch(f"no bench {name[:60]!r}")
    return names
