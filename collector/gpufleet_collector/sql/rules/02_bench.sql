-- What the rules about benchmarks share: what a series shows now, beside its own baseline and its peers, and what a card
-- of its kind should reach.

-- Scatter between runs of a well card, as a part of the value: no series is steadier than this.
create or replace macro bench_noise(bench) as
    case when bench in ('disk_read', 'memcpy', 'fio') or bench like 'tcp%' then 0.03
         when bench like 'allreduce%' or bench like 'all_reduce%' or bench like 'ib_%' then 0.01
         when bench like 'gemm%' or bench like 'tensor%' then 0.005 else 0.003 end;

-- What to expect of a card, by the words of its model name (the longest that fits wins), bench, convention and link ('' =
-- any). theory = the wire, or memory clock x 2 x bus width / 8; floor = no well card is below it; both in `unit`.
-- A measured value holds only for its convention: bytes copied once, or read and written.
create or replace macro bench_expected() as table
select words, bench, convention, link, theory::double as theory, typical::double as typical, floor::double as floor, unit,
       mem_clock_mhz, bus_bits, source
from (values
    ('b300',             'hbm', 'read_plus_write', '',         8000.0, 6164.0, 4623.0, 'GB/s', 3906, 8192, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('gb300',            'hbm', 'read_plus_write', '',         8000.0, 6030.0, 4522.0, 'GB/s', 3906, 8192, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('b200',             'hbm', 'read_plus_write', '',         8000.0, 5430.0, 4072.0, 'GB/s', 3906, 8192, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('h200',             'hbm', 'read_plus_write', '',         4917.0, 3110.0, 2460.0, 'GB/s', 3201, 6144, 'NVIDIA DCGM diag-skus: measured; floor half of theory, as 3/4 of the measured is below that'),
    ('h100 80gb hbm3',   'hbm', 'read_plus_write', '',         3352.0, 2540.0, 1905.0, 'GB/s', 2619, 5120, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('h800',             'hbm', 'read_plus_write', '',         3352.0, 2560.0, 1920.0, 'GB/s', 2619, 5120, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('a100 sxm4 80gb',   'hbm', 'read_plus_write', '',         2039.0, 1564.0, 1173.0, 'GB/s', 1593, 5120, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('a100 pcie 40gb',   'hbm', 'read_plus_write', '',         1555.0, 1293.0,  970.0, 'GB/s', 1215, 5120, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('l40s',             'hbm', 'read_plus_write', '',          864.0,  700.0,  525.0, 'GB/s', 9001,  384, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('a40',              'hbm', 'read_plus_write', '',          696.0,  565.0,  424.0, 'GB/s', 7251,  384, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('a30',              'hbm', 'read_plus_write', '',          933.0,  780.0,  585.0, 'GB/s', 1215, 3072, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('a10g',             'hbm', 'read_plus_write', '',          600.0,  484.0,  363.0, 'GB/s', 6251,  384, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('l4',               'hbm', 'read_plus_write', '',          300.0,  265.0,  199.0, 'GB/s', 6251,  192, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('t4',               'hbm', 'read_plus_write', '',          320.0,  244.0,  183.0, 'GB/s', 5001,  256, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('v100',             'hbm', 'read_plus_write', '',          898.0,  810.0,  607.0, 'GB/s',  877, 4096, 'NVIDIA DCGM diag-skus: measured; floor 3/4 of it'),
    ('h200',             'h2d', 'copied_once',     'pcie5x16',   63.0,   55.4,   48.0, 'GB/s', null, null, 'ml-engineering: measured; floor of Azure''s node health checks'),
    ('h200',             'd2h', 'copied_once',     'pcie5x16',   63.0,   55.1,   48.0, 'GB/s', null, null, 'ml-engineering: measured; floor of Azure''s node health checks'),
    ('h100 80gb hbm3',   'h2d', 'copied_once',     'pcie5x16',   63.0,   54.8,   48.0, 'GB/s', null, null, 'a vendor''s measurement; floor of Azure''s node health checks'),
    ('a100',             'h2d', 'copied_once',     'pcie4x16',   31.5,   25.9,   21.0, 'GB/s', null, null, 'superbench-results: mean of 1,939 nodes; floor of Azure''s node health checks'),
    ('a100',             'd2h', 'copied_once',     'pcie4x16',   31.5,   26.0,   21.0, 'GB/s', null, null, 'superbench-results: mean of 1,939 nodes; floor of Azure''s node health checks'),
    ('v100',             'h2d', 'copied_once',     'pcie3x16',   15.8,   null,    9.0, 'GB/s', null, null, 'floor of Azure''s node health checks'),
    ('v100',             'd2h', 'copied_once',     'pcie3x16',   15.8,   null,    9.0, 'GB/s', null, null, 'floor of Azure''s node health checks'),
    ('mi300x',           'h2d', 'copied_once',     'pcie5x16',   63.0,   null,   48.0, 'GB/s', null, null, 'floor of Azure''s node health checks'),
    ('h200',             'p2p', 'copied_once',     'nvlink',    450.0,  396.4,  335.0, 'GB/s', null, null, 'ml-engineering: measured; floor of Azure''s node health checks'),
    ('h100 80gb hbm3',   'p2p', 'copied_once',     'nvlink',    450.0,  380.0,  335.0, 'GB/s', null, null, 'NVIDIA/nccl issue 1264; floor of Azure''s node health checks'),
    ('a100',             'p2p', 'copied_once',     'nvlink',    300.0,  276.0,  235.0, 'GB/s', null, null, 'nvbandwidth''s example; floor of Azure''s node health checks'),
    ('h200', 'nvbandwidth', 'copied_once:device_to_device_memcpy_write_ce:slowest_of_7', '', 450.0, 396.4, 335.0, 'GB/s', null, null, 'ml-engineering: measured; floor of Azure''s node health checks'),
    ('h100 80gb hbm3', 'nvbandwidth', 'copied_once:device_to_device_memcpy_write_ce:slowest_of_7', '', 450.0, 380.0, 335.0, 'GB/s', null, null, 'NVIDIA/nccl issue 1264; floor of Azure''s node health checks'),
    ('a100 sxm4 80gb', 'nvbandwidth', 'copied_once:device_to_device_memcpy_write_ce:slowest_of_7', '', 300.0, 276.0, 235.0, 'GB/s', null, null, 'nvbandwidth''s example; floor of Azure''s node health checks'),
    ('h200', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes', '', null, 473.1, 274.0, 'GB/s', null, null, 'ml-engineering: measured, NVLS; floor 3/4 of its ring'),
    ('h100 80gb hbm3', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes', '', null, 479.7, 274.0, 'GB/s', null, null, 'a vendor''s measurement, NVLS; floor that of the H200, which has the same links'),
    ('b200', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes', '', null, 838.0, 511.0, 'GB/s', null, null, 'ml-engineering: measured, NVLS; floor 3/4 of its ring'),
    ('a100 sxm4 80gb', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes', '', 300.0, 235.0, 176.0, 'GB/s', null, null, 'superbench-results: golden mean; floor 3/4 of it'),
    ('h200', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes_algo_ring', '', 450.0, 365.6, 274.0, 'GB/s', null, null, 'ml-engineering: measured; floor 3/4 of it'),
    ('b200', 'all_reduce_perf', 'busbw_8_cards_8589934592_bytes_algo_ring', '', 900.0, 682.2, 511.0, 'GB/s', null, null, 'ml-engineering: measured; floor 3/4 of it')
) e(words, bench, convention, link, theory, typical, floor, unit, mem_clock_mhz, bus_bits, source);

-- The floor of each card model, bench, convention and link.
create or replace macro bench_floors(as_of) as table
with model as (
    select distinct model, ' ' || trim(regexp_replace(lower(model), '[^a-z0-9]+', ' ', 'g')) || ' ' as words
    from card_list(as_of) where model is not null
)
select m.model, e.bench, e.convention, e.link, max_by(e.floor, length(e.words)) as floor,
       max_by(e.source, length(e.words)) as floor_source
from model m join bench_expected() e on contains(m.words, ' ' || e.words || ' ')
group by m.model, e.bench, e.convention, e.link;

-- What series were held against before, each epoch (driver and firmware) but that of their baseline now, as it last was.
create or replace macro bench_bases_before() as table
select f.node, f.entity, f.key, f.epoch, max_by(f.value, f.replaced_at) as base
from baseline_before f join baseline b on b.node = f.node and b.entity = f.entity and b.key = f.key and b.epoch <> f.epoch
where f.value > 0 and (f.state in ('accepted', 'frozen') or f.n >= 8)
group by f.node, f.entity, f.key, f.epoch;

-- Every series (one bench, version, convention, parameters and link on one entity), with its newest ok result:
--   d         ln(value / own baseline), below 0 = worse, also where less is better; NULL without a baseline that counts
--   c         the median d of its peers: same model and key on other hosts, where there are enough also the same driver, and
--             held against their baselines of the same epoch, though some have a newer one by now; NULL = too few
--   net       d less what the peers lost too: what hit all is not this card
--   s, down   its scatter as a part of the value; whether net is below the gate
--   correlated  the newest run was asked for less than five minutes after another: what disturbed that one may still be
--             there, so that it is no evidence of its own
--   cards     the model whose expected values hold: of the card, or the only one of the host's cards
--   host_down half of the cards of its host, and at least two, are down in this round: that is the host's trouble
create or replace macro bench_series(as_of) as table
with lim as (
    select node, model,
           max(value) filter (name = 'warn_ratio') as warn_ratio, max(value) filter (name = 'noise_z') as noise_z,
           max(value) filter (name = 'noise_floor') as noise_floor, max(value) filter (name = 'min_n') as min_n,
           max(value) filter (name = 'peer_hours') as peer_hours, max(value) filter (name = 'stale_hours') as stale_hours
    from limits where rule = 'bandwidth_regression' group by node, model
),
run as (
    select node, entity, bench, version, convention, params_hash, link, any_value(unit) as unit,
           max(ts) as any_at, max_by(status, ts) as last_status,
           max(ts) filter (good) as ok_at, max_by(value, ts) filter (good) as value,
           arg_max_null(spread, ts) filter (good) as run_spread,
           coalesce(arg_max_null(driver, ts) filter (good), '') as driver,
           coalesce(arg_max_null(lease, ts) filter (good), '') <> '' as asked,
           max(ts, 2) filter (good) as last2,
           max_by(value, ts, 7) filter (good and value > 0) as last7
    from (select *, status = 'ok' and value is not null as good from bench_samples()
          where ts > as_of - interval 7 day and ts <= as_of)
    group by node, entity, bench, version, convention, params_hash, link
),
keyed as (
    select *, bench_key(bench, version, convention, params_hash, link) as key, unit in ('us', 'ms', 's') as less_is_better,
           asked and len(last2) = 2 and last2[1] < last2[2] + interval 5 minute as correlated
    from run
),
thing as (
    select node, entity, coalesce(model, '') as model from card_list(as_of)
    union
    select node, entity, '' from run where entity not like 'gpu:%'
),
alone as (select node, min(model) as model from card_list(as_of) group by node having min(model) = max(model)),
series as (
    select t.node, t.entity, t.model, coalesce(nullif(t.model, ''), o.model) as cards, r.* exclude (node, entity, last2), l.* exclude (node, model),
           b.value as base, b.spread as base_spread, b.n as base_n, b.state as base_state, b.epoch as base_epoch,
           r.ok_at > as_of - to_hours(l.stale_hours::bigint)  as current,
           r.ok_at > as_of - to_hours(l.peer_hours::bigint)   as recent,
           b.state in ('accepted', 'frozen') or b.n >= l.min_n as has_base
    from thing t
    join lim l on l.node = t.node and l.model = t.model
    left join alone o on o.node = t.node
    left join keyed r on r.node = t.node and r.entity = t.entity
    left join baseline b on b.node = t.node and b.entity = t.entity and b.key = r.key
),
rated as (
    select *, case when current and has_base and value > 0 and base > 0
                   then if(less_is_better, ln(base / value), ln(value / base)) end as d,
           greatest(1.4826 * coalesce(base_spread, 0), noise_floor, bench_noise(bench)) as s_own
    from series
),
wide as (
    select model, key, median(d) as c, count(*) as n, median(s_own) as s from rated
    where d is not null and recent group by model, key
),
narrow as (
    select model, key, driver, median(d) as c, count(*) as n from rated where d is not null and recent
    group by model, key, driver
),
alike as (
    select model, key, driver, epoch, median(d) as c, count(*) as n
    from (
        select model, key, driver, base_epoch as epoch, d from rated where d is not null and recent
        union all
        select r.model, r.key, r.driver, b.epoch, if(r.less_is_better, ln(b.base / r.value), ln(r.value / b.base))
        from rated r join bench_bases_before() b on b.node = r.node and b.entity = r.entity and b.key = r.key
        where r.d is not null and r.recent
    )
    group by model, key, driver, epoch
),
own as (
    select node, model, key, count(*) as n from rated where d is not null and recent group by node, model, key
),
compared as (
    select r.*, coalesce(o.n, 0) as n_own,
           case when a.n >= greatest(5 + n_own, 2 * n_own + 1) then {'c': a.c, 'n': a.n}
                when k.n >= greatest(5 + n_own, 2 * n_own + 1) then {'c': k.c, 'n': k.n}
                when w.n >= greatest(5 + n_own, 2 * n_own + 1) then {'c': w.c, 'n': w.n}
                else {'c': null, 'n': coalesce(w.n, 0)} end as peers,
           peers['c'] as c, peers['n'] - n_own as n_peers,
           greatest(r.s_own, coalesce(r.run_spread, 0), 0.7 * coalesce(w.s, 0)) as s
    from rated r
    left join alike a on a.model = r.model and a.key = r.key and a.driver = r.driver and a.epoch = r.base_epoch
    left join wide w on w.model = r.model and w.key = r.key
    left join narrow k on k.model = r.model and k.key = r.key and k.driver = r.driver
    left join own o on o.node = r.node and o.model = r.model and o.key = r.key
),
judged as (
    select * exclude (peers, n_own), d - least(coalesce(c, 0), 0) as net, greatest(1 - warn_ratio, least(noise_z * s, 0.9)) as gate,
           net < ln(1 - gate) as down
    from compared
),
host as (
    select node, model, key, count(*) as n, count(*) filter (down) as n_down, median(net) as net,
           min_by(ok_at, entity) as ok_at, min_by(ok_at, entity) filter (down) as down_at, bool_or(asked) as asked
    from judged where d is not null and recent and entity like 'gpu:%'
    group by node, model, key
)
select j.*, h.n as host_n, h.n_down as host_n_down, h.net as host_net, h.ok_at as host_ok_at, h.down_at as host_down_at,
       h.asked as host_asked,
       j.entity like 'gpu:%' and coalesce(h.n_down >= greatest(2, (h.n + 1) // 2), false) as host_down
from judged j
left join host h on h.node = j.node and h.model = j.model and h.key = j.key;
