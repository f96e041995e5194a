"""What cannot be judged now, and why: every rule is asked again, and what it does not judge is counted.

The judge keeps only how many verdicts of each kind its last passes gave, so this asks the rules themselves:
on demand, one after the other, within a time limit. A rule that did not get its turn is said to be so.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime

import duckdb

from gpufleet_collector import sandbox
from gpufleet_collector.documents import Document, NotFound, Row, age_s, document, iso, rows
from gpufleet_collector.findings import Policy
from gpufleet_collector.rules import NO_PROBE, Rule, one_line, reads

MAX_SECONDS = 20.0
"""For all rules together."""

MAX_NODES_NAMED = 5

_SAID = """
    SELECT node, verdict, coalesce(code, '') AS code, count(*) AS entities, min(reason) AS reason
    FROM find_{rule}($now) {where} GROUP BY ALL ORDER BY ALL
"""

_PROBLEMS = """
    SELECT p.node, p.probe, r.ts, r.error
    FROM probe p JOIN (
        SELECT node, probe, max(ts) AS ts, max_by(ok, ts) AS ok, max_by(error, ts) AS error FROM agent
        WHERE ts > $now::TIMESTAMP - INTERVAL 1 HOUR AND ts <= $now GROUP BY node, probe
    ) r ON r.node = p.node AND r.probe = p.probe
    WHERE NOT r.ok ORDER BY ALL
"""

_CAPABILITIES = """
    SELECT node, probe, metric, reason, min(nullif(code, '')) AS code, count(*) AS entities,
           max(since) AS since
    FROM (
        SELECT node, entity, probe, metric, max_by(reason, since) AS reason, max_by(code, since) AS code,
               max(since) AS since
        FROM capability WHERE since <= $now AND node IN (SELECT unnest($nodes::VARCHAR[]))
        GROUP BY node, entity, probe, metric
    ) WHERE reason <> 'ok' GROUP BY ALL ORDER BY node, probe, metric, reason
"""


def coverage(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    rules: Mapping[str, Rule],
    policies: Mapping[str, Policy],
    asked: Sequence[str],
    tables: Mapping[str, object],
    seconds: float = MAX_SECONDS,
) -> Document:
    """What each rule cannot judge: of some nodes in full, of all with only what is unknown.

    Raises:
        NotFound: A node is named that is not known.
    """
    nodes = _nodes(read, now)
    missing = [name for name in asked if name not in nodes]
    if missing:
        raise NotFound(f"no node {missing[0]!r}\nsee fleet node")
    wanted = list(dict.fromkeys(asked)) or sorted(nodes)
    items = {name: _item(nodes[name]) for name in wanted}
    made = [_rule(rule, policies[name]) for name, rule in sorted(rules.items()) if name in policies]
    errors = dict(read.execute("SELECT rule, error FROM rule WHERE error <> ''").fetchall())
    ends = time.monotonic() + seconds
    for summary in made:
        if summary["status"] == "ok":
            _ask(read, now, summary, items, bool(asked), ends)
        if summary["status"] == NO_PROBE:
            summary["problem"] = errors.get(str(summary["rule"])) or "no agent has sent the columns it reads"
    _probes(read, now, rules, items, tables)
    if asked:
        for row in rows(read, _CAPABILITIES, {"now": now, "nodes": wanted}):
            node = str(row.pop("node"))
            _list(items[node], "capabilities").append({**row, "since": iso(row["since"])})
    done = list(items.values())
    return document("Coverage", now, done, fleet=_fleet(done, made), rules=made)


def _nodes(read: duckdb.DuckDBPyConnection, now: datetime) -> dict[str, Row]:
    found = rows(
        read,
        "SELECT n.node, nullif(n.expectation, 'none') AS expectation, "
        "greatest(h.received_at, CASE WHEN n.hello_at <= $now THEN n.hello_at END) AS seen_at "
        "FROM node_list($now) n LEFT JOIN heard_at($now, '1 hour') h USING (node) ORDER BY node",
        {"now": now},
    )
    return {str(row["node"]): {**row, "age_s": age_s(now, row["seen_at"])} for row in found}


def _item(node: Row) -> Row:
    age = node["age_s"]
    return {
        "node": node["node"],
        "silent": not isinstance(age, float) or age > 90,
        "seen_at": iso(node["seen_at"]),
        "age_s": age,
        "expectation": node["expectation"],
        "judged": 0,
        "unknown": 0,
        "na": 0,
        "gaps": [],
        "probes_failing": [],
        "probes_off": [],
        "capabilities": [],
    }


def _rule(rule: Rule, policy: Policy) -> Row:
    return {
        "rule": rule.name,
        "title": policy.title,
        "status": "ok" if policy.enabled else "disabled",
        "problem": None,
        "judged": 0,
        "unknown": 0,
        "na": 0,
        "reasons": [],
    }


def _ask(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    summary: Row,
    items: Mapping[str, Row],
    whole: bool,
    ends: float,
) -> None:
    """Run one rule and count what it says of these nodes."""
    left = ends - time.monotonic()
    if left <= 0:
        summary["status"], summary["problem"] = "not asked", "the time was over before its turn"
        return
    where = "WHERE node IN (SELECT unnest($nodes::VARCHAR[]))" if whole else ""
    given = {"now": now} | ({"nodes": sorted(items)} if whole else {})
    try:
        with sandbox.watch(read, left, None):
            said = rows(read, _SAID.format(rule=summary["rule"], where=where), given)
    except duckdb.InterruptException:
        summary["status"], summary["problem"] = "too slow", f"stopped after {left:.1f} s"
        return
    except (duckdb.CatalogException, duckdb.BinderException):
        summary["status"] = NO_PROBE
        return
    except duckdb.Error as error:
        summary["status"], summary["problem"] = "failed", one_line(error)
        return
    reasons: dict[tuple[str, str], Row] = {}
    for row in said:
        word = {"unknown": "unknown", "n/a": "na"}.get(str(row["verdict"]), "judged")
        count = int(str(row["entities"]))
        summary[word] = int(str(summary[word])) + count
        item = items.get(str(row["node"]))
        if item is not None:
            item[word] = int(str(item[word])) + count
            if word == "unknown" or (whole and word == "na"):
                gap = {key: row[key] for key in ("verdict", "code", "entities", "reason")}
                _list(item, "gaps").append({"rule": summary["rule"], **gap})
        if word != "judged":
            key = (str(row["verdict"]), str(row["code"]))
            one = reasons.setdefault(
                key,
                {"verdict": key[0], "code": key[1], "reason": row["reason"], "entities": 0, "nodes": 0,
                 "examples": []},
            )  # fmt: skip
            one["entities"] = int(str(one["entities"])) + count
            one["nodes"] = int(str(one["nodes"])) + 1
            if len(_list(one, "examples")) < MAX_NODES_NAMED:
                _list(one, "examples").append(row["node"])
    summary["reasons"] = sorted(
        reasons.values(), key=lambda one: (one["verdict"] != "unknown", -int(str(one["entities"])))
    )


def _probes(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    rules: Mapping[str, Rule],
    items: Mapping[str, Row],
    tables: Mapping[str, object],
) -> None:
    """Probes that fail, and those that rules want and a node does not run."""
    if "agent" in tables:
        for row in rows(read, _PROBLEMS, {"now": now}):
            if str(row["node"]) in items:
                _list(items[str(row["node"])], "probes_failing").append(
                    {"probe": row["probe"], "error": row["error"], "at": iso(row["ts"])}
                )
    runs: dict[str, set[str]] = {}
    for node, probe in read.execute("SELECT node, probe FROM probe").fetchall():
        runs.setdefault(node, set()).add(probe)
    everywhere = set().union(*runs.values()) if runs else set()
    wants = {name: reads(rule).words & everywhere for name, rule in rules.items()}
    for name, item in items.items():
        for probe in sorted(everywhere - runs.get(name, set())):
            _list(item, "probes_off").append(
                {"probe": probe, "rules": sorted(rule for rule, words in wants.items() if probe in words)}
            )


def _fleet(items: Sequence[Row], made: Sequence[Row]) -> Row:
    """The summary: nodes by how much of them is judged, and rules by whether they run."""
    silent = sum(bool(item["silent"]) for item in items)
    heard = [item for item in items if not item["silent"]]
    partly = sum(bool(item["judged"]) and bool(item["unknown"]) for item in heard)
    unjudged = sum(not item["judged"] for item in heard)
    return {
        "nodes": len(items),
        "nodes_judged": len(heard) - partly - unjudged,
        "nodes_partly": partly,
        "nodes_unjudged": unjudged,
        "nodes_silent": silent,
        "nodes_without_expectation": sum(item["expectation"] is None for item in items),
        "rules": len(made),
        "rules_running": sum(one["status"] == "ok" for one in made),
        "judged": sum(int(str(one["judged"])) for one in made),
        "unknown": sum(int(str(one["unknown"])) for one in made),
        "na": sum(int(str(one["na"])) for one in made),
    }


def _list(row: Row, key: str) -> list[object]:
    found = row[key]
    assert isinstance(found, list)
    return found
