"""What a card's benches and busy clock looked like when they were good: table `baseline`.

Bench series learn by themselves from ok runs of one epoch (driver, firmware, power limit) and freeze at
`FROZEN_AT` runs; only a person moves them after that (`accept`, inventory.accept). Runs that somebody asked
for, and those of a time in which the bench was in trouble, are never learned from. In a new epoch a series is
learned anew if it is not slower; a slower one waits for a person, so that no loss becomes normal by itself.
Another card has another UUID and so another series.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb

from gpufleet_collector.people import NoSuch, NotNow, PeopleError, Who, audit, one_line
from gpufleet_collector.store import LIVE, Store

FROZEN_AT = 48
"""Runs that make a baseline; then it no longer moves."""

STILL_GOOD = 0.97
"""A series that is learned anew must reach this part of what it was; as step_ratio of the fleet's rule."""

BUSY_CLOCK = "sm_clock_busy_mhz"
"""Key of a card's SM clock under load."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A row of table `baseline`. `spread` is the median absolute deviation as a part of `value`."""

    node: str
    entity: str
    key: str
    value: float
    spread: float | None
    n: int
    epoch: str
    state: str
    set_by: str
    set_at: datetime
    reason: str


def bench_key(bench: str, version: str, convention: str, params_hash: str, link: str) -> str:
    """The key of a bench series; macro `bench_key` in SQL gives the same."""
    return "/".join((bench, version, convention, params_hash, link))


def learn(store: Store, as_of: datetime) -> int:
    """Take new ok runs into the baselines that are still learning; returns how many changed."""
    if "bench" not in store.tables:
        return 0
    with store.reader(LIVE) as read:
        if not read.execute(_ANY_OPEN, {"as_of": as_of}).fetchone():
            return 0
    with store.transaction() as write, store.reader(LIVE) as read:
        rows = read.execute(_LEARN, {"as_of": as_of, "frozen_at": FROZEN_AT}).fetchall()
        learned = [
            Baseline(
                node, entity, key, value, spread, n, epoch or "", "frozen" if n >= FROZEN_AT else "learning",
                "collector", as_of, "learned from ok runs",
            )
            for node, entity, key, value, spread, n, epoch in rows
        ]  # fmt: skip
        put(write, learned)
    return len(learned)


def learn_anew(store: Store, as_of: datetime) -> int:
    """Give series their new epoch's baseline, once it has enough runs and is not slower; returns how many."""
    if "bench" not in store.tables:
        return 0
    with store.reader(LIVE) as read:
        if not read.execute(_ANY_TURNED, {"as_of": as_of}).fetchone():
            return 0
    given = {"as_of": as_of, "frozen_at": FROZEN_AT, "still_good": STILL_GOOD}
    with store.transaction() as write, store.reader(LIVE) as read:
        rows = read.execute(_LEARN_ANEW, given).fetchall()
        anew = [
            Baseline(
                node, entity, key, value, spread, n, epoch, "frozen", "collector", as_of,
                f"learned anew; before {epoch_before or 'unknown'}: {before:.4g}",
            )
            for node, entity, key, value, spread, n, epoch, before, epoch_before in rows
        ]  # fmt: skip
        put(write, anew)
    return len(anew)


def seen_now(
    read: duckdb.DuckDBPyConnection,
    nodes: Sequence[str],
    author: str,
    reason: str,
    at: datetime,
    *,
    benches_only: bool = False,
) -> list[Baseline]:
    """What benches (48 h) and busy clocks (10 minutes) of these nodes look like, as accepted baselines."""
    given = {"nodes": list(nodes), "at": at}
    rows: list[tuple[str, str, str, float, float | None, int, str | None]] = []
    for query in (_BENCHES_NOW,) if benches_only else (_BENCHES_NOW, _CLOCKS_NOW):
        try:
            rows += read.execute(query, given).fetchall()
        except (duckdb.CatalogException, duckdb.BinderException):
            continue  # no agent has sent that table or column yet: nothing to pin
    return [
        Baseline(node, entity, key, value, spread, n, epoch or "", "accepted", author, at, reason)
        for node, entity, key, value, spread, n, epoch in rows
    ]


def accept(
    store: Store, node: str, entity: str, bench: str, reason: str, force: bool, who: Who, now: datetime
) -> list[tuple[str, str, str]]:
    """Take what benches show now as normal; returns (node, entity, key) of each baseline that was set.

    Args:
        store: Where.
        node: Which.
        entity: One of its cards, or `node:`; empty = all.
        bench: One bench; empty = all.
        reason: Why; kept with the baselines and in the audit.
        force: Also while a finding says that one of them is slower than it was.
        who: Who asks.
        now: Collector's clock.

    Raises:
        PeopleError: There is no reason.
        NoSuch: No bench gave a result there in the last 48 hours.
        NotNow: A finding is open, and it is not forced.
    """
    reason = one_line(reason)
    if not reason:
        raise PeopleError("accepting a baseline needs a reason")
    with store.transaction() as write, store.reader(LIVE) as read:
        found = [
            one
            for one in seen_now(read, [node], who.name, reason, now, benches_only=True)
            if entity in ("", one.entity) and bench in ("", one.key.partition("/")[0])
        ]
        if not found:
            what = f"bench {bench}" if bench else "a bench"
            raise NoSuch(
                f"no result of {what} on {f'{node} {entity}'.strip()} in the last 48 hours: nothing to accept"
                f"\nrun one: fleet bench run {node}{f' {bench}' if bench else ''}"
            )
        hurt = _in_trouble(read, node, {one.entity for one in found}, bench)
        if hurt and not force:
            raise NotNow(f"{hurt[0]}\na slow state must not become the normal one: mend it, or give --force")
        put(write, found)
        args = {
            "reason": reason, "bench": bench or None, "force": force, "overruled": hurt,
            "baselines": {f"{one.entity} {one.key}": one.value for one in found[:100]},
        }  # fmt: skip
        audit(write, now, who, "bench baseline accept", f"{node} {entity}".strip(), args)
    return [(one.node, one.entity, one.key) for one in found]


def _in_trouble(read: duckdb.DuckDBPyConnection, node: str, entities: set[str], bench: str) -> list[str]:
    """A line for each open finding about the speed of these entities or of their host."""
    rows = read.execute(
        "SELECT rule, entity, reason, incident FROM finding WHERE state <> 'resolved' AND node = ? "
        "AND (rule = 'bandwidth_regression' AND entity IN (SELECT unnest(?::VARCHAR[])) "
        "OR rule = 'bandwidth_regression_host') "
        "AND (? = '' OR coalesce(try_cast(detail AS JSON) ->> '$.bench', ?) = ?) ORDER BY id",
        [node, sorted(entities), bench, bench, bench],
    ).fetchall()
    return [
        f"{rule} is open on {node} {entity if entity != 'node:' else ''}".strip()
        + f" ({f'INC-{incident}: ' if incident else ''}{reason})"
        for rule, entity, reason, incident in rows
    ]


def put(write: duckdb.DuckDBPyConnection, baselines: Sequence[Baseline]) -> None:
    """Store these in the place of those with the same node, entity and key; inside `Store.transaction()`.

    What was replaced goes to table `baseline_before`, unless it was learning and goes on.
    """
    if not baselines:
        return
    cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _COLUMNS.items())
    columns = [[getattr(one, name) for one in baselines] for name in _COLUMNS]
    write.execute(f"CREATE OR REPLACE TEMP TABLE baseline_given AS SELECT {cells}", columns)
    write.execute(
        "INSERT INTO live.baseline_before BY NAME SELECT b.*, g.set_at AS replaced_at "
        "FROM live.baseline b JOIN baseline_given g USING (node, entity, key) "
        "WHERE b.state <> 'learning' OR b.epoch <> g.epoch"
    )
    write.execute(
        "DELETE FROM live.baseline WHERE (node, entity, key) IN "
        "(SELECT (node, entity, key) FROM baseline_given)"
    )
    write.execute("INSERT INTO live.baseline BY NAME FROM baseline_given")


_COLUMNS = {
    "node": "VARCHAR", "entity": "VARCHAR", "key": "VARCHAR", "value": "DOUBLE", "spread": "DOUBLE",
    "n": "BIGINT", "epoch": "VARCHAR",
    "state": "VARCHAR", "set_by": "VARCHAR", "set_at": "TIMESTAMP", "reason": "VARCHAR",
}  # fmt: skip

_KEY = "bench_key(bench, version, convention, params_hash, link)"
_SPREAD = "coalesce(mad(value) / nullif(median(value), 0), 0)"

EPOCH = """concat_ws('/', nullif(r.driver, ''), nullif(json_extract_string(i.attributes, '$.vbios'), ''),
    if(json_extract_string(i.attributes, '$.power_limit_requested_w')
       <> json_extract_string(i.attributes, '$.power_limit_default_w'),
       json_extract_string(i.attributes, '$.power_limit_requested_w') || ' W', null))"""
"""What a baseline is of: driver, firmware, and the power limit where it is not the one the card came with."""
FIRMWARE = """left join inventory i on i.node = r.node and i.entity = r.entity and i.valid_from <= r.ts
                          and coalesce(i.valid_to > r.ts, true)"""

_IN_TROUBLE = """exists (from finding f where f.node = r.node and r.ts >= f.began_at
                      and (f.rule = 'bandwidth_regression' and f.entity = r.entity
                           or f.rule = 'bandwidth_regression_host')
                      and r.ts <= coalesce(f.resolved_at, timestamp '9999-01-01'))"""

_OPEN = f"""
fresh as (
    select distinct node, entity, {_KEY} as key
    from bench
    where received_at > $as_of - interval 10 minute and ts <= $as_of and status = 'ok' and value is not null
      and coalesce(lease, '') = ''
),
open as (
    select f.node, f.entity, f.key
    from fresh f left join baseline b using (node, entity, key)
    where b.state is null or b.state = 'learning'
)
"""

_ANY_OPEN = f"with {_OPEN} select 1 from open limit 1"

_LEARN = f"""
with {_OPEN},
run as (
    select r.node, r.entity, {_KEY} as key, r.ts, r.value, {EPOCH} as epoch
    from bench r {FIRMWARE}
    where r.status = 'ok' and r.value is not null and r.ts <= $as_of and coalesce(r.lease, '') = ''
      and r.entity in (select entity from open)
      and not {_IN_TROUBLE}
),
marked as (
    select run.*, first_value(epoch) over (partition by node, entity, key order by ts) as first_epoch
    from run join open using (node, entity, key)
),
first as (
    -- one epoch: that of the first run; another one is for learn_anew
    select * from marked where epoch = first_epoch
    qualify row_number() over (partition by node, entity, key order by ts) <= $frozen_at
)
select node, entity, key, median(value), {_SPREAD}, count(*), any_value(epoch)
from first group by node, entity, key
"""

_TURNED = f"""
turned as (
    select n.node, n.entity, n.key, n.epoch, b.value as before, b.epoch as epoch_before
    from (select r.node, r.entity, {_KEY} as key, max_by({EPOCH}, r.ts) as epoch
          from bench r {FIRMWARE}
          where r.received_at > $as_of - interval 2 hour and r.ts <= $as_of
            and r.status = 'ok' and r.value > 0 and coalesce(r.lease, '') = ''
          group by r.node, r.entity, key) n
    join baseline b using (node, entity, key)
    where b.state in ('learning', 'frozen') and b.epoch <> n.epoch and b.value > 0
)
"""

_ANY_TURNED = f"with {_TURNED} select 1 from turned limit 1"

_LEARN_ANEW = f"""
with {_TURNED},
run as (
    select r.node, r.entity, {_KEY} as key, r.ts, r.value, r.unit, {EPOCH} as epoch
    from bench r {FIRMWARE}
    where r.status = 'ok' and r.value > 0 and r.ts <= $as_of and coalesce(r.lease, '') = ''
      and r.entity in (select entity from turned) and not {_IN_TROUBLE}
),
fresh as (
    select run.*, before, epoch_before
    from run join turned using (node, entity, key, epoch)
    qualify row_number() over (partition by node, entity, key order by ts desc) <= $frozen_at
)
select node, entity, key, median(value) as now, {_SPREAD}, count(*) as n, any_value(epoch),
       any_value(before) as was, any_value(epoch_before)
from fresh
group by node, entity, key
having n >= $frozen_at and if(any_value(unit) in ('us', 'ms', 's'), was / now, now / was) >= $still_good
"""

_BENCHES_NOW = f"""
select node, entity, key, median(value), {_SPREAD}, count(*), max_by(epoch, ts)
from (select r.*, {_KEY} as key, {EPOCH} as epoch from bench r {FIRMWARE})
where ts > $at - interval 48 hour and ts <= $at and status = 'ok' and value is not null
  and node in (select unnest($nodes::varchar[]))
group by node, entity, key
"""

_CLOCKS_NOW = f"""
select node, 'gpu:' || gpu_uuid, '{BUSY_CLOCK}', median(value), {_SPREAD}, count(*), ''
from (
    select node, gpu_uuid, sm_clock_mhz as value from gpu
    where ts > $at - interval 10 minute and ts <= $at and util_pct >= 90 and sm_clock_mhz is not null
      and gpu_uuid is not null and node in (select unnest($nodes::varchar[]))
)
group by node, gpu_uuid having count(*) >= 12
"""
