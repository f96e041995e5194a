/*
title         = "Clock of the host is wrong"
scope         = "node"
every         = "10s"
weight        = 0.5
for           = "2 of 3"
clear_after   = "1m"
max_severity  = "warn"
runbook       = "clock_skew"

[limits]
warn_s        = { value = 2, source = "below it the agent's own time is kept" }
*/

-- The collector estimates each agent's offset from the batches (ledger.offset_s: what was added to the agent's clock).
-- Data and liveness do not suffer from a wrong clock; logs, certificates and jobs on the host do.
create or replace macro find_clock_skew(as_of) as table
select n.node, 'node:' as entity,
       case when h.offset_s is null then 'unknown' when abs(h.offset_s) > l.warn_s then 'warn' else 'ok' end as verdict,
       case when h.offset_s is null then 'agent_silent' when h.offset_s > l.warn_s then 'behind'
            when h.offset_s < -l.warn_s then 'ahead' else 'in_step' end as code,
       0 - h.offset_s as observed, 0::double as expected, 's' as unit,
       h.received_at as evidence_at,
       case when h.offset_s is null then 'no live batch for two minutes'
            when abs(h.offset_s) <= l.warn_s then format('within {:.0f} s of the collector', l.warn_s)
            else format('{:.0f} s {} the collector', abs(h.offset_s), if(h.offset_s > 0, 'behind', 'ahead of')) end as reason,
       json_object('offset_s', h.offset_s) as detail
from node_list(as_of) n
left join heard_at(as_of, '2 minutes') h on h.node = n.node
join limits_clock_skew l on l.node = n.node and l.model = ''
where n.hello_at is not null;
