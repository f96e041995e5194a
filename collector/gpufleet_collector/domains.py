"""Fault domains: what several nodes share that can fail them all at once. Read by `incidents`.

Labels of the hosts (rack, chassis, leaf_switch, ... whatever their agents' [labels] name), versions (driver,
firmware, kernel, agent), the card model, the job, the file server, and the fleet as a whole.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb
import msgspec

LABEL = "label."
"""How the attributes of a host that are labels begin."""

ENTITY = "domain:"

LEAST = 5
"""Fewer nodes are no domain's trouble."""

SHARE = 0.6
"""Nor are fewer of the domain's own nodes than this."""

_NEAREST = ("server", "leaf_switch", "switch", "chassis", "rack", "pdu", "row", "pool")
_FARTHEST = ("job", "firmware", "vbios", "driver", "kernel", "model", "fleet", "agent")
"""Which name is said where the same nodes share several things: what stands close, labels, versions. An agent
that runs everywhere says nothing of anybody's trouble."""


@dataclass(frozen=True, slots=True, order=True)
class Domain:
    """One thing that nodes share: `rack r12`."""

    kind: str
    name: str

    @property
    def entity(self) -> str:
        """As an incident's entity: `domain:rack=r12`."""
        return f"{ENTITY}{self.kind}={self.name}"

    @property
    def words(self) -> str:
        """For people: `rack r12`."""
        return "fleet" if self.kind == "fleet" else f"{self.kind} {self.name}"

    @classmethod
    def of(cls, entity: str) -> "Domain | None":
        """The domain that an incident's entity names; None = it names something else."""
        kind, equals, name = entity.removeprefix(ENTITY).partition("=")
        return cls(kind, name) if entity.startswith(ENTITY) and equals else None


class Domains:
    """Which node is in which domains, at one time."""

    def __init__(self, members: Mapping[Domain, frozenset[str]]) -> None:
        self._members = members
        self._of: dict[str, list[Domain]] = {}
        for domain, nodes in members.items():
            for node in nodes:
                self._of.setdefault(node, []).append(domain)

    @classmethod
    def read(cls, read: duckdb.DuckDBPyConnection, as_of: datetime) -> "Domains":
        """As the inventory, the jobs and the mounts have it at `as_of`."""
        members: dict[Domain, set[str]] = {}

        def add(kind: str, name: object, node: str) -> None:
            if isinstance(name, str) and name:
                members.setdefault(Domain(kind, name), set()).add(node)

        for node, text in read.execute(_HOSTS, {"at": as_of}).fetchall():
            add("fleet", "all", node)
            for kind, name in _shared(text):
                add(kind, name, node)
        for node, kind, name in read.execute(_PARTS, {"at": as_of}).fetchall():
            add(kind, name, node)
        return cls({domain: frozenset(nodes) for domain, nodes in members.items()})

    def nodes(self, domain: Domain) -> frozenset[str]:
        """Every node in it."""
        return self._members.get(domain, frozenset())

    def is_hit(self, domain: Domain, hit: Iterable[str]) -> bool:
        """Whether so many of its nodes are hit that it is the domain's trouble."""
        nodes = self.nodes(domain)
        return len(nodes.intersection(hit)) >= max(LEAST, SHARE * len(nodes))

    def fitting(self, hit: Iterable[str], scope: str = "") -> list[tuple[Domain, list[str]]]:
        """The domains that explain why these nodes are hit, each with its nodes; a node is in one at most.

        A domain fits with at least `LEAST` nodes and `SHARE` of its own. Of those that fit, the one that
        covers most goes first, and the smallest of those.

        Args:
            hit: The nodes.
            scope: Of the rule: a file server explains what waits for files alone.
        """
        left, found = set(hit), []
        hits = Counter(domain for node in left for domain in self._of.get(node, ()))
        fits = {
            domain
            for domain, count in hits.items()
            if count >= LEAST and count >= SHARE * len(self._members[domain]) and _tells(domain, scope)
        }
        while len(left) >= LEAST and fits:
            covers = {domain: left & self._members[domain] for domain in fits}
            best = min(fits, key=lambda one: (-len(covers[one]), len(self._members[one]), _place(one), one))
            if len(covers[best]) < LEAST:
                break
            found.append((best, sorted(covers[best])))
            left -= covers[best]
            fits.discard(best)
        return found


def _tells(domain: Domain, scope: str) -> bool:
    return domain.kind != "server" or scope in ("mount", "job")


def _place(domain: Domain) -> int:
    if domain.kind in _NEAREST:
        return _NEAREST.index(domain.kind)
    if domain.kind in _FARTHEST:
        return len(_NEAREST) + 1 + _FARTHEST.index(domain.kind)
    return len(_NEAREST)


_VERSIONS = {"driver_version": "driver", "kernel": "kernel"}
_OWN = frozenset(("server", *_FARTHEST))
_LABEL = re.compile(r"label\.[a-z][a-z0-9_]{0,31}")
_LONGEST = 64


def _shared(text: str) -> Sequence[tuple[str, str]]:
    """What a host's own attributes say of its domains."""
    try:
        found = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        return ()
    labels = [
        (key.removeprefix(LABEL), value)
        for key, value in found.items()
        if _LABEL.fullmatch(key) and key.removeprefix(LABEL) not in _OWN and len(value) <= _LONGEST
    ]
    return [*labels, *((kind, found[key]) for key, kind in _VERSIONS.items() if key in found)]


_HOSTS = """
    SELECT node, attributes::VARCHAR FROM inventory
    WHERE entity = 'node:' AND valid_from <= $at AND (valid_to IS NULL OR valid_to > $at)
"""

_PARTS = """
    WITH part AS (
        SELECT node, kind, model, attributes FROM inventory
        WHERE kind IN ('gpu', 'port', 'mount') AND valid_from <= $at AND (valid_to IS NULL OR valid_to > $at)
    )
    SELECT DISTINCT node, 'model', model FROM part WHERE kind = 'gpu'
    UNION
    SELECT DISTINCT node, 'vbios', json_extract_string(attributes, '$.vbios') FROM part WHERE kind = 'gpu'
    UNION
    SELECT DISTINCT node, 'firmware', concat_ws(' ', json_extract_string(attributes, '$.board'),
                                                json_extract_string(attributes, '$.firmware'))
    FROM part WHERE kind = 'port' AND json_extract_string(attributes, '$.firmware') IS NOT NULL
    UNION
    SELECT DISTINCT node, 'server',
           regexp_extract(json_extract_string(attributes, '$.source'), '^\\[?([^/\\[\\]]+?)\\]?:/', 1)
    FROM part WHERE kind = 'mount'
    UNION
    SELECT node, 'agent', any_value(agent_version) FROM node WHERE first_seen <= $at GROUP BY node
    UNION
    SELECT DISTINCT node, 'job', job_id FROM job_samples()
    WHERE ts > $at::TIMESTAMP - INTERVAL 5 MINUTE AND ts <= $at AND job_id IS NOT NULL
"""
