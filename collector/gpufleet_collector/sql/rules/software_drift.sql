/*
title         = "Software or firmware differs from its peers"
scope         = "node"
every         = "5m"
for           = "2 of 2"
max_severity  = "warn"
runbook       = "software_drift"

[limits]
nodes         = { value = 5,     source = "own choice: fewer nodes are no majority" }
majority      = { value = 0.8,   source = "own choice" }
moving_share  = { value = 0.05,  source = "own choice: so many nodes changed at once are an update that is under way" }
moving_s      = { value = 86400, source = "own choice: an update that rests for a day has ended" }
*/

-- Driver and kernel of a node, VBIOS, InfoROM and GSP firmware of its cards, against the nodes with the same model of card in
-- the same pool (label `pool` of the host, where there is one). What most of them have is how it should be. While many of
-- them change, nothing is said about that item. The newest inventory speaks; a node that is not heard is unknown.
create or replace macro find_software_drift(as_of) as table
with item as (
    select node, entity, kind, model, valid_from, valid_to,
           unnest(if(kind = 'node', ['driver_version', 'kernel'], ['vbios', 'inforom', 'gsp_firmware'])) as attribute,
           unnest(if(kind = 'node', json_extract_string(attributes, ['$.driver_version', '$.kernel']),
                     json_extract_string(attributes, ['$.vbios', '$.inforom', '$.gsp_firmware']))) as value
    from inventory
    where kind in ('node', 'gpu') and valid_from <= as_of
      and (valid_to is null or valid_to > as_of - interval 30 day)
),
now as (select * from item where (valid_to is null or valid_to > as_of) and value <> ''),
member as (
    select c.node, c.model, any_value(p.pool) as pool
    from (select node, mode(model) as model from card_list(as_of) where installed and model is not null group by node) c
    left join (select node, max_by(json_extract_string(attributes, '$."label.pool"'), valid_from) as pool from inventory
               where kind = 'node' and valid_from <= as_of and (valid_to is null or valid_to > as_of) group by node) p
           on p.node = c.node
    group by c.node, c.model
),
-- One row per node and item: where its cards differ among themselves, the odd one counts.
told as (
    select m.node, m.model, coalesce(m.pool, '') as pool, n.attribute, n.value, count(*) as parts
    from member m join now n on n.node = m.node and (n.kind = 'node' or n.model = m.model)
    group by m.node, m.model, m.pool, n.attribute, n.value
),
changed as (
    select distinct n.node, n.attribute
    from now n join item b on b.node = n.node and b.entity = n.entity and b.attribute = n.attribute
    join limits_software_drift l on l.node = n.node and l.model = ''
    where b.valid_to is not null and b.valid_to > as_of - to_seconds(l.moving_s) and b.value <> '' and b.value <> n.value
),
votes as (
    select model, pool, attribute, value, count(*) as votes from told group by model, pool, attribute, value
),
crowd as (
    select t.model, t.pool, t.attribute, count(distinct t.node) as nodes, count(distinct c.node) as moving
    from told t left join changed c on c.node = t.node and c.attribute = t.attribute
    group by t.model, t.pool, t.attribute
),
custom as (
    select c.*, v.value, v.votes
    from crowd c
    join (select model, pool, attribute, max_by(value, votes) as value, max(votes) as votes from votes
          group by model, pool, attribute) v using (model, pool, attribute)
),
rated as (
    select t.node, t.attribute, t.value, u.value as usual, u.nodes, u.votes,
           case when u.nodes < l.nodes                                              then 'few_peers'
                when t.value = u.value and u.votes >= l.majority * u.nodes          then 'as_peers'
                when u.moving >= 2 and u.moving >= l.moving_share * u.nodes         then 'update_in_progress'
                when u.votes < l.majority * u.nodes                                 then 'no_majority'
                else 'differs' end as code
    from told t
    join custom u on u.model = t.model and u.pool = t.pool and u.attribute = t.attribute
    join limits_software_drift l on l.node = t.node and l.model = ''
),
ranked as (
    select node,
           max_by(code, case code when 'differs' then 4 when 'update_in_progress' then 3 when 'as_peers' then 2
                                  when 'no_majority' then 1 else 0 end) as code,
           string_agg(format('{} {} where {} of {} nodes have {}', replace(attribute, '_', ' '), value, votes, nodes, usual),
                      '; ' order by attribute) filter (code = 'differs') as words,
           count(distinct attribute) filter (code = 'differs') as differing,
           list(distinct 'inventory.' || attribute) filter (code = 'differs') as bad, list(distinct 'inventory.' || attribute) as seen,
           max(nodes) as nodes, json_group_object(attribute, value) as said
    from rated group by node
),
judged as (
    select n.node, h.received_at, r.* exclude (node, code), unread(f.metrics, r.seen) as lost,
           case when m.node is null then 'no_cards' when h.received_at is null then 'agent_silent'
                when r.code is null then 'not_told' when r.code = 'as_peers' and len(lost) > 0 then 'not_read' else r.code end as code
    from node_list(as_of) n
    left join member m on m.node = n.node
    left join ranked r on r.node = n.node
    left join found_by(as_of) f on f.rule = 'software_drift' and f.node = n.node and f.entity = 'node:'
    left join heard_at(as_of, '2 minutes') h on h.node = n.node
    where n.hello_at is not null
)
select node, 'node:' as entity,
       case when code = 'as_peers' then 'ok' when code = 'differs' then 'warn'
            when code in ('agent_silent', 'not_told', 'not_read') then 'unknown' else 'n/a' end as verdict,
       code, differing::double as observed, 0::double as expected, 'count' as unit, received_at as evidence_at,
       case code when 'as_peers' then format('as its {} peers', nodes - 1) when 'differs' then words
            when 'update_in_progress' then 'many of its peers changed in the last day: an update is under way'
            when 'no_majority' then 'its peers have no version that most of them share'
            when 'few_peers' then format('only {} nodes with such cards', nodes)
            when 'no_cards' then 'no cards' when 'not_told' then 'its versions are not known' when 'not_read' then unread_words(lost)
            else 'nothing heard for two minutes' end as reason,
       -- a key of NULL is left out
       json_merge_patch(coalesce(said, json_object()), json_object('by', if(code = 'differs', noted(bad, lost), null))) as detail
from judged;
