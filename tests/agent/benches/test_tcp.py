"""One stream over TCP: what the receiver takes, and from whom."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gpufleet_agent import tcp
from gpufleet_agent.gate import Preempted

TOKEN = bytes(range(tcp.TOKEN_BYTES))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as made:
        yield made


class Receiver:
    """A receiver in a thread."""

    def __init__(self, listener: socket.socket, limit: tcp.Limit, check: Any = lambda: None) -> None:
        self.got: Any = None
        self.address = listener.getsockname()[:2]

        def receive() -> None:
            try:
                self.got = tcp.serve(listener, TOKEN, limit, check)
            except Exception as error:
                self.got = error

        self.thread = threading.Thread(target=receive, daemon=True)
        self.thread.start()

    def end(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.got


@pytest.mark.parametrize("size", [1, 1000, tcp.BLOCK_BYTES, 3 * tcp.BLOCK_BYTES + 17])
def test_both_ends_count_the_same_bytes(listener: socket.socket, size: int) -> None:
    limit = tcp.Limit(size, 60.0)
    receiver = Receiver(listener, limit)
    sent = tcp.send(receiver.address, TOKEN, limit)
    got = receiver.end()
    assert sent.bytes == got.bytes == size
    assert sent.gb_per_s > 0
    assert got.gb_per_s > 0


@pytest.mark.parametrize(
    "said", [b"", b"short", bytes(tcp.TOKEN_BYTES), TOKEN[:-1] + b"x", b"GET / HTTP/1.1\r\n" * 99]
)
def test_who_has_no_token_is_not_listened_to(listener: socket.socket, said: bytes) -> None:
    receiver = Receiver(listener, tcp.Limit(1 << 20, 60.0))
    with socket.create_connection(receiver.address) as stranger:
        with suppress(OSError):  # it may have been thrown out by now
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        got = receiver.end()
    assert isinstance(got, tcp.Refused)
    assert "does not have the token" in str(got)


def test_a_sender_with_another_token_has_no_result(listener: socket.socket) -> None:
    receiver = Receiver(listener, tcp.Limit(1 << 20, 60.0))
    with pytest.raises((tcp.Refused, OSError)):
        tcp.send(receiver.address, TOKEN[::-1], tcp.Limit(64 << 20, 60.0))
    assert isinstance(receiver.end(), tcp.Refused)


def test_more_than_agreed_ends_it(listener: socket.socket) -> None:
    receiver = Receiver(listener, tcp.Limit(1 << 20, 60.0))
    with pytest.raises((tcp.Refused, OSError)):
        tcp.send(receiver.address, TOKEN, tcp.Limit(64 << 20, 60.0))
    assert "more than 1048576 bytes" in str(receiver.end())


def test_nobody_comes(listener: socket.socket) -> None:
    with pytest.raises(tcp.Refused, match="deadline"):
        tcp.serve(listener, TOKEN, tcp.Limit(1 << 20, 0.3))


def test_a_sender_that_stops_is_not_waited_for(listener: socket.socket) -> None:
    receiver = Receiver(listener, tcp.Limit(1 << 20, 1.0))
    with socket.create_connection(receiver.address) as stranger:
        stranger.sendall(TOKEN + b"x" * 1000)
        assert "deadline" in str(receiver.end())


def test_a_receiver_that_does_not_read_is_not_waited_for(listener: socket.socket) -> None:
    with pytest.raises(tcp.Refused, match="deadline"):
        tcp.send(listener.getsockname()[:2], TOKEN, tcp.Limit(64 << 20, 1.0))


def test_one_that_answers_with_another_number_is_not_believed(listener: socket.socket) -> None:
    def lie() -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            connection.sendall((7).to_bytes(8, "big"))

    thread = threading.Thread(target=lie, daemon=True)
    thread.start()
    with pytest.raises(tcp.Refused, match="7 of 1000 bytes"):
        tcp.send(listener.getsockname()[:2], TOKEN, tcp.Limit(1000, 60.0))
    thread.join(60)


def test_a_run_that_must_make_way_ends_both(listener: socket.socket) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Preempted("a job came")

    receiver = Receiver(listener, tcp.Limit(1 << 30, 600.0), check)
    stop.set()
    assert isinstance(receiver.end(), Preempted)
    with pytest.raises(Preempted):
        tcp.send(receiver.address, TOKEN, tcp.Limit(1 << 30, 600.0), check)


@pytest.mark.parametrize("token", [b"", b"short", bytes(33)])
def test_a_token_has_its_length(listener: socket.socket, token: bytes) -> None:
    with pytest.raises(ValueError, match="a token of"):
        tcp.serve(listener, token, tcp.Limit())
    with pytest.raises(ValueError, match="a token of"):
        tcp.send(("127.0.0.1", 1), token, tcp.Limit())


def test_who_waits_for_a_lease_ends_with_it(listener: socket.socket) -> None:
    with pytest.raises(tcp.Refused, match=r"nobody came within 0\.2 s"):
        tcp.serve(listener, TOKEN, tcp.Limit(1 << 20, 60.0), wait_s=0.2)


def test_whoever_comes_second_is_not_let_in(listener: socket.socket) -> None:
    address = listener.getsockname()[:2]
    receiver = Receiver(listener, tcp.Limit(1 << 20, 60.0))
    with socket.create_connection(address) as first:
        until = time.monotonic() + 60
        while listener.fileno() >= 0 and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=60)
        first.sendall(TOKEN + b"x" * 10)
        first.shutdown(socket.SHUT_WR)
        assert receiver.end().bytes == 10


def test_a_slow_stream_is_what_was_sent_in_its_time(listener: socket.socket) -> None:
    limit = tcp.Limit(1 << 40, 60.0)
    receiver = Receiver(listener, limit)
    sent = tcp.send(receiver.address, TOKEN, limit, for_s=0.0, source="127.0.0.1")
    assert 0 < sent.bytes == receiver.end().bytes < 1 << 40


def test_where_nobody_listens_or_from_where_we_are_not_there_is_no_stream() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = deaf.getsockname()[:2]
        with pytest.raises(OSError, match="refused"):
            tcp.send(address, TOKEN, tcp.Limit(1 << 20, 60.0))
        with pytest.raises(OSError, match="requested address"):
            tcp.send(address, TOKEN, tcp.Limit(1 << 20, 60.0), source="192.0.2.1")


def test_a_run_that_must_make_way_does_not_wait_for_a_connection() -> None:
    def check() -> None:
        raise Preempted("a job came")

    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = []
        try:
            for _ in range(4):  # fill the queue: the next one gets no answer
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(full.getsockname())
                waiting.append(one)
            with pytest.raises(Preempted):
                tcp.send(full.getsockname()[:2], TOKEN, tcp.Limit(1 << 20, 60.0), check)
        finally:
            for one in waiting:
                one.close()
