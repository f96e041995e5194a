"""What a card's benches and busy clock looked like when they were good: table `baseline`.

Bench series learn by themselves from ok runs and freeze at `FROZEN_AT` runs; only a person moves them after
that (inventory.accept). Runs of a time in which the bench was in trouble are never learned from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb

from gpufleet_collector.store import LIVE, Store

FROZEN_AT = 48
"""Runs that make a baseline; then it no longer moves."""

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


def seen_now(
    read: duckdb.DuckDBPyConnection, nodes: Sequence[str], author: str, reason: str, at: datetime
) -> list[Baseline]:
    """What benches (48 h) and busy clocks (10 minutes) of these nodes look like, as accepted baselines."""
    given = {"nodes": list(nodes), "at": at}
    rows: list[tuple[str, str, str, float, float | None, int, str | None]] = []
    for query in (_BENCHES_NOW, _CLOCKS_NOW):
        try:
            rows += read.execute(query, given).fetchall()
        except (duckdb.CatalogException, duckdb.BinderException):
            continue  # no agent has sent that table or column yet: nothing to pin
    return [
        Baseline(node, entity, key, value, spread, n, epoch or "", "accepted", author, at, reason)
        for node, entity, key, value, spread, n, epoch in rows
    ]


def put(write: duckdb.DuckDBPyConnection, baselines: Sequence[Baseline]) -> None:
    """Store these in the place of those with the same node, entity and key; inside `Store.transaction()`."""
    if not baselines:
        return
    keys = [[getattr(one, name) for one in baselines] for name in ("node", "entity", "key")]
    write.execute(
        "DELETE FROM live.baseline WHERE (node, entity, key) IN "
        "(SELECT (unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[])))",
        keys,
    )
    cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _COLUMNS.items())
    columns = [[getattr(one, name) for one in baselines] for name in _COLUMNS]
    write.execute(f"INSERT INTO live.baseline BY NAME SELECT {cells}", columns)


_COLUMNS = {
    "node": "VARCHAR", "entity": "VARCHAR", "key": "VARCHAR", "value": "DOUBLE", "spread": "DOUBLE",
    "n": "BIGINT", "epoch": "VARCHAR",
    "state": "VARCHAR", "set_by": "VARCHAR", "set_at": "TIMESTAMP", "reason": "VARCHAR",
}  # fmt: skip

_KEY = "bench_key(bench, version, convention, params_hash, link)"
_SPREAD = "coalesce(mad(value) / nullif(median(value), 0), 0)"

_OPEN = f"""
fresh as (
    select distinct node, entity, {_KEY} as key
    from bench
    where received_at > $as_of - interval 10 minute and ts <= $as_of and status = 'ok' and value is not null
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
    select r.node, r.entity, {_KEY} as key, r.ts, r.value, r.driver
    from bench r
    where r.status = 'ok' and r.value is not null and r.ts <= $as_of
      and r.entity in (select entity from open)
      and not exists (from finding f where f.node = r.node and r.ts >= f.began_at
                      and (f.rule = 'bandwidth_regression' and f.entity = r.entity
                           or f.rule = 'bandwidth_regression_host')
                      and r.ts <= coalesce(f.resolved_at, timestamp '9999-01-01'))
),
first as (
    select run.* from run join open using (node, entity, key)
    qualify row_number() over (partition by node, entity, key order by ts) <= $frozen_at
)
select node, entity, key, median(value), {_SPREAD}, count(*), max_by(driver, ts)
from first group by node, entity, key
"""

_BENCHES_NOW = f"""
select node, entity, {_KEY} as key, median(value), {_SPREAD}, count(*), max_by(driver, ts)
from bench
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
