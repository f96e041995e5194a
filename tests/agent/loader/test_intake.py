"""`loader.sock` under honest and hostile senders."""

import array
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.loader import MOST_PROCESSES, MOST_PROCESSES_PER_USER, Loaders
from gpufleet_agent.probe import check_row
from gpufleet_agent.probes.loader import METRICS

Fields = dict[str, Any]

PID = 4_190_001
"""None of ours: a process of this number lives in a written /proc alone."""


def message(**fields: object) -> bytes:
    usual: Fields = {
        "v": 1, "pid_start": 77, "seq": 1, "name": "train", "role": "train", "lib": "torch-2.9.1",
        "rank": 3, "local_rank": 3, "world": 8, "workers": 8, "prefetch": 2, "ready": 0,
        "n": 10, "wait_ns": 1_000_000_000, "busy_ns": 9_000_000_000, "startup_ns": 0, "pause_ns": 0,
        "starved_n": 2, "max_ns": 500_000_000, "hist": [0] * 15 + [10],
    }  # fmt: skip
    return json.dumps(usual | fields).encode()


class World:
    """An intake without a socket, processes written as text, and a clock moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.proc = folder / "proc"
        self.loaders = Loaders(folder / "loader.sock", self.proc, lambda: self.now)

    def process(self, pid: int, start: int, state: str = "S") -> None:
        home = self.proc / str(pid)
        home.mkdir(parents=True, exist_ok=True)
        (home / "stat").write_text(f"{pid} (python) {state} 1 {'0 ' * 17}{start} 0 0\n")

    def end(self, pid: int) -> None:
        (self.proc / str(pid) / "stat").unlink()

    def take(self, of: int = PID, uid: int = 1000, /, **fields: object) -> str:
        return self.loaders.take(of, uid, message(**fields))

    def row(self) -> Row:
        (row,) = self.loaders.rows()
        return row


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.process(PID, 77)
    return made


def test_what_was_told_becomes_a_row(world: World) -> None:
    assert world.take() == ""
    row = world.row()
    cells, reasons = check_row(METRICS, row)
    named = dict(zip((metric.name for metric in METRICS), cells, strict=True))
    assert named["source"] == "hook"
    assert (named["pid"], named["pid_start"], named["uid"], named["loader"]) == (PID, 77, 1000, "train")
    assert (named["state"], named["rank"], named["world"], named["lib"]) == ("live", 3, 8, "torch-2.9.1")
    assert (named["fetches_total"], named["wait_s_total"], named["busy_s_total"]) == (10, 1.0, 9.0)
    assert (named["starved_total"], named["workers"], named["ready"]) == (2, 8, 0)
    assert {name for name, cell in named.items() if cell is None} == {
        metric.name for metric in METRICS if metric.name.startswith(("worker_", "workers_", "pin_"))
    }
    assert set(reasons) == {Reason.NOT_SUPPORTED}


def test_who_it_is_is_not_taken_from_the_text(world: World) -> None:
    world.take(pid_start=123456, uid_told=0, pid=1)
    row = world.row()
    assert (row["pid"], row["pid_start"], row["uid"]) == (PID, 77, 1000)


def test_messages_that_did_not_arrive_cost_no_count(world: World) -> None:
    world.take(seq=500, n=4000)
    assert world.row()["messages_lost_total"] == 0, "an agent that starts later missed nothing"
    world.take(seq=501, n=4010)
    world.take(seq=1502, n=14_000, wait_ns=5_000_000_000)
    row = world.row()
    assert (row["messages_lost_total"], row["fetches_total"], row["wait_s_total"]) == (1000, 14_000, 5.0)


def test_the_same_message_twice_counts_once(world: World) -> None:
    world.take()
    world.take()
    assert world.row()["fetches_total"] == 10


@pytest.mark.parametrize(
    "again", [{"seq": 1}, {"seq": 11, "wait_ns": 0}, {"seq": 11, "n": 0, "wait_ns": 0, "busy_ns": 0}]
)
def test_counters_that_begin_anew_are_added_on_top(world: World, again: Fields) -> None:
    world.take(seq=10)
    before = world.row()
    world.take(**({"n": 11} | again))
    after = world.row()
    for name in ("fetches_total", "wait_s_total", "busy_s_total", "starved_total"):
        assert float(str(after[name])) >= float(str(before[name])), name
    assert after["wait_hist"] == "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,20"


def test_a_pid_that_is_used_again_is_another_process(world: World) -> None:
    world.take(n=1000)
    world.process(PID, 99)
    world.take(pid_start=99, n=1)
    rows = world.loaders.rows()
    assert [(row["pid_start"], row["state"], row["fetches_total"]) for row in rows] == [
        (77, "closed", 1000),
        (99, "live", 1),
    ]
    assert [row["pid_start"] for row in world.loaders.rows()] == [99]


def test_a_pid_that_is_used_again_by_somebody_else_who_says_nothing_new(world: World) -> None:
    world.take(n=1000)
    world.process(PID, 99)
    assert world.loaders.take(PID, 4242, message(n=2000)) == ""
    assert [(row["uid"], row["pid_start"], row["state"]) for row in world.loaders.rows()] == [
        (1000, 77, "closed"),
        (4242, 99, "live"),
    ]


@pytest.mark.parametrize("how", ["gone", "zombie", "reused"])
def test_stale_then_closed_then_no_more(world: World, how: str) -> None:
    world.take()
    world.now += 59
    assert world.row()["state"] == "live"
    world.now += 2
    assert world.row()["state"] == "stale"
    world.take(seq=2)
    assert world.row()["state"] == "live"
    if how == "gone":
        world.end(PID)
        (world.proc / str(PID)).rmdir()
    else:
        world.process(PID, 77 if how == "zombie" else 99, "Z" if how == "zombie" else "S")
    assert world.row()["state"] == "closed"
    assert world.loaders.rows() == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"v": 2}, "malformed"),
        ({"v": "1"}, "malformed"),
        ({"n": -1}, "malformed"),
        ({"n": 1 << 63}, "malformed"),
        ({"n": 1.5}, "malformed"),
        ({"wait_ns": None}, "malformed"),
        ({"name": ""}, "malformed"),
        ({"name": "a" * 65}, "malformed"),
        ({"name": "a\n"}, "malformed"),
        ({"name": "'; drop table"}, "malformed"),
        ({"role": "ä"}, "malformed"),
        ({"lib": "\u0000"}, "malformed"),
        ({"hist": [1] * 15}, "malformed"),
        ({"hist": [1] * 17}, "malformed"),
        ({"hist": "1,2"}, "malformed"),
        ({"rank": 1 << 40}, "malformed"),
        ({"workers": True}, "malformed"),
        ({"more": "x" * 1024}, "size"),
    ],
)
def test_malformed_and_oversize(world: World, fields: Fields, why: str) -> None:
    assert world.take(**fields) == why
    assert world.loaders.rows() == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 1000, b'{"v":1}', b"1e999"])
def test_no_json_of_ours(world: World, data: bytes) -> None:
    assert world.loaders.take(PID, 1000, data) in ("size", "malformed")


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    loaders = Loaders(Path("/nonexistent/loader.sock"), Path("/nonexistent/proc"))
    assert loaders.take(PID, 1000, data)


def test_a_later_version_may_say_more(world: World) -> None:
    assert world.take(gpu="GPU-1") == ""


def test_a_sender_without_a_pid_here_is_nobody(world: World) -> None:
    assert world.loaders.take(0, 0, message()) == "no_sender"


def test_a_process_has_64_loaders_and_a_user_half_of_the_places(world: World) -> None:
    assert [world.take(name=f"l{at}") for at in range(66)] == [""] * 64 + ["loaders"] * 2
    for pid in range(MOST_PROCESSES):
        world.process(PID + 1 + pid, 77)
    world.now += 60
    told = [world.take(PID + 1 + at) for at in range(MOST_PROCESSES_PER_USER)]
    assert told.count("") == MOST_PROCESSES_PER_USER - 1
    assert told[-1] == "processes"
    world.now += 60
    others = [world.take(PID + 1 + MOST_PROCESSES_PER_USER + at, 2000) for at in range(120)]
    assert others == [""] * 120, "another user finds room"
    assert world.take(PID + 254, 3000) == ""


def test_all_loaders_together_are_bounded(world: World) -> None:
    took = 0
    for at in range(60):
        world.process(PID + at, 77)
        world.now += 10
        took += sum(world.take(PID + at, name=f"l{one}") == "" for one in range(64))
    assert took == 2048


def test_whoever_says_too_much_is_not_read_and_others_are(world: World) -> None:
    told = [world.take(seq=at + 1) for at in range(1000)]
    assert (told.count(""), told.count("rate")) == (400, 600)
    assert world.loaders.take(PID, 2000, message()) == ""
    world.now += 1
    assert [world.take(seq=2000 + at) for at in range(200)].count("") == 100


def test_very_many_users_do_not_grow_a_table(world: World) -> None:
    told = [world.loaders.take(PID, uid, b"x") for uid in range(1000)]
    assert told.count("rate") == 1000 - 256
    world.now += 10
    assert world.loaders.take(PID, 5000, b"x") == "malformed"


# ---- the socket


def sender(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.connect(str(path))
    return one


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_socket_is_for_everybody_and_says_who_sends(agent: Any, socket_path: Path) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o666
    with sender(socket_path) as one:
        one.send(message(pid_start=1))
    rows = agent.hears(lambda rows: "train" in rows)
    assert (rows["train"]["pid"], rows["train"]["uid"]) == (os.getpid(), os.getuid())
    assert rows["train"]["pid_start"] > 1


def test_garbage_floods_and_descriptors_do_not_end_it(agent: Any, socket_path: Path) -> None:
    held = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    with sender(socket_path) as one:
        one.setblocking(True)
        one.send(b"\xff" * 100)
        one.send(b"x" * 5000)
        one.sendmsg([message()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write]))])
        until(lambda: agent.loaders.refused["malformed"] and agent.loaders.refused["size"])
        agent.hears(lambda rows: "train" in rows)
        os.close(read)
        os.close(write)
        assert len(os.listdir("/proc/self/fd")) == held + 1
        one.send(message(name="after"))
        agent.hears(lambda rows: {"train", "after"} <= set(rows))


def test_a_stale_socket_is_replaced_a_live_one_respected_and_removed_at_the_end(
    start_agent: Callable[[], Any], socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(socket_path))
    left.close()
    first = start_agent()
    second = Loaders(socket_path)
    assert not second.open()
    assert "another agent listens there" in caplog.text
    second.close()
    with sender(socket_path) as one:
        one.send(message())
    first.hears(lambda rows: "train" in rows)
    first.loaders.close()
    assert not socket_path.exists()
    assert second.rows() == []


def test_where_there_cannot_be_a_socket_the_agent_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loaders = Loaders(tmp_path / "file" / "loader.sock")
    assert not loaders.open()
    assert loaders.rows() == []
    loaders.close()


def test_a_sender_that_ends_at_once_is_closed(agent: Any, socket_path: Path) -> None:
    code = (
        "import socket, sys\n"
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(sys.argv[2].encode(), sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(socket_path), message().decode()], check=True)
    row = agent.hears(lambda rows: "train" in rows)["train"]
    assert row["state"] == "closed"
    assert agent.rows() == []


# ---- eight ranks, one of them slow

RANK = """
import gpufleet_loader, os, sys
now = [10**9]
gpufleet_loader._clock = lambda: now[0]
wait_ns, step_ns = int(sys.argv[1]), int(sys.argv[2])


class Batches:
    left = 101

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        now[0] += wait_ns
        return self.left


for batch in gpufleet_loader.watch(Batches(), name="train"):
    now[0] += step_ns - wait_ns
print(os.getpid(), flush=True)
for line in sys.stdin:
    gpufleet_loader._say_goodbye()
"""


@pytest.fixture
def ranks() -> Iterator[Callable[[int, float, float], "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, wait_s: float, step_s: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", RANK, str(round(wait_s * 1e9)), str(round(step_s * 1e9))]
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "8"}
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        )
        return started[-1]

    yield start
    for one in started:
        one.communicate(timeout=90)


def test_one_slow_rank_of_eight_is_the_one_that_waits(agent: Any, ranks: Any, share: Any) -> None:
    # all step together; the others wait for the slow one in their collective, which is not for data
    running = [ranks(rank, 0.3 if rank == 5 else 0.001, 1.0) for rank in range(8)]
    for one in running:
        one.stdout.readline()
    deadline = time.monotonic() + 90
    while True:
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        rows = {row["rank"]: row for row in agent.rows()}
        if len(rows) == 8 and all(row["fetches_total"] == 100 for row in rows.values()):
            break
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)
    shares = {rank: share(row) for rank, row in rows.items()}
    assert {rank for rank, part in shares.items() if part >= 0.1} == {5}
    assert shares[5] == pytest.approx(0.3, abs=0.02)
    assert {row["world"] for row in rows.values()} == {8}
    assert not any(isinstance(row["local_rank"], Null) for row in rows.values())
