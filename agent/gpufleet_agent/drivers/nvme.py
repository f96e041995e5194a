"""The health log that an NVMe controller keeps of itself (SMART, log page 02h), where we may ask for it.

It is a command to the device: the kernel takes it from CAP_SYS_ADMIN alone. A controller in trouble may let
us wait for a minute, so each question has a thread of its own that nobody waits for, and the next is asked
only when that has ended.
"""

import ctypes
import errno
import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

EVERY_S = 600.0
KEPT_S = 3 * EVERY_S
"""An answer that is older is not shown any more."""

HUNG_S = 5.0
PAGE_BYTES = 512

COLUMNS = (
    "smart_warning_bits", "smart_temperature_c", "smart_spare_pct", "smart_spare_limit_pct", "smart_used_pct",
    "smart_read_bytes_total", "smart_written_bytes_total", "smart_power_on_s_total",
    "smart_unsafe_shutdowns_total", "smart_media_errors_total", "smart_logged_errors_total", "smart_age_s",
)  # fmt: skip

_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd of linux/nvme_ioctl.h."""

_IOCTL_ADMIN = 0xC0484E41
_GET_LOG_PAGE, _SMART_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_KELVIN = 273
_UNIT_BYTES = 512_000
_STATUS = 0x7FF
_NOT_THERE = (0x001, 0x002, 0x109)
"""Status of a command or a log page that the controller does not have."""

_NO_SUCH_CALL = (errno.ENOTTY, errno.ENXIO, errno.EINVAL)
_PENDING = Null(Reason.NOT_READ, "pending")
_HUNG = Null(Reason.FAILED, "hung")

Ask = Callable[[Path], bytes]
"""The page of the controller at a path in /dev.

Raises:
    OSError: The kernel refuses, or there is no such controller.
    Refused: The controller does.
"""


class Refused(Exception):
    """The controller ended the command with a status other than success."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NVMe status {status:#x}")
        self.status = status & _STATUS


def health_log(device: Path) -> bytes:
    """What the controller answers; see `Ask`."""
    page = ctypes.create_string_buffer(PAGE_BYTES)
    # no time-out of our own: the kernel would reset a controller that takes longer
    command = bytearray(
        _COMMAND.pack(
            _GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(page), 0, PAGE_BYTES,
            (PAGE_BYTES // 4 - 1) << 16 | _SMART_LOG, 0, 0, 0, 0, 0, 0, 0,
        )
    )  # fmt: skip
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = fcntl.ioctl(fd, _IOCTL_ADMIN, command)
    finally:
        os.close(fd)
    if status:
        raise Refused(status)
    return page.raw


def parse(page: bytes) -> dict[str, Cell] | Null:
    """The columns that stand in the page; all but `smart_age_s`."""
    if len(page) != PAGE_BYTES:
        return Null(Reason.FAILED, f"{len(page)} bytes")
    if page in (bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES):
        # disks of some clouds answer so
        return Null(Reason.IMPLAUSIBLE, "blank")

    def count(place: int) -> int:
        return int.from_bytes(page[place : place + 16], "little")

    return {
        "smart_warning_bits": page[0],
        "smart_temperature_c": float(int.from_bytes(page[1:3], "little") - _KELVIN),
        "smart_spare_pct": float(page[3]),
        "smart_spare_limit_pct": float(page[4]),
        "smart_used_pct": float(page[5]),
        "smart_read_bytes_total": count(32) * _UNIT_BYTES,
        "smart_written_bytes_total": count(48) * _UNIT_BYTES,
        "smart_power_on_s_total": count(128) * 3600,
        "smart_unsafe_shutdowns_total": count(144),
        "smart_media_errors_total": count(160),
        "smart_logged_errors_total": count(176),
    }


def why(error: Exception) -> Null:
    """Why there is no page."""
    if isinstance(error, Refused):
        there = error.status not in _NOT_THERE
        return Null(Reason.FAILED if there else Reason.NOT_SUPPORTED, f"NVMe {error.status:#x}")
    if isinstance(error, OSError):
        if error.errno in _NO_SUCH_CALL:
            return Null(Reason.NOT_SUPPORTED, files.errno_word(error))
        return files.why(error)
    return Null(Reason.FAILED, type(error).__name__)


@dataclass(slots=True)
class _Log:
    """What is known of one controller; `box` takes the answer to the question under way, if there is one."""

    asked_at: float = -math.inf
    box: list[Mapping[str, Cell] | Null] | None = None
    answer: Mapping[str, Cell] | Null = _PENDING
    read_at: float = -math.inf


class HealthLogs:
    """Asks each controller every ten minutes, and shows meanwhile what it said.

    Args:
        root: Where /dev is.
        ask: How a controller is asked.
        seconds: A monotonic clock.
        wait_s: How long a question is waited for; what comes later is shown at the next look.
    """

    def __init__(
        self,
        root: Path,
        ask: Ask = health_log,
        seconds: Callable[[], float] = time.monotonic,
        wait_s: float = 0.1,
    ) -> None:
        self._dev = root / "dev"
        self._ask = ask
        self._seconds = seconds
        self._wait_s = wait_s
        self._logs: dict[str, _Log] = {}

    def read(self, controller: str, not_now: Null | None = None) -> dict[str, Cell]:
        """The columns `COLUMNS` of a controller; `not_now` says why it must not be asked now."""
        log = self._logs.setdefault(controller, _Log())
        now = self._seconds()
        if log.box is None and not_now is None and now - log.asked_at >= EVERY_S:
            self._start(controller, log, now)
        if log.box:
            log.answer, log.read_at, log.box = log.box[0], log.asked_at, None
        if log.box is not None and now - log.asked_at > HUNG_S:
            return dict.fromkeys(COLUMNS, _HUNG)
        age_s = now - log.read_at
        if age_s > KEPT_S:
            return dict.fromkeys(COLUMNS, not_now or _PENDING)
        if isinstance(log.answer, Null):
            return dict.fromkeys(COLUMNS, log.answer)
        return {**log.answer, "smart_age_s": age_s}

    def keep(self, controllers: Set[str]) -> None:
        """Forget the others, but for those that have not answered yet."""
        for name in self._logs.keys() - controllers:
            if self._logs[name].box is None:
                del self._logs[name]

    def _start(self, controller: str, log: _Log, now: float) -> None:
        box: list[Mapping[str, Cell] | Null] = []
        log.asked_at, log.box = now, box
        device = self._dev / controller
        if not files.exists(device):
            box.append(Null(Reason.NOT_SUPPORTED, "ENOENT"))
            return

        def run() -> None:
            try:
                answer: Mapping[str, Cell] | Null = parse(self._ask(device))
            except Exception as error:
                answer = why(error)
            box.append(answer)

        thread = threading.Thread(target=run, name="health_log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            box.append(Null(Reason.FAILED, "no_thread"))
            return
        thread.join(self._wait_s)
