/*
title         = "Memory errors of the host"
scope         = "dimm"
every         = "60s"
for           = "1 of 1"
runbook       = "dimm_errors"

[limits]
uncorrectable = { value = 1,   source = "one uncorrectable error has cost a process its data" }
corrected     = { value = 100, source = "mcelog complains at 10 a day for a module; ten times that tells a weak module from stray radiation" }
*/

-- Errors of the host's memory modules within a day, by the counts of the kernel's EDAC drivers: what a count had at first
-- sight, or a count that fell, is no error. The agent sums up the day, for it sees every reading; a finding of its before it
-- was started anew holds for the rest of that day, in the same boot. The row mc0 is for errors whose module is not known.
-- Only modules that have errors, or had, get a row. A host that does not count is judged by its kernel log, as one row for
-- the node.
create or replace macro find_dimm_errors(as_of) as table
with newest as (
    select node, max(ts) as ts from edac where ts > as_of - interval 15 minute and ts <= as_of group by node
),
dimm as (
    -- a row may have been sent twice
    select distinct on (e.node, e.dimm) e.node, 'dimm:' || e.dimm as entity, e.ts, e.boot_id, e.label, e.corrected_day as ce, e.uncorrectable_day as ue,
           e.corrected_total as ce_total, e.uncorrectable_total as ue_total
    from edac e join newest n on n.node = e.node and n.ts = e.ts
    where e.ts > as_of - interval 15 minute and e.ts <= as_of and e.dimm is not null
    order by e.node, e.dimm, e.uncorrectable_day desc nulls last, e.corrected_day desc nulls last
),
told as (
    select node, entity, state, code, last_evidence_at as ts, observed as errors,
           json_extract_string(detail, '$.boot_id')                   as boot_id,
           try_cast(json_extract_string(detail, '$.total') as double) as total
    from finding where rule = 'dimm_errors' and state <> 'resolved' and entity <> 'node:' and began_at <= as_of
),
every as (select node, max(interval_s) as interval_s from probe where probe = 'edac' group by node),
run as (
    select node, max(ts) as ts, max_by(ok, ts) as ok, max_by(coalesce(rows, 1), ts) as rows  -- not told is not none
    from agent where ts > as_of - interval 15 minute and ts <= as_of and probe = 'edac'
    group by node
),
judged as (
    select d.*, l.uncorrectable, l.corrected, h.errors as held, h.ts as held_at, h.total as held_total,
           unread(b.metrics, [if(d.ue is not null and d.ue_total is not null, 'edac.uncorrectable_day', null),
                              if(d.ce is not null, 'edac.corrected_day', null)]) as lost,
           [if(d.ue >= l.uncorrectable or h.ts is not null, 'edac.uncorrectable_day', null),
            if(d.ce >= l.corrected, 'edac.corrected_day', null)] as bad,
           case when d.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60)))   then 'no_samples'
                when d.ue >= l.uncorrectable or h.ts is not null                      then 'uncorrectable'
                when d.ce >= l.corrected                                              then 'corrected'
                when len(lost) > 0                                                    then 'not_read'
                when coalesce(d.ue, d.ce) is not null                                 then 'few'
                else 'unreadable' end as code
    from dimm d
    join limits_dimm_errors l on l.node = d.node and l.model = ''
    left join told f on f.node = d.node and f.entity = d.entity
    left join told h on h.node = d.node and h.entity = d.entity and h.code = 'uncorrectable' and h.state <> 'pending'
                    and h.ts > as_of - interval 1 day and h.boot_id = d.boot_id and d.ue_total >= h.total
    left join found_by(as_of) b on b.rule = 'dimm_errors' and b.node = d.node and b.entity = d.entity
    left join every p on p.node = d.node
    -- a large fleet has tens of thousands of modules: the sound ones are one row, that of their node
    where (d.ue > 0 or d.ce > 0 or coalesce(d.ue, d.ce) is null or f.entity is not null)
      -- a sweep since then found nothing that counts
      and not exists (from run r where r.node = d.node and r.ok and r.rows = 0 and r.ts > d.ts)
),
heard as (
    select node, max(ts) as ts, max_by(boot_id, ts) as boot_id
    from agent where ts > as_of - interval 5 minute and ts <= as_of group by node
),
logged as (
    select e.node, max(e.ts) as ts,
           sum(e.count) filter (e.said = 'ue' and e.ts > as_of - interval 1 day) as ue,
           sum(e.count) filter (e.said = 'ce' and e.ts > as_of - interval 1 day) as ce,
           list_sort(list(distinct e.label) filter (e.label is not null))[:8]    as labels
    from (
        select node, boot_id, ts, count, nullif(json_extract_string(detail, '$.label'), '') as label,
               case when kind = 'edac' then if(code = 'corrected', 'ce', 'ue')
                    when code = 'memory_failure' then 'ue'
                    -- Intel's code of a memory controller, in the low half of the bank's status
                    when try_cast(json_extract_string(detail, '$.status') as ubigint) & 61312 = 128
                         then if(code = 'corrected', 'ce', 'ue') end as said
        from event
        where kind in ('edac', 'mce') and ts > as_of - interval 2 day and ts <= as_of
    ) e
    join heard b on b.node = e.node and b.boot_id = e.boot_id
    where e.said is not null
    group by e.node
),
by_log as (
    select n.node, coalesce(r.ts, b.ts) as ts, g.ts as logged_at, coalesce(g.ue, 0)::double as ue, coalesce(g.ce, 0)::double as ce, g.labels,
           l.uncorrectable, l.corrected,
           case when b.ts is null                                                 then 'no_samples'
                when r.ts is not null and not r.ok                                then 'unreadable'
                when r.rows > 0                                                   then 'counted'
                when r.ts is null and p.interval_s is not null                    then 'no_samples'
                when g.ue >= l.uncorrectable                                      then 'uncorrectable'
                when g.ce >= l.corrected                                          then 'corrected'
                when g.ts is not null                                             then 'few'
                else 'no_counters' end as code
    from node_list(as_of) n
    join limits_dimm_errors l on l.node = n.node and l.model = ''
    left join run r on r.node = n.node
    left join heard b on b.node = n.node
    left join logged g on g.node = n.node
    left join every p on p.node = n.node
    where n.hello_at is not null
)
select node, entity,
       case code when 'few' then 'ok' when 'uncorrectable' then 'crit' when 'corrected' then 'warn' else 'unknown' end as verdict,
       code,
       case code when 'uncorrectable' then greatest(ue, held) when 'corrected' then ce when 'few' then ce end::double as observed,
       case code when 'uncorrectable' then 0 when 'corrected' then corrected when 'few' then corrected end::double as expected,
       'count' as unit,
       -- the same errors as when it was judged last are no new evidence
       if(code = 'uncorrectable' and held_at is not null and ue_total = held_total, held_at, ts) as evidence_at,
       case code when 'few' then format('{} corrected errors within a day', coalesce(ce, 0))
            when 'uncorrectable' then format('{}: {:.0f} uncorrectable memory errors within a day, {} since the driver was loaded',
                 coalesce(nullif(label, ''), 'module not known'), greatest(ue, held, 1), ue_total)
            when 'corrected' then format('{}: {} corrected memory errors within a day, {} since the driver was loaded',
                 coalesce(nullif(label, ''), 'module not known'), ce, ce_total)
            when 'unreadable' then 'the counts cannot be read'
            when 'not_read' then unread_words(lost)
            else 'no samples' end as reason,
       json_object('label', label, 'uncorrectable_day', ue, 'corrected_day', ce, 'total', ue_total,
                   'corrected_total', ce_total, 'boot_id', boot_id, 'by', noted(bad, lost),
                   'action', case code when 'uncorrectable' then 'replace' when 'corrected' then 'watch' end) as detail
from judged
union all
-- after a reboot, or without its driver, the kernel may no longer count for a place that had errors
-- (gone); what had errors on a node that is silent now is not gone
select f.node, f.entity, if(gone, 'ok', 'unknown'), if(gone, 'gone', 'no_samples'), null, null, 'count', r.ts,
       if(gone, 'the host no longer counts errors of this place', 'no samples'), null
from told f
left join run r on r.node = f.node
left join newest n on n.node = f.node
cross join lateral (select coalesce(r.ok and (r.rows = 0 or r.ts = n.ts), false) as gone) g
where not exists (from judged j where j.node = f.node and j.entity = f.entity)
union all
select node, 'node:',
       case code when 'few' then 'ok' when 'uncorrectable' then 'crit' when 'corrected' then 'warn'
            when 'counted' then 'n/a' when 'no_counters' then 'n/a' else 'unknown' end,
       code,
       case code when 'uncorrectable' then ue when 'corrected' then ce when 'few' then ce end::double,
       case code when 'uncorrectable' then 0 when 'corrected' then corrected when 'few' then corrected end::double,
       'count', if(code in ('uncorrectable', 'corrected'), logged_at, ts),
       case code when 'counted' then 'errors are counted per module: those that have any are told one by one'
            when 'no_counters' then 'this host does not count memory errors, and its kernel log tells of none'
            when 'unreadable' then 'the counts cannot be read'
            when 'no_samples' then 'no samples'
            else format('{:.0f} uncorrectable and {:.0f} corrected memory errors in the kernel log within a day{}', ue, ce,
                        if(len(labels) > 0, ': ' || array_to_string(labels, ', '), '')) end,
       json_object('labels', labels, 'uncorrectable_day', ue, 'corrected_day', ce)
from by_log;
