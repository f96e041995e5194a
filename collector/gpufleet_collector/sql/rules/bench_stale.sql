/*
title         = "No benchmark of this card for long"
scope         = "gpu"
every         = "10m"
weight        = 2
for           = "2 of 2"
max_severity  = "warn"
runbook       = "bench_stale"

[limits]
stale_s       = { value = 604800, source = "own choice: a week without a quiet minute is a week in which nobody knows how fast it is" }
*/

-- The newest benchmark of each card that gave a result. A card that is always busy, skipped or fails, and one that is never
-- tried while others are, is a finding: never measured is not healthy. Cards that cannot be measured, and fleets that
-- measure none, do not apply.
create or replace macro find_bench_stale(as_of) as table
with run as (
    select node, entity, max(ts) filter (status = 'ok') as ok_at, max(ts) as any_at, max_by(status, ts) as status,
           max_by(reason, ts) as reason, count(*) as runs, bool_and(status = 'unsupported') as unsupported
    from bench where ts > as_of - interval 30 day and ts <= as_of and entity like 'gpu:%'
    group by node, entity
),
fleet as (select count(*) filter (ok_at is not null) as measured from run),
since as (
    select node, entity, min(valid_from) as seen_at from inventory where kind = 'gpu' and valid_from <= as_of group by node, entity
),
judged as (
    select c.node, c.entity, l.stale_s, r.ok_at, r.any_at, r.status, r.reason as why, r.runs, s.seen_at, h.received_at,
           case when h.received_at is null                                         then 'agent_silent'
                when r.ok_at > as_of - to_seconds(l.stale_s)                       then 'measured'
                when r.unsupported                                                 then 'unsupported'
                when f.measured = 0                                                then 'no_benches'
                when s.seen_at is null or s.seen_at > as_of - to_seconds(l.stale_s) then 'new'
                when r.any_at > as_of - to_seconds(l.stale_s)                      then 'no_result'
                else 'not_run' end as code
    from card_list(as_of) c
    join limits_bench_stale l on l.node = c.node and l.model = coalesce(c.model, '')
    cross join fleet f
    left join run r on r.node = c.node and r.entity = c.entity
    left join since s on s.node = c.node and s.entity = c.entity
    left join heard_at(as_of, '2 minutes') h on h.node = c.node
    where c.installed and c.gpu_uuid is not null
)
select node, entity,
       case when code = 'measured' then 'ok' when code in ('no_result', 'not_run') then 'warn'
            when code = 'agent_silent' then 'unknown' else 'n/a' end as verdict,
       code, epoch(as_of - coalesce(ok_at, seen_at)) as observed, stale_s as expected, 's' as unit, received_at as evidence_at,
       case code when 'measured' then format('measured {:.0f} h ago', epoch(as_of - ok_at) / 3600)
            when 'no_result' then format('no result for {:.0f} days; the last of {} runs: {}', stale_s / 86400, runs,
                                         concat_ws(', ', status, nullif(why, '')))
            when 'not_run' then format('no benchmark was tried for {:.0f} days', stale_s / 86400)
            when 'unsupported' then 'this card cannot be measured' when 'no_benches' then 'no card of the fleet is measured'
            when 'new' then 'not here for long' else 'nothing heard for two minutes' end as reason,
       json_object('last_ok', ok_at, 'last_run', any_at, 'status', status, 'why', why) as detail
from judged;
