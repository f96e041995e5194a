-- Tables the judge keeps about itself.

-- Every rule this collector has, and how its last run went. One row per rule.
create table if not exists live.rule (
    rule varchar not null, title varchar not null, scope varchar not null, runbook varchar not null,
    every_s double not null, "for" varchar not null, clear_after_s double not null,
    shadow boolean not null,             -- judged and recorded, but changes no state and opens no incident
    enabled boolean not null,
    status varchar not null,             -- ok | n/a: no such probe | failed | too slow | disabled
    error varchar not null,              -- one line; empty when ok
    run_at timestamp, seconds double,    -- last run
    ok bigint, warn bigint, crit bigint, unknown bigint, na bigint,      -- entities by verdict in that run
);

-- Baselines that were learned anew after another driver or firmware, or moved by a person, as they were before.
create table if not exists live.baseline_before (
    node varchar not null, entity varchar not null, key varchar not null, value double not null, spread double,
    n bigint not null, epoch varchar not null, state varchar not null, set_by varchar not null,
    set_at timestamp not null, reason varchar not null, replaced_at timestamp not null,
);

create sequence if not exists live.finding_id;

-- The collector's own certificate, as its file last said; no row without TLS.
create table if not exists live.certificate (
    valid_from timestamp not null, valid_to timestamp not null, read_at timestamp not null,
);
