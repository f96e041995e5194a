"""The health logs of NVMe controllers: composed pages, and everything that can stand between us and one."""

import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import nvme
from gpufleet_agent.drivers.disks import Disks
from gpufleet_agent.drivers.nvme import (
    COLUMNS,
    EVERY_S,
    HUNG_S,
    KEPT_S,
    HealthLogs,
    Refused,
    health_log,
    parse,
)
from gpufleet_agent.probes import disk as probe

METRICS = tuple(metric for metric in probe.METRICS if metric.name in COLUMNS)
BLANK = bytes(512)


def page(**fields: int) -> bytes:
    """A log with these fields; places and sizes as the NVMe base specification has them."""
    places = {
        "warning": (0, 1), "kelvin": (1, 2), "spare": (3, 1), "spare_limit": (4, 1), "used": (5, 1),
        "units_read": (32, 16), "units_written": (48, 16), "hours": (128, 16), "unsafe": (144, 16),
        "media": (160, 16), "logged": (176, 16),
    }  # fmt: skip
    made = bytearray(BLANK)
    for name, value in fields.items():
        place, size = places[name]
        made[place : place + size] = value.to_bytes(size, "little")
    return bytes(made)


GOOD = page(
    warning=4, kelvin=311, spare=97, spare_limit=10, used=3, units_read=2_000_000, units_written=7,
    hours=9001, unsafe=42, media=1, logged=2**40,
)  # fmt: skip
READ = {
    "smart_warning_bits": 4,
    "smart_temperature_c": 38.0,
    "smart_spare_pct": 97.0,
    "smart_spare_limit_pct": 10.0,
    "smart_used_pct": 3.0,
    "smart_read_bytes_total": 1_024_000_000_000,
    "smart_written_bytes_total": 3_584_000,
    "smart_power_on_s_total": 9001 * 3600,
    "smart_unsafe_shutdowns_total": 42,
    "smart_media_errors_total": 1,
    "smart_logged_errors_total": 2**40,
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Controllers:
    """What is asked, and what it says: bytes, or an exception."""

    def __init__(self, root: Path, **answers: bytes | Exception) -> None:
        self.answers: dict[str, bytes | Exception] = dict(answers)
        self.asked: list[str] = []
        self.clock = Clock()
        (root / "dev").mkdir(exist_ok=True)
        for name in answers:
            (root / "dev" / name).touch()
        # the answer is waited for as long as it takes on a busy machine
        self.logs = HealthLogs(root, self.ask, self.clock, wait_s=60.0)

    def ask(self, device: Path) -> bytes:
        self.asked.append(device.name)
        answer = self.answers[device.name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def every(reason: Reason, code: str) -> dict[str, Cell]:
    return dict.fromkeys(COLUMNS, Null(reason, code))


def test_a_page_is_read_as_the_specification_has_it() -> None:
    assert parse(GOOD) == READ
    assert {*READ, "smart_age_s"} == set(COLUMNS) == {metric.name for metric in METRICS}


@given(st.binary(min_size=512, max_size=512))
@example(b"\xff" * 511 + b"\x00")
@example(page(kelvin=1))
def test_whatever_stands_in_a_page_its_row_is_whole_and_in_range(data: bytes) -> None:
    found = parse(data)
    if isinstance(found, Null):
        assert data in (BLANK, b"\xff" * 512)
        return
    assert {*found, "smart_age_s"} == set(COLUMNS)
    for metric in METRICS[:-1]:
        cell = metric.check(found[metric.name])
        if isinstance(cell, Null):
            assert cell.reason is Reason.IMPLAUSIBLE
        else:
            assert cell == found[metric.name]
            assert isinstance(cell, int | float)
            assert (-60 if metric.name == "smart_temperature_c" else 0) <= cell < 2**63


def test_counts_of_128_bits_that_cannot_be_are_null_alone() -> None:
    found = parse(
        page(kelvin=300, units_read=2**128 - 1, hours=2**100, unsafe=2**63, media=2**63 - 1, used=255)
    )
    assert not isinstance(found, Null)
    row = {metric.name: metric.check(found[metric.name]) for metric in METRICS[:-1]}
    for name in ("smart_read_bytes_total", "smart_power_on_s_total", "smart_unsafe_shutdowns_total"):
        cell = row[name]
        assert isinstance(cell, Null)
        assert cell.reason is Reason.IMPLAUSIBLE
    assert row["smart_media_errors_total"] == 2**63 - 1
    assert (row["smart_used_pct"], row["smart_written_bytes_total"]) == (255.0, 0)


@pytest.mark.parametrize(
    ("answer", "reason", "code"),
    [
        (BLANK, Reason.IMPLAUSIBLE, "blank"),
        (b"\xff" * 512, Reason.IMPLAUSIBLE, "blank"),
        (b"", Reason.FAILED, "0 bytes"),
        (GOOD[:511], Reason.FAILED, "511 bytes"),
        (GOOD + b"\0", Reason.FAILED, "513 bytes"),
        (PermissionError(errno.EACCES, "x"), Reason.NO_PERMISSION, "EACCES"),
        (PermissionError(errno.EPERM, "x"), Reason.NO_PERMISSION, "EPERM"),
        (OSError(errno.ENOTTY, "x"), Reason.NOT_SUPPORTED, "ENOTTY"),
        (OSError(errno.EINVAL, "x"), Reason.NOT_SUPPORTED, "EINVAL"),
        (OSError(errno.ENXIO, "x"), Reason.NOT_SUPPORTED, "ENXIO"),
        (OSError(errno.ENODEV, "x"), Reason.NOT_SUPPORTED, "ENODEV"),
        (FileNotFoundError(errno.ENOENT, "x"), Reason.NOT_SUPPORTED, "ENOENT"),
        (OSError(errno.EIO, "x"), Reason.FAILED, "EIO"),
        (OSError(errno.EINTR, "x"), Reason.FAILED, "EINTR"),
        (BlockingIOError(errno.EAGAIN, "x"), Reason.FAILED, "EAGAIN"),
        (OSError("no number"), Reason.FAILED, "failed"),
        (Refused(0x4002), Reason.NOT_SUPPORTED, "NVMe 0x2"),
        (Refused(0x4109), Reason.NOT_SUPPORTED, "NVMe 0x109"),
        (Refused(0x006), Reason.FAILED, "NVMe 0x6"),
        (ValueError("a bug of ours"), Reason.FAILED, "ValueError"),
    ],
    ids=str,
)
def test_without_a_page_every_column_says_why(
    tmp_path: Path, answer: bytes | Exception, reason: Reason, code: str
) -> None:
    controllers = Controllers(tmp_path, nvme0=answer, nvme1=GOOD)
    assert controllers.logs.read("nvme0") == every(reason, code)
    assert controllers.logs.read("nvme1") == {**READ, "smart_age_s": 0.0}


def test_a_controller_that_is_not_there(tmp_path: Path) -> None:
    controllers = Controllers(tmp_path)
    assert controllers.logs.read("nvme7") == every(Reason.NOT_SUPPORTED, "ENOENT")
    assert controllers.asked == []


def test_a_controller_is_asked_every_ten_minutes_and_its_answer_shown_with_its_age(tmp_path: Path) -> None:
    controllers = Controllers(tmp_path, nvme0=GOOD)
    logs, clock = controllers.logs, controllers.clock
    ages = []
    for clock.now in (1000.0, 1030.0, 1000.0 + EVERY_S - 1, 1000.0 + EVERY_S, 1000.0 + EVERY_S + 30):
        ages.append(logs.read("nvme0")["smart_age_s"])
    assert ages == [0.0, 30.0, EVERY_S - 1, 0.0, 30.0]
    assert controllers.asked == ["nvme0", "nvme0"]
    asleep = Null(Reason.NOT_READ, "not_live")
    clock.now = 1000.0 + EVERY_S + KEPT_S
    assert logs.read("nvme0", asleep)["smart_media_errors_total"] == 1
    clock.now += 1
    assert logs.read("nvme0", asleep) == dict.fromkeys(COLUMNS, asleep)
    assert len(controllers.asked) == 2
    controllers.answers["nvme0"] = PermissionError(errno.EACCES, "x")
    assert logs.read("nvme0") == every(Reason.NO_PERMISSION, "EACCES")
    logs.keep({"nvme1"})
    controllers.answers["nvme0"] = GOOD
    assert logs.read("nvme0")["smart_media_errors_total"] == 1, "forgotten, and so asked anew"


def test_one_that_does_not_answer_is_waited_for_by_nobody_and_asked_once(tmp_path: Path) -> None:
    go_on = threading.Event()
    controllers = Controllers(tmp_path, nvme0=GOOD, nvme1=GOOD)
    asked: list[str] = []

    def ask(device: Path) -> bytes:
        asked.append(device.name)
        if device.name == "nvme0":
            go_on.wait(600)
        return GOOD

    clock = controllers.clock
    logs = HealthLogs(tmp_path, ask, clock, wait_s=0.01)
    try:
        assert logs.read("nvme0") == every(Reason.NOT_READ, "pending")
        until(lambda: logs.read("nvme1")["smart_used_pct"] == 3.0)
        clock.now += HUNG_S + 1
        for _ in range(3):
            assert logs.read("nvme0") == every(Reason.FAILED, "hung")
            logs.keep({"nvme1"})
            clock.now += EVERY_S
            until(lambda: logs.read("nvme1")["smart_age_s"] == 0.0)
        assert asked.count("nvme0") == 1
    finally:
        go_on.set()
    until(lambda: logs.read("nvme0", Null(Reason.NOT_READ, "not_live")) != every(Reason.FAILED, "hung"))
    until(lambda: logs.read("nvme0")["smart_used_pct"] == 3.0)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- the command itself


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A kernel that takes the command; what it was given, and what it answers."""
    seen: dict[str, object] = {"status": 0, "page": GOOD}

    def ioctl(fd: int, request: int, command: bytearray) -> int:
        assert os.fstat(fd)
        words = struct.unpack("=BBHIIIQQIIIIIIIIII", command)
        seen.update(request=request, size=len(command), words=words, fd=fd)
        status = seen["status"]
        assert isinstance(status, int)
        if not status:
            assert isinstance(seen["page"], bytes)
            ctypes.memmove(words[7], seen["page"], words[9])
        return status

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    return seen


def test_the_command_is_get_log_page_2_of_512_bytes_for_the_whole_controller(
    tmp_path: Path, kernel: dict[str, object]
) -> None:
    device = tmp_path / "nvme0"
    device.touch()
    assert health_log(device) == GOOD
    words = kernel["words"]
    assert isinstance(words, tuple)
    assert (kernel["request"], kernel["size"]) == (0xC0484E41, 72)
    opcode, flags, _, namespace, _, _, metadata, address, metadata_bytes, data_bytes, *more = words
    assert (opcode, flags, namespace, metadata, metadata_bytes, data_bytes) == (2, 0, 0xFFFFFFFF, 0, 0, 512)
    assert address
    assert more == [0x007F0002, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kernel["fd"])  # type: ignore[arg-type]
    kernel["status"] = 0x4002
    with pytest.raises(Refused) as refused:
        health_log(device)
    assert refused.value.status == 2


def test_a_file_that_is_no_controller_is_refused_by_the_real_kernel(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvme0").write_text("not a device")
    logs = HealthLogs(tmp_path, wait_s=60.0)
    assert logs.read("nvme0") == every(Reason.NOT_SUPPORTED, "ENOTTY")


# ---- in the rows of probe disk


def test_every_disk_has_the_log_of_a_controller_that_leads_to_it(tree: Callable[[str], Path]) -> None:
    root = tree("hgx-h100")
    controllers = Controllers(root, nvme0=PermissionError(errno.EACCES, "x"), nvme1=GOOD)
    disks = Disks(root, controllers.logs)
    rows = {str(row["disk"]): row for row in disks.rows()}
    assert {name: rows["nvme0n1"][name] for name in COLUMNS} == every(Reason.NO_PERMISSION, "EACCES")
    assert rows["nvme0n1"]["read_ops_total"] == 1203441
    assert {name: rows["nvme1n1"][name] for name in COLUMNS} == {**READ, "smart_age_s": 0.0}


def test_a_disk_in_trouble_is_not_asked_and_a_sata_disk_has_no_such_log(tree: Callable[[str], Path]) -> None:
    root = tree("hgx-h100")
    for state in sorted(root.glob("sys/devices/pci*/*/*/nvme/nvme*/state")):
        state.write_text("resetting\n")
    controllers = Controllers(root, nvme0=GOOD, nvme1=GOOD)
    for row in Disks(root, controllers.logs).rows():
        assert {name: row[name] for name in COLUMNS} == every(Reason.NOT_READ, "not_live")
    assert controllers.asked == []
    rows = {str(row["disk"]): row for row in Disks(tree("workstation")).rows()}
    assert {name: rows["sda"][name] for name in nvme.COLUMNS} == every(Reason.NOT_SUPPORTED, "not_nvme")
