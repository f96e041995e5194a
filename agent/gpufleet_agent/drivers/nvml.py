"""Cards through NVIDIA's library. Only this file imports pynvml, and only it knows the library's error codes.

An error of the library becomes one of four things here: a Null (the sensor is not there, or did not answer),
`Lost` (the card is not there any more), `DriverGone` (no card can be asked), or nothing (a host without
cards). The library may hang in any call, so every call is announced to `Progress` first.
"""

import importlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import (
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
)
from gpufleet_agent.drivers.sysfs import SysfsHost, driver_words

_UNINITIALIZED, _NO_PERMISSION, _DRIVER_NOT_LOADED = 1, 4, 9
_LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND, _IS_LOST = 12, 13, 15
_OPERATING_SYSTEM, _MISMATCH, _NO_DATA, _UNKNOWN = 17, 18, 21, 999

_NOT_SUPPORTED = frozenset({3, _FUNCTION_NOT_FOUND, 22, 24, 25, 26, 30})
"""Not supported, no such function in this driver, wrong structure version, deprecated: no such sensor."""

_GONE = {
    _LIBRARY_NOT_FOUND: "no_library",
    _DRIVER_NOT_LOADED: "driver_not_loaded",
    _MISMATCH: "driver_mismatch",
    _NO_PERMISSION: "no_permission",
    _OPERATING_SYSTEM: "no_permission",
}
_LOST = {
    6: "not_found",
    8: "insufficient_power",
    11: "irq_issue",
    _IS_LOST: "gpu_is_lost",
    16: "reset_required",
    _UNKNOWN: "unknown_error",
}
_RESTART = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _MISMATCH})
"""Codes of a single call that mean the library must be initialised anew."""

_SM, _MEM, _GRAPHICS = 1, 2, 0
_MEMORY_V2 = 0x02000028
_FIELDS = {82: "mem_temperature_c", 74: "power_cap_s_total", 269: "sw_thermal_s_total",
           270: "hw_thermal_s_total", 271: "hw_brake_s_total"}  # fmt: skip
"""Numbers of our own, so that they can be asked of a library that has no names for them."""

_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_ARCHITECTURES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada",
                  9: "Hopper", 10: "Blackwell", 13: "Rubin"}  # fmt: skip
_RING = ("util_pct", "sm_clock_mhz", "power_w")
_MOST_CARDS = 1024
_RETRY_LOST_S = 10.0
_LOOK_S = 30.0
_MOST_BACKOFF_S = 60.0
_UNKNOWN_PSTATE = 32
_ASLEEP = Null(Reason.NOT_READ, "suspended")
_NO_TEXT = ("", "n/a", "unknown", "none", "[n/a]")


@runtime_checkable
class _Values(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> object: ...


class _FailedError(Exception):
    """A call of the library answered with an error code; `code` 0 and a word for errors of the binding."""

    def __init__(self, code: int, word: str = "") -> None:
        super().__init__(word or f"NVML {code}")
        self.code = code


class _Library:
    """The library's functions by name, announced before they are called."""

    def __init__(self, module: object, progress: Progress) -> None:
        self._module = module
        self._progress = progress

    def call(self, card: str, name: str, *args: object) -> object:
        """What the function returns.

        Raises:
            _FailedError: It answers with an error, or the binding does not have it.
        """
        function = getattr(self._module, name, None)
        if function is None:
            raise _FailedError(_FUNCTION_NOT_FOUND)
        self._progress.enter(card, name)
        try:
            return function(*args)
        except Exception as error:
            code = getattr(error, "value", None)
            if isinstance(code, int):
                raise _FailedError(code) from error
            # bytes that are no text, a structure that the binding does not expect
            raise _FailedError(0, type(error).__name__) from error
        finally:
            self._progress.leave()


class NvmlGpu:
    """One card. Its handle is kept until the library is initialised anew."""

    def __init__(self, host: "NvmlHost", index: int, pci: str, uuid: str) -> None:
        self.ring = Ring()
        self.index = index
        self.pci = pci
        self.uuid = uuid
        self._host = host
        self._handle: object = None
        self._trouble: _FailedError | None = None
        self._ask_again = 0.0
        self._absent: dict[str, Null] = {}

    def attach(self, handle: object) -> None:
        """Use this handle from now on."""
        self._handle, self._trouble = handle, None

    def detach(self, trouble: _FailedError) -> None:
        """The card did not answer; it is asked for a handle again after a while."""
        self._handle, self._trouble = None, trouble
        self._ask_again = self._host.clock() + _RETRY_LOST_S

    def identity(self) -> Mapping[str, str]:
        """Inventory attributes; what the card or the driver does not know is left out.

        Raises:
            Lost, Hung: This card does not answer.
        """
        self._attached()
        found: dict[str, str] = {"uuid": self.uuid, "pci": self.pci, "index": str(self.index)}
        for name, call, args in _TEXTS:
            found[name] = _shown(self._ask(call, *args))
        for name, call, args in _NUMBERS:
            found[name] = _shown(_number(self._ask(call, *args)))
        limit = _scaled(self._ask("nvmlDeviceGetPowerManagementDefaultLimit"), 1e-3)
        found["power_limit_default_w"] = "" if isinstance(limit, Null) else f"{limit:g}"
        found["mem_total_bytes"] = _shown(self._memory()["mem_total_bytes"])
        found["architecture"] = self._architecture()
        found |= self._host.versions()
        return {name: text for name, text in found.items() if text.strip().lower() not in _NO_TEXT}

    def read(self, group: str) -> Row:
        """The metrics of "ring" or "gpu"; nothing for a group that is not read here.

        Raises:
            Lost, Hung: This card does not answer.
            DriverGone: No card answers any more.
        """
        if group not in ("ring", "gpu"):
            return {}
        names = _RING if group == "ring" else _GPU
        if self._host.sysfs.runtime_status(self.pci) == "suspended":
            return dict.fromkeys(names, _ASLEEP)
        denied = self._attached()
        if denied is not None:
            return dict.fromkeys(names, denied)
        return self._read_ring() if group == "ring" else self._read_gpu()

    def pids(self) -> list[tuple[int, int | None]]:
        """Processes that compute on the card, and the memory they hold; empty when it does not answer."""
        try:
            if self._attached() is not None:
                return []
            listed = self._ask("nvmlDeviceGetComputeRunningProcesses")
        except DriverError:
            return []
        found: list[tuple[int, int | None]] = []
        for one in listed if isinstance(listed, list) else []:
            pid, used = _number(getattr(one, "pid", None)), _number(getattr(one, "usedGpuMemory", None))
            if isinstance(pid, int):
                found.append((pid, used if isinstance(used, int) else None))
        return found

    def _read_ring(self) -> dict[str, Cell]:
        return {
            "util_pct": _number(_part(self._ask("nvmlDeviceGetUtilizationRates"), "gpu")),
            "sm_clock_mhz": _number(self._ask("nvmlDeviceGetClockInfo", _SM)),
            "power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
        }

    def _read_gpu(self) -> dict[str, Cell]:
        pstate = _number(self._ask("nvmlDeviceGetPerformanceState"))
        row: dict[str, Cell] = {
            "power_limit_w": _scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "mem_util_pct": _number(_part(self._ask("nvmlDeviceGetUtilizationRates"), "memory")),
            "mem_clock_mhz": _number(self._ask("nvmlDeviceGetClockInfo", _MEM)),
            "temperature_c": _number(
                self._either("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", 0)
            ),
            "temperature_margin_c": _signed(self._ask("nvmlDeviceGetMarginTemperature")),
            "pstate": Null(Reason.NOT_READ, "unknown") if pstate == _UNKNOWN_PSTATE else pstate,
            "clock_reasons": _number(
                self._either(
                    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
                )
            ),
            "energy_j_total": _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            "pcie_gen": _number(self._ask("nvmlDeviceGetCurrPcieLinkGeneration")),
            "pcie_gen_max": _number(self._ask("nvmlDeviceGetMaxPcieLinkGeneration")),
            "pcie_width": _number(self._ask("nvmlDeviceGetCurrPcieLinkWidth")),
            "pcie_width_max": _number(self._ask("nvmlDeviceGetMaxPcieLinkWidth")),
        }
        row.update(self._memory())
        row.update(self._fields())
        # what the ring has no value of, so that the row says why
        missing = [name for name in _RING if not self.ring.values.get(name)]
        if missing:
            now = self._read_ring()
            row.update({name: now[name] for name in missing})
        return row

    def _memory(self) -> dict[str, Cell]:
        # version 2 counts what the driver keeps for itself apart, as nvidia-smi does
        memory = self._ask("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
        if isinstance(memory, Null):
            memory = self._ask("nvmlDeviceGetMemoryInfo")
        return {
            "mem_used_bytes": _number(_part(memory, "used")),
            "mem_total_bytes": _number(_part(memory, "total")),
        }

    def _fields(self) -> dict[str, Cell]:
        answer = self._ask("nvmlDeviceGetFieldValues", list(_FIELDS))
        if isinstance(answer, Null):
            return dict.fromkeys(_FIELDS.values(), answer)
        found: dict[str, Cell] = dict.fromkeys(_FIELDS.values(), Null(Reason.NOT_READ))
        # an array of ctypes has a length and no iterator
        values = [answer[place] for place in range(len(answer))] if isinstance(answer, _Values) else []
        for value in values:
            name = _FIELDS.get(getattr(value, "fieldId", 0))
            if name is None:
                continue
            read = _field(value)
            found[name] = read if name == "mem_temperature_c" else _scaled(read, 1e-9)
        return found

    def _architecture(self) -> str:
        number = _number(self._ask("nvmlDeviceGetArchitecture"))
        return _ARCHITECTURES.get(number, f"newer ({number})") if isinstance(number, int) else ""

    def _either(self, name: str, older: str, *args: object) -> object:
        """A function, or where the driver does not have it, what it was called before."""
        found = self._ask(name, *args)
        if isinstance(found, Null) and found.reason is Reason.NOT_SUPPORTED:
            return self._ask(older, *args)
        return found

    def _attached(self) -> Null | None:
        """See to it that the card has a handle; else why it may not be asked.

        Raises:
            Lost, Hung: It has none.
        """
        if self.pci in self._host.skip:
            raise Hung("hung", f"{self.pci} is left alone")
        if self._trouble is not None and self._host.clock() >= self._ask_again:
            self._find()
        if self._trouble is None:
            return None
        if self._trouble.code in (_NO_PERMISSION, _OPERATING_SYSTEM):
            return Null(Reason.NO_PERMISSION, str(self._trouble))
        raise _lost(self.pci, self._trouble)

    def _find(self) -> None:
        """Ask for a handle, by address: that touches no other card."""
        try:
            if self.pci:
                self.attach(self._host.library.call(self.pci, "nvmlDeviceGetHandleByPciBusId", self.pci))
            else:
                self.attach(self._host.library.call("", "nvmlDeviceGetHandleByIndex", self.index))
        except _FailedError as trouble:
            self.detach(trouble)

    def _ask(self, name: str, *args: object) -> object:
        """What the function says about this card, or a Null.

        Raises:
            Lost: The card is gone.
            DriverGone: The driver is.
        """
        key = f"{name}{args}" if args else name
        if key in self._absent:
            return self._absent[key]
        try:
            return self._call(name, *args)
        except _FailedError as trouble:
            null = _null(trouble)
            if trouble.code in _NOT_SUPPORTED:
                # the answer stays until the library is initialised anew
                self._absent[key] = null
            elif trouble.code in _RESTART:
                raise self._host.drop(trouble) from trouble
            elif trouble.code == _IS_LOST:
                self.detach(trouble)
            elif trouble.code == _UNKNOWN:
                # one sensor may say "unknown" on a sound card; a card that fell gives no handle either
                self._find()
            if self._trouble is not None:
                raise _lost(self.pci, self._trouble) from trouble
            return null

    def _call(self, name: str, *args: object) -> object:
        """Call, and once more where the library does not know what is wrong.

        Raises:
            _FailedError: It answers with an error.
        """
        try:
            return self._host.library.call(self.pci, name, self._handle, *args)
        except _FailedError as trouble:
            if trouble.code != _UNKNOWN:
                raise
        return self._host.library.call(self.pci, name, self._handle, *args)


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
    """

    def __init__(
        self,
        root: Path = Path("/"),
        progress: Progress | None = None,
        library: object | None = None,
        skip: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(root)
        # imported here, so that a host without cards does not pay for it
        module = importlib.import_module("pynvml") if library is None else library
        self.library = _Library(module, progress or NoProgress())
        self.skip = frozenset(skip)
        self.clock = clock
        self.epoch = 0
        self._gpus: tuple[NvmlGpu, ...] = ()
        self._ready = False
        self._gone = ""
        self._try_again = 0.0
        self._backoff = 1.0
        self._look_again = 0.0
        self._loaded = ""
        self._uuids: dict[str, str] = {}
        self._versions: dict[str, str] = {}

    def node(self) -> Item:
        """The host itself; driver and CUDA versions by the library where it answers."""
        found = self.sysfs.attributes() | driver_words(self.sysfs)
        versions = self.versions() if self._ready else {}
        if "driver" in versions:
            found |= {"driver": f"NVIDIA {versions['driver']}", "driver_version": versions["driver"]}
        if "cuda" in versions:
            found["cuda"] = versions["cuda"]
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
        return [Process(pid, gpu.pci, used) for gpu in gpus for pid, used in gpu.pids()]

    def versions(self) -> dict[str, str]:
        """`driver` and `cuda` by the library, read once per initialisation."""
        if not self._versions:
            for name, call in (
                ("driver", "nvmlSystemGetDriverVersion"),
                ("cuda", "nvmlSystemGetCudaDriverVersion_v2"),
            ):
                try:
                    answer = self.library.call("", call)
                except _FailedError:
                    continue
                cuda = f"{answer // 1000}.{answer % 1000 // 10}" if isinstance(answer, int) else ""
                self._versions[name] = cuda or _shown(answer)
        return self._versions

    def drop(self, trouble: _FailedError) -> DriverGone:
        """Let go of the library, to initialise it anew after a while; the error to raise."""
        if self._ready:
            # what cannot be shut down is initialised once more all the same
            with suppress(_FailedError):
                self.library.call("", "nvmlShutdown")
        self._ready, self._gpus, self._versions = False, (), {}
        self._gone = _GONE.get(trouble.code, "driver_failed")
        self._try_again = self.clock() + self._backoff
        self._backoff = min(_MOST_BACKOFF_S, self._backoff * 2)
        return DriverGone(self._gone, f"NVIDIA's library: {trouble}")

    def _list(self) -> tuple[NvmlGpu, ...]:
        now = self.clock()
        if self._ready and now >= self._look_again:
            self._look_again = now + _LOOK_S
            loaded = self.sysfs.driver_version()
            if loaded != self._loaded:
                # the module was unloaded or another one loaded: every handle is void
                self.drop(_FailedError(_UNINITIALIZED))
                self._try_again = now
        if not self._ready:
            if now >= self._try_again:
                self._start(now)
            elif self._gone:
                raise DriverGone(self._gone)
        return self._gpus

    def _start(self, now: float) -> None:
        """Initialise the library and find the cards.

        Raises:
            DriverGone: That cannot be done, and there are cards.
        """
        try:
            self.library.call("", "nvmlInit")
            self._ready = True
            gpus = self._enumerate()
        except _FailedError as trouble:
            gone = self.drop(trouble)
            if trouble.code == _MISMATCH or self._cards_on_bus():
                raise gone from trouble
            self._gone = ""
            self._try_again = now + _MOST_BACKOFF_S
            return
        self._gpus, self._gone, self._backoff = gpus, "", 1.0
        self._loaded = self.sysfs.driver_version()
        self._look_again = now + _LOOK_S
        self.epoch += 1

    def _cards_on_bus(self) -> bool:
        try:
            return bool(self.sysfs.nvidia_cards())
        except DriverError:
            return True  # a bus that cannot be listed is no empty bus

    def _enumerate(self) -> tuple[NvmlGpu, ...]:
        """Every index the library counts. One that fails is lost: the card that is left over on the bus."""
        count = _number(self.library.call("", "nvmlDeviceGetCount"))
        if not isinstance(count, int):
            raise _FailedError(_UNKNOWN)
        try:
            on_bus = self.sysfs.nvidia_cards()
        except DriverError:
            on_bus = ()
        # the library numbers cards in the order of their addresses, if it takes them all
        taken = tuple(address for address in on_bus if self.sysfs.knows_card(address))
        likely = next((found for found in (on_bus, taken) if len(found) == count), ())
        gpus: list[NvmlGpu] = []
        silent: list[tuple[int, _FailedError]] = []
        for index in range(min(count, _MOST_CARDS)):
            address = likely[index] if likely else ""
            if address and address in self.skip:
                gpus.append(NvmlGpu(self, index, address, self._uuid_of(address)))
                continue
            try:
                gpus.append(self._gpu(index, address))
            except _FailedError as trouble:
                if trouble.code in _RESTART:
                    raise
                silent.append((index, trouble))
        left = [address for address in on_bus if address not in {gpu.pci for gpu in gpus}]
        for place, (index, failed) in enumerate(silent):
            address = left[place] if len(left) == len(silent) else likely[index] if likely else ""
            gpu = NvmlGpu(self, index, address, self._uuid_of(address))
            gpu.detach(failed)
            gpus.append(gpu)
        return tuple(sorted(gpus, key=lambda gpu: gpu.index))

    def _gpu(self, index: int, likely: str) -> NvmlGpu:
        """The card that answers at an index.

        Raises:
            _FailedError: None does.
        """
        handle = self.library.call(likely, "nvmlDeviceGetHandleByIndex", index)
        bus = _part(self.library.call(likely, "nvmlDeviceGetPciInfo", handle), "busId")
        address = _address(_shown(bus)) or likely
        uuid = _shown(self.library.call(address, "nvmlDeviceGetUUID", handle))
        if address:
            self._uuids[address] = uuid
        gpu = NvmlGpu(self, index, address, uuid)
        gpu.attach(handle)
        return gpu

    def _uuid_of(self, address: str) -> str:
        """Of a card that does not answer: by what it said last, else by the kernel module."""
        known = self._uuids.get(address, "") if address else ""
        told = self.sysfs.gpu_uuid(address) if address and not known else known
        return told if isinstance(told, str) else ""


_TEXTS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("model", "nvmlDeviceGetName", ()),
    ("serial", "nvmlDeviceGetSerial", ()),
    ("part_number", "nvmlDeviceGetBoardPartNumber", ()),
    ("vbios", "nvmlDeviceGetVbiosVersion", ()),
    ("inforom", "nvmlDeviceGetInforomImageVersion", ()),
    ("gsp_firmware", "nvmlDeviceGetGspFirmwareVersion", ()),
)
_NUMBERS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("minor", "nvmlDeviceGetMinorNumber", ()),
    ("slot", "nvmlDeviceGetModuleId", ()),
    ("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", (_SM,)),
    ("mem_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", (_MEM,)),
    ("sm_clock_boost_mhz", "nvmlDeviceGetMaxCustomerBoostClock", (_GRAPHICS,)),
    ("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", ()),
    ("pcie_gen_card_max", "nvmlDeviceGetGpuMaxPcieLinkGeneration", ()),
    ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", ()),
    ("mem_bus_width_bits", "nvmlDeviceGetMemoryBusWidth", ()),
)
_GPU = (
    *_RING, "power_limit_w", "mem_util_pct", "mem_clock_mhz", "mem_used_bytes", "mem_total_bytes",
    "temperature_c", "temperature_margin_c", "pstate", "clock_reasons", "energy_j_total", "pcie_gen",
    "pcie_gen_max", "pcie_width", "pcie_width_max", *_FIELDS.values(),
)  # fmt: skip


def _lost(pci: str, trouble: _FailedError) -> Lost:
    code = _LOST.get(trouble.code, f"nvml_{trouble.code}")
    return Lost(code, f"{pci or 'a card'} does not answer: {trouble}")


def _null(trouble: _FailedError) -> Null:
    """Why a value is not there."""
    if trouble.code in _NOT_SUPPORTED:
        return Null(Reason.NOT_SUPPORTED, str(trouble))
    if trouble.code == _NO_PERMISSION:
        return Null(Reason.NO_PERMISSION, str(trouble))
    if trouble.code == _NO_DATA:
        return Null(Reason.NOT_READ, str(trouble))
    return Null(Reason.FAILED, str(trouble))


def _number(value: object) -> int | float | Null:
    """A count or a gauge; the values with which the library says "none" are none."""
    if isinstance(value, Null):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Null(Reason.FAILED, type(value).__name__)
    blank = value == 0xFFFFFFFF or 0x7FFFFFF0 <= value <= 0x7FFFFFFF or value >= 0x7FFFFFFFFFFFFFF0
    return Null(Reason.IMPLAUSIBLE, "blank") if blank else value


def _signed(value: object) -> int | float | Null:
    """Like `_number`; a sign that was lost on the way is put back."""
    if isinstance(value, int) and not isinstance(value, bool) and 2**31 <= value < 2**32:
        value -= 2**32
    return _number(value)


def _scaled(value: object, factor: float) -> float | Null:
    number = _number(value)
    return number if isinstance(number, Null) else number * factor


def _part(struct: object, name: str) -> object:
    return struct if isinstance(struct, Null) else getattr(struct, name, None)


def _field(value: object) -> int | float | Null:
    """One answer of a batch: each has its own error code and its own type."""
    code = getattr(value, "nvmlReturn", None)
    if code != 0:
        return _null(_FailedError(code if isinstance(code, int) else 0))
    kind = getattr(value, "valueType", None)
    if not isinstance(kind, int) or not 0 <= kind < len(_VALUES):
        return Null(Reason.FAILED, f"type {kind}")
    return _number(getattr(getattr(value, "value", None), _VALUES[kind], None))


def _shown(value: object) -> str:
    """As text for the inventory; empty for what is not there."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or isinstance(value, Null):
        return ""
    text = "".join(letter for letter in str(value)[:256] if letter.isprintable() and letter != "\ufffd")
    return text.strip()


def _address(bus: str) -> str:
    """`00000000:1B:00.0` -> `0000:1b:00.0`."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return ""
