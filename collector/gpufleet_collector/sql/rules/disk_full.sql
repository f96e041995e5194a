/*
title         = "File system is full"
scope         = "mount"
every         = "20s"
for           = "2 of 2"
clear_after   = "1m"
runbook       = "disk_full"

[limits]
warn_pct      = { value = 90,    source = "df's Use%; peers warn at 80 to 95" }
crit_pct      = { value = 97,    source = "own choice" }
warn_gb       = { value = 200,   source = "own choice: 10 % of a large disk is room enough" }
crit_gb       = { value = 20,    source = "own choice: less than a checkpoint of a large model" }
floor_gb      = { value = 0.5,   source = "own choice: the system itself no longer works" }
*/

-- What everybody may still use, as df counts it: blocks reserved for root are not room. Inodes run out as well. Small
-- shares of a large disk are large, so both the percentage and the room left must be small. A network share is full on
-- all its clients at once: it is judged on the first of them by name, and as a warning, for no node is at fault.
create or replace macro find_disk_full(as_of) as table
with sweep as (
    select node, max(ts) as ts from mount where ts > as_of - interval 5 minute and ts <= as_of group by node
),
-- A mount that does not answer has no figures, nor has one whose turn is the next time: the last that it had.
told as (
    select m.node, m.mount, bool_or(m.ts = s.ts) as here, any_value(m.network) as network, max_by(m.source, m.ts) as source,
           max_by(m.fstype, m.ts) as fstype,
           max_by({'ts': m.ts, 'size': m.size_bytes::double, 'free': m.free_bytes::double, 'avail': m.avail_bytes::double}, m.ts)
               filter (m.size_bytes > 0 and m.avail_bytes is not null and m.free_bytes is not null) as b,
           max_by({'ts': m.ts, 'all': m.inodes::double, 'free': m.inodes_free::double}, m.ts)
               filter (m.inodes > 0 and m.inodes_free is not null) as i,
           max_by(m.read_only, m.ts) as read_only, max_by(m.canary_state, m.ts) as canary, max(m.ts) as seen_at
    from mount m join sweep s on s.node = m.node
    where m.ts > as_of - interval 5 minute and m.ts <= as_of
    group by m.node, m.mount
),
-- What was in trouble on a node that is silent now is not gone.
thing as (
    select node, 'mount:' || mount as entity, * exclude (node) from told where here
    union all by name
    select distinct f.node, f.entity from finding f anti join sweep s on s.node = f.node
    where f.rule = 'disk_full' and f.state <> 'resolved' and f.began_at <= as_of
),
used as (
    select t.*, l.* exclude (node, model), h.metrics,
           coalesce(greatest(t.b.ts, t.i.ts) >= as_of - to_seconds(greatest(fresh_s(p.interval_s), 150)), false) as fresh,
           100 * (t.b.size - t.b.free) / nullif((t.b.size - t.b.free) + t.b.avail, 0) as used_pct,
           t.b.avail / 1e9                              as avail_gb,
           100 * (t.i.all - t.i.free) / t.i.all         as inodes_pct,
           -- a tag, or the name of a program, is the same on many hosts and means another file system on each
           t.network and t.fstype not in ('9p', 'virtiofs') and not starts_with(t.fstype, 'fuse')
               and row_number() over (partition by t.network, t.source order by t.b.ts is null, t.node) > 1 as elsewhere
    from thing t
    join limits_disk_full l on l.node = t.node and l.model = ''
    left join found_by(as_of) h on h.rule = 'disk_full' and h.node = t.node and h.entity = t.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'mount' group by node) p on p.node = t.node
),
judged as (
    select *,
           unread(metrics, [if(used_pct is not null, 'mount.avail_bytes', null), if(inodes_pct is not null, 'mount.inodes_free', null)]) as lost,
           case when seen_at is null                                          then 'no_samples'
                when elsewhere                                                then 'judged_elsewhere'
                when not fresh and canary is not null and canary <> 'ok'      then 'no_answer'
                when not fresh                                                then 'not_known'
                when used_pct is null and inodes_pct is null                  then 'no_size'
                when read_only                                                then 'read_only'
                -- /boot and the like are never far from the floor: nothing is written there while jobs run
                when avail_gb < floor_gb and used_pct >= warn_pct and b.size / 1e9 >= 4 * floor_gb then 'full'
                when used_pct >= crit_pct and avail_gb <= crit_gb             then 'full'
                when inodes_pct >= crit_pct                                   then 'no_inodes'
                when used_pct >= warn_pct and avail_gb <= warn_gb             then 'filling'
                when inodes_pct >= warn_pct                                   then 'few_inodes'
                when len(lost) > 0                                            then 'not_read'
                else 'room' end as code
    from used
)
select node, entity,
       case when code = 'room' then 'ok' when code in ('full', 'no_inodes') then if(network, 'warn', 'crit')
            when code in ('filling', 'few_inodes') then 'warn'
            when code in ('judged_elsewhere', 'no_size', 'read_only') then 'n/a' else 'unknown' end as verdict,
       code,
       if(code in ('no_inodes', 'few_inodes'), inodes_pct, used_pct)::double as observed,
       warn_pct::double as expected, '%' as unit,
       coalesce(greatest(b.ts, i.ts), seen_at) as evidence_at,
       case when code in ('full', 'filling') then format('{:.1f} % in use, {:.1f} GB left', used_pct, avail_gb)
            when code in ('no_inodes', 'few_inodes') then format('{:.1f} % of the inodes in use, {:.0f} left', inodes_pct, i.free)
            when code = 'room' then concat_ws(', ', format('{:.1f} % in use', used_pct), format('{:.1f} GB left', avail_gb))
            when code = 'judged_elsewhere' then 'a network share: judged on another node'
            when code = 'no_answer' then 'the mount does not answer'
            when code = 'not_known' then 'how full it is could not be read'
            when code = 'no_size' then 'it has no size'
            when code = 'not_read' then unread_words(lost)
            when code = 'read_only' then 'read-only: nothing can fill it'
            else 'no samples' end as reason,
       json_object('used_pct', used_pct, 'avail_gb', avail_gb, 'inodes_pct', inodes_pct, 'source', source,
                   'by', noted([if(code in ('full', 'filling'), 'mount.avail_bytes', null),
                                if(inodes_pct >= warn_pct, 'mount.inodes_free', null)], lost)) as detail
from judged;
