"""Drill M01 and its family: a bench while a job owns the card; and the gate's own parts."""

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.budget import HOUR_S
from gpufleet_agent.drivers import DriverError, Gpu, Lost, Ring
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.gate import Gate, Lock, Preempted, Rules, Sight, Stop, TooLong, ask
from gpufleet_agent.rota import Rota

GIB = 1 << 30
OUT = "a bench would keep a job out"
NO_PERMISSION = Null(Reason.NO_PERMISSION, "NVML 4")


@dataclass
class World:
    """A clock, and what happens on it."""

    now: float = 0.0
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in sorted(self.later, key=lambda event: event[0]):
            if event[0] <= self.now:
                self.later.remove(event)
                event[1]()


class Card:
    """A card whose state is what the test says."""

    def __init__(self, number: int = 1, **state: Cell) -> None:
        self.uuid = f"GPU-00000000-0000-4000-8000-{number:012d}"
        self.pci = f"0000:{number:02x}:00.0"
        self.index = number
        self.ring = Ring()
        self.state: dict[str, Cell] = {
            "pids": "", "compute_mode": "default", "util_pct": 0.0, "mem_util_pct": 0.0, "mem_used_bytes": 0,
            "power_w": 70.0, "power_limit_w": 700.0, **state,
        }  # fmt: skip
        self.looks = 0

    def identity(self) -> Mapping[str, str]:
        return {"uuid": self.uuid}

    def read(self, group: str) -> Row:
        self.looks += group == "gate"
        error = self.state.get("error")
        if error:
            raise Lost("gpu_is_lost", str(error))
        names = {"gate": ("pids", "compute_mode"), "ring": ("util_pct", "power_w")}
        return {name: self.state[name] for name in names.get(group, tuple(self.state))}

    def links(self) -> Sequence[Row]:
        return []


def lock_at(path: Path) -> Lock:
    lock = Lock.take(str(path))
    assert lock is not None
    return lock


@pytest.fixture
def lock(tmp_path: Path) -> Any:
    held = lock_at(tmp_path / "bench.lock")
    yield held
    held.release()


def gate_of(world: World, lock: Lock | None, stop: Stop | None = None, **more: Any) -> Gate:
    rules = more.pop("rules", Rules())
    host = SysfsHost(Path("/nowhere"))
    return Gate(host, rules, lock, stop or Stop(), clock=world.clock, sleep=world.sleep, **more)


def run(world: World, gate: Gate, card: Gpu, seconds: float = 5.0, chunk_s: float = 0.05) -> tuple[str, str]:
    """(status, reason) of a bench of so many seconds that works in chunks."""
    shut = gate.before([card]).get(card.pci, "") or gate.enter([card])
    if shut:
        return "skipped", shut
    until = world.now + seconds
    try:
        while world.now < until:
            world.sleep(chunk_s)
            gate.check()
    except Preempted as why:
        return "preempted", str(why)
    why_not = gate.after([card])
    return ("contaminated", why_not) if why_not else ("ok", "")


def test_M01_a_bench_while_a_job_owns_the_card(lock: Lock) -> None:
    world = World()
    owned = Card(1, pids="900", mem_used_bytes=60_000_000_000, util_pct=97.0)
    filled = Card(2, mem_used_bytes=70_000_000_000)
    free = Card(3, mem_used_bytes=500_000_000)
    hidden = Card(4, pids=NO_PERMISSION, mem_used_bytes=400_000_000)
    shut = gate_of(world, lock).before([owned, filled, free, hidden])
    assert shut == {owned.pci: "in use by process 900", filled.pci: "66757 MiB of its memory are in use"}
    # the fourth only while load, memory and lock agree
    assert gate_of(world, None).before([hidden])[hidden.pci].startswith("another bench runs, or a scheduler")
    hidden.state["util_pct"] = NO_PERMISSION
    assert gate_of(world, lock).before([hidden]) == {hidden.pci: "who uses it cannot be seen"}
    # the third becomes busy in the middle of it
    came = world.now + 2.0 + 2.0
    world.later.append((came, lambda: free.state.update(pids="901")))
    assert run(world, gate_of(world, lock), free) == ("preempted", "a job came: process 901")
    assert world.now - came <= 1.0


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"pids": "900 901 902"}, "in use by process 900 and 2 more"),
        ({"pids": "0"}, "in use by process 0"),  # of another pid namespace
        ({"mem_used_bytes": 601 << 20}, "601 MiB of its memory are in use"),
        ({"util_pct": 1.0}, "card is busy: 1 %"),
        ({"mem_util_pct": 3.0}, "card is busy: 3 %"),
        ({"power_w": 400.0}, "card is busy: it draws 400 W"),
        ({"util_pct": Null(Reason.NOT_SUPPORTED, "MIG")}, "MIG is on"),
        (
            {"compute_mode": "exclusive_process"},
            "compute mode exclusive_process: " + OUT,
        ),
        ({"compute_mode": "prohibited"}, "compute mode prohibited: " + OUT),
        ({"error": "fell off the bus"}, "it cannot be looked at: gpu_is_lost"),
        ({"pids": NO_PERMISSION, "mem_used_bytes": NO_PERMISSION}, "who uses it cannot be seen"),
        (
            {"util_pct": NO_PERMISSION, "mem_used_bytes": NO_PERMISSION, "mem_util_pct": NO_PERMISSION},
            "neither its load nor its memory can be read",
        ),
    ],
)
def test_M01_a_card_that_is_not_surely_free_is_left_alone(
    lock: Lock, state: dict[str, Cell], reason: str
) -> None:
    card = Card(1, **state)
    assert run(World(), gate_of(World(), lock), card) == ("skipped", reason)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"pids": str(os.getpid())},
        {"mem_used_bytes": 600 << 20},
        {"pids": NO_PERMISSION, "mem_used_bytes": 400_000_000},
        {"power_w": NO_PERMISSION, "power_limit_w": NO_PERMISSION},
        {"power_w": 38.0, "power_limit_w": 70.0},  # a small card that is idle draws half of what it may
        {"util_pct": Null(Reason.NOT_SUPPORTED, "NVML 3"), "mem_used_bytes": 0},
    ],
)
def test_M01_a_card_that_is_free_is_measured(lock: Lock, state: dict[str, Cell]) -> None:
    world = World()
    assert run(world, gate_of(world, lock), Card(1, **state)) == ("ok", "")


@pytest.mark.parametrize("after_s", [0.05, 1.05, 1.95])
def test_M01_a_load_between_two_looks_before_a_run_is_seen(lock: Lock, after_s: float) -> None:
    world, card = World(), Card()
    world.later.append((after_s, lambda: card.state.update(util_pct=40.0)))
    assert run(world, gate_of(world, lock), card) == ("skipped", "card is busy: 40 %")


def test_M01_a_job_that_cannot_be_seen_is_known_by_its_memory(lock: Lock) -> None:
    world, card = World(), Card(1, pids=NO_PERMISSION, mem_used_bytes=0)
    world.later.append((4.0, lambda: card.state.update(mem_used_bytes=30 * GIB)))
    assert run(world, gate_of(world, lock), card) == (
        "preempted", "a job came: 30720 MiB of the card's memory are in use",
    )  # fmt: skip


def test_M01_what_a_bench_itself_takes_is_no_job(lock: Lock) -> None:
    world, card = World(), Card(1, pids=NO_PERMISSION)
    world.later.append((2.1, lambda: card.state.update(mem_used_bytes=2 * GIB, util_pct=100.0)))
    world.later.append((6.9, lambda: card.state.update(mem_used_bytes=0)))
    world.later.append((8.0, lambda: card.state.update(util_pct=0.0)))  # an average of the last second
    assert run(world, gate_of(world, lock), card) == ("ok", "")


@pytest.mark.parametrize(
    "state", [{"pids": "900"}, {"mem_used_bytes": 9 * GIB}, {"util_pct": 30.0}, {"error": "gone"}]
)
def test_M01_a_run_after_which_the_card_is_not_quiet_has_no_value(lock: Lock, state: dict[str, Cell]) -> None:
    world, card = World(), Card()
    gate = gate_of(world, lock)
    assert gate.before([card]) == {}
    assert gate.enter([card]) == ""
    card.state.update(state)
    assert gate.after([card]).startswith("afterwards: ")


def test_M01_a_card_lost_during_a_run_is_the_drivers_word(lock: Lock) -> None:
    world, card = World(), Card()
    world.later.append((4.0, lambda: card.state.update(error="gone")))
    with pytest.raises(DriverError):
        run(world, gate_of(world, lock), card)


def test_M01_a_scheduler_that_wants_the_lock_gets_it_at_once(tmp_path: Path) -> None:
    path, card = tmp_path / "bench.lock", Card()
    lock = lock_at(path)
    assert not lock.wanted()
    prolog = subprocess.Popen(["flock", str(path), "true"])
    try:
        gate = Gate(SysfsHost(Path("/nowhere")), Rules(), lock, Stop())
        gate.enter([card])
        asked = time.monotonic()
        why = ""
        while not why and time.monotonic() < asked + 20:
            time.sleep(0.01)
            try:
                gate.check()
            except Preempted as preempted:
                why = str(preempted)
        assert why == "the lock is wanted"
        lock.release()
        assert prolog.wait(90) == 0
    finally:
        prolog.kill()
        prolog.wait(90)


def test_a_lock_that_a_prolog_holds_keeps_benches_out(tmp_path: Path) -> None:
    path = tmp_path / "run" / "bench.lock"
    lock_at(path).release()
    assert path.stat().st_mode & 0o777 == 0o644
    with path.open() as prolog:
        fcntl.flock(prolog, fcntl.LOCK_SH)
        assert Lock.take(str(path)) is None
        assert Lock.take(str(path), wait_s=0.05) is None
    taken = Lock.take(str(path), wait_s=5.0)
    assert taken is not None
    taken.release()


def test_somebody_who_waits_for_another_file_is_not_waiting_for_ours(tmp_path: Path) -> None:
    held = os.open(tmp_path / "a", os.O_CREAT | os.O_RDONLY)
    table = tmp_path / "locks"
    lock = Lock(held, table)
    inode = os.fstat(held).st_ino
    table.write_text(
        f"1: FLOCK  ADVISORY  WRITE 12 fe:01:{inode} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  READ 13 fe:01:{inode + 1} 0 EOF\n"
    )
    assert not lock.wanted()
    table.write_text(f"1: -> FLOCK  ADVISORY  READ 13 fe:01:{inode} 0 EOF\n")
    assert lock.wanted()
    for text in ("", "-> FLOCK\n", "1: ->\n", "\n\n"):
        table.write_text(text)
        assert not lock.wanted()
    table.unlink()
    assert not lock.wanted()
    lock.release()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], ""),
        ([sys.executable, "-c", ""], ""),
        (["false"], "gate command false: exit status 1"),
        (["/no/such/thing"], "gate command /no/such/thing: No such file or directory"),
        (["sleep", "60"], "gate command sleep: no answer within 0.2 s"),
        (["sh", "-c", "sleep 61 & wait"], "gate command sh: no answer within 0.2 s"),
    ],
)
def test_a_sites_own_command_is_asked(lock: Lock, command: list[str], why: str) -> None:
    within_s = 20.0 if command[:1] == [sys.executable] else 0.2
    if command == ["false"]:
        within_s = 20.0
    assert ask(command, within_s) == why
    card = Card()
    rules = Rules(command=command, command_s=within_s)
    assert gate_of(World(), lock, rules=rules).before([card]).get(card.pci, "") == why


def test_a_run_that_takes_too_long_is_ended(lock: Lock) -> None:
    world, card = World(), Card()
    with pytest.raises(TooLong):
        run(world, gate_of(world, lock, allowance_s=3.0), card)
    assert world.now <= 2.0 + 3.0 + 0.11


def test_a_person_is_stopped_by_nothing_but_the_lock_and_a_signal(lock: Lock) -> None:
    world, busy, stop = World(), Card(1, pids="900", util_pct=99.0), Stop()
    assert run(world, gate_of(world, lock, asked=True), busy) == ("ok", "")
    assert run(world, gate_of(world, None, asked=True), busy)[0] == "skipped"
    world.later.append((world.now + 1.0, lambda: setattr(stop, "reason", "told to stop")))
    assert run(world, gate_of(world, lock, stop, asked=True), busy) == ("preempted", "told to stop")


def test_looking_around_costs_ten_looks_per_second(lock: Lock) -> None:
    world, card = World(), Card()
    gate = gate_of(world, lock)
    gate.enter([card])
    before = card.looks
    for _ in range(1000):
        world.sleep(0.001)
        gate.check()
    assert 9 <= card.looks - before <= 11


@given(
    pids=st.none() | st.frozensets(st.integers(0, 99), max_size=2),
    numbers=st.lists(st.none() | st.floats(0, 1e12), min_size=4, max_size=4),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_what_is_free_is_seen_to_be_free(
    pids: frozenset[int] | None, numbers: list[float | None], flags: tuple[bool, bool]
) -> None:
    mem, util, power, limit = numbers
    split, locked = flags
    why = Sight(pids, mem, util, power, limit, split).why_not(600 << 20, locked)
    if not why:
        assert not pids
        assert not split
        assert (mem or 0) <= 600 << 20
        assert not util
        assert mem is not None or util is not None
        assert pids is not None or (locked and mem is not None and util is not None)


# ---- a fleet's worth of runs on a made clock


@dataclass
class Shop:
    """A card, and jobs that come to it at random moments and stay for a while."""

    world: World
    card: Card
    dice: random.Random
    jobs: list[tuple[float, float]] = field(default_factory=list)
    visible: bool = True

    def hire(self, at: float, for_s: float) -> None:
        pid = str(self.dice.randrange(1000, 9999))
        said: Cell = pid if self.visible else NO_PERMISSION
        self.jobs.append((at, at + for_s))

        def come() -> None:
            self.card.state.update(pids=said, mem_used_bytes=40 * GIB, util_pct=95.0, power_w=600.0)

        def go() -> None:
            quiet: Cell = "" if self.visible else NO_PERMISSION
            self.card.state.update(pids=quiet, mem_used_bytes=0, util_pct=0.0, power_w=70.0)

        self.world.later += [(at, come), (at + for_s, go)]

    def overlaps(self, began: float, ended: float) -> bool:
        return any(came < ended and left > began for came, left in self.jobs)


@pytest.mark.parametrize("visible", [True, False])
def test_a_thousand_runs_store_no_value_of_a_disturbed_card(tmp_path: Path, visible: bool) -> None:
    lock = Lock(os.open(tmp_path, os.O_RDONLY), tmp_path / "no locks")
    dice = random.Random(20 + visible)
    told: dict[str, int] = {}
    slowest = 0.0
    for _ in range(500):
        world = World(dice.uniform(0, 1e6))
        shop = Shop(world, Card(1, pids="" if visible else NO_PERMISSION), dice, visible=visible)
        start = world.now
        if dice.random() < 0.8:
            shop.hire(start + dice.uniform(-3.0, 9.0), dice.choice((0.5, 2.0, 60.0)))
        world.sleep(0.0)
        gate = gate_of(world, lock)
        card, work_s, chunk_s = shop.card, dice.uniform(0.2, 5.0), dice.uniform(0.005, 0.06)
        shut = gate.before([card]).get(card.pci, "") or gate.enter([card])
        began, status = world.now, "skipped" if shut else "ok"
        try:
            while not shut and world.now < began + work_s:
                world.sleep(chunk_s)
                gate.check()
        except Preempted:
            status = "preempted"
            came = min(came for came, _ in shop.jobs if came > start - 4)
            slowest = max(slowest, world.now - max(came, began))
        ended = world.now
        if status == "ok" and gate.after([card]):
            status = "contaminated"
        told[status] = told.get(status, 0) + 1
        assert not (status == "ok" and shop.overlaps(began, ended))
    lock.release()
    assert slowest <= 1.0
    assert sum(told.values()) == 500
    assert min(told.get(status, 0) for status in ("ok", "skipped", "preempted")) > 30, told


def test_the_budget_is_never_exceeded_in_any_hour() -> None:
    dice, world = random.Random(7), World()
    every = {"h2d": 30.0, "hbm": 45.0, "fma": 20.0, "clock": 60.0}
    rota, cost_s, spent = Rota(every, 10.0, world.clock, dice), 3.0, list[tuple[float, float]]()
    statuses: dict[str, int] = {}
    while world.now < 6 * HOUR_S:
        world.sleep(rota.tick_s)
        name = rota.next()
        if not name:
            continue
        left = rota.left_s().get("gpu:a", 10.0)
        took, status = 0.0, "skipped"
        if left >= cost_s:
            took, status = dice.uniform(0.1, cost_s), dice.choice(("ok", "ok", "preempted", "failed"))
            spent.append((world.now, took))
        statuses[status] = statuses.get(status, 0) + 1
        rota.gone(name, {"gpu:a": (status, took)})
    assert statuses["skipped"] > 50
    assert statuses["ok"] > 10
    for at, _ in spent:
        assert sum(took for when, took in spent if at - HOUR_S < when <= at) <= 10.0 + 1e-9
    assert rota.gpu_s_total == pytest.approx(sum(took for _, took in spent))


def test_the_stalest_bench_goes_first_and_a_busy_card_is_tried_again() -> None:
    world = World()
    rota = Rota({"a": 3600.0, "b": 7200.0}, 10.0, world.clock, random.Random(1))
    assert rota.next() == ""
    world.sleep(100.0)
    first = rota.next()
    rota.gone(first, {"gpu:1": ("ok", 0.2), "gpu:2": ("skipped", 0.0)})
    other = rota.next()
    assert {first, other} == {"a", "b"}
    rota.gone(other, {"gpu:1": ("ok", 0.2), "gpu:2": ("ok", 0.2)})
    assert rota.next() == ""
    world.sleep(365.0)
    assert rota.next() == first
    assert rota.fresh(first) == ["gpu:1"]
    rota.gone(first, {"gpu:2": ("ok", 0.2)})
    assert rota.next() == ""
    assert rota.fresh(first) == ["gpu:1", "gpu:2"]
    world.sleep(7200 * 1.2)
    assert rota.fresh(first) == []
    assert rota.left_s() == {"gpu:1": 10.0, "gpu:2": 10.0}


def test_a_host_that_is_busy_for_days_is_looked_at_rarely() -> None:
    world = World()
    every = dict.fromkeys(("a", "b", "c", "d", "e"), 3600.0)
    rota = Rota(every, 10.0, world.clock, random.Random(3))
    tried: dict[str, int] = {}
    while world.now < 24 * HOUR_S:
        world.sleep(rota.tick_s)
        name = rota.next()
        if name:
            tried[name] = tried.get(name, 0) + 1
            rota.gone(name, {"gpu:1": ("skipped", 0.0), "gpu:2": ("skipped", 0.0)})
    assert set(tried) == set(every)
    assert sum(tried.values()) <= 24 * 3600 / 300 * 1.25
    assert min(tried.values()) > 24


def test_a_suspect_tested_by_a_directive_counts_against_the_budget_and_for_freshness() -> None:
    world = World()
    rota = Rota({"a": 3600.0}, 10.0, world.clock, random.Random(1))
    rota.gone("a", {"gpu:1": ("ok", 4.0)}, asked=True)
    assert rota.left_s() == {"gpu:1": 6.0}
    assert rota.fresh("a") == ["gpu:1"]
    rota.gone("a", {"gpu:2": ("skipped", 0.0)}, asked=True)
    assert rota.fresh("a") == ["gpu:1"]
    rota.gone("unscheduled", {"gpu:1": ("ok", 7.0)}, asked=True)
    assert rota.left_s() == {"gpu:1": 0.0}
