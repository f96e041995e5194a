"""`fleet limits suggest`: what is measured in several units is not one spread."""

from datetime import datetime

from gpufleet_collector import suggest
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import parse_rule
from gpufleet_collector.store import LIVE, Store

MIXED = """/*
title = "Clocks of most cards, seconds of some"
scope = "gpu"
every = "10s"
for = "1 of 1"
runbook = "mixed"
*/
create or replace macro find_mixed(as_of) as table
select 'gpu-001' as node, 'gpu:' || card as entity, 'ok' as verdict, 'read' as code,
       if(card = 0, 5, 1700 + card)::double as observed, 1755::double as expected,
       if(card = 0, 's', 'MHz') as unit, as_of as evidence_at, '' as reason, '{}' as detail
from range(8) cards(card)
order by card
"""


def test_only_what_is_in_the_unit_of_most_is_compared() -> None:
    store = Store.open(None)
    rule = parse_rule("mixed", MIXED)
    judge = Judge(store, JudgeSettings(), rules=[rule])
    now = datetime(2026, 3, 1, 12)
    with store.reader(LIVE) as read:
        found = suggest.suggest(read, now, {"mixed": rule}, judge.policies, "mixed", 3600, store.tables)
    store.close()
    observed = found["observed"]
    assert isinstance(observed, dict)
    assert (found["unit"], found["entities"], observed["min"]) == ("MHz", 7, 1701)
