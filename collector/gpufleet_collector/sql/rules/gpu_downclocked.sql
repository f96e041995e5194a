/*
title         = "Card runs below its clock under load"
scope         = "gpu"
every         = "5s"
weight        = 3
for           = "3 of 4"
clear_after   = "5m"
boot_grace    = "10m"
each_sample   = true
runbook       = "gpu_downclocked"
also          = ["hw_brake"]

[for_code]                    # hardware that slows the card is no matter of minutes
power_brake   = "2 of 2"
hw_thermal    = "2 of 2"

[limits]
window_s      = { value = 60,   source = "one verdict per minute" }
settle_s      = { value = 10,   source = "what a sample may need to arrive" }
busy_pct      = { value = 90,   source = "own choice: a card this busy is not idle-clocked" }
busy_share    = { value = 0.8,  source = "own choice: the start or end of a job is not load" }
warn_ratio    = { value = 0.93, source = "peers under one job differ by less" }
crit_ratio    = { value = 0.85, source = "a card this slow holds up its job" }
hw_share      = { value = 0.6,  source = "6 of 10 minutes" }
mend_share    = { value = 0.05, source = "own choice: slowed for 30 s of ten minutes, a clean sample says nothing" }
fleet_ratio   = { value = 0.97, source = "own choice: the median of many cards on many hosts does not move by itself" }
fleet_nodes   = { value = 5,    source = "fewer nodes are no fleet" }
*/

-- Two things slow a card down. Hardware (power brake, heat) counts the time it does so: growth in the newest sample
-- is a bad sample, hw_share of ten minutes is critical. Else the newest whole minute under load is judged: the mean SM
-- clock of its busy samples against the card's own baseline, or else against the busy cards of its model, those
-- of its own host first. Idle cards are n/a, the software power cap and clocks set by people are normal. Where the cards
-- of a model have all left their own baselines without a reason of their own (a new driver), that is one row for the
-- model, and each card is held against what is left.
create or replace macro find_gpu_downclocked(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, c.model, b.value as own,
           l.busy_pct, l.busy_share, l.warn_ratio, l.crit_ratio, l.hw_share, l.mend_share, l.window_s, l.fleet_ratio, l.fleet_nodes,
           floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from card_list(as_of) c
    join limits_gpu_downclocked l on l.node = c.node and l.model = coalesce(c.model, '')
    left join baseline b on b.node = c.node and b.entity = c.entity and b.key = 'sm_clock_busy_mhz'
                        and b.state in ('accepted', 'frozen') and b.set_at <= as_of
    where c.gpu_uuid is not null
),
-- The newest whole minute.
busy as (
    select r.node, r.gpu_uuid, r.ts, r.util_pct, r.sm_clock_mhz, r.clock_reasons, r.power_cap_s_total, c.window_s,
           r.util_pct >= c.busy_pct                            as loaded,
           r.util_pct >= c.busy_pct and r.sm_clock_mhz is not null as busy
    from gpu r join card c on c.node = r.node and c.gpu_uuid = r.gpu_uuid
    where r.ts > as_of - interval 150 second and r.ts <= as_of and r.gpu_uuid is not null
      and epoch(r.ts) >= (select min(until_s - window_s) from card) and epoch(r.ts) < (select max(until_s) from card)
      and epoch(r.ts) >= c.until_s - c.window_s and epoch(r.ts) < c.until_s
),
minute as (
    select node, gpu_uuid,
           count(*)                                    as samples,
           count(util_pct)                             as utils,
           count(*) filter (loaded)                    as loaded,
           count(*) filter (busy)                      as busy,
           avg(sm_clock_mhz) filter (busy)             as clock,
           bit_or(clock_reasons) filter (busy)         as reasons,
           greatest(count(*) filter (busy and clock_reasons & 4 > 0) / count(*) filter (busy),
                    counter_span(min(power_cap_s_total), min_by(power_cap_s_total, ts), max_by(power_cap_s_total, ts),
                                 max(power_cap_s_total), any_value(window_s)) / any_value(window_s)) as cap_share,
           -- clocks that people (2), a group of cards (16) or a display (256) have set
           count(*) filter (busy and clock_reasons & 274 > 0) / count(*) filter (busy) as set_share,
           max(ts) filter (busy)                       as busy_at,
           max(ts)                                     as seen_at
    from busy
    group by node, gpu_uuid
),
-- Growth of the hardware's own counters. Those that stand still, as they mostly do, need no look at single samples.
tally as (
    select node, gpu_uuid, max(ts) as ts, max_by(state, ts) as state,
           min(hw_brake_s_total) < max(hw_brake_s_total)     as brake_moved, count(hw_brake_s_total)   as brakes,
           min(hw_thermal_s_total) < max(hw_thermal_s_total) as heat_moved,  count(hw_thermal_s_total) as heats
    from gpu
    where ts > as_of - interval 150 second and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
-- Another boot or driver start begins anew. The same sample may be there twice.
newest as (
    select node, gpu_uuid, max(ts) as ts,
           newest_step(max_by({'ts': ts, 's': hw_brake_s_total}, ts, 4) filter (hw_brake_s_total is not null))     as brake_s,
           newest_step(max_by({'ts': ts, 's': hw_thermal_s_total}, ts, 4) filter (hw_thermal_s_total is not null)) as heat_s
    from gpu semi join (from tally where brake_moved or heat_moved) using (node, gpu_uuid)
    where ts > as_of - interval 150 second and ts <= as_of
    group by node, gpu_uuid, boot_id, driver_epoch
),
last_sample as (
    select t.node, t.gpu_uuid, t.ts, t.state,
           if(t.brake_moved, n.brake_s, if(t.brakes > 1, 0, null)) as brake_s,
           if(t.heat_moved, n.heat_s, if(t.heats > 1, 0, null))    as heat_s
    from tally t
    left join (select node, gpu_uuid, max_by(brake_s, ts) as brake_s, max_by(heat_s, ts) as heat_s
               from newest group by node, gpu_uuid) n using (node, gpu_uuid)
),
-- The first sample after the last that grew: it ends what one bad sample began, whatever the minute says or when; not
-- on a card that is slowed again and again (mend_share).
clean as (
    select node, gpu_uuid, min(ts) filter (ts > grew_at) as clean_at
    from (
        select node, gpu_uuid, ts, max(ts) filter (grew) over (partition by node, gpu_uuid) as grew_at
        from (
            select node, gpu_uuid, ts,
                   coalesce(counter_step(hw_brake_s_total, lag(hw_brake_s_total) over w, epoch(ts - lag(ts) over w)) > 0, false)
                   or coalesce(counter_step(hw_thermal_s_total, lag(hw_thermal_s_total) over w, epoch(ts - lag(ts) over w)) > 0,
                               false) as grew
            from gpu semi join (from tally where brake_moved or heat_moved) using (node, gpu_uuid)
            where ts > as_of - interval 150 second and ts <= as_of
              and (hw_brake_s_total is not null or hw_thermal_s_total is not null)
            window w as (partition by node, gpu_uuid, boot_id, driver_epoch order by ts)
        )
    )
    group by node, gpu_uuid
),
growing as (
    select node, gpu_uuid from last_sample where brake_s > 0 or heat_s > 0
    union
    select node, gpu_uuid from clean where clean_at is not null
),
-- Ten minutes, minute by minute: growth inside each, and from the last sample of one to the first of the next.
by_minute as (
    select node, gpu_uuid, boot_id, driver_epoch, min(ts) as from_at, max(ts) as to_at,
           min(hw_brake_s_total) as brake_low, max(hw_brake_s_total) as brake_high,
           min_by(hw_brake_s_total, ts) as brake_first, max_by(hw_brake_s_total, ts) as brake_last,
           min(hw_thermal_s_total) as heat_low, max(hw_thermal_s_total) as heat_high,
           min_by(hw_thermal_s_total, ts) as heat_first, max_by(hw_thermal_s_total, ts) as heat_last
    from gpu semi join growing using (node, gpu_uuid)
    where ts > as_of - interval 10 minute and ts <= as_of
    group by node, gpu_uuid, boot_id, driver_epoch, floor(epoch(ts) / 60)
),
slowed as (
    select node, gpu_uuid, sum(brake_s) as brake_s, sum(heat_s) as heat_s
    from (
        select node, gpu_uuid,
               coalesce(counter_span(brake_low, brake_first, brake_last, brake_high, epoch(to_at - from_at)), 0)
               + coalesce(counter_step(brake_first, lag(brake_last) over w, epoch(from_at - lag(to_at) over w)), 0) as brake_s,
               coalesce(counter_span(heat_low, heat_first, heat_last, heat_high, epoch(to_at - from_at)), 0)
               + coalesce(counter_step(heat_first, lag(heat_last) over w, epoch(from_at - lag(to_at) over w)), 0)   as heat_s
        from by_minute
        window w as (partition by node, gpu_uuid, boot_id, driver_epoch order by from_at)
    )
    group by node, gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) as reason
    from capability
    where probe = 'gpu' and metric = 'util_pct' and since <= as_of
    group by node, entity
),
loaded as (
    select node, gpu_uuid, clock from minute join card using (node, gpu_uuid) where busy >= busy_share * samples
),
-- Cards that nothing holds back, against their own baselines.
fleet as (
    select c.model, median(m.clock / c.own) as ratio, count(*) as cards, count(distinct c.node) as nodes,
           max(m.busy_at) as busy_at, any_value(c.fleet_ratio) as fleet_ratio, any_value(c.fleet_nodes) as fleet_nodes
    from minute m join card c using (node, gpu_uuid)
    where c.own > 0 and c.model is not null and m.busy >= c.busy_share * m.samples and m.reasons & 232 = 0
      and not coalesce(m.cap_share >= 0.5 or m.set_share >= 0.5, false)
    group by c.model
    having count(distinct c.node) >= any_value(c.fleet_nodes)
),
host_peers as (
    select c.node, c.model, median(l.clock) as clock, count(*) as n
    from loaded l join card c using (node, gpu_uuid) group by c.node, c.model
),
model_peers as (
    select c.model, median(l.clock) as clock, count(*) as n
    from loaded l join card c using (node, gpu_uuid) group by c.model
),
judged as (
    select c.*, m.* exclude (node, gpu_uuid), s.ts as newest_at, s.state, s.brake_s, s.heat_s,
           e.clean_at, greatest(w.brake_s, s.brake_s) as brake_10m, greatest(w.heat_s, s.heat_s) as heat_10m, y.reason as why_null,
           coalesce(c.own, if(h.n >= 5, h.clock, null), if(p.n >= 5, p.clock, null)) as want,
           case when c.own is not null then 'own baseline' when h.n >= 5 then 'cards of its host'
                when p.n >= 5 then 'cards of its model' end                as against,
           coalesce(if(h.n >= 5, h.n, null), p.n, 0)                       as n_peers,
           if(c.own is not null and m.reasons & 232 = 0 and f.ratio < c.fleet_ratio, f.ratio, 1) as step
    from card c
    left join minute m using (node, gpu_uuid)
    left join last_sample s using (node, gpu_uuid)
    left join clean e using (node, gpu_uuid)
    left join slowed w using (node, gpu_uuid)
    left join why_null y using (node, entity)
    left join host_peers h using (node, model)
    left join model_peers p using (model)
    left join fleet f using (model)
),
named as (
    select *,
           greatest(brake_10m, heat_10m) / 600                            as hw_10m,
           coalesce(greatest(brake_10m, heat_10m), 0) / 600 < mend_share  as mends,
           clock / want                                                   as ratio,
           case when newest_at is null                                    then 'no_samples'
                when brake_s > 0                                          then 'power_brake'
                when heat_s > 0                                           then 'hw_thermal'
                when state in ('hung', 'lost')                            then state
                when samples is null                                      then 'no_samples'
                when utils = 0 and coalesce(why_null, '') = 'not_supported' then 'no_utilisation'
                when utils = 0                                            then 'unreadable'
                when busy = 0 and loaded >= busy_share * samples          then 'no_clock'
                when busy = 0 or busy < busy_share * samples              then 'idle'
                when want is null                                         then 'no_expectation'
                when clock >= warn_ratio * want * step                    then 'at_clock'
                when reasons & 128 > 0                                    then 'power_brake'
                when reasons & 64 > 0                                     then 'hw_thermal'
                when reasons & 8 > 0                                      then 'hw_slowdown'
                when reasons & 32 > 0                                     then 'sw_thermal'
                when cap_share >= 0.5                                     then 'power_cap'
                when set_share >= 0.5                                     then 'clock_set'
                else 'no_reason' end                                      as code
    from judged
)
select node, entity,
       case when code in ('no_samples', 'unreadable', 'no_clock')                        then 'unknown'
            when code in ('hung', 'lost')                                                then 'n/a'
            when code in ('at_clock', 'power_cap', 'clock_set')                          then 'ok'
            when code in ('no_utilisation', 'idle', 'no_expectation')  then if(clean_at is not null and mends, 'ok', 'n/a')
            when greatest(brake_s, heat_s) > 0                        then if(hw_10m >= hw_share, 'crit', 'warn')
            when ratio < crit_ratio * step                                               then 'crit'
            else 'warn' end                                               as verdict,
       code,
       if(greatest(brake_s, heat_s) > 0, greatest(brake_10m, heat_10m), clock) as observed,
       if(greatest(brake_s, heat_s) > 0, 0, want)                         as expected,
       if(greatest(brake_s, heat_s) > 0, 's', 'MHz')                      as unit,
       case when greatest(brake_s, heat_s) > 0 then newest_at
            when code in ('at_clock', 'power_cap', 'clock_set', 'no_utilisation', 'idle', 'no_expectation')
                 then greatest(coalesce(busy_at, seen_at, newest_at), if(mends, clean_at, null))
            else coalesce(busy_at, seen_at, newest_at) end             as evidence_at,
       case when code = 'no_samples' then 'no samples'
            when greatest(brake_s, heat_s) > 0
                 then format('slowed by hardware ({}) for {:.1f} s of the last 10 minutes',
                             if(code = 'power_brake', 'power brake', 'heat'), greatest(brake_10m, heat_10m))
            when code in ('hung', 'lost') then 'the card does not answer'
            when code = 'no_utilisation' then 'utilisation is not available on this card'
            when code = 'unreadable' then 'utilisation cannot be read'
            when code = 'no_clock' then 'the clock cannot be read'
            when code = 'idle' then 'not under load'
            when code = 'no_expectation' then format('{:.0f} MHz under load; no baseline and only {} loaded cards of its model', clock, n_peers)
            else format('{:.0f} of {:.0f} MHz ({}) over {} under load{}', clock, want, against,
                        if(window_s = 60, 'a minute', format('{:g} s', window_s)),
                        case code when 'power_brake' then ': power brake' when 'hw_thermal' then ': hardware thermal slowdown'
                                  when 'hw_slowdown' then ': hardware slowdown' when 'sw_thermal' then ': software thermal slowdown'
                                  when 'power_cap' then ': at its power limit' when 'clock_set' then ': clocks are set lower'
                                  when 'no_reason' then ', and the card names no reason' else '' end) end as reason,
       json_object('own', own, 'against', against, 'n_peers', n_peers, 'reasons', reasons, 'ratio', ratio,
                   'busy_samples', busy, 'samples', samples, 'brake_s', brake_10m, 'heat_s', heat_10m,
                   'model_step', nullif(step, 1)) as detail
from named
union all
select '', 'domain:model=' || model, if(ratio < fleet_ratio, 'warn', 'ok'), if(ratio < fleet_ratio, 'fleet_step', 'at_clock'),
       ratio, fleet_ratio, '1', busy_at,
       format('{} loaded cards on {} nodes run at {:.1f} % of their own baselines', cards, nodes, 100 * ratio)
           || if(ratio < fleet_ratio, ': the whole model moved, look at driver and settings; accept it, or go back', ''),
       json_object('cards', cards, 'nodes', nodes, 'ratio', ratio)
from fleet;
