/*
title         = "Training waits for data"
scope         = "job"
every         = "30s"
weight        = 8
for           = "3 of 5"
clear_after   = "3m"
runbook       = "data_starved"

[limits]
warn_share    = { value = 0.10,  source = "as tools inside the trainer have it: 10 % of a step" }
crit_share    = { value = 0.20,  source = "as tools inside the trainer have it: 20 % of a step" }
min_fetches   = { value = 20,    source = "as tools inside the trainer have it" }
min_wait_ms   = { value = 2,     source = "below it the share is that of a very short step" }
node_gap      = { value = 0.10,  source = "own choice: so much more than the other ranks" }
psi_io        = { value = 0.10,  source = "own choice: part of the time in which a task waited for I/O" }
psi_cpu       = { value = 0.20,  source = "own choice: part of the time in which a task waited for a CPU" }
workers_disk  = { value = 0.30,  source = "own choice: part of the workers in uninterruptible sleep" }
workers_run   = { value = 0.80,  source = "own choice: part of the workers that want a CPU" }
workers_sleep = { value = 0.50,  source = "own choice: most of them sleep" }
nfs_rtt_ms    = { value = 30,    source = "own choice: a healthy server answers in a few ms" }
nfs_rtt_times = { value = 3,     source = "own choice: so many times the mount's own mean since it was mounted" }
nfs_rtt_least_ms = { value = 5,  source = "own choice: below it a multiple of very little says nothing" }
nfs_retrans   = { value = 0.01,  source = "own choice: requests sent again" }
suspect_util  = { value = 70,    source = "own choice: without the hook only cards that are far from busy" }
suspect_power = { value = 0.60,  source = "own choice: median power against the job's own busy power" }
*/

-- Whole minutes, by their ends, to which a sample belongs: its own, and those that begin at most overlap_s after it.
-- So a counter's first sample in a minute is the last one before it, and the minute is covered whole.
create or replace macro minutes_of(ts, overlap_s) as
    generate_series(time_bucket(interval 1 minute, ts) + interval 1 minute,
                    time_bucket(interval 1 minute, ts + to_seconds(overlap_s)) + interval 1 minute, interval 1 minute);

-- End of the newest minute that is over long enough for its samples to be in.
create or replace macro last_minute(as_of) as time_bucket(interval 1 minute, as_of::timestamp - interval 15 second);

-- Growth of a counter over samples; NULL when it fell anywhere on the way. Seconds waited may exceed those that
-- passed: they are told when the wait is over.
create or replace macro grown(lowest, first_value, last_value, highest) as
    case when lowest = first_value and highest = last_value then highest - lowest end;

-- How each job waited for data in each whole minute that ends after `since` and not after `until`: how much, on which
-- ranks, whether the cards idled for it, and why. A job is judged by its loader hook; without one it may at most look
-- suspicious. One record per job (Slurm: over all nodes, job_node '') and minute, with what is behind it.
create or replace macro data_waits(since, until) as table
with holds as (
    select distinct j.node, if(j.job_kind = 'slurm', '', j.node) as job_node, j.job_kind, j.job_id,
           coalesce(j.user, j.uid::varchar) as user, j.pid, j.pid_start, j.gpu_uuid, j.until_at
    from (select *, unnest(minutes_of(ts, 90)) as until_at
          from job where ts > since - interval 4 minute and ts < until and job_id is not null) j
    where j.until_at > since and j.until_at <= until
),
process as (
    select node, job_node, job_kind, job_id, any_value(user) as user, pid, pid_start, until_at, list(distinct gpu_uuid) as cards
    from holds group by node, job_node, job_kind, job_id, pid, pid_start, until_at
),
-- ---- how much each rank waited, as its hook says
loaded as (
    select l.node, l.pid, l.pid_start, l.loader, l.until_at, count(*) as samples, max_by(l.rank, l.ts) as rank,
           max_by(l.workers, l.ts) as workers,
           grown(min(fetches_total), min_by(fetches_total, ts), max_by(fetches_total, ts), max(fetches_total)) as n,
           grown(min(wait_s_total), min_by(wait_s_total, ts), max_by(wait_s_total, ts), max(wait_s_total)) as wait_s,
           grown(min(busy_s_total), min_by(busy_s_total, ts), max_by(busy_s_total, ts), max(busy_s_total)) as busy_s
    from (select *, unnest(minutes_of(ts, 20)) as until_at
          from loader
          where ts > since - interval 2 minute and ts < until and source = 'hook' and role = 'train'
            and coalesce(state, 'live') <> 'closed') l
    where l.until_at > since and l.until_at <= until
    group by l.node, l.pid, l.pid_start, l.loader, l.until_at
),
-- a process with two loaders waits for both, and is busy between them
rank as (
    select p.*, string_agg(distinct l.loader, '+' order by l.loader) as loader, max(l.rank) as rank,
           max(l.n) as n, sum(l.wait_s) as wait_s,
           greatest(max(l.wait_s + l.busy_s), sum(l.wait_s)) as whole_s,
           bool_or(l.samples < 2 or l.n is null or l.wait_s is null or l.busy_s is null) as unread,
           max(l.workers) as workers
    from process p
    join loaded l on l.node = p.node and l.pid = p.pid and l.pid_start = p.pid_start and l.until_at = p.until_at
    group by all
),
share as (select *, wait_s / nullif(whole_s, 0) as share from rank),
bound as (
    select p.job_node, p.job_id, p.until_at, min(l.warn_share) as warn_share, min(l.crit_share) as crit_share,
           min(l.min_fetches) as min_fetches, min(l.min_wait_ms) as min_wait_ms, min(l.node_gap) as node_gap,
           min(l.psi_io) as psi_io, min(l.psi_cpu) as psi_cpu, min(l.workers_disk) as workers_disk,
           min(l.workers_run) as workers_run, min(l.workers_sleep) as workers_sleep, min(l.nfs_rtt_ms) as nfs_rtt_ms,
           min(l.nfs_rtt_times) as nfs_rtt_times, min(l.nfs_rtt_least_ms) as nfs_rtt_least_ms,
           min(l.nfs_retrans) as nfs_retrans, min(l.suspect_util) as suspect_util, min(l.suspect_power) as suspect_power
    from process p
    join limits_data_starved l on l.node = p.node and l.model = ''
    group by p.job_node, p.job_id, p.until_at
),
-- the lower median: of two ranks the one that waits less is the other's peer
middle as (
    select s.job_node, s.job_id, s.until_at, quantile_disc(s.share, 0.5) as median, count(*) as ranks,
           count(distinct s.node) as nodes, sum(s.n)::double as n, bool_and(s.unread) as unread
    from share s group by s.job_node, s.job_id, s.until_at
),
apart as (
    select s.*, m.median, m.ranks, m.nodes, m.n as job_n, m.unread as job_unread, b.warn_share,
           m.ranks > 1 and m.median < b.warn_share and s.share - m.median >= b.node_gap as alone
    from share s
    join middle m using (job_node, job_id, until_at)
    join bound b using (job_node, job_id, until_at)
),
placed as (
    select a.*, n.alone_ranks, n.alone_nodes, h.ranks_here
    from apart a
    join (select job_node, job_id, until_at, count(*) filter (alone) as alone_ranks,
                 count(distinct node) filter (alone) as alone_nodes
          from apart group by job_node, job_id, until_at) n using (job_node, job_id, until_at)
    join (select job_node, job_id, until_at, node, count(*) as ranks_here
          from apart group by job_node, job_id, until_at, node) h using (job_node, job_id, until_at, node)
),
-- who waits: the ranks that stand apart from the others if there are any, else all
waiting as (select * from placed where alone_ranks = 0 or alone),
hooked as (
    select job_node, job_id, until_at, any_value(job_kind) as job_kind, any_value(user) as user,
           any_value(loader) as loader, sum(wait_s) / nullif(sum(whole_s), 0) as share, sum(n)::double as n,
           1000 * sum(wait_s) / nullif(sum(n), 0) as wait_ms, any_value(median) as median, any_value(ranks) as ranks,
           any_value(nodes) as nodes, any_value(job_n) as job_n, any_value(job_unread) as unread,
           count(*) as waiting_ranks, count(distinct node) as waiting_nodes, min(node) as first_node,
           list(distinct rank order by rank)[:8] as rank_numbers,
           -- with one node there is no other to compare it with; a rank beside others that do not wait may have a slow shard
           if(any_value(alone_nodes) = 1 and any_value(nodes) > 1 and any_value(alone_ranks) >= least(any_value(ranks_here), 2),
              'node', 'job') as scope,
           bool_and(workers = 0) as no_workers
    from waiting group by job_node, job_id, until_at
),
-- every process that a job's verdict rests on: of those with a hook the ones that wait, else all
member as (
    select job_node, job_id, until_at, node, pid, pid_start, cards, true as hook from waiting
    union all
    select p.job_node, p.job_id, p.until_at, p.node, p.pid, p.pid_start, p.cards, false
    from process p
    where not exists (from loaded l where l.until_at = p.until_at and l.node = p.node and l.pid = p.pid)
      and not exists (from hooked h where h.job_node = p.job_node and h.job_id = p.job_id and h.until_at = p.until_at)
),
-- ---- what the node says
span as (
    select h.node, h.until_at,
           epoch(max(ts) - min(ts)) as seconds,
           counter_span(min(psi_io_some_s_total), min_by(psi_io_some_s_total, ts), max_by(psi_io_some_s_total, ts),
                        max(psi_io_some_s_total), epoch(max(ts) - min(ts))) as io_s,
           counter_span(min(psi_cpu_some_s_total), min_by(psi_cpu_some_s_total, ts), max_by(psi_cpu_some_s_total, ts),
                        max(psi_cpu_some_s_total), epoch(max(ts) - min(ts))) as cpu_s,
           max_by(cpu_governor, ts) as governor, avg(cpu_clock_median_mhz) as mhz
    from (select *, unnest(minutes_of(ts, 15)) as until_at
          from host where ts > since - interval 2 minute and ts < until) h
    where h.until_at > since and h.until_at <= until
    group by h.node, h.boot_id, h.until_at
),
-- the pressure that the job's own cgroup feels says more than that of the whole host
felt as (
    select node, job_node, job_id, until_at, max(io_s / nullif(seconds, 0)) as io, max(cpu_s / nullif(seconds, 0)) as cpu
    from (
        select j.node, if(j.job_kind = 'slurm', '', j.node) as job_node, j.job_id, j.until_at,
               epoch(max(j.ts) - min(j.ts)) as seconds,
               counter_span(min(psi_io_some_s_total), min_by(psi_io_some_s_total, j.ts), max_by(psi_io_some_s_total, j.ts),
                            max(psi_io_some_s_total), epoch(max(j.ts) - min(j.ts))) as io_s,
               counter_span(min(psi_cpu_some_s_total), min_by(psi_cpu_some_s_total, j.ts), max_by(psi_cpu_some_s_total, j.ts),
                            max(psi_cpu_some_s_total), epoch(max(j.ts) - min(j.ts))) as cpu_s
        from (select *, unnest(minutes_of(ts, 35)) as until_at
              from job where ts > since - interval 2 minute and ts < until and job_id is not null) j
        where j.until_at > since and j.until_at <= until
        group by j.node, j.job_kind, j.job_id, j.pid, j.pid_start, j.until_at
    )
    group by node, job_node, job_id, until_at
),
worker as (
    select l.node, l.pid, l.pid_start, time_bucket(interval 1 minute, l.ts) + interval 1 minute as until_at,
           avg(l.workers) as workers, avg(l.workers_disk) as disk, avg(l.workers_running) as running,
           avg(l.workers_sleeping) as sleeping
    from loader l
    where l.ts >= since and l.ts < until and l.source = 'proc' and l.workers > 0
    group by l.node, l.pid, l.pid_start, time_bucket(interval 1 minute, l.ts)
),
minute as (select unnest(generate_series(since + interval 1 minute, until, interval 1 minute)) as until_at),
server as (
    select m.until_at, e.node, json_extract_string(e.detail, '$.server') as server, max_by(e.code, e.ts) as code, max(e.ts) as ts
    from event e join minute m on e.ts < m.until_at and e.ts >= m.until_at - interval 1 day
    where e.kind = 'nfs' and e.ts > since - interval 1 day and e.ts < until
    group by m.until_at, e.node, server
),
mounted as (
    select m.node, m.until_at, m.mount, bool_or(m.canary_state = 'hung' and m.ts >= m.until_at - interval 1 minute) as hung,
           grown(min(nfs_retransmits_total), min_by(nfs_retransmits_total, ts), max_by(nfs_retransmits_total, ts),
                 max(nfs_retransmits_total)) as retransmits,
           grown(min(ops), min_by(ops, ts), max_by(ops, ts), max(ops)) as ops,
           grown(min(rtt_s), min_by(rtt_s, ts), max_by(rtt_s, ts), max(rtt_s)) as rtt_s,
           -- what it usually takes costs no look back: the counters go on since it was mounted
           if(min_by(ops, ts) >= 100000, min_by(rtt_s / nullif(ops, 0), ts), null) as usual_s
    from (select *, coalesce(nfs_read_ops_total, 0)::double + coalesce(nfs_getattr_ops_total, 0)
                     + coalesce(nfs_lookup_ops_total, 0) as ops,
                 coalesce(nfs_read_rtt_s_total, 0) + coalesce(nfs_getattr_rtt_s_total, 0) + coalesce(nfs_lookup_rtt_s_total, 0) as rtt_s,
                 unnest(minutes_of(ts, 35)) as until_at
          from mount_samples() where ts > since - interval 2 minute and ts < until) m
    where m.until_at > since and m.until_at <= until
    group by m.node, m.mount, m.until_at
),
remote as (
    select node, until_at, string_agg(distinct name, ', ' order by name) filter (hung) as hung_name,
           1000 * max(rtt_s / nullif(ops, 0)) filter (ops >= 50) as rtt_ms,
           max_by(rtt_s / nullif(ops, 0) / nullif(usual_s, 0), rtt_s / nullif(ops, 0)) filter (ops >= 50) as rtt_times,
           max(retransmits / nullif(ops, 0)) filter (ops >= 50) as retrans
    from (
        select node, until_at, mount as name, hung, rtt_s, ops, retransmits, usual_s from mounted
        union all
        select node, until_at, coalesce(server, 'a server'),
               code = 'not_responding' or (code = 'timed_out' and ts >= until_at - interval 1 minute), null, null, null, null
        from server
    )
    group by node, until_at
),
-- ---- the evidence of the members, summed up
signal as (
    select m.job_node, m.job_id, m.until_at, bool_or(m.hook) as hook, string_agg(distinct r.hung_name, ', ') as hung_name,
           max(r.rtt_ms) as rtt_ms, max_by(r.rtt_times, r.rtt_ms) as rtt_times, max(r.retrans) as retrans,
           avg(coalesce(f.io, s.io_s / nullif(s.seconds, 0))) as io, avg(coalesce(f.cpu, s.cpu_s / nullif(s.seconds, 0))) as cpu,
           sum(w.disk) / sum(w.workers) as disk, sum(w.running) / sum(w.workers) as running,
           sum(w.sleeping) / sum(w.workers) as sleeping, count(w.workers) as watched,
           string_agg(distinct s.governor, '+' order by s.governor) as governor, min(s.mhz) as mhz,
           count(distinct m.node) as nodes
    from member m
    left join (select node, until_at, max_by(io_s, seconds) as io_s, max_by(cpu_s, seconds) as cpu_s, max(seconds) as seconds,
                      max_by(governor, seconds) as governor, max_by(mhz, seconds) as mhz
               from span group by node, until_at) s on s.node = m.node and s.until_at = m.until_at
    left join felt f on f.node = m.node and f.job_node = m.job_node and f.job_id = m.job_id and f.until_at = m.until_at
    left join worker w on w.node = m.node and w.pid = m.pid and w.pid_start = m.pid_start and w.until_at = m.until_at
    left join remote r on r.node = m.node and r.until_at = m.until_at
    group by m.job_node, m.job_id, m.until_at
),
caused as (
    select s.*, h.share, h.n, h.wait_ms, h.no_workers, b.* exclude (job_node, job_id, until_at),
           case when s.hung_name is not null                                                          then 'nfs_hung'
                when s.io >= b.psi_io or s.disk >= b.workers_disk or s.rtt_ms >= b.nfs_rtt_ms
                  or (s.rtt_times >= b.nfs_rtt_times and s.rtt_ms >= b.nfs_rtt_least_ms)
                  or s.retrans >= b.nfs_retrans                                                        then 'storage'
                when s.cpu >= b.psi_cpu or s.running >= b.workers_run                                  then 'cpu_preparation'
                when h.no_workers                                                                     then 'no_workers'
                when s.sleeping >= b.workers_sleep                                                     then 'remote_or_lock'
                else 'unexplained' end as cause
    from signal s
    join bound b using (job_node, job_id, until_at)
    left join hooked h using (job_node, job_id, until_at)
),
-- ---- whether the cards idled, asked only where it matters
wanted as (
    select distinct m.job_node, m.job_id, m.until_at, m.node, unnest(m.cards) as gpu_uuid
    from member m join caused c using (job_node, job_id, until_at)
    where (c.hook and c.share >= c.warn_share)
       or (not c.hook and c.cause in ('nfs_hung', 'storage', 'cpu_preparation'))
),
card as (
    select w.job_node, w.job_id, w.until_at, w.node, w.gpu_uuid,
           avg(g.util_pct) filter (g.ts >= w.until_at - interval 1 minute) as util,
           avg(g.power_w) filter (g.ts >= w.until_at - interval 1 minute) as power,
           quantile_cont(g.power_w, 0.5) filter (g.ts >= w.until_at - interval 1 minute) as power_p50,
           quantile_cont(g.power_w, 0.95) as power_p95
    from wanted w
    join gpu g on g.node = w.node and g.gpu_uuid = w.gpu_uuid and g.ts >= w.until_at - interval 5 minute and g.ts < w.until_at
    where g.ts >= since - interval 5 minute and g.ts < until and g.state = 'ok'
      and g.ts >= (select min(until_at) - interval 5 minute from wanted)
    group by all
),
idle as (
    select job_node, job_id, until_at, avg(util) as util, avg(power) as power, avg(power_p50) as power_p50,
           avg(power_p95) as power_p95
    from card group by job_node, job_id, until_at
)
select c.until_at, c.job_node, c.job_id, coalesce(h.job_kind, p.job_kind) as job_kind, coalesce(h.user, p.user) as user,
       c.hook, h.loader, h.share, h.n, h.wait_ms, h.median, h.ranks, coalesce(h.nodes, c.nodes) as nodes, h.waiting_ranks,
       h.waiting_nodes, coalesce(h.first_node, p.first_node) as first_node, h.rank_numbers, h.scope, h.unread, c.cause, c.hung_name, c.rtt_ms, c.rtt_times, c.retrans, c.io,
       c.cpu, c.disk, c.running, c.sleeping, c.watched, c.governor, c.mhz, i.util, i.power, i.power_p50, i.power_p95, c.crit_share, c.warn_share,
       case when not c.hook and c.cause in ('nfs_hung', 'storage', 'cpu_preparation')
                 and i.util < c.suspect_util and i.power_p50 < c.suspect_power * i.power_p95   then 'suspect'
            when not c.hook and c.io is null and c.watched = 0                                 then 'no_hook'
            when not c.hook                                                                    then 'no_sign'
            when h.unread                                                                      then 'unreadable'
            when h.job_n = 0                                                                   then 'paused'
            when h.share is null                                                               then 'unreadable'
            when h.job_n < c.min_fetches                                                       then 'few_fetches'
            when h.share < c.warn_share                                                        then 'fed'
            when h.wait_ms < c.min_wait_ms                                                     then 'short_waits'
            when i.util is null and i.power is null                                            then 'no_gpu_evidence'
            when not (coalesce(1 - i.util / 100 >= h.share / 2, false)
                      or coalesce(i.power <= i.power_p95 * (1 - h.share / 2), false))          then 'wait_hidden'
            else c.cause end as code
from caused c
left join hooked h using (job_node, job_id, until_at)
left join idle i using (job_node, job_id, until_at)
left join (select job_node, job_id, until_at, any_value(job_kind) as job_kind, any_value(user) as user,
                  min(node) as first_node
           from process group by job_node, job_id, until_at) p using (job_node, job_id, until_at);

-- The newest whole minute of each job. What all ranks feel is the job's or the storage's and says nothing against a
-- host. When two ranks of one node (or its only one) wait and those of others do not, and storage or CPU of that node are
-- why, that node is the suspect: then the finding is its, and the job has none.
create or replace macro find_data_starved(as_of) as table
with wait as (
    select *,
           code in ('nfs_hung', 'storage', 'cpu_preparation', 'remote_or_lock', 'no_workers', 'unexplained') as bad,
           coalesce(scope = 'node' and code in ('nfs_hung', 'storage', 'cpu_preparation'), false) as of_node
    from data_waits(last_minute(as_of) - interval 1 minute, last_minute(as_of))
),
told as (
    select *, if(share >= crit_share, 'crit', 'warn') as level, waiting_nodes = 1 and nodes > 1 as apart,
           format('{} of {} rank{}{}, {} of {} node{}', waiting_ranks, ranks, if(ranks = 1, '', 's'),
                  if(waiting_ranks < ranks and not apart, format(' ({})', array_to_string(rank_numbers, ',')), ''),
                  waiting_nodes, nodes, if(nodes = 1, '', 's')) as spread,
           case cause when 'nfs_hung' then format('NFS does not answer ({})', hung_name)
                when 'storage' then 'storage is slow (' || concat_ws(', ',
                     if(io >= 0.005, format('tasks wait for I/O {:.0f} % of the time', 100 * io), null),
                     if(disk > 0, format('{:.0f} % of the workers wait for a disk', 100 * disk), null),
                     format('NFS answers in {:.0f} ms{}', rtt_ms, if(rtt_times >= 2, format(', {:.0f} times its own mean', rtt_times), '')),
                     if(retrans >= 0.001, format('{:.1f} % of the NFS requests are sent again', 100 * retrans), null)) || ')'
                when 'cpu_preparation' then 'preparing batches takes more CPU than there is (' || concat_ws(', ',
                     if(cpu is not null, format('tasks wait for a CPU {:.0f} % of the time', 100 * cpu), null),
                     if(running is not null, format('{:.0f} % of the workers want one', 100 * running), null),
                     if(governor <> 'performance', 'governor ' || governor || coalesce(format(', median clock {:.0f} MHz', mhz), ''), null)) || ')'
                when 'remote_or_lock' then format('{:.0f} % of the workers sleep: a remote store, a socket or a lock', 100 * sleeping)
                when 'no_workers' then 'the loader has no workers'
                else 'nothing that was measured says why' end as because,
           json_object('job_id', job_id, 'job_kind', job_kind, 'user', user, 'loader', loader, 'share', share, 'median', median,
                       'scope', scope, 'cause', cause, 'ranks', ranks, 'waiting_ranks', waiting_ranks,
                       'rank_numbers', rank_numbers, 'nodes', nodes, 'waiting_nodes', waiting_nodes, 'first_node', first_node,
                       'fetches', n, 'wait_ms', wait_ms, 'psi_io', io, 'psi_cpu', cpu, 'workers_disk', disk,
                       'workers_running', running, 'workers_sleeping', sleeping, 'nfs', hung_name, 'nfs_rtt_ms', rtt_ms, 'nfs_rtt_times', rtt_times,
                       'cpu_governor', governor, 'cpu_clock_mhz', mhz,
                       'util_pct', util, 'power_w', power, 'power_p95_w', power_p95) as detail
    from wait
),
of_jobs as (
    select job_node as node, 'job:' || job_id as entity,
           case when of_node and bad or code in ('fed', 'wait_hidden', 'no_sign') then 'ok'
                when bad then level when code = 'suspect' then 'warn' when code in ('paused', 'no_hook') then 'n/a'
                else 'unknown' end as verdict,
           if(of_node and bad, 'one_node', code) as code,
           share as observed, warn_share as expected, '1' as unit, until_at as evidence_at,
           case when of_node and bad then format('the ranks of {} wait for data, the others do not: see that node', first_node)
                when bad then format('{} waits for data {:.0f} % of the time on {}: {}{}', loader, 100 * share, spread, because,
                                     if(apart, format('; {} alone, rank {}', first_node, array_to_string(rank_numbers, ',')),
                                        '; the job or its storage, not the nodes'))
                when code = 'suspect' then format('looks as if it waits for data, without a loader hook to say so: cards {:.0f} % busy; {}', util, because)
                when code = 'no_hook' then 'no loader hook says how long it waits for data'
                when code = 'no_sign' then 'no loader hook says how long it waits for data; nothing looks like it'
                when code = 'paused' then 'fetches nothing now: checkpoint, evaluation or start'
                when code = 'fed' then format('waits for data {:.1f} % of the time', 100 * share)
                when code = 'wait_hidden' then format('waits for data {:.0f} % of the time, but its cards do not idle', 100 * share)
                when code = 'few_fetches' then format('{:.0f} batches in a minute are too few to judge', n)
                when code = 'short_waits' then format('waits {:.1f} ms for a batch: the steps are too short to judge', wait_ms)
                when code = 'no_gpu_evidence' then format('waits for data {:.0f} % of the time; whether its cards idle cannot be read', 100 * share)
                else 'its loader cannot be read' end as reason,
           detail
    from told
),
-- One row per node that has ranks with a hook: bad while one of its jobs waits there alone.
of_nodes as (
    select node, 'node:' as entity, if(bad, level, 'ok'), if(bad, cause, 'as_others'), share, warn_share, '1', until_at,
           if(bad, format('rank {} of job {} waits for data {:.0f} % of the time, the other ranks {:.0f} %: {}',
                          array_to_string(rank_numbers, ','), job_id, 100 * share, 100 * median, because),
              'no rank here waits for data while those elsewhere do not'), detail
    from (
        select n.node, coalesce(t.bad, false) as bad, t.* exclude (bad, until_at), n.until_at,
               row_number() over (partition by n.node order by t.share desc nulls last) as place
        from (
            select distinct l.node, last_minute(as_of) as until_at
            from loader l
            where l.ts >= last_minute(as_of) - interval 1 minute and l.ts < last_minute(as_of)
              and l.source = 'hook' and l.role = 'train'
        ) n
        left join told t on t.of_node and t.bad and t.first_node = n.node
    )
    where place = 1
)
from of_jobs
union all
from of_nodes
union all
-- What has a finding and is not heard of any more is unknown, not over; it is over once its host was looked at without it.
select f.node, f.entity, 'unknown', 'agent_silent', null, null, '1', null, 'its agent is silent', null
from finding f
where f.rule = 'data_starved' and f.state <> 'resolved' and f.last_evidence_at <= as_of
  and coalesce(nullif(f.node, ''), json_extract_string(f.detail, '$.first_node'), '') not in (
      select node from agent where probe = 'job' and ok and ts > as_of - interval 150 second and ts <= as_of)
  and not exists (from of_jobs o where o.node = f.node and o.entity = f.entity)
  and not exists (from of_nodes o where o.node = f.node and o.entity = f.entity);
