/*
title         = "Mount does not respond, or became read-only"
scope         = "mount"
every         = "10s"
for           = "2 of 2"
runbook       = "mount_hung"

[for_code]                    # an error may be one of the moment; these are not
hung          = "1 of 1"
not_responding = "1 of 1"
read_only     = "1 of 1"

[limits]
crit_s        = { value = 60,    source = "own choice: jobs wait, and nothing short lasts so long" }
*/

-- A program of its own asks each mount how full it is (see probe mount). It is hung when the answer takes more than two
-- seconds; the first row to say so is one interval old. The kernel log tells the same of NFS servers, and also of mounts
-- that are not asked; an answer after its line refutes it. A file system that was writable and is read-only now was made so
-- by an error or by a person: what writes there fails.
create or replace macro find_mount_hung(as_of) as table
with sweep as (
    select node, max(ts) as ts, max_by(boot_id, ts) as boot_id
    from mount where ts > as_of - interval 5 minute and ts <= as_of group by node
),
told as (
    select m.node, m.mount, any_value(s.boot_id) as boot_id, bool_or(m.ts = s.ts) as here, max(m.ts) as seen_at,
           max_by(m.fstype, m.ts) as fstype, max_by(m.source, m.ts) as source, max_by(m.nfs_address, m.ts) as address,
           max_by(m.read_only, m.ts) as read_only, max_by(m.was_writable, m.ts) as was_writable,
           max_by({'ts': m.ts, 'state': m.canary_state, 'code': m.canary_code, 'hung_s': m.hung_s}, m.ts)
               filter (m.canary_state is not null and m.canary_state <> 'pending') as c,
           max(m.ts) filter (m.canary_state = 'ok') as answered_at
    from mount m join sweep s on s.node = m.node
    where m.ts > as_of - interval 5 minute and m.ts <= as_of
    group by m.node, m.mount
),
-- What was in trouble on a node that is silent now is not gone.
thing as (
    select node, 'mount:' || mount as entity, * exclude (node) from told where here
    union all by name
    select distinct f.node, f.entity from finding f anti join sweep s on s.node = f.node
    where f.rule = 'mount_hung' and f.state <> 'resolved' and f.began_at <= as_of
),
server as (
    select e.node, e.boot_id, json_extract_string(e.detail, '$.server') as server, max(e.ts) as ts,
           max_by(e.code, e.ts) as code,
           max_by(try_cast(json_extract_string(e.detail, '$.duration_s') as double), e.ts) as duration_s
    from event e
    where e.kind = 'nfs' and e.ts > as_of - interval 90 day and e.ts <= as_of
    group by all
),
-- What was mounted in the same place before says nothing of what is there now. Without a source: told by an older agent.
was as (
    select i.node, i.entity, json_extract_string(i.attributes, '$.source') as source,
           max(try_cast(json_extract_string(i.attributes, '$.writable') as double)) as value
    from inventory i
    left join (select node, max(set_at) as set_at from expected_at(as_of) group by node) e on e.node = i.node
    where i.kind = 'mount' and i.valid_from <= as_of and coalesce(i.valid_to, as_of) >= coalesce(e.set_at, i.valid_from)
    group by all
),
joined as (
    select t.*, h.metrics, l.crit_s, v.ts as log_at, v.code as log_code, v.duration_s,
           -- a request that was given up is not followed by word that the server answers again
           (v.code = 'not_responding' or v.code = 'timed_out' and v.ts > as_of - interval 5 minute)
               and coalesce(t.answered_at < v.ts, true) as log_open,
           coalesce(t.was_writable, false) or coalesce(w.value, u.value, 0) > 0 as writable,
           coalesce(t.seen_at >= as_of - to_seconds(fresh_s(p.interval_s)), false) as fresh
    from thing t
    join limits_mount_hung l on l.node = t.node and l.model = ''
    left join found_by(as_of) h on h.rule = 'mount_hung' and h.node = t.node and h.entity = t.entity
    left join server v on v.node = t.node and v.boot_id = t.boot_id and t.fstype in ('nfs', 'nfs4')
          and v.server in (trim(regexp_extract(t.source, '^(.+?):/', 1), '[]'), t.address)
    left join was w on w.node = t.node and w.entity = t.entity and w.source = t.source
    left join was u on u.node = t.node and u.entity = t.entity and u.source is null
    left join (select node, max(interval_s) as interval_s from probe where probe = 'mount' group by node) p on p.node = t.node
    qualify row_number() over (partition by t.node, t.entity order by v.ts desc nulls last) = 1
),
judged as (
    select *, unread(metrics, [if(c.state is not null, 'mount.canary_state', null), if(read_only is not null, 'mount.read_only', null)]) as lost,
           case when not fresh                                                   then 'no_samples'
                when c.state = 'hung'                                            then 'hung'
                when log_open                                                    then 'not_responding'
                when c.state = 'failed' and c.code in ('EACCES', 'EPERM')        then 'no_permission'
                when c.state = 'failed' and c.code = 'ENOENT'                    then 'not_found'
                when c.state = 'failed'                                          then 'failed'
                when read_only and writable                                      then 'read_only'
                when len(lost) > 0                                               then 'not_read'
                when c.state = 'ok' or log_code = 'ok'                           then 'answers'
                else 'not_asked' end as code
    from joined
)
select node, entity,
       case when code = 'answers' then 'ok'
            when code = 'hung' then if(c.hung_s >= crit_s, 'crit', 'warn')
            when code = 'not_responding' then if(epoch(as_of - log_at) >= crit_s, 'crit', 'warn')
            when code in ('failed', 'read_only') then 'crit'
            when code in ('no_permission', 'not_asked') then 'n/a' else 'unknown' end as verdict,
       code,
       case when code in ('hung', 'answers') then c.hung_s when code = 'not_responding' then epoch(as_of - log_at) end as observed,
       if(code in ('hung', 'answers', 'not_responding'), 2, null)::double as expected,
       's' as unit,
       case when code = 'not_responding' or c.state is null then greatest(log_at, seen_at)
            when code = 'read_only' then seen_at else c.ts end as evidence_at,
       case when code = 'hung' then format('mount not responding: no answer for {:.0f} s ({}, {}){}', c.hung_s, fstype, source,
                 if(log_open, '; the kernel log says so since ' || strftime(log_at, '%H:%M:%S'), ''))
            when code = 'not_responding' then format('mount not responding by the kernel log since {} ({}, {})',
                 strftime(log_at, '%Y-%m-%d %H:%M:%S'), fstype, source)
            when code = 'failed' then format('the file system answers with an error: {} ({}, {})', c.code, fstype, source)
            when code = 'read_only' then format('it was writable and is read-only now ({}, {})', fstype, source)
            when code = 'answers' and c.hung_s > 0 then format('answers again after {:.0f} s', c.hung_s)
            when code = 'answers' and c.state is null then format('the server answers again{}', coalesce(format(' after {:.0f} s', duration_s), ''))
            when code = 'answers' then 'answers'
            when code = 'no_permission' then 'the agent may not ask it: ' || c.code
            when code = 'not_found' then 'the path was not there when it was asked'
            when code = 'not_asked' then 'not asked: covered by another mount, or an automounter would keep it for that'
            when code = 'not_read' then unread_words(lost)
            else 'no samples' end as reason,
       json_object('fstype', fstype, 'source', source, 'canary', c.state, 'error', nullif(c.code, ''), 'hung_s', c.hung_s,
                   'kernel_log', log_code, 'kernel_log_at', log_at, 'read_only', read_only, 'writable', writable,
                   'by', noted([if(code in ('hung', 'failed'), 'mount.canary_state', null),
                                if(read_only and writable, 'mount.read_only', null)], lost)) as detail
from judged;
