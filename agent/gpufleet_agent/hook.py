"""`fleet-agent bench --quick`: a few benches for a scheduler's hook, between two jobs or before the first.

It ends by its deadline and within a second of SIGTERM, also when a driver call does not return: benches run
in a child, which is left behind then. It asks the same gate as the agent, and an agent's bench makes way.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gpufleet.metric import Value
from gpufleet_agent.bench import Settings
from gpufleet_agent.benches import METRICS
from gpufleet_agent.child import module_command
from gpufleet_agent.pipe import Frames, PipeError
from gpufleet_agent.probe import Sweep

BENCHES = ("h2d", "clock")
"""About a second per card, and what most often differs between cards: the link and the clock."""

OK, BELOW, UNKNOWN = 0, 1, 3
"""Exit statuses; 2 is for wrong usage. BELOW also when a card failed or hung, UNKNOWN when one was not
judged."""

LOCK_S = 2.0
"""So long an agent's bench may take to make way."""

_AGAIN_S = 4.0
_LEAVE_S = 0.4
_EXIT_S = 0.5

Row = dict[str, Value | None]
_NAMES = tuple(metric.name for metric in METRICS)


class _Told(Exception):
    """SIGTERM."""


@dataclass(slots=True)
class Outcome:
    """What came of it.

    Attributes:
        rows: Results as in table `bench`, with `floor` and `below`.
        ended: Why it was cut short; empty = it was not.
    """

    rows: list[Row] = field(default_factory=list)
    ended: str = ""

    @property
    def status(self) -> int:
        """For the shell."""
        # what failed for the host as a whole is the bench itself: it says nothing about a card
        cards = [row for row in self.rows if row.get("entity") != "node:"]
        if any(row["below"] or row["status"] in ("failed", "hung") for row in cards):
            return BELOW
        whole = self.rows and not self.ended and all(row["status"] == "ok" for row in self.rows)
        return OK if whole else UNKNOWN


def quick(
    settings: Callable[[str], Settings],
    floors: Mapping[str, float],
    deadline_s: float,
    benches: Sequence[str] = BENCHES,
    command: Sequence[str] = module_command("gpufleet_agent.bench"),
) -> Outcome:
    """Run the benches, one after the other. To be called in the main thread: SIGTERM ends it.

    Args:
        settings: Of the bench process, by the bench's name.
        floors: Least value of each bench.
        deadline_s: It returns by then.
        benches: Which.
        command: The bench program.
    """
    outcome = Outcome()
    until = time.monotonic() + deadline_s - _EXIT_S

    def told(number: int, frame: object) -> None:
        raise _Told

    before = signal.signal(signal.SIGTERM, told)
    try:
        for name in benches:
            rows = _run(command, settings(name), until)
            busy = [str(row["entity"]) for row in rows if row["status"] == "skipped"]
            if busy and time.monotonic() < until - _AGAIN_S:
                # the load of a job that has just ended is still in the averages
                done = [row for row in rows if row["status"] != "skipped"]
                fresh = [str(row["entity"]) for row in done]
                rows = done + _run(command, msgspec.structs.replace(settings(name), fresh=fresh), until)
            floor = floors.get(name)
            outcome.rows += [{**row, "floor": floor, "below": _below(row["value"], floor)} for row in rows]
    except _Told:
        outcome.ended = "told to stop"
    except TimeoutError:
        outcome.ended = f"not done within {deadline_s:g} s"
    finally:
        signal.signal(signal.SIGTERM, before)
    return outcome


def _below(value: Value | None, floor: float | None) -> bool:
    return isinstance(value, float) and floor is not None and value < floor


def _run(command: Sequence[str], settings: Settings, until: float) -> list[Row]:
    """The rows of one bench.

    Raises:
        TimeoutError: It was not done by then.
        _Told: SIGTERM.
    """
    child = subprocess.Popen(
        [*command, msgspec.json.encode(settings).decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    rows: list[Row] = []
    frames = Frames()
    try:
        while True:
            left = until - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                raise TimeoutError
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return rows
            for message in frames.feed(data):
                if isinstance(message, Sweep):
                    rows += [dict(zip(_NAMES, cells, strict=True)) for cells in message.rows]
    except PipeError:
        return rows
    finally:
        _leave(child)


def _leave(child: subprocess.Popen[bytes]) -> None:
    """Have it give back what it took; one that is stuck in a driver is left."""
    with suppress(OSError):
        child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_LEAVE_S)
    with suppress(OSError):
        child.kill()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
