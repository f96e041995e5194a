/*
title         = "Card hotter than its siblings"
scope         = "gpu"
every         = "20s"
weight        = 1.5
for           = "4 of 5"
clear_after   = "5m"
max_severity  = "warn"
runbook       = "gpu_hot"

[limits]
window_s      = { value = 60,   source = "one verdict per minute" }
settle_s      = { value = 10,   source = "what a sample may need to arrive" }
hotter_c      = { value = 12,   source = "own choice: beyond what place in the air stream and scatter of boards make" }
power_share   = { value = 0.1,  source = "own choice: cards whose power differs by less do the same work" }
busy_pct      = { value = 50,   source = "own choice: idle cards are all cool" }
siblings      = { value = 3,    source = "own choice: fewer are no comparison" }
places        = { value = 5,    source = "own choice: hosts from which it is known how warm a place is" }
*/

-- The newest whole minute: a loaded card against the cards of its model in the same host that draw the same power. Air
-- that passed one card heats the next: what cards at that place are hotter on other hosts too is no fault of this one.
create or replace macro find_gpu_hot(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, coalesce(c.model, '') as model, c.gpu_index, l.* exclude (node, model),
           floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from card_list(as_of) c
    join limits_gpu_hot l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
minute as (
    select g.node, g.gpu_uuid, count(*) as samples, count(g.temperature_c) as told, count(g.util_pct) as utils,
           avg(g.temperature_c) as heat_c, avg(g.power_w) as power_w, avg(g.util_pct) as util_pct, max(g.ts) as seen_at,
           max_by(g.state, g.ts) as state
    from gpu g join card c on c.node = g.node and c.gpu_uuid = g.gpu_uuid
    where g.ts > as_of - interval 150 second and g.ts <= as_of
      and epoch(g.ts) >= c.until_s - c.window_s and epoch(g.ts) < c.until_s
    group by g.node, g.gpu_uuid
),
warm as (
    select c.node, c.gpu_uuid, c.model, c.gpu_index, c.power_share, m.heat_c, m.power_w
    from card c join minute m using (node, gpu_uuid)
    where m.util_pct >= c.busy_pct and m.heat_c is not null and m.power_w is not null
),
beside as (
    select a.node, a.gpu_uuid, a.model, a.gpu_index, a.heat_c - median(b.heat_c) as excess_c, median(b.heat_c) as siblings_c,
           count(*) as n
    from warm a
    join warm b on b.node = a.node and b.model = a.model and b.gpu_uuid <> a.gpu_uuid
               and abs(b.power_w - a.power_w) <= a.power_share * a.power_w
    group by a.node, a.gpu_uuid, a.model, a.gpu_index, a.heat_c
),
place as (
    select model, gpu_index, greatest(median(excess_c), 0) as usual_c, count(*) as hosts
    from beside where gpu_index is not null group by model, gpu_index
),
judged as (
    select c.*, m.* exclude (node, gpu_uuid), b.siblings_c, b.excess_c, coalesce(b.n, 0) as n,
           if(p.hosts >= c.places, p.usual_c, 0) as usual_c,
           case when m.samples is null                       then 'no_samples'
                when m.state in ('lost', 'hung')             then m.state
                when m.told = 0 and y.reason = 'not_supported' then 'not_supported'
                when m.told = 0                              then 'unreadable'
                when m.utils = 0 or m.util_pct < c.busy_pct  then 'idle'
                when m.power_w is null or coalesce(b.n, 0) < c.siblings then 'alone'
                when b.excess_c - if(p.hosts >= c.places, p.usual_c, 0) >= c.hotter_c then 'hot'
                else 'as_siblings' end as code
    from card c
    left join minute m using (node, gpu_uuid)
    left join beside b on b.node = c.node and b.gpu_uuid = c.gpu_uuid
    left join place p on p.model = c.model and p.gpu_index = c.gpu_index
    left join (select node, entity, max_by(reason, since) as reason from capability
               where probe = 'gpu' and metric = 'temperature_c' and since <= as_of group by node, entity) y
           on y.node = c.node and y.entity = c.entity
)
select node, entity,
       case when code = 'as_siblings' then 'ok' when code = 'hot' then 'warn'
            when code in ('idle', 'alone', 'not_supported') then 'n/a' else 'unknown' end as verdict,
       code, heat_c as observed, siblings_c + usual_c as expected, 'C' as unit, seen_at as evidence_at,
       case code when 'as_siblings' then format('{:.0f} C, its siblings {:.0f} C', heat_c, siblings_c)
            when 'hot' then format('{:.0f} C at {:.0f} W, {:.0f} degrees hotter than {} siblings at the same power{}', heat_c, power_w,
                                   excess_c, n, if(usual_c >= 1, format('; {:.0f} are usual at its place', usual_c), ''))
            when 'idle' then 'not under load' when 'alone' then format('only {} siblings at the same power', n)
            when 'no_samples' then 'no samples' when 'not_supported' then 'this card has no temperature'
            when 'unreadable' then 'the temperature cannot be read' else 'the card does not answer' end as reason,
       json_object('temperature_c', heat_c, 'siblings_c', siblings_c, 'usual_c', usual_c, 'power_w', power_w, 'n', n) as detail
from judged;
