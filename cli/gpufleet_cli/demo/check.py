"""`fleet demo --check`: was each scripted fault flagged by its rule, in time, and nothing else?"""

import csv
import io
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from gpufleet_cli import errors
from gpufleet_cli.client import Client
from gpufleet_cli.errors import FleetError
from gpufleet_cli.person import expand
from gpufleet_cli.verbs import sql

SETTLE_S = 10.0
"""How long false pages are still looked for once everything is found."""

LATE_S = 15.0
"""How long past its limit a fault is still waited for, so that late and never are told apart."""

FIRST_PASS_S = 30.0
"""How long the collector's judge may take to run for the first time."""

_FINDINGS = """
    select rule, node, entity, verdict, code, reason, fired_at, incident from live.finding
    where fired_at is not null order by fired_at, id
"""
_START = "select min(ts) as at from live.event where kind = 'agent_start'"


@dataclass(slots=True)
class Fault:
    """One fault on one entity that a rule must find.

    Attributes:
        node: Where.
        entity: `gpu:<UUID>`, `port:<device>/<port>`, or `node:` for the host, its parts and jobs.
        place: For people: gpu-001/3.
        kind: Of the fault.
        at: Seconds after the start.
        rule: The rule that must fire.
        within_s: How long that may take.
        delay_s: How long it took; None = not found.
    """

    node: str
    entity: str
    place: str
    kind: str
    at: float
    rule: str
    within_s: float
    delay_s: float | None = None

    @property
    def verdict(self) -> str:
        """found, late or missed."""
        if self.delay_s is None:
            return "missed"
        return "found" if self.delay_s <= self.within_s else "late"


@dataclass(slots=True)
class Outcome:
    """What the check saw."""

    faults: list[Fault]
    false_pages: list[Mapping[str, object]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every fault was found in time and nothing else fired."""
        return not self.false_pages and all(fault.verdict == "found" for fault in self.faults)


def expected(scenario: Path, inventory: bytes) -> list[Fault]:
    """The faults with `expect`, once per entity they hit.

    Args:
        scenario: One that the agent's package plays, so its shape needs no check here.
        inventory: The cards of its hosts, as CSV; hosts without cards are not in it.

    Raises:
        FleetError: The scenario cannot be read.
    """
    fleet, faults = _read(scenario)
    boards: dict[str, list[str]] = {name: [] for name in _node_names(fleet)}
    for row in csv.DictReader(io.StringIO(inventory.decode())):
        boards.setdefault(row["node"], []).append(row["uuid"])
    return [one for fault in faults if "expect" in fault for one in _entities(fault, boards)]


def check_rules(scenario: Path, client: Client) -> None:
    """Refuse a scenario that expects a rule which the collector does not have.

    Raises:
        FleetError: With the file, the key and the rules there are.
    """
    known = _rules(client)
    for index, fault in enumerate(_read(scenario)[1]):
        expect = fault.get("expect")
        rule = expect["rule"] if isinstance(expect, dict) else None
        if rule is not None and rule not in known:
            key = f"fault[{index}].expect.rule"
            text = f"{scenario}: key {key}: no rule {rule!r}: use one of {', '.join(known)}"
            raise FleetError("usage", text, "", errors.USAGE)


def _rules(client: Client) -> list[str]:
    """Every rule of the collector; the judge names them all in its first pass."""
    deadline = time.monotonic() + FIRST_PASS_S
    while True:
        known = [
            str(row[0]) for row in sql.ask(client, "select rule from live.rule order by 1", 0, 10.0).rows
        ]
        if known:
            return known
        if time.monotonic() > deadline:
            raise FleetError("demo", "the demo's collector judges nothing", "", errors.INTERNAL)
        time.sleep(0.1)


def _read(scenario: Path) -> tuple[Mapping[str, object], list[Mapping[str, object]]]:
    """Its `[fleet]` and its faults."""
    try:
        found = tomllib.loads(scenario.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError("usage", f"{scenario}: cannot be read: {error}", "", errors.USAGE) from None
    return found["fleet"], found.get("fault", [])


def _node_names(fleet: Mapping[str, object]) -> list[str]:
    """Every host, also those without cards: `nodes` is how many there are, or their names."""
    nodes = fleet["nodes"]
    if isinstance(nodes, str):
        return expand(nodes)
    count = int(str(nodes))
    digits = max(3, len(str(count)))
    return [f"{fleet.get('prefix', 'gpu-')}{number:0{digits}}" for number in range(1, count + 1)]


def _entities(fault: Mapping[str, object], boards: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    expect = fault["expect"]
    assert isinstance(expect, dict)
    patterns = expand(str(fault["node"]))
    for node, uuids in boards.items():
        if not any(fnmatchcase(node, pattern) for pattern in patterns):
            continue
        for index in _indices(fault.get("gpu"), len(uuids)):
            yield Fault(
                node,
                _entity(str(fault["kind"]), index, uuids),
                node if index is None else f"{node}/{index}",
                str(fault["kind"]),
                float(str(fault.get("at", 0))),
                str(expect["rule"]),
                float(str(expect["within_s"])),
            )


def _entity(kind: str, index: int | None, uuids: Sequence[str]) -> str:
    if index is None or kind == "data_starved":  # whoever waits for data is a job, or its node
        return "node:"
    # the port beside a card is a thing of its own
    return f"port:mlx5_{index}/1" if kind.startswith("port_") else f"gpu:{uuids[index]}"


def _indices(gpu: object, count: int) -> Sequence[int | None]:
    if gpu is None:
        return [None]
    if isinstance(gpu, int):
        return [gpu]
    return [int(str(index)) for index in gpu] if isinstance(gpu, list) else list(range(count))


class Check:
    """Looks at the collector's findings until the outcome is known."""

    def __init__(self, client: Client, faults: Sequence[Fault], seconds: float | None) -> None:
        self.outcome = Outcome(list(faults))
        self._client = client
        self._seconds = seconds
        self._began = time.monotonic()
        self._start: datetime | None = None
        self._settled_at: float | None = None
        self._last_s = max((fault.at + fault.within_s for fault in faults), default=0.0)

    def look(self) -> bool:
        """Look once; False when there is nothing more to wait for."""
        self.outcome.seconds = time.monotonic() - self._began
        if self._start is None:
            (row,) = self._rows(_START)
            self._start = _time(row["at"])
        if self._start is not None:
            self._match(self._start, self._rows(_FINDINGS))
        return not self._over()

    def _over(self) -> bool:
        passed = self.outcome.seconds
        if self._seconds is not None and passed >= self._seconds:
            return True
        if all(fault.delay_s is not None for fault in self.outcome.faults):
            self._settled_at = passed if self._settled_at is None else self._settled_at
            return passed >= self._settled_at + SETTLE_S
        return passed >= self._last_s + LATE_S

    def _match(self, start: datetime, findings: Sequence[Mapping[str, object]]) -> None:
        strange, explained = [], set()
        told: list[Fault] = []
        # a finding on a job names no host: it is of a fault that no other finding tells of, if there is one
        for finding in sorted(findings, key=_on_job):
            matching = [fault for fault in self.outcome.faults if _is(fault, finding)]
            untold = [fault for fault in matching if fault not in told] if _on_job(finding) else []
            fault = next(iter(untold or matching), None)
            fired = _time(finding["fired_at"])
            if fault is None or fired is None or fired < start + timedelta(seconds=fault.at):
                strange.append(finding)
                continue
            told.append(fault)
            explained.add(finding.get("incident"))
            if fault.delay_s is None:
                fault.delay_s = (fired - start).total_seconds() - fault.at
        # one cause, one incident: the Xid of a card that fell off the bus is no page of its own
        explained.discard(None)
        self.outcome.false_pages = [one for one in strange if one.get("incident") not in explained]

    def _rows(self, query: str) -> list[dict[str, object]]:
        result = sql.ask(self._client, query, 0, 10.0)
        return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


def _is(fault: Fault, finding: Mapping[str, object]) -> bool:
    """Whether this finding is of this fault: one of a host may be found on a part of it or on a job."""
    entity = str(finding["entity"])
    about = entity == fault.entity or (fault.entity == "node:" and not entity.startswith("gpu:"))
    where = _on_job(finding) or finding["node"] == fault.node  # a job may be on many hosts
    return about and where and fault.rule == finding["rule"]


def _on_job(finding: Mapping[str, object]) -> bool:
    return str(finding["entity"]).startswith("job:")


def _time(at: object) -> datetime | None:
    return datetime.fromisoformat(str(at).removesuffix("Z")) if at else None
