"""The machine around the cards, where a file is missing, refused or odd: each cell on its own."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.host import Machine
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import edac as edac_probe
from gpufleet_agent.probes import host as host_probe

Write = Callable[[str, str], Path]
Tree = Callable[[str], Path]
Refuse = Callable[[Path, int], None]

REASONS = {
    errno.ENOENT: Reason.NOT_SUPPORTED,
    errno.ENODEV: Reason.NOT_SUPPORTED,
    errno.EOPNOTSUPP: Reason.NOT_SUPPORTED,
    errno.EPERM: Reason.NO_PERMISSION,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EINVAL: Reason.FAILED,
    errno.ENODATA: Reason.FAILED,
    errno.ENXIO: Reason.FAILED,
    errno.EIO: Reason.FAILED,
    errno.EAGAIN: Reason.FAILED,
    errno.ESTALE: Reason.FAILED,
}


def still() -> float:
    return 0.0


FILES = {
    "proc/stat": ("cpus", "cpu_busy_s_total", "context_switches_total", "processes_blocked"),
    "proc/loadavg": ("load1", "load15", "processes"),
    "proc/meminfo": ("mem_total_bytes", "mem_available_bytes", "swap_used_bytes", "hugepages"),
    "proc/vmstat": ("swap_in_pages_total", "major_faults_total", "oom_kills_total"),
    "proc/pressure/cpu": ("psi_cpu_some_s_total", "psi_cpu_full_s_total"),
    "proc/pressure/memory": ("psi_memory_some_s_total", "psi_memory_full_s_total"),
    "proc/pressure/io": ("psi_io_some_s_total", "psi_io_full_s_total"),
    "proc/uptime": ("uptime_s",),
    "proc/sys/kernel/tainted": ("kernel_taint",),
    "sys/devices/system/cpu/cpufreq": (
        "cpu_clock_mhz", "cpu_clock_mhz_min", "cpu_clock_median_mhz", "cpu_governor"
    ),
    "sys/class/thermal": ("zone_temperature_c", "hottest_zone"),
    "sys/class/hwmon": ("cpu_temperature_c",),
}  # fmt: skip


@pytest.mark.parametrize("number", REASONS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("name", FILES)
def test_T06_one_file_that_fails_costs_its_own_columns_only(
    tree: Tree, refuse: Refuse, name: str, number: int
) -> None:
    root = tree("hgx-h100")
    machine = Machine(root, still)
    before = machine.read()
    refuse(root / name, number)
    after = machine.read()
    null = Null(REASONS[number], errno.errorcode[number])
    assert {column: after[column] for column in FILES[name]} == dict.fromkeys(FILES[name], null)
    lost = {column for column in after if after[column] != before[column]}
    assert lost - {"cpu_steal_s_total", "cpu_iowait_s_total", "swap_out_pages_total", "hugepages_free",
                   "zones_unreadable"} == set(FILES[name])  # fmt: skip


def test_T06_a_container_with_sensors_that_fail_in_many_ways(
    tree: Tree, write: Write, tmp_path: Path, refuse: Refuse
) -> None:
    write("sys/class/thermal/thermal_zone0/temp", "61000\n")
    write("sys/class/thermal/thermal_zone0/type", "x86_pkg_temp\n")
    for zone, number in ((1, errno.EINVAL), (2, errno.ENODATA)):
        refuse(write(f"sys/class/thermal/thermal_zone{zone}/temp", ""), number)
    write("sys/class/hwmon/hwmon0/name", "coretemp\n")
    refuse(write("sys/class/hwmon/hwmon0/temp1_input", ""), errno.ENXIO)
    refuse(write("proc/1/stat", ""), errno.EPERM)
    write("proc/uptime", "7.5 1.0\n")
    host = SysfsHost(tmp_path)
    row = host.read("host")
    hidden = Null(Reason.NO_PERMISSION, "EPERM")
    assert row["zone_temperature_c"] == 61.0
    assert row["hottest_zone"] == "x86_pkg_temp"
    assert row["zones_unreadable"] == 2
    assert row["cpu_temperature_c"] == Null(Reason.FAILED, "ENXIO")
    assert (row["processes_stuck"], row["processes_zombie"], row["stuck_comm"]) == (hidden, hidden, hidden)
    assert row["uptime_s"] == 7.5
    assert row["mem_total_bytes"] == Null(Reason.NOT_SUPPORTED, "ENOENT")
    assert run_probe("host", host_probe, host, pytest.fail).error == ""
    edac = run_probe("edac", edac_probe, host, pytest.fail)
    assert (edac.error, edac.rows) == ("", [])


def test_T06_all_zones_fail_and_the_first_says_why(write: Write, tmp_path: Path, refuse: Refuse) -> None:
    for zone, number in ((0, errno.ENODATA), (1, errno.EINVAL)):
        refuse(write(f"sys/class/thermal/thermal_zone{zone}/temp", ""), number)
    row = Machine(tmp_path).read()
    assert row["zone_temperature_c"] == row["hottest_zone"] == Null(Reason.FAILED, "ENODATA")
    assert row["zones_unreadable"] == 2


def test_an_empty_root_is_a_row_without_values_that_says_so(tmp_path: Path) -> None:
    row = Machine(tmp_path).read()
    assert set(row) == {metric.name for metric in host_probe.METRICS}
    assert all(isinstance(cell, Null) for cell in row.values()), row
    assert Machine(tmp_path).attributes().keys() == {"architecture"}


@pytest.mark.parametrize(
    ("text", "some", "full"),
    [
        (
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n",
            1.5,
            Null(Reason.NOT_SUPPORTED, "no full"),
        ),
        ("some avg10=0 avg60=0 avg300=0 total=1\nfull avg10=0 avg60=0 avg300=0 total=0\n", 1e-6, 0.0),
        ("", Null(Reason.FAILED, "unparsable"), Null(Reason.FAILED, "unparsable")),
        ("some avg10=0.00\n", Null(Reason.FAILED, "unparsable"), Null(Reason.FAILED, "unparsable")),
        (
            "some total=-5\nfull total=x\n",
            Null(Reason.FAILED, "unparsable"),
            Null(Reason.FAILED, "unparsable"),
        ),
    ],
)
def test_pressure(write: Write, tmp_path: Path, text: str, some: Cell, full: Cell) -> None:
    write("proc/pressure/cpu", text)
    row = Machine(tmp_path).read()
    assert (row["psi_cpu_some_s_total"], row["psi_cpu_full_s_total"]) == (some, full)


def test_old_kernels_have_fewer_fields_and_that_is_no_failure(write: Write, tmp_path: Path) -> None:
    write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 10 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    write("proc/vmstat", "pgfault 12\npgmajfault 3\n")
    row = Machine(tmp_path).read()
    assert row["mem_total_bytes"] == 1_024_000
    assert row["mem_available_bytes"] == Null(Reason.NOT_SUPPORTED, "no MemAvailable")
    assert row["hugepages"] == Null(Reason.NOT_SUPPORTED, "no HugePages_Total")
    assert row["swap_used_bytes"] == 0
    assert row["major_faults_total"] == 3
    assert row["swap_in_pages_total"] == Null(Reason.NOT_SUPPORTED, "no pswpin")


def test_512_processors_are_sampled_and_those_switched_off_are_passed_over(
    write: Write, tmp_path: Path
) -> None:
    write("proc/stat", "cpu 1 1 1 1 1 1 1 1\n" + "".join(f"cpu{n} 0 0 0 0 0 0 0 0\n" for n in range(512)))
    for number in range(512):
        home = f"sys/devices/system/cpu/cpufreq/policy{number}"
        # one that is switched off keeps its folder
        write(
            f"{home}/scaling_cur_freq",
            ("0\n" if number else "<unknown>\n") if number % 64 == 0 else f"{2_000_000 + number * 1000}\n",
        )
        write(f"{home}/scaling_governor", "performance\n")
    write(
        "sys/devices/system/cpu/cpufreq/policy/scaling_cur_freq", "1000\n"
    )  # no number: none of the kernel's
    machine = Machine(tmp_path, still)
    row = machine.read()
    assert row["cpus"] == 512
    clocks = [2000.0 + number for number in range(0, 512, 16) if number % 64]
    assert row["cpu_clock_mhz_min"] == min(clocks) == 2016.0
    assert row["cpu_clock_mhz"] == pytest.approx(sum(clocks) / len(clocks))
    assert row["cpu_governor"] == "performance"


def test_slow_frequencies_are_read_a_few_at_a_time_in_turn(tree: Tree) -> None:
    """Kernels before 5.18 may sleep 10 ms for each."""
    now = [0.0]

    def ticking() -> float:
        now[0] += 0.003
        return now[0]

    machine = Machine(tree("hgx-h100"), ticking)
    seen = {machine.read()["cpu_clock_mhz_min"] for _ in range(20)}
    assert {3100.0, 3800.0} <= seen, "every eighth processor is slower: only one or two are read in one go"
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("model name\t: AMD EPYC 9654 96-Core Processor\n", "AMD EPYC 9654 96-Core Processor"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Arm Neoverse V2"),
        ("CPU implementer\t: 0x99\nCPU part\t: 0x123\n", "implementer 0x99 part 0x123"),
        ("CPU implementer\t: 0x41\n", None),
        ("", None),
    ],
)
def test_processors_with_and_without_a_name(
    write: Write, tmp_path: Path, text: str, model: str | None
) -> None:
    write("proc/cpuinfo", text)
    assert Machine(tmp_path).attributes().get("cpu_model") == model


@pytest.mark.parametrize(("text", "bits"), [("0\n", 0), ("12289\n", 12289), ("4608\n", 4608)])
def test_taint_is_bits_and_those_of_nvidia_are_no_fault_by_themselves(
    write: Write, tmp_path: Path, text: str, bits: int
) -> None:
    write("proc/sys/kernel/tainted", text)
    assert Machine(tmp_path).read()["kernel_taint"] == bits
