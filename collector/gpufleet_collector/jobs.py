"""Whose work it is: jobs for documents. Who runs where now, and whom a finding hurts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import duckdb

Row = dict[str, object]

BEFORE = timedelta(seconds=90)
"""A job that held the card this long before a finding began may be what ended with it."""

AFTER = timedelta(minutes=30)
"""For this long after its beginning a finding is looked at: a trouble of days is not read through whole."""

LATELY = timedelta(minutes=2)
"""And so long before its end, or now."""

ENTITY = "job:"


@dataclass(frozen=True, slots=True)
class Hurt:
    """What to look for: who held a card, or any card of a node, in a stretch of time.

    Attributes:
        key: Of what is asked for, e.g. the number of an incident.
        node: Where; empty for a job that spans nodes.
        entity: Of a finding: a card, a job, or anything else of the node.
        since: When it began.
        until: When it ended, or now.
    """

    key: int
    node: str
    entity: str
    since: datetime
    until: datetime


_HURT = """
    WITH wanted AS (
        SELECT unnest($keys::BIGINT[]) AS key, unnest($nodes::VARCHAR[]) AS node,
               unnest($entities::VARCHAR[]) AS entity, unnest($since::TIMESTAMP[]) AS since,
               unnest($until::TIMESTAMP[]) AS until
    ),
    held AS (
        SELECT * FROM job_samples()
        WHERE ts BETWEEN $first::TIMESTAMP AND $last::TIMESTAMP AND job_id IS NOT NULL
    ),
    hurt AS (
        SELECT w.key, j.* FROM wanted w JOIN held j ON j.node = w.node
        WHERE j.ts BETWEEN w.since AND w.until AND w.entity NOT LIKE 'job:%'
          AND (w.entity NOT LIKE 'gpu:%' OR w.entity = 'gpu:' || j.gpu_uuid)
        UNION ALL
        SELECT w.key, j.* FROM wanted w JOIN held j ON w.entity = 'job:' || j.job_id
        WHERE j.ts BETWEEN w.since AND w.until AND w.node IN ('', j.node)
    )
    SELECT key, job_id, any_value(job_kind) AS kind, any_value(coalesce(user, uid::VARCHAR)) AS user,
           list(DISTINCT [node, coalesce(gpu_uuid, '')]) AS cards
    FROM hurt
    GROUP BY key, job_id, if(job_kind = 'slurm', '', node)
"""


def hurt(read: duckdb.DuckDBPyConnection, wanted: Sequence[Hurt]) -> dict[int, list[Row]]:
    """The jobs behind each key; a key of which no node tells about its jobs is not in it."""
    if not wanted:
        return {}
    tells = {
        str(row[0]) for row in read.execute("SELECT DISTINCT node FROM probe WHERE probe = 'job'").fetchall()
    }
    known = [one for one in wanted if one.node in tells or (not one.node and tells)]
    cards: dict[tuple[int, str, str, str], set[tuple[str, str]]] = {}
    users: dict[tuple[int, str, str, str], str] = {}
    for chunk in _chunks([span for one in known for span in _spans(one)]):
        parameters = {
            "keys": [one.key for one in chunk],
            "nodes": [one.node for one in chunk],
            "entities": [one.entity for one in chunk],
            "since": [one.since for one in chunk],
            "until": [one.until for one in chunk],
            "first": min(one.since for one in chunk),
            "last": max(one.until for one in chunk),
        }
        for key, job_id, kind, user, held in read.execute(_HURT, parameters).fetchall():
            who = (key, job_id, kind, "" if kind == "slurm" else held[0][0])
            cards.setdefault(who, set()).update((node, card) for node, card in held)
            users[who] = user
    found: dict[int, list[Row]] = {one.key: [] for one in known}
    for who in sorted(cards, key=lambda who: (-len(cards[who]), who)):
        key, job_id, kind, _ = who
        nodes = sorted({node for node, _ in cards[who]})
        found[key].append(
            {"job_id": job_id, "kind": kind, "user": users[who], "nodes": nodes, "cards": len(cards[who])}
        )
    return found


def _spans(one: Hurt) -> list[Hurt]:
    """Its beginning, and its end where that is another time."""
    first = replace(one, since=one.since - BEFORE, until=min(one.until, one.since + AFTER))
    return [first] if first.until == one.until else [first, replace(one, since=one.until - LATELY)]


def _chunks(spans: Sequence[Hurt]) -> list[list[Hurt]]:
    """Spans that overlap, together: what is read is a few short stretches, however long ago they were."""
    chunks: list[list[Hurt]] = []
    last = datetime.min
    for span in sorted(spans, key=lambda span: span.since):
        if not chunks or span.since > last:
            chunks.append([])
        chunks[-1].append(span)
        last = max(last, span.until) if len(chunks[-1]) > 1 else span.until
    return chunks


_NOW = """
    WITH held AS (SELECT * FROM jobs_at($now)),
    -- its own trouble, and that of the cards it holds and of the nodes they are in
    part AS (
        SELECT DISTINCT job_node, job_id, job_node AS node, 'job:' || job_id AS entity, 'job' AS what
        FROM held WHERE job_id IS NOT NULL
        UNION ALL
        SELECT DISTINCT job_node, job_id, node, 'gpu:' || gpu_uuid, 'card' FROM held
    ),
    host AS (SELECT DISTINCT job_node, job_id, node FROM held),
    found AS (
        SELECT *, CASE WHEN entity LIKE 'nvlink:%' THEN 'gpu:' || split_part(substr(entity, 8), '/', 1)
                       ELSE coalesce(c.card, entity) END AS thing
        FROM findings_at($now) f
        LEFT JOIN (SELECT node AS at_node, 'pci:' || pci AS address, any_value(entity) AS card
                   FROM card_list($now) WHERE installed AND pci IS NOT NULL GROUP BY node, pci) c
               ON c.at_node = f.node AND c.address = f.entity
    ),
    trouble AS (
        SELECT p.job_node, p.job_id, p.what, f.* FROM part p
        JOIN found f ON f.node = p.node AND f.thing = p.entity
        UNION ALL
        SELECT h.job_node, h.job_id, 'node', f.* FROM host h
        JOIN found f ON f.node = h.node AND f.thing NOT LIKE 'gpu:%' AND f.thing NOT LIKE 'job:%'
    ),
    judged AS (
        SELECT job_node, job_id, bool_or(verdict = 'crit') AS critical,
               list(DISTINCT what ORDER BY what DESC) AS trouble_in, list(DISTINCT id) AS findings,
               arg_min(reason, (verdict, what <> 'job', id)) AS reason
        FROM trouble GROUP BY job_node, job_id
    )
    SELECT j.job_id, any_value(j.job_kind) AS kind,
           CASE WHEN any_value(t.trouble_in) IS NULL THEN 'ok'
                WHEN bool_or(t.critical) THEN 'critical' ELSE 'degraded' END AS state,
           coalesce(any_value(t.trouble_in), []) AS trouble_in,
           any_value(coalesce(j.user, j.uid::VARCHAR)) AS user,
           list(DISTINCT j.node ORDER BY j.node) AS nodes, count(DISTINCT (j.node, j.gpu_uuid)) AS cards,
           max(j.world) AS world, any_value(j.command) AS command,
           nullif(any_value(j.container), '') AS container,
           sum(j.mem_used_bytes)::BIGINT AS mem_used_bytes, round(max(j.age_s), 3) AS age_s,
           any_value(t.reason) AS reason, coalesce(any_value(t.findings), []) AS findings,
           list({'node': j.node, 'gpu_index': j.gpu_index, 'gpu_uuid': j.gpu_uuid, 'rank': j.rank,
                 'pid': j.pid, 'step': nullif(j.job_step, ''), 'command': j.command,
                 'mem_used_bytes': j.mem_used_bytes}
                ORDER BY j.rank, j.node, j.gpu_index, j.pid) AS gpus
    FROM held j
    LEFT JOIN judged t ON t.job_node = j.job_node AND t.job_id IS NOT DISTINCT FROM j.job_id
    WHERE ($job = '' OR j.job_id = $job) AND ($node = '' OR j.node = $node)
      AND ($gpu_uuid = '' OR j.gpu_uuid = $gpu_uuid)
    GROUP BY j.job_node, j.job_id
    ORDER BY j.job_id IS NULL, cards DESC, j.job_id, j.job_node
"""
"""`trouble_in` says whose the findings are: the job's, its cards', its nodes'; `findings` are their ids."""


def now(
    read: duckdb.DuckDBPyConnection, at: datetime, job: str = "", node: str = "", gpu_uuid: str = ""
) -> list[Row]:
    """Jobs that hold cards now, the largest first; of one name, on one node or on one card if asked."""
    cursor = read.execute(_NOW, {"now": at, "job": job, "node": node, "gpu_uuid": gpu_uuid})
    names = [str(column[0]) for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def short(item: Mapping[str, object]) -> Row:
    """What a card or node shows of a job."""
    return {key: item[key] for key in ("job_id", "kind", "user", "nodes", "cards")}


def told(read: duckdb.DuckDBPyConnection, node: str) -> bool:
    """Whether the agent of a node tells about jobs."""
    sql = "SELECT 1 FROM probe WHERE probe = 'job' AND node = ?"
    return read.execute(sql, [node]).fetchone() is not None
