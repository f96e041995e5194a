/*
title         = "A rule does not run"
scope         = "rule"
every         = "20s"
weight        = 0.5
for           = "2 of 3"
clear_after   = "1m"
max_severity  = "warn"
runbook       = "rule_failed"

[limits]
slow_s        = { value = 5, source = "own choice: half of the time after which it is stopped" }
*/

-- How the newest run of every other rule went, as the judge noted it (at most once a minute where nothing changed). What a
-- rule that fails should have found is unknown: that is a finding of its own, on the collector. A rule that waits for a
-- probe and one that people switched off do not apply.
create or replace macro find_rule_failed(as_of) as table
with judged as (
    select r.rule, r.run_at, r.seconds, r.error, l.slow_s,
           case when r.status = 'disabled'                                             then 'disabled'
                when r.status = 'n/a: no such probe' and r.error like 'waits for%'     then 'waits'
                when r.run_at is null or r.run_at < as_of - to_seconds(greatest(3 * r.every_s, 180)) then 'not_run'
                when r.status = 'n/a: no such probe'                                   then 'broken'
                when r.status = 'failed'                                               then 'failed'
                when r.status = 'too slow'                                             then 'stopped'
                when r.seconds > l.slow_s                                              then 'slow'
                else 'runs' end as code
    from rule r, (select max(slow_s) as slow_s from limits_rule_failed where model = '') l
    where r.rule <> 'rule_failed' and coalesce(r.run_at <= as_of, true)
)
select '(collector)' as node, 'rule:' || rule as entity,
       case when code = 'runs' then 'ok' when code in ('disabled', 'waits') then 'n/a' when code = 'not_run' then 'unknown'
            else 'warn' end as verdict,
       code, seconds as observed, slow_s as expected, 's' as unit, run_at as evidence_at,
       case code when 'runs' then format('rule {} runs', rule)
            when 'disabled' then format('rule {} is switched off', rule)
            when 'waits' then format('rule {} {}', rule, error)
            when 'not_run' then format('rule {} has not run lately', rule)
            when 'broken' then format('rule {} cannot be made: {}', rule, error)
            when 'failed' then format('rule {} fails: {}', rule, error)
            when 'stopped' then format('rule {} takes too long: {}', rule, error)
            else format('rule {} takes {:.1f} s, more than {:g} s', rule, seconds, slow_s) end as reason,
       json_object('rule', rule, 'error', error, 'seconds', seconds) as detail
from judged;
