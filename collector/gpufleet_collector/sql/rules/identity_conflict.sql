/*
title         = "Two machines use one identity"
scope         = "node"
every         = "30s"
weight        = 0.5
for           = "1 of 1"
clear_after   = "2m"
max_severity  = "warn"
runbook       = "identity_conflict"
*/

-- The collector files a second live machine under a suffix and notes whom it collides with (node.conflict). Both are
-- kept apart and lose nothing; somebody has to rename one. The evidence is what the machine sends under that name.
create or replace macro find_identity_conflict(as_of) as table
select n.node, 'node:' as entity,
       case when h.received_at is null then 'unknown' when n.conflict <> '' then 'warn' else 'ok' end as verdict,
       case when h.received_at is null then 'agent_silent' when n.conflict = '' then 'single'
            when n.claimed = o.claimed then 'same_name' else 'same_machine_id' end as code,
       null::double as observed, null::double as expected, '' as unit,
       h.received_at as evidence_at,
       case when n.conflict = '' then 'the only one of its name and machine id'
            when n.claimed = o.claimed then format('calls itself {} as {} does; filed as {}', n.claimed, n.conflict, n.node)
            else format('has the machine id of {}; filed as {}', n.conflict, n.node) end as reason,
       json_object('claimed', n.claimed, 'machine_id', n.machine_id, 'boot_id', n.boot_id, 'other', n.conflict,
                   'other_machine_id', o.machine_id) as detail
from node_list(as_of) n
left join node_list(as_of) o on o.node = n.conflict
left join heard_at(as_of, '2 minutes') h on h.node = n.node
where n.hello_at is not null;
