"""What a column means, and what may stand in it. Shared words of all three programs.

Standard library only: the agent's children load this module and must stay small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Type(IntEnum):
    """Wire type of a column; the numbers are those of `gpufleet.v1.Type`."""

    F64 = 1
    I64 = 2
    U64 = 3
    BOOL = 4
    STRING = 5


class Kind(IntEnum):
    """What a column is; the numbers are those of `gpufleet.v1.Kind`."""

    GAUGE = 1
    COUNTER = 2
    STATE = 3
    KEY = 4


class Reason(IntEnum):
    """Why a value is NULL; the numbers are those of `gpufleet.v1.Reason`."""

    NOT_SUPPORTED = 1
    NO_PERMISSION = 2
    FAILED = 3
    IMPLAUSIBLE = 4
    NOT_READ = 5


class Unit(StrEnum):
    """Every unit a metric may have. TEXT and ONE have no suffix in the column name."""

    TEXT = ""
    ONE = "1"
    COUNT = "count"
    BITS = "bits"
    MHZ = "MHz"
    WATT = "W"
    JOULE = "J"
    CELSIUS = "C"
    BYTE = "bytes"
    PERCENT = "%"
    SECOND = "s"
    GB_PER_S = "GB/s"
    GBIT_PER_S = "Gb/s"
    RPM = "rpm"


@dataclass(frozen=True, slots=True)
class Null:
    """A value that is not there, and why.

    Attributes:
        reason: The class of the cause.
        code: The cause in the words of its source ("NVML 3", "ENODATA"); empty when there is none.
    """

    reason: Reason
    code: str = ""


Value = float | int | bool | str
Cell = Value | Null
Row = Mapping[str, Cell]
"""One reading: metric name -> cell. A metric that is absent was not read."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of a probe.

    Attributes:
        name: snake_case, with the unit as suffix; cumulative counters end in `_total`.
        type: What the cell holds.
        unit: One of `Unit`.
        kind: Gauge, counter, state, or key (what the row is about).
        help: One sentence: what it is, and the usual command that shows the same value.
        low: Smallest plausible value; below it the cell is NULL (implausible).
        high: Largest plausible value.
        rollup: How a minute is summed up: "", mean, min, max, last, delta.
    """

    name: str
    type: Type
    unit: Unit
    kind: Kind
    help: str
    low: float | None = None
    high: float | None = None
    rollup: str = ""

    def check(self, cell: Cell) -> Cell:
        """The cell as it may travel: right type and plausible, else a Null that says why not."""
        if isinstance(cell, Null):
            return cell
        if self.type is Type.STRING:
            return cell if isinstance(cell, str) else Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        if self.type is Type.BOOL:
            return cell if isinstance(cell, bool) else Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        if isinstance(cell, bool | str):
            return Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        if self.type is Type.F64:
            cell = float(cell)
        elif not isinstance(cell, int):
            return Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        low = self.low if self.low is not None else (0 if self.type is Type.U64 else None)
        if cell != cell or (low is not None and cell < low):
            return Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        high = self.high if self.high is not None else _LARGEST[self.type]
        if cell > high or cell < -_LARGEST[self.type]:
            return Null(Reason.IMPLAUSIBLE, f"{cell!r:.40}")
        return cell


_LARGEST = {Type.F64: 1.7e308, Type.I64: 2**63 - 1, Type.U64: 2**63 - 1}
"""2^64-1 and its neighbours are blanks of drivers, not counts: no counter of ours gets near 2^63."""
