/*
title         = "PCIe link slower than it can be"
scope         = "pci"
every         = "30s"
weight        = 3.5
for           = "2 of 3"
clear_after   = "2m"
runbook       = "pcie_speed"

[limits]
generation    = { value = 0,   source = "PCIe generation that a card must have under load; 0 = what card and slot can do" }
crit_steps    = { value = 2,   source = "own choice: two generations less carry a quarter of the data" }
loaded_pct    = { value = 50,  source = "own choice: a card this busy has left its saving states" }
loaded_samples = { value = 3,  source = "own choice: one sample may fall into a pause" }
slow_share    = { value = 0.8, source = "own choice: a link speeds up within a second of work" }
window_s      = { value = 60,  source = "one verdict per minute" }
settle_s      = { value = 10,  source = "what a sample may need to arrive" }
*/

-- A card that has nothing to do may slow its link down to save power, so only the samples of the newest whole minute in
-- which it worked count: utilisation and generation of the same sample, by the driver (probe gpu, every 5 s). An idle card
-- is n/a. What is expected is what both ends can do, by the driver and by the bus, whichever is less; a card made for a
-- faster slot than the one it sits in is well, and so is one behind a slower switch. Links further up, and a card's own
-- where the driver does not tell, are taken from the bus (sysfs, every 60 s) if the card worked in that minute.
-- HCAs and NVSwitches do not slow down by themselves, but nobody says whether they work: they are held against the best
-- that they showed since the node was accepted.
create or replace macro find_pcie_speed(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, c.pci, c.installed, l.* exclude (node, model),
           floor((epoch(as_of) - l.settle_s) / l.window_s) * l.window_s as until_s
    from card_list(as_of) c
    join limits_pcie_speed l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
device as (
    select node, pci, max(ts) as ts,
           max_by({'kind': device_kind, 'present': present, 'uuid': nullif(gpu_uuid, ''), 'asleep': runtime_status = 'suspended',
                   'path': path, 'links': path_links, 'slowest': slowest,
                   'gen': coalesce(path_gen, if(path_links is null, pcie_gen, null)),
                   'gen_max': coalesce(path_gen_max, pcie_gen_max)}, ts) as v
    from pci
    where ts > as_of - interval 5 minute and ts <= as_of
    group by node, pci
),
on_bus as (
    select d.*, coalesce(u.gpu_uuid, a.gpu_uuid) as card_uuid
    from device d
    left join card u on u.node = d.node and u.gpu_uuid = d.v.uuid
    left join card a on a.node = d.node and a.pci = d.pci and a.installed and d.v.uuid is null and d.v.kind = 'gpu'
),
bus as (
    select node, card_uuid as gpu_uuid, max(ts) as ts, max_by(pci, ts) as pci, max_by(v, ts) as v
    from on_bus where card_uuid is not null group by node, card_uuid
),
sample as (
    select g.node, g.gpu_uuid, g.ts, g.state, g.util_pct, g.pcie_gen as gen,
           -- from P8 on a card saves power, whatever the mean of five seconds says
           g.util_pct >= c.loaded_pct and coalesce(g.pstate, 0) < 8 as loaded,
           if(c.generation > 0, c.generation, least(g.pcie_gen_max, b.v.gen_max)) as expected
    from gpu g
    join card c on c.node = g.node and c.gpu_uuid = g.gpu_uuid
    left join bus b on b.node = g.node and b.gpu_uuid = g.gpu_uuid
    where g.ts > as_of - interval 150 second and g.ts <= as_of
      and epoch(g.ts) >= c.until_s - c.window_s and epoch(g.ts) < c.until_s
),
minute as (
    select node, gpu_uuid, count(*) as samples, count(util_pct) as told, count(*) filter (loaded) as loaded,
           count(gen) filter (loaded) as read, count(*) filter (loaded and gen < expected) as slow,
           max(gen) filter (loaded) as gen, max(expected) as expected, max(ts) as seen_at,
           max(ts) filter (loaded and gen < expected) as slow_at, max_by(state, ts) as state
    from sample group by node, gpu_uuid
),
why_null as (
    select node, entity, max_by(reason, since) filter (metric = 'util_pct') as util,
           max_by(reason, since) filter (metric = 'pcie_gen') as gen
    from capability
    where probe = 'gpu' and metric in ('util_pct', 'pcie_gen') and since <= as_of
    group by node, entity
),
cards as (
    select c.node, c.entity, coalesce(b.pci, c.pci) as pci, b.v, b.ts as bus_at, c.crit_steps, m.* exclude (node, gpu_uuid),
           if(c.generation > 0, c.generation, coalesce(m.expected, b.v.gen_max)) as possible,
           coalesce(b.v.gen < if(c.generation > 0, least(c.generation, b.v.gen_max), b.v.gen_max), false)
               and (coalesce(b.v.slowest <> b.pci, false) or m.read = 0)
               and epoch(b.ts) >= c.until_s - c.window_s                     as bus_slow,
           unread(h.metrics, [if(m.read >= c.loaded_samples, 'gpu.pcie_gen', null),
                              if(b.v.gen is not null and epoch(b.ts) >= c.until_s - c.window_s, 'pci.path_gen', null)]) as lost,
           [if(m.read >= c.loaded_samples and m.slow >= c.slow_share * m.read, 'gpu.pcie_gen', null),
            if(bus_slow and m.loaded >= c.slow_share * m.samples, 'pci.path_gen', null)] as bad,
           case when y.gen = 'not_supported'                                 then 'not_supported'
                when m.samples is null                                       then 'no_samples'
                when m.state in ('lost', 'hung')                             then m.state
                when m.told = 0                                              then if(y.util = 'not_supported', 'no_load_known', 'unreadable')
                when m.loaded < c.loaded_samples                             then 'idle'
                when m.read >= c.loaded_samples and m.slow >= c.slow_share * m.read then 'slow_link'
                when bus_slow and m.loaded >= c.slow_share * m.samples
                then if(coalesce(b.v.slowest <> b.pci, false), 'slow_uplink', 'slow_link')
                when m.read = 0 and b.v.gen is null                          then 'unreadable'
                when possible is null                                        then 'not_told'
                when len(lost) > 0                                           then 'not_read'
                else 'full_speed' end as code
    from card c
    left join bus b on b.node = c.node and b.gpu_uuid = c.gpu_uuid
    left join minute m on m.node = c.node and m.gpu_uuid = c.gpu_uuid
    left join why_null y on y.node = c.node and y.entity = c.entity
    left join found_by(as_of) h on h.rule = 'pcie_speed' and h.node = c.node and h.entity = c.entity
),
others as (
    select d.node, 'pci:' || d.pci as entity, d.pci, d.v, d.ts, l.crit_steps,
           if(s.value is null, null, least(s.value, d.v.gen_max)) as possible,
           case when d.v.kind = 'gpu'                         then 'no_load_known'
                when d.ts < as_of - to_seconds(fresh_s(coalesce(p.interval_s, 60))) then 'no_samples'
                when d.v.gen is null and d.v.asleep           then 'suspended'
                when d.v.gen is null                          then if(z.reason = 'not_supported', 'not_supported', 'unreadable')
                when s.value is null                          then 'not_learned'
                when d.v.gen < possible                       then if(d.v.slowest <> d.pci, 'slow_uplink', 'slow_link')
                else 'full_speed' end as code
    from on_bus d
    join limits_pcie_speed l on l.node = d.node and l.model = ''
    left join best_shown(as_of, 'pci', 'path_gen_best') s on s.node = d.node and s.entity = 'pci:' || d.pci
    left join (select node, max(interval_s) as interval_s from probe where probe = 'pci' group by node) p on p.node = d.node
    left join (select node, entity, max_by(reason, since) as reason from capability
               where probe = 'pci' and metric = 'pcie_gen' and since <= as_of group by node, entity) z
           on z.node = d.node and z.entity = 'pci:' || d.pci
    where d.card_uuid is null
),
judged as (
    select node, entity, pci, v, code, crit_steps, possible::double as expected,
           (case when code = 'slow_uplink' or read = 0 then v.gen else gen end)::double as gen,
           case when code = 'slow_link' and slow_at is not null then slow_at
                when code in ('slow_link', 'slow_uplink') then bus_at else seen_at end as ts,
           loaded, samples, bad, lost
    from cards
    union all
    select node, entity, pci, v, code, crit_steps, possible, v.gen, ts, null, null, [], [] from others
)
select node, entity,
       case when code = 'full_speed' then 'ok'
            when code in ('slow_link', 'slow_uplink') then if(expected - gen >= crit_steps, 'crit', 'warn')
            when code in ('idle', 'not_supported', 'no_load_known', 'not_told', 'not_learned', 'suspended') then 'n/a'
            else 'unknown' end as verdict,
       code, gen as observed, expected, 'generation' as unit, ts as evidence_at,
       case code when 'full_speed' then format('PCIe generation {:.0f}', gen)
            when 'slow_link' then format('PCIe generation {:.0f} of {:.0f} at {}{}', gen, expected, pci,
                 if(loaded is null, '', format(' under load ({} of {} samples)', loaded, samples)))
            when 'slow_uplink' then format('PCIe generation {:.0f} of {:.0f} at {}, a switch on the way to {}', gen, expected,
                 v.slowest, pci)
            when 'idle' then 'idle: a link without work may slow down'
            when 'no_load_known' then 'whether it works is not known'
            when 'not_supported' then 'no PCIe link that can be read'
            when 'not_told' then 'what card and slot can do is not told'
            when 'not_learned' then 'what to expect is not known yet'
            when 'suspended' then 'the device sleeps and is not woken'
            when 'no_samples' then 'no samples'
            when 'not_read' then unread_words(lost)
            when 'unreadable' then 'the speed of the link, or the load, cannot be read'
            else 'the card does not answer' end as reason,
       json_object('pci', pci, 'path', v.path, 'path_links', v.links, 'slowest', v.slowest, 'loaded_samples', loaded,
                   'samples', samples, 'by', noted(bad, lost)) as detail
from judged;
