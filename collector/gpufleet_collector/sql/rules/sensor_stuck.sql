/*
title         = "Sensor of a card is stuck"
scope         = "gpu"
every         = "60s"
weight        = 2.5
for           = "8 of 8"
min_duration  = "10m"
clear_after   = "5m"
max_severity  = "warn"
runbook       = "sensor_stuck"

[limits]
window_s      = { value = 300, source = "own choice: a die follows its load within seconds" }
settle_s      = { value = 10,  source = "what a sample may need to arrive" }
power_share   = { value = 0.3, source = "own choice: power that moves this much moves the temperature by several degrees" }
power_w       = { value = 50,  source = "own choice" }
util_points   = { value = 30,  source = "own choice" }
*/

-- Five minutes up to the newest whole one, minute by minute: a temperature, power or utilisation that did not move at all
-- while the load did. Nothing moves on a card that idles or works evenly: not judged. 0 and 100 % are utilisations that a
-- card may keep.
create or replace macro find_sensor_stuck(as_of) as table
with card as (
    select c.node, c.entity, c.gpu_uuid, l.* exclude (node, model),
           floor((epoch(as_of) - l.settle_s) / 60) * 60 as until_s
    from card_list(as_of) c
    join limits_sensor_stuck l on l.node = c.node and l.model = coalesce(c.model, '')
    where c.gpu_uuid is not null
),
minute as (
    select node, gpu_uuid, floor(epoch(ts) / 60) * 60 as minute, count(*) as samples, max(ts) as seen_at,
           max_by(state, ts) as state, count(temperature_c) as heats, min(temperature_c) as heat_low,
           max(temperature_c) as heat_high, min(power_w) as power_low, max(power_w) as power_high, avg(power_w) as power,
           min(util_pct) as util_low, max(util_pct) as util_high, avg(util_pct) as util
    from gpu
    where ts > as_of - interval 370 second and ts <= as_of and gpu_uuid is not null
    group by node, gpu_uuid, minute
),
span as (
    select m.node, m.gpu_uuid, sum(m.samples) as samples, count(*) as minutes, max(m.seen_at) as seen_at,
           max_by(m.state, m.minute) as state, sum(m.heats) as heats,
           min(m.heat_low) as heat_low, max(m.heat_high) as heat_high,
           min(m.power_low) as power_low, max(m.power_high) as power_high, max(m.power) - min(m.power) as power_moved,
           max(m.power) as power_most, min(m.util_low) as util_low, max(m.util_high) as util_high,
           max(m.util) - min(m.util) as util_moved
    from minute m join card c on c.node = m.node and c.gpu_uuid = m.gpu_uuid
    where m.minute >= c.until_s - c.window_s and m.minute < c.until_s
    group by m.node, m.gpu_uuid
),
moved as (
    select c.*, s.* exclude (node, gpu_uuid),
           coalesce(s.power_moved >= greatest(c.power_w, c.power_share * s.power_most), false) as by_power,
           coalesce(s.util_moved >= c.util_points, false)                                     as by_util
    from card c left join span s on s.node = c.node and s.gpu_uuid = c.gpu_uuid
),
judged as (
    select *,
           case when samples is null                                          then 'no_samples'
                when state in ('lost', 'hung')                                then state
                when minutes < 0.8 * window_s / 60 or samples < 12            then 'few_samples'
                when heats = 0 and power_high is null and util_high is null   then 'unreadable'
                when by_power and heat_low = heat_high and heats >= 0.9 * samples then 'temperature'
                when by_util and power_low = power_high                       then 'power'
                when by_power and util_low = util_high and util_low > 0 and util_low < 100 then 'utilisation'
                when by_power or by_util                                      then 'moving'
                else 'steady_load' end as code
    from moved
)
select node, entity,
       case when code = 'moving' then 'ok' when code in ('temperature', 'power', 'utilisation') then 'warn'
            when code = 'steady_load' then 'n/a' else 'unknown' end as verdict,
       code,
       case code when 'temperature' then heat_low when 'power' then power_low when 'utilisation' then util_low end as observed,
       null::double as expected,
       case code when 'temperature' then 'C' when 'power' then 'W' when 'utilisation' then '%' else '' end as unit,
       seen_at as evidence_at,
       case code when 'moving' then 'its sensors follow its load'
            when 'temperature' then format('{:.4g} C for {:.0f} min while its power moved by {:.0f} W', heat_low, window_s / 60, power_moved)
            when 'power' then format('{:.4g} W for {:.0f} min while its utilisation moved by {:.0f} points', power_low, window_s / 60, util_moved)
            when 'utilisation' then format('{:.4g} % for {:.0f} min while its power moved by {:.0f} W', util_low, window_s / 60, power_moved)
            when 'steady_load' then 'its load does not change' when 'no_samples' then 'no samples'
            when 'few_samples' then 'too few samples' when 'unreadable' then 'no sensor can be read'
            else 'the card does not answer' end as reason,
       json_object('power_moved_w', power_moved, 'util_moved', util_moved, 'samples', samples) as detail
from judged;
