/*
title         = "Agent restarts again and again"
scope         = "node"
every         = "20s"
weight        = 0.5
for           = "1 of 1"
max_severity  = "warn"
runbook       = "agent_restarted"

[limits]
recent_s      = { value = 3600, source = "own choice" }
restarts      = { value = 3,    source = "own choice: an upgrade gone wrong is killed once; three times in an hour is a loop" }
*/

-- Starts of the agent that no orderly stop came before, and ends of its sampler outside the driver. The first start after
-- a boot is the host's restart, not the agent's (node_rebooted); a stop by people or packages does not count.
create or replace macro find_agent_restarted(as_of) as table
with booted as (
    select node, boot_id, min(ts) as ts from event
    where kind = 'reboot' and ts > as_of - interval 1 day and ts <= as_of group by node, boot_id
),
start as (
    select e.node, e.kind, max(e.ts) as ts, count(distinct e.ts) as restarts, max_by(e.message, e.ts) as message
    from event e
    join limits_agent_restarted l on l.node = e.node and l.model = ''
    left join booted b on b.node = e.node and b.boot_id = e.boot_id
    where e.ts > as_of - interval 1 day and e.ts > as_of - to_seconds(l.recent_s) and e.ts <= as_of
      and (e.kind = 'sampler_restarted'
           or e.kind = 'agent_start' and e.code = 'unclean' and coalesce(abs(epoch(e.ts - b.ts)) > 5, true))
    group by e.node, e.kind
),
newest as (
    select node, max(ts) as ts, max_by(kind, restarts) as kind, max(restarts) as restarts,
           max_by(message, restarts) as message
    from start group by node
),
judged as (
    select n.node, s.ts, coalesce(s.restarts, 0) as seen, s.message, h.received_at, l.restarts, l.recent_s,
           case when s.restarts >= l.restarts then if(s.kind = 'agent_start', 'agent', 'sampler')
                when h.received_at is null    then 'agent_silent'
                when s.restarts > 0           then 'few'
                else 'none' end as code
    from node_list(as_of) n
    join limits_agent_restarted l on l.node = n.node and l.model = ''
    left join newest s on s.node = n.node
    left join heard_at(as_of, '2 minutes') h on h.node = n.node
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case when code in ('none', 'few') then 'ok' when code = 'agent_silent' then 'unknown' else 'warn' end as verdict,
       code, seen::double as observed, restarts as expected, 'count' as unit,
       if(code in ('none', 'few'), received_at, ts) as evidence_at,
       case code when 'none' then 'not restarted' when 'agent_silent' then 'nothing heard for two minutes'
            when 'few' then format('restarted {} times in {:.0f} min, not often yet', seen, recent_s / 60)
            else format('{} restarted {} times in {:.0f} min, last at {}: {}', code, seen, recent_s / 60,
                        strftime(ts, '%Y-%m-%d %H:%M:%S'), message) end as reason,
       json_object('restarts', seen) as detail
from judged;
