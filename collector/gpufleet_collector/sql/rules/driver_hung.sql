/*
title         = "Driver hung"
scope         = "gpu"
every         = "5s"
for           = "2 of 2"
covers        = "driver"
each_sample   = true
runbook       = "driver_hung"
*/

-- A driver call that does not return. The agent leaves the card alone from then on and goes on with the others: the
-- card's rows say state hung. Where the call was for no card in particular, the whole sweep fails with error hung: one
-- row for the node. Which card and which call it was comes from the event that began the episode.
create or replace macro find_driver_hung(as_of) as table
with run as (
    select a.node, a.boot_id, a.ts, a.ok, coalesce(a.error, '') as error, a.rows
    from agent a
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu' group by node) p
           on p.node = a.node
    where a.ts > as_of - interval 5 minute and a.ts <= as_of and a.probe = 'gpu'
      and a.ts >= as_of - to_seconds(fresh_s(coalesce(p.interval_s, 5)))
),
driver as (
    select node, max(ts) as ts, max_by(ok, ts) as ok, max_by(error, ts) as error, max_by(boot_id, ts) as boot_id
    from run group by node
),
recent as (
    select node, ts, gpu_uuid, pci, state
    from gpu where ts > as_of - interval 2 minute and ts <= as_of and ts >= (select min(ts) from run)
),
gpu_sweep as (
    select r.node, max(r.ts) as ts
    from run r
    left join (select node, ts, count(*) as n from recent group by node, ts) g on g.node = r.node and g.ts = r.ts
    where r.ok and coalesce(g.n, 0) >= coalesce(r.rows, 0)
    group by r.node
),
seen as (select g.* from recent g join gpu_sweep s on s.node = g.node and s.ts = g.ts),
told as (
    select e.node, e.entity, e.ts, e.kind, nullif(e.code, '') as call,
           nullif(json_extract_string(e.detail, '$.pci'), '') as pci
    from event e
    join driver d on d.node = e.node and d.boot_id = e.boot_id
    where e.kind in ('driver_hung', 'driver_crashed') and e.ts > as_of - interval 90 day and e.ts <= as_of
),
told_of_card as (
    select node, entity, max_by({'ts': ts, 'kind': kind, 'call': call, 'pci': pci}, ts) as last
    from told group by node, entity
),
told_of_node as (
    select node, max_by({'ts': ts, 'kind': kind, 'call': call, 'pci': pci}, ts) as last from told group by node
),
card as (
    select c.node, c.entity, c.gpu_uuid, c.serial, c.pci, c.slot, d.ts as driver_ts, d.ok, d.error, s.ts as gpu_ts,
           coalesce(u.state, a.state) as state, coalesce(u.pci, a.pci, c.pci) as address, coalesce(t.last, p.last) as last
    from card_list(as_of) c
    left join driver d on d.node = c.node
    left join gpu_sweep s on s.node = c.node
    left join (select node, gpu_uuid, any_value(pci) as pci, any_value(state) as state
               from seen where gpu_uuid is not null group by node, gpu_uuid) u
           on u.node = c.node and u.gpu_uuid = c.gpu_uuid
    -- a row without identity is the card last known there: it hung before it could be read
    left join (select node, pci, any_value(state) as state
               from seen where gpu_uuid is null group by node, pci) a on a.node = c.node and a.pci = c.pci
    left join told_of_card t on t.node = c.node and t.entity = c.entity
    left join told_of_card p on p.node = c.node and p.entity = 'pci:' || c.pci
    where c.installed or c.expectation <> 'none'
),
judged as (
    select *,
           case when driver_ts is null              then 'agent_silent'
                when not ok and error = 'hung'      then 'driver_hung'
                when not ok                         then 'no_driver'
                when gpu_ts is null                 then 'incomplete_sweep'
                when state = 'hung'                 then 'card_hung'
                when state is null                  then 'not_listed'
                else 'answers' end as code
    from card
)
select node, entity,
       case when code = 'answers' then 'ok' when code = 'card_hung' then 'crit'
            when code in ('driver_hung', 'no_driver') then 'n/a' else 'unknown' end as verdict,
       code,
       if(code = 'card_hung', epoch(as_of - last.ts), null)                         as observed,
       null::double                                                                 as expected,
       's'                                                                          as unit,
       coalesce(gpu_ts, driver_ts)                                                  as evidence_at,
       case when code <> 'card_hung' then
                case code when 'answers' then 'the card answers' when 'agent_silent' then 'the agent is silent'
                     when 'driver_hung' then 'the driver answers for no card' when 'no_driver' then 'the driver failed: ' || error
                     when 'incomplete_sweep' then 'rows of the newest sweep are not in yet'
                     else 'the driver does not list the card' end
            else format('{}{}: serial {}{}, {}, {}',
                        case when last is null then 'a driver call'
                             when last.kind = 'driver_crashed' then coalesce(last.call, 'a driver call') || ' kills its process,'
                             else coalesce(last.call, 'a driver call') end,
                        case when last is null then ' does not return'
                             when last.kind = 'driver_crashed' then ' left alone since ' || strftime(last.ts, '%Y-%m-%d %H:%M:%S')
                             else ' has not returned since ' || strftime(last.ts, '%Y-%m-%d %H:%M:%S') end,
                        coalesce(serial, 'unknown'), coalesce(', slot ' || slot, ''),
                        coalesce(address, 'address unknown'), coalesce(gpu_uuid, 'UUID unknown')) end as reason,
       json_object('gpu_uuid', gpu_uuid, 'serial', serial, 'pci', address, 'slot', slot, 'call', last.call, 'since', last.ts,
                   'kind', last.kind, 'driver_state', state)                        as detail
from judged
union all
select n.node, 'node:',
       case when d.ts is not null and not d.ok and d.error = 'hung' then 'crit'
            when coalesce(n.expected_gpus, 0) = 0 and coalesce(c.n, 0) = 0 then 'n/a'
            when d.ts is null then 'unknown' else 'ok' end,
       case when d.ts is not null and not d.ok and d.error = 'hung' then 'driver_hung'
            when coalesce(n.expected_gpus, 0) = 0 and coalesce(c.n, 0) = 0 then 'no_cards'
            when d.ts is null then 'agent_silent' else 'returns' end,
       if(d.error = 'hung', epoch(as_of - t.last.ts), null), null, 's', d.ts,
       case when d.ts is not null and not d.ok and d.error = 'hung' then
                 format('{}{} {}, and the driver answers for no card', coalesce(t.last.call, 'a driver call'),
                        coalesce(' of ' || t.last.pci, ''),
                        coalesce('has not returned since ' || strftime(t.last.ts, '%Y-%m-%d %H:%M:%S'), 'does not return'))
            when coalesce(n.expected_gpus, 0) = 0 and coalesce(c.n, 0) = 0 then 'no cards'
            when d.ts is null then 'the cards were not read'
            else 'calls to the driver return' end,
       json_object('pci', t.last.pci, 'call', t.last.call, 'since', t.last.ts, 'driver_error', d.error)
from node_list(as_of) n
left join driver d on d.node = n.node
left join told_of_node t on t.node = n.node
left join (select node, count(*) as n from card_list(as_of) where installed group by node) c on c.node = n.node;
