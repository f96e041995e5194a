"""Things that happen once. The kinds are a closed list: docs/schema.md is generated from it."""

from dataclasses import dataclass

KINDS: dict[str, str] = {
    "agent_start": "The agent started; detail: version, how it was stopped before.",
    "agent_stop": "The agent was told to stop.",
    "reboot": "The boot id changed since the agent last ran; detail: both ids.",
    "clock_step": "The wall clock jumped against the monotonic one; detail: step_s.",
    "gpu_lost": "A card that answered no longer does; detail: pci, serial, code.",
    "gpu_found": "A card that was lost or unknown answers.",
    "driver_hung": "A driver call passed its deadline; detail: pci, call, seconds. Once per episode.",
    "driver_recovered": "The driver answers again for that card; detail: pci, seconds.",
    "driver_crashed": "The sampler died in a driver call; detail: pci, call, signal.",
    "driver_reloaded": "The driver was loaded anew: counters start a new epoch.",
    "driver_mismatch": "Driver and library differ: reload or reboot; detail: both. Once per episode.",
    "driver_released": "The agent let go of the driver because it was asked to; detail: for_s.",
    "driver_resumed": "The agent took the driver back; code = asked or time_over.",
    "sampler_restarted": "The sampler child ended outside a driver call and was started again.",
    "rejected": "Values that cannot be became NULL; code = probe.column; count = since it was last told.",
    "spool_drop": "The spool was full: samples or events were dropped; count says how many batches.",
    "spool_corrupt": "The spool file could not be read; it was kept aside and a new one begun.",
    "batch_parked": "A batch that can never be sent was put aside; detail: number, size.",
    "batch_conflict": "A known batch number came with other content (collector).",
    "identity_conflict": "Two live machines use one name, or two boots one machine id (collector).",
    "renamed": "A machine id came back under another name; detail: before, after (collector).",
    "clock_skew": "The agent's clock differs from the collector's; detail: offset_s (collector).",
    "quarantined": "Cells or rows of this agent were not stored as data; count (collector).",
    "store_reopened": "The store failed and was reopened; detail: error (collector).",
    "store_replaced": "The store could not be opened; it was kept aside (collector).",
    "xid": "The NVIDIA driver reported an error; code = Xid number; detail: severity, action, pid, subcode.",
    "xid_unparsed": "A line with Xid or SXid that could not be read; the message is the line.",
    "recovery_action": "What the driver wants done with a card; code = none, gpu_reset, node_reboot, ...",
    "gpu_init_failed": "The driver found a card and could not start it; code = rm_init_adapter, power_cable.",
    "sxid": "An NVSwitch reported an error; code = SXid number; detail: severity, switch, link.",
    "aer": "A PCIe device reported an error; code = corrected, nonfatal, fatal; entity = the device.",
    "mce": "Processor or platform reported an error; code = corrected, uncorrected, fatal, ...",
    "edac": "Host memory had an error; code = corrected, uncorrected; count = errors; detail: where.",
    "nfs": "An NFS server stopped answering (not_responding, timed_out) or answers again (ok, duration_s).",
    "oom": "The kernel killed a process for memory; code = cgroup or host; detail: pid, name, cgroup.",
    "hung_task": "A process has been stuck in the kernel for minutes; detail: pid, name, modules.",
    "lockup": "A processor was stuck in the kernel; code = soft, hard, rcu.",
    "io_error": "A disk or file system failed an operation; code says which way; entity = the disk.",
    "kernel_log": "Reading the kernel log: code = lost (count records), unreadable, readable, position.",
}

COLLECTOR_KINDS = frozenset(
    {
        "batch_conflict", "identity_conflict", "renamed", "clock_skew", "quarantined", "store_reopened",
        "store_replaced",
    }
)  # fmt: skip
"""Those the collector alone says; from an agent they are not believed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it travels.

    Attributes:
        kind: A key of `KINDS`.
        entity: `kind:id` as in the inventory; "node:" for the host itself.
        ts_us: Agent's wall clock, microseconds since the epoch, UTC.
        mono_us: CLOCK_BOOTTIME, microseconds.
        code: A short word or number of the kind's own list; may be empty.
        message: One line for people.
        detail: A JSON object as text, or empty.
        count: How many of the same this one stands for.
    """

    kind: str
    entity: str
    ts_us: int
    mono_us: int
    code: str = ""
    message: str = ""
    detail: str = ""
    count: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"event kind {self.kind!r} is not in gpufleet.event.KINDS")
