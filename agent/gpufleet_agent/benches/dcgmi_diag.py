"""NVIDIA's own diagnostic, `dcgmi diag`. A result per test and card: 1 = passed.

A test that was skipped or not run is unsupported, never passed; one that failed or warned is failed, and says
what the tool said. (NVIDIA/DCGM, JSON of versions 2 to 4)
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

from gpufleet.metric import Value
from gpufleet_agent import tool
from gpufleet_agent.drivers import BenchResult
from gpufleet_agent.measure import Part, Place

EVERY = 7 * 24 * 3600.0
VERSION = "1"
ON: Literal["host", "gpu"] = "host"
CONVENTION = "passed"
COST_S = 0.0
DEADLINE_S = 600.0
COMMAND = ("dcgmi", "diag", "-r", "2", "-j")
PARAMS: Mapping[str, Value] = {"command": " ".join(COMMAND)}

UNIT = "passed"

_TOP = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
_RANK = {"pass": 1, "skip": 0, "not run": 0, "warn": 2, "fail": 3}
_CARD = re.compile(r"^\|\s*(\d+)\s*\|.*?Device UUID:\s*(GPU-[0-9A-Fa-f-]{36})", re.MULTILINE | re.DOTALL)
_REFUSED = re.compile(r"Unable to run diagnostic on unsupported .*")
_BLOCK = re.compile(r"^(?=\|\s*\d+\s*\|)|^\+", re.MULTILINE)


def run(at: Place, params: Mapping[str, Value]) -> list[Part]:
    """Ask which card is which, then run it once."""
    command = at.command or COMMAND
    program = command[0] if os.path.basename(command[0]) == "dcgmi" else "dcgmi"
    try:
        ran = tool.run([program, "discovery", "-l"], min(30.0, at.deadline_s), at.check)
        cards = {number: at_uuid for number, at_uuid in discovered(ran.out).items() if not ran.code}
    except (tool.NoTool, tool.BadTool):
        cards = {}
    return tool.measured(at, command, (UNIT, CONVENTION), lambda ran: _read(ran, cards), on_cards=True)


def _read(ran: tool.Ran, cards: Mapping[str, str]) -> list[Part]:
    try:
        return parse(ran.out, cards)
    except tool.BadTool:
        refused = _REFUSED.search(f"{ran.out}\n{ran.err}")
        if refused:
            raise tool.NoTool(refused[0]) from None
        raise


def discovered(text: str) -> dict[str, str]:
    """DCGM's number of each card -> its entity, as `dcgmi discovery -l` prints."""
    found = {}
    for block in _BLOCK.split(text):
        card = _CARD.match(block)
        if card:
            found[card[1]] = f"gpu:GPU-{card[2][4:].lower()}"
    return found if len(set(found.values())) == len(found) else {}


def parse(text: str, cards: Mapping[str, str]) -> list[Part]:
    """What the tool printed with -j.

    Args:
        text: Its standard output.
        cards: DCGM's number of a card -> its entity.

    Raises:
        BadTool: It cannot be read.
    """
    whole = tool.document(text, *_TOP)
    said = tool.obj(next(whole[key] for key in _TOP if key in whole))
    version = tool.word(tool.obj(whole.get("metadata")).get("version")) or tool.word(said.get("version"))
    error = said.get("runtime_error") or whole.get("runtime_error")
    if error:
        raise tool.BadTool(tool.one_line(str(error)))
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for category in tool.array(said.get("test_categories")):
        for test in map(tool.obj, tool.array(tool.obj(category).get("tests"))):
            name = tool.word(test.get("name")).lower()
            for result in map(tool.obj, tool.array(test.get("results"))):
                status, why = str(result.get("status")).strip().lower(), _why(result)
                for entity, label in _entities(result, cards):
                    key, now = (entity, name), (status, f"{label}{why}")
                    if key not in found or _rank(status) > _rank(found[key][0]):
                        found[key] = now
    if not found or not all(name for _, name in found):
        raise tool.BadTool("its output has no test in it")
    return [_part(entity, name, status, why, version) for (entity, name), (status, why) in found.items()]


def _part(entity: str, name: str, status: str, why: str, version: str) -> Part:
    convention = f"{CONVENTION}:{name}"
    if status == "pass":
        return Part(entity, BenchResult("ok", 1.0, UNIT, "", (1.0,)), convention, version)
    told = "unsupported" if status in ("skip", "not run") else "failed"
    return tool.row(told, UNIT, f"{name}: {status}{': ' if why else ''}{why}", convention, version, entity)


def _rank(status: str) -> int:
    """How bad; what is not known is the worst."""
    return _RANK.get(status, 4)


def _entities(result: Mapping[str, object], cards: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a result is of: entities, each with words for those that have no entity here."""
    if "entity_id" in result:
        group, numbers = str(result.get("entity_group") or "GPU"), [str(result["entity_id"])]
    else:
        group = "GPU"
        many = result.get("gpu_ids", result.get("gpu_id"))
        numbers = [] if many is None else [one.strip() for one in str(many).split(",") if one.strip()]
    if not numbers:
        return [("node:", "")]
    if group.upper() != "GPU":
        return [("node:", f"{tool.one_line(group, 20)} {tool.one_line(one, 20)}: ") for one in numbers]
    return [
        (cards[one], "") if one in cards else ("node:", f"card {tool.one_line(one, 20)}: ") for one in numbers
    ]


def _why(result: Mapping[str, object]) -> str:
    """What it says about a result: the first warning, else its information."""
    for key in ("warnings", "warning", "info"):
        value = result.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict):
            first = first.get("warning") or first.get("message")
        if first:
            return tool.one_line(str(first))
    return ""
