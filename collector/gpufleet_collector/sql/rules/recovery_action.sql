/*
title         = "Driver asks for a recovery"
scope         = "gpu"
every         = "30s"
for           = "1 of 1"
runbook       = "recovery_action"
*/

-- What the driver itself wants done with a card (nvidia-smi -q: GPU Recovery Action), in the newest sweep. A card that
-- must be reset or whose node must be rebooted takes no more work: crit. One that is to be drained first, and words
-- that a newer driver may bring: warn.
create or replace macro find_recovery_action(as_of) as table
with newest as (
    select node, gpu_uuid, max(ts) as ts, max_by({'state': state, 'action': recovery_action}, ts) as v
    from gpu_health
    where ts > as_of - interval 15 minute and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) as reason
    from capability
    where probe = 'gpu_health' and metric = 'recovery_action' and since <= as_of
    group by node, entity
),
judged as (
    select c.node, c.entity, n.ts, n.v.action as action, n.v.state as state,
           case when n.ts is null and p.interval_s is null                        then 'no_probe'
                when n.ts is null or n.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))) then 'no_samples'
                when n.v.state in ('lost', 'hung')                                then n.v.state
                when n.v.action is null and y.reason = 'not_supported'            then 'not_supported'
                when n.v.action is null                                           then 'unreadable'
                when n.v.action in ('none', 'gpu_reset', 'node_reboot', 'drain_p2p', 'drain_and_reset',
                                    'recover_imex', 'bus_reset', 'system_reboot') then n.v.action
                else 'other' end as code
    from card_list(as_of) c
    left join newest n on n.node = c.node and n.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) p
           on p.node = c.node
    left join why_null y on y.node = c.node and y.entity = c.entity
    where c.gpu_uuid is not null
)
select node, entity,
       case when code = 'none' then 'ok'
            when code in ('gpu_reset', 'node_reboot', 'bus_reset', 'system_reboot') then 'crit'
            when code in ('drain_p2p', 'drain_and_reset', 'recover_imex', 'other') then 'warn'
            when code in ('no_probe', 'not_supported') then 'n/a'
            else 'unknown' end as verdict,
       code, null::double as observed, null::double as expected, '' as unit, ts as evidence_at,
       case code when 'none' then 'the driver wants nothing done'
            when 'gpu_reset' then 'the driver wants the card reset'
            when 'node_reboot' then 'the driver wants the node rebooted'
            when 'bus_reset' then 'the driver wants the bus of the card reset'
            when 'system_reboot' then 'the driver wants the whole system rebooted'
            when 'drain_p2p' then 'the driver wants traffic between cards drained'
            when 'drain_and_reset' then 'the driver wants the card drained, then reset'
            when 'recover_imex' then 'the driver wants the IMEX domain recovered'
            when 'other' then format('the driver wants: {}', action)
            when 'no_probe' then 'the agent does not read the health of cards'
            when 'no_samples' then 'no samples'
            when 'not_supported' then 'this card or driver names no action'
            when 'unreadable' then 'the action cannot be read'
            else 'the card does not answer' end as reason,
       json_object('action', action, 'driver_state', state) as detail
from judged;
