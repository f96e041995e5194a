"""From findings to incidents: one cause, one incident, one number that a person can say.

Cause chain: a silent node explains everything on it; a driver that hangs, is not loaded or does not fit its
library everything on its cards; a hung card, and then a missing one, everything on that card. What happens to
one card is one incident; several cards that one rule flags on one node at the same time are one. Numbers only
grow and survive restarts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb

from gpufleet_collector.findings import Finding, Policy

REOPEN = timedelta(minutes=30)
"""The same cause this soon after clearing is the same incident."""

ABSORB = timedelta(minutes=10)
"""A cause that shows later than its effects takes over incidents this young."""

TOGETHER = timedelta(minutes=2)
"""Cards, or ports, of one node that one rule flags within this time have one cause."""

PARTS = ("gpu:", "port:")
"""Parts of a node of which several may have one cause, and one several findings."""


@dataclass(slots=True)
class Incident:
    """A row of table `incident`."""

    number: int
    cause_rule: str
    node: str
    entity: str
    state: str
    severity: str
    title: str
    opened_at: datetime
    updated_at: datetime
    resolved_at: datetime | None
    cause: str | None
    reopened: int
    stored: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of table `incident_log`."""

    number: int
    logged_at: datetime
    what: str
    finding: int | None
    text: str


class Incidents:
    """Open incidents and those that may still be re-opened; changed in memory, written by `save`."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies
        self._known: dict[int, Incident] = {}
        self._members: dict[int, dict[int, Finding]] = {}
        self._next = 1
        self._changed: dict[int, Incident] = {}
        self._log: list[Entry] = []
        self._noted_at = datetime.min
        self.moved: dict[int, Finding] = {}
        """Findings that another incident took over since the last `save`; their rows change too."""

    def load(self, read: duckdb.DuckDBPyConnection, findings: Iterable[Finding], as_of: datetime) -> None:
        """Take what is stored."""
        rows = read.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM live.incident WHERE state = 'open' OR resolved_at >= ?",
            [as_of - REOPEN],
        ).fetchall()
        self._known = {row[0]: _from_row(row) for row in rows}
        last = read.execute("SELECT coalesce(max(number), 0) FROM live.incident").fetchone()
        self._next = (last[0] if last else 0) + 1
        self._members, self._changed, self._log, self.moved = {}, {}, [], {}
        for finding in findings:
            if finding.incident is not None and finding.state != "resolved":
                self._members.setdefault(finding.incident, {})[finding.id] = finding

    def take(self, finding: Finding, changed: str, as_of: datetime) -> None:
        """Note what happened to a finding: `changed` as `findings.step` said it."""
        policy = self._policies.get(finding.rule)
        if policy is None or policy.shadow:
            return
        if changed == "fired":
            self._fired(finding, policy, as_of)
        incident = self._known.get(finding.incident) if finding.incident is not None else None
        if incident is None:
            return
        what = _WORDS.get(changed)
        if what:
            self._note(incident, as_of, what, finding.id, f"{policy.title}: {finding.reason}")
        if finding.verdict == "crit" and incident.severity != "crit" and finding.state != "resolved":
            incident.severity = "crit"
            self._touch(incident, as_of)
        if changed == "resolved":
            self._resolved(incident, finding, as_of)

    def closed(self, number: int, at: datetime, cause: str) -> None:
        """A person closed it, and its rows say so already."""
        incident = self._known.get(number)
        self._members.pop(number, None)
        if incident is not None:
            incident.state, incident.resolved_at, incident.cause, incident.updated_at = (
                "resolved",
                at,
                cause,
                at,
            )

    def save(self, write: duckdb.DuckDBPyConnection) -> None:
        """Write what changed since the last call."""
        for incident in self._changed.values():
            values = [getattr(incident, name) for name in _COLUMNS]
            if incident.stored:
                sets = ", ".join(f"{name} = ?" for name in _COLUMNS[1:])
                write.execute(f"UPDATE live.incident SET {sets} WHERE number = ?", [*values[1:], values[0]])
            else:
                marks = ", ".join("?" for _ in values)
                write.execute(f"INSERT INTO live.incident ({', '.join(_COLUMNS)}) VALUES ({marks})", values)
            incident.stored = True
        if self._log:
            columns = [[getattr(entry, name) for entry in self._log] for name in _LOG_COLUMNS]
            cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _LOG_COLUMNS.items())
            write.execute(f"INSERT INTO live.incident_log BY NAME SELECT {cells}", columns)
        self._changed, self._log, self.moved = {}, [], {}

    def forget(self, as_of: datetime) -> None:
        """Let go of incidents that can no longer be re-opened."""
        for number, one in list(self._known.items()):
            if one.resolved_at is not None and as_of - one.resolved_at > REOPEN:
                del self._known[number]
                self._members.pop(number, None)

    def _fired(self, finding: Finding, policy: Policy, as_of: datetime) -> None:
        incident = self._cause_of(finding, policy, as_of) or self._effects_of(finding, policy, as_of)
        if incident is None:
            incident = self._reopened(finding, as_of)
        if incident is None:
            incident = Incident(
                self._next, finding.rule, finding.node, finding.entity, "open", finding.verdict,
                _title(policy, finding), as_of, as_of, None, None, 0,
            )  # fmt: skip
            self._next += 1
            self._known[incident.number] = incident
            self._note(incident, as_of, "opened", finding.id, incident.title)
        finding.incident = incident.number
        self._members.setdefault(incident.number, {})[finding.id] = finding
        self._touch(incident, as_of)

    def _cause_of(self, finding: Finding, policy: Policy, as_of: datetime) -> Incident | None:
        """An open incident that already explains this finding."""
        place = rank(policy, finding.entity)
        for incident in sorted(self._open(finding.node), key=lambda one: one.number):
            cause = self._policies.get(incident.cause_rule)
            above = rank(cause, incident.entity) if cause else _LAST
            young = as_of - incident.opened_at <= ABSORB
            if above < place and self._explained(incident, finding, policy):
                return incident
            on_it = any(member.entity == finding.entity for member in self._active(incident))
            if on_it and finding.entity.startswith(PARTS) and (above <= place or young):
                if above > place:
                    self._take_over(incident, finding, policy)
                return incident
            same = incident.cause_rule == finding.rule and incident.entity.startswith(PARTS)
            if same and finding.entity.startswith(PARTS) and as_of - incident.opened_at <= TOGETHER:
                return incident
        return None

    def _effects_of(self, finding: Finding, policy: Policy, as_of: datetime) -> Incident | None:
        """A young open incident that this finding explains and takes over; further ones are merged in."""
        young = [
            incident
            for incident in sorted(self._open(finding.node), key=lambda one: one.number)
            if as_of - incident.opened_at <= ABSORB
            and _explains(policy, finding, incident.entity, self._policies.get(incident.cause_rule))
        ]
        if not young:
            return None
        first = young[0]
        self._take_over(first, finding, policy)
        for other in young[1:]:
            for member in list(self._active(other)):
                member.incident = first.number
                self.moved[member.id] = member
                self._members.setdefault(first.number, {})[member.id] = member
            self._members.pop(other.number, None)
            self._close(other, f"same cause as INC-{first.number}", as_of)
        return first

    def _reopened(self, finding: Finding, as_of: datetime) -> Incident | None:
        for incident in sorted(self._known.values(), key=lambda one: -one.number):
            same = (incident.cause_rule, incident.node, incident.entity) == finding.key
            ended = incident.resolved_at
            if same and incident.state == "resolved" and ended is not None and as_of - ended <= REOPEN:
                incident.state, incident.resolved_at, incident.cause = "open", None, None
                incident.reopened += 1
                self._note(incident, as_of, "reopened", finding.id, finding.reason)
                return incident
        return None

    def _resolved(self, incident: Incident, finding: Finding, as_of: datetime) -> None:
        self._members.get(incident.number, {}).pop(finding.id, None)
        if incident.state != "open":
            return
        left = [one for one in self._active(incident) if one.rule in self._policies]
        if not left:
            self._close(incident, finding.cause or "", as_of)
        elif (incident.cause_rule, incident.entity) == (finding.rule, finding.entity):
            heir = min(left, key=lambda one: (self._rank(one), one.verdict != "crit", one.id))
            self._take_over(incident, heir, self._policies[heir.rule])
            self._note(incident, as_of, "cause_changed", heir.id, incident.title)

    def _explained(self, incident: Incident, finding: Finding, policy: Policy) -> bool:
        """Whether the cause of this incident is why `finding` fired."""
        causes = (
            one
            for one in self._active(incident)
            if (one.rule, one.entity) == (incident.cause_rule, incident.entity)
        )
        return any(_explains(self._policies.get(one.rule), one, finding.entity, policy) for one in causes)

    def _rank(self, finding: Finding) -> int:
        return rank(self._policies[finding.rule], finding.entity)

    def _close(self, incident: Incident, cause: str, as_of: datetime) -> None:
        incident.state, incident.resolved_at, incident.cause = "resolved", as_of, cause
        self._note(incident, as_of, "resolved", None, cause)

    def _take_over(self, incident: Incident, finding: Finding, policy: Policy) -> None:
        incident.cause_rule, incident.entity = finding.rule, finding.entity
        incident.title = _title(policy, finding)

    def _open(self, node: str) -> list[Incident]:
        return [one for one in self._known.values() if one.node == node and one.state == "open"]

    def _active(self, incident: Incident) -> Sequence[Finding]:
        return list(self._members.get(incident.number, {}).values())

    def _touch(self, incident: Incident, as_of: datetime) -> None:
        incident.updated_at = as_of
        self._changed[incident.number] = incident

    def _note(self, incident: Incident, as_of: datetime, what: str, finding: int | None, text: str) -> None:
        # a microsecond apart, so that sorting by time keeps the order of what one pass notes
        at = max(as_of, self._noted_at + timedelta(microseconds=1))
        self._noted_at = at
        self._log.append(Entry(incident.number, at, what, finding, text))
        self._touch(incident, as_of)


_COLUMNS = (
    "number", "cause_rule", "node", "entity", "state", "severity", "title", "opened_at", "updated_at",
    "resolved_at", "cause", "reopened",
)  # fmt: skip

_LOG_COLUMNS = {
    "number": "BIGINT",
    "logged_at": "TIMESTAMP",
    "what": "VARCHAR",
    "finding": "BIGINT",
    "text": "VARCHAR",
}


def _from_row(row: Sequence[object]) -> Incident:
    incident = Incident(**dict(zip(_COLUMNS, row, strict=True)))  # type: ignore[arg-type]
    incident.stored = True
    return incident


_WORDS = {
    "fired": "finding_fired",
    "relapsed": "finding_fired",
    "worse": "finding_worse",
    "recovering": "finding_recovering",
    "resolved": "finding_resolved",
}

_LAST = 5


def rank(policy: Policy, entity: str) -> int:
    """Place in the cause chain, causes first.

    Silent node, driver of a node, missing driver, hung card, missing card, all else.
    """
    if policy.covers == "node":
        return 0
    place = {"driver": 1, "card": 2}.get(policy.covers, _LAST)
    return place + 2 if place < _LAST and entity.startswith("gpu:") else place


def _explains(policy: Policy | None, cause: Finding, effect: str, of: Policy | None) -> bool:
    """Whether `cause`, of this policy, is why `effect` on the same node is in trouble by the policy `of`."""
    if policy is None or not policy.covers:
        return False
    if policy.covers == "node":
        return True
    if policy.covers == "driver" and cause.verdict != "crit":
        return False  # the cards still answer
    if cause.entity.startswith("gpu:"):
        return cause.entity == effect
    node_of_cards = of is not None and of.covers == "card" and not effect.startswith("gpu:")
    return effect.startswith("gpu:") or (policy.covers == "driver" and node_of_cards)


def _title(policy: Policy, finding: Finding) -> str:
    return f"{policy.title}: {finding.reason}"[:300]
