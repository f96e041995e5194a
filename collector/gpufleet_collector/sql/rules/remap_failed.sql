/*
title         = "Memory repair failed or pending"
scope         = "gpu"
every         = "30s"
for           = "1 of 1"
runbook       = "remap_failed"

[limits]
banks_none    = { value = 1, source = "a bank without a spare row: its next uncorrectable error cannot be repaired" }
*/

-- What the card says of its own memory repairs in the newest sweep. Damage that cannot be repaired is critical: the card
-- goes back. A repair that waits for a reset, and banks that have used up their spare rows, are warnings. A finding is not
-- refuted by other answers while the one that it came from is not read.
create or replace macro find_remap_failed(as_of) as table
with newest as (
    select node, gpu_uuid, max(ts) as ts,
           max_by({'state': state, 'failed': remap_failed, 'unrepairable': memory_unrepairable, 'rows': remap_pending,
                   'pages': retired_pages_pending, 'channel': channel_repair_pending, 'cluster': tpc_repair_pending,
                   'none_left': remap_banks_none}, ts) as v
    from gpu_health
    where ts > as_of - interval 15 minute and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
why_null as (
    select node, entity, bool_and(reason in ('not_supported', 'ok')) as not_supported
    from (select node, entity, metric, max_by(reason, since) as reason
          from capability
          where probe = 'gpu_health' and metric in ('remap_failed', 'memory_unrepairable', 'remap_pending', 'retired_pages_pending')
            and since <= as_of
          group by node, entity, metric)
    group by node, entity
),
judged as (
    select c.node, c.entity, n.ts, n.v, l.banks_none,
           unread(h.metrics, [if(n.v.failed is not null, 'gpu_health.remap_failed', null),
                              if(n.v.unrepairable is not null, 'gpu_health.memory_unrepairable', null),
                              if(n.v.rows is not null, 'gpu_health.remap_pending', null),
                              if(n.v.pages is not null, 'gpu_health.retired_pages_pending', null),
                              if(n.v.channel is not null, 'gpu_health.channel_repair_pending', null),
                              if(n.v.cluster is not null, 'gpu_health.tpc_repair_pending', null),
                              if(n.v.none_left is not null, 'gpu_health.remap_banks_none', null)]) as lost,
           [if(n.v.failed, 'gpu_health.remap_failed', null), if(n.v.unrepairable, 'gpu_health.memory_unrepairable', null),
            if(n.v.rows, 'gpu_health.remap_pending', null), if(n.v.pages, 'gpu_health.retired_pages_pending', null),
            if(n.v.channel, 'gpu_health.channel_repair_pending', null), if(n.v.cluster, 'gpu_health.tpc_repair_pending', null),
            if(n.v.none_left >= l.banks_none, 'gpu_health.remap_banks_none', null)] as bad,
           case when n.ts is null and p.interval_s is null                        then 'no_probe'
                when n.ts is null or n.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))) then 'no_samples'
                when n.v.state in ('lost', 'hung')                                then n.v.state
                when n.v.failed                                                   then 'remap_failed'
                when n.v.unrepairable                                             then 'memory_unrepairable'
                when n.v.rows or n.v.pages or n.v.channel or n.v.cluster          then 'pending'
                when n.v.none_left >= l.banks_none                                then 'no_spare_rows'
                -- one answer that fails is not an answer that all is well
                when coalesce(n.v.failed, n.v.unrepairable, n.v.rows, n.v.pages) is not null
                     and coalesce(y.not_supported, true)                          then if(len(lost) > 0, 'not_read', 'none')
                when coalesce(n.v.failed, n.v.unrepairable, n.v.rows, n.v.pages) is null and y.not_supported then 'not_supported'
                else 'unreadable' end as code
    from card_list(as_of) c
    join limits_remap_failed l on l.node = c.node and l.model = coalesce(c.model, '')
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p
           on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    left join found_by(as_of) h on h.rule = 'remap_failed' and h.node = c.node and h.entity = c.entity
    where c.gpu_uuid is not null
)
select node, entity,
       case when code = 'none' then 'ok' when code in ('remap_failed', 'memory_unrepairable') then 'crit'
            when code in ('pending', 'no_spare_rows') then 'warn' when code in ('no_probe', 'not_supported') then 'n/a'
            else 'unknown' end as verdict,
       code,
       if(code = 'no_spare_rows', v.none_left, null)::double as observed,
       if(code = 'no_spare_rows', 0, null)::double           as expected,
       'count' as unit, ts as evidence_at,
       case code when 'none' then 'no repair failed or pending'
            when 'remap_failed' then 'a memory row could not be replaced: the card goes back'
            when 'memory_unrepairable' then 'the memory has damage that no repair is left for: the card goes back'
            when 'pending' then format('{} waits for a reset of the card',
                concat_ws(', ', if(v.rows, 'a memory row', null), if(v.pages, 'a memory page', null),
                          if(v.channel, 'a memory channel', null), if(v.cluster, 'a processor cluster', null)))
            when 'no_spare_rows' then format('{} memory banks have no spare row left', v.none_left)
            when 'no_probe' then 'the agent does not read the health of cards'
            when 'no_samples' then 'no samples'
            when 'not_supported' then 'this card repairs no memory, or does not say so'
            when 'unreadable' then 'the repairs cannot be read'
            when 'not_read' then unread_words(lost)
            else 'the card does not answer' end as reason,
       json_object('action', case when code in ('remap_failed', 'memory_unrepairable') then 'drain_rma'
                                  when code = 'pending' then 'reset' end,
                   'remap_failed', v.failed, 'memory_unrepairable', v.unrepairable, 'remap_pending', v.rows,
                   'retired_pages_pending', v.pages, 'channel_repair_pending', v.channel,
                   'tpc_repair_pending', v.cluster, 'banks_none', v.none_left, 'driver_state', v.state, 'by', noted(bad, lost)) as detail
from judged;
