/*
title         = "Network port flapping"
scope         = "port"
every         = "20s"
for           = "3 of 90"
for_code      = { flapping = "1 of 1" }
clear_after   = "30m"
boot_grace    = "5m"
runbook       = "port_flapping"

[limits]
window_s      = { value = 120, source = "one verdict per two minutes: 90 of them are the three hours in which Azure counts three downs as a fault" }
settle_s      = { value = 15,  source = "what a sample may need to arrive" }
flaps         = { value = 3,   source = "own choice: three times within four minutes is flapping now" }
*/

-- How often the link went down, by the counter that the port or its interface keeps: a flap between two samples counts,
-- too. One that goes down and stays down counts once; that it is down is said by port_down. Each whole window is one piece
-- of evidence, so that hours are judged by reading minutes.
create or replace macro find_port_flapping(as_of) as table
with port_ as (
    select p.*, l.flaps, l.window_s, floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from port_list(as_of) p
    left join port_model(as_of) m on m.node = p.node
    join limits_port_flapping l on l.node = p.node and l.model = coalesce(m.model, '')
),
boot as (
    select node, max_by(boot_id, ts) as boot_id
    from port where ts > as_of - interval 295 second and ts <= as_of group by node
),
-- one row per value that the counter had, with the time it was seen first and last
step as (
    select s.node, s.device, s.port,
           case when s.link_layer = 'Ethernet' then s.carrier_changes_total // 2 else s.link_downed_total end as downs,
           min(s.ts) as first_ts, max(s.ts) as last_ts,
           max(s.ts) filter (s.state = 'ACTIVE') as active_at, max(s.ts) filter (s.state <> 'ACTIVE') as other_at
    from port s
    join boot b on b.node = s.node and b.boot_id = s.boot_id
    where s.ts > as_of - interval 295 second and s.ts <= as_of
    group by all
),
span as (
    select p.node, p.entity, any_value(p.flaps) as flaps, bool_or(p.in_use) as in_use,
           max(last_ts) filter (epoch(last_ts) < until_s or epoch(first_ts) < until_s) as seen_at, max(last_ts) as newest_at,
           min_by(downs, first_ts) as first_value, max_by(downs, last_ts) as last_value, min(downs) as lowest,
           max(downs) as highest,
           coalesce(max_by(downs, first_ts) filter (epoch(first_ts) < until_s - window_s), min_by(downs, first_ts)) as before,
           max_by(downs, first_ts) filter (epoch(first_ts) < until_s)  as at_end,
           max_by(first_ts, first_ts) filter (epoch(first_ts) < until_s and downs is not null) as grew_in_window,
           max(first_ts) filter (downs is not null)                    as grew_at,
           max(active_at) as active_at, max(other_at) as other_at, any_value(until_s) as until_s
    from port_ p
    left join step s on s.node = p.node and 'port:' || s.device || '/' || s.port = p.entity
    group by p.node, p.entity
),
counted as (
    select *,
           case when highest is null then (active_at is not null and other_at is not null)::bigint
                when lowest = first_value and highest = last_value then at_end::bigint - before::bigint else 0 end as downs,
           case when highest is null then 0
                when lowest = first_value and highest = last_value then last_value::bigint - before::bigint else 0 end as span_downs
    from span
),
judged as (
    select c.*,
           case when i.interval_s is null                                                  then 'no_probe'
                when not in_use                                                             then 'not_expected'
                when newest_at is null or newest_at < as_of - to_seconds(fresh_s(i.interval_s)) then 'no_samples'
                when span_downs >= flaps                                                    then 'flapping'
                when downs >= 1                                                             then 'went_down'
                when seen_at is null                                                        then 'no_samples'
                else 'steady' end as code
    from counted c
    left join (select node, max(interval_s) as interval_s from probe where probe = 'port' group by node) i on i.node = c.node
)
select node, entity,
       case code when 'steady' then 'ok' when 'went_down' then 'warn' when 'flapping' then 'crit' when 'no_samples' then 'unknown'
            else 'n/a' end as verdict,
       code, if(code = 'flapping', span_downs, downs)::double as observed, flaps as expected, 'count' as unit,
       case code when 'flapping' then grew_at when 'went_down' then if(highest is null, other_at, grew_in_window)
            else least(seen_at, make_timestamp((until_s * 1000000)::bigint)) end as evidence_at,
       case code when 'steady' then 'the link stayed up'
            when 'went_down' then format('the link went down {}', if(downs = 1, 'once', downs || ' times'))
            when 'flapping' then format('the link went down {} times within minutes', span_downs)
            when 'no_samples' then 'no samples'
            when 'no_probe' then 'the agent does not read network ports'
            else 'it was not active since the inventory was accepted' end as reason,
       json_object('downs', downs, 'downs_span', span_downs, 'downs_total', last_value) as detail
from judged;
