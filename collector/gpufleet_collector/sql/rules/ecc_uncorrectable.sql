/*
title         = "Uncorrectable memory errors"
scope         = "gpu"
every         = "30s"
weight        = 4
for           = "1 of 1"
runbook       = "ecc_uncorrectable"

[limits]
errors        = { value = 1, source = "one uncorrectable error has cost a job its data" }
*/

-- Growth of the uncorrectable errors since the driver was loaded, within one boot and driver start, in the last hour; a
-- count that falls was reset and is no error, and what a card had before it was first seen is not held against it. What
-- grew stays critical until the card was reset (the count fell or the driver started anew) or the node rebooted: the
-- finding itself is asked what the count was. More on-chip errors than NVIDIA accepts is critical for as long as the
-- card says so.
create or replace macro find_ecc_uncorrectable(as_of) as table
with recent as (
    select node, gpu_uuid, ts, boot_id, driver_epoch, state, ecc_uncorrectable_total as total,
           ecc_sram_threshold_exceeded as sram
    from gpu_health
    where ts > as_of - interval 1 hour and ts <= as_of and gpu_uuid is not null
),
newest as (
    select node, gpu_uuid, max(ts) as ts,
           max_by({'state': state, 'total': total, 'sram': sram, 'boot_id': boot_id, 'epoch': driver_epoch}, ts) as v
    from recent group by node, gpu_uuid
),
told as (
    select node, gpu_uuid, boot_id, driver_epoch,
           list({'ts': ts, 'total': total} order by ts) as all_seen
    from recent semi join (
        select node, gpu_uuid from recent where total is not null
        group by node, gpu_uuid, boot_id, driver_epoch having max(total) > min(total)
    ) m using (node, gpu_uuid)
    where total is not null
    group by node, gpu_uuid, boot_id, driver_epoch
),
moved as (
    -- a sample below both of its neighbours, which do not fall, is a bad one
    select * exclude (all_seen),
           list_filter(all_seen, lambda x, i: not coalesce(x.total < all_seen[i - 1].total
                                                           and all_seen[i + 1].total >= all_seen[i - 1].total, false)) as seen
    from told
),
steps as (
    select node, gpu_uuid, boot_id, driver_epoch, unnest(range(2, len(seen) + 1)) as step, seen from moved
),
grown as (
    select node, gpu_uuid, boot_id, driver_epoch, max(seen[step].ts) as ts,
           sum(seen[step].total::double - seen[step - 1].total::double) as errors
    from steps s
    where seen[step].total > seen[step - 1].total
      -- a count that fell afterwards: the card was reset
      and not exists (from steps r where r.node = s.node and r.gpu_uuid = s.gpu_uuid and r.boot_id = s.boot_id
                                     and r.driver_epoch is not distinct from s.driver_epoch
                                     and r.step > s.step and r.seen[r.step].total < r.seen[r.step - 1].total)
    group by node, gpu_uuid, boot_id, driver_epoch
),
held as (
    select node, entity, last_evidence_at as ts, observed as errors,
           -- a threshold that was passed meanwhile takes nothing back
           code = 'uncorrectable'
               or coalesce(list_contains(json_extract_string(detail, '$.by[*]'), 'gpu_health.ecc_uncorrectable_total'), false) as grew,
           json_extract_string(detail, '$.boot_id')                      as boot_id,
           try_cast(json_extract_string(detail, '$.total') as double)    as total,
           try_cast(json_extract_string(detail, '$.epoch') as bigint)    as epoch
    from finding
    where rule = 'ecc_uncorrectable' and state in ('firing', 'recovering') and fired_at <= as_of
),
why_null as (
    select node, entity, bool_and(reason in ('not_supported', 'ok')) filter (metric = 'ecc_uncorrectable_total') as not_supported,
           bool_and(reason in ('not_supported', 'ok')) as told
    from (select node, entity, metric, max_by(reason, since) as reason
          from capability
          where probe = 'gpu_health' and metric in ('ecc_uncorrectable_total', 'ecc_sram_threshold_exceeded') and since <= as_of
          group by node, entity, metric)
    group by node, entity
),
joined as (
    select c.node, c.entity, c.gpu_uuid, c.serial, l.errors as least, p.interval_s, n.ts, n.v, y.not_supported, y.told,
           g.ts as grown_at, g.errors as grown, h.ts as held_at, h.errors as held,
           unread(f.metrics, [if(n.v.total is not null, 'gpu_health.ecc_uncorrectable_total', null),
                              if(n.v.sram is not null, 'gpu_health.ecc_sram_threshold_exceeded', null)]) as lost,
           -- an agent that was restarted counts driver starts anew: only a greater number is a later one
           coalesce(h.grew and h.boot_id = n.v.boot_id and n.v.total >= h.total
                    and coalesce(n.v.epoch <= h.epoch, true), false) as still
    from card_list(as_of) c
    join limits_ecc_uncorrectable l on l.node = c.node and l.model = coalesce(c.model, '')
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join grown g on g.node = c.node and g.gpu_uuid = c.gpu_uuid and g.boot_id = n.v.boot_id
                     and g.driver_epoch is not distinct from n.v.epoch
    left join held h on h.node = c.node and h.entity = c.entity
    left join found_by(as_of) f on f.rule = 'ecc_uncorrectable' and f.node = c.node and f.entity = c.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p
           on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    where c.gpu_uuid is not null
),
judged as (
    select *,
           case when ts is null and interval_s is null                        then 'no_probe'
                when ts is null or ts < as_of - to_seconds(fresh_s(coalesce(interval_s, 60))) then 'no_samples'
                when v.state in ('lost', 'hung')                              then v.state
                when v.sram                                                   then 'sram_threshold'
                when grown >= least or still                                  then 'uncorrectable'
                -- one answer that fails is not an answer that all is well
                when v.total is not null                                      then
                     case when not coalesce(told, true) then 'unreadable' when len(lost) > 0 then 'not_read' else 'none' end
                when not_supported                                            then 'not_supported'
                else 'unreadable' end as code
    from joined
)
select node, entity,
       case when code = 'none' then 'ok' when code in ('uncorrectable', 'sram_threshold') then 'crit'
            when code in ('no_probe', 'not_supported') then 'n/a' else 'unknown' end as verdict,
       code,
       case when code = 'uncorrectable' then greatest(grown, held)
            when code = 'none' then 0 end::double                       as observed,
       case when code in ('uncorrectable', 'none') then 0 end::double   as expected,
       'count'                                                          as unit,
       if(code = 'uncorrectable', greatest(grown_at, held_at), ts)      as evidence_at,
       case code when 'none' then 'no uncorrectable error in the last hour'
            when 'uncorrectable' then format('{:.0f} uncorrectable memory errors, last at {}; {} since the driver was loaded',
                 greatest(grown, held), strftime(greatest(grown_at, held_at), '%Y-%m-%d %H:%M:%S'), v.total)
            when 'sram_threshold' then 'more on-chip memory errors than NVIDIA accepts: the card goes back'
            when 'no_probe' then 'the agent does not read the health of cards'
            when 'no_samples' then 'no samples'
            when 'not_supported' then 'no error counts: ECC is off, or this card has none'
            when 'unreadable' then 'the error counts cannot be read'
            when 'not_read' then unread_words(lost)
            else 'the card does not answer' end                         as reason,
       json_object('gpu_uuid', gpu_uuid, 'serial', serial, 'total', v.total, 'boot_id', v.boot_id, 'epoch', v.epoch,
                   'grown', grown, 'sram_threshold_exceeded', v.sram, 'driver_state', v.state,
                   'action', case code when 'uncorrectable' then 'reset' when 'sram_threshold' then 'drain_rma' end,
                   'by', noted([if(v.sram, 'gpu_health.ecc_sram_threshold_exceeded', null),
                                if(grown >= least or still, 'gpu_health.ecc_uncorrectable_total', null)], lost)) as detail
from judged;
