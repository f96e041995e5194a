"""The machine around the cards: CPU, memory, pressure, clock, heat, stuck processes. Table `host`."""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 10.0

_F, _U, _S, _B = Type.F64, Type.U64, Type.STRING, Type.BOOL
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE

METRICS = (
    Metric("cpu_busy_s_total", _F, Unit.SECOND, _C, "CPU time not idle, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpu_iowait_s_total", _F, Unit.SECOND, _C, "CPU time waiting for I/O, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpu_steal_s_total", _F, Unit.SECOND, _C, "CPU time taken by the hypervisor, all cores, since boot (/proc/stat).", 0, 1e12, "delta"),
    Metric("cpus", _U, Unit.COUNT, _ST, "Cores online.", 1, 65536, "last"),
    Metric("cpu_clock_mhz", _F, Unit.MHZ, _G, "Mean clock of up to 32 processors, spread over the host (cpupower frequency-info -f).", 1, 10000, "mean"),
    Metric("cpu_clock_mhz_min", _F, Unit.MHZ, _G, "The lowest clock among them; idle ones are slow.", 1, 10000, "min"),
    Metric("cpu_clock_median_mhz", _F, Unit.MHZ, _G, "The median clock among them.", 1, 10000, "mean"),
    Metric("cpu_governor", _S, Unit.TEXT, _ST, "Who chooses the clock: performance, schedutil, ...; several joined by + (cpupower frequency-info -p).", rollup="last"),
    Metric("load1", _F, Unit.ONE, _G, "Load average over one minute (uptime).", 0, 1e6, "mean"),
    Metric("load15", _F, Unit.ONE, _G, "Load average over 15 minutes (uptime).", 0, 1e6, "mean"),
    Metric("processes", _U, Unit.COUNT, _G, "Tasks that exist (/proc/loadavg).", 0, 1e8, "mean"),
    Metric("processes_blocked", _U, Unit.COUNT, _G, "Processes in uninterruptible sleep (/proc/stat).", 0, 1e8, "max"),
    Metric("processes_zombie", _U, Unit.COUNT, _G, "Processes that ended and whose parent has not noticed, once a minute (ps -e -o stat).", 0, 1e8, "max"),
    Metric("processes_stuck", _U, Unit.COUNT, _G, "Processes, not of the kernel, found in uninterruptible sleep minute after minute without running (ps -e -o stat: D).", 0, 1e8, "max"),
    Metric("stuck_s", _F, Unit.SECOND, _G, "How long the one stuck longest has been seen so; 0 = none.", 0, 1e10, "max"),
    Metric("stuck_comm", _S, Unit.TEXT, _ST, "Its name; empty = none.", rollup="last"),
    Metric("processes_unkillable", _U, Unit.COUNT, _G, "Of the stuck ones, those that were killed in vain (/proc/PID/status: SIGKILL pending).", 0, 1e8, "max"),
    Metric("unkillable_s", _F, Unit.SECOND, _G, "How long the one of them stuck longest has been seen so; 0 = none.", 0, 1e10, "max"),
    Metric("context_switches_total", _U, Unit.COUNT, _C, "Context switches since boot (/proc/stat).", rollup="delta"),
    Metric("mem_total_bytes", _U, Unit.BYTE, _G, "Memory of the host (free -b).", 0, 2**50, "last"),
    Metric("mem_available_bytes", _U, Unit.BYTE, _G, "Memory that can be had without swapping (free -b).", 0, 2**50, "min"),
    Metric("swap_used_bytes", _U, Unit.BYTE, _G, "Swap in use (free -b).", 0, 2**50, "max"),
    Metric("swap_in_pages_total", _U, Unit.COUNT, _C, "Pages read back from swap since boot (/proc/vmstat: pswpin).", rollup="delta"),
    Metric("swap_out_pages_total", _U, Unit.COUNT, _C, "Pages written to swap since boot (/proc/vmstat: pswpout).", rollup="delta"),
    Metric("major_faults_total", _U, Unit.COUNT, _C, "Page faults that had to wait for a disk, since boot (/proc/vmstat: pgmajfault).", rollup="delta"),
    Metric("oom_kills_total", _U, Unit.COUNT, _C, "Processes killed for memory since boot (/proc/vmstat: oom_kill).", rollup="delta"),
    Metric("hugepages", _U, Unit.COUNT, _ST, "Huge pages set aside (/proc/meminfo: HugePages_Total).", rollup="last"),
    Metric("hugepages_free", _U, Unit.COUNT, _G, "Those of them that nobody uses (/proc/meminfo: HugePages_Free).", rollup="min"),
    Metric("psi_cpu_some_s_total", _F, Unit.SECOND, _C, "Time in which a task waited for CPU (/proc/pressure/cpu).", 0, 1e12, "delta"),
    Metric("psi_cpu_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks waited for CPU; 0 for a whole host (/proc/pressure/cpu).", 0, 1e12, "delta"),
    Metric("psi_memory_some_s_total", _F, Unit.SECOND, _C, "Time in which a task waited for memory (/proc/pressure/memory).", 0, 1e12, "delta"),
    Metric("psi_memory_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks waited for memory (/proc/pressure/memory).", 0, 1e12, "delta"),
    Metric("psi_io_some_s_total", _F, Unit.SECOND, _C, "Time in which a task waited for I/O (/proc/pressure/io).", 0, 1e12, "delta"),
    Metric("psi_io_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks waited for I/O (/proc/pressure/io).", 0, 1e12, "delta"),
    Metric("clock_synchronised", _B, Unit.ONE, _ST, "Something keeps the clock right (timedatectl: System clock synchronized).", rollup="min"),
    Metric("clock_offset_s", _F, Unit.SECOND, _G, "What is still to be corrected of the clock's error (adjtimex --print: offset).", -1e7, 1e7, "last"),
    Metric("clock_error_estimate_s", _F, Unit.SECOND, _G, "The clock's error as estimated (adjtimex --print: esterror).", 0, 1e7, "max"),
    Metric("clock_error_max_s", _F, Unit.SECOND, _G, "The clock's error at most: it grows until the next correction (adjtimex --print: maxerror).", 0, 1e7, "max"),
    Metric("zone_temperature_c", _F, Unit.CELSIUS, _G, "The hottest thermal zone (/sys/class/thermal/thermal_zone*/temp).", -40, 150, "max"),
    Metric("hottest_zone", _S, Unit.TEXT, _ST, "The type of that zone (/sys/class/thermal/thermal_zone*/type).", rollup="last"),
    Metric("zones_unreadable", _U, Unit.COUNT, _G, "Thermal zones that give no temperature, or an impossible one.", 0, 1e4, "max"),
    Metric("cpu_temperature_c", _F, Unit.CELSIUS, _G, "The hottest processor as a whole (sensors: Package id 0, Tctl).", -40, 150, "max"),
    Metric("inlet_temperature_c", _F, Unit.CELSIUS, _G, "Air that comes in, where a sensor is labelled so (sensors).", -40, 150, "max"),
    Metric("fans", _U, Unit.COUNT, _G, "Fans that the board reports and that were seen turning since the agent started (sensors).", 0, 1e4, "min"),
    Metric("fans_failed", _U, Unit.COUNT, _G, "Of these, those that the board calls too slow or broken (sensors: ALARM).", 0, 1e4, "max"),
    Metric("fan_rpm_min", _U, Unit.RPM, _G, "The slowest of those that turn; 0 = none of them turns now (sensors).", 0, 1e5, "min"),
    Metric("kernel_taint", _U, Unit.BITS, _ST, "What makes the kernel's own reports less trustworthy; NVIDIA's modules set bits 0, 12 and 13 (/proc/sys/kernel/tainted).", 0, 2**32 - 1, "last"),
    Metric("units_failed", _U, Unit.COUNT, _G, "systemd units that failed, every five minutes (systemctl --failed).", 0, 1e6, "max"),
    Metric("uptime_s", _F, Unit.SECOND, _C, "Time since boot (/proc/uptime).", 0, 1e10, "last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row."""
    return (host.read("host"),)
