/*
title         = "PCIe errors"
scope         = "pci"
every         = "30s"
weight        = 3
for           = "2 of 3"
for_code      = { fatal = "1 of 1", nonfatal = "1 of 1" }
boot_grace    = "5m"
clear_after   = "15m"
runbook       = "pcie_errors"

[limits]
corrected_per_minute = { value = 30, source = "own choice: as many as NVIDIA accepts of replays on 16 lanes of generation 5" }
replay_scale  = { value = 1, source = "times what NVIDIA accepts of replays per minute and lane (DCGM health watch, by generation)" }
nonfatal      = { value = 1, source = "a packet was lost" }
fatal         = { value = 1, source = "the link was lost" }
*/

-- Growth in five minutes, within one boot (and driver start), at the device, at the port above it, and by the card's own
-- counts: either end of a link may be the one that counts, and the same error may be counted in several places, so the
-- places are compared and not added up. What a counter had before is no growth, and neither is what came before it fell:
-- it was reset, or one sample was bad. Rates are means over what there is of the five minutes. A finding is not refuted by
-- the other places while the one that it came from is not read.
create or replace macro find_pcie_errors(as_of) as table
with recent as (
    select node, pci, ts, boot_id, device_kind as kind, nullif(gpu_uuid, '') as uuid, parent, pcie_gen, pcie_width,
           aer_corrected_total as c, aer_nonfatal_total as n, aer_fatal_total as f, aer_errors as told,
           port_aer_corrected_total as pc, port_aer_nonfatal_total as pn, port_aer_fatal_total as pf, port_aer_errors as port_told
    from pci
    where ts > as_of - interval 5 minute and ts <= as_of
),
health as (
    select node, gpu_uuid, ts, boot_id, driver_epoch, pcie_replay_total as r, pcie_correctable_total as c,
           pcie_nonfatal_total as n, pcie_fatal_total as f
    from gpu_health
    where ts > as_of - interval 5 minute and ts <= as_of and gpu_uuid is not null
),
device as (
    select node, pci, max(ts) as ts,
           max_by({'kind': kind, 'uuid': uuid, 'boot_id': boot_id, 'parent': parent, 'gen': pcie_gen, 'width': pcie_width,
                   'counts': coalesce(c, pc) is not null, 'told': told, 'port_told': port_told,
                   'seen': [if(c is not null, 'pci.aer_corrected_total', null), if(n is not null, 'pci.aer_nonfatal_total', null),
                            if(f is not null, 'pci.aer_fatal_total', null), if(pc is not null, 'pci.port_aer_corrected_total', null),
                            if(pn is not null, 'pci.port_aer_nonfatal_total', null), if(pf is not null, 'pci.port_aer_fatal_total', null)]},
                  ts) as v
    from recent group by node, pci
),
driver as (
    select node, gpu_uuid, max(ts) as ts,
           max_by({'boot_id': boot_id, 'epoch': driver_epoch, 'counts': coalesce(r, c) is not null,
                   'seen': [if(r is not null, 'gpu_health.pcie_replay_total', null), if(c is not null, 'gpu_health.pcie_correctable_total', null),
                            if(n is not null, 'gpu_health.pcie_nonfatal_total', null), if(f is not null, 'gpu_health.pcie_fatal_total', null)]},
                  ts) as v
    from health group by node, gpu_uuid
),
-- Only of what moved: nearly nothing does.
reading as (
    select r.node, 'pci:' || r.pci as source, r.ts,
           unnest([{'place': 'device', 'kind': 'corrected', 'n': c}, {'place': 'device', 'kind': 'nonfatal', 'n': n},
                   {'place': 'device', 'kind': 'fatal', 'n': f}, {'place': 'port', 'kind': 'corrected', 'n': pc},
                   {'place': 'port', 'kind': 'nonfatal', 'n': pn}, {'place': 'port', 'kind': 'fatal', 'n': pf}]) as x
    from recent r
    semi join (
        select node, pci, boot_id from recent group by node, pci, boot_id
        having max(c) > min(c) or max(n) > min(n) or max(f) > min(f) or max(pc) > min(pc) or max(pn) > min(pn) or max(pf) > min(pf)
    ) m using (node, pci, boot_id)
    join device d on d.node = r.node and d.pci = r.pci and d.v.boot_id = r.boot_id
    union all
    select h.node, 'gpu:' || h.gpu_uuid, h.ts,
           unnest([{'place': 'driver', 'kind': 'replay', 'n': r}, {'place': 'driver', 'kind': 'corrected', 'n': c},
                   {'place': 'driver', 'kind': 'nonfatal', 'n': n}, {'place': 'driver', 'kind': 'fatal', 'n': f}])
    from health h
    semi join (
        select node, gpu_uuid, boot_id, driver_epoch from health group by node, gpu_uuid, boot_id, driver_epoch
        having max(r) > min(r) or max(c) > min(c) or max(n) > min(n) or max(f) > min(f)
    ) m on m.node = h.node and m.gpu_uuid = h.gpu_uuid and m.boot_id = h.boot_id
       and m.driver_epoch is not distinct from h.driver_epoch
    join driver d on d.node = h.node and d.gpu_uuid = h.gpu_uuid and d.v.boot_id = h.boot_id
                 and d.v.epoch is not distinct from h.driver_epoch
),
told as (
    select node, source, x.place as place, x.kind as kind, list({'ts': ts, 'n': x.n::double} order by ts) as all_seen
    from reading where x.n is not null
    group by node, source, x.place, x.kind
),
series as (
    -- a sample below both of its neighbours, which do not fall, is a bad one
    select * exclude (all_seen),
           list_filter(all_seen, lambda x, i: not coalesce(x.n < all_seen[i - 1].n and all_seen[i + 1].n >= all_seen[i - 1].n, false)) as seen
    from told
),
step as (
    select node, source, place, kind, seen, unnest(range(2, len(seen) + 1)) as i from series
),
rise as (
    select node, source, place, kind, seen[i].ts as ts, seen[i].n - seen[i - 1].n as n, seen[1].ts as first_at
    from step s
    where seen[i].n > seen[i - 1].n
      and not exists (from step r where r.node = s.node and r.source = s.source and r.place = s.place and r.kind = s.kind
                                    and r.i > s.i and r.seen[r.i].n < r.seen[r.i - 1].n)
),
grown as (
    select node, source, place, kind, max(ts) as ts, sum(n) as n,
           sum(n) * 60 / greatest(60, epoch(max(ts) - any_value(first_at))) as per_minute
    from rise group by node, source, place, kind
),
card as (
    select node, entity, gpu_uuid, pci, coalesce(model, '') as model, installed
    from card_list(as_of) where gpu_uuid is not null
),
on_bus as (
    select d.*, coalesce(u.entity, a.entity, 'pci:' || d.pci) as entity
    from device d
    left join card u on u.node = d.node and u.gpu_uuid = d.v.uuid
    left join card a on a.node = d.node and a.pci = d.pci and a.installed and d.v.uuid is null and d.v.kind = 'gpu'
),
bus as (
    select node, entity, max(ts) as ts, max_by(pci, ts) as pci, max_by(v, ts) as v from on_bus group by node, entity
),
wanted as (
    select coalesce(b.node, c.node) as node, coalesce(b.entity, c.entity) as entity, b.ts, b.v, coalesce(b.pci, c.pci) as pci,
           coalesce(c.model, '') as model, c.gpu_uuid
    from bus b full join card c on c.node = b.node and c.entity = b.entity
),
-- Per entity: the worst place of each kind, and all that grew, in words.
trouble as (
    select w.node, w.entity,
           max(g.n) filter (kind = 'fatal') as fatal, max(g.n) filter (kind = 'nonfatal') as nonfatal,
           max(g.per_minute) filter (kind = 'corrected') as corrected, max(g.per_minute) filter (kind = 'replay') as replays,
           max(g.ts) filter (kind = 'fatal') as fatal_at, max(g.ts) filter (kind = 'nonfatal') as nonfatal_at,
           max(g.ts) filter (kind = 'corrected') as corrected_at, max(g.ts) filter (kind = 'replay') as replays_at,
           string_agg(format('{:.0f} {}{}', g.n, if(kind = 'replay', 'replays', kind),
               case place when 'port' then ' at the upstream port ' || w.v.parent when 'device' then ' at the device'
                    else ' by the driver' end), ', ' order by place, kind) as words,
           list({'kind': kind, 'n': g.n, 'per_minute': g.per_minute,
                 'metric': case place when 'device' then 'pci.aer_' || kind when 'port' then 'pci.port_aer_' || kind
                                else 'gpu_health.pcie_' || if(kind = 'corrected', 'correctable', kind) end || '_total'}) as grew
    from wanted w
    join grown g on g.node = w.node and g.source in ('pci:' || w.pci, 'gpu:' || w.gpu_uuid)
    group by w.node, w.entity
),
why_null as (
    select node, entity, bool_and(reason in ('not_supported', 'ok')) as not_supported
    from (select node, entity, probe, metric, max_by(reason, since) as reason
          from capability
          where ((probe = 'pci' and metric in ('aer_corrected_total', 'port_aer_corrected_total'))
                 or (probe = 'gpu_health' and metric in ('pcie_replay_total', 'pcie_correctable_total')))
            and since <= as_of
          group by node, entity, probe, metric)
    group by node, entity
),
judged as (
    select w.node, w.entity, w.pci, w.v, t.* exclude (node, entity), greatest(w.ts, d.ts) as seen_at,
           l.corrected_per_minute,
           ceil(l.replay_scale * coalesce(w.v.width, 16)
                * case coalesce(w.v.gen, 5) when 1 then 0.15 when 2 then 0.3 when 3 then 0.48 when 4 then 0.96 when 5 then 1.92
                       else 3.84 end) as replays_per_minute,
           unread(h.metrics, list_concat(if(w.ts >= as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))), w.v.seen, []::varchar[]),
                                         if(d.ts >= as_of - to_seconds(fresh_s(coalesce(q.interval_s, 60))), d.v.seen, []::varchar[]))) as lost,
           list_transform(list_filter(t.grew, lambda x: case x.kind when 'fatal' then x.n >= l.fatal when 'nonfatal' then x.n >= l.nonfatal
                                                             when 'corrected' then x.per_minute > l.corrected_per_minute
                                                             else x.per_minute > replays_per_minute end),
                          lambda x: x.metric) as bad,
           case when greatest(w.ts, d.ts) is null and p.interval_s is null     then 'no_probe'
                when coalesce(greatest(w.ts, d.ts) < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))), true) then 'no_samples'
                when t.fatal >= l.fatal                                        then 'fatal'
                when t.nonfatal >= l.nonfatal                                  then 'nonfatal'
                when t.corrected > l.corrected_per_minute                      then 'corrected'
                when t.replays > replays_per_minute                            then 'replays'
                when len(lost) > 0                                             then 'not_read'
                when coalesce(w.v.counts, false) or coalesce(d.v.counts, false) then 'few'
                when coalesce(y.not_supported, true) and coalesce(z.not_supported, true)
                     and (y.not_supported or z.not_supported)                  then 'not_supported'
                else 'unreadable' end as code
    from wanted w
    join limits_pcie_errors l on l.node = w.node and l.model = w.model
    left join driver d on d.node = w.node and d.gpu_uuid = w.gpu_uuid
    left join trouble t on t.node = w.node and t.entity = w.entity
    left join (select node, max(interval_s) as interval_s from probe where probe = 'pci' group by node) p on p.node = w.node
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu_health' group by node) q on q.node = w.node
    left join found_by(as_of) h on h.rule = 'pcie_errors' and h.node = w.node and h.entity = w.entity
    left join why_null y on y.node = w.node and y.entity = 'pci:' || w.pci
    left join why_null z on z.node = w.node and z.entity = 'gpu:' || w.gpu_uuid
)
select node, entity,
       case when code = 'few' then 'ok' when code = 'fatal' then 'crit' when code in ('nonfatal', 'corrected', 'replays') then 'warn'
            when code in ('no_probe', 'not_supported') then 'n/a' else 'unknown' end as verdict,
       code,
       case code when 'fatal' then fatal when 'nonfatal' then nonfatal when 'corrected' then corrected when 'replays' then replays
            when 'few' then coalesce(greatest(corrected, replays), 0) end::double as observed,
       case code when 'fatal' then 0 when 'nonfatal' then 0 when 'replays' then replays_per_minute
            when 'corrected' then corrected_per_minute when 'few' then corrected_per_minute end::double as expected,
       case when code in ('fatal', 'nonfatal') then 'count' else 'per minute' end as unit,
       case code when 'fatal' then fatal_at when 'nonfatal' then nonfatal_at when 'corrected' then corrected_at
            when 'replays' then replays_at else seen_at end as evidence_at,
       case when code in ('fatal', 'nonfatal', 'corrected', 'replays') then words || ' in five minutes'
            when code = 'few' then coalesce('few errors: ' || words || ' in five minutes', 'no new errors')
            when code = 'no_probe' then 'the agent does not read the bus'
            when code = 'no_samples' then 'no samples'
            when code = 'not_read' then unread_words(lost)
            when code = 'not_supported' then 'neither kernel nor card counts errors here'
            else 'the counts of errors cannot be read' end as reason,
       json_object('pci', pci, 'parent', v.parent, 'fatal', fatal, 'nonfatal', nonfatal, 'corrected_per_minute', corrected,
                   'replays_per_minute', replays, 'at_device', v.told, 'at_port', v.port_told, 'by', noted(bad, lost)) as detail
from judged;
