-- Tables of the store that do not come from agents' descriptors. Probe tables (gpu, pci, host, agent, bench, ...)
-- are created beside them, in the same schema, when a hello names them; each begins ts, received_at, node, boot_id.
-- All times are naive UTC. Rules name tables unqualified: the judge's search_path decides that they mean these.

create schema if not exists live;    -- hot tables; what the judge reads
create schema if not exists rules;   -- find_<rule> macros and what they share
                                     -- main: views for people

-- What a column means; from the agents' descriptors.
create table if not exists live.metric (
    probe varchar not null, name varchar not null, type varchar not null, unit varchar not null, kind varchar not null,
    low double, high double, help varchar not null, rollup varchar not null,
    position integer not null, first_seen timestamp not null,
);

-- How often a probe runs on a node, seconds (from its last hello).
create table if not exists live.probe (
    node varchar not null, probe varchar not null, interval_s double not null,
);

-- One row per machine the collector has filed, by machine id. A rename keeps the row and changes `node`.
create table if not exists live.node (
    node varchar not null,               -- as filed; may carry a suffix (gpu-a01~bbbb)
    claimed varchar not null,            -- the name it gave itself
    machine_id varchar not null,         -- '' = no identity
    boot_id varchar not null,
    spool_id varchar not null,
    agent_version varchar not null,
    conflict varchar not null,           -- '' or the node it shares a name or machine id with
    first_seen timestamp not null,
    hello_at timestamp not null,         -- last hello, collector's clock
);

-- Names a machine had before.
create table if not exists live.node_alias (before varchar not null, node varchar not null, renamed_at timestamp not null);

-- Things that happened once; the kinds are a closed list.
create table if not exists live.event (
    ts timestamp not null, received_at timestamp not null, node varchar not null, boot_id varchar not null,
    mono_s double, entity varchar not null, kind varchar not null, code varchar not null, count bigint not null,
    message varchar not null, detail json,
);

-- What hosts are made of, with the time it held. Item attributes as JSON of texts.
create table if not exists live.inventory (
    node varchar not null, entity varchar not null, kind varchar not null,
    uuid varchar, serial varchar, pci varchar, model varchar, slot varchar, gpu_index integer,
    attributes json not null,
    valid_from timestamp not null, valid_to timestamp,     -- NULL = holds now
);

-- What should be there. A node's first complete hello is pinned as learned; people make it accepted.
create table if not exists live.expected (
    node varchar not null, uuid varchar, serial varchar, pci varchar, model varchar, slot varchar,
    state varchar not null,              -- learned | accepted
    set_by varchar not null, set_at timestamp not null, reason varchar not null,
);

-- What an entity's bench or clock looks like when it is well: learned, frozen, or accepted by a person.
create table if not exists live.baseline (
    node varchar not null, entity varchar not null, key varchar not null, value double not null, spread double,
    n bigint not null, epoch varchar not null, state varchar not null,      -- learning | frozen | accepted
    set_by varchar not null, set_at timestamp not null, reason varchar not null,
);

-- Thresholds after layering default < model < site < node, one row per node (and model) and name.
create table if not exists live.limits (
    rule varchar not null, name varchar not null, node varchar not null, model varchar not null,
    value double not null, layer varchar not null, source varchar not null,
);

-- A rule's trouble with one entity, after hysteresis. One row per episode; nothing is deleted by clearing.
create table if not exists live.finding (
    id bigint not null, rule varchar not null, node varchar not null, entity varchar not null,
    state varchar not null,              -- pending | firing | recovering | resolved
    verdict varchar not null,            -- worst that k samples reached: warn | crit
    code varchar not null, observed double, expected double, unit varchar, reason varchar not null, detail json,
    evidence json not null,              -- newest first: [[evidence_at, verdict], ...], at most n of "k of n"
    began_at timestamp not null,         -- first violating evidence
    fired_at timestamp, recovering_at timestamp, resolved_at timestamp,
    cause varchar,                       -- why it was resolved
    last_evidence_at timestamp not null, updated_at timestamp not null,
    incident bigint,
);
-- When it and the episodes right before it fired, newest first, and whether that is so often that it is one long trouble.
alter table live.finding add column if not exists flaps json;
alter table live.finding add column if not exists flapping boolean;

-- What a person sees: one cause and its findings.
create table if not exists live.incident (
    number bigint not null, cause_rule varchar not null, node varchar not null, entity varchar not null,
    state varchar not null,              -- open | resolved
    severity varchar not null,           -- warn | crit
    title varchar not null, opened_at timestamp not null, updated_at timestamp not null, resolved_at timestamp,
    cause varchar, reopened bigint not null,
);

-- What happened to an incident, in order; append-only.
create table if not exists live.incident_log (
    number bigint not null, logged_at timestamp not null,
    what varchar not null,               -- opened | reopened | cause_changed | finding_fired | finding_worse |
                                         -- finding_recovering | finding_resolved | grouped | merged | resolved
    finding bigint, text varchar not null,
);

-- Who changed or was refused what; append-only.
create table if not exists live.audit (
    logged_at timestamp not null, actor varchar not null, source varchar not null, verb varchar not null,
    target varchar not null, args json, result varchar not null,
);

-- Which batches are in. Checked and written in the transaction that stores the rows.
create table if not exists live.ledger (
    node varchar not null, spool_id varchar not null, number ubigint not null, digest varchar not null,
    boot_id varchar not null, received_at timestamp not null,
    offset_s double not null,            -- added to the agent's clock to make ts; 0 within 2 s
    lane varchar not null, rows bigint not null,
);

-- What a correct agent would not send; nothing here is in a table of data.
create table if not exists live.quarantine (
    received_at timestamp not null, node varchar not null, spool_id varchar not null, number ubigint not null,
    probe varchar not null, metric varchar not null,       -- '' = the whole row
    reason varchar not null, cells bigint not null, sample varchar not null,
);

-- Why values are NULL; a row on each change.
create table if not exists live.capability (
    node varchar not null, entity varchar not null, probe varchar not null, metric varchar not null,
    reason varchar not null,             -- ok | not_supported | no_permission | failed | implausible | not_read
    code varchar not null, since timestamp not null,
);

-- What the judge last did; one row.
create table if not exists live.judge_state (last_pass_at timestamp not null);
