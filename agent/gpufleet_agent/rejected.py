"""Counts the values that cannot be: NULLs whose reason is `implausible`, per entity and column.

Each is a lie of a driver or a sensor. Table `capability` says of which column it holds now; how often it
happened is told here: the first at once, the rest folded into one event an hour.
"""

from dataclasses import dataclass

from gpufleet.event import Event
from gpufleet.metric import Kind, Metric, Reason, Value
from gpufleet_agent.episodes import happened
from gpufleet_agent.probe import Sweep

FOLD_US = 3600_000_000
_MOST = 4096
"""Entities and columns that are told apart; 16 cards with every column wrong are less."""

_ENTITIES = {"gpu_uuid": "gpu", "pci": "pci"}
"""Key column -> kind of entity; rows about other things count for the host."""


@dataclass(slots=True)
class _Count:
    told_us: int
    untold: int = 0


class Rejected:
    """What was rejected so far."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], _Count] = {}

    def see(self, metrics: tuple[Metric, ...], sweep: Sweep) -> list[Event]:
        """Count one sweep; the events that are due."""
        for row, reasons in zip(sweep.rows, sweep.reasons, strict=False):
            if Reason.IMPLAUSIBLE in reasons:
                self._count(metrics, sweep, row, reasons)
        return self._due(sweep) if self._counts else []

    def _count(
        self, metrics: tuple[Metric, ...], sweep: Sweep, row: list[Value | None], reasons: bytes
    ) -> None:
        empty = [metric for metric, cell in zip(metrics, row, strict=True) if cell is None]
        entity = _entity(metrics, row)
        for metric, reason in zip(empty, reasons, strict=False):
            key = (entity, sweep.probe, metric.name)
            if reason == Reason.IMPLAUSIBLE and (key in self._counts or len(self._counts) < _MOST):
                self._counts.setdefault(key, _Count(sweep.mono_us - FOLD_US)).untold += 1

    def _due(self, sweep: Sweep) -> list[Event]:
        events: list[Event] = []
        for (entity, probe, column), count in self._counts.items():
            if probe == sweep.probe and count.untold and sweep.mono_us - count.told_us >= FOLD_US:
                values = "a value" if count.untold == 1 else f"{count.untold} values"
                text = f"{values} of {column} could not be and became NULL"
                detail = {"probe": probe, "metric": column}
                told = happened("rejected", entity, text, f"{probe}.{column}", detail, count.untold)
                events.append(told)
                count.told_us, count.untold = sweep.mono_us, 0
        return events


def _entity(metrics: tuple[Metric, ...], row: list[Value | None]) -> str:
    for metric, cell in zip(metrics, row, strict=True):
        if metric.kind is Kind.KEY and metric.name in _ENTITIES and isinstance(cell, str):
            return f"{_ENTITIES[metric.name]}:{cell}"
    return "node:"
