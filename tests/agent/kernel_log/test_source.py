"""/dev/kmsg and the journal as sources: position, overrun, permission, and never waiting."""

import errno
import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from gpufleet.event import Event
from gpufleet_agent.drivers import kmsg
from gpufleet_agent.drivers.kmsg import FROM_BOOT, FROM_NOW, MAX_RECORDS, KernelLog
from gpufleet_agent.kernel_log import Now

LOST = "NVRM: Xid (PCI:0000:6a:00): 79, GPU has fallen off the bus."


class Machine(Protocol):
    root: Path
    kmsg: Path
    boot_id: str
    opened: list[KernelLog]

    def write(
        self, *texts: str, at_s: float | None = None, facility: int = 0, seq: int | None = None
    ) -> None: ...
    def boot(self, boot_id: str) -> None: ...
    def open(self) -> KernelLog: ...
    def sleep(self, seconds: float) -> None: ...
    def now(self) -> Now: ...


def codes(events: Sequence[Event]) -> list[str]:
    return [f"{event.kind} {event.code}".strip() for event in events]


# ---------------------------------------------------------------- position


def test_from_now_on_means_from_now_on(machine: Machine) -> None:
    machine.write(LOST)
    log = machine.open()
    events, cursor = log.read(FROM_NOW)
    assert not events
    assert log.read(cursor) == ([], cursor)
    machine.write(LOST)
    assert codes(log.read(cursor)[0]) == ["xid 79", "gpu_lost off_bus"]


def test_an_idle_log_keeps_its_cursor(machine: Machine) -> None:
    machine.write("hello")
    log = machine.open()
    _, cursor = log.read(FROM_BOOT)
    assert log.read(cursor) == ([], cursor)


def test_a_cursor_that_was_not_stored_is_read_again(machine: Machine) -> None:
    machine.write("hello")
    log = machine.open()
    _, stored = log.read(FROM_BOOT)
    machine.write(LOST)
    first, _ = log.read(stored)
    again, cursor = log.read(stored)  # whoever asked lost the answer
    assert codes(again) == codes(first) == ["xid 79", "gpu_lost off_bus"]
    assert not log.read(cursor)[0]


def test_every_way_to_cut_the_reading_tells_each_event_once(machine: Machine) -> None:
    lines = [
        LOST,
        "NVRM: The NVIDIA GPU 0000:c4:00.0",
        "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "nvidia 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "NVRM: fallen off the bus and is not responding to commands.",
        "nfs: server fs01 not responding, still trying",
        "NVRM: GPU 0000:6a:00.0: GPU has fallen off the bus.",
        "nfs: server fs01 OK",
    ]
    want = ["aer corrected", "gpu_lost off_bus", "gpu_lost off_bus", "nfs not_responding", "nfs ok", "xid 79"]
    for cuts in range(1 << (len(lines) - 1)):
        machine.boot(f"b{cuts}")
        told: list[str] = []
        cursor = FROM_BOOT
        log = machine.open()
        for number, line in enumerate(lines):
            machine.write(line)
            if cuts >> number & 1:
                events, cursor = log.read(cursor)
                told += codes(events)
                log.close()
        events, cursor = log.read(cursor)
        told += codes(events)
        machine.sleep(120)
        told += codes(log.read(cursor)[0])
        log.close()
        assert sorted(told) == want, bin(cuts)


@pytest.mark.parametrize("cursor", ["nonsense", "{}x", '{"seq":"a"}', "[]", "\ud800", '{"folds":{"a":[1]}}'])
def test_a_damaged_cursor_is_told_and_reading_goes_on(machine: Machine, cursor: str) -> None:
    machine.write(LOST)
    log = machine.open()
    events, cursor = log.read(cursor)
    assert codes(events) == ["kernel_log position"]
    machine.write(LOST)
    assert codes(log.read(cursor)[0]) == ["xid 79", "gpu_lost off_bus"]


def test_a_position_beyond_the_end_is_told_and_does_not_blind(machine: Machine) -> None:
    machine.write("hello")
    log = machine.open()
    events, cursor = log.read(json.dumps({"boot": "b2", "seq": 500, "stamp_us": 1}))
    assert codes(events) == ["kernel_log position"]
    machine.write(LOST)
    assert codes(log.read(cursor)[0]) == ["xid 79", "gpu_lost off_bus"]


def test_lost_records_are_counted_once(machine: Machine) -> None:
    machine.write("hello")
    log = machine.open()
    _, cursor = log.read(FROM_BOOT)
    machine.write("one", seq=101)
    machine.write(LOST, seq=202)
    events, cursor = log.read(cursor)
    lost = [event for event in events if event.kind == "kernel_log"]
    assert [(event.code, event.count) for event in lost] == [("lost", 200)]
    assert "xid 79" in codes(events)
    assert not log.read(cursor)[0]


def test_records_of_processes_are_no_gap(machine: Machine) -> None:
    machine.write("hello")
    machine.write("a process", facility=1)
    machine.write("hello")
    assert not machine.open().read(FROM_BOOT)[0]


def test_one_call_takes_a_bounded_number_of_records_and_the_next_goes_on(machine: Machine) -> None:
    machine.write(*["eth0: link up"] * (MAX_RECORDS + 10), LOST)
    log = machine.open()
    events, cursor = log.read(FROM_BOOT)
    assert not events
    events, _ = log.read(cursor)
    assert codes(events) == ["xid 79", "gpu_lost off_bus"]


def test_one_call_gives_a_bounded_number_of_events(machine: Machine) -> None:
    lines = [f"nfs: server fs{number} not responding, still trying" for number in range(1000)]
    machine.write(*lines)
    log, cursor, told = machine.open(), FROM_BOOT, 0
    while told < len(lines):
        events, cursor = log.read(cursor)
        assert 0 < len(events) <= kmsg.MAX_EVENTS
        told += len(events)
    assert told == len(lines)
    assert len(cursor) < 4000


# ---------------------------------------------------------------- the device


class Device:
    """Answers reads as /dev/kmsg does: one record each, EPIPE after an overrun, EAGAIN at the end."""

    def __init__(self, answers: list[bytes | int]) -> None:
        self.answers = answers

    def read(self, fd: int, size: int) -> bytes:
        if not self.answers:
            raise BlockingIOError(errno.EAGAIN, "nothing now")
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


def test_an_overrun_is_one_event_that_says_how_many(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(
        [b"6,0,1,-;hello\n", errno.EPIPE, b"4,41,2,-;%s\n KEY=value\n" % LOST.encode(), errno.EINVAL]
    )
    log = machine.open()
    monkeypatch.setattr(os, "read", device.read)
    events, _ = log.read(FROM_BOOT)
    assert sorted(codes(events)) == ["gpu_lost off_bus", "kernel_log lost", "xid 79"]
    assert {event.count for event in events if event.kind == "kernel_log"} == {40}


def test_a_device_that_fails_is_told_once_and_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = machine.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", Device([errno.EIO] * 9).read)
        events, cursor = log.read(FROM_BOOT)
        assert codes(events) == ["kernel_log unreadable"]
        events, cursor = log.read(cursor)
        assert not events
    machine.write(LOST)
    events, cursor = log.read(cursor)
    assert sorted(codes(events)) == ["gpu_lost off_bus", "kernel_log readable", "xid 79"]


def test_no_log_at_all_is_told_once_over_restarts(machine: Machine) -> None:
    machine.kmsg.unlink()
    events, cursor = machine.open().read(FROM_NOW)
    assert codes(events) == ["kernel_log unreadable"]
    assert not machine.open().read(cursor)[0]
    assert machine.open().source == ""


def test_descriptors_are_given_back(machine: Machine) -> None:
    machine.write("hello")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        log = KernelLog(machine.root, clock=machine.now)
        log.read(FROM_BOOT)
        log.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_real_log_of_this_machine() -> None:
    log = KernelLog(journalctl=())
    try:
        events, cursor = log.read(FROM_BOOT)
        if codes(events)[:1] == ["kernel_log unreadable"]:
            pytest.skip("this machine does not let us read /dev/kmsg")
        assert log.source == "kmsg"
        for _ in range(100):
            events, cursor = log.read(cursor)
        position = json.loads(cursor)
        assert position["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        again = KernelLog(journalctl=())
        events, cursor = again.read(cursor)
        again.close()
        assert [event for event in events if event.kind != "kernel_log"] == []
        assert json.loads(cursor)["seq"] >= position["seq"]
    finally:
        log.close()


# ---------------------------------------------------------------- the journal


class Journal:
    """A `journalctl` of our own: prints what stands in a file after the cursor it is given."""

    def __init__(self, root: Path) -> None:
        self.file = root / "journal.jsonl"
        self.file.touch()
        self.script = root / "journalctl.py"
        self.tell(
            """
            after = [arg.split("=", 1)[1] for arg in sys.argv if arg.startswith("--after-cursor=")]
            after = after[0] if after else None
            lines = open(path).read().splitlines()
            cursors = [json.loads(line)["__CURSOR"] for line in lines]
            if after is not None and after not in cursors:
                sys.exit(1)
            for line in lines[cursors.index(after) + 1 if after else 0 :]:
                print(line)
            """
        )
        self.count = 0

    def tell(self, body: str) -> None:
        head = f"import json, sys, time\npath = {str(self.file)!r}\n"
        self.script.write_text(head + textwrap.dedent(body))

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-I", "-S", str(self.script))

    def write(
        self, message: object, at_s: float = 100.0, transport: str = "kernel", facility: str = "0"
    ) -> None:
        entry = {
            "__CURSOR": f"s={self.count}",
            "_TRANSPORT": transport,
            "SYSLOG_FACILITY": facility,
            "_SOURCE_MONOTONIC_TIMESTAMP": str(round(at_s * 1e6)),
            "MESSAGE": message,
        }
        self.count += 1
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


@pytest.fixture
def journal(tmp_path: Path, machine: Machine) -> Journal:
    machine.kmsg.unlink()
    return Journal(tmp_path)


def follow(
    machine: Machine, journal: Journal, cursor: str, log: KernelLog | None = None
) -> tuple[list[Event], str]:
    """Read until one run of the journal's command has been taken in."""
    if log is None:
        log = KernelLog(machine.root, journalctl=journal.command, clock=machine.now)
        machine.opened.append(log)
    machine.sleep(20)
    told: list[Event] = []
    end = time.monotonic() + 90
    while time.monotonic() < end:
        events, cursor = log.read(cursor)
        told += events
        if not psutil.Process().children():
            return told, cursor
        time.sleep(0.01)
    raise AssertionError("the journal's command did not end")


def test_the_journal_gives_the_same_events(machine: Machine, journal: Journal) -> None:
    journal.write("hello")
    journal.write(LOST, at_s=110)
    journal.write(
        "NVRM: The NVIDIA GPU 0000:c4:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        at_s=111,
    )
    events, cursor = follow(machine, journal, FROM_BOOT)
    assert codes(events) == ["xid 79", "gpu_lost off_bus", "gpu_lost off_bus"]
    assert json.loads(events[0].detail)["kernel_s"] == 110
    journal.write(LOST.replace("6a", "6b"), at_s=120)
    events, cursor = follow(machine, journal, cursor)
    assert {event.entity for event in events} == {"pci:0000:6b:00.0"}
    assert follow(machine, journal, cursor)[0] == []


def test_only_the_kernel_counts_in_the_journal_too(machine: Machine, journal: Journal) -> None:
    journal.write(LOST, facility="1")  # written to /dev/kmsg by a process: the journal calls it kernel, too
    journal.write(LOST, facility="3")
    journal.write(LOST, transport="syslog")
    journal.write(LOST, transport="stdout")
    journal.write(None)
    journal.write("hello")
    assert follow(machine, journal, FROM_BOOT)[0] == []


def test_bytes_that_are_no_text(machine: Machine, journal: Journal) -> None:
    journal.write([*LOST.encode(), 0xFF, 300, -1])
    assert codes(follow(machine, journal, FROM_BOOT)[0]) == ["xid 79", "gpu_lost off_bus"]


def test_a_vacuumed_journal_repeats_nothing(machine: Machine, journal: Journal) -> None:
    journal.write(LOST, at_s=110)
    _, cursor = follow(machine, journal, FROM_BOOT)
    journal.file.write_text("")
    journal.count = 100
    journal.write(LOST.replace("6a", "6b"), at_s=105)  # an older one that is still there
    journal.write(LOST.replace("6a", "6c"), at_s=120)
    log = KernelLog(machine.root, journalctl=journal.command, clock=machine.now)
    machine.opened.append(log)
    events, cursor = follow(machine, journal, cursor, log)
    more, _ = follow(machine, journal, cursor, log)
    assert {event.entity for event in [*events, *more]} == {"pci:0000:6c:00.0"}


def test_from_the_device_to_the_journal_and_back(machine: Machine, journal: Journal) -> None:
    machine.kmsg.touch()
    machine.write("hello", at_s=100)
    machine.write(LOST, at_s=110)
    told, cursor = machine.open().read(FROM_BOOT)
    assert codes(told) == ["xid 79", "gpu_lost off_bus"]
    machine.kmsg.rename(machine.root / "kmsg")  # the permission is gone
    journal.write("hello", at_s=100)
    journal.write(LOST, at_s=110)
    journal.write(LOST.replace("6a", "6b"), at_s=120)
    told, cursor = follow(machine, journal, cursor)
    assert {event.entity for event in told} == {"pci:0000:6b:00.0"}
    (machine.root / "kmsg").rename(machine.kmsg)
    machine.write(LOST.replace("6a", "6b"), at_s=120)
    machine.write(LOST.replace("6a", "6c"), at_s=130)
    told, cursor = machine.open().read(cursor)
    assert {event.entity for event in told} == {"pci:0000:6c:00.0"}


def test_a_journal_that_shows_nothing_is_not_health(machine: Machine, journal: Journal) -> None:
    log = KernelLog(machine.root, journalctl=journal.command, clock=machine.now)
    machine.opened.append(log)
    events, cursor = follow(machine, journal, FROM_BOOT, log)
    more, cursor = follow(machine, journal, cursor, log)
    assert codes([*events, *more]) == ["kernel_log unreadable"]
    journal.write(LOST)
    events, cursor = follow(machine, journal, cursor, log)
    more, cursor = follow(machine, journal, cursor, log)
    assert sorted(codes([*events, *more])) == ["gpu_lost off_bus", "kernel_log readable", "xid 79"]


def test_no_journalctl_is_told(machine: Machine, journal: Journal) -> None:
    log = KernelLog(machine.root, journalctl=("/nonexistent/journalctl",), clock=machine.now)
    machine.opened.append(log)
    events, cursor = log.read(FROM_BOOT)
    more, _ = log.read(cursor)
    assert codes([*events, *more]) == ["kernel_log unreadable"]


def test_a_journalctl_that_hangs_never_holds_us_and_is_ended(machine: Machine, journal: Journal) -> None:
    journal.tell("time.sleep(600)")
    log = KernelLog(machine.root, journalctl=journal.command, clock=machine.now)
    machine.opened.append(log)
    _, cursor = log.read(FROM_BOOT)
    children = psutil.Process().children()
    assert len(children) == 1
    for _ in range(5):
        machine.sleep(14)
        _, cursor = log.read(cursor)
    assert psutil.Process().children() == []
    assert not children[0].is_running()


def test_a_flood_from_the_journal_is_taken_in_parts(machine: Machine, journal: Journal) -> None:
    for number in range(MAX_RECORDS + 100):
        journal.write("eth0: link up", at_s=100 + number / 1000)
    journal.write(LOST, at_s=200)
    events, _ = follow(machine, journal, FROM_BOOT)
    assert codes(events) == ["xid 79", "gpu_lost off_bus"]


def test_the_real_journalctl_is_understood(machine: Machine) -> None:
    """Whatever this machine's journal holds: nothing is raised, held up or invented."""
    machine.kmsg.unlink()
    log = KernelLog(machine.root, journalctl=("journalctl",), clock=machine.now)
    machine.opened.append(log)
    events, cursor = log.read(FROM_NOW)
    end = time.monotonic() + 90
    while psutil.Process().children() and time.monotonic() < end:
        time.sleep(0.05)
        more, cursor = log.read(cursor)
        events = [*events, *more]
    machine.sleep(20)
    events = [*events, *log.read(cursor)[0]]
    assert {event.kind for event in events} <= {"kernel_log"}
