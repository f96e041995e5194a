"""What a person wants to know of an incident besides its findings; `documents` shows it.

Where it is as a whole, what changed before it, what to do next and what was tried, how often this card was in
trouble before.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import duckdb
import msgspec

from gpufleet import hostlist
from gpufleet_collector import ladder
from gpufleet_collector.domains import Domain, Domains
from gpufleet_collector.incidents import MERGED

Row = dict[str, object]

BEFORE = timedelta(hours=24)
"""What changed so long before an incident may be why."""

MOST_CHANGES = 20

OFFENDER = 3
"""So many incidents of one serial in `LATELY` make a repeat offender, as in the view of that name."""

LATELY = timedelta(days=14)

_NO_CHANGE = ("boot_id", "complete", "hostname", "index", "machine_id")
"""Attributes that say nothing about why."""


def scope(row: Mapping[str, object], nodes: Iterable[object]) -> Row:
    """The fault domain, if it is about one, and the nodes of an incident, also folded."""
    domain = Domain.of(str(row["entity"]))
    names = sorted({str(node) for node in nodes if node and not str(node).startswith("(")})
    return {
        "domain": {"kind": domain.kind, "name": domain.name} if domain else None,
        "nodes": names,
        "hostlist": hostlist.fold(names) or None,
        "merged_into": merged_into(row["cause"]),
    }


def merged_into(cause: object) -> int | None:
    """The number of the incident that took this one over."""
    number = str(cause or "").removeprefix(MERGED)
    return int(number) if str(cause or "").startswith(MERGED) and number.isdigit() else None


def nodes_of(read: duckdb.DuckDBPyConnection, row: Mapping[str, object], nodes: Iterable[str]) -> list[str]:
    """The nodes that an incident names; of a domain that is judged as a whole, all of its nodes."""
    names = sorted(node for node in nodes if node)
    domain, at = Domain.of(str(row["entity"])), row["opened_at"]
    if names or domain is None or not isinstance(at, datetime):
        return names
    return sorted(Domains.read(read, at).nodes(domain))


def changed(read: duckdb.DuckDBPyConnection, nodes: Sequence[str], at: object) -> list[Row]:
    """How the inventory of these nodes changed in the day before, equal changes of many nodes as one."""
    assert isinstance(at, datetime)
    found = read.execute(_CHANGED, {"nodes": list(nodes), "from": at - BEFORE, "until": at}).fetchall()
    same: dict[tuple[str, str, str | None, str | None], list[tuple[datetime, str]]] = {}
    for node, entity, serial, pci, since, text, before_serial, before_text in found:
        after, before = _texts(text), _texts(before_text)
        for name in sorted(after.keys() | before.keys()):
            if name not in _NO_CHANGE and after.get(name) != before.get(name) and before_text is not None:
                kind = entity.partition(":")[0]
                key = (f"{kind} {name}", "", before.get(name), after.get(name))
                same.setdefault(key, []).append((since, node))
        if before_text is None and before_serial is not None:
            key = ("card swapped", str(pci), before_serial, serial)
            same.setdefault(key, []).append((since, node))
    items: list[Row] = [
        {
            "what": f"{what} {where}".strip(),
            "before": before,
            "after": after,
            "nodes": hostlist.shorten(sorted({node for _, node in times})),
            "at": max(since for since, _ in times).isoformat() + "Z",
        }
        for (what, where, before, after), times in same.items()
    ]
    items.sort(key=lambda item: str(item["at"]), reverse=True)
    return items[:MOST_CHANGES]


def _texts(text: object) -> dict[str, str]:
    try:
        return msgspec.json.decode(str(text or "{}"), type=dict[str, str])
    except msgspec.DecodeError:
        return {}


def history(
    read: duckdb.DuckDBPyConnection, incident: Mapping[str, object], detail: object, now: datetime
) -> Row:
    """`action`, `tried[]`, `repeats` and `proof` of one incident."""
    node, entity, opened = str(incident["node"]), str(incident["entity"]), incident["opened_at"]
    assert isinstance(opened, datetime)
    ended = incident["resolved_at"]
    until = ended if isinstance(ended, datetime) else now
    cards = read.execute(_CARDS, {"node": node, "entity": entity}).fetchall()
    serial = next((row[2] for row in cards if row[2]), None)
    earlier = read.execute(
        _EARLIER,
        {"entities": [row[0] for row in cards], "from": opened - ladder.WITHIN, "until": opened,
         "number": incident["number"]},
    ).fetchall()  # fmt: skip
    since = min([opened, *(row[1] for row in earlier)])
    done = ladder.tried(read, node, [row[1] for row in cards if row[1]], since, until) if node else []
    told = detail if isinstance(detail, dict) else {}
    domain = Domain.of(entity)
    code = str(incident.get("code") or "")
    asked = str(told.get("action") or code)
    lately = [row for row in earlier if row[1] > opened - LATELY]
    return {
        "action": ladder.next_step(
            str(incident["cause_rule"]), code, asked, domain.words if domain else "", done
        ),
        "tried": [
            {"step": one.word, "count": one.count, "last_at": one.last_at.isoformat() + "Z"} for one in done
        ],
        "repeats": {
            "serial": serial,
            "incidents": [f"INC-{row[0]}" for row in earlier],
            "nodes": sorted({row[2] for row in earlier if row[2]}),
            "rules": sorted({row[3] for row in earlier}),
            "offender": len(lately) + 1 >= OFFENDER,
        }
        if earlier
        else None,
        "proof": _proof(read, opened, until) if code == "many_silent" else None,
    }  # fmt: skip


def _proof(read: duckdb.DuckDBPyConnection, opened: datetime, until: datetime) -> str | None:
    """Agents that kept their data were not away; the collector was."""
    found = read.execute(
        "SELECT count(DISTINCT node) FROM ledger "
        "WHERE lane = 'backfill' AND received_at > ? AND received_at <= ?",
        [opened, until + timedelta(hours=1)],
    ).fetchone()
    if not found or not found[0]:
        return None
    return f"{found[0]} agents sent what they had kept: they ran, the collector or its network was away"


_CHANGED = """
    WITH mine AS (
        SELECT node, entity, kind, nullif(trim(serial), '') AS serial, pci, valid_from,
               attributes::VARCHAR AS text,
               lag(attributes::VARCHAR) OVER (PARTITION BY node, entity ORDER BY valid_from) AS before_text
        FROM inventory WHERE node IN (SELECT unnest($nodes::VARCHAR[])) AND valid_from <= $until
    ),
    swap AS (
        SELECT m.node, m.entity, m.valid_from, max_by(o.serial, o.valid_from) AS serial
        FROM mine m JOIN mine o ON o.node = m.node AND o.pci = m.pci AND o.kind = m.kind
        WHERE m.kind = 'gpu' AND m.before_text IS NULL AND o.entity <> m.entity
          AND o.valid_from < m.valid_from
        GROUP BY m.node, m.entity, m.valid_from
    )
    SELECT m.node, m.entity, m.serial, m.pci, m.valid_from, m.text, s.serial, m.before_text
    FROM mine m LEFT JOIN swap s ON s.node = m.node AND s.entity = m.entity AND s.valid_from = m.valid_from
    WHERE m.valid_from > $from
"""

_CARDS = """
    WITH here AS (
        SELECT uuid, nullif(trim(serial), '') AS serial, pci FROM inventory
        WHERE kind = 'gpu' AND node = $node AND (entity = $entity OR 'pci:' || pci = $entity)
        ORDER BY valid_from DESC LIMIT 1
    )
    SELECT DISTINCT i.entity, i.uuid, nullif(trim(i.serial), '') FROM inventory i, here h
    WHERE i.kind = 'gpu' AND (i.uuid = h.uuid OR trim(i.serial) = h.serial)
"""

_EARLIER = """
    SELECT i.number, i.opened_at, f.node, any_value(f.rule)
    FROM finding f JOIN incident i ON i.number = f.incident
    WHERE f.entity IN (SELECT unnest($entities::VARCHAR[])) AND i.opened_at > $from AND i.opened_at <= $until
      AND i.number <> $number
    GROUP BY i.number, i.opened_at, f.node ORDER BY i.opened_at, i.number
"""
