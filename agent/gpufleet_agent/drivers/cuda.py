"""Benches on NVIDIA cards through the driver's own library, libcuda.so.1, and nothing else of CUDA.

One card per call: its context and everything in it is made for one run and given back at its end, whatever
ends it. Kernels are PTX of an old version, which every driver since compiles for its cards. Each call is
announced first, since any of them may not return.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from gpufleet.metric import Null, Value
from gpufleet_agent.drivers import BenchResult, Check, Progress, files

_Device = c_int
_Pointer = c_uint64
_Handle = c_void_p

SIGNATURES: dict[str, Sequence[type]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetByPCIBusId": (POINTER(_Device), c_char_p),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _Device),
    "cuCtxCreate_v2": (POINTER(_Handle), c_uint, _Device),
    "cuCtxDestroy_v2": (_Handle,),
    "cuStreamCreate": (POINTER(_Handle), c_uint),
    "cuStreamDestroy_v2": (_Handle,),
    "cuEventCreate": (POINTER(_Handle), c_uint),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventSynchronize": (_Handle,),
    "cuEventElapsedTime": (POINTER(c_float), _Handle, _Handle),
    "cuEventDestroy_v2": (_Handle,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(_Pointer), c_size_t),
    "cuMemFree_v2": (_Pointer,),
    "cuMemsetD32_v2": (_Pointer, c_uint, c_size_t),
    "cuMemcpyHtoDAsync_v2": (_Pointer, c_void_p, c_size_t, _Handle),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Pointer, c_size_t, _Handle),
    "cuMemcpyDtoDAsync_v2": (_Pointer, _Pointer, c_size_t, _Handle),
    "cuMemcpyDtoH_v2": (c_void_p, _Pointer, c_size_t),
    "cuModuleLoadData": (POINTER(_Handle), c_char_p),
    "cuModuleGetFunction": (POINTER(_Handle), _Handle, c_char_p),
    "cuModuleUnload": (_Handle,),
    "cuLaunchKernel": (_Handle, *[c_uint] * 7, _Handle, POINTER(c_void_p), POINTER(c_void_p)),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
"""Argument types of the functions that are called; all return a CUresult."""

_SCHED_BLOCKING, _EVENT_BLOCKING, _PORTABLE = 4, 1, 1
_IN_ORDER = 0
"""A stream that waits for what is done without one, such as filling memory."""

_PROCESSORS = 16
_OUT_OF_MEMORY, _UNAVAILABLE = 2, 46
_CANNOT = {
    34: "only the driver's stub of libcuda is there",
    100: "the driver shows CUDA no card",
    101: "the driver does not show CUDA this card",
    222: "the driver does not compile this PTX",
    801: "not supported",
    804: "the driver is too new or too old for this library",
}

_MIB = 1 << 20
_TURN_MS = 50.0
"""Work is handed to the card in pieces of at most about this long, and between them we look around."""

_SETTLE_MOST, _SETTLE_MOST_MS, _SETTLED, _WITHIN = 25, 500.0, 3, 0.02
_THREADS, _BLOCKS_PER_PROCESSOR = 256, 4
_CHAINS, _TIMES = 8, 32
_CLOCK_TIMES = 64


class CudaError(Exception):
    """A call failed.

    Attributes:
        number: The CUresult.
    """

    def __init__(self, call: str, number: int, name: str) -> None:
        super().__init__(f"{call}: {name or number}")
        self.number = number


class Corrupt(Exception):
    """The card gave back other bits than it must."""


class Cuda:
    """The library; one method, so that every call is announced and checked.

    Args:
        library: It, loaded.
        progress: Where calls are announced.
        card: PCI address.
    """

    def __init__(self, library: ctypes.CDLL, progress: Progress, card: str) -> None:
        self._library = library
        self._progress = progress
        self._card = card

    def call(self, name: str, *args: object) -> None:
        """Call a function.

        Raises:
            CudaError: It failed, or this driver does not have it.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(name, 801, "the driver does not have it") from None
        function.argtypes = SIGNATURES[name]
        function.restype = c_int
        self._progress.enter(self._card, name)
        number = function(*args)
        self._progress.leave()
        if number:
            raise CudaError(name, number, self._name(number))

    def _name(self, number: int) -> str:
        text = c_char_p()
        with suppress(AttributeError):
            name_of = self._library["cuGetErrorName"]
            name_of.argtypes = SIGNATURES["cuGetErrorName"]
            if name_of(number, byref(text)) == 0 and text.value:
                return text.value.decode(errors="replace")[:80]
        return ""


class Session:
    """A context on one card, a stream and two events; what it hands out lives as long as it.

    Args:
        cuda: The library.
        pci: The card.
        check: Whether the run may go on.
    """

    def __init__(self, cuda: Cuda, pci: str, check: Check) -> None:
        self._cuda = cuda
        self._pci = pci
        self._check = check
        self._held = ExitStack()
        self._device = _Device()
        self._stream = _Handle()
        self._events = (_Handle(), _Handle())

    def __enter__(self) -> Self:
        """Take the card."""
        try:
            call = self._cuda.call
            call("cuInit", 0)
            call("cuDeviceGetByPCIBusId", byref(self._device), self._pci.encode())
            self._check()
            context = _Handle()
            call("cuCtxCreate_v2", byref(context), _SCHED_BLOCKING, self._device)
            self._give_back("cuCtxDestroy_v2", context)
            call("cuStreamCreate", byref(self._stream), _IN_ORDER)
            self._give_back("cuStreamDestroy_v2", self._stream)
            for event in self._events:
                call("cuEventCreate", byref(event), _EVENT_BLOCKING)
                self._give_back("cuEventDestroy_v2", event)
            self._check()
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give everything back, the newest first; the context, last, takes with it what would not go."""
        self._held.close()

    def pinned(self, size: int) -> int:
        """Host memory that the card reads by itself; its address."""
        address = c_void_p()
        self._cuda.call("cuMemHostAlloc", byref(address), size, _PORTABLE)
        self._give_back("cuMemFreeHost", address)
        self._check()
        assert address.value is not None
        return address.value

    def memory(self, size: int, word: int) -> _Pointer:
        """Memory of the card, a multiple of four bytes, filled with a word."""
        pointer = _Pointer()
        self._cuda.call("cuMemAlloc_v2", byref(pointer), size)
        self._give_back("cuMemFree_v2", pointer)
        self.fill(pointer, size, word)
        self._check()
        return pointer

    def fill(self, pointer: _Pointer, size: int, word: int) -> None:
        """Fill memory of the card with a word."""
        self._cuda.call("cuMemsetD32_v2", pointer, word, size // 4)

    def kernel(self, ptx: str, name: str) -> _Handle:
        """A kernel, compiled for the card."""
        module, function = _Handle(), _Handle()
        self._cuda.call("cuModuleLoadData", byref(module), ptx.encode() + b"\0")
        self._give_back("cuModuleUnload", module)
        self._cuda.call("cuModuleGetFunction", byref(function), module, name.encode())
        self._check()
        return function

    def processors(self) -> int:
        """How many SMs the card has."""
        count = c_int()
        self._cuda.call("cuDeviceGetAttribute", byref(count), _PROCESSORS, self._device)
        return min(4096, max(1, count.value))

    def copy_in(self, to: _Pointer, source: int, size: int) -> None:
        """Host to card; returns at once."""
        self._cuda.call("cuMemcpyHtoDAsync_v2", to, source, size, self._stream)

    def copy_out(self, to: int, source: _Pointer, size: int) -> None:
        """Card to host; returns at once."""
        self._cuda.call("cuMemcpyDtoHAsync_v2", to, source, size, self._stream)

    def copy(self, to: _Pointer, source: _Pointer, size: int) -> None:
        """Within the card; returns at once."""
        self._cuda.call("cuMemcpyDtoDAsync_v2", to, source, size, self._stream)

    def launch(self, kernel: _Handle, blocks: int, threads: int, *args: c_uint64 | c_uint) -> None:
        """Start a kernel; returns at once."""
        addresses = (c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        self._cuda.call(
            "cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, self._stream, addresses, None
        )

    def read(self, source: _Pointer, size: int) -> bytes:
        """Bytes of the card's memory."""
        buffer = ctypes.create_string_buffer(size)
        self._cuda.call("cuMemcpyDtoH_v2", buffer, source, size)
        return buffer.raw

    def timed_ms(self, work: Callable[[], None]) -> float:
        """How long the card takes for some work, by its own clock.

        Raises:
            CudaError: A call failed, or the clock said nonsense.
        """
        self._check()
        began, ended = self._events
        took = c_float()
        self._cuda.call("cuEventRecord", began, self._stream)
        work()
        self._cuda.call("cuEventRecord", ended, self._stream)
        self._cuda.call("cuEventSynchronize", ended)
        self._cuda.call("cuEventElapsedTime", byref(took), began, ended)
        if not math.isfinite(took.value) or took.value <= 0:
            raise CudaError("cuEventElapsedTime", 999, f"{took.value:g} ms")
        self._check()
        return took.value

    def _give_back(self, name: str, handle: object) -> None:
        def release() -> None:
            # what cannot be given back goes with the context, or with the process
            with suppress(CudaError):
                self._cuda.call(name, handle)

        self._held.callback(release)


def run_bench(
    name: str, params: Mapping[str, Value], card: "Card", progress: Progress, check: Check
) -> BenchResult:
    """Run one bench on one card; what `check` raises ends it, and everything is given back first."""
    if name not in _BENCHES:
        return BenchResult("unsupported", None, "", f"no bench {name} for NVIDIA cards")
    measure, unit = _BENCHES[name]
    library = load(card.visible)
    if isinstance(library, str):
        return BenchResult("unsupported", None, unit, library)
    began = time.perf_counter()
    with ExitStack() as stack:
        near = stack.enter_context(Near(card.cpus)) if name in ("h2d", "d2h") else None
        try:
            with Session(Cuda(library, progress, card.pci), card.pci, check) as session:
                samples = tuple(measure(session, params))
        except CudaError as error:
            return _failed(error, unit, time.perf_counter() - began)
        except Corrupt as error:
            seconds = time.perf_counter() - began
            return BenchResult("failed", None, unit, str(error), (), seconds, seconds)
    seconds = time.perf_counter() - began
    convention = "copied_once_anywhere" if near is not None and not near.bound else ""
    return BenchResult("ok", median(samples), unit, "", samples, seconds, seconds, convention)


def load(visible: Sequence[str]) -> ctypes.CDLL | str:
    """The library, or why there is none. It will touch the cards `visible` (UUIDs) alone."""
    # read by cuInit: a card that hangs must not be initialised because another is measured
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"libcuda.so.1 cannot be loaded: {error}"[:200]


class Card:
    """Which card, and what is near it.

    Args:
        pci: Its address.
        visible: UUIDs of all cards that may be touched.
        device: Its folder in /sys.
    """

    def __init__(self, pci: str, visible: Sequence[str], device: Path) -> None:
        self.pci = pci
        self.visible = tuple(visible)
        text = files.read(device / "local_cpulist")
        self.cpus = frozenset[int]() if isinstance(text, Null) else cpus(text)


def cpus(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it, e.g. `0-3,8`; none where it cannot be read."""
    found: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high < 65536:
                return frozenset()
            found.update(range(low, high + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


class Near:
    """This thread on the processors near a card, so that memory it takes is near too; afterwards as before.

    Attributes:
        bound: Whether that could be had.
    """

    def __init__(self, near: frozenset[int]) -> None:
        self._near = near
        self._before: set[int] = set()
        self.bound = False

    def __enter__(self) -> Self:
        """Move there."""
        with suppress(OSError):
            self._before = os.sched_getaffinity(0)
            wanted = self._near & self._before
            if wanted:
                os.sched_setaffinity(0, wanted)
                self.bound = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move back."""
        if self.bound:
            with suppress(OSError):
                os.sched_setaffinity(0, self._before)


def _failed(error: CudaError, unit: str, seconds: float) -> BenchResult:
    if error.number in _CANNOT:
        return BenchResult("unsupported", None, unit, f"{error}: {_CANNOT[error.number]}", (), seconds)
    if error.number in (_OUT_OF_MEMORY, _UNAVAILABLE):  # somebody else has what it needs
        return BenchResult("skipped", None, unit, str(error), (), seconds, seconds)
    return BenchResult("failed", None, unit, str(error), (), seconds, seconds)


def _settle(run_ms: Callable[[], float]) -> None:
    """Run until three in a row take the same time: an idle card raises its clocks and its link only then."""
    took: list[float] = []
    for _ in range(_SETTLE_MOST):
        took.append(run_ms())
        last = took[-_SETTLED:]
        if (len(last) == _SETTLED and max(last) <= min(last) * (1 + _WITHIN)) or sum(took) > _SETTLE_MOST_MS:
            return


# ---- copies


def _copies(
    session: Session, params: Mapping[str, Value], count_as: int, copy: Callable[[], None]
) -> list[float]:
    """GB/s of each repeat."""
    size, copies = int(params["bytes"]), int(params["copies"])
    once_ms = min(session.timed_ms(copy) for _ in range(2))  # the first pays for what is set up then
    copies = max(1, min(copies, int(_TURN_MS / once_ms)))

    def work() -> None:
        for _ in range(copies):
            copy()

    _settle(lambda: session.timed_ms(work))
    return [count_as * copies * size / 1e6 / session.timed_ms(work) for _ in range(int(params["repeats"]))]


def _host_to_device(session: Session, params: Mapping[str, Value]) -> list[float]:
    size = int(params["bytes"])
    here = session.pinned(size)
    pattern = _fill(here, size)
    there = session.memory(size, 0)
    rates = _copies(session, params, 1, lambda: session.copy_in(there, here, size))
    if session.read(there, len(pattern)) != pattern:
        raise Corrupt("what arrived on the card is not what was sent")
    return rates


def _device_to_host(session: Session, params: Mapping[str, Value]) -> list[float]:
    size, word = int(params["bytes"]), 0x5A3C_96E1
    here, there = session.pinned(size), session.memory(size, word)
    rates = _copies(session, params, 1, lambda: session.copy_out(here, there, size))
    if ctypes.string_at(here, 4096) != word.to_bytes(4, "little") * 1024:
        raise Corrupt("what arrived from the card is not what it has")
    return rates


def _device_copy(session: Session, params: Mapping[str, Value]) -> list[float]:
    size, word = int(params["bytes"]), 0xA5C3_691E
    source, target = session.memory(size, word), session.memory(size, 0)
    rates = _copies(session, params, 2, lambda: session.copy(target, source, size))
    if session.read(target, 4096) != word.to_bytes(4, "little") * 1024:
        raise Corrupt("the copy is not what was copied")
    return rates


def _fill(here: int, size: int) -> bytes:
    """Fill memory with a piece that no link or memory could squeeze, over and over; the piece."""
    pattern = os.urandom(min(_MIB, size))
    for at in range(0, size, len(pattern)):
        ctypes.memmove(here + at, pattern, min(len(pattern), size - at))
    return pattern


# ---- kernels


def _ptx(name: str, chains: int, times: int, before: Sequence[str], after: Sequence[str]) -> str:
    """A kernel in which each thread runs a loop of multiply-adds: `chains` of them, each `times` long.

    Its parameters: address of one 8-byte slot per thread, and how often the loop runs (at least once).
    """
    chain = [f"%f{at + 1}" for at in range(chains)]
    begin = [
        f"add.f32 {one}, {before_one}, 0f3F800000;"  # 1.0: no two chains are alike
        for before_one, one in zip(["%f0", *chain], chain, strict=False)
    ]
    # x * 0.99999905 + 0.000001: never leaves the ordinary numbers
    body = [f"fma.rn.f32 {one}, {one}, %fa, %fb;" for one in chain] * times
    total = [f"add.f32 %f0, %f0, {one};" for one in chain]
    lines = [
        ".reg .pred %p1;",
        f".reg .f32 %f<{chains + 1}>;",
        ".reg .f32 %fa, %fb;",
        ".reg .b32 %r<6>;",
        ".reg .b64 %rd<8>;",
        "ld.param.u64 %rd1, [slots];",
        "ld.param.u32 %r1, [loops];",
        "cvta.to.global.u64 %rd2, %rd1;",
        "mov.u32 %r2, %tid.x;",
        "mov.u32 %r3, %ctaid.x;",
        "mov.u32 %r4, %ntid.x;",
        "mad.lo.u32 %r5, %r3, %r4, %r2;",
        "mul.wide.u32 %rd3, %r5, 8;",
        "add.s64 %rd4, %rd2, %rd3;",
        "cvt.rn.f32.u32 %f0, %r5;",
        "mov.f32 %fa, 0f3F7FFFF0;",
        "mov.f32 %fb, 0f358637BD;",
        *begin,
        *before,
        "again:",
        *body,
        "sub.u32 %r1, %r1, 1;",
        "setp.ne.u32 %p1, %r1, 0;",
        "@%p1 bra again;",
        *after,
        *total,
        "st.global.f32 [%rd4], %f0;",
        "ret;",
    ]
    head = f".version 6.0\n.target sm_50\n.address_size 64\n\n.visible .entry {name}(\n"
    text = "\n".join(f"    {line}" if not line.endswith(":") else line for line in lines)
    return f"{head}    .param .u64 slots,\n    .param .u32 loops\n)\n{{\n{text}\n}}\n"


CLOCK_PTX = _ptx(
    "gpufleet_clock", 1, _CLOCK_TIMES, ["mov.u64 %rd5, %clock64;"],
    ["mov.u64 %rd6, %clock64;", "sub.s64 %rd7, %rd6, %rd5;", "cvt.u32.u64 %r2, %rd7;",
     "st.global.u32 [%rd4+4], %r2;"],
)  # fmt: skip
"""One chain, so that nothing runs beside it; beside the sum, the cycles it took."""

FMA_PTX = _ptx("gpufleet_fma", _CHAINS, _TIMES, [], [])
"""So many chains that no unit waits for a result; the sum has to come out the same each time."""


class _Kernel:
    """One of the two, in launches of about the wanted length."""

    def __init__(self, session: Session, ptx: str, name: str, threads: int, blocks: int) -> None:
        self._session = session
        self._function = session.kernel(ptx, name)
        self._threads, self._blocks = threads, blocks
        self._size = 8 * threads * blocks
        self._slots = session.memory(self._size, 0)
        self.loops = 256

    def run_ms(self) -> float:
        """Launch once; how long it took."""
        slots, loops = c_uint64(self._slots.value), c_uint(self.loops)
        return self._session.timed_ms(
            lambda: self._session.launch(self._function, self._blocks, self._threads, slots, loops)
        )

    def results(self) -> bytes:
        """All slots, which are then empty again."""
        found = self._session.read(self._slots, self._size)
        self._session.fill(self._slots, self._size, 0)
        return found

    def fit(self, launch_ms: float) -> None:
        """As many loops as take that long at the clock of now, found in two steps."""
        for _ in range(2):
            per_loop = self.run_ms() / self.loops
            self.loops = max(1, min(1 << 22, int(launch_ms / per_loop)))

    def warm_up(self, launch_ms: float) -> None:
        """Until the clock has settled."""
        self.fit(launch_ms)
        _settle(self.run_ms)
        self.fit(launch_ms)
        self.results()


def _clock(session: Session, params: Mapping[str, Value]) -> list[float]:
    threads, launch_ms = 32, float(params["launch_ms"])
    kernel = _Kernel(session, CLOCK_PTX, "gpufleet_clock", threads, session.processors())
    kernel.warm_up(launch_ms)
    rates = []
    for _ in range(int(params["repeats"])):
        took_ms = kernel.run_ms()
        cycles = memoryview(kernel.results()).cast("I")[1 :: 2 * threads].tolist()
        if not all(cycles):
            raise Corrupt("a processor counted no cycles")
        rates.append(median(cycles) / took_ms / 1e3)
    return rates


def _fma(session: Session, params: Mapping[str, Value]) -> list[float]:
    blocks = session.processors() * _BLOCKS_PER_PROCESSOR
    kernel = _Kernel(session, FMA_PTX, "gpufleet_fma", _THREADS, blocks)
    kernel.warm_up(float(params["launch_ms"]))
    work = 2.0 * blocks * _THREADS * _CHAINS * _TIMES * kernel.loops
    rates, first = [], b""
    for _ in range(int(params["repeats"])):
        rates.append(work / kernel.run_ms() / 1e9)
        results = kernel.results()
        first = first or results
        if results != first:
            wrong = sum(results[at : at + 8] != first[at : at + 8] for at in range(0, len(first), 8))
            raise Corrupt(f"the same work gave other bits in {wrong} of {len(first) // 8} threads")
    if not any(first):
        raise Corrupt("no thread wrote a result")
    return rates


_BENCHES: dict[str, tuple[Callable[[Session, Mapping[str, Value]], list[float]], str]] = {
    "h2d": (_host_to_device, "GB/s"),
    "d2h": (_device_to_host, "GB/s"),
    "hbm": (_device_copy, "GB/s"),
    "clock": (_clock, "MHz"),
    "fma": (_fma, "TFLOPS"),
}
