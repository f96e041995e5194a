-- What the rules about network ports share. Rows of the probe are not read here: a macro binds its tables when it is made.

-- Every port that a node has, or was seen to use since its expectation was set; one row per port, whatever it is called by
-- now. A port is the same by its GUID; a device that was replaced is the same by its place on the bus. in_use: it was
-- active since the expectation was set, so it should be. best_gbps: the fastest it was since then.
create or replace macro port_list(as_of) as table
with told as (
    select i.node, i.entity, i.valid_from, coalesce(i.valid_to > as_of, true) as listed,
           coalesce(i.valid_to, as_of) >= coalesce(e.set_at, i.valid_from)    as counts,
           json_extract_string(i.attributes, ['$.guid', '$.pci', '$.port', '$.link_layer', '$.netdev', '$.in_use',
                                              '$.rate_gbps_active'])          as a
    from inventory i
    left join (select node, max(set_at) as set_at from expected_at(as_of) group by node) e on e.node = i.node
    where i.kind = 'port' and i.valid_from <= as_of
),
by_guid as (
    select node, max_by(entity, valid_from) as entity, max_by(a[1], valid_from) as guid, max_by(a[2], valid_from) as pci,
           a[3] as port, max_by(a[4], valid_from) as link_layer, max_by(a[5], valid_from) as netdev,
           bool_or(listed) as listed, max(valid_from) as seen_at,
           coalesce(bool_or(a[6] = 'true') filter (counts), false) as in_use,
           max(try_cast(a[7] as double)) filter (counts)           as best_gbps
    from told
    group by node, coalesce(a[1], a[2], entity), a[3]
),
by_place as (
    select node, port, max_by(entity, rank) as entity, max_by(guid, rank) as guid, max_by(pci, rank) as pci,
           max_by(link_layer, rank) as link_layer, max_by(netdev, rank) as netdev, bool_or(listed) as listed,
           max(seen_at) as seen_at, bool_or(in_use) as in_use, max(best_gbps) as best_gbps
    from (select *, epoch(seen_at) + if(listed, 1e11, 0) as rank from by_guid)
    group by node, coalesce(pci, guid, entity), port
)
select * exclude (entity, seen_at),
       -- the name of one that is gone may be another's by now
       if(row_number() over (partition by node, entity order by listed desc, seen_at desc) = 1, entity,
          format('port:{}/{}', coalesce(pci, guid, 'gone'), port)) as entity
from by_place
where listed or in_use;

-- The model of each node's cards, by which limits may differ.
create or replace macro port_model(as_of) as table
    select node, coalesce(max(model), '') as model from card_list(as_of) group by node;

-- Growth of a counter over a span of samples; 0 when it fell anywhere on the way: that is a reset, or a bad sample.
create or replace macro counter_growth(first_value, last_value, lowest, highest) as
    case when lowest = first_value and highest = last_value then last_value::bigint - first_value::bigint
         when lowest is not null then 0 end;
