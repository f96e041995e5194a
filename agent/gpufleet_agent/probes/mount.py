"""Mounted file systems: do they answer, how full are they, what NFS and Lustre say. Table `mount`.

The agent itself opens and stats none of them: a program of its own asks, and is left behind when it gets stuck.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 30.0

_F, _S, _U, _B = Type.F64, Type.STRING, Type.U64, Type.BOOL
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE
_SIZE = 2**62
_MOST_S = 1e13


def _nfs(operation: str) -> tuple[Metric, ...]:
    name, upper = f"nfs_{operation.lower()}", operation
    return (
        Metric(f"{name}_ops_total", _U, Unit.COUNT, _C, f"{upper} requests (mountstats).", rollup="delta"),
        Metric(f"{name}_rtt_s_total", _F, Unit.SECOND, _C, f"Time from sending {upper} to its answer, summed (mountstats, nfsiostat).", 0, _MOST_S, "delta"),
        Metric(f"{name}_exe_s_total", _F, Unit.SECOND, _C, "The same with waiting to be sent: the difference is the queue (nfsiostat avg exe).", 0, _MOST_S, "delta"),
    )  # fmt: skip


METRICS = (
    Metric("mount", _S, Unit.TEXT, Kind.KEY, "Path (findmnt); what is not printable in octal."),
    Metric("fstype", _S, Unit.TEXT, _ST, "Kind of file system (findmnt -o FSTYPE).", rollup="last"),
    Metric("source", _S, Unit.TEXT, _ST, "Device or server:/path (findmnt -o SOURCE).", rollup="last"),
    Metric("network", _B, Unit.ONE, _ST, "Depends on another machine or a process: NFS, Lustre, FUSE, ...", rollup="last"),
    Metric("nfs_address", _S, Unit.TEXT, _ST, "Address of the NFS server (option addr of findmnt -o OPTIONS).", rollup="last"),
    Metric("read_only", _B, Unit.ONE, _ST, "The file system is read-only (findmnt -o FS-OPTIONS): so mounted, or after an error.", rollup="max"),
    Metric("mount_read_only", _B, Unit.ONE, _ST, "The mount point is, as the agent sees it; a hardened service sees all so (findmnt -o VFS-OPTIONS).", rollup="last"),
    Metric("was_writable", _B, Unit.ONE, _ST, "The file system was writable at some time since the agent began to watch it.", rollup="last"),
    Metric("size_bytes", _U, Unit.BYTE, _G, "Size (df -B1).", 0, _SIZE, "last"),
    Metric("free_bytes", _U, Unit.BYTE, _G, "Free, with what is reserved for root (stat -f).", 0, _SIZE, "min"),
    Metric("avail_bytes", _U, Unit.BYTE, _G, "Free for everybody (df -B1).", 0, _SIZE, "min"),
    Metric("inodes", _U, Unit.COUNT, _G, "Inodes; NULL where there is no fixed number (df -i).", 0, _SIZE, "last"),
    Metric("inodes_free", _U, Unit.COUNT, _G, "Inodes that are free (df -i).", 0, _SIZE, "min"),
    Metric("canary_state", _S, Unit.TEXT, _ST, "ok, pending (asked just now), hung, or failed (timeout 2 stat -f).", rollup="last"),
    Metric("canary_code", _S, Unit.TEXT, _ST, "Error of a failure: ESTALE, EIO, EACCES, ...; empty = none (errno -l).", rollup="last"),
    Metric("canary_s", _F, Unit.SECOND, _G, "How long the mount took to answer, with the start of the program that asks (time stat -f).", 0, 1e8, "max"),
    Metric("hung_s", _F, Unit.SECOND, _G, "For how long it has not answered; in the first row after that: for how long it did not.", 0, 1e8, "max"),
    *_nfs("READ"),
    *_nfs("WRITE"),
    *_nfs("GETATTR"),
    *_nfs("LOOKUP"),
    Metric("nfs_retransmits_total", _U, Unit.COUNT, _C, "Requests of any kind that were sent again (nfsiostat retrans).", rollup="delta"),
    Metric("nfs_timeouts_total", _U, Unit.COUNT, _C, "Requests of any kind that timed out (mountstats).", rollup="delta"),
    Metric("nfs_backlog_total", _U, Unit.COUNT, _C, "Requests that waited for a slot, summed over all that were sent (mountstats, xprt).", rollup="delta"),
    Metric("nfs_bad_xids_total", _U, Unit.COUNT, _C, "Answers to requests that nobody had sent (mountstats, xprt).", rollup="delta"),
    Metric("lustre_read_bytes_total", _U, Unit.BYTE, _C, "Read (lctl get_param llite.*.stats).", rollup="delta"),
    Metric("lustre_write_bytes_total", _U, Unit.BYTE, _C, "Written (lctl get_param llite.*.stats).", rollup="delta"),
    Metric("lustre_opens_total", _U, Unit.COUNT, _C, "Files opened (lctl get_param llite.*.stats).", rollup="delta"),
    Metric("lustre_imports", _U, Unit.COUNT, _ST, "Servers it is connected to (lctl get_param osc.*.import mdc.*.import).", 0, 65536, "last"),
    Metric("lustre_imports_down", _U, Unit.COUNT, _ST, "Of these, in a state other than FULL or IDLE.", 0, 65536, "max"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per mounted file system that holds data."""
    return host.rows("mount")
