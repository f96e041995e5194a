"""Errors of the host's memory, by module. Table `edac`; no rows on a host that does not count them."""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 60.0

_S, _U = Type.STRING, Type.U64
_C, _G = Kind.COUNTER, Kind.GAUGE

METRICS = (
    Metric("dimm", _S, Unit.TEXT, Kind.KEY, "Controller and module, as below /sys/devices/system/edac/mc: mc0/dimm3; mc0 alone = errors whose module is not known."),
    Metric("label", _S, Unit.TEXT, Kind.STATE, "What the board calls the module, where the driver or edac-ctl knows (edac-ctl --print-labels).", rollup="last"),
    Metric("corrected_total", _U, Unit.COUNT, _C, "Corrected errors since the driver was loaded (edac-util -v).", rollup="delta"),
    Metric("uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors since the driver was loaded (edac-util -v).", rollup="delta"),
    Metric("corrected_day", _U, Unit.COUNT, _G, "By how much corrected_total was seen to grow in the last day, since the agent started.", rollup="last"),
    Metric("uncorrectable_day", _U, Unit.COUNT, _G, "By how much uncorrectable_total was seen to grow in the last day, since the agent started.", rollup="last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per module and one per controller."""
    return host.rows("edac")
