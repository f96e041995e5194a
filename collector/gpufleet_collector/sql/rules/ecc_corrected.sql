/*
title         = "Corrected memory errors keep coming"
scope         = "gpu"
every         = "60s"
for           = "3 of 5"
max_severity  = "warn"
runbook       = "ecc_corrected"

[limits]
per_hour      = { value = 100, source = "own choice: stray radiation makes a few a month; a weak cell makes them by the minute" }
*/

-- Growth of the corrected errors within one boot and driver start in the last hour. A corrected error harms nobody; many of
-- them again and again tell which card will have an uncorrectable one. A count that falls was reset and is no error.
-- Evidence is a sample in which it grew: one burst, however large, is one.
create or replace macro find_ecc_corrected(as_of) as table
with recent as (
    select node, gpu_uuid, ts, boot_id, driver_epoch, state, ecc_corrected_total as total
    from gpu_health
    where ts > as_of - interval 1 hour and ts <= as_of and gpu_uuid is not null
),
newest as (
    select node, gpu_uuid, max(ts) as ts, max_by({'state': state, 'total': total}, ts) as v
    from recent group by node, gpu_uuid
),
moved as (
    select r.* from recent r semi join (
        select node, gpu_uuid, boot_id, driver_epoch from recent where total is not null
        group by node, gpu_uuid, boot_id, driver_epoch having max(total) > min(total)
    ) m on m.node = r.node and m.gpu_uuid = r.gpu_uuid and m.boot_id = r.boot_id
       and m.driver_epoch is not distinct from r.driver_epoch
    where r.total is not null
),
steps as (
    select node, gpu_uuid, ts, total::double - lag(total) over (partition by node, gpu_uuid, boot_id, driver_epoch order by ts)
           as step
    from moved
),
grown as (
    select node, gpu_uuid, sum(step) as errors, max(ts) as ts, count(*) as samples from steps where step > 0 group by node, gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) as reason
    from capability
    where probe = 'gpu_health' and metric = 'ecc_corrected_total' and since <= as_of
    group by node, entity
),
judged as (
    select c.node, c.entity, c.serial, l.per_hour, n.ts, n.v, g.ts as grown_at, g.errors, g.samples,
           case when n.ts is null and p.interval_s is null                        then 'no_probe'
                when n.ts is null or n.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))) then 'no_samples'
                when n.v.state in ('lost', 'hung')                                then n.v.state
                when g.errors >= l.per_hour                                       then 'many'
                when n.v.total is not null                                        then if(g.errors > 0, 'few', 'none')
                when y.reason = 'not_supported'                                   then 'not_supported'
                else 'unreadable' end as code
    from card_list(as_of) c
    join limits_ecc_corrected l on l.node = c.node and l.model = coalesce(c.model, '')
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join grown g on g.node = c.node and g.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    where c.gpu_uuid is not null
)
select node, entity,
       case when code in ('none', 'few') then 'ok' when code = 'many' then 'warn'
            when code in ('no_probe', 'not_supported') then 'n/a' else 'unknown' end as verdict,
       code, if(code in ('none', 'few', 'many'), coalesce(errors, 0), null)::double as observed, per_hour as expected,
       'count' as unit, if(code = 'many', grown_at, ts) as evidence_at,
       case code when 'none' then 'no corrected error in the last hour'
            when 'few' then format('{:.0f} corrected errors in the last hour', errors)
            when 'many' then format('{:.0f} corrected memory errors in the last hour, in {} samples', errors, samples)
            when 'no_probe' then 'the agent does not read the health of cards' when 'no_samples' then 'no samples'
            when 'not_supported' then 'no error counts: ECC is off, or this card has none'
            when 'unreadable' then 'the error counts cannot be read' else 'the card does not answer' end as reason,
       json_object('serial', serial, 'errors', errors, 'total', v.total) as detail
from judged;
