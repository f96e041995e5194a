"""What people see of benches: who is measured, how a card did over time, beside past, host and peers.

Numbers are those that the rules judge by (macro `bench_series`).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

import duckdb

from gpufleet_collector import baselines, retest
from gpufleet_collector.bench_runs import Answer
from gpufleet_collector.documents import (
    Document,
    NotFound,
    Row,
    age_s,
    document,
    find_card,
    iso,
    place,
    place_of,
    rows,
)

SINCE_S = 7 * 86400.0
MOST_ROWS = 5000

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"


def find(read: duckdb.DuckDBPyConnection, now: datetime, subject: str) -> tuple[str, str]:
    """The node, and the card where a card is meant (else empty), of what a person wrote.

    Raises:
        NotFound: Neither a node nor a card has that name.
        Ambiguous: Several cards have.
    """
    if read.execute("SELECT 1 FROM node_list(?::TIMESTAMP) WHERE node = ?", [now, subject]).fetchone():
        return subject, ""
    try:
        card = find_card(read, now, subject)
    except NotFound:
        raise NotFound(
            f"no node or card {subject!r}\ngive a node, a UUID (8 characters do), a serial or NODE/INDEX"
        ) from None
    return str(card["node"]), str(card["entity"])


def card_of(read: duckdb.DuckDBPyConnection, now: datetime, node: str, gpu: str) -> str:
    """The entity of one card of a node, by its index or any of its names; empty for no name.

    Raises:
        NotFound: The node or the card does not exist.
        Ambiguous: Several cards have that name.
    """
    if not read.execute("SELECT 1 FROM node_list(?::TIMESTAMP) WHERE node = ?", [now, node]).fetchone():
        raise NotFound(f"no node {node!r}\nsee fleet node")
    if not gpu:
        return ""
    card = find_card(read, now, f"{node}/{gpu}" if gpu.isdigit() and len(gpu) < 4 else gpu)
    if card["node"] != node:
        raise NotFound(f"card {gpu!r} is not on {node}, but on {card['node']}")
    return str(card["entity"])


# ---- what runs where ----


def overview(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
    """A line per node, and the suspects."""
    found = rows(read, _OVERVIEW, {"now": now})
    spent = {
        row["node"]: row["total"]
        for row in _try(
            read,
            "SELECT node, max_by(bench_gpu_s_total, ts) AS total FROM agent WHERE probe = 'agent' "
            "AND ts > $now - INTERVAL 5 MINUTE AND ts <= $now GROUP BY node",
            {"now": now},
        )
    }
    items = [
        {
            **{key: row[key] for key in ("node", "cards", "measured", "stale", "skipped")},
            "measured_at": iso(row["measured_at"]),
            "age_s": age_s(now, row["measured_at"]),
            "oldest_age_s": age_s(now, row["oldest_at"]),
            "last_status": row["last_status"],
            "last_reason": row["last_reason"] or None,
            "gpu_s_last_hour": row["gpu_s"],
            "gpu_s_total": spent.get(row["node"]),
        }
        for row in found
    ]
    return document("BenchList", now, items, suspects=_suspects(read, now))


def _suspects(read: duckdb.DuckDBPyConnection, now: datetime) -> list[Row]:
    due = {(one.node, one.entity): one for one in retest.suspects(read, now)}
    found = rows(
        read,
        "SELECT f.id, f.rule, f.node, f.entity, f.state, f.reason, f.began_at, f.last_evidence_at, "
        "len(list_filter(CAST(try_cast(f.evidence AS JSON) AS JSON[]), lambda e: (e ->> 1) <> 'ok')) AS bad, "
        "f.incident, c.gpu_index "
        "FROM finding f LEFT JOIN (SELECT node, entity, max_by(gpu_index, valid_from) AS gpu_index "
        "FROM inventory WHERE kind = 'gpu' GROUP BY ALL) c ON c.node = f.node AND c.entity = f.entity "
        "WHERE f.rule IN ('bandwidth_regression', 'bandwidth_regression_host') AND f.state <> 'resolved' "
        "ORDER BY f.state, f.began_at, f.id",
    )
    out: list[Row] = []
    for row in found:
        next_ = due.get((str(row["node"]), str(row["entity"]))) if row["state"] == "pending" else None
        out.append(
            {
                "rule": row["rule"],
                "node": row["node"],
                "entity": row["entity"],
                "place": place(row["node"], row["gpu_index"]),
                "state": row["state"],
                "reason": row["reason"],
                "bad_runs": row["bad"],
                "began_at": iso(row["began_at"]),
                "last_evidence_at": iso(row["last_evidence_at"]),
                "retest_at": iso(next_.due) if next_ else None,
                "retest_in_s": max(0.0, (next_.due - now).total_seconds()) if next_ else None,
                "retests": next_.tries if next_ else None,
                "incident": row["incident"],
            }
        )
    return out


# ---- a run that was asked for ----


def of_run(
    read: duckdb.DuckDBPyConnection, now: datetime, node: str, entity: str, answers: Sequence[Answer]
) -> Document:
    """What came of a run, each result judged: its rows must be in the store.

    `verdict` is `bad` when anything is below its baseline or floor, failed or hung; else `unknown` when
    anything was not measured or has nothing to be compared with; else `good`.
    """
    leases = [answer.lease for answer in answers]
    found = _try(read, _RUN, {"now": now, "node": node, "leases": leases})
    items = [_judged(row) for row in found]
    told = {str(row["bench"]) for row in items}
    for answer in answers:
        if answer.bench not in told:
            items.append(_nothing(node, entity, answer))
    verdicts = {str(item["verdict"]) for item in items}
    verdict = next((one for one in (BAD, UNKNOWN, GOOD) if one in verdicts), UNKNOWN)
    return document("BenchRun", now, items, node=node, entity=entity or None, verdict=verdict)


def _judged(row: Row) -> Row:
    code, verdict = str(row["code"]), UNKNOWN
    if row["status"] in ("failed", "hung") or code in ("slower", "below_floor"):
        verdict = BAD
    elif code in ("as_before", "above_floor"):
        verdict = GOOD
    return {
        **{key: row[key] for key in ("node", "entity", "gpu_index")},
        "place": _place(row),
        "ts": iso(row["ts"]),
        **{key: row[key] for key in ("bench", "lease", "status")},
        "reason": row["reason"] or None,
        **{key: row[key] for key in ("value", "unit", "spread", "seconds")},
        **{key: row[key] for key in ("baseline", "baseline_state", "baseline_n", "ratio", "net_ratio")},
        **{key: row[key] for key in ("floor", "typical")},
        "code": code,
        "verdict": verdict,
    }


def _nothing(node: str, entity: str, answer: Answer) -> Row:
    """An answer without rows."""
    empty = dict.fromkeys(
        ("ts", "value", "unit", "spread", "seconds", "baseline", "baseline_state", "baseline_n", "ratio",
         "net_ratio", "floor", "typical")
    )  # fmt: skip
    return {
        "node": node, "entity": entity or None, "gpu_index": None, "place": node, **empty,
        "bench": answer.bench, "lease": answer.lease, "status": answer.outcome,
        "reason": (f"{answer.node}: " if answer.node else "") + answer.message or None,
        "code": answer.outcome,
        "verdict": BAD if answer.outcome == "failed" else UNKNOWN,
    }  # fmt: skip


# ---- history ----


def history(
    read: duckdb.DuckDBPyConnection, now: datetime, subject: str, bench: str, since_s: float
) -> Document:
    """Every run on a node or card, newest first, also those without a value.

    Raises:
        NotFound: There is no such node, card or bench.
        Ambiguous: Several cards have that name.
    """
    node, entity = find(read, now, subject)
    since_s = since_s if 0 < since_s <= 366 * 86400 else SINCE_S
    given = {"now": now, "node": node, "entity": entity, "bench": bench, "since_s": since_s}
    found = _try(read, _HISTORY, given | {"most": MOST_ROWS + 1})
    if bench and not found and not _try(read, "SELECT 1 FROM bench WHERE bench = $bench LIMIT 1", given):
        raise NotFound(f"no bench {bench!r} has ever run\nsee fleet bench history {subject}")
    items = [
        {
            "ts": iso(row["ts"]),
            "place": _place(row),
            **{key: row[key] for key in ("node", "entity", "gpu_index", "bench", "link", "status")},
            "reason": row["reason"] or None,
            **{key: row[key] for key in ("value", "unit", "spread", "baseline", "baseline_state", "ratio")},
            "epoch": row["epoch"] or None,
            "epoch_changed": row["epoch_changed"],
            "lease": row["lease"] or None,
            **{key: row[key] for key in ("temperature_c", "power_w", "sm_clock_mhz", "clock_reasons")},
        }
        for row in found[:MOST_ROWS]
    ]
    return document(
        "BenchHistory", now, items, node=node, entity=entity or None, bench=bench or None, since_s=since_s,
        complete=len(found) <= MOST_ROWS,
    )  # fmt: skip


# ---- comparison ----


def compare(read: duckdb.DuckDBPyConnection, now: datetime, subject: str, by: str) -> Document:
    """The newest results of all that a node has, or of a model's cards, worst first.

    Raises:
        NotFound: There is no such node or model.
    """
    if by not in ("", "percent", "z"):
        raise NotFound(f"no order {by!r}\ngive percent or z")
    there = read.execute("SELECT 1 FROM node_list(?::TIMESTAMP) WHERE node = ?", [now, subject]).fetchone()
    models = [
        str(row["model"])
        for row in rows(
            read,
            "SELECT DISTINCT model FROM card_list($now) WHERE lower(model) = lower($name) "
            "OR contains(lower(model), lower($name)) AND length($name) >= 3 ORDER BY model",
            {"now": now, "name": subject},
        )
    ]
    if not there and not models:
        raise NotFound(f"no node or card model {subject!r}\nsee fleet node, or fleet inventory")
    found = rows(
        read, _COMPARE, {"now": now, "node": subject if there else "", "models": [] if there else models}
    )
    key = "worst_z" if by == "z" else "worst_ratio"
    items = [
        {
            "place": _place(row),
            **{name: value for name, value in row.items() if name not in ("ok_at", "down", "host_down")},
            "measured_at": iso(row["ok_at"]),
            "age_s": age_s(now, row["ok_at"]),
            "down": row["down"],
            "host_down": row["host_down"],
        }
        for row in found
    ]
    items.sort(key=lambda item: (item[key] is None, item[key], item["place"]))
    return document("BenchComparison", now, items, subject=subject, by=by or "percent")


# ---- baselines ----


def baseline_list(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    node: str,
    entity: str,
    only: Sequence[tuple[str, str, str]] | None = None,
) -> Document:
    """What is learned, frozen or accepted as normal; `node` empty = everywhere, `only` = just these."""
    found = rows(read, _BASELINES, {"now": now, "node": node, "entity": entity})
    if only is not None:
        wanted = set(only)
        found = [row for row in found if (row["node"], row["entity"], row["key"]) in wanted]
    items = []
    for row in found:
        bench, _, series = str(row["key"]).partition("/")
        learning = row["state"] == "learning"
        items.append(
            {
                "place": _place(row),
                **{key: row[key] for key in ("node", "entity", "gpu_index")},
                "bench": bench,
                "series": series or None,
                **{key: row[key] for key in ("key", "value", "unit", "spread", "n", "state")},
                "needed": baselines.FROZEN_AT if learning else None,
                "epoch": row["epoch"] or None,
                "newest_epoch": row["newest_epoch"] or None,
                "outdated": bool(row["outdated"]),
                "set_by": row["set_by"],
                "set_at": iso(row["set_at"]),
                "reason": row["reason"] or None,
            }
        )
    return document("BaselineList", now, items)


def _place(row: Row) -> str:
    """`gpu-a03/3`, `gpu-a03`, or what it is on the node: `gpu-a03 numa:1`."""
    return place_of(row, {(str(row["node"]), str(row["entity"])): row})


def _try(read: duckdb.DuckDBPyConnection, sql: str, given: Mapping[str, object]) -> list[Row]:
    """Rows of a query over tables or columns that no agent may have described yet."""
    used = {name: value for name, value in given.items() if f"${name}" in sql}
    try:
        return rows(read, sql, used)
    except (duckdb.CatalogException, duckdb.BinderException):
        return []


_INDEX = """(select node, entity, max_by(gpu_index, valid_from) as gpu_index from inventory
             where kind = 'gpu' group by node, entity)"""

_OVERVIEW = """
with run as (
    select node, entity, max(ts) filter (status = 'ok') as ok_at, max(ts) as any_at,
           max_by(status, ts) as status, max_by(reason, ts) as reason,
           sum(least(greatest(gpu_seconds, 0), 3600)) filter (ts > $now - interval 1 hour) as gpu_s,
           count(*) filter (status = 'skipped' and ts > $now - interval 1 day) as skipped
    from bench_samples() where ts > $now - interval 30 day and ts <= $now group by node, entity
),
card as (
    select c.node, c.entity, r.* exclude (node, entity)
    from card_list($now) c left join run r on r.node = c.node and r.entity = c.entity
    where c.installed and c.gpu_uuid is not null
),
stale as (select node, entity from finding where rule = 'bench_stale' and state <> 'resolved')
select n.node, count(c.entity) as cards,
       count(*) filter (c.ok_at > $now - interval 48 hour) as measured,
       count(*) filter (s.entity is not null) as stale,
       coalesce(sum(c.skipped), 0)::bigint as skipped,
       max(c.ok_at) as measured_at, if(count(c.ok_at) = count(c.entity), min(c.ok_at), null) as oldest_at,
       max_by(c.status, c.any_at) as last_status, max_by(c.reason, c.any_at) as last_reason,
       max(c.gpu_s) as gpu_s
from node_list($now) n left join card c on c.node = n.node
left join stale s on s.node = c.node and s.entity = c.entity
group by n.node order by n.node
"""

_RUN = f"""
with run as (
    select b.*, bench_key(bench, version, convention, params_hash, link) as key
    from bench b
    where node = $node and lease in (select unnest($leases::varchar[])) and ts > $now - interval 1 day
),
series as (
    select * from bench_series($now) where node = $node
)
select r.node, r.entity, i.gpu_index, r.ts, r.bench, r.lease, r.status, r.reason, r.value, r.unit, r.spread,
       r.seconds,
       s.base as baseline, s.base_state as baseline_state, s.base_n as baseline_n,
       if(r.unit in ('us', 'ms', 's'), s.base / nullif(r.value, 0), r.value / nullif(s.base, 0)) as ratio,
       if(s.ok_at = r.ts, exp(s.net), null) as net_ratio, f.floor,
       (select max_by(e.typical, length(e.words)) from bench_expected() e
        where e.bench = r.bench and e.convention = r.convention
          and e.link in ('', split_part(coalesce(r.link, ''), ':', 1))
          and contains(' ' || trim(regexp_replace(lower(s.cards), '[^a-z0-9]+', ' ', 'g')) || ' ',
                       ' ' || e.words || ' ')
       ) as typical,
       case when r.status <> 'ok' or r.value is null then r.status
            when r.unit = 'GB/s' and r.value < f.floor and s.base_state is distinct from 'accepted'
                 then 'below_floor'
            when s.ok_at = r.ts and s.d is not null then if(s.down, 'slower', 'as_before')
            when f.floor is not null and r.unit = 'GB/s' then 'above_floor'
            when s.ok_at is distinct from r.ts then 'newer_run' else 'learning' end as code
from run r
left join series s on s.entity = r.entity and s.key = r.key
left join bench_floors($now) f on f.model = s.cards and f.bench = r.bench and f.convention = r.convention
      and f.link in ('', split_part(coalesce(r.link, ''), ':', 1))
left join {_INDEX} i on i.node = r.node and i.entity = r.entity
order by r.entity = 'node:', i.gpu_index, r.entity, r.ts
"""

_HISTORY = f"""
with run as (
    select r.*, {baselines.EPOCH} as epoch, i2.gpu_index,
           bench_key(r.bench, r.version, r.convention, r.params_hash, r.link) as key
    from bench r {baselines.FIRMWARE}
    left join {_INDEX} i2 on i2.node = r.node and i2.entity = r.entity
    where r.node = $node and ($entity = '' or r.entity = $entity) and ($bench = '' or r.bench = $bench)
      and r.ts > $now - to_seconds($since_s::double) and r.ts <= $now
),
marked as (
    select *, status = 'ok' and epoch is distinct from lag(epoch, 1, epoch) over (
                  partition by node, entity, key, status = 'ok' order by ts) as epoch_changed
    from run
)
select m.*, b.value as baseline, b.state as baseline_state,
       if(m.unit in ('us', 'ms', 's'), b.value / nullif(m.value, 0), m.value / nullif(b.value, 0)) as ratio
from marked m left join baseline b on b.node = m.node and b.entity = m.entity and b.key = m.key
order by m.ts desc, m.gpu_index, m.entity, m.bench limit $most
"""

_COMPARE = f"""
with series as (
    -- a card is compared with cards, a NUMA node with NUMA nodes, a port with ports
    select *, split_part(entity, ':', 1) as kind from bench_series($now)
    where key is not null and current and value > 0
),
wanted as (
    select * from series
    where node = $node or kind = 'gpu' and model in (select unnest($models::varchar[]))
),
peer as (
    select kind, model, key, median(value) as value, 1.4826 * mad(ln(value)) as s, count(*) as n
    from series where recent group by kind, model, key
),
own as (
    select node, kind, model, key, count(*) as n from series where recent group by node, kind, model, key
),
sibling as (
    select w.node, w.entity, w.key, median(o.value) as value, count(*) as n
    from wanted w join series o on o.node = w.node and o.model = w.model and o.key = w.key
                                and o.entity <> w.entity and o.kind = w.kind
    group by w.node, w.entity, w.key
),
rated as (
    select w.node, w.entity, i.gpu_index, w.model, w.bench, w.convention, w.link, w.ok_at, w.value,
           w.unit, w.s as noise, w.down, w.host_down, w.base as baseline, w.base_state as baseline_state,
           s.value as siblings, coalesce(s.n, 0) as n_siblings,
           if(p.n - coalesce(o.n, 0) >= 5, p.value, null) as peers,
           greatest(p.n - coalesce(o.n, 0), 0) as n_peers,
           exp(w.d) as own_ratio,
           if(w.less_is_better, s.value / w.value, w.value / s.value) as siblings_ratio,
           if(w.less_is_better, peers / w.value, w.value / peers) as peers_ratio,
           w.d / nullif(w.s, 0) as own_z, ln(siblings_ratio) / nullif(w.s, 0) as siblings_z,
           ln(peers_ratio) / nullif(greatest(w.s, coalesce(p.s, 0)), 0) as peers_z
    from wanted w
    left join sibling s on s.node = w.node and s.entity = w.entity and s.key = w.key
    left join peer p on p.kind = w.kind and p.model = w.model and p.key = w.key
    left join own o on o.node = w.node and o.kind = w.kind and o.model = w.model and o.key = w.key
    left join {_INDEX} i on i.node = w.node and i.entity = w.entity
)
select *, least(own_ratio, siblings_ratio, peers_ratio) as worst_ratio,
       least(own_z, siblings_z, peers_z) as worst_z
from rated
"""

_BASELINES = f"""
with newest as (
    select node, entity, bench_key(bench, version, convention, params_hash, link) as key,
           max_by(epoch, ts) as epoch, max_by(unit, ts) as unit
    from (select r.*, {baselines.EPOCH} as epoch from bench_samples() r {baselines.FIRMWARE}
          where r.ts > $now - interval 14 day and r.ts <= $now and r.status = 'ok')
    group by all
)
select b.*, i.gpu_index, n.epoch as newest_epoch, n.unit,
       b.epoch <> '' and n.epoch <> '' and n.epoch <> b.epoch as outdated
from baseline b
left join newest n on n.node = b.node and n.entity = b.entity and n.key = b.key
left join {_INDEX} i on i.node = b.node and i.entity = b.entity
where ($node = '' or b.node = $node) and ($entity = '' or b.entity = $entity)
order by b.node, i.gpu_index, b.entity, b.key
"""
