"""Streams between two hosts under a lease: what measures them, and what an agent may be made to do."""

import asyncio
import base64
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufleet.config import ConfigError, parse
from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_agent import lease, tcp
from gpufleet_agent.bench_runner import BenchRunner
from gpufleet_agent.benches import METRICS
from gpufleet_agent.child import module_command
from gpufleet_agent.config import AgentConfig, Meeting
from gpufleet_agent.directives import Directives
from gpufleet_agent.gate import Lock, Rules
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.probe import Sweep
from gpufleet_agent.progress import SIZE, new_memory

NAMES = [metric.name for metric in METRICS]
TOKEN = bytes(range(100, 100 + tcp.TOKEN_BYTES))
SHOWN = (TOKEN, TOKEN.hex().encode(), base64.b64encode(TOKEN))


class End:
    """An agent's runner and directives, and what they delivered and said."""

    def __init__(self, folder: Path, meeting: Meeting, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.sweeps: list[Sweep] = []
        self.said: list[str] = []
        self.where: asyncio.Queue[str] = asyncio.Queue()
        self.runner = BenchRunner(
            HostSettings(driver="none"), str(folder), str(folder / "lock"), list, self.sweeps.append, "",
            lambda text: None, module_command("gpufleet_agent.bench"), more.pop("rules", Rules(load=100.0)),
            **more,
        )  # fmt: skip
        nothing: Any = None
        self.directives = Directives(
            self.runner, nothing, nothing, lambda name, text: self.said.append(text), meeting,
            lambda name, address: self.where.put_nowait(address),
        )  # fmt: skip

    async def obey(self, **kind: Any) -> pb.DirectiveResult:
        return await self.directives.obey(pb.Directive(id="run-1", **kind))

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(NAMES, cells, strict=True)) for sweep in self.sweeps for cells in sweep.rows]


HERE = Meeting(listen="127.0.0.1")


def receive(**more: Any) -> pb.ReceiveTcp:
    given: dict[str, Any] = {
        "lease": "run-1",
        "peer": "n1",
        "token": TOKEN,
        "expires_s": 30.0,
        "bytes": 8 << 20,
        "seconds": 5.0,
    }
    return pb.ReceiveTcp(**(given | more))


def send(address: str, **more: Any) -> pb.SendTcp:
    given: dict[str, Any] = {"lease": "run-1", "peer": "n2", "token": TOKEN, "bytes": 8 << 20, "seconds": 5.0}
    return pb.SendTcp(address=address, **(given | more))


def seen_of(pid: int) -> bytes:
    """All that others can see of a process and of those that it started."""
    seen = b""
    for one in [pid, *(int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]:
        seen += b"".join(Path(f"/proc/{one}/{name}").read_bytes() for name in ("cmdline", "environ", "comm"))
    return seen


@pytest.mark.slow
def test_only_the_sender_has_a_row_and_nobody_sees_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = b""

    async def work() -> tuple[End, End]:
        nonlocal seen
        one, two = End(tmp_path / "one", HERE), End(tmp_path / "two", HERE)
        receiving = asyncio.create_task(two.obey(receive_tcp=receive()))
        where = await asyncio.wait_for(two.where.get(), 60)
        assert two.runner._child is not None
        seen = seen_of(two.runner._child.pid)
        sent = await one.obey(send_tcp=send(where))
        got = await asyncio.wait_for(receiving, 60)
        assert (sent.outcome, sent.message, sent.rows) == (pb.OUTCOME_DONE, "1 ok", 1)
        assert (got.outcome, got.message, got.rows) == (pb.OUTCOME_DONE, "ok", 0)
        return one, two

    one, two = asyncio.run(work())
    assert two.rows() == []
    [row] = one.rows()
    assert (row["entity"], row["peer"], row["link"], row["bench"]) == ("node:", "n2", "tcp:n2", "tcp")
    assert (row["status"], row["unit"], row["lease"], row["reason"]) == ("ok", "GB/s", "run-1", "")
    assert row["value"] > 0
    assert row["convention"].startswith("one_stream")
    assert b"gpufleet_agent.bench" in seen
    logged = repr((caplog.records, caplog.text, *capfd.readouterr(), one.said, two.said, one.rows())).encode()
    for secret in SHOWN:
        assert secret not in seen + logged


@pytest.mark.slow
def test_a_stranger_gets_nothing_and_a_host_that_is_busy_does_not_listen(tmp_path: Path) -> None:
    async def work() -> None:
        end = End(tmp_path / "one", HERE)
        running = asyncio.create_task(end.obey(receive_tcp=receive()))
        address = lease.endpoint(await asyncio.wait_for(end.where.get(), 60))
        with socket.create_connection(address, timeout=60) as stranger:
            stranger.sendall(bytes(tcp.TOKEN_BYTES))
            answer = await asyncio.wait_for(running, 60)
        assert answer.outcome == pb.OUTCOME_FAILED
        assert answer.message == "failed: who connected does not have the token"

        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            address = deaf.getsockname()[:2]
            answer = await end.obey(send_tcp=send(lease.written(*address)))
        assert (answer.outcome, answer.message) == (pb.OUTCOME_FAILED, "1 failed")
        [row] = end.rows()
        assert (row["status"], row["reason"], row["value"]) == ("failed", "Connection refused", None)

        answer = await end.obey(receive_tcp=receive(expires_s=0.2))
        assert answer.message == "failed: nobody came within 0.2 s"
        end.where.get_nowait()

        lock = Lock.take(str(tmp_path / "one" / "lock"))
        assert lock is not None
        try:
            answer = await end.obey(receive_tcp=receive())
            assert (answer.outcome, answer.rows) == (pb.OUTCOME_REFUSED, 0)
            assert answer.message.startswith("skipped: another bench runs")
            assert end.where.empty()
            answer = await end.obey(send_tcp=send(lease.written(*address)))
            assert (answer.outcome, answer.message) == (pb.OUTCOME_REFUSED, "1 skipped")
        finally:
            lock.release()

    asyncio.run(work())


@pytest.mark.slow
def test_in_a_unit_of_its_own_the_token_goes_with_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bench.sock"
    seen = b""

    async def work() -> None:
        nonlocal seen
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        one, two = End(tmp_path / "one", HERE), End(tmp_path / "two", HERE, unit=str(path))
        receiving = asyncio.create_task(two.obey(receive_tcp=receive()))
        connection, _ = await asyncio.to_thread(listener.accept)
        command = [sys.executable, "-m", "gpufleet_agent.main", "bench-unit"]
        unit = subprocess.Popen(command, stdin=connection.fileno())
        connection.close()
        try:
            where = await asyncio.wait_for(two.where.get(), 60)
            seen = seen_of(unit.pid)
            sent = await one.obey(send_tcp=send(where))
            assert (sent.outcome, (await asyncio.wait_for(receiving, 60)).message) == (pb.OUTCOME_DONE, "ok")
        finally:
            listener.close()
            unit.kill()
            unit.wait()

    asyncio.run(work())
    assert b"bench-unit" in seen
    for secret in SHOWN:
        assert secret not in seen


def test_what_an_agent_does_not_do(tmp_path: Path) -> None:
    async def refused(meeting: Meeting, **kind: Any) -> str:
        end = End(tmp_path / "one", meeting)
        answer = await end.obey(**kind)
        assert (answer.outcome, end.sweeps, end.said) == (pb.OUTCOME_REFUSED, [], [])
        return answer.message

    async def work() -> None:
        for kind in ({"receive_tcp": receive()}, {"send_tcp": send("127.0.0.1:5000")}):
            assert "benches.tcp.listen is not set" in await refused(Meeting(), **kind)
        for wrong in (
            {"token": b""}, {"token": TOKEN[:-1]}, {"token": TOKEN + b"x"}, {"peer": ""}, {"peer": "a b"},
            {"bytes": 0}, {"bytes": lease.MOST_BYTES + 1}, {"seconds": 0.0}, {"seconds": 5.1},
            {"seconds": float("nan")},
        ):  # fmt: skip
            assert await refused(HERE, receive_tcp=receive(**wrong))
            assert await refused(HERE, send_tcp=send("127.0.0.1:5000", **wrong))
        for wait in (0.0, -1.0, 30.5, float("nan"), float("inf")):
            assert "at most 30" in await refused(HERE, receive_tcp=receive(expires_s=wait))
        for address in (
            "", "host:5000", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:5 ", "0.0.0.0:5000",
            "[::]:5000", "::1:5000", "224.0.0.1:5000", "[fe80::1%eth0]:5000", "[127.0.0.1]:5000",
            "255.255.255.255:5000", "127.0.0.1:\u0665",
        ):  # fmt: skip
            assert "no IP address" in await refused(HERE, send_tcp=send(address)), address
        for address in ("127.0.0.1:22", "[::1]:22", "127.9.9.9:22", "[::ffff:127.0.0.1]:22"):
            there = Meeting(listen="192.0.2.1")
            assert await refused(there, send_tcp=send(address)) == "it was to send to this host itself"

    asyncio.run(work())


def test_an_order_is_read_once_and_does_not_print_its_token() -> None:
    order = lease.Order(peer="n1", token=TOKEN, bytes=1, seconds=1.0, own="127.0.0.1")
    memory = new_memory(msgspec.json.encode(order))
    try:
        assert lease.take(memory) == order
        assert os.fstat(memory).st_size == SIZE
        with pytest.raises(ValueError, match="truncated"):
            lease.take(memory)
    finally:
        os.close(memory)
    assert repr(TOKEN)[2:10] not in repr(order) + str(order) + f"{order}"


@pytest.mark.parametrize("text", ["10.0.0.1:1", "[fd00::1]:65535", "127.0.0.1:40000"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert lease.written(*lease.endpoint(text)) == text


@pytest.mark.parametrize(
    "listen", ["0.0.0.0", "::", "host", "10.0.0.1:80", "fe80::1%eth0", "224.0.0.1", "10.0.0.0/8"]
)
def test_one_address_of_the_host_is_named_in_the_configuration(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"key benches\.tcp\.listen"):
        parse(f'[benches.tcp]\nlisten = "{listen}"'.encode(), AgentConfig, "agent.toml")
