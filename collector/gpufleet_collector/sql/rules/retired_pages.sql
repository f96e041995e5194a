/*
title         = "Card has retired many memory pages"
scope         = "gpu"
every         = "60s"
for           = "2 of 2"
runbook       = "retired_pages"

[limits]
pages_crit    = { value = 63, source = "DCGM 4.6 fails at 63: a card can retire 64" }
pages_warn    = { value = 40, source = "own choice: two thirds are used up" }
uncorrectable = { value = 15, source = "DCGM 4.6: more than 15 for uncorrectable errors is the mark of a failing card" }
*/

-- Cards before Ampere put a bad page aside for good and have room for 64. Newer ones replace rows (remap_failed): n/a.
create or replace macro find_retired_pages(as_of) as table
with newest as (
    select node, gpu_uuid, max(ts) as ts,
           max_by({'state': state, 'corrected': retired_pages_corrected_total, 'uncorrectable': retired_pages_uncorrectable_total},
                  ts) as v
    from gpu_health where ts > as_of - interval 15 minute and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
why_null as (
    select node, entity, bool_and(reason = 'not_supported') as not_supported
    from (select node, entity, metric, max_by(reason, since) as reason from capability
          where probe = 'gpu_health' and metric in ('retired_pages_corrected_total', 'retired_pages_uncorrectable_total')
            and since <= as_of
          group by node, entity, metric)
    group by node, entity
),
counted as (
    select c.node, c.entity, c.serial, l.* exclude (node, model), n.ts, n.v, p.interval_s, y.not_supported,
           n.v.corrected::double + n.v.uncorrectable::double as pages
    from card_list(as_of) c
    join limits_retired_pages l on l.node = c.node and l.model = coalesce(c.model, '')
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    where c.gpu_uuid is not null
),
judged as (
    select *,
           case when ts is null and interval_s is null                  then 'no_probe'
                when ts is null or ts < as_of - to_seconds(fresh_s(coalesce(interval_s, 60))) then 'no_samples'
                when v.state in ('lost', 'hung')                        then v.state
                when pages >= pages_crit                                then 'full'
                when v.uncorrectable > uncorrectable                    then 'uncorrectable'
                when pages >= pages_warn                                then 'many'
                when pages is not null                                  then 'few'
                when not_supported                                      then 'not_supported'
                else 'unreadable' end as code
    from counted
)
select node, entity,
       case when code = 'few' then 'ok' when code = 'full' then 'crit' when code in ('uncorrectable', 'many') then 'warn'
            when code in ('no_probe', 'not_supported') then 'n/a' else 'unknown' end as verdict,
       code, pages as observed, if(code = 'uncorrectable', uncorrectable, if(code = 'full', pages_crit, pages_warn)) as expected,
       'count' as unit, ts as evidence_at,
       case code when 'few' then format('{:.0f} pages retired', pages)
            when 'full' then format('{:.0f} pages retired: there is no room for more, the card goes back', pages)
            when 'uncorrectable' then format('{} pages retired for uncorrectable errors', v.uncorrectable)
            when 'many' then format('{:.0f} of 64 pages retired', pages)
            when 'no_probe' then 'the agent does not read the health of cards' when 'no_samples' then 'no samples'
            when 'not_supported' then 'this card retires no pages' when 'unreadable' then 'the retired pages cannot be read'
            else 'the card does not answer' end as reason,
       json_object('serial', serial, 'corrected', v.corrected, 'uncorrectable', v.uncorrectable,
                   'action', if(code = 'full', 'drain_rma', null)) as detail
from judged;
