"""What a collector may ask of this agent, and what is done about it. A closed set; the rest is refused."""

import math
import re
from collections.abc import Awaitable, Callable

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent import lease, tcp
from gpufleet_agent.bench_runner import BenchRunner, outcome, statuses
from gpufleet_agent.benches import BENCHES, TOOLS
from gpufleet_agent.config import NOWHERE, Meeting
from gpufleet_agent.control import LEAST_S as LEAST_RELEASE_S
from gpufleet_agent.control import MOST_S as MOST_RELEASE_S
from gpufleet_agent.control import RELEASE_S
from gpufleet_agent.isolation import Isolation

LEAST_S, MOST_S = 0.5, 86400.0
"""Intervals outside of this are refused: one would burden the host, the other amounts to switching off."""


class Directives:
    """Does what directives say; `push` hands them over one by one.

    Args:
        benches: Runs benches.
        isolation: Has the probes' intervals.
        release: Lets go of the driver for so many seconds; processes that hold it still.
        tell: Says how a directive gets on: its id, one line.
        meeting: Whether and where streams from other nodes are received, and to them are sent.
        listening: Says where a directive listens: its id, IP:PORT.
    """

    def __init__(
        self,
        benches: BenchRunner,
        isolation: Isolation,
        release: Callable[[float], Awaitable[list[int]]],
        tell: Callable[[str, str], None] = lambda name, text: None,
        meeting: Meeting = NOWHERE,
        listening: Callable[[str, str], None] = lambda name, address: None,
    ) -> None:
        self._release = release
        self._tell = tell
        self._meeting = meeting
        self._listening = listening
        self._benches = benches
        self._isolation = isolation

    async def obey(self, directive: pb.Directive) -> pb.DirectiveResult:
        """The outcome. Credit and pauses concern `push` alone and do not come here."""
        work: dict[str, Callable[[pb.Directive], Awaitable[pb.DirectiveResult]]] = {
            "run_bench": self._run_bench,
            "set_interval": self._set_interval,
            "pause_driver": self._pause_driver,
            "resume_driver": self._resume_driver,
            "receive_tcp": self._receive_tcp,
            "send_tcp": self._send_tcp,
        }
        kind = directive.WhichOneof("kind") or ""
        if kind not in work:
            return pb.DirectiveResult(
                id=directive.id,
                outcome=pb.OUTCOME_UNSUPPORTED,
                message=f"this agent cannot do {kind or 'this directive'}",
            )
        result = await work[kind](directive)
        result.id = directive.id
        return result

    async def _run_bench(self, directive: pb.Directive) -> pb.DirectiveResult:
        wanted = directive.run_bench
        if wanted.bench not in BENCHES:
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_REFUSED,
                message=f"no bench {wanted.bench:.60}: there is {', '.join(BENCHES)}",
            )
        if not self._benches.allowed(wanted.bench):
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_REFUSED,
                message=f"{wanted.bench} runs a tool of the host, and is not enabled in agent.toml",
            )
        if self._benches.running:
            self._tell(directive.id, f"{wanted.bench}: waits for the bench that runs")
        usual_s = math.inf if wanted.bench in TOOLS else 60.0  # a tool has a deadline of its own
        deadline_s = wanted.deadline_s if 0 < wanted.deadline_s < 3600 else usual_s
        sweep = await self._benches.run(
            wanted.bench, wanted.entity, wanted.lease or directive.id, deadline_s,
            lambda: self._tell(directive.id, f"{wanted.bench}: runs"),
        )  # fmt: skip
        found = statuses(sweep)
        text = ", ".join(f"{count} {status}" for status, count in found.items()) or "nothing to run it on"
        outcome = pb.OUTCOME_FAILED
        if found.keys() <= {"skipped", "preempted", "contaminated", "unsupported", "ok"}:
            outcome = pb.OUTCOME_DONE if "ok" in found else pb.OUTCOME_REFUSED
        return pb.DirectiveResult(outcome=outcome, message=text, rows=len(sweep.rows))

    async def _receive_tcp(self, directive: pb.Directive) -> pb.DirectiveResult:
        wanted = directive.receive_tcp
        why = self._why_not(wanted)
        if not why and not 0 < wanted.expires_s <= lease.MOST_WAIT_S:
            why = f"a lease of {wanted.expires_s:g} s: at most {lease.MOST_WAIT_S:g}"
        if why:
            return pb.DirectiveResult(outcome=pb.OUTCOME_REFUSED, message=why)
        order = lease.Order(
            peer=wanted.peer, token=wanted.token, bytes=wanted.bytes, seconds=wanted.seconds,
            own=self._meeting.listen, port=self._meeting.port, wait_s=wanted.expires_s,
        )  # fmt: skip
        status, reason = await self._stream(directive.id, wanted.lease, order)
        done, text = pb.OUTCOME_FAILED, f"{status}: {reason}" if reason else status
        if status == "ok":
            done = pb.OUTCOME_DONE
        elif status in ("skipped", "preempted", "contaminated"):
            done = pb.OUTCOME_REFUSED
        return pb.DirectiveResult(outcome=done, message=text)

    async def _send_tcp(self, directive: pb.Directive) -> pb.DirectiveResult:
        wanted = directive.send_tcp
        why = self._why_not(wanted)
        if not why:
            try:
                address, _ = lease.endpoint(wanted.address)
            except ValueError:
                why = "where to send is no IP address with a port"
            else:
                if lease.is_local(address) and not lease.is_local(self._meeting.listen):
                    why = "it was to send to this host itself"
        if why:
            return pb.DirectiveResult(outcome=pb.OUTCOME_REFUSED, message=why)
        order = lease.Order(
            peer=wanted.peer, token=wanted.token, bytes=wanted.bytes, seconds=wanted.seconds,
            own=self._meeting.listen, to=wanted.address,
        )  # fmt: skip
        status, _ = await self._stream(directive.id, wanted.lease, order)
        done = pb.OUTCOME_FAILED
        if status in ("ok", "skipped", "preempted", "contaminated"):
            done = pb.OUTCOME_DONE if status == "ok" else pb.OUTCOME_REFUSED
        return pb.DirectiveResult(outcome=done, message=f"1 {status}", rows=1)

    def _why_not(self, wanted: pb.ReceiveTcp | pb.SendTcp) -> str:
        if not self._meeting.listen:
            return "streams between nodes are off: benches.tcp.listen is not set in its agent.toml"
        if len(wanted.token) != tcp.TOKEN_BYTES or not re.fullmatch(r"[A-Za-z0-9._~-]{1,300}", wanted.peer):
            return "no token, or no peer"
        if not (0 < wanted.bytes <= lease.MOST_BYTES and 0 < wanted.seconds <= lease.MOST_S):
            return f"at most {lease.MOST_BYTES} bytes and {lease.MOST_S:g} s"
        return ""

    async def _stream(self, name: str, of: str, order: lease.Order) -> tuple[str, str]:
        if self._benches.running:
            self._tell(name, f"{lease.NAME}: waits for the bench that runs")
        sweep = await self._benches.run(
            lease.NAME, "", of or name, began=lambda: self._tell(name, f"{lease.NAME}: runs"), order=order,
            listening=lambda address: self._listening(name, address),
        )  # fmt: skip
        return outcome(sweep)

    async def _set_interval(self, directive: pb.Directive) -> pb.DirectiveResult:
        wanted = directive.set_interval
        if not LEAST_S <= wanted.interval_s <= MOST_S:
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_REFUSED, message=f"{wanted.interval_s:g} s: give {LEAST_S:g} to {MOST_S:g}"
            )
        if not self._isolation.set_interval(wanted.probe, wanted.interval_s):
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_REFUSED, message=f"no probe {wanted.probe:.60} runs here"
            )
        return pb.DirectiveResult(
            outcome=pb.OUTCOME_DONE,
            message=f"{wanted.probe} every {wanted.interval_s:g} s until the agent is restarted",
        )

    async def _pause_driver(self, directive: pb.Directive) -> pb.DirectiveResult:
        for_s = directive.pause_driver.for_s or RELEASE_S
        if not LEAST_RELEASE_S <= for_s <= MOST_RELEASE_S:
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_REFUSED,
                message=f"{for_s:g} s: give {LEAST_RELEASE_S:g} to {MOST_RELEASE_S:g}",
            )
        holders = await self._release(for_s)
        if holders:
            return pb.DirectiveResult(
                outcome=pb.OUTCOME_FAILED, message=f"stuck in the driver: {', '.join(map(str, holders))}"
            )
        return pb.DirectiveResult(
            outcome=pb.OUTCOME_DONE, message=f"the driver is left alone for {for_s:g} s"
        )

    async def _resume_driver(self, directive: pb.Directive) -> pb.DirectiveResult:
        return pb.DirectiveResult(
            outcome=pb.OUTCOME_DONE,
            message="taken back" if self._isolation.resume() else "it was not released",
        )
