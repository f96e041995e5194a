/*
title         = "Nothing keeps the clock right"
scope         = "node"
every         = "60s"
weight        = 0.5
for           = "4 of 5"
min_duration  = "3m"
boot_grace    = "15m"
clear_after   = "2m"
max_severity  = "warn"
runbook       = "clock_unsynchronised"

[limits]
kept          = { value = 1,   source = "0 = nothing has to keep the clock of such a node: its hypervisor sets it" }
offset_s      = { value = 0.5, source = "own choice: what is left to correct is milliseconds where time synchronisation works" }
error_max_s   = { value = 4,   source = "own choice: it grows by 1.8 s an hour without corrections; those that come rarest come every 34 minutes" }
*/

-- What the host's kernel says of its own clock, while clock_skew compares it with the collector's. A clock that is right
-- today but that nothing corrects is wrong next week; and within 2 s of the collector it may be too far off for logs of
-- several hosts to be put in order.
create or replace macro find_clock_unsynchronised(as_of) as table
with newest as (
    select node, max(ts) as ts,
           max_by({'right': clock_synchronised, 'offset': clock_offset_s, 'most': clock_error_max_s}, ts) as v
    from host where ts > as_of - interval 15 minute and ts <= as_of
    group by node
),
why_null as (
    select node, max_by(reason, since) as reason
    from capability
    where probe = 'host' and metric = 'clock_synchronised' and entity = 'node:' and since <= as_of
    group by node
),
judged as (
    select n.node, s.ts, s.v, l.offset_s, l.error_max_s,
           unread(h.metrics, [if(s.v.offset is not null, 'host.clock_offset_s', null),
                              if(s.v.most is not null, 'host.clock_error_max_s', null)]) as lost,
           [if(abs(s.v.offset) > l.offset_s, 'host.clock_offset_s', null), if(s.v.most > l.error_max_s, 'host.clock_error_max_s', null)] as bad,
           case when l.kept = 0 then 'by_design'
                when s.ts is null or s.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 10))) then 'no_samples'
                when s.v.right is null and y.reason = 'not_supported'     then 'not_supported'
                when s.v.right is null                                    then 'unreadable'
                when not s.v.right                                        then 'unsynchronised'
                when abs(s.v.offset) > l.offset_s                         then 'offset'
                when s.v.most > l.error_max_s                             then 'uncertain'
                when len(lost) > 0                                        then 'not_read'
                else 'synchronised' end as code
    from node_list(as_of) n
    join limits_clock_unsynchronised l on l.node = n.node and l.model = ''
    left join newest s on s.node = n.node
    left join (select node, max(interval_s) as interval_s from probe where probe = 'host' group by node) p on p.node = n.node
    left join why_null y on y.node = n.node
    left join found_by(as_of) h on h.rule = 'clock_unsynchronised' and h.node = n.node and h.entity = 'node:'
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case when code = 'synchronised' then 'ok' when code in ('not_supported', 'by_design') then 'n/a'
            when code in ('unsynchronised', 'offset', 'uncertain') then 'warn' else 'unknown' end as verdict,
       code,
       case code when 'offset' then abs(v.offset) when 'uncertain' then v.most when 'synchronised' then v.most end as observed,
       case code when 'offset' then offset_s when 'uncertain' then error_max_s when 'synchronised' then error_max_s end as expected,
       's' as unit, ts as evidence_at,
       case code when 'synchronised' then format('the clock is off by {:.3f} s at most', v.most)
            when 'unsynchronised' then 'the kernel says that nothing keeps its clock right'
            when 'offset' then format('{:.3f} s of the clock''s error are still to be corrected', v.offset)
            when 'uncertain' then format('the last correction is long ago: the clock may be off by {:.1f} s', v.most)
            when 'by_design' then 'limit kept says that nothing has to keep its clock'
            when 'not_supported' then 'this kernel, or an agent of this version, does not say how its clock is kept'
            when 'unreadable' then 'the agent may not ask how the clock is kept'
            when 'not_read' then unread_words(lost)
            else 'no samples' end as reason,
       json_object('synchronised', v.right, 'offset_s', v.offset, 'error_max_s', v.most, 'by', noted(bad, lost)) as detail
from judged;
