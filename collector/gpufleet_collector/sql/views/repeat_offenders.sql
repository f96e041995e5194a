-- Cards that are in trouble again and again, by serial across slots and hosts: three incidents in 14 days, or two moves in 30.
create or replace view main.repeat_offenders as
with card as (
    select distinct nullif(trim(serial), '') as serial, entity from main.inventory where kind = 'gpu'
),
trouble as (
    select c.serial, count(distinct f.incident) as incidents, list(distinct f.rule order by f.rule) as rules,
           list(distinct f.node order by f.node) as nodes, max(f.began_at) as last_at
    from main.finding f join card c on c.entity = f.entity
    where f.incident is not null and f.began_at > now()::timestamp - interval 14 day and c.serial is not null
    group by c.serial
),
moved as (
    select serial, count(*) as moves
    from (
        select trim(serial) as serial, (node, pci) is distinct from lag((node, pci)) over w as moved,
               row_number() over w > 1 as later, valid_from
        from main.inventory where kind = 'gpu' and nullif(trim(serial), '') is not null
        window w as (partition by trim(serial), uuid order by valid_from)
    )
    where moved and later and valid_from > now()::timestamp - interval 30 day
    group by serial
)
select coalesce(t.serial, m.serial) as serial, coalesce(t.incidents, 0) as incidents_14d, coalesce(m.moves, 0) as moves_30d,
       coalesce(t.rules, []) as rules, coalesce(t.nodes, []) as nodes, t.last_at
from trouble t full join moved m on m.serial = t.serial
where t.incidents >= 3 or m.moves >= 2
order by incidents_14d desc, moves_30d desc, serial;
