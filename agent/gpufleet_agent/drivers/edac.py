"""Errors of the host's memory, as the kernel's EDAC drivers count them below /sys: the rows of probe `edac`.

A row per module, and one per controller for errors whose module is not known. Older drivers count per chip
select row and channel instead. Counts begin with the driver, and a person may set them back to 0.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import DriverError, files

DAY_S = 86_400.0

_COARSE_S = 900.0
_MOST_ROWS = 1024
_BY_CHANNEL = Null(Reason.NOT_SUPPORTED, "by_channel")
_BY_ROW = Null(Reason.NOT_SUPPORTED, "by_row")


@dataclass(slots=True)
class Day:
    """How much a counter grew within a day: only what was seen to grow; a fall is a reset and no error."""

    _last: int | None = None
    _steps: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, count: int, now: float) -> int:
        """Take a reading; what it grew by in the day up to now."""
        grown = 0 if self._last is None else max(0, count - self._last)
        self._last = count
        if grown and self._steps and now - self._steps[-1][0] < _COARSE_S:
            at, before = self._steps.pop()
            self._steps.append((at, before + grown))
        elif grown:
            self._steps.append((now, grown))
        while self._steps and self._steps[0][0] < now - DAY_S:
            self._steps.popleft()
        return sum(step for _, step in self._steps)


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that counts errors: its name, what it is, and its two counts."""

    dimm: str
    label: Cell
    corrected: Cell
    uncorrectable: Cell
    about: Row = field(default_factory=dict)


class Edac:
    """Readers below one root.

    Args:
        root: Where /sys is.
        clock: Monotonic seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._home = root / "sys/devices/system/edac/mc"
        self._clock = clock
        self._days: dict[tuple[str, str], Day] = {}

    def rows(self) -> list[Row]:
        """Modules and controllers; none on a host that does not count.

        Raises:
            DriverError: The controllers cannot be listed, so nothing can be said about them.
        """
        now = self._clock()
        return [self._row(part, now) for part in self._parts()]

    def items(self) -> list[Row]:
        """What the modules are; nothing where the controllers cannot be listed."""
        try:
            parts = self._parts()
        except DriverError:
            return []
        found: list[Row] = []
        for part in parts:
            cells = {"label": part.label, **part.about}
            texts = {name: cell for name, cell in cells.items() if isinstance(cell, int | str) and cell != ""}
            found.append({"dimm": part.dimm, **texts})
        return found

    def _parts(self) -> list[_Part]:
        found: list[_Part] = []
        for name in self._controllers():
            for part in _controller(self._home / name):
                if len(found) < _MOST_ROWS:
                    found.append(part)
        return found

    def _row(self, part: _Part, now: float) -> Row:
        counts = {"corrected": part.corrected, "uncorrectable": part.uncorrectable}
        row: dict[str, Cell] = {"dimm": part.dimm, "label": part.label, **part.about}
        for name, cell in counts.items():
            row[f"{name}_total"] = cell
            day = self._days.setdefault((part.dimm, name), Day())
            row[f"{name}_day"] = day.add(cell, now) if isinstance(cell, int) else cell
        return row

    def _controllers(self) -> list[str]:
        try:
            names = os.listdir(self._home)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DriverError(files.errno_word(error), f"{self._home}: {error.strerror}") from error
        return sorted(
            (name for name in names if re.fullmatch(r"mc\d{1,4}", name)), key=lambda name: int(name[2:])
        )


def _controller(home: Path) -> Iterator[_Part]:
    modules = [path for path in _numbered(home, "dimm|rank") if files.exists(path / "dimm_ce_count")]
    rows = [] if modules else _numbered(home, "csrow")
    for module in modules:
        yield _module(home.name, module)
    for row in rows:
        yield from _chip_select_row(home.name, row)
    # where nothing below it counts, all its errors are without a place
    end = "noinfo_count" if modules or rows else "count"
    yield _Part(
        home.name,
        "",
        _counted(home / f"ce_{end}"),
        _counted(home / f"ue_{end}"),
        {"controller": files.plain(files.read(home / "mc_name")), "size_bytes": _size(home / "size_mb")},
    )


def _module(controller: str, home: Path) -> _Part:
    return _Part(
        f"{controller}/{home.name}",
        files.plain(files.read(home / "dimm_label")),
        _counted(home / "dimm_ce_count"),
        _counted(home / "dimm_ue_count"),
        {
            "location": files.plain(files.read(home / "dimm_location")),
            "mem_type": files.plain(files.read(home / "dimm_mem_type")),
            "size_bytes": _size(home / "size"),
        },
    )


def _chip_select_row(controller: str, home: Path) -> Iterator[_Part]:
    """Uncorrectable errors are counted for the row, corrected ones for each channel, which is one module."""
    name = f"{controller}/{home.name}"
    about: Row = {
        "mem_type": files.plain(files.read(home / "mem_type")),
        "size_bytes": _size(home / "size_mb"),
    }
    channels = [path for path in files.listed(home) if re.fullmatch(r"ch\d{1,3}_ce_count", path.name)]
    labels: list[str] = []
    for path in channels:
        channel = path.name.partition("_")[0]
        labels.append(files.plain(files.read(home / f"{channel}_dimm_label")))
        yield _Part(f"{name}/{channel}", labels[-1], _counted(path), _BY_ROW, about)
    corrected = _BY_CHANNEL if channels else _counted(home / "ce_count")
    yield _Part(name, " ".join(filter(None, labels)), corrected, _counted(home / "ue_count"), about)


def _numbered(home: Path, kinds: str) -> list[Path]:
    """Folders like dimm0 or csrow12, by number."""
    found = [path for path in files.listed(home) if re.fullmatch(rf"(?:{kinds})\d{{1,4}}", path.name)]
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", path.name)))


def _counted(path: Path) -> Cell:
    return files.parsed(files.read(path), lambda text: files.count(text.strip()))


def _size(path: Path) -> Cell:
    """MiB -> bytes."""
    return files.parsed(files.read(path), lambda text: files.count(text.strip()) << 20)
