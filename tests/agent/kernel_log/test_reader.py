"""What is spread over lines is joined; what repeats is counted; nothing is hidden, nothing told twice."""

import json
from typing import Protocol

import pytest

from gpufleet.event import Event
from gpufleet_agent.drivers.kmsg import FROM_BOOT, MAX_EVENTS, KernelLog
from gpufleet_agent.kernel_log import MAX_FOLDS

FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid={pid}, name=train, Ch 00000010"


class Machine(Protocol):
    uptime_s: float

    def events(self, *texts: str) -> list[Event]: ...
    def write(
        self, *texts: str, at_s: float | None = None, facility: int = 0, seq: int | None = None
    ) -> None: ...
    def open(self) -> KernelLog: ...
    def sleep(self, seconds: float) -> None: ...


# ---------------------------------------------------------------- folding


def test_a_storm_is_one_event_and_one_count(machine: Machine) -> None:
    machine.write(*(FAULT.format(pid=pid) for pid in (7, 8, 9) for _ in range(1000)))
    log = machine.open()
    events, cursor = log.read(FROM_BOOT)
    assert [(event.code, event.count) for event in events] == [("31", 1)]
    machine.sleep(61)
    events, cursor = log.read(cursor)
    assert [(event.code, event.count) for event in events] == [("31", 2999)]
    detail = json.loads(events[0].detail)
    assert detail["folded"] is True
    assert detail["pids"] == [7, 8, 9]
    machine.sleep(61)
    assert log.read(cursor)[0] == []


def test_the_first_of_each_kind_is_told_at_once_in_the_middle_of_a_storm(machine: Machine) -> None:
    storm = [FAULT.format(pid=7)] * 500
    machine.write(
        *storm,
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=7, name=train, DBE",
        *storm,
        FAULT.format(pid=7).replace("3b", "3c"),
        *storm,
    )
    events, _ = machine.open().read(FROM_BOOT)
    assert [(event.entity[9:11], event.code) for event in events] == [
        ("3b", "31"),
        ("3b", "48"),
        ("3c", "31"),
    ]


def test_links_and_words_are_not_folded_into_each_other(machine: Machine) -> None:
    text = "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT {word} XC0 i0 Link {link} (0x1 0x2)"
    machine.write(
        text.format(word="Nonfatal", link="01"),
        text.format(word="Fatal", link="01"),
        text.format(word="Fatal", link="02"),
    )
    events, _ = machine.open().read(FROM_BOOT)
    assert len(events) == 3


def test_counts_survive_a_restart_and_add_up(machine: Machine) -> None:
    total, cursor = 0, FROM_BOOT
    for _ in range(30):
        machine.write(*[FAULT.format(pid=7)] * 10)
        events, cursor = machine.open().read(cursor)  # a new process each time
        total += sum(event.count for event in events)
        machine.sleep(7)
    machine.sleep(120)
    events, cursor = machine.open().read(cursor)
    total += sum(event.count for event in events)
    assert total == 300


def test_a_long_storm_is_told_about_once_a_minute(machine: Machine) -> None:
    log, cursor, told = machine.open(), FROM_BOOT, 0
    for _ in range(120):  # ten minutes
        machine.write(*[FAULT.format(pid=7)] * 10)
        events, cursor = log.read(cursor)
        told += len(events)
        machine.sleep(5)
    assert 9 <= told <= 12


def test_many_different_things_lose_no_count_and_keep_the_cursor_small(machine: Machine) -> None:
    lines = [
        f"NVRM: Xid (PCI:0000:{bus:02x}:00): {number}, pid=1, name=a, x"
        for _ in range(3)
        for bus in range(20)
        for number in (13, 31, 32, 43, 45, 69, 94)
    ]
    machine.write(*lines)
    log, total, cursor = machine.open(), 0, FROM_BOOT
    for _ in range(10):
        events, cursor = log.read(cursor)
        total += sum(event.count for event in events)
        assert len(events) <= MAX_EVENTS + MAX_FOLDS
        assert len(cursor) < 40_000
        machine.sleep(70)
    assert total == len(lines)


# ---------------------------------------------------------------- SXid


def test_continuation_lines_of_an_sxid_count_once(machine: Machine) -> None:
    head = "nvidia-nvswitch3: SXid (PCI:0000:c2:00.0): "
    events = machine.events(
        f"{head}22003, Fatal, Link 46 Minion Halt",
        f"{head}22003, Severity 1 Engine instance 46 Sub-engine instance 00",
        f"{head}22003, Data {{0x00000000, 0x0000002e, 0x00000000}}",
        f"{head}22003, Data {{0x00000000, 0x0000002e, 0x00000000}}",
        f"{head}20034, Fatal, Link 46 LTSSM Fault Up",
    )
    assert [(event.code, event.count) for event in events] == [("22003", 1), ("20034", 1)]
    assert json.loads(events[0].detail)["engine"] == 46


def test_a_continuation_in_the_next_call_is_not_an_event(machine: Machine) -> None:
    machine.write("nvidia-nvswitch3: SXid (PCI:0000:c2:00.0): 22003, Fatal, Link 46 Minion Halt")
    events, cursor = machine.open().read(FROM_BOOT)
    assert len(events) == 1
    machine.write(
        "nvidia-nvswitch3: SXid (PCI:0000:c2:00.0): 22003, "
        "Severity 1 Engine instance 46 Sub-engine instance 00"
    )
    assert machine.open().read(cursor)[0] == []


def test_a_continuation_whose_head_was_overwritten_is_an_event(machine: Machine) -> None:
    line = (
        "nvidia-nvswitch3: SXid (PCI:0000:c2:00.0): 22003, "
        "Severity 1 Engine instance 46 Sub-engine instance 00"
    )
    events = machine.events(line, line)
    assert [(event.kind, event.code, event.count) for event in events] == [("sxid", "22003", 1)]


# ---------------------------------------------------------------- PCIe


def test_a_port_and_its_device_report_one_error(machine: Machine) -> None:
    events = machine.events(
        "pcieport 0000:00:01.0: AER: Multiple Corrected error received: 0000:01:00.0",
        "nvidia 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "nvidia 0000:01:00.0:   device [10de:2330] error status/mask=00000041/0000a000",
        "nvidia 0000:01:00.0:    [ 0] RxErr                  (First)",
        "nvidia 0000:01:00.0:    [ 6] BadTLP                ",
    )
    assert [(event.kind, event.entity, event.count) for event in events] == [("aer", "pci:0000:01:00.0", 1)]
    detail = json.loads(events[0].detail)
    assert detail["status"] == "0x00000041"
    assert detail["bits"] == ["RxErr", "BadTLP"]


def test_a_port_alone_is_told_after_a_while_and_only_once(machine: Machine) -> None:
    machine.write("pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0")
    log = machine.open()
    events, cursor = log.read(FROM_BOOT)
    assert not events
    machine.sleep(5)
    events, cursor = machine.open().read(cursor)
    assert [(event.entity, event.code) for event in events] == [("pci:0000:01:00.0", "corrected")]
    machine.sleep(5)
    assert machine.open().read(cursor)[0] == []


def test_an_error_long_after_a_port_does_not_swallow_it(machine: Machine) -> None:
    machine.write("pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0", at_s=100)
    machine.write(
        "nvme 0000:05:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)", at_s=200
    )
    events, _ = machine.open().read(FROM_BOOT)
    assert [event.entity for event in events] == ["pci:0000:01:00.0", "pci:0000:05:00.0"]


# ---------------------------------------------------------------- firmware records, machine checks, memory

APEI = (
    "{3}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4",
    "{3}[Hardware Error]: event severity: recoverable",
    "{3}[Hardware Error]:  Error 0, type: recoverable",
)


def test_a_firmware_record_of_a_pcie_error(machine: Machine) -> None:
    events = machine.events(
        *APEI,
        "{3}[Hardware Error]:   section_type: PCIe error",
        "{3}[Hardware Error]:   device_id: 0000:41:00.0",
        "nvidia 0000:41:00.0: AER: aer_status: 0x00004000, aer_mask: 0x00400000",
    )
    assert [(event.kind, event.entity, event.code) for event in events] == [
        ("aer", "pci:0000:41:00.0", "nonfatal")
    ]


@pytest.mark.parametrize("edac_first", [False, True])
def test_a_firmware_record_of_a_memory_error_and_edac_count_once(machine: Machine, edac_first: bool) -> None:
    record = (
        *APEI,
        "{3}[Hardware Error]:   section_type: memory error",
        "{3}[Hardware Error]:   physical_address: 0x0000001234567000",
    )
    edac = "EDAC MC0: 1 UE memory error on DIMM_A1 (node:0 card:0 page:0x1234567 offset:0x0)"
    events = machine.events(*((edac, *record) if edac_first else (*record, edac)))
    assert [(event.kind, event.code, event.count) for event in events] == [("edac", "uncorrected", 1)]
    assert json.loads(events[0].detail)["label"] == "DIMM_A1"


def test_a_firmware_record_alone_has_its_address(machine: Machine) -> None:
    events = machine.events(
        *APEI,
        "{3}[Hardware Error]:   section_type: memory error",
        "{3}[Hardware Error]:   physical_address: 0x0000001234567000",
    )
    assert [event.kind for event in events] == ["edac"]
    assert json.loads(events[0].detail)["physical_address"] == "0x0000001234567000"


@pytest.mark.parametrize("logged_first", [False, True])
def test_events_logged_is_told_only_where_nothing_says_more(machine: Machine, logged_first: bool) -> None:
    logged = "mce: [Hardware Error]: Machine check events logged"
    check = "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: 8c00004000010091"
    events = machine.events(*((logged, check) if logged_first else (check, logged)))
    assert [event.code for event in events] == ["corrected"]


# ---------------------------------------------------------------- NFS


def test_a_server_that_hangs_is_opened_and_closed_with_its_duration(machine: Machine) -> None:
    machine.write(*["nfs: server fs01 not responding, still trying"] * 50, at_s=100)
    machine.write("nfs: server fs02 not responding, still trying", at_s=110)
    events, cursor = machine.open().read(FROM_BOOT)
    assert [json.loads(event.detail)["server"] for event in events] == ["fs01", "fs02"]
    machine.write(*["nfs: server fs01 OK"] * 50, at_s=190.5)
    events, _ = machine.open().read(cursor)
    assert [event.code for event in events] == ["ok"]
    detail = json.loads(events[0].detail)
    assert (detail["server"], detail["duration_s"], detail["lines"]) == ("fs01", 90.5, 50)


def test_a_server_that_hangs_again_is_told_again(machine: Machine) -> None:
    pair = ("nfs: server fs01 not responding, still trying", "nfs: server fs01 OK")
    assert [event.code for event in machine.events(*pair, *pair)] == ["not_responding", "ok"] * 2


def test_an_ok_whose_beginning_was_not_seen_has_no_made_up_duration(machine: Machine) -> None:
    events = machine.events("nfs: server fs01 OK")
    assert json.loads(events[0].detail)["duration_s"] is None


# ---------------------------------------------------------------- memory, stuck tasks


def test_a_kill_names_the_cgroup_and_counts_once(machine: Machine) -> None:
    events = machine.events(
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0-1,oom_memcg=/slurm/job_12,"
        "task_memcg=/slurm/job_12/step_0,pid=9,uid=1/task_0,task=a,pid=1,uid=2,pid=4242,uid=1000",
        "Memory cgroup out of memory: Killed process 4242 (python) total-vm:8000kB, anon-rss:4000kB",
        "oom_reaper: reaped process 4242 (python), now anon-rss:0kB",
    )
    assert [(event.kind, event.code, event.count) for event in events] == [("oom", "cgroup", 1)]
    detail = json.loads(events[0].detail)
    assert detail["cgroup"].startswith("/slurm/job_12/step_0")
    assert (detail["pid"], detail["process"]) == (4242, "python")


def test_old_kernels_say_it_twice(machine: Machine) -> None:
    events = machine.events(
        "Out of memory: Kill process 4242 (python) score 900 or sacrifice child",
        "Killed process 4242 (python) total-vm:8000kB, anon-rss:4000kB, file-rss:0kB",
    )
    assert [event.count for event in events] == [1]


def test_a_hung_task_says_which_modules_it_hangs_in(machine: Machine) -> None:
    events = machine.events(
        "INFO: task python:4242 blocked for more than 120 seconds.",
        "      Tainted: P           OE     5.15.0-91-generic #101-Ubuntu",
        '"echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.',
        "Call Trace:",
        " <TASK>",
        " __schedule+0x2cd/0x8a0",
        " rm_ioctl+0x50/0x60 [nvidia]",
        " ? nvidia_ioctl+0x123/0x456 [nvidia]",
        " nvidia_frontend_unlocked_ioctl+0x58/0x90 [nvidia_uvm]",
    )
    assert [event.kind for event in events] == ["hung_task"]
    assert json.loads(events[0].detail)["modules"] == ["nvidia", "nvidia_uvm"]
