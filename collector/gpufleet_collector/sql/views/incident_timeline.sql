-- What happened to each incident and what people did with it, in order, with the finding or the person behind each line.
create or replace view main.incident_timeline as
select l.logged_at, 'INC-' || l.number as incident, l.number, i.node, i.state as incident_state, i.severity,
       l.what, f.rule, f.entity, f.code, f.observed, f.expected, f.unit, l.text, l.actor, l.claimed
from (
    select number, logged_at, what, finding, text, null as actor, null as claimed from main.incident_log
    union all
    select number, acted_at, what, null, text, actor, claimed from main.incident_act
) l
join main.incident i on i.number = l.number
left join main.finding f on f.id = l.finding
order by l.number, l.logged_at;
