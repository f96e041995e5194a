-- Cards that are missing now: where they sat, their serial, since when, how (code), and the incident.
create or replace view main.missing_now as
select node, entity, code, reason,
       json_extract_string(detail, '$.gpu_uuid') as gpu_uuid,
       json_extract_string(detail, '$.serial')   as serial,
       json_extract_string(detail, '$.pci')      as pci,
       json_extract_string(detail, '$.slot')     as slot,
       began_at as missing_since, last_evidence_at, 'INC-' || incident as incident
from main.finding
where rule = 'gpu_missing' and state in ('firing', 'recovering')
order by node, entity;
