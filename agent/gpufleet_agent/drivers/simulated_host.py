"""The machine around simulated cards: the row of probe `host`, and the memory modules of probe `edac`.

Pure: a row is a function of the scenario, the node and the time.
"""

from collections.abc import Sequence

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import cards
from gpufleet_agent.drivers.edac import DAY_S
from gpufleet_agent.drivers.timeline import CardPhase, noise
from gpufleet_agent.scenario import DIMMS, Fault, Scenario

CPUS = 128
MEM_BYTES = 1 << 40

_DIMM_BYTES = 64 << 30
_POLL_S = 64.0
_DRIFT = 5e-4
_UNSYNCHRONISED_S = 16.0
_NVIDIA_TAINT = 1 << 0 | 1 << 12 | 1 << 13
_NO_LABEL = Null(Reason.NOT_SUPPORTED, "no_sensor")


class SimulatedMachine:
    """One host without its cards.

    Args:
        scenario: What it goes through.
        node: Its name there.
    """

    def __init__(self, scenario: Scenario, node: str) -> None:
        self._key = cards.number(scenario.fleet.seed, node)
        self._guest = scenario.model(node).guest
        kinds = ("dimm_errors", "clock_unsynced", "process_stuck")
        self._faults = tuple(fault for fault in scenario.faults(node) if fault.kind in kinds)

    def read(self, phases: Sequence[CardPhase], booted_at: float, t: float) -> Row:
        """The row of probe `host`; `phases` are what holds for its cards."""
        up = max(0.0, t - booted_at)
        bits = noise(self._key, int(t))
        busy = 3.0 + 9.0 * sum(phase.util > 0 for phase in phases)
        worked = 3.0 + 9.0 * len(phases)
        clock = 3650.0 - 4 * busy + bits % 25
        return {
            "cpu_busy_s_total": worked * up,
            "cpu_iowait_s_total": 0.11 * up,
            "cpu_steal_s_total": 0.0,
            "cpus": CPUS,
            "cpu_clock_mhz": clock,
            "cpu_clock_mhz_min": clock - 150 - (bits >> 4) % 100,
            "cpu_clock_median_mhz": clock + 5,
            "cpu_governor": "performance",
            "load1": round(busy + (bits % 100) / 50, 2),
            "load15": round(busy + 1.0, 2),
            "processes": 2400 + bits % 40,
            "processes_blocked": 0,
            "processes_zombie": (bits >> 12) % 3,
            "context_switches_total": int(61_000 * up),
            "mem_total_bytes": MEM_BYTES,
            "mem_available_bytes": MEM_BYTES - int(busy * 9e9) - (bits >> 8) % 100_000_000,
            "swap_used_bytes": 0,
            "swap_in_pages_total": 0,
            "swap_out_pages_total": 0,
            "major_faults_total": 40_000 + int(0.3 * up),
            "oom_kills_total": 0,
            "hugepages": 0,
            "hugepages_free": 0,
            "psi_cpu_some_s_total": 0.004 * up,
            "psi_cpu_full_s_total": 0.0,
            "psi_memory_some_s_total": 0.0,
            "psi_memory_full_s_total": 0.0,
            "psi_io_some_s_total": 0.002 * up,
            "psi_io_full_s_total": 0.001 * up,
            "kernel_taint": _NVIDIA_TAINT if phases else 0,
            "units_failed": 0,
            "uptime_s": up,
            **self._clock(bits, t),
            **self._heat(busy, bits),
            **self._stuck(booted_at, t),
        }

    def dimms(self, booted_at: float, t: float) -> list[Row]:
        """The rows of probe `edac`; none in a virtual machine."""
        if self._guest:
            return []
        rows: list[Row] = []
        for dimm in (*DIMMS, *_CONTROLLERS):
            faults = [
                fault for fault in self._faults if fault.kind == "dimm_errors" and fault.param("dimm") == dimm
            ]
            row: dict[str, Cell] = {"dimm": dimm, "label": _label(dimm)}
            for name, kind in (("corrected", "ce"), ("uncorrectable", "ue")):
                mine = [fault for fault in faults if fault.param("kind") == kind]
                count = sum(_errors(fault, booted_at, t) for fault in mine)
                row[f"{name}_total"] = count
                row[f"{name}_day"] = count - sum(_errors(fault, booted_at, t - DAY_S) for fault in mine)
            rows.append(row)
        return rows

    def dimm_items(self) -> list[Row]:
        """What the modules are."""
        if self._guest:
            return []
        return [
            {"dimm": dimm, "label": _label(dimm), "mem_type": "Registered-DDR5", "size_bytes": _DIMM_BYTES}
            for dimm in DIMMS
        ]

    def _active(self, kind: str, t: float) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind == kind and fault.active(t)]

    def _clock(self, bits: int, t: float) -> Row:
        faults = self._active("clock_unsynced", t)
        error = (t + self._key % 64) % _POLL_S * _DRIFT
        return {
            "clock_synchronised": not faults,
            "clock_offset_s": sum(fault.number("offset_s") for fault in faults)
            or (bits % 2001 - 1000) * 1e-8,
            "clock_error_estimate_s": _UNSYNCHRONISED_S if faults else 2e-5,
            "clock_error_max_s": _UNSYNCHRONISED_S if faults else 0.002 + error,
        }

    def _heat(self, busy: float, bits: int) -> Row:
        if self._guest:
            return dict.fromkeys(_HEAT, _NO_LABEL)
        processor = 48.0 + busy / 5 + bits % 3
        return {
            "zone_temperature_c": processor,
            "hottest_zone": "x86_pkg_temp",
            "zones_unreadable": 0,
            "cpu_temperature_c": processor,
            "inlet_temperature_c": 23.0 + self._key % 3,
            "fans": 8,
            "fans_failed": 0,
            "fan_rpm_min": 7200 + int(20 * busy) + bits % 60,
        }

    def _stuck(self, booted_at: float, t: float) -> Row:
        """A reboot ends what nothing else can."""
        faults = [fault for fault in self._active("process_stuck", t) if fault.at >= booted_at]
        ages = [fault.number("seconds") + t - fault.at for fault in faults]
        killed = [age for fault, age in zip(faults, ages, strict=True) if fault.param("killed") == "yes"]
        return {
            "processes_stuck": len(ages),
            "stuck_s": max(ages, default=0.0),
            "stuck_comm": "python3" if ages else "",
            "processes_unkillable": len(killed),
            "unkillable_s": max(killed, default=0.0),
        }


_CONTROLLERS = tuple(dict.fromkeys(dimm.partition("/")[0] for dimm in DIMMS))
_HEAT = (
    "zone_temperature_c", "hottest_zone", "zones_unreadable", "cpu_temperature_c", "inlet_temperature_c",
    "fans", "fans_failed", "fan_rpm_min",
)  # fmt: skip


def _label(dimm: str) -> str:
    """`mc1/dimm3` -> P2-DIMMD1; a controller has none."""
    controller, _, module = dimm.partition("/")
    if not module:
        return ""
    return f"P{int(controller.removeprefix('mc')) + 1}-DIMM{'ABCDEFGH'[int(module.removeprefix('dimm'))]}1"


def _errors(fault: Fault, booted_at: float, t: float) -> int:
    """Errors of one fault counted by `t` in this boot: the first as it begins, then by its rate."""
    start, end = max(fault.at, booted_at), min(t, fault.end)
    return 1 + int((end - start) * fault.number("per_hour") / 3600) if end >= start else 0
