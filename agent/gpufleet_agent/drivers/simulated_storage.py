"""Disks and mounts of a host that does not exist: a root disk, a scratch disk, a share, and shared memory.

What they show is a function of the scenario, the boot and the time alone; no process is started here.
"""

from collections.abc import Iterable

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import cards
from gpufleet_agent.drivers.mounts import LUSTRE, NFS, USAGE, no_answer
from gpufleet_agent.drivers.nvme import EVERY_S
from gpufleet_agent.drivers.simulated_host import MEM_BYTES
from gpufleet_agent.scenario import KINDS, Fault, Scenario

NFS_SERVER = "filer-01"

_EVERY_S = 30.0
_DEADLINE_S = 2.0
_BLOCK = 131_072
_NOT_NFS = Null(Reason.NOT_SUPPORTED, "not_nfs")
_DISKS: dict[str, tuple[str, int, float, float]] = {
    "nvme0n1": ("SAMSUNG MZ1L2960HCJR-00A07", 960_197_124_096, 12.0, 11.0),
    "nvme1n1": ("SAMSUNG MZWLO7T6HBLA-00A07", 7_681_501_126_656, 95.0, 4.0),
}
"""Name -> model, size, operations of each direction per second, per cent of its rated life in use."""
_LIFE_S = 300 * 86_400
"""For how long a disk had been powered at the scenario's start."""

_MEDIA_ERROR_S = 60.0
"""A disk that is slow reads again and again, and gives up on something so often."""
_MOUNTS: dict[str, tuple[str, str, int, float, int]] = {
    "/": ("ext4", "/dev/nvme0n1p2", 943_718_400_000, 0.31, 58_593_280),
    "/scratch": ("xfs", "/dev/nvme1n1", 7_677_721_903_104, 0.44, 750_147_072),
    "/dev/shm": ("tmpfs", "tmpfs", MEM_BYTES // 2, 0.02, 134_217_728),
    "/data": ("nfs4", f"{NFS_SERVER}:/export/data", 1_099_511_627_776_000, 0.58, 21_474_836_480),
}
"""Path -> kind, source, size, part in use, inodes."""
_AWAIT_S = 0.0002
_RATES = {"read": 900.0, "write": 140.0, "getattr": 25.0, "lookup": 6.0}
_RTT_S = 0.0009


def disks(scenario: Scenario, node: str, booted_at: float, t: float) -> Iterable[Row]:
    """The rows of probe `disk`."""
    slow = [fault for fault in scenario.faults(node) if fault.kind == "disk_slow"]
    return [_disk(name, [one for one in slow if one.param("disk") == name], booted_at, t) for name in _DISKS]


def disk_items(scenario: Scenario, node: str) -> Iterable[Row]:
    """The disks as the inventory has them."""
    return [
        {
            "disk": name,
            "model": model,
            "serial": f"S{cards.number(scenario.fleet.seed, node, name) % 10**12:012d}",
            "firmware": "GDC7502Q",
            "transport": "pcie",
            "size_bytes": str(size),
            "rotational": "0",
        }
        for name, (model, size, _, _) in _DISKS.items()
    ]


def mounts(scenario: Scenario, node: str, booted_at: float, t: float) -> Iterable[Row]:
    """The rows of probe `mount`."""
    faults = [one for one in scenario.faults(node) if "mount" in KINDS[one.kind].params]
    return [
        _mount(path, [one for one in faults if one.param("mount") == path], booted_at, t) for path in _MOUNTS
    ]


def mount_items() -> Iterable[Row]:
    """The mounts as the inventory has them: as the hosts were set up."""
    return [
        {"mount": path, "fstype": kind, "source": source, "writable": "1"}
        for path, (kind, source, _, _, _) in _MOUNTS.items()
    ]


def log_lines(fault: Fault) -> list[tuple[float, str]]:
    """What the kernel writes about a fault of storage, and when."""
    if fault.kind != "mount_hung" or fault.param("mount") != "/data":
        return []
    lines = [(fault.at + 5, f"nfs: server {NFS_SERVER} not responding, still trying")]
    return lines if fault.end == float("inf") else [*lines, (fault.end, f"nfs: server {NFS_SERVER} OK")]


def _passed(fault: Fault, booted_at: float, t: float) -> float:
    """For how long it has held since the boot."""
    return max(0.0, min(t, fault.end) - max(fault.at, booted_at, 0.0))


def _disk(name: str, slow: list[Fault], booted_at: float, t: float) -> Row:
    _, size, rate, worn_pct = _DISKS[name]
    up = max(0.0, t - booted_at)
    took = rate * up * _AWAIT_S
    took += sum(rate * _passed(one, booted_at, t) * one.number("await_ms") / 1000 for one in slow)
    busy = min(up, rate * up * _AWAIT_S / 2 + sum(_passed(one, booted_at, t) for one in slow))
    hit = any(one.active(t) for one in slow)
    return {
        "disk": name,
        "read_bytes_total": int(rate * up) * _BLOCK,
        "write_bytes_total": int(rate * up) * _BLOCK,
        "read_ops_total": int(rate * up),
        "write_ops_total": int(rate * up),
        "read_s_total": took,
        "write_s_total": took,
        "busy_s_total": busy,
        "queue_s_total": 2 * took,
        "in_flight": 12 if hit else 0,
        "discard_ops_total": int(up / 604_800),
        "discard_s_total": int(up / 604_800) * 0.05,
        "flush_ops_total": int(rate * up / 20),
        "flush_s_total": int(rate * up / 20) * 0.0011,
        "size_bytes": size,
        "rotational": False,
        "state": "live",
        "degraded": Null(Reason.NOT_SUPPORTED, "not_raid"),
        "temperature_c": 41.0 if hit else 38.0,
        **_health(rate, worn_pct, slow, booted_at, t),
    }


def _health(rate: float, worn_pct: float, slow: list[Fault], booted_at: float, t: float) -> dict[str, Cell]:
    """What the disk's own log said when it was last asked."""
    age = max(0.0, t - booted_at) % EVERY_S
    read_at = t - age
    life = max(0.0, _LIFE_S + read_at)
    slow_s = sum(max(0.0, min(read_at, one.end) - max(one.at, 0.0)) for one in slow)
    return {
        "smart_warning_bits": 0,
        "smart_temperature_c": 41.0 if any(one.active(read_at) for one in slow) else 38.0,
        "smart_spare_pct": 100.0,
        "smart_spare_limit_pct": 10.0,
        "smart_used_pct": worn_pct,
        "smart_read_bytes_total": int(rate * life) * _BLOCK // 512_000 * 512_000,
        "smart_written_bytes_total": int(rate * life) * _BLOCK // 512_000 * 512_000,
        "smart_power_on_s_total": int(life // 3600) * 3600,
        "smart_unsafe_shutdowns_total": 3,
        "smart_media_errors_total": int(slow_s / _MEDIA_ERROR_S),
        "smart_logged_errors_total": 12 + int(slow_s / _MEDIA_ERROR_S),
        "smart_age_s": age,
    }


def _mount(path: str, faults: list[Fault], booted_at: float, t: float) -> Row:
    kind, source, size, used, inodes = _MOUNTS[path]
    full = [one for one in faults if one.kind == "disk_full" and one.active(t)]
    hung = [one for one in faults if one.kind == "mount_hung"]
    silent = next((t - one.at for one in hung if one.active(t)), None)
    ended = next((one.end - one.at for one in hung if 0 <= t - one.end < _EVERY_S), 0.0)
    used = max([used, *(one.number("used_pct") / 100 for one in full)])
    free = int(size * (1 - used))
    network = kind == "nfs4"
    row: dict[str, Cell] = {
        "mount": path,
        "fstype": kind,
        "source": source,
        "network": network,
        "nfs_address": "10.20.0.11" if network else _NOT_NFS,
        "read_only": any(one.kind == "mount_read_only" and one.active(t) for one in faults),
        "mount_read_only": False,
        "was_writable": True,
        "size_bytes": size,
        "free_bytes": free,
        "avail_bytes": free,
        "inodes": inodes,
        "inodes_free": int(inodes * 0.9),
        "canary_state": "ok",
        "canary_code": "",
        "canary_s": 0.0018 if network else 0.0011,
        "hung_s": ended,
    }
    if silent is not None:
        state = "hung" if silent >= _DEADLINE_S else "pending"
        row |= dict.fromkeys((*USAGE, "canary_s"), no_answer(state))
        row |= {"canary_state": state, "hung_s": silent if state == "hung" else 0.0}
    worked_s = max(0.0, t - booted_at) - sum(_passed(one, booted_at, t) for one in hung)
    row |= _nfs(worked_s) if network else dict.fromkeys(NFS, _NOT_NFS)
    return row | dict.fromkeys(LUSTRE, Null(Reason.NOT_SUPPORTED, "not_lustre"))


def _nfs(worked_s: float) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name, rate in _RATES.items():
        row[f"nfs_{name}_ops_total"] = int(rate * worked_s)
        row[f"nfs_{name}_rtt_s_total"] = rate * worked_s * _RTT_S
        row[f"nfs_{name}_exe_s_total"] = rate * worked_s * _RTT_S * 1.1
    return row | {name: 0 for name in NFS if name not in row}
