-- Silences in force, now: what they cover, why, who made them, and when they end.
create or replace view main.silences_now as
select id as silence, nodes, rules, entities, serials, reason, actor, claimed, from_at, until
from silences_at((now() at time zone 'UTC')::timestamp)
order by id;
