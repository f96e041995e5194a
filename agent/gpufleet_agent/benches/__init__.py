"""Every micro-benchmark, and the columns of table `bench`."""

from gpufleet.metric import Kind, Metric, Type, Unit
from gpufleet_agent.benches import (
    all_reduce_perf,
    clock,
    d2h,
    dcgmi_diag,
    disk_read,
    fio,
    fma,
    gemm,
    h2d,
    hbm,
    ib_write_bw,
    memcpy,
    nvbandwidth,
    p2p,
    tcp_loopback,
)
from gpufleet_agent.measure import Bench, ToolBench

TOOLS: dict[str, ToolBench] = {
    "nvbandwidth": nvbandwidth,
    "all_reduce_perf": all_reduce_perf,
    "ib_write_bw": ib_write_bw,
    "dcgmi_diag": dcgmi_diag,
    "fio": fio,
}
"""Those that run a tool of the host: off unless enabled."""

BENCHES: dict[str, Bench] = {
    "memcpy": memcpy,
    "disk_read": disk_read,
    "h2d": h2d,
    "d2h": d2h,
    "hbm": hbm,
    "clock": clock,
    "fma": fma,
    "p2p": p2p,
    "gemm": gemm,
    "tcp_loopback": tcp_loopback,
    **TOOLS,
}
"""Every bench, by name."""

_F, _I, _U, _S = Type.F64, Type.I64, Type.U64, Type.STRING
_K, _ST, _G = Kind.KEY, Kind.STATE, Kind.GAUGE

METRICS = (
    Metric("entity", _S, Unit.TEXT, _K, "What was measured: gpu:<UUID>, numa:<N>, port:<device>/<port> or node:."),
    Metric("peer", _S, Unit.TEXT, _K, "The other end, where there is one: the card that was sent to, gpu:<UUID>, or the node; else empty."),
    Metric("bench", _S, Unit.TEXT, _K, "Its name: h2d, d2h, hbm, clock, fma, p2p, gemm, memcpy, disk_read, tcp, ..., or of the tool: nvbandwidth, ..."),
    Metric("version", _S, Unit.TEXT, _K, "Of the bench, and of the tool behind it; another version is another series."),
    Metric("convention", _S, Unit.TEXT, _K, "What counts as a byte moved: copied_once, read_plus_write, ..."),
    Metric("params_hash", _S, Unit.TEXT, _K, "Hash of the parameters; other parameters are another series."),
    Metric("value", _F, Unit.ONE, _G, "The result in `unit`; NULL unless status is ok.", 0, 1e15),
    Metric("unit", _S, Unit.TEXT, _ST, "Unit of value: GB/s, MHz, TFLOPS, us, passed."),
    Metric("status", _S, Unit.TEXT, _ST, "ok, preempted, contaminated, skipped, hung, failed or unsupported."),
    Metric("reason", _S, Unit.TEXT, _ST, "One line when not ok."),
    Metric("repeats", _U, Unit.COUNT, _G, "Repeats that value is the median of.", 0, 1e6),
    Metric("spread", _F, Unit.ONE, _G, "Median absolute deviation of the repeats, as a part of value.", 0, 1e6),
    Metric("seconds", _F, Unit.SECOND, _G, "Time the run took.", 0, 1e6),
    Metric("gpu_seconds", _F, Unit.SECOND, _G, "Time the card was kept from others.", 0, 1e6),
    Metric("lease", _S, Unit.TEXT, _ST, "The collector's lease it ran under; empty when scheduled."),
    Metric("driver", _S, Unit.TEXT, _ST, "Driver version."),
    Metric("link", _S, Unit.TEXT, _ST, "Link it went over, by what it can do: pcie4x16; between cards with both places: nvlink:1b:00>43:00; to a node: tcp:<node>."),
    Metric("temperature_c", _F, Unit.CELSIUS, _G, "Of the card afterwards.", -40, 150),
    Metric("power_w", _F, Unit.WATT, _G, "Of the card afterwards.", 0, 3000),
    Metric("sm_clock_mhz", _F, Unit.MHZ, _G, "Of the card afterwards.", 0, 5000),
    Metric("clock_reasons", _U, Unit.BITS, _ST, "Of the card afterwards; bits as in table gpu.", 0, 2**32 - 1),
)  # fmt: skip
