/*
title         = "Benchmark slower than it was"
scope         = "gpu"
every         = "30s"
weight        = 12
for           = "3 of 4"
for_code      = { below_floor = "2 of 2", drifting = "1 of 1" }
boot_grace    = "5m"
runbook       = "bandwidth_regression"

[limits]
warn_ratio    = { value = 0.95, source = "own choice: 5 % below the card's own baseline, or noise_z times its scatter" }
crit_ratio    = { value = 0.80, source = "own choice: a fifth lost" }
noise_z       = { value = 4,    source = "four times the baseline's own scatter" }
noise_floor   = { value = 0.003, source = "scatter of h2d copies" }
drift_h       = { value = 20,   source = "sum of lost scatters that a drift must reach: simulated, make bench-detect" }
drift_ratio   = { value = 0.985, source = "own choice: a smaller loss is not worth a person's time" }
peer_ratio    = { value = 0.90, source = "own choice: a card without history, below its peers by this or six scatters" }
min_n         = { value = 8,    source = "own choice: fewer runs are no baseline" }
peer_hours    = { value = 2,    source = "two rounds of hourly runs" }
stale_hours   = { value = 48,   source = "older results say nothing about now" }
*/

-- Four tests of the newest ok result of each series; the worst speaks for the entity.
--   below_floor  under what any well card of its model reaches, from the start: a person's baseline overrules it
--   slower       well below its own baseline, less what its peers lost in the same hours
--   drifting     a smaller loss that lasts: a sum of what each run lost, where no single run weighs much
--   below_peers  a card without a baseline, far under its peers
-- Runs that were skipped, preempted or failed are no evidence, nor is one that somebody asked for less than five minutes after
-- another. What half the cards of a host show at once is the host's
-- (bandwidth_regression_host), what all cards show is the fleet's (bandwidth_regression_fleet).
create or replace macro find_bandwidth_regression(as_of) as table
with series as (
    select s.*, l.crit_ratio, l.drift_h, l.drift_ratio, l.peer_ratio, f.floor, f.floor_source
    from bench_series(as_of) s
    join limits_bandwidth_regression l on l.node = s.node and l.model = s.model
    left join bench_floors(as_of) f
           on f.model = s.cards and f.bench = s.bench and f.convention = s.convention and f.link in ('', split_part(s.link, ':', 1))
),
-- below_peers: newest values of the same model and key
cohort as (
    select model, key, median(value) as value, 1.4826 * mad(ln(value)) as s, count(*) as n
    from series where recent and value > 0 group by model, key
),
on_host as (select node, model, key, count(*) as n from series where recent and value > 0 group by node, model, key),
-- drifting: only series whose last seven runs are low are worth the history of themselves, their host and some peers
suspect as (
    select * from series
    where d is not null and not host_down and len(last7) = 7
      and if(less_is_better, ln(base / list_median(last7)), ln(list_median(last7) / base)) - least(coalesce(c, 0), 0)
          < ln(if(s > 0.015, 2 * drift_ratio - 1, drift_ratio))
),
held as (
    -- all that a series is or was held against: a peer that has a newer baseline by now still has that of the suspect's epoch
    select node, entity, model, key, base_epoch as epoch, base, driver, s, gate, less_is_better, true as now
    from series where base > 0 and has_base and (model, key) in (select (model, key) from suspect)
    union all
    select s.node, s.entity, s.model, s.key, b.epoch, b.base, s.driver, s.s, s.gate, s.less_is_better, false
    from series s join bench_bases_before() b on b.node = s.node and b.entity = s.entity and b.key = s.key
    where s.base > 0 and s.has_base and (s.model, s.key, b.epoch) in (select (model, key, base_epoch) from suspect)
),
pool as (
    select *, true as peer from held where (model, key, epoch) in (select (model, key, base_epoch) from suspect)
    qualify row_number() over (partition by model, key, epoch, driver order by hash(entity)) <= 64
),
chosen as (
    select node, entity, model, key, epoch, any_value(base) as base, any_value(s) as s, any_value(gate) as gate,
           any_value(less_is_better) as less_is_better, any_value(now) as now, bool_or(peer) as peer
    from (
        from pool
        union all
        select *, false from held where now and (node, model, key) in (select (node, model, key) from suspect)
    )
    group by node, entity, model, key, epoch
),
past as (
    select c.*, r.ts, coalesce(r.driver, '') as driver, if(less_is_better, ln(base / value), ln(value / base)) as d
    from chosen c
    join bench_samples() r on r.node = c.node and r.entity = c.entity
    where r.ts > as_of - interval 7 day and r.ts <= as_of and r.status = 'ok' and r.value > 0
      and bench_key(r.bench, r.version, r.convention, r.params_hash, r.link) = c.key
    qualify coalesce(r.lease, '') = ''
         or coalesce(r.ts - lag(r.ts) over (partition by c.node, c.entity, c.key, c.epoch order by r.ts) >= interval 5 minute, true)
),
pace as (
    select model, key, greatest(median(gap_s), 1) as gap_s
    from (select model, key, epoch(max(ts) - min(ts)) / nullif(count(*) - 1, 0) as gap_s from past
          where now group by node, entity, model, key)
    group by model, key
),
round as (select p.*, floor(epoch(ts) / coalesce(gap_s, 1)) as turn from past p join pace using (model, key)),
per_driver as (
    select model, key, epoch, driver, turn, median(d) as c, count(distinct entity) as n from round where peer
    group by model, key, epoch, driver, turn
),
per_turn as (
    select model, key, epoch, turn, median(d) as c, count(distinct entity) as n from round where peer
    group by model, key, epoch, turn
),
netted as (
    select r.*, r.d - least(coalesce(if(k.n >= 5, k.c, null), if(w.n >= 5, w.c, null), 0), 0) as net
    from round r
    left join per_driver k on k.model = r.model and k.key = r.key and k.epoch = r.epoch and k.driver = r.driver and k.turn = r.turn
    left join per_turn w on w.model = r.model and w.key = r.key and w.epoch = r.epoch and w.turn = r.turn
    where r.now
),
whole_host as (
    select node, model, key, turn
    from netted where entity like 'gpu:%' group by node, model, key, turn
    having count(distinct entity) filter (net < ln(1 - gate)) >= greatest(2, (count(distinct entity) + 1) // 2)
),
kept as (
    select n.node, n.entity, n.key, n.ts, n.net, n.net / n.s as u
    from netted n
    left join whole_host h on h.node = n.node and h.model = n.model and h.key = n.key and h.turn = n.turn
    where h.node is null and (n.node, n.entity, n.key) in (select (node, entity, key) from suspect)
    qualify row_number() over (partition by n.node, n.entity, n.key order by n.ts desc) <= 72
),
sums as (
    select node, entity, key, median(net) filter (newness <= 7) as net7, any_value(sum_lost) as sum_lost
    from (
        select node, entity, key, net, row_number() over (partition by node, entity, key order by ts desc) as newness,
               list_reduce(list_prepend(0.0, list(u order by ts) over (partition by node, entity, key)),
                   lambda sum, u: least(40, greatest(0, sum - least(3, greatest(-3, u)) - 1))) as sum_lost
        from kept
    )
    group by node, entity, key
),
named as (
    select s.*, d.sum_lost, d.net7, p.value as peers_value, p.n - coalesce(h.n, 0) as peers_n,
           if(s.less_is_better, ln(p.value / s.value), ln(s.value / p.value)) as off,
           case when s.key is null                                               then 'no_bench'
                when not coalesce(s.current, false)                              then 'no_ok_run'
                when s.unit = 'GB/s' and s.value < s.floor and s.base_state is distinct from 'accepted'
                     and not coalesce(s.down, false)                             then 'below_floor'
                when s.d is null and p.n - coalesce(h.n, 0) >= 5 and p.n > 2 * coalesce(h.n, 0) and s.value > 0
                     and off < ln(1 - greatest(1 - s.peer_ratio, least(6 * p.s, 0.9))) then 'below_peers'
                when s.d is null                                                 then 'learning'
                when s.host_down                                                 then 'host_slower'
                when s.down                                                      then 'slower'
                when d.sum_lost > s.drift_h and d.net7 < ln(if(s.s > 0.015, 2 * s.drift_ratio - 1, s.drift_ratio))
                                                                                 then 'drifting'
                when s.d < ln(1 - s.gate)                                        then 'peers_fell'
                else 'as_before' end as code
    from series s
    left join cohort p on p.model = s.model and p.key = s.key
    left join on_host h on h.node = s.node and h.model = s.model and h.key = s.key
    left join sums d on d.node = s.node and d.entity = s.entity and d.key = s.key
),
ranked as (
    select *, case when code = 'below_floor' then 5 when code = 'slower' then if(net < ln(crit_ratio), 5, 4)
                   when code in ('drifting', 'below_peers') then 3 when code in ('as_before', 'peers_fell') then 2
                   when code = 'no_ok_run' then 1 else 0 end as rank
    from named
),
worst as (
    select max_by(r, struct_pack(a := rank, b := coalesce(ok_at, any_at, timestamp '1970-01-01'))) as r
    from ranked r group by node, entity
)
select r.node as node, r.entity as entity,
       case when r.rank = 5 then 'crit' when r.rank >= 3 then 'warn' when r.rank = 2 then 'ok' when r.rank = 1 then 'unknown'
            else 'n/a' end as verdict,
       r.code as code, r.value as observed,
       case r.code when 'below_floor' then r.floor when 'below_peers' then r.peers_value else r.base end as expected,
       r.unit as unit,
       case when r.correlated then null when r.rank >= 2 then r.ok_at else coalesce(r.ok_at, r.any_at) end as evidence_at,
       case r.code
            when 'no_bench' then 'no benchmark has run'
            when 'no_ok_run' then format('{}: no result for {:.0f} h; last run {}', r.bench, r.stale_hours, r.last_status)
            when 'learning' then format('{}: {} of {:.0f} runs for a baseline', r.bench, coalesce(r.base_n, 0), r.min_n)
            when 'host_slower' then format('{}: {} of {} cards of this host are slower at once: the host is judged, not the card',
                                           r.bench, r.host_n_down, r.host_n)
            when 'below_floor' then format('{}: {:.4g} {}, no well card is below {:.4g} ({})', r.bench, r.value, r.unit, r.floor,
                                           r.floor_source)
            when 'below_peers' then format('{}: {:.4g} {}, {:.1f} % below the {:.4g} of {} peers; no baseline of its own yet',
                                           r.bench, r.value, r.unit, (1 - exp(r.off)) * 100, r.peers_value, r.peers_n)
            else format('{}: {:.4g} {}, {:.1f} % {} its {} baseline of {:.4g}{}{}', r.bench, r.value, r.unit,
                        abs(1 - exp(r.d)) * 100, if(r.d < 0, 'below', 'above'), r.base_state, r.base,
                        case when r.c is null then '' else
                             format('; {} peers are {:.1f} % {} theirs', r.n_peers, abs(1 - exp(r.c)) * 100,
                                    if(r.c < 0, 'below', 'above')) end,
                        case when r.code = 'drifting' then
                             format('; the last 7 runs lost {:.1f} %', (1 - exp(r.net7)) * 100) else '' end) end as reason,
       json_object('bench', r.bench, 'key', r.key, 'ratio', exp(r.d), 'peers_ratio', exp(r.c), 'n_peers', r.n_peers,
                   'net_ratio', exp(r.net), 'noise', r.s, 'gate', r.gate, 'sum_lost', r.sum_lost, 'floor', r.floor,
                   'baseline_state', r.base_state, 'baseline_n', r.base_n, 'baseline_driver', r.base_epoch,
                   'driver', r.driver) as detail
from worst;
