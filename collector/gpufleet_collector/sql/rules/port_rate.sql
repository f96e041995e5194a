/*
title         = "Network port slower than it was"
scope         = "port"
every         = "20s"
weight        = 0.5
for           = "3 of 3"
clear_after   = "1m"
boot_grace    = "5m"
runbook       = "port_rate"

[limits]
rate_gbps     = { value = 0,   source = "what every InfiniBand port must have; 0 = not declared, the best it had is expected" }
crit_share    = { value = 0.5, source = "own choice: at half its rate a port halves what its cards exchange" }
*/

-- Ports that are active with less than the best they had since the inventory was accepted, or than was declared: lanes
-- that did not come up, or an older signalling. The rate of a port that is not active means nothing.
create or replace macro find_port_rate(as_of) as table
with newest as (
    select node, 'port:' || device || '/' || port as entity, max(ts) as ts,
           max_by({'state': state, 'rate': rate_gbps, 'lanes': lanes, 'signalling': signalling, 'layer': link_layer,
                   'rdma': guid is not null}, ts) as v
    from port
    where ts > as_of - interval 2 minute and ts <= as_of
    group by node, device, port
),
judged as (
    select p.node, p.entity, n.ts, n.v, l.crit_share,
           greatest(p.best_gbps, if(coalesce(n.v.layer, p.link_layer) = 'InfiniBand' and l.rate_gbps > 0, l.rate_gbps, null)) as best,
           if(n.v.lanes is not null, format('{}X {}', n.v.lanes, coalesce(n.v.signalling, '')).trim(), null) as width,
           case when i.interval_s is null                                                   then 'no_probe'
                when n.ts is null or n.ts < as_of - to_seconds(fresh_s(i.interval_s))       then 'no_samples'
                when n.v.state is null                                                      then 'unreadable'
                when n.v.state <> 'ACTIVE'                                                  then 'not_active'
                when best is null                                                           then 'not_expected'
                when n.v.rate is null                                                       then 'unreadable'
                when n.v.rate < 0.99 * best                                                 then 'slow'
                else 'full' end as code
    from port_list(as_of) p
    left join port_model(as_of) m on m.node = p.node
    join limits_port_rate l on l.node = p.node and l.model = coalesce(m.model, '')
    left join newest n on n.node = p.node and n.entity = p.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'port' group by node) i on i.node = p.node
)
select node, entity,
       case when code = 'full' then 'ok' when code in ('no_probe', 'not_active', 'not_expected') then 'n/a'
            when code in ('no_samples', 'unreadable') then 'unknown'
            when v.rdma and v.rate <= crit_share * best then 'crit' else 'warn' end as verdict,
       code, v.rate as observed, best as expected, 'Gb/s' as unit, ts as evidence_at,
       case code when 'full' then format('{:g} Gb/s', v.rate)
            when 'slow' then format('{:g}{} instead of {:g} Gb/s', v.rate, coalesce(' Gb/s (' || width || ')', ''), best)
            when 'not_active' then 'the port is not active'
            when 'not_expected' then 'its rate was never seen or declared'
            when 'no_probe' then 'the agent does not read network ports'
            when 'unreadable' then 'the rate cannot be read'
            else 'no samples' end as reason,
       json_object('rate_gbps', v.rate, 'best_gbps', best, 'lanes', v.lanes, 'signalling', v.signalling) as detail
from judged;
