/*
title         = "Card missing"
scope         = "gpu"
every         = "5s"
weight        = 1.5
for           = "2 of 2"
boot_grace    = "2m"
covers        = "card"
each_sample   = true
runbook       = "gpu_missing"
*/

-- Every expected card is looked for in the newest sweep of the driver (probe gpu) and of the bus (probe pci).
--   gone_from_bus      the bus does not show it
--   refused_by_driver  the bus shows it, the driver does not list it
--   lost_at_run_time   the driver lists it, but it no longer answers
--   driver_not_loaded  the driver answers for no card: one row for the node, its cards are n/a
-- Cards are looked for by identity: one that moved to another slot is present, one that took a slot is another one.
-- A sweep counts when it ended well and all its rows are here; without a fresh one a card is unknown, never missing.
create or replace macro find_gpu_missing(as_of) as table
with run as (
    select a.node, a.probe, a.ts, a.ok, coalesce(a.error, '') as error, a.rows
    from agent a
    left join (select node, probe, max(interval_s) as interval_s from probe group by node, probe) p
           on p.node = a.node and p.probe = a.probe
    where a.ts > as_of - interval 5 minute and a.ts <= as_of and a.probe in ('gpu', 'pci')
      and a.ts >= as_of - to_seconds(fresh_s(coalesce(p.interval_s, if(a.probe = 'gpu', 5, 60))))
),
driver as (
    select node, max(ts) as ts, max_by(ok, ts) as ok, max_by(error, ts) as error
    from run where probe = 'gpu' group by node
),
recent as (
    select node, ts, gpu_uuid, pci, coalesce(state, 'not_told') as state
    from gpu where ts > as_of - interval 2 minute and ts <= as_of and ts >= (select min(ts) from run where probe = 'gpu')
),
gpu_sweep as (
    select r.node, max(r.ts) as ts
    from run r
    left join (select node, ts, count(*) as n from recent group by node, ts) g on g.node = r.node and g.ts = r.ts
    where r.probe = 'gpu' and r.ok and coalesce(g.n, 0) >= coalesce(r.rows, 0)
    group by r.node
),
seen as (select distinct g.* from recent g join gpu_sweep s on s.node = g.node and s.ts = g.ts),
pci_sweep as (
    select r.node, max(r.ts) as ts
    from run r
    left join (select node, ts, count(*) as n from pci where ts > as_of - interval 5 minute and ts <= as_of
               group by node, ts) p on p.node = r.node and p.ts = r.ts
    where r.probe = 'pci' and r.ok and coalesce(p.n, 0) >= coalesce(r.rows, 0)
    group by r.node
),
bus as (
    select p.node, p.pci, any_value(nullif(p.gpu_uuid, '')) as gpu_uuid, bool_and(coalesce(p.present, true)) as present
    from pci p join pci_sweep s on s.node = p.node and s.ts = p.ts
    where p.ts > as_of - interval 5 minute and p.ts <= as_of and p.device_kind = 'gpu'
    group by p.node, p.pci
),
-- Where sysfs shows no card at all but the driver reads some (containers, WSL), the bus says nothing.
node_view as (
    select n.node, n.expectation, n.expected_gpus, n.hello_at is not null as known,
           d.ts as driver_ts, d.ok as driver_ok, d.error as driver_error, g.ts as gpu_ts,
           case when b.cards > 0 or coalesce(s.answering, 0) = 0 then p.ts end as pci_ts,
           coalesce(b.present, 0) > coalesce(s.listed, 0) as unclaimed_on_bus
    from node_list(as_of) n
    left join driver d on d.node = n.node
    left join gpu_sweep g on g.node = n.node
    left join pci_sweep p on p.node = n.node
    left join (select node, count(*) as cards, count(*) filter (present) as present from bus group by node) b
           on b.node = n.node
    left join (select node, count(*) as listed, count(*) filter (state = 'ok') as answering from seen group by node) s
           on s.node = n.node
),
card as (
    select c.node, c.entity, c.gpu_uuid, c.serial, c.pci, c.expected_pci, c.slot, c.expectation, v.* exclude (node, expectation),
           coalesce(u.state, a.state) as state,
           coalesce(u.pci, a.pci)     as driver_pci
    from card_list(as_of) c
    join node_view v on v.node = c.node
    left join (select node, gpu_uuid, any_value(pci) as pci, any_value(state) as state
               from seen where gpu_uuid is not null group by node, gpu_uuid) u
           on u.node = c.node and u.gpu_uuid = c.gpu_uuid
    -- a row without identity (the card hung or was lost before it could be read) is the card last known there
    left join (select node, pci, any_value(state) as state
               from seen where gpu_uuid is null group by node, pci) a
           on a.node = c.node and a.pci = c.pci
    where c.expectation <> 'none'
),
-- Who the driver says sits at a card's address, and whether that one's serial is known.
holder as (
    select s.node, s.pci, any_value(s.gpu_uuid) as gpu_uuid, any_value(nullif(i.serial, '')) as serial
    from seen s left join inventory_at(as_of) i on i.node = s.node and i.gpu_uuid = s.gpu_uuid
    where s.gpu_uuid is not null
    group by s.node, s.pci
),
nameless as (select node, count(*) as n from holder where serial is null group by node),
elsewhere as (select gpu_uuid, max_by(node, valid_from) as node from inventory_at(as_of) group by gpu_uuid),
placed as (
    select c.*,
           if(h.gpu_uuid = c.gpu_uuid, null, h.gpu_uuid) as holder,
           if(h.gpu_uuid = c.gpu_uuid, null, h.serial) as holder_serial,
           e.node as now_on,
           case when c.pci_ts is null then null
                when coalesce(c.driver_pci, c.pci) is null then c.unclaimed_on_bus
                else coalesce(b.present, p.present and (p.gpu_uuid is null or p.gpu_uuid = c.gpu_uuid or c.gpu_uuid is null)
                                                   and (h.gpu_uuid is null or h.gpu_uuid = c.gpu_uuid), false) end as on_bus,
           c.gpu_uuid is null and (if(c.pci is null, n.n > 0, h.gpu_uuid is not null and h.serial is null)) as no_serial
    from card c
    left join holder h on h.node = c.node and h.pci = coalesce(c.driver_pci, c.pci)
    left join nameless n on n.node = c.node
    left join elsewhere e on e.gpu_uuid = c.gpu_uuid and e.node <> c.node
    left join bus p on p.node = c.node and p.pci = coalesce(c.driver_pci, c.pci)
    left join (select node, gpu_uuid, bool_or(present) as present from bus where gpu_uuid is not null group by node, gpu_uuid) b
           on b.node = c.node and b.gpu_uuid = c.gpu_uuid
),
judged as (
    select *,
           case when driver_ts is null and pci_ts is null                       then 'agent_silent'
                when coalesce(no_serial, false)                                 then 'no_serial'
                when not on_bus and (driver_ts is null or not driver_ok or gpu_ts is null or state in ('ok', 'hung'))
                                                                                then 'gone_from_bus'
                when driver_ts is null                                          then 'no_sweep'
                when not driver_ok and driver_error in ('driver_not_loaded', 'no_library', 'driver_mismatch', 'driver_failed')
                                                                                then 'driver_not_loaded'
                when not driver_ok                                              then 'driver_unreadable'
                when gpu_ts is null                                             then 'incomplete_sweep'
                when state = 'ok'                                               then 'present'
                when state in ('hung', 'not_told')                              then state
                when not on_bus                                                 then 'gone_from_bus'
                when state is not null                                          then 'lost_at_run_time'
                else 'refused_by_driver' end                                    as code,
           -- only the bus shows it: the bus's sweep is the evidence
           not coalesce(on_bus, true) and (driver_ts is null or not driver_ok or gpu_ts is null or state in ('ok', 'hung'))
                                                                                as by_bus
    from placed
)
select node, entity,
       case when code = 'present' then 'ok'
            when code in ('gone_from_bus', 'refused_by_driver', 'lost_at_run_time') then 'crit'
            when code = 'driver_not_loaded' then 'n/a'
            else 'unknown' end                                                  as verdict,
       code,
       case when code in ('gone_from_bus', 'refused_by_driver', 'lost_at_run_time') then 0::double
            when code = 'present' then 1::double end                            as observed,
       1::double                                                                as expected,
       'count'                                                                  as unit,
       case when by_bus then pci_ts else coalesce(gpu_ts, driver_ts, pci_ts) end as evidence_at,
       format('{}: serial {}{}, {}, {}{}',
              case code when 'gone_from_bus' then 'gone from the bus'
                        when 'refused_by_driver' then
                             if(on_bus is null, 'the driver does not list it; the bus was not read',
                                                'on the bus, but the driver does not list it')
                        when 'lost_at_run_time' then 'the driver lists it, but it no longer answers'
                        when 'present' then 'present'
                        when 'hung' then 'a driver call on it does not return'
                        when 'not_told' then 'the driver lists it; whether it answers was not told'
                        when 'agent_silent' then 'the agent is silent'
                        when 'no_serial' then 'a card is there whose serial cannot be read'
                        when 'no_sweep' then 'the cards were not read'
                        when 'driver_not_loaded' then 'no driver answers on the host'
                        when 'incomplete_sweep' then 'rows of the newest sweep are not in yet'
                        else format('the driver could not be read ({})', driver_error) end,
              coalesce(serial, 'unknown'), coalesce(', slot ' || slot, ''),
              coalesce(driver_pci, pci, 'address unknown'), coalesce(gpu_uuid, 'UUID unknown'),
              if(code in ('gone_from_bus', 'refused_by_driver'),
                 concat(format('; in its place is serial {}, {}', coalesce(holder_serial, 'unknown'), holder),
                        '; it is in ' || now_on || ' now'), '')) as reason,
       json_object('gpu_uuid', gpu_uuid, 'serial', serial, 'pci', coalesce(driver_pci, pci), 'expected_pci', expected_pci,
                   'slot', slot, 'moved', coalesce(expected_pci <> driver_pci, false), 'on_bus', on_bus,
                   'driver_state', state, 'now_in_its_place', holder, 'now_on', now_on,
                   'action', if(code in ('gone_from_bus', 'refused_by_driver') and coalesce(holder, now_on) is not null, 'accept', null),
                   'expectation', expectation)                                  as detail
from judged
union all
select node, 'node:',
       case when expectation = 'none' or expected_gpus = 0 then 'n/a'
            when driver_ts is null then 'unknown'
            when driver_ok then 'ok'
            when driver_error in ('driver_not_loaded', 'no_library', 'driver_mismatch', 'driver_failed') then 'crit'
            else 'unknown' end,
       case when expectation = 'none' then 'no_expectation'
            when expected_gpus = 0 then 'no_cards'
            when driver_ts is null then 'agent_silent'
            when driver_ok then 'driver_loaded'
            when driver_error in ('driver_not_loaded', 'no_library', 'driver_mismatch', 'driver_failed') then 'driver_not_loaded'
            else 'driver_unreadable' end,
       null, expected_gpus::double, 'count', driver_ts,
       case when expectation = 'none' then 'no expected inventory: nothing can be missing'
            when expected_gpus = 0 then 'no cards expected'
            when driver_ts is null then 'the cards were not read'
            when driver_ok then 'the driver answers'
            else format('the driver answers for none of {} expected cards: {}', expected_gpus, driver_error) end,
       json_object('expected_gpus', expected_gpus, 'driver_error', driver_error, 'expectation', expectation)
from node_view;
