/*
title         = "Wrong results without an error"
scope         = "gpu"
every         = "60s"
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
with run as (
    select b.node, b.entity, b.bench, b.ts, b.status, b.reason, b.peer,
           b.status = 'failed' and starts_with(coalesce(b.reason, ''), 'corrupt: ') as wrong
    from bench b
    where b.ts > as_of - interval 90 day and b.ts <= as_of and b.entity like 'gpu:%'
),
card as (
    select c.node, c.entity, l.wrong_runs, l.clean_runs, l.window_s, as_of - to_seconds(l.window_s) as since
    from card_list(as_of) c
    join limits_bench_corrupt l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
per_card as (
    select c.node, c.entity, any_value(c.wrong_runs) as wrong_runs, any_value(c.clean_runs) as clean_runs,
           any_value(c.window_s) as window_s, count(r.ts) as runs,
           count(distinct r.ts) filter (r.wrong) as n, max(r.ts) filter (r.wrong) as wrong_at,
           max_by({'bench': r.bench, 'reason': r.reason, 'peer': r.peer}, r.ts) filter (r.wrong) as last,
           list(distinct r.bench) filter (r.wrong) as benches,
           max(r.ts) filter (r.status = 'ok') as ok_at
    from card c
    left join run r on r.node = c.node and r.entity = c.entity and r.ts > c.since
    group by c.node, c.entity
),
counted as (
    select p.node, p.entity, count(distinct r.ts) as n_clean
    from per_card p
    join run r on r.node = p.node and r.entity = p.entity and r.bench = p.last.bench and r.status = 'ok' and r.ts > p.wrong_at
    group by p.node, p.entity
),
judged as (
    select p.*, coalesce(k.n_clean, 0) as n_clean,
           case when p.n >= p.wrong_runs                                    then 'repeated'
                when p.n > 0 and coalesce(k.n_clean, 0) < p.clean_runs      then 'once'
                when p.n > 0                                                then 'right_since'
                when p.ok_at is not null                                    then 'right'
                when p.runs > 0                                             then 'no_result'
                else 'no_bench' end as code
    from per_card p
    left join counted k on k.node = p.node and k.entity = p.entity
)
select node, entity,
       case code when 'repeated' then 'crit' when 'once' then 'warn' when 'no_result' then 'unknown' when 'no_bench' then 'n/a'
            else 'ok' end as verdict,
       code, if(code in ('no_result', 'no_bench'), null, n)::double as observed, 0::double as expected, 'count' as unit,
       case when code in ('repeated', 'once') then wrong_at else ok_at end as evidence_at,
       case code when 'repeated' then format('{} runs with wrong bits in {:.0f} days; {}: {}', n, window_s / 86400, last.bench,
                                             substr(last.reason, 10))
            when 'once' then format('{}: {}; {} of {:.0f} right runs since', last.bench, substr(last.reason, 10), n_clean, clean_runs)
            when 'right_since' then format('{} was wrong once, and right {} times since', last.bench, n_clean)
            when 'right' then 'no result was wrong'
            when 'no_result' then 'no benchmark has given a result'
            else 'no benchmark has run' end as reason,
       json_object('bench', last.bench, 'benches', benches, 'peer', nullif(last.peer, ''), 'wrong_at', wrong_at, 'last_ok', ok_at,
                   'right_since', n_clean, 'action', if(code = 'repeated', 'drain_rma', null)) as detail
from judged;
