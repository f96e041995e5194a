"""Temperatures and fans of the host, by the kernel's thermal zones and hwmon: for probe `host`.

Sensors fail in many ways: each is on its own, and 0 or -274 degrees is no temperature. Where sensors are is
looked up rarely, for a large host has hundreds of entries there. Those of cards, disks and network adapters
are left out: reading one asks that device, which may sleep, or not answer.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

COLUMNS = (
    "zone_temperature_c", "hottest_zone", "zones_unreadable", "cpu_temperature_c", "inlet_temperature_c",
    "fans", "fans_failed", "fan_rpm_min",
)  # fmt: skip

_LOOK_AGAIN_S = 600.0
_MOST = 128
_NONE = Null(Reason.NOT_SUPPORTED, "no_sensor")
_PROCESSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
_OTHERS = re.compile(r"amdgpu|radeon|nouveau|nvme|drivetemp|mlx|bnxt|i915|xe|iwl|ath|r8169|ena|dell_smm")
"""Names of devices that are none of the host's own; and one whose every reading stops the processor."""

_INLET = re.compile(r"\b(inlet|ambient|intake)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Sensors:
    """Where they are."""

    zones: tuple[Path, ...]
    processors: tuple[Path, ...]
    inlets: tuple[Path, ...]
    fans: tuple[Path, ...]


class Heat:
    """Readers below one root.

    Args:
        root: Where /sys is.
        clock: Monotonic seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._thermal = root / "sys/class/thermal"
        self._hwmon = root / "sys/class/hwmon"
        self._clock = clock
        self._sensors = _Sensors((), (), (), ())
        self._look_again = float("-inf")
        self._turned: set[Path] = set()

    def read(self) -> Mapping[str, Cell]:
        """The columns about heat."""
        if self._clock() >= self._look_again:
            self._sensors = self._look()
            self._look_again = self._clock() + _LOOK_AGAIN_S
        zones = {zone: _temperature(zone / "temp") for zone in self._sensors.zones}
        hottest, where = _highest(zones)
        kind = files.plain(files.read(where / "type")) if where is not None else ""
        return {
            "zone_temperature_c": hottest,
            "hottest_zone": kind or (hottest if isinstance(hottest, Null) else files.UNPARSABLE),
            "zones_unreadable": sum(isinstance(cell, Null) for cell in zones.values()) if zones else _NONE,
            "cpu_temperature_c": _highest({path: _temperature(path) for path in self._sensors.processors})[0],
            "inlet_temperature_c": _highest({path: _temperature(path) for path in self._sensors.inlets})[0],
            **self._fans(),
        }

    def _look(self) -> _Sensors:
        zones = [path for path in files.listed(self._thermal) if path.name.startswith("thermal_zone")]
        processors: list[Path] = []
        inlets: list[Path] = []
        fans: list[Path] = []
        for home in files.listed(self._hwmon):
            name = files.plain(files.read(home / "name"))
            if _OTHERS.match(name):
                continue
            inputs = [path for path in files.listed(home) if path.name.endswith("_input")]
            if name in _PROCESSORS:
                # the package as a whole: a core's own sensor is read on that core, and wakes it
                processors += [path for path in inputs if path.name == "temp1_input"]
                continue
            fans += [path for path in inputs if path.name.startswith("fan")]
            inlets += [
                path for path in inputs if path.name.startswith("temp") and _INLET.search(_label(path))
            ]
        return _Sensors(
            tuple(zones[:_MOST]), tuple(processors[:_MOST]), tuple(inlets[:_MOST]), tuple(fans[:_MOST])
        )

    def _fans(self) -> Mapping[str, Cell]:
        """A connector without a fan reads 0 as a broken fan does: only one that was seen turning can fail."""
        speeds = {path: files.parsed(files.read(path), _speed) for path in self._sensors.fans}
        turning = {path: speed for path, speed in speeds.items() if isinstance(speed, int) and speed > 0}
        self._turned |= turning.keys()
        known = [path for path in speeds if path in self._turned]
        if not known:
            why = _first(speeds.values())
            none = bool(speeds) and why is _NONE
            return {"fans": 0 if none else why, "fans_failed": why, "fan_rpm_min": why}
        return {
            "fans": len(known),
            "fans_failed": sum(_alarmed(path) for path in known),
            "fan_rpm_min": min(turning.values(), default=0),
        }


def _label(path: Path) -> str:
    return files.plain(files.read(path.with_name(path.name.replace("_input", "_label"))))


def _alarmed(path: Path) -> bool:
    """Whether the chip says that this fan is too slow or broken."""
    texts = (files.read(path.with_name(path.name.replace("_input", end))) for end in ("_alarm", "_fault"))
    return any(not isinstance(text, Null) and text.strip() == "1" for text in texts)


def _speed(text: str) -> Cell:
    speed = files.count(text.strip())
    return speed if speed < 100_000 else Null(Reason.IMPLAUSIBLE, text.strip()[:20])


def _temperature(path: Path) -> Cell:
    return files.parsed(files.read(path), _degrees)


def _degrees(text: str) -> Cell:
    """Thousandths of a degree. 0, -128 and 127 are what broken or absent sensors read."""
    degrees = files.number(text.strip()) / 1000
    if not -40 <= degrees <= 150 or degrees in (0, 127):
        return Null(Reason.IMPLAUSIBLE, text.strip()[:20])
    return degrees


def _highest(cells: Mapping[Path, Cell]) -> tuple[Cell, Path | None]:
    """The highest of those that can be read, and whose it is; else why the first cannot."""
    read = {path: cell for path, cell in cells.items() if isinstance(cell, float)}
    if read:
        where = max(read, key=lambda path: read[path])
        return read[where], where
    return _first(cells.values()), None


def _first(cells: Iterable[Cell]) -> Cell:
    return next((cell for cell in cells if isinstance(cell, Null)), _NONE)
