"""All-reduce over the cards of this host, or over hosts by a launcher, by NVIDIA's `nccl-tests`. GB/s.

The value is the bus bandwidth of the largest size: bytes over time, times 2 (n - 1) / n for n cards. The
convention says how many cards and bytes, and what of NCCL's choice (ring, tree, NVLS) the command took over: with
NVLS eight cards reach a third more than with a ring. A result that does not add up is none. The table is the same in all
versions; the JSON file of newer ones also holds the tool's environment, and is not asked for.
(NVIDIA/nccl-tests, doc/PERFORMANCE.md)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent import tool
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Part, Place

EVERY = 24 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu"] = "host"
CONVENTION = "busbw"
COST_S = 0.0
DEADLINE_S = 120.0
COMMAND = ("all_reduce_perf", "-b", "8G", "-e", "8G", "-g", "{cards}", "-n", "20", "-w", "5", "-c", "1")
PARAMS: Mapping[str, Value] = {"command": " ".join(COMMAND)}

_MOST = 20_000.0
_LABEL = re.compile(r"^(?:\[[\d,]+\]<std(?:out|err)>:|\s*\d+: )", re.MULTILINE)
"""What mpirun --tag-output and srun --label put before each line."""
_RANK = re.compile(r"^#\s+Rank\s+([0-9]{1,6})\s", re.MULTILINE)
_CHOICE = re.compile(r"\bNCCL_(ALGO|PROTO|NVLS_ENABLE)=([^\s,]+)")
_WRONG = re.compile(r"^#?\s*Out of bounds values\s*:\s*(\d+)\s+(\S+)", re.MULTILINE)
_LIBRARY = re.compile(r"nccl-library=(\d{4,6})\b")
_NCCL = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_CELL = r"\s+([0-9.]+|nan|-nan|inf|N/A|[0-9.]+e[+-]?[0-9]+)"
_ROW = re.compile(
    rf"^\s*([0-9]{{1,15}})\s+([0-9]+)\s+(\w+)\s+(sum|prod|min|max|avg|mulsum)(?:\s+(-?[0-9]+))?{8 * _CELL}\s*$"
)
_SIZES = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+(?:sum|prod|min|max|avg|mulsum)\b")


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Run it once; one result for the host."""
    if not at.command and len(at.cards) < 2:
        return [tool.row("unsupported", "GB/s", f"{len(at.cards)} cards: it takes two", CONVENTION)]
    command = [argument.replace("{cards}", str(len(at.cards))) for argument in at.command or COMMAND]
    chosen = choice(command)
    return tool.measured(at, command, ("GB/s", CONVENTION), lambda ran: parse(ran.out, chosen), on_cards=True)


def choice(command: Sequence[str]) -> str:
    """What the command's variables say of NCCL's choice, as a part of the convention: `_algo_ring`."""
    found = sorted({(name, value) for word in command for name, value in _CHOICE.findall(word)})
    return "".join(f"_{name}_{tool.word(value.replace('^', 'not_'), 20)}".lower() for name, value in found)


def parse(text: str, chosen: str = "") -> list[Part]:
    """What the tool printed, or the launcher that ran it.

    Args:
        text: Its standard output.
        chosen: See `choice`.

    Raises:
        BadTool: It cannot be read.
    """
    text = _LABEL.sub("", text)
    rows = []
    for line in text.splitlines():
        found = _ROW.match(line)
        if found:
            rows.append(found)
        elif _SIZES.match(line):
            raise tool.BadTool(f"a line of its table is garbled: {tool.one_line(line, 80)}")
    if not rows or "Avg bus bandwidth" not in text:  # its last line, in all versions
        raise tool.BadTool("its output is not whole")
    last = max(rows, key=lambda found: int(found[1]))
    if sum(found[1] == last[1] for found in rows) > 1:
        raise tool.BadTool("its output has several results of one size")
    ranks = {int(found) for found in _RANK.findall(text)}
    n, size = len(ranks), int(last[1])
    if n < 2 or ranks != set(range(n)):
        raise tool.BadTool(f"its output names {n} cards, not all of two or more")
    version = _version(text)
    convention = f"{CONVENTION}_{n}_cards_{size}_bytes{chosen}"
    wrong = [found for found in _WRONG.findall(text) if found[0].strip("0") or found[1] != "OK"]
    for found in rows:
        wrong += [(cell, "") for cell in (found[9], found[13]) if cell != "N/A" and not _none(cell)]
    if wrong:
        why = f"wrong results: {wrong[0][0]} {wrong[0][1]}"
        return [tool.row("failed", "GB/s", why, convention, version)]
    samples = tuple(_bandwidth(last, at, n) for at in (6, 10))
    return [Part("node:", BenchResult("ok", samples[0], "GB/s", "", samples), convention, version)]


def _none(cell: str) -> bool:
    """Whether a cell of column #wrong, or of the older `error`, says that nothing was wrong."""
    try:
        return 0 <= float(cell) < 1e-3
    except ValueError:
        return False


def _bandwidth(found: re.Match[str], at: int, n: int) -> float:
    """Bus bandwidth from the three cells that begin with group `at`: they must agree with each other.

    Raises:
        BadTool: They do not.
    """
    time_us, algorithm, bus = (tool.number(found[at + cell], _MOST if cell else 1e12) for cell in range(3))
    if time_us is None or algorithm is None or bus is None:
        cells = " ".join(found[at + cell] for cell in range(3))
        raise tool.BadTool(f"{cells} is no time and bandwidth")
    expected = int(found[1]) / time_us / 1e3
    if abs(algorithm - expected) > 0.05 * expected + 0.02 or (
        abs(bus - algorithm * 2 * (n - 1) / n) > 0.02 * bus + 0.02
    ):
        raise tool.BadTool(
            f"its numbers do not agree: {time_us:g} us, {algorithm:g} and {bus:g} GB/s, {n} cards"
        )
    return bus


def _version(text: str) -> str:
    """Of NCCL, on which the result depends; the tests only time it."""
    library = _LIBRARY.search(text)
    if library:
        major, rest = divmod(int(library[1]), 10_000 if len(library[1]) > 4 else 1000)
        return f"nccl{major}.{rest // 100}.{rest % 100}"
    said = _NCCL.search(text)
    return f"nccl{said[1]}" if said else ""
