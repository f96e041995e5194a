-- Each card minute by minute: load, clocks, power, heat, why the clock was not higher.
create or replace view main.gpu_history as
select time_bucket(interval 1 minute, ts)     as minute,
       node, gpu_uuid, max_by(gpu_index, ts)  as gpu_index,
       count(*)                               as samples,
       count(*) filter (state = 'ok')         as samples_ok,
       avg(util_pct)                          as util_pct,
       avg(sm_clock_mhz)                      as sm_clock_mhz,
       min(sm_clock_mhz_min)                  as sm_clock_mhz_min,
       avg(power_w)                           as power_w,
       max(temperature_c)                     as temperature_c,
       max(mem_used_bytes)                    as mem_used_bytes,
       bit_or(clock_reasons)                  as clock_reasons
from main.gpu
group by minute, node, gpu_uuid;
