"""Why: a rule's header, the limits that hold and who set them, its verdicts now, and the evidence."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import duckdb

from gpufleet_collector import documents
from gpufleet_collector.documents import Ambiguous, Document, NotFound, Row, age_s, iso, rows
from gpufleet_collector.findings import Policy
from gpufleet_collector.judge import SHARED, shared
from gpufleet_collector.sandbox import plain, watch

log = logging.getLogger(__name__)

MAX_VERDICTS = 200
RULE_SECONDS = 5.0
"""For one rule; a whole node asks every rule."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Scope:
    """What is asked about; None = not narrowed.

    Attributes:
        rules: Only these rules.
        node: Only this node.
        entities: Only these entities.
        incident: Only findings of this incident.
        nodes: Only these nodes, where one is not enough.
    """

    rules: frozenset[str] | None = None
    node: str | None = None
    entities: frozenset[str] | None = None
    incident: int | None = None
    nodes: frozenset[str] | None = None


def explain(
    read: duckdb.DuckDBPyConnection, now: datetime, subject: str, headers: Mapping[str, Mapping[str, object]]
) -> Document:
    """One item per rule that has to do with `subject`.

    Raises:
        NotFound: `subject` names nothing.
        Ambiguous: It names several things.
    """
    kind, name = _split(subject)
    scope = _scope(read, now, kind, name, headers)
    known = {str(row["rule"]): row for row in rows(read, "SELECT * FROM rule ORDER BY rule")}
    wanted = [rule for rule in known if scope.rules is None or rule in scope.rules]
    if len(wanted) > 1:
        _share(read, now)
    where = documents.places(read, now, _nodes(read, now, scope))
    items = [_rule(read, now, known[rule], headers.get(rule, {}), scope, where) for rule in wanted]
    if scope.rules is None:
        # what no agent of the whole fleet sends is not worth a word on one node; `fleet coverage` has it
        items = [
            item
            for item in items
            if item["verdicts"] or item["findings"] or item["problem"] not in (None, _NO_COLUMNS)
        ]
    return documents.document("Explanation", now, items, subject=subject)


def _share(read: duckdb.DuckDBPyConnection, now: datetime) -> None:
    """Work out once on this cursor what rules share; without it each works it out itself."""
    with suppress(duckdb.Error), watch(read, RULE_SECONDS, None):
        for query in shared(SHARED, now):
            read.execute(query)


_NO_COLUMNS = "it cannot run: no agent has sent the columns it reads"
_KINDS = ("rule", "incident", "node", "gpu")


_SEE = {
    "": "see fleet node, fleet incidents, or the rules: fleet sql 'select rule, title from rule'",
    "rule": "see fleet sql 'select rule, title from rule'",
    "incident": "see fleet incidents list --all",
    "node": "see fleet node",
    "gpu": "give a UUID (8 characters do), a serial, NODE/INDEX (gpu-a01/3) or NODE:PCI",
}


def header(policy: Policy) -> dict[str, object]:
    """How a rule's verdicts become findings here, beyond its row in table rule."""
    return {
        "for_code": {code: f"{need.k} of {need.n}" for code, need in policy.code_needs.items()},
        "also": list(policy.also),
        "min_duration_s": policy.min_duration.total_seconds(),
        "boot_grace_s": policy.boot_grace.total_seconds(),
        "max_severity": policy.max_severity,
        "latch": policy.latch,
        "covers": policy.covers or None,
    }


def _split(subject: str) -> tuple[str, str]:
    """`rule NAME` -> ("rule", NAME); one word -> ("", word)."""
    words = subject.split()
    if not words:
        raise NotFound("nothing to explain\nwrite rule NAME, incident N, node NAME, or one id")
    if len(words) == 1:
        return "", words[0]
    if len(words) == 2 and words[0] in _KINDS:
        return words[0], words[1]
    raise NotFound(f"cannot explain {subject!r}\nwrite rule NAME, incident N, node NAME, or one id")


def _scope(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    kind: str,
    name: str,
    headers: Mapping[str, Mapping[str, object]],
) -> Scope:
    """What the words mean; a single word is looked up as rule, incident, node and card."""
    found: list[Scope] = []
    if kind in ("", "rule"):
        if _exists(read, "SELECT 1 FROM rule WHERE rule = ?", name):
            found.append(Scope(rules=frozenset((name,))))
        elif known := _known_as(name, headers):
            found.append(Scope(rules=known))
    digits = name.upper().removeprefix("INC-")
    if kind in ("", "incident") and digits.isascii() and digits.isdigit() and len(digits) < 18:
        found.extend(_incident_scope(read, int(digits)))
    if kind in ("", "node") and _exists(
        read, "SELECT 1 FROM node_list(?::TIMESTAMP) WHERE node = ?", now, name
    ):
        found.append(Scope(node=name))
    if not found and kind in ("", "gpu"):
        try:
            card = documents.find_card(read, now, name)
        except NotFound:
            pass
        else:
            found.append(Scope(node=str(card["node"]), entities=frozenset((str(card["entity"]),))))
    if not found:
        raise NotFound(f"no {kind or 'rule, incident, node or card'} {name!r}\n{_SEE[kind]}")
    if len(found) > 1:
        raise Ambiguous(f"{name!r} names more than one thing\nwrite rule, incident or node before it")
    return found[0]


def _known_as(name: str, headers: Mapping[str, Mapping[str, object]]) -> frozenset[str]:
    """Rules that go by another name too, e.g. by what their codes are called."""
    return frozenset(
        rule
        for rule, header in headers.items()
        if any(
            isinstance(names, Collection) and name in names for names in (header["also"], header["for_code"])
        )
    )


def _exists(read: duckdb.DuckDBPyConnection, sql: str, *parameters: object) -> bool:
    return read.execute(sql, list(parameters)).fetchone() is not None


def _incident_scope(read: duckdb.DuckDBPyConnection, number: int) -> list[Scope]:
    found = rows(read, "SELECT node, entity, cause_rule FROM incident WHERE number = ?", [number])
    if not found:
        return []
    related = rows(read, "SELECT rule, entity, node FROM finding WHERE incident = ?", [number])
    rules = {str(row["rule"]) for row in related} | {str(found[0]["cause_rule"])}
    nodes = {str(row["node"]) for row in related} | {str(found[0]["node"])}
    one = nodes.copy().pop() if len(nodes) == 1 else ""
    return [
        Scope(
            rules=frozenset(rules),
            node=one or None,
            entities=frozenset({str(row["entity"]) for row in related} | {str(found[0]["entity"])}),
            incident=number,
            nodes=frozenset(nodes),
        )
    ]


def _nodes(read: duckdb.DuckDBPyConnection, now: datetime, scope: Scope) -> list[str]:
    if scope.node is not None:
        return [scope.node]
    return [str(row["node"]) for row in rows(read, "SELECT node FROM node_list($now)", {"now": now})]


def _rule(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    row: Row,
    header: Mapping[str, object],
    scope: Scope,
    where: Mapping[tuple[str, str], Row],
) -> Row:
    name = str(row["rule"])
    verdicts, peers, problem = _verdicts(read, now, name, scope, where)
    counts = {key: row.get(key) for key in ("ok", "warn", "crit", "unknown", "na")}
    return {
        "rule": name,
        "title": row["title"],
        "scope": row["scope"],
        "every_s": row["every_s"],
        "for": row["for"],
        "clear_after_s": row["clear_after_s"],
        "shadow": row["shadow"],
        "enabled": row["enabled"],
        "status": row["status"],
        "problem": problem or row["error"] or None,
        "run_at": iso(row["run_at"]),
        "last_run": counts,
        "runbook": f"docs/runbooks/{row['runbook']}.md",
        **header,
        "limits": _limits(read, name, scope),
        "peers": peers,
        "verdicts": verdicts,
        "findings": _findings(read, now, name, scope),
    }


def _verdicts(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    name: str,
    scope: Scope,
    where: Mapping[tuple[str, str], Row],
) -> tuple[list[Row], list[Row], str]:
    """What the rule says now, worst first (without a node only what is not ok), and what it measured."""
    if not _NAME.fullmatch(name):
        return [], [], "its name is no rule name"
    conditions = ["true"]
    parameters: dict[str, object] = {"now": now}
    if scope.node is not None:
        conditions.append("node = $node")
        parameters["node"] = scope.node
    elif scope.nodes is not None:
        conditions.append("node IN (SELECT unnest($nodes::VARCHAR[]))")
        parameters["nodes"] = sorted(scope.nodes)
    if scope.entities is not None:
        conditions.append("entity IN (SELECT unnest($entities::VARCHAR[]))")
        parameters["entities"] = sorted(scope.entities)
    if scope.node is None and scope.entities is None:
        conditions.append("verdict NOT IN ('ok', 'n/a')")
    try:
        with watch(read, RULE_SECONDS, None):
            at = now.isoformat(" ")
            read.execute(f"CREATE OR REPLACE TEMP TABLE said AS SELECT * FROM find_{name}(TIMESTAMP '{at}')")
            parameters.pop("now")
            found = rows(
                read,
                f"SELECT * FROM said WHERE {' AND '.join(conditions)} "
                "ORDER BY list_position(['crit', 'warn', 'unknown', 'ok', 'n/a'], verdict), node, entity "
                f"LIMIT {MAX_VERDICTS}",
                parameters,
            )
            peers = rows(read, _PEERS, {"node": scope.node or ""})
    except duckdb.InterruptException:
        return [], [], f"it took more than {RULE_SECONDS:g} s just now"
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        log.debug("explain: rule %s: %s", name, error)
        return [], [], _NO_COLUMNS
    return (
        [
            {
                "node": row["node"],
                "entity": row["entity"],
                "place": documents.place_of(row, where),
                "verdict": row["verdict"],
                "code": row["code"],
                "observed": plain(row["observed"]),
                "expected": plain(row["expected"]),
                "unit": row["unit"],
                "evidence_at": iso(row["evidence_at"]),
                "evidence_age_s": age_s(now, row["evidence_at"]),
                "reason": row["reason"],
                "detail": documents.decoded(row["detail"]),
            }
            for row in found
        ],
        [{key: plain(value) for key, value in row.items()} for row in peers],
        "",
    )


_PEERS = """
    SELECT 'fleet' AS among, count(*) AS entities, unit, min(observed) AS low, median(observed) AS middle,
           max(observed) AS high
    FROM said WHERE verdict IN ('ok', 'warn', 'crit') AND isfinite(observed) GROUP BY unit
    UNION ALL
    SELECT 'node', count(*), unit, min(observed), median(observed), max(observed)
    FROM said WHERE verdict IN ('ok', 'warn', 'crit') AND isfinite(observed) AND node = $node GROUP BY unit
    ORDER BY among, unit
"""
"""What a rule measured on everything it judges, and on one node: what peers show."""


def _limits(read: duckdb.DuckDBPyConnection, name: str, scope: Scope) -> list[Row]:
    """The limits that hold, one row per value and layer; `node` and `model` say where a layer is narrower."""
    narrowed = "AND node = $node" if scope.node is not None else ""
    parameters: dict[str, object] = {"rule": name}
    if scope.node is not None:
        parameters["node"] = scope.node
    return rows(
        read,
        f"""
        SELECT name, value, layer, source,
               CASE WHEN layer = 'node' THEN node END AS node,
               CASE WHEN layer = 'model' THEN model END AS model,
               count(*) AS applies_to
        FROM limits WHERE rule = $rule {narrowed}
        GROUP BY ALL ORDER BY name, layer, node, model
        """,
        parameters,
    )


def _findings(read: duckdb.DuckDBPyConnection, now: datetime, name: str, scope: Scope) -> Sequence[Row]:
    conditions: list[str] = ["rule = ?"]
    parameters: list[object] = [name]
    if scope.node is not None:
        conditions.append("node = ?")
        parameters.append(scope.node)
    if scope.incident is not None:
        conditions.append("incident = ?::BIGINT")
        parameters.append(str(scope.incident))
    elif scope.entities is not None:
        conditions.append("entity IN (SELECT unnest(?::VARCHAR[]))")
        return documents.findings(read, now, " AND ".join(conditions), [*parameters, sorted(scope.entities)])
    return documents.findings(
        read, now, " AND ".join(conditions), parameters, all_states=scope.incident is not None
    )
