/*
title         = "NVLink errors"
scope         = "gpu"
every         = "15s"
weight        = 2.5
for           = "3 of 10"
boot_grace    = "10m"
clear_after   = "10m"
runbook       = "nvlink_errors"

[for_code]
recovery_failed = "1 of 1"

[limits]
per_minute    = { value = 1,    source = "DCGM 4.6: one replay or recovery in 60 s fails, one CRC error in 60 s warns; here only what repeats" }
crc_per_s     = { value = 100,  source = "DCGM 4.6: 100 CRC errors/s fail" }
failed        = { value = 1,    source = "own choice: a link that did not come back is a link less" }
ber           = { value = 1e-6, source = "cyclecloud-healthagent: effective BER above 1e-6 warns; DCGM took 1e-12 back, it failed healthy cards" }
*/

-- What the links of a card counted between its two newest sweeps, within one boot and driver start. A count that falls was
-- reset and is no error; a step in which links came up is theirs to train. One bad sweep is nobody's business: links send
-- again what they lost. Blackwell is judged by recoveries and by the bit error rate after correction alone: what it corrects
-- all the time is not an error. A finding is not refuted by other counts while the one that it came from is not read.
create or replace macro find_nvlink_errors(as_of) as table
with recent as (
    select node, gpu_uuid, ts,
           {'ts': ts, 'boot_id': boot_id, 'epoch': driver_epoch, 'state': state, 'active': links_active,
            'crc': crc_errors_total, 'replays': replays_total, 'recoveries': recoveries_total,
            'failed': recoveries_failed_total, 'ecc': ecc_errors_total, 'ber': effective_ber} as v
    from nvlink
    where ts > as_of - interval 5 minute and ts <= as_of and link is null and gpu_uuid is not null
),
newest as (
    select node, gpu_uuid, max(ts) as ts, max_by(v, ts) as v from recent group by node, gpu_uuid
),
older as (
    select r.node, r.gpu_uuid, max_by(r.v, r.ts) as v,
           -- what fires at once must not come of one sweep that read too little
           max(r.v.failed) filter (r.v.boot_id = n.v.boot_id and r.v.epoch is not distinct from n.v.epoch) as most_failed
    from recent r join newest n on n.node = r.node and n.gpu_uuid = r.gpu_uuid
    where r.ts < n.ts
    group by r.node, r.gpu_uuid
),
why_null as (
    select node, entity, bool_and(reason in ('not_supported', 'ok')) as not_supported
    from (select node, entity, metric, max_by(reason, since) as reason
          from capability
          where probe = 'nvlink' and metric in ('replays_total', 'recoveries_total', 'crc_errors_total') and since <= as_of
          group by node, entity, metric)
    group by node, entity
),
step as (
    select n.node, n.gpu_uuid, n.ts, n.v,
           o.v is null as first,
           o.v.boot_id is distinct from n.v.boot_id or o.v.epoch is distinct from n.v.epoch
               or coalesce(n.v.active > o.v.active, false) as begun,
           epoch(n.ts - o.v.ts) as elapsed_s,
           [if(n.v.crc is not null and o.v.crc is not null, 'nvlink.crc_errors_total', null),
            if(n.v.replays is not null and o.v.replays is not null, 'nvlink.replays_total', null),
            if(n.v.recoveries is not null and o.v.recoveries is not null, 'nvlink.recoveries_total', null),
            if(n.v.failed is not null and o.most_failed is not null, 'nvlink.recoveries_failed_total', null),
            if(n.v.ecc is not null and o.v.ecc is not null, 'nvlink.ecc_errors_total', null),
            if(n.v.ber is not null, 'nvlink.effective_ber', null)] as seen,
           greatest(n.v.crc::double - o.v.crc, 0)               as crc,
           greatest(n.v.replays::double - o.v.replays, 0)       as replays,
           greatest(n.v.recoveries::double - o.v.recoveries, 0) as recoveries,
           greatest(n.v.failed::double - o.most_failed, 0)      as failed,
           greatest(n.v.ecc::double - o.v.ecc, 0)               as ecc
    from newest n left join older o on o.node = n.node and o.gpu_uuid = n.gpu_uuid
),
-- The links that sent a row with the newest sweep: those that counted.
counting as (
    select l.node, l.gpu_uuid, list(l.link order by l.link) as links
    from nvlink l join newest n on n.node = l.node and n.gpu_uuid = l.gpu_uuid and n.ts = l.ts
    where l.ts > as_of - interval 5 minute and l.ts <= as_of and l.link is not null
    group by l.node, l.gpu_uuid
),
joined as (
    select c.node, c.entity, l.per_minute, l.crc_per_s, l.failed as least_failed, l.ber as most_ber, p.interval_s,
           s.* exclude (node, gpu_uuid), k.links, y.not_supported, unread(h.metrics, s.seen) as lost,
           coalesce(s.crc, 0) + coalesce(s.replays, 0) + coalesce(s.recoveries, 0) + coalesce(s.ecc, 0) as errors,
           coalesce(s.v.crc, s.v.replays, s.v.recoveries) is not null as told
    from card_list(as_of) c
    join limits_nvlink_errors l on l.node = c.node and l.model = coalesce(c.model, '')
    left join step s on s.node = c.node and s.gpu_uuid = c.gpu_uuid
    left join counting k on k.node = c.node and k.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'nvlink' group by node) p
           on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    left join found_by(as_of) h on h.rule = 'nvlink_errors' and h.node = c.node and h.entity = c.entity
    where c.gpu_uuid is not null
),
judged as (
    select *,
           case when ts is null and interval_s is null                                  then 'no_probe'
                when ts is null or ts < as_of - to_seconds(fresh_s(coalesce(interval_s, 30))) then 'no_samples'
                when v.state in ('lost', 'hung')                                        then v.state
                when not told and not_supported                                         then 'not_supported'
                when not told                                                           then 'unreadable'
                when first or begun                                                     then 'no_step'
                when failed >= least_failed                                             then 'recovery_failed'
                when crc >= crc_per_s * elapsed_s                                       then 'crc_burst'
                when v.ber > most_ber                                                   then 'bit_errors'
                when errors > 0 and errors * 60 >= per_minute * elapsed_s               then 'errors'
                when len(lost) > 0                                                      then 'not_read'
                else 'none' end as code,
           [if(failed >= least_failed, 'nvlink.recoveries_failed_total', null), if(v.ber > most_ber, 'nvlink.effective_ber', null),
            if(crc > 0, 'nvlink.crc_errors_total', null), if(replays > 0, 'nvlink.replays_total', null),
            if(recoveries > 0, 'nvlink.recoveries_total', null), if(ecc > 0, 'nvlink.ecc_errors_total', null)] as bad
    from joined
)
select node, entity,
       case when code = 'none' then 'ok' when code in ('recovery_failed', 'crc_burst') then 'crit'
            when code in ('errors', 'bit_errors') then 'warn'
            when code in ('no_probe', 'not_supported', 'no_step') then 'n/a' else 'unknown' end as verdict,
       code,
       case when code = 'recovery_failed' then failed when code = 'crc_burst' then crc / elapsed_s when code = 'bit_errors' then v.ber
            when code in ('errors', 'none') then errors * 60 / elapsed_s end::double as observed,
       case when code = 'recovery_failed' then least_failed when code = 'crc_burst' then crc_per_s when code = 'bit_errors' then most_ber
            when code in ('errors', 'none') then per_minute end::double as expected,
       case when code = 'crc_burst' then '1/s' when code = 'bit_errors' then '1' when code = 'recovery_failed' then 'count'
            else '1/min' end as unit,
       ts as evidence_at,
       case code when 'none' then 'no errors between the two newest sweeps'
            when 'recovery_failed' then format('{:.0f} times a link did not come back after training anew', failed)
            when 'crc_burst' then format('{:.0f} packets per second with a wrong checksum', crc / elapsed_s)
            when 'bit_errors' then format('bit error rate {:.1e} after correction', v.ber)
            when 'errors' then format('{} in {:.0f} s{}', concat_ws(', ', if(crc > 0, format('{:.0f} wrong checksums', crc), null),
                 if(replays > 0, format('{:.0f} replays', replays), null), if(recoveries > 0, format('{:.0f} recoveries', recoveries), null),
                 if(ecc > 0, format('{:.0f} ECC errors', ecc), null)), elapsed_s,
                 if(len(links) between 1 and 4, ' on link ' || array_to_string(links, ', '), ''))
            when 'no_probe' then 'the agent does not read NVLinks'
            when 'no_samples' then 'no samples'
            when 'not_supported' then 'this card counts no errors of links'
            when 'no_step' then 'the links or the counts have just begun'
            when 'unreadable' then 'the error counts cannot be read'
            when 'not_read' then unread_words(lost)
            else 'the card does not answer' end as reason,
       json_object('crc', crc, 'replays', replays, 'recoveries', recoveries, 'recoveries_failed', failed, 'ecc', ecc,
                   'effective_ber', v.ber, 'elapsed_s', elapsed_s, 'links', links, 'driver_state', v.state,
                   'by', noted(bad, lost)) as detail
from judged;
