"""The spool: what is put is there until it is deleted, over restarts, kills, full disks and broken files."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpufleet_agent import spool as spool_module
from gpufleet_agent.spool import Clock, Spool, SpoolError, SpoolHeld

if TYPE_CHECKING:
    from tests.agent.transport.conftest import Kit

DAY = 86400.0


def opened(
    path: Path, clock: Clock | None = None, max_bytes: int = 64 << 20, max_age_s: float = DAY
) -> Spool:
    return Spool.open(path, max_bytes=max_bytes, max_age_s=max_age_s, clock=clock or Clock("boot-1"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.db"


@pytest.fixture
def spool(path: Path) -> Iterator[Spool]:
    one = opened(path)
    yield one
    one.close()


def numbers(spool: Spool) -> list[int]:
    return [item.number for item in spool.oldest_first(0, 10**6)]


def test_put_get_delete(spool: Spool) -> None:
    assert spool.pending() == 0
    assert [spool.put(body, event=False) for body in (b"a", b"b", b"c")] == [1, 2, 3]
    assert [item.body for item in spool.oldest_first(1, 10)] == [b"b", b"c"]
    assert numbers(spool) == [1, 2, 3]
    spool.delete([2, 99])
    assert spool.get(2) is None
    assert (found := spool.get(3)) is not None
    assert found.body == b"c"
    assert spool.pending() == 2
    assert spool.stats().bytes == 2


def test_numbers_are_never_used_again(path: Path) -> None:
    spool = opened(path)
    used = {spool.put(b"x", event=False) for _ in range(3)}
    spool.delete(used)
    spool.close()
    for _ in range(3):
        spool = opened(path)
        number = spool.put(b"y", event=False)
        assert number not in used
        used.add(number)
        spool.delete([number])
        spool.close()
    assert sorted(used) == [1, 2, 3, 4, 5, 6], "after a clean stop without a gap"


def test_id_is_random_and_stays_with_the_file(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "a.db"), opened(tmp_path / "b.db")
    ids = (one.spool_id, two.spool_id)
    one.close()
    two.close()
    assert ids[0] != ids[1]
    assert len(ids[0]) == 32
    again = opened(tmp_path / "a.db")
    assert again.spool_id == ids[0]
    again.close()
    for file in tmp_path.iterdir():
        file.unlink()
    wiped = opened(tmp_path / "a.db")
    assert wiped.spool_id not in ids
    assert wiped.put(b"x", event=False) == 1
    wiped.close()


def test_meta_is_kept(path: Path) -> None:
    spool = opened(path)
    assert spool.get_meta("boot_id") is None
    spool.set_meta("boot_id", "one")
    spool.set_meta("boot_id", "two")
    spool.close()
    spool = opened(path)
    assert spool.get_meta("boot_id") == "two"
    spool.close()


CHILD = """
import sys
from pathlib import Path
from gpufleet_agent.spool import Clock, Spool
spool = Spool.open(Path(sys.argv[1]), max_bytes=1 << 30, max_age_s=86400, clock=Clock("boot-1"))
n = 0
while True:
    number = spool.put(b"%d" % n * 500, event=n % 7 == 0)
    print(number, flush=True)
    n += 1
    if n % 3 == 0:
        spool.delete([number])
        print(-number, flush=True)
"""


def test_kill_9_loses_nothing_and_numbers_go_on(path: Path) -> None:
    told: set[int] = set()
    deleted: set[int] = set()
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(60)]
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        seen += [int(line) for line in rest if line.endswith("\n")]
        put = {number for number in seen if number > 0}
        assert not put & told, "a number was used twice"
        told |= put
        deleted |= {-number for number in seen if number < 0}
        spool = opened(path)  # the kill released the lock
        there = set(numbers(spool))
        assert told - deleted <= there
        assert not deleted & there
        assert len(there - told) <= 4, "at most the one that was in the writing at each kill"
        assert spool.pending() == len(there)
        assert spool.take_moved_aside() == []
        told |= there
        spool.close()


def test_a_power_cut_that_takes_the_last_writes_gives_no_number_twice(tmp_path: Path) -> None:
    """With synchronous=NORMAL the tail of the log may be gone: what was sent under those numbers is not."""
    path = tmp_path / "spool.db"
    spool = opened(path)
    spool.put(b"kept", event=True)
    saved = tmp_path / "saved"
    saved.mkdir()
    for file in tmp_path.glob("spool.db*"):
        shutil.copy(file, saved / file.name)
    sent = [spool.put(b"sent, then lost", event=False) for _ in range(50)]
    spool.close()
    for file in tmp_path.glob("spool.db*"):
        file.unlink()
    for file in saved.iterdir():
        shutil.copy(file, tmp_path / file.name)
    spool = opened(path, Clock("boot-2"))
    assert numbers(spool) == [1]
    assert spool.put(b"new", event=False) > max(sent)
    spool.close()


def test_held_by_another(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(SpoolHeld) as held:
        opened(path)
    assert held.value.pid == child.pid
    assert str(child.pid) in str(held.value)
    child.kill()
    child.wait()
    child.stdout.close()
    opened(path).close()


@pytest.mark.parametrize("place", ["missing/spool.db", "file/spool.db", "dir"])
def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir").mkdir()
    with pytest.raises(SpoolError, match=r"cannot write the spool here") as error:
        opened(tmp_path / place)
    assert str(tmp_path / place) in str(error.value)


@pytest.mark.usefixtures("bound_by_modes")
def test_a_read_only_directory_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpoolError, match="cannot write"):
        opened(tmp_path / "spool.db")
    tmp_path.chmod(0o700)


# ---- too old, too much


def test_oldest_samples_go_first_events_last_and_each_drop_is_counted(path: Path) -> None:
    spool = opened(path, max_bytes=100_000)
    for number in range(1, 41):
        spool.put(b"x" * 5000, event=number % 10 == 0)
    kept = numbers(spool)
    assert [number for number in kept if number % 10 == 0] == [10, 20, 30, 40]
    samples = [number for number in kept if number % 10]
    assert samples == [n for n in range(1, 41) if n % 10][-len(samples) :]
    assert spool.stats().bytes <= 100_000
    assert spool.trim() == 40 - len(kept) == spool.stats().dropped_total
    assert spool.trim() == 0
    for _ in range(40):
        spool.put(b"x" * 5000, event=True)
    assert numbers(spool) == list(range(81 - len(numbers(spool)), 81)), "then events, oldest first"
    spool.close()
    spool = opened(path, max_bytes=100_000)
    assert spool.stats().dropped_total == 80 - spool.pending(), "the count survives"
    assert spool.trim() == 80 - spool.pending() - (40 - len(kept)), "what was not told yet is told"
    spool.close()


def test_age_is_counted_by_the_clock_that_nobody_steps(kit: Kit, path: Path) -> None:
    clock = kit.test_clock()
    spool = opened(path, clock.clock())
    for _ in range(3):
        spool.put(b"x", event=False)
    spool.put(b"e", event=True)
    clock.wall += 10 * 365 * 86400 * 10**6
    assert spool.trim() == 0, "a step forward expires nothing"
    clock.wall = 0
    clock.mono += int(0.9 * DAY * 1e6)
    assert spool.trim() == 0
    assert spool.stats().oldest_s == pytest.approx(0.9 * DAY)
    spool.put(b"young", event=False)
    clock.mono += int(0.2 * DAY * 1e6)
    assert spool.trim() == 3, "a step back keeps nothing for ever"
    assert [item.body for item in spool.oldest_first(0, 9)] == [b"e", b"young"], "events stay longer"
    clock.mono += int(7 * DAY * 1e6)
    assert spool.trim() == 2
    spool.close()


def test_age_goes_on_over_reboots(kit: Kit, path: Path) -> None:
    clock = kit.test_clock()
    for boot in range(5):
        clock.boot_id, clock.mono = f"boot-{boot}", 0
        clock.wall = (0, 4 * 10**15, 10**15)[boot % 3]
        spool = opened(path, clock.clock())
        if boot == 0:
            spool.put(b"old", event=False)
        clock.mono = int(0.24 * DAY * 1e6)
        spool.put(b"x", event=False)
        assert spool.trim() == (1 if boot == 4 else 0)
        assert spool.stats().oldest_s == pytest.approx(0.24 * DAY * min(boot + 1, 4), rel=0.01)
        spool.close()


def test_the_file_does_not_grow_for_ever(path: Path) -> None:
    spool = opened(path, max_bytes=4 << 20)
    for _ in range(1200):
        spool.put(os.urandom(20_000), event=False)
    assert on_disk(path) < (4 << 20) * 1.3 + (9 << 20), "the log included"
    assert spool.trim() > 900
    for _ in range(30):
        spool.put(b"x", event=False)
        spool.delete(numbers(spool))
        spool.trim()
    spool.close()
    assert path.stat().st_size <= (spool_module.SPARE_PAGES + 64) * 4096


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))


# ---- broken files


def break_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def break_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)


def break_schema(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.executescript("create table batch (x); create table other (y);")
    db.close()


def break_version(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("pragma user_version = 99")
    db.close()


def break_meta(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("update meta set value = 'many' where key = 'dropped'")
    db.execute("insert or replace into meta values ('reserved', 'none'), ('dropped', '-')")
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "broken",
    [
        break_truncate,
        break_page,
        break_schema,
        break_version,
        break_meta,
        lambda path: path.write_bytes(b"this is not a database, it is long enough to be one, though " * 100),
        lambda path: path.write_bytes(b"short"),
    ],
)
def test_a_broken_file_is_kept_aside_and_a_new_spool_begun(path: Path, broken: object) -> None:
    assert callable(broken)
    spool = opened(path)
    before = spool.spool_id
    for _ in range(20):
        spool.put(b"x" * 3000, event=False)
    spool.close()
    broken(path)
    content = path.read_bytes()
    for number in (1, 2):
        spool = opened(path)
        (aside,) = spool.take_moved_aside()
        assert aside.name == f"spool.db.corrupt-{number}"
        assert aside.read_bytes()[:16] == content[:16]
        assert spool.take_moved_aside() == []
        assert spool.spool_id != before
        assert spool.put(b"y", event=True) == 1
        spool.close()
        path.write_bytes(content)


def test_an_empty_file_is_a_new_spool(path: Path) -> None:
    path.touch()
    spool = opened(path)
    assert spool.take_moved_aside() == []
    assert spool.put(b"x", event=False) == 1
    spool.close()


def test_a_file_that_breaks_while_open_costs_what_was_in_it_and_nothing_else(path: Path) -> None:
    spool = opened(path)
    before = spool.spool_id
    for _ in range(200):
        spool.put(b"x" * 30_000, event=False)
    spool.close()
    spool = opened(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x5a" * (size - 4096))
    for _ in range(20):
        spool.put(b"new", event=False)
        spool.oldest_first(0, 1000)
        spool.trim()
    assert spool.spool_id != before
    assert len(spool.take_moved_aside()) == 1
    assert {item.body for item in spool.oldest_first(0, 1000)} == {b"new"}
    spool.close()


def test_a_body_that_changed_on_disk_is_not_sent(path: Path) -> None:
    spool = opened(path)
    for body in (b"one", b"two", b"three"):
        spool.put(body, event=False)
    spool.close()
    db = sqlite3.connect(path)
    db.execute("update batch set body = x'00' where number = 2")
    db.commit()
    db.close()
    spool = opened(path)
    assert [item.body for item in spool.oldest_first(0, 9)] == [b"one", b"three"]
    assert spool.pending() == 2
    assert spool.trim() == 1
    spool.close()


# ---- a disk that is full or fails


def test_a_full_disk_costs_the_oldest_and_never_raises(path: Path) -> None:
    spool = opened(path)
    spool._db.execute("pragma max_page_count = 100")  # what SQLite says then is what a full disk makes it say
    first_event = spool.put(b"e" * 10_000, event=True)
    put = [spool.put(bytes([n]) * 10_000, event=False) for n in range(120)]
    there = numbers(spool)
    assert put[-1] in there
    assert put[0] not in there
    assert first_event in there
    assert spool.trim() == 121 - len(there) == spool.stats().dropped_total
    spool.close()


def test_a_disk_that_takes_nothing_is_replaced_by_a_little_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MEMORY_BYTES", 50_000)
    spool = opened(path)
    kept = spool.put(b"on disk", event=False)
    spool._db.execute("pragma query_only = on")
    event = spool.put(b"e" * 10_000, event=True)
    put = [spool.put(bytes([n]) * 10_000, event=False) for n in range(10)]
    assert numbers(spool) == [kept, event, *put[-4:]]
    assert spool.pending() == 6
    assert spool.get(put[-1]) is not None
    spool.delete([put[-1], kept])
    assert numbers(spool) == [event, *put[-4:-1]]
    spool._db.execute("pragma query_only = off")
    assert spool.trim() == 6
    again = spool.put(b"again", event=False)
    spool.close()
    spool = opened(path)
    assert numbers(spool) == [event, *put[-4:-1], again], (
        "what memory held is on disk, what was deleted is not"
    )
    spool.close()


def test_a_disk_full_at_the_start_does_not_stop_the_agent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = opened(path)
    before = spool.spool_id
    old = spool.put(b"old", event=False)
    spool.close()
    connect = spool_module._connect

    def full(place: str) -> sqlite3.Connection:
        if place == ":memory:":
            return connect(place)
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(spool_module, "_connect", full)
    spool = opened(path)
    assert spool.spool_id != before, "its numbers are another series"
    assert [spool.put(b"new", event=True), spool.put(b"newer", event=False)] == [1, 2]
    spool.delete([1])
    assert numbers(spool) == [2]
    assert spool.trim() == 0
    spool.close()
    monkeypatch.undo()
    spool = opened(path)
    assert spool.spool_id == before
    assert numbers(spool) == [old]
    spool.close()


# ---- replace and park


def test_replace_keeps_age_and_order_of_events(kit: Kit, path: Path) -> None:
    clock = kit.test_clock()
    spool = opened(path, clock.clock())
    old = spool.put(b"ab", event=True)
    clock.pass_s(100)
    young = spool.put(b"c", event=False)
    pieces = spool.replace(old, [b"a", b"b"])
    assert numbers(spool) == [young, *pieces]
    assert spool.pending() == 3
    assert [item.body for item in spool.oldest_first(0, 9, event=True)] == [b"a", b"b"]
    assert [item.number for item in spool.oldest_first(0, 9, before_us=spool.now_us() - 50_000_000)] == pieces
    assert spool.replace(old, [b"x"]) == []
    spool.close()


def test_what_is_parked_is_out_of_the_way_but_not_gone(path: Path) -> None:
    spool = opened(path)
    for number in range(20):
        spool.park(spool.put(b"%d" % number, event=False))
    assert spool.pending() == 0
    spool.close()
    db = sqlite3.connect(path)
    assert db.execute("select count(*), min(number), max(number) from parked").fetchone() == (16, 5, 20)
    db.close()


# ---- the whole, against a model


class SpoolMachine(RuleBasedStateMachine):
    """Put, delete, trim, reopen, reboot, kill: the spool holds what the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dir = Path(tempfile.mkdtemp())
        self.path = self.dir / "spool.db"
        self.mono = 1_000_000
        self.boot = 1
        self.model: dict[int, tuple[bytes, bool]] = {}
        self.used: set[int] = set()
        self.spool = self._open()

    def _open(self) -> Spool:
        return opened(self.path, Clock(f"boot-{self.boot}", lambda: 0, lambda: self.mono))

    @rule(body=st.binary(max_size=2000), event=st.booleans())
    def put(self, body: bytes, event: bool) -> None:
        self.mono += 1000
        number = self.spool.put(body, event=event)
        assert number > max(self.used, default=0)
        self.used.add(number)
        self.model[number] = (body, event)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.used) or [1]), max_size=4))
        self.spool.delete(some)
        for number in some:
            self.model.pop(number, None)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        if self.model:
            number = data.draw(st.sampled_from(sorted(self.model)))
            body, event = self.model.pop(number)
            pieces = self.spool.replace(number, [body, body])
            assert min(pieces) > max(self.used)
            self.used.update(pieces)
            self.model.update(dict.fromkeys(pieces, (body, event)))

    @rule()
    def trim(self) -> None:
        assert self.spool.trim() == 0

    @rule()
    def reopen(self) -> None:
        self.spool.close()
        self.spool = self._open()

    @rule()
    def reboot(self) -> None:
        self.spool.close()
        self.boot, self.mono = self.boot + 1, 0
        self.spool = self._open()

    @rule()
    def kill(self) -> None:
        """What a kill leaves: the files as they are, without a last word of the process."""
        left = self.dir / "left"
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir()
        for file in self.dir.glob("spool.db*"):
            shutil.copy(file, left / file.name)
        self.spool.close()
        for file in self.dir.glob("spool.db*"):
            file.unlink()
        for file in left.iterdir():
            shutil.copy(file, self.dir / file.name)
        self.spool = self._open()
        assert self.spool.take_moved_aside() == []

    @invariant()
    def same(self) -> None:
        found = {item.number: (item.body, item.event) for item in self.spool.oldest_first(0, 10**6)}
        assert found == self.model
        assert self.spool.pending() == len(self.model)
        assert self.spool.stats().bytes == sum(len(body) for body, _ in self.model.values())

    def teardown(self) -> None:
        self.spool.close()
        shutil.rmtree(self.dir)


SpoolMachine.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)
TestSpoolMachine = SpoolMachine.TestCase
