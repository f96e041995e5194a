"""What NVIDIA's library hands out, made into cells: blanks, signs, units, texts, and its own structures.

Field numbers and structures are our own, so that a binding older than the driver still reaches them.
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.nvml_errors import FailedError

BLANK = Null(Reason.IMPLAUSIBLE, "blank")

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_BLANK_REAL = 140737488355328.0
_NO_TEXT = ("", "n/a", "unknown", "none", "[n/a]", "not supported", "[not supported]")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SERIAL = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/-]{0,63}")


@runtime_checkable
class Values(Protocol):
    """An array of ctypes: it has a length and no iterator."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> object: ...


def number(value: object) -> int | float | Null:
    """A count or a gauge; the values with which a library says "none" are none."""
    if isinstance(value, Null):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Null(Reason.FAILED, type(value).__name__)
    if isinstance(value, float):
        return BLANK if value != value or abs(value) >= _BLANK_REAL else value
    blank = value == 0xFFFFFFFF or 0x7FFFFFF0 <= value <= 0x7FFFFFFF or value >= 0x7FFFFFFFFFFFFFF0
    return BLANK if blank else value


def signed(value: object) -> int | float | Null:
    """Like `number`; a sign that was lost on the way is put back."""
    if isinstance(value, int) and not isinstance(value, bool) and 2**31 <= value < 2**32:
        value -= 2**32
    return number(value)


def scaled(value: object, factor: float) -> float | Null:
    """Like `number`, in our unit."""
    found = number(value)
    return found if isinstance(found, Null) else found * factor


def flag(value: object) -> bool | Null:
    """0 or 1 as a truth; anything else is none."""
    found = number(value)
    if isinstance(found, Null):
        return found
    return bool(found) if found in (0, 1) else Null(Reason.IMPLAUSIBLE, f"{found!r:.40}")


def word(value: object, words: Mapping[int, str]) -> str | Null:
    """An enumerated value in our word; one of a newer driver keeps its number."""
    found = number(value)
    if isinstance(found, Null):
        return found
    return words.get(int(found), f"unknown_{found:g}"[:32])


def bit_error_rate(value: object) -> float | Null:
    """Of a link: exponent in the low byte, mantissa in four bits above it. The largest exponent is none."""
    found = number(value)
    if not isinstance(found, int):
        return found if isinstance(found, Null) else Null(Reason.FAILED, "float")
    mantissa, exponent = found >> 8 & 0xF, found & 0xFF
    return 0.0 if exponent == 0xFF else mantissa * 10.0**-exponent


def watts(value: object) -> float | Null:
    """From milliwatts."""
    return scaled(value, 1e-3)


def seconds(value: object) -> float | Null:
    """From nanoseconds."""
    return scaled(value, 1e-9)


@dataclass(frozen=True, slots=True)
class Field:
    """One value of the batch call.

    Attributes:
        id: NVIDIA's number; it stays the same for good.
        name: Our column.
        cell: What makes a cell of the raw value.
        scope: Number of the link that it is asked of; None = the card.
    """

    id: int
    name: str
    cell: Callable[[object], Cell] = number
    scope: int | None = None


def part(struct: object, name: str) -> object:
    """A member of a structure, or why there is no structure."""
    return struct if isinstance(struct, Null) else getattr(struct, name, None)


def place(values: object, index: int) -> object:
    """One of several values that a call returns, or why it returned none."""
    if isinstance(values, Null):
        return values
    return values[index] if isinstance(values, list | tuple) and index < len(values) else None


class _Union(ctypes.Union):
    _fields_ = (
        ("dVal", ctypes.c_double), ("uiVal", ctypes.c_uint), ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong), ("sllVal", ctypes.c_longlong), ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    )  # fmt: skip


class FieldValue(ctypes.Structure):
    """One answer of the batch call."""

    _fields_ = (
        ("fieldId", ctypes.c_uint), ("scopeId", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong), ("valueType", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint),
        ("value", _Union),
    )  # fmt: skip


def field_values(answer: object) -> list[object]:
    """The answers of the batch call; none of something else."""
    if isinstance(answer, ctypes.Array) and ctypes.sizeof(answer) == len(answer) * ctypes.sizeof(FieldValue):
        # the same memory: the binding's own structure takes microseconds to read a member of
        return list((FieldValue * len(answer)).from_buffer(answer))
    return [answer[place] for place in range(len(answer))] if isinstance(answer, Values) else []


def field_value(value: object) -> int | float:
    """One answer of the batch call: each has its own error code, and only its own type may be read.

    Raises:
        FailedError: It has no value.
    """
    code = getattr(value, "nvmlReturn", None)
    if code != 0:
        raise FailedError(code if isinstance(code, int) else 0, "" if isinstance(code, int) else "no code")
    kind = getattr(value, "valueType", None)
    if not isinstance(kind, int) or not 0 <= kind < len(_MEMBERS):
        raise FailedError(0, f"type {kind}")
    found = getattr(getattr(value, "value", None), _MEMBERS[kind], None)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise FailedError(0, type(found).__name__)
    return found


def shown(value: object) -> str:
    """As text for the inventory; bytes that are no text come escaped, what is not there is empty."""
    if isinstance(value, bytes):
        value = value.partition(b"\0")[0].decode(errors="backslashreplace")
    if value is None or isinstance(value, Null):
        return ""
    letters = str(value)[:256].strip()
    text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in letters)
    return "" if text.lower() in _NO_TEXT else text


def serial(value: object) -> str:
    """A serial number, or nothing: placeholders and zeroes are no identity."""
    text = shown(value)
    return text if _SERIAL.fullmatch(text) and text.strip("0") else ""


def uuid(value: object) -> str:
    """A card's UUID, or nothing."""
    text = shown(value)
    return text if _UUID.fullmatch(text) else ""


def address(bus: str) -> str:
    """`00000000:1B:00.0` -> `0000:1b:00.0`; empty for anything else."""
    found = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", bus.strip().lower())
    return f"{int(found[1], 16):04x}:{found[2]}" if found else ""


class _Versioned(ctypes.Structure):
    VERSION = 0

    def __init__(self) -> None:
        super().__init__(version=(self.VERSION << 24) | ctypes.sizeof(self))


class SramStatus(_Versioned):
    """ECC of the on-chip memories."""

    VERSION = 1
    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in (
            "aggregateUncParity", "aggregateUncSecDed", "aggregateCor",
            "volatileUncParity", "volatileUncSecDed", "volatileCor",
            "bucketL2", "bucketSm", "bucketPcie", "bucketMcu", "bucketOther",
        )),
        ("bThresholdExceeded", ctypes.c_uint),
    )  # fmt: skip


class FabricV2(_Versioned):
    """State of the card in its NVLink fabric."""

    VERSION = 2
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
        ("healthMask", ctypes.c_uint32),
    )


class FabricV3(_Versioned):
    """The same with a summary."""

    VERSION = 3
    _fields_ = (*FabricV2._fields_, ("healthSummary", ctypes.c_ubyte))


class Platform(_Versioned):
    """Where in its rack the card is."""

    VERSION = 2
    _fields_ = (
        ("version", ctypes.c_uint),
        ("ibGuid", ctypes.c_ubyte * 16),
        ("chassisSerialNumber", ctypes.c_ubyte * 16),
        ("slotNumber", ctypes.c_ubyte),
        ("trayIndex", ctypes.c_ubyte),
        ("hostId", ctypes.c_ubyte),
        ("peerType", ctypes.c_ubyte),
        ("moduleId", ctypes.c_ubyte),
    )
