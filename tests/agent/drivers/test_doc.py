"""docs/drivers.md says of every column where it is from, and names no call that is not made."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gpufleet_agent.probes import PROBES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/drivers.md").read_text()
SECTIONS = {
    "gpu": "### `gpu`",
    "gpu_health": "### `gpu_health`",
    "pci": "`pci`, every",
    "host": "`host`, every",
    "loader": "`loader`, every",
}


def section(name: str) -> str:
    text = PAGE[PAGE.index(SECTIONS[name]) :]
    return text[: text.index("\n\n", text.index("|---"))]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_column_has_its_source(name: str) -> None:
    rows = [line.split("|") for line in section(name).splitlines() if line.startswith("| `")]
    words = {word for row in rows for word in named(row[1])}
    columns = {metric.name for metric in PROBES[name].METRICS}
    if name == "gpu_health":
        columns -= {"gpu_uuid", "gpu_index", "pci", "state", "driver_epoch"}  # as in gpu
    assert {column for column in columns if not any(fnmatch(column, word) for word in words)} == set()
    assert {word for word in words if not any(fnmatch(column, word) for column in columns)} == set()
    assert f"every {PROBES[name].EVERY:g} s" in section(name)


def test_every_call_that_is_named_is_made_and_the_other_way_round() -> None:
    source = "".join(path.read_text() for path in (ROOT / "agent/gpufleet_agent/drivers").glob("nvml*.py"))
    made = set(re.findall(r'"nvmlDevice(?:Get)?(\w+)"', source))
    made -= {"Count", "FieldValues", "HandleByPciBusId"}  # not about a column
    text = PAGE[PAGE.index("## NVML") : PAGE.index("**Not read**")]
    words = {word.removeprefix("nvmlDevice") for word in named(text) if not word.startswith("nvmlDeviceGet")}
    words |= {f"ComputeRunningProcesses{word}" for word in words if word == "_v2"}
    assert made - words == set()
    calls = {word for word in words if re.fullmatch(r"[A-Z]\w+", word)}
    assert calls - made == set()


def test_every_field_number_is_named() -> None:
    text = PAGE[PAGE.index("### `gpu`") : PAGE.index("Inventory, at a start")]
    numbers: set[int] = set()
    for line in text.splitlines():
        cells = re.sub(r"`[^`]*`", "", line).split("|")
        if len(cells) < 4:
            continue
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", "|".join(cells[2:4]).replace("version 2", "")):
            numbers |= set(range(int(first), int(last or first) + 1))
    source = "".join(path.read_text() for path in (ROOT / "agent/gpufleet_agent/drivers").glob("nvml*.py"))
    fields = {int(number) for number in re.findall(r"Field\((\d+), ", source)}
    for places in re.findall(r'_places\("\w+", ([\d, ]+)\)', source):
        fields |= {int(number) for number in places.split(",")}
    assert fields - numbers == set()
