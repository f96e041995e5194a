"""The machine around the cards: CPU, memory, pressure, uptime. Table `host`."""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 10.0

_F, _U = Type.F64, Type.U64
_G, _C = Kind.GAUGE, Kind.COUNTER

METRICS = (
    Metric("cpu_busy_s_total", _F, Unit.SECOND, _C, "CPU time not idle, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpu_iowait_s_total", _F, Unit.SECOND, _C, "CPU time waiting for I/O, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpu_steal_s_total", _F, Unit.SECOND, _C, "CPU time taken by the hypervisor, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpus", _U, Unit.COUNT, Kind.STATE, "Cores online.", 1, 65536, "last"),
    Metric("load1", _F, Unit.ONE, _G, "Load average over one minute (uptime).", 0, 1e6, "mean"),
    Metric("load15", _F, Unit.ONE, _G, "Load average over 15 minutes (uptime).", 0, 1e6, "mean"),
    Metric("processes", _U, Unit.COUNT, _G, "Tasks that exist (/proc/loadavg).", 0, 1e8, "mean"),
    Metric("processes_blocked", _U, Unit.COUNT, _G, "Processes in uninterruptible sleep (/proc/stat).", 0, 1e8, "max"),
    Metric("context_switches_total", _U, Unit.COUNT, _C, "Context switches since boot (/proc/stat).", rollup="delta"),
    Metric("mem_total_bytes", _U, Unit.BYTE, _G, "Memory of the host (free -b).", 0, 2**50, "last"),
    Metric("mem_available_bytes", _U, Unit.BYTE, _G, "Memory that can be had without swapping (free -b).", 0, 2**50, "min"),
    Metric("swap_used_bytes", _U, Unit.BYTE, _G, "Swap in use (free -b).", 0, 2**50, "max"),
    Metric("psi_cpu_some_s_total", _F, Unit.SECOND, _C, "Time in which a task waited for CPU (/proc/pressure/cpu).", 0, 1e12, "delta"),
    Metric("psi_memory_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks waited for memory (/proc/pressure/memory).", 0, 1e12, "delta"),
    Metric("psi_io_some_s_total", _F, Unit.SECOND, _C, "Time in which a task waited for I/O (/proc/pressure/io).", 0, 1e12, "delta"),
    Metric("psi_io_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks waited for I/O (/proc/pressure/io).", 0, 1e12, "delta"),
    Metric("uptime_s", _F, Unit.SECOND, _C, "Time since boot (/proc/uptime).", 0, 1e10, "last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row."""
    return (host.read("host"),)
