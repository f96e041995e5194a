-- What people said about incidents. Nothing here changes a state: it only says who knows of what.

create sequence if not exists live.incident_act_id;
create sequence if not exists live.silence_id;
create sequence if not exists live.maintenance_id;

-- What people did with an incident, in order; append-only. An acknowledgement is the newest act of its kind: an unack or
-- a close ends it, and so does its own time.
create table if not exists live.incident_act (
    id bigint not null, number bigint not null, acted_at timestamp not null,
    what varchar not null,               -- acknowledged | unacknowledged | noted | closed
    actor varchar not null,
    claimed boolean not null,            -- no certificate said who it was: the caller did
    text varchar not null, until timestamp,                -- NULL = until it is taken back
);

-- What nobody needs to be told again for a while. Findings match that meet every list; an empty list asks nothing.
create table if not exists live.silence (
    id bigint not null, nodes varchar[] not null, rules varchar[] not null, entities varchar[] not null,
    serials varchar[] not null, reason varchar not null, actor varchar not null, claimed boolean not null,
    from_at timestamp not null, until timestamp not null,
    ended_at timestamp, ended_by varchar,                  -- a person ended it before its time
);

-- When people work on nodes: what begins there meanwhile is judged and recorded, and is no news.
create table if not exists live.maintenance (
    id bigint not null, nodes varchar[] not null, reason varchar not null, actor varchar not null,
    claimed boolean not null, set_at timestamp not null, from_at timestamp not null, until timestamp not null,
    ended_at timestamp, ended_by varchar,
);
