/*
title         = "Network port down or gone"
scope         = "port"
every         = "10s"
weight        = 0.5
for           = "3 of 3"
clear_after   = "1m"
boot_grace    = "5m"
runbook       = "port_down"

[limits]
ports         = { value = 0, source = "InfiniBand ports that a node must have; 0 = not declared, those that were active are expected" }
must_stay     = { value = 1, source = "own choice; 0 where containers are given whole devices, so that ports come and go with them" }
*/

-- Ports that should be active and are not, by the newest sweep. What should be active is what was since the node's
-- inventory was accepted, and as many InfiniBand ports as were declared; a port that never was is nobody's fault. The state
-- of an interface plays no part for InfiniBand, and of an Ethernet port the physical state does not: its driver says
-- Disabled when a cable is out, too.
create or replace macro find_port_down(as_of) as table
with run as (
    select a.node, a.ts, a.ok, a.rows
    from agent a
    where a.ts > as_of - interval 5 minute and a.ts <= as_of and a.probe = 'port'
),
arrived as (
    select node, ts, count(*) as n from port where ts > as_of - interval 5 minute and ts <= as_of group by node, ts
),
sweep as (
    select r.node, max(r.ts) as ts
    from run r left join arrived a on a.node = r.node and a.ts = r.ts
    where r.ok and coalesce(a.n, 0) >= coalesce(r.rows, 0)
    group by r.node
),
here as (
    select p.node, p.device, p.port::varchar as port, p.guid, p.pci,
           {'ts': p.ts, 'state': p.state, 'phys': p.phys_state, 'layer': p.link_layer, 'up': p.interface_up,
            'name': p.device, 'netdev': p.netdev, 'guid': p.guid, 'pci': p.pci} as v
    from port p
    join sweep s on s.node = p.node and s.ts = p.ts
    where p.ts > as_of - interval 5 minute and p.ts <= as_of
),
node as (
    select n.node, s.ts, l.ports, l.must_stay, i.interval_s,
           case when i.interval_s is null then 'no_probe'
                when s.ts is null or s.ts < as_of - to_seconds(fresh_s(i.interval_s)) then
                    if(exists (from run r where r.node = n.node and not r.ok
                               and r.ts >= as_of - to_seconds(fresh_s(i.interval_s))), 'unreadable', 'no_samples')
                end as blind
    from (select distinct node from node_list(as_of)) n
    left join port_model(as_of) m on m.node = n.node
    join limits_port_down l on l.node = n.node and l.model = coalesce(m.model, '')
    left join sweep s on s.node = n.node
    left join (select node, max(interval_s) as interval_s from probe where probe = 'port' group by node) i on i.node = n.node
),
found as (
    select p.*, n.ts, n.blind, n.must_stay, coalesce(g.v, b.v, d.v) as v
    from port_list(as_of) p
    join node n on n.node = p.node
    left join (select node, guid, port, any_value(v) as v from here where guid is not null group by all) g
           on g.node = p.node and g.guid = p.guid and g.port = p.port
    left join (select node, pci, port, any_value(v) as v from here where pci is not null group by all) b
           on b.node = p.node and b.pci = p.pci and b.port = p.port
    left join (select node, device, port, any_value(v) as v from here where guid is null and pci is null group by all) d
           on d.node = p.node and 'port:' || d.device || '/' || d.port = p.entity
),
judged as (
    select *,
           concat_ws(', ', coalesce(v.netdev, netdev), coalesce(v.pci, pci), coalesce(v.guid, guid)) as who,
           case when v is null then 'not listed'
                when v.state = 'DOWN' and v.layer = 'Ethernet' then if(v.up is false, 'link down (disabled)', 'link down (no carrier)')
                when v.state = 'DOWN' then format('link down ({})', lower(coalesce(v.phys, 'unknown')))
                else format('link {}', lower(coalesce(v.state, 'state unreadable'))) end as how,
           case when blind is not null                              then blind
                when v.state = 'ACTIVE'                             then 'active'
                when not in_use                                     then 'not_expected'
                when v is null and must_stay = 0                    then 'away'
                when v is null                                      then 'gone'
                when v.state is null                                then 'unreadable'
                when v.state = 'INIT'                               then 'init'
                when v.state = 'ARMED'                              then 'armed'
                when if(v.layer = 'Ethernet' and v.up is not null, not v.up, coalesce(v.phys = 'Disabled', false)) then 'disabled'
                else 'down' end as code
    from found
)
select node, entity,
       case when code = 'active' then 'ok' when code in ('no_probe', 'not_expected', 'away') then 'n/a'
            when code in ('no_samples', 'unreadable') then 'unknown'
            -- a card without RDMA carries no job's traffic between nodes
            when code = 'disabled' or coalesce(v.layer, link_layer) = 'Ethernet' and coalesce(v.guid, guid) is null then 'warn'
            else 'crit' end as verdict,
       code, null::double as observed, null::double as expected, null::varchar as unit, coalesce(v.ts, ts) as evidence_at,
       case code when 'active' then 'active'
            when 'down' then format('{}: {}', how, who)
            when 'disabled' then format('{}: switched off by its administrator: {}', how, who)
            when 'init' then format('link up, but no subnet manager has set it up (INIT): {}', who)
            when 'armed' then format('link up, but the subnet manager has not made it active (ARMED): {}', who)
            when 'gone' then format('no longer listed: {}', who)
            when 'away' then format('not listed, as it may be here: {}', who)
            when 'not_expected' then format('{}; it was not active since the inventory was accepted', how)
            when 'no_probe' then 'the agent does not read network ports'
            when 'unreadable' then 'the port cannot be read'
            else 'no samples' end as reason,
       json_object('device', v.name, 'netdev', coalesce(v.netdev, netdev), 'guid', coalesce(v.guid, guid),
                   'pci', coalesce(v.pci, pci), 'link_layer', coalesce(v.layer, link_layer), 'state', v.state,
                   'phys_state', v.phys, 'best_gbps', best_gbps) as detail
from judged
union all
-- Declared ports that nobody ever saw active. Those that were are judged one by one above.
select n.node, 'node:',
       case when n.blind = 'no_probe' or n.blind is null and c.there < n.ports then 'crit'
            when n.blind is not null then 'unknown' else 'ok' end,
       case when n.blind = 'no_probe' or n.blind is null and c.there < n.ports then 'too_few'
            else coalesce(n.blind, 'enough') end,
       c.there, n.ports, 'count', coalesce(n.ts, as_of),
       case when n.blind = 'no_probe' then 'InfiniBand ports are declared, but the agent does not read network ports'
            when n.blind is not null then 'no samples'
            else format('{} of {:.0f} declared InfiniBand ports are in use', c.there, n.ports) end,
       json_object('declared', n.ports, 'there', c.there)
from node n
left join (select node, count(*) filter (in_use or v.state = 'ACTIVE') as there
           from found where coalesce(v.layer, link_layer) = 'InfiniBand' group by node) t on t.node = n.node
cross join lateral (select coalesce(t.there, 0) as there) c
where n.ports > 0;
