"""What only systemd knows of the host: how many units failed, and whether the clock is synchronised.

The latter stands in for adjtimex(2), which a hardened unit may not call. Its own command line tools are
asked, rarely, and never waited for: the answer is taken at a later read.
"""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import files

EVERY_S = 300.0
DEADLINE_S = 30.0
SETTLE_S = 15.0
"""The first question waits until the agent is up."""

UNITS_FAILED = ("systemctl", "show", "--property=NFailedUnits", "--value")
SYNCHRONISED = ("timedatectl", "show", "--property=NTPSynchronized", "--value")

_NOT_ASKED = Null(Reason.NOT_READ, "not_asked_yet")
_TOO_LONG = Null(Reason.FAILED, "deadline")


class _Question:
    """One command that is run every five minutes; its last answer stays until the next."""

    def __init__(self, command: Sequence[str], parse: Callable[[str], Cell]) -> None:
        self._command = command
        self._parse = parse
        self._running: subprocess.Popen[str] | None = None
        self._due: float | None = None
        self._deadline = 0.0
        self.answer: Cell = _NOT_ASKED

    def go_on(self, now: float) -> None:
        """Take an answer that has come; ask again when it is time."""
        if self._due is None:
            self._due = now + SETTLE_S
        if self._running is not None:
            self._take(self._running, now)
        elif now >= self._due:
            self._due, self._deadline = now + EVERY_S, now + DEADLINE_S
            try:
                self._running = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                self.answer = files.why(error)

    def _take(self, running: subprocess.Popen[str], now: float) -> None:
        if running.poll() is None:
            if now >= self._deadline:
                self.answer = _TOO_LONG
                running.kill()  # what cannot be killed is not asked again
            return
        if running.returncode == 0 and running.stdout is not None:
            # a number or a word: it has fitted into the pipe
            self.answer = files.parsed(running.stdout.read(64).strip(), self._parse)
        else:
            self.answer = Null(Reason.FAILED, f"exit {running.returncode}")
        if running.stdout is not None:
            running.stdout.close()
        self._running = None


class Systemd:
    """Its manager and its clock service.

    Args:
        clock: Monotonic seconds.
        units_failed: The command that says how many units failed.
        synchronised: The command that says yes or no.
        here: Exists where systemd runs the host.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        units_failed: Sequence[str] = UNITS_FAILED,
        synchronised: Sequence[str] = SYNCHRONISED,
        here: Path = Path("/run/systemd/system"),
    ) -> None:
        self._clock = clock
        self._here = here
        self._questions = {
            "units_failed": _Question(units_failed, files.count),
            "clock_synchronised": _Question(synchronised, _yes),
        }

    def read(self, names: Iterable[str] = ("units_failed", "clock_synchronised")) -> Mapping[str, Cell]:
        """The newest answers to these questions; empty where systemd is not."""
        if not files.exists(self._here):
            return {}
        asked = {name: self._questions[name] for name in names}
        for question in asked.values():
            question.go_on(self._clock())
        return {name: question.answer for name, question in asked.items()}


def _yes(text: str) -> Cell:
    return {"yes": True, "no": False}[text]
