"""Cards through NVIDIA's library. Only this file imports pynvml.

An error of the library becomes one of four things: a Null (the sensor is not there, or did not answer),
`Lost` (the card is not there any more), `DriverGone` (no card can be asked), or nothing (a host without
cards). The library may hang in any call, so every call is announced to `Progress` first.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpufleet.event import Event
from gpufleet.metric import Cell, Null, Reason, Row, Value
from gpufleet_agent.drivers import (
    BenchResult,
    Check,
    DriverError,
    DriverGone,
    Gpu,
    Item,
    NoProgress,
    Process,
    Progress,
    Ring,
    go_on,
    link_between,
    nvidia_cards,
    nvml_health,
    nvml_links,
)
from gpufleet_agent.drivers.nvml_card import Card, Library
from gpufleet_agent.drivers.nvml_errors import MISMATCH, UNINITIALIZED, UNKNOWN, FailedError, known
from gpufleet_agent.drivers.nvml_gpm import COLUMNS as _ACTIVITY
from gpufleet_agent.drivers.nvml_gpm import Activity
from gpufleet_agent.drivers.nvml_values import (
    Field,
    Platform,
    address,
    number,
    part,
    scaled,
    seconds,
    serial,
    shown,
    signed,
    uuid,
    watts,
)
from gpufleet_agent.drivers.sysfs import Sysfs, SysfsHost, driver_words

log = logging.getLogger(__name__)

_SM, _MEM, _GRAPHICS = 1, 2, 0
_MEMORY_V2 = 0x02000028
_FIELDS = (
    Field(82, "mem_temperature_c"),
    Field(74, "power_cap_s_total", seconds),
    Field(75, "thermal_s", seconds),
    Field(76, "sync_boost_s_total", seconds),
    Field(269, "sw_thermal_s_total", seconds),
    Field(270, "hw_thermal_s_total", seconds),
    Field(271, "hw_brake_s_total", seconds),
    Field(197, "pcie_tx_bytes_total"),
    Field(198, "pcie_rx_bytes_total"),
)
_POWER = (Field(185, "average", watts), Field(186, "instant", watts))
_VIOLATIONS = {"power_cap_s_total": 0, "sw_thermal_s_total": 1, "sync_boost_s_total": 2}
"""What drivers without the fields count under the name of policies."""

_ARCHITECTURES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada",
                  9: "Hopper", 10: "Blackwell", 13: "Rubin"}  # fmt: skip
_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga"}
_RING = ("util_pct", "sm_clock_mhz", "power_w")
_UTIL = ("util_pct", "mem_util_pct")
_PCIE = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
_MOST_CARDS = 1024
_LOOK_S = 5.0
_DAY_S = 86_400.0
_MOST_BACKOFF_S = 60.0
_FIRST_BACKOFF_S = 1.0
_FALL_COUNTS_S = 600.0
_INIT = "nvmlInit"
_FIRST_WAIT_S = 1.0
"""So long a sweep waits for an initialisation; one that takes longer goes on beside the sweeps."""

_UNKNOWN_PSTATE = 32
_LARGEST_PID = 1 << 22
_ASLEEP = Null(Reason.NOT_READ, "suspended")
_SPLIT = Null(Reason.NOT_SUPPORTED, "MIG")
_UNIFIED = Null(Reason.NOT_SUPPORTED, "unified_memory")


class NvmlGpu:
    """One card, until the library is initialised anew."""

    def __init__(self, host: "NvmlHost", index: int, pci: str, uuid: str) -> None:
        self.ring = Ring()
        self.index = index
        self.pci = pci
        self.uuid = uuid
        self.card = Card(host, index, pci)
        self.activity = Activity(self.card)
        self._host = host
        self._links = nvml_links.Links(self.card, host.clock)
        self._split: bool | None = None
        self._kind: nvidia_cards.CardModel | None = None
        self._asked_kind = False
        self._architecture = 0
        self._inforom = ""
        self._identity: dict[str, str] = {}
        self._inforom_at = -_DAY_S

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes; what the card or the driver does not know is left out.

        Raises:
            Lost, Hung: This card does not answer.
            DriverError: It sleeps, and nothing is known of it yet.
        """
        if self._host.sysfs.runtime_status(self.pci) == "suspended":
            if not self._identity:
                raise DriverError("suspended", f"{self.pci} sleeps")
            return self._identity
        self.card.refused()
        ask = self.card.ask
        found: dict[str, str] = {"uuid": self.uuid, "pci": self.pci, "index": str(self.index)}
        for name, call, args in _TEXTS:
            found[name] = shown(ask(call, *args))
        found["serial"] = serial(ask("nvmlDeviceGetSerial"))
        for name, call, args in _NUMBERS:
            found[name] = shown(number(ask(call, *args)))
        for name, call in _LIMITS:
            limit = scaled(ask(call), 1e-3)
            found[name] = "" if isinstance(limit, Null) else f"{limit:g}"
        found["mem_total_bytes"] = shown(self._memory()["mem_total_bytes"])
        generation = self._generation()
        found["architecture"] = _ARCHITECTURES.get(generation, f"newer ({generation})" if generation else "")
        mode = number(ask("nvmlDeviceGetVirtualizationMode"))
        if not isinstance(mode, Null):
            found["virtualization"] = _VIRTUALIZATION.get(int(mode), f"mode {mode}")
        pdi = ask("nvmlDeviceGetPdi")
        found["pdi"] = f"{pdi:016x}" if isinstance(pdi, int) and pdi else ""
        found["inforom_state"] = self._checked_inforom()
        found |= self._place() | self._catalogued(found) | self._host.versions()
        self._identity = {name: text for name, text in found.items() if text}
        return self._identity

    def read(self, group: str) -> Row:
        """The metrics of "ring", "gpu" or "gpu_health"; nothing for a group that is not read here.

        Group "gate" is for benches: `pids` of whoever holds the card, and `compute_mode`.

        Raises:
            Lost, Hung: This card does not answer.
            DriverGone: No card answers any more.
        """
        names = _GROUPS.get(group)
        if names is None:
            return {}
        if self._host.sysfs.runtime_status(self.pci) == "suspended":
            return dict.fromkeys(names, _ASLEEP)
        denied = self.card.refused()
        if denied is not None:
            return dict.fromkeys(names, denied)
        if group == "ring":
            return self._read_ring()
        if group == "gate":
            return nvml_health.tenants(self.card)
        return self._read_gpu() if group == "gpu" else self._read_health()

    def links(self) -> Sequence[Row] | Null:
        """One row per NVLink, those that lead nowhere too; empty where the card has none.

        Raises:
            Lost, Hung: This card does not answer.
            DriverGone: No card answers any more.
        """
        if self._host.sysfs.runtime_status(self.pci) == "suspended":
            return _ASLEEP
        return self.card.refused() or self._links.read(self._generation())

    def processes(self) -> list[Process]:
        """Processes that compute on the card; empty when it does not answer.

        Entries that cannot be true are kept and marked: a driver that shuffles its list still says by it that
        the card is in use.
        """
        try:
            if self._host.sysfs.runtime_status(self.pci) == "suspended" or self.card.refused() is not None:
                return []
            listed = nvml_health.listed(self.card)
            total = self._memory()["mem_total_bytes"] if listed else 0
        except DriverError:
            return []
        entries = listed if isinstance(listed, list) else []
        return [self._process(entry, total) for entry in entries]

    def _process(self, entry: object, total: Cell) -> Process:
        pid, used = number(getattr(entry, "pid", None)), number(getattr(entry, "usedGpuMemory", None))
        suspect = ""
        if not isinstance(pid, int) or not 0 < pid <= _LARGEST_PID or not self._host.sysfs.has_process(pid):
            suspect = "no_such_pid"
        elif isinstance(used, int) and isinstance(total, int) and used > total:
            suspect = "memory"
        memory = used if isinstance(used, int) and not suspect else None
        return Process(pid if isinstance(pid, int) else 0, self.pci, memory, suspect)

    def _read_ring(self) -> dict[str, Cell]:
        power = watts(self.card.ask("nvmlDeviceGetPowerUsage"))
        if isinstance(power, Null) and power.reason is Reason.NOT_SUPPORTED:
            other = self.card.fields(_POWER)
            power = next((cell for cell in other.values() if isinstance(cell, float)), power)
        return {
            "util_pct": _SPLIT if self._is_split() else self._util("gpu"),
            "sm_clock_mhz": number(self.card.ask("nvmlDeviceGetClockInfo", _SM)),
            "power_w": power,
        }

    def _util(self, name: str) -> Cell:
        return number(part(self.card.ask("nvmlDeviceGetUtilizationRates"), name))

    def _is_split(self) -> bool:
        """Whether MIG splits the card: it then has no utilisation, whatever the library answers."""
        if self._split is None:
            self._look_at_mig()
        return bool(self._split)

    def _look_at_mig(self) -> None:
        split = nvml_health.mig(self.card)[0] is True
        if self._split not in (None, split):
            self.card.forget()  # another set of sensors
        self._split = split

    def _read_gpu(self) -> dict[str, Cell]:
        ask, either = self.card.ask, self.card.either
        self._look_at_mig()
        pstate = number(ask("nvmlDeviceGetPerformanceState"))
        row: dict[str, Cell] = {
            "power_limit_w": watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
            "mem_util_pct": _SPLIT if self._is_split() else self._util("memory"),
            "mem_clock_mhz": number(ask("nvmlDeviceGetClockInfo", _MEM)),
            "temperature_c": number(either("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", 0)),
            "temperature_margin_c": signed(ask("nvmlDeviceGetMarginTemperature")),
            "pstate": Null(Reason.NOT_READ, "unknown") if pstate == _UNKNOWN_PSTATE else pstate,
            "clock_reasons": number(
                either("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
            ),
            "energy_j_total": scaled(ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            "pcie_gen": number(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
            "pcie_gen_max": number(ask("nvmlDeviceGetMaxPcieLinkGeneration")),
            "pcie_width": number(ask("nvmlDeviceGetCurrPcieLinkWidth")),
            "pcie_width_max": number(ask("nvmlDeviceGetMaxPcieLinkWidth")),
        }
        row["fan_pct"] = number(ask("nvmlDeviceGetFanSpeed"))
        row.update(dict.fromkeys(_ACTIVITY, _SPLIT) if self._is_split() else self.activity.read())
        row.update(self._memory())
        row.update(self._slowed())
        if self._is_part_of_processor(row):
            row.update(dict.fromkeys(_PCIE, _UNIFIED))
        # what the ring has no value of, so that the row says why
        missing = [name for name in _RING if not self.ring.values.get(name)]
        if missing:
            now = self._read_ring()
            for name in missing:
                row |= {f"{name}{end}": now[name] for end in ("", "_min", "_p10")}
        return row

    def _read_health(self) -> dict[str, Cell]:
        row = nvml_health.read_health(self.card, self._generation())
        sysfs = self._host.sysfs
        unknown = Null(Reason.NOT_SUPPORTED, "not_found")
        row["driver_version"] = sysfs.driver_version() or unknown
        row["library_version"] = self._host.library_version() or unknown
        return row

    def _memory(self) -> dict[str, Cell]:
        # version 2 counts what the driver keeps for itself apart, as nvidia-smi does
        memory = self.card.ask("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
        if isinstance(memory, Null) and memory.reason is Reason.NOT_SUPPORTED:
            memory = self.card.ask("nvmlDeviceGetMemoryInfo")
        used, total = number(part(memory, "used")), number(part(memory, "total"))
        if total == 0:
            # a card that shares the host's memory has none of its own to speak of
            total = _UNIFIED if self._is_unified() else Null(Reason.IMPLAUSIBLE, "0")
            used = total
        elif isinstance(used, int) and isinstance(total, int) and used > total:
            used = Null(Reason.IMPLAUSIBLE, "more than all")
        return {"mem_used_bytes": used, "mem_total_bytes": total}

    def _slowed(self) -> dict[str, Cell]:
        """Memory temperature, and how long the clocks were held down by what."""
        found = self.card.fields(_FIELDS)
        thermal = found.pop("thermal_s")
        if _absent(found["sw_thermal_s_total"]) and not _absent(thermal):
            found["sw_thermal_s_total"] = thermal
        for name, policy in _VIOLATIONS.items():
            if _absent(found[name]):
                status = self.card.ask("nvmlDeviceGetViolationStatus", policy)
                found[name] = seconds(part(status, "violationTime"))
        return found

    def _is_unified(self) -> bool:
        model = self._model()
        return model is not None and model.kind == "integrated"

    def _is_part_of_processor(self, row: Mapping[str, Cell]) -> bool:
        """Whether the card is on the processor's own bus: a PCIe link that it shows means nothing."""
        return self._is_unified() or (_absent(row["mem_total_bytes"]) and row["pcie_gen_max"] == 1)

    def _generation(self) -> int:
        if not self._architecture:
            found = number(self.card.ask("nvmlDeviceGetArchitecture"))
            self._architecture = found if isinstance(found, int) and found > 0 else 0
        return self._architecture

    def _model(self) -> nvidia_cards.CardModel | None:
        """What the catalogue says of such cards, by name, else by PCI device."""
        if not self._asked_kind:
            self._asked_kind = True
            name = shown(self.card.ask("nvmlDeviceGetName"))
            device = number(part(self.card.ask("nvmlDeviceGetPciInfo"), "pciDeviceId"))
            self._kind = nvidia_cards.find(name, _device_id(device))
        return self._kind

    def _catalogued(self, found: Mapping[str, str]) -> dict[str, str]:
        """Kind and form by the catalogue, and what the driver does not say of the model."""
        device = number(part(self.card.ask("nvmlDeviceGetPciInfo"), "pciDeviceId"))
        added = {"device_id": _device_id(device)}
        model = self._model()
        guest = found.get("virtualization") == "vgpu"
        if model is None:
            return added | ({"card_kind": "vgpu"} if guest else {})
        added |= {"card_kind": "vgpu" if guest else model.kind, "form_factor": model.form_factor}
        if not guest:  # a share of a card has other figures than the card
            known_by_model = {name: text for name, text in model.attributes().items() if not found.get(name)}
            added |= known_by_model
            added["from_catalogue"] = ",".join(known_by_model)
        return added

    def _place(self) -> dict[str, str]:
        """Chassis, slot and tray, where the card knows its rack."""
        platform = self.card.filled("nvmlDeviceGetPlatformInfo", Platform())
        if not isinstance(platform, Platform):
            return {}
        chassis = serial(bytes(platform.chassisSerialNumber))
        if not chassis:
            return {}
        return {
            "chassis_serial": chassis,
            "chassis_slot": str(platform.slotNumber),
            "chassis_tray": str(platform.trayIndex),
        }

    def _checked_inforom(self) -> str:
        """Whether the card's own memory of itself is sound: it reads flash, so once a day at most."""
        now = self._host.clock()
        if now - self._inforom_at >= _DAY_S:
            self._inforom_at = now
            answer = self.card.ask("nvmlDeviceValidateInforom")
            if isinstance(answer, Null):
                absent = answer.reason is Reason.NOT_SUPPORTED
                self._inforom = "" if absent else "corrupted" if answer.code == "NVML 14" else "unreadable"
            else:
                self._inforom = "ok"
        return self._inforom


class Start(threading.Thread):
    """An initialisation of the library that may take its time: it wakes every card that is not kept awake.

    Args:
        library: Announces the call where nothing else is announced.
    """

    def __init__(self, library: Library) -> None:
        super().__init__(name="start of the driver", daemon=True)
        self.trouble: FailedError | None = None
        self._library = library
        self.start()
        self.join(_FIRST_WAIT_S)

    def run(self) -> None:
        """The one call."""
        try:
            self._library.call("", _INIT)
        except FailedError as trouble:
            self.trouble = trouble


class NvmlHost(SysfsHost):
    """A host whose cards are asked through NVIDIA's library; the rest comes from /proc and /sys.

    A version mismatch after the driver was upgraded stays until the process that loaded the old library ends:
    `gpus` then says `driver_mismatch` for as long as it lives.

    Args:
        root: Where /proc and /sys are.
        progress: Where each call is announced.
        library: The binding; None = pynvml.
        skip: Addresses of cards that must not be touched; they answer `Hung`.
        clock: Monotonic seconds.
        aside: Where an initialisation is announced that goes on beside the sweeps when it takes long; the
            cards are then `starting`. None = the first who asks for the cards waits for it.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        progress: Progress | None = None,
        library: object | None = None,
        skip: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        aside: Progress | None = None,
    ) -> None:
        super().__init__(root)
        self.root = root
        self._announced = announced = progress or NoProgress()
        self.sysfs = Sysfs(root, announced, skip)
        # imported here, so that a host without cards does not pay for it
        module = importlib.import_module("pynvml") if library is None else library
        self.library = Library(module, announced)
        self._beside = None if aside is None else Library(module, aside)
        self._start_up: Start | None = None
        self.skip = frozenset(skip)
        self.clock = clock
        self.epoch = 0
        self._gpus: tuple[NvmlGpu, ...] = ()
        self._ready = False
        self._gone = ""
        self._why = ""
        self._try_again = 0.0
        self._backoff = _FIRST_BACKOFF_S
        self._look_again = 0.0
        self._lost_wait = _FIRST_BACKOFF_S
        self._lost_again = 0.0
        self._all_were_lost = False
        self._fallen: dict[str, float] = {}
        self._loaded = ("", 0, 0)
        self._uuids: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._on_disk = ""

    def node(self) -> Item:
        """The host itself; driver and CUDA versions by the library where it answers."""
        found = self.machine.attributes() | driver_words(self.sysfs)
        versions = self.versions() if self._ready else {}
        if "driver" in versions:
            found |= {"driver": f"NVIDIA {versions['driver']}", "driver_version": versions["driver"]}
        found |= {name: versions[name] for name in ("cuda", "nvml") if name in versions}
        loaded, library = self.sysfs.driver_version(), self.sysfs.library_version()
        if library:
            found["library_version"] = library
        if library and loaded and library != loaded:
            found["driver"] = f"NVIDIA {loaded}, library {library}: reload the driver or reboot"
        return Item("node:", found)

    def gpus(self) -> Sequence[Gpu]:
        """Every card the driver lists, those that do not answer too.

        Raises:
            DriverGone: Cards are on the bus but the library cannot be initialised.
        """
        return self._list()

    def processes(self) -> Sequence[Process]:
        """Processes that compute on a card."""
        try:
            gpus = self._list()
        except DriverError:
            return ()
        return [process for gpu in gpus for process in gpu.processes()]

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """On the card that `pci` or `gpu_uuid` names, through CUDA's driver library; to the one at `peer`.

        Raises:
            DriverGone: No driver answers.
        """
        # imported here: the sampler has no use for it
        from gpufleet_agent.drivers import cuda

        wanted = params.get("pci") or params.get("gpu_uuid")
        gpus = self._list()
        gpu = next((gpu for gpu in gpus if wanted in (gpu.pci, gpu.uuid)), None)
        if gpu is None:
            return BenchResult("failed", None, "", f"no card {wanted}: give pci or gpu_uuid")
        visible = [one.uuid for one in gpus if one.uuid and one.pci not in self.skip]
        device = self.root / "sys/bus/pci/devices" / gpu.pci
        other = params.get("peer")
        peer = next((one for one in gpus if one.pci == other), None)
        if other and peer is None:
            return BenchResult("unsupported", None, "", f"{other} is no card of NVIDIA's driver")
        link = link_between(gpu.links(), peer.links(), peer.pci) if peer is not None else ""
        card = cuda.Card(gpu.pci, visible, device)
        return replace(cuda.run_bench(name, params, card, self._announced, check), link=link)

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`. What it says of lost cards is remembered."""
        events, cursor = super().kernel_log(cursor)
        for event in events:
            if event.kind == "gpu_lost" and event.entity.startswith("pci:"):
                age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - event.mono_us / 1e6
                self._fallen[event.entity.removeprefix("pci:")] = self.clock() - age_s
        return events, cursor

    def fell(self, pci: str) -> bool:
        """Whether the kernel log said of late that the card fell off the bus."""
        said = self._fallen.get(pci)
        return said is not None and self.clock() - said < _FALL_COUNTS_S

    def versions(self) -> dict[str, str]:
        """`driver`, `cuda` and `nvml` by the library, read once per initialisation."""
        if not self._versions:
            for name, call in (
                ("driver", "nvmlSystemGetDriverVersion"),
                ("cuda", "nvmlSystemGetCudaDriverVersion_v2"),
                ("nvml", "nvmlSystemGetNVMLVersion"),
            ):
                try:
                    answer = self.library.call("", call)
                except FailedError:
                    continue
                cuda = f"{answer // 1000}.{answer % 1000 // 10}" if isinstance(answer, int) else ""
                self._versions[name] = cuda or shown(answer)
        return self._versions

    def library_version(self) -> str:
        """Of the library that a process started now would load; empty when it is not found."""
        return self._on_disk

    def drop(self, trouble: FailedError) -> DriverGone:
        """Let go of the library, to initialise it anew after a while; the error to raise."""
        self._close()
        self._gone = known(trouble.code).gone
        self._try_again = self.clock() + self._backoff
        self._backoff = min(_MOST_BACKOFF_S, self._backoff * 2)
        self._why = f"NVIDIA's library: {trouble}"
        if trouble.code == MISMATCH:
            self._on_disk = self.sysfs.library_version()
            module, library = self.sysfs.driver_version() or "unknown", self._on_disk or "unknown"
            self._why = f"kernel module {module}, library {library}: reload the driver or reboot"
        return DriverGone(self._gone, self._why)

    def _close(self) -> None:
        if self._ready:
            for gpu in self._gpus:
                gpu.activity.close()
            # what cannot be shut down is initialised once more all the same
            with suppress(FailedError):
                self.library.call("", "nvmlShutdown")
        self._ready, self._gpus, self._versions = False, (), {}
        self._fallen.clear()

    def _give_up(self, now: float) -> bool:
        """Whether no card answers any more, and it is time to see whether they do after another start.

        That time comes after a second, then ever later: a card that was reset is another one to the library
        only then. While one card answers it would pay for the others, so they are left to `isolation`.
        """
        if not self._gpus or not all(gpu.card.lost for gpu in self._gpus):
            self._lost_wait, self._lost_again = _FIRST_BACKOFF_S, 0.0
            return False
        if not self._lost_again:
            self._lost_again = now + self._lost_wait
        if now < self._lost_again:
            return False
        self._lost_wait = min(_MOST_BACKOFF_S, self._lost_wait * 2)
        self._lost_again = now + self._lost_wait
        return True

    def _list(self) -> tuple[NvmlGpu, ...]:
        now = self.clock()
        if self._ready and now >= self._look_again:
            self._look_again = now + _LOOK_S
            self._on_disk = self.sysfs.library_version()
            loaded = self.sysfs.module()
            if loaded != self._loaded:
                # the module was unloaded or another one loaded: every handle is void
                self.drop(FailedError(UNINITIALIZED))
                self._try_again = now
        if self._ready and self._give_up(now):
            self._all_were_lost = True
            self._close()
            self._try_again = now
        if not self._ready:
            if now >= self._try_again:
                self._start(now)
            elif self._gone:
                raise DriverGone(self._gone, self._why)
        return self._gpus

    def _start(self, now: float) -> None:
        """Initialise the library and find the cards.

        Raises:
            DriverGone: That cannot be done, and there are cards; or it is not done yet.
        """
        try:
            self._initialise()
            self._ready = True
            gpus = self._enumerate()
        except FailedError as trouble:
            gone = self.drop(trouble)
            if trouble.code == MISMATCH or self._cards_on_bus():
                raise gone from trouble
            self._gone = ""
            self._try_again = now + _MOST_BACKOFF_S
            return
        self._gpus, self._gone, self._backoff = gpus, "", _FIRST_BACKOFF_S
        self._loaded = self.sysfs.module()
        self._on_disk = self.sysfs.library_version()
        self._look_again = now + _LOOK_S
        # nothing counts anew as long as nothing answers
        self.epoch += not (self._all_were_lost and all(gpu.card.lost for gpu in gpus))
        self._all_were_lost = False

    def _initialise(self) -> None:
        """Initialise the library.

        Raises:
            FailedError: It answers with an error.
            DriverGone: It has not answered yet.
        """
        if self._beside is None:
            self.library.call("", _INIT)
            return
        start_up = self._start_up = self._start_up or Start(self._beside)
        if start_up.is_alive():
            raise DriverGone("starting", "NVIDIA's library is still being initialised")
        self._start_up = None
        if start_up.trouble is not None:
            raise start_up.trouble

    def _cards_on_bus(self) -> bool:
        try:
            return bool(self.sysfs.nvidia_cards())
        except DriverError:
            return True  # a bus that cannot be listed is no empty bus

    def _enumerate(self) -> tuple[NvmlGpu, ...]:
        """Every index the library counts. One that fails is lost: the card that is left over on the bus."""
        count = number(self.library.call("", "nvmlDeviceGetCount"))
        if not isinstance(count, int):
            raise FailedError(UNKNOWN)
        try:
            on_bus = self.sysfs.nvidia_cards()
        except DriverError:
            on_bus = ()
        likely = self._likely(on_bus, count)
        gpus: list[NvmlGpu] = []
        silent: list[tuple[int, FailedError]] = []
        for index in range(min(count, _MOST_CARDS)):
            expected = likely[index] if likely else ""
            if expected and expected in self.skip:
                gpus.append(NvmlGpu(self, index, expected, self._uuid_of(expected)))
                continue
            try:
                gpus.append(self._gpu(index, expected))
            except FailedError as trouble:
                if known(trouble.code).restart:
                    raise
                silent.append((index, trouble))
        left = [one for one in on_bus if one not in {gpu.pci for gpu in gpus}]
        for place, (index, failed) in enumerate(silent):
            pci = left[place] if len(left) == len(silent) else likely[index] if likely else ""
            gpu = NvmlGpu(self, index, pci, self._uuid_of(pci))
            gpu.card.detach(failed)
            gpus.append(gpu)
        return tuple(sorted(gpus, key=lambda gpu: gpu.index))

    def _likely(self, on_bus: Sequence[str], count: int) -> Sequence[str]:
        """Which card is which number: the library counts them in the order of their addresses.

        It may not have taken all of them: some are refused, and some excluded on purpose.
        """
        if len(on_bus) == count:
            return on_bus
        taken = [one for one in on_bus if self.sysfs.knows_card(one)]
        if len(taken) == count:
            return taken
        wanted = [one for one in taken if self.sysfs.excluded(one) is not True]
        return wanted if len(wanted) == count else ()

    def _gpu(self, index: int, likely: str) -> NvmlGpu:
        """The card that answers at an index.

        Raises:
            FailedError: None does.
        """
        handle = self.library.call(likely, "nvmlDeviceGetHandleByIndex", index)
        bus = part(self.library.call(likely, "nvmlDeviceGetPciInfo", handle), "busId")
        pci = address(shown(bus)) or likely
        found = uuid(self.library.call(pci, "nvmlDeviceGetUUID", handle)) or self._uuid_of(pci)
        if pci and found:
            self._uuids[pci] = found
        gpu = NvmlGpu(self, index, pci, found)
        gpu.card.attach(handle)
        return gpu

    def remembered(self, pci: str) -> str:
        """UUID of the card at an address, from memory alone; empty when it was never read."""
        return self._uuids.get(pci, "")

    def _uuid_of(self, pci: str) -> str:
        """Of a card that does not answer: by the kernel module, else by what it said last."""
        told = self.sysfs.gpu_uuid(pci) if pci else ""
        return told if isinstance(told, str) and told else self._uuids.get(pci, "")


_TEXTS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("model", "nvmlDeviceGetName", ()),
    ("part_number", "nvmlDeviceGetBoardPartNumber", ()),
    ("vbios", "nvmlDeviceGetVbiosVersion", ()),
    ("inforom", "nvmlDeviceGetInforomImageVersion", ()),
    ("gsp_firmware", "nvmlDeviceGetGspFirmwareVersion", ()),
)
_NUMBERS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("minor", "nvmlDeviceGetMinorNumber", ()),
    ("slot", "nvmlDeviceGetModuleId", ()),
    ("inforom_checksum", "nvmlDeviceGetInforomConfigurationChecksum", ()),
    ("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", (_SM,)),
    ("mem_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", (_MEM,)),
    ("sm_clock_boost_mhz", "nvmlDeviceGetMaxCustomerBoostClock", (_GRAPHICS,)),
    ("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", ()),
    ("pcie_gen_card_max", "nvmlDeviceGetGpuMaxPcieLinkGeneration", ()),
    ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", ()),
    ("mem_bus_width_bits", "nvmlDeviceGetMemoryBusWidth", ()),
)
_LIMITS = (
    ("power_limit_default_w", "nvmlDeviceGetPowerManagementDefaultLimit"),
    ("power_limit_requested_w", "nvmlDeviceGetPowerManagementLimit"),
)
_GPU = (
    *_RING, *(f"{name}_{end}" for name in _RING for end in ("min", "p10")), "power_limit_w", "mem_util_pct",
    "mem_clock_mhz", "mem_used_bytes", "mem_total_bytes", "temperature_c", "temperature_margin_c", "pstate",
    "clock_reasons", "energy_j_total", "fan_pct", *_ACTIVITY, *_PCIE,
    *(field.name for field in _FIELDS if field.id != 75),
)  # fmt: skip
_GROUPS = {"ring": _RING, "gpu": _GPU, "gpu_health": nvml_health.COLUMNS,
           "gate": ("pids", "compute_mode")}  # fmt: skip


def _absent(cell: Cell) -> bool:
    return isinstance(cell, Null) and cell.reason is Reason.NOT_SUPPORTED


def _device_id(both: object) -> str:
    """`0x233010DE` -> `2330`."""
    return f"{both >> 16:04x}" if isinstance(both, int) and both & 0xFFFF == 0x10DE and both < 2**32 else ""
