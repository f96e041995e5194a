"""The K drills of the kernel log, and their relatives."""

import json
from typing import Protocol

import pytest

from gpufleet.event import Event
from gpufleet_agent.drivers.kmsg import FROM_BOOT, KernelLog
from gpufleet_agent.kernel_log import Now, Record, State

LOST = "NVRM: Xid (PCI:0000:6a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PROBE = (
    "NVRM: The NVIDIA GPU 0000:c4:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


class Machine(Protocol):
    wall_us: int
    uptime_s: float
    suspended_s: float
    uuid_of: object

    def events(self, *texts: str) -> list[Event]: ...
    def write(
        self, *texts: str, at_s: float | None = None, facility: int = 0, seq: int | None = None
    ) -> None: ...
    def boot(self, boot_id: str) -> None: ...
    def open(self) -> KernelLog: ...
    def sleep(self, seconds: float) -> None: ...
    def now(self) -> Now: ...


def lost(events: list[Event]) -> list[str]:
    return [event.entity for event in events if event.kind == "gpu_lost"]


def cursor_at(boot: str, seq: int) -> str:
    """What a reader of boot `boot` that stood at `seq` would have stored."""
    return json.dumps({"boot": boot, "seq": seq, "stamp_us": seq * 1000})


# ---------------------------------------------------------------- K01


def test_K01_xid_line_shapes(machine: Machine) -> None:
    lines = [
        f"[ 812.4] {LOST}",
        "kernel: NVRM: Xid (0000:6a:00): 14, Channel 00000007",
        "2026-03-01T02:03:04,000005+00:00 NVRM: Xid (PCI:000d:00:00): 13, pid=4242, name=trainer, "
        "Graphics Exception: ChID 0009",
        "NVRM: Xid (PCI:0001:01:00): 119, pid=77, name=nvc:[driver], Timeout after 6s of waiting for RPC",
        "NVRM: Xid (PCI:0011:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x00000001 0x00000000)",
        "NVRM: Xid (PCI:0011:01:00): 145, pid=9, name=ray::Worker, "
        "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x2 0x8)",
        "NVRM: Xid (PCI:0000:a7:00): 154, GPU recovery action changed "
        "from 0x0 (None) to 0x1 (GPU Reset Required)",
    ]
    xids = [event for event in machine.events(*lines) if event.kind == "xid"]
    assert [event.code for event in xids] == ["79", "14", "13", "119", "149", "145", "154"]
    assert [event.entity for event in xids] == [
        "pci:0000:6a:00.0",
        "pci:0000:6a:00.0",
        "pci:000d:00:00.0",
        "pci:0001:01:00.0",
        "pci:0011:01:00.0",
        "pci:0011:01:00.0",
        "pci:0000:a7:00.0",
    ]
    for event, line in zip(xids, lines, strict=True):
        assert event.message in line  # the raw line is kept
        assert event.message.startswith("NVRM: Xid (")
    details = [json.loads(event.detail) for event in xids]
    assert (details[4]["fatal"], details[4]["link"]) == (True, None)
    assert (details[5]["fatal"], details[5]["link"]) == (False, 13)
    assert details[5]["process"] == "ray::Worker"


def test_K01_what_cannot_be_read_is_told_and_what_is_not_the_driver_is_not(machine: Machine) -> None:
    events = machine.events(
        "NVRM: Xid (PCI:0000:6a:00): ?, new words",
        "app[1]: Xid (PCI:0000:6a:00): 79, GPU has fallen off the bus.",
        "myapp: NVRM: Xid (PCI:0000:6a:00): 79, GPU has fallen off the bus.",
    )
    assert [(event.kind, event.entity) for event in events] == [("xid_unparsed", "pci:0000:6a:00.0")]
    assert events[0].message == "NVRM: Xid (PCI:0000:6a:00): ?, new words"


def test_K01_only_the_kernel_itself_counts(machine: Machine) -> None:
    machine.write(LOST, facility=1)
    machine.write(LOST, facility=3)
    machine.write(LOST.replace("6a", "6b"))
    events, _ = machine.open().read(FROM_BOOT)
    assert {event.entity for event in events} == {"pci:0000:6b:00.0"}


def test_K01_a_process_name_cannot_write_a_line_of_its_own(machine: Machine) -> None:
    forged = machine.events(
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=4242, name=x\n"
        "NVRM: Xid (PCI:0000:6a:00): 79, GPU has fallen off the bus.",
        "usb 1-1: Product: x\nNVRM: Xid (PCI:0000:6a:00): 79, GPU has fallen off the bus.",
        "Out of memory: Killed process 5 (a\nEDAC MC0: 1 UE) total-vm:1kB",
    )
    assert "pci:0000:6a:00.0" not in {event.entity for event in forged}
    assert "edac" not in {event.kind for event in forged}


# ---------------------------------------------------------------- K02


def test_K02_three_lines_without_a_number(machine: Machine) -> None:
    events = machine.events(*PROBE)
    assert lost(events) == ["pci:0000:c4:00.0"]
    assert len(events) == 1


def test_K02_the_number_and_the_text_are_one_loss(machine: Machine) -> None:
    events = machine.events(
        "NVRM: Xid (PCI:0000:2a:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:2a:00.0: GPU has fallen off the bus.",
    )
    assert lost(events) == ["pci:0000:2a:00.0"]
    assert [event.code for event in events if event.kind == "xid"] == ["79"]


def test_K02_other_lines_in_between(machine: Machine) -> None:
    between = [
        "nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
        "NVRM: GPU at PCI:0000:3b:00: GPU-00000000-0000-4000-8000-000000000001",
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=a, x",
        *(f"eth0: link up {number}" for number in range(50)),
    ]
    events = machine.events(PROBE[0], *between, PROBE[1], *between[:1], PROBE[2])
    assert lost(events) == ["pci:0000:c4:00.0"]


def test_K02_two_cards_at_once(machine: Machine) -> None:
    other = PROBE[0].replace("c4", "d4")
    events = machine.events(PROBE[0], other, PROBE[1], PROBE[1], PROBE[2], PROBE[2])
    assert sorted(lost(events)) == ["pci:0000:c4:00.0", "pci:0000:d4:00.0"]


def test_K02_a_card_that_is_not_supported_is_not_lost(machine: Machine) -> None:
    events = machine.events(
        "NVRM: The NVIDIA GPU 0000:0e:00.0 (PCI ID: 10de:06d1)",
        "NVRM: installed in this system is not supported by the",
        "NVRM: NVIDIA 550.54.15 driver release.",
        *PROBE,
    )
    assert lost(events) == ["pci:0000:c4:00.0"]


def test_K02_the_join_survives_the_end_of_a_call_and_a_new_process(machine: Machine) -> None:
    machine.write(PROBE[0])
    events, cursor = machine.open().read(FROM_BOOT)
    assert not events
    machine.write(*PROBE[1:])
    events, cursor = machine.open().read(cursor)
    assert lost(list(events)) == ["pci:0000:c4:00.0"]
    events, _ = machine.open().read(cursor)
    assert not events


def test_K02_an_old_first_line_is_not_joined_with_a_new_last_one(machine: Machine) -> None:
    machine.write(PROBE[0], at_s=100)
    machine.write(PROBE[2], at_s=200)
    events, _ = machine.open().read(FROM_BOOT)
    assert [event.entity for event in events] == ["node:"]


def test_K02_lost_again_after_it_came_back_is_told_again(machine: Machine) -> None:
    off = "NVRM: GPU 0000:c4:00.0: GPU has fallen off the bus."
    events = machine.events(
        off, off, "pci 0000:c4:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint", off
    )
    assert sum(event.count for event in events if event.kind == "gpu_lost") == 2


# ---------------------------------------------------------------- K04

UUID = "GPU-00000000-0000-4000-8000-00000000001e"
GONE = "NVRM: Xid (PCI:000d:00:00): 79, GPU has fallen off the bus."


class Driver:
    """Knows the card between its start and the loss; counts how often it is asked."""

    def __init__(self) -> None:
        self.answers = False
        self.asked = 0

    def uuid_of(self, pci: str) -> str:
        self.asked += 1
        return UUID if self.answers and pci == "000d:00:00.0" else ""


def test_K04_the_card_has_its_name_although_it_is_gone(machine: Machine) -> None:
    driver = Driver()
    machine.uuid_of = driver.uuid_of
    log = machine.open()
    machine.write("NVRM: Xid (PCI:000d:00:00): 43, pid=1, name=a, Ch 1")
    events, cursor = log.read(FROM_BOOT)  # inventory unavailable: kept, with the bus id alone
    assert "uuid" not in json.loads(events[0].detail)
    assert events[0].entity == "pci:000d:00:00.0"

    driver.answers = True  # the failed look-up was not remembered
    machine.sleep(60)
    machine.write("NVRM: Xid (PCI:000d:00:00): 31, pid=1, name=a, Ch 1")
    events, cursor = log.read(cursor)
    assert json.loads(events[0].detail)["uuid"] == UUID

    driver.answers = False  # NVML says the card is lost
    machine.sleep(30)
    machine.write(GONE)
    events, _ = machine.open().read(cursor)  # and the agent was restarted
    assert [event.kind for event in events] == ["xid", "gpu_lost"]
    assert {json.loads(event.detail)["uuid"] for event in events} == {UUID}


def test_K04_the_log_names_the_card_itself(machine: Machine) -> None:
    events = machine.events(
        f"NVRM: GPU at PCI:000d:00:00: {UUID}", "NVRM: GPU Board Serial Number: 1320000000001", GONE
    )
    details = [json.loads(event.detail) for event in events]
    assert {(detail["uuid"], detail["serial"], detail["named_by"]) for detail in details} == {
        (UUID, "1320000000001", "log")
    }


def test_K04_names_are_learned_from_what_was_there_before_we_came(machine: Machine) -> None:
    machine.write(f"NVRM: GPU at PCI:000d:00:00: {UUID}", LOST, at_s=10)
    log = machine.open()
    events, cursor = log.read("")
    assert not events
    machine.write(GONE)
    events, _ = log.read(cursor)
    assert json.loads(events[0].detail)["uuid"] == UUID


def test_K04_a_swapped_board_is_not_called_by_the_old_name(machine: Machine) -> None:
    new = UUID.replace("1e", "2f")
    machine.write(f"NVRM: GPU at PCI:000d:00:00: {UUID}", "NVRM: GPU Board Serial Number: 1320000000001")
    _, cursor = machine.open().read(FROM_BOOT)
    machine.boot("b3")
    machine.write(GONE)
    events, _ = machine.open().read(cursor)
    detail = json.loads(events[0].detail)
    assert (detail["uuid"], detail["named_by"]) == (UUID, "earlier boot")  # all that is known, and it says so
    machine.boot("b4")
    machine.write(f"NVRM: GPU at PCI:000d:00:00: {new}", GONE)
    events, _ = machine.open().read(cursor)
    detail = json.loads(events[0].detail)
    assert detail["uuid"] == new
    assert "serial" not in detail


# ---------------------------------------------------------------- K05


def test_K05_the_boot_gap_and_the_kernel_clock(machine: Machine) -> None:
    machine.write(LOST, at_s=12.0, seq=10)
    machine.write("NVRM: Xid (PCI:0000:6a:00): 154, GPU recovery action changed", at_s=7190.0, seq=11)
    events, cursor = machine.open().read(cursor_at("b1", 99999))
    told = {event.code: event for event in events if event.kind == "xid"}
    assert set(told) == {"79", "154"}
    assert told["79"].ts_us == machine.wall_us - 7188_000_000  # two hours back
    assert told["154"].ts_us == machine.wall_us - 10_000_000
    assert json.loads(told["79"].detail)["kernel_s"] == 12.0
    assert told["79"].mono_us == 12_000_000

    again, _ = machine.open().read(cursor)
    assert not again  # restarting the agent in the same boot adds nothing


def test_K05_records_that_were_overwritten_before_we_came_are_counted(machine: Machine) -> None:
    machine.write("hello", seq=10)
    events, _ = machine.open().read(cursor_at("b1", 99999))
    assert [(event.kind, event.code, event.count) for event in events] == [("kernel_log", "lost", 10)]


def test_K05_nothing_of_the_earlier_boot_counts_against_the_new_one(machine: Machine) -> None:
    machine.write(LOST)
    machine.write(*["NVRM: Xid (PCI:0000:6a:00): 31, pid=1, name=a, Ch 1"] * 100)
    _, cursor = machine.open().read(FROM_BOOT)  # 99 of them are not yet told
    machine.boot("b3")
    machine.write("hello")
    log = machine.open()
    events, cursor = log.read(cursor)
    machine.sleep(300)
    rest, cursor = log.read(cursor)
    assert not [*events, *rest]
    machine.write(LOST)  # still gone after the reboot: told again
    events, _ = log.read(cursor)
    assert lost(list(events)) == ["pci:0000:6a:00.0"]


def test_K05_a_stepped_wall_clock_moves_no_event(machine: Machine) -> None:
    log = machine.open()
    _, cursor = log.read("")
    machine.sleep(5)
    machine.write(LOST)
    machine.wall_us += 36_000_000_000  # ten hours
    events, _ = log.read(cursor)
    assert events[0].ts_us == machine.wall_us


@pytest.mark.parametrize("drift_s", [-3600.0, 3600.0])
def test_K05_a_kernel_clock_that_drifted_is_bounded_by_what_we_know(machine: Machine, drift_s: float) -> None:
    log = machine.open()
    machine.write("hello")
    _, cursor = log.read("")
    machine.sleep(5)
    machine.write(LOST, at_s=machine.uptime_s + drift_s)
    events, cursor = log.read(cursor)
    # Written after the last look, five seconds ago, and not in the future.
    assert machine.wall_us - 5_000_000 <= events[0].ts_us <= machine.wall_us


def test_K05_suspend_does_not_age_what_was_just_written(machine: Machine) -> None:
    machine.suspended_s = 36_000
    machine.write(LOST)
    events, _ = machine.open().read(FROM_BOOT)
    assert events[0].ts_us == machine.wall_us
    assert events[0].mono_us == machine.now().boot_us


def test_cursors_are_small(machine: Machine) -> None:
    machine.write(*[f"eth0: link up {number}" for number in range(1000)])
    _, cursor = machine.open().read(FROM_BOOT)
    assert len(cursor) < 200


def test_state_has_nothing_shared_between_readers() -> None:
    one, other = State(), State()
    one.lost["x"] = 1
    one.half.append(("x", 1))
    assert not other.lost
    assert not other.half
    assert Record(0, 0, "x").text == "x"
