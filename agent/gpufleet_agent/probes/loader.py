"""How training is fed: what data loaders measured of themselves, and what their workers do. Table `loader`.

Two sources, one table. `hook`: a training process that uses `gpufleet_loader` tells the agent how long it waited
for data; the supervisor takes that in (`gpufleet_agent/loader.py`). `proc`: the worker processes of data loaders as
/proc shows them, per parent, without anybody's help. All counts are cumulative, so that a row that is lost costs
time resolution and nothing else. Table `job` says by (node, pid) whose processes they are and which cards they hold.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 15.0

_F, _U, _S = Type.F64, Type.U64, Type.STRING
_G, _C, _T = Kind.GAUGE, Kind.COUNTER, Kind.STATE

METRICS = (
    Metric("source", _S, Unit.TEXT, Kind.KEY, "hook (told by the process through gpufleet_loader) or proc (seen in /proc)."),
    Metric("pid", _U, Unit.ONE, Kind.KEY, "The process that consumes the data; of workers their parent (ps -o pid,ppid)."),
    Metric("pid_start", _U, Unit.ONE, Kind.KEY, "When it started, clock ticks since boot (/proc/PID/stat field 22)."),
    Metric("loader", _S, Unit.TEXT, Kind.KEY, "Name that the training code gave the loader; empty for proc."),
    Metric("uid", _U, Unit.ONE, _T, "User of the process, by the kernel (ps -o uid).", 0, 2**32, "last"),
    Metric("state", _S, Unit.TEXT, _T, "live, stale (nothing heard for 60 s) or closed (the process is gone).", rollup="last"),
    Metric("role", _S, Unit.TEXT, _T, "train, eval, ...: what the loader is for, as the code says.", rollup="last"),
    Metric("rank", _U, Unit.ONE, _T, "Rank in the job, as the process says (RANK, SLURM_PROCID).", 0, 1e7, "last"),
    Metric("local_rank", _U, Unit.ONE, _T, "Rank on this host, as the process says (LOCAL_RANK, SLURM_LOCALID).", 0, 1e6, "last"),
    Metric("world", _U, Unit.ONE, _T, "Ranks of the job, as the process says (WORLD_SIZE, SLURM_NTASKS).", 0, 1e7, "last"),
    Metric("lib", _S, Unit.TEXT, _T, "Library of the loader, and its version.", rollup="last"),
    Metric("fetches_total", _U, Unit.COUNT, _C, "Batches fetched in steady state.", rollup="delta"),
    Metric("wait_s_total", _F, Unit.SECOND, _C, "Time the process waited for those batches; an upper bound of starvation.", 0, 1e12, "delta"),
    Metric("busy_s_total", _F, Unit.SECOND, _C, "Time between having one batch and asking for the next.", 0, 1e12, "delta"),
    Metric("startup_s_total", _F, Unit.SECOND, _C, "Time for the first batch of each pass over the data; not in wait_s_total.", 0, 1e12, "delta"),
    Metric("pause_s_total", _F, Unit.SECOND, _C, "Gaps of more than 60 s between two fetches (checkpoint, evaluation); not in busy_s_total.", 0, 1e12, "delta"),
    Metric("starved_total", _U, Unit.COUNT, _C, "Fetches that found no batch ready; NULL where the loader does not say.", rollup="delta"),
    Metric("wait_max_s", _F, Unit.SECOND, _G, "Longest wait for one batch since the process started.", 0, 1e9, "max"),
    Metric("wait_hist", _S, Unit.TEXT, _T, "Fetches by how long they waited: 16 cumulative counts, the first under 16 us, each next to twice as long.", rollup="last"),
    Metric("ready", _U, Unit.COUNT, _G, "Batches ready at the last fetch; NULL where the loader does not say.", 0, 1e6, "mean"),
    Metric("prefetch", _U, Unit.COUNT, _T, "Batches each worker prepares ahead.", 0, 1e6, "last"),
    Metric("workers", _U, Unit.COUNT, _G, "Workers, processes or threads: as the loader says (hook), or counted (proc).", 0, 1e6, "last"),
    Metric("worker_threads", _U, Unit.COUNT, _G, "Of the workers, those that are threads of the process; NULL where it holds no card (ps -L).", 0, 1e6, "last"),
    Metric("workers_running", _U, Unit.COUNT, _G, "Workers that ran or wanted to at this moment (ps: R).", 0, 1e6, "mean"),
    Metric("workers_disk", _U, Unit.COUNT, _G, "Workers in uninterruptible sleep at this moment, most often for a disk or NFS (ps: D).", 0, 1e6, "mean"),
    Metric("workers_sleeping", _U, Unit.COUNT, _G, "Workers that slept at this moment: nothing to do, a socket, a lock (ps: S).", 0, 1e6, "mean"),
    Metric("pin_threads", _U, Unit.COUNT, _G, "Threads that copy batches to pinned memory; they are no workers; NULL where the process holds no card (ps -L).", 0, 1e6, "last"),
    Metric("pin_threads_running", _U, Unit.COUNT, _G, "Of these, those that ran or wanted to at this moment: copying is what the card waits for (ps -L: R).", 0, 1e6, "mean"),
    Metric("worker_cpu_s_total", _F, Unit.SECOND, _C, "CPU time of the workers, ended ones too, since the agent saw the first.", 0, 1e12, "delta"),
    Metric("worker_runqueue_s_total", _F, Unit.SECOND, _C, "Time the workers' main threads waited for a CPU (/proc/PID/schedstat).", 0, 1e12, "delta"),
    Metric("worker_read_bytes_total", _U, Unit.BYTE, _C, "Bytes the workers had fetched from storage (/proc/PID/io read_bytes).", rollup="delta"),
    Metric("worker_read_chars_total", _U, Unit.COUNT, _C, "Bytes the workers read, page cache and sockets included (/proc/PID/io rchar).", rollup="delta"),
    Metric("messages_lost_total", _U, Unit.COUNT, _C, "Messages of this loader that did not arrive; their counts did, with the next one.", rollup="delta"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per process that has, or had, workers of a data loader."""
    return host.rows("loader")
