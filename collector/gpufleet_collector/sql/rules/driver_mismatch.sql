/*
title         = "Driver and library of two versions"
scope         = "node"
every         = "5s"
weight        = 0.5
for           = "2 of 2"
covers        = "driver"
runbook       = "driver_mismatch"
*/

-- The loaded kernel module and the library on disk must be of one version. After an upgrade without a reload what
-- runs keeps its old library and works, and whatever starts now fails: warn. Once the agent itself starts anew, or no
-- card answers any more, the node computes nothing: crit. One row per node, since nothing is wrong with the cards.
create or replace macro find_driver_mismatch(as_of) as table
with every as (
    select node, max(interval_s) filter (probe = 'gpu') as gpu_s, max(interval_s) filter (probe = 'gpu_health') as health_s
    from probe group by node
),
run as (
    select a.node, max(a.ts) as ts, max_by(a.ok, a.ts) as ok, max_by(coalesce(a.error, ''), a.ts) as error
    from agent a left join every e on e.node = a.node
    where a.ts > as_of - interval 5 minute and a.ts <= as_of and a.probe = 'gpu'
      and a.ts >= as_of - to_seconds(fresh_s(coalesce(e.gpu_s, 5)))
    group by a.node
),
answering as (
    select g.node, count(*) as listed, count(*) filter (g.state = 'ok') as n
    from gpu g join run r on r.node = g.node and r.ts = g.ts
    where g.ts > as_of - interval 2 minute and g.ts <= as_of
    group by g.node
),
told as (
    select h.node, max(h.ts) as seen_at,
           max(h.ts) filter (h.driver_version <> '' and h.library_version <> '')      as ts,
           max_by(h.driver_version, h.ts) filter (h.driver_version <> '' and h.library_version <> '')  as driver,
           max_by(h.library_version, h.ts) filter (h.driver_version <> '' and h.library_version <> '') as library
    from gpu_health h left join every e on e.node = h.node
    where h.ts > as_of - interval 15 minute and h.ts <= as_of
      and h.ts >= as_of - to_seconds(fresh_s(coalesce(e.health_s, 60)))
    group by h.node
),
-- While the driver refuses to be read, what the host's inventory says.
written as (
    select node, max_by(json_extract_string(attributes, '$.driver_version'), valid_from)  as driver,
           max_by(json_extract_string(attributes, '$.library_version'), valid_from) as library
    from inventory where kind = 'node' and valid_from <= as_of and (valid_to is null or valid_to > as_of)
    group by node
),
why_null as (
    select node, bool_and(reason = 'not_supported') as not_supported
    from (select node, entity, max_by(reason, since) as reason from capability
          where probe = 'gpu_health' and metric = 'library_version' and since <= as_of group by node, entity)
    group by node
),
joined as (
    select n.node, n.expected_gpus, r.ts as driver_ts, r.ok, r.error, t.ts, t.seen_at, e.health_s,
           coalesce(t.driver, w.driver) as driver, coalesce(t.library, w.library) as library,
           coalesce(a.listed, 0) as listed, coalesce(a.n, 0) as answering, coalesce(y.not_supported, false) as not_supported
    from node_list(as_of) n
    left join run r on r.node = n.node
    left join answering a on a.node = n.node
    left join told t on t.node = n.node
    left join written w on w.node = n.node
    left join every e on e.node = n.node
    left join why_null y on y.node = n.node
),
judged as (
    select *,
           case when driver_ts is null and ts is null                                     then 'agent_silent'
                when not ok and error = 'driver_mismatch'                                 then 'no_card_answers'
                when ts is not null and driver <> library and ok and listed > 0 and answering = 0 then 'no_card_answers'
                when ts is not null and driver <> library                                 then 'versions_differ'
                when ts is not null                                                       then 'one_version'
                when coalesce(expected_gpus, 0) = 0 and listed = 0                        then 'no_cards'
                when seen_at is null and health_s is null                                 then 'no_probe'
                when not_supported                                                        then 'not_supported'
                else 'unreadable' end as code
    from joined
)
select node, 'node:' as entity,
       case code when 'no_card_answers' then 'crit' when 'versions_differ' then 'warn' when 'one_version' then 'ok'
            when 'agent_silent' then 'unknown' when 'unreadable' then 'unknown' else 'n/a' end as verdict,
       code,
       if(code in ('no_card_answers', 'versions_differ'), answering, null)::double         as observed,
       expected_gpus::double                                                               as expected,
       'count'                                                                             as unit,
       if(code = 'no_card_answers', driver_ts, coalesce(ts, driver_ts))                    as evidence_at,
       case code when 'agent_silent' then 'the agent is silent'
            when 'no_card_answers' then format('kernel module {}, library {}: no card answers', coalesce(driver, 'unknown'),
                                               coalesce(library, 'unknown'))
            when 'versions_differ' then format('kernel module {}, library {}: {} cards still answer, what starts now will fail',
                                               driver, library, answering)
            when 'one_version' then format('kernel module and library are {}', driver)
            when 'no_cards' then 'no cards'
            when 'no_probe' then 'the agent does not read the versions'
            when 'not_supported' then 'this driver has no library of its own'
            else 'the versions cannot be read' end                                         as reason,
       json_object('driver_version', driver, 'library_version', library, 'cards_answering', answering,
                   'driver_error', error)                                                  as detail
from judged;
