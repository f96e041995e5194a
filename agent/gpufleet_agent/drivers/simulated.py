"""A host that does not exist: plays one host of a scenario through the same interface as real drivers.

What it answers is a function of the scenario and the time alone, so that the sampler, the bench child and a
process started again see one and the same machine.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from gpufleet.event import Event
from gpufleet.metric import Cell, Null, Reason, Row, Value
from gpufleet_agent import labels
from gpufleet_agent.drivers import (
    BenchResult,
    Check,
    DriverError,
    DriverGone,
    Gpu,
    Hung,
    Item,
    Lost,
    NoProgress,
    Process,
    Progress,
    Ring,
    cards,
    go_on,
    nvidia_cards,
    simulated_benches,
    simulated_storage,
)
from gpufleet_agent.drivers.simulated_health import health
from gpufleet_agent.drivers.simulated_host import CPUS, MEM_BYTES, SimulatedMachine
from gpufleet_agent.drivers.simulated_jobs import SimulatedJobs
from gpufleet_agent.drivers.simulated_loader import FIRST_PID, SimulatedLoaders
from gpufleet_agent.drivers.simulated_log import SimulatedLog, script
from gpufleet_agent.drivers.simulated_nvlink import links
from gpufleet_agent.drivers.simulated_pcie import way
from gpufleet_agent.drivers.simulated_ports import SimulatedPorts
from gpufleet_agent.drivers.timeline import CardPhase, NodePhase, card_timeline, node_timeline, noise
from gpufleet_agent.scenario import Scenario

DRIVER = "570.133.20"
CUDA = "12.8"

_RING = ("util_pct", "sm_clock_mhz", "power_w")
_ABSENT = Null(Reason.NOT_SUPPORTED, "NVML 3")
_GONE_WORDS = {
    "driver_not_loaded": "NVIDIA driver not loaded",
    "no_library": f"NVIDIA {DRIVER} without its library",
    "driver_mismatch": f"NVIDIA {DRIVER}, library of another version",
    "no_permission": f"NVIDIA {DRIVER}, no permission",
    "driver_failed": f"NVIDIA {DRIVER}, fails",
}
_SPLIT = Null(Reason.NOT_SUPPORTED, "MIG")
_UNIFIED = Null(Reason.NOT_SUPPORTED, "unified_memory")
_PCIE = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
_NOT_UNIFIED = ("mem_used_bytes", "mem_total_bytes", *_PCIE)
_NOT_IN_GUESTS = (
    "fan_pct", "pcie_tx_bytes_total", "pcie_rx_bytes_total",
    "power_limit_w", "temperature_c", "temperature_margin_c", "mem_temperature_c", "energy_j_total", *_PCIE,
    "power_cap_s_total", "sync_boost_s_total", "sw_thermal_s_total", "hw_thermal_s_total", "hw_brake_s_total",
)  # fmt: skip
_GPM = ("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "mem_active_pct")
_COUNTS_PCIE = ("Ampere", "Ada", "Hopper", "Blackwell")
_USED = {"train": 0.86, "inference": 0.71, "idle": 0.006}


class SimulatedGpu:
    """One card of a simulated host."""

    def __init__(self, host: "SimulatedHost", board: cards.Board, index: int) -> None:
        self.ring = Ring()
        self.index = index
        self._host = host
        self._board = board

    @property
    def pci(self) -> str:
        """`dddd:bb:dd.f`, lower case."""
        return self._board.pci

    @property
    def uuid(self) -> str:
        """`GPU-...`."""
        return self._board.uuid

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes.

        Raises:
            Lost, Hung: This card does not answer.
        """
        phase = self.answer("identity")
        model = self._host.model
        found = {
            "uuid": self.uuid,
            "serial": self._board.serial,
            "pci": self.pci,
            "model": model.name,
            "index": str(self.index),
            "minor": str(self.index),
            "slot": str(self._board.slot),
            "part_number": model.part_number,
            "vbios": model.vbios,
            "architecture": model.arch,
            "driver": DRIVER,
            "cuda": CUDA,
            "sm_clock_max_mhz": str(model.sm_clock_max_mhz),
            "mem_clock_max_mhz": str(model.mem_clock_max_mhz),
            "power_limit_default_w": f"{model.power_limit_w:g}",
            "power_limit_requested_w": f"{phase.limit_w:g}",
            "pcie_gen_max": str(model.pcie_gen),
            "pcie_width_max": "16",
            "mem_total_bytes": str(model.mem_bytes) if model.own_memory else "",
            "device_id": model.device_id,
            "virtualization": "vgpu" if model.guest else "none",
        }
        known = nvidia_cards.find(model.name, model.device_id)
        if known is not None:
            found["card_kind"] = "vgpu" if model.guest else known.kind
            found["form_factor"] = known.form_factor
        return {name: text for name, text in found.items() if text}

    def read(self, group: str) -> Row:
        """The metrics of "ring", "gpu" or "gpu_health"; nothing for a group that is not simulated.

        Raises:
            Lost, Hung: This card does not answer.
        """
        phase = self.answer(group)
        t = self._host.now()
        if group == "ring":
            return self._ring(phase, t)
        if group == "gpu_health":
            return health(self._host.model, phase, t, DRIVER, self._host.library_version())
        if group == "gate":
            return {
                "pids": str(FIRST_PID + self._board.slot) if phase.util else "",
                "compute_mode": "default",
            }
        if group != "gpu":
            return {}
        row = self._gpu(phase, t)
        for name, cell in self._ring(phase, t).items():
            if not self.ring.values.get(name):
                row |= {f"{name}{end}": cell for end in ("", "_min", "_p10")}
        return row

    def links(self) -> Sequence[Row]:
        """One row per NVLink.

        Raises:
            Lost, Hung: This card does not answer.
        """
        return self._host.links(self.answer("links"))

    def answer(self, call: str) -> CardPhase:
        """What holds for the card now, if it answers.

        Raises:
            Lost, Hung: It does not.
        """
        host = self._host
        phase = host.card(self._board.slot, host.now())
        host.progress.enter(self.pci, phase.hang or call)
        try:
            while phase.hang:
                if host.hang == "raise":
                    raise Hung("hung", f"{phase.hang} of {self.pci} did not return")
                time.sleep(0.1)
                phase = host.card(self._board.slot, host.now())
        finally:
            host.progress.leave()
        if phase.lost or not phase.listed or phase.board.uuid != self.uuid:
            raise Lost(phase.lost_code or "gpu_is_lost", f"{self.pci} does not answer")
        return phase

    def _ring(self, phase: CardPhase, t: float) -> dict[str, Cell]:
        bits = noise(self._board.key, int(t))
        cut = phase.is_cut(t)
        clock = phase.clock_cut if cut else phase.clock
        power = phase.power_cut if cut else phase.power
        if not phase.steady:
            clock += 15 * ((bits >> 8) % 3 - 1)
        return {
            "util_pct": _SPLIT if phase.mig else self._util(phase, t, bits),
            "sm_clock_mhz": float(round(min(clock, self._host.model.sm_clock_max_mhz))),
            "power_w": _ABSENT
            if self._host.model.guest
            else round(min(power * (1 + ((bits >> 16) % 1001 - 500) * 2e-5), phase.limit_w), 3),
        }

    def _util(self, phase: CardPhase, t: float, bits: int) -> float:
        if not phase.util:
            return 0.0
        wave = 0.0
        if phase.kind == "inference":
            wave = 0.35 * phase.util * math.sin(t / 47 + self._board.key % 628 / 100)
        return min(100.0, max(0.0, float(round(phase.util + wave + bits % 7 - 3))))

    def _gpu(self, phase: CardPhase, t: float) -> dict[str, Cell]:
        model = self._host.model
        totals = phase.totals(t)
        temperature = float(round(phase.temperature_c(t)))
        idle = not phase.util
        row: dict[str, Cell] = {
            "power_limit_w": phase.limit_w,
            "mem_util_pct": _SPLIT if phase.mig else float(round(0.62 * phase.util)),
            "mem_clock_mhz": float(model.mem_clock_idle_mhz if idle else model.mem_clock_max_mhz),
            "mem_used_bytes": int(model.mem_bytes * _USED[phase.kind]),
            "mem_total_bytes": model.mem_bytes,
            "temperature_c": temperature,
            "temperature_margin_c": model.slowdown_c - temperature if model.has_margin else _ABSENT,
            "mem_temperature_c": temperature + 7 if model.hbm else _ABSENT,
            "pstate": model.idle_pstate if idle else 0,
            "clock_reasons": phase.reasons_cut if phase.is_cut(t) else phase.reasons,
            "power_cap_s_total": totals.power_cap_s,
            "sync_boost_s_total": 0.0,
            "sw_thermal_s_total": totals.sw_thermal_s,
            "hw_thermal_s_total": totals.hw_thermal_s,
            "hw_brake_s_total": totals.hw_brake_s,
            "energy_j_total": totals.energy_j,
            "pcie_gen": phase.gen_now(model),
            "pcie_gen_max": model.pcie_gen,
            "pcie_width": phase.width,
            "pcie_width_max": 16,
        }
        row |= self._newer(phase, totals.energy_j)
        if model.guest:
            row |= dict.fromkeys(_NOT_IN_GUESTS, _ABSENT)
        if not model.own_memory:
            row |= dict.fromkeys(_NOT_UNIFIED, _UNIFIED)
        return row

    def _newer(self, phase: CardPhase, energy_j: float) -> dict[str, Cell]:
        """What newer cards alone tell, and cards with a fan."""
        model = self._host.model
        new = model.arch in ("Hopper", "Blackwell") and model.own_memory and not model.guest
        shares = (0.88, 0.41, 0.46, 0.53) if phase.kind == "train" else (0.6, 0.22, 0.12, 0.4)
        row: dict[str, Cell] = {
            name: _SPLIT if phase.mig else round(share * phase.util, 3) if new else _ABSENT
            for name, share in zip(_GPM, shares, strict=True)
        }
        counts = model.arch in _COUNTS_PCIE and model.own_memory
        # work moves bytes about as it uses energy
        row["pcie_tx_bytes_total"] = int(energy_j * 1.1e6) if counts else _ABSENT
        row["pcie_rx_bytes_total"] = int(energy_j * 2.7e6) if counts else _ABSENT
        fan = model.pci_class == "0300" and model.own_memory
        row["fan_pct"] = float(30 + round(0.45 * phase.util)) if fan else _ABSENT
        return row


class SimulatedHost:
    """One host of a scenario.

    Args:
        scenario: What it goes through.
        node: Its name there.
        started_us: Wall clock at the scenario's start, microseconds since the epoch.
        clock: Seconds since the scenario's start.
        progress: Where it writes which call it is in.
        hang: "raise" = a hung card raises `Hung` at once; "block" = the call really does not return.
    """

    def __init__(
        self,
        scenario: Scenario,
        node: str,
        started_us: int,
        clock: Callable[[], float],
        progress: Progress | None = None,
        hang: Literal["raise", "block"] = "raise",
    ) -> None:
        self.now = clock
        self.progress: Progress = progress or NoProgress()
        self.hang = hang
        self.model = scenario.model(node)
        self._name = node
        self._seed = scenario.fleet.seed
        self._started_us = started_us
        self._scenario = scenario
        self._node = node_timeline(scenario, node)
        slots = range(scenario.gpu_count(node))
        self._cards = [card_timeline(scenario, node, slot, self._node) for slot in slots]
        lines = script(scenario, node, self._node)
        self._log = SimulatedLog(lines, self._node, clock, lambda: self.boot_id, self._uuid_at)
        self._listed: tuple[int, tuple[cards.Board, ...]] = (0, ())
        self._gpus: tuple[SimulatedGpu, ...] = ()
        ports = SimulatedPorts(scenario, node, self._node, self._cards)
        self._machine = SimulatedMachine(scenario, node)
        storage = simulated_storage
        loaders = SimulatedLoaders(scenario, node, self._node, self._cards)
        self._jobs = SimulatedJobs(scenario, node, loaders.pid_start)
        self._groups: Mapping[str, Callable[[], Iterable[Row]]] = {
            "port": lambda: ports.rows(self.now()),
            "edac": lambda: self._machine.dimms(self._phase().booted_at, clock()),
            "dimm_item": self._machine.dimm_items,
            "disk": lambda: storage.disks(scenario, node, self._phase().booted_at, clock()),
            "disk_item": lambda: storage.disk_items(scenario, node),
            "mount": lambda: storage.mounts(scenario, node, self._phase().booted_at, clock()),
            "mount_item": storage.mount_items,
            "loader": lambda: loaders.rows(clock()),
        }

    @property
    def epoch(self) -> int:
        """Counts the driver's initialisations."""
        return self._phase().epoch

    @property
    def boot_id(self) -> str:
        """Another one after each reboot."""
        return cards.uuid(self._seed, self._name, "boot", self._phase().boot)

    def card(self, slot: int, t: float) -> CardPhase:
        """What holds at `t` for the card in a slot."""
        return self._cards[slot].at(t)

    def running(self) -> bool:
        """Whether this host's agent runs now."""
        return self._scenario.running(self._name, self.now())

    def clock_offset_s(self) -> float:
        """By how much this host's wall clock is off now."""
        return self._scenario.clock_offset_s(self._name, self.now())

    def node(self) -> Item:
        """The host itself."""
        found = {
            "hostname": self._name,
            "machine_id": f"{cards.number(self._seed, self._name, 'machine', 1):016x}"
            f"{cards.number(self._seed, self._name, 'machine', 2):016x}",
            "boot_id": self.boot_id,
            "kernel": "6.8.0-60-generic",
            "architecture": "x86_64",
            "os": "Ubuntu 24.04 LTS (simulated)",
            "vendor": "gpufleet",
            "product": "simulated host",
            "cpu_model": "AMD EPYC 9554 64-Core Processor",
            "cpus": str(CPUS),
            "mem_total_bytes": str(MEM_BYTES),
            "cpu_governor": "performance",
            "clocksource": "tsc",
            "driver": self._driver(),
        }
        if self._cards and not self._phase().gone:
            found |= {"driver_version": DRIVER, "cuda": CUDA, "library_version": self.library_version()}
        return Item("node:", found | labels.attributes(self._scenario.labels(self._name)))

    def library_version(self) -> str:
        """Of the driver's library on disk."""
        return self._phase().library or DRIVER

    def _driver(self) -> str:
        if not self._cards:
            return "no NVIDIA driver"
        library = self._phase().library
        if library and not self._phase().gone:
            return f"simulated {DRIVER}, library {library}: reload the driver or reboot"
        return _GONE_WORDS.get(self._phase().gone, f"simulated {DRIVER}")

    def read(self, group: str) -> Row:
        """The metrics of "host"; nothing for a group that is not simulated."""
        if group != "host":
            return {}
        t = self.now()
        return self._machine.read([card.at(t) for card in self._cards], self._phase().booted_at, t)

    def rows(self, group: str) -> Iterable[Row]:
        """Things of the host of one group, one row each; none of a group that is not simulated."""
        return self._groups[group]() if group in self._groups else ()

    def gpus(self) -> Sequence[Gpu]:
        """Every card the driver lists, in its order; lost ones too.

        Raises:
            DriverGone: The scenario took the driver away.
        """
        return self._list()

    def _list(self) -> tuple[SimulatedGpu, ...]:
        t = self.now()
        host = self._node.at(t)
        if host.gone and self._cards:
            raise DriverGone(host.gone)
        phases = [card.at(t) for card in self._cards]
        listed = (host.epoch, tuple(phase.board for phase in phases if phase.listed))
        if listed != self._listed:
            self._gpus = tuple(SimulatedGpu(self, board, index) for index, board in enumerate(listed[1]))
            self._listed = listed
        return self._gpus

    def links(self, phase: CardPhase) -> Sequence[Row]:
        """The NVLinks of a card, as they are now."""
        faults = self._scenario.faults(self._name, phase.board.slot)
        loaded = [one for one in self._node.phases if one.epoch == phase.epoch]
        loaded_at = loaded[0].start if phase.epoch > 1 else loaded[0].booted_at
        beside = phase.board.slot ^ 1
        peer = self._cards[beside].at(self.now()).board.pci if beside < len(self._cards) else ""
        return links(self.model, phase, faults, loaded_at, peer, self.now())

    def pci_devices(self) -> Iterable[Row]:
        """The cards as the bus sees them."""
        t = self.now()
        phases = [card.at(t) for card in self._cards]
        return [self._pci(phase) for phase in phases if phase.bus != "absent"]

    def _pci(self, phase: CardPhase) -> Row:
        return {
            "pci": phase.board.pci,
            "device_kind": "gpu",
            "vendor_id": "10de",
            "device_id": self.model.device_id,
            "present": phase.bus == "ok",
            "bound_driver": "nvidia" if phase.bound else "",
            "gpu_uuid": phase.board.uuid if phase.bound else Null(Reason.NOT_SUPPORTED, "ENOENT"),
            "excluded": phase.excluded if phase.bound else Null(Reason.NOT_SUPPORTED, "ENOENT"),
            "numa_node": phase.board.slot % 8 // 4,
            "runtime_status": "active",
            **way(self.model, self._cards[phase.board.slot], self.now()),
        }

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the lines that the faults left in the kernel log."""
        return self._log.read(cursor)

    def _uuid_at(self, pci: str) -> str:
        t = self.now()
        boards = (card.at(t).board for card in self._cards)
        return next((board.uuid for board in boards if board.pci == pci), "")

    def processes(self) -> Sequence[Process]:
        """One process per card that works."""
        t = self.now()
        return [
            Process(
                FIRST_PID + phase.board.slot, phase.board.pci, int(self.model.mem_bytes * _USED[phase.kind])
            )
            for phase in (card.at(t) for card in self._cards)
            if phase.util and phase.listed and not phase.lost
        ]

    def process(self, pid: int) -> Row:
        """Who it belongs to, as the scenario's loads have it."""
        return self._jobs.process(pid, self.now(), self._phase(), 0.002, 0.004)

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """A bench of the card that `pci` or `gpu_uuid` names, with the one at `peer` where it is on a pair.

        `unsupported` for one that is not simulated.
        """
        if name not in simulated_benches.UNITS:
            return BenchResult("unsupported", None, "", f"{name} is not simulated")
        unit = simulated_benches.UNITS[name]
        wanted = params.get("pci") or params.get("gpu_uuid")
        check()
        try:
            gpu = next((gpu for gpu in self._list() if wanted in (gpu.pci, gpu.uuid)), None)
            if gpu is None:
                return BenchResult("failed", None, unit, f"no card {wanted}: give pci or gpu_uuid")
            phase = gpu.answer(name)
            if name == "p2p":
                return self._pair(gpu, phase, params)
        except Hung as hung:
            return BenchResult("hung", None, unit, str(hung))
        except DriverError as error:
            return BenchResult("failed", None, unit, f"{error.code}: {error}")
        return simulated_benches.run(name, self.model, phase, self.now(), int(params.get("repeats", 5)))

    def _pair(self, gpu: SimulatedGpu, phase: CardPhase, params: Mapping[str, Value]) -> BenchResult:
        peer = next((one for one in self._list() if one.pci == params.get("peer")), None)
        if peer is None or self.model.guest:
            why = "a guest's cards do not reach each other" if peer else f"no card {params.get('peer')}"
            return BenchResult("unsupported", None, "GB/s", why)
        both = (phase, peer.answer("p2p"))
        links = (gpu.links(), peer.links())
        return simulated_benches.pair(self.model, both, links, self.now(), int(params.get("repeats", 5)))

    def _phase(self) -> NodePhase:
        return self._node.at(self.now())
