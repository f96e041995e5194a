-- Who holds which card, now: job, user, rank and process; job_id is NULL where the process cannot be seen.
create or replace view main.jobs_now as
select job_id, job_kind, job_step, user, uid, node, gpu_index, gpu_uuid, rank, local_rank, world, command, pid, container,
       mem_used_bytes, age_s
from jobs_at((now() at time zone 'UTC')::timestamp)
order by job_id, node, gpu_index, rank;
