"""A stream between two nodes: who is told what and when, where the secret goes, what ends without a value."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
import pytest

from gpufleet.v1 import fleet_pb2, fleet_pb2_grpc
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.bench_runs import MOST_PAIRS, PER_MINUTE, BenchRuns, Listening, check_pair
from gpufleet_collector.people import NotNow, PeopleError

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Agent, Kit


class Asking:
    """A `fleet bench run NODE tcp --peer PEER` in a thread."""

    def __init__(self, address: str, node: str, peer: str) -> None:
        self.lines: list[str] = []
        self.documents = b""
        self.status: grpc.StatusCode | None = None
        self.text = ""
        channel = grpc.insecure_channel(address)
        request = fleet_pb2.RunBenchRequest(node=node, benches=["tcp"], peer=peer, author="ana")
        self.call = fleet_pb2_grpc.FleetServiceStub(channel).RunBench(request, timeout=120)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for reply in self.call:
                self.documents += reply.json
                if reply.progress:
                    self.lines.append(reply.progress)
        except grpc.RpcError:
            self.status = self.call.code()
            self.text = str(self.call.details())

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def agents(kit: Kit, address: str) -> tuple[Agent, Agent]:
    made = []
    for node in ("n1", "n2"):
        agent = kit.agent(address)
        agent.hello(node=node, machine_id=f"m-{node}", spool_id=f"s-{node}")
        made.append(agent)
    return made[0], made[1]


def answer(
    directive: pb.Directive, message: str, outcome: pb.Outcome.ValueType = pb.OUTCOME_FAILED
) -> pb.StreamRequest:
    return pb.StreamRequest(
        directive_result=pb.DirectiveResult(id=directive.id, outcome=outcome, message=message)
    )


def listens(directive: pb.Directive, where: str) -> pb.StreamRequest:
    return pb.StreamRequest(directive_progress=pb.DirectiveProgress(id=directive.id, listening=where))


def test_the_sender_is_sent_where_the_receiver_listens_and_the_token_goes_to_both_alone(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    running = kit.start()
    sender, receiver = agents(kit, running.address)
    asking = Asking(running.address, "n1", "n2")
    receiver.until(lambda: bool(receiver.directives), 60)
    [first] = receiver.directives
    wanted = first.receive_tcp
    assert (wanted.peer, len(wanted.token), wanted.expires_s) == ("n1", 32, 30.0)
    assert (wanted.bytes, wanted.seconds) == (2 << 30, 5.0)
    sender.request(listens(first, "192.0.2.66:22"))  # not who was asked
    receiver.request(listens(first, "192.0.2.2:40001"))
    sender.until(lambda: bool(sender.directives), 60)
    [second] = sender.directives
    sent = second.send_tcp
    assert (sent.address, sent.peer, sent.token) == ("192.0.2.2:40001", "n2", wanted.token)
    assert sent.lease == wanted.lease == second.id != first.id
    sender.request(answer(second, "no route"))
    receiver.request(answer(first, "failed: nobody came within 30 s"))
    asking.end()
    assert asking.status is None
    assert b'"failed"' in asking.documents
    assert asking.lines == [
        "n2: tcp: queued",
        "tcp: queued",
        "n2: tcp: failed: nobody came within 30 s",
    ]
    audited = running.one("SELECT string_agg(actor || ' ' || target || ' ' || args, ' ') FROM live.audit")
    assert "ana n1 n2" in str(audited)
    told = f"{audited} {caplog.text} {asking.documents!r} {asking.lines}"
    for secret in (wanted.token.hex(), repr(wanted.token)[2:20]):
        assert secret not in told
    assert "192.0.2.2" not in told

    again = Asking(running.address, "n2", "n1")
    sender.until(lambda: len(sender.directives) > 1, 60)
    assert sender.directives[1].receive_tcp.token != wanted.token
    sender.request(answer(sender.directives[1], "skipped: host is busy", pb.OUTCOME_REFUSED))
    again.end()
    assert again.text == "the agent of n1 refused: skipped: host is busy"


@pytest.mark.parametrize(
    ("outcome", "text", "said"),
    [
        (
            pb.OUTCOME_UNSUPPORTED,
            "this agent cannot do this directive",
            "the agent of n2 cannot run bench tcp",
        ),
        (pb.OUTCOME_REFUSED, "streams between nodes are off", "the agent of n2 refused: streams between"),
    ],
)
def test_a_receiver_that_does_not_is_named_and_no_sender_is_asked(
    kit: Kit, outcome: pb.Outcome.ValueType, text: str, said: str
) -> None:
    running = kit.start()
    sender, receiver = agents(kit, running.address)
    asking = Asking(running.address, "n1", "n2")
    receiver.until(lambda: bool(receiver.directives), 60)
    receiver.request(answer(receiver.directives[0], text, outcome))
    asking.end()
    assert asking.status is grpc.StatusCode.FAILED_PRECONDITION
    assert asking.text.startswith(said)
    assert sender.directives == []


def test_a_receiver_that_says_nonsense_sends_nobody_anywhere(kit: Kit) -> None:
    running = kit.start()
    sender, receiver = agents(kit, running.address)
    asking = Asking(running.address, "n1", "n2")
    receiver.until(lambda: bool(receiver.directives), 60)
    receiver.request(listens(receiver.directives[0], "metadata.internal:80"))
    asking.end()
    assert b"n2: it does not say where it listens" in asking.documents
    assert sender.directives == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("10.0.0.1:5000", True), ("[fd00::1]:5000", True), ("host:5000", False), ("10.0.0.1", False),
        ("10.0.0.1:0", False), ("10.0.0.1:65536", False), ("10.0.0.1:\u0665", False), ("", False),
        ("10.0.0.1:50 ", False),
    ],
)  # fmt: skip
def test_where_a_receiver_listens_is_an_address_and_a_port(text: str, valid: bool) -> None:
    assert Listening(text).valid is valid


class Anybody:
    """Agents of every node but `away`."""

    def connected(self, node: str) -> bool:
        return node != "away"

    def ask(self, node: str, directive: pb.Directive) -> object:
        raise AssertionError("nobody is asked")


def test_both_nodes_are_taken_and_few_pairs_at_once() -> None:
    async def work() -> None:
        runs = BenchRuns(Anybody())  # type: ignore[arg-type]
        one, two = runs.reserve_pair("n1", "n2", "ana")
        assert runs.busy("n1")
        assert runs.busy("n2")
        with pytest.raises(NotNow, match="runs on n2 already"):
            runs.reserve_pair("n3", "n2", "ana")
        with pytest.raises(NotNow, match="runs on n1 already"):
            runs.reserve_pair("n1", "n3", "ana")
        for node, peer in (("n3", "away"), ("away", "n3")):
            with pytest.raises(NotNow, match="no agent of away"):
                runs.reserve_pair(node, peer, "ana")
        assert not runs.busy("n3"), "what was taken for nothing is given back"
        for number in range(1, MOST_PAIRS):
            runs.reserve_pair(f"a{number}", f"b{number}", "ana")
        with pytest.raises(NotNow, match=f"{MOST_PAIRS} pairs of nodes measure already"):
            runs.reserve_pair("n3", "n4", "ana")
        runs.reserve("n3", "ana")
        runs.release(one)
        runs.release(two)
        runs.reserve_pair("n1", "n2", "ana")
        for number in range(PER_MINUTE - MOST_PAIRS - 2):
            runs.reserve(f"c{number}", "ana")
        with pytest.raises(NotNow, match="within a minute"):
            runs.reserve("last", "ana")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("peer", "benches", "gpu", "said"),
    [
        ("", ["tcp"], "", "give --peer NODE"),
        ("n2", [], "", "only tcp goes to another node"),
        ("n2", ["h2d"], "", "only tcp goes to another node"),
        ("n2", ["tcp", "h2d"], "", "only tcp goes to another node"),
        ("n2", ["tcp"], "0", "leave --gpu out"),
        ("n1", ["tcp"], "", "no peer of itself"),
    ],
)
def test_what_no_pair_is(peer: str, benches: list[str], gpu: str, said: str) -> None:
    with pytest.raises(PeopleError, match=said):
        check_pair("n1", peer, benches, gpu)
    check_pair("n1", "", ["h2d"], "0")
    check_pair("n1", "n2", ["tcp"], "")
