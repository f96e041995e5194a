-- What happened to each incident, in order, with the finding behind each line.
create or replace view main.incident_timeline as
select l.logged_at, 'INC-' || l.number as incident, l.number, i.node, i.state as incident_state, i.severity,
       l.what, f.rule, f.entity, f.code, f.observed, f.expected, f.unit, l.text
from main.incident_log l
join main.incident i on i.number = l.number
left join main.finding f on f.id = l.finding
order by l.number, l.logged_at;
