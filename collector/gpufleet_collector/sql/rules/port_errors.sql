/*
title         = "Network port with errors"
scope         = "port"
every         = "30s"
for           = "2 of 3"
clear_after   = "10m"
boot_grace    = "5m"
max_severity  = "warn"
runbook       = "port_errors"

[limits]
window_s                 = { value = 120,  source = "one verdict per two minutes" }
settle_s                 = { value = 15,   source = "what a sample may need to arrive" }
symbol_errors_per_min    = { value = 2,    source = "120 per hour: the bit error rate of 1e-12 that InfiniBand allows; NVSentinel's limit" }
recoveries_per_min       = { value = 5,    source = "NVSentinel: more than 5 a minute" }
rcv_errors_per_min       = { value = 600,  source = "NVSentinel: more than 10 a second" }
xmit_discards_per_min    = { value = 6000, source = "NVSentinel: more than 100 a second" }
integrity_errors_per_min = { value = 0,    source = "NVSentinel: any; link integrity and buffer overruns" }
ack_timeouts_per_min     = { value = 60,   source = "NVSentinel: more than 1 a second" }
crc_errors_per_min       = { value = 60,   source = "own choice: one a second is no single event" }
*/

-- Growth of each counter of errors over the newest whole window, per minute, against its limit; the worst is named. A
-- counter that fell on the way was reset and counts nothing, and one that is not there is not judged. A finding is not refuted by
-- other counters while its own is not read.
create or replace macro find_port_errors(as_of) as table
with port_ as (
    select p.node, p.entity, p.in_use, l.* exclude (node, model),
           floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from port_list(as_of) p
    left join port_model(as_of) m on m.node = p.node
    join limits_port_errors l on l.node = p.node and l.model = coalesce(m.model, '')
),
boot as (
    select node, max_by(boot_id, ts) as boot_id
    from port where ts > as_of - interval 290 second and ts <= as_of group by node
),
sample as (
    select s.node, 'port:' || s.device || '/' || s.port as entity, s.ts, s.symbol_errors_total as symbol,
           s.link_error_recovery_total as recovery, s.rcv_errors_total as rcv, s.xmit_discards_total as discards,
           s.local_link_integrity_errors_total as integrity, s.excessive_buffer_overrun_errors_total as overrun,
           s.local_ack_timeout_err_total as ack, s.rx_crc_errors_total as crc
    from port s
    join boot b on b.node = s.node and b.boot_id = s.boot_id
    where s.ts > as_of - interval 290 second and s.ts <= as_of
),
grown as (
    select p.node, p.entity, min(s.ts) as first_at, max(s.ts) as last_at,
           counter_growth(min_by(symbol, ts), max_by(symbol, ts), min(symbol), max(symbol))             as symbol,
           counter_growth(min_by(recovery, ts), max_by(recovery, ts), min(recovery), max(recovery))     as recovery,
           counter_growth(min_by(rcv, ts), max_by(rcv, ts), min(rcv), max(rcv))                         as rcv,
           counter_growth(min_by(discards, ts), max_by(discards, ts), min(discards), max(discards))     as discards,
           counter_growth(min_by(integrity, ts), max_by(integrity, ts), min(integrity), max(integrity)) as integrity,
           counter_growth(min_by(overrun, ts), max_by(overrun, ts), min(overrun), max(overrun))         as overrun,
           counter_growth(min_by(ack, ts), max_by(ack, ts), min(ack), max(ack))                         as ack,
           counter_growth(min_by(crc, ts), max_by(crc, ts), min(crc), max(crc))                         as crc
    from port_ p
    join sample s on s.node = p.node and s.entity = p.entity
    where epoch(s.ts) >= p.until_s - p.window_s and epoch(s.ts) < p.until_s
    group by p.node, p.entity
),
counter as (
    select node, entity, unnest([
               {'code': 'symbol_errors',   'grew': symbol,    'most': symbol_errors_per_min,    'metric': 'port.symbol_errors_total'},
               {'code': 'link_recoveries', 'grew': recovery,  'most': recoveries_per_min,       'metric': 'port.link_error_recovery_total'},
               {'code': 'rcv_errors',      'grew': rcv,       'most': rcv_errors_per_min,       'metric': 'port.rcv_errors_total'},
               {'code': 'xmit_discards',   'grew': discards,  'most': xmit_discards_per_min,    'metric': 'port.xmit_discards_total'},
               {'code': 'link_integrity',  'grew': integrity, 'most': integrity_errors_per_min, 'metric': 'port.local_link_integrity_errors_total'},
               {'code': 'buffer_overruns', 'grew': overrun,   'most': integrity_errors_per_min, 'metric': 'port.excessive_buffer_overrun_errors_total'},
               {'code': 'ack_timeouts',    'grew': ack,       'most': ack_timeouts_per_min,     'metric': 'port.local_ack_timeout_err_total'},
               {'code': 'crc_errors',      'grew': crc,       'most': crc_errors_per_min,       'metric': 'port.rx_crc_errors_total'}]) as c,
           greatest(epoch(last_at - first_at), 1) / 60 as minutes
    from port_ join grown using (node, entity)
),
worst as (
    select node, entity, max_by({'code': c.code, 'per_min': c.grew / minutes, 'most': c.most}, share) as w, max(share) as share,
           json_group_object(c.code, round(c.grew / minutes, 3)) as rates,
           list(c.metric) as seen, coalesce(list(c.metric) filter (share > 1), []::varchar[]) as bad
    from (select *, case when c.most > 0 then c.grew / minutes / c.most when c.grew > 0 then 2 else 0 end as share
          from counter where c.grew is not null)
    group by node, entity
),
judged as (
    select p.node, p.entity, g.last_at, w.w, w.rates, w.bad, unread(h.metrics, w.seen) as lost,
           case when i.interval_s is null                                then 'no_probe'
                when not p.in_use                                        then 'not_expected'
                when g.last_at is null                                   then 'no_samples'
                when w.share is null                                     then if(y.not_supported, 'not_supported', 'unreadable')
                when g.last_at < g.first_at + interval 30 second         then 'no_samples'
                when w.share > 1                                         then w.w.code
                when len(lost) > 0                                       then 'not_read'
                else 'clean' end as code
    from port_ p
    left join grown g on g.node = p.node and g.entity = p.entity
    left join worst w on w.node = p.node and w.entity = p.entity
    left join found_by(as_of) h on h.rule = 'port_errors' and h.node = p.node and h.entity = p.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'port' group by node) i on i.node = p.node
    left join (select node, entity, bool_and(reason = 'not_supported') as not_supported
               from (select node, entity, metric, max_by(reason, since) as reason from capability
                     where probe = 'port' and metric in ('symbol_errors_total', 'rcv_errors_total', 'rx_crc_errors_total')
                       and since <= as_of
                     group by node, entity, metric)
               group by node, entity) y on y.node = p.node and y.entity = p.entity
)
select node, entity,
       case when code = 'clean' then 'ok' when code in ('no_probe', 'not_expected', 'not_supported') then 'n/a'
            when code in ('no_samples', 'unreadable', 'not_read') then 'unknown' else 'warn' end as verdict,
       code, w.per_min as observed, w.most as expected, 'per minute' as unit, last_at as evidence_at,
       case code when 'clean' then 'errors below their limits'
            when 'no_probe' then 'the agent does not read network ports'
            when 'not_expected' then 'it was not active since the inventory was accepted'
            when 'no_samples' then 'no samples'
            when 'not_supported' then 'this port counts no errors'
            when 'unreadable' then 'its counters cannot be read'
            when 'not_read' then unread_words(lost)
            else format('{:g} {} per minute over two minutes, above {:g}', round(w.per_min, 1), replace(code, '_', ' '), w.most) end as reason,
       json_object('per_minute', rates, 'by', noted(bad, lost)) as detail
from judged;
