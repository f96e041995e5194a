"""The kernel's clock and systemd's answers: what is asked, of whom, and what stands for no answer."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.host import Machine
from gpufleet_agent.drivers.host_clock import COLUMNS, Timex, clock, kernel_timex
from gpufleet_agent.drivers.host_systemd import DEADLINE_S, EVERY_S, SETTLE_S, Systemd
from gpufleet_agent.probes import host as probe

if TYPE_CHECKING:
    from tests.agent.host.conftest import Clock

UNSYNC, NANO = 0x40, 0x2000


def cells(**told: int) -> dict[str, Cell]:
    values = {"offset": 0, "max_error_us": 1500, "estimated_error_us": 20, "status": NANO} | told
    return dict(clock(lambda: Timex(**values)))


def test_a_clock_that_is_kept_right() -> None:
    assert cells(offset=-1_250_000) == {
        "clock_synchronised": True,
        "clock_offset_s": -0.00125,
        "clock_error_estimate_s": 2e-5,
        "clock_error_max_s": 0.0015,
    }
    assert cells(offset=-1_250_000, status=0)["clock_offset_s"] == -1.25, "microseconds without STA_NANO"


@pytest.mark.parametrize(
    ("status", "max_error_us", "right"),
    [
        (UNSYNC, 16_000_000, False),  # as from boot on
        (UNSYNC | NANO, 9_000, True),  # chrony without rtcsync leaves the flag
        (NANO, 16_000_000, False),  # hours after the last correction
        (0, 15_999_999, True),
        (0, -1, False),
    ],
)
def test_the_largest_error_decides_and_not_the_flag(status: int, max_error_us: int, right: bool) -> None:
    assert cells(status=status, max_error_us=max_error_us)["clock_synchronised"] is right


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EFAULT, 0])
def test_T06_a_kernel_that_does_not_answer(number: int) -> None:
    def refuse() -> Timex:
        raise OSError(number, "no")

    found = clock(refuse)
    assert set(found) == set(COLUMNS)
    reason = Reason.NO_PERMISSION if number == errno.EPERM else Reason.FAILED
    assert set(found.values()) == {Null(reason, errno.errorcode.get(number, "failed"))}


def test_the_clock_of_this_machine_never_shows_below_another_root(tmp_path: Path) -> None:
    row = Machine(tmp_path).read()
    assert {row[name] for name in COLUMNS} == {Null(Reason.NOT_READ, "other_root")}
    assert row["units_failed"] == Null(Reason.NOT_READ, "no_systemd")


def test_this_very_kernel_answers() -> None:
    try:
        told = kernel_timex()
    except OSError as error:
        pytest.skip(f"this sandbox refuses adjtimex: {error}")
    assert 0 <= told.max_error_us <= 16_000_000
    row = Machine().read()
    for metric in probe.METRICS:
        if metric.name in COLUMNS:
            assert not isinstance(metric.check(row[metric.name]), Null), metric.name


@pytest.fixture
def systemd(tmp_path: Path, clock: "Clock") -> Iterator[Callable[..., Systemd]]:
    """Whose tools are these Python lines."""
    made: list[Systemd] = []

    def one(units: str, synchronised: str = "print('yes')") -> Systemd:
        units_failed, clock_kept = (
            (sys.executable, "-I", "-S", "-c", text) for text in (units, synchronised)
        )
        made.append(Systemd(clock, units_failed, clock_kept, here=tmp_path))
        return made[-1]

    yield one
    for question in (question for one_made in made for question in one_made._questions.values()):
        while question._running is not None:
            question._running.kill()
            question.go_on(clock())


NOT_YET = Null(Reason.NOT_READ, "not_asked_yet")
Make = Callable[..., Systemd]


def answered(systemd: Systemd, name: str = "units_failed") -> Cell:
    """Read until an answer is there: nothing is waited for inside."""
    until = time.monotonic() + 90
    while True:
        cell = systemd.read()[name]
        if cell != NOT_YET or time.monotonic() > until:
            return cell
        time.sleep(0.02)


def test_systemd_is_asked_when_the_agent_is_up_and_then_rarely(
    systemd: Make, clock: "Clock", tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    made = systemd(f"open({str(asked)!r}, 'a').write('x'); print(3)")
    assert made.read()["units_failed"] == NOT_YET
    clock.t += SETTLE_S
    assert answered(made) == 3
    assert answered(made, "clock_synchronised") is True
    for _ in range(5):
        made.read()
    assert asked.read_text() == "x"
    clock.t += EVERY_S
    made.read()
    until = time.monotonic() + 90
    while asked.read_text() != "xx" and time.monotonic() < until:
        time.sleep(0.02)
        made.read()
    assert asked.read_text() == "xx"
    assert answered(made) == 3


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("print('many')", Null(Reason.FAILED, "unparsable")),
        ("print('')", Null(Reason.FAILED, "unparsable")),
        ("print('9' * 100000)", Null(Reason.FAILED, "unparsable")),
        ("raise SystemExit(1)", Null(Reason.FAILED, "exit 1")),
    ],
)
def test_answers_that_are_none(systemd: Make, clock: "Clock", text: str, cell: Cell) -> None:
    made = systemd(text)
    made.read()
    clock.t += SETTLE_S
    if "100000" in text:  # more than the pipe holds: it never ends by itself
        made.read()
        clock.t += DEADLINE_S
        cell = Null(Reason.FAILED, "deadline")
    assert answered(made) == cell


def test_a_tool_that_hangs_is_not_waited_for(systemd: Make, clock: "Clock") -> None:
    made = systemd("import time; time.sleep(600)")
    made.read()
    clock.t += SETTLE_S
    begun = time.monotonic()
    made.read()
    clock.t += DEADLINE_S - 1
    assert made.read()["units_failed"] == NOT_YET
    clock.t += 1
    assert made.read()["units_failed"] == Null(Reason.FAILED, "deadline")
    assert time.monotonic() - begun < 60
    until = time.monotonic() + 90
    while made.read()["units_failed"] == Null(Reason.FAILED, "deadline") and time.monotonic() < until:
        time.sleep(0.02)  # until it is gone


def test_no_systemd_and_no_tool(tmp_path: Path, clock: "Clock") -> None:
    assert Systemd(clock, here=tmp_path / "none").read() == {}
    made = Systemd(clock, ("/no/such/tool",), ("/no/such/tool",), here=tmp_path)
    made.read()
    clock.t += SETTLE_S
    assert made.read()["units_failed"] == Null(Reason.NOT_SUPPORTED, "ENOENT")


def test_where_the_kernel_may_not_be_asked_systemd_says_whether_it_is_synchronised(
    systemd: Make, clock: "Clock", tmp_path: Path
) -> None:
    def refuse() -> Timex:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    made = systemd("print(0)", "print('no')")
    made.read()
    clock.t += SETTLE_S
    assert answered(made, "clock_synchronised") is False
    assert answered(made) == 0
    row = Machine(tmp_path, clock, ask_clock=refuse, systemd=made).read()
    assert row["clock_synchronised"] is False
    assert row["clock_error_max_s"] == Null(Reason.NO_PERMISSION, "EPERM")
    assert row["units_failed"] == 0
    kept = Machine(tmp_path, clock, ask_clock=lambda: Timex(0, 10, 1, NANO), systemd=made).read()
    assert kept["clock_synchronised"] is True, "the kernel's own word goes first"
