-- What the rules share: who should be there, who is there, and in which state they are.
-- Tables are named without a schema: the caller's search_path says whether they are live or replayed.

-- The series a bench result belongs to; also the key of its baseline.
create or replace macro bench_key(bench, version, convention, params_hash, link) as
    concat_ws('/', bench, coalesce(version, ''), coalesce(convention, ''), coalesce(params_hash, ''), coalesce(link, ''));

-- How long a value stays good: three intervals of its probe, at least 30 s. An agent says its intervals itself: no more
-- than five minutes are believed, else a dead card would stay well for as long as its agent likes.
create or replace macro fresh_s(interval_s) as greatest(3 * least(coalesce(interval_s, 0), 300), 30);

-- Growth of a counter of seconds between two samples. It cannot grow faster than time (10 % and half a second are for
-- clocks that do not agree): a step that does, or one down, is a reset or a bad sample and counts 0.
create or replace macro counter_step(newer, older, elapsed_s) as
    case when newer is null or older is null then null
         when newer > older and newer - older <= 1.1 * elapsed_s + 0.5 then newer - older else 0 end;

-- The same over a span of samples, of which some may be bad: 0 when it fell anywhere on the way.
create or replace macro counter_span(lowest, first_value, last_value, highest, elapsed_s) as
    case when lowest = first_value and highest = last_value then counter_step(last_value, first_value, elapsed_s)
         when lowest is not null then 0 end;

-- The step to the newest of [{ts, s}, ...], newest first, from the one before it.
create or replace macro newest_step(samples) as
    counter_step(samples[1].s, list_filter(samples, lambda x: x.ts < samples[1].ts)[1].s,
                 epoch(samples[1].ts - list_filter(samples, lambda x: x.ts < samples[1].ts)[1].ts));

-- The expectation that holds at as_of: a node's newest accepted set, else its learned one.
-- A node that should have no card is one row without uuid and serial.
create or replace macro expected_at(as_of) as table
    select e.node, e.uuid, e.serial, e.pci, e.model, e.slot, e.state, e.set_by, e.set_at, e.reason
    from expected e
    join (
        select node,
               coalesce(max(set_at) filter (state = 'accepted'), max(set_at))  as set_at,
               case when bool_or(state = 'accepted') then 'accepted' else 'learned' end as state
        from expected
        where set_at <= as_of
        group by node
    ) newest using (node, set_at, state);

-- Cards in the hosts at as_of, as their agents said.
create or replace macro inventory_at(as_of) as table
    select node, uuid as gpu_uuid, serial, pci, slot, model, gpu_index, valid_from
    from inventory
    where kind = 'gpu' and uuid is not null and valid_from <= as_of and (valid_to is null or valid_to > as_of);

-- The best that each entity of a kind has shown in one attribute (a number) since its node's expectation was set: the
-- links that were up, the rate a port had. Accepting the inventory anew starts it anew. Without an expectation: ever.
create or replace macro best_shown(as_of, of_kind, attribute) as table
    select i.node, i.entity, max(try_cast(json_extract_string(i.attributes, '$.' || attribute) as double)) as value,
           max(i.valid_from) as shown_at
    from inventory i
    left join (select node, max(set_at) as set_at from expected_at(as_of) group by node) e on e.node = i.node
    where i.kind = of_kind and i.valid_from <= as_of and coalesce(i.valid_to, as_of) >= coalesce(e.set_at, i.valid_from)
    group by i.node, i.entity
    having value is not null;

-- Every card that is expected or in a host at as_of, once per node. What is known of a card that is gone stays
-- known. A card expected by serial alone that was never seen has no gpu_uuid.
create or replace macro card_list(as_of) as table
with known as (
    select node, uuid as gpu_uuid,
           bool_or(valid_to is null or valid_to > as_of)     as installed,
           max_by(nullif(trim(serial), ''), valid_from)      as serial,
           max_by(nullif(pci, ''), valid_from)               as pci,
           max_by(nullif(slot, ''), valid_from)              as slot,
           max_by(nullif(model, ''), valid_from)             as model,
           max_by(gpu_index, valid_from)                     as gpu_index
    from inventory
    where kind = 'gpu' and uuid is not null and valid_from <= as_of
    group by node, uuid
),
wanted as (
    select node, nullif(uuid, '') as uuid, nullif(trim(serial), '') as serial, nullif(pci, '') as pci,
           nullif(model, '') as model, nullif(slot, '') as slot, state
    from expected_at(as_of)
    where coalesce(nullif(uuid, ''), nullif(serial, '')) is not null
),
by_serial as (select * from wanted where uuid is null)
select coalesce(k.node, w.node)                                 as node,
       coalesce(k.gpu_uuid, w.uuid)                             as gpu_uuid,
       'gpu:' || coalesce(k.gpu_uuid, w.uuid)                   as entity,
       coalesce(k.serial, w.serial)                             as serial,
       coalesce(k.pci, w.pci)                                   as pci,
       w.pci                                                    as expected_pci,
       coalesce(k.slot, w.slot)                                 as slot,
       coalesce(k.model, w.model)                               as model,
       k.gpu_index,
       coalesce(k.installed, false)                             as installed,
       coalesce(w.state, 'none')                                as expectation
from known k
full join (from wanted where uuid is not null) w on w.node = k.node and lower(w.uuid) = lower(k.gpu_uuid)
where w.node is not null
   or k.installed and not exists (from by_serial b where b.node = k.node and lower(b.serial) = lower(k.serial))
union all
select b.node, k.gpu_uuid, 'gpu:' || coalesce(k.gpu_uuid, 'serial/' || b.serial), b.serial, coalesce(k.pci, b.pci),
       b.pci, coalesce(k.slot, b.slot), coalesce(k.model, b.model), k.gpu_index, coalesce(k.installed, false), b.state
from by_serial b
left join known k on k.node = b.node and lower(k.serial) = lower(b.serial);

-- Every node that is expected or has said hello by as_of. expected_gpus is NULL without an expectation.
create or replace macro node_list(as_of) as table
select coalesce(e.node, n.node)           as node,
       coalesce(e.state, 'none')          as expectation,
       e.gpus                             as expected_gpus,
       e.set_at                           as expected_since,
       n.hello_at, n.agent_version, n.boot_id, n.machine_id, n.claimed,
       coalesce(n.conflict, '')           as conflict
from (
    select node, any_value(state) as state, max(set_at) as set_at,
           count(*) filter (coalesce(nullif(uuid, ''), nullif(serial, '')) is not null) as gpus
    from expected_at(as_of)
    group by node
) e
full join (
    select node, max(hello_at) as hello_at, max_by(agent_version, hello_at) as agent_version,
           max_by(boot_id, hello_at) as boot_id, max_by(machine_id, hello_at) as machine_id,
           max_by(claimed, hello_at) as claimed, max_by(conflict, hello_at) as conflict
    from node
    where first_seen <= as_of
    group by node
) n on n.node = e.node;

-- When each node was last heard, on the collector's clock; NULL = not within lookback.
create or replace macro heard_at(as_of, lookback) as table
    select node, max(received_at) as received_at,
           max_by(offset_s, received_at) filter (lane = 'live') as offset_s
    from ledger
    where received_at > as_of - lookback::interval and received_at <= as_of
    group by node;

-- Findings that count for the state of things at as_of: firing or recovering, of rules that are not in shadow.
create or replace macro findings_at(as_of) as table
    select f.*
    from finding f left join rule r on r.rule = f.rule
    where not coalesce(r.shadow, false)
      and f.fired_at <= as_of and (f.resolved_at is null or f.resolved_at > as_of)
      and f.state <> 'pending';

-- What open findings rest on: the metrics ('probe.metric') that its detail names in `by`, without those that
-- the entity has lost for good. While one of them is not read, whatever else is well proves nothing against it.
create or replace macro found_by(as_of) as table
with open as (
    select rule, node, entity, 'pci:' || json_extract_string(detail, '$.pci') as device,
           unnest(json_extract_string(detail, '$.by[*]')) as metric
    from finding where state <> 'resolved' and began_at <= as_of
),
lost as (
    select c.node, c.entity, c.probe || '.' || c.metric as metric
    from capability c semi join open o on o.node = c.node and o.metric = c.probe || '.' || c.metric
    where c.since <= as_of
    group by c.node, c.entity, c.probe, c.metric
    having max_by(c.reason, c.since) = 'not_supported'
)
select o.rule, o.node, o.entity, list(o.metric order by o.metric) as metrics
from open o
left join lost l on l.node = o.node and l.metric = o.metric and (l.entity = o.entity or l.entity = o.device)
where l.node is null
group by o.rule, o.node, o.entity;

-- Those of `metrics` that are not in `seen`; none where there is no finding.
create or replace macro unread(metrics, seen) as
    list_filter(coalesce(metrics, []::varchar[]), lambda metric: not coalesce(list_contains(seen, metric), false));

-- What a bad verdict notes in its detail as `by`: what is bad now, and what was and is not read. NULLs in `bad` are none.
create or replace macro noted(bad, not_read) as
    list_sort(list_distinct(list_concat(list_filter(bad, lambda metric: metric is not null), not_read)));

-- What the reason says of them.
create or replace macro unread_words(not_read) as 'what it was found by is not read: ' || array_to_string(not_read, ', ');

-- Who holds which card at as_of: the rows of each node's newest look at processes, while it is fresh. A node whose look
-- found nobody has none.
create or replace macro jobs_at(as_of) as table
with look as (
    select a.node, max(a.ts) as ts, max_by(a.received_at, a.ts) as received_at
    from agent_samples() a
    where a.probe = 'job' and a.ok and a.ts > as_of - interval 15 minute and a.ts <= as_of
    group by a.node
)
select j.*, if(j.job_kind = 'slurm', '', j.node) as job_node, epoch(as_of - l.received_at) as age_s
from look l
left join (select node, max(interval_s) as interval_s from probe where probe = 'job' group by node) p on p.node = l.node
join job_samples() j on j.node = l.node and j.ts = l.ts
where epoch(as_of - l.received_at) <= fresh_s(p.interval_s) and j.ts > as_of - interval 15 minute;

-- One row per card that is expected or seen: its state, the age of what is known, its last values, its findings.
create or replace macro cards_at(as_of, lookback) as table
with newest as (
    select node, gpu_uuid, max(ts) as ts
    from gpu_samples()
    where ts > as_of - lookback::interval and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid
),
sample as (
    -- a sample may have been sent twice
    select distinct on (g.node, g.gpu_uuid)
           g.* replace (least(g.ts, g.received_at) as received_at), g.received_at as arrived_at
    from gpu_samples() g
    join newest n on n.node = g.node and n.gpu_uuid = g.gpu_uuid and n.ts = g.ts
    where g.ts > as_of - lookback::interval and g.ts <= as_of
),
trouble as (
    select node, entity,
           bool_or(verdict = 'crit') as critical, bool_or(coalesce(flapping, false)) as flapping,
           list({'id': id, 'rule': rule, 'state': state, 'verdict': verdict, 'code': code, 'reason': reason,
                 'since': began_at, 'incident': incident} order by verdict, id) as findings
    from findings_at(as_of)
    group by node, entity
),
joined as (
    select coalesce(c.node, s.node) as node, coalesce(s.gpu_index, c.gpu_index) as gpu_index,
           coalesce(c.gpu_uuid, s.gpu_uuid) as gpu_uuid, coalesce(c.entity, 'gpu:' || s.gpu_uuid) as entity, c.serial,
           coalesce(s.pci, c.pci) as pci, c.expected_pci, c.slot, c.model,
           coalesce(c.expectation, 'none') as expectation,
           s.* exclude (node, gpu_uuid, gpu_index, pci, state, received_at, arrived_at),
           s.arrived_at as received_at,
           coalesce(s.state, 'none')                                  as presence,
           epoch(as_of - s.received_at)                               as age_s,
           coalesce(epoch(as_of - s.received_at) <= fresh_s(p.interval_s), false) as fresh,
           coalesce(t.critical, false)                                as critical,
           coalesce(t.flapping, false)                                as flapping,
           coalesce(t.findings, [])                                   as findings,
           w.node is not null as in_maintenance, q.node is not null as silenced
    from card_list(as_of) c
    full join sample s on s.node = c.node and s.gpu_uuid = c.gpu_uuid
    left join (select node, max(interval_s) as interval_s from probe where probe = 'gpu' group by node) p
           on p.node = coalesce(c.node, s.node)
    left join trouble t on t.node = coalesce(c.node, s.node)
          and t.entity = coalesce(c.entity, 'gpu:' || s.gpu_uuid)
    left join (select distinct node from maintenance_at(as_of)) w on w.node = coalesce(c.node, s.node)
    left join (select distinct node, entity from silenced_at(as_of)) q
           on q.node = coalesce(c.node, s.node) and q.entity = coalesce(c.entity, 'gpu:' || s.gpu_uuid)
)
select node, gpu_index, gpu_uuid, entity, serial, pci, slot, model,
       case when critical then 'critical'
            when len(findings) > 0 then 'degraded'
            when not fresh or presence <> 'ok' then 'unknown'
            else 'ok' end                                             as state,
       expectation, presence, ts, received_at, age_s,
       util_pct, sm_clock_mhz, mem_clock_mhz, power_w, power_limit_w, temperature_c, mem_used_bytes, mem_total_bytes,
       pstate, clock_reasons, pcie_gen, pcie_width,
       expected_pci is not null and pci <> expected_pci               as moved,
       findings,
       list_concat(list_concat(if(fresh, []::varchar[], ['stale']), if(flapping, ['flapping'], []::varchar[])),
                   people_flags(in_maintenance, silenced)) as flags
from joined;

-- One row per node that is expected or known: its state, its cards by state (ok + degraded + critical + no data =
-- expected), its own findings, when it was last heard.
create or replace macro nodes_at(as_of, lookback) as table
with cards as (
    select node,
           count(*) filter (expectation <> 'none' and state = 'ok')        as gpus_ok,
           count(*) filter (expectation <> 'none' and state = 'degraded')  as gpus_degraded,
           count(*) filter (expectation <> 'none' and state = 'critical')  as gpus_critical,
           count(*) filter (expectation <> 'none' and state = 'unknown')   as gpus_no_data,
           count(*) filter (expectation <> 'none')                         as gpus_expected,
           count(*) filter (expectation = 'none')                          as gpus_extra,
           max(case state when 'critical' then 3 when 'unknown' then 2 when 'degraded' then 1 else 0 end) as worst,
           any_value(model)                                                as model
    from cards_at(as_of, lookback)
    group by node
),
own as (
    select node,
           max(case when rule = 'agent_silent' then 0 when verdict = 'crit' then 3 else 1 end) as worst,
           bool_or(coalesce(flapping, false)) as flapping,
           max(try_cast(json_extract_string(detail, '$.last_heard') as timestamp)) filter (rule = 'agent_silent') as heard_at,
           list({'id': id, 'rule': rule, 'state': state, 'verdict': verdict, 'code': code, 'reason': reason,
                 'since': began_at, 'incident': incident} order by verdict, id) as findings
    from findings_at(as_of)
    -- a job's trouble is the job's: it says nothing against the host
    where entity not like 'gpu:%' and entity not like 'job:%'
    group by node
),
joined as (
    select n.*, c.* exclude (node, worst), h.offset_s,
           coalesce(c.worst, 0) as cards_worst, coalesce(o.worst, 0) as own_worst,
           coalesce(o.findings, []) as findings, coalesce(o.flapping, false) as flapping,
           greatest(h.received_at, o.heard_at, case when n.hello_at <= as_of then n.hello_at end) as received_at,
           w.node is not null as in_maintenance, q.node is not null as silenced
    from node_list(as_of) n
    left join cards c using (node)
    left join own o using (node)
    left join heard_at(as_of, lookback) h using (node)
    left join (select distinct node from maintenance_at(as_of)) w using (node)
    left join (select distinct node from silenced_at(as_of)) q using (node)
),
aged as (
    select *, epoch(as_of - received_at) as age_s,
           coalesce(epoch(as_of - received_at) > 90, true) as silent
    from joined
)
select node,
       case greatest(cards_worst, own_worst, if(silent, 2, 0))
            when 3 then 'critical' when 2 then 'unknown' when 1 then 'degraded' else 'ok' end as state,
       expectation, model,
       coalesce(gpus_expected, 0) as gpus_expected, coalesce(gpus_ok, 0) as gpus_ok,
       coalesce(gpus_degraded, 0) as gpus_degraded, coalesce(gpus_critical, 0) as gpus_critical,
       coalesce(gpus_no_data, 0) as gpus_no_data, coalesce(gpus_extra, 0) as gpus_extra,
       received_at, age_s, silent, hello_at, agent_version, boot_id, machine_id, claimed, conflict, offset_s,
       findings,
       list_concat(list_concat(if(silent, ['stale'], []::varchar[]), if(flapping, ['flapping'], []::varchar[])),
                   people_flags(in_maintenance, silenced)) as flags
from aged;
