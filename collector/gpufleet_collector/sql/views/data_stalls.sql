-- How long jobs waited for data, minute by minute over the last hour: share, cause, and whether one node or the whole job waits.
create or replace view main.data_stalls as
select job_id as job, job_kind, user, loader, until_at - interval 1 minute as minute, share, code,
       if(code in ('nfs_hung', 'storage', 'cpu_preparation', 'remote_or_lock', 'no_workers', 'unexplained', 'suspect'), cause, null) as cause,
       scope, ranks, waiting_ranks, rank_numbers, nodes, waiting_nodes, if(scope = 'node', first_node, null) as node,
       n as fetches, wait_ms, util as util_pct, io as psi_io, cpu as psi_cpu
from data_waits(time_bucket(interval 1 minute, (now() at time zone 'UTC')::timestamp - interval 1 hour),
                time_bucket(interval 1 minute, (now() at time zone 'UTC')::timestamp))
where hook or code = 'suspect'
order by minute desc, share desc;
