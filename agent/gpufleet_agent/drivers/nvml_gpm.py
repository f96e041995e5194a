"""What the parts of a card really did: NVIDIA's "GPU performance monitoring", Hopper and newer.

Utilisation says that some kernel ran; this says how many of the card's processors had work, how full they
were, and how busy tensor cores and memory were. A value is what happened between two samples, so the one of
the last read is kept: the library is never waited for.
"""

import ctypes
from contextlib import suppress

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.nvml_card import Card
from gpufleet_agent.drivers.nvml_errors import FailedError, null
from gpufleet_agent.drivers.nvml_values import number, part

_METRICS = {2: "sm_active_pct", 3: "sm_occupancy_pct", 5: "tensor_active_pct", 10: "mem_active_pct"}
"""NVIDIA's number -> our column."""

COLUMNS = tuple(_METRICS.values())
_VERSION = 1
_LEAST_APART_S = 0.1
_FIRST = Null(Reason.NOT_READ, "first")
_ABSENT = Null(Reason.NOT_SUPPORTED)


class Metric(ctypes.Structure):
    """One value; the library fills in all but the number."""

    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("ret", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("names", ctypes.c_char_p * 3),
    )


class Between(ctypes.Structure):
    """The question: these values, between these two samples. It is as long as its number of values says."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", Metric * len(_METRICS)),
    )


class Activity:
    """Of one card, until the library is initialised anew. `close` gives its samples back."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._samples: list[object] = []
        self._taken_at: float | None = None

    def read(self) -> dict[str, Cell]:
        """The mean of each column since the last read.

        Raises:
            Lost: The card is gone.
            DriverGone: The driver is.
        """
        absent = self._absent()
        if absent is not None:
            return dict.fromkeys(COLUMNS, absent)
        try:
            return self._read()
        except FailedError as trouble:
            self._taken_at = None
            return dict.fromkeys(COLUMNS, null(trouble))

    def close(self) -> None:
        """Give the samples back, while the library is initialised."""
        for sample in self._samples:
            with suppress(FailedError):
                self._card.library.call(self._card.pci, "nvmlGpmSampleFree", sample)
        self._samples, self._taken_at = [], None

    def _absent(self) -> Null | None:
        support = self._card.ask("nvmlGpmQueryDeviceSupport")
        if isinstance(support, Null):
            return support
        return None if number(part(support, "isSupportedDevice")) == 1 else _ABSENT

    def _read(self) -> dict[str, Cell]:
        while len(self._samples) < 2:
            self._samples.append(self._card.library.call(self._card.pci, "nvmlGpmSampleAlloc"))
        before, newest = self._samples
        now = self._card.clock()
        if self._taken_at is not None and now - self._taken_at < _LEAST_APART_S:
            return dict.fromkeys(COLUMNS, Null(Reason.NOT_READ, "too soon"))
        answer = self._card.ask("nvmlGpmSampleGet", newest, key="nvmlGpmSampleGet")
        if isinstance(answer, Null):
            self._taken_at = None
            return dict.fromkeys(COLUMNS, answer)
        first = self._taken_at is None
        self._samples, self._taken_at = [newest, before], now
        return dict.fromkeys(COLUMNS, _FIRST) if first else self._between(before, newest)

    def _between(self, before: object, newest: object) -> dict[str, Cell]:
        asked = Between(version=_VERSION, numMetrics=len(_METRICS))
        asked.sample1, asked.sample2 = _pointer(before), _pointer(newest)
        for place, metric in enumerate(_METRICS):
            asked.metrics[place].metricId = metric
        self._card.library.call(self._card.pci, "nvmlGpmMetricsGet", asked)
        return {_METRICS[one.metricId]: _cell(one) for one in asked.metrics}


def _pointer(sample: object) -> ctypes.c_void_p:
    if not isinstance(sample, ctypes._Pointer):
        raise FailedError(0, type(sample).__name__)
    return ctypes.cast(sample, ctypes.c_void_p)


def _cell(one: Metric) -> Cell:
    return null(FailedError(one.ret)) if one.ret else number(one.value)
