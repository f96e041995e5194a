/*
title         = "Data of an agent is lost"
scope         = "node"
every         = "20s"
weight        = 0.5
for           = "1 of 1"
max_severity  = "warn"
runbook       = "agent_dropping"

[limits]
recent_s      = { value = 3600, source = "own choice: what was lost is news for an hour" }
batches       = { value = 1,    source = "an agent drops nothing while its spool has room" }
cells         = { value = 100,  source = "own choice: one odd value is not a wrong column, which is as many within minutes" }
*/

-- What did not reach the tables, by the events that agent and collector write about it: batches that the spool had no room
-- for or that were too large to send, a spool that could not be read, numbers that came again with other content, and
-- cells that the collector put into quarantine.
create or replace macro find_agent_dropping(as_of) as table
with said as (
    select e.node, e.kind, max(e.ts) as ts, max_by(e.message, e.ts) as message,
           sum(coalesce(try_cast(json_extract_string(e.detail, '$.batches') as double), e.count)) as lost
    from event e
    join limits_agent_dropping l on l.node = e.node and l.model = ''
    where e.ts > as_of - interval 1 day and e.ts > as_of - to_seconds(l.recent_s) and e.ts <= as_of
      and e.kind in ('spool_drop', 'spool_corrupt', 'batch_parked', 'batch_conflict', 'quarantined')
    group by e.node, e.kind
),
worst as (
    select s.node, max(s.ts) as ts, sum(s.lost) as lost,
           max_by(s.kind, if(s.kind = 'quarantined', 0, 1) * 1e12 + epoch(s.ts))    as kind,
           max_by(s.message, if(s.kind = 'quarantined', 0, 1) * 1e12 + epoch(s.ts)) as message,
           json_group_object(s.kind, s.lost)                                        as kinds
    from said s
    join limits_agent_dropping l on l.node = s.node and l.model = ''
    where s.lost >= if(s.kind = 'quarantined', l.cells, l.batches)
    group by s.node
),
judged as (
    select n.node, w.ts, w.lost, w.message, w.kinds, h.received_at, l.recent_s,
           case when w.kind is not null then w.kind when h.received_at is null then 'agent_silent' else 'none' end as code
    from node_list(as_of) n
    join limits_agent_dropping l on l.node = n.node and l.model = ''
    left join worst w on w.node = n.node
    left join heard_at(as_of, '2 minutes') h on h.node = n.node
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case code when 'none' then 'ok' when 'agent_silent' then 'unknown' else 'warn' end as verdict,
       code, if(code = 'none', 0, lost)::double as observed, 0::double as expected, 'count' as unit,
       if(code = 'none', received_at, ts) as evidence_at,
       case code when 'none' then format('nothing lost in {:.0f} min', recent_s / 60)
            when 'agent_silent' then 'nothing heard for two minutes'
            else format('{}: {}', strftime(ts, '%Y-%m-%d %H:%M:%S'), message) end as reason,
       coalesce(kinds, json_object()) as detail
from judged;
