-- Every card that is expected or seen, now: state, age of what is known, last values, findings.
create or replace view main.fleet_now as
select * from cards_at((now() at time zone 'UTC')::timestamp, '10 minutes');
