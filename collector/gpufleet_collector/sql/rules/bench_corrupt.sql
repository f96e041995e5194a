/*
title         = "Wrong results without an error"
scope         = "gpu"
every         = "5m"
weight        = 2
for           = "1 of 1"
also          = ["silent_corruption"]
runbook       = "bench_corrupt"

[limits]
wrong_runs    = { value = 2,       source = "own choice: a second run with wrong bits is no chance" }
clean_runs    = { value = 5,       source = "own choice: so many right runs of the bench that was wrong once" }
window_s      = { value = 2592000, source = "own choice: 30 days; such faults come and go" }
*/

-- Benchmarks whose result had other bits than it must have, by their reason. One such run is a warning, and is gone after
-- some right ones of the same bench. Two are critical and stay: the card calculates or copies wrong, and jobs do not notice.
create or replace macro find_bench_corrupt(as_of) as table
with card as (
    select c.node, c.entity, l.wrong_runs, l.clean_runs, l.window_s, as_of - to_seconds(l.window_s) as since
    from card_list(as_of) c
    join limits_bench_corrupt l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
wrong as (
    select c.node, c.entity, count(distinct b.ts) as n, max(b.ts) as wrong_at, list(distinct b.bench) as benches,
           max_by({'bench': b.bench, 'reason': b.reason, 'peer': b.peer}, b.ts) as last
    from card c
    join bench b on b.node = c.node and b.entity = c.entity and b.ts > c.since
    where b.ts > as_of - interval 90 day and b.ts <= as_of and b.status = 'failed' and starts_with(b.reason, 'corrupt: ')
    group by c.node, c.entity
),
clean as (
    select w.node, w.entity, count(distinct b.ts) as n
    from wrong w
    join bench b on b.node = w.node and b.entity = w.entity and b.bench = w.last.bench and b.ts > w.wrong_at
    where b.ts <= as_of and b.status = 'ok'
    group by w.node, w.entity
),
newest as (
    select node, entity, max(ts) filter (status = 'ok') as ok_at, count(*) as runs
    from bench where ts > as_of - interval 7 day and ts <= as_of and entity like 'gpu:%'
    group by node, entity
),
judged as (
    select c.node, c.entity, c.clean_runs, c.window_s, w.* exclude (node, entity), coalesce(k.n, 0) as n_clean, r.ok_at,
           case when w.n >= c.wrong_runs                         then 'repeated'
                when w.n > 0 and coalesce(k.n, 0) < c.clean_runs then 'once'
                when w.n > 0                                     then 'right_since'
                when r.ok_at is not null                         then 'right'
                when r.runs > 0                                  then 'no_result'
                else 'no_bench' end as code
    from card c
    left join wrong w on w.node = c.node and w.entity = c.entity
    left join clean k on k.node = c.node and k.entity = c.entity
    left join newest r on r.node = c.node and r.entity = c.entity
)
select node, entity,
       case code when 'repeated' then 'crit' when 'once' then 'warn' when 'no_result' then 'unknown' when 'no_bench' then 'n/a'
            else 'ok' end as verdict,
       code, if(code in ('no_result', 'no_bench'), null, coalesce(n, 0))::double as observed, 0::double as expected, 'count' as unit,
       case when code in ('repeated', 'once') then wrong_at else ok_at end as evidence_at,
       case code when 'repeated' then format('{} runs with wrong bits in {:.0f} days; {}: {}', n, window_s / 86400, last.bench,
                                             substr(last.reason, 10))
            when 'once' then format('{}: {}; {} of {:.0f} right runs since', last.bench, substr(last.reason, 10), n_clean, clean_runs)
            when 'right_since' then format('{} was wrong once, and right {} times since', last.bench, n_clean)
            when 'right' then 'no result was wrong'
            when 'no_result' then 'no benchmark has given a result for a week'
            else 'no benchmark has run for a week' end as reason,
       json_object('bench', last.bench, 'benches', benches, 'peer', nullif(last.peer, ''), 'wrong_at', wrong_at, 'last_ok', ok_at,
                   'right_since', n_clean, 'action', if(code = 'repeated', 'drain_rma', null)) as detail
from judged;
