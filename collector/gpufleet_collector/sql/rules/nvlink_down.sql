/*
title         = "NVLinks down"
scope         = "gpu"
every         = "15s"
weight        = 2
for           = "3 of 5"
min_duration  = "60s"
boot_grace    = "10m"
clear_after   = "5m"
runbook       = "nvlink_down"

[limits]
links         = { value = 0,   source = "0 = not declared: the most links that the card has shown since its node was accepted" }
training_s    = { value = 300, source = "own choice: links train for minutes after the driver was started" }
*/

-- Fewer links up than the card should have: as declared in limits, else the most it has shown since the expectation of its
-- node was set. Which links lead somewhere is the builder's choice: a card without a bridge has none, a bridged one some,
-- so a number from a data sheet proves nothing, and without an expectation the links are shown and not judged. MIG switches
-- links off. A sweep in which not every link could be read says nothing.
create or replace macro find_nvlink_down(as_of) as table
with recent as (
    select node, gpu_uuid, ts, boot_id, driver_epoch, state, links, links_active, links_up
    from nvlink
    where ts > as_of - interval 5 minute and ts <= as_of and link is null and gpu_uuid is not null
),
newest as (
    select node, gpu_uuid, max(ts) as ts,
           max_by({'state': state, 'links': links, 'active': links_active, 'up': links_up, 'boot_id': boot_id,
                   'epoch': driver_epoch}, ts) as v
    from recent group by node, gpu_uuid
),
-- Since when the driver runs that answers now, where it was another one before.
started as (
    select r.node, r.gpu_uuid, max(r.ts) as before, any_value(n.ts) as ts
    from recent r
    join newest n on n.node = r.node and n.gpu_uuid = r.gpu_uuid
    where r.boot_id is distinct from n.v.boot_id or r.driver_epoch is distinct from n.v.epoch
    group by r.node, r.gpu_uuid
),
split as (
    select node, gpu_uuid, max_by(mig_enabled, ts) as mig
    from gpu_health
    -- long: whether a card is split hardly changes, and links that are off on purpose must not page when that is not read
    where ts > as_of - interval 15 minute and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) as reason
    from capability
    where probe = 'nvlink' and metric = 'links_active' and since <= as_of
    group by node, entity
),
joined as (
    select c.node, c.entity, c.gpu_uuid, p.interval_s, n.ts, n.v, s.before, m.mig, y.reason,
           l.training_s, if(l.links > 0, 'declared', 'shown') as basis,
           case when l.links > 0 then l.links when c.expectation <> 'none' then b.value end as expected
    from card_list(as_of) c
    join limits_nvlink_down l on l.node = c.node and l.model = coalesce(c.model, '')
    left join best_shown(as_of, 'gpu', 'nvlinks_active') b on b.node = c.node and b.entity = c.entity
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join started s on s.node = c.node and s.gpu_uuid = c.gpu_uuid
    left join split m on m.node = c.node and m.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'nvlink' group by node) p
           on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    where c.gpu_uuid is not null
),
judged as (
    select *,
           case when ts is null and interval_s is null                            then 'no_probe'
                when ts is null or ts < as_of - to_seconds(fresh_s(coalesce(interval_s, 30))) then 'no_samples'
                when v.state in ('lost', 'hung')                                  then v.state
                when mig                                                          then 'mig'
                when v.active is null and reason = 'not_supported' and coalesce(expected, 0) = 0 then 'no_links'
                when v.active is null                                             then 'unreadable'
                when coalesce(expected, 0) = 0                                    then 'not_judged'
                when v.active >= expected                                         then 'up'
                when epoch(ts - before) < training_s                              then 'training'
                when v.active = 0                                                 then 'all_down'
                else 'some_down' end as code
    from joined
)
select node, entity,
       case when code = 'up' then 'ok' when code in ('all_down', 'some_down') then 'crit'
            when code in ('no_probe', 'mig', 'no_links', 'not_judged', 'training') then 'n/a' else 'unknown' end as verdict,
       code, v.active::double as observed, nullif(expected, 0)::double as expected, 'count' as unit, ts as evidence_at,
       case code when 'up' then format('{} links up', v.active)
            when 'all_down' then format('no link is up, {:.0f} should be', expected)
            when 'some_down' then format('{} links are up, {:.0f} should be', v.active, expected)
            when 'training' then format('{} of {:.0f} links are up; the driver has just been started', v.active, expected)
            when 'not_judged' then format('{} of {} links are up; nothing says how many should be', v.active, v.links)
            when 'mig' then 'the card is split by MIG, which switches its links off'
            when 'no_links' then 'this card has no NVLink, or does not say so'
            when 'no_probe' then 'the agent does not read NVLinks'
            when 'no_samples' then 'no samples'
            when 'unreadable' then 'not every link can be read'
            else 'the card does not answer' end as reason,
       json_object('gpu_uuid', gpu_uuid, 'links', v.links, 'basis', if(expected > 0, basis, null), 'links_up', v.up,
                   'inactive', if(code = 'some_down', list_filter(range(least(v.links, 64)::bigint), lambda i: (v.up::bigint >> i) & 1 = 0), null),
                   'driver_state', v.state) as detail
from judged;
