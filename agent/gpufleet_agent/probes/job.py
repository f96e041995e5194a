"""Who works on which card: job, user and rank of every process that holds one. Table `job`.

A row per process and card, every 30 s and at once when a process came or went. A card that nobody holds has no
row; table `agent` says that it was looked. Of a process that cannot be seen the row says just that.
"""

from collections.abc import Iterable
from dataclasses import replace

from gpufleet.metric import Cell, Kind, Metric, Null, Reason, Row, Type, Unit
from gpufleet_agent.drivers import Host, Process

EVERY = 30.0
TICK = 10.0

_F, _I, _U, _S = Type.F64, Type.I64, Type.U64, Type.STRING
_G, _C, _ST, _K = Kind.GAUGE, Kind.COUNTER, Kind.STATE, Kind.KEY

METRICS = (
    Metric("gpu_uuid", _S, Unit.TEXT, _K, "Identity of the card (nvidia-smi: uuid)."),
    Metric("gpu_index", _I, Unit.ONE, _K, "The driver's number today; never an identity.", 0, 1023),
    Metric("pci", _S, Unit.TEXT, _K, "PCI address dddd:bb:dd.f (nvidia-smi: pci.bus_id)."),
    Metric("pid", _U, Unit.ONE, _K, "The process, as the driver says it (nvidia-smi --query-compute-apps=pid).", 0, 2**32),
    Metric("pid_start", _U, Unit.COUNT, _ST, "When it began, clock ticks since boot; with the pid it names one process (/proc/PID/stat).", rollup="last"),
    Metric("job_kind", _S, Unit.TEXT, _ST, "slurm, kubernetes or plain (/proc/PID/cgroup).", rollup="last"),
    Metric("job_id", _S, Unit.TEXT, _ST, "Slurm job number, UID of the pod, else the systemd unit or pid-SESSION.", rollup="last"),
    Metric("job_step", _S, Unit.TEXT, _ST, "Slurm step: 0, 1, batch, interactive, ... (squeue --steps).", rollup="last"),
    Metric("container", _S, Unit.TEXT, _ST, "Id of the container it runs in (crictl ps, docker ps); empty = none.", rollup="last"),
    Metric("user", _S, Unit.TEXT, _ST, "Whose process it is: the name, or the number where the host's passwd has none (ps -o user).", rollup="last"),
    Metric("uid", _U, Unit.ONE, _ST, "Number of that user (ps -o uid).", 0, 2**32, "last"),
    Metric("rank", _U, Unit.ONE, _ST, "Its rank in the whole job: RANK, else SLURM_PROCID.", 0, 10**7, "last"),
    Metric("local_rank", _U, Unit.ONE, _ST, "Its rank on this host: LOCAL_RANK.", 0, 65535, "last"),
    Metric("world", _U, Unit.COUNT, _ST, "Ranks of the whole job: WORLD_SIZE.", 1, 10**7, "last"),
    Metric("command", _S, Unit.TEXT, _ST, "Name of the program, without its arguments (ps -o comm).", rollup="last"),
    Metric("mem_used_bytes", _U, Unit.BYTE, _G, "Memory of the card that it holds (nvidia-smi --query-compute-apps=used_memory).", 0, 2**45, "max"),
    Metric("psi_io_some_s_total", _F, Unit.SECOND, _C, "Time in which a task of the job waited for I/O (io.pressure of its cgroup).", 0, 1e12, "delta"),
    Metric("psi_io_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks of the job waited for I/O (io.pressure of its cgroup).", 0, 1e12, "delta"),
    Metric("psi_cpu_some_s_total", _F, Unit.SECOND, _C, "Time in which a task of the job waited for CPU (cpu.pressure of its cgroup).", 0, 1e12, "delta"),
    Metric("psi_memory_full_s_total", _F, Unit.SECOND, _C, "Time in which all tasks of the job waited for memory (memory.pressure of its cgroup).", 0, 1e12, "delta"),
)  # fmt: skip

_OF_PROCESS = tuple(metric.name for metric in METRICS if metric.name not in
                    ("gpu_uuid", "gpu_index", "pci", "pid", "mem_used_bytes"))  # fmt: skip
_NOT_SAID = Null(Reason.NOT_SUPPORTED, "not_said")


def tick(host: Host, /) -> frozenset[tuple[int, str]]:
    """Who holds which card now; the probe runs at once when that changed."""
    return frozenset((process.pid, process.pci) for process in host.processes())


def read(host: Host, /) -> Iterable[Row]:
    """One row per process and card.

    Raises:
        DriverGone: Cards are on the bus but no driver answers.
    """
    cards = {gpu.pci: gpu for gpu in host.gpus()}
    said: dict[int, Row] = {}
    for process in _merged(host.processes()):
        card = cards.get(process.pci)
        if process.suspect == "no_such_pid":
            about: Row = dict.fromkeys(_OF_PROCESS, Null(Reason.FAILED, process.suspect))
        else:
            about = said.get(process.pid) or host.process(process.pid)
            said[process.pid] = about
        memory: Cell = _NOT_SAID if process.mem_used_bytes is None else process.mem_used_bytes
        yield {
            **about,
            "gpu_uuid": (card and card.uuid) or Null(Reason.NOT_READ),
            "gpu_index": card.index if card else Null(Reason.NOT_READ),
            "pci": process.pci,
            "pid": process.pid,
            "mem_used_bytes": memory,
        }


def _merged(processes: Iterable[Process]) -> list[Process]:
    """A driver may list a process several times for a card, by instance or by kind of work."""
    found: dict[tuple[int, str], Process] = {}
    for process in processes:
        known = found.setdefault((process.pid, process.pci), process)
        if known is not process:
            used = [one.mem_used_bytes for one in (known, process) if one.mem_used_bytes is not None]
            whole = replace(known, mem_used_bytes=sum(used) if used else None)
            found[process.pid, process.pci] = whole
    return [found[key] for key in sorted(found)]
