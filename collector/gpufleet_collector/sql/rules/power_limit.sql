/*
title         = "Power limit below that of its peers"
scope         = "gpu"
every         = "30s"
for           = "3 of 3"
clear_after   = "1m"
max_severity  = "warn"
runbook       = "power_limit"

[limits]
limit_w       = { value = 0,    source = "0 = not declared: what most cards of the model have" }
below_share   = { value = 0.02, source = "own choice: less is rounding" }
peers         = { value = 5,    source = "own choice: fewer cards are no custom" }
majority      = { value = 0.8,  source = "own choice" }
*/

-- The enforced power limit of the newest sample. What people set for most cards of a model is how it should be, whatever
-- the default; where there is no such custom a lower limit is what somebody wanted. A limit that the board holds below
-- what was asked for is nobody's wish, unless its peers do the same.
create or replace macro find_power_limit(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, coalesce(c.model, '') as model, l.* exclude (node, model)
    from card_list(as_of) c
    join limits_power_limit l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
newest as (
    select node, gpu_uuid, max(ts) as ts, max_by(state, ts) as state, max_by(power_limit_w, ts) as enforced_w
    from gpu where ts > as_of - interval 2 minute and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
given as (
    select node, gpu_uuid, max_by(power_limit_default_w, ts) as default_w, max_by(power_limit_requested_w, ts) as asked_w
    from gpu_health
    where ts > as_of - interval 5 minute and ts <= as_of and gpu_uuid is not null and state = 'ok'
    group by node, gpu_uuid
),
voted as (
    select c.model, round(n.enforced_w) as watts, count(*) as votes
    from card c join newest n using (node, gpu_uuid)
    where n.enforced_w > 0
    group by c.model, watts
),
custom as (
    select model, max_by(watts, votes) as watts, max(votes) as votes, sum(votes) as cards from voted group by model
),
crowd as (select model, count(*) as known from card group by model),
joined as (
    select c.*, n.ts, n.state, n.enforced_w, g.default_w, g.asked_w, u.cards, y.reason as why_null,
           -- peers that are silent are no peers that are gone
           unread(h.metrics, [if(g.asked_w is not null, 'gpu_health.power_limit_requested_w', null),
                              if(u.cards >= c.peers or w.known < c.peers, 'gpu.power_limit_w of its peers', null)]) as lost,
           if(u.cards >= c.peers and u.votes >= c.majority * u.cards, u.watts, null) as custom_w
    from card c
    left join newest n using (node, gpu_uuid)
    left join given g using (node, gpu_uuid)
    left join custom u on u.model = c.model
    left join crowd w on w.model = c.model
    left join found_by(as_of) h on h.rule = 'power_limit' and h.node = c.node and h.entity = c.entity
    left join (select node, entity, max_by(reason, since) as reason from capability
               where probe = 'gpu' and metric = 'power_limit_w' and since <= as_of group by node, entity) y
           on y.node = c.node and y.entity = c.entity
),
judged as (
    select *, coalesce(if(limit_w > 0, limit_w, null), custom_w, default_w) as want_w,
           case when ts is null                                              then 'no_samples'
                when state in ('lost', 'hung')                               then state
                when enforced_w is null and why_null = 'not_supported'       then 'not_supported'
                when enforced_w is null                                      then 'unreadable'
                when limit_w > 0 and enforced_w < limit_w * (1 - below_share) then 'below_declared'
                when limit_w > 0                                             then 'as_expected'
                when enforced_w >= custom_w * (1 - below_share)              then 'as_expected'
                when enforced_w < asked_w * (1 - below_share)                then 'held_lower'
                when custom_w is not null                                    then 'below_peers'
                when len(lost) > 0                                           then 'not_read'
                when default_w is null                                       then 'no_expectation'
                when enforced_w >= default_w * (1 - below_share)             then 'as_expected'
                else 'no_custom' end as code
    from joined
)
select node, entity,
       case when code = 'as_expected' then 'ok' when code in ('below_declared', 'held_lower', 'below_peers') then 'warn'
            when code in ('not_supported', 'no_expectation', 'no_custom') then 'n/a' else 'unknown' end as verdict,
       code, enforced_w as observed, if(code = 'held_lower', asked_w, want_w) as expected, 'W' as unit, ts as evidence_at,
       case code when 'as_expected' then format('{:.0f} W', enforced_w)
            when 'below_declared' then format('{:.0f} W where {:.0f} W are declared', enforced_w, limit_w)
            when 'held_lower' then format('held at {:.0f} W though {:.0f} W are set', enforced_w, asked_w)
            when 'below_peers' then format('{:.0f} W where most cards of its model have {:.0f} W', enforced_w, custom_w)
            when 'no_custom' then format('{:.0f} W, below the default of {:.0f} W, and no limit that most of {} cards share',
                                         enforced_w, default_w, cards)
            when 'no_expectation' then 'no peers, and the card does not tell its default'
            when 'not_read' then unread_words(lost)
            when 'not_supported' then 'this card has no power limit' when 'unreadable' then 'the power limit cannot be read'
            when 'no_samples' then 'no samples' else 'the card does not answer' end as reason,
       json_object('enforced_w', enforced_w, 'asked_w', asked_w, 'default_w', default_w, 'peers_w', custom_w, 'cards', cards,
                   'by', noted([case code when 'held_lower' then 'gpu_health.power_limit_requested_w'
                                          when 'below_peers' then 'gpu.power_limit_w of its peers' end], lost)) as detail
from judged;
