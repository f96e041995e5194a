-- Nodes in maintenance, now: a line per window and node.
create or replace view main.maintenance_now as
select node, id as maintenance, reason, actor, from_at, until
from maintenance_at((now() at time zone 'UTC')::timestamp)
order by node, id;
