/*
title         = "All cards of the host slower than they were"
scope         = "node"
every         = "5m"
weight        = 6
for           = "16 of 20"
boot_grace    = "5m"
runbook       = "bandwidth_regression_host"
*/

-- Half of the cards of a host, and at least two, fell below their own baselines in one round, their peers on other hosts
-- did not: something of the host. It needs more rounds than a card does: a neighbour on the host slows all cards for
-- hours, and a gate that missed it once misses it each time. A round is counted once, at the first card's run; one that
-- somebody asked for is none.
create or replace macro find_bandwidth_regression_host(as_of) as table
with fell as (
    select node, model, key, any_value(bench) as bench, bool_or(host_down) as down, any_value(host_n) as n,
           any_value(host_n_down) as n_down, any_value(host_net) as net, any_value(host_ok_at) as ok_at,
           any_value(host_down_at) as down_at, any_value(host_asked) as asked, max(driver) as driver,
           split_part(max(base_epoch), '/', 1) as base_driver,
           any_value(c) as c
    from bench_series(as_of)
    where host_n >= 2 and entity like 'gpu:%' and d is not null and recent
    group by node, model, key
),
worst as (
    select max_by(f, struct_pack(a := down, b := -net, c := key)) as f from fell f group by node
)
select f.node as node, 'node:' as entity, if(f.down, 'warn', 'ok') as verdict,
       if(f.down, 'host_slower', 'as_before') as code, exp(f.net) as observed, 1.0::double as expected, 'ratio' as unit,
       case when not f.asked then if(f.down, f.down_at, f.ok_at) end as evidence_at,
       format('{}: {} of {} cards are slower; the middle one is {:.1f} % {} its baseline{}', f.bench, f.n_down, f.n,
              abs(1 - exp(f.net)) * 100, if(f.net < 0, 'below', 'above'),
              if(f.driver <> coalesce(f.base_driver, ''),
                 format('; driver {}, baselines of {}', f.driver, f.base_driver), '')) as reason,
       json_object('bench', f.bench, 'key', f.key, 'model', f.model, 'cards', f.n, 'cards_down', f.n_down,
                   'net_ratio', exp(f.net), 'peers_ratio', exp(f.c), 'driver', f.driver,
                   'baseline_driver', f.base_driver) as detail
from worst
union all
select node, 'node:', 'n/a', 'no_round', null, null, 'ratio', null,
       'no round of benchmarks on two cards of one model with baselines', null
from node_list(as_of) where hello_at is not null and node not in (select w.f.node from worst w);
