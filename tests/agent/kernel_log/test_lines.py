"""Every line of tests/fixtures/kernel_log/lines.toml becomes what the file says."""

import json
import tomllib
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from gpufleet.event import KINDS, Event
from gpufleet_agent.kernel_lines import pci_address


class Line(msgspec.Struct):
    text: str
    events: list[str]
    detail: dict[str, object] = {}
    absent: list[str] = []
    count: int = 1


FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/kernel_log/lines.toml"
LINES = msgspec.convert(tomllib.loads(FIXTURE.read_text())["line"], list[Line])


class Machine(Protocol):
    def events(self, *texts: str) -> list[Event]: ...


def short(event: Event) -> str:
    severity = json.loads(event.detail)["severity"]
    return f"{event.kind} {event.entity} {event.code} {severity}"


@pytest.mark.parametrize("line", LINES, ids=[line.text[:60] for line in LINES])
def test_line(machine: Machine, line: Line) -> None:
    events = machine.events(line.text)
    assert sorted(map(short, events)) == sorted(line.events)
    for event in events:
        assert event.message
        if short(event) == line.events[0]:
            detail = json.loads(event.detail)
            assert {key: detail.get(key) for key in line.detail} == line.detail
            assert not set(line.absent) & set(detail)
            assert event.count == line.count


def test_every_kind_of_the_kernel_log_has_a_line() -> None:
    told = {event.split()[0] for line in LINES for event in line.events}
    assert told <= set(KINDS)
    assert told == {
        "xid", "xid_unparsed", "recovery_action", "gpu_lost", "gpu_init_failed", "sxid", "aer", "mce", "edac",
        "nfs", "oom", "hung_task", "lockup", "io_error",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:6A:00", "0000:6a:00.0"),
        ("00000000:6A:00.0", "0000:6a:00.0"),
        ("0000000D:00:00.0", "000d:00:00.0"),
        ("10000:e1:00.7", "10000:e1:00.7"),
        ("6a:00", "0000:6a:00.0"),
        ("0000:6a:00.8", ""),
        ("0000:6a", ""),
        ("٠٠٠٠:6a:00", ""),
        ("", ""),
    ],
)
def test_addresses_have_one_spelling(text: str, address: str) -> None:
    assert pci_address(text) == address
