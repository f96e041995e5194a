"""Documents for people about what people did: silences, maintenance windows, and the hand-over of a shift."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

import duckdb
import msgspec

from gpufleet import hostlist
from gpufleet_collector import documents, people
from gpufleet_collector.documents import Document, Row, iso, rows
from gpufleet_collector.people import Matcher, PeopleError

LONGEST = timedelta(days=92)
"""A report goes back no further: older incidents have left the store."""

MOST = 1000
"""Rows of one kind in a report."""

_OVER = "least(until, coalesce(ended_at, until))"


def silences(read: duckdb.DuckDBPyConnection, now: datetime, only: Sequence[int] = ()) -> Document:
    """Silences in force, or those of `only`, with what each of them silences now."""
    found = rows(
        read,
        f"""
        SELECT s.*, {_OVER} AS over, m.findings, m.incidents
        FROM silence s LEFT JOIN (
            SELECT silence, count(*) AS findings, list(DISTINCT incident ORDER BY incident)
                   FILTER (incident IS NOT NULL) AS incidents
            FROM silenced_at($now) GROUP BY silence
        ) m ON m.silence = s.id
        WHERE if(len($only::BIGINT[]) = 0, {_OVER} > $now, list_contains($only::BIGINT[], s.id))
        ORDER BY s.id
        """,
        {"now": now, "only": list(only)},
    )
    return documents.document("SilenceList", now, [_silence(row, now) for row in found])


def _silence(row: Row, now: datetime) -> Row:
    names = {key: row[key] for key in ("nodes", "rules", "entities", "serials")}
    matcher = Matcher(*(tuple(map(str, value)) for value in names.values() if isinstance(value, list)))
    return {
        "silence": row["id"],
        "matcher": str(matcher),
        **names,
        **_window(row, now),
        "findings": row["findings"] or 0,
        "incidents": row["incidents"] or [],
    }


def _window(row: Row, now: datetime) -> Row:
    over, begin = row["over"], row["from_at"]
    assert isinstance(over, datetime)
    assert isinstance(begin, datetime)
    return {
        "state": "over" if over <= now else "coming" if begin > now else "running",
        "reason": row["reason"],
        "by": row["actor"],
        "claimed": row["claimed"],
        "from_at": iso(begin),
        "until": iso(row["until"]),
        "left_s": round(max(0.0, (over - max(now, begin)).total_seconds()), 3),
        "ended_at": iso(row["ended_at"]),
        "ended_by": row["ended_by"],
    }


def maintenance(read: duckdb.DuckDBPyConnection, now: datetime, only: Sequence[int] = ()) -> Document:
    """Windows that run or will, or those of `only`."""
    found = rows(
        read,
        f"SELECT *, {_OVER} AS over FROM maintenance "
        f"WHERE if(len($only::BIGINT[]) = 0, {_OVER} > $now, list_contains($only::BIGINT[], id)) "
        "ORDER BY from_at, id",
        {"now": now, "only": list(only)},
    )
    return documents.document("MaintenanceList", now, [_maintenance(row, now) for row in found])


def _maintenance(row: Row, now: datetime) -> Row:
    nodes = row["nodes"]
    assert isinstance(nodes, list)
    return {
        "maintenance": row["id"],
        "names": hostlist.fold(map(str, nodes)),
        "nodes": nodes,
        **_window(row, now),
    }


def acted(
    read: duckdb.DuckDBPyConnection, now: datetime, numbers: Sequence[int], notes: Sequence[str]
) -> Document:
    """Incidents after somebody did something with them, and what that person should know."""
    found = documents.incidents(read, now, open_only=False, numbers=numbers)
    return documents.document("IncidentList", now, found, warnings=list(notes))


def handover(read: duckdb.DuckDBPyConnection, now: datetime, since_s: float) -> Document:
    """What a shift leaves to the next: incidents of the time, silences, windows, and who did what.

    Raises:
        PeopleError: The time is out of bounds.
    """
    if not math.isfinite(since_s) or not 1 <= since_s <= LONGEST.total_seconds():
        raise PeopleError(f"a report covers from a second to {LONGEST.days} days")
    since = now - timedelta(seconds=since_s)
    numbers = [
        row["number"]
        for row in rows(
            read,
            "SELECT number FROM incident WHERE state = 'open' OR resolved_at >= ? OR opened_at >= ? "
            "OR number IN (SELECT number FROM incident_act WHERE acted_at >= ?) "
            "ORDER BY state = 'resolved', number DESC LIMIT ?",
            [since, since, since, MOST + 1],
        )
    ]
    listed = [int(str(number)) for number in numbers[:MOST]]
    found = documents.incidents(read, now, open_only=False, numbers=listed)
    done = people.acts(read, listed, since)
    border = since.isoformat()
    items = [_chapter(one, border) | {"acts": done.get(int(str(one["number"])), [])} for one in found]
    return documents.document(
        "IncidentReport",
        now,
        items,
        since=iso(since),
        complete=len(numbers) <= MOST,
        counts=_counts(items),
        silences=_during(read, now, since, "silence"),
        maintenance=_during(read, now, since, "maintenance"),
        done=_done(read, since),
    )


def _chapter(incident: Row, since: str) -> Row:
    """Which of opened, open before, and closed in that time it is."""
    opened = str(incident["opened_at"]).removesuffix("Z") >= since
    resolved = incident["resolved_at"]
    return {
        **incident,
        "opened_since": opened,
        "closed_since": resolved is not None and str(resolved).removesuffix("Z") >= since,
    }


def _counts(items: Sequence[Row]) -> Row:
    still = [item for item in items if item["state"] == "open"]
    return {
        "opened": sum(1 for item in items if item["opened_since"]),
        "closed": sum(1 for item in items if item["closed_since"]),
        "still_open": len(still),
        **documents.count_flags(still),
    }


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _during(read: duckdb.DuckDBPyConnection, now: datetime, since: datetime, table: str) -> list[object]:
    """Silences or windows that held at any moment of the time."""
    ids = [
        int(row[0])
        for row in read.execute(
            f"SELECT id FROM {table} WHERE {_OVER} >= ? ORDER BY id DESC LIMIT ?", [since, MOST]
        ).fetchall()
    ]
    if not ids:
        return []
    made = silences(read, now, ids) if table == "silence" else maintenance(read, now, ids)
    return _listed(made["items"])


def _done(read: duckdb.DuckDBPyConnection, since: datetime) -> list[Row]:
    """What people did or were refused, from the audit."""
    found = rows(
        read,
        "SELECT logged_at, actor, verb, target, args::VARCHAR AS args, result FROM audit "
        "WHERE logged_at >= ? AND verb <> 'hello' ORDER BY logged_at LIMIT ?",
        [since, MOST],
    )
    return [
        {
            "logged_at": iso(row["logged_at"]),
            "by": row["actor"],
            "verb": row["verb"],
            "target": row["target"],
            "detail": _args(row["args"]),
            "result": row["result"],
        }
        for row in found
    ]


def _args(text: object) -> object:
    return msgspec.json.decode(text) if isinstance(text, str) else {}
