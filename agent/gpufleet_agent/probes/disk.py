"""Disks: what they did, how long it took them, how they are. Table `disk`.

What an NVMe disk keeps of its own health (columns `smart_*`) is a command to the device: it is asked every ten
minutes, where the agent may. SATA and SAS disks are not asked.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 30.0

_F, _S, _U = Type.F64, Type.STRING, Type.U64
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE
_MOST_S = 1e12

METRICS = (
    Metric("disk", _S, Unit.TEXT, Kind.KEY, "Name in /dev (lsblk -d)."),
    Metric("read_bytes_total", _U, Unit.BYTE, _C, "Read since boot (/proc/diskstats).", rollup="delta"),
    Metric("write_bytes_total", _U, Unit.BYTE, _C, "Written since boot (/proc/diskstats).", rollup="delta"),
    Metric("read_ops_total", _U, Unit.COUNT, _C, "Reads that ended (/proc/diskstats).", rollup="delta"),
    Metric("write_ops_total", _U, Unit.COUNT, _C, "Writes that ended (/proc/diskstats).", rollup="delta"),
    Metric("read_s_total", _F, Unit.SECOND, _C, "Time that reads took, summed; over the reads it is r_await of iostat -x.", 0, _MOST_S, "delta"),
    Metric("write_s_total", _F, Unit.SECOND, _C, "Time that writes took, summed; over the writes it is w_await of iostat -x.", 0, _MOST_S, "delta"),
    Metric("busy_s_total", _F, Unit.SECOND, _C, "Time with anything under way; its share of time is %util of iostat -x.", 0, _MOST_S, "delta"),
    Metric("queue_s_total", _F, Unit.SECOND, _C, "Time that all requests took, summed; per second it is aqu-sz of iostat -x.", 0, _MOST_S, "delta"),
    Metric("in_flight", _U, Unit.COUNT, _G, "Requests under way now (/proc/diskstats).", 0, 2**31, "max"),
    Metric("discard_ops_total", _U, Unit.COUNT, _C, "Discards that ended (/proc/diskstats).", rollup="delta"),
    Metric("discard_s_total", _F, Unit.SECOND, _C, "Time that discards took, summed (/proc/diskstats).", 0, _MOST_S, "delta"),
    Metric("flush_ops_total", _U, Unit.COUNT, _C, "Flushes that ended: fsync ends in one (/proc/diskstats).", rollup="delta"),
    Metric("flush_s_total", _F, Unit.SECOND, _C, "Time that flushes took, summed (/proc/diskstats).", 0, _MOST_S, "delta"),
    Metric("size_bytes", _U, Unit.BYTE, _ST, "Size of the disk (lsblk -bd).", 0, 2**60, "last"),
    Metric("rotational", Type.BOOL, Unit.ONE, _ST, "Spinning (lsblk -do NAME,ROTA); disks of virtual machines often say so wrongly.", rollup="last"),
    Metric("state", _S, Unit.TEXT, _ST, "live, resetting, dead (NVMe); running, offline (SCSI); clean, active (RAID) (/sys/block/*/device/state).", rollup="last"),
    Metric("degraded", _U, Unit.COUNT, _ST, "Members that a RAID array lacks (mdadm --detail).", 0, 4096, "max"),
    Metric("temperature_c", _F, Unit.CELSIUS, _G, "Composite temperature of an NVMe disk (sensors, or nvme smart-log).", -60, 150, "max"),
    Metric("smart_warning_bits", _U, Unit.BITS, _ST, "Its own warnings: 1 spare low, 2 temperature, 4 reliability, 8 read-only, 16 backup of memory (nvme smart-log: critical_warning).", 0, 127, "max"),
    Metric("smart_temperature_c", _F, Unit.CELSIUS, _G, "Composite temperature as the log had it (nvme smart-log).", -60, 150, "max"),
    Metric("smart_spare_pct", _F, Unit.PERCENT, _ST, "Spare blocks that are left (nvme smart-log: available_spare).", 0, 100, "min"),
    Metric("smart_spare_limit_pct", _F, Unit.PERCENT, _ST, "Below so much the disk itself warns (nvme smart-log: available_spare_threshold).", 0, 100, "last"),
    Metric("smart_used_pct", _F, Unit.PERCENT, _ST, "Part of its rated life that is used up; may exceed 100 (nvme smart-log: percentage_used).", 0, 255, "max"),
    Metric("smart_read_bytes_total", _U, Unit.BYTE, _C, "Read over its life, in steps of 512 kB (nvme smart-log: data_units_read).", rollup="delta"),
    Metric("smart_written_bytes_total", _U, Unit.BYTE, _C, "Written over its life, in steps of 512 kB (nvme smart-log: data_units_written).", rollup="delta"),
    Metric("smart_power_on_s_total", _U, Unit.SECOND, _C, "Powered over its life, in steps of an hour (nvme smart-log: power_on_hours).", 0, 10**10, "delta"),
    Metric("smart_unsafe_shutdowns_total", _U, Unit.COUNT, _C, "Losses of power without notice (nvme smart-log).", rollup="delta"),
    Metric("smart_media_errors_total", _U, Unit.COUNT, _C, "Data that could not be recovered (nvme smart-log: media_errors).", rollup="delta"),
    Metric("smart_logged_errors_total", _U, Unit.COUNT, _C, "Entries in its error log over its life; refused commands count too (nvme smart-log: num_err_log_entries).", rollup="delta"),
    Metric("smart_age_s", _F, Unit.SECOND, _G, "How long ago the columns smart_* were read; NULL as they are, for the same reason.", 0, 1e6, "max"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per disk."""
    return host.rows("disk")
