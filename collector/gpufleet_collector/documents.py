"""Documents that people see, built from the store by SQL. Shapes: docs/json.md.

State is not decided here: the macros `cards_at` and `nodes_at` of schema rules do that, for views too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb
import msgspec

from gpufleet_collector import jobs, people, story
from gpufleet_collector.domains import Domain
from gpufleet_collector.incidents import COLLECTOR
from gpufleet_collector.inventory import Difference
from gpufleet_collector.sandbox import plain

Row = dict[str, object]
Document = dict[str, object]

LOOKBACK = "10 minutes"
"""How far back the newest sample of a card is looked for."""

STATE_LOOKBACK_S = 120.0
"""The same for states, at least: a node is silent after 90 s."""

EVENT_WINDOW = "10 minutes"
MAX_EVENTS = 200
MAX_RESOLVED = 500


class NotFound(Exception):
    """Nothing has that name. A second line of the text says what to do; so it is with the other errors."""


class Ambiguous(Exception):
    """Several things have that name; the text lists them."""


@dataclass(frozen=True, slots=True)
class Health:
    """How the collector itself is.

    Attributes:
        ready: Whether it takes data and answers.
        reason: Why not; empty when ready.
        lag_s: How far its newest commit is behind what arrives; None = nothing has arrived.
        warming_up: Whether the judge still waits for the agents that were known before the start.
        paused: Why ingest has stopped ("disk_floor"); empty = it has not.
    """

    ready: bool
    reason: str
    lag_s: float | None
    warming_up: bool
    paused: str


def document(kind: str, now: datetime, items: Sequence[object], **more: object) -> Document:
    """The frame that all documents share."""
    return {"api_version": "fleet/v1", "kind": kind, "generated_at": iso(now), **more, "items": items}


def rows(
    read: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Sequence[object] | Mapping[str, object] | None = None,
) -> list[Row]:
    """Every row of a query as a mapping."""
    cursor = read.execute(sql, parameters)
    names = [str(column[0]) for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def iso(at: object) -> str | None:
    """A naive UTC time as ISO 8601 with Z."""
    return at.isoformat() + "Z" if isinstance(at, datetime) else None


def age_s(now: datetime, at: object) -> float | None:
    """Seconds since `at`; never negative."""
    return max(0.0, round((now - at).total_seconds(), 3)) if isinstance(at, datetime) else None


# ---- status and nodes ----

_NODES = """
    WITH hit AS (
        SELECT node, rule, entity, min(verdict) AS verdict FROM findings_at($now)
        WHERE entity LIKE 'gpu:%' AND verdict IN ('crit', 'warn') GROUP BY ALL
    ),
    worst_card AS (
        SELECT h.node AS worst_node,
               arg_min({'rule': h.rule, 'gpu_index': c.gpu_index, 'entity': h.entity},
                       (h.verdict <> 'crit', coalesce(c.gpu_index, 999), h.rule)) AS worst,
               count(DISTINCT h.entity) AS hit_cards
        FROM hit h LEFT JOIN (
            SELECT node, entity, arg_max(gpu_index, valid_from) AS gpu_index FROM inventory
            WHERE (node, entity) IN (SELECT (node, entity) FROM hit) GROUP BY node, entity
        ) c ON c.node = h.node AND c.entity = h.entity
        GROUP BY h.node
    )
    SELECT n.node, state, expectation, model, gpus_expected, gpus_ok, gpus_degraded, gpus_critical,
           gpus_no_data, gpus_extra, greatest(n.received_at, h.received_at) AS received_at, agent_version,
           n.offset_s, conflict, flags, list_transform(findings, lambda f: f.reason) AS reasons, w.*
    FROM nodes_at($now, $lookback) n LEFT JOIN heard_at($now, '1 hour') h USING (node)
    LEFT JOIN worst_card w ON w.worst_node = n.node
"""


def _nodes(read: duckdb.DuckDBPyConnection, now: datetime, name: str | None = None) -> list[Row]:
    """All nodes or one. States need samples of the time in which one is fresh, not of ten minutes."""
    slowest = read.execute("SELECT max(fresh_s(interval_s)) FROM probe WHERE probe = 'gpu'").fetchone()
    fresh_s = float(slowest[0]) if slowest and slowest[0] is not None else 0.0
    parameters: dict[str, object] = {"now": now, "lookback": f"{max(STATE_LOOKBACK_S, fresh_s):.0f} seconds"}
    if name is None:
        return rows(read, f"{_NODES} ORDER BY node", parameters)
    return rows(read, f"{_NODES} WHERE n.node = $node", {**parameters, "node": name})


def status(read: duckdb.DuckDBPyConnection, now: datetime, version: str, health: Health) -> Document:
    """The 30-second screen."""
    found = _nodes(read, now)
    nodes = [_node(row, now) for row in found]
    wrong = incidents(read, now, open_only=True)
    seen = [row["received_at"] for row in found if isinstance(row["received_at"], datetime)]
    newest = max(seen, default=None)
    return document(
        "FleetStatus",
        now,
        nodes,
        collector={
            "version": version,
            "ready": health.ready,
            "reason": health.reason or None,
            "lag_s": health.lag_s,
            "warming_up": health.warming_up,
            "paused": health.paused or None,
        },
        gpus={
            key: sum(int(str(row[f"gpus_{key}"])) for row in found)
            for key in ("expected", "ok", "degraded", "critical", "no_data")
        },
        nodes=_count_nodes(nodes),
        newest_data_at=iso(newest),
        data_age_s=age_s(now, newest),
        incidents=wrong,
        known=count_flags(wrong),
    )


def node_list(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
    """Every node, an item each."""
    return document("NodeList", now, [_node(row, now) for row in _nodes(read, now)])


def _node(row: Row, now: datetime) -> Row:
    """One node as status and lists show it."""
    reasons = row["reasons"]
    expected, extra = int(str(row["gpus_expected"])), int(str(row["gpus_extra"]))
    return {
        "node": row["node"],
        "state": row["state"],
        "has_gpus": expected + extra > 0,
        "gpus": {
            "expected": expected,
            "ok": row["gpus_ok"],
            "degraded": row["gpus_degraded"],
            "critical": row["gpus_critical"],
            "no_data": row["gpus_no_data"],
            "unexpected": extra,
        },
        "model": row["model"],
        "expectation": None if row["expectation"] == "none" else row["expectation"],
        "seen_at": iso(row["received_at"]),
        "age_s": age_s(now, row["received_at"]),
        "agent_version": row["agent_version"],
        "clock_offset_s": row["offset_s"],
        "conflict": row["conflict"] or None,
        "flags": row["flags"],
        "reason": reasons[0] if isinstance(reasons, list) and reasons else None,
        "worst_card": _worst_card(row),
    }


def count_flags(of: Sequence[Row]) -> dict[str, int]:
    """How many of these incidents are acknowledged, silenced, in maintenance."""
    flags = [flag for one in of if isinstance(one["flags"], list) for flag in one["flags"]]
    return {flag: flags.count(flag) for flag in people.FLAGS}


def _worst_card(row: Row) -> Row | None:
    """The worst finding among a node's cards, and how many cards have one."""
    worst = row["worst"]
    return {**worst, "cards": row["hit_cards"]} if isinstance(worst, dict) else None


def _count_nodes(nodes: Sequence[Row]) -> Row:
    """Nodes by state; those without cards apart, so that the four numbers still add up."""
    counts = {"ok": 0, "degraded": 0, "critical": 0, "unknown": 0}
    bare = 0
    for node in nodes:
        if node["has_gpus"]:
            counts[str(node["state"])] += 1
        else:
            bare += 1
    return {
        "expected": sum(counts.values()),
        "ok": counts["ok"],
        "degraded": counts["degraded"],
        "critical": counts["critical"],
        "no_data": counts["unknown"],
        "without_gpus": bare,
    }


def one_node(read: duckdb.DuckDBPyConnection, now: datetime, name: str, tables: Iterable[str]) -> Document:
    """One node: cards, own findings, last values with their age, inventory facts.

    Raises:
        NotFound: No node has that name.
    """
    found = _nodes(read, now, name)
    if not found:
        raise NotFound(f"no node {name!r}\nsee fleet node{_similar(read, now, name)}")
    node = _node(found[0], now)
    node["counts"] = node.pop("gpus")
    node["gpus"] = cards(read, now, name)
    running = jobs.now(read, now, node=name) if jobs.told(read, name) else None
    node["jobs"] = None if running is None else [jobs.short(job) for job in running]
    # what a job of several nodes suffers is shown on each of them
    entities = [f"{jobs.ENTITY}{job['job_id']}" for job in running or ()]
    node["findings"] = findings(
        read, now, "node = ? OR node = '' AND entity IN (SELECT unnest(?::VARCHAR[]))", [name, entities]
    )
    node["facts"] = _facts(read, name)
    node["last"] = _last_values(read, now, name, tables)
    return document("Node", now, [node])


def _similar(read: duckdb.DuckDBPyConnection, now: datetime, name: str) -> str:
    close = rows(
        read,
        "SELECT node FROM node_list($now) WHERE levenshtein(node, $node) <= 2 OR starts_with(node, $node) "
        "ORDER BY levenshtein(node, $node), node LIMIT 3",
        {"now": now, "node": name[:200]},
    )
    return f"; did you mean {', '.join(str(row['node']) for row in close)}?" if close else ""


def _facts(read: duckdb.DuckDBPyConnection, name: str) -> Row:
    """What the host says it is made of, as one flat object."""
    facts: Row = {}
    for row in rows(
        read,
        "SELECT attributes FROM inventory WHERE node = ? AND valid_to IS NULL AND entity = 'node:' "
        "ORDER BY valid_from",
        [name],
    ):
        attributes = msgspec.json.decode(str(row["attributes"]))
        if isinstance(attributes, dict):
            facts.update(attributes)
    return facts


def _last_values(read: duckdb.DuckDBPyConnection, now: datetime, name: str, tables: Iterable[str]) -> Row:
    """The newest row of each probe that has one row per host: of several one would stand for all."""
    last: Row = {}
    keyed = {str(row["probe"]) for row in rows(read, "SELECT DISTINCT probe FROM metric WHERE kind = 'key'")}
    for probe in sorted(tables):
        if probe in keyed and probe != "agent":
            continue
        own = "AND probe = 'agent'" if probe == "agent" else ""
        found = rows(
            read,
            f'SELECT * FROM "{probe}" WHERE node = ? AND ts > ?::TIMESTAMP - INTERVAL 1 DAY {own} '
            "ORDER BY ts DESC LIMIT 1",
            [name, now],
        )
        for row in found:
            head = {key: row.pop(key) for key in ("ts", "received_at", "node", "boot_id")}
            values = {key: plain(value) for key, value in row.items()}
            last[probe] = {"ts": iso(head["ts"]), "age_s": age_s(now, head["received_at"]), "values": values}
    return last


# ---- cards ----

_VALUES = (
    "util_pct", "sm_clock_mhz", "mem_clock_mhz", "power_w", "power_limit_w", "temperature_c",
    "mem_used_bytes", "mem_total_bytes", "pstate", "clock_reasons", "pcie_gen", "pcie_width",
)  # fmt: skip


def cards(read: duckdb.DuckDBPyConnection, now: datetime, node: str | None = None) -> list[Row]:
    """Cards that are expected or seen, with their last values; of one node or of all."""
    where = "WHERE node = $node" if node is not None else ""
    parameters: dict[str, object] = {"now": now} | ({"node": node} if node is not None else {})
    found = rows(
        read,
        f"SELECT * FROM cards_at($now, '{LOOKBACK}') {where} ORDER BY node, gpu_index, pci, entity",
        parameters,
    )
    return [_card(row) for row in found]


def _card(row: Row) -> Row:
    age = row["age_s"]
    listed = row["findings"]
    reasons = [finding["reason"] for finding in listed] if isinstance(listed, list) else []
    return {
        "node": row["node"],
        "gpu_index": row["gpu_index"],
        "gpu_uuid": row["gpu_uuid"],
        "entity": row["entity"],
        "serial": row["serial"],
        "pci": row["pci"],
        "slot": row["slot"],
        "model": row["model"],
        "state": row["state"],
        "presence": row["presence"],
        "expectation": None if row["expectation"] == "none" else row["expectation"],
        "sampled_at": iso(row["ts"]),
        "age_s": round(age, 3) if isinstance(age, float) else None,
        "flags": row["flags"],
        "reason": reasons[0] if reasons else None,
        "values": {name: plain(row[name]) for name in _VALUES},
    }


def one_card(read: duckdb.DuckDBPyConnection, now: datetime, name: str) -> Document:
    """One card by UUID (or a unique beginning of 8 characters), serial, NODE/INDEX, NODE:PCI or PCI address.

    Raises:
        NotFound: No card has that name.
        Ambiguous: Several have.
    """
    card = find_card(read, now, name)
    entity, node = str(card["entity"]), str(card["node"])
    found = next(row for row in cards(read, now, node) if row["entity"] == entity)
    found["findings"] = findings(read, now, "node = ? AND entity = ?", [node, entity])
    uuid = str(card["gpu_uuid"] or "")
    found["jobs"] = (
        [jobs.short(job) for job in jobs.now(read, now, node=node, gpu_uuid=uuid)]
        if uuid and jobs.told(read, node)
        else None
    )
    found["baselines"] = {
        str(row["key"]): plain(row["value"])
        for row in rows(
            read,
            "SELECT key, value FROM baseline WHERE node = ? AND entity = ? ORDER BY key, set_at",
            [node, entity],
        )
    }
    return document("Gpu", now, [found])


def find_card(read: duckdb.DuckDBPyConnection, now: datetime, name: str) -> Row:
    """The one card that `name` means: its node, entity and identities.

    Raises:
        NotFound: No card has that name.
        Ambiguous: Several have.
    """
    name = name.strip()
    every = rows(
        read,
        "SELECT node, entity, gpu_uuid, serial, pci, slot, gpu_index, "
        f"FROM cards_at($now, '{LOOKBACK}') ORDER BY node, gpu_index, pci, entity",
        {"now": now},
    )
    matching = [row for row in every if _is(row, name)] or [row for row in every if _begins(row, name)]
    if not matching:
        raise NotFound(
            f"no card {name!r}\ngive a UUID (8 characters do), a serial, NODE/INDEX (gpu-a01/3) or NODE:PCI"
        )
    if len(matching) > 1:
        places = ", ".join(place(row["node"], row["gpu_index"]) for row in matching[:5])
        raise Ambiguous(f"{name!r} means {len(matching)} cards ({places})\ngive more of it, or NODE/INDEX")
    return matching[0]


def _is(row: Row, name: str) -> bool:
    """Whether `name` is exactly this card."""
    low = name.lower()
    uuid = str(row["gpu_uuid"] or "").lower()
    if low in (uuid, uuid.removeprefix("gpu-"), str(row["entity"]).lower()) and low:
        return True
    if row["serial"] and name == row["serial"]:
        return True
    pci = str(row["pci"] or "").lower()
    node = str(row["node"])
    if pci and low in (pci, f"{node.lower()}:{pci}", f"{node.lower()}:{pci.removeprefix('0000:')}"):
        return True
    head, slash, index = name.rpartition("/")
    return bool(slash) and head == node and index.isdigit() and row["gpu_index"] == int(index[:9])


def _begins(row: Row, name: str) -> bool:
    """Whether the UUID begins with `name`, which must have 8 characters of it."""
    start = name.lower().removeprefix("gpu-")
    return len(start) >= 8 and str(row["gpu_uuid"] or "").lower().removeprefix("gpu-").startswith(start)


def place(node: object, index: object) -> str:
    """`gpu-a03/3`, or the node alone."""
    return f"{node}/{index}" if isinstance(index, int) else str(node)


# ---- incidents and findings ----


def findings(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    condition: str,
    parameters: Sequence[object],
    all_states: bool = False,
) -> list[Row]:
    """Findings that meet a condition over columns of table finding; resolved ones only on request."""
    states = "" if all_states else "AND f.state <> 'resolved'"
    found = rows(
        read,
        f"""
        SELECT f.*, r.runbook, r.title
        FROM (SELECT * FROM finding WHERE {condition}) f LEFT JOIN rule r ON r.rule = f.rule
        WHERE true {states}
        ORDER BY f.state = 'resolved', f.verdict, f.began_at, f.id
        """,
        list(parameters),
    )
    where = places(read, now, {str(row["node"]) for row in found})
    return [_finding(row, now, where) for row in found]


def places(
    read: duckdb.DuckDBPyConnection, now: datetime, nodes: Iterable[str]
) -> dict[tuple[str, str], Row]:
    """What is known of the cards of some nodes, by (node, entity)."""
    names = sorted(set(nodes))
    if not names:
        return {}
    found = rows(
        read,
        "SELECT node, entity, gpu_uuid, gpu_index, pci, serial, slot, model FROM card_list($now) "
        "WHERE node IN (SELECT unnest($names::VARCHAR[]))",
        {"now": now, "names": names},
    )
    return {(str(row["node"]), str(row["entity"])): row for row in found}


def _finding(row: Row, now: datetime, where: Mapping[tuple[str, str], Row]) -> Row:
    card = where.get((str(row["node"]), str(row["entity"])), {})
    number = row["incident"]
    return {
        "id": row["id"],
        "rule": row["rule"],
        "title": row["title"],
        "node": row["node"],
        "entity": row["entity"],
        "place": _place(row, card),
        "state": row["state"],
        "verdict": row["verdict"],
        "code": row["code"],
        "observed": plain(row["observed"]),
        "expected": plain(row["expected"]),
        "unit": row["unit"],
        "reason": row["reason"],
        "detail": decoded(row["detail"]),
        "evidence": evidence(row["evidence"]),
        "began_at": iso(row["began_at"]),
        "age_s": age_s(now, row["began_at"]),
        "fired_at": iso(row["fired_at"]),
        "recovering_at": iso(row["recovering_at"]),
        "resolved_at": iso(row["resolved_at"]),
        "cause": row["cause"],
        "flapping": bool(row["flapping"]),
        "last_evidence_at": iso(row["last_evidence_at"]),
        "evidence_age_s": age_s(now, row["last_evidence_at"]),
        "incident": number,
        "incident_id": f"INC-{number}" if number is not None else None,
        "runbook": _runbook(row["runbook"]),
    }


def _place(row: Mapping[str, object], card: Mapping[str, object]) -> str:
    """Where a person looks: `gpu-a03/3`, else the node and what it is (`gpu-a03 port:mlx5_0/1`)."""
    if card.get("gpu_index") is not None:
        return place(row["node"], card["gpu_index"])
    entity = str(row["entity"])
    if domain := Domain.of(entity):
        return domain.words
    if row["node"] == COLLECTOR:
        return "collector"
    if entity in ("node:", "agent:"):
        return str(row["node"])
    if card.get("pci"):
        return f"{row['node']}:{card['pci']}"
    if entity.startswith(jobs.ENTITY):
        return f"{row['node']} job {entity.removeprefix(jobs.ENTITY)}".strip()
    return f"{row['node']} {entity}"


def place_of(row: Mapping[str, object], where: Mapping[tuple[str, str], Row]) -> str:
    """Where a person looks for the node and entity of `row`."""
    return _place(row, where.get((str(row["node"]), str(row["entity"])), {}))


def _runbook(name: object) -> str | None:
    return f"docs/runbooks/{name}.md" if name else None


def decoded(value: object) -> object:
    """A JSON cell as what it holds; text that is no JSON stays text."""
    if not isinstance(value, str):
        return value
    try:
        found: object = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    return found


_SQL_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d+)?)Z?$")


def evidence(value: object) -> object:
    """`[[at, verdict], ...]` with times as everywhere else."""
    pairs = decoded(value)
    if not isinstance(pairs, list):
        return []
    return [
        [_SQL_TIME.sub(r"\1T\2Z", str(pair[0])), *pair[1:]]
        for pair in pairs
        if isinstance(pair, list) and pair
    ]


def incidents(
    read: duckdb.DuckDBPyConnection, now: datetime, open_only: bool, numbers: Sequence[int] | None = None
) -> list[Row]:
    """Incidents, or those of `numbers`: news first, then what people know of, then resolved ones."""
    found = rows(
        read,
        f"""
        SELECT i.*, r.runbook, r.title AS rule_title
        FROM incident i LEFT JOIN rule r ON r.rule = i.cause_rule
             LEFT JOIN known_at($now) k ON k.number = i.number
        WHERE {"i.state = 'open'" if open_only else "true"}
          AND ($numbers::BIGINT[] IS NULL OR list_contains($numbers::BIGINT[], i.number))
        ORDER BY i.state = 'resolved', k.number IS NOT NULL, i.severity, i.opened_at DESC, i.number DESC
        {"" if open_only or numbers is not None else f"LIMIT {MAX_RESOLVED}"}
        """,
        {"now": now, "numbers": None if numbers is None else list(numbers)},
    )
    if not found:
        return []
    grouped: dict[object, list[Row]] = {}
    for row in rows(
        read,
        "SELECT * FROM finding WHERE incident IN (SELECT unnest(?::BIGINT[])) "
        "ORDER BY state = 'resolved', verdict, id",
        [[row["number"] for row in found]],
    ):
        grouped.setdefault(row["incident"], []).append(row)
    where = places(read, now, {str(row["node"]) for row in found})
    hurt = jobs.hurt(read, [one for related in grouped.values() for one in _hurt(related, now)])
    known = people.known(read, now)
    return [
        _incident(row, now, grouped.get(row["number"], []), where)
        | known.get(int(str(row["number"])), people.UNKNOWN)
        | {"jobs": hurt.get(int(str(row["number"])))}
        for row in found
    ]


def _hurt(related: Sequence[Row], now: datetime) -> list[jobs.Hurt]:
    """Where and when the findings of an incident may have hurt somebody."""
    return [
        jobs.Hurt(int(str(one["incident"])), str(one["node"]), str(one["entity"]), began, ended or now)
        for one in related
        if isinstance(began := one["began_at"], datetime)
        and (isinstance(ended := one["resolved_at"], datetime) or ended is None)
        and one["incident"] is not None
    ]


def _incident(row: Row, now: datetime, related: Sequence[Row], where: Mapping[tuple[str, str], Row]) -> Row:
    card = where.get((str(row["node"]), str(row["entity"])), {})
    cause = next(
        (one for one in related if one["rule"] == row["cause_rule"] and one["entity"] == row["entity"]),
        related[0] if related else {},
    )
    active = [one["node"] for one in related if one["state"] != "resolved"]
    whole = story.scope(row, active or [one["node"] for one in related])
    return {
        "number": row["number"],
        "id": f"INC-{row['number']}",
        "state": row["state"],
        "severity": row["severity"],
        "title": row["title"],
        "headline": _headline(row),
        "cause_rule": row["cause_rule"],
        "node": row["node"],
        "entity": row["entity"],
        "place": _place(row, card),
        "where": {key: card.get(key) for key in ("gpu_index", "gpu_uuid", "serial", "slot", "pci", "model")},
        "code": cause.get("code"),
        "reason": (whole["hostlist"] if whole["domain"] else None) or cause.get("reason"),
        "opened_at": iso(row["opened_at"]),
        "age_s": age_s(now, row["opened_at"]),
        "updated_at": iso(row["updated_at"]),
        "resolved_at": iso(row["resolved_at"]),
        "cause": row["cause"],
        "reopened": row["reopened"],
        **whole,
        "runbook": _runbook(row["runbook"]),
        "findings": [
            {key: one[key] for key in ("id", "rule", "node", "entity", "state", "verdict", "code", "reason")}
            for one in related
        ],
    }


def _headline(row: Row) -> str:
    """The title without place and reason, which are shown beside it; the reason may be newer."""
    title, rule = str(row["title"]), row["rule_title"]
    if rule and title.startswith(f"{rule}: "):
        return str(rule)
    domain = Domain.of(str(row["entity"]))
    return title.removeprefix(f"{domain.words}: ") if domain else title


def one_incident(read: duckdb.DuckDBPyConnection, now: datetime, number: int) -> Document:
    """One incident with findings, log, what changed before it, what was tried, and what else happened there.

    Raises:
        NotFound: There is no such incident.
    """
    found = rows(
        read,
        "SELECT i.*, r.runbook, r.title AS rule_title FROM incident i "
        "LEFT JOIN rule r ON r.rule = i.cause_rule WHERE number = ?",
        [min(number, 2**63 - 1)],
    )
    if not found:
        raise NotFound(f"no incident INC-{number}\nsee fleet incidents list --all")
    row = found[0]
    full = findings(read, now, "incident = ?", [row["number"]], all_states=True)
    related = rows(
        read,
        "SELECT * FROM finding WHERE incident = ? ORDER BY state = 'resolved', verdict, id",
        [row["number"]],
    )
    nodes = {str(one["node"]) for one in full} | {str(row["node"])}
    incident = _incident(row, now, related, places(read, now, nodes))
    incident["jobs"] = jobs.hurt(read, _hurt(related, now)).get(int(str(row["number"])))
    incident |= people.known(read, now).get(int(str(row["number"])), people.UNKNOWN)
    told = next((one["detail"] for one in full if one["rule"] == row["cause_rule"]), None)
    incident |= story.history(read, row | {"code": incident["code"]}, told, now)
    incident["changed"] = story.changed(read, story.nodes_of(read, row, nodes), row["opened_at"])
    incident["findings"] = full
    incident["log"] = _log(read, int(str(row["number"])))
    where = places(read, now, nodes)
    incident["events"] = [
        {**event, "place": place_of(event, where)} for event in _events(read, sorted(nodes), row["opened_at"])
    ]
    return document("Incident", now, [incident])


def _log(read: duckdb.DuckDBPyConnection, number: int) -> list[Row]:
    """What happened to an incident and what people did with it, in order."""
    found = rows(
        read,
        "SELECT logged_at, what, finding, text FROM incident_log WHERE number = ? ORDER BY logged_at",
        [number],
    )
    entries = [
        {**entry, "logged_at": iso(entry["logged_at"]), "by": None, "claimed": None} for entry in found
    ]
    done = people.acts(read, [number]).get(number, [])
    # without the Z, which would sort a whole second behind its fractions
    return sorted([*entries, *done], key=lambda entry: str(entry["logged_at"]).removesuffix("Z"))


def _events(read: duckdb.DuckDBPyConnection, nodes: Sequence[str], at: object) -> list[Row]:
    found = rows(
        read,
        f"""
        SELECT ts, node, entity, kind, code, count, message, detail FROM event
        WHERE node IN (SELECT unnest($nodes::VARCHAR[]))
          AND ts BETWEEN $at::TIMESTAMP - INTERVAL {EVENT_WINDOW} AND $at::TIMESTAMP + INTERVAL {EVENT_WINDOW}
        ORDER BY ts LIMIT {MAX_EVENTS}
        """,
        {"nodes": list(nodes), "at": at},
    )
    return [{**row, "ts": iso(row["ts"]), "detail": decoded(row["detail"])} for row in found]


# ---- jobs ----


def job_list(read: duckdb.DuckDBPyConnection, now: datetime, name: str) -> Document:
    """Every job that holds a card now, or the one of that name with its processes and findings.

    Raises:
        NotFound: `name` is given and no such job holds a card now.
    """
    found = jobs.now(read, now, job=name)
    if name and not found:
        raise NotFound(f"no job {name!r} holds a card now\nsee fleet job")
    detailed = ("gpus", "findings")
    items = [{key: value for key, value in job.items() if name or key not in detailed} for job in found]
    for item in items if name else ():
        item["findings"] = sorted(
            findings(read, now, "id IN (SELECT unnest(?::BIGINT[]))", [item["findings"]]),
            key=lambda one: not str(one["entity"]).startswith(jobs.ENTITY),
        )
    return document("Job" if name else "JobList", now, items)


# ---- inventory ----

_INVENTORY = f"""
    SELECT c.node, c.gpu_uuid, c.serial, c.pci, c.model, c.slot, c.gpu_index, c.presence, c.received_at,
           c.age_s, n.expectation, n.hello_at
    FROM cards_at($now, '{LOOKBACK}') c JOIN node_list($now) n ON n.node = c.node
    WHERE $node = '' OR c.node = $node
    ORDER BY c.node, c.gpu_index, c.pci, c.entity
"""


def inventory_list(
    read: duckdb.DuckDBPyConnection, now: datetime, node: str, differences: Iterable[Difference]
) -> Document:
    """Every card that is expected or seen, and whether the two agree.

    Raises:
        NotFound: `node` is given and no node has that name.
    """
    if node and not rows(
        read, "SELECT 1 FROM node_list($now) WHERE node = $node", {"now": now, "node": node}
    ):
        raise NotFound(f"no node {node!r}\nsee fleet node{_similar(read, now, node)}")
    differ = {(one.node, one.uuid or one.serial): one for one in differences}
    found = rows(read, _INVENTORY, {"now": now, "node": node})
    items = [_inventory_item(row, differ.get((str(row["node"]), _identity(row)))) for row in found]
    return document("InventoryList", now, items, without_gpus=_without_cards(read, now, node))


def _without_cards(read: duckdb.DuckDBPyConnection, now: datetime, node: str) -> list[Row]:
    """The nodes of which no card is expected or seen."""
    found = rows(
        read,
        "SELECT node, nullif(expectation, 'none') AS expectation FROM node_list($now) "
        "WHERE ($node = '' OR node = $node) AND node NOT IN (SELECT node FROM card_list($now)) ORDER BY node",
        {"now": now, "node": node},
    )
    return found


def only_differences(whole: Document) -> Document:
    """The same document without what is as expected, or has no expectation."""
    items = whole["items"]
    assert isinstance(items, list)
    return {
        **{key: value for key, value in whole.items() if key != "without_gpus"},
        "kind": "InventoryDiff",
        "items": [one for one in items if one["match"] not in ("same", None)],
    }


def _identity(row: Row) -> str | None:
    found = row["gpu_uuid"] or row["serial"]
    return str(found) if found else None


def _inventory_item(row: Row, difference: Difference | None) -> Row:
    match, reason = _match(row, difference)
    age = row["age_s"]
    return {
        "node": row["node"],
        "gpu_index": row["gpu_index"],
        "uuid": row["gpu_uuid"],
        "serial": row["serial"],
        "pci": row["pci"],
        "model": row["model"],
        "slot": row["slot"],
        "expectation": None if row["expectation"] == "none" else row["expectation"],
        "match": match,
        "reason": reason,
        "seen_at": iso(row["received_at"]),
        "age_s": round(age, 3) if isinstance(age, float) else None,
    }


def _match(row: Row, difference: Difference | None) -> tuple[str | None, str | None]:
    """same, missing, extra, moved or replaced, and why; None = nothing is expected of this node."""
    if row["expectation"] == "none":
        return None, None
    if difference is None:
        if row["presence"] == "lost":
            return "missing", "the driver lists it, but it no longer answers"
        return "same", None
    if difference.kind == "extra":
        return "extra", "in the node, not expected there"
    if difference.kind == "moved":
        return "moved", f"expected at {difference.expected_pci}"
    if difference.kind == "replaced":
        return "replaced", f"{difference.replaced_by} sits at its address"
    if difference.seen_node:
        return "missing", f"now in {difference.seen_node}"
    if row["hello_at"] is None:
        return "missing", "its node has never been heard"
    return "missing", "not in the node"
