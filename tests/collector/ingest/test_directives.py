"""A run of benches over real streams: who may answer, what outlives the caller, what an old agent is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from gpufleet.v1 import fleet_pb2, fleet_pb2_grpc
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.bench_runs import Answer, BenchRuns

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit


def result(directive: pb.Directive, message: str, outcome: pb.Outcome.ValueType) -> pb.StreamRequest:
    said = pb.DirectiveResult(id=directive.id, outcome=outcome, message=message)
    return pb.StreamRequest(directive_result=said)


class Asking:
    """A `fleet bench run` in a thread, until it ends or is cancelled."""

    def __init__(self, address: str, node: str, bench: str) -> None:
        self.lines: list[str] = []
        self.status: grpc.StatusCode | None = None
        self.text = ""
        channel = grpc.insecure_channel(address)
        request = fleet_pb2.RunBenchRequest(node=node, benches=[bench], author="ana")
        self.call = fleet_pb2_grpc.FleetServiceStub(channel).RunBench(request, timeout=120)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for reply in self.call:
                if reply.progress:
                    self.lines.append(reply.progress)
        except grpc.RpcError:
            self.status = self.call.code()
            self.text = str(self.call.details())

    def leave(self) -> None:
        self.call.cancel()  # type: ignore[no-untyped-call]
        self.end()

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def connected(kit: Kit, address: str, node: str) -> Agent:
    agent = kit.agent(address)
    agent.hello(node=node, machine_id=f"m-{node}", spool_id=f"s-{node}")
    return agent


def test_only_the_agent_that_was_asked_may_answer(kit: Kit) -> None:
    running = kit.start()
    agent, other = (connected(kit, running.address, node) for node in ("n1", "n2"))
    asking = Asking(running.address, "n1", "h2d")
    agent.until(lambda: bool(agent.directives), 60)
    [directive] = agent.directives
    assert directive.run_bench.bench == "h2d"
    assert directive.run_bench.lease == directive.id
    progress = pb.DirectiveProgress(id=directive.id, text="h2d: waits for the bench that runs")
    other.request(result(directive, "8 ok", pb.OUTCOME_DONE))
    agent.request(pb.StreamRequest(directive_progress=progress))
    agent.request(result(directive, "no bench h2d: there is clock", pb.OUTCOME_REFUSED))
    asking.end()
    assert asking.lines == ["h2d: queued", "h2d: waits for the bench that runs"]
    assert asking.status is grpc.StatusCode.FAILED_PRECONDITION
    assert asking.text == "the agent of n1 refused: no bench h2d: there is clock"


def test_an_agent_that_cannot_is_named_so(kit: Kit) -> None:
    running = kit.start()
    agent = connected(kit, running.address, "n1")
    asking = Asking(running.address, "n1", "h2d")
    agent.until(lambda: bool(agent.directives), 60)
    agent.request(result(agent.directives[0], "this agent cannot do run_bench", pb.OUTCOME_UNSUPPORTED))
    asking.end()
    assert asking.status is grpc.StatusCode.FAILED_PRECONDITION
    assert asking.text.startswith("the agent of n1 cannot run bench h2d: this agent cannot do run_bench")


def test_a_run_goes_on_when_its_caller_goes_away_and_over_a_new_stream(kit: Kit) -> None:
    running = kit.start()
    agent = connected(kit, running.address, "n1")
    asking = Asking(running.address, "n1", "h2d")
    agent.until(lambda: bool(agent.directives), 60)
    asking.leave()
    second = Asking(running.address, "n1", "h2d")
    second.end()
    assert second.status is grpc.StatusCode.FAILED_PRECONDITION
    assert second.text.startswith("a bench runs on n1 already: asked for by ana")
    again = connected(kit, running.address, "n1")  # the agent's stream broke and it came back
    again.request(result(agent.directives[0], "0", pb.OUTCOME_FAILED))

    def free() -> bool:
        third = Asking(running.address, "n1", "clock")
        kit.until(lambda: bool(third.lines) or third.status is not None, 60)
        started = bool(third.lines)
        third.leave()
        return started

    kit.until(free, 60)
    said = "SELECT min(actor || ' ' || target) FROM live.audit WHERE verb = 'bench run'"
    assert running.one(said) == "ana n1"


def test_an_agent_that_never_answers_ends_the_run(kit: Kit) -> None:
    class Deaf:
        said: asyncio.Queue[str | pb.DirectiveResult]

        def __init__(self) -> None:
            self.said = asyncio.Queue()

        def connected(self, node: str) -> bool:
            return True

        @contextmanager
        def ask(self, node: str, directive: pb.Directive) -> Iterator[Deaf]:
            yield self

    async def work() -> list[Answer]:
        runs = BenchRuns(Deaf(), answer_s=0.05)
        run = runs.reserve("n1", "ana")
        runs.start(run, "", ["h2d", "clock"], ["run-1", "run-2"])
        assert [line async for line in run.progress()] == ["h2d: queued"]
        assert not runs.busy("n1")
        return run.answers

    [answer] = asyncio.run(work())
    assert (answer.outcome, "did not answer" in answer.message) == ("silent", True)
