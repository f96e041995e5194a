/*
title         = "Card close to its slowdown temperature"
scope         = "gpu"
every         = "20s"
weight        = 1.5
for           = "3 of 3"
clear_after   = "5m"
max_severity  = "warn"
runbook       = "temperature_margin"

[limits]
window_s      = { value = 60,  source = "one verdict per minute" }
settle_s      = { value = 10,  source = "what a sample may need to arrive" }
margin_c      = { value = 3,   source = "own choice: hardware slows the card this many degrees further on" }
hot_share     = { value = 0.8, source = "own choice: a peak is not a hot card" }
*/

-- The newest whole minute: how much of it the card was within margin_c of the temperature at which hardware slows it
-- down. Cards from Ada on say how far they are from their limit (temperature_margin_c, slowed down below
-- slowdown_margin_c); older ones give the temperature and its limit. Load plays no part: heat is heat.
create or replace macro find_temperature_margin(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, l.window_s, l.margin_c, l.hot_share,
           floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from card_list(as_of) c
    join limits_temperature_margin l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
-- What rarely changes: the last that each card said of its limits.
given as (
    select node, gpu_uuid, max(ts) as ts, max_by(slowdown_margin_c, ts) as slowdown_margin_c,
           max_by(slowdown_temperature_c, ts) as slowdown_temperature_c
    from gpu_health
    where ts > as_of - interval 1 hour and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
sample as (
    select g.node, g.gpu_uuid, g.ts, g.state,
           case when g.temperature_margin_c is not null
                then g.temperature_margin_c - coalesce(v.slowdown_margin_c, 0)
                else v.slowdown_temperature_c - g.temperature_c end as left_c,
           g.temperature_margin_c is not null or g.temperature_c is not null as read,
           g.temperature_margin_c, g.temperature_c,
           c.margin_c
    from gpu g
    join card c on c.node = g.node and c.gpu_uuid = g.gpu_uuid
    left join given v on v.node = g.node and v.gpu_uuid = g.gpu_uuid
    where g.ts > as_of - interval 150 second and g.ts <= as_of
      and epoch(g.ts) >= c.until_s - c.window_s and epoch(g.ts) < c.until_s
),
minute as (
    select node, gpu_uuid, count(*) as samples, count(left_c) as told, count(*) filter (read) as read,
           count(*) filter (left_c <= margin_c) as hot, min(left_c) as least_c, avg(left_c) as left_c,
           count(temperature_margin_c) as margins, count(temperature_c) as temperatures,
           max(ts) as seen_at, max(ts) filter (left_c <= margin_c) as hot_at, max_by(state, ts) as state
    from sample group by node, gpu_uuid
),
judged as (
    select c.*, m.* exclude (node, gpu_uuid),
           unread(h.metrics, [if(m.margins > 0, 'gpu.temperature_margin_c', null),
                              if(m.temperatures > 0, 'gpu.temperature_c', null),
                              if(g.slowdown_margin_c is not null, 'gpu_health.slowdown_margin_c', null),
                              if(g.slowdown_temperature_c is not null, 'gpu_health.slowdown_temperature_c', null)]) as lost,
           if(m.margins > 0, ['gpu.temperature_margin_c', if(g.slowdown_margin_c is not null, 'gpu_health.slowdown_margin_c', null)],
              ['gpu.temperature_c', 'gpu_health.slowdown_temperature_c']) as bad,
           case when m.samples is null                                    then 'no_samples'
                when m.state in ('lost', 'hung')                          then m.state
                when m.told = 0 and m.read > 0 and g.ts is null and p.interval_s is not null then 'no_limits'
                when m.told = 0 and m.read > 0                            then 'not_supported'
                when m.told = 0                                           then if(y.reason = 'not_supported', 'not_supported', 'unreadable')
                when m.hot >= c.hot_share * m.told                        then 'close'
                when len(lost) > 0                                        then 'not_read'
                else 'apart' end as code
    from card c
    left join minute m on m.node = c.node and m.gpu_uuid = c.gpu_uuid
    left join given g on g.node = c.node and g.gpu_uuid = c.gpu_uuid
    left join found_by(as_of) h on h.rule = 'temperature_margin' and h.node = c.node and h.entity = c.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p
           on p.node = c.node
    left join (select node, entity, max_by(reason, since) as reason from capability
               where probe = 'gpu' and metric = 'temperature_c' and since <= as_of group by node, entity) y
           on y.node = c.node and y.entity = c.entity
)
select node, entity,
       case code when 'apart' then 'ok' when 'close' then 'warn' when 'not_supported' then 'n/a' else 'unknown' end as verdict,
       code, left_c as observed, margin_c as expected, 'C' as unit,
       if(code = 'close', hot_at, seen_at) as evidence_at,
       case code when 'apart' then format('{:.0f} degrees below the temperature at which it is slowed down', left_c)
            when 'close' then format('{:.0f} degrees left to the temperature at which hardware slows it down, over a minute ({:.0f} at the least)',
                                     left_c, least_c)
            when 'no_samples' then 'no samples'
            when 'no_limits' then 'the limits of the card are not in yet'
            when 'not_supported' then 'this card does not say at which temperature it is slowed down'
            when 'unreadable' then 'the temperature cannot be read'
            when 'not_read' then unread_words(lost)
            else 'the card does not answer' end as reason,
       json_object('left_c', left_c, 'least_c', least_c, 'hot_samples', hot, 'samples', samples,
                   'by', noted(bad, lost)) as detail
from judged;
