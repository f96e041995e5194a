/*
title         = "The driver reported an error"
scope         = "gpu"
every         = "5s"
weight        = 1.5
for           = "1 of 1"
runbook       = "xid"

[limits]
warn_s        = { value = 3600,  source = "own choice: what ends with a job is news for an hour" }
count_s       = { value = 86400, source = "own choice: how often in a day says whether to reset or to replace" }
*/

-- What NVIDIA's driver wrote to the kernel log (Xid of a card, SXid of a switch, a card that could not be started, the
-- action it wants), by the severity of the catalogue. Only what was written since the node booted and the card was last
-- reset counts. A warning counts for warn_s; a fatal error for as long as nothing says that it was dealt with: another
-- boot, the driver loaded anew, the driver wanting nothing any more, a lost card that answers again. So events that come
-- late count only if they are still true, and are evidence from when they came: an older fatal error still raises. However many there are, it is one row per card; the newest worst one names it.
create or replace macro find_xid(as_of) as table
with heard as (
    select node, max(ts) as ts, max_by(boot_id, ts) as boot_id
    from agent where ts > as_of - interval 5 minute and ts <= as_of group by node
),
booted as (
    select n.node, coalesce(h.boot_id, n.boot_id) as boot_id, h.ts
    from node_list(as_of) n left join heard h on h.node = n.node
),
card as (
    select node, entity, gpu_uuid, serial, pci, slot, model, installed
    from card_list(as_of)
),
card_at as (select node, pci, max_by(entity, installed::int) as entity from card where pci is not null group by node, pci),
told as (
    select e.node, e.ts, e.kind, e.code, e.count, e.message, e.entity,
           greatest(e.ts, least(e.received_at, as_of)) as known_at,
           coalesce(json_extract_string(e.detail, '$.severity'), 'warning') as severity,
           json_extract_string(e.detail, '$.action') as action,
           json_extract_string(e.detail, '$.name')   as name,
           json_extract_string(e.detail, '$.scope')  as scope,
           nullif(json_extract_string(e.detail, '$.uuid'), '') as uuid
    from event e
    join booted b on b.node = e.node and b.boot_id = e.boot_id
    where e.kind in ('xid', 'sxid', 'gpu_init_failed', 'xid_unparsed', 'recovery_action', 'gpu_found', 'driver_reloaded')
      and e.ts > as_of - interval 30 day and e.ts <= as_of
),
placed as (
    select t.* exclude (entity), coalesce(u.entity, if(t.uuid is null, a.entity, null), t.entity) as entity
    from told t
    left join card u on u.node = t.node and u.gpu_uuid = t.uuid
    left join card_at a on a.node = t.node and 'pci:' || a.pci = t.entity
),
reset as (
    select node, entity, max(ts) as ts
    from placed
    where kind = 'recovery_action' and code = 'none' or kind = 'gpu_found' and code = 'back'
    group by node, entity
),
reloaded as (select node, max(ts) as ts from placed where kind = 'driver_reloaded' group by node),
subject as (
    select node, entity, serial, pci, slot, coalesce(model, '') as model from card
    union
    select node, entity, null, null, null, '' from placed
    where kind in ('xid', 'sxid', 'gpu_init_failed', 'xid_unparsed', 'recovery_action')
      and (node, entity) not in (select (node, entity) from card)
),
counting as (
    select p.*, p.severity in ('critical', 'fault') as fatal, l.count_s
    from placed p
    join subject s on s.node = p.node and s.entity = p.entity
    left join reset r on r.node = p.node and r.entity = p.entity
    left join reloaded d on d.node = p.node
    join limits_xid l on l.node = p.node and l.model = s.model
    where p.kind in ('xid', 'sxid', 'gpu_init_failed', 'xid_unparsed', 'recovery_action') and p.severity <> 'info'
      and p.ts > coalesce(greatest(r.ts, d.ts), '-infinity'::timestamp)
      and (p.severity in ('critical', 'fault') or p.ts > as_of - to_seconds(l.warn_s))
),
bad as (
    select node, entity, bool_or(fatal) as fatal, max(ts) as ts, min(ts) as first_at, max(known_at) as known_at,
           max_by({'kind': kind, 'code': code, 'severity': severity, 'action': action, 'name': name, 'scope': scope,
                   'message': message, 'ts': ts},
                  epoch_us(ts) // 1000000 * 2 + (kind in ('xid', 'sxid'))::int + if(fatal, 1000000000000, 0)) as worst,
           list(distinct kind || ' ' || code)[:16] as kinds
    from counting group by node, entity
),
often as (
    select c.node, c.entity, sum(c.count) as n
    from counting c join bad b on b.node = c.node and b.entity = c.entity and b.worst.kind = c.kind and b.worst.code = c.code
    where c.ts > as_of - to_seconds(c.count_s)
    group by c.node, c.entity
),
judged as (
    select s.*, h.ts as heard_at, h.boot_id, b.fatal, b.ts, b.first_at, b.known_at, b.worst, b.kinds, coalesce(o.n, 0) as n,
           case when b.ts is not null                               then b.worst.kind
                when h.ts is null or h.ts < as_of - interval 90 second then 'agent_silent'
                else 'none' end as code
    from subject s
    join booted h on h.node = s.node
    left join bad b on b.node = s.node and b.entity = s.entity
    left join often o on o.node = s.node and o.entity = s.entity
)
select node, entity,
       case when code = 'none' then 'ok' when code = 'agent_silent' then 'unknown' when fatal then 'crit' else 'warn' end as verdict,
       code,
       if(ts is not null, n, if(code = 'none', 0, null))::double            as observed,
       0::double                                                            as expected,
       'count'                                                              as unit,
       coalesce(known_at, heard_at)                                         as evidence_at,
       case when code = 'none' then 'the driver reported nothing that counts'
            when code = 'agent_silent' then 'the agent is silent'
            else format('{}{}{}, last at {}{}',
                        case code when 'xid' then 'Xid ' || worst.code when 'sxid' then 'SXid ' || worst.code
                             when 'recovery_action' then 'the driver wants ' || worst.code
                             when 'gpu_init_failed' then 'the card could not be started (' || worst.code || ')'
                             else 'an error that could not be read: ' || worst.message[:120] end,
                        coalesce(' ' || nullif(worst.name, ''), ''),
                        if(n > 1, format(', {} times', n), ''), strftime(worst.ts, '%Y-%m-%d %H:%M:%S'),
                        coalesce('; action: ' || nullif(worst.action, ''), '')) end as reason,
       json_object('kind', worst.kind, 'code', worst.code, 'severity', worst.severity, 'action', worst.action,
                   'scope', worst.scope, 'message', worst.message, 'serial', serial, 'pci', pci, 'slot', slot, 'boot_id', boot_id,
                   'first', first_at, 'last', ts, 'also', kinds) as detail
from judged;
