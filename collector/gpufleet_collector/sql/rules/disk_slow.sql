/*
title         = "Disk is slow, or does not answer"
scope         = "disk"
every         = "20s"
for           = "3 of 4"
clear_after   = "3m"
runbook       = "disk_slow"

[for_code]
stalled       = "2 of 2"
dead          = "1 of 1"

[limits]
ssd_ms        = { value = 100,  source = "own choice: healthy ones answer in a few, those of clouds in tens" }
hdd_ms        = { value = 400,  source = "own choice: forty seeks" }
min_ops       = { value = 30,   source = "own choice: a few requests say nothing" }
ssd_mb_per_s  = { value = 200,  source = "own choice: who moves that much is loaded, not slow" }
hdd_mb_per_s  = { value = 40,   source = "own choice" }
ssd_iops      = { value = 1000, source = "own choice" }
hdd_iops      = { value = 60,   source = "own choice" }
*/

-- The newest step between two samples: the time that requests took, over the requests. Under load they wait for each other
-- and take long on the best of disks: one that moves much meanwhile is loaded, not slow. A disk with requests under way of
-- which none ends is stalled. A counter that fell belongs to another disk or boot and says nothing.
create or replace macro find_disk_slow(as_of) as table
with recent as (
    select node, disk, boot_id, ts, state, in_flight, rotational, busy_s_total as busy_s,
           read_ops_total::double + write_ops_total as ops, read_bytes_total::double + write_bytes_total as bytes,
           read_s_total + write_s_total as took_s, smart_warning_bits as warning_bits, smart_spare_pct as spare_pct,
           smart_used_pct as used_pct, smart_media_errors_total as media_errors
    from disk where ts > as_of - interval 5 minute and ts <= as_of
),
sweep as (select node, max(ts) as ts from recent group by node),
told as (
    -- the same sample may be there twice
    select r.node, r.disk, max(r.ts) as ts, bool_or(r.ts = s.ts) as here,
           max_by(r, r.ts) as a,
           max_by(r, r.ts) filter (r.ts < s.ts) as b,
           min_by(r, r.ts) as z
    from recent r join sweep s on s.node = r.node
    group by r.node, r.disk
),
-- What was in trouble on a node that is silent now is not gone.
thing as (
    select node, 'disk:' || disk as entity, * exclude (node) from told where here
    union all by name
    select distinct f.node, f.entity from finding f anti join sweep s on s.node = f.node
    where f.rule = 'disk_slow' and f.state <> 'resolved' and f.began_at <= as_of
),
step as (
    select t.*, h.metrics, l.min_ops, coalesce(not t.a.rotational, false) as ssd,
           if(ssd, l.ssd_ms, l.hdd_ms) as limit_ms, if(ssd, l.ssd_mb_per_s, l.hdd_mb_per_s) as much_mb_per_s,
           if(ssd, l.ssd_iops, l.hdd_iops) as much_iops,
           coalesce(t.ts >= as_of - to_seconds(fresh_s(p.interval_s)), false) as fresh,
           epoch(t.a.ts - t.b.ts) as passed_s,
           coalesce(t.a.boot_id = t.b.boot_id and t.a.ops >= t.b.ops and t.a.bytes >= t.b.bytes
                    and t.a.took_s >= t.b.took_s and t.a.busy_s >= t.b.busy_s, false) as grown,
           t.a.ops - t.b.ops as ops, 1000 * (t.a.took_s - t.b.took_s) / nullif(t.a.ops - t.b.ops, 0) as await_ms,
           (t.a.ops - t.b.ops) / passed_s as iops, (t.a.bytes - t.b.bytes) / passed_s / 1e6 as mb_per_s,
           (t.a.busy_s - t.b.busy_s) / passed_s as busy,
           -- what the disk says of itself is context: many fail without a word, and many work on for years after one
           if(t.a.media_errors > 0 or t.a.warning_bits > 0,
              format('; its own log has {} media errors and warnings {}', coalesce(t.a.media_errors, 0), coalesce(t.a.warning_bits, 0)),
              '') as log,
           if(t.z.boot_id = t.b.boot_id and t.b.ops - t.z.ops >= l.min_ops and t.b.took_s >= t.z.took_s,
              1000 * (t.b.took_s - t.z.took_s) / (t.b.ops - t.z.ops), null) as before_ms
    from thing t
    join limits_disk_slow l on l.node = t.node and l.model = ''
    left join found_by(as_of) h on h.rule = 'disk_slow' and h.node = t.node and h.entity = t.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'disk' group by node) p on p.node = t.node
),
judged as (
    select *, unread(metrics, [if(a.state is not null, 'disk.state', null)]) as lost,
           case when not fresh                                                      then 'no_samples'
                when a.state in ('dead', 'offline', 'transport-offline')            then 'dead'
                when b.ts is null                                                   then 'one_sample'
                when a.ops is null or b.ops is null or a.took_s is null             then 'unreadable'
                when not grown                                                      then 'counters_reset'
                when ops = 0 and a.in_flight > 0 and b.in_flight > 0 and busy >= 0.9 then 'stalled'
                when ops < min_ops                                                  then 'idle'
                when await_ms < limit_ms                                            then 'quick'
                when mb_per_s >= much_mb_per_s or iops >= much_iops                 then 'loaded'
                else 'slow' end as said,
           if(said in ('quick', 'loaded') and len(lost) > 0, 'not_read', said) as code
    from step
)
select node, entity,
       case when code in ('quick', 'loaded') then 'ok' when code = 'slow' then 'warn' when code in ('stalled', 'dead') then 'crit'
            when code in ('idle', 'one_sample', 'counters_reset') then 'n/a' else 'unknown' end as verdict,
       code,
       if(code in ('slow', 'quick', 'loaded'), await_ms, null)::double as observed,
       limit_ms::double as expected, 'ms' as unit, ts as evidence_at,
       case when code = 'slow' then format('{:.0f} ms per request at {:.0f} requests and {:.1f} MB per second, at most {:.0f} expected{}',
                 await_ms, iops, mb_per_s, limit_ms, coalesce(format('; {:.1f} ms in the minutes before', before_ms), '')) || log
            when code = 'stalled' then format('{} requests under way, none ended in {:.0f} s', a.in_flight, passed_s) || log
            when code = 'dead' then 'its driver has given it up: ' || a.state
            when code = 'quick' then format('{:.1f} ms per request', await_ms)
            when code = 'loaded' then format('{:.0f} ms per request, for it moves much: {:.0f} MB and {:.0f} requests per second', await_ms, mb_per_s, iops)
            when code = 'idle' then 'too few requests to judge'
            when code = 'one_sample' then 'one sample so far'
            when code = 'counters_reset' then 'its counters began anew'
            when code = 'unreadable' then 'its counters cannot be read'
            when code = 'not_read' then unread_words(lost)
            else 'no samples' end as reason,
       json_object('await_ms', await_ms, 'before_ms', before_ms, 'iops', iops, 'mb_per_s', mb_per_s, 'busy', busy,
                   'in_flight', a.in_flight, 'state', a.state, 'ssd', ssd, 'media_errors', a.media_errors, 'warning_bits', a.warning_bits,
                   'spare_pct', a.spare_pct, 'used_pct', a.used_pct,
                   'by', noted([if(code = 'dead', 'disk.state', null)], lost)) as detail
from judged;
