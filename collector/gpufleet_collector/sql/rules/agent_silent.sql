/*
title         = "Agent silent"
scope         = "node"
every         = "5s"
weight        = 0.5
for           = "1 of 1"
covers        = "node"
absence       = true
runbook       = "agent_silent"

[limits]
warn_s        = { value = 90,  source = "a node silent for 90 s is unknown" }
crit_s        = { value = 600, source = "own choice: longer than a reboot" }
fleet_nodes   = { value = 5,    source = "own choice: fewer are hosts or their rack, not the collector" }
back_s        = { value = 120,  source = "own choice: agents that lost the collector are all back so soon after the first" }
fleet_share   = { value = 0.33, source = "a third of the fleet at once: look at the collector first" }
*/

-- An expected node is silent when nothing has arrived from it for warn_s on the collector's clock; the agent's clock
-- plays no part. When many fall silent within a minute of each other the collector or the network is suspected: one
-- row for all of them, and the nodes themselves are unknown.
create or replace macro find_agent_silent(as_of) as table
with recent as (select node, max(received_at) as received_at from ledger
                where received_at > as_of - interval 15 minute and received_at <= as_of group by node),
-- What the finding of a node that is silent already says.
noted as (
    select node, max(try_cast(json_extract_string(detail, '$.last_heard') as timestamp)) as heard_at
    from finding
    where rule = 'agent_silent' and state <> 'resolved' and last_evidence_at <= as_of
    group by node
),
contact as (
    select n.node, n.expectation, n.expected_since, n.hello_at, l.warn_s, l.crit_s, l.fleet_share, l.fleet_nodes, l.back_s,
           greatest(r.received_at, o.heard_at, if(n.hello_at <= as_of, n.hello_at, null)) as near_at,
           r.received_at is null and o.heard_at is null as far
    from node_list(as_of) n
    left join recent r on r.node = n.node
    left join noted o on o.node = n.node
    join limits_agent_silent l on l.node = n.node and l.model = ''
),
-- While the collector suspects itself: since when, and the last time that a node came back.
doubt as (select min(fired_at) as since from finding
          where rule = 'agent_silent' and node = '(collector)' and state in ('firing', 'recovering')),
coming as (
    select max(first_at) as at_last
    from (select min(l.received_at) as first_at from ledger l, doubt d
          where l.received_at > d.since and l.received_at > as_of - interval 15 minute and l.received_at <= as_of
          group by l.node)
),
-- Only nodes that neither say anything nor are known to be silent need the long and dear look back.
far as (
    select node, max(received_at) as received_at
    from ledger
    where node in (select node from contact where far and expectation <> 'none' and hello_at is not null)
      and received_at > as_of - interval 1 day and received_at <= as_of
    group by node
),
heard as (
    select c.*, greatest(c.near_at, f.received_at) as heard_at,
           epoch(as_of - coalesce(greatest(c.near_at, f.received_at), c.expected_since)) as silent_s
    from contact c left join far f on f.node = c.node
),
judged as (
    select *,
           coalesce(heard_at, expected_since) + to_seconds(if(silent_s > crit_s, crit_s, warn_s)) as since,
           expectation <> 'none' and silent_s > warn_s and heard_at is not null as silent
    from heard
),
together as (
    select *,
           if(silent, count(*) filter (silent) over (order by heard_at range between interval 60 second preceding
                                                     and interval 60 second following), 0) as same,
           count(*) filter (expectation <> 'none' and heard_at is not null) over () as fleet
    from judged
),
-- Suspected once, those that fell silent with the rest are so until nobody has come back for a while.
suspected as (
    select t.*, silent and (same >= fleet_nodes and same >= fleet_share * fleet
                            or coalesce(heard_at <= d.since and r.at_last > as_of - to_seconds(back_s::bigint), false)) as held
    from together t cross join doubt d cross join coming r
)
select node, 'node:' as entity,
       case when expectation = 'none' then 'n/a' when held then 'unknown'
            when silent_s > crit_s then 'crit' when silent_s > warn_s then 'warn' else 'ok' end as verdict,
       case when expectation = 'none' then 'no_expectation' when held then 'with_many'
            when silent_s <= warn_s then 'heard' when heard_at is null then 'never_seen' else 'silent' end as code,
       silent_s as observed, warn_s as expected, 's' as unit,
       if(silent_s > warn_s, since, heard_at) as evidence_at,
       case when heard_at is null then format('expected, but never heard since {}', strftime(expected_since, '%Y-%m-%d %H:%M:%S'))
            when silent_s > warn_s then format('nothing received for {:.0f} s, last at {}', silent_s, strftime(heard_at, '%Y-%m-%d %H:%M:%S'))
            else format('last heard {:.0f} s ago', silent_s) end as reason,
       json_object('last_heard', heard_at, 'expected_since', expected_since, 'hello_at', hello_at) as detail
from suspected
union all
select '(collector)', 'agent:', if(count(*) filter (held) > 0, 'crit', 'ok'),
       if(count(*) filter (held) > 0, 'many_silent', 'heard'), count(*) filter (held), any_value(fleet), 'count',
       if(count(*) filter (held) > 0, max(since) filter (held), max(heard_at)),
       format('{} of {} nodes fell silent at once: suspect the collector or its network first', count(*) filter (held), any_value(fleet)),
       json_object('nodes', (list(node order by node) filter (held))[:50])
from suspected
having any_value(fleet) > 0;
