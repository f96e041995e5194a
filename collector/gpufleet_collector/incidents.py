"""From findings to incidents: one cause, one incident, one number that a person can say.

Cause chain: a silent node explains everything on it; a driver that hangs, is not loaded or does not fit its
library everything on its cards; a hung card, and then a missing one, everything on that card; a few rules
explain others beside them (`_ALSO`). What happens to one card is one incident; several parts that one rule
flags on one node at the same time are one. What hits enough nodes of one fault domain (domains.py) is one,
and when the collector suspects itself, all that went silent is. Numbers only grow and survive restarts; what
is one incident never becomes two again.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb

from gpufleet_collector.domains import LEAST, Domain, Domains
from gpufleet_collector.findings import Finding, Policy

REOPEN = timedelta(minutes=30)
"""The same cause this soon after clearing is the same incident; of several parts of a node, each is."""

ABSORB = timedelta(minutes=10)
"""A cause that shows later than its effects takes over incidents this young; so does a fault domain."""

TOGETHER = timedelta(minutes=2)
"""Parts of one node that one rule flags within this time have one cause."""

LATE = timedelta(minutes=30)
"""A node of a domain in trouble that follows the last one this soon belongs to it; a silent one always. Once
the trouble has come to rest, the domain must still be in it, and a card must fail in the same way."""

SPREAD = {"bandwidth_regression": timedelta(hours=2)}
"""Rules that see one cause over a longer time than `ABSORB`: each host runs its benches when it can."""

COLLECTOR = "(collector)"
"""The node of what the collector finds about itself."""

MERGED = "merged into INC-"
"""How the cause of an incident begins that another one took over."""


@dataclass(slots=True)
class Incident:
    """A row of table `incident`; number 0 until the pass that opened it is over."""

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
    members: dict[str, dict[int, Finding]] = field(default_factory=dict, compare=False, repr=False)
    """Its findings that are not resolved, by node and id."""
    again_at: datetime | None = field(default=None, compare=False)
    """When it was opened again, as its log has it."""

    @property
    def began_at(self) -> datetime:
        """Since when its trouble goes on: what is opened again is as young as what is opened."""
        return max(self.opened_at, self.again_at or self.opened_at)

    @property
    def domain(self) -> Domain | None:
        """The fault domain that it is about; None = a node or the collector."""
        return Domain.of(self.entity)

    @property
    def wide(self) -> bool:
        """It is about more than one node."""
        return self.node == COLLECTOR or len(self.members) > 1 or self.domain is not None

    @property
    def active(self) -> list[Finding]:
        """Its findings that are not resolved."""
        return [finding for found in self.members.values() for finding in found.values()]


@dataclass(slots=True)
class Entry:
    """A row of table `incident_log`."""

    incident: Incident
    logged_at: datetime
    what: str
    finding: int | None
    text: str

    @property
    def number(self) -> int:
        """Of its incident."""
        return self.incident.number


class Incidents:
    """Open incidents and those that may still be re-opened; changed in memory, written by `save`."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies
        self._noted_at = datetime.min
        self._begin({}, 1)

    def _begin(self, known: dict[int, Incident], following: int) -> None:
        self._known = known
        self._next = following
        self._fresh: dict[int, Incident] = {}
        """Opened in this pass, by `id`: what turns out to be part of another one never gets a number."""
        self._part_of: dict[int, tuple[Incident, Incident]] = {}
        """What was opened in this pass and given up, by `id`, and what it is part of."""
        self._grown: dict[int, Incident] = {}
        """In which a cause fired in this pass, by `id`."""
        self._holder: dict[int, Incident] = {}
        self._at: dict[str, dict[int, Incident]] = {}
        self._ended: dict[tuple[str, str, str], Incident] = {}
        self._was: dict[tuple[str, str, str], tuple[Incident, datetime]] = {}
        """By family, node and entity: in which incident a finding was, and when it was resolved."""
        self._things: dict[tuple[str, str], str] = {}
        self._changed: dict[int, Incident] = {}
        self._log: list[Entry] = []
        self.moved: dict[int, Finding] = {}
        """Findings that another incident took over since the last `save`; their rows change too."""

    def load(self, read: duckdb.DuckDBPyConnection, findings: Iterable[Finding], as_of: datetime) -> None:
        """Take what is stored."""
        rows = read.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM live.incident WHERE state = 'open' OR resolved_at >= ? "
            "ORDER BY number",
            [as_of - REOPEN],
        ).fetchall()
        last = read.execute("SELECT coalesce(max(number), 0) FROM live.incident").fetchone()
        self._begin({row[0]: _from_row(row) for row in rows}, (last[0] if last else 0) + 1)
        again = read.execute(
            "SELECT number, max(logged_at) FROM live.incident_log WHERE what = 'reopened' GROUP BY number"
        ).fetchall()
        for number, at in again:
            if number in self._known:
                self._known[number].again_at = at
        for incident in self._known.values():
            if incident.state != "open":
                self._may_return(incident)
        active = [one for one in findings if one.incident is not None and one.state != "resolved"]
        for finding in active:
            holder = self._known.get(finding.incident or 0)
            if holder is not None:
                self._add(holder, finding)
        lately = read.execute(
            "SELECT rule, node, entity, incident, resolved_at FROM live.finding "
            "WHERE state = 'resolved' AND resolved_at >= ? AND incident IS NOT NULL ORDER BY resolved_at, id",
            [as_of - REOPEN],
        ).fetchall()
        self._was = {
            (self._family(rule), node, entity): (self._known[number], at)
            for rule, node, entity, number, at in lately
            if number in self._known
        }
        self._look_up(active, read)

    def take(
        self, changes: Sequence[tuple[Finding, str]], as_of: datetime, read: duckdb.DuckDBPyConnection
    ) -> None:
        """Note what happened to findings in one pass, causes first: `findings.step` said what."""
        self._look_up([finding for finding, changed in changes if changed == "fired"], read)
        for finding, changed in changes:
            policy = self._policies.get(finding.rule)
            if policy is not None and not policy.shadow:
                self._take(finding, changed, policy, as_of)
        self._gather(as_of, read)
        self._number()

    def _take(self, finding: Finding, changed: str, policy: Policy, as_of: datetime) -> None:
        if changed == "fired":
            self._fired(finding, policy, as_of)
        incident = self._holder.get(finding.id)
        if incident is None:
            return
        what = _WORDS.get(changed)
        if what:
            self._note(incident, as_of, what, finding.id, f"{policy.title}: {finding.reason}")
        if finding.verdict == "crit" and incident.severity != "crit" and finding.state != "resolved":
            incident.severity = "crit"
            self._touch(incident, as_of)
            led = (incident.cause_rule, incident.node) == (finding.rule, finding.node)
            if led and incident.entity != finding.entity:  # whoever reads crit must read why
                self._lead(incident, finding, policy)
                self._note(incident, as_of, "cause_changed", finding.id, incident.title)
        if changed == "resolved":
            self._resolved(incident, finding, as_of)

    def closed(self, number: int, at: datetime, cause: str) -> None:
        """A person closed it, and its rows say so already."""
        incident = self._known.get(number)
        if incident is None:
            return
        for finding in incident.active:
            self._was[self._key(finding)] = (incident, at)
            self._holder.pop(finding.id, None)
            self._at.get(finding.node, {}).pop(id(incident), None)
        incident.members.clear()
        incident.state, incident.cause = "resolved", cause
        incident.resolved_at = incident.updated_at = at
        self._may_return(incident)

    def save(self, write: duckdb.DuckDBPyConnection) -> None:
        """Write what changed since the last call."""
        changed = [one for one in self._changed.values() if one.number]
        cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _COLUMNS.items())
        new, old = ([one for one in changed if one.stored == stored] for stored in (False, True))
        if new:
            write.execute(f"INSERT INTO live.incident BY NAME SELECT {cells}", _cells(new, _COLUMNS))
        if old:
            sets = ", ".join(f"{name} = s.{name}" for name in _COLUMNS if name != "number")
            write.execute(
                f"UPDATE live.incident SET {sets} FROM (SELECT {cells}) s WHERE incident.number = s.number",
                _cells(old, _COLUMNS),
            )
        for incident in new:
            incident.stored = True
        if self._log:
            cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _LOG_COLUMNS.items())
            write.execute(
                f"INSERT INTO live.incident_log BY NAME SELECT {cells}", _cells(self._log, _LOG_COLUMNS)
            )
        self._changed, self._log, self.moved = {}, [], {}

    def forget(self, as_of: datetime) -> None:
        """Let go of incidents that can no longer be re-opened."""
        for number, one in list(self._known.items()):
            if one.resolved_at is not None and as_of - one.resolved_at > REOPEN:
                del self._known[number]
        self._ended = {key: one for key, one in self._ended.items() if one.number in self._known}
        self._was = {
            key: (one, at)
            for key, (one, at) in self._was.items()
            if as_of - at <= REOPEN and one.number in self._known
        }

    # ---- one node ----

    def _fired(self, finding: Finding, policy: Policy, as_of: datetime) -> None:
        incident = self._cause_of(finding, policy, as_of)
        effects = [one for one in self._effects_of(finding, as_of) if one is not incident]
        if incident is not None and effects:
            incident = self._under(incident, effects, as_of)
        elif effects:
            incident = self._merge(effects, as_of)
            self._lead(incident, finding, policy)
        incident = incident or self._again(finding, policy, as_of)
        if incident is None:
            incident = Incident(
                0, finding.rule, finding.node, finding.entity, "open", finding.verdict,
                _title(policy, finding), as_of, as_of, None, None, 0,
            )  # fmt: skip
            self._fresh[id(incident)] = incident
            self._note(incident, as_of, "opened", finding.id, incident.title)
        self._add(incident, finding)
        finding.incident = incident.number or None
        if self._family(finding.rule) == self._family(incident.cause_rule):
            self._grown[id(incident)] = incident
        self._touch(incident, as_of)

    def _cause_of(self, finding: Finding, policy: Policy, as_of: datetime) -> Incident | None:
        """An open incident that already explains this finding."""
        place, node = rank(policy, finding.entity), _node_of(finding)
        near = {**self._at.get(node, {}), **self._at.get(COLLECTOR, {})}
        for incident in sorted(near.values(), key=_age):
            causes = self._causes(incident, node)
            above = min((self._rank(one) for one in causes), default=_LAST)
            if above < place and any(self._explains(one, finding) for one in causes):
                return incident
            young = as_of - incident.began_at <= ABSORB
            if above <= place and (young or not incident.wide) and self._on_it(incident, finding):
                return incident
            same = incident.cause_rule == finding.rule and any(_is_part(one.entity) for one in causes)
            if same and _is_part(finding.entity) and as_of - incident.began_at <= TOGETHER:
                return incident
        return None

    def _on_it(self, incident: Incident, finding: Finding) -> bool:
        """Whether it is about the very part that `finding` names."""
        thing = self._thing(finding)
        there = incident.members.get(finding.node, {})
        return _is_part(finding.entity) and any(self._thing(member) == thing for member in there.values())

    def _effects_of(self, finding: Finding, as_of: datetime) -> list[Incident]:
        """Young open incidents that this finding explains and takes over."""
        if finding.node == COLLECTOR:
            near = [one for one in self._all_open() if one.cause_rule == finding.rule]
        else:
            of_jobs = [one for one in self._at.get("", {}).values() if one.domain is None]
            near = [one for one in self._at.get(finding.node, {}).values() if not one.wide] + of_jobs
        return [
            incident
            for incident in near
            if as_of - incident.began_at <= ABSORB
            and (
                self._on_it(incident, finding)
                or any(self._explains(finding, one) for one in self._causes(incident, None))
            )
        ]

    def _under(self, cause: Incident, effects: Sequence[Incident], as_of: datetime) -> Incident:
        """One incident of these, about what `cause` is about."""
        rule, node, entity, title = cause.cause_rule, cause.node, cause.entity, cause.title
        first = self._merge([cause, *effects], as_of)
        first.cause_rule, first.node, first.entity, first.title = rule, node, entity, title
        return first

    def _again(self, finding: Finding, policy: Policy, as_of: datetime) -> Incident | None:
        """The incident that this was a cause of until lately, or one that was about it alone."""
        lead = self._key(finding)
        incident, at = self._was.get(lead, (None, datetime.min))
        if incident is not None and incident.node == finding.node and incident.domain is None:
            part = self._family(incident.cause_rule) == lead[0] and as_of - at <= REOPEN
            if part and incident.state == "open":
                return incident
            if part:
                lead = (lead[0], incident.node, incident.entity)
        incident = self._reopened(lead, as_of)
        if incident is not None:
            self._lead(incident, finding, policy)
            self._note(incident, as_of, "reopened", finding.id, finding.reason)
        return incident

    def _key(self, finding: Finding) -> tuple[str, str, str]:
        return (self._family(finding.rule), finding.node, finding.entity)

    def _reopened(self, key: tuple[str, str, str], as_of: datetime) -> Incident | None:
        incident = self._ended.get(key)
        if incident is None or incident.resolved_at is None or as_of - incident.resolved_at > REOPEN:
            return None
        del self._ended[key]
        incident.state, incident.resolved_at, incident.cause = "open", None, None
        incident.reopened += 1
        incident.again_at = as_of
        return incident

    def _resolved(self, incident: Incident, finding: Finding, as_of: datetime) -> None:
        self._was[self._key(finding)] = (incident, as_of)
        self._holder.pop(finding.id, None)
        there = incident.members.get(finding.node, {})
        there.pop(finding.id, None)
        if not there:
            incident.members.pop(finding.node, None)
            self._at.get(finding.node, {}).pop(id(incident), None)
        if incident.state != "open":
            return
        left = [one for one in incident.active if one.rule in self._policies]
        if not left:
            self._close(incident, finding.cause or "", as_of)
            return
        left = [one for one in left if one.state != "resolved"]
        if not left:
            return  # the others end in this pass too, and the last of them ends it, under the name it has
        if incident.domain is not None:
            over = not any(self._causes(incident, None))
        else:
            over = (incident.cause_rule, incident.node, incident.entity) == finding.key
        if over:
            heir = min(left, key=lambda one: (self._rank(one), one.verdict != "crit", one.id))
            self._lead(incident, heir, self._policies[heir.rule])
            self._note(incident, as_of, "cause_changed", heir.id, incident.title)
            self._grown[id(incident)] = incident

    # ---- many nodes ----

    def _gather(self, as_of: datetime, read: duckdb.DuckDBPyConnection) -> None:
        """Make one incident of those in which one kind of cause hits a fault domain."""
        grown: dict[str, list[Incident]] = {}
        for incident in self._grown.values():
            if incident.state == "open" and incident.node != COLLECTOR:
                grown.setdefault(self._family(incident.cause_rule), []).append(incident)
        if not grown:
            return
        likely: dict[str, list[Incident]] = {family: [] for family in grown}
        for incident in self._all_open():
            family = self._family(incident.cause_rule)
            if family in likely and incident.node != COLLECTOR:
                likely[family].append(incident)
        domains: Domains | None = None
        for family, those in likely.items():
            parents = [one for one in those if one.domain is not None]
            nodes = {node for one in those for node in one.members}
            if not parents and len(nodes) < LEAST:
                continue
            domains = domains or Domains.read(read, as_of)
            alone = [one for one in those if one.domain is None]
            self._join(family, parents, grown[family], alone, domains, as_of)
            self._part(family, alone, domains, as_of)
        if domains is not None:
            self._swallow(as_of)

    def _join(
        self,
        family: str,
        parents: Sequence[Incident],
        grown: Sequence[Incident],
        alone: Sequence[Incident],
        domains: Domains,
        as_of: datetime,
    ) -> None:
        """Latecomers: their domain is in trouble already."""
        for parent in parents:
            domain = parent.domain
            if domain is None or any(one.entity == parent.entity for one in parent.active):
                continue  # what a rule says of a domain as a whole is no sum of nodes
            own = self._policies[parent.cause_rule].covers == "node"
            last = max((one.fired_at for one in parent.active if one.fired_at), default=parent.opened_at)
            if not own and as_of - last > LATE:
                continue
            inside = domains.nodes(domain)
            rests = as_of - last > SPREAD.get(parent.cause_rule, ABSORB)
            late = self._young(family, alone, as_of) if rests else grown
            late = [one for one in late if one.state == "open" and one.members.keys() <= inside]
            late = [one for one in late if one is not parent and one.members]
            if rests:
                late = [one for one in late if self._is_like(one, parent)]
                if not self._is_hit(parent, late if as_of - last <= LATE else (), domain, domains):
                    continue  # it is over, but for a few: what fails now has a cause of its own
            if late:
                self._spread([parent, *late], parent.cause_rule, domain, domains, as_of)

    def _is_hit(self, parent: Incident, late: Sequence[Incident], domain: Domain, domains: Domains) -> bool:
        """Whether the domain is in trouble, not only some nodes that did not recover with it."""
        found = [finding for one in (parent, *late) for finding in self._causes(one, None)]
        return domains.is_hit(domain, {finding.node for finding in found if finding.state == "firing"})

    def _is_like(self, late: Incident, parent: Incident) -> bool:
        """Whether it fails as the domain does; a card that fails in another way has its own cause."""
        known = {(one.rule, one.code) for one in self._causes(parent, None)}
        return any(
            not one.entity.startswith("gpu:") or (one.rule, one.code) in known
            for one in self._causes(late, None)
        )

    def _young(self, family: str, those: Iterable[Incident], as_of: datetime) -> list[Incident]:
        """Those that are young, or in which a cause fired in this pass."""
        window = SPREAD.get(family, ABSORB)
        return [
            one
            for one in those
            if one.state == "open"
            and one.members
            and (as_of - one.opened_at <= window or id(one) in self._grown)
        ]

    def _part(self, family: str, those: Sequence[Incident], domains: Domains, as_of: datetime) -> None:
        """The domains that are hit now."""
        fresh = self._young(family, those, as_of)
        hit = {node for one in fresh for node in one.members if node}
        policy = self._policies.get(fresh[0].cause_rule) if fresh else None
        if policy is None or len(hit) < LEAST:
            return
        for domain, nodes in domains.fitting(hit, policy.scope):
            inside = [one for one in fresh if one.members and one.members.keys() <= set(nodes)]
            again = self._reopened((family, "", domain.entity), as_of)
            if again is not None:
                self._note(again, as_of, "reopened", None, again.title)
                inside = [again, *inside]
            if inside:
                rule = Counter(one.cause_rule for one in inside).most_common(1)[0][0]
                self._spread(inside, rule, domain, domains, as_of)

    def _spread(
        self, those: Sequence[Incident], rule: str, domain: Domain, domains: Domains, as_of: datetime
    ) -> None:
        """Make one incident of these, about the domain."""
        parent = self._merge(those, as_of)
        before = parent.domain
        parent.cause_rule, parent.node, parent.entity = rule, "", domain.entity
        policy, hit = self._policies[rule], sum(1 for node in parent.members if node)
        total = len(domains.nodes(domain))
        parent.title = f"{domain.words}: {hit} of {total} nodes: {policy.title}"[:300]
        self._grown[id(parent)] = parent
        if before != domain:
            self._note(parent, as_of, "grouped", None, parent.title)
        self._touch(parent, as_of)

    def _swallow(self, as_of: datetime) -> None:
        """A domain's trouble that another one of the same nodes explains is part of it."""
        wide = [one for one in self._all_open() if one.domain is not None and as_of - one.opened_at <= ABSORB]
        for cause in wide:
            for effect in wide:
                if cause is effect or "resolved" in (cause.state, effect.state):
                    continue
                nodes = cause.members.keys() & effect.members.keys()
                why = sum(
                    1
                    for node in nodes
                    if any(
                        self._explains(one, other)
                        for one in self._causes(cause, node)
                        for other in self._causes(effect, node)
                    )
                )
                if why and 2 * why >= len(effect.members):
                    self._under(cause, [effect], as_of)

    # ---- what both need ----

    def _merge(self, those: Sequence[Incident], as_of: datetime) -> Incident:
        """One incident of several: the oldest number lives on."""
        first, *others = sorted(those, key=_age)
        for other in others:
            for finding in other.active:
                self._add(first, finding)
                if finding.stored or finding.incident:
                    self.moved[finding.id] = finding
                finding.incident = first.number or None
            for node in other.members:
                self._at.get(node, {}).pop(id(other), None)
            other.members = {}
            first.opened_at = min(first.opened_at, other.opened_at)
            first.severity = min(first.severity, other.severity)  # crit < warn
            self._grown.pop(id(other), None)
            if other.number:
                self._close(other, f"{MERGED}{first.number}", as_of)
                self._note(first, as_of, "merged", None, f"INC-{other.number}: {other.title}")
            else:
                self._give_up(other, first)
        self._touch(first, as_of)
        return first

    def _give_up(self, other: Incident, first: Incident) -> None:
        """What was opened in this pass and is part of another one was never there."""
        other.state = "resolved"
        del self._fresh[id(other)]
        self._changed.pop(id(other), None)
        self._part_of[id(other)] = (other, first)

    def _number(self) -> None:
        """The pass is over: what it opened and did not give up gets a number."""
        for incident in self._fresh.values():
            incident.number = self._next
            self._next += 1
            self._known[incident.number] = incident
            for finding in incident.active:
                finding.incident = incident.number
        for entry in self._log:
            while id(entry.incident) in self._part_of:
                entry.incident = self._part_of[id(entry.incident)][1]
                entry.what = "" if entry.what == "opened" else entry.what
        self._log = [entry for entry in self._log if entry.what]
        self._fresh, self._grown, self._part_of = {}, {}, {}

    def _causes(self, incident: Incident, node: str | None) -> list[Finding]:
        """Its findings that are its cause, on one node or anywhere; the collector's own is for all nodes."""
        if incident.node == COLLECTOR:
            found: Iterable[Finding] = incident.members.get(COLLECTOR, {}).values()
        elif node is None:
            found = incident.active
        else:
            found = incident.members.get(node, {}).values()
        family = self._family(incident.cause_rule)
        return [one for one in found if one.state != "resolved" and self._family(one.rule) == family]

    def _explains(self, cause: Finding, effect: Finding) -> bool:
        """Whether `cause` is why `effect` fired."""
        policy, of = self._policies.get(cause.rule), self._policies.get(effect.rule)
        if policy is None:
            return False
        if cause.node == COLLECTOR:
            return policy.covers == "node" and effect.rule == cause.rule
        if _node_of(effect) != cause.node:
            return False
        for rule, code, what, codes in _ALSO:
            known = rule == cause.rule and code in ("", cause.code) and what == effect.rule
            if known and (not codes or effect.code in codes):
                return _soon(cause, effect) or what not in _SOON
        if policy.covers in ("", "node"):
            return policy.covers == "node" and effect.node == cause.node
        if policy.covers == "driver" and cause.verdict != "crit":
            return False  # the cards still answer
        thing = self._thing(effect)
        if cause.entity.startswith("gpu:"):
            return cause.entity == thing
        node_of_cards = of is not None and of.covers == "card" and not thing.startswith("gpu:")
        return thing.startswith("gpu:") or (policy.covers == "driver" and node_of_cards)

    def _family(self, rule: str) -> str:
        """Rules that see one cause in several ways count as one kind of trouble."""
        policy = self._policies.get(rule)
        return "port" if policy is not None and policy.scope == "port" else rule

    def _thing(self, finding: Finding) -> str:
        """What it is about: the card or port, also where only its address is named."""
        return self._things.get((finding.node, finding.entity), finding.entity)

    def _look_up(self, findings: Iterable[Finding], read: duckdb.DuckDBPyConnection) -> None:
        """Which cards and ports sit at the addresses that these findings name."""
        named = [(one.node, one.entity) for one in findings if one.entity.startswith("pci:")]
        if not named:
            return
        rows = read.execute(
            "SELECT node, 'pci:' || pci, max_by(entity, valid_from) FROM live.inventory "
            "WHERE kind IN ('gpu', 'port') AND (node, 'pci:' || pci) IN "
            "(SELECT (unnest(?::VARCHAR[]), unnest(?::VARCHAR[]))) GROUP BY node, pci",
            [[node for node, _ in named], [entity for _, entity in named]],
        ).fetchall()
        self._things |= {(node, address): entity for node, address, entity in rows}

    def _rank(self, finding: Finding) -> int:
        return rank(self._policies[finding.rule], finding.entity) if finding.rule in self._policies else _LAST

    def _add(self, incident: Incident, finding: Finding) -> None:
        incident.members.setdefault(finding.node, {})[finding.id] = finding
        self._holder[finding.id] = incident
        self._at.setdefault(finding.node, {})[id(incident)] = incident

    def _close(self, incident: Incident, cause: str, as_of: datetime) -> None:
        incident.state, incident.resolved_at, incident.cause = "resolved", as_of, cause
        self._may_return(incident)
        self._note(incident, as_of, "resolved", None, cause)

    def _may_return(self, incident: Incident) -> None:
        if not (incident.cause or "").startswith(MERGED):
            self._ended[self._family(incident.cause_rule), incident.node, incident.entity] = incident

    def _lead(self, incident: Incident, finding: Finding, policy: Policy) -> None:
        """This finding is its cause from now on."""
        incident.cause_rule, incident.node, incident.entity = finding.rule, finding.node, finding.entity
        incident.title = _title(policy, finding)

    def _all_open(self) -> list[Incident]:
        return [one for one in (*self._known.values(), *self._fresh.values()) if one.state == "open"]

    def _touch(self, incident: Incident, as_of: datetime) -> None:
        incident.updated_at = as_of
        self._changed[id(incident)] = incident

    def _note(self, incident: Incident, as_of: datetime, what: str, finding: int | None, text: str) -> None:
        # a microsecond apart, so that sorting by time keeps the order of what one pass notes
        at = max(as_of, self._noted_at + timedelta(microseconds=1))
        self._noted_at = at
        self._log.append(Entry(incident, at, what, finding, text))
        self._touch(incident, as_of)


_COLUMNS = {
    "number": "BIGINT", "cause_rule": "VARCHAR", "node": "VARCHAR", "entity": "VARCHAR", "state": "VARCHAR",
    "severity": "VARCHAR", "title": "VARCHAR", "opened_at": "TIMESTAMP", "updated_at": "TIMESTAMP",
    "resolved_at": "TIMESTAMP", "cause": "VARCHAR", "reopened": "BIGINT",
}  # fmt: skip

_LOG_COLUMNS = {
    "number": "BIGINT",
    "logged_at": "TIMESTAMP",
    "what": "VARCHAR",
    "finding": "BIGINT",
    "text": "VARCHAR",
}


def _cells(rows: Sequence[Incident | Entry], columns: Iterable[str]) -> list[list[object]]:
    return [[getattr(row, name) for row in rows] for name in columns]


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

_ALSO: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("driver_hung", "", "process_unkillable", ()),
    ("gpu_missing", "", "process_unkillable", ()),
    ("gpu_missing", "", "nvlink_down", ()),
    ("gpu_missing", "", "nvlink_errors", ()),
    ("xid", "sxid", "nvlink_down", ()),
    ("xid", "sxid", "nvlink_errors", ()),
    ("mount_hung", "", "process_unkillable", ()),
    ("mount_hung", "", "data_starved", ("nfs_hung", "storage")),
    ("disk_slow", "", "process_unkillable", ()),
    ("disk_slow", "", "data_starved", ("storage",)),
)
"""What a rule's finding explains beside its own entity on the same node: rule, its code ("" = any), the rule
that is explained, its codes (none = any). The kernel holds whoever waits for a hung driver, card, mount or
disk; a card that is gone takes the links of its peers to it along."""

_SOON = ("nvlink_down", "nvlink_errors")
"""Effects that show at once, or are none."""

_LAST = 6
_EXPLAINS_SOME = {rule for rule, *_ in _ALSO}


def rank(policy: Policy, entity: str) -> int:
    """Place in the cause chain, causes first.

    The collector itself, silent node, driver of a node, missing driver, hung card, missing card, what
    explains a few others, all else.
    """
    if policy.covers == "node":
        return -1 if entity == "agent:" else 0
    place = {"driver": 1, "card": 2}.get(policy.covers, _LAST)
    if place == _LAST:
        return _LAST - 1 if policy.rule in _EXPLAINS_SOME else _LAST
    return place + 2 if entity.startswith("gpu:") else place


def _is_part(entity: str) -> bool:
    """A part of a node, of which several may have one cause, and one several findings."""
    return entity.partition(":")[0] not in ("node", "agent", "job", "domain")


def _age(incident: Incident) -> tuple[bool, int]:
    """Sorts the oldest first; what has no number yet is younger than all, and stays in order."""
    return (incident.number == 0, incident.number)


def _soon(cause: Finding, effect: Finding) -> bool:
    return abs(effect.began_at - cause.began_at) <= LATE


def _node_of(finding: Finding) -> str:
    """Where it is; of a job that spans nodes, the one that suffers first."""
    if finding.node or not finding.detail:
        return finding.node
    try:
        found = json.loads(finding.detail)
    except ValueError:
        return ""
    node = found.get("first_node") if isinstance(found, dict) else None
    return node if isinstance(node, str) else ""


def _title(policy: Policy, finding: Finding) -> str:
    return f"{policy.title}: {finding.reason}"[:300]
