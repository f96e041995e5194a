-- What people said that holds at as_of. No state depends on it.

-- Flags of a card or node that people set; they stand beside its state.
create or replace macro people_flags(in_maintenance, silenced) as
    list_concat(if(in_maintenance, ['maintenance'], []::varchar[]), if(silenced, ['silenced'], []::varchar[]));

-- The acknowledgement of each incident that has one.
create or replace macro acks_at(as_of) as table
    select number, a.acted_at, a.actor, a.claimed, a.text, a.until
    from (
        select number, max_by({'acted_at': acted_at, 'what': what, 'actor': actor, 'claimed': claimed, 'text': text, 'until': until}, id) as a
        from incident_act
        where acted_at <= as_of and what in ('acknowledged', 'unacknowledged', 'closed')
        group by number
    )
    where a.what = 'acknowledged' and coalesce(a.until > as_of, true);

-- Silences in force.
create or replace macro silences_at(as_of) as table
    select * from silence where from_at <= as_of and least(until, coalesce(ended_at, until)) > as_of;

-- Which finding is silenced by which silence. A card's serial is what its agent or a delivery list says, so that a silence
-- follows the card to another slot or host.
create or replace macro silenced_at(as_of) as table
with serial as (select id, lower(trim(unnest(serials))) as serial from silences_at(as_of)),
card as (
    select distinct c.node, c.entity, s.id
    from (select node, entity, serial from inventory where kind = 'gpu'
          union all
          select node, 'gpu:' || coalesce(nullif(uuid, ''), 'serial/' || serial), serial from expected) c
    join serial s on s.serial = lower(trim(c.serial))
)
select f.id as finding, f.incident, f.node, f.entity, s.id as silence
from findings_at(as_of) f
join silences_at(as_of) s
  on (len(s.nodes) = 0 or list_contains(s.nodes, f.node))
 and (len(s.rules) = 0 or list_contains(s.rules, f.rule))
 and (len(s.entities) = 0 or list_contains(s.entities, f.entity))
left join card c on c.id = s.id and c.node = f.node and c.entity = f.entity
where len(s.serials) = 0 or c.id is not null;

-- Nodes in maintenance: a row per window and node.
create or replace macro maintenance_at(as_of) as table
    select id, unnest(nodes) as node, reason, actor, from_at, least(until, coalesce(ended_at, until)) as until
    from maintenance where from_at <= as_of and least(until, coalesce(ended_at, until)) > as_of;

-- Open incidents that people know of, and why: acknowledged; each finding is silenced, or began in a window that still
-- runs on its node. An incident that is not here is news.
create or replace macro known_at(as_of) as table
with mark as (
    select distinct f.incident, f.id, s.finding is not null as silenced, m.node is not null as maintenance
    from findings_at(as_of) f
    left join (select distinct finding from silenced_at(as_of)) s on s.finding = f.id
    left join maintenance_at(as_of) m on m.node = f.node and f.began_at >= m.from_at
    where f.incident is not null
),
quiet as (
    select incident, bool_or(silenced) as silenced, bool_or(maintenance) as maintenance
    from mark
    group by incident
    having bool_and(silenced or maintenance)
)
select i.number, a.number is not null as acknowledged, coalesce(q.silenced, false) as silenced,
       coalesce(q.maintenance, false) as maintenance
from incident i
left join acks_at(as_of) a on a.number = i.number
left join quiet q on q.incident = i.number
where i.opened_at <= as_of and (i.resolved_at is null or i.resolved_at > as_of)
  and (a.number is not null or q.incident is not null);
