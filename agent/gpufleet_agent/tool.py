"""Running a measuring tool that the host has, and reading what it printed.

A tool is a stranger: it may hang, flood its output, start children or print half a result. It gets an
environment that we chose, a time and an amount of output; at the end, and when the run has to make way,
everything that it started is ended with it. What it printed becomes a value only where it can mean nothing
else.
"""

import ctypes
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpufleet_agent.drivers import BenchResult, Check, go_on
from gpufleet_agent.gate import Preempted
from gpufleet_agent.leash import leashed
from gpufleet_agent.measure import Part, Place

OUTPUT_BYTES = 4 << 20
"""A tool that prints more is ended: no result is as long."""

_ERROR_BYTES = 1 << 16
_LOOK_S = 0.05
_LEAVE_S = 0.3
"""So long a tool may take to end when it is asked to: dcgmi takes its diagnostic back from the daemon."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT = ("PATH", "LD_LIBRARY_PATH")
_SET = {"LC_ALL": "C", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "VERSION"}

_PR_SET_CHILD_SUBREAPER = 36


class NoTool(Exception):
    """It cannot be run here, and why."""


class BadTool(Exception):
    """It ran and gave no result, and why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a tool ended.

    Attributes:
        code: Its exit status; negative = signal.
        out: What it printed.
        err: The beginning of what it said on standard error.
        seconds: Time it took.
    """

    code: int
    out: str
    err: str
    seconds: float

    @property
    def why(self) -> str:
        """How it failed, in one line."""
        how = f"signal {-self.code}" if self.code < 0 else f"exit status {self.code}"
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return f"{how}: {one_line(lines[-1])}" if lines else how


class _Running:
    """What is ours now, for a thread that must end the process at once."""

    before: frozenset[int] | None = None
    ending = False


def locate(name: str) -> str:
    """Absolute path of a program, looked for in PATH unless it is a path.

    Raises:
        NoTool: There is none.
    """
    found = shutil.which(name, path=_environment()["PATH"])
    if found is None:
        where = "" if "/" in name else " in PATH"
        raise NoTool(f"no program {one_line(name)}{where}")
    return os.path.abspath(found)


def run(command: Sequence[str], deadline_s: float, check: Check = go_on) -> Ran:
    """Run a tool to its end, in an empty folder and in a session of its own.

    Args:
        command: Program and arguments; no shell.
        deadline_s: It is ended after this.
        check: Called at least every tenth of a second; what it raises ends the tool.

    Raises:
        NoTool: It cannot be started.
        BadTool: It took too long, or printed too much.
        Preempted: This process is about to end.
    """
    program = locate(command[0])
    libc = ctypes.CDLL(None)
    began = time.monotonic()
    before = frozenset(_children().get(os.getpid(), ()))
    with tempfile.TemporaryDirectory(prefix="gpufleet-", ignore_cleanup_errors=True) as folder:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what leaves its parents becomes ours, and is found
        _Running.before = before
        try:
            process = subprocess.Popen(
                leashed(program, *command[1:]),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=_environment() | {"HOME": folder, "TMPDIR": folder},
                cwd=folder, start_new_session=True,
            )  # fmt: skip
            try:
                out, err = _watch(process, began + deadline_s, check)
            finally:
                _end(process, before)
        except OSError as error:
            raise NoTool(f"{program}: {error.strerror}") from error
        finally:
            _Running.before = None
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    if _Running.ending:
        raise Preempted("told to stop")  # it did not end by itself, so how it ended says nothing
    ran = Ran(process.returncode, _text(out), _text(err), time.monotonic() - began)
    if ran.code and ran.err.startswith("cannot be run: "):
        raise NoTool(f"{program}: {one_line(ran.err)}")
    return ran


def end_at_once() -> None:
    """Kill a tool that runs, and all that it started: this process is about to end."""
    before = _Running.before
    _Running.ending = True
    if before is not None:
        _kill_family(before)


def one_line(text: str, most: int = 200) -> str:
    """Printable, short, and one line."""
    return "".join(letter if letter.isprintable() else " " for letter in text.strip())[:most]


def _environment() -> dict[str, str]:
    """All that a tool sees: another variable could change what it measures, or tell it a secret."""
    return {"PATH": _PATH} | {name: os.environ[name] for name in _KEPT if os.environ.get(name)} | _SET


def _watch(process: subprocess.Popen[bytes], until: float, check: Check) -> tuple[bytes, bytes]:
    """What it prints until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    kept = {process.stdout.fileno(): out, process.stderr.fileno(): err}
    poll = select.poll()
    for descriptor in kept:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    while True:
        check()
        ended = process.poll() is not None
        got = _drain(poll, kept, 0.0 if ended else _LOOK_S)
        if len(out) > OUTPUT_BYTES:
            raise BadTool(f"it printed more than {OUTPUT_BYTES >> 20} MiB")
        del err[_ERROR_BYTES:]
        if ended and not got:  # a child of it may keep the pipe open: that is not waited for
            return bytes(out), bytes(err)
        if time.monotonic() > until:
            raise BadTool("it had not ended by its deadline")


def _drain(poll: "select.poll", kept: dict[int, bytearray], wait_s: float) -> bool:
    """Take one piece of each pipe that has something; False = nothing came."""
    got = False
    for descriptor, _ in poll.poll(wait_s * 1000):
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            continue
        if data:
            got = True
            kept[descriptor] += data
        else:
            poll.unregister(descriptor)
    if not kept:
        time.sleep(wait_s)
    return got


def _end(process: subprocess.Popen[bytes], before: frozenset[int]) -> None:
    """End it and all that it started."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_S)
    _kill_family(before)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):  # one that is stuck in a driver is left behind
        process.wait(_LEAVE_S)


def _kill_family(before: frozenset[int]) -> None:
    """Kill every descendant of this process but the children that it had `before`, and theirs."""
    for _ in range(50):
        family = _family(before)
        for pid in family:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not family:
            return
        time.sleep(0.005)
        for pid in family:  # those that became our children by their parents' end
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _family(before: frozenset[int]) -> set[int]:
    children = _children()
    found: set[int] = set()
    left = [pid for pid in children.get(os.getpid(), ()) if pid not in before]
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, ())
    return found


def _children() -> dict[int, list[int]]:
    """Parent -> children, of every living process."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            # `4711 (any name) S 1 ...`
            words = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(words) > 1 and words[0] not in (b"Z", b"X"):
            found.setdefault(int(words[1]), []).append(int(name))
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\0", " ")


# ---- reading

_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_DOCUMENTS = 8
_OPENING, _NEXT = re.compile(r"^[ \t]*\{", re.MULTILINE), re.compile(r"\s*\{")


def number(value: object, most: float) -> float | None:
    """A measured quantity; None for one that is none: zero, negative, not finite, above `most`, no number."""
    if isinstance(value, str):
        found = float(value) if _NUMBER.fullmatch(value.strip()) else None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) < 1e18 else None
    else:
        found = None
    return found if found is not None and math.isfinite(found) and 0 < found <= most else None


def document(text: str, *keys: str) -> dict[str, object]:
    """The one JSON object in `text` that has one of `keys`; lines around it are warnings, and left out.

    Raises:
        BadTool: There is none, or several, or one that is cut short.
    """
    decoder = json.JSONDecoder(parse_constant=lambda name: None)
    found: list[dict[str, object]] = []
    at = 0
    for _ in range(_DOCUMENTS):
        start = _NEXT.match(text, at) or _OPENING.search(text, at)
        if start is None:
            break
        try:
            value, at = decoder.raw_decode(text, start.end() - 1)
        except (ValueError, RecursionError):
            # the rest of a broken document is no document either
            raise BadTool("its output is no whole JSON document") from None
        if isinstance(value, dict) and any(key in value for key in keys):
            found.append(value)
    if len(found) != 1:
        raise BadTool(f"its output has {len(found)} results, one is expected")
    return found[0]


def obj(value: object) -> dict[str, object]:
    """The object, or an empty one."""
    return value if isinstance(value, dict) else {}


def array(value: object) -> list[object]:
    """The array, or an empty one."""
    return value if isinstance(value, list) else []


def word(value: object, most: int = 40) -> str:
    """Text for a key: letters, digits, dots, dashes; empty when there is none."""
    text = value if isinstance(value, str) else ""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text.strip())[:most].strip("_")


def row(
    status: str, unit: str, reason: str, convention: str, version: str = "", entity: str = "node:"
) -> Part:
    """A result without a value."""
    return Part(entity, BenchResult(status, None, unit, one_line(reason)), convention, version)


def measured(
    at: Place,
    command: Sequence[str],
    usual: tuple[str, str],
    read: Callable[[Ran], list[Part]],
    *,
    on_cards: bool = False,
) -> list[Part]:
    """What a tool measured; why it did not is a result without a value.

    Args:
        at: Where, and for how long.
        command: Program and arguments.
        usual: Unit and convention of a run that gave none.
        read: Reads its output; BadTool says why it cannot, NoTool that the tool itself could not run.
        on_cards: It keeps the cards from others.
    """
    unit, convention = usual
    began = time.monotonic()
    try:
        ran = run(command, at.deadline_s, at.check)
    except NoTool as error:
        return [row("unsupported", unit, str(error), convention)]
    except BadTool as error:
        parts = [row("failed", unit, f"{one_line(command[0])}: {error}", convention)]
    else:
        try:
            parts = _settled(read(ran), ran)
        except NoTool as error:
            parts = [row("unsupported", unit, str(error), convention)]
        except BadTool as error:
            why = ran.why if ran.code else str(error)
            parts = [row("failed", unit, f"{one_line(command[0])}: {why}", convention)]
    seconds = time.monotonic() - began
    first = {part.entity: at for at, part in reversed(list(enumerate(parts)))}
    if len(first) > 1:
        first.pop("node:", None)
    return [
        replace(
            part,
            result=replace(
                part.result,
                seconds=seconds,
                gpu_seconds=seconds if on_cards and first.get(part.entity) == at else 0.0,
            ),
        )
        for at, part in enumerate(parts)
    ]


def _settled(parts: list[Part], ran: Ran) -> list[Part]:
    """The parts, without values when the tool ended with an error that none of them explains."""
    if not ran.code or any(part.result.status == "failed" for part in parts):
        return parts
    return [
        replace(part, result=BenchResult("failed", None, part.result.unit, ran.why))
        if part.result.status == "ok"
        else part
        for part in parts
    ]
