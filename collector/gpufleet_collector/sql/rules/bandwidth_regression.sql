/*
title         = "Benchmark slower than it was"
scope         = "gpu"
every         = "30s"
for           = "2 of 3"
boot_grace    = "5m"
runbook       = "bandwidth_regression"

[limits]
warn_ratio    = { value = 0.93, source = "own choice: 7 % below the card's own baseline" }
crit_ratio    = { value = 0.80, source = "own choice: a fifth lost" }
noise_z       = { value = 4,    source = "four times the baseline's own scatter" }
noise_floor   = { value = 0.003, source = "scatter of h2d copies" }
min_n         = { value = 8,    source = "own choice: fewer runs are no baseline" }
peer_hours    = { value = 2,    source = "two rounds of hourly runs" }
stale_hours   = { value = 48,   source = "older results say nothing about now" }
fleet_ratio   = { value = 0.96, source = "own choice: the median of many cards on many hosts does not move by itself" }
fleet_nodes   = { value = 5,    source = "fewer nodes are no fleet" }
*/

-- The newest ok result of each series (one bench, version, convention, parameters and link on one entity) against the
-- entity's own baseline, less what its peers lost in the same hours: what hit all is not this card. Runs that were
-- skipped, preempted or failed are no evidence. The worst series speaks for the entity. A step that all cards of a model
-- made (a new driver) is one row for the model.
create or replace macro find_bandwidth_regression(as_of) as table
with run as (
    select node, entity, bench_key(bench, version, convention, params_hash, link) as key, any_value(bench) as bench,
           any_value(unit) as unit,
           max(ts)                                                       as any_at,
           max(ts) filter (status = 'ok' and value is not null)          as ok_at,
           max_by(value, ts) filter (status = 'ok' and value is not null)  as value,
           max_by(spread, ts) filter (status = 'ok' and value is not null) as run_spread,
           max_by(driver, ts) filter (status = 'ok' and value is not null) as driver,
           max_by(status, ts)                                            as last_status
    from bench
    where ts > as_of - interval 7 day and ts <= as_of
    group by node, entity, key
),
thing as (
    select node, entity, model from card_list(as_of)
    union
    select node, entity, null from run where entity not like 'gpu:%'
),
series as (
    select t.node, t.entity, coalesce(t.model, '') as model, r.* exclude (node, entity), l.* exclude (node, model),
           b.value as base, b.spread as base_spread, b.n as base_n, b.state as base_state, b.epoch as base_epoch,
           r.ok_at > as_of - to_hours(l.stale_hours::bigint) as current,
           b.state in ('accepted', 'frozen') or b.n >= l.min_n as has_base
    from thing t
    join limits_bandwidth_regression l on l.node = t.node and l.model = coalesce(t.model, '')
    left join run r on r.node = t.node and r.entity = t.entity
    left join baseline b on b.node = t.node and b.entity = t.entity and b.key = r.key
),
rated as (
    select *, case when current and has_base and value > 0 and base > 0
                   then if(unit in ('us', 'ms', 's'), base / value, value / base) end as ratio
    from series
),
peers as (
    select model, key, median(ratio) as ratio, count(*) as n
    from rated where ratio is not null and ok_at > as_of - to_hours(peer_hours::bigint)
    group by model, key
),
-- What all cards of a model lost or won, by the series that moved most.
fleet as (
    select model, min(ratio) as ratio, arg_min(bench, ratio) as bench, arg_min(cards, ratio) as cards,
           arg_min(nodes, ratio) as nodes, max(newest_at) as newest_at, any_value(fleet_ratio) as fleet_ratio
    from (
        select model, key, any_value(bench) as bench, median(ratio) as ratio, count(*) as cards,
               count(distinct node) as nodes, max(ok_at) as newest_at, any_value(fleet_ratio) as fleet_ratio
        from rated
        where ratio is not null and model <> '' and ok_at > as_of - to_hours(peer_hours::bigint)
        group by model, key
        having count(distinct node) >= any_value(fleet_nodes)
    )
    group by model
),
own_host as (
    select node, model, key, count(*) as n
    from rated where ratio is not null and ok_at > as_of - to_hours(peer_hours::bigint)
    group by node, model, key
),
compared as (
    select r.*, if(p.n - coalesce(h.n, 0) >= 5 and p.n > 2 * coalesce(h.n, 0), p.ratio, null) as peers,
           coalesce(p.n - coalesce(h.n, 0), 0) as n_peers
    from rated r
    left join peers p on p.model = r.model and p.key = r.key
    left join own_host h on h.node = r.node and h.model = r.model and h.key = r.key
),
judged as (
    select *, greatest(ratio, ratio / peers) as net,
           greatest(1.4826 * coalesce(base_spread, 0), coalesce(run_spread, 0), noise_floor) * noise_z as noise
    from compared
),
named as (
    select *,
           case when key is null                          then 'no_bench'
                when not coalesce(current, false)         then 'no_ok_run'
                when not coalesce(has_base, false)        then 'learning'
                when ratio is null                        then 'learning'
                when net < warn_ratio and 1 - net > noise then 'slower'
                when ratio < warn_ratio and 1 - ratio > noise then 'peers_fell'
                else 'as_before' end                      as code
    from judged
),
ranked as (
    select *, case when code = 'slower' then if(net < crit_ratio, 4, 3) when code in ('as_before', 'peers_fell') then 2
                   when code = 'no_ok_run' then 1 else 0 end as rank
    from named
),
worst as (
    select max_by(r, struct_pack(a := rank, b := coalesce(ok_at, any_at, timestamp '1970-01-01'))) as r
    from ranked r group by node, entity
)
select r.node as node, r.entity as entity,
       case r.rank when 4 then 'crit' when 3 then 'warn' when 2 then 'ok' when 1 then 'unknown' else 'n/a' end as verdict,
       r.code as code, r.value as observed, r.base as expected, r.unit as unit,
       case when r.rank >= 2 then r.ok_at else coalesce(r.ok_at, r.any_at) end as evidence_at,
       case r.code
            when 'no_bench' then 'no benchmark has run'
            when 'no_ok_run' then format('{}: no result for {:.0f} h; last run {}', r.bench, r.stale_hours, r.last_status)
            when 'learning' then format('{}: {} of {:.0f} runs for a baseline', r.bench, coalesce(r.base_n, 0), r.min_n)
            else format('{}: {:.4g} {}, {:.1f} % {} its {} baseline of {:.4g}{}', r.bench, r.value, r.unit,
                        abs(1 - r.ratio) * 100, if(r.ratio < 1, 'below', 'above'), r.base_state, r.base,
                        case when r.peers is null then '' else
                             format('; {} peers are {:.1f} % {} theirs', r.n_peers, abs(1 - r.peers) * 100,
                                    if(r.peers < 1, 'below', 'above')) end) end as reason,
       json_object('bench', r.bench, 'key', r.key, 'ratio', r.ratio, 'peers_ratio', r.peers, 'n_peers', r.n_peers,
                   'net_ratio', r.net, 'noise', r.noise, 'baseline_state', r.base_state, 'baseline_n', r.base_n,
                   'baseline_driver', r.base_epoch, 'driver', r.driver) as detail
from worst
union all
select '', 'domain:model=' || model, if(ratio < fleet_ratio, 'warn', 'ok'), if(ratio < fleet_ratio, 'fleet_step', 'as_before'),
       ratio, fleet_ratio, '1', newest_at,
       format('{}: {} cards on {} nodes reach {:.1f} % of their own baselines', bench, cards, nodes, 100 * ratio)
           || if(ratio < fleet_ratio, ': the whole model moved, look at driver and settings; accept it, or go back', ''),
       json_object('bench', bench, 'cards', cards, 'nodes', nodes, 'ratio', ratio)
from fleet;
