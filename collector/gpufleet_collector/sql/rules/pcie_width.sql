/*
title         = "PCIe link lost lanes"
scope         = "pci"
every         = "30s"
weight        = 2.5
for           = "2 of 2"
clear_after   = "2m"
runbook       = "pcie_width"

[limits]
lanes         = { value = 0,    source = "lanes that a card must have to the root; 0 = as many as it ever showed" }
crit_share    = { value = 0.25, source = "own choice: a quarter of the lanes carries a quarter of the data" }
*/

-- Width is judged at any time, for links do not give up lanes to save power. Two things are compared, each with what both
-- ends can do and with the best since the node was accepted, whichever is less: the device's own link, and the narrowest
-- link between it and the root. So a slot of 8 lanes, a switch with a narrow uplink and a card handed to a virtual machine
-- with 8 of its 16 lanes are well for as long as they stay what they were; a declared number of lanes says otherwise.
--
-- The bus (sysfs, every 60 s) wins: it sees the whole way and needs no driver. What the driver says of a card's own link is
-- taken where the bus does not tell (containers), and where the driver says that the card has no such link, nothing is
-- judged. A width that cannot be read, as while a link trains, is unknown.
create or replace macro find_pcie_width(as_of) as table
with device as (
    select node, pci, max(ts) as ts,
           max_by({'kind': device_kind, 'present': present, 'uuid': nullif(gpu_uuid, ''), 'asleep': runtime_status = 'suspended',
                   'path': path, 'parent': parent, 'links': path_links, 'narrowest': narrowest,
                   'own': pcie_width, 'own_max': pcie_width_max, 'way': path_width, 'way_max': path_width_max}, ts) as v
    from pci
    where ts > as_of - interval 5 minute and ts <= as_of
    group by node, pci
),
card as (
    select node, entity, gpu_uuid, pci, coalesce(model, '') as model, installed
    from card_list(as_of) where gpu_uuid is not null
),
on_bus as (
    select d.node, d.pci, d.ts, d.v, coalesce(u.entity, a.entity, 'pci:' || d.pci) as entity,
           coalesce(u.gpu_uuid, a.gpu_uuid) as gpu_uuid, coalesce(u.model, a.model, '') as model
    from device d
    left join card u on u.node = d.node and u.gpu_uuid = d.v.uuid
    left join card a on a.node = d.node and a.pci = d.pci and a.installed and d.v.uuid is null and d.v.kind = 'gpu'
),
-- a card that moved may still have been at its old address five minutes ago
known as (
    select node, entity, max(ts) as ts, max_by(pci, ts) as pci, max_by(v, ts) as v, any_value(gpu_uuid) as gpu_uuid,
           any_value(model) as model
    from on_bus group by node, entity
),
wanted as (
    select coalesce(k.node, c.node) as node, coalesce(k.entity, c.entity) as entity, k.ts, k.v, coalesce(k.pci, c.pci) as pci,
           coalesce(k.gpu_uuid, c.gpu_uuid) as gpu_uuid, coalesce(k.model, c.model) as model
    from known k
    full join card c on c.node = k.node and c.entity = k.entity
),
driver as (
    select g.node, g.gpu_uuid, max(g.ts) as ts, max_by(g.pcie_width, g.ts) as width, max_by(g.pcie_width_max, g.ts) as width_max
    from gpu g
    semi join wanted w on w.node = g.node and w.gpu_uuid = g.gpu_uuid and w.v.own is null
    where g.ts > as_of - interval 30 second and g.ts <= as_of and g.pcie_width is not null
    group by g.node, g.gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) filter (probe = 'gpu') as by_driver,
           max_by(reason, since) filter (probe = 'pci') as by_bus
    from capability
    where metric = 'pcie_width' and probe in ('gpu', 'pci') and since <= as_of
    group by node, entity
),
joined as (
    select w.node, w.entity, w.pci, w.v, if(w.gpu_uuid is null, 0, l.lanes) as lanes, l.crit_share, p.interval_s,
           coalesce(y.by_driver, '') = 'not_supported' as no_link, coalesce(z.by_bus, '') = 'not_supported' as not_told,
           w.v.own is null and (w.v is null or not_told) and g.ts is not null as from_driver,
           if(from_driver, g.ts, w.ts)                                  as ts,
           if(from_driver, g.width, w.v.own)                            as own,
           -- an agent that tells of no path is an older one
           case when from_driver then g.width when w.v.links is null then coalesce(w.v.way, w.v.own) else w.v.way end as way,
           coalesce(w.v.way_max, w.v.own_max, g.width_max)              as possible,
           -- where the bus tells, the driver is not asked
           unread(h.metrics, [if(w.v.own is not null, 'pci.pcie_width', null), if(w.v.way is not null, 'pci.path_width', null),
                              if(from_driver or w.v.own is not null, 'gpu.pcie_width', null)]) as lost,
           -- what was never learned expects nothing: NULL
           if(o.value is null, null, least(o.value, w.v.own_max))       as own_expected,
           if(s.value is null, null, least(s.value, w.v.way_max))       as way_expected
    from wanted w
    join limits_pcie_width l on l.node = w.node and l.model = w.model
    left join driver g on g.node = w.node and g.gpu_uuid = w.gpu_uuid
    left join best_shown(as_of, 'pci', 'pcie_width_best') o on o.node = w.node and o.entity = 'pci:' || w.pci
    left join best_shown(as_of, 'pci', 'path_width_best') s on s.node = w.node and s.entity = 'pci:' || w.pci
    left join why_null y on y.node = w.node and y.entity = w.entity
    left join found_by(as_of) h on h.rule = 'pcie_width' and h.node = w.node and h.entity = w.entity
    left join why_null z on z.node = w.node and z.entity = 'pci:' || w.pci
    left join (select node, max(interval_s) as interval_s from probe where probe = 'pci' group by node) p on p.node = w.node
),
compared as (
    select *,
           case when lanes > 0 then way < lanes else coalesce(way < way_expected, false) end                   as way_narrow,
           lanes = 0 and coalesce(own < own_expected, false)                                                   as own_narrow
    from joined
),
judged as (
    select *,
           if(own_narrow and not way_narrow, own, way)::double                                                 as width,
           case when lanes > 0 then lanes when own_narrow and not way_narrow then own_expected
                else coalesce(way_expected, own_expected) end::double                                          as expected,
           case when no_link                                                             then 'not_supported'
                when ts is null and interval_s is null                                   then 'no_probe'
                when ts is null or ts < as_of - to_seconds(fresh_s(coalesce(interval_s, 60))) then 'no_samples'
                when way is null and v.asleep                                            then 'suspended'
                when way is null and v.present = false                                   then 'no_answer'
                when way is null                                                         then if(not_told, 'not_supported', 'unreadable')
                when way_narrow and v.narrowest <> pci                                   then 'narrow_uplink'
                when way_narrow or own_narrow                                            then 'narrow_link'
                when lanes = 0 and way_expected is null and own_expected is null         then 'not_learned'
                when len(lost) > 0                                                       then 'not_read'
                when way < possible                                                      then 'narrow_as_ever'
                else 'wide' end as code
    from compared
)
select node, entity,
       case when code in ('wide', 'narrow_as_ever') then 'ok'
            when code in ('narrow_link', 'narrow_uplink') then if(width <= crit_share * expected, 'crit', 'warn')
            when code in ('not_supported', 'no_probe', 'suspended', 'not_learned') then 'n/a'
            else 'unknown' end as verdict,
       code, width as observed, expected, 'lanes' as unit, ts as evidence_at,
       case code when 'wide' then format('{:.0f} lanes', width)
            when 'narrow_as_ever' then format('{:.0f} of {} possible lanes, as ever since the node was accepted', width, possible)
            when 'narrow_link' then format('{:.0f} of {:.0f} lanes between {} and the port above it{}', width, expected, pci,
                 coalesce(', ' || nullif(v.parent, ''), ''))
            when 'narrow_uplink' then format('{:.0f} of {:.0f} lanes at {}, a switch on the way to {}', width, expected,
                 v.narrowest, pci)
            when 'not_learned' then format('{:.0f} lanes; what to expect is not known yet', width)
            when 'not_supported' then 'no PCIe link that can be read'
            when 'no_probe' then 'the agent does not read the bus'
            when 'no_samples' then 'no samples'
            when 'suspended' then 'the device sleeps and is not woken'
            when 'no_answer' then 'the device reads all ones'
            when 'not_read' then unread_words(lost)
            else 'the width of the link cannot be read' end as reason,
       json_object('pci', pci, 'parent', v.parent, 'path', v.path, 'path_links', v.links, 'narrowest', v.narrowest,
                   'possible', possible, 'declared', nullif(lanes, 0), 'source', if(from_driver, 'driver', 'bus'),
                   'by', noted([if(own_narrow or way_narrow and from_driver, if(from_driver, 'gpu.pcie_width', 'pci.pcie_width'), null),
                                if(way_narrow and not from_driver, if(v.way is null, 'pci.pcie_width', 'pci.path_width'), null)], lost)) as detail
from judged;
