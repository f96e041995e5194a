-- Every benchmark run beside its baseline; ratio below 1 is worse, NULL where the run has no value or no baseline.
create or replace view main.bench_history as
select r.ts, r.node, r.entity, r.bench, r.version, r.link, r.status, r.reason, r.value, r.unit, r.spread, r.repeats,
       b.value as baseline, b.state as baseline_state, b.n as baseline_n,
       if(r.unit in ('us', 'ms', 's'), b.value / r.value, r.value / b.value) as ratio,
       r.temperature_c, r.power_w, r.sm_clock_mhz, r.clock_reasons, r.driver
from main.bench r
left join main.baseline b
       on b.node = r.node and b.entity = r.entity
      and b.key = bench_key(r.bench, r.version, r.convention, r.params_hash, r.link);
