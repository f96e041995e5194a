-- Open incidents that people know of, now: who acknowledged each, and whether a silence or a maintenance window covers it.
create or replace view main.known_now as
select 'INC-' || k.number as incident, k.number, i.severity, i.node, i.title, k.acknowledged, a.actor as acknowledged_by,
       a.until as acknowledged_until, a.text as note, k.silenced, k.maintenance
from known_at((now() at time zone 'UTC')::timestamp) k
join main.incident i on i.number = k.number
left join acks_at((now() at time zone 'UTC')::timestamp) a on a.number = k.number
order by k.number;
