"""The kernel's own account of its clock, by adjtimex(2) with nothing to set: for probe `host`.

There is no file for it, so it is asked of the running kernel alone, never of a tree below another root.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

COLUMNS = ("clock_synchronised", "clock_offset_s", "clock_error_estimate_s", "clock_error_max_s")

_NANO = 0x2000
_UNSYNCHRONISED_US = 16_000_000
"""The largest error the kernel tells: so it is from boot on, and again hours after the last correction.

The flag STA_UNSYNC is no help: chrony without `rtcsync` leaves it set on purpose, so that the kernel keeps
its hands off the hardware clock. timedatectl decides the same way.
"""


@dataclass(frozen=True, slots=True)
class Timex:
    """What adjtimex(2) says, of which we use this much."""

    offset: int
    max_error_us: int
    estimated_error_us: int
    status: int


class _Timex(ctypes.Structure):
    """`struct timex` of <sys/timex.h>."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def kernel_timex() -> Timex:
    """Ask the running kernel.

    Raises:
        OSError: It does not answer, or not us.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except AttributeError as error:
        raise OSError(0, "no adjtimex") from error
    asked = _Timex()  # modes = 0: set nothing
    if call(ctypes.byref(asked)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return Timex(asked.offset, asked.maxerror, asked.esterror, asked.status)


def clock(ask: Callable[[], Timex] | None) -> Mapping[str, Cell]:
    """The columns about the clock; None = there is no kernel to ask below this root."""
    if ask is None:
        return dict.fromkeys(COLUMNS, Null(Reason.NOT_READ, "other_root"))
    try:
        told = ask()
    except OSError as error:
        return dict.fromkeys(COLUMNS, files.why(error))
    return {
        "clock_synchronised": 0 <= told.max_error_us < _UNSYNCHRONISED_US,
        "clock_offset_s": told.offset / (1e9 if told.status & _NANO else 1e6),
        "clock_error_estimate_s": told.estimated_error_us / 1e6,
        "clock_error_max_s": told.max_error_us / 1e6,
    }
