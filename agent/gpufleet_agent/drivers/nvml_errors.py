"""NVIDIA's error codes: what each one means, and what follows from it. The one place that knows.

A code means one thing when a sensor answers with it, another when a card's handle or the whole library does:
`reason` is for the first, `lost` for the second, `gone` for the third.
"""

from dataclasses import dataclass
from enum import StrEnum

from gpufleet.metric import Null, Reason

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, DRIVER_NOT_LOADED = 1, 2, 3, 9
FUNCTION_NOT_FOUND, IS_LOST, MISMATCH, VERSION, UNKNOWN = 13, 15, 18, 25, 999


class Means(StrEnum):
    """Classes of errors."""

    AGENT = "agent"
    """The call was wrong, or comes before the library was initialised."""
    NO_SENSOR = "no_sensor"
    """Card or driver do not have it. The answer stays until the library is initialised anew, or for a day."""
    CONFIG = "config"
    """Permissions, or a host without NVIDIA's library."""
    SICK = "sick"
    """The card or its host need a person."""
    ABSENT = "absent"
    """No such card, or none at all."""
    TRANSIENT = "transient"
    """Asked again with the next sweep."""
    HALF_UPGRADED = "half_upgraded"
    """Kernel module and library are of different versions: only another process, or a reboot, helps."""
    SUSPECT = "suspect"
    """Says nothing by itself, but is the usual face of a card that fell off the bus."""


@dataclass(frozen=True, slots=True)
class Known:
    """One code.

    Attributes:
        name: NVIDIA's, in small letters.
        means: Its class.
        reason: Of the NULL, when a sensor answers with it.
        lost: Code of `Lost` when a card's handle fails with it; empty = the card may be there all the same.
        gone: Code of `DriverGone` when the library cannot be initialised for it.
        restart: Whichever call answers with it, the library must be initialised anew.
    """

    name: str
    means: Means
    reason: Reason = Reason.FAILED
    lost: str = ""
    gone: str = "driver_failed"
    restart: bool = False


_NO = Reason.NOT_SUPPORTED
_DENIED = Reason.NO_PERMISSION

CODES: dict[int, Known] = {
    1: Known("uninitialized", Means.AGENT, restart=True),
    2: Known("invalid_argument", Means.AGENT),
    3: Known("not_supported", Means.NO_SENSOR, _NO),
    4: Known("no_permission", Means.CONFIG, _DENIED, gone="no_permission"),
    5: Known("already_initialized", Means.AGENT),
    6: Known("not_found", Means.ABSENT, lost="not_found"),
    7: Known("insufficient_size", Means.AGENT),
    8: Known("insufficient_power", Means.SICK, lost="insufficient_power"),
    9: Known("driver_not_loaded", Means.SICK, gone="driver_not_loaded", restart=True),
    10: Known("timeout", Means.TRANSIENT),
    11: Known("irq_issue", Means.SICK, lost="irq_issue"),
    12: Known("library_not_found", Means.CONFIG, gone="no_library"),
    13: Known("function_not_found", Means.NO_SENSOR, _NO),
    14: Known("corrupted_inforom", Means.SICK),
    15: Known("gpu_is_lost", Means.SICK, lost="gpu_is_lost"),
    16: Known("reset_required", Means.SICK, lost="reset_required"),
    17: Known("operating_system", Means.CONFIG, _DENIED, gone="no_permission"),
    18: Known("lib_rm_version_mismatch", Means.HALF_UPGRADED, gone="driver_mismatch", restart=True),
    19: Known("in_use", Means.TRANSIENT),
    20: Known("memory", Means.TRANSIENT),
    21: Known("no_data", Means.TRANSIENT, Reason.NOT_READ),
    22: Known("vgpu_ecc_not_supported", Means.NO_SENSOR, _NO),
    23: Known("insufficient_resources", Means.TRANSIENT),
    24: Known("freq_not_supported", Means.NO_SENSOR, _NO),
    25: Known("argument_version_mismatch", Means.NO_SENSOR, _NO),
    26: Known("deprecated", Means.NO_SENSOR, _NO),
    27: Known("not_ready", Means.TRANSIENT, Reason.NOT_READ),
    28: Known("gpu_not_found", Means.ABSENT),
    29: Known("invalid_state", Means.TRANSIENT),
    30: Known("reset_type_not_supported", Means.NO_SENSOR, _NO),
    UNKNOWN: Known("unknown", Means.SUSPECT, lost="unknown_error"),
}

_NEW = Known("", Means.TRANSIENT)


class FailedError(Exception):
    """A call answered with an error code; `code` 0 and a word for errors of the binding itself."""

    def __init__(self, code: int, word: str = "") -> None:
        super().__init__(word or f"NVML {code}")
        self.code = code


def known(code: int) -> Known:
    """What is known of a code; one of a newer driver is taken as passing."""
    return CODES.get(code, _NEW)


def null(trouble: FailedError) -> Null:
    """Why a sensor gives no value."""
    return Null(known(trouble.code).reason, str(trouble))


def is_remembered(code: int) -> bool:
    """Whether the sensor need not be asked again soon."""
    return known(code).means is Means.NO_SENSOR
