"""Benches that somebody asked for: one at a time per node, few at once, each known by its lease.

query or retest -> here -> ingest -> the agent, which says how it gets on and sends rows of table `bench`
under the lease. What was asked goes on when whoever asked goes away. Belongs to the event loop.
"""

import asyncio
import contextlib
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

PER_MINUTE = 30
"""Asked for by people, of the whole fleet."""

_NAME = re.compile(r"[a-z0-9_]{1,40}")


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
    """

    bench: str
    lease: str
    outcome: str
    message: str
    rows: int


@dataclass(slots=True)
class Run:
    """What was asked of one node.

    Attributes:
        node: Where.
        by: Who asked.
        began: Monotonic seconds.
        answers: Of the benches that have ended.
        lines: How it gets on; None = it is over.
    """

    node: str
    by: str
    began: float
    answers: list[Answer] = field(default_factory=list)
    lines: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

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
            until = self._clock() + self._answer_s
            while (left_s := until - self._clock()) > 0:
                with contextlib.suppress(TimeoutError):
                    said = await asyncio.wait_for(asked.said.get(), left_s)
                    if isinstance(said, pb.DirectiveResult):
                        return _answer(bench, lease, said)
                    run.lines.put_nowait(said)
        return Answer(
            bench, lease, "silent", f"the agent of {run.node} did not answer within {self._answer_s:.0f} s", 0
        )


_OUTCOMES = {
    pb.OUTCOME_DONE: "done",
    pb.OUTCOME_REFUSED: "refused",
    pb.OUTCOME_UNSUPPORTED: "unsupported",
}


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
