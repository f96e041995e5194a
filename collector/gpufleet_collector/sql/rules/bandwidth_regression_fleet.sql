/*
title         = "All cards of a model slower than they were"
scope         = "node"
every         = "5m"
weight        = 7
for           = "2 of 3"
runbook       = "bandwidth_regression_fleet"

[limits]
step_ratio    = { value = 0.97, source = "own choice: 3 % of a whole fleet is a change, not scatter" }
min_cards     = { value = 5,    source = "own choice: fewer cards are no fleet" }
min_nodes     = { value = 3,    source = "own choice: fewer hosts are hosts" }
*/

-- The middle card of a model, or of those with one driver, fell below its own baseline: a driver, a firmware, a setting,
-- not a card. One verdict for each model (node ''), by the bench that lost most.
create or replace macro find_bandwidth_regression_fleet(as_of) as table
with lim as (
    select coalesce(max(step_ratio), 0.97) as step_ratio, coalesce(max(min_cards), 5) as min_cards,
           coalesce(max(min_nodes), 3) as min_nodes
    from limits_bandwidth_regression_fleet
),
step as (
    select model, key, driver, any_value(bench) as bench, median(d) as d, count(*) as n, count(distinct node) as nodes,
           max(ok_at) as ok_at, split_part(mode(base_epoch), '/', 1) as base_driver, any_value(unit) as unit
    from bench_series(as_of)
    where d is not null and recent and entity like 'gpu:%'
    group by grouping sets ((model, key), (model, key, driver))
),
worst as (
    -- where all have one driver, the group that names it
    select s.model, max(s.ok_at) as newest_at, any_value(l.step_ratio) as step_ratio,
           min_by(s, struct_pack(a := round(s.d, 6), b := s.driver is null))
               filter (s.n >= l.min_cards and s.nodes >= l.min_nodes) as s,
           any_value(l.min_cards) as min_cards, any_value(l.min_nodes) as min_nodes
    from step s, lim l
    group by s.model
)
select '' as node, 'domain:model=' || model as entity,
       case when s is null then 'n/a' when s.d < ln(step_ratio) then 'warn' else 'ok' end as verdict,
       case when s is null then 'too_few' when s.d < ln(step_ratio) then 'fleet_step' else 'as_before' end as code,
       exp(s.d) as observed, 1.0::double as expected, 'ratio' as unit,
       if(s.d < ln(step_ratio), s.ok_at, newest_at) as evidence_at,
       coalesce(format('{} of {}: the middle one of {} cards on {} nodes is {:.1f} % {} its baseline{}', s.bench, model, s.n,
              s.nodes, abs(1 - exp(s.d)) * 100, if(s.d < 0, 'below', 'above'),
              case when s.driver <> coalesce(s.base_driver, '')
                   then format(' since driver {} (before: {})', s.driver, s.base_driver) else '' end),
              format('fewer than {:.0f} cards on {:.0f} nodes have results to compare', min_cards, min_nodes)) as reason,
       json_object('bench', s.bench, 'key', s.key, 'model', model, 'cards', s.n, 'nodes', s.nodes, 'ratio', exp(s.d),
                   'driver', s.driver, 'baseline_driver', s.base_driver) as detail
from worst;
