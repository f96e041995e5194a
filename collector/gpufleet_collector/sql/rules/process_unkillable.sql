/*
title         = "Process stuck in the kernel"
scope         = "node"
every         = "30s"
weight        = 0.5
for           = "2 of 2"
clear_after   = "1m"
runbook       = "process_unkillable"

[limits]
stuck_s       = { value = 600, source = "own choice: five times the two minutes after which the kernel itself complains of a hung task" }
killed_s      = { value = 300, source = "own choice: a kill takes effect within seconds, or never" }
*/

-- A process that does not run and cannot be interrupted: it waits for a device, a file server or a driver that does not
-- answer. With a kill pending in vain nothing but a reboot ends it, and the card it holds is lost to others until then.
-- The agent looks once a minute; threads of the kernel and jobs put on ice do not count.
create or replace macro find_process_unkillable(as_of) as table
with newest as (
    select node, max(ts) as ts,
           max_by({'stuck': processes_stuck, 'stuck_s': stuck_s, 'comm': stuck_comm, 'killed': processes_unkillable,
                   'killed_s': unkillable_s}, ts) as v
    from host where ts > as_of - interval 15 minute and ts <= as_of
    group by node
),
why_null as (
    select node, max_by(reason, since) as reason
    from capability
    where probe = 'host' and metric = 'processes_stuck' and entity = 'node:' and since <= as_of
    group by node
),
judged as (
    select n.node, s.ts, s.v, l.stuck_s, l.killed_s,
           unread(h.metrics, [if(s.v.stuck_s is not null, 'host.stuck_s', null), if(s.v.killed_s is not null, 'host.unkillable_s', null)]) as lost,
           [if(s.v.stuck_s >= l.stuck_s, 'host.stuck_s', null), if(s.v.killed_s >= l.killed_s, 'host.unkillable_s', null)] as bad,
           case when s.ts is null or s.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 10))) then 'no_samples'
                when s.v.killed_s >= l.killed_s                            then 'unkillable'
                when s.v.stuck_s >= l.stuck_s                              then 'stuck'
                when len(lost) > 0 and s.v.stuck is not null               then 'not_read'
                when s.v.stuck is not null                                 then 'none'
                when y.reason = 'not_supported'                            then 'not_supported'
                when y.reason = 'no_permission'                            then 'hidden'
                else 'unreadable' end as code
    from node_list(as_of) n
    join limits_process_unkillable l on l.node = n.node and l.model = ''
    left join newest s on s.node = n.node
    left join (select node, max(interval_s) as interval_s from probe where probe = 'host' group by node) p on p.node = n.node
    left join why_null y on y.node = n.node
    left join found_by(as_of) h on h.rule = 'process_unkillable' and h.node = n.node and h.entity = 'node:'
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case code when 'none' then 'ok' when 'unkillable' then 'crit' when 'stuck' then 'warn' when 'not_supported' then 'n/a'
            else 'unknown' end as verdict,
       code,
       case code when 'unkillable' then v.killed_s when 'stuck' then v.stuck_s when 'none' then v.stuck_s end as observed,
       case code when 'unkillable' then killed_s when 'stuck' then stuck_s when 'none' then stuck_s end as expected,
       's' as unit, ts as evidence_at,
       case code when 'none' then if(v.stuck > 0, format('{} waits in the kernel for {:.0f} s, not long yet', v.comm, v.stuck_s),
                                     'no process is stuck')
            when 'unkillable' then format('{} of {} stuck processes were killed in vain, for {:.0f} min: only a reboot ends them; '
                                          || 'longest stuck: {}', v.killed, v.stuck, v.killed_s / 60, v.comm)
            when 'stuck' then format('{} has been stuck in the kernel for {:.0f} min; {} in all', v.comm, v.stuck_s / 60, v.stuck)
            when 'not_supported' then 'the agent sees only its own processes (a container), or is of a version that does not look'
            when 'hidden' then 'the host hides processes from the agent (hidepid)'
            when 'unreadable' then 'the processes cannot be read'
            when 'not_read' then unread_words(lost)
            else 'no samples' end as reason,
       json_object('name', v.comm, 'stuck', v.stuck, 'stuck_s', v.stuck_s, 'unkillable', v.killed, 'unkillable_s', v.killed_s,
                   'action', if(code = 'unkillable', 'reboot', null), 'by', noted(bad, lost)) as detail
from judged;
