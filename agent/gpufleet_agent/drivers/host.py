"""The machine around the cards, by /proc and /sys: what probe `host` reads, and what the node is.

Needs no driver of a card. Nothing here raises for a file that is missing, truncated or full of bytes: the
cell is a Null that says why.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import files
from gpufleet_agent.drivers.host_clock import Timex, clock, kernel_timex
from gpufleet_agent.drivers.host_heat import Heat
from gpufleet_agent.drivers.host_processes import Processes
from gpufleet_agent.drivers.host_systemd import Systemd

_PLACEHOLDERS = (
    "",
    "none",
    "not specified",
    "to be filled by o.e.m.",
    "default string",
    "system product name",
)
_PRESSURES = tuple((name, kind) for name in ("cpu", "memory", "io") for kind in ("some", "full"))
_PRETTY = re.compile(r'^PRETTY_NAME="?([^"\n]*)', re.MULTILINE)
_POLICY = re.compile(r"policy[0-9]{1,6}")
_MOST_CPUS = 32
_CLOCKS_S = 0.005
_ARM_CORES = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd83"): "Arm Neoverse V3AE",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x4e", "0x010"): "NVIDIA Olympus",
    ("0xc0", "0xac3"): "Ampere-1",
}
"""(implementer, part) -> core: Arm's /proc/cpuinfo has no name."""


class Machine:
    """Readers below one root.

    Args:
        root: Where /proc and /sys are; what has no file is asked only of the running kernel's own root.
        seconds: A monotonic clock.
        ask_clock: How the kernel is asked for its clock; None = as the root allows.
        systemd: systemd's manager; None = as the root allows.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        seconds: Callable[[], float] = time.monotonic,
        ask_clock: Callable[[], Timex] | None = None,
        systemd: Systemd | None = None,
    ) -> None:
        running = root == Path("/")
        self._root = root
        self._proc = root / "proc"
        self._cpu = root / "sys/devices/system/cpu"
        self._seconds = seconds
        self._ask_clock = ask_clock or (kernel_timex if running else None)
        self._systemd = systemd or (Systemd(seconds) if running else None)
        self._heat = Heat(root, seconds)
        self._processes = Processes(root, seconds)
        self._governed: list[Path] | None = None
        self._next_cpu = 0

    def boot_id(self) -> str:
        """Of the running boot; empty when it cannot be read."""
        return files.plain(files.read(self._proc / "sys/kernel/random/boot_id"))

    def read(self) -> Row:
        """The columns of probe `host`."""
        proc = self._proc
        row: dict[str, Cell] = {}
        row.update(_stat(files.read(proc / "stat")))
        row.update(_loadavg(files.read(proc / "loadavg")))
        row.update(_meminfo(files.read(proc / "meminfo")))
        row.update(_vmstat(files.read(proc / "vmstat")))
        for name, kind in _PRESSURES:
            row[f"psi_{name}_{kind}_s_total"] = files.pressure(files.read(proc / "pressure" / name), kind)
        row.update(self._clocks())
        row.update(self._heat.read())
        row.update(self._processes.read())
        row.update(self._time())
        row["kernel_taint"] = files.parsed(files.read(proc / "sys/kernel/tainted"), _count)
        row["uptime_s"] = files.parsed(files.read(proc / "uptime"), _first_number)
        return row

    def attributes(self) -> dict[str, str]:
        """What the node is, as far as it can be read."""
        proc, dmi = self._proc, self._root / "sys/class/dmi/id"
        machine = files.plain(files.read(self._root / "etc/machine-id"))
        memory = _meminfo(files.read(proc / "meminfo"))["mem_total_bytes"]
        cpus = _stat(files.read(proc / "stat"))["cpus"]
        found = {
            "hostname": files.plain(files.read(proc / "sys/kernel/hostname")),
            "machine_id": machine if re.fullmatch("[0-9a-f]{32}", machine) and set(machine) != {"0"} else "",
            "boot_id": self.boot_id(),
            "kernel": files.plain(files.read(proc / "sys/kernel/osrelease")),
            "architecture": os.uname().machine,
            "os": self._os(),
            "vendor": files.plain(files.read(dmi / "sys_vendor")),
            "product": files.plain(files.read(dmi / "product_name")),
            "serial": files.plain(files.read(dmi / "product_serial")),
            "cpu_model": _cpu_model(files.read(proc / "cpuinfo")),
            "cpus": "" if isinstance(cpus, Null) else str(cpus),
            "mem_total_bytes": "" if isinstance(memory, Null) else str(memory),
        }
        found = {name: text for name, text in found.items() if text.lower() not in _PLACEHOLDERS}
        return found | {name: text for name, text in self._tuning().items() if text}

    def _tuning(self) -> dict[str, str]:
        """Settings that make a host slow or uneven, and rarely change."""
        sys = self._root / "sys"
        governors = self._governors(self._policies())
        return {
            "cpu_governor": "" if isinstance(governors, Null) else str(governors),
            "cpu_frequency_driver": self._word(self._cpu / "cpu0/cpufreq/scaling_driver")
            or self._word(self._cpu / "cpufreq/policy0/scaling_driver"),
            **self._deepest_idle(),
            "intel_idle_max_cstate": self._word(sys / "module/intel_idle/parameters/max_cstate"),
            "pcie_aspm_policy": _chosen(files.read(sys / "module/pcie_aspm/parameters/policy")),
            "transparent_hugepages": _chosen(files.read(sys / "kernel/mm/transparent_hugepage/enabled")),
            "numa_balancing": self._word(self._proc / "sys/kernel/numa_balancing"),
            "clocksource": self._word(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        }

    def _deepest_idle(self) -> dict[str, str]:
        """The deepest sleep that a processor may fall into, and how long it takes to wake up."""
        home = self._cpu / "cpu0/cpuidle"
        allowed = [
            (int(latency), self._word(state / "name"))
            for state in files.listed(home)
            if state.name.startswith("state")
            and (latency := self._word(state / "latency")).isascii()
            and latency.isdigit()
            and self._word(state / "disable") != "1"
        ]
        driver = self._word(self._cpu / "cpuidle/current_driver")
        if not allowed:
            return {"cpu_idle_driver": driver}
        latency_us, name = max(allowed)
        return {
            "cpu_idle_driver": driver,
            "cpu_idle_deepest": name,
            "cpu_idle_latency_us": str(latency_us),
        }

    def _word(self, path: Path) -> str:
        return files.plain(files.read(path))

    def _policies(self) -> list[Path]:
        """Where the clocks of up to 32 processors, spread over the host, are read; looked for once."""
        if self._governed is None:
            found = [path for path in files.listed(self._cpu / "cpufreq") if _POLICY.fullmatch(path.name)]
            if not found:
                cpus = [path for path in files.listed(self._cpu) if re.fullmatch("cpu[0-9]{1,6}", path.name)]
                found = [cpu / "cpufreq" for cpu in cpus if files.exists(cpu / "cpufreq")]
            found.sort(key=lambda path: int("".join(filter(str.isdigit, str(path.relative_to(self._cpu))))))
            step = max(1, -(-len(found) // _MOST_CPUS))
            self._governed = found[::step]
        return self._governed

    def _clocks(self) -> Mapping[str, Cell]:
        """Clocks of processors, as many as 5 ms allow: on kernels before 5.18 each may take ten."""
        policies = self._policies()
        until = self._seconds() + _CLOCKS_S
        cells: list[Cell] = []
        read: list[Path] = []
        for place in range(len(policies)):
            policy = policies[(self._next_cpu + place) % len(policies)]
            cells.append(files.parsed(files.read(policy / "scaling_cur_freq"), _mhz))
            read.append(policy)
            if self._seconds() >= until:
                break
        self._next_cpu = (self._next_cpu + len(read)) % max(1, len(policies))
        clocks = sorted(cell for cell in cells if isinstance(cell, float))
        nothing = next((cell for cell in cells if isinstance(cell, Null)), _NO_FREQUENCIES)
        return {
            "cpu_clock_mhz": sum(clocks) / len(clocks) if clocks else nothing,
            "cpu_clock_mhz_min": clocks[0] if clocks else nothing,
            "cpu_clock_median_mhz": clocks[len(clocks) // 2] if clocks else nothing,
            "cpu_governor": self._governors(read),
        }

    def _governors(self, policies: list[Path]) -> Cell:
        """The governor; several as one text, joined by plus signs."""
        texts = [files.read(policy / "scaling_governor") for policy in policies]
        names = sorted({name for text in texts if re.fullmatch("[a-z_]{1,16}", name := files.plain(text))})
        if names:
            return "+".join(names)
        nulls = (text if isinstance(text, Null) else files.UNPARSABLE for text in texts)
        return next(nulls, _NO_FREQUENCIES)

    def _time(self) -> Mapping[str, Cell]:
        """The kernel's clock; where it may not be asked, systemd may know whether it is synchronised."""
        cells = dict(clock(self._ask_clock)) | {"units_failed": Null(Reason.NOT_READ, "no_systemd")}
        wanted = [name for name in ("units_failed", "clock_synchronised") if isinstance(cells[name], Null)]
        return cells | dict(self._systemd.read(wanted) if self._systemd else {})

    def _os(self) -> str:
        for name in ("etc/os-release", "usr/lib/os-release"):
            text = files.read(self._root / name)
            found = None if isinstance(text, Null) else _PRETTY.search(text)
            if found:
                return files.plain(found[1])
        return ""


_NO_FREQUENCIES = Null(Reason.NOT_SUPPORTED, "no_cpufreq")


def _count(text: str) -> Cell:
    return files.count(text.strip())


def _first_number(text: str) -> Cell:
    return files.number(text.split()[0])


def _mhz(text: str) -> Cell:
    """1755000 kHz -> 1755 MHz."""
    mhz = files.count(text.strip()) / 1000
    return mhz if 1 <= mhz <= 10_000 else Null(Reason.IMPLAUSIBLE, text.strip())


def _chosen(text: str | Null) -> str:
    """`always [madvise] never` -> madvise."""
    found = None if isinstance(text, Null) else re.search(r"\[(\w{1,32})\]", text)
    return found[1] if found else ""


def _cpu_model(text: str | Null) -> str:
    """The name; an Arm processor has none and says by numbers who made it."""
    if isinstance(text, Null):
        return ""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return files.plain(found[1])
    maker = re.search(r"^CPU implementer\s*:\s*(0x[0-9a-f]{1,4})$", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", text, re.MULTILINE)
    if maker is None or part is None:
        return ""
    return _ARM_CORES.get((maker[1], part[1]), f"implementer {maker[1]} part {part[1]}")


_STAT = (
    "cpu_busy_s_total",
    "cpu_iowait_s_total",
    "cpu_steal_s_total",
    "cpus",
    "context_switches_total",
    "processes_blocked",
)


def _stat(text: str | Null) -> dict[str, Cell]:
    if isinstance(text, Null):
        return dict.fromkeys(_STAT, text)
    # not `intr` and `softirq`: a line of thousands of numbers
    lines = [line.split() for line in text.splitlines() if line.startswith(("cpu", "ctxt", "procs_"))]
    first = {words[0]: words[1:] for words in reversed(lines)}
    hertz = os.sysconf("SC_CLK_TCK")

    def ticks(*places: int) -> Cell:
        values = [files.count(value) for value in first["cpu"][:8]]
        return sum(values[place] for place in places) / hertz

    cpus = sum(name.startswith("cpu") and name[3:].isdigit() for name in first)
    return {
        # user, nice, system, irq, softirq, steal: not idle and not waiting; guests are counted in user
        "cpu_busy_s_total": files.parsed(text, lambda _: ticks(0, 1, 2, 5, 6, 7)),
        "cpu_iowait_s_total": files.parsed(text, lambda _: ticks(4)),
        "cpu_steal_s_total": files.parsed(text, lambda _: ticks(7)),
        "cpus": cpus or files.UNPARSABLE,
        "context_switches_total": files.parsed(text, lambda _: files.count(first["ctxt"][0])),
        "processes_blocked": files.parsed(text, lambda _: files.count(first["procs_blocked"][0])),
    }


def _loadavg(text: str | Null) -> dict[str, Cell]:
    return {
        "load1": files.parsed(text, lambda text: files.number(text.split()[0])),
        "load15": files.parsed(text, lambda text: files.number(text.split()[2])),
        "processes": files.parsed(text, lambda text: files.count(text.split()[3].split("/")[1])),
    }


def _meminfo(text: str | Null) -> dict[str, Cell]:
    sizes: dict[str, str] = {}
    if not isinstance(text, Null):
        sizes = dict(re.findall(r"^(\w+):\s+(\d+)(?: kB)?$", text, re.MULTILINE))

    def cell(work_out: Callable[[], int]) -> Cell:
        """A field that this kernel does not have is not supported; one that is no number is a failure."""
        if isinstance(text, Null):
            return text
        try:
            return work_out()
        except KeyError as error:
            return Null(Reason.NOT_SUPPORTED, f"no {error.args[0]}") if sizes else files.UNPARSABLE
        except ValueError:
            return files.UNPARSABLE

    def size(name: str) -> int:
        return files.count(sizes[name]) * 1024

    return {
        "mem_total_bytes": cell(lambda: size("MemTotal")),
        "mem_available_bytes": cell(lambda: size("MemAvailable")),
        "swap_used_bytes": cell(lambda: max(0, size("SwapTotal") - size("SwapFree"))),
        "hugepages": cell(lambda: files.count(sizes["HugePages_Total"])),
        "hugepages_free": cell(lambda: files.count(sizes["HugePages_Free"])),
    }


_VMSTAT = {
    "swap_in_pages_total": "pswpin",
    "swap_out_pages_total": "pswpout",
    "major_faults_total": "pgmajfault",
    "oom_kills_total": "oom_kill",
}


def _vmstat(text: str | Null) -> dict[str, Cell]:
    def cell(name: str) -> Cell:
        if isinstance(text, Null):
            return text
        found = re.search(rf"^{name} (\d{{1,19}})$", text, re.MULTILINE)
        if found:
            return int(found[1])
        # built without swap, or from before the field came
        return Null(Reason.NOT_SUPPORTED, f"no {name}") if "pgfault " in text else files.UNPARSABLE

    return {column: cell(name) for column, name in _VMSTAT.items()}
