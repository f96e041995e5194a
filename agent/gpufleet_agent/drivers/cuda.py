"""Benches on NVIDIA cards through the driver's own library, libcuda.so.1, and nothing else of CUDA.

One card or one pair per call: contexts and everything in them are made for one run and given back at its end,
whatever ends it. Each call is announced first, since any of them may not return.
"""

import ctypes
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from gpufleet.metric import Null, Value
from gpufleet_agent.drivers import BenchResult, Check, Progress, cuda_ptx, files

_Device = c_int
_Pointer = c_uint64
_Handle = c_void_p

SIGNATURES: dict[str, Sequence[type]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetByPCIBusId": (POINTER(_Device), c_char_p),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _Device),
    "cuCtxCreate_v2": (POINTER(_Handle), c_uint, _Device),
    "cuCtxDestroy_v2": (_Handle,),
    "cuCtxPushCurrent_v2": (_Handle,),
    "cuCtxPopCurrent_v2": (POINTER(_Handle),),
    "cuCtxSynchronize": (),
    "cuDeviceCanAccessPeer": (POINTER(c_int), _Device, _Device),
    "cuCtxEnablePeerAccess": (_Handle, c_uint),
    "cuCtxDisablePeerAccess": (_Handle,),
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
    "cuMemcpyPeerAsync": (_Pointer, _Handle, _Pointer, _Handle, c_size_t, _Handle),
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

_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76
_OUT_OF_MEMORY, _UNAVAILABLE, _NO_PEER = 2, 46, 217
_CANNOT = {
    34: "only the driver's stub of libcuda is there",
    100: "the driver shows CUDA no card",
    101: "the driver does not show CUDA this card",
    209: "the driver does not compile for this card",
    _NO_PEER: "neither NVLink nor PCIe lets one of the cards reach the other's memory",
    222: "the driver does not compile this PTX",
    801: "not supported",
    804: "the driver is too new or too old for this library",
}

_MIB = 1 << 20
_TURN_MS = 50.0
"""Work is handed to the card in pieces of at most about this long, and between them we look around."""

_SETTLE_MOST, _SETTLE_MOST_MS, _SETTLED, _WITHIN = 25, 500.0, 3, 0.02
_THREADS, _WARP, _BLOCKS_PER_PROCESSOR, _GEMM_BLOCKS_PER_PROCESSOR = 256, 32, 4, 2
_SMALL = (4 << 10, 64 << 10, 1 << 20)
"""Copies between cards that are looked at byte by byte, before the large ones are timed."""


class CudaError(Exception):
    """A call failed.

    Attributes:
        number: The CUresult.
    """

    def __init__(self, call: str, number: int, name: str) -> None:
        super().__init__(f"{call}: {name or number}")
        self.number = number


class Corrupt(Exception):
    """The card gave back other bits than it must. The reason begins with the word that rules look for."""

    def __str__(self) -> str:
        return f"corrupt: {super().__str__()}"


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

    Attributes:
        convention: How the run measured, where that is not the bench's one way.
    """

    def __init__(self, cuda: Cuda, pci: str, check: Check) -> None:
        self._cuda = cuda
        self._pci = pci
        self._check = check
        self._held = ExitStack()
        self._device = _Device()
        self._context = _Handle()
        self.convention = ""
        self._stream = _Handle()
        self._events = (_Handle(), _Handle())

    def __enter__(self) -> Self:
        """Take the card."""
        try:
            call = self._cuda.call
            call("cuInit", 0)
            call("cuDeviceGetByPCIBusId", byref(self._device), self._pci.encode())
            self._check()
            call("cuCtxCreate_v2", byref(self._context), _SCHED_BLOCKING, self._device)
            self._give_back("cuCtxDestroy_v2", self._context)
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
        return min(4096, max(1, self._attribute(_PROCESSORS)))

    def architecture(self) -> int:
        """Major * 10 + minor, e.g. 90."""
        return self._attribute(_MAJOR) * 10 + self._attribute(_MINOR)

    def _attribute(self, which: int) -> int:
        value = c_int()
        self._cuda.call("cuDeviceGetAttribute", byref(value), which, self._device)
        return value.value

    def beside(self, pci: str) -> "Peer":
        """The other card of a pair, which this one may write to.

        Raises:
            CudaError: It may not, or a call failed.
        """
        call, device, can = self._cuda.call, _Device(), c_int()
        call("cuDeviceGetByPCIBusId", byref(device), pci.encode())
        call("cuDeviceCanAccessPeer", byref(can), self._device, device)
        if not can.value:
            raise CudaError("cuDeviceCanAccessPeer", _NO_PEER, "no")
        self._check()
        there = _Handle()
        call("cuCtxCreate_v2", byref(there), _SCHED_BLOCKING, device)
        self._give_back("cuCtxDestroy_v2", there)
        call("cuCtxPopCurrent_v2", byref(_Handle()))  # a new context is the current one
        self._check()
        call("cuCtxEnablePeerAccess", there, 0)
        self._give_back("cuCtxDisablePeerAccess", there)
        return Peer(self._cuda, self._held, self._context, there, self._stream)

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


class Peer:
    """The other card of a pair. What is done there is done in its own context.

    Args:
        cuda: The library.
        held: What is given back at the end of the session.
        here: The context of the card that sends.
        there: Of this one.
        stream: Of the card that sends.
    """

    def __init__(self, cuda: Cuda, held: ExitStack, here: _Handle, there: _Handle, stream: _Handle) -> None:
        self._cuda, self._held, self._stream = cuda, held, stream
        self._here, self._there = here, there

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._cuda.call("cuCtxPushCurrent_v2", self._there)
        try:
            yield
        finally:
            with suppress(CudaError):  # the context goes soon, and an error that is under way says more
                self._cuda.call("cuCtxPopCurrent_v2", byref(_Handle()))

    def memory(self, size: int) -> _Pointer:
        """Memory of this card, a multiple of four bytes, all zero."""
        pointer = _Pointer()

        def release() -> None:
            with suppress(CudaError), self._current():
                self._cuda.call("cuMemFree_v2", pointer)

        with self._current():
            self._cuda.call("cuMemAlloc_v2", byref(pointer), size)
            self._held.callback(release)
            self._cuda.call("cuMemsetD32_v2", pointer, 0, size // 4)
            self._cuda.call("cuCtxSynchronize")  # the sender's stream does not wait for this card's work
        return pointer

    def copy_to(self, to: _Pointer, source: _Pointer, size: int) -> None:
        """From the sender's memory to this card's; returns at once."""
        self._cuda.call("cuMemcpyPeerAsync", to, self._there, source, self._here, size, self._stream)

    def read(self, source: _Pointer, size: int) -> bytes:
        """Bytes of this card's memory."""
        buffer = ctypes.create_string_buffer(size)
        with self._current():
            self._cuda.call("cuMemcpyDtoH_v2", buffer, source, size)
        return buffer.raw


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
    convention = "copied_once_anywhere" if near is not None and not near.bound else session.convention
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


def _peer_copy(session: Session, params: Mapping[str, Value]) -> list[float]:
    size, word = int(params["bytes"]), 0x6996_A55A
    here, source = session.pinned(_MIB), session.memory(size, word)
    pattern = _fill(here, _MIB)
    peer = session.beside(str(params["peer"]))
    target = peer.memory(size)
    session.timed_ms(lambda: session.copy_in(source, here, len(pattern)))
    for length in (*(one for one in _SMALL if one < size), size):
        session.timed_ms(partial(peer.copy_to, target, source, length))
        if peer.read(target, min(length, len(pattern))) != pattern[:length]:
            raise Corrupt(f"of {length} bytes sent, others arrived on {params['peer']}")
    rates = _copies(session, params, 1, lambda: peer.copy_to(target, source, size))
    last = peer.read(_Pointer(target.value + size - 4096), 4096)
    if peer.read(target, len(pattern)) != pattern or last != word.to_bytes(4, "little") * 1024:
        raise Corrupt(f"what arrived on {params['peer']} is not what was sent")
    return rates


# ---- kernels


class _Kernel:
    """One of them, in launches of about the wanted length."""

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
    kernel = _Kernel(session, cuda_ptx.CLOCK, "gpufleet_clock", threads, session.processors())
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
    kernel = _Kernel(session, cuda_ptx.FMA, "gpufleet_fma", _THREADS, blocks)
    kernel.warm_up(float(params["launch_ms"]))
    work = 2.0 * blocks * _THREADS * cuda_ptx.FMA_CHAINS * cuda_ptx.FMA_TIMES * kernel.loops
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


def _gemm(session: Session, params: Mapping[str, Value]) -> list[float]:
    architecture, blocks = session.architecture(), session.processors() * _GEMM_BLOCKS_PER_PROCESSOR
    multiply = cuda_ptx.multiply(architecture)
    session.convention = f"{multiply.name}_sm{architecture}"
    kernel = _Kernel(session, cuda_ptx.gemm(multiply), "gpufleet_gemm", _THREADS, blocks)
    kernel.warm_up(float(params["launch_ms"]))
    # once more than the loop runs, for the product that stays
    flop = multiply.flop * (kernel.loops + 1 / cuda_ptx.GEMM_TIMES) * blocks * _THREADS / _WARP
    rates, right = [], b""
    for _ in range(int(params["repeats"])):
        rates.append(flop / kernel.run_ms() / 1e9)
        right = _same(kernel.results(), blocks, right)
    return rates


def _same(results: bytes, blocks: int, right: bytes) -> bytes:
    """What every block has to give: what most of the first round gave.

    Args:
        results: A word per thread, all blocks; and then the processor, plus one, of each.
        blocks: How many.
        right: What they gave before; empty in the first round.

    Raises:
        Corrupt: One gave something else, or nothing.
    """
    size = len(results) // 2 // blocks
    given = [results[at : at + size] for at in range(0, size * blocks, size)]
    right = right or Counter(given).most_common(1)[0][0]
    places = memoryview(results).cast("I")[len(results) // 8 :: size // 4].tolist()
    if not all(places):
        raise Corrupt(f"{places.count(0)} of {blocks} blocks wrote no result")
    wrong = [place - 1 for one, place in zip(given, places, strict=True) if one != right]
    if wrong:
        where = ", ".join(map(str, sorted(set(wrong))[:8]))
        raise Corrupt(
            f"the same work gave other bits in {len(wrong)} of {blocks} blocks, on processors {where}"
        )
    return right


_BENCHES: dict[str, tuple[Callable[[Session, Mapping[str, Value]], list[float]], str]] = {
    "h2d": (_host_to_device, "GB/s"),
    "d2h": (_device_to_host, "GB/s"),
    "hbm": (_device_copy, "GB/s"),
    "clock": (_clock, "MHz"),
    "fma": (_fma, "TFLOPS"),
    "p2p": (_peer_copy, "GB/s"),
    "gemm": (_gemm, "TFLOPS"),
}
