/*
title         = "Certificate is about to end"
scope         = "node"
every         = "1m"
weight        = 0.5
for           = "2 of 2"
runbook       = "certificate_expiry"

[limits]
warn_s        = { value = 1209600, source = "two weeks: time to renew by hand" }
warn_share    = { value = 0.2,     source = "own choice: one that lives for a day is renewed by a machine, at a third before its end" }
crit_s        = { value = 259200,  source = "own choice: three days, a weekend" }
crit_share    = { value = 0.05,    source = "own choice" }
*/

-- How long the certificate of each agent, by its newest own row, and that of the collector still hold. Without one an agent
-- cannot send any more, without the collector's none can. Short lives are measured by their length. The agent counts by its
-- own clock, which is what will refuse a certificate, too.
create or replace macro find_certificate_expiry(as_of) as table
with newest as (
    select node, max(ts) as ts, max_by(certificate_life_s, ts) as life_s,
           max_by(certificate_left_s, ts) - epoch(as_of - max(ts)) as left_s
    from agent where probe = 'agent' and ts > as_of - interval 2 minute and ts <= as_of
    group by node
),
held as (
    select n.node, 'node:' as entity, a.ts, a.life_s, a.left_s, a.node is not null as heard, l.*  exclude (node, model)
    from node_list(as_of) n
    join limits_certificate_expiry l on l.node = n.node and l.model = ''
    left join newest a on a.node = n.node
    where n.hello_at is not null
    union all
    select '(collector)', 'agent:', as_of, epoch(c.valid_to - c.valid_from), epoch(c.valid_to - as_of),
           c.read_at > as_of - interval 3 hour, l.*
    from certificate c, (select max(columns(* exclude (node, model))) from limits_certificate_expiry where model = '') l
    where l.warn_s is not null
),
judged as (
    select *,
           case when not heard                                          then 'not_heard'
                when left_s is null                                     then 'no_certificate'
                when left_s <= 0                                        then 'expired'
                when left_s < least(crit_s, crit_share * life_s)        then 'days_left'
                when left_s < least(warn_s, warn_share * life_s)        then 'renew'
                else 'holds' end as code
    from held
)
select node, entity,
       case code when 'holds' then 'ok' when 'renew' then 'warn' when 'no_certificate' then 'n/a' when 'not_heard' then 'unknown'
            else 'crit' end as verdict,
       code, left_s as observed, least(warn_s, warn_share * life_s) as expected, 's' as unit, ts as evidence_at,
       case code when 'not_heard' then 'nothing heard for two minutes' when 'no_certificate' then 'it uses no certificate'
            when 'expired' then format('ended {:.1f} h ago', -left_s / 3600)
            when 'holds' then format('holds for {:.0f} days', left_s / 86400)
            else format('ends in {}', if(left_s < 172800, format('{:.0f} h', left_s / 3600), format('{:.0f} days', left_s / 86400))) end as reason,
       json_object('left_s', left_s, 'life_s', life_s) as detail
from judged;
