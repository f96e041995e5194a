/*
title         = "Host rebooted by itself"
scope         = "node"
every         = "20s"
weight        = 0.5
for           = "1 of 1"
runbook       = "node_rebooted"

[limits]
recent_s      = { value = 14400,  source = "own choice: news for four hours; the incident stays in the history" }
repeat        = { value = 3,      source = "own choice: three times in a week is a fault of the host" }
repeat_s      = { value = 604800, source = "a week" }
trouble_s     = { value = 1800,   source = "own choice: what the kernel said in its last half hour may be why" }
*/

-- A boot before which the agent was not stopped in order: a panic, a power loss, a watchdog, a reset by the BMC. Whoever
-- reboots a host stops its services first. What the kernel complained of before is told with it.
create or replace macro find_node_rebooted(as_of) as table
with boot as (
    select node, boot_id, min(ts) as ts, min_by(json_extract_string(detail, '$.before'), ts) as before
    from event
    where kind = 'reboot' and ts > as_of - interval 90 day and ts <= as_of
    group by node, boot_id
),
-- How the agent's life before it had ended: what it says at its first start of that boot.
ended as (
    select b.node, b.boot_id, b.ts, b.before, min_by(e.code, e.ts) as stopped
    from boot b
    left join event e on e.node = b.node and e.boot_id = b.boot_id and e.kind = 'agent_start'
                     and e.ts >= b.ts - interval 5 second and e.ts <= as_of
    group by b.node, b.boot_id, b.ts, b.before
),
counted as (
    select e.node, max(e.ts) as ts, max_by(e.stopped, e.ts) as stopped, max_by(e.before, e.ts) as before,
           max(e.ts) filter (e.stopped = 'unclean') as bad_at,
           max_by(e.before, e.ts) filter (e.stopped = 'unclean') as bad_before,
           count(*) filter (e.stopped = 'unclean' and e.ts > as_of - to_seconds(l.repeat_s)) as often
    from ended e join limits_node_rebooted l on l.node = e.node and l.model = ''
    group by e.node
),
trouble as (
    select c.node, max_by(e.kind, e.ts) as kind, max_by(e.message, e.ts) as message, count(*) as n
    from counted c
    join limits_node_rebooted l on l.node = c.node and l.model = ''
    join event e on e.node = c.node and e.boot_id = c.bad_before and e.ts <= c.bad_at
    where e.ts > as_of - interval 8 day and e.ts > c.bad_at - to_seconds(l.trouble_s)
      and (e.kind in ('mce', 'edac', 'lockup', 'hung_task', 'gpu_lost', 'io_error')
           or e.kind in ('xid', 'sxid') and json_extract_string(e.detail, '$.severity') in ('fatal', 'critical'))
    group by c.node
),
judged as (
    select n.node, c.ts, c.bad_at, c.often, t.kind, t.message, h.received_at, l.repeat,
           case when c.bad_at > as_of - to_seconds(l.recent_s) then if(c.often >= l.repeat, 'repeated', 'unexpected')
                when h.received_at is null                     then 'agent_silent'
                when c.ts is null                              then 'none'
                when c.stopped is null                         then 'not_told'
                when c.stopped = 'unclean'                     then 'long_ago'
                else 'planned' end as code
    from node_list(as_of) n
    join limits_node_rebooted l on l.node = n.node and l.model = ''
    left join counted c on c.node = n.node
    left join trouble t on t.node = n.node
    left join heard_at(as_of, '2 minutes') h on h.node = n.node
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case code when 'repeated' then 'crit' when 'unexpected' then 'warn' when 'agent_silent' then 'unknown'
            when 'not_told' then 'unknown' else 'ok' end as verdict,
       code, coalesce(often, 0)::double as observed, 0::double as expected, 'count' as unit,
       if(code in ('repeated', 'unexpected'), bad_at, received_at) as evidence_at,
       case when code = 'none' then 'no reboot seen' when code = 'agent_silent' then 'nothing heard for two minutes'
            when code = 'planned' then format('booted at {} after an orderly stop', strftime(ts, '%Y-%m-%d %H:%M:%S'))
            when code = 'not_told' then format('booted before {}; the agent does not say how it had been stopped', strftime(ts, '%Y-%m-%d %H:%M:%S'))
            when code = 'long_ago' then format('last rebooted by itself before {}', strftime(bad_at, '%Y-%m-%d %H:%M:%S'))
            else format('back at {} without an orderly stop{}{}', strftime(bad_at, '%Y-%m-%d %H:%M:%S'),
                        if(code = 'repeated', format(', {} times in a week', often), ''),
                        case when kind is null then '; the kernel log says nothing of why'
                             else format('; before it: {}', coalesce(nullif(message, ''), kind)) end) end as reason,
       json_object('reboots', often, 'trouble', kind, 'message', message) as detail
from judged;
